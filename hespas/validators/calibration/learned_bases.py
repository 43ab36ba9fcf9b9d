"""Fits what trees correct: forms of each class on each device, and what is known of them beyond the fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as with_fields

from hespas.estimators.array_form import ARRAYS
from hespas.estimators.forms import FORMS, form_time_ns
from hespas.estimators.learned.bases import Base, BaseIndex, combined_ns
from hespas.estimators.learned.ensemble import FAMILIES
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.operations import Operations
from hespas.validators.calibration.fit_device import Rows as ClassRows
from hespas.validators.calibration.fit_device import classes_of, fit_class, rounded, solve
from hespas.validators.calibration.learned_parts import Part, Rows

__all__ = ["BEYOND_OCTAVES", "Bases", "beyond_region", "form_share", "swept", "with_bases"]

_SHARES: Mapping[str, float] = {
    "product": 0.5,
    "attention": 1.0,
    "generation": 1.0,
    "experts": 0.5,
    "stream": 0.75,
}
"""How much of the base is the fitted form, by family of columns: what errs least on sizes beyond those of the
fit (``python -m benchmarks.carry_over.operations``).
"""
_SWEPT: Mapping[str, tuple[str, ...]] = {
    "product": ("m", "n", "k"),
    "attention": ("batch", "q_len", "heads"),
    "generation": ("batch", "kv_len", "heads"),
    "experts": ("tokens",),
    "stream": ("rows", "columns"),
}
"""Dimensions that tables sweep over many octaves, and users go beyond."""
BEYOND_OCTAVES = 2.0
"""How many of the largest octaves of a dimension are beyond a fit that is tested there."""
_LEAST_OCTAVES = 5.0
"""Dimensions that span fewer are no sweep."""

_FOLDS = 4
_FEW = 2000
"""Classes of more rows tell their parameters well enough that a row's own time does not show in them."""
_CALLS = 12
_ASYMPTOTE_SHARE = 0.1
_ASYMPTOTE_ROWS = 5


def form_share(part: Part, forms: Collection[str]) -> float:
    """How much of the base of a part is the fitted form, where its classes were fitted with some ``forms``:
    all of it where these count the passes of systolic arrays, whose padding no data sheet knows of.
    """
    return 1.0 if set(forms) == {ARRAYS.name} else _SHARES[FAMILIES[part.kinds[0]]]


def swept(part: Part) -> tuple[str, ...]:
    """The dimensions of a part that tables sweep over many octaves."""
    return _SWEPT[FAMILIES[part.kinds[0]]]


def beyond_region(part: Part, ops: Operations, names: tuple[str, ...] = ()) -> BoolArray:
    """Which operations lie in the largest octaves of any of some dimensions (none named: any that is swept),
    shape ``(ops,)``.
    """
    beyond = np.zeros(len(ops), np.bool_)
    for name in names or swept(part):
        size = ops.dim(name)
        known = size[~np.isnan(size)]
        if len(known) and np.log2(known.max() / max(known.min(), 1.0)) >= _LEAST_OCTAVES:
            beyond |= size > known.max() / 2**BEYOND_OCTAVES
    return beyond


@dataclass(frozen=True, slots=True, eq=False)
class Bases:
    """The fitted forms of some rows."""

    bases: tuple[Base, ...]
    forms: Mapping[str, tuple[str, ...]]

    @property
    def index(self) -> BaseIndex:
        """What answers for an operation."""
        return BaseIndex(self.bases, self.forms)


def with_bases(part: Part, rows: Rows, *, seed: int) -> tuple[Rows, Bases]:
    """The rows with the logarithm of their time over the base, each from parameters that its own fold did not
    enter where they rest on few; and the bases, fitted on all rows.
    """
    logs = np.full(len(rows.ratio), np.nan)
    found: list[Base] = []
    for name, device in sorted(rows.devices.items()):
        mine = rows.measured.hardware.where(name)
        measured = rows.measured.take(mine)
        for some in classes_of(measured):
            fit = fit_class(some, some.machine(device), {}, seed)
            if fit is None:
                continue
            kind, op, scheme, variant = some.key
            values = fit.solution.values
            base = Base(
                hardware=name,
                kind=kind,
                op=op,
                scheme=scheme,
                variant=variant,
                form=fit.form.name,
                parameters=tuple(rounded(values[each.name]) for each in fit.form.parameters),
                asymptote=0.0,
            )
            found.append(base)
    forms = {base.form: tuple(each.name for each in FORMS[base.form].parameters) for base in found}
    bases = Bases(tuple(found), forms)
    for name, device in rows.devices.items():
        mine = rows.measured.hardware.where(name)
        logs[mine], _ = bases.index.log_times(rows.measured.ops.take(mine), device, [name])
        for at, times in _held_out(rows.take(mine), bases, name, seed=seed):
            logs[mine[at]] = np.log(times)
    base_ns = combined_ns(logs, rows.sheet_ns, form_share(part, forms))
    based = replace(rows, ratio=np.log(rows.measured.duration_ns / base_ns))
    return based, replace(bases, bases=tuple(_ended(base, based) for base in bases.bases))


def _held_out(rows: Rows, bases: Bases, name: str, *, seed: int) -> Iterator[tuple[IntArray, FloatArray]]:
    """Rows of small classes of one device, with their times by parameters that their fold did not enter."""
    measured = rows.measured
    generator = np.random.default_rng(seed)
    for labels, at in measured.ops.classes():
        base = bases.index.find(name, labels)
        if base is None or len(at) > _FEW or len(at) < 2 * _FOLDS:
            continue
        some = ClassRows(key=labels, measured=measured.take(at), group=at)
        machine, form = some.machine(rows.devices[name]), FORMS[base.form]
        start = dict(zip(bases.forms[base.form], base.parameters, strict=True))
        fixed = {each.name: start[each.name] for each in form.parameters if not each.varies}
        fold = generator.permutation(len(at)) % _FOLDS
        for number in range(_FOLDS):
            seen, unseen = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
            part = some.take(seen).measured
            columns = form.columns(part.ops, machine)
            found = solve(form, columns, part.duration_ns, start, prior={}, fixed=fixed, most_calls=_CALLS)
            tested = measured.ops.take(at[unseen])
            yield at[unseen], form_time_ns(form, found.values, tested, machine)


def _ended(base: Base, rows: Rows) -> Base:
    """A base with what its largest rows leave: the median of the tenth that takes the longest."""
    ops = rows.measured.ops
    mine = rows.measured.hardware.where(base.hardware)
    labels = ((ops.kind, base.kind), (ops.scheme, base.scheme), (ops.variant, base.variant))
    for column, name in labels:
        mine = np.intersect1d(mine, column.where(name))
    if base.op in ops.op.names:
        mine = np.intersect1d(mine, ops.op.where(base.op))
    order = mine[np.argsort(rows.sheet_ns[mine], kind="stable")]
    largest = order[-max(_ASYMPTOTE_ROWS, int(_ASYMPTOTE_SHARE * len(order))) :]
    return with_fields(base, asymptote=rounded(float(np.median(rows.ratio[largest]))))
