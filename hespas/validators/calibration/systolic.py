"""Lines of :mod:`hespas.estimators.systolic` from measured times: non-negative relative least squares.

Each line minimises the relative errors, reweighted so that large ones count by their size. What it is worth
is told on shapes left out: folds of whole shapes in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.measurements import Measurements
from hespas.operations import Operations, find_scheme
from hespas.operations.model import rows_by_label
from hespas.validators.calibration.fit_device import Key, fit_of, rounded, rows_to_fit

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


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of one line: a column per parameter, shape ``(rows, parameters)``."""

    names: tuple[str, ...]
    columns: FloatArray
    is_long: BoolArray


def fit_lines(
    tables: Sequence[Measurements], device: Device, *, seed: int = 0, fitted: str = ""
) -> tuple[Fit, ...]:
    """The lines of every class of operations that the tables hold for ``device``, which has an array.

    Only rows that may be fitted enter (:func:`~hespas.validators.calibration.fit_device.rows_to_fit`).
    ``fitted`` is the date written into the fits (ISO; empty: today).
    """
    found: dict[Key, Fit] = {}
    for table in tables:
        mine = rows_to_fit(table, device)
        mine = mine.take(np.flatnonzero(has_columns(mine.ops)))
        for fit in (*_matmuls(mine, device, seed, fitted), *_elements(mine, seed, fitted)):
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


def _matmuls(measured: Measurements, device: Device, seed: int, fitted: str) -> Iterator[Fit]:
    shape = device.systolic
    if shape is None:
        return
    array = Array(shape.rows, shape.columns, shape.dataflow)
    for labels, rows in _classes(measured, ("matmul",)):
        ops = measured.ops.take(rows)
        columns = product_columns(ops, own_cycles(ops, array), labels[2])
        part = _Part(tuple(columns), np.stack(list(columns.values()), axis=1), ops.flops / 2 > _LONG_MACS)
        yield _fit(labels, part, measured.take(rows), PRODUCTS, seed=seed, fitted=fitted)


def _elements(measured: Measurements, seed: int, fitted: str) -> Iterator[Fit]:
    def line(key: Key, rows: IntArray, names: Sequence[str]) -> Fit:
        mine = measured.take(rows)
        columns = element_columns(mine.ops)
        stacked = np.stack([columns[name] for name in names], axis=1)
        part = _Part(tuple(names), stacked, np.zeros(len(mine), np.bool_))
        return _fit(key, part, mine, ELEMENTS, seed=seed, fitted=fitted)

    kinds = tuple(_OF_KIND)
    for labels, rows in _classes(measured, kinds):
        yield line(labels, rows, _OF_KIND[labels[0]])
    ops = measured.ops
    for (kind, scheme, op), rows in rows_by_label(ops.kind, ops.scheme, ops.op):
        if kind in kinds and len(rows) >= _FEWEST:
            yield line((kind, op, scheme, ANY), rows, _OF_KIND[kind])
    for (kind, scheme), rows in rows_by_label(ops.kind, ops.scheme):
        if kind == "vector" and len(rows) >= _FEWEST:
            yield line((kind, ANY, scheme, ANY), rows, _OF_ANY)


def _classes(measured: Measurements, kinds: tuple[str, ...]) -> Iterator[tuple[Key, IntArray]]:
    """Rows of one kind, operation, scheme and variant, where there are enough, in a fixed order."""
    for labels, rows in measured.ops.classes():
        if labels[0] in kinds and len(rows) >= _FEWEST:
            yield labels, rows


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
    used: FloatArray = (relative * weight[:, None])[:, active]
    left = weight * (relative @ found - 1)
    variance = float(left @ left) / max(len(left) - int(np.count_nonzero(active)), 1)
    error = np.zeros(len(found))
    error[active] = np.sqrt(np.maximum(variance * np.diag(np.linalg.pinv(used.T @ used)), 0.0))
    return found / scale, error / scale


def _parameters(part: _Part, duration_ns: FloatArray) -> Iterator[tuple[str, float, float]]:
    """Name, value and standard error of one line, or of two where there are enough long matmuls."""
    has_long = int(part.is_long.sum()) >= _FEWEST
    everything = np.ones(len(duration_ns), np.bool_)
    for prefix, rows in (("", ~part.is_long), (LONG, part.is_long)) if has_long else (("", everything),):
        keep = [place for place, name in enumerate(part.names) if not prefix or name in _LONG_PARAMETERS]
        values, errors = _solved(part.columns[rows][:, keep], duration_ns[rows])
        names = (prefix + part.names[place] for place in keep)
        yield from zip(names, values.tolist(), errors.tolist(), strict=True)


def _predicted(parameters: Iterable[tuple[str, float, float]], part: _Part, rows: IntArray) -> FloatArray:
    values = {name: rounded(value) for name, value, _ in parameters}
    lines: list[FloatArray] = [
        part.columns[rows] @ np.array([values.get(prefix + name, 0.0) for name in part.names])
        for prefix in ("", LONG)
        if prefix + part.names[0] in values
    ]
    return lines[0] if len(lines) == 1 else np.minimum(*lines)


def _left_out(part: _Part, duration_ns: FloatArray, group: IntArray, seed: int) -> FloatArray:
    """Predictions of every row by a fit that saw none of its shape."""
    _, place = np.unique(group, return_inverse=True)
    shapes = int(place.max()) + 1
    fold = (np.random.default_rng(seed).permutation(shapes) % min(_FOLDS, shapes))[place.reshape(-1)]
    predicted = np.full(len(group), np.nan)
    for number in range(min(_FOLDS, shapes)):
        seen, unseen = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        if len(seen):
            kept = _Part(part.names, part.columns[seen], part.is_long[seen])
            predicted[unseen] = _predicted(_parameters(kept, duration_ns[seen]), part, unseen)
    return predicted


def _fit(key: Key, part: _Part, measured: Measurements, form: str, *, seed: int, fitted: str) -> Fit:
    duration_ns = measured.duration_ns
    predicted = _left_out(part, duration_ns, measured.shape_group(), seed)
    known = ~np.isnan(predicted)
    is_matmul = key[0] == "matmul"
    fit = fit_of(
        key,
        form,
        _parameters(part, duration_ns),
        measured,
        (predicted[known], duration_ns[known]),
        dims=("m", "n", "k") if is_matmul else ("rows", "columns"),
        fitted=fitted,
        seed=seed,
    )
    return replace(fit, default=is_matmul or key[3] == ANY)
