"""Collectives fitted: for each library, operation, number format and number of ranks a start and segments.

Relative least squares with non-negative rates; knees are powers of two, taken one by one as long as they pay
for themselves. Errors and bands are of sizes that the predicting fit did not see.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hespas.estimators.collective_lines import Line, basis, named
from hespas.estimators.collective_links import TUNED, Layout, tuned_times
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.hardware.device_fits import SEGMENTS
from hespas.measurements import Measurements
from hespas.validators.calibration.fit_device import Key, Progress, fit_of, rounded, rows_to_fit

__all__ = ["fit_collectives"]

_MOST_KNEES = 2
_ROWS_PER_SEGMENT = 3
_PENALTY = 0.25
"""Of each knee, in units of its two numbers' Bayesian information."""
_FLOOR = 0.003
"""Relative error below which lines are alike."""
_COARSE = 1.5
_FOLDS = 5
_FEWEST = 3
_DIMS = ("ranks", "message_bytes")
_NCCL = "nccl "
_VENDORS = ("nccl ", "oneccl ", "rccl ")
_OWN = "custom_"
"""A serving framework's own kernels: no program's default."""


@dataclass(frozen=True, slots=True, eq=False)
class _Points:
    """Distinct sizes of one layout and their median times."""

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
    """The fits of every library and collective that the tables hold for ``device``. Only rows that may be
    fitted enter. Nothing is drawn at random but the folds of the held-out error, by ``seed``.
    """
    tables = [measured] if isinstance(measured, Measurements) else list(measured)
    fits: dict[Key, Fit] = {}
    parts = [rows_to_fit(table, device) for table in tables]
    parts = [part.take(part.ops.kind.where("collective")) for part in parts]
    for mine in parts:
        classes = list(mine.ops.classes())
        for done, (labels, rows) in enumerate(classes):
            if progress:
                progress(done, len(classes), " ".join(labels))
            fit = _fit(labels, mine.take(rows), seed, fitted)
            if fit is not None and (fit.key not in fits or fits[fit.key].samples < fit.samples):
                fits[fit.key] = fit
    ratios = [fit for part in parts for fit in _ratios(part, device, seed, fitted)]
    return _with_defaults([*fits.values(), *{fit.key: fit for fit in ratios}.values()])


def _ratios(rows: Measurements, device: Device, seed: int, fitted: str) -> Iterable[Fit]:
    """For each collective what NCCL's own model has to be multiplied by: the median over NCCL's rows."""
    library = np.array([name.startswith(_NCCL) for name in rows.ops.variant.names], np.bool_)
    rows = rows.take(np.flatnonzero(library[rows.ops.variant.row]))
    for op in rows.ops.op.used():
        mine = rows.take(rows.ops.op.where(op))
        ops = mine.ops
        ranks = ops.dim("ranks")
        nodes = np.ceil(ranks / np.maximum(ops.dim("ranks_per_node"), 1))
        predicted_ns = tuned_times(op, ranks, nodes, ops.dim("message_bytes"), device).duration_ns
        known = np.isfinite(predicted_ns)
        if known.sum() < _FEWEST:
            continue
        ratio, times = mine.duration_ns[known] / predicted_ns[known], mine.duration_ns[known]
        middle = rounded(float(np.median(ratio)))
        spread = float(np.std(np.log(ratio))) / np.sqrt(len(ratio))
        fit = fit_of(
            ("collective", op, ANY, ANY),
            TUNED,
            [("ratio", middle, middle * spread)],
            mine,
            (predicted_ns[known] * middle, times),
            dims=_DIMS,
            fitted=fitted,
            seed=seed,
        )
        yield replace(fit, samples=int(known.sum()))


def _fit(labels: Key, rows: Measurements, seed: int, fitted: str) -> Fit | None:
    generator = np.random.default_rng(seed)
    parameters: list[tuple[str, float, float]] = []
    predicted, times = [np.empty(0)], [np.empty(0)]
    layouts = [(layout, points) for layout, points in _layouts(rows) if len(points.size) >= _FEWEST]
    if not layouts:
        return None
    for layout, points in layouts:
        line = _line(points)
        pairs = zip(named(layout, line), _std_errors(points, line), strict=True)
        parameters += [(name, value, error) for (name, value), error in pairs]
        for seen, unseen in _folds(points, generator):
            predicted.append(_line(seen).time_ns(unseen.size))
            times.append(unseen.time_ns)
    held_out = np.concatenate(predicted), np.concatenate(times)
    return fit_of(labels, SEGMENTS, parameters, rows, held_out, dims=_DIMS, fitted=fitted, seed=seed)


def _layouts(rows: Measurements) -> Iterable[tuple[Layout, _Points]]:
    """Distinct sizes of each number of ranks and nodes."""
    ranks, per_node = rows.ops.dim("ranks"), rows.ops.dim("ranks_per_node")
    nodes = np.where(np.isnan(per_node), 1.0, np.ceil(ranks / np.maximum(per_node, 1)))
    sizes = rows.ops.dim("message_bytes")
    known = np.isfinite(ranks) & np.isfinite(sizes)
    for key in np.unique(np.stack((ranks, nodes), axis=1)[known], axis=0).tolist():
        mine = np.flatnonzero(known & (ranks == key[0]) & (nodes == key[1]))
        yield Layout(int(key[0]), int(key[1])), _points(sizes[mine], rows.duration_ns[mine])


def _points(sizes: FloatArray, times: FloatArray) -> _Points:
    size, place = np.unique(sizes, return_inverse=True)
    order = np.argsort(place.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(place.reshape(-1)))[:-1]
    middle = np.array([float(np.median(part)) for part in np.split(times[order], ends)])
    coarse = len(size) > 2 and float(np.median(size[1:] / np.maximum(size[:-1], 1.0))) >= _COARSE
    # What is sent in a larger message could be sent as one: a time above that is an outlier.
    return _Points(size, np.minimum.accumulate(middle[::-1])[::-1] if coarse else middle)


def _line(points: _Points) -> Line:
    """The knees that pay for themselves, and the best rates between them."""
    most = min(_MOST_KNEES, max(len(points.size) // _ROWS_PER_SEGMENT - 1, 0))
    best, knees = _cost(points, ()), tuple[float, ...]()
    candidates = _knees(points)
    while len(knees) < most:
        tried = [
            (_cost(points, added), added)
            for knee in candidates
            if knee not in knees
            for added in (tuple(sorted((*knees, knee))),)
        ]
        if not tried:
            break
        cost, chosen = _moved(points, min(tried), candidates)
        if cost >= best:
            break
        best, knees = cost, chosen
    start, *rates = _solved(points, knees)[0].tolist()
    return Line(start, knees, tuple(rates))


def _knees(points: _Points) -> list[float]:
    low, high = np.log2(max(float(points.size[0]), 1.0)), np.log2(max(float(points.size[-1]), 1.0))
    return [2.0**power for power in range(int(np.floor(low)) + 1, int(np.ceil(high)))]


def _moved(
    points: _Points, found: tuple[float, tuple[float, ...]], candidates: Sequence[float]
) -> tuple[float, tuple[float, ...]]:
    """Each knee in turn where it does best, the others held."""
    for place in range(len(found[1])):
        for knee in candidates:
            if knee in found[1]:
                continue
            knees = tuple(sorted((*found[1][:place], knee, *found[1][place + 1 :])))
            found = min(found, (_cost(points, knees), knees))
    return found


def _cost(points: _Points, knees: tuple[float, ...]) -> float:
    """Likelihood of Laplacian errors, and what the knees cost."""
    off = np.minimum(np.abs(_solved(points, knees)[1]), 0.5)
    count = len(points.size)
    return count * float(np.log(off.mean() + _FLOOR)) + _PENALTY * 2 * len(knees) * float(np.log(count))


def _solved(points: _Points, knees: tuple[float, ...]) -> tuple[FloatArray, FloatArray]:
    """Start and rates, none negative, of least relative squares; and the relative errors left."""
    from scipy.optimize import nnls

    columns = basis(points.size, knees)
    scale = np.maximum(columns.max(axis=0), 1.0)
    values = np.asarray(nnls(columns / scale / points.time_ns[:, None], np.ones(len(columns)))[0]) / scale
    return values, columns @ values / points.time_ns - 1


def _std_errors(points: _Points, line: Line) -> list[float]:
    """Standard errors of a line's parameters in the order of :func:`named`; knees have none (NaN)."""
    matrix = basis(points.size, line.knees_bytes) / points.time_ns[:, None]
    values = np.array((line.t0_ns, *line.ns_per_byte))
    left = matrix @ values - 1
    free = len(points.size) - len(values) - len(line.knees_bytes)
    if free <= 0:
        return [np.nan] * (len(values) + len(line.knees_bytes))
    covariance = np.linalg.pinv(matrix.T @ matrix) * float(left @ left) / free
    start, *rates = np.sqrt(np.maximum(np.diag(covariance), 0.0)).tolist()
    return [start, *(np.nan for _ in line.knees_bytes), *rates]


def _folds(points: _Points, generator: np.random.Generator) -> Iterable[tuple[_Points, _Points]]:
    """Sizes left out in turn; the least and the largest always stay, so that nothing is extrapolated."""
    inner: IntArray = generator.permutation(np.arange(1, len(points.size) - 1))
    if len(inner) < _FEWEST:
        return
    for part in np.array_split(inner, min(_FOLDS, len(inner))):
        kept = np.setdiff1d(np.arange(len(points.size)), part)
        yield (
            _Points(points.size[kept], points.time_ns[kept]),
            _Points(points.size[part], points.time_ns[part]),
        )


def _with_defaults(fits: Iterable[Fit]) -> tuple[Fit, ...]:
    """Of each operation and number format the newest release of a vendor's library, else the most samples;
    never a serving framework's own kernels.
    """
    ordered = sorted(fits, key=lambda fit: fit.key)
    best: dict[tuple[str, str], Fit] = {}
    for fit in sorted(ordered, key=_standing, reverse=True):
        if fit.form != TUNED and not fit.variant.startswith(_OWN):
            best.setdefault((fit.op, fit.scheme), fit)
    chosen = {fit.key for fit in best.values()}
    return tuple(replace(fit, default=fit.key in chosen) for fit in ordered)


def _standing(fit: Fit) -> tuple[bool, tuple[int, ...], int]:
    """How likely a program runs a library: a vendor's, of a new release, measured often."""
    is_vendors = fit.variant.startswith(_VENDORS)
    release = tuple(int(number) for number in re.findall(r"\d+", fit.variant)) if is_vendors else ()
    return is_vendors, release, fit.samples
