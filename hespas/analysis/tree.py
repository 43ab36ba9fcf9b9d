"""The device time of modules, functions of Python, ranges and operations, as a tree of calls from the top.

A piece of device work belongs to what was running on the thread of its launch as that was called. Calls of
one path (the same names around them) are one node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.analysis.recording import Recording
from hespas.analysis.table import Row, Table, listed, table_of
from hespas.converters.linking import EventNesting
from hespas.files.documents import Count, Figure
from hespas.graph import CAPTURED_THREAD, Profile, RaggedArray
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, at_rows, distinct_rows

__all__ = ["Callers", "TreeRow", "callers_of", "tree"]

_NO_CALLER = "(launched by nothing recorded)"


class TreeRow(Row, frozen=True, kw_only=True):
    """One path of calls on all ranks, in the order of a tree: what it calls follows it, most device time
    first. ``node`` numbers the rows, ``parent`` is that of the caller (-1: none). ``device_ns`` is the time
    of all device work inside, ``own_device_ns`` of that which nothing deeper launched; ``host_ns`` how long
    the ``calls`` took that launched something.
    """

    node: int
    parent: int
    depth: int
    name: str
    calls: Count
    events: Count
    device_ns: Figure
    own_device_ns: Figure
    share: Figure
    host_ns: Figure


@dataclass(slots=True)
class _Paths:
    """Distinct paths; those around a path stand before it. ``sums`` are figures of each path by name; paths
    that are newer than a figure have none of it.
    """

    number: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    parent: list[int] = field(default_factory=list[int])
    name: list[str] = field(default_factory=list[str])
    sums: dict[str, FloatArray] = field(default_factory=dict[str, FloatArray])

    def of(self, parent: int, name: str) -> int:
        """The number of a path, new or old."""
        found = self.number.setdefault((parent, name), len(self.name))
        if found == len(self.name):
            self.parent.append(parent)
            self.name.append(name)
        return found

    def add(self, figure: str, path: IntArray, values: FloatArray | None = None) -> None:
        """Add to a figure of some paths: 1 each where no values are given."""
        self.sums[figure] = self.sum_of(figure) + np.bincount(path, values, len(self.name))

    def sum_of(self, figure: str) -> FloatArray:
        """A figure of all paths."""
        known = self.sums.get(figure, np.empty(0))
        return np.append(known, np.zeros(len(self.name) - len(known)))


@dataclass(frozen=True, slots=True, eq=False)
class Callers:
    """Operations and ranges of the host; whole ns. ``op`` is the row of the operation (-1: a range)."""

    name_row: SmallIntArray
    thread: SmallIntArray
    start: IntArray
    end: IntArray
    op: IntArray

    def take(self, rows: IntArray | BoolArray) -> Callers:
        """Some of them."""
        return Callers(*(getattr(self, name)[rows] for name in ("name_row", "thread", "start", "end", "op")))


def callers_of(profile: Profile) -> Callers:
    """Ranges, then operations; those without times are left out."""
    host, ranges = profile.host, profile.ranges
    start = np.concatenate((ranges.start_ns, host.start_ns))
    length = np.concatenate((ranges.duration_ns, host.duration_ns))
    known = np.flatnonzero(~np.isnan(start + length))
    begin = start[known].astype(np.int64)
    return Callers(
        np.concatenate((ranges.name_row, host.name_row))[known],
        np.concatenate((ranges.thread_row, host.thread_row))[known],
        begin,
        begin + np.maximum(length[known], 0.0).astype(np.int64),
        (known - len(ranges)).clip(-1),
    )


def _that_launch(callers: Callers, thread: SmallIntArray, at: IntArray) -> BoolArray:
    """Which callers have a launch inside: the others need not be looked at."""
    threads = np.unique(np.concatenate((callers.thread, thread)))
    order = np.lexsort((at, thread))
    times, found = at[order], np.zeros(len(callers.start), np.bool_)
    ordered = thread[order]
    for number in threads.tolist():
        mine = np.flatnonzero(callers.thread == number)
        first, last = np.searchsorted(ordered, [number, number + 1])
        of_thread = times[first:last]
        before = np.searchsorted(of_thread, callers.start[mine], side="left")
        found[mine] = np.searchsorted(of_thread, callers.end[mine], side="right") > before
    return found


def tree(recordings: Sequence[Recording]) -> Table[TreeRow]:
    """The tree of all ranks together. O((calls + events) log)."""
    paths = _Paths()
    for recording in recordings:
        if len(recording):
            _add(paths, recording)
    return _table(paths)


def _add(paths: _Paths, recording: Recording) -> None:
    """Add the calls and the device work of one rank."""
    profile, rows = recording.profile, recording.rows
    callers = callers_of(profile)
    launch, cause = profile.launch_start_ns[rows], profile.host_event[rows].astype(np.int64)
    by_call = ~np.isnan(launch)
    caused = at_rows(profile.host.start_ns, cause, np.nan)
    by_cause = ~by_call & ~np.isnan(caused)
    thread = profile.launch_thread_row[rows].copy()
    at = np.where(by_call, launch, 0.0).astype(np.int64)
    if by_cause.any():
        thread[by_cause] = profile.host.thread_row[cause[by_cause]]
        at[by_cause] = caused[by_cause].astype(np.int64)
    known = by_call | by_cause
    callers = callers.take(_that_launch(callers, thread[known], at[known]))
    nesting = EventNesting.of(callers.thread.astype(np.int64), callers.start, callers.end)
    inner = np.full(len(rows), -1, np.int64)
    inner[known] = nesting.innermost(thread[known].astype(np.int64), at[known])
    if by_cause.any():
        place_of_op = np.full(len(profile.host) + 1, -1, np.int64)
        place_of_op[callers.op] = np.arange(len(callers.op))
        place_of_op[-1] = -1
        inner[by_cause] = place_of_op[cause[by_cause]]
    path_of = _paths_of(paths, profile, callers, nesting)
    nobody = paths.of(-1, _NO_CALLER) if bool((inner < 0).any()) else -1
    path = np.where(inner >= 0, path_of[inner], nobody) if len(path_of) else np.full(len(rows), nobody)
    path = _in_capture(paths, profile, path, cause)
    paths.add("events", path)
    paths.add("own_ns", path, recording.duration_ns)


def _in_capture(paths: _Paths, profile: Profile, path: IntArray, cause: IntArray) -> IntArray:
    """The paths of replayed work with the operations it was captured in behind the launch of its graph."""
    host = profile.host
    threads = np.unique(host.thread_row).tolist()
    captured = [row for row in threads if profile.strings[row] == CAPTURED_THREAD]
    replayed = np.flatnonzero(at_rows(np.isin(host.thread_row, captured), cause, False))
    if not len(replayed):
        return path
    found, known, called = path.copy(), dict[tuple[int, int], int](), list[int]()
    names, parents = listed(host.name_row), listed(host.parent)
    for place in replayed.tolist():
        around: list[int] = []
        op, inside = int(cause[place]), int(path[place])
        while op >= 0 and (inside, op) not in known:
            around.append(op)
            op = parents[op]
        at = known[inside, op] if op >= 0 else inside
        for each in reversed(around):
            at = known[inside, each] = paths.of(at, profile.strings[names[each]])
            called.append(at)
        found[place] = at
    paths.add("calls", np.array(called, np.int64))
    return found


_STEP = re.compile(r"(ProfilerStep)#\d+")


def _paths_of(paths: _Paths, profile: Profile, callers: Callers, nesting: EventNesting) -> IntArray:
    """The path of each caller, level by level from the outermost."""
    names = {row: _STEP.sub(r"\1", profile.strings[row]) for row in listed(np.unique(callers.name_row))}
    found = np.full(len(callers.start), -1, np.int64)
    called = np.flatnonzero(nesting.parent >= 0)
    inside = RaggedArray.from_pairs(nesting.parent[called], called, len(found))
    level = np.flatnonzero(nesting.parent < 0)
    while len(level):
        around, name = at_rows(found, nesting.parent[level], -1), callers.name_row[level]
        distinct, place = distinct_rows(around, name)
        found[level] = np.array([paths.of(path, names[row]) for path, row in distinct], np.int64)[place]
        level = inside.take(level).values.astype(np.int64)
    paths.add("calls", found)
    paths.add("host_ns", found, (callers.end - callers.start).astype(np.float64))
    return found


def _table(paths: _Paths) -> Table[TreeRow]:
    """The rows in the order of the tree."""
    count = len(paths.name)
    own_ns = paths.sum_of("own_ns")
    events, device = paths.sum_of("events").tolist(), own_ns.tolist()
    for path in reversed(range(count)):
        parent = paths.parent[path]
        if parent >= 0:
            device[parent] += device[path]
            events[parent] += events[path]
    order, depth = _in_order(paths.parent, device)
    number = {path: node for node, path in enumerate(order)} | {-1: -1}
    total: FloatArray = np.array([device[path] for path in order], np.float64)
    return table_of(
        TreeRow,
        node=list(range(count)),
        parent=[number[paths.parent[path]] for path in order],
        depth=[depth[path] for path in order],
        name=[paths.name[path] for path in order],
        calls=paths.sum_of("calls")[order],
        events=[events[path] for path in order],
        device_ns=total,
        own_device_ns=own_ns[order],
        share=total / (float(own_ns.sum()) or np.nan),
        host_ns=paths.sum_of("host_ns")[order],
    )


def _in_order(parents: list[int], device: list[float]) -> tuple[list[int], list[int]]:
    """Paths, each followed by what it calls, and how deep each stands."""
    inside: dict[int, list[int]] = {}
    for path, parent in enumerate(parents):
        inside.setdefault(parent, []).append(path)
    depth = [0] * len(parents)
    order: list[int] = []
    waiting = sorted(inside.get(-1, []), key=lambda path: device[path])
    while waiting:
        path = waiting.pop()
        order.append(path)
        calls = sorted(inside.get(path, []), key=lambda each: device[each])
        for each in calls:
            depth[each] = depth[path] + 1
        waiting.extend(calls)
    return order, depth
