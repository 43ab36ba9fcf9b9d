"""Forms of time: formulas with positive fitted parameters for products, attention, experts and streaming
operations.

Times are in ns, rates in FLOP/ns and bytes/ns. Forms are applied to operations of one number format at a
time.

Products (and convolutions as the products they are equivalent to) run in waves of tiles: a kernel cuts (m, n)
into tiles and k into splits and gives each to one unit of the device, wave after wave. A step of k costs a
unit its arithmetic or its loads, whichever is longer. The fastest of a few tile shapes and numbers of splits
is used. The traffic to the main memory, less the cached part, overlaps with it.

Products on systolic arrays run in passes over the arrays, with operands in the layout of a TPU: an array
holds a block of one operand (or of the result) while the others stream through it. The unfilled part of a
block is computed all the same, and every pass takes the depth of the array to fill and to drain; both are
counted as SCALE-Sim counts them (:mod:`hespas.estimators.systolic.cycles`), at the peak of all arrays.

Attention kernels process (head, query block) or (head, key split) pieces, wave after wave. Layers of experts
are two grouped products whose experts get a few tokens each. Operations that stream their data overlap
arithmetic, traffic and a cost per row after a fixed start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, reduce
from itertools import product
from types import MappingProxyType

import numpy as np

from hespas.estimators.form_parts import (
    Columns,
    Form,
    MachineRates,
    Parameter,
    Values,
    carried_values,
    hit_share,
    machine_of,
    soft_max,
)
from hespas.graph.columns import FloatArray
from hespas.operations import KINDS, STRIDED, Operations
from hespas.operations.tiles import SUBLANES, elements_in_tiles, padded, padding_of

__all__ = [
    "ARRAYS",
    "CHIP_WIDE_KINDS",
    "DECODE",
    "FORMS",
    "FORMS_OF_KIND",
    "PREFILL",
    "Columns",
    "Form",
    "MachineRates",
    "Parameter",
    "Values",
    "carried_values",
    "form_time_ns",
    "forms_for",
    "hit_share",
    "machine_of",
    "soft_max",
]

_ATTENTION_START = Parameter(name="t0_ns", start=10000.0, low=50.0, high=1e6, carries="start")
_ATTENTION_OVERLAP = Parameter(name="overlap", start=1.5, low=0.05, high=20.0)
_QUERY_BLOCK = 128.0


def _prefill_columns(ops: Operations, machine: MachineRates) -> Columns:
    batch, length, heads, size = (ops.dim(name) for name in ("batch", "q_len", "heads", "head_dim"))
    kv_heads, kv_len = ops.dim("kv_heads", heads), ops.dim("kv_len", length)
    pairs = ops.dim("pairs", length * kv_len)
    blocks = np.ceil(length / _QUERY_BLOCK)
    filled = batch * heads * blocks / machine.units
    # The diagonal blocks of a causal mask are computed in full.
    whole = pairs + length * _QUERY_BLOCK / 2 * (pairs < length * kv_len)
    unit = machine.flops_per_ns / machine.units
    element_ns = size * machine.activation_bytes / machine.bytes_per_ns
    return {
        "filled": filled,
        "waves": np.ceil(filled),
        "block_ns": 4 * batch * heads * size * whole / machine.flops_per_ns / filled,
        "scores_ns": 128 * batch * heads * whole / machine.flops_per_ns / filled,
        "longest_ns": 4 * _QUERY_BLOCK * size * np.minimum(pairs / blocks * 2 / _QUERY_BLOCK, kv_len) / unit,
        "query_ns": batch * length * heads * element_ns,
        "key_ns": batch * np.minimum(length, kv_len) * kv_heads * element_ns,
        "more_keys_ns": batch * np.maximum(kv_len - length, 0.0) * kv_heads * element_ns,
        "blocks": blocks,
        "of_cache": ops.bytes_moved / max(machine.cache_bytes, 1.0),
        "tokens": batch * length,
    }


def _prefill_ns(values: Values, columns: Columns) -> FloatArray:
    filled, waves = columns["filled"], columns["waves"]
    paid = np.maximum(filled + values["wave_tail"] * (waves - filled), 1.0)
    block = (columns["block_ns"] + values["score"] * columns["scores_ns"]) / values["compute"]
    work = paid * (block + values["block_start_ns"])
    longest = columns["longest_ns"] * values["chain"] / values["compute"]
    share = hit_share(columns["of_cache"], values["cache_reach"], _CACHE_EDGE)
    traffic = columns["query_ns"] * values["query_passes"] + columns["key_ns"] * values["key_passes"]
    # Keys and values of earlier prompts, which no fit covers: each block of queries reads both once.
    most = max(values["key_passes"], 2.0)
    traffic = traffic + columns["more_keys_ns"] * np.minimum(2 * columns["blocks"], most)
    traffic = traffic / (1 + share * values["cache_gain"])
    kernels = soft_max(values["overlap"], work, longest, traffic * values["fused"])
    return (
        values["t0_ns"] + kernels + traffic * (1 - values["fused"]) + values["token_ns"] * columns["tokens"]
    )


PREFILL = Form(
    name="prefill",
    parameters=(
        _ATTENTION_START,
        Parameter(name="compute", start=0.6, low=0.02, high=1.0, width=0.5, carries="power"),
        _ATTENTION_OVERLAP,
        Parameter(name="score", start=0.3, low=1e-3, high=50.0, carries="score"),
        Parameter(name="block_start_ns", start=2000.0, low=1.0, high=1e5, carries="block"),
        Parameter(name="wave_tail", start=0.3, low=1e-3, high=1.0),
        Parameter(name="chain", start=0.5, low=1e-3, high=5.0),
        Parameter(name="query_passes", start=4.0, low=0.05, high=100.0),
        Parameter(name="key_passes", start=6.0, low=0.05, high=100.0),
        Parameter(name="fused", start=0.2, low=1e-3, high=1.0),
        Parameter(name="token_ns", start=0.01, low=1e-6, high=10.0),
        Parameter(name="cache_gain", start=0.5, low=1e-3, high=50.0, carries="hits"),
        Parameter(name="cache_reach", start=0.7, low=0.02, high=3.0, carries="cached"),
    ),
    dims=("batch", "q_len", "heads", "kv_heads", "head_dim"),
    columns=_prefill_columns,
    time_ns=_prefill_ns,
)
"""Whole prompts, causal or not, in blocks of 128 queries. ``score``: cost of the exponential of a score, in
shares of 128 FLOPs. ``query_passes``, ``key_passes``: number of transfers of queries and keys through the
memory, of which the share ``fused`` overlaps.
"""

_HEAD = 128.0
_GROUP = 8.0
_CACHE_EDGE = 5.0
_KEY_SPLITS = 2.0 ** np.arange(8)


def _decode_columns(ops: Operations, machine: MachineRates) -> Columns:
    batch, keys, heads, size = (ops.dim(name) for name in ("batch", "kv_len", "heads", "head_dim"))
    kv_heads = ops.dim("kv_heads")
    kv_bytes = np.maximum(ops.bytes_moved - 2 * batch * heads * size * machine.activation_bytes, 0.0)
    return {
        "heads": batch * heads / machine.units,
        "kv_heads": batch * kv_heads / machine.units,
        "group": heads / kv_heads,
        "piece_keys": keys * size / _HEAD / _KEY_SPLITS[:, None],
        "size": size / _HEAD,
        "memory_ns": kv_bytes / machine.bytes_per_ns,
        "io_ns": (ops.bytes_moved - kv_bytes) / machine.bytes_per_ns,
        "of_cache": kv_bytes / max(machine.cache_bytes, 1.0),
    }


def _decode_ns(values: Values, columns: Columns) -> FloatArray:
    group = columns["group"]
    is_beyond = group > values["group_limit"]
    single = (group <= 1) | is_beyond
    slower = np.maximum(group / _GROUP, 1.0) ** values["group_power"]
    start = np.where(single, values["piece_start_ns"], values["group_start_ns"] * slower)
    start = start * (1 + values["size_share"] * columns["size"])
    key = np.where(single, values["key_ns"], values["group_key_ns"] * slower)
    if values["limit_key_ns"] > 0:
        key = np.where(is_beyond, values["limit_key_ns"], key)
    filled = np.where(single, columns["heads"], columns["kv_heads"]) * _KEY_SPLITS[:, None]
    paid = np.maximum(filled + values["wave_tail"] * (np.ceil(filled) - filled), 1.0)
    split = (np.log2(_KEY_SPLITS) * values["split_ns"])[:, None]
    pieces = (paid * (start + key * columns["piece_keys"]) + split).min(axis=0)
    share = hit_share(columns["of_cache"], values["cache_reach"], _CACHE_EDGE)
    memory = columns["memory_ns"] / values["memory"] / (1 + share * values["cache_gain"])
    total = soft_max(values["overlap"], pieces, memory)
    begin = np.where(single, values["t0_ns"], values["group_t0_ns"])
    return begin + total + values["io_passes"] * columns["io_ns"]


DECODE = Form(
    name="decode",
    parameters=(
        _ATTENTION_START,
        Parameter(name="group_t0_ns", start=6000.0, low=50.0, high=1e6, carries="start"),
        Parameter(name="memory", start=0.75, low=0.02, high=1.0, width=0.3, carries="memory"),
        _ATTENTION_OVERLAP,
        Parameter(name="piece_start_ns", start=1000.0, low=1.0, high=1e5, carries="clock"),
        Parameter(name="key_ns", start=10.0, low=1e-3, high=1e3, carries="key"),
        Parameter(name="group_start_ns", start=3000.0, low=1.0, high=1e5, carries="clock"),
        Parameter(name="group_key_ns", start=10.0, low=1e-3, high=1e3, carries="key"),
        Parameter(name="group_power", start=0.3, low=1e-3, high=2.0),
        Parameter(name="group_limit", start=32.0, low=1.0, high=1e6, varies=False),
        Parameter(name="limit_key_ns", start=9.0, low=1e-3, high=1e3, absent=0.0, width=0.4, carries="key"),
        Parameter(name="size_share", start=0.3, low=1e-3, high=10.0),
        Parameter(name="split_ns", start=500.0, low=1.0, high=1e5, carries="clock"),
        Parameter(name="wave_tail", start=0.5, low=0.01, high=1.0),
        Parameter(name="io_passes", start=1.0, low=1e-2, high=100.0),
        Parameter(name="cache_gain", start=0.5, low=1e-3, high=20.0, carries="hits"),
        Parameter(name="cache_reach", start=0.5, low=0.02, high=3.0, carries="cached"),
    ),
    dims=("batch", "kv_len", "heads", "kv_heads", "head_dim"),
    columns=_decode_columns,
    time_ns=_decode_ns,
    choices=({"group_limit": 32.0}, {"group_limit": 1e6}),
)
"""One new token of each sequence. A piece is the keys, or a split of them, of one key head: ``key_ns`` is the
time of a unit for one key of 128 elements, with a start per piece. Heads that share keys run in separate
kernels, slower by the exponent ``group_power`` beyond 8 heads; more than ``group_limit`` heads run as if each
had keys of its own, in kernels that take ``limit_key_ns`` for a key (0, in older fits: ``key_ns``). The value
is similar on all measured GPUs, so that it is not left to other kernels where no row shows it.
"""


_EXPERT_TILES = np.array([(16, 128), (32, 128), (64, 128), (64, 256), (128, 128), (128, 256)], np.float64)


def _expert_columns(ops: Operations, machine: MachineRates) -> Columns:
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
        "cache_ns": np.array(machine.cache_bytes / machine.bytes_per_ns),
        "cache_rate": np.array(machine.cache_rate),
    }


def _expert_time_ns(values: Values, columns: Columns) -> FloatArray:
    # Experts with any token: independent draws, fewer if the draws are skewed.
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
    weights = hit * columns["expert_ns"]
    cached = hit_share(weights, float(columns["cache_ns"]) * values["cache_reach"], _CACHE_EDGE)
    weights *= (1 - cached) / values["memory"] + cached / (
        values["cache_share"] * float(columns["cache_rate"])
    )
    kernels = soft_max(values["overlap"], tiled, weights)
    moved = values["token_passes"] * columns["token_ns"] + values["inner_passes"] * columns["inner_ns"]
    start = values["t0_ns"] + values["step_ns"] * columns["k"] + values["expert_start_ns"] * columns["local"]
    return start + kernels + moved


_EXPERTS = Form(
    name="experts",
    parameters=(
        Parameter(name="t0_ns", start=30000.0, low=50.0, high=1e7, carries="start"),
        Parameter(name="compute", start=0.6, low=0.02, high=1.0, width=0.5, carries="power"),
        Parameter(name="memory", start=0.7, low=0.02, high=1.0, width=0.3, carries="memory"),
        Parameter(name="overlap", start=1.5, low=0.05, high=20.0),
        Parameter(name="unit_load", start=2.5, low=0.1, high=50.0, carries="loads"),
        Parameter(name="tile_edge", start=10.0, low=0.01, high=1000.0),
        Parameter(name="wave_tail", start=0.5, low=0.01, high=1.0),
        Parameter(name="imbalance", start=1.0, low=0.5, high=20.0),
        Parameter(name="spread", start=0.95, low=0.3, high=1.0),
        Parameter(name="step_ns", start=0.1, low=1e-4, high=50.0, carries="clock"),
        Parameter(name="expert_start_ns", start=10.0, low=1e-3, high=1e4, carries="clock"),
        Parameter(name="token_passes", start=3.0, low=1e-2, high=100.0, carries="passes"),
        Parameter(name="inner_passes", start=1.0, low=1e-3, high=100.0),
        Parameter(name="cache_reach", start=0.5, low=0.02, high=3.0, absent=0.0, carries="cached"),
        Parameter(name="cache_share", start=0.5, low=0.1, high=1.0, absent=1.0, width=0.5),
    ),
    dims=("tokens", "hidden", "inter", "topk", "experts", "tensor_parallel", "expert_parallel"),
    columns=_expert_columns,
    time_ns=_expert_time_ns,
)
"""Feed-forward layers of experts, routing and gathering included. ``imbalance``: tokens of the busiest
experts over the mean; ``spread``: exponent by which skewed routing hits fewer experts. ``cache_share``: the
share of the cache's bandwidth at which weights within ``cache_reach`` of the cache's size are read.
"""

_NO_REACH = 1e-6
"""Share of a cache's size in which no weights fit."""
_UNCACHED_EXPERTS = replace(
    _EXPERTS,
    name="uncached_experts",
    parameters=tuple(
        replace(parameter, varies=False, start=value, low=value, high=value)
        if (value := {"cache_reach": _NO_REACH, "cache_share": 1.0}.get(parameter.name))
        else parameter
        for parameter in _EXPERTS.parameters
    ),
)
"""Layers of experts whose weights always come from the memory."""


_T0 = Parameter(name="t0_ns", start=3000.0, low=50.0, high=1e6)
_COMPUTE = Parameter(name="compute", start=0.5, low=1e-3, high=1.0, width=0.5)
_MEMORY = Parameter(name="memory", start=0.7, low=1e-2, high=1.0, width=0.3, carries="memory")
_OVERLAP = Parameter(name="overlap", start=2.0, low=0.05, high=20.0)
_STRIDED = Parameter(name="strided", start=1.8, low=1.0, high=20.0, absent=1.8)
"""Factor on the traffic of operands that are not read in the order of the result."""


def _rates(ops: Operations, machine: MachineRates) -> Columns:
    more = padding_of(ops) if machine.tiles else 1.0
    flops = (ops.flops + 8.0 * np.nan_to_num(ops.transcendentals)) * more
    with np.errstate(invalid="ignore", divide="ignore"):
        arithmetic = np.where(flops == 0, 0.0, flops / machine.flops_per_ns)
        # Vector units of a TPU shift whole tiles once per element of a window.
        visits = ops.flops / (ops.dim("rows") * ops.dim("columns"))
    pools = np.array([name == "pooling" for name in ops.kind.names])[ops.kind.row] & machine.tiles
    more = more * np.where(pools & (visits > 1), visits, 1.0)
    return {
        "arithmetic_ns": arithmetic,
        "memory_ns": ops.bytes_moved * more / machine.bytes_per_ns,
        "strided": np.nan_to_num(ops.dim(STRIDED)),
        "bytes": ops.bytes_moved,
        "rows": ops.dim("rows"),
        "columns": ops.dim("columns"),
        "cache": np.array(machine.cache_bytes),
        "cache_rate": np.array(machine.cache_rate),
    }


def _traffic_ns(values: Values, columns: Columns) -> FloatArray:
    slower = 1 + (values["strided"] - 1) * columns["strided"]
    return columns["memory_ns"] * slower / values["memory"]


def _roofline_ns(values: Values, columns: Columns) -> FloatArray:
    arithmetic = columns["arithmetic_ns"] / values["compute"]
    return values["t0_ns"] + soft_max(values["overlap"], arithmetic, _traffic_ns(values, columns))


def _streams_ns(values: Values, columns: Columns) -> FloatArray:
    share = hit_share(columns["bytes"], float(columns["cache"]) * values["cache_reach"], values["cache_edge"])
    cached = columns["memory_ns"] / (float(columns["cache_rate"]) * values["cache_share"])
    memory = (1 - share) * _traffic_ns(values, columns) + share * cached
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
"""Start, arithmetic and traffic, each at a share of its peak: the description of a whole chip."""

_STREAMS = Form(
    name="streams",
    parameters=(
        *_ROOFLINE.parameters,
        Parameter(name="row_ns", start=0.01, low=1e-6, high=1e3),
        Parameter(name="row_step_ns", start=1e-5, low=1e-9, high=1.0),
        Parameter(name="cache_share", start=0.5, low=0.02, high=1.0, width=0.5, carries="stream"),
        Parameter(name="cache_reach", start=0.5, low=0.02, high=3.0, carries="cached"),
        Parameter(name="cache_edge", start=2.0, low=0.5, high=20.0),
    ),
    dims=("rows", "columns"),
    columns=_rates,
    time_ns=_streams_ns,
)
"""Vector, normalisation, pooling, gather and quantising operations. ``cache_share``: the share of the cache's
bandwidth that traffic within ``cache_reach`` of the cache's size reaches.
"""


_TILES = (
    "256x128 128x256 256x256 128x128 64x256 128x64 64x128 64x64 128x32 64x32 32x32 128x8 16x128 16x64 8x64"
)
_SPLITS = (1, 2, 4, 8, 16)
_WIDE_TILES = "128x128 128x256 256x128 256x256 256x512 512x256 512x512 512x1024 1024x512 1024x1024"
_WIDE_SPLITS = (1, 2, 4)
_WIDE = 64
"""Vector elements from which matrix units are systolic arrays, with buffers for wide tiles."""
_STEP = 32.0
"""Elements of k that a kernel processes at once."""


@cache
def _candidates(wide: bool) -> FloatArray:
    """Return the tile shapes and split counts from which a matmul kernel may choose, as rows, columns and
    splits. Shape ``(3, candidates, 1)``.
    """
    tiles, splits = (_WIDE_TILES, _WIDE_SPLITS) if wide else (_TILES, _SPLITS)
    every = [(*map(int, tile.split("x")), split) for tile, split in product(tiles.split(), splits)]
    return np.array(every, np.float64).T[:, :, None]


_PARAMETERS = (
    Parameter(name="t0_ns", start=3000.0, low=50.0, high=1e6, carries="start"),
    Parameter(name="compute", start=0.7, low=0.02, high=1.0, width=0.5, carries="power"),
    Parameter(name="memory", start=0.75, low=0.02, high=1.0, width=0.3, carries="memory"),
    Parameter(name="overlap", start=1.5, low=0.05, high=20.0),
    Parameter(name="step_ns", start=0.1, low=1e-4, high=50.0, carries="clock"),
    Parameter(name="unit_load", start=2.5, low=0.1, high=50.0, carries="loads"),
    Parameter(name="tile_edge", start=10.0, low=0.01, high=1000.0),
    Parameter(name="fill", start=30.0, low=0.1, high=5000.0, carries="tile"),
    Parameter(name="split_ns", start=500.0, low=1.0, high=1e5, carries="clock"),
    Parameter(name="wave_tail", start=0.7, low=0.02, high=1.0),
    Parameter(name="activations_cached", start=0.4, low=1e-3, high=1.0, carries="cached"),
    Parameter(name="cache_reach", start=0.5, low=0.02, high=2.0, carries="cached"),
    Parameter(name="cache_edge", start=4.0, low=0.5, high=40.0),
    Parameter(name="ragged_k", start=0.1, low=1e-3, high=10.0),
    Parameter(name="ragged_n", start=0.1, low=1e-3, high=10.0),
    Parameter(name="weight_copies", start=5.0, low=1.0, high=5.0, varies=False),
    Parameter(name="cache_share", start=1.0, low=0.1, high=10.0, absent=np.inf),
    Parameter(name="quantizing_passes", start=2.0, low=1e-2, high=50.0, absent=0.0, carries="passes"),
)
"""``compute``, ``memory``: shares of the peaks. ``unit_load``: a unit's share of the bandwidth, in shares of
bandwidth / units. ``tile_edge``: elements by which a tile's edge costs more than its area. ``fill``: steps of
k that the start and the store of a tile take. ``wave_tail``: share of the last, partly filled wave that is
paid. ``ragged_k``, ``ragged_n``: extra cost of rows that do not fill whole vectors, as shares.
``weight_copies``: largest number of copies of the weights that a benchmark cycles through until they exceed
the cache. ``cache_share``: rate of cached data, as a share of the cache's bandwidth. ``quantizing_passes``:
number of transfers of the activations through the memory before the product, in schemes that quantise them.
"""

_PIPELINE = 3.0
"""Order of the norm by which arithmetic and loads of one step overlap."""


def _columns(ops: Operations, machine: MachineRates) -> Columns:
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    tile_m, tile_n, split = _candidates(machine.vector_elements >= _WIDE)
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
        "quantizing_ns": machine.quantizes * batch * m * k * machine.activation_bytes / machine.bytes_per_ns,
        "copies": copies,
        "cache": np.array(machine.cache_bytes),
        "cache_rate": np.array(machine.cache_rate),
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
    units_ns = tiled.min(axis=0) * ragged
    cache, weights = float(columns["cache"]), columns["weights"]
    turned = np.minimum(columns["copies"], values["weight_copies"]) * weights
    held = weights * hit_share(turned, cache * values["cache_reach"], values["cache_edge"])
    held += np.minimum(columns["bytes"] - weights, 0.7 * cache) * values["activations_cached"]
    traffic = (columns["bytes"] - held) / values["memory"] + held / (
        values["cache_share"] * float(columns["cache_rate"])
    )
    traffic /= float(columns["bandwidth"])
    total = soft_max(values["overlap"], units_ns, np.maximum(traffic, 0.0))
    total += values["quantizing_passes"] * columns["quantizing_ns"]
    return values["t0_ns"] + values["step_ns"] * columns["k"] + total


_PRODUCTS = Form(
    name="tiles",
    parameters=_PARAMETERS,
    dims=("batch", "m", "n", "k"),
    columns=_columns,
    time_ns=_time_ns,
    choices=({"weight_copies": 5.0}, {"weight_copies": 1.0}),
)
"""Form of products and convolutions."""


def _passes_flops(ops: Operations, machine: MachineRates) -> FloatArray:
    """Return the FLOPs that a systolic array could do in the time of each matmul, including unfilled blocks
    and the cycles to fill and drain the array. The stationary operand is the one with the lowest result.
    """
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    array = machine.array
    if array is None:
        return np.full(len(ops), np.nan)
    fill = array.rows + array.columns - 2
    # Sizes along the rows of the array, along its columns, and streamed through it.
    mappings = [(m, n, k)]
    if array.dataflow != "os":
        mappings = [(k, n, m), (k, m, n)]
        fill += array.rows  # the stationary operand is loaded first
    tile = SUBLANES if machine.tiles else 1.0
    steps = [
        padded(rows, array.rows) * padded(columns, array.columns) * (padded(streamed, tile) + fill)
        for rows, columns, streamed in mappings
    ]
    return 2 * batch * reduce(np.minimum, steps)


def _array_columns(ops: Operations, machine: MachineRates) -> Columns:
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))

    def elements(rows: FloatArray, columns: FloatArray) -> FloatArray:
        return batch * (elements_in_tiles(rows, columns) if machine.tiles else rows * columns)

    lhs = elements(m, k) * machine.activation_bytes
    # A convolution reads its input once, not every window of it, unlike the equivalent product.
    others = batch * (n * k * machine.weight_bytes + m * n * machine.output_bytes)
    is_convolution = np.array([name == "convolution" for name in ops.kind.names])[ops.kind.row]
    lhs = np.where(is_convolution, np.fmin(np.maximum(ops.bytes_moved - others, 0.0), lhs), lhs)
    rhs = elements(k, n) * machine.weight_bytes
    result = elements(m, n) * machine.output_bytes
    return {
        "passes_ns": _passes_flops(ops, machine) / machine.flops_per_ns,
        "load_ns": (lhs + rhs) / machine.bytes_per_ns,
        "store_ns": result / machine.bytes_per_ns,
    }


def _array_time_ns(values: Values, columns: Columns) -> FloatArray:
    passes = columns["passes_ns"] / values["compute"]
    loads = columns["load_ns"] / values["memory"]
    pipelined = values["pipeline_ns"] + np.maximum(passes, loads)
    work = np.minimum(passes + loads, pipelined)
    return values["t0_ns"] + work + columns["store_ns"] / values["store"]


ARRAYS = Form(
    name="arrays",
    parameters=(
        Parameter(name="t0_ns", start=3000.0, low=50.0, high=1e6),
        Parameter(name="compute", start=0.7, low=0.02, high=1.0, width=0.5),
        Parameter(name="memory", start=0.75, low=0.02, high=1.0, width=0.3, carries="memory"),
        Parameter(name="store", start=0.75, low=0.02, high=1.0, width=0.3),
        Parameter(name="pipeline_ns", start=5000.0, low=50.0, high=1e6),
    ),
    dims=("batch", "m", "n", "k"),
    columns=_array_columns,
    time_ns=_array_time_ns,
)
"""Products of devices whose matrix units are systolic arrays. ``compute``: the share of the peak that passes
reach; ``memory``, ``store``: shares of the bandwidth for operands and for the result. Operands are loaded
before the first pass, or, after ``pipeline_ns`` more, during the passes: whichever is faster.
"""


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        form.name: form
        for form in (_ROOFLINE, _STREAMS, _PRODUCTS, ARRAYS, PREFILL, DECODE, _EXPERTS, _UNCACHED_EXPERTS)
    }
)
"""Forms of operations as libraries run them, by name."""

FORMS_OF_KIND: Mapping[str, tuple[Form, ...]] = MappingProxyType(
    {
        "matmul": (_PRODUCTS,),
        "convolution": (_PRODUCTS,),
        "attention.context": (PREFILL,),
        "attention.encoder": (PREFILL,),
        "attention.generation": (DECODE,),
        "moe": (_EXPERTS, _UNCACHED_EXPERTS),
        **{kind: (_STREAMS,) for kind, dims in KINDS.items() if dims == _STREAMS.dims},
    }
)
"""Kind -> the forms among which a fit selects one for all classes, by their error on held-out shapes."""


def forms_for(kind: str, machine: MachineRates) -> tuple[Form, ...]:
    """Return the forms (formulas) that a fit of a kind of operation may choose from. For matmuls on systolic
    arrays it is the form that counts passes over the arrays. The form that counts waves of tiles is equally
    accurate within the fitted sizes, but less accurate beyond them.
    """
    forms = FORMS_OF_KIND.get(kind, ())
    return (ARRAYS,) if _PRODUCTS in forms and machine.array is not None else forms


CHIP_WIDE_KINDS = frozenset(
    {"matmul", "convolution", "vector", "reduction", "normalization", "pooling", "gather", "move"}
)
"""Kinds that are one kernel, to which a whole chip's roofline applies."""

_CHUNK = 2048


def form_time_ns(form: Form, values: Values, ops: Operations, machine: MachineRates) -> FloatArray:
    """Return the time [ns] that a form with the parameters ``values`` predicts for operations of one number
    format; NaN if a size or a rate is unknown.

    O(ops), in chunks that fit the processor's cache.
    """
    duration_ns = np.empty(len(ops))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for start in range(0, len(ops), _CHUNK):
            rows = np.arange(start, min(start + _CHUNK, len(ops)))
            part = ops if len(rows) == len(ops) else ops.take(rows)
            duration_ns[rows] = form.time_ns(values, form.columns(part, machine))
    return np.where(np.isfinite(duration_ns), duration_ns, np.nan)
