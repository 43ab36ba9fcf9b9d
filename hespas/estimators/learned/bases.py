"""What trees correct: the time that fitted physics and a data sheet give an operation on a device.

    base = form^share x data-sheet time^(1 - share)

``form`` is one of :data:`~hespas.estimators.forms.FORMS` with the parameters of the device. On a device that
was never measured it is the geometric mean of what the parameters of its nearest relatives give with its own
rates: of the same family, else of the same vendor, else of the same kind of device (GPU, TPU).
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
    "RELATIVES",
    "START_NS",
    "TIERS",
    "Base",
    "BaseIndex",
    "Kinship",
    "SeenDevice",
    "Tier",
    "combined_ns",
    "relatives",
]

Tier = Literal["family", "vendor", "kind"]
TIERS: tuple[Tier, ...] = ("family", "vendor", "kind")
"""How near the nearest measured devices are, the nearest first."""

RELATIVES = "*"
"""Stands for the relatives of a device together, where a model was adapted to it."""
START_NS = 3e3
"""What a launch takes at most that no host times."""


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted form of one class of operations on a device; ``op`` is ``*`` for all of a kind together.
    ``parameters`` are in the order that the card states for the form. ``asymptote`` is what trees add to the
    largest operations [log time].
    """

    hardware: str
    kind: str
    op: str
    scheme: str
    variant: str
    form: str
    parameters: tuple[float, ...]
    asymptote: float


class SeenDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device of the fit. Devices of one ``family`` are left out together when transfer is tested."""

    name: str
    vendor: str
    family: str
    kind: str
    rows: int


class Kinship(NamedTuple):
    """The measured devices that stand in for another, and how near they are."""

    tier: Tier
    names: tuple[str, ...]


def relatives(device: Device, seen: Sequence[SeenDevice], among: Collection[str]) -> Kinship | None:
    """The nearest measured devices of these names; None where none of them is a device of its kind."""
    pool = [each for each in seen if each.name in among and each.kind == device.kind]
    vendor = [each for each in pool if each.vendor == device.vendor]
    family = [each for each in vendor if each.family == device.family]
    for tier, found in zip(TIERS, (family, vendor, pool), strict=True):
        if found:
            return Kinship(tier, tuple(each.name for each in found))
    return None


class BaseIndex:
    """The bases of a card by device and class. ``parameters`` names those of each form, in order."""

    def __init__(self, bases: Sequence[Base], parameters: Mapping[str, Sequence[str]]) -> None:
        self._parameters = parameters
        self._exact = {(each.hardware, each.kind, each.op, each.scheme, each.variant): each for each in bases}
        self._loose: dict[tuple[str, str, str], Base] = {}
        for each in bases:
            self._loose.setdefault((each.hardware, each.kind, each.scheme), each)

    def find(self, hardware: str, labels: tuple[str, str, str, str]) -> Base | None:
        """The base of a class on a device: its own, that of its kind, one of another variant."""
        kind, op, scheme, variant = labels
        for name in (op, ANY):
            if (found := self._exact.get((hardware, kind, name, scheme, variant))) is not None:
                return found
        return self._loose.get((hardware, kind, scheme))

    def log_times(
        self, ops: Operations, device: Device, names: Sequence[str], *, as_timed: bool = True
    ) -> tuple[FloatArray, FloatArray]:
        """Log of the form's time [ns] of each operation on ``device`` by the parameters of the devices
        ``names``, their mean, and of the asymptotes; NaN where none has a base of the class. Without
        ``as_timed`` no more of a start counts than a launch that no host times. O(ops x names).
        """
        times, ends = np.full(len(ops), np.nan), np.full(len(ops), np.nan)
        for labels, rows in ops.classes():
            bases = [base for name in names if (base := self.find(name, labels)) is not None]
            if not bases:
                continue
            part = ops.take(rows)
            machine = machine_of(device, labels[0], labels[2])
            logs = [
                np.log(form_time_ns(FORMS[base.form], self._values(base, as_timed), part, machine))
                for base in bases
            ]
            times[rows] = np.mean(logs, axis=0)
            ends[rows] = np.mean([base.asymptote for base in bases])
        return times, ends

    def _values(self, base: Base, as_timed: bool) -> dict[str, float]:
        values = dict(zip(self._parameters[base.form], base.parameters, strict=True))
        values = {
            each.name: each.absent for each in FORMS[base.form].parameters if not isnan(each.absent)
        } | values
        if not as_timed and timed_with_events(base.variant):
            for name in ("t0_ns", "group_t0_ns"):
                if name in values:
                    values[name] = min(values[name], START_NS)
        return values


def combined_ns(form_log_ns: FloatArray, sheet_ns: FloatArray, share: float) -> FloatArray:
    """The base [ns] of a form's time (its log; NaN: there is none) and a data-sheet time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        sheet = np.log(sheet_ns)
    return np.exp(np.where(np.isnan(form_log_ns), sheet, share * form_log_ns + (1 - share) * sheet))
