"""The stats of events: facts by name, of which the interesting ones become columns."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from hespas.converters.xplane.lines import ABSENT, CLOCK, NUMBERS, TEXTS
from hespas.converters.xplane.texts import Texts
from hespas.converters.xplane.wire import Bytes, Fields, split
from hespas.graph.columns import IntArray
from hespas.schemas.xplane import MapField, StatField, StatMetadataField

__all__ = ["IdMap", "StatReader", "map_entries", "to_integer"]

_NAMES = {name.lower().encode(): name for name in (*NUMBERS, *TEXTS, *CLOCK)}


@dataclass(frozen=True, slots=True, eq=False)
class IdMap:
    """From the ids of a plane's metadata to rows: sorted ids, and the row of each."""

    ids: IntArray
    rows: IntArray

    @classmethod
    def of(cls, ids: IntArray) -> IdMap:
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


def map_entries(data: Bytes, entries: Fields) -> tuple[IdMap, Fields, int]:
    """A map of messages: its keys, the fields of its values, and how many entries there are."""
    count = len(entries.start)
    inner = split(data, entries.start, entries.value)
    ids = IdMap.of(inner.numbers(MapField.KEY, count))
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
class StatReader:
    """Reads the stats of one plane, whose names and shared texts stand in its stat metadata."""

    data: Bytes
    strings: Texts
    ids: IdMap
    name_start: IntArray
    name_size: IntArray
    wanted: dict[str, IntArray]
    rows: dict[bytes, int] = field(default_factory=dict[bytes, int])

    @classmethod
    def of(cls, data: Bytes, strings: Texts, entries: Fields) -> StatReader:
        """For the stat metadata of a plane. O(its entries)."""
        ids, fields, count = map_entries(data, entries)
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
        told = inner.number != StatField.METADATA_ID
        at = inner.owner[told]
        kind[at], value[at], start[at] = inner.number[told], inner.value[told], inner.start[told]
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
        for owner, field_number, value, start in zip(
            inner.owner.tolist(),
            inner.number.tolist(),
            inner.value.tolist(),
            inner.start.tolist(),
            strict=True,
        ):
            row = int(key[owner])
            if field_number == StatField.METADATA_ID or row < 0:
                continue
            at, size = int(self.name_start[row]), max(int(self.name_size[row]), 0)
            found[self.data.text(at, size)] = self._shown(field_number, value, start)
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
                return (
                    ""
                    if row < 0
                    else self.data.text(int(self.name_start[row]), max(int(self.name_size[row]), 0))
                )
            case _:
                return str(value)
