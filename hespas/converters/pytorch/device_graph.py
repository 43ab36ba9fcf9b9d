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

from hespas.converters.measured_ops import EventCosts, event_costs
from hespas.converters.pytorch.communication import Communication, Named, merged
from hespas.converters.pytorch.draft import Draft, Edges, Work, chain, flow_of
from hespas.converters.pytorch.events import KinetoTrace
from hespas.converters.pytorch.kernels import (
    communication_kernels,
    owner_with_shapes,
    ranges_around,
    stated_communication,
    thread_key,
)
from hespas.converters.pytorch.linked import LinkedTrace, climb
from hespas.graph import CollectiveKind, Csr, Diagnostics, NodeKind
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["device_draft"]

_UNKNOWN = Named(NodeKind.COLLECTIVE, CollectiveKind.UNKNOWN)


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """Device events in order of start, and behind them communications that no event shows.

    ``event`` is the row of the device event (-1: none), ``host`` the operation of the host that caused it.
    """

    event: IntArray
    host: IntArray
    start_ns: IntArray
    end_ns: IntArray
    duration_ns: FloatArray


def device_draft(linked: LinkedTrace, name: str, diagnostics: Diagnostics, path: str) -> Draft:
    """The nodes and dependencies of all device work. Device time is that of the events, to the ns."""
    device = linked.kineto.device
    talks_of_host = linked.communications()
    talks, used = _kernel_talks(linked, talks_of_host)
    hidden = [event for event in talks_of_host if event not in used]
    nodes = _nodes(linked, hidden)
    place = np.full(len(device), -1, np.int64)
    shown = nodes.event >= 0
    place[nodes.event[shown]] = np.flatnonzero(shown)
    all_talks = {int(place[event]): talk for event, talk in talks.items()}
    for node in np.flatnonzero(~shown).tolist():
        all_talks[node] = talks_of_host[int(nodes.host[node])]
    message = "communications that no device event shows, kept without a time"
    diagnostics.warning("pytorch.communication-without-kernel", path, message, count=len(hidden))
    queue = _queues(linked, nodes)
    control = _order(linked, nodes, queue, diagnostics, path)
    types = _dataflow(linked, _owners(linked, nodes.host))
    data = _possible(types.data, nodes, queue, diagnostics, path)
    later = _possible(types.order, nodes, queue, diagnostics, path)
    flow = replace(types, data=data, order=Edges.joined(control, later))
    costs = event_costs(linked.profile(path), diagnostics)
    return _draft(linked, nodes, costs, flow, name=name, talks=all_talks)


def _kernel_talks(
    linked: LinkedTrace, talks_of_host: dict[int, Communication]
) -> tuple[dict[int, Communication], set[int]]:
    """What each communication kernel does, by device event; and the host's communications they are.

    A kernel that sends and receives for several calls stands for the first of them that none stands for.
    """
    kernels = communication_kernels(linked.kineto)
    is_talk = np.zeros(len(linked.kineto.host), np.bool_)
    is_talk[list(talks_of_host)] = True
    causes = climb(linked.links.host[kernels.event], linked.nesting.parent, is_talk)
    waiting = sorted(
        set(talks_of_host) - set(causes.tolist()), key=lambda event: linked.kineto.host.start_ns[event]
    )
    found: dict[int, Communication] = {}
    used: set[int] = set()
    around = ranges_around(linked.kineto, linked.links, kernels.event)
    rows = zip(kernels.event.tolist(), causes.tolist(), kernels.meaning, around, strict=True)
    for event, inside, meaning, outer in rows:
        stated = stated_communication(linked.kineto, event)
        cause = inside
        if inside < 0 and stated is None and meaning is None:
            cause = _waiting_cause(linked, event, waiting)
        recorded = talks_of_host.get(cause)
        if stated is None and cause >= 0 and cause in used:
            continue  # one more kernel of the same communication is plain work
        used.add(cause)
        if stated is not None:
            talk = merged(stated, recorded)
        else:
            talk = recorded or Communication(meaning=meaning or (outer.meaning if outer else _UNKNOWN))
        found[event] = talk.with_size(outer.operand_bytes) if outer else talk
    return found, used


def _waiting_cause(linked: LinkedTrace, event: int, waiting: list[int]) -> int:
    """The first communication without a kernel that was called before this one was launched; -1 for none."""
    launch = int(linked.links.launch[event])
    if launch < 0 or not waiting:
        return -1
    called_ns, launched_ns = linked.kineto.host.start_ns[waiting[0]], linked.kineto.launch.start_ns[launch]
    return waiting.pop(0) if called_ns <= launched_ns else -1


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
    return _Nodes(event[order], cause[order], start[order], end[order], duration[order])


def _queue_numbers(linked: LinkedTrace) -> dict[tuple[int, int], int]:
    """One number per (device, stream)."""
    device = linked.kineto.device
    keys: list[list[int]] = np.unique(np.stack([device.device, device.stream]), axis=1).T.tolist()
    return {(number, stream): place for place, (number, stream) in enumerate(keys)}


def _queues(linked: LinkedTrace, nodes: _Nodes) -> IntArray:
    """The number of each node's queue; -1 for what no event shows."""
    device = linked.kineto.device
    keys = np.stack([device.device, device.stream])
    _, queue = np.unique(keys, axis=1, return_inverse=True)
    shown = nodes.event >= 0
    return np.where(shown, queue.reshape(-1)[np.maximum(nodes.event, 0)], -1) if len(device) else nodes.event


def _possible(edges: Edges, nodes: _Nodes, queue: IntArray, diagnostics: Diagnostics, path: str) -> Edges:
    """Dependencies between queues that the measured times allow; a reused storage makes others."""
    same = queue[edges.consumer] == queue[edges.producer]
    fits = same | (nodes.end_ns[edges.producer] <= nodes.start_ns[edges.consumer])
    message = "dependencies through a storage that the measured times contradict are left out"
    diagnostics.info("pytorch.contradicted-dependency", path, message, count=int((~fits).sum()))
    return edges.where(fits)


def _order(linked: LinkedTrace, nodes: _Nodes, queue: IntArray, diagnostics: Diagnostics, path: str) -> Edges:
    """Stream order and waits."""
    chained = chain(queue)
    launch = (
        np.where(nodes.event >= 0, linked.links.launch[np.maximum(nodes.event, 0)], -1)
        if len(linked.links.launch)
        else np.full(len(nodes.event), -1)
    )
    waits = _waits_of(
        linked.kineto, _DeviceWork(launch, queue, nodes.start_ns, nodes.end_ns, _queue_numbers(linked))
    )
    diagnostics.info("pytorch.stated-waits", path, "waits recorded with their streams", count=waits.stated)
    message = "waits whose streams are inferred from the order of calls"
    diagnostics.info("pytorch.inferred-waits", path, message, count=waits.inferred)
    message = "inferred dependencies that the measured times contradict, left out"
    diagnostics.info("pytorch.contradicted-waits", path, message, count=waits.contradicted)
    before = nodes.end_ns[chained.producer] > nodes.start_ns[chained.consumer]
    message = "device events overlap the one before them on their stream"
    diagnostics.warning("pytorch.overlap-on-stream", path, message, count=int(before.sum()))
    return Edges.joined(chained, waits.edges)


def _owners(linked: LinkedTrace, host: IntArray) -> IntArray:
    """The row of the execution trace behind each node: the innermost operation that both records have."""
    rows = linked.rows[: len(linked.kineto.host)]
    found = climb(host, linked.nesting.parent, rows >= 0)
    return np.where(found >= 0, rows[np.maximum(found, 0)], -1) if len(rows) else np.full(len(host), -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Dataflow:
    """Dependencies, and tensor types per node."""

    data: Edges
    order: Edges
    operands: Csr
    results: Csr


def _dataflow(linked: LinkedTrace, owner: IntArray) -> _Dataflow:
    """Data and order dependencies, and tensor types: operands at the first node of an operation, results at
    its last.
    """
    count = len(owner)
    trace = linked.trace
    owned = np.flatnonzero(owner >= 0)
    if trace is None or not len(owned):
        return _Dataflow(Edges.empty(), Edges.empty(), Csr.empty(count), Csr.empty(count))
    rows, first = np.unique(owner[owned], return_index=True)
    first = owned[first]
    last = np.zeros(len(rows), np.int64)
    np.maximum.at(last, np.searchsorted(rows, owner[owned]), owned)
    flow = flow_of(trace.reads.take(rows), trace.writes.take(rows))
    data = Edges(first[flow.data.consumer], last[flow.data.producer])
    order = Edges(first[flow.order.consumer], last[flow.order.producer])
    operands, results = _placed(trace.operands, rows, first, count), _placed(trace.results, rows, last, count)
    return _Dataflow(data, order, operands, results)


def _placed(types: Csr, rows: IntArray, nodes: IntArray, count: int) -> Csr:
    taken = types.take(rows)
    return Csr.from_pairs(nodes[taken.row_ids], taken.values, count)


def _draft(
    linked: LinkedTrace,
    nodes: _Nodes,
    costs: EventCosts,
    flow: _Dataflow,
    *,
    name: str,
    talks: dict[int, Communication],
) -> Draft:
    device, host = linked.kineto.device, linked.kineto.host
    shown, event = nodes.event >= 0, np.maximum(nodes.event, 0)
    owner = owner_with_shapes(host, linked.nesting, nodes.host)
    cause = np.where(owner >= 0, owner, nodes.host)
    named = host.name_row[np.maximum(cause, 0)] if len(host) else np.zeros(len(cause), np.int32)
    framework = np.where(cause >= 0, named, 0)
    category = device.category_row[event] if len(device) else framework
    kernel = device.name_row[event] if len(device) else framework
    return Draft(
        name=name,
        strings=linked.strings.build(),
        types=linked.types if linked.trace else costs.types,
        id=np.arange(len(nodes.event), dtype=np.uint64),
        name_row=np.where(shown, kernel, framework).astype(np.int32),
        op_row=np.where(framework > 0, framework, np.where(shown, category, 0)).astype(np.int32),
        framework_row=framework.astype(np.int32),
        work=Work.placed(costs, nodes.event[shown], np.flatnonzero(shown), len(nodes.event)),
        stream=np.where(shown, device.own_streams()[event], -1) if len(device) else nodes.event,
        queue=_queues(linked, nodes),
        duration_ns=np.where(nodes.duration_ns < 0, 0.0, nodes.duration_ns),
        operands=flow.operands if linked.trace else _of_nodes(costs.operands, nodes),
        results=flow.results if linked.trace else _of_nodes(costs.results, nodes),
        data=flow.data,
        control=flow.order,
        talks=talks,
    )


def _of_nodes(types: Csr, nodes: _Nodes) -> Csr:
    """Tensor types by node, from those by device event."""
    shown = np.flatnonzero(nodes.event >= 0)
    taken = types.take(nodes.event[shown])
    return Csr.from_pairs(shown[taken.row_ids], taken.values, len(nodes.event))


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
            ("cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize"), _Call.DEVICE_SYNC
        ),
        **dict.fromkeys(
            (
                "cudaStreamSynchronize",
                "hipStreamSynchronize",
                "cuStreamSynchronize",
                "cudaEventSynchronize",
                "hipEventSynchronize",
                "cuEventSynchronize",
            ),
            _Call.STREAM_SYNC,
        ),
        **dict.fromkeys(
            ("cudaStreamWaitEvent", "hipStreamWaitEvent", "cuStreamWaitEvent"), _Call.STREAM_WAIT
        ),
        **dict.fromkeys(("cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream"), _Call.BLOCKING_COPY),
    }
)
_COARSE_CLOCK_NS = 1000


class _DeviceWork(NamedTuple):
    """Device events in order of their start: the call that launched each (-1: not in the trace), its queue
    and its time. ``queues`` gives the queue of a (device, stream).
    """

    launch: IntArray
    queue: IntArray
    start_ns: IntArray
    end_ns: IntArray
    queues: dict[tuple[int, int], int]


class _Waits(NamedTuple):
    """Dependencies; how many calls were stated with their streams or inferred, and dropped edges."""

    edges: Edges
    stated: int
    inferred: int
    contradicted: int


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
    known: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    contradicted: int = 0

    def launched(self, node: int, thread: int, at_ns: int) -> None:
        """A node is put into its queue."""
        queue = self.queue[node]
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

    def stated_wait(self, wait: _Stated) -> None:
        """A queue waits for what stood in another one when an event was recorded there."""
        before = [
            node for at_ns, node in self.history.get(wait.producer, [])[-256:] if at_ns <= wait.record_ns
        ]
        if before:
            self.by_queue.setdefault(wait.queue, []).append(before[-1])


def _waits_of(trace: KinetoTrace, work: _DeviceWork) -> _Waits:
    """Walk over the calls in order of time. O((calls + launches) log)."""
    launch = trace.launch
    if not len(launch):
        return _Waits(Edges.empty(), 0, 0, 0)
    names: list[int] = np.unique(launch.name_row).tolist()
    kind_of = {row: _CALLS.get(trace.strings[row]) for row in names}
    called: list[_Call | None] = [kind_of[row] for row in launch.name_row.tolist()]
    stated = _stated(trace, work.queues)
    nodes: dict[int, list[int]] = {}
    for node, call in enumerate(work.launch.tolist()):
        if call >= 0:
            nodes.setdefault(call, []).append(node)
    walk = _Walk(work.queue.tolist(), work.start_ns.tolist(), work.end_ns.tolist())
    wanted = np.array([kind is not None for kind in called])
    wanted[np.fromiter(nodes, np.int64, len(nodes))] = True
    rows = np.flatnonzero(wanted)
    rows = rows[np.argsort(launch.start_ns[rows], kind="stable")]
    threads: list[int] = thread_key(launch)[rows].tolist()
    starts: list[int] = launch.start_ns[rows].tolist()
    ends: list[int] = launch.end_ns[rows].tolist()
    ids: list[int] = launch.correlation[rows].tolist()
    places: list[int] = rows.tolist()
    counts = [0, 0]
    for row, thread, start_ns, end_ns, correlation in zip(places, threads, starts, ends, ids, strict=True):
        for node in nodes.get(row, ()):
            walk.launched(node, thread, start_ns)
        kind = called[row]
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
    pairs = np.array(walk.pairs, np.int64).reshape(-1, 2)
    return _Waits(Edges(pairs[:, 0], pairs[:, 1]), counts[0], counts[1], walk.contradicted)


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
