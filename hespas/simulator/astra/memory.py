"""Remote memory: latency plus floor(bytes / bandwidth), one transaction at a time per node, or of all."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hespas.graph.errors import FormatError, UnsupportedError
from hespas.simulator.astra.configuration import MemoryConfig
from hespas.simulator.astra.events import Callback, Timers

if TYPE_CHECKING:
    from typing import TypeAlias

__all__ = ["RemoteMemory"]

_Request: TypeAlias = "tuple[Timers, int, Callback, object, int]"


class RemoteMemory:
    """The memories of a system: one a rank (``PER_NPU``), one for several (``PER_NODE``), or one pool."""

    __slots__ = ("_busy", "_config", "_waiting")

    def __init__(self, config: MemoryConfig | None) -> None:
        self._config = config
        self._busy: set[int] = set()
        self._waiting: dict[int, deque[_Request]] = {}

    def access(self, rank: int, timers: Timers, size: int, done: Callback, argument: object) -> None:
        """Load or store ``size`` bytes for a rank, now or when its memory is free.

        Raises ``UnsupportedError`` where the system has no remote memory, ``FormatError`` where its file does
        not describe that of the rank.
        """
        config = self._config
        if config is None or not config.has_remote_memory:
            raise UnsupportedError(
                f"rank {rank} loads or stores remote memory, and the system has none", code="ET027",
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
                f"{config.nodes} nodes of {config.npus_per_node} NPUs do not hold rank {rank}",
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
        assert self._config is not None, "asked for by access"
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
