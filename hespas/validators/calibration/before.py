"""How far off the package's learned models are on what a calibration fits, beside its own errors: who answers
afterwards is decided by these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as with_fields

from hespas.estimators.composite import KINDS_BY_MODELS
from hespas.estimators.learned import Learned
from hespas.estimators.learned.serialization import Card, ErrorRow, LearnedModel, cards_in, shipped_folder
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.measurements import Measurements
from hespas.operations import Labels
from hespas.validators.calibration.approaches import Found
from hespas.validators.calibration.fit_device import rounded, rows_to_fit

__all__ = ["with_before"]

_MOST_ROWS = 2000
"""Rows of one class that are looked at."""


def with_before(
    founds: Mapping[str, Found], tables: Sequence[Measurements], device: Device, seed: int
) -> dict[str, Found]:
    """What was fitted, each fit and model with the MAPE of the package's models on (some of) the rows it was
    fitted on; of a device that was in their own fit, on rows kept from that. Nothing is said of kinds that
    the composite asks fits of first.
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
    """Rows of tables, and by how much the package's models are off [fraction], one array for each table."""

    device: Device
    tables: Sequence[Measurements]
    errors: Sequence[FloatArray]
    cards: Sequence[Card]

    @classmethod
    def of(cls, tables: Sequence[Measurements], device: Device, seed: int) -> _Before:
        """Ask the models as programs ask: without the name of a library."""
        some = [table.take(_drawn(table, seed)) for table in tables]
        some = [table for table in some if len(table)]
        errors: list[FloatArray] = []
        for table in some:
            nameless = replace(table.ops, variant=Labels.constant("", len(table)))
            said_ns = Learned(own=False).predict(nameless, device).duration_ns
            errors.append(np.abs(said_ns / table.duration_ns - 1))
        return cls(device, some, errors, [card for _, card in cards_in(shipped_folder())])

    def of_fit(self, fit: Fit) -> Fit:
        """The fit with the error of the package's models."""
        if ANY in (fit.kind, fit.scheme):
            return fit
        found = self._mape(fit.kind, fit.op, fit.scheme, fit.variant, table=fit.table)
        return replace(fit, error=with_fields(fit.error, before_mape=rounded(found)))

    def of_model(self, model: LearnedModel) -> LearnedModel:
        """The same of a model, by kind and number format."""

        def known(row: ErrorRow) -> ErrorRow:
            found = self._mape(row.kind, ANY, row.scheme, ANY)
            return row if np.isnan(found) else with_fields(row, before_mape=rounded(found))

        return replace(model, card=with_fields(model.card, errors=tuple(map(known, model.card.errors))))

    def _mape(self, kind: str, op: str, scheme: str, variant: str, *, table: str = "") -> float:
        """Of the rows of a class (of one table, if it is named); NaN where nothing answers."""
        of_cards = self._of_cards(kind, scheme)
        if not np.isnan(of_cards):
            return of_cards
        parts = [np.empty(0)]
        wanted = (kind, op, scheme, variant)
        for each, errors in zip(self.tables, self.errors, strict=True):
            for labels, rows in each.ops.classes():
                alike = all(name in (label, ANY) for name, label in zip(wanted, labels, strict=True))
                if alike and table in ("", each.name):
                    parts.append(errors[rows])
        found = np.concatenate(parts)
        return float(np.nanmean(found)) if np.isfinite(found).any() else np.nan

    def _of_cards(self, kind: str, scheme: str) -> float:
        """What the cards say where the device was in the fit: its rows here may be those of the fit."""
        rows = [
            (row.mape, row.n)
            for card in self.cards
            for row in card.errors
            if (row.hardware, row.kind, row.scheme) == (self.device.name, kind, scheme)
            and row.mape is not None
        ]
        count = sum(n for _, n in rows)
        return sum(mape * n for mape, n in rows) / count if count else np.nan


def _drawn(table: Measurements, seed: int) -> IntArray:
    generator = np.random.default_rng(seed)
    parts = [np.empty(0, np.int64)]
    for labels, rows in table.ops.classes():
        if labels[0] in KINDS_BY_MODELS:
            parts.append(generator.permutation(rows)[:_MOST_ROWS])
    return np.sort(np.concatenate(parts))
