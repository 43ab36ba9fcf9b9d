"""One rank at a time on its streams: no network, no other rank; every node takes the time it states.

The time of communication is what the estimate says (latency and bandwidth, :mod:`hespas.estimators.rates`).
Ranks of one class do the same at the same time, so a class is scheduled once. Ranks of different classes do
not wait for each other; :class:`hespas.simulator.job.JobScheduler` lets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.graph import WAITS, Diagnostics, OpGraph, RaggedArray, RegionTable, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.hints import PositiveInt, check_fields
from hespas.graph.passes import all_deps, take_nodes
from hespas.simulator.progress import Pressure
from hespas.simulator.results import ClassOf, Scheduled, alone, simulation_of
from hespas.simulator.schedule import (
    Block,
    Priority,
    Program,
    Simulation,
    busy_ns,
    communication_order,
    critical_ns,
    exposed_ns,
    interference_ns,
    list_schedule,
)
from hespas.simulator.streams import STREAMS
from hespas.simulator.trips import flatten, prepared, with_trips

__all__ = [
    "ListScheduler",
    "Trips",
    "TripsRun",
    "collapsed",
    "expanded",
    "loop_alone",
    "nodes_inside",
    "rest_of_loop",
    "too_long",
]


# --- Loops: run trip by trip while that is affordable, beyond as their first trip and a block for the rest.
#
# A loop is unrolled (:class:`hespas.graph.passes.UnrollLoops`) where its executions fit the limit: the
# schedule is exact. Any other keeps its first trip as it stands in the program; all later ones are one
# block on every stream that the loop uses, which starts when the first trip has ended and which everything
# behind the loop waits for. The block takes T(trips) - T(1), where T is the time of the loop alone, on idle
# streams, which is measured for a few trips and extrapolated. So a loop takes as long as the unrolled one
# where nothing else runs beside it and its trips have become periodic by then. What stands outside overlaps
# with its first trip, and with all of it on streams that the loop leaves alone.

_Scalar = TypeVar("_Scalar", bound=np.generic)


def expanded(
    graph: OpGraph,
    limit: int,
    priority: Priority,
    diagnostics: Diagnostics,
    *,
    overlap_trips: bool,
    pressure: Pressure | None = None,
) -> Program:
    """The program of a graph with at most about ``limit`` executions (its nodes, if they are more), which
    slow each other down by the ``pressure`` of its nodes.

    Its times and trip counts are known. O(executions), and O(nodes) per loop.
    """
    reduced = prepared(graph)
    chosen = too_long(reduced, limit)
    if not chosen.any():
        return flatten(reduced, (), overlap_trips=overlap_trips, pressure=pressure)
    blocks: list[Block] = []
    for region in np.flatnonzero(chosen)[::-1].tolist():  # inner loops first
        inside = nodes_inside(reduced, region)
        trips = int(reduced.regions.trips[region])
        alone = loop_alone(reduced, inside, region)
        runs = _Trips(alone, region, tuple(blocks), priority, overlap_trips, pressure)
        block = rest_of_loop(runs, alone, region, trips, diagnostics)
        blocks.append(block)
        reduced = collapsed(reduced, region, inside, block, len(blocks) - 1)
    extrapolated = sum(block.trips for block in blocks)
    diagnostics.info(
        "simulate.extrapolated-loops",
        graph.name,
        f"loops run once and then by their steady state, {extrapolated:,} trips in all",
        count=len(blocks),
    )
    return flatten(reduced, tuple(blocks), overlap_trips=overlap_trips, pressure=pressure)


def too_long(graph: OpGraph, limit: int) -> BoolArray:
    """Which loops not to unroll, shape ``(regions,)``: inner loops are the last to be given up.

    What one loop may be unrolled to is halved until all that is unrolled fits ``limit``, and what it takes to
    find the periods of the others is of the same order. O(regions log limit).
    """
    regions = graph.regions
    trips: list[float] = regions.trips.tolist()
    parents: list[int] = regions.parent.tolist()
    own: list[int] = np.bincount(graph.region[graph.region >= 0], minlength=len(parents)).tolist()
    most = max(limit, len(graph) + len(STREAMS) * len(parents))
    allowance = most
    while True:
        sizes, chosen = [*own], np.zeros(len(parents), np.bool_)
        total, work = int((graph.region < 0).sum()), 0
        for region in reversed(range(len(parents))):  # children stand behind their parents
            size = sizes[region]
            repeats = trips[region] > 1
            if repeats and size * trips[region] > allowance:
                chosen[region] = True
                work += _FEWEST_EXECUTIONS * size
                size += len(STREAMS)
            elif repeats:
                size = int(size * trips[region])
            if parents[region] < 0:
                total += size
            else:
                sizes[parents[region]] += size
        if total + work <= 2 * most or not allowance:
            return chosen
        allowance //= 2


def nodes_inside(graph: OpGraph, region: int) -> BoolArray:
    """Which nodes stand in a region or in one nested in it."""
    return graph.regions.within(region)[graph.region]


def loop_alone(graph: OpGraph, inside: BoolArray, region: int) -> OpGraph:
    """Only the nodes of a loop, in a program that does nothing else; what they need from outside is there."""
    rows = np.flatnonzero(inside)
    number = np.cumsum(inside) - 1
    deps = (_within(each.take(rows), inside, number) for each in (graph.data_deps, graph.control_deps))
    part = take_nodes(graph, rows, *deps)
    within = graph.regions.within(region)[:-1]
    return with_trips(part, np.where(within, part.regions.trips, 1.0))


def _within(deps: RaggedArray, inside: BoolArray, number: IntArray) -> RaggedArray:
    kept = inside[deps.values]
    return RaggedArray.from_pairs(deps.row_ids[kept], number[deps.values[kept]], len(deps))


class _Places(NamedTuple):
    """Where the tasks of a block stand: right behind the last node of their loop."""

    last: int
    streams: SmallIntArray

    @property
    def added(self) -> IntArray:
        """Their numbers in the new graph."""
        return np.arange(self.last + 1, self.last + 1 + len(self.streams), dtype=np.int64)

    def number(self, old: NDArray[np.integer]) -> IntArray:
        """New numbers of old nodes."""
        return old.astype(np.int64) + np.where(old > self.last, len(self.streams), 0)


def collapsed(graph: OpGraph, region: int, inside: BoolArray, block: Block, index: int) -> OpGraph:
    """The graph with one trip of a loop and ``block`` behind it, one node per stream that the loop uses."""
    streams = np.unique(graph.stream[inside & (graph.stream >= 0)]).astype(np.int32)
    trips = graph.regions.trips.copy()
    trips[region] = 1.0
    if not len(streams):
        return with_trips(graph, trips)
    places = _Places(int(np.flatnonzero(inside)[-1]), streams)
    last = np.full(len(streams), places.last)
    rows = np.concatenate([np.arange(places.last + 1), last, np.arange(places.last + 1, len(graph))])
    grown = take_nodes(_without_carried(graph), rows, *_wired(graph, inside, places))
    added = places.added
    grown = replace(
        grown,
        duration_ns=_changed(grown.duration_ns, added, block.duration_ns),
        region=_changed(grown.region, added, int(graph.regions.parent[region])),
        stream=_changed(grown.stream, added, streams),
        source_row=_changed(grown.source_row, added, -1 - index),
        regions=_recarried(graph, region, inside, places),
    )
    return with_trips(grown, trips)


def _changed(
    column: NDArray[_Scalar], rows: IntArray, value: float | NDArray[np.integer]
) -> NDArray[_Scalar]:
    changed = column.copy()
    changed[rows] = value
    return changed


def _without_carried(graph: OpGraph) -> OpGraph:
    none = np.empty(0, np.int32)
    return replace(
        graph,
        regions=replace(graph.regions, carried_region=none, carried_producer=none, carried_consumer=none),
    )


def _wired(graph: OpGraph, inside: BoolArray, places: _Places) -> tuple[RaggedArray, RaggedArray]:
    """Data and control dependencies: the block waits for the first trip, what waits for it for the block."""
    count, every = len(graph) + len(places.streams), all_deps(graph)
    consumers, producers = every.row_ids, every.values
    within = inside[producers] & inside[consumers]
    sinks = inside.copy()
    sinks[producers[within]] = False
    ends = places.number(np.flatnonzero(sinks))
    behind = places.number(np.unique(consumers[inside[producers] & ~inside[consumers]]))
    blocks = places.added
    control = graph.control_deps
    rows = [places.number(control.row_ids), np.repeat(blocks, len(ends)), np.repeat(behind, len(blocks))]
    values = [places.number(control.values), np.tile(ends, len(blocks)), np.tile(blocks, len(behind))]
    data = graph.data_deps
    return (
        RaggedArray.from_pairs(places.number(data.row_ids), places.number(data.values), count),
        RaggedArray.from_pairs(np.concatenate(rows), np.concatenate(values), count),
    )


def _recarried(graph: OpGraph, region: int, inside: BoolArray, places: _Places) -> RegionTable:
    """Carried values in new numbers; what enclosing loops take from this one waits for its block, too."""
    table = graph.regions
    kept = table.carried_region != region
    row, producer, consumer = (
        column[kept] for column in (table.carried_region, table.carried_producer, table.carried_consumer)
    )
    leaves = inside[producer] & ~graph.regions.within(region)[row]
    blocks = places.added
    ends = places.number(consumer)
    return replace(
        table,
        carried_region=np.concatenate([row, np.repeat(row[leaves], len(blocks))]),
        carried_producer=np.concatenate([places.number(producer), np.tile(blocks, int(leaves.sum()))]).astype(
            np.int32
        ),
        carried_consumer=np.concatenate([ends, np.repeat(ends[leaves], len(blocks))]).astype(np.int32),
    )


# The time of a loop with many trips, from schedules of a few: trips of a loop become periodic.
#
# Let T(k) be the time of a list schedule of k trips, alone on idle streams. Trips are equal and wait for
# each other and for streams, so after a while T grows by the same amount every c trips, for a small c. T is
# measured for some k until it grows twice by the same amount, and goes on growing by that: exact from where
# it is periodic on. No stream can do more than one thing at a time, which bounds the growth from below.

_MOST_TRIPS = 32
_FEWEST_TRIPS = 3
_MOST_EXECUTIONS = 300_000
"""Trips run before a period is looked for: so many, fewer where their nodes are many."""

_FEWEST_EXECUTIONS = 1 + 3 * _FEWEST_TRIPS + 3
"""How often the nodes of a loop run to find a period of one trip: T(1), T(3), T(4), T(5)."""

_MOST_VARIED = 1_000
_LONGEST_PERIOD = 6
_EQUAL = 1e-9
"""T grows equally twice where that differs by less than this share of T: these are differences of sums."""


class TripsRun(NamedTuple):
    """Some trips of a loop on idle streams: times [ns], as in :class:`hespas.simulator.schedule.Block`."""

    time_ns: float
    exposed_ns: float
    busy_ns: FloatArray
    critical_ns: FloatArray
    wait_ns: FloatArray
    added_ns: float


class Trips(Protocol):
    """Runs of a loop by their number of trips."""

    def run(self, trips: int) -> TripsRun:
        """The schedule of so many trips."""
        ...


@dataclass(slots=True)
class _Trips:
    """Runs of ``region`` alone by their number of trips, made when wanted."""

    loop: OpGraph
    region: int
    blocks: tuple[Block, ...]
    priority: Priority
    overlap_trips: bool
    pressure: Pressure | None
    runs: dict[int, TripsRun] = field(default_factory=dict[int, TripsRun])

    def run(self, trips: int) -> TripsRun:
        """The schedule of so many trips."""
        if trips not in self.runs:
            self.runs[trips] = self._made(trips)
        return self.runs[trips]

    def _made(self, trips: int) -> TripsRun:
        counts = self.loop.regions.trips.copy()
        counts[self.region] = trips
        looped = with_trips(self.loop, counts)
        program = flatten(looped, self.blocks, overlap_trips=self.overlap_trips, pressure=self.pressure)
        schedule = list_schedule(program.tasks, self.priority, communication_order(program.tasks))
        return TripsRun(
            time_ns=schedule.finish_ns,
            exposed_ns=exposed_ns(program, schedule),
            busy_ns=busy_ns(program, schedule),
            critical_ns=critical_ns(program, schedule, schedule.critical()),
            wait_ns=np.zeros(len(WAITS)),
            added_ns=interference_ns(program, schedule),
        )


def _period(some: Trips, trips: int) -> int:
    """After how many trips T grows by the same again, from ``trips`` on; 0: not seen."""
    for period in range(1, _LONGEST_PERIOD + 1):
        last = some.run(trips + 2 * period).time_ns
        middle = some.run(trips + period).time_ns
        if abs((last - middle) - (middle - some.run(trips).time_ns)) <= _EQUAL * last:
            return period
    return 0


def rest_of_loop(
    some: Trips, loop: OpGraph, region: int, trips: int, diagnostics: Diagnostics, *, varies: bool = False
) -> Block:
    """All trips but the first of ``region``, from runs of ``some`` of them. ``loop`` has only its nodes,
    reduced as in :mod:`hespas.simulator.schedule`. Where times vary from trip to trip, there is no period to
    look for, and the mean is that of more trips.

    Tells ``diagnostics`` where no period was found: the mean growth seen is taken.
    """
    first = some.run(1)
    size = max(float((loop.multiplicity / trips).sum()), 1.0)
    seen = max(_FEWEST_TRIPS, min(_MOST_TRIPS, int(_MOST_EXECUTIONS / size)))
    more = max(2 * _LONGEST_PERIOD, min(_MOST_VARIED, int(_MOST_EXECUTIONS / size)) if varies else 0)
    if trips <= seen + more:
        whole = some.run(trips)
        return _block(region, trips, first, whole, _minus(whole, first))
    period = more if varies else _period(some, seen)
    if not period:
        period = more
        diagnostics.warning(
            "simulate.loop-not-steady",
            loop.name,
            f"a loop of {trips:,} trips shows no period within {seen + period} trips: their mean is taken",
        )
    growth = _minus(some.run(seen + period), some.run(seen))
    start = some.run(seen + (trips - seen) % period)
    periods = (trips - seen) // period
    busiest_ns = min(period * float(first.busy_ns.max()), float(growth.busy_ns.max()))
    slowest_ns = max(growth.time_ns, busiest_ns)
    whole = TripsRun(
        time_ns=start.time_ns + periods * slowest_ns,
        exposed_ns=start.exposed_ns + periods * growth.exposed_ns,
        busy_ns=start.busy_ns + periods * growth.busy_ns,
        critical_ns=start.critical_ns + periods * growth.critical_ns,
        wait_ns=start.wait_ns + periods * growth.wait_ns,
        added_ns=start.added_ns + periods * growth.added_ns,
    )
    return _block(region, trips, first, whole, growth)


def _minus(more: TripsRun, less: TripsRun) -> TripsRun:
    return TripsRun(
        more.time_ns - less.time_ns,
        more.exposed_ns - less.exposed_ns,
        more.busy_ns - less.busy_ns,
        more.critical_ns - less.critical_ns,
        more.wait_ns - less.wait_ns,
        more.added_ns - less.added_ns,
    )


def _block(region: int, trips: int, first: TripsRun, whole: TripsRun, growth: TripsRun) -> Block:
    """What ``whole`` has more than the first trip; where the critical path spends it, ``growth`` says."""
    rest = _minus(whole, first)
    duration_ns = max(rest.time_ns, 0.0)
    spent = np.maximum(growth.critical_ns, 0.0)  # the path may move from one stream to another
    total_ns = float(spent.sum())
    return Block(
        region=region,
        trips=trips - 1,
        duration_ns=duration_ns,
        busy_ns=rest.busy_ns,
        exposed_ns=min(max(rest.exposed_ns, 0.0), duration_ns),
        critical_ns=spent * (duration_ns / total_ns if total_ns else 0.0),
        wait_ns=np.maximum(rest.wait_ns, 0.0),
        added_ns=max(rest.added_ns, 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListScheduler:
    """The list schedule of each rank class; fields are its options.

    ``priority``: which ready node a stream takes first (:data:`hespas.simulator.schedule.PRIORITIES`).
    ``max_executions``: up to so many, all trips of all loops are run; beyond, the longest loops are
    extrapolated (:mod:`hespas.simulator.list_scheduler`). ``overlap_trips``: a trip of a loop begins as soon
    as its values are there, as where a compiler pipelines loops, and not when the one before has ended.
    ``interference``: communication and kernels beside each other slow each other down, where their times are
    estimated (:mod:`hespas.simulator.interference`). ``launches``: kernels wait for a host that launches them
    one by one, where the configuration says so (:mod:`hespas.simulator.launches`).
    """

    priority: Priority = "program"
    max_executions: PositiveInt = 1_000_000
    overlap_trips: bool = False
    interference: bool = True
    launches: bool = True

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        check_fields(self)

    @property
    def name(self) -> str:
        """``list-schedule``."""
        return "list-schedule"

    def run(
        self, workload: Workload, diagnostics: Diagnostics, pressures: Sequence[Pressure] | None = None
    ) -> Simulation:
        """The step of each rank; see the module. ``pressures`` are those of the rank classes.
        O(executions log executions) per class.
        """
        counts = workload.class_sizes
        used = [index for index, count in enumerate(counts) if count]
        if len(used) > 1:
            diagnostics.info(
                "simulate.ranks-alone",
                workload.name,
                f"the {len(used):,} rank classes are scheduled each for itself: nobody waits for other ranks",
            )
        of = pressures if pressures is not None and self.interference else [None] * len(counts)
        parts = [self.scheduled(workload, index, counts[index], of[index], diagnostics) for index in used]
        place = np.full(len(workload.classes) + 1, -1, np.int64)  # the last: of ranks that are not here
        place[used] = np.arange(len(used))
        return simulation_of(self.name, workload, parts, workload.by_rank(place))

    def scheduled(
        self,
        workload: Workload,
        index: int,
        ranks: int,
        pressure: Pressure | None,
        diagnostics: Diagnostics,
    ) -> Scheduled:
        """The schedule of one class, run by ``ranks`` ranks that wait for nobody."""
        graph = workload.classes[index]
        program = expanded(
            graph,
            self.max_executions,
            self.priority,
            diagnostics,
            overlap_trips=self.overlap_trips,
            pressure=pressure,
        )
        rank = int(np.argmax(workload.rank_class == index))
        order = communication_order(program.tasks)
        return alone(graph, program, self.priority, ClassOf(index, rank, ranks), order)
