"""Intervals from residuals: bounds that one more value of the same kind keeps with a given probability."""

from __future__ import annotations

import numpy as np

from hespas.graph.columns import FloatArray

__all__ = ["next_value_bound", "weighted_quantiles"]

_SIDE = 0.95
"""Probability of each side of an interval of 90 %."""


def next_value_bound(values: FloatArray, weight: FloatArray | None = None) -> float:
    """Return the value that one more value, of weight 1, does not exceed with a probability of 95 %.

    It is an order statistic (split conformal prediction: Papadopoulos et al. 2002; weights of dissimilar
    samples: Tibshirani et al., "Conformal prediction under covariate shift", NeurIPS 2019), or the largest
    value if the sample is too small for such a bound. Values of weight 0 do not count. Without ``weight``,
    all weights are 1.
    """
    weight = np.ones(len(values)) if weight is None else weight
    values, weight = values[weight > 0], weight[weight > 0]
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weight[order])
    is_enough = below >= _SIDE * (below[-1] + 1)
    return float(values[order][int(is_enough.argmax()) if is_enough.any() else -1])


def weighted_quantiles(values: FloatArray, weights: FloatArray) -> tuple[float, float]:
    """Return the ends of the interval of 90 % of some values, whose ``weights`` have the sum 1.

    They are quantiles, wider by half the weight of an unknown value next to each value.
    """
    order = np.argsort(values)
    place = np.cumsum(weights[order]) - weights[order] / 2
    margin = float((weights**2).sum()) / 2
    ends = max(1 - _SIDE - margin, 0.0), min(_SIDE + margin, 1.0)
    low, high = np.interp(ends, place, values[order]).tolist()
    return low, high
