"""What is fitted together: rows of one kind, operation, scheme and variant; and which rows may be fitted."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil, inf, isnan, nan

import numpy as np

from hespas.estimators.forms import (
    CHIP_WIDE_KINDS,
    FORMS,
    Columns,
    Form,
    Machine,
    form_time_ns,
    forms_for,
    machine_of,
)
from hespas.estimators.rates import roof_ns
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit, FitBand, FitError, FitParameter, FitRange
from hespas.measurements import Measurements, joined
from hespas.operations import Operations, find_scheme
from hespas.validators.accuracy.statistics import error_figures

__all__ = [
    "FITTED_SPLITS",
    "NOISE",
    "FittedClass",
    "Key",
    "Prior",
    "Progress",
    "Rows",
    "Solution",
    "bands_of",
    "classes_of",
    "error_of",
    "fit_class",
    "fit_device",
    "fit_of",
    "is_possible",
    "may_be_fitted",
    "rounded",
    "rows_to_fit",
    "seed_of",
    "solve",
]

FITTED_SPLITS = ("calib", "")
"""Splits that may be fitted on: the one made for it, and tables that state none."""

Key = tuple[str, str, str, str]
"""Kind, operation, number format and variant of a fit."""
Prior = Mapping[str, tuple[float, float]]
"""Where parameters are expected, and how closely (ln units)."""

_FEWEST = 12
_FEWEST_LAYERS = 4
"""With fewer, leaving a layer out tells of that layer alone: single shapes are left out instead."""
_POOLED = frozenset({"vector", "normalization", "reduction", "pooling", "gather", "move", "moe"})
"""Kinds whose operations are near enough to each other for one fit of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one class, with what the fit will be of: the operation of its ``key`` is ``*`` for all of a
    kind together. ``group`` numbers what is left out of a fit as a whole to test it: shapes, or layers
    whatever the number of tokens.
    """

    key: Key
    measured: Measurements
    group: IntArray

    def take(self, rows: IntArray) -> Rows:
        """Some rows of the class."""
        return Rows(key=self.key, measured=self.measured.take(rows), group=self.group[rows])

    def machine(self, device: Device) -> Machine:
        """What of the device the class runs on."""
        kind, _, scheme, _ = self.key
        return machine_of(device, kind, scheme)


_TOKENS: Mapping[str, str] = {"matmul": "m", "convolution": "m", "moe": "tokens"}
"""The dimension in which one layer is swept: a layer is left out as a whole, or its neighbours tell all."""


def may_be_fitted(measured: Measurements) -> Measurements:
    """Without the rows that are kept for testing."""
    return measured.take(measured.split.where(*FITTED_SPLITS))


_BELOW_ROOF = 1.1
"""Clocks above the stated one and roofs of caches that are not stated leave this much."""


def is_possible(measured: Measurements, device: Device) -> BoolArray:
    """Which rows took as long as the device needs at least, shape ``(rows,)``: a time below its roof is none
    of the operation that its row states (half of a kernel's work, another number format, another device).
    """
    return roof_ns(measured.ops, device) <= _BELOW_ROOF * measured.duration_ns


def rows_to_fit(measured: Measurements, device: Device) -> Measurements:
    """The rows on a device that its fits may see: not kept for testing, and not faster than it can be."""
    mine = may_be_fitted(measured).on(device.name)
    return mine.take(np.flatnonzero(is_possible(mine, device)))


def classes_of(measured: Measurements) -> Iterator[Rows]:
    """The classes of some measurements that have rows enough, in a fixed order. ``op`` ``*`` where a kind has
    several operations.
    """
    ops = measured.ops
    layers, shapes = _layers(measured), measured.shape_group()
    seen = dict(ops.classes())
    pooled: dict[Key, list[IntArray]] = {}
    for (kind, _, scheme, variant), rows in seen.items():
        if kind in _POOLED:
            pooled.setdefault((kind, ANY, scheme, variant), []).append(rows)
    seen |= {name: np.concatenate(parts) for name, parts in pooled.items() if len(parts) > 1}
    for key, rows in sorted(seen.items()):
        if len(rows) >= _FEWEST and key[2]:
            by_layer = len(np.unique(layers[rows])) >= _FEWEST_LAYERS
            group = layers[rows] if by_layer else shapes[rows]
            yield Rows(key=key, measured=measured.take(rows), group=group)


def _layers(measured: Measurements) -> IntArray:
    """A number per shape, or per layer in kinds that are swept over tokens."""
    ops = measured.ops
    swept = [_TOKENS.get(name, "") for name in ops.kind.names]
    dims = {
        name: np.where(np.array([each == name for each in swept])[ops.kind.row], np.nan, column)
        if name in swept
        else column
        for name, column in ops.dims.items()
    }
    return replace(measured, ops=replace(ops, dims=dims)).shape_group()


NOISE = 0.1
"""Errors of logarithms count by their square below this, by their size above."""
_FIRM_ROWS = 50
"""Rows that weigh as much as what is known of a parameter beforehand weighs once: what no row of many tells
apart (the bandwidth, where every working set lies in the cache) stays where physics puts it.
"""
_UNKNOWN = 1e3
"""The error of a time that is no number: a step into it is never taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """Parameters by name with standard errors (NaN for those that do not vary), and the cost per row."""

    values: Mapping[str, float]
    std_errors: Mapping[str, float]
    cost: float


def solve(
    form: Form,
    columns: Columns,
    duration_ns: FloatArray,
    start: Mapping[str, float],
    *,
    prior: Prior,
    fixed: Mapping[str, float],
    most_calls: int,
    firm_rows: float = _FIRM_ROWS,
) -> Solution:
    """The best parameters from one start, for the ``columns`` of operations and their times [ns]. ``fixed``
    overrides parameters that do not vary; ``prior`` says where others are expected, again with every
    ``firm_rows`` rows.
    """
    from scipy.optimize import least_squares

    varying = [each for each in form.parameters if each.varies]
    constants = {each.name: each.start for each in form.parameters if not each.varies} | dict(fixed)
    low, high = (np.log([getattr(each, side) for each in varying]) for side in ("low", "high"))
    priors = [prior.get(each.name, (each.start, each.width)) for each in varying]
    centre = np.log([expected for expected, _ in priors])
    firmness = np.sqrt(max(1.0, len(duration_ns) / firm_rows))
    weight = firmness * NOISE / np.array([width for _, width in priors])
    measured = np.log(duration_ns)

    def values_of(logs: FloatArray) -> dict[str, float]:
        moved: list[float] = np.exp(logs).tolist()
        return constants | dict(zip((each.name for each in varying), moved, strict=True))

    def errors(logs: FloatArray) -> FloatArray:
        error = np.log(form.time_ns(values_of(logs), columns)) - measured
        if not np.isfinite(error).all():
            error = np.nan_to_num(error, nan=_UNKNOWN)
        return np.concatenate((error, weight * (logs - centre)))

    first = np.log([start.get(each.name, each.start) for each in varying])
    margin = 1e-6 * (high - low)
    with np.errstate(all="ignore"):
        found = least_squares(
            errors,
            np.clip(first, low + margin, high - margin),
            bounds=(low, high),
            loss="soft_l1",
            f_scale=NOISE,
            max_nfev=most_calls,
        )
    values = values_of(found.x)
    spread = _std_errors(np.asarray(found.jac, np.float64), found.cost, len(measured)) * np.exp(found.x)
    errors_of = dict(zip((each.name for each in varying), spread.tolist(), strict=True))
    return Solution(
        values=values,
        std_errors={name: errors_of.get(name, np.nan) for name in values},
        cost=found.cost / len(measured),
    )


def _std_errors(jacobian: FloatArray, cost: float, rows: int) -> FloatArray:
    """Standard errors of the logarithms, from the curvature at the solution."""
    freedom = max(rows - jacobian.shape[1], 1)
    curvature = jacobian.T @ jacobian
    variance = np.diag(np.linalg.pinv(curvature)) * 2 * cost / freedom
    spread: FloatArray = np.sqrt(np.maximum(variance, 0.0))
    return spread


_FOLDS = 4
_ROWS = 3000
"""Rows that a fit takes at most, drawn at random: more move the parameters by less than their errors."""
_SCOUT_ROWS = 600
_FOLD_ROWS = 1500
_TESTED_ROWS = 1500
_PER_BAND = 120
_MOST_BANDS = 6
_SHAKE = 0.8
"""Standard deviation of the second start from the first, in logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedClass:
    """A form with its parameters; ``predicted_ns`` and ``measured_ns`` are of shapes outside the fit that
    predicted them.
    """

    rows: Rows
    form: Form
    solution: Solution
    predicted_ns: FloatArray
    measured_ns: FloatArray


def seed_of(rows: Rows, seed: int) -> int:
    """A seed of one class, the same in any order and company."""
    return zlib.crc32(f"{seed} {' '.join(rows.key)}".encode())


def fit_class(rows: Rows, machine: Machine, prior: Prior, seed: int) -> FittedClass | None:
    """The best form of the class's kind; None where the device states no rate for it."""
    forms = forms_for(rows.key[0], machine)
    tried = [found for form in forms if (found := _fit_form(rows, form, machine, prior, seed)) is not None]
    return min(tried, key=lambda found: _mape(found.predicted_ns, found.measured_ns), default=None)


def _mape(predicted: FloatArray, measured: FloatArray) -> float:
    return float(np.abs(predicted / measured - 1).mean()) if len(measured) else inf


def _fit_form(rows: Rows, form: Form, machine: Machine, prior: Prior, seed: int) -> FittedClass | None:
    generator = np.random.default_rng(seed_of(rows, seed))
    drawn = generator.permutation(len(rows.measured))[:_ROWS]
    scouts = rows.measured.take(drawn[:_SCOUT_ROWS])
    start = {each.name: prior[each.name][0] if each.name in prior else each.start for each in form.parameters}
    shaken = {
        each.name: float(np.clip(start[each.name] * np.exp(generator.normal(0, _SHAKE)), each.low, each.high))
        for each in form.parameters
    }

    def solved(
        some: Measurements, first: Mapping[str, float], choice: Mapping[str, float], most_calls: int
    ) -> Solution:
        columns, times = form.columns(some.ops, machine), some.duration_ns
        return solve(form, columns, times, first, prior=prior, fixed=choice, most_calls=most_calls)

    scouted: list[tuple[Solution, Mapping[str, float]]] = []
    for choice in form.choices:
        if not np.isfinite(form_time_ns(form, start | dict(choice), scouts.ops, machine)).all():
            return None
        scouted += [(solved(scouts, each, choice, 25), choice) for each in (start, shaken)]
    best, choice = min(scouted, key=lambda found: found[0].cost)
    solution = solved(rows.measured.take(drawn), best.values, choice, 60)
    predicted, times = [np.empty(0)], [np.empty(0)]  # of one shape only, nothing can be left out
    for seen, unseen in _folds(rows, generator):
        part = solved(rows.measured.take(seen), solution.values, choice, 12)
        tested = rows.measured.take(unseen)
        predicted.append(form_time_ns(form, part.values, tested.ops, machine))
        times.append(tested.duration_ns)
    return FittedClass(
        rows=rows,
        form=form,
        solution=solution,
        predicted_ns=np.concatenate(predicted),
        measured_ns=np.concatenate(times),
    )


def _folds(rows: Rows, generator: np.random.Generator) -> Iterator[tuple[IntArray, IntArray]]:
    """Rows to fit on, and rows of shapes that are not among them: folds of shapes in turn."""
    _, place = np.unique(rows.group, return_inverse=True)
    shapes = int(place.max()) + 1
    fold = (generator.permutation(shapes) % min(_FOLDS, shapes))[place.reshape(-1)]
    for number in range(min(_FOLDS, shapes)):
        seen = generator.permutation(np.flatnonzero(fold != number))[:_FOLD_ROWS]
        unseen = generator.permutation(np.flatnonzero(fold == number))[:_TESTED_ROWS]
        if len(seen):
            yield seen, unseen


def fit_of(
    key: Key,
    form: str,
    parameters: Iterable[tuple[str, float, float]],
    measured: Measurements,
    held_out: tuple[FloatArray, FloatArray],
    *,
    dims: Iterable[str] = (),
    fitted: str,
    seed: int,
) -> Fit:
    """A row of a device file: a form with its ``parameters`` (name, value, standard error), fitted on all of
    ``measured``, whose sizes in ``dims`` bound it. ``held_out`` are predictions of rows that the predicting
    fit has not seen, and their times [ns].
    """
    kind, op, scheme, variant = key
    return Fit(
        kind=kind,
        op=op,
        scheme=scheme,
        variant=variant,
        form=form,
        parameters=tuple(
            FitParameter(name=name, value=rounded(value), std_error=rounded(error))
            for name, value, error in parameters
        ),
        support=tuple(_support(measured.ops, dims)),
        samples=len(measured),
        error=error_of(*held_out),
        bands=bands_of(*held_out),
        table=measured.name,
        provenance=measured.provenance,
        fitted=fitted or datetime.now(UTC).date().isoformat(),
        seed=seed,
    )


def _support(ops: Operations, dims: Iterable[str]) -> Iterator[FitRange]:
    """Least and most of each dimension that is known of any operation."""
    for name in dims:
        size = ops.dim(name)
        known = size[~np.isnan(size)]
        if len(known):
            yield FitRange(name=name, low=float(known.min()), high=float(known.max()))


def error_of(predicted: FloatArray, measured: FloatArray) -> FitError:
    """Errors of predictions, rounded to what they are worth."""
    figures = error_figures(predicted / measured - 1)
    return FitError(n=len(measured) or -1, **{name: rounded(value) for name, value in figures.items()})


def bands_of(predicted: FloatArray, measured: FloatArray) -> tuple[FitBand, ...]:
    """By size of the prediction, between what shares of it 90 % of the measurements lie."""
    count = min(max(len(predicted) // _PER_BAND, 1), _MOST_BANDS)
    if len(predicted) < 10:
        return ()
    order = np.argsort(predicted, kind="stable")
    found: list[FitBand] = []
    for number, part in enumerate(np.array_split(order, count)):
        ratio = np.sort(measured[part] / predicted[part])
        # The order statistics of a sample that one more value stays between nine times in ten.
        high = min(ceil(0.95 * (len(ratio) + 1)), len(ratio)) - 1
        up_to_ns = inf if number == count - 1 else rounded(float(predicted[part[-1]]))
        if found and up_to_ns <= found[-1].up_to_ns:
            continue
        low_share, high_share = float(ratio[len(ratio) - 1 - high]), float(ratio[high])
        found.append(FitBand(up_to_ns=up_to_ns, low=rounded(low_share), high=rounded(high_share)))
    return tuple(found)


def rounded(value: float) -> float:
    """Six significant digits: beyond the last is noise of the machine that fitted."""
    return float(f"{value:.6g}")


Progress = Callable[[int, int, str], None]
"""Told how many classes are done, of how many, and the name of the next."""

_SMALL = 1000
"""Classes of fewer rows are fitted again, with the whole chip as their prior."""
_CHIP_WIDTH = 0.7
_SHARED = ("t0_ns", "compute", "memory")
"""Parameters that mean the same in every form that has them."""
_CHIP_ROWS = 400


def fit_device(
    measured: Measurements | Sequence[Measurements],
    device: Device,
    *,
    seed: int = 0,
    fitted: str = "",
    progress: Progress | None = None,
) -> tuple[Fit, ...]:
    """The fits of every class of operations that the tables hold for ``device``, and of the whole chip.

    Only rows that may be fitted enter: those of split ``calib``, or of tables without splits. ``fitted`` is
    the date written into the fits (ISO; empty: today). Deterministic for one ``seed``.
    """
    tables = [measured] if isinstance(measured, Measurements) else list(measured)
    found: dict[Key, Rows] = {}
    for table in tables:
        for rows in classes_of(rows_to_fit(table, device)):
            if rows.key not in found or len(rows.measured) > len(found[rows.key].measured):
                found[rows.key] = rows
    classes = [found[key] for key in sorted(found)]
    run = _Run(device, seed, fitted, progress, 2 * len(classes))
    first = run.fit(classes, {})
    chip = _chip_wide(run, classes)
    small = [each.rows for each in first if chip and len(each.rows.measured) < _SMALL]
    again = {} if chip is None else {each.rows.key: each for each in run.fit(small, _prior_of(chip))}
    fits = [run.row(again.get(each.rows.key, each)) for each in first]
    return _with_defaults([*fits, *([chip] if chip else [])])


@dataclass(slots=True)
class _Run:
    """One run over a device."""

    device: Device
    seed: int
    date: str
    progress: Progress | None
    total: int
    done: int = 0

    def fit(self, classes: Iterable[Rows], prior: Prior) -> list[FittedClass]:
        """The classes that can be fitted."""
        found: list[FittedClass] = []
        for rows in classes:
            if self.progress:
                self.progress(self.done, self.total, " ".join(part for part in rows.key if part))
            self.done += 1
            fit = fit_class(rows, rows.machine(self.device), prior, self.seed)
            if fit is not None:
                found.append(fit)
        return found

    def row(self, found: FittedClass) -> Fit:
        """A fitted class as a row of a device file."""
        values, errors = found.solution.values, found.solution.std_errors
        return fit_of(
            found.rows.key,
            found.form.name,
            ((each.name, values[each.name], errors[each.name]) for each in found.form.parameters),
            found.rows.measured,
            (found.predicted_ns, found.measured_ns),
            dims=found.form.dims,
            fitted=self.date,
            seed=self.seed,
        )


def _prior_of(chip: Fit) -> Prior:
    return {name: (chip.value(name), _CHIP_WIDTH) for name in _SHARED}


def _with_defaults(fits: list[Fit]) -> tuple[Fit, ...]:
    """The variant with the most samples is what runs where none is named."""
    best: dict[tuple[str, str, str], Fit] = {}
    for fit in sorted(fits, key=lambda fit: (-fit.samples, fit.variant)):
        best.setdefault((fit.kind, fit.op, fit.scheme), fit)
    chosen = {fit.key for fit in best.values()}
    return tuple(replace(fit, default=fit.key in chosen) for fit in sorted(fits, key=lambda fit: fit.key))


def _chip_wide(run: _Run, classes: Sequence[Rows]) -> Fit | None:
    """Start, arithmetic and memory of a whole chip: the weighted middle of what its classes say, so that no
    two libraries or formats enter one fit.
    """
    form = FORMS["roofline"]
    mine = [rows for rows in classes if _is_plain(rows)]
    values: list[list[float]] = []
    kept: list[Rows] = []
    for rows in mine:
        drawn = np.random.default_rng(seed_of(rows, run.seed)).permutation(len(rows.measured))[:_CHIP_ROWS]
        part = rows.take(drawn)
        found = _plain_fit(part, form, run.device)
        if found is not None:
            kept.append(part)
            values.append([found[each.name] for each in form.parameters])
    if not kept:
        return None
    weights = np.sqrt([len(rows.measured) for rows in kept])
    names = [each.name for each in form.parameters]
    columns = dict(zip(names, (np.array(column) for column in zip(*values, strict=True)), strict=True))
    middle = {name: rounded(_weighted_median(column, weights)) for name, column in columns.items()}
    root = np.sqrt(len(kept)) if len(kept) > 1 else nan
    predicted = [form_time_ns(form, middle, rows.measured.ops, rows.machine(run.device)) for rows in kept]
    measured = joined(
        (rows.measured for rows in kept), " ".join(sorted({rows.measured.name for rows in kept}))
    )
    fit = fit_of(
        (ANY, ANY, ANY, ANY),
        form.name,
        ((name, middle[name], float(np.std(column) / root)) for name, column in columns.items()),
        measured,
        (np.concatenate(predicted), measured.duration_ns),
        fitted=run.date,
        seed=run.seed,
    )
    return replace(
        fit,
        samples=sum(len(rows.measured) for rows in mine),
        provenance="; ".join(sorted({rows.measured.provenance for rows in kept})),
    )


def _is_plain(rows: Rows) -> bool:
    """One kernel, nothing quantised on the way, one operation."""
    kind, op, name, _ = rows.key
    scheme = find_scheme(name)
    return kind in CHIP_WIDE_KINDS and op != ANY and scheme is not None and not scheme.quantizes


def _plain_fit(rows: Rows, form: Form, device: Device) -> Mapping[str, float] | None:
    ops, times = rows.measured.ops, rows.measured.duration_ns
    machine = rows.machine(device)
    start = {each.name: each.start for each in form.parameters}
    if isnan(float(form_time_ns(form, start, ops, machine).sum())):
        return None
    return solve(form, form.columns(ops, machine), times, start, prior={}, fixed={}, most_calls=30).values


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(below, 0.5)])
