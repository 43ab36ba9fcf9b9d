"""Simulate a workload: times of an estimate or of the graph, gaps by a stated policy, then a simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan

import numpy as np

from hespas.estimators import MissingPolicy, apply_estimate, kept_durations
from hespas.graph import Diagnostics, Estimate, NodeKind, OpClass, OpGraph, Resource, Workload
from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import constant
from hespas.graph.errors import InvariantError, UnsupportedError
from hespas.graph.opgraph import is_recorded_wait
from hespas.graph.passes import is_delay, is_free, with_durations
from hespas.hardware import Device
from hespas.simulator.interference import pressures_of
from hespas.simulator.job import JobScheduler
from hespas.simulator.list_scheduler import ListScheduler
from hespas.simulator.schedule import Simulation, Simulator

__all__ = ["simulate"]

_TALKING = (int(NodeKind.COLLECTIVE), int(NodeKind.SEND), int(NodeKind.RECV), int(NodeKind.PERMUTE))
_MOST_TRIPS = 2.0**53
"""Up to here floats count."""


def simulate(
    workload: Workload,
    estimates: Sequence[Estimate] | None = None,
    *,
    simulator: Simulator | None = None,
    device: Device | None = None,
    missing: MissingPolicy = "warn",
    diagnostics: Diagnostics | None = None,
) -> Simulation:
    """One step of every rank that is here, from time 0; ``workload`` is not changed.

    A node takes the time that ``estimates`` (one per rank class) gives it, else that of the graph; one that
    costs nothing takes none. Beside estimates of a device, results count the nodes that keep a time of the
    graph, which is that of another device. With the ``device`` of the estimates, communication and kernels
    beside each other slow each other down (:mod:`hespas.simulator.interference`); without ``estimates`` the
    times of the graphs are taken as estimates for that device, except those of recorded waits. ``missing``
    says what happens where a time or trip count is not known: ``error`` raises ``UnsupportedError``, ``warn``
    counts the time as none and the loop as one trip and marks the result as a lower bound, ``zero`` counts
    both as none. ``simulator`` is a :class:`JobScheduler` unless given; of times of the graphs it takes the
    shortest of each collective.
    Raises ``UnsupportedError`` for times and trip counts that are negative or past counting, ``FormatError``
    where dependencies form a cycle, ``CheckFailedError`` where ranks wait for each other for ever.
    """
    if estimates is not None and len(estimates) != len(workload.classes):
        raise InvariantError(f"{len(estimates)} estimates are not those of {len(workload.classes)} classes")
    found = diagnostics if diagnostics is not None else Diagnostics()
    if device is not None and estimates is None:
        estimates = tuple(_stated_estimate(graph, device) for graph in workload.classes)
    runs = workload.class_sizes
    classes: list[OpGraph] = []
    unknown: dict[int, int] = {}
    kept: dict[int, int] = {}
    for index, graph in enumerate(workload.classes):
        if not runs[index]:
            classes.append(graph)
            continue
        estimate = estimates[index] if estimates is not None else _blank_estimate(graph)
        kept[index] = int(kept_durations(graph, estimate).sum()) if estimate.hardware else 0
        settled, unknown_trips = _settle_trips(graph, missing, found)
        timed, unknown_times = _timed(settled, estimate, missing, found)
        unknown[index] = unknown_trips + unknown_times
        classes.append(_on_one_queue(timed, found) if estimate.hardware else timed)
    chosen = _settled(simulator, workload, estimates)
    job = replace(workload, classes=tuple(classes))
    if device is not None and estimates is not None and isinstance(chosen, JobScheduler | ListScheduler):
        pressures = pressures_of(job, estimates, device, found) if chosen.interference else None
        done = chosen.run(job, found, pressures)
    else:
        done = chosen.run(job, found)
    results = tuple(
        replace(result, unknown=unknown[result.rank_class], kept=kept[result.rank_class])
        for result in done.classes
    )
    low_ns, high_ns = _interval(done, estimates)
    return replace(done, workload=workload, classes=results, low_ns=low_ns, high_ns=high_ns)


def _settled(
    simulator: Simulator | None, workload: Workload, estimates: Sequence[Estimate] | None
) -> Simulator:
    """The simulator with what is left open settled: where collectives have times of the graphs, which may be
    recorded with waits for others in them, they take as long as for the last member; where all times are
    those of the graphs, with recorded waits among them, ranks begin when they did.
    """
    if simulator is not None and not isinstance(simulator, JobScheduler):
        return simulator
    job = simulator or JobScheduler()
    waits = estimates is None and any(bool(is_recorded_wait(graph).any()) for graph in workload.classes)
    recorded = estimates is None or any(
        bool(kept_durations(graph, estimate)[graph.collectives.node].any())
        for graph, estimate in zip(workload.classes, estimates, strict=True)
    )
    return replace(
        job,
        differing=job.differing or ("shortest" if recorded else "longest"),
        starts=job.starts or ("recorded" if waits else "together"),
    )


def _on_one_queue(graph: OpGraph, found: Diagnostics) -> OpGraph:
    """The graph without the streams of its device: an estimate is of an operation that has the device to
    itself, so two of a kind do not run side by side. Threads of the host stay, and queues of communicators
    where nothing else names a stream: those are of a model of a step, and no recording.
    """
    talks = np.isin(graph.kind, _TALKING)
    if (graph.stream[~talks] < 0).all():
        return graph
    named = np.unique(graph.stream[(graph.stream >= 0) & (graph.resource == int(Resource.DEVICE))])
    if len(named) < 2:
        return graph
    found.info(
        "simulate.streams-merged",
        graph.name,
        "streams of the device are merged into one per kind of work, since their work is estimated alone",
        count=len(named) - 1,
    )
    keeps = is_delay(graph) | (graph.resource == int(Resource.HOST))
    return replace(graph, stream=np.where(keeps, graph.stream, named[0]).astype(np.int32))


def _interval(done: Simulation, estimates: Sequence[Estimate] | None) -> tuple[float, float]:
    """The bounds of the step: those of all work of the rank class that ends last, in proportion."""
    if estimates is None or not done.classes:
        return nan, nan
    last = max(done.classes, key=lambda found: found.finish_ns).rank_class
    below, above = _relative_bounds(done.workload.classes[last], estimates[last])
    return done.step_ns * below, done.step_ns * above


def _relative_bounds(timed: OpGraph, estimate: Estimate) -> tuple[float, float]:
    """The 90 % interval of the sum of a graph's times, over that sum.

    What one model says of one class of operations errs alike, so these half-widths add up; those of
    different models or classes add up as squares. Times without an interval err as the others do, but
    recorded ones not at all; NaN where most of the time has none.
    """
    positive = (estimate.duration_ns > 0) & (estimate.estimator >= 0)  # nobody's are recorded
    bounded = positive & ~np.isnan(estimate.low_ns) & ~np.isnan(estimate.high_ns)
    source = estimate.estimator[bounded].astype(np.int64) * len(OpClass) + timed.op_class[bounded]
    with np.errstate(over="ignore", invalid="ignore"):  # sums may be more than a number holds
        total = np.nan_to_num(timed.duration_ns * timed.multiplicity, posinf=np.inf)
        whole, known, silent = (
            float(total[rows].sum()) for rows in (slice(None), bounded, positive & ~bounded)
        )
        if not (known > silent and np.isfinite(whole)):
            return nan, nan
        relative = total[bounded] / estimate.duration_ns[bounded]
        widths = (
            (bound[bounded] - estimate.duration_ns[bounded]) * relative
            for bound in (estimate.low_ns, estimate.high_ns)
        )
        sums = [float(np.sqrt((np.bincount(source, weights=width) ** 2).sum())) for width in widths]
    below, above = (each * (known + silent) / known / whole for each in sums)
    return max(1.0 - below, 0.0), 1.0 + above


def _blank_estimate(graph: OpGraph) -> Estimate:
    """An estimate that knows only what costs nothing by construction, so that the graph's own times count."""
    nodes = len(graph)
    free = is_free(graph) | (graph.kind == int(NodeKind.METADATA))
    nobody = np.broadcast_to(np.int8(-1), (nodes,))
    return Estimate(
        hardware="",
        estimators=(),
        bounds=(),
        duration_ns=np.where(free, 0.0, np.nan),
        low_ns=constant(np.nan, nodes),
        high_ns=constant(np.nan, nodes),
        estimator=nobody,
        bound=nobody,
    )


def _stated_estimate(graph: OpGraph, device: Device) -> Estimate:
    """Return the durations of a graph, except those of recorded waits, as estimates for a device."""
    blank = _blank_estimate(graph)
    stated = np.where(is_recorded_wait(graph) | np.isnan(graph.duration_ns), np.nan, graph.duration_ns)
    return replace(
        blank,
        hardware=device.name,
        estimators=("as stated",),
        duration_ns=np.where(np.isnan(stated), blank.duration_ns, stated),
        estimator=np.where(stated > 0, 0, -1).astype(np.int8),
    )


def _timed(
    graph: OpGraph, estimate: Estimate, missing: MissingPolicy, found: Diagnostics
) -> tuple[OpGraph, int]:
    """The graph with the time of every node that runs, and how many are not known and count as 0."""
    timed = apply_estimate(graph, estimate, missing, found)
    durations = timed.duration_ns
    runs = graph.multiplicity != 0
    gaps = np.isnan(durations)
    broken = runs & ~gaps & ~((durations >= 0) & (durations < np.inf))
    if broken.any():
        node = int(np.flatnonzero(broken)[0])
        raise UnsupportedError(
            f"{graph.node_name(node) or graph.op_name(node)} takes {float(durations[node])} ns: "
            "a schedule needs times that are finite and not negative",
            position=f"{graph.name or 'graph'}: node {int(graph.id[node])}",
        )
    return with_durations(timed, np.where(gaps | ~runs, 0.0, durations)), int((gaps & runs).sum())


def _settle_trips(graph: OpGraph, missing: MissingPolicy, found: Diagnostics) -> tuple[OpGraph, int]:
    """The graph with whole trip counts, and how many were not known but counted as 1."""
    table = graph.regions
    trips = np.rint(table.trips)
    unknown = np.isnan(trips)
    broken = (trips < 0) | (trips > _MOST_TRIPS)
    if broken.any():
        label = graph.strings[int(table.label[np.flatnonzero(broken)[0]])]
        raise UnsupportedError(f"{graph.name or 'the graph'}: loop {label} has no countable number of trips")
    found.warning(
        "simulate.fractional-trips",
        graph.name,
        "loops with a fractional number of trips run the nearest whole number",
        count=int((~unknown & (trips != table.trips)).sum()),
    )
    if unknown.any():
        labels = ", ".join(sorted({graph.strings[row] for row in table.label[unknown].tolist()})[:5])
        if missing == "error":
            raise UnsupportedError(
                f"{graph.name or 'the graph'}: {int(unknown.sum())} loops with a trip count known at run "
                f"time only: {labels}",
                hint="`missing=warn` counts each as one trip, `missing=zero` leaves them out",
            )
        assumed = 1.0 if missing == "warn" else 0.0
        found.warning(
            "simulate.assumed-trips",
            graph.name,
            f"loops with unknown trip count taken as {assumed:.0f}: {labels}",
            count=int(unknown.sum()),
        )
        trips = np.where(unknown, assumed, trips)
    elif np.array_equal(trips, table.trips):
        return graph, 0
    settled = replace(table, trips=trips)
    settled_graph = replace(graph, regions=settled, multiplicity=region_multiplicity(settled, graph.region))
    return settled_graph, int(unknown.sum()) if missing == "warn" else 0
