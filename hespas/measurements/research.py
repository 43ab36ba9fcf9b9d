"""Tables of NeuSight, Vidur, AITER and the SCALE-Sim TPU study.

NeuSight (arXiv 2407.13853): PyTorch, float32 without TF32, CUDA events. Vidur (arXiv 2405.05465): layers of
language models, float16. AITER (AMD): the best kernel of a tuning sweep, warm caches. TPU v4: XLA operations,
float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.measurements.columns import Columns
from hespas.measurements.tidy import Dialect, Made, made_of, relabelled, scheme_of, usual_passes
from hespas.operations import Labels, Operations, build, canonical_op, chosen

__all__ = ["RESEARCH"]

_NORMS = frozenset({"layer_norm", "rms_norm", "softmax"})
_HEAVY: Mapping[str, float] = {"layer_norm": 8.0, "rms_norm": 4.0, "softmax": 12.0, "gelu": 12.0, "tanh": 8.0}
"""FLOPs per element where one operation is many; they decide nothing on a device that is memory bound."""


def _vectors(
    op: Labels, *, rows: FloatArray, width: FloatArray, scheme: Labels, variant: Labels
) -> Operations:
    """Vector operations; norms are told from elementwise ones by name."""
    names = tuple(canonical_op(name) for name in op.names)
    flops = np.array([_HEAVY.get(name, 1.0) for name in names])[op.row]
    made = build.elementwise(
        "vector",
        scheme,
        op=Labels(op.row, names),
        rows=rows,
        columns=width,
        passes=usual_passes(Labels(op.row, names)),
        flops_per_element=flops,
        variant=variant,
    )
    kinds = [_vector_kind(name) for name in names]
    distinct = tuple(dict.fromkeys(kinds))
    kind = np.array([distinct.index(each) for each in kinds], np.int32)[op.row]
    return replace(made, kind=Labels(kind, distinct))


def _vector_kind(name: str) -> str:
    if name in _NORMS:
        return "normalization"
    return {"max_pool": "pooling", "embedding": "gather"}.get(name, "vector")


def _neusight(columns: Columns) -> Made:
    op, scheme = columns.texts("op"), scheme_of(columns)
    b, m, n, k, width = (columns.numbers(name) for name in ("b", "m", "n", "k", "h"))
    # A linear layer has a bias: its kernels are others than those of a batched product.
    names = ("pytorch events", "pytorch events bmm", "pytorch events linear")
    number = {"bmm": 1, "linear": 2}
    variant = Labels.choice(names, np.array([number.get(name, 0) for name in op.names])[op.row])
    vectors = _vectors(op, rows=b, width=width, scheme=scheme, variant=variant)
    products = build.matmuls(scheme, batch=b, m=m, n=n, k=k, variant=variant)
    return made_of(chosen(vectors, products, variant.row > 0), columns.numbers("latency_us"))


def _neusight_conv(columns: Columns) -> Made:
    size, kernel = columns.numbers("Input_Size"), columns.numbers("Kernel_Szie")
    stride, padding = columns.numbers("Stride"), columns.numbers("Padding")
    ops = build.convolutions(
        scheme_of(columns),
        images=columns.numbers("B"),
        in_channels=columns.numbers("Input_Channel"),
        out_channels=columns.numbers("Output_Channel"),
        kernel=kernel,
        in_size=size,
        out_size=np.floor((size + 2 * padding - kernel) / stride) + 1,
        variant=Labels.constant("pytorch events", len(columns)),
    )
    return made_of(ops, columns.numbers("latency_us"))


def _vidur(columns: Columns) -> Made:
    op, scheme, count = columns.texts("op"), scheme_of(columns), len(columns)
    tokens, parallel = columns.numbers("num_tokens"), columns.numbers("num_tensor_parallel_workers")
    n, k = columns.numbers("n"), columns.numbers("k")
    variant = Labels.constant("vidur", count)
    products = build.matmuls(scheme, batch=np.ones(count), m=tokens, n=n, k=k, variant=variant)
    embedding, heads = columns.numbers("n_embd"), columns.numbers("n_head")
    place = {name: row for row, name in enumerate(op.names)}
    inner = columns.numbers("n_expanded_embd") / parallel
    width = np.where(op.row == place.get("mlp_act", -1), inner, embedding)
    rotated = (heads + columns.numbers("n_kv_head")) / parallel * embedding / np.maximum(heads, 1)
    width = np.where(op.row == place.get("attn_rope", -1), rotated, width)
    vectors = _vectors(op, rows=tokens, width=width, scheme=scheme, variant=variant)
    is_product = ~np.isnan(n) & ~np.isnan(k)
    return made_of(
        chosen(vectors, products, is_product),
        columns.numbers("latency_us_median"),
        spread_us=columns.numbers("latency_us_std"),
    )


def _vidur_network(columns: Columns) -> Made:
    """Collectives of one node or several; the system's wiring is part of the variant."""
    ops = build.collectives(
        Labels.constant("f16", len(columns)),
        op=relabelled(columns.texts("op"), {"send_recv": "permute"}),
        ranks=columns.numbers("num_workers"),
        message_bytes=columns.numbers("message_bytes"),
        ranks_per_node=columns.numbers("devices_per_node"),
        variant=columns.joined("system"),
    )
    spread = columns.numbers("latency_us_std")
    return made_of(ops, columns.numbers("latency_us_median"), spread_us=spread)


_AITER = {"fp8": "a8w8_fp8", "fp8_block": "a8w8_fp8_block", "i8": "a8w8"}
"""Activations come quantised already, unlike in the schemes of serving libraries."""


def _aiter(columns: Columns) -> Made:
    ops = build.matmuls(
        relabelled(scheme_of(columns), _AITER),
        batch=columns.numbers("batch"),
        m=columns.numbers("m"),
        n=columns.numbers("n"),
        k=columns.numbers("k"),
        variant=Labels.constant("aiter tuned", len(columns)),
    )
    return made_of(ops, columns.numbers("latency_us"))


def _aiter_moe(columns: Columns) -> Made:
    weights = relabelled(
        columns.texts("q_dtype_w"), {"float8_e4m3fnuz": "a8w8_fp8", "bfloat16": "bf16", "int8": "a8w8"}
    )
    gated = columns.numbers("use_g1u1") > 0
    ones = np.ones(len(columns))
    ops = build.mixtures_of_experts(
        weights,
        op=Labels.constant("balanced", len(columns)),
        tokens=columns.numbers("token"),
        hidden=columns.numbers("model_dim"),
        inter=columns.numbers("inter_dim"),
        topk=columns.numbers("topk"),
        experts=columns.numbers("expert"),
        tensor_parallel=ones,
        expert_parallel=ones,
        matrices=np.where(gated, 3.0, 2.0),
        variant=columns.joined("q_type"),
    )
    return made_of(ops, columns.numbers("latency_us"))


def _tpu_matmul(columns: Columns) -> Made:
    ops = build.matmuls(
        scheme_of(columns),
        batch=np.ones(len(columns)),
        m=columns.numbers("m"),
        n=columns.numbers("n"),
        k=columns.numbers("k"),
        variant=Labels.constant("xla op", len(columns)),
    )
    return made_of(ops, columns.numbers("latency_us"))


def _tpu_vectors(columns: Columns) -> Made:
    shapes = columns.texts("shape")
    extents = [_extents(text) for text in shapes.names]
    rank = np.array([len(shape) for shape in extents])[shapes.row]
    # XLA lays the longest dimension along the lanes wherever it stands; a norm reduces the last.
    last = np.array([shape[-1] if shape else np.nan for shape in extents])[shapes.row]
    longest = np.array([max(shape, default=np.nan) for shape in extents])[shapes.row]
    op = columns.texts("op")
    is_plain = np.array([_vector_kind(canonical_op(name)) == "vector" for name in op.names])[op.row]
    width = np.where(is_plain, longest, last)
    elements = columns.numbers("elements")
    variant = Labels.choice(("xla op", *(f"xla op {count}-D" for count in range(1, 9))), np.minimum(rank, 8))
    ops = _vectors(op, rows=elements / width, width=width, scheme=scheme_of(columns), variant=variant)
    return made_of(ops, columns.numbers("op_us_mean"), kept=~np.isnan(width))


def _extents(text: str) -> tuple[float, ...]:
    parts = text.replace("x", ",").split(",")
    return tuple(float(part) for part in parts) if all(part.strip().isdigit() for part in parts) else ()


RESEARCH = (
    Dialect(
        title="NeuSight operations",
        marks=frozenset({"hardware", "op", "b", "h", "m", "n", "k", "latency_us"}),
        make=_neusight,
        provenance="github.com/sitar-lab/NeuSight at 6945927d, MIT",
    ),
    Dialect(
        title="NeuSight convolutions",
        marks=frozenset({"Input_Channel", "Output_Channel", "Kernel_Szie"}),
        make=_neusight_conv,
        provenance="github.com/sitar-lab/NeuSight at 6945927d, MIT",
    ),
    Dialect(
        title="Vidur layers",
        marks=frozenset({"num_tokens", "num_tensor_parallel_workers", "n_embd", "latency_us_median"}),
        make=_vidur,
        provenance="github.com/microsoft/vidur at 7d475133, MIT, (c) Microsoft",
    ),
    Dialect(
        title="Vidur collectives",
        marks=frozenset({"system", "num_workers", "devices_per_node", "latency_us_median"}),
        make=_vidur_network,
        provenance="github.com/microsoft/vidur at 7d475133, MIT, (c) Microsoft",
        hardware_column="system",
    ),
    Dialect(
        title="AITER GEMM",
        marks=frozenset({"batch", "m", "n", "k", "n_entries", "tflops"}),
        make=_aiter,
        provenance="github.com/ROCm/aiter at e4048607, MIT, (c) AMD",
    ),
    Dialect(
        title="AITER mixture of experts",
        marks=frozenset({"token", "model_dim", "inter_dim", "expert", "use_g1u1"}),
        make=_aiter_moe,
        provenance="github.com/ROCm/aiter at e4048607, MIT, (c) AMD",
    ),
    Dialect(
        title="TPU v4 products",
        marks=frozenset({"m", "n", "k", "module_us", "n_exec"}),
        make=_tpu_matmul,
        provenance="arXiv 2603.22535, github.com/scalesim-project/SCALE-Sim-validation before d6b88ca2",
    ),
    Dialect(
        title="TPU v4 vector operations",
        marks=frozenset({"op", "shape", "op_us_mean", "module_us", "elements"}),
        make=_tpu_vectors,
        provenance="arXiv 2603.22535, github.com/scalesim-project/SCALE-Sim-validation before d6b88ca2",
    ),
)
"""The known tables."""
