"""Unrolling of loops, for formats and simulators that do not support them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.graph.builder import region_executions
from hespas.graph.columns import BoolArray, FloatArray, IntArray, RaggedArray, StringTableBuilder, constant
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import InvariantError, UnsupportedError
from hespas.graph.opgraph import NODE_COLUMNS, OpClass, OpGraph, RegionTable
from hespas.graph.passes.order import all_deps, find_cycle
from hespas.graph.passes.rewrite import bypass, take_nodes

__all__ = ["UnrollLoops"]

_SHOWN = 8
"""Limit of nodes of a cycle that an error lists."""
_MOST_WAITS = 256
"""Limit of (last node, first node) pairs between two iterations; beyond it, one extra node joins them."""

_TRIP_END = "hespas.trip_end"


@dataclass(frozen=True, slots=True)
class UnrollLoops:
    """Pass that repeats the nodes of each loop once per iteration.

    An iteration starts when the previous one has ended, as XLA runs the body of a ``while`` as a whole. With
    ``overlap_trips`` a node waits only for the values carried over from the previous iteration. Nodes without
    dependencies in an iteration wait, by control dependencies, for all nodes of the previous iteration on
    which no other node depends. If these pairs are many, they wait for one zero-cost node that ends the
    iteration.

    Nodes after the loop wait for its last iteration. A node whose only operand is a carried value depends on
    the initial value in the first iteration only. Nodes with more operands depend on it in every iteration,
    because the graph does not state which operand is carried. ``unknown_trips`` replaces an unknown trip
    count (None: an error). FLOPs, bytes and collectives are exact; ids are new if a node is repeated. Raises
    ``UnsupportedError`` beyond ``max_nodes``, and if a dependency leaves a loop and returns. O(nodes of the
    result), and O(nodes) for each loop.
    """

    max_nodes: int = 5_000_000
    unknown_trips: int | None = None
    overlap_trips: bool = False

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Return the graph without regions, of which each node is executed once."""
        graph = self._settle_trips(graph, diagnostics)
        product = region_executions(graph.regions, graph.region)
        other = np.flatnonzero((graph.executions != product) & (graph.executions != 0))
        if len(other):
            node = int(other[0])
            name, times = graph.node_name(node) or graph.op_name(node), float(graph.executions[node])
            raise UnsupportedError(
                f"{name} runs {times:,g} times, its loops {float(product[node]):,g} times",
                position=f"{graph.name or 'graph'}: node {int(graph.id[node])}",
                hint="place the node in a region with that number of trips",
            )
        with np.errstate(over="ignore"):
            total = float(product.sum())
        if total > self.max_nodes:
            raise UnsupportedError(
                f"{graph.name or 'the graph'}: unrolling all loops makes {total:,.0f} operations "
                f"(limit {self.max_nodes:,})",
                hint="write an op-graph, which keeps loops, or convert with `granularity=region`, which "
                "merges loop bodies first",
            )
        if len(graph.regions):
            graph = bypass(graph, graph.executions == 0)
        for region in reversed(range(len(graph.regions))):  # children follow their parents
            trips = int(graph.regions.trips[region])
            if trips > 1:
                graph = _repeat(graph, region, trips, overlap=self.overlap_trips)
        cycle = find_cycle(graph) if len(graph.regions) else ()
        if cycle:  # an iteration waits for a later one
            shown = " -> ".join(str(int(graph.id[node])) for node in cycle[:_SHOWN])
            raise UnsupportedError(
                f"{graph.name or 'the graph'}: dependencies leave a loop and come back into it: {shown}",
                hint="correct the regions or the dependencies: dependants of a loop start after it ends",
            )
        nodes = len(graph)
        has_copies = len(np.unique(graph.id)) < nodes
        return replace(
            graph,
            id=np.arange(nodes, dtype=np.uint64) if has_copies else graph.id,
            regions=RegionTable.empty(),
            region=np.broadcast_to(np.int32(-1), (nodes,)),
            executions=constant(1.0, nodes),
        )

    def _settle_trips(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Return the graph in which the trip count of every loop is a known whole number."""
        table = graph.regions
        unknown = np.isnan(table.trips)
        whole = np.rint(table.trips)
        diagnostics.warning(
            "pass.fractional-trips",
            graph.name,
            "loops with a fractional number of trips run the nearest whole number",
            count=int((~unknown & (whole != table.trips)).sum()),
        )
        if not unknown.any():
            return graph if np.array_equal(whole, table.trips) else _with_trips(graph, whole)
        names = sorted({graph.strings[row] for row in table.label[unknown].tolist()})
        if self.unknown_trips is None:
            raise UnsupportedError(
                f"{graph.name or 'the graph'}: {int(unknown.sum())} loops have a trip count that is "
                f"only known at run time: {', '.join(names[:5])}",
                hint="`on_unknown=warn` assumes one iteration for each, `on_unknown=zero` removes them",
            )
        diagnostics.warning(
            "pass.assumed-trips",
            graph.name,
            f"loops with unknown trip count taken as {self.unknown_trips}: {', '.join(names[:5])}",
            count=int(unknown.sum()),
        )
        return _with_trips(graph, np.where(unknown, float(self.unknown_trips), whole))


def _with_trips(graph: OpGraph, trips: FloatArray) -> OpGraph:
    """Return the graph with other trip counts, shape ``(regions,)``."""
    regions = replace(graph.regions, trips=trips)
    return replace(graph, regions=regions, executions=region_executions(regions, graph.region))


class _LoopCopies(NamedTuple):
    """Node numbers after the nodes of one region are repeated.

    ``inside`` is True for old nodes of the region. ``number`` is the new number of an old node for nodes
    outside the region: the number of its last copy. Copies of the ``size`` nodes of an iteration are
    contiguous, so the copy for the next iteration is ``size`` nodes later. ``rows`` is the old node of each
    new node, ``trip`` its iteration from 0 (-1: outside the region).
    """

    inside: BoolArray
    number: IntArray
    trips: int
    size: int
    rows: IntArray
    trip: IntArray

    @classmethod
    def of(cls, inside: BoolArray, trips: int) -> _LoopCopies:
        """Choose positions for the copies of a loop's nodes: after all outside nodes that precede the last
        node of the region.
        """
        body = np.flatnonzero(inside)
        last, size = int(body[-1]), len(body)
        before, after = np.flatnonzero(~inside[: last + 1]), np.arange(last + 1, len(inside))
        number = np.empty(len(inside), np.int64)
        number[before] = np.arange(len(before))
        number[body] = len(before) + (trips - 1) * size + np.arange(size)
        number[after] = len(before) + trips * size + np.arange(len(after))
        rows = np.concatenate([before, np.tile(body, trips), after])
        trip = np.full(len(rows), -1, np.int64)
        trip[len(before) : len(before) + trips * size] = np.repeat(np.arange(trips), size)
        return cls(inside, number, trips, size, rows, trip)


def _repeat(graph: OpGraph, region: int, trips: int, *, overlap: bool) -> OpGraph:
    """Return the graph with the nodes of one region repeated ``trips`` times, copies contiguous per
    iteration.

    Raises ``InvariantError`` if a carried edge leaves the loop: passes keep both ends inside.
    """
    inside = graph.regions.within(region)[graph.region]
    if not inside.any():
        return graph
    waits = _IterationWaits.none()
    if not overlap:
        graph, inside, waits = _in_sequence(graph, region, inside)
    copies = _LoopCopies.of(inside, trips)
    carried = graph.regions.carried_region == region
    data = _repeat_deps(graph.data_deps, copies)
    consumer, producer = graph.regions.carried_consumer[carried], graph.regions.carried_producer[carried]
    outside = ~(inside[producer] & inside[consumer])
    if outside.any():
        maker, user = (graph.node_name(int(ends[outside][0])) for ends in (producer, consumer))
        raise InvariantError(f"{graph.name}: a value carried from {maker} to {user} leaves its loop")
    values = _IterationWaits(consumer.astype(np.int64), producer.astype(np.int64))
    # Later iterations of a node whose only operand is a value that the loop carries, and whose dependency is
    # its initial value, depend on the carried value only.
    flags = np.zeros(len(graph), np.bool_)
    made_inside = inside[graph.regions.carried_producer]
    flags[graph.regions.carried_consumer[carried & made_inside]] = True
    flags &= inside & (graph.operands.lengths == 1) & (graph.data_deps.lengths == 1)
    rows = np.flatnonzero(flags)
    start = graph.data_deps.values[graph.data_deps.offsets[rows]]
    flags[rows[inside[start]]] = False
    later = flags[copies.rows] & (copies.trip > 0)
    data = RaggedArray.from_lengths(np.where(later, 0, data.lengths), data.values[~later[data.row_ids]])
    data = _add_waits(data, values, copies)
    control = _add_waits(_repeat_deps(graph.control_deps, copies), waits.less(values), copies)
    inner = replace(
        graph.regions,
        carried_region=graph.regions.carried_region[~carried],
        carried_producer=graph.regions.carried_producer[~carried],
        carried_consumer=graph.regions.carried_consumer[~carried],
    )
    return take_nodes(replace(graph, regions=inner), copies.rows, data, control)


class _IterationWaits(NamedTuple):
    """Dependencies between consecutive iterations of a loop, as pairs of nodes: the consumer waits for the
    producer of the previous iteration.
    """

    consumer: IntArray
    producer: IntArray

    @classmethod
    def none(cls) -> _IterationWaits:
        """Return an empty table of pairs."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    def less(self, others: _IterationWaits) -> _IterationWaits:
        """Return the pairs that are not in ``others``."""
        if not len(others.consumer) or not len(self.consumer):
            return self
        most = 1 + max(int(self.producer.max()), int(others.producer.max()))
        own, other = (waits.consumer * most + waits.producer for waits in (self, others))
        remaining = ~np.isin(own, other)
        return _IterationWaits(self.consumer[remaining], self.producer[remaining])


def _in_sequence(
    graph: OpGraph, region: int, inside: BoolArray
) -> tuple[OpGraph, BoolArray, _IterationWaits]:
    """Return the dependencies that make the iterations of a loop run one after another.

    In each iteration, the nodes without dependencies in the loop wait for the last nodes of the previous
    iteration (on which no other node of it depends). If these pairs are many, the returned graph has one more
    node that joins them at the end of an iteration. Also return a mask of the nodes in the loop.
    """
    deps = all_deps(graph)
    within = inside[deps.row_ids] & inside[deps.values]
    begins, ends = inside.copy(), inside.copy()
    begins[deps.row_ids[within]] = False
    ends[deps.values[within]] = False
    first, last = np.flatnonzero(begins), np.flatnonzero(ends)
    if len(first) * len(last) <= _MOST_WAITS:
        return graph, inside, _IterationWaits(np.repeat(first, len(last)), np.tile(last, len(first)))
    position = int(np.flatnonzero(inside)[-1]) + 1
    grown = _with_node(graph, position, region, last)
    first += first >= position
    return grown, np.insert(inside, position, True), _IterationWaits(first, np.full(len(first), position))


def _with_node(graph: OpGraph, position: int, region: int, waits_for: IntArray) -> OpGraph:
    """Return the graph with one additional zero-cost node at ``position`` in a region. It depends on the
    nodes ``waits_for``, so that other nodes can depend on it alone.
    """
    nodes = len(graph)
    strings = StringTableBuilder(graph.strings)
    name = strings.add(_TRIP_END)
    values: dict[str, float] = {"name_id": name, "op_id": name, "op_class": OpClass.FREE, "region": region}
    values |= {"stream": -1, "rate_dtype": -1}
    if np.isnan(graph.duration_ns).all():
        values["duration_ns"] = nan  # durations are unknown as yet
    columns: dict[str, Any] = {}
    for key in NODE_COLUMNS:
        column: NDArray[np.generic] = getattr(graph, key)
        columns[key] = np.append(column, np.array([values.get(key, 0)], column.dtype))
    for key in ("data_deps", "control_deps", "operands", "results"):
        deps: RaggedArray = getattr(graph, key)
        columns[key] = RaggedArray(np.append(deps.offsets, deps.offsets[-1]), deps.values)
    longer = replace(graph, strings=strings.build(), **columns)
    rows = np.insert(np.arange(nodes), position, nodes)
    number = np.arange(nodes)
    number[position:] += 1

    def moved(deps: RaggedArray, more: IntArray) -> RaggedArray:
        consumers = np.concatenate([number[deps.row_ids], np.full(len(more), position)])
        return RaggedArray.from_pairs(
            consumers, np.concatenate([number[deps.values], number[more]]), nodes + 1
        )

    data = moved(graph.data_deps, np.empty(0, np.int64))
    return take_nodes(longer, rows, data, moved(graph.control_deps, waits_for))


def _repeat_deps(deps: RaggedArray, copies: _LoopCopies) -> RaggedArray:
    """Return the dependencies after a loop is unrolled. A copy depends on copies of the same iteration; a
    node outside of the loop depends on copies of the last iteration.
    """
    if not len(deps.values):
        return RaggedArray.empty(len(copies.rows))
    taken = deps.take(copies.rows)
    consumer_trip = copies.trip[taken.row_ids]
    values = copies.number[taken.values]
    same_trip = copies.inside[taken.values] & (consumer_trip >= 0)
    values[same_trip] -= (copies.trips - 1 - consumer_trip[same_trip]) * copies.size
    return RaggedArray(taken.offsets, values.astype(np.int32))


def _add_waits(deps: RaggedArray, waits: _IterationWaits, copies: _LoopCopies) -> RaggedArray:
    """Return ``deps`` with dependencies of each iteration but the first on the previous one added."""
    to, of = waits
    if not len(to):
        return deps
    back = np.repeat((copies.trips - 1 - np.arange(1, copies.trips)) * copies.size, len(to))
    consumer = np.tile(copies.number[to], copies.trips - 1) - back
    producer = np.tile(copies.number[of], copies.trips - 1) - back - copies.size
    rows = np.concatenate([deps.row_ids, consumer])
    values = np.concatenate([deps.values.astype(np.int64), producer])
    return RaggedArray.from_pairs(rows, values, len(deps))
