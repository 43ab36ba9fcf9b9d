"""A host execution trace alone as a graph: its operations in order, without times.

Each operation is a node, calls around others included; operations of a thread follow each other, and
``framework_row`` names the call around each. A communication is the node of the call that states it; the
named range of its work (``gloo:all_reduce``, ``nccl:all_reduce``) is left out, being the same thing. Only a
call that blocks, as it says itself, holds back what follows on its thread.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.measured_ops import host_costs
from hespas.converters.pytorch.alone import asked_devices, ranks_of_one
from hespas.converters.pytorch.communication import Communication
from hespas.converters.pytorch.dataflow import Edges, chain, flow_of
from hespas.converters.pytorch.draft import Draft, Rank, Work, assembled
from hespas.converters.pytorch.groups import Groups
from hespas.converters.pytorch.host_trace import HostTrace, read_host_trace
from hespas.converters.pytorch.naming import job_name, rank_in_name
from hespas.graph import Diagnostics, OpGraph, StringTableBuilder, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import FormatError

__all__ = ["host_trace_graph", "read_execution_trace"]

_WORK = re.compile(r"(?:gloo|nccl|rccl|mpi|ucc|xccl):")


def read_execution_trace(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read one rank's trace as a workload of one rank, or of as many as the user states.

    Raises ``FormatError`` or ``UnsupportedError`` as :func:`.host_trace.read_host_trace` and
    :func:`.alone.ranks_of_one` do.
    """
    asked = asked_devices(options, str(path))
    trace = read_host_trace(path, options.max_bytes, StringTableBuilder(), options.version)
    number = max(rank_in_name(path.name, alone=True), 0)
    groups = Groups.of(trace.groups, max(asked, number + 1))
    name = job_name(path.name)
    graph = host_trace_graph(trace, name, Rank(number, groups, str(path)), diagnostics)
    metadata = {
        "format": "pytorch-et",
        "schema": trace.schema,
        "rank": str(number),
        "world_size": str(groups.world),
    }
    recorded = groups.world if trace.groups else 1
    rank_class = ranks_of_one(graph, number, diagnostics, str(path), asked=asked, recorded=recorded)
    return Workload(name=name, classes=(graph,), rank_class=rank_class, metadata=metadata)


def host_trace_graph(trace: HostTrace, name: str, rank: Rank, diagnostics: Diagnostics) -> OpGraph:
    """The graph of one trace. Raises ``FormatError`` where it holds no operation."""
    works = _works(trace)
    kept = np.flatnonzero(~trace.structural & ~works)
    if not len(kept):
        raise FormatError(
            "the execution trace holds no operation", path=rank.path, position="list 'nodes'",
            hint="start the observer before the step that is to be recorded",
        )  # fmt: skip
    _report(trace, works, rank, diagnostics)
    node_of = np.full(len(trace), -1, np.int64)
    node_of[kept] = np.arange(len(kept))
    talks = {int(node_of[row]): talk for row, talk in trace.communications.items()}
    flow = flow_of(trace.reads.take(kept), trace.writes.take(kept))
    thread = np.unique(trace.thread[kept], return_inverse=True)[1].reshape(-1).astype(np.int64)
    across = thread[flow.order.consumer] != thread[flow.order.producer]
    parent = trace.parent[kept].astype(np.int64)
    outer = np.where((parent >= 0) & ~trace.structural[np.maximum(parent, 0)], parent, kept)
    return assembled(
        Draft(
            name=name,
            strings=trace.strings.build(),
            types=trace.types.build(),
            id=trace.id[kept].astype(np.uint64),
            name_row=trace.name_row[kept],
            op_row=trace.name_row[kept],
            framework_row=trace.name_row[outer],
            work=_work(trace, kept, rank, diagnostics),
            stream=thread,
            queue=_queue(thread, talks),
            duration_ns=np.full(len(kept), np.nan),
            operands=trace.operands.take(kept),
            results=trace.results.take(kept),
            data=flow.data,
            control=Edges.joined(_thread_order(thread, talks), flow.order.where(across)),
            talks=talks,
        ),
        rank,
        diagnostics,
    )


def _works(trace: HostTrace) -> BoolArray:
    """Named ranges that repeat a communication."""
    rows: list[int] = np.unique(trace.name_row).tolist()
    texts = list(trace.strings.build())
    names = [row for row in rows if _WORK.match(texts[row])]
    works: BoolArray = np.isin(trace.name_row, names)
    return works if trace.communications else np.zeros(len(trace), np.bool_)


def _work(trace: HostTrace, kept: IntArray, rank: Rank, diagnostics: Diagnostics) -> Work:
    """What operations cost. What touches no tensor is free: named ranges, hooks, bookkeeping."""
    talks = _works(trace)
    talks[list(trace.communications)] = True
    touches = (trace.operands.lengths + trace.results.lengths) > 0
    costs = host_costs(
        trace.host_ops(), trace.strings.build(), diagnostics, rank.path, communicates=talks, touches=touches
    )
    return Work.placed(costs, kept, np.arange(len(kept)), len(kept))


def _thread_order(thread: IntArray, talks: dict[int, Communication]) -> Edges:
    """Operations of a thread in order. What follows a communication waits for the operation before it, and
    for the communication where that blocks.
    """
    queue = _queue(thread, talks)
    pairs: list[tuple[int, int]] = []
    threads: list[int] = np.unique(thread[list(talks)]).tolist()
    for number in threads:
        nodes = np.flatnonzero(thread == number)
        plain = nodes[queue[nodes] >= 0]
        mine: list[int] = nodes[queue[nodes] < 0].tolist()
        for node in mine:
            before = int(np.searchsorted(plain, node)) - 1
            if before >= 0:
                pairs.append((node, int(plain[before])))
            after = int(np.searchsorted(nodes, node)) + 1
            if talks[node].waits and after < len(nodes):
                pairs.append((int(nodes[after]), node))
    found = np.array(pairs, np.int64).reshape(-1, 2)
    return Edges.joined(chain(queue), Edges(found[:, 0], found[:, 1]))


def _queue(thread: IntArray, talks: dict[int, Communication]) -> IntArray:
    """The thread of each operation, -1 for communications: they hold nobody back but by their data."""
    queue = thread.copy()
    queue[list(talks)] = -1
    return queue


def _report(trace: HostTrace, works: BoolArray, rank: Rank, diagnostics: Diagnostics) -> None:
    diagnostics.warning(
        "pytorch.lost-parent", rank.path, "operations whose call is not in the file", count=trace.lost_parents
    )
    diagnostics.info(
        "pytorch.structural", rank.path, "roots of threads and lists of process groups are no operations",
        count=int(trace.structural.sum()),
    )  # fmt: skip
    diagnostics.info(
        "pytorch.work-of-communication", rank.path, "named ranges that repeat a communication are left out",
        count=int(works.sum()),
    )  # fmt: skip
