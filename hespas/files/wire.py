"""Protobuf's wire format: https://protobuf.dev/programming-guides/encoding/. Positions are bytes.

Messages are read field by field without their schema and without recursion, so neither depth nor stated
lengths cost more than the actual bytes. :mod:`hespas.converters.chakra.wire` and
:mod:`hespas.converters.xplane.wire` decode many messages at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = [
    "BYTES",
    "FIXED32",
    "FIXED64",
    "VARINT",
    "WireError",
    "decode_varint",
    "encode_varint",
    "field_bytes",
    "fields",
    "fixed64",
    "signed",
    "tag",
]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BITS = 70
_MASK = (1 << 64) - 1
_FIXED64_VALUE = struct.Struct("<Q")
_FIXED32_VALUE = struct.Struct("<I")

_Field = tuple[int, int, int, int]
"""One field of a message: field number, wire type, and two numbers that depend on the wire type.

A number (varint, 4 or 8 bytes) has its value and a position: the byte after a varint, the first byte of the
others. Length-delimited bytes have their start and their end.
"""


class WireError(ValueError):
    """Error for invalid protobuf bytes at ``position``."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def fields(data: bytes, start: int, end: int) -> Iterator[_Field]:
    """Yield the fields of the message in ``data[start:end]``. Raises ``WireError``."""
    at = start
    while at < end:
        begin = at
        key = data[at]
        at += 1
        if key >= 0x80:
            key, at = decode_varint(data, begin, end)
        number, wire = key >> 3, key & 7
        if not number:
            raise WireError("field number 0", begin)
        if wire == VARINT:
            short = at < end and data[at] < 0x80
            value, after = (data[at], at + 1) if short else decode_varint(data, at, end)
            yield number, wire, value, after
        elif wire == BYTES:
            short = at < end and data[at] < 0x80
            size, at = (data[at], at + 1) if short else decode_varint(data, at, end)
            after = at + size
            if after > end:
                raise WireError(f"a field of {size:,} bytes reaches beyond its message", begin)
            yield number, wire, at, after
        elif wire in {FIXED64, FIXED32}:
            after = at + (8 if wire == FIXED64 else 4)
            if after > end:
                raise WireError("a number reaches beyond its message", begin)
            unpack = _FIXED64_VALUE if wire == FIXED64 else _FIXED32_VALUE
            yield number, wire, int(unpack.unpack_from(data, at)[0]), at
        else:
            raise WireError(f"field {number} has wire type {wire}, which protobuf does not use", begin)
        at = after


def decode_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Decode the varint at byte ``at``; return its value (unsigned, 64 bits) and the position after it.

    A varint has up to ten bytes. Raises ``WireError`` for a longer or truncated one.
    """
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
            raise WireError("a varint is longer than ten bytes", begin)
    raise WireError("a varint is cut off by the end of its message", begin)


def signed(value: int) -> int:
    """Return the signed value of an ``int64`` or ``int32`` varint."""
    return value - (1 << 64) if value >> 63 else value


def encode_varint(value: int) -> bytes:
    """Return the shortest encoding of an unsigned number."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, wire: int) -> bytes:
    """Return the tag that precedes the value of a field: its number and wire type as a varint."""
    return encode_varint(number << 3 | wire)


def field_bytes(number: int, value: int | bytes) -> bytes:
    """Return an encoded field: an integer as a varint, bytes with their length in front."""
    if isinstance(value, bytes):
        return encode_varint(number << 3 | BYTES) + encode_varint(len(value)) + value
    return encode_varint(number << 3 | VARINT) + encode_varint(value & _MASK)


def fixed64(number: int, value: int) -> bytes:
    """Return an encoded field with a number of fixed length, eight bytes."""
    return encode_varint(number << 3 | FIXED64) + _FIXED64_VALUE.pack(value & _MASK)
