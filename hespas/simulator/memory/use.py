"""How much memory a rank needs, when most of it, and what fills it then.

A value lives from the start of the node that makes it to the end of its last reader. Parameters and
constants live throughout, and so do the results of a program that says what they are, which have their memory
from the beginning. What a loop does not change lives until its last trip has ended; what its trips make is
counted once, since each trip writes over what the one before it left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import NamedTuple

import numpy as np

from hespas.graph import OpClass, OpGraph
from hespas.graph.columns import FloatArray
from hespas.simulator.memory.buffers import Buffer, buffers_of
from hespas.simulator.memory.facts import donated_to
from hespas.simulator.memory.lifetimes import Lifetimes
from hespas.simulator.memory.moments import Moments, in_order
from hespas.simulator.memory.values import Kind, Value, Values, values_of

__all__ = ["LiveValue", "MemoryUse", "ProgramBytes", "memory_use"]

_LISTED = 10


class ProgramBytes(NamedTuple):
    """Bytes of a program's parameters, of its results, and of parameters over which results are written:
    where its parameters are not nodes. ``peak`` is the memory of a rank at its fullest moment (NaN: the
    program does not state it).
    """

    parameters: float
    results: float
    donated: float
    peak: float = nan


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValue:
    """A buffer in memory at the peak, by the first value in it. ``kind`` is ``parameter``, ``constant``,
    ``output`` or ``temporary``.
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
    """The memory of one rank over a step; all sizes in bytes.

    ``peak_bytes`` is reached as ``at_node`` starts (-1: before any node), at ``at_ns`` (NaN: times are not
    known), and is the sum of ``parameters_bytes``, ``constants_bytes``, ``outputs_bytes`` (results that are
    not written over parameters) and ``temporaries_bytes``, those that do not stand in memory of results or of
    donated parameters; of them ``collectives_bytes`` are results of communication. ``unlisted_bytes`` are in
    the peak that a program states and not values of its nodes: gathered weights, working space, buffers of
    libraries (below 0 where nodes keep more than the program accounts for). ``class_bytes`` says which
    classes of operations made them, ``largest`` are the greatest buffers of all kinds. ``donated_bytes`` are
    parameters whose memory results take. ``unknown`` counts tensors of unknown size and nodes that do not say
    what they make: with any, the peak is a lower bound.

    ``held_bytes[i]`` is in use from place ``i`` of the order of starts and ends on, and ``held_ns[i]`` is its
    time (empty where times are not known).
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
    unlisted_bytes: float = 0.0

    @property
    def is_lower_bound(self) -> bool:
        """Whether there are values whose size is not known."""
        return self.unknown > 0


def memory_use(
    graph: OpGraph, moments: Moments | None = None, stated: ProgramBytes | None = None
) -> MemoryUse | None:
    """The memory that a program needs, one node after the other unless ``moments`` say when they run; None
    where no node says what it makes.

    Where parameters are not nodes, ``stated`` says what they and the results take, throughout; what nobody
    reads is taken for a result. O((nodes + values) log values).
    """
    if not len(graph.results.values):
        return None
    when = moments or in_order(graph)
    found = values_of(graph)
    donated = _mark_results(graph, found)
    buffers = buffers_of(found, Lifetimes(graph, when), donated)
    if stated is None or any(value.kind is Kind.PARAMETER for value in found.values):
        return _told(graph, found, when, buffers, donated)
    return _with_stated(
        _told(graph, found, when, [each for each in buffers if each.kind is not Kind.OUTPUT], {}), stated
    )


def _with_stated(use: MemoryUse, stated: ProgramBytes) -> MemoryUse:
    """Return the use with parameters and results that are there throughout, and the peak that is stated."""
    outputs = max(stated.results - stated.donated, 0.0)
    listed = use.peak_bytes + stated.parameters + outputs
    unlisted = 0.0 if isnan(stated.peak) else stated.peak - listed
    return replace(
        use,
        peak_bytes=listed + unlisted,
        parameters_bytes=stated.parameters,
        outputs_bytes=outputs,
        donated_bytes=stated.donated,
        unlisted_bytes=unlisted,
        unknown=use.unknown if isnan(stated.peak) else 0,
        held_bytes=use.held_bytes + (stated.parameters + outputs + unlisted),
    )


def _mark_results(graph: OpGraph, found: Values) -> dict[int, int]:
    """Tell the values that are results; without a word of the program, those that nobody reads. Returns the
    parameter of each that is written over one.
    """
    if found.results is None:
        for value in found.values:
            if value.kind is Kind.TEMPORARY and value.slot < 0 and not (value.users or value.until):
                value.kind = Kind.OUTPUT
        return {}
    places = donated_to(graph)
    givers = {
        places[value.node]: number
        for number, value in enumerate(found.values)
        if value.kind is Kind.PARAMETER and value.node in places
    }
    donated: dict[int, int] = {}
    for place, number in enumerate(found.results):
        if number >= 0 and found.values[number].kind is Kind.TEMPORARY:
            found.values[number].kind = Kind.OUTPUT
            if place in givers:
                donated[number] = givers[place]
    return donated


def _told(
    graph: OpGraph, found: Values, when: Moments, buffers: list[Buffer], donated: dict[int, int]
) -> MemoryUse:
    """The figures."""
    held = _held(buffers, int(when.last.max(initial=0)) + 2)
    at = int(np.argmax(held))
    live = [buffer for buffer in buffers if not buffer.inside and _is_live(buffer, at)]
    sums = dict.fromkeys(Kind, 0.0)
    class_bytes: dict[str, float] = {}
    for buffer in live:
        sums[buffer.kind] += buffer.size_bytes
        if buffer.kind is Kind.TEMPORARY:
            name = _class_of(graph, found.values[buffer.values[0]])
            class_bytes[name] = class_bytes.get(name, 0.0) + buffer.size_bytes
    starting = np.flatnonzero(when.start == at)
    largest = sorted(live, key=lambda buffer: -buffer.size_bytes)[:_LISTED]
    return MemoryUse(
        peak_bytes=float(held[at]),
        at_node=int(starting[0]) if len(starting) else -1,
        at_ns=float(when.time_ns[at]) if at < len(when.time_ns) else nan,
        parameters_bytes=sums[Kind.PARAMETER],
        constants_bytes=sums[Kind.CONSTANT],
        outputs_bytes=sums[Kind.OUTPUT],
        temporaries_bytes=sums[Kind.TEMPORARY],
        collectives_bytes=class_bytes.get("collective", 0.0) + class_bytes.get("p2p", 0.0),
        donated_bytes=sum(found.values[number].size_bytes for number in donated),
        class_bytes=dict(sorted(class_bytes.items(), key=lambda item: -item[1])),
        largest=tuple(_named(graph, found, buffer) for buffer in largest),
        unknown=found.unknown,
        held_bytes=held,
        held_ns=when.time_ns,
    )


def _held(buffers: list[Buffer], places: int) -> FloatArray:
    """Bytes in use from each place of the order on."""
    changes = np.zeros(places + 1)
    for buffer in buffers:
        if buffer.reserved:
            changes[0] += buffer.size_bytes
        elif not buffer.inside:
            for start, end in buffer.lives:
                changes[start] += buffer.size_bytes
                changes[end + 1] -= buffer.size_bytes
    held: FloatArray = np.cumsum(changes)[:places]
    return held


def _is_live(buffer: Buffer, at: int) -> bool:
    return buffer.reserved or any(start <= at <= end for start, end in buffer.lives)


def _class_of(graph: OpGraph, value: Value) -> str:
    return OpClass(int(graph.op_class[value.node])).name.lower()


def _named(graph: OpGraph, found: Values, buffer: Buffer) -> LiveValue:
    value = found.values[buffer.values[0]]
    return LiveValue(
        node=value.node,
        name=graph.node_name(value.node),
        op_class=_class_of(graph, value),
        kind=buffer.kind.name.lower(),
        size_bytes=buffer.size_bytes,
        framework=graph.strings[int(graph.framework_row[value.node])],
        source=graph.strings[int(graph.source_row[value.node])],
    )
