"""Across devices: does an estimator name the faster one, and by how much?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import nan

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.fitting import kendall_tau
from hespas.validators.accuracy.statistics import unique_shapes

__all__ = ["SpeedUp", "speed_ups"]

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


def speed_ups(cases: Sequence[Cases]) -> list[SpeedUp]:
    """One row per pair of devices and estimator; none where the devices share no shape."""
    by_device: dict[str, list[Cases]] = {}
    for each in cases:
        by_device.setdefault(each.hardware, []).append(each)
    rows: list[SpeedUp] = []
    for one, two in combinations(by_device, 2):
        names = [
            prediction.estimator
            for prediction in by_device[one][0].predictions
            if any(prediction.estimator == other.estimator for other in by_device[two][0].predictions)
        ]
        for name in names:
            first, second = _by_shape(by_device[one], name), _by_shape(by_device[two], name)
            shared = [text for text in first if text in second]
            if shared:
                left = np.array([first[text] for text in shared])
                right = np.array([second[text] for text in shared])
                rows.append(_compare(name, one, two, left, right))
    return rows


def _by_shape(cases: Sequence[Cases], estimator: str) -> dict[str, tuple[float, float]]:
    """Predicted and measured time of each shape on one device; the first source that has it."""
    found: dict[str, tuple[float, float]] = {}
    for each in cases:
        said = next((p.duration_ns for p in each.predictions if p.estimator == estimator), None)
        if said is None:
            continue
        predicted, measured, rows = unique_shapes(said, each.measured_ns, each.shape)
        numbers: list[int] = rows.tolist()
        for row, say, real in zip(numbers, predicted.tolist(), measured.tolist(), strict=True):
            if say > 0 and real > 0:
                found.setdefault(each.shapes[row], (say, real))
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
