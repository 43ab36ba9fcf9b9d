"""Across devices: does an estimator name the faster one, and by how much?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import nan

import numpy as np

from hespas.graph.columns import FloatArray, IntArray
from hespas.validators.accuracy.cases import Cases, shared_shapes
from hespas.validators.accuracy.fitting import kendall_tau
from hespas.validators.accuracy.statistics import unique_shapes

__all__ = ["ShapeSpeedUp", "SpeedUp", "speed_up_rows", "speed_ups"]

_LONG_NS = 20_000.0
"""Shapes above 20 us on both devices are listed apart: below, launches decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """Over ``n`` shapes measured on both devices. ``sign`` is the share whose faster device is named right
    (``sign_long``: among the ``n_long`` shapes above 20 us); ``median_error`` that of the ratio of times,
    |predicted / measured - 1|; ``rank`` Kendall's tau of predicted and measured ratios;
    ``constant_error`` and ``constant_sign`` what one ratio for all shapes would reach.
    """

    estimator: str
    hardware: str
    other: str
    n: int
    n_long: int
    sign: float
    sign_long: float
    median_error: float
    rank: float
    constant_error: float
    constant_sign: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShapeSpeedUp:
    """One shape on two devices: times on each; ``case`` is its first one on ``hardware``."""

    estimator: str
    hardware: str
    other: str
    cases: Cases
    case: int
    predicted_ns: tuple[float, float]
    measured_ns: tuple[float, float]


def speed_ups(cases: Sequence[Cases]) -> list[SpeedUp]:
    """One row per pair of devices and estimator; none where the devices share no shape."""
    by_device = _by_device(cases)
    names = _names(by_device)
    pairs = list(combinations(by_device, 2))
    found: dict[tuple[str, str, str], SpeedUp] = {}
    for name in dict.fromkeys(chain.from_iterable(names.values())):  # what one says stands in memory at once
        tables = {
            device: _by_shape(group, name) for device, group in by_device.items() if name in names[device]
        }
        for one, two in pairs:
            if one not in tables or two not in tables:
                continue
            left, right = tables[one], tables[two]
            order, paired = _paired(left, right)
            if len(order):
                found[one, two, name] = _compare(name, one, two, left[order, 1:], right[paired, 1:])
    return [found[one, two, name] for one, two in pairs for name in names[one] if (one, two, name) in found]


def speed_up_rows(cases: Sequence[Cases]) -> Iterator[ShapeSpeedUp]:
    """Each shape that two devices measured, by pair and estimator, as the first device has them."""
    by_device = _by_device(cases)
    names = _names(by_device)
    places = {device: _places(group) for device, group in by_device.items()}
    for one, two in combinations(by_device, 2):
        for name in (each for each in names[one] if each in names[two]):
            left, right = _by_shape(by_device[one], name), _by_shape(by_device[two], name)
            order, paired = _paired(left, right)
            for mine, theirs in zip(left[order].tolist(), right[paired].tolist(), strict=True):
                group, case = places[one][int(mine[0])]
                yield ShapeSpeedUp(
                    estimator=name,
                    hardware=one,
                    other=two,
                    cases=group,
                    case=case,
                    predicted_ns=(mine[1], theirs[1]),
                    measured_ns=(mine[2], theirs[2]),
                )


def _by_device(cases: Sequence[Cases]) -> dict[str, list[tuple[Cases, IntArray]]]:
    """Sources and their shared shape numbers, by device; empty where there is one device only."""
    by_device: dict[str, list[tuple[Cases, IntArray]]] = {}
    if len({each.hardware for each in cases}) < 2:
        return by_device
    shape = shared_shapes(cases)
    bounds = np.cumsum([0, *(len(each) for each in cases)])
    for each, start in zip(cases, bounds.tolist(), strict=False):
        by_device.setdefault(each.hardware, []).append((each, shape[start : start + len(each)]))
    return by_device


def _names(by_device: Mapping[str, Sequence[tuple[Cases, IntArray]]]) -> dict[str, list[str]]:
    """The estimators that speak of each device."""
    return {
        device: list(dict.fromkeys(said.estimator for said in group[0][0].predictions))
        for device, group in by_device.items()
    }


def _places(group: Sequence[tuple[Cases, IntArray]]) -> dict[int, tuple[Cases, int]]:
    """The first case of each shape."""
    found: dict[int, tuple[Cases, int]] = {}
    for each, shape in group:
        numbers, first = np.unique(shape, return_index=True)
        for number, place in zip(numbers.tolist(), first.tolist(), strict=True):
            found.setdefault(number, (each, place))
    return found


def _paired(left: FloatArray, right: FloatArray) -> tuple[IntArray, IntArray]:
    """Rows of both tables that are of one shape, in the order of the first."""
    _, first, second = np.intersect1d(left[:, 0], right[:, 0], return_indices=True)
    return np.sort(first), second[np.argsort(first)]


def _by_shape(cases: Sequence[tuple[Cases, IntArray]], estimator: str) -> FloatArray:
    """Shape, predicted and measured time on one device, shape ``(shapes, 3)``; of the first source that has
    it.
    """
    parts = [np.empty((0, 3))]
    for each, shape in cases:
        said = next((p.duration_ns for p in each.predictions if p.estimator == estimator), None)
        if said is not None and len(each):
            predicted, measured, distinct = unique_shapes(said, each.measured_ns, shape)
            known = (predicted > 0) & (measured > 0)
            parts.append(np.stack((distinct.astype(np.float64), predicted, measured), axis=1)[known])
    rows = np.concatenate(parts)
    _, first = np.unique(rows[:, 0], return_index=True)
    found: FloatArray = rows[np.sort(first)]
    return found


def _compare(name: str, one: str, two: str, left: FloatArray, right: FloatArray) -> SpeedUp:
    predicted, measured = np.log(right[:, 0] / left[:, 0]), np.log(right[:, 1] / left[:, 1])
    long = (left[:, 1] > _LONG_NS) & (right[:, 1] > _LONG_NS)
    right_sign = np.sign(predicted) == np.sign(measured)
    constant = float(np.median(measured))
    return SpeedUp(
        estimator=name,
        hardware=one,
        other=two,
        n=len(left),
        n_long=int(long.sum()),
        sign=float(right_sign.mean()),
        sign_long=float(right_sign[long].mean()) if long.any() else nan,
        median_error=float(np.median(np.abs(np.exp(predicted - measured) - 1))),
        rank=kendall_tau(predicted, measured),
        constant_error=float(np.median(np.abs(np.exp(constant - measured) - 1))),
        constant_sign=float((np.sign(constant) == np.sign(measured)).mean()),
    )
