"""A replay of one representative of each kind of rank, to see whether everything completes.

Slots and issue order are ASTRA-sim's (see :mod:`hespas.validators.job`). A collective ends ``comm_ns``
after its last member arrived, a message ``comm_ns`` after it was sent, whether or not somebody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from hespas.validators.program import COMM_SLOT, NodeProgram

__all__ = ["Key", "Outcome", "Task", "Waiting", "replay"]

Key = Hashable
"""What a message is matched by."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One rank: its nodes, the channel of each collective, the keys of what nodes send and receive.

    A node in ``sends`` and ``receives`` both is a permute. Communication in none of the three ends at once.
    """

    program: NodeProgram
    channel: dict[int, int]
    sends: dict[int, Key]
    receives: dict[int, Key]
    skipped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Waiting:
    """A node that never ended: on ``channel`` with the tasks that ``arrived``, or for a message ``key``."""

    task: int
    node: int
    channel: int = -1
    arrived: frozenset[int] = frozenset()
    key: Key | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """``issued``: collectives and sends of each task in issue order.

    ``unfinished`` counts the nodes of each task that never ended; ``waiting`` are those that were issued.
    """

    issued: list[list[int]]
    unfinished: list[int]
    waiting: list[Waiting]


@dataclass(slots=True, eq=False)
class _Rank:
    task: Task
    left: list[int]
    remaining: int
    ready: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))
    busy: list[bool] = field(default_factory=lambda: [False, False, False])
    rounds: dict[int, int] = field(default_factory=dict[int, int])
    parts: dict[int, int] = field(default_factory=dict[int, int])
    issued: list[int] = field(default_factory=list[int])


_END, _ARRIVE = range(2)


class _Engine:
    def __init__(
        self, tasks: Sequence[Task], needed: Sequence[int], comm_ns: int, use_durations: bool
    ) -> None:
        self.ranks = [_Rank(task, task.program.waiting.copy(), len(task.program)) for task in tasks]
        self.needed = needed
        self.comm_ns = comm_ns
        self.use_durations = use_durations
        self.now = 0
        self.count = 0
        self.events: list[tuple[int, int, int, int, int]] = []
        self.meetings: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.arrived: dict[Key, int] = {}
        self.posted: dict[Key, deque[tuple[int, int]]] = {}

    def run(self) -> None:
        for number, rank in enumerate(self.ranks):
            for node in rank.task.program.by_priority:
                if not rank.left[node]:
                    self.make_ready(number, node)
            self.scan(number)
        while self.events:
            self.now, _, what, number, node = heappop(self.events)
            if what == _END:
                self.end(number, node)
            else:
                self.arrive(number, node)

    def push(self, delay: int, what: int, number: int, node: int) -> None:
        self.count += 1
        heappush(self.events, (self.now + delay, self.count, what, number, node))

    def slot(self, task: Task, node: int) -> int:
        """The slot a node needs, -1 for none: receives, and communication that concerns nobody."""
        if node in task.channel or node in task.sends:
            return COMM_SLOT
        if node in task.receives or node in task.skipped:
            return -1
        return task.program.slot[node]

    def make_ready(self, number: int, node: int) -> None:
        rank = self.ranks[number]
        slot = self.slot(rank.task, node)
        if slot < 0:
            self.issue(number, node)
        else:
            heappush(rank.ready[slot], rank.task.program.priority[node])

    def scan(self, number: int) -> None:
        rank = self.ranks[number]
        for slot, ready in enumerate(rank.ready):
            if ready and not rank.busy[slot]:
                rank.busy[slot] = True
                self.issue(number, rank.task.program.by_priority[heappop(ready)])

    def issue(self, number: int, node: int) -> None:
        rank = self.ranks[number]
        task = rank.task
        if node in task.channel or node in task.sends:
            rank.issued.append(node)
        if node in task.channel:
            self.join(number, node, task.channel[node])
        elif node in task.sends or node in task.receives:
            rank.parts[node] = (node in task.sends) + (node in task.receives)
            if node in task.sends:
                self.push(self.comm_ns, _ARRIVE, number, node)
            if node in task.receives:
                self.post(number, node, task.receives[node])
        elif node in task.skipped:
            self.push(0, _END, number, node)
        else:
            self.push(task.program.compute_ns[node] if self.use_durations else 1, _END, number, node)

    def join(self, number: int, node: int, channel: int) -> None:
        rank = self.ranks[number]
        turn = rank.rounds.get(channel, 0)
        rank.rounds[channel] = turn + 1
        present = self.meetings.setdefault((channel, turn), [])
        present.append((number, node))
        if len(present) == self.needed[channel]:
            for member, its_node in self.meetings.pop((channel, turn)):
                self.push(self.comm_ns, _END, member, its_node)

    def post(self, number: int, node: int, key: Key) -> None:
        if self.arrived.get(key, 0):
            self.arrived[key] -= 1
            self.part(number, node)
        else:
            self.posted.setdefault(key, deque()).append((number, node))

    def arrive(self, number: int, node: int) -> None:
        """A message is there: its sender goes on, and the oldest receive that waits for it."""
        rank = self.ranks[number]
        key = rank.task.sends[node]
        self.part(number, node)
        if node in rank.task.receives:  # a permute gives the slot back while it waits for its own message
            rank.busy[COMM_SLOT] = False
            self.scan(number)
        waiting = self.posted.get(key)
        if waiting:
            self.part(*waiting.popleft())
        else:
            self.arrived[key] = self.arrived.get(key, 0) + 1

    def part(self, number: int, node: int) -> None:
        rank = self.ranks[number]
        rank.parts[node] -= 1
        if not rank.parts[node]:
            self.push(0, _END, number, node)

    def end(self, number: int, node: int) -> None:
        rank = self.ranks[number]
        task = rank.task
        rank.remaining -= 1
        slot = self.slot(task, node)
        if slot >= 0 and not (node in task.sends and node in task.receives):
            rank.busy[slot] = False
        program = task.program
        for dependent in program.targets[program.bounds[node] : program.bounds[node + 1]]:
            rank.left[dependent] -= 1
            if not rank.left[dependent]:
                self.make_ready(number, dependent)
        self.scan(number)

    def outcome(self) -> Outcome:
        waiting: list[Waiting] = []
        for (channel, _), present in self.meetings.items():
            arrived = frozenset(number for number, _ in present)
            waiting += [Waiting(number, node, channel, arrived) for number, node in present]
        for key, queue in self.posted.items():
            waiting += [Waiting(number, node, key=key) for number, node in queue]
        return Outcome([rank.issued for rank in self.ranks], [rank.remaining for rank in self.ranks], waiting)


def replay(
    tasks: Sequence[Task], needed: Sequence[int], *, comm_ns: int, use_durations: bool = True
) -> Outcome:
    """Run all tasks until nothing moves any more.

    ``needed[channel]`` is the number of tasks a collective on a channel waits for (one more than there are:
    it never ends). ``use_durations`` false lets every computation take 1 ns. O(nodes log nodes) in all.
    """
    engine = _Engine(tasks, needed, comm_ns, use_durations)
    engine.run()
    return engine.outcome()
