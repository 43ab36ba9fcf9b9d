"""Measured rows as what trees are grown on: columns, and the logarithm of time over the base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.learned.ensemble import FAMILIES, features_of
from hespas.estimators.learned.inference import code_columns
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, device_names, named_device
from hespas.measurements import Measurements
from hespas.operations import Labels
from hespas.validators.calibration.learned_parts import Part

__all__ = ["Rows", "family_name", "rising", "rows_for", "transferable"]

_DEVICE = frozenset({"peak", "peak_per_unit", "ridge", "bandwidth", "units", "cache"})
_TIMES = frozenset({"arithmetic", "memory"})
_PRODUCT_SIZES = frozenset(
    {"m", "n", "k", "smallest", "m_over_n", "inputs", "weights", "outputs", "n_over_k", "images"}
)
_ABSOLUTE_COLUMNS: Mapping[str, frozenset[str]] = {
    "product": _DEVICE | _TIMES | _PRODUCT_SIZES,
    "attention": _DEVICE | _TIMES,
    "generation": _DEVICE | _TIMES,
    "experts": _DEVICE | _TIMES,
    "stream": _DEVICE | _TIMES,
}
"""Columns by which trees tell one device from another. A model for devices it has never seen does without."""

_RISING_COLUMNS: Mapping[str, frozenset[str]] = {"stream": frozenset({"loss", "row_loss"})}
"""Columns with which time can only rise, all others equal: waste of the last wave, where kernels are simple
enough that one exists. Kernels of products change with the shape, so a wave of theirs need not be there.
"""

_VERSION = re.compile(r" v?\d[\w.]*")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """``measured`` without rows that have no columns (a device without a file, an unknown peak). ``table`` of
    shape (rows, ``names``); ``ratio`` is log(duration / base); ``devices`` by name; ``codes`` number labels.
    """

    measured: Measurements
    names: tuple[str, ...]
    table: NDArray[np.float32]
    ratio: FloatArray
    devices: Mapping[str, Device]
    codes: Mapping[str, Mapping[str, float]]

    def of_devices(self, names: tuple[str, ...]) -> BoolArray:
        """Which rows are of one of the devices."""
        mine = np.zeros(len(self.ratio), np.bool_)
        mine[self.measured.hardware.where(*names)] = True
        return mine

    def columns(self, names: tuple[str, ...]) -> NDArray[np.float32]:
        """Some columns, in that order."""
        return self.table[:, [self.names.index(name) for name in names]]


def rising(part: Part, names: tuple[str, ...]) -> tuple[int, ...]:
    """The places of the columns with which time can only rise."""
    found = _RISING_COLUMNS.get(FAMILIES[part.kinds[0]], frozenset())
    return tuple(place for place, name in enumerate(names) if name in found)


def family_name(device: Device) -> str:
    """What is left out together: a family of one vendor."""
    return f"{device.vendor} {device.family}"


def transferable(part: Part, names: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that do not tell devices apart."""
    return tuple(name for name in names if name not in _ABSOLUTE_COLUMNS[FAMILIES[part.kinds[0]]])


def rows_for(part: Part, measured: Measurements, files: Mapping[str, Device] | None = None) -> Rows:
    """The rows of one part with their columns; constant columns are left out. O(rows).

    ``files`` are the devices by their names in the table (None: those that ship with the package).
    """
    known = set(device_names()) if files is None else set(files)
    used = [name for name in measured.hardware.used() if name in known]
    if not used:
        raise UsageError(f"{part.name}: no row is of a known device")
    devices = {name: named_device(name) if files is None else files[name] for name in used}
    measured = measured.take(np.sort(measured.hardware.where(*used)))
    family = FAMILIES[part.kinds[0]]
    names: tuple[str, ...] = ()
    table, base = np.empty((0, 0), np.float32), np.full(len(measured), np.nan)
    for name, device in devices.items():
        mine = measured.hardware.where(name)
        found = features_of(family, measured.ops.take(mine), device, overhead_ns=part.overhead_ns)
        if not names:
            names, table = found.names, np.full((len(measured), len(found.names)), np.nan, np.float32)
        table[mine], base[mine] = found.columns, found.base_ns
    kept = np.flatnonzero(np.isfinite(table).all(axis=1) & np.isfinite(base))
    measured, table = measured.take(kept), table[kept]
    ratio = np.log(measured.duration_ns / base[kept])
    codes = _codes(measured, ratio)
    labels = {"variant": measured.ops.variant, "scheme": measured.ops.scheme, "op": measured.ops.op}
    coded = code_columns(codes, labels)
    table = np.concatenate((table, *(column[:, None] for column in coded.values())), axis=1, dtype=np.float32)
    varies = np.flatnonzero(np.ptp(table, axis=0) > 0).tolist() if len(table) else []
    names = (*names, *coded)
    return Rows(
        measured,
        tuple(names[each] for each in varies),
        np.ascontiguousarray(table[:, varies]),
        ratio,
        devices,
        codes,
    )


def _codes(measured: Measurements, ratio: FloatArray) -> dict[str, dict[str, float]]:
    """Numbers of labels in the order of their mean ratio; variants that differ only in version are one."""
    ops = measured.ops
    return {
        name: _ordered(labels, ratio, joins_versions=name == "variant")
        for name, labels in (("variant", ops.variant), ("scheme", ops.scheme), ("op", ops.op))
    }


def _ordered(labels: Labels, ratio: FloatArray, *, joins_versions: bool) -> dict[str, float]:
    used = labels.used()
    if not used:
        return {}
    plain = {name: _VERSION.sub("", name) if joins_versions else name for name in used}
    groups = sorted(set(plain.values()))
    group_of = np.array([groups.index(plain.get(name, groups[0])) for name in labels.names])
    group: IntArray = group_of[labels.row]
    sums = np.bincount(group, ratio, len(groups))
    means = sums / np.bincount(group, minlength=len(groups))
    place = np.argsort(np.argsort(means, kind="stable"), kind="stable")
    return {name: float(place[groups.index(plain[name])]) for name in sorted(used)}
