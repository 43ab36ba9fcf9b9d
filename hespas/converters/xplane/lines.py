"""Lines of a trace (the events of one thread or stream), and the rule for the events that are device work.

Device work, by plane and line:

* On a device plane, the events of the lines ``XLA Ops`` and ``Sparse Core Ops``, or of the streams of a GPU.
  Where a plane has streams, only the streams count, because its other lines are derived from them. Lines that
  aggregate by step, scope or program are left out. Where a plane has neither, all other lines count.
* ``Async XLA Ops`` overlap the operations that start them and wait for them, so they are left out; their time
  would count twice.
* On the host plane of a file without device planes, the events that name an ``hlo_op``, because XLA's CPU
  backend runs operations on host threads. In a file with device planes such an event is a launch. All other
  events of the host plane are host operations.

XProf computes its totals by the same rule: ``ConvertTensorCoreDeviceTraceXPlaneToOpMetricsDb`` and
``ConvertDeviceTraceXPlaneToKernelReports`` of https://github.com/openxla/xprof.

Operations nest: a loop, a call or a conditional encloses the operations that it runs. A device event
therefore counts its exclusive time, without the device events inside it; the sum over a line is the busy time
of the line. Events on GPU streams never enclose each other: kernels of one CUDA graph may overlap, and each
counts in full.
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
    "LineEvents",
    "LineKind",
    "ProfiledHlo",
    "TraceLine",
    "Truth",
    "device_clock",
    "device_rows",
    "has_devices",
    "line_kind",
    "split_module_name",
    "truth_of",
]

ABSENT = -(1 << 63)
"""Value of a number that is missing in the trace."""

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
"""Facts about a device event that are read, by the profiler's names."""
CLOCK = ("device_offset_ps", "device_duration_ps")
"""Start and duration of an operation by the clock of its device, used where all events of a line have them.
"""
LARGEST_PS = (1 << 61) - 1000
"""Largest time that is read, about 26 days; a sum of two fits 64 bits."""


class LineKind(IntEnum):
    """Kind of the events of a line of an XLA profile, such as device operations or host operations."""

    OTHER = 0
    HOST = 1
    """Operations of the host, including operations of a CPU device."""
    OPS = 2
    """Operations of a device, which may nest."""
    STREAM = 3
    """Work on a device that does not nest."""
    MODULES = 4
    """Runs of programs."""


class Truth(Enum):
    """Choice of the lines of a device plane whose events are counted. Several lines may record the same work,
    which must be counted once.
    """

    STREAMS = "streams"
    OPERATIONS = "operations"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class TraceLine:
    """Line (thread or stream) of an XLA profile. ``number`` is the profiler's id of the line."""

    plane: str
    name: str
    number: int
    kind: LineKind


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LineEvents:
    """Events of one line (stream or thread) in the order of the file; times in ps since a common origin.

    ``device`` has the rows that are device work. ``stats`` has columns with one entry per device event;
    :data:`ABSENT`, or row 0 of the string table, if an event lacks the stat. ``launch`` is the correlation id
    of host events that start device work. For a line of program runs ``device`` has all rows.
    """

    line: TraceLine
    name_id: SmallIntArray
    start_ps: IntArray
    duration_ps: IntArray
    device: IntArray
    stats: dict[str, IntArray] = field(default_factory=dict[str, IntArray])
    launch: IntArray

    def stat(self, name: str) -> IntArray:
        """Return a column of stats of the device events; events without the stat have :data:`ABSENT` or
        string row 0.
        """
        missing = ABSENT if name in NUMBERS or name in CLOCK else 0
        return self.stats.get(name, np.full(len(self.device), missing, np.int64))


@dataclass(frozen=True, slots=True)
class ProfiledHlo:
    """Compiled program in a trace: its name, the profiler's id (-1: unknown), and its HLO."""

    name: str
    number: int
    hlo: bytes


def truth_of(plane: str, lines: Iterable[str]) -> Truth:
    """Select the lines of a plane that are counted, from the names of all lines with events."""
    names = frozenset(lines)
    if plane.startswith(GPU_PREFIX) and any(name.startswith(STREAM_PREFIX) for name in names):
        return Truth.STREAMS
    return Truth.OPERATIONS if names & OP_LINES else Truth.ALL


def line_kind(plane: str, line: str, truth: Truth) -> LineKind:
    """Return the kind of the events of a line."""
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
    """Return True if the file has device planes. Events on host threads that name a device operation are then
    launches; otherwise they are the work itself.
    """
    return any(plane.startswith(DEVICE_PREFIX) for plane in planes)


def device_rows(line: TraceLine, columns: dict[str, IntArray], count: int, *, has_devices: bool) -> IntArray:
    """Return the rows of the events of a line that are device work."""
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
    """Return start and duration by the clock of the device, if every event of the line has these stats.

    Otherwise return ``start_ps`` and ``duration_ps``. ``shifts_ps`` has, by plane, the offset from the device
    clock to the clock of the trace. The first line of a plane sets it.
    """
    offset, length = (columns.get(name) for name in CLOCK)
    if offset is None or length is None or not len(offset):
        return start_ps, duration_ps
    if bool(((offset < 0) | (offset > LARGEST_PS) | (length < 0) | (length > LARGEST_PS)).any()):
        return start_ps, duration_ps
    return offset + shifts_ps.setdefault(plane, int(start_ps[0] - offset[0])), length


def split_module_name(text: str) -> tuple[str, int]:
    """Split a module name such as ``jit_step(42)`` into name and id. The id is -1 if the text has none.

    Ids are 64-bit numbers, written with or without sign.
    """
    name, opened, rest = text.rpartition("(")
    digits = rest.removesuffix(")")
    if not opened or not rest.endswith(")") or not digits.removeprefix("-").isdecimal() or len(digits) > 20:
        return text, -1
    number = int(digits) & ((1 << 64) - 1)
    return name, number - (1 << 64) if number >= 1 << 63 else number
