"""Settings of a training run from a row of a table of published runs.

Columns: ``model, num_accelerators, seq_len, global_batch, micro_batch, dp, tp, pp, vp, cp, ep, etp, fsdp,
sequence_parallel, recompute, precision, optimizer, train_type, framework, source, accelerator, notes``. What
a row does not say is assumed, and told.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hespas.generators.llm.flops import Convention, model_flops
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Experts, Mamba, Model
from hespas.generators.llm.model_file import load_model
from hespas.generators.llm.settings import (
    Overlap,
    Precision,
    Recompute,
    Style,
    Training,
    precision_of,
)
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError, UnsupportedError, UsageError, clipped

__all__ = ["PublishedRun", "published_flops", "row_of", "rows_of", "run_of"]

_MOST_COUNT = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A run as a generator's settings: what was published is in ``row``, by column."""

    model: Model
    layout: Layout
    training: Training
    row: Mapping[str, str]
    place: str


def rows_of(table: Path) -> Iterator[Mapping[str, str]]:
    """The rows of a table. Raises ``FormatError`` for what is no such table."""
    try:
        with table.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream, strict=True)
            missing = {"model", "num_accelerators", "seq_len", "global_batch"} - set(reader.fieldnames or ())
            if missing:
                raise FormatError(
                    f"no column {', '.join(sorted(missing))}", path=str(table), position="header",
                    hint="a table of runs has the columns of docs/generation.md",
                )  # fmt: skip
            for row in reader:
                yield {name: value or "" for name, value in row.items() if isinstance(name, str)}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"cannot be read: {error}", path=str(table)) from error


def row_of(table: Path, number: int, diagnostics: Diagnostics) -> PublishedRun:
    """The run of row ``number``, from 0, the header not counted. Raises ``UsageError`` where there is no such
    row, ``UnsupportedError`` where the configuration of its model is not known, ``FormatError`` for cells
    that are no numbers.
    """
    row = next(islice(rows_of(table), number, None), None)
    if row is None:
        raise UsageError(f"{table} has no row {number:,}", hint="rows count from 0, the header not counted")
    return run_of(row, f"{table}:{number}", diagnostics)


def run_of(row: Mapping[str, str], place: str, diagnostics: Diagnostics) -> PublishedRun:
    """The run that the cells of a row describe."""
    cells = _Cells(row, place, diagnostics)
    model = _model(cells)
    layout = _layout(cells, model)
    return PublishedRun(model=model, layout=layout, training=_training(cells, layout), row=row, place=place)


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
        if not (value == int(value) and 0 < value <= _MOST_COUNT):
            raise FormatError(f"{clipped(text)!r} is no count", path=self.place, position=f"column {name}")
        return int(value)

    def assumed(self, code: str, message: str) -> None:
        self.diagnostics.warning(f"row.{code}", self.place, message)


def _model(cells: _Cells) -> Model:
    name = cells.text("model")
    try:
        found = load_model(name)
    except UsageError as error:
        raise UnsupportedError(
            f"the configuration of model {clipped(name)!r} is not known",
            path=cells.place,
            position="column model",
            hint=error.hint or "describe it in a .toml file",
        ) from error
    if found.positions == "learned":
        return replace(found, max_positions=max(found.max_positions, cells.count("seq_len", 1)))
    return found


def _layout(cells: _Cells, model: Model) -> Layout:
    tp, pp, cp = (cells.count(name, 1) for name in ("tp", "pp", "cp"))
    ranks = cells.count("num_accelerators", 1)
    dp = cells.count("dp") or max(1, ranks // (tp * pp * cp))
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
    counts = _ends_count(cells, model, pp * vp)
    return Layout(
        dp=dp, tp=tp, pp=pp, vp=vp, cp=cp, ep=cells.count("ep", 1), etp=cells.count("etp", 1),
        zero=_zero(text), shard=_shard(text, dp), sequence_parallel=parallel,
        embedding_counts=counts, head_counts=counts,
        context_all_to_all="cp communication: all-to-all" in cells.text("notes").casefold(),
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
    match = re.search(r"ici_fsdp (\d+)", text) or re.search(r"shard \((\d+)\)", text)
    slices = re.search(r"over (\d+) slices", text)
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
    micro = cells.count("micro_batch")
    if not micro:
        micro = 1
        cells.assumed("micro-batch", "the micro-batch is not stated: one sequence assumed")
    if batch % (layout.dp * micro):
        micro = next(size for size in range(micro, 0, -1) if batch % (layout.dp * size) == 0 or size == 1)
    source, notes = cells.text("source"), cells.text("notes").casefold()
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
        overlap=_overlap(notes, source, layout),
        lora_rank=16 if lora else 0,
        lora_attention_only=lora,
        capacity=1.0 if "capacity factor 1 " in notes else 1.25 if "capacity factor 1.25" in notes else 0.0,
        pure_16bit="weights bfloat16" in optimizer,
        optimizer_offload="cpu offload of the optimizer" in optimizer,
        fused_loss=source not in {"Megatron-LM", "torchtitan"},
        compiled="no torch.compile" not in notes and source != "llm-foundry",
        transposed_weights=not lora and _needs_transposed(cells),
    )


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
    blackwell = cells.text("accelerator").startswith(("B200", "B300", "GB200", "GB300"))
    return not blackwell or "nvfp4" in cells.text("precision").casefold()


def _overlap(notes: str, source: str, layout: Layout) -> Overlap:
    """What the source overlaps: nothing where its notes say so; tensor parallelism where they name it."""
    if "communication overlap off" in notes:
        return Overlap.none()
    tensor = layout.tp > 1 and ("tp overlap" in notes or "async tp" in notes)
    return Overlap(tensor=tensor, experts="overlap" in notes and source == "Megatron-Bridge")


_PRECISIONS = (
    ("nvfp4; attention", "nvfp4-attention"),
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("fp8 attention", "fp8-attention"),
    ("rowwise", "fp8-rowwise"),
    ("delayed", "fp8-delayed"),
    ("block", "fp8-block"),
    ("fp8", "fp8-current"),
    ("int8", "int8"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("f32", "f32"),
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


def _recompute(cells: _Cells) -> Recompute:
    """What is computed again, by the words of the column."""
    text = cells.text("recompute").casefold()
    if not text or text == "not stated":
        cells.assumed("recompute", "recomputation is not stated: none assumed")
    if not text or text.startswith(("none", "not stated")):
        away = re.search(r"cpu offload of activations: (\d+) layers", cells.text("optimizer").casefold())
        return Recompute(layers=int(away[1]), offloaded=frozenset({"block"})) if away else Recompute()
    layers = re.search(r"full block (\d+)", text)
    custom = text.startswith("remat_policy custom")
    return Recompute(
        modules=frozenset(_modules(text)),
        layers=int(layers[1]) if layers else -1,
        every=2 if "every other layer" in text else 1,
        offloaded=frozenset(_offloaded(text) if custom else ()),
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


def published_flops(run: PublishedRun) -> float:
    """Model FLOPs of a step as the source counts them: Megatron's formula for hybrid models takes the inner
    width of a Mamba block as twice the hidden one, whatever it is.
    """
    model = run.model
    if run.row.get("source") == "Megatron-Bridge":
        model = replace(
            model,
            layers=tuple(
                tuple(
                    replace(block, heads=2 * model.hidden // block.head_dim)
                    if isinstance(block, Mamba)
                    else block
                    for block in layer
                )
                for layer in model.layers
            ),
        )
    return model_flops(model, run.training, Convention.HALF)
