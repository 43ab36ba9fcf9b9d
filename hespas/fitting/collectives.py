"""Fits of collectives: a piecewise linear time for each library, operation, number format and layout of
ranks.

The rates of the segments are non-negative, and relative squared errors are minimised. The message sizes at
which the rate changes (knees) are powers of two. They are added one by one as long as they improve the
information criterion. Errors and error bands are of held-out sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hespas.estimators.collective_lines import CollectiveLine, basis, named
from hespas.estimators.collective_links import TUNED, RankLayout, tuned_times
from hespas.fitting.device_forms import Progress
from hespas.fitting.fits import Key, Priority, fit_of, rounded, with_defaults
from hespas.fitting.rows import rows_to_fit
from hespas.fitting.solvers import nonnegative_least_squares, standard_errors
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.hardware.device_fits import SEGMENTS
from hespas.measurements import Measurements

__all__ = ["fit_collectives"]

_MOST_KNEES = 2
_ROWS_PER_SEGMENT = 3
_PENALTY = 0.25
"""Penalty of a knee, relative to the Bayesian information criterion of its two numbers."""
_NOISE = 0.003
"""Relative error below which lines are equally good."""
_COARSE = 1.5
_FOLDS = 5
_FEWEST = 3
_DIMS = ("ranks", "message_bytes")
_NCCL = "nccl "
_VENDORS = ("nccl ", "oneccl ", "rccl ")
_OWN = "custom_"
"""Prefix of a serving framework's own kernels, which are never the default of a program."""


@dataclass(frozen=True, slots=True, eq=False)
class _SizeTimes:
    """Distinct message sizes of a collective on one layout of ranks, and their median times."""

    size: FloatArray
    time_ns: FloatArray


def fit_collectives(
    measured: Measurements | Sequence[Measurements],
    device: Device,
    *,
    seed: int = 0,
    fitted: str = "",
    progress: Progress | None = None,
) -> tuple[Fit, ...]:
    """Fit all collectives of all libraries that the tables have for ``device``.

    Only rows that may be fitted are used. The folds of the held-out error are random, by ``seed``.
    """
    tables = [measured] if isinstance(measured, Measurements) else list(measured)
    fits: dict[Key, Fit] = {}
    parts = [rows_to_fit(table, device) for table in tables]
    parts = [part.take(part.ops.kind.where("collective")) for part in parts]
    for part in parts:
        classes = list(part.ops.classes())
        for done, (labels, rows) in enumerate(classes):
            if progress:
                progress(done, len(classes), " ".join(labels))
            fit = _fit_library(labels, part.take(rows), seed, fitted)
            if fit is not None and (fit.key not in fits or fits[fit.key].samples < fit.samples):
                fits[fit.key] = fit
    ratios = {fit.key: fit for part in parts for fit in _nccl_ratios(part, device, seed, fitted)}
    return with_defaults([*fits.values(), *ratios.values()], _priority)


def _nccl_ratios(rows: Measurements, device: Device, seed: int, fitted: str) -> Iterable[Fit]:
    """Yield a fit for each collective with the ratio of measured time to NCCL's own model: the median over
    the rows of NCCL.
    """
    library = np.array([name.startswith(_NCCL) for name in rows.ops.variant.names], np.bool_)
    rows = rows.take(np.flatnonzero(library[rows.ops.variant.row]))
    for op in rows.ops.op.used():
        of_op = rows.take(rows.ops.op.where(op))
        ops = of_op.ops
        ranks = ops.dim("ranks")
        nodes = np.ceil(ranks / np.maximum(ops.dim("ranks_per_node"), 1))
        predicted_ns = tuned_times(op, ranks, nodes, ops.dim("message_bytes"), device).duration_ns
        is_known = np.isfinite(predicted_ns)
        if is_known.sum() < _FEWEST:
            continue
        times = of_op.duration_ns[is_known]
        ratio = times / predicted_ns[is_known]
        median = rounded(float(np.median(ratio)))
        spread = float(np.std(np.log(ratio))) / np.sqrt(len(ratio))
        fit = fit_of(
            ("collective", op, ANY, ANY),
            TUNED,
            [("ratio", median, median * spread)],
            of_op,
            (predicted_ns[is_known] * median, times),
            dims=_DIMS,
            fitted=fitted,
            seed=seed,
        )
        yield replace(fit, samples=int(is_known.sum()))


def _fit_library(labels: Key, rows: Measurements, seed: int, fitted: str) -> Fit | None:
    """Fit a line for each layout of ranks of one library and collective; return None if there are too few
    sizes.
    """
    generator = np.random.default_rng(seed)
    parameters: list[tuple[str, float, float]] = []
    predicted, times = [np.empty(0)], [np.empty(0)]
    for layout, points in _layouts(rows):
        count = len(points.size)
        if count < _FEWEST:
            continue
        line = _fitted_line(points)
        pairs = zip(named(layout, line), _std_errors(points, line), strict=True)
        parameters += [(name, value, error) for (name, value), error in pairs]
        # The smallest and the largest size are never held out, so that nothing is extrapolated.
        inner: IntArray = generator.permutation(np.arange(1, count - 1))
        if len(inner) < _FEWEST:
            continue
        for part in np.array_split(inner, min(_FOLDS, len(inner))):
            used = np.setdiff1d(np.arange(count), part)
            fold_line = _fitted_line(_SizeTimes(points.size[used], points.time_ns[used]))
            predicted.append(fold_line.time_ns(points.size[part]))
            times.append(points.time_ns[part])
    if not parameters:
        return None
    held_out = np.concatenate(predicted), np.concatenate(times)
    return fit_of(labels, SEGMENTS, parameters, rows, held_out, dims=_DIMS, fitted=fitted, seed=seed)


def _layouts(rows: Measurements) -> Iterable[tuple[RankLayout, _SizeTimes]]:
    """Yield each layout of ranks with its distinct message sizes and their median times."""
    ranks, per_node = rows.ops.dim("ranks"), rows.ops.dim("ranks_per_node")
    nodes = np.where(np.isnan(per_node), 1.0, np.ceil(ranks / np.maximum(per_node, 1)))
    sizes = rows.ops.dim("message_bytes")
    is_known = np.isfinite(ranks) & np.isfinite(sizes)
    for key in np.unique(np.stack((ranks, nodes), axis=1)[is_known], axis=0).tolist():
        of_layout = np.flatnonzero(is_known & (ranks == key[0]) & (nodes == key[1]))
        size, index = np.unique(sizes[of_layout], return_inverse=True)
        order = np.argsort(index.reshape(-1), kind="stable")
        ends = np.cumsum(np.bincount(index.reshape(-1)))[:-1]
        parts = np.split(rows.duration_ns[of_layout][order], ends)
        median = np.array([float(np.median(part)) for part in parts])
        if len(size) > 2 and float(np.median(size[1:] / np.maximum(size[:-1], 1.0))) >= _COARSE:
            # A message never takes longer than a larger one: longer times are outliers.
            median = np.minimum.accumulate(median[::-1])[::-1]
        yield RankLayout(int(key[0]), int(key[1])), _SizeTimes(size, median)


def _fitted_line(points: _SizeTimes) -> CollectiveLine:
    """Return the piecewise linear time of collectives on one layout of ranks, with the best rates. Its knees
    are the message sizes at which a change of the rate improves the information criterion.
    """
    most = min(_MOST_KNEES, max(len(points.size) // _ROWS_PER_SEGMENT - 1, 0))
    low, high = np.log2(max(float(points.size[0]), 1.0)), np.log2(max(float(points.size[-1]), 1.0))
    candidates = [2.0**power for power in range(int(np.floor(low)) + 1, int(np.ceil(high)))]
    best, knees = _cost(points, ()), tuple[float, ...]()
    while len(knees) < most:
        options = [tuple(sorted((*knees, knee))) for knee in candidates if knee not in knees]
        if not options:
            break
        chosen = min((_cost(points, option), option) for option in options)
        for number in range(len(chosen[1])):  # move each knee in turn to its best position
            for knee in candidates:
                if knee in chosen[1]:
                    continue
                moved = tuple(sorted((*chosen[1][:number], knee, *chosen[1][number + 1 :])))
                chosen = min(chosen, (_cost(points, moved), moved))
        if chosen[0] >= best:
            break
        best, knees = chosen
    start, *rates = _solved(points, knees)[0].tolist()
    return CollectiveLine(start, knees, tuple(rates))


def _cost(points: _SizeTimes, knees: tuple[float, ...]) -> float:
    """Return the information criterion of a line with these knees, for errors with a Laplace distribution."""
    error = np.minimum(np.abs(_solved(points, knees)[1]), 0.5)
    count = len(points.size)
    return count * float(np.log(error.mean() + _NOISE)) + _PENALTY * 2 * len(knees) * float(np.log(count))


def _solved(points: _SizeTimes, knees: tuple[float, ...]) -> tuple[FloatArray, FloatArray]:
    """Return the non-negative start and rates of a line with the given knees that minimise the squared
    relative errors. Also return these errors.
    """
    values, error, _ = nonnegative_least_squares(basis(points.size, knees), points.time_ns)
    return values, error


def _std_errors(points: _SizeTimes, line: CollectiveLine) -> list[float]:
    """Return the standard errors of a line's parameters in the order of :func:`named`; NaN for knees."""
    matrix = basis(points.size, line.knees_bytes) / points.time_ns[:, None]
    values = np.array((line.t0_ns, *line.ns_per_byte))
    residual = matrix @ values - 1
    free = len(points.size) - len(values) - len(line.knees_bytes)
    if free <= 0:
        return [np.nan] * (len(values) + len(line.knees_bytes))
    start, *rates = standard_errors(matrix, float(residual @ residual), free).tolist()
    return [start, *(np.nan for _ in line.knees_bytes), *rates]


def _priority(fit: Fit) -> Priority | None:
    """Return the priority of a fit for becoming the default of its operation and number format; None if it
    must not.

    The newest release of a vendor's library comes first, then the library with the most samples. Kernels of a
    serving framework are never the default.
    """
    if fit.form == TUNED or fit.variant.startswith(_OWN):
        return None
    is_vendors = fit.variant.startswith(_VENDORS)
    release = tuple(int(number) for number in re.findall(r"\d+", fit.variant)) if is_vendors else ()
    return is_vendors, release, fit.samples
