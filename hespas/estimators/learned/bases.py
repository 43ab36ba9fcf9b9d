"""Base time of a learned model, which its trees correct: a mean of a fitted formula and a data-sheet time.

    base = form^share x data-sheet time^(1 - share)

``form`` is one of :data:`~hespas.estimators.forms.FORMS` with the parameters of the device. A device that was
never measured uses the parameters of its nearest reference devices with its own rates. Reference devices are
measured devices of the same kind (GPU, TPU). Their weights fall exponentially with their distance from the
device, which is a weighted sum of differences between two device files (:data:`_DISTANCES`). Rates depend on
the kind of operation and the number format, so that a device may have other references for matmuls than for
streaming operations. The weights of the differences gave the smallest error on architectures that were left
out of the models (``python -m benchmarks.carry_over.new_devices``), within 1 % of it: the measured devices
cannot separate the effects of instructions, vendor and memory from those of rates, so that these are set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import inf, isnan, log
from string import ascii_lowercase, digits
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from hespas.estimators.forms import FORMS, carried_values, form_time_ns, machine_of
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Device, device_names, named_device
from hespas.operations import Operations, timed_with_events

__all__ = [
    "MOST_START_NS",
    "REFERENCE_DEVICES",
    "Base",
    "BaseIndex",
    "FittedDevice",
    "ReferenceDevices",
    "combined_ns",
    "device_distance",
    "measured_device",
    "nearest_devices",
]

_DISTANCES: Mapping[str, float] = {
    "flops_per_byte": 1.8,
    "flops_per_unit": 1.4,
    "units": 1.8,
    "bytes_per_unit": 1.0,
    "cache": 0.5,
    "memory": 0.5,
    "architecture": 0.5,
    "instructions": 1.5,
    "vendor": 1.0,
    "library": 1.0,
}
"""Distance of two devices for each difference between them: per factor e between two rates, numbers of units
or sizes of the largest cache, and for another memory technology, architecture, kind of matrix instructions,
vendor, and library (or setting of it) of the measurements.
"""
_UNKNOWN_DIFFERENCE = 1.0
"""Difference assumed where a device file does not state a figure [natural logarithm]."""
_UNKNOWN_DISTANCE = 6.0
"""Distance of a measured device that has no device file in the package."""
_MOST_REFERENCES = 4
_LEAST_WEIGHT = 0.05
REFERENCE_DEVICES = "*"
"""Hardware name of the parameters from which the parameters of a device were fitted, in a model adapted to
one device.
"""
MOST_START_NS = 3e3
"""Limit of the launch time where the host's launch is not part of the operation [ns]."""


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fitted form of one class of operations on a device, the base time that the trees of a learned model
    correct.

    ``op`` is ``*`` if the form is for all operations of a kind. ``parameters`` are in the order of the card's
    list for this form. ``asymptote`` is the sum of the trees for the largest operations [log time].
    ``share`` is for adapted models: the exponent of the form's time in the base time, and of its inverse if
    ``hardware`` is :data:`REFERENCE_DEVICES`.
    """

    hardware: str
    kind: str
    op: str
    scheme: str
    variant: str
    form: str
    parameters: tuple[float, ...]
    asymptote: float
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0


class FittedDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Device whose measurements were used to fit a learned model. In tests of new devices, all devices of one
    architecture (``arch``) are left out together.
    """

    name: str
    arch: str
    kind: str
    rows: int


class ReferenceDevices(NamedTuple):
    """Measured devices from whose times the times of a device without measurements are predicted, the one
    with the largest weight first.

    ``variants`` are the variants in which they were measured (empty: the variant of the operations).
    ``weights`` have the sum 1. ``distance`` is the weighted mean of the distances from the device,
    ``nearest`` the smallest of them (:func:`device_distance`). ``other_memory`` is the weight of the devices
    with another memory technology.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    distance: float
    nearest: float
    other_memory: float
    variants: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return names and weights, such as ``B200-SXM 0.7, H100-SXM 0.3``."""
        return ", ".join(
            f"{name} {weight:.1f}" for name, weight in zip(self.names, self.weights, strict=True)
        )


@lru_cache(maxsize=1024)
def measured_device(name: str) -> Device | None:
    """Return the shipped device of that name; None if none ships, as for the rows of a user."""
    return named_device(name) if name in device_names() else None


def device_distance(device: Device, other: Device, kind: str, scheme: str) -> float:
    """Return the distance of two devices for operations of a kind in a number format; 0 for equal rates,
    caches, memories and matrix instructions.
    """
    one, two = (machine_of(compared, kind, scheme) for compared in (device, other))
    ratios = {
        "flops_per_byte": (one.flops_per_ns / one.bytes_per_ns, two.flops_per_ns / two.bytes_per_ns),
        "flops_per_unit": (one.flops_per_ns / one.units, two.flops_per_ns / two.units),
        "units": (one.units, two.units),
        "bytes_per_unit": (one.bytes_per_ns / one.units, two.bytes_per_ns / two.units),
        "cache": (one.cache_bytes, two.cache_bytes),
    }
    total = 0.0
    for name, (first, second) in ratios.items():
        is_known = first > 0 and second > 0
        total += _DISTANCES[name] * (abs(log(first / second)) if is_known else _UNKNOWN_DIFFERENCE)
    differs = {
        "memory": _memory(device) != _memory(other),
        "architecture": device.architecture != other.architecture,
        "instructions": one.instructions != two.instructions,
        "vendor": device.vendor != other.vendor,
    }
    return total + sum(_DISTANCES[name] for name, differing in differs.items() if differing)


def _memory(device: Device) -> str:
    """Return the name of a memory without its generation: ``HBM`` of ``HBM3e``, ``GDDR`` of ``GDDR6X``."""
    return device.main_memory.name.partition(" ")[0].rstrip(f"{digits}{ascii_lowercase}X")


def nearest_devices(
    device: Device,
    fitted: Sequence[FittedDevice],
    among: Collection[str],
    kind: str,
    scheme: str,
    *,
    other_library: Collection[str] = (),
) -> ReferenceDevices | None:
    """Return the fitted devices in ``among`` from which ``device`` is predicted, for operations of a kind and
    number format; None if none is of the same kind of device.

    Those in ``other_library`` were measured with another library or setting, which makes them more distant.
    """
    candidates = [other.name for other in fitted if other.name in among and other.kind == device.kind]
    if not candidates:
        return None
    files = [measured_device(name) for name in candidates]
    apart = np.array(
        [_UNKNOWN_DISTANCE if file is None else device_distance(device, file, kind, scheme) for file in files]
    )
    apart += _DISTANCES["library"] * np.isin(candidates, list(other_library))
    weight = np.exp(apart.min() - apart)
    order = np.argsort(-weight, kind="stable")[:_MOST_REFERENCES]
    order = order[weight[order] >= _LEAST_WEIGHT * weight.sum()]
    share = weight[order] / weight[order].sum()
    has_other = [file is None or _memory(file) != _memory(device) for file in files]
    numbers: list[int] = order.tolist()
    return ReferenceDevices(
        names=tuple(candidates[number] for number in numbers),
        weights=tuple(share.tolist()),
        distance=float(share @ apart[order]),
        nearest=float(apart.min()),
        other_memory=float(share @ np.array(has_other, np.float64)[order]),
    )


class BaseIndex:
    """Bases (fitted formulas) of a model's card, indexed by device and class of operations. ``parameters``
    are the parameter names of each form, in order.
    """

    def __init__(self, bases: Sequence[Base], parameters: Mapping[str, Sequence[str]]) -> None:
        self._parameters = parameters
        self._exact = {(base.hardware, base.kind, base.op, base.scheme, base.variant): base for base in bases}
        self._any_variant: dict[tuple[str, str, str], Base] = {}
        for base in bases:
            self._any_variant.setdefault((base.hardware, base.kind, base.scheme), base)

    def find(self, hardware: str, labels: tuple[str, str, str, str]) -> Base | None:
        """Return the base of a class of operations on a device, or None. The base of the operation is
        preferred, then the base of its kind, then a base of the same kind with another variant.
        """
        kind, op, scheme, variant = labels
        for name in (op, ANY):
            if (base := self._exact.get((hardware, kind, name, scheme, variant))) is not None:
                return base
        return self._any_variant.get((hardware, kind, scheme))

    def log_times(
        self, ops: Operations, device: Device, names: Sequence[str], *, as_timed: bool = True
    ) -> tuple[FloatArray, FloatArray]:
        """Return two columns for operations on ``device``: the log of the base time [ns], and the asymptote
        (:class:`Base`). Both are NaN if no base covers the class.

        Both are means over the bases of the devices ``names``. If ``as_timed`` is False, the launch time in
        fits of event timings is limited to :data:`MOST_START_NS`. O(ops x names).
        """
        times, ends = np.full(len(ops), np.nan), np.full(len(ops), np.nan)
        for labels, rows in ops.classes():
            bases = [base for name in names if (base := self.find(name, labels)) is not None]
            if not bases:
                continue
            part = ops.take(rows)
            machine = machine_of(device, labels[0], labels[2])
            logs: list[FloatArray] = []
            for base in bases:
                form = FORMS[base.form]
                values = {entry.name: entry.absent for entry in form.parameters if not isnan(entry.absent)}
                values |= dict(zip(self._parameters[base.form], base.parameters, strict=True))
                starts: dict[str, float] = {}
                if timed_with_events(base.variant):  # the start is the time of the host
                    most = inf if as_timed else MOST_START_NS
                    names_of_starts = ("t0_ns", "group_t0_ns")
                    starts = {name: min(values[name], most) for name in names_of_starts if name in values}
                fitted = None if base.hardware == device.name else measured_device(base.hardware)
                if fitted is not None:
                    rates = machine_of(fitted, labels[0], labels[2])
                    values = dict(carried_values(form, values, rates, machine))
                values |= starts
                logs.append(np.log(form_time_ns(form, values, part, machine)))
            times[rows] = np.mean(logs, axis=0)
            ends[rows] = np.mean([base.asymptote for base in bases])
        return times, ends


def combined_ns(form_log_ns: FloatArray, sheet_ns: FloatArray, share: float) -> FloatArray:
    """Return the base time [ns] that the trees correct: the weighted geometric mean of the fitted form's time
    and the data-sheet time.

    ``form_log_ns`` is the log of the form's time (NaN: only the data sheet is used). ``share`` is the weight
    of the form.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        sheet = np.log(sheet_ns)
    return np.exp(np.where(np.isnan(form_log_ns), sheet, share * form_log_ns + (1 - share) * sheet))
