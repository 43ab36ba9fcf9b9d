"""Loops in which ranks communicate. Short loops are simulated iteration by iteration on all ranks; longer
ones are extrapolated.

A loop is extrapolated as for one rank (:mod:`hespas.simulator.loop_extrapolation`). Loops of different ranks
that communicate with each other must have equal trip counts. They are simulated together for a few
iterations; the extrapolated block of each rank takes the time of its own iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hespas.graph import Diagnostics, OpGraph
from hespas.graph.errors import CheckFailedError
from hespas.simulator.interference import Pressure
from hespas.simulator.job.joint_results import iteration_times
from hespas.simulator.job.joint_schedule import JointSimulator
from hespas.simulator.job.programs import JobTasks, RankProgram
from hespas.simulator.loop_extrapolation import (
    IterationTimes,
    LoopExtrapolation,
    flatten,
    prepared,
    too_long,
    with_trips,
)
from hespas.simulator.schedule import TaskProgram

__all__ = ["with_loops"]

_Loop = tuple[int, int]
"""Position of a simulated rank, and a region of its graph."""


def with_loops(
    sim_ranks: Sequence[RankProgram],
    limit: int,
    joint_simulator: JointSimulator,
    vary: Callable[[TaskProgram, int], TaskProgram] | None,
    diagnostics: Diagnostics,
    *,
    overlap_trips: bool,
    pressures: Sequence[Pressure] | None = None,
) -> list[RankProgram] | None:
    """Return the simulated ranks with their programs, in which loops are unrolled or extrapolated. A program
    has at most about ``limit`` executions.

    ``vary`` changes the times of a program to the times of one rank (None: all ranks take equal times).
    ``pressures`` are the contention factors of the rank classes. Return None if loops in which ranks
    communicate have different trip counts and are too long to be unrolled.
    """

    def varied(positions: Sequence[int], programs: Sequence[TaskProgram]) -> list[RankProgram]:
        ranks = [sim_ranks[position] for position in positions]
        return [
            replace(rank, program=vary(program, rank.rank) if vary else program)
            for rank, program in zip(ranks, programs, strict=True)
        ]

    def measure(positions: Sequence[int], programs: Sequence[TaskProgram]) -> list[IterationTimes]:
        joint = joint_simulator.run(varied(positions, programs), Diagnostics())
        return [iteration_times(*joint, number) for number in range(len(positions))]

    alike = {id(rank.graph): rank.graph for rank in sim_ranks}
    reduced = {key: prepared(graph) for key, graph in alike.items()}
    loops = LoopExtrapolation(
        reduced=[reduced[id(rank.graph)] for rank in sim_ranks],
        pressures=[None if pressures is None else pressures[rank.rank_class] for rank in sim_ranks],
        measure=measure,
        diagnostics=diagnostics,
        overlap_trips=overlap_trips,
        varies=vary is not None,
    )
    chosen = [np.flatnonzero(too_long(graph, limit)).tolist() for graph in loops.reduced]
    if any(chosen):
        sets = _linked(sim_ranks, loops.reduced, joint_simulator, overlap_trips=overlap_trips)
        wanted = {(position, region) for position, regions in enumerate(chosen) for region in regions}
        if sets is None:
            return None
        for linked in sets:
            if wanted.intersection(linked):
                loops.extrapolate(linked)
        diagnostics.info(
            "simulate.extrapolated-loops",
            sim_ranks[0].graph.name,
            "loops in which ranks communicate simulate one iteration and extrapolate the others",
            count=sum(len(wanted.intersection(linked)) > 0 for linked in sets),
        )
    flat: dict[int, TaskProgram] = {}
    for position, graph in enumerate(loops.reduced):  # ranks with the same graph share its program
        if id(graph) not in flat:
            flat[id(graph)] = loops.unrolled(position)
    return varied(range(len(sim_ranks)), [flat[id(graph)] for graph in loops.reduced])


def _linked(
    sim_ranks: Sequence[RankProgram],
    reduced: Sequence[OpGraph],
    joint_simulator: JointSimulator,
    *,
    overlap_trips: bool,
) -> list[list[_Loop]] | None:
    """Return sets of loops that must be simulated together because their ranks communicate inside them. Sets
    of inner loops are first. Return None if the loops of a set have different trip counts.
    """
    once: dict[int, TaskProgram] = {}
    single: list[RankProgram] = []
    for sim_rank, graph in zip(sim_ranks, reduced, strict=True):
        if id(graph) not in once:
            at_most_one = with_trips(graph, np.minimum(graph.regions.trips, 1.0))
            once[id(graph)] = flatten(at_most_one, (), overlap_trips=overlap_trips)
        single.append(replace(sim_rank, program=once[id(graph)]))
    try:
        job, events = joint_simulator.matched(single, Diagnostics())
    except CheckFailedError:
        return None  # other iterations may repair it, or the whole schedule reports the error
    chains = [_chains(sim_rank.graph) for sim_rank in sim_ranks]
    trips = [sim_rank.graph.regions.trips.tolist() for sim_rank in sim_ranks]
    leader: dict[_Loop, _Loop] = {}
    for members in events.arrivals.transpose(events.count).to_lists():
        loop_chains = [_loops_around(job, task, chains) for task in members]
        if len({tuple(trips[position][region] for position, region in chain) for chain in loop_chains}) > 1:
            return None
        for chain in loop_chains[1:]:
            for one, other in zip(loop_chains[0], chain, strict=True):
                leader[_root(leader, other)] = _root(leader, one)
    sets: dict[_Loop, list[_Loop]] = {}
    for position, graph in enumerate(reduced):
        for region in np.flatnonzero(graph.regions.trips > 1).tolist():
            sets.setdefault(_root(leader, (position, region)), []).append((position, region))
    depth = {loop: len(chains[loop[0]][loop[1]]) for loop in sets}
    if any(len({position for position, _ in loops}) < len(loops) for loops in sets.values()):
        return None
    return [sets[loop] for loop in sorted(sets, key=lambda loop: -depth[loop])]


def _root(leader: dict[_Loop, _Loop], loop: _Loop) -> _Loop:
    while loop in leader and leader[loop] != loop:
        loop = leader[loop]
    return loop


def _chains(graph: OpGraph) -> list[list[int]]:
    """Return for each region the loops around it, outermost first. A loop is the last entry of its own list.
    The additional last list is empty, for nodes outside all regions.
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
