"""Framing: varint length, then that many bytes, to the exact end of the file; gzip is told by its magic.

End of file is the absence of bytes: a frame of length 0 is a legal message. A length is checked against the
bytes that are left, and nothing is allocated for bytes that have not been read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hespas.converters.chakra.wire import SLACK, Longs, Window, read_varints
from hespas.files.limits import limits
from hespas.files.streams import GZIP_MAGIC, PackedInput, damage_errors, open_input, refuse_special_files
from hespas.files.wire import WireError, decode_varint
from hespas.graph.errors import FormatError

__all__ = ["CutOffError", "FrameBatch", "Source", "frames", "open_trace"]

_BLOCK_BYTES = 1 << 20
_LENGTH_BYTES = 5
"""Of 32 bits."""
_MAX_EMPTY_FRAMES = 1 << 16
_FIXED_BYTES = {1: 8, 5: 4}
"""By wire type."""
_DAMAGED = "the file is damaged or is no Chakra trace; write or download it again"


class CutOffError(FormatError):
    """The file ends too early: what stands before is whole."""


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Consecutive messages in one buffer: message ``i`` is at ``start[i]:end[i]`` of ``window``.

    ``frame_byte`` is where each frame (its length varint) starts in the decompressed file, ``base`` where the
    window does.
    """

    window: Window
    start: Longs
    end: Longs
    frame_byte: Longs
    base: int = 0

    def __len__(self) -> int:
        return len(self.start)

    def without_first(self) -> FrameBatch:
        """The batch without its first message."""
        return replace(self, start=self.start[1:], end=self.end[1:], frame_byte=self.frame_byte[1:])

    def message(self, index: int) -> bytes:
        """The bytes of one message."""
        return self.window.u8[self.start[index] : self.end[index]].tobytes()


class _PackedTrace:
    """A gzip stream; what can be had before damage is returned first."""

    def __init__(self, stream: BinaryIO, path: Path, max_bytes: int | None) -> None:
        self._stream = PackedInput(stream, path, max_bytes, code="ET001: ")
        self._path = path
        self._done = 0
        self._damage = ""

    def read(self, size: int) -> bytes:
        """Up to ``size`` decompressed bytes; raises :class:`FormatError` for damage and for bombs."""
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
                    f"ET001: the gzip stream is damaged or cut off ({self._damage})",
                    path=str(self._path),
                    position=f"byte {self._done} of the decompressed data",
                    hint=_DAMAGED,
                )
        self._done += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


@dataclass(slots=True)
class Source:
    """Where bytes come from; ``size`` is the number of all bytes where it is known."""

    stream: BinaryIO | _PackedTrace
    name: str
    size: int | None


def open_trace(path: Path, max_bytes: int | None = None) -> Source:
    """Open a trace file, gzip or not. ``max_bytes`` bounds the decompressed size of a gzip file further.

    Raises :class:`FormatError` when the file cannot be opened.
    """
    refuse_special_files(path)
    try:
        stream = open_input(path, buffering=0)
        magic = stream.read(2)
        size = os.fstat(stream.fileno()).st_size
    except OSError as error:
        raise FormatError(
            f"cannot be read: {error.strerror}", path=str(path), hint="check the path and who may read it"
        ) from None
    if magic == GZIP_MAGIC:
        return Source(_PackedTrace(stream, path, max_bytes), str(path), None)
    stream.seek(0)
    return Source(stream, str(path), size)


def frames(source: Source, block_bytes: int = _BLOCK_BYTES) -> Iterator[FrameBatch]:
    """The messages of a file in batches of about ``block_bytes``; closes the file at the end.

    Raises :class:`FormatError` (``ET001``) with the byte offset of the frame that is cut off or too long.
    """
    rest, offset, empty = b"", 0, 0
    try:
        while data := source.stream.read(block_bytes):
            size = len(rest) + len(data)
            block = b"".join((rest, data, bytes(SLACK)))
            heads, behind = _scan(block, size, source.name, offset)
            if heads:
                batch = _batch(block, heads, offset)
                empty += int((batch.start == batch.end).sum())
                _refuse_padding(empty, source.name, offset)
                _refuse_crowded(batch, source.name)
                yield batch
            rest = block[behind:size]
            offset += behind
            block_bytes = max(block_bytes, len(rest))
            _check_declared(rest, source, offset)
        if rest:
            raise _cut_off(rest, source.name, offset)
    finally:
        source.stream.close()


def _scan(block: bytes, size: int, name: str, offset: int) -> tuple[list[int], int]:
    """Where the whole frames in the first ``size`` bytes begin, and where the first incomplete one does.

    A length that runs into the padding behind ``size`` ends behind it too, so it counts as incomplete.
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
    """A frame length of several bytes and the position behind it, 0 when the block ends before."""
    start = at
    try:
        value, at = decode_varint(block, at, min(len(block), start + _LENGTH_BYTES))
    except WireError:
        if len(block) < start + _LENGTH_BYTES:
            return 0, 0
        value = 1 << 32
    if value >= 1 << 32:
        raise FormatError(
            "ET001: a frame length does not fit into 32 bits",
            path=name,
            position=f"byte {offset + start}",
            hint=_DAMAGED,
        )
    return value, at


def _batch(block: bytes, heads: list[int], offset: int) -> FrameBatch:
    window = Window.over(np.frombuffer(block, np.uint8))
    head = np.array(heads, np.int64)
    length, start, _ = read_varints(window, head)
    return FrameBatch(window, start, start + length.view(np.int64), head + offset, offset)


def _refuse_padding(empty: int, name: str, offset: int) -> None:
    """Stop at zeros: each would be a node of some 60 bytes, and all but one a duplicate id."""
    if empty > _MAX_EMPTY_FRAMES:
        raise FormatError(
            f"ET001: more than {_MAX_EMPTY_FRAMES} empty frames: this is zero padding, not a trace",
            path=name,
            position=f"byte {offset}",
            hint=_DAMAGED,
        )


def _refuse_crowded(batch: FrameBatch, name: str) -> None:
    """Stop at a message of very many fields: each would take a hundred bytes, and may itself have two."""
    most = limits().node_fields
    for index in np.flatnonzero(batch.end - batch.start > 2 * most).tolist():
        if _count_fields(batch.message(index), most) > most:
            raise FormatError(
                f"ET001: a message of more than {most:,} fields",
                path=name,
                position=f"byte {int(batch.frame_byte[index])}",
                hint="is this a Chakra trace? A node has a few attributes, and packed lists of dependencies",
            )


def _count_fields(data: bytes, most: int) -> int:
    """How many fields a message has, up to one more than ``most`` and to the first that is malformed."""
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
    return count


def _check_declared(rest: bytes, source: Source, offset: int) -> None:
    """Refuse at once a length beyond the end of a file whose size is known."""
    if source.size is None or not rest:
        return
    length, start = _long_length(rest, 0, source.name, offset)
    if start and start + length > source.size - offset:
        raise _cut_off(rest, source.name, offset)


def _cut_off(rest: bytes, name: str, offset: int) -> CutOffError:
    length, start = _long_length(rest, 0, name, offset)
    message = (
        f"ET001: a frame of {length} bytes is cut off by the end of the file after {len(rest) - start} bytes"
        if start
        else "ET001: a frame length is cut off by the end of the file"
    )
    return CutOffError(message, path=name, position=f"byte {offset}", hint=_DAMAGED)
