"""Which version a trace has: its evidence held against the table of versions.

A version is taken when it is the only one that explains every field, or when all that do read the same graph
from them. Otherwise the user has to name one, and a name that contradicts the structure is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import NamedTuple

from hespas.converters.chakra.evidence import ATTRIBUTE_TAG, Evidence, Seen
from hespas.graph.errors import UnsupportedError
from hespas.schemas.chakra.history import CURRENT, EARLY, NAMED, PLACES, VERSIONS, Declared, SchemaVersion
from hespas.schemas.chakra.messages import FieldSpec
from hespas.schemas.chakra.tables import AttributeField, Kind, WireType

__all__ = ["Resolution", "is_final", "resolve", "survivors"]

_OLD_TAGS = (6 << 3 | 2, 7 << 3 | 2, *(number << 3 for number in range(8, 21)))
_PACKED_PARENTS = 4 << 3 | 2
_NAME_TAG = 2 << 3 | 2


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
    if evidence.broken - {ATTRIBUTE_TAG}:
        return False
    return all(tag >> 3 in fields and _has_wire(fields[tag >> 3], tag & 7) for tag in evidence.largest)


def _tolerable(evidence: Evidence) -> bool:
    """Whether today's codec may read it, leaving unknown fields out: nothing looks like an older schema."""
    old_attributes = ATTRIBUTE_TAG in evidence.largest and ATTRIBUTE_TAG not in evidence.broken
    return not old_attributes and not evidence.largest.keys() & set(_OLD_TAGS)


def _fits_old(version: SchemaVersion, evidence: Evidence, texts_are_lists: bool) -> bool:
    if evidence.broken & {_PACKED_PARENTS, ATTRIBUTE_TAG} or not _fits_fields(version, evidence):
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
        if too_large or (spec.kind is Kind.STRING and tag in evidence.not_text):
            return False
    return not any(spec.required and spec.number in evidence.lacking for spec in fields.values())


def _has_wire(spec: FieldSpec, wire: int) -> bool:
    packed = spec.repeated and spec.kind.wire == WireType.VARINT and wire == WireType.BYTES
    return wire == spec.kind.wire or packed


def _explains(
    declared: tuple[Declared, ...], place: tuple[int, int], seen: Seen, texts_are_lists: bool
) -> bool:
    """Whether values of one (declared type, tag) can be what the version says."""
    number, tag = place
    if number >= len(declared) or declared[number].field.number != tag >> 3:
        return False
    spec, wire = declared[number].field, tag & 7
    if wire == spec.kind.wire:
        return not (spec.kind is Kind.BOOL and seen & Seen.ABOVE_ONE)
    if not spec.repeated or wire != WireType.BYTES:
        return False
    if seen & Seen.EMPTY or (seen & Seen.TEXT and not texts_are_lists):
        return False
    excluded = {Kind.BOOL: Seen.NO_BOOLS, Kind.FLOAT: Seen.NO_FLOATS}.get(spec.kind, Seen.NO_VARINTS)
    return not seen & excluded


def _meaning(version: SchemaVersion, evidence: Evidence) -> Hashable:
    """What a version makes of the evidence: equal meanings are equal graphs."""
    fields = version.node.fields
    roles = frozenset(
        (tag, PLACES.get(spec.name, spec.name))
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


def _target(becomes: AttributeField, seen: Seen) -> AttributeField:
    """The type of a value; INT and UINT are the same for what both can hold."""
    unsigned = becomes is AttributeField.UINT64 and not seen & Seen.ABOVE_INT64
    return AttributeField.INT64 if unsigned else becomes


def is_final(found: Collection[str]) -> bool:
    """Whether more evidence cannot change the reading: none, one, or versions with the same tables."""
    tables = {
        (VERSIONS[label].declared, VERSIONS[label].node_types, VERSIONS[label].syntax) for label in found
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
            f"ET003: the fields of this file fit no version of the Chakra schema{_family(evidence)}",
            path=path,
            position="byte 0",
            hint="is this a Chakra trace? Its frames may come from several versions",
        )
    wanted = found & NAMED[named] if named else found
    if not wanted:
        raise UnsupportedError(
            f"ET003: this is no Chakra trace of schema {named}; its structure is that of {_listed(found)}",
            path=path,
            position="byte 0",
            hint="leave the version out, or name that one",
        )
    meanings = {label: _meaning(VERSIONS[label], evidence) for label in found}
    if len({meanings[label] for label in wanted}) > 1:
        raise UnsupportedError(
            f"ET003: nothing in this file tells which Chakra schema it has: it may be {_listed(wanted)}",
            path=path,
            position="byte 0",
            hint=f"name it, if you know: --from-version {_oldest(wanted)}",
        )
    meaning = meanings[_oldest(wanted)]
    alike = {label for label in found if meanings[label] == meaning}
    return Resolution(_reading(alike, wanted, has_metadata=has_metadata), named or _label(alike))


def _family(evidence: Evidence) -> str:
    """What a file that fits no version resembles."""
    if ATTRIBUTE_TAG in evidence.largest and _NAME_TAG in evidence.largest:
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
