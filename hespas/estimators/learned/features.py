"""What trees see of an operation on a device: logarithms of sizes, of data-sheet times and of their ratios.

Every column is finite where the sizes, the peak and the bandwidth are known, and NaN throughout a row where
one is not: such an operation has no prediction. Sizes are in octaves (log2), so that a split is a ratio.
The columns of a kind are a contract with the stored models: a change of one is a new version of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.learned.sizes import (
    attention_sizes,
    cache_bytes,
    expert_sizes,
    generation_sizes,
    product_sizes,
    stream_sizes,
    tile_work_flops,
)
from hespas.estimators.operations import Operations, find_scheme, peak_times
from hespas.graph.columns import FloatArray
from hespas.hardware import Device

__all__ = ["ABSOLUTE_COLUMNS", "FAMILIES", "RISING_COLUMNS", "Features", "features_of"]

FAMILIES: Mapping[str, str] = {
    "matmul": "product",
    "convolution": "product",
    "attention.context": "attention",
    "attention.encoder": "attention",
    "attention.generation": "generation",
    "moe": "experts",
    "vector": "stream",
    "normalization": "stream",
    "pooling": "stream",
    "quantize": "stream",
    "gather": "stream",
}
"""Kind -> the family of columns that describes it. Kinds that are absent have no model."""

_SIZES: Mapping[str, Callable[[Operations, Device], dict[str, FloatArray]]] = {
    "product": product_sizes,
    "attention": attention_sizes,
    "generation": generation_sizes,
    "experts": expert_sizes,
    "stream": stream_sizes,
}

_DEVICE = frozenset({"peak", "peak_per_unit", "ridge", "bandwidth", "units", "cache"})
_TIMES = frozenset({"arithmetic", "memory"})
_PRODUCT_SIZES = frozenset(
    {"m", "n", "k", "smallest", "m_over_n", "inputs", "weights", "outputs", "n_over_k", "images"}
)
ABSOLUTE_COLUMNS: Mapping[str, frozenset[str]] = {
    "product": _DEVICE | _TIMES | _PRODUCT_SIZES,
    "attention": _DEVICE | _TIMES,
    "generation": _DEVICE | _TIMES,
    "experts": _DEVICE | _TIMES,
    "stream": _DEVICE | _TIMES,
}
"""Columns by which trees tell one device from another. A model for devices it has never seen does without."""

RISING_COLUMNS: Mapping[str, frozenset[str]] = {"stream": frozenset({"loss", "row_loss"})}
"""Columns with which time can only rise, all others equal: waste of the last wave, where kernels are simple
enough that one exists. Kernels of products change with the shape, so a wave of theirs need not be there.
"""

_REACHED = 0.75
"""Share of the peaks that a good kernel reaches: scales the base of products, which trees then correct."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """``columns`` of shape ``(ops, len(names))``; times are relative to ``base_ns`` of shape ``(ops,)``."""

    names: tuple[str, ...]
    columns: NDArray[np.float32]
    base_ns: FloatArray


def features_of(family: str, ops: Operations, device: Device, *, overhead_ns: float) -> Features:
    """The columns of operations of one family. ``overhead_ns`` is part of the base. O(ops)."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # of such sizes nothing is said
        peaks = peak_times(ops, device)
        arithmetic = np.maximum(peaks.arithmetic_ns, 1e-3)
        memory = np.maximum(peaks.memory_ns, 1e-3)
        base = overhead_ns + np.hypot(arithmetic, memory)
        columns = {"arithmetic": np.log2(arithmetic), "memory": np.log2(memory)}
        columns["balance"] = columns["arithmetic"] - columns["memory"]
        if family == "product":
            rate = ops.flops / arithmetic
            tiled = tile_work_flops(ops, device) / rate
            kept = np.minimum(1.0, cache_bytes(device) / ops.bytes_moved)
            moved = memory * (1 - 0.5 * kept)
            base = overhead_ns + np.hypot(tiled, moved) / _REACHED
            columns["tiled_balance"] = np.log2(tiled / moved)
        columns["base"] = np.log2(base)
        columns |= _SIZES[family](ops, device)
        columns |= _device_columns(ops, device, arithmetic)
        table = np.stack([column.astype(np.float32) for column in columns.values()], axis=1)
    known = np.isfinite(table).all(axis=1) & np.isfinite(base)
    table[~known] = np.nan
    return Features(tuple(columns), table, np.where(known, base, np.nan))


def _device_columns(ops: Operations, device: Device, arithmetic_ns: FloatArray) -> dict[str, FloatArray]:
    """What the device is, whatever it is called. ``cache`` is 0 where its size is unknown."""
    bandwidth = device.main_memory.bandwidth_bytes_per_s
    rate = np.maximum(ops.flops, 1.0) / arithmetic_ns * 1e9
    count = len(ops)
    found = [find_scheme(name) for name in ops.scheme.names]
    weight_bits = np.array([np.nan if each is None else each.weight_bits for each in found])[ops.scheme.row]
    return {
        "peak": np.log2(rate),
        "peak_per_unit": np.log2(rate / device.units),
        "ridge": np.log2(rate / bandwidth),
        "bandwidth": np.full(count, np.log2(bandwidth)),
        "units": np.full(count, np.log2(device.units)),
        "cache": np.full(count, np.log2(cache_bytes(device))),
        "bytes_over_cache": np.log2(np.maximum(ops.bytes_moved, 1.0) / cache_bytes(device)),
        "weight_bits": weight_bits,
    }
