"""Recordings of GPU profilers (Nsight Systems, rocprofv3) as columns, before device work is linked to the
host.

Times are whole nanoseconds. Rows of texts are rows of ``strings``, whose row 0 is the empty text: unknown.
Other columns hold -1 for unknown. Processes and threads are numbers of the profiler, whose low 24 bits are
the number of the operating system; a thread number occurs in one process only. :mod:`.profile` converts a
recording to a :class:`~hespas.graph.Profile`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from hespas.graph import StringTableBuilder
from hespas.graph.columns import BoolArray, ColumnTable, IntArray

__all__ = ["DeviceWork", "GpuLaunches", "GpuRanges", "GpuTrace", "GraphNodes", "listed"]


def listed(column: IntArray) -> list[int]:
    """Return a column as Python numbers, which loops read faster than array elements."""
    numbers: list[int] = column.tolist()
    return numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceWork(ColumnTable):
    """Kernels, copies and fills on GPUs, one per row. Unknown numbers are -1.

    ``gpu`` numbers the devices; ``device`` is the index of the device's name in the trace's ``devices``. The
    launch of the work has the same ``correlation`` id. ``node`` is the node of the CUDA graph that the work
    replays. ``op_class`` is an ``OpClass`` code. The columns ``range_id`` and ``grid_id`` are rows of the
    string table: the range that the profiler states as cause, and the launch shape
    (:mod:`hespas.converters.launch_shapes`).
    """

    process: IntArray
    gpu: IntArray
    device: IntArray
    stream: IntArray
    start_ns: IntArray
    end_ns: IntArray
    name_id: IntArray
    category_id: IntArray
    bytes_moved: IntArray
    correlation: IntArray
    node: IntArray
    range_id: IntArray
    op_class: IntArray
    grid_id: IntArray

    def by_start(self) -> Self:
        """Return the same work in order of start."""
        return self.take(np.argsort(self.start_ns, kind="stable"))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GpuLaunches(ColumnTable):
    """Host calls that enqueue device work, one per row. If a call was also recorded as a range,
    ``range_place`` is the row of that range (-1: it was not).
    """

    process: IntArray
    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    correlation: IntArray
    range_place: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GraphNodes(ColumnTable):
    """Host calls that created nodes of CUDA or HIP graphs, one per row. ``original`` is the node of which
    ``node`` is a clone (-1: none).
    """

    process: IntArray
    thread: IntArray
    start_ns: IntArray
    node: IntArray
    original: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GpuRanges(ColumnTable):
    """Named ranges on the host, one per row. ``text`` is an index of the trace's ``texts``.

    ``nests`` marks ranges that are pushed and popped on their thread. The other ranges start and end
    anywhere, and contain no other range.
    """

    process: IntArray
    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    text: IntArray
    nests: BoolArray

    def by_process(self, rows: IntArray) -> GpuRanges:
        """Return the ranges at these rows with the process in place of the thread, so that they nest per
        process.
        """
        return replace(self.take(rows), thread=self.process[rows])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GpuTrace:
    """One recording of a GPU profiler. ``texts`` are the texts of the ranges on the host. ``devices`` are the
    distinct names of the GPU models.
    """

    strings: StringTableBuilder
    devices: tuple[str, ...]
    work: DeviceWork
    launches: GpuLaunches
    ranges: GpuRanges
    texts: list[str]
    nodes: GraphNodes = field(default_factory=GraphNodes.empty)
