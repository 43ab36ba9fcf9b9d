"""Lookup table of the measurements of one class of operations on one device: exact and interpolated times.

Interpolation works on measured times divided by a reference time (a fixed start, plus FLOPs and bytes at
their best rates). This ratio varies much less with size than the times. Interpolation goes along lines
between the two measurements that differ from a query in one size only. Without such a pair, a plane through
the nearest measurements is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import combinations
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.operations import KINDS, Operations

__all__ = [
    "BETWEEN",
    "EXACT",
    "NEARBY",
    "SPACES",
    "UNKNOWN",
    "Direction",
    "LookupLine",
    "LookupResult",
    "LookupTable",
    "Space",
    "row_keys",
    "start_and_rates",
    "work_of",
]


@dataclass(frozen=True, slots=True)
class Direction:
    """Direction of interpolation in a measurement table. Along it the coordinate ``axis`` varies and the
    coordinates in ``held`` are equal. All other coordinates are functions of these.
    """

    axis: str
    held: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Coordinates that distinguish operations of a kind.

    ``directions`` are the directions along which times are interpolated. The coordinates in ``curves`` divide
    the measurements into groups (curves); each group has its own reference time (see the module). ``rising``
    is True if a smaller operation is a part of a larger one. On a coarse grid, a time above the time of a
    larger size is then an outlier.
    """

    names: tuple[str, ...]
    directions: tuple[Direction, ...]
    curves: tuple[str, ...] = ()
    rising: bool = False

    def of(self, ops: Operations) -> dict[str, FloatArray]:
        """Return the coordinates of each operation by name, arrays of shape ``(ops,)``; NaN where unknown."""
        return {name: _DERIVED[name](ops) if name in _DERIVED else ops.dim(name) for name in self.names}


def _window(ops: Operations) -> FloatArray:
    """Return the size of the sliding attention window in tokens, derived from the number of attended pairs of
    a causal prompt; 0 without a window.

    A window of w over s tokens leaves w (w + 1) / 2 + (s - w) w pairs.
    """
    length = ops.dim("q_len")
    with np.errstate(invalid="ignore"):
        root = np.sqrt(np.maximum((length + 0.5) ** 2 - 2 * ops.dim("pairs"), 0.0))
    window = np.round(length + 0.5 - root)
    return np.where(window >= length, 0.0, window)


def _group(ops: Operations) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return ops.dim("heads") / ops.dim("kv_heads")


def _nodes(ops: Operations) -> FloatArray:
    """Return the number of nodes over which the ranks of each collective are spread; 1 if ranks per node are
    not stated.
    """
    per_node = ops.dim("ranks_per_node")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isnan(per_node), 1.0, np.ceil(ops.dim("ranks") / per_node))


def _passes(ops: Operations) -> FloatArray:
    """Return the bytes moved per element. This coordinate distinguishes operations that read several operands
    from operations that read one.
    """
    elements = ops.dim("rows") * ops.dim("columns")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.round(ops.bytes_moved / elements, 3)


_DERIVED = MappingProxyType({"window": _window, "group": _group, "nodes": _nodes, "passes": _passes})


def _space(names: str, axes: str, *, curves: tuple[str, ...] = (), rising: bool = False) -> Space:
    """Return an interpolation space. ``names`` and ``axes`` are space-separated names of coordinates. Each of
    ``axes`` gives one direction, in which it varies while all other coordinates are equal.
    """
    every = tuple(names.split())
    directions = tuple(
        Direction(axis, tuple(name for name in every if name != axis)) for axis in axes.split()
    )
    return Space(names=every, directions=directions, curves=curves, rising=rising)


SPACES: Mapping[str, Space] = MappingProxyType(
    {
        "matmul": _space("batch m n k", "m n k batch"),
        "convolution": _space("m n k kernel spatial", "m n k"),
        "attention.context": _space("batch q_len heads group head_dim window", "batch q_len heads group"),
        "attention.generation": _space("batch kv_len heads group head_dim", "batch kv_len heads group"),
        "attention.encoder": _space("batch q_len heads head_dim", "batch q_len heads"),
        "moe": _space(
            "tokens hidden inter topk experts tensor_parallel expert_parallel matrices",
            "tokens expert_parallel tensor_parallel inter",
        ),
        **{
            kind: _space("rows columns passes", "rows columns")
            for kind, dims in KINDS.items()
            if dims == ("rows", "columns")
        },
        "collective": _space(
            "message_bytes ranks nodes", "message_bytes ranks", curves=("ranks", "nodes"), rising=True
        ),
    }
)
"""Kind -> its space. Kinds that are not listed have no lookup table."""


_FAR = 1000.0
"""Offset between lines in one sorted column, larger than any difference of logarithms."""
_NEAR = 0.5
"""Doublings that count as one step on any grid."""
_NOISE = 0.01
_FEWEST_BENT = 8


def row_keys(columns: list[FloatArray], count: int) -> IntArray:
    """Return a key for each row of ``columns``; equal rows have equal keys (NaN equals NaN). Shape
    ``(rows,)``.
    """
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
class LookupLine:
    """Measurements of a class of operations, sorted into lines along one axis; columns of shape
    ``(points,)``.

    ``names`` are the sorted keys of the lines. ``position`` orders all points: 1000 x the index of the line +
    log2 of the size on the axis. ``bend`` is the typical error of linear interpolation [log time] per squared
    distance in doublings. ``noise`` is the scatter of close points.
    """

    names: IntArray
    position: FloatArray
    log_time: FloatArray
    grid: FloatArray
    bend: float
    noise: float

    @classmethod
    def of(cls, keys: IntArray, axis: FloatArray, log_time: FloatArray) -> LookupLine:
        """Sort measurements into lines along one axis. The error of linear interpolation is measured by
        leaving each point out once.
        """
        valid = np.isfinite(axis) & (axis > 0)
        x: FloatArray = np.log2(axis[valid]).astype(np.float64)
        names, number = np.unique(keys[valid], return_inverse=True)
        position: FloatArray = number.reshape(-1).astype(np.float64) * _FAR + x
        order = np.argsort(position, kind="stable")
        position, times = position[order], log_time[valid][order]
        bend, noise = _bend_and_noise(position, times)
        return cls(names, position, times, np.unique(np.round(x, 9)), bend, noise)

    def between(self, keys: IntArray, axis: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the interpolated logarithm of the time of each query, and the variance of this logarithm,
        each of shape ``(queries,)``.

        The time is NaN and the variance infinite if the line has no measurement on both sides of the query,
        or none within a step of the grid.
        """
        log_time, variance = np.full(len(keys), np.nan), np.full(len(keys), np.inf)
        if len(self.position) < 2:
            return log_time, variance
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.log2(axis)
        number = np.minimum(np.searchsorted(self.names, keys), len(self.names) - 1)
        usable = (self.names[number] == keys) & np.isfinite(x)
        position = np.where(usable, number * _FAR + x, 0.0)
        high = np.searchsorted(self.position, position)
        low = high - 1
        usable &= (low >= 0) & (high < len(self.position))
        low, high = np.maximum(low, 0), np.minimum(high, len(self.position) - 1)
        below, above = position - self.position[low], self.position[high] - position
        usable &= (below < _FAR / 2) & (above < _FAR / 2)
        # The nearer neighbour must be at most one point of the class's grid away.
        steps = np.arange(len(self.grid), dtype=np.float64)
        here = np.interp(x, self.grid, steps)
        nearer = np.minimum(
            here - np.interp(x - below, self.grid, steps), np.interp(x + above, self.grid, steps) - here
        )
        usable &= (nearer <= 1 + 1e-6) | (np.minimum(below, above) <= _NEAR)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = below / (below + above)
            value = self.log_time[low] + share * (self.log_time[high] - self.log_time[low])
        log_time[usable] = value[usable]
        variance[usable] = (self.noise**2 + (self.bend * below * above) ** 2)[usable]
        return log_time, variance


def _bend_and_noise(position: FloatArray, log_time: FloatArray) -> tuple[float, float]:
    """Return the curvature and the scatter of log time along lines: medians over the points with a neighbour
    on both sides.
    """
    below, above = position[1:-1] - position[:-2], position[2:] - position[1:-1]
    inner = (below < _FAR / 2) & (above < _FAR / 2) & (below > 0) & (above > 0)
    if inner.sum() < _FEWEST_BENT:
        return 1.0, _NOISE
    chord = log_time[:-2] + below / (below + above) * (log_time[2:] - log_time[:-2])
    off = np.abs(log_time[1:-1] - chord)[inner]
    spread = (below * above)[inner]
    close = spread <= np.quantile(spread, 0.25)
    noise = max(float(np.median(off[close])), _NOISE)
    bend = float(np.median(np.maximum(off - noise, 0.0) / spread))
    return max(bend, 0.02), noise


def work_of(flops: FloatArray, bytes_moved: FloatArray) -> FloatArray:
    """Return the columns 1, FLOPs and bytes, whose weighted sum is a reference time for interpolation; shape
    ``(ops, 3)``. Unknown values count as 0.
    """
    return np.stack((np.ones(len(flops)), np.nan_to_num(flops), np.nan_to_num(bytes_moved)), axis=1)


def start_and_rates(work: FloatArray, duration_ns: FloatArray) -> FloatArray:
    """Return the weights of the columns of :func:`work_of` that fit the measured times best: a start and the
    time per FLOP and per byte. Shape ``(3,)``.

    The weights are non-negative and minimise the squared relative error. All seven subsets of the columns are
    tried, and the best solution without a negative weight is returned.
    """
    scale = np.maximum(work.max(axis=0), 1e-300)
    matrix = work / scale / duration_ns[:, None]
    ones = np.ones(len(duration_ns))
    best, least = np.array([np.median(duration_ns), 0.0, 0.0]), np.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(work.shape[1]), size):
            part = matrix[:, chosen]
            solution: FloatArray = np.asarray(np.linalg.lstsq(part, ones, rcond=None)[0], np.float64)
            left = float(((part @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and solution.any() and left < least:
                best, least = np.zeros(3), left
                best[list(chosen)] = solution / scale[list(chosen)]
    return best


_MOST = 24
_REACH = 1.0
"""Doublings of any size within which a measurement counts as near."""
_FEWEST = 6
_RIDGE = 1e-3


class _Tree(Protocol):
    def query(self, x: FloatArray, k: int, *, p: float) -> tuple[FloatArray, IntArray]: ...


class _Spatial(Protocol):
    def cKDTree(self, data: FloatArray) -> _Tree: ...  # noqa: N802


@dataclass(frozen=True, slots=True, eq=False)
class _Neighbours:
    """Measurements of a class, for interpolation by planes through neighbouring points.

    ``points`` are positions in doublings of the sizes, shape ``(points, axes)``. They are sorted into
    ``blocks``, in which the coordinates named in ``equal`` do not vary. ``log_ratio`` is the logarithm of the
    measured time over the reference time.
    """

    axes: tuple[str, ...]
    equal: tuple[str, ...]
    blocks: IntArray
    starts: IntArray
    points: FloatArray
    log_ratio: FloatArray
    coefficients: FloatArray

    @classmethod
    def of(
        cls, space: Space, coordinates: Mapping[str, FloatArray], log_time: FloatArray, work: FloatArray
    ) -> _Neighbours | None:
        """Sort measurements into blocks of neighbours; return None if there are fewer than the fit of a plane
        needs.
        """
        axes = tuple(dict.fromkeys(direction.axis for direction in space.directions))
        axes = tuple(name for name in axes if len(np.unique(coordinates[name])) > 1)
        if not axes or len(log_time) < _FEWEST:
            return None
        equal = tuple(name for name in space.names if name not in axes)
        coefficients = start_and_rates(work, np.exp(log_time))
        with np.errstate(divide="ignore"):
            points = np.log2(np.stack([coordinates[name] for name in axes], axis=1))
        key = row_keys([coordinates[name] for name in equal], len(log_time))
        order = np.argsort(key, kind="stable")
        blocks, starts = np.unique(key[order], return_index=True)
        return cls(
            axes=axes,
            equal=equal,
            blocks=blocks,
            starts=np.append(starts, len(order)),
            points=points[order],
            log_ratio=(log_time - np.log((work * coefficients).sum(axis=1)))[order],
            coefficients=coefficients,
        )

    def around(
        self, coordinates: Mapping[str, FloatArray], work: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the logarithm of the time of each query, by a plane through its nearest measurements, and
        the half width of the 90 % interval.

        Both are NaN if the measurements do not surround a query closely. Shape ``(queries,)`` each.
        """
        spatial = cast("_Spatial", import_module("scipy.spatial"))
        log_time, half = np.full(len(work), np.nan), np.full(len(work), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            position = np.log2(np.stack([coordinates[name] for name in self.axes], axis=1))
        key = row_keys([coordinates[name] for name in self.equal], len(work))
        number = np.minimum(np.searchsorted(self.blocks, key), len(self.blocks) - 1)
        usable = (self.blocks[number] == key) & np.isfinite(position).all(axis=1)
        for block in np.unique(number[usable]).tolist():
            rows = np.flatnonzero(usable & (number == block))
            points = slice(int(self.starts[block]), int(self.starts[block + 1]))
            if points.stop - points.start < _FEWEST:
                continue
            tree = spatial.cKDTree(self.points[points])
            log_time[rows], half[rows] = _planes(
                tree, position[rows], self.points[points], self.log_ratio[points]
            )
        return log_time + np.log((work * self.coefficients).sum(axis=1)), half


def _planes(
    tree: _Tree, position: FloatArray, points: FloatArray, values: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the value at each position on a plane through the nearest points of ``tree``, and the half width
    of its interval. Nearer points have larger weights.
    """
    count = min(_MOST, len(points))
    distance, index = tree.query(position, k=count, p=np.inf)
    index = index.reshape(len(position), count)
    off = points[index] - position[:, None, :]
    near = distance.reshape(len(position), count) <= _REACH
    # Some near point must be on either side of a position (or on it) along every axis.
    below = ((off <= 1e-9) & near[..., None]).any(axis=1)
    above = ((off >= -1e-9) & near[..., None]).any(axis=1)
    surrounded: BoolArray = np.logical_and.reduce(below & above, axis=1)
    enough = surrounded & (near.sum(axis=1) >= _FEWEST)
    weight = near / (0.05 + (off**2).sum(axis=2))
    matrix = np.concatenate((np.ones((*off.shape[:2], 1)), off), axis=2)
    weighted = matrix * weight[..., None]
    normal = np.einsum("qki,qkj->qij", weighted, matrix)
    scale = np.maximum(weight.sum(axis=1), 1e-12)
    ridge = np.eye(matrix.shape[2]) * _RIDGE
    ridge[0, 0] = 1e-12
    normal += scale[:, None, None] * ridge
    right = np.einsum("qki,qk->qi", weighted, values[index])
    plane: FloatArray = np.asarray(np.linalg.solve(normal, right[..., None]), np.float64)[..., 0]
    left = values[index] - np.einsum("qki,qi->qk", matrix, plane)
    spread = np.sqrt((weight * left**2).sum(axis=1) / scale)
    log_ratio = np.where(enough, plane[:, 0], np.nan)
    return log_ratio, np.where(enough, 0.02 + 1.645 * spread, np.nan)


UNKNOWN, EXACT, BETWEEN, NEARBY = range(4)
"""Source of a time: none, a measurement, two measurements on a line, several measurements around."""

_COARSE = 1.5
"""Ratio of neighbouring sizes from which a time above the time of a larger size is an outlier."""
_EXACT_SHARE = 0.05
"""Half width of a measured time's interval if nothing was measured twice."""
_FEWEST_TESTED = 50
_UNTESTED = 2.0
"""Widening with too few measurements for a test."""


class LookupResult(NamedTuple):
    """Time and 90 % interval of operations [ns], and the method that gave each (a measurement or an
    interpolation). Shape ``(ops,)`` each.
    """

    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    source: IntArray


class _MeasuredSizes(NamedTuple):
    """Distinct sizes in a measurement table: their coordinates, and the logarithms of their times and
    reference times.
    """

    coordinates: Mapping[str, FloatArray]
    log_time: FloatArray
    log_reference: FloatArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LookupTable:
    """Lookup table of one class of operations.

    ``keys`` are the distinct measured sizes, sorted, and ``duration_ns`` their median times. ``curve_names``
    and ``coefficients`` define the reference time of each curve (see :class:`Space`). ``widening`` is the
    factor by which intervals of interpolated times are widened, so that they hold 90 % of left-out
    measurements. 90 % of repeated measurements of a size are within the relative distance ``repeats`` of
    their median.
    """

    space: Space
    samples: int
    keys: IntArray
    duration_ns: FloatArray
    curve_names: IntArray
    coefficients: FloatArray
    lines: tuple[tuple[Direction, LookupLine], ...]
    neighbours: _Neighbours | None
    repeats: float
    widening: float = 1.0

    @classmethod
    def of(cls, space: Space, ops: Operations, duration_ns: FloatArray) -> LookupTable:
        """Build the lookup table of one class of operations. To find the width of intervals, a fifth of the
        sizes is predicted from the others. O(rows log rows).
        """
        bare = cls._sorted(space, ops, duration_ns)
        if len(bare.keys) < _FEWEST_TESTED:
            return replace(bare, widening=_UNTESTED)
        held_out = row_keys(list(space.of(ops).values()), len(ops)) % 5 == 0
        rest = cls._sorted(space, ops.take(np.flatnonzero(~held_out)), duration_ns[~held_out])
        result = rest.look_up(ops.take(np.flatnonzero(held_out)))
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.abs(np.log(result.duration_ns / duration_ns[held_out])) / np.log(
                result.high_ns / result.duration_ns
            )
        off = off[np.isfinite(off)]
        widening = float(np.quantile(off, 0.9)) if len(off) >= _FEWEST_TESTED // 5 else _UNTESTED
        return replace(bare, widening=widening)

    @classmethod
    def _sorted(cls, space: Space, ops: Operations, duration_ns: FloatArray) -> LookupTable:
        """Return a table of the sorted measurements of one class, without widened intervals."""
        coordinates = space.of(ops)
        keys, first, position = np.unique(
            row_keys(list(coordinates.values()), len(ops)), return_index=True, return_inverse=True
        )
        median = _median_by(position.reshape(-1), duration_ns, len(keys))
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
        points = _MeasuredSizes(
            coordinates, np.log(clean), np.log((work * coefficients[number.reshape(-1)]).sum(axis=1))
        )
        lines: list[tuple[Direction, LookupLine]] = []
        for direction in space.directions:
            times = points.log_time
            if _has_reference(space, direction):
                times = points.log_time - points.log_reference
            line_keys = _held(direction, coordinates, len(keys))
            lines.append((direction, LookupLine.of(line_keys, coordinates[direction.axis], times)))
        neighbours = _Neighbours.of(space, coordinates, np.log(clean), work)
        size = position.reshape(-1)
        again = np.bincount(size, minlength=len(median))[size] > 1
        repeats = _EXACT_SHARE
        if again.sum() >= _FEWEST_TESTED:
            repeats = max(float(np.quantile(np.abs(np.log(duration_ns / median[size]))[again], 0.9)), 0.01)
        return cls(
            space=space,
            samples=len(ops),
            keys=keys,
            duration_ns=median,
            repeats=repeats,
            curve_names=curve_names,
            coefficients=coefficients,
            lines=tuple(lines),
            neighbours=neighbours,
        )

    def look_up(self, ops: Operations) -> LookupResult:
        """Return the time of operations of this class, measured or interpolated; NaN if it would have to be
        extrapolated. O(ops log rows).
        """
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
        return LookupResult(duration, duration * np.exp(-half), duration * np.exp(half), source)

    def _between(
        self, coordinates: Mapping[str, FloatArray], work: FloatArray
    ) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return interpolated times, half widths of their intervals [log time], and the method that gave
        each.
        """
        count = len(work)
        keys = row_keys([coordinates[name] for name in self.space.curves], count)
        number = np.minimum(np.searchsorted(self.curve_names, keys), len(self.curve_names) - 1)
        value = (work * self.coefficients[number]).sum(axis=1)
        reference = np.log(np.where(self.curve_names[number] == keys, value, np.nan))  # NaN: unmeasured curve
        weight, total = np.zeros(count), np.zeros(count)
        for direction, line in self.lines:
            line_log_time, variance = line.between(
                _held(direction, coordinates, count), coordinates[direction.axis]
            )
            line_log_time = (
                line_log_time + reference if _has_reference(self.space, direction) else line_log_time
            )
            usable = np.isfinite(line_log_time)
            share = np.where(usable, 1 / variance, 0.0)
            weight += share
            total += np.where(usable, line_log_time, 0.0) * share
        with np.errstate(divide="ignore", invalid="ignore"):
            duration = np.where(weight > 0, np.exp(total / weight), np.nan)
            half = np.where(weight > 0, 1.645 * np.sqrt(1 / weight), np.nan)
        source = np.where(weight > 0, BETWEEN, UNKNOWN).astype(np.int64)
        missing = np.flatnonzero(weight == 0)
        if self.neighbours is not None and len(missing):
            part = {name: column[missing] for name, column in coordinates.items()}
            log_time, width = self.neighbours.around(part, work[missing])
            near = np.isfinite(log_time)
            duration[missing[near]] = np.exp(log_time[near])
            half[missing[near]] = width[near]
            source[missing[near]] = NEARBY
        return duration, half, source


def _has_reference(space: Space, direction: Direction) -> bool:
    """Return True if all points of a line along ``direction`` are on one curve of ``space``, so that they
    have the same reference time.
    """
    return set(space.curves) <= set(direction.held)


def _held(direction: Direction, coordinates: Mapping[str, FloatArray], count: int) -> IntArray:
    return row_keys([coordinates[name] for name in direction.held], count)


def _groups(number: IntArray, count: int) -> list[IntArray]:
    order = np.argsort(number, kind="stable")
    return np.split(order, np.searchsorted(number[order], np.arange(1, count)))


def _median_by(number: IntArray, values: FloatArray, count: int) -> FloatArray:
    """Return the median of ``values`` in each group. ``number`` has the group of each value, ``count`` is the
    number of groups.
    """
    order = np.lexsort((values, number))
    ends = np.searchsorted(number[order], np.arange(count + 1))
    size = np.diff(ends)
    lower = values[order][ends[:-1] + (size - 1) // 2]
    upper = values[order][ends[:-1] + size // 2]
    return np.asarray((lower + upper) / 2, np.float64)


def _without_spikes(space: Space, coordinates: Mapping[str, FloatArray], times: FloatArray) -> FloatArray:
    """Return measured times in which outliers are replaced. On lines with a coarse grid, no time is longer
    than the time of a larger operation; longer times are replaced by that time.
    """
    direction = space.directions[0]
    clean = times.copy()
    number = np.unique(_held(direction, coordinates, len(times)), return_inverse=True)[1].reshape(-1)
    for rows in _groups(number, int(number.max()) + 1):
        order = rows[np.argsort(coordinates[direction.axis][rows])]
        size = coordinates[direction.axis][order]
        if len(order) > 2 and float(np.median(size[1:] / np.maximum(size[:-1], 1))) >= _COARSE:
            clean[order] = np.minimum.accumulate(times[order][::-1])[::-1]
    return clean
