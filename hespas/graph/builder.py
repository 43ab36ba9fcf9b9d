"""Builder of an :class:`~hespas.graph.opgraph.OpGraph`, node by node.

A column that no node sets stays a constant and takes no memory; the others grow in ``array`` buffers, so a
reader of a million nodes creates no object per node.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import nan
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import (
    FloatArray,
    RaggedArray,
    SmallIntArray,
    StringTableBuilder,
    TensorTypesBuilder,
    constant,
    constant_if_equal,
)
from hespas.graph.groups import GroupSet, Permutation
from hespas.graph.opgraph import (
    CollectiveKind,
    CollectiveTable,
    ContractionTable,
    ExtraTable,
    NodeKind,
    OpClass,
    OpGraph,
    P2pTable,
    RegionKind,
    RegionTable,
    Resource,
)

__all__ = ["GraphBuilder", "region_executions"]

_Scalar = TypeVar("_Scalar", np.float64, np.int32, np.int16, np.uint8)


class _SparseColumn:
    """Column of a builder in which most nodes have a default value; only other values are stored."""

    __slots__ = ("default", "values")

    def __init__(self, default: float) -> None:
        self.default = default
        self.values: dict[int, float] = {}

    def build(self, rows: int, dtype: type[_Scalar]) -> NDArray[_Scalar]:
        if not self.values:
            return np.broadcast_to(dtype(self.default), (rows,))
        column = np.full(rows, self.default, dtype)
        column[np.fromiter(self.values, np.int64)] = list(self.values.values())
        return column


class _RaggedBuffer:
    """Growing lists of integers, one per row, stored in two flat buffers: all values, and the length of each
    row.
    """

    __slots__ = ("lengths", "values")

    def __init__(self) -> None:
        self.lengths = array("i")
        self.values = array("i")

    def append(self, row: Sequence[int]) -> None:
        self.lengths.append(len(row))
        self.values.extend(row)

    def build(self) -> RaggedArray:
        if not self.values:
            return RaggedArray.empty(len(self.lengths))
        return RaggedArray.from_lengths(_ints(self.lengths), _ints(self.values))


def _ints(buffer: Iterable[int]) -> SmallIntArray:
    return np.array(buffer, np.int32)


def _floats(buffer: Iterable[float]) -> FloatArray:
    return np.array(buffer, np.float64)


class GraphBuilder:
    """Builder of a graph: add nodes in program order, then call :meth:`build`.

    ``strings`` and ``types`` store each text and tensor type once and return its row number. Nodes refer to
    texts and types by these numbers.
    """

    def __init__(self, name: str) -> None:
        """Start an empty graph."""
        self.name = name
        self.strings = StringTableBuilder()
        self.types = TensorTypesBuilder()
        self._group_sets: dict[GroupSet, int] = {}
        self._permutations: dict[Permutation, int] = {}
        self._name_id, self._op_id, self._region = array("i"), array("i"), array("i")
        self._kind, self._op_class = array("B"), array("B")
        self._flops, self._transcendentals = array("d"), array("d")
        self._bytes_read, self._bytes_written = array("d"), array("d")
        self._sparse = {
            "stream": _SparseColumn(-1),
            "resource": _SparseColumn(int(Resource.DEVICE)),
            "rate_dtype": _SparseColumn(-1),
            "source_id": _SparseColumn(0),
            "framework_id": _SparseColumn(0),
            "useful_flops": _SparseColumn(nan),
            "duration_ns": _SparseColumn(nan),
        }
        self._ids: dict[int, int] = {}
        self._data, self._control = _RaggedBuffer(), _RaggedBuffer()
        self._operands, self._results = _RaggedBuffer(), _RaggedBuffer()
        self._collectives: list[tuple[int, int, int, float, float, float, int, int]] = []
        self._p2p: list[tuple[int, int, float, int, bool]] = []
        self._contractions: list[tuple[int, int, int, int, int, float, float, int, int, int, int, int]] = []
        self._regions: list[tuple[int, int, float, int]] = []
        self._carried: list[tuple[int, int, int]] = []
        self._extra: list[tuple[int, int, int, bytes]] = []
        self.attachments: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._data.lengths)

    def add_node(
        self,
        *,
        name_id: int,
        op_id: int,
        op_class: OpClass | int,
        kind: NodeKind | int = NodeKind.COMPUTE,
        data_deps: Sequence[int] = (),
        control_deps: Sequence[int] = (),
        operands: Sequence[int] = (),
        results: Sequence[int] = (),
        flops: float = nan,
        transcendentals: float = nan,
        bytes_read: float = nan,
        bytes_written: float = nan,
        region: int = -1,
    ) -> int:
        """Append a node and return its number. Costs are per execution; unknown is NaN."""
        node = len(self._data.lengths)
        self._name_id.append(name_id)
        self._op_id.append(op_id)
        self._kind.append(kind)
        self._op_class.append(op_class)
        self._region.append(region)
        self._flops.append(flops)
        self._transcendentals.append(transcendentals)
        self._bytes_read.append(bytes_read)
        self._bytes_written.append(bytes_written)
        self._data.append(data_deps)
        self._control.append(control_deps)
        self._operands.append(operands)
        self._results.append(results)
        return node

    def set(self, node: int, **values: float) -> None:
        """Set values of a node in columns that few nodes use.

        The names may be ``stream``, ``resource``, ``rate_dtype``, ``source_id``, ``framework_id``,
        ``useful_flops`` (default: ``flops``) and ``duration_ns``.
        """
        for column, value in values.items():
            self._sparse[column].values[node] = value

    def first_of_kind(self, kind: NodeKind, start: int) -> int:
        """Return the first node of a kind from number ``start`` on, -1 without one."""
        return next((node for node in range(start, len(self._kind)) if self._kind[node] == kind), -1)

    def set_id(self, node: int, value: int) -> None:
        """Set the format's node id (0 .. 2**64 - 1) if it is not the node number."""
        self._ids[node] = value

    def group_set(self, groups: GroupSet) -> int:
        """Return the row of a group set, which is added if new."""
        return self._group_sets.setdefault(groups, len(self._group_sets))

    def permutation(self, permutation: Permutation) -> int:
        """Return the row of a permutation, which is added if new."""
        return self._permutations.setdefault(permutation, len(self._permutations))

    def add_collective(
        self,
        node: int,
        kind: CollectiveKind,
        *,
        group_set: int,
        comm_bytes: float,
        operand_bytes: float = nan,
        result_bytes: float = nan,
        channel: int = -1,
        reduction: str = "",
    ) -> None:
        """Mark a node as a collective; see :class:`hespas.graph.opgraph.CollectiveTable`."""
        row = (node, int(kind), group_set, comm_bytes, operand_bytes, result_bytes, channel)
        self._collectives.append((*row, self.strings.add(reduction)))

    def add_p2p(
        self, node: int, *, permutation: int, comm_bytes: float, tag: int = -1, host: bool = False
    ) -> None:
        """Mark a node as a send or receive; see :class:`hespas.graph.opgraph.P2pTable`."""
        self._p2p.append((node, permutation, comm_bytes, tag, host))

    def add_contraction(
        self,
        node: int,
        *,
        batch: int,
        m: int,
        n: int,
        k: int,
        flops: float,
        useful_flops: float,
        lhs: int,
        rhs: int,
        accumulator: int,
        products: int = 1,
        window: int = 1,
    ) -> None:
        """Add a matrix product of a node; see :class:`hespas.graph.opgraph.ContractionTable`."""
        self._contractions.append(
            (node, batch, m, n, k, flops, useful_flops, lhs, rhs, accumulator, products, window)
        )

    def add_region(self, kind: RegionKind, *, parent: int = -1, trips: float = 1.0, label: str = "") -> int:
        """Add a region and return its row; pass it to :meth:`add_node`."""
        self._regions.append((parent, int(kind), trips, self.strings.add(label)))
        return len(self._regions) - 1

    def set_trips(self, region: int, trips: float) -> None:
        """Set the trip count of a region once it is known."""
        parent, kind, _, label = self._regions[region]
        self._regions[region] = (parent, kind, trips, label)

    def add_carried(self, region: int, producer: int, consumer: int) -> None:
        """Add a carried value: ``consumer`` needs the output of ``producer`` from one iteration of ``region``
        earlier.
        """
        self._carried.append((region, producer, consumer))

    def add_extra(self, node: int, key: str, tag: int, value: bytes) -> None:
        """Add an attribute of the format verbatim; node -1 is the file itself."""
        self._extra.append((node, self.strings.add(key), tag, value))

    def build(self) -> OpGraph:
        """Return the finished graph. The builder must not be used afterwards."""
        nodes = len(self)
        regions = RegionTable.from_rows(self._regions, self._carried)
        region = constant_if_equal(_ints(self._region))
        flops = constant_if_equal(_floats(self._flops))
        sparse = self._sparse
        ids = np.arange(nodes, dtype=np.uint64)
        for node, value in self._ids.items():
            ids[node] = value
        useful_flops, overrides = flops, sparse["useful_flops"].values
        if overrides:
            useful_flops = flops.copy()
            useful_flops[np.fromiter(overrides, np.int64)] = list(overrides.values())
        return OpGraph(
            name=self.name,
            group_sets=tuple(self._group_sets),
            permutations=tuple(self._permutations),
            id=ids,
            name_id=_ints(self._name_id),
            op_id=constant_if_equal(_ints(self._op_id)),
            kind=constant_if_equal(np.array(self._kind, np.uint8)),
            op_class=constant_if_equal(np.array(self._op_class, np.uint8)),
            resource=sparse["resource"].build(nodes, np.uint8),
            stream=sparse["stream"].build(nodes, np.int32),
            region=region,
            rate_dtype=sparse["rate_dtype"].build(nodes, np.int16),
            source_id=sparse["source_id"].build(nodes, np.int32),
            framework_id=sparse["framework_id"].build(nodes, np.int32),
            flops=flops,
            useful_flops=useful_flops,
            transcendentals=constant_if_equal(_floats(self._transcendentals)),
            bytes_read=constant_if_equal(_floats(self._bytes_read)),
            bytes_written=constant_if_equal(_floats(self._bytes_written)),
            duration_ns=sparse["duration_ns"].build(nodes, np.float64),
            executions=region_executions(regions, region),
            data_deps=self._data.build(),
            control_deps=self._control.build(),
            operands=self._operands.build(),
            results=self._results.build(),
            collectives=CollectiveTable.from_rows(sorted(self._collectives)),
            p2p=P2pTable.from_rows(sorted(self._p2p)),
            contractions=ContractionTable.from_rows(sorted(self._contractions, key=lambda row: row[0])),
            regions=regions,
            extra=ExtraTable.from_rows(sorted(self._extra, key=lambda row: row[0])),
            attachments=self.attachments,
            types=self.types.build(),
            strings=self.strings.build(),
        )


def region_executions(regions: RegionTable, region: SmallIntArray) -> FloatArray:
    """Return the number of times that the nodes in each entry of ``region`` run per step: the product of the
    trip counts of that region and of all regions around it.
    """
    if not len(regions) or not (region >= 0).any():
        return constant(1.0, len(region))
    product: list[float] = []
    parents: list[int] = regions.parent.tolist()
    all_trips: list[float] = regions.trips.tolist()
    for parent, trips in zip(parents, all_trips, strict=True):
        product.append(trips if parent < 0 else trips * product[parent])
    return np.array([*product, 1.0])[region]
