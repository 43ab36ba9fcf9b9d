"""Errors of the package's own answers on the rows of a calibration, against errors of its fits on held-out
rows: they decide which of both answers afterwards, so that a calibration never makes a prediction worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np
from msgspec.structs import replace as with_fields

from hespas.estimators.composite import KINDS_BY_MODELS, Composite, least_better
from hespas.estimators.learned import Learned
from hespas.estimators.learned.serialization import Card, ErrorRow, LearnedModel, cards_in, shipped_folder
from hespas.graph import Diagnostics
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
    founds: Mapping[str, Found],
    tables: Sequence[Measurements],
    device: Device,
    seed: int,
    diagnostics: Diagnostics,
) -> dict[str, Found]:
    """Return fits and models with the MAPE of the package's models on (some of) the rows they were fitted on;
    of a device that was in the models' own fit, on rows kept from that. Of kinds that the composite asks fits
    of first, a fit that is no better than the answer without it is left out and reported.
    """
    founds = {
        name: found
        if name == "systolic"
        else replace(found, fits=_better(found.fits, tables, device, seed, diagnostics))
        for name, found in founds.items()
    }
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
        found = self.mape(fit.kind, fit.op, fit.scheme, fit.variant, table=fit.table)
        return replace(fit, error=with_fields(fit.error, before_mape=rounded(found)))

    def of_model(self, model: LearnedModel) -> LearnedModel:
        """The same of a model, by kind and number format."""

        def known(row: ErrorRow) -> ErrorRow:
            found = self.mape(row.kind, ANY, row.scheme, ANY)
            return row if np.isnan(found) else with_fields(row, before_mape=rounded(found))

        return replace(model, card=with_fields(model.card, errors=tuple(map(known, model.card.errors))))

    def mape(self, kind: str, op: str, scheme: str, variant: str, *, table: str = "") -> float:
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


_BY_FITS = ("vector", "normalization", "pooling", "gather", "reduction")
"""Kinds of which the composite asks fits first, then models and data sheets."""


def _better(
    fits: Sequence[Fit], tables: Sequence[Measurements], device: Device, seed: int, diagnostics: Diagnostics
) -> tuple[Fit, ...]:
    """Return the fits that err less on held-out rows than the composite does on the same rows without them,
    as far as so many rows can tell.
    """
    bare = replace(device, own_fits=tuple(fit for fit in device.fits if fit.kind not in _BY_FITS), fits_of="")
    some = [rows_to_fit(table, device) for table in tables if not table.recorded]
    some = [table.take(_drawn(table, seed, _BY_FITS)) for table in some]
    errors = [
        np.abs(Composite().predict(table.ops, bare).duration_ns / table.duration_ns - 1) for table in some
    ]
    rows = _Before(bare, some, errors, ())
    kept = _Before(device, (), (), [card for _, card in cards_in(shipped_folder())])
    found: list[Fit] = []
    for fit in fits:
        before = nan
        if fit.kind in _BY_FITS and fit.scheme != ANY:
            labels = (fit.kind, fit.op, fit.scheme, fit.variant)
            # Models may have been fitted on these very rows: their error on rows kept from that counts, too.
            before = float(np.fmax(rows.mape(*labels, table=fit.table), kept.mape(*labels)))
        if fit.error.mape > before * least_better(fit.samples):
            text = (
                f"a fit of {fit.samples:,} rows of {fit.kind} in {fit.scheme} errs by {fit.error.mape:.1%} "
                f"on rows left out, answers without it by {before:.1%}: not used"
            )
            diagnostics.warning("calibrate.no-better", device.name, text)
        else:
            found.append(fit)
    return tuple(found)


def _drawn(table: Measurements, seed: int, kinds: Sequence[str] = KINDS_BY_MODELS) -> IntArray:
    generator = np.random.default_rng(seed)
    parts = [np.empty(0, np.int64)]
    for labels, rows in table.ops.classes():
        if labels[0] in kinds:
            parts.append(generator.permutation(rows)[:_MOST_ROWS])
    return np.sort(np.concatenate(parts))
