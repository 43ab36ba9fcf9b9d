"""The slices of a trace as columns. Units at the border: microseconds -> whole ns and the part of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.chrome_events import TraceEvent, event_times
from hespas.converters.linking import pair
from hespas.graph import OpClass, StringTable, StringTableBuilder
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError

__all__ = ["ARROWS", "Arrows", "Collected", "Collector", "Track"]

Track = tuple[int | str, int | str]

_EXACT_US = float(1 << 31)
"""Below this a float64 is within half a ps of the microseconds written: 2**31 us are 36 minutes."""
_CLASSES = {member.name.lower(): int(member) for member in OpClass}
_TEXTS = ("op", "kernel", "module", "shapes", "dtype", "strides", "values")
_PHASES = "XBEsf"
_WHOLE, _BEGIN, _SOURCE, _TARGET = 0, 1, 3, 4
ARROWS = "launch"
"""The category of arrows from host operations to the work they caused."""
_LARGEST_RUN = (1 << 31) - 1


class _Name(msgspec.Struct):
    name: str = ""


class _Args(msgspec.Struct, gc=False):
    """What our writer tells of a slice; others may use the same words for the same things."""

    op: str = ""
    kernel: str = ""
    module: str = ""
    shapes: str = ""
    dtype: str = ""
    strides: str = ""
    values: str = ""
    op_class: str = ""
    run: int | None = None
    bytes: int | float | None = None
    start_ns: int | float | None = None
    duration_ns: int | float | None = None


_NOTHING = _Args()
_NAMES = msgspec.json.Decoder(_Name)
_ARGS = msgspec.json.Decoder(_Args)


@dataclass(frozen=True, slots=True, eq=False)
class Arrows:
    """Ends of arrows in order of their numbers: where they begin and end, by track and whole ns."""

    source_track: IntArray
    source_ns: IntArray
    target_track: IntArray
    target_ns: IntArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Collected:
    """Slices as columns of shape ``(slices,)``; ``track`` numbers ``tracks`` (process, thread).

    Times are whole ns; ``*_part_ns`` are the fractions behind them. ``told_*_ns`` are what arguments of these
    names tell (NaN: nothing), which only from our writer are the exact times. ``skipped`` counts events
    without a duration by phase; ``unfinished`` counts slices that never ended, ``orphans`` ends without a
    begin. ``arrows`` join slices.
    """

    strings: StringTable
    tracks: tuple[Track, ...]
    process_names: Mapping[int | str, str]
    thread_names: Mapping[Track, str]
    track: IntArray
    name_row: SmallIntArray
    category_row: SmallIntArray
    arguments: Mapping[str, SmallIntArray]
    op_class: NDArray[np.int8]
    run: SmallIntArray
    bytes_moved: FloatArray
    start_ns: IntArray
    start_part_ns: FloatArray
    duration_ns: IntArray
    duration_part_ns: FloatArray
    told_start_ns: FloatArray
    told_duration_ns: FloatArray
    skipped: Mapping[str, int]
    unfinished: int
    orphans: int
    arrows: Arrows

    def only(self, rows: BoolArray) -> Collected:
        """Some of the slices."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        arguments = {key: column[rows] for key, column in self.arguments.items()}
        return replace(self, arguments=arguments, **columns)


_COLUMNS = (
    "track", "name_row", "category_row", "op_class", "run", "bytes_moved", "start_ns", "start_part_ns",
    "duration_ns", "duration_part_ns", "told_start_ns", "told_duration_ns",
)  # fmt: skip


class Collector:
    """Takes blocks of events; :meth:`finish` pairs what began with what ended."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._strings = StringTableBuilder()
        self._tracks: dict[Track, int] = {}
        self._processes: dict[int | str, str] = {}
        self._threads: dict[Track, str] = {}
        self._skipped: dict[str, int] = {}
        self._seen = 0
        self._parts: dict[str, list[NDArray[np.generic]]] = {}

    def add(self, events: list[TraceEvent], array: bytes) -> None:
        """Take one block. Raises ``FormatError`` for a slice whose time is missing or no number."""
        chosen: list[int] = []
        kinds: list[int] = []
        for place, event in enumerate(events):
            kind = _PHASES.find(event.ph) if len(event.ph) == 1 else -1
            if kind < 0 or (kind >= _SOURCE and (event.cat != ARROWS or type(event.id) is not int)):
                self._skip(event)
                continue
            if kind > 0 or event.dur is None:
                event.dur = 0
            chosen.append(place)
            kinds.append(kind)
        if chosen:
            self._slices([events[place] for place in chosen], events, array, chosen, kinds)
        self._seen += len(events)

    def _refuse_missing(self, slices: Sequence[TraceEvent], chosen: Sequence[int]) -> None:
        """Times begin somewhere: a slice that does not say where cannot be placed."""
        for event, place in zip(slices, chosen, strict=True):
            if event.ts is None:
                raise FormatError(
                    f"{event.name[:40]!r} has no start", path=self._path,
                    position=f"event {self._seen + place + 1}, field 'ts'", hint="export the trace again",
                )  # fmt: skip

    def _skip(self, event: TraceEvent) -> None:
        what = f"phase {event.ph[:1] or '?'}"
        if event.ph == "M":
            self._named(event)
        self._skipped[what] = self._skipped.get(what, 0) + 1

    def _named(self, event: TraceEvent) -> None:
        if event.name not in {"process_name", "thread_name"}:
            return
        try:
            name = _NAMES.decode(event.args).name
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        process, thread = _key(event.pid), _key(event.tid)
        if event.name == "process_name":
            self._processes[process] = name
        else:
            self._threads[process, thread] = name

    def _slices(
        self,
        slices: list[TraceEvent],
        events: list[TraceEvent],
        array: bytes,
        chosen: Sequence[int],
        kinds: Sequence[int],
    ) -> None:
        self._refuse_missing(slices, chosen)
        start_ns, duration_ns = event_times(events, array, chosen, path=self._path, before=self._seen)
        start, start_part = _with_parts(start_ns, [event.ts for event in slices])
        duration, duration_part = _with_parts(duration_ns, [event.dur for event in slices])
        args = [self._decoded(event) for event in slices]
        add, number = self._strings.add, self._tracks
        tracks = [number.setdefault((_key(event.pid), _key(event.tid)), len(number)) for event in slices]
        self._keep("kind", np.array(kinds, np.int8))
        self._keep("start_ns", start)
        self._keep("start_part_ns", start_part)
        self._keep("duration_ns", duration)
        self._keep("duration_part_ns", duration_part)
        self._keep("track", np.array(tracks, np.int64))
        self._keep("name", np.array([add(event.name) for event in slices], np.int32))
        self._keep("category", np.array([add(event.cat) for event in slices], np.int32))
        for key in _TEXTS:
            self._keep(key, np.array([add(getattr(each, key)) for each in args], np.int32))
        self._keep("op_class", np.array([_CLASSES.get(each.op_class, 0) for each in args], np.int8))
        self._keep("number", np.array([_number(event.id) for event in slices], np.int64))
        self._keep("run", np.array([_run(each.run) for each in args], np.int32))
        self._keep("bytes", np.array([_size(each.bytes) for each in args], np.float64))
        self._keep("told_start_ns", np.array([_size(each.start_ns) for each in args], np.float64))
        self._keep("told_duration_ns", np.array([_size(each.duration_ns) for each in args], np.float64))

    @staticmethod
    def _decoded(event: TraceEvent) -> _Args:
        if len(event.args) <= len("{}"):
            return _NOTHING
        try:
            return _ARGS.decode(event.args)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _NOTHING  # another writer's words

    def _keep(self, name: str, values: NDArray[np.generic]) -> None:
        self._parts.setdefault(name, []).append(values)

    def _column(self, name: str, dtype: type[np.generic]) -> NDArray[np.generic]:
        parts = self._parts.pop(name, [])
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    def finish(self) -> Collected:
        """All slices: those that were whole, then the pairs."""
        kind = self._column("kind", np.int8).astype(np.int8)
        whole = np.flatnonzero(kind == _WHOLE)
        halves = np.flatnonzero((kind != _WHOLE) & (kind < _SOURCE))
        start_ns = self._column("start_ns", np.int64).astype(np.int64)
        part_ns = self._column("start_part_ns", np.float64).astype(np.float64)
        track = self._column("track", np.int64).astype(np.int64)
        duration_ns = self._column("duration_ns", np.int64).astype(np.int64)
        duration_part_ns = self._column("duration_part_ns", np.float64).astype(np.float64)
        pairs = pair(track[halves], start_ns[halves], kind[halves] == _BEGIN)
        begin = halves[pairs.begin]
        ended = pairs.end >= 0
        last_ns = int((start_ns + duration_ns).max()) if len(kind) else 0
        end = halves[np.where(ended, pairs.end, 0)] if len(begin) else begin
        end_ns = np.where(ended, start_ns[end], last_ns)
        end_part_ns = np.where(ended, part_ns[end], 0.0)
        row = np.concatenate([whole, begin])
        return Collected(
            strings=self._strings.build(),
            tracks=tuple(self._tracks),
            process_names=self._processes,
            thread_names=self._threads,
            track=track[row],
            name_row=self._column("name", np.int32)[row].astype(np.int32),
            category_row=self._column("category", np.int32)[row].astype(np.int32),
            arguments={key: self._column(key, np.int32)[row].astype(np.int32) for key in _TEXTS},
            op_class=self._column("op_class", np.int8)[row].astype(np.int8),
            run=self._column("run", np.int32)[row].astype(np.int32),
            bytes_moved=self._column("bytes", np.float64)[row].astype(np.float64),
            start_ns=start_ns[row],
            start_part_ns=part_ns[row],
            duration_ns=np.concatenate([duration_ns[whole], end_ns - start_ns[begin]]),
            duration_part_ns=np.concatenate([duration_part_ns[whole], end_part_ns - part_ns[begin]]),
            told_start_ns=self._column("told_start_ns", np.float64)[row].astype(np.float64),
            told_duration_ns=self._column("told_duration_ns", np.float64)[row].astype(np.float64),
            skipped=self._skipped,
            unfinished=int((~ended).sum()),
            orphans=pairs.orphans,
            arrows=self._arrows(kind, track, start_ns),
        )

    def _arrows(self, kind: NDArray[np.int8], track: IntArray, start_ns: IntArray) -> Arrows:
        """Pairs of ends of the same number."""
        number = self._column("number", np.int64).astype(np.int64)
        source, target = np.flatnonzero(kind == _SOURCE), np.flatnonzero(kind == _TARGET)
        _, first, second = np.intersect1d(number[source], number[target], return_indices=True)
        source, target = source[first], target[second]
        return Arrows(track[source], start_ns[source], track[target], start_ns[target])


def _key(value: int | str | None) -> int | str:
    return -1 if value is None else value


def _number(value: int | str | None) -> int:
    return value if type(value) is int and abs(value) < 1 << 62 else -1


def _run(value: int | None) -> int:
    return value if value is not None and 0 <= value <= _LARGEST_RUN else -1


def _size(value: float | None) -> float:
    return float("nan") if value is None or abs(value) > 1e300 else float(value)


def _with_parts(
    whole_ns: IntArray, times_us: Sequence[int | float | str | None]
) -> tuple[IntArray, FloatArray]:
    """Whole ns rounded down, and the rest of each time where a float still holds the ps."""
    if not any(type(time) is float for time in times_us):
        return whole_ns, np.zeros(len(whole_ns))
    written_us = np.array([time if type(time) is float else 0.0 for time in times_us], np.float64)
    exact = np.array([type(time) is float for time in times_us]) & (np.abs(written_us) < _EXACT_US)
    steps = np.rint(np.where(exact, written_us, 0.0) * 1e6).astype(np.int64)
    floor_ns = np.where(exact, steps // 1000, whole_ns)
    return floor_ns, np.where(exact, (steps % 1000) / 1000.0, 0.0)
