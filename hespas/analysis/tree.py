"""Call tree: the device time of modules, Python functions, ranges and operations.

A device event belongs to the calls that were running on the thread of its launch. Calls with the same path
(the same names around them) are one node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.analysis.recording import Recording
from hespas.analysis.table import AnalysisRow, RowTable, listed, table_of
from hespas.converters.linking import EventNesting
from hespas.files.documents import Count, Figure
from hespas.graph import CAPTURED_THREAD, Profile, RaggedArray
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, at_rows, distinct_rows

__all__ = ["Callers", "TreeRow", "callers_of", "tree"]

_NO_CALLER = "(launched by nothing recorded)"
_STEP = re.compile(r"(ProfilerStep)#\d+")


class TreeRow(AnalysisRow, frozen=True, kw_only=True):
    """Call path with its figures over all ranks. Rows are in tree order: callees follow their caller, most
    device time first.

    ``node`` is the number of the row, ``parent`` the row of the caller (-1: none). ``device_ns`` is the time
    of all device events launched inside, ``own_device_ns`` the time without callees. ``host_ns`` is the host
    time of the ``calls`` that launched something.
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
class _CallPaths:
    """Distinct call paths, as a tree: ``parent`` and ``name`` have one entry per path. A caller has a smaller
    number than its callees.

    ``sums`` maps the name of a figure to one sum per path.
    """

    number: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    parent: list[int] = field(default_factory=list[int])
    name: list[str] = field(default_factory=list[str])
    sums: dict[str, FloatArray] = field(default_factory=dict[str, FloatArray])

    def of(self, parent: int, name: str) -> int:
        """Return the number of the path that extends ``parent`` by ``name``. A new path is added."""
        number = self.number.setdefault((parent, name), len(self.name))
        if number == len(self.name):
            self.parent.append(parent)
            self.name.append(name)
        return number

    def add(self, figure: str, path: IntArray, values: FloatArray | None = None) -> None:
        """Add ``values`` to the sums of a figure for the given paths; without ``values``, add 1 each."""
        self.sums[figure] = self.sum_of(figure) + np.bincount(path, values, len(self.name))

    def sum_of(self, figure: str) -> FloatArray:
        """Return the sums of a figure for all paths; 0 for paths without a value."""
        sums = self.sums.get(figure, np.empty(0))
        return np.append(sums, np.zeros(len(self.name) - len(sums)))


@dataclass(frozen=True, slots=True, eq=False)
class Callers:
    """Host operations and ranges that may be callers of kernel launches, as columns with times in whole ns.
    ``op`` is the row in the profile's host operations (-1: a range).
    """

    name_id: SmallIntArray
    thread: SmallIntArray
    start: IntArray
    end: IntArray
    op: IntArray

    def take(self, rows: IntArray | BoolArray) -> Callers:
        """Return the selected host operations and ranges."""
        return Callers(*(getattr(self, name)[rows] for name in ("name_id", "thread", "start", "end", "op")))


def callers_of(profile: Profile) -> Callers:
    """Return the ranges of a profile, followed by its host operations. Those without times are left out."""
    host, ranges = profile.host, profile.ranges
    start = np.concatenate((ranges.start_ns, host.start_ns))
    length = np.concatenate((ranges.duration_ns, host.duration_ns))
    timed = np.flatnonzero(~np.isnan(start + length))
    begin = start[timed].astype(np.int64)
    return Callers(
        np.concatenate((ranges.name_id, host.name_id))[timed],
        np.concatenate((ranges.thread_id, host.thread_id))[timed],
        begin,
        begin + np.maximum(length[timed], 0.0).astype(np.int64),
        (timed - len(ranges)).clip(-1),
    )


def tree(recordings: Sequence[Recording]) -> RowTable[TreeRow]:
    """Return the call tree, summed over all ranks. O((calls + events) log)."""
    paths = _CallPaths()
    for recording in recordings:
        if len(recording):
            _add_recording(paths, recording)
    count = len(paths.name)
    own_ns = paths.sum_of("own_ns")
    events, device = paths.sum_of("events").tolist(), own_ns.tolist()
    for path in reversed(range(count)):
        parent = paths.parent[path]
        if parent >= 0:
            device[parent] += device[path]
            events[parent] += events[path]
    callees: dict[int, list[int]] = {}
    for path, parent in enumerate(paths.parent):
        callees.setdefault(parent, []).append(path)
    depth, order = [0] * count, list[int]()
    waiting = sorted(callees.get(-1, []), key=device.__getitem__)
    while waiting:
        path = waiting.pop()
        order.append(path)
        inside = sorted(callees.get(path, []), key=device.__getitem__)
        for callee in inside:
            depth[callee] = depth[path] + 1
        waiting.extend(inside)
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


def _add_recording(paths: _CallPaths, recording: Recording) -> None:
    """Add the host calls and the device events of one rank to ``paths``."""
    profile, rows = recording.profile, recording.rows
    callers = callers_of(profile)
    launch, cause = profile.launch_start_ns[rows], profile.host_event[rows].astype(np.int64)
    by_call = ~np.isnan(launch)
    caused = at_rows(profile.host.start_ns, cause, np.nan)
    by_cause = ~by_call & ~np.isnan(caused)
    thread = profile.launch_thread_id[rows].copy()
    at = np.where(by_call, launch, 0.0).astype(np.int64)
    if by_cause.any():
        thread[by_cause] = profile.host.thread_id[cause[by_cause]]
        at[by_cause] = caused[by_cause].astype(np.int64)
    launched = by_call | by_cause
    # callers without a launch inside are not part of the tree
    order = np.lexsort((at[launched], thread[launched]))
    times, threads = at[launched][order], thread[launched][order]
    launches = np.zeros(len(callers.start), np.bool_)
    for number in np.unique(callers.thread).tolist():
        of_thread = times[slice(*np.searchsorted(threads, [number, number + 1]).tolist())]
        own = np.flatnonzero(callers.thread == number)
        before = np.searchsorted(of_thread, callers.start[own], side="left")
        launches[own] = np.searchsorted(of_thread, callers.end[own], side="right") > before
    callers = callers.take(launches)
    nesting = EventNesting.of(callers.thread.astype(np.int64), callers.start, callers.end)
    inner = np.full(len(rows), -1, np.int64)
    inner[launched] = nesting.innermost(thread[launched].astype(np.int64), at[launched])
    if by_cause.any():
        caller_of_op = np.full(len(profile.host) + 1, -1, np.int64)
        caller_of_op[callers.op] = np.arange(len(callers.op))
        caller_of_op[-1] = -1
        inner[by_cause] = caller_of_op[cause[by_cause]]
    # the path of each caller, level by level from the outermost
    names = {row: _STEP.sub(r"\1", profile.strings[row]) for row in listed(np.unique(callers.name_id))}
    path_of = np.full(len(callers.start), -1, np.int64)
    called = np.flatnonzero(nesting.parent >= 0)
    inside = RaggedArray.from_pairs(nesting.parent[called], called, len(path_of))
    level = np.flatnonzero(nesting.parent < 0)
    while len(level):
        around, name = at_rows(path_of, nesting.parent[level], -1), callers.name_id[level]
        distinct, group = distinct_rows(around, name)
        path_of[level] = np.array([paths.of(path, names[row]) for path, row in distinct], np.int64)[group]
        level = inside.take(level).values.astype(np.int64)
    paths.add("calls", path_of)
    paths.add("host_ns", path_of, (callers.end - callers.start).astype(np.float64))
    no_caller = paths.of(-1, _NO_CALLER) if bool((inner < 0).any()) else -1
    path = np.full(len(rows), no_caller)
    if len(path_of):
        path = np.where(inner >= 0, path_of[inner], no_caller)
    path = _with_captured_operations(paths, profile, path, cause)
    paths.add("events", path)
    paths.add("own_ns", path, recording.duration_ns)


def _with_captured_operations(
    paths: _CallPaths, profile: Profile, path: IntArray, cause: IntArray
) -> IntArray:
    """Return the call path of each event. Kernels of a replayed CUDA graph get the path of the captured
    operation that they run. The captured operations become callees of the graph launch.

    ``cause`` is the host operation that caused each event.
    """
    host = profile.host
    threads = np.unique(host.thread_id).tolist()
    captured = [row for row in threads if profile.strings[row] == CAPTURED_THREAD]
    replayed = np.flatnonzero(at_rows(np.isin(host.thread_id, captured), cause, False))
    if not len(replayed):
        return path
    extended, path_of_op, called = path.copy(), dict[tuple[int, int], int](), list[int]()
    names, parents = listed(host.name_id), listed(host.parent)
    for event in replayed.tolist():
        around: list[int] = []
        op, inside = int(cause[event]), int(path[event])
        while op >= 0 and (inside, op) not in path_of_op:
            around.append(op)
            op = parents[op]
        at = path_of_op[inside, op] if op >= 0 else inside
        for caller in reversed(around):
            at = path_of_op[inside, caller] = paths.of(at, profile.strings[names[caller]])
            called.append(at)
        extended[event] = at
    paths.add("calls", np.array(called, np.int64))
    return extended
