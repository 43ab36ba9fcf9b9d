"""Which device work waits for other streams or for the host, as far as a trace tells.

Where the profiler recorded synchronisation (category ``cuda_sync``), streams are stated. Elsewhere the calls
are there, but not their streams; then a stream wait belongs to the next launch of its thread and is for what
was launched last on the other streams, a synchronisation of the host is for what had ended when it returned.
An inferred wait that the measured times contradict is dropped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hespas.converters.pytorch.dataflow import Edges
from hespas.converters.pytorch.events import KinetoTrace
from hespas.converters.pytorch.linking import thread_key
from hespas.graph.columns import IntArray

__all__ = ["DeviceWork", "Waits", "waits_of"]


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


class DeviceWork(NamedTuple):
    """Device events in order of their start: the call that launched each (-1: not in the trace), its queue
    and its time. ``queues`` gives the queue of a (device, stream).
    """

    launch: IntArray
    queue: IntArray
    start_ns: IntArray
    end_ns: IntArray
    queues: dict[tuple[int, int], int]


class Waits(NamedTuple):
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
    told: set[int] = field(default_factory=set[int])


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
        if barrier and queue not in barrier.told:
            barrier.told.add(queue)
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


def waits_of(trace: KinetoTrace, work: DeviceWork) -> Waits:
    """Walk over the calls in order of time. O((calls + launches) log)."""
    launch = trace.launch
    if not len(launch):
        return Waits(Edges.empty(), 0, 0, 0)
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
    return Waits(Edges(pairs[:, 0], pairs[:, 1]), counts[0], counts[1], walk.contradicted)


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
