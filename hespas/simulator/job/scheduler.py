"""The step of a whole job: every rank on its streams, waiting for others where they do something together.

What a rank does is scheduled as :mod:`hespas.simulator.list_scheduler` does. A collective starts on a rank's
stream when it is issued there and ends for all members at once: when the last one has come, plus the time it
takes. A message that is received ends when it has been sent; a receive that names no stream holds none.

Where ranks differ, what waits for others runs in program order on each stream, as on a queue of a device:
ranks that run the same program at different speed then cannot wait for each other crosswise.

Ranks that must behave alike are simulated once (:mod:`hespas.simulator.job.symmetry`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, log1p, sqrt

import numpy as np

from hespas.graph import ABSENT, Csr, Diagnostics, NodeKind, OpGraph, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.passes import with_durations
from hespas.simulator.job.actors import Actor, Cast, cast_of
from hespas.simulator.job.events import joint_schedule
from hespas.simulator.job.figures import across, scheduled
from hespas.simulator.job.meetings import Meetings, meetings_of
from hespas.simulator.job.options import DIFFERING, PROTOCOLS, STARTS, Differing, Protocol, Starts
from hespas.simulator.job.relations import NOBODY, Relations, relations_of
from hespas.simulator.job.starts import recorded_starts
from hespas.simulator.job.stuck import check_finished
from hespas.simulator.job.symmetry import Colours, every_rank, refined
from hespas.simulator.job.talk import Talk, talk_of
from hespas.simulator.list_scheduler import expanded
from hespas.simulator.results import ClassOf, Scheduled, alone, simulation_of
from hespas.simulator.schedule import PRIORITIES, Priority, Program, Simulation, ranks_of
from hespas.simulator.streams import COMMUNICATION, FREE, POSTED, kinds_of, stream_codes

__all__ = ["JobScheduler"]

_MOST_TASKS = 20_000_000
"""Operations of all ranks that are simulated one by one: about 10 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScheduler:
    """The schedule of a whole job; fields are its options.

    ``priority`` and ``max_executions`` are those of :class:`hespas.simulator.ListScheduler`, the latter of
    all ranks that are simulated together. ``protocol`` says whether who sends waits for the receiver;
    ``differing`` how long a collective takes whose members state different times. ``starts`` says whether
    ranks begin together, or, where all times were recorded, as far apart as their recordings. ``jitter`` is
    the standard deviation, over the mean, of the time of each computation and copy on each rank (log-normal,
    mean 1), drawn with ``seed``; ``stragglers`` are ranks and the factors by which all they do alone takes
    longer. Without ``symmetry`` every rank is simulated. ``differing`` and ``starts`` that are left open are
    settled by where times come from (:func:`hespas.simulator.simulate`): "longest" and "together" but for
    recorded ones.
    """

    priority: Priority = "program"
    max_executions: int = 1_000_000
    protocol: Protocol = "eager"
    differing: Differing | None = None
    starts: Starts | None = None
    jitter: float = 0.0
    seed: int = 0
    stragglers: tuple[tuple[int, float], ...] = field(default=())
    symmetry: bool = True

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        for value, known in (
            (self.priority, PRIORITIES), (self.protocol, PROTOCOLS), (self.differing, DIFFERING),
            (self.starts, STARTS),
        ):  # fmt: skip
            if value is not None and value not in known:
                raise UsageError(f"unknown option {value!r}", hint=f"one of: {', '.join(known)}")
        if self.max_executions < 1:
            raise UsageError("max_executions must be at least 1")
        if not 0 <= self.jitter < 10:
            raise UsageError(f"a jitter of {self.jitter} is no standard deviation between 0 and 10")
        for rank, factor in self.stragglers:
            if not (isfinite(factor) and factor > 0):
                raise UsageError(f"rank {rank} cannot take {factor} times as long", hint="a factor above 0")

    @property
    def name(self) -> str:
        """``job-schedule``."""
        return "job-schedule"

    def run(self, workload: Workload, diagnostics: Diagnostics) -> Simulation:
        """The step of each rank; see the module. O(executions log executions) of the ranks simulated."""
        relations = relations_of(workload)
        pace = self._pace(workload)
        whole = _Whole(self, workload, relations, self._colours(relations, pace), pace, diagnostics)
        return whole.run()

    def _pace(self, workload: Workload) -> FloatArray:
        """By how much longer each rank takes, ``(ranks,)``. Raises ``UsageError`` for ranks not here."""
        pace = np.ones(workload.num_ranks)
        for rank, factor in self.stragglers:
            if not 0 <= rank < len(pace) or workload.rank_class[rank] == ABSENT:
                raise UsageError(f"rank {rank} is not here: the job has {workload.num_present:,} ranks")
            pace[rank] = factor
        return pace

    def _colours(self, relations: Relations, pace: FloatArray) -> Colours:
        if self.jitter or not self.symmetry:
            return every_rank(relations)
        kinds = np.stack([relations.rank_class.astype(np.float64), pace])
        start = np.unique(kinds, axis=1, return_inverse=True)[1].reshape(-1)
        return refined(relations, start, both_ways=self.protocol == "rendezvous")


_Kind = tuple[int, float]
"""A rank class, and by how much longer a rank takes."""


@dataclass(slots=True)
class _Whole:
    """One run: what is simulated, and programs made once for all that run them."""

    options: JobScheduler
    workload: Workload
    relations: Relations
    colours: Colours
    pace: FloatArray
    diagnostics: Diagnostics
    limit: int = 0
    programs: dict[_Kind, Program] = field(default_factory=dict[_Kind, Program])

    def run(self) -> Simulation:
        """Those that meet nobody are scheduled alone, all others together."""
        colours, name = self.colours, self.options.name
        self.diagnostics.info(
            "simulate.absent-members", self.workload.name,
            "groups have members that are not here: those that are wait for each other only",
            count=self.relations.absent_members(),
        )  # fmt: skip
        meets = self._meeting()
        part_of = np.full(len(colours.first) + 1, -1, np.int64)  # the last: of ranks that are not here
        parts: list[Scheduled] = []
        for alike in self._alike(np.flatnonzero(~meets)):
            part_of[alike] = len(parts)
            parts.append(self._alone(alike))
        together = np.flatnonzero(meets)
        if not len(together):
            return simulation_of(name, self.workload, parts, part_of[colours.colour])
        part_of[together] = len(parts) + np.arange(len(together))
        cast, talks = self._cast(together)
        meetings = self._met(cast, talks)
        cast = replace(cast, stream=_posted(cast, meetings))
        done = joint_schedule(
            cast,
            meetings,
            _places(cast, self.options.priority),
            self._queued(cast.deps, cast.stream, cast.first, talks),
            self._begin_ns(cast, meetings),
        )
        check_finished(cast, meetings, done, self.diagnostics)
        ran = scheduled(cast, meetings, done)
        joined = across(cast, done, ran, sum(len(part.tasks) for part in parts))
        return simulation_of(name, self.workload, [*parts, *ran], part_of[colours.colour], joined)

    @property
    def differ(self) -> bool:
        """Whether ranks do different things, or the same at different speed."""
        several = sum(count > 0 for count in self.workload.class_sizes) > 1
        return several or bool(self.options.jitter) or bool(self.options.stragglers)

    def _meeting(self) -> BoolArray:
        """Which colours meet others, ``(colours,)``. Programs whose loops are too long to be run trip by trip
        are scheduled alone.
        """
        meets = _meet(self.relations, self.colours, both_ways=self.options.protocol == "rendezvous")
        together = np.flatnonzero(meets)
        self.limit = self.options.max_executions
        if not len(together):
            return meets
        self.limit = max(self.options.max_executions // len(together), 1)
        kinds = {self._kind(rank): rank for rank in self.colours.first[together].tolist()}
        extrapolated = [rank for rank in kinds.values() if self._program(rank).blocks]
        if extrapolated:
            self.diagnostics.warning(
                "simulate.ranks-not-synchronised", self.workload.name,
                "loops are too long to be run trip by trip on all ranks that differ: nobody waits for others",
                count=len(extrapolated),
            )  # fmt: skip
            meets[:] = False
        return meets

    def _alike(self, chosen: IntArray) -> list[list[int]]:
        """Colours that run the same; with jitter none do."""
        found: dict[tuple[int, float, int], list[int]] = {}
        for colour in chosen.tolist():
            differs = colour if self.options.jitter else 0
            found.setdefault((*self._kind(int(self.colours.first[colour])), differs), []).append(colour)
        return list(found.values())

    def _kind(self, rank: int) -> _Kind:
        return int(self.relations.rank_class[rank]), float(self.pace[rank])

    def _program(self, rank: int) -> Program:
        """What a rank runs, unrolled."""
        index, pace = kind = self._kind(rank)
        if kind not in self.programs:
            graph = _slower(self.workload.classes[index], pace)
            self.programs[kind] = expanded(graph, self.limit, self.options.priority, self.diagnostics)
        return _jittered(self.programs[kind], self.options, rank)

    def _alone(self, alike: list[int]) -> Scheduled:
        rank = int(self.colours.first[alike[0]])
        index, _ = self._kind(rank)
        program, graph = self._program(rank), self.workload.classes[index]
        whose = ClassOf(index, rank, int(self.colours.count[alike].sum()))
        queued = None
        if self.differ:
            tasks, talk = program.tasks, talk_of(graph, program, self.relations)
            queued = self._queued(tasks.deps, tasks.stream, np.zeros(1, np.int64), [talk])
        return alone(graph, program, self.options.priority, whose, queued)

    def _cast(self, together: IntArray) -> tuple[Cast, list[Talk]]:
        """The actors of some colours, and the communication of each."""
        actors: list[Actor] = []
        talks: dict[_Kind, Talk] = {}
        total = 0
        counts = self.colours.count[together].tolist()
        for colour, count in zip(together.tolist(), counts, strict=True):
            rank = int(self.colours.first[colour])
            kind = index, _ = self._kind(rank)
            program, graph = self._program(rank), self.workload.classes[index]
            if kind not in talks:
                talks[kind] = talk_of(graph, program, self.relations)
            total += len(program.tasks)
            if total > _MOST_TASKS:
                raise UnsupportedError(
                    f"{len(together):,} ranks behave differently: over {_MOST_TASKS:,} operations",
                    hint="without jitter ranks that do the same are simulated once; "
                    "`granularity=region` merges what stands between collectives",
                )
            actors.append(Actor(colour, rank, count, index, graph, program))
        return cast_of(tuple(actors)), [talks[self._kind(actor.rank)] for actor in actors]

    def _met(self, cast: Cast, talks: Sequence[Talk]) -> Meetings:
        return meetings_of(
            cast,
            talks,
            self.relations,
            self.colours,
            protocol=self.options.protocol,
            differing=self.options.differing or "longest",
            diagnostics=self.diagnostics,
        )

    def _begin_ns(self, cast: Cast, meetings: Meetings) -> FloatArray | None:
        if self.options.starts != "recorded":
            return None
        begin_ns = recorded_starts(cast, meetings, self.options.priority)
        self.diagnostics.info(
            "simulate.recorded-starts",
            self.workload.name,
            f"recordings begin up to {begin_ns.max() / 1e6:,.3f} ms apart: ranks end collectives together",
            count=int((begin_ns > 0).sum()),
        )
        return begin_ns

    def _queued(self, deps: Csr, stream: SmallIntArray, first: IntArray, talks: Sequence[Talk]) -> Csr | None:
        """Dependencies with those of what waits for other ranks on what stands before it in its stream."""
        if not self.differ:
            return None
        after: list[IntArray] = []
        before: list[IntArray] = []
        for talk, offset in zip(talks, first.tolist(), strict=False):
            waits = talk.receives | (self.options.protocol == "rendezvous")
            place = np.concatenate([talk.call_place, talk.move_place[waits]])
            queue = np.concatenate([talk.calls, talk.moves[waits]])[np.argsort(place, kind="stable")] + offset
            queue = queue[stream[queue] >= 0]
            queue = queue[np.argsort(stream[queue], kind="stable")]
            same = stream[queue[1:]] == stream[queue[:-1]]
            after.append(queue[1:][same])
            before.append(queue[:-1][same])
        rows = np.concatenate([deps.row_ids, *after])
        return Csr.from_pairs(rows, np.concatenate([deps.values, *before]), len(deps))


def _meet(relations: Relations, colours: Colours, *, both_ways: bool) -> BoolArray:
    """Which colours are in a meeting with another one, or with another task of their own."""
    meets = np.zeros(len(colours.first), np.bool_)
    for row, group in enumerate(relations.group):
        called = (relations.label[row] == row) & (colours.colour >= 0)
        meets[colours.colour[called & (colours.crowd[group] > 1)]] = True
    whose = relations.rank_class
    sends = relations.sends if both_ways else relations.sends & ~relations.permutes
    ways = [(relations.source, relations.receives), (relations.target, sends)]
    for peers, does in ways:
        for row, peer in enumerate(peers):
            other = np.where(peer != NOBODY, colours.colour[peer], -1)
            waits = does[whose, row] & (other >= 0) & (colours.colour >= 0)
            waits &= ~(relations.permutes[whose, row] & (other == colours.colour))
            meets[colours.colour[waits]] = meets[other[waits]] = True
    return meets


def _slower(graph: OpGraph, pace: float) -> OpGraph:
    """The graph of a rank that takes so much longer for all it does alone."""
    if pace == 1:
        return graph
    codes = stream_codes(graph)
    own = (codes >= 0) & (kinds_of(codes) != COMMUNICATION)
    return with_durations(graph, np.where(own, graph.duration_ns * pace, graph.duration_ns))


def _jittered(program: Program, options: JobScheduler, rank: int) -> Program:
    """The program with the times of one rank, each drawn for itself."""
    if not options.jitter:
        return program
    tasks = program.tasks
    draws = np.random.default_rng([options.seed, rank]).standard_normal(len(tasks))
    sigma = sqrt(log1p(options.jitter**2))
    own = (tasks.stream >= 0) & (kinds_of(tasks.stream) != COMMUNICATION) & (program.block < 0)
    factor = np.where(own, np.exp(sigma * draws - sigma * sigma / 2), 1.0)
    return replace(program, tasks=replace(tasks, duration_ns=tasks.duration_ns * factor))


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
