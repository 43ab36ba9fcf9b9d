"""Time in which a device waited, as nodes: with them a graph of measured work takes the time it took.

A node of device work starts when all it depends on has ended: what is ahead of it on its stream, and the
call of the host that launched it, which is a node of its own. What is missing then to its measured start was
spent waiting: for a launch to arrive, for something that was not recorded. A *delay* of that time is put
behind what ended last, so a forward pass over the dependencies gives back every measured start, and nothing
waits for what only came later.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Findings, NodeKind, OpClass, OpGraph, RaggedArray, Resource, StringTableBuilder
from hespas.graph.columns import FloatArray, IntArray, at_rows
from hespas.graph.intervals import layers_of
from hespas.graph.passes import all_deps, is_delay, is_recorded_wait, without_waits

__all__ = [
    "HOST",
    "IDLE",
    "Launches",
    "clock_ns",
    "lanes_of",
    "serial_excess",
    "tell_waits",
    "with_delays_alone",
    "with_waits",
]

HOST, IDLE = "host", "idle"
"""The operations of nodes of the host and of delays."""
_LEAST_NS = 0.5
"""Shorter waits are rounding; the next wait makes up for those left out."""
_COARSE_NS = 1000.0


def clock_ns(start_ns: FloatArray, end_ns: FloatArray) -> float:
    """By how much times that belong together may differ: the step of a clock of whole microseconds, else what
    rounding of floats makes of nanoseconds.
    """
    times = np.concatenate([start_ns, end_ns])
    return _COARSE_NS if not (times % _COARSE_NS).any() else _LEAST_NS


def lanes_of(queue: IntArray, start_ns: FloatArray, end_ns: FloatArray, tolerance_ns: float) -> IntArray:
    """Queues in which no event begins before the one ahead has ended, but for ``tolerance_ns``.

    Events stand in order of start, ``queue`` -1 is none. An event that overlaps the one ahead goes into a
    queue of its own, numbered behind all others. O(events log events); a loop over overlapping queues only.
    """
    lanes = queue.astype(np.int64)
    rows = np.flatnonzero(queue >= 0)
    rows = rows[np.argsort(queue[rows], kind="stable")]
    ordered = queue[rows]
    same = ordered[1:] == ordered[:-1]
    early = same & (start_ns[rows[1:]] + tolerance_ns < end_ns[rows[:-1]])
    following = int(queue.max(initial=-1)) + 1
    for crowded in np.unique(ordered[1:][early]).tolist():
        first, last = np.searchsorted(ordered, [crowded, crowded + 1]).tolist()
        members = rows[first:last]
        layer = layers_of(start_ns[members] + tolerance_ns, end_ns[members])
        lanes[members[layer > 0]] = following + layer[layer > 0] - 1
        following += int(layer.max(initial=0))
    return lanes


@dataclass(frozen=True, slots=True, eq=False)
class Launches:
    """Calls of the host that enqueued device work, of shape ``(launches,)``.

    ``at_ns`` is when each began, on the clock of the work; ``thread`` counts threads. ``of`` is the launch of
    each node of device work (-1: not recorded). ``let_go`` has the nodes for whose end the thread was blocked
    since its launch before: rows of launches and nodes.
    """

    at_ns: FloatArray
    thread: IntArray
    of: IntArray
    let_go: tuple[IntArray, IntArray]

    @classmethod
    def none(cls, nodes: int) -> Self:
        """Nothing recorded."""
        nowhere, empty = np.full(nodes, -1, np.int64), np.empty(0, np.int64)
        return cls(np.empty(0, np.float64), empty, nowhere, (empty, empty))

    @classmethod
    def recorded(cls, at_ns: FloatArray, thread: IntArray, start_ns: FloatArray) -> Self:
        """Those of nodes launched ``at_ns`` (NaN: not recorded) on ``thread``; calls of a thread that began
        at one time are one. A launch after the start of its work is none: clocks differ there.
        """
        known = np.flatnonzero(at_ns <= start_ns)
        keys, place = np.unique(np.stack((thread[known], at_ns[known])), axis=1, return_inverse=True)
        of = np.full(len(at_ns), -1, np.int64)
        of[known] = place.reshape(-1)
        empty = np.empty(0, np.int64)
        return cls(keys[1], keys[0].astype(np.int64), of, (empty, empty))


def with_waits(
    graph: OpGraph,
    start_ns: FloatArray,
    launches: Launches | None = None,
    near: IntArray | None = None,
) -> OpGraph:
    """The graph with the time of the host and of delays, so that all device work starts when it did.

    ``start_ns`` is since the recording's first event, NaN for what was not measured. Each thread of the host
    is a chain of nodes, one per launch, which last from the launch before, or from when the thread was let
    go, to this one; what precedes the first event is left out. A node of device work waits for its launch,
    and for a delay where that and its dependencies do not explain its start: behind the one of them that
    ended last, or behind the node that is ``near`` (-1: none) or the last delay where that ends later: a wait
    of several nodes is one delay. Nodes stand behind what they depend on; node ids are numbered anew.
    O(n log n), n being nodes, launches and edges.
    """
    known = launches or Launches.none(len(graph))
    walk = _Walk(all_deps(graph), graph.duration_ns, known, [] if near is None else near.tolist())
    for item in _in_time(start_ns, known).tolist():
        if item < len(graph):
            walk.work(item, float(start_ns[item]))
        else:
            walk.launch(item - len(graph))
    return _grown(graph, walk) if walk.edges[0] or walk.added_ns else graph


def _in_time(start_ns: FloatArray, launches: Launches) -> IntArray:
    """Nodes, then launches numbered behind them, in order of time; nodes stay in their order."""
    start = np.maximum.accumulate(np.nan_to_num(start_ns, nan=-np.inf))
    time = np.concatenate([start, launches.at_ns])
    is_work = np.append(np.ones(len(start), np.bool_), np.zeros(len(launches.at_ns), np.bool_))
    return np.lexsort((np.arange(len(time)), is_work, time))


@dataclass(slots=True)
class _Thread:
    """A thread of the host: its last node (-1: none), when that ended, and what let it go since."""

    node: int = -1
    end_ns: float = 0.0
    let_go: list[int] = field(default_factory=list[int])


class _Walk:
    """Work and launches in order of time. Added nodes are numbered behind all work: the thread of each (-1: a
    delay) and its time.
    """

    def __init__(
        self, deps: RaggedArray, duration_ns: FloatArray, launches: Launches, near: list[int]
    ) -> None:
        self.work_count = len(deps)
        self.near = near or [-1] * len(deps)
        self.shares_delays = bool(near)
        self.last_delay = (-1, 0.0)
        self.bounds: list[int] = deps.offsets.tolist()
        self.producers: list[int] = deps.values.tolist()
        self.times: list[float] = np.nan_to_num(duration_ns).tolist()
        self.launch_of: list[int] = launches.of.tolist()
        self.at_ns: list[float] = launches.at_ns.tolist()
        self.thread: list[int] = launches.thread.tolist()
        self.let_go: dict[int, list[int]] = {}
        for launch, node in zip(*(rows.tolist() for rows in launches.let_go), strict=True):
            self.let_go.setdefault(launch, []).append(node)
        self.threads: dict[int, _Thread] = {}
        self.launched: dict[int, tuple[list[int], float]] = {}
        self.ends: list[float | None] = [None] * self.work_count
        self.added_thread, self.added_ns = array("q"), array("d")
        self.edges = array("q"), array("q")
        self.order = array("q")

    def _add(self, thread: int, duration_ns: float, behind: list[int]) -> int:
        node = self.work_count + len(self.added_ns)
        self.added_thread.append(thread)
        self.added_ns.append(duration_ns)
        self._wait(node, behind)
        self.order.append(node)
        return node

    def _wait(self, consumer: int, producers: list[int]) -> None:
        self.edges[0].extend([consumer] * len(producers))
        self.edges[1].extend(producers)

    def launch(self, launch: int) -> None:
        """The thread reaches a launch."""
        number = self.thread[launch]
        thread = self.threads.setdefault(number, _Thread())
        for node in self.let_go.get(launch, ()):
            end_ns = self.ends[node]
            if end_ns is not None and end_ns <= self.at_ns[launch] + _COARSE_NS:
                thread.let_go.append(node)
                thread.end_ns = max(thread.end_ns, end_ns)
        behind = ([thread.node] if thread.node >= 0 else []) + thread.let_go
        wait_ns = self.at_ns[launch] - thread.end_ns
        if wait_ns >= _LEAST_NS:
            thread.node = self._add(number, wait_ns, behind)
            thread.end_ns += wait_ns
            thread.let_go = []
            behind = [thread.node]
        self.launched[launch] = (behind, thread.end_ns)

    def work(self, node: int, start_ns: float) -> None:
        """Device work starts ``start_ns`` (NaN: as early as it can)."""
        ready, last = 0.0, -1
        for producer in self.producers[self.bounds[node] : self.bounds[node + 1]]:
            end_ns = self.ends[producer]
            if end_ns is not None and end_ns > ready:
                ready, last = end_ns, producer
        launch = self.launched.get(self.launch_of[node])
        if launch is not None:
            behind, end_ns = launch
            self._wait(node, behind)
            if behind and end_ns > ready:
                ready, last = end_ns, behind[-1]
        near = self.near[node]
        near_ns = self.ends[near] if near >= 0 else None
        if near_ns is not None and near_ns > ready:
            ready, last = near_ns, near
            self._wait(node, [near])
        delay, delay_ns = self.last_delay
        if self.shares_delays and ready < delay_ns <= start_ns + _LEAST_NS:
            ready, last = delay_ns, delay
            self._wait(node, [delay])
        wait_ns = start_ns - ready
        if wait_ns >= _LEAST_NS:
            delay = self._add(-1, wait_ns, [last] if last >= 0 else [])
            self._wait(node, [delay])
            ready += wait_ns
            self.last_delay = delay, ready
        self.ends[node] = ready + self.times[node]
        self.order.append(node)


def tell_waits(graph: OpGraph, findings: Findings) -> None:
    """Say how long the host takes and device work waits, and that ranks wait for each other."""
    waits, delays = is_recorded_wait(graph), is_delay(graph)
    talks = (graph.kind == int(NodeKind.COLLECTIVE)) & (graph.duration_ns > 0)
    for code, mask, message in (
        ("measured-collectives", talks, "collectives have their measured time, waiting for others included"),
        ("host-time", waits & ~delays, "time of the host between launches is kept as nodes of its threads"),
        ("delays", delays, "waits before device work are kept as delays, stream by stream"),
    ):
        time_ns = float(graph.duration_ns[mask].sum())
        findings.info(code, f"{message}: {time_ns / 1e6:,.3f} ms", int(mask.sum()))


def _grown(graph: OpGraph, walk: _Walk) -> OpGraph:
    """The graph with what a walk added, in its order."""
    count = len(walk.order)
    rows = np.array(walk.order, np.int64)
    place = np.empty(count, np.int64)
    place[rows] = np.arange(count)
    old = rows < len(graph)
    first = place[: len(graph)]
    added = rows[~old] - len(graph)
    thread = np.array(walk.added_thread, np.int64)[added]
    duration_ns = np.array(walk.added_ns, np.float64)[added]
    texts = StringTableBuilder(graph.strings)
    named = np.where(thread < 0, texts.add(IDLE), texts.add(HOST))
    states: dict[str, float | IntArray | FloatArray] = {
        **dict.fromkeys(("name_row", "op_row"), named),
        **dict.fromkeys(("source_row", "framework_row"), 0),
        **dict.fromkeys(("region", "rate_dtype"), -1),
        **dict.fromkeys(("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written"), 0.0),
        "stream": thread,
        "kind": int(NodeKind.COMPUTE),
        "op_class": int(OpClass.FREE),
        "resource": np.where(thread < 0, int(Resource.DEVICE), int(Resource.HOST)),
        "multiplicity": 1.0,
        "duration_ns": duration_ns,
    }
    columns: dict[str, Any] = {}
    for name, value in states.items():
        column: NDArray[Any] = getattr(graph, name)
        columns[name] = np.empty(count, column.dtype)
        columns[name][first], columns[name][~old] = column, value
    tables: dict[str, Any] = {}
    for name in ("collectives", "p2p", "contractions"):
        table = getattr(graph, name)
        tables[name] = replace(table, node=first[table.node].astype(np.int32))
    control, data = graph.control_deps, graph.data_deps
    consumer, producer = (np.array(side, np.int64) for side in walk.edges)
    return replace(
        graph,
        **columns,
        **tables,
        strings=texts.build(),
        id=np.arange(count, dtype=np.uint64),
        control_deps=_others(
            (
                place[np.concatenate([control.row_ids, consumer])],
                place[np.concatenate([control.values, producer])],
            ),
            (first[data.row_ids], first[data.values]),
            count,
        ),
        data_deps=RaggedArray.from_pairs(first[data.row_ids], first[data.values], count),
        operands=graph.operands.moved(first, count),
        results=graph.results.moved(first, count),
    )


def _others(edges: tuple[IntArray, IntArray], stated: tuple[IntArray, IntArray], count: int) -> RaggedArray:
    """Dependencies, each once, without those that are ``stated`` elsewhere."""
    keys = np.setdiff1d(edges[0] * count + edges[1], stated[0] * count + stated[1])
    return RaggedArray.from_pairs(keys // count, keys % count, count)


def with_delays_alone(graph: OpGraph) -> OpGraph:
    """The same work at the same times for readers that know no host and no delay beside computation.

    All waiting is in delays, each behind the work that ended last, collectives aside: so they are short and
    a device that does one thing at a time is idle meanwhile. Starts are those of the graph's own times,
    without limits of streams. O(n log n), n being nodes and edges.
    """
    waits = is_recorded_wait(graph)
    if not waits.any():
        return graph
    starts = _earliest(all_deps(graph), graph.duration_ns)[~waits]
    work = without_waits(graph)
    return with_waits(work, starts, near=_last_ended(work, starts))


def serial_excess(graph: OpGraph) -> float:
    """Share by which all computation and delays of a rank, one after the other, take longer than its graph;
    0 where they do not.
    """
    computes = (graph.kind == int(NodeKind.COMPUTE)) & (graph.resource == int(Resource.DEVICE))
    one_by_one = float(np.nansum(graph.duration_ns[computes]))
    ends = _earliest(all_deps(graph), graph.duration_ns) + np.nan_to_num(graph.duration_ns)
    finish = float(ends.max(initial=0.0))
    return max(one_by_one / finish - 1.0, 0.0) if finish > 0 else 0.0


def _last_ended(graph: OpGraph, start_ns: FloatArray) -> IntArray:
    """For each node the one that ended last when it started, collectives and messages aside; -1 for none."""
    talks = np.isin(graph.op_class, (int(OpClass.COLLECTIVE), int(OpClass.P2P)))
    work = np.flatnonzero((graph.kind == int(NodeKind.COMPUTE)) & ~talks & (graph.duration_ns > 0))
    ends = (start_ns + graph.duration_ns)[work]
    order = np.argsort(ends, kind="stable")
    place = np.searchsorted(ends[order], start_ns, side="right") - 1
    found = at_rows(work[order], place, -1)
    return np.where(found < np.arange(len(graph)), found, -1)


def _earliest(deps: RaggedArray, duration_ns: FloatArray) -> FloatArray:
    """When each node can start; nodes stand behind what they depend on."""
    bounds: list[int] = deps.offsets.tolist()
    producers: list[int] = deps.values.tolist()
    starts: list[float] = []
    ends: list[float] = []
    for node, time in enumerate(np.nan_to_num(duration_ns).tolist()):
        start = max((ends[each] for each in producers[bounds[node] : bounds[node + 1]]), default=0.0)
        starts.append(start)
        ends.append(start + time)
    return np.array(starts, np.float64)
