"""Graphs reduced to what a schedule needs, and their loops as the trips that run.

Passes copy these columns with the nodes and look at none of them: ``stream`` holds the code to run on,
``source_row`` the number of the node in the graph the user knows, -1 - b for block b, or that a trip ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.graph import (
    CollectiveTable,
    ContractionTable,
    Diagnostics,
    ExtraTable,
    OpGraph,
    P2pTable,
    RegionKind,
)
from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import Csr, FloatArray, IntArray
from hespas.graph.opgraph import RegionTable
from hespas.graph.passes import UnrollLoops, all_deps, bypass, take_nodes
from hespas.simulator.progress import Pressure
from hespas.simulator.schedule import Block, Program, Tasks
from hespas.simulator.streams import FREE, stream_codes

__all__ = ["flatten", "prepared", "with_trips"]

_Column = TypeVar("_Column", bound=NDArray[Any])


def prepared(graph: OpGraph, *, overlap_trips: bool) -> OpGraph:
    """The graph without side tables and branches not taken; regions that run several times are loops, whose
    trips run one after the other, or overlap as far as their values allow.
    """
    nodes, regions = len(graph), graph.regions
    kind = np.where(regions.trips > 1, int(RegionKind.LOOP_BODY), regions.kind).astype(np.uint8)
    stream = stream_codes(graph)
    reduced = replace(
        graph,
        group_sets=(),
        permutations=(),
        collectives=CollectiveTable.empty(),
        p2p=P2pTable.empty(),
        contractions=ContractionTable.empty(),
        extra=ExtraTable.empty(),
        results=Csr.empty(nodes),
        attachments={},
        stream=stream,
        source_row=np.arange(nodes, dtype=np.int32),
        duration_ns=np.where(stream == FREE, 0.0, graph.duration_ns),
        regions=replace(regions, kind=kind),
    )
    untaken = graph.multiplicity == 0
    taken = bypass(reduced, untaken) if untaken.any() else reduced
    return taken if overlap_trips else _in_sequence(taken)


_TRIP_ENDS = np.iinfo(np.int32).min
"""The ``source_row`` of a node that stands for the end of a trip."""


def _in_sequence(graph: OpGraph) -> OpGraph:
    """The graph with a node at the end of each loop's body that waits for all in it, and that the next trip
    waits for: XLA runs the body of a ``while`` as a whole, trip after trip. O(nodes) for each loop.
    """
    for region in reversed(range(len(graph.regions))):  # children stand after their parents
        if graph.regions.trips[region] > 1:
            graph = _with_trip_end(graph, region)
    return graph


def _with_trip_end(graph: OpGraph, region: int) -> OpGraph:
    inside = graph.regions.within(region)[graph.region]
    if not inside.any():
        return graph
    deps = all_deps(graph)
    within = inside[deps.row_ids] & inside[deps.values]
    waits, waited_for = inside.copy(), inside.copy()
    waits[deps.row_ids[within]] = False
    waited_for[deps.values[within]] = False
    last = int(np.flatnonzero(inside)[-1])
    rows = np.insert(np.arange(len(graph), dtype=np.int64), last + 1, last)
    number = np.arange(len(graph), dtype=np.int64)
    number[last + 1 :] += 1
    end = last + 1

    def moved(deps: Csr, more: IntArray) -> Csr:
        consumers = np.concatenate([number[deps.row_ids], np.full(len(more), end, np.int64)])
        return Csr.from_pairs(consumers, np.concatenate([number[deps.values], number[more]]), len(rows))

    none = np.empty(0, np.int64)
    grown = take_nodes(
        graph, rows, moved(graph.data_deps, none), moved(graph.control_deps, np.flatnonzero(waited_for))
    )
    first = number[np.flatnonzero(waits)].astype(np.int32)
    table = grown.regions
    # what this loop carries over has been made by the end of the trip; other loops know no copy of a node
    kept = (table.carried_region != region) & (table.carried_consumer != end)
    producer = np.where(table.carried_producer == end, last, table.carried_producer)
    carried = np.stack([table.carried_region, producer, table.carried_consumer])
    own = np.stack([np.full(len(first), region), np.full(len(first), end), first])
    carried = np.concatenate([carried[:, kept], own], axis=1).astype(np.int32)
    regions = replace(
        table, carried_region=carried[0], carried_producer=carried[1], carried_consumer=carried[2]
    )
    return replace(
        grown,
        regions=regions,
        region=_with(grown.region, end, region),
        stream=_with(grown.stream, end, FREE),
        duration_ns=_with(grown.duration_ns, end, 0.0),
        source_row=_with(grown.source_row, end, _TRIP_ENDS),
        multiplicity=region_multiplicity(regions, _with(grown.region, end, region)),
    )


def _with(column: _Column, place: int, value: float) -> _Column:
    changed = column.copy()
    changed[place] = value
    return changed


def with_trips(graph: OpGraph, trips: FloatArray) -> OpGraph:
    """The same graph with other trip counts, shape ``(regions,)``."""
    regions: RegionTable = replace(graph.regions, trips=trips)
    return replace(graph, regions=regions, multiplicity=region_multiplicity(regions, graph.region))


def flatten(graph: OpGraph, blocks: tuple[Block, ...], pressure: Pressure | None) -> Program:
    """All loops unrolled, trip after trip. ``graph`` comes from :func:`prepared`; ``pressure`` is that of the
    nodes that the user knows. Blocks have theirs in their times.
    """
    executions = region_multiplicity(graph.regions, graph.region)  # a graph may state others
    flat = UnrollLoops(max_nodes=int(executions.sum()) + 1)(graph, Diagnostics())
    ends_trip = flat.source_row == _TRIP_ENDS
    node = np.where(ends_trip, -1, flat.source_row)
    mine = None if pressure is None else pressure.take(node, node >= 0)
    return Program(
        tasks=Tasks(graph.name, flat.duration_ns, flat.stream, all_deps(flat), mine),
        node=np.maximum(node, -1),
        block=np.where((node < 0) & ~ends_trip, -1 - node, -1).astype(np.int32),
        op_class=flat.op_class.astype(np.int32),
        blocks=blocks,
    )
