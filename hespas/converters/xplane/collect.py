"""Device events and host operations of a trace as two tables, with ranks, merged cores and labels.

The two cores of a TPU chip may work as one device (megacore). Each core records its own half of an operation
at the same time, so the time of an operation is the larger of the two, never their sum, while bytes and FLOPs
add up. Cores ``2k`` and ``2k + 1`` are merged to rank ``k`` where both planes have ``has_megacore`` (or, in a
file whose planes lack it, where events of both cores use both), no event is marked as not using it, and both
cores ran the same programs. They are also merged where the user sets half the number of cores as devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hespas.converters.launch_shapes import shape_text
from hespas.converters.linking import enclosing, nearest
from hespas.converters.xplane.lines import ABSENT, NUMBERS, TEXTS, LineEvents, LineKind, TraceLine
from hespas.graph import StringTableBuilder
from hespas.graph.columns import BoolArray, FloatArray, IntArray, distinct_rows, mapped
from hespas.schemas.xplane import CPU_PLANE, TPU_PREFIX

__all__ = [
    "CollectedTrace",
    "DeviceTable",
    "EventLabels",
    "HostTable",
    "ModuleRuns",
    "Ranked",
    "collect",
    "collective_kinds",
    "labels_of",
    "nest",
    "ranked",
]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceTable:
    """Device events as columns. ``line`` is the line (stream or thread) of each event.

    ``duration_ps`` is the time from start to end, ``exclusive_ps`` the time without the events inside.
    ``is_wrapper`` is True for events with others inside. ``host`` is a row of the host table (-1: none).
    ``stats`` has every column of :data:`NUMBERS` and :data:`TEXTS`.
    """

    line: IntArray
    name_id: IntArray
    start_ps: IntArray
    duration_ps: IntArray
    exclusive_ps: IntArray
    is_wrapper: BoolArray
    host: IntArray
    stats: dict[str, IntArray]

    def __len__(self) -> int:
        return len(self.line)

    def take(self, rows: IntArray) -> DeviceTable:
        """Return the given rows in the given order."""
        columns = {name: getattr(self, name)[rows] for name in _DEVICE_COLUMNS}
        return replace(self, **columns, stats={name: column[rows] for name, column in self.stats.items()})


_DEVICE_COLUMNS = tuple(column.name for column in fields(DeviceTable) if column.name != "stats")


@dataclass(frozen=True, slots=True, eq=False)
class HostTable:
    """Host operations of a trace as columns; ``launch`` is the correlation id of operations that start device
    work.
    """

    line: IntArray
    name_id: IntArray
    start_ps: IntArray
    duration_ps: IntArray
    parent: IntArray
    launch: IntArray

    def __len__(self) -> int:
        return len(self.line)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleRuns:
    """Runs of programs on one device plane, sorted by start; ``run_id`` is :data:`ABSENT` where missing."""

    name_id: IntArray
    start_ps: IntArray
    end_ps: IntArray
    run_id: IntArray
    program_id: IntArray

    def at(self, moment_ps: IntArray) -> IntArray:
        """Return the program run that is active at each moment, -1 for none."""
        index = np.searchsorted(self.start_ps, moment_ps, side="right") - 1
        inside = (index >= 0) & (moment_ps <= self.end_ps[np.maximum(index, 0)])
        return np.where(inside, index, -1)


@dataclass(frozen=True, slots=True, eq=False)
class CollectedTrace:
    """Tables of the events of a whole trace. ``modules`` has the runs of programs by plane."""

    lines: tuple[TraceLine, ...]
    device: DeviceTable
    host: HostTable
    modules: dict[str, ModuleRuns]
    overlapping: int

    def rows_by_plane(self) -> dict[str, IntArray]:
        """Return the rows of the device table of each plane. O(rows log rows)."""
        codes: dict[str, int] = {}
        code = np.array([codes.setdefault(line.plane, len(codes)) for line in self.lines], np.int64)
        of_row = code[self.device.line] if len(code) else self.device.line
        order = np.argsort(of_row, kind="stable")
        bounds = np.searchsorted(of_row[order], np.arange(len(codes) + 1)).tolist()
        return {plane: order[bounds[number] : bounds[number + 1]] for plane, number in codes.items()}


class _ColumnParts:
    """Builder of columns. Each line of the trace appends a part to them."""

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


def collect(lines: Iterable[LineEvents]) -> CollectedTrace:
    """Read all lines and nest the events of each. O(events log events)."""
    seen_lines: list[TraceLine] = []
    device, host = _ColumnParts(), _ColumnParts()
    modules: dict[str, list[LineEvents]] = {}
    overlapping = 0
    for events in lines:
        if events.line.kind is LineKind.MODULES:
            modules.setdefault(events.line.plane, []).append(events)
            continue
        overlapping += _add(events, len(seen_lines), device, host)
        seen_lines.append(events.line)
    columns: dict[str, Any] = {name: device.column(name) for name in _DEVICE_COLUMNS}
    columns["is_wrapper"] = columns["is_wrapper"].astype(np.bool_)
    stats = {name: device.column(name) for name in (*NUMBERS, *TEXTS)}
    return CollectedTrace(
        tuple(seen_lines),
        DeviceTable(**columns, stats=stats),
        HostTable(*(host.column(column.name) for column in fields(HostTable))),
        {plane: _module_runs(parts) for plane, parts in modules.items()},
        overlapping,
    )


def _add(events: LineEvents, line: int, device: _ColumnParts, host: _ColumnParts) -> int:
    """Add the events of one line to the table of device events or of host operations. Return the number of
    device events that end after the event in which they start.
    """
    count = len(events.start_ps)
    is_device = np.zeros(count, np.bool_)
    is_device[events.device] = True
    rows = events.device
    if events.line.kind is LineKind.STREAM:
        nothing = np.full(count, -1, np.int64)
        around_host, around_device, exclusive, overlapping = nothing, nothing, events.duration_ps, 0
    else:
        nesting = nest(events.start_ps, events.duration_ps, is_device)
        around_host, around_device = nesting.host, nesting.device
        exclusive, overlapping = nesting.exclusive_ps, nesting.overlapping
    wraps = np.zeros(count, np.int64)
    wraps[around_device[is_device & (around_device >= 0)]] = 1
    others = np.flatnonzero(~is_device)
    global_row = np.full(count + 1, -1, np.int64)  # index -1 (no operation) gives -1
    global_row[others] = np.arange(len(others)) + host.rows
    if len(rows):
        device.add(
            len(rows),
            line=np.full(len(rows), line, np.int64),
            name_id=events.name_id[rows].astype(np.int64),
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
            name_id=events.name_id[others].astype(np.int64),
            start_ps=events.start_ps[others],
            duration_ps=events.duration_ps[others],
            parent=global_row[around_host[others]],
            launch=events.launch[others],
        )
    return overlapping


def _module_runs(parts: list[LineEvents]) -> ModuleRuns:
    start_ps = np.concatenate([part.start_ps for part in parts])
    order = np.argsort(start_ps, kind="stable")
    duration_ps = np.concatenate([part.duration_ps for part in parts])
    return ModuleRuns(
        np.concatenate([part.name_id for part in parts]).astype(np.int64)[order],
        start_ps[order],
        (start_ps + duration_ps)[order],
        np.concatenate([part.stat("run_id") for part in parts])[order],
        np.concatenate([part.stat("program_id") for part in parts])[order],
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Nesting:
    """Nesting of the events of a line. ``host`` is the innermost host operation around each event, and
    ``device`` the innermost device event around it (-1: none).

    ``exclusive_ps`` is the duration without the device events inside; for host operations it is the whole
    duration. ``overlapping`` counts device events that end after the event in which they start.
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


_ORDINAL = re.compile(r"/device:[A-Za-z_]+:(\d{1,9})")
_ADDED = ("bytes_accessed", "bytes_transferred", "model_flops", "flops")


@dataclass(frozen=True, slots=True, eq=False)
class Ranked:
    """Device events with the rank of each.

    In a megacore, two cores are one device. ``merged`` events of second cores, with a total time of
    ``merged_ps``, were merged into events of first cores. ``alone`` counts operations of second cores that
    have no counterpart and remain; transfers are often recorded by one core only. ``undecided`` is the number
    of pairs of cores that ran the same programs and may or may not be one device.
    """

    device: DeviceTable
    rank: IntArray
    merged: int = 0
    merged_ps: int = 0
    alone: int = 0
    undecided: int = 0


def ranked(
    collected: CollectedTrace, planes: Mapping[str, Mapping[str, str]], num_devices: int | None
) -> Ranked:
    """Return the device events with their ranks, after merging the two cores of each megacore."""
    device = collected.device
    ordinals = np.array([_ordinal(line.plane) for line in collected.lines], np.int64)
    on_cpu = np.array([line.plane == CPU_PLANE for line in collected.lines], np.bool_)
    if not len(device):
        return Ranked(device, np.empty(0, np.int64))
    cpu_rank = np.clip(device.stats["device_ordinal"], 0, np.iinfo(np.int32).max)
    rank = np.where(on_cpu[device.line], cpu_rank, ordinals[device.line])
    cores = {_ordinal(line.plane) for line in collected.lines if line.plane.startswith(TPU_PREFIX)}
    by_ordinal = _by_ordinal(planes)
    requested = num_devices is not None and 2 * num_devices == len(cores)
    uses = device.stats["uses_megacore"]
    rows_by_plane = collected.rows_by_plane()
    paired: list[int] = []  # the ordinals of all cores of megacores
    for first in sorted(cores) if requested or not bool((uses == 0).any()) else ():
        if first % 2 or first + 1 not in cores:
            continue
        both = (first, first + 1)
        flags = [planes.get(by_ordinal.get(core, ""), {}).get("has_megacore", "0") for core in both]
        is_megacore = all(flag not in ("", "0", "False") for flag in flags)
        if not any("has_megacore" in facts for facts in planes.values()):
            no_rows = np.empty(0, np.int64)
            rows = (rows_by_plane.get(by_ordinal.get(core, ""), no_rows) for core in both)
            is_megacore = all(bool((uses[of_core] > 0).any()) for of_core in rows)
        if requested or (is_megacore and _same_programs(collected, *(by_ordinal[core] for core in both))):
            paired.extend(both)
    if paired:
        return _merged(collected, rank, paired)
    return Ranked(device, rank, undecided=_undecided(collected, planes) if num_devices is None else 0)


def _ordinal(plane: str) -> int:
    match = _ORDINAL.match(plane)
    return int(match[1]) if match else 0


def _by_ordinal(planes: Iterable[str]) -> dict[int, str]:
    return {_ordinal(plane): plane for plane in planes if re.fullmatch(r"/device:TPU:\d{1,9}", plane)}


def _undecided(collected: CollectedTrace, planes: Mapping[str, Mapping[str, str]]) -> int:
    """Return the number of pairs of cores that may be a megacore, in a file that does not state which cores
    form one.
    """
    if any("has_megacore" in facts for facts in planes.values()):
        return 0
    if bool((collected.device.stats["uses_megacore"] == 0).any()):
        return 0
    cores = _by_ordinal(planes)
    pairs = [(plane, cores.get(core + 1, "")) for core, plane in cores.items() if core % 2 == 0]
    return sum(
        first in collected.modules and bool(second) and _same_programs(collected, first, second)
        for first, second in pairs
    )


def _same_programs(collected: CollectedTrace, first: str, second: str) -> bool:
    """Return True if two planes ran the same programs in the same order."""
    one, other = collected.modules.get(first), collected.modules.get(second)
    if one is None or other is None:
        return one is other
    return np.array_equal(one.name_id, other.name_id) and np.array_equal(one.run_id, other.run_id)


def _merged(collected: CollectedTrace, rank: IntArray, cores: list[int]) -> Ranked:
    device = collected.device
    is_tpu = np.array([line.plane.startswith(TPU_PREFIX) for line in collected.lines], np.bool_)[device.line]
    paired = is_tpu & np.isin(rank, np.array(cores, np.int64))
    second = paired & (rank % 2 == 1)
    new_rank = np.where(paired, rank // 2, rank)
    rows = np.flatnonzero(paired)
    # Give the same occurrence of an operation on both cores of a chip one key: chip, name of the line, run
    # of the program, operation, and number of earlier occurrences.
    names: dict[str, int] = {}
    line_name = np.array([names.setdefault(line.name, len(names)) for line in collected.lines], np.int64)
    run = np.full(len(device), -1, np.int64)
    rows_by_plane = collected.rows_by_plane()
    for plane, runs in collected.modules.items():
        of_plane = rows_by_plane.get(plane, np.empty(0, np.int64))
        run[of_plane] = runs.at(device.start_ps[of_plane])
    _, what = distinct_rows(new_rank[rows], line_name[device.line[rows]], run[rows], device.name_id[rows])
    order = np.lexsort((device.start_ps[rows], second[rows], what))
    group = np.stack([what[order], second[rows][order]])
    begins = np.flatnonzero(np.append(True, (group[:, 1:] != group[:, :-1]).any(axis=0)))
    nth = np.empty(len(rows), np.int64)
    nth[order] = np.arange(len(rows)) - np.repeat(begins, np.diff(np.append(begins, len(rows))))
    key = distinct_rows(what, nth)[1]
    order = np.lexsort((second[rows], key))
    same = np.flatnonzero(
        (key[order][1:] == key[order][:-1]) & ~second[rows][order][:-1] & second[rows][order][1:]
    )
    target, gone = rows[order[same]], rows[order[same + 1]]
    # Add the events of second cores to the events of first cores.
    result = device.take(np.arange(len(device)))
    start_ps, duration_ps, exclusive_ps = result.start_ps, result.duration_ps, result.exclusive_ps
    start_ps[target] = np.minimum(start_ps[target], device.start_ps[gone])
    duration_ps[target] = np.maximum(duration_ps[target], device.duration_ps[gone])
    exclusive_ps[target] = np.maximum(exclusive_ps[target], device.exclusive_ps[gone])
    for name in _ADDED:
        column, other = result.stats[name], device.stats[name][gone]
        both = (column[target] != ABSENT) & (other != ABSENT)
        column[target] = np.where(both, column[target] + np.where(both, other, 0), column[target])
    stay = np.ones(len(device), np.bool_)
    stay[gone] = False
    left = np.flatnonzero(stay)
    of_ops = np.array([line.kind is LineKind.OPS for line in collected.lines], np.bool_)[device.line]
    return Ranked(
        result.take(left),
        new_rank[left],
        merged=len(gone),
        merged_ps=int(device.exclusive_ps[gone].sum()),
        alone=int(of_ops[rows].sum()) - int(of_ops[target].sum()) - int(of_ops[gone].sum()),
    )


_INSTRUCTION = re.compile(r"%?([\w.\-]+) = ")
_SHAPE = ("grid", "block")
_BYTES = re.compile(r"\b(?:num_bytes|size|bytes):(\d{1,18})\b")
_COLLECTIVE = re.compile(
    r"%?(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)"
    r"(-start|-done)?(\.\d+|\.clone)*"
)


@dataclass(frozen=True, slots=True, eq=False)
class EventLabels:
    """Labels of device events as columns of string rows, in the form of a profile."""

    op_id: IntArray
    kernel_id: IntArray
    category_id: IntArray
    bytes_moved: FloatArray
    grid_id: IntArray


def labels_of(device: DeviceTable, lines: tuple[TraceLine, ...], strings: StringTableBuilder) -> EventLabels:
    """Return the operation and the category of every device event.

    The operation is the stat ``hlo_op``. Without it, on a line of operations or transfers, it is the name of
    the event or of the instruction whose text is the name. The category is the name of such a line,
    ``kernel``, ``memcpy`` or ``memset`` on streams, ``thunk`` on a host thread, and ``wrapper`` for events
    that enclose others.
    """
    stats = device.stats
    of_op_line = np.array([line.kind is LineKind.OPS for line in lines], np.bool_)[device.line]
    short = mapped(device.name_id, lambda row: strings.add(_instruction(strings[row])), np.int64)
    named = np.where(of_op_line, short, 0)
    hlo_op = mapped(stats["hlo_op"], lambda row: strings.add(strings[row].lstrip("%")), np.int64)
    op_id = np.where(stats["hlo_op"] > 0, hlo_op, named)
    kernel_id = np.where(of_op_line, short, device.name_id)
    details = np.where(stats["memcpy_details"] > 0, stats["memcpy_details"], stats["memset_details"])
    line_categories = {LineKind.HOST: "thunk", LineKind.STREAM: "kernel"}
    of_line = [strings.add(line_categories.get(line.kind, line.name)) for line in lines]
    category = np.array(of_line, np.int64)[device.line]
    on_stream = np.array([line.kind is LineKind.STREAM for line in lines], np.bool_)[device.line]
    for name, text in (("memcpy_details", "memcpy"), ("memset_details", "memset")):
        category[on_stream & (device.stats[name] > 0)] = strings.add(text)
    category[device.is_wrapper] = strings.add("wrapper")
    moved = np.full(len(details), np.nan)
    for name in ("bytes_accessed", "bytes_transferred"):
        has_bytes = (stats[name] != ABSENT) & (stats[name] >= 0)
        moved[has_bytes] = stats[name][has_bytes]
    sizes = mapped(details, lambda row: _copied(strings[row]), np.float64)
    return EventLabels(
        op_id,
        kernel_id,
        category_id=category,
        bytes_moved=np.where(np.isnan(sizes), moved, sizes),
        grid_id=mapped(
            stats["kernel_details"], lambda row: strings.add(_launch_shape(strings[row])), np.int64
        ),
    )


def _instruction(text: str) -> str:
    """Return ``fusion.1`` for ``%fusion.1 = f32[8]{0} fusion(...)``; other names stay."""
    match = _INSTRUCTION.match(text[:4096])
    return match[1] if match else text.lstrip("%")


def _copied(details: str) -> float:
    """Return the size in ``kind:Unknown size:655360 dest:2 async:1``, NaN without a size."""
    match = _BYTES.search(details[:1024])
    return float(match[1]) if match else np.nan


def _launch_shape(details: str) -> str:
    """Return the launch shape in ``regs:32 static_shared:0 grid:8,1,1 block:128,1,1``, else an empty text."""
    matches = [
        re.search(rf"\b{word}:(\d{{1,10}}),(\d{{1,10}}),(\d{{1,10}})\b", details[:1024]) for word in _SHAPE
    ]
    grid, block = ([] if match is None else [int(extent) for extent in match.groups()] for match in matches)
    return shape_text(grid, block)


def collective_kinds(op_id: IntArray, strings: StringTableBuilder) -> IntArray:
    """Return the string row of the collective that each operation's name states (``all-reduce``), 0 for
    others.
    """

    def kind(row: int) -> int:
        match = _COLLECTIVE.fullmatch(strings[row])
        return strings.add(match[1]) if match else 0

    return mapped(op_id, kind, np.int64)
