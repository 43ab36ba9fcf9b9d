"""Simulate a workload: combine estimated and recorded times, add contention and host launches, run a
simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import NamedTuple

import numpy as np

from hespas.estimators import MissingPolicy, apply_estimate, kept_durations, warn_of_tf32
from hespas.estimators.configuration import Configuration, default_configuration
from hespas.estimators.step_intervals import (
    adds_intervals,
    applied_factor,
    basis_shares,
    corrected_bounds,
    interval_factors,
)
from hespas.graph import Diagnostics, Estimate, NodeKind, OpGraph, Resource, Workload
from hespas.graph.builder import region_executions
from hespas.graph.columns import constant
from hespas.graph.errors import InvariantError, UnsupportedError
from hespas.graph.opgraph import is_recorded_wait
from hespas.graph.passes import is_delay, is_free, with_durations
from hespas.hardware import Device, StepFactor
from hespas.simulator.interference import Pressure, pressures_of, uniform_pressures
from hespas.simulator.job import JobScheduler
from hespas.simulator.launches import Launches, launches_of, unrolled
from hespas.simulator.list_scheduler import ListScheduler
from hespas.simulator.results import Simulation, Simulator, throughput_of
from hespas.simulator.streams import COMMUNICATION_KINDS

__all__ = ["simulate"]

_MOST_TRIPS = 2.0**53
"""Largest integer below which all integers are exact in float64."""


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
    """Simulate one step of every rank in the workload, from time 0; ``workload`` is not changed.

    A node takes its time from ``estimates`` (one per rank class), otherwise from the graph; zero-cost nodes
    take 0. If the estimates are for a device, the results count the nodes that use a time of the graph,
    because that time belongs to another device.

    With ``device`` (the device of the estimates), two effects are added according to ``configuration``:
    communication and kernels that overlap slow each other down (:mod:`hespas.simulator.interference`), and
    kernels wait for a host that launches them. A step factor of the device file corrects the time of the
    step, not the timeline (:func:`hespas.estimators.step_intervals.applied_factor`). Without ``estimates``
    the times of the graphs count as estimates for that device, except for recorded waits.

    ``missing`` selects the handling of unknown times and trip counts: ``error`` raises ``UnsupportedError``;
    ``warn`` counts an unknown time as 0 and an unknown loop as one iteration and marks the result as a lower
    bound; ``zero`` counts both as 0. ``simulator`` defaults to a :class:`JobScheduler`, which uses the
    shortest time of each collective if the times come from the graphs.

    Raises ``UnsupportedError`` for negative times and for trip counts that are negative or above 2^53,
    ``FormatError`` if dependencies form a cycle, and ``CheckFailedError`` if ranks deadlock.
    """
    if estimates is not None and len(estimates) != len(workload.classes):
        raise InvariantError(f"got {len(estimates)} estimates for {len(workload.classes)} rank classes")
    messages = diagnostics if diagnostics is not None else Diagnostics()
    if device is not None and estimates is None:
        estimates = tuple(_durations_as_estimate(graph, device) for graph in workload.classes)
    if device is not None:
        warn_of_tf32(workload.metadata, device, workload.name, messages)
    ready = _ready_classes(workload, estimates, missing, messages)
    classes = tuple(ready_class.graph for ready_class in ready)
    chosen = _complete_options(simulator, workload, estimates)
    job = replace(workload, classes=classes)
    paced, factors, is_summed = None, (nan, nan), False
    step_factor: StepFactor | None = None
    basis: Mapping[str, float] = {}
    if device is not None and estimates is not None:
        settings = configuration or default_configuration(workload, device)
        step_factor = applied_factor(workload, device, settings, messages)
        factors = interval_factors(settings.kind, device, settings.estimator)
        is_summed = adds_intervals(settings.estimator)
        paced = _DeviceJob(job, estimates, device, settings, messages)
        basis = basis_shares(job, classes, estimates)
    if paced is not None and isinstance(chosen, JobScheduler | ListScheduler):
        workload, job, pressures = paced.with_host_launches(workload, chosen)
        done = chosen.run(job, messages, pressures)
    else:
        done = chosen.run(job, messages)
    results = tuple(
        replace(result, unknown=ready[result.rank_class].unknown, kept=ready[result.rank_class].kept)
        for result in done.classes
    )
    correction, interval_ns = _correction(done, classes, estimates, factors, step_factor, is_summed=is_summed)
    corrected = replace(
        done,
        workload=workload,
        classes=results,
        basis=basis,
        interval_ns=interval_ns,
        step_factor=step_factor,
        correction=correction,
    )
    throughput = throughput_of(workload.metadata, corrected.step_ns, device)
    return replace(corrected, throughput=throughput)


@dataclass(frozen=True, slots=True)
class _DeviceJob:
    """Job with kernel times of a device, and the two effects that slow kernels down: contention and host
    launches.
    """

    job: Workload
    estimates: Sequence[Estimate]
    device: Device
    configuration: Configuration
    diagnostics: Diagnostics

    def with_host_launches(
        self, workload: Workload, simulator: JobScheduler | ListScheduler
    ) -> tuple[Workload, Workload, Sequence[Pressure] | None]:
        """Return the job with nodes for the host launches that kernels wait for.

        Return the workload with its original times, the workload with the times to simulate, and the
        contention factors (:class:`Pressure`) of the nodes of each rank class.
        """
        pressures: Sequence[Pressure] | None = None
        if simulator.interference and isnan(self.configuration.beside):
            pressures = pressures_of(self.job, self.estimates, self.device, self.diagnostics)
        elif simulator.interference:
            pressures = uniform_pressures(self.job, self.estimates, self.configuration.beside)
        issue_ns = self.configuration.host_issue_ns
        if not (issue_ns and simulator.launches):
            return workload, self.job, pressures
        classes, timed = list(workload.classes), list(self.job.classes)
        pressed = None if pressures is None else list(pressures)
        for number, (original, graph, size) in enumerate(
            zip(classes, timed, self.job.class_sizes, strict=True)
        ):
            made = unrolled(graph, overlap_trips=simulator.overlap_trips) if size else None
            if made is None:
                continue
            flat, rows = made
            has_source = rows >= 0
            times = (source.duration_ns[rows] for source in (graph, original))
            timed_ns, stated_ns = (np.where(has_source, column, 0.0) for column in times)
            timed[number] = replace(flat, duration_ns=timed_ns)
            stream = np.where(has_source, original.stream[rows], -1).astype(original.stream.dtype)
            classes[number] = replace(flat, duration_ns=stated_ns, stream=stream)
            if pressed is not None:
                pressed[number] = pressed[number].take(np.maximum(rows, 0), has_source)
        workload, job = replace(workload, classes=tuple(classes)), replace(self.job, classes=tuple(timed))
        pressures = pressed
        launches = [
            launches_of(
                graph,
                issue_ns,
                reads_counts=self.configuration.reads_counts,
                separate_experts=self.configuration.separate_experts,
            )
            if size
            else None
            for graph, size in zip(job.classes, job.class_sizes, strict=True)
        ]
        self.diagnostics.info(
            "simulate.launches",
            workload.name,
            f"the host launches kernels one by one, {issue_ns / 1e3:g} us each",
            count=sum(class_launches is not None for class_launches in launches),
        )
        if pressures is not None:
            pressures = list(pressures)
            for number, class_launches in enumerate(launches):
                if class_launches is not None:  # launches cause no contention
                    rows = class_launches.rows()
                    pressures[number] = pressures[number].take(rows, rows < len(pressures[number]))
        return _launched(workload, launches), _launched(job, launches), pressures


def _launched(workload: Workload, launches: Sequence[Launches | None]) -> Workload:
    """Return the workload with the host launches of each rank class."""
    pairs = zip(workload.classes, launches, strict=True)
    return replace(
        workload,
        classes=tuple(
            graph if class_launches is None else class_launches.added_to(graph)
            for graph, class_launches in pairs
        ),
    )


def _complete_options(
    simulator: Simulator | None, workload: Workload, estimates: Sequence[Estimate] | None
) -> Simulator:
    """Return the simulator, with defaults for options that are not set.

    Collective times from the graphs may include waits for other ranks. In this case all members take the
    shortest time, counted from the last arrival. If all times are from the graphs and include recorded waits,
    ranks start with the offsets of their recordings.
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


def _on_one_queue(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
    """Return the graph without device streams, so that operations of one kind run one at a time.

    An estimate assumes that an operation runs alone on the device. Host threads stay separate. Streams of
    communicators stay too if no other node has a stream: the graph then is a generated step, not a recording.
    """
    communicates = np.isin(graph.kind, COMMUNICATION_KINDS)
    if (graph.stream[~communicates] < 0).all():
        return graph
    named = np.unique(graph.stream[(graph.stream >= 0) & (graph.resource == int(Resource.DEVICE))])
    if len(named) < 2:
        return graph
    diagnostics.info(
        "simulate.streams-merged",
        graph.name,
        "device streams are merged into one per kind of work: an estimate assumes that nothing else runs",
        count=len(named) - 1,
    )
    keeps = is_delay(graph) | (graph.resource == int(Resource.HOST))
    return replace(graph, stream=np.where(keeps, graph.stream, named[0]).astype(np.int32))


def _correction(
    done: Simulation,
    timed: Sequence[OpGraph],
    estimates: Sequence[Estimate] | None,
    factors: tuple[float, float],
    step_factor: StepFactor | None,
    *,
    is_summed: bool,
) -> tuple[float, tuple[float, float]]:
    """Return the factor that corrects the simulated step time, and the 90 % interval of the corrected time
    [ns]. ``factors`` is the interval of the ratio of real to simulated step times, for this kind of step. If
    ``is_summed``, they follow from the sums of the intervals of all operations instead.

    Recorded times have no error. Therefore all factors apply only to the estimated share of the work of the
    rank class that ends last.
    """
    if estimates is None or not done.classes:
        return 1.0, (nan, nan)
    last = max(done.classes, key=lambda result: result.finish_ns).rank_class
    graph, estimate = timed[last], estimates[last]
    with np.errstate(over="ignore", invalid="ignore"):  # sums may overflow
        total = np.nan_to_num(graph.duration_ns * graph.executions, posinf=np.inf)
        estimated = float(total[(estimate.duration_ns > 0) & (estimate.estimator >= 0)].sum())
        whole = float(total.sum())
        if is_summed:
            runs = np.where(estimate.estimator >= 0, graph.executions, 0.0)
            columns = (estimate.low_ns, estimate.high_ns, estimate.duration_ns)
            low_ns, high_ns, sum_ns = (float(np.nansum(column * runs)) for column in columns)
            factors = (low_ns / sum_ns, high_ns / sum_ns) if sum_ns > 0 else (nan, nan)
    if not (estimated > 0 and np.isfinite(whole)):
        return 1.0, (nan, nan)
    bounds = (1.0 if step_factor is None else step_factor.factor, *corrected_bounds(factors, step_factor))
    correction, low, high = (1.0 + (factor - 1.0) * estimated / whole for factor in bounds)
    return correction, (done.step_ns * low, done.step_ns * high)


def _blank_estimate(graph: OpGraph) -> Estimate:
    """Return an estimate that leaves all nodes unknown except zero-cost nodes, so that the times of the graph
    are used.
    """
    nodes = len(graph)
    free = is_free(graph) | (graph.kind == int(NodeKind.METADATA))
    no_estimator = np.broadcast_to(np.int8(-1), (nodes,))
    return Estimate(
        hardware="",
        estimators=(),
        bounds=(),
        duration_ns=np.where(free, 0.0, np.nan),
        low_ns=constant(np.nan, nodes),
        high_ns=constant(np.nan, nodes),
        estimator=no_estimator,
        bound=no_estimator,
    )


def _durations_as_estimate(graph: OpGraph, device: Device) -> Estimate:
    """Return the durations of a graph, except recorded waits, as estimates for a device."""
    blank = _blank_estimate(graph)
    duration_ns = np.where(is_recorded_wait(graph) | np.isnan(graph.duration_ns), np.nan, graph.duration_ns)
    return replace(
        blank,
        hardware=device.name,
        estimators=("as stated",),
        duration_ns=np.where(np.isnan(duration_ns), blank.duration_ns, duration_ns),
        estimator=np.where(duration_ns > 0, 0, -1).astype(np.int8),
    )


class _TimedClass(NamedTuple):
    """Graph of a rank class, with a time for each node and whole trip counts.

    ``unknown`` is the number of nodes whose time was unknown. ``kept`` is the number of nodes that use a time
    of the graph although estimates are given.
    """

    graph: OpGraph
    unknown: int = 0
    kept: int = 0


def _ready_classes(
    workload: Workload, estimates: Sequence[Estimate] | None, missing: MissingPolicy, diagnostics: Diagnostics
) -> list[_TimedClass]:
    """Return the rank classes with a time for each node. Classes without ranks are not changed."""
    classes: list[_TimedClass] = []
    for index, (graph, size) in enumerate(zip(workload.classes, workload.class_sizes, strict=True)):
        if not size:
            classes.append(_TimedClass(graph))
            continue
        estimate = estimates[index] if estimates is not None else _blank_estimate(graph)
        num_kept = int(kept_durations(graph, estimate).sum()) if estimate.hardware else 0
        counted, unknown_trips = _settle_trips(graph, missing, diagnostics)
        timed = apply_estimate(counted, estimate, missing, diagnostics)
        durations = timed.duration_ns
        runs = counted.executions != 0
        gaps = np.isnan(durations)
        broken = runs & ~gaps & ~((durations >= 0) & (durations < np.inf))
        if broken.any():
            node = int(np.flatnonzero(broken)[0])
            raise UnsupportedError(
                f"{counted.node_name(node) or counted.op_name(node)} takes {float(durations[node])} ns: "
                "a schedule needs times that are finite and not negative",
                position=f"{counted.name or 'graph'}: node {int(counted.id[node])}",
                hint="correct the duration in the op graph, or estimate it with `hardware=NAME`",
            )
        timed, unknown_times = (
            with_durations(timed, np.where(gaps | ~runs, 0.0, durations)),
            int((gaps & runs).sum()),
        )
        queued = _on_one_queue(timed, diagnostics) if estimate.hardware else timed
        classes.append(_TimedClass(queued, unknown_trips + unknown_times, num_kept))
    return classes


def _settle_trips(graph: OpGraph, missing: MissingPolicy, diagnostics: Diagnostics) -> tuple[OpGraph, int]:
    """Return the graph with whole trip counts, and how many were unknown; these are set to 1."""
    table = graph.regions
    trips = np.rint(table.trips)
    unknown = np.isnan(trips)
    broken = (trips < 0) | (trips > _MOST_TRIPS)
    if broken.any():
        row = int(np.flatnonzero(broken)[0])
        raise UnsupportedError(
            f"{graph.name or 'the graph'}: loop {graph.strings[int(table.label[row])]} has a trip count of "
            f"{float(table.trips[row]):g}, expected 0 to 2**53",
            hint="correct the trip count in the op graph",
        )
    diagnostics.warning(
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
                hint="use `on_unknown=warn` to count one iteration each, or `on_unknown=zero` to omit them",
            )
        assumed = 1.0 if missing == "warn" else 0.0
        diagnostics.warning(
            "simulate.assumed-trips",
            graph.name,
            f"loops with unknown trip count taken as {assumed:.0f}: {labels}",
            count=int(unknown.sum()),
        )
        trips = np.where(unknown, assumed, trips)
    elif np.array_equal(trips, table.trips):
        return graph, 0
    regions = replace(table, trips=trips)
    settled_graph = replace(graph, regions=regions, executions=region_executions(regions, graph.region))
    return settled_graph, int(unknown.sum()) if missing == "warn" else 0
