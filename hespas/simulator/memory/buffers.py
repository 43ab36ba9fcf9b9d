"""Which values share memory.

Values that are one buffer by construction come first: updates in place, the state of a loop from trip to
trip, results that are written over donated parameters. What a program returns, and what is donated to it, has
memory of its own from the beginning; as XLA's buffer assignment does, temporaries are put into that, the
greatest first, where nothing else is in it while they live. The others share memory as a heap does: at each
moment it holds what lives then, and a value that is written over another one takes its place.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from hespas.simulator.memory.lifetimes import Lifetimes
from hespas.simulator.memory.values import Kind, Values

__all__ = ["Buffer", "buffers_of"]

_MOST_TRIED = 16
"""Reserved places looked at for one temporary, the smallest that hold it first."""
_SMALL = 1 / 4096
"""Temporaries under this share of the greatest buffer are not worth a look."""

_Interval = tuple[int, int]


@dataclass(slots=True)
class Buffer:
    """Memory for ``values``, which never need it at the same time. ``lives`` are its intervals, apart and in
    order. ``reserved`` says that it is there throughout, ``inside`` that it stands in a reserved one.
    """

    values: list[int]
    size_bytes: float
    kind: Kind
    lives: list[_Interval]
    reserved: bool = False
    inside: bool = False


def buffers_of(found: Values, lifetimes: Lifetimes, donated: dict[int, int]) -> list[Buffer]:
    """The buffers of all values. ``donated`` maps results to the parameters that they are written over.
    O(values log values).
    """
    return _Assignment(found, lifetimes, donated).run()


class _Assignment:
    """The work of :func:`buffers_of`."""

    def __init__(self, found: Values, lifetimes: Lifetimes, donated: dict[int, int]) -> None:
        self.found, self.values = found, found.values
        self.lifetimes, self.donated = lifetimes, donated
        self.givers = set(donated.values())
        self.spans = [
            lifetimes.of(value, donated=number in self.givers) for number, value in enumerate(self.values)
        ]
        self.owner = list(range(len(self.values)))
        self.until = [end for _, end in self.spans]
        self.order = sorted(range(len(self.values)), key=lambda number: (self.spans[number][0], number))

    def run(self) -> list[Buffer]:
        """Join, reserve, share."""
        self._join()
        members: dict[int, list[int]] = {}
        for number, value in enumerate(self.values):
            if value.size_bytes:
                members.setdefault(self.owner[number], []).append(number)
        reserves = self.found.results is not None
        buffers = {owner: self._buffer(numbers, reserves=reserves) for owner, numbers in members.items()}
        if reserves:
            self._place(list(buffers.values()))
        self._share(buffers)
        return list(buffers.values())

    def _buffer(self, members: list[int], *, reserves: bool) -> Buffer:
        kinds = {self.values[number].kind for number in members}
        kind = next(
            each for each in (Kind.PARAMETER, Kind.CONSTANT, Kind.OUTPUT, Kind.TEMPORARY) if each in kinds
        )
        size = max(self.values[number].size_bytes for number in members)
        lives = _united([self.spans[number] for number in members])
        if any(self.values[number].slot >= 0 for number in members):  # the state of a loop keeps its place
            lives = [(lives[0][0], lives[-1][1])]
        return Buffer(members, size, kind, lives, reserved=reserves and kind is not Kind.TEMPORARY)

    # --- Values that are one buffer by construction

    def _join(self) -> None:
        """What is updated in place, carried by a loop or written over a parameter joins what was there, where
        that has ended by then.
        """
        state = {value: slot for slot, value in self.found.handed}
        for number in self.order:
            value = self.values[number]
            if number in self.donated:
                self._joined(number, self.donated[number])
            elif not ((value.in_place or value.slot >= 0) and self._takes_one_over(number)):
                slot = state.get(number, -1)
                if slot >= 0:
                    self._joined(number, slot)

    def _takes_one_over(self, number: int) -> bool:
        return any(
            self.values[other].kind is Kind.TEMPORARY and self._joined(number, other)
            for other in self.values[number].over
        )

    def _joined(self, number: int, other: int) -> bool:
        """Make a value part of another's buffer, if nothing in that is needed any longer."""
        place, value = self.owner[other], self.values[number]
        may_touch = other in value.over
        born = self.lifetimes.replaces_until(value) if may_touch else self.spans[number][0] - 1
        if self.until[place] > born or place == self.owner[number]:
            return False
        self.owner[number] = place
        self.until[place] = max(self.until[number], born + 1)
        return True

    # --- Temporaries in memory that is there anyway

    def _place(self, buffers: list[Buffer]) -> None:
        """Put temporaries into reserved buffers: parameters that are not donated are nobody else's."""
        rooms = [_Room(buffer) for buffer in buffers if buffer.reserved and self._is_writable(buffer)]
        rooms.reverse()
        rooms.sort(key=lambda room: room.buffer.size_bytes)
        sizes = [room.buffer.size_bytes for room in rooms]
        shares = self._shares()
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
            for room in rooms[first : first + _MOST_TRIED]:
                if room.admits(buffer.lives, shares):
                    room.add(buffer.lives)
                    buffer.inside = True
                    break

    def _is_writable(self, buffer: Buffer) -> bool:
        return buffer.kind is Kind.OUTPUT or any(number in self.givers for number in buffer.values)

    def _shares(self) -> set[tuple[int, int]]:
        """Overlaps of two buffers that do no harm: from where one is written over the other to where that
        ends.
        """
        return {
            (self.spans[number][0], self.spans[other][1])
            for number, value in enumerate(self.values)
            for other in value.over
            if self.spans[other][1] == self.lifetimes.replaces_until(value)
        }

    # --- Temporaries written over one that ends there

    def _share(self, buffers: dict[int, Buffer]) -> None:
        """End a buffer of temporaries where a value begins that takes its place."""
        free = {owner for owner, buffer in buffers.items() if not (buffer.reserved or buffer.inside)}
        ended: set[int] = set()
        for number in self.order:
            place = self.owner[number]
            if place not in free:
                continue
            until = self.lifetimes.replaces_until(self.values[number])
            for other in self.values[number].over:
                giver = self.owner[other]
                if giver in free and giver != place and giver not in ended and self.until[giver] <= until:
                    ended.add(giver)
                    start, _ = buffers[giver].lives.pop()
                    if start < self.spans[number][0]:
                        buffers[giver].lives.append((start, self.spans[number][0] - 1))
                    break


@dataclass(slots=True)
class _Room:
    """A reserved buffer and what lives in it."""

    buffer: Buffer
    taken: list[_Interval] = field(default_factory=list[_Interval])

    def __post_init__(self) -> None:
        self.taken = list(self.buffer.lives)

    def admits(self, lives: list[_Interval], shares: set[tuple[int, int]]) -> bool:
        """Whether nothing in it lives at the same time, but for overlaps that do no harm."""
        for start, end in lives:
            at = bisect_left(self.taken, (start, start))
            for place in range(max(at - 2, 0), len(self.taken)):  # those before have ended: they only touch
                other_start, other_end = self.taken[place]
                if other_start > end:
                    break
                overlap = (max(start, other_start), min(end, other_end))
                if overlap[0] <= overlap[1] and overlap not in shares:
                    return False
        return True

    def add(self, lives: list[_Interval]) -> None:
        """Put something in."""
        for each in lives:
            insort(self.taken, each)


def _united(parts: list[_Interval]) -> list[_Interval]:
    """Intervals that touch or overlap as one."""
    found: list[_Interval] = []
    for start, end in sorted(parts):
        if found and start <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
