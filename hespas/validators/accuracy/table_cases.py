"""Rows of measured tables as cases: their classes, what names a shape, and what a model says of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from hespas.estimators.by_operation import OperationModel
from hespas.estimators.measurements import Measurements
from hespas.estimators.operations import KINDS, Operations
from hespas.graph import Diagnostics
from hespas.graph.columns import SmallIntArray
from hespas.hardware import Device
from hespas.validators.accuracy.cases import Cases, Prediction

__all__ = ["TableClasses", "cases_of_rows", "prediction_of_rows"]


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


def cases_of_rows(rows: Measurements, device: Device, classes: TableClasses) -> Cases:
    """Each row of a table, all of one device, as a case. O(rows log rows)."""
    ops = rows.ops
    distinct, place = ops.distinct()
    codes = classes.codes(ops)
    numbers: dict[str, int] = {}
    shape = np.array([numbers.setdefault(text, len(numbers)) for text in _shape_texts(distinct)], np.int64)
    words = np.array([name or kind for kind in ops.kind.names for name in ops.op.names], np.object_)
    stated = np.isfinite(rows.spread_ns)
    return Cases(
        source=rows.name,
        workload=rows.name,
        hardware=device.name,
        labels=tuple(words[ops.kind.row.astype(np.int64) * len(ops.op.names) + ops.op.row].tolist()),
        shapes=tuple(numbers),
        shape=shape[place] if len(place) else place,
        op_class=codes,
        measured_ns=rows.duration_ns,
        spread_ns=rows.spread_ns,
        repeats=np.where(stated, 2, 1).astype(np.int64),  # a spread is of two at least
        flops=ops.flops,
        bytes_moved=ops.bytes_moved,
        classes=classes.names,
        families=classes.families,
    )


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
    model: OperationModel, ops: Operations, device: Device, diagnostics: Diagnostics
) -> Prediction:
    """What a model says of each row; distinct operations are asked once."""
    distinct, place = ops.distinct()
    said = model.predict(distinct, device, diagnostics)
    return Prediction(
        estimator=model.name,
        duration_ns=said.duration_ns[place],
        low_ns=said.low_ns[place],
        high_ns=said.high_ns[place],
    )
