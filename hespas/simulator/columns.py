"""A graph reduced to what a schedule needs, in columns that the loop passes carry along."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hespas.graph import (
    CollectiveTable,
    ContractionTable,
    Csr,
    Diagnostics,
    ExtraTable,
    OpGraph,
    P2pTable,
    RegionKind,
)
from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import FloatArray
from hespas.graph.passes import UnrollLoops, all_deps, bypass
from hespas.graph.tables import RegionTable
from hespas.simulator.measures import Block, Program
from hespas.simulator.schedule import Tasks
from hespas.simulator.streams import FREE, stream_codes

__all__ = ["flatten", "prepared", "with_trips"]

# Passes copy these columns with the nodes and look at none of them: ``stream`` holds the stream to run on,
# ``source_row`` the number of the node in the graph the user knows, or -1 - b for block b.


def prepared(graph: OpGraph) -> OpGraph:
    """The graph without side tables and branches not taken; regions that run several times are loops."""
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
    return bypass(reduced, untaken) if untaken.any() else reduced


def with_trips(graph: OpGraph, trips: FloatArray) -> OpGraph:
    """The same graph with other trip counts, shape ``(regions,)``."""
    regions: RegionTable = replace(graph.regions, trips=trips)
    return replace(graph, regions=regions, multiplicity=region_multiplicity(regions, graph.region))


def flatten(graph: OpGraph, blocks: tuple[Block, ...]) -> Program:
    """All loops unrolled, trip after trip. ``graph`` comes from :func:`prepared`."""
    executions = region_multiplicity(graph.regions, graph.region)  # a graph may state others
    flat = UnrollLoops(max_nodes=int(executions.sum()) + 1)(graph, Diagnostics())
    tasks = Tasks(graph.name, flat.duration_ns, flat.stream, all_deps(flat))
    node = flat.source_row
    return Program(
        tasks=tasks,
        node=np.maximum(node, -1),
        block=np.where(node < 0, -1 - node, -1).astype(np.int32),
        op_class=flat.op_class.astype(np.int32),
        blocks=blocks,
    )
