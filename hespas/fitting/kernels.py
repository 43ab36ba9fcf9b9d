"""Fits of kernels that were recorded in programs, from few shapes: kernels of single operations, and matrix
products.

Each parameter of :data:`~hespas.estimators.kernels.KERNELS` is the product of a common value and of factors:
of all kernels, of a kind, of an operation, of a device, of a kind on a device. The prior of each factor is 1,
with the variation of its level as its width, so that a class with few rows stays near the common values. The
prior of a device is the common value of its vendor's other devices (*common* fits, which ship); the device's
own recordings change it.

Products have three parameters relative to the predictions of library benchmarks.

Errors count as they are reported: relative to the measurement if a prediction is too long, as logarithms if
it is too short, by their size above a tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from hespas.estimators.composite import Composite
from hespas.estimators.forms import machine_of
from hespas.estimators.interface import predict_with
from hespas.estimators.kernels import (
    KERNEL_KINDS,
    KERNELS,
    PRODUCT_KIND,
    PRODUCTS,
    expansion_ns,
    least_batch_ns,
    product_time_ns,
    ragged_share,
)
from hespas.estimators.learned.equivalents import runs_on_tf32
from hespas.fitting.fits import fit_of
from hespas.fitting.solvers import robust_least_squares
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit
from hespas.hardware.kernel_shares import start_ratio
from hespas.measurements import Measurements, joined
from hespas.operations.model import rows_by_label

__all__ = [
    "DEFAULT_PRODUCTS",
    "KernelClass",
    "KernelName",
    "benchmark_ns",
    "classes_of_fits",
    "common_kernels",
    "common_products",
    "fit_products",
    "is_kernel",
    "kernel_fits",
    "kernels_of_device",
    "moved_from_expected",
    "products_fit",
    "time_of_kernels",
]

KernelName = tuple[str, str]
"""Kind and operation; ``*`` is any operation of the kind."""
KernelClass = Mapping[str, float]
"""Parameters by name."""

_NAMES = tuple(parameter.name for parameter in KERNELS.parameters)
_START = np.log([parameter.start for parameter in KERNELS.parameters])
_LOW = np.log([parameter.low for parameter in KERNELS.parameters])
_HIGH = np.log([parameter.high for parameter in KERNELS.parameters])
_IS_START = np.array([name == "t0_ns" for name in _NAMES], np.float64)

# Widths of the factors of each level: ln units of one standard deviation, in the order of the parameters.
_OF_ALL = (2.0, 1.0, 1.0, 1.0, 1.0, 0.05)
_OF_KIND = (0.2, 0.3, 0.7, 0.4, 0.5, 0.05)
_OF_OPERATION = (0.12, 0.2, 0.5, 0.3, 0.3, 0.05)
_OF_DEVICE = (0.8, 0.3, 0.4, 0.4, 0.5, 0.05)
_OF_KIND_THERE = (0.15, 0.15, 0.3, 0.2, 0.3, 0.05)
_OF_OPERATION_THERE = (0.08, 0.1, 0.3, 0.2, 0.2, 0.05)

_ROUNDS = 2
_CALLS = 15
_FULL_SHAPES = 6.0
"""Shapes of one operation on one device that count in full; more of them share this weight."""
_MOST_BYTES_PER_ELEMENT = 64.0
"""Operations that move more are not described by their extents: lists of tensors, tables of offsets."""
_SHAPE_SPREAD = 0.25
"""Standard deviation of single shapes from their class (ln units); it sets the weight of a prior in
shapes.
"""
_SOFT_ERROR = 0.1
_LONGEST_ERROR = 3.0
DEFAULT_PRODUCTS: Mapping[str, float] = MappingProxyType({"start_ns": 1500.0, "scale": 1.0, "ragged": 1.0})
"""Parameters of products without recorded programs: clearing a workspace, and vectors of half the length."""
_PRODUCT_WIDTHS: Mapping[str, float] = MappingProxyType({"start_ns": 0.5, "scale": 0.1, "ragged": 0.4})
"""Widths of their priors: ln units of one standard deviation."""


def moved_from_expected(
    log_ratio: Callable[[FloatArray], FloatArray],
    width: FloatArray,
    weight: FloatArray,
    most_calls: int = 50,
) -> FloatArray:
    """Fit the logarithms of some parameters and return their differences from the expected values, shape
    ``(parameters,)``.

    ``log_ratio`` returns ln(predicted / measured) of each row for given differences; ``weight`` has shape
    ``(rows,)``. If a prediction is too long, its error is relative to the measurement. Errors below a tenth
    count by their square, larger errors by their size. The square of each difference / ``width`` is added to
    the sum, so that few rows cannot outweigh the expected values.
    """

    def errors(moves: FloatArray) -> FloatArray:
        error = log_ratio(moves)
        return weight * np.where(error > 0, np.expm1(np.minimum(error, _LONGEST_ERROR)), error)

    def pulls(moves: FloatArray) -> FloatArray:
        return _SHAPE_SPREAD * moves / width

    start = np.zeros(len(width))
    return robust_least_squares(errors, start, _SOFT_ERROR, pulls=pulls, most_calls=most_calls).values


def is_kernel(table: Measurements) -> IntArray:
    """Return the rows of ``table`` whose operations the form of kernels can describe."""
    ops = table.ops
    elements = ops.dim("rows") * ops.dim("columns")
    with np.errstate(invalid="ignore", divide="ignore"):
        is_described = ops.bytes_moved <= _MOST_BYTES_PER_ELEMENT * elements
    is_kind = np.zeros(len(table), np.bool_)
    is_kind[ops.kind.where(*KERNEL_KINDS)] = True
    return np.flatnonzero(is_kind & is_described & (table.duration_ns > 0))


_GroupName = tuple[str, ...]
_Factors = Mapping[_GroupName, FloatArray]
"""Logarithms of the factors of groups, shape ``(parameters,)`` each."""


@dataclass(frozen=True, slots=True, eq=False)
class _FactorLevel:
    """Level of fitted factors, such as "one factor per kind". ``names`` is the group of each row; rows of one
    group share a factor. ``width`` is the prior standard deviation of the factor of each parameter.
    """

    names: Sequence[_GroupName]
    width: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _KernelSample:
    """Rows to which the kernel form is fitted: its input columns, the logarithms of their times, and their
    weights.
    """

    columns: Mapping[str, FloatArray]
    log_ns: FloatArray
    weight: FloatArray

    @classmethod
    def of(cls, tables: Sequence[tuple[Measurements, Device]]) -> _KernelSample:
        """Return all rows of the tables, each with the rates of its device. Rows have less weight if their
        operation has many shapes, so that no operation dominates the fit.
        """
        parts: list[Mapping[str, FloatArray]] = []
        weights = [np.empty(0)]
        for table, device in tables:
            parts.append(_columns(table, device))
            weight = np.ones(len(table))
            for _, rows in rows_by_label(table.ops.kind, table.ops.op):
                weight[rows] = np.sqrt(min(1.0, _FULL_SHAPES / len(rows)))
            weights.append(weight)
        names = parts[0] if parts else ()
        return cls(
            {name: np.concatenate([part[name] for part in parts]) for name in names},
            np.log(np.concatenate([np.empty(0), *(table.duration_ns for table, _ in tables)])),
            np.concatenate(weights),
        )

    def take(self, rows: IntArray) -> _KernelSample:
        """Return the sample with only the given rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return _KernelSample(columns, self.log_ns[rows], self.weight[rows])


def _columns(table: Measurements, device: Device) -> Mapping[str, FloatArray]:
    """Return the input columns of the form for the rows of a table."""
    columns: dict[str, FloatArray] = {}
    for (kind, scheme), rows in rows_by_label(table.ops.kind, table.ops.scheme):
        for name, column in KERNELS.columns(table.ops.take(rows), machine_of(device, kind, scheme)).items():
            columns.setdefault(name, np.full(len(table), np.nan))[rows] = column
    return columns


def _level_factors(
    sample: _KernelSample, levels: Sequence[_FactorLevel], start: FloatArray
) -> list[_Factors]:
    """Fit the factors of every group on every level. Return one mapping per level, from group to the
    logarithms of its factors.

    ``start`` are the initial parameters of each row, as logarithms, shape ``(rows, parameters)``. The groups
    are fitted one after the other with all other factors fixed, for several rounds. O(rounds x levels x
    rows).
    """
    rows_of = [_rows_by_name(level.names) for level in levels]
    all_factors = [{name: np.zeros(len(_NAMES)) for name in rows} for rows in rows_of]
    total = start.copy()
    for _ in range(_ROUNDS):
        for level, groups, factors in zip(levels, rows_of, all_factors, strict=True):
            for name, rows in groups.items():
                base = total[rows] - factors[name]
                factors[name] = _fitted_moves(sample.take(rows), base, np.array(level.width))
                total[rows] = base + factors[name]
    return list(all_factors)


def _rows_by_name(names: Sequence[_GroupName]) -> Mapping[_GroupName, IntArray]:
    """Return the row numbers of each group, in order of appearance."""
    rows: dict[_GroupName, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    return {name: np.array(numbers, np.int64) for name, numbers in rows.items()}


def _fitted_moves(sample: _KernelSample, base: FloatArray, width: FloatArray) -> FloatArray:
    """Return the changes of the parameters (logarithms) relative to ``base`` that fit the rows of a sample
    best, shape ``(parameters,)``.
    """

    def log_ratio(moves: FloatArray) -> FloatArray:
        ratio: FloatArray = np.log(_time_ns(base + moves, sample.columns)) - sample.log_ns
        return ratio

    return moved_from_expected(log_ratio, width, sample.weight, _CALLS)


def _time_ns(logs: FloatArray, columns: Mapping[str, FloatArray]) -> FloatArray:
    """Return the time of each row [ns] from the logarithms of its parameters, which have shape ``(rows,
    parameters)``.
    """
    values = dict(zip(_NAMES, np.exp(np.clip(logs, _LOW, _HIGH)).T, strict=True))
    return KERNELS.time_ns(values, columns)


def _class_of_logs(logs: FloatArray) -> KernelClass:
    values: list[float] = np.exp(np.clip(logs, _LOW, _HIGH)).tolist()
    return dict(zip(_NAMES, values, strict=True))


def common_kernels(
    tables: Sequence[tuple[Measurements, Device]], vendor: str
) -> Mapping[KernelName, KernelClass]:
    """Return the kernel classes that a vendor's devices have in common: one per kind and operation, and one
    per kind.

    The factor of a device is the mean over the recorded devices. Tables of single operations are timed
    differently than recordings. Devices that only have such tables contribute only to the factors of kinds
    and operations.

    Start times are proportional to the shortest kernel in a device's file. They are stored for a device with
    :data:`~hespas.hardware.kernel_shares.COMMON_FLOOR_NS`; :func:`~hespas.hardware.kernel_shares.scaled_fits`
    converts them to a device.
    """
    used = [(table.take(rows), device) for table, device in tables if len(rows := is_kernel(table))]
    if not used:
        return {}
    sample = _KernelSample.of(used)
    names = [(table.ops.kind[row], table.ops.op[row]) for table, _ in used for row in range(len(table))]
    device_names = [_device_name(table, device) for table, device in used for _ in range(len(table))]
    levels = [
        _FactorLevel([()] * len(names), _OF_ALL),
        _FactorLevel([(kind,) for kind, _ in names], _OF_KIND),
        _FactorLevel([(name,) for name in device_names], _OF_DEVICE),
        _FactorLevel(names, _OF_OPERATION),
        _FactorLevel(
            [(kind, name) for (kind, _), name in zip(names, device_names, strict=True)], _OF_KIND_THERE
        ),
    ]
    starts = np.array([start_ratio(device) for table, device in used for _ in range(len(table))])
    start = _START + np.log(starts)[:, None] * _IS_START
    of_all, of_kinds, of_devices, of_operations, of_device_kinds = _level_factors(sample, levels, start)
    vendors = {_device_name(table, device): device.vendor for table, device in used if table.recorded}
    # Without recordings of the vendor, all other vendors are used, because starts are relative.
    chosen = [name for name in sorted(vendors) if vendors[name] == vendor or vendor not in vendors.values()]
    chip = np.mean([of_devices[name,] for name in chosen], axis=0) if chosen else np.zeros(len(_NAMES))
    classes: dict[KernelName, KernelClass] = {}
    for kind in KERNEL_KINDS:
        if (kind,) not in of_kinds:
            classes[kind, ANY] = _class_of_logs(_START + of_all[()] + chip)
    for (kind,), factor in of_kinds.items():
        local = [of_device_kinds[kind, name] for name in chosen if (kind, name) in of_device_kinds]
        of_kind = _START + of_all[()] + factor + chip
        of_kind = of_kind + (np.mean(local, axis=0) if local else 0.0)
        classes[kind, ANY] = _class_of_logs(of_kind)
        for (other, op), move in of_operations.items():
            if other == kind and op:
                classes[kind, op] = _class_of_logs(of_kind + move)
    return classes


def _device_name(table: Measurements, device: Device) -> str:
    """Return the name of a device in the fit. Tables of single operations, which are timed differently than
    recordings, count as another device: the table's name is added.
    """
    return device.name if table.recorded else f"{device.name} {table.name}"


def kernels_of_device(
    table: Measurements, device: Device, common: Mapping[KernelName, KernelClass]
) -> Mapping[KernelName, KernelClass]:
    """Return the kernel classes fitted to recordings of a device: one for each class in ``common``, and one
    for each further operation in the recordings.
    """
    sample = _KernelSample.of([(table, device)])
    names = [(table.ops.kind[row], table.ops.op[row]) for row in range(len(table))]
    levels = [
        _FactorLevel([()] * len(names), _OF_DEVICE),
        _FactorLevel([(kind,) for kind, _ in names], _OF_KIND_THERE),
        _FactorLevel(names, _OF_OPERATION_THERE),
    ]
    start = {name: _nearest_logs(common, name) for name in {*names, *common}}
    starts = np.array([start[name] for name in names]).reshape(-1, len(_NAMES))
    factors = _level_factors(sample, levels, starts)
    classes: dict[KernelName, KernelClass] = {}
    for kind, op in sorted(start):
        moves = sum(of.get(name, 0.0) for of, name in zip(factors, ((), (kind,), (kind, op)), strict=True))
        classes[kind, op or ANY] = _class_of_logs(start[kind, op] + moves)
    return classes


def _nearest_logs(common: Mapping[KernelName, KernelClass], name: KernelName) -> FloatArray:
    """Return the logarithms of the parameters of the common class that is nearest to ``name``."""
    values = common.get(name) or common.get((name[0], ANY))
    return _START if values is None else np.log([values[parameter] for parameter in _NAMES])


def classes_of_fits(fits: Iterable[Fit]) -> Mapping[KernelName, KernelClass]:
    """Return the kernel classes that some fits describe, by name."""
    return {
        (fit.kind, fit.op): {parameter.name: parameter.value for parameter in fit.parameters}
        for fit in fits
        if fit.form == KERNELS.name
    }


def kernel_fits(
    classes: Mapping[KernelName, KernelClass], table: Measurements | None = None, *, fitted: str = ""
) -> tuple[Fit, ...]:
    """Return kernel classes as entries of a device file, without errors and intervals; ``table`` holds the
    fitted rows.
    """

    def rows_of(kind: str, op: str) -> int:
        if table is None:
            return 1
        rows = table.ops.kind.where(kind)
        return len(rows) if op == ANY else int(np.isin(rows, table.ops.op.where(op)).sum())

    return tuple(
        replace(
            fit_of(
                (kind, op, ANY, ""),
                KERNELS.name,
                _parameters({name: values[name] for name in _NAMES}),
                table,
                fitted=fitted,
            ),
            samples=max(rows_of(kind, op), 1),
            default=True,
        )
        for (kind, op), values in sorted(classes.items())
    )


def _parameters(values: Mapping[str, float]) -> Iterable[tuple[str, float, float]]:
    return ((name, value, np.nan) for name, value in values.items())


def time_of_kernels(
    table: Measurements, device: Device, classes: Mapping[KernelName, KernelClass]
) -> FloatArray:
    """Return the time [ns] of each row by its kernel class, or by the nearest class if it has none. Shape
    ``(rows,)``.
    """
    names = [(table.ops.kind[row], table.ops.op[row]) for row in range(len(table))]
    logs = np.array([_nearest_logs(classes, name) for name in names]).reshape(-1, len(_NAMES))
    return _time_ns(logs, _columns(table, device))


def common_products(tables: Sequence[tuple[Measurements, Device]], vendor: str) -> Mapping[str, float]:
    """Return the parameters that convert benchmark times of matmuls to programs, for a vendor's devices that
    have no recordings.

    They are the geometric mean over the vendor's recorded devices; if it has none, over all recorded devices.
    Start times are for a device whose shortest kernel takes
    :data:`~hespas.hardware.kernel_shares.COMMON_FLOOR_NS`. Matmuls that are estimated by another number
    format are left out, because their errors are partly errors of that format.
    """
    by_vendor: dict[str, list[Mapping[str, float]]] = {}
    for name in dict.fromkeys(device.name for _, device in tables):
        on_device = [(table, device) for table, device in tables if device.name == name]
        device = on_device[0][1]
        table = joined([part for part, _ in on_device], name)
        rows = np.setdiff1d(table.ops.kind.where(PRODUCT_KIND), runs_on_tf32(table.ops, device))
        if len(rows):
            part = table.take(rows)
            values = fit_products(part, device, benchmark_ns(part, device), DEFAULT_PRODUCTS)
            values = {**values, "start_ns": values["start_ns"] / start_ratio(device)}
            by_vendor.setdefault(device.vendor, []).append(values)
    used = by_vendor.get(vendor) or [row for rows in by_vendor.values() for row in rows] or [DEFAULT_PRODUCTS]
    return {
        name: float(np.exp(np.mean([np.log(values[name]) for values in used]))) for name in DEFAULT_PRODUCTS
    }


def products_fit(values: Mapping[str, float], *, fitted: str = "") -> Fit:
    """Return the parameters of the conversion of matmul times (:func:`common_products`) as an entry of a
    device file, without errors. The interval of the benchmark is scaled by this fit.
    """
    key = (PRODUCT_KIND, ANY, ANY, "")
    return replace(fit_of(key, PRODUCTS, _parameters(values), None, fitted=fitted), default=True)


def benchmark_ns(table: Measurements, device: Device) -> FloatArray:
    """Return the time of each row [ns] as the device's fits and models of library benchmarks predict it,
    shape ``(rows,)``. Weights of 4 bits, which the benchmarks lack, are expanded first.
    """
    model = Composite(order="learned+calibrated+roofline")
    predicted = predict_with(model, table.ops, device, Diagnostics()).duration_ns
    return predicted + expansion_ns(table.ops, device)


def fit_products(
    table: Measurements, device: Device, before_ns: FloatArray, expected: Mapping[str, float]
) -> Mapping[str, float]:
    """Fit the conversion of benchmark times to programs to the matmuls that were recorded on ``device``.
    ``expected`` is the prior of its parameters.

    ``before_ns`` are the benchmark times of :func:`benchmark_ns`. Rows of other kinds and rows without such a
    time are ignored.
    """
    rows = table.ops.kind.where(PRODUCT_KIND)
    rows = rows[np.isfinite(before_ns[rows])]
    names = tuple(expected)
    centre = np.log([expected[name] for name in names])
    if not len(rows):
        return expected
    ops, before = table.ops.take(rows), before_ns[rows]
    ragged, least = ragged_share(ops, device), least_batch_ns(ops, device)
    log_ns = np.log(table.duration_ns[rows])
    width = np.array([_PRODUCT_WIDTHS[name] for name in names])

    def values_of(logs: FloatArray) -> dict[str, float]:
        values: list[float] = np.exp(logs).tolist()
        return dict(zip(names, values, strict=True))

    def log_ratio(moves: FloatArray) -> FloatArray:
        time = np.fmax(product_time_ns(values_of(centre + moves), before, ragged), least)
        ratio: FloatArray = np.log(time) - log_ns
        return ratio

    return values_of(centre + moved_from_expected(log_ratio, width, np.ones(len(rows))))
