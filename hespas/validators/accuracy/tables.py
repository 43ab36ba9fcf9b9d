"""Estimators against tables of measured operations: the same errors and statistics as against profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hespas.estimators import load_estimator
from hespas.estimators.protocol import OperationModel
from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device, named_device
from hespas.measurements import Measurements
from hespas.validators.accuracy.across import speed_ups
from hespas.validators.accuracy.baselines import MOST_FITTED, FittingRows, baselines_of_rows
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.lint import LintFinding, lint_cases
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.summaries import contributions, noise_of, summaries
from hespas.validators.accuracy.table_cases import (
    DistinctRows,
    TableClasses,
    cases_of_rows,
    prediction_of_rows,
)

__all__ = ["accuracy_of_tables", "devices_of_tables", "model_of_operations", "rows_on"]

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
    a device without rows, a split no table has, and an estimator that speaks of programs only.
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
            hint="name another --split or --hardware",
        )
    return Accuracy(
        inputs=tuple(inputs),
        estimators=tuple(model.name for model in models),
        cases=tuple(cases),
        summary=tuple(summaries(cases)),
        end_to_end=(),
        contributions=tuple(row for each in cases for row in contributions(each)),
        speed_ups=tuple(speed_ups(cases)),
        trends=(),
        noise={name: noise_of(cases, name) for name in dict.fromkeys(each.hardware for each in cases)},
        coverage={},
        lint=tuple(lint),
        diagnostics=found,
    )


def model_of_operations(spelling: str) -> OperationModel:
    """An estimator that speaks of single operations. Raises ``UsageError`` for one of programs only."""
    model = load_estimator(spelling)
    if not isinstance(model, OperationModel):
        raise UsageError(
            f"estimator {model.name!r} speaks of programs, not of the operations of a table",
            hint="give --measured and --workload, or another --estimator",
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
            hint="give --hardware FILE.toml whose name or aliases are those of the table",
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
    found[table.split.where(split)] = True
    if not found.any():
        listed = ", ".join(sorted(name for name in table.split.used() if name)) or "no splits"
        raise UsageError(f"no row of {table.name} has split {split!r}", hint=f"it has {listed}")
    return found


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
    is_fitted = ~is_scored
    is_fitted[is_fitted] = np.isin(
        rows.split.row[is_fitted], [n for n, name in enumerate(rows.split.names) if name == _FITTED_SPLIT]
    )
    kept = np.flatnonzero(is_scored | is_fitted)
    rows, is_scored = rows.take(kept), is_scored[kept]
    bare = replace(device, efficiencies=(), launch_overhead_ns=0.0)
    distinct = DistinctRows.of(rows.ops)
    naive = prediction_of_rows(Roofline(), rows.ops, bare, Diagnostics(), distinct).duration_ns
    fitting = FittingRows(
        naive_ns=naive,
        measured_ns=rows.duration_ns,
        op_class=classes.codes(rows.ops),
        shape=distinct.place,
        group=rows.shape_group(),
        is_test=is_scored,
    )
    baselines = baselines_of_rows(fitting)
    if fitting.is_sampled:
        diagnostics.warning(
            "accuracy.sampled-baselines",
            rows.name,
            f"p1 and p2 are fitted to at most {MOST_FITTED:,} shapes of each fit, drawn at random",
        )
    del fitting
    scored = rows.take(np.flatnonzero(is_scored))
    if len(scored) < len(rows):
        distinct = DistinctRows.of(scored.ops)
    cases = cases_of_rows(scored, device, classes, distinct)
    said = [prediction_of_rows(model, scored.ops, device, diagnostics, distinct) for model in models]
    cases = cases.with_predictions((*said, *baselines))
    return cases, lint_cases(cases, naive[is_scored], np.ones(len(cases)), device)
