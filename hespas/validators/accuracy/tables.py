"""Accuracy on tables of measured operations: rows become cases, with predictions and baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isnan

import numpy as np

from hespas.estimators import load_estimator
from hespas.estimators.interface import OperationModel, prediction_of_rows
from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, is_one_value
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device, named_device
from hespas.measurements import Measurements
from hespas.measurements.model import rows_of_split, rows_on
from hespas.operations import KINDS, Labels, Operations, numbered
from hespas.validators.accuracy.baselines import MOST_FITTED, FittingRows, baselines_of_rows
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.lint import LintFinding, lint_cases
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.summaries import accuracy_of_cases

__all__ = [
    "ShapeTexts",
    "TableClasses",
    "accuracy_of_tables",
    "cases_of_rows",
    "devices_of_tables",
    "model_of_operations",
]

_TEXTS_PER_BLOCK = 1 << 16
_Distinct = tuple[IntArray, IntArray]
"""First rows of equal operations, and the index of each row among them."""
_EXACT = 1e15
"""Limit of whole numbers that a text of 15 digits represents exactly."""
_FITTED_SPLIT = "calib"
"""Split that shipped models are fitted to."""


@dataclass(frozen=True, slots=True)
class TableClasses:
    """Operation classes of several tables of measurements.

    Entry ``i`` of both columns belongs to class ``i``. ``names`` is the full name: kind, operation, number
    format and variant. ``families`` is the name under which classes are summarised together: kind and number
    format.
    """

    names: tuple[str, ...]
    families: tuple[str, ...]

    @classmethod
    def of(cls, tables: Sequence[Measurements]) -> TableClasses:
        """Return the distinct classes in the tables, in order of appearance."""
        families: dict[str, str] = {}
        for table in tables:
            for name, family in _class_texts(table.ops)[0]:
                families.setdefault(name, family)
        return cls(tuple(families), tuple(families.values()))

    def codes(self, ops: Operations) -> SmallIntArray:
        """Return the index of the class of each operation, shape ``(ops,)``."""
        code = {name: number for number, name in enumerate(self.names)}
        texts, row = _class_texts(ops)
        return np.array([code[name] for name, _ in texts], np.int32)[row]


def _class_texts(ops: Operations) -> tuple[list[tuple[str, str]], SmallIntArray]:
    """Return name and family of each distinct class, and the index of each operation's class."""
    labels = (ops.kind, ops.op, ops.scheme, ops.variant)
    key = np.zeros(len(ops), np.int64)
    for label in labels:
        key = key * (len(label.names) + 1) + label.row
    _, first, row = np.unique(key, return_index=True, return_inverse=True)
    texts: list[tuple[str, str]] = []
    for index in first.tolist():
        kind, op, scheme, variant = (label[index] for label in labels)
        name = " ".join(part for part in (kind, op, scheme, variant) if part)
        texts.append((name, " ".join(part for part in (kind, scheme) if part)))
    return texts, row.reshape(-1).astype(np.int32)


def cases_of_rows(
    rows: Measurements, device: Device, classes: TableClasses, distinct: _Distinct | None = None
) -> Cases:
    """Return the rows of a table of one device as cases, one case per row. O(rows log rows).

    ``distinct`` is the result of ``rows.ops.distinct_rows()``, if it is already available.
    """
    ops = rows.ops
    firsts, index = distinct or ops.distinct_rows()
    first, number = _shape_numbers(ops, firsts)
    names = tuple(name or kind for kind in ops.kind.names for name in ops.op.names)
    return Cases(
        source=rows.name,
        workload=rows.name,
        hardware=device.name,
        labels=Labels((ops.kind.row * len(ops.op.names) + ops.op.row).astype(np.int32, copy=False), names),
        shapes=ShapeTexts(ops, first, _shape_texts),
        shape=index if number is None else number[index],
        op_class=classes.codes(ops),
        measured_ns=rows.duration_ns,
        spread_ns=rows.spread_ns,
        repeats=np.where(np.isfinite(rows.spread_ns), 2, 1).astype(np.int8),  # a spread has two runs or more
        flops=ops.flops,
        bytes_moved=ops.bytes_moved,
        classes=classes.names,
        families=classes.families,
    )


@dataclass(frozen=True, slots=True, eq=False)
class ShapeTexts:
    """Texts that describe the operations ``rows`` of ``ops``. They are made on demand by ``spelled``, to save
    memory.
    """

    ops: Operations
    rows: IntArray
    spelled: Callable[[Operations], list[str]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int, /) -> str:
        return self.spelled(self.ops.take(self.rows[number : number + 1]))[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _TEXTS_PER_BLOCK):
            yield from self.spelled(self.ops.take(self.rows[start : start + _TEXTS_PER_BLOCK]))


def _shape_numbers(ops: Operations, rows: IntArray) -> tuple[IntArray, IntArray | None]:
    """Group the operations ``rows`` by their description (:func:`_shape_texts`). Return the first row of each
    distinct description, and the index of the description of each row (None: all are distinct).

    Properties that are not in a description do not distinguish operations: FLOPs, bytes, sizes that do not
    determine the time of the kind, and digits after the fifteenth.
    """
    heads, code = _class_texts(ops)
    same = {name: number for number, (name, _) in reversed(list(enumerate(heads)))}
    head = np.array([same[name] for name, _ in heads], np.int32)[code[rows]]
    sizes: list[FloatArray] = []
    for dim, size in ops.dims.items():
        if not is_one_value(size):
            has_dim = np.array([dim in KINDS[name] for name in ops.kind.names], np.bool_)[ops.kind.row]
            # Texts of sizes have fifteen digits.
            exact_sizes = np.where(has_dim, size, np.nan)[rows]
            long = np.flatnonzero((exact_sizes != np.floor(exact_sizes)) | (np.abs(exact_sizes) >= _EXACT))
            long = long[np.isfinite(exact_sizes[long])]
            if len(long):
                distinct, index = np.unique(exact_sizes[long], return_inverse=True)
                rounded = [float(f"{value:.15g}") for value in distinct.tolist()]
                exact_sizes[long] = np.array(rounded)[index.reshape(-1)]
            sizes.append(exact_sizes)
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


def _shape_texts(ops: Operations) -> list[str]:
    """Return a text for each of some distinct operations: its labels and sizes."""
    texts = [""] * len(ops)
    heads, codes = _class_texts(ops)
    head: list[int] = codes.tolist()
    for number, kind in enumerate(ops.kind.names):
        rows = np.flatnonzero(ops.kind.row == number)
        numbers: list[int] = rows.tolist()
        names = KINDS[kind]
        columns: list[list[float]] = [ops.dim(name)[rows].tolist() for name in names]
        sizes: Iterable[tuple[float, ...]] = zip(*columns, strict=True) if columns else [()] * len(rows)
        for row, values in zip(numbers, sizes, strict=True):
            parts = [
                f"{name} {value:.15g}" for name, value in zip(names, values, strict=True) if not isnan(value)
            ]
            texts[row] = ", ".join((heads[head[row]][0], *parts))
    return texts


def accuracy_of_tables(
    tables: Sequence[Measurements],
    hardware: Sequence[str] = (),
    estimators: Sequence[str] = ("composite",),
    *,
    split: str = "",
    inputs: Sequence[str] = (),
    diagnostics: Diagnostics | None = None,
) -> Accuracy:
    """Compare estimators with the measured operations of some tables.

    ``hardware`` has names or files of devices (empty: all devices of the tables that have a file in the
    library). Rows of ``split`` are compared (empty: all). The naive baselines are fitted to rows of split
    ``calib`` that are not compared. Without such rows, each fifth of the sizes is predicted by a fit to the
    other four. Raises ``UsageError`` for a device without rows, a split without rows, and an estimator that
    covers only programs.
    """
    diagnostics = diagnostics if diagnostics is not None else Diagnostics()
    models = [model_of_operations(spelling) for spelling in estimators]
    devices = devices_of_tables(tables, hardware, diagnostics)
    classes = TableClasses.of(tables)
    cases: list[Cases] = []
    lint: list[LintFinding] = []
    for table in tables:
        is_scored = np.ones(len(table), np.bool_)
        if split:
            is_scored[:] = False
            is_scored[rows_of_split(table, split)] = True
        diagnostics.info(
            "accuracy.table",
            table.name,
            f"{int(is_scored.sum()):,} of {len(table):,} rows compared; data: {table.provenance}",
        )
        diagnostics.warning(
            "accuracy.left-out-rows",
            table.name,
            f"rows skipped: {table.describe_left_out()}",
            count=sum(reason.count for reason in table.left_out),
        )
        fitted = int(is_scored[table.split.where(_FITTED_SPLIT)].sum())
        if fitted:
            diagnostics.warning(
                "accuracy.fitted-rows",
                table.name,
                f"rows of split {_FITTED_SPLIT!r} are compared: estimators may have been fitted to them",
                count=fitted,
            )
        for device in devices.values():
            rows = rows_on(table, device)
            if is_scored[rows].any():
                device_cases, naive_ns = _cases_with_predictions(
                    table.take(rows), is_scored[rows], device, (models, classes, diagnostics)
                )
                cases.append(device_cases)
                lint.extend(lint_cases(device_cases, naive_ns, np.ones(len(device_cases)), device))
    if not cases:
        raise UsageError(
            f"no row of split {split!r} is of {', '.join(device.name for device in devices.values())}",
            hint="name another `split` or `hardware`",
        )
    return replace(
        accuracy_of_cases(cases, inputs, [model.name for model in models], diagnostics), lint=tuple(lint)
    )


def model_of_operations(spelling: str) -> OperationModel:
    """Return an estimator of single operations. Raises ``UsageError`` if it only covers programs."""
    model = load_estimator(spelling)
    if not isinstance(model, OperationModel):
        raise UsageError(
            f"estimator {model.name!r} covers programs, not the operations of a table",
            hint="give `profiles` and `workload`, or another `estimator`",
        )
    return model


def devices_of_tables(
    tables: Sequence[Measurements], hardware: Sequence[str], diagnostics: Diagnostics
) -> Mapping[str, Device]:
    """Return a map from device names, as the user wrote them, to devices. If ``hardware`` is empty, the
    devices are those that the tables name.

    A diagnostic lists the devices of the tables that the library does not have.
    """
    listed = sorted({name for table in tables for name in table.hardware.used() if name})
    if hardware:
        devices = {name: load_device(name) for name in hardware}
        for device in devices.values():
            if not any(len(rows_on(table, device)) for table in tables):
                names = ", ".join(table.name for table in tables)
                present = ", ".join(listed) or "none"
                raise UsageError(f"no row of {names} is of {device.name}", hint=f"choose one of {present}")
        return devices
    shipped: dict[str, Device] = {}
    missing: list[str] = []
    for name in listed:
        try:
            shipped[name] = named_device(name)
        except UsageError:
            missing.append(name)
    if not shipped:
        raise UsageError(
            f"no hardware file for {', '.join(missing) or 'the table: it names no device'}",
            hint="give `hardware=FILE.toml` with the name that the table uses among its names or aliases",
        )
    if missing:
        count = sum(len(table.hardware.where(*missing)) for table in tables)
        diagnostics.warning(
            "accuracy.no-hardware-file",
            ", ".join(missing),
            "rows of devices without a hardware file are skipped",
            count=count,
        )
    return shipped


def _cases_with_predictions(
    rows: Measurements,
    is_scored: BoolArray,
    device: Device,
    context: tuple[Sequence[OperationModel], TableClasses, Diagnostics],
) -> tuple[Cases, FloatArray]:
    """Return the rows of one device in the mask ``is_scored`` as cases, with the predictions of models and
    baselines. Also return their data-sheet roofline [ns].
    """
    models, classes, diagnostics = context
    is_fitted = np.zeros(len(rows), np.bool_)
    is_fitted[rows.split.where(_FITTED_SPLIT)] = True
    used = np.flatnonzero(is_scored | is_fitted)
    rows, is_scored = rows.take(used), is_scored[used]
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
            f"each baseline fit uses at most {MOST_FITTED:,} shapes, drawn at random",
        )
    del fitting
    scored = rows.take(np.flatnonzero(is_scored))
    if len(scored) < len(rows):
        distinct = scored.ops.distinct_rows()
    cases = cases_of_rows(scored, device, classes, distinct)
    predictions = [prediction_of_rows(model, scored.ops, device, diagnostics, distinct) for model in models]
    return cases.with_predictions((*predictions, *baselines)), naive[is_scored]
