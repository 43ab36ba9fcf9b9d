"""Reader of an XSpace, line by line.

Schema: ``xla/tsl/profiler/protobuf/xplane.proto`` of https://github.com/openxla/xla.
"""

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
    LineEvents,
    LineKind,
    ProfiledHlo,
    TraceLine,
    device_clock,
    device_rows,
    has_devices,
    line_kind,
    split_module_name,
    truth_of,
)
from hespas.converters.xplane.wire import Bytes, ProtoFields, split
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
    """Map from ids to rows, as two columns: sorted ids, and the row of each."""

    ids: IntArray
    rows: IntArray

    @classmethod
    def of(cls, ids: IntArray) -> _IdMap:
        """Build the map from the id of each row. If an id occurs several times, the last row is used."""
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        last = np.append(ordered[1:] != ordered[:-1], True) if len(ids) else np.empty(0, np.bool_)
        return cls(ordered[last], order[last])

    def find(self, ids: IntArray) -> IntArray:
        """Return the row of each id, -1 for an unknown id."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64)
        index = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[index] == ids, self.rows[index], -1)


def _map_entries(data: Bytes, entries: ProtoFields) -> tuple[_IdMap, ProtoFields, int]:
    """Decode the entries of a protobuf map from ids to messages.

    Return the index of the entry of each id, the fields of the messages, and the number of entries.
    """
    count = len(entries.start)
    inner = split(data, entries.start, entries.value)
    ids = _IdMap.of(inner.numbers(MapField.KEY, count))
    start, size = inner.spans(MapField.VALUE, count)
    return ids, split(data, start, np.maximum(size, 0)), count


def to_integer(text: str) -> int:
    """Parse a decimal number; :data:`ABSENT` for any other text and for more than 64 bits."""
    digits = text.strip()
    if not digits.lstrip("+-").isdecimal() or len(digits) > 21:
        return ABSENT
    try:
        value = int(digits)
    except ValueError:
        return ABSENT
    return value - (1 << 64) if 1 << 63 <= value < 1 << 64 else value if abs(value) < 1 << 63 else ABSENT


@dataclass(slots=True)
class _StatReader:
    """Reader of the stats (named values) of the events of one plane. The names, and texts that occur several
    times, are in the stat metadata of the plane.
    """

    data: Bytes
    strings: StringTableBuilder
    ids: _IdMap
    name_start: IntArray
    name_size: IntArray
    wanted: dict[str, IntArray]
    rows: dict[bytes, int] = field(default_factory=dict[bytes, int])

    @classmethod
    def of(cls, data: Bytes, strings: StringTableBuilder, entries: ProtoFields) -> _StatReader:
        """Build a reader from the stat metadata of a plane. O(entries)."""
        ids, fields, count = _map_entries(data, entries)
        start, size = fields.spans(StatMetadataField.NAME, count)
        rows: dict[str, list[int]] = {}
        for row, (at, length) in enumerate(zip(start.tolist(), size.tolist(), strict=True)):
            name = _NAMES.get(data.raw[at : at + length].lower()) if 0 < length < 32 else None
            if name is not None:
                rows.setdefault(name, []).append(row)
        wanted = {name: np.array(numbers, np.int64) for name, numbers in rows.items()}
        return cls(data, strings, ids, start, size, wanted)

    def read(self, stats: ProtoFields, count: int) -> dict[str, IntArray]:
        """Return the ``stats`` of ``count`` owners (events or their metadata) as columns by name.

        If an owner has a stat several times, the last one is used.
        """
        number = len(stats.start)
        if not number or not self.wanted:
            return {}
        inner = split(self.data, stats.start, stats.value)
        key = self.ids.find(inner.numbers(StatField.METADATA_ID, number))
        kind, value, start = (np.zeros(number, np.int64) for _ in range(3))
        has_value = inner.number != StatField.METADATA_ID
        at = inner.owner[has_value]
        kind[at], value[at], start[at] = (
            inner.number[has_value],
            inner.value[has_value],
            inner.start[has_value],
        )
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
        for row in np.flatnonzero(kind == StatField.DOUBLE).tolist():
            (number,) = struct.unpack("<d", struct.pack("<q", int(value[row])))
            result[row] = int(number) if abs(number) < 1 << 62 else ABSENT
        for row in np.flatnonzero((kind == StatField.TEXT) | (kind == StatField.BYTES)).tolist():
            result[row] = to_integer(self.data.text(int(start[row]), min(int(value[row]), 32)))
        return result

    def _texts(self, kind: IntArray, value: IntArray, start: IntArray) -> IntArray:
        result = np.zeros(len(kind), np.int64)
        refs = np.flatnonzero(kind == StatField.REF)
        if len(refs):
            rows, inverse = np.unique(self.ids.find(value[refs]), return_inverse=True)
            result[refs] = np.array([self.name(row) for row in rows.tolist()], np.int64)[inverse]
        for row in np.flatnonzero((kind == StatField.TEXT) | (kind == StatField.BYTES)).tolist():
            result[row] = self.text(int(start[row]), int(value[row]))
        for row in np.flatnonzero((kind == StatField.UINT64) | (kind == StatField.INT64)).tolist():
            result[row] = self.strings.add(str(int(value[row])))
        return result

    def name(self, row: int) -> int:
        """Return the string row of the name of a stat; 0 for a missing stat."""
        if row < 0:
            return 0
        return self.text(int(self.name_start[row]), max(int(self.name_size[row]), 0))

    def named_at(self, row: int) -> str:
        """Return the name of a stat as text."""
        return self.data.text(int(self.name_start[row]), max(int(self.name_size[row]), 0))

    def text(self, start: int, size: int) -> int:
        """Return the string row of a text; equal texts are decoded once."""
        raw = self.data.raw[start : start + size]
        row = self.rows.get(raw)
        if row is None:
            row = self.rows[raw] = self.strings.add(raw.decode("utf-8", "replace"))
        return row

    def named(self, stats: ProtoFields) -> dict[str, str]:
        """Return all stats of one owner (a plane, which has few) as a dict of texts."""
        number = len(stats.start)
        inner = split(self.data, stats.start, stats.value)
        key = self.ids.find(inner.numbers(StatField.METADATA_ID, number))
        texts: dict[str, str] = {}
        columns = (inner.owner, inner.number, inner.value, inner.start)
        for owner, field_number, value, start in zip(*(column.tolist() for column in columns), strict=True):
            row = int(key[owner])
            if field_number == StatField.METADATA_ID or row < 0:
                continue
            texts[self.named_at(row)] = self._shown(field_number, value, start)
        return texts

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
"""Limits on planes (one per core) and lines (one per stream or thread) of a recording. Each takes a fixed
time to read even if it has only a few bytes.
"""
_HLO_PROTO = "Hlo Proto"
_CONTENT = (PlaneField.LINES, PlaneField.EVENT_METADATA, PlaneField.STATS)
_ASSIGNS = " = "
"""Separator that appears in the text of an instruction and in no other event name."""


@dataclass(slots=True)
class SpaceFacts:
    """Facts of an XLA profile other than its events, filled in while lines are read. ``planes`` maps the name
    of each plane to its stats. ``base_ns`` is the time origin of the events.
    """

    planes: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    programs: list[ProfiledHlo] = field(default_factory=list[ProfiledHlo])
    base_ns: int | None = None
    other_lines: dict[str, int] = field(default_factory=dict[str, int])
    aggregated: int = 0
    unnamed: int = 0
    errors: int = 0
    cut_planes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _EventMetadata:
    """Event metadata of a plane. ``name_id`` has the names, ``long_row`` the long names, and ``stats`` the
    stats that all events with the same metadata share.
    """

    ids: _IdMap
    name_id: IntArray
    long_row: IntArray
    stats: dict[str, IntArray]


class SpaceReader:
    """Reader of an XLA profile in protobuf (XSpace). Raises :class:`WireError` with the position of a
    malformed byte.
    """

    def __init__(self, raw: bytes, strings: StringTableBuilder, recover: bool) -> None:
        """Prepare to read ``raw``; nothing is read before :meth:`lines`."""
        self.data = Bytes(raw)
        self.strings = strings
        self.facts = SpaceFacts()
        self._recover = recover
        self._lines = 0
        self._shifts_ps: dict[str, int] = {}
        self._has_devices = False

    def lines(self) -> Iterator[LineEvents]:
        """Yield all lines with device work or host operations, plane by plane."""
        # Locate the planes. With ``recover``, keep the complete planes of a truncated file.
        whole = np.array([0]), np.array([len(self.data)])
        try:
            fields = split(self.data, *whole)
        except WireError as fault:
            if not self._recover:
                raise
            fields = split(self.data, whole[0], np.array([fault.position]))
            self.facts.cut_planes = 1
        self.facts.errors = int(np.isin(fields.number, (SpaceField.ERRORS, SpaceField.WARNINGS)).sum())
        planes = fields.messages(SpaceField.PLANES)
        count = len(planes.start)
        fields = split(self.data, planes.start, planes.value)
        names = self._texts(*fields.spans(PlaneField.NAME, count))
        filled: list[int] = np.unique(fields.owner[np.isin(fields.number, _CONTENT)]).tolist()
        if len(filled) > _MOST_PLANES:
            byte = int(planes.start[filled[_MOST_PLANES]])
            raise WireError(f"{len(filled):,} planes; no recording has more than {_MOST_PLANES:,}", byte)
        self._has_devices = has_devices(names[index] for index in filled)
        for index in filled:
            name, plane = names[index], fields.of(index)
            stats = _StatReader.of(self.data, self.strings, plane.messages(PlaneField.STAT_METADATA))
            plane_stats = stats.named(plane.messages(PlaneField.STATS))
            self.facts.planes.setdefault(name, {}).update(plane_stats)
            if name == METADATA_PLANE:
                self._programs(plane.messages(PlaneField.EVENT_METADATA), stats)
            elif name != ENVIRONMENT_PLANE:
                yield from self._plane(name, plane, stats)

    def _texts(self, start: IntArray, size: IntArray) -> list[str]:
        return [
            self.data.text(at, max(length, 0))
            for at, length in zip(start.tolist(), size.tolist(), strict=True)
        ]

    def _plane(self, plane: str, fields: ProtoFields, stats: _StatReader) -> Iterator[LineEvents]:
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
        kinds: _EventMetadata | None = None
        filled: list[int] = np.unique(all_events.owner).tolist()
        truth = truth_of(plane, (names[index] for index in filled))
        self._lines += len(filled)
        if self._lines > _MOST_LINES:
            byte = int(spans.start[filled[-1]])
            raise WireError(f"{self._lines:,} lines; no recording has more than {_MOST_LINES:,}", byte)
        for index in filled:
            name, events = names[index], all_events.of(index)
            kind = line_kind(plane, name, truth)
            if kind is LineKind.OTHER:
                what = f"{plane.rpartition(':')[0] or plane}: {name}"
                self.facts.other_lines[what] = self.facts.other_lines.get(what, 0) + len(events.start)
                continue
            kinds = kinds or self._kinds(fields.messages(PlaneField.EVENT_METADATA), stats)
            # Compute the start of the line in ps since the start of the first line.
            timestamp_ns = timestamps_ns[index]
            if self.facts.base_ns is None:
                self.facts.base_ns = timestamp_ns
            shift_ps = (timestamp_ns - self.facts.base_ns) * 1000
            if abs(shift_ps) > LARGEST_PS:
                raise WireError("a line begins more than 26 days from the others", int(events.start[0]))
            yield self._events(TraceLine(plane, name, numbers[index], kind), events, shift_ps, kinds, stats)

    def _kinds(self, entries: ProtoFields, stats: _StatReader) -> _EventMetadata:
        ids, fields, count = _map_entries(self.data, entries)
        full = fields.spans(EventMetadataField.NAME, count)
        shown = fields.spans(EventMetadataField.DISPLAY_NAME, count)
        full_row = self._text_rows(stats, *full)
        shown_row = self._text_rows(stats, *shown)
        common = stats.read(fields.messages(EventMetadataField.STATS), count)
        is_text = np.array([_ASSIGNS in self.strings[row] for row in full_row.tolist()], np.bool_)
        long_row = np.where((shown_row > 0) | is_text, full_row, 0)
        return _EventMetadata(ids, np.where(shown_row > 0, shown_row, full_row), long_row, common)

    def _text_rows(self, stats: _StatReader, start: IntArray, size: IntArray) -> IntArray:
        spans = zip(start.tolist(), size.tolist(), strict=True)
        return np.array([stats.text(at, length) if length > 0 else 0 for at, length in spans], np.int64)

    def _events(
        self, line: TraceLine, events: ProtoFields, shift_ps: int, kinds: _EventMetadata, stats: _StatReader
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
        columns = {name: np.concatenate([part.stat(name) for part in parts]) for name in sorted(names)}
        start_ps = np.concatenate([part.start_ps for part in parts]) + shift_ps
        duration_ps = np.concatenate([part.duration_ps for part in parts])
        if line.kind is not LineKind.HOST:
            start_ps, duration_ps = device_clock(start_ps, duration_ps, columns, self._shifts_ps, line.plane)
        return LineEvents(
            line=line,
            name_id=np.concatenate([part.name_id for part in parts]),
            start_ps=start_ps,
            duration_ps=duration_ps,
            device=np.concatenate(device),
            stats={name: column for name, column in columns.items() if name not in CLOCK},
            launch=np.concatenate([part.launch for part in parts]),
        )

    def _chunk(
        self, line: TraceLine, start: IntArray, size: IntArray, kinds: _EventMetadata, stats: _StatReader
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
        columns = dict(own)
        for name, column in kinds.stats.items():  # stats of the event, else of its metadata
            missing = ABSENT if name in NUMBERS or name in CLOCK else 0
            of_kind = at_rows(column, kind, missing)
            columns[name] = of_kind if name not in own else np.where(own[name] == missing, of_kind, own[name])
        device = device_rows(line, columns, count, has_devices=self._has_devices)
        launch = columns.get("correlation_id", np.full(count, ABSENT, np.int64))
        device_stats = {name: column[device] for name, column in columns.items()}
        if line.kind is LineKind.OPS:
            device_stats["long_name"] = at_rows(kinds.long_row, kind, 0)
        return LineEvents(
            line=line,
            name_id=at_rows(kinds.name_id, kind, 0).astype(np.int32),
            start_ps=offset_ps,
            duration_ps=duration_ps,
            device=device,
            stats=device_stats,
            launch=launch,
        )

    def _programs(self, entries: ProtoFields, stats: _StatReader) -> None:
        """Collect the HLO of each program. It is a stat in the metadata of an event that never occurs."""
        _, fields, count = _map_entries(self.data, entries)
        start, size = fields.spans(EventMetadataField.NAME, count)
        stats_of_programs = fields.messages(EventMetadataField.STATS)
        inner = split(self.data, stats_of_programs.start, stats_of_programs.value)
        key = stats.ids.find(inner.numbers(StatField.METADATA_ID, len(stats_of_programs.start)))
        program_ids = stats.read(stats_of_programs, count).get("program_id")
        for row in np.flatnonzero((inner.number == StatField.BYTES) & inner.is_bytes).tolist():
            stat = int(inner.owner[row])
            owner, name_of = int(stats_of_programs.owner[stat]), int(key[stat])
            if name_of < 0 or stats.named_at(name_of) != _HLO_PROTO:
                continue
            name, number = split_module_name(self.data.text(int(start[owner]), max(int(size[owner]), 0)))
            if program_ids is not None and program_ids[owner] != ABSENT:
                number = int(program_ids[owner])
            at, length = int(inner.start[row]), int(inner.value[row])
            self.facts.programs.append(ProfiledHlo(name, number, self.data.raw[at : at + length]))


def _is_beyond(times_ps: IntArray) -> BoolArray:
    """Return a mask of times that are impossibly large. (``abs`` does not work for the least 64-bit
    integer.)
    """
    beyond: BoolArray = (times_ps > LARGEST_PS) | (times_ps < -LARGEST_PS)
    return beyond
