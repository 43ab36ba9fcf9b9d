"""Lines of systolic arrays and learned models as what ``calibrate`` fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hespas.estimators.learned.ensemble import FAMILIES
from hespas.estimators.learned.inference import ModelsAtHand
from hespas.estimators.learned.serialization import LearnedModel
from hespas.estimators.systolic import Systolic
from hespas.estimators.systolic.lines import basis_of
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.operations import Operations
from hespas.validators.accuracy.cases import Prediction
from hespas.validators.accuracy.table_cases import prediction_of_rows
from hespas.validators.calibration.approaches import (
    Found,
    Others,
    Run,
    bare,
    has_several,
    known_variants,
    merged,
)
from hespas.validators.calibration.learned import fit_rows
from hespas.validators.calibration.learned_rows import family_name
from hespas.validators.calibration.learned_trees import library_version
from hespas.validators.calibration.memory import content_key
from hespas.validators.calibration.own_models import OwnPart, one_table, own_parts
from hespas.validators.calibration.systolic import LINE_KINDS, fit_lines, has_columns

__all__ = ["LearnedTrees", "SystolicLines"]


@dataclass(frozen=True, slots=True)
class SystolicLines:
    """Lines from cycles and elements to time, of a device with an array."""

    run: Run

    @property
    def name(self) -> str:
        """``systolic``."""
        return "systolic"

    def check(self, tables: Sequence[Measurements], device: Device, found: Diagnostics) -> None:
        """Refuse a device without an array, and tables without any operation that lines speak of."""
        if device.systolic is None:
            raise UsageError(
                f"--estimator systolic: {device.name} has no systolic array",
                hint="leave it out, or state the array in a hardware file of your own",
            )
        rows = [table.ops.take(table.ops.kind.where(*LINE_KINDS)) for table in tables]
        unknown = sum(int((~has_columns(each)).sum()) for each in rows)
        if not sum(map(len, rows)) - unknown:
            raise UsageError(
                f"--estimator systolic: no row of {device.name} is of {', '.join(LINE_KINDS)} "
                "with sizes above 0 and a known number format",
                hint="leave it out, or give a table of these",
            )
        text = "rows without sizes above 0 or a known number format enter no line"
        found.warning("calibrate.unknown-sizes", device.name, text, count=unknown)

    def fault(self, test: str, tables: Sequence[Measurements], others: Others) -> str:
        """Lines of one chip say nothing of another's."""
        if test == "hardware":
            return "--estimator systolic has lines of one device, which carry over to no other"
        if test == "op" and not any(has_several(table, LINE_KINDS) for table in tables):
            return f"--estimator systolic: none of {', '.join(LINE_KINDS)} has several operations"
        return ""

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> Found:
        """The lines of every class that has rows enough."""
        run = self.run
        key = content_key(tables, bare(device), run.seed, "systolic")
        kept = run.memory.recall(key, run.date) if run.memory else None
        if kept is not None:
            return Found(kept)
        told = run.told(purpose)
        by_kind = [
            one_table([each.take(each.ops.kind.where(kind)) for each in tables]) for kind in LINE_KINDS
        ]
        rows = [each for each in by_kind if each is not None]
        told(0, 1, "lines")
        fits = fit_lines(rows, device, seed=run.seed, fitted=run.date)
        if run.memory:
            run.memory.keep(key, device.name, fits)
        return Found(fits)

    def said(self, ops: Operations, device: Device, found: Found, *, keeps: bool = False) -> Prediction:
        """What has no line is not said: cycles at a clock are no fit."""
        lines = merged(found.fits, device.own_lines) if keeps else found.fits
        fitted = replace(device, own_lines=lines)
        said = prediction_of_rows(Systolic(shipped=False), ops, fitted, Diagnostics())
        duration = said.duration_ns.copy()
        for labels, rows in ops.classes():
            if basis_of(fitted, *labels, shipped=False) is None:
                duration[rows] = np.nan
        return replace(said, duration_ns=duration)

    def carried(self, tables: Sequence[Measurements], others: Others, device: Device) -> list[Prediction]:
        """Refused by :meth:`fault`."""
        raise UsageError(self.fault("hardware", tables, others))


@dataclass(frozen=True, slots=True)
class LearnedTrees:
    """Models of trees, one per kind of operation and number format."""

    run: Run

    @property
    def name(self) -> str:
        """``learned``."""
        return "learned"

    def check(self, tables: Sequence[Measurements], device: Device, found: Diagnostics) -> None:
        """Refuse tables of which no model can be fitted; tell which kinds get none."""
        library_version()
        parts = list(own_parts(tables, {device.name: device}, seed=self.run.seed))
        faults = [each.fault for each in parts if each.fault]
        if len(faults) == len(parts):
            kinds = ", ".join(FAMILIES)
            said = "; ".join(faults) or f"no row of {device.name} is of {kinds} in a known number format"
            raise UsageError(
                f"--estimator learned: {said}", hint="measure more sizes, or fit --estimator calibrated"
            )
        for fault in faults:
            found.warning("calibrate.too-few-rows", device.name, f"no learned model of {fault}")

    def fault(self, test: str, tables: Sequence[Measurements], others: Others) -> str:
        """Trees carry over to another device where two families at least taught them what differs."""
        if test == "op" and not any(has_several(table, tuple(FAMILIES)) for table in tables):
            return "--estimator learned: no kind of operation that it models has several"
        families = {family_name(device) for device in others.devices.values()}
        if test == "hardware" and len(families) < 2:
            listed = ", ".join(others.devices)
            return f"--estimator learned needs others of two families at least, here is {listed}"
        return ""

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> Found:
        """The models of all parts with rows enough."""
        return self._fit(tables, {device.name: device}, purpose)

    def _fit(self, tables: Sequence[Measurements], devices: Mapping[str, Device], purpose: str) -> Found:
        parts = [each for each in own_parts(tables, devices, seed=self.run.seed) if not each.fault]
        told = self.run.told(purpose)
        models: list[LearnedModel] = []
        for number, each in enumerate(parts):
            told(number, len(parts), each.part.name)
            models.append(self._model(each, devices))
        return Found(models=tuple(models))

    def _model(self, own: OwnPart, devices: Mapping[str, Device]) -> LearnedModel:
        """From memory where an interrupted run has made it."""
        memory, seed = self.run.memory, self.run.seed
        what = f"{library_version()} {own.part!r}"
        key = content_key([own.rows.measured], map(bare, devices.values()), seed, what)
        kept = memory.recall_model(key) if memory else None
        if kept is not None:
            return kept
        model = fit_rows(own.part, own.rows, seed=seed, own=True)
        if memory:
            memory.keep_model(key, model)
        return model

    def said(self, ops: Operations, device: Device, found: Found, *, keeps: bool = False) -> Prediction:
        """What the models say, without any others."""
        return prediction_of_rows(ModelsAtHand(found.models), ops, device, Diagnostics())

    def carried(self, tables: Sequence[Measurements], others: Others, device: Device) -> list[Prediction]:
        """Models of all other devices together, by what their data sheets differ in."""
        rows = [each for tables_of in others.rows.values() for each in tables_of]
        found = self._fit(rows, others.devices, "on other devices")
        known = {cell.variant for model in found.models for cell in model.card.cells}
        return [self.said(known_variants(table.ops, known), device, found) for table in tables]
