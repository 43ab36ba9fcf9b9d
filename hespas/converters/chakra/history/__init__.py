"""Which schema a trace has. Labels are unreliable and numbers were reused, so its structure decides.

A metadata frame with a version text or with attributes in field 2 can only be of today's schema. Everything
else (no metadata, empty ones, attributes in field 1) needs evidence from the nodes, which is held against the
table of versions.
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
    Longs,
    Window,
    Words,
    copy_spans,
    not_text,
    packed_varints,
)
from hespas.converters.chakra.wire.walk import Fields, walk
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
            for number, wire, start, end in wire_fields(message, 0, len(message)):
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
    inner = Signature.of(content) if content.startswith(_ATTRIBUTE_START) else None
    return inner is not None


def as_current_metadata(signature: Signature) -> bytes:
    """Early 0.0.4 metadata, whose attributes are in field 1, as metadata of today."""
    return b"".join(
        b"\x12" + encode_varint(len(content)) + content
        for number, _, content in signature.fields
        if number == 1
    )


_OLD_TAGS = (6 << 3 | 2, 7 << 3 | 2, *(number << 3 for number in range(8, 21)))
TAGS_OF_OLD = frozenset((*_OLD_TAGS, 11 << 3 | 2))
"""Tags of which :func:`looks_old` needs one."""


def looks_old(signature: Signature) -> bool:
    """Whether a node has fields as only nodes before 0.0.4 have them."""
    wires = signature.wires
    if wires & {(6, BYTES), (7, BYTES)} or any((number, VARINT) in wires for number in range(8, 21)):
        return True
    old = [inner for inner in map(Signature.of, signature.contents(11)) if inner is not None]
    return any({(1, BYTES), (2, VARINT)} <= inner.wires for inner in old)


# --- Which version a trace has: its evidence held against the table of versions.
#
# A version is taken when it is the only one that explains every field, or when all that do read the same
# graph from them. Otherwise the user has to name one, and a name that contradicts the structure is refused.

_PACKED_PARENTS = 4 << 3 | 2


class Resolution(NamedTuple):
    """``reading``: the version whose table to read with; ``label``: what to call the file's version."""

    reading: str
    label: str


def survivors(evidence: Evidence, possible: Collection[str], *, has_metadata: bool) -> frozenset[str]:
    """The versions of ``possible`` that explain all evidence."""
    fitting = _fitting(evidence, possible, has_metadata, texts_are_lists=False)
    if fitting:
        return fitting
    # What nobody writes, lists packed so that they look like text, is considered where nothing else fits;
    # then fields that today's schema does not know.
    fitting = _fitting(evidence, possible, has_metadata, texts_are_lists=True)
    return fitting or frozenset(
        label for label in possible if label in NAMED[CURRENT] and _tolerable(evidence)
    )


def _fitting(
    evidence: Evidence, possible: Collection[str], has_metadata: bool, *, texts_are_lists: bool
) -> frozenset[str]:
    old = {
        label
        for label in possible
        if VERSIONS[label].syntax == "proto2" and _fits_old(VERSIONS[label], evidence, texts_are_lists)
    }
    # Without metadata, or beside another explanation, a trace of today is at least one that a serialiser of
    # today would have written.
    canonical = not evidence.unlike_proto3
    fits = _fits_current(evidence) and (canonical or (has_metadata and not old))
    return frozenset(old) | frozenset(label for label in possible if label in NAMED[CURRENT] and fits)


def _fits_current(evidence: Evidence) -> bool:
    fields = VERSIONS[CURRENT].node.fields
    if evidence.broken - {_ATTRIBUTE_TAG}:
        return False
    return all(tag >> 3 in fields and _has_wire(fields[tag >> 3], tag & 7) for tag in evidence.largest)


def _tolerable(evidence: Evidence) -> bool:
    """Whether today's codec may read it, leaving unknown fields out: nothing looks like an older schema."""
    old_attributes = _ATTRIBUTE_TAG in evidence.largest and _ATTRIBUTE_TAG not in evidence.broken
    return not old_attributes and not evidence.largest.keys() & set(_OLD_TAGS)


def _fits_old(version: SchemaVersion, evidence: Evidence, texts_are_lists: bool) -> bool:
    if evidence.broken & {_PACKED_PARENTS, _ATTRIBUTE_TAG} or not _fits_fields(version, evidence):
        return False
    types, kinds = len(version.declared), len(version.comm_types)
    if max(evidence.valueless, default=-1) >= types or max(evidence.comm_types, default=-1) >= kinds:
        return False
    return all(
        _explains(version.declared, place, seen, texts_are_lists) for place, seen in evidence.values.items()
    )


def _fits_fields(version: SchemaVersion, evidence: Evidence) -> bool:
    """Whether a version has all fields that nodes have, for values as theirs, and requires no others."""
    fields = version.node.fields
    for tag, largest in evidence.largest.items():
        spec = fields.get(tag >> 3)
        if spec is None or not _has_wire(spec, tag & 7):
            return False
        too_large = spec.largest is not None and largest > spec.largest
        if too_large or (spec.kind is ProtoKind.STRING and tag in evidence.not_text):
            return False
    return not any(spec.required and spec.number in evidence.lacking for spec in fields.values())


def _has_wire(spec: FieldSpec, wire: int) -> bool:
    packed = spec.repeated and spec.kind.wire == WireType.VARINT and wire == WireType.BYTES
    return wire == spec.kind.wire or packed


def _explains(
    declared: tuple[DeclaredType, ...], place: tuple[int, int], seen: _Seen, texts_are_lists: bool
) -> bool:
    """Whether values of one (declared type, tag) can be what the version says."""
    number, tag = place
    if number >= len(declared) or declared[number].field.number != tag >> 3:
        return False
    spec, wire = declared[number].field, tag & 7
    if wire == spec.kind.wire:
        return not (spec.kind is ProtoKind.BOOL and seen & _Seen.ABOVE_ONE)
    if not spec.repeated or wire != WireType.BYTES:
        return False
    if seen & _Seen.EMPTY or (seen & _Seen.TEXT and not texts_are_lists):
        return False
    excluded = {ProtoKind.BOOL: _Seen.NO_BOOLS, ProtoKind.FLOAT: _Seen.NO_FLOATS}.get(
        spec.kind, _Seen.NO_VARINTS
    )
    return not seen & excluded


def _meaning(version: SchemaVersion, evidence: Evidence) -> Hashable:
    """What a version makes of the evidence: equal meanings are equal graphs."""
    fields = version.node.fields
    roles = frozenset(
        (tag, RENAMED_FIELDS.get(spec.name, spec.name))
        for tag in evidence.largest
        if (spec := fields.get(tag >> 3)) is not None
    )
    kinds = tuple(version.node_types[number] for number in sorted(evidence.node_types) if number < 7)
    stated = evidence.comm_types
    comm = tuple(version.comm_types[number] for number in sorted(stated) if number < len(version.comm_types))
    if not version.declared:
        return roles, kinds, comm, (), ()
    values = tuple(
        (place, _target(version.declared[place[0]].becomes, seen))
        for place, seen in sorted(evidence.values.items())
    )
    empty = tuple(
        (number, target if target in _LISTS else AttributeField.UNSET)
        for number in sorted(evidence.valueless)
        for target in (version.declared[number].becomes,)
    )
    return roles, kinds, comm, values, empty


_LISTS = frozenset(field for field in AttributeField if field % 2 == 0 and field > AttributeField.DOUBLE)


def _target(becomes: AttributeField, seen: _Seen) -> AttributeField:
    """The type of a value; INT and UINT are the same for what both can hold."""
    unsigned = becomes is AttributeField.UINT64 and not seen & _Seen.ABOVE_INT64
    return AttributeField.INT64 if unsigned else becomes


def is_final(labels: Collection[str]) -> bool:
    """Whether more evidence cannot change the reading: none, one, or versions with the same tables."""
    tables = {
        (VERSIONS[label].declared, VERSIONS[label].node_types, VERSIONS[label].syntax) for label in labels
    }
    return len(tables) <= 1


def resolve(
    evidence: Evidence, possible: Collection[str], *, has_metadata: bool, named: str, path: str
) -> Resolution:
    """The version to read with. Raises :class:`UnsupportedError` (``ET003``) where none fits, several do and
    disagree, or the one that the user named does not.
    """
    found = survivors(evidence, possible, has_metadata=has_metadata)
    if not found:
        raise UnsupportedError(
            f"the fields of this file fit no version of the Chakra schema{_family(evidence)}",
            code="ET003",
            path=path,
            position="byte 0",
            hint="is this a Chakra trace? Its frames may come from several versions",
        )
    wanted = found & NAMED[named] if named else found
    if not wanted:
        raise UnsupportedError(
            f"this is no Chakra trace of schema {named}; its structure is that of {_listed(found)}",
            code="ET003",
            path=path,
            position="byte 0",
            hint="leave the version out, or name that one",
        )
    meanings = {label: _meaning(VERSIONS[label], evidence) for label in found}
    if len({meanings[label] for label in wanted}) > 1:
        raise UnsupportedError(
            f"nothing in this file tells which Chakra schema it has: it may be {_listed(wanted)}",
            code="ET003",
            path=path,
            position="byte 0",
            hint=f"name it, if you know: `source_version={_oldest(wanted)}`",
        )
    meaning = meanings[_oldest(wanted)]
    alike = {label for label in found if meanings[label] == meaning}
    return Resolution(_reading(alike, wanted, has_metadata=has_metadata), named or _label(alike))


def _family(evidence: Evidence) -> str:
    """What a file that fits no version resembles."""
    if _ATTRIBUTE_TAG in evidence.largest and _NAME_TAG in evidence.largest:
        return ": its nodes are like those of 0.0.2 or 0.0.3, but values do not stand where their types say"
    return ""


def _oldest(labels: Iterable[str]) -> str:
    return min(labels, key=list(VERSIONS).index)


def _reading(alike: set[str], wanted: Collection[str], *, has_metadata: bool) -> str:
    """One of several versions that read the same graph: today's, which is read fastest, else of the oldest
    table the newest version (that the user named), which knows most collectives.
    """
    if CURRENT in alike and has_metadata:
        return CURRENT
    old = alike - NAMED[CURRENT] or alike
    table = VERSIONS[_oldest(old)].declared
    same = [label for label in VERSIONS if label in old and VERSIONS[label].declared == table]
    return ([label for label in same if label in wanted] or same)[-1]


def _label(labels: set[str]) -> str:
    """The name that means just these versions or, where there is none, some more of them."""
    names = [name for name, meant in NAMED.items() if labels <= meant]
    return min(names, key=lambda name: len(NAMED[name]), default=_oldest(labels))


def _listed(labels: Collection[str]) -> str:
    """Versions for a message, oldest first; revisions of one schema are that schema beside others."""
    revisions = NAMED["0.0.3"]
    short = not revisions.issuperset(labels)
    names = ["0.0.3" if short and label in revisions else label for label in VERSIONS if label in labels]
    if EARLY in names and CURRENT in names:
        names.remove(EARLY)
    return " or ".join(dict.fromkeys(names))


# What the nodes of a trace say about its schema: which fields they have, of which wire types, how large.
#
# Evidence is collected over as many frames as it takes and then held against each version's table above.
# It is a few small sets, however long the trace is.

_ATTRIBUTE_TAG = 11 << 3 | WireType.BYTES
"""Attributes of 0.0.2 and 0.0.3 nodes."""

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
"""Numbers that a proto3 serialiser leaves out when they are 0."""

_COMM_TYPE = (9, int.from_bytes(b"comm_typ", "little"), ord("e"))
_UNKNOWN_TAG = 32 << 3
"""No version has a field of this number, or of a larger one."""
_LARGEST_TYPE = 15
_MANY = 64


class _Seen(IntFlag):
    """What has been seen of the values of one (declared type, tag) of attributes."""

    ABOVE_ONE = 1
    ABOVE_INT64 = 2
    EMPTY = 4
    TEXT = 8
    NO_BOOLS = 16
    NO_FLOATS = 32
    NO_VARINTS = 64


@dataclass(slots=True, eq=False)
class Evidence:
    """Collected over nodes, and over the metadata attributes of old traces.

    ``largest`` is the largest value by tag (0 for what is no integer), ``lacking`` the numbers of fields that
    some node lacks, ``broken`` the tags whose content is not what it is in any schema that has messages or
    lists there, ``not_text`` those whose content is no text. ``values`` says what attribute values look like
    by (declared type, tag), ``valueless`` the declared types of attributes without one. ``unlike_proto3``:
    some node is not as a proto3 serialiser writes it.
    """

    largest: dict[int, int] = field(default_factory=dict[int, int])
    lacking: set[int] = field(default_factory=set[int])
    broken: set[int] = field(default_factory=set[int])
    not_text: set[int] = field(default_factory=set[int])
    node_types: set[int] = field(default_factory=set[int])
    values: dict[tuple[int, int], _Seen] = field(default_factory=dict[tuple[int, int], _Seen])
    valueless: set[int] = field(default_factory=set[int])
    comm_types: set[int] = field(default_factory=set[int])
    unlike_proto3: bool = False

    def add_nodes(self, window: Window, start: Longs, end: Longs) -> None:
        """Take in nodes; malformed ones say nothing."""
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
        """Take in the attributes of a metadata frame that may be one of 0.0.3."""
        window = Window.holding(np.frombuffer(message, np.uint8))
        fields = walk(window, np.zeros(1, np.int64), np.full(1, len(message)))
        self._attributes(fields, fields.rows(_NAME))

    def _field(self, tag: int, fields: Fields) -> None:
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
            known = _IO_TAGS if tag in _IO else _ATTR_TAGS
            if inner.bad.any() or not np.isin(inner.tag, known).all():
                self.broken.add(tag)
        if tag == _ATTRIBUTE_TAG:
            self._attributes(fields, rows)

    def _attributes(self, fields: Fields, rows: Longs) -> None:
        """Attributes of proto2, standing in the given fields."""
        start = fields.at[rows]
        inner = walk(fields.window, start, start + fields.value[rows].view(np.int64))
        declared = inner.scalar(_TYPE)
        has_value = np.zeros(inner.messages, np.bool_)
        number = inner.tag >> 3
        held = np.flatnonzero((number > 3) & (number < 16))
        has_value[inner.owner[held]] = True
        known = np.isin(inner.tag, (_NAME, _TYPE, _DOC))
        known[held] = True
        complete = inner.has(_NAME) & inner.has(_TYPE) & (declared <= _LARGEST_TYPE)
        if inner.bad.any() or not (known.all() and complete.all()):
            self.broken.add(_ATTRIBUTE_TAG)
            return
        self._few(self.valueless, declared[~has_value])
        code = declared[inner.owner[held]].view(np.int64) * 128 + inner.tag[held]
        for each in np.unique(code).tolist():
            place = divmod(each, 128)
            seen = _looks(inner, held[code == each], place[1] & 7)
            self.values[place] = self.values.get(place, _Seen(0)) | seen
        is_kind = held[_named_comm_type(inner)[inner.owner[held]]]
        self._few(self.comm_types, inner.value[is_kind[inner.tag[is_kind] & 7 == WireType.VARINT]])

    @staticmethod
    def _few(into: set[int], values: Words) -> None:
        """Add distinct values; more than a few are all too large, and the smallest and largest will do."""
        distinct: list[int] = np.unique(values).tolist()
        into.update(distinct if len(distinct) < _MANY else (distinct[0], distinct[-1]))


def _looks(fields: Fields, rows: Longs, wire: int) -> _Seen:
    """What the values in some fields of one tag look like."""
    value = fields.value[rows]
    if wire == WireType.VARINT:
        highest = int(value.max())
        return _Seen(_Seen.ABOVE_ONE * (highest > 1) | _Seen.ABOVE_INT64 * (highest >= 1 << 63))
    if wire != WireType.BYTES:
        return _Seen(0)
    start, length = fields.at[rows], value.view(np.int64)
    seen = _Seen.EMPTY if not length.all() else _Seen(0)
    filled = np.flatnonzero(length)
    if not len(filled):
        return seen
    content = ByteRows(*copy_spans(fields.window, start[filled], length[filled]))
    if (~_is_binary(content)).any():
        seen |= _Seen.TEXT
    if (content.data > 1).any():
        seen |= _Seen.NO_BOOLS
    if (content.lengths % 4).any():
        seen |= _Seen.NO_FLOATS
    if packed_varints(fields.window, start[filled], length[filled])[2] is not None:
        seen |= _Seen.NO_VARINTS
    return seen


def _is_binary(content: ByteRows) -> Bools:
    """Which rows nobody would write as a text: no UTF-8, or with control characters."""
    data = content.data
    control = ((data < 0x20) & (data != 0x09) & (data != 0x0A) & (data != 0x0D)) | (data == 0x7F)
    return not_text(content) | (np.add.reduceat(control, content.offsets[:-1], dtype=np.int64) > 0)


def _named_comm_type(fields: Fields) -> Bools:
    """Which attributes are called ``comm_type``."""
    start, length = fields.span(1)
    size, head, last = _COMM_TYPE
    named = (length == size) & (fields.window.words[start] == head)
    same: Bools = named & (fields.window.u8[start + 8] == last)
    return same
