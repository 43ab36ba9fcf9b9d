"""A look at a serialised ``HloModuleProto`` before XLA gets it.

XLA allocates a slot for every number up to the largest local id of an instruction (the low 32 bits of
``HloInstructionProto.id``), so one damaged byte can ask for gigabytes. Field numbers are those of xla's
``service/hlo.proto``: ``HloModuleProto.computations`` 3, ``HloComputationProto.instructions`` 2,
``HloInstructionProto.id`` 35.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["largest_local_id"]

_COMPUTATIONS = 3
_INSTRUCTIONS = 2
_ID = 35
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_SHIFT = 63


def largest_local_id(data: bytes) -> int:
    """The largest local id of any instruction; -1 where there is none. Raises ``ValueError`` for bytes that
    are no protobuf message. O(fields of all instructions).
    """
    largest = -1
    for start, end in _messages(data, 0, len(data), _COMPUTATIONS):
        for first, last in _messages(data, start, end, _INSTRUCTIONS):
            largest = max(largest, _local_id(data, first, last))
    return largest


def _messages(data: bytes, position: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Where the messages of one field begin and end."""
    while position < end:
        key, position = _varint(data, position)
        start, position = _value(data, position, key & 7)
        if key >> 3 == wanted and key & 7 == _BYTES:
            yield start, position
    if position != end:
        raise ValueError("a field ends behind its message")


def _local_id(data: bytes, position: int, end: int) -> int:
    largest = -1
    while position < end:
        key, position = _varint(data, position)
        start, position = _value(data, position, key & 7)
        if key >> 3 == _ID and key & 7 == _VARINT:
            largest = max(largest, _varint(data, start)[0] & 0xFFFFFFFF)
    return largest


def _value(data: bytes, position: int, kind: int) -> tuple[int, int]:
    """Where the content of a field begins and ends."""
    if kind == _VARINT:
        return position, _varint(data, position)[1]
    if kind == _BYTES:
        size, start = _varint(data, position)
        end = start + size
    elif kind in (_FIXED64, _FIXED32):
        start, end = position, position + (8 if kind == _FIXED64 else 4)
    else:
        raise ValueError(f"a field of wire type {kind}")
    if end > len(data):
        raise ValueError("a field ends behind the file")
    return start, end


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > _MAX_SHIFT:
            raise ValueError("a number that does not end")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
