"""ASTRA-sim's analytical networks: when a message arrives, without congestion and with it.

Bandwidths of network.yml are GiB/s: B [bytes/ns] = bandwidth x 2^30 / 10^9.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np

from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.simulator.astra.configuration import NetworkConfig, Topology
from hespas.simulator.astra.events import Callback, EventQueue
from hespas.simulator.astra.options import Backend

__all__ = ["AwareNetwork", "EmptyNetwork", "Network", "UnawareNetwork", "checked", "hops_between"]

_LONGEST_NS = float(1 << 62)


def checked(network: NetworkConfig, backend: Backend) -> NetworkConfig:
    """Return the network if ASTRA-sim's backend starts on it. Raises ``FormatError`` for a dimension without
    ranks or bandwidth, and ``UnsupportedError`` for a shape that the backend aborts on.
    """
    for key, values, least in (
        ("npus_count", network.npus, 2),
        ("bandwidth", network.bandwidth_gib_per_s, 0),
    ):
        for dimension, value in enumerate(values):
            if value < least or not value:
                raise FormatError(
                    f"{key} of dimension {dimension} is {value:g}", path=network.path, position=key,
                    hint=f"ASTRA-sim needs {'at least 2' if least else 'more than 0'}",
                )  # fmt: skip
    if backend == "aware":
        _check_aware(network)
    return network


def _check_aware(network: NetworkConfig) -> None:
    fault = ""
    if len(network.npus) != 1:
        fault = f"takes one dimension, this network has {len(network.npus)}"
    elif network.topology[0] == "Ring" and network.npus[0] == 2:
        fault = "aborts on a ring of 2, which it would join twice"
    if fault:
        raise UnsupportedError(
            f"the congestion-aware backend {fault}", code="ET032", path=network.path, position="topology",
            hint="use the congestion-unaware backend, or another network of one dimension",
        )  # fmt: skip


def _bytes_per_ns(gib_per_s: float) -> float:
    return gib_per_s * (1 << 30) / 1_000_000_000


def hops_between(topology: Topology, ranks: int, source: int, target: int) -> int:
    """Links that a message passes in one dimension, by the coordinates of its ends."""
    if topology == "Ring":
        distance = (target - source) % ranks
        return min(distance, ranks - distance)
    return 1 if topology == "FullyConnected" else 2


class Network(Protocol):
    """Carries messages: ``arrived`` is made with ``argument`` when the last byte is there."""

    def send(self, source: int, target: int, size: int, arrived: Callback, argument: object) -> None:
        """Send a message now."""
        ...


class UnawareNetwork:
    """Without congestion: floor(hops x latency + size / B), whatever else is under way.

    Of several dimensions, only the first in which the ends differ is charged.
    """

    def __init__(self, network: NetworkConfig, queue: EventQueue) -> None:
        self._queue = queue
        self._strides = [prod(network.npus[:dim]) for dim in range(len(network.npus))]
        self._bytes_per_ns = [_bytes_per_ns(each) for each in network.bandwidth_gib_per_s]
        self._network = network
        self._delays: dict[tuple[int, int, int], int] = {}

    def path(self, source: int, target: int) -> tuple[int, int]:
        """The dimension that is charged, and how many hops."""
        for dim, (size, stride) in enumerate(zip(self._network.npus, self._strides, strict=True)):
            here, there = source // stride % size, target // stride % size
            if here != there:
                return dim, hops_between(self._network.topology[dim], size, here, there)
        raise _to_itself(source)

    def paths(self, sources: IntArray, targets: IntArray) -> IntArray:
        """A number for the path of each message, by its dimension and hops; -1 for one to the own rank."""
        found = np.full(len(sources), -1, np.int64)
        for dim in reversed(range(len(self._strides))):
            size, stride = self._network.npus[dim], self._strides[dim]
            ahead = (targets // stride - sources // stride) % size
            hops = np.ones_like(ahead)
            if self._network.topology[dim] == "Ring":
                hops = np.minimum(ahead, size - ahead)
            found = np.where(ahead > 0, hops * len(self._strides) + dim, found)
        return found

    def along(self, path: tuple[int, int], size: int) -> int:
        """The time of a message on a path [ns]."""
        dim, hops = path
        key = (dim, hops, size)
        found = self._delays.get(key)
        if found is None:
            time_ns = hops * self._network.latency_ns[dim] + float(size) / self._bytes_per_ns[dim]
            found = self._delays[key] = _whole(time_ns, size)
        return found

    def delay_ns(self, source: int, target: int, size: int) -> int:
        """The time from sending to arrival."""
        return self.along(self.path(source, target), size)

    def send(self, source: int, target: int, size: int, arrived: Callback, argument: object) -> None:
        """Send a message now."""
        queue = self._queue
        queue.enter(queue.now_ns + self.along(self.path(source, target), size), arrived, argument)


def _to_itself(rank: int) -> UnsupportedError:
    return UnsupportedError(
        f"rank {rank} sends a message to itself, on which this network of ASTRA-sim aborts",
        code="ET014", hint="leave messages to the own rank out of the trace",
    )  # fmt: skip


def _whole(time_ns: float, size: int) -> int:
    if not time_ns < _LONGEST_NS:
        raise UnsupportedError(
            f"a message of {size:,} bytes takes {time_ns:g} ns, more than a clock of 64 bits counts",
            hint="check bandwidth and latency of the network, and the sizes in the trace",
        )
    return int(time_ns)


class EmptyNetwork(UnawareNetwork):
    """With congestion, where each message finds its links free: each of its hops takes floor(latency +
    size / B).
    """

    def along(self, path: tuple[int, int], size: int) -> int:
        """The time of a message on a path [ns]."""
        dim, hops = path
        return hops * super().along((dim, 1), size)


class _Message:
    """A message under way: ``route`` are the links still before it, the next one last."""

    __slots__ = ("argument", "arrived", "route", "size")

    def __init__(self, size: int, route: list[_Link], arrived: Callback, argument: object) -> None:
        self.size, self.route, self.arrived, self.argument = size, route, arrived, argument


class _Link:
    """One directed link: a message occupies it for floor(size / B) and is at its end after
    floor(latency + size / B); others wait in order.
    """

    __slots__ = ("_busy", "_bytes_per_ns", "_latency_ns", "_queue", "_waiting")

    def __init__(self, queue: EventQueue, bytes_per_ns: float, latency_ns: float) -> None:
        self._queue, self._bytes_per_ns, self._latency_ns = queue, bytes_per_ns, latency_ns
        self._waiting: deque[_Message] = deque()
        self._busy = False

    def carry(self, message: _Message) -> None:
        """Transmit a message, after those that wait."""
        if self._busy:
            self._waiting.append(message)
        else:
            self._start(message)

    def _start(self, message: _Message) -> None:
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


def _at_next_device(message: _Message) -> None:
    if message.route:
        message.route.pop().carry(message)
    else:
        message.arrived(message.argument)


class AwareNetwork:
    """With congestion: store and forward over directed links, first come first served. One dimension only.

    A ring sends the shorter way (the ascending one where both are equal); a switch is a device with a link
    from and to each rank, so that a message is put on a link twice.
    """

    def __init__(self, network: NetworkConfig, queue: EventQueue) -> None:
        self._queue = queue
        self._topology, self._ranks = network.topology[0], network.npus[0]
        self._bytes_per_ns = _bytes_per_ns(network.bandwidth_gib_per_s[0])
        self._latency_ns = network.latency_ns[0]
        self._links: dict[tuple[int, int], _Link] = {}
        self._routes: dict[tuple[int, int], list[_Link]] = {}

    def _link(self, source: int, target: int) -> _Link:
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = _Link(self._queue, self._bytes_per_ns, self._latency_ns)
        return found

    def _route(self, source: int, target: int) -> list[_Link]:
        """The links from one rank to another, the first one last."""
        if self._topology == "Switch":  # the only network that carries a message to its sender
            switch = self._ranks
            return [self._link(switch, target), self._link(source, switch)]
        if source == target:
            raise _to_itself(source)
        if self._topology == "FullyConnected":
            return [self._link(source, target)]
        ahead = (target - source) % self._ranks
        step = -1 if self._ranks - ahead < ahead else 1
        places = [(source + step * hop) % self._ranks for hop in range(min(ahead, self._ranks - ahead) + 1)]
        return [self._link(here, there) for here, there in pairwise(places)][::-1]

    def send(self, source: int, target: int, size: int, arrived: Callback, argument: object) -> None:
        """Send a message now."""
        route = self._routes.get((source, target))
        if route is None:
            route = self._routes[source, target] = self._route(source, target)
        message = _Message(size, route[:-1], arrived, argument)
        route[-1].carry(message)
