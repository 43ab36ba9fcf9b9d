"""Statistics that ASTRA-sim reports for each rank, in whole ns: columns of shape ``(ranks,)``.

The time of a class of nodes is the union of their intervals from issue to end. A receive starts when it is
issued, so waiting for a message counts as communication. ``exposed_comm_ns`` is the finish time minus all
device computation, so idle waiting counts as communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.simulator.astra.ranks import RankRun
from hespas.simulator.astra.traces import Action, ClassTrace, NodeRoofline, Statistic

__all__ = ["UNKNOWN", "RankFigures", "RankStatistics", "RooflineAverages", "figures_of", "union_ns"]

UNKNOWN = -1
"""Value of an undefined figure."""


class RooflineAverages(NamedTuple):
    """Averages of the roofline figures of one rank, weighted by time. As in ASTRA-sim, the sum is divided by
    the total time plus 1 ns. Utilizations are shares of the peaks.
    """

    compute_bound: float
    compute_utilization: float
    memory_utilization: float
    intensity: float


class RankFigures(NamedTuple):
    """Figures of one rank [ns]. ``overlap_ns`` is ``UNKNOWN`` if the rank runs nodes other than device
    computation and communication, because ASTRA-sim then ends with an error.
    """

    finish_ns: int
    exposed_comm_ns: int
    wall_ns: int
    compute_ns: int
    comm_ns: int
    cpu_ns: int
    remote_memory_ns: int
    overlap_ns: int
    roofline: RooflineAverages | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankStatistics:
    """Figures of all ranks as ASTRA-sim prints them, as columns by rank."""

    finish_ns: IntArray
    exposed_comm_ns: IntArray
    wall_ns: IntArray
    compute_ns: IntArray
    comm_ns: IntArray
    cpu_ns: IntArray
    remote_memory_ns: IntArray
    overlap_ns: IntArray
    roofline: FloatArray | None
    """Averages of roofline mode, shape ``(ranks, 4)``, in the order of :class:`RooflineAverages`."""

    @classmethod
    def of(cls, figures: Sequence[RankFigures], shown_by: IntArray) -> RankStatistics:
        """Return the figures of all ranks. ``figures`` are the figures of the simulated ranks. ``shown_by``
        has one entry per rank: the index in ``figures`` of the rank that represents it.
        """
        columns = np.array([row[:8] for row in figures], np.int64).T[:, shown_by]
        averages = [row.roofline for row in figures if row.roofline is not None]
        table = np.array(averages, np.float64)[shown_by] if averages else None
        return cls(
            finish_ns=columns[0],
            exposed_comm_ns=columns[1],
            wall_ns=columns[2],
            compute_ns=columns[3],
            comm_ns=columns[4],
            cpu_ns=columns[5],
            remote_memory_ns=columns[6],
            overlap_ns=columns[7],
            roofline=table,
        )


def union_ns(start_ns: IntArray, end_ns: IntArray) -> int:
    """Return the time that at least one interval covers. O(n log n)."""
    if not len(start_ns):
        return 0
    order = np.argsort(start_ns, kind="stable")
    start, latest = start_ns[order], np.maximum.accumulate(end_ns[order])
    gaps = np.maximum(start[1:] - latest[:-1], 0)
    return int(latest[-1] - start[0] - gaps.sum())


def figures_of(rank: RankRun, *, with_roofline: bool) -> RankFigures:
    """Return the figures of one rank, with roofline averages if ASTRA-sim ran in roofline mode."""
    trace, finish_ns = rank.trace.trace, rank.finish_ns
    start_ns, end_ns = np.array(rank.start_ns, np.int64), np.array(rank.end_ns, np.int64)
    statistic = np.array(trace.statistic, np.int64)
    by_class = [
        union_ns(start_ns[statistic == category], end_ns[statistic == category]) for category in Statistic
    ]
    waits = np.array(trace.action, np.int64) == Action.WAIT
    counted: BoolArray = waits & np.array(trace.counted, np.bool_)
    computed = int(np.array(trace.delay_ns, np.int64)[counted].sum())
    wall_ns = int(end_ns.max(initial=0))
    present = set(np.unique(statistic).tolist()) - {int(Statistic.NONE)}
    gpu_ns, comm_ns = by_class[Statistic.GPU], by_class[Statistic.COMMUNICATION]
    both = {int(Statistic.GPU), int(Statistic.COMMUNICATION)}
    overlap_ns = gpu_ns + comm_ns - wall_ns if present == both else (0 if present < both else UNKNOWN)
    return RankFigures(
        finish_ns=finish_ns,
        exposed_comm_ns=finish_ns - computed,
        wall_ns=wall_ns,
        compute_ns=gpu_ns,
        comm_ns=comm_ns,
        cpu_ns=by_class[Statistic.CPU],
        remote_memory_ns=by_class[Statistic.REMOTE_MEMORY],
        overlap_ns=overlap_ns,
        roofline=_averages(trace, end_ns - start_ns, statistic) if with_roofline else None,
    )


def _averages(trace: ClassTrace, duration_ns: IntArray, statistic: IntArray) -> RooflineAverages:
    timed = (statistic == Statistic.CPU) | (statistic == Statistic.GPU)
    total = float(duration_ns[timed].sum()) + 1.0
    rows = list(trace.roofline.items())
    weight: NDArray[np.float64] = duration_ns[[position for position, _ in rows]].astype(np.float64)
    facts: list[NodeRoofline] = [fact for _, fact in rows]

    def mean(values: Sequence[float]) -> float:
        return float((np.array(values, np.float64) * weight).sum() / total)

    return RooflineAverages(
        mean([float(fact.is_compute_bound) for fact in facts]),
        mean([fact.compute_utilization for fact in facts]),
        mean([fact.memory_utilization for fact in facts]),
        mean([fact.intensity for fact in facts]),
    )
