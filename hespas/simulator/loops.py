"""Loops: run trip by trip while that is affordable, and beyond as their first trip and a block for the rest.

A loop is unrolled (:class:`hespas.graph.passes.UnrollLoops`) where its executions fit the limit: the schedule
is exact. Any other keeps its first trip as it stands in the program; all later ones are one block on every
stream that the loop uses, which starts when the first trip has ended and which everything behind the loop
waits for. The block takes T(trips) - T(1), where T is the time of the loop alone, on idle streams, which is
measured for a few trips and extrapolated (:mod:`hespas.simulator.steady`). So a loop takes as long as the
unrolled one where nothing else runs beside it and its trips have become periodic by then. What stands outside
overlaps with its first trip, and with all of it on streams that the loop leaves alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Csr, Diagnostics, OpGraph, RegionTable
from hespas.graph.columns import BoolArray, IntArray, SmallIntArray
from hespas.graph.passes import all_deps, take_nodes
from hespas.simulator.columns import flatten, prepared, with_trips
from hespas.simulator.measures import Block, Program
from hespas.simulator.schedule import Priority
from hespas.simulator.steady import FEWEST_EXECUTIONS, rest_of_loop
from hespas.simulator.streams import STREAMS

__all__ = ["expanded", "too_long"]

_Scalar = TypeVar("_Scalar", bound=np.generic)


def expanded(graph: OpGraph, limit: int, priority: Priority, diagnostics: Diagnostics) -> Program:
    """The program of a graph with at most about ``limit`` executions (its nodes, if they are more).

    Its times and trip counts are known. O(executions), and O(nodes) per loop.
    """
    reduced = prepared(graph)
    chosen = too_long(reduced, limit)
    if not chosen.any():
        return flatten(reduced, ())
    blocks: list[Block] = []
    for region in np.flatnonzero(chosen)[::-1].tolist():  # inner loops first
        inside = _inside(reduced, region)
        trips = int(reduced.regions.trips[region])
        alone = _alone(reduced, inside, region)
        block = rest_of_loop(alone, region, trips, tuple(blocks), priority=priority, diagnostics=diagnostics)
        blocks.append(block)
        reduced = _collapsed(reduced, region, inside, block, len(blocks) - 1)
    told = sum(block.trips for block in blocks)
    diagnostics.info(
        "simulate.extrapolated-loops",
        graph.name,
        f"loops run once and then by their steady state, {told:,} trips in all",
        count=len(blocks),
    )
    return flatten(reduced, tuple(blocks))


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
                work += FEWEST_EXECUTIONS * size
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


def _inside(graph: OpGraph, region: int) -> BoolArray:
    """Which nodes stand in a region or in one nested in it."""
    return _nested(graph, region)[graph.region]


def _nested(graph: OpGraph, region: int) -> BoolArray:
    """Which regions are a region or stand in it; one more row for the top level, which never is."""
    within = np.zeros(len(graph.regions) + 1, np.bool_)
    within[region] = True
    for row, parent in enumerate(graph.regions.parent.tolist()):
        if parent >= 0 and within[parent]:
            within[row] = True
    return within


def _alone(graph: OpGraph, inside: BoolArray, region: int) -> OpGraph:
    """Only the nodes of a loop, in a program that does nothing else; what they need from outside is there."""
    rows = np.flatnonzero(inside)
    number = np.cumsum(inside) - 1
    deps = (_within(each.take(rows), inside, number) for each in (graph.data_deps, graph.control_deps))
    part = take_nodes(graph, rows, *deps)
    within = _nested(graph, region)[:-1]
    return with_trips(part, np.where(within, part.regions.trips, 1.0))


def _within(deps: Csr, inside: BoolArray, number: IntArray) -> Csr:
    kept = inside[deps.values]
    return Csr.from_pairs(deps.row_ids[kept], number[deps.values[kept]], len(deps))


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


def _collapsed(graph: OpGraph, region: int, inside: BoolArray, block: Block, index: int) -> OpGraph:
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


def _wired(graph: OpGraph, inside: BoolArray, places: _Places) -> tuple[Csr, Csr]:
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
        Csr.from_pairs(places.number(data.row_ids), places.number(data.values), count),
        Csr.from_pairs(np.concatenate(rows), np.concatenate(values), count),
    )


def _recarried(graph: OpGraph, region: int, inside: BoolArray, places: _Places) -> RegionTable:
    """Carried values in new numbers; what enclosing loops take from this one waits for its block, too."""
    table = graph.regions
    kept = table.carried_region != region
    row, producer, consumer = (
        column[kept] for column in (table.carried_region, table.carried_producer, table.carried_consumer)
    )
    leaves = inside[producer] & ~_nested(graph, region)[row]
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
