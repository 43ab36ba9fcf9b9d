"""Errors of learned models on rows that no fit has seen, written into their cards."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace as with_fields

from hespas.estimators.by_operation import OperationModel, Prediction
from hespas.estimators.learned.card import ErrorRow
from hespas.estimators.learned.stored import LearnedModel
from hespas.estimators.measurements import Measurements
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import device_names, named_device
from hespas.validators.calibration.learned_parts import Part, rows_of_part

__all__ = ["errors_of_folds", "scored", "with_errors"]


def with_errors(
    part: Part, model: LearnedModel, estimator: OperationModel, table: Measurements
) -> LearnedModel:
    """The model with its errors on ``devval`` rows of the table; ``estimator`` is what serves it."""
    rows = scored(estimator, rows_of_part(part, table).part("devval"))
    return LearnedModel(with_fields(model.card, errors=rows), model.forests, model.octaves)


def scored(estimator: OperationModel, measured: Measurements) -> tuple[ErrorRow, ...]:
    """One row per device, kind, operation, scheme and variant that occurs."""
    found: list[ErrorRow] = []
    known = set(device_names())
    for name in sorted(set(measured.hardware.used()) & known):
        mine = measured.on(name)
        said = estimator.predict(mine.ops, named_device(name))
        ops = mine.ops
        labels = (ops.kind, ops.op, ops.scheme, ops.variant)
        keys = np.stack([each.row for each in labels], axis=1)
        distinct, place = np.unique(keys, axis=0, return_inverse=True)
        keys_of: list[list[int]] = distinct.tolist()
        for number, key in enumerate(keys_of):
            rows = np.flatnonzero(place.reshape(-1) == number)
            texts = [each.names[row] for each, row in zip(labels, key, strict=True)]
            found.append(_row((name, *texts), said, mine.duration_ns, rows))
    return tuple(found)


def errors_of_folds(measured: Measurements, rest: FloatArray) -> tuple[ErrorRow, ...]:
    """One row per kind and device: errors on rows kept from a fit, which left ``rest`` of log time (NaN: kept
    from none).
    """
    found: list[ErrorRow] = []
    for name in sorted(measured.hardware.used()):
        of_device = measured.hardware.where(name)
        for kind in sorted(measured.ops.kind.used()):
            rows = np.intersect1d(of_device, measured.ops.kind.where(kind))
            kept = rest[rows][~np.isnan(rest[rows])]
            if not len(kept):
                continue
            error = np.expm1(-kept)
            size = np.abs(error)
            row = ErrorRow(
                hardware=name,
                kind=kind,
                op="*",
                scheme="*",
                variant="*",
                n=len(kept),
                refused=0,
                mape=_rounded(np.mean(size)),
                median_ape=_rounded(np.median(size)),
                p90_ape=_rounded(np.quantile(size, 0.9)),
                bias=_rounded(np.mean(error)),
                interval_coverage=None,
            )
            found.append(row)
    return tuple(found)


def _row(key: tuple[str, ...], said: Prediction, measured_ns: FloatArray, rows: IntArray) -> ErrorRow:
    answered = rows[~np.isnan(said.duration_ns[rows])]
    actual = measured_ns[answered]
    error = said.duration_ns[answered] / actual - 1
    inside = (said.low_ns[answered] <= actual) & (actual <= said.high_ns[answered])
    size = np.abs(error)
    some = len(answered) > 0
    return ErrorRow(
        hardware=key[0],
        kind=key[1],
        op=key[2],
        scheme=key[3],
        variant=key[4],
        n=len(answered),
        refused=len(rows) - len(answered),
        mape=_rounded(np.mean(size)) if some else None,
        median_ape=_rounded(np.median(size)) if some else None,
        p90_ape=_rounded(np.quantile(size, 0.9)) if some else None,
        bias=_rounded(np.mean(error)) if some else None,
        interval_coverage=_rounded(np.mean(inside)) if some else None,
    )


def _rounded(value: np.floating) -> float:
    return round(float(value), 6)
