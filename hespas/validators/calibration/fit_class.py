"""One class of operations fitted: parameters on all its rows, errors on shapes left out, an interval."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from hespas.estimators.forms import FORMS_OF_KIND, Form, Machine, form_time_ns
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import FitBand, FitError, FitRange
from hespas.validators.calibration.classes import Rows
from hespas.validators.calibration.solver import Solution, Trial, solve

__all__ = [
    "FittedClass",
    "bands_of",
    "drawn_rows",
    "error_of",
    "fit_class",
    "rounded",
    "seed_of",
    "support_of",
]

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


def fit_class(
    rows: Rows, machine: Machine, prior: Mapping[str, tuple[float, float]], seed: int
) -> FittedClass | None:
    """The best form of the class's kind; None where the device states no rate for it."""
    tried = [
        found
        for form in FORMS_OF_KIND.get(rows.kind, ())
        if (found := _fit_form(rows, form, machine, prior, seed)) is not None
    ]
    return min(tried, key=lambda found: _mape(found.predicted_ns, found.measured_ns), default=None)


def _mape(predicted: FloatArray, measured: FloatArray) -> float:
    return float(np.abs(predicted / measured - 1).mean()) if len(measured) else inf


def _fit_form(
    rows: Rows, form: Form, machine: Machine, prior: Mapping[str, tuple[float, float]], seed: int
) -> FittedClass | None:
    generator = np.random.default_rng(seed_of(rows, seed))
    drawn = generator.permutation(len(rows.measured))[:_ROWS]
    scouts = drawn[:_SCOUT_ROWS]
    start = {each.name: prior[each.name][0] if each.name in prior else each.start for each in form.parameters}
    shaken = {
        each.name: float(np.clip(start[each.name] * np.exp(generator.normal(0, _SHAKE)), each.low, each.high))
        for each in form.parameters
    }
    scouted: list[tuple[Solution, Mapping[str, float]]] = []
    for choice in form.choices:
        trial = _trial(rows.take(scouts), form, machine, prior, choice)
        if not np.isfinite(
            form_time_ns(form, start | dict(choice), rows.measured.ops.take(scouts), machine)
        ).all():
            return None
        scouted += [(solve(trial, each, most_calls=25), choice) for each in (start, shaken)]
    best, choice = min(scouted, key=lambda found: found[0].cost)
    trial = _trial(rows.take(drawn), form, machine, prior, choice)
    solution = solve(trial, best.values, most_calls=60)
    predicted, measured = _left_out(rows, form, machine, (solution, prior, choice), generator)
    return FittedClass(rows=rows, form=form, solution=solution, predicted_ns=predicted, measured_ns=measured)


def _trial(
    rows: Rows,
    form: Form,
    machine: Machine,
    prior: Mapping[str, tuple[float, float]],
    choice: Mapping[str, float],
) -> Trial:
    return Trial(
        form=form,
        columns=form.columns(rows.measured.ops, machine),
        duration_ns=rows.measured.duration_ns,
        fixed=choice,
        prior=prior,
    )


def _left_out(
    rows: Rows,
    form: Form,
    machine: Machine,
    known: tuple[Solution, Mapping[str, tuple[float, float]], Mapping[str, float]],
    generator: np.random.Generator,
) -> tuple[FloatArray, FloatArray]:
    """Predictions and times of shapes that the predicting fit did not see, folds of shapes in turn."""
    solution, prior, choice = known
    _, place = np.unique(rows.group, return_inverse=True)
    shapes = int(place.max()) + 1
    fold = (generator.permutation(shapes) % min(_FOLDS, shapes))[place.reshape(-1)]
    predicted: list[FloatArray] = []
    measured: list[FloatArray] = []
    for number in range(min(_FOLDS, shapes)):
        seen = generator.permutation(np.flatnonzero(fold != number))[:_FOLD_ROWS]
        unseen = generator.permutation(np.flatnonzero(fold == number))[:_TESTED_ROWS]
        if not len(seen):
            continue
        part = solve(_trial(rows.take(seen), form, machine, prior, choice), solution.values, most_calls=12)
        tested = rows.measured.take(unseen)
        predicted.append(form_time_ns(form, part.values, tested.ops, machine))
        measured.append(tested.duration_ns)
    if not predicted:  # one shape only: nothing can be left out
        return np.empty(0), np.empty(0)
    return np.concatenate(predicted), np.concatenate(measured)


def error_of(predicted: FloatArray, measured: FloatArray) -> FitError:
    """Errors of predictions, rounded to what they are worth."""
    if not len(measured):
        return FitError(n=-1, mape=np.nan, median_ape=np.nan, p90_ape=np.nan, bias=np.nan)
    error = predicted / measured - 1
    size = np.abs(error)
    return FitError(
        n=len(error),
        mape=rounded(float(size.mean())),
        median_ape=rounded(float(np.median(size))),
        p90_ape=rounded(float(np.quantile(size, 0.9))),
        bias=rounded(float(error.mean())),
    )


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


def support_of(rows: Rows, form: Form) -> tuple[FitRange, ...]:
    """Least and most of each dimension that decides the form."""
    found: list[FitRange] = []
    for name in form.dims:
        size = rows.measured.ops.dim(name)
        known = size[~np.isnan(size)]
        if len(known):
            found.append(FitRange(name=name, low=float(known.min()), high=float(known.max())))
    return tuple(found)


def rounded(value: float) -> float:
    """Six significant digits: beyond the last is noise of the machine that fitted."""
    return float(f"{value:.6g}")


def drawn_rows(rows: Rows, count: int, seed: int) -> IntArray:
    """Some rows at random, always the same."""
    return np.random.default_rng(seed_of(rows, seed)).permutation(len(rows.measured))[:count]
