"""Common parameters of kernels on a vendor's GPUs, which ``python -m tools.fits`` writes.

The data are recordings of programs, and some rows of tables of single operations (of tables with splits only
``calib``). A recorded device has a separate file with errors of held-out recordings. The file of a vendor is
for all other devices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hespas import api
from hespas.estimators.kernels import KERNEL_KINDS, KERNELS, PRODUCTS
from hespas.fitting.kernels import (
    classes_of_fits,
    common_kernels,
    common_products,
    kernel_fits,
    products_fit,
)
from hespas.fitting.recordings import HeldOutRecording, fit_recordings, held_out_recording, with_intervals
from hespas.fitting.rows import may_be_fitted
from hespas.graph import Profile
from hespas.graph.errors import HespasError
from hespas.hardware import Device, Fit, find_device, named_device
from hespas.hardware.kernel_shares import scaled_fits
from hespas.measurements import Measurements, joined, read_measurements
from hespas.operations.model import rows_by_label
from hespas.validators.calibration import measurements_of

__all__ = [
    "VENDORS",
    "Trace",
    "fits_without",
    "is_recorded",
    "kernel_fits_of_files",
    "kernel_tables",
    "model_of",
    "recorded_traces",
    "recordings_left_out",
    "vendor_fits",
]

_Recorded = tuple[Measurements, Device]

VENDORS = ("AMD", "NVIDIA")
"""Vendors with recorded devices."""
_TABLES = ("neusight_perop.parquet", "vidur_compute.parquet")
"""Tables of operations that frameworks run one by one."""
_EACH = 20
"""Rows of each operation on each device. More rows would outweigh the programs, the purpose of the fit."""
_OLD = ("Pascal",)
"""Families with different kernels, because they have no 16-bit vector units."""


def kernel_tables(folder: Path) -> list[tuple[Measurements, Device]]:
    """Return some rows of each operation on each GPU in the tables, the same rows in every run."""
    found: list[tuple[Measurements, Device]] = []
    for name in _TABLES:
        if not (folder / name).exists():
            continue
        table = may_be_fitted(read_measurements(folder / name))
        table = table.take(table.ops.kind.where(*KERNEL_KINDS))
        for hardware in table.hardware.used():
            device = named_device(hardware)
            if device.family not in _OLD:
                found.append((_drawn(table.on(hardware)), device))
    return found


def _drawn(table: Measurements) -> Measurements:
    generator = np.random.default_rng(0)
    parts = rows_by_label(table.ops.kind, table.ops.op)
    return table.take(np.sort(np.concatenate([generator.permutation(rows)[:_EACH] for _, rows in parts])))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Recording of a model on a device."""

    name: str
    model: str
    hardware: str
    profile: Profile


def model_of(name: str) -> str:
    """Return the model of a recording: the part of its file name after the first ``_``."""
    return name.partition("_")[2].partition(".")[0]


def _traces(folder: Path) -> list[Trace]:
    """Return every recording of a known device in a folder; other files are reported on standard error."""
    found: list[Trace] = []
    for path in sorted(folder.iterdir()):
        if path.suffix in (".csv", ".md") or path.is_dir():
            continue
        try:
            profile = api.read(path)
            if isinstance(profile, Profile) and profile.devices:
                found.append(Trace(path.name, model_of(path.name), find_device(profile.devices[0]), profile))
        except HespasError as error:
            sys.stderr.write(f"{path.name}: skipped: {error.message[:100]}\n")
    return found


def recorded_traces(folder: Path) -> list[tuple[Trace, Measurements]]:
    """Return the recordings of known devices in a folder with their operations; others are reported."""
    found: list[tuple[Trace, Measurements]] = []
    for trace in _traces(folder):
        try:
            found.append((trace, measurements_of(trace.profile, trace.hardware)))
        except HespasError as error:
            sys.stderr.write(f"{trace.name}: skipped: {error.message[:100]}\n")
    return found


def vendor_fits(
    traces: Sequence[_Recorded], measured: Sequence[_Recorded], vendor: str, date: str = ""
) -> tuple[Fit, ...]:
    """Return the common fits of a vendor's recorded devices: kernels, and products in programs."""
    common = common_kernels([*traces, *measured], vendor)
    table = joined([table for table, _ in traces], "recordings") if traces else None
    products = products_fit(common_products(traces, vendor), fitted=date)
    return (*kernel_fits(common, table, fitted=date), products)


def fits_without(
    traces: Sequence[_Recorded], measured: Sequence[_Recorded], device: Device, date: str = ""
) -> tuple[Fit, ...]:
    """Return the fits of a device to its own recordings, or else to those of its vendor's other devices.
    Intervals come from recordings among ``traces`` that are held out in turn, so that they contain nothing of
    other recordings.
    """
    known = is_recorded(traces, device)
    left_out = recordings_left_out(traces, measured, devices=not known)
    return with_intervals(_fits(traces, measured, device, date), left_out, device if known else None)


def is_recorded(traces: Sequence[_Recorded], device: Device) -> bool:
    """Return True if a recording is of that device."""
    return any(other.name == device.name for _, other in traces)


def _fits(
    traces: Sequence[_Recorded], measured: Sequence[_Recorded], device: Device, date: str = ""
) -> tuple[Fit, ...]:
    """Return the fits of a device, with intervals that do not hold out the vendor's fits."""
    mine = [table for table, other in traces if other.name == device.name]
    common = scaled_fits(vendor_fits(traces, measured, device.vendor, date), device)
    if not mine:
        return common
    fits = fit_recordings(mine, device, common=classes_of_fits(common), fitted=date)
    # The shipped fits of the device contain the recordings that are held out here, so they are not used.
    forms = {fit.form for fit in fits}
    return (*fits, *(fit for fit in common if fit.form == PRODUCTS and fit.form not in forms))


def recordings_left_out(
    traces: Sequence[_Recorded], measured: Sequence[_Recorded], *, devices: bool
) -> list[HeldOutRecording]:
    """Predict each recording by fits without its model on any device. With ``devices`` the fits also lack its
    device; otherwise only recordings whose device has recordings of other models are predicted.
    """
    found: list[HeldOutRecording] = []
    for table, device in traces:
        others = [each for each in traces if model_of(each[0].name) != model_of(table.name)]
        if devices:
            others = [each for each in others if each[1].name != device.name]
        if others and is_recorded(others, device) != devices:
            found.append(held_out_recording(table, device, _fits(others, measured, device)))
    return found


def kernel_fits_of_files(
    traces: Sequence[_Recorded], measured: Sequence[_Recorded], date: str
) -> Iterator[tuple[str, tuple[Fit, ...]]]:
    """Yield name and fits of each file: a vendor of :data:`VENDORS`, or one of its recorded devices with its
    kernels and products.
    """
    devices = {device.name: device for _, device in traces}
    models, others = (recordings_left_out(traces, measured, devices=each) for each in (False, True))
    for vendor in VENDORS:
        yield vendor, with_intervals(vendor_fits(traces, measured, vendor, date), others)
        for device in devices.values():
            if device.vendor == vendor:
                fits = with_intervals(_fits(traces, measured, device, date), models, device)
                yield device.name, tuple(fit for fit in fits if fit.form in (KERNELS.name, PRODUCTS))
