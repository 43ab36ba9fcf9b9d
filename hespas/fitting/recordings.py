"""Fits to recorded programs, which have tens of shapes of each operation where measured tables have
thousands.

Operations of one recording have similar efficiencies. The prior of every class is therefore a more general
class: the kind for an operation, the whole chip for a kind, the device's fit of other data for a matmul.

    whole chip  ->  kind  ->  operation            start, arithmetic and traffic (form ``roofline``)
    fit of other data  ->  matmuls of a format     all parameters of its form
    vendor's kernels  ->  chip  ->  kind  ->  operation    all parameters (form ``kernels``), on GPUs

The earlier fits of the device remain for a kind of products or attention if their error on the recordings is
smaller than the error of new fits on held-out recordings.

Shapes of one recording are similar, and recordings of one device are more similar than recordings of two. The
error of a fit on other shapes of the same program is therefore smaller than its error on the next program or
device. So intervals hold out whole recordings, with everything that is unknown when the fit is used. For a
recorded device that is the program, on all devices; for a device without recordings it is program and device.
The samples are recordings, not rows: no recording counts for more than :data:`ENOUGH` rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from hespas.estimators.calibrated import FitIndex
from hespas.estimators.composite import Composite
from hespas.estimators.forms import CHIP_WIDE_KINDS, FORMS, Columns, Form, form_time_ns, machine_of
from hespas.estimators.interface import predict_with
from hespas.estimators.kernels import (
    EVERY_FORM,
    KERNEL_KINDS,
    KERNELS,
    PRODUCT_KIND,
    PRODUCTS,
    expansion_ns,
    product_time_ns,
    ragged_share,
)
from hespas.fitting.device_forms import FormSolution, Prior, solve
from hespas.fitting.fits import bands_of, error_of, fit_of, rounded, with_fits
from hespas.fitting.held_out import first_of_best, folds_of, held_out_times, next_value_bound, parts_in_turn
from hespas.fitting.kernels import (
    DEFAULT_PRODUCTS,
    KernelClass,
    KernelName,
    benchmark_ns,
    classes_of_fits,
    fit_products,
    is_kernel,
    kernels_of_device,
)
from hespas.fitting.rows import is_possible
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit, FitBand
from hespas.hardware.kernel_shares import common_fits
from hespas.measurements import Measurements, joined
from hespas.operations import EXPANDED, MATRIX_KINDS, Labels
from hespas.operations.model import rows_by_label

__all__ = [
    "ENOUGH",
    "HeldOutRecording",
    "fit_recordings",
    "held_out_recording",
    "with_intervals",
]

_ROOFLINE = FORMS["roofline"]
_FEWEST = 2
"""Least rows of a class; with fewer, the class above it is used."""
_FEWEST_OF_KIND = 6
_FEWEST_OF_OTHERS = 200
_FEWEST_OF_BAND = 60
"""Least rows of a class with its own interval; fewer rows are too similar to represent new ones."""
_SEPARATE = frozenset({"attention.context", "attention.generation", "attention.encoder"})
"""Kinds of a single kernel that differs from all others: a few rows of it are better than all others."""
_ONE_KERNEL = CHIP_WIDE_KINDS | _SEPARATE
_START_WIDTH, _RATE_WIDTH, _PRODUCT_WIDTH = 0.25, 0.5, 0.3
"""Widths of the priors of a class: ln units of one standard deviation."""
_FOLDS = 5
_CALLS = 60
ENOUGH = 60.0
"""Rows that are enough for an interval. If a device has fewer, rows of other devices are added. A recording
has at most the weight of this number of rows. One width is used for all kinds, because each kind has too
few recordings.
"""
_FEWEST_WEIGHT = 10.0
"""Least rows for an interval of 90 %."""
_CHIP_PRIOR: Prior = {"t0_ns": (2000.0, 1.0), "overlap": (4.0, 0.2)}
_ClassName = tuple[str, str, str]
"""Kind, operation and number format of a fit; ``*`` is any."""
_CommonKernels = Mapping[KernelName, KernelClass]
"""Common kernel classes of a vendor; empty without recordings."""


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedClass:
    """Fitted class of recorded operations: the name of its form, the solution, and the number of its rows."""

    form: str
    solution: FormSolution
    samples: int


def fit_recordings(
    recordings: Sequence[Measurements],
    device: Device,
    *,
    seed: int = 0,
    fitted: str = "",
    common: _CommonKernels | None = None,
) -> tuple[Fit, ...]:
    """Fit forms to recordings on ``device``. The priors are the device's fits of other data and the
    ``common`` kernels.

    ``common`` are the kernels of the vendor's devices (None: the shipped ones). Errors and intervals are
    measured on recordings that are held out in turn, or on held-out shapes if there is only one recording.
    ``fitted`` is the date in the fits (ISO; empty: today). Deterministic for one ``seed``. Returns no fits if
    no operation has known sizes and rates.
    """
    kernels = classes_of_fits(common_fits(device)) if common is None else common
    table = joined(recordings, " ".join(dict.fromkeys(recording.name for recording in recordings)))
    source = np.repeat(np.arange(len(recordings)), [len(recording) for recording in recordings])
    is_covered = _has_rates(table, device)
    if kernels:
        is_covered[is_kernel(table)] = True
    usable = np.flatnonzero(is_covered & (table.duration_ns > 0) & is_possible(table, device))
    table, source = table.take(usable), source[usable]
    if len(table) < _FEWEST:
        return ()
    fold = source
    if len(np.unique(source)) == 1:
        fold = folds_of(table.shape_group(), _FOLDS, np.random.default_rng(seed))
    predicted_ns, class_of = _held_out_times(table, device, kernels, fold)
    is_known = ~np.isnan(predicted_ns)
    # Leave out matrix kinds for which the device's earlier fits and models are better on held-out rows: a
    # benchmark with hundreds of thousands of shapes of attention is better than a few recorded layers.
    before_ns = benchmark_ns(table, device)
    worse: set[str] = set()
    for kind in MATRIX_KINDS:
        compared = table.ops.kind.where(kind)
        compared = compared[is_known[compared]]
        totals = [
            float(np.abs(times[compared] / table.duration_ns[compared] - 1).sum())
            for times in (before_ns, predicted_ns)
        ]
        if len(compared) and first_of_best(totals) == 0:
            worse.add(kind)
    classes = {
        name: fitted_class
        for name, fitted_class in _fitted_classes(table, device, kernels).items()
        if name[0] not in worse
    }
    if kernels and (products := _product_class(table, device, fold, predicted_ns)) is not None:
        classes = {name: fitted_class for name, fitted_class in classes.items() if name[0] != PRODUCT_KIND}
        name = (PRODUCT_KIND, ANY, ANY)
        classes[name], product_ns = products
        predicted_ns = np.where(np.isnan(product_ns), predicted_ns, product_ns)
        class_of = [name if other[0] == PRODUCT_KIND else other for other in class_of]
    bands = bands_of(predicted_ns[is_known], table.duration_ns[is_known])
    fits: list[Fit] = []
    for name, fitted_class in sorted(classes.items()):
        rows = np.array([other == name for other in class_of], np.bool_) & is_known
        values, errors = fitted_class.solution.values, fitted_class.solution.std_errors
        fit = fit_of(
            (*name, ANY if name[0] == ANY else ""),
            fitted_class.form,
            ((parameter, values[parameter], errors[parameter]) for parameter in values),
            table,
            (predicted_ns[rows], table.duration_ns[rows]),
            fitted=fitted,
            seed=seed,
        )
        own_bands = fit.bands if rows.sum() >= _FEWEST_OF_BAND else ()
        fits.append(replace(fit, samples=fitted_class.samples, bands=own_bands or bands, default=True))
    return tuple(fits)


def _has_rates(table: Measurements, device: Device) -> BoolArray:
    """Return a mask of the rows for whose kind and number format the device has a rate."""
    start = {parameter.name: parameter.start for parameter in _ROOFLINE.parameters}
    with np.errstate(invalid="ignore"):
        return np.isfinite(_time_ns(table, device, _ROOFLINE, start))


def _product_class(
    table: Measurements, device: Device, fold: IntArray, predicted_ns: FloatArray
) -> tuple[_RecordedClass, FloatArray] | None:
    """Return the fit that converts library benchmarks of matmuls to programs, and the predicted times of
    held-out rows [ns].

    Return None if fits to the recordings alone, whose predictions are ``predicted_ns``, have the smaller
    error and the device has no fit of a benchmark.
    """
    before_ns = benchmark_ns(table, device)

    def times_of(fitted: IntArray, held_out: IntArray) -> FloatArray:
        values = fit_products(table.take(fitted), device, before_ns[fitted], DEFAULT_PRODUCTS)
        ragged = ragged_share(table.ops.take(held_out), device)
        return product_time_ns(values, before_ns[held_out], ragged)

    product_ns = held_out_times(fold, times_of)
    rows = table.ops.kind.where(PRODUCT_KIND)
    both = rows[np.isfinite(predicted_ns[rows] + product_ns[rows])]
    errors = [
        float(np.abs(times[both] / table.duration_ns[both] - 1).sum()) for times in (product_ns, predicted_ns)
    ]
    has_benchmark = any(fit.kind == PRODUCT_KIND and fit.samples >= _FEWEST_OF_OTHERS for fit in device.fits)
    if not len(rows) or (first_of_best(errors) == 1 and not has_benchmark):
        return None
    values = fit_products(table, device, before_ns, DEFAULT_PRODUCTS)
    unknown = dict.fromkeys(values, np.nan)
    product_ns[np.setdiff1d(np.arange(len(table)), rows)] = np.nan
    solution = FormSolution(values=values, std_errors=unknown, cost=np.nan)
    return _RecordedClass(PRODUCTS, solution, len(rows)), product_ns


def _time_ns(table: Measurements, device: Device, form: Form, values: Mapping[str, float]) -> FloatArray:
    """Return the time of each row by a form with the parameters ``values`` [ns], shape ``(rows,)``."""
    times = np.full(len(table), np.nan)
    for (kind, scheme), rows in rows_by_label(table.ops.kind, table.ops.scheme):
        times[rows] = form_time_ns(form, values, table.ops.take(rows), machine_of(device, kind, scheme))
    return times


def _solved(table: Measurements, device: Device, form: Form, prior: Prior) -> _RecordedClass:
    """Fit one set of parameters of a form to all rows. Each kind and number format is computed with its own
    rates of the device.
    """
    parts: list[Columns] = []
    order: list[IntArray] = []
    for (kind, scheme), rows in rows_by_label(table.ops.kind, table.ops.scheme):
        parts.append(form.columns(table.ops.take(rows), machine_of(device, kind, scheme)))
        order.append(rows)
    columns = {
        name: np.concatenate([part[name] for part in parts], axis=-1) if first.ndim else first
        for name, first in parts[0].items()
    }
    start = {parameter.name: parameter.start for parameter in form.parameters}
    start |= {name: value for name, (value, _) in prior.items()}
    fixed = {parameter.name: start[parameter.name] for parameter in form.parameters if not parameter.varies}
    times = table.duration_ns[np.concatenate(order)]
    solution = solve(form, columns, times, start, prior=prior, fixed=fixed, most_calls=_CALLS)
    return _RecordedClass(form.name, solution, len(table))


def _fitted_classes(
    table: Measurements, device: Device, common: _CommonKernels
) -> dict[_ClassName, _RecordedClass]:
    """Fit all classes of operations in ``table``: first the whole chip, then kinds, then operations. Matmuls
    that expand their weights are left out, because estimates add the expansion to the fitted times.
    """
    classes = _kernel_classes(table, device, common) if common else {}
    is_plain = np.nan_to_num(table.ops.dim(EXPANDED)) == 0
    table = table.take(np.flatnonzero(_has_rates(table, device) & is_plain))
    if not len(table):
        return classes
    chip = _solved(table, device, _ROOFLINE, _CHIP_PRIOR)
    classes[ANY, ANY, ANY] = chip
    streamed = table.take(table.ops.kind.where(*(set(table.ops.kind.names) - MATRIX_KINDS)))
    streams = _solved(streamed, device, _ROOFLINE, _prior_from(chip)) if len(streamed) else chip
    index = FitIndex.of(device)
    for kind in table.ops.kind.used():
        rows = table.take(table.ops.kind.where(kind))
        if common and kind in KERNEL_KINDS:
            continue
        if kind in _ONE_KERNEL and len(rows) >= _FEWEST:
            prior = _prior_from(chip if kind in MATRIX_KINDS else streams)
            of_kind = _solved(rows, device, _ROOFLINE, prior)
            names = rows.ops.op.used()
            for name in names if len(names) > 1 else ():
                of_op = rows.take(rows.ops.op.where(name))
                if name and len(of_op) >= _FEWEST:
                    classes[kind, name, ANY] = _solved(of_op, device, _ROOFLINE, _prior_from(of_kind))
            if len(rows) >= _FEWEST_OF_KIND or kind in _SEPARATE:
                classes[kind, ANY, ANY] = of_kind
        if kind in MATRIX_KINDS:
            classes |= _matmul_classes(rows, device, kind, index)
    return classes


def _kernel_classes(
    table: Measurements, device: Device, common: _CommonKernels
) -> dict[_ClassName, _RecordedClass]:
    """Return the vendor's common kernel classes fitted to the device, and further recorded kernels."""
    part = table.take(is_kernel(table))
    counts: dict[KernelName, int] = {}
    for (kind, op), rows in rows_by_label(part.ops.kind, part.ops.op):
        for name in {(kind, op or ANY), (kind, ANY)}:
            counts[name] = counts.get(name, 0) + len(rows)
    unknown = dict.fromkeys((parameter.name for parameter in KERNELS.parameters), np.nan)
    return {
        (*name, ANY): _RecordedClass(
            KERNELS.name,
            FormSolution(values=values, std_errors=unknown, cost=np.nan),
            counts.get(name, len(part)),
        )
        for name, values in kernels_of_device(part, device, common).items()
    }


def _prior_from(above: _RecordedClass) -> Prior:
    """Return the prior of a class: the fitted values of the more general class ``above``, with a width for
    each parameter.
    """
    values = above.solution.values
    return {
        parameter.name: (
            values[parameter.name],
            _START_WIDTH if parameter.name == "t0_ns" else _RATE_WIDTH,
        )
        for parameter in EVERY_FORM[above.form].parameters
    }


def _matmul_classes(
    rows: Measurements, device: Device, kind: str, index: FitIndex
) -> dict[_ClassName, _RecordedClass]:
    """Fit the matmuls of each number format for which the device has a fit of other data, with that fit as
    the prior.
    """
    classes: dict[_ClassName, _RecordedClass] = {}
    for scheme in rows.ops.scheme.used():
        part = rows.take(rows.ops.scheme.where(scheme))
        choice = index.select(kind, "", scheme, "")
        if choice is None or choice.quantizing or choice.assumed[0] == "calibrated.chip-wide":
            continue
        other = choice.fits[0]
        form = FORMS.get(other.form)
        if form is None or form is _ROOFLINE or other.samples < _FEWEST_OF_OTHERS or len(part) < _FEWEST:
            continue
        prior = {parameter.name: (parameter.value, _PRODUCT_WIDTH) for parameter in other.parameters}
        classes[kind, "", scheme] = _solved(part, device, form, prior)
    return classes


def _held_out_times(
    table: Measurements, device: Device, common: _CommonKernels, fold: IntArray
) -> tuple[FloatArray, list[_ClassName]]:
    """Return the time of each row as predicted by fits without its fold [ns], and the name of the class that
    predicted it.
    """
    predicted_ns = np.full(len(table), np.nan)
    names: list[_ClassName] = [(ANY, ANY, ANY)] * len(table)
    for fitted, held_out in parts_in_turn(fold):
        if len(fitted) < _FEWEST:
            continue
        classes = _fitted_classes(table.take(fitted), device, common)
        by_name: dict[_ClassName, list[int]] = {}
        for row in held_out.tolist():
            kind, op, scheme = table.ops.kind[row], table.ops.op[row], table.ops.scheme[row]
            nearest = ((kind, "", scheme), (kind, op, ANY), (kind, ANY, ANY))
            name = next((name for name in nearest if name in classes), (ANY, ANY, ANY))
            by_name.setdefault(name, []).append(row)
        for name, of_class in by_name.items():
            rows = np.array(of_class, np.int64)
            form, values = EVERY_FORM[classes[name].form], classes[name].solution.values
            predicted_ns[rows] = _time_ns(table.take(rows), device, form, values)
            for row in of_class:
                names[row] = name
    return predicted_ns + expansion_ns(table.ops, device), names


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutRecording:
    """Predicted and measured times [ns] of a recording on ``device`` that the fits do not contain."""

    device: str
    kind: Labels
    predicted_ns: FloatArray
    measured_ns: FloatArray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.measured_ns)

    @property
    def weight(self) -> FloatArray:
        """Return the weight of each row in the error statistics."""
        return np.full(len(self), min(1.0, ENOUGH / max(len(self), 1)))


def held_out_recording(table: Measurements, device: Device, fits: Sequence[Fit]) -> HeldOutRecording:
    """Predict a recording that was left out of ``fits``, with the composite estimator and these fits.

    Rows that other models predict (of attention, for example) are left out.
    """
    prediction = predict_with(Composite(), table.ops, with_fits(device, fits), Diagnostics())
    is_fitted = np.isin(prediction.estimator, [prediction.models.index("calibrated")])
    is_fitted[table.ops.kind.where(PRODUCT_KIND)] = True
    rows = np.flatnonzero(is_fitted & np.isfinite(prediction.duration_ns) & (prediction.duration_ns > 0))
    part = table.take(rows)
    return HeldOutRecording(device.name, part.ops.kind, prediction.duration_ns[rows], part.duration_ns)


def with_intervals(
    fits: Sequence[Fit], left_out: Sequence[HeldOutRecording], device: Device | None = None
) -> tuple[Fit, ...]:
    """Return fits with errors and intervals added, from recordings that were held out in turn.

    If ``device`` is recorded, its own recordings are used first. If they have fewer than :data:`ENOUGH` rows,
    recordings of other devices are added. For a device without recordings (None), all devices have equal
    weights. If there are too few held-out rows, the fits are returned unchanged.
    """
    near = [part for part in left_out if device is None or part.device == device.name]
    far = [part for part in left_out if device is not None and part.device != device.name]
    near_rows, far_rows = (sum(min(ENOUGH, float(len(part))) for part in parts) for parts in (near, far))
    share = min(1.0, max(ENOUGH - near_rows, 0.0) / max(far_rows, 1.0))
    weight = _joined_columns((*(part.weight for part in near), *(share * part.weight for part in far)))
    if weight.sum() < _FEWEST_WEIGHT:
        return tuple(fits)
    ratio = _joined_columns(part.measured_ns / part.predicted_ns for part in (*near, *far))
    low, high = -next_value_bound(-ratio, weight), next_value_bound(ratio, weight)
    bands = (FitBand(up_to_ns=inf, low=rounded(low), high=rounded(high)),)
    names = ", ".join(dict.fromkeys(part.device for part in (near if near_rows >= ENOUGH else [*near, *far])))
    how = f"interval: {'models' if device else 'devices and models'} left out in turn of {names}"
    changed: list[Fit] = []
    for fit in fits:
        if fit.form in (KERNELS.name, PRODUCTS):
            of_kind = [(part, part.kind.where(fit.kind)) for part in near]
            predicted_ns = _joined_columns(part.predicted_ns[rows] for part, rows in of_kind)
            measured_ns = _joined_columns(part.measured_ns[rows] for part, rows in of_kind)
            provenance = f"{fit.provenance} ({how})"
            error = error_of(predicted_ns, measured_ns)
            changed.append(replace(fit, bands=bands, error=error, provenance=provenance))
        else:
            changed.append(replace(fit, bands=bands))
    return tuple(changed)


def _joined_columns(columns: Iterable[FloatArray]) -> FloatArray:
    return np.concatenate([np.empty(0), *columns])
