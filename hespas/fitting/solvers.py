"""Least-squares solvers for fits: a robust one for any model, and a non-negative one for linear models.

Measured times have outliers. So an error counts by its square if it is below a scale, and by its size above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import FloatArray

__all__ = ["Optimum", "nonnegative_least_squares", "robust_least_squares", "standard_errors"]


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """Result of a least-squares fit. ``values`` are the best parameters, shape ``(parameters,)``. ``cost`` is
    half the sum of the soft squares of the residuals.

    ``jacobian`` has the derivatives of the residuals, shape ``(residuals, parameters)``.
    """

    values: FloatArray
    jacobian: FloatArray
    cost: float


def robust_least_squares(
    errors: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    scale: float,
    *,
    pulls: Callable[[FloatArray], FloatArray] | None = None,
    bounds: tuple[FloatArray, FloatArray] | None = None,
    most_calls: int | None = None,
) -> Optimum:
    """Return the parameters that minimise the sum of the soft squares of their ``errors``.

    The soft square is 2 scale² (√(1 + (error / scale)²) - 1), the loss ``soft_l1`` of SciPy's
    ``least_squares``. ``pulls`` returns the distances of parameters from expected values, whose plain squares
    are added. ``bounds`` are the least and largest values of the parameters, ``most_calls`` the largest
    number of evaluations.
    """
    from scipy.optimize import least_squares

    limits = bounds or (-np.inf, np.inf)
    with np.errstate(all="ignore"):
        if pulls is None:
            optimum = least_squares(
                errors, start, bounds=limits, loss="soft_l1", f_scale=scale, max_nfev=most_calls
            )
        else:

            def residuals(values: FloatArray) -> FloatArray:
                error = errors(values)
                # The square of this is the soft square of the error.
                soft = error * np.sqrt(2 / (1 + np.sqrt(1 + (error / scale) ** 2)))
                return np.concatenate((soft, pulls(values)))

            optimum = least_squares(residuals, start, bounds=limits, max_nfev=most_calls)
    return Optimum(
        np.asarray(optimum.x, np.float64), np.asarray(optimum.jac, np.float64), float(optimum.cost)
    )


def nonnegative_least_squares(
    columns: FloatArray, duration_ns: FloatArray, *, rounds: int = 1, scale: float = 1e-300
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the non-negative weights of the columns for which the weighted sums fit the measured times best.

    Errors are relative to the times. With several ``rounds``, errors above ``scale`` count by their size
    instead of their square. Also return the relative errors, and the weights of the rows for a further round,
    each of shape ``(rows,)``.
    """
    from scipy.optimize import nnls

    # Columns differ by ten orders of magnitude; without scaling, the solver stops early.
    size = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    relative = columns / size / duration_ns[:, None]
    weight = np.ones(len(duration_ns))
    values, error = np.zeros(columns.shape[1]), -weight
    for _ in range(rounds):
        values = np.asarray(nnls(relative * weight[:, None], weight)[0], np.float64) / size
        error = columns @ values / duration_ns - 1
        weight = 1 / np.sqrt(np.maximum(np.abs(error), scale))
    return values, error, weight


def standard_errors(slopes: FloatArray, square: float, freedom: int) -> FloatArray:
    """Return the standard errors of parameters from the derivatives of the residuals at the optimum.

    ``slopes`` has shape ``(rows, parameters)``; ``square`` is the sum of the squared residuals, ``freedom``
    the degrees of freedom (rows minus parameters).
    """
    size = np.maximum(np.abs(slopes).max(axis=0, initial=0.0), 1e-300)
    scaled: FloatArray = np.asarray(slopes / size, np.float64)
    variance = np.diag(np.linalg.pinv(scaled.T @ scaled)) * square / freedom
    errors: FloatArray = np.sqrt(np.maximum(variance, 0.0)) / size
    return errors
