"""What a profiler of GPUs recorded, as columns, before it is linked. Times are whole nanoseconds.

Rows of texts are rows of ``strings``, whose row 0 is the empty text: unknown. Other columns hold -1 for
unknown. Processes and threads are numbers of the profiler, whose low 24 bits are those of the
operating system; a thread's number occurs in one process only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from hespas.graph import StringTableBuilder
from hespas.graph.columns import BoolArray, ColumnTable, IntArray

__all__ = ["DeviceWork", "GpuTrace", "GraphNodes", "Launches", "Ranges", "listed"]


def listed(column: IntArray) -> list[int]:
    """A column as Python numbers, for loops."""
    numbers: list[int] = column.tolist()
    return numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceWork(ColumnTable):
    """Kernels, copies and fills. ``gpu`` orders the devices; ``device`` is the place of its name among the
    trace's ``devices``. ``correlation`` is the launch's, ``node`` the graph node replayed, ``range_row`` the
    range that the profiler itself names as cause, ``op_class`` an ``OpClass`` code, ``grid_row`` the shape of
    the launch as :mod:`hespas.converters.launch_shapes` writes it.
    """

    process: IntArray
    gpu: IntArray
    device: IntArray
    stream: IntArray
    start_ns: IntArray
    end_ns: IntArray
    name_row: IntArray
    category_row: IntArray
    bytes_moved: IntArray
    correlation: IntArray
    node: IntArray
    range_row: IntArray
    op_class: IntArray
    grid_row: IntArray

    def by_start(self) -> Self:
        """The same in the order it started."""
        return self.take(np.argsort(self.start_ns, kind="stable"))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Launches(ColumnTable):
    """Calls that enqueue work. ``range_place`` is the range a call is itself (-1: it is none)."""

    process: IntArray
    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    correlation: IntArray
    range_place: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GraphNodes(ColumnTable):
    """The making of graph nodes; ``original`` is the node one was cloned from (-1: none)."""

    process: IntArray
    thread: IntArray
    start_ns: IntArray
    node: IntArray
    original: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ranges(ColumnTable):
    """Ranges on the host. ``text`` is a place in the trace's ``texts``. Ranges that ``nests`` are pushed and
    popped on their thread; others start and end anywhere and enclose nothing.
    """

    process: IntArray
    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    text: IntArray
    nests: BoolArray

    def by_process(self, places: IntArray) -> Ranges:
        """The ranges at these places, as if each process had one thread."""
        return replace(self.take(places), thread=self.process[places])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GpuTrace:
    """One recording. ``texts`` are what ranges say; ``devices`` the names of hardware, without repeats."""

    strings: StringTableBuilder
    devices: tuple[str, ...]
    work: DeviceWork
    launches: Launches
    ranges: Ranges
    texts: list[str]
    nodes: GraphNodes = field(default_factory=GraphNodes.empty)
