"""An XSpace, line by line: ``xla/tsl/profiler/protobuf/xplane.proto`` of https://github.com/openxla/xla."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hespas.converters.xplane.lines import (
    ABSENT,
    CLOCK,
    LARGEST_PS,
    NUMBERS,
    TEXTS,
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
from hespas.converters.xplane.wire import Bytes, Fields, split
from hespas.files.wire import WireError
from hespas.graph import StringTableBuilder
from hespas.graph.columns import BoolArray, IntArray, at_rows
from hespas.schemas.xplane import (
    ENVIRONMENT_PLANE,
    METADATA_PLANE,
    EventMetadataField,
    LineField,
    MapField,
    PlaneField,
    SpaceField,
    StatField,
    StatMetadataField,
    XEventField,
)

__all__ = ["SpaceFacts", "SpaceReader", "to_integer"]

_NAMES = {name.lower().encode(): name for name in (*NUMBERS, *TEXTS, *CLOCK)}


@dataclass(frozen=True, slots=True, eq=False)
class _IdMap:
    """From the ids of a plane's metadata to rows: sorted ids, and the row of each."""

    ids: IntArray
    rows: IntArray

    @classmethod
    def of(cls, ids: IntArray) -> _IdMap:
        """Ids by row; of equal ones the last counts."""
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        last = np.append(ordered[1:] != ordered[:-1], True) if len(ids) else np.empty(0, np.bool_)
        return cls(ordered[last], order[last])

    def find(self, ids: IntArray) -> IntArray:
        """The row of each id, -1 where there is none."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64)
        place = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[place] == ids, self.rows[place], -1)


def _map_entries(data: Bytes, entries: Fields) -> tuple[_IdMap, Fields, int]:
    """A map of messages: its keys, the fields of its values, and how many entries there are."""
    count = len(entries.start)
    inner = split(data, entries.start, entries.value)
    ids = _IdMap.of(inner.numbers(MapField.KEY, count))
    start, size = inner.spans(MapField.VALUE, count)
    return ids, split(data, start, np.maximum(size, 0)), count


def to_integer(text: str) -> int:
    """A number in decimal digits; :data:`ABSENT` for anything else, or one of more than 64 bits."""
    digits = text.strip()
    if not digits.lstrip("+-").isdecimal() or len(digits) > 21:
        return ABSENT
    try:
        value = int(digits)
    except ValueError:
        return ABSENT
    return value - (1 << 64) if 1 << 63 <= value < 1 << 64 else value if abs(value) < 1 << 63 else ABSENT


def _of_double(bits: int) -> int:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return int(value) if abs(value) < 1 << 62 else ABSENT


@dataclass(slots=True)
class _StatReader:
    """Reads the stats of one plane, whose names and shared texts stand in its stat metadata."""

    data: Bytes
    strings: StringTableBuilder
    ids: _IdMap
    name_start: IntArray
    name_size: IntArray
    wanted: dict[str, IntArray]
    rows: dict[bytes, int] = field(default_factory=dict[bytes, int])

    @classmethod
    def of(cls, data: Bytes, strings: StringTableBuilder, entries: Fields) -> _StatReader:
        """For the stat metadata of a plane. O(its entries)."""
        ids, fields, count = _map_entries(data, entries)
        start, size = fields.spans(StatMetadataField.NAME, count)
        rows: dict[str, list[int]] = {}
        for row, (at, length) in enumerate(zip(start.tolist(), size.tolist(), strict=True)):
            name = _NAMES.get(data.raw[at : at + length].lower()) if 0 < length < 32 else None
            if name is not None:
                rows.setdefault(name, []).append(row)
        wanted = {name: np.array(found, np.int64) for name, found in rows.items()}
        return cls(data, strings, ids, start, size, wanted)

    def read(self, stats: Fields, count: int) -> dict[str, IntArray]:
        """Columns of what ``count`` owners say in their ``stats``: of one fact told twice, the last."""
        number = len(stats.start)
        if not number or not self.wanted:
            return {}
        inner = split(self.data, stats.start, stats.value)
        key = self.ids.find(inner.numbers(StatField.METADATA_ID, number))
        kind, value, start = (np.zeros(number, np.int64) for _ in range(3))
        stated = inner.number != StatField.METADATA_ID
        at = inner.owner[stated]
        kind[at], value[at], start[at] = inner.number[stated], inner.value[stated], inner.start[stated]
        columns: dict[str, IntArray] = {}
        for name, rows in self.wanted.items():
            chosen = np.flatnonzero(np.isin(key, rows))
            if not len(chosen):
                continue
            numeric = name in NUMBERS or name in CLOCK
            column = np.full(count, ABSENT if numeric else 0, np.int64)
            convert = self._numbers if numeric else self._texts
            column[stats.owner[chosen]] = convert(kind[chosen], value[chosen], start[chosen])
            columns[name] = column
        return columns

    def _numbers(self, kind: IntArray, value: IntArray, start: IntArray) -> IntArray:
        result = np.where((kind == StatField.UINT64) | (kind == StatField.INT64), value, ABSENT)
        for place in np.flatnonzero(kind == StatField.DOUBLE).tolist():
            result[place] = _of_double(int(value[place]))
        for place in np.flatnonzero((kind == StatField.TEXT) | (kind == StatField.BYTES)).tolist():
            result[place] = to_integer(self.data.text(int(start[place]), min(int(value[place]), 32)))
        return result

    def _texts(self, kind: IntArray, value: IntArray, start: IntArray) -> IntArray:
        result = np.zeros(len(kind), np.int64)
        refs = np.flatnonzero(kind == StatField.REF)
        if len(refs):
            rows, inverse = np.unique(self.ids.find(value[refs]), return_inverse=True)
            result[refs] = np.array([self.name(row) for row in rows.tolist()], np.int64)[inverse]
        for place in np.flatnonzero((kind == StatField.TEXT) | (kind == StatField.BYTES)).tolist():
            result[place] = self.text(int(start[place]), int(value[place]))
        for place in np.flatnonzero((kind == StatField.UINT64) | (kind == StatField.INT64)).tolist():
            result[place] = self.strings.add(str(int(value[place])))
        return result

    def name(self, row: int) -> int:
        """The string row of the name of a stat; row 0 for one that is not there."""
        if row < 0:
            return 0
        return self.text(int(self.name_start[row]), max(int(self.name_size[row]), 0))

    def named_at(self, row: int) -> str:
        """The name of a stat."""
        return self.data.text(int(self.name_start[row]), max(int(self.name_size[row]), 0))

    def text(self, start: int, size: int) -> int:
        """The string row of some bytes; equal ones are decoded once."""
        raw = self.data.raw[start : start + size]
        found = self.rows.get(raw)
        if found is None:
            found = self.rows[raw] = self.strings.add(raw.decode("utf-8", "replace"))
        return found

    def named(self, stats: Fields) -> dict[str, str]:
        """All stats of one owner as texts, by name: for planes, which have few."""
        number = len(stats.start)
        inner = split(self.data, stats.start, stats.value)
        key = self.ids.find(inner.numbers(StatField.METADATA_ID, number))
        found: dict[str, str] = {}
        columns = (inner.owner, inner.number, inner.value, inner.start)
        for owner, field_number, value, start in zip(*(each.tolist() for each in columns), strict=True):
            row = int(key[owner])
            if field_number == StatField.METADATA_ID or row < 0:
                continue
            found[self.named_at(row)] = self._shown(field_number, value, start)
        return found

    def _shown(self, kind: int, value: int, start: int) -> str:
        match kind:
            case StatField.DOUBLE:
                return repr(struct.unpack("<d", struct.pack("<q", value))[0])
            case StatField.UINT64:
                return str(value & ((1 << 64) - 1))
            case StatField.TEXT | StatField.BYTES:
                return self.data.text(start, min(value, 256))
            case StatField.REF:
                row = int(self.ids.find(np.array([value], np.int64))[0])
                return self.named_at(row) if row >= 0 else ""
            case _:
                return str(value)


_CHUNK_EVENTS = 1 << 17
_MOST_PLANES, _MOST_LINES = 4096, 16_384
"""Of a recording, which has a plane per core and a line per stream or thread; each takes its time, also where
it is of a few bytes.
"""
_HLO_PROTO = "Hlo Proto"
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
    other_lines: dict[str, int] = field(default_factory=dict[str, int])
    aggregated: int = 0
    unnamed: int = 0
    errors: int = 0
    cut_planes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Kinds:
    """The kinds of events of a plane: names, long ones where there is one, and facts that all share."""

    ids: _IdMap
    name_row: IntArray
    long_row: IntArray
    stats: dict[str, IntArray]


class SpaceReader:
    """Reads a document once. Raises :class:`WireError` with the byte of what makes no sense."""

    def __init__(self, raw: bytes, strings: StringTableBuilder, recover: bool) -> None:
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
            raise WireError(f"{len(filled):,} planes; no recording has more than {_MOST_PLANES:,}", byte)
        self._has_devices = has_devices(names[place] for place in filled)
        for place in filled:
            yield from self._opened(names[place], fields.of(place))

    def _opened(self, name: str, fields: Fields) -> Iterator[LineEvents]:
        stats = _StatReader.of(self.data, self.strings, fields.messages(PlaneField.STAT_METADATA))
        stated = fields.messages(PlaneField.STATS)
        self.facts.planes.setdefault(name, {}).update(stats.named(stated))
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
        except WireError as fault:
            if not self._recover:
                raise
            fields = split(self.data, whole[0], np.array([fault.position]))
            self.facts.cut_planes = 1
        self.facts.errors = int(np.isin(fields.number, (SpaceField.ERRORS, SpaceField.WARNINGS)).sum())
        return fields.messages(SpaceField.PLANES)

    def _plane(self, plane: str, fields: Fields, stats: _StatReader) -> Iterator[LineEvents]:
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
            raise WireError(f"{self._lines:,} lines; no recording has more than {_MOST_LINES:,}", byte)
        for place in filled:
            name, events = names[place], all_events.of(place)
            kind = line_kind(plane, name, truth)
            if kind is LineKind.OTHER:
                what = f"{plane.rpartition(':')[0] or plane}: {name}"
                self.facts.other_lines[what] = self.facts.other_lines.get(what, 0) + len(events.start)
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
            raise WireError("a line begins more than 26 days from the others", int(events.start[0]))
        return shift_ps

    def _kinds(self, entries: Fields, stats: _StatReader) -> _Kinds:
        ids, fields, count = _map_entries(self.data, entries)
        full = fields.spans(EventMetadataField.NAME, count)
        shown = fields.spans(EventMetadataField.DISPLAY_NAME, count)
        full_row = self._text_rows(stats, *full)
        shown_row = self._text_rows(stats, *shown)
        common = stats.read(fields.messages(EventMetadataField.STATS), count)
        is_text = np.array([_ASSIGNS in self.strings[row] for row in full_row.tolist()], np.bool_)
        long_row = np.where((shown_row > 0) | is_text, full_row, 0)
        return _Kinds(ids, np.where(shown_row > 0, shown_row, full_row), long_row, common)

    def _text_rows(self, stats: _StatReader, start: IntArray, size: IntArray) -> IntArray:
        spans = zip(start.tolist(), size.tolist(), strict=True)
        return np.array([stats.text(at, length) if length > 0 else 0 for at, length in spans], np.int64)

    def _events(
        self, line: Line, events: Fields, shift_ps: int, kinds: _Kinds, stats: _StatReader
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
        self, line: Line, start: IntArray, size: IntArray, kinds: _Kinds, stats: _StatReader
    ) -> LineEvents:
        count = len(start)
        fields = split(self.data, start, size)
        kind = kinds.ids.find(fields.numbers(XEventField.METADATA_ID, count))
        offset_ps = fields.numbers(XEventField.OFFSET_PS, count)
        duration_ps = fields.numbers(XEventField.DURATION_PS, count)
        beyond = np.flatnonzero(_is_beyond(offset_ps) | _is_beyond(duration_ps))
        if len(beyond):
            raise WireError("an event lies more than 26 days from the others", int(start[beyond[0]]))
        self.facts.aggregated += int((fields.numbers(XEventField.OCCURRENCES, count) > 0).sum())
        self.facts.unnamed += int((kind < 0).sum())
        own = stats.read(fields.messages(XEventField.STATS), count)
        columns = _merged(own, kinds.stats, kind)
        device = device_rows(line, columns, count, has_devices=self._has_devices)
        launch = columns.get("correlation_id", np.full(count, ABSENT, np.int64))
        stated = {name: column[device] for name, column in columns.items()}
        if line.kind is LineKind.OPS:
            stated["long_name"] = at_rows(kinds.long_row, kind, 0)
        return LineEvents(
            line=line,
            name_row=at_rows(kinds.name_row, kind, 0).astype(np.int32),
            start_ps=offset_ps,
            duration_ps=duration_ps,
            device=device,
            stats=stated,
            launch=launch,
        )

    def _programs(self, entries: Fields, stats: _StatReader) -> None:
        """The HLO of each program, a stat of an event that never happens."""
        _, fields, count = _map_entries(self.data, entries)
        start, size = fields.spans(EventMetadataField.NAME, count)
        found = fields.messages(EventMetadataField.STATS)
        inner = split(self.data, found.start, found.value)
        key = stats.ids.find(inner.numbers(StatField.METADATA_ID, len(found.start)))
        stated = stats.read(found, count).get("program_id")
        for row in np.flatnonzero((inner.number == StatField.BYTES) & inner.is_bytes).tolist():
            stat = int(inner.owner[row])
            owner, name_of = int(found.owner[stat]), int(key[stat])
            if name_of < 0 or stats.named_at(name_of) != _HLO_PROTO:
                continue
            name, number = split_module_name(self.data.text(int(start[owner]), max(int(size[owner]), 0)))
            if stated is not None and stated[owner] != ABSENT:
                number = int(stated[owner])
            at, length = int(inner.start[row]), int(inner.value[row])
            self.facts.programs.append(Program(name, number, self.data.raw[at : at + length]))


def _merged(stated: dict[str, IntArray], common: dict[str, IntArray], kind: IntArray) -> dict[str, IntArray]:
    """What events say themselves, else what their kind says."""
    merged = dict(stated)
    for name, column in common.items():
        missing = ABSENT if name in NUMBERS or name in CLOCK else 0
        of_kind = at_rows(column, kind, missing)
        own = stated.get(name)
        merged[name] = of_kind if own is None else np.where(own == missing, of_kind, own)
    return merged


def _is_beyond(times_ps: IntArray) -> BoolArray:
    """Which times no recording has; the least integer has no absolute value of its type."""
    beyond: BoolArray = (times_ps > LARGEST_PS) | (times_ps < -LARGEST_PS)
    return beyond
