"""Lines: linear functions, fitted to measurements of a TPU, from cycles or elements to time. They are stored
as files of fits.

Products: start, cycles, and bytes of operands and result in the layout of a TPU (tiles of 8 x 128). There may
be two such lines, of short and long products; the faster one applies, as a compiler selects the faster
schedule. Vector operations: start and elements in that layout. All parameters are non-negative, so that no
larger operation is faster.

A device's own lines are used unchanged. Other TPUs use the lines of TPU-v4: cycles scaled by clock and number
of arrays, bytes and elements by memory bandwidth, the same start. Each such step is reported.
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
    "Assumption",
    "LineBasis",
    "clock_hz",
    "element_columns",
    "line_array",
    "line_basis",
    "line_ns",
    "own_cycles",
    "product_columns",
    "read_lines",
]

Assumption = tuple[str, str]
"""Code and text of an assumption."""

LINES_FOLDER = Path(__file__).parent / "data"
"""Folder with one file of lines per device that has any, by its name; made by ``python -m
tools.fits``.
"""

PRODUCTS = "cycles"
ELEMENTS = "elements"
"""Names of the two forms in files of fits."""

LONG = "long_"
"""Prefix of the names of the second line's parameters."""

_HALF_TILE = 64.0


@cache
def read_lines(device: str) -> tuple[Fit, ...]:
    """Return the lines (see the module) that are part of the package for a device of that name; empty for
    most devices. The name is looked up in a list and not used as a path, because it may come from a user's
    file.
    """
    shipped = {path.stem: path for path in LINES_FOLDER.glob("*.toml")}
    return read_fits(shipped[device]) if device in shipped else ()


def own_cycles(ops: Operations, array: Array, *, arrays: int = 1) -> FloatArray:
    """Return the cycles of matmuls, the input of the lines. If the compiler can choose the stationary
    operand, it is the smaller count of both mappings. Output-stationary arrays have only one mapping.
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
    """Return the array on which the cycles of a line are counted. Published lines may use another array than
    the device's own.
    """
    rows, columns = fit.value("array_rows"), fit.value("array_columns")
    return own if np.isnan(rows) or np.isnan(columns) else Array(int(rows), int(columns), own.dataflow)


@np.errstate(over="ignore", invalid="ignore")  # sizes beyond the range of a float have no time
def product_columns(ops: Operations, cycles: FloatArray, scheme: str) -> dict[str, FloatArray]:
    """Return the inputs of the line of matrix products, each under the name of the parameter by which it is
    multiplied.
    """
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    labels = Labels.constant(scheme, len(ops))
    lhs_bytes, rhs_bytes, result_bytes = (
        element_bytes(labels, part) for part in ("activation", "weight", "output")
    )
    lhs = batch * elements_in_tiles(m, k) * lhs_bytes
    # A convolution reads its input once, not every window of it, unlike the equivalent product.
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


@np.errstate(over="ignore", invalid="ignore")  # sizes beyond the range of a float have no time
def element_columns(ops: Operations) -> dict[str, FloatArray]:
    """Return the inputs of the lines of vector operations, each under the name of the parameter by which it
    is multiplied.
    """
    rows, columns = ops.dim("rows"), ops.dim("columns")
    padding = padding_of(ops)
    elements = rows * columns * padding
    return {
        "t0_ns": np.where(np.isnan(elements), np.nan, 1.0),
        "element_ns": elements,
        "row_ns": rows,
        "ns_per_byte": ops.bytes_moved * padding,
    }


@np.errstate(over="ignore", invalid="ignore")  # sizes beyond the range of a float have no time
def line_ns(fit: Fit, columns: Mapping[str, FloatArray]) -> FloatArray:
    """Return the time of operations [ns] from the line of a fit. ``columns`` are the inputs of the line, such
    as cycles. If the fit has two lines, the faster one applies.
    """
    values = {parameter.name: parameter.value for parameter in fit.parameters}
    short = _sum(values, columns, "")
    has_long = any(name.startswith(LONG) for name in values)
    return np.minimum(short, _sum(values, columns, LONG)) if has_long else short


def _sum(values: Mapping[str, float], columns: Mapping[str, FloatArray], prefix: str) -> FloatArray:
    total = np.zeros_like(columns["t0_ns"])
    for name, column in columns.items():
        if value := values.get(prefix + name, 0.0):  # columns without a weight may be unknown
            total += value * column
    return total


_MEASURED = "TPU-v4"
"""The TPU with tables of measurements, from whose lines the others are derived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBasis:
    """Line that is used for a class of operations. The three scales are factors on the cycles, bytes and
    elements of an operation, for a line that was fitted to another device or number format.

    ``notes`` are the assumptions to report. ``has_interval`` is True if the interval of the line is still
    valid. ``references`` are the measured devices, if they are others than the estimated one.
    """

    fit: Fit
    cycle_scale: float = 1.0
    byte_scale: float = 1.0
    element_scale: float = 1.0
    notes: tuple[Assumption, ...] = ()
    has_interval: bool = True
    references: tuple[str, ...] = ()


def clock_hz(device: Device) -> float:
    """Return the clock rate of a device's systolic arrays [Hz]: the stated one, or else the clock rate at
    which the arrays reach the published bf16 rate. NaN without an array.
    """
    shape = device.systolic
    if shape is None:
        return nan
    if not isnan(shape.clock_hz):
        return shape.clock_hz
    rate = rate_flops_per_s(device, "bf16", matrix=True)
    return rate / (2 * shape.rows * shape.columns * shape.arrays)


def line_basis(
    device: Device, kind: str, op: str, scheme: str, variant: str, *, shipped: bool = True
) -> LineBasis | None:
    """Return the line for a class of operations; None if no line covers it. Lines of the device's file come
    first, then (if ``shipped``) lines of the package.
    """
    labels = (kind, op, scheme, variant)
    of_file = _chosen(device.own_lines, *labels)
    of_package = _chosen(read_lines(device.fits_of or device.name), *labels) if shipped else None
    own = of_file
    if of_file is None or (_is_of(of_package, op, scheme) and not _is_of(of_file, op, scheme)):
        own = of_package
    if own is not None:
        basis = LineBasis(fit=own)
        if not own.bands:
            note = ("untested-line", f"the line of {device.name} is {own.provenance}")
            basis = LineBasis(fit=own, notes=(note,), has_interval=False)
        return _in_scheme(_of_library(basis, variant), device, scheme)
    if device.kind != "tpu" or not shipped:
        return None
    fit = _chosen(read_lines(_MEASURED), *labels)
    if fit is None:
        return None
    measured = load_device(_MEASURED)
    there, here = measured.systolic, device.systolic
    cycle_scale = 1.0
    if there is not None and here is not None:
        cycle_scale = there.arrays * clock_hz(measured) / (here.arrays * clock_hz(device))
    scale = measured.main_memory.bandwidth_bytes_per_s / device.main_memory.bandwidth_bytes_per_s
    text = f"derived from {_MEASURED} by clock, arrays and memory bandwidth: no measurements of the device"
    basis = LineBasis(
        fit=fit,
        cycle_scale=cycle_scale,
        byte_scale=scale,
        element_scale=scale,
        notes=(("derived-line", text),),
        has_interval=False,
        references=(_MEASURED,),
    )
    return _in_scheme(_of_library(basis, variant), device, scheme)


def _is_of(fit: Fit | None, op: str, scheme: str) -> bool:
    """Return True if a line was fitted to this operation in this number format."""
    return fit is not None and fit.scheme == scheme and (fit.kind == "matmul" or fit.op == op)


def _of_library(basis: LineBasis, variant: str) -> LineBasis:
    """Return the line for operations that name the library ``variant``. If the line was fitted to kernels of
    another library, this assumption is added, and the interval is no longer valid.
    """
    if not variant or basis.fit.variant in (variant, ANY):
        return basis
    note = ("other-library", f"a line of {basis.fit.variant} is used for kernels of other libraries")
    return replace(basis, notes=(*basis.notes, note), has_interval=False)


def _chosen(fits: tuple[Fit, ...], kind: str, op: str, scheme: str, variant: str) -> Fit | None:
    """Return the most specific line for an operation. Lines of the operation are preferred to lines of any
    operation, then lines of its number format, then lines of its variant.
    """
    form = PRODUCTS if kind in ("matmul", "convolution") else ELEMENTS
    line_kind = "matmul" if kind == "convolution" else kind
    names = ("",) if line_kind == "matmul" else (op, ANY)
    for name in names:
        candidates = [fit for fit in fits if (fit.kind, fit.op, fit.form) == (line_kind, name, form)]
        applicable = [fit for fit in candidates if fit.variant in (variant, ANY) or fit.default]
        if applicable:
            return min(
                applicable,
                key=lambda fit: (fit.scheme != scheme, fit.variant != variant, not fit.default, fit.key),
            )
    return None


def _in_scheme(basis: LineBasis, device: Device, scheme: str) -> LineBasis:
    """Return a line that was fitted to one number format, scaled to the format ``scheme``: cycles by the
    ratio of the rates, elements by the ratio of the element sizes.
    """
    fitted = basis.fit.scheme
    if scheme == fitted:
        return basis
    from_scheme, to_scheme = find_scheme(fitted), find_scheme(scheme)
    if from_scheme is None or to_scheme is None:
        return replace(basis, cycle_scale=nan, element_scale=nan)
    width = to_scheme.activation_bits / from_scheme.activation_bits
    rate = 1.0
    if basis.fit.form == PRODUCTS:
        rate = rate_flops_per_s(device, fitted, matrix=True) / rate_flops_per_s(device, scheme, matrix=True)
    is_equal = width == 1.0 and rate == 1.0 and {from_scheme.name, to_scheme.name} == {"f16", "bf16"}
    return replace(
        basis,
        cycle_scale=basis.cycle_scale * rate,
        element_scale=basis.element_scale * width,
        notes=(*basis.notes, ("other-format", f"a line fitted in {fitted} is used for {scheme}")),
        has_interval=basis.has_interval and is_equal,
    )
