"""Messages matched as ASTRA-sim does it: by tag, source, target and size, and by their number among those."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hespas.simulator.astra.events import Callback, EventQueue
from hespas.simulator.astra.network import Network

__all__ = ["COLLECTIVE_TAGS", "TAG_SPACE", "Channel", "Mailbox", "MessageKey", "tag_of_stream"]

TAG_SPACE = 500_000_000
"""Tags of messages count modulo this; those of collectives lie behind them."""
COLLECTIVE_TAGS = TAG_SPACE


def tag_of_stream(stream_id: int) -> int:
    """Return the tag of the messages of one chunk of a collective. Ids are integers of 32 bits there."""
    wrapped = (stream_id + (1 << 31)) % (1 << 32) - (1 << 31)
    remainder = abs(wrapped) % TAG_SPACE
    return COLLECTIVE_TAGS + (remainder if wrapped >= 0 else -remainder)


class MessageKey(NamedTuple):
    """What both ends of a message must say alike."""

    tag: int
    source: int
    target: int
    size: int


class Channel:
    """Messages of one key: ``arrived`` before anyone asked for them, and receives that wait."""

    __slots__ = ("arrived", "waiting")

    def __init__(self) -> None:
        self.arrived = 0
        self.waiting: deque[tuple[Callback, object]] = deque()


class Mailbox:
    """All messages of a run. The k-th send of a key meets the k-th receive: they arrive in the order sent."""

    __slots__ = ("_channels", "_network", "_queue")

    def __init__(self, network: Network, queue: EventQueue) -> None:
        self._network, self._queue = network, queue
        self._channels: dict[tuple[int, int, int, int], Channel] = {}

    def _channel(self, key: tuple[int, int, int, int]) -> Channel:
        found = self._channels.get(key)
        if found is None:
            found = self._channels[key] = Channel()
        return found

    def send(
        self, key: tuple[int, int, int, int], sent: Callback | None = None, argument: object = None
    ) -> None:
        """Send a message; ``sent`` is made when it arrives, before its receive."""
        channel = self._channel(key)
        self._network.send(key[1], key[2], key[3], self._arrive, (channel, sent, argument))

    def _arrive(self, message: tuple[Channel, Callback | None, object]) -> None:
        channel, sent, argument = message
        received = channel.waiting.popleft() if channel.waiting else None
        if sent is not None:
            sent(argument)
        if received is None:
            channel.arrived += 1
        else:
            received[0](received[1])

    def receive(self, key: tuple[int, int, int, int], received: Callback, argument: object) -> None:
        """Ask for a message; ``received`` is made when it arrives, or as an event of its own where it has."""
        channel = self._channel(key)
        if channel.arrived:
            channel.arrived -= 1
            self._queue.enter(self._queue.now_ns, received, argument)
        else:
            channel.waiting.append((received, argument))

    def unreceived(self) -> list[MessageKey]:
        """Keys of messages that arrived and nobody asked for."""
        return [MessageKey(*key) for key, channel in self._channels.items() if channel.arrived]
