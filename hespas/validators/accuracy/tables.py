"""Rows of measured tables as cases: their classes, what names a shape, and what a model says of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING

import numpy as np

from hespas.estimators import load_estimator
from hespas.estimators.registry import OperationModel, predict_with
from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, constant, is_one_value
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device, named_device
from hespas.operations import KINDS, Labels, Operations, numbered
from hespas.validators.accuracy.baselines import MOST_FITTED, FittingRows, baselines_of_rows
from hespas.validators.accuracy.cases import Cases, Prediction
from hespas.validators.accuracy.lint import LintFinding, lint_cases
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.summaries import accuracy_of_cases

if TYPE_CHECKING:
    from hespas.measurements import Measurements

__all__ = [
    "ShapeTexts",
    "TableClasses",
    "accuracy_of_tables",
    "cases_of_rows",
    "devices_of_tables",
    "model_of_operations",
    "prediction_of_rows",
    "rows_of_split",
    "rows_on",
]

_AT_ONCE = 1 << 16
_ASKED_AT_ONCE = 1 << 20
_Distinct = tuple[IntArray, IntArray]
"""The first rows of equal operations, and the place of each row among these."""
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
    rows: Measurements, device: Device, classes: TableClasses, distinct: _Distinct | None = None
) -> Cases:
    """Each row of a table, all of one device, as a case; ``distinct`` where it is known already.
    O(rows log rows).
    """
    ops = rows.ops
    firsts, place = distinct or ops.distinct_rows()
    first, number = _shape_numbers(ops, firsts)
    stated = np.isfinite(rows.spread_ns)
    return Cases(
        source=rows.name,
        workload=rows.name,
        hardware=device.name,
        labels=_words(ops),
        shapes=ShapeTexts(ops, first, _shape_texts),
        shape=place if number is None else number[place],
        op_class=classes.codes(ops),
        measured_ns=rows.duration_ns,
        spread_ns=rows.spread_ns,
        repeats=np.where(stated, 2, 1).astype(np.int8),  # a spread is of two at least
        flops=ops.flops,
        bytes_moved=ops.bytes_moved,
        classes=classes.names,
        families=classes.families,
    )


def _words(ops: Operations) -> Labels:
    """What each operation is called: its name, or its kind where that says all."""
    words = tuple(name or kind for kind in ops.kind.names for name in ops.op.names)
    return Labels((ops.kind.row * len(ops.op.names) + ops.op.row).astype(np.int32, copy=False), words)


@dataclass(frozen=True, slots=True, eq=False)
class ShapeTexts:
    """What names some operations, the ``rows`` of ``ops``, as texts that are ``spelled`` when asked for."""

    ops: Operations
    rows: IntArray
    spelled: Callable[[Operations], list[str]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int, /) -> str:
        return self.spelled(self.ops.take(self.rows[number : number + 1]))[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _AT_ONCE):
            yield from self.spelled(self.ops.take(self.rows[start : start + _AT_ONCE]))


def _shape_numbers(ops: Operations, rows: IntArray) -> tuple[IntArray, IntArray | None]:
    """Of some operations the first of each text that :func:`_shape_texts` gives, and the place of each among
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
            stated = [
                f"{name} {value:.15g}" for name, value in zip(names, values, strict=True) if not isnan(value)
            ]
            texts[row] = ", ".join((heads[head[row]][0], *stated))
    return texts


def prediction_of_rows(
    model: OperationModel,
    ops: Operations,
    device: Device,
    diagnostics: Diagnostics,
    distinct: _Distinct | None = None,
) -> Prediction:
    """What a model says of each row; distinct operations are asked once, so many of them together that what
    is held at once does not grow with the table. ``distinct`` where it is known already.
    """
    first, place = distinct or ops.distinct_rows()
    parts = [
        predict_with(model, ops.take(first[start : start + _ASKED_AT_ONCE]), device, diagnostics)
        for start in range(0, max(len(first), 1), _ASKED_AT_ONCE)
    ]
    return Prediction(
        estimator=model.name,
        duration_ns=_spread_out([each.duration_ns for each in parts], place),
        low_ns=_spread_out([each.low_ns for each in parts], place),
        high_ns=_spread_out([each.high_ns for each in parts], place),
    )


def _spread_out(parts: Sequence[FloatArray], place: IntArray) -> FloatArray:
    """A column of distinct operations as one of all rows; without memory where nothing is known of any."""
    if all(np.isnan(part).all() for part in parts):
        return constant(np.nan, len(place))
    return (parts[0] if len(parts) == 1 else np.concatenate(parts))[place]


_FITTED_SPLIT = "calib"
"""The split that shipped models are fitted on."""


def accuracy_of_tables(
    tables: Sequence[Measurements],
    hardware: Sequence[str] = (),
    estimators: Sequence[str] = ("composite",),
    *,
    split: str = "",
    inputs: Sequence[str] = (),
    diagnostics: Diagnostics | None = None,
) -> Accuracy:
    """How far each estimator is from the measured operations of some tables, on the devices ``hardware``
    (names or files; none: all that the tables name and the library describes).

    Rows of ``split`` are compared (empty: all). The naive baselines are fitted on rows of split ``calib``
    that are not compared; without such rows on the other four fifths of the sizes. Raises ``UsageError`` for
    a device without rows, a split no table has, and an estimator that covers programs only.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    models = [model_of_operations(spelling) for spelling in estimators]
    devices = devices_of_tables(tables, hardware, found)
    classes = TableClasses.of(tables)
    cases: list[Cases] = []
    lint: list[LintFinding] = []
    for table in tables:
        is_scored = _scored(table, split)
        _tell(table, is_scored, found)
        for device in devices.values():
            rows = rows_on(table, device)
            if is_scored[rows].any():
                one, findings = _compared(table.take(rows), is_scored[rows], device, (models, classes, found))
                cases.append(one)
                lint.extend(findings)
    if not cases:
        raise UsageError(
            f"no row of split {split!r} is of {', '.join(device.name for device in devices.values())}",
            hint="name another `split` or `hardware`",
        )
    return replace(
        accuracy_of_cases(cases, inputs, [model.name for model in models], found), lint=tuple(lint)
    )


def model_of_operations(spelling: str) -> OperationModel:
    """An estimator that covers single operations. Raises ``UsageError`` for one of programs only."""
    model = load_estimator(spelling)
    if not isinstance(model, OperationModel):
        raise UsageError(
            f"estimator {model.name!r} covers programs, not the operations of a table",
            hint="give `measured` and `workload`, or another `estimator`",
        )
    return model


def devices_of_tables(
    tables: Sequence[Measurements], hardware: Sequence[str], diagnostics: Diagnostics
) -> Mapping[str, Device]:
    """The devices by the user's spelling; without any, those that the tables name and the library has: a
    diagnostic says which it has not.
    """
    listed = sorted({name for table in tables for name in table.hardware.used() if name})
    if hardware:
        devices = {name: load_device(name) for name in hardware}
        for device in devices.values():
            if not any(len(rows_on(table, device)) for table in tables):
                names = ", ".join(table.name for table in tables)
                told = ", ".join(listed) or "none"
                raise UsageError(f"no row of {names} is of {device.name}", hint=f"devices there: {told}")
        return devices
    known: dict[str, Device] = {}
    missing: list[str] = []
    for name in listed:
        try:
            known[name] = named_device(name)
        except UsageError:
            missing.append(name)
    if not known:
        raise UsageError(
            f"no hardware file for {', '.join(missing) or 'the table: it names no device'}",
            hint="give `hardware=FILE.toml` whose name or aliases are those of the table",
        )
    if missing:
        count = sum(len(table.hardware.where(*missing)) for table in tables)
        diagnostics.warning(
            "accuracy.no-hardware-file",
            ", ".join(missing),
            "rows of devices without a hardware file are left out",
            count=count,
        )
    return known


def rows_on(table: Measurements, device: Device) -> IntArray:
    """Numbers of the rows that are of a device by its name or an alias."""
    spellings = {_folded(name) for name in (device.name, *device.aliases)}
    return table.hardware.where(*(name for name in table.hardware.names if _folded(name) in spellings))


def _folded(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _scored(table: Measurements, split: str) -> BoolArray:
    """Which rows are compared. Raises ``UsageError`` where no row is of the split."""
    if not split:
        return np.ones(len(table), np.bool_)
    found = np.zeros(len(table), np.bool_)
    found[rows_of_split(table, split)] = True
    return found


def rows_of_split(table: Measurements, split: str) -> IntArray:
    """Numbers of the rows of a split. Raises ``UsageError`` where there is none."""
    rows = table.split.where(split)
    if not len(rows):
        listed = ", ".join(sorted(name for name in table.split.used() if name)) or "no splits"
        raise UsageError(f"no row of {table.name} has split {split!r}", hint=f"it has {listed}")
    return rows


def _tell(table: Measurements, is_scored: BoolArray, diagnostics: Diagnostics) -> None:
    compared = int(is_scored.sum())
    diagnostics.info(
        "accuracy.table",
        table.name,
        f"{compared:,} of {len(table):,} rows compared; data: {table.provenance}",
    )
    lost = sum(each.count for each in table.left_out)
    told = f"rows left out: {table.told_left_out()}"
    diagnostics.warning("accuracy.left-out-rows", table.name, told, count=lost)
    seen = int(is_scored[table.split.where(_FITTED_SPLIT)].sum())
    if seen:
        diagnostics.warning(
            "accuracy.fitted-rows",
            table.name,
            f"rows of split {_FITTED_SPLIT!r} are compared: fitted estimators may have seen them",
            count=seen,
        )


def _compared(
    rows: Measurements,
    is_scored: BoolArray,
    device: Device,
    asked: tuple[Sequence[OperationModel], TableClasses, Diagnostics],
) -> tuple[Cases, list[LintFinding]]:
    """The rows of one device, of which some are compared, with what the models and the baselines say."""
    models, classes, diagnostics = asked
    is_fitted = np.zeros(len(rows), np.bool_)
    is_fitted[rows.split.where(_FITTED_SPLIT)] = True
    kept = np.flatnonzero(is_scored | is_fitted)
    rows, is_scored = rows.take(kept), is_scored[kept]
    bare = replace(device, efficiencies=(), launch_overhead_ns=0.0)
    distinct = rows.ops.distinct_rows()
    naive = prediction_of_rows(Roofline(), rows.ops, bare, Diagnostics(), distinct).duration_ns
    fitting = FittingRows(
        naive_ns=naive,
        measured_ns=rows.duration_ns,
        op_class=classes.codes(rows.ops),
        shape=distinct[1],
        group=rows.shape_group(),
    )
    baselines = baselines_of_rows(fitting, is_scored)
    if fitting.is_sampled:
        diagnostics.warning(
            "accuracy.sampled-baselines",
            rows.name,
            f"the fitted baselines are fitted to at most {MOST_FITTED:,} shapes of each fit, drawn at random",
        )
    del fitting
    scored = rows.take(np.flatnonzero(is_scored))
    if len(scored) < len(rows):
        distinct = scored.ops.distinct_rows()
    cases = cases_of_rows(scored, device, classes, distinct)
    predictions = [prediction_of_rows(model, scored.ops, device, diagnostics, distinct) for model in models]
    cases = cases.with_predictions((*predictions, *baselines))
    return cases, lint_cases(cases, naive[is_scored], np.ones(len(cases)), device)
