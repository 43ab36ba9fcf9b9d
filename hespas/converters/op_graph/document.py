"""The JSON document as typed structs: msgspec decodes straight into them and refuses unknown fields.

The same shapes are described for people and other programs in ``hespas/schemas/op_graph.schema.json``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

__all__ = [
    "SCHEMA_ID",
    "ClassOutline",
    "Collective",
    "Communicator",
    "Contraction",
    "Count",
    "Document",
    "Extra",
    "GroupRows",
    "GroupSpec",
    "Node",
    "NodeOutline",
    "Number",
    "Outline",
    "P2p",
    "PermutationSpec",
    "RankClass",
    "Region",
    "Row",
    "TensorType",
    "Version",
]

SCHEMA_ID = "hespas.op-graph/1"
"""What a document of this version says in ``schema``."""

Number = float | Literal["inf", "-inf"] | None
"""A cost: null is unknown, infinity is spelled because JSON has no number for it."""

_UInt = Annotated[int, Meta(ge=0)]
Row = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Small = Annotated[int, Meta(ge=-(2**15), le=2**15 - 1)]
_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Byte = Annotated[int, Meta(ge=0, le=255)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


GroupRows = str | tuple[tuple[Count, ...], ...]
"""Groups: iota text, or one row of ranks per group."""


class Communicator(Struct, kw_only=True, forbid_unknown_fields=True):
    """A group set of ranks that have several: which of them it is, from 1 on (0 is the first, and is not
    said).
    """

    groups: GroupRows
    communicator: Annotated[int, Meta(ge=1, le=2**31 - 1)]


GroupSpec = GroupRows | Communicator
"""A group set."""


class Version(Struct):
    """What every version of the document says of itself."""

    schema: str = SCHEMA_ID


class NodeOutline(Struct):
    """What shows that an item of ``nodes`` is a node."""

    op: str


class ClassOutline(Struct):
    """The nodes of a class, in outline."""

    nodes: list[NodeOutline]


class Outline(Struct):
    """The document, in outline: decoded first, so that a list of anything but nodes costs no memory."""

    nodes: list[NodeOutline] | None = None
    rank_classes: list[ClassOutline] | None = None


class Collective(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A row of :class:`hespas.graph.opgraph.CollectiveTable`; ``groups`` is an inline group set."""

    kind: str
    group_set: Row | None = None
    groups: GroupSpec | None = None
    comm_bytes: Number = None
    operand_bytes: Number = None
    result_bytes: Number = None
    channel: _Int64 = -1
    reduction: str = ""


class P2p(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A row of :class:`hespas.graph.opgraph.P2pTable`; ``pairs`` is an inline permutation."""

    permutation: Row | None = None
    pairs: tuple[tuple[Count, Count], ...] | None = None
    comm_bytes: Number = None
    tag: _Int64 = -1
    host: bool = False


class Contraction(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A row of :class:`hespas.graph.opgraph.ContractionTable`; element types by name, ``?`` unknown."""

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


class Extra(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A verbatim attribute: printable UTF-8 as ``text``, anything else as ``value`` in base64."""

    key: str
    tag: _Small = 0
    text: str = ""
    value: bytes = b""


class Region(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A row of :class:`hespas.graph.opgraph.RegionTable`; ``trips`` null is unknown."""

    kind: str
    parent: Row = -1
    trips: Number = 1.0
    label: str = ""


class TensorType(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor type that its spelling does not tell in full."""

    type: str
    encoding: str = ""
    bytes: Number | UnsetType = UNSET


class PermutationSpec(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A permutation: a digit ``[size, stride]`` moved by ``shift``, or listed ``pairs``."""

    ranks: Count
    digit: tuple[Count, Count] | None = None
    shift: _Int64 = 0
    wraps: bool = True
    pairs: tuple[tuple[Count, Count], ...] | None = None


class Node(
    Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename={"op_class": "class"}
):
    """One node; only ``op`` and ``deps`` are required, every other field has the hub's default.

    ``id`` defaults to the position, ``kind`` and ``class`` follow ``collective``, ``p2p`` and
    ``contractions``, ``useful_flops`` follows ``flops``, ``multiplicity`` the trips of the regions.
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
    collective: Collective | None = None
    p2p: P2p | None = None
    contractions: tuple[Contraction, ...] = ()
    source: str = ""
    framework_op: str = ""
    extra: tuple[Extra, ...] = ()


class _ClassFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a program has besides its nodes."""

    name: str = ""
    types: tuple[str | TensorType, ...] = ()
    group_sets: tuple[GroupSpec, ...] = ()
    permutations: tuple[PermutationSpec, ...] = ()
    regions: tuple[Region, ...] = ()
    carried: tuple[tuple[Count, _UInt, _UInt], ...] = ()
    extra: tuple[Extra, ...] = ()
    attachments: dict[str, bytes] = field(default_factory=dict[str, bytes])
    deps_by: Literal["id", "position"] = "id"


class RankClass(_ClassFields, kw_only=True, forbid_unknown_fields=True):
    """The program of one rank class. Nodes stay raw: they are decoded one at a time.

    ``deps_by`` says what ``deps``, ``control_deps`` and ``carried`` hold: node ids, or positions in
    ``nodes`` (written where ids are not unique).
    """

    nodes: list[Raw]


class Document(_ClassFields, kw_only=True, forbid_unknown_fields=True):
    """The whole file. A file of one class may state the fields of :class:`RankClass` here.

    ``rank_class`` is run-length encoded: ``[class, how many ranks]`` in rank order; class -1 says that a rank
    of the job is not here.
    """

    schema: str = SCHEMA_ID
    hespas_version: str = ""
    num_ranks: Count | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    rank_class: tuple[tuple[Row, Count], ...] | None = None
    rank_classes: tuple[RankClass, ...] | None = None
    nodes: list[Raw] | None = None
