"""From cycles and elements to time: straight lines fitted on measurements of a TPU, as files of fits.

Products: start, cycles, and bytes of operands and result in the layout of a TPU (tiles of 8 x 128). Two such
lines may be given, of short and long products; the faster holds, as a compiler chooses the faster schedule.
Vector operations: start and elements in that layout. All parameters are non-negative, so nothing that grows
gets faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hespas.estimators.systolic.array import Array
from hespas.estimators.systolic.several import shared_cycles
from hespas.graph.columns import FloatArray
from hespas.hardware import Fit
from hespas.hardware.fits_file import read_fits
from hespas.operations import Operations, find_scheme

__all__ = [
    "ELEMENTS",
    "LINES_FOLDER",
    "LONG",
    "PRODUCTS",
    "element_columns",
    "line_array",
    "line_ns",
    "own_cycles",
    "product_columns",
    "read_lines",
]

LINES_FOLDER = Path(__file__).parent / "data"
"""One file of lines per device that has any, by its name; made by ``python -m docs.systolic``."""

PRODUCTS = "cycles"
ELEMENTS = "elements"
"""Names of the two forms in files of fits."""

LONG = "long_"
"""What the names of the second line's parameters begin with."""

_SUBLANES, _LANES = 8.0, 128.0
"""Registers and memory of a TPU hold tiles of this shape (docs.jax.dev, Pallas TPU)."""

_HALF_TILE = 64.0


@cache
def read_lines(device: str) -> tuple[Fit, ...]:
    """The lines that ship for a device of that name; none for most. A name from a user's file is no path."""
    shipped = {path.stem: path for path in LINES_FOLDER.glob("*.toml")}
    return read_fits(shipped[device]) if device in shipped else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _ElementBytes:
    """Bytes per element of the operands and the result."""

    lhs: float
    rhs: float
    result: float


def _element_bytes(scheme: str) -> _ElementBytes:
    found = find_scheme(scheme)
    if found is None:
        return _ElementBytes(lhs=np.nan, rhs=np.nan, result=np.nan)
    bits = (found.activation_bits, found.weight_bits, found.output_bits)
    return _ElementBytes(lhs=bits[0] / 8, rhs=bits[1] / 8, result=bits[2] / 8)


def _tiled(size: FloatArray, tile: float) -> FloatArray:
    return np.ceil(size / tile) * tile


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
    size = _element_bytes(scheme)
    depth = _tiled(k, _LANES)
    rows, columns = _tiled(m, _SUBLANES), _tiled(n, _SUBLANES)
    lhs = batch * rows * depth * size.lhs
    # A convolution reads its input once, not every window of it: what its product reads beyond is not moved.
    others = batch * (n * k * size.rhs + m * n * size.result)
    is_convolution = np.array([name == "convolution" for name in ops.kind.names])[ops.kind.row]
    lhs = np.where(is_convolution, np.fmin(np.maximum(ops.bytes_moved - others, 0.0), lhs), lhs)
    return {
        "t0_ns": np.where(np.isnan(batch * m * n * k), np.nan, 1.0),
        "cycle_ns": cycles,
        "lhs_ns_per_byte": lhs,
        "rhs_ns_per_byte": batch * depth * columns * size.rhs,
        "result_ns_per_byte": batch * rows * columns * size.result,
        "odd_k_ns": ((k > _LANES) & (k % _HALF_TILE != 0)).astype(np.float64),
    }


@np.errstate(over="ignore", invalid="ignore")  # of sizes past what a float holds no time is known
def element_columns(ops: Operations) -> dict[str, FloatArray]:
    """What the lines of other operations are linear in, by parameter."""
    rows, columns = ops.dim("rows"), ops.dim("columns")
    elements = rows * _tiled(columns, _LANES)
    return {
        "t0_ns": np.where(np.isnan(elements), np.nan, 1.0),
        "element_ns": elements,
        "row_ns": rows,
        "ns_per_byte": ops.bytes_moved * (elements / np.maximum(rows * columns, 1.0)),
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
