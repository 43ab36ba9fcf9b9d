"""Fits of a device's operations. A class is all rows of one kind, operation, number format and variant; each
class is fitted by itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan, nan
from types import MappingProxyType

import numpy as np

from hespas.estimators.forms import (
    CHIP_WIDE_KINDS,
    FORMS,
    Columns,
    Form,
    MachineRates,
    form_time_ns,
    forms_for,
    machine_of,
)
from hespas.fitting.fits import Key, fit_of, rounded, with_defaults
from hespas.fitting.held_out import folds_of, parts_in_turn
from hespas.fitting.rows import rows_to_fit
from hespas.fitting.solvers import robust_least_squares, standard_errors
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.measurements import Measurements, joined
from hespas.operations import find_scheme

__all__ = [
    "NOISE",
    "ClassRows",
    "FittedClass",
    "FormSolution",
    "Prior",
    "Progress",
    "classes_of",
    "fit_classes",
    "fit_device",
    "seed_of",
    "solve",
]

Prior = Mapping[str, tuple[float, float]]
"""Expected value and width (ln units) of parameters by name."""

_FEWEST = 12
_FEWEST_LAYERS = 4
"""Least layers that are held out as a whole; with fewer, single shapes are held out."""
_POOLED = frozenset({"vector", "normalization", "reduction", "pooling", "gather", "move", "moe"})
"""Kinds with operations that are similar enough for one common fit."""
_TOKENS: Mapping[str, str] = {"matmul": "m", "convolution": "m", "moe": "tokens"}
"""Dimension in which a layer is swept. A layer is held out as a whole, because its other rows determine
it.
"""
NOISE = 0.1
"""Errors of logarithms count by their square below this value, by their size above."""
_FIRM_ROWS = 50
"""Rows with the same weight as the prior of a parameter. Parameters that no row determines (the bandwidth, if
every working set is in the cache) stay at their physical values.
"""
_INVALID_ERROR = 1e3
"""Error of a time that is not a number, so that the solver never steps there."""
_FOLDS = 4
_MOST_ROWS = 3000
"""Most rows of a fit, drawn at random: more change the parameters by less than their errors."""
_SCOUT_ROWS = 600
_FOLD_ROWS = 1500
_TESTED_ROWS = 1500
_START_SPREAD = 0.8
"""Standard deviation of the second start from the first, in logarithms."""
_SMALL = 1000
"""Classes with fewer rows are fitted again, with the fit of the whole chip as their prior."""
_CHIP_WIDTH = 0.7
_SHARED = ("t0_ns", "compute", "memory")
"""Parameters with the same meaning in every form."""
_CHIP_ROWS = 400

Progress = Callable[[int, int, str], None]
"""Callback with the number of finished classes, the number of all classes, and the name of the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRows:
    """Measured rows of one class of operations, and the ``key`` of its fit. The operation ``*`` in the key
    means all operations of a kind.

    ``group`` has one number per row. Rows with equal numbers are held out together to test a fit: rows of
    equal shapes, or of equal layers with any number of tokens.
    """

    key: Key
    measured: Measurements
    group: IntArray

    def take(self, rows: IntArray) -> ClassRows:
        """Return the class with only the given rows."""
        return ClassRows(key=self.key, measured=self.measured.take(rows), group=self.group[rows])

    def machine(self, device: Device) -> MachineRates:
        """Return the rates of ``device`` for this class."""
        kind, _, scheme, _ = self.key
        return machine_of(device, kind, scheme)


def classes_of(measured: Measurements) -> Iterator[ClassRows]:
    """Yield the classes of operations that have enough rows in ``measured``, in a fixed order.

    If several operations of a kind have a common fit, the operation of their class is ``*``.
    """
    ops = measured.ops
    # In kinds that are swept over tokens, a layer consists of all rows that differ only in tokens.
    swept = [_TOKENS.get(name, "") for name in ops.kind.names]
    dims = dict(ops.dims)
    for name in dims.keys() & set(swept):
        is_swept = np.array([dim == name for dim in swept])[ops.kind.row]
        dims[name] = np.where(is_swept, np.nan, dims[name])
    layers = replace(measured, ops=replace(ops, dims=dims)).shape_group()
    shapes = measured.shape_group()
    by_key = dict(ops.classes())
    pooled: dict[Key, list[IntArray]] = {}
    for (kind, _, scheme, variant), rows in by_key.items():
        if kind in _POOLED:
            pooled.setdefault((kind, ANY, scheme, variant), []).append(rows)
    by_key |= {name: np.concatenate(parts) for name, parts in pooled.items() if len(parts) > 1}
    for key, rows in sorted(by_key.items()):
        if len(rows) >= _FEWEST and key[2]:
            by_layer = len(np.unique(layers[rows])) >= _FEWEST_LAYERS
            group = layers[rows] if by_layer else shapes[rows]
            yield ClassRows(key=key, measured=measured.take(rows), group=group)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FormSolution:
    """Solution of a fit: parameters by name, their standard errors (NaN for fixed ones), and the cost per
    row.
    """

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
) -> FormSolution:
    """Fit the parameters of a form from one starting point. ``columns`` are the inputs of the form for each
    operation, ``duration_ns`` the measured times.

    ``fixed`` overrides parameters that do not vary. ``prior`` has the expected values of the other parameters
    and counts once for every ``firm_rows`` rows.
    """
    varying = [parameter for parameter in form.parameters if parameter.varies]
    names = [parameter.name for parameter in varying]
    constants = {parameter.name: parameter.start for parameter in form.parameters if not parameter.varies}
    constants |= dict(fixed)
    low = np.log([parameter.low for parameter in varying])
    high = np.log([parameter.high for parameter in varying])
    priors = [prior.get(parameter.name, (parameter.start, parameter.width)) for parameter in varying]
    centre = np.log([expected for expected, _ in priors])
    firmness = np.sqrt(max(1.0, len(duration_ns) / firm_rows))
    weight = firmness * NOISE / np.array([width for _, width in priors])
    measured = np.log(duration_ns)

    def values_of(logs: FloatArray) -> dict[str, float]:
        values: list[float] = np.exp(logs).tolist()
        return constants | dict(zip(names, values, strict=True))

    def errors(logs: FloatArray) -> FloatArray:
        error = np.log(form.time_ns(values_of(logs), columns)) - measured
        if not np.isfinite(error).all():
            error = np.nan_to_num(error, nan=_INVALID_ERROR)
        return np.concatenate((error, weight * (logs - centre)))

    first = np.log([start.get(parameter.name, parameter.start) for parameter in varying])
    margin = 1e-6 * (high - low)
    inside = np.clip(first, low + margin, high - margin)
    optimum = robust_least_squares(errors, inside, NOISE, bounds=(low, high), most_calls=most_calls)
    values = values_of(optimum.values)
    freedom = max(len(measured) - len(names), 1)
    spread = standard_errors(optimum.jacobian, 2 * optimum.cost, freedom) * np.exp(optimum.values)
    errors_of = dict(zip(names, spread.tolist(), strict=True))
    return FormSolution(
        values=values,
        std_errors={name: errors_of.get(name, np.nan) for name in values},
        cost=optimum.cost / len(measured),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedClass:
    """Fitted form of one class of operations. ``predicted_ns`` and ``measured_ns`` are times of held-out
    shapes.
    """

    rows: ClassRows
    form: Form
    solution: FormSolution
    predicted_ns: FloatArray
    measured_ns: FloatArray


def seed_of(rows: ClassRows, seed: int) -> int:
    """Return a random seed for a class, derived from ``seed`` and the key of the class only, so that other
    classes do not change it.
    """
    return zlib.crc32(f"{seed} {' '.join(rows.key)}".encode())


def fit_classes(
    classes: Iterable[tuple[ClassRows, MachineRates]],
    prior: Prior,
    seed: int,
    form_names: Mapping[str, str] = MappingProxyType({}),
) -> list[FittedClass]:
    """Fit all forms for the kinds of the classes, and return the fit of each class for whose form the device
    has rates. ``form_names`` has the forms of kinds that are already selected.

    All classes of a kind have the form with the smallest error on the held-out rows of all of them, because a
    single class may have too few rows to show a difference.
    """
    candidates: list[list[FittedClass]] = []
    errors: dict[tuple[str, str], list[FloatArray]] = {}
    for rows, machine in classes:
        kind = rows.key[0]
        forms = (form for form in forms_for(kind, machine) if form_names.get(kind, form.name) == form.name)
        fitted = (_fit_form(rows, form, machine, prior, seed) for form in forms)
        candidates.append([candidate for candidate in fitted if candidate is not None])
        for candidate in candidates[-1]:
            error = np.abs(candidate.predicted_ns / candidate.measured_ns - 1)
            errors.setdefault((rows.key[0], candidate.form.name), []).append(error)
    joined_errors = {key: np.concatenate(parts) for key, parts in errors.items()}
    mape = {key: float(error.mean()) if len(error) else inf for key, error in joined_errors.items()}

    def of_kind(candidate: FittedClass) -> float:
        return mape[candidate.rows.key[0], candidate.form.name]

    return [min(of_class, key=of_kind) for of_class in candidates if of_class]


def _fit_form(
    rows: ClassRows, form: Form, machine: MachineRates, prior: Prior, seed: int
) -> FittedClass | None:
    """Fit one form from two starting points, and predict each held-out group of rows by a fit to the other
    groups.

    Returns None if the device has no rate for the form.
    """
    generator = np.random.default_rng(seed_of(rows, seed))
    drawn = generator.permutation(len(rows.measured))[:_MOST_ROWS]
    scouts = rows.measured.take(drawn[:_SCOUT_ROWS])
    start = {
        parameter.name: prior[parameter.name][0] if parameter.name in prior else parameter.start
        for parameter in form.parameters
    }
    second: dict[str, float] = {}
    for parameter in form.parameters:
        shifted = start[parameter.name] * np.exp(generator.normal(0, _START_SPREAD))
        second[parameter.name] = float(np.clip(shifted, parameter.low, parameter.high))

    def solved(
        part: Measurements, first: Mapping[str, float], choice: Mapping[str, float], most_calls: int
    ) -> FormSolution:
        columns, times = form.columns(part.ops, machine), part.duration_ns
        return solve(form, columns, times, first, prior=prior, fixed=choice, most_calls=most_calls)

    scouted: list[tuple[FormSolution, Mapping[str, float]]] = []
    for choice in form.choices:
        if not np.isfinite(form_time_ns(form, start | dict(choice), scouts.ops, machine)).all():
            return None
        scouted += [(solved(scouts, values, choice, 25), choice) for values in (start, second)]
    best, choice = min(scouted, key=lambda candidate: candidate[0].cost)
    solution = solved(rows.measured.take(drawn), best.values, choice, 60)
    predicted, times = [np.empty(0)], [np.empty(0)]  # a single shape cannot be held out
    for others, held_out in parts_in_turn(folds_of(rows.group, _FOLDS, generator)):
        fitted = generator.permutation(others)[:_FOLD_ROWS]
        tested_rows = generator.permutation(held_out)[:_TESTED_ROWS]
        if len(fitted):
            part = solved(rows.measured.take(fitted), solution.values, choice, 12)
            tested = rows.measured.take(tested_rows)
            predicted.append(form_time_ns(form, part.values, tested.ops, machine))
            times.append(tested.duration_ns)
    return FittedClass(
        rows=rows,
        form=form,
        solution=solution,
        predicted_ns=np.concatenate(predicted),
        measured_ns=np.concatenate(times),
    )


def fit_device(
    measured: Measurements | Sequence[Measurements],
    device: Device,
    *,
    seed: int = 0,
    fitted: str = "",
    progress: Progress | None = None,
) -> tuple[Fit, ...]:
    """Fit every class of operations that the tables have for ``device``, and the chip as a whole.

    Only rows of split ``calib`` or without a split are used. ``fitted`` is the date in the fits (ISO; empty:
    today). Deterministic for one ``seed``.
    """
    tables = [measured] if isinstance(measured, Measurements) else list(measured)
    largest: dict[Key, ClassRows] = {}
    for table in tables:
        for rows in classes_of(rows_to_fit(table, device)):
            if rows.key not in largest or len(rows.measured) > len(largest[rows.key].measured):
                largest[rows.key] = rows
    classes = [largest[key] for key in sorted(largest)]
    run = _DeviceFitRun(device, seed, fitted, progress, 2 * len(classes))
    first = run.fit(classes, {})
    chip = _fit_chip(run, classes)
    again: dict[Key, FittedClass] = {}
    if chip is not None:
        prior = {name: (chip.value(name), _CHIP_WIDTH) for name in _SHARED}
        small = [candidate.rows for candidate in first if len(candidate.rows.measured) < _SMALL]
        form_names = {candidate.rows.key[0]: candidate.form.name for candidate in first}
        again = {candidate.rows.key: candidate for candidate in run.fit(small, prior, form_names)}
    fits = [run.row(again.get(candidate.rows.key, candidate)) for candidate in first]
    if chip is not None:
        fits.append(chip)
    return with_defaults(fits)


@dataclass(slots=True)
class _DeviceFitRun:
    """Settings that are common to all fits of one device: seed, date and progress callback."""

    device: Device
    seed: int
    date: str
    progress: Progress | None
    total: int
    done: int = 0

    def fit(
        self, classes: Iterable[ClassRows], prior: Prior, form_names: Mapping[str, str] = MappingProxyType({})
    ) -> list[FittedClass]:
        """Fit each class and return those that can be fitted."""

        def reported() -> Iterator[tuple[ClassRows, MachineRates]]:
            for rows in classes:
                if self.progress:
                    self.progress(self.done, self.total, " ".join(part for part in rows.key if part))
                self.done += 1
                yield rows, rows.machine(self.device)

        return fit_classes(reported(), prior, self.seed, form_names)

    def row(self, fitted: FittedClass) -> Fit:
        """Return the fitted class in the form of an entry in a device file."""
        values, errors = fitted.solution.values, fitted.solution.std_errors
        names = [parameter.name for parameter in fitted.form.parameters]
        return fit_of(
            fitted.rows.key,
            fitted.form.name,
            ((name, values[name], errors[name]) for name in names),
            fitted.rows.measured,
            (fitted.predicted_ns, fitted.measured_ns),
            dims=fitted.form.dims,
            fitted=self.date,
            seed=self.seed,
        )


def _fit_chip(run: _DeviceFitRun, classes: Sequence[ClassRows]) -> Fit | None:
    """Return a fit of the whole chip: launch time, compute and memory efficiency. None without suitable
    classes.

    Each is the weighted median over fits of single classes, so that no fit mixes several libraries or
    formats. Only classes of single kernels of one operation without quantization are used.
    """
    form = FORMS["roofline"]
    names = [parameter.name for parameter in form.parameters]
    start = {parameter.name: parameter.start for parameter in form.parameters}
    suitable: list[ClassRows] = []
    for rows in classes:
        kind, op, scheme_name, _ = rows.key
        scheme = find_scheme(scheme_name)
        if kind in CHIP_WIDE_KINDS and op != ANY and scheme is not None and not scheme.quantizes:
            suitable.append(rows)
    values: list[list[float]] = []
    used: list[ClassRows] = []
    for rows in suitable:
        drawn = np.random.default_rng(seed_of(rows, run.seed)).permutation(len(rows.measured))[:_CHIP_ROWS]
        part = rows.take(drawn)
        ops, times, machine = part.measured.ops, part.measured.duration_ns, part.machine(run.device)
        if isnan(float(form_time_ns(form, start, ops, machine).sum())):
            continue
        columns = form.columns(ops, machine)
        solution = solve(form, columns, times, start, prior={}, fixed={}, most_calls=30)
        used.append(part)
        values.append([solution.values[name] for name in names])
    if not used:
        return None
    weights = np.sqrt([len(rows.measured) for rows in used])
    by_name = dict(zip(names, (np.array(column) for column in zip(*values, strict=True)), strict=True))
    median: dict[str, float] = {}
    for name, column in by_name.items():
        order = np.argsort(column)
        below = np.cumsum(weights[order]) / weights.sum()
        median[name] = rounded(float(column[order][np.searchsorted(below, 0.5)]))
    root = np.sqrt(len(used)) if len(used) > 1 else nan
    predicted = [form_time_ns(form, median, rows.measured.ops, rows.machine(run.device)) for rows in used]
    measured = joined(
        (rows.measured for rows in used), " ".join(sorted({rows.measured.name for rows in used}))
    )
    fit = fit_of(
        (ANY, ANY, ANY, ANY),
        form.name,
        ((name, median[name], float(np.std(column) / root)) for name, column in by_name.items()),
        measured,
        (np.concatenate(predicted), measured.duration_ns),
        fitted=run.date,
        seed=run.seed,
    )
    return replace(
        fit,
        samples=sum(len(rows.measured) for rows in suitable),
        provenance="; ".join(sorted({rows.measured.provenance for rows in used})),
    )
