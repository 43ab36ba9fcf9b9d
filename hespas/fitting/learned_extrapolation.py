"""Learned models outside their fit: trees for devices that were not measured, and errors on sizes beyond the
measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hespas.estimators.learned.bases import NEARNESS_LEVELS, FittedDevice, nearest_devices
from hespas.estimators.learned.ensemble import Forest
from hespas.estimators.learned.inference import octaves_beyond
from hespas.estimators.learned.serialization import LeftOutError, NewDeviceInterval, Region
from hespas.fitting.learned_bases import Bases, beyond_region, with_bases
from hespas.fitting.learned_parts import (
    BoostingForm,
    LearnedPart,
    TrainingRows,
    family_name,
    grow,
    rising,
    transferable,
)
from hespas.fitting.statistics import error_figures
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.operations import Operations

__all__ = ["TAIL", "TRANSFER_FORM", "TransferTrees", "devices_of", "fit_transfer", "reach_of", "region_of"]

TAIL = 0.05
"""Share of rows on each side of an interval of 90 %."""
TRANSFER_FORM = BoostingForm(trees=300, leaves=31, learning_rate=0.1)
_MOST_ROWS = 40_000
_MOST_ROWS_OF_DEVICE = 5000
_MOST_ROWS_INSIDE = 4000
_MOST_ROWS_BEYOND = 1500
_FEWEST_INSIDE = 200
_FEWEST_BEYOND = 60
_FEWEST_OF_STEP = 40
_STEPS = (0.5, 1.0, 2.0)
"""Limits of the ranges of octaves beyond the fit whose rows are evaluated together."""


@dataclass(frozen=True, slots=True, eq=False)
class TransferTrees:
    """Trees for devices that were not measured. Their inputs do not identify the device. ``unseen`` are the
    intervals and ``errors`` the errors on held-out devices.

    If only one device was measured, ``forest`` is None, because the errors of such a model cannot be
    measured.
    """

    forest: Forest | None
    unseen: tuple[NewDeviceInterval, ...]
    errors: tuple[LeftOutError, ...]


def devices_of(rows: TrainingRows) -> tuple[FittedDevice, ...]:
    """Return the devices that the rows were measured on, ordered by name."""
    return tuple(
        FittedDevice(
            name=name,
            vendor=device.vendor,
            family=device.family,
            kind=device.kind,
            rows=len(of_device),
        )
        for name, device, of_device in rows.by_device()
    )


def reach_of(dims: Sequence[str], ops: Operations) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest value of each size in ``dims``."""
    sizes = {name: size[~np.isnan(size)] for name in dims if len(size := ops.dim(name))}
    return {name: (float(size.min()), float(size.max())) for name, size in sizes.items() if len(size)}


def fit_transfer(part: LearnedPart, rows: TrainingRows, bases: Bases, *, seed: int) -> TransferTrees:
    """Fit trees for devices that were not measured, with intervals from held-out devices and families.

    The bases of a held-out device are the bases of its reference devices, as for a device without
    measurements.
    """
    names = transferable(part, rows.names)
    table, rising_columns = rows.columns(names), rising(part, names)
    if len(rows.devices) < 2 or not table.shape[1]:
        return TransferTrees(None, (), ())
    errors: list[LeftOutError] = []
    residuals: dict[str, list[FloatArray]] = {}
    families: dict[str, list[str]] = {}
    for name, device in sorted(rows.devices.items()):
        families.setdefault(family_name(device), []).append(name)
    # Single devices with siblings that stay in the fit, then whole families.
    tests: list[tuple[tuple[str, ...], bool]] = [
        ((name,), True) for members in families.values() if len(members) > 1 for name in members
    ]
    tests += [(tuple(members), False) for members in families.values()]
    for held_out, has_siblings in tests:
        test = rows.of_devices(held_out)
        fitted = _drawn(~test, _MOST_ROWS, seed)
        if not len(fitted):
            continue
        forest = grow(table[fitted], rows.ratio[fitted], TRANSFER_FORM, seed=seed, rising=rising_columns)
        tested = _drawn(test, _MOST_ROWS_OF_DEVICE * len(held_out), seed)
        tier, ratio = _ratio_of_references(rows.take(tested), bases, held_out, seen=devices_of(rows))
        residual = ratio - forest.predict(table[tested])
        figures = error_figures(np.expm1(-residual))
        errors.append(
            LeftOutError(
                hardware=held_out,
                siblings=has_siblings,
                mape=round(figures["mape"], 6),
                median_ape=round(figures["median_ape"], 6),
                bias=round(figures["bias"], 6),
                n=len(residual),
            )
        )
        residuals.setdefault(tier, []).append(residual)
    # Intervals hold 90 % by extrapolation level. Held-out devices have equal weights, and the interval of a
    # nearer reference device is never the wider one.
    unseen: list[NewDeviceInterval] = []
    low = high = 0.0
    for tier in NEARNESS_LEVELS:
        of_tier = residuals.get(tier, ())
        if of_tier:
            low = min(low, float(np.mean([np.quantile(residual, TAIL) for residual in of_tier])))
            high = max(high, float(np.mean([np.quantile(residual, 1 - TAIL) for residual in of_tier])))
            unseen.append(
                NewDeviceInterval(tier=tier, low=round(low, 6), high=round(high, 6), n=len(of_tier))
            )
    fitted = _drawn(np.ones(len(rows.ratio), np.bool_), 2 * _MOST_ROWS, seed)
    forest = grow(table[fitted], rows.ratio[fitted], TRANSFER_FORM, seed=seed, rising=rising_columns)
    return TransferTrees(forest, tuple(unseen), tuple(errors))


def _ratio_of_references(
    rows: TrainingRows, bases: Bases, held_out: tuple[str, ...], *, seen: Sequence[FittedDevice]
) -> tuple[str, FloatArray]:
    """Return the extrapolation level of held-out devices, and the log of their measured times over their base
    times.

    As for devices without measurements, the base times use the parameters of the reference devices in
    ``seen``.
    """
    others = [device.name for device in seen if device.name not in held_out]
    ratio, tier = np.full(len(rows.ratio), np.nan), ""
    for name in held_out:
        of_device = rows.measured.hardware.where(name)
        device = rows.devices[name]
        references = nearest_devices(device, seen, others)
        tier = NEARNESS_LEVELS[-1] if references is None else references.nearness
        names = others if references is None else references.names
        ratio[of_device] = bases.log_ratio(rows, of_device, device, names)
    return tier, ratio


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
        outside_residual[rows] = ratio - forest.predict(outside.table[rows])
        octaves[rows] = octaves_beyond(reach_of(part.support, inside.measured.ops.take(near)), ops)
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
