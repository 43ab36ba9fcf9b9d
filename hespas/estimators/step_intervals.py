"""The 90 % interval of a predicted step, from residuals of predicted steps and programs that were measured.

``step_intervals.toml`` holds, by kind of workload and extrapolation level, the factors between which the
measured time lies. ``python -m tools.step_intervals`` makes it and scores it on groups that it leaves out.
"""

from __future__ import annotations

from functools import cache
from math import nan
from pathlib import Path
from typing import Literal, get_args

import msgspec

from hespas.estimators.configuration import WorkloadKind
from hespas.hardware import Device
from hespas.hardware.kernel_shares import training_shares

__all__ = [
    "DATA",
    "LEVELS",
    "Level",
    "StepInterval",
    "StepIntervals",
    "device_level",
    "step_factors",
    "step_intervals",
]

DATA = Path(__file__).with_name("step_intervals.toml")
"""The file of the intervals."""

Level = Literal["measured", "new device"]
"""Extrapolation levels: kernels of the device (for training steps, of its family) were measured, or not."""
LEVELS: tuple[Level, ...] = get_args(Level)
_COMPARED = frozenset({"composite", "training"})
"""Estimators whose steps have been compared with measured ones."""


class StepInterval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors on the predicted time between which 90 % of measured times lie.

    ``rows`` residuals of ``groups`` are behind it; ``source`` names them. ``coverage``, ``width`` (the ratio
    of the ends) and ``score`` (the interval score of the logarithm) are those of groups that were left out.
    """

    kind: WorkloadKind
    level: Level
    low: float
    high: float
    rows: int
    groups: int
    coverage: float = nan
    width: float = nan
    score: float = nan
    source: str


class StepIntervals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of the data file."""

    interval: list[StepInterval]


@cache
def step_intervals() -> dict[tuple[WorkloadKind, Level], StepInterval]:
    """Return the intervals that ship, by kind and level."""
    found = msgspec.toml.decode(DATA.read_bytes(), type=StepIntervals)
    return {(each.kind, each.level): each for each in found.interval}


def device_level(kind: WorkloadKind, device: Device) -> Level:
    """Return how far a prediction for a device is from what was measured."""
    if device.fits:
        return "measured"
    if kind == "training" and (device.kind == "tpu" or device.family in training_shares(device).families):
        return "measured"
    return "new device"


def step_factors(kind: WorkloadKind, device: Device, estimator: str) -> tuple[float, float]:
    """Return the factors of the ends of a step's interval; NaN for estimators that were not compared.

    ``estimator`` is a spelling, with options.
    """
    if estimator.partition(":")[0] not in _COMPARED:
        return nan, nan
    found = step_intervals().get((kind, device_level(kind, device)))
    return (found.low, found.high) if found else (nan, nan)
