"""From cycles and elements to time: straight lines fitted on measurements of a TPU, as files of fits.

Products: start, cycles, and bytes of operands and result in the layout of a TPU (tiles of 8 x 128). Two such
lines may be given, of short and long products; the faster holds, as a compiler chooses the faster schedule.
Vector operations: start and elements in that layout. All parameters are non-negative, so nothing that grows
gets faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import isnan, nan
from pathlib import Path

import numpy as np

from hespas.estimators.rates import rate_flops_per_s
from hespas.estimators.systolic.cycles import Array, shared_cycles
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Device, Fit, load_device
from hespas.hardware.device_fits import read_fits
from hespas.operations import Labels, Operations, element_bytes, find_scheme
from hespas.operations.tiles import LANES, elements_in_tiles, padding_of

__all__ = [
    "ELEMENTS",
    "LINES_FOLDER",
    "LONG",
    "PRODUCTS",
    "Basis",
    "Note",
    "basis_of",
    "clock_hz",
    "element_columns",
    "line_array",
    "line_ns",
    "own_cycles",
    "product_columns",
    "read_lines",
]

Note = tuple[str, str]
"""Code and text of something assumed."""

LINES_FOLDER = Path(__file__).parent / "data"
"""One file of lines per device that has any, by its name; made by ``python -m tools.systolic``."""

PRODUCTS = "cycles"
ELEMENTS = "elements"
"""Names of the two forms in files of fits."""

LONG = "long_"
"""What the names of the second line's parameters begin with."""

_HALF_TILE = 64.0


@cache
def read_lines(device: str) -> tuple[Fit, ...]:
    """The lines that ship for a device of that name; none for most. A name from a user's file is no path."""
    shipped = {path.stem: path for path in LINES_FOLDER.glob("*.toml")}
    return read_fits(shipped[device]) if device in shipped else ()


def own_cycles(ops: Operations, array: Array, *, arrays: int = 1) -> FloatArray:
    """Cycles of products where the compiler chooses which operand stays: the fewer of the two ways, as the
    published lines count. Other dataflows leave nothing to choose.
    """
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    if array.dataflow == "os":
        return shared_cycles(m, n, k, array, arrays=arrays, batch=batch)
    stays = Array(array.rows, array.columns, "ws")
    return np.minimum(
        shared_cycles(m, n, k, stays, arrays=arrays, batch=batch),
        shared_cycles(n, m, k, stays, arrays=arrays, batch=batch),
    )


def line_array(fit: Fit, own: Array) -> Array:
    """The array whose cycles a line is in: published lines may count on another than the device's own."""
    rows, columns = fit.value("array_rows"), fit.value("array_columns")
    return own if np.isnan(rows) or np.isnan(columns) else Array(int(rows), int(columns), own.dataflow)


@np.errstate(over="ignore", invalid="ignore")  # of sizes past what a float holds no time is known
def product_columns(ops: Operations, cycles: FloatArray, scheme: str) -> dict[str, FloatArray]:
    """What the line of products is linear in, by parameter."""
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    labels = Labels.constant(scheme, len(ops))
    lhs_bytes, rhs_bytes, result_bytes = (
        element_bytes(labels, part) for part in ("activation", "weight", "output")
    )
    lhs = batch * elements_in_tiles(m, k) * lhs_bytes
    # A convolution reads its input once, not every window of it: what its product reads beyond is not moved.
    others = batch * (n * k * rhs_bytes + m * n * result_bytes)
    is_convolution = np.array([name == "convolution" for name in ops.kind.names])[ops.kind.row]
    lhs = np.where(is_convolution, np.fmin(np.maximum(ops.bytes_moved - others, 0.0), lhs), lhs)
    return {
        "t0_ns": np.where(np.isnan(batch * m * n * k), np.nan, 1.0),
        "cycle_ns": cycles,
        "lhs_ns_per_byte": lhs,
        "rhs_ns_per_byte": batch * elements_in_tiles(k, n) * rhs_bytes,
        "result_ns_per_byte": batch * elements_in_tiles(m, n) * result_bytes,
        "odd_k_ns": ((k > LANES) & (k % _HALF_TILE != 0)).astype(np.float64),
    }


@np.errstate(over="ignore", invalid="ignore")  # of sizes past what a float holds no time is known
def element_columns(ops: Operations) -> dict[str, FloatArray]:
    """What the lines of other operations are linear in, by parameter."""
    rows, columns = ops.dim("rows"), ops.dim("columns")
    padding = padding_of(ops)
    elements = rows * columns * padding
    return {
        "t0_ns": np.where(np.isnan(elements), np.nan, 1.0),
        "element_ns": elements,
        "row_ns": rows,
        "ns_per_byte": ops.bytes_moved * padding,
    }


@np.errstate(over="ignore", invalid="ignore")  # of sizes past what a float holds no time is known
def line_ns(fit: Fit, columns: Mapping[str, FloatArray]) -> FloatArray:
    """The time that a fit gives to columns of its form [ns]: of two lines the faster."""
    values = {each.name: each.value for each in fit.parameters}
    short = _sum(values, columns, "")
    has_long = any(name.startswith(LONG) for name in values)
    return np.minimum(short, _sum(values, columns, LONG)) if has_long else short


def _sum(values: Mapping[str, float], columns: Mapping[str, FloatArray], prefix: str) -> FloatArray:
    total = np.zeros_like(columns["t0_ns"])
    for name, column in columns.items():
        if value := values.get(prefix + name, 0.0):  # what the line does not weigh need not be known
            total += value * column
    return total


# Which line covers a device and a class of operations, and how far it is stretched to do so.
#
# A device's own lines are taken as they are. Another TPU takes those of TPU-v4: cycles by clock and number of
# arrays, bytes and elements by memory bandwidth, the start as it is. Each such step is told.

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
    of these unless ``shipped``). None where nothing covers it.
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
    note = ("other-library", f"a line of {basis.fit.variant} stands in for kernels of other libraries")
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
        notes=(*basis.notes, ("other-format", f"a line fitted in {fitted} stands in for {scheme}")),
        honest=basis.honest and alike,
    )
