"""Protobuf-JSON of Chakra messages, and nodes of a list ``workload_graph``, converted to the wire format and
back.

Two writers make such lists. The C++ feeder of Chakra (https://github.com/mlcommons/chakra, file
``src/feeder/json_node.cpp``) reads ``Id``, ``Name``, ``NodeType``, ``is_cpu_op``, ``runtime`` (microseconds)
and ``data_deps``, and of communication nodes ``tensor_size`` and ``comm_*``; these become attributes of the
contract. Hespas writes the same keys, so that the feeder can read its files, and also ``attr`` and the other
fields of a node, which then take precedence. Values follow https://protobuf.dev/programming-guides/json:
64-bit integers may be numbers or texts, enumerations names or numbers, and non-finite numbers are texts. Both
spellings of a name (``dataDeps``, ``data_deps``) are read; the schema's own is written. Recursion depth is
bounded by the schema.
"""

from __future__ import annotations

import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator
from math import inf, isfinite, isnan, nan
from types import MappingProxyType
from typing import TypeAlias

from hespas.converters.chakra.contract import ATTRIBUTES
from hespas.files.wire import decode_varint, encode_varint, fields, tag
from hespas.schemas.chakra.tables import (
    GLOBAL_METADATA,
    NODE,
    VALUE_FIELDS,
    AttributeField,
    FieldSpec,
    MessageSpec,
    NodeType,
    ProtoKind,
    WireType,
)

__all__ = [
    "COMMUNICATION_KEYS",
    "FEEDER_KEYS",
    "HOST_KEY",
    "JsonValue",
    "WrongValueError",
    "contradicted_keys",
    "listed_node",
    "message_bytes",
    "message_json",
    "value_bytes",
    "wire_fields",
    "wire_integers",
]

HOST_KEY = "is_cpu_op"
COMMUNICATION_KEYS = (
    "tensor_size",
    "comm_type",
    "comm_priority",
    "comm_size",
    "comm_src",
    "comm_dst",
    "comm_tag",
)
"""Keys that the feeder reads only from sends, receives and collectives."""

FEEDER_KEYS = (HOST_KEY, *COMMUNICATION_KEYS)

_FIELDS = MappingProxyType(
    {
        "Id": "id",
        "Name": "name",
        "NodeType": "type",
        "runtime": "duration_micros",
        "data_deps": "data_deps",
        "ctrl_deps": "ctrl_deps",
        "ctrlDeps": "ctrl_deps",
        "start_time_micros": "start_time_micros",
        "inputs": "inputs",
        "outputs": "outputs",
        "attr": "attr",
    }
)
"""Key of a listed node -> field of the schema."""

_VALUE = ("_val", "Val")
_INTEGERS = frozenset({ProtoKind.INT32, ProtoKind.INT64, ProtoKind.UINT32, ProtoKind.UINT64})
_OF_SCALAR: tuple[tuple[type, str], ...] = (
    (bool, "bool"),
    (int, "int64"),
    (float, "double"),
    (str, "string"),
)
"""Attribute type by Python type. The order matters because a bool is an int."""


def listed_node(node: dict[str, JsonValue], unread_keys: list[str]) -> dict[str, JsonValue]:
    """Convert a node of a ``workload_graph`` list to protobuf-JSON. Unknown keys whose value cannot become an
    attribute are added to ``unread_keys``.

    Raises :class:`WrongValueError` if a required key is missing.
    """
    for key in ("Id", "NodeType"):
        if node.get(key) is None:
            raise WrongValueError(f"{key} is missing")
    by_field: dict[str, JsonValue] = {}
    others: dict[str, JsonValue] = {}
    for key, value in node.items():
        if value is None:
            continue
        field = _FIELDS.get(key)
        if field is None:
            others[key] = value
        elif field in by_field:
            raise WrongValueError(f"{key}: occurs twice, in two spellings")
        else:
            by_field[field] = value
    if "attr" not in by_field:
        by_field["attr"] = _attributes(by_field, others, unread_keys)
    else:
        unread_keys += [key for key in others if key not in FEEDER_KEYS]
    return by_field


def contradicted_keys(node: dict[str, JsonValue]) -> list[str]:
    """Return the keys for Chakra's feeder whose value differs from the attribute of the same name in
    ``attr``.
    """
    attributes = node.get("attr")
    if not isinstance(attributes, list):
        return []
    attribute_values: dict[str, JsonValue] = {}
    for attribute in attributes:
        name = attribute.get("name") if isinstance(attribute, dict) else None
        if isinstance(attribute, dict) and isinstance(name, str) and name in FEEDER_KEYS:
            attribute_values.setdefault(
                name, next((attribute[key] for key in attribute if key.endswith(_VALUE)), None)
            )
    return [
        key
        for key in FEEDER_KEYS
        if key in node and _plain(node[key]) != _plain(attribute_values.get(key, 0))
    ]


def _plain(value: JsonValue) -> int | None:
    """Return the integer that a JSON number, text or bool holds; None for other values."""
    try:
        return int(value) if isinstance(value, int | str) else None
    except ValueError:
        return None


def _attributes(
    fields: dict[str, JsonValue], others: dict[str, JsonValue], unread_keys: list[str]
) -> list[JsonValue]:
    """Convert keys of a JSON node to attributes. Names in the attribute contract get the type that it states,
    others the type of their JSON value.
    """
    attributes: list[JsonValue] = []
    runtime = fields.get("duration_micros")
    if isinstance(runtime, float) and not runtime.is_integer() and 0 <= runtime < 1 << 53:
        fields["duration_micros"] = int(runtime)
        exact_ns = round(runtime * 1e3)
        others = {"duration_nanos": max(1, exact_ns) if runtime else exact_ns, **others}
    for key, value in others.items():
        attribute = _attribute(key, value)
        if attribute is None:
            unread_keys.append(key)
        else:
            attributes.append(attribute)
    return attributes


def _attribute(key: str, value: JsonValue) -> JsonValue:
    """Convert a key and its value to an attribute; return None for objects and mixed lists, which no
    attribute can hold.
    """
    field = ATTRIBUTES.get(key, AttributeField.INT32 if key == "comm_priority" else None)
    if isinstance(value, list):
        kinds = {_kind_of(entry) for entry in value}
        if len(kinds) != 1 or "" in kinds:
            return None
        return {"name": key, f"{kinds.pop()}_list": {"values": value}}
    if field is not None:  # convert to the type of the contract if that is exact
        kind = VALUE_FIELDS[field]
        is_bool = isinstance(value, bool)
        if kind is ProtoKind.BOOL and not is_bool and value in (0, 1):
            value = value == 1
        elif kind is ProtoKind.STRING and isinstance(value, int) and not is_bool:
            value = str(value)
        elif kind in _INTEGERS and isinstance(value, bool):
            value = int(value)
        return {"name": key, f"{kind.proto}_val": value}
    kind_name = _kind_of(value)
    return {"name": key, f"{kind_name}_val": value} if kind_name else None


def _kind_of(value: JsonValue) -> str:
    """Return the attribute type for a plain value, such as ``int64``; empty for objects and lists."""
    kind = next((name for type_, name in _OF_SCALAR if isinstance(value, type_)), "")
    too_large = kind == "int64" and isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
    return "uint64" if too_large else kind


JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""Any JSON value."""

_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_WHOLE = re.compile(r"-?[0-9]{1,20}\Z")
_NUMBER = re.compile(r"-?[0-9]{1,400}(\.[0-9]{0,400})?([eE][-+]?[0-9]{1,4})?\Z")
_ENUM = {name: int(member) for member in NodeType for name in (member.name, f"{member.name}_NODE")}
_ENUM_NAMES = {int(member): f"{member.name}_NODE" for member in NodeType}
_NOT_FINITE = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
_PACKING = {
    ProtoKind.DOUBLE: "<d",
    ProtoKind.FLOAT: "<f",
    ProtoKind.FIXED32: "<I",
    ProtoKind.FIXED64: "<Q",
    ProtoKind.SFIXED32: "<i",
    ProtoKind.SFIXED64: "<q",
}
_BITS = {kind: 32 if kind is ProtoKind.ENUM or kind.proto.endswith("32") else 64 for kind in ProtoKind}
_UNSIGNED = frozenset({ProtoKind.UINT32, ProtoKind.FIXED32, ProtoKind.UINT64, ProtoKind.FIXED64})
_ZIGZAG = frozenset({ProtoKind.SINT32, ProtoKind.SINT64})


class WrongValueError(ValueError):
    """Error for a JSON value that is not valid for the protobuf field in which it occurs."""


def value_bytes(kind: ProtoKind, value: JsonValue) -> bytes:
    """Encode a JSON value as protobuf does, without the tag. Texts and bytes begin with their length. Raise
    :class:`WrongValueError`.
    """
    match kind:
        case ProtoKind.STRING:
            content = _text(value)
            return encode_varint(len(content)) + content
        case ProtoKind.BYTES:  # base64 of either alphabet, padded or not
            text = _text(value).rstrip(b"=").translate(bytes.maketrans(b"-_", b"+/"))
            try:
                content = b64decode(text + b"=" * (-len(text) % 4), validate=True)
            except ValueError as error:
                raise WrongValueError(f"{_shown(value)} is not base64") from error
            return encode_varint(len(content)) + content
        case ProtoKind.DOUBLE | ProtoKind.FLOAT:
            return _real_bytes(kind, value)
        case ProtoKind.BOOL:
            if not isinstance(value, bool):
                raise WrongValueError(f"{_shown(value)} is neither true nor false")
            return b"\1" if value else b"\0"
        case _:
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


def _value_json(kind: ProtoKind, raw: int | bytes) -> JsonValue:
    """Convert a value in wire format to JSON: an integer for a varint, else bytes."""
    match kind:
        case ProtoKind.STRING:
            return raw.decode() if isinstance(raw, bytes) else ""
        case ProtoKind.BYTES:
            return b64encode(raw).decode() if isinstance(raw, bytes) else ""
        case ProtoKind.DOUBLE | ProtoKind.FLOAT:
            real: float = struct.unpack(_PACKING[kind], raw)[0] if isinstance(raw, bytes) else 0.0
            infinite = "Infinity" if real > 0 else "-Infinity"
            return real if isfinite(real) else "NaN" if isnan(real) else infinite
        case ProtoKind.BOOL:
            return raw != 0
        case ProtoKind.ENUM:
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
        raise WrongValueError(f"{_shown(value)} is not a text")
    return value.encode()


def _real_bytes(kind: ProtoKind, value: JsonValue) -> bytes:
    if isinstance(value, str):
        number = _NOT_FINITE.get(value)
        if number is None and not _NUMBER.match(value):
            raise WrongValueError(f"{_shown(value)} is not a number")
        number = float(value) if number is None else number
        overflows = value not in _NOT_FINITE and not isfinite(number)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        overflows = abs(value) > 1.8e308
        number = 0.0 if overflows else float(value)
    else:
        raise WrongValueError(f"{_shown(value)} is not a number")
    try:
        if not overflows:
            return struct.pack(_PACKING[kind], number)
    except OverflowError:
        pass  # too large for 32 bits
    raise WrongValueError(f"{_shown(value)} does not fit a {kind.proto}")


def _stated_whole(kind: ProtoKind, value: JsonValue) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        if kind is ProtoKind.ENUM and value in _ENUM:
            return _ENUM[value]
        if kind is not ProtoKind.ENUM and _WHOLE.match(value):
            return int(value)
    what = "node type" if kind is ProtoKind.ENUM else "whole number"
    raise WrongValueError(f"{_shown(value)} is not a {what}")


def _whole(kind: ProtoKind, raw: int | bytes) -> int:
    """Return the integer that a varint or fixed-width field encodes."""
    if isinstance(raw, bytes):
        number: int = struct.unpack(_PACKING[kind], raw)[0]
        return number
    if kind in _ZIGZAG:
        return raw >> 1 ^ -(raw & 1)
    bits = _BITS[kind]
    raw &= (1 << bits) - 1
    return raw if kind in _UNSIGNED or raw < 1 << bits - 1 else raw - (1 << bits)


def _by_message(*roots: MessageSpec) -> dict[str, dict[str, FieldSpec]]:
    """Return the fields of ``roots`` and of all messages nested in them, by message name, then by field name.
    Each field is listed under both JSON spellings (``comm_size`` and ``commSize``).
    """
    fields_of: dict[str, dict[str, FieldSpec]] = {}
    waiting = list(roots)
    while waiting:
        spec = waiting.pop()
        named = fields_of[spec.name] = dict[str, FieldSpec]()
        for field in spec.fields.values():
            first, *others = field.name.split("_")
            named[field.name] = named[first + "".join(map(str.capitalize, others))] = field
            waiting += [field.message] if field.message is not None else []
    return fields_of


_FIELDS_BY_MESSAGE = _by_message(NODE, GLOBAL_METADATA)


def message_bytes(spec: MessageSpec, value: JsonValue, unknown: list[str]) -> bytes:
    """Return the canonical protobuf encoding of a message that is given as a JSON object. Names outside the
    schema are added to ``unknown``.

    Raises :class:`WrongValueError`, whose message starts with the path to the value.
    """
    if not isinstance(value, dict):
        raise WrongValueError(f"{spec.name} must be an object")
    fields = _FIELDS_BY_MESSAGE[spec.name]
    parts: dict[int, bytes] = {}
    chosen = ""
    for name, item in value.items():
        field = fields.get(name)
        if field is None:
            unknown.append(name)
            continue
        if item is None:
            continue
        if field.oneof and chosen:
            raise WrongValueError(f"{name}: the attribute already has a value, {chosen}")
        if field.number in parts:
            raise WrongValueError(f"{name}: occurs twice, in two spellings")
        chosen = name if field.oneof else chosen
        parts[field.number] = _field_bytes(field, item, name, unknown)
    return b"".join(parts[number] for number in sorted(parts))


def _field_bytes(field: FieldSpec, item: JsonValue, name: str, unknown: list[str]) -> bytes:
    if field.repeated:
        if not isinstance(item, list):
            raise WrongValueError(f"{name}: not a list")
        head = tag(field.number, WireType.BYTES)
        parts: list[bytes] = []
        for index, entry in enumerate(item):
            try:
                if field.message is not None:
                    content = message_bytes(field.message, entry, unknown)
                    parts += (head, encode_varint(len(content)), content)
                    continue
                content = value_bytes(field.kind, entry)
            except WrongValueError as error:
                raise WrongValueError(f"{name}[{index}]: {error}") from error
            parts += (head, content) if field.kind.wire is WireType.BYTES else (content,)
        whole = b"".join(parts)
        if field.message is not None or field.kind.wire is WireType.BYTES or not whole:
            return whole
        return head + encode_varint(len(whole)) + whole
    head = tag(field.number, field.kind.wire)
    try:
        if field.message is not None:
            content = message_bytes(field.message, item, unknown)
            return head + encode_varint(len(content)) + content
        content = value_bytes(field.kind, item)
    except WrongValueError as error:
        raise WrongValueError(f"{name}: {error}") from error
    is_default = not field.oneof and not any(content)
    return b"" if is_default else head + content


def message_json(spec: MessageSpec, data: bytes) -> dict[str, JsonValue]:
    """Return a canonical message as an object, without absent fields."""
    values: dict[str, JsonValue] = {}
    for number, raw in wire_fields(data):
        field = spec.fields[number]
        if not field.repeated:
            values[field.name] = _field_json(field, raw)
            continue
        entries = values.setdefault(field.name, [])
        if not isinstance(entries, list):
            continue
        # One occurrence of the field holds a message, a text, or packed numbers.
        if field.kind.wire is WireType.BYTES or isinstance(raw, int):
            entries.append(_field_json(field, raw))
        elif field.kind.wire is WireType.VARINT:
            entries += [_value_json(field.kind, number) for number in wire_integers(raw)]
        else:
            width = 8 if field.kind.wire is WireType.FIXED64 else 4
            entries += [_value_json(field.kind, raw[at : at + width]) for at in range(0, len(raw), width)]
    return values


def _field_json(field: FieldSpec, raw: int | bytes) -> JsonValue:
    if field.message is not None and isinstance(raw, bytes):
        return message_json(field.message, raw)
    return _value_json(field.kind, raw)


def wire_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and content of each field of a serialised message: varints as integers."""
    for number, wire, value, position in fields(data, 0, len(data)):
        if wire == WireType.VARINT:
            yield number, value
        elif wire == WireType.BYTES:
            yield number, data[value:position]
        else:
            yield number, data[position : position + (8 if wire == WireType.FIXED64 else 4)]


def wire_integers(data: bytes) -> list[int]:
    """Return the varints of a packed field."""
    values: list[int] = []
    at = 0
    while at < len(data):
        value, at = decode_varint(data, at, len(data))
        values.append(value)
    return values
