"""JSON document of an op graph as typed structs, and the text forms of its values.

msgspec decodes directly into the structs and rejects unknown fields. ``hespas/schemas/op_graph.schema.json``
describes the same document. Every text form is exact in both directions. Parsers raise ``ValueError`` with a
message for the user; the reader adds the position.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from math import inf, isinf, isnan, nan, prod
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from hespas.converters.replica_groups import MAX_DEVICES
from hespas.graph import (
    DTYPES,
    DYNAMIC,
    UNKNOWN_DTYPE,
    ExplicitGroups,
    GroupSet,
    NodeKind,
    OpClass,
    Permutation,
    StridedGroups,
)
from hespas.graph.columns import find_dtype
from hespas.graph.groups import Digit

__all__ = [
    "FIELD_NAMES",
    "MAX_ELEMENTS",
    "SCHEMA_ID",
    "ClassOutline",
    "CommunicatorGroups",
    "ContractionEntry",
    "Count",
    "DocumentCollective",
    "DocumentOutline",
    "DocumentVersion",
    "ExtraEntry",
    "GroupRows",
    "GroupSpec",
    "NodeEntry",
    "NodeOutline",
    "Number",
    "OpGraphDocument",
    "P2pEntry",
    "PermutationSpec",
    "RankClass",
    "RegionEntry",
    "Row",
    "TensorTypeEntry",
    "default_type_bytes",
    "escape_text",
    "inferred_kind",
    "parse_dtype",
    "parse_enum",
    "parse_groups",
    "parse_number",
    "parse_permutation",
    "parse_type",
    "spell_dtype",
    "spell_groups",
    "spell_number",
    "spell_permutation",
    "spell_type",
    "unescape_text",
]

SCHEMA_ID = "hespas.op-graph/1"
"""Value of ``schema`` in a document of this version."""

FIELD_NAMES = {
    "name_id": "name_row",
    "op_id": "op_row",
    "source_id": "source_row",
    "framework_id": "framework_row",
    "executions": "multiplicity",
}
"""Field names in files, JSON and Arrow, that differ from the columns of :class:`hespas.graph.OpGraph`."""

Number = float | Literal["inf", "-inf"] | None
"""Cost: null is unknown; infinity is spelled because JSON has no number for it."""

_UInt = Annotated[int, Meta(ge=0)]
Row = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Small = Annotated[int, Meta(ge=-(2**15), le=2**15 - 1)]
_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Byte = Annotated[int, Meta(ge=0, le=255)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]

GroupRows = str | tuple[tuple[Count, ...], ...]
"""Groups: iota text, or one row of ranks per group."""


class CommunicatorGroups(Struct, kw_only=True, forbid_unknown_fields=True):
    """Group set with a communicator number of 1 or more, which distinguishes it from earlier group sets with
    the same ranks.
    """

    groups: GroupRows
    communicator: Annotated[int, Meta(ge=1, le=2**31 - 1)]


GroupSpec = GroupRows | CommunicatorGroups
"""Group set."""


class DocumentVersion(Struct):
    """Document of which only the schema version is decoded. All versions of the document have this field."""

    schema: str = SCHEMA_ID


class NodeOutline(Struct):
    """Node of which only the required field is decoded, to recognise a list of nodes."""

    op: str


class ClassOutline(Struct):
    """Rank class of which only the nodes are decoded, to recognise a document."""

    nodes: list[NodeOutline]


class DocumentOutline(Struct):
    """Document of which only the lists of nodes are decoded. It is decoded before the full document, so that
    a document whose list has other values than nodes is rejected before it uses memory.
    """

    nodes: list[NodeOutline] | None = None
    rank_classes: list[ClassOutline] | None = None


class DocumentCollective(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Collective of a node, a row of :class:`hespas.graph.opgraph.CollectiveTable`. ``group_set`` is an index
    in the group sets of the class; alternatively ``groups`` contains the group set itself.
    """

    kind: str
    group_set: Row | None = None
    groups: GroupSpec | None = None
    comm_bytes: Number = None
    operand_bytes: Number = None
    result_bytes: Number = None
    channel: _Int64 = -1
    reduction: str = ""


class P2pEntry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Message of a node, a row of :class:`hespas.graph.opgraph.P2pTable`. ``permutation`` is an index in the
    permutations of the class; alternatively ``pairs`` contains the permutation itself.
    """

    permutation: Row | None = None
    pairs: tuple[tuple[Count, Count], ...] | None = None
    comm_bytes: Number = None
    tag: _Int64 = -1
    host: bool = False


class ContractionEntry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Matmul or convolution of a node, a row of :class:`hespas.graph.opgraph.ContractionTable`. Element types
    are names, ``?`` if unknown.
    """

    batch: _Int64 = 1
    m: _Int64
    n: _Int64
    k: _Int64
    flops: Number = None
    useful_flops: Number | UnsetType = UNSET
    lhs: str = "?"
    rhs: str = "?"
    accumulator: str = "?"
    products: _Byte = 1
    window: _Int64 = 1


class ExtraEntry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Preserved attribute of another format. Printable UTF-8 is stored as ``text``, anything else as
    ``value`` in base64.
    """

    key: str
    tag: _Small = 0
    text: str = ""
    value: bytes = b""


class RegionEntry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Region (loop, branch or call), a row of :class:`hespas.graph.opgraph.RegionTable`. An unknown trip
    count is null.
    """

    kind: str
    parent: Row = -1
    trips: Number = 1.0
    label: str = ""


class TensorTypeEntry(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tensor type with properties that the text form lacks: an encoding, or a size that differs from the size
    of the elements.
    """

    type: str
    encoding: str = ""
    bytes: Number | UnsetType = UNSET


class PermutationSpec(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Permutation (pairs of sender and receiver). Either each rank sends to the rank whose digit ``[size,
    stride]`` is higher by ``shift``, or the ``pairs`` are listed.
    """

    ranks: Count
    digit: tuple[Count, Count] | None = None
    shift: _Int64 = 0
    wraps: bool = True
    pairs: tuple[tuple[Count, Count], ...] | None = None


class NodeEntry(
    Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename={"op_class": "class"}
):
    """Node of an op graph document. Only ``op`` and ``deps`` are required; other fields have the defaults of
    a graph.

    ``id`` defaults to the position in the list. ``kind`` and ``class`` default to values that follow from
    ``collective``, ``p2p`` and ``contractions``. ``useful_flops`` defaults to ``flops``, and ``multiplicity``
    to the product of the trip counts of the enclosing regions.
    """

    id: _UInt | None = None
    name: str = ""
    op: str
    op_class: str = ""
    kind: str = ""
    deps: tuple[_UInt, ...]
    control_deps: tuple[_UInt, ...] = ()
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    rate_dtype: str = "?"
    flops: Number = None
    useful_flops: Number | UnsetType = UNSET
    transcendentals: Number = None
    bytes_read: Number = None
    bytes_written: Number = None
    duration_ns: Number = None
    multiplicity: Number | UnsetType = UNSET
    region: Row = -1
    stream: _Int32 = -1
    resource: str = ""
    collective: DocumentCollective | None = None
    p2p: P2pEntry | None = None
    contractions: tuple[ContractionEntry, ...] = ()
    source: str = ""
    framework_op: str = ""
    extra: tuple[ExtraEntry, ...] = ()


class _ClassFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a rank class in the document, except its nodes."""

    name: str = ""
    types: tuple[str | TensorTypeEntry, ...] = ()
    group_sets: tuple[GroupSpec, ...] = ()
    permutations: tuple[PermutationSpec, ...] = ()
    regions: tuple[RegionEntry, ...] = ()
    carried: tuple[tuple[Count, _UInt, _UInt], ...] = ()
    extra: tuple[ExtraEntry, ...] = ()
    attachments: dict[str, bytes] = field(default_factory=dict[str, bytes])
    deps_by: Literal["id", "position"] = "id"


class RankClass(_ClassFields, kw_only=True, forbid_unknown_fields=True):
    """Rank class of an op graph document. Its nodes are decoded later, one at a time.

    ``deps_by`` states if ``deps``, ``control_deps`` and ``carried`` hold node ids or positions in ``nodes``.
    Positions are written if ids are not unique.
    """

    nodes: list[Raw]


class OpGraphDocument(_ClassFields, kw_only=True, forbid_unknown_fields=True):
    """Whole op graph document. With one rank class, the fields of :class:`RankClass` may be here.

    ``rank_class`` is run-length encoded: ``[class, number of ranks]`` in rank order; class -1 marks ranks
    that are not in the file.
    """

    schema: str = SCHEMA_ID
    hespas_version: str = ""
    num_ranks: Count | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    rank_class: tuple[tuple[Row, Count], ...] | None = None
    rank_classes: tuple[RankClass, ...] | None = None
    nodes: list[Raw] | None = None


_UNKNOWN_NAME = "?"
"""Unknown element type or extent."""

_ESCAPE = "\x00"
_MAX_EXACT = 2.0**53
MAX_ELEMENTS = 2**63 - 1
"""Limit of elements of a tensor, with unknown and empty extents counted as 1."""

_MAX_DIMS = 4096
"""Limit of dimensions; real programs have fewer than ten."""
_SHOWN_CHARACTERS = 120
_MAX_LISTED = 1 << 20
_TYPE = re.compile(r"(?P<name>[^\[\]]{1,64})(?:\[(?P<bounded><=)?(?P<dims>[0-9?, ]*)\])?")
_IOTA = re.compile(
    r"\[(?P<groups>\d{1,10}),(?P<size>\d{1,10})\]<=\[(?P<dims>[\d,]{1,400})\]"
    r"(?:T\((?P<order>[\d,]{1,400})\))?(?:\+(?P<base>\d{1,10}))?"
)


def _shown(text: str) -> str:
    """Return a text in quotes, shortened if long."""
    return repr(text) if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}..."


def escape_text(text: str) -> str:
    """Return a text that JSON can hold. A text with invalid Unicode becomes NUL and the base64 of its
    bytes.
    """
    if not text.startswith(_ESCAPE):
        try:
            text.encode()
        except UnicodeEncodeError:
            pass
        else:
            return text
    return _ESCAPE + b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unescape_text(text: str) -> str:
    """Return the original of a text that :func:`escape_text` converted."""
    if not text.startswith(_ESCAPE):
        return text
    return b64decode(text[1:], validate=True).decode("utf-8", "surrogatepass")


def spell_number(value: float) -> Number:
    """Return a cost for JSON: NaN is null; whole numbers have no ``.0``."""
    if isnan(value):
        return None
    if isinf(value):
        return "inf" if value > 0 else "-inf"
    return int(value) if value.is_integer() and 0 < abs(value) < _MAX_EXACT else value


def parse_number(value: Number) -> float:
    """Return the cost for a number that :func:`spell_number` converted, NaN for null."""
    if value is None:
        return nan
    if isinstance(value, str):
        return inf if value == "inf" else -inf
    return float(value)


def parse_enum(kind: type[IntEnum], text: str) -> int:
    """Return the code of an enum member from its name in lower case."""
    try:
        return kind[text.upper()].value
    except KeyError:
        names = ", ".join(member.name.lower() for member in kind)
        raise ValueError(f"{_shown(text)} is not one of: {names}") from None


def inferred_kind(*, collective: bool, p2p: bool, contraction: bool) -> tuple[int, int]:
    """Return the default kind and operation class of a node. They depend on the entries ``collective``,
    ``p2p`` and ``contractions`` that the node has.
    """
    if collective:
        return int(NodeKind.COLLECTIVE), int(OpClass.COLLECTIVE)
    if p2p:
        return int(NodeKind.PERMUTE), int(OpClass.P2P)
    return int(NodeKind.COMPUTE), int(OpClass.CONTRACTION if contraction else OpClass.UNKNOWN)


def spell_dtype(code: int) -> str:
    """Return the name of an element type code."""
    return _UNKNOWN_NAME if code == UNKNOWN_DTYPE else DTYPES[code].name


def parse_dtype(text: str) -> int:
    """Return the code of an element type; every alias of the table is accepted."""
    if text == _UNKNOWN_NAME:
        return UNKNOWN_DTYPE
    element = find_dtype(text)
    if element is None:
        raise ValueError(f"unknown element type {_shown(text)}; use '{_UNKNOWN_NAME}' for an unknown one")
    return element.code


def spell_type(dtype: int, shape: Sequence[int], bounded: bool) -> str:
    """Return a tensor type as text, such as ``bf16[4,128]``. Unknown extents are ``?``; ``<=`` marks extents
    that are upper bounds.
    """
    extents = ",".join(_UNKNOWN_NAME if extent == DYNAMIC else str(extent) for extent in shape)
    return f"{spell_dtype(dtype)}[{'<=' if bounded else ''}{extents}]"


def parse_type(text: str) -> tuple[int, tuple[int, ...], bool]:
    """Return the element type code, the extents, and True if these are upper bounds. ``f32`` alone is a
    scalar.
    """
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ValueError(f"{_shown(text)} is not a tensor type; write it like bf16[4,128] or f32[?,8]")
    dims = (match["dims"] or "").replace(" ", "")
    if dims.count(",") >= _MAX_DIMS:
        raise ValueError(f"{_shown(text)} has more than {_MAX_DIMS:,} extents")
    extents: list[int] = []
    for extent in dims.split(",") if dims else ():
        is_unknown = extent == _UNKNOWN_NAME
        if not is_unknown and (not extent.isdecimal() or len(extent) > 19):
            raise ValueError(f"{_shown(extent)} in {_shown(text)} is not an extent")
        extents.append(DYNAMIC if is_unknown else int(extent))
    shape = tuple(extents)
    if prod(max(extent, 1) for extent in shape) > MAX_ELEMENTS:
        raise ValueError(f"{_shown(text)} has more than 2**63 elements")
    return parse_dtype(match["name"].strip()), shape, match["bounded"] is not None


def default_type_bytes(dtype: int, shape: Sequence[int]) -> float:
    """Return the size of a tensor type for which the document states none [bytes]; NaN for an unknown element
    type or extent.
    """
    if dtype == UNKNOWN_DTYPE or DYNAMIC in shape:
        return nan
    return float(DTYPES[dtype].storage_bytes(prod(shape)))


def spell_groups(groups: GroupSet) -> GroupSpec:
    """Convert a group set for the document. Strided groups have HLO's iota form, ``[4,2]<=[2,4]T(1,0)``, with
    ``+base`` if the first rank is not 0. Other groups are lists of ranks.
    """
    if isinstance(groups, ExplicitGroups):
        rows: GroupRows = groups.rows
    else:
        digits = (*groups.group_digits, *groups.member_digits)
        slowest_first = sorted(digits, key=lambda digit: -digit[1])
        dims = ",".join(str(size) for size, _ in slowest_first) or "1"
        order = [slowest_first.index(digit) for digit in digits]
        transpose = f"T({','.join(map(str, order))})" if order != sorted(order) else ""
        base = f"+{groups.base}" if groups.base else ""
        rows = f"[{groups.num_groups},{groups.group_size}]<=[{dims}]{transpose}{base}"
    return CommunicatorGroups(groups=rows, communicator=groups.communicator) if groups.communicator else rows


def parse_groups(value: GroupSpec) -> GroupSet:
    """Return the group set from the text or lists that :func:`spell_groups` made. An iota form whose groups
    end within a dimension is accepted, too.
    """
    if isinstance(value, CommunicatorGroups):
        return replace(_parsed_rows(value.groups), communicator=value.communicator)
    return _parsed_rows(value)


def _parsed_rows(value: GroupRows) -> GroupSet:
    if not isinstance(value, str):
        return ExplicitGroups(value)
    match = _IOTA.fullmatch(value)
    if match is None:
        raise ValueError(f"{_shown(value)} is not a group set; write it like [4,2]<=[8], or list the ranks")
    dims = _numbers(match["dims"])
    order = _numbers(match["order"]) if match["order"] else tuple(range(len(dims)))
    groups, size, base = int(match["groups"]), int(match["size"]), int(match["base"] or 0)
    if prod(dims) != groups * size or groups * size < 1:
        raise ValueError(
            f"{_shown(value)} has {groups} groups of {size}, but its dimensions multiply to {prod(dims)}"
        )
    if sorted(order) != list(range(len(dims))):
        raise ValueError(f"{_shown(value)}: T(...) is not a permutation of {len(dims)} dimensions")
    if base + groups * size > MAX_DEVICES:
        raise ValueError(f"{_shown(value)} names ranks past {MAX_DEVICES:,}, the limit")
    strided = _cut(dims, order, groups, size, base)
    if strided is not None:
        return strided
    # Any other iota may have to be listed, so its length is bounded.
    if groups * size > _MAX_LISTED:
        raise ValueError(
            f"{_shown(value)} splits a dimension, so its {groups * size:,} ranks are listed, more than the "
            f"limit of {_MAX_LISTED:,}"
        )
    group_set = StridedGroups.from_iota(groups, size, dims, order)
    if isinstance(group_set, StridedGroups):
        return StridedGroups(group_set.group_digits, group_set.member_digits, base)
    return ExplicitGroups.from_rows([[base + rank for rank in row] for row in group_set.rows])


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part and len(part) <= 10 for part in parts):
        raise ValueError(f"{_shown(text)} is not a list of numbers")
    return tuple(map(int, parts))


def _cut(
    dims: Sequence[int], order: Sequence[int], groups: int, group_size: int, base: int
) -> StridedGroups | None:
    """Return an iota form (``[4,2]<=[8]``) as strided groups. Return None if the members of a group do not
    fill whole dimensions.
    """
    digits: list[Digit] = [(dims[axis], prod(dims[axis + 1 :])) for axis in order]
    cut, members = len(digits), 1
    while members < group_size and cut:
        cut -= 1
        members *= digits[cut][0]
    if members != group_size:
        return None
    return StridedGroups(tuple(digits[:cut]), tuple(digits[cut:]), base)


def spell_permutation(permutation: Permutation) -> PermutationSpec:
    """Convert a permutation for the document: a shifted digit, or listed pairs."""
    if permutation.pairs is not None:
        return PermutationSpec(ranks=permutation.num_ranks, pairs=permutation.pairs)
    return PermutationSpec(
        ranks=permutation.num_ranks,
        digit=permutation.digit,
        shift=permutation.shift,
        wraps=permutation.wraps,
    )


def parse_permutation(spec: PermutationSpec) -> Permutation:
    """Return the permutation from the form that :func:`spell_permutation` made. Listed pairs remain
    a list.
    """
    if (spec.pairs is None) == (spec.digit is None):
        found = "neither" if spec.pairs is None else "both"
        raise ValueError(f"a permutation needs either digit or pairs, and this one has {found}")
    if spec.pairs is not None:
        Permutation.from_pairs(spec.pairs, spec.ranks)  # checks ranks and that none is named twice
        return Permutation(spec.ranks, pairs=tuple(sorted(spec.pairs)))
    size, stride = spec.digit or (1, 1)
    if size < 1 or stride < 1 or spec.ranks % (size * stride):
        raise ValueError(
            f"digit [{size}, {stride}]: {spec.ranks} ranks are not a multiple of {size} x {stride}"
        )
    return Permutation(spec.ranks, (size, stride), spec.shift, spec.wraps)
