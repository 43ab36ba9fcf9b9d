"""Refuses Arrow files that would be decompressed into memory, before anything is.

Reads the few fields of the footer's flatbuffer that say so. Layout of an IPC file and its tables:
https://github.com/apache/arrow/blob/main/format/File.fbs and Message.fbs.
"""

from __future__ import annotations

import struct

from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["check_footer"]

_MAGIC = b"ARROW1"
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_HEADER = 2
_BATCH_COMPRESSION = 3
_BLOCK = struct.Struct("<qi4xq")
"""Offset in the file, bytes of metadata, bytes of the body."""


def check_footer(data: memoryview[int], path: str) -> None:
    """Check that the file ends as one, has no dictionaries, and that no record batch is compressed.

    Raises ``FormatError`` for a broken or cut file and ``UnsupportedError`` for compressed buffers.
    """
    if len(data) < 2 * len(_MAGIC) + 6 or bytes(data[-len(_MAGIC) :]) != _MAGIC:
        raise FormatError(
            "the Arrow file ends early", path=path, position=f"byte {len(data)}", hint="copy the file again"
        )
    try:
        compressed = _any_compressed(data)
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(
            "the Arrow footer is broken",
            path=path,
            position=f"footer, before byte {len(data)}",
            hint="copy the file again",
        ) from error
    if compressed:
        raise UnsupportedError(
            "the Arrow file is compressed, so it cannot be memory-mapped",
            path=path,
            hint="write it with compression=None",
        )


def _any_compressed(data: memoryview[int]) -> bool:
    (length,) = struct.unpack_from("<i", data, len(data) - len(_MAGIC) - 4)
    start = len(data) - len(_MAGIC) - 4 - length
    if length <= 0 or start < 0:
        raise ValueError("footer length")
    footer = data[start : start + length]
    root = _indirect(footer, 0)
    if _vector(footer, root, _FOOTER_DICTIONARIES)[1]:
        raise ValueError("dictionaries")
    position, count = _vector(footer, root, _FOOTER_BATCHES)
    if count * _BLOCK.size > length:
        raise ValueError("record batches")
    return any(
        _is_compressed(data, *_BLOCK.unpack_from(footer, position + index * _BLOCK.size)[:2])
        for index in range(count)
    )


def _is_compressed(data: memoryview[int], offset: int, length: int) -> bool:
    """Whether the record batch of one block says that its buffers are compressed."""
    if offset < 0 or length < 8 or offset + length > len(data):
        raise ValueError("block")
    block = data[offset : offset + length]
    (marker,) = struct.unpack_from("<I", block, 0)
    message = block[8:] if marker == 0xFFFFFFFF else block[4:]
    header = _field(message, _indirect(message, 0), _MESSAGE_HEADER)
    if not header:
        raise ValueError("message")
    return _field(message, _indirect(message, header), _BATCH_COMPRESSION) != 0


def _indirect(data: memoryview[int], position: int) -> int:
    (step,) = struct.unpack_from("<I", data, position)
    return position + int(step)


def _field(data: memoryview[int], table: int, number: int) -> int:
    """Where field ``number`` of a table stands, 0 where it is absent."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - int(back)
    if vtable < 0:
        raise ValueError("vtable")
    (size,) = struct.unpack_from("<H", data, vtable)
    entry = 4 + 2 * number
    if entry + 2 > size:
        return 0
    (step,) = struct.unpack_from("<H", data, vtable + entry)
    return table + int(step) if step else 0


def _vector(data: memoryview[int], table: int, number: int) -> tuple[int, int]:
    """Where the items of a vector field start, and how many there are."""
    field = _field(data, table, number)
    if not field:
        return 0, 0
    position = _indirect(data, field)
    (count,) = struct.unpack_from("<I", data, position)
    return position + 4, int(count)
