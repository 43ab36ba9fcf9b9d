"""Comparison of new fits with the predictions that the package makes without them, on the same rows.

The errors of the package's models and of the fits (on held-out rows) decide which of them predicts an
operation, so that a calibration never makes predictions worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np
from msgspec.structs import replace as with_fields

from hespas.estimators.composite import KINDS_BY_MODELS, Composite
from hespas.estimators.learned import Learned
from hespas.estimators.learned.serialization import Card, ErrorRow, LearnedModel, cards_in, shipped_folder
from hespas.fitting.approaches import FitResult
from hespas.fitting.fits import rounded
from hespas.fitting.held_out import first_of_best
from hespas.fitting.rows import rows_to_fit
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.measurements import Measurements
from hespas.operations import Labels

__all__ = ["with_before"]

_MOST_ROWS = 2000
"""Most evaluated rows of one class."""
_BY_FITS = ("vector", "normalization", "pooling", "gather", "reduction")
"""Kinds for which the composite estimator uses fits first, then models and data sheets."""


def with_before(
    results: Mapping[str, FitResult],
    tables: Sequence[Measurements],
    device: Device,
    seed: int,
    diagnostics: Diagnostics,
) -> dict[str, FitResult]:
    """Add to each fit and model the mean error (MAPE) of the models that ship with the package, on the rows
    of the fit or on a sample of them.

    If the package's models were fitted to this device, their error on held-out rows is used. A fit that the
    composite estimator would use first is removed and reported if it is not better than the prediction
    without it.
    """
    sweeps = [rows_to_fit(table, device) for table in tables if not table.recorded]
    before = _PackageErrors.of(sweeps, device, seed)
    compared: dict[str, FitResult] = {}
    for name, result in results.items():
        fits = result.fits
        if name != "systolic":
            # A fit is kept if it is better on held-out rows than the composite estimator without it, allowing
            # for the number of rows.
            bare = replace(
                device, own_fits=tuple(fit for fit in device.fits if fit.kind not in _BY_FITS), fits_of=""
            )
            samples = [table.take(_sampled_rows(table, seed, _BY_FITS)) for table in sweeps]
            errors = [
                np.abs(Composite().predict(table.ops, bare).duration_ns / table.duration_ns - 1)
                for table in samples
            ]
            on_rows = _PackageErrors(bare, samples, errors, ())
            on_cards = _PackageErrors(device, (), (), [card for _, card in cards_in(shipped_folder())])
            better: list[Fit] = []
            for fit in fits:
                fits_before = nan
                if fit.kind in _BY_FITS and fit.scheme != ANY:
                    labels = (fit.kind, fit.op, fit.scheme, fit.variant)
                    # The models may have been fitted to these rows, so their error on held-out rows counts as
                    # well.
                    fits_before = float(
                        np.fmax(on_rows.mape(*labels, table=fit.table), on_cards.mape(*labels))
                    )
                is_tested = not np.isnan(fits_before + fit.error.mape)
                if is_tested and first_of_best([fits_before, fit.error.mape], fit.samples) == 0:
                    text = (
                        f"a fit of {fit.samples:,} rows of {fit.kind} in {fit.scheme} has an error of "
                        f"{fit.error.mape:.1%} on held-out rows, the prediction without it "
                        f"{fits_before:.1%}: not used"
                    )
                    diagnostics.warning("calibrate.no-better", device.name, text)
                else:
                    better.append(fit)
            fits = tuple(map(before.with_mape, better))
        compared[name] = FitResult(fits, tuple(map(before.model_with_mape, result.models)))
    return compared


@dataclass(frozen=True, slots=True, eq=False)
class _PackageErrors:
    """Errors of the models that ship with the package on measurement tables: the relative error of each row,
    one array per table.
    """

    device: Device
    tables: Sequence[Measurements]
    errors: Sequence[FloatArray]
    cards: Sequence[Card]

    @classmethod
    def of(cls, tables: Sequence[Measurements], device: Device, seed: int) -> _PackageErrors:
        """Predict the rows with the package's models. Names of libraries are removed, as in programs."""
        samples = [table.take(_sampled_rows(table, seed)) for table in tables]
        samples = [table for table in samples if len(table)]
        errors: list[FloatArray] = []
        for table in samples:
            nameless = replace(table.ops, variant=Labels.constant("", len(table)))
            predicted_ns = Learned(own=False).predict(nameless, device).duration_ns
            errors.append(np.abs(predicted_ns / table.duration_ns - 1))
        return cls(device, samples, errors, [card for _, card in cards_in(shipped_folder())])

    def with_mape(self, fit: Fit) -> Fit:
        """Return a copy of the fit that states the mean error (MAPE) of the package's models on the same
        operations.
        """
        if ANY in (fit.kind, fit.scheme):
            return fit
        mape = self.mape(fit.kind, fit.op, fit.scheme, fit.variant, table=fit.table)
        return replace(fit, error=with_fields(fit.error, before_mape=rounded(mape)))

    def model_with_mape(self, model: LearnedModel) -> LearnedModel:
        """Return a copy of the model that states the mean error (MAPE) of the package's models, by kind and
        number format.
        """
        rows: list[ErrorRow] = []
        for row in model.card.errors:
            mape = self.mape(row.kind, ANY, row.scheme, ANY)
            rows.append(row if np.isnan(mape) else with_fields(row, before_mape=rounded(mape)))
        return replace(model, card=with_fields(model.card, errors=tuple(rows)))

    def mape(self, kind: str, op: str, scheme: str, variant: str, *, table: str = "") -> float:
        """Return the mean error (MAPE) of the package's models for a class of operations (in ``table``, if
        given); NaN without a prediction.

        If the package's models were fitted to this device, the rows may be part of that fit. The error on
        held-out rows, which the cards of the models state, is returned instead.
        """
        of_cards = [
            (row.mape, row.n)
            for card in self.cards
            for row in card.errors
            if (row.hardware, row.kind, row.scheme) == (self.device.name, kind, scheme)
            and row.mape is not None
        ]
        count = sum(n for _, n in of_cards)
        if count:
            return sum(mape * n for mape, n in of_cards) / count
        parts = [np.empty(0)]
        key = (kind, op, scheme, variant)
        for measured, errors in zip(self.tables, self.errors, strict=True):
            for labels, rows in measured.ops.classes():
                is_of_class = all(name in (label, ANY) for name, label in zip(key, labels, strict=True))
                if is_of_class and table in ("", measured.name):
                    parts.append(errors[rows])
        error = np.concatenate(parts)
        return float(np.nanmean(error)) if np.isfinite(error).any() else np.nan


def _sampled_rows(table: Measurements, seed: int, kinds: Sequence[str] = KINDS_BY_MODELS) -> IntArray:
    """Return a random sample of the rows of each class of operations of the given kinds."""
    generator = np.random.default_rng(seed)
    parts = [np.empty(0, np.int64)]
    for labels, rows in table.ops.classes():
        if labels[0] in kinds:
            parts.append(generator.permutation(rows)[:_MOST_ROWS])
    return np.sort(np.concatenate(parts))
