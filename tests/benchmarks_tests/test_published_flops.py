"""FLOPs of published runs: compared rows, and the message without tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published_flops import main

DATA = Path(__file__).parents[3] / "shared" / "data" / "published_e2e"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data/published_e2e is not here")

COLUMNS = (
    "source,model,num_accelerators,seq_len,global_batch,micro_batch,dp,recompute,precision,step_time_ms,"
    "model_tflops_per_gpu,model_tflop_per_step,fully_specified"
)


def table(folder: Path, tflop: str) -> Path:
    row = f"made,Llama-3-8B,8,4096,8,1,8,none,bf16,1000,{float(tflop) / 8},{tflop},yes"
    (folder / "published_training.csv").write_text(f"{COLUMNS}\n{row}\n", encoding="utf-8")
    return folder


@absent
def test_all_rows_are_within_a_percent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "476 fully specified rows: 0 more than 1% off" in said
    assert "14 without settings: the configuration of model 'Nemotron-3-Super' is not known" in said


def test_skips_where_there_are_no_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "nowhere")]) == 0
    assert capsys.readouterr().out.startswith("skipped: ")


def test_a_row_that_agrees_and_one_that_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact = 48249.2e-6 * 8 * 4096  # TFLOP of a million tokens at this length
    assert main(["--data", str(table(tmp_path, f"{exact:.3f}"))]) == 0
    assert "1 fully specified rows: 0 more than 1% off" in capsys.readouterr().out
    assert main(["--data", str(table(tmp_path, f"{exact * 1.02:.3f}")), "--rows"]) == 1
    said = capsys.readouterr().out
    assert "1 fully specified rows: 1 more than 1% off" in said
    assert "-1.9" in said
