"""When the nodes of passes run: each stream in program order, each node behind what it waits for and not
before the host has issued it, which runs ahead until it has to read what the device made.

The time of the last node is a sum over the chain of nodes that it waited for, so it comes apart by component
without remainder, and its derivatives by what scales a component are that chain's times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.validators.league.parts import COMPONENTS, COMPUTE, HOST, OVERLAP, PIPELINE, StageNodes

__all__ = ["Span", "Walked", "walked"]


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A time as what it is made of: unscaled times of each component [ns], launches of the host in place of
    its time, shape ``(components,)``, and the time itself [ns].
    """

    time_ns: float
    parts: FloatArray

    def __add__(self, other: Span) -> Span:
        return Span(self.time_ns + other.time_ns, self.parts + other.parts)

    def __sub__(self, other: Span) -> Span:
        return Span(self.time_ns - other.time_ns, self.parts - other.parts)

    def settled(self, scale: Sequence[float]) -> Span:
        """Return the same time with no part below zero, which differences of paths may have: the other parts
        shrink in proportion.
        """
        if (self.parts >= 0).all():
            return self
        parts = np.maximum(self.parts, 0.0)
        whole = float(parts @ np.asarray(scale))
        return Span(self.time_ns, parts * (self.time_ns / whole) if whole > 0 else parts)

    def times(self, count: float) -> Span:
        """So many of them."""
        return Span(self.time_ns * count, self.parts * count)

    @classmethod
    def nothing(cls) -> Span:
        """No time."""
        return cls(0.0, np.zeros(len(COMPONENTS)))


@dataclass(frozen=True, slots=True)
class Walked:
    """Passes in sequence: until the last kernel that computes ends, and until everything has but messages,
    which are for others to wait for.
    """

    computed: Span
    everything: Span


def walked(stage: StageNodes, sequence: Sequence[int], scale: Sequence[float]) -> Walked:
    """The parts of these numbers one after another. ``scale`` has, by component, the factor of its times;
    for the host the time to issue a node [ns], for overlap the share by which kernels are slower beside
    communication. O(nodes + dependencies).
    """
    return _Walk(stage, scale).run(sequence)


class _Walk:
    """A walk under way: positions are nodes in the order they are issued."""

    def __init__(self, stage: StageNodes, scale: Sequence[float]) -> None:
        self.stage, self.scale = stage, scale
        self.begin: list[float] = []
        self.end: list[float] = []
        self.kernels: list[int] = []
        self.node: list[int] = []
        self.before: list[int] = []
        self.beside: list[float] = []
        self.newest: dict[int, int] = {}
        """The last position of each stream."""
        self.where: dict[tuple[str, int], tuple[int, int]] = {}
        """Part and shift of the newest pass of a kind and chunk."""
        self.busy: list[tuple[float, float]] = []
        self.issued = 0.0
        """When the host has issued the newest node."""
        self.synchronized = -1
        """The node that the host last waited for."""
        self.launches: list[int] = []
        """Of nodes that began when they were issued, how many were since then; else 0."""
        self.count = 0

    def run(self, sequence: Sequence[int]) -> Walked:
        for number in sequence:
            self._part(number)
        last = self.newest.get(COMPUTE, -1)
        component, node = self.stage.component, self.node
        stays = (place for place in range(len(self.end)) if component[node[place]] != PIPELINE)
        latest = max(stays, key=self.end.__getitem__, default=-1)
        return Walked(self._span(last), self._span(latest))

    def _part(self, number: int) -> None:
        stage, part = self.stage, self.stage.parts[number]
        shift = len(self.end) - part.start
        tail = self.newest.get(COMPUTE, -1)
        needs: dict[int, list[int]] = {}
        for need in part.needs:
            found = self.where.get((need.kind, need.chunk))
            if found is None:
                continue
            other, moved = found
            port = stage.parts[other].ports.get(need.port)
            if port is not None:
                needs.setdefault(need.node, []).append(port + moved)
        begins = set(part.begins)
        for node in range(part.start, part.end):
            waits = [each + shift for each in stage.waits[node] if each >= part.start]
            waits += needs.get(node, ())
            if node in begins and tail >= 0:
                waits.append(tail)
            self._issue(node, waits)
        self.where[part.kind, part.chunk] = number, shift

    def _issue(self, node: int, waits: list[int]) -> None:
        stage, end = self.stage, self.end
        stream, component = stage.stream[node], stage.component[node]
        before = self.newest.get(stream, -1)
        start = end[before] if before >= 0 else 0.0
        for each in waits:
            if end[each] > start:
                start, before = end[each], each
        self.issued += self.scale[HOST]
        self.count += 1
        launches = 0
        if self.issued > start:
            start, before, launches = self.issued, self.synchronized, self.count
        time_ns = stage.time_ns[node] * self.scale[component]
        beside = 0.0
        if stream == COMPUTE:
            beside = self._beside(start, time_ns)
            time_ns += self.scale[OVERLAP] * beside
        elif time_ns > 0:
            self.busy.append((start, start + time_ns))
            self._slow_down(start, start + time_ns)
        self.newest[stream] = len(end)
        if stream == COMPUTE:
            self.kernels.append(len(end))
        self.node.append(node)
        self.before.append(before)
        self.beside.append(beside)
        self.launches.append(launches)
        self.begin.append(start)
        end.append(start + time_ns)
        if stage.waited[node]:
            self.synchronized, self.count = len(end) - 1, 0
            self.issued = max(self.issued, end[-1])

    def _beside(self, start: float, work_ns: float) -> float:
        """Return how long a kernel runs beside communication that was issued before it, each by itself, in
        units by which the scale of overlap stretches its work.
        """
        busy, share = self.busy, self.scale[OVERLAP]
        while busy and busy[0][1] <= start:
            busy.pop(0)
        at, left, beside = start, work_ns, 0.0
        edges = sorted({max(edge, start) for span in busy for edge in span})
        for edge in (*edges, float("inf")):
            count = sum(begin <= at < close for begin, close in busy) if edge > at else 0
            slow = 1.0 + share * count
            done = min(left, (edge - at) / slow) if edge > at else 0.0
            beside += count * done
            left -= done
            if left <= 0:
                break
            at = max(at, edge)
        return beside

    def _slow_down(self, start: float, stop: float) -> None:
        """Delay the newest kernel by communication that is issued after it and runs beside it or beside
        kernels before it.
        """
        beside, begin, end = 0.0, self.begin, self.end
        for place in reversed(self.kernels):
            if end[place] <= start:
                break
            over = max(min(stop, end[place]) - max(start, begin[place]), 0.0)
            beside += over / (1.0 + self.scale[OVERLAP]) if stop < end[place] else over
        if beside:
            newest = self.kernels[-1]
            self.beside[newest] += beside
            end[newest] += self.scale[OVERLAP] * beside

    def _span(self, position: int) -> Span:
        if position < 0:
            return Span.nothing()
        stage, parts = self.stage, [0.0] * len(COMPONENTS)
        time_ns = self.end[position]
        while position >= 0:
            node = self.node[position]
            parts[stage.component[node]] += stage.time_ns[node]
            parts[HOST] += self.launches[position]
            parts[OVERLAP] += self.beside[position]
            position = self.before[position]
        return Span(time_ns, np.array(parts))
