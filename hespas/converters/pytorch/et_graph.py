"""A host execution trace alone as a graph: its operations in order, without times.

Each operation is a node, calls around others included; operations of a thread follow each other, and
``framework_row`` names the call around each. A communication is the node of the call that states it; the
named range of its work (``gloo:all_reduce``, ``nccl:all_reduce``) is left out, being the same thing. Only a
call that blocks, as it says itself, holds back what follows on its thread.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops import host_costs
from hespas.converters.format import ReadOptions
from hespas.converters.pytorch.communication import Communication, Groups
from hespas.converters.pytorch.draft import Draft, Edges, Rank, Work, assembled, chain, flow_of
from hespas.converters.pytorch.host_trace import HostTrace, read_host_trace
from hespas.converters.pytorch.sniffing import job_name, rank_in_name
from hespas.converters.replica_groups import MAX_DEVICES, highest_id
from hespas.graph import ABSENT, Diagnostics, OpGraph, StringTableBuilder, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import FormatError, UnsupportedError, UsageError

__all__ = ["asked_devices", "host_trace_graph", "ranks_here", "ranks_of_one", "read_execution_trace"]

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


# The trace of one rank of a job of several: what it is, and what it can stand for.


def asked_devices(options: ReadOptions, path: str) -> int:
    """How many devices the user states, or 1. Raises ``UsageError`` for more than any job has."""
    asked = 1 if options.num_devices is None else options.num_devices
    if not 1 <= asked <= MAX_DEVICES:
        raise UsageError(f"{asked:,} devices asked for", path=path, hint=f"1 to {MAX_DEVICES:,}")
    return asked


def ranks_of_one(
    graph: OpGraph, number: int, diagnostics: Diagnostics, path: str, *, asked: int, recorded: int
) -> NDArray[np.int32]:
    """The class of each rank of the job, where one rank of ``recorded`` is here: the others are absent, or do
    the same where as many are ``asked`` for. Raises ``UnsupportedError`` where it cannot stand for those.
    """
    if asked > 1:
        return _for_all(graph, number, asked, diagnostics, path)
    if recorded > 1:
        remedy = (
            f"--num-devices {recorded} takes it that all ranks do what this one did"
            if _stands_for(graph, recorded)
            else "give the traces of all ranks for one"
        )
        diagnostics.warning(
            "pytorch.one-rank", path,
            f"the trace is of rank {number} of {recorded:,}; the others are not here, and collectives and "
            f"messages with them end nowhere. It is no job that a simulator can run; {remedy}",
        )  # fmt: skip
    return ranks_here([number], [graph], recorded, path)


def ranks_here(
    numbers: Sequence[int], graphs: Sequence[OpGraph], recorded: int, path: str
) -> NDArray[np.int32]:
    """The class of each rank of the job, where some are here, each a class of its own. The job has as many as
    were ``recorded``, or as groups and messages name. Raises ``FormatError`` for more than any job has.
    """
    groups = [1 + highest_id(each) for graph in graphs for each in graph.group_sets]
    peers = [permutation.num_ranks for graph in graphs for permutation in graph.permutations]
    size = max([recorded, max(numbers) + 1, *groups, *peers])
    if size > MAX_DEVICES:
        raise FormatError(
            f"the trace is of a job of {size:,} ranks",
            path=path,
            position="the largest rank of a group or a message",
            hint=f"from 1 to {MAX_DEVICES:,} are possible",
        )
    ranks = np.full(size, ABSENT, np.int32)
    ranks[numbers] = np.arange(len(numbers), dtype=np.int32)
    return ranks


def _stands_for(graph: OpGraph, world: int) -> bool:
    """Whether all ranks can do the same: messages, and groups of others than all, are those of one alone."""
    return not len(graph.p2p) and all(groups.is_world(world) for groups in graph.group_sets)


def _for_all(
    graph: OpGraph, number: int, world: int, diagnostics: Diagnostics, path: str
) -> NDArray[np.int32]:
    """The class of ``world`` ranks that all do what one recorded rank did."""
    if not _stands_for(graph, world):
        raise UnsupportedError(
            f"the trace of rank {number} cannot stand for {world:,} ranks: it does not always talk with all "
            "of them, and with no others",
            path=path, position="process groups and messages",
            hint="give the traces of all ranks, or leave --num-devices out",
        )  # fmt: skip
    diagnostics.warning(
        "pytorch.one-rank-for-all", path,
        f"all {world:,} ranks are taken to do what rank {number} did, in its times: no other was recorded",
    )  # fmt: skip
    return np.zeros(world, np.int32)
