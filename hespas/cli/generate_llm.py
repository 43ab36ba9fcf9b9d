"""``hespas generate llm``: a step of a language model from options, or from a row of a table of runs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hespas.cli.generating import Asked, making
from hespas.cli.session import emit
from hespas.cli.text import count_text, counted, table_text
from hespas.generators.llm.settings import ScheduleName, Style
from hespas.generators.spec import Generator
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.step_facts import Launch

if TYPE_CHECKING:
    from hespas.generators.llm import Layout, Model, Overlap, Training

__all__ = ["llm"]

_LAYOUT, _STEP, _HABITS, _SERVING = "Layout", "Step", "Habits of the framework", "Serving"
_MOST_DIGITS = 10
"""Of the number of a row."""
_OVERLAPS = ("gradients", "parameters", "tensor", "experts", "pipeline", "context")

_Model = Annotated[
    str, typer.Argument(metavar="MODEL|FILE.toml", help="A model that ships, or one of your own.")
]
_Row = Annotated[
    str, typer.Option(metavar="TABLE.csv:N", help="Take all settings from row N (from 0) of a table of runs.")
]
_List = Annotated[bool, typer.Option("--list", help="List the models that ship, and leave.")]


def _degree(what: str, panel: str = _LAYOUT, *, least: int = 1, metavar: str = "N") -> Any:
    return typer.Option(min=least, metavar=metavar, help=what, rich_help_panel=panel)


_Dp = Annotated[int, _degree("Data-parallel ranks.")]
_Tp = Annotated[int, _degree("Tensor-parallel ranks.")]
_Pp = Annotated[int, _degree("Pipeline stages.")]
_Vp = Annotated[int, _degree("Virtual stages of each rank.")]
_Cp = Annotated[int, _degree("Context-parallel ranks.")]
_Ep = Annotated[int, _degree("Ranks that experts are spread over.")]
_Etp = Annotated[int, _degree("Tensor-parallel ranks inside experts.")]
_ExpertNode = Annotated[
    int, _degree("Ranks of a node, to which a token goes once (0: straight to its experts).", least=0)
]
_Zero = Annotated[
    int,
    typer.Option(
        min=0, max=3, metavar="N", rich_help_panel=_LAYOUT,
        help="0: states replicated; 1: optimizer sharded; 2: gradients too; 3: weights too (FSDP).",
    ),
]  # fmt: skip
_Fsdp = Annotated[bool, typer.Option("--fsdp", help="The same as --zero 3.", rich_help_panel=_LAYOUT)]
_DataShard = Annotated[int, _degree("Data ranks that share one copy of the state (0: all).", least=0)]
_SequenceParallel = Annotated[
    bool, typer.Option(help="Shard activations outside tensor-parallel regions.", rich_help_panel=_LAYOUT)
]
_Ring = Annotated[
    bool,
    typer.Option("--ring-attention", help="Keys go round a ring, not gathered.", rich_help_panel=_LAYOUT),
]
_Exchange = Annotated[
    bool,
    typer.Option(
        "--context-all-to-all", help="Context ranks exchange tokens for heads.", rich_help_panel=_LAYOUT
    ),
]
_Seq = Annotated[int, _degree("Length of a sequence.", _STEP, metavar="TOKENS")]
_GlobalBatch = Annotated[int, _degree("Sequences of a step (0: a micro-batch each).", _STEP, least=0)]
_MicroBatch = Annotated[int, _degree("Sequences of a micro-batch.", _STEP)]
_Precision = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="bf16, fp16, f32 (IEEE), tf32, fp8-*, mxfp8, nvfp4, int8.", rich_help_panel=_STEP
    ),
]
_Recompute = Annotated[
    str,
    typer.Option(
        metavar="none|selective|full|MODULES", rich_help_panel=_STEP,
        help="What the backward pass computes again.",
    ),
]  # fmt: skip
_Offload = Annotated[
    str,
    typer.Option(
        metavar="optimizer|MODULES", rich_help_panel=_STEP,
        help="What moves to the host: states of the optimizer, kept activations.",
    ),
]  # fmt: skip
_Schedule = Annotated[ScheduleName, typer.Option(help="Order of a stage's passes.", rich_help_panel=_STEP)]
_Lora = Annotated[int, _degree("Train adapters of this rank only (0: all weights).", _STEP, least=0)]
_Style = Annotated[Style, typer.Option(help="Whose kernels.", rich_help_panel=_HABITS)]
_Launch = Annotated[
    Launch,
    typer.Option(
        help="Launches: each kernel by the host, part of them in CUDA graphs, or the step as a whole.",
        rich_help_panel=_HABITS,
    ),
]
_Overlap = Annotated[
    str,
    typer.Option(
        metavar="LIST", rich_help_panel=_HABITS,
        help=f"What runs beside computation: none, all, or some of {', '.join(_OVERLAPS)} with commas.",
    ),
]  # fmt: skip
_Capacity = Annotated[
    float,
    typer.Option(
        min=0, metavar="X", help="Capacity factor of experts (0: dropless).", rich_help_panel=_HABITS
    ),
]
_Imbalance = Annotated[
    float,
    typer.Option(
        min=1, metavar="X", help="Load of the busiest experts over the mean.", rich_help_panel=_HABITS
    ),
]
_Phase = Annotated[
    Literal["train", "prefill", "decode", "mixed", "speculative", "disaggregated"],
    typer.Option(help="A training step, or a step of serving.", rich_help_panel=_SERVING),
]
_Batch = Annotated[int, _degree("Sequences that a replica serves at once.", _SERVING)]
_Context = Annotated[int, _degree("Tokens of each in the cache.", _SERVING, least=0, metavar="TOKENS")]
_Prompt = Annotated[int, _degree("Length of a prompt, or of its chunk.", _SERVING, metavar="TOKENS")]
_Drafts = Annotated[int, _degree("Tokens drafted for each sequence.", _SERVING)]
_Cache = Annotated[
    str,
    typer.Option(
        metavar="TYPE", help="Element type of keys and values in the cache.", rich_help_panel=_SERVING
    ),
]
_Page = Annotated[int, _degree("Tokens of a page of the cache.", _SERVING)]


@making("model", "row")
def llm(
    asked: Asked,
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
    style: _Style = "megatron",
    launch: _Launch = "kernels",
    overlap: _Overlap = "gradients,parameters,pipeline,context",
    capacity: _Capacity = 0.0,
    imbalance: _Imbalance = 1.0,
    phase: _Phase = "train",
    batch: _Batch = 1,
    context: _Context = 1024,
    prompt: _Prompt = 1024,
    drafts: _Drafts = 4,
    cache: _Cache = "bf16",
    page: _Page = 16,
) -> Generator | None:
    """A step of a language model, trained or served, on any number of ranks.

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
    )

    _check_mode(asked.given, row=row, listing=list_models, phase=phase)
    if list_models:
        _list_models()
        return None
    if bool(model) == bool(row):
        raise UsageError("a MODEL or a --row is needed, and not both", hint="hespas generate llm --list")
    if row:
        return _of_row(row, asked.diagnostics)
    layout = Layout(
        dp=dp, tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, etp=etp, zero=3 if fsdp else zero, shard=data_shard,
        sequence_parallel=sequence_parallel, ring_attention=ring_attention,
        context_all_to_all=context_all_to_all, expert_node=expert_node,
    )  # fmt: skip
    chosen, numbers = load_model(model), precision_of(precision)
    if phase != "train":
        return ServingStep(
            model=chosen, layout=layout, phase=phase, batch=batch, context=context,
            prompt=prompt, drafts=drafts, cache=cache, page=page, precision=numbers,
        )  # fmt: skip
    if fsdp and "zero" in asked.given and zero != 3:
        raise UsageError(
            f"--fsdp shards weights too, and --zero {zero} does not", code="fsdp-is-zero-3", hint="give one"
        )
    optimizer_offload, again = offload_of(offload, recompute_of(recompute))
    training = Training(
        seq=seq, global_batch=global_batch or dp * micro_batch, micro_batch=micro_batch,
        precision=numbers, recompute=again, optimizer_offload=optimizer_offload, schedule=schedule,
        style=style, overlap=_overlap(overlap, chosen, layout, lora_rank), lora_rank=lora_rank,
        capacity=capacity, imbalance=imbalance, launch=launch,
    )  # fmt: skip
    _tell_without_effect(asked, layout, training, named=overlap != "all")
    if style == "maxtext":
        asked.has_no_effect("launch", "a program of XLA is launched as a whole")
    return LlmStep(model=chosen, layout=layout, training=training)


# --- options that a mode does not read, and those that nothing comes of

_OF_SERVING: Mapping[str, frozenset[str]] = {
    "prefill": frozenset({"batch", "prompt", "cache", "page"}),
    "decode": frozenset({"batch", "context", "cache", "page"}),
    "mixed": frozenset({"batch", "context", "prompt", "cache", "page"}),
    "speculative": frozenset({"batch", "context", "drafts", "cache", "page"}),
    "disaggregated": frozenset({"batch", "context", "prompt", "cache", "page"}),
}
"""What each phase reads beside the model, its layout and its number formats."""
_OF_BOTH = frozenset(
    {"model", "dp", "tp", "pp", "vp", "cp", "ep", "etp", "expert_node", "precision", "phase"}
)
"""Serving has neither ``vp`` nor ``cp``, and says so where one is more than 1."""
_OF_EVERY_MODE = frozenset(
    {
        "hardware",
        "system",
        "out",
        "to",
        "dry_run",
        "jobs",
        "only_classes",
        "shard",
        "resume",
        "cluster",
        "json_file",
        "overwrite",
    }
)
_OF_SCREENS = frozenset({"progress", "loudness", "debug"})


def _check_mode(given: Mapping[str, str], *, row: str, listing: bool, phase: str) -> None:
    """Raise ``UsageError`` for an option that is given and that the mode does not read."""
    if listing:
        _refuse(
            given, _OF_SCREENS | {"list_models"}, "list-only", "--list names the models that ship, and leaves"
        )
    elif row:
        _refuse(
            given, _OF_EVERY_MODE | _OF_SCREENS | {"row", "model"}, "row-says-all",
            "--row takes all settings from the table",
        )  # fmt: skip
    elif phase == "train":
        read = given.keys() - frozenset[str]().union(*_OF_SERVING.values())
        _refuse(
            given, read, "serving-only", "only a step of serving has it",
            hint="leave it out, or name a --phase of serving",
        )  # fmt: skip
    else:
        _refuse(
            given, _OF_EVERY_MODE | _OF_SCREENS | _OF_BOTH | _OF_SERVING[phase], "phase-reads",
            f"--phase {phase} does not read it",
        )  # fmt: skip


def _refuse(
    given: Mapping[str, str], read: Set[str], code: str, why: str, hint: str = "leave it out"
) -> None:
    unread = [flag for name, flag in given.items() if name not in read]
    if unread:
        others = f" (nor {', '.join(unread[1:])})" if len(unread) > 1 else ""
        raise UsageError(f"{unread[0]}: {why}{others}", code=code, hint=hint)


def _tell_without_effect(asked: Asked, layout: Layout, training: Training, *, named: bool) -> None:
    """Tell of options that change nothing at these degrees, as a sweep over degrees has them. What a model
    or a layout cannot have is refused instead. ``named``: each overlap is asked for by its name.
    """
    if layout.tp == 1:
        asked.has_no_effect("sequence_parallel", "one tensor rank has all rows")
        if training.overlap.tensor and named:
            asked.has_no_effect("overlap", "tensor: one tensor rank talks to none")
    if layout.cp == 1:
        for name in ("ring_attention", "context_all_to_all"):
            asked.has_no_effect(name, "one context rank has all keys")
    if layout.ep == 1:
        asked.has_no_effect("expert_node", "one expert rank has all experts")
    if layout.pp == 1:
        asked.has_no_effect("schedule", "one stage runs each micro-batch forward and backward")
    if layout.replicas == layout.edp == 1 and layout.zero < 2:
        asked.has_no_effect("zero", "one data rank has all of the state")
    if layout.zero > 1 and not training.overlap.gradients:
        asked.has_no_effect("overlap", "gradients: those that are sharded are reduced behind each layer")
    if training.overlap.experts and named and layout.ep == layout.etp == 1:
        asked.has_no_effect("overlap", "experts: no token leaves its rank")


def _overlap(text: str, model: Model, layout: Layout, lora_rank: int) -> Overlap:
    """What a list names; ``all`` is all that a model and its layout have."""
    from hespas.generators.llm import Overlap
    from hespas.generators.llm.layout import possible_overlap

    if text == "all":
        every = Overlap(**{each.name: True for each in fields(Overlap)})
        return possible_overlap(every, model, layout, lora_rank)
    names = [] if text == "none" else text.split(",")
    unknown = [each for each in names if each not in _OVERLAPS]
    if unknown:
        raise UsageError(
            f"--overlap {text}: nothing is called {unknown[0]!r}",
            hint=f"none, all, or some of {', '.join(_OVERLAPS)} with commas",
        )
    return Overlap(**{each.name: each.name in names for each in fields(Overlap)})


def _of_row(text: str, diagnostics: Diagnostics) -> Generator:
    """The step that a row of a table describes; its assumptions are told."""
    from hespas.generators.llm import row_of

    table, _, number = text.rpartition(":")
    if not table or not (number.isascii() and number.isdigit() and len(number) < _MOST_DIGITS):
        raise UsageError(f"--row {text} names no row", hint="--row runs.csv:0 is the first below the header")
    return row_of(Path(table), int(number), diagnostics).step()


def _list_models() -> None:
    from hespas.generators.llm import load_model, model_names
    from hespas.generators.llm.model import model_parameters

    rows: list[tuple[str, ...]] = []
    for name in model_names():
        found = load_model(name)
        size = count_text(model_parameters(found))
        rows.append((name, size, counted(len(found.layers), "layer"), found.source))
    emit(table_text(("model", "parameters", "layers", "source"), rows, left=(0, 3)))
