"""Simulate a workload: times of an estimate or of the graph, gaps by a stated policy, then a simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import NamedTuple

import numpy as np

from hespas.estimators import MissingPolicy, apply_estimate, kept_durations, warn_of_tf32
from hespas.estimators.configuration import Configuration, default_configuration
from hespas.estimators.step_intervals import step_factors
from hespas.graph import Diagnostics, Estimate, NodeKind, OpGraph, Resource, Workload
from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import constant
from hespas.graph.errors import InvariantError, UnsupportedError
from hespas.graph.opgraph import is_recorded_wait
from hespas.graph.passes import is_delay, is_free, with_durations
from hespas.hardware import Device
from hespas.simulator.interference import pressures_of, uniform_pressures
from hespas.simulator.job import JobScheduler
from hespas.simulator.launches import Launches, launches_of, unrolled
from hespas.simulator.list_scheduler import ListScheduler
from hespas.simulator.progress import Pressure
from hespas.simulator.schedule import Simulation, Simulator
from hespas.simulator.throughput import throughput_of

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
    configuration: Configuration | None = None,
    missing: MissingPolicy = "warn",
    diagnostics: Diagnostics | None = None,
) -> Simulation:
    """One step of every rank that is here, from time 0; ``workload`` is not changed.

    A node takes the time that ``estimates`` (one per rank class) gives it, else that of the graph; one that
    costs nothing takes none. Beside estimates of a device, results count the nodes that keep a time of the
    graph, which is that of another device. With the ``device`` of the estimates, communication and kernels
    beside each other slow each other down (:mod:`hespas.simulator.interference`), as the ``configuration``
    states, which also states whether kernels wait for a host that launches them; without ``estimates`` the
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
    if device is not None:
        warn_of_tf32(workload.metadata, device, workload.name, found)
    ready = _ready_classes(workload, estimates, missing, found)
    classes = tuple(each.graph for each in ready)
    chosen = _settled(simulator, workload, estimates)
    job = replace(workload, classes=classes)
    paced, factors = None, (nan, nan)
    if device is not None and estimates is not None:
        stated = configuration or default_configuration(workload, device)
        factors = step_factors(stated.kind, device, stated.estimator)
        paced = _Paced(job, estimates, device, stated, found)
    if paced is not None and isinstance(chosen, JobScheduler | ListScheduler):
        workload, job, pressures = paced.settled(workload, chosen)
        done = chosen.run(job, found, pressures)
    else:
        done = chosen.run(job, found)
    results = tuple(
        replace(result, unknown=ready[result.rank_class].unknown, kept=ready[result.rank_class].kept)
        for result in done.classes
    )
    return replace(
        done,
        workload=workload,
        classes=results,
        interval_ns=_interval(done, classes, estimates, factors),
        throughput=throughput_of(workload.metadata, done.step_ns, device),
    )


@dataclass(frozen=True, slots=True)
class _Paced:
    """A job with times of a device, and what slows its kernels down: contention and a host."""

    job: Workload
    estimates: Sequence[Estimate]
    device: Device
    configuration: Configuration
    diagnostics: Diagnostics

    def settled(
        self, workload: Workload, simulator: JobScheduler | ListScheduler
    ) -> tuple[Workload, Workload, Sequence[Pressure] | None]:
        """Return the workload and the job with launches of the host, and the pressures of their nodes."""
        pressures = self._pressures() if simulator.interference else None
        issue_ns = self.configuration.host_issue_ns
        if not (issue_ns and simulator.launches):
            return workload, self.job, pressures
        workload, job, pressures = _without_loops(workload, self.job, pressures, simulator)
        launches = [
            launches_of(graph, issue_ns, reads_counts=self.configuration.reads_counts) if size else None
            for graph, size in zip(job.classes, job.class_sizes, strict=True)
        ]
        self.diagnostics.info(
            "simulate.launches",
            workload.name,
            f"the host launches kernels one by one, {issue_ns / 1e3:g} us each",
            count=sum(each is not None for each in launches),
        )
        if pressures is not None:
            pressures = [
                pressure if found is None else _with_launches(pressure, found)
                for pressure, found in zip(pressures, launches, strict=True)
            ]
        return _launched(workload, launches), _launched(job, launches), pressures

    def _pressures(self) -> Sequence[Pressure] | None:
        """Return by how much nodes of the job slow each other down."""
        share = self.configuration.beside
        if isnan(share):
            return pressures_of(self.job, self.estimates, self.device, self.diagnostics)
        return uniform_pressures(self.job, self.estimates, share)


def _without_loops(
    workload: Workload,
    job: Workload,
    pressures: Sequence[Pressure] | None,
    simulator: JobScheduler | ListScheduler,
) -> tuple[Workload, Workload, Sequence[Pressure] | None]:
    """Return the workload, the job with its times, and pressures with loops unrolled, where they can be."""
    classes, timed = list(workload.classes), list(job.classes)
    pressed = None if pressures is None else list(pressures)
    for number, (stated, graph, size) in enumerate(zip(classes, timed, job.class_sizes, strict=True)):
        made = unrolled(graph, overlap_trips=simulator.overlap_trips) if size else None
        if made is None:
            continue
        flat, rows = made
        kept = rows >= 0
        times = (each.duration_ns[rows] for each in (graph, stated))
        timed_ns, stated_ns = (np.where(kept, column, 0.0) for column in times)
        timed[number] = replace(flat, duration_ns=timed_ns)
        stream = np.where(kept, stated.stream[rows], -1).astype(stated.stream.dtype)
        classes[number] = replace(flat, duration_ns=stated_ns, stream=stream)
        if pressed is not None:
            pressed[number] = pressed[number].take(np.maximum(rows, 0), kept)
    return replace(workload, classes=tuple(classes)), replace(job, classes=tuple(timed)), pressed


def _launched(workload: Workload, launches: Sequence[Launches | None]) -> Workload:
    """Return the workload with the launches of each rank class."""
    pairs = zip(workload.classes, launches, strict=True)
    return replace(
        workload, classes=tuple(graph if found is None else found.added_to(graph) for graph, found in pairs)
    )


def _with_launches(pressure: Pressure, launches: Launches) -> Pressure:
    """Return the pressure of nodes among which launches stand, which press on nothing."""
    rows = launches.rows()
    return pressure.take(rows, rows < len(pressure))


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


def _interval(
    done: Simulation,
    timed: Sequence[OpGraph],
    estimates: Sequence[Estimate] | None,
    factors: tuple[float, float],
) -> tuple[float, float]:
    """Return the bounds of the step by the factors of its kind. Recorded times of the rank class that ends
    last have no error, so the factors hold for the share of its work that is estimated.
    """
    if estimates is None or not done.classes or isnan(factors[0]):
        return nan, nan
    last = max(done.classes, key=lambda found: found.finish_ns).rank_class
    graph, estimate = timed[last], estimates[last]
    with np.errstate(over="ignore", invalid="ignore"):  # sums may be more than a number holds
        total = np.nan_to_num(graph.duration_ns * graph.multiplicity, posinf=np.inf)
        estimated = float(total[(estimate.duration_ns > 0) & (estimate.estimator >= 0)].sum())
        whole = float(total.sum())
    if not (estimated > 0 and np.isfinite(whole)):
        return nan, nan
    low, high = (1.0 + (factor - 1.0) * estimated / whole for factor in factors)
    return done.step_ns * low, done.step_ns * high


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


class _Ready(NamedTuple):
    """A rank class with times and trip counts: how many of them are not known, and how many times are those
    of the graph beside estimates.
    """

    graph: OpGraph
    unknown: int = 0
    kept: int = 0


def _ready_classes(
    workload: Workload, estimates: Sequence[Estimate] | None, missing: MissingPolicy, found: Diagnostics
) -> list[_Ready]:
    """Return the rank classes with times; those that no rank runs stay as they are."""
    classes: list[_Ready] = []
    for index, (graph, size) in enumerate(zip(workload.classes, workload.class_sizes, strict=True)):
        if not size:
            classes.append(_Ready(graph))
            continue
        estimate = estimates[index] if estimates is not None else _blank_estimate(graph)
        kept = int(kept_durations(graph, estimate).sum()) if estimate.hardware else 0
        settled, unknown_trips = _settle_trips(graph, missing, found)
        timed, unknown_times = _timed(settled, estimate, missing, found)
        queued = _on_one_queue(timed, found) if estimate.hardware else timed
        classes.append(_Ready(queued, unknown_trips + unknown_times, kept))
    return classes


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
                hint="`on_unknown=warn` counts each as one trip, `on_unknown=zero` leaves them out",
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
