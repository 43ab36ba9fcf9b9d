"""Which line speaks for a device and a class of operations, and how far it is stretched to do so.

A device's own lines are taken as they are. Another TPU takes those of TPU-v4: cycles by clock and number of
arrays, bytes and elements by memory bandwidth, the start as it is. Each such step is told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isnan, nan

from hespas.estimators.rates import rate_flops_per_s
from hespas.estimators.systolic.lines import ELEMENTS, PRODUCTS, read_lines
from hespas.estimators.systolic.telling import Note
from hespas.hardware import ANY, Device, Fit, load_device
from hespas.operations import find_scheme

__all__ = ["Basis", "basis_of", "clock_hz"]

_MEASURED = "TPU-v4"
"""The TPU whose lines others are derived from: the one with tables of measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """A line, and what its terms are multiplied by. ``notes`` say what was assumed; ``honest`` is true
    where the line's interval still holds.
    """

    fit: Fit
    cycle_scale: float = 1.0
    byte_scale: float = 1.0
    element_scale: float = 1.0
    notes: tuple[Note, ...] = ()
    honest: bool = True


def clock_hz(device: Device) -> float:
    """The clock of the arrays: stated, or what the published bf16 rate needs; NaN without an array."""
    shape = device.systolic
    if shape is None:
        return nan
    if not isnan(shape.clock_hz):
        return shape.clock_hz
    rate = rate_flops_per_s(device, "bf16", matrix=True)
    return rate / (2 * shape.rows * shape.columns * shape.arrays)


def basis_of(
    device: Device, kind: str, op: str, scheme: str, variant: str, *, shipped: bool = True
) -> Basis | None:
    """The line for a class of operations: of the device's file before those that come with the package (none
    of these unless ``shipped``). None where nothing speaks for it.
    """
    labels = (kind, op, scheme, variant)
    of_file = _chosen(device.own_lines, *labels)
    of_package = _chosen(read_lines(device.fits_of or device.name), *labels) if shipped else None
    own = of_file
    if of_file is None or (_is_of(of_package, op, scheme) and not _is_of(of_file, op, scheme)):
        own = of_package
    if own is not None:
        return _in_scheme(_of_library(_told(own, device), variant), device, scheme)
    if device.kind != "tpu" or not shipped:
        return None
    found = _chosen(read_lines(_MEASURED), *labels)
    if found is None:
        return None
    moved = _transferred(Basis(fit=found), load_device(_MEASURED), device)
    return _in_scheme(_of_library(moved, variant), device, scheme)


def _is_of(fit: Fit | None, op: str, scheme: str) -> bool:
    """Whether there is a line of an operation in its format, and none that only stands in."""
    return fit is not None and fit.scheme == scheme and (fit.kind == "matmul" or fit.op == op)


def _told(fit: Fit, device: Device) -> Basis:
    """A device's own line, which may be one that was never tested on other shapes."""
    if fit.bands:
        return Basis(fit=fit)
    note = ("untested-line", f"the line of {device.name} is {fit.provenance}")
    return Basis(fit=fit, notes=(note,), honest=False)


def _of_library(basis: Basis, variant: str) -> Basis:
    """A line asked about another library's kernels: the device runs its own in their place."""
    if not variant or basis.fit.variant in (variant, ANY):
        return basis
    note = ("other-library", f"a line of {basis.fit.variant} speaks for kernels of other libraries")
    return replace(basis, notes=(*basis.notes, note), honest=False)


def _chosen(fits: tuple[Fit, ...], kind: str, op: str, scheme: str, variant: str) -> Fit | None:
    """The most particular line: of its operation before any, its format, its variant before all."""
    form = PRODUCTS if kind in ("matmul", "convolution") else ELEMENTS
    wanted = "matmul" if kind == "convolution" else kind
    names = ("",) if wanted == "matmul" else (op, ANY)
    for name in names:
        mine = [fit for fit in fits if (fit.kind, fit.op, fit.form) == (wanted, name, form)]
        spoken = [fit for fit in mine if fit.variant in (variant, ANY) or fit.default]
        if spoken:
            return min(
                spoken,
                key=lambda fit: (fit.scheme != scheme, fit.variant != variant, not fit.default, fit.key),
            )
    return None


def _transferred(basis: Basis, measured: Device, device: Device) -> Basis:
    """A line of one TPU for another."""
    there, here = measured.systolic, device.systolic
    cycle_scale = 1.0
    if there is not None and here is not None:
        cycle_scale = there.arrays * clock_hz(measured) / (here.arrays * clock_hz(device))
    scale = measured.main_memory.bandwidth_bytes_per_s / device.main_memory.bandwidth_bytes_per_s
    text = f"derived from {measured.name} by clock, arrays and memory bandwidth: nothing was measured"
    note = ("derived-line", text)
    return replace(
        basis, cycle_scale=cycle_scale, byte_scale=scale, element_scale=scale, notes=(note,), honest=False
    )


def _in_scheme(basis: Basis, device: Device, scheme: str) -> Basis:
    """A line of one number format for another: cycles by rate, elements by width."""
    fitted = basis.fit.scheme
    if scheme == fitted:
        return basis
    one, other = find_scheme(fitted), find_scheme(scheme)
    if one is None or other is None:
        return replace(basis, cycle_scale=nan, element_scale=nan)
    width = other.activation_bits / one.activation_bits
    rate = 1.0
    if basis.fit.form == PRODUCTS:
        rate = rate_flops_per_s(device, fitted, matrix=True) / rate_flops_per_s(device, scheme, matrix=True)
    alike = width == 1.0 and rate == 1.0 and {one.name, other.name} == {"f16", "bf16"}
    return replace(
        basis,
        cycle_scale=basis.cycle_scale * rate,
        element_scale=basis.element_scale * width,
        notes=(*basis.notes, ("other-format", f"a line fitted in {fitted} speaks for {scheme}")),
        honest=basis.honest and alike,
    )
