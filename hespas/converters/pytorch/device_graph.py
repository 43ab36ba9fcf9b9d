"""The graph of a rank's device work: one node per device event, in order of start.

Nodes of a queue follow each other; streams wait for each other where the trace tells; data dependencies come
from the storages of the operations behind the nodes. An event whose cause is not in the trace (launched
before the window, replayed from a captured graph) is a node like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hespas.converters.linking import nearest
from hespas.converters.measured_ops import EventCosts, Launches, clock_ns, event_costs, lanes_of
from hespas.converters.pytorch.communication import Communication, states_communication
from hespas.converters.pytorch.draft import Draft, Edges, chain, flow_of
from hespas.converters.pytorch.events import KinetoTrace
from hespas.converters.pytorch.kernels import owner_with_shapes, thread_key
from hespas.converters.pytorch.linked import LinkedTrace
from hespas.graph import Diagnostics, Findings, RaggedArray
from hespas.graph.columns import FloatArray, IntArray, at_rows, distinct_rows

__all__ = ["device_draft"]


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """Device events in order of start, and behind them communications that no event shows.

    ``event`` is the row of the device event (-1: none), ``host`` the operation of the host that caused it,
    ``queue`` a number for its device and stream (-1 for what no event shows), or one of its own where it
    overlaps what is ahead of it on its stream.
    """

    event: IntArray
    host: IntArray
    start_ns: IntArray
    end_ns: IntArray
    duration_ns: FloatArray
    queue: IntArray
    queues: dict[tuple[int, int], int]


def device_draft(linked: LinkedTrace, name: str, diagnostics: Diagnostics, path: str) -> Draft:
    """The nodes and dependencies of all device work. Device time is that of the events, to the ns."""
    device = linked.kineto.device
    talks_of_host = linked.communications()
    talks, used = linked.kernel_talks()
    strings, names = linked.kineto.strings, linked.kineto.host.name_row
    hidden = [
        event
        for event in talks_of_host
        if event not in used and not states_communication(strings[int(names[event])])
    ]
    nodes = _nodes(linked, hidden)
    place = np.full(len(device), -1, np.int64)
    shown = nodes.event >= 0
    place[nodes.event[shown]] = np.flatnonzero(shown)
    all_talks = {int(place[event]): talk for event, talk in talks.items()}
    for node in np.flatnonzero(~shown).tolist():
        all_talks[node] = talks_of_host[int(nodes.host[node])]
    findings = diagnostics.about(path, "pytorch")
    message = "communications that no device event shows, kept without a time"
    findings.warning("communication-without-kernel", message, len(hidden))
    order = _order(linked, nodes, findings)
    types = _dataflow(linked, _owners(linked, nodes.host))
    data = _possible(types.data, nodes, findings)
    later = _possible(types.order, nodes, findings)
    flow = replace(types, data=data, order=Edges.joined(order.waits, later))
    costs = event_costs(linked.profile(path), diagnostics)
    costs = costs.placed(nodes.event[shown], np.flatnonzero(shown), len(nodes.event))
    launches = _launches(linked, nodes, order.let_go, findings)
    draft = _draft(linked, nodes, costs, flow, name=name, talks=all_talks)
    return replace(draft, launches=launches)


def _nodes(linked: LinkedTrace, hidden: list[int]) -> _Nodes:
    """Device events and hidden communications by start, then by stream."""
    device, host = linked.kineto.device, linked.kineto.host
    extra = np.array(hidden, np.int64)
    event = np.concatenate([np.arange(len(device)), np.full(len(extra), -1)])
    start = np.concatenate([device.start_ns, host.start_ns[extra]])
    duration = np.concatenate([device.duration_ns.astype(np.float64), np.full(len(extra), np.nan)])
    end = np.concatenate([device.end_ns, host.start_ns[extra]])
    stream = np.concatenate([device.stream, np.full(len(extra), -1)])
    order = np.lexsort((stream, start))
    cause = np.concatenate([linked.links.host, extra])
    keys, of_event = distinct_rows(device.device, device.stream)
    queues = {(number, stream): place for place, (number, stream) in enumerate(keys)}
    start, end = start[order], end[order]
    since = _since_first(start, event[order])
    until = since + (end - start)
    queue = lanes_of(at_rows(of_event, event[order], -1), since, until, clock_ns(since, until))
    return _Nodes(event[order], cause[order], start, end, duration[order], queue, queues)


def _since_first(start_ns: IntArray, event: IntArray) -> FloatArray:
    """Time since the first device event."""
    shown = event >= 0
    first_ns = int(start_ns[shown].min()) if shown.any() else 0
    return (start_ns - first_ns).astype(np.float64)


def _possible(edges: Edges, nodes: _Nodes, findings: Findings) -> Edges:
    """Dependencies between queues that the measured times allow; a reused storage makes others."""
    fits = edges.possible(nodes.queue, nodes.start_ns, nodes.end_ns)
    message = "dependencies through a storage that the measured times contradict are left out"
    findings.info("contradicted-dependency", message, int((~fits).sum()))
    return edges.where(fits)


class _Order(NamedTuple):
    """``waits``: of device work for device work, on its stream or another. ``let_go``: of a call of the host
    that launched a node, for device work whose end a synchronisation before it waited for.
    """

    waits: Edges
    let_go: Edges


def _launches(linked: LinkedTrace, nodes: _Nodes, let_go: Edges, findings: Findings) -> Launches:
    """The calls that launched nodes, on the clock of their starts."""
    launch, calls = linked.kineto.launch, at_rows(linked.links.launch, nodes.event, -1)
    known = calls >= 0
    since = _since_first(nodes.start_ns, nodes.event)
    if not known.any():
        return Launches.none(len(since))
    first_ns = int(nodes.start_ns[nodes.event >= 0].min())
    at_ns = np.where(known, (launch.start_ns - first_ns)[calls].astype(np.float64), np.nan)
    thread = np.unique(thread_key(launch)[calls], return_inverse=True)[1].reshape(-1)
    message = "device events start before their launch does, which is left out: two clocks"
    findings.warning("launch-after-start", message, int((at_ns > since).sum()))
    found = Launches.recorded(at_ns, thread, since)
    of = found.of[let_go.consumer]
    return replace(found, let_go=(of[of >= 0], let_go.producer[of >= 0]))


def _order(linked: LinkedTrace, nodes: _Nodes, findings: Findings) -> _Order:
    """Stream order and waits."""
    waits, let_go = _waits(linked.kineto, at_rows(linked.links.launch, nodes.event, -1), nodes, findings)
    message = "device events overlap the one before them on their stream and get streams of their own"
    findings.warning("overlap-on-stream", message, int((nodes.queue >= len(nodes.queues)).sum()))
    return _Order(Edges.joined(chain(nodes.queue), waits), let_go)


def _streams(own: IntArray, nodes: _Nodes) -> IntArray:
    """The stream of each node; those of queues that no stream has follow the largest."""
    streams = at_rows(own, nodes.event, -1)
    apart = nodes.queue - len(nodes.queues)
    return np.where(apart >= 0, int(streams.max(initial=-1)) + 1 + apart, streams)


def _owners(linked: LinkedTrace, host: IntArray) -> IntArray:
    """The row of the execution trace behind each node: the innermost operation that both records have."""
    rows = linked.rows[: len(linked.kineto.host)]
    return at_rows(rows, nearest(rows >= 0, linked.nesting.parent, host), -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Dataflow:
    """Dependencies, and tensor types per node."""

    data: Edges
    order: Edges
    operands: RaggedArray
    results: RaggedArray


def _dataflow(linked: LinkedTrace, owner: IntArray) -> _Dataflow:
    """Data and order dependencies, and tensor types: operands at the first node of an operation, results at
    its last.
    """
    count = len(owner)
    trace = linked.trace
    owned = np.flatnonzero(owner >= 0)
    if trace is None or not len(owned):
        return _Dataflow(Edges.empty(), Edges.empty(), RaggedArray.empty(count), RaggedArray.empty(count))
    rows, first = np.unique(owner[owned], return_index=True)
    first = owned[first]
    last = np.zeros(len(rows), np.int64)
    np.maximum.at(last, np.searchsorted(rows, owner[owned]), owned)
    flow = flow_of(trace.reads.take(rows), trace.writes.take(rows))
    data = Edges(first[flow.data.consumer], last[flow.data.producer])
    order = Edges(first[flow.order.consumer], last[flow.order.producer])
    operands, results = (
        trace.operands.take(rows).moved(first, count),
        trace.results.take(rows).moved(last, count),
    )
    return _Dataflow(data, order, operands, results)


def _draft(
    linked: LinkedTrace,
    nodes: _Nodes,
    costs: EventCosts,
    flow: _Dataflow,
    *,
    name: str,
    talks: dict[int, Communication],
) -> Draft:
    device, host, trace = linked.kineto.device, linked.kineto.host, linked.trace
    shown = nodes.event >= 0
    owner = owner_with_shapes(host, linked.nesting, nodes.host)
    framework = at_rows(host.name_row, np.where(owner >= 0, owner, nodes.host), 0)
    category = at_rows(device.category_row, nodes.event, 0)
    if trace:
        costs = replace(costs, types=trace.types.build(), operands=flow.operands, results=flow.results)
    return Draft(
        name=name,
        strings=linked.strings.build(),
        id=np.arange(len(nodes.event), dtype=np.uint64),
        name_row=np.where(shown, at_rows(device.name_row, nodes.event, 0), framework),
        op_row=np.where(framework > 0, framework, category),
        framework_row=framework,
        costs=costs,
        stream=_streams(device.own_streams(), nodes),
        queue=nodes.queue,
        duration_ns=np.where(nodes.duration_ns < 0, 0.0, nodes.duration_ns),
        start_ns=np.where(shown, _since_first(nodes.start_ns, nodes.event), np.nan),
        data=flow.data,
        control=flow.order,
        talks=talks,
    )


# Which device work waits for other streams or for the host, as far as a trace tells.
#
# Where the profiler recorded synchronisation (category ``cuda_sync``), streams are stated. Elsewhere the
# calls are there, but not their streams; then a stream wait belongs to the next launch of its thread and is
# for what was launched last on the other streams, a synchronisation of the host is for what had ended when
# it returned. An inferred wait that the measured times contradict is dropped and counted.


class _Call(Enum):
    DEVICE_SYNC = 0
    STREAM_SYNC = 1
    STREAM_WAIT = 2
    BLOCKING_COPY = 3


_CALLS: MappingProxyType[str, _Call] = MappingProxyType(
    {
        **dict.fromkeys(
            ["cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize"], _Call.DEVICE_SYNC
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
            _Call.STREAM_SYNC,
        ),
        **dict.fromkeys(
            ["cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent"], _Call.STREAM_WAIT
        ),
        **dict.fromkeys(["cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream"], _Call.BLOCKING_COPY),
    }
)
_COARSE_CLOCK_NS = 1000


class _Stated(NamedTuple):
    """A wait with its streams: ``queue`` waits for what ``producer`` had launched before ``record_ns``."""

    queue: int
    producer: int
    record_ns: int


@dataclass(slots=True)
class _Barrier:
    """What a thread of the host has waited for, and the queues that know of it."""

    producers: list[int] = field(default_factory=list[int])
    informed: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class _Walk:
    """The calls of the host in order of time, with what they launched."""

    queue: list[int]
    start_ns: list[int]
    end_ns: list[int]
    last: dict[int, int] = field(default_factory=dict[int, int])
    history: dict[int, list[tuple[int, int]]] = field(default_factory=dict[int, list[tuple[int, int]]])
    barriers: dict[int, _Barrier] = field(default_factory=dict[int, _Barrier])
    by_thread: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    by_queue: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    pairs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    released: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    let_go: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    known: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    contradicted: int = 0

    def launched(self, node: int, thread: int, at_ns: int) -> None:
        """A node is put into its queue."""
        queue = self.queue[node]
        self.let_go += [(node, producer) for producer in self.released.pop(thread, ())]
        waiting = self.by_thread.pop(thread, [])
        others = [producer for producer in waiting if self.queue[producer] != queue]
        others += self.by_queue.pop(queue, [])
        barrier = self.barriers.get(thread)
        if barrier and queue not in barrier.informed:
            barrier.informed.add(queue)
            others += barrier.producers
        for producer in dict.fromkeys(others):
            way = queue, self.queue[producer]
            if producer <= self.known.get(way, -1) or producer == node:
                continue  # an earlier node of the queue waited for it, or for something behind it
            if producer < node and self.end_ns[producer] <= self.start_ns[node]:
                self.pairs.append((node, producer))
                self.known[way] = producer
            else:
                self.contradicted += 1
        self.last[queue] = node
        self.history.setdefault(queue, []).append((at_ns, node))

    def host_waits(self, thread: int, until_ns: int, *, all_queues: bool) -> None:
        """The thread goes on at ``until_ns``, when what it waited for had ended."""
        ended = [node for node in self.last.values() if self.end_ns[node] <= until_ns + _COARSE_CLOCK_NS]
        if not all_queues and ended:
            ended = [max(ended, key=lambda node: self.end_ns[node])]
        if ended:
            self.barriers[thread] = _Barrier(ended)
            self.released[thread] = ended

    def stated_wait(self, wait: _Stated) -> None:
        """A queue waits for what stood in another one when an event was recorded there."""
        before = [
            node for at_ns, node in self.history.get(wait.producer, [])[-256:] if at_ns <= wait.record_ns
        ]
        if before:
            self.by_queue.setdefault(wait.queue, []).append(before[-1])


def _waits(trace: KinetoTrace, launched: IntArray, nodes: _Nodes, findings: Findings) -> _Order:
    """Dependencies of nodes that a call ``launched`` (-1: it is not in the trace). Walks over the calls in
    order of time: O((calls + launches) log).
    """
    launch = trace.launch
    if not len(launch):
        return _Order(Edges.empty(), Edges.empty())
    names: list[int] = np.unique(launch.name_row).tolist()
    kind_of = {row: _CALLS.get(trace.strings[row]) for row in names}
    called: list[_Call | None] = [kind_of[row] for row in launch.name_row.tolist()]
    stated = _stated(trace, nodes.queues)
    caused: dict[int, list[int]] = {}
    for node, call in enumerate(launched.tolist()):
        if call >= 0:
            caused.setdefault(call, []).append(node)
    walk = _Walk(nodes.queue.tolist(), nodes.start_ns.tolist(), nodes.end_ns.tolist())
    wanted = np.array([kind is not None for kind in called])
    wanted[list(caused)] = True
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(launch.start_ns[rows], kind="stable")]
    columns = (
        rows,
        *(each[rows] for each in (thread_key(launch), launch.start_ns, launch.end_ns, launch.correlation)),
    )
    counts = [0, 0]
    listed: list[list[int]] = [each.tolist() for each in columns]
    for row, thread, start_ns, end_ns, correlation in zip(*listed, strict=True):
        for node in caused.get(row, ()):
            walk.launched(node, thread, start_ns)
        kind = called[int(row)]
        if kind is None:
            continue
        exact = stated.get(correlation)
        counts[exact is None] += 1
        if exact is not None and kind is _Call.STREAM_WAIT:
            walk.stated_wait(exact)
        elif kind is _Call.STREAM_WAIT:
            walk.by_thread.setdefault(thread, []).extend(walk.last.values())
        else:
            walk.host_waits(thread, end_ns, all_queues=kind is _Call.DEVICE_SYNC)
    findings.info("stated-waits", "waits recorded with their streams", counts[0])
    findings.info("inferred-waits", "waits whose streams are inferred from the order of calls", counts[1])
    message = "inferred dependencies that the measured times contradict, left out"
    findings.info("contradicted-waits", message, walk.contradicted)
    return _Order(Edges.of(walk.pairs), Edges.of(walk.let_go))


def _stated(trace: KinetoTrace, queues: dict[tuple[int, int], int]) -> dict[int, _Stated]:
    """Recorded stream waits by the correlation of their call."""
    sync = trace.sync
    if not len(sync):
        return {}
    recorded = dict(zip(trace.launch.correlation.tolist(), trace.launch.start_ns.tolist(), strict=True))
    found: dict[int, _Stated] = {}
    columns = (sync.correlation, sync.device, sync.stream, sync.wait_on_stream, sync.record)
    for correlation, device, stream, producer, record in zip(
        *(each.tolist() for each in columns), strict=True
    ):
        waiting = queues.get((max(device, 0), stream), -1)
        waited_for = queues.get((max(device, 0), producer), -1)
        if correlation >= 0 and waiting >= 0 and waited_for >= 0 and record in recorded:
            found[correlation] = _Stated(waiting, waited_for, recorded[record])
    return found
