"""Make a program with loops flat, for formats and simulators that know none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import BoolArray, Csr, IntArray, constant
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UnsupportedError
from hespas.graph.kinds import RegionKind
from hespas.graph.opgraph import OpGraph
from hespas.graph.passes.rewrite import bypass, take_nodes
from hespas.graph.tables import RegionTable

__all__ = ["UnrollLoops"]

_LOOPS = (int(RegionKind.LOOP_BODY), int(RegionKind.LOOP_CONDITION))


@dataclass(frozen=True, slots=True)
class UnrollLoops:
    """Repeat the nodes of each loop as often as it runs, trip after trip.

    A trip waits for the values the trip before it carried over; what stands behind the loop waits for its
    last trip. ``unknown_trips`` stands in where a count is not known (None: an error). Exact in FLOPs, bytes
    and collectives. Raises ``UnsupportedError`` past ``max_nodes``. O(nodes out).
    """

    max_nodes: int = 5_000_000
    unknown_trips: int | None = None

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The flat graph: no regions, multiplicity 1."""
        graph = self._settle_trips(graph, diagnostics)
        total = float(graph.multiplicity.sum())
        if total > self.max_nodes:
            raise UnsupportedError(
                f"{graph.name}: unrolling all loops makes {total:,.0f} operations (limit {self.max_nodes:,})",
                hint="convert with --granularity region, which merges loop bodies first",
            )
        if len(graph.regions):
            graph = bypass(graph, graph.multiplicity == 0)
        for region in reversed(range(len(graph.regions))):  # children stand after their parents
            trips = int(graph.regions.trips[region])
            if trips > 1 and int(graph.regions.kind[region]) in _LOOPS:
                graph = _repeat(graph, region, trips)
        nodes = len(graph)
        return replace(
            graph,
            regions=RegionTable.empty(),
            region=np.broadcast_to(np.int32(-1), (nodes,)),
            multiplicity=constant(1.0, nodes),
        )

    def _settle_trips(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph with every trip count known."""
        table = graph.regions
        unknown = np.isnan(table.trips)
        if not unknown.any():
            return graph
        names = sorted({graph.strings[row] for row in table.label[unknown].tolist()})
        if self.unknown_trips is None:
            raise UnsupportedError(
                f"{graph.name}: {int(unknown.sum())} loops with a trip count known at run time only: "
                f"{', '.join(names[:5])}",
                hint="--missing warn counts each as one trip, --missing zero leaves them out",
            )
        diagnostics.warning(
            "pass.assumed-trips",
            graph.name,
            f"loops with unknown trip count taken as {self.unknown_trips}: {', '.join(names[:5])}",
            count=int(unknown.sum()),
        )
        settled = replace(table, trips=np.where(unknown, float(self.unknown_trips), table.trips))
        return replace(graph, regions=settled, multiplicity=region_multiplicity(settled, graph.region))


def _inside(graph: OpGraph, region: int) -> BoolArray:
    """Which nodes stand in a region or in one nested in it."""
    within = np.zeros(len(graph.regions) + 1, np.bool_)
    within[region] = True
    for row, parent in enumerate(graph.regions.parent.tolist()):
        if parent >= 0 and within[parent]:
            within[row] = True
    return within[graph.region]


def _repeat(graph: OpGraph, region: int, trips: int) -> OpGraph:
    """The graph with the nodes of one region repeated ``trips`` times, copies standing together per trip."""
    inside = _inside(graph, region)
    body = np.flatnonzero(inside)
    if not len(body):
        return graph
    last = int(body[-1])
    before, after = np.flatnonzero(~inside[: last + 1]), np.arange(last + 1, len(graph))
    rows = np.concatenate([before, np.tile(body, trips), after])
    copies = len(body)
    number = np.empty(len(graph), np.int64)  # new number of a node seen from outside: its last copy
    number[before] = np.arange(len(before))
    number[body] = len(before) + (trips - 1) * copies + np.arange(copies)
    number[after] = len(before) + trips * copies + np.arange(len(after))
    trip = np.full(len(rows), -1, np.int64)
    trip[len(before) : len(before) + trips * copies] = np.repeat(np.arange(trips), copies)
    carried = graph.regions.carried_region == region
    data = _repeat_deps(graph.data_deps.take(rows), trip, number, inside, (trips, copies))
    data = _add_carried(data, graph, carried, number, (trips, copies))
    control = _repeat_deps(graph.control_deps.take(rows), trip, number, inside, (trips, copies))
    inner = replace(
        graph.regions,
        carried_region=graph.regions.carried_region[~carried],
        carried_producer=graph.regions.carried_producer[~carried],
        carried_consumer=graph.regions.carried_consumer[~carried],
    )
    return take_nodes(replace(graph, regions=inner), rows, data, control)


def _repeat_deps(
    taken: Csr, trip: IntArray, number: IntArray, inside: BoolArray, shape: tuple[int, int]
) -> Csr:
    """Dependencies of the repeated nodes: within the same trip inside, on the last trip from outside."""
    if not len(taken.values):
        return Csr.empty(len(taken))
    trips, copies = shape
    consumer_trip = trip[taken.row_ids]
    values = number[taken.values]
    same_trip = inside[taken.values] & (consumer_trip >= 0)
    values[same_trip] -= (trips - 1 - consumer_trip[same_trip]) * copies
    return Csr(taken.offsets, values.astype(np.int32))


def _add_carried(
    data: Csr,
    graph: OpGraph,
    carried: BoolArray,
    number: IntArray,
    shape: tuple[int, int],
) -> Csr:
    """Add, for each trip but the first, the dependence on what the trip before carried over."""
    if not carried.any():
        return data
    trips, copies = shape
    back = np.repeat((trips - 1 - np.arange(1, trips)) * copies, int(carried.sum()))
    consumer = np.tile(number[graph.regions.carried_consumer[carried]], trips - 1) - back
    producer = np.tile(number[graph.regions.carried_producer[carried]], trips - 1) - back - copies
    rows = np.concatenate([data.row_ids, consumer])
    values = np.concatenate([data.values.astype(np.int64), producer])
    return Csr.from_pairs(rows, values, len(data))
