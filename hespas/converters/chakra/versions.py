"""Telling the schema of a trace by its wire signature: labels are unreliable and numbers were reused.

Only 0.0.4 (= 1.0.0) is read. Older files would decode into nonsense (a 0.0.3 file yields dependencies made of
the characters of a text), so they are recognised by the wire types of their fields and refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hespas.schemas.chakra.tables import encode_varint

__all__ = [
    "FirstFrame",
    "Schema",
    "Signature",
    "as_current_metadata",
    "first_frame",
    "is_attribute_first",
    "node_schema",
]

_VARINT, _BYTES = 0, 2
_NAME_TAG = b"\x0a"
_CURRENT = {1: {0}, 2: {2}, 3: {0}, 4: {0, 2}, 5: {0, 2}, 6: {0}, 7: {0}, 8: {2}, 9: {2}, 10: {2}}
_STRINGS_003 = {5, 6, 7, 8, 9, 10}


class Schema(Enum):
    """What a file's frames look like."""

    CURRENT = "0.0.4"
    OLD_003 = "0.0.2 or 0.0.3"
    OLD_001 = "0.0.1"
    UNCLEAR = "unclear"
    """Nothing tells: the fields present mean the same in several schemas."""
    UNKNOWN = "unknown"
    """No version of the schema has these fields."""


class FirstFrame(Enum):
    """What the first frame is."""

    METADATA = "metadata"
    NODE = "node"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Signature:
    """Top-level fields of one message: (number, wire type, content of a length-delimited one)."""

    fields: tuple[tuple[int, int, bytes], ...]

    @classmethod
    def of(cls, message: bytes) -> Signature | None:
        """The fields of a message, None where it is no protobuf message."""
        fields: list[tuple[int, int, bytes]] = []
        at = 0
        while at < len(message):
            tag, at = _varint(message, at)
            number, wire = tag >> 3, tag & 7
            size = {1: 8, 5: 4}.get(wire, 0)
            if wire == _VARINT:
                _, at = _varint(message, at)
            elif wire == _BYTES:
                size, at = _varint(message, at)
            elif not size:
                return None
            if number < 1 or at < 0 or at + size > len(message):
                return None
            fields.append((number, wire, message[at : at + size]))
            at += size
        return cls(tuple(fields)) if at == len(message) else None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A varint and the position behind it; a position beyond the message when it is cut off."""
    value = 0
    for shift in range(0, 70, 7):
        if not 0 <= at < len(message):
            break
        value |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return value, at
    return 0, len(message) + 1


def first_frame(signature: Signature) -> FirstFrame:
    """Whether the first frame is a ``GlobalMetadata`` (an empty one is) or already a ``Node``."""
    wires = {number: wire for number, wire, _ in reversed(signature.fields)}
    if wires.get(1) == _VARINT or set(wires) - {1, 2}:
        return FirstFrame.NODE if set(wires) - {2} else FirstFrame.UNKNOWN
    return FirstFrame.METADATA if set(wires.values()) <= {_BYTES} else FirstFrame.UNKNOWN


def is_attribute_first(signature: Signature) -> bool:
    """Whether metadata keep attributes in field 1, as in 0.0.3 and the first days of 0.0.4.

    An attribute begins with its name, whose tag is a line feed: no version label does.
    """
    first = [content for number, _, content in signature.fields if number == 1]
    if not first or not all(content.startswith(_NAME_TAG) for content in first):
        return False
    inner = [Signature.of(content) for content in first]
    return all(part is not None and any(number == 1 for number, _, _ in part.fields) for part in inner)


def as_current_metadata(signature: Signature) -> bytes:
    """Early 0.0.4 metadata, whose attributes are in field 1, as metadata of today."""
    return b"".join(
        b"\x12" + encode_varint(len(content)) + content
        for number, _, content in signature.fields
        if number == 1
    )


def node_schema(signature: Signature) -> Schema:
    """Which schema a node was written in, by the wire types of its fields."""
    wires = [(number, wire) for number, wire, _ in signature.fields]
    if any(number in _STRINGS_003 - {5, 8, 9, 10} and wire == _BYTES for number, wire in wires):
        return Schema.OLD_003
    if any(number == 11 and wire == _BYTES for number, wire in wires):
        return Schema.OLD_003
    if any(8 <= number <= 20 and wire == _VARINT for number, wire in wires):
        return Schema.OLD_001
    known = [wire in _CURRENT[number] for number, wire in wires if number in _CURRENT]
    if wires and not all(known):
        return Schema.UNKNOWN
    tells = any(number in (8, 9, 10) or (number in (4, 5) and wire == _BYTES) for number, wire in wires)
    return Schema.CURRENT if tells else Schema.UNCLEAR
