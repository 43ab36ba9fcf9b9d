"""Published training runs: settings of a run from a row of a table, and its FLOPs as published.

Columns: ``model, num_accelerators, seq_len, global_batch, micro_batch, dp, tp, pp, vp, cp, ep, etp, fsdp,
sequence_parallel, recompute, precision, optimizer, train_type, framework, source, accelerator``, and the
columns of :data:`SETTINGS`. Missing settings are assumed and reported. :mod:`hespas.studies.league` reads the
columns of measurements, and ``network``, the name or file of a system.

Columns of free text (``notes``, ``accelerator_variant``) have no effect. ``python -m tools.published_settings
IN.csv OUT.csv`` derives the columns of :data:`SETTINGS` from the phrases of the published tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import gcd, nan
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hespas.files.limits import limits
from hespas.files.tables import Column, TableRow, read_table, typed_row
from hespas.files.trust import file_in_folder_of
from hespas.generators.llm.flops import Convention, forward_flops, model_flops
from hespas.generators.llm.layout import Layout, possible_overlap
from hespas.generators.llm.model import Block, Experts, Mamba, Model
from hespas.generators.llm.model_file import model_in_table, named_model
from hespas.generators.llm.settings import (
    LAYER_INPUT,
    MODULES,
    Overlap,
    Recompute,
    Style,
    Training,
    precision_of,
)
from hespas.generators.llm.step import Board, LlmStep, training_facts
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError, UsageError, clipped
from hespas.graph.workload import Launch, StepFacts
from hespas.hardware import Device, canonical_name, load_device, resolve_reference

__all__ = [
    "MODELS",
    "NOTES_IGNORED",
    "PUBLISHERS",
    "SETTINGS",
    "UNSTATED",
    "PublishedRun",
    "convention_of",
    "has_only_notes",
    "published_flops",
    "publisher_flops",
    "row_of",
    "rows_of",
    "run_of",
]

SETTINGS: Mapping[str, str] = {
    "cuda_graphs": "none, parts or all: kernels of a pass that are issued as CUDA graphs",
    "communication_overlap": "off: communication never overlaps computation; empty: as the framework does",
    "tensor_overlap": "yes: collectives of tensor parallelism overlap products",
    "expert_overlap": "shared or yes: tokens are sent to experts while the shared expert computes; "
    "microbatches: while a pass of another microbatch runs",
    "expert_dispatch": "all-to-all, deepep or hybridep: library that sends tokens to experts",
    "context_communication": "all-to-all or ring: exchange between context ranks",
    "capacity_factor": "capacity factor of experts; dropped: tokens are dropped at an unknown capacity",
    "compiled": "yes or no: kernels are fused by a compiler; empty: as the framework does by default",
    "gradient_precision": "f32 or 16bit: format in which gradients are accumulated and reduced; empty: 16bit "
    "for MLPerf and for optimizers with `mode pure`, otherwise f32",
    "gradient_fusion": "yes or no: matmuls add to accumulated gradients (Megatron); empty: yes",
    "attention_flops": "full or half: part of the square of attention in the published FLOPs",
    "peak_memory_kind": "allocated or reserved: memory that peak_memory_gib counts; empty: allocated",
    "power_limit_w": "power limit of the accelerator [W], if it is not the usual one",
    "memory_gib": "memory of the accelerator [GiB], if it is not the usual one",
    "memory_bandwidth_gb_per_s": "memory bandwidth of the accelerator [GB/s], if it is not the usual one",
}
"""Columns by name, with their values. An empty cell means that the source does not give the setting."""


_Count = Annotated[int, Column(low=1, high=1e9)]
_Positive = Annotated[float, Column(is_open=True, high=1e9)]


class _RunColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Cells of a published run that are numbers or words of a fixed set. A setting that the row does not
    state is 1 for tp, pp, cp, ep and etp, and otherwise 0, NaN or empty.
    """

    num_accelerators: _Count = 1
    seq_len: _Count = 1
    global_batch: _Count = 0
    micro_batch: _Count = 0
    grad_accum: _Count = 0
    dp: _Count = 0
    tp: _Count = 1
    pp: _Count = 1
    vp: _Count = 0
    cp: _Count = 1
    ep: _Count = 1
    etp: _Count = 1
    cuda_graphs: Literal["", "none", "parts", "all"] = ""
    communication_overlap: Literal["", "off", "on"] = ""
    tensor_overlap: Literal["", "yes", "no"] = ""
    expert_overlap: Literal["", "yes", "no", "shared", "microbatches"] = ""
    expert_dispatch: Literal["", "all-to-all", "deepep", "hybridep"] = ""
    context_communication: Literal["", "all-to-all", "ring"] = ""
    compiled: Literal["", "yes", "no"] = ""
    gradient_precision: Literal["", "f32", "16bit"] = ""
    gradient_fusion: Literal["", "yes", "no"] = ""
    attention_flops: Literal["", "full", "half"] = ""
    peak_memory_kind: Literal["", "allocated", "reserved"] = ""
    power_limit_w: _Positive = nan
    memory_gib: _Positive = nan
    memory_bandwidth_gb_per_s: _Positive = nan


class _CapacityColumn(msgspec.Struct, frozen=True, kw_only=True):
    """Column with the capacity factor of experts as a number; 0 for dropless experts."""

    capacity_factor: _Positive = 0.0


NOTES_IGNORED = (
    "`notes` are not read, and the table has no column of settings such as cuda_graphs and "
    "communication_overlap: the defaults are assumed"
)
MODELS = "models.csv"
"""File name of the table of models that do not ship with the package, in the folder of a table of runs."""


_BOARD_COLUMNS = ("power_limit_w", "memory_bandwidth_gb_per_s", "memory_gib")
"""Columns with properties of a GPU board."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """Published training run as settings of the generator. ``row`` has the cells of its row by column
    name.
    """

    model: Model
    layout: Layout
    training: Training
    row: Mapping[str, str]
    place: str
    table: Path = Path()
    """Table of the row; files that the row names are in the folder of the table."""

    def board(self, device: Device) -> Board | None:
        """Return the properties of the GPU board that differ from the device file: the power limit, memory
        bandwidth and memory in the row of the run. None if the row has none of them.
        """
        power, bandwidth, memory_gib = (self.row.get(column, "") for column in _BOARD_COLUMNS)
        if not (power or bandwidth or memory_gib):
            return None
        ratio = float(bandwidth) * 1e9 / device.main_memory.bandwidth_bytes_per_s if bandwidth else 1.0
        return Board(
            device=device.name,
            power_w=float(power) if power else 0.0,
            bandwidth=ratio,
            capacity_bytes=float(round(float(memory_gib) * 2**30)) if memory_gib else nan,
        )

    def facts(self, device: Device) -> StepFacts:
        """Return the facts of the step on ``device`` that simulators need in addition to the graph."""
        return training_facts(self.model, self.training, self.board(device), layout=self.layout)

    def step(self) -> LlmStep:
        """Return the generator of the run's training step.

        Raises ``UsageError`` if a row with properties of its board names an unknown device, and
        ``BoundaryError`` if it names a file outside the folder of its table.
        """
        varies = any(self.row.get(column) for column in _BOARD_COLUMNS)
        spelling = self.row.get("accelerator", "")
        device = resolve_reference(self.table, spelling, "column accelerator") if varies else ""
        board = self.board(load_device(device)) if varies else None
        return LlmStep(model=self.model, layout=self.layout, training=self.training, board=board)


_NEEDED = ("global_batch", "model", "num_accelerators", "seq_len")


def rows_of(table: Path, needed: Sequence[str] = _NEEDED) -> Iterator[Mapping[str, str]]:
    """Yield the rows of a table with the columns ``needed``. Raises ``FormatError`` for an invalid table."""
    for row in read_table(table, needed, max_bytes=limits().report_bytes):
        yield row.cells


def has_only_notes(row: Mapping[str, str]) -> bool:
    """Return True if a row states its settings in free-text notes only: its table has none of the columns of
    :data:`SETTINGS`.
    """
    return bool(row.get("notes", "").strip()) and not any(name in row for name in SETTINGS)


def row_of(table: Path, number: int, diagnostics: Diagnostics) -> PublishedRun:
    """Return the run of row ``number``, counted from 0 without the header.

    Raises ``UsageError`` if the row does not exist, ``UnsupportedError`` if the configuration of its model is
    not known, and ``FormatError`` for cells that are not numbers.
    """
    row = next(islice(rows_of(table), number, None), None)
    if row is None:
        raise UsageError(f"{table} has no row {number:,}", hint="count rows from 0, below the header")
    if has_only_notes(row):
        diagnostics.warning("row.notes", f"{table}:{number}", NOTES_IGNORED)
    return run_of(row, f"{table}:{number}", diagnostics, table)


def run_of(
    row: Mapping[str, str], place: str, diagnostics: Diagnostics, table: Path | None = None
) -> PublishedRun:
    """Return the run that the cells of a row describe.

    Models that do not ship with the package are read from ``models.csv`` in the folder of ``table``.
    """
    texts = TableRow(place, -1, 0, {name: text.strip() for name, text in row.items()})
    cells = _RunCells(texts, typed_row(texts, _RunColumns), diagnostics)
    model = _model(cells, table)
    layout = _layout(cells, model, table)
    training = _training(cells, layout)
    overlap = possible_overlap(training.overlap, model, layout, training.lora_rank)
    if overlap != training.overlap:
        cells.report("overlap", "the model does not have the parts of the published overlap: it is ignored")
        training = replace(training, overlap=overlap)
    return PublishedRun(
        model=model, layout=layout, training=training, row=row, place=place, table=table or Path()
    )


@dataclass(frozen=True, slots=True)
class _RunCells:
    """Cells of a row of a table of published runs: as text, and the typed columns."""

    row: TableRow
    columns: _RunColumns
    diagnostics: Diagnostics

    def text(self, name: str) -> str:
        return self.row.cells.get(name, "")

    def report(self, code: str, message: str) -> None:
        """Warn about an assumed setting."""
        self.diagnostics.warning(f"row.{code}", self.row.path, message)


def _model(cells: _RunCells, table: Path | None) -> Model:
    """Warn that a setting which the row does not state is assumed."""
    name, hint = cells.text("model"), ""
    try:
        model = named_model(name)
    except UsageError as error:
        model, hint = None, error.hint or ""
    if model is None and table is not None:
        models = file_in_folder_of(table, MODELS, "column model")
        if model := model_in_table(models, name):
            cells.report("model", f"the configuration of {clipped(name)} is taken from {MODELS}")
    if model is None:
        raise UnsupportedError(
            f"the configuration of model {clipped(name)!r} is not known",
            path=cells.row.path,
            position="column model",
            hint=hint,
        )
    if model.positions == "learned":
        return replace(model, max_positions=max(model.max_positions, cells.columns.seq_len))
    return model


def _layout(cells: _RunCells, model: Model, table: Path | None) -> Layout:
    tp, pp, cp = (cells.columns.tp, cells.columns.pp, cells.columns.cp)
    ranks = cells.columns.num_accelerators
    dp = cells.columns.dp or max(1, ranks // (tp * pp * cp))
    if dp * tp * pp * cp != ranks:
        raise FormatError(
            f"dp x tp x pp x cp = {dp * tp * pp * cp:,}, but the row has {ranks:,} accelerators",
            path=cells.row.path,
            hint="correct the degrees, or leave dp empty to have it computed",
        )
    vp = cells.columns.vp or 1
    if not cells.text("vp") and pp > 1:
        cells.report("vp", "virtual stages are missing: none assumed")
    sharding = cells.text("fsdp").casefold()
    sequence_parallel = cells.text("sequence_parallel").casefold()
    has_experts = any(isinstance(block, Experts) for block in model.blocks())
    is_parallel = sequence_parallel.startswith("yes") or (tp > 1 and (not sequence_parallel or has_experts))
    if tp > 1 and not sequence_parallel:
        cells.report("sequence-parallel", "sequence parallelism is missing: assumed with tensor parallelism")
    if tp > 1 and sequence_parallel.startswith("no") and has_experts:
        cells.report(
            "sequence-parallel",
            "the row has no sequence parallelism, but experts need it with tensor parallelism: assumed",
        )
    if not sharding and dp > 1:
        cells.report("sharding", "sharding is missing: a distributed optimizer assumed (zero 1)")
    # Data ranks that share one copy: the fsdp axis of a mesh that has a replicated axis too.
    axis = re.search(r"ici_fsdp (\d{1,9})\b", sharding) or re.search(r"shard \((\d{1,9})\)", sharding)
    slices = re.search(r"over ([1-9]\d{0,8}) slices", sharding)
    shard = int(axis[1]) if axis else dp // int(slices[1]) if slices else 0
    # Megatron-Core divides layers evenly: if only layers, embedding and head divide, the last two count as
    # layers.
    layers, chunks = len(model.layers), pp * vp
    is_megatron = cells.text("source") in {"Megatron-Bridge", "MLPerf-Training"}
    counts = is_megatron and layers % chunks != 0 and (layers + 2) % chunks == 0
    return Layout(
        dp=dp, tp=tp, pp=pp, vp=vp, cp=cp, ep=cells.columns.ep, etp=cells.columns.etp,
        zero=_zero(sharding), shard=shard if 0 < shard < dp and dp % shard == 0 else 0,
        sequence_parallel=is_parallel,
        embedding_counts=counts, head_counts=counts,
        ring_attention=cells.columns.context_communication == "ring",
        context_all_to_all=cells.columns.context_communication == "all-to-all",
        expert_node=_expert_node(cells, table) if has_experts else 0,
    )  # fmt: skip


def _expert_node(cells: _RunCells, table: Path | None) -> int:
    """Return the number of expert-parallel ranks that are connected directly, if tokens are sent once to each
    group of these; 0 if they are sent to each expert.
    """
    columns = cells.columns
    if columns.expert_dispatch not in {"deepep", "hybridep"} or columns.ep == 1:
        return 0
    if columns.etp > 1 or cells.text("capacity_factor"):
        cells.report(
            "dispatch", "tokens at a capacity limit are sent to each expert: one copy per rank is ignored"
        )
        return 0
    spelling = cells.text("accelerator")
    link = load_device(resolve_reference(table, spelling, "column accelerator") if table else spelling).link(
        "scale_up"
    )
    size = link.devices_per_domain if link is not None else 0
    domain = size if size > 1 else columns.ep
    return columns.ep if columns.ep <= domain else gcd(columns.ep, domain)


def _zero(text: str) -> int:
    """Return the ZeRO level (0-3) that the text of the column ``fsdp`` describes."""
    if "zero2" in text or "grad-op" in text:
        return 2
    if any(word in text for word in ("zero3", "full", "megatron-fsdp", "fsdp")):
        return 3
    if "none" in text or "frozen" in text:
        return 0
    return 1


_STYLES: Mapping[str, Style] = {
    "maxtext": "maxtext",
    "tpu-recipes": "maxtext",
    "torchtitan": "torchtitan",
    "llm-foundry": "torchtitan",
}


_RUN_EAGERLY = frozenset({"llm-foundry", "torchtitan"})
"""Sources whose framework does not compile layers by default (torchtitan: ``compile = false``)."""

_PRECISIONS = (
    ("nvfp4; attention", "nvfp4-attention"),
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("fp8 attention", "fp8-attention"),
    ("rowwise", "fp8-rowwise"),
    ("delayed", "fp8-delayed"),
    ("tensorwise", "fp8-current"),
    ("fp8-te", "fp8-delayed"),  # Composer selects delayed scaling of Transformer Engine
    ("block", "fp8-block"),
    ("fp8", "fp8-current"),
    ("int8", "int8"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("tf32", "tf32"),
    ("f32", "f32"),
    ("fp32", "f32"),
)
"""Words of the column and the precision that they name; the first one in the text counts."""


def _training(cells: _RunCells, layout: Layout) -> Training:
    batch = cells.columns.global_batch or layout.dp
    micro = _micro_batch(cells, batch, layout.dp)
    source = cells.text("source")
    lora = cells.text("train_type") == "lora"
    framework = cells.text("framework").casefold()
    style = _STYLES.get(source, "maxtext" if "maxtext" in framework else "megatron")
    optimizer = cells.text("optimizer").casefold()
    text = cells.text("precision").casefold()
    precision_name = next((name for word, name in _PRECISIONS if word in text), "")
    if not precision_name:
        cells.report("precision", f"precision {clipped(text)!r} is not known: bf16 assumed")
    precision = precision_of(precision_name or "bf16")
    # Composer's mode PURE reduces gradients in 16 bits, submissions to MLPerf accumulate them in 16 bits.
    is_usual = "mode pure" in optimizer or (source == "MLPerf-Training" and precision.compute == "bf16")
    gradient_bits = cells.columns.gradient_precision
    if gradient_bits == "16bit" and precision.compute == "f32":
        raise FormatError(
            "gradients of 16 bits contradict activations of 32 bits",
            path=cells.row.path,
            position="column gradient_precision",
            hint="write f32, or correct the precision",
        )
    if gradient_bits == "16bit" or (is_usual and not gradient_bits):
        precision = replace(precision, gradient="bf16" if precision.compute == "f32" else precision.compute)
    lora_rank = 0
    if lora:
        match = re.search(r"rank (\d{1,6})\b", cells.text("optimizer"))
        if not match:
            cells.report("lora-rank", "the rank of adapters is missing: 16 assumed")
        lora_rank = int(match[1]) if match else 16
    # Products of Blackwell devices read 8-bit operands in either layout; other devices do not, nor 4-bit
    # operands.
    device = canonical_name(cells.text("accelerator")) or cells.text("accelerator")
    is_blackwell = device.startswith(("B200", "B300", "GB200", "GB300"))
    needs_transposed = not is_blackwell or "nvfp4" in cells.text("precision").casefold()
    library = "flash1" if "llm-foundry" in framework else ""
    if re.search(r"megatron-lm \(20(20|21|22)", framework):
        library = "measured"
    return Training(
        seq=cells.columns.seq_len,
        global_batch=batch,
        micro_batch=micro,
        precision=precision,
        recompute=_recompute(cells),
        schedule="interleaved" if layout.vp > 1 else "1f1b",
        style=style,
        overlap=_overlap(cells, layout),
        lora_rank=lora_rank,
        lora_attention_only=lora,
        capacity=_capacity(cells),
        pure_16bit="weights bfloat16" in optimizer,
        optimizer_offload="cpu offload of the optimizer" in optimizer,
        fused_loss=source not in {"Megatron-LM", "torchtitan"},
        compiled=cells.columns.compiled == "yes"
        or (not cells.columns.compiled and source not in _RUN_EAGERLY),
        transposed_weights=not lora and needs_transposed,
        fused_gradients=cells.columns.gradient_fusion != "no",
        launch=_LAUNCHES.get(cells.columns.cuda_graphs, "kernels"),
        library=library,
    )


_LAUNCHES: Mapping[str, Launch] = {"all": "whole", "parts": "partial-graphs"}
"""Launch modes by value of the column ``cuda_graphs``; otherwise PyTorch launches kernels one by one."""


def _micro_batch(cells: _RunCells, batch: int, dp: int) -> int:
    """Return the number of sequences in a micro-batch.

    It is the published number, or is computed from the published number of accumulation steps, or is 1. A
    published number that does not divide the batch of a data-parallel rank is replaced by the next smaller
    number that does.
    """
    micro = cells.columns.micro_batch
    passes = cells.columns.grad_accum
    if not micro and passes and batch % (dp * passes) == 0:
        return batch // (dp * passes)
    if not micro:
        cells.report("micro-batch", "the micro-batch is missing: one sequence assumed")
        return 1
    if batch % (dp * micro):
        fits = next((size for size in range(min(micro, batch), 0, -1) if batch % (dp * size) == 0), micro)
        if fits != micro:
            cells.report(
                "micro-batch",
                f"a batch of {batch:,} does not divide into micro-batches of {micro}: {fits} assumed",
            )
        return fits
    return micro


def _capacity(cells: _RunCells) -> float:
    """Return the capacity factor of experts; 0 for dropless experts."""
    if cells.text("capacity_factor") == "dropped":
        cells.report("capacity", "the capacity at which tokens are dropped is missing: 1 assumed")
        return 1.0
    return typed_row(cells.row, _CapacityColumn).capacity_factor


def _overlap(cells: _RunCells, layout: Layout) -> Overlap:
    """Return the communication that the run overlaps with computation.

    Nothing overlaps if the column ``communication_overlap`` is ``off``, or in Megatron-LM before 2023. From
    2022 on only its tensor-parallel collectives overlap in the backward pass (arXiv 2205.05198).
    Tensor-parallel collectives overlap if the column ``tensor_overlap`` is ``yes``. In recipes of
    Megatron-Bridge for dense models they also overlap if that column is empty.
    """
    source, framework = cells.text("source"), cells.text("framework")
    year = re.search(r"Megatron-LM \((202[0-2])", framework)
    if cells.columns.communication_overlap == "off" or year:
        is_off = cells.columns.communication_overlap == "off" or (year is not None and year[1] < "2022")
        return replace(Overlap.none(), tensor_backward=not is_off)
    tensor_overlap = cells.columns.tensor_overlap
    is_recipe = source == "Megatron-Bridge" and not cells.text("ep") and tensor_overlap != "no"
    if layout.tp > 1 and is_recipe and tensor_overlap != "yes":
        cells.report("tensor-overlap", "the overlap of tensor parallelism is missing: assumed on")
    return Overlap(
        tensor=layout.tp > 1 and (tensor_overlap == "yes" or is_recipe),
        experts=cells.columns.expert_overlap in {"yes", "shared"},
        microbatches=cells.columns.expert_overlap == "microbatches",
    )


_MODULES: Mapping[str, str] = {
    "layernorm": "layernorm",
    "moe_act": "moe_act",
    "mla_up_proj": "mla_up_proj",
    "mlp": "mlp",
    "moe": "moe",
    "attention core": "core_attn",
    "core_attn": "core_attn",
}
_POLICIES: Mapping[str, tuple[str, ...]] = {
    "every other layer": ("block",),
    "per-op": ("layernorm", "mlp_act", "qkv"),  # the results of attention and some matmuls are saved
    # MaxText: minimal saves the results of all products, minimal_flash also of fused attention
    "minimal_flash": ("layernorm", "mlp_act"),
    "minimal": ("layernorm", "mlp_act", "core_attn"),
    "qkv_proj_offloaded": ("block",),
    "remat_policy custom": ("block",),
    "full": ("block",),
}
"""Recomputed modules of policies; the first one in the text counts."""


def _recompute(cells: _RunCells) -> Recompute:
    """Return the recomputation and offload from the text of the column."""
    text = cells.text("recompute").casefold()
    if text in UNSTATED:
        cells.report("recompute", "recomputation is missing: none assumed")
    if not text or text.startswith(("none", "not stated")):
        match = re.search(r"cpu offload of activations: (\d{1,9}) layers", cells.text("optimizer").casefold())
        return Recompute(layers=int(match[1]), offloaded=frozenset({"block"})) if match else Recompute()
    policy = next((modules for words, modules in _POLICIES.items() if words in text), ())
    named = {module for word, module in _MODULES.items() if re.search(rf"\b{word}\b", text)}
    match = re.search(r"offload to host: ([\w+]+)", text) if text.startswith("remat_policy custom") else None
    offloaded = frozenset(match[1].split("+") if match else ())
    for name in sorted(offloaded.difference(MODULES, (LAYER_INPUT,))):
        cells.report("offload", f"the offload of {clipped(name)} is not modelled: it is recomputed")
    layers = re.search(r"full block (\d{1,9})\b", text)
    return Recompute(
        modules=frozenset(policy or named or ("core_attn",)),
        layers=int(layers[1]) if layers else -1,
        every=2 if "every other layer" in text else 1,
        offloaded=offloaded,
        per_operation="per-op" in text,
    )


UNSTATED = frozenset({"", "not stated"})
"""Contents of a cell whose setting is unknown, in lower case."""

PUBLISHERS: Mapping[str, Convention] = {
    "MLPerf-Training": Convention.HALF,
    "Megatron-Bridge": Convention.HALF,
    "Megatron-LM": Convention.FULL,
    "SimuMax": Convention.HALF,
    "llm-foundry": Convention.FULL,
    "maxtext": Convention.HALF,
    "torchtitan": Convention.HALF,
    "tpu-recipes": Convention.HALF,
}
"""Convention of the rates that a source publishes, if the column ``attention_flops`` is empty."""


def convention_of(row: Mapping[str, str]) -> Convention:
    """Return the convention by which the published rate of a row counts attention FLOPs."""
    text = row.get("attention_flops", "")
    if text:
        return Convention.FULL if text == "full" else Convention.HALF
    return PUBLISHERS.get(row.get("source", ""), Convention.HALF)


def published_flops(run: PublishedRun) -> float:
    """Return the FLOPs of a step by the convention of the column ``model_tflop_per_step``: causal attention
    counts half of all pairs of tokens, for all sources.
    """
    return model_flops(_as_published(run), run.training, Convention.HALF)


def publisher_flops(run: PublishedRun) -> float:
    """Return the FLOPs of a step by the convention of the publisher, so that they agree with the published
    rate of the row.

    Rates of Megatron-LM in 2021 include recomputed layers (arXiv 2104.04473, section 5.1).
    """
    model, training, convention = _as_published(run), run.training, convention_of(run.row)
    flops = model_flops(model, training, convention)
    if run.row.get("hw_tflops_per_gpu") and not run.row.get("model_tflops_per_gpu"):
        head = 2.0 * model.vocab * model.hidden * training.seq
        flops += training.global_batch * (forward_flops(model, training.seq, convention) - head)
    return flops


def _as_published(run: PublishedRun) -> Model:
    """Return the model with the sizes that the published FLOPs assume.

    Megatron's formula for hybrid models assumes that the inner width of a Mamba block is twice the hidden
    width.
    """
    model = run.model
    if run.row.get("source") != "Megatron-Bridge":
        return model

    def widened(block: Block) -> Block:
        if isinstance(block, Mamba):
            return replace(block, heads=2 * model.hidden // block.head_dim)
        return block

    return replace(model, layers=tuple(tuple(map(widened, layer)) for layer in model.layers))
