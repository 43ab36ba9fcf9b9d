"""Decoding of a trace file into columns. A file is a sequence of frames: a varint length and a message of
that many bytes.

A frame of length 0 is a legal message, so only the end of the bytes ends the file. A length is checked
against the remaining bytes, and nothing is allocated for bytes that have not been read. Messages of schema
0.0.4 (= 1.0.0) are decoded a block at a time, each field for all messages of the block at once. A message
that no serialiser would write is first re-encoded in canonical form (:mod:`.canonical`), so that every legal
encoding is read and every other one is an error with its position. Memory: the columns and one block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.history import TAGS_OF_OLD, Signature, looks_old
from hespas.converters.chakra.wire import (
    SLACK,
    AttributeColumns,
    Bools,
    ByteRows,
    ByteWindow,
    EtColumns,
    FileUnit,
    IoColumns,
    Longs,
    copy_spans,
    not_text,
    packed_varints,
    read_varints,
)
from hespas.converters.chakra.wire.canonical import canonical_message
from hespas.converters.chakra.wire.messages import KeyTable, decode_attributes
from hespas.converters.chakra.wire.walk import Cursor, FieldSpans, repeated_spans, tag_of
from hespas.files.limits import limits
from hespas.files.streams import GZIP_MAGIC, PackedInput, damage_errors, open_input, refuse_special_files
from hespas.files.wire import WireError, decode_varint
from hespas.graph.errors import FormatError, InvariantError, UnsupportedError
from hespas.schemas.chakra.tables import GLOBAL_METADATA, NODE, NodeField, WireType

__all__ = [
    "CutOffError",
    "Decoder",
    "FrameBatch",
    "Metadata",
    "TraceSource",
    "decode_io",
    "framed_messages",
    "frames",
    "open_trace",
    "refuse_crowded",
]

_BLOCK_BYTES = 1 << 20
_LENGTH_BYTES = 5
"""Maximum size of a 32-bit varint."""
_FIXED_BYTES = {1: 8, 5: 4}
"""Size of fixed values by wire type."""
_DAMAGED = "write or download the file again: it is damaged or is not a Chakra trace"


class CutOffError(FormatError):
    """Error for a file that ends too early. All nodes before its end are complete."""


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Consecutive messages of a file in one buffer: message ``i`` is at ``start[i]:end[i]`` of ``window``.

    ``position`` is the start of each message's frame in the decompressed file, in ``unit``. ``base`` is the
    file offset of the first byte of the window, and ``file_bytes`` the size of the file if known.
    """

    window: ByteWindow
    start: Longs
    end: Longs
    position: Longs
    base: int = 0
    unit: FileUnit = "byte"
    file_bytes: int | None = None

    def __len__(self) -> int:
        return len(self.start)

    def without_first(self) -> FrameBatch:
        """Return the batch without its first message, which is the metadata."""
        return replace(self, start=self.start[1:], end=self.end[1:], position=self.position[1:])

    def place(self, index: int) -> str:
        """Return the position of one message for an error, such as ``byte 12``."""
        return f"{self.unit} {int(self.position[index])}"

    def message(self, index: int) -> bytes:
        """Return the bytes of one message."""
        return self.window.u8[self.start[index] : self.end[index]].tobytes()


class _PackedTrace:
    """Gzip stream that returns all bytes before the position of a damage, and then raises an error."""

    def __init__(self, stream: BinaryIO, path: Path, max_bytes: int | None) -> None:
        self._stream = PackedInput(stream, path, max_bytes, code="ET001")
        self._path = path
        self._done = 0
        self._damage = ""

    def read(self, size: int) -> bytes:
        """Return up to ``size`` decompressed bytes. Raise :class:`FormatError` for damaged data and for
        decompression bombs.
        """
        data = b""
        if not self._damage:
            try:
                data = self._stream.read(size)
            except damage_errors() as error:
                self._damage = str(error) or "no reason given"
        if self._damage:
            data = self._stream.before_damage(self._done, size)
            if not data:
                raise CutOffError(
                    f"the gzip stream is damaged or cut off ({self._damage})",
                    code="ET001",
                    path=str(self._path),
                    position=f"byte {self._done} of the decompressed data",
                    hint=_DAMAGED,
                )
        self._done += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


class _ByteStream(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class TraceSource:
    """Open trace file; ``size`` is its number of bytes if known."""

    stream: _ByteStream
    name: str
    size: int | None


def open_trace(path: Path, max_bytes: int | None = None) -> TraceSource:
    """Open a trace file, gzip or not. ``max_bytes`` further limits the decompressed size of a gzip file.

    Raises :class:`FormatError` if the file cannot be opened.
    """
    refuse_special_files(path)
    try:
        stream = open_input(path, buffering=0)
        magic = stream.read(2)
        size = os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise FormatError(
            f"cannot be read: {error.strerror}", path=str(path), hint="check the path and its permissions"
        ) from None
    if magic == GZIP_MAGIC:
        return TraceSource(_PackedTrace(stream, path, max_bytes), str(path), None)
    stream.seek(0)
    return TraceSource(stream, str(path), size)


def frames(source: TraceSource, block_bytes: int = _BLOCK_BYTES) -> Iterator[FrameBatch]:
    """Yield the messages of a file in batches of about ``block_bytes``; close the file at the end.

    Raises :class:`FormatError` (``ET001``) with the byte offset of the frame that is cut off or too long.
    """
    rest, offset = b"", 0
    try:
        while data := source.stream.read(block_bytes):
            size = len(rest) + len(data)
            block = b"".join((rest, data, bytes(SLACK)))
            heads, behind = _scan(block, size, source.name, offset)
            if heads:
                window = ByteWindow.over(np.frombuffer(block, np.uint8))
                head = np.array(heads, np.int64)
                length, start, _ = read_varints(window, head)
                batch = FrameBatch(
                    window,
                    start,
                    start + length.view(np.int64),
                    head + offset,
                    offset,
                    file_bytes=source.size,
                )
                refuse_crowded(batch, source.name)
                yield batch
            rest = block[behind:size]
            offset += behind
            block_bytes = max(block_bytes, len(rest))
            if source.size is not None and rest:  # a length beyond the end of the file is refused at once
                declared, start_of_rest = _long_length(rest, 0, source.name, offset)
                if start_of_rest and start_of_rest + declared > source.size - offset:
                    raise _cut_off(rest, source.name, offset)
        if rest:
            raise _cut_off(rest, source.name, offset)
    finally:
        source.stream.close()


def framed_messages(data: bytes) -> Iterator[bytes]:
    """Yield the messages of complete frames that were encoded by this package."""
    at = 0
    while at < len(data):
        length, at = decode_varint(data, at, len(data))
        yield data[at : at + length]
        at += length


def _scan(block: bytes, size: int, name: str, offset: int) -> tuple[list[int], int]:
    """Return the starts of the complete frames (length and message) in the first ``size`` bytes of a block,
    and the start of the first incomplete frame.

    The length of the last frame may extend into the padding after ``size``; that frame then counts as
    incomplete.
    """
    heads: list[int] = []
    add = heads.append
    at = 0
    while at < size:
        add(at)
        length = block[at]
        if length < 0x80:
            at += length + 1
        elif (second := block[at + 1]) < 0x80:
            at += (length & 0x7F | second << 7) + 2
        else:
            length, start = _long_length(block, at, name, offset)
            at = start + length
    if at > size:
        at = heads.pop()
    return heads, at


def _long_length(block: bytes, at: int, name: str, offset: int) -> tuple[int, int]:
    """Return a frame length of more than two bytes and the position after it; (0, 0) if the block ends within
    it.
    """
    start = at
    try:
        value, at = decode_varint(block, at, min(len(block), start + _LENGTH_BYTES))
    except WireError:
        if len(block) < start + _LENGTH_BYTES:
            return 0, 0
        value = 1 << 32
    if value >= 1 << 32:
        raise FormatError(
            "a frame length does not fit into 32 bits",
            code="ET001",
            path=name,
            position=f"byte {offset + start}",
            hint=_DAMAGED,
        )
    return value, at


def refuse_crowded(batch: FrameBatch, name: str) -> None:
    """Raise :class:`FormatError` for a message with more fields than the limit: each decoded field takes
    about a hundred bytes, but only two bytes in the file.
    """
    most = limits().node_fields
    for index in np.flatnonzero(batch.end - batch.start > 2 * most).tolist():
        data = batch.message(index)
        count = at = 0
        with suppress(WireError):
            while at < len(data) and count <= most:
                tag, at = decode_varint(data, at, len(data))
                wire = tag & 7
                value = 0
                if wire in (0, 2):
                    value, at = decode_varint(data, at, len(data))
                elif wire > 5:
                    break
                at += _FIXED_BYTES.get(wire, value if wire == 2 else 0)
                count += 1
        if count > most:
            raise FormatError(
                f"a message of more than {most:,} fields",
                code="ET001",
                path=name,
                position=batch.place(index),
                hint="check that this is a Chakra trace: nodes have few attributes and packed dependencies",
            )


def _cut_off(rest: bytes, name: str, offset: int) -> CutOffError:
    length, start = _long_length(rest, 0, name, offset)
    message = (
        f"a frame of {length} bytes is cut off by the end of the file after {len(rest) - start} bytes"
        if start
        else "a frame length is cut off by the end of the file"
    )
    return CutOffError(message, code="ET001", path=name, position=f"byte {offset}", hint=_DAMAGED)


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """Content of the metadata message, which is the first one of a file: version label and attributes."""

    version: str
    attrs: AttributeColumns


@dataclass(slots=True)
class Decoder:
    """Decoder of the messages of one file. ``unknown_fields`` counts fields outside the schema.

    Attribute names of all batches are numbered in one table, ``keys``. Malformed nodes are reported to
    ``faults``.
    """

    faults: Faults
    unknown_fields: int = 0
    keys: KeyTable = field(default_factory=KeyTable)

    def nodes(self, batch: FrameBatch) -> EtColumns:
        """Return the nodes of a batch. ``attrs.keys`` and the metadata stay empty; the codec sets them.

        Raises :class:`FormatError` (``ET001``) with the byte offset of a malformed field.
        """
        columns, bad = _decode_nodes(batch, self.keys)
        if not bad.any():
            return columns
        # Only messages that are not canonical are processed one by one.
        messages = [batch.message(index) for index in range(len(bad))]
        positions: list[int] = batch.start.tolist()
        good = np.ones(len(bad), np.bool_)
        for index in np.flatnonzero(bad).tolist():
            base = batch.base + positions[index]
            try:
                messages[index] = self._canonical_one(messages[index], base, batch.place(index))
            except (FormatError, UnsupportedError) as error:
                self.faults.skip(error)
                good[index] = False
                messages[index] = b""
        rows = ByteRows.from_rows(messages)
        window = ByteWindow.holding(rows.data)
        columns, bad = _decode_nodes(
            replace(
                batch,
                window=window,
                start=rows.offsets[:-1][good],
                end=rows.offsets[1:][good],
                position=batch.position[good],
            ),
            self.keys,
        )
        if bad.any():
            raise InvariantError("a canonical node was not understood", path=self.faults.path)
        return columns

    def _canonical_one(self, message: bytes, base: int, position: str) -> bytes:
        """Return an encoded node in canonical form. Raise :class:`UnsupportedError` for a node of an older
        schema, because the current schema would misread it.
        """
        try:
            canonical = canonical_message(message, NODE, base=base, path=self.faults.path)
            if not canonical.unknown_tags & TAGS_OF_OLD or not _is_old(message):
                self.unknown_fields += canonical.unknown_fields
                return canonical.data
        except FormatError:
            if not _is_old(message):
                raise
        raise UnsupportedError(
            "this node has fields of a schema before 0.0.4, but the file has schema 0.0.4",
            code="ET003",
            path=self.faults.path,
            position=position,
            hint="write the trace again with one version of Chakra",
        )

    def metadata(self, message: bytes, base: int = 0) -> Metadata:
        """Decode a ``GlobalMetadata`` message that starts at byte ``base`` of the file."""
        canonical = canonical_message(message, GLOBAL_METADATA, base=base, path=self.faults.path)
        self.unknown_fields += canonical.unknown_fields
        window = ByteWindow.holding(np.frombuffer(canonical.data, np.uint8))
        cursor = Cursor(window, np.zeros(1, np.int64), np.array([len(canonical.data)]))
        version = cursor.span(tag_of(1, WireType.BYTES))
        offsets, start, length = repeated_spans(cursor, tag_of(2, WireType.BYTES))
        keys = KeyTable()
        attrs, bad = decode_attributes(window, offsets, start, length, keys)
        if cursor.finish().any() or bad.any():
            raise InvariantError("canonical metadata was not understood", path=self.faults.path)
        text = ByteRows(*copy_spans(window, *version.spread(1))).text(0)
        return Metadata(text, replace(attrs, keys=tuple(keys.names)))


def _is_old(message: bytes) -> bool:
    signature = Signature.of(message)
    return signature is not None and looks_old(signature)


def _decode_nodes(batch: FrameBatch, keys: KeyTable) -> tuple[EtColumns, Bools]:
    """Return the columns of all messages, and a mask of the messages that must be re-encoded in canonical
    form first.
    """
    window, count = batch.window, len(batch.start)
    cursor = Cursor(window, batch.start, batch.end)
    node_id = cursor.varint(tag_of(NodeField.ID, WireType.VARINT))
    name = ByteRows(*copy_spans(window, *cursor.span(tag_of(NodeField.NAME, WireType.BYTES)).spread(count)))
    cursor.mark(None, not_text(name))
    kind = cursor.varint(tag_of(NodeField.TYPE, WireType.VARINT))
    ctrl = packed_varints(window, *cursor.span(tag_of(NodeField.CTRL_DEPS, WireType.BYTES)).spread(count))
    data = packed_varints(window, *cursor.span(tag_of(NodeField.DATA_DEPS, WireType.BYTES)).spread(count))
    cursor.mark(None, ctrl[2])
    cursor.mark(None, data[2])
    start = cursor.varint(tag_of(NodeField.START_TIME_MICROS, WireType.VARINT))
    duration = cursor.varint(tag_of(NodeField.DURATION_MICROS, WireType.VARINT))
    inputs = _io(cursor, cursor.span(tag_of(NodeField.INPUTS, WireType.BYTES)))
    outputs = _io(cursor, cursor.span(tag_of(NodeField.OUTPUTS, WireType.BYTES)))
    offsets, attr_start, attr_length = repeated_spans(cursor, tag_of(NodeField.ATTR, WireType.BYTES))
    attrs, bad_attrs = decode_attributes(window, offsets, attr_start, attr_length, keys)
    bad = cursor.finish()
    if bad_attrs.any():
        bad[np.searchsorted(offsets, np.flatnonzero(bad_attrs), side="right") - 1] = True
    columns = EtColumns(
        version="",
        metadata=AttributeColumns.empty(1),
        id=node_id,
        name=name,
        type=kind.astype(np.uint32).view(np.int32),
        ctrl_offsets=ctrl[1],
        ctrl_deps=ctrl[0],
        data_offsets=data[1],
        data_deps=data[0],
        start_micros=start,
        duration_micros=duration,
        inputs=inputs,
        outputs=outputs,
        attrs=attrs,
        position=batch.position,
        unit=batch.unit,
    )
    return columns, bad


def _io(owner: Cursor, spans: FieldSpans) -> IoColumns:
    """Return the ``IOInfo`` messages at ``spans``. Nodes with a malformed one are marked in ``owner``."""
    rows: Longs = np.arange(len(owner.at)) if spans.rows is None else spans.rows
    if not len(rows):
        return IoColumns.empty()
    cursor = Cursor(owner.window, spans.start, spans.start + spans.length)
    columns = _io_texts(cursor, rows)
    bad = cursor.finish()
    for text in columns.texts:
        bad |= not_text(text)
    owner.mark(rows, bad)
    return columns


def _io_texts(cursor: Cursor, rows: Longs) -> IoColumns:
    spans = (cursor.span(tag_of(number, WireType.BYTES)).spread(len(rows)) for number in (1, 2, 3))
    return IoColumns(rows, *(ByteRows(*copy_spans(cursor.window, *span)) for span in spans))


def decode_io(window: ByteWindow, start: Longs, length: Longs) -> IoColumns:
    """Return the ``IOInfo`` messages at the given spans, which must be canonical; their nodes are numbered
    from 0.
    """
    return _io_texts(Cursor(window, start, start + length), np.arange(len(start), dtype=np.int64))
