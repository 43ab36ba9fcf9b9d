"""The forms by name, and which one a kind of operation is fitted with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from types import MappingProxyType

import numpy as np

from hespas.estimators.calibrated.attention import DECODE, PREFILL
from hespas.estimators.calibrated.form import (
    Columns,
    Form,
    Machine,
    Parameter,
    Values,
    hit_share,
    soft_max,
)
from hespas.graph.columns import FloatArray
from hespas.operations import STRIDED, Operations

__all__ = ["CHIP_WIDE_KINDS", "FORMS", "FORMS_OF_KIND", "form_time_ns"]

# Mixtures of experts: two grouped products whose experts each see a few tokens.

_EXPERT_TILES = np.array([(16, 128), (32, 128), (64, 128), (64, 256), (128, 128), (128, 256)], np.float64)


def _expert_columns(ops: Operations, machine: Machine) -> Columns:
    tokens, hidden, topk, experts = (ops.dim(name) for name in ("tokens", "hidden", "topk", "experts"))
    width = ops.dim("inter") / ops.dim("tensor_parallel")
    local = experts / ops.dim("expert_parallel")
    gates = ops.dim("matrices") - 1
    pairs = tokens * topk / ops.dim("expert_parallel")
    unit_flops = machine.flops_per_ns / machine.units
    unit_bytes = machine.bytes_per_ns / machine.units
    tile_m, tile_n = _EXPERT_TILES[:, :1], _EXPERT_TILES[:, 1:]
    return {
        "pairs": pairs,
        "local": local,
        "chance": topk / experts,
        "tokens": tokens,
        "in_tiles": np.ceil(width * gates / tile_n),
        "out_tiles": np.ceil(hidden / tile_n),
        "in_steps": hidden,
        "out_steps": width,
        "unit_flops_ns": 2 * tile_m * tile_n / unit_flops,
        "unit_bytes_ns": (tile_m * machine.activation_bytes + tile_n * machine.weight_bytes) / unit_bytes,
        "units": np.array(machine.units),
        "expert_ns": ops.dim("matrices") * hidden * width * machine.weight_bytes / machine.bytes_per_ns,
        "token_ns": pairs * hidden * machine.output_bytes / machine.bytes_per_ns,
        "inner_ns": pairs * width * (gates + 1) * machine.output_bytes / machine.bytes_per_ns,
        "k": hidden + width,
    }


def _expert_time_ns(values: Values, columns: Columns) -> FloatArray:
    # Experts that see any token: independent draws, fewer where the draws are skewed.
    drawn = columns["tokens"] ** values["spread"]
    hit = columns["local"] * -np.expm1(drawn * np.log1p(-np.minimum(columns["chance"], 0.999999)))
    hit = np.maximum(hit, np.minimum(columns["pairs"], 1.0))
    rows = np.maximum(columns["pairs"] / hit, 1.0)
    per_expert = np.ceil(rows * values["imbalance"] / _EXPERT_TILES[:, :1])
    edges = 1 + values["tile_edge"] * (1 / _EXPERT_TILES[:, :1] + 1 / _EXPERT_TILES[:, 1:])
    arithmetic = columns["unit_flops_ns"] * edges / values["compute"]
    loads = columns["unit_bytes_ns"] / values["unit_load"]
    step = (arithmetic**3 + loads**3) ** (1 / 3)
    units = float(columns["units"])
    total = np.zeros((len(_EXPERT_TILES), len(rows)))
    for tiles, steps in (("in_tiles", "in_steps"), ("out_tiles", "out_steps")):
        filled = hit * per_expert * columns[tiles] / units
        paid = np.maximum(filled + values["wave_tail"] * (np.ceil(filled) - filled), 1.0)
        total += paid * columns[steps] * step
    tiled = total.min(axis=0)
    weights = hit * columns["expert_ns"] / values["memory"]
    kernels = soft_max(values["overlap"], tiled, weights)
    moved = values["token_passes"] * columns["token_ns"] + values["inner_passes"] * columns["inner_ns"]
    start = values["t0_ns"] + values["step_ns"] * columns["k"] + values["expert_start_ns"] * columns["local"]
    return start + kernels + moved


_EXPERTS = Form(
    name="experts",
    parameters=(
        Parameter(name="t0_ns", start=30000.0, low=50.0, high=1e7),
        Parameter(name="compute", start=0.6, low=0.02, high=6.0),
        Parameter(name="memory", start=0.7, low=0.02, high=4.0),
        Parameter(name="overlap", start=1.5, low=0.05, high=20.0),
        Parameter(name="unit_load", start=2.5, low=0.1, high=50.0),
        Parameter(name="tile_edge", start=10.0, low=0.01, high=1000.0),
        Parameter(name="wave_tail", start=0.5, low=0.01, high=1.0),
        Parameter(name="imbalance", start=1.0, low=0.5, high=20.0),
        Parameter(name="spread", start=0.95, low=0.3, high=1.0),
        Parameter(name="step_ns", start=0.1, low=1e-4, high=50.0),
        Parameter(name="expert_start_ns", start=10.0, low=1e-3, high=1e4),
        Parameter(name="token_passes", start=3.0, low=1e-2, high=100.0),
        Parameter(name="inner_passes", start=1.0, low=1e-3, high=100.0),
    ),
    dims=("tokens", "hidden", "inter", "topk", "experts", "tensor_parallel", "expert_parallel"),
    columns=_expert_columns,
    time_ns=_expert_time_ns,
)
"""Feed-forward layers of experts, routing and gathering included. ``imbalance``: tokens of the busiest
experts over the mean; ``spread``: the exponent by which skewed routing hits fewer experts.
"""


# Operations that stream their data: arithmetic, traffic and a cost per row overlap, after a fixed start.

_T0 = Parameter(name="t0_ns", start=3000.0, low=50.0, high=1e6)
_COMPUTE = Parameter(name="compute", start=0.5, low=1e-3, high=10.0)
_MEMORY = Parameter(name="memory", start=0.7, low=1e-2, high=6.0)
_OVERLAP = Parameter(name="overlap", start=2.0, low=0.05, high=20.0)
_STRIDED = Parameter(name="strided", start=1.8, low=1.0, high=20.0, since=True)
"""How much longer traffic takes whose operands are not walked in the order of the result."""


def _rates(ops: Operations, machine: Machine) -> Columns:
    flops = ops.flops + 8.0 * np.nan_to_num(ops.transcendentals)
    with np.errstate(invalid="ignore"):
        arithmetic = np.where(flops == 0, 0.0, flops / machine.flops_per_ns)
    return {
        "arithmetic_ns": arithmetic,
        "memory_ns": ops.bytes_moved / machine.bytes_per_ns,
        "strided": np.nan_to_num(ops.dim(STRIDED)),
        "bytes": ops.bytes_moved,
        "rows": ops.dim("rows"),
        "columns": ops.dim("columns"),
        "cache": np.array(machine.cache_bytes),
    }


def _traffic_ns(values: Values, columns: Columns) -> FloatArray:
    slower = 1 + (values["strided"] - 1) * columns["strided"]
    return columns["memory_ns"] * slower / values["memory"]


def _roofline_ns(values: Values, columns: Columns) -> FloatArray:
    arithmetic = columns["arithmetic_ns"] / values["compute"]
    return values["t0_ns"] + soft_max(values["overlap"], arithmetic, _traffic_ns(values, columns))


def _streams_ns(values: Values, columns: Columns) -> FloatArray:
    share = hit_share(columns["bytes"], float(columns["cache"]) * values["cache_reach"], values["cache_edge"])
    speed_up = 1 + share * values["cache_gain"]
    memory = _traffic_ns(values, columns) / speed_up
    arithmetic = columns["arithmetic_ns"] / values["compute"]
    rows = columns["rows"] * (values["row_ns"] + values["row_step_ns"] * columns["columns"])
    return values["t0_ns"] + soft_max(values["overlap"], arithmetic, memory, rows)


_ROOFLINE = Form(
    name="roofline",
    parameters=(_T0, _COMPUTE, _MEMORY, _OVERLAP, _STRIDED),
    dims=(),
    columns=_rates,
    time_ns=_roofline_ns,
)
"""Start, arithmetic and traffic, each at a share of its peak: what a whole chip is described by."""

_STREAMS = Form(
    name="streams",
    parameters=(
        _T0,
        _COMPUTE,
        _MEMORY,
        _OVERLAP,
        _STRIDED,
        Parameter(name="row_ns", start=0.01, low=1e-6, high=1e3),
        Parameter(name="row_step_ns", start=1e-5, low=1e-9, high=1.0),
        Parameter(name="cache_gain", start=0.3, low=1e-3, high=20.0),
        Parameter(name="cache_reach", start=0.5, low=0.02, high=3.0),
        Parameter(name="cache_edge", start=2.0, low=0.5, high=20.0),
    ),
    dims=("rows", "columns"),
    columns=_rates,
    time_ns=_streams_ns,
)
"""Vector, normalisation, pooling, gather and quantising operations. ``cache_gain``: how much faster traffic
is that stays within ``cache_reach`` of the cache.
"""


# Products of matrices (and convolutions as the products they are): waves of tiles, and traffic.
#
# A kernel cuts (m, n) into tiles and k into splits and gives each to one unit of the device, wave after
# wave. A step of k costs a unit its arithmetic or its loads, whichever is longer; the shape of tile and the
# number of splits are the fastest of a few. Beside it runs the traffic to the main memory, less what caches
# hold.

_TILES = (
    (256, 128), (128, 256), (256, 256), (128, 128), (64, 256), (128, 64), (64, 128),
    (64, 64), (128, 32), (64, 32), (32, 32), (128, 8), (16, 128), (16, 64), (8, 64),
)  # fmt: skip
_SPLITS = (1, 2, 4, 8, 16)
_WIDE_TILES = (
    (128, 128), (128, 256), (256, 128), (256, 256), (256, 512), (512, 256), (512, 512),
    (512, 1024), (1024, 512), (1024, 1024),
)  # fmt: skip
_WIDE_SPLITS = (1, 2, 4)
_WIDE = 64
"""Elements taken at once from which matrix units are systolic arrays, with buffers for wide tiles."""
_STEP = 32.0
"""Elements of k that a kernel works on at once."""


@cache
def _candidates(wide: bool) -> tuple[FloatArray, FloatArray]:
    """Tiles, shape (candidates, 2), and numbers of splits, shape (candidates, 1)."""
    tiles, splits = (_WIDE_TILES, _WIDE_SPLITS) if wide else (_TILES, _SPLITS)
    pairs = list(product(tiles, splits))
    return np.array([tile for tile, _ in pairs], np.float64), np.array(
        [[split] for _, split in pairs], np.float64
    )


_PARAMETERS = (
    Parameter(name="t0_ns", start=3000.0, low=50.0, high=1e6),
    Parameter(name="compute", start=0.7, low=0.02, high=6.0),
    Parameter(name="memory", start=0.75, low=0.02, high=4.0),
    Parameter(name="overlap", start=1.5, low=0.05, high=20.0),
    Parameter(name="step_ns", start=0.1, low=1e-4, high=50.0),
    Parameter(name="unit_load", start=2.5, low=0.1, high=50.0),
    Parameter(name="tile_edge", start=10.0, low=0.01, high=1000.0),
    Parameter(name="fill", start=30.0, low=0.1, high=5000.0),
    Parameter(name="split_ns", start=500.0, low=1.0, high=1e5),
    Parameter(name="wave_tail", start=0.7, low=0.02, high=1.0),
    Parameter(name="activations_cached", start=0.4, low=1e-3, high=1.0),
    Parameter(name="cache_reach", start=0.5, low=0.02, high=2.0),
    Parameter(name="cache_edge", start=4.0, low=0.5, high=40.0),
    Parameter(name="ragged_k", start=0.1, low=1e-3, high=10.0),
    Parameter(name="ragged_n", start=0.1, low=1e-3, high=10.0),
    Parameter(name="weight_copies", start=5.0, low=1.0, high=5.0, varies=False),
)
"""``compute``, ``memory``: shares of the peaks. ``unit_load``: a unit's share of the bandwidth, in shares of
bandwidth / units. ``tile_edge``: elements by which a tile's edge costs more than its area. ``fill``: steps of
k that starting a tile and storing it take. ``wave_tail``: how much of the last, partly filled wave is paid.
``ragged_k``, ``ragged_n``: what rows that do not fill whole vectors cost more, as shares.
``weight_copies``: a benchmark turns through so many copies of the weights at most, until they exceed the
cache.
"""

_PIPELINE = 3.0
"""Arithmetic and loads of one step overlap: the norm of this order."""


def _columns(ops: Operations, machine: Machine) -> Columns:
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    tile, split = _candidates(machine.vector_elements >= _WIDE)
    tile_m, tile_n = tile[:, :1], tile[:, 1:]
    filled = batch * np.ceil(m / tile_m) * np.ceil(n / tile_n) * split / machine.units
    weights = batch * n * k * machine.weight_bytes
    copies = np.ceil(machine.cache_bytes / np.maximum(weights, 1.0))
    edge = tile_m * machine.activation_bytes + tile_n * machine.weight_bytes
    area = 2 * tile_m * tile_n
    return {
        "filled": filled,
        "waves": np.ceil(filled),
        "steps": np.ceil(k / split / _STEP) * _STEP,
        "edges": 1 / tile_m + 1 / tile_n,
        "doublings": np.log2(split),
        "unit_flops_ns": area / (machine.flops_per_ns / machine.units),
        "unit_bytes_ns": edge / (machine.bytes_per_ns / machine.units),
        "ragged_k": np.sign(k % machine.vector_elements),
        "ragged_n": np.sign(n % machine.vector_elements),
        "k": k,
        "bytes": ops.bytes_moved,
        "weights": weights,
        "copies": copies,
        "cache": np.array(machine.cache_bytes),
        "bandwidth": np.array(machine.bytes_per_ns),
    }


def _time_ns(values: Values, columns: Columns) -> FloatArray:
    edges = 1 + values["tile_edge"] * columns["edges"]
    arithmetic = columns["unit_flops_ns"] * edges / values["compute"]
    loads = columns["unit_bytes_ns"] / values["unit_load"]
    step = (arithmetic**_PIPELINE + loads**_PIPELINE) ** (1 / _PIPELINE)
    filled, waves = columns["filled"], columns["waves"]
    paid = np.maximum(filled + values["wave_tail"] * (waves - filled), 1.0)
    tiled = columns["steps"] + values["fill"]
    tiled *= paid
    tiled *= step
    tiled += columns["doublings"] * values["split_ns"]
    ragged = 1 + values["ragged_k"] * columns["ragged_k"] + values["ragged_n"] * columns["ragged_n"]
    return _with_traffic(tiled.min(axis=0) * ragged, values, columns)


def _with_traffic(tiled: FloatArray, values: Values, columns: Columns) -> FloatArray:
    cache, weights = float(columns["cache"]), columns["weights"]
    turned = np.minimum(columns["copies"], values["weight_copies"]) * weights
    held = weights * hit_share(turned, cache * values["cache_reach"], values["cache_edge"])
    held += np.minimum(columns["bytes"] - weights, 0.7 * cache) * values["activations_cached"]
    traffic = (columns["bytes"] - held) / (values["memory"] * float(columns["bandwidth"]))
    total = soft_max(values["overlap"], tiled, np.maximum(traffic, 0.0))
    return values["t0_ns"] + values["step_ns"] * columns["k"] + total


_PRODUCTS = Form(
    name="tiles",
    parameters=_PARAMETERS,
    dims=("batch", "m", "n", "k"),
    columns=_columns,
    time_ns=_time_ns,
    choices=({"weight_copies": 5.0}, {"weight_copies": 1.0}),
)
"""The form of products and convolutions."""


FORMS: Mapping[str, Form] = MappingProxyType(
    {form.name: form for form in (_ROOFLINE, _STREAMS, _PRODUCTS, PREFILL, DECODE, _EXPERTS)}
)
"""Every form that a fit may name."""

FORMS_OF_KIND: Mapping[str, tuple[Form, ...]] = MappingProxyType(
    {
        "matmul": (_PRODUCTS,),
        "convolution": (_PRODUCTS,),
        "attention.context": (PREFILL,),
        "attention.encoder": (PREFILL,),
        "attention.generation": (DECODE,),
        "moe": (_EXPERTS,),
        "vector": (_STREAMS,),
        "reduction": (_STREAMS,),
        "normalization": (_STREAMS,),
        "quantize": (_STREAMS,),
        "pooling": (_STREAMS,),
        "gather": (_STREAMS,),
        "move": (_STREAMS,),
    }
)
"""Kind -> the forms that a fit chooses from by its error on held-out shapes."""

CHIP_WIDE_KINDS = frozenset(
    {"matmul", "convolution", "vector", "reduction", "normalization", "pooling", "gather", "move"}
)
"""Kinds that are one kernel, which a whole chip's roofline may speak of."""

_CHUNK = 2048


def form_time_ns(form: Form, values: Values, ops: Operations, machine: Machine) -> FloatArray:
    """The time of operations of one scheme [ns]; NaN where a size or a rate is unknown. O(ops), in chunks
    that stay in the processor's cache.
    """
    found = np.empty(len(ops))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for start in range(0, len(ops), _CHUNK):
            rows = np.arange(start, min(start + _CHUNK, len(ops)))
            part = ops if len(rows) == len(ops) else ops.take(rows)
            found[rows] = form.time_ns(values, form.columns(part, machine))
    return np.where(np.isfinite(found), found, np.nan)
