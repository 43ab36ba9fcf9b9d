"""Tables of aiconfigurator (NVIDIA, Apache-2.0): single kernels of serving libraries, in CUDA graphs.

Rows of ``fp8``, ``fp8_block``, ``nvfp4`` and ``sq`` include the kernels that quantise the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hespas.estimators.measurements.columns import Columns
from hespas.estimators.measurements.made import Dialect, Made, made_of, relabelled, scheme_of
from hespas.estimators.operations import Labels, build, chosen, find_scheme
from hespas.graph.columns import FloatArray

__all__ = ["AICONFIGURATOR"]

_PROVENANCE = "github.com/ai-dynamo/aiconfigurator at 095f58a5, Apache-2.0, (c) NVIDIA"
_GATED = 3.0
_NOT_GATED = 2.0


def _library(columns: Columns, *more: str) -> Labels:
    return columns.joined("framework", "framework_version", "kernel_source", *more)


def _gemm(columns: Columns) -> Made:
    ops = build.matmuls(
        scheme_of(columns),
        batch=np.ones(len(columns)),
        m=columns.numbers("m"),
        n=columns.numbers("n"),
        k=columns.numbers("k"),
        variant=_library(columns),
    )
    return made_of(ops, columns.numbers("latency_us"))


def _cache_bytes(columns: Columns) -> FloatArray:
    labels = scheme_of(columns, "kv_cache_dtype")
    names = ["f8E4M3FN" if name == "fp8" else name for name in labels.names]
    found = [find_scheme(name) for name in names]
    return np.array([np.nan if each is None else each.output_bits / 8 for each in found])[labels.row]


def _element_scheme(columns: Columns) -> Labels:
    """Attention in ``fp8`` multiplies what is 8 bits already: an element type, not a quantising scheme."""
    return relabelled(scheme_of(columns), {"fp8": "f8E4M3FN"})


def _attention_library(columns: Columns) -> Labels:
    """Library and cache type; windowed kernels are their own."""
    labels = _library(columns, "kv_cache_dtype")
    windowed = (columns.numbers("window_size") > 0).astype(np.int32)
    names = (*labels.names, *(f"{name} window" for name in labels.names))
    return Labels(labels.row + windowed * len(labels.names), names)


def _context(columns: Columns) -> Made:
    ops = build.attention_context(
        _element_scheme(columns),
        batch=columns.numbers("batch_size"),
        length=columns.numbers("isl"),
        heads=columns.numbers("num_heads"),
        kv_heads=columns.numbers("num_key_value_heads"),
        head_dim=columns.numbers("head_dim"),
        window=columns.numbers("window_size"),
        kv_bytes=_cache_bytes(columns),
        variant=_attention_library(columns),
    )
    return made_of(ops, columns.numbers("latency_us"))


def _generation(columns: Columns) -> Made:
    length, window = columns.numbers("step") + 1, columns.numbers("window_size")
    ops = build.attention_generation(
        _element_scheme(columns),
        batch=columns.numbers("batch_size"),
        kv_len=np.where(window > 0, np.minimum(window, length), length),
        heads=columns.numbers("num_heads"),
        kv_heads=columns.numbers("num_key_value_heads"),
        head_dim=columns.numbers("head_dim"),
        kv_bytes=_cache_bytes(columns),
        variant=_attention_library(columns),
    )
    return made_of(ops, columns.numbers("latency_us"))


def _attention(columns: Columns) -> Made:
    """Prompts and new tokens have the same columns; only the latter start at step 1 with one token."""
    is_generation = columns.numbers("step") > 0
    if is_generation.all():
        return _generation(columns)
    prompts = _context(columns)
    if not is_generation.any():
        return prompts
    return replace(prompts, ops=chosen(prompts.ops, _generation(columns).ops, is_generation))


def _encoder(columns: Columns) -> Made:
    ops = build.attention_encoder(
        scheme_of(columns),
        batch=columns.numbers("batch_size"),
        length=columns.numbers("isl"),
        heads=columns.numbers("num_heads"),
        head_dim=columns.numbers("head_dim"),
        # Each device was measured with another release candidate of one version: no reason for another fit.
        variant=columns.joined("framework", "kernel_source"),
    )
    return made_of(ops, columns.numbers("latency_us"))


def _moe(columns: Columns) -> Made:
    source = columns.texts("kernel_source")
    matrices = np.array([_NOT_GATED if "nongated" in name else _GATED for name in source.names])[source.row]
    ops = build.mixtures_of_experts(
        scheme_of(columns),
        op=columns.texts("distribution"),
        tokens=columns.numbers("num_tokens"),
        hidden=columns.numbers("hidden_size"),
        inter=columns.numbers("inter_size"),
        topk=columns.numbers("topk"),
        experts=columns.numbers("num_experts"),
        tensor_parallel=columns.numbers("moe_tp_size"),
        expert_parallel=columns.numbers("moe_ep_size"),
        matrices=matrices,
        variant=_library(columns),
    )
    return made_of(ops, columns.numbers("latency_us"))


_QUANTIZE_PASSES = {"compute_scale": 1.0, "scale_matrix": 1.5}
"""Times 16 bits that an element is read or written: the scale needs one read, scaling writes 8 bits too."""


def _quantize(columns: Columns) -> Made:
    op = columns.texts("op")
    passes = np.array([_QUANTIZE_PASSES.get(name, np.nan) for name in op.names])[op.row]
    ops = build.elementwise(
        "quantize",
        Labels.constant("bf16", len(columns)),
        op=op,
        rows=columns.numbers("m"),
        columns=columns.numbers("k"),
        passes=passes,
        flops_per_element=np.ones(len(columns)),
        variant=columns.joined("framework", "kernel_source"),
    )
    return made_of(ops, columns.numbers("latency_us"), kept=~np.isnan(passes))


_MLA_SIZES = {"mla_gen_pre": (512.0, 128.0), "mla_gen_post": (128.0, 512.0)}
"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): per head 128 wide, latent 512 wide."""


def _mla_bmm(columns: Columns) -> Made:
    op = columns.texts("op")
    sizes = np.array([_MLA_SIZES.get(name, (np.nan, np.nan)) for name in op.names])[op.row].reshape(-1, 2)
    ops = build.matmuls(
        scheme_of(columns),
        batch=columns.numbers("num_heads"),
        m=columns.numbers("num_tokens"),
        n=sizes[:, 0],
        k=sizes[:, 1],
        variant=_library(columns, "op"),
    )
    return made_of(ops, columns.numbers("latency_us"), kept=~np.isnan(sizes[:, 0]))


_COLLECTIVE = {"alltoall": "all_to_all"}


def _collectives(columns: Columns) -> Made:
    op = relabelled(columns.texts("op"), _COLLECTIVE)
    ranks, message = columns.numbers("num_ranks"), columns.numbers("message_bytes")
    # NCCL's gathers are listed by the whole result, oneCCL's by what a rank gives: their bus rates show it.
    whole = np.zeros(len(columns), np.bool_)
    whole[op.where("all_gather")] = True
    whole[columns.texts("library").where("oneccl")] = False
    ops = build.collectives(
        scheme_of(columns),
        op=op,
        ranks=ranks,
        message_bytes=np.where(whole, message / ranks, message),
        ranks_per_node=ranks,
        variant=columns.joined("library", "library_version"),
    )
    return made_of(ops, columns.numbers("latency_us"))


def _row(title: str, marks: str, make: Callable[[Columns], Made]) -> Dialect:
    return Dialect(title=title, marks=frozenset(marks.split()), make=make, provenance=_PROVENANCE)


AICONFIGURATOR = (
    _row(
        "aiconfigurator attention",
        "batch_size isl num_heads num_key_value_heads window_size step",
        _attention,
    ),
    _row("aiconfigurator attention of encoders", "framework batch_size isl num_heads head_dim", _encoder),
    _row("aiconfigurator mixture of experts", "num_tokens hidden_size inter_size topk moe_ep_size", _moe),
    _row("aiconfigurator MLA products", "framework op num_tokens num_heads", _mla_bmm),
    _row("aiconfigurator quantisation", "framework kernel_source op m k latency_us", _quantize),
    _row("aiconfigurator collectives", "library op num_ranks message_bytes", _collectives),
    _row("aiconfigurator GEMM", "framework kernel_source dtype m n k latency_us", _gemm),
)
"""The known tables; the first whose columns are there is taken, so narrower ones stand first."""
