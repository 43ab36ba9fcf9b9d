"""Columns of sizes, one function per family of operations; see :mod:`hespas.estimators.learned.features`."""

from __future__ import annotations

import numpy as np

from hespas.estimators.operations import Operations, find_scheme
from hespas.graph.columns import FloatArray
from hespas.hardware import Device

__all__ = [
    "attention_sizes",
    "cache_bytes",
    "expert_sizes",
    "generation_sizes",
    "product_sizes",
    "stream_sizes",
    "tile_work_flops",
]

_TILES = ((128, 128), (64, 64), (128, 256), (256, 128), (16, 128))
"""Output tiles of the libraries' kernels, rows x columns."""

_KERNELS = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.9),
    (64, 128, 0.8),
    (64, 64, 0.6),
    (64, 32, 0.4),
    (16, 64, 0.25),
)
"""Tiles with the share of the peak that a kernel of that tile can reach: small ones reuse less."""
_SPLITS = (1, 2, 4, 8)
_SPLIT_SHARE = 0.85
_STEP = 32

_MOST_ALIGNED = 8


def _log2(values: FloatArray) -> FloatArray:
    return np.log2(np.maximum(values, 1e-9))


def _alignment(values: FloatArray) -> FloatArray:
    """How many times two divides a size, at most 8: kernels read 16 bytes at once and step by 64 or 128."""
    whole = np.nan_to_num(values).astype(np.int64)
    lowest = whole & -whole
    exponent = np.log2(np.maximum(lowest, 1).astype(np.float64))
    return np.where(np.isnan(values), np.nan, np.minimum(exponent, _MOST_ALIGNED))


def _rounding(exact: FloatArray) -> FloatArray:
    """Octaves lost by rounding ``exact`` up to a whole number."""
    return np.log2(np.ceil(np.maximum(exact, 1e-9)) / np.maximum(exact, 1e-9))


def cache_bytes(device: Device) -> float:
    """The largest cache; 1 MiB where the device states none."""
    stated = (each.capacity_bytes for each in device.memories if each.level == "cache")
    return float(max(1 << 20, max(stated, default=0)))


def tile_work_flops(ops: Operations, device: Device) -> FloatArray:
    """What the best of some kernels computes, padding to whole tiles and waves included [FLOPs at peak]."""
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    best = np.full(len(ops), np.inf)
    for rows, columns, share in _KERNELS:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
        for split in _SPLITS:
            depth = np.ceil(k / split / _STEP) * _STEP
            waves = np.ceil(tiles * split / device.units)
            reached = share * (1.0 if split == 1 else _SPLIT_SHARE)
            best = np.fmin(best, waves * device.units * 2 * rows * columns * depth / reached)
    return best


def _stored_bytes(ops: Operations, part: str) -> FloatArray:
    found = [find_scheme(name) for name in ops.scheme.names]
    bits = [np.nan if each is None else float(getattr(each, f"{part}_bits")) for each in found]
    return np.array(bits)[ops.scheme.row] / 8


def product_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Products: sizes, their alignment, and for each tile the waves and what rounding to whole ones loses."""
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    cache = cache_bytes(device)
    columns = {
        "m": _log2(m),
        "n": _log2(n),
        "k": _log2(k),
        "batch": _log2(batch),
        "smallest": _log2(np.minimum(np.minimum(m, n), k)),
        "m_over_n": _log2(m / n),
        "inputs": _log2(m * k),
        "weights": _log2(n * k),
        "rounding_m": _rounding(m / 8),
        "rounding_n": _rounding(n / 128),
        "rounding_k": _rounding(k / 128),
        "outputs": _log2(batch * m * n),
        "n_over_k": _log2(n / k),
        "align_m": _alignment(m),
        "align_n": _alignment(n),
        "align_k": _alignment(k),
        "weights_over_cache": _log2(batch * n * k * _stored_bytes(ops, "weight") / cache),
        "inputs_over_cache": _log2(batch * m * k * _stored_bytes(ops, "activation") / cache),
        "outputs_over_cache": _log2(batch * m * n * _stored_bytes(ops, "output") / cache),
    }
    for rows, cols in _TILES:
        tiles = batch * np.ceil(m / rows) * np.ceil(n / cols)
        waves = tiles / device.units
        name = f"{rows}x{cols}"
        columns[f"waves_{name}"] = _log2(waves)
        columns[f"loss_{name}"] = _rounding(waves)

    columns["images"] = _log2(m / np.nan_to_num(ops.dim("spatial"), nan=1.0) ** 2)
    columns["kernel"] = np.nan_to_num(ops.dim("kernel"), nan=1.0)
    columns["spatial"] = _log2(np.nan_to_num(ops.dim("spatial"), nan=1.0))
    return columns


def attention_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Attention of many queries: heads and blocks of queries over the units, pairs computed."""
    batch, length, heads, size = (ops.dim(name) for name in ("batch", "q_len", "heads", "head_dim"))
    kv_heads = np.where(np.isnan(ops.dim("kv_heads")), heads, ops.dim("kv_heads"))
    pairs = np.where(np.isnan(ops.dim("pairs")), length * length, ops.dim("pairs"))
    kv_len = np.where(np.isnan(ops.dim("kv_len")), length, ops.dim("kv_len"))
    cache = cache_bytes(device)
    columns = {
        "batch": _log2(batch),
        "length": _log2(length),
        "heads": _log2(heads),
        "kv_heads": _log2(kv_heads),
        "head_dim": size,
        "group": _log2(heads / kv_heads),
        "pairs": _log2(pairs),
        "window": _log2(pairs / length),
        "share": _log2(pairs / (length * kv_len)),
        "sequences": _log2(batch * heads),
        "queries": _log2(batch * heads * length),
        "tokens": _log2(batch * length),
        "kv_over_cache": _log2(batch * kv_len * kv_heads * size * 2 / cache),
        "align_length": _alignment(length),
        "align_heads": _alignment(heads),
    }
    for block in (64, 128, 256):
        waves = batch * heads * np.ceil(length / block) / device.units
        columns[f"waves_{block}"] = _log2(waves)
        columns[f"loss_{block}"] = _rounding(waves)
        columns[f"blocks_{block}"] = _log2(np.ceil(waves) * np.ceil(pairs / length / block))
    return columns


def generation_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Attention of one new token: what is read, by how many heads, split over how many units."""
    batch, kv_len, heads, size = (ops.dim(name) for name in ("batch", "kv_len", "heads", "head_dim"))
    kv_heads = np.where(np.isnan(ops.dim("kv_heads")), heads, ops.dim("kv_heads"))
    group = heads / kv_heads
    cache = cache_bytes(device)
    waves = batch * kv_heads / device.units
    columns = {
        "batch": _log2(batch),
        "kv_len": _log2(kv_len),
        "heads": _log2(heads),
        "kv_heads": _log2(kv_heads),
        "head_dim": size,
        "group": _log2(group),
        "sequences": _log2(batch * kv_heads),
        "queries": _log2(batch * heads),
        "cached": _log2(batch * kv_heads * kv_len),
        "per_unit": _log2(batch * kv_heads * kv_len / device.units),
        "kv_over_cache": _log2(batch * kv_len * kv_heads * size * 2 / cache),
        "align_heads": _alignment(heads),
        "align_batch": _alignment(batch),
        "group_rounding": _rounding(group / 8),
        "waves": _log2(waves),
        "loss": _rounding(waves),
        "waves_heads": _log2(batch * heads / device.units),
        "loss_heads": _rounding(batch * heads / device.units),
    }
    for block in (64, 256):
        blocks = np.ceil(kv_len / block)
        columns[f"waves_{block}"] = _log2(waves * blocks)
        columns[f"loss_{block}"] = _rounding(waves * blocks)
    return columns


def expert_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Feed-forward layers of experts: tokens per expert, experts that see some, tiles over the units."""
    tokens, hidden, inter, topk = (ops.dim(name) for name in ("tokens", "hidden", "inter", "topk"))
    experts, tensor, parallel = (ops.dim(name) for name in ("experts", "tensor_parallel", "expert_parallel"))
    local, width = experts / parallel, inter / tensor
    each = tokens * topk / experts
    hit = local * -np.expm1(tokens * topk * np.log1p(-1 / np.maximum(experts, 2)))
    columns = {
        "tokens": _log2(tokens),
        "hidden": _log2(hidden),
        "width": _log2(width),
        "inter": _log2(inter),
        "topk": _log2(topk),
        "experts": _log2(experts),
        "local_experts": _log2(local),
        "tensor_parallel": _log2(tensor),
        "expert_parallel": _log2(parallel),
        "matrices": ops.dim("matrices"),
        "tokens_per_expert": _log2(each),
        "pairs": _log2(tokens * topk / parallel),
        "hit": _log2(hit),
        "weights_over_cache": _log2(hit * hidden * width * 2 / cache_bytes(device)),
        "align_width": _alignment(width),
        "expansion": _log2(hidden / width),
    }
    for rows in (16, 64, 128):
        waves = hit * np.ceil(np.maximum(each * local / np.maximum(hit, 1e-9), 1e-3) / rows) * width / 128
        waves = waves / device.units
        columns[f"waves_{rows}"] = _log2(waves)
        columns[f"loss_{rows}"] = _rounding(waves)
    return columns


def stream_sizes(ops: Operations, device: Device) -> dict[str, FloatArray]:
    """Operations over rows and columns: elements per unit, alignment, share of the cache."""
    rows, columns = ops.dim("rows"), ops.dim("columns")
    elements = rows * columns
    waves = elements / 1024 / device.units
    return {
        "rows": _log2(rows),
        "columns": _log2(columns),
        "elements": _log2(elements),
        "passes": ops.bytes_moved / elements,
        "align_columns": _alignment(columns),
        "align_elements": _alignment(elements),
        "waves": _log2(waves),
        "loss": _rounding(waves),
        "row_waves": _log2(rows / device.units),
        "row_loss": _rounding(rows / device.units),
        "column_rounding": _rounding(columns / 128),
        "row_rounding": _rounding(rows / 8),
    }
