"""Held-out evaluation: folds, predictions of held-out rows, and choices and intervals that follow from their
errors.

A fit is tested on rows that it does not contain. A calibration replaces the earlier prediction only if it is
better on such rows; otherwise its correction shrinks to none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.composite import least_better
from hespas.graph.columns import FloatArray, IntArray

__all__ = [
    "best_share",
    "first_of_best",
    "folds_of",
    "held_out_times",
    "next_value_bound",
    "parts_in_turn",
    "weighted_quantiles",
]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a correction that can be applied, in ascending order."""
_CONFIDENCE = 1.645
"""Standard errors by which a gain must exceed 0: 95 % confidence for a normal distribution."""


def folds_of(group: IntArray, count: int, generator: np.random.Generator) -> IntArray:
    """Return the fold of each row. Groups stay whole, and each of the ``count`` folds has about the same
    number of groups.
    """
    _, number = np.unique(group, return_inverse=True)
    number = number.reshape(-1)
    return (generator.permutation(int(number.max(initial=-1)) + 1) % count)[number]


def parts_in_turn(fold: NDArray[np.integer]) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield two sets of rows for each fold: the rows outside the fold, to fit, and the rows of the fold, to
    test the fit.
    """
    for number in np.unique(fold).tolist():
        yield np.flatnonzero(fold != number), np.flatnonzero(fold == number)


def held_out_times(fold: IntArray, times_of: Callable[[IntArray, IntArray], FloatArray]) -> FloatArray:
    """Return the predicted time of each row by cross-validation, shape ``(rows,)``: a row is predicted by a
    fit to the other folds. NaN if there are no other folds. ``fold`` is the fold of each row.

    ``times_of`` fits the rows of its first argument and predicts the rows of its second.
    """
    times = np.full(len(fold), np.nan)
    for fitted, tested in parts_in_turn(fold):
        if len(fitted):
            times[tested] = times_of(fitted, tested)
    return times


def first_of_best(errors: Sequence[float], rows: float = inf) -> int:
    """Return the index of the first option whose error does not differ from the smallest error by more than
    the uncertainty of errors measured on ``rows`` rows.

    Options are in the order of preference: no fit first, then the simplest fit. Unknown errors (NaN) are
    worse than any other.
    """
    known = np.nan_to_num(np.array(errors, np.float64), nan=inf)
    return int(np.flatnonzero(least_better(rows) * known <= known.min())[0])


def best_share(
    error: FloatArray,
    correction: FloatArray,
    weight: FloatArray,
    units: NDArray[np.str_],
    confidence: float = _CONFIDENCE,
) -> float:
    """Return the fraction of corrections to apply: the fraction with the greatest reliable gain on held-out
    rows, or 0.

    ``error`` and ``correction`` are logarithms of factors of held-out rows, whose ``weight`` has the sum 1.
    Rows of one unit (equal text in ``units``) have similar errors. The reliable gain is the mean reduction of
    errors, less ``confidence`` standard errors of this mean over units.
    """
    errors = np.abs(np.expm1(np.multiply.outer(_SHARES, correction) - error))
    gain = errors[0] - errors
    _, number = np.unique(units, return_inverse=True)
    unit = number.reshape(-1)
    unit_weight = np.bincount(unit, weight)
    spread = float((unit_weight**2).sum())
    if spread >= 1.0:
        return 0.0
    mean = gain @ weight
    unit_gain = np.array([np.bincount(unit, weight * row) for row in gain]) / np.maximum(unit_weight, 1e-300)
    std_error = np.sqrt((unit_weight**2 * (unit_gain - mean[:, None]) ** 2).sum(axis=1) / (1.0 - spread))
    return _SHARES[int(np.argmax(mean - confidence * std_error))]


_SIDE = 0.95
"""Probability of each side of an interval of 90 %."""


def next_value_bound(values: FloatArray, weight: FloatArray | None = None) -> float:
    """Return an upper bound of a further value, of weight 1, that holds with a probability of 95 %.

    It is an order statistic of ``values`` (split conformal prediction: Papadopoulos et al. 2002; weights of
    dissimilar samples: Tibshirani et al., "Conformal prediction under covariate shift", NeurIPS 2019). If the
    sample is too small for such a bound, it is the largest value. Values of weight 0 do not count. Without
    ``weight``, all weights are 1.
    """
    weight = np.ones(len(values)) if weight is None else weight
    values, weight = values[weight > 0], weight[weight > 0]
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weight[order])
    is_enough = below >= _SIDE * (below[-1] + 1)
    return float(values[order][int(is_enough.argmax()) if is_enough.any() else -1])


def weighted_quantiles(values: FloatArray, weights: FloatArray) -> tuple[float, float]:
    """Return the two ends of an interval that holds 90 % of the values, whose ``weights`` have the sum 1.

    They are quantiles. Half the weight of one more, unseen value is added at each end.
    """
    order = np.argsort(values)
    place = np.cumsum(weights[order]) - weights[order] / 2
    margin = float((weights**2).sum()) / 2
    ends = max(1 - _SIDE - margin, 0.0), min(_SIDE + margin, 1.0)
    low, high = np.interp(ends, place, values[order]).tolist()
    return low, high
