"""Kinds and costs of the operations of a workload, and draws of other costs for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from hespas.generators.obfuscate.keys import Key
from hespas.generators.obfuscate.layers import Run
from hespas.graph import NodeKind, OpClass, OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray, equal_rows

__all__ = ["CostSamples", "Operation", "OperationTable"]

_PRODUCTS = (int(OpClass.CONTRACTION), int(OpClass.CONVOLUTION), int(OpClass.ATTENTION))
_NEIGHBOURS = 3
_MOST_CHANGE = 0.35
"""Largest change of the logarithm of a cost towards a sampled cost."""
_NOISE = 0.12
"""Largest further change of the logarithm of a cost."""


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
        widths = [len(np.asarray(groups.members(0))) if groups.num_groups else 0 for groups in graph.group_sets]
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


_COMMUNICATION = [
    int(kind) for kind in (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)
]


@dataclass(frozen=True, slots=True, eq=False)
class CostSamples:
    """Distinct costs of each kind of operation in a set of workloads, sorted."""

    costs: dict[str, FloatArray]

    @classmethod
    def of(cls, tables: Sequence[OperationTable]) -> CostSamples:
        """Return the costs in these tables."""
        known = dict[str, set[float]]()
        for table in tables:
            for operation in table.operations:
                if 0 < operation.cost < np.inf:
                    known.setdefault(operation.sort, set()).add(operation.cost)
        return cls({sort: np.array(sorted(costs)) for sort, costs in known.items()})

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
