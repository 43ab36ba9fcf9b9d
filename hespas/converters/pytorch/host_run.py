"""The operations of a run without a device, each with the time that is its own.

Operations of a thread follow each other in order of start. A communication of Gloo is two records: the call
(``c10d::allreduce_``), and its work, named ``gloo:all_reduce``, mostly on a thread of its own. The work is
the communication; what it communicates stands in the call, since Gloo runs a reduce-scatter under the name of
an all-reduce. Where both are on one thread they are one, with the time of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.converters.linking import exclusive
from hespas.converters.pytorch.communication import Communication
from hespas.converters.pytorch.kernels import range_bytes
from hespas.converters.pytorch.linked import LinkedTrace
from hespas.graph import Findings
from hespas.graph.columns import IntArray, mapped

__all__ = ["Calls", "HostRun", "host_run", "works_of"]

_WORK = "gloo:"


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Communications: per call (event) its work (event, or the call itself) and what it communicates."""

    work: dict[int, int]
    talks: dict[int, Communication]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostRun:
    """``order``: the event of each node; ``node_of``: the node of each event (-1: none); times by event.
    ``merged_into`` is the event that an event is part of, itself for most.
    """

    calls: Calls
    works: IntArray
    merged_into: IntArray
    order: IntArray
    node_of: IntArray
    own_ns: IntArray
    start_ns: IntArray
    end_ns: IntArray

    def report(self, findings: Findings) -> None:
        """Report communications of which only one of the two records is there."""
        calls = self.calls
        alone = sum(work == call for call, work in calls.work.items())
        message = "communications of which only the call is recorded; they have its time"
        findings.info("communication-without-work", message, alone)
        message = "works of communications whose call is not recorded"
        findings.warning("work-without-call", message, len(self.works) - len(calls.work) + alone)
        both = int((self.merged_into != np.arange(len(self.merged_into))).sum())
        findings.info("blocking-communication", "calls that do their communication on their own thread", both)


def host_run(linked: LinkedTrace) -> HostRun:
    """Give each operation, and each work of a communication, its own time. O(events log events)."""
    events = linked.events
    works = works_of(linked)
    calls = _calls(linked, works)
    kept = np.concatenate([np.arange(len(linked.kineto.host)), works])
    end_ns = events.start_ns + events.duration_ns
    own = np.zeros(len(events.name_row), np.int64)
    own[kept] = exclusive(events.key[kept], events.start_ns[kept], end_ns[kept])
    merged_into = np.arange(len(own))
    for call, work in calls.work.items():
        if work != call and events.key[call] == events.key[work]:
            merged_into[call] = work
    own += np.bincount(
        merged_into, weights=np.where(merged_into != np.arange(len(own)), own, 0), minlength=len(own)
    ).astype(np.int64)
    start_ns = events.start_ns.copy()
    joined = np.flatnonzero(merged_into != np.arange(len(own)))
    start_ns[merged_into[joined]] = events.start_ns[joined]
    kept = kept[merged_into[kept] == kept]
    order = kept[np.lexsort((-end_ns[kept], start_ns[kept]))]
    node_of = np.full(len(own), -1, np.int64)
    node_of[order] = np.arange(len(order))
    node_of[joined] = node_of[merged_into[joined]]
    return HostRun(
        calls=calls,
        works=works,
        merged_into=merged_into,
        order=order,
        node_of=node_of,
        own_ns=own,
        start_ns=start_ns,
        end_ns=end_ns,
    )


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
    return Calls(work_of, {call: _sized(linked, talk, work_of[call]) for call, talk in talks.items()})


def _sized(linked: LinkedTrace, talk: Communication, work: int) -> Communication:
    """The communication with the size its work states, where the call states none."""
    place = work - len(linked.kineto.host)
    return talk if place < 0 else talk.with_size(range_bytes(linked.kineto, place))
