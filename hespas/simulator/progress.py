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

__all__ = ["Pressure", "Progress", "Steady"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pressure:
    """What slows what down, as factors without a unit, shape ``(nodes,)`` or ``(tasks,)``; 0: nothing.

    Computation beside communication takes ``1 + by_units x (sum of holds) + by_memory x (sum of moves)``
    times as long: ``holds`` counts from the start of what communicates, while it waits for other ranks too,
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


_Ends = list[tuple[float, int]]
"""Times and tasks, a heap."""


class Steady:
    """The pace of what nothing slows down."""

    def begin(self, task: int, now: float, work_ns: float, ends: _Ends) -> None:
        """A task starts that waits for nobody."""
        heappush(ends, (now + work_ns, task))

    def wait(self, task: int) -> None:
        """Communication starts, and may have to wait for others."""

    def move(self, task: int, now: float, over_ns: float, ends: _Ends) -> None:
        """The last that communication waits for has come: it is over at ``over_ns``."""
        heappush(ends, (over_ns, task))

    def end(self, task: int, now: float) -> bool:
        """A task that ends; False where its end has been moved to another time."""
        return True

    def settle(self, now: float, ends: _Ends) -> None:
        """Once nothing more happens at a moment: the new ends of all whose pace has changed."""


@dataclass(slots=True)
class Progress(Steady):
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
    works: list[float]
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
        cls,
        pressure: Pressure,
        duration_ns: FloatArray,
        stream: IntArray | SmallIntArray,
        owner: IntArray,
        ended_by: IntArray,
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
            works=duration_ns.tolist(),
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

    def begin(self, task: int, now: float, work_ns: float, ends: _Ends) -> None:
        """A task starts that waits for nobody."""
        if self.presses[task]:
            self.wait(task)
            self.move(task, now, now + work_ns, ends)
        elif self.paced[task]:
            owner = self.owner[task]
            self.kernels[owner].add(task)
            self.left[task], self.since[task] = work_ns, now
            if self.talks[owner]:
                self.changed.add(owner)
            else:  # for most kernels no more is to do
                self._stretch(task, 1.0, now, ends)
        else:
            heappush(ends, (now + work_ns, task))

    def wait(self, task: int) -> None:
        """Communication starts, and may have to wait for others."""
        if self.presses[task]:
            owner = self.owner[task]
            self.talks[owner].add(task)
            if self.kernels[owner]:
                self.changed.add(owner)

    def move(self, task: int, now: float, over_ns: float, ends: _Ends) -> None:
        """The last that communication waits for has come: it is over at ``over_ns``, or takes longer."""
        if self.presses[task]:
            self.moved[task] = now
            self.changed.add(self.owner[task])
        if not self.paced[task]:
            heappush(ends, (over_ns, task))
            return
        self.left[task], self.since[task] = self.works[task], now
        if self.meeting[task] >= 0:
            self.together.setdefault(self.meeting[task], []).append(task)

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
        mine, others = self.kernels[owner], self.talks[owner]
        if self.presses[task]:
            mine, others = others, mine
        mine.discard(task)
        if others:
            self.changed.add(owner)
        if not self.kernels[owner]:
            self.load[owner] = 0.0
        return True

    def settle(self, now: float, ends: _Ends) -> None:
        """Once nothing more happens at a moment: the new ends of all whose pace has changed."""
        if ends and ends[0][0] == now:
            return
        meetings: set[int] = set()
        for owner in self.changed:
            meetings |= self._settle(owner, now, ends)
        self.changed.clear()
        for meeting in meetings:
            members = self.together[meeting]
            slowest = max(self._pace(task) for task in members)
            for task in members:
                self._stretch(task, slowest, now, ends)

    def _settle(self, owner: int, now: float, ends: _Ends) -> set[int]:
        """The new ends of what runs on a rank, but for meetings, which are returned."""
        talks = sorted(self.talks[owner])
        moving = [task for task in talks if self.moved[task] == self.moved[task]]
        held, moved = sum(self.holds[task] for task in talks), sum(self.moves[task] for task in moving)
        load = 0.0
        for task in sorted(self.kernels[owner]):
            load += self.by_memory[task]
            slow = 1.0 + self.by_units[task] * held + self.by_memory[task] * moved
            self._stretch(task, slow, now, ends)
        self.load[owner] = min(load, 1.0)
        mine = [task for task in moving if self.paced[task]]
        for task in mine:
            if self.meeting[task] < 0:
                self._stretch(task, self._pace(task), now, ends)
        return {self.meeting[task] for task in mine if self.meeting[task] >= 0}

    def _pace(self, task: int) -> float:
        return 1.0 + self.moves[task] * self.load[self.owner[task]]

    def _stretch(self, task: int, slow: float, now: float, ends: _Ends) -> None:
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
