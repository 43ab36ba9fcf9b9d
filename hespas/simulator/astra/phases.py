"""What one rank does in one phase of a chunk: the token machines of ring, direct and halving-doubling, and
the double binary tree.

A machine inserts packets; ``delay_ns`` later (and after the reduction, where one is charged) a packet gives a
token, and a token and a packet together let it send one message and ask for one. What it receives it inserts
again. It is done when nothing is left to send and all its tokens are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Protocol

from hespas.graph import CollectiveKind
from hespas.simulator.astra.events import Timers
from hespas.simulator.astra.mailbox import Mailbox
from hespas.simulator.astra.plans import PhasePlan
from hespas.simulator.astra.trees import TreePlace, tree_place

__all__ = ["Machine", "Machines", "PhaseStart", "machine_of"]

_NS_PER_S = 1e9


class Machine(Protocol):
    """One phase of one chunk on one rank."""

    def start(self) -> None:
        """Begin it, now."""
        ...


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """What a machine needs: who it is among whom, how it talks, and what to call when the phase is done.

    ``ring`` are the ranks of the phase in order, ``place`` the rank's own place in it. ``in_group``: they are
    a group smaller than the world. ``tree`` counts the trees of this dimension so far, which take turns.
    ``rest`` are the queues of the phases after this one.
    """

    plan: PhasePlan
    rank: int
    ring: Sequence[int]
    place: int
    tag: int
    is_clockwise: bool
    in_group: bool
    tree: int
    delay_ns: int
    memory_bytes_per_s: float
    timers: Timers
    mailbox: Mailbox
    rest: tuple[int, ...]
    done: Callable[[], None]

    def reduction_ns(self, size: int) -> int:
        """Two reads and a write of a message, each truncated; free where the memory states no bandwidth."""
        if not self.memory_bytes_per_s:
            return 0
        return 3 * int(float(size) / self.memory_bytes_per_s * _NS_PER_S)


Machines = Callable[[PhaseStart], Machine]
"""Makes what a rank does in a phase."""


def machine_of(start: PhaseStart) -> Machine:
    """The machine of a phase."""
    family = start.plan.algorithm.family
    if family == "tree":
        return _TreeMachine(start)
    if family == "halving":
        return _HalvingMachine(start)
    return _DirectMachine(start) if family == "direct" else _RingMachine(start)


class _TokenMachine:
    """What ring, direct and halving-doubling share; peers and the size of a message are those of the next
    packet.
    """

    __slots__ = (
        "_cycle", "_free", "_got", "_is_odd", "_later", "_left", "_packets", "_reduces", "_size", "_source",
        "_start", "_target", "_unreduced", "_window",
    )  # fmt: skip

    def __init__(self, start: PhaseStart, window: int, cycle: int, left: int, size: int) -> None:
        self._start, self._window, self._cycle, self._left, self._size = start, window, cycle, left, size
        self._packets: deque[tuple[int, int, int]] = deque()
        self._free = self._got = self._unreduced = self._later = 0
        self._is_odd = False
        self._reduces = start.plan.kind
        self._target = self._source = start.rank

    def start(self) -> None:
        """Insert the first packets."""
        for _ in range(self._window):
            self._insert(None)

    def _insert(self, _: object) -> None:
        if not self._unreduced and not self._later:
            self._unreduced, self._later = self._window, self._cycle
            self._is_odd = not self._is_odd
        self._packets.append((self._size, self._target, self._source))
        reduces = False
        if self._unreduced:
            self._unreduced -= 1
        else:
            self._later -= 1
            kind = self._reduces
            reduces = kind is CollectiveKind.REDUCE_SCATTER or (
                kind is CollectiveKind.ALL_REDUCE and self._is_odd
            )
        start = self._start
        if reduces:
            start.timers.after(start.delay_ns, self._reduce, start.reduction_ns(self._size))
        else:
            start.timers.after(start.delay_ns, self._token, None)
        self._advance()

    def _reduce(self, reduction_ns: int) -> None:
        self._start.timers.after(reduction_ns, self._token, None)

    def _advance(self) -> None:
        """Peers and size of the packet after this one."""

    def _token(self, _: object) -> None:
        self._free += 1
        self._send()
        self._end()

    def _send(self) -> None:
        if not self._packets or not self._left or not self._free:
            return
        size, target, source = self._packets.popleft()
        start = self._start
        start.mailbox.send((start.tag, start.rank, target, size))
        start.mailbox.receive((start.tag, source, start.rank, size), self._received, None)
        self._left -= 1
        self._free -= 1

    def _received(self, _: object) -> None:
        self._got += 1
        self._insert(None)

    def _end(self) -> None:
        if not self._left and self._free == self._window:
            self._start.done()


def _neighbours(start: PhaseStart) -> tuple[int, int]:
    """Whom a rank sends to and receives from along its ring."""
    ring, count = start.ring, len(start.ring)
    after, before = ring[(start.place + 1) % count], ring[(start.place - 1) % count]
    return (after, before) if start.is_clockwise else (before, after)


def _message_size(plan: PhasePlan) -> int:
    return plan.size if plan.kind is CollectiveKind.ALL_GATHER else plan.size // plan.ranks


class _RingMachine(_TokenMachine):
    """One message at a time, always to the next rank."""

    __slots__ = ()

    def __init__(self, start: PhaseStart) -> None:
        plan = start.plan
        ranks = plan.ranks
        left = ranks - 1
        if plan.kind is CollectiveKind.ALL_REDUCE:
            left *= 2
        elif plan.kind is CollectiveKind.ALL_TO_ALL:
            left = ranks * (ranks - 1) // 2
        super().__init__(start, 1, ranks - 1, left, _message_size(plan))
        self._target, self._source = _neighbours(start)


class _DirectMachine(_TokenMachine):
    """A window of messages at a time, to one peer after the other."""

    __slots__ = ("_from", "_to")

    def __init__(self, start: PhaseStart) -> None:
        plan = start.plan
        peers = plan.ranks - 1
        window = min(plan.algorithm.window or peers, peers)
        left = 2 * peers if plan.kind is CollectiveKind.ALL_REDUCE else peers
        super().__init__(
            start, window, peers * window if start.in_group else window, left, _message_size(plan)
        )
        step = 1 if start.is_clockwise else -1
        self._to, self._from = start.place + step, start.place - step
        self._target, self._source = _neighbours(start)

    def _advance(self) -> None:
        start, count = self._start, len(self._start.ring)
        step = 1 if start.is_clockwise else -1
        self._to, self._from = self._to + step, self._from - step
        if self._to % count == start.place:
            self._to += step
        if self._from % count == start.place:
            self._from -= step
        self._target, self._source = start.ring[self._to % count], start.ring[self._from % count]

    def _token(self, _: object) -> None:
        """The second half of an all-reduce begins when all of the first half has come in."""
        self._free += 1
        peers = self._start.plan.ranks - 1
        if self._start.plan.kind is CollectiveKind.ALL_REDUCE and self._left <= peers:
            if self._got < peers:
                return
            for _turn in range(self._window):
                self._send()
        else:
            self._send()
        self._end()


class _HalvingMachine(_TokenMachine):
    """Message sizes halve while distances double, then (for an all-reduce) the other way round.

    Steps are truncated from log2 of the ranks, as in ASTRA-sim: without a power of two most ranks deadlock.
    """

    __slots__ = ("_grows", "_offset")

    def __init__(self, start: PhaseStart) -> None:
        plan = start.plan
        depth = log2(plan.ranks)
        self._grows = plan.kind is CollectiveKind.ALL_GATHER
        self._offset = plan.ranks // 2 if self._grows else 1
        left = int(2 * depth if plan.kind is CollectiveKind.ALL_REDUCE else depth)
        super().__init__(start, 1, int(depth - 1), left, plan.size if self._grows else plan.size // 2)
        self._meet()

    def _meet(self) -> None:
        """Find the partner: forwards from even blocks of ``offset`` ranks, backwards from odd ones."""
        ring, place, offset = self._start.ring, self._start.place, self._offset
        forwards = not offset or place // offset % 2 == 0
        self._target = self._source = ring[(place + offset if forwards else place - offset) % len(ring)]

    def _advance(self) -> None:
        self._step()
        if self._offset == self._start.plan.ranks and self._start.plan.kind is CollectiveKind.ALL_REDUCE:
            self._grows = True
            self._step()
        self._meet()

    def _step(self) -> None:
        if self._grows:
            self._offset, self._size = self._offset // 2, self._size * 2
        else:
            self._offset, self._size = self._offset * 2, self._size // 2


class _TreeMachine:
    """One rank of a double binary tree: reduce towards the root, then hand down; the whole chunk on each
    edge. A reduction is charged on the way down too.
    """

    __slots__ = ("_place", "_start", "_up")

    def __init__(self, start: PhaseStart) -> None:
        self._start = start
        self._place: TreePlace = tree_place(start.ring, start.place, start.tree)
        self._up = 0

    def start(self) -> None:
        """A leaf sends up; all others ask for what their children send."""
        if not self._place.children:
            self._bus(self._leaf_sends, reduces=False)
        else:
            for child in self._place.children:
                self._ask(child, self._from_child)

    def _bus(self, then: Callable[[object], None], *, reduces: bool) -> None:
        start = self._start
        if reduces:
            start.timers.after(start.delay_ns, self._reduce, then)
        else:
            start.timers.after(start.delay_ns, then, None)

    def _reduce(self, then: Callable[[object], None]) -> None:
        start = self._start
        start.timers.after(start.reduction_ns(start.plan.size), then, None)

    def _send(self, target: int) -> None:
        start = self._start
        start.mailbox.send((start.tag, start.rank, target, start.plan.size))

    def _ask(self, source: int, then: Callable[[object], None]) -> None:
        start = self._start
        start.mailbox.receive((start.tag, source, start.rank, start.plan.size), then, None)

    def _leaf_sends(self, _: object) -> None:
        self._send(self._place.parent)
        self._ask(self._place.parent, self._leaf_receives)

    def _leaf_receives(self, _: object) -> None:
        self._bus(self._leaf_ends, reduces=False)

    def _leaf_ends(self, _: object) -> None:
        self._start.done()

    def _from_child(self, _: object) -> None:
        self._bus(self._added, reduces=True)

    def _added(self, _: object) -> None:
        """All children are in: up to the parent, or, at the root, down again."""
        self._up += 1
        if self._up < len(self._place.children):
            return
        if self._place.parent < 0:
            self._hand_down(None)
        else:
            self._send(self._place.parent)
            self._ask(self._place.parent, self._from_parent)

    def _from_parent(self, _: object) -> None:
        self._bus(self._hand_down, reduces=True)

    def _hand_down(self, _: object) -> None:
        for child in self._place.children:
            self._send(child)
        self._start.done()
