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
from hespas.simulator.schedule import Priority, Program, list_schedule, ranks_of
from hespas.simulator.streams import FREE, POSTED

__all__ = ["Joint", "Together", "queued"]


class Joint(NamedTuple):
    """What actors did together."""

    cast: Cast
    meetings: Meetings
    done: JointSchedule


@dataclass(frozen=True, slots=True)
class Together:
    """The rules of a job. ``differ`` says that its ranks do: then what waits for others does so in order: in
    that of the program, or, where all run the same one, in that in which it would run if they did not differ.
    ``alike_ns`` are the times of the nodes of that one (None: there are several).
    """

    relations: Relations
    colours: Colours
    priority: Priority
    protocol: Protocol
    differing: Differing
    differ: bool
    alike_ns: FloatArray | None

    def matched(self, actors: Sequence[Actor], diagnostics: Diagnostics) -> tuple[Cast, list[Talk], Meetings]:
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
        return replace(cast, stream=_posted(cast, meetings)), talks, meetings

    def run(self, actors: Sequence[Actor], diagnostics: Diagnostics, *, as_recorded: bool = False) -> Joint:
        """The schedule of actors; ``as_recorded`` they begin as far apart as their recordings. Raises
        ``CheckFailedError`` where they wait for each other for ever.
        """
        cast, talks, meetings = self.matched(actors, diagnostics)
        queue: RaggedArray | None = None
        if self.differ:
            order = self._alike_order(actors[0].program)
            queue = queued(cast.deps, cast.stream, cast.first, talks, self.protocol, order=order)
        done = joint_schedule(
            cast,
            meetings,
            _places(cast, self.priority),
            queue,
            self._begin_ns(cast, meetings, diagnostics) if as_recorded else None,
        )
        check_finished(cast, meetings, done, diagnostics)
        return Joint(cast, meetings, done)

    def _alike_order(self, program: Program) -> FloatArray | None:
        """When each task of the one program that all run would start if they did not differ [ns]. What waits
        for others starts in the same order on all of them, so that nobody waits crosswise.
        """
        if self.alike_ns is None:
            return None
        of_node = np.append(self.alike_ns, np.nan)[program.node]
        takes_ns = np.where(program.node >= 0, of_node, program.tasks.duration_ns)
        tasks = replace(program.tasks, duration_ns=np.where(program.tasks.stream == FREE, 0.0, takes_ns))
        return list_schedule(tasks, self.priority).start_ns

    def _begin_ns(self, cast: Cast, meetings: Meetings, diagnostics: Diagnostics) -> FloatArray:
        begin_ns = recorded_starts(cast, meetings, self.priority)
        diagnostics.info(
            "simulate.recorded-starts",
            cast.actors[0].graph.name,
            f"recordings begin up to {begin_ns.max() / 1e6:,.3f} ms apart: ranks end collectives together",
            count=int((begin_ns > 0).sum()),
        )
        return begin_ns


def queued(
    deps: RaggedArray,
    stream: SmallIntArray,
    first: IntArray,
    talks: Sequence[Talk],
    protocol: Protocol,
    *,
    order: FloatArray | None = None,
) -> RaggedArray:
    """Dependencies of tasks with those of what waits for other ranks on what stands before it in its stream;
    the tasks of each of ``talks`` are counted from ``first``. ``order`` is where a task of any of them stands
    (None: as issued).
    """
    after: list[IntArray] = []
    before: list[IntArray] = []
    for talk, offset in zip(talks, first.tolist(), strict=False):
        # in program order also behind what is sent, which a queue of the device runs first
        waits = talk.receives | (protocol == "rendezvous") | (order is None)
        place = np.concatenate([talk.call_place, talk.move_place[waits]])
        queue = np.concatenate([talk.calls, talk.moves[waits]])[np.argsort(place, kind="stable")]
        if order is not None:
            queue = queue[np.argsort(order[queue], kind="stable")]
        queue += offset
        queue = queue[stream[queue] >= 0]
        queue = queue[np.argsort(stream[queue], kind="stable")]
        same = stream[queue[1:]] == stream[queue[:-1]]
        after.append(queue[1:][same])
        before.append(queue[:-1][same])
    rows = np.concatenate([deps.row_ids, *after])
    return RaggedArray.from_pairs(rows, np.concatenate([deps.values, *before]), len(deps))


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
