"""Protobuf's wire format: https://protobuf.dev/programming-guides/encoding/. Positions are bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["BYTES", "VARINT", "Field", "WireError", "field_bytes", "fields", "fixed64", "signed", "varint"]

VARINT, BYTES = 0, 2
_FIXED64_WIRE, _FIXED32_WIRE = 1, 5
_MOST_VARINT_BITS = 70
_MASK = (1 << 64) - 1
_FIXED64 = struct.Struct("<Q")
_FIXED32 = struct.Struct("<I")

Field = tuple[int, int, int, int]
"""Field number, wire type, then the value and its place, or the start and the end of the bytes."""


class WireError(ValueError):
    """Bytes that are no message; ``position`` says where."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def fields(data: bytes, start: int, end: int) -> Iterator[Field]:
    """The fields of the message in ``data[start:end]``. Raises ``WireError``."""
    at = start
    while at < end:
        begin = at
        key = data[at]
        at += 1
        if key >= 0x80:
            key, at = _varint(data, begin, end)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, after = _varint(data, at, end)
            yield number, wire, value, at
        elif wire == BYTES:
            size, at = _varint(data, at, end)
            after = at + size
            if after > end:
                raise WireError(f"a field of {size:,} bytes goes beyond its message", begin)
            yield number, wire, at, after
        elif wire in {_FIXED64_WIRE, _FIXED32_WIRE}:
            after = at + (8 if wire == _FIXED64_WIRE else 4)
            if after > end:
                raise WireError("a number goes beyond its message", begin)
            unpack = _FIXED64 if wire == _FIXED64_WIRE else _FIXED32
            yield number, wire, int(unpack.unpack_from(data, at)[0]), at
        else:
            raise WireError(f"wire type {wire} of field {number} is none that messages use", begin)
        if not number:
            raise WireError("field number 0", begin)
        at = after


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number of up to ten bytes, and the place behind it."""
    if at < end and data[at] < 0x80:
        return data[at], at + 1
    value, shift, begin = 0, 0, at
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK, at
        shift += 7
        if shift >= _MOST_VARINT_BITS:
            raise WireError("a number of more than ten bytes", begin)
    raise WireError("a number is cut off", begin)


def signed(value: int) -> int:
    """A 64-bit number as ``int64`` and ``int32`` are written."""
    return value - (1 << 64) if value >> 63 else value


def varint(value: int) -> bytes:
    """The shortest form of an unsigned number."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field_bytes(number: int, value: int | bytes) -> bytes:
    """A field: a number as varint, bytes with their length."""
    if isinstance(value, bytes):
        return varint(number << 3 | BYTES) + varint(len(value)) + value
    return varint(number << 3 | VARINT) + varint(value & _MASK)


def fixed64(number: int, value: int) -> bytes:
    """A field of eight bytes."""
    return varint(number << 3 | _FIXED64_WIRE) + _FIXED64.pack(value & _MASK)
