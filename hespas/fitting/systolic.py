"""Fits of the lines of :mod:`hespas.estimators.systolic`, which are linear functions from cycles or elements
to time.

The parameters are non-negative and minimise the relative errors, reweighted so that large errors count by
their size. The stated error of a line is its error on held-out folds of whole shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hespas.estimators.systolic.cycles import Array
from hespas.estimators.systolic.lines import (
    ELEMENTS,
    LONG,
    PRODUCTS,
    element_columns,
    own_cycles,
    product_columns,
)
from hespas.fitting.fits import Key, fit_of, rounded
from hespas.fitting.held_out import folds_of, held_out_times
from hespas.fitting.rows import rows_to_fit
from hespas.fitting.solvers import nonnegative_least_squares, standard_errors
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.measurements import Measurements
from hespas.operations import Operations, find_scheme
from hespas.operations.model import rows_by_label

__all__ = ["LINE_KINDS", "fit_lines", "has_columns"]

_FEWEST = 12
_FOLDS = 5
_ROUNDS = 8
_NOISE = 0.01
"""Relative errors below this count by their square."""

_LONG_MACS = 2.0**30
"""Least multiply-accumulates of a long matmul; the schedules differ from there on a TPU v4."""

_LONG_PARAMETERS = frozenset(
    {"t0_ns", "cycle_ns", "lhs_ns_per_byte", "rhs_ns_per_byte", "result_ns_per_byte"}
)
_OF_KIND: Mapping[str, tuple[str, ...]] = {
    "vector": ("t0_ns", "element_ns"),
    "normalization": ("t0_ns", "element_ns", "row_ns"),
    "pooling": ("t0_ns", "element_ns", "row_ns"),
}
LINE_KINDS = ("matmul", *_OF_KIND)
"""Kinds of operations with lines."""

_OF_ANY = ("t0_ns", "ns_per_byte")
"""Parameters of operations that were not measured."""


@dataclass(frozen=True, slots=True, eq=False)
class _LineColumns:
    """Inputs of a line (cycles, bytes, elements) for measured rows, with one column per parameter, shape
    ``(rows, parameters)``. ``is_long`` is True for rows of the second line.
    """

    names: tuple[str, ...]
    columns: FloatArray
    is_long: BoolArray


def fit_lines(
    tables: Sequence[Measurements], device: Device, *, seed: int = 0, fitted: str = ""
) -> tuple[Fit, ...]:
    """Fit the lines of every class of operations in the tables for ``device``, which has a systolic array.

    Only rows that may be fitted are used (:func:`~hespas.fitting.device_forms.rows_to_fit`).
    ``fitted`` is the date in the fits (ISO; empty: today).
    """
    fits: dict[Key, Fit] = {}
    for table in tables:
        measured = rows_to_fit(table, device)
        measured = measured.take(np.flatnonzero(has_columns(measured.ops)))
        for fit in (
            *_matmul_lines(measured, device, seed, fitted),
            *_element_lines(measured, seed, fitted),
        ):
            fits.setdefault(fit.key, fit)
    return tuple(fits[key] for key in sorted(fits))


def has_columns(ops: Operations) -> BoolArray:
    """Return a mask of the operations for which a line can be computed: all sizes are above 0 and the number
    format is known.
    """
    known = np.array([find_scheme(name) is not None for name in (*ops.scheme.names, "")], np.bool_)
    work = ops.dim("batch") * ops.dim("m") * ops.dim("n") * ops.dim("k")
    elements = ops.dim("rows") * ops.dim("columns") * ops.bytes_moved
    is_matmul = np.zeros(len(ops), np.bool_)
    is_matmul[ops.kind.where("matmul")] = True
    size = np.where(is_matmul, work, elements)
    return known[ops.scheme.row] & np.isfinite(size) & (size > 0)


def _matmul_lines(measured: Measurements, device: Device, seed: int, fitted: str) -> Iterator[Fit]:
    """Yield the fitted lines of matmuls, with cycles and bytes as inputs."""
    shape = device.systolic
    if shape is None:
        return
    array = Array(shape.rows, shape.columns, shape.dataflow)
    for labels, rows in measured.ops.classes():
        if labels[0] == "matmul" and len(rows) >= _FEWEST:
            ops = measured.ops.take(rows)
            columns = product_columns(ops, own_cycles(ops, array), labels[2])
            stacked = np.stack(list(columns.values()), axis=1)
            part = _LineColumns(tuple(columns), stacked, ops.flops / 2 > _LONG_MACS)
            yield _fit_line(labels, part, measured.take(rows), PRODUCTS, seed=seed, fitted=fitted)


def _element_lines(measured: Measurements, seed: int, fitted: str) -> Iterator[Fit]:
    """Yield the fitted lines of elementwise kinds: one per class, one per operation, and one over bytes for
    vector operations.
    """

    def line(key: Key, rows: IntArray, names: Sequence[str]) -> Fit:
        part = measured.take(rows)
        columns = element_columns(part.ops)
        stacked = np.stack([columns[name] for name in names], axis=1)
        line_columns = _LineColumns(tuple(names), stacked, np.zeros(len(part), np.bool_))
        return _fit_line(key, line_columns, part, ELEMENTS, seed=seed, fitted=fitted)

    ops = measured.ops
    for labels, rows in ops.classes():
        if labels[0] in _OF_KIND and len(rows) >= _FEWEST:
            yield line(labels, rows, _OF_KIND[labels[0]])
    for (kind, scheme, op), rows in rows_by_label(ops.kind, ops.scheme, ops.op):
        if kind in _OF_KIND and len(rows) >= _FEWEST:
            yield line((kind, op, scheme, ANY), rows, _OF_KIND[kind])
    for (kind, scheme), rows in rows_by_label(ops.kind, ops.scheme):
        if kind == "vector" and len(rows) >= _FEWEST:
            yield line((kind, ANY, scheme, ANY), rows, _OF_ANY)


def _parameters(part: _LineColumns, duration_ns: FloatArray) -> Iterator[tuple[str, float, float]]:
    """Yield name, value and standard error of each parameter. If there are enough long matmuls, two lines are
    fitted.
    """
    has_long = int(part.is_long.sum()) >= _FEWEST
    all_rows = np.ones(len(duration_ns), np.bool_)
    for prefix, rows in (("", ~part.is_long), (LONG, part.is_long)) if has_long else (("", all_rows),):
        used = [number for number, name in enumerate(part.names) if not prefix or name in _LONG_PARAMETERS]
        columns, time_ns = part.columns[rows][:, used], duration_ns[rows]
        values, error, weight = nonnegative_least_squares(columns, time_ns, rounds=_ROUNDS, scale=_NOISE)
        is_active: BoolArray = values > 0
        slopes = columns[:, is_active] * (weight / time_ns)[:, None]
        residual = weight * error
        freedom = max(len(residual) - int(np.count_nonzero(is_active)), 1)
        errors = np.zeros(len(values))  # 0 for weights of 0
        errors[is_active] = standard_errors(slopes, float(residual @ residual), freedom)
        names = (prefix + part.names[number] for number in used)
        yield from zip(names, values.tolist(), errors.tolist(), strict=True)


def _times_without(
    part: _LineColumns, duration_ns: FloatArray, fitted: IntArray, held_out: IntArray
) -> FloatArray:
    """Return the times of held-out rows [ns], predicted by a line that was fitted to other rows."""
    fold_part = _LineColumns(part.names, part.columns[fitted], part.is_long[fitted])
    parameters = _parameters(fold_part, duration_ns[fitted])
    values = {name: rounded(value) for name, value, _ in parameters}
    lines: list[FloatArray] = [
        part.columns[held_out] @ np.array([values.get(prefix + name, 0.0) for name in part.names])
        for prefix in ("", LONG)
        if prefix + part.names[0] in values
    ]
    return lines[0] if len(lines) == 1 else np.minimum(*lines)


def _fit_line(
    key: Key, part: _LineColumns, measured: Measurements, form: str, *, seed: int, fitted: str
) -> Fit:
    """Fit one line and return it as an entry of a device file."""
    duration_ns = measured.duration_ns
    fold = folds_of(measured.shape_group(), _FOLDS, np.random.default_rng(seed))
    predicted = held_out_times(fold, partial(_times_without, part, duration_ns))
    is_known = ~np.isnan(predicted)
    is_matmul = key[0] == "matmul"
    fit = fit_of(
        key,
        form,
        _parameters(part, duration_ns),
        measured,
        (predicted[is_known], duration_ns[is_known]),
        dims=("m", "n", "k") if is_matmul else ("rows", "columns"),
        fitted=fitted,
        seed=seed,
    )
    return replace(fit, default=is_matmul or key[3] == ANY)
