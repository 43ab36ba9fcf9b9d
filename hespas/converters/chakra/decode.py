"""Chakra trace files to columns: https://github.com/mlcommons/chakra, schema 0.0.4 (= 1.0.0).

Messages are decoded a block at a time, every field of all messages of the block at once. A message that no
serialiser would have written is first brought into canonical form, so that every legal encoding is read and
everything else is an error with its place in the file. Memory: the columns and one block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hespas.converters.chakra.attributes import KeyTable, canonical_message, decode_attributes, not_text
from hespas.converters.chakra.columns import AttributeColumns, ByteRows, EtColumns, IoColumns
from hespas.converters.chakra.frames import FrameBatch
from hespas.converters.chakra.versions import Signature, looks_old
from hespas.converters.chakra.wire import (
    Bools,
    Cursor,
    Longs,
    Spans,
    Window,
    copy_spans,
    packed_varints,
    repeated_spans,
)
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError, InvariantError, UnsupportedError
from hespas.schemas.chakra.tables import GLOBAL_METADATA, NODE, NodeField, WireType

__all__ = ["Decoder", "Metadata", "decode_io"]


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """The first frame of a file: its version text and its attributes (of one owner)."""

    version: str
    attrs: AttributeColumns


def _tag(number: int, wire: WireType) -> int:
    return number << 3 | wire


@dataclass(slots=True)
class Decoder:
    """Decodes the frames of one file. ``unknown_fields`` counts what the schema does not know.

    ``path`` is for error messages. Attribute names are interned into ``keys`` across batches. Malformed nodes
    raise, or are left out and recorded in ``on_error`` where that is given.
    """

    path: str | None = None
    on_error: Diagnostics | None = None
    unknown_fields: int = 0
    keys: KeyTable = field(default_factory=KeyTable)

    def nodes(self, batch: FrameBatch) -> EtColumns:
        """The nodes of a batch; ``attrs.keys`` and the metadata are left empty, see :class:`.join.Joiner`.

        Raises :class:`FormatError` (``ET001``) with the byte offset of what is malformed.
        """
        columns, bad = _decode_nodes(batch, self.keys)
        if not bad.any():
            return columns
        columns, bad = _decode_nodes(self._canonical(batch, bad), self.keys)
        if bad.any():
            raise InvariantError("a canonical node was not understood", path=self.path)
        return columns

    def _canonical(self, batch: FrameBatch, bad: Bools) -> FrameBatch:
        """The batch with the marked messages in canonical form; only these are looked at one by one."""
        messages = [batch.message(index) for index in range(len(bad))]
        positions: list[int] = batch.start.tolist()
        kept = np.ones(len(bad), np.bool_)
        for index in np.flatnonzero(bad).tolist():
            place, frame_byte = batch.base + positions[index], int(batch.frame_byte[index])
            try:
                messages[index] = self._canonical_one(messages[index], place, frame_byte)
            except (FormatError, UnsupportedError) as error:
                if self.on_error is None:
                    raise
                code, message = error.message.split(": ", 1)
                message = f"{message}; the node is left out"
                self.on_error.error(code, error.position or "", message, path=self.path or "")
                kept[index] = False
                messages[index] = b""
        rows = ByteRows.from_rows(messages)
        window = Window.holding(rows.data)
        return FrameBatch(window, rows.offsets[:-1][kept], rows.offsets[1:][kept], batch.frame_byte[kept])

    def _canonical_one(self, message: bytes, base: int, frame_byte: int) -> bytes:
        """A node in canonical form. Raises :class:`UnsupportedError` for one of an older schema, of which
        protobuf would make nonsense.
        """
        signature = Signature.of(message)
        try:
            canonical = canonical_message(message, NODE, base=base, path=self.path)
            if not canonical.unknown_fields or signature is None or not looks_old(signature):
                self.unknown_fields += canonical.unknown_fields
                return canonical.data
        except FormatError:
            if signature is None or not looks_old(signature):
                raise
        raise UnsupportedError(
            "ET003: this node has the fields of a schema before 0.0.4, which the file has",
            path=self.path,
            position=f"byte {frame_byte}",
            hint="write the trace again with one version of Chakra",
        )

    def metadata(self, message: bytes, base: int = 0) -> Metadata:
        """Decode a ``GlobalMetadata`` message that starts at byte ``base`` of the file."""
        canonical = canonical_message(message, GLOBAL_METADATA, base=base, path=self.path)
        self.unknown_fields += canonical.unknown_fields
        window = Window.holding(np.frombuffer(canonical.data, np.uint8))
        cursor = Cursor(window, np.zeros(1, np.int64), np.array([len(canonical.data)]))
        version = cursor.span(_tag(1, WireType.BYTES))
        offsets, start, length = repeated_spans(cursor, _tag(2, WireType.BYTES))
        keys = KeyTable()
        attrs, bad = decode_attributes(window, offsets, start, length, keys)
        if cursor.finish().any() or bad.any():
            raise InvariantError("canonical metadata was not understood", path=self.path)
        text = ByteRows(*copy_spans(window, *version.spread(1))).text(0)
        return Metadata(text, attrs.with_keys(tuple(keys.names)))


def _decode_nodes(batch: FrameBatch, keys: KeyTable) -> tuple[EtColumns, Bools]:
    """All fields of all messages, and which messages need the canonical form first."""
    window, count = batch.window, len(batch.start)
    cursor = Cursor(window, batch.start, batch.end)
    node_id = cursor.varint(_tag(NodeField.ID, WireType.VARINT))
    name = ByteRows(*copy_spans(window, *cursor.span(_tag(NodeField.NAME, WireType.BYTES)).spread(count)))
    cursor.mark(None, not_text(name))
    kind = cursor.varint(_tag(NodeField.TYPE, WireType.VARINT))
    ctrl = packed_varints(window, *cursor.span(_tag(NodeField.CTRL_DEPS, WireType.BYTES)).spread(count))
    data = packed_varints(window, *cursor.span(_tag(NodeField.DATA_DEPS, WireType.BYTES)).spread(count))
    cursor.mark(None, ctrl[2])
    cursor.mark(None, data[2])
    start = cursor.varint(_tag(NodeField.START_TIME_MICROS, WireType.VARINT))
    duration = cursor.varint(_tag(NodeField.DURATION_MICROS, WireType.VARINT))
    inputs = _io(cursor, cursor.span(_tag(NodeField.INPUTS, WireType.BYTES)))
    outputs = _io(cursor, cursor.span(_tag(NodeField.OUTPUTS, WireType.BYTES)))
    offsets, attr_start, attr_length = repeated_spans(cursor, _tag(NodeField.ATTR, WireType.BYTES))
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
        frame_byte=batch.frame_byte,
    )
    return columns, bad


def _io(owner: Cursor, spans: Spans) -> IoColumns:
    """The ``IOInfo`` messages at ``spans``; owners of what is not understood are marked."""
    rows: Longs = np.arange(len(owner.at)) if spans.rows is None else spans.rows
    if not len(rows):
        return IoColumns.empty()
    cursor = Cursor(owner.window, spans.start, spans.start + spans.length)
    columns = _io_texts(cursor, rows)
    bad = cursor.finish()
    for text in (columns.values, columns.shapes, columns.types):
        bad |= not_text(text)
    owner.mark(rows, bad)
    return columns


def _io_texts(cursor: Cursor, rows: Longs) -> IoColumns:
    texts = [
        ByteRows(*copy_spans(cursor.window, *cursor.span(_tag(number, WireType.BYTES)).spread(len(rows))))
        for number in (1, 2, 3)
    ]
    return IoColumns(rows, texts[0], texts[1], texts[2])


def decode_io(window: Window, start: Longs, length: Longs) -> IoColumns:
    """Canonical ``IOInfo`` messages at the given spans, numbered from 0."""
    return _io_texts(Cursor(window, start, start + length), np.arange(len(start), dtype=np.int64))
