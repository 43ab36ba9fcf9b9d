"""Bases of learned models: fitted formulas of time for each class of operations on each device, which the
trees correct.

The asymptote of a base is the correction by the trees for the largest operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as with_fields

from hespas.estimators.forms import ARRAYS, FORMS, form_time_ns
from hespas.estimators.learned.bases import Base, BaseIndex, combined_ns
from hespas.estimators.learned.ensemble import FAMILIES
from hespas.fitting.device_forms import ClassRows, classes_of, fit_classes, solve
from hespas.fitting.fits import rounded
from hespas.fitting.held_out import folds_of, parts_in_turn
from hespas.fitting.learned_parts import LearnedPart, TrainingRows
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import Device
from hespas.operations import Operations

__all__ = ["BEYOND_OCTAVES", "Bases", "beyond_region", "form_share", "swept", "with_bases"]

_SHARES: Mapping[str, float] = {
    "product": 0.5,
    "attention": 1.0,
    "generation": 1.0,
    "experts": 0.5,
    "stream": 0.75,
}
"""Share of the fitted form in the base, by family of columns: the share with the least errors on sizes beyond
the fit (``python -m benchmarks.carry_over.operations``).
"""
_SWEPT: Mapping[str, tuple[str, ...]] = {
    "product": ("m", "n", "k"),
    "attention": ("batch", "q_len", "heads"),
    "generation": ("batch", "kv_len", "heads"),
    "experts": ("tokens",),
    "stream": ("rows", "columns"),
}
"""Dimensions that tables sweep over many octaves, and that users exceed."""
BEYOND_OCTAVES = 2.0
"""Largest octaves of a dimension that are held out of a fit to test it beyond its sizes."""
_LEAST_OCTAVES = 5.0
"""Least octaves of a swept dimension."""

_FOLDS = 4
_MOST_HELD_OUT_ROWS = 2000
"""Most rows of a class that is held out: with more, the time of a single row does not change the
parameters.
"""
_CALLS = 12
_ASYMPTOTE_SHARE = 0.1
_ASYMPTOTE_ROWS = 5


def form_share(part: LearnedPart, forms: Collection[str]) -> float:
    """Return the exponent of the fitted form in the base time of a part
    (:mod:`~hespas.estimators.learned.bases`). The exponent of the data-sheet time is 1 minus this. ``forms``
    are the fitted forms of its classes.

    It is 1 if all forms count passes of systolic arrays, because the data-sheet time does not include
    padding.
    """
    return 1.0 if set(forms) == {ARRAYS.name} else _SHARES[FAMILIES[part.kinds[0]]]


def swept(part: LearnedPart) -> tuple[str, ...]:
    """Return the dimensions of a part that measured tables vary over many octaves."""
    return _SWEPT[FAMILIES[part.kinds[0]]]


def beyond_region(part: LearnedPart, ops: Operations, names: tuple[str, ...] = ()) -> BoolArray:
    """Return a mask of the operations that are beyond the fitted region, for tests of extrapolation: those in
    the two largest octaves of some dimension. Shape ``(ops,)``. ``names`` are the dimensions (empty: all
    dimensions that were varied in the part).
    """
    beyond = np.zeros(len(ops), np.bool_)
    for name in names or swept(part):
        size = ops.dim(name)
        sizes = size[~np.isnan(size)]
        if len(sizes) and np.log2(sizes.max() / max(sizes.min(), 1.0)) >= _LEAST_OCTAVES:
            beyond |= size > sizes.max() / 2**BEYOND_OCTAVES
    return beyond


@dataclass(frozen=True, slots=True, eq=False)
class Bases:
    """Fitted forms of all classes of operations, from which base times are computed
    (:mod:`~hespas.estimators.learned.bases`). ``forms`` has the parameter names of each form. ``share`` is
    the exponent of the fitted form; the exponent of the data-sheet time is 1 - ``share``.
    """

    bases: tuple[Base, ...]
    forms: Mapping[str, tuple[str, ...]]
    share: float

    @property
    def index(self) -> BaseIndex:
        """Return the bases indexed by device and class of operations."""
        return BaseIndex(self.bases, self.forms)

    def log_ratio(
        self, rows: TrainingRows, chosen: IntArray, device: Device, names: Sequence[str]
    ) -> FloatArray:
        """Return the log of measured over base time of the ``chosen`` rows, shape ``(chosen rows,)``.

        The bases use the fitted parameters of the devices ``names`` and the rates of ``device``.
        """
        part = rows.take(chosen)
        logs, _ = self.index.log_times(part.measured.ops, device, names)
        return np.asarray(np.log(part.measured.duration_ns / combined_ns(logs, part.sheet_ns, self.share)))


def with_bases(part: LearnedPart, rows: TrainingRows, *, seed: int) -> tuple[TrainingRows, Bases]:
    """Fit a base for each class of rows, and return the rows with the logarithm of measured over base time.

    In small classes, the parameters for a row come from a fit without the fold of that row.
    """
    logs = np.full(len(rows.ratio), np.nan)
    fitted: list[Base] = []
    classes = (
        (class_rows, class_rows.machine(device))
        for _, device, of_device in rows.by_device()
        for class_rows in classes_of(rows.measured.take(of_device))
    )
    for fit in fit_classes(classes, {}, seed):
        kind, op, scheme, variant = fit.rows.key
        values = fit.solution.values
        base = Base(
            hardware=fit.rows.measured.hardware.used()[0],
            kind=kind,
            op=op,
            scheme=scheme,
            variant=variant,
            form=fit.form.name,
            parameters=tuple(rounded(values[parameter.name]) for parameter in fit.form.parameters),
            asymptote=0.0,
        )
        fitted.append(base)
    forms = {base.form: tuple(parameter.name for parameter in FORMS[base.form].parameters) for base in fitted}
    bases = Bases(tuple(fitted), forms, form_share(part, forms))
    for name, device, of_device in rows.by_device():
        logs[of_device], _ = bases.index.log_times(rows.measured.ops.take(of_device), device, [name])
        for numbers, times in _held_out_times(rows.take(of_device), bases, name, seed=seed):
            logs[of_device[numbers]] = np.log(times)
    base_ns = combined_ns(logs, rows.sheet_ns, bases.share)
    based = replace(rows, ratio=np.log(rows.measured.duration_ns / base_ns))
    return based, replace(bases, bases=tuple(_with_asymptote(base, based) for base in bases.bases))


def _held_out_times(
    rows: TrainingRows, bases: Bases, name: str, *, seed: int
) -> Iterator[tuple[IntArray, FloatArray]]:
    """Yield rows of the small classes of one device, with their times [ns] as predicted by a fit without
    their fold.
    """
    measured = rows.measured
    generator = np.random.default_rng(seed)
    for labels, numbers in measured.ops.classes():
        base = bases.index.find(name, labels)
        if base is None or len(numbers) > _MOST_HELD_OUT_ROWS or len(numbers) < 2 * _FOLDS:
            continue
        class_rows = ClassRows(key=labels, measured=measured.take(numbers), group=numbers)
        machine, form = class_rows.machine(rows.devices[name]), FORMS[base.form]
        start = dict(zip(bases.forms[base.form], base.parameters, strict=True))
        fixed = {
            parameter.name: start[parameter.name] for parameter in form.parameters if not parameter.varies
        }
        for fitted, held_out in parts_in_turn(folds_of(numbers, _FOLDS, generator)):
            part = class_rows.take(fitted).measured
            solution = solve(
                form,
                form.columns(part.ops, machine),
                part.duration_ns,
                start,
                prior={},
                fixed=fixed,
                most_calls=_CALLS,
            )
            tested = measured.ops.take(numbers[held_out])
            yield numbers[held_out], form_time_ns(form, solution.values, tested, machine)


def _with_asymptote(base: Base, rows: TrainingRows) -> Base:
    """Return a base with its asymptote: the median residual of the largest rows of its class."""
    ops = rows.measured.ops
    of_class = rows.measured.hardware.where(base.hardware)
    labels = ((ops.kind, base.kind), (ops.scheme, base.scheme), (ops.variant, base.variant))
    for column, name in labels:
        of_class = np.intersect1d(of_class, column.where(name))
    if base.op in ops.op.names:
        of_class = np.intersect1d(of_class, ops.op.where(base.op))
    order = of_class[np.argsort(rows.sheet_ns[of_class], kind="stable")]
    largest = order[-max(_ASYMPTOTE_ROWS, int(_ASYMPTOTE_SHARE * len(order))) :]
    return with_fields(base, asymptote=rounded(float(np.median(rows.ratio[largest]))))
