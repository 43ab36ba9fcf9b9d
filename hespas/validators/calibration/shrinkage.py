"""Parameters of few rows: as near to what is expected of them as the rows allow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hespas.graph.columns import FloatArray

__all__ = ["moved_from_expected"]

_SPREAD = 0.25
"""How far single shapes lie from their class (ln units): what makes a prior worth so many shapes."""
_SOFT = 0.1
_LONGEST = 3.0


def moved_from_expected(
    log_ratio: Callable[[FloatArray], FloatArray],
    width: FloatArray,
    weight: FloatArray,
    most_calls: int = 50,
) -> FloatArray:
    """How far the logarithms of parameters move from where they are expected, shape ``(parameters,)``.

    ``log_ratio`` gives ln(predicted / measured) of each row for such a move, ``weight`` is of shape
    ``(rows,)``. Errors count by their square below a tenth and by their size above, relative to the
    measurement where a prediction is too long; moves by their square in ``width``, so that few rows never
    outvote what is expected.
    """
    from scipy.optimize import least_squares

    def residuals(moved: FloatArray) -> FloatArray:
        error = log_ratio(moved)
        error = weight * np.where(error > 0, np.expm1(np.minimum(error, _LONGEST)), error)
        # The square of this is the soft absolute error.
        soft = error * np.sqrt(2 / (1 + np.sqrt(1 + (error / _SOFT) ** 2)))
        return np.concatenate((soft, _SPREAD * moved / width))

    with np.errstate(all="ignore"):
        found = least_squares(residuals, np.zeros(len(width)), max_nfev=most_calls)
    return np.asarray(found.x, np.float64)
