"""Mode ``astra``: the step of a job in ASTRA-sim's analytical simulator, exact to the nanosecond, and its
results.

Rules and units follow ASTRA-sim 518bd51 (https://github.com/astra-sim/astra-sim) with its analytical
network 599a047.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Diagnostics, OpClass, Timeline, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.opgraph import timed_class_name
from hespas.simulator.astra.configuration import AstraOptions, Backend
from hespas.simulator.astra.deadlock import check_finished
from hespas.simulator.astra.events import NEVER
from hespas.simulator.astra.external import ExternalRun
from hespas.simulator.astra.lockstep import run_alike
from hespas.simulator.astra.network import checked
from hespas.simulator.astra.plans import Planner
from hespas.simulator.astra.ranks import AstraRun, RankRun, run_all
from hespas.simulator.astra.statistics import RankStatistics, figures_of
from hespas.simulator.astra.traces import AstraTraces, ClassTrace, GroupNames, StatedCosts, Statistic
from hespas.simulator.results import ClassResult, CriticalPath, Simulation
from hespas.simulator.streams import COMMUNICATION, COMPUTE, COPY, HOST, STREAMS

__all__ = ["AstraSimulation", "simulate_astra", "simulation_of"]


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
    """Simulation in ASTRA-sim mode, with the figures that ASTRA-sim reports for each rank.

    ``backend`` is the network backend. ``external`` has the figures that a separate ASTRA-sim executable
    printed for the same files.
    """

    backend: Backend
    queues_per_dim: int
    statistics: RankStatistics
    external: ExternalRun | None = None


def simulation_of(workload: Workload, options: AstraOptions, run: AstraRun) -> AstraSimulation:
    """Return the results of a finished ASTRA-sim run in the form of all simulations. O(nodes of the simulated
    ranks + ranks).
    """
    system = options.system
    with_roofline = system.roofline and not system.replays_only
    statistics = RankStatistics.of(
        [figures_of(rank, with_roofline=with_roofline) for rank in run.ranks], run.shown_by
    )
    paths = [_critical(rank) for rank in run.ranks]
    parts: list[_AstraSpans] = []
    before = 0
    for rank, path in zip(run.ranks, paths, strict=True):
        trace = rank.trace.trace
        start, end = np.array(rank.start_ns, np.float64), np.array(rank.end_ns, np.float64)
        places = np.flatnonzero(end > start)
        places = places[np.argsort(start[places], kind="stable")]
        row = np.full(len(trace) + 1, NEVER, np.int32)  # the last entry: no cause
        row[places] = np.arange(before, before + len(places), dtype=np.int32)
        marked = np.zeros(len(trace), np.bool_)
        marked[path] = True
        parts.append(
            _AstraSpans(
                node=np.array(trace.node, np.int32)[places],
                rank=np.full(len(places), rank.trace.rank, np.int32),
                resource=_resources(trace)[places].astype(np.int8),
                start_ns=start[places],
                end_ns=end[places],
                critical=marked[places],
                cause=row[np.array(rank.cause, np.int64)[places]],
                by_resource=_by_resource(rank)[places],
            )
        )
        before += len(parts[-1].node)
    columns = _AstraSpans(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    shown = np.array([rank.trace.rank for rank in run.ranks], np.int32)[run.shown_by]
    busy = np.zeros((len(shown), len(STREAMS)), np.float64)
    busy[:, COMPUTE], busy[:, COMMUNICATION] = statistics.compute_ns, statistics.comm_ns
    busy[:, COPY], busy[:, HOST] = statistics.remote_memory_ns, statistics.cpu_ns
    return AstraSimulation(
        simulator=_NAME,
        workload=workload,
        timeline=Timeline(
            resources=STREAMS,
            **columns._asdict(),
            finish_ns=statistics.finish_ns.astype(np.float64),
            exposed_comm_ns=statistics.exposed_comm_ns.astype(np.float64),
            shown_by=shown,
            busy_ns=busy,
        ),
        classes=_class_results(workload, run, paths, statistics),
        backend=options.backend,
        queues_per_dim=options.queues_per_dim,
        statistics=statistics,
    )


def _critical(rank: RankRun) -> list[int]:
    """Return the critical path of a rank: the nodes up to its last end, each issued when the previous one
    ended.
    """
    if not rank.end_ns:
        return []
    position = max(range(len(rank.end_ns)), key=rank.end_ns.__getitem__)
    path: list[int] = []
    while position != NEVER:
        path.append(position)
        position = rank.cause[position]
    return path[::-1]


def _resources(trace: ClassTrace) -> IntArray:
    table = np.array([_RESOURCES[statistic] for statistic in Statistic], np.int64)
    column: IntArray = table[np.array(trace.statistic, np.int64)]
    return column


class _AstraSpans(NamedTuple):
    """Columns of :class:`hespas.graph.Timeline` for a run in ASTRA-sim mode, while they are filled."""

    node: SmallIntArray
    rank: SmallIntArray
    resource: NDArray[np.int8]
    start_ns: FloatArray
    end_ns: FloatArray
    critical: BoolArray
    cause: SmallIntArray
    by_resource: BoolArray


def _by_resource(rank: RankRun) -> BoolArray:
    """Return a mask of the nodes that waited for a busy slot: they were issued when a node ended on which
    they do not depend.
    """
    trace = rank.trace.trace
    nodes = len(trace)
    cause = np.array(rank.cause, np.int64)
    producers = np.repeat(np.arange(nodes, dtype=np.int64), np.diff(trace.bounds))
    edges = producers * nodes + np.array(trace.targets, np.int64)
    waited: BoolArray = (cause >= 0) & ~np.isin(cause * nodes + np.arange(nodes), edges)
    return waited


def _class_results(
    workload: Workload, run: AstraRun, paths: Sequence[list[int]], statistics: RankStatistics
) -> tuple[ClassResult, ...]:
    """Return the summary of each rank class, for its rank that finishes last."""
    columns = (
        statistics.compute_ns, statistics.comm_ns, statistics.remote_memory_ns, statistics.cpu_ns,
    )  # fmt: skip
    results: list[ClassResult] = []
    for index, count in enumerate(workload.class_sizes):
        if not count:
            continue
        members = workload.ranks_of(index)
        last = int(members[np.argmax(statistics.finish_ns[members])])
        row = int(run.shown_by[last])
        rank = run.ranks[row]
        path = paths[row]
        trace = rank.trace.trace
        resources: list[int] = _resources(trace).tolist()
        classes: list[int] = trace.graph.op_class.tolist()
        by_class: dict[str, float] = {}
        by_resource: dict[str, float] = dict.fromkeys(STREAMS, 0.0)
        for position in path:
            spent_ns = float(rank.end_ns[position] - rank.start_ns[position])
            name = timed_class_name(int(OpClass(classes[trace.node[position]])))
            by_class[name] = by_class.get(name, 0.0) + spent_ns
            by_resource[STREAMS[resources[position]]] += spent_ns
        longest = sorted(by_class, key=lambda name: -by_class[name])
        result = ClassResult(
            rank_class=index,
            name=workload.classes[index].name,
            num_ranks=count,
            rank=last,
            finish_ns=float(statistics.finish_ns[last]),
            exposed_comm_ns=float(statistics.exposed_comm_ns[last]),
            busy_ns={name: float(column[last]) for name, column in zip(STREAMS, columns, strict=True)},
            critical_path=CriticalPath(
                spans=len(path),
                after_resource=int(_by_resource(rank)[path].sum()),
                class_ns={name: by_class[name] for name in longest if by_class[name]},
                resource_ns=by_resource,
            ),
        )
        results.append(result)
    return tuple(results)


def simulate_astra(
    workload: Workload,
    options: AstraOptions,
    costs: Sequence[StatedCosts],
    group_number: GroupNames,
    diagnostics: Diagnostics,
) -> AstraSimulation:
    """Simulate a workload as ASTRA-sim runs its Chakra traces.

    ``costs`` are the costs in the traces of each rank class; ``group_number`` returns the number of a rank's
    process group. Raises ``UsageError`` if network and workload have different numbers of ranks,
    ``UnsupportedError`` and ``FormatError`` for inputs that ASTRA-sim does not run, ``CheckFailedError`` if
    ranks never finish.
    """
    options = replace(options, network=checked(options.network, options.backend))
    there, wanted = workload.num_ranks, options.network.num_ranks
    if not workload.is_complete:
        raise UsageError(
            f"only {workload.num_available:,} of {there:,} ranks have a trace",
            hint="give the folder with the traces of all ranks",
        )
    if there != wanted:
        raise UsageError(
            f"the workload has {there:,} ranks, but the network has {wanted:,} NPUs", code="ET022",
            path=options.network.path, position="npus_count",
            hint=f"make npus_count of all dimensions multiply to {there:,}",
        )  # fmt: skip
    Planner(options.system, options.network).check_files()
    if options.system.models_shared_bus:
        raise UnsupportedError(
            "a shared bus is not modelled", path=options.system.path, position="model-shared-bus",
            hint="set model-shared-bus to 0 to simulate without it",
        )  # fmt: skip
    for config in (options.system, options.network, options.memory):
        if config is not None and config.unread:
            diagnostics.info(
                "simulate.unread-keys", config.path, f"keys without effect: {', '.join(config.unread)}",
                path=config.path, count=len(config.unread),
            )  # fmt: skip
    traces = AstraTraces.of(workload, options.system, costs, group_number)
    run = run_alike(traces, options)
    if run is None:
        ranks, left = run_all(traces.of_ranks(range(workload.num_ranks)), options)
        check_finished(ranks, diagnostics)
        for key in left:  # ASTRA-sim ends a send on arrival and does not report these
            diagnostics.warning(
                "simulate.unreceived", f"rank {key.target}",
                f"a message of {key.size:,} bytes with tag {key.tag} from rank {key.source} "
                "is never received",
            )  # fmt: skip
        run = AstraRun([rank.result() for rank in ranks], np.arange(len(ranks)))
    return simulation_of(workload, options, run)
