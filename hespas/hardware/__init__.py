"""Devices and systems as data: typed TOML files with sources, and rules that derive rates from them.

``load_device("H100-SXM")`` or ``load_device("my-device.toml")`` loads a device; :func:`peak_for` returns the
rate of an operation. ``load_system("dgx-h100").sized(64)`` is a system of 64 devices with their networks.
:mod:`hespas.hardware.measure`, which needs NumPy, measures this machine.
"""

from __future__ import annotations

from hespas.hardware.device_fits import ANY, Fit, FitBand, FitError, FitParameter, FitRange, StepFactor
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
from hespas.hardware.imc_macro import ImcMacro
from hespas.hardware.library import (
    all_device_names,
    canonical_name,
    device_files,
    device_names,
    find_device,
    is_path,
    load_device,
    named_device,
    own_device_file,
    resolve_reference,
)
from hespas.hardware.peaks import PeakChoice, host_payload, peak_for, product_peak, type_multiplied
from hespas.hardware.system import (
    Dimension,
    System,
    all_system_names,
    load_system,
    own_system_file,
    read_system,
    system_names,
    system_to_toml,
)
from hespas.hardware.typed_toml import FigureSource

__all__ = [
    "ANY",
    "Device",
    "Dimension",
    "Efficiency",
    "FigureSource",
    "Fit",
    "FitBand",
    "FitError",
    "FitParameter",
    "FitRange",
    "ImcMacro",
    "Link",
    "Memory",
    "Peak",
    "PeakChoice",
    "StepFactor",
    "System",
    "SystolicArray",
    "all_device_names",
    "all_system_names",
    "canonical_name",
    "device_files",
    "device_names",
    "device_to_toml",
    "find_device",
    "host_payload",
    "is_path",
    "load_device",
    "load_system",
    "named_device",
    "own_device_file",
    "own_system_file",
    "peak_for",
    "product_peak",
    "read_system",
    "resolve_reference",
    "system_names",
    "system_to_toml",
    "type_multiplied",
    "write_device",
]
