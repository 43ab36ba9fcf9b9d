"""A graph as plain lists, for the loops of a replay, and the slots that its nodes occupy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph import NodeKind, OpGraph, Resource
from hespas.graph.passes import all_deps

__all__ = ["COMM_SLOT", "CPU_SLOT", "DEVICE_SLOT", "NodeProgram"]

CPU_SLOT, DEVICE_SLOT, COMM_SLOT = range(3)

_LONGEST_NS = 10**15


@dataclass(frozen=True, slots=True, eq=False)
class NodeProgram:
    """A graph as lists, for loops that must be sequential.

    ``slot`` is what a node occupies if it does not talk to others; ``priority`` its place in id order and
    ``by_priority`` the inverse; ``waiting`` counts dependencies; ``bounds`` and ``targets`` list dependents.
    """

    slot: list[int]
    priority: list[int]
    by_priority: list[int]
    waiting: list[int]
    bounds: list[int]
    targets: list[int]
    compute_ns: list[int]

    @classmethod
    def of(cls, graph: OpGraph) -> NodeProgram:
        """The lists of one graph; unknown and zero durations count as 1 ns. O(nodes + edges)."""
        nodes = len(graph)
        deps = all_deps(graph)
        dependents = deps.transpose(nodes)
        order = np.argsort(graph.id, kind="stable")
        priority = np.empty(nodes, np.int64)
        priority[order] = np.arange(nodes)
        memory = np.isin(graph.kind, (int(NodeKind.MEM_LOAD), int(NodeKind.MEM_STORE)))
        on_host = graph.resource == int(Resource.HOST)
        slot = np.where(memory, COMM_SLOT, np.where(on_host, CPU_SLOT, DEVICE_SLOT))
        time = np.nan_to_num(graph.duration_ns, nan=1.0, posinf=_LONGEST_NS, neginf=1.0)
        return cls(
            slot=slot.tolist(),
            priority=priority.tolist(),
            by_priority=order.tolist(),
            waiting=deps.lengths.tolist(),
            bounds=dependents.offsets.tolist(),
            targets=dependents.values.tolist(),
            compute_ns=np.clip(time, 1, _LONGEST_NS).astype(np.int64).tolist(),
        )

    def __len__(self) -> int:
        return len(self.slot)
