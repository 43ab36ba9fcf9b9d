"""Devices as data: typed TOML files with sources, and the rules that read rates off them.

``load_device("H100-SXM")`` or ``load_device("my-device.toml")``; :func:`peak_for` says which rate an
operation runs at. ``load_system("dgx-h100").sized(64)`` is 64 of them and what joins them. Measuring this
machine lives in :mod:`hespas.hardware.measure`, which needs NumPy.
"""

from __future__ import annotations

from hespas.hardware.device_fits import ANY, Fit, FitBand, FitError, FitParameter, FitRange
from hespas.hardware.devices import (
    Device,
    Efficiency,
    Link,
    Memory,
    Peak,
    SystolicArray,
    device_to_toml,
    write_device,
)
from hespas.hardware.library import (
    canonical,
    device_files,
    device_names,
    find,
    is_path,
    load_device,
    named_device,
    stated_by,
)
from hespas.hardware.peaks import PeakChoice, peak_for, product_peak, type_multiplied
from hespas.hardware.system import Dimension, System, load_system, read_system, system_names, system_to_toml
from hespas.hardware.typed_toml import Source

__all__ = [
    "ANY",
    "Device",
    "Dimension",
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
    "System",
    "SystolicArray",
    "canonical",
    "device_files",
    "device_names",
    "device_to_toml",
    "find",
    "is_path",
    "load_device",
    "load_system",
    "named_device",
    "peak_for",
    "product_peak",
    "read_system",
    "stated_by",
    "system_names",
    "system_to_toml",
    "type_multiplied",
    "write_device",
]
