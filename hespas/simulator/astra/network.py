"""ASTRA-sim's analytical networks with and without congestion, the matching of messages, and remote memory.

Bandwidths of network.yml are GiB/s: B [bytes/ns] = bandwidth x 2^30 / 10^9.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.simulator.astra.configuration import Backend, MemoryConfig, NetworkConfig, Topology
from hespas.simulator.astra.events import Callback, EventQueue, Timers

if TYPE_CHECKING:
    from typing import TypeAlias

__all__ = [
    "COLLECTIVE_TAGS",
    "TAG_SPACE",
    "AwareNetwork",
    "EmptyNetwork",
    "Mailbox",
    "MessageChannel",
    "MessageKey",
    "MessageNetwork",
    "RemoteMemory",
    "UnawareNetwork",
    "checked",
    "hops_between",
    "tag_of_stream",
]


_LONGEST_NS = float(1 << 62)


def checked(network: NetworkConfig, backend: Backend) -> NetworkConfig:
    """Return the network unchanged if ASTRA-sim can run it. Raises ``FormatError`` for a dimension without
    ranks or bandwidth, and ``UnsupportedError`` for a shape on which ASTRA-sim's ``backend`` aborts.
    """
    for key, values, least in (
        ("npus_count", network.npus, 2),
        ("bandwidth", network.bandwidth_gib_per_s, 0),
    ):
        for dimension, value in enumerate(values):
            if value < least or not value:
                raise FormatError(
                    f"{key} of dimension {dimension} is {value:g}", path=network.path, position=key,
                    hint=f"use {'a value of at least 2' if least else 'a value above 0'}",
                )  # fmt: skip
    if backend == "aware":
        fault = ""
        if len(network.npus) != 1:
            fault = f"supports one dimension, this network has {len(network.npus)}"
        elif network.topology[0] == "Ring" and network.npus[0] == 2:
            fault = "aborts on a ring of 2"
        if fault:
            raise UnsupportedError(
                f"the congestion-aware backend {fault}", code="ET032", path=network.path, position="topology",
                hint="use the congestion-unaware backend, or another network of one dimension",
            )  # fmt: skip
    return network


def _bytes_per_ns(gib_per_s: float) -> float:
    return gib_per_s * (1 << 30) / 1_000_000_000


def hops_between(topology: Topology, ranks: int, source: int, target: int) -> int:
    """Return the number of links between two coordinates of one dimension."""
    if topology == "Ring":
        distance = (target - source) % ranks
        return min(distance, ranks - distance)
    return 1 if topology == "FullyConnected" else 2


class MessageNetwork(Protocol):
    """Network that carries messages. It calls ``arrived`` with ``argument`` when the last byte arrives."""

    def send(self, source: int, target: int, size: int, arrived: Callback, argument: object) -> None:
        """Send a message now."""
        ...


class UnawareNetwork:
    """Network without congestion. A message takes floor(hops x latency + size / bandwidth), whatever other
    messages are sent.

    If source and target differ in several dimensions, only the first of these dimensions counts.
    """

    def __init__(self, network: NetworkConfig, queue: EventQueue) -> None:
        self._queue = queue
        self._strides = [prod(network.npus[:dim]) for dim in range(len(network.npus))]
        self._bytes_per_ns = [_bytes_per_ns(bandwidth) for bandwidth in network.bandwidth_gib_per_s]
        self._network = network
        self._delays: dict[tuple[int, int, int], int] = {}

    def path(self, source: int, target: int) -> tuple[int, int]:
        """Return the dimension that is charged for a message, and its number of hops."""
        for dim, (size, stride) in enumerate(zip(self._network.npus, self._strides, strict=True)):
            here, there = source // stride % size, target // stride % size
            if here != there:
                return dim, hops_between(self._network.topology[dim], size, here, there)
        raise _to_itself(source)

    def paths(self, sources: IntArray, targets: IntArray) -> IntArray:
        """Return a number for the dimension and hops of each message; -1 for a message from a rank to
        itself.
        """
        path = np.full(len(sources), -1, np.int64)
        for dim in reversed(range(len(self._strides))):
            size, stride = self._network.npus[dim], self._strides[dim]
            ahead = (targets // stride - sources // stride) % size
            hops = np.ones_like(ahead)
            if self._network.topology[dim] == "Ring":
                hops = np.minimum(ahead, size - ahead)
            path = np.where(ahead > 0, hops * len(self._strides) + dim, path)
        return path

    def along(self, path: tuple[int, int], size: int) -> int:
        """Return the time of a message on a path [ns]."""
        dim, hops = path
        key = (dim, hops, size)
        delay_ns = self._delays.get(key)
        if delay_ns is None:
            time_ns = hops * self._network.latency_ns[dim] + float(size) / self._bytes_per_ns[dim]
            delay_ns = self._delays[key] = _whole(time_ns, size)
        return delay_ns

    def delay_ns(self, source: int, target: int, size: int) -> int:
        """Return the time from the send of a message to its arrival."""
        return self.along(self.path(source, target), size)

    def send(self, source: int, target: int, size: int, arrived: Callback, argument: object) -> None:
        """Send a message now."""
        queue = self._queue
        queue.enter(queue.now_ns + self.along(self.path(source, target), size), arrived, argument)


def _to_itself(rank: int) -> UnsupportedError:
    return UnsupportedError(
        f"rank {rank} sends a message to itself: this network of ASTRA-sim aborts",
        code="ET014", hint="leave messages to the own rank out of the trace",
    )  # fmt: skip


def _whole(time_ns: float, size: int) -> int:
    if not time_ns < _LONGEST_NS:
        raise UnsupportedError(
            f"a message of {size:,} bytes takes {time_ns:g} ns, which overflows a clock of 64 bits",
            hint="check bandwidth and latency of the network, and the sizes in the trace",
        )
    return int(time_ns)


class EmptyNetwork(UnawareNetwork):
    """Network with congestion in which every link is free. A message takes floor(latency + size / B) per
    hop.
    """

    def along(self, path: tuple[int, int], size: int) -> int:
        """Return the time of a message on a path [ns]."""
        dim, hops = path
        return hops * super().along((dim, 1), size)


class _MessageInFlight:
    """Message that is being sent. ``route`` lists its remaining links; the next link is last."""

    __slots__ = ("argument", "arrived", "route", "size")

    def __init__(self, size: int, route: list[_DirectedLink], arrived: Callback, argument: object) -> None:
        self.size, self.route, self.arrived, self.argument = size, route, arrived, argument


class _DirectedLink:
    """Link in one direction, which carries one message at a time in order of arrival.

    A message occupies the link for floor(size / bandwidth) and arrives at its end after floor(latency + size
    / bandwidth).
    """

    __slots__ = ("_busy", "_bytes_per_ns", "_latency_ns", "_queue", "_waiting")

    def __init__(self, queue: EventQueue, bytes_per_ns: float, latency_ns: float) -> None:
        self._queue, self._bytes_per_ns, self._latency_ns = queue, bytes_per_ns, latency_ns
        self._waiting: deque[_MessageInFlight] = deque()
        self._busy = False

    def carry(self, message: _MessageInFlight) -> None:
        """Send a message over the link, after the messages that wait already."""
        if self._busy:
            self._waiting.append(message)
        else:
            self._start(message)

    def _start(self, message: _MessageInFlight) -> None:
        self._busy = True
        queue = self._queue
        serial_ns = float(message.size) / self._bytes_per_ns
        at_end = queue.now_ns + _whole(self._latency_ns + serial_ns, message.size)
        queue.enter(at_end, _at_next_device, message)
        queue.enter(queue.now_ns + int(serial_ns), self._freed, None)

    def _freed(self, _: None) -> None:
        self._busy = False
        if self._waiting:
            self._start(self._waiting.popleft())


def _at_next_device(message: _MessageInFlight) -> None:
    if message.route:
        message.route.pop().carry(message)
    else:
        message.arrived(message.argument)


class AwareNetwork:
    """Network of one dimension with congestion. Each device on the route receives the whole message before it
    forwards it, and each directed link serves messages in order of arrival.

    A ring sends along the shorter direction (ascending if both are equal). A switch is a device with a link
    from and to each rank, so a message passes two links.
    """

    def __init__(self, network: NetworkConfig, queue: EventQueue) -> None:
        self._queue = queue
        self._topology, self._ranks = network.topology[0], network.npus[0]
        self._bytes_per_ns = _bytes_per_ns(network.bandwidth_gib_per_s[0])
        self._latency_ns = network.latency_ns[0]
        self._links: dict[tuple[int, int], _DirectedLink] = {}
        self._routes: dict[tuple[int, int], list[_DirectedLink]] = {}

    def _link(self, source: int, target: int) -> _DirectedLink:
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = _DirectedLink(
                self._queue, self._bytes_per_ns, self._latency_ns
            )
        return link

    def _route(self, source: int, target: int) -> list[_DirectedLink]:
        """Return the links from one rank to another in reverse order: the first link is last."""
        if self._topology == "Switch":  # the only network with messages to the own rank
            switch = self._ranks
            return [self._link(switch, target), self._link(source, switch)]
        if source == target:
            raise _to_itself(source)
        if self._topology == "FullyConnected":
            return [self._link(source, target)]
        ahead = (target - source) % self._ranks
        step = -1 if self._ranks - ahead < ahead else 1
        ranks = [(source + step * hop) % self._ranks for hop in range(min(ahead, self._ranks - ahead) + 1)]
        return [self._link(here, there) for here, there in pairwise(ranks)][::-1]

    def send(self, source: int, target: int, size: int, arrived: Callback, argument: object) -> None:
        """Send a message now."""
        route = self._routes.get((source, target))
        if route is None:
            route = self._routes[source, target] = self._route(source, target)
        message = _MessageInFlight(size, route[:-1], arrived, argument)
        route[-1].carry(message)


TAG_SPACE = 500_000_000
"""Modulus of message tags; tags of collectives follow them."""

COLLECTIVE_TAGS = TAG_SPACE


def tag_of_stream(stream_id: int) -> int:
    """Return the message tag of one chunk of a collective. In ASTRA-sim, stream ids are 32-bit integers."""
    wrapped = (stream_id + (1 << 31)) % (1 << 32) - (1 << 31)
    remainder = abs(wrapped) % TAG_SPACE
    return COLLECTIVE_TAGS + (remainder if wrapped >= 0 else -remainder)


class MessageKey(NamedTuple):
    """Properties by which the send and the receive of a message are matched."""

    tag: int
    source: int
    target: int
    size: int


class MessageChannel:
    """Queue of unmatched messages with one key (tag, source, target and size).

    ``arrived`` is the number of messages that arrived before their receive was posted. ``waiting`` lists the
    receives that were posted before their message arrived.
    """

    __slots__ = ("arrived", "waiting")

    def __init__(self) -> None:
        self.arrived = 0
        self.waiting: deque[tuple[Callback, object]] = deque()


class Mailbox:
    """Sends and receives of a run. As in ASTRA-sim, the k-th send is matched with the k-th receive of the
    same tag, source, target and size.
    """

    __slots__ = ("_channels", "_network", "_queue")

    def __init__(self, network: MessageNetwork, queue: EventQueue) -> None:
        self._network, self._queue = network, queue
        self._channels: dict[tuple[int, int, int, int], MessageChannel] = {}

    def _channel(self, key: tuple[int, int, int, int]) -> MessageChannel:
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = MessageChannel()
        return channel

    def send(
        self, key: tuple[int, int, int, int], sent: Callback | None = None, argument: object = None
    ) -> None:
        """Send a message. ``sent`` is called when it arrives, before the callback of its receive."""
        channel = self._channel(key)
        self._network.send(key[1], key[2], key[3], self._arrive, (channel, sent, argument))

    def _arrive(self, message: tuple[MessageChannel, Callback | None, object]) -> None:
        channel, sent, argument = message
        received = channel.waiting.popleft() if channel.waiting else None
        if sent is not None:
            sent(argument)
        if received is None:
            channel.arrived += 1
        else:
            received[0](received[1])

    def receive(self, key: tuple[int, int, int, int], received: Callback, argument: object) -> None:
        """Receive a message. ``received`` is called when it arrives; if it has arrived already, as a new
        event.
        """
        channel = self._channel(key)
        if channel.arrived:
            channel.arrived -= 1
            self._queue.enter(self._queue.now_ns, received, argument)
        else:
            channel.waiting.append((received, argument))

    def unreceived(self) -> list[MessageKey]:
        """Return the keys of messages that arrived and were never received."""
        return [MessageKey(*key) for key, channel in self._channels.items() if channel.arrived]


_Request: TypeAlias = "tuple[Timers, int, Callback, object, int]"


class RemoteMemory:
    """Remote memories of a system: one per rank (``PER_NPU``), one per node (``PER_NODE``), or one pool.

    A transaction takes the latency plus floor(bytes / bandwidth). Memories of nodes and pools serve one
    transaction at a time.
    """

    __slots__ = ("_busy", "_config", "_waiting")

    def __init__(self, config: MemoryConfig | None) -> None:
        self._config = config
        self._busy: set[int] = set()
        self._waiting: dict[int, deque[_Request]] = {}

    def access(self, rank: int, timers: Timers, size: int, done: Callback, argument: object) -> None:
        """Load or store ``size`` bytes for a rank as soon as its memory is free, and call ``done``
        afterwards.

        Raises ``UnsupportedError`` if the system has no remote memory, ``FormatError`` if its file does not
        describe the rank's memory.
        """
        config = self._config
        if config is None or not config.has_remote_memory:
            raise UnsupportedError(
                f"rank {rank} uses remote memory, but the system has none", code="ET027",
                path=config.path if config else None,
                hint="state a memory file whose memory-type is not NO_MEMORY_EXPANSION",
            )  # fmt: skip
        if not config.bandwidth:
            raise FormatError(
                "remote-mem-bw is missing", path=config.path, position="remote-mem-bw",
                hint="state it in whole bytes per ns",
            )  # fmt: skip
        per_node = config.memory_type == "PER_NODE_MEMORY_EXPANSION"
        if per_node and rank >= config.nodes * config.npus_per_node:
            raise FormatError(
                f"{config.nodes} nodes of {config.npus_per_node} NPUs do not include rank {rank}",
                path=config.path, position="num-nodes", hint="state num-nodes and num-npus-per-node to match",
            )  # fmt: skip
        if config.memory_type == "PER_NPU_MEMORY_EXPANSION":
            timers.after(self._time_ns(size), done, argument)
            return
        unit = rank // config.npus_per_node if per_node else 0
        request = (timers, size, done, argument, unit)
        if unit in self._busy:
            self._waiting.setdefault(unit, deque()).append(request)
        else:
            self._start(request)

    def _time_ns(self, size: int) -> int:
        assert self._config is not None, "checked by access"
        return self._config.latency_ns + int(float(size) / self._config.bandwidth)

    def _start(self, request: _Request) -> None:
        timers, size, done, argument, unit = request
        self._busy.add(unit)
        timers.after(self._time_ns(size), done, argument)
        timers.after(self._time_ns(size), self._freed, unit)

    def _freed(self, unit: int) -> None:
        waiting = self._waiting.get(unit)
        if waiting:
            self._start(waiting.popleft())
        else:
            self._busy.discard(unit)
