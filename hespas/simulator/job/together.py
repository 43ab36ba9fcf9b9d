"""Programs of several actors run together: matched, queued, scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hespas.graph import Diagnostics, NodeKind, RaggedArray
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.simulator.job.actors import Actor, Cast, cast_of
from hespas.simulator.job.events import JointSchedule, joint_schedule
from hespas.simulator.job.meetings import Meetings, meetings_of
from hespas.simulator.job.options import Differing, Protocol
from hespas.simulator.job.relations import Relations
from hespas.simulator.job.starts import recorded_starts
from hespas.simulator.job.stuck import check_finished
from hespas.simulator.job.symmetry import Colours
from hespas.simulator.job.talk import Talk, talk_of
from hespas.simulator.schedule import Priority, communication_pairs, issue_order, ranks_of
from hespas.simulator.streams import FREE, POSTED

__all__ = ["Joint", "Together"]


class Joint(NamedTuple):
    """What actors did together."""

    cast: Cast
    meetings: Meetings
    done: JointSchedule


@dataclass(frozen=True, slots=True)
class Together:
    """Rules of a job by which its ranks meet, and their schedule together."""

    relations: Relations
    colours: Colours
    priority: Priority
    protocol: Protocol
    differing: Differing

    def matched(self, actors: Sequence[Actor], diagnostics: Diagnostics) -> tuple[Cast, Meetings]:
        """Who meets whom; raises as :func:`hespas.simulator.job.meetings.meetings_of`."""
        found: dict[int, Talk] = {}
        talks: list[Talk] = []
        for actor in actors:
            key = id(actor.program.node)  # programs that differ in times only share this column
            if key not in found:
                found[key] = talk_of(actor.graph, actor.program, self.relations)
            talks.append(found[key])
        cast = cast_of(tuple(actors))
        meetings = meetings_of(
            cast,
            talks,
            self.relations,
            self.colours,
            protocol=self.protocol,
            differing=self.differing,
            diagnostics=diagnostics,
        )
        return replace(cast, stream=_posted(cast, meetings)), meetings

    def run(self, actors: Sequence[Actor], diagnostics: Diagnostics, *, as_recorded: bool = False) -> Joint:
        """The schedule of actors; ``as_recorded`` they begin as far apart as their recordings. Raises
        ``CheckFailedError`` where they wait for each other for ever.
        """
        cast, meetings = self.matched(actors, diagnostics)
        done = joint_schedule(
            cast,
            meetings,
            _places(cast, self.priority),
            _queued(cast),
            self._begin_ns(cast, meetings, diagnostics) if as_recorded else None,
        )
        check_finished(cast, meetings, done, diagnostics)
        return Joint(cast, meetings, done)

    def _begin_ns(self, cast: Cast, meetings: Meetings, diagnostics: Diagnostics) -> FloatArray:
        begin_ns = recorded_starts(cast, meetings, self.priority)
        diagnostics.info(
            "simulate.recorded-starts",
            cast.actors[0].graph.name,
            f"recordings begin up to {begin_ns.max() / 1e6:,.3f} ms apart: ranks end collectives together",
            count=int((begin_ns > 0).sum()),
        )
        return begin_ns


def _queued(cast: Cast) -> RaggedArray:
    """Return dependencies of all tasks with those of the communication streams of each actor."""
    issued: dict[int, IntArray] = {}
    after: list[IntArray] = [cast.deps.row_ids]
    before: list[IntArray] = [cast.deps.values.astype(np.int64)]
    for place, actor in enumerate(cast.actors):
        deps = actor.program.tasks.deps  # shared by actors that run the same graph
        if id(deps) not in issued:
            issued[id(deps)] = issue_order(deps)
        first, end = int(cast.first[place]), int(cast.first[place + 1])
        pairs = communication_pairs(cast.stream[first:end], issued[id(deps)])
        after.append(pairs[0] + first)
        before.append(pairs[1] + first)
    return RaggedArray.from_pairs(np.concatenate(after), np.concatenate(before), len(cast.deps))


def _posted(cast: Cast, meetings: Meetings) -> SmallIntArray:
    """Streams, without those of receives that name none, and of what waits though it takes no time."""
    posted = (meetings.ended_by >= 0) & (cast.stream == FREE)
    for place, actor in enumerate(cast.actors):
        mine = slice(int(cast.first[place]), int(cast.first[place + 1]))
        only = (actor.graph.kind == int(NodeKind.RECV)) & (actor.graph.stream < 0)
        posted[mine] |= meetings.is_message[mine] & np.append(only, False)[actor.program.node]
    return np.where(posted, POSTED, cast.stream).astype(np.int32)


def _places(cast: Cast, priority: Priority) -> IntArray | None:
    """The place of each task among ready ones of its actor; None for program order."""
    if priority == "program":
        return None
    found: list[IntArray] = []
    for actor, offset in zip(cast.actors, cast.first.tolist(), strict=False):
        place = ranks_of(actor.program.tasks, priority)
        assert place is not None
        found.append(place + offset)
    return np.concatenate(found)
