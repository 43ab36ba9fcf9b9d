"""Single values in protobuf-JSON and on the wire: https://protobuf.dev/programming-guides/json.

64-bit integers may be numbers or texts, enumerations names or numbers; what is not finite is a text.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode, b64encode
from math import inf, isfinite, isnan, nan
from typing import TypeAlias

from hespas.schemas.chakra.tables import Kind, NodeType, encode_varint

__all__ = ["JsonValue", "WrongValueError", "value_bytes", "value_json"]

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""Anything that JSON can say."""

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_WHOLE = re.compile(r"-?[0-9]{1,20}\Z")
_NUMBER = re.compile(r"-?[0-9]{1,400}(\.[0-9]{0,400})?([eE][-+]?[0-9]{1,4})?\Z")
_ENUM = {name: int(member) for member in NodeType for name in (member.name, f"{member.name}_NODE")}
_ENUM_NAMES = {int(member): f"{member.name}_NODE" for member in NodeType}
_NOT_FINITE = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
_PACKING = {
    Kind.DOUBLE: "<d",
    Kind.FLOAT: "<f",
    Kind.FIXED32: "<I",
    Kind.FIXED64: "<Q",
    Kind.SFIXED32: "<i",
    Kind.SFIXED64: "<q",
}
_BITS = {
    **dict.fromkeys((Kind.INT32, Kind.SINT32, Kind.SFIXED32, Kind.UINT32, Kind.FIXED32, Kind.ENUM), 32),
    **dict.fromkeys((Kind.INT64, Kind.SINT64, Kind.SFIXED64, Kind.UINT64, Kind.FIXED64), 64),
}
_UNSIGNED = frozenset({Kind.UINT32, Kind.FIXED32, Kind.UINT64, Kind.FIXED64})
_ZIGZAG = frozenset({Kind.SINT32, Kind.SINT64})


class WrongValueError(ValueError):
    """A value that its field cannot have."""


def value_bytes(kind: Kind, value: JsonValue) -> bytes:
    """One value as it travels, texts and bytes with their length before them. Raises `WrongValueError`."""
    match kind:
        case Kind.STRING:
            content = _text(value)
            return encode_varint(len(content)) + content
        case Kind.BYTES:
            content = _bytes(value)
            return encode_varint(len(content)) + content
        case Kind.DOUBLE | Kind.FLOAT:
            return _real_bytes(kind, value)
        case Kind.BOOL:
            if not isinstance(value, bool):
                raise WrongValueError(f"{_shown(value)} is neither true nor false")
            return b"\1" if value else b"\0"
        case _:
            return _whole_bytes(kind, value)


def value_json(kind: Kind, raw: int | bytes) -> JsonValue:
    """What travels (an integer for a varint, else bytes) as JSON says it."""
    match kind:
        case Kind.STRING:
            return raw.decode() if isinstance(raw, bytes) else ""
        case Kind.BYTES:
            return b64encode(raw).decode() if isinstance(raw, bytes) else ""
        case Kind.DOUBLE | Kind.FLOAT:
            return _real_json(kind, raw)
        case Kind.BOOL:
            return raw != 0
        case Kind.ENUM:
            number = _whole(kind, raw)
            return _ENUM_NAMES.get(number, number)
        case _:
            number = _whole(kind, raw)
            return str(number) if _BITS[kind] == 64 else number


def _shown(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _text(value: JsonValue) -> bytes:
    if not isinstance(value, str):
        raise WrongValueError(f"{_shown(value)} is no text")
    return value.encode()


def _bytes(value: JsonValue) -> bytes:
    """Base64, of either alphabet, padded or not."""
    text = _text(value).rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
    try:
        return b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except ValueError as error:
        raise WrongValueError(f"{_shown(value)} is no base64") from error


def _real_bytes(kind: Kind, value: JsonValue) -> bytes:
    if isinstance(value, str):
        number = _NOT_FINITE.get(value)
        if number is None and not _NUMBER.match(value):
            raise WrongValueError(f"{_shown(value)} is no number")
        number = float(value) if number is None else number
        overflows = value not in _NOT_FINITE and not isfinite(number)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        overflows = abs(value) > 1.8e308
        number = 0.0 if overflows else float(value)
    else:
        raise WrongValueError(f"{_shown(value)} is no number")
    try:
        if not overflows:
            return struct.pack(_PACKING[kind], number)
    except OverflowError:
        pass  # too large for 32 bits
    raise WrongValueError(f"{_shown(value)} does not fit a {kind.proto}")


def _real_json(kind: Kind, raw: int | bytes) -> JsonValue:
    if isinstance(raw, int):
        return 0.0
    number: float = struct.unpack(_PACKING[kind], raw)[0]
    if isfinite(number):
        return number
    return "NaN" if isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _whole_bytes(kind: Kind, value: JsonValue) -> bytes:
    number = _stated_whole(kind, value)
    bits = _BITS[kind]
    low, high = (0, 1 << bits) if kind in _UNSIGNED else (-(1 << bits - 1), 1 << bits - 1)
    if not low <= number < high:
        raise WrongValueError(f"{_shown(value)} does not fit {kind.proto}")
    if kind in _PACKING:
        return struct.pack(_PACKING[kind], number)
    if kind in _ZIGZAG:
        number = number << 1 ^ number >> bits - 1
    return encode_varint(number & _MASK64)


def _stated_whole(kind: Kind, value: JsonValue) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        if kind is Kind.ENUM and value in _ENUM:
            return _ENUM[value]
        if kind is not Kind.ENUM and _WHOLE.match(value):
            return int(value)
    what = "node type" if kind is Kind.ENUM else "whole number"
    raise WrongValueError(f"{_shown(value)} is no {what}")


def _whole(kind: Kind, raw: int | bytes) -> int:
    """The number that a varint or fixed bytes stand for."""
    if isinstance(raw, bytes):
        number: int = struct.unpack(_PACKING[kind], raw)[0]
        return number
    if kind in _ZIGZAG:
        return raw >> 1 ^ -(raw & 1)
    bits = _BITS[kind]
    raw &= (1 << bits) - 1
    return raw if kind in _UNSIGNED or raw < 1 << bits - 1 else raw - (1 << bits)
