"""Schedules of rank classes as the columns of one timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.simulator.measures import Program
from hespas.simulator.schedule import Schedule

__all__ = ["Spans", "joined", "spans_of"]


class Spans(NamedTuple):
    """Columns of :class:`hespas.graph.Timeline` of one rank or of several; ``cause`` counts within them."""

    node: SmallIntArray
    rank: SmallIntArray
    resource: NDArray[np.int8]
    start_ns: FloatArray
    end_ns: FloatArray
    critical: BoolArray
    cause: SmallIntArray
    by_resource: BoolArray
    region: SmallIntArray
    trips: FloatArray


def spans_of(program: Program, schedule: Schedule, path: IntArray, rank: int) -> Spans:
    """One span per task that takes a stream, in order of their starts. O(tasks log tasks)."""
    tasks = np.flatnonzero(program.tasks.stream >= 0)
    tasks = tasks[np.argsort(schedule.start_ns[tasks], kind="stable")]
    place = np.full(len(program.tasks) + 1, -1, np.int32)  # the last: no cause
    place[tasks] = np.arange(len(tasks), dtype=np.int32)
    critical = np.zeros(len(program.tasks), np.bool_)
    critical[path] = True
    blocks = program.block[tasks]
    regions = np.array([*(block.region for block in program.blocks), -1], np.int32)
    trips = np.array([*(block.trips for block in program.blocks), 1.0], np.float64)
    return Spans(
        node=program.node[tasks],
        rank=np.broadcast_to(np.int32(rank), (len(tasks),)),
        resource=program.tasks.stream[tasks].astype(np.int8),
        start_ns=schedule.start_ns[tasks],
        end_ns=schedule.end_ns[tasks],
        critical=critical[tasks],
        cause=place[schedule.cause[tasks]],
        by_resource=schedule.by_resource[tasks],
        region=regions[blocks],
        trips=trips[blocks],
    )


def joined(parts: Sequence[Spans]) -> Spans:
    """The spans of several ranks, one rank behind the other."""
    if len(parts) == 1:
        return parts[0]
    first = np.cumsum([0, *(len(part.node) for part in parts)]).tolist()
    moved = [
        part._replace(cause=np.where(part.cause < 0, -1, part.cause + offset).astype(np.int32))
        for part, offset in zip(parts, first, strict=False)
    ]
    return Spans(*(np.concatenate(columns) for columns in zip(*moved, strict=True)))
