"""Rows of measured tables as cases: their classes, what names a shape, and what a model says of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isnan

import numpy as np

from hespas.estimators.protocol import OperationModel
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, constant, is_one_value
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.operations import KINDS, Labels, Operations, numbered
from hespas.validators.accuracy.cases import Cases, Prediction

__all__ = ["DistinctRows", "ShapeTexts", "TableClasses", "cases_of_rows", "prediction_of_rows"]

_AT_ONCE = 1 << 16
_ASKED_AT_ONCE = 1 << 20
_EXACT = 1e15
"""Whole numbers below have no more digits than a text tells."""


@dataclass(frozen=True, slots=True)
class TableClasses:
    """Classes of several tables: ``names`` say kind, operation, scheme and variant, ``families`` kind and
    scheme alone.
    """

    names: tuple[str, ...]
    families: tuple[str, ...]

    @classmethod
    def of(cls, tables: Sequence[Measurements]) -> TableClasses:
        """The classes that some tables have, in order of appearance."""
        found: dict[str, str] = {}
        for table in tables:
            for name, family in _texts(table.ops)[0]:
                found.setdefault(name, family)
        return cls(tuple(found), tuple(found.values()))

    def codes(self, ops: Operations) -> SmallIntArray:
        """The class of each operation, shape ``(ops,)``."""
        place = {name: code for code, name in enumerate(self.names)}
        texts, row = _texts(ops)
        return np.array([place[name] for name, _ in texts], np.int32)[row]


def _texts(ops: Operations) -> tuple[list[tuple[str, str]], SmallIntArray]:
    """Name and family of each distinct class, and the class of each operation."""
    labels = (ops.kind, ops.op, ops.scheme, ops.variant)
    key = np.zeros(len(ops), np.int64)
    for each in labels:
        key = key * (len(each.names) + 1) + each.row
    _, first, row = np.unique(key, return_index=True, return_inverse=True)
    texts: list[tuple[str, str]] = []
    for at in first.tolist():
        kind, op, scheme, variant = (each[at] for each in labels)
        name = " ".join(part for part in (kind, op, scheme, variant) if part)
        texts.append((name, " ".join(part for part in (kind, scheme) if part)))
    return texts, row.reshape(-1).astype(np.int32)


def cases_of_rows(
    rows: Measurements, device: Device, classes: TableClasses, distinct: DistinctRows | None = None
) -> Cases:
    """Each row of a table, all of one device, as a case; ``distinct`` where it is known already.
    O(rows log rows).
    """
    ops = rows.ops
    known = distinct or DistinctRows.of(ops)
    first, number = _shape_numbers(ops, known.first)
    stated = np.isfinite(rows.spread_ns)
    return Cases(
        source=rows.name,
        workload=rows.name,
        hardware=device.name,
        labels=_words(ops),
        shapes=ShapeTexts(ops, first),
        shape=known.place if number is None else number[known.place],
        op_class=classes.codes(ops),
        measured_ns=rows.duration_ns,
        spread_ns=rows.spread_ns,
        repeats=np.where(stated, 2, 1).astype(np.int8),  # a spread is of two at least
        flops=ops.flops,
        bytes_moved=ops.bytes_moved,
        classes=classes.names,
        families=classes.families,
    )


@dataclass(frozen=True, slots=True, eq=False)
class DistinctRows:
    """The first rows of equal operations, and the place of each row among these."""

    first: IntArray
    place: IntArray

    @classmethod
    def of(cls, ops: Operations) -> DistinctRows:
        """Those of some operations. O(ops log ops)."""
        return cls(*ops.distinct_rows())


def _words(ops: Operations) -> Labels:
    """What each operation is called: its name, or its kind where that says all."""
    words = tuple(name or kind for kind in ops.kind.names for name in ops.op.names)
    return Labels((ops.kind.row * len(ops.op.names) + ops.op.row).astype(np.int32, copy=False), words)


@dataclass(frozen=True, slots=True, eq=False)
class ShapeTexts:
    """What names some operations, the ``rows`` of ``ops``: their labels and sizes, made when asked for."""

    ops: Operations
    rows: IntArray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int, /) -> str:
        return _shape_texts(self.ops.take(self.rows[number : number + 1]))[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            yield from _shape_texts(self.ops.take(self.rows[start : start + _AT_ONCE]))


def _shape_numbers(ops: Operations, rows: IntArray) -> tuple[IntArray, IntArray | None]:
    """Of some operations the first of each text that :class:`ShapeTexts` gives, and the place of each among
    these (None: no two have the same). What the texts do not say - FLOPs, bytes, sizes that decide no time
    of the kind, digits past the fifteenth - tells no two apart.
    """
    heads, code = _texts(ops)
    same = {name: number for number, (name, _) in reversed(list(enumerate(heads)))}
    head = np.array([same[name] for name, _ in heads], np.int32)[code[rows]]
    sizes = (
        _as_told(np.where(_has(ops.kind, name), size, np.nan)[rows])
        for name, size in ops.dims.items()
        if not is_one_value(size)
    )
    number = numbered(chain((head,), sizes))
    count = int(number.max(initial=-1)) + 1
    if count == len(rows):
        return rows, None
    first = np.full(count, len(rows), np.int64)
    np.minimum.at(first, number, np.arange(len(rows)))
    order = np.argsort(first)
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    return rows[first[order]], rank[number]


def _has(kind: Labels, dim: str) -> BoolArray:
    """Which operations have a dimension by their kind."""
    return np.array([dim in KINDS[name] for name in kind.names], np.bool_)[kind.row]


def _as_told(sizes: FloatArray) -> FloatArray:
    """Sizes with the fifteen digits that a text gives them."""
    long = np.flatnonzero((sizes != np.floor(sizes)) | (np.abs(sizes) >= _EXACT))
    long = long[np.isfinite(sizes[long])]
    if len(long):
        distinct, place = np.unique(sizes[long], return_inverse=True)
        told = [float(f"{value:.15g}") for value in distinct.tolist()]
        sizes[long] = np.array(told)[place.reshape(-1)]
    return sizes


def _shape_texts(ops: Operations) -> list[str]:
    """What names each of some distinct operations: its labels and sizes."""
    texts = [""] * len(ops)
    heads, codes = _texts(ops)
    head: list[int] = codes.tolist()
    for number, kind in enumerate(ops.kind.names):
        rows = np.flatnonzero(ops.kind.row == number)
        numbers: list[int] = rows.tolist()
        names = KINDS[kind]
        columns: list[list[float]] = [ops.dim(name)[rows].tolist() for name in names]
        sizes: Iterable[tuple[float, ...]] = zip(*columns, strict=True) if columns else [()] * len(rows)
        for row, values in zip(numbers, sizes, strict=True):
            said = [
                f"{name} {value:.15g}" for name, value in zip(names, values, strict=True) if not isnan(value)
            ]
            texts[row] = ", ".join((heads[head[row]][0], *said))
    return texts


def prediction_of_rows(
    model: OperationModel,
    ops: Operations,
    device: Device,
    diagnostics: Diagnostics,
    distinct: DistinctRows | None = None,
) -> Prediction:
    """What a model says of each row; distinct operations are asked once, so many of them together that what
    is held at once does not grow with the table. ``distinct`` where it is known already.
    """
    known = distinct or DistinctRows.of(ops)
    parts = [
        model.predict(ops.take(known.first[start : start + _ASKED_AT_ONCE]), device, diagnostics)
        for start in range(0, max(len(known.first), 1), _ASKED_AT_ONCE)
    ]
    return Prediction(
        estimator=model.name,
        duration_ns=_spread_out([said.duration_ns for said in parts], known.place),
        low_ns=_spread_out([said.low_ns for said in parts], known.place),
        high_ns=_spread_out([said.high_ns for said in parts], known.place),
    )


def _spread_out(parts: Sequence[FloatArray], place: IntArray) -> FloatArray:
    """A column of distinct operations as one of all rows; without memory where nothing is known of any."""
    if all(np.isnan(part).all() for part in parts):
        return constant(np.nan, len(place))
    return (parts[0] if len(parts) == 1 else np.concatenate(parts))[place]
