"""Saved predictions of a row are equal in every process and on every day."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hespas.studies.league.document import evaluate_league, league_document
from hespas.studies.league.predict import predicted_rows
from hespas.studies.league.rows import LeagueRow

ROOT = Path(__file__).parents[3]
_LAYOUT = """
from hespas.generators.llm.published import run_of
from hespas.graph import Diagnostics
from hespas.studies.league.predict import layout_text
row = dict(model="Qwen3-30B-A3B", accelerator="H100-SXM", num_accelerators="8", ep="8", seq_len="4096",
           global_batch="64", micro_batch="1")
for modules in ("layernorm+moe_act", "moe_act+layernorm", "mlp"):
    run = run_of(row | {"recompute": f"selective: {modules}"}, "here", Diagnostics())
    print(layout_text(run))
"""


def test_layouts_are_told_apart_alike_whatever_texts_hash_to() -> None:
    found: set[str] = set()
    for seed in range(1, 5):
        done = subprocess.run(
            [sys.executable, "-c", _LAYOUT],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        )
        one, same, other = done.stdout.splitlines()
        assert one == same != other
        found.add(done.stdout)
    assert len(found) == 1


def _runs(folder: Path, recompute: str, devices: int, memory_gib: str = "") -> LeagueRow:
    table = folder / "runs.csv"
    table.write_text(
        "model,accelerator,num_accelerators,tp,seq_len,global_batch,micro_batch,fsdp,precision,recompute,"
        "memory_gib\n"
        f"Llama-3-8B,H100-SXM,{devices},1,8192,16,2,zero1,bf16,{recompute},{memory_gib}\n",
        "utf-8",
    )
    (row,) = predicted_rows(table, jobs=1, cache=folder / "cache")
    return row


def test_the_fewest_layers_that_fit_are_recomputed_if_the_row_does_not_state_any(tmp_path: Path) -> None:
    """The layers are stated again as settings: one layer less does not fit."""
    row = _runs(tmp_path, "", 8)
    (message,) = (entry.message for entry in row.predicted.assumed if entry.code == "row.recompute-to-fit")
    count = int(message.split(": ")[1].split()[0])
    assert 1 < count <= 32
    assert row.predicted.fits is True
    stated = _runs(tmp_path, f"full block {count}", 8)
    assert stated.predicted.time_ns == row.predicted.time_ns
    assert stated.predicted.peak_memory_bytes == row.predicted.peak_memory_bytes
    fewer = _runs(tmp_path, f"full block {count - 1}", 8)
    assert fewer.predicted.fits is False
    assert fewer.predicted.time_ns < row.predicted.time_ns
    assert {"memory.beyond-device"} <= {entry.code for entry in fewer.predicted.assumed}
    assert _runs(tmp_path, "none", 8).predicted.fits is False


def test_a_row_has_the_memory_that_decides_if_the_run_fits(tmp_path: Path) -> None:
    """The tensors of the run fit the board, but the context and the communication library do not."""
    row = _runs(tmp_path, "full block 32", 8)
    peak_gib, device_gib = (
        size / 2**30 for size in (row.predicted.peak_memory_bytes, row.predicted.device_memory_bytes)
    )
    for capacity_gib, fits in ((peak_gib, False), (device_gib + 0.01, True)):
        row = _runs(tmp_path, "full block 32", 8, f"{capacity_gib:.6f}")
        (found,) = league_document(evaluate_league("runs.csv", [row], "none")).rows
        assert found.fits is fits
        assert found.peak_memory_gib == pytest.approx(peak_gib)
        assert found.device_memory_gib == pytest.approx(device_gib)
        assert fits == (found.device_memory_gib <= found.capacity_gib)
        assert ("memory.beyond-device" in {entry.code for entry in row.predicted.assumed}) is not fits


def test_a_run_that_never_fits_is_predicted_as_it_is_stated(tmp_path: Path) -> None:
    row = _runs(tmp_path, "", 1)
    codes = {entry.code for entry in row.predicted.assumed}
    assert "memory.beyond-device" in codes
    assert "row.recompute-to-fit" not in codes
    assert row.predicted.time_ns == _runs(tmp_path, "none", 1).predicted.time_ns


def test_a_prediction_without_reserved_memory_is_read_from_the_cache(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "model,accelerator,num_accelerators,seq_len,global_batch,precision\ngpt-2,H100-SXM,1,1024,1,bf16\n",
        "utf-8",
    )
    (first,) = predicted_rows(table, jobs=1, cache=tmp_path / "cache")
    (entry,) = [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    written_ns = entry.stat().st_mtime_ns
    (second,) = predicted_rows(table, jobs=1, cache=tmp_path / "cache")
    assert second.predicted == first.predicted
    assert entry.stat().st_mtime_ns == written_ns
