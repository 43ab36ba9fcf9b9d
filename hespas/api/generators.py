"""Generators from plain settings: each function returns a generator, whose workload :func:`generate` makes.

The settings are the options of ``hespas generate``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Literal

from hespas.api.arguments import checked
from hespas.generators.llm.settings import ScheduleName, Style
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.hints import AtLeast, AtMost, NonNegativeInt, Option, PositiveInt
from hespas.graph.workload import Launch

if TYPE_CHECKING:
    from hespas.generators.collectives import CollectiveBenchmark
    from hespas.generators.dlrm import DlrmStep
    from hespas.generators.eager import EagerStep
    from hespas.generators.llm import Layout, LlmStep, Model, Overlap, ServingStep, Training
    from hespas.generators.random_dag import RandomJob
    from hespas.generators.vision import VisionModel, VisionStep

__all__ = [
    "ExpertCapacity",
    "ExpertImbalance",
    "GradientPrecision",
    "LlmModel",
    "SequenceLength",
    "StepFramework",
    "StepLaunch",
    "StepOverlap",
    "StepPrecision",
    "collective_benchmark",
    "dit_step",
    "dlrm_step",
    "eager_step",
    "llm_step",
    "random_job",
    "vit_step",
]

_LAYOUT, _STEP, _FRAMEWORK, _SERVING = "Layout", "Step", "Framework", "Serving"
_OVERLAPS = (
    "gradients", "parameters", "tensor", "tensor_backward", "experts", "pipeline", "context", "microbatches",
)  # fmt: skip

LlmModel = Annotated[
    "str | Model",
    Option(
        "Built-in model or model file.",
        metavar="MODEL|FILE.toml",
        completes="models",
        is_argument=True,
        access="reads",
        is_required=False,
        is_text=True,
    ),
]


def _degree(help_text: str, panel: str = _LAYOUT, *, metavar: str = "N") -> Option:
    return Option(help_text, metavar=metavar, panel=panel)


_Dp = Annotated[PositiveInt, _degree("Set data-parallel ranks.")]
_Tp = Annotated[PositiveInt, _degree("Set tensor-parallel ranks.")]
_Pp = Annotated[PositiveInt, _degree("Set pipeline-parallel stages.")]
_Vp = Annotated[PositiveInt, _degree("Set virtual pipeline stages per rank.")]
_Cp = Annotated[PositiveInt, _degree("Set context-parallel ranks.")]
_Ep = Annotated[PositiveInt, _degree("Set expert-parallel ranks.")]
_Etp = Annotated[PositiveInt, _degree("Set tensor-parallel ranks within experts.")]
_ExpertNode = Annotated[
    NonNegativeInt, _degree("Send each token once per node of N ranks (0: directly to its experts).")
]
_Zero = Annotated[
    Annotated[int, AtLeast(0), AtMost(3)] | None,
    Option(
        "Set the ZeRO stage: shard nothing (0), optimizer states (1), gradients (2), weights (3: FSDP).",
        metavar="N",
        panel=_LAYOUT,
        default_text="1",
    ),
]
_Fsdp = Annotated[
    bool, Option("Shard weights, gradients and optimizer states (`zero=3`).", flag="fsdp", panel=_LAYOUT)
]
_DataShard = Annotated[NonNegativeInt, _degree("Shard states over N data-parallel ranks (0: all).")]
_SequenceParallel = Annotated[
    bool,
    Option(
        "Shard activations outside tensor-parallel regions.",
        flag="sequence-parallel/no-sequence-parallel",
        panel=_LAYOUT,
    ),
]
_Ring = Annotated[
    bool,
    Option(
        "Pass keys and values around a ring instead of gathering them.", flag="ring-attention", panel=_LAYOUT
    ),
]
_Exchange = Annotated[
    bool,
    Option(
        "Exchange tokens for heads between context-parallel ranks (Ulysses).",
        flag="context-all-to-all",
        panel=_LAYOUT,
    ),
]
SequenceLength = Annotated[
    PositiveInt, _degree("Set the sequence length in tokens.", _STEP, metavar="TOKENS")
]
_GlobalBatch = Annotated[
    NonNegativeInt, _degree("Set sequences per step (0: one micro-batch per data-parallel rank).", _STEP)
]
_MicroBatch = Annotated[PositiveInt, _degree("Set sequences per micro-batch.", _STEP)]
StepPrecision = Annotated[
    str,
    Option(
        "Set the precision: bf16, fp16, f32 (IEEE), tf32, fp8-*, mxfp8, nvfp4, int8.",
        metavar="NAME",
        panel=_STEP,
    ),
]
GradientPrecision = Annotated[
    Literal["f32", "16bit"],
    Option("Accumulate and reduce gradients in f32, or in the 16-bit format of activations.", panel=_STEP),
]
_Recompute = Annotated[
    str,
    Option("Recompute activations in the backward pass.", metavar="none|selective|full|MODULES", panel=_STEP),
]
_Offload = Annotated[
    str,
    Option(
        "Offload optimizer states or saved activations to the host.", metavar="optimizer|MODULES", panel=_STEP
    ),
]
_Schedule = Annotated[ScheduleName, Option("Set the pipeline schedule.", panel=_STEP)]
_Lora = Annotated[NonNegativeInt, _degree("Train LoRA adapters of this rank (0: all weights).", _STEP)]
StepFramework = Annotated[Style, Option("Model the kernels of this framework.", panel=_FRAMEWORK)]
StepLaunch = Annotated[
    Launch,
    Option(
        "Launch kernels one by one, partly in CUDA graphs, or the whole step as one CUDA graph.",
        panel=_FRAMEWORK,
    ),
]
StepOverlap = Annotated[
    str,
    Option(
        f"Overlap communication with computation: none, all, or a list of {', '.join(_OVERLAPS)}.",
        metavar="LIST",
        panel=_FRAMEWORK,
    ),
]
ExpertCapacity = Annotated[
    float,
    AtLeast(0),
    Option("Set the capacity factor of experts (0: dropless).", metavar="X", panel=_FRAMEWORK),
]
ExpertImbalance = Annotated[
    float,
    AtLeast(1),
    Option("Set the load of the busiest experts relative to the mean.", metavar="X", panel=_FRAMEWORK),
]
_Phase = Annotated[
    Literal["train", "prefill", "decode", "mixed", "speculative", "disaggregated"],
    Option(
        "Generate a training step, or a serving step: prefill of prompts, decode, mixed (decode with a chunk "
        "of a prompt), speculative, or disaggregated (prefill and decode on separate ranks).",
        panel=_SERVING,
    ),
]
_Batch = Annotated[PositiveInt, _degree("Set concurrent sequences per replica.", _SERVING)]
_Context = Annotated[NonNegativeInt, _degree("Set cached tokens per sequence.", _SERVING, metavar="TOKENS")]
_Prompt = Annotated[
    PositiveInt,
    _degree("Set the length of a prompt, or of a prompt chunk, in tokens.", _SERVING, metavar="TOKENS"),
]
_SpeculativeTokens = Annotated[PositiveInt, _degree("Set speculative tokens per sequence.", _SERVING)]
_KvCacheDtype = Annotated[
    str, Option("Set the element type of the KV cache.", metavar="TYPE", panel=_SERVING)
]
_BlockSize = Annotated[PositiveInt, _degree("Set tokens per KV-cache block.", _SERVING)]


_SERVING_PARAMETERS: Mapping[str, frozenset[str]] = {
    "prefill": frozenset({"batch", "prompt", "kv_cache_dtype", "block_size"}),
    "decode": frozenset({"batch", "context", "kv_cache_dtype", "block_size"}),
    "mixed": frozenset({"batch", "context", "prompt", "kv_cache_dtype", "block_size"}),
    "speculative": frozenset({"batch", "context", "num_speculative_tokens", "kv_cache_dtype", "block_size"}),
    "disaggregated": frozenset({"batch", "context", "prompt", "kv_cache_dtype", "block_size"}),
}
"""Phase of serving -> parameters that it reads, besides the common ones."""
_COMMON_PARAMETERS = frozenset(
    {"model", "dp", "tp", "pp", "vp", "cp", "ep", "etp", "expert_node", "precision", "phase", "diagnostics"}
)
"""Parameters of training and serving. Serving steps refuse ``vp`` and ``cp`` above 1."""


@checked(
    LlmStep="hespas.generators.llm:LlmStep",
    Model="hespas.generators.llm:Model",
    ServingStep="hespas.generators.llm:ServingStep",
)
def llm_step(
    model: LlmModel,
    *,
    dp: _Dp = 1,
    tp: _Tp = 1,
    pp: _Pp = 1,
    vp: _Vp = 1,
    cp: _Cp = 1,
    ep: _Ep = 1,
    etp: _Etp = 1,
    expert_node: _ExpertNode = 0,
    zero: _Zero = None,
    fsdp: _Fsdp = False,
    data_shard: _DataShard = 0,
    sequence_parallel: _SequenceParallel = True,
    ring_attention: _Ring = False,
    context_all_to_all: _Exchange = False,
    seq: SequenceLength = 4096,
    global_batch: _GlobalBatch = 0,
    micro_batch: _MicroBatch = 1,
    precision: StepPrecision = "bf16",
    gradient_precision: GradientPrecision = "f32",
    recompute: _Recompute = "none",
    offload: _Offload = "",
    schedule: _Schedule = "1f1b",
    lora_rank: _Lora = 0,
    framework: StepFramework = "megatron",
    launch: StepLaunch = "kernels",
    overlap: StepOverlap = "gradients,parameters,tensor_backward,pipeline,context",
    capacity: ExpertCapacity = 0.0,
    imbalance: ExpertImbalance = 1.0,
    phase: _Phase = "train",
    batch: _Batch = 1,
    context: _Context = 1024,
    prompt: _Prompt = 1024,
    num_speculative_tokens: _SpeculativeTokens = 4,
    kv_cache_dtype: _KvCacheDtype = "bf16",
    block_size: _BlockSize = 16,
    diagnostics: Diagnostics | None = None,
) -> LlmStep | ServingStep:
    """Return a training or serving step of an LLM on any number of ranks.

    ``model`` is a model, the name of a built-in one or a model file. Settings that change nothing at these
    degrees are reported as warnings. Raises ``UsageError`` for contradicting settings, and for a setting
    that ``phase`` does not read.

    Examples:
        >>> step = hespas.llm_step("llama-3-8b", tp=8, seq=4096, global_batch=8)
        >>> step.account().peak_memory_bytes
        20853760000.0
    """
    from hespas.generators.llm import (
        Layout,
        LlmStep,
        ServingStep,
        Training,
        load_model,
        offload_of,
        precision_of,
        recompute_of,
    )

    settings = dict(locals())
    _refuse_unread({name: settings[name] for name in _DEFAULTS}, phase)
    level = 1 if zero is None else zero
    layout = Layout(
        dp=dp, tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, etp=etp, zero=3 if fsdp else level, shard=data_shard,
        sequence_parallel=sequence_parallel, ring_attention=ring_attention,
        context_all_to_all=context_all_to_all, expert_node=expert_node,
    )  # fmt: skip
    chosen, numbers = load_model(model), precision_of(precision)
    if phase != "train":
        return ServingStep(
            model=chosen, layout=layout, phase=phase, batch=batch, context=context,
            prompt=prompt, drafts=num_speculative_tokens, cache=kv_cache_dtype, page=block_size,
            precision=numbers,
        )  # fmt: skip
    if fsdp and zero not in {None, 3}:
        raise UsageError(
            f"`fsdp` contradicts `zero={zero}`: it is `zero=3`",
            code="fsdp-is-zero-3",
            hint="give one of them",
        )
    if gradient_precision == "16bit":
        if numbers.compute == "f32":
            raise UsageError(
                f"`gradient_precision=16bit` contradicts `precision={precision}`: activations have 32 bits",
                code="gradients-need-16-bits",
                hint="choose a precision of 16 bits or less, such as `precision=bf16`",
            )
        numbers = replace(numbers, gradient=numbers.compute)
    optimizer_offload, recomputed = offload_of(offload, recompute_of(recompute))
    training = Training(
        seq=seq, global_batch=global_batch or dp * micro_batch, micro_batch=micro_batch,
        precision=numbers, recompute=recomputed, optimizer_offload=optimizer_offload, schedule=schedule,
        style=framework, overlap=_overlap_of(overlap, chosen, layout, lora_rank), lora_rank=lora_rank,
        capacity=capacity, imbalance=imbalance, launch=launch,
    )  # fmt: skip
    for setting, reason in _settings_without_effect(layout, training, zero=zero, overlap=overlap):
        _warn_no_effect(diagnostics, setting, reason)
    return LlmStep(model=chosen, layout=layout, training=training)


_DEFAULTS: Mapping[str, object] = {
    name: parameter.default for name, parameter in inspect.signature(llm_step).parameters.items()
}


def _refuse_unread(settings: Mapping[str, object], phase: str) -> None:
    """Raise ``UsageError`` for settings that differ from their defaults and that the phase does not read."""
    read: Set[str]
    if phase == "train":
        read = settings.keys() - frozenset[str]().union(*_SERVING_PARAMETERS.values())
        code, reason = "serving-only", "available for serving steps only"
        hint = "leave it out, or set a `phase` of serving"
    else:
        read = _COMMON_PARAMETERS | _SERVING_PARAMETERS[phase]
        code, reason, hint = "phase-reads", f"not available with `phase={phase}`", "leave it out"
    unread = [
        f"`{name}=False`" if value is False else f"`{name}`"
        for name, value in settings.items()
        if name not in read and value != _DEFAULTS[name]
    ]
    if unread:
        others = f" (nor {', '.join(unread[1:])})" if len(unread) > 1 else ""
        raise UsageError(f"{unread[0]}: {reason}{others}", code=code, hint=hint)


def _settings_without_effect(
    layout: Layout, training: Training, *, zero: int | None, overlap: str
) -> list[tuple[str, str]]:
    """Return the settings that have no effect at these degrees of parallelism, each with the reason. They are
    warnings and not errors, so that a sweep over degrees can use the same settings. Settings that a model or
    layout does not allow raise errors elsewhere.
    """
    overlaps, is_named = training.overlap, overlap != "all"
    one_rank = layout.replicas == layout.edp == 1
    has_experts = layout.ep > 1 or layout.etp > 1
    one_cp = "one context-parallel rank has all keys"
    rules = (
        (
            layout.tp == 1 and not layout.sequence_parallel,
            "sequence_parallel=False", "one tensor-parallel rank has all rows",
        ),
        (
            layout.tp == 1 and overlaps.tensor and is_named,
            "overlap", "tensor: one tensor-parallel rank has no communication",
        ),
        (layout.cp == 1 and layout.ring_attention, "ring_attention", one_cp),
        (layout.cp == 1 and layout.context_all_to_all, "context_all_to_all", one_cp),
        (
            layout.ep == 1 and layout.expert_node > 0,
            "expert_node", "one expert-parallel rank has all experts",
        ),
        (
            layout.pp == 1 and training.schedule != "1f1b",
            "schedule", "one stage runs each micro-batch forward and backward",
        ),
        (
            one_rank and layout.zero < 2 and zero is not None,
            "zero", "one data-parallel rank has the whole state",
        ),
        (
            layout.zero > 1 and not overlaps.gradients,
            "overlap", "gradients: sharded gradients are always reduced after each layer",
        ),
        (
            overlaps.experts and is_named and not has_experts,
            "overlap", "experts: tokens stay on their rank",
        ),
        (
            training.style == "maxtext" and training.launch != "kernels",
            "launch", "XLA launches the whole program at once",
        ),
    )  # fmt: skip
    return [(setting, reason) for is_idle, setting, reason in rules if is_idle]


def _warn_no_effect(diagnostics: Diagnostics | None, setting: str, reason: str) -> None:
    """Report a setting that does not change the workload."""
    if diagnostics is not None:
        diagnostics.warning("generate.no-effect", f"`{setting}`", f"has no effect: {reason}")


def _overlap_of(text: str, model: Model, layout: Layout, lora_rank: int) -> Overlap:
    """Parse ``overlap``. ``all`` selects every overlap that the model and its layout can have."""
    from hespas.generators.llm import Overlap
    from hespas.generators.llm.layout import possible_overlap

    if text == "all":
        every = Overlap(**{field.name: True for field in fields(Overlap)})
        return possible_overlap(every, model, layout, lora_rank)
    names = [] if text == "none" else text.split(",")
    unknown = [name for name in names if name not in _OVERLAPS]
    if unknown:
        raise UsageError(
            f"`overlap={text}`: unknown overlap {unknown[0]!r}",
            hint=f"give none, all, or a list of {', '.join(_OVERLAPS)}",
        )
    return Overlap(**{field.name: field.name in names for field in fields(Overlap)})


_Replicas = Annotated[PositiveInt, Option("Set data-parallel ranks.", metavar="N")]
_Images = Annotated[PositiveInt, Option("Set images per rank.", metavar="N")]
_Sharded = Annotated[bool, Option("Shard weights, gradients and optimizer states.", flag="fsdp")]
_Type = Annotated[str, Option("Set the element type: bf16, f16, f32 (IEEE) or tf32.", metavar="TYPE")]
_Side = Annotated[NonNegativeInt, Option("Set the image side in pixels (0: the model's).", metavar="PIXELS")]
_Layers = Annotated[NonNegativeInt, Option("Set the number of blocks (0: the model's).", metavar="N")]


@checked(VisionStep="hespas.generators.vision:VisionStep")
def vit_step(
    *,
    dp: _Replicas = 1,
    batch: _Images = 1,
    fsdp: _Sharded = False,
    dtype: _Type = "bf16",
    image: _Side = 0,
    layers: _Layers = 0,
    diagnostics: Diagnostics | None = None,
) -> VisionStep:
    """Return a training step of a vision transformer, ViT-B/16. Raises ``UsageError`` for sizes beyond the
    limits.

    Examples:
        >>> hespas.generate(hespas.vit_step(dp=8, batch=64))
        <GenerationResult: vit-b-16-dp8: 8 ranks in 1 class>
    """
    from hespas.generators.vision import VisionStep, vit_b_16

    model = _sized(vit_b_16(), image, layers)
    _warn_of_fsdp(dp, fsdp=fsdp, diagnostics=diagnostics)
    return VisionStep(model=model, dp=dp, batch=batch, fsdp=fsdp, dtype=dtype)


@checked(VisionStep="hespas.generators.vision:VisionStep")
def dit_step(
    *,
    dp: _Replicas = 1,
    batch: _Images = 1,
    fsdp: _Sharded = False,
    dtype: _Type = "bf16",
    image: _Side = 0,
    layers: _Layers = 0,
    diagnostics: Diagnostics | None = None,
) -> VisionStep:
    """Return a training step of the diffusion transformer DiT-XL/2. Its image is a latent of 32 x 32. Raises
    ``UsageError`` for sizes beyond the limits.

    Examples:
        >>> hespas.generate(hespas.dit_step(dp=8, batch=64))
        <GenerationResult: dit-xl-2-dp8: 8 ranks in 1 class>
    """
    from hespas.generators.vision import VisionStep, dit_xl_2

    model = _sized(dit_xl_2(), image, layers)
    _warn_of_fsdp(dp, fsdp=fsdp, diagnostics=diagnostics)
    return VisionStep(model=model, dp=dp, batch=batch, fsdp=fsdp, dtype=dtype)


def _sized(model: VisionModel, image: int, layers: int) -> VisionModel:
    """Return a model with another image side and number of blocks, where they are not 0."""
    return replace(model, image=image or model.image, layers=layers or model.layers)


def _warn_of_fsdp(dp: int, *, fsdp: bool, diagnostics: Diagnostics | None) -> None:
    if fsdp and dp == 1:
        _warn_no_effect(diagnostics, "fsdp", "one data-parallel rank has the whole state")


@checked(EagerStep="hespas.generators.eager:EagerStep")
def eager_step(
    model: Annotated[
        str,
        Option(
            "Model: bert-large, gpt2-large, gpt3-2.7b, gpt3-xl, opt-1.3b or switch-xl-4.",
            metavar="MODEL",
            is_argument=True,
        ),
    ],
    *,
    batch: Annotated[PositiveInt, Option("Set sequences per step.", metavar="N")] = 1,
    seq: Annotated[PositiveInt, Option("Set the sequence length in tokens.", metavar="TOKENS")] = 512,
    train: Annotated[bool, Option("Add the backward pass (no optimizer).", flag="train")] = False,
    compiled: Annotated[
        bool, Option("Fuse between matmuls, as torch.compile does.", flag="compiled")
    ] = False,
) -> EagerStep:
    """Return a transformer on one device as PyTorch runs it eagerly in float32. Raises ``UsageError`` for an
    unknown model.

    Examples:
        >>> hespas.generate(hespas.eager_step("gpt2-large", batch=1, seq=128))
        <GenerationResult: gpt2-large-forward-128-1: 1 rank in 1 class>
    """
    from hespas.generators.eager import EagerStep, eager_model

    return EagerStep(model=eager_model(model), batch=batch, length=seq, training=train, compiled=compiled)


@checked(DlrmStep="hespas.generators.dlrm:DlrmStep")
def dlrm_step(
    *,
    ranks: Annotated[PositiveInt, Option("Set the number of ranks.", metavar="N")] = 8,
    batch: Annotated[PositiveInt, Option("Set samples per rank.", metavar="N")] = 2048,
    tables: Annotated[PositiveInt, Option("Set the number of embedding tables.", metavar="N")] = 64,
    rows: Annotated[PositiveInt, Option("Set rows per table.", metavar="N")] = 1_000_000,
    width: Annotated[PositiveInt, Option("Set the embedding dimension.", metavar="N")] = 128,
    lookups: Annotated[PositiveInt, Option("Set lookups per table and sample.", metavar="N")] = 32,
    sharding: Annotated[
        Literal["table", "row", "column"], Option("Shard embedding tables by table, row or column.")
    ] = "table",
    dtype: _Type = "f32",
    diagnostics: Diagnostics | None = None,
) -> DlrmStep:
    """Return a training step of DLRM with embedding tables sharded over all ranks. Raises ``UsageError`` for
    sizes beyond the limits.

    Examples:
        >>> hespas.generate(hespas.dlrm_step(ranks=8))
        <GenerationResult: dlrm-table8: 8 ranks in 1 class>
    """
    from hespas.generators.dlrm import DlrmStep

    if ranks == 1 and sharding != "table":
        _warn_no_effect(diagnostics, "sharding", "one rank has all tables")
    return DlrmStep(
        ranks=ranks, batch=batch, tables=tables, rows=rows, width=width, lookups=lookups,
        sharding=sharding, dtype=dtype,
    )  # fmt: skip


_Ranks = Annotated[int, AtLeast(2), Option("Set the number of ranks.", metavar="N")]


@checked(CollectiveBenchmark="hespas.generators.collectives:CollectiveBenchmark")
def collective_benchmark(
    *,
    ranks: _Ranks,
    kinds: Annotated[
        str,
        Option(
            "Generate these collectives, separated by commas; also permute and ping_pong.", metavar="LIST"
        ),
    ] = "all_reduce,all_gather,reduce_scatter,all_to_all",
    sizes: Annotated[
        str, Option("Set buffer sizes: powers of two between A and B, or a list.", metavar="A-B|LIST")
    ] = "1KiB-1GiB",
    groups: Annotated[
        str, Option("Group ranks along axes of a mesh: 8x4:inner, 2x4x8:0,2.", metavar="SPEC")
    ] = "",
    repeat: Annotated[PositiveInt, Option("Repeat each collective R times.", metavar="R")] = 1,
    dtype: Annotated[str, Option("Set the element type.", metavar="TYPE")] = "bf16",
    separate: Annotated[bool, Option("Add no dependencies between collectives.", flag="separate")] = False,
) -> CollectiveBenchmark:
    """Return collectives and messages of every size, in sequence. Raises ``UsageError`` for unknown
    collectives, sizes or groups.

    Examples:
        >>> hespas.generate(hespas.collective_benchmark(ranks=8, sizes="1MiB-4MiB"))
        <GenerationResult: collectives-8: 8 ranks in 1 class>
    """
    from hespas.generators.collectives import CollectiveBenchmark, parse_sizes

    return CollectiveBenchmark(
        kinds=tuple(kind.strip() for kind in kinds.split(",")), sizes=parse_sizes(sizes), ranks=ranks,
        groups=groups, repeat=repeat, dtype=dtype, separate=separate,
    )  # fmt: skip


@checked(RandomJob="hespas.generators.random_dag:RandomJob")
def random_job(
    *,
    ranks: _Ranks,
    nodes: Annotated[PositiveInt, Option("Set the number of events of the job.", metavar="M")] = 100,
    seed: Annotated[NonNegativeInt, Option("Set the random seed.", metavar="S")] = 0,
    collective_share: Annotated[
        float, AtLeast(0), AtMost(1), Option("Set the fraction of events that are collectives.")
    ] = 0.2,
    p2p_share: Annotated[
        float, AtLeast(0), AtMost(1), Option("Set the fraction of events that are messages.")
    ] = 0.1,
    classes: Annotated[
        PositiveInt, Option("Set the number of rank classes (distinct programs).", metavar="C")
    ] = 1,
    width: Annotated[PositiveInt, Option("Limit the distance of dependencies to W nodes.", metavar="W")] = 8,
    broken: Annotated[
        str,
        Option(
            "Add one violation: cycle, sizes, missing-receive, missing-collective, order.",
            flag="break",
            metavar="RULE",
        ),
    ] = "",
) -> RandomJob:
    """Return a random valid job, or one with a single violation for tests of validators. Raises
    ``UsageError`` for an unknown violation.

    Examples:
        >>> hespas.generate(hespas.random_job(ranks=4, nodes=60, seed=7))
        <GenerationResult: random-7-4x60: 4 ranks in 1 class>
    """
    from hespas.generators.random_dag import RandomJob

    return RandomJob(
        ranks=ranks, nodes=nodes, seed=seed, collective_share=collective_share, p2p_share=p2p_share,
        classes=classes, width=width, broken=broken,
    )  # fmt: skip
