"""Learned models outside their fit: errors on devices that were left out of it, and on sizes beyond the
measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from hespas.estimators.learned.bases import FittedDevice
from hespas.estimators.learned.extrapolation import (
    GROUP,
    expected_deviation,
    octaves_beyond,
    reference_times,
    references_of,
    shares_of_trees,
    size_of,
)
from hespas.estimators.learned.serialization import (
    USUAL_INTERVAL,
    LearnedModel,
    LeftOutError,
    NewDeviceInterval,
    Region,
)
from hespas.estimators.rates import roof_ns
from hespas.fitting.held_out import weighted_quantiles
from hespas.fitting.learned_bases import beyond_region, with_bases
from hespas.fitting.learned_parts import BoostingForm, LearnedPart, TrainingRows, grow, rising
from hespas.fitting.statistics import error_figures
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.operations import Labels, Operations

__all__ = ["TAIL", "devices_of", "left_out_devices", "reach_of", "region_of"]

TAIL = 0.05
"""Share of rows on each side of an interval of 90 %."""
_MOST_ROWS_OF_DEVICE = 5000
_USUAL_TESTS = 6
"""Tests on left-out devices with the same weight as the usual interval."""
_MOST_ROWS_INSIDE = 4000
_MOST_ROWS_BEYOND = 1500
_FEWEST_INSIDE = 200
_FEWEST_BEYOND = 60
_FEWEST_OF_STEP = 40
_STEPS = (0.5, 1.0, 2.0)
"""Limits of the ranges of octaves beyond the fit whose rows are evaluated together."""


def devices_of(rows: TrainingRows) -> tuple[FittedDevice, ...]:
    """Return the devices that the rows were measured on, ordered by name."""
    return tuple(
        FittedDevice(
            name=name,
            arch=device.architecture,
            kind=device.kind,
            rows=len(of_device),
        )
        for name, device, of_device in rows.by_device()
    )


def reach_of(dims: Sequence[str], ops: Operations) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest value of each size in ``dims``. In attention for one new token the
    number of query heads per key head is a size too.
    """
    names = [*dims, *([GROUP] if "attention.generation" in ops.kind.used() else [])]
    sizes = {name: size[~np.isnan(size)] for name in names if len(size := size_of(ops, name))}
    return {name: (float(size.min()), float(size.max())) for name, size in sizes.items() if len(size)}


def left_out_devices(
    model: LearnedModel, rows: TrainingRows, *, seed: int
) -> tuple[NewDeviceInterval, tuple[LeftOutError, ...]]:
    """Return the interval of predictions for devices without measurements, and the errors on left-out
    devices: on each device whose architecture has other devices in the fit, then on each architecture.

    A left-out device is predicted from the other devices, as one without measurements. Their trees and forms
    are not fitted again without it: they predict times of the other devices, which its rows do not change.
    """
    card = model.card
    seen = devices_of(rows)
    architectures: dict[str, list[str]] = {}
    for device in seen:
        architectures.setdefault(device.arch, []).append(device.name)
    tests: list[tuple[tuple[str, ...], bool]] = [
        ((name,), True) for members in architectures.values() if len(members) > 1 for name in members
    ]
    tests += [(tuple(members), False) for members in architectures.values()]
    errors: list[LeftOutError] = []
    units: list[FloatArray] = []
    for held_out, has_siblings in tests:
        others = [device.name for device in seen if device.name not in held_out]
        drawn = _drawn(rows.of_devices(held_out), _MOST_ROWS_OF_DEVICE * len(held_out), seed)
        tested = rows.take(drawn)
        residual, unit = np.full(len(drawn), np.nan), np.full(len(drawn), np.nan)
        for name in held_out:
            new = rows.devices[name]
            of_device = tested.measured.hardware.where(name)
            measured = tested.measured.take(of_device)
            for labels, of_class in measured.ops.classes():
                # Another library's version is used if only the left-out devices ran this one.
                alike = [cell for cell in card.cells if (cell.kind, cell.op, cell.scheme) == labels[:3]]
                alike = [cell for cell in alike if set(others) & set(cell.rows)]
                if not alike:
                    continue
                cell = max(alike, key=lambda cell: (cell.variant == labels[3], sum(cell.rows.values())))
                references = references_of(card, cell, new, held_out)
                if references is None:
                    continue
                variant = Labels.constant(cell.variant, len(of_class))
                part = replace(measured.ops.take(of_class), variant=variant)
                predicted = reference_times(model, references, part, new)
                log_ns = np.log(np.fmax(np.exp(predicted.log_ns), roof_ns(part, new)))
                residual[of_device[of_class]] = np.log(measured.duration_ns[of_class]) - log_ns
                unit[of_device[of_class]] = expected_deviation(references, predicted.spread)
        predicted_rows = np.flatnonzero(~np.isnan(residual))
        if not len(predicted_rows):
            continue
        figures = error_figures(np.expm1(-residual[predicted_rows]))
        errors.append(
            LeftOutError(
                hardware=held_out,
                siblings=has_siblings,
                mape=round(figures["mape"], 6),
                median_ape=round(figures["median_ape"], 6),
                bias=round(figures["bias"], 6),
                n=len(predicted_rows),
            )
        )
        units.append(residual[predicted_rows] / unit[predicted_rows])
    if not units:
        return USUAL_INTERVAL, ()
    # All tests have equal weights; the usual interval counts as much as some more of them.
    weights = np.concatenate([np.full(len(values), 1 / (len(values) * len(units))) for values in units])
    own = weighted_quantiles(np.concatenate(units), weights)
    share = len(units) / (len(units) + _USUAL_TESTS)
    low, high = (
        round(share * end + (1 - share) * usual, 6)
        for end, usual in zip(own, (USUAL_INTERVAL.low, USUAL_INTERVAL.high), strict=True)
    )
    return NewDeviceInterval(low=min(low, 0.0), high=max(high, 0.0), n=len(units)), tuple(errors)


def region_of(
    part: LearnedPart, plain: TrainingRows, form: BoostingForm, residual: FloatArray, *, seed: int
) -> Region | None:
    """Return the errors on sizes beyond the fitted ones, and the necessary growth of intervals there. None if
    too few rows are inside or beyond.

    The two largest octaves of every dimension are held out of the fit and of its bases. ``residual`` has the
    errors [log time] within the fitted sizes.
    """
    beyond = np.zeros(len(plain.ratio), np.bool_)
    for _, _, of_device in plain.by_device():
        beyond[of_device] = beyond_region(part, plain.measured.ops.take(of_device))
    count = len(plain.devices)
    fitted = _drawn(~beyond, count * _MOST_ROWS_INSIDE, seed)
    tested = _drawn(beyond, count * _MOST_ROWS_BEYOND, seed)
    if len(fitted) < _FEWEST_INSIDE or len(tested) < _FEWEST_BEYOND:
        return None
    inside, bases = with_bases(part, plain.take(fitted), seed=seed)
    forest = grow(inside.table, inside.ratio, form, seed=seed, rising=rising(part, inside.names))
    outside = plain.take(tested)
    outside_residual, octaves = np.full(len(tested), np.nan), np.zeros(len(tested))
    for name, device, rows in outside.by_device():
        near = inside.measured.hardware.where(name)
        if not len(near):
            continue
        ops = outside.measured.ops.take(rows)
        ratio = bases.log_ratio(outside, rows, device, [name])
        reach = reach_of(part.support, inside.measured.ops.take(near))
        octaves[rows] = octaves_beyond(reach, ops)
        share = shares_of_trees(reach, ops, octaves[rows])
        outside_residual[rows] = ratio - share * forest.predict(outside.table[rows])
    is_known = ~np.isnan(outside_residual)
    return _region_from(outside_residual[is_known], octaves[is_known], residual[~np.isnan(residual)])


def _region_from(residual: FloatArray, octaves: FloatArray, inside: FloatArray) -> Region | None:
    """Return the errors beyond the fitted region and the widening of intervals there.

    ``residual`` are the errors [log time] of rows that are ``octaves`` octaves beyond the region. ``inside``
    are the errors of rows inside the region.
    """
    if len(residual) < _FEWEST_BEYOND:
        return None
    low, high = (float(np.quantile(inside, level)) for level in (TAIL, 1 - TAIL))
    excess = np.maximum(residual - max(high, 0.0), min(low, 0.0) - residual)
    steps: list[tuple[float, float]] = []
    width = 0.0
    for least, most in pairwise((0.0, *_STEPS)):
        of_step = excess[(octaves > least) & (octaves <= most)]
        if len(of_step) >= _FEWEST_OF_STEP:
            # Rows beyond in several dimensions err more, so the misses of one side are used for both sides.
            width = max(width, float(np.quantile(of_step, 1 - TAIL)))
        steps.append((most, round(width, 6)))
    limit, widening = (np.array(column) for column in zip((0.0, 0.0), *steps, strict=True))
    widened: FloatArray = np.interp(octaves, limit, widening)
    figures = {name: round(value, 6) for name, value in error_figures(np.expm1(-residual)).items()}
    return Region(
        **figures,
        n=len(residual),
        inside_mape=round(float(np.abs(np.expm1(-inside)).mean()), 6),
        coverage=round(float((excess <= widened).mean()), 6),
        widening=tuple(steps),
    )


def _drawn(mask: BoolArray, most: int, seed: int) -> IntArray:
    """Return the indices of rows marked in ``mask``: all, or ``most`` of them drawn at random; sorted."""
    rows = np.flatnonzero(mask)
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))
