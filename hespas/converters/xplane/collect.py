"""All lines of a trace as two tables: what ran on devices, and what the host did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hespas.converters.linking import enclosing, nearest
from hespas.converters.xplane.lines import NUMBERS, TEXTS, Line, LineEvents, LineKind
from hespas.graph.columns import BoolArray, IntArray

__all__ = ["Collected", "DeviceTable", "HostTable", "ModuleRuns", "collect", "nest"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceTable:
    """Device events; ``line`` indexes the lines. ``duration_ps`` is a span, ``exclusive_ps`` what of it no
    event inside takes, ``is_wrapper`` says that there is one inside. ``host`` is a row of the host table
    (-1: none). ``stats`` has every column of :data:`NUMBERS` and :data:`TEXTS`.
    """

    line: IntArray
    name_row: IntArray
    start_ps: IntArray
    duration_ps: IntArray
    exclusive_ps: IntArray
    is_wrapper: BoolArray
    host: IntArray
    stats: dict[str, IntArray]

    def __len__(self) -> int:
        return len(self.line)

    def take(self, rows: IntArray) -> DeviceTable:
        """The given rows, in the given order."""
        return DeviceTable(
            line=self.line[rows],
            name_row=self.name_row[rows],
            start_ps=self.start_ps[rows],
            duration_ps=self.duration_ps[rows],
            exclusive_ps=self.exclusive_ps[rows],
            is_wrapper=self.is_wrapper[rows],
            host=self.host[rows],
            stats={name: column[rows] for name, column in self.stats.items()},
        )


@dataclass(frozen=True, slots=True, eq=False)
class HostTable:
    """Operations of the host; ``launch`` is the correlation id of those that start device work."""

    line: IntArray
    name_row: IntArray
    start_ps: IntArray
    duration_ps: IntArray
    parent: IntArray
    launch: IntArray

    def __len__(self) -> int:
        return len(self.line)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleRuns:
    """Runs of programs on one device plane, by start; ``run_id`` is :data:`ABSENT` where not stated."""

    name_row: IntArray
    start_ps: IntArray
    end_ps: IntArray
    run_id: IntArray
    program_id: IntArray

    def at(self, moment_ps: IntArray) -> IntArray:
        """The run in which each moment lies, -1 for none."""
        place = np.searchsorted(self.start_ps, moment_ps, side="right") - 1
        inside = (place >= 0) & (moment_ps <= self.end_ps[np.maximum(place, 0)])
        return np.where(inside, place, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """A whole trace. ``modules`` has the runs of programs by plane."""

    lines: tuple[Line, ...]
    device: DeviceTable
    host: HostTable
    modules: dict[str, ModuleRuns]
    overlapping: int

    def rows_by_plane(self) -> dict[str, IntArray]:
        """The rows of the device table that each plane has. O(rows log rows)."""
        codes: dict[str, int] = {}
        code = np.array([codes.setdefault(line.plane, len(codes)) for line in self.lines], np.int64)
        of_row = code[self.device.line] if len(code) else self.device.line
        order = np.argsort(of_row, kind="stable")
        bounds = np.searchsorted(of_row[order], np.arange(len(codes) + 1)).tolist()
        return {plane: order[bounds[number] : bounds[number + 1]] for plane, number in codes.items()}


class _Parts:
    """Columns in parts, one a line."""

    def __init__(self) -> None:
        self.columns: dict[str, list[IntArray]] = {}
        self.rows = 0

    def add(self, rows: int, **columns: IntArray) -> None:
        for name, column in columns.items():
            self.columns.setdefault(name, []).append(column)
        self.rows += rows

    def column(self, name: str) -> IntArray:
        parts = self.columns.get(name, [])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def collect(lines: Iterable[LineEvents]) -> Collected:
    """Read all lines, nesting the events of each. O(events log events)."""
    known: list[Line] = []
    device, host = _Parts(), _Parts()
    modules: dict[str, list[LineEvents]] = {}
    overlapping = 0
    for events in lines:
        if events.line.kind is LineKind.MODULES:
            modules.setdefault(events.line.plane, []).append(events)
            continue
        overlapping += _add(events, len(known), device, host)
        known.append(events.line)
    table = DeviceTable(
        line=device.column("line"),
        name_row=device.column("name_row"),
        start_ps=device.column("start_ps"),
        duration_ps=device.column("duration_ps"),
        exclusive_ps=device.column("exclusive_ps"),
        is_wrapper=device.column("is_wrapper").astype(np.bool_),
        host=device.column("host"),
        stats={name: device.column(name) for name in (*NUMBERS, *TEXTS)},
    )
    names = ("line", "name_row", "start_ps", "duration_ps", "parent", "launch")
    return Collected(
        tuple(known),
        table,
        HostTable(*(host.column(name) for name in names)),
        {plane: _runs(parts) for plane, parts in modules.items()},
        overlapping,
    )


def _add(events: LineEvents, line: int, device: _Parts, host: _Parts) -> int:
    """Sort the events of a line into the two tables; how many overlap without one enclosing the other."""
    count = len(events.start_ps)
    is_device = np.zeros(count, np.bool_)
    is_device[events.device] = True
    rows = events.device
    if events.line.kind is LineKind.STREAM:
        nothing = np.full(count, -1, np.int64)
        around_host, around_device, exclusive, overlapping = nothing, nothing, events.duration_ps, 0
    else:
        found = nest(events.start_ps, events.duration_ps, is_device)
        around_host, around_device = found.host, found.device
        exclusive, overlapping = found.exclusive_ps, found.overlapping
    wraps = np.zeros(count, np.int64)
    wraps[around_device[is_device & (around_device >= 0)]] = 1
    others = np.flatnonzero(~is_device)
    global_row = np.full(count + 1, -1, np.int64)  # the last stands for the -1 of no operation
    global_row[others] = np.arange(len(others)) + host.rows
    if len(rows):
        device.add(
            len(rows),
            line=np.full(len(rows), line, np.int64),
            name_row=events.name_row[rows].astype(np.int64),
            start_ps=events.start_ps[rows],
            duration_ps=events.duration_ps[rows],
            exclusive_ps=exclusive[rows],
            is_wrapper=wraps[rows],
            host=global_row[around_host[rows]],
            **{name: events.stat(name) for name in (*NUMBERS, *TEXTS)},
        )
    if len(others):
        host.add(
            len(others),
            line=np.full(len(others), line, np.int64),
            name_row=events.name_row[others].astype(np.int64),
            start_ps=events.start_ps[others],
            duration_ps=events.duration_ps[others],
            parent=global_row[around_host[others]],
            launch=events.launch[others],
        )
    return overlapping


def _runs(parts: list[LineEvents]) -> ModuleRuns:
    start_ps = np.concatenate([part.start_ps for part in parts])
    order = np.argsort(start_ps, kind="stable")
    duration_ps = np.concatenate([part.duration_ps for part in parts])
    return ModuleRuns(
        np.concatenate([part.name_row for part in parts]).astype(np.int64)[order],
        start_ps[order],
        (start_ps + duration_ps)[order],
        np.concatenate([part.stat("run_id") for part in parts])[order],
        np.concatenate([part.stat("program_id") for part in parts])[order],
    )


# Which event of a line encloses which, and what time is left to each.


@dataclass(frozen=True, slots=True, eq=False)
class _Nesting:
    """Per event of a line: the innermost host operation and the innermost device event around it (-1: none).

    ``exclusive_ps`` is the duration without that of the device events inside; for host operations it is the
    duration. ``overlapping`` counts device events that reach beyond the end of one they start in.
    """

    host: IntArray
    device: IntArray
    exclusive_ps: IntArray
    overlapping: int


def nest(start_ps: IntArray, duration_ps: IntArray, is_device: BoolArray) -> _Nesting:
    """Nest the events of one line by containment. O(n log n)."""
    nothing = np.full(len(start_ps), -1, np.int64)
    order = np.lexsort((-duration_ps, start_ps))
    start, end = start_ps[order], (start_ps + duration_ps)[order]
    if len(order) < 2 or bool((start[1:] >= np.maximum.accumulate(end)[:-1]).all()):
        return _Nesting(nothing, nothing, duration_ps, 0)
    parent, overtaken = enclosing(np.zeros(len(order), np.int64), start_ps, duration_ps)
    host, device = nearest(~is_device, parent, parent), nearest(is_device, parent, parent)
    exclusive_ps = duration_ps.copy()
    inside = np.flatnonzero(is_device & (device >= 0))
    np.subtract.at(exclusive_ps, device[inside], duration_ps[inside])
    cut = (overtaken >= 0) & is_device & is_device[overtaken]
    return _Nesting(host, device, np.maximum(exclusive_ps, 0), int(cut.sum()))
