"""A line of a trace: events of one thread or stream in time, and what they mean to us.

What is device work, by plane and line:

* On a device plane, the events of the lines ``XLA Ops`` and ``Sparse Core Ops``, or those of the streams of a
  GPU: where a plane has streams, they alone count, as its other lines are derived of them. Lines that sum up
  by step, scope or program are left out. Where a plane has neither, all other lines count.
* ``Async XLA Ops`` run beside the operations, which take the time to start them and to wait for them: counted
  too, that time would be there twice.
* On the host plane of a file without device planes, the events that name an ``hlo_op``: XLA's CPU back end
  runs operations on host threads. Beside a device such an event is its launch. Everything else there is an
  operation of the host.

So count XProf's own totals: ``ConvertTensorCoreDeviceTraceXPlaneToOpMetricsDb`` and
``ConvertDeviceTraceXPlaneToKernelReports`` of https://github.com/openxla/xprof.

Operations nest: a loop, a call or a conditional encloses what it runs. A device event therefore counts the
time that no other device event inside it takes; the sum over a line is the time the line was busy. Events on
GPU streams never enclose each other: kernels of one graph may run side by side, and each counts in full.
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
    DERIVED_OF,
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
    "CLOCK",
    "LARGEST_PS",
    "NUMBERS",
    "TEXTS",
    "Line",
    "LineEvents",
    "LineKind",
    "Program",
    "Truth",
    "device_clock",
    "device_rows",
    "has_devices",
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
    "kernel_details",
)
"""What is kept of the facts about a device event, by the profiler's names."""
CLOCK = ("device_offset_ps", "device_duration_ps")
"""When an operation ran by the clock of its device, whose durations count; facts that all events state."""
LARGEST_PS = (1 << 61) - 1000
"""About 26 days; a sum of two still fits 64 bits."""


class LineKind(IntEnum):
    """What the events of a line are."""

    OTHER = 0
    HOST = 1
    """Operations of the host, and those of a CPU device among them."""
    OPS = 2
    """Operations of a device, which may nest."""
    STREAM = 3
    """Work on a device that does not nest."""
    MODULES = 4
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
        missing = ABSENT if name in NUMBERS or name in CLOCK else 0
        return self.stats.get(name, np.full(len(self.device), missing, np.int64))


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program: its name, the profiler's id of it (-1: not known), and its HLO."""

    name: str
    number: int
    hlo: bytes


def truth_of(plane: str, lines: Iterable[str]) -> Truth:
    """Which lines of a plane say what ran, from the names of all those that hold events."""
    names = frozenset(lines)
    if plane.startswith(GPU_PREFIX) and any(name.startswith(STREAM_PREFIX) for name in names):
        return Truth.STREAMS
    return Truth.OPERATIONS if names & OP_LINES else Truth.ALL


def line_kind(plane: str, line: str, truth: Truth) -> LineKind:
    """What the events of a line are."""
    if plane.startswith(HOST_PREFIX):
        return LineKind.OTHER if plane == METADATA_PLANE else LineKind.HOST
    name = line.partition(DERIVED_OF)[0]
    if not plane.startswith(DEVICE_PREFIX) or name in DERIVED_LINES | ASYNC_LINES:
        is_modules = line in MODULE_LINES and plane.startswith(DEVICE_PREFIX)
        return LineKind.MODULES if is_modules else LineKind.OTHER
    match truth:
        case Truth.STREAMS:
            counts = line.startswith(STREAM_PREFIX)
        case Truth.OPERATIONS:
            counts = line in OP_LINES
        case Truth.ALL:
            counts = True
    work = LineKind.OPS if truth is Truth.OPERATIONS else LineKind.STREAM
    return work if counts else LineKind.OTHER


def has_devices(planes: Iterable[str]) -> bool:
    """Whether a file has planes of devices, so that operations named on host threads are launches."""
    return any(plane.startswith(DEVICE_PREFIX) for plane in planes)


def device_rows(line: Line, columns: dict[str, IntArray], count: int, *, has_devices: bool) -> IntArray:
    """Which events of a line are work of a device."""
    if line.kind is not LineKind.HOST:
        return np.arange(count, dtype=np.int64)
    if line.plane != CPU_PLANE or has_devices or "hlo_op" not in columns:
        return np.empty(0, np.int64)
    return np.flatnonzero(columns["hlo_op"] > 0)


def device_clock(
    start_ps: IntArray,
    duration_ps: IntArray,
    columns: dict[str, IntArray],
    shifts_ps: dict[str, int],
    plane: str,
) -> tuple[IntArray, IntArray]:
    """Times by the device's own clock where every event of the line states them; ``shifts_ps`` of planes
    move those to the clock of the trace.
    """
    offset, length = (columns.get(name) for name in CLOCK)
    if offset is None or length is None or not len(offset):
        return start_ps, duration_ps
    if bool(((offset < 0) | (offset > LARGEST_PS) | (length < 0) | (length > LARGEST_PS)).any()):
        return start_ps, duration_ps
    return offset + shifts_ps.setdefault(plane, int(start_ps[0] - offset[0])), length


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
