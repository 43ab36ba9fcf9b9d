"""How far off the answers were before a calibration, beside its own errors: who answers afterwards is decided
by these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as with_fields

from hespas.estimators.composite import KINDS_BY_MODELS, Composite
from hespas.estimators.learned.serialization import ErrorRow, LearnedModel
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.measurements import Measurements
from hespas.operations import Labels
from hespas.validators.calibration.approaches import Found
from hespas.validators.calibration.fit_device import rounded, rows_to_fit

__all__ = ["with_before"]

_MOST_ROWS = 2000
"""Rows of one class that are looked at."""
_ORDER = "learned+calibrated+roofline"


def with_before(
    founds: Mapping[str, Found], tables: Sequence[Measurements], device: Device, seed: int
) -> dict[str, Found]:
    """What was fitted, each fit and model with the MAPE of what answered for ``device`` before on the rows it
    was fitted on (of some of them). Of kinds whose own fits come first anyway nothing is said.
    """
    said = _Before.of([rows_to_fit(table, device) for table in tables if not table.recorded], device, seed)
    return {
        name: Found(
            found.fits if name == "systolic" else tuple(map(said.of_fit, found.fits)),
            tuple(map(said.of_model, found.models)),
        )
        for name, found in founds.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """Rows of tables, and by how much the answers before were off [fraction], one array for each table."""

    tables: Sequence[Measurements]
    errors: Sequence[FloatArray]

    @classmethod
    def of(cls, tables: Sequence[Measurements], device: Device, seed: int) -> _Before:
        """Ask what answers for products and the like, as programs ask: without the name of a library."""
        some = [table.take(_drawn(table, seed)) for table in tables]
        some = [table for table in some if len(table)]
        model = Composite(order=_ORDER)
        errors: list[FloatArray] = []
        for table in some:
            nameless = replace(table.ops, variant=Labels.constant("", len(table)))
            errors.append(np.abs(model.predict(nameless, device).duration_ns / table.duration_ns - 1))
        return cls(some, errors)

    def of_fit(self, fit: Fit) -> Fit:
        """The fit with the error of what answered before."""
        wanted = (fit.kind, fit.op, fit.scheme, fit.variant)
        found = self._mape(wanted)
        return replace(fit, error=with_fields(fit.error, before_mape=rounded(found)))

    def of_model(self, model: LearnedModel) -> LearnedModel:
        """The same of a model, kind by kind."""
        schemes = {cell.scheme for cell in model.card.cells}

        def known(row: ErrorRow) -> ErrorRow:
            found = self._mape((row.kind, ANY, ANY, ANY), schemes)
            return row if np.isnan(found) else with_fields(row, before_mape=rounded(found))

        return replace(model, card=with_fields(model.card, errors=tuple(map(known, model.card.errors))))

    def _mape(self, wanted: tuple[str, str, str, str], schemes: set[str] | None = None) -> float:
        """Of the rows with some labels; NaN where there is none, or nothing answered."""
        parts = [np.empty(0)]
        for table, errors in zip(self.tables, self.errors, strict=True):
            for labels, rows in table.ops.classes():
                alike = all(name in (label, ANY) for name, label in zip(wanted, labels, strict=True))
                if alike and (schemes is None or labels[2] in schemes):
                    parts.append(errors[rows])
        found = np.concatenate(parts)
        return float(np.nanmean(found)) if np.isfinite(found).any() else np.nan


def _drawn(table: Measurements, seed: int) -> IntArray:
    generator = np.random.default_rng(seed)
    parts = [np.empty(0, np.int64)]
    for labels, rows in table.ops.classes():
        if labels[0] in KINDS_BY_MODELS:
            parts.append(generator.permutation(rows)[:_MOST_ROWS])
    return np.sort(np.concatenate(parts))
