"""Fits of kernels that the devices of a vendor have in common: files beside those of single devices."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hespas.hardware.device_file import has_shipped_fits, read_fits, shipped_fits
from hespas.hardware.model import Device, Fit

__all__ = ["KERNELS_FOLDER", "common_fits", "fits_of_user"]

KERNELS_FOLDER = Path(__file__).parent / "kernels"
"""One file per recorded device, and one per vendor for its others, by their names in lower case."""


def common_fits(device: Device) -> tuple[Fit, ...]:
    """What is known of a device's kernels: by recordings of its own, or else of its vendor's other GPUs."""
    if device.kind != "gpu" or device.vendor.lower() not in _names():
        return ()
    return _in_file(device.name.lower()) or _in_file(device.vendor.lower())


@cache
def _in_file(name: str) -> tuple[Fit, ...]:
    return read_fits(KERNELS_FOLDER / f"{name}.toml") if name in _names() else ()


@cache
def _names() -> frozenset[str]:
    return frozenset(path.stem for path in KERNELS_FOLDER.glob("*.toml"))


def fits_of_user(device: Device) -> tuple[Fit, ...]:
    """The fits of a device's own file that do not ship with the package: files that are written anew hold
    those, too.
    """
    if not has_shipped_fits(device.name):
        return device.own_fits
    known = {_identity(fit) for fit in shipped_fits(device.name)}
    return tuple(fit for fit in device.own_fits if _identity(fit) not in known)


def _identity(fit: Fit) -> tuple[object, ...]:
    values = tuple((each.name, each.value) for each in fit.parameters)
    return (*fit.key, fit.form, fit.samples, fit.table, values)
