"""A line of a trace: events of one thread or stream in time, and what they mean to us.

What is device work, by plane and line:

* On a device plane, the events of the lines ``XLA Ops``, ``Sparse Core Ops``, ``Async XLA Ops`` and of the
  streams of a GPU. Where a GPU plane has streams, its ``XLA Ops`` say the same again and are left out, as
  are the lines that sum up by step, scope or program. Where a plane has neither, all other lines count.
* On a host plane, the events that name an ``hlo_op``: XLA's CPU back end runs operations on host threads.
  Everything else there is an operation of the host.

Operations nest: a loop, a call or a conditional encloses what it runs. A device event therefore counts the
time that no other device event inside it takes; the sum over a line is the time the line was busy. Events on
GPU streams and asynchronous lines never enclose each other: kernels of one graph, or transfers, may run side
by side, and each counts in full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import numpy as np

from hespas.graph.columns import IntArray, SmallIntArray
from hespas.schemas.xplane import (
    ASYNC_LINES,
    CPU_PLANE,
    DERIVED_LINES,
    DEVICE_PREFIX,
    GPU_PREFIX,
    HOST_PREFIX,
    METADATA_PLANE,
    MODULE_LINES,
    OP_LINES,
    STREAM_PREFIX,
)

__all__ = [
    "ABSENT",
    "NUMBERS",
    "TEXTS",
    "Line",
    "LineEvents",
    "LineKind",
    "Program",
    "Truth",
    "is_cpu",
    "line_kind",
    "split_module_name",
    "truth_of",
]

ABSENT = -(1 << 63)
"""A number that is not stated."""

NUMBERS = (
    "program_id",
    "run_id",
    "device_ordinal",
    "correlation_id",
    "group_id",
    "bytes_accessed",
    "bytes_transferred",
    "model_flops",
    "flops",
    "uses_megacore",
)
TEXTS = (
    "hlo_op",
    "hlo_module",
    "hlo_category",
    "tf_op",
    "source",
    "long_name",
    "shape_with_layout",
    "memcpy_details",
    "memset_details",
)
"""What is kept of the facts about a device event, by the profiler's names."""


class LineKind(IntEnum):
    """What the events of a line are."""

    LEFT_OUT = 0
    HOST = 1
    """Operations of the host, and those of a CPU device among them."""
    OPS = 2
    """Operations of a device, which may nest."""
    STREAM = 3
    """Work on a device that does not nest."""
    ASYNC = 4
    """Transfers that run beside the operations of a device."""
    MODULES = 5
    """Runs of programs."""


class Truth(Enum):
    """Which lines of a device plane are counted, as several tell of the same work."""

    STREAMS = "streams"
    OPERATIONS = "operations"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Line:
    """Where events were recorded; ``number`` is the profiler's id of the thread or stream."""

    plane: str
    name: str
    number: int
    kind: LineKind


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LineEvents:
    """The events of one line in the order of the file; times in ps since a common moment.

    ``device`` lists the rows that are work of a device; ``stats`` has a column for each fact known of those
    (:data:`ABSENT`, or string row 0, where one says nothing). ``launch`` is the correlation id of host
    events that start device work. For a line of program runs ``device`` lists all rows.
    """

    line: Line
    name_row: SmallIntArray
    start_ps: IntArray
    duration_ps: IntArray
    device: IntArray
    stats: dict[str, IntArray] = field(default_factory=dict[str, IntArray])
    launch: IntArray

    def stat(self, name: str) -> IntArray:
        """A column of facts about the device events."""
        missing = ABSENT if name in NUMBERS else 0
        return self.stats.get(name, np.full(len(self.device), missing, np.int64))


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program: its name, the profiler's id of it (-1: not known), and its HLO."""

    name: str
    number: int
    hlo: bytes


def truth_of(plane: str, lines: Iterable[str]) -> Truth:
    """Which lines of a plane say what ran, from the names of all."""
    names = frozenset(lines)
    if plane.startswith(GPU_PREFIX) and any(name.startswith(STREAM_PREFIX) for name in names):
        return Truth.STREAMS
    return Truth.OPERATIONS if names & OP_LINES else Truth.ALL


def line_kind(plane: str, line: str, truth: Truth) -> LineKind:
    """What the events of a line are."""
    if plane.startswith(HOST_PREFIX):
        return LineKind.LEFT_OUT if plane == METADATA_PLANE else LineKind.HOST
    if not plane.startswith(DEVICE_PREFIX):
        return LineKind.LEFT_OUT
    if line in MODULE_LINES:
        return LineKind.MODULES
    if line in DERIVED_LINES:
        return LineKind.LEFT_OUT
    if line in OP_LINES | ASYNC_LINES:
        of_ops = LineKind.OPS if line in OP_LINES else LineKind.ASYNC
        return LineKind.LEFT_OUT if truth is Truth.STREAMS else of_ops
    return LineKind.LEFT_OUT if truth is Truth.OPERATIONS else LineKind.STREAM


def is_cpu(plane: str) -> bool:
    """Whether a plane holds the threads on which the CPU back end runs operations."""
    return plane == CPU_PLANE


def split_module_name(text: str) -> tuple[str, int]:
    """Name and id of ``jit_step(42)``; -1 where there is no id. Ids are 64 bits, written with or without
    sign.
    """
    name, opened, rest = text.rpartition("(")
    digits = rest.removesuffix(")")
    if not opened or not rest.endswith(")") or not digits.removeprefix("-").isdecimal() or len(digits) > 20:
        return text, -1
    number = int(digits) & ((1 << 64) - 1)
    return name, number - (1 << 64) if number >= 1 << 63 else number
