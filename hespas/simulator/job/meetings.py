"""Which tasks of which ranks wait for each other.

Collectives meet by group and number (:mod:`hespas.simulator.job.calls`). The k-th message from one rank to
another under a tag is what the other receives k-th from there under it. Order is that of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.graph import ABSENT, Diagnostics, RaggedArray
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import CheckFailedError
from hespas.simulator.job.actors import Cast
from hespas.simulator.job.calls import matched_calls
from hespas.simulator.job.options import Differing, Protocol
from hespas.simulator.job.relations import NOBODY, Relations
from hespas.simulator.job.symmetry import Colours
from hespas.simulator.job.talk import Talk, occurrences
from hespas.simulator.schedule import node_label

__all__ = ["Meetings", "meetings_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Meetings:
    """A meeting ends when of all its arrivals, each ``lag_ns`` after its task starts, the last is over.

    ``arrivals`` has, per task, the meetings it arrives at, ``lag_ns`` one entry for each of them.
    ``ended_by`` is the meeting a task waits for (-1: none), shape ``(tasks,)``. ``duration_ns`` is what each
    task takes once nobody keeps it waiting, ``is_message`` whether it is one.
    """

    arrivals: RaggedArray
    lag_ns: FloatArray
    ended_by: IntArray
    duration_ns: FloatArray
    is_message: BoolArray

    @property
    def count(self) -> int:
        """Number of meetings."""
        return int(self.arrivals.values.max(initial=-1)) + 1


@dataclass(slots=True)
class _Draft:
    """Arrivals in the making."""

    duration_ns: FloatArray
    ended_by: IntArray
    is_message: BoolArray
    task: list[IntArray] = field(default_factory=list[IntArray])
    meeting: list[IntArray] = field(default_factory=list[IntArray])
    lag_ns: list[FloatArray] = field(default_factory=list[FloatArray])

    def add(self, task: IntArray, meeting: IntArray, lag_ns: FloatArray) -> None:
        self.task.append(task)
        self.meeting.append(meeting)
        self.lag_ns.append(lag_ns)

    def built(self) -> Meetings:
        task = np.concatenate([np.empty(0, np.int64), *self.task])
        meeting = np.concatenate([np.empty(0, np.int64), *self.meeting])
        return Meetings(
            arrivals=RaggedArray.from_pairs(task, meeting, len(self.duration_ns)),
            lag_ns=np.concatenate([np.empty(0), *self.lag_ns])[np.argsort(task, kind="stable")],
            ended_by=self.ended_by,
            duration_ns=self.duration_ns,
            is_message=self.is_message,
        )


def meetings_of(
    cast: Cast,
    talks: Sequence[Talk],
    relations: Relations,
    colours: Colours,
    *,
    protocol: Protocol,
    differing: Differing,
    diagnostics: Diagnostics,
) -> Meetings:
    """The meetings of actors, whose communication ``talks`` has. Raises ``CheckFailedError`` where members of
    a group run other collectives in it than each other, and where a message is received that nobody sends.
    """
    tasks = len(cast.duration_ns)
    draft = _Draft(cast.duration_ns.copy(), np.full(tasks, -1, np.int64), np.zeros(tasks, np.bool_))
    calls, meeting = matched_calls(cast, talks, relations, colours, diagnostics)
    stated = draft.duration_ns[calls.task]
    agreed = _agreed(stated, meeting, differing)
    diagnostics.info(
        "simulate.differing-times",
        cast.actors[0].graph.name,
        f"collectives whose members state different times take the {differing} of them",
        count=len(np.unique(meeting[agreed != stated])),
    )
    draft.duration_ns[calls.task] = agreed
    draft.ended_by[calls.task] = meeting
    draft.add(calls.task, meeting, agreed)
    pairs = _pairs(cast, talks, relations, colours)
    _check_pairs(cast, pairs, protocol, diagnostics)
    _add_messages(draft, pairs, protocol, differing, int(meeting.max(initial=-1)) + 1)
    return draft.built()


def _agreed(stated: FloatArray, meeting: IntArray, differing: Differing) -> FloatArray:
    """The longest or shortest of the times that are stated in each meeting; 0 is not known."""
    count = int(meeting.max(initial=-1)) + 1
    longest = np.zeros(count)
    np.maximum.at(longest, meeting, stated)
    if differing == "longest":
        return longest[meeting]
    shortest, known = longest.copy(), stated > 0
    np.minimum.at(shortest, meeting[known], stated[known])
    return shortest[meeting]


# --- Messages


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """What each message waits for: ``task`` receives what ``peer`` sends (``by_sender``: the reverse).

    ``receives_only`` tells what does not send besides. ``unmatched`` are tasks, the rank that is here and
    does not do its part, and whether they send; ``absent`` counts messages of ranks that are not here.
    """

    task: IntArray
    peer: IntArray
    by_sender: BoolArray
    receives_only: BoolArray
    unmatched: tuple[tuple[int, int, bool], ...]
    absent: int


def _pairs(cast: Cast, talks: Sequence[Talk], relations: Relations, colours: Colours) -> _Pairs:
    task: list[IntArray] = [np.empty(0, np.int64)]
    peer: list[IntArray] = [np.empty(0, np.int64)]
    by_sender: list[BoolArray] = [np.empty(0, np.bool_)]
    only: list[BoolArray] = [np.empty(0, np.bool_)]
    unmatched: list[tuple[int, int, bool]] = []
    absent = 0
    place_of = {actor.colour: place for place, actor in enumerate(cast.actors)}
    for place, (actor, talk) in enumerate(zip(cast.actors, talks, strict=True)):
        for sender in (False, True):
            peers, back = _ends(relations, sender=sender)
            does = talk.sends if sender else talk.receives
            others = np.where(does, peers[talk.permutation, actor.rank], NOBODY)
            for other in np.unique(others[others != NOBODY]).tolist():
                if relations.rank_class[other] == ABSENT:
                    absent += int((others == other).sum())
                    continue
                whose = place_of[int(colours.colour[other])]
                theirs = talks[whose]
                answers = (theirs.receives if sender else theirs.sends) & (
                    back[theirs.permutation, other] == actor.rank
                )
                mine, partner = np.flatnonzero(others == other), np.flatnonzero(answers)
                found, match = _matched(talk.tag[mine], theirs.tag[partner])
                task.append(talk.moves[mine[found]] + cast.first[place])
                peer.append(theirs.moves[partner[match]] + cast.first[whose])
                by_sender.append(np.full(len(found), sender))
                only.append(~talk.sends[mine[found]])
                left = np.delete(mine, found)
                unmatched += [(int(row) + int(cast.first[place]), other, sender) for row in talk.moves[left]]
    return _Pairs(
        np.concatenate(task), np.concatenate(peer), np.concatenate(by_sender), np.concatenate(only),
        tuple(unmatched), absent,
    )  # fmt: skip


def _ends(relations: Relations, *, sender: bool) -> tuple[IntArray, IntArray]:
    """Whom messages go to, and the way back; or whom they come from."""
    return (relations.target, relations.source) if sender else (relations.source, relations.target)


def _matched(mine: IntArray, theirs: IntArray) -> tuple[IntArray, IntArray]:
    """Places of equal tags in two columns, the k-th of one with the k-th of the other."""
    codes = np.unique(np.concatenate([mine, theirs]), return_inverse=True)[1].reshape(-1)
    most = max(len(mine), len(theirs)) + 1
    left, right = (code * most + occurrences(code) for code in (codes[: len(mine)], codes[len(mine) :]))
    _, found, match = np.intersect1d(left, right, assume_unique=True, return_indices=True)
    return found.astype(np.int64), match.astype(np.int64)


def _check_pairs(cast: Cast, pairs: _Pairs, protocol: Protocol, diagnostics: Diagnostics) -> None:
    """Raise ``CheckFailedError`` for what waits for ever."""
    name = cast.actors[0].graph.name
    diagnostics.warning(
        "simulate.absent-peers", name, "messages from and to ranks that are not here wait for nobody",
        count=pairs.absent,
    )  # fmt: skip
    waits = [each for each in pairs.unmatched if not each[2] or protocol == "rendezvous"]
    if waits:
        task, other, sender = waits[0]
        actor = cast.actor_of(task)
        node = int(actor.program.node[cast.local(task)])
        lacks = "receives no such message" if sender else "sends no such message"
        tag = int(actor.graph.p2p.tag[np.searchsorted(actor.graph.p2p.node, node)])
        raise CheckFailedError(
            f"rank {actor.rank}: {node_label(actor.graph, node)} waits for rank "
            f"{other}, which {lacks}" + (f" with tag {tag}" if tag >= 0 else ""),
            code="ET015",
            position=f"rank {actor.rank}, node {int(actor.graph.id[node])}",
            hint="every send needs one receive of its source, target and tag; with `alone` no rank waits",
        )
    diagnostics.warning(
        "simulate.unreceived", name, "messages are sent that nobody receives", count=len(pairs.unmatched)
    )


def _add_messages(draft: _Draft, pairs: _Pairs, protocol: Protocol, differing: Differing, first: int) -> None:
    """One meeting per message that waits: with who sends it, and with who receives what it sends."""
    kept = np.ones(len(pairs.task), np.bool_) if protocol == "rendezvous" else ~pairs.by_sender
    task, peer, only = pairs.task[kept], pairs.peer[kept], pairs.receives_only[kept]
    waiting, place = np.unique(task, return_inverse=True)
    place = place.reshape(-1)
    mine, theirs = draft.duration_ns[task], draft.duration_ns[peer]
    if protocol == "eager":
        lag = np.where(theirs > 0, theirs, mine)  # as long as the sender says
        own = np.where(only, 0.0, mine)  # who receives only is done once it is there
    else:
        low = np.where((mine > 0) & (theirs > 0), np.minimum(mine, theirs), np.maximum(mine, theirs))
        lag = low if differing == "shortest" else np.maximum(mine, theirs)
        own = lag
    own_lag = np.zeros(len(waiting))
    np.maximum.at(own_lag, place, own)
    takes = np.zeros(len(waiting))
    np.maximum.at(takes, place, np.where(only, lag, own))
    draft.ended_by[waiting] = first + np.arange(len(waiting))
    draft.is_message[waiting] = True
    draft.duration_ns[waiting] = takes
    draft.add(peer, first + place, lag)
    draft.add(waiting, first + np.arange(len(waiting)), own_lag)
