"""What rocprofv3 records, from whichever file, as a :class:`GpuTrace`: one part for each process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.converters.gpu_trace.trace import DeviceWork, GpuTrace, Launches, Ranges, listed
from hespas.converters.linking import match_rows
from hespas.graph import OpClass, StringTableBuilder
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import FormatError

__all__ = ["Agent", "Agents", "Assembly", "Calls", "Work"]

_MOST_PROCESSES = 1 << 10
_LAUNCHING = re.compile(r"(?:^|_)(?:hip|hsa)_", re.IGNORECASE)
"""``HIP_RUNTIME_API_EXT``, ``HSA_CORE_API``: categories of calls that are no operation of the program."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A CPU or a GPU. ``order`` counts those of a kind."""

    is_gpu: bool
    order: int
    name: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Work:
    """Kernels or copies of one process, -1 for unknown. ``target`` and ``source`` are agents; of a kernel
    both are the one that runs it. ``range_row`` is the range that rocprofv3 names as cause.
    """

    start_ns: IntArray
    end_ns: IntArray
    target: IntArray
    source: IntArray
    stream: IntArray
    queue: IntArray
    stack: IntArray
    parent_stack: IntArray
    name_row: IntArray
    bytes_moved: IntArray
    range_row: IntArray

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Calls:
    """Calls and ranges on the host of one process. ``label`` and ``category`` are places in ``texts``."""

    thread: IntArray
    start_ns: IntArray
    end_ns: IntArray
    stack: IntArray
    label: IntArray
    category: IntArray
    texts: Sequence[str]

    def launching(self) -> BoolArray:
        """Which are calls of the runtime, not ranges of the program."""
        of_text = np.array([bool(_LAUNCHING.search(text)) for text in self.texts], np.bool_)
        if not len(of_text):
            return np.zeros(len(self.start_ns), np.bool_)
        return (self.category >= 0) & of_text[np.maximum(self.category, 0)]


@dataclass(slots=True)
class Agents:
    """The agents of one process by their number in the file. ``node`` tells machines apart."""

    node: int
    by_number: dict[int, Agent] = field(default_factory=dict[int, Agent])


@dataclass(slots=True)
class Assembly:
    """Collects processes of the file ``path``."""

    path: str
    strings: StringTableBuilder = field(default_factory=StringTableBuilder)
    texts: dict[str, int] = field(default_factory=dict[str, int])
    devices: dict[str, int] = field(default_factory=dict[str, int])
    work: list[DeviceWork] = field(default_factory=list[DeviceWork])
    launches: list[Launches] = field(default_factory=list[Launches])
    ranges: list[Ranges] = field(default_factory=list[Ranges])
    by_queue: int = 0
    _range_count: int = 0
    _process_count: int = 0

    def add(self, pid: int, agents: Agents, kernels: Work, copies: Work, calls: Calls) -> None:
        """One process. Raises ``FormatError`` where there are more than a recording can have."""
        self._process_count += 1
        if self._process_count > _MOST_PROCESSES:
            raise FormatError(
                f"there are more than {_MOST_PROCESSES:,} processes",
                path=self.path,
                position=f"process {self._process_count}",
                hint="record again",
            )
        process = (self._process_count << 24) + (pid & 0xFFFFFF)
        self._add_calls(process, calls)
        stacks = calls.stack
        use_stream = any(bool((part.stream > 0).any()) for part in (kernels, copies))
        self.by_queue += 0 if use_stream else len(kernels)
        for part, category in ((kernels, "kernel"), (copies, "gpu_memcpy")):
            self.work.append(self._work(process, agents, part, category, stacks, use_stream=use_stream))

    def _add_calls(self, process: int, calls: Calls) -> None:
        api = calls.launching()
        own = np.flatnonzero(~api)
        place = np.full(len(api), -1, np.int64)
        place[own] = self._range_count + np.arange(len(own))
        self._range_count += len(own)
        thread = (process << 24) + (calls.thread & 0xFFFFFF)
        whole = np.full(len(api), process, np.int64)
        self.launches.append(
            Launches(
                process=whole,
                thread=thread,
                start_ns=calls.start_ns,
                correlation=calls.stack,
                range_place=place,
            )
        )
        used = np.unique(calls.label[own])
        known = used[used >= 0]
        numbers = np.full(len(calls.texts) + 1, -1, np.int64)
        numbers[known] = [self.texts.setdefault(calls.texts[text], len(self.texts)) for text in listed(known)]
        self.ranges.append(
            Ranges(
                process=whole[own],
                thread=thread[own],
                start_ns=calls.start_ns[own],
                end_ns=np.maximum(calls.end_ns[own], calls.start_ns[own]),
                text=numbers[calls.label[own]],
                nests=np.ones(len(own), np.bool_),
            )
        )

    def _work(
        self, process: int, agents: Agents, part: Work, category: str, stacks: IntArray, *, use_stream: bool
    ) -> DeviceWork:
        count = len(part)
        zeros = np.zeros(count, np.int64)
        known = match_rows((np.zeros(len(stacks), np.int64), stacks), (zeros, part.stack)) >= 0
        gpu, device, op_class = self._placed(agents, part)
        return DeviceWork(
            process=np.full(count, process, np.int64),
            gpu=gpu,
            device=device,
            stream=part.stream if use_stream else np.where(part.queue >= 0, part.queue, part.stream),
            start_ns=part.start_ns,
            end_ns=part.end_ns,
            name_row=part.name_row,
            category_row=np.full(count, self.strings.add(category), np.int64),
            bytes_moved=part.bytes_moved,
            correlation=np.where(known, part.stack, part.parent_stack),
            node=np.full(count, -1, np.int64),
            range_row=part.range_row,
            op_class=op_class if category == "gpu_memcpy" else zeros,
        )

    def _placed(self, agents: Agents, part: Work) -> tuple[IntArray, IntArray, IntArray]:
        """GPU, name of the device and class of a copy, from the agents at both ends; the target's where both
        are GPUs.
        """
        pairs, codes = np.unique(np.stack((part.target, part.source)), axis=1, return_inverse=True)
        found = [
            self._one(agents, agents.by_number.get(target), agents.by_number.get(source))
            for target, source in zip(listed(pairs[0]), listed(pairs[1]), strict=True)
        ]
        columns: IntArray = np.array(found, np.int64).reshape(-1, 3)[codes.reshape(-1)]
        return columns[:, 0], columns[:, 1], columns[:, 2]

    def _one(self, agents: Agents, target: Agent | None, source: Agent | None) -> tuple[int, int, int]:
        ends = [end for end in (target, source) if end is not None]
        gpus = [end for end in ends if end.is_gpu]
        name = gpus[0].name if gpus else ""
        place = self.devices.setdefault(name, len(self.devices))
        gpu = (agents.node << 20) + gpus[0].order if gpus else -1
        of_host = OpClass.MEMORY if len(gpus) < len(ends) else OpClass.MOVE
        return gpu, place, of_host if len(ends) == 2 else OpClass.UNKNOWN

    def trace(self) -> GpuTrace:
        """Everything that was added."""
        return GpuTrace(
            strings=self.strings,
            devices=tuple(self.devices),
            work=DeviceWork.joined(self.work),
            launches=Launches.joined(self.launches),
            ranges=Ranges.joined(self.ranges),
            texts=list(self.texts),
        )
