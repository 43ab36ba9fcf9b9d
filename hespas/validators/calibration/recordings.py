"""Fits of recorded programs: tens of shapes of each operation, where tables have thousands.

What runs in one recording runs alike, so everything is drawn towards what holds for more of it: an operation
towards its kind, a kind towards the whole chip, a matmul towards the fit of other data that the device has.

    whole chip  ->  kind  ->  operation            start, arithmetic and traffic (form ``roofline``)
    fit of other data  ->  matmuls of a format     all parameters of its form
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hespas.estimators.calibrated import FitIndex
from hespas.estimators.forms import CHIP_WIDE_KINDS, FORMS, Columns, Form, form_time_ns, machine_of
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit, load_device
from hespas.measurements import LeftOut, Measurements, joined
from hespas.operations import MATRIX_KINDS, Labels, operations_of
from hespas.operations.model import rows_by_label
from hespas.validators.accuracy.sources import Source, by_device, sources_of
from hespas.validators.accuracy.statistics import medians_of
from hespas.validators.calibration.fit_device import Prior, Solution, bands_of, fit_of, solve

__all__ = ["fit_recordings", "measurements_of"]

_ROOFLINE = FORMS["roofline"]
_FEWEST = 2
"""Rows that a class of its own takes: fewer are spoken for by what is above it."""
_FEWEST_OF_KIND = 6
_FEWEST_OF_OTHERS = 200
_APART = frozenset({"attention.context", "attention.generation", "attention.encoder"})
"""Kinds of one kernel that is like no other: few rows of it say more than all else does."""
_ONE_KERNEL = CHIP_WIDE_KINDS | _APART
_START_WIDTH, _RATE_WIDTH, _PRODUCT_WIDTH = 0.25, 0.5, 0.3
"""How far a class may lie from the one above it: ln units of one standard deviation."""
_FOLDS = 5
_CALLS = 60

_FIRST: Prior = {"t0_ns": (2000.0, 1.0), "overlap": (4.0, 0.2)}

_Name = tuple[str, str, str]
"""Kind, operation and number format of a fit; ``*`` is any."""


@dataclass(frozen=True, slots=True, eq=False)
class _Class:
    """A fit, and how many rows it was made of."""

    form: Form
    solution: Solution
    samples: int


def fit_recordings(
    recordings: Sequence[Measurements], device: Device, *, seed: int = 0, fitted: str = ""
) -> tuple[Fit, ...]:
    """The fits of recordings on ``device``, whose fits of other data matmuls are drawn towards.

    Errors and intervals are of shapes left out, a fifth in turn. ``fitted`` is the date written into the fits
    (ISO; empty: today). Deterministic for one ``seed``; no fits where no operation has known sizes and rates.
    """
    table = joined(recordings, " ".join(dict.fromkeys(each.name for each in recordings)))
    table = table.take(_usable(table, device))
    if len(table) < _FEWEST:
        return ()
    classes = _fitted(table, device)
    predicted_ns, by = _of_shapes_left_out(table, device, seed)
    everything = bands_of(predicted_ns[~np.isnan(predicted_ns)], table.duration_ns[~np.isnan(predicted_ns)])
    fits: list[Fit] = []
    for name, found in sorted(classes.items()):
        mine = np.array([each == name for each in by], np.bool_) & ~np.isnan(predicted_ns)
        values, errors = found.solution.values, found.solution.std_errors
        fit = fit_of(
            (*name, ANY if name[0] == ANY else ""),
            found.form.name,
            ((each.name, values[each.name], errors[each.name]) for each in found.form.parameters),
            table,
            (predicted_ns[mine], table.duration_ns[mine]),
            fitted=fitted,
            seed=seed,
        )
        fits.append(replace(fit, samples=found.samples, bands=fit.bands or everything, default=True))
    return tuple(fits)


def _usable(table: Measurements, device: Device) -> IntArray:
    """Rows whose kind and number format the device's rates and one of the forms cover."""
    with np.errstate(invalid="ignore"):
        known = np.isfinite(_time_ns(table, device, _ROOFLINE, _starts(_ROOFLINE)))
    return np.flatnonzero(known & (table.duration_ns > 0))


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
    return _Class(form, found, len(table))


def _fitted(table: Measurements, device: Device) -> dict[_Name, _Class]:
    """Every class of some rows, from the whole chip down."""
    chip = _solved(table, device, _ROOFLINE, _FIRST)
    found: dict[_Name, _Class] = {(ANY, ANY, ANY): chip}
    streamed = table.take(table.ops.kind.where(*(set(table.ops.kind.names) - MATRIX_KINDS)))
    streams = _solved(streamed, device, _ROOFLINE, _around(chip)) if len(streamed) else chip
    index = FitIndex.of(device)
    for kind in table.ops.kind.used():
        rows = table.take(table.ops.kind.where(kind))
        if kind in _ONE_KERNEL and len(rows) >= _FEWEST:
            above = _solved(rows, device, _ROOFLINE, _around(chip if kind in MATRIX_KINDS else streams))
            found |= _operations(rows, device, kind, above)
            if len(rows) >= _FEWEST_OF_KIND or kind in _APART:
                found[kind, ANY, ANY] = above
        if kind in MATRIX_KINDS:
            found |= _drawn_to_others(rows, device, kind, index)
    return found


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
        for each in above.form.parameters
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
        found[rows] = _time_ns(table.take(rows), device, one.form, one.solution.values)
    return found, names


def _nearest(table: Measurements, row: int, classes: Mapping[_Name, _Class]) -> _Name:
    kind, op, scheme = table.ops.kind[row], table.ops.op[row], table.ops.scheme[row]
    for name in ((kind, "", scheme), (kind, op, ANY), (kind, ANY, ANY)):
        if name in classes:
            return name
    return ANY, ANY, ANY


def _of_shapes_left_out(table: Measurements, device: Device, seed: int) -> tuple[FloatArray, list[_Name]]:
    """What fits without a fifth of the shapes say of it, fifth by fifth; and which class says it."""
    group = table.shape_group()
    fold = np.random.default_rng(seed).permutation(int(group.max()) + 1)[group] % _FOLDS
    predicted_ns = np.full(len(table), np.nan)
    names: list[_Name] = [(ANY, ANY, ANY)] * len(table)
    for number in range(_FOLDS):
        unseen: BoolArray = fold == number
        if not unseen.any() or (~unseen).sum() < _FEWEST:
            continue
        classes = _fitted(table.take(np.flatnonzero(~unseen)), device)
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


def _of_source(source: Source, hardware: str) -> Measurements:
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
