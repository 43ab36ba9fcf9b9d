"""Nodes for the time in which a device waited, so that a graph of measured work takes its recorded time.

A node of device work starts when all its dependencies have ended: the node before it on its stream, and the
host call that launched it, which is a node of its own. The time that remains until the measured start was
spent waiting, for example for a launch to arrive or for work that was not recorded. A *delay* node of that
time is added after the dependency that ended last. So a forward pass over the dependencies reproduces every
measured start, and no node waits for a later one.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Findings, NodeKind, OpClass, OpGraph, RaggedArray, Resource, StringTableBuilder
from hespas.graph.columns import FloatArray, IntArray, at_rows
from hespas.graph.passes import all_deps, is_delay, is_recorded_wait, without_waits
from hespas.graph.timeline import layers_of

__all__ = [
    "HOST",
    "IDLE",
    "LaunchTimes",
    "clock_ns",
    "lanes_of",
    "report_waits",
    "serial_excess",
    "with_delays_alone",
    "with_waits",
]

HOST, IDLE = "host", "idle"
"""Operation names of host nodes and of delays."""
_MIN_WAIT_NS = 0.5
"""Minimum length of a delay. Shorter waits are rounding, and are added to the next one."""
_COARSE_CLOCK_NS = 1000.0


def clock_ns(start_ns: FloatArray, end_ns: FloatArray) -> float:
    """Return the largest difference between two recorded times that may be equal [ns].

    It is one step of the clock if all times are whole microseconds, else the rounding error of float
    nanoseconds.
    """
    times = np.concatenate([start_ns, end_ns])
    return _COARSE_CLOCK_NS if not (times % _COARSE_CLOCK_NS).any() else _MIN_WAIT_NS


def lanes_of(queue: IntArray, start_ns: FloatArray, end_ns: FloatArray, tolerance_ns: float) -> IntArray:
    """Return a queue for each event so that no event starts before the previous one on its queue has ended.

    Events are in order of start. An event that overlaps the previous one by more than ``tolerance_ns`` gets a
    queue of its own, numbered after all other queues. ``queue`` is the recorded queue of each event (-1:
    none). O(events log events), with a loop over overlapping queues only.
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
class LaunchTimes:
    """Host calls that enqueued device work, of shape ``(launches,)``.

    ``at_ns`` is the start of each call, on the clock of the device work; ``thread`` numbers threads. ``of``
    has one entry per node of device work: its launch (-1: not recorded). ``released`` are pairs (launch,
    node): the thread was blocked until the node ended, between its previous launch and this launch.
    """

    at_ns: FloatArray
    thread: IntArray
    of: IntArray
    released: tuple[IntArray, IntArray]

    @classmethod
    def none(cls, nodes: int) -> Self:
        """Return an empty table of launches, for a graph of ``nodes`` nodes."""
        no_launch, empty = np.full(nodes, -1, np.int64), np.empty(0, np.int64)
        return cls(np.empty(0, np.float64), empty, no_launch, (empty, empty))

    @classmethod
    def recorded(cls, at_ns: FloatArray, thread: IntArray, start_ns: FloatArray) -> Self:
        """Return the launches of nodes that were launched at ``at_ns`` (NaN: not recorded) on ``thread``.
        ``start_ns`` is the start of each node.

        Calls of a thread that start at the same time are one launch. A launch after the start of its work is
        ignored, because the clocks of host and device then differ.
        """
        recorded = np.flatnonzero(at_ns <= start_ns)
        keys, index = np.unique(np.stack((thread[recorded], at_ns[recorded])), axis=1, return_inverse=True)
        of = np.full(len(at_ns), -1, np.int64)
        of[recorded] = index.reshape(-1)
        empty = np.empty(0, np.int64)
        return cls(keys[1], keys[0].astype(np.int64), of, (empty, empty))


def with_waits(
    graph: OpGraph,
    start_ns: FloatArray,
    launches: LaunchTimes | None = None,
    near: IntArray | None = None,
) -> OpGraph:
    """Add host time and delays to a graph, so that all device work starts as measured.

    ``start_ns`` counts from the first event of the recording, NaN for unmeasured nodes. Each host thread
    becomes a chain of nodes, one per launch. Such a node lasts from the previous launch, or from the release
    of the thread, to this launch; time before the first event is dropped. A node of device work waits for its
    launch.

    If the launch and the dependencies do not explain the start of a node, the node also waits for a delay.
    The delay follows the dependency that ended last, the node in ``near`` (-1: none), or the last delay, if
    that ends later: several nodes that wait together share one delay. Nodes are ordered after their
    dependencies, and node ids are renumbered. O(n log n) for n nodes, launches and edges.
    """
    calls = launches or LaunchTimes.none(len(graph))
    builder = _WaitBuilder(all_deps(graph), graph.duration_ns, calls, [] if near is None else near.tolist())
    # Nodes keep their order; launches are numbered after them, and precede nodes of the same time.
    node_ns = np.maximum.accumulate(np.nan_to_num(start_ns, nan=-np.inf))
    time_ns = np.concatenate([node_ns, calls.at_ns])
    is_node = np.arange(len(time_ns)) < len(node_ns)
    for item in np.lexsort((np.arange(len(time_ns)), is_node, time_ns)).tolist():
        if item < len(graph):
            builder.work(item, float(start_ns[item]))
        else:
            builder.launch(item - len(graph))
    return builder.build(graph) if builder.edges[0] or builder.added_ns else graph


@dataclass(slots=True)
class _HostThread:
    """State of a host thread while waits are derived. ``node`` is its last node (-1: none), and ``end_ns``
    the end of that node. ``released`` are the device nodes that have released the thread since.
    """

    node: int = -1
    end_ns: float = 0.0
    released: list[int] = field(default_factory=list[int])


class _WaitBuilder:
    """Builder that adds host nodes and delays while it processes device work and launches in order of time.

    Added nodes are numbered after all device work. ``added_thread`` is the thread of each added node (-1: it
    is a delay), and ``added_ns`` its duration.
    """

    def __init__(
        self, deps: RaggedArray, duration_ns: FloatArray, launches: LaunchTimes, near: list[int]
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
        self.released: dict[int, list[int]] = {}
        for launch, node in zip(*(rows.tolist() for rows in launches.released), strict=True):
            self.released.setdefault(launch, []).append(node)
        self.threads: dict[int, _HostThread] = {}
        self.launched: dict[int, tuple[list[int], float]] = {}
        self.ends: list[float | None] = [None] * self.work_count
        self.added_thread, self.added_ns = array("q"), array("d")
        self.edges = array("q"), array("q")
        self.order = array("q")

    def _add(self, thread: int, duration_ns: float, after: list[int]) -> int:
        node = self.work_count + len(self.added_ns)
        self.added_thread.append(thread)
        self.added_ns.append(duration_ns)
        self._wait(node, after)
        self.order.append(node)
        return node

    def _wait(self, consumer: int, producers: list[int]) -> None:
        self.edges[0].extend([consumer] * len(producers))
        self.edges[1].extend(producers)

    def launch(self, launch: int) -> None:
        """Add a host node for the time of a thread from its previous launch, or its release, to this
        launch.
        """
        number = self.thread[launch]
        thread = self.threads.setdefault(number, _HostThread())
        for node in self.released.get(launch, ()):
            end_ns = self.ends[node]
            if end_ns is not None and end_ns <= self.at_ns[launch] + _COARSE_CLOCK_NS:
                thread.released.append(node)
                thread.end_ns = max(thread.end_ns, end_ns)
        after = ([thread.node] if thread.node >= 0 else []) + thread.released
        wait_ns = self.at_ns[launch] - thread.end_ns
        if wait_ns >= _MIN_WAIT_NS:
            thread.node = self._add(number, wait_ns, after)
            thread.end_ns += wait_ns
            thread.released = []
            after = [thread.node]
        self.launched[launch] = (after, thread.end_ns)

    def work(self, node: int, start_ns: float) -> None:
        """Add the waits of device work that starts at ``start_ns`` (NaN: as early as possible)."""
        ready, last = 0.0, -1
        for producer in self.producers[self.bounds[node] : self.bounds[node + 1]]:
            end_ns = self.ends[producer]
            if end_ns is not None and end_ns > ready:
                ready, last = end_ns, producer
        launch = self.launched.get(self.launch_of[node])
        if launch is not None:
            after, end_ns = launch
            self._wait(node, after)
            if after and end_ns > ready:
                ready, last = end_ns, after[-1]
        near = self.near[node]
        near_ns = self.ends[near] if near >= 0 else None
        if near_ns is not None and near_ns > ready:
            ready, last = near_ns, near
            self._wait(node, [near])
        delay, delay_ns = self.last_delay
        if self.shares_delays and ready < delay_ns <= start_ns + _MIN_WAIT_NS:
            ready, last = delay_ns, delay
            self._wait(node, [delay])
        wait_ns = start_ns - ready
        if wait_ns >= _MIN_WAIT_NS:
            delay = self._add(-1, wait_ns, [last] if last >= 0 else [])
            self._wait(node, [delay])
            ready += wait_ns
            self.last_delay = delay, ready
        self.ends[node] = ready + self.times[node]
        self.order.append(node)

    def build(self, graph: OpGraph) -> OpGraph:
        """Return the graph with host nodes and delays, in the order in which nodes were processed."""
        count = len(self.order)
        rows = np.array(self.order, np.int64)
        position = np.empty(count, np.int64)
        position[rows] = np.arange(count)
        is_added = rows >= len(graph)
        new_row = position[: len(graph)]
        added = rows[is_added] - len(graph)
        thread = np.array(self.added_thread, np.int64)[added]
        texts = StringTableBuilder(graph.strings)
        name = np.where(thread < 0, texts.add(IDLE), texts.add(HOST))
        values: dict[str, float | IntArray | FloatArray] = {
            **dict.fromkeys(("name_id", "op_id"), name),
            **dict.fromkeys(("source_id", "framework_id"), 0),
            **dict.fromkeys(("region", "rate_dtype"), -1),
            **dict.fromkeys(("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written"), 0.0),
            "stream": thread,
            "kind": int(NodeKind.COMPUTE),
            "op_class": int(OpClass.FREE),
            "resource": np.where(thread < 0, int(Resource.DEVICE), int(Resource.HOST)),
            "executions": 1.0,
            "duration_ns": np.array(self.added_ns, np.float64)[added],
        }
        columns: dict[str, Any] = {}
        for column_name, value in values.items():
            column: NDArray[Any] = getattr(graph, column_name)
            columns[column_name] = np.empty(count, column.dtype)
            columns[column_name][new_row], columns[column_name][is_added] = column, value
        tables: dict[str, Any] = {}
        for table_name in ("collectives", "p2p", "contractions"):
            table = getattr(graph, table_name)
            tables[table_name] = replace(table, node=new_row[table.node].astype(np.int32))
        control, data = graph.control_deps, graph.data_deps
        consumer, producer = (np.array(side, np.int64) for side in self.edges)
        data_consumer, data_producer = new_row[data.row_ids], new_row[data.values]
        control_consumer = position[np.concatenate([control.row_ids, consumer])]
        control_producer = position[np.concatenate([control.values, producer])]
        data_keys = data_consumer * count + data_producer
        control_keys = np.setdiff1d(control_consumer * count + control_producer, data_keys)
        return replace(
            graph,
            **columns,
            **tables,
            strings=texts.build(),
            id=np.arange(count, dtype=np.uint64),
            control_deps=RaggedArray.from_pairs(control_keys // count, control_keys % count, count),
            data_deps=RaggedArray.from_pairs(data_consumer, data_producer, count),
            operands=graph.operands.moved(new_row, count),
            results=graph.results.moved(new_row, count),
        )


def report_waits(graph: OpGraph, findings: Findings) -> None:
    """Report the time of collectives with measured times, of host nodes, and of delays in a graph."""
    waits, delays = is_recorded_wait(graph), is_delay(graph)
    collectives = (graph.kind == int(NodeKind.COLLECTIVE)) & (graph.duration_ns > 0)
    measured = "collectives have their measured time, which includes waiting for other ranks"
    for code, mask, message in (
        ("measured-collectives", collectives, measured),
        ("host-time", waits & ~delays, "host time between launches is added as nodes of host threads"),
        ("delays", delays, "waits before device work are added as delays, stream by stream"),
    ):
        time_ns = float(graph.duration_ns[mask].sum())
        findings.info(code, f"{message}: {time_ns / 1e6:,.3f} ms", int(mask.sum()))


def with_delays_alone(graph: OpGraph) -> OpGraph:
    """Return a graph of the same work at the same times, without host nodes and parallel delays.

    It is for formats that support neither. All waiting becomes delays. Each delay follows the work (except
    collectives) that ended last. Delays are thus short, and a device that runs one operation at a time is
    idle during them. The times are the earliest ones in ``graph``, without limits on streams. O(n log n) for
    n nodes and edges.
    """
    waits = is_recorded_wait(graph)
    if not waits.any():
        return graph
    start_ns = _earliest(all_deps(graph), graph.duration_ns)[~waits]
    work = without_waits(graph)
    communicates = np.isin(work.op_class, (int(OpClass.COLLECTIVE), int(OpClass.P2P)))
    is_computation = (work.kind == int(NodeKind.COMPUTE)) & ~communicates & (work.duration_ns > 0)
    nodes = np.flatnonzero(is_computation)
    end_ns = (start_ns + work.duration_ns)[nodes]
    order = np.argsort(end_ns, kind="stable")
    last_ended = at_rows(nodes[order], np.searchsorted(end_ns[order], start_ns, side="right") - 1, -1)
    near = np.where(last_ended < np.arange(len(work)), last_ended, -1)
    return with_waits(work, start_ns, near=near)


def serial_excess(graph: OpGraph) -> float:
    """Return by how much the serial time of a rank exceeds the time of its graph, as a fraction of that time
    (at least 0).

    The serial time is the sum of all computation and delays on the device.
    """
    computes = (graph.kind == int(NodeKind.COMPUTE)) & (graph.resource == int(Resource.DEVICE))
    with np.errstate(over="ignore"):  # sums of finite times can be infinite
        serial_ns = float(np.nansum(graph.duration_ns[computes]))
        end_ns = _earliest(all_deps(graph), graph.duration_ns) + np.nan_to_num(graph.duration_ns)
    finish_ns = float(end_ns.max(initial=0.0))
    return max(serial_ns / finish_ns - 1.0, 0.0) if 0 < finish_ns < inf else 0.0


def _earliest(deps: RaggedArray, duration_ns: FloatArray) -> FloatArray:
    """Return the earliest start of each node, if only its dependencies delay it. Nodes are ordered after
    their dependencies.
    """
    bounds: list[int] = deps.offsets.tolist()
    producers: list[int] = deps.values.tolist()
    starts: list[float] = []
    ends: list[float] = []
    for node, time in enumerate(np.nan_to_num(duration_ns).tolist()):
        start = max((ends[producer] for producer in producers[bounds[node] : bounds[node + 1]]), default=0.0)
        starts.append(start)
        ends.append(start + time)
    return np.array(starts, np.float64)
