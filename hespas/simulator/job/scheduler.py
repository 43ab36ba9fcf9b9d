"""The step of a whole job: every rank on its streams, waiting for others where they do something together.

What a rank does is scheduled as :mod:`hespas.simulator.list_scheduler` does. A collective starts on a rank's
stream when it is issued there and ends for all members at once: when the last one has come, plus the time it
takes. A message that is received ends when it has been sent; a receive that names no stream holds none.

Communication runs in program order on each stream, as on a queue of a device, for one rank and for many:
ranks that run the same program at different speed then cannot wait for each other crosswise.

Ranks that must behave alike are simulated once (:mod:`hespas.simulator.job.symmetry`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log1p, sqrt

import numpy as np

from hespas.graph import ABSENT, Diagnostics, NodeKind, OpGraph, RaggedArray, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray, equal_rows
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.hints import NonNegativeInt, PositiveInt, check_fields
from hespas.graph.passes import with_durations
from hespas.simulator.job.actors import Actor
from hespas.simulator.job.figures import across, scheduled
from hespas.simulator.job.idle import IdleParts, has_idle_parts, idle_parts
from hespas.simulator.job.loops import with_loops
from hespas.simulator.job.options import Differing, Protocol, Starts
from hespas.simulator.job.relations import NOBODY, Relations, relations_of
from hespas.simulator.job.symmetry import Colours, every_rank, refined
from hespas.simulator.job.together import Together
from hespas.simulator.list_scheduler import ListScheduler, expanded
from hespas.simulator.progress import Pressure
from hespas.simulator.results import ClassOf, Scheduled, alone, simulation_of
from hespas.simulator.schedule import Priority, Program, Simulation, Tasks, communication_order
from hespas.simulator.streams import COMMUNICATION, kinds_of, stream_codes

__all__ = ["JobScheduler"]

_MOST_SLOWER = 1e9
_MOST_TASKS = 20_000_000
"""Operations of all ranks that are simulated one by one: about 10 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScheduler:
    """The schedule of a whole job; fields are its options.

    ``priority``, ``max_executions``, ``overlap_trips``, ``interference`` and ``launches`` are those of
    :class:`hespas.simulator.ListScheduler`, the second of all ranks that are simulated together. ``protocol``
    says whether who sends waits for the receiver; ``differing`` how long a collective takes whose members
    state different times. ``starts`` says whether ranks begin together, or, where all times were recorded, as
    far apart as their recordings. ``jitter`` is the standard deviation, over the mean, of the time of each
    computation and copy on each rank (log-normal, mean 1), drawn with ``seed``; ``stragglers`` are ranks and
    the factors by which all they do alone takes longer. Without ``symmetry`` every rank is simulated.
    ``differing`` and ``starts`` that are left open are settled by where times come from
    (:func:`hespas.simulator.simulate`): "longest" and "together" but for recorded ones.
    """

    priority: Priority = "program"
    max_executions: PositiveInt = 1_000_000
    overlap_trips: bool = False
    protocol: Protocol = "eager"
    differing: Differing | None = None
    starts: Starts | None = None
    jitter: float = 0.0
    seed: NonNegativeInt = 0
    stragglers: tuple[tuple[int, float], ...] = field(default=())
    symmetry: bool = True
    interference: bool = True
    launches: bool = True

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        check_fields(self)
        if not 0 <= self.jitter < 10:
            raise UsageError(f"a jitter of {self.jitter} is no standard deviation between 0 and 10")
        for rank, factor in self.stragglers:
            if not 1 / _MOST_SLOWER <= factor <= _MOST_SLOWER:
                hint = "a factor from 1e-9 to 1e9"
                raise UsageError(f"rank {rank} cannot take {factor} times as long", hint=hint)

    @property
    def name(self) -> str:
        """``job-schedule``."""
        return "job-schedule"

    def run(
        self, workload: Workload, diagnostics: Diagnostics, pressures: Sequence[Pressure] | None = None
    ) -> Simulation:
        """The step of each rank; see the module. ``pressures`` are those of the rank classes.
        O(executions log executions) of the ranks simulated.
        """
        pressures = pressures if self.interference else None
        if self.symmetry and not self.jitter and not self.stragglers and _in_step(workload):
            alike = ListScheduler(
                priority=self.priority,
                max_executions=self.max_executions,
                overlap_trips=self.overlap_trips,
            )
            return replace(alike.run(workload, diagnostics, pressures), simulator=self.name)
        relations = relations_of(workload)
        pace = self._pace(workload)
        idle = idle_parts(workload, relations)
        colours = self._colours(relations, pace, idle)
        whole = _Whole(self, workload, relations, colours, pace, idle, diagnostics, pressures)
        return whole.run()

    def _pace(self, workload: Workload) -> FloatArray:
        """By how much longer each rank takes, ``(ranks,)``. Raises ``UsageError`` for ranks not here."""
        pace = np.ones(workload.num_ranks)
        for rank, factor in self.stragglers:
            if not 0 <= rank < len(pace) or workload.rank_class[rank] == ABSENT:
                raise UsageError(f"rank {rank} is not here: the job has {workload.num_available:,} ranks")
            pace[rank] = factor
        return pace

    def _colours(self, relations: Relations, pace: FloatArray, idle: IdleParts) -> Colours:
        if self.jitter or not self.symmetry:
            return every_rank(relations)
        _, start = equal_rows(relations.rank_class, pace, idle.pattern)
        return refined(relations, start, both_ways=self.protocol == "rendezvous")


_NOTHING = Program(
    tasks=Tasks("", np.empty(0), np.empty(0, np.int32), RaggedArray.empty(0)),
    node=np.empty(0, np.int32),
    block=np.empty(0, np.int32),
    op_class=np.empty(0, np.int32),
    blocks=(),
)
_Kind = tuple[int, float, int]
"""A rank class, by how much longer a rank takes, and its pattern of idle communication."""


@dataclass(slots=True)
class _Whole:
    """One run: what is simulated, and graphs made once for all that run them."""

    options: JobScheduler
    workload: Workload
    relations: Relations
    colours: Colours
    pace: FloatArray
    idle: IdleParts
    diagnostics: Diagnostics
    pressures: Sequence[Pressure] | None
    graphs: dict[_Kind, OpGraph] = field(default_factory=dict[_Kind, OpGraph])

    def run(self) -> Simulation:
        """Those that meet nobody are scheduled alone, all others together."""
        colours, name = self.colours, self.options.name
        self.diagnostics.info(
            "simulate.absent-members", self.workload.name,
            "groups have members that are not here: those that are wait for each other only",
            count=self.relations.absent_members(),
        )  # fmt: skip
        meets = _meet(self.relations, colours, both_ways=self.options.protocol == "rendezvous")
        actors = self._actors(np.flatnonzero(meets))
        if not actors:
            meets[:] = False
        part_of = np.full(len(colours.first) + 1, -1, np.int64)  # the last: of ranks that are not here
        parts: list[Scheduled] = []
        for alike in self._alike(np.flatnonzero(~meets)):
            part_of[alike] = len(parts)
            parts.append(self._alone(alike))
        if not actors:
            return simulation_of(name, self.workload, parts, part_of[colours.colour])
        part_of[meets.nonzero()] = len(parts) + np.arange(len(actors))
        joint = self._together.run(actors, self.diagnostics, as_recorded=self.options.starts == "recorded")
        ran = scheduled(*joint)
        joined = across(joint.cast, joint.done, ran, sum(len(part.tasks) for part in parts))
        return simulation_of(name, self.workload, [*parts, *ran], part_of[colours.colour], joined)

    @property
    def _together(self) -> Together:
        options = self.options
        return Together(
            self.relations,
            self.colours,
            options.priority,
            options.protocol,
            options.differing or "longest",
        )

    def _alike(self, chosen: IntArray) -> list[list[int]]:
        """Colours that run the same; with jitter none do."""
        found: dict[tuple[int, float, int, int], list[int]] = {}
        for colour in chosen.tolist():
            differs = colour if self.options.jitter else 0
            found.setdefault((*self._kind(int(self.colours.first[colour])), differs), []).append(colour)
        return list(found.values())

    def _kind(self, rank: int) -> _Kind:
        return int(self.relations.rank_class[rank]), float(self.pace[rank]), int(self.idle.pattern[rank])

    def _graph(self, rank: int) -> OpGraph:
        index, pace, pattern = kind = self._kind(rank)
        if kind not in self.graphs:
            graph = self.idle.without_idle_time(self.workload.classes[index], self.relations, pattern)
            self.graphs[kind] = _slower(graph, pace)
        return self.graphs[kind]

    def _jittered(self, program: Program, rank: int) -> Program:
        return _jittered(program, self.options, rank)

    def _alone(self, alike: list[int]) -> Scheduled:
        rank = int(self.colours.first[alike[0]])
        options, graph = self.options, self._graph(rank)
        program = expanded(
            graph,
            options.max_executions,
            options.priority,
            self.diagnostics,
            overlap_trips=options.overlap_trips,
            pressure=None if self.pressures is None else self.pressures[self._kind(rank)[0]],
        )
        program = self._jittered(program, rank)
        whose = ClassOf(self._kind(rank)[0], rank, int(self.colours.count[alike].sum()))
        return alone(graph, program, options.priority, whose, communication_order(program.tasks))

    def _actors(self, together: IntArray) -> list[Actor]:
        """The actors of some colours with their programs; none where these cannot be run together."""
        if not len(together):
            return []
        actors = [
            Actor(colour, rank, count, self._kind(rank)[0], self._graph(rank), _NOTHING)
            for colour, rank, count in zip(
                together.tolist(),
                self.colours.first[together].tolist(),
                self.colours.count[together].tolist(),
                strict=True,
            )
        ]
        limit = max(self.options.max_executions // len(together), 1)
        if sum(len(actor.graph) for actor in actors) > _MOST_TASKS:
            raise UnsupportedError(
                f"{len(together):,} ranks behave differently: over {_MOST_TASKS:,} operations",
                hint="without jitter ranks that do the same are simulated once; "
                "`granularity=region` merges what stands between collectives",
            )
        found = with_loops(
            actors,
            limit,
            self._together,
            self._jittered if self.options.jitter else None,
            self.diagnostics,
            overlap_trips=self.options.overlap_trips,
            pressures=self.pressures,
        )
        if found is None:
            self.diagnostics.warning(
                "simulate.ranks-not-synchronised",
                self.workload.name,
                "ranks meet in loops of different trips, too many to run one by one: nobody waits for others",
            )
        return found or []


def _in_step(workload: Workload) -> bool:
    """Return True if all ranks are present and do the same at the same time: one rank class without
    one-sided messages and without ranks that take no part in some of its communication.
    """
    used = [index for index, count in enumerate(workload.class_sizes) if count]
    if len(used) > 1 or not workload.is_complete:
        return False
    return not _has_sides(workload, used[0]) and not has_idle_parts(workload, used[0])


def _has_sides(workload: Workload, index: int) -> bool:
    """Whether ranks of a class only send, or only receive."""
    table, kind = workload.classes[index].p2p, workload.classes[index].kind
    sides = np.isin(kind[table.node], (int(NodeKind.SEND), int(NodeKind.RECV)))
    return bool((sides & (table.permutation >= 0) & ~table.host).any())


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
