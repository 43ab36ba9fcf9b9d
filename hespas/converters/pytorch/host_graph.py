"""Runs without a device: host operations with their own times, and their graph.

Operations of a thread nest. Each is one event with its exclusive time, and events follow each other in order
of start, so together they cover the same time as the nested ones. A communication of Gloo has two records:
the call (``c10d::allreduce_``) and its work (``gloo:all_reduce``). The work is the communication. Its kind is
that of the call, because Gloo runs a reduce-scatter under the name of an all-reduce. Works overlap operations
of their thread and keep their recorded span. A call and a work on one thread become one event over both
spans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hespas.converters.linking import exclusive
from hespas.converters.measured_ops.costs import EventCosts, host_costs
from hespas.converters.measured_ops.waits import lanes_of
from hespas.converters.pytorch.communication import UNKNOWN, TraceCommunication, kind_of_word
from hespas.converters.pytorch.draft import GraphDraft, NodeEdges, chain, flow_of
from hespas.converters.pytorch.kernel_communications import range_bytes
from hespas.converters.pytorch.linked import LinkedTrace
from hespas.graph import Diagnostics, Findings, OpClass
from hespas.graph.columns import IntArray, at_rows, distinct_rows, mapped

__all__ = ["CpuRun", "HostCalls", "host_draft", "host_run", "works_of"]

_WORK = "gloo:"


@dataclass(frozen=True, slots=True, eq=False)
class HostCalls:
    """Communications of a run without a device.

    A call starts a communication. Another event, its work, transfers the data. ``work`` maps each call to its
    work, or to itself if it has no work of its own. A work without a call counts as its own call.
    ``communications`` are by call.
    """

    work: dict[int, int]
    communications: dict[int, TraceCommunication]

    @classmethod
    def of(cls, linked: LinkedTrace, works: IntArray) -> HostCalls:
        """Assign each of the ``works`` (events that transfer data) to the last call before it. The order is
        the order of record ids, or of starts if ids are missing.
        """
        comms = linked.host_communications()
        kineto, events = linked.kineto, linked.events
        calls = np.array(sorted(comms), np.int64)
        both = np.concatenate([calls, works])
        ids = events.record_id[both]
        by_id = bool((ids > 0).all()) and len(np.unique(ids)) == len(ids)
        order = both[np.argsort(ids if by_id else events.start_ns[both], kind="stable")]
        is_call = np.isin(order, calls)
        work_of = {int(call): int(call) for call in calls.tolist()}
        last = -1
        for event, starts in zip(order.tolist(), is_call.tolist(), strict=True):
            if starts:
                last = event
            elif last >= 0 and work_of[last] == last:
                work_of[last] = event
        for work in np.setdiff1d(works, list(work_of.values())).tolist():
            name = kineto.strings[int(events.name_id[work])]
            comms[work] = TraceCommunication(kind=kind_of_word(name.removeprefix(_WORK)) or UNKNOWN)
            work_of[work] = work
        for call, comm in comms.items():
            row = work_of[call] - len(kineto.host)  # the named range of the work
            if row >= 0:
                comms[call] = comm.with_size(range_bytes(kineto, row))
        return cls(work_of, comms)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CpuRun:
    """Events of a run without a device, in order of start.

    ``order`` is the event of each node; ``node_of`` is the node of each event (-1: none). ``merged_into`` is
    the event with which an event was merged, usually itself. The other columns have one value per event:
    ``thread``; ``queue``, whose events run one after another; ``own_ns``, the time without the events inside
    it; and ``start_ns`` and ``end_ns``, between which that time is simulated.
    """

    calls: HostCalls
    works: IntArray
    merged_into: IntArray
    order: IntArray
    node_of: IntArray
    thread: IntArray
    queue: IntArray
    own_ns: IntArray
    start_ns: IntArray
    end_ns: IntArray

    def report(self, findings: Findings) -> None:
        """Report communications on a CPU for which the call or the transfer of the data (the work) was not
        recorded.
        """
        calls = self.calls
        orphans = int(np.isin(self.works, list(calls.work)).sum())
        alone = sum(work == call for call, work in calls.work.items()) - orphans
        message = "communications without a recorded work; the time is that of the call"
        findings.info("communication-without-work", message, alone)
        message = "works of communications without a recorded call"
        findings.warning("work-without-call", message, orphans)
        both = int((self.merged_into != np.arange(len(self.merged_into))).sum())
        findings.info("blocking-communication", "calls that do their communication on their own thread", both)

    def waits(self) -> NodeEdges:
        """Return the dependencies of communications.

        The work of a communication waits for the last operation of the calling thread that ended before it,
        usually its call. After a blocking communication, the next operation of that thread waits for the
        work.
        """
        calls = self.calls
        pairs: list[tuple[int, int]] = []
        by_thread: dict[int, tuple[IntArray, IntArray, IntArray]] = {}
        is_work = np.zeros(len(self.thread), np.bool_)
        is_work[self.works] = True
        thread, is_operation = self.thread[self.order], ~is_work[self.order]
        for call, work in calls.work.items():
            own, node = int(self.thread[call]), int(self.node_of[work])
            if work == call or self.node_of[call] == node:
                continue
            if own not in by_thread:
                nodes = np.flatnonzero((thread == own) & is_operation)
                events = self.order[nodes]
                by_thread[own] = nodes, self.start_ns[events], self.end_ns[events]
            nodes, starts, ends = by_thread[own]
            ended = int(np.searchsorted(ends, int(self.start_ns[work]), side="right")) - 1
            called = int(np.searchsorted(nodes, int(self.node_of[call])))
            if min(ended, called) >= 0:
                pairs.append((node, int(nodes[min(ended, called)])))
            if calls.communications[call].waits:
                following = int(np.searchsorted(starts, int(self.end_ns[work])))
                if following < len(nodes):
                    pairs.append((int(nodes[following]), node))
        return NodeEdges.of(pairs)


def host_run(linked: LinkedTrace) -> CpuRun:
    """Return the events of a run on a CPU only. The time of an event excludes the calls inside it. O(events
    log events).
    """
    events = linked.events
    works = works_of(linked)
    calls = HostCalls.of(linked, works)
    count = len(events.name_id)
    is_work = np.zeros(count, np.bool_)
    is_work[works] = True
    merged_into = np.arange(count)
    start_ns, end_ns = events.start_ns.copy(), events.start_ns + events.duration_ns
    for call, work in calls.work.items():
        if work != call and events.key[call] == events.key[work]:
            merged_into[call] = work
            start_ns[work] = min(start_ns[call], start_ns[work])
            end_ns[work] = max(end_ns[call], end_ns[work])
    alone = merged_into == np.arange(count)
    operations = np.arange(len(linked.kineto.host))
    operations = operations[alone[operations]]
    own = np.where(is_work, end_ns - start_ns, 0)
    own[operations] = exclusive(events.key[operations], start_ns[operations], end_ns[operations])
    nested = operations[np.lexsort((-end_ns[operations], start_ns[operations]))]
    start_ns[nested] = _sequential_starts(events.key[nested], start_ns[nested], own[nested])
    end_ns = start_ns + own
    selected = np.concatenate([nested, works])
    order = selected[np.argsort(start_ns[selected], kind="stable")]
    node_of = np.full(count, -1, np.int64)
    node_of[order] = np.arange(len(order))
    node_of[~alone] = node_of[merged_into[~alone]]
    _, number = distinct_rows(events.key, is_work.astype(np.int64))
    queue = number.astype(np.int64)
    queue[order] = lanes_of(
        queue[order], start_ns[order].astype(np.float64), end_ns[order].astype(np.float64), 0
    )
    return CpuRun(
        calls=calls,
        works=works,
        merged_into=merged_into,
        order=order,
        node_of=node_of,
        thread=events.key,
        queue=queue,
        own_ns=own,
        start_ns=start_ns,
        end_ns=end_ns,
    )


def _sequential_starts(thread: IntArray, start_ns: IntArray, own_ns: IntArray) -> IntArray:
    """Return starts at which the nested operations of a thread run one after another, in the same total time.

    An operation inside another one starts when the exclusive time of the outer one (``own_ns``) has passed.
    """
    ends: dict[int, int] = {}
    starts: list[int] = []
    for key, start, own in zip(thread.tolist(), start_ns.tolist(), own_ns.tolist(), strict=True):
        begin = max(start, ends.get(key, start))
        starts.append(begin)
        ends[key] = begin + own
    return np.array(starts, np.int64)


def works_of(linked: LinkedTrace) -> IntArray:
    """Return the rows of the named ranges in which communications transfer their data (their works)."""
    note = linked.kineto.annotation
    is_work = mapped(note.name_id, lambda row: linked.kineto.strings[row].startswith(_WORK), np.bool_)
    return len(linked.kineto.host) + np.flatnonzero(is_work)


def host_draft(linked: LinkedTrace, name: str, diagnostics: Diagnostics, path: str) -> GraphDraft:
    """Return the nodes and dependencies of all operations of a run without a device.

    The times of the nodes of a thread add up to the time of the thread, to the ns. The event that transfers
    the data of a communication has the operation name of the call that started it.
    """
    run = host_run(linked)
    run.report(diagnostics.about(path, "pytorch"))
    order, events, calls = run.order, linked.events, run.calls
    profile = linked.profile(path)
    communicates = np.zeros(len(profile.host), np.bool_)
    communicates[[call for call in calls.communications if call < len(communicates)]] = True
    costs = host_costs(profile.host, profile.strings, diagnostics, path, communicates=communicates)
    host_nodes = np.flatnonzero(order < len(linked.kineto.host))
    costs = costs.placed(order[host_nodes], host_nodes, len(order))
    costs, data, later = _dataflow(linked, run, costs)
    comms = {int(run.node_of[calls.work[call]]): comm for call, comm in calls.communications.items()}
    is_comm = np.zeros(len(order), np.bool_)
    is_comm[list(comms)] = True
    is_call = np.zeros(len(order), np.bool_)
    is_call[[run.node_of[call] for call in calls.communications]] = True
    own_ns = run.own_ns[order].astype(np.float64)
    idle = ~is_comm & (costs.op_class == OpClass.UNKNOWN) & (is_call | (own_ns == 0))
    op_id = events.name_id[order].copy()
    for call, work in calls.work.items():
        op_id[run.node_of[work]] = events.name_id[call]
    parent = at_rows(linked.nesting.parent, np.where(order < len(linked.kineto.host), order, -1), -1)
    queue = np.unique(run.queue[order], return_inverse=True)[1].reshape(-1).astype(np.int64)
    return GraphDraft(
        name=name,
        strings=linked.strings.build(),
        id=np.arange(len(order), dtype=np.uint64),
        name_id=events.name_id[order],
        op_id=op_id,
        framework_id=events.name_id[np.where(parent >= 0, parent, order)],
        costs=costs.without(idle),
        stream=queue,
        queue=queue,
        duration_ns=own_ns,
        data=data,
        control=NodeEdges.joined(chain(queue), run.waits(), later),
        communications=comms,
        start_ns=(run.start_ns[order] - run.start_ns[order].min()).astype(np.float64),
    )


def _dataflow(linked: LinkedTrace, run: CpuRun, costs: EventCosts) -> tuple[EventCosts, NodeEdges, NodeEdges]:
    """Return the costs with the tensor types of the execution trace, and the data and order dependencies
    through storages.

    Dependencies are in order of start. Between threads, only those that the measured times allow are
    returned.
    """
    count, trace = len(run.order), linked.trace
    if trace is None:
        return costs, NodeEdges.empty(), NodeEdges.empty()
    row, is_call = linked.rows[run.order].copy(), np.zeros(count, np.bool_)
    for call, work in run.calls.work.items():
        row[run.node_of[work]] = linked.rows[call]
        if run.node_of[call] != run.node_of[work]:
            is_call[run.node_of[call]] = True
    nodes = np.flatnonzero((row >= 0) & ~is_call)
    flow = flow_of(trace.reads.take(row[nodes]), trace.writes.take(row[nodes]))
    operands, results = (
        side.take(row[nodes]).moved(nodes, count) for side in (trace.operands, trace.results)
    )
    stream = run.queue[run.order]
    start, end = run.start_ns[run.order], run.end_ns[run.order]
    all_edges = [NodeEdges(nodes[part.consumer], nodes[part.producer]) for part in flow]
    data, order = (edges.where(edges.possible(stream, start, end)) for edges in all_edges)
    across = stream[order.consumer] != stream[order.producer]
    costs = replace(costs, types=trace.types.build(), operands=operands, results=results)
    return costs, data, order.where(across)
