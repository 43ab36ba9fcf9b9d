"""Cost labels of generated graphs, from a regression on the training graphs.

The model is a kernel ridge regression of the logarithm of the cost. Its kernel is the sum of a linear kernel
of the graphs' descriptors and a local kernel of their star distance
(:mod:`hespas.generators.synth.features`). Graphs of equal structure are one row with their mean logarithm.
The kernel width and the penalty with the least leave-one-out error are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.generators.synth.features import StarTable, descriptors
from hespas.generators.synth.sequences import TypedDag
from hespas.graph.columns import FloatArray

__all__ = ["CostLabels"]

_WIDTHS = (0.4, 0.8)
_PENALTIES = (0.5, 1.5, 5.0)
_LINEAR_WEIGHT = 10.0


class CostLabels:
    """Regression of costs. ``costs`` has the positive costs of all training graphs with the structure of each
    graph in ``structures``. ``error`` is the leave-one-out error of the logarithm (root mean square).
    """

    def __init__(
        self, structures: Sequence[TypedDag], costs: Sequence[Sequence[float]], stars: StarTable
    ) -> None:
        logs = [np.log(row) for row in costs]
        means = np.array([row.mean() for row in logs])
        counts = np.array([len(row) for row in logs])
        self._mean = float(np.average(means, weights=counts))
        self._num_types = 1 + max(int(dag.types.max()) for dag in structures)
        table = descriptors(structures, self._num_types)
        self._centre = np.average(table, axis=0, weights=counts)
        spread = np.sqrt(np.average((table - self._centre) ** 2, axis=0, weights=counts))
        self._scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0)
        scaled = (table - self._centre) * self._scale
        linear = _LINEAR_WEIGHT / scaled.shape[1] * scaled @ scaled.T
        distances = stars.matrix(structures)
        least = np.inf
        for width in _WIDTHS:
            kernel = linear + np.exp(-distances / width)
            for penalty in _PENALTIES:
                inverse = np.asarray(np.linalg.inv(kernel + np.diag(penalty / counts)), np.float64)
                weights = inverse @ (means - self._mean)
                error = float(np.average((weights / np.diag(inverse)) ** 2, weights=counts))
                if error < least:
                    least, self._width, self._weights = error, width, weights
        self._slope = _LINEAR_WEIGHT / scaled.shape[1] * scaled.T @ self._weights
        self._lowest = min(float(row.min()) for row in logs)
        self._highest = max(float(row.max()) for row in logs)
        self.error = max(float(np.sqrt(least)), 1e-6)

    def log_cost(self, dag: TypedDag, distances: FloatArray) -> float:
        """Return the expected logarithm of the cost of a graph with these distances from the structures. It
        is within a factor of e of the training costs.
        """
        scaled = (descriptors([dag], self._num_types)[0] - self._centre) * self._scale
        value = self._mean + float(scaled @ self._slope + np.exp(-distances / self._width) @ self._weights)
        return min(max(value, self._lowest - 1.0), self._highest + 1.0)
