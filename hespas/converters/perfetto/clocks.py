"""Times of all clocks as ns of the trace's own: https://perfetto.dev/docs/concepts/clock-sync."""

from __future__ import annotations

from dataclasses import dataclass, field

from hespas.files.wire import BYTES, WireError, fields
from hespas.schemas.perfetto.tables import BuiltinClock, ClockField, ClockSnapshotField

__all__ = ["LARGEST_NS", "Clocks"]

_Key = tuple[int, int]
"""The packet sequence a clock belongs to (0: all) and its number."""
LARGEST_NS = (1 << 61) - 1
"""73 years; sums of two such times fit 64 bits."""


@dataclass(slots=True)
class _Clock:
    unit_ns: int = 1
    incremental: bool = False
    last: int = 0
    offset_ns: int | None = None


@dataclass(slots=True)
class Clocks:
    """What the snapshots so far say of each clock. ``unknown`` counts times of clocks that none mentions."""

    primary: int = int(BuiltinClock.BOOTTIME)
    unknown: int = 0
    _clocks: dict[_Key, _Clock] = field(default_factory=dict[_Key, _Clock])

    def time_ns(self, sequence: int, clock: int | None, value: int, position: int) -> int:
        """A time as the trace's clock shows it. Raises ``WireError`` where it does not fit 64 bits."""
        number = self.primary if clock is None else clock
        known = self._clocks.get(_key(sequence, number))
        if known is None:
            known = self._clocks[_key(sequence, number)] = _Clock()
        if known.incremental:
            value = known.last = known.last + value
        if known.offset_ns is None and number != self.primary:
            self.unknown += 1
        found = value * known.unit_ns + (known.offset_ns or 0)
        if abs(found) > LARGEST_NS:
            raise WireError("a time is too large for 64 bits of nanoseconds", position)
        return found

    def snapshot(self, sequence: int, data: bytes, start: int, end: int) -> None:
        """Several clocks read at one moment."""
        read: list[tuple[_Key, int]] = []
        for number, wire, value, after in fields(data, start, end):
            if number == ClockSnapshotField.CLOCKS and wire == BYTES:
                read.append(self._one(sequence, data, value, after))
            elif number == ClockSnapshotField.PRIMARY_TRACE_CLOCK and wire != BYTES:
                self.primary = value
        if not read:
            return
        moment_ns = self._moment_ns(read)
        for key, shown in read:
            clock = self._clocks[key]
            clock.offset_ns = moment_ns - shown * clock.unit_ns
            clock.last = shown

    def _moment_ns(self, read: list[tuple[_Key, int]]) -> int:
        """The moment on the trace's clock: as that shows it, else as the first clock known before."""
        for key, shown in read:
            if key == (0, self.primary):
                return shown * self._clocks[key].unit_ns
        for key, shown in read:
            clock = self._clocks[key]
            if clock.offset_ns is not None:
                return shown * clock.unit_ns + clock.offset_ns
        key, shown = read[0]
        return shown * self._clocks[key].unit_ns

    def _one(self, sequence: int, data: bytes, start: int, end: int) -> tuple[_Key, int]:
        values = {number: value for number, wire, value, _ in fields(data, start, end) if wire != BYTES}
        key = _key(sequence, values.get(ClockField.CLOCK_ID, 0))
        clock = self._clocks.setdefault(key, _Clock())
        clock.unit_ns = values.get(ClockField.UNIT_MULTIPLIER_NS, 1) or 1
        clock.incremental = bool(values.get(ClockField.IS_INCREMENTAL, 0))
        return key, values.get(ClockField.TIMESTAMP, 0)


def _key(sequence: int, clock: int) -> _Key:
    of_sequence = BuiltinClock.LAST < clock <= BuiltinClock.LAST_OF_SEQUENCE
    return (sequence if of_sequence else 0, clock)
