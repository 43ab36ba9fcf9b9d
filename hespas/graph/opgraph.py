"""Operation graph of one rank class, stored as columns.

All facts about an operation are columns here, rows of a side table, or verbatim attributes in ``extra``. Side
tables have one row per node that has the fact, sorted by their ``node`` column, so the rows of a node are a
slice. Nodes are in program order, which is a valid issue order unless a format's own order is preserved and
differs (use :func:`hespas.graph.passes.topological_order`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import (
    ColumnTable,
    FloatArray,
    IntArray,
    RaggedArray,
    SmallIntArray,
    StringTable,
    TensorTypes,
    dtypes_of,
)
from hespas.graph.deprecation import renamed_fields
from hespas.graph.errors import InvariantError, short_repr
from hespas.graph.groups import GroupSet, Permutation

__all__ = [
    "ACCUMULATOR_BITS",
    "DONATED_TO",
    "FULL_F32_PRODUCTS",
    "IN_PLACE",
    "MAC_NOISE_SIGMA",
    "NODE_COLUMNS",
    "NODE_DTYPES",
    "RETURNED",
    "SOURCE_DTYPE",
    "CollectiveKind",
    "CollectiveTable",
    "ContractionTable",
    "ExtraTable",
    "NodeKind",
    "OpClass",
    "OpGraph",
    "P2pTable",
    "RegionKind",
    "RegionTable",
    "Resource",
    "Totals",
    "is_recorded_wait",
    "known_sum",
    "timed_class_name",
    "totals",
]


class NodeKind(IntEnum):
    """Kind of a node, which decides how a scheduler treats it."""

    COMPUTE = 0
    COLLECTIVE = 1
    SEND = 2
    RECV = 3
    PERMUTE = 4
    """A send and a receive along one permutation (``collective_permute``)."""
    MEM_LOAD = 5
    MEM_STORE = 6
    METADATA = 7
    INVALID = 8


class OpClass(IntEnum):
    """Class of an operation in the cost table, such as matmul or elementwise."""

    UNKNOWN = 0
    FREE = 1
    ELEMENTWISE = 2
    TRANSCENDENTAL = 3
    CONTRACTION = 4
    CONVOLUTION = 5
    REDUCTION = 6
    WINDOW = 7
    NORMALIZATION = 8
    SORT = 9
    MAP = 10
    LINALG = 11
    FFT = 12
    MOVE = 13
    BROADCAST = 14
    GENERATE = 15
    SLICE = 16
    UPDATE = 17
    GATHER = 18
    SCATTER = 19
    QUANTIZE = 20
    ATTENTION = 21
    FUSION = 22
    COLLECTIVE = 23
    P2P = 24
    HOST = 25
    CONTROL = 26
    CUSTOM = 27
    MEMORY = 28


def timed_class_name(code: int) -> str:
    """Return the name under which reports show the time of an operation class.

    Zero-cost operations with a duration are views and enclosing calls on a host. Therefore their class is
    called ``host overhead``.
    """
    return "host overhead" if code == OpClass.FREE else OpClass(code).name.lower()


class CollectiveKind(IntEnum):
    """Collective operations. The codes are internal; converters map the codes of formats."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_TO_ALL = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    BARRIER = 8
    RAGGED_ALL_TO_ALL = 9
    REDUCE_SCATTER_BLOCK = 10
    UNKNOWN = 11


class Resource(IntEnum):
    """Resource that runs a node: compute, communication, copy, or the host."""

    DEVICE = 0
    HOST = 1


class RegionKind(IntEnum):
    """Kinds of regions; the parent of a region encloses it."""

    CALL = 0
    LOOP_BODY = 1
    """One iteration of a loop: the nodes of its condition, then the nodes of its body, which wait for the
    predicate. The last evaluation of the condition, which ends the loop, is not modelled."""
    BRANCH = 2
    COMPOSITE = 3
    MANUAL = 4
    ASYNC = 5
    FUSION = 6
    SEGMENT = 7


FULL_F32_PRODUCTS = 6
"""``products`` of a multiplication in IEEE f32, which does not run on TF32 units (XLA: precision HIGHEST)."""

ACCUMULATOR_BITS, MAC_NOISE_SIGMA = "accumulator_bits", "mac_noise_sigma"
"""Keys of texts in :class:`ExtraTable` that describe an accumulation beyond its element type.

They are the bits of the accumulator, and the standard deviation of its noise in units of its last bit.
"""

SOURCE_DTYPE = "source_dtype"
"""Key of the text with the original element types of operands that a compiler widened.

Compilers widen types in which the device does not compute. The text is on matrix products and (``convert``)
on the conversions themselves.
"""

DONATED_TO = "donated_to"
"""Key of the text on a parameter's node with the index of the program result that overwrites it."""

IN_PLACE = "in_place"
"""Key of the text on a fusion that lists the data dependencies that its results may overwrite.

The fusion reads these element by element. The text has indices of dependencies, separated by commas.
"""

RETURNED = "returned"
"""Key of the text ``true`` on the node whose results are the results of the program."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CollectiveTable(ColumnTable):
    """Table of collectives: one row per collective node.

    ``kind`` is a :class:`CollectiveKind`. ``group_set`` is the index in the graph's group sets (-1: not
    given, all ranks). ``comm_bytes`` is the payload per rank as Chakra defines it (whole buffer for
    all-reduce, reduce-scatter and all-to-all, shard for all-gather). ``operand_bytes`` and ``result_bytes``
    are the sizes in the program. ``channel`` is -1 if absent. ``reduction`` is a string row (``add``).
    """

    node: SmallIntArray
    kind: NDArray[np.uint8]
    group_set: SmallIntArray
    comm_bytes: FloatArray
    operand_bytes: FloatArray
    result_bytes: FloatArray
    channel: IntArray
    reduction: SmallIntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class P2pTable(ColumnTable):
    """Table of messages: one row per SEND, RECV or PERMUTE node.

    ``permutation`` is the index in the graph's permutations, which map sources to targets for sends and for
    receives (-1: unknown peer). ``comm_bytes`` is the message size. ``tag`` is -1 if absent. ``host`` is True
    for a transfer over the host link.
    """

    node: SmallIntArray
    permutation: SmallIntArray
    comm_bytes: FloatArray
    tag: IntArray
    host: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ContractionTable(ColumnTable):
    """Table of matmuls and convolutions as B x (M x K by K x N); a fusion may have several rows.

    ``flops`` follows the specification; ``useful_flops`` excludes multiplications by padding or dilation
    zeros. ``lhs``, ``rhs`` and ``accumulator`` are element type codes, which together determine the rate.
    ``products`` is the number of matmuls that emulate one (3 or 6 for emulated precision, else 1).
    ``window`` is the number of positions of a convolution's kernel, of which each contributes its input
    channels to K (1 for matmuls and unknown windows).
    """

    node: SmallIntArray
    batch: IntArray
    m: IntArray
    n: IntArray
    k: IntArray
    flops: FloatArray
    useful_flops: FloatArray
    lhs: NDArray[np.int16]
    rhs: NDArray[np.int16]
    accumulator: NDArray[np.int16]
    products: NDArray[np.uint8]
    window: IntArray

    @property
    def has_even_window(self) -> NDArray[np.bool_]:
        """Return a mask of the rows with a possible window: 1 or more, and a divisor of K if K is known."""
        mask: NDArray[np.bool_] = self.k % np.maximum(self.window, 1) == 0
        mask |= self.k < 0
        mask &= self.window >= 1
        return mask

    def resized(
        self,
        *,
        batch: IntArray,
        m: IntArray,
        n: IntArray,
        k: IntArray,
        flops: FloatArray,
        useful_flops: FloatArray,
    ) -> ContractionTable:
        """Return the table with other sizes and FLOPs. A window that does not divide its new K becomes
        unknown.
        """
        sized = replace(self, batch=batch, m=m, n=n, k=k, flops=flops, useful_flops=useful_flops)
        return replace(sized, window=np.where(sized.has_even_window, self.window, 1))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RegionTable:
    """Nested regions of a program: calls, loop bodies, branches, composites.

    ``parent`` is the enclosing region (-1: none) and always a smaller row. ``kind`` is a
    :class:`hespas.graph.opgraph.RegionKind`. ``trips`` is the number of runs of the region per run of its
    parent (NaN unknown, 0 for a branch not taken). ``label`` is a string row. A loop is one region: its
    condition and its body run ``trips`` times. The last evaluation of the condition, which ends the loop, has
    no node. Loops carry values from one iteration to the next: node ``carried_consumer[i]`` of region
    ``carried_region[i]`` needs the value that ``carried_producer[i]`` made one iteration earlier.
    """

    parent: SmallIntArray
    kind: NDArray[np.uint8]
    trips: FloatArray
    label: SmallIntArray
    carried_region: SmallIntArray
    carried_producer: SmallIntArray
    carried_consumer: SmallIntArray

    @classmethod
    def from_rows(
        cls, rows: Sequence[tuple[int, int, float, int]], carried: Sequence[Sequence[int]] | IntArray = ()
    ) -> RegionTable:
        """Return a table from a list of rows, each (parent, kind, trips, label).

        ``carried`` has the rows (region, producer, consumer) of values that loops carry.
        """
        parent, kind, trips, label = zip(*rows, strict=True) if rows else repeat((), 4)
        edges = np.asarray(carried, np.int32).reshape(-1, 3)
        return cls(
            parent=np.array(parent, np.int32),
            kind=np.array(kind, np.uint8),
            trips=np.array(trips, np.float64),
            label=np.array(label, np.int32),
            carried_region=edges[:, 0],
            carried_producer=edges[:, 1],
            carried_consumer=edges[:, 2],
        )

    @classmethod
    def empty(cls) -> RegionTable:
        """Return the table of a program without regions."""
        return cls.from_rows(())

    def within(self, region: int) -> NDArray[np.bool_]:
        """Return a mask of ``region`` and the regions nested in it, shape ``(regions + 1,)``.

        The additional last entry is for the top level of the program and is False.
        """
        inside = np.zeros(len(self) + 1, np.bool_)
        inside[region] = True
        for row, parent in enumerate(self.parent.tolist()):
            if parent >= 0 and inside[parent]:
                inside[row] = True
        return inside

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExtraTable:
    """Attributes of a file format that the graph does not model, stored unchanged; a node may have several
    rows.

    ``key`` is a string row. ``tag`` is the type of the value ``values[offsets[i]:offsets[i + 1]]``. Tag 0 is
    text (UTF-8) of any format, which every format may write. Tags 1 to 255 are types of Chakra
    (``hespas.converters.chakra.contract.Tag``); others are unassigned. A format skips rows with tags of
    another format. ``node`` is -1 for attributes of the file itself.
    """

    node: SmallIntArray
    key: SmallIntArray
    tag: NDArray[np.int16]
    offsets: IntArray
    values: bytes | memoryview[int]

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, int, int, bytes]]) -> ExtraTable:
        """Return a table of rows of node, key, tag and value, sorted by node."""
        node, key, tag, values = zip(*rows, strict=True) if rows else repeat((), 4)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(value) for value in values], out=offsets[1:])
        return cls(
            node=np.array(node, np.int32),
            key=np.array(key, np.int32),
            tag=np.array(tag, np.int16),
            offsets=offsets,
            values=b"".join(values),
        )

    @classmethod
    def empty(cls) -> ExtraTable:
        """Return a table without rows."""
        return cls.from_rows(())

    def __len__(self) -> int:
        return len(self.node)

    def behind(self, first: ExtraTable) -> ExtraTable:
        """Return a table with the rows of ``first``, followed by the rows of this table."""
        return ExtraTable(
            node=np.concatenate([first.node, self.node]),
            key=np.concatenate([first.key, self.key]),
            tag=np.concatenate([first.tag, self.tag]),
            offsets=np.concatenate([first.offsets, self.offsets[1:] + len(first.values)]),
            values=bytes(first.values) + bytes(self.values),
        )

    def value(self, row: int) -> bytes:
        """Return the stored bytes of one row."""
        return bytes(self.values[self.offsets[row] : self.offsets[row + 1]])

    def rows_of(self, node: int) -> range:
        """Return the rows of one node."""
        start, end = np.searchsorted(self.node, [node, node + 1])
        return range(int(start), int(end))


@renamed_fields(
    name_row="name_id",
    op_row="op_id",
    source_row="source_id",
    framework_row="framework_id",
    multiplicity="executions",
)
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OpGraph:
    """A program of one rank class. Node columns have shape ``(nodes,)``; nodes are numbered 0..nodes-1.

    Identity and structure
        ``id``: the format's own node id (default: the node number). ``name_id``, ``op_id``: string rows of
        the node's name and operation (``stablehlo.dot_general``). ``kind``, ``op_class``, ``resource``:
        codes of :mod:`hespas.graph.opgraph`. ``data_deps``, ``control_deps``: node numbers each node waits
        for. ``region``: row of ``regions`` (-1: top level). ``stream``: queue on the resource (-1: any).
    Types
        ``operands``, ``results``: rows of ``types`` per node. ``rate_dtype``: code of the element type
        that sets the arithmetic rate (-1 unknown).
    Cost of one execution (NaN unknown)
        ``flops``: adds and multiplies as 1, by the specification. ``useful_flops``: without work on padding
        and dilation zeros. ``transcendentals``: count. ``bytes_read``, ``bytes_written``: compulsory
        traffic. ``duration_ns``. ``executions``: executions per step, the product of the trips of all
        enclosing regions (NaN unknown, 0 in a branch not taken).
    Provenance
        ``source_id``: string row of the source location. ``framework_id``: string row of the framework's
        op name (``jit(step)/dot_general``). ``extra``: attributes of the format, verbatim.
        ``attachments``: whole documents by name, such as the source program's bytecode.
    """

    name: str
    strings: StringTable
    types: TensorTypes
    group_sets: tuple[GroupSet, ...]
    permutations: tuple[Permutation, ...]
    id: NDArray[np.uint64]
    name_id: SmallIntArray
    op_id: SmallIntArray
    kind: NDArray[np.uint8]
    op_class: NDArray[np.uint8]
    resource: NDArray[np.uint8]
    stream: SmallIntArray
    region: SmallIntArray
    rate_dtype: NDArray[np.int16]
    source_id: SmallIntArray
    framework_id: SmallIntArray
    flops: FloatArray
    useful_flops: FloatArray
    transcendentals: FloatArray
    bytes_read: FloatArray
    bytes_written: FloatArray
    duration_ns: FloatArray
    executions: FloatArray
    data_deps: RaggedArray
    control_deps: RaggedArray
    operands: RaggedArray
    results: RaggedArray
    collectives: CollectiveTable
    p2p: P2pTable
    contractions: ContractionTable
    regions: RegionTable
    extra: ExtraTable
    attachments: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def __post_init__(self) -> None:
        """Check that columns have equal lengths and that references are in range. O(nodes)."""
        nodes = len(self.kind)
        for name in (*NODE_COLUMNS, "data_deps", "control_deps", "operands", "results"):
            if len(getattr(self, name)) != nodes:
                raise InvariantError(f"graph {self.name!r}: column {name} does not have {nodes} rows")
        self._check_range("data_deps", self.data_deps.values, 0, nodes)
        self._check_range("control_deps", self.control_deps.values, 0, nodes)
        self._check_range("operands", self.operands.values, 0, len(self.types))
        self._check_range("results", self.results.values, 0, len(self.types))
        self._check_range("name_id", self.name_id, 0, len(self.strings))
        self._check_range("op_id", self.op_id, 0, len(self.strings))
        self._check_range("region", self.region, -1, len(self.regions))
        for table in (self.collectives, self.p2p, self.contractions):
            self._check_range(f"{type(table).__name__}.node", table.node, 0, nodes)
        self._check_range("extra.node", self.extra.node, -1, nodes)
        self._check_range("group_set", self.collectives.group_set, -1, len(self.group_sets))
        self._check_range("permutation", self.p2p.permutation, -1, len(self.permutations))

    def _check_range(self, name: str, values: NDArray[np.integer], low: int, high: int) -> None:
        if len(values) and not (low <= int(values.min()) and int(values.max()) < high):
            raise InvariantError(f"graph {self.name!r}: {name} has values outside {low}..{high - 1}")

    def __len__(self) -> int:
        return len(self.kind)

    def __repr__(self) -> str:
        edges = len(self.data_deps.values) + len(self.control_deps.values)
        return short_repr(self, self.name, f"{len(self):,} ops", f"{edges:,} dependencies")

    def op_name(self, node: int) -> str:
        """Return the operation of one node."""
        return self.strings[int(self.op_id[node])]

    def node_name(self, node: int) -> str:
        """Return the name of one node."""
        return self.strings[int(self.name_id[node])]

    @property
    def bytes_moved(self) -> FloatArray:
        """Bytes read plus written per execution, shape ``(nodes,)``."""
        with np.errstate(over="ignore"):  # the sum may be infinite
            return self.bytes_read + self.bytes_written

    @property
    def nbytes(self) -> int:
        """Memory of the columns in bytes; constant columns count as one value."""
        shared = _column_bytes(self.flops) if self.useful_flops is self.flops else 0
        return sum(_column_bytes(getattr(self, entry.name)) for entry in fields(self)) - shared


NODE_DTYPES = dtypes_of(OpGraph)
"""Flat per-node columns of :class:`OpGraph` with their types, in the order in which writers list them."""

NODE_COLUMNS: tuple[str, ...] = tuple(NODE_DTYPES)
"""Names of the flat per-node columns."""


def _column_bytes(value: object) -> int:
    """Return the bytes of one field: an array, a table of arrays, or a string table."""
    if isinstance(value, np.ndarray):
        return value.itemsize if 0 in value.strides else value.nbytes
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    slots = getattr(value, "__slots__", ())
    return sum(_column_bytes(getattr(value, name)) for name in slots if not isinstance(value, int))


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of one step of one rank, which a conversion must conserve. Each node counts once per execution.

    ``unknown_ops`` is the number of operations with an unknown cost or execution count, which the totals
    exclude. Recorded waits do not count as operations. A total is NaN if some terms are unknown and all
    others are 0.
    """

    ops: float
    device_time_ns: float
    flops: float
    useful_flops: float
    transcendentals: float
    bytes_moved: float
    collectives: float
    collective_bytes: float
    messages: float
    message_bytes: float
    unknown_ops: int


def known_sum(column: FloatArray) -> float:
    """Return the sum of the known values of a column; NaN if values are unknown and all others are 0."""
    unknown = np.isnan(column)
    with np.errstate(over="ignore"):  # the sum of finite terms can be infinite
        total = float(column[~unknown].sum())
    return float("nan") if total == 0 and bool(unknown.any()) else total


def is_recorded_wait(graph: OpGraph) -> NDArray[np.bool_]:
    """Return a mask of the nodes that represent recorded time in which the device waited.

    Such a node is the time of a host thread, or a delay, which has no stream. Its time does not depend on the
    device.
    """
    passes = (graph.kind == int(NodeKind.COMPUTE)) & (graph.op_class == int(OpClass.FREE))
    passes &= graph.duration_ns > 0
    waits: NDArray[np.bool_] = passes & ((graph.resource == int(Resource.HOST)) | (graph.stream < 0))
    return waits


def totals(graph: OpGraph) -> Totals:
    """Return the sums over one graph; a sum beyond the range of floats is infinite. O(nodes)."""
    times, waits = graph.executions, is_recorded_wait(graph)
    of_collectives, of_messages = times[graph.collectives.node], times[graph.p2p.node]
    unknown = np.isnan(graph.flops) | np.isnan(graph.bytes_moved) | np.isnan(times)
    with np.errstate(over="ignore", invalid="ignore"):
        return Totals(
            ops=float(np.nansum(np.where(waits, 0.0, times))),
            device_time_ns=known_sum(np.where(waits, 0.0, graph.duration_ns) * times),
            flops=known_sum(graph.flops * times),
            useful_flops=known_sum(graph.useful_flops * times),
            transcendentals=known_sum(graph.transcendentals * times),
            bytes_moved=known_sum(graph.bytes_moved * times),
            collectives=float(np.nansum(of_collectives)),
            collective_bytes=float(np.nansum(graph.collectives.comm_bytes * of_collectives)),
            messages=float(np.nansum(of_messages)),
            message_bytes=float(np.nansum(graph.p2p.comm_bytes * of_messages)),
            unknown_ops=int(unknown.sum()),
        )
