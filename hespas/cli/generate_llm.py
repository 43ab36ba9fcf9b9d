"""``hespas generate llm``: a training or serving step of an LLM, from options or a table of runs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from hespas.cli.generating import GivenOptions, generator_command
from hespas.cli.terminal import emit
from hespas.generators.llm.settings import ScheduleName, Style
from hespas.generators.spec import Generator
from hespas.graph.errors import UsageError
from hespas.graph.hints import AtLeast, AtMost, NonNegativeInt, Option, PositiveInt
from hespas.graph.workload import Launch
from hespas.report.tables import columns, table_from_rows
from hespas.report.texts import counted

if TYPE_CHECKING:
    from hespas.generators.llm import Layout, Model, Overlap, Training

__all__ = ["llm"]

_LAYOUT, _STEP, _FRAMEWORK, _SERVING = "Layout", "Step", "Framework", "Serving"
_MAX_ROW_DIGITS = 9
_OVERLAPS = ("gradients", "parameters", "tensor", "experts", "pipeline", "context")

_Model = Annotated[
    str, Option("Built-in model or model file.", metavar="MODEL|FILE.toml", is_argument=True, access="reads")
]
_Row = Annotated[
    str,
    Option(
        "Read all settings from row N (from 0) of a table of runs.", metavar="TABLE.csv:N", access="reads"
    ),
]
_List = Annotated[bool, Option("List built-in models and exit.", flag="list")]


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
    int,
    AtLeast(0),
    AtMost(3),
    Option(
        "Set the ZeRO stage: shard nothing (0), optimizer states (1), gradients (2), weights (3: FSDP).",
        metavar="N",
        panel=_LAYOUT,
    ),
]
_Fsdp = Annotated[
    bool, Option("Shard weights, gradients and optimizer states (--zero 3).", flag="fsdp", panel=_LAYOUT)
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
_Seq = Annotated[PositiveInt, _degree("Set the sequence length in tokens.", _STEP, metavar="TOKENS")]
_GlobalBatch = Annotated[
    NonNegativeInt, _degree("Set sequences per step (0: one micro-batch per data-parallel rank).", _STEP)
]
_MicroBatch = Annotated[PositiveInt, _degree("Set sequences per micro-batch.", _STEP)]
_Precision = Annotated[
    str,
    Option(
        "Set the precision: bf16, fp16, f32 (IEEE), tf32, fp8-*, mxfp8, nvfp4, int8.",
        metavar="NAME",
        panel=_STEP,
    ),
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
_Framework = Annotated[Style, Option("Model the kernels of this framework.", panel=_FRAMEWORK)]
_Launch = Annotated[
    Launch,
    Option("Launch kernels one by one, partly in CUDA graphs, or the whole step as one.", panel=_FRAMEWORK),
]
_Overlap = Annotated[
    str,
    Option(
        f"Overlap communication with computation: none, all, or a list of {', '.join(_OVERLAPS)}.",
        metavar="LIST",
        panel=_FRAMEWORK,
    ),
]
_Capacity = Annotated[
    float,
    AtLeast(0),
    Option("Set the capacity factor of experts (0: dropless).", metavar="X", panel=_FRAMEWORK),
]
_Imbalance = Annotated[
    float,
    AtLeast(1),
    Option("Set the load of the busiest experts relative to the mean.", metavar="X", panel=_FRAMEWORK),
]
_Phase = Annotated[
    Literal["train", "prefill", "decode", "mixed", "speculative", "disaggregated"],
    Option("Generate a training step or a serving step.", panel=_SERVING),
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


@generator_command
def llm(
    given: GivenOptions,
    model: _Model = "",
    row: _Row = "",
    list_models: _List = False,
    dp: _Dp = 1,
    tp: _Tp = 1,
    pp: _Pp = 1,
    vp: _Vp = 1,
    cp: _Cp = 1,
    ep: _Ep = 1,
    etp: _Etp = 1,
    expert_node: _ExpertNode = 0,
    zero: _Zero = 1,
    fsdp: _Fsdp = False,
    data_shard: _DataShard = 0,
    sequence_parallel: _SequenceParallel = True,
    ring_attention: _Ring = False,
    context_all_to_all: _Exchange = False,
    seq: _Seq = 4096,
    global_batch: _GlobalBatch = 0,
    micro_batch: _MicroBatch = 1,
    precision: _Precision = "bf16",
    recompute: _Recompute = "none",
    offload: _Offload = "",
    schedule: _Schedule = "1f1b",
    lora_rank: _Lora = 0,
    framework: _Framework = "megatron",
    launch: _Launch = "kernels",
    overlap: _Overlap = "gradients,parameters,pipeline,context",
    capacity: _Capacity = 0.0,
    imbalance: _Imbalance = 1.0,
    phase: _Phase = "train",
    batch: _Batch = 1,
    context: _Context = 1024,
    prompt: _Prompt = 1024,
    num_speculative_tokens: _SpeculativeTokens = 4,
    kv_cache_dtype: _KvCacheDtype = "bf16",
    block_size: _BlockSize = 16,
) -> Generator | None:
    """Generate a training or serving step of an LLM on any number of ranks.

    hespas generate llm llama-3-70b --dp 4 --tp 8 --pp 4 --global-batch 64 --out traces/

    hespas generate llm llama-3-8b --dp 256 --fsdp --dry-run

    hespas generate llm deepseek-v3 --phase decode --dp 32 --ep 32 --batch 64 --context 4096 --out step.json
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
        row_of,
    )

    _check_mode(given.spellings, row=row, listing=list_models, phase=phase)
    if list_models:
        _list_models()
        return None
    if bool(model) == bool(row):
        raise UsageError(
            "either MODEL or --row is required", hint="list the models: hespas generate llm --list"
        )
    if row:
        table, _, number = row.rpartition(":")
        is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_ROW_DIGITS
        if not table or not is_number:
            raise UsageError(
                f"invalid --row {row}: expected TABLE.csv:N", hint="give --row runs.csv:0 for the first row"
            )
        return row_of(Path(table), int(number), given.diagnostics).step()
    layout = Layout(
        dp=dp, tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, etp=etp, zero=3 if fsdp else zero, shard=data_shard,
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
    if fsdp and "zero" in given.spellings and zero != 3:
        raise UsageError(
            f"--fsdp contradicts --zero {zero}: it is --zero 3",
            code="fsdp-is-zero-3",
            hint="give one of them",
        )
    optimizer_offload, recomputed = offload_of(offload, recompute_of(recompute))
    training = Training(
        seq=seq, global_batch=global_batch or dp * micro_batch, micro_batch=micro_batch,
        precision=numbers, recompute=recomputed, optimizer_offload=optimizer_offload, schedule=schedule,
        style=framework, overlap=_overlap(overlap, chosen, layout, lora_rank), lora_rank=lora_rank,
        capacity=capacity, imbalance=imbalance, launch=launch,
    )  # fmt: skip
    _warn_no_effect(given, layout, training, named=overlap != "all")
    if framework == "maxtext":
        given.warn_no_effect("launch", "XLA launches the whole program at once")
    return LlmStep(model=chosen, layout=layout, training=training)


_PHASE_PARAMETERS: Mapping[str, frozenset[str]] = {
    "prefill": frozenset({"batch", "prompt", "kv_cache_dtype", "block_size"}),
    "decode": frozenset({"batch", "context", "kv_cache_dtype", "block_size"}),
    "mixed": frozenset({"batch", "context", "prompt", "kv_cache_dtype", "block_size"}),
    "speculative": frozenset({"batch", "context", "num_speculative_tokens", "kv_cache_dtype", "block_size"}),
    "disaggregated": frozenset({"batch", "context", "prompt", "kv_cache_dtype", "block_size"}),
}
"""Phase of serving -> parameters that it reads, besides the common ones."""
_COMMON_PARAMETERS = frozenset(
    {"model", "dp", "tp", "pp", "vp", "cp", "ep", "etp", "expert_node", "precision", "phase"}
)
"""Parameters of training and serving. Serving steps refuse ``vp`` and ``cp`` above 1."""
_OUTPUT_PARAMETERS = frozenset(
    {
        "hardware",
        "system",
        "destination",
        "format",
        "measure",
        "jobs",
        "only_classes",
        "shard",
        "resume",
        "cluster",
        "json_file",
        "overwrite",
    }
)
_MESSAGE_PARAMETERS = frozenset({"progress", "loudness", "debug"})


def _check_mode(given: Mapping[str, str], *, row: str, listing: bool, phase: str) -> None:
    """Raise ``UsageError`` for an option on the command line that this kind of step does not use."""
    hint = "leave it out"
    read: Set[str]
    if listing:
        read = _MESSAGE_PARAMETERS | {"list_models"}
        code, reason = "list-only", "not available with --list"
    elif row:
        read = _OUTPUT_PARAMETERS | _MESSAGE_PARAMETERS | {"row", "model"}
        code, reason = "row-says-all", "not available with --row, which reads all settings from the table"
    elif phase == "train":
        read = given.keys() - frozenset[str]().union(*_PHASE_PARAMETERS.values())
        code, reason = "serving-only", "available for serving steps only"
        hint = "leave it out, or add a serving --phase"
    else:
        read = _OUTPUT_PARAMETERS | _MESSAGE_PARAMETERS | _COMMON_PARAMETERS | _PHASE_PARAMETERS[phase]
        code, reason = "phase-reads", f"not available with --phase {phase}"
    unread = [spelling for name, spelling in given.items() if name not in read]
    if unread:
        others = f" (nor {', '.join(unread[1:])})" if len(unread) > 1 else ""
        raise UsageError(f"{unread[0]}: {reason}{others}", code=code, hint=hint)


def _warn_no_effect(given: GivenOptions, layout: Layout, training: Training, *, named: bool) -> None:
    """Warn about options that have no effect at these degrees, as in a sweep over degrees.

    ``named`` is True if each overlap is given by its name. Settings that a model or layout cannot have raise
    errors elsewhere.
    """
    if layout.tp == 1:
        given.warn_no_effect("sequence_parallel", "one tensor-parallel rank has all rows")
        if training.overlap.tensor and named:
            given.warn_no_effect("overlap", "tensor: one tensor-parallel rank has no communication")
    if layout.cp == 1:
        for name in ("ring_attention", "context_all_to_all"):
            given.warn_no_effect(name, "one context-parallel rank has all keys")
    if layout.ep == 1:
        given.warn_no_effect("expert_node", "one expert-parallel rank has all experts")
    if layout.pp == 1:
        given.warn_no_effect("schedule", "one stage runs each micro-batch forward and backward")
    if layout.replicas == layout.edp == 1 and layout.zero < 2:
        given.warn_no_effect("zero", "one data-parallel rank has the whole state")
    if layout.zero > 1 and not training.overlap.gradients:
        given.warn_no_effect("overlap", "gradients: sharded gradients are always reduced after each layer")
    if training.overlap.experts and named and layout.ep == layout.etp == 1:
        given.warn_no_effect("overlap", "experts: tokens stay on their rank")


def _overlap(text: str, model: Model, layout: Layout, lora_rank: int) -> Overlap:
    """Parse ``--overlap``. ``all`` selects every overlap that the model and its layout can have."""
    from hespas.generators.llm import Overlap
    from hespas.generators.llm.layout import possible_overlap

    if text == "all":
        every = Overlap(**{field.name: True for field in fields(Overlap)})
        return possible_overlap(every, model, layout, lora_rank)
    names = [] if text == "none" else text.split(",")
    unknown = [name for name in names if name not in _OVERLAPS]
    if unknown:
        raise UsageError(
            f"--overlap {text}: unknown overlap {unknown[0]!r}",
            hint=f"give none, all, or a list of {', '.join(_OVERLAPS)}",
        )
    return Overlap(**{field.name: field.name in names for field in fields(Overlap)})


def _list_models() -> None:
    """Print the built-in models."""
    from hespas.generators.llm import load_model, model_names
    from hespas.generators.llm.model import model_parameters

    models = {name: load_model(name) for name in model_names()}
    rows = [
        (name, model_parameters(model), counted(len(model.layers), "layer"), model.source)
        for name, model in models.items()
    ]
    header = (
        *columns("text", "model"),
        *columns("count", "parameters"),
        *columns("number", "layers", write=str),
        *columns("text", "source"),
    )
    emit(table_from_rows(header, rows).to_text())
