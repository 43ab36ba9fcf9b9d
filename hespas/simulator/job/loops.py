"""Loops in which ranks communicate: simulated iteration by iteration on all ranks, and extrapolated above a
limit.

As :mod:`hespas.simulator.loop_extrapolation` does for one rank, a loop that is too long keeps its first
iteration and a block replaces the others. Loops of different ranks that communicate with each other must have
equal trip counts; they are simulated together for a few iterations, and the block of each rank takes the time
of its own iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hespas.graph import Diagnostics, OpGraph
from hespas.graph.errors import CheckFailedError
from hespas.simulator.interference import Pressure
from hespas.simulator.job.joint_results import iteration_times
from hespas.simulator.job.joint_schedule import JointSimulator
from hespas.simulator.job.programs import JobTasks, RankProgram
from hespas.simulator.loop_extrapolation import (
    IterationTimes,
    collapsed,
    flatten,
    loop_alone,
    nodes_inside,
    prepared,
    rest_of_loop,
    too_long,
    with_trips,
)
from hespas.simulator.schedule import Block, TaskProgram

__all__ = ["with_loops"]

_Loop = tuple[int, int]
"""Position of a simulated rank, and a region of its graph."""
_Vary = Callable[[TaskProgram, int], TaskProgram]


def with_loops(
    sim_ranks: Sequence[RankProgram],
    limit: int,
    joint_simulator: JointSimulator,
    vary: _Vary | None,
    diagnostics: Diagnostics,
    *,
    overlap_trips: bool,
    pressures: Sequence[Pressure] | None = None,
) -> list[RankProgram] | None:
    """Return the simulated ranks with their programs, of at most about ``limit`` executions each; the given
    ranks have no programs yet. ``pressures`` belong to the rank classes. ``vary`` gives a program the times
    of one rank, if they differ.

    Returns None if loops in which ranks communicate have different trip counts and are too long to be
    unrolled.
    """
    extrapolation = _LoopExtrapolation(
        list(sim_ranks),
        joint_simulator,
        vary or (lambda program, _: program),
        diagnostics,
        vary is not None,
        overlap_trips,
        pressures,
        {},
    )
    alike: dict[int, OpGraph] = {}
    for sim_rank in sim_ranks:
        reduced = alike.setdefault(id(sim_rank.graph), prepared(sim_rank.graph))
        extrapolation.reduced.append(reduced)
        extrapolation.blocks.append([])
    chosen = [np.flatnonzero(too_long(graph, limit)).tolist() for graph in extrapolation.reduced]
    if any(chosen):
        sets = extrapolation.linked()
        wanted = {(position, region) for position, regions in enumerate(chosen) for region in regions}
        if sets is None:
            return None
        for loops in sets:
            if wanted.intersection(loops):
                extrapolation.extrapolate(loops)
        diagnostics.info(
            "simulate.extrapolated-loops",
            sim_ranks[0].graph.name,
            "loops in which ranks communicate simulate one iteration and extrapolate the others",
            count=sum(len(wanted.intersection(loops)) > 0 for loops in sets),
        )
    return extrapolation.programs()


@dataclass(slots=True)
class _LoopExtrapolation:
    """Graphs in which blocks replace long loops, one by one."""

    sim_ranks: list[RankProgram]
    joint_simulator: JointSimulator
    vary: _Vary
    diagnostics: Diagnostics
    varies: bool
    overlap_trips: bool
    pressures: Sequence[Pressure] | None
    flat: dict[int, TaskProgram]
    reduced: list[OpGraph] = field(default_factory=list[OpGraph])
    blocks: list[list[Block]] = field(default_factory=list[list[Block]])

    def programs(self) -> list[RankProgram]:
        """Return the simulated ranks with the remaining loops unrolled."""
        programs: list[RankProgram] = []
        for position, (sim_rank, graph) in enumerate(zip(self.sim_ranks, self.reduced, strict=True)):
            if id(graph) not in self.flat:  # ranks with the same graph share its program
                self.flat[id(graph)] = self.unrolled(graph, position)
            programs.append(replace(sim_rank, program=self.vary(self.flat[id(graph)], sim_rank.rank)))
        return programs

    def unrolled(self, graph: OpGraph, position: int) -> TaskProgram:
        """Return the program of a rank's graph, or of a part of it, with the blocks so far."""
        pressure = None if self.pressures is None else self.pressures[self.sim_ranks[position].rank_class]
        blocks = tuple(self.blocks[position])
        return flatten(graph, blocks, overlap_trips=self.overlap_trips, pressure=pressure)

    def linked(self) -> list[list[_Loop]] | None:
        """Return the sets of loops that run together, inner loops first; None if their trip counts differ."""
        once: dict[int, TaskProgram] = {}
        sim_ranks: list[RankProgram] = []
        for sim_rank, graph in zip(self.sim_ranks, self.reduced, strict=True):
            single = once.setdefault(
                id(graph),
                flatten(
                    with_trips(graph, np.minimum(graph.regions.trips, 1.0)),
                    (),
                    overlap_trips=self.overlap_trips,
                ),
            )
            sim_ranks.append(replace(sim_rank, program=single))
        try:
            job, events = self.joint_simulator.matched(sim_ranks, Diagnostics())
        except CheckFailedError:
            return None  # other iterations may repair it, or the whole schedule reports the error
        chains = [_chains(sim_rank.graph) for sim_rank in sim_ranks]
        leader: dict[_Loop, _Loop] = {}
        for members in events.arrivals.transpose(events.count).to_lists():
            loop_chains = [_loops_around(job, task, chains) for task in members]
            trips = {tuple(self._trips(loop) for loop in chain) for chain in loop_chains}
            if len(trips) > 1:
                return None
            for chain in loop_chains[1:]:
                for one, other in zip(loop_chains[0], chain, strict=True):
                    leader[_root(leader, other)] = _root(leader, one)
        sets: dict[_Loop, list[_Loop]] = {}
        for position, graph in enumerate(self.reduced):
            for region in np.flatnonzero(graph.regions.trips > 1).tolist():
                sets.setdefault(_root(leader, (position, region)), []).append((position, region))
        depth = {loop: len(chains[loop[0]][loop[1]]) for loop in sets}
        if any(len({position for position, _ in loops}) < len(loops) for loops in sets.values()):
            return None
        return [sets[loop] for loop in sorted(sets, key=lambda loop: -depth[loop])]

    def _trips(self, loop: _Loop) -> int:
        return int(self.sim_ranks[loop[0]].graph.regions.trips[loop[1]])

    def extrapolate(self, loops: list[_Loop]) -> None:
        """Replace all iterations but the first of some loops that run together with blocks."""
        inside = [nodes_inside(self.reduced[position], region) for position, region in loops]
        alone = [
            loop_alone(self.reduced[position], mine, region)
            for (position, region), mine in zip(loops, inside, strict=True)
        ]
        shared = _JointLoops(self, loops, alone, {})
        for number, (position, region) in enumerate(loops):
            runs = _RankLoopRuns(shared, number)
            trips = self._trips((position, region))
            block = rest_of_loop(runs, alone[number], region, trips, self.diagnostics, varies=self.varies)
            self.blocks[position].append(block)
            last = len(self.blocks[position]) - 1
            self.reduced[position] = collapsed(self.reduced[position], region, inside[number], block, last)


@dataclass(slots=True)
class _JointLoops:
    """Loops of several ranks that run together, cached by their number of iterations."""

    extrapolation: _LoopExtrapolation
    loops: list[_Loop]
    alone: list[OpGraph]
    runs: dict[int, list[IterationTimes]]

    def run(self, trips: int) -> list[IterationTimes]:
        """Return the times of each rank."""
        if trips not in self.runs:
            extrapolation = self.extrapolation
            sim_ranks: list[RankProgram] = []
            for (position, region), graph in zip(self.loops, self.alone, strict=True):
                counts = graph.regions.trips.copy()
                counts[region] = trips
                program = extrapolation.unrolled(with_trips(graph, counts), position)
                sim_rank = extrapolation.sim_ranks[position]
                sim_ranks.append(replace(sim_rank, program=extrapolation.vary(program, sim_rank.rank)))
            joint = extrapolation.joint_simulator.run(sim_ranks, Diagnostics())
            self.runs[trips] = [
                iteration_times(joint.job, joint.events, joint.done, position)
                for position in range(len(sim_ranks))
            ]
        return self.runs[trips]


@dataclass(frozen=True, slots=True)
class _RankLoopRuns:
    """Runs of one rank's loop."""

    shared: _JointLoops
    number: int

    def run(self, trips: int) -> IterationTimes:
        return self.shared.run(trips)[self.number]


def _root(leader: dict[_Loop, _Loop], loop: _Loop) -> _Loop:
    while loop in leader and leader[loop] != loop:
        loop = leader[loop]
    return loop


def _chains(graph: OpGraph) -> list[list[int]]:
    """Return per region the loops around it, itself included, outermost first; the last entry is for the top
    level.
    """
    chains: list[list[int]] = []
    trips: list[float] = graph.regions.trips.tolist()
    parents: list[int] = graph.regions.parent.tolist()
    for region, parent in enumerate(parents):
        above: list[int] = chains[parent] if parent >= 0 else []
        chains.append([*above, region] if trips[region] > 1 else above)
    return [*chains, []]


def _loops_around(job: JobTasks, task: int, chains: Sequence[list[list[int]]]) -> list[_Loop]:
    """Return the loops around a task, outermost first."""
    position, sim_rank = int(job.owner[task]), job.rank_of(task)
    region = int(sim_rank.graph.region[int(sim_rank.program.node[job.local(task)])])
    return [(position, loop) for loop in chains[position][region]]
