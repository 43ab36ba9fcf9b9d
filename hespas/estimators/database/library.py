"""Measurements of all devices and classes, shelved when first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from hespas.estimators.database.coordinates import SPACES
from hespas.estimators.database.shelf import Shelf
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError
from hespas.measurements import Measurements, read_measurements
from hespas.operations import Labels

__all__ = ["EVERYTHING", "Library", "Volume", "library_of_file", "visible"]

EVERYTHING = "all"
"""The name of no split but of all of them."""
_MADE_TO_FIT = "calib"
_Class = tuple[str, str, str, str, str]
"""Device, kind, operation, scheme, variant."""


@dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """The rows of one class in one table."""

    table: Measurements
    rows: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Tables by class. Where two hold one class, the one with more rows speaks."""

    tables: tuple[Measurements, ...]
    volumes: dict[_Class, Volume] = field(default_factory=dict[_Class, Volume])
    _shelves: dict[_Class, Shelf] = field(default_factory=dict[_Class, Shelf])

    @classmethod
    def of(cls, tables: Iterable[Measurements]) -> Library:
        """Sort the rows of tables by class. O(rows log rows)."""
        library = cls(tuple(tables))
        for table in library.tables:
            for name, rows in _classes(table):
                known = library.volumes.get(name)
                if name[1] in SPACES and (known is None or len(known.rows) < len(rows)):
                    library.volumes[name] = Volume(table, rows)
        return library

    def devices(self) -> tuple[str, ...]:
        """Devices that something was measured on."""
        return tuple(sorted({name[0] for name in self.volumes}))

    def variants(self, device: str, kind: str, op: str, scheme: str) -> tuple[str, ...]:
        """The variants of a class, the one with the most rows first."""
        wanted = (device, kind, op, scheme)
        found = [(-len(each.rows), name[4]) for name, each in self.volumes.items() if name[:4] == wanted]
        return tuple(variant for _, variant in sorted(found))

    def schemes(self, device: str, kind: str, op: str) -> tuple[str, ...]:
        """The schemes that an operation was measured in, the one with the most rows first."""
        count: dict[str, int] = {}
        for name, each in self.volumes.items():
            if name[:3] == (device, kind, op):
                count[name[3]] = count.get(name[3], 0) + len(each.rows)
        return tuple(sorted(count, key=lambda scheme: (-count[scheme], scheme)))

    def shelf(self, name: _Class) -> Shelf:
        """The measurements of one class, made ready to be asked."""
        if name not in self._shelves:
            volume = self.volumes[name]
            ops, times = volume.table.ops.take(volume.rows), volume.table.duration_ns[volume.rows]
            self._shelves[name] = Shelf.of(SPACES[name[1]], ops, times)
        return self._shelves[name]


def _classes(table: Measurements) -> Iterable[tuple[_Class, IntArray]]:
    labels: Sequence[Labels] = (
        table.hardware, table.ops.kind, table.ops.op, table.ops.scheme, table.ops.variant,
    )  # fmt: skip
    key = np.zeros(len(table), np.int64)
    for each in labels:
        key = key * (len(each.names) + 1) + each.row
    order = np.argsort(key, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else ():
        first = int(rows[0])
        device, kind, op, scheme, variant = (each[first] for each in labels)
        yield (device, kind, op, scheme, variant), rows.astype(np.int64)


def library_of_file(path: str, split: str) -> Library:
    """The library of one table, kept as long as the file does not change. Raises ``FormatError``."""
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", path=path, hint="check the path") from error
    return _kept(path, split, changed)


@lru_cache(maxsize=4)
def _kept(path: str, split: str, changed: int) -> Library:
    del changed  # part of the key: another time of change is another table
    if split and split != EVERYTHING:
        return Library.of([read_measurements(path, split=split)])
    return Library.of([visible(read_measurements(path), split)])


def visible(table: Measurements, split: str) -> Measurements:
    """The part of a table that is asked for: without a name, what was not kept apart for testing."""
    if split == EVERYTHING:
        return table
    if split:
        return table.part(split)
    return table.part(_MADE_TO_FIT) if _MADE_TO_FIT in table.split.used() else table
