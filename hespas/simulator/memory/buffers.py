"""Buffer assignment: order of execution, lifetimes of values, and the memory that values share.

Values that must be in one buffer are joined first: updates in place, the state of a loop between iterations,
and results written over donated parameters. Buffers of results and of donated parameters exist from the
beginning (they are reserved). As in XLA's buffer assignment, temporaries are placed into reserved buffers,
largest first, if no other value occupies them during the lifetime of the temporary. The other values share
memory as in a heap: at each moment it holds the live values, and a value that overwrites another one takes
its memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from hespas.graph import OpGraph, RegionKind
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.passes import topological_order
from hespas.simulator.memory.values import MemoryValue, ProgramValues, ValueKind

__all__ = ["Buffer", "Lifetimes", "Moments", "buffers_of", "in_order", "in_time"]


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Start and end of each node, as positions in the order of all starts and ends; columns of shape
    ``(nodes,)``.

    ``start`` and ``end`` are for the first execution of a node, ``last`` is the end of its last execution.
    ``time_ns`` is the time of each position (empty: unknown).
    """

    start: IntArray
    end: IntArray
    last: IntArray
    time_ns: FloatArray


def in_order(graph: OpGraph) -> Moments:
    """Return starts and ends for execution in program order, one node after the other, as a compiler
    schedules them. O(nodes + edges).
    """
    start = 2 * _places(topological_order(graph))
    end = start + 1
    return Moments(start, end, end, np.empty(0))


def in_time(
    graph: OpGraph, node: SmallIntArray, start_ns: FloatArray, end_ns: FloatArray, blocks: Mapping[int, float]
) -> Moments:
    """Return starts and ends in the order of the simulated spans of one rank.

    ``node`` is the node of each span (-1: none); ``start_ns`` and ``end_ns`` are its times. ``blocks`` are
    the ends [ns] of loops whose later iterations have no spans. A node without a span takes no time and runs
    when all its dependencies have ended. O((nodes + spans) log spans).
    """
    count = len(graph)
    first_ns, until_ns, last_ns = np.full(count, inf), np.full(count, inf), np.full(count, -inf)
    own = np.flatnonzero(node >= 0)
    latest_first = own[np.argsort(start_ns[own], kind="stable")][::-1]  # the first execution is written last
    first_ns[node[latest_first]], until_ns[node[latest_first]] = start_ns[latest_first], end_ns[latest_first]
    np.maximum.at(last_ns, node[own], end_ns[own])
    order = topological_order(graph)
    ends_ns: list[float] = until_ns.tolist()
    silent_nodes = order[until_ns[order] == inf]
    data, control = (deps.take(silent_nodes).to_lists() for deps in (graph.data_deps, graph.control_deps))
    for silent, by_data, by_control in zip(silent_nodes.tolist(), data, control, strict=True):
        ends_ns[silent] = max([ends_ns[dep] for dep in (*by_data, *by_control)], default=0.0)
    until_ns = np.array(ends_ns)
    first_ns = np.where(first_ns == inf, until_ns, first_ns)
    last_ns = np.maximum(last_ns, until_ns)
    for region, block_ns in blocks.items():
        inside = graph.region == region
        last_ns[inside] = np.maximum(last_ns[inside], block_ns)
    # At one moment, nodes that took time end first; then nodes start, and end if they take no time, in
    # program order.
    started = 2 * _places(order)
    ended = started + 1
    ends = np.where(until_ns > first_ns, 0, 1)
    time_ns = np.concatenate([first_ns, until_ns, last_ns])
    phase = np.concatenate([np.ones(count, np.int64), ends, ends])
    within = np.concatenate([started, ended, ended])
    key = np.lexsort((within, phase, time_ns))
    rank = np.empty(3 * count, np.int64)
    rank[key] = np.arange(3 * count)
    return Moments(rank[:count], rank[count : 2 * count], rank[2 * count :], time_ns[key])


def _places(order: IntArray) -> IntArray:
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    return position


class Lifetimes:
    """Lifetimes of the values of one graph, for one order of its nodes. A lifetime is a first and a last
    position in the order of all starts and ends of nodes (:class:`Moments`).
    """

    def __init__(self, graph: OpGraph, when: Moments) -> None:
        """Compute the first and last position of each loop."""
        table = graph.regions
        self.start: list[int] = when.start.tolist()
        self.end: list[int] = when.end.tolist()
        self.whole = (0, int(when.last.max(initial=0)) + 1)
        self._deps = graph.data_deps.to_lists()
        self._region: list[int] = graph.region.tolist()
        self._parent: list[int] = table.parent.tolist()
        self._repeats: list[bool] = ((table.kind == int(RegionKind.LOOP_BODY)) | (table.trips > 1)).tolist()
        self._bounds = _bounds(graph, when)
        self._beyond: dict[tuple[int, int], int] = {}

    def of(self, value: MemoryValue, *, donated: bool = False) -> tuple[int, int]:
        """Return the lifetime of a value: from the start of its producer to the end of its last reader.

        Parameters and constants live throughout; ``donated`` parameters live to their last reader, and
        results to the end.
        """
        if value.kind is not ValueKind.TEMPORARY and value.kind is not ValueKind.OUTPUT and not donated:
            return self.whole
        start = self.born(value)
        if value.kind is ValueKind.OUTPUT:
            return start, self.whole[1]
        end = start if value.slot >= 0 else self.end[value.node]
        for user in value.users:
            loop = self._outermost(value.region, self._region[user])
            end = max(end, self._bounds[loop][1] if loop >= 0 else self.end[user])
        for region in value.before:
            end = max(end, self._bounds[region][0])
        for region in value.until:
            end = max(end, self._bounds[region][1])
        return 0 if donated else start, end

    def reached(self) -> list[int]:
        """Return the position of each node in a post-order traversal from the last node backwards, which XLA
        uses to break ties. Nodes that are not reached follow the others. O(nodes + edges).
        """
        count = len(self.start)
        position = list(range(count, 2 * count))
        seen = [False] * count
        stack = [(count - 1, iter(self._deps[-1]))] if count else []
        number = 0
        while stack:
            node, deps = stack[-1]
            seen[node] = True
            unseen = next((dep for dep in deps if not seen[dep]), None)
            if unseen is not None:
                stack.append((unseen, iter(self._deps[unseen])))
            else:
                stack.pop()
                position[node] = number
                number += 1
        return position

    def born(self, value: MemoryValue) -> int:
        """Return the position at which a value is created: the start of its producer; for a value that a loop
        carries, the start of the loop.
        """
        return self._bounds[value.slot][0] if value.slot >= 0 else self.start[value.node]

    def replaces_until(self, value: MemoryValue) -> int:
        """Return the last position up to which a value that this one overwrites may live."""
        return self._bounds[value.slot][0] if value.slot >= 0 else self.end[value.node]

    def _outermost(self, region: int, of_user: int) -> int:
        """Return the outermost loop that contains a reader of a value but not the value itself, -1 if there
        is none.

        ``region`` is the region of the value, ``of_user`` the region of the reader.
        """
        key = (region, of_user)
        outermost = self._beyond.get(key)
        if outermost is None:
            above: set[int] = {-1}
            while region >= 0:
                above.add(region)
                region = self._parent[region]
            outermost, here = -1, of_user
            while here not in above:
                if self._repeats[here]:
                    outermost = here
                here = self._parent[here]
            self._beyond[key] = outermost
        return outermost


def _bounds(graph: OpGraph, when: Moments) -> list[tuple[int, int]]:
    """Return for each region the first start and the last end of its nodes. O(nodes + regions)."""
    regions = len(graph.regions)
    runs = (graph.executions != 0) & (graph.region >= 0)
    first = np.full(regions, np.iinfo(np.int64).max)
    last = np.zeros(regions, np.int64)
    np.minimum.at(first, graph.region[runs], when.start[runs])
    np.maximum.at(last, graph.region[runs], when.last[runs])
    firsts: list[int] = first.tolist()
    lasts: list[int] = last.tolist()
    parents: list[int] = graph.regions.parent.tolist()
    for row in reversed(range(regions)):  # children follow their parents
        parent = parents[row]
        if parent >= 0:
            firsts[parent] = min(firsts[parent], firsts[row])
            lasts[parent] = max(lasts[parent], lasts[row])
    return list(zip(firsts, lasts, strict=True))


_MOST_TRIED = 16
"""Number of reserved buffers tried for one temporary, the smallest sufficient one first."""

_SMALL = 1 / 4096
"""Share of the largest buffer below which temporaries are not placed."""

_Interval = tuple[int, int]


@dataclass(slots=True)
class Buffer:
    """Memory buffer that several ``values`` use, one after the other.

    ``lives`` lists the intervals in which the buffer is used, disjoint and in order. ``reserved`` is True if
    the buffer exists during the whole step. ``inside`` is True if it uses the memory of a reserved buffer.
    """

    values: list[int]
    size_bytes: float
    kind: ValueKind
    lives: list[_Interval]
    reserved: bool
    inside: bool = False


def buffers_of(values: ProgramValues, lifetimes: Lifetimes, donated: dict[int, int]) -> list[Buffer]:
    """Return the buffers of all values. ``donated`` maps results to the parameters that they overwrite.
    O(values log values).
    """
    return _Assignment(values, lifetimes, donated).run()


class _Assignment:
    """Assignment of values to buffers while :func:`buffers_of` runs."""

    def __init__(self, values: ProgramValues, lifetimes: Lifetimes, donated: dict[int, int]) -> None:
        self.graph_values, self.values = values, values.values
        self.lifetimes, self.donated = lifetimes, donated
        self.givers = set(donated.values())
        givers, span_of = self.givers, lifetimes.of
        self.spans = [span_of(value, donated=number in givers) for number, value in enumerate(self.values)]
        self.owner = list(range(len(self.values)))
        self.until = [end for _, end in self.spans]
        starts = np.array([start for start, _ in self.spans], np.int64)
        self.order: list[int] = np.argsort(starts, kind="stable").tolist()

    def run(self) -> list[Buffer]:
        """Join values that must share a buffer, place temporaries into reserved buffers, and return all
        buffers.
        """
        # Put values into the buffers of the previous values that they update in place, that loops carry, or
        # whose donated parameters they overwrite. The previous value must have ended.
        state = {value: slot for slot, value in self.graph_values.handed}
        for number in self.order:
            value = self.values[number]
            if number in self.donated:
                self._joined(number, self.donated[number])
                continue
            candidates = value.over if value.in_place or value.slot >= 0 else ()
            joined = any(
                self.values[other].kind is ValueKind.TEMPORARY and self._joined(number, other)
                for other in candidates
            )
            if not joined and number in state:
                self._joined(number, state[number])
        members: dict[int, list[int]] = {}
        for number, value in enumerate(self.values):
            if value.size_bytes:
                members.setdefault(self.owner[number], []).append(number)
        reserves = self.graph_values.results is not None
        buffers = {owner: self._buffer(numbers, reserves=reserves) for owner, numbers in members.items()}
        if reserves:
            self._place(list(buffers.values()))
        free = {owner for owner, buffer in buffers.items() if not (buffer.reserved or buffer.inside)}
        ended: set[int] = set()
        for number in self.order:
            taker = self.owner[number]
            if not self.values[number].over or taker not in free:
                continue
            until = self.lifetimes.replaces_until(self.values[number])
            for other in self.values[number].over:
                giver = self.owner[other]
                if giver in free and giver != taker and giver not in ended and self.until[giver] <= until:
                    ended.add(giver)
                    start, _ = buffers[giver].lives.pop()
                    if start < self.spans[number][0]:
                        buffers[giver].lives.append((start, self.spans[number][0] - 1))
                    break
        return list(buffers.values())

    def _buffer(self, members: list[int], *, reserves: bool) -> Buffer:
        kinds = {self.values[number].kind for number in members}
        kind = next(
            kind
            for kind in (ValueKind.PARAMETER, ValueKind.CONSTANT, ValueKind.OUTPUT, ValueKind.TEMPORARY)
            if kind in kinds
        )
        size = max(self.values[number].size_bytes for number in members)
        lives: list[_Interval] = []
        for start, end in sorted(self.spans[number] for number in members):
            if lives and start <= lives[-1][1] + 1:
                lives[-1] = (lives[-1][0], max(end, lives[-1][1]))
            else:
                lives.append((start, end))
        if any(self.values[number].slot >= 0 for number in members):  # the state of a loop keeps its memory
            lives = [(lives[0][0], lives[-1][1])]
        return Buffer(members, size, kind, lives, reserved=reserves and kind is not ValueKind.TEMPORARY)

    def _joined(self, number: int, other: int) -> bool:
        """Add a value to the buffer of another value if nothing in that buffer is still needed. Return True
        if it was added.
        """
        owner, value = self.owner[other], self.values[number]
        may_touch = other in value.over
        born = self.lifetimes.replaces_until(value) if may_touch else self.spans[number][0] - 1
        if self.until[owner] > born or owner == self.owner[number]:
            return False
        self.owner[number] = owner
        self.until[owner] = max(self.until[number], born + 1)
        return True

    def _place(self, buffers: list[Buffer]) -> None:
        """Let temporary buffers use the memory of reserved buffers (results and donated parameters) that are
        free during their lifetime.
        """
        reserved = [
            _ReservedBuffer(buffer)
            for buffer in buffers
            if buffer.reserved
            and (buffer.kind is ValueKind.OUTPUT or any(number in self.givers for number in buffer.values))
        ]
        reserved.reverse()
        reserved.sort(key=lambda target: target.buffer.size_bytes)
        sizes = [target.buffer.size_bytes for target in reserved]
        shares = {
            (self.spans[number][0], self.spans[other][1])
            for number, value in enumerate(self.values)
            for other in value.over
            if self.spans[other][1] == self.lifetimes.replaces_until(value)
        }
        least = _SMALL * max((buffer.size_bytes for buffer in buffers), default=0.0)
        waiting = [buffer for buffer in buffers if not buffer.reserved and buffer.size_bytes >= least]
        reached = self.lifetimes.reached()
        waiting.sort(
            key=lambda buffer: (
                -buffer.size_bytes,
                min(reached[self.values[number].node] for number in buffer.values),
            )
        )
        for buffer in waiting:
            first = bisect_left(sizes, buffer.size_bytes)
            for target in reserved[first : first + _MOST_TRIED]:
                if target.admits(buffer.lives, shares):
                    target.add(buffer.lives)
                    buffer.inside = True
                    break


@dataclass(slots=True)
class _ReservedBuffer:
    """Buffer whose memory is reserved for the whole step, with the intervals in which it is occupied."""

    buffer: Buffer
    taken: list[_Interval] = field(default_factory=list[_Interval])

    def __post_init__(self) -> None:
        self.taken = list(self.buffer.lives)

    def admits(self, lives: list[_Interval], shares: set[tuple[int, int]]) -> bool:
        """Return True if the buffer is free in all intervals of ``lives``.

        ``shares`` lists allowed overlaps, as pairs of a start and an end: one value overwrites the other
        there.
        """
        for start, end in lives:
            at = bisect_left(self.taken, (start, start))
            for index in range(max(at - 2, 0), len(self.taken)):  # earlier intervals only touch
                other_start, other_end = self.taken[index]
                if other_start > end:
                    break
                overlap = (max(start, other_start), min(end, other_end))
                if overlap[0] <= overlap[1] and overlap not in shares:
                    return False
        return True

    def add(self, lives: list[_Interval]) -> None:
        """Mark intervals as occupied."""
        for interval in lives:
            insort(self.taken, interval)
