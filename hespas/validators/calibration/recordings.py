"""Fits of recorded programs: tens of shapes of each operation, where tables have thousands.

What runs in one recording runs alike, so everything is drawn towards what holds for more of it: an operation
towards its kind, a kind towards the whole chip, a matmul towards the fit of other data that the device has.

    whole chip  ->  kind  ->  operation            start, arithmetic and traffic (form ``roofline``)
    fit of other data  ->  matmuls of a format     all parameters of its form
    vendor's kernels  ->  chip  ->  kind  ->  operation    all parameters (form ``kernels``), on GPUs

A kind of products or attention is left to what the device had before, where that is nearer to what was
recorded than fits are to recordings that they have not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hespas.estimators.calibrated import FitIndex
from hespas.estimators.forms import CHIP_WIDE_KINDS, FORMS, Columns, Form, form_time_ns, machine_of
from hespas.estimators.kernels import (
    EVERY_FORM,
    KERNEL_KINDS,
    KERNELS,
    PRODUCT_KIND,
    PRODUCTS,
    product_time_ns,
    ragged_share,
)
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit, load_device
from hespas.hardware.kernel_shares import common_fits
from hespas.measurements import LeftOut, Measurements, joined
from hespas.operations import MATRIX_KINDS, Labels, operations_of
from hespas.operations.model import rows_by_label
from hespas.validators.accuracy.cases import CaseSource
from hespas.validators.accuracy.sources import by_device, sources_of
from hespas.validators.accuracy.statistics import medians_of
from hespas.validators.calibration.fit_device import FormSolution, Prior, bands_of, fit_of, is_possible, solve
from hespas.validators.calibration.kernels import (
    KernelClass,
    KernelName,
    classes_of_fits,
    is_kernel,
    kernels_of_device,
)
from hespas.validators.calibration.products import UNKNOWN_PRODUCTS, benchmark_ns, fit_products

__all__ = ["fit_recordings", "measurements_of"]

_ROOFLINE = FORMS["roofline"]
_FEWEST = 2
"""Rows that a class of its own takes: fewer are spoken for by what is above it."""
_FEWEST_OF_KIND = 6
_FEWEST_OF_OTHERS = 200
_FEWEST_OF_BAND = 60
"""Rows that speak of how far their class lies from a fit: fewer are like one another, not like what comes."""
_APART = frozenset({"attention.context", "attention.generation", "attention.encoder"})
"""Kinds of one kernel that is like no other: few rows of it say more than all else does."""
_ONE_KERNEL = CHIP_WIDE_KINDS | _APART
_FROM_OTHERS = MATRIX_KINDS
"""Kinds that other data may know better than recordings do."""
_START_WIDTH, _RATE_WIDTH, _PRODUCT_WIDTH = 0.25, 0.5, 0.3
"""How far a class may lie from the one above it: ln units of one standard deviation."""
_FOLDS = 5
_CALLS = 60

_FIRST: Prior = {"t0_ns": (2000.0, 1.0), "overlap": (4.0, 0.2)}

_Name = tuple[str, str, str]
"""Kind, operation and number format of a fit; ``*`` is any."""


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    """A fit of a form (by name), and how many rows it was made of."""

    form: str
    solution: FormSolution
    samples: int


_Common = Mapping[KernelName, KernelClass]
"""What kernels of a vendor have in common; empty where none was recorded."""


def fit_recordings(
    recordings: Sequence[Measurements],
    device: Device,
    *,
    seed: int = 0,
    fitted: str = "",
    common: _Common | None = None,
) -> tuple[Fit, ...]:
    """The fits of recordings on ``device``, whose fits of other data matmuls are drawn towards, and kernels
    towards what is ``common`` to the vendor's (None: what ships).

    Errors and intervals are of recordings left out in turn, of shapes where there is one only. ``fitted`` is
    the date written into the fits (ISO; empty: today). Deterministic for one ``seed``; no fits where no
    operation has known sizes and rates.
    """
    shared = classes_of_fits(common_fits(device)) if common is None else common
    table = joined(recordings, " ".join(dict.fromkeys(each.name for each in recordings)))
    source = np.repeat(np.arange(len(recordings)), [len(each) for each in recordings])
    usable = _usable(table, device, shared)
    table, source = table.take(usable), source[usable]
    if len(table) < _FEWEST:
        return ()
    fold = source if len(np.unique(source)) > 1 else _folds_of_shapes(table, seed)
    predicted_ns, by = _left_out(table, device, shared, fold)
    known = ~np.isnan(predicted_ns)
    classes = _without_worse(_fitted(table, device, shared), table, device, predicted_ns)
    if shared and (products := _products(table, device, fold, predicted_ns)) is not None:
        classes = {name: found for name, found in classes.items() if name[0] != PRODUCT_KIND}
        classes[PRODUCT_KIND, ANY, ANY], said = products
        predicted_ns = np.where(np.isnan(said), predicted_ns, said)
        by = [(PRODUCT_KIND, ANY, ANY) if each[0] == PRODUCT_KIND else each for each in by]
    everything = bands_of(predicted_ns[known], table.duration_ns[known])
    fits: list[Fit] = []
    for name, found in sorted(classes.items()):
        mine = np.array([each == name for each in by], np.bool_) & known
        values, errors = found.solution.values, found.solution.std_errors
        fit = fit_of(
            (*name, ANY if name[0] == ANY else ""),
            found.form,
            ((each, values[each], errors[each]) for each in values),
            table,
            (predicted_ns[mine], table.duration_ns[mine]),
            fitted=fitted,
            seed=seed,
        )
        fits.append(
            replace(
                fit,
                samples=found.samples,
                bands=(fit.bands if mine.sum() >= _FEWEST_OF_BAND else ()) or everything,
                default=True,
            )
        )
    return tuple(fits)


def _usable(table: Measurements, device: Device, common: _Common) -> IntArray:
    """Rows whose kind and number format the device's rates and one of the forms cover, and whose time the
    device can reach.
    """
    known = _has_rates(table, device)
    if common:
        known[is_kernel(table)] = True
    return np.flatnonzero(known & (table.duration_ns > 0) & is_possible(table, device))


def _has_rates(table: Measurements, device: Device) -> BoolArray:
    with np.errstate(invalid="ignore"):
        return np.isfinite(_time_ns(table, device, _ROOFLINE, _starts(_ROOFLINE)))


def _products(
    table: Measurements, device: Device, fold: IntArray, predicted_ns: FloatArray
) -> tuple[_Class, FloatArray] | None:
    """What programs' products take beside what benchmarks say, and that of rows left out; None where the fits
    of recordings alone (``predicted_ns``) are nearer to these and no benchmark of the device was fitted.
    """
    before_ns = benchmark_ns(table, device)
    said = np.full(len(table), np.nan)
    for number in np.unique(fold).tolist():
        seen, unseen = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        values = fit_products(table.take(seen), device, before_ns[seen], UNKNOWN_PRODUCTS)
        ragged = ragged_share(table.ops.take(unseen), device)
        said[unseen] = product_time_ns(values, before_ns[unseen], ragged)
    rows = table.ops.kind.where(PRODUCT_KIND)
    both = rows[np.isfinite(predicted_ns[rows] + said[rows])]
    errors = [np.abs(each[both] / table.duration_ns[both] - 1).sum() for each in (said, predicted_ns)]
    fitted = any(fit.kind == PRODUCT_KIND and fit.samples >= _FEWEST_OF_OTHERS for fit in device.fits)
    if not len(rows) or (errors[0] > errors[1] and not fitted):
        return None
    values = fit_products(table, device, before_ns, UNKNOWN_PRODUCTS)
    unknown = dict.fromkeys(values, np.nan)
    said[np.setdiff1d(np.arange(len(table)), rows)] = np.nan
    return _Class(PRODUCTS, FormSolution(values=values, std_errors=unknown, cost=np.nan), len(rows)), said


def _without_worse(
    classes: Mapping[_Name, _Class], table: Measurements, device: Device, predicted_ns: FloatArray
) -> dict[_Name, _Class]:
    """Without the kinds whose recorded times the device's earlier fits and models are nearer to than fits to
    rows left out: hundreds of thousands of shapes of a benchmark know more of attention than a few layers do.
    """
    before_ns = benchmark_ns(table, device)
    worse: set[str] = set()
    for kind in _FROM_OTHERS:
        rows = table.ops.kind.where(kind)
        rows = rows[~np.isnan(predicted_ns[rows])]
        errors = [np.abs(each[rows] / table.duration_ns[rows] - 1) for each in (before_ns, predicted_ns)]
        if len(rows) and errors[0].mean() <= errors[1].mean():
            worse.add(kind)
    return {name: found for name, found in classes.items() if name[0] not in worse}


def _starts(form: Form) -> dict[str, float]:
    return {each.name: each.start for each in form.parameters}


def _parts(table: Measurements) -> Iterable[tuple[str, str, IntArray]]:
    """Rows of each kind and number format: what meets one rate."""
    for (kind, scheme), rows in rows_by_label(table.ops.kind, table.ops.scheme):
        yield kind, scheme, rows


def _time_ns(table: Measurements, device: Device, form: Form, values: Mapping[str, float]) -> FloatArray:
    found = np.full(len(table), np.nan)
    for kind, scheme, rows in _parts(table):
        found[rows] = form_time_ns(form, values, table.ops.take(rows), machine_of(device, kind, scheme))
    return found


def _columns(table: Measurements, device: Device, form: Form) -> tuple[Columns, IntArray]:
    """The form's columns of all rows, and the rows in that order."""
    parts = list(_parts(table))
    made = [
        form.columns(table.ops.take(rows), machine_of(device, kind, scheme)) for kind, scheme, rows in parts
    ]
    columns = {
        name: np.concatenate([each[name] for each in made], axis=-1) if made[0][name].ndim else made[0][name]
        for name in made[0]
    }
    return columns, np.concatenate([rows for _, _, rows in parts])


def _solved(table: Measurements, device: Device, form: Form, prior: Prior) -> _Class:
    columns, order = _columns(table, device, form)
    start = _starts(form) | {name: value for name, (value, _) in prior.items()}
    fixed = {each.name: start[each.name] for each in form.parameters if not each.varies}
    times = table.duration_ns[order]
    found = solve(form, columns, times, start, prior=prior, fixed=fixed, most_calls=_CALLS)
    return _Class(form.name, found, len(table))


def _fitted(table: Measurements, device: Device, common: _Common) -> dict[_Name, _Class]:
    """Every class of some rows, from the whole chip down."""
    found = _kernels(table, device, common) if common else {}
    table = table.take(np.flatnonzero(_has_rates(table, device)))
    if not len(table):
        return found
    chip = _solved(table, device, _ROOFLINE, _FIRST)
    found[ANY, ANY, ANY] = chip
    streamed = table.take(table.ops.kind.where(*(set(table.ops.kind.names) - MATRIX_KINDS)))
    streams = _solved(streamed, device, _ROOFLINE, _around(chip)) if len(streamed) else chip
    index = FitIndex.of(device)
    for kind in table.ops.kind.used():
        rows = table.take(table.ops.kind.where(kind))
        if common and kind in KERNEL_KINDS:
            continue
        if kind in _ONE_KERNEL and len(rows) >= _FEWEST:
            above = _solved(rows, device, _ROOFLINE, _around(chip if kind in MATRIX_KINDS else streams))
            found |= _operations(rows, device, kind, above)
            if len(rows) >= _FEWEST_OF_KIND or kind in _APART:
                found[kind, ANY, ANY] = above
        if kind in MATRIX_KINDS:
            found |= _drawn_to_others(rows, device, kind, index)
    return found


def _kernels(table: Measurements, device: Device, common: _Common) -> dict[_Name, _Class]:
    """Classes of kernels: those that the vendor's devices have in common, as the recorded show them to run
    here, and those recorded beside them.
    """
    part = table.take(is_kernel(table))
    counts: dict[KernelName, int] = {}
    for (kind, op), rows in rows_by_label(part.ops.kind, part.ops.op):
        for name in {(kind, op or ANY), (kind, ANY)}:
            counts[name] = counts.get(name, 0) + len(rows)
    unknown = dict.fromkeys((each.name for each in KERNELS.parameters), np.nan)
    return {
        (*name, ANY): _Class(
            KERNELS.name,
            FormSolution(values=values, std_errors=unknown, cost=np.nan),
            counts.get(name, len(part)),
        )
        for name, values in kernels_of_device(part, device, common).items()
    }


def _operations(rows: Measurements, device: Device, kind: str, above: _Class) -> dict[_Name, _Class]:
    """A class for each operation of a kind that has several."""
    names = rows.ops.op.used()
    parts = {name: rows.take(rows.ops.op.where(name)) for name in names if name and len(names) > 1}
    return {
        (kind, name, ANY): _solved(part, device, _ROOFLINE, _around(above))
        for name, part in parts.items()
        if len(part) >= _FEWEST
    }


def _around(above: _Class) -> Prior:
    values = above.solution.values
    return {
        each.name: (values[each.name], _START_WIDTH if each.name == "t0_ns" else _RATE_WIDTH)
        for each in EVERY_FORM[above.form].parameters
    }


def _drawn_to_others(rows: Measurements, device: Device, kind: str, index: FitIndex) -> dict[_Name, _Class]:
    """A class for each number format of matmuls that the device has a fit of other data for."""
    found: dict[_Name, _Class] = {}
    for scheme in rows.ops.scheme.used():
        part = rows.take(rows.ops.scheme.where(scheme))
        choice = index.choose(kind, "", scheme, "")
        if choice is None or choice.quantizing or choice.assumed[0] == "calibrated.chip-wide":
            continue
        other = choice.fits[0]
        form = FORMS.get(other.form)
        if form is None or form is _ROOFLINE or other.samples < _FEWEST_OF_OTHERS or len(part) < _FEWEST:
            continue
        prior = {each.name: (each.value, _PRODUCT_WIDTH) for each in other.parameters}
        found[kind, "", scheme] = _solved(part, device, form, prior)
    return found


def _predicted(
    table: Measurements, device: Device, classes: Mapping[_Name, _Class]
) -> tuple[FloatArray, list[_Name]]:
    """The time of each row by the nearest class, and the name of that class."""
    names = [_nearest(table, row, classes) for row in range(len(table))]
    found = np.full(len(table), np.nan)
    for name in dict.fromkeys(names):
        rows = np.array([number for number, each in enumerate(names) if each == name], np.int64)
        one = classes[name]
        found[rows] = _time_ns(table.take(rows), device, EVERY_FORM[one.form], one.solution.values)
    return found, names


def _nearest(table: Measurements, row: int, classes: Mapping[_Name, _Class]) -> _Name:
    kind, op, scheme = table.ops.kind[row], table.ops.op[row], table.ops.scheme[row]
    for name in ((kind, "", scheme), (kind, op, ANY), (kind, ANY, ANY)):
        if name in classes:
            return name
    return ANY, ANY, ANY


def _folds_of_shapes(table: Measurements, seed: int) -> IntArray:
    """A fifth for each shape, drawn at random."""
    group = table.shape_group()
    return np.random.default_rng(seed).permutation(int(group.max()) + 1)[group] % _FOLDS


def _left_out(
    table: Measurements, device: Device, common: _Common, fold: IntArray
) -> tuple[FloatArray, list[_Name]]:
    """What fits without a fold say of it, fold by fold; and which class says it."""
    predicted_ns = np.full(len(table), np.nan)
    names: list[_Name] = [(ANY, ANY, ANY)] * len(table)
    for number in np.unique(fold).tolist():
        unseen: BoolArray = fold == number
        if (~unseen).sum() < _FEWEST:
            continue
        classes = _fitted(table.take(np.flatnonzero(~unseen)), device, common)
        rows = np.flatnonzero(unseen)
        predicted_ns[rows], told = _predicted(table.take(rows), device, classes)
        for row, name in zip(rows.tolist(), told, strict=True):
            names[row] = name
    return predicted_ns, names


_UNFIT = ("other", "collective")
"""Kinds whose time the operation alone does not decide: messages wait for other ranks."""


def measurements_of(
    profile: Profile | Workload,
    hardware: str | Device,
    *,
    workload: Workload | None = None,
    diagnostics: Diagnostics | None = None,
) -> Measurements:
    """Each distinct operation of a recording once, with the median time of its executions and their mean
    distance from it.

    Operations are those of ``workload``, of the compiled programs that the profile brings along, or of its
    own costed operations: see :func:`~hespas.validators.accuracy.sources.sources_of`. They name no variant:
    they are what a program on ``hardware`` runs. Events of other devices are left out where the profile names
    several, as :func:`~hespas.validators.accuracy.sources.by_device` does. Raises ``UsageError`` for a
    profile without any operation.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    device = load_device(hardware) if isinstance(hardware, str) else hardware
    [(part, _)] = by_device(profile, {device.name: device}, found)
    sources = list(sources_of(part, workload, device.name, found))
    return joined([_of_source(source, device.name) for source in sources], profile.name)


def _of_source(source: CaseSource, hardware: str) -> Measurements:
    """The cases of one program as operations; equal ones once."""
    ops = operations_of(source.graph).take(source.node)
    duration = source.cases.measured_ns / source.times
    usable = (duration > 0) & np.isfinite(ops.flops) & np.isfinite(ops.bytes_moved)
    usable[ops.kind.where(*_UNFIT)] = False
    usable[ops.scheme.where("")] = False
    kept = np.flatnonzero(usable)
    distinct, place = ops.take(kept).distinct()
    median, away = medians_of(duration[kept], place)
    count = len(distinct)
    return Measurements(
        name=source.cases.source,
        provenance=f"the recording {source.cases.source} of {source.cases.workload}",
        ops=distinct,
        duration_ns=median,
        spread_ns=away,
        hardware=Labels.constant(hardware, count),
        split=Labels.constant("", count),
        left_out=(LeftOut("no known cost, or the time of others", int(len(ops) - len(kept))),),
        recorded=True,
    )
