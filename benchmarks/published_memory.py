"""Peak memory of published runs, predicted against measured: ``python -m benchmarks.published_memory``.

Reads ``published_training.csv`` and ``models.csv`` (``--data`` says where). Prints each configuration whose
peak is published, the mean and the largest error of each source, and which published runs would not fit their
device by the prediction. Nothing is fitted to a row. Exits 1 past a mean of 3 %, an error of 10 %, or where
a run does not fit. Peaks whose unit is not stated are read as GiB and compared, but not judged.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hespas.generators.llm.layout import Layout, broken_rules
from hespas.generators.llm.memory import StageMemory, memory_of
from hespas.generators.llm.model import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    Layer,
    Mamba,
    Mlp,
    Model,
)
from hespas.generators.llm.settings import Precision, Recompute, Style, Training, precision_of
from hespas.hardware.library import device_names, load_device

__all__ = ["Run", "fullest", "main", "runs"]

_DATA = Path(__file__).parents[1].parent / "shared" / "data" / "published_e2e"
_GIB = 2**30
_MEAN, _MOST = 0.03, 0.10
_UNIT_NOT_STATED = "unit not stated"

Row = Mapping[str, str]


class Run(NamedTuple):
    """A published run: its row, counted from 0, and what it says; ``gap`` is why it says too little."""

    number: int
    row: Row
    model: Model | None = None
    layout: Layout = Layout()
    training: Training = Training(seq=1, global_batch=1)
    gap: str = ""


def runs(data: Path) -> Iterator[Run]:
    """Every row of the table."""
    with (data / "models.csv").open(encoding="utf-8", newline="") as file:
        models = {row["model"]: _model(row) for row in csv.DictReader(file)}
    with (data / "published_training.csv").open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            yield _run(number, row, models[row["model"]])


def _run(number: int, row: Row, model: Model | None) -> Run:
    absent = [name for name in ("micro_batch", "grad_accum", "dp", "tp", "pp", "cp") if not row[name]]
    if model is None:
        return Run(number, row, gap="the model is not described")
    if absent or "recompute" in row["missing"]:
        return Run(number, row, gap=f"not published: {row['missing'] or ', '.join(absent)}")
    if model.mtp_layers and "w/o MTP" in row["notes"]:
        return Run(number, row, gap="with or without further predictions")
    layout, training = _layout(row, len(model.layers)), _training(row)
    broken = [each.rule for each in broken_rules(model, layout, training)]
    if broken:
        return Run(number, row, gap=f"breaks the rule {broken[0]}")
    return Run(number, row, model, layout, training)


# --- models


def _number(row: Row, name: str) -> int:
    return int(float(row[name] or 0))


def _model(row: Row) -> Model | None:
    """A model of ``models.csv``; None where the table does not describe it."""
    if not row["hidden"] or row["attention"].startswith("compressed"):
        return None
    layers = _hybrid(row) if row["hybrid_pattern"] else _layers(row)
    gpt = row["model"].startswith(("MPT", "Megatron-GPT", "GPT-3"))
    return Model(
        name=row["model"],
        hidden=_number(row, "hidden"),
        vocab=_number(row, "vocab"),
        layers=layers,
        tied=row["tied_embeddings"] == "yes",
        norm="layer" if gpt else "rms",
        positions="learned" if gpt else "rope",
        max_positions=2048 if gpt else 0,
        mtp_layers=_number(row, "mtp_layers"),
    )


def _gated(row: Row) -> bool:
    return row["gated_mlp"] == "yes"


def _layers(row: Row) -> tuple[Layer, ...]:
    heads = _number(row, "heads")
    attention: Block = Attention(
        heads=heads, kv_heads=_number(row, "kv_heads"), head_dim=_number(row, "head_dim"),
        qk_norm=row["model"].startswith(("Qwen3", "Gemma-3")),
    )  # fmt: skip
    if row["attention"] == "mla":
        attention = LatentAttention(
            heads=heads, q_lora=_number(row, "q_lora"), kv_lora=_number(row, "kv_lora"),
            nope_dim=_number(row, "qk_nope"), rope_dim=_number(row, "qk_rope"), v_dim=_number(row, "v_dim"),
        )  # fmt: skip
    dense: Layer = (attention, Mlp(ffn=_number(row, "ffn"), gated=_gated(row)))
    if not row["experts"]:
        return (dense,) * _number(row, "layers")
    first = _number(row, "dense_layers")
    return (dense,) * first + ((attention, _experts(row)),) * (_number(row, "layers") - first)


def _experts(row: Row) -> Experts:
    return Experts(
        experts=_number(row, "experts"), topk=_number(row, "topk"), ffn=_number(row, "moe_ffn"),
        gated=_gated(row), shared_ffn=_number(row, "shared_ffn"),
    )  # fmt: skip


def _hybrid(row: Row) -> tuple[Layer, ...]:
    """Layers of one block each: M a Mamba block, E experts, * attention. Sizes of Nemotron-3-Nano."""
    blocks: dict[str, Block] = {
        "M": Mamba(heads=64, head_dim=64, state=128, groups=8),
        "E": _experts(row),
        "*": Attention(
            heads=_number(row, "heads"), kv_heads=_number(row, "kv_heads"), head_dim=_number(row, "head_dim")
        ),
    }
    return tuple((blocks[each],) for each in row["hybrid_pattern"])


# --- layouts and settings


def _layout(row: Row, layers: int) -> Layout:
    degrees = {name: _number(row, name) or 1 for name in ("dp", "tp", "pp", "vp", "cp", "ep", "etp")}
    said = row["fsdp"]
    zero = 1
    if "fsdp" in said or "full shard" in said or "zero3" in said:
        zero = 3
    elif "zero2" in said:
        zero = 2
    elif said.startswith("none"):
        zero = 0
    slices = said.rpartition("over ")[2].removesuffix(" slices") if "slices" in said else "1"
    chunks = degrees["pp"] * degrees["vp"]
    megatron = row["source"] in {"Megatron-Bridge", "MLPerf-Training"}
    # Megatron-Core wants equal chunks: the embedding and the head count where layers alone do not part.
    counts = megatron and layers % chunks != 0 and (layers + 2) % chunks == 0
    return Layout(
        dp=degrees["dp"],
        tp=degrees["tp"],
        pp=degrees["pp"],
        vp=degrees["vp"],
        cp=degrees["cp"],
        ep=degrees["ep"],
        etp=degrees["etp"],
        zero=zero,
        shard=degrees["dp"] // int(slices) if slices != "1" else 0,
        embedding_counts=counts,
        head_counts=counts,
        sequence_parallel=not row["sequence_parallel"].startswith("no"),
        context_all_to_all="CP communication: all-to-all" in row["notes"],
    )


def _training(row: Row) -> Training:
    style: Style = "megatron"
    if row["source"] in {"torchtitan", "llm-foundry"}:
        style = "torchtitan"
    elif "maxtext" in row["framework"].lower():
        style = "maxtext"
    lora = row["train_type"] == "lora"
    precision = _precision(row["precision"])
    if row["source"] == "MLPerf-Training":  # as these submissions do: gradients are 16-bit
        precision = replace(precision, gradient="bf16")
    two_layouts = precision.matmul == "nvfp4" or not row["accelerator"].startswith(("B200", "B300", "GB"))
    return Training(
        seq=_number(row, "seq_len"),
        global_batch=_number(row, "micro_batch") * _number(row, "grad_accum") * _number(row, "dp"),
        micro_batch=_number(row, "micro_batch"),
        precision=precision,
        recompute=_recompute(row["recompute"], row["optimizer"]),
        schedule="interleaved" if _number(row, "vp") > 1 else "1f1b",
        style=style,
        lora_rank=16 if lora else 0,
        capacity=1.0 if "capacity factor 1 " in row["notes"] else 0.0,
        pure_16bit="weights bfloat16" in row["optimizer"],
        fused_loss=row["source"] not in {"Megatron-LM", "torchtitan"},
        compiled="no torch.compile" not in row["notes"] and row["source"] != "llm-foundry",
        transposed_weights=two_layouts and not lora,
        lora_attention_only=lora,
    )


def _precision(text: str) -> Precision:
    name = next((each for each in ("nvfp4", "mxfp8", "fp16", "int8", "fp8") if each in text), "bf16")
    if name == "fp8" and "delayed" in text and "attention" not in text:
        name = "fp8-delayed"
    return precision_of(f"{name}-attention" if "attention" in text else name)


def _recompute(text: str, optimizer: str) -> Recompute:
    """What is computed again. MaxText's own policies recompute whole layers, as far as they say here, and its
    minimal ones keep the results of products.
    """
    block = frozenset({"block"})
    found = Recompute()
    if text.startswith("full block"):
        found = Recompute(modules=block, layers=int(text.removeprefix("full block")))
    elif any(each in text for each in ("per-op", "minimal")):
        found = Recompute(per_operation=True)
    elif any(each in text for each in ("full", "qkv_proj_offloaded", "custom")):
        offloads = "offload to host: decoder_layer_input" in text
        found = Recompute(modules=block, offloaded=block if offloads else frozenset())
    elif "every other layer" in text:
        found = Recompute(modules=block, every=2)
    elif "attention core" in text or text == "granularity selective":
        found = Recompute(modules=frozenset({"core_attn"}))
    elif text.startswith("selective"):
        modules = text.partition(";")[0].partition(":")[2].strip().split("+")
        found = Recompute(modules=frozenset(modules))
    elif "CPU offload of activations" in optimizer:
        found = Recompute(offloaded=block)
    return found


# --- what comes out


def fullest(run: Run) -> StageMemory:
    """The stage of a run that needs most."""
    assert run.model is not None
    return max(memory_of(run.model, run.layout, run.training), key=lambda each: each.peak_bytes)


def _published_gib(run: Run) -> float:
    """NaN where none is published."""
    said = run.row["peak_memory_other"]
    return float(run.row["peak_memory_gib"] or (said.split()[0] if _UNIT_NOT_STATED in said else "nan"))


def _predicted(run: Run, memory: StageMemory) -> float:
    """In the publisher's terms: torchtitan prints what the allocator reserves."""
    counted = memory.reserved_bytes if run.row["source"] == "torchtitan" else memory.peak_bytes
    return counted / _GIB


def _compare(found: Sequence[Run], detailed: bool) -> bool:
    errors: dict[str, list[float]] = defaultdict(list)
    seen: set[tuple[object, ...]] = set()
    print(f"{'row':>4} {'model':24} {'layout':34} {'GiB':>7} {'predicted':>9} {'error':>7}  moment, stage")
    for run in found:
        measured = _published_gib(run)
        if math.isnan(measured) or run.model is None:
            continue
        memory = fullest(run)
        predicted = _predicted(run, memory)
        error = predicted / measured - 1
        stated = _UNIT_NOT_STATED not in run.row["peak_memory_other"]
        errors[run.row["source"] if stated else f"{run.row['source']} ({_UNIT_NOT_STATED})"].append(error)
        key = (run.model.name, run.layout, run.training.seq, run.training.precision.name, measured)
        if key in seen:
            continue
        seen.add(key)
        print(
            f"{run.number:4} {run.model.name:24} {_degrees(run):34} {measured:7.2f} {predicted:9.2f} "
            f"{error:+7.1%}  {memory.moment}, {memory.stage}"
        )
        if detailed:
            parts = {**memory.parts, **(memory.pooled or {})}
            print("      " + ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items()))
    good = True
    for source, several in errors.items():
        mean = sum(map(abs, several)) / len(several)
        most = max(map(abs, several))
        good &= _UNIT_NOT_STATED in source or (mean <= _MEAN and most <= _MOST)
        print(f"{source}: {len(several)} rows, mean error {mean:.1%}, largest {most:.1%}")
    return good


def _degrees(run: Run) -> str:
    layout = run.layout
    names = ("dp", "tp", "pp", "vp", "cp", "ep")
    said = [f"{name}{getattr(layout, name)}" for name in names if getattr(layout, name) > 1]
    return " ".join([*said, f"seq{run.training.seq}"])


def _fits(found: Sequence[Run]) -> bool:
    known = set(device_names())
    gaps: dict[str, int] = defaultdict(int)
    checked, wrong = 0, 0
    for run in found:
        if run.row["accelerator"] not in known:
            gaps[f"device {run.row['accelerator']} is not in the catalogue"] += 1
        elif run.gap:
            gaps[f"{run.row['source']}: {run.gap}"] += 1
        else:
            checked += 1
            memory = fullest(run)
            capacity = load_device(run.row["accelerator"]).main_memory.capacity_bytes
            if memory.peak_bytes > capacity:
                wrong += 1
                print(
                    f"does not fit: row {run.number} {run.row['source']} {run.row['model']} "
                    f"{run.row['accelerator']} {_degrees(run)}: "
                    f"{memory.peak_bytes / 1e9:.1f} of {capacity / 1e9:.1f} GB"
                )
    print(f"{checked} runs checked, {wrong} do not fit")
    for gap, count in sorted(gaps.items()):
        print(f"  not checked: {count} x {gap}")
    return not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=_DATA, help="folder of the published tables")
    parser.add_argument("--parts", action="store_true", help="what fills the memory of each row")
    options = parser.parse_args(arguments)
    if not options.data.is_dir():
        print(f"skipped: {options.data} is not here")
        return 0
    found = list(runs(options.data))
    accurate = _compare(found, options.parts)
    return 0 if _fits(found) and accurate else 1


if __name__ == "__main__":
    sys.exit(main())
