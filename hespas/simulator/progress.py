"""Work that goes on at a pace which changes: kernels and collectives of one rank beside each other.

What communicates and what computes on the same device slows each other down by the columns of a
:class:`Pressure`. Whenever something of a rank begins or ends, the work that is left of what runs there is
stretched anew. A collective goes at the pace of its slowest member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from heapq import heappush
from math import nan

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray

__all__ = ["Pressure", "Progress"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pressure:
    """What slows what down, as factors without a unit, shape ``(nodes,)`` or ``(tasks,)``; 0: nothing.

    Computation beside communication takes ``1 + by_units x (sum of holds) + by_memory x (sum of moves)`` times
    as long: ``holds`` counts from the start of what communicates, while it waits for other ranks too,
    ``moves`` while its bytes move. Communication that ``stretches`` takes ``1 + moves x (sum of by_memory, at
    most 1)`` times as long beside computation.
    """

    holds: FloatArray
    moves: FloatArray
    by_units: FloatArray
    by_memory: FloatArray
    stretches: BoolArray

    def __len__(self) -> int:
        return len(self.holds)

    @property
    def matters(self) -> bool:
        """Whether anything can slow anything down."""
        talks = (self.holds > 0) | (self.moves > 0)
        return bool(talks.any()) and bool(((self.by_units > 0) | (self.by_memory > 0)).any())

    def take(self, rows: IntArray | SmallIntArray, known: BoolArray | None = None) -> Pressure:
        """Those of some rows, without those that are not ``known``."""
        kept = np.ones(len(rows), np.bool_) if known is None else known
        rows = np.where(kept, rows, 0)
        if not len(self):
            return Pressure.none(len(rows))
        return Pressure(**{each.name: getattr(self, each.name)[rows] * kept for each in fields(self)})

    @classmethod
    def none(cls, count: int) -> Pressure:
        """Nothing slows anything down."""
        nothing = np.zeros(count)
        return cls(
            holds=nothing,
            moves=nothing,
            by_units=nothing,
            by_memory=nothing,
            stretches=np.zeros(count, np.bool_),
        )

    @classmethod
    def joined(cls, parts: Sequence[Pressure]) -> Pressure:
        """Those of several, one behind the other."""
        parts = [cls.none(0), *parts]
        names = [each.name for each in fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(slots=True)
class Progress:
    """The pace of what runs. ``owner`` is the rank of each task, ``meeting`` the one it ends with (-1: none).

    ``ended`` and ``moved`` are when tasks that were paced ended, and when their bytes began to move (NaN:
    others).
    """

    owner: list[int]
    meeting: list[int]
    holds: list[float]
    moves: list[float]
    by_units: list[float]
    by_memory: list[float]
    paced: list[bool]
    presses: list[bool]
    slow: list[float]
    left: list[float]
    since: list[float]
    due: list[float]
    ended: list[float]
    moved: list[float]
    kernels: list[set[int]]
    talks: list[set[int]]
    load: list[float]
    together: dict[int, list[int]]
    changed: set[int]

    @classmethod
    def of(
        cls, pressure: Pressure, stream: IntArray | SmallIntArray, owner: IntArray, ended_by: IntArray
    ) -> Progress:
        """Nothing runs yet; what holds no stream is not paced."""
        held = stream >= 0
        slowed = (pressure.by_units > 0) | (pressure.by_memory > 0)
        presses = ((pressure.holds > 0) | (pressure.moves > 0)) & held
        paced = (slowed | (pressure.stretches & presses)) & held
        tasks, owners = len(pressure), int(owner.max(initial=-1)) + 1
        return cls(
            owner=owner.tolist(),
            meeting=ended_by.tolist(),
            holds=pressure.holds.tolist(),
            moves=pressure.moves.tolist(),
            by_units=pressure.by_units.tolist(),
            by_memory=pressure.by_memory.tolist(),
            paced=paced.tolist(),
            presses=presses.tolist(),
            slow=[nan] * tasks,
            left=[0.0] * tasks,
            since=[0.0] * tasks,
            due=[nan] * tasks,
            ended=[nan] * tasks,
            moved=[nan] * tasks,
            kernels=[set() for _ in range(owners)],
            talks=[set() for _ in range(owners)],
            load=[0.0] * owners,
            together={},
            changed=set(),
        )

    def begin(self, task: int, now: float, work_ns: float) -> bool:
        """A task starts that waits for nobody; whether its end is told by :meth:`settle`."""
        if self.presses[task]:
            self.wait(task)
            self.move(task, now, work_ns)
        elif self.paced[task]:
            owner = self.owner[task]
            self.kernels[owner].add(task)
            self.changed.add(owner)
            self.left[task], self.since[task] = work_ns, now
        return self.paced[task]

    def wait(self, task: int) -> None:
        """Communication starts, and may have to wait for others."""
        if self.presses[task]:
            owner = self.owner[task]
            self.talks[owner].add(task)
            self.changed.add(owner)

    def move(self, task: int, now: float, work_ns: float) -> bool:
        """The bytes of communication begin to move; whether its end is told by :meth:`settle`."""
        if self.presses[task]:
            self.moved[task] = now
            self.left[task], self.since[task] = work_ns, now
            self.changed.add(self.owner[task])
            if self.paced[task] and self.meeting[task] >= 0:
                self.together.setdefault(self.meeting[task], []).append(task)
        return self.paced[task]

    def end(self, task: int, now: float) -> bool:
        """A task that ends; False where its end has been moved to another time."""
        if self.paced[task]:
            if self.due[task] != now:
                return False
            self.ended[task] = now
            self.due[task] = nan
            self.together.pop(self.meeting[task], None)
        elif not self.presses[task]:
            return True
        owner = self.owner[task]
        (self.talks if self.presses[task] else self.kernels)[owner].discard(task)
        self.changed.add(owner)
        return True

    def settle(self, now: float, ends: list[tuple[float, int]]) -> None:
        """Once nothing more happens at a moment: the new ends of all whose pace has changed."""
        meetings: set[int] = set()
        for owner in self.changed:
            talks = sorted(self.talks[owner])
            held = sum(self.holds[task] for task in talks)
            moved = sum(self.moves[task] for task in talks if self.moved[task] == self.moved[task])
            load = 0.0
            for task in sorted(self.kernels[owner]):
                load += self.by_memory[task]
                self._stretch(
                    task, 1.0 + self.by_units[task] * held + self.by_memory[task] * moved, now, ends
                )
            self.load[owner] = min(load, 1.0)
            for task in talks:
                if not self.paced[task] or self.moved[task] != self.moved[task]:
                    continue
                if self.meeting[task] >= 0:
                    meetings.add(self.meeting[task])
                else:
                    self._stretch(task, self._pace(task), now, ends)
        self.changed.clear()
        for meeting in meetings:
            members = self.together[meeting]
            slowest = max(self._pace(task) for task in members)
            for task in members:
                self._stretch(task, slowest, now, ends)

    def _pace(self, task: int) -> float:
        return 1.0 + self.moves[task] * self.load[self.owner[task]]

    def _stretch(self, task: int, slow: float, now: float, ends: list[tuple[float, int]]) -> None:
        if slow == self.slow[task]:
            return
        if now > self.since[task]:
            self.left[task] = max(self.left[task] - (now - self.since[task]) / self.slow[task], 0.0)
        self.slow[task], self.since[task] = slow, now
        self.due[task] = now + self.left[task] * slow
        heappush(ends, (self.due[task], task))

    def columns(self) -> tuple[FloatArray, FloatArray]:
        """``ended`` and ``moved``."""
        return np.array(self.ended, np.float64), np.array(self.moved, np.float64)
