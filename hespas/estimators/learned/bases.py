"""Base time of a learned model, which its trees correct: a mean of a fitted formula and a data-sheet time.

    base = form^share x data-sheet time^(1 - share)

``form`` is one of :data:`~hespas.estimators.forms.FORMS` with the parameters of the device. A device that was
never measured uses the parameters of its nearest reference devices with its own rates, and the geometric mean
of the resulting times. Reference devices are devices of the same family, else of the same vendor, else of the
same kind (GPU, TPU).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isnan
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from hespas.estimators.forms import FORMS, form_time_ns, machine_of
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Device
from hespas.operations import Operations, timed_with_events

__all__ = [
    "MOST_START_NS",
    "NEARNESS_LEVELS",
    "REFERENCE_DEVICES",
    "Base",
    "BaseIndex",
    "FittedDevice",
    "Nearness",
    "ReferenceDevices",
    "combined_ns",
    "nearest_devices",
]

Nearness = Literal["family", "vendor", "kind"]
NEARNESS_LEVELS: tuple[Nearness, ...] = ("family", "vendor", "kind")
"""Distances of the nearest measured devices, the nearest first."""

REFERENCE_DEVICES = "*"
"""Hardware name of the bases of all reference devices together, in a model adapted to one device."""
MOST_START_NS = 3e3
"""Limit of the launch time where the host's launch is not part of the operation [ns]."""


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fitted form of one class of operations on a device, the base time that the trees of a learned model
    correct.

    ``op`` is ``*`` if the form is for all operations of a kind. ``parameters`` are in the order of the card's
    list for this form. ``asymptote`` is the sum of the trees for the largest operations [log time].
    """

    hardware: str
    kind: str
    op: str
    scheme: str
    variant: str
    form: str
    parameters: tuple[float, ...]
    asymptote: float


class FittedDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Device whose measurements were used to fit a learned model. In tests of new devices, all devices of one
    ``family`` are left out together.
    """

    name: str
    vendor: str
    family: str
    kind: str
    rows: int


class ReferenceDevices(NamedTuple):
    """Measured devices whose fitted formulas (bases) are used for a device without measurements, and their
    distance from it.
    """

    nearness: Nearness
    names: tuple[str, ...]


def nearest_devices(
    device: Device, fitted: Sequence[FittedDevice], among: Collection[str]
) -> ReferenceDevices | None:
    """Return the fitted devices in ``among`` that are nearest to ``device``; None if none is of the same
    kind.
    """
    kind = [other for other in fitted if other.name in among and other.kind == device.kind]
    vendor = [other for other in kind if other.vendor == device.vendor]
    family = [other for other in vendor if other.family == device.family]
    for nearness, group in zip(NEARNESS_LEVELS, (family, vendor, kind), strict=True):
        if group:
            return ReferenceDevices(nearness, tuple(other.name for other in group))
    return None


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
                if not as_timed and timed_with_events(base.variant):
                    starts = [name for name in ("t0_ns", "group_t0_ns") if name in values]
                    values |= {name: min(values[name], MOST_START_NS) for name in starts}
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
