"""Graphs reduced to what a schedule needs, and their loops as the trips that run.

Passes copy these columns with the nodes and look at none of them: ``stream`` holds the code to run on,
``source_row`` 1 + the number of the node in the graph the user knows, -1 - b for block b, or 0 for nothing:
that a trip ends.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hespas.graph import CollectiveTable, ContractionTable, Diagnostics, ExtraTable, OpGraph, P2pTable
from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import FloatArray, RaggedArray
from hespas.graph.opgraph import RegionTable
from hespas.graph.passes import UnrollLoops, all_deps, bypass
from hespas.simulator.progress import Pressure
from hespas.simulator.schedule import Block, Program, Tasks
from hespas.simulator.streams import FREE, stream_codes

__all__ = ["flatten", "prepared", "with_trips"]


def prepared(graph: OpGraph) -> OpGraph:
    """The graph without side tables and branches not taken."""
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
        source_row=np.arange(1, nodes + 1, dtype=np.int32),
        duration_ns=np.where(stream == FREE, 0.0, graph.duration_ns),
    )
    untaken = graph.multiplicity == 0
    return bypass(reduced, untaken) if untaken.any() else reduced


def with_trips(graph: OpGraph, trips: FloatArray) -> OpGraph:
    """The same graph with other trip counts, shape ``(regions,)``."""
    regions: RegionTable = replace(graph.regions, trips=trips)
    return replace(graph, regions=regions, multiplicity=region_multiplicity(regions, graph.region))


def flatten(
    graph: OpGraph, blocks: tuple[Block, ...], *, overlap_trips: bool, pressure: Pressure | None = None
) -> Program:
    """All loops unrolled, trip after trip (:class:`UnrollLoops`). ``graph`` comes from :func:`prepared`;
    ``pressure`` is that of the nodes that the user knows. Blocks have theirs in their times.
    """
    executions = region_multiplicity(graph.regions, graph.region)  # a graph may state others
    unroll = UnrollLoops(max_nodes=int(executions.sum()) + 1, overlap_trips=overlap_trips)
    flat = unroll(graph, Diagnostics())
    of = flat.source_row
    node = np.where(of > 0, of - 1, -1).astype(np.int32)
    mine = None if pressure is None else pressure.take(node, node >= 0)
    return Program(
        tasks=Tasks(graph.name, flat.duration_ns, flat.stream, all_deps(flat), mine),
        node=node,
        block=np.where(of < 0, -1 - of, -1).astype(np.int32),
        op_class=flat.op_class.astype(np.int32),
        blocks=blocks,
    )
