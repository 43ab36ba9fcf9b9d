"""Attribute contract: names, types and meaning of the values in ``Node.attr``, and access to values by name.

The format does not declare attributes. Their names are the contract between writers (Chakra's converters,
STAGE) and readers (the Chakra feeder reads exactly one type per name, ASTRA-sim any integer). The second part
of the table lists attributes that Hespas adds so that nothing is lost.
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
from hespas.schemas.chakra.tables import AttributeField, CollectiveCommType, NodeType

__all__ = [
    "ATTRIBUTES",
    "COLLECTIVE_TO_COMM",
    "COMM_TO_COLLECTIVE",
    "DEFAULT_CLASS",
    "DEVICE_ATTRIBUTE",
    "GROUPS_ATTRIBUTE",
    "INTEGER_BOUNDS",
    "IS_INTEGER",
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
    "AttributeValues",
    "Tag",
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
        # Added by Hespas. Times in ns, sizes in bytes, operations counted like num_ops.
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

``tensor_size`` is bytes read plus written, ``bytes_written`` the part written (omitted if 0). ``useful_ops``
is omitted if equal to ``num_ops``, ``op_class`` if it is the default of the node type. ``dtype`` is the
element type that sets the arithmetic rate, ``framework_op`` the framework's name of the operation.
``duration_nanos`` is omitted if ``duration_micros`` states the same time. ``contractions`` lists matrix
products and convolutions (:mod:`.spelling`). ``comm_operand_bytes`` and ``comm_result_bytes`` are the whole
input and output of a collective, ``channel`` its number in the program, ``reduction`` its reduction
operation. ``counted_ops`` and ``counted_bytes`` are 0 if ``num_ops`` or ``tensor_size`` is 1 only because a
roofline model cannot handle 0. ``inputs`` and ``outputs`` list tensors (:mod:`.readiness`).
"""

LINTED: MappingProxyType[str, AttributeField] = MappingProxyType(
    {
        **{name: ATTRIBUTES[name] for name in list(ATTRIBUTES)[:10] if name != "op_type"},
        "involved_dim": AttributeField.BOOL_LIST,
    }
)
"""Attributes that simulators read; their type is checked (ET010)."""

INTEGER_BOUNDS: MappingProxyType[int, tuple[int, int]] = MappingProxyType(
    {
        **{
            AttributeField[f"{form}{bits}"]: (-(1 << bits - 1), (1 << bits - 1) - 1)
            for form in ("INT", "SINT", "SFIXED")
            for bits in (32, 64)
        },
        **{
            AttributeField[f"{form}{bits}"]: (0, (1 << min(bits, 63)) - 1)
            for form in ("UINT", "FIXED")
            for bits in (32, 64)
        },
        AttributeField.BOOL: (0, 1),
    }
)
"""Types accepted for an attribute that is an integer or a bool, with their ranges within signed 64 bits."""

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
"""Node type of each kind. Permutes have no type: they are written as a send and a receive."""

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
"""Class of a node whose trace does not state one; unknown for all other kinds."""

_DEFAULT_CLASSES = np.array([DEFAULT_CLASS.get(kind, OpClass.UNKNOWN) for kind in NodeKind], np.uint8)

COMM_TO_COLLECTIVE: MappingProxyType[int, CollectiveKind] = MappingProxyType(
    {member: CollectiveKind[member.name] for member in CollectiveCommType}
)

COLLECTIVE_TO_COMM: MappingProxyType[CollectiveKind, int] = MappingProxyType(
    {
        **{kind: number for number, kind in COMM_TO_COLLECTIVE.items()},
        # The upper bound of a ragged exchange is written, and the writer reports it.
        CollectiveKind.RAGGED_ALL_TO_ALL: CollectiveCommType.ALL_TO_ALL,
    }
)

WHOLE_WORLD = frozenset({"", "0"})
"""Values of ``pg_name`` that mean all ranks, like a missing ``pg_name``."""

RANK_ATTRIBUTE, GROUPS_ATTRIBUTE, JOB_ATTRIBUTE = "rank", "comm_group", "num_ranks"
DEVICE_ATTRIBUTE = "recorded_on"
"""Metadata attributes of a file that was written without the rest of its set: its rank, its groups, the
number of ranks in the job, and the recording device.
"""

STEPS_ATTRIBUTE = "recorded_steps"
"""Metadata attribute with the recorded steps of a rank class, as the JSON document of an op graph."""

TEXTS_OF_JOB = MappingProxyType(
    {
        WHOLE_JOB: WHOLE_JOB,
        GUESSED_VALUES: GUESSED_VALUES,
        DEVICE_ATTRIBUTE: "device",
        ESTIMATED_ON: ESTIMATED_ON,
        STEP_FACTS: STEP_FACTS,
    }
)
"""Metadata attributes of a file -> keys of the workload's metadata."""

LAYOUT_KEY = "chakra.layout"
"""Key of the rows that store the names, order and types of a node's attributes."""


class Tag:
    """Kind of a row in a graph's ``extra`` table, which determines how the value of the row is read. For an
    attribute that was preserved from a trace, it is the protobuf field number of the value (3 to 32).
    """

    TEXT = 0
    """Text of another format, written as a string attribute."""
    NO_VALUE = 1
    """Attribute with a name and no value."""
    DOC_STRING = 64
    START_MICROS = 106
    DURATION_MICROS = 107
    """Microseconds (8 bytes) that differ from those a writer would state, followed by the duration in ns."""
    INPUTS = 108
    OUTPUTS = 109
    LAYOUT = 200
    VERSION = 201
    AS_STATED = 202
    """Marker of a file without the additions of :mod:`.readiness`; it is written without them. No value."""


IS_INTEGER = np.isin(np.arange(256), list(INTEGER_BOUNDS))
_UNSIGNED = (AttributeField.UINT64, AttributeField.FIXED64)


@dataclass(frozen=True, slots=True, eq=False)
class AttributeValues:
    """Values of one attribute, in ascending order of nodes. Node ``node[i]`` has the value ``value[i]``,
    which comes from row ``row[i]`` of the attribute table. For a string, ``value`` is the index of the text
    in ``payload``.
    """

    node: Longs
    value: Longs
    row: Longs

    def where(self, mask: Bools) -> AttributeValues:
        """Return those values whose rows are selected by a mask."""
        return AttributeValues(self.node[mask], self.value[mask], self.row[mask])


@dataclass(frozen=True, slots=True, eq=False)
class AttributeFacts:
    """Look-up of a trace's node attributes by name. If a node has a name twice, the first attribute
    counts.
    """

    attrs: AttributeColumns
    owner: Longs

    @classmethod
    def of(cls, attrs: AttributeColumns) -> AttributeFacts:
        """Return the look-up table for the attributes of a trace."""
        return cls(attrs, attrs.owner)

    def rows(self, name: str) -> Longs:
        """Return the attribute rows with a given name."""
        if name not in self.attrs.keys:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.attrs.key == self.attrs.keys.index(name))

    def _first(self, rows: Longs) -> Longs:
        """Return those of the given attribute rows that are the first of their node."""
        owner = self.owner[rows]
        first = np.ones(len(rows), np.bool_)
        first[1:] = owner[1:] != owner[:-1]
        return rows[first]

    def first_rows(self, name: str, *, integral: bool = False) -> Longs:
        """Return the row of the first attribute called ``name`` of each node that has one. With ``integral``,
        omit nodes whose first such attribute is not an integer.
        """
        rows = self._first(self.rows(name))
        return rows[IS_INTEGER[self.attrs.field[rows]]] if integral else rows

    def integers(self, name: str) -> AttributeValues:
        """Return the values of an integer or bool attribute that fit into a signed 64-bit integer."""
        rows = self._first(self.rows(name))
        field = self.attrs.field[rows]
        value = self.attrs.bits[rows].view(np.int64)
        too_large = np.isin(field, _UNSIGNED) & (value < 0)
        good = IS_INTEGER[field] & ~too_large
        return AttributeValues(self.owner[rows[good]], value[good], rows[good])

    def texts(self, name: str) -> AttributeValues:
        """Return the values of a string attribute."""
        rows = self._first(self.rows(name))
        rows = rows[self.attrs.field[rows] == AttributeField.STRING]
        return AttributeValues(self.owner[rows], self.attrs.bits[rows].view(np.int64), rows)

    def text(self, name: str) -> bytes:
        """Return the value of a string attribute of a file, empty if it is absent."""
        return b"".join(self.values(self.texts(name)))

    def distinct(self, texts: AttributeValues) -> tuple[list[str], NDArray[np.int64]]:
        """Return the distinct values of a string attribute, and the index of each node's value."""
        distinct, index = self.values(texts).distinct()
        return [text.decode() for text in distinct], index

    def values(self, texts: AttributeValues) -> ByteRows:
        """Return the strings of ``texts``, one byte row per node."""
        return self.attrs.payload.take(texts.value)


def default_classes(kind: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the operation class of nodes of these kinds if nothing else determines it
    (:data:`DEFAULT_CLASS`).
    """
    return _DEFAULT_CLASSES[kind]


def is_canonical(attrs: AttributeColumns) -> Bools:
    """Return a mask of the attributes that have the type in the attribute contract (:data:`ATTRIBUTES`).
    Attributes with names outside the contract count as canonical.
    """
    wanted = np.array([ATTRIBUTES.get(name, -1) for name in attrs.keys] or [-1])
    canonical_field = wanted[attrs.key] if len(attrs) else np.empty(0, np.int64)
    canonical: Bools = (canonical_field < 0) | (canonical_field == attrs.field)
    return canonical
