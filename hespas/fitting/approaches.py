"""Kinds of estimators that a calibration can fit: roofline forms and collectives, lines of systolic arrays,
and learned trees.

Finished fits are saved in a folder, so that an interrupted run can continue.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import numpy as np

from hespas._version import __version__
from hespas.estimators.calibrated import Calibrated
from hespas.estimators.collectives import Collectives
from hespas.estimators.interface import CasePrediction, prediction_of_rows
from hespas.estimators.learned.ensemble import FAMILIES
from hespas.estimators.learned.inference import LoadedModels
from hespas.estimators.learned.serialization import (
    LearnedModel,
    cards_in,
    model_bytes,
    read_model,
    shipped_folder,
)
from hespas.estimators.systolic import Systolic
from hespas.estimators.systolic.lines import line_basis
from hespas.files.output import place_immediately, write_atomically
from hespas.fitting.collectives import fit_collectives
from hespas.fitting.device_forms import Progress, fit_device
from hespas.fitting.fits import bare, merged
from hespas.fitting.learned import fit_rows
from hespas.fitting.learned_parts import library_version
from hespas.fitting.own_models import MOST_ROWS, Adaptable, OwnPart, adaptable, adapted, own_parts
from hespas.fitting.recordings import fit_recordings
from hespas.fitting.rows import has_several, known_variants, one_table
from hespas.fitting.systolic import LINE_KINDS, fit_lines, has_columns
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, OutputError, UsageError
from hespas.hardware import Device, Fit, device_to_toml
from hespas.hardware.device_fits import fits_to_toml, read_fits
from hespas.measurements import Measurements
from hespas.operations import Operations

__all__ = [
    "Approach",
    "CalibratedFits",
    "CalibrationRun",
    "FitMemory",
    "FitResult",
    "LearnedTrees",
    "OtherDevices",
    "Progress",
    "SystolicLines",
    "content_key",
    "has_adaptable",
]

_KEY = re.compile("[0-9a-f]{64}")
_Stored = TypeVar("_Stored")
_SUFFIXES = (".toml", ".json", ".npz")


def content_key(
    tables: Iterable[Measurements], devices: Device | Iterable[Device], seed: int, what: str = "calibrated"
) -> str:
    """Return a SHA-256 hash (hexadecimal) of all inputs of a fit: rows, devices, seed, method and version of
    this package.

    ``what`` is a text that describes the estimator and the method.
    """
    digest = hashlib.sha256(f"{__version__} {seed}\n{what}\n".encode())
    for device in [devices] if isinstance(devices, Device) else devices:
        digest.update(device_to_toml(replace(device, learned_models=())).encode())
    for table in tables:
        digest.update(f"{table.name}\n{table.provenance}\n{len(table)}\n".encode())
        ops = table.ops
        for labels in (ops.kind, ops.op, ops.scheme, ops.variant, table.hardware, table.split):
            names = "\x1f".join(labels.names).encode("utf-8", "backslashreplace")
            digest.update(names + np.ascontiguousarray(labels.row).tobytes())
        columns = (*ops.dims.items(), ("flops", ops.flops), ("bytes", ops.bytes_moved))
        for name, column in (*columns, ("transcendentals", ops.transcendentals), ("ns", table.duration_ns)):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class FitMemory:
    """Folder in which a calibration saves its finished fits, so that an interrupted run can be resumed. Files
    of fits are named by :func:`content_key`. An unreadable file is treated as missing.
    """

    folder: Path

    @classmethod
    def beside(cls, destination: Path) -> FitMemory:
        """Return the folder of saved fits for a calibration that will be written to ``destination``."""
        return cls(destination.with_name(f".{destination.name}.calibrating"))

    def recall(self, key: str, fitted: str) -> tuple[Fit, ...] | None:
        """Return the saved fits of an interrupted run, with the date of the fit replaced by ``fitted``; None
        if there are none.
        """
        fits = self._read(f"{key}.toml", read_fits)
        return None if fits is None else tuple(replace(fit, fitted=fitted) for fit in fits)

    def recall_model(self, key: str) -> LearnedModel | None:
        """Return the saved learned model of an interrupted run; None without one."""
        return self._read(f"{key}.json", read_model)

    def _read(self, name: str, read: Callable[[Path], _Stored]) -> _Stored | None:
        path = self.folder / name
        try:
            return read(path) if path.is_file() else None
        except FormatError:
            return None

    def keep_model(self, key: str, model: LearnedModel) -> None:
        """Save a learned model. The card is written last, because its presence marks a complete model. Raises
        ``OutputError``.
        """
        card, trees = model_bytes(model)
        self._write(f"{key}.npz", trees)
        self._write(f"{key}.json", card)

    def keep(self, key: str, name: str, fits: Sequence[Fit]) -> None:
        """Save ``fits`` of the device ``name`` under a key. Raises ``OutputError``."""
        self._write(f"{key}.toml", fits_to_toml(name, fits).encode())

    def _write(self, name: str, content: bytes) -> None:
        def fill(temporary: Path) -> None:
            temporary.write_bytes(content)

        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"finished fits cannot be saved: {error.strerror or error}",
                path=str(self.folder),
                hint="remove the file at this path, or name another `out`",
            ) from error
        with place_immediately():
            write_atomically(self.folder / name, fill, overwrite=True, directory=False)

    def forget(self) -> None:
        """Remove the saved fits of a finished run. Other files, and the targets of links, are not removed."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return
        for path in self.folder.iterdir():
            if path.suffix in _SUFFIXES and _KEY.fullmatch(path.stem):
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):
            self.folder.rmdir()


@dataclass(frozen=True, slots=True, eq=False)
class FitResult:
    """Result of one approach: the fits and learned models that it made from some rows."""

    fits: tuple[Fit, ...] = ()
    models: tuple[LearnedModel, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """Settings that all fits of a calibration share; ``date`` (ISO) is written into the fits."""

    seed: int
    date: str
    memory: FitMemory | None = None
    progress: Progress | None = None

    def remembered(self, key: str, name: str, fit: Callable[[], Sequence[Fit]]) -> FitResult:
        """Return the fits that an interrupted run saved for the device ``name``. If there are none, call
        ``fit`` and save its result.
        """
        fits = self.memory.recall(key, self.date) if self.memory else None
        if fits is None:
            fits = tuple(fit())
            if self.memory:
                self.memory.keep(key, name, fits)
        return FitResult(fits)

    def progress_of(self, purpose: str) -> Progress:
        """Return a progress callback that adds ``purpose`` to the names of the reported steps."""

        def report(done: int, total: int, name: str) -> None:
            if self.progress:
                self.progress(done, total, f"{purpose}: {name}")

        return report


@dataclass(frozen=True, slots=True, eq=False)
class OtherDevices:
    """Measured rows and hardware files of devices other than the calibrated one, by their names in the
    tables.
    """

    rows: Mapping[str, Sequence[Measurements]]
    devices: Mapping[str, Device]


class Approach(Protocol):
    """Interface of an estimator that a calibration can fit; ``name`` is its name in the registry."""

    name: ClassVar[str]

    def check(self, tables: Sequence[Measurements], device: Device, diagnostics: Diagnostics) -> None:
        """Raise ``UsageError`` or ``MissingExtraError`` if no fit is possible at all; warn about rows that
        will have no fit.
        """
        ...

    def fault(self, test: str, tables: Sequence[Measurements], others: OtherDevices) -> str:
        """Return the reason why errors cannot be tested by ``test`` (shape, op, recording, hardware); empty
        if they can.
        """
        ...

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> FitResult:
        """Fit some rows of a device. The result is empty if there are too few rows."""
        ...

    def predict(
        self, ops: Operations, device: Device, result: FitResult, *, with_earlier: bool = False
    ) -> CasePrediction:
        """Predict operations by the new fits only. If ``with_earlier``, use the device's earlier fits as
        well.
        """
        ...

    def carried(
        self, tables: Sequence[Measurements], others: OtherDevices, device: Device
    ) -> list[CasePrediction]:
        """Predict the rows of each table as if ``device`` had no measurements: from fits of other devices and
        the data sheet of this device.
        """
        ...


@dataclass(frozen=True, slots=True)
class CalibratedFits:
    """Approach for the estimator ``calibrated``: roofline forms for every class of operations, and lines of
    collectives.
    """

    name: ClassVar[str] = "calibrated"
    run: CalibrationRun

    def check(self, tables: Sequence[Measurements], device: Device, diagnostics: Diagnostics) -> None:
        """Do nothing: which fits are possible is only known after fitting."""

    def fault(self, test: str, tables: Sequence[Measurements], others: OtherDevices) -> str:
        """Return the reason against a test by operation if no kind has several operations; else empty."""
        if test == "op" and not any(has_several(table, table.ops.kind.used()) for table in tables):
            return "no kind has several operations"
        return ""

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> FitResult:
        """Fit forms and collectives, or read the saved fits of an interrupted run."""
        run = self.run
        recordings = [table for table in tables if table.recorded]
        sweeps = [table for table in tables if not table.recorded]
        key = content_key(tables, device if recordings else bare(device), run.seed)
        progress = run.progress_of(purpose)

        def fits() -> tuple[Fit, ...]:
            fitted: tuple[Fit, ...] = ()
            if sweeps:
                fitted = fit_device(sweeps, device, seed=run.seed, fitted=run.date, progress=progress)
            if recordings:
                fitted_device = replace(device, own_fits=merged(fitted, device.fits), fits_of="")
                recorded = fit_recordings(recordings, fitted_device, seed=run.seed, fitted=run.date)
                keys = {fit.key for fit in recorded}
                fitted = (*recorded, *(fit for fit in fitted if fit.key not in keys))
            collectives = fit_collectives(sweeps, device, seed=run.seed, fitted=run.date, progress=progress)
            return (*fitted, *collectives)

        return run.remembered(key, device.name, fits)

    def predict(
        self, ops: Operations, device: Device, result: FitResult, *, with_earlier: bool = False
    ) -> CasePrediction:
        """Predict operations by the fitted forms, and collectives by their fitted lines."""
        fits = merged(result.fits, device.fits) if with_earlier else result.fits
        fitted = replace(device, own_fits=fits, fits_of="")
        prediction = prediction_of_rows(Calibrated(), ops, fitted, Diagnostics())
        rows = ops.kind.where("collective")
        if not len(rows):
            return prediction
        of_collectives = prediction_of_rows(Collectives(), ops.take(rows), fitted, Diagnostics())
        columns = [prediction.duration_ns.copy(), prediction.low_ns.copy(), prediction.high_ns.copy()]
        sources = (of_collectives.duration_ns, of_collectives.low_ns, of_collectives.high_ns)
        for column, source in zip(columns, sources, strict=True):
            column[rows] = source
        return CasePrediction(
            estimator=self.name, duration_ns=columns[0], low_ns=columns[1], high_ns=columns[2]
        )

    def carried(
        self, tables: Sequence[Measurements], others: OtherDevices, device: Device
    ) -> list[CasePrediction]:
        """Predict the rows with the fits of each other device. Return the median of these predictions, with
        the widest of their intervals.
        """
        results = [self.fit(rows, others.devices[name], f"on {name}") for name, rows in others.rows.items()]
        if not results:
            raise UsageError(
                "no table has rows of another device, from which this device could be predicted",
                hint="add a table of another device",
            )
        combined: list[CasePrediction] = []
        for table in tables:
            predictions = [
                self.predict(known_variants(table.ops, {fit.variant for fit in result.fits}), device, result)
                for result in results
            ]
            durations = np.stack([prediction.duration_ns for prediction in predictions])
            covered = ~np.isnan(durations).all(axis=0)
            median, low, high = (np.full(durations.shape[1], np.nan) for _ in range(3))
            with np.errstate(invalid="ignore"):
                median[covered] = np.exp(np.nanmedian(np.log(durations[:, covered]), axis=0))
                low[covered] = np.fmin.reduce([prediction.low_ns[covered] for prediction in predictions])
                high[covered] = np.fmax.reduce([prediction.high_ns[covered] for prediction in predictions])
            combined.append(
                CasePrediction(estimator="calibrated", duration_ns=median, low_ns=low, high_ns=high)
            )
        return combined


@dataclass(frozen=True, slots=True)
class SystolicLines:
    """Approach for the estimator ``systolic``: lines (linear functions) from cycles and elements to time, for
    a device with a systolic array.
    """

    name: ClassVar[str] = "systolic"
    run: CalibrationRun

    def check(self, tables: Sequence[Measurements], device: Device, diagnostics: Diagnostics) -> None:
        """Raise an error for a device without a systolic array, and for tables without operations that lines
        cover.
        """
        if device.systolic is None:
            raise UsageError(
                f"`estimator=systolic`: {device.name} has no systolic array",
                hint="leave it out, or describe the array in your own hardware file",
            )
        rows = [table.ops.take(table.ops.kind.where(*LINE_KINDS)) for table in tables]
        unknown = sum(int((~has_columns(ops)).sum()) for ops in rows)
        if not sum(map(len, rows)) - unknown:
            raise UsageError(
                f"`estimator=systolic`: no row of {device.name} is of {', '.join(LINE_KINDS)} "
                "with sizes above 0 and a known number format",
                hint="leave it out, or give a table of these",
            )
        text = "rows without sizes above 0 or without a known number format are not fitted by lines"
        diagnostics.warning("calibrate.unknown-sizes", device.name, text, count=unknown)

    def fault(self, test: str, tables: Sequence[Measurements], others: OtherDevices) -> str:
        """Return the reason against tests by device: lines do not transfer to another chip. Empty for other
        tests.
        """
        if test == "hardware":
            return "`estimator=systolic` has lines of one device, which do not transfer to another"
        if test == "op" and not any(has_several(table, LINE_KINDS) for table in tables):
            return f"`estimator=systolic`: {', '.join(LINE_KINDS)} have one operation each"
        return ""

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> FitResult:
        """Fit the lines of every class of operations with enough rows."""
        run = self.run
        key = content_key(tables, bare(device), run.seed, "systolic")

        def fits() -> tuple[Fit, ...]:
            tables_of_kinds = (
                one_table([table.take(table.ops.kind.where(kind)) for table in tables]) for kind in LINE_KINDS
            )
            rows = [table for table in tables_of_kinds if table is not None]
            run.progress_of(purpose)(0, 1, "lines")
            return fit_lines(rows, device, seed=run.seed, fitted=run.date)

        return run.remembered(key, device.name, fits)

    def predict(
        self, ops: Operations, device: Device, result: FitResult, *, with_earlier: bool = False
    ) -> CasePrediction:
        """Predict the operations that a fitted line covers. Others get no time, because cycles divided by a
        clock are not a fit.
        """
        lines = merged(result.fits, device.own_lines) if with_earlier else result.fits
        fitted = replace(device, own_lines=lines)
        prediction = prediction_of_rows(Systolic(shipped=False), ops, fitted, Diagnostics())
        duration = prediction.duration_ns.copy()
        for labels, rows in ops.classes():
            if line_basis(fitted, *labels, shipped=False) is None:
                duration[rows] = np.nan
        return replace(prediction, duration_ns=duration)

    def carried(
        self, tables: Sequence[Measurements], others: OtherDevices, device: Device
    ) -> list[CasePrediction]:
        """Raise ``UsageError``. :meth:`fault` refuses this test."""
        raise UsageError(self.fault("hardware", tables, others))


@dataclass(frozen=True, slots=True)
class LearnedTrees:
    """Approach for the estimator ``learned``: models of boosted trees, one for each kind of operation and
    number format.
    """

    name: ClassVar[str] = "learned"
    run: CalibrationRun

    def check(self, tables: Sequence[Measurements], device: Device, diagnostics: Diagnostics) -> None:
        """Raise an error if the tables have no kind and number format that can be fitted; warn about rows
        without a model.
        """
        library_version()
        parts = list(own_parts(tables, {device.name: device}, seed=self.run.seed))
        adaptables = [_adaptable_rows(part, device, self.run.seed) for part in parts]
        faults: list[str] = []
        for part, rows in zip(parts, adaptables, strict=True):
            if part.fault and rows is None:
                faults.append(part.fault)
            text = f"{part.part.name}: rows that no model of reference devices covers are not fitted"
            diagnostics.warning(
                "calibrate.unrelated-rows", device.name, text, count=rows.unknown if rows else 0
            )
        if len(faults) == len(parts):
            kinds = ", ".join(FAMILIES)
            reasons = "; ".join(faults) or f"no row of {device.name} is of {kinds} in a known number format"
            raise UsageError(
                f"`estimator=learned`: {reasons}", hint="measure more sizes, or fit `estimator=calibrated`"
            )
        text = f"no learned model of {'; '.join(faults)}"
        diagnostics.warning("calibrate.too-few-rows", device.name, text, count=len(faults))
        others = sum(map(len, tables)) - sum(len(part.rows.ratio) for part in parts)
        text = "rows of other kinds, or with unknown number formats, sizes or peaks, are not fitted"
        diagnostics.warning("calibrate.not-learned", device.name, text, count=others)

    def fault(self, test: str, tables: Sequence[Measurements], others: OtherDevices) -> str:
        """Return the reason why a test cannot be made, or an empty text. The test by operation needs a kind
        with several operations. The test by device needs other devices of at least two architectures.
        """
        if test == "op" and not any(has_several(table, tuple(FAMILIES)) for table in tables):
            return "`estimator=learned`: its kinds have one operation each"
        architectures = {device.architecture for device in others.devices.values()}
        if test == "hardware" and len(architectures) < 2:
            listed = ", ".join(others.devices)
            return f"`estimator=learned` needs other devices of at least two architectures, but has {listed}"
        return ""

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> FitResult:
        """Fit the models of all parts (kinds and number formats) with enough rows."""
        return self._fit_parts(tables, {device.name: device}, purpose)

    def _fit_parts(
        self, tables: Sequence[Measurements], devices: Mapping[str, Device], purpose: str
    ) -> FitResult:
        parts = list(own_parts(tables, devices, seed=self.run.seed))
        progress = self.run.progress_of(purpose)
        models: list[LearnedModel] = []
        for number, part in enumerate(parts):
            progress(number, len(parts), part.part.name)
            # An interrupted run may have fitted the part already.
            memory, seed = self.run.memory, self.run.seed
            what = f"{library_version()} {part.part!r}"
            device = next(iter(devices.values()))
            rows = _adaptable_rows(part, device, seed) if len(devices) == 1 else None
            if rows is not None:
                what += f" adapted {hashlib.sha256(rows.path.read_bytes()).hexdigest()}"
            key = content_key([part.rows.measured], map(bare, devices.values()), seed, what)
            if rows is None and part.fault:
                continue
            model = memory.recall_model(key) if memory else None
            if model is None:
                if rows is None:
                    model = fit_rows(part.part, part.rows, seed=seed, own=True)
                else:
                    model = adapted(rows, device, seed=seed)
                if memory:
                    memory.keep_model(key, model)
            models.append(model)
        return FitResult(models=tuple(models))

    def predict(
        self, ops: Operations, device: Device, result: FitResult, *, with_earlier: bool = False
    ) -> CasePrediction:
        """Predict operations by the new models only."""
        return prediction_of_rows(LoadedModels(result.models), ops, device, Diagnostics())

    def carried(
        self, tables: Sequence[Measurements], others: OtherDevices, device: Device
    ) -> list[CasePrediction]:
        """Predict the rows by models fitted to all other devices together, which use the data sheets as
        inputs.
        """
        rows = [table for of_device in others.rows.values() for table in of_device]
        result = self._fit_parts(rows, others.devices, "on other devices")
        variants = {cell.variant for model in result.models for cell in model.card.cells}
        return [self.predict(known_variants(table.ops, variants), device, result) for table in tables]


def has_adaptable(tables: Sequence[Measurements], device: Device, seed: int) -> bool:
    """Return True if a learned model of reference devices can be adapted to the rows of ``device``."""
    parts = own_parts(tables, {device.name: device}, seed=seed)
    return any(_adaptable_rows(part, device, seed) is not None for part in parts)


def _adaptable_rows(own: OwnPart, device: Device, seed: int) -> Adaptable | None:
    """Return the rows to which a model of reference devices can be adapted; None without such a model.

    The model must cover all rows, unless no other model can be fitted to them.
    """
    if len(own.rows.measured) > MOST_ROWS:
        return None
    rows = adaptable(own.part, own.rows, device, cards_in(shipped_folder()), seed=seed)
    return None if rows is None or (rows.unknown and not own.fault) else rows
