"""The attribute contract: names, types and meaning of what travels in ``Node.attr``.

Nothing in the format declares attributes; the names are the contract between writers (Chakra's converters,
STAGE) and readers (the Chakra feeder reads exactly one type per name, ASTRA-sim any integer). The second part
of the table is what this project adds so that nothing is lost.
"""

from __future__ import annotations

from types import MappingProxyType

from hespas.graph import CollectiveKind, NodeKind, OpClass
from hespas.schemas.chakra.tables import AttributeField, CollectiveCommType, NodeType

__all__ = [
    "ATTRIBUTES",
    "COLLECTIVE_TO_COMM",
    "COMM_TO_COLLECTIVE",
    "DEFAULT_CLASS",
    "GROUPS_ATTRIBUTE",
    "INTEGER_FIELDS",
    "JOB_ATTRIBUTE",
    "KIND_TO_TYPE",
    "LAYOUT_KEY",
    "LINTED",
    "RANK_ATTRIBUTE",
    "TYPE_TO_KIND",
    "WHOLE_WORLD",
    "Tag",
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
and convolutions (:mod:`.shapes`); ``comm_operand_bytes`` and ``comm_result_bytes`` are the whole
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
"""Metadata attributes of a file that was written without the rest of its set: which rank it is, its groups,
and how many ranks the job has.
"""

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
