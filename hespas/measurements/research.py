"""Readers of published tables: NeuSight, Vidur, AITER, the SCALE-Sim TPU study and aiconfigurator.

NeuSight (arXiv 2407.13853): PyTorch, float32 without TF32, CUDA events. Vidur (arXiv 2405.05465): layers of
language models, float16. AITER (AMD): the best kernel of a tuning sweep, warm caches. TPU v4: XLA operations,
float16. aiconfigurator (NVIDIA): single kernels of serving libraries in CUDA graphs; rows of ``fp8``,
``fp8_block``, ``nvfp4`` and ``sq`` include the kernels that quantise the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.measurements.columns import Columns
from hespas.measurements.tidy import (
    Dialect,
    MeasuredRows,
    measured_rows,
    relabelled,
    scheme_of,
    usual_flops,
    usual_passes,
)
from hespas.operations import Labels, Operations, build, canonical_op, chosen, element_bytes, numbered
from hespas.operations.tiles import TILED, padding_of_shape

__all__ = ["RESEARCH_TABLES"]

_NEUSIGHT = "github.com/sitar-lab/NeuSight at 6945927d, MIT"
_VIDUR = "github.com/microsoft/vidur at 7d475133, MIT, (c) Microsoft"
_ROCM = "github.com/ROCm/aiter at e4048607, MIT, (c) AMD"
_SCALE_SIM = "arXiv 2603.22535, github.com/scalesim-project/SCALE-Sim-validation before d6b88ca2"
_AICONFIGURATOR = "github.com/ai-dynamo/aiconfigurator at 095f58a5, Apache-2.0, (c) NVIDIA"
_GATED = 3.0
_NOT_GATED = 2.0

_NORMS = frozenset({"batch_norm", "group_norm", "layer_norm", "rms_norm", "softmax"})
_POOLS = frozenset({"avg_pool", "max_pool", "reduce_window"})


_ReadTable = Callable[[Columns], MeasuredRows]

RESEARCH_TABLES: list[Dialect] = []
"""Known tables. The first one whose columns are present is used, so tables with more specific columns come
first.
"""


def _table(
    title: str, marks: str, provenance: str, *, hardware: str = "hardware"
) -> Callable[[_ReadTable], _ReadTable]:
    """Return a decorator that registers a function as the reader of a table format. ``marks`` are the names
    of columns that occur together in no other format, separated by spaces.
    """

    def register(make: _ReadTable) -> _ReadTable:
        RESEARCH_TABLES.append(
            Dialect(
                title=title,
                marks=frozenset(marks.split()),
                make=make,
                provenance=provenance,
                hardware_column=hardware,
            )
        )
        return make

    return register


def _vectors(
    op: Labels, *, rows: FloatArray, width: FloatArray, scheme: Labels, variant: Labels
) -> Operations:
    """Return elementwise operations, norms, pooling or gathers. The name of each operation decides between
    these kinds.
    """
    names = tuple(canonical_op(name) for name in op.names)
    ops = build.elementwise(
        "vector",
        scheme,
        op=Labels(op.row, names),
        rows=rows,
        columns=width,
        passes=usual_passes(Labels(op.row, names)),
        flops_per_element=usual_flops(Labels(op.row, names)),
        variant=variant,
    )
    kinds = [_vector_kind(name) for name in names]
    distinct = tuple(dict.fromkeys(kinds))
    kind = np.array([distinct.index(name) for name in kinds], np.int32)[op.row]
    return replace(ops, kind=Labels(kind, distinct))


def _vector_kind(name: str) -> str:
    if name in _NORMS:
        return "normalization"
    if name in _POOLS:
        return "pooling"
    return "gather" if name == "embedding" else "vector"


@_table("NeuSight operations", "hardware op b h m n k latency_us", _NEUSIGHT)
def _neusight(columns: Columns) -> MeasuredRows:
    op, scheme = columns.texts("op"), scheme_of(columns)
    b, m, n, k, width = (columns.numbers(name) for name in ("b", "m", "n", "k", "h"))
    # A linear layer has a bias, and therefore other kernels than a batched product.
    names = ("pytorch events", "pytorch events bmm", "pytorch events linear")
    number = {"bmm": 1, "linear": 2}
    variant = Labels.choice(names, np.array([number.get(name, 0) for name in op.names])[op.row])
    vectors = _vectors(op, rows=b, width=width, scheme=scheme, variant=variant)
    products = build.matmuls(scheme, batch=b, m=m, n=n, k=k, variant=variant)
    return measured_rows(chosen(vectors, products, variant.row > 0), columns.numbers("latency_us"))


@_table("NeuSight convolutions", "Input_Channel Output_Channel Kernel_Szie", _NEUSIGHT)
def _neusight_conv(columns: Columns) -> MeasuredRows:
    size, kernel = columns.numbers("Input_Size"), columns.numbers("Kernel_Szie")
    stride, padding = columns.numbers("Stride"), columns.numbers("Padding")
    ops = build.convolutions(
        scheme_of(columns),
        **columns.sizes(images="B", in_channels="Input_Channel", out_channels="Output_Channel"),
        kernel=kernel,
        in_size=size,
        out_size=np.floor((size + 2 * padding - kernel) / stride) + 1,
        variant=Labels.constant("pytorch events", len(columns)),
    )
    return measured_rows(ops, columns.numbers("latency_us"))


@_table("Vidur layers", "num_tokens num_tensor_parallel_workers n_embd latency_us_median", _VIDUR)
def _vidur(columns: Columns) -> MeasuredRows:
    op, scheme, count = columns.texts("op"), scheme_of(columns), len(columns)
    tokens, parallel = columns.numbers("num_tokens"), columns.numbers("num_tensor_parallel_workers")
    n, k = columns.numbers("n"), columns.numbers("k")
    variant = Labels.constant("vidur", count)
    products = build.matmuls(scheme, batch=np.ones(count), m=tokens, n=n, k=k, variant=variant)
    embedding, heads = columns.numbers("n_embd"), columns.numbers("n_head")
    code = {name: row for row, name in enumerate(op.names)}
    inner = columns.numbers("n_expanded_embd") / parallel
    width = np.where(op.row == code.get("mlp_act", -1), inner, embedding)
    rotated = (heads + columns.numbers("n_kv_head")) / parallel * embedding / np.maximum(heads, 1)
    width = np.where(op.row == code.get("attn_rope", -1), rotated, width)
    vectors = _vectors(op, rows=tokens, width=width, scheme=scheme, variant=variant)
    is_product = ~np.isnan(n) & ~np.isnan(k)
    return measured_rows(
        chosen(vectors, products, is_product),
        columns.numbers("latency_us_median"),
        spread_us=columns.numbers("latency_us_std"),
    )


@_table(
    "Vidur collectives", "system num_workers devices_per_node latency_us_median", _VIDUR, hardware="system"
)
def _vidur_network(columns: Columns) -> MeasuredRows:
    """Return the collectives of Vidur's tables, on one or more nodes. The variant includes the interconnect
    of the system.
    """
    ops = build.collectives(
        Labels.constant("f16", len(columns)),
        op=relabelled(columns.texts("op"), {"send_recv": "permute"}),
        **columns.sizes(
            ranks="num_workers", message_bytes="message_bytes", ranks_per_node="devices_per_node"
        ),
        variant=columns.joined("system"),
    )
    spread = columns.numbers("latency_us_std")
    return measured_rows(ops, columns.numbers("latency_us_median"), spread_us=spread)


_AITER = {"fp4_block": "a4w4_mxfp4", "fp8": "a8w8_fp8", "fp8_block": "a8w8_fp8_block", "i8": "a8w8"}
"""Number formats of AITER, whose activations are quantised before, unlike in serving libraries."""


@_table("AITER GEMM", "batch m n k n_entries tflops", _ROCM)
def _aiter(columns: Columns) -> MeasuredRows:
    ops = build.matmuls(
        relabelled(scheme_of(columns), _AITER),
        **columns.sizes(batch="batch", m="m", n="n", k="k"),
        variant=Labels.constant("aiter tuned", len(columns)),
    )
    return measured_rows(ops, columns.numbers("latency_us"))


_AITER_EXPERTS = {
    "bfloat16 bfloat16": "bf16",
    "bfloat16 float4_e2m1fn_x2": "w4a16_mxfp4",
    "float8_e4m3fn float4_e2m1fn_x2": "w4a8_mxfp4_mxfp8",
    "float4_e2m1fn_x2 float4_e2m1fn_x2": "a4w4_mxfp4",
    "float8_e4m3fn float8_e4m3fn": "a8w8_fp8",
    "float8_e4m3fnuz float8_e4m3fnuz": "a8w8_fp8",
    "int8 int8": "a8w8",
}
"""Number formats of AITER's experts, by the element types of activations and weights."""
_FEW_TOKENS = 64.0
"""Number of tokens up to which a layer of experts reads more weights with more tokens."""


@_table("AITER mixture of experts", "token model_dim inter_dim expert use_g1u1", _ROCM)
def _aiter_moe(columns: Columns) -> MeasuredRows:
    formats = relabelled(columns.joined("q_dtype_a", "q_dtype_w"), _AITER_EXPERTS)
    gated = columns.numbers("use_g1u1") > 0
    ones = np.ones(len(columns))
    ops = build.mixtures_of_experts(
        formats,
        op=Labels.constant("balanced", len(columns)),
        **columns.sizes(tokens="token", hidden="model_dim", inter="inter_dim", topk="topk", experts="expert"),
        tensor_parallel=ones,
        expert_parallel=ones,
        matrices=np.where(gated, 3.0, 2.0),
        variant=columns.joined("q_type"),
    )
    rows = measured_rows(ops, columns.numbers("latency_us"))
    # Tables of the MI308X state one time for 1 to 16 tokens of a layer and one for 2048 to 32768, measured at
    # one of them: 32768 tokens would exceed the peak of the matrix units. Of small numbers the largest is
    # left, whose experts' weights the time covers, and of others the smallest.
    dims = [size for name, size in ops.dims.items() if name != "tokens"]
    labels = (ops.scheme.row, ops.variant.row, columns.texts("hardware", "").row)
    of_time = numbered([*labels, *dims, rows.duration_ns])
    tokens = ops.dim("tokens")
    fewest, most = np.full(len(tokens), np.inf), np.zeros(len(tokens))
    np.minimum.at(fewest, of_time, tokens)
    np.maximum.at(most, of_time, tokens)
    measured = np.where(most <= _FEW_TOKENS, most, fewest)[of_time]
    return replace(rows, contradicts=np.asarray(tokens != measured, np.bool_))


@_table("TPU v4 products", "m n k module_us n_exec", _SCALE_SIM)
def _tpu_matmul(columns: Columns) -> MeasuredRows:
    ops = build.matmuls(
        scheme_of(columns),
        batch=np.ones(len(columns)),
        **columns.sizes(m="m", n="n", k="k"),
        variant=Labels.constant("xla op", len(columns)),
    )
    return measured_rows(ops, columns.numbers("latency_us"))


@_table("TPU v4 vector operations", "op shape op_us_mean module_us elements", _SCALE_SIM)
def _tpu_vectors(columns: Columns) -> MeasuredRows:
    shapes = columns.texts("shape")
    parts = [text.replace("x", ",").split(",") for text in shapes.names]
    extents = [tuple(map(float, part)) if all(n.strip().isdigit() for n in part) else () for part in parts]
    rank = np.array([len(shape) for shape in extents])[shapes.row]
    # XLA lays the longest dimension along the lanes; a norm reduces the last dimension.
    last = np.array([shape[-1] if shape else np.nan for shape in extents])[shapes.row]
    longest = np.array([max(shape, default=np.nan) for shape in extents])[shapes.row]
    op = columns.texts("op")
    is_plain = np.array([_vector_kind(canonical_op(name)) == "vector" for name in op.names])[op.row]
    width = np.where(is_plain, longest, last)
    elements = columns.numbers("elements")
    variant = Labels.choice(("xla op", *(f"xla op {count}-D" for count in range(1, 9))), np.minimum(rank, 8))
    ops = _vectors(op, rows=elements / width, width=width, scheme=scheme_of(columns), variant=variant)
    tiled = np.array([padding_of_shape(shape) if shape else np.nan for shape in extents])[shapes.row]
    ops = replace(ops, dims={**ops.dims, TILED: tiled})
    return measured_rows(ops, columns.numbers("op_us_mean"), kept=~np.isnan(width))


def _library(columns: Columns, *more: str) -> Labels:
    return columns.joined("framework", "framework_version", "kernel_source", *more)


def _cache_bytes(columns: Columns) -> FloatArray:
    """Return the bytes per element of the KV cache in each row."""
    labels = scheme_of(columns, "kv_cache_dtype")
    return element_bytes(relabelled(labels, {"fp8": "f8E4M3FN"}), "output")


def _element_scheme(columns: Columns) -> Labels:
    """Return the number format of each row of attention. ``fp8`` is an element type here, because q, k and v
    have 8 bits.
    """
    return relabelled(scheme_of(columns), {"fp8": "f8E4M3FN"})


def _attention_library(columns: Columns) -> Labels:
    """Return the variant of each row: the library, the type of the KV cache, and the window if there is
    one.
    """
    labels = _library(columns, "kv_cache_dtype")
    windowed = (columns.numbers("window_size") > 0).astype(np.int32)
    names = (*labels.names, *(f"{name} window" for name in labels.names))
    return Labels(labels.row + windowed * len(labels.names), names)


def _context(columns: Columns) -> MeasuredRows:
    ops = build.attention_context(
        _element_scheme(columns),
        **columns.sizes(
            batch="batch_size",
            length="isl",
            heads="num_heads",
            kv_heads="num_key_value_heads",
            head_dim="head_dim",
            window="window_size",
        ),
        kv_bytes=_cache_bytes(columns),
        variant=_attention_library(columns),
    )
    return measured_rows(ops, columns.numbers("latency_us"))


def _generation(columns: Columns) -> MeasuredRows:
    length, window = columns.numbers("step") + 1, columns.numbers("window_size")
    ops = build.attention_generation(
        _element_scheme(columns),
        batch=columns.numbers("batch_size"),
        kv_len=np.where(window > 0, np.minimum(window, length), length),
        **columns.sizes(heads="num_heads", kv_heads="num_key_value_heads", head_dim="head_dim"),
        kv_bytes=_cache_bytes(columns),
        variant=_attention_library(columns),
    )
    return measured_rows(ops, columns.numbers("latency_us"))


@_table(
    "aiconfigurator attention",
    "batch_size isl num_heads num_key_value_heads window_size step",
    _AICONFIGURATOR,
)
def _attention(columns: Columns) -> MeasuredRows:
    """Return the attention operations of a table that has both prompts (step 0) and new tokens (step 1 and
    above).
    """
    is_generation = columns.numbers("step") > 0
    if is_generation.all():
        return _generation(columns)
    prompts = _context(columns)
    if not is_generation.any():
        return prompts
    return replace(prompts, ops=chosen(prompts.ops, _generation(columns).ops, is_generation))


@_table(
    "aiconfigurator attention of encoders", "framework batch_size isl num_heads head_dim", _AICONFIGURATOR
)
def _encoder(columns: Columns) -> MeasuredRows:
    ops = build.attention_encoder(
        scheme_of(columns),
        **columns.sizes(batch="batch_size", length="isl", heads="num_heads", head_dim="head_dim"),
        # Devices differ in the release candidate of one version, which does not justify separate fits.
        variant=columns.joined("framework", "kernel_source"),
    )
    return measured_rows(ops, columns.numbers("latency_us"))


@_table(
    "aiconfigurator mixture of experts", "num_tokens hidden_size inter_size topk moe_ep_size", _AICONFIGURATOR
)
def _moe(columns: Columns) -> MeasuredRows:
    source = columns.texts("kernel_source")
    matrices = np.array([_NOT_GATED if "nongated" in name else _GATED for name in source.names])[source.row]
    ops = build.mixtures_of_experts(
        scheme_of(columns),
        op=columns.texts("distribution"),
        **columns.sizes(
            tokens="num_tokens",
            hidden="hidden_size",
            inter="inter_size",
            topk="topk",
            experts="num_experts",
            tensor_parallel="moe_tp_size",
            expert_parallel="moe_ep_size",
        ),
        matrices=matrices,
        variant=_library(columns),
    )
    return measured_rows(ops, columns.numbers("latency_us"))


_QUANTIZE_PASSES = {"compute_scale": 1.0, "scale_matrix": 1.5}
"""Traffic per element in units of 16 bits: one read for the scale, a read and an 8-bit write for scaling."""


@_table("aiconfigurator quantisation", "framework kernel_source op m k latency_us", _AICONFIGURATOR)
def _quantize(columns: Columns) -> MeasuredRows:
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
    return measured_rows(ops, columns.numbers("latency_us"), kept=~np.isnan(passes))


_MLA_SIZES = {"mla_gen_pre": (512.0, 128.0), "mla_gen_post": (128.0, 512.0)}
"""Sizes (n, k) of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): head 128, latent 512."""


@_table("aiconfigurator MLA products", "framework op num_tokens num_heads", _AICONFIGURATOR)
def _mla_bmm(columns: Columns) -> MeasuredRows:
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
    return measured_rows(ops, columns.numbers("latency_us"), kept=~np.isnan(sizes[:, 0]))


@_table("aiconfigurator collectives", "library op num_ranks message_bytes", _AICONFIGURATOR)
def _collectives(columns: Columns) -> MeasuredRows:
    op = relabelled(columns.texts("op"), {"alltoall": "all_to_all"})
    ranks, message = columns.numbers("num_ranks"), columns.numbers("message_bytes")
    # Bus bandwidths show that NCCL's tables list gathers by the whole result, and oneCCL's by the shard.
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
    return measured_rows(ops, columns.numbers("latency_us"))


@_table("aiconfigurator GEMM", "framework kernel_source dtype m n k latency_us", _AICONFIGURATOR)
def _gemm(columns: Columns) -> MeasuredRows:
    ops = build.matmuls(
        scheme_of(columns),
        batch=np.ones(len(columns)),
        **columns.sizes(m="m", n="n", k="k"),
        variant=_library(columns),
    )
    return measured_rows(ops, columns.numbers("latency_us"))
