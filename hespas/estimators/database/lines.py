"""Interpolation along lines: between the two measurements next to a query that differ from it in one size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray, IntArray

__all__ = ["Line", "row_keys"]

_FAR = 1000.0
"""Further apart than any two logarithms: keeps lines apart in one sorted column."""
_NEAR = 0.5
"""Doublings that count as one step, however fine the grid."""
_NOISE = 0.01
_FEWEST = 8


def row_keys(columns: list[FloatArray], count: int) -> IntArray:
    """One number per row of some columns, equal for equal rows (NaN equals NaN). Shape ``(rows,)``."""
    key = np.full(count, 0x9E3779B97F4A7C15, np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            # Rounding makes sizes that were multiplied and divided again equal to what they were.
            bits = np.where(np.isnan(column), np.nan, np.round(column, 6) + 0.0).view(np.uint64)
            key = (key ^ bits) * np.uint64(0xBF58476D1CE4E5B9)
            key ^= key >> np.uint64(29)
            key *= np.uint64(0x94D049BB133111EB)
            key ^= key >> np.uint64(32)
    return key.view(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """The measurements of a class sorted by line and place on it; columns of shape ``(points,)``.

    ``names`` are the keys of the lines in order; ``place`` is number of line x 1000 + log2 of the axis.
    ``bend`` is by how much the logarithm of a time leaves the chord, per doubling squared, ``noise`` what is
    left where points lie close.
    """

    names: IntArray
    place: FloatArray
    log_time: FloatArray
    grid: FloatArray
    bend: float
    noise: float

    @classmethod
    def of(cls, keys: IntArray, axis: FloatArray, log_time: FloatArray) -> Line:
        """Sort measurements; each point is left out once to see how far chords lead astray."""
        known = np.isfinite(axis) & (axis > 0)
        x: FloatArray = np.log2(axis[known]).astype(np.float64)
        names, number = np.unique(keys[known], return_inverse=True)
        place: FloatArray = number.reshape(-1).astype(np.float64) * _FAR + x
        order = np.argsort(place, kind="stable")
        place, times = place[order], log_time[known][order]
        bend, noise = _bend_and_noise(place, times)
        return cls(names, place, times, np.unique(np.round(x, 9)), bend, noise)

    def between(self, keys: IntArray, axis: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The logarithm of the time at each query and its variance; NaN where the line has no measurement on
        both sides, or none within a step of the grid. Shape ``(queries,)`` each.
        """
        said, variance = np.full(len(keys), np.nan), np.full(len(keys), np.inf)
        if len(self.place) < 2:
            return said, variance
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.log2(axis)
        number = np.minimum(np.searchsorted(self.names, keys), len(self.names) - 1)
        usable = (self.names[number] == keys) & np.isfinite(x)
        place = np.where(usable, number * _FAR + x, 0.0)
        high = np.searchsorted(self.place, place)
        low = high - 1
        usable &= (low >= 0) & (high < len(self.place))
        low, high = np.maximum(low, 0), np.minimum(high, len(self.place) - 1)
        below, above = place - self.place[low], self.place[high] - place
        usable &= (below < _FAR / 2) & (above < _FAR / 2) & self._within_a_step(x, below, above)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = below / (below + above)
            value = self.log_time[low] + share * (self.log_time[high] - self.log_time[low])
        said[usable] = value[usable]
        variance[usable] = (self.noise**2 + (self.bend * below * above) ** 2)[usable]
        return said, variance

    def _within_a_step(self, x: FloatArray, below: FloatArray, above: FloatArray) -> BoolArray:
        """Whether the nearer neighbour is at most one point of the class's grid away."""
        steps = np.arange(len(self.grid), dtype=np.float64)
        here = np.interp(x, self.grid, steps)
        nearer = np.minimum(here - np.interp(x - below, self.grid, steps),
                            np.interp(x + above, self.grid, steps) - here)  # fmt: skip
        return (nearer <= 1 + 1e-6) | (np.minimum(below, above) <= _NEAR)


def _bend_and_noise(place: FloatArray, log_time: FloatArray) -> tuple[float, float]:
    """Medians over the points that have neighbours on both sides."""
    below, above = place[1:-1] - place[:-2], place[2:] - place[1:-1]
    inner = (below < _FAR / 2) & (above < _FAR / 2) & (below > 0) & (above > 0)
    if inner.sum() < _FEWEST:
        return 1.0, _NOISE
    chord = log_time[:-2] + below / (below + above) * (log_time[2:] - log_time[:-2])
    off = np.abs(log_time[1:-1] - chord)[inner]
    spread = (below * above)[inner]
    close = spread <= np.quantile(spread, 0.25)
    noise = max(float(np.median(off[close])), _NOISE)
    bend = float(np.median(np.maximum(off - noise, 0.0) / spread))
    return max(bend, 0.02), noise
