"""An XSpace, line by line: ``xla/tsl/profiler/protobuf/xplane.proto`` of https://github.com/openxla/xla."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hespas.converters.xplane.lines import (
    ABSENT,
    CLOCK,
    LARGEST_PS,
    NUMBERS,
    Line,
    LineEvents,
    LineKind,
    Program,
    device_clock,
    device_rows,
    has_devices,
    line_kind,
    split_module_name,
    truth_of,
)
from hespas.converters.xplane.stats import IdMap, StatReader, map_entries
from hespas.converters.xplane.texts import Texts
from hespas.converters.xplane.wire import Bytes, Fields, WireFault, split
from hespas.graph.columns import BoolArray, IntArray
from hespas.schemas.xplane import (
    ENVIRONMENT_PLANE,
    METADATA_PLANE,
    EventField,
    EventMetadataField,
    LineField,
    PlaneField,
    SpaceField,
    StatField,
)

__all__ = ["SpaceFacts", "SpaceReader"]

_CHUNK_EVENTS = 1 << 17
_MOST_PLANES, _MOST_LINES = 4096, 16_384
"""Of a recording, which has a plane per core and a line per stream or thread; each takes its time, also where
it is of a few bytes.
"""
_HLO_PROTO = b"Hlo Proto"
_CONTENT = (PlaneField.LINES, PlaneField.EVENT_METADATA, PlaneField.STATS)
_ASSIGNS = " = "
"""Part of the text of an instruction, and of no other name of an event."""


@dataclass(slots=True)
class SpaceFacts:
    """What is known beside the events, filled in while lines are read.

    ``planes`` has the stats of each plane by its name. ``base_ns`` is the moment from which times count.
    """

    planes: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    programs: list[Program] = field(default_factory=list[Program])
    base_ns: int | None = None
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    aggregated: int = 0
    unnamed: int = 0
    errors: int = 0
    cut_planes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Kinds:
    """The kinds of events of a plane: names, long ones where there is one, and facts that all share."""

    ids: IdMap
    name_row: IntArray
    long_row: IntArray
    stats: dict[str, IntArray]


class SpaceReader:
    """Reads a document once. Raises :class:`WireFault` with the byte of what makes no sense."""

    def __init__(self, raw: bytes, strings: Texts, recover: bool) -> None:
        """Read nothing yet."""
        self.data = Bytes(raw)
        self.strings = strings
        self.facts = SpaceFacts()
        self._recover = recover
        self._lines = 0
        self._shifts_ps: dict[str, int] = {}
        self._has_devices = False

    def lines(self) -> Iterator[LineEvents]:
        """All lines that hold something of ours, plane by plane."""
        planes = self._planes()
        count = len(planes.start)
        fields = split(self.data, planes.start, planes.value)
        names = self._texts(*fields.spans(PlaneField.NAME, count))
        filled: list[int] = np.unique(fields.owner[np.isin(fields.number, _CONTENT)]).tolist()
        if len(filled) > _MOST_PLANES:
            byte = int(planes.start[filled[_MOST_PLANES]])
            raise WireFault(f"{len(filled):,} planes; no recording has more than {_MOST_PLANES:,}", byte)
        self._has_devices = has_devices(names[place] for place in filled)
        for place in filled:
            yield from self._opened(names[place], fields.of(place))

    def _opened(self, name: str, fields: Fields) -> Iterator[LineEvents]:
        stats = StatReader.of(self.data, self.strings, fields.messages(PlaneField.STAT_METADATA))
        told = fields.messages(PlaneField.STATS)
        self.facts.planes.setdefault(name, {}).update(stats.named(told))
        if name == METADATA_PLANE:
            self._programs(fields.messages(PlaneField.EVENT_METADATA), stats)
        elif name != ENVIRONMENT_PLANE:
            yield from self._plane(name, fields, stats)

    def _texts(self, start: IntArray, size: IntArray) -> list[str]:
        return [
            self.data.text(at, max(length, 0))
            for at, length in zip(start.tolist(), size.tolist(), strict=True)
        ]

    def _planes(self) -> Fields:
        """Where planes lie; whole ones only where a cut file is to be recovered."""
        whole = np.array([0]), np.array([len(self.data)])
        try:
            fields = split(self.data, *whole)
        except WireFault as fault:
            if not self._recover:
                raise
            fields = split(self.data, whole[0], np.array([fault.byte]))
            self.facts.cut_planes = 1
        self.facts.errors = int(np.isin(fields.number, (SpaceField.ERRORS, SpaceField.WARNINGS)).sum())
        return fields.messages(SpaceField.PLANES)

    def _plane(self, plane: str, fields: Fields, stats: StatReader) -> Iterator[LineEvents]:
        spans = fields.messages(PlaneField.LINES)
        count = len(spans.start)
        inside = split(self.data, spans.start, spans.value)
        shown = self._texts(*inside.spans(LineField.DISPLAY_NAME, count))
        names = [
            text or name
            for text, name in zip(shown, self._texts(*inside.spans(LineField.NAME, count)), strict=True)
        ]
        numbers = inside.numbers(LineField.ID, count).tolist()
        timestamps_ns = inside.numbers(LineField.TIMESTAMP_NS, count).tolist()
        all_events = inside.messages(LineField.EVENTS)
        kinds: _Kinds | None = None
        filled: list[int] = np.unique(all_events.owner).tolist()
        truth = truth_of(plane, (names[place] for place in filled))
        self._lines += len(filled)
        if self._lines > _MOST_LINES:
            byte = int(spans.start[filled[-1]])
            raise WireFault(f"{self._lines:,} lines; no recording has more than {_MOST_LINES:,}", byte)
        for place in filled:
            name, events = names[place], all_events.of(place)
            kind = line_kind(plane, name, truth)
            if kind is LineKind.LEFT_OUT:
                what = f"{plane.rpartition(':')[0] or plane}: {name}"
                self.facts.left_out[what] = self.facts.left_out.get(what, 0) + len(events.start)
                continue
            kinds = kinds or self._kinds(fields.messages(PlaneField.EVENT_METADATA), stats)
            shift_ps = self._shift_ps(timestamps_ns[place], events)
            yield self._events(Line(plane, name, numbers[place], kind), events, shift_ps, kinds, stats)

    def _shift_ps(self, timestamp_ns: int, events: Fields) -> int:
        """The start of a line, in ps since the first line's."""
        if self.facts.base_ns is None:
            self.facts.base_ns = timestamp_ns
        shift_ps = (timestamp_ns - self.facts.base_ns) * 1000
        if abs(shift_ps) > LARGEST_PS:
            raise WireFault("a line begins more than 26 days from the others", int(events.start[0]))
        return shift_ps

    def _kinds(self, entries: Fields, stats: StatReader) -> _Kinds:
        ids, fields, count = map_entries(self.data, entries)
        full = fields.spans(EventMetadataField.NAME, count)
        shown = fields.spans(EventMetadataField.DISPLAY_NAME, count)
        full_row = self._text_rows(stats, *full)
        shown_row = self._text_rows(stats, *shown)
        common = stats.read(fields.messages(EventMetadataField.STATS), count)
        is_text = np.array([_ASSIGNS in self.strings[row] for row in full_row.tolist()], np.bool_)
        long_row = np.where((shown_row > 0) | is_text, full_row, 0)
        return _Kinds(ids, np.where(shown_row > 0, shown_row, full_row), long_row, common)

    def _text_rows(self, stats: StatReader, start: IntArray, size: IntArray) -> IntArray:
        spans = zip(start.tolist(), size.tolist(), strict=True)
        return np.array([stats.text(at, length) if length > 0 else 0 for at, length in spans], np.int64)

    def _events(
        self, line: Line, events: Fields, shift_ps: int, kinds: _Kinds, stats: StatReader
    ) -> LineEvents:
        parts = [
            self._chunk(
                line,
                events.start[at : at + _CHUNK_EVENTS],
                events.value[at : at + _CHUNK_EVENTS],
                kinds,
                stats,
            )
            for at in range(0, len(events.start), _CHUNK_EVENTS)
        ]
        offsets = np.cumsum([0, *(len(part.start_ps) for part in parts[:-1])])
        device = [part.device + offset for part, offset in zip(parts, offsets.tolist(), strict=True)]
        names = {name for part in parts for name in part.stats}
        stated = {name: np.concatenate([part.stat(name) for part in parts]) for name in sorted(names)}
        start_ps = np.concatenate([part.start_ps for part in parts]) + shift_ps
        duration_ps = np.concatenate([part.duration_ps for part in parts])
        if line.kind is not LineKind.HOST:
            start_ps, duration_ps = device_clock(start_ps, duration_ps, stated, self._shifts_ps, line.plane)
        return LineEvents(
            line=line,
            name_row=np.concatenate([part.name_row for part in parts]),
            start_ps=start_ps,
            duration_ps=duration_ps,
            device=np.concatenate(device),
            stats={name: column for name, column in stated.items() if name not in CLOCK},
            launch=np.concatenate([part.launch for part in parts]),
        )

    def _chunk(
        self, line: Line, start: IntArray, size: IntArray, kinds: _Kinds, stats: StatReader
    ) -> LineEvents:
        count = len(start)
        fields = split(self.data, start, size)
        kind = kinds.ids.find(fields.numbers(EventField.METADATA_ID, count))
        offset_ps = fields.numbers(EventField.OFFSET_PS, count)
        duration_ps = fields.numbers(EventField.DURATION_PS, count)
        beyond = np.flatnonzero(_is_beyond(offset_ps) | _is_beyond(duration_ps))
        if len(beyond):
            raise WireFault("an event lies more than 26 days from the others", int(start[beyond[0]]))
        self.facts.aggregated += int((fields.numbers(EventField.OCCURRENCES, count) > 0).sum())
        self.facts.unnamed += int((kind < 0).sum())
        at, known = np.maximum(kind, 0), kind >= 0
        told = stats.read(fields.messages(EventField.STATS), count)
        columns = _merged(told, kinds.stats, at, known)
        device = device_rows(line, columns, count, has_devices=self._has_devices)
        launch = columns.get("correlation_id", np.full(count, ABSENT, np.int64))
        name_row = _rows_of(kinds.name_row, at, known)
        stated = {name: column[device] for name, column in columns.items()}
        if line.kind is LineKind.OPS:
            stated["long_name"] = _rows_of(kinds.long_row, at, known)
        return LineEvents(
            line=line, name_row=name_row.astype(np.int32), start_ps=offset_ps, duration_ps=duration_ps,
            device=device, stats=stated, launch=launch,
        )  # fmt: skip

    def _programs(self, entries: Fields, stats: StatReader) -> None:
        """The HLO of each program, a stat of an event that never happens."""
        _, fields, count = map_entries(self.data, entries)
        start, size = fields.spans(EventMetadataField.NAME, count)
        found = fields.messages(EventMetadataField.STATS)
        inner = split(self.data, found.start, found.value)
        key = stats.ids.find(inner.numbers(StatField.METADATA_ID, len(found.start)))
        told = stats.read(found, count).get("program_id")
        for row in np.flatnonzero((inner.number == StatField.BYTES) & inner.is_bytes).tolist():
            stat = int(inner.owner[row])
            owner, name_of = int(found.owner[stat]), int(key[stat])
            if name_of < 0 or self.data.raw[_span(stats, name_of)] != _HLO_PROTO:
                continue
            name, number = split_module_name(self.data.text(int(start[owner]), max(int(size[owner]), 0)))
            if told is not None and told[owner] != ABSENT:
                number = int(told[owner])
            at, length = int(inner.start[row]), int(inner.value[row])
            self.facts.programs.append(Program(name, number, self.data.raw[at : at + length]))


def _span(stats: StatReader, row: int) -> slice:
    start = int(stats.name_start[row])
    return slice(start, start + max(int(stats.name_size[row]), 0))


def _rows_of(rows: IntArray, at: IntArray, known: BoolArray) -> IntArray:
    """String rows of kinds of events; row 0 for a kind that is not there."""
    if not len(rows):
        return np.zeros(len(at), np.int64)
    return np.where(known, rows[at], 0)


def _merged(
    told: dict[str, IntArray],
    common: dict[str, IntArray],
    at: IntArray,
    known: BoolArray,
) -> dict[str, IntArray]:
    """What events say themselves, else what their kind says."""
    merged = dict(told)
    for name, column in common.items():
        missing = ABSENT if name in NUMBERS or name in CLOCK else 0
        of_kind = np.where(known, column[at], missing)
        own = told.get(name)
        merged[name] = of_kind if own is None else np.where(own == missing, of_kind, own)
    return merged


def _is_beyond(times_ps: IntArray) -> BoolArray:
    """Which times no recording has; the least integer has no absolute value of its type."""
    beyond: BoolArray = (times_ps > LARGEST_PS) | (times_ps < -LARGEST_PS)
    return beyond
