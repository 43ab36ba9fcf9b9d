"""The measurements of one class of operations on one device, looked up exactly and interpolated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hespas.estimators.database.coordinates import Move, Space
from hespas.estimators.database.lines import Line, row_keys
from hespas.estimators.database.neighbours import Neighbours
from hespas.estimators.database.reference import start_and_rates, work_of
from hespas.estimators.operations import Operations
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["BETWEEN", "EXACT", "NEARBY", "NOWHERE", "Said", "Shelf"]

NOWHERE, EXACT, BETWEEN, NEARBY = range(4)
"""Where a time is from: nowhere, a measurement, between two on a line, from several around."""

_COARSE = 1.5
"""Ratio of neighbouring sizes from which a time above that of a larger size is an outlier."""
_EXACT_SHARE = 0.05
"""Half width of a measured time's interval where nothing was measured twice."""
_FEWEST_TESTED = 50
_UNTESTED = 2.0
"""Widening where there are too few measurements to tell."""


class Said(NamedTuple):
    """Time and 90 % interval of operations [ns], and where each is from. Shape ``(ops,)`` each."""

    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    source: IntArray


class _Point(NamedTuple):
    """Coordinates and logarithms of distinct measured sizes."""

    coordinates: Mapping[str, FloatArray]
    log_time: FloatArray
    log_reference: FloatArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Shelf:
    """Built once per class. ``keys`` are the distinct measured sizes, sorted; ``duration_ns`` their median
    times. ``curve_names`` and ``coefficients`` are the references; ``widening`` is what intervals between
    measurements are stretched by to hold 90 %, ``repeats`` by how much nine in ten repeats of a
    size lie off their median.
    """

    space: Space
    samples: int
    keys: IntArray
    duration_ns: FloatArray
    curve_names: IntArray
    coefficients: FloatArray
    lines: tuple[tuple[Move, Line], ...]
    neighbours: Neighbours | None
    repeats: float
    widening: float = 1.0

    @classmethod
    def of(cls, space: Space, ops: Operations, duration_ns: FloatArray) -> Shelf:
        """Sort the measurements of one class, and see how wide intervals must be: a fifth of the sizes is
        asked of the rest. O(rows log rows).
        """
        bare = cls._sorted(space, ops, duration_ns)
        if len(bare.keys) < _FEWEST_TESTED:
            return replace(bare, widening=_UNTESTED)
        asked = row_keys(list(space.of(ops).values()), len(ops)) % 5 == 0
        rest = cls._sorted(space, ops.take(np.flatnonzero(~asked)), duration_ns[~asked])
        said = rest.look_up(ops.take(np.flatnonzero(asked)))
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.abs(np.log(said.duration_ns / duration_ns[asked])) / np.log(
                said.high_ns / said.duration_ns
            )
        off = off[np.isfinite(off)]
        widening = float(np.quantile(off, 0.9)) if len(off) >= _FEWEST_TESTED // 5 else _UNTESTED
        return replace(bare, widening=widening)

    @classmethod
    def _sorted(cls, space: Space, ops: Operations, duration_ns: FloatArray) -> Shelf:
        coordinates = space.of(ops)
        keys, first, place = np.unique(
            row_keys(list(coordinates.values()), len(ops)), return_index=True, return_inverse=True
        )
        median = _median_by(place.reshape(-1), duration_ns, len(keys))
        coordinates = {name: column[first] for name, column in coordinates.items()}
        work = work_of(ops.flops[first], ops.bytes_moved[first])
        curve = row_keys([coordinates[name] for name in space.curves], len(keys))
        curve_names, number = np.unique(curve, return_inverse=True)
        coefficients = np.array(
            [
                start_and_rates(work[mine], median[mine])
                for mine in _groups(number.reshape(-1), len(curve_names))
            ]
        )
        clean = _without_spikes(space, coordinates, median) if space.rising else median
        points = _Point(
            coordinates, np.log(clean), np.log((work * coefficients[number.reshape(-1)]).sum(axis=1))
        )
        lines = tuple((move, _line(space, move, points)) for move in space.moves)
        neighbours = Neighbours.of(space, coordinates, np.log(clean), work)
        return cls(
            space=space,
            samples=len(ops),
            keys=keys,
            duration_ns=median,
            repeats=_repeats(place.reshape(-1), duration_ns, median),
            curve_names=curve_names,
            coefficients=coefficients,
            lines=lines,
            neighbours=neighbours,
        )

    def look_up(self, ops: Operations) -> Said:
        """The time of operations of this class; NaN where it would be extrapolated. O(ops log rows)."""
        coordinates = self.space.of(ops)
        keys = row_keys(list(coordinates.values()), len(ops))
        work = work_of(ops.flops, ops.bytes_moved)
        duration, half, source = self._between(coordinates, work)
        half *= self.widening
        exact = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        is_exact = self.keys[exact] == keys
        duration[is_exact] = self.duration_ns[exact[is_exact]]
        source[is_exact] = EXACT
        half[is_exact] = self.repeats
        return Said(duration, duration * np.exp(-half), duration * np.exp(half), source)

    def _between(
        self, coordinates: Mapping[str, FloatArray], work: FloatArray
    ) -> tuple[FloatArray, FloatArray, IntArray]:
        """Times between measurements, half widths of the logarithm's interval, and where they are from."""
        count = len(work)
        reference = self._log_reference(coordinates, work)
        weight, total = np.zeros(count), np.zeros(count)
        for move, line in self.lines:
            said, variance = line.between(_held(move, coordinates, count), coordinates[move.axis])
            said = said + reference if _has_reference(self.space, move) else said
            usable = np.isfinite(said)
            share = np.where(usable, 1 / variance, 0.0)
            weight += share
            total += np.where(usable, said, 0.0) * share
        with np.errstate(divide="ignore", invalid="ignore"):
            duration = np.where(weight > 0, np.exp(total / weight), np.nan)
            half = np.where(weight > 0, 1.645 * np.sqrt(1 / weight), np.nan)
        source = np.where(weight > 0, BETWEEN, NOWHERE).astype(np.int64)
        missing = np.flatnonzero(weight == 0)
        if self.neighbours is not None and len(missing):
            part = {name: column[missing] for name, column in coordinates.items()}
            log_time, width = self.neighbours.around(part, work[missing])
            found = np.isfinite(log_time)
            duration[missing[found]] = np.exp(log_time[found])
            half[missing[found]] = width[found]
            source[missing[found]] = NEARBY
        return duration, half, source

    def _log_reference(self, coordinates: Mapping[str, FloatArray], work: FloatArray) -> FloatArray:
        """The reference of each query's curve; NaN where nothing of its curve was measured."""
        keys = row_keys([coordinates[name] for name in self.space.curves], len(work))
        number = np.minimum(np.searchsorted(self.curve_names, keys), len(self.curve_names) - 1)
        value = (work * self.coefficients[number]).sum(axis=1)
        return np.log(np.where(self.curve_names[number] == keys, value, np.nan))


def _has_reference(space: Space, move: Move) -> bool:
    """Whether a line stays on one curve, so that one reference holds for all of it."""
    return set(space.curves) <= set(move.held)


def _held(move: Move, coordinates: Mapping[str, FloatArray], count: int) -> IntArray:
    return row_keys([coordinates[name] for name in move.held], count)


def _line(space: Space, move: Move, points: _Point) -> Line:
    times = points.log_time - points.log_reference if _has_reference(space, move) else points.log_time
    return Line.of(
        _held(move, points.coordinates, len(points.log_time)), points.coordinates[move.axis], times
    )


def _groups(number: IntArray, count: int) -> list[IntArray]:
    order = np.argsort(number, kind="stable")
    return np.split(order, np.searchsorted(number[order], np.arange(1, count)))


def _median_by(number: IntArray, values: FloatArray, count: int) -> FloatArray:
    """The median of the values of each number."""
    order = np.lexsort((values, number))
    ends = np.searchsorted(number[order], np.arange(count + 1))
    size = np.diff(ends)
    lower = values[order][ends[:-1] + (size - 1) // 2]
    upper = values[order][ends[:-1] + size // 2]
    return np.asarray((lower + upper) / 2, np.float64)


def _repeats(number: IntArray, values: FloatArray, median: FloatArray) -> float:
    """How far repeats lie from their median, as a logarithm; a guess where nothing was repeated."""
    again = np.bincount(number, minlength=len(median))[number] > 1
    if again.sum() < _FEWEST_TESTED:
        return _EXACT_SHARE
    return max(float(np.quantile(np.abs(np.log(values / median[number]))[again], 0.9)), 0.01)


def _without_spikes(space: Space, coordinates: Mapping[str, FloatArray], times: FloatArray) -> FloatArray:
    """Times no longer than those of the next larger sizes, where the grid is coarse."""
    move = space.moves[0]
    clean = times.copy()
    number = np.unique(_held(move, coordinates, len(times)), return_inverse=True)[1].reshape(-1)
    for mine in _groups(number, int(number.max()) + 1):
        order = mine[np.argsort(coordinates[move.axis][mine])]
        size = coordinates[move.axis][order]
        if len(order) > 2 and float(np.median(size[1:] / np.maximum(size[:-1], 1))) >= _COARSE:
            clean[order] = np.minimum.accumulate(times[order][::-1])[::-1]
    return clean
