"""Training settings: sequences, batches, number formats, recomputation, offload and overlap.

Names come from the frameworks, preferably from Megatron-Core. Sizes count sequences, tokens and
micro-batches; degrees of parallelism are in :mod:`hespas.generators.llm.layout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hespas.graph.errors import UsageError
from hespas.graph.workload import Launch

__all__ = [
    "LAYER_INPUT",
    "MODULES",
    "PRECISIONS",
    "SCHEDULES",
    "STYLES",
    "ModelPrecision",
    "Overlap",
    "Recompute",
    "ScheduleName",
    "Style",
    "Training",
    "offload_of",
    "precision_of",
    "recompute_of",
]

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SCHEDULES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")

Style = Literal["megatron", "torchtitan", "maxtext"]
"""Framework whose kernels a step launches: Megatron-Core with Transformer Engine, PyTorch FSDP2 under
torch.compile, or MaxText under XLA. They differ in fusion, in the saved activations, and in the number format
of accumulated gradients.
"""
STYLES: tuple[Style, ...] = ("megatron", "torchtitan", "maxtext")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrecision:
    """Number formats of a model.

    ``matmul`` is the format of the operands of linear layers, ``attention`` of operands inside attention,
    ``compute`` of activations between operations and of weights at use, ``gradient`` of accumulated
    gradients, and ``head`` of the output projection. ``quantizes`` is True if operands of matmuls are first
    converted from ``compute``. Scales of 8-bit formats (per tensor, row or block) are not counted in bytes;
    scales of mxfp8 and nvfp4 are part of the format.
    """

    name: str
    matmul: str
    compute: str = "bf16"
    attention: str = "bf16"
    gradient: str = "f32"
    head: str = "bf16"
    looks_first: bool = False
    """Scales are computed from the current tensor, whose maximum is needed before the conversion."""
    by_row: bool = False
    """Scales are per row along the contracted dimension: each layout of an operand has its own scales."""
    tf32: bool = False
    """Products of f32 round operands to TF32 on devices with such units; otherwise they are IEEE f32."""

    @property
    def quantizes(self) -> bool:
        """True if the operands of matrix products are converted to another format first."""
        return self.matmul != self.compute


PRECISIONS: Mapping[str, ModelPrecision] = {
    precision.name: precision
    for precision in (
        ModelPrecision(name="bf16", matmul="bf16"),
        ModelPrecision(name="fp16", matmul="f16", compute="f16", attention="f16", head="f16"),
        ModelPrecision(name="f32", matmul="f32", compute="f32", attention="f32", head="f32"),
        ModelPrecision(name="tf32", matmul="f32", compute="f32", attention="f32", head="f32", tf32=True),
        ModelPrecision(name="fp8-delayed", matmul="f8E4M3FN"),
        ModelPrecision(name="fp8-current", matmul="f8E4M3FN", looks_first=True),
        ModelPrecision(name="fp8-block", matmul="f8E4M3FN"),
        ModelPrecision(name="fp8-rowwise", matmul="f8E4M3FN", looks_first=True, by_row=True),
        ModelPrecision(name="fp8-attention", matmul="f8E4M3FN", attention="f8E4M3FN"),
        ModelPrecision(name="mxfp8", matmul="mxfp8"),
        ModelPrecision(name="nvfp4", matmul="nvfp4", looks_first=True),
        ModelPrecision(name="nvfp4-attention", matmul="nvfp4", attention="f8E4M3FN", looks_first=True),
        ModelPrecision(name="int8", matmul="i8", looks_first=True, by_row=True),
    )
}
"""Precisions by name, the values of ``--precision``. Names that end in ``-attention`` compute attention in
fp8. ``f32`` is IEEE f32, PyTorch's default; ``tf32`` is f32 with ``torch.backends.cuda.matmul.allow_tf32``.
"""

_ALIASES: Mapping[str, str] = {
    "fp32": "f32",
    "float32": "f32",
    "f32_full": "f32",
    "tensorfloat32": "tf32",
    "fp8": "fp8-current",
    "fp8-tensorwise": "fp8-current",
    "f16": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
}

MODULES = ("core_attn", "layernorm", "mlp_act", "moe_act", "mla_up_proj", "mlp", "moe", "qkv", "block")
"""Modules that can be recomputed in the backward pass, preferably by Megatron-Core's names: attention itself,
norms, activation functions of feed-forward blocks and of experts, up-projections of latent attention, whole
feed-forward blocks, whole mixtures, projections of queries, keys and values, whole layers.
"""


LAYER_INPUT = "decoder_layer_input"
"""MaxText's name of the input of a recomputed layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Recomputation of ``modules`` (names in :data:`MODULES`) in the backward pass, instead of saving their
    activations.

    It applies to the first ``layers`` layers of each stage (-1: all). Of these it applies to every
    ``every``-th layer, from the first one on. ``offloaded`` names modules, or tensors by MaxText's names,
    whose activations are moved to the host in the same layers. ``per_operation``: a layer saves only its
    input, the results of attention and of sums over tensor-parallel ranks, and the result of every second
    matmul from the first one on (torchtitan's selective checkpointing). In layers with grouped-query
    attention and gates it recomputes the keys, the output projection and the second matmul of gates.
    """

    modules: frozenset[str] = frozenset()
    layers: int = -1
    every: int = 1
    offloaded: frozenset[str] = frozenset()
    per_operation: bool = False

    def covers(self, module: str, index: int) -> bool:
        """Return True if a module of the ``index``-th layer of a stage is recomputed."""
        if self.layers >= 0 and index >= self.layers:
            return False
        return index % self.every == 0 and (module in self.modules or "block" in self.modules)

    def whole(self, index: int) -> bool:
        """Return True if the whole ``index``-th layer of a stage is recomputed."""
        return self.covers("block", index) and "block" in self.modules


_MOST_DIGITS = 10


def recompute_of(text: str) -> Recompute:
    """Parse the option for recomputation: ``none``, ``selective`` (only attention scores, arXiv 2205.05198),
    ``full``, ``full:21`` (21 layers of each stage), or names of modules separated by commas. Raises
    ``UsageError``.
    """
    name, _, count = text.partition(":")
    if name == "none" and not count:
        return Recompute()
    names = {"selective": ["core_attn"], "full": ["block"]}.get(name, name.split(","))
    unknown = [module for module in names if module not in MODULES]
    if name == "none":
        raise UsageError(f"recompute '{text}': none takes no number of layers", hint="write none")
    if unknown:
        raise UsageError(
            f"recompute '{text}': unknown module '{unknown[0]}'",
            hint="choose none, selective, full, full:LAYERS, or some of "
            f"{', '.join(MODULES)}, separated by commas",
        )
    if count and not (count.isdecimal() and len(count) < _MOST_DIGITS):
        raise UsageError(
            f"recompute '{text}': '{count}' is not a number of layers",
            hint=f"write the number of layers of each stage, such as {name}:21",
        )
    return Recompute(modules=frozenset(names), layers=int(count) if count else -1)


def offload_of(text: str, recompute: Recompute) -> tuple[bool, Recompute]:
    """Parse the option for offloading to the host, a comma-separated list.

    Return True if the list has ``optimizer``, and ``recompute`` with the offloaded activations added, which
    are named by :data:`MODULES` or :data:`LAYER_INPUT`. Raises ``UsageError``.
    """
    names = {name for name in text.split(",") if name}
    unknown = sorted(names.difference(MODULES, ("optimizer", LAYER_INPUT)))
    if unknown:
        raise UsageError(
            f"offload '{text}': unknown module '{unknown[0]}'",
            hint=f"choose some of optimizer, {LAYER_INPUT}, {', '.join(MODULES)}, separated by commas",
        )
    return "optimizer" in names, replace(recompute, offloaded=frozenset(names - {"optimizer"}))


def precision_of(name: str) -> ModelPrecision:
    """Return the number formats of a named precision. Raises ``UsageError`` for an unknown name."""
    precision = PRECISIONS.get(_ALIASES.get(name, name))
    if precision is None:
        raise UsageError(f"unknown precision '{name}'", hint=f"choose one of {', '.join(PRECISIONS)}")
    return precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Communication that overlaps computation.

    ``gradients``: reductions of gradients start when their bucket is complete. ``parameters``: gathers of
    sharded weights run in advance of their layer (distributed optimizer, FSDP). ``tensor``: collectives of
    tensor parallelism are divided into one piece per rank and pipelined with the adjacent matmuls.
    ``tensor_backward``: in the backward pass they run next to the matmul of the other gradient of a layer
    (arXiv 2205.05198). ``experts``: token dispatch overlaps the shared expert. ``pipeline``: sends between
    stages overlap the next computation. ``context``: keys are sent around the ring of context-parallel ranks
    during attention to the previous keys. ``microbatches``: token dispatch of a micro-batch overlaps the
    kernels of another one, whose pass runs at the same time (Megatron-Core:
    ``overlap_moe_expert_parallel_comm``).
    """

    gradients: bool = True
    parameters: bool = True
    tensor: bool = False
    tensor_backward: bool = True
    experts: bool = False
    pipeline: bool = True
    context: bool = True
    microbatches: bool = False

    @classmethod
    def none(cls) -> Overlap:
        """Return settings without any overlap."""
        return cls(gradients=False, parameters=False, tensor_backward=False, pipeline=False, context=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Settings of an optimizer step. ``global_batch`` and ``micro_batch`` are numbers of sequences of ``seq``
    tokens.

    ``lora_rank``: train only adapters of that rank (0: all weights). ``capacity`` is the capacity factor of
    experts (0: dropless). ``imbalance`` is the load of the busiest rank's experts relative to the mean; it
    has no effect with a capacity factor. ``causal``: attention is masked. ``grad_norm``: gradients are
    clipped by their global norm.
    """

    seq: int
    global_batch: int
    micro_batch: int = 1
    precision: ModelPrecision = field(default_factory=lambda: PRECISIONS["bf16"])
    recompute: Recompute = field(default_factory=Recompute)
    schedule: ScheduleName = "1f1b"
    style: Style = "megatron"
    overlap: Overlap = field(default_factory=Overlap)
    lora_rank: int = 0
    capacity: float = 0.0
    imbalance: float = 1.0
    causal: bool = True
    grad_norm: bool = True
    optimizer_offload: bool = False
    pure_16bit: bool = False
    """Master weights, gradients and moments are 16-bit too."""
    fused_loss: bool = True
    """The loss is one kernel whose gradient replaces the logits; otherwise 32-bit copies are made."""
    compiled: bool = True
    """Layers are compiled: values that are not needed by a gradient are not saved (torchtitan)."""
    narrow_weights: bool = True
    """Weights of linear layers exist only in the format of products if possible; otherwise in
    both formats.
    """
    transposed_weights: bool = True
    """Weights in the format of products are also stored transposed, for the gradients of inputs; mxfp8, whose
    blocks are rows, always needs both.
    """
    lora_attention_only: bool = False
    """Only the linear layers of attention have adapters."""
    launch: Launch = "kernels"
    """Launch mode of kernels; an XLA program (MaxText) is launched as a whole."""
    fused_gradients: bool = True
    """Matmuls of Megatron-Core add to accumulated gradients; otherwise a separate kernel adds their results,
    as in Megatron-LM with 16-bit gradients before 2023 (its fused kernel required 32-bit gradients).
    """
    library: str = ""
    """Library of fused attention (:data:`hespas.hardware.kernel_shares.LIBRARIES`); empty: by ``style``."""

    @property
    def dispatch_ratio(self) -> float:
        """Return the number of token copies that are sent to experts, divided by the number that the router
        assigns. It is less than 1 if tokens are dropped.
        """
        return self.capacity if self.capacity > 0 else 1.0

    @property
    def expert_load(self) -> float:
        """Ratio of two numbers of token copies: the copies that the experts of the busiest rank process, and
        the mean number of copies that the router assigns to a rank.

        With a capacity factor all ranks process the same number, because copies are padded or dropped.
        """
        return self.capacity if self.capacity > 0 else self.imbalance
