"""Loops of a graph for scheduling: unroll them, or run their first iteration and extrapolate the others.

A loop is unrolled (:class:`hespas.graph.passes.UnrollLoops`) if its executions fit the limit; its schedule is
then exact. Any other loop keeps only its first iteration in the program. One block per stream of the loop
replaces all later iterations. The block starts after the first iteration, and everything after the loop waits
for it. Its duration is T(n) - T(1), where T(k) is the time of k iterations of the loop alone on idle streams.
Work outside the loop overlaps with its first iteration, and with the whole loop on streams that the loop does
not use.

Iterations are equal and wait for each other and for streams, so T becomes periodic: it grows by the same
amount every c iterations, for a small c. T is measured for some k until it grows twice by the same amount,
and is extrapolated with that amount. The result is exact from the first periodic iteration on. The busiest
stream bounds the growth from below.

Graphs are reduced to the columns that scheduling needs. Graph passes copy these columns without reading them,
so two of them have another meaning here: ``stream`` holds the stream code, and ``source_id`` is 1 + the node
of the original graph, -1 - b for block b, or 0 for the end of an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.graph import (
    WAITS,
    CollectiveTable,
    ContractionTable,
    Diagnostics,
    ExtraTable,
    OpGraph,
    P2pTable,
    RaggedArray,
    RegionTable,
)
from hespas.graph.builder import region_executions
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.passes import UnrollLoops, all_deps, bypass, take_nodes
from hespas.simulator.interference import Pressure
from hespas.simulator.schedule import (
    Block,
    Priority,
    Schedule,
    TaskProgram,
    Tasks,
    busy_ns,
    critical_ns,
    exposed_ns,
    interference_ns,
    list_schedule,
)
from hespas.simulator.streams import FREE, STREAMS, stream_codes

__all__ = [
    "IterationTimes",
    "LoopExtrapolation",
    "expanded",
    "flatten",
    "prepared",
    "too_long",
    "with_trips",
]


def prepared(graph: OpGraph) -> OpGraph:
    """Return the graph reduced for scheduling: without side tables, and without branches that do not run."""
    nodes, stream = len(graph), stream_codes(graph)
    reduced = replace(
        graph,
        group_sets=(),
        permutations=(),
        collectives=CollectiveTable.empty(),
        p2p=P2pTable.empty(),
        contractions=ContractionTable.empty(),
        extra=ExtraTable.empty(),
        results=RaggedArray.empty(nodes),
        attachments={},
        stream=stream,
        source_id=np.arange(1, nodes + 1, dtype=np.int32),
        duration_ns=np.where(stream == FREE, 0.0, graph.duration_ns),
    )
    untaken = graph.executions == 0
    return bypass(reduced, untaken) if untaken.any() else reduced


def with_trips(graph: OpGraph, trips: FloatArray) -> OpGraph:
    """Return the graph with other trip counts, shape ``(regions,)``."""
    regions: RegionTable = replace(graph.regions, trips=trips)
    return replace(graph, regions=regions, executions=region_executions(regions, graph.region))


def flatten(
    graph: OpGraph, blocks: tuple[Block, ...], *, overlap_trips: bool, pressure: Pressure | None = None
) -> TaskProgram:
    """Return the program with all loops unrolled, iteration after iteration (:class:`UnrollLoops`).

    ``graph`` comes from :func:`prepared`. ``pressure`` has the contention factors of the nodes of the
    original graph; the times of ``blocks`` include contention already.
    """
    executions = region_executions(graph.regions, graph.region)  # the graph may state other counts
    unroll = UnrollLoops(max_nodes=int(executions.sum()) + 1, overlap_trips=overlap_trips)
    flat = unroll(graph, Diagnostics())
    of = flat.source_id
    node = np.where(of > 0, of - 1, -1).astype(np.int32)
    mine = None if pressure is None else pressure.take(node, node >= 0)
    return TaskProgram(
        tasks=Tasks(graph.name, flat.duration_ns, flat.stream, all_deps(flat), mine),
        node=node,
        block=np.where(of < 0, -1 - of, -1).astype(np.int32),
        op_class=flat.op_class.astype(np.int32),
        blocks=blocks,
    )


_Scalar = TypeVar("_Scalar", bound=np.generic)


def expanded(
    graph: OpGraph,
    limit: int,
    priority: Priority,
    diagnostics: Diagnostics,
    *,
    overlap_trips: bool,
    pressure: Pressure | None = None,
) -> TaskProgram:
    """Return the program of a graph with at most about ``limit`` executions, but at least one per node.

    Long loops are extrapolated, with the contention factors ``pressure``. All times and trip counts must be
    known. O(executions), and O(nodes) per loop.
    """
    reduced = prepared(graph)
    chosen = too_long(reduced, limit)

    def measure(_: Sequence[int], programs: Sequence[TaskProgram]) -> list[IterationTimes]:
        return [_times_alone(program, list_schedule(program.tasks, priority)) for program in programs]

    loops = LoopExtrapolation(
        reduced=[reduced],
        pressures=[pressure],
        measure=measure,
        diagnostics=diagnostics,
        overlap_trips=overlap_trips,
    )
    for region in np.flatnonzero(chosen)[::-1].tolist():  # inner loops first
        loops.extrapolate([(0, region)])
    blocks = loops.blocks[0]
    if blocks:
        extrapolated = sum(block.trips for block in blocks)
        diagnostics.info(
            "simulate.extrapolated-loops",
            graph.name,
            f"loops simulate one iteration and extrapolate {extrapolated:,} more from their steady state",
            count=len(blocks),
        )
    return loops.unrolled(0)


def _times_alone(program: TaskProgram, schedule: Schedule) -> IterationTimes:
    return IterationTimes(
        time_ns=schedule.finish_ns,
        exposed_ns=exposed_ns(program, schedule),
        busy_ns=busy_ns(program, schedule),
        critical_ns=critical_ns(program, schedule, schedule.critical()),
        wait_ns=np.zeros(len(WAITS)),
        added_ns=interference_ns(program, schedule),
    )


@dataclass(slots=True, kw_only=True)
class LoopExtrapolation:
    """Graphs of ranks, reduced by :func:`prepared`, in which long loops are replaced one by one with their
    first iteration and a block (see the module).

    ``pressures`` are the contention factors of the ranks. ``measure`` simulates programs of some ranks
    together on idle streams; its first argument lists the positions of these ranks in ``reduced``. ``varies``
    is True if times differ between iterations.
    """

    reduced: list[OpGraph]
    pressures: Sequence[Pressure | None]
    measure: Callable[[Sequence[int], Sequence[TaskProgram]], list[IterationTimes]]
    diagnostics: Diagnostics
    overlap_trips: bool
    varies: bool = False
    blocks: list[list[Block]] = field(init=False)

    def __post_init__(self) -> None:
        """Initialize the list of blocks as empty."""
        self.blocks = [[] for _ in self.reduced]

    def unrolled(self, position: int, graph: OpGraph | None = None) -> TaskProgram:
        """Return the program of the graph at ``position``, or of a part of it, with the blocks that were
        added so far.
        """
        return flatten(
            self.reduced[position] if graph is None else graph,
            tuple(self.blocks[position]),
            overlap_trips=self.overlap_trips,
            pressure=self.pressures[position],
        )

    def extrapolate(self, loops: Sequence[tuple[int, int]]) -> None:
        """Replace the later iterations of loops with blocks. The loops run together and have equal trip
        counts; each is given as the position of its graph in ``reduced`` and its region.
        """
        inside = [_nodes_inside(self.reduced[position], region) for position, region in loops]
        alone = [
            _loop_alone(self.reduced[position], mine, region)
            for (position, region), mine in zip(loops, inside, strict=True)
        ]
        known: dict[int, list[IterationTimes]] = {}

        def run(number: int, trips: int) -> IterationTimes:
            if trips not in known:
                programs: list[TaskProgram] = []
                for (position, region), graph in zip(loops, alone, strict=True):
                    counts = graph.regions.trips.copy()
                    counts[region] = trips
                    programs.append(self.unrolled(position, with_trips(graph, counts)))
                known[trips] = self.measure([position for position, _ in loops], programs)
            return known[trips][number]

        for number, ((position, region), mine, graph) in enumerate(zip(loops, inside, alone, strict=True)):
            block = _rest_of_loop(partial(run, number), graph, region, self.diagnostics, varies=self.varies)
            self.blocks[position].append(block)
            last = len(self.blocks[position]) - 1
            self.reduced[position] = _collapsed(self.reduced[position], region, mine, block, last)


def too_long(graph: OpGraph, limit: int) -> BoolArray:
    """Return a mask of the loops that must be extrapolated, shape ``(regions,)``, so that the program has at
    most about ``limit`` executions.

    A loop is extrapolated if its unrolled executions exceed an allowance. The allowance starts at ``limit``
    and is halved until the unrolled executions, plus the executions that are simulated to extrapolate the
    other loops, are at most twice the limit. O(regions log limit).
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
        for region in reversed(range(len(parents))):  # children follow their parents
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


def _nodes_inside(graph: OpGraph, region: int) -> BoolArray:
    """Return a mask of the nodes in a region or in a region nested in it."""
    return graph.regions.within(region)[graph.region]


def _loop_alone(graph: OpGraph, inside: BoolArray, region: int) -> OpGraph:
    """Return a graph with only the nodes of a loop. Inputs from outside the loop are ready at the start."""
    rows = np.flatnonzero(inside)
    number = np.cumsum(inside) - 1
    deps: list[RaggedArray] = []
    for table in (graph.data_deps.take(rows), graph.control_deps.take(rows)):
        stays = inside[table.values]
        deps.append(RaggedArray.from_pairs(table.row_ids[stays], number[table.values[stays]], len(table)))
    part = take_nodes(graph, rows, *deps)
    within = graph.regions.within(region)[:-1]
    return with_trips(part, np.where(within, part.regions.trips, 1.0))


class _BlockTasks(NamedTuple):
    """Nodes that replace the later iterations of a loop (a block, see the module), one per stream. Their
    numbers follow ``last``, the last node of the loop.
    """

    last: int
    streams: SmallIntArray

    @property
    def added(self) -> IntArray:
        """Return the numbers of the block's nodes in the new graph."""
        return np.arange(self.last + 1, self.last + 1 + len(self.streams), dtype=np.int64)

    def number(self, old: NDArray[np.integer]) -> IntArray:
        """Return the numbers of old nodes in the new graph."""
        return old.astype(np.int64) + np.where(old > self.last, len(self.streams), 0)


def _collapsed(graph: OpGraph, region: int, inside: BoolArray, block: Block, index: int) -> OpGraph:
    """Return the graph with one iteration of a loop, followed by ``block`` as one node per stream of the
    loop.
    """
    streams = np.unique(graph.stream[inside & (graph.stream >= 0)]).astype(np.int32)
    trips = graph.regions.trips.copy()
    trips[region] = 1.0
    if not len(streams):
        return with_trips(graph, trips)
    block_tasks = _BlockTasks(int(np.flatnonzero(inside)[-1]), streams)
    last = np.full(len(streams), block_tasks.last)
    rows = np.concatenate(
        [np.arange(block_tasks.last + 1), last, np.arange(block_tasks.last + 1, len(graph))]
    )
    none = np.empty(0, np.int32)
    grown = take_nodes(
        (
            replace(
                graph,
                regions=replace(
                    graph.regions, carried_region=none, carried_producer=none, carried_consumer=none
                ),
            )
        ),
        rows,
        *_wired(graph, inside, block_tasks),
    )
    added = block_tasks.added
    table = graph.regions
    other_regions = table.carried_region != region
    row, producer, consumer = (
        column[other_regions]
        for column in (table.carried_region, table.carried_producer, table.carried_consumer)
    )
    leaves = inside[producer] & ~graph.regions.within(region)[row]
    ends = block_tasks.number(consumer)
    grown = replace(
        grown,
        duration_ns=_changed(grown.duration_ns, added, block.duration_ns),
        region=_changed(grown.region, added, int(graph.regions.parent[region])),
        stream=_changed(grown.stream, added, streams),
        source_id=_changed(grown.source_id, added, -1 - index),
        regions=(
            replace(
                table,
                carried_region=np.concatenate([row, np.repeat(row[leaves], len(added))]),
                carried_producer=np.concatenate(
                    [block_tasks.number(producer), np.tile(added, int(leaves.sum()))]
                ).astype(np.int32),
                carried_consumer=np.concatenate([ends, np.repeat(ends[leaves], len(added))]).astype(np.int32),
            )
        ),
    )
    return with_trips(grown, trips)


def _changed(
    column: NDArray[_Scalar], rows: IntArray, value: float | NDArray[np.integer]
) -> NDArray[_Scalar]:
    changed = column.copy()
    changed[rows] = value
    return changed


def _wired(graph: OpGraph, inside: BoolArray, block_tasks: _BlockTasks) -> tuple[RaggedArray, RaggedArray]:
    """Return the data and control dependencies of a graph in which a block replaces the later iterations of a
    loop. The block waits for the first iteration, and consumers of the loop wait for the block.
    """
    count, every = len(graph) + len(block_tasks.streams), all_deps(graph)
    consumers, producers = every.row_ids, every.values
    within = inside[producers] & inside[consumers]
    sinks = inside.copy()
    sinks[producers[within]] = False
    ends = block_tasks.number(np.flatnonzero(sinks))
    behind = block_tasks.number(np.unique(consumers[inside[producers] & ~inside[consumers]]))
    blocks = block_tasks.added
    control = graph.control_deps
    rows = [block_tasks.number(control.row_ids), np.repeat(blocks, len(ends)), np.repeat(behind, len(blocks))]
    values = [block_tasks.number(control.values), np.tile(ends, len(blocks)), np.tile(blocks, len(behind))]
    data = graph.data_deps
    return (
        RaggedArray.from_pairs(block_tasks.number(data.row_ids), block_tasks.number(data.values), count),
        RaggedArray.from_pairs(np.concatenate(rows), np.concatenate(values), count),
    )


_MOST_TRIPS = 32

_FEWEST_TRIPS = 3

_MOST_EXECUTIONS = 300_000
"""Number of executions before the search for a period starts; it limits the iterations of loops with many
nodes.
"""

_FEWEST_EXECUTIONS = 1 + 3 * _FEWEST_TRIPS + 3
"""Number of runs of a loop's nodes to find a period of one iteration: T(1), T(3), T(4), T(5)."""

_MOST_VARIED = 1_000

_LONGEST_PERIOD = 6

_EQUAL = 1e-9
"""Relative tolerance for equal growth of T, whose values are differences of sums."""


class IterationTimes(NamedTuple):
    """Times of some iterations of a loop that runs alone on idle streams [ns]. The fields have the same
    meaning as in :class:`hespas.simulator.schedule.Block`.
    """

    time_ns: float
    exposed_ns: float
    busy_ns: FloatArray
    critical_ns: FloatArray
    wait_ns: FloatArray
    added_ns: float


_Run = Callable[[int], IterationTimes]
"""Function that returns the times of a number of iterations of a loop."""


def _period(run: _Run, trips: int) -> int:
    """Return the smallest number of iterations c (see the module) after which the time of the loop has grown
    by the same amount twice in succession. The growth is measured from ``trips`` iterations on. 0 if there is
    no such c up to the limit.
    """
    for period in range(1, _LONGEST_PERIOD + 1):
        last = run(trips + 2 * period).time_ns
        middle = run(trips + period).time_ns
        if abs((last - middle) - (middle - run(trips).time_ns)) <= _EQUAL * last:
            return period
    return 0


def _rest_of_loop(run: _Run, loop: OpGraph, region: int, diagnostics: Diagnostics, *, varies: bool) -> Block:
    """Return the block for all iterations of ``region`` after the first, extrapolated from runs of a few
    iterations.

    ``loop`` has only the nodes of the loop, reduced by :func:`prepared`. ``run`` returns the times of a
    number of iterations. If times vary between iterations, the loop has no period, and the mean of more
    iterations is extrapolated. If no period is found, the mean of the measured iterations is extrapolated,
    with a warning in ``diagnostics``.
    """
    trips = int(loop.regions.trips[region])
    first = run(1)
    size = max(float((loop.executions / trips).sum()), 1.0)
    seen = max(_FEWEST_TRIPS, min(_MOST_TRIPS, int(_MOST_EXECUTIONS / size)))
    more = max(2 * _LONGEST_PERIOD, min(_MOST_VARIED, int(_MOST_EXECUTIONS / size)) if varies else 0)
    if trips <= seen + more:
        whole = run(trips)
        return _block(region, trips, first, whole, _minus(whole, first))
    period = more if varies else _period(run, seen)
    if not period:
        period = more
        diagnostics.warning(
            "simulate.loop-not-steady",
            loop.name,
            f"a loop of {trips:,} iterations has no period within {seen + period}: the mean of these is used",
        )
    growth = _minus(run(seen + period), run(seen))
    start = run(seen + (trips - seen) % period)
    periods = (trips - seen) // period
    busiest_ns = min(period * float(first.busy_ns.max()), float(growth.busy_ns.max()))
    slowest_ns = max(growth.time_ns, busiest_ns)
    whole = IterationTimes(
        time_ns=start.time_ns + periods * slowest_ns,
        exposed_ns=start.exposed_ns + periods * growth.exposed_ns,
        busy_ns=start.busy_ns + periods * growth.busy_ns,
        critical_ns=start.critical_ns + periods * growth.critical_ns,
        wait_ns=start.wait_ns + periods * growth.wait_ns,
        added_ns=start.added_ns + periods * growth.added_ns,
    )
    return _block(region, trips, first, whole, growth)


def _minus(more: IterationTimes, less: IterationTimes) -> IterationTimes:
    return IterationTimes(
        more.time_ns - less.time_ns,
        more.exposed_ns - less.exposed_ns,
        more.busy_ns - less.busy_ns,
        more.critical_ns - less.critical_ns,
        more.wait_ns - less.wait_ns,
        more.added_ns - less.added_ns,
    )


def _block(
    region: int, trips: int, first: IterationTimes, whole: IterationTimes, growth: IterationTimes
) -> Block:
    """Return the block for the iterations of a loop after the first. ``whole`` has the times of all
    iterations, ``first`` the times of the first one; the difference is the time of the block.

    The critical path of the block is split into operation classes in the same ratio as ``growth``, the times
    that further iterations add.
    """
    rest = _minus(whole, first)
    duration_ns = max(rest.time_ns, 0.0)
    spent = np.maximum(growth.critical_ns, 0.0)  # the path may change streams
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
