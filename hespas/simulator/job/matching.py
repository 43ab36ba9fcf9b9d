"""Communication events: matching of collectives and messages between the ranks of a job.

The k-th collective of a rank in a group matches the k-th collective of every other member. The k-th message
from one rank to another with a tag matches the k-th receive from that source with that tag. They are counted
in program order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

from hespas.graph import ABSENT, CollectiveKind, Diagnostics, RaggedArray
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import CheckFailedError
from hespas.simulator.job.programs import CommunicationOrder, JobTasks, occurrences
from hespas.simulator.schedule import node_label
from hespas.simulator.symmetry import NONE, BehaviourClasses, Relations

__all__ = [
    "DIFFERING",
    "PROTOCOLS",
    "STARTS",
    "Calls",
    "CommunicationEvents",
    "Differing",
    "Protocol",
    "Starts",
    "match_communication",
    "matched_calls",
]


Protocol = Literal["eager", "rendezvous"]

PROTOCOLS: tuple[Protocol, ...] = ("eager", "rendezvous")
"""Completion of a send: when the message has left (eager), or when the receiver has arrived (rendezvous)."""

Differing = Literal["longest", "shortest"]

DIFFERING: tuple[Differing, ...] = ("longest", "shortest")
"""Time of a communication event whose members state different times. Recorded times include waits for other
ranks; the last arrival has the shortest.
"""

Starts = Literal["together", "recorded"]

STARTS: tuple[Starts, ...] = ("together", "recorded")
"""Start of the ranks: all at 0 (together), or as far apart as their recordings."""


@dataclass(frozen=True, slots=True, eq=False)
class CommunicationEvents:
    """Communication events between tasks of different ranks. An event ends when all its arrivals are over. An
    arrival is over ``lag_ns`` after its task starts.

    ``arrivals`` lists for each task the events at which it arrives; ``lag_ns`` has one entry per arrival.
    ``ended_by`` is the event for which a task waits (-1: none), shape ``(tasks,)``. ``duration_ns`` is the
    time of each task without waiting. ``is_message`` is True for tasks that wait for messages.
    """

    arrivals: RaggedArray
    lag_ns: FloatArray
    ended_by: IntArray
    duration_ns: FloatArray
    is_message: BoolArray

    @property
    def count(self) -> int:
        """Return the number of events."""
        return int(self.arrivals.values.max(initial=-1)) + 1


_HINT = "run the same collectives in one order on all members, or simulate ranks without waits: `alone`"


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Collective calls of all simulated ranks; columns of shape ``(calls,)``.

    ``sim_rank`` is the index of the simulated rank, ``task`` the task that runs the collective. ``row`` is
    the row in the graph's table of collectives. ``group`` is the number of the group; ``group_class`` is
    equal for groups with equal behaviour. ``label`` is the number of the group set. ``number`` counts the
    calls of one group on one rank, from 0. ``states_group`` is True if the program names the group.
    ``comm_bytes`` is NaN if unknown.
    """

    sim_rank: IntArray
    task: IntArray
    row: IntArray
    group: IntArray
    group_class: IntArray
    label: IntArray
    number: IntArray
    kind: IntArray
    states_group: BoolArray
    comm_bytes: FloatArray

    def __len__(self) -> int:
        return len(self.task)

    def where(self, rows: BoolArray | IntArray) -> Calls:
        """Return the selected calls; ``rows`` are numbers or a mask."""
        return Calls(*(getattr(self, column.name)[rows] for column in fields(self)))


def matched_calls(
    job: JobTasks,
    communications: Sequence[CommunicationOrder],
    relations: Relations,
    behaviours: BehaviourClasses,
    diagnostics: Diagnostics,
) -> tuple[Calls, IntArray]:
    """Match the k-th call of a group on each rank with the k-th call of every other member.

    Return the calls that match another call, of other ranks or of the same rank, and the communication event
    of each. Raises ``CheckFailedError`` if members of a group run different collectives in it. If no program
    states the group, its members do not wait for each other, with a warning in ``diagnostics``.
    """
    parts: list[tuple[IntArray | BoolArray | FloatArray, ...]] = []
    for position, (sim_rank, communication) in enumerate(zip(job.sim_ranks, communications, strict=True)):
        group = relations.group[communication.call_set, sim_rank.rank]
        mine = group != NONE
        group, row = group[mine], communication.call_row[mine]
        label = relations.label[communication.call_set[mine], sim_rank.rank]
        parts.append(
            (
                np.full(len(group), position),
                communication.calls[mine] + job.first[position],
                row,
                group,
                behaviours.group_class[group],
                label,
                occurrences(label),
                sim_rank.graph.collectives.kind[row].astype(np.int64),
                communication.states_group[mine],
                sim_rank.graph.collectives.comm_bytes[row],
            )
        )
    calls = Calls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    broken = np.zeros(int(behaviours.group_class.max(initial=-1)) + 1, np.bool_)
    states_group = broken.copy()
    states_group[calls.group_class[calls.states_group]] = True
    for mismatch in _group_mismatches(job, calls, relations, behaviours):
        if states_group[mismatch.group_class]:
            raise mismatch.error()
        broken[mismatch.group_class] = True
    diagnostics.warning(
        "simulate.ranks-not-synchronised",
        job.sim_ranks[0].graph.name,
        "collectives state no group and differ between ranks: ranks do not wait for each other in them",
        count=int(broken[calls.group_class].sum()),
    )
    calls = calls.where(~broken[calls.group_class])
    most = int(calls.number.max(initial=0)) + 1
    event, members = np.unique(
        calls.group_class * most + calls.number, return_inverse=True, return_counts=True
    )[1:]
    is_shared = members[event.reshape(-1)] > 1
    event = np.unique(event.reshape(-1)[is_shared], return_inverse=True)[1]
    return calls.where(is_shared), event.reshape(-1)


@dataclass(frozen=True, slots=True)
class _GroupMismatch:
    """Error of a group whose members run different collectives: the first position that differs, and the
    message.
    """

    group_class: int
    rank: int
    node: int
    text: str

    def error(self) -> CheckFailedError:
        return CheckFailedError(
            self.text, code="ET020", position=f"rank {self.rank}, node {self.node}", hint=_HINT
        )


def _describe_call(job: JobTasks, calls: Calls, row: int) -> tuple[int, int, str]:
    """Return the rank, the node id and the label of a call of a collective, for messages."""
    sim_rank, task = job.sim_ranks[int(calls.sim_rank[row])], int(calls.task[row])
    node = int(sim_rank.program.node[job.local(task)])
    name = node_label(sim_rank.graph, node)
    what = CollectiveKind(int(calls.kind[row])).name.lower().replace("_", "-")
    return sim_rank.rank, int(sim_rank.graph.id[node]), f"rank {sim_rank.rank}: {name} ({what})"


def _group_mismatches(
    job: JobTasks, calls: Calls, relations: Relations, behaviours: BehaviourClasses
) -> Iterator[_GroupMismatch]:
    """Yield groups whose members run collectives of different kinds, counts or sizes."""
    with_kind = calls.where(calls.kind != int(CollectiveKind.UNKNOWN))
    for one, two in _unlike(with_kind, with_kind.kind):
        rank, node, label = _describe_call(job, with_kind, one)
        other = _describe_call(job, with_kind, two)[2]
        text = f"{label} does not match {other}: number {int(with_kind.number[one]) + 1:,} of their group"
        yield _GroupMismatch(int(with_kind.group_class[one]), rank, node, text)
    yield from _mismatches_of_count(job, calls)
    with_size = calls.where(calls.states_group & ~np.isnan(calls.comm_bytes))
    for one, two in _unlike(with_size, with_size.comm_bytes):
        rank, node, label = _describe_call(job, with_size, one)
        other = _describe_call(job, with_size, two)[2]
        sizes = [f"{with_size.comm_bytes[row]:,.0f} bytes" for row in (one, two)]
        text = f"{label} of {sizes[0]} does not match {other} of {sizes[1]}"
        yield _GroupMismatch(int(with_size.group_class[one]), rank, node, text)
    for group_class, group in zip(*np.unique(calls.group_class, return_index=True), strict=True):
        first = int(group)
        inside = relations.group == int(calls.group[first])
        called = (inside & (relations.label != NONE)).any(axis=0)
        silent = np.flatnonzero(inside.any(axis=0) & ~called & (relations.rank_class != ABSENT))
        if len(silent):
            rank, node, label = _describe_call(job, calls, first)
            yield _GroupMismatch(
                int(group_class),
                rank,
                node,
                f"{label} waits for rank {int(silent[0])}, which runs none in their group",
            )


def _unlike(calls: Calls, column: IntArray | FloatArray) -> Iterator[tuple[int, int]]:
    """Yield pairs of calls that should be the same collective but have different values in ``column``."""
    order = np.lexsort((calls.number, calls.group_class))
    one, two = order[:-1], order[1:]
    same_call = (calls.group_class[one] == calls.group_class[two]) & (calls.number[one] == calls.number[two])
    differ = np.flatnonzero(same_call & (column[one] != column[two]))
    yield from zip(one[differ].tolist(), two[differ].tolist(), strict=True)


def _mismatches_of_count(job: JobTasks, calls: Calls) -> Iterator[_GroupMismatch]:
    """Yield groups in which one member runs more collectives than another."""
    order = np.lexsort((calls.number, calls.label, calls.sim_rank, calls.group_class))
    group_class, sim_rank, label = calls.group_class[order], calls.sim_rank[order], calls.label[order]
    same = (group_class[1:] == group_class[:-1]) & (sim_rank[1:] == sim_rank[:-1]) & (label[1:] == label[:-1])
    last = order[np.append(~same, True)[: len(order)]]  # the last call of each member
    if not len(last):
        return
    fewest = np.full(int(calls.group_class.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(fewest, calls.group_class[last], calls.number[last])
    more = last[calls.number[last] > fewest[calls.group_class[last]]]
    for row in more.tolist():
        number = int(calls.group_class[row])
        few = int(fewest[number])
        following = calls.number == few + 1
        following &= (calls.sim_rank == calls.sim_rank[row]) & (calls.label == calls.label[row])
        rank, node, text = _describe_call(job, calls, int(np.flatnonzero(following)[0]))
        with_few = last[(calls.group_class[last] == number) & (calls.number[last] == few)]
        other = job.sim_ranks[int(calls.sim_rank[with_few[0]])].rank
        yield _GroupMismatch(
            number, rank, node,
            f"{text} waits for rank {other}, which runs only {few + 1:,} collectives in their group",
        )  # fmt: skip


@dataclass(slots=True)
class _Arrivals:
    """Columns of communication events and arrivals while they are collected."""

    duration_ns: FloatArray
    ended_by: IntArray
    is_message: BoolArray
    task: list[IntArray] = field(default_factory=list[IntArray])
    event: list[IntArray] = field(default_factory=list[IntArray])
    lag_ns: list[FloatArray] = field(default_factory=list[FloatArray])

    def add(self, task: IntArray, event: IntArray, lag_ns: FloatArray) -> None:
        self.task.append(task)
        self.event.append(event)
        self.lag_ns.append(lag_ns)

    def built(self) -> CommunicationEvents:
        task = np.concatenate([np.empty(0, np.int64), *self.task])
        event = np.concatenate([np.empty(0, np.int64), *self.event])
        return CommunicationEvents(
            arrivals=RaggedArray.from_pairs(task, event, len(self.duration_ns)),
            lag_ns=np.concatenate([np.empty(0), *self.lag_ns])[np.argsort(task, kind="stable")],
            ended_by=self.ended_by,
            duration_ns=self.duration_ns,
            is_message=self.is_message,
        )


def match_communication(
    job: JobTasks,
    communications: Sequence[CommunicationOrder],
    relations: Relations,
    behaviours: BehaviourClasses,
    *,
    protocol: Protocol,
    differing: Differing,
    diagnostics: Diagnostics,
) -> CommunicationEvents:
    """Return the communication events of the simulated ranks. ``communications`` has the collectives and
    messages of each rank in order of issue.

    Raises ``CheckFailedError`` if members of a group run different collectives in it, or if a message is
    received but never sent. With the protocol ``rendezvous`` it is also raised for a message that is sent but
    never received.
    """
    tasks = len(job.duration_ns)
    draft = _Arrivals(job.duration_ns.copy(), np.full(tasks, -1, np.int64), np.zeros(tasks, np.bool_))
    calls, event = matched_calls(job, communications, relations, behaviours, diagnostics)
    stated_ns = draft.duration_ns[calls.task]
    agreed = np.zeros(int(event.max(initial=-1)) + 1)
    np.maximum.at(agreed, event, stated_ns)
    if differing == "shortest":
        is_known = stated_ns > 0
        np.minimum.at(agreed, event[is_known], stated_ns[is_known])
    agreed = agreed[event]
    diagnostics.info(
        "simulate.differing-times",
        job.sim_ranks[0].graph.name,
        f"collectives whose members state different times take the {differing} one",
        count=len(np.unique(event[agreed != stated_ns])),
    )
    draft.duration_ns[calls.task] = agreed
    draft.ended_by[calls.task] = event
    draft.add(calls.task, event, agreed)
    pairs = _pairs(job, communications, relations, behaviours)
    name = job.sim_ranks[0].graph.name
    diagnostics.warning(
        "simulate.absent-peers", name, "messages from and to absent ranks do not wait",
        count=pairs.absent,
    )  # fmt: skip
    waits = [entry for entry in pairs.unmatched if not entry[2] or protocol == "rendezvous"]
    if waits:
        task, other, sender = waits[0]
        sim_rank = job.rank_of(task)
        node = int(sim_rank.program.node[job.local(task)])
        lacks = "receives no such message" if sender else "sends no such message"
        tag = int(sim_rank.graph.p2p.tag[np.searchsorted(sim_rank.graph.p2p.node, node)])
        raise CheckFailedError(
            f"rank {sim_rank.rank}: {node_label(sim_rank.graph, node)} waits for rank "
            f"{other}, which {lacks}" + (f" with tag {tag}" if tag >= 0 else ""),
            code="ET015",
            position=f"rank {sim_rank.rank}, node {int(sim_rank.graph.id[node])}",
            hint="add the missing send or receive, or simulate ranks without waits: `alone`",
        )
    diagnostics.warning(
        "simulate.unreceived", name, "messages are sent but never received", count=len(pairs.unmatched)
    )
    _add_messages(draft, pairs, protocol, differing, int(event.max(initial=-1)) + 1)
    return draft.built()


@dataclass(frozen=True, slots=True, eq=False)
class _MessagePairs:
    """Matched sends and receives. ``task`` waits for ``peer``: ``task`` receives the message that ``peer``
    sends. If ``by_sender`` is True, ``task`` sends and ``peer`` receives.

    ``receives_only`` is True for tasks that do not also send. ``unmatched`` lists tasks without a match, as
    tuples of the task, the rank that lacks the matching task, and True if the task sends. ``absent`` is the
    number of messages from or to ranks that are not in the job.
    """

    task: IntArray
    peer: IntArray
    by_sender: BoolArray
    receives_only: BoolArray
    unmatched: tuple[tuple[int, int, bool], ...]
    absent: int


def _pairs(
    job: JobTasks,
    communications: Sequence[CommunicationOrder],
    relations: Relations,
    behaviours: BehaviourClasses,
) -> _MessagePairs:
    task: list[IntArray] = [np.empty(0, np.int64)]
    peer: list[IntArray] = [np.empty(0, np.int64)]
    by_sender: list[BoolArray] = [np.empty(0, np.bool_)]
    only: list[BoolArray] = [np.empty(0, np.bool_)]
    unmatched: list[tuple[int, int, bool]] = []
    absent = 0
    position_of = {sim_rank.behaviour: position for position, sim_rank in enumerate(job.sim_ranks)}
    for position, (sim_rank, communication) in enumerate(zip(job.sim_ranks, communications, strict=True)):
        for sender in (False, True):
            peers, back = (
                (relations.target, relations.source) if sender else (relations.source, relations.target)
            )
            does = communication.sends if sender else communication.receives
            others = np.where(does, peers[communication.permutation, sim_rank.rank], NONE)
            for other in np.unique(others[others != NONE]).tolist():
                if relations.rank_class[other] == ABSENT:
                    absent += int((others == other).sum())
                    continue
                whose = position_of[int(behaviours.behaviour[other])]
                theirs = communications[whose]
                answers = (theirs.receives if sender else theirs.sends) & (
                    back[theirs.permutation, other] == sim_rank.rank
                )
                mine, partner = np.flatnonzero(others == other), np.flatnonzero(answers)
                matched, match = _matched(communication.tag[mine], theirs.tag[partner])
                task.append(communication.messages[mine[matched]] + job.first[position])
                peer.append(theirs.messages[partner[match]] + job.first[whose])
                by_sender.append(np.full(len(matched), sender))
                only.append(~communication.sends[mine[matched]])
                left = np.delete(mine, matched)
                unmatched += [
                    (int(row) + int(job.first[position]), other, sender)
                    for row in communication.messages[left]
                ]
    return _MessagePairs(
        np.concatenate(task), np.concatenate(peer), np.concatenate(by_sender), np.concatenate(only),
        tuple(unmatched), absent,
    )  # fmt: skip


def _matched(mine: IntArray, theirs: IntArray) -> tuple[IntArray, IntArray]:
    """Match the equal tags of two columns; return their positions. The k-th occurrence in one matches the
    k-th in the other.
    """
    codes = np.unique(np.concatenate([mine, theirs]), return_inverse=True)[1].reshape(-1)
    most = max(len(mine), len(theirs)) + 1
    left, right = (code * most + occurrences(code) for code in (codes[: len(mine)], codes[len(mine) :]))
    _, matched, match = np.intersect1d(left, right, assume_unique=True, return_indices=True)
    return matched.astype(np.int64), match.astype(np.int64)


def _add_messages(
    draft: _Arrivals, pairs: _MessagePairs, protocol: Protocol, differing: Differing, first: int
) -> None:
    """Add one communication event for each task that waits for messages: receivers, and with the protocol
    ``rendezvous`` also senders. The task itself and its peers arrive at the event.

    ``first`` is the number of the first new event.
    """
    waits = np.ones(len(pairs.task), np.bool_) if protocol == "rendezvous" else ~pairs.by_sender
    task, peer, only = pairs.task[waits], pairs.peer[waits], pairs.receives_only[waits]
    waiting, event_of = np.unique(task, return_inverse=True)
    event_of = event_of.reshape(-1)
    mine, theirs = draft.duration_ns[task], draft.duration_ns[peer]
    if protocol == "eager":
        lag = np.where(theirs > 0, theirs, mine)  # the sender's time
        own = np.where(only, 0.0, mine)  # a pure receive ends on arrival
    else:
        low = np.where((mine > 0) & (theirs > 0), np.minimum(mine, theirs), np.maximum(mine, theirs))
        lag = low if differing == "shortest" else np.maximum(mine, theirs)
        own = lag
    own_lag = np.zeros(len(waiting))
    np.maximum.at(own_lag, event_of, own)
    takes = np.zeros(len(waiting))
    np.maximum.at(takes, event_of, np.where(only, lag, own))
    draft.ended_by[waiting] = first + np.arange(len(waiting))
    draft.is_message[waiting] = True
    draft.duration_ns[waiting] = takes
    draft.add(peer, first + event_of, lag)
    draft.add(waiting, first + np.arange(len(waiting)), own_lag)
