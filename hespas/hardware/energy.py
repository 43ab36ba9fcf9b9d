"""Energy from the figures a device file has; NaN where it has none."""

from __future__ import annotations

from math import nan

from hespas.graph.errors import UnsupportedError
from hespas.hardware.model import Device, Unit
from hespas.hardware.peaks import peak_for

__all__ = ["energy_pj_per_flop", "tdp_energy_j"]


def energy_pj_per_flop(device: Device, unit: Unit, dtype: str) -> float:
    """Picojoules of one operation (a multiply and an add are two); NaN where the file states none.

    The figure belongs to the peak that :func:`peak_for` chooses, times the unit's products per operation.
    """
    try:
        choice = peak_for(device, unit, dtype)
    except UnsupportedError:
        return nan
    return choice.peak.energy_pj_per_flop * choice.products


def tdp_energy_j(device: Device, duration_ns: float) -> float:
    """Joules the board takes at its thermal design power for that long; NaN where the power is unknown."""
    return device.tdp_w * duration_ns * 1e-9
