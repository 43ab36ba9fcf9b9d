"""Operations of a run without a device, each with the time that is its own.

Operations of a thread nest. Each is one event with the time that none inside it takes, and they follow each
other in order of start, so that together they cover what they covered nested. A communication of Gloo is two
records: the call (``c10d::allreduce_``), and its work (``gloo:all_reduce``). The work is the communication;
its kind is that of the call, since Gloo runs a reduce-scatter under the name of an all-reduce. Works overlap
operations of their thread, and keep the span that is recorded. Where call and work are on one thread, they
are one event over both spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.converters.linking import exclusive
from hespas.converters.measured_ops import lanes_of
from hespas.converters.pytorch.communication import UNKNOWN, Communication, named
from hespas.converters.pytorch.kernels import range_bytes
from hespas.converters.pytorch.linked import LinkedTrace
from hespas.graph import Findings
from hespas.graph.columns import IntArray, distinct_rows, mapped

__all__ = ["Calls", "HostRun", "host_run", "works_of"]

_WORK = "gloo:"


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Communications: per call (event) its work (event, or the call itself) and what it communicates. A work
    without a call is its own.
    """

    work: dict[int, int]
    talks: dict[int, Communication]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostRun:
    """``order``: the event of each node, in order of start; ``node_of``: the node of each event (-1: none).
    ``merged_into`` is the event that an event is part of, itself for most. By event: ``thread``; ``queue``,
    whose events follow each other; ``own_ns``, ``start_ns`` and ``end_ns``, where it has its own time.
    """

    calls: Calls
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
        """Report communications of which only one of the two records is there."""
        calls = self.calls
        orphans = int(np.isin(self.works, list(calls.work)).sum())
        alone = sum(work == call for call, work in calls.work.items()) - orphans
        message = "communications of which only the call is recorded; they have its time"
        findings.info("communication-without-work", message, alone)
        message = "works of communications whose call is not recorded"
        findings.warning("work-without-call", message, orphans)
        both = int((self.merged_into != np.arange(len(self.merged_into))).sum())
        findings.info("blocking-communication", "calls that do their communication on their own thread", both)


def host_run(linked: LinkedTrace) -> HostRun:
    """Give each operation, and each work of a communication, its own time. O(events log events)."""
    events = linked.events
    works = works_of(linked)
    calls = _calls(linked, works)
    count = len(events.name_row)
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
    start_ns[nested] = _one_behind_the_other(events.key[nested], start_ns[nested], own[nested])
    end_ns = start_ns + own
    kept = np.concatenate([nested, works])
    order = kept[np.argsort(start_ns[kept], kind="stable")]
    node_of = np.full(count, -1, np.int64)
    node_of[order] = np.arange(len(order))
    node_of[~alone] = node_of[merged_into[~alone]]
    _, place = distinct_rows(events.key, is_work.astype(np.int64))
    queue = place.astype(np.int64)
    queue[order] = lanes_of(
        queue[order], start_ns[order].astype(np.float64), end_ns[order].astype(np.float64), 0
    )
    return HostRun(
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


def _one_behind_the_other(thread: IntArray, start_ns: IntArray, own_ns: IntArray) -> IntArray:
    """Return starts at which operations of a thread, each with its own time, cover what they covered nested:
    one in another one starts when that has had its own time.
    """
    ends: dict[int, int] = {}
    found: list[int] = []
    for of, start, own in zip(thread.tolist(), start_ns.tolist(), own_ns.tolist(), strict=True):
        begin = max(start, ends.get(of, start))
        found.append(begin)
        ends[of] = begin + own
    return np.array(found, np.int64)


def works_of(linked: LinkedTrace) -> IntArray:
    """Named ranges that are the work of a communication, as rows of all events."""
    note = linked.kineto.annotation
    is_work = mapped(note.name_row, lambda row: linked.kineto.strings[row].startswith(_WORK), np.bool_)
    return len(linked.kineto.host) + np.flatnonzero(is_work)


def _calls(linked: LinkedTrace, works: IntArray) -> Calls:
    """Give each work to the last call before it, in the order of record ids (without those, of starts)."""
    talks = linked.communications()
    events = linked.events
    calls = np.array(sorted(talks), np.int64)
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
    orphans = np.setdiff1d(works, list(work_of.values())).tolist()
    talks = talks | {work: _stated_by_name(linked, work) for work in orphans}
    work_of |= {work: work for work in orphans}
    return Calls(work_of, {call: _sized(linked, talk, work_of[call]) for call, talk in talks.items()})


def _stated_by_name(linked: LinkedTrace, work: int) -> Communication:
    """Return the communication that the name of a work states."""
    word = linked.kineto.strings[int(linked.events.name_row[work])].removeprefix(_WORK)
    return Communication(meaning=named(word) or UNKNOWN)


def _sized(linked: LinkedTrace, talk: Communication, work: int) -> Communication:
    """The communication with the size its work states, where the call states none."""
    place = work - len(linked.kineto.host)
    return talk if place < 0 else talk.with_size(range_bytes(linked.kineto, place))
