"""The league predicts the step that ``simulate`` gives the generated job of the same row."""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import hespas
from hespas import api
from hespas.generators.llm import row_of
from hespas.graph import Diagnostics
from hespas.graph.errors import HespasError

Row = Mapping[str, str]
EQUAL = 1e-3
"""Relative tolerance: the league extrapolates steps of many micro-batches from steps of few."""
_MODEL = {
    "layers": "4", "heads": "64", "kv_heads": "8", "head_dim": "128", "vocab": "32000",
    "tied_embeddings": "no", "gated_mlp": "yes", "attention": "gqa",
}  # fmt: skip
MODELS = (
    {**_MODEL, "model": "Dense-4", "hidden": "8192", "ffn": "28672"},
    {
        **_MODEL, "model": "Experts-4", "hidden": "4096", "ffn": "14336", "heads": "32", "experts": "8",
        "topk": "2", "moe_ffn": "14336",
    },
)  # fmt: skip
_ROW = {
    "source": "here", "framework": "PyTorch", "accelerator": "H100-SXM", "num_accelerators": "",
    "model": "Dense-4", "seq_len": "2048", "global_batch": "", "micro_batch": "1", "dp": "1", "tp": "1",
    "pp": "1", "vp": "1", "cp": "1", "ep": "", "fsdp": "none", "sequence_parallel": "yes",
    "recompute": "none", "precision": "bf16", "precision_class": "16bit", "communication_overlap": "on",
    "cuda_graphs": "none", "step_time_ms": "100",
}  # fmt: skip


def row(micro_batches: int, **cells: str) -> Row:
    """Return a row with so many micro-batches on each data rank."""
    found = {**_ROW, **cells}
    ranks = int(found["dp"]) * int(found["tp"]) * int(found["pp"]) * int(found["cp"])
    batch = int(found["dp"]) * micro_batches
    return {**found, "num_accelerators": str(ranks), "global_batch": str(batch)}


FSDP = {"dp": "16", "fsdp": "zero3", "seq_len": "1024"}
PIPED = {"model": "Experts-4", "dp": "4", "ep": "4", "pp": "4", "fsdp": "zero1"}
NAMED: dict[str, Row] = {
    "fsdp-1": row(1, **FSDP),
    "fsdp-2": row(2, **FSDP),
    "fsdp-8": row(8, **FSDP),
    "fsdp-off-8": row(8, **FSDP, communication_overlap="off"),
    "fsdp-experts-8": row(8, **FSDP, model="Experts-4"),
    "graphs-8": row(8, **FSDP, cuda_graphs="all"),
    "pipeline-experts-1": row(1, **PIPED),
    "pipeline-experts-8": row(8, **PIPED),
    "pipeline-experts-33": row(33, **PIPED),
    "pipeline-off-8": row(8, **PIPED, communication_overlap="off"),
    "interleaved-8": row(8, dp="2", tp="2", pp="2", vp="2", fsdp="zero1"),
    "interleaved-off-2": row(2, dp="2", tp="2", pp="2", vp="2", communication_overlap="off"),
    "mixed-2": row(2, dp="2", tp="2", pp="2", cp="2", fsdp="zero1"),
    "mixed-21": row(21, dp="4", tp="2", pp="2", fsdp="zero3", recompute="full"),
}
_DRAWN = 24


def drawn(folder: Path) -> list[Row]:
    """Draw rows whose settings the generator accepts, the same ones in every run."""
    draw = random.Random(18)
    found: list[Row] = []
    while len(found) < _DRAWN:
        experts, pp = draw.random() < 0.5, draw.choice([1, 1, 2, 4])
        dp, vp = draw.choice([2, 4, 8]), 2 if pp == 2 and draw.random() < 0.5 else 1
        cells = {
            "model": "Experts-4" if experts else "Dense-4",
            "dp": str(dp),
            "tp": draw.choice("124"),
            "pp": str(pp),
            "vp": str(vp),
            "cp": "1" if experts else draw.choice("112"),
            "ep": str(dp) if experts and draw.random() < 0.5 else "",
            "fsdp": draw.choice(["none", "zero1", "zero2", "zero3"]),
            "seq_len": draw.choice(["512", "2048"]),
            "source": draw.choice(["here", "torchtitan"]),
            "recompute": draw.choice(["none", "full"]),
            "communication_overlap": draw.choice(["on", "off"]),
            "cuda_graphs": draw.choice(["none", "parts", "all"]),
        }
        candidate = row(draw.choice([1, 2, 5, 8, 19]) * (pp if vp > 1 else 1), **cells)
        try:
            row_of(table(folder, [candidate]), 0, Diagnostics()).step().account()
        except HespasError:
            continue
        found.append(candidate)
    return found


def table(folder: Path, rows: Sequence[Row]) -> Path:
    """Write a table of runs and the models that its rows name."""
    for name, lines in (("models.csv", MODELS), ("runs.csv", rows)):
        columns = list(dict.fromkeys(column for line in lines for column in line))
        with (folder / name).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, columns, restval="")
            writer.writeheader()
            writer.writerows(lines)
    return folder / "runs.csv"


def check(folder: Path, rows: Sequence[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the league with the simulator on each row, and check the parts of the step."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    runs = table(folder, rows)
    league = hespas.league(runs, jobs=1).details.rows
    for number, predicted in enumerate(league):
        workload = row_of(runs, number, Diagnostics()).step().workload()
        simulated = api.simulate(workload, system="dgx-h100")
        assert predicted.predicted_ms == pytest.approx(simulated.step_ns / 1e6, rel=EQUAL), rows[number]
        parts = predicted.row.predicted.parts
        assert min(parts.values()) >= 0, rows[number]
        assert sum(parts.values()) == pytest.approx(simulated.step_ns, rel=EQUAL), rows[number]


@pytest.mark.parametrize("name", list(NAMED))
def test_of_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, [NAMED[name]], monkeypatch)


@pytest.mark.parametrize("number", range(_DRAWN))
def test_of_drawn_rows(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, [drawn(tmp_path)[number]], monkeypatch)
