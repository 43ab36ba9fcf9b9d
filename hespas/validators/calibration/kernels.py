"""Fits of kernels that frameworks run one by one, from few shapes of many operations on several devices.

The parameters of :data:`~hespas.estimators.kernels.KERNELS` are the product of a start and of factors: of all
kernels, of a kind, of an operation, of a device, of a kind on a device. Each factor is drawn to 1 as closely
as its level varies, so that a class of few rows stays near what holds for more of it. What a device is drawn
to is what its vendor's others share (*common* fits, which ship); a device's own recordings move it from
there.

Errors count as they are reported: relative to what was measured where a prediction is too long, as logarithms
where it is too short, by their size beyond a tenth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from hespas.estimators.forms import machine_of
from hespas.estimators.kernels import KERNEL_KINDS, KERNELS
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import ANY, Device, Fit, FitParameter
from hespas.hardware.kernel_shares import starts_of
from hespas.measurements import Measurements
from hespas.operations.model import rows_by_label
from hespas.validators.calibration.fit_device import error_of, rounded
from hespas.validators.calibration.shrinkage import moved_from_expected

__all__ = [
    "KernelClass",
    "KernelName",
    "classes_of_fits",
    "common_kernels",
    "is_kernel",
    "kernel_fits",
    "kernels_of_device",
    "time_of_kernels",
]

KernelName = tuple[str, str]
"""Kind and operation; ``*`` is any of the kind."""
KernelClass = Mapping[str, float]
"""Parameters by name."""

_NAMES = tuple(each.name for each in KERNELS.parameters)
_START = np.log([each.start for each in KERNELS.parameters])
_LOW = np.log([each.low for each in KERNELS.parameters])
_IS_START = np.array([each.name == "t0_ns" for each in KERNELS.parameters], np.float64)
_HIGH = np.log([each.high for each in KERNELS.parameters])

# How far a level's factors lie from 1: ln units of one standard deviation, in the order of the parameters.
_OF_ALL = (2.0, 1.0, 1.0, 1.0, 1.0, 0.05)
_OF_KIND = (0.2, 0.3, 0.7, 0.4, 0.5, 0.05)
_OF_OPERATION = (0.12, 0.2, 0.5, 0.3, 0.3, 0.05)
_OF_DEVICE = (0.8, 0.3, 0.4, 0.4, 0.5, 0.05)
_OF_KIND_THERE = (0.15, 0.15, 0.3, 0.2, 0.3, 0.05)
_OF_OPERATION_THERE = (0.08, 0.1, 0.3, 0.2, 0.2, 0.05)

_ROUNDS = 2
_CALLS = 15
_EACH = 6.0
"""Shapes of one operation on one device that count in full; more share their weight."""
_BYTES_OF_ELEMENT = 64.0
"""Operations that move more per element are not told by their extents: lists of tensors, tables of
offsets.
"""


def is_kernel(table: Measurements) -> IntArray:
    """The rows that the form speaks of, whatever the device."""
    ops = table.ops
    elements = ops.dim("rows") * ops.dim("columns")
    with np.errstate(invalid="ignore", divide="ignore"):
        told = ops.bytes_moved <= _BYTES_OF_ELEMENT * elements
    kinds = np.zeros(len(table), np.bool_)
    kinds[ops.kind.where(*KERNEL_KINDS)] = True
    return np.flatnonzero(kinds & told & (table.duration_ns > 0))


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """A number of a group for each row, and how far the groups' factors lie from 1, shape
    ``(parameters,)``.
    """

    group: IntArray
    width: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Rows in the form's columns, with the logarithm of their times and their weights."""

    columns: Mapping[str, FloatArray]
    log_ns: FloatArray
    weight: FloatArray

    @classmethod
    def of(cls, tables: Sequence[tuple[Measurements, Device]]) -> _Sample:
        """All rows of tables, each on its device. Equal weights for operations, not for shapes."""
        parts: list[Mapping[str, FloatArray]] = []
        weights = [np.empty(0)]
        for table, device in tables:
            parts.append(_columns(table, device))
            weight = np.ones(len(table))
            for _, rows in rows_by_label(table.ops.kind, table.ops.op):
                weight[rows] = np.sqrt(min(1.0, _EACH / len(rows)))
            weights.append(weight)
        names = parts[0] if parts else ()
        return cls(
            {name: np.concatenate([part[name] for part in parts]) for name in names},
            np.log(np.concatenate([np.empty(0), *(table.duration_ns for table, _ in tables)])),
            np.concatenate(weights),
        )

    def take(self, rows: IntArray) -> _Sample:
        """Some rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return _Sample(columns, self.log_ns[rows], self.weight[rows])


def _columns(table: Measurements, device: Device) -> Mapping[str, FloatArray]:
    """The form's columns of a table, row by row as they stand in it."""
    found: dict[str, FloatArray] = {}
    for (kind, scheme), rows in rows_by_label(table.ops.kind, table.ops.scheme):
        for name, column in KERNELS.columns(table.ops.take(rows), machine_of(device, kind, scheme)).items():
            found.setdefault(name, np.full(len(table), np.nan))[rows] = column
    return found


def _factors(sample: _Sample, levels: Sequence[_Level], start: FloatArray) -> list[FloatArray]:
    """The logarithms of the factors of each level's groups, shape ``(groups, parameters)`` each, for rows
    whose parameters begin at ``start`` of shape ``(rows, parameters)`` (logarithms). Each group in turn is
    fitted to what the others leave, several times over. O(rounds x levels x rows).
    """
    found = [np.zeros((int(level.group.max(initial=-1)) + 1, len(_NAMES))) for level in levels]
    total = start.copy()
    for _ in range(_ROUNDS):
        for level, factors in zip(levels, found, strict=True):
            for group in range(len(factors)):
                rows = np.flatnonzero(level.group == group)
                if not len(rows):
                    continue
                base = total[rows] - factors[group]
                factors[group] = _moved(sample.take(rows), base, level.width)
                total[rows] = base + factors[group]
    return found


def _moved(sample: _Sample, base: FloatArray, width: FloatArray) -> FloatArray:
    """How far some rows together move their parameters, shape ``(parameters,)``."""

    def log_ratio(moved: FloatArray) -> FloatArray:
        ratio: FloatArray = np.log(_time_ns(base + moved, sample.columns)) - sample.log_ns
        return ratio

    return moved_from_expected(log_ratio, width, sample.weight, _CALLS)


def _time_ns(logs: FloatArray, columns: Mapping[str, FloatArray]) -> FloatArray:
    """The form's time of rows that each have parameters of their own, shape ``(rows, parameters)``."""
    values = dict(zip(_NAMES, np.exp(np.clip(logs, _LOW, _HIGH)).T, strict=True))
    return KERNELS.time_ns(values, columns)


def _class(logs: FloatArray) -> KernelClass:
    values: list[float] = np.exp(np.clip(logs, _LOW, _HIGH)).tolist()
    return dict(zip(_NAMES, values, strict=True))


class _Numbers:
    """Numbers for names, in order of appearance."""

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, ...], int] = {}

    def of(self, names: Iterable[tuple[str, ...]]) -> IntArray:
        """A number for each name."""
        return np.array([self.by_name.setdefault(name, len(self.by_name)) for name in names], np.int64)


def common_kernels(
    tables: Sequence[tuple[Measurements, Device]], vendor: str
) -> Mapping[KernelName, KernelClass]:
    """What the kernels of a vendor's devices have in common: a class per kind and operation in the tables,
    and one per kind. Factors of devices are the mean of those recorded; of devices with tables of single
    operations alone (timed otherwise) only what they say of kinds and operations counts.

    Starts go with the shortest kernel that a device's file states; the classes are of one that takes
    :data:`~hespas.hardware.kernel_shares.COMMON_FLOOR_NS` (:func:`~hespas.hardware.kernel_shares.fits_at`
    of another).
    """
    used = [(table.take(rows), device) for table, device in tables if len(rows := is_kernel(table))]
    if not used:
        return {}
    sample = _Sample.of(used)
    kinds, operations, devices, there = _Numbers(), _Numbers(), _Numbers(), _Numbers()
    names = [(table.ops.kind[row], table.ops.op[row]) for table, _ in used for row in range(len(table))]
    where = [_device_name(table, device) for table, device in used for _ in range(len(table))]
    levels = [
        _Level(np.zeros(len(names), np.int64), np.array(_OF_ALL)),
        _Level(kinds.of((kind,) for kind, _ in names), np.array(_OF_KIND)),
        _Level(devices.of((name,) for name in where), np.array(_OF_DEVICE)),
        _Level(operations.of(names), np.array(_OF_OPERATION)),
        _Level(
            there.of((kind, name) for (kind, _), name in zip(names, where, strict=True)),
            np.array(_OF_KIND_THERE),
        ),
    ]
    starts = np.array([starts_of(device) for table, device in used for _ in range(len(table))])
    found = _factors(sample, levels, _START + np.log(starts)[:, None] * _IS_START)
    vendors = {_device_name(table, device): device.vendor for table, device in used if table.recorded}
    # Of a vendor of whom nothing was recorded, all others speak: starts are in shares of stated ones.
    mine = [name for name in sorted(vendors) if vendors[name] == vendor or vendor not in vendors.values()]
    of_devices = [found[2][devices.by_name[name,]] for name in mine]
    chip = np.mean(of_devices, axis=0) if of_devices else np.zeros(len(_NAMES))
    classes: dict[KernelName, KernelClass] = {}
    for kind in KERNEL_KINDS:
        if (kind,) not in kinds.by_name:
            classes[kind, ANY] = _class(_START + found[0][0] + chip)
    for (kind,), number in kinds.by_name.items():
        local = [found[4][there.by_name[kind, name]] for name in mine if (kind, name) in there.by_name]
        of_kind = _START + found[0][0] + found[1][number] + chip
        of_kind = of_kind + (np.mean(local, axis=0) if local else 0.0)
        classes[kind, ANY] = _class(of_kind)
        for (other, op), place in operations.by_name.items():
            if other == kind and op:
                classes[kind, op] = _class(of_kind + found[3][place])
    return classes


def _device_name(table: Measurements, device: Device) -> str:
    """Tables of single operations are timed in ways of their own: each is a device by itself."""
    return device.name if table.recorded else f"{device.name} {table.name}"


def kernels_of_device(
    table: Measurements, device: Device, common: Mapping[KernelName, KernelClass]
) -> Mapping[KernelName, KernelClass]:
    """Each class of ``common``, and of the operations in recordings of a device, as the device runs it."""
    sample = _Sample.of([(table, device)])
    names = [(table.ops.kind[row], table.ops.op[row]) for row in range(len(table))]
    kinds, operations = _Numbers(), _Numbers()
    levels = [
        _Level(np.zeros(len(names), np.int64), np.array(_OF_DEVICE)),
        _Level(kinds.of((kind,) for kind, _ in names), np.array(_OF_KIND_THERE)),
        _Level(operations.of(names), np.array(_OF_OPERATION_THERE)),
    ]
    start = {name: _logs(common, name) for name in {*names, *common}}
    found = _factors(sample, levels, np.array([start[name] for name in names]).reshape(-1, len(_NAMES)))
    classes: dict[KernelName, KernelClass] = {}
    for kind, op in sorted(start):
        number, place = kinds.by_name.get((kind,)), operations.by_name.get((kind, op))
        moved = found[0][0] if len(found[0]) else 0.0
        moved = moved + (0.0 if number is None else found[1][number])
        moved = moved + (0.0 if place is None else found[2][place])
        classes[kind, op or ANY] = _class(start[kind, op] + moved)
    return classes


def _logs(common: Mapping[KernelName, KernelClass], name: KernelName) -> FloatArray:
    """Logarithms of the parameters of the nearest common class."""
    known = common.get(name) or common.get((name[0], ANY))
    return _START if known is None else np.log([known[each] for each in _NAMES])


def classes_of_fits(fits: Iterable[Fit]) -> Mapping[KernelName, KernelClass]:
    """The classes that fits of the form state."""
    return {
        (fit.kind, fit.op): {each.name: each.value for each in fit.parameters}
        for fit in fits
        if fit.form == KERNELS.name
    }


def kernel_fits(
    classes: Mapping[KernelName, KernelClass], table: Measurements | None = None, *, fitted: str = ""
) -> tuple[Fit, ...]:
    """Classes as rows of a file, without errors and intervals; ``table`` is what they are fitted on."""
    return tuple(
        Fit(
            kind=kind,
            op=op,
            scheme=ANY,
            variant="",
            form=KERNELS.name,
            parameters=tuple(FitParameter(name=name, value=rounded(values[name])) for name in _NAMES),
            support=(),
            samples=1 if table is None else max(_rows_of(table, kind, op), 1),
            error=error_of(np.empty(0), np.empty(0)),
            bands=(),
            table="recordings" if table is None else table.name,
            provenance="recordings" if table is None else table.provenance,
            fitted=fitted or datetime.now(UTC).date().isoformat(),
            seed=0,
            default=True,
        )
        for (kind, op), values in sorted(classes.items())
    )


def _rows_of(table: Measurements, kind: str, op: str) -> int:
    rows = table.ops.kind.where(kind)
    return len(rows) if op == ANY else int(np.isin(rows, table.ops.op.where(op)).sum())


def time_of_kernels(
    table: Measurements, device: Device, classes: Mapping[KernelName, KernelClass]
) -> FloatArray:
    """The time [ns] of rows that the form speaks of, each by its class or the nearest, shape ``(rows,)``."""
    names = [(table.ops.kind[row], table.ops.op[row]) for row in range(len(table))]
    logs = np.array([_logs(classes, name) for name in names]).reshape(-1, len(_NAMES))
    return _time_ns(logs, _columns(table, device))
