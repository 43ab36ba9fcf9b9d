"""A run as a simulation: timeline, rank classes, critical paths, and ASTRA-sim's own figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.graph import OpClass, Timeline, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.opgraph import timed_class_name
from hespas.simulator.astra.external import ExternalRun
from hespas.simulator.astra.options import AstraOptions, Backend
from hespas.simulator.astra.runs import NEVER, RankRun, Run
from hespas.simulator.astra.statistics import RankStatistics, figures_of
from hespas.simulator.astra.traces import Statistic, Trace
from hespas.simulator.results import ClassResult, CriticalPath, Simulation
from hespas.simulator.streams import COMMUNICATION, COMPUTE, COPY, HOST, STREAMS

__all__ = ["AstraSimulation", "simulation_of"]

_NAME = "astra-sim-analytical"
_RESOURCES = {
    Statistic.GPU: COMPUTE,
    Statistic.COMMUNICATION: COMMUNICATION,
    Statistic.CPU: HOST,
    Statistic.REMOTE_MEMORY: COPY,
    Statistic.NONE: HOST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AstraSimulation(Simulation):
    """A simulation with ASTRA-sim's figures of each rank; ``backend`` is the network. ``external`` is what a
    user's own ASTRA-sim says of the same files.
    """

    backend: Backend
    queues_per_dim: int
    statistics: RankStatistics
    external: ExternalRun | None = None


def simulation_of(workload: Workload, options: AstraOptions, run: Run) -> AstraSimulation:
    """What a run adds up to. O(nodes of the ranks that were run + ranks)."""
    system = options.system
    with_roofline = system.roofline and not system.replays_only
    statistics = RankStatistics.of(
        [figures_of(rank, with_roofline=with_roofline) for rank in run.ranks], run.shown_by
    )
    paths = [_critical(rank) for rank in run.ranks]
    return AstraSimulation(
        simulator=_NAME,
        workload=workload,
        timeline=_timeline(run, paths, statistics),
        classes=_class_results(workload, run, paths, statistics),
        backend=options.backend,
        queues_per_dim=options.queues_per_dim,
        statistics=statistics,
    )


def _critical(rank: RankRun) -> list[int]:
    """The nodes that led to the last end on a rank, each issued when the one before it ended."""
    if not rank.end_ns:
        return []
    place = max(range(len(rank.end_ns)), key=rank.end_ns.__getitem__)
    path: list[int] = []
    while place != NEVER:
        path.append(place)
        place = rank.cause[place]
    return path[::-1]


def _resources(trace: Trace) -> IntArray:
    table = np.array([_RESOURCES[each] for each in Statistic], np.int64)
    column: IntArray = table[np.array(trace.statistic, np.int64)]
    return column


class _Spans(NamedTuple):
    """Columns of :class:`hespas.graph.Timeline`."""

    node: SmallIntArray
    rank: SmallIntArray
    resource: NDArray[np.int8]
    start_ns: FloatArray
    end_ns: FloatArray
    critical: BoolArray
    cause: SmallIntArray
    by_resource: BoolArray


def _timeline(run: Run, paths: Sequence[list[int]], statistics: RankStatistics) -> Timeline:
    """One span per node that took time, in order of starts, rank by rank."""
    parts: list[_Spans] = []
    before = 0
    for rank, path in zip(run.ranks, paths, strict=True):
        parts.append(_spans(rank, path, before))
        before += len(parts[-1].node)
    columns = _Spans(*(np.concatenate(each) for each in zip(*parts, strict=True)))
    shown = np.array([rank.trace.rank for rank in run.ranks], np.int32)[run.shown_by]
    busy = np.zeros((len(shown), len(STREAMS)), np.float64)
    busy[:, COMPUTE], busy[:, COMMUNICATION] = statistics.compute_ns, statistics.comm_ns
    busy[:, COPY], busy[:, HOST] = statistics.remote_memory_ns, statistics.cpu_ns
    return Timeline(
        resources=STREAMS,
        **columns._asdict(),
        finish_ns=statistics.finish_ns.astype(np.float64),
        exposed_comm_ns=statistics.exposed_comm_ns.astype(np.float64),
        shown_by=shown,
        busy_ns=busy,
    )


def _spans(rank: RankRun, path: list[int], before: int) -> _Spans:
    """The spans of one rank; ``before`` stand in front of them."""
    trace = rank.trace.trace
    start, end = np.array(rank.start_ns, np.float64), np.array(rank.end_ns, np.float64)
    places = np.flatnonzero(end > start)
    places = places[np.argsort(start[places], kind="stable")]
    row = np.full(len(trace) + 1, NEVER, np.int32)  # the last: no cause
    row[places] = np.arange(before, before + len(places), dtype=np.int32)
    marked = np.zeros(len(trace), np.bool_)
    marked[path] = True
    return _Spans(
        node=np.array(trace.node, np.int32)[places],
        rank=np.full(len(places), rank.trace.rank, np.int32),
        resource=_resources(trace)[places].astype(np.int8),
        start_ns=start[places],
        end_ns=end[places],
        critical=marked[places],
        cause=row[np.array(rank.cause, np.int64)[places]],
        by_resource=_by_resource(rank)[places],
    )


def _by_resource(rank: RankRun) -> BoolArray:
    """Nodes that were issued when something else ended than what they depend on."""
    trace = rank.trace.trace
    nodes = len(trace)
    cause = np.array(rank.cause, np.int64)
    producers = np.repeat(np.arange(nodes, dtype=np.int64), np.diff(trace.bounds))
    edges = producers * nodes + np.array(trace.targets, np.int64)
    waited: BoolArray = (cause >= 0) & ~np.isin(cause * nodes + np.arange(nodes), edges)
    return waited


def _class_results(
    workload: Workload, run: Run, paths: Sequence[list[int]], statistics: RankStatistics
) -> tuple[ClassResult, ...]:
    """Each rank class by the rank of it that finishes last."""
    columns = (
        statistics.compute_ns, statistics.comm_ns, statistics.remote_memory_ns, statistics.cpu_ns,
    )  # fmt: skip
    found: list[ClassResult] = []
    for index, count in enumerate(workload.class_sizes):
        if not count:
            continue
        members = workload.ranks_of(index)
        last = int(members[np.argmax(statistics.finish_ns[members])])
        row = int(run.shown_by[last])
        result = ClassResult(
            rank_class=index,
            name=workload.classes[index].name,
            num_ranks=count,
            rank=last,
            finish_ns=float(statistics.finish_ns[last]),
            exposed_comm_ns=float(statistics.exposed_comm_ns[last]),
            busy_ns={name: float(column[last]) for name, column in zip(STREAMS, columns, strict=True)},
            critical_path=_critical_path(run.ranks[row], paths[row]),
        )
        found.append(result)
    return tuple(found)


def _critical_path(rank: RankRun, path: list[int]) -> CriticalPath:
    trace = rank.trace.trace
    resources: list[int] = _resources(trace).tolist()
    classes: list[int] = trace.graph.op_class.tolist()
    by_class: dict[str, float] = {}
    by_resource: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
    for place in path:
        spent_ns = float(rank.end_ns[place] - rank.start_ns[place])
        name = timed_class_name(int(OpClass(classes[trace.node[place]])))
        by_class[name] = by_class.get(name, 0.0) + spent_ns
        by_resource[STREAMS[resources[place]]] += spent_ns
    longest = sorted(by_class, key=lambda name: -by_class[name])
    return CriticalPath(
        spans=len(path),
        after_resource=int(_by_resource(rank)[path].sum()),
        class_ns={name: by_class[name] for name in longest if by_class[name]},
        resource_ns=by_resource,
    )
