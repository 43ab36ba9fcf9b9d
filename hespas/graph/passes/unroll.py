"""Make a program with loops flat, for formats and simulators that know none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import BoolArray, FloatArray, IntArray, RaggedArray, StringTableBuilder, constant
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import InvariantError, UnsupportedError
from hespas.graph.opgraph import NODE_COLUMNS, OpClass, OpGraph, RegionTable
from hespas.graph.passes.order import all_deps, find_cycle
from hespas.graph.passes.rewrite import bypass, take_nodes

__all__ = ["UnrollLoops"]

_SHOWN = 8
_MOST_WAITS = 256
"""Past so many pairs of a node that ends a trip and one that begins the next, a node stands between them."""

_TRIP_END = "hespas.trip_end"


@dataclass(frozen=True, slots=True)
class UnrollLoops:
    """Repeat the nodes of each loop as often as it runs, trip after trip.

    A trip begins when the one before has ended, as XLA runs the body of a ``while`` as a whole; with
    ``overlap_trips`` a node waits only for the values that the trip before carried over to it. What waits
    within a trip for nothing waits, by control dependencies, for all that nothing in the trip before waited
    for; where these pairs are many, for a node that ends the trip and takes no time.

    What stands behind the loop waits for its last trip. A node whose one operand is a carried value needs
    what the loop starts with in the first trip only; nodes with more operands keep that dependency in every
    trip, because the graph does not say which operand is carried. ``unknown_trips`` stands in where a count
    is not known (None: an error). Exact in FLOPs, bytes and collectives; ids are new where a node is
    repeated. Raises ``UnsupportedError`` past ``max_nodes``, and where a dependency leaves a loop and comes
    back. O(nodes out), and O(nodes) for each loop.
    """

    max_nodes: int = 5_000_000
    unknown_trips: int | None = None
    overlap_trips: bool = False

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The flat graph: no regions, multiplicity 1."""
        graph = self._settle_trips(graph, diagnostics)
        _refuse_own_counts(graph)
        with np.errstate(over="ignore"):  # infinitely many are too many, too
            total = float(region_multiplicity(graph.regions, graph.region).sum())
        if total > self.max_nodes:
            raise UnsupportedError(
                f"{graph.name or 'the graph'}: unrolling all loops makes {total:,.0f} operations "
                f"(limit {self.max_nodes:,})",
                hint="write an op-graph, which keeps loops, or convert with `granularity=region`, which "
                "merges loop bodies first",
            )
        if len(graph.regions):
            graph = bypass(graph, graph.multiplicity == 0)
        for region in reversed(range(len(graph.regions))):  # children stand after their parents
            trips = int(graph.regions.trips[region])
            if trips > 1:
                graph = _repeat(graph, region, trips, overlap=self.overlap_trips)
        if len(graph.regions):
            _refuse_cycle(graph)
        nodes = len(graph)
        return replace(
            graph,
            id=_unique(graph.id),
            regions=RegionTable.empty(),
            region=np.broadcast_to(np.int32(-1), (nodes,)),
            multiplicity=constant(1.0, nodes),
        )

    def _settle_trips(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Return the graph with every trip count known and whole."""
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
                f"{graph.name or 'the graph'}: {int(unknown.sum())} loops with a trip count known at run "
                f"time only: {', '.join(names[:5])}",
                hint="`on_unknown=warn` counts each as one trip, `on_unknown=zero` leaves them out",
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
    return replace(graph, regions=regions, multiplicity=region_multiplicity(regions, graph.region))


def _refuse_own_counts(graph: OpGraph) -> None:
    """Raise ``UnsupportedError`` where a node runs at all but not as often as its loops do."""
    product = region_multiplicity(graph.regions, graph.region)
    other = np.flatnonzero((graph.multiplicity != product) & (graph.multiplicity != 0))
    if len(other):
        node = int(other[0])
        name, times = graph.node_name(node) or graph.op_name(node), float(graph.multiplicity[node])
        raise UnsupportedError(
            f"{name} runs {times:,g} times, its loops {float(product[node]):,g} times",
            position=f"{graph.name or 'graph'}: node {int(graph.id[node])}",
            hint="place the node in a region with that number of trips",
        )


def _refuse_cycle(graph: OpGraph) -> None:
    """Raise ``UnsupportedError`` where a trip waits for a later one: dependencies that leave a loop and come
    back make a cycle once it is unrolled.
    """
    cycle = find_cycle(graph)
    if cycle:
        ids = " -> ".join(str(int(graph.id[node])) for node in cycle[:_SHOWN])
        raise UnsupportedError(
            f"{graph.name or 'the graph'}: dependencies leave a loop and come back into it: {ids}",
            hint="a loop ends before what waits for it begins: correct the regions or the dependencies",
        )


class _Copies(NamedTuple):
    """How the nodes of one region are repeated.

    ``inside`` says which old nodes are; ``number`` is the new number of an old node as seen from outside: its
    last copy. Copies of ``size`` nodes stand together per trip, so a copy stands ``size`` before that of the
    next trip. ``rows`` and ``trip`` are the old node and the trip (-1: outside) of each new node.
    """

    inside: BoolArray
    number: IntArray
    trips: int
    size: int
    rows: IntArray
    trip: IntArray


def _plan(inside: BoolArray, trips: int) -> _Copies:
    """Where copies go: behind all that stands before the region's last node and does not belong to it."""
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
    return _Copies(inside, number, trips, size, rows, trip)


def _repeat(graph: OpGraph, region: int, trips: int, *, overlap: bool) -> OpGraph:
    """The graph with the nodes of one region repeated ``trips`` times, copies standing together per trip."""
    inside = graph.regions.within(region)[graph.region]
    if not inside.any():
        return graph
    waits = _Waits.none()
    if not overlap:
        graph, inside, waits = _in_sequence(graph, region, inside)
    copies = _plan(inside, trips)
    carried = graph.regions.carried_region == region
    data = _repeat_deps(graph.data_deps, copies)
    starts = _starts_only(graph, carried, inside)[copies.rows] & (copies.trip > 0)
    values = _carried(graph, carried, copies)
    data = _add_waits(_without(data, starts), values, copies)
    control = _add_waits(_repeat_deps(graph.control_deps, copies), waits.less(values), copies)
    inner = replace(
        graph.regions,
        carried_region=graph.regions.carried_region[~carried],
        carried_producer=graph.regions.carried_producer[~carried],
        carried_consumer=graph.regions.carried_consumer[~carried],
    )
    return take_nodes(replace(graph, regions=inner), copies.rows, data, control)


class _Waits(NamedTuple):
    """Nodes of a loop that wait for others of the trip before, pair by pair."""

    consumer: IntArray
    producer: IntArray

    @classmethod
    def none(cls) -> _Waits:
        """No pairs."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    def less(self, others: _Waits) -> _Waits:
        """Those that are not among others."""
        if not len(others.consumer) or not len(self.consumer):
            return self
        most = 1 + max(int(self.producer.max()), int(others.producer.max()))
        mine, theirs = (each.consumer * most + each.producer for each in (self, others))
        kept = ~np.isin(mine, theirs)
        return _Waits(self.consumer[kept], self.producer[kept])


def _in_sequence(graph: OpGraph, region: int, inside: BoolArray) -> tuple[OpGraph, BoolArray, _Waits]:
    """What lets a trip begin when the one before has ended: waits, and where they would be many, a node more
    inside, which waits for the trip.
    """
    deps = all_deps(graph)
    within = inside[deps.row_ids] & inside[deps.values]
    begins, ends = inside.copy(), inside.copy()
    begins[deps.row_ids[within]] = False
    ends[deps.values[within]] = False
    first, last = np.flatnonzero(begins), np.flatnonzero(ends)
    if len(first) * len(last) <= _MOST_WAITS:
        return graph, inside, _Waits(np.repeat(first, len(last)), np.tile(last, len(first)))
    place = int(np.flatnonzero(inside)[-1]) + 1
    grown = _with_node(graph, place, region, last)
    first += first >= place
    return grown, np.insert(inside, place, True), _Waits(first, np.full(len(first), place))


def _with_node(graph: OpGraph, place: int, region: int, waits_for: IntArray) -> OpGraph:
    """The graph with one more node of a region at ``place``, which costs nothing."""
    nodes = len(graph)
    strings = StringTableBuilder(graph.strings)
    name = strings.add(_TRIP_END)
    stated: dict[str, float] = {"name_row": name, "op_row": name, "op_class": OpClass.FREE, "region": region}
    stated |= {"stream": -1, "rate_dtype": -1}
    if np.isnan(graph.duration_ns).all():
        stated["duration_ns"] = nan  # nobody has said times yet
    columns: dict[str, Any] = {}
    for key in NODE_COLUMNS:
        column: NDArray[np.generic] = getattr(graph, key)
        columns[key] = np.append(column, np.array([stated.get(key, 0)], column.dtype))
    for key in ("data_deps", "control_deps", "operands", "results"):
        deps: RaggedArray = getattr(graph, key)
        columns[key] = RaggedArray(np.append(deps.offsets, deps.offsets[-1]), deps.values)
    longer = replace(graph, strings=strings.build(), **columns)
    rows = np.insert(np.arange(nodes), place, nodes)
    number = np.arange(nodes)
    number[place:] += 1

    def moved(deps: RaggedArray, more: IntArray) -> RaggedArray:
        consumers = np.concatenate([number[deps.row_ids], np.full(len(more), place)])
        return RaggedArray.from_pairs(
            consumers, np.concatenate([number[deps.values], number[more]]), nodes + 1
        )

    data = moved(graph.data_deps, np.empty(0, np.int64))
    return take_nodes(longer, rows, data, moved(graph.control_deps, waits_for))


def _repeat_deps(deps: RaggedArray, copies: _Copies) -> RaggedArray:
    """Dependencies of the repeated nodes: within the same trip inside, on the last trip from outside."""
    if not len(deps.values):
        return RaggedArray.empty(len(copies.rows))
    taken = deps.take(copies.rows)
    consumer_trip = copies.trip[taken.row_ids]
    values = copies.number[taken.values]
    same_trip = copies.inside[taken.values] & (consumer_trip >= 0)
    values[same_trip] -= (copies.trips - 1 - consumer_trip[same_trip]) * copies.size
    return RaggedArray(taken.offsets, values.astype(np.int32))


def _starts_only(graph: OpGraph, carried: BoolArray, inside: BoolArray) -> BoolArray:
    """Which nodes have one operand, a carried value, and depend only on what the loop starts it with."""
    found = np.zeros(len(graph), np.bool_)
    made_inside = inside[graph.regions.carried_producer]
    found[graph.regions.carried_consumer[carried & made_inside]] = True
    found &= inside & (graph.operands.lengths == 1) & (graph.data_deps.lengths == 1)
    rows = np.flatnonzero(found)
    start = graph.data_deps.values[graph.data_deps.offsets[rows]]
    found[rows[inside[start]]] = False
    return found


def _without(deps: RaggedArray, rows: BoolArray) -> RaggedArray:
    """Dependencies less all those of some rows."""
    kept = ~rows[deps.row_ids]
    return RaggedArray.from_lengths(np.where(rows, 0, deps.lengths), deps.values[kept])


def _carried(graph: OpGraph, carried: BoolArray, copies: _Copies) -> _Waits:
    """Who waits for a value that the trip before carries over.

    Raises ``InvariantError`` where an edge leaves the loop: passes keep both ends inside.
    """
    to, of = graph.regions.carried_consumer[carried], graph.regions.carried_producer[carried]
    outside = ~(copies.inside[of] & copies.inside[to])
    if outside.any():
        maker, user = (graph.node_name(int(ends[outside][0])) for ends in (of, to))
        raise InvariantError(f"{graph.name}: a value carried from {maker} to {user} leaves its loop")
    return _Waits(to.astype(np.int64), of.astype(np.int64))


def _add_waits(deps: RaggedArray, waits: _Waits, copies: _Copies) -> RaggedArray:
    """Add, for each trip but the first, the dependence on the trip before."""
    to, of = waits
    if not len(to):
        return deps
    back = np.repeat((copies.trips - 1 - np.arange(1, copies.trips)) * copies.size, len(to))
    consumer = np.tile(copies.number[to], copies.trips - 1) - back
    producer = np.tile(copies.number[of], copies.trips - 1) - back - copies.size
    rows = np.concatenate([deps.row_ids, consumer])
    values = np.concatenate([deps.values.astype(np.int64), producer])
    return RaggedArray.from_pairs(rows, values, len(deps))


def _unique(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The ids as they are, or new ones where repeated nodes have those of their originals."""
    if len(np.unique(ids)) == len(ids):
        return ids
    return np.arange(len(ids), dtype=np.uint64)
