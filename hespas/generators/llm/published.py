"""Settings of a training run from a row of a table of published runs.

Columns: ``model, num_accelerators, seq_len, global_batch, micro_batch, dp, tp, pp, vp, cp, ep, etp, fsdp,
sequence_parallel, recompute, precision, optimizer, train_type, framework, source, accelerator``, and those of
:mod:`hespas.generators.llm.published_settings`. Settings that a row does not state are assumed and reported.
Columns of measurements, and ``network``, a system's name or file, are for :mod:`hespas.validators.league`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hespas.files.documents import check_column_names
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.files.trust import file_beside
from hespas.generators.llm.flops import Convention, forward_flops, model_flops
from hespas.generators.llm.layout import Layout, possible_overlap
from hespas.generators.llm.model import Block, Experts, Mamba, Model
from hespas.generators.llm.model_file import named_model
from hespas.generators.llm.model_table import model_in_table
from hespas.generators.llm.published_settings import CHOICES, NUMBERS, from_notes
from hespas.generators.llm.settings import (
    LAYER_INPUT,
    MODULES,
    Overlap,
    Precision,
    Recompute,
    Style,
    Training,
    precision_of,
)
from hespas.generators.llm.step import Board, LlmStep, training_facts
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError, UsageError, clipped
from hespas.graph.workload import Launch, StepFacts
from hespas.hardware import Device, canonical, load_device, stated_by

__all__ = [
    "MODELS",
    "PUBLISHERS",
    "PublishedRun",
    "convention_of",
    "published_flops",
    "publisher_flops",
    "row_of",
    "rows_of",
    "run_of",
]

_MOST_COUNT = 10**9
MODELS = "models.csv"
"""The table of models that do not ship, in the folder of a table of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A run as a generator's settings: what was published is in ``row``, by column."""

    model: Model
    layout: Layout
    training: Training
    row: Mapping[str, str]
    place: str
    table: Path = Path()
    """Table of the row; a file that the row names lies in the folder of the table."""

    def board(self, device: Device) -> Board | None:
        """Return the board of the run where its row says that it differs from the file of its device."""
        power, memory = self.row.get("power_limit_w", ""), self.row.get("memory_bandwidth_gb_per_s", "")
        if not (power or memory):
            return None
        ratio = float(memory) * 1e9 / device.main_memory.bandwidth_bytes_per_s if memory else 1.0
        return Board(device=device.name, power_w=float(power) if power else 0.0, bandwidth=ratio)

    def facts(self, device: Device) -> StepFacts:
        """Return what simulators need of the step on its device beside its graph."""
        return training_facts(self.model, self.training, self.board(device))

    def step(self) -> LlmStep:
        """Return the step as a generator. Raises ``UsageError`` where a row that describes its board names an
        unknown device, ``BoundaryError`` where it names a file out of the folder of its table.
        """
        varies = bool(self.row.get("power_limit_w") or self.row.get("memory_bandwidth_gb_per_s"))
        spelling = self.row.get("accelerator", "")
        device = stated_by(self.table, spelling, "column accelerator") if varies else ""
        board = self.board(load_device(device)) if varies else None
        return LlmStep(model=self.model, layout=self.layout, training=self.training, board=board)


_NEEDED = ("global_batch", "model", "num_accelerators", "seq_len")


def rows_of(table: Path, needed: Sequence[str] = _NEEDED) -> Iterator[Mapping[str, str]]:
    """The rows of a table with the columns ``needed``. Raises ``FormatError`` for what is no such table."""
    try:
        text = read_document(table, limits().report_bytes, "a table of runs").decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        missing = set(needed) - set(reader.fieldnames or ())
        if missing:
            raise FormatError(
                f"no column {', '.join(sorted(missing))}", path=str(table), position="header",
                hint="a table of runs has a column for each setting: model, accelerator, num_accelerators, "
                "seq_len, global_batch, micro_batch, dp, tp, pp, ...",
            )  # fmt: skip
        check_column_names(reader.fieldnames or (), table)
        for number, row in enumerate(reader):
            beyond = any(row.pop(None, ()))
            if beyond or None in row.values():
                raise FormatError(
                    f"{'more' if beyond else 'fewer'} cells than the header", path=str(table),
                    position=f"row {number}",
                    hint="quote cells with commas in them, leave cells empty but not out; rows count from 0, "
                    "below the header",
                )  # fmt: skip
            yield from_notes(row)
    except FormatError as error:
        if error.position:
            raise
        raise _unreadable(error.message, table) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(str(error), table) from error


def _unreadable(why: str, table: Path) -> FormatError:
    hint = "name a CSV file: `table=runs.csv`; docs/league.md says its columns"
    return FormatError(f"cannot be read: {why}", path=str(table), hint=hint)


def row_of(table: Path, number: int, diagnostics: Diagnostics) -> PublishedRun:
    """The run of row ``number``, from 0, the header not counted. Raises ``UsageError`` where there is no such
    row, ``UnsupportedError`` where the configuration of its model is not known, ``FormatError`` for cells
    that are no numbers.
    """
    row = next(islice(rows_of(table), number, None), None)
    if row is None:
        raise UsageError(f"{table} has no row {number:,}", hint="rows count from 0, the header not counted")
    return run_of(row, f"{table}:{number}", diagnostics, table)


def run_of(
    row: Mapping[str, str], place: str, diagnostics: Diagnostics, table: Path | None = None
) -> PublishedRun:
    """Return the run that the cells of a row describe. Models that do not ship are read from ``models.csv``
    in the folder of ``table``.
    """
    cells = _Cells(row, place, diagnostics)
    _check_settings(cells)
    model = _model(cells, table)
    layout = _layout(cells, model)
    training = _with_possible_overlap(cells, model, layout, _training(cells, layout))
    return PublishedRun(
        model=model, layout=layout, training=training, row=row, place=place, table=table or Path()
    )


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of a row, and where it stands."""

    row: Mapping[str, str]
    place: str
    diagnostics: Diagnostics

    def text(self, name: str) -> str:
        return self.row.get(name, "").strip()

    def count(self, name: str, otherwise: int = 0) -> int:
        """A whole number, which tables may write as 8.0; ``otherwise`` where the cell is empty."""
        text = self.text(name)
        if not text:
            return otherwise
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 < value <= _MOST_COUNT and value.is_integer()):
            raise FormatError(f"{clipped(text)!r} is no count", path=self.place, position=f"column {name}")
        return int(value)

    def assumed(self, code: str, message: str) -> None:
        self.diagnostics.warning(f"row.{code}", self.place, message)


def _check_settings(cells: _Cells) -> None:
    """Raise ``FormatError`` for a column of settings with a value that it does not have."""
    for name, allowed in CHOICES.items():
        text = cells.text(name)
        if text and text not in allowed:
            raise FormatError(
                f"{clipped(text)!r} is not a value of {name}",
                path=cells.place,
                position=f"column {name}",
                hint=f"write {', '.join(allowed)}, or leave the cell empty",
            )
    for name in NUMBERS:
        text = cells.text(name)
        if text and not (name == "capacity_factor" and text == "dropped") and not _is_positive(text):
            raise FormatError(
                f"{clipped(text)!r} is not a number above 0",
                path=cells.place,
                position=f"column {name}",
                hint="write a number, or leave the cell empty",
            )


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < _MOST_COUNT
    except ValueError:
        return False


def _model(cells: _Cells, table: Path | None) -> Model:
    """Return a model that ships, else one of the table of models in the folder of the table of runs."""
    name, hint = cells.text("model"), ""
    try:
        found = named_model(name)
    except UsageError as error:
        found, hint = None, error.hint or ""
    if found is None and table is not None:
        models = file_beside(table, MODELS, "column model")
        if found := model_in_table(models, name):
            cells.assumed("model", f"the configuration of {clipped(name)} is that of {MODELS}")
    if found is None:
        raise UnsupportedError(
            f"the configuration of model {clipped(name)!r} is not known",
            path=cells.place,
            position="column model",
            hint=hint,
        )
    if found.positions == "learned":
        return replace(found, max_positions=max(found.max_positions, cells.count("seq_len", 1)))
    return found


def _layout(cells: _Cells, model: Model) -> Layout:
    tp, pp, cp = (cells.count(name, 1) for name in ("tp", "pp", "cp"))
    ranks = cells.count("num_accelerators", 1)
    dp = cells.count("dp") or max(1, ranks // (tp * pp * cp))
    if dp * tp * pp * cp != ranks:
        raise FormatError(
            f"dp x tp x pp x cp = {dp * tp * pp * cp:,} ranks on {ranks:,} accelerators",
            path=cells.place,
            hint="num_accelerators is the product of the degrees; leave dp empty to have it computed",
        )
    vp = cells.count("vp") or 1
    if not cells.text("vp") and pp > 1:
        cells.assumed("vp", "virtual stages are not stated: none assumed")
    text = cells.text("fsdp").casefold()
    stated = cells.text("sequence_parallel").casefold()
    experts = any(isinstance(block, Experts) for block in model.blocks())
    parallel = stated.startswith("yes") or (tp > 1 and (not stated or experts))
    if tp > 1 and not stated:
        cells.assumed(
            "sequence-parallel", "sequence parallelism is not stated: assumed with tensor parallelism"
        )
    if tp > 1 and stated.startswith("no") and experts:
        cells.assumed(
            "sequence-parallel",
            "no sequence parallelism is stated, which experts need with tensor parallelism",
        )
    if not text and dp > 1:
        cells.assumed("sharding", "sharding is not stated: a distributed optimizer assumed (zero 1)")
    counts = _ends_count(cells, model, pp * vp)
    return Layout(
        dp=dp, tp=tp, pp=pp, vp=vp, cp=cp, ep=cells.count("ep", 1), etp=cells.count("etp", 1),
        zero=_zero(text), shard=_shard(text, dp), sequence_parallel=parallel,
        embedding_counts=counts, head_counts=counts,
        context_all_to_all=cells.text("context_communication") == "all-to-all",
    )  # fmt: skip


def _ends_count(cells: _Cells, model: Model, chunks: int) -> bool:
    """Whether the embedding and the head take places of layers: Megatron-Core parts places evenly, so where
    layers do not part and two more do.
    """
    layers = len(model.layers)
    megatron = cells.text("source") in {"Megatron-Bridge", "MLPerf-Training"}
    return megatron and layers % chunks != 0 and (layers + 2) % chunks == 0


def _zero(text: str) -> int:
    """What is sharded over data ranks, by the words of the column."""
    if "zero2" in text or "grad-op" in text:
        return 2
    if any(word in text for word in ("zero3", "full", "megatron-fsdp", "fsdp")):
        return 3
    if "none" in text or "frozen" in text:
        return 0
    return 1


def _shard(text: str, dp: int) -> int:
    """Data ranks that share one copy: the fsdp axis of a mesh beside a replicated one."""
    match = re.search(r"ici_fsdp (\d{1,9})\b", text) or re.search(r"shard \((\d{1,9})\)", text)
    slices = re.search(r"over ([1-9]\d{0,8}) slices", text)
    size = int(match[1]) if match else dp // int(slices[1]) if slices else 0
    return size if 0 < size < dp and dp % size == 0 else 0


_STYLES: Mapping[str, Style] = {
    "maxtext": "maxtext",
    "tpu-recipes": "maxtext",
    "torchtitan": "torchtitan",
    "llm-foundry": "torchtitan",
}


def _training(cells: _Cells, layout: Layout) -> Training:
    batch = cells.count("global_batch", layout.dp)
    micro = _micro_batch(cells, batch, layout.dp)
    source = cells.text("source")
    lora = cells.text("train_type") == "lora"
    framework = cells.text("framework").casefold()
    style = _STYLES.get(source, "maxtext" if "maxtext" in framework else "megatron")
    optimizer = cells.text("optimizer").casefold()
    return Training(
        seq=cells.count("seq_len", 1),
        global_batch=batch,
        micro_batch=micro,
        precision=_in_16_bits(_precision(cells), source, optimizer),
        recompute=_recompute(cells),
        schedule="interleaved" if layout.vp > 1 else "1f1b",
        style=style,
        overlap=_overlap(cells, layout),
        lora_rank=_lora_rank(cells),
        lora_attention_only=lora,
        capacity=_capacity(cells),
        pure_16bit="weights bfloat16" in optimizer,
        optimizer_offload="cpu offload of the optimizer" in optimizer,
        fused_loss=source not in {"Megatron-LM", "torchtitan"},
        compiled=cells.text("compiled") != "no" and source != "llm-foundry",
        transposed_weights=not lora and _needs_transposed(cells),
        launch=_LAUNCHES.get(cells.text("cuda_graphs"), "kernels"),
        library=_library(framework),
    )


_LAUNCHES: Mapping[str, Launch] = {"all": "whole", "parts": "partial-graphs"}
"""Values of the column ``cuda_graphs``; modules of PyTorch launch kernels one by one otherwise."""


def _library(framework: str) -> str:
    """Return the library of fused attention that a framework is known to run; empty: that of its style."""
    if re.search(r"megatron-lm \(20(20|21|22)", framework):
        return "measured"
    return "flash1" if "llm-foundry" in framework else ""


def _micro_batch(cells: _Cells, batch: int, dp: int) -> int:
    """Sequences of a micro-batch: stated, or the batch over what passes a rank makes, or one."""
    micro = cells.count("micro_batch")
    passes = cells.count("grad_accum")
    if not micro and passes and batch % (dp * passes) == 0:
        return batch // (dp * passes)
    if not micro:
        cells.assumed("micro-batch", "the micro-batch is not stated: one sequence assumed")
        return 1
    if batch % (dp * micro):
        fits = next((size for size in range(min(micro, batch), 0, -1) if batch % (dp * size) == 0), micro)
        if fits != micro:
            cells.assumed(
                "micro-batch",
                f"a batch of {batch:,} does not part into micro-batches of {micro}: {fits} taken",
            )
        return fits
    return micro


def _lora_rank(cells: _Cells) -> int:
    """The rank of adapters; 0 where all weights are trained."""
    if cells.text("train_type") != "lora":
        return 0
    stated = re.search(r"rank (\d{1,6})\b", cells.text("optimizer"))
    if not stated:
        cells.assumed("lora-rank", "the rank of adapters is not stated: 16 assumed")
    return int(stated[1]) if stated else 16


def _capacity(cells: _Cells) -> float:
    """Return the capacity factor of experts; 0 where no token is dropped."""
    stated = cells.text("capacity_factor")
    if stated == "dropped":
        cells.assumed("capacity", "the capacity at which tokens are dropped is not stated: 1 assumed")
        return 1.0
    return float(stated) if stated else 0.0


def _in_16_bits(precision: Precision, source: str, optimizer: str) -> Precision:
    """With 16-bit gradients where the source says or is known to have them: Composer's mode PURE reduces them
    so, submissions to MLPerf add them up so.
    """
    narrow = "mode pure" in optimizer or (source == "MLPerf-Training" and precision.compute == "bf16")
    return replace(precision, gradient="bf16") if narrow else precision


def _needs_transposed(cells: _Cells) -> bool:
    """Products of Blackwell devices read 8-bit operands in either layout; those of others, and 4-bit ones, do
    not.
    """
    device = canonical(cells.text("accelerator")) or cells.text("accelerator")
    blackwell = device.startswith(("B200", "B300", "GB200", "GB300"))
    return not blackwell or "nvfp4" in cells.text("precision").casefold()


def _overlap(cells: _Cells, layout: Layout) -> Overlap:
    """Return what overlaps computation: nothing where a column states it, nor in Megatron-LM before 2023;
    tensor parallelism where a column states it, and in recipes of Megatron-Bridge for dense models.
    """
    source, framework = cells.text("source"), cells.text("framework")
    if cells.text("communication_overlap") == "off" or re.search(r"Megatron-LM \(202[0-2]", framework):
        return Overlap.none()
    stated = cells.text("tensor_overlap")
    named = stated == "yes"
    recipe = source == "Megatron-Bridge" and not cells.text("ep") and stated != "no"
    if layout.tp > 1 and recipe and not named:
        cells.assumed("tensor-overlap", "whether tensor parallelism overlaps is not stated: assumed it does")
    return Overlap(tensor=layout.tp > 1 and (named or recipe), experts=cells.text("expert_overlap") == "yes")


_PRECISIONS = (
    ("nvfp4; attention", "nvfp4-attention"),
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("fp8 attention", "fp8-attention"),
    ("rowwise", "fp8-rowwise"),
    ("delayed", "fp8-delayed"),
    ("tensorwise", "fp8-current"),
    ("fp8-te", "fp8-delayed"),  # Composer asks Transformer Engine for delayed scaling
    ("block", "fp8-block"),
    ("fp8", "fp8-current"),
    ("int8", "int8"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("tf32", "tf32"),
    ("f32", "f32"),
    ("fp32", "f32"),
)
"""Words of the column, the first that occurs counts, and the precision they name."""


def _precision(cells: _Cells) -> Precision:
    text = cells.text("precision").casefold()
    for word, name in _PRECISIONS:
        if word in text:
            return precision_of(name)
    cells.assumed("precision", f"precision {clipped(text)!r} is not known: bf16 assumed")
    return precision_of("bf16")


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
    "per-op": ("layernorm", "mlp_act", "qkv"),  # every second product is kept, and attention
    # MaxText: minimal keeps the results of all products, minimal_flash also those of fused attention
    "minimal_flash": ("layernorm", "mlp_act"),
    "minimal": ("layernorm", "mlp_act", "core_attn"),
    "qkv_proj_offloaded": ("block",),
    "remat_policy custom": ("block",),
    "full": ("block",),
}
"""What policies compute again; the first whose words occur counts."""


def _with_possible_overlap(cells: _Cells, model: Model, layout: Layout, training: Training) -> Training:
    """Without overlap that a source switches on and that its model has no part for."""
    overlap = possible_overlap(training.overlap, model, layout, training.lora_rank)
    if overlap == training.overlap:
        return training
    cells.assumed("overlap", "what is said to overlap is no part of the model: nothing does in its place")
    return replace(training, overlap=overlap)


def _recompute(cells: _Cells) -> Recompute:
    """What is computed again, by the words of the column."""
    text = cells.text("recompute").casefold()
    if not text or text == "not stated":
        cells.assumed("recompute", "recomputation is not stated: none assumed")
    if not text or text.startswith(("none", "not stated")):
        away = re.search(r"cpu offload of activations: (\d{1,9}) layers", cells.text("optimizer").casefold())
        return Recompute(layers=int(away[1]), offloaded=frozenset({"block"})) if away else Recompute()
    layers = re.search(r"full block (\d{1,9})\b", text)
    moved = _offloaded(text) if text.startswith("remat_policy custom") else []
    _tell_offloaded(cells, moved)
    return Recompute(
        modules=frozenset(_modules(text)),
        layers=int(layers[1]) if layers else -1,
        every=2 if "every other layer" in text else 1,
        offloaded=frozenset(moved),
        per_operation="per-op" in text,
    )


def _modules(text: str) -> Iterable[str]:
    """The modules that words of the column name; whole layers where they say full."""
    for words, modules in _POLICIES.items():
        if words in text:
            return modules
    named = {module for word, module in _MODULES.items() if re.search(rf"\b{word}\b", text)}
    return named or ["core_attn"]


def _offloaded(text: str) -> list[str]:
    match = re.search(r"offload to host: ([\w+]+)", text)
    return match[1].split("+") if match else []


def _tell_offloaded(cells: _Cells, names: Iterable[str]) -> None:
    """Say what moves to the host and is of nothing that is known to."""
    for name in sorted(set(names).difference(MODULES, (LAYER_INPUT,))):
        cells.assumed("offload", f"{clipped(name)} on the host is not modelled: it is computed again")


# --- FLOPs as sources count them

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
"""How the rates that a source prints count attention, where the column ``attention_flops`` is empty."""


def convention_of(row: Mapping[str, str]) -> Convention:
    """How the rate that a row prints counts attention."""
    stated = row.get("attention_flops", "")
    if stated:
        return Convention.FULL if stated == "full" else Convention.HALF
    return PUBLISHERS.get(row.get("source", ""), Convention.HALF)


def published_flops(run: PublishedRun) -> float:
    """FLOPs of a step as the column ``model_tflop_per_step`` counts them, whatever the source: half of the
    square of causal attention.
    """
    return model_flops(_as_published(run), run.training, Convention.HALF)


def publisher_flops(run: PublishedRun) -> float:
    """FLOPs of a step as the rate that the row prints counts them. Those of Megatron-LM in 2021 count layers
    that are computed again (arXiv 2104.04473, section 5.1).
    """
    model, training, convention = _as_published(run), run.training, convention_of(run.row)
    flops = model_flops(model, training, convention)
    if run.row.get("hw_tflops_per_gpu") and not run.row.get("model_tflops_per_gpu"):
        head = 2.0 * model.vocab * model.hidden * training.seq
        flops += training.global_batch * (forward_flops(model, training.seq, convention) - head)
    return flops


def _as_published(run: PublishedRun) -> Model:
    """Megatron's formula for hybrid models takes the inner width of a Mamba block as twice the hidden one,
    whatever it is.
    """
    model = run.model
    if run.row.get("source") != "Megatron-Bridge":
        return model

    def widened(block: Block) -> Block:
        if isinstance(block, Mamba):
            return replace(block, heads=2 * model.hidden // block.head_dim)
        return block

    return replace(model, layers=tuple(tuple(map(widened, layer)) for layer in model.layers))
