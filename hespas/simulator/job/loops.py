"""Loops in which ranks meet: run trip by trip on all of them, beyond a limit by their common steady state.

As :mod:`hespas.simulator.list_scheduler` does for a rank alone, a loop that is too long keeps its first trip,
and a block stands for the others. Loops of different ranks that meet inside have to have as many trips; they
are run together for a few, and each rank's block takes what its own trips took then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hespas.graph import Diagnostics, OpGraph
from hespas.graph.errors import CheckFailedError
from hespas.simulator.job.actors import Actor, Cast
from hespas.simulator.job.figures import run_of
from hespas.simulator.job.meetings import Meetings
from hespas.simulator.job.together import Together
from hespas.simulator.list_scheduler import (
    TripsRun,
    collapsed,
    loop_alone,
    nodes_inside,
    rest_of_loop,
    too_long,
)
from hespas.simulator.progress import Pressure
from hespas.simulator.schedule import Block, Program
from hespas.simulator.trips import flatten, prepared, with_trips

__all__ = ["with_loops"]

_Loop = tuple[int, int]
"""The place of an actor, and a region of its graph."""
_Vary = Callable[[Program, int], Program]


def with_loops(
    actors: Sequence[Actor],
    limit: int,
    together: Together,
    vary: _Vary | None,
    diagnostics: Diagnostics,
    *,
    overlap_trips: bool,
    pressures: Sequence[Pressure] | None = None,
) -> list[Actor] | None:
    """The actors with their programs, of at most about ``limit`` executions each; those given have none yet
    (any stands in); ``pressures`` are those of the rank classes. ``vary`` gives a program the times of a
    rank, where they differ.

    None where loops in which ranks meet have different trips and are too long to be run one by one.
    """
    draft = _Draft(
        list(actors), together, vary or _as_it_is, diagnostics, vary is not None, overlap_trips, pressures, {}
    )
    alike: dict[int, OpGraph] = {}
    for actor in actors:
        reduced = alike.setdefault(id(actor.graph), prepared(actor.graph))
        draft.reduced.append(reduced)
        draft.blocks.append([])
    chosen = [np.flatnonzero(too_long(graph, limit)).tolist() for graph in draft.reduced]
    if any(chosen):
        sets = draft.linked()
        wanted = {(place, region) for place, regions in enumerate(chosen) for region in regions}
        if sets is None:
            return None
        for loops in sets:
            if wanted.intersection(loops):
                draft.extrapolate(loops)
        diagnostics.info(
            "simulate.extrapolated-loops",
            actors[0].graph.name,
            "loops of ranks that meet run once and then by their common steady state",
            count=sum(len(wanted.intersection(loops)) > 0 for loops in sets),
        )
    return draft.programs()


@dataclass(slots=True)
class _Draft:
    """Graphs in which long loops give way to blocks, one by one."""

    actors: list[Actor]
    together: Together
    vary: _Vary
    diagnostics: Diagnostics
    varies: bool
    overlap_trips: bool
    pressures: Sequence[Pressure] | None
    flat: dict[int, Program]
    reduced: list[OpGraph] = field(default_factory=list[OpGraph])
    blocks: list[list[Block]] = field(default_factory=list[list[Block]])

    def programs(self) -> list[Actor]:
        """The actors with what is left unrolled."""
        return [
            replace(actor, program=self.vary(self._flattened(place), actor.rank))
            for place, actor in enumerate(self.actors)
        ]

    def _flattened(self, place: int) -> Program:
        """Actors that run the same graph share it."""
        graph = self.reduced[place]
        if id(graph) not in self.flat:
            self.flat[id(graph)] = self.unrolled(graph, place)
        return self.flat[id(graph)]

    def unrolled(self, graph: OpGraph, place: int) -> Program:
        """A graph of one of the actors, or a part of it, with the blocks that it has by now."""
        pressure = None if self.pressures is None else self.pressures[self.actors[place].rank_class]
        blocks = tuple(self.blocks[place])
        return flatten(graph, blocks, overlap_trips=self.overlap_trips, pressure=pressure)

    def linked(self) -> list[list[_Loop]] | None:
        """Loops that have to be run together, inner ones first; None where their trips differ."""
        once: dict[int, Program] = {}
        actors: list[Actor] = []
        for actor, graph in zip(self.actors, self.reduced, strict=True):
            single = once.setdefault(
                id(graph), flatten(_one_trip(graph), (), overlap_trips=self.overlap_trips)
            )
            actors.append(replace(actor, program=single))
        try:
            cast, meetings = self.together.matched(actors, Diagnostics())
        except CheckFailedError:
            return None  # other trips make it up, or the whole schedule says what is wrong
        chains = [_chains(actor.graph) for actor in actors]
        leader: dict[_Loop, _Loop] = {}
        for members in _members(meetings):
            found = [_loops_around(cast, task, chains) for task in members]
            trips = {tuple(self._trips(loop) for loop in chain) for chain in found}
            if len(trips) > 1:
                return None
            for chain in found[1:]:
                for one, other in zip(found[0], chain, strict=True):
                    leader[_root(leader, other)] = _root(leader, one)
        sets: dict[_Loop, list[_Loop]] = {}
        for place, graph in enumerate(self.reduced):
            for region in np.flatnonzero(graph.regions.trips > 1).tolist():
                sets.setdefault(_root(leader, (place, region)), []).append((place, region))
        depth = {loop: len(chains[loop[0]][loop[1]]) for loop in sets}
        if any(len({place for place, _ in loops}) < len(loops) for loops in sets.values()):
            return None
        return [sets[loop] for loop in sorted(sets, key=lambda loop: -depth[loop])]

    def _trips(self, loop: _Loop) -> int:
        return int(self.actors[loop[0]].graph.regions.trips[loop[1]])

    def extrapolate(self, loops: list[_Loop]) -> None:
        """Put blocks for all trips but the first of some loops that are run together."""
        inside = [nodes_inside(self.reduced[place], region) for place, region in loops]
        alone = [
            loop_alone(self.reduced[place], mine, region)
            for (place, region), mine in zip(loops, inside, strict=True)
        ]
        shared = _Shared(self, loops, alone, {})
        for number, (place, region) in enumerate(loops):
            runs = _Member(shared, number)
            trips = self._trips((place, region))
            block = rest_of_loop(runs, alone[number], region, trips, self.diagnostics, varies=self.varies)
            self.blocks[place].append(block)
            last = len(self.blocks[place]) - 1
            self.reduced[place] = collapsed(self.reduced[place], region, inside[number], block, last)


@dataclass(slots=True)
class _Shared:
    """Loops of several actors run together, by their number of trips."""

    draft: _Draft
    loops: list[_Loop]
    alone: list[OpGraph]
    runs: dict[int, list[TripsRun]]

    def run(self, trips: int) -> list[TripsRun]:
        """What each of the actors did."""
        if trips not in self.runs:
            self.runs[trips] = self._made(trips)
        return self.runs[trips]

    def _made(self, trips: int) -> list[TripsRun]:
        draft = self.draft
        actors: list[Actor] = []
        for (place, region), graph in zip(self.loops, self.alone, strict=True):
            counts = graph.regions.trips.copy()
            counts[region] = trips
            program = draft.unrolled(with_trips(graph, counts), place)
            actor = draft.actors[place]
            actors.append(replace(actor, program=draft.vary(program, actor.rank)))
        joint = draft.together.run(actors, Diagnostics())
        return [run_of(joint.cast, joint.meetings, joint.done, place) for place in range(len(actors))]


@dataclass(frozen=True, slots=True)
class _Member:
    """The runs of one of them."""

    shared: _Shared
    number: int

    def run(self, trips: int) -> TripsRun:
        return self.shared.run(trips)[self.number]


def _as_it_is(program: Program, _rank: int) -> Program:
    return program


def _one_trip(graph: OpGraph) -> OpGraph:
    return with_trips(graph, np.minimum(graph.regions.trips, 1.0))


def _root(leader: dict[_Loop, _Loop], loop: _Loop) -> _Loop:
    while loop in leader and leader[loop] != loop:
        loop = leader[loop]
    return loop


def _chains(graph: OpGraph) -> list[list[int]]:
    """Per region, the loops around what stands in it, itself included, outermost first; last, for the top."""
    chains: list[list[int]] = []
    trips: list[float] = graph.regions.trips.tolist()
    parents: list[int] = graph.regions.parent.tolist()
    for region, parent in enumerate(parents):
        above: list[int] = chains[parent] if parent >= 0 else []
        chains.append([*above, region] if trips[region] > 1 else above)
    return [*chains, []]


def _loops_around(cast: Cast, task: int, chains: Sequence[list[list[int]]]) -> list[_Loop]:
    place = int(cast.owner[task])
    actor = cast.actors[place]
    region = int(actor.graph.region[int(actor.program.node[cast.local(task)])])
    return [(place, loop) for loop in chains[place][region]]


def _members(meetings: Meetings) -> list[list[int]]:
    """The tasks of each meeting."""
    return meetings.arrivals.transpose(meetings.count).to_lists()
