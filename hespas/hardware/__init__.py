"""Devices as data: typed TOML files with sources, and the rules that read rates off them.

``load_device("H100-SXM")`` or ``load_device("my-device.toml")``; :func:`peak_for` says which rate an
operation runs at. Measuring this machine lives in :mod:`hespas.hardware.measure`, which needs NumPy.
"""

from __future__ import annotations

from hespas.hardware.device_file import device_to_toml, write_device
from hespas.hardware.library import canonical, device_names, find, load_device, named_device
from hespas.hardware.model import (
    ANY,
    Device,
    Efficiency,
    Fit,
    FitBand,
    FitError,
    FitParameter,
    FitRange,
    Link,
    Memory,
    Peak,
    Source,
    SystolicArray,
)
from hespas.hardware.peaks import PeakChoice, peak_for, product_peak

__all__ = [
    "ANY",
    "Device",
    "Efficiency",
    "Fit",
    "FitBand",
    "FitError",
    "FitParameter",
    "FitRange",
    "Link",
    "Memory",
    "Peak",
    "PeakChoice",
    "Source",
    "SystolicArray",
    "canonical",
    "device_names",
    "device_to_toml",
    "find",
    "load_device",
    "named_device",
    "peak_for",
    "product_peak",
    "write_device",
]
