"""The memory of each rank class of a job that ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import nan

import numpy as np

from hespas.graph import PROGRAM_BYTES, WHOLE_JOB, OpGraph, Timeline, Workload
from hespas.simulator.memory.facts import end_of
from hespas.simulator.memory.moments import Moments, in_order, in_time
from hespas.simulator.memory.use import MemoryUse, ProgramBytes, memory_use

__all__ = ["RankMemory", "memory_by_class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of the ranks of one class. ``is_whole_job`` says that its tensors are those of all ranks
    together, since nobody partitioned the program; ``capacity_bytes`` is NaN where no device is given.
    """

    rank_class: int
    use: MemoryUse
    is_whole_job: bool
    capacity_bytes: float = nan

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the device; None where that cannot be told."""
        over = self.use.peak_bytes > self.capacity_bytes
        if self.is_whole_job or np.isnan(self.capacity_bytes) or (self.use.is_lower_bound and not over):
            return None
        return not over


def memory_by_class(
    workload: Workload, timeline: Timeline, shown: Mapping[int, int], capacity_bytes: float = nan
) -> tuple[RankMemory, ...]:
    """The memory of each class of ``shown``, which names the rank whose spans are its own; those whose nodes
    do not say what they make, and who reads it, are left out.

    A program that a compiler has scheduled needs memory by its own order: its buffers were assigned before it
    ran. Any other one by the times of its spans.
    """
    scheduled = workload.metadata.get("is_scheduled") == "true"
    found: list[RankMemory] = []
    for rank_class, rank in shown.items():
        graph = workload.classes[rank_class]
        stated = _program_bytes(workload, rank_class)
        if stated is None and not _tells_who_reads(graph):
            continue
        when = _moments(graph, timeline, rank)
        use = memory_use(graph, in_order(graph) if scheduled else when, stated)
        if use is not None and scheduled and use.at_node >= 0:
            use = replace(use, at_ns=float(when.time_ns[when.start[use.at_node]]))
        if use is not None:
            whole = bool(workload.metadata.get(WHOLE_JOB))
            found.append(
                RankMemory(rank_class=rank_class, use=use, is_whole_job=whole, capacity_bytes=capacity_bytes)
            )
    return tuple(found)


def _tells_who_reads(graph: OpGraph) -> bool:
    """Whether a graph says what becomes of its values: recordings keep who waits for whom, and most of what
    is made there is read by nobody.
    """
    made = np.flatnonzero((graph.results.lengths > 0) & (graph.multiplicity != 0))
    read = np.isin(made, graph.data_deps.values)
    return len(made) > 0 and (end_of(graph) >= 0 or 2 * int(read.sum()) >= len(made))


def _moments(graph: OpGraph, timeline: Timeline, rank: int) -> Moments:
    mine = np.flatnonzero(timeline.rank == rank)
    node, region, end_ns = timeline.node[mine], timeline.region[mine], timeline.end_ns[mine]
    blocks: dict[int, float] = {}
    for loop, end in zip(region[node < 0].tolist(), end_ns[node < 0].tolist(), strict=True):
        if loop >= 0:
            blocks[loop] = max(end, blocks.get(loop, end))
    return in_time(graph, node, timeline.start_ns[mine], end_ns, blocks)


def _program_bytes(workload: Workload, rank_class: int) -> ProgramBytes | None:
    """Return what the metadata states of parameters and results, where it states that of every rank class."""
    classes = workload.metadata.get(PROGRAM_BYTES, "").split(";")
    parts = classes[rank_class].split() if len(classes) == len(workload.classes) else []
    if len(parts) not in (3, 4) or not all(part.isdigit() for part in parts):
        return None
    return ProgramBytes(*map(float, parts))
