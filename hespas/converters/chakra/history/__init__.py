"""Schema version of a trace, determined from its structure: labels are unreliable and field numbers were
reused.

Only the current schema has a metadata frame with a version text or with attributes in field 2. All other
files (no metadata, empty metadata, attributes in field 1) need evidence from their nodes: the fields, wire
types and value ranges that occur. The evidence is a few small sets, independent of the length of the trace,
and is compared with the table of versions. A version is chosen if it is the only one that explains every
field, or if all that do so read the same graph. Otherwise the user must name a version; a version that
contradicts the structure is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.wire import (
    Bools,
    ByteRows,
    ByteWindow,
    Longs,
    Words,
    copy_spans,
    not_text,
    packed_varints,
)
from hespas.converters.chakra.wire.walk import WireFields, walk
from hespas.files.wire import BYTES, VARINT, WireError, encode_varint
from hespas.files.wire import fields as wire_fields
from hespas.graph.errors import UnsupportedError
from hespas.schemas.chakra import CURRENT, EARLY
from hespas.schemas.chakra.tables import (
    NAMED,
    RENAMED_FIELDS,
    VALUE_FIELDS,
    VERSIONS,
    AttributeField,
    DeclaredType,
    FieldSpec,
    ProtoKind,
    SchemaVersion,
    WireType,
)

__all__ = [
    "TAGS_OF_OLD",
    "Evidence",
    "FirstFrame",
    "Resolution",
    "Signature",
    "as_current_metadata",
    "first_frame",
    "is_final",
    "looks_old",
    "possible_versions",
    "resolve",
    "survivors",
]

_ATTRIBUTE_START = b"\x0a"
_WITH_METADATA = frozenset(label for label, version in VERSIONS.items() if version.metadata)
_PROTO2 = frozenset(label for label, version in VERSIONS.items() if version.syntax == "proto2")


class FirstFrame(Enum):
    """Type of the first frame of a trace file, which shows whether the file has metadata."""

    METADATA = "metadata"
    NODE = "node"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Signature:
    """Top-level fields of one protobuf message, from which the schema version is recognised. A field is a
    tuple of field number, wire type and content (empty unless it is length-delimited).
    """

    fields: tuple[tuple[int, int, bytes], ...]

    @classmethod
    def of(cls, message: bytes) -> Signature | None:
        """Return the fields of a message, None if the bytes are not a protobuf message."""
        fields: list[tuple[int, int, bytes]] = []
        try:
            for number, wire, start, end in wire_fields(message, 0, len(message)):
                fields.append((number, wire, message[start:end] if wire == BYTES else b""))
        except WireError:
            return None
        return cls(tuple(fields))

    @property
    def wires(self) -> frozenset[tuple[int, int]]:
        """Return the distinct pairs of (field number, wire type) in the message."""
        return frozenset((number, wire) for number, wire, _ in self.fields)

    def contents(self, number: int) -> list[bytes]:
        """Return the contents of all length-delimited fields with this number."""
        return [
            content for field_number, wire, content in self.fields if field_number == number and wire == BYTES
        ]


def first_frame(signature: Signature) -> FirstFrame:
    """Return the type of the message in the first frame: ``GlobalMetadata`` (possibly empty) or ``Node``."""
    wires = {number: wire for number, wire, _ in reversed(signature.fields)}
    if wires.get(1) == BYTES and wires.get(2, BYTES) == BYTES:  # other fields are unknown, and are skipped
        return FirstFrame.METADATA
    if wires.get(1) == VARINT or set(wires) - {1, 2}:
        return FirstFrame.NODE if set(wires) - {2} else FirstFrame.UNKNOWN
    return FirstFrame.METADATA if set(wires.values()) <= {BYTES} else FirstFrame.UNKNOWN


def possible_versions(signature: Signature) -> frozenset[str]:
    """Return the versions whose traces may begin with a message with this ``signature``.

    A trace of any proto2 version may start with a node, because writers lagged behind the schema. The current
    codec reads such a file only as a faulty one. Field 1 of a metadata message is a version label or an
    attribute. An attribute begins with the tag of its name, a line feed, and a version label never does. In
    attributes of proto2, the field that now holds the doc string holds a type.
    """
    if first_frame(signature) is not FirstFrame.METADATA:
        return _PROTO2 | {CURRENT}
    if not signature.fields:
        return _WITH_METADATA
    first = signature.contents(1)
    attributes = [Signature.of(content) for content in first if content.startswith(_ATTRIBUTE_START)]
    if len(attributes) < len(signature.fields) or None in attributes:
        return frozenset({CURRENT})
    typed = [(2, VARINT) in inner.wires for inner in attributes if inner is not None]
    if all(typed):
        return _WITH_METADATA & _PROTO2
    return frozenset() if any(typed) else frozenset({EARLY})


def as_current_metadata(signature: Signature) -> bytes:
    """Convert metadata of early 0.0.4 files, which have their attributes in field 1, to the current form."""
    return b"".join(
        b"\x12" + encode_varint(len(content)) + content
        for number, _, content in signature.fields
        if number == 1
    )


_OLD_TAGS = (6 << 3 | 2, 7 << 3 | 2, *(number << 3 for number in range(8, 21)))
TAGS_OF_OLD = frozenset((*_OLD_TAGS, 11 << 3 | 2))
"""Tags of which :func:`looks_old` needs one."""


def looks_old(signature: Signature) -> bool:
    """Return True if a node has fields that only nodes before 0.0.4 have."""
    wires = signature.wires
    if wires & {(6, BYTES), (7, BYTES)} or any((number, VARINT) in wires for number in range(8, 21)):
        return True
    old = [inner for inner in map(Signature.of, signature.contents(11)) if inner is not None]
    return any({(1, BYTES), (2, VARINT)} <= inner.wires for inner in old)


_PACKED_PARENTS = 4 << 3 | 2


class Resolution(NamedTuple):
    """Result of determining the schema version. ``reading`` is the version whose field table is used for
    reading; ``label`` is the name of the file's version.
    """

    reading: str
    label: str


def survivors(evidence: Evidence, possible: Collection[str], *, has_metadata: bool) -> frozenset[str]:
    """Return those of the ``possible`` schema versions that are compatible with all evidence from the
    file.
    """
    fitting = _fitting(evidence, possible, has_metadata, texts_are_lists=False)
    if fitting:
        return fitting
    # Packed lists that look like text are unusual: they are considered only if nothing else fits.
    fitting = _fitting(evidence, possible, has_metadata, texts_are_lists=True)
    if fitting:
        return fitting
    # The current codec may read the trace without its unknown fields if nothing resembles an older schema.
    old_attributes = _ATTRIBUTE_TAG in evidence.largest and _ATTRIBUTE_TAG not in evidence.broken
    if old_attributes or evidence.largest.keys() & set(_OLD_TAGS):
        return frozenset()
    return frozenset(label for label in possible if label in NAMED[CURRENT])


def _fitting(
    evidence: Evidence, possible: Collection[str], has_metadata: bool, *, texts_are_lists: bool
) -> frozenset[str]:
    old = {
        label
        for label in possible
        if VERSIONS[label].syntax == "proto2" and _fits_old(VERSIONS[label], evidence, texts_are_lists)
    }
    # Without metadata, or if an old version fits as well, a current trace must be one that a current
    # serialiser would have written.
    fields = VERSIONS[CURRENT].node.fields
    fits = (
        (not evidence.unlike_proto3 or (has_metadata and not old))
        and not evidence.broken - {_ATTRIBUTE_TAG}
        and all(tag >> 3 in fields and _has_wire(fields[tag >> 3], tag & 7) for tag in evidence.largest)
    )
    return frozenset(old) | frozenset(label for label in possible if label in NAMED[CURRENT] and fits)


def _fits_old(version: SchemaVersion, evidence: Evidence, texts_are_lists: bool) -> bool:
    """Return True if a schema version before 0.0.4 (proto2) can have produced the evidence. It must have
    every field that occurs, allow all values, and require no field that some node lacks.
    """
    if evidence.broken & {_PACKED_PARENTS, _ATTRIBUTE_TAG}:
        return False
    fields = version.node.fields
    for tag, largest in evidence.largest.items():
        spec = fields.get(tag >> 3)
        if spec is None or not _has_wire(spec, tag & 7):
            return False
        too_large = spec.largest is not None and largest > spec.largest
        if too_large or (spec.kind is ProtoKind.STRING and tag in evidence.not_text):
            return False
    if any(spec.required and spec.number in evidence.lacking for spec in fields.values()):
        return False
    types, kinds = len(version.declared), len(version.comm_types)
    if max(evidence.valueless, default=-1) >= types or max(evidence.comm_types, default=-1) >= kinds:
        return False
    return all(
        _explains(version.declared, type_and_tag, seen, texts_are_lists)
        for type_and_tag, seen in evidence.values.items()
    )


def _has_wire(spec: FieldSpec, wire: int) -> bool:
    packed = spec.repeated and spec.kind.wire == WireType.VARINT and wire == WireType.BYTES
    return wire == spec.kind.wire or packed


def _explains(
    declared: tuple[DeclaredType, ...],
    type_and_tag: tuple[int, int],
    seen: _ValueTraits,
    texts_are_lists: bool,
) -> bool:
    """Return True if a schema version, with the attribute types ``declared``, allows the values of one
    attribute type. ``type_and_tag`` is the number of that type and the protobuf tag of the field that holds
    the value. ``seen`` are the traits of the values.
    """
    number, tag = type_and_tag
    if number >= len(declared) or declared[number].field.number != tag >> 3:
        return False
    spec, wire = declared[number].field, tag & 7
    if wire == spec.kind.wire:
        return not (spec.kind is ProtoKind.BOOL and seen & _ValueTraits.ABOVE_ONE)
    if not spec.repeated or wire != WireType.BYTES:
        return False
    if seen & _ValueTraits.EMPTY or (seen & _ValueTraits.TEXT and not texts_are_lists):
        return False
    excluded = {ProtoKind.BOOL: _ValueTraits.NO_BOOLS, ProtoKind.FLOAT: _ValueTraits.NO_FLOATS}.get(
        spec.kind, _ValueTraits.NO_VARINTS
    )
    return not seen & excluded


def _meaning(version: SchemaVersion, evidence: Evidence) -> Hashable:
    """Return the interpretation of the evidence by a schema version, as a value for comparisons. Two versions
    with equal values read the file as the same graph.
    """
    fields = version.node.fields
    roles = frozenset(
        (tag, RENAMED_FIELDS.get(spec.name, spec.name))
        for tag in evidence.largest
        if (spec := fields.get(tag >> 3)) is not None
    )
    kinds = tuple(version.node_types[number] for number in sorted(evidence.node_types) if number < 7)
    comm_types = evidence.comm_types
    comm = tuple(
        version.comm_types[number] for number in sorted(comm_types) if number < len(version.comm_types)
    )
    if not version.declared:
        return roles, kinds, comm, (), ()
    # INT and UINT are equivalent for values that both can hold.
    values = tuple(
        (
            type_and_tag,
            AttributeField.INT64
            if becomes is AttributeField.UINT64 and not seen & _ValueTraits.ABOVE_INT64
            else becomes,
        )
        for type_and_tag, seen in sorted(evidence.values.items())
        for becomes in (version.declared[type_and_tag[0]].becomes,)
    )
    empty = tuple(
        (number, target if target in _LISTS else AttributeField.UNSET)
        for number in sorted(evidence.valueless)
        for target in (version.declared[number].becomes,)
    )
    return roles, kinds, comm, values, empty


_LISTS = frozenset(field for field in AttributeField if field % 2 == 0 and field > AttributeField.DOUBLE)


def is_final(labels: Collection[str]) -> bool:
    """Return True if more evidence cannot change the result: no version, one, or versions with
    equal tables.
    """
    tables = {
        (VERSIONS[label].declared, VERSIONS[label].node_types, VERSIONS[label].syntax) for label in labels
    }
    return len(tables) <= 1


def resolve(
    evidence: Evidence, possible: Collection[str], *, has_metadata: bool, named: str, path: str
) -> Resolution:
    """Return the version for reading. Raise :class:`UnsupportedError` (``ET003``) if no version fits, if
    several fit and disagree, or if the version that the user named does not fit.
    """
    remaining = survivors(evidence, possible, has_metadata=has_metadata)
    if not remaining:
        note = ""
        if _ATTRIBUTE_TAG in evidence.largest and _NAME_TAG in evidence.largest:
            note = ": its nodes resemble 0.0.2 or 0.0.3, but values are not in the fields of their types"
        raise UnsupportedError(
            f"the fields of this file do not match any version of the Chakra schema{note}",
            code="ET003",
            path=path,
            position="byte 0",
            hint="check that the file is a Chakra trace, and that one version wrote all its frames",
        )
    wanted = remaining & NAMED[named] if named else remaining
    if not wanted:
        raise UnsupportedError(
            f"this is not a Chakra trace of schema {named}; its structure matches {_listed(remaining)}",
            code="ET003",
            path=path,
            position="byte 0",
            hint="omit the version, or name the matching one",
        )
    meanings = {label: _meaning(VERSIONS[label], evidence) for label in remaining}
    if len({meanings[label] for label in wanted}) > 1:
        raise UnsupportedError(
            f"this file does not determine its Chakra schema: it may be {_listed(wanted)}",
            code="ET003",
            path=path,
            position="byte 0",
            hint=f"name the version that wrote it, such as `source_version={_oldest(wanted)}`",
        )
    meaning = meanings[_oldest(wanted)]
    alike = {label for label in remaining if meanings[label] == meaning}
    # The label is the name for exactly these versions or, without such a name, for the fewest more.
    names = [name for name, labels in NAMED.items() if alike <= labels]
    label = min(names, key=lambda name: len(NAMED[name]), default=_oldest(alike))
    return Resolution(_reading(alike, wanted, has_metadata=has_metadata), named or label)


def _oldest(labels: Iterable[str]) -> str:
    return min(labels, key=list(VERSIONS).index)


def _reading(alike: set[str], wanted: Collection[str], *, has_metadata: bool) -> str:
    """Return the version whose field table is used for reading, from the versions ``alike``, which all read
    the same graph. The current version is preferred for a file with metadata, because it is read fastest.
    Otherwise it is the newest version that shares the attribute table of the oldest one, because that has the
    most collectives. Versions in ``wanted`` come first.
    """
    if CURRENT in alike and has_metadata:
        return CURRENT
    old = alike - NAMED[CURRENT] or alike
    table = VERSIONS[_oldest(old)].declared
    same = [label for label in VERSIONS if label in old and VERSIONS[label].declared == table]
    return ([label for label in same if label in wanted] or same)[-1]


def _listed(labels: Collection[str]) -> str:
    """Return the names of versions for a message, oldest first. All revisions of 0.0.3 are called 0.0.3
    unless only revisions are listed.
    """
    revisions = NAMED["0.0.3"]
    short = not revisions.issuperset(labels)
    names = ["0.0.3" if short and label in revisions else label for label in VERSIONS if label in labels]
    if EARLY in names and CURRENT in names:
        names.remove(EARLY)
    return " or ".join(dict.fromkeys(names))


_ATTRIBUTE_TAG = 11 << 3 | WireType.BYTES
"""Tag of attributes in nodes of 0.0.2 and 0.0.3."""

_NAME, _TYPE, _DOC = 0x0A, 0x10, 0x1A
_ID_TAG, _NAME_TAG, _TYPE_TAG = 0x08, 0x12, 0x18
_CTRL, _DATA = 4 << 3, 5 << 3
_TEXT_TAGS = tuple(number << 3 | WireType.BYTES for number in range(5, 11))
_PACKED = (_CTRL | WireType.BYTES, _DATA | WireType.BYTES)
_IO = tuple(number << 3 | WireType.BYTES for number in (8, 9))
_ATTR = 10 << 3 | WireType.BYTES
_IO_TAGS = (0x0A, 0x12, 0x1A)
_ATTR_TAGS = (
    0x0A,
    0x12,
    *(number << 3 | kind.wire for number, kind in VALUE_FIELDS.items()),
    *(number + 1 << 3 | WireType.BYTES for number in VALUE_FIELDS),
)
_NOT_IN_PROTO3 = (_ID_TAG, _TYPE_TAG, 6 << 3, 7 << 3)
"""Tags of numbers that a proto3 serialiser omits if they are 0."""

_COMM_TYPE = (9, int.from_bytes(b"comm_typ", "little"), ord("e"))
_UNKNOWN_TAG = 32 << 3
"""Smallest tag that no version uses."""
_LARGEST_TYPE = 15
_MANY = 64


class _ValueTraits(IntFlag):
    """Properties of the values of attributes with one declared type and one protobuf tag. They distinguish
    schema versions.
    """

    ABOVE_ONE = 1
    ABOVE_INT64 = 2
    EMPTY = 4
    TEXT = 8
    NO_BOOLS = 16
    NO_FLOATS = 32
    NO_VARINTS = 64


@dataclass(slots=True, eq=False)
class Evidence:
    """Facts about the nodes of a trace (and the metadata attributes of an old one) that distinguish schema
    versions.

    A tag is a field number with its wire type. ``largest`` has the largest integer by tag (0 for other
    types). ``lacking`` has the numbers of fields that are missing in some node. ``broken`` has the tags whose
    content is malformed where a schema expects a message or a list. ``not_text`` has the tags whose content
    is not text. ``values`` has the traits of attribute values by (declared type, tag). ``valueless`` has the
    declared types of attributes without a value. ``unlike_proto3`` is True if a proto3 serialiser would have
    written some node differently.
    """

    largest: dict[int, int] = field(default_factory=dict[int, int])
    lacking: set[int] = field(default_factory=set[int])
    broken: set[int] = field(default_factory=set[int])
    not_text: set[int] = field(default_factory=set[int])
    node_types: set[int] = field(default_factory=set[int])
    values: dict[tuple[int, int], _ValueTraits] = field(default_factory=dict[tuple[int, int], _ValueTraits])
    valueless: set[int] = field(default_factory=set[int])
    comm_types: set[int] = field(default_factory=set[int])
    unlike_proto3: bool = False

    def add_nodes(self, window: ByteWindow, start: Longs, end: Longs) -> None:
        """Add the facts about a range of nodes; malformed nodes are ignored."""
        fields = walk(window, start, end)
        if fields.bad.any():
            good = np.flatnonzero(~fields.bad)
            fields = walk(window, start[good], end[good])
        for number, tag in ((1, _ID_TAG), (2, _NAME_TAG), (3, _TYPE_TAG)):
            if not fields.has(tag).all():
                self.lacking.add(number)
        present = np.bincount(np.minimum(fields.tag, _UNKNOWN_TAG), minlength=_UNKNOWN_TAG + 1)
        for tag in np.flatnonzero(present[:_UNKNOWN_TAG]).tolist():
            self._field(tag, fields)
        if present[_UNKNOWN_TAG]:
            self.largest[_UNKNOWN_TAG] = 0
        self._few(self.node_types, fields.value[fields.rows(_TYPE_TAG)])

    def add_metadata(self, message: bytes) -> None:
        """Add the facts about the attributes of a metadata frame, which may be in the form of schema
        0.0.3.
        """
        window = ByteWindow.holding(np.frombuffer(message, np.uint8))
        fields = walk(window, np.zeros(1, np.int64), np.full(1, len(message)))
        self._attributes(fields, fields.rows(_NAME))

    def _field(self, tag: int, fields: WireFields) -> None:
        rows = fields.rows(tag)
        value = fields.value[rows]
        is_integer = tag & 7 == WireType.VARINT
        self.largest[tag] = max(self.largest.get(tag, 0), int(value.max()) if is_integer else 0)
        if tag in (_CTRL, _DATA) or (tag in (*_NOT_IN_PROTO3, _NAME_TAG) and not value.all()):
            self.unlike_proto3 = True
        if tag & 7 != WireType.BYTES:
            return
        start, length = fields.at[rows], value.view(np.int64)
        if tag in _TEXT_TAGS and not_text(ByteRows(*copy_spans(fields.window, start, length))).any():
            self.not_text.add(tag)
        if tag in _PACKED and packed_varints(fields.window, start, length)[2] is not None:
            self.broken.add(tag)
        if tag in _IO or tag == _ATTR:
            inner = walk(fields.window, start, start + length)
            tags = _IO_TAGS if tag in _IO else _ATTR_TAGS
            if inner.bad.any() or not np.isin(inner.tag, tags).all():
                self.broken.add(tag)
        if tag == _ATTRIBUTE_TAG:
            self._attributes(fields, rows)

    def _attributes(self, fields: WireFields, rows: Longs) -> None:
        """Record the types, value traits and collective kinds of the attributes in the fields ``rows``. If an
        attribute is malformed, record only that.
        """
        start = fields.at[rows]
        inner = walk(fields.window, start, start + fields.value[rows].view(np.int64))
        declared = inner.scalar(_TYPE)
        has_value = np.zeros(inner.messages, np.bool_)
        number = inner.tag >> 3
        held = np.flatnonzero((number > 3) & (number < 16))
        has_value[inner.owner[held]] = True
        expected = np.isin(inner.tag, (_NAME, _TYPE, _DOC))
        expected[held] = True
        complete = inner.has(_NAME) & inner.has(_TYPE) & (declared <= _LARGEST_TYPE)
        if inner.bad.any() or not (expected.all() and complete.all()):
            self.broken.add(_ATTRIBUTE_TAG)
            return
        self._few(self.valueless, declared[~has_value])
        code = declared[inner.owner[held]].view(np.int64) * 128 + inner.tag[held]
        for pair in np.unique(code).tolist():
            type_and_tag = divmod(pair, 128)
            seen = _looks(inner, held[code == pair], type_and_tag[1] & 7)
            self.values[type_and_tag] = self.values.get(type_and_tag, _ValueTraits(0)) | seen
        name_start, name_length = inner.span(1)
        size, head, last = _COMM_TYPE
        named = (name_length == size) & (inner.window.words[name_start] == head)
        same: Bools = named & (inner.window.u8[name_start + 8] == last)
        is_kind = held[same[inner.owner[held]]]
        self._few(self.comm_types, inner.value[is_kind[inner.tag[is_kind] & 7 == WireType.VARINT]])

    @staticmethod
    def _few(into: set[int], values: Words) -> None:
        """Add the distinct ``values`` to a set. If there are many, add only the smallest and the largest: the
        largest is then above every number that a schema version allows, so the values in between do not
        matter.
        """
        distinct: list[int] = np.unique(values).tolist()
        into.update(distinct if len(distinct) < _MANY else (distinct[0], distinct[-1]))


def _looks(fields: WireFields, rows: Longs, wire: int) -> _ValueTraits:
    """Return the properties of the attribute values in ``fields`` (those of one wire type) that distinguish
    schema versions.
    """
    value = fields.value[rows]
    if wire == WireType.VARINT:
        highest = int(value.max())
        return _ValueTraits(
            _ValueTraits.ABOVE_ONE * (highest > 1) | _ValueTraits.ABOVE_INT64 * (highest >= 1 << 63)
        )
    if wire != WireType.BYTES:
        return _ValueTraits(0)
    start, length = fields.at[rows], value.view(np.int64)
    seen = _ValueTraits.EMPTY if not length.all() else _ValueTraits(0)
    filled = np.flatnonzero(length)
    if not len(filled):
        return seen
    content = ByteRows(*copy_spans(fields.window, start[filled], length[filled]))
    data = content.data
    control = ((data < 0x20) & (data != 0x09) & (data != 0x0A) & (data != 0x0D)) | (data == 0x7F)
    if (~(not_text(content) | (np.add.reduceat(control, content.offsets[:-1], dtype=np.int64) > 0))).any():
        seen |= _ValueTraits.TEXT
    if (content.data > 1).any():
        seen |= _ValueTraits.NO_BOOLS
    if (content.lengths % 4).any():
        seen |= _ValueTraits.NO_FLOATS
    if packed_varints(fields.window, start[filled], length[filled])[2] is not None:
        seen |= _ValueTraits.NO_VARINTS
    return seen
