"""What can be fitted, behind one face: roofline forms and collectives, lines of systolic arrays, trees; and
what an interrupted run has fitted so far.
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
from hespas.estimators.learned.ensemble import FAMILIES
from hespas.estimators.learned.inference import ModelsAtHand
from hespas.estimators.learned.serialization import (
    LearnedModel,
    cards_in,
    model_bytes,
    read_model,
    shipped_folder,
)
from hespas.estimators.systolic import Systolic
from hespas.estimators.systolic.lines import basis_of
from hespas.files.output import placed_at_once, write_atomically
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, OutputError, UsageError
from hespas.hardware import Device, Fit, device_to_toml
from hespas.hardware.device_fits import fits_to_toml, read_fits
from hespas.measurements import Measurements
from hespas.operations import Labels, Operations
from hespas.validators.accuracy.cases import CasePrediction
from hespas.validators.accuracy.tables import prediction_of_rows
from hespas.validators.calibration.adapted import MOST_ROWS, Adaptable, adaptable, adapted
from hespas.validators.calibration.collectives import fit_collectives
from hespas.validators.calibration.fit_device import Progress, fit_device
from hespas.validators.calibration.learned import fit_rows
from hespas.validators.calibration.learned_parts import family_name, library_version
from hespas.validators.calibration.own_models import OwnPart, one_table, own_parts
from hespas.validators.calibration.recordings import fit_recordings
from hespas.validators.calibration.systolic import LINE_KINDS, fit_lines, has_columns

__all__ = [
    "Approach",
    "CalibratedFits",
    "FitMemory",
    "Found",
    "LearnedTrees",
    "Others",
    "Progress",
    "Run",
    "SystolicLines",
    "bare",
    "content_key",
    "has_adaptable",
    "has_several",
    "known_variants",
    "merged",
]

_KEY = re.compile("[0-9a-f]{64}")
_Kept = TypeVar("_Kept")
_SUFFIXES = (".toml", ".json", ".npz")


def content_key(
    tables: Iterable[Measurements], devices: Device | Iterable[Device], seed: int, what: str = "calibrated"
) -> str:
    """A SHA-256 of all that decides what is fitted: rows, devices, seed, what is fitted on them (a text that
    says how, too), and this version. Hexadecimal.
    """
    digest = hashlib.sha256(f"{__version__} {seed}\n{what}\n".encode())
    for device in [devices] if isinstance(devices, Device) else devices:
        digest.update(device_to_toml(replace(device, learned_models=())).encode())
    for table in tables:
        digest.update(f"{table.name}\n{table.provenance}\n{len(table)}\n".encode())
        ops = table.ops
        for labels in (ops.kind, ops.op, ops.scheme, ops.variant, table.hardware, table.split):
            digest.update(_label_bytes(labels))
        columns = (*ops.dims.items(), ("flops", ops.flops), ("bytes", ops.bytes_moved))
        for name, column in (*columns, ("transcendentals", ops.transcendentals), ("ns", table.duration_ns)):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def _label_bytes(labels: Labels) -> bytes:
    names = "\x1f".join(labels.names).encode("utf-8", "backslashreplace")
    return names + np.ascontiguousarray(labels.row).tobytes()


@dataclass(frozen=True, slots=True)
class FitMemory:
    """A folder of fits by :func:`content_key`; what is not readable there counts as not there."""

    folder: Path

    @classmethod
    def beside(cls, destination: Path) -> FitMemory:
        """The memory of what will be written to ``destination``."""
        return cls(destination.with_name(f".{destination.name}.calibrating"))

    def recall(self, key: str, fitted: str) -> tuple[Fit, ...] | None:
        """Fits of an interrupted run, dated ``fitted``; None where there are none."""
        fits = self._read(f"{key}.toml", read_fits)
        return None if fits is None else tuple(replace(fit, fitted=fitted) for fit in fits)

    def recall_model(self, key: str) -> LearnedModel | None:
        """A learned model of an interrupted run; None where there is none."""
        return self._read(f"{key}.json", read_model)

    def _read(self, name: str, read: Callable[[Path], _Kept]) -> _Kept | None:
        path = self.folder / name
        try:
            return read(path) if path.is_file() else None
        except FormatError:
            return None

    def keep_model(self, key: str, model: LearnedModel) -> None:
        """Keep a learned model: its card last, which says that all of it is there. Raises ``OutputError``."""
        card, trees = model_bytes(model)
        self._write(f"{key}.npz", trees)
        self._write(f"{key}.json", card)

    def keep(self, key: str, name: str, fits: Sequence[Fit]) -> None:
        """Keep the fits of one step of the work. Raises ``OutputError``."""
        self._write(f"{key}.toml", fits_to_toml(name, fits).encode())

    def _write(self, name: str, content: bytes) -> None:
        def fill(temporary: Path) -> None:
            temporary.write_bytes(content)

        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"what is fitted so far cannot be kept: {error.strerror or error}",
                path=str(self.folder),
                hint="remove what is there, or name another `out`",
            ) from error
        with placed_at_once():
            write_atomically(self.folder / name, fill, overwrite=True, directory=False)

    def forget(self) -> None:
        """Remove all of it: the work is done. Files of others stay, and so does what a link leads to."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return
        for path in self.folder.iterdir():
            if path.suffix in _SUFFIXES and _KEY.fullmatch(path.stem):
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):
            self.folder.rmdir()


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a fit of some rows gave."""

    fits: tuple[Fit, ...] = ()
    models: tuple[LearnedModel, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all fits of a run share; ``date`` (ISO) is written into them."""

    seed: int
    date: str
    memory: FitMemory | None = None
    progress: Progress | None = None

    def remembered(self, key: str, name: str, fit: Callable[[], Sequence[Fit]]) -> Found:
        """The fits that an interrupted run has made for the device ``name``, else new ones."""
        fits = self.memory.recall(key, self.date) if self.memory else None
        if fits is None:
            fits = tuple(fit())
            if self.memory:
                self.memory.keep(key, name, fits)
        return Found(fits)

    def told(self, purpose: str) -> Progress:
        """A callback that says what its steps are for."""

        def tell(done: int, total: int, name: str) -> None:
            if self.progress:
                self.progress(done, total, f"{purpose}: {name}")

        return tell


@dataclass(frozen=True, slots=True, eq=False)
class Others:
    """Rows and files of other devices, by the names that tables have for them."""

    rows: Mapping[str, Sequence[Measurements]]
    devices: Mapping[str, Device]


class Approach(Protocol):
    """One estimator that can be fitted, by its ``name``."""

    name: ClassVar[str]

    def check(self, tables: Sequence[Measurements], device: Device, found: Diagnostics) -> None:
        """Raise ``UsageError`` or ``MissingExtraError`` where no fit can come of it; tell what gets none."""
        ...

    def fault(self, test: str, tables: Sequence[Measurements], others: Others) -> str:
        """Why a test cannot be made of it; empty where it can."""
        ...

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> Found:
        """What some rows of a device give; nothing where they are too few."""
        ...

    def predict(
        self, ops: Operations, device: Device, found: Found, *, keeps: bool = False
    ) -> CasePrediction:
        """What the fits alone say of operations; ``keeps``: with those the device had before."""
        ...

    def carried(self, tables: Sequence[Measurements], others: Others, device: Device) -> list[CasePrediction]:
        """What fits of other devices say of the rows of each table, on the data sheet of this one."""
        ...


@dataclass(frozen=True, slots=True)
class CalibratedFits:
    """Roofline forms of every class, and lines of collectives."""

    name: ClassVar[str] = "calibrated"
    run: Run

    def check(self, tables: Sequence[Measurements], device: Device, found: Diagnostics) -> None:
        """Nothing is known before the fit."""

    def fault(self, test: str, tables: Sequence[Measurements], others: Others) -> str:
        """Where a kind has several operations, each can be left out; all else can always be tested."""
        if test == "op" and not any(has_several(table, table.ops.kind.used()) for table in tables):
            return "no kind of operation has several"
        return ""

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> Found:
        """From memory where an interrupted run has made them."""
        run = self.run
        recordings = [table for table in tables if table.recorded]
        sweeps = [table for table in tables if not table.recorded]
        key = content_key(tables, device if recordings else bare(device), run.seed)
        told = run.told(purpose)

        def fits() -> tuple[Fit, ...]:
            found: tuple[Fit, ...] = ()
            if sweeps:
                found = fit_device(sweeps, device, seed=run.seed, fitted=run.date, progress=told)
            if recordings:
                known = replace(device, own_fits=merged(found, device.fits), fits_of="")
                recorded = fit_recordings(recordings, known, seed=run.seed, fitted=run.date)
                found = (*recorded, *(fit for fit in found if fit.key not in {each.key for each in recorded}))
            return (*found, *fit_collectives(sweeps, device, seed=run.seed, fitted=run.date, progress=told))

        return run.remembered(key, device.name, fits)

    def predict(
        self, ops: Operations, device: Device, found: Found, *, keeps: bool = False
    ) -> CasePrediction:
        """Of collectives a model of their own speaks."""
        fits = merged(found.fits, device.fits) if keeps else found.fits
        fitted = replace(device, own_fits=fits, fits_of="")
        prediction = prediction_of_rows(Calibrated(), ops, fitted, Diagnostics())
        rows = ops.kind.where("collective")
        if not len(rows):
            return prediction
        other = prediction_of_rows(Collectives(), ops.take(rows), fitted, Diagnostics())
        columns = [prediction.duration_ns.copy(), prediction.low_ns.copy(), prediction.high_ns.copy()]
        for column, mine in zip(columns, (other.duration_ns, other.low_ns, other.high_ns), strict=True):
            column[rows] = mine
        return CasePrediction(
            estimator=self.name, duration_ns=columns[0], low_ns=columns[1], high_ns=columns[2]
        )

    def carried(self, tables: Sequence[Measurements], others: Others, device: Device) -> list[CasePrediction]:
        """The middle of what the fits of each other device say, and the widest of their intervals."""
        founds = [self.fit(rows, others.devices[name], f"on {name}") for name, rows in others.rows.items()]
        return [
            _middle(
                [
                    self.predict(known_variants(table.ops, {fit.variant for fit in each.fits}), device, each)
                    for each in founds
                ]
            )
            for table in tables
        ]


def bare(device: Device) -> Device:
    """A device as its data sheet alone tells it."""
    return replace(device, own_fits=(), fits_of="", efficiencies=(), own_lines=(), learned_models=())


def merged(fits: Sequence[Fit], before: Sequence[Fit]) -> tuple[Fit, ...]:
    """The new fits, then earlier ones of other classes; the new are what runs where no variant is named."""
    new = {fit.key for fit in fits}
    replaced = {(fit.kind, fit.op, fit.scheme) for fit in fits}
    kept = (fit for fit in before if fit.key not in new)
    return (
        *fits,
        *(
            replace(fit, default=fit.default and (fit.kind, fit.op, fit.scheme) not in replaced)
            for fit in kept
        ),
    )


def has_several(table: Measurements, kinds: Sequence[str]) -> bool:
    """Whether one of some kinds has several operations."""
    return any(len(table.ops.op.take(table.ops.kind.where(kind)).used()) > 1 for kind in kinds)


def known_variants(ops: Operations, known: set[str]) -> Operations:
    """Variants that a device's fits have not are left open: they count as what it usually runs."""
    names = tuple(name if name in known else "" for name in ops.variant.names)
    return replace(ops, variant=Labels(ops.variant.row, names))


def _middle(predictions: Sequence[CasePrediction]) -> CasePrediction:
    if not predictions:
        raise UsageError("no other device to predict from")
    durations = np.stack([each.duration_ns for each in predictions])
    known = ~np.isnan(durations).all(axis=0)
    middle, low, high = (np.full(durations.shape[1], np.nan) for _ in range(3))
    with np.errstate(invalid="ignore"):
        middle[known] = np.exp(np.nanmedian(np.log(durations[:, known]), axis=0))
        low[known] = np.fmin.reduce([each.low_ns[known] for each in predictions])
        high[known] = np.fmax.reduce([each.high_ns[known] for each in predictions])
    return CasePrediction(estimator="calibrated", duration_ns=middle, low_ns=low, high_ns=high)


@dataclass(frozen=True, slots=True)
class SystolicLines:
    """Lines from cycles and elements to time, of a device with an array."""

    name: ClassVar[str] = "systolic"
    run: Run

    def check(self, tables: Sequence[Measurements], device: Device, found: Diagnostics) -> None:
        """Refuse a device without an array, and tables without any operation that lines cover."""
        if device.systolic is None:
            raise UsageError(
                f"`estimator=systolic`: {device.name} has no systolic array",
                hint="leave it out, or state the array in a hardware file of your own",
            )
        rows = [table.ops.take(table.ops.kind.where(*LINE_KINDS)) for table in tables]
        unknown = sum(int((~has_columns(each)).sum()) for each in rows)
        if not sum(map(len, rows)) - unknown:
            raise UsageError(
                f"`estimator=systolic`: no row of {device.name} is of {', '.join(LINE_KINDS)} "
                "with sizes above 0 and a known number format",
                hint="leave it out, or give a table of these",
            )
        text = "rows without sizes above 0 or a known number format enter no line"
        found.warning("calibrate.unknown-sizes", device.name, text, count=unknown)

    def fault(self, test: str, tables: Sequence[Measurements], others: Others) -> str:
        """Lines of one chip say nothing of another's."""
        if test == "hardware":
            return "`estimator=systolic` has lines of one device, which carry over to no other"
        if test == "op" and not any(has_several(table, LINE_KINDS) for table in tables):
            return f"`estimator=systolic`: none of {', '.join(LINE_KINDS)} has several operations"
        return ""

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> Found:
        """The lines of every class that has rows enough."""
        run = self.run
        key = content_key(tables, bare(device), run.seed, "systolic")

        def fits() -> tuple[Fit, ...]:
            by_kind = (
                one_table([each.take(each.ops.kind.where(kind)) for each in tables]) for kind in LINE_KINDS
            )
            rows = [each for each in by_kind if each is not None]
            run.told(purpose)(0, 1, "lines")
            return fit_lines(rows, device, seed=run.seed, fitted=run.date)

        return run.remembered(key, device.name, fits)

    def predict(
        self, ops: Operations, device: Device, found: Found, *, keeps: bool = False
    ) -> CasePrediction:
        """What has no line is not predicted: cycles at a clock are no fit."""
        lines = merged(found.fits, device.own_lines) if keeps else found.fits
        fitted = replace(device, own_lines=lines)
        prediction = prediction_of_rows(Systolic(shipped=False), ops, fitted, Diagnostics())
        duration = prediction.duration_ns.copy()
        for labels, rows in ops.classes():
            if basis_of(fitted, *labels, shipped=False) is None:
                duration[rows] = np.nan
        return replace(prediction, duration_ns=duration)

    def carried(self, tables: Sequence[Measurements], others: Others, device: Device) -> list[CasePrediction]:
        """Refused by :meth:`fault`."""
        raise UsageError(self.fault("hardware", tables, others))


@dataclass(frozen=True, slots=True)
class LearnedTrees:
    """Models of trees, one per kind of operation and number format."""

    name: ClassVar[str] = "learned"
    run: Run

    def check(self, tables: Sequence[Measurements], device: Device, found: Diagnostics) -> None:
        """Refuse tables of which no model can be fitted; tell which kinds get none."""
        library_version()
        parts = list(own_parts(tables, {device.name: device}, seed=self.run.seed))
        few = [_adaptable(each, device, self.run.seed) for each in parts]
        faults = [each.fault for each, some in zip(parts, few, strict=True) if each.fault and some is None]
        for each, some in zip(parts, few, strict=True):
            text = f"{each.part.name}: rows that no model of related devices speaks of enter no model"
            found.warning("calibrate.unrelated-rows", device.name, text, count=some.unknown if some else 0)
        if len(faults) == len(parts):
            kinds = ", ".join(FAMILIES)
            reasons = "; ".join(faults) or f"no row of {device.name} is of {kinds} in a known number format"
            raise UsageError(
                f"`estimator=learned`: {reasons}", hint="measure more sizes, or fit `estimator=calibrated`"
            )
        text = f"no learned model of {'; '.join(faults)}"
        found.warning("calibrate.too-few-rows", device.name, text, count=len(faults))
        others = sum(map(len, tables)) - sum(len(each.rows.ratio) for each in parts)
        text = "rows of other kinds, unknown number formats, sizes or peaks enter no learned model"
        found.warning("calibrate.not-learned", device.name, text, count=others)

    def fault(self, test: str, tables: Sequence[Measurements], others: Others) -> str:
        """Trees carry over to another device where two families at least taught them what differs."""
        if test == "op" and not any(has_several(table, tuple(FAMILIES)) for table in tables):
            return "`estimator=learned`: no kind of operation that it models has several"
        families = {family_name(device) for device in others.devices.values()}
        if test == "hardware" and len(families) < 2:
            listed = ", ".join(others.devices)
            return f"`estimator=learned` needs others of two families at least, here is {listed}"
        return ""

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> Found:
        """The models of all parts with rows enough."""
        return self._fit(tables, {device.name: device}, purpose)

    def _fit(self, tables: Sequence[Measurements], devices: Mapping[str, Device], purpose: str) -> Found:
        parts = list(own_parts(tables, devices, seed=self.run.seed))
        told = self.run.told(purpose)
        models: list[LearnedModel | None] = []
        for number, each in enumerate(parts):
            told(number, len(parts), each.part.name)
            models.append(self._model(each, devices))
        return Found(models=tuple(model for model in models if model is not None))

    def _model(self, own: OwnPart, devices: Mapping[str, Device]) -> LearnedModel | None:
        """From memory where an interrupted run has made it; None where rows are too few."""
        memory, seed = self.run.memory, self.run.seed
        what = f"{library_version()} {own.part!r}"
        device = next(iter(devices.values()))
        few = _adaptable(own, device, seed) if len(devices) == 1 else None
        if few is not None:
            what += f" adapted {hashlib.sha256(few.path.read_bytes()).hexdigest()}"
        key = content_key([own.rows.measured], map(bare, devices.values()), seed, what)
        kept = memory.recall_model(key) if memory else None
        if kept is not None:
            return kept
        model = None
        if few is not None:
            model = adapted(few, device, seed=seed)
        elif not own.fault:
            model = fit_rows(own.part, own.rows, seed=seed, own=True)
        if memory and model is not None:
            memory.keep_model(key, model)
        return model

    def predict(
        self, ops: Operations, device: Device, found: Found, *, keeps: bool = False
    ) -> CasePrediction:
        """What the models say, without any others."""
        return prediction_of_rows(ModelsAtHand(found.models), ops, device, Diagnostics())

    def carried(self, tables: Sequence[Measurements], others: Others, device: Device) -> list[CasePrediction]:
        """Models of all other devices together, by what their data sheets differ in."""
        rows = [each for tables_of in others.rows.values() for each in tables_of]
        found = self._fit(rows, others.devices, "on other devices")
        known = {cell.variant for model in found.models for cell in model.card.cells}
        return [self.predict(known_variants(table.ops, known), device, found) for table in tables]


def has_adaptable(tables: Sequence[Measurements], device: Device, seed: int) -> bool:
    """Whether models of related devices can be adapted to some of the rows of a device."""
    parts = own_parts(tables, {device.name: device}, seed=seed)
    return any(_adaptable(each, device, seed) is not None for each in parts)


def _adaptable(own: OwnPart, device: Device, seed: int) -> Adaptable | None:
    """What of a part models of related devices can be adapted to: all of it, unless nothing else can be."""
    if len(own.rows.measured) > MOST_ROWS:
        return None
    some = adaptable(own.part, own.rows, device, cards_in(shipped_folder()), seed=seed)
    return None if some is None or (some.unknown and not own.fault) else some
