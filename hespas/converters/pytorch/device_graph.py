"""Graph of the device work of one rank: one node per device event, in order of start.

Nodes of a queue follow each other. Streams wait for each other where the trace shows it. Data dependencies
come from the storages of the operations that caused the nodes. An event whose cause is not in the trace
(launched before the window, or replayed from a captured graph) is a node like any other.

If the profiler recorded synchronisation (category ``cuda_sync``), waits name their streams. Otherwise only
the calls are recorded. Then a stream wait belongs to the next launch of its thread and waits for the last
launch on each other stream; a synchronisation of the host waits for all work that had ended when it returned.
Inferred waits that the measured times contradict are dropped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import nearest
from hespas.converters.measured_ops.costs import event_costs
from hespas.converters.measured_ops.waits import LaunchTimes, clock_ns, lanes_of
from hespas.converters.pytorch.communication import states_communication
from hespas.converters.pytorch.draft import GraphDraft, NodeEdges, chain, flow_of
from hespas.converters.pytorch.events import KinetoTrace
from hespas.converters.pytorch.linked import LinkedTrace
from hespas.converters.pytorch.links import owner_with_shapes, thread_key
from hespas.graph import Diagnostics, Findings, RaggedArray
from hespas.graph.columns import FloatArray, IntArray, at_rows, distinct_rows

__all__ = ["device_draft"]

_COARSE_CLOCK_NS = 1000
_MAX_HISTORY = 256


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceNodes:
    """Nodes of a device graph: device events, and communications without a device event.

    Nodes are in order of start, then of stream. ``event`` is the row of the device event (-1: none), ``host``
    the host operation that caused it. ``queue`` numbers the pairs of device and stream, as in ``queues`` (-1
    without a device event). A node that overlaps the previous node of its stream has a queue of its own,
    numbered after these.
    """

    event: IntArray
    host: IntArray
    start_ns: IntArray
    end_ns: IntArray
    duration_ns: FloatArray
    queue: IntArray
    queues: dict[tuple[int, int], int]

    @classmethod
    def of(cls, linked: LinkedTrace, hidden: list[int]) -> _DeviceNodes:
        """Return the nodes of all device events, and of the host operations ``hidden``, which have no device
        event.
        """
        device, host = linked.kineto.device, linked.kineto.host
        extra = np.array(hidden, np.int64)
        event = np.concatenate([np.arange(len(device)), np.full(len(extra), -1)])
        start = np.concatenate([device.start_ns, host.start_ns[extra]])
        duration = np.concatenate([device.duration_ns.astype(np.float64), np.full(len(extra), np.nan)])
        end = np.concatenate([device.end_ns, host.start_ns[extra]])
        stream = np.concatenate([device.stream, np.full(len(extra), -1)])
        order = np.lexsort((stream, start))
        cause = np.concatenate([linked.links.host, extra])
        keys, queue_of_event = distinct_rows(device.device, device.stream)
        queues = {(number, stream): queue for queue, (number, stream) in enumerate(keys)}
        queue = at_rows(queue_of_event, event[order], -1)
        nodes = cls(event[order], cause[order], start[order], end[order], duration[order], queue, queues)
        since_ns = nodes.since_first_ns
        until_ns = since_ns + (nodes.end_ns - nodes.start_ns)
        lanes = lanes_of(queue, since_ns, until_ns, clock_ns(since_ns, until_ns))
        return replace(nodes, queue=lanes)

    @property
    def first_ns(self) -> int:
        """Start of the first device event."""
        shown = self.event >= 0
        return int(self.start_ns[shown].min()) if shown.any() else 0

    @property
    def since_first_ns(self) -> FloatArray:
        """Return the start of each node, relative to the first device event [ns]."""
        return (self.start_ns - self.first_ns).astype(np.float64)

    def possible(self, edges: NodeEdges, findings: Findings) -> NodeEdges:
        """Return the dependencies that the measured times allow, and report the others. A dependency that the
        times contradict is false: the memory of its tensor was reused for another tensor.
        """
        fits = edges.possible(self.queue, self.start_ns, self.end_ns)
        message = "dependencies through a storage that the measured times contradict are dropped"
        findings.info("contradicted-dependency", message, int((~fits).sum()))
        return edges.where(fits)


def device_draft(linked: LinkedTrace, name: str, diagnostics: Diagnostics, path: str) -> GraphDraft:
    """Return the nodes and dependencies of all device work. The times of the nodes add up to the device time
    of the events, to the ns.
    """
    device, host, trace = linked.kineto.device, linked.kineto.host, linked.trace
    host_comms = linked.host_communications()
    event_comms, used = linked.kernel_communications()
    strings = linked.kineto.strings
    hidden = [
        event
        for event in host_comms
        if event not in used and not states_communication(strings[int(host.name_id[event])])
    ]
    nodes = _DeviceNodes.of(linked, hidden)
    findings = diagnostics.about(path, "pytorch")
    message = "communications have no device event and no time"
    findings.warning("communication-without-kernel", message, len(hidden))
    launch = at_rows(linked.links.launch, nodes.event, -1)
    waits, released = _waits(linked.kineto, launch, nodes, findings)
    message = "device events overlap the one before them on their stream and get streams of their own"
    findings.warning("overlap-on-stream", message, int((nodes.queue >= len(nodes.queues)).sum()))
    flow = _StorageDataflow.of(linked, nodes.host)
    data = nodes.possible(flow.data, findings)
    control = NodeEdges.joined(chain(nodes.queue), waits, nodes.possible(flow.order, findings))
    shown = nodes.event >= 0
    node_of = np.full(len(device), -1, np.int64)
    node_of[nodes.event[shown]] = np.flatnonzero(shown)
    comms = {int(node_of[event]): comm for event, comm in event_comms.items()}
    for node in np.flatnonzero(~shown).tolist():
        comms[node] = host_comms[int(nodes.host[node])]
    costs = event_costs(linked.profile(path), diagnostics)
    costs = costs.placed(nodes.event[shown], np.flatnonzero(shown), len(nodes.event))
    if trace:
        costs = replace(costs, types=trace.types.build(), operands=flow.operands, results=flow.results)
    owner = owner_with_shapes(host, linked.nesting, nodes.host)
    framework = at_rows(host.name_id, np.where(owner >= 0, owner, nodes.host), 0)
    category = at_rows(device.category_id, nodes.event, 0)
    stream = at_rows(device.own_streams(), nodes.event, -1)
    extra_queue = nodes.queue - len(nodes.queues)
    stream = np.where(extra_queue >= 0, int(stream.max(initial=-1)) + 1 + extra_queue, stream)
    calls, call = linked.kineto.launch, at_rows(linked.links.launch, nodes.event, -1)
    since_ns = nodes.since_first_ns
    if not (call >= 0).any():
        launch_times = LaunchTimes.none(len(since_ns))
    else:
        at_ns = np.where(call >= 0, (calls.start_ns - nodes.first_ns)[call].astype(np.float64), np.nan)
        thread = np.unique(thread_key(calls)[call], return_inverse=True)[1].reshape(-1)
        message = "launches after the start of their device event are ignored: two clocks"
        findings.warning("launch-after-start", message, int((at_ns > since_ns).sum()))
        times = LaunchTimes.recorded(at_ns, thread, since_ns)
        launch = times.of[released.consumer]
        launch_times = replace(times, released=(launch[launch >= 0], released.producer[launch >= 0]))
    return GraphDraft(
        name=name,
        strings=linked.strings.build(),
        id=np.arange(len(nodes.event), dtype=np.uint64),
        name_id=np.where(shown, at_rows(device.name_id, nodes.event, 0), framework),
        op_id=np.where(framework > 0, framework, category),
        framework_id=framework,
        costs=costs,
        stream=stream,
        queue=nodes.queue,
        duration_ns=np.where(nodes.duration_ns < 0, 0.0, nodes.duration_ns),
        start_ns=np.where(shown, nodes.since_first_ns, np.nan),
        data=data,
        control=control,
        communications=comms,
        launches=launch_times,
    )


class _StorageDataflow(NamedTuple):
    """Dependencies of nodes through storages (memory of tensors), and the types of the operands and results
    of each node.
    """

    data: NodeEdges
    order: NodeEdges
    operands: RaggedArray
    results: RaggedArray

    @classmethod
    def of(cls, linked: LinkedTrace, host: IntArray) -> _StorageDataflow:
        """Return the data and order dependencies between nodes, from the storages of the host operations
        ``host`` that caused them.

        The first node of an operation has its operands, and the last node its results. The operation of a
        node is the innermost one that both the profile and the execution trace have.
        """
        count, trace = len(host), linked.trace
        trace_rows = linked.rows[: len(linked.kineto.host)]
        owner = at_rows(trace_rows, nearest(trace_rows >= 0, linked.nesting.parent, host), -1)
        owned = np.flatnonzero(owner >= 0)
        if trace is None or not len(owned):
            nothing = RaggedArray.empty(count)
            return cls(NodeEdges.empty(), NodeEdges.empty(), nothing, nothing)
        rows, first = np.unique(owner[owned], return_index=True)
        first = owned[first]
        last = np.zeros(len(rows), np.int64)
        np.maximum.at(last, np.searchsorted(rows, owner[owned]), owned)
        flow = flow_of(trace.reads.take(rows), trace.writes.take(rows))
        return cls(
            data=NodeEdges(first[flow.data.consumer], last[flow.data.producer]),
            order=NodeEdges(first[flow.order.consumer], last[flow.order.producer]),
            operands=trace.operands.take(rows).moved(first, count),
            results=trace.results.take(rows).moved(last, count),
        )


class _SyncCall(Enum):
    """Host calls that wait for device work, or make a stream wait for it."""

    DEVICE_SYNC = 0
    STREAM_SYNC = 1
    STREAM_WAIT = 2
    BLOCKING_COPY = 3


_SYNC_CALLS: MappingProxyType[str, _SyncCall] = MappingProxyType(
    {
        **dict.fromkeys(
            ["cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize"], _SyncCall.DEVICE_SYNC
        ),
        **dict.fromkeys(
            [
                "cudaStreamSynchronize",
                "hipStreamSynchronize",
                "cuStreamSynchronize",
                "cudaEventSynchronize",
                "hipEventSynchronize",
                "cuEventSynchronize",
            ],
            _SyncCall.STREAM_SYNC,
        ),
        **dict.fromkeys(
            ["cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent"], _SyncCall.STREAM_WAIT
        ),
        **dict.fromkeys(["cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream"], _SyncCall.BLOCKING_COPY),
    }
)


class _StreamWait(NamedTuple):
    """Wait of one stream for another. The next work of stream ``queue`` waits for the work that was launched
    into stream ``producer`` before ``record_ns``.
    """

    queue: int
    producer: int
    record_ns: int

    @classmethod
    def recorded(cls, trace: KinetoTrace, queues: dict[tuple[int, int], int]) -> dict[int, _StreamWait]:
        """Return the recorded waits of streams, by the correlation id of the call that made the stream
        wait.
        """
        sync = trace.sync
        if not len(sync):
            return {}
        start_ns = dict(zip(trace.launch.correlation.tolist(), trace.launch.start_ns.tolist(), strict=True))
        waits: dict[int, _StreamWait] = {}
        columns = (sync.correlation, sync.device, sync.stream, sync.wait_on_stream, sync.record)
        for correlation, device, stream, wait_on, record in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            queue = queues.get((max(device, 0), stream), -1)
            producer = queues.get((max(device, 0), wait_on), -1)
            if correlation >= 0 and queue >= 0 and producer >= 0 and record in start_ns:
                waits[correlation] = cls(queue, producer, start_ns[record])
        return waits


@dataclass(slots=True)
class _HostBarrier:
    """Synchronisation of a host thread. ``producers`` are the device nodes for which the thread has waited.
    The next node that the thread launches into each queue depends on them. ``informed`` are the queues that
    have such a node already.
    """

    producers: list[int] = field(default_factory=list[int])
    informed: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class _LaunchOrder:
    """Processing of host calls in order of time, to find the waits of device nodes for other device nodes.

    ``last`` is the last node of each queue, ``history`` all its nodes with their launch times. ``by_thread``
    has the nodes for which the next launch of a thread waits, and ``by_queue`` the nodes for which the next
    launch into a queue waits. ``pairs`` are the waits found so far, as (waiting node, node). ``synced`` is,
    per pair of queues, the last node of the second queue for which the first queue has waited. ``released``
    are pairs of a launched node and a node whose end released the launching thread.
    """

    queue: list[int]
    start_ns: list[int]
    end_ns: list[int]
    last: dict[int, int] = field(default_factory=dict[int, int])
    history: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    barriers: dict[int, _HostBarrier] = field(default_factory=dict[int, _HostBarrier])
    by_thread: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    by_queue: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    pairs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    waited_for: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    released: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    synced: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    contradicted: int = 0

    def launch(self, node: int, thread: int, at_ns: int) -> None:
        """Append a node to its queue, and add the waits that precede it."""
        queue = self.queue[node]
        self.released += [(node, producer) for producer in self.waited_for.pop(thread, ())]
        waiting = self.by_thread.pop(thread, [])
        producers = [producer for producer in waiting if self.queue[producer] != queue]
        producers += self.by_queue.pop(queue, [])
        barrier = self.barriers.get(thread)
        if barrier and queue not in barrier.informed:
            barrier.informed.add(queue)
            producers += barrier.producers
        for producer in dict.fromkeys(producers):
            queues = queue, self.queue[producer]
            if producer <= self.synced.get(queues, -1) or producer == node:
                continue  # an earlier node of the queue waited for it, or for a later node
            if producer < node and self.end_ns[producer] <= self.start_ns[node]:
                self.pairs.append((node, producer))
                self.synced[queues] = producer
            else:
                self.contradicted += 1
        self.last[queue] = node
        self.history.setdefault(queue, []).append((at_ns, node))

    def wait_on_host(self, thread: int, until_ns: int, *, all_queues: bool) -> None:
        """Record that a thread was blocked until ``until_ns``, when the device work for which it waited
        ended.

        It waited for the last node of every queue if ``all_queues``, else for the node that ended last.
        """
        ended = [node for node in self.last.values() if self.end_ns[node] <= until_ns + _COARSE_CLOCK_NS]
        if not all_queues and ended:
            ended = [max(ended, key=lambda node: self.end_ns[node])]
        if ended:
            self.barriers[thread] = _HostBarrier(ended)
            self.waited_for[thread] = ended

    def wait_on_stream(self, wait: _StreamWait) -> None:
        """Make a queue wait for the last node that was launched into another queue before the event was
        recorded.
        """
        recent = self.history.get(wait.producer, [])[-_MAX_HISTORY:]
        before = [node for at_ns, node in recent if at_ns <= wait.record_ns]
        if before:
            self.by_queue.setdefault(wait.queue, []).append(before[-1])


def _waits(
    trace: KinetoTrace, launch: IntArray, nodes: _DeviceNodes, findings: Findings
) -> tuple[NodeEdges, NodeEdges]:
    """Return the waits of nodes for other nodes, and the releases of launching threads by nodes.

    ``launch`` is the call that launched each node (-1: not in the trace). A release is a pair of nodes:
    before the launch of the first node, the thread waited for the end of the second node. O((calls +
    launches) log).
    """
    calls = trace.launch
    if not len(calls):
        return NodeEdges.empty(), NodeEdges.empty()
    names: list[int] = np.unique(calls.name_id).tolist()
    kind_of = {row: _SYNC_CALLS.get(trace.strings[row]) for row in names}
    call_names: list[int] = calls.name_id.tolist()
    kinds: list[_SyncCall | None] = [kind_of[row] for row in call_names]
    recorded = _StreamWait.recorded(trace, nodes.queues)
    launched: dict[int, list[int]] = {}
    for node, call in enumerate(launch.tolist()):
        if call >= 0:
            launched.setdefault(call, []).append(node)
    order = _LaunchOrder(nodes.queue.tolist(), nodes.start_ns.tolist(), nodes.end_ns.tolist())
    relevant = np.array([kind is not None for kind in kinds])
    relevant[list(launched)] = True
    rows = np.flatnonzero(relevant)
    rows = rows[np.argsort(calls.start_ns[rows], kind="stable")]
    columns: tuple[NDArray[Any], ...] = (thread_key(calls), calls.start_ns, calls.end_ns, calls.correlation)
    relevant_rows: list[int] = rows.tolist()
    lists: list[list[int]] = [column[rows].tolist() for column in columns]
    num_stated = num_inferred = 0
    for row, (thread, start_ns, end_ns, correlation) in zip(
        relevant_rows, zip(*lists, strict=True), strict=True
    ):
        for node in launched.get(row, ()):
            order.launch(node, thread, start_ns)
        kind = kinds[row]
        if kind is None:
            continue
        wait = recorded.get(correlation)
        num_stated += wait is not None
        num_inferred += wait is None
        if kind is not _SyncCall.STREAM_WAIT:
            order.wait_on_host(thread, end_ns, all_queues=kind is _SyncCall.DEVICE_SYNC)
        elif wait is not None:
            order.wait_on_stream(wait)
        else:
            order.by_thread.setdefault(thread, []).extend(order.last.values())
    findings.info("stated-waits", "waits recorded with their streams", num_stated)
    findings.info("inferred-waits", "waits whose streams are inferred from the order of calls", num_inferred)
    message = "inferred dependencies that the measured times contradict are dropped"
    findings.info("contradicted-waits", message, order.contradicted)
    return NodeEdges.of(order.pairs), NodeEdges.of(order.released)
