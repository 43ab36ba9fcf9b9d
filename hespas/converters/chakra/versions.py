"""Telling the schema of a trace by its first frames: labels are unreliable and numbers were reused.

A metadata frame with a version text or with attributes in field 2 can only be of today's schema. Everything
else (no metadata, empty ones, attributes in field 1) needs :mod:`.resolution` from the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hespas.files.wire import BYTES, VARINT, WireError, encode_varint, fields
from hespas.schemas.chakra.history import CURRENT, EARLY, VERSIONS

__all__ = [
    "FirstFrame",
    "Signature",
    "as_current_metadata",
    "first_frame",
    "looks_old",
    "possible_versions",
]

_NAME_TAG = b"\x0a"
_WITH_METADATA = frozenset(label for label, version in VERSIONS.items() if version.metadata)
_PROTO2 = frozenset(label for label, version in VERSIONS.items() if version.syntax == "proto2")


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
        found: list[tuple[int, int, bytes]] = []
        try:
            for number, wire, start, end in fields(message, 0, len(message)):
                found.append((number, wire, message[start:end] if wire == BYTES else b""))
        except WireError:
            return None
        return cls(tuple(found))

    @property
    def wires(self) -> frozenset[tuple[int, int]]:
        """Which (number, wire type) there are."""
        return frozenset((number, wire) for number, wire, _ in self.fields)

    def contents(self, number: int) -> list[bytes]:
        """What stands in a length-delimited field."""
        return [content for found, wire, content in self.fields if found == number and wire == BYTES]


def first_frame(signature: Signature) -> FirstFrame:
    """Whether the first frame is a ``GlobalMetadata`` (an empty one is) or already a ``Node``."""
    wires = {number: wire for number, wire, _ in reversed(signature.fields)}
    if wires.get(1) == VARINT or set(wires) - {1, 2}:
        return FirstFrame.NODE if set(wires) - {2} else FirstFrame.UNKNOWN
    return FirstFrame.METADATA if set(wires.values()) <= {BYTES} else FirstFrame.UNKNOWN


def possible_versions(signature: Signature) -> frozenset[str]:
    """The versions whose traces may begin with this frame.

    A node may come first in all of proto2, since writers were slower than the schema; today's codec reads
    such a file only as a faulty one. An attribute begins with its name, whose tag is a line feed: no version
    label does. Attributes of proto2 declare a type, where those of today have a doc string.
    """
    if first_frame(signature) is not FirstFrame.METADATA:
        return _PROTO2 | {CURRENT}
    if not signature.fields:
        return _WITH_METADATA
    first = signature.contents(1)
    if len(first) < len(signature.fields) or not all(map(_is_attribute, first)):
        return frozenset({CURRENT})
    typed = [(2, VARINT) in inner.wires for inner in map(Signature.of, first) if inner is not None]
    if all(typed):
        return _WITH_METADATA & _PROTO2
    return frozenset() if any(typed) else frozenset({EARLY})


def _is_attribute(content: bytes) -> bool:
    inner = Signature.of(content) if content.startswith(_NAME_TAG) else None
    return inner is not None


def as_current_metadata(signature: Signature) -> bytes:
    """Early 0.0.4 metadata, whose attributes are in field 1, as metadata of today."""
    return b"".join(
        b"\x12" + encode_varint(len(content)) + content
        for number, _, content in signature.fields
        if number == 1
    )


def looks_old(signature: Signature) -> bool:
    """Whether a node has fields as only nodes before 0.0.4 have them."""
    wires = signature.wires
    if wires & {(6, BYTES), (7, BYTES)} or any((number, VARINT) in wires for number in range(8, 21)):
        return True
    old = [inner for inner in map(Signature.of, signature.contents(11)) if inner is not None]
    return any({(1, BYTES), (2, VARINT)} <= inner.wires for inner in old)
