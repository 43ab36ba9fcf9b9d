"""Simulation of the step of a whole job: every rank on its streams, with waits for other ranks in
communication.

The work of a rank is scheduled as by :mod:`hespas.simulator.list_scheduler`. A collective starts on a rank's
stream when it is issued there and ends for all members at once: its duration after the last arrival. A
receive ends when the message has been sent; a receive without a stream occupies none.

Communication of different ranks runs in one order on each stream, as on a device queue, which avoids
deadlocks. Ranks with different programs use program order. Ranks with equal programs use the order in which
the communication becomes ready on a rank without jitter, so that a slightly slower rank hardly changes the
step. Rank classes with equal programs are treated like one class.

Ranks that must behave alike are simulated once (:mod:`hespas.simulator.symmetry`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log1p, sqrt

import numpy as np

from hespas.graph import ABSENT, Diagnostics, NodeKind, OpGraph, RaggedArray, Workload
from hespas.graph.columns import FloatArray, IntArray, equal_rows
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.hints import NonNegativeInt, PositiveInt, check_fields
from hespas.graph.passes import with_durations
from hespas.simulator.interference import Pressure
from hespas.simulator.job.idle_parts import IdleParts, has_idle_parts, idle_parts
from hespas.simulator.job.joint_results import job_columns, schedules_of
from hespas.simulator.job.joint_schedule import JointSimulator
from hespas.simulator.job.loops import with_loops
from hespas.simulator.job.matching import Differing, Protocol, Starts
from hespas.simulator.job.programs import RankProgram
from hespas.simulator.list_scheduler import ListScheduler
from hespas.simulator.loop_extrapolation import expanded
from hespas.simulator.results import (
    RepresentedClass,
    ScheduledRank,
    Simulation,
    schedule_alone,
    simulation_of,
)
from hespas.simulator.schedule import Priority, TaskProgram, Tasks, communication_order
from hespas.simulator.streams import COMMUNICATION, kinds_of, stream_codes
from hespas.simulator.symmetry import (
    NONE,
    BehaviourClasses,
    Relations,
    behave_alike,
    every_rank,
    relations_of,
)

__all__ = ["JobScheduler"]

_MOST_SLOWER = 1e9
_MOST_TASKS = 20_000_000
"""Limit on operations of all individually simulated ranks: about 10 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScheduler:
    """Schedule of a whole job; fields are its options.

    ``priority``, ``max_executions``, ``overlap_trips``, ``interference`` and ``launches`` are as in
    :class:`hespas.simulator.ListScheduler`; ``max_executions`` covers all ranks that are simulated together.
    ``protocol``: a send completes at once (eager) or on receipt (rendezvous). ``differing`` selects the time
    of a collective whose members state different times. ``starts``: ranks start together or, if all times
    were recorded, with the offsets of their recordings.

    ``jitter`` is the standard deviation / mean of the time of each computation and copy on each rank
    (log-normal, mean 1), drawn with ``seed``. ``stragglers`` maps ranks to factors on the time of their
    computation and copies. Without ``symmetry`` every rank is simulated. The defaults of ``differing`` and
    ``starts`` depend on the source of the times (:func:`hespas.simulator.simulate`): "longest" and
    "together", except for recorded times.
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
            raise UsageError(
                f"invalid jitter {self.jitter}: expected a value from 0 to below 10", hint="set `jitter=0.05`"
            )
        for rank, factor in self.stragglers:
            if not 1 / _MOST_SLOWER <= factor <= _MOST_SLOWER:
                hint = "use a factor from 1e-9 to 1e9"
                raise UsageError(f"invalid factor {factor} of rank {rank}", hint=hint)

    @property
    def name(self) -> str:
        """Return ``job-schedule``."""
        return "job-schedule"

    def run(
        self, workload: Workload, diagnostics: Diagnostics, pressures: Sequence[Pressure] | None = None
    ) -> Simulation:
        """Simulate the step of each rank, as described in the module. ``pressures`` are the contention
        factors of the rank classes. O(executions log executions) of the simulated ranks.
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
        pace = np.ones(workload.num_ranks)
        for rank, factor in self.stragglers:
            if not 0 <= rank < len(pace) or workload.rank_class[rank] == ABSENT:
                raise UsageError(
                    f"a straggler is rank {rank}, but the workload has {workload.num_available:,} ranks, the "
                    f"last is rank {int(workload.present[-1])}",
                    hint="name a rank of the workload",
                )
            pace[rank] = factor
        idle = idle_parts(workload, relations)
        if self.jitter or not self.symmetry:
            behaviours = every_rank(relations)
        else:
            _, start = equal_rows(relations.rank_class, pace, idle.pattern)
            behaviours = behave_alike(relations, start, both_ways=self.protocol == "rendezvous")
        job_run = _JobSimulation(self, workload, relations, behaviours, pace, idle, diagnostics, pressures)
        return job_run.run()


_NOTHING = TaskProgram(
    tasks=Tasks("", np.empty(0), np.empty(0, np.int32), RaggedArray.empty(0)),
    node=np.empty(0, np.int32),
    block=np.empty(0, np.int32),
    op_class=np.empty(0, np.int32),
    blocks=(),
)
_RankKey = tuple[int, float, int]
"""Rank class, factor on the time of a rank, and its pattern of idle communication."""


@dataclass(slots=True)
class _JobSimulation:
    """State of one simulation of a job. Ranks with equal behaviour share a graph."""

    options: JobScheduler
    workload: Workload
    relations: Relations
    behaviours: BehaviourClasses
    pace: FloatArray
    idle: IdleParts
    diagnostics: Diagnostics
    pressures: Sequence[Pressure] | None
    graphs: dict[_RankKey, OpGraph] = field(default_factory=dict[_RankKey, OpGraph])

    def run(self) -> Simulation:
        """Run the simulation: ranks that wait for no other rank are scheduled alone, all others together."""
        behaviours, name = self.behaviours, self.options.name
        self.diagnostics.info(
            "simulate.absent-members", self.workload.name,
            "groups have absent members: the present ones wait only for each other",
            count=self.relations.absent_members(),
        )  # fmt: skip
        is_joint = np.zeros(len(behaviours.first), np.bool_)
        for row, group in enumerate(self.relations.group):
            called = (self.relations.label[row] == row) & (behaviours.behaviour >= 0)
            is_joint[behaviours.behaviour[called & (behaviours.num_members[group] > 1)]] = True
        whose = self.relations.rank_class
        sends = self.relations.sends
        if self.options.protocol != "rendezvous":
            sends = sends & ~self.relations.permutes
        sides = [(self.relations.source, self.relations.receives), (self.relations.target, sends)]
        for peers, does in sides:
            for row, peer in enumerate(peers):
                other = np.where(peer != NONE, behaviours.behaviour[peer], -1)
                waits = does[whose, row] & (other >= 0) & (behaviours.behaviour >= 0)
                waits &= ~(self.relations.permutes[whose, row] & (other == behaviours.behaviour))
                is_joint[behaviours.behaviour[waits]] = is_joint[other[waits]] = True
        sim_ranks = self._sim_ranks(np.flatnonzero(is_joint))
        if not sim_ranks:
            is_joint[:] = False
        part_of = np.full(len(behaviours.first) + 1, -1, np.int64)  # the last entry is for absent ranks
        parts: list[ScheduledRank] = []
        by_program: dict[tuple[int, float, int, int], list[int]] = {}
        for behaviour in np.flatnonzero(~is_joint).tolist():
            differs = behaviour if self.options.jitter else 0
            key = self._rank_key(int(behaviours.first[behaviour]))
            by_program.setdefault((*key, differs), []).append(behaviour)
        for alike in by_program.values():
            part_of[alike] = len(parts)
            parts.append(self._schedule_alone(alike))
        if not sim_ranks:
            return simulation_of(name, self.workload, parts, part_of[behaviours.behaviour])
        part_of[is_joint.nonzero()] = len(parts) + np.arange(len(sim_ranks))
        joint = self._joint_simulator.run(
            sim_ranks, self.diagnostics, as_recorded=self.options.starts == "recorded"
        )
        ran = schedules_of(*joint)
        joined = job_columns(joint.job, joint.done, ran, sum(len(part.tasks) for part in parts))
        return simulation_of(name, self.workload, [*parts, *ran], part_of[behaviours.behaviour], joined)

    @property
    def _are_different(self) -> bool:
        """Return True if ranks run different programs, or the same program at different speeds."""
        options = self.options
        return not self._is_one_program or self.idle.any or bool(options.jitter) or bool(options.stragglers)

    @property
    def _common_ns(self) -> FloatArray | None:
        """Return the node durations of the program that all ranks run; None if ranks run several programs."""
        first = next(index for index, count in enumerate(self.workload.class_sizes) if count)
        if not self._is_one_program or self.idle.any or _has_one_sided(self.workload.classes[first]):
            return None
        return self.workload.classes[first].duration_ns

    @property
    def _is_one_program(self) -> bool:
        """Return True if the programs of all rank classes are equal except for groups, peers and names."""
        used = [index for index, count in enumerate(self.workload.class_sizes) if count]
        first, *others = [self.workload.classes[index] for index in used]
        return all(_are_equal_programs(first, other) for other in others)

    @property
    def _joint_simulator(self) -> JointSimulator:
        options = self.options
        return JointSimulator(
            self.relations,
            self.behaviours,
            options.priority,
            options.protocol,
            options.differing or "longest",
            self._are_different,
            self._common_ns,
        )

    def _rank_key(self, rank: int) -> _RankKey:
        return int(self.relations.rank_class[rank]), float(self.pace[rank]), int(self.idle.pattern[rank])

    def _graph(self, rank: int) -> OpGraph:
        index, pace, pattern = key = self._rank_key(rank)
        if key not in self.graphs:
            graph = self.idle.without_idle_time(self.workload.classes[index], self.relations, pattern)
            if pace != 1:  # communication keeps its time
                codes = stream_codes(graph)
                own = (codes >= 0) & (kinds_of(codes) != COMMUNICATION)
                graph = with_durations(graph, np.where(own, graph.duration_ns * pace, graph.duration_ns))
            self.graphs[key] = graph
        return self.graphs[key]

    def _jittered(self, program: TaskProgram, rank: int) -> TaskProgram:
        return _jittered(program, self.options, rank)

    def _schedule_alone(self, alike: list[int]) -> ScheduledRank:
        rank = int(self.behaviours.first[alike[0]])
        options, graph = self.options, self._graph(rank)
        program = expanded(
            graph,
            options.max_executions,
            options.priority,
            self.diagnostics,
            overlap_trips=options.overlap_trips,
            pressure=None if self.pressures is None else self.pressures[self._rank_key(rank)[0]],
        )
        program = self._jittered(program, rank)
        whose = RepresentedClass(self._rank_key(rank)[0], rank, int(self.behaviours.count[alike].sum()))
        order = None
        if self._are_different and self._common_ns is None:
            order = communication_order(program.tasks)
        return schedule_alone(graph, program, options.priority, whose, order)

    def _sim_ranks(self, chosen: IntArray) -> list[RankProgram]:
        """Return the simulated ranks that represent some behaviour classes, with their programs. Empty if
        they cannot be simulated together.
        """
        if not len(chosen):
            return []
        sim_ranks = [
            RankProgram(behaviour, rank, count, self._rank_key(rank)[0], self._graph(rank), _NOTHING)
            for behaviour, rank, count in zip(
                chosen.tolist(),
                self.behaviours.first[chosen].tolist(),
                self.behaviours.count[chosen].tolist(),
                strict=True,
            )
        ]
        limit = max(self.options.max_executions // len(chosen), 1)
        if sum(len(sim_rank.graph) for sim_rank in sim_ranks) > _MOST_TASKS:
            raise UnsupportedError(
                f"{len(chosen):,} ranks behave differently: over {_MOST_TASKS:,} operations",
                hint="omit jitter, so that ranks that do the same are simulated once, or merge operations "
                "between collectives: `granularity=region`",
            )
        looped = with_loops(
            sim_ranks,
            limit,
            self._joint_simulator,
            self._jittered if self.options.jitter else None,
            self.diagnostics,
            overlap_trips=self.options.overlap_trips,
            pressures=self.pressures,
        )
        if looped is None:
            self.diagnostics.warning(
                "simulate.ranks-not-synchronised",
                self.workload.name,
                "ranks communicate in long loops of different trip counts: no rank waits for others",
            )
        return looped or []


def _in_step(workload: Workload) -> bool:
    """Return True if no rank can wait for another one, because all ranks do the same at the same time.

    This holds if all ranks are present, in one rank class without one-sided messages, and no rank skips
    communication.
    """
    used = [index for index, count in enumerate(workload.class_sizes) if count]
    if len(used) > 1 or not workload.is_complete:
        return False
    return not _has_one_sided(workload.classes[used[0]]) and not has_idle_parts(workload, used[0])


def _has_one_sided(graph: OpGraph) -> bool:
    """Return True if a program has messages that its ranks only send or only receive."""
    table = graph.p2p
    sides = np.isin(graph.kind[table.node], (int(NodeKind.SEND), int(NodeKind.RECV)))
    return bool((sides & (table.permutation >= 0) & ~table.host).any())


def _are_equal_programs(one: OpGraph, other: OpGraph) -> bool:
    """Return True if two programs have the same nodes, durations, streams, dependencies and loops."""
    if len(one) != len(other):
        return False
    times = (one.duration_ns, other.duration_ns), (one.executions, other.executions)
    codes = (one.kind, other.kind), (one.op_class, other.op_class), (one.resource, other.resource)
    places = (one.stream, other.stream), (one.region, other.region)
    tables = [
        (getattr(getattr(one, deps), column), getattr(getattr(other, deps), column))
        for deps in ("data_deps", "control_deps")
        for column in ("offsets", "values")
    ]
    pairs = [*times, *codes, *places, *tables, (one.regions.trips, other.regions.trips)]
    return all(np.array_equal(left, right, equal_nan=left.dtype.kind == "f") for left, right in pairs)


def _jittered(program: TaskProgram, options: JobScheduler, rank: int) -> TaskProgram:
    """Return the program with the times of one rank, each drawn independently."""
    if not options.jitter:
        return program
    tasks = program.tasks
    draws = np.random.default_rng([options.seed, rank]).standard_normal(len(tasks))
    sigma = sqrt(log1p(options.jitter**2))
    own = (tasks.stream >= 0) & (kinds_of(tasks.stream) != COMMUNICATION) & (program.block < 0)
    factor = np.where(own, np.exp(sigma * draws - sigma * sigma / 2), 1.0)
    return replace(program, tasks=replace(tasks, duration_ns=tasks.duration_ns * factor))
