"""What a schedule adds up to: busy streams, exposed communication, where the critical path spends time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph import OpClass
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.simulator.schedule import Schedule, Tasks
from hespas.simulator.streams import COMMUNICATION, COMPUTE, STREAMS

__all__ = ["CLASSES", "Block", "Program", "busy_ns", "critical_ns", "exposed_ns"]

CLASSES = max(OpClass) + 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Block:
    """Trips of a loop that are not run one by one, as if the loop had its streams to itself.

    ``trips`` are those it stands for (all but the first) and ``duration_ns`` the time they add. Within it,
    ``busy_ns`` is by stream, ``exposed_ns`` communicates while nothing computes, and the critical path spends
    ``critical_ns`` by operation class and stream, shape ``(CLASSES, streams)``, which sums to the duration.
    """

    region: int
    trips: int
    duration_ns: float
    busy_ns: FloatArray
    exposed_ns: float
    critical_ns: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Tasks and what they are: ``node`` of the graph (-1: a block), ``block`` (-1: a node), operation class.

    A block is several tasks at once, one on each stream that its loop uses.
    """

    tasks: Tasks
    node: SmallIntArray
    block: SmallIntArray
    op_class: SmallIntArray
    blocks: tuple[Block, ...]


def busy_ns(program: Program) -> FloatArray:
    """Time each stream works, shape ``(streams,)``."""
    tasks = program.tasks
    alone = (program.block < 0) & (tasks.stream >= 0)
    busy = np.bincount(tasks.stream[alone], tasks.duration_ns[alone], len(STREAMS)).astype(np.float64)
    for task in np.flatnonzero(program.block >= 0).tolist():
        stream = int(tasks.stream[task])
        busy[stream] += program.blocks[int(program.block[task])].busy_ns[stream]
    return busy


def exposed_ns(program: Program, schedule: Schedule) -> float:
    """Time in which communication runs and no computation; blocks say theirs. O(tasks log tasks)."""
    stream, block = program.tasks.stream, program.block
    compute = stream == COMPUTE
    talking = np.flatnonzero((stream == COMMUNICATION) & (block < 0))
    start, end = schedule.start_ns, schedule.end_ns
    from_ns, to_ns = np.sort(start[compute]), np.sort(end[compute])
    covered = _covered(from_ns, to_ns, end[talking]) - _covered(from_ns, to_ns, start[talking])
    exposed = float(np.maximum(end[talking] - start[talking] - covered, 0.0).sum())
    for task in np.flatnonzero((stream == COMMUNICATION) & (block >= 0)).tolist():
        exposed += program.blocks[int(block[task])].exposed_ns
    return exposed


def _covered(from_ns: FloatArray, to_ns: FloatArray, at_ns: FloatArray) -> FloatArray:
    """How much of the time before ``at_ns`` lies in the intervals, which do not overlap and are sorted."""
    if not len(from_ns):
        return np.zeros(len(at_ns))
    before = np.concatenate([[0.0], np.cumsum(to_ns - from_ns)])
    last = np.searchsorted(from_ns, at_ns, side="right") - 1
    inside = np.minimum(at_ns, to_ns[last]) - from_ns[last]
    covered: FloatArray = np.where(last < 0, 0.0, before[last] + inside)
    return covered


def critical_ns(program: Program, schedule: Schedule, path: IntArray) -> FloatArray:
    """Time that the critical path spends by operation class and stream, shape ``(CLASSES, streams)``."""
    spent = schedule.end_ns[path] - schedule.start_ns[path]
    stream, block = program.tasks.stream[path], program.block[path]
    alone = (block < 0) & (stream >= 0)
    key = program.op_class[path][alone] * len(STREAMS) + stream[alone]
    sums = np.bincount(key, spent[alone], CLASSES * len(STREAMS)).astype(np.float64)
    table: FloatArray = sums.reshape(CLASSES, len(STREAMS))
    met: list[int] = block[block >= 0].tolist()
    for index in met:
        table += program.blocks[index].critical_ns
    return table
