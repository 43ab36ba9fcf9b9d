"""Protobuf-JSON of Chakra messages to their wire format and back, driven by the tables of the schema.

Both spellings of a name (``dataDeps``, ``data_deps``) are taken, the schema's own is written. Recursion is as
deep as the schema, never as the input.
"""

from __future__ import annotations

from collections.abc import Iterator

from hespas.converters.chakra.json_values import JsonValue, WrongValueError, value_bytes, value_json
from hespas.schemas.chakra.messages import GLOBAL_METADATA, NODE, FieldSpec, MessageSpec
from hespas.schemas.chakra.tables import WireType, encode_varint, tag

__all__ = ["message_bytes", "message_json", "wire_fields", "wire_integers"]


def _spellings(spec: MessageSpec) -> dict[str, FieldSpec]:
    named: dict[str, FieldSpec] = {}
    for field in spec.fields.values():
        first, *others = field.name.split("_")
        named[field.name] = named[first + "".join(map(str.capitalize, others))] = field
    return named


def _by_message(*roots: MessageSpec) -> dict[str, dict[str, FieldSpec]]:
    """Fields by name, of all messages within ``roots``."""
    found: dict[str, dict[str, FieldSpec]] = {}
    waiting = list(roots)
    while waiting:
        spec = waiting.pop()
        found[spec.name] = _spellings(spec)
        waiting += [field.message for field in spec.fields.values() if field.message is not None]
    return found


_FIELDS = _by_message(NODE, GLOBAL_METADATA)


def message_bytes(spec: MessageSpec, value: JsonValue, unknown: list[str]) -> bytes:
    """The message that an object says, in canonical form; names the schema lacks go to ``unknown``.

    Raises :class:`WrongValueError`, whose message starts with the path to the value.
    """
    if not isinstance(value, dict):
        raise WrongValueError(f"no {spec.name} object")
    fields = _FIELDS[spec.name]
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
            raise WrongValueError(f"{name}: there is a value already, {chosen}")
        if field.number in parts:
            raise WrongValueError(f"{name}: stands twice, in two spellings")
        chosen = name if field.oneof else chosen
        parts[field.number] = _field_bytes(field, item, name, unknown)
    return b"".join(parts[number] for number in sorted(parts))


def _field_bytes(field: FieldSpec, item: JsonValue, name: str, unknown: list[str]) -> bytes:
    if field.repeated:
        return _repeated_bytes(field, item, name, unknown)
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


def _repeated_bytes(field: FieldSpec, item: JsonValue, name: str, unknown: list[str]) -> bytes:
    if not isinstance(item, list):
        raise WrongValueError(f"{name}: no list")
    head = tag(field.number, WireType.BYTES)
    parts: list[bytes] = []
    for place, entry in enumerate(item):
        try:
            if field.message is not None:
                content = message_bytes(field.message, entry, unknown)
                parts += (head, encode_varint(len(content)), content)
                continue
            content = value_bytes(field.kind, entry)
        except WrongValueError as error:
            raise WrongValueError(f"{name}[{place}]: {error}") from error
        parts += (head, content) if field.kind.wire is WireType.BYTES else (content,)
    whole = b"".join(parts)
    if field.message is not None or field.kind.wire is WireType.BYTES or not whole:
        return whole
    return head + encode_varint(len(whole)) + whole


def message_json(spec: MessageSpec, data: bytes) -> dict[str, JsonValue]:
    """A canonical message as an object; fields that are not there are left out."""
    found: dict[str, JsonValue] = {}
    for number, raw in wire_fields(data):
        field = spec.fields[number]
        if not field.repeated:
            found[field.name] = _field_json(field, raw)
            continue
        entries = found.setdefault(field.name, [])
        if isinstance(entries, list):
            entries += _entries_json(field, raw)
    return found


def _field_json(field: FieldSpec, raw: int | bytes) -> JsonValue:
    if field.message is not None and isinstance(raw, bytes):
        return message_json(field.message, raw)
    return value_json(field.kind, raw)


def _entries_json(field: FieldSpec, raw: int | bytes) -> list[JsonValue]:
    """The entries that one occurrence of a repeated field holds: a message, a text, or packed numbers."""
    if field.kind.wire is WireType.BYTES or isinstance(raw, int):
        return [_field_json(field, raw)]
    if field.kind.wire is WireType.VARINT:
        return [value_json(field.kind, number) for number in wire_integers(raw)]
    width = 8 if field.kind.wire is WireType.FIXED64 else 4
    return [value_json(field.kind, raw[at : at + width]) for at in range(0, len(raw), width)]


def wire_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and content of each field of a message that a serialiser wrote: varints as integers."""
    at, size = 0, len(data)
    while at < size:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == WireType.VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        width = 8 if wire == WireType.FIXED64 else 4
        if wire == WireType.BYTES:
            width, at = _varint(data, at)
        yield key >> 3, data[at : at + width]
        at += width


def wire_integers(data: bytes) -> list[int]:
    """The varints of a packed field."""
    found: list[int] = []
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint and the position behind it."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
