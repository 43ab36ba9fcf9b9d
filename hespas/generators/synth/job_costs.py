"""Kinds and costs of the operations of a workload, draws of other costs for them, and other extents of their
tensors. Equal extents stay equal, so shapes agree along edges and on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from hespas.generators.obfuscate.keys import Key
from hespas.generators.obfuscate.layers import Run, scaled_costs
from hespas.generators.obfuscate.shapes import with_payload
from hespas.graph import NodeKind, OpClass, OpGraph, TensorTypesBuilder
from hespas.graph.columns import BoolArray, FloatArray, IntArray, RaggedArray, equal_rows
from hespas.graph.quantised import parse_quantised

__all__ = ["CostSamples", "Operation", "OperationTable", "changed_extents", "with_costs"]

_PRODUCTS = (int(OpClass.CONTRACTION), int(OpClass.CONVOLUTION), int(OpClass.ATTENTION))
_COMMUNICATION = [int(kind) for kind in (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)]
_NEIGHBOURS = 3
_MOST_CHANGE = 0.35
"""Largest change of the logarithm of a cost towards a sampled cost."""
_NOISE = 0.12
"""Largest further change of the logarithm of a cost."""
_LEAST_EXTENT = 512
"""Smallest extent that changes. Smaller ones are sizes of heads, vectors and groups of ranks."""
_PAYLOAD_STEP = 64
"""Payloads of collectives are multiples of this number of bytes per rank."""
_EXTENT_GRID = 8
_EXTENT_SPREAD = 0.24
"""Largest decrease of the logarithm of an extent, before it is rounded."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Distinct operation. ``sort`` is its kind: operation and class, or collective and group size. ``text``
    is equal for equal operations on all ranks. ``cost`` is its payload, FLOPs or memory traffic.
    """

    sort: str
    text: str
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class OperationTable:
    """Operations of a rank class. ``index`` is the operation of each node. ``part`` numbers the parts of a
    program over which the sum of the costs is kept: its repeated blocks and the rest, matmuls and others.
    ``weight`` is the share of each node in the sum. ``communicates`` is a mask of collectives and messages.
    """

    operations: tuple[Operation, ...]
    index: IntArray
    part: IntArray
    weight: FloatArray
    communicates: BoolArray

    @classmethod
    def of(cls, graph: OpGraph, codes: IntArray, runs: Sequence[Run]) -> OperationTable:
        """Return the operations of a graph. ``codes`` are the signatures of its nodes."""
        count = len(graph)
        size, width, kind = np.full(count, -1.0), np.zeros(count, np.int64), np.full(count, -1, np.int64)
        for table in (graph.collectives, graph.p2p):
            size[table.node] = table.comm_bytes
        kind[graph.collectives.node] = graph.collectives.kind
        widths = [
            len(np.asarray(groups.members(0))) if groups.num_groups else 0 for groups in graph.group_sets
        ]
        width[graph.collectives.node] = np.array([*widths, 0])[graph.collectives.group_set]
        communicates = np.isin(graph.kind, _COMMUNICATION)
        is_product = np.isin(graph.op_class, _PRODUCTS)
        moved = graph.bytes_moved
        work = np.where(is_product, graph.flops, moved)
        first, index = equal_rows(
            graph.kind, graph.op_class, graph.op_id, kind, width, size, graph.flops, moved
        )
        operations = list[Operation]()
        rows = (graph.kind, graph.op_class, kind, width, size, work, graph.flops, moved, communicates)
        for node, *values in zip(first.tolist(), *(row[first].tolist() for row in rows), strict=True):
            node_kind, op_class, collective, members, payload, cost, flops, traffic, is_communication = values
            if is_communication:
                sort = f"collective {collective} {members}" if collective >= 0 else "message"
                operations.append(Operation(sort, f"{sort} {payload}", payload))
            else:
                sort = f"compute {node_kind} {op_class} {graph.op_name(node)}"
                operations.append(Operation(sort, f"{sort} {flops} {traffic}", cost))
        part, blocks = np.zeros(count, np.int64), dict[bytes, int]()
        for run in runs:
            block = codes[run.start : run.start + run.period].tobytes()
            part[run.start : run.start + run.period * run.repeats] = 1 + blocks.setdefault(block, len(blocks))
        weight = np.where(np.isnan(graph.duration_ns), work, graph.duration_ns)
        times = np.where(graph.executions > 0, graph.executions, 1.0)
        return cls(
            operations=tuple(operations),
            index=index,
            part=part * 2 + is_product,
            weight=np.nan_to_num(np.where(communicates, size, weight)) * times,
            communicates=communicates,
        )


@dataclass(frozen=True, slots=True, eq=False)
class CostSamples:
    """Distinct costs of each kind of operation in a set of workloads, sorted."""

    costs: dict[str, FloatArray]

    @classmethod
    def of(cls, tables: Sequence[OperationTable]) -> CostSamples:
        """Return the costs in these tables."""
        costs_of_sort = dict[str, set[float]]()
        for table in tables:
            for operation in table.operations:
                if 0 < operation.cost < np.inf:
                    costs_of_sort.setdefault(operation.sort, set()).add(operation.cost)
        return cls({sort: np.array(sorted(costs)) for sort, costs in costs_of_sort.items()})

    def factor(self, operation: Operation, key: Key) -> float:
        """Return the factor by which the cost of an operation changes: part of the way to one of the nearest
        costs of its kind, and noise. ``key`` determines the choice.
        """
        noise = _NOISE * (2.0 * key.uniform(f"noise {operation.text}") - 1.0)
        if not 0 < operation.cost < np.inf:
            return exp(noise)
        costs = self.costs[operation.sort]
        place = int(np.searchsorted(costs, operation.cost))
        near = costs[max(place - _NEIGHBOURS, 0) : place + _NEIGHBOURS + 1]
        chosen = float(near[int(key.uniform(f"sample {operation.text}") * len(near))])
        change = min(max(log(chosen / operation.cost), -_MOST_CHANGE), _MOST_CHANGE)
        return exp(change * key.uniform(f"share {operation.text}") + noise)


def changed_extents(extents: IntArray, key: Key, scale: float = 1.0) -> IntArray:
    """Return other extents, determined by ``key``, of which the largest are about ``scale`` times as large.

    Extents that differ by a power of two get the same factor, so that parts of a split extent still add up,
    and keep almost all factors of two, so that they still fill the tiles of a matrix unit.
    """
    changed = extents.copy()
    distinct = np.unique(extents[extents >= _LEAST_EXTENT])
    for extent in distinct.tolist():
        core, grid = extent, 1
        while core % 2 == 0:
            core //= 2
            grid *= 2
        step = max(grid // _EXTENT_GRID, 1)
        factor = scale * float(np.exp(-_EXTENT_SPREAD * key.uniform(f"extent {core}")))
        changed[extents == extent] = max(round(extent * factor / step), 1) * step
    return changed


def with_costs(graph: OpGraph, key: Key, factor: FloatArray, scale: float) -> OpGraph:
    """Return a graph with other costs and extents, and with ids in order. ``factor`` is the factor by which
    the costs of each node change, shape ``(nodes,)``, and ``scale`` the factor of the largest extents.

    The rows (``m``) of matmuls are chosen so that their work has that factor. Operations whose tensors would
    be larger than their memory traffic get more traffic. Payloads are whole numbers.
    """
    types, builder = graph.types, TensorTypesBuilder()
    bounds: list[int] = types.dim_offsets.tolist()
    dims: list[int] = changed_extents(types.dims, key, scale).tolist()
    number: list[int] = []
    for row, encoding in enumerate(types.encoding.tolist()):
        shape = dims[bounds[row] : bounds[row + 1]]
        quantised = parse_quantised(graph.strings[encoding])
        kept = encoding if quantised is None or quantised.fits(shape) else 0  # scales of other extents
        number.append(
            builder.add(types.dtype_of(row), shape, encoding=kept, bounded=bool(types.bounded[row]))
        )
    new_row = np.array(number or [0], np.int32)
    table = graph.contractions
    batch, n, k = (changed_extents(extents, key, scale) for extents in (table.batch, table.n, table.k))
    row_factor = factor[table.node]
    work = row_factor * table.batch * table.m * table.n * table.k
    rows = work / np.maximum(batch.astype(np.float64) * n * k, 1.0)
    step = np.where(rows >= 2 * _LEAST_EXTENT, float(_EXTENT_GRID), 1.0)
    m = np.maximum(np.rint(rows / step), 1.0) * step
    new_types = builder.build()
    operands, results = (
        RaggedArray(lists.offsets, new_row[lists.values]) for lists in (graph.operands, graph.results)
    )

    def traffic(old: FloatArray, before: RaggedArray, after: RaggedArray) -> FloatArray:
        if not len(before.values):
            return old * factor
        own, new = before.segment_sum(types.bytes), after.segment_sum(new_types.bytes)
        least = np.divide(new, own, out=np.zeros(len(own)), where=own > 0)
        return old * np.fmax(factor, least)

    scaled = scaled_costs(replace(graph, contractions=table.take(np.empty(0, np.int64))), factor)
    collectives, p2p = scaled.collectives, scaled.p2p
    return replace(
        scaled,
        id=np.arange(len(graph), dtype=np.uint64),
        bytes_read=np.rint(traffic(graph.bytes_read, graph.operands, operands)),
        bytes_written=np.rint(traffic(graph.bytes_written, graph.results, results)),
        types=new_types,
        operands=operands,
        results=results,
        contractions=table.resized(
            batch=batch,
            m=m.astype(np.int64),
            n=n,
            k=k,
            flops=table.flops * row_factor,
            useful_flops=table.useful_flops * row_factor,
        ),
        collectives=with_payload(collectives, _whole_payload(collectives.comm_bytes)),
        p2p=replace(p2p, comm_bytes=_whole_payload(p2p.comm_bytes)),
    )


def _whole_payload(payload: FloatArray) -> FloatArray:
    """Return payloads as multiples of :data:`_PAYLOAD_STEP`, small ones as whole numbers above 0."""
    step = np.where(payload >= _PAYLOAD_STEP * _PAYLOAD_STEP, float(_PAYLOAD_STEP), 1.0)
    return np.where(payload > 0, np.maximum(np.rint(payload / step), 1.0) * step, payload)
