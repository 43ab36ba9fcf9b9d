"""What a profiler of GPUs recorded, as columns, before it is linked. Times are whole nanoseconds.

Rows of texts are rows of ``strings``, whose row 0 is the empty text: unknown. Other columns hold -1 for
unknown. Processes and threads are numbers of the profiler, whose low 24 bits are those of the
operating system; a thread's number occurs in one process only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Self

import numpy as np

from hespas.graph import StringTableBuilder
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import InvariantError

__all__ = ["DeviceWork", "GpuTrace", "GraphNodes", "Launches", "Ranges", "listed"]


def listed(column: IntArray) -> list[int]:
    """A column as Python numbers, for loops."""
    numbers: list[int] = column.tolist()
    return numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Columns:
    def __post_init__(self) -> None:
        """Check that all columns are of one length."""
        lengths = {len(getattr(self, each.name)) for each in fields(self)}
        if len(lengths) > 1:
            raise InvariantError(f"{type(self).__name__}: columns of different lengths")


def _joined(kind: type[_Columns], parts: Sequence[_Columns]) -> dict[str, IntArray]:
    """The columns of all parts, one behind the other."""
    return {
        each.name: np.concatenate([getattr(part, each.name) for part in parts]) if parts else _no_rows()
        for each in fields(kind)
    }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceWork(_Columns):
    """Kernels, copies and fills. ``gpu`` orders the devices; ``device`` is the place of its name among the
    trace's ``devices``. ``correlation`` is the launch's, ``node`` the graph node replayed, ``range_row`` the
    range that the profiler itself names as cause, ``op_class`` an ``OpClass`` code.
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

    def __len__(self) -> int:
        return len(self.start_ns)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All work in the order it started."""
        whole = cls(**_joined(cls, parts))
        return whole.taken(np.argsort(whole.start_ns, kind="stable"))

    def taken(self, places: IntArray) -> Self:
        """The work at these places, in their order."""
        return type(self)(**{each.name: getattr(self, each.name)[places] for each in fields(self)})


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Launches(_Columns):
    """Calls that enqueue work. ``range_place`` is the range a call is itself (-1: it is none)."""

    process: IntArray
    thread: IntArray
    start_ns: IntArray
    correlation: IntArray
    range_place: IntArray

    def __len__(self) -> int:
        return len(self.start_ns)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All calls, part after part."""
        return cls(**_joined(cls, parts))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GraphNodes(_Columns):
    """The making of graph nodes; ``original`` is the node one was cloned from (-1: none)."""

    process: IntArray
    thread: IntArray
    start_ns: IntArray
    node: IntArray
    original: IntArray

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ranges(_Columns):
    """Ranges on the host. ``text`` is a place in the trace's ``texts``. Ranges that ``nests`` are pushed and
    popped on their thread; others start and end anywhere and enclose nothing.
    """

    process: IntArray
    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    text: IntArray
    nests: BoolArray

    def __len__(self) -> int:
        return len(self.start_ns)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All ranges, part after part."""

        def column(name: str) -> IntArray:
            return np.concatenate([getattr(part, name) for part in parts]) if parts else _no_rows()

        return cls(
            process=column("process"),
            thread=column("thread"),
            start_ns=column("start_ns"),
            end_ns=column("end_ns"),
            text=column("text"),
            nests=column("nests").astype(np.bool_),
        )

    def by_process(self, places: IntArray) -> Ranges:
        """The ranges at these places, as if each process had one thread."""
        return Ranges(
            process=self.process[places],
            thread=self.process[places],
            start_ns=self.start_ns[places],
            end_ns=self.end_ns[places],
            text=self.text[places],
            nests=self.nests[places],
        )


def _no_rows() -> IntArray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GpuTrace:
    """One recording. ``texts`` are what ranges say; ``devices`` the names of hardware, without repeats."""

    strings: StringTableBuilder
    devices: tuple[str, ...]
    work: DeviceWork
    launches: Launches
    ranges: Ranges
    texts: list[str]
    nodes: GraphNodes = field(
        default_factory=lambda: GraphNodes(
            process=_no_rows(), thread=_no_rows(), start_ns=_no_rows(), node=_no_rows(), original=_no_rows()
        )
    )
