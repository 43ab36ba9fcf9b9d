"""What runs: one program per colour of ranks, and their tasks numbered on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph import OpGraph, RaggedArray
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.simulator.progress import Pressure
from hespas.simulator.schedule import Program

__all__ = ["Actor", "Cast", "cast_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Actor:
    """A rank that stands for ``count`` of a ``colour``; ``program`` is its ``graph`` unrolled."""

    colour: int
    rank: int
    count: int
    rank_class: int
    graph: OpGraph
    program: Program


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """Actors whose tasks are numbered on: those of actor ``i`` are ``first[i]:first[i + 1]``.

    ``duration_ns``, ``stream`` and ``deps`` are those of :class:`hespas.simulator.schedule.Tasks`, of all.
    ``streams[i]`` is what is added to the codes of actor ``i``.
    """

    actors: tuple[Actor, ...]
    first: IntArray
    duration_ns: FloatArray
    stream: SmallIntArray
    deps: RaggedArray
    owner: SmallIntArray
    pressure: Pressure | None

    def actor_of(self, task: int) -> Actor:
        """Whose a task is."""
        return self.actors[int(self.owner[task])]

    def local(self, task: int) -> int:
        """The number of a task in the program of its actor."""
        return task - int(self.first[int(self.owner[task])])


def cast_of(actors: tuple[Actor, ...]) -> Cast:
    """The tasks of all actors, one behind the other; streams keep their codes. O(tasks)."""
    sizes = [len(actor.program.tasks) for actor in actors]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    parts = [actor.program.tasks for actor in actors]
    lengths = [part.deps.lengths for part in parts]
    values = [part.deps.values + offset for part, offset in zip(parts, first.tolist(), strict=False)]
    nothing = np.empty(0, np.int64)
    pressed = any(part.pressure is not None for part in parts)
    pressures = [Pressure.none(len(part)) if part.pressure is None else part.pressure for part in parts]
    return Cast(
        actors=actors,
        first=first,
        duration_ns=np.concatenate([np.empty(0), *(part.duration_ns for part in parts)]),
        stream=np.concatenate([np.empty(0, np.int32), *(part.stream for part in parts)]),
        deps=RaggedArray.from_lengths(
            np.concatenate([nothing, *lengths]), np.concatenate([nothing, *values])
        ),
        owner=np.repeat(np.arange(len(actors), dtype=np.int32), sizes),
        pressure=Pressure.joined(pressures) if pressed else None,
    )
