"""Memory use of a rank: its peak, the time of the peak, and the buffers at that time.

A value lives from the start of its producer to the end of its last reader. Parameters and constants live
throughout. If a program states its results, their memory also exists from the beginning. Values that a loop
only reads live until its last iteration has ended. Values made in a loop count once, because each iteration
overwrites the values of the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import NamedTuple, Self

import numpy as np

from hespas.files.limits import without_collector
from hespas.graph import WHOLE_JOB, OpClass, OpGraph, Timeline, Workload
from hespas.graph.columns import FloatArray, IntArray, highest_rows
from hespas.graph.workload import StepFacts, step_facts
from hespas.hardware import Device
from hespas.simulator.memory.buffers import Buffer, Lifetimes, Moments, buffers_of, in_order, in_time
from hespas.simulator.memory.values import (
    MemoryValue,
    ProgramValues,
    ValueKind,
    donated_to,
    end_of,
    values_of,
)

__all__ = [
    "Allocations",
    "LiveValue",
    "MemoryUse",
    "ProgramBytes",
    "RankMemory",
    "capacity_of",
    "fits_memory",
    "memory_by_class",
    "memory_use",
]


_LISTED, _MOST_SAMPLES = 10, 1_000
_CONTENTS = {
    ValueKind.PARAMETER: "parameters", ValueKind.CONSTANT: "constants", ValueKind.OUTPUT: "results"
}  # fmt: skip
"""Contents of memory by kind of buffer; temporaries are divided by operation class."""


class ProgramBytes(NamedTuple):
    """Bytes of a program whose parameters are not nodes of its graph.

    ``parameters`` and ``results`` are the sizes of all parameters and results. ``donated`` is the size of
    parameters that results overwrite. ``peak`` is the stated peak memory of a rank, and ``device`` the
    memory that its device must have (NaN: not stated).
    """

    parameters: float
    results: float
    donated: float
    peak: float = nan
    device: float = nan


class Allocations(NamedTuple):
    """Buffers in the order of their allocation; columns of shape ``(allocations,)``.

    ``node`` is the node that writes the buffer first; ``-1 - i`` is memory without a node that has the name
    ``others[i]``. ``first`` and ``end`` are positions in the order of starts and ends of nodes: the buffer is
    allocated at ``first`` and freed at ``end``, before others are allocated there. An ``end`` after the last
    position is a buffer that is not freed. If the values need more than a stated peak, the sum of the buffers
    exceeds that peak.
    """

    node: IntArray
    size_bytes: FloatArray
    first: IntArray
    end: IntArray
    others: tuple[str, ...] = ()

    @classmethod
    def of_buffers(cls, values: ProgramValues, buffers: list[Buffer], places: int) -> Self:
        """Return the allocations of buffers. ``places`` is the number of positions."""
        rows: list[tuple[int, int, int, float]] = []
        for buffer in buffers:
            if not buffer.inside and buffer.size_bytes > 0:
                lives = [(0, places - 1)] if buffer.reserved else buffer.lives
                node = values.values[buffer.values[0]].node
                rows += [(first, node, last + 1, buffer.size_bytes) for first, last in lives]
        rows.sort()
        firsts, nodes, ends = (np.array([row[column] for row in rows], np.int64) for column in range(3))
        return cls(nodes, np.array([row[3] for row in rows], np.float64), firsts, ends)

    def with_others(self, sizes: Mapping[str, float], places: int) -> Allocations:
        """Return the allocations after memory without a node, which exists throughout."""
        sizes = {name: size for name, size in sizes.items() if size > 0}
        return Allocations(
            node=np.concatenate([-1 - np.arange(len(sizes)), self.node]),
            size_bytes=np.concatenate([list(sizes.values()), self.size_bytes]),
            first=np.concatenate([np.zeros(len(sizes), np.int64), self.first]),
            end=np.concatenate([np.full(len(sizes), places), self.end]),
            others=tuple(sizes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValue:
    """Buffer that is in use at the peak of memory. Name, size and source are the properties of the first
    value in it. ``kind`` is ``parameter``, ``constant``, ``output`` or ``temporary``.
    """

    node: int
    name: str
    op_class: str
    kind: str
    size_bytes: float
    framework: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryUse:
    """Memory of one rank over a step; all sizes in bytes.

    ``peak_bytes`` is reached at the start of ``at_node`` (-1: before any node), at the time ``at_ns`` (NaN:
    times are unknown). It is the sum of ``parameters_bytes``, ``constants_bytes``, ``outputs_bytes`` (results
    that do not overwrite parameters) and ``temporaries_bytes`` (temporaries outside the memory of results and
    donated parameters). ``collectives_bytes`` is the part of the temporaries that communication made.
    ``unlisted_bytes`` is the part of a stated peak that is not in values of nodes: gathered weights,
    workspace, library buffers. It is negative if the values need more than the stated peak.

    ``class_bytes`` splits temporaries by operation class. ``largest`` lists the largest buffers of all kinds.
    ``donated_bytes`` is the size of parameters whose memory results reuse. ``unknown`` counts tensors of
    unknown size and nodes without stated results; if it is not 0, the peak is a lower bound.

    ``held_bytes[i]`` is the memory in use after the ``i``-th start or end of a node, in their order.
    ``held_ns[i]`` is the time of this start or end (empty if times are unknown). ``contents`` divides
    ``held_bytes`` at the positions ``sample``, which include the peak, by kind of content: parameters,
    constants, results, temporaries of each operation class, and buffers without a node. ``allocations`` are
    the buffers that are counted.
    """

    peak_bytes: float
    at_node: int
    at_ns: float
    parameters_bytes: float
    constants_bytes: float
    outputs_bytes: float
    temporaries_bytes: float
    collectives_bytes: float
    donated_bytes: float
    class_bytes: Mapping[str, float]
    largest: tuple[LiveValue, ...]
    unknown: int
    held_bytes: FloatArray
    held_ns: FloatArray
    sample: IntArray
    contents: Mapping[str, FloatArray]
    allocations: Allocations
    unlisted_bytes: float = 0.0

    @property
    def peak_contents(self) -> dict[str, float]:
        """Return the bytes of each kind of content at the peak, without empty ones."""
        parts = {
            "parameters": self.parameters_bytes,
            "constants": self.constants_bytes,
            "results": self.outputs_bytes,
            **{f"temporaries: {name}": size for name, size in self.class_bytes.items()},
            "buffers without a node": self.unlisted_bytes,
        }
        return {name: size for name, size in parts.items() if size}

    @property
    def is_lower_bound(self) -> bool:
        """Return True if some values have an unknown size."""
        return self.unknown > 0


def memory_use(
    graph: OpGraph, moments: Moments | None = None, program_bytes: ProgramBytes | None = None
) -> MemoryUse | None:
    """Return the memory that a program needs; None if no node states its results.

    Nodes run in program order, unless ``moments`` has their times. If parameters are not nodes,
    ``program_bytes`` has their size and the size of the results; both live throughout. Values without readers
    count as results. O((nodes + values) log values).
    """
    if not len(graph.results.values):
        return None
    when = moments or in_order(graph)
    with without_collector():
        values = values_of(graph)
        donated = _mark_results(graph, values)
        buffers = buffers_of(values, Lifetimes(graph, when), donated)
    if program_bytes is None or any(value.kind is ValueKind.PARAMETER for value in values.values):
        return _figures(graph, values, when, buffers, donated)
    use = _figures(
        graph, values, when, [buffer for buffer in buffers if buffer.kind is not ValueKind.OUTPUT], {}
    )
    outputs = max(program_bytes.results - program_bytes.donated, 0.0)
    listed = use.peak_bytes + program_bytes.parameters + outputs
    unlisted = 0.0 if isnan(program_bytes.peak) else program_bytes.peak - listed
    throughout = {
        "parameters": program_bytes.parameters,
        "results": outputs,
        "buffers without a node": unlisted,
    }
    contents = {name: np.full(len(use.sample), size) for name, size in throughout.items() if size} | dict(
        use.contents
    )
    return replace(
        use,
        peak_bytes=listed + unlisted,
        parameters_bytes=program_bytes.parameters,
        outputs_bytes=outputs,
        donated_bytes=program_bytes.donated,
        unlisted_bytes=unlisted,
        unknown=use.unknown if isnan(program_bytes.peak) else 0,
        held_bytes=use.held_bytes + (program_bytes.parameters + outputs + unlisted),
        contents=contents,
        allocations=use.allocations.with_others(throughout, len(use.held_bytes)),
    )


def _mark_results(graph: OpGraph, values: ProgramValues) -> dict[int, int]:
    """Mark the values that the program returns as outputs. If the program does not state its results, these
    are the values without readers. Return a map from results to the donated parameters that they overwrite.
    """
    if values.results is None:
        for value in values.values:
            if value.kind is ValueKind.TEMPORARY and value.slot < 0 and not (value.users or value.until):
                value.kind = ValueKind.OUTPUT
        return {}
    places = donated_to(graph)
    givers = {
        places[value.node]: number
        for number, value in enumerate(values.values)
        if value.kind is ValueKind.PARAMETER and value.node in places
    }
    donated: dict[int, int] = {}
    for position, number in enumerate(values.results):
        if number >= 0 and values.values[number].kind is ValueKind.TEMPORARY:
            values.values[number].kind = ValueKind.OUTPUT
            if position in givers:
                donated[number] = givers[position]
    return donated


def _figures(
    graph: OpGraph, values: ProgramValues, when: Moments, buffers: list[Buffer], donated: dict[int, int]
) -> MemoryUse:
    """Return the memory figures of a finished buffer assignment."""
    held = _held(buffers, int(when.last.max(initial=0)) + 2)
    sample = highest_rows(held, _MOST_SAMPLES)
    at = int(np.argmax(held))
    live = [
        buffer
        for buffer in buffers
        if not buffer.inside and (buffer.reserved or any(start <= at <= end for start, end in buffer.lives))
    ]
    sums = dict.fromkeys(ValueKind, 0.0)
    class_bytes: dict[str, float] = {}
    for buffer in live:
        sums[buffer.kind] += buffer.size_bytes
        if buffer.kind is ValueKind.TEMPORARY:
            name = _class_of(graph, values.values[buffer.values[0]])
            class_bytes[name] = class_bytes.get(name, 0.0) + buffer.size_bytes
    starting = np.flatnonzero(when.start == at)
    largest = sorted(live, key=lambda buffer: -buffer.size_bytes)[:_LISTED]
    return MemoryUse(
        peak_bytes=float(held[at]),
        at_node=int(starting[0]) if len(starting) else -1,
        at_ns=float(when.time_ns[at]) if at < len(when.time_ns) else nan,
        parameters_bytes=sums[ValueKind.PARAMETER],
        constants_bytes=sums[ValueKind.CONSTANT],
        outputs_bytes=sums[ValueKind.OUTPUT],
        temporaries_bytes=sums[ValueKind.TEMPORARY],
        collectives_bytes=class_bytes.get("collective", 0.0) + class_bytes.get("p2p", 0.0),
        donated_bytes=sum(values.values[number].size_bytes for number in donated),
        class_bytes=dict(sorted(class_bytes.items(), key=lambda item: -item[1])),
        largest=tuple(_named(graph, values, buffer) for buffer in largest),
        unknown=values.unknown,
        held_bytes=held,
        held_ns=when.time_ns,
        sample=sample,
        contents=_contents(graph, values, buffers, sample),
        allocations=Allocations.of_buffers(values, buffers, len(held)),
    )


def _held(buffers: list[Buffer], places: int) -> FloatArray:
    """Return the bytes in use at each position in the order of starts and ends of nodes."""
    changes = [0.0] * (places + 1)
    for buffer in buffers:
        if buffer.reserved:
            changes[0] += buffer.size_bytes
        elif not buffer.inside:
            for start, end in buffer.lives:
                changes[start] += buffer.size_bytes
                changes[end + 1] -= buffer.size_bytes
    held: FloatArray = np.cumsum(np.array(changes))[:places]
    return held


def _contents(
    graph: OpGraph, values: ProgramValues, buffers: list[Buffer], sample: IntArray
) -> dict[str, FloatArray]:
    """Return the bytes of each kind of content at the positions ``sample``."""
    lives: dict[str, list[tuple[float, int, int]]] = {}
    last = int(sample[-1]) if len(sample) else 0
    for buffer in buffers:
        content = _CONTENTS.get(buffer.kind)
        if content is None:
            content = f"temporaries: {_class_of(graph, values.values[buffer.values[0]])}"
        if buffer.reserved:
            lives.setdefault(content, []).append((buffer.size_bytes, 0, last))
        elif not buffer.inside:
            lives.setdefault(content, []).extend((buffer.size_bytes, *life) for life in buffer.lives)
    contents: dict[str, FloatArray] = {}
    for content, rows in sorted(lives.items(), key=lambda item: (item[0].startswith("temp"), item[0])):
        sizes, starts, ends = (np.array(column) for column in zip(*rows, strict=True))
        changes = np.zeros(len(sample) + 1)
        np.add.at(changes, np.searchsorted(sample, starts, side="left"), sizes)
        np.subtract.at(changes, np.searchsorted(sample, ends, side="right"), sizes)
        contents[content] = np.cumsum(changes)[:-1]
    return contents


def _class_of(graph: OpGraph, value: MemoryValue) -> str:
    return OpClass(int(graph.op_class[value.node])).name.lower()


def _named(graph: OpGraph, values: ProgramValues, buffer: Buffer) -> LiveValue:
    value = values.values[buffer.values[0]]
    return LiveValue(
        node=value.node,
        name=graph.node_name(value.node),
        op_class=_class_of(graph, value),
        kind=buffer.kind.name.lower(),
        size_bytes=buffer.size_bytes,
        framework=graph.strings[int(graph.framework_id[value.node])],
        source=graph.strings[int(graph.source_id[value.node])],
    )


def fits_memory(needed_bytes: float, capacity_bytes: float) -> bool | None:
    """Return True if ``needed_bytes`` fit in a memory of ``capacity_bytes``. None if a size is unknown
    (NaN, or a negative capacity).
    """
    if isnan(needed_bytes) or not capacity_bytes >= 0:
        return None
    return needed_bytes <= capacity_bytes


def capacity_of(device: Device, facts: StepFacts | None) -> float:
    """Return the memory [B] of the board that the facts of a step describe, else of the device; NaN if
    unknown.
    """
    if facts is not None and facts.device == device.name and not isnan(facts.capacity_bytes):
        return facts.capacity_bytes
    capacity = device.main_memory.capacity_bytes
    return float(capacity) if capacity >= 0 else nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of the ranks of one class. ``is_whole_job`` is True if the program is not partitioned, so that
    its tensors belong to all ranks together. ``outside_bytes`` is the memory that other libraries need on the
    device, ``capacity_bytes`` the memory of one device (NaN: no device is given).
    """

    rank_class: int
    use: MemoryUse
    is_whole_job: bool
    capacity_bytes: float = nan
    outside_bytes: float = 0.0

    @property
    def device_bytes(self) -> float:
        """Return the memory that the device must have."""
        return self.use.peak_bytes + self.outside_bytes

    @property
    def fits(self) -> bool | None:
        """Return True if the memory fits the device; None if it cannot be determined."""
        fits = fits_memory(self.device_bytes, self.capacity_bytes)
        return None if self.is_whole_job or (self.use.is_lower_bound and fits) else fits


def memory_by_class(
    workload: Workload, timeline: Timeline, shown: Mapping[int, int], device: Device | None = None
) -> tuple[RankMemory, ...]:
    """Return the memory of the rank classes in ``shown``, which maps a class to the rank whose spans are
    used. Classes are skipped if their nodes lack results or readers.

    A program that a compiler has scheduled uses memory in program order, because its buffers were assigned
    before it ran. Other programs use the times of their spans. Other devices than GPUs have no memory of
    libraries of GPUs.
    """
    capacity_bytes = nan if device is None else capacity_of(device, step_facts(workload.metadata))
    has_libraries = device is None or device.kind == "gpu"
    scheduled = workload.metadata.get("is_scheduled") == "true"
    memories: list[RankMemory] = []
    for rank_class, rank in shown.items():
        graph = workload.classes[rank_class]
        parts = workload.program_bytes[rank_class].split()
        if len(parts) not in (3, 4, 5) or not all(part.isdigit() for part in parts):
            program_bytes = None
        else:
            program_bytes = ProgramBytes(*map(float, parts))
        if program_bytes is None and not _states_readers(graph):
            continue
        mine = np.flatnonzero(timeline.rank == rank)
        node, region, end_ns = timeline.node[mine], timeline.region[mine], timeline.end_ns[mine]
        blocks: dict[int, float] = {}
        for loop, end in zip(region[node < 0].tolist(), end_ns[node < 0].tolist(), strict=True):
            if loop >= 0:
                blocks[loop] = max(end, blocks.get(loop, end))
        when = in_time(graph, node, timeline.start_ns[mine], end_ns, blocks)
        use = memory_use(graph, in_order(graph) if scheduled else when, program_bytes)
        if use is not None and scheduled and use.at_node >= 0:
            use = replace(use, at_ns=float(when.time_ns[when.start[use.at_node]]))
        if use is not None:
            outside_bytes = 0.0
            if has_libraries and program_bytes is not None and not isnan(program_bytes.device):
                outside_bytes = max(program_bytes.device - program_bytes.peak, 0.0)
            memories.append(
                RankMemory(
                    rank_class=rank_class,
                    use=use,
                    is_whole_job=bool(workload.metadata.get(WHOLE_JOB)),
                    capacity_bytes=capacity_bytes,
                    outside_bytes=outside_bytes,
                )
            )
    return tuple(memories)


def _states_readers(graph: OpGraph) -> bool:
    """Return True if a graph states which nodes read each value. Recordings have only dependencies, so most
    of their values seem to have no reader.
    """
    made = np.flatnonzero((graph.results.lengths > 0) & (graph.executions != 0))
    read = np.isin(made, graph.data_deps.values)
    return len(made) > 0 and (end_of(graph) >= 0 or 2 * int(read.sum()) >= len(made))
