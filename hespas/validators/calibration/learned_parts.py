"""What each learned model is fitted on, and the hyperparameters tried for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hespas.measurements import Measurements
from hespas.operations import KINDS

__all__ = [
    "EXPERTS",
    "FEW",
    "HEADS",
    "PARTS",
    "ROBUST",
    "SMALL",
    "WEIGHTS",
    "Form",
    "Loss",
    "Part",
    "rows_of_part",
]


Loss = Literal["squared_error", "absolute_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Hyperparameters of boosted trees. ``columns`` is the share of the columns that each split may use."""

    trees: int
    leaves: int
    learning_rate: float
    least_rows: int = 20
    loss: Loss = "squared_error"
    columns: float = 1.0


FEW = Form(trees=200, leaves=15, learning_rate=0.1, least_rows=10)
ROBUST = Form(trees=300, leaves=15, learning_rate=0.08, least_rows=10, loss="absolute_error", columns=0.4)
SMALL = Form(trees=150, leaves=31, learning_rate=0.15)
_LARGE = Form(trees=400, leaves=63, learning_rate=0.12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model: the rows of one table of these kinds and schemes (empty: all). ``overhead_ns`` is the part
    of the base that does not grow; ``forms`` are tried on shape groups left out. Rows that share the sizes
    ``layer`` (empty: all sizes) are one group: a layer is met with many token counts, and a new layer with
    none, so that is what must be kept apart.
    """

    name: str
    table: str
    kinds: tuple[str, ...]
    overhead_ns: float
    forms: tuple[Form, ...]
    schemes: tuple[str, ...] = ()
    layer: tuple[str, ...] = ()

    @property
    def support(self) -> tuple[str, ...]:
        """The dimensions of its kinds, each once."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in KINDS[kind]))


_GEMM = "aiconfigurator_gemm"
_BIG = (SMALL, _LARGE)
WEIGHTS = ("n", "k")
HEADS = ("batch", "heads", "kv_heads", "head_dim")
EXPERTS = ("hidden", "inter", "topk", "experts", "tensor_parallel", "expert_parallel")

PARTS: tuple[Part, ...] = (
    Part(
        name="gemm-bf16",
        table=_GEMM,
        kinds=("matmul",),
        schemes=("bf16",),
        overhead_ns=3e3,
        layer=WEIGHTS,
        forms=_BIG,
    ),
    Part(
        name="gemm-fp8",
        table=_GEMM,
        kinds=("matmul",),
        schemes=("fp8",),
        overhead_ns=12e3,
        layer=WEIGHTS,
        forms=_BIG,
    ),
    Part(
        name="gemm-fp8-block",
        table=_GEMM,
        kinds=("matmul",),
        schemes=("fp8_block",),
        overhead_ns=8e3,
        layer=WEIGHTS,
        forms=_BIG,
    ),
    Part(
        name="gemm-nvfp4",
        table=_GEMM,
        kinds=("matmul",),
        schemes=("nvfp4",),
        overhead_ns=8e3,
        layer=WEIGHTS,
        forms=_BIG,
    ),
    Part(
        name="gemm-weight-only",
        table=_GEMM,
        kinds=("matmul",),
        schemes=("int8_wo", "int4_wo", "sq"),
        overhead_ns=5e3,
        layer=WEIGHTS,
        forms=(SMALL, _LARGE),
    ),
    Part(
        name="mla-products",
        table="aiconfigurator_mla_bmm",
        kinds=("matmul",),
        overhead_ns=3e3,
        layer=("batch", "m"),
        forms=(FEW, ROBUST, SMALL),
    ),
    Part(
        name="gemm-f16",
        table="vidur_compute",
        kinds=("matmul",),
        overhead_ns=8e3,
        layer=WEIGHTS,
        forms=(SMALL, _LARGE),
    ),
    Part(name="gemm-f32", table="neusight_perop", kinds=("matmul",), overhead_ns=1e4, forms=_BIG),
    Part(
        name="gemm-aiter",
        table="aiter_gemm",
        kinds=("matmul",),
        overhead_ns=5e3,
        layer=WEIGHTS,
        forms=(SMALL, _LARGE),
    ),
    Part(
        name="gemm-tpu",
        table="tpuv4_matmul",
        kinds=("matmul",),
        overhead_ns=1e3,
        forms=(FEW, ROBUST),
    ),
    Part(
        name="conv-f32",
        table="neusight_conv",
        kinds=("convolution",),
        overhead_ns=1e4,
        layer=WEIGHTS,
        forms=(SMALL, _LARGE),
    ),
    Part(
        name="attention-context",
        table="aiconfigurator_attention_context",
        kinds=("attention.context",),
        overhead_ns=5e3,
        layer=HEADS,
        forms=_BIG,
    ),
    Part(
        name="attention-generation",
        table="aiconfigurator_attention_generation",
        kinds=("attention.generation",),
        overhead_ns=6e3,
        layer=HEADS,
        forms=_BIG,
    ),
    Part(
        name="attention-encoder",
        table="aiconfigurator_attention_encoder",
        kinds=("attention.encoder",),
        overhead_ns=5e3,
        layer=HEADS,
        forms=(SMALL, _LARGE),
    ),
    Part(name="moe", table="aiconfigurator_moe", kinds=("moe",), overhead_ns=2e4, layer=EXPERTS, forms=_BIG),
    Part(
        name="moe-aiter",
        table="aiter_fused_moe",
        kinds=("moe",),
        overhead_ns=2e4,
        layer=EXPERTS,
        forms=(FEW, ROBUST, SMALL),
    ),
    Part(
        name="vector-f32",
        table="neusight_perop",
        kinds=("vector", "normalization"),
        overhead_ns=5e3,
        forms=_BIG,
    ),
    Part(
        name="vector-f16",
        table="vidur_compute",
        kinds=("vector", "normalization", "gather"),
        overhead_ns=5e3,
        layer=("columns",),
        forms=(SMALL, _LARGE),
    ),
    Part(
        name="vector-tpu",
        table="tpuv4_nongemm",
        kinds=("vector", "normalization", "pooling"),
        overhead_ns=1e3,
        forms=(FEW, ROBUST),
    ),
    Part(
        name="quantize",
        table="aiconfigurator_quantize",
        kinds=("quantize",),
        overhead_ns=3e3,
        forms=(SMALL, _LARGE),
    ),
)
"""The models that ship with the package."""


def rows_of_part(part: Part, table: Measurements) -> Measurements:
    """The rows of a table that a part speaks of; none where it is another table."""
    if not table.name.startswith(part.table):
        return table.take(table.ops.kind.where())
    kept = table.take(table.ops.kind.where(*part.kinds))
    return kept.take(kept.ops.scheme.where(*part.schemes)) if part.schemes else kept
