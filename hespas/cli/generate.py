"""``hespas generate``: workloads from settings alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hespas.cli import options
from hespas.cli.session import check_reports, command_line, emit, progress_bar, say_diagnostics
from hespas.cli.text import bytes_text, count_text, counted, flops_text, table_text
from hespas.generators.llm.settings import ScheduleName, Style
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.api import GenerationResult, Parts
    from hespas.generators.llm.settings import Overlap
    from hespas.generators.spec import Generator

__all__ = [
    "DryRun",
    "Out",
    "Output",
    "To",
    "app",
    "collectives",
    "dit",
    "dlrm",
    "llm",
    "random",
    "vit",
]

app = typer.Typer(no_args_is_help=True, help="Make workloads from settings alone: models at any parallelism.")

# --- what all generators take

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DST", help="Write the workload: traces of all ranks, or a file."),
]
To = Annotated[
    str,
    typer.Option(
        "--to", metavar="FORMAT", help="Write DST in this format.", autocompletion=options.format_names
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say what it would be: nodes, bytes, FLOPs, memory.")
]


@dataclass(frozen=True, slots=True)
class Output:
    """Where a generated workload goes, and what is told of it."""

    out: Path | None
    to: str
    dry_run: bool
    json_file: Path | None
    jobs: int
    overwrite: bool
    progress: bool | None
    debug: bool
    parts: Parts | None = None
    """How the files of a large job are written; None: all of them, at once."""

    def make(self, generator: Generator, diagnostics: Diagnostics) -> None:
        """Generate, write and tell."""
        from hespas import api

        if (self.out is None) == (not self.dry_run):
            raise UsageError(
                "--out DST writes the workload, --dry-run only says what it would be", hint="give one"
            )
        if self.out == Path("-"):
            raise UsageError("--out -: a workload is files, not one stream", hint="name a folder or a file")
        check_reports(
            {"--json": self.json_file}, {"--out": [self.out] if self.out else []}, overwrite=self.overwrite
        )
        with progress_bar("writing", self.progress) as callback:
            done = api.generate(
                generator,
                self.out,
                format=self.to or ("chakra" if self.out and not self.out.suffix else None),
                overwrite=self.overwrite,
                options=(self.parts or api.Parts()).options(jobs=self.jobs, progress=callback),
                measure=self.dry_run,
                diagnostics=diagnostics,
            )
        if self.json_file:
            api.write_json(done.to_json(), self.json_file, overwrite=self.overwrite)
        say_diagnostics(diagnostics, generator.name)
        _tell(done)


def _tell(done: GenerationResult) -> None:
    account = done.account
    where = f" -> {done.written} ({bytes_text(done.written_bytes)})" if done.written else ""
    emit(f"{done.headline()}{where}")
    rows = [
        ("nodes of a rank, at most", count_text(done.nodes_per_rank_max)),
        ("traces of all ranks", bytes_text(done.et_bytes) if not done.written else ""),
        ("parameters", count_text(account.parameters)),
        ("model FLOPs of a step", flops_text(account.model_flops_per_step)),
        ("hardware FLOPs of a step", flops_text(account.hardware_flops_per_step)),
        ("collective payload of a rank", bytes_text(done.collective_bytes_per_rank)),
        ("peak memory of a rank", bytes_text(account.peak_memory_bytes)),
    ]
    emit(table_text(("figure", "value"), [row for row in rows if row[1]], left=(0,)))
    if account.memory:
        shares = [(each.what, bytes_text(each.size_bytes)) for each in account.memory]
        emit(table_text(("memory of the fullest rank", "size"), shares, left=(0,)))


# --- language models

_LAYOUT, _STEP, _HABITS, _SERVING = "Layout", "Step", "Habits of the framework", "Serving"
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
    typer.Option(metavar="NAME", help="bf16, fp16, f32, fp8-*, mxfp8, nvfp4, int8.", rich_help_panel=_STEP),
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


def llm(
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
    out: Out = None,
    to: To = "",
    dry_run: DryRun = False,
    jobs: options.Jobs = 2,
    only_classes: options.OnlyClasses = False,
    shard: options.Shard = "",
    resume: options.Resume = False,
    cluster: options.Cluster = "",
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    debug: options.Debug = False,
) -> None:
    """A step of a language model, trained or served, on any number of ranks.

    hespas generate llm llama-3-70b --dp 4 --tp 8 --pp 4 --global-batch 64 --out traces/

    hespas generate llm llama-3-8b --dp 256 --fsdp --dry-run

    hespas generate llm deepseek-v3 --phase decode --dp 32 --ep 32 --batch 64 --context 4096 --out step.json
    """
    diagnostics = Diagnostics()
    output = Output(out, to, dry_run, json_file, jobs, overwrite, progress, debug)
    with command_line(
        debug, diagnostics, model or row, documents=[json_file], reads=[model, row], writes=[out]
    ):
        if list_models:
            _list_models()
            return
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

        parts = options.parts_of(shard, cluster, only_classes=only_classes, resume=resume)
        output = replace(output, parts=parts)
        if bool(model) == bool(row):
            raise UsageError("a MODEL or a --row is needed, and not both", hint="hespas generate llm --list")
        if row:
            output.make(_of_row(row, diagnostics), diagnostics)
            return
        layout = Layout(
            dp=dp, tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, etp=etp, zero=3 if fsdp else zero, shard=data_shard,
            sequence_parallel=sequence_parallel, ring_attention=ring_attention,
            context_all_to_all=context_all_to_all, expert_node=expert_node,
        )  # fmt: skip
        numbers = precision_of(precision)
        if phase != "train":
            output.make(
                ServingStep(
                    model=load_model(model), layout=layout, phase=phase, batch=batch, context=context,
                    prompt=prompt, drafts=drafts, cache=cache, page=page, precision=numbers,
                ),
                diagnostics,
            )  # fmt: skip
            return
        optimizer_offload, again = offload_of(offload, recompute_of(recompute))
        training = Training(
            seq=seq, global_batch=global_batch or dp * micro_batch, micro_batch=micro_batch,
            precision=numbers, recompute=again, optimizer_offload=optimizer_offload, schedule=schedule,
            style=style, overlap=_overlap(overlap), lora_rank=lora_rank, capacity=capacity,
            imbalance=imbalance,
        )  # fmt: skip
        output.make(LlmStep(model=load_model(model), layout=layout, training=training), diagnostics)


def _overlap(text: str) -> Overlap:
    from hespas.generators.llm import Overlap

    names = {"none": [], "all": list(_OVERLAPS)}.get(text, text.split(","))
    unknown = [each for each in names if each not in _OVERLAPS]
    if unknown:
        raise UsageError(
            f"--overlap {text}: nothing is called {unknown[0]!r}",
            hint=f"none, all, or some of {', '.join(_OVERLAPS)} with commas",
        )
    return Overlap(**{each.name: each.name in names for each in fields(Overlap)})


def _of_row(text: str, diagnostics: Diagnostics) -> Generator:
    """The step that a row of a table describes; its assumptions are told."""
    from hespas.generators.llm import LlmStep, row_of

    table, _, number = text.rpartition(":")
    if not table or not (number.isascii() and number.isdigit() and len(number) < _MOST_DIGITS):
        raise UsageError(f"--row {text} names no row", hint="--row runs.csv:0 is the first below the header")
    run = row_of(Path(table), int(number), diagnostics)
    return LlmStep(model=run.model, layout=run.layout, training=run.training)


_MOST_DIGITS = 10


def _list_models() -> None:
    from hespas.generators.llm import load_model, model_names
    from hespas.generators.llm.model import model_parameters

    rows: list[tuple[str, ...]] = []
    for name in model_names():
        found = load_model(name)
        size = count_text(model_parameters(found))
        rows.append((name, size, counted(len(found.layers), "layer"), found.source))
    emit(table_text(("model", "parameters", "layers", "source"), rows, left=(0, 3)))


# --- benchmarks and random programs

_Ranks = Annotated[int, typer.Option(min=2, metavar="N", help="Ranks of the job.")]


def collectives(
    ranks: _Ranks,
    kinds: Annotated[
        str, typer.Option(metavar="LIST", help="Collectives with commas; also permute and ping_pong.")
    ] = "all_reduce,all_gather,reduce_scatter,all_to_all",
    sizes: Annotated[
        str, typer.Option(metavar="A-B|LIST", help="Whole buffers: powers of two between, or a list.")
    ] = "1KiB-1GiB",
    groups: Annotated[
        str, typer.Option(metavar="SPEC", help="Groups along axes of a mesh: 8x4:inner, 2x4x8:0,2.")
    ] = "",
    repeat: Annotated[int, typer.Option(min=1, metavar="R", help="How often each.")] = 1,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="Element type.")] = "bf16",
    separate: Annotated[bool, typer.Option("--separate", help="None waits for another.")] = False,
    out: Out = None,
    to: To = "",
    dry_run: DryRun = False,
    jobs: options.Jobs = 2,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    debug: options.Debug = False,
) -> None:
    """Collectives and messages of every size, one after another.

    hespas generate collectives --kinds all_reduce,ping_pong --sizes 1MiB-64MiB --ranks 8 --out traces/
    """
    diagnostics = Diagnostics()
    output = Output(out, to, dry_run, json_file, jobs, overwrite, progress, debug)
    with command_line(debug, diagnostics, "", documents=[json_file], writes=[out]):
        from hespas.generators.collectives import CollectiveBenchmark, parse_sizes

        chosen = tuple(each.strip() for each in kinds.split(","))
        bench = CollectiveBenchmark(
            kinds=chosen, sizes=parse_sizes(sizes), ranks=ranks, groups=groups, repeat=repeat, dtype=dtype,
            separate=separate,
        )  # fmt: skip
        output.make(bench, diagnostics)


def random(
    ranks: _Ranks,
    nodes: Annotated[int, typer.Option(min=1, metavar="M", help="Events of the job.")] = 100,
    seed: Annotated[int, typer.Option(metavar="S", help="Equal seeds make equal jobs.")] = 0,
    collective_share: Annotated[float, typer.Option(min=0, max=1, help="Of events.")] = 0.2,
    p2p_share: Annotated[float, typer.Option(min=0, max=1, help="Messages, of events.")] = 0.1,
    classes: Annotated[int, typer.Option(min=1, metavar="C", help="Programs of ranks that differ.")] = 1,
    width: Annotated[int, typer.Option(min=1, metavar="W", help="How far back a node may wait.")] = 8,
    broken: Annotated[
        str,
        typer.Option(
            "--break",
            metavar="RULE",
            help="End with one violation: cycle, sizes, missing-receive, missing-collective, order.",
        ),
    ] = "",
    out: Out = None,
    to: To = "",
    dry_run: DryRun = False,
    jobs: options.Jobs = 2,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    debug: options.Debug = False,
) -> None:
    """A random job that no simulator may hang on, or with one violation that validators must find.

    hespas generate random --ranks 8 --nodes 1000 --classes 4 --seed 1 --out traces/
    """  # fmt: skip
    diagnostics = Diagnostics()
    output = Output(out, to, dry_run, json_file, jobs, overwrite, progress, debug)
    with command_line(debug, diagnostics, "", documents=[json_file], writes=[out]):
        from hespas.generators.random_dag import RandomJob

        job = RandomJob(
            ranks=ranks, nodes=nodes, seed=seed, collective_share=collective_share, p2p_share=p2p_share,
            classes=classes, width=width, broken=broken,
        )  # fmt: skip
        output.make(job, diagnostics)


# --- vision and diffusion transformers

_Images = Annotated[int, typer.Option(min=1, metavar="N", help="Images of each rank.")]
_Replicas = Annotated[int, typer.Option(min=1, metavar="N", help="Data-parallel ranks.")]
_Sharded = Annotated[bool, typer.Option("--fsdp", help="Shard weights, gradients and states.")]
_Type = Annotated[str, typer.Option(metavar="TYPE", help="bf16, f16 or f32.")]
_Side = Annotated[int, typer.Option(min=0, metavar="PIXELS", help="Side of an image (0: the model's own).")]
_Layers = Annotated[int, typer.Option(min=0, metavar="N", help="Blocks (0: the model's own).")]


def vit(
    dp: _Replicas = 1,
    batch: _Images = 1,
    fsdp: _Sharded = False,
    dtype: _Type = "bf16",
    image: _Side = 0,
    layers: _Layers = 0,
    out: Out = None,
    to: To = "",
    dry_run: DryRun = False,
    jobs: options.Jobs = 2,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    debug: options.Debug = False,
) -> None:
    """A training step of a vision transformer, ViT-B/16.

    hespas generate vit --dp 8 --batch 64 --fsdp --out traces/
    """
    output = Output(out, to, dry_run, json_file, jobs, overwrite, progress, debug)
    _vision(output, "vit", (dp, batch, fsdp, dtype), (image, layers))


def dit(
    dp: _Replicas = 1,
    batch: _Images = 1,
    fsdp: _Sharded = False,
    dtype: _Type = "bf16",
    image: _Side = 0,
    layers: _Layers = 0,
    out: Out = None,
    to: To = "",
    dry_run: DryRun = False,
    jobs: options.Jobs = 2,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    debug: options.Debug = False,
) -> None:
    """A training step of a diffusion transformer, DiT-XL/2; the image is its latent, of side 32.

    hespas generate dit --dp 8 --batch 32 --fsdp --out traces/
    """
    output = Output(out, to, dry_run, json_file, jobs, overwrite, progress, debug)
    _vision(output, "dit", (dp, batch, fsdp, dtype), (image, layers))


def _vision(output: Output, which: str, layout: tuple[int, int, bool, str], sizes: tuple[int, int]) -> None:
    diagnostics = Diagnostics()
    with command_line(output.debug, diagnostics, "", documents=[output.json_file], writes=[output.out]):
        from hespas.generators.vision import VisionStep, dit_xl_2, vit_b_16

        model = vit_b_16() if which == "vit" else dit_xl_2()
        model = replace(model, image=sizes[0] or model.image, layers=sizes[1] or model.layers)
        dp, batch, fsdp, dtype = layout
        output.make(VisionStep(model=model, dp=dp, batch=batch, fsdp=fsdp, dtype=dtype), diagnostics)


# --- recommendation models


def dlrm(
    ranks: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks of the job.")] = 8,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Samples of each rank.")] = 2048,
    tables: Annotated[int, typer.Option(min=1, metavar="N", help="Embedding tables.")] = 64,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Rows of each.")] = 1_000_000,
    width: Annotated[int, typer.Option(min=1, metavar="N", help="Width of a row.")] = 128,
    lookups: Annotated[int, typer.Option(min=1, metavar="N", help="Rows of a table for a sample.")] = 32,
    sharding: Annotated[
        Literal["table", "row", "column"], typer.Option(help="How tables are spread over ranks.")
    ] = "table",
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="bf16, f16 or f32.")] = "f32",
    out: Out = None,
    to: To = "",
    dry_run: DryRun = False,
    jobs: options.Jobs = 2,
    json_file: options.Json = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = None,
    loudness: options.Loudness = None,
    debug: options.Debug = False,
) -> None:
    """A training step of a recommendation model with tables spread over all ranks.

    hespas generate dlrm --ranks 16 --sharding row --out traces/
    """
    diagnostics = Diagnostics()
    output = Output(out, to, dry_run, json_file, jobs, overwrite, progress, debug)
    with command_line(debug, diagnostics, "", documents=[json_file], writes=[out]):
        from hespas.generators.dlrm import DlrmStep

        step = DlrmStep(
            ranks=ranks, batch=batch, tables=tables, rows=rows, width=width, lookups=lookups,
            sharding=sharding, dtype=dtype,
        )  # fmt: skip
        output.make(step, diagnostics)


app.command()(llm)
app.command()(dlrm)
app.command()(vit)
app.command()(dit)
app.command()(collectives)
app.command()(random)
