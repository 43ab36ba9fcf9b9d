"""The attribute contract: names, types and meaning of what travels in ``Node.attr``.

Nothing in the format declares attributes; the names are the contract between writers (Chakra's converters,
STAGE) and readers (the Chakra feeder reads exactly one type per name, ASTRA-sim any integer). The second part
of the table is what this project adds so that nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.wire import (
    AttributeColumns,
    Bools,
    ByteRows,
    EtColumns,
    Longs,
)
from hespas.graph import (
    ESTIMATED_ON,
    GUESSED_VALUES,
    STEP_FACTS,
    WHOLE_JOB,
    CollectiveKind,
    NodeKind,
    OpClass,
)
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError
from hespas.schemas.chakra.tables import AttributeField, CollectiveCommType, NodeType

__all__ = [
    "ATTRIBUTES",
    "COLLECTIVE_TO_COMM",
    "COMM_TO_COLLECTIVE",
    "DEFAULT_CLASS",
    "DEVICE_ATTRIBUTE",
    "GROUPS_ATTRIBUTE",
    "INTEGER_FIELDS",
    "JOB_ATTRIBUTE",
    "KIND_TO_TYPE",
    "LAYOUT_KEY",
    "LINTED",
    "RANK_ATTRIBUTE",
    "STEPS_ATTRIBUTE",
    "TEXTS_OF_JOB",
    "TYPE_TO_KIND",
    "WHOLE_WORLD",
    "AttributeFacts",
    "Faults",
    "Stated",
    "Tag",
    "check_types",
    "default_classes",
    "is_canonical",
]

ATTRIBUTES: MappingProxyType[str, AttributeField] = MappingProxyType(
    {
        "is_cpu_op": AttributeField.BOOL,
        "op_type": AttributeField.STRING,
        "comm_type": AttributeField.INT64,
        "comm_size": AttributeField.INT64,
        "pg_name": AttributeField.STRING,
        "comm_src": AttributeField.INT32,
        "comm_dst": AttributeField.INT32,
        "comm_tag": AttributeField.INT32,
        "num_ops": AttributeField.INT64,
        "tensor_size": AttributeField.UINT64,
        "stream": AttributeField.INT64,
        # Ours. Times in ns, sizes in bytes, operations counted as num_ops does.
        "duration_nanos": AttributeField.UINT64,
        "bytes_written": AttributeField.UINT64,
        "useful_ops": AttributeField.INT64,
        "transcendentals": AttributeField.INT64,
        "op_class": AttributeField.STRING,
        "dtype": AttributeField.STRING,
        "framework_op": AttributeField.STRING,
        "contractions": AttributeField.STRING,
        "comm_operand_bytes": AttributeField.INT64,
        "comm_result_bytes": AttributeField.INT64,
        "channel": AttributeField.INT64,
        "reduction": AttributeField.STRING,
        "counted_ops": AttributeField.INT64,
        "counted_bytes": AttributeField.UINT64,
        # ASTRA-sim's memory tracker reads these.
        "inputs": AttributeField.STRING_LIST,
        "outputs": AttributeField.STRING_LIST,
    }
)
"""Attributes that the graph models, in the order in which they are written, with their canonical type.

``tensor_size`` is bytes read plus written, ``bytes_written`` the part written (left out when 0);
``useful_ops`` is left out when equal to ``num_ops``, ``op_class`` when it is the node type's own; ``dtype``
is the element type that sets the arithmetic rate; ``framework_op`` the framework's name of the operation.
``duration_nanos`` is left out when ``duration_micros`` says the same. ``contractions`` spells matrix products
and convolutions (:mod:`.spelling`); ``comm_operand_bytes`` and ``comm_result_bytes`` are the whole
input and output of a collective, ``channel`` its number in the program, ``reduction`` what it computes.
``counted_ops`` and ``counted_bytes`` are 0 where ``num_ops`` or ``tensor_size`` says 1 only because a
roofline cannot do with 0; ``inputs`` and ``outputs`` list tensors (:mod:`.readiness`).
"""

LINTED: MappingProxyType[str, AttributeField] = MappingProxyType(
    {
        **{name: ATTRIBUTES[name] for name in list(ATTRIBUTES)[:10] if name != "op_type"},
        "involved_dim": AttributeField.BOOL_LIST,
    }
)
"""Attributes that simulators read, whose type is therefore checked (ET010)."""

INTEGER_FIELDS = frozenset(
    {
        AttributeField.INT32,
        AttributeField.INT64,
        AttributeField.UINT32,
        AttributeField.UINT64,
        AttributeField.SINT32,
        AttributeField.SINT64,
        AttributeField.FIXED32,
        AttributeField.FIXED64,
        AttributeField.SFIXED32,
        AttributeField.SFIXED64,
        AttributeField.BOOL,
    }
)
"""Types accepted for an attribute that is an integer or a truth value."""

TYPE_TO_KIND: MappingProxyType[int, NodeKind] = MappingProxyType(
    {
        NodeType.INVALID: NodeKind.INVALID,
        NodeType.METADATA: NodeKind.METADATA,
        NodeType.MEM_LOAD: NodeKind.MEM_LOAD,
        NodeType.MEM_STORE: NodeKind.MEM_STORE,
        NodeType.COMP: NodeKind.COMPUTE,
        NodeType.COMM_SEND: NodeKind.SEND,
        NodeType.COMM_RECV: NodeKind.RECV,
        NodeType.COMM_COLL: NodeKind.COLLECTIVE,
    }
)

KIND_TO_TYPE: MappingProxyType[NodeKind, int] = MappingProxyType(
    {kind: number for number, kind in TYPE_TO_KIND.items()}
)
"""Permutes are written as a send and a receive, and have no type of their own."""

DEFAULT_CLASS: MappingProxyType[NodeKind, OpClass] = MappingProxyType(
    {
        NodeKind.COLLECTIVE: OpClass.COLLECTIVE,
        NodeKind.SEND: OpClass.P2P,
        NodeKind.RECV: OpClass.P2P,
        NodeKind.PERMUTE: OpClass.P2P,
        NodeKind.MEM_LOAD: OpClass.MEMORY,
        NodeKind.MEM_STORE: OpClass.MEMORY,
    }
)
"""The class of a node whose trace does not state one; all other kinds: unknown."""

_DEFAULT_CLASSES = np.array([DEFAULT_CLASS.get(kind, OpClass.UNKNOWN) for kind in NodeKind], np.uint8)

COMM_TO_COLLECTIVE: MappingProxyType[int, CollectiveKind] = MappingProxyType(
    {
        CollectiveCommType.ALL_REDUCE: CollectiveKind.ALL_REDUCE,
        CollectiveCommType.REDUCE: CollectiveKind.REDUCE,
        CollectiveCommType.ALL_GATHER: CollectiveKind.ALL_GATHER,
        CollectiveCommType.GATHER: CollectiveKind.GATHER,
        CollectiveCommType.SCATTER: CollectiveKind.SCATTER,
        CollectiveCommType.BROADCAST: CollectiveKind.BROADCAST,
        CollectiveCommType.ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
        CollectiveCommType.REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
        CollectiveCommType.REDUCE_SCATTER_BLOCK: CollectiveKind.REDUCE_SCATTER_BLOCK,
        CollectiveCommType.BARRIER: CollectiveKind.BARRIER,
    }
)

COLLECTIVE_TO_COMM: MappingProxyType[CollectiveKind, int] = MappingProxyType(
    {
        **{kind: number for number, kind in COMM_TO_COLLECTIVE.items()},
        # The bound of a ragged exchange is written; the writer says so.
        CollectiveKind.RAGGED_ALL_TO_ALL: CollectiveCommType.ALL_TO_ALL,
    }
)

WHOLE_WORLD = frozenset({"", "0"})
"""Values of ``pg_name`` that mean all ranks, as its absence does."""

RANK_ATTRIBUTE, GROUPS_ATTRIBUTE, JOB_ATTRIBUTE = "rank", "comm_group", "num_ranks"
DEVICE_ATTRIBUTE = "recorded_on"
"""Metadata attributes of a file that was written without the rest of its set: which rank it is, its groups,
and how many ranks the job has.
"""

STEPS_ATTRIBUTE = "recorded_steps"
"""Metadata attribute of a file: the recorded steps of its rank class, as the JSON document of an op graph."""

TEXTS_OF_JOB = MappingProxyType(
    {
        WHOLE_JOB: WHOLE_JOB,
        GUESSED_VALUES: GUESSED_VALUES,
        DEVICE_ATTRIBUTE: "device",
        ESTIMATED_ON: ESTIMATED_ON,
        STEP_FACTS: STEP_FACTS,
    }
)
"""Metadata attributes of a file -> keys of the workload's metadata that they state."""

LAYOUT_KEY = "chakra.layout"
"""Key of the rows that keep which attributes a node had, in which order and of which type."""


class Tag:
    """Tags of rows in a graph's ``extra`` table. Attribute values have the number of their field (3..32)."""

    TEXT = 0
    """Text of another format, written as a string attribute."""
    NO_VALUE = 1
    """An attribute that has a name and no value."""
    DOC_STRING = 64
    START_MICROS = 106
    DURATION_MICROS = 107
    """What a writer would state otherwise: microseconds (8 bytes), and the duration in ns that was read."""
    INPUTS = 108
    OUTPUTS = 109
    LAYOUT = 200
    VERSION = 201
    AS_STATED = 202
    """A file that has not what :mod:`.readiness` adds, and is written without it. No value."""


# --- Attribute values by name: from rows of a trace to (nodes, values), whatever integer type was used.

_IS_INTEGER = np.isin(np.arange(33), [int(field) for field in INTEGER_FIELDS])
_UNSIGNED = (AttributeField.UINT64, AttributeField.FIXED64)


@dataclass(frozen=True, slots=True, eq=False)
class Stated:
    """An attribute of one name: ``value`` of ``node``, stated by attribute row ``row``; nodes ascend. The
    value of a text is its row of ``payload``.
    """

    node: Longs
    value: Longs
    row: Longs

    def where(self, mask: Bools) -> Stated:
        """Some of them."""
        return Stated(self.node[mask], self.value[mask], self.row[mask])


@dataclass(frozen=True, slots=True, eq=False)
class AttributeFacts:
    """The attributes of a trace by name; of several of one name on a node the first counts."""

    attrs: AttributeColumns
    owner: Longs

    @classmethod
    def of(cls, attrs: AttributeColumns) -> AttributeFacts:
        """Facts over all rows."""
        return cls(attrs, attrs.owner)

    def rows(self, name: str) -> Longs:
        """All rows of one name."""
        if name not in self.attrs.keys:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.attrs.key == self.attrs.keys.index(name))

    def _first(self, rows: Longs) -> Longs:
        """Only the first row of each node."""
        owner = self.owner[rows]
        first = np.ones(len(rows), np.bool_)
        first[1:] = owner[1:] != owner[:-1]
        return rows[first]

    def first_rows(self, name: str, *, integral: bool = False) -> Longs:
        """The rows of one name that count, of any type or (``integral``) of an integer type."""
        rows = self._first(self.rows(name))
        return rows[_IS_INTEGER[self.attrs.field[rows]]] if integral else rows

    def integers(self, name: str) -> Stated:
        """Values of any integer type or bool that fit 64 signed bits."""
        rows = self._first(self.rows(name))
        field = self.attrs.field[rows]
        value = self.attrs.bits[rows].view(np.int64)
        too_large = np.isin(field, _UNSIGNED) & (value < 0)
        good = _IS_INTEGER[field] & ~too_large
        return Stated(self.owner[rows[good]], value[good], rows[good])

    def texts(self, name: str) -> Stated:
        """Values of type string."""
        rows = self._first(self.rows(name))
        rows = rows[self.attrs.field[rows] == AttributeField.STRING]
        return Stated(self.owner[rows], self.attrs.bits[rows].view(np.int64), rows)

    def distinct(self, texts: Stated) -> tuple[list[str], NDArray[np.int64]]:
        """The distinct values of a string attribute, and which of them each node has."""
        wanted = self.values(texts)
        found: dict[bytes, int] = {}
        place = np.fromiter((found.setdefault(text, len(found)) for text in wanted), np.int64, len(wanted))
        return [text.decode() for text in found], place

    def values(self, texts: Stated) -> ByteRows:
        """The values themselves, one row per node."""
        return self.attrs.payload.take(texts.value)


def default_classes(kind: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What :data:`DEFAULT_CLASS` says of nodes of these kinds."""
    return _DEFAULT_CLASSES[kind]


def check_types(columns: EtColumns, facts: AttributeFacts, faults: Faults) -> None:
    """ET010: attributes that simulators read have an accepted type (error) and the canonical one (lint);
    every attribute has a value (lint); no node has two attributes of one name.
    """
    attrs = columns.attrs
    for name, canonical in LINTED.items():
        rows = facts.rows(name)
        field = attrs.field[rows]
        integral = canonical in INTEGER_FIELDS
        accepted = _IS_INTEGER[field] if integral else field == canonical
        bad = np.zeros(len(columns), np.bool_)
        bad[facts.owner[rows[~accepted]]] = True
        faults.nodes("ET010", columns, bad, f"attribute {name} has a type that no reader accepts")
        odd = int((accepted & (field != canonical)).sum())
        message = f"attribute {name} is not of its canonical type {canonical.name.lower()}"
        faults.lint("ET010", message, odd)
    valueless = int((attrs.field == AttributeField.UNSET).sum())
    faults.lint("ET010", "an attribute has a name and no value", valueless)
    code = facts.owner * max(1, len(attrs.keys)) + attrs.key
    ordered = np.sort(code)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    bad = np.zeros(len(columns), np.bool_)
    bad[twice // max(1, len(attrs.keys))] = True
    faults.nodes("ET010", columns, bad, "two attributes of a node have the same name")


def is_canonical(attrs: AttributeColumns) -> Bools:
    """Which rows have the canonical type of their name (or a name the graph does not model)."""
    wanted = np.array([ATTRIBUTES.get(name, -1) for name in attrs.keys] or [-1])
    stated = wanted[attrs.key] if len(attrs) else np.empty(0, np.int64)
    canonical: Bools = (stated < 0) | (stated == attrs.field)
    return canonical


# Faults of a trace: errors in a strict reader, diagnostics in a lenient one, with the checker's codes.

_REMEDIES = {
    "ET007": "a simulator would wait for ever; drop one dependency of the cycle",
    "ET009": "give the node one of the types of the Chakra schema, or remove it",
    "ET010": "write each attribute once per node, with the type of the Chakra schema",
    "ET014": "write this rank's number, or rename the file to the rank it is of",
    "ET018": "write group ids as decimal numbers from 1 on",
    "ET019": "list each rank once, and every rank that uses the group",
    "ET022": "copy the whole set again: one file per rank, from NAME.0.et on without gaps",
}
"""What helps against a fault, where its place has nothing better to say."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Where the faults of one file go. ``rank`` is None for faults of a whole directory."""

    path: str
    rank: int | None
    diagnostics: Diagnostics
    lenient: bool
    recover: bool = False

    def error(
        self, code: str, message: str, *, position: str = "", hint: str | None = None, node: int | None = None
    ) -> None:
        """One error: raises :class:`FormatError` unless the reader is lenient."""
        if not self.lenient:
            remedy = hint or _REMEDIES.get(code)
            raise FormatError(message, code=code, path=self.path, position=position or None, hint=remedy)
        self.diagnostics.add(
            code, Severity.ERROR, position, message, path=self.path, rank=self.rank, node=node
        )

    def nodes(self, code: str, columns: EtColumns, bad: Bools, message: str, hint: str | None = None) -> None:
        """An error of all nodes marked in ``bad``; the first few are named with id and byte offset."""
        rows = np.flatnonzero(bad)
        if not len(rows):
            return
        for row in rows[: self.diagnostics.keep].tolist():
            node = int(columns.id[row])
            position = f"node {node} at byte {int(columns.frame_byte[row])}"
            others = f" ({len(rows)} nodes in all)" if not self.lenient and len(rows) > 1 else ""
            self.error(code, message + others, position=position, hint=hint, node=node)
        rest = len(rows) - self.diagnostics.keep
        self.diagnostics.add(
            code, Severity.ERROR, self.path, message, path=self.path, rank=self.rank, count=max(0, rest)
        )

    def repaired(
        self, code: str, columns: EtColumns, bad: Bools, message: str, *, repair: str, hint: str
    ) -> None:
        """An error of the nodes marked, or where the user asked for it (``--recover``) a warning of what was
        made of them.
        """
        if self.recover and not self.lenient:
            self.lint(code, f"{message}: {repair}", int(bad.sum()))
        else:
            self.nodes(code, columns, bad, message, f"{hint}; `recover` reads it without")

    def lint(self, code: str, message: str, count: int) -> None:
        """A warning about ``count`` nodes or attributes."""
        self.diagnostics.add(
            code, Severity.WARNING, self.path, message, path=self.path, rank=self.rank, count=count
        )
