"""Calibration of a device file from measurements: the function behind ``hespas-validate calibrate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import asdict
from msgspec.structs import replace as with_fields

from hespas._version import __version__
from hespas.estimators.learned.serialization import (
    ErrorRow,
    LearnedModel,
    forget_models,
    load_model,
    save_model,
)
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.output import check_destination, write_atomically
from hespas.fitting.approaches import (
    Approach,
    CalibratedFits,
    CalibrationRun,
    FitMemory,
    FitResult,
    LearnedTrees,
    Progress,
    SystolicLines,
    has_adaptable,
)
from hespas.fitting.before import with_before
from hespas.fitting.fits import merged
from hespas.fitting.own_models import unused_name
from hespas.fitting.rows import FITTED_SPLITS, is_possible, may_be_fitted, rows_to_fit
from hespas.fitting.statistics import one_thread
from hespas.graph import Diagnostics
from hespas.graph.errors import OutputError, UsageError
from hespas.hardware import Device, Fit, write_device
from hespas.measurements import Measurements
from hespas.measurements.model import rows_of_split, rows_on
from hespas.operations import Labels
from hespas.validators.accuracy.document import DiagnosticJson, SummaryJson, diagnostics_json, summary_json
from hespas.validators.calibration.held_out import (
    TESTS,
    HeldOutTest,
    HeldOutTesting,
    compared,
    other_devices,
)

__all__ = [
    "ESTIMATORS",
    "KEPT_SPLIT",
    "SCHEMA_ID",
    "Calibration",
    "CalibrationDocument",
    "Progress",
    "TableUse",
    "calibrate",
    "calibration_json",
    "check_models_folder",
    "models_folder",
    "write_calibration",
]

ESTIMATORS = ("calibrated", "systolic", "learned")
"""Estimators that can be fitted."""

KEPT_SPLIT = "devval"
"""Split that is never fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableUse:
    """Use of one table by a calibration: the number of rows measured on the device, and how many of them were
    fitted.
    """

    name: str
    provenance: str
    rows: Annotated[Count, Meta(description="rows of the device")]
    fitted: Annotated[Count, Meta(description="fitted rows")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Result of a calibration. ``device`` has the new ``fits``, and its earlier fits of operation classes
    that have no new fit.

    ``models`` are the new learned models. ``kept_models`` are the earlier models that the device still uses.
    The result is only in memory until :func:`~hespas.validators.calibration.calibrate.write_calibration`
    writes it.
    """

    device: Device
    estimators: tuple[str, ...]
    fits: tuple[Fit, ...]
    models: tuple[LearnedModel, ...]
    kept_models: tuple[LearnedModel, ...]
    held_out: tuple[HeldOutTest, ...]
    tables: tuple[TableUse, ...]
    seed: int
    fitted: str
    diagnostics: Diagnostics


@one_thread()
def calibrate(
    tables: Sequence[Measurements],
    device: Device,
    *,
    estimators: Sequence[str] = ("calibrated",),
    split: str = "",
    tests: Sequence[str] | None = None,
    seed: int = 0,
    fitted: str = "",
    inputs: Sequence[str] = (),
    memory: FitMemory | None = None,
    progress: Progress | None = None,
    diagnostics: Diagnostics | None = None,
) -> Calibration:
    """Fit ``estimators`` to every class of operations that was measured on ``device``, and test the fits.

    ``tests`` are names of :data:`TESTS` (None: by shape, if there are enough sizes). Only rows of ``split``
    are fitted (empty: all rows that are not reserved for testing). ``fitted`` is the date in the file (ISO;
    empty: today); everything else depends only on rows, device and ``seed``. ``memory`` saves finished fits,
    so that an interrupted run can continue. Raises ``UsageError`` if nothing can be fitted or a test has no
    rows to hold out, ``MissingExtraError`` if a package for fitting trees is missing.
    """
    diagnostics = diagnostics if diagnostics is not None else Diagnostics()
    run = CalibrationRun(seed=seed, date=_iso_date(fitted), memory=memory, progress=progress)
    all_approaches: tuple[Approach, ...] = (CalibratedFits(run), SystolicLines(run), LearnedTrees(run))
    for name in estimators:
        if name not in ESTIMATORS:
            raise UsageError(
                f"estimator {name!r} has no parameters that can be fitted",
                hint=f"choose one of {', '.join(ESTIMATORS)}",
            )
    approaches = [approach for approach in all_approaches if approach.name in estimators]
    usable = [_usable_rows(table, split) for table in tables]
    on_device = _rows_on_device(tables, usable, device, split)
    for path in device.learned_models:  # report a damaged model before anything is fitted
        load_model(Path(path))
    for approach in approaches:
        approach.check(on_device, device, diagnostics)
    if "learned" not in estimators and has_adaptable(on_device, device, seed):
        text = "models of reference devices can be adapted to these rows: fit also the estimator `learned`"
        diagnostics.info("calibrate.relatives", device.name, text)
    testing = HeldOutTesting(on_device, other_devices(usable, device), device, seed, approaches)
    chosen = testing.chosen(tests, diagnostics)
    results: Mapping[str, FitResult] = {
        approach.name: _fit_or_refuse(approach, on_device, device, memory) for approach in approaches
    }
    results = with_before(results, on_device, device, seed, diagnostics)
    held_out = tuple(compared(by, testing.tested(by), device, inputs, tuple(results)) for by in chosen)
    for test in held_out:
        counts = dict.fromkeys(test.accuracy.estimators, 0)
        for row in test.accuracy.summary:
            counts[row.estimator] = counts.get(row.estimator, 0) + row.errors.n
        for name in (name for name, count in counts.items() if not count):
            text = f"{name} predicts none of the rows that are held out by {test.by}: its fits are untested"
            diagnostics.warning("calibrate.untested", device.name, text)
    models = tuple(model for result in results.values() for model in result.models)
    fitted_device = replace(device, step_factors=())
    removed = "step factors are removed, because they correct the earlier fits: fit them again"
    count = len(device.step_factors)
    diagnostics.warning("calibrate.step-factors-removed", device.name, removed, count=count)
    if "calibrated" in results:
        own_fits = merged(results["calibrated"].fits, device.fits)
        fitted_device = replace(fitted_device, own_fits=own_fits, fits_of="")
    if "systolic" in results:
        own_lines = merged(results["systolic"].fits, device.own_lines)
        fitted_device = replace(fitted_device, own_lines=own_lines)
    return Calibration(
        device=fitted_device,
        estimators=tuple(results),
        fits=tuple(fit for result in results.values() for fit in result.fits),
        models=models,
        kept_models=_earlier_models(device, models),
        held_out=held_out,
        tables=tuple(_table_uses(tables, usable, device, diagnostics)),
        seed=seed,
        fitted=run.date,
        diagnostics=diagnostics,
    )


def _fit_or_refuse(
    approach: Approach, tables: Sequence[Measurements], device: Device, memory: FitMemory | None
) -> FitResult:
    """Return the result of a fit. Raises ``UsageError`` if it is empty."""
    result = approach.fit(tables, device, approach.name)
    if result.fits or result.models:
        return result
    if memory:  # a later run could not use it
        memory.forget()
    raise UsageError(
        f"no class of operations on {device.name} has enough rows to fit",
        hint="give at least 12 of one kind, number format and variant, with known sizes and a published peak",
    )


def _earlier_models(device: Device, new: Sequence[LearnedModel]) -> tuple[LearnedModel, ...]:
    """Return the models in the device's file that are still needed, because they cover an operation class
    that no new model covers.

    An earlier model is renamed if a new model has its name.
    """

    def classes(model: LearnedModel) -> set[tuple[str, str, str, str]]:
        return {(cell.kind, cell.op, cell.scheme, cell.variant) for cell in model.card.cells}

    covered = {labels for model in new for labels in classes(model)}
    names = {model.card.name for model in new}
    earlier: list[LearnedModel] = []
    for path in device.learned_models:
        model = load_model(Path(path))
        if classes(model) <= covered:
            continue
        name = unused_name(model.card.name, names)
        names.add(name)
        earlier.append(replace(model, card=with_fields(model.card, name=name)))
    return tuple(earlier)


def _iso_date(text: str) -> str:
    """Return a date in ISO format; today if the text is empty."""
    if not text:
        return datetime.now(UTC).date().isoformat()
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise UsageError(f"invalid date {text!r}", hint="write it as 2026-01-31") from error


def _usable_rows(table: Measurements, split: str) -> Measurements:
    """Return the rows that may be fitted. With ``split``, return its rows, with their split removed."""
    if not split:
        return may_be_fitted(table)
    if split == KEPT_SPLIT:
        raise UsageError(
            f"rows of split {KEPT_SPLIT!r} are reserved for testing and are never fitted",
            hint=f"fit --split {FITTED_SPLITS[0]}, then run hespas-validate accuracy --split {KEPT_SPLIT}",
        )
    part = table.take(rows_of_split(table, split))
    return replace(part, split=Labels.constant("", len(part)))


def _rows_on_device(
    tables: Sequence[Measurements], usable: Sequence[Measurements], device: Device, split: str
) -> list[Measurements]:
    """Return the rows measured on the device that may be fitted. Raises ``UsageError`` if there are none."""
    on_device: list[Measurements] = []
    for table in usable:
        rows = table.take(rows_on(table, device))
        if len(rows):
            on_device.append(replace(rows, hardware=Labels.constant(device.name, len(rows))))
    if on_device:
        possible = [rows for table in on_device if len(rows := rows_to_fit(table, device))]
        if not possible:
            raise UsageError(
                f"all rows are faster than the data sheet of {device.name} allows",
                hint="check the unit of the times and the device",
            )
        return possible
    names = ", ".join(table.name for table in tables)
    if any(len(rows_on(table, device)) for table in tables) and not split:
        splits = sorted({name for table in tables for name in table.split.used()} - {"", KEPT_SPLIT})
        other = f"name the split to fit: {', '.join(splits)}"
        raise UsageError(
            f"{names} has no row of {device.name} that may be fitted",
            hint=other
            if splits
            else f"give rows of another split: all are of {KEPT_SPLIT}, which is reserved for testing",
        )
    listed = sorted({name for table in usable for name in table.hardware.used() if name})
    raise UsageError(
        f"no row of {names} is of {device.name}",
        hint=f"choose a device of the tables: {', '.join(listed) or 'none'}",
    )


def _table_uses(
    tables: Sequence[Measurements],
    usable: Sequence[Measurements],
    device: Device,
    diagnostics: Diagnostics,
) -> list[TableUse]:
    """Return the use of each table, and report how many of its rows are not fitted and why."""
    uses: list[TableUse] = []
    for table, part in zip(tables, usable, strict=True):
        # Other work in a recording is normal.
        report = diagnostics.info if table.recorded else diagnostics.warning
        skipped = sum(reason.count for reason in table.left_out)
        text = f"rows skipped: {table.describe_left_out()}"
        report("calibrate.left-out-rows", table.name, text, count=skipped)
        impossible = int((~is_possible(part.take(rows_on(part, device)), device)).sum())
        text = f"rows faster than the data sheet of {device.name} allows: not fitted"
        diagnostics.warning("calibrate.impossible-rows", table.name, text, count=impossible)
        rows = len(rows_on(table, device))
        entered = len(rows_on(part, device))
        text = "rows reserved for testing: not fitted"
        diagnostics.info("calibrate.kept-rows", table.name, text, count=rows - entered)
        uses.append(
            TableUse(name=table.name, provenance=table.provenance, rows=rows, fitted=entered - impossible)
        )
    return uses


SCHEMA_ID: Final = "hespas.calibrate/1"
"""Value of ``schema`` in documents of this version."""

_Estimator = Literal["calibrated", "systolic", "learned"]
_Test = Literal["shape", "op", "recording", "hardware"]
_Pair = tuple[Figure, Figure]
_Positive = Annotated[int, Meta(ge=1)]


class _FitJson(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    op: str
    scheme: str
    variant: str
    default: bool
    form: str
    samples: Count
    parameters: Annotated[dict[str, _Pair], Meta(description="value and standard error by name")]
    n: Annotated[Count, Meta(description="held-out rows that the errors are of")]
    mape: Figure
    median_ape: Figure
    p90_ape: Figure
    bias: Figure
    before_mape: Annotated[Figure, Meta(description="error of the package's learned models before")]
    table: str
    provenance: str


class _KindErrorsJson(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    scheme: str
    n: Count
    mape: Figure
    median_ape: Figure
    p90_ape: Figure
    bias: Figure
    before_mape: Annotated[Figure, Meta(description="error of the package's learned models before")]


class _ModelJson(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    schemes: list[str]
    samples: _Positive
    shape_groups: Annotated[_Positive, Meta(description="layers or sizes that are held out together")]
    trees: Count
    leaves: Count
    loss: str
    library: str
    tables: tuple[str, ...]
    provenance: tuple[str, ...]
    errors: list[_KindErrorsJson]


class _HeldOutJson(msgspec.Struct, frozen=True, kw_only=True):
    by: _Test
    what: str
    rows: Count
    fitted_rows: Count
    summary: list[SummaryJson]


class CalibrationDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Document that hespas-validate calibrate --json writes; null is unknown, errors are relative."""

    schema: Literal["hespas.calibrate/1"] = SCHEMA_ID
    hespas_version: str = __version__
    inputs: tuple[str, ...]
    hardware: str
    estimators: Annotated[tuple[_Estimator, ...], Meta(description="fitted estimators")]
    seed: Count
    fitted: Annotated[str, Meta(description="date, ISO 8601")]
    tables: tuple[TableUse, ...]
    fits: list[_FitJson]
    models: Annotated[
        list[_ModelJson], Meta(description="learned models; errors are of rows held out of the fit in turn")
    ]
    held_out: list[_HeldOutJson]
    diagnostics: list[DiagnosticJson]


def calibration_json(result: Calibration, inputs: Sequence[str]) -> bytes:
    """Return the document as indented UTF-8 JSON that ends in a newline; unknown figures are null."""
    document = CalibrationDocument(
        inputs=tuple(inputs),
        hardware=result.device.name,
        estimators=cast("tuple[_Estimator, ...]", result.estimators),
        seed=result.seed,
        fitted=result.fitted,
        tables=result.tables,
        fits=list(map(_fit_json, result.fits)),
        models=list(map(_model_json, result.models)),
        held_out=[
            _HeldOutJson(
                by=cast("_Test", test.by),
                what=TESTS[test.by],
                rows=test.count,
                fitted_rows=test.fitted,
                summary=[summary_json(row) for row in test.accuracy.summary],
            )
            for test in result.held_out
        ],
        diagnostics=diagnostics_json(result.diagnostics),
    )
    return document_bytes(document)


def _fit_json(fit: Fit) -> _FitJson:
    names = ("kind", "op", "scheme", "variant", "default", "form", "samples", "table", "provenance")
    fields: dict[str, Any] = {name: getattr(fit, name) for name in names}
    figures: dict[str, Any] = {**asdict(fit.error), "n": max(fit.error.n, 0)}
    parameters = {parameter.name: (parameter.value, parameter.std_error) for parameter in fit.parameters}
    return _FitJson(**fields, **figures, parameters=parameters)


def _model_json(model: LearnedModel) -> _ModelJson:
    card, training = model.card, model.card.training
    names = ("shape_groups", "trees", "leaves", "loss", "library", "tables", "provenance")
    fields: dict[str, Any] = {name: getattr(training, name) for name in names}

    def errors_of(row: ErrorRow) -> _KindErrorsJson:
        values = ((name, getattr(row, name)) for name in _KindErrorsJson.__struct_fields__)
        figures: dict[str, Any] = {name: np.nan if value is None else value for name, value in values}
        return _KindErrorsJson(**figures)

    return _ModelJson(
        **fields,
        name=card.name,
        schemes=sorted({cell.scheme for cell in card.cells}),
        samples=training.rows,
        errors=list(map(errors_of, card.errors)),
    )


def models_folder(path: Path) -> Path:
    """Return the folder of the models of a hardware file: ``my-device.learned`` for ``my-device.toml``."""
    return path.with_suffix(".learned")


def check_models_folder(path: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` if the models of the hardware file at ``path`` cannot be written."""
    folder = models_folder(path)
    if folder.exists() and not folder.is_dir():
        raise OutputError(
            "exists and is not a folder, but the learned models are written there",
            path=str(folder),
            hint="move it away, or name another `out`",
        )
    check_destination(folder, overwrite=overwrite)


def write_calibration(result: Calibration, path: Path, *, overwrite: bool = False) -> Path:
    """Write the models, if there are any, then the hardware file; each is written completely or not at all.

    Models of an earlier run that the new file does not name stay in the folder and are not used. Raises
    ``OutputError`` if a file exists (unless ``overwrite``) or cannot be written.
    """
    device = replace(result.device, learned_models=())
    models = (*result.models, *result.kept_models)
    if models:
        check_models_folder(path, overwrite=overwrite)
        folder = models_folder(path)

        def fill(temporary: Path) -> None:
            for model in models:
                save_model(model, temporary)

        write_atomically(folder, fill, overwrite=overwrite, directory=True)
        forget_models()
        names = [model.card.name for model in models]  # in the order of their priority
        absolute = folder.resolve()
        device = replace(device, learned_models=tuple(str(absolute / f"{name}.json") for name in names))
    return write_device(device, path, overwrite=overwrite)
