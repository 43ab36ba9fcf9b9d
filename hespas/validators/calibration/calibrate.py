"""A device's file from what was measured on it: the function behind ``hespas-validate calibrate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Final, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import replace as with_fields

from hespas._version import __version__
from hespas.estimators.learned.serialization import Cell, LearnedModel, forget_models, load_model, save_model
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.output import check_destination, write_atomically
from hespas.graph import Diagnostics
from hespas.graph.errors import OutputError, UsageError
from hespas.hardware import Device, Fit, named_device, write_device
from hespas.measurements import Measurements
from hespas.operations import Labels
from hespas.validators.accuracy.document import DiagnosticJson, SummaryJson, diagnostics_json, summary_json
from hespas.validators.accuracy.statistics import one_thread
from hespas.validators.accuracy.tables import rows_of_split, rows_on
from hespas.validators.calibration.approaches import (
    Approach,
    CalibratedFits,
    FitMemory,
    Found,
    LearnedTrees,
    Others,
    Progress,
    Run,
    SystolicLines,
    has_adaptable,
    merged,
)
from hespas.validators.calibration.before import with_before
from hespas.validators.calibration.fit_device import FITTED_SPLITS, is_possible, may_be_fitted, rows_to_fit
from hespas.validators.calibration.held_out import (
    TESTS,
    HeldOut,
    Tested,
    compared,
    device_left_out,
    has_sizes_to_leave_out,
    operations_left_out,
    recordings_left_out,
    sizes_left_out,
)
from hespas.validators.calibration.own_models import unused_name

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
"""The split that is never fitted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableUse:
    """How many of the rows of a table on the device were fitted on."""

    name: str
    provenance: str
    rows: Annotated[Count, Meta(description="of the device")]
    fitted: Annotated[Count, Meta(description="those that entered fits")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """``device`` holds the new ``fits``, and those it had of other classes. ``models`` are the new learned
    models, ``kept_models`` those the device had beside them; they are in no file yet: see
    :func:`~hespas.validators.calibration.calibrate.write_calibration`.
    """

    device: Device
    estimators: tuple[str, ...]
    fits: tuple[Fit, ...]
    models: tuple[LearnedModel, ...]
    kept_models: tuple[LearnedModel, ...]
    held_out: tuple[HeldOut, ...]
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
    """Fit ``estimators`` on every class of operations that was measured on ``device``, and test the fits on
    what they have not seen (``tests``: names of :data:`TESTS`; None: by shape, where there are sizes enough).

    Only rows of ``split`` are fitted on (empty: all but those kept for testing). ``fitted`` is the date
    written into the file (ISO; empty: today); all else depends on rows, device and ``seed`` alone. ``memory``
    keeps what is done, so that an interrupted run goes on. Raises ``UsageError`` where nothing can be fitted
    or a test has nothing to leave out, ``MissingExtraError`` where trees cannot be grown here.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    run = Run(seed=seed, date=_date(fitted), memory=memory, progress=progress)
    approaches = _approaches(estimators, run)
    usable = [_usable(table, split) for table in tables]
    mine = _mine(tables, usable, device, split)
    for path in device.learned_models:  # a damaged one is told before anything is fitted
        load_model(Path(path))
    for each in approaches:
        each.check(mine, device, found)
    if "learned" not in estimators and has_adaptable(mine, device, seed):
        text = "models of related devices can be adapted to these rows: fit the estimator `learned`, too"
        found.info("calibrate.relatives", device.name, text)
    testing = _Tests(mine, _other_devices(usable, device), device, seed, approaches)
    chosen = testing.chosen(tests, found)
    founds = {each.name: _something(each, mine, device, memory) for each in approaches}
    founds = with_before(founds, mine, device, seed, found)
    held_out = tuple(compared(by, testing.tested(by), device, inputs, tuple(founds)) for by in chosen)
    _tell_silent(held_out, device, found)
    models = tuple(model for each in founds.values() for model in each.models)
    return Calibration(
        device=_fitted_device(device, founds),
        estimators=tuple(founds),
        fits=tuple(fit for each in founds.values() for fit in each.fits),
        models=models,
        kept_models=_kept_models(device, models),
        held_out=held_out,
        tables=tuple(_uses(tables, usable, device, found)),
        seed=seed,
        fitted=run.date,
        diagnostics=found,
    )


def _approaches(names: Sequence[str], run: Run) -> list[Approach]:
    """Each estimator once, in the order of :data:`ESTIMATORS`."""
    known: Mapping[str, Approach] = {
        each.name: each for each in (CalibratedFits(run), SystolicLines(run), LearnedTrees(run))
    }
    for name in names:
        if name not in known:
            raise UsageError(f"estimator {name!r} cannot be fitted", hint=f"one of {', '.join(ESTIMATORS)}")
    return [known[name] for name in ESTIMATORS if name in names]


def _something(
    approach: Approach, tables: Sequence[Measurements], device: Device, memory: FitMemory | None
) -> Found:
    """What a fit gives. Raises ``UsageError`` where that is nothing."""
    found = approach.fit(tables, device, approach.name)
    if found.fits or found.models:
        return found
    if memory:  # nothing in it is worth going on from
        memory.forget()
    raise UsageError(
        f"no class of operations on {device.name} has rows enough to fit",
        hint="12 of one kind, number format and variant at least, with known sizes and a published peak",
    )


def _fitted_device(device: Device, founds: Mapping[str, Found]) -> Device:
    """The device with all new fits and lines; what was not fitted stays."""
    if "calibrated" in founds:
        device = replace(device, own_fits=merged(founds["calibrated"].fits, device.fits), fits_of="")
    if "systolic" in founds:
        device = replace(device, own_lines=merged(founds["systolic"].fits, device.own_lines))
    return device


def _kept_models(device: Device, new: Sequence[LearnedModel]) -> tuple[LearnedModel, ...]:
    """Models that the device's file names already, where they cover anything that no new one covers.

    New models come before them; one of the same name gets another.
    """
    heard = {_labels(cell) for model in new for cell in model.card.cells}
    names = {model.card.name for model in new}
    kept: list[LearnedModel] = []
    for path in device.learned_models:
        model = load_model(Path(path))
        if {_labels(cell) for cell in model.card.cells} <= heard:
            continue
        name = unused_name(model.card.name, names)
        names.add(name)
        kept.append(replace(model, card=with_fields(model.card, name=name)))
    return tuple(kept)


def _labels(cell: Cell) -> tuple[str, str, str, str]:
    return cell.kind, cell.op, cell.scheme, cell.variant


def _tell_silent(held_out: Sequence[HeldOut], device: Device, found: Diagnostics) -> None:
    """Say which estimator had too few rows left to be tested."""
    for test in held_out:
        heard = dict.fromkeys(test.accuracy.estimators, 0)
        for row in test.accuracy.summary:
            heard[row.estimator] = heard.get(row.estimator, 0) + row.errors.n
        for name in (name for name, count in heard.items() if not count):
            text = f"{name} says nothing of what is left out by {test.by}: its fits are untested"
            found.warning("calibrate.untested", device.name, text)


def _date(text: str) -> str:
    if not text:
        return datetime.now(UTC).date().isoformat()
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise UsageError(f"{text!r} is no date", hint="write 2026-01-31") from error


def _usable(table: Measurements, split: str) -> Measurements:
    """The rows that may be fitted on. Those of a split the user names are as good as rows without any."""
    if not split:
        return may_be_fitted(table)
    if split == KEPT_SPLIT:
        raise UsageError(
            f"rows of split {KEPT_SPLIT!r} are kept for testing, never fitted on",
            hint=f"--split {FITTED_SPLITS[0]}, then hespas-validate accuracy --split {KEPT_SPLIT}",
        )
    part = table.take(rows_of_split(table, split))
    return replace(part, split=Labels.constant("", len(part)))


def _mine(
    tables: Sequence[Measurements], usable: Sequence[Measurements], device: Device, split: str
) -> list[Measurements]:
    """The rows on the device that may be fitted on. Raises ``UsageError`` where none is."""
    mine = [table.take(rows_on(table, device)) for table in usable]
    mine = [replace(each, hardware=Labels.constant(device.name, len(each))) for each in mine if len(each)]
    if not mine:
        raise _nothing(tables, usable, device, split)
    possible = [some for each in mine if len(some := rows_to_fit(each, device))]
    if not possible:
        raise UsageError(
            f"every row is faster than {device.name} can be by its data sheet",
            hint="check the unit of the times and the device",
        )
    return possible


def _nothing(
    tables: Sequence[Measurements], usable: Sequence[Measurements], device: Device, split: str
) -> UsageError:
    """Why no row is left."""
    names = ", ".join(table.name for table in tables)
    if any(len(rows_on(table, device)) for table in tables) and not split:
        splits = sorted({name for table in tables for name in table.split.used()} - {"", KEPT_SPLIT})
        other = f"name the split to fit on: {', '.join(splits)}"
        return UsageError(
            f"{names} has no row of {device.name} that may be fitted on",
            hint=other if splits else f"all are of split {KEPT_SPLIT}, kept for testing: give others",
        )
    listed = sorted({name for table in usable for name in table.hardware.used() if name})
    return UsageError(
        f"no row of {names} is of {device.name}", hint=f"devices there: {', '.join(listed) or 'none'}"
    )


def _uses(
    tables: Sequence[Measurements], usable: Sequence[Measurements], device: Device, found: Diagnostics
) -> list[TableUse]:
    uses: list[TableUse] = []
    for table, part in zip(tables, usable, strict=True):
        tell = found.info if table.recorded else found.warning  # other work of a recording is no loss
        lost = sum(each.count for each in table.left_out)
        tell("calibrate.left-out-rows", table.name, f"rows left out: {table.told_left_out()}", count=lost)
        impossible = int((~is_possible(part.take(rows_on(part, device)), device)).sum())
        text = f"rows faster than {device.name} can be by its data sheet: not fitted on"
        found.warning("calibrate.impossible-rows", table.name, text, count=impossible)
        rows = len(rows_on(table, device))
        entered = len(rows_on(part, device))
        found.info(
            "calibrate.kept-rows", table.name, "rows kept for testing, never fitted on", count=rows - entered
        )
        uses.append(
            TableUse(name=table.name, provenance=table.provenance, rows=rows, fitted=entered - impossible)
        )
    return uses


@dataclass(frozen=True, slots=True, eq=False)
class _Tests:
    """What the tests need: rows on the device, rows on all others, and what is fitted."""

    mine: Sequence[Measurements]
    others: Others
    device: Device
    seed: int
    approaches: Sequence[Approach]

    def tested(self, by: str) -> tuple[list[Tested], int]:
        """Rows with what fits that have not seen them say, and how many rows those saw."""
        if by == "shape":
            return sizes_left_out(self.mine, self.device, self.seed, self.approaches)
        if by == "op":
            return operations_left_out(self.mine, self.device, self.approaches)
        if by == "recording":
            return recordings_left_out(self.mine, self.device, self.approaches)
        return device_left_out(self.mine, self.others, self.device, self.approaches)

    def chosen(self, tests: Sequence[str] | None, found: Diagnostics) -> list[str]:
        """The tests asked for; None: by shape, where there are sizes enough. Raises ``UsageError`` for one
        that has nothing to leave out, before anything is fitted.
        """
        possible = {
            "shape": has_sizes_to_leave_out(self.mine),
            "op": True,
            "recording": sum(table.recorded for table in self.mine) > 1,
            "hardware": bool(self.others.rows),
        }
        if tests is None and not possible["shape"]:
            found.warning("calibrate.untested", self.device.name, f"the fits are untested: {_WHY['shape']}")
            return []
        chosen = list(dict.fromkeys(("shape",) if tests is None else tests))
        for by in chosen:
            if by not in TESTS:
                raise UsageError(f"no test {by!r}", hint=f"one of {', '.join(TESTS)}")
            faults = [each.fault(by, self.mine, self.others) for each in self.approaches]
            fault = next(filter(None, faults), "") if possible[by] else _WHY[by]
            if fault:
                raise UsageError(f"`test_by={by}`: {fault}", hint="leave it out, or give more tables")
        return chosen


_WHY: Mapping[str, str] = {
    "shape": "too few sizes to leave some out",
    "recording": "there is one recording at most",
    "hardware": "no other device with a hardware file in the tables",
}


def _other_devices(tables: Sequence[Measurements], device: Device) -> Others:
    """Rows and files of the devices beside ``device``; those without a file are left out."""
    rows: dict[str, list[Measurements]] = {}
    devices: dict[str, Device] = {}
    for table in tables:
        mine = set(np.unique(table.hardware.row[rows_on(table, device)]).tolist())
        for number, name in enumerate(table.hardware.names):
            part = table.on(name) if number not in mine and name else None
            if part is None or not len(part):
                continue
            try:
                devices.setdefault(name, named_device(name))
            except UsageError:
                continue
            rows.setdefault(name, []).append(part)
    return Others(rows, devices)


SCHEMA_ID: Final = "hespas.calibrate/1"
"""What a document of this version says in ``schema``."""

_Estimator = Literal["calibrated", "systolic", "learned"]
_Test = Literal["shape", "op", "recording", "hardware"]
_Pair = tuple[Figure, Figure]
_Positive = Annotated[int, Meta(ge=1)]


class _Fit(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    op: str
    scheme: str
    variant: str
    default: bool
    form: str
    samples: Count
    parameters: Annotated[dict[str, _Pair], Meta(description="value and standard error by name")]
    n: Annotated[Count, Meta(description="rows outside the fits that the errors are of")]
    mape: Figure
    median_ape: Figure
    p90_ape: Figure
    bias: Figure
    before_mape: Annotated[Figure, Meta(description="of the package's learned models before")]
    table: str
    provenance: str


class _KindErrors(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    scheme: str
    n: Count
    mape: Figure
    median_ape: Figure
    p90_ape: Figure
    bias: Figure
    before_mape: Annotated[Figure, Meta(description="of the package's learned models before")]


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    schemes: list[str]
    samples: _Positive
    shape_groups: Annotated[_Positive, Meta(description="layers or sizes that are left out together")]
    trees: Count
    leaves: Count
    loss: str
    library: str
    tables: tuple[str, ...]
    provenance: tuple[str, ...]
    errors: list[_KindErrors]


class _HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    by: _Test
    what: str
    rows: Count
    fitted_rows: Count
    summary: list[SummaryJson]


class CalibrationDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What hespas-validate calibrate --json writes: null is unknown, errors are relative to the
    measurement.
    """

    schema: Literal["hespas.calibrate/1"] = SCHEMA_ID
    hespas_version: str = __version__
    inputs: tuple[str, ...]
    hardware: str
    estimators: Annotated[tuple[_Estimator, ...], Meta(description="those fitted")]
    seed: Count
    fitted: Annotated[str, Meta(description="date, ISO 8601")]
    tables: tuple[TableUse, ...]
    fits: list[_Fit]
    models: Annotated[
        list[_Model], Meta(description="learned models; errors are of rows left out of the fit in turn")
    ]
    held_out: list[_HeldOut]
    diagnostics: list[DiagnosticJson]


def calibration_json(done: Calibration, inputs: Sequence[str]) -> bytes:
    """The document as indented UTF-8 JSON that ends in a newline; unknown figures are null."""
    document = CalibrationDocument(
        inputs=tuple(inputs),
        hardware=done.device.name,
        estimators=cast("tuple[_Estimator, ...]", done.estimators),
        seed=done.seed,
        fitted=done.fitted,
        tables=done.tables,
        fits=list(map(_fit, done.fits)),
        models=list(map(_model, done.models)),
        held_out=[
            _HeldOut(
                by=cast("_Test", test.by),
                what=TESTS[test.by],
                rows=test.count,
                fitted_rows=test.fitted,
                summary=[summary_json(row) for row in test.accuracy.summary],
            )
            for test in done.held_out
        ],
        diagnostics=diagnostics_json(done.diagnostics),
    )
    return document_bytes(document)


def _fit(fit: Fit) -> _Fit:
    return _Fit(
        kind=fit.kind,
        op=fit.op,
        scheme=fit.scheme,
        variant=fit.variant,
        default=fit.default,
        form=fit.form,
        samples=fit.samples,
        parameters={each.name: (each.value, each.std_error) for each in fit.parameters},
        n=max(fit.error.n, 0),
        mape=fit.error.mape,
        median_ape=fit.error.median_ape,
        p90_ape=fit.error.p90_ape,
        bias=fit.error.bias,
        before_mape=fit.error.before_mape,
        table=fit.table,
        provenance=fit.provenance,
    )


def _model(model: LearnedModel) -> _Model:
    card, training = model.card, model.card.training
    return _Model(
        name=card.name,
        schemes=sorted({cell.scheme for cell in card.cells}),
        samples=training.rows,
        shape_groups=training.shape_groups,
        trees=training.trees,
        leaves=training.leaves,
        loss=training.loss,
        library=training.library,
        tables=training.tables,
        provenance=training.provenance,
        errors=[
            _KindErrors(
                kind=row.kind,
                scheme=row.scheme,
                n=row.n,
                mape=_known(row.mape),
                median_ape=_known(row.median_ape),
                p90_ape=_known(row.p90_ape),
                bias=_known(row.bias),
                before_mape=_known(row.before_mape),
            )
            for row in card.errors
        ],
    )


def _known(figure: float | None) -> float:
    return np.nan if figure is None else figure


def models_folder(path: Path) -> Path:
    """Where the models that a hardware file names go: ``my-device.learned`` beside ``my-device.toml``."""
    return path.with_suffix(".learned")


def check_models_folder(path: Path, *, overwrite: bool) -> None:
    """Raise ``OutputError`` where the models of the hardware file at ``path`` cannot be written."""
    folder = models_folder(path)
    if folder.exists() and not folder.is_dir():
        raise OutputError(
            "exists and is no folder: the learned models go there",
            path=str(folder),
            hint="move it away, or name another `out`",
        )
    check_destination(folder, overwrite=overwrite)


def write_calibration(done: Calibration, path: Path, *, overwrite: bool = False) -> Path:
    """Write the models, if there are any, then the hardware file: each at once or not at all. Raises
    ``OutputError`` where one exists (unless ``overwrite``) or cannot be written.

    Models of an earlier run that the new file does not name stay in the folder, and are asked by nobody.
    """
    device = replace(done.device, learned_models=())
    models = (*done.models, *done.kept_models)
    if models:
        check_models_folder(path, overwrite=overwrite)
        folder = models_folder(path)

        def fill(temporary: Path) -> None:
            for model in models:
                save_model(model, temporary)

        write_atomically(folder, fill, overwrite=overwrite, directory=True)
        forget_models()
        place = folder.resolve()
        names = [model.card.name for model in models]  # asked in this order
        device = replace(device, learned_models=tuple(str(place / f"{name}.json") for name in names))
    return write_device(device, path, overwrite=overwrite)
