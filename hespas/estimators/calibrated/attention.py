"""Attention kernels: units work through (head, query block) or (head, key split) pieces, wave after wave."""

from __future__ import annotations

import numpy as np

from hespas.estimators.calibrated.form import Columns, Form, Machine, Parameter, Values, hit_share, soft_max
from hespas.graph.columns import FloatArray
from hespas.operations import Operations

__all__ = ["DECODE", "PREFILL"]

_T0 = Parameter(name="t0_ns", start=10000.0, low=50.0, high=1e6)
_OVERLAP = Parameter(name="overlap", start=1.5, low=0.05, high=20.0)
_QUERY_BLOCK = 128.0


def _prefill_columns(ops: Operations, machine: Machine) -> Columns:
    batch, length, heads, size = (ops.dim(name) for name in ("batch", "q_len", "heads", "head_dim"))
    kv_heads = ops.dim("kv_heads")
    kv_heads = np.where(np.isnan(kv_heads), heads, kv_heads)
    kv_len = np.where(np.isnan(ops.dim("kv_len")), length, ops.dim("kv_len"))
    pairs = ops.dim("pairs")
    pairs = np.where(np.isnan(pairs), length * kv_len, pairs)
    blocks = np.ceil(length / _QUERY_BLOCK)
    filled = batch * heads * blocks / machine.units
    # The diagonal blocks of a causal mask are computed whole.
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
    # Keys and values of earlier prompts, of which no fit has seen any: each block of queries reads both once.
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
        _T0,
        Parameter(name="compute", start=0.6, low=0.02, high=4.0),
        _OVERLAP,
        Parameter(name="score", start=0.3, low=1e-3, high=50.0),
        Parameter(name="block_start_ns", start=2000.0, low=1.0, high=1e5),
        Parameter(name="wave_tail", start=0.3, low=1e-3, high=1.0),
        Parameter(name="chain", start=0.5, low=1e-3, high=5.0),
        Parameter(name="query_passes", start=4.0, low=0.05, high=100.0),
        Parameter(name="key_passes", start=6.0, low=0.05, high=100.0),
        Parameter(name="fused", start=0.2, low=1e-3, high=1.0),
        Parameter(name="token_ns", start=0.01, low=1e-6, high=10.0),
        Parameter(name="cache_gain", start=0.5, low=1e-3, high=50.0),
        Parameter(name="cache_reach", start=0.7, low=0.02, high=3.0),
    ),
    dims=("batch", "q_len", "heads", "kv_heads", "head_dim"),
    columns=_prefill_columns,
    time_ns=_prefill_ns,
)
"""Whole prompts, causal or not, in blocks of 128 queries. ``score``: the exponential of a score in shares of
128 FLOPs. ``query_passes``, ``key_passes``: how often queries and keys cross the memory, of which ``fused``
overlaps.
"""

_HEAD = 128.0
_GROUP = 8.0
_CACHE_EDGE = 5.0
_SPLITS = 2.0 ** np.arange(8)


def _decode_columns(ops: Operations, machine: Machine) -> Columns:
    batch, keys, heads, size = (ops.dim(name) for name in ("batch", "kv_len", "heads", "head_dim"))
    kv_heads = ops.dim("kv_heads")
    kv_bytes = np.maximum(ops.bytes_moved - 2 * batch * heads * size * machine.activation_bytes, 0.0)
    return {
        "heads": batch * heads / machine.units,
        "kv_heads": batch * kv_heads / machine.units,
        "group": heads / kv_heads,
        "piece_keys": keys * size / _HEAD / _SPLITS[:, None],
        "size": size / _HEAD,
        "memory_ns": kv_bytes / machine.bytes_per_ns,
        "io_ns": (ops.bytes_moved - kv_bytes) / machine.bytes_per_ns,
        "of_cache": kv_bytes / max(machine.cache_bytes, 1.0),
    }


def _decode_ns(values: Values, columns: Columns) -> FloatArray:
    group = columns["group"]
    single = (group <= 1) | (group > values["group_limit"])
    slower = np.maximum(group / _GROUP, 1.0) ** values["group_power"]
    start = np.where(single, values["piece_start_ns"], values["group_start_ns"] * slower)
    start = start * (1 + values["size_share"] * columns["size"])
    key = np.where(single, values["key_ns"], values["group_key_ns"] * slower)
    filled = np.where(single, columns["heads"], columns["kv_heads"]) * _SPLITS[:, None]
    paid = np.maximum(filled + values["wave_tail"] * (np.ceil(filled) - filled), 1.0)
    split = (np.log2(_SPLITS) * values["split_ns"])[:, None]
    pieces = (paid * (start + key * columns["piece_keys"]) + split).min(axis=0)
    share = hit_share(columns["of_cache"], values["cache_reach"], _CACHE_EDGE)
    memory = columns["memory_ns"] / values["memory"] / (1 + share * values["cache_gain"])
    total = soft_max(values["overlap"], pieces, memory)
    begin = np.where(single, values["t0_ns"], values["group_t0_ns"])
    return begin + total + values["io_passes"] * columns["io_ns"]


DECODE = Form(
    name="decode",
    parameters=(
        _T0,
        Parameter(name="group_t0_ns", start=6000.0, low=50.0, high=1e6),
        Parameter(name="memory", start=0.75, low=0.02, high=4.0),
        _OVERLAP,
        Parameter(name="piece_start_ns", start=1000.0, low=1.0, high=1e5),
        Parameter(name="key_ns", start=10.0, low=1e-3, high=1e3),
        Parameter(name="group_start_ns", start=3000.0, low=1.0, high=1e5),
        Parameter(name="group_key_ns", start=10.0, low=1e-3, high=1e3),
        Parameter(name="group_power", start=0.3, low=1e-3, high=2.0),
        Parameter(name="group_limit", start=32.0, low=1.0, high=1e6, varies=False),
        Parameter(name="size_share", start=0.3, low=1e-3, high=10.0),
        Parameter(name="split_ns", start=500.0, low=1.0, high=1e5),
        Parameter(name="wave_tail", start=0.5, low=0.01, high=1.0),
        Parameter(name="io_passes", start=1.0, low=1e-2, high=100.0),
        Parameter(name="cache_gain", start=0.5, low=1e-3, high=20.0),
        Parameter(name="cache_reach", start=0.5, low=0.02, high=3.0),
    ),
    dims=("batch", "kv_len", "heads", "kv_heads", "head_dim"),
    columns=_decode_columns,
    time_ns=_decode_ns,
    choices=({"group_limit": 32.0}, {"group_limit": 1e6}),
)
"""One new token of each sequence. A piece is the keys, or a split of them, of one key head: ``key_ns`` is
what a unit takes for one key of 128 elements, with a start per piece. Heads that share keys run in kernels of
their own, slower by ``group_power`` once more than 8 do; more than ``group_limit`` run as if each had keys of
its own.
"""
