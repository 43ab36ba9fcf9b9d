"""The hub: a program (of one rank class) as columns.

Everything a reader learns about an operation is a column here, a row of a side table
(:mod:`hespas.graph.tables`), or a verbatim attribute in ``extra``. Nodes stand in program order, which is a
valid issue order unless a format's own order is kept and says otherwise (use
:func:`hespas.graph.passes.topological_order`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import Csr, FloatArray, SmallIntArray, StringTable
from hespas.graph.errors import InvariantError, short_repr
from hespas.graph.groups import GroupSet, Permutation
from hespas.graph.tables import CollectiveTable, ContractionTable, ExtraTable, P2pTable, RegionTable
from hespas.graph.tensors import TensorTypes

__all__ = ["NODE_COLUMNS", "OpGraph"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OpGraph:
    """A program of one rank class. Node columns have shape ``(nodes,)``; nodes are numbered 0..nodes-1.

    Identity and structure
        ``id``: the format's own node id (default: the node number). ``name_row``, ``op_row``: string rows of
        the node's name and operation (``stablehlo.dot_general``). ``kind``, ``op_class``, ``resource``:
        codes of :mod:`hespas.graph.kinds`. ``data_deps``, ``control_deps``: node numbers each node waits
        for. ``region``: row of ``regions`` (-1: top level). ``stream``: queue on the resource (-1: any).
    Types
        ``operands``, ``results``: rows of ``types`` per node. ``rate_dtype``: code of the element type
        that sets the arithmetic rate (-1 unknown).
    Cost of one execution (NaN unknown)
        ``flops``: adds and multiplies as 1, by the specification. ``useful_flops``: without work on padding
        and dilation zeros. ``transcendentals``: count. ``bytes_read``, ``bytes_written``: compulsory
        traffic. ``duration_ns``. ``multiplicity``: executions per step, the product of the trips of all
        enclosing regions (NaN unknown, 0 in a branch not taken).
    Provenance
        ``source_row``: string row of the source location. ``framework_row``: string row of the framework's
        op name (``jit(step)/dot_general``). ``extra``: attributes of the format, verbatim.
        ``attachments``: whole documents by name, such as the source program's bytecode.
    """

    name: str
    strings: StringTable
    types: TensorTypes
    group_sets: tuple[GroupSet, ...]
    permutations: tuple[Permutation, ...]
    id: NDArray[np.uint64]
    name_row: SmallIntArray
    op_row: SmallIntArray
    kind: NDArray[np.uint8]
    op_class: NDArray[np.uint8]
    resource: NDArray[np.uint8]
    stream: SmallIntArray
    region: SmallIntArray
    rate_dtype: NDArray[np.int16]
    source_row: SmallIntArray
    framework_row: SmallIntArray
    flops: FloatArray
    useful_flops: FloatArray
    transcendentals: FloatArray
    bytes_read: FloatArray
    bytes_written: FloatArray
    duration_ns: FloatArray
    multiplicity: FloatArray
    data_deps: Csr
    control_deps: Csr
    operands: Csr
    results: Csr
    collectives: CollectiveTable
    p2p: P2pTable
    contractions: ContractionTable
    regions: RegionTable
    extra: ExtraTable
    attachments: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def __post_init__(self) -> None:
        """Check what every reader and pass must keep: lengths agree and references are in range. O(nodes)."""
        nodes = len(self.kind)
        for name in (*NODE_COLUMNS, "data_deps", "control_deps", "operands", "results"):
            if len(getattr(self, name)) != nodes:
                raise InvariantError(f"graph {self.name!r}: column {name} does not have {nodes} rows")
        self._check_range("data_deps", self.data_deps.values, 0, nodes)
        self._check_range("control_deps", self.control_deps.values, 0, nodes)
        self._check_range("operands", self.operands.values, 0, len(self.types))
        self._check_range("results", self.results.values, 0, len(self.types))
        self._check_range("name_row", self.name_row, 0, len(self.strings))
        self._check_range("op_row", self.op_row, 0, len(self.strings))
        self._check_range("region", self.region, -1, len(self.regions))
        for table in (self.collectives, self.p2p, self.contractions):
            self._check_range(f"{type(table).__name__}.node", table.node, 0, nodes)
        self._check_range("extra.node", self.extra.node, -1, nodes)
        self._check_range("group_set", self.collectives.group_set, -1, len(self.group_sets))
        self._check_range("permutation", self.p2p.permutation, -1, len(self.permutations))

    def _check_range(self, name: str, values: NDArray[np.integer], low: int, high: int) -> None:
        if len(values) and not (low <= int(values.min()) and int(values.max()) < high):
            raise InvariantError(f"graph {self.name!r}: {name} refers outside {low}..{high - 1}")

    def __len__(self) -> int:
        return len(self.kind)

    def __repr__(self) -> str:
        edges = len(self.data_deps.values) + len(self.control_deps.values)
        return short_repr(self, self.name, f"{len(self):,} ops", f"{edges:,} dependencies")

    def op_name(self, node: int) -> str:
        """The operation of one node."""
        return self.strings[int(self.op_row[node])]

    def node_name(self, node: int) -> str:
        """The name of one node."""
        return self.strings[int(self.name_row[node])]

    @property
    def bytes_moved(self) -> FloatArray:
        """Bytes read plus written per execution, shape ``(nodes,)``."""
        with np.errstate(over="ignore"):  # infinite says it
            return self.bytes_read + self.bytes_written

    @property
    def nbytes(self) -> int:
        """Memory the columns take, in bytes; constant columns count nothing."""
        shared = _column_bytes(self.flops) if self.useful_flops is self.flops else 0
        return sum(_column_bytes(getattr(self, entry.name)) for entry in fields(self)) - shared


NODE_COLUMNS: tuple[str, ...] = (
    "id",
    "name_row",
    "op_row",
    "kind",
    "op_class",
    "resource",
    "stream",
    "region",
    "rate_dtype",
    "source_row",
    "framework_row",
    "flops",
    "useful_flops",
    "transcendentals",
    "bytes_read",
    "bytes_written",
    "duration_ns",
    "multiplicity",
)
"""The flat per-node columns of :class:`OpGraph`, in the order in which writers list them."""


def _column_bytes(value: object) -> int:
    """Bytes behind one field: an array, a table of arrays, a string table."""
    if isinstance(value, np.ndarray):
        return value.itemsize if 0 in value.strides else value.nbytes
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, memoryview):
        return value.nbytes
    slots = getattr(value, "__slots__", ())
    return sum(_column_bytes(getattr(value, name)) for name in slots if not isinstance(value, int))
