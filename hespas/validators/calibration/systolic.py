"""Lines of :mod:`hespas.estimators.systolic` from measured times: non-negative relative least squares.

Each line minimises the relative errors, reweighted so that large ones count by their size. What it is worth
is told on shapes left out: folds of whole shapes in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.systolic.cycles import Array
from hespas.estimators.systolic.lines import (
    ELEMENTS,
    LONG,
    PRODUCTS,
    element_columns,
    own_cycles,
    product_columns,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit, FitParameter, FitRange
from hespas.measurements import Measurements
from hespas.operations import Operations, find_scheme
from hespas.validators.calibration.fit_device import bands_of, error_of, may_be_fitted, rounded

__all__ = ["LINE_KINDS", "fit_lines", "has_columns"]

_FEWEST = 12
_FOLDS = 5
_ROUNDS = 8
_NOISE = 0.01
"""Relative errors below this count by their square."""

_LONG_MACS = 2.0**30
"""Multiply-accumulates from which a matmul is a long one: where the schedules part on a TPU v4."""

_LONG_PARAMETERS = frozenset(
    {"t0_ns", "cycle_ns", "lhs_ns_per_byte", "rhs_ns_per_byte", "result_ns_per_byte"}
)
_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "vector": ("t0_ns", "element_ns"),
    "normalization": ("t0_ns", "element_ns", "row_ns"),
    "pooling": ("t0_ns", "element_ns", "row_ns"),
}
LINE_KINDS = ("matmul", *_OF_KIND)
"""Kinds of operations that have lines."""

_OF_ANY = ("t0_ns", "ns_per_byte")
"""Operations that were not measured: by their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """Rows of one line: a column per parameter, shape ``(rows, parameters)``."""

    names: tuple[str, ...]
    columns: FloatArray
    duration_ns: FloatArray
    is_long: BoolArray


def fit_lines(
    tables: Sequence[Measurements], device: Device, *, seed: int = 0, fitted: str = ""
) -> tuple[Fit, ...]:
    """The lines of every class of operations that the tables hold for ``device``, which has an array.

    Only rows that may be fitted enter. ``fitted`` is the date written into the fits (ISO; empty: today).
    """
    date = fitted or datetime.now(UTC).date().isoformat()
    found: dict[tuple[str, str, str, str], Fit] = {}
    for table in tables:
        mine = may_be_fitted(table).on(device.name)
        mine = mine.take(np.flatnonzero(has_columns(mine.ops)))
        for fit in (*_matmuls(mine, device, seed, date), *_elements(mine, seed, date)):
            found.setdefault(fit.key, fit)
    return tuple(found[key] for key in sorted(found))


def has_columns(ops: Operations) -> BoolArray:
    """Which operations have sizes above 0 and a known number format: others hold nothing to weigh."""
    known = np.array([find_scheme(name) is not None for name in (*ops.scheme.names, "")], np.bool_)
    work = ops.dim("batch") * ops.dim("m") * ops.dim("n") * ops.dim("k")
    elements = ops.dim("rows") * ops.dim("columns") * ops.bytes_moved
    is_matmul = np.zeros(len(ops), np.bool_)
    is_matmul[ops.kind.where("matmul")] = True
    size = np.where(is_matmul, work, elements)
    return known[ops.scheme.row] & np.isfinite(size) & (size > 0)


def _matmuls(measured: Measurements, device: Device, seed: int, date: str) -> Iterator[Fit]:
    shape = device.systolic
    if shape is None:
        return
    array = Array(shape.rows, shape.columns, shape.dataflow)
    for labels, rows in _classes(measured, ("matmul",)):
        ops = measured.ops.take(rows)
        columns = product_columns(ops, own_cycles(ops, array), labels[2])
        macs = ops.flops / 2
        part = _part(tuple(columns), columns, measured.duration_ns[rows], macs > _LONG_MACS)
        yield _fit(labels, part, measured.take(rows), form=PRODUCTS, seed=seed, date=date)


def _elements(measured: Measurements, seed: int, date: str) -> Iterator[Fit]:
    kinds = tuple(_OF_KIND)
    for labels, rows in _classes(measured, kinds):
        yield _line(measured.take(rows), labels, _OF_KIND[labels[0]], seed, date)
    for kind in kinds:
        mine = measured.ops.kind.where(kind)
        schemes = measured.ops.scheme
        for scheme in sorted({schemes[int(row)] for row in mine}):
            of_scheme = mine[np.isin(mine, schemes.where(scheme))]
            ops = measured.ops.take(of_scheme).op
            for op in sorted(ops.used()):
                rows = of_scheme[ops.where(op)]
                if len(rows) >= _FEWEST:
                    yield _line(measured.take(rows), (kind, op, scheme, ANY), _OF_KIND[kind], seed, date)
            if kind == "vector" and len(of_scheme) >= _FEWEST:
                yield _line(measured.take(of_scheme), (kind, ANY, scheme, ANY), _OF_ANY, seed, date)


def _line(
    measured: Measurements, labels: tuple[str, str, str, str], names: tuple[str, ...], seed: int, date: str
) -> Fit:
    columns = element_columns(measured.ops)
    part = _part(names, columns, measured.duration_ns, np.zeros(len(measured), np.bool_))
    return _fit(labels, part, measured, form=ELEMENTS, seed=seed, date=date)


def _classes(
    measured: Measurements, kinds: tuple[str, ...]
) -> Iterator[tuple[tuple[str, str, str, str], IntArray]]:
    """Rows of one kind, operation, scheme and variant, where there are enough, in a fixed order."""
    ops = measured.ops
    labels = (ops.kind, ops.op, ops.scheme, ops.variant)
    key = np.stack([each.row for each in labels], axis=1)
    for distinct in np.unique(key, axis=0):
        kind, op, scheme, variant = (
            each.names[int(number)] for each, number in zip(labels, distinct, strict=True)
        )
        rows = np.flatnonzero((key == distinct).all(axis=1))
        if kind in kinds and len(rows) >= _FEWEST:
            yield (kind, op, scheme, variant), rows


def _part(
    names: tuple[str, ...], columns: Mapping[str, FloatArray], duration_ns: FloatArray, is_long: BoolArray
) -> _Part:
    return _Part(
        names=names,
        columns=np.stack([columns[name] for name in names], axis=1),
        duration_ns=duration_ns,
        is_long=is_long,
    )


def _solved(columns: FloatArray, duration_ns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Non-negative weights of the columns, and their standard errors (0 where a weight is)."""
    from scipy.optimize import nnls

    # Columns differ by ten orders of magnitude: each is scaled to one, or the solver stops early.
    scale = np.maximum(np.abs(columns / duration_ns[:, None]).max(axis=0), 1e-300)
    relative = columns / duration_ns[:, None] / scale
    weight = np.ones(len(duration_ns))
    found = np.zeros(columns.shape[1])
    for _ in range(_ROUNDS):
        found, _ = nnls(relative * weight[:, None], weight)
        weight = 1 / np.sqrt(np.maximum(np.abs(relative @ found - 1), _NOISE))
    active: BoolArray = found > 0
    used: NDArray[np.floating[Any]] = (relative * weight[:, None])[:, active]
    left = weight * (relative @ found - 1)
    variance = float(left @ left) / max(len(left) - int(np.count_nonzero(active)), 1)
    error = np.zeros(len(found))
    error[active] = np.sqrt(np.maximum(variance * _diagonal(np.linalg.pinv(used.T @ used)), 0.0))
    return found / scale, error / scale


def _diagonal(matrix: NDArray[np.floating[Any]]) -> FloatArray:
    return np.diagonal(matrix).astype(np.float64)


def _parameters(part: _Part) -> list[FitParameter]:
    """One line, or two where there are enough long matmuls."""
    found: list[FitParameter] = []
    has_long = int(part.is_long.sum()) >= _FEWEST
    for prefix, rows in (("", ~part.is_long), (LONG, part.is_long)) if has_long else (("", None),):
        keep = [place for place, name in enumerate(part.names) if not prefix or name in _LONG_PARAMETERS]
        chosen = slice(None) if rows is None else rows
        values, errors = _solved(part.columns[chosen][:, keep], part.duration_ns[chosen])
        for place, value, error in zip(keep, values.tolist(), errors.tolist(), strict=True):
            name = prefix + part.names[place]
            found.append(FitParameter(name=name, value=rounded(value), std_error=rounded(error)))
    return found


def _predicted(parameters: Sequence[FitParameter], part: _Part, rows: IntArray) -> FloatArray:
    values = {each.name: each.value for each in parameters}
    lines: list[FloatArray] = [
        part.columns[rows] @ np.array([values.get(prefix + name, 0.0) for name in part.names])
        for prefix in ("", LONG)
        if prefix + part.names[0] in values
    ]
    return lines[0] if len(lines) == 1 else np.minimum(*lines)


def _left_out(part: _Part, group: IntArray, seed: int) -> FloatArray:
    """Predictions of every row by a fit that saw none of its shape."""
    _, place = np.unique(group, return_inverse=True)
    shapes = int(place.max()) + 1
    fold = (np.random.default_rng(seed).permutation(shapes) % min(_FOLDS, shapes))[place.reshape(-1)]
    predicted = np.full(len(group), np.nan)
    for number in range(min(_FOLDS, shapes)):
        seen, unseen = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        if len(seen):
            kept = _Part(
                names=part.names,
                columns=part.columns[seen],
                duration_ns=part.duration_ns[seen],
                is_long=part.is_long[seen],
            )
            predicted[unseen] = _predicted(_parameters(kept), part, unseen)
    return predicted


def _fit(
    labels: tuple[str, str, str, str],
    part: _Part,
    measured: Measurements,
    *,
    form: str,
    seed: int,
    date: str,
) -> Fit:
    kind, op, scheme, variant = labels
    predicted = _left_out(part, measured.shape_group(), seed)
    known = ~np.isnan(predicted)
    dims = ("m", "n", "k") if kind == "matmul" else ("rows", "columns")
    sizes = [(name, measured.ops.dim(name)) for name in dims]
    return Fit(
        kind=kind,
        op=op,
        scheme=scheme,
        variant=variant,
        form=form,
        default=kind == "matmul" or variant == ANY,
        parameters=tuple(_parameters(part)),
        support=tuple(
            FitRange(name=name, low=float(size.min()), high=float(size.max())) for name, size in sizes
        ),
        samples=len(measured),
        error=error_of(predicted[known], measured.duration_ns[known]),
        bands=bands_of(predicted[known], measured.duration_ns[known]),
        table=measured.name,
        provenance=measured.provenance,
        fitted=date,
        seed=seed,
    )
