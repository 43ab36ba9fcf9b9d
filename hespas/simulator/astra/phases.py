"""Phases of collectives on one rank: state machines of ring, direct, halving-doubling and double binary tree,
and the time of a phase whose ranks all behave alike.

Ring, direct and halving-doubling use tokens. The machine inserts packets. ``delay_ns`` later (and after the
reduction, if one is charged), a packet produces a token. A token and a packet together allow the machine to
send one message and to receive one. Received packets are inserted again. The phase ends when nothing is left
to send and all tokens are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from typing import NamedTuple, Protocol

import numpy as np

from hespas.graph import CollectiveKind
from hespas.simulator.astra.events import Callback, EventQueue, Timers
from hespas.simulator.astra.network import Mailbox, UnawareNetwork
from hespas.simulator.astra.plans import PhasePlan

__all__ = [
    "Ambiguous",
    "PhaseMachine",
    "PhaseMachineFactory",
    "PhaseStart",
    "PhaseTime",
    "PhaseTimes",
    "RingTimes",
    "TreeNode",
    "machine_of",
    "tree_node",
]


_NS_PER_S = 1e9


class PhaseMachine(Protocol):
    """Protocol of the state machine that runs one phase of a chunk on one rank."""

    def start(self) -> None:
        """Start the phase now."""
        ...


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """Inputs of the state machine that runs one phase of a collective on one rank. The machine calls ``done``
    at the end of the phase.

    ``ring`` lists the ranks of the phase in order; ``position`` is the index of ``rank`` in this list.
    ``in_group`` is True if the collective runs in a group smaller than all ranks. ``tree`` is the number of
    trees that this dimension has run before; even and odd trees have different roots. ``rest`` lists the
    queues of the following phases.
    """

    plan: PhasePlan
    rank: int
    ring: Sequence[int]
    position: int
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
        """Return the time to reduce a message: two reads and one write, each rounded down; 0 if the memory
        bandwidth is not given.
        """
        if not self.memory_bytes_per_s:
            return 0
        return 3 * int(float(size) / self.memory_bytes_per_s * _NS_PER_S)


PhaseMachineFactory = Callable[[PhaseStart], PhaseMachine]
"""Factory for the machine of a phase."""


def machine_of(start: PhaseStart) -> PhaseMachine:
    """Return the state machine for the algorithm of a phase."""
    family = start.plan.algorithm.family
    if family == "tree":
        return _TreeMachine(start)
    if family == "halving":
        return _HalvingMachine(start)
    return _DirectMachine(start) if family == "direct" else _RingMachine(start)


class _TokenMachine:
    """Base class of the state machines of ring, direct and halving-doubling (see the module for tokens). It
    stores the peers and the size of the next packet.
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
        """Start the phase: insert the first packets."""
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
        """Advance the state to the next packet: set its peers and its size."""

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
    """Return the ranks to which a rank sends and from which it receives along its ring."""
    ring, count = start.ring, len(start.ring)
    after, before = ring[(start.position + 1) % count], ring[(start.position - 1) % count]
    return (after, before) if start.is_clockwise else (before, after)


def _message_size(plan: PhasePlan) -> int:
    return plan.size if plan.kind is CollectiveKind.ALL_GATHER else plan.size // plan.ranks


class _RingMachine(_TokenMachine):
    """State machine of the ring algorithm: one message at a time, always to the next rank."""

    __slots__ = ()

    def __init__(self, start: PhaseStart) -> None:
        times = RingTimes.of(start)
        super().__init__(start, 1, start.plan.ranks - 1, times.messages, times.size_bytes)
        self._target, self._source = _neighbours(start)


class _DirectMachine(_TokenMachine):
    """State machine of the direct algorithm: a rank sends to one peer after the other, with a window of
    messages in flight.
    """

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
        self._to, self._from = start.position + step, start.position - step
        self._target, self._source = _neighbours(start)

    def _advance(self) -> None:
        start, count = self._start, len(self._start.ring)
        step = 1 if start.is_clockwise else -1
        self._to, self._from = self._to + step, self._from - step
        if self._to % count == start.position:
            self._to += step
        if self._from % count == start.position:
            self._from -= step
        self._target, self._source = start.ring[self._to % count], start.ring[self._from % count]

    def _token(self, _: object) -> None:
        """Count a free token (see the module), and send the next message. The second half of an all-reduce
        starts when all messages of the first half have arrived.
        """
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
    """State machine of the halving-doubling algorithm. In each step the message size halves and the distance
    to the partner doubles. An all-reduce then repeats the steps in reverse.

    The number of steps is log2 of the ranks, rounded down, as in ASTRA-sim. If the number of ranks is not a
    power of two, most ranks deadlock.
    """

    __slots__ = ("_grows", "_offset")

    def __init__(self, start: PhaseStart) -> None:
        plan = start.plan
        depth = log2(plan.ranks)
        self._grows = plan.kind is CollectiveKind.ALL_GATHER
        self._offset = plan.ranks // 2 if self._grows else 1
        left = int(2 * depth if plan.kind is CollectiveKind.ALL_REDUCE else depth)
        super().__init__(start, 1, int(depth - 1), left, plan.size if self._grows else plan.size // 2)
        self._set_partner()

    def _set_partner(self) -> None:
        """Set the partner of a halving-doubling step, at distance ``offset``: above the rank in even blocks
        of ``offset`` ranks, below it in odd blocks.
        """
        ring, position, offset = self._start.ring, self._start.position, self._offset
        forwards = not offset or position // offset % 2 == 0
        self._target = self._source = ring[(position + offset if forwards else position - offset) % len(ring)]

    def _advance(self) -> None:
        self._step()
        if self._offset == self._start.plan.ranks and self._start.plan.kind is CollectiveKind.ALL_REDUCE:
            self._grows = True
            self._step()
        self._set_partner()

    def _step(self) -> None:
        if self._grows:
            self._offset, self._size = self._offset // 2, self._size * 2
        else:
            self._offset, self._size = self._offset * 2, self._size // 2


class _TreeMachine:
    """State machine of one rank in a double binary tree: data is reduced towards the root, then broadcast.
    Each edge carries the whole chunk. As in ASTRA-sim, the time of a reduction is also charged during the
    broadcast.
    """

    __slots__ = ("_start", "_tree_node", "_up")

    def __init__(self, start: PhaseStart) -> None:
        self._start = start
        self._tree_node: TreeNode = tree_node(start.ring, start.position, start.tree)
        self._up = 0

    def start(self) -> None:
        """Start the tree algorithm: a leaf sends, other ranks wait for their children."""
        if not self._tree_node.children:
            self._bus(self._leaf_sends, reduces=False)
        else:
            for child in self._tree_node.children:
                self._receive(child, self._from_child)

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

    def _receive(self, source: int, then: Callable[[object], None]) -> None:
        start = self._start
        start.mailbox.receive((start.tag, source, start.rank, start.plan.size), then, None)

    def _leaf_sends(self, _: object) -> None:
        self._send(self._tree_node.parent)
        self._receive(self._tree_node.parent, self._leaf_receives)

    def _leaf_receives(self, _: object) -> None:
        self._bus(self._leaf_ends, reduces=False)

    def _leaf_ends(self, _: object) -> None:
        self._start.done()

    def _from_child(self, _: object) -> None:
        self._bus(self._added, reduces=True)

    def _added(self, _: object) -> None:
        """Handle the reduced message of a child. After the last child, send to the parent; the root starts
        the broadcast.
        """
        self._up += 1
        if self._up < len(self._tree_node.children):
            return
        if self._tree_node.parent < 0:
            self._broadcast(None)
        else:
            self._send(self._tree_node.parent)
            self._receive(self._tree_node.parent, self._from_parent)

    def _from_parent(self, _: object) -> None:
        self._bus(self._broadcast, reduces=True)

    def _broadcast(self, _: object) -> None:
        for child in self._tree_node.children:
            self._send(child)
        self._start.done()


class TreeNode(NamedTuple):
    """Neighbours of a rank in a tree: its parent (-1: none), and its children, left then right."""

    parent: int
    children: tuple[int, ...]


def tree_node(ring: Sequence[int], position: int, number: int) -> TreeNode:
    """Return the parent and children of a rank in tree ``number`` of a double binary tree. ``ring`` lists the
    ranks of the phase (a power of two), and ``position`` is the index of the rank in it.

    In even trees the last rank is the root, in odd trees the first rank. The root has one child, the head of
    a full binary tree of all other ranks. Ranks of this tree are numbered in order (left subtree, node, right
    subtree), so the level of a rank is the number of trailing ones of its number.
    """
    count = len(ring)
    root_is_last = number % 2 == 0
    root = count - 1 if root_is_last else 0
    first = 0 if root_is_last else 1  # first position of the full tree of count - 1 nodes
    top = count // 2 - 1 + first
    if position == root:
        return TreeNode(-1, (ring[top],))
    local = position - first
    reach = ~local & (local + 1)  # distance to the parent; twice that to the children
    children = (ring[position - reach // 2], ring[position + reach // 2]) if reach > 1 else ()
    if position == top:
        return TreeNode(ring[root], children)
    parent = position + reach if local // (2 * reach) % 2 == 0 else position - reach
    return TreeNode(ring[parent], children)


class Ambiguous(Exception):  # noqa: N818 # not an error: all ranks are run
    """Signal that the order of two events at the same time matters and cannot be determined from one rank, so
    that more ranks must be simulated.
    """


class PhaseTime(NamedTuple):
    """Time of a phase in two parts, because the timers at its end are run as events.

    ``lead_ns`` is the time from the start to the arrival of the last message. Then timers of ``delays_ns``
    run one after the other. The phase ends with the last timer.
    """

    lead_ns: int
    delays_ns: tuple[int, ...]


class RingTimes(NamedTuple):
    """Messages of the ring algorithm on one rank: it sends ``messages`` messages of ``size_bytes``, one at a
    time.

    The first ``reduced`` messages that a rank receives are reduced, which takes ``reduction_ns`` per message.
    A reduced message is then forwarded, or ends the phase. ``delay_ns`` is the delay of a rank between two
    messages.
    """

    messages: int
    size_bytes: int
    delay_ns: int
    reduced: int
    reduction_ns: int

    @classmethod
    def of(cls, start: PhaseStart) -> RingTimes:
        """Return the sizes and times of a phase."""
        plan = start.plan
        peers = plan.ranks - 1
        messages = {
            CollectiveKind.ALL_REDUCE: 2 * peers,
            CollectiveKind.ALL_TO_ALL: plan.ranks * peers // 2,
        }.get(plan.kind, peers)
        size = _message_size(plan)
        reduces = plan.kind in {CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER}
        return cls(
            messages, size, start.delay_ns, peers if reduces else 0,
            start.reduction_ns(size) if reduces else 0,
        )  # fmt: skip

    @property
    def delays_ns(self) -> tuple[int, ...]:
        """Return the durations of the timers that run after the last message."""
        at_end = self.reduced == self.messages and self.reduced > 0
        return (self.delay_ns, self.reduction_ns) if at_end else (self.delay_ns,)

    def together(self, link_ns: int) -> PhaseTime:
        """Return the time of the phase if all ranks start at the same time and each message takes
        ``link_ns``.
        """
        before = self.reduced - (len(self.delays_ns) > 1)
        lead_ns = self.messages * (self.delay_ns + link_ns) + before * self.reduction_ns
        return PhaseTime(lead_ns, self.delays_ns)

    def arrivals(self, starts_ns: tuple[int, ...], links_ns: tuple[int, ...]) -> list[int]:
        """Return the time at which each rank of the ring has received its last message. O(messages x ranks).

        ``starts_ns`` is the start of each rank. ``links_ns`` is the time of a message to each rank from the
        previous rank. A rank has received a message when the message has arrived and the rank has sent its
        own previous message. It sends the next message ``delay_ns`` later, plus the time of the reduction if
        the message is reduced.
        """
        sent = np.array(starts_ns, np.int64) + self.delay_ns
        links = np.array(links_ns, np.int64)
        received = sent
        for message in range(self.messages):
            received = np.maximum(np.roll(sent, 1) + links, sent)
            sent = received + self.delay_ns
            if message < self.reduced:
                sent += self.reduction_ns
        arrivals: list[int] = received.tolist()
        return arrivals


@dataclass(slots=True)
class PhaseTimes:
    """Times of phases whose ranks all behave alike and start at the same time. Each distinct phase is
    computed once.

    All ranks of such a phase send and receive equal messages at equal times. Therefore it is enough to run
    one rank that receives its own messages. Messages outside the phase have no effect, because the network
    has no congestion.
    """

    network: UnawareNetwork
    _times: dict[tuple[PhasePlan, int], PhaseTime] = field(
        default_factory=dict[tuple[PhasePlan, int], PhaseTime]
    )

    def of(self, start: PhaseStart) -> PhaseTime:
        """Return the time of a phase. Raises :class:`Ambiguous` if running one rank does not determine it."""
        key = start.plan, id(start.ring) if start.in_group else 0  # lists of groups live throughout the run
        time = self._times.get(key)
        if time is None:
            if start.plan.algorithm.family == "ring":
                ring, times = start.ring, RingTimes.of(start)
                after = ring[(start.position + 1) % len(ring)]
                link_ns = self.network.delay_ns(start.rank, after, times.size_bytes)
                if not link_ns:
                    raise Ambiguous
                time = times.together(link_ns)
            else:
                queue = EventQueue()
                timers = _TracedTimers(queue)
                gated = (
                    start.plan.algorithm.family == "direct" and start.plan.kind is CollectiveKind.ALL_REDUCE
                )
                ends: list[PhaseTime] = []
                alone = replace(
                    start,
                    timers=timers,
                    mailbox=_Echo(self.network, queue, timers, is_gated=gated),
                    done=lambda: ends.append(timers.since),
                )
                machine_of(alone).start()
                queue.run()
                if len(ends) != 1:
                    raise Ambiguous
                time = ends[0]
            self._times[key] = time
        return time


class _TracedTimers(Timers):
    """Timers that record their cause: ``since`` is the time of the message arrival that led to the current
    timer, and the delays since then.
    """

    __slots__ = ("ran_ns", "since")

    def __init__(self, queue: EventQueue) -> None:
        super().__init__(queue)
        self.since = PhaseTime(0, ())
        self.ran_ns = -1

    def after(self, delay_ns: int, callback: Callback, argument: object) -> None:
        lead_ns, delays_ns = self.since
        behind = PhaseTime(lead_ns, (*delays_ns, delay_ns))
        super().after(delay_ns, self._resume, (behind, callback, argument))

    def _resume(self, waiting: tuple[PhaseTime, Callback, object]) -> None:
        self.since, callback, argument = waiting
        self.ran_ns = self._queue.now_ns
        callback(argument)


class _Echo(Mailbox):
    """Mailbox of a single simulated rank, in place of its peers. A receive ends at the time at which the
    message that this rank sent would arrive at a peer.
    """

    __slots__ = ("_arrived_ns", "_gated", "_sent_ns", "_timers", "_wires")

    def __init__(
        self, network: UnawareNetwork, queue: EventQueue, timers: _TracedTimers, *, is_gated: bool
    ) -> None:
        super().__init__(network, queue)
        self._wires, self._timers, self._gated = network, timers, is_gated
        self._sent_ns = self._arrived_ns = -1

    def send(
        self, key: tuple[int, int, int, int], sent: Callback | None = None, argument: object = None
    ) -> None:
        self._sent_ns = self._wires.delay_ns(key[1], key[2], key[3])
        if not self._sent_ns:
            raise Ambiguous

    def receive(self, key: tuple[int, int, int, int], received: Callback, argument: object) -> None:
        self._check(self._arrived_ns)
        self._queue.enter(self._queue.now_ns + self._sent_ns, self._come, (received, argument))

    def _come(self, waiting: tuple[Callback, object]) -> None:
        received, argument = waiting
        self._arrived_ns = self._queue.now_ns
        self._check(self._timers.ran_ns)
        self._timers.since = PhaseTime(self._queue.now_ns, ())
        received(argument)

    def _check(self, other_ns: int) -> None:
        """Raise :class:`Ambiguous` if a token (see the module) and the arrival of a message have the same
        time and their order matters. It matters in a direct all-reduce, whose second half waits for all
        messages of the first half.
        """
        if self._gated and other_ns == self._queue.now_ns:
            raise Ambiguous
