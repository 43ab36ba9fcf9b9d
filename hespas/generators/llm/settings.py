"""How a model is trained: sequences, batches, number formats, what is computed twice, what overlaps.

Names are those of the frameworks: Megatron-Core's where it has one. Sizes are counts of sequences, tokens and
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
    "Overlap",
    "Precision",
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
"""Whose kernels a step launches: Megatron-Core with Transformer Engine, PyTorch FSDP2 under torch.compile, or
MaxText under XLA. They differ in what is fused, what is kept for the backward pass, and in which number
format gradients add up.
"""
STYLES: tuple[Style, ...] = ("megatron", "torchtitan", "maxtext")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Number formats: ``matmul`` of the operands of matrix products in linear layers, ``attention`` of those
    inside attention, ``compute`` of activations between operations and of weights as they are used,
    ``gradient`` of accumulated gradients, ``head`` of the output projection.

    ``quantizes``: operands of products are converted from ``compute`` first. Bytes of scales of 8-bit
    formats, one for a tensor, a row or a block, are not counted; those of mxfp8 and nvfp4 are part of the
    format.
    """

    name: str
    matmul: str
    compute: str = "bf16"
    attention: str = "bf16"
    gradient: str = "f32"
    head: str = "bf16"
    looks_first: bool = False
    """Scales are of what is converted, so that its largest value is looked for before."""
    by_row: bool = False
    """Scales are of rows along the sum of a product: each layout of an operand has its own."""
    tf32: bool = False
    """Products of f32 round operands to TF32 on devices with such units, else they are IEEE f32."""

    @property
    def quantizes(self) -> bool:
        """Whether operands of products are converted first."""
        return self.matmul != self.compute


PRECISIONS: Mapping[str, Precision] = {
    each.name: each
    for each in (
        Precision(name="bf16", matmul="bf16"),
        Precision(name="fp16", matmul="f16", compute="f16", attention="f16", head="f16"),
        Precision(name="f32", matmul="f32", compute="f32", attention="f32", head="f32"),
        Precision(name="tf32", matmul="f32", compute="f32", attention="f32", head="f32", tf32=True),
        Precision(name="fp8-delayed", matmul="f8E4M3FN"),
        Precision(name="fp8-current", matmul="f8E4M3FN", looks_first=True),
        Precision(name="fp8-block", matmul="f8E4M3FN"),
        Precision(name="fp8-rowwise", matmul="f8E4M3FN", looks_first=True, by_row=True),
        Precision(name="fp8-attention", matmul="f8E4M3FN", attention="f8E4M3FN"),
        Precision(name="mxfp8", matmul="mxfp8"),
        Precision(name="nvfp4", matmul="nvfp4", looks_first=True),
        Precision(name="nvfp4-attention", matmul="nvfp4", attention="f8E4M3FN", looks_first=True),
        Precision(name="int8", matmul="i8", looks_first=True, by_row=True),
    )
}
"""By name, as ``--precision`` takes them. Those that end in ``-attention`` compute attention in fp8. ``f32``
is IEEE f32, PyTorch's default; ``tf32`` is f32 with ``torch.backends.cuda.matmul.allow_tf32``.
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
"""What may be computed again in the backward pass, by Megatron-Core's names where it has one: the product of
scores and values, norms, activations of feed-forward blocks and of experts, up-projections of latent
attention, whole feed-forward blocks, whole mixtures, projections of queries, keys and values, whole layers.
"""


LAYER_INPUT = "decoder_layer_input"
"""The input of a layer that is computed again, by MaxText's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What is computed again in the backward pass: ``modules`` of :data:`MODULES`, in the first ``layers`` of
    each stage (-1: in all). ``every``: only in each so-manieth layer. ``offloaded``: what is moved to the
    host meanwhile instead, of as many layers, by module or by what MaxText calls a tensor.
    ``per_operation``: of each layer only its input, the results of attention and of every other matrix
    product are kept (torchtitan's selective checkpointing).
    """

    modules: frozenset[str] = frozenset()
    layers: int = -1
    every: int = 1
    offloaded: frozenset[str] = frozenset()
    per_operation: bool = False

    def covers(self, module: str, place: int) -> bool:
        """Whether a module of the ``place``-th layer of a stage is computed again."""
        if self.layers >= 0 and place >= self.layers:
            return False
        return place % self.every == 0 and (module in self.modules or "block" in self.modules)

    def whole(self, place: int) -> bool:
        """Whether all of the ``place``-th layer is computed again."""
        return self.covers("block", place) and "block" in self.modules


_MOST_DIGITS = 10


def recompute_of(text: str) -> Recompute:
    """``none``, ``selective`` (the product of scores and values, arXiv 2205.05198), ``full``, ``full:21``
    (so many layers of each stage) or names of modules with commas. Raises ``UsageError``.
    """
    name, _, count = text.partition(":")
    if name == "none" and not count:
        return Recompute()
    names = {"selective": ["core_attn"], "full": ["block"]}.get(name, name.split(","))
    unknown = [each for each in names if each not in MODULES]
    if unknown or (count and not (count.isdecimal() and len(count) < _MOST_DIGITS)):
        raise UsageError(
            f"recompute '{text}': {unknown[0] if unknown else count} is nothing that can be computed again",
            hint=f"none, selective, full, full:LAYERS, or some of {', '.join(MODULES)} with commas",
        )
    return Recompute(modules=frozenset(names), layers=int(count) if count else -1)


def offload_of(text: str, recompute: Recompute) -> tuple[bool, Recompute]:
    """Whether the ``optimizer`` of a list with commas moves to the host, and what of activations does: names
    of :data:`MODULES`, of as many layers as are computed again. Raises ``UsageError``.
    """
    names = {each for each in text.split(",") if each}
    unknown = sorted(names.difference(MODULES, ("optimizer", LAYER_INPUT)))
    if unknown:
        raise UsageError(
            f"offload '{text}': {unknown[0]} is nothing that can be moved to the host",
            hint=f"some of optimizer, {LAYER_INPUT}, {', '.join(MODULES)} with commas",
        )
    away = frozenset(names - {"optimizer"})
    return "optimizer" in names, replace(recompute, offloaded=away)


def precision_of(name: str) -> Precision:
    """Return the number formats of that name. Raises ``UsageError``."""
    found = PRECISIONS.get(_ALIASES.get(name, name))
    if found is None:
        raise UsageError(f"no precision '{name}'", hint=f"one of {', '.join(PRECISIONS)}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What runs beside computation, each switchable.

    ``gradients``: reductions of gradients start when the last of their bucket is there; ``parameters``: the
    gathers of sharded weights run ahead of their layer (distributed optimizer, FSDP); ``tensor``: collectives
    of tensor parallelism are split in as many parts as there are ranks and pipelined with the products beside
    them; ``experts``: tokens travel to experts beside the shared expert; ``pipeline``: messages between
    stages leave while the stage computes on; ``context``: keys go round a ring of context ranks beside
    attention to those before.
    """

    gradients: bool = True
    parameters: bool = True
    tensor: bool = False
    experts: bool = False
    pipeline: bool = True
    context: bool = True

    @classmethod
    def none(cls) -> Overlap:
        """Nothing overlaps."""
        return cls(gradients=False, parameters=False, pipeline=False, context=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One optimizer step. ``global_batch`` and ``micro_batch`` count sequences of ``seq`` tokens.

    ``lora_rank``: only adapters of that rank beside linear layers are trained (0: all weights). ``capacity``
    is the capacity factor of experts (0: dropless), ``imbalance`` the load of the busiest rank's experts over
    the mean, which says nothing where each expert works on all its capacity. ``causal``: attention is
    masked. ``grad_norm``: gradients are clipped by their global norm.
    """

    seq: int
    global_batch: int
    micro_batch: int = 1
    precision: Precision = field(default_factory=lambda: PRECISIONS["bf16"])
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
    """The loss is one kernel whose gradient takes the place of the logits; else 32-bit copies are made."""
    compiled: bool = True
    """Layers are compiled: what no gradient needs is not kept (torchtitan)."""
    narrow_weights: bool = True
    """Weights of linear layers exist in the format of products only, where they can; else beside others."""
    transposed_weights: bool = True
    """Weights in the format of products are kept transposed too, for the gradients of inputs; mxfp8, whose
    blocks are rows, always needs it.
    """
    lora_attention_only: bool = False
    """Adapters stand beside the linear layers of attention only."""
    launch: Launch = "kernels"
    """Way in which the host launches kernels; a program of XLA (MaxText) is launched as a whole."""
    library: str = ""
    """Library of fused attention (:data:`hespas.hardware.kernel_shares.LIBRARIES`); empty: by ``style``."""

    @property
    def expert_room(self) -> float:
        """Copies of tokens that travel to experts, over those that are routed."""
        return self.capacity if self.capacity > 0 else 1.0

    @property
    def expert_load(self) -> float:
        """Copies of tokens that the experts of the busiest rank work on, over the mean of those routed: with
        a capacity factor all ranks work on as many, filled up or cut off.
        """
        return self.capacity if self.capacity > 0 else self.imbalance
