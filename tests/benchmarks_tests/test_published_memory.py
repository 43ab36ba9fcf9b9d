"""Published peak memory: predictions, and the message without tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published_memory import main

DATA = Path(__file__).parents[3] / "shared" / "data" / "published_e2e"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data/published_e2e is not here")


@absent
def test_peaks_are_within_their_bounds_and_every_run_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "SimuMax: 43 rows" in said
    assert "torchtitan: 10 rows" in said
    assert ", 0 do not fit" in said


def test_skips_where_there_are_no_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path / "nowhere")]) == 0
    assert capsys.readouterr().out.startswith("skipped: ")


def test_a_run_past_its_bound_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = dict.fromkeys(COLUMNS, "") | RUN
    text = ",".join(COLUMNS) + "\n" + ",".join(row[name] for name in COLUMNS) + "\n"
    (tmp_path / "published_training.csv").write_text(text, encoding="utf-8")
    assert main(["--data", str(tmp_path), "--parts"]) == 1
    said = capsys.readouterr().out
    assert "made: 1 rows" in said
    assert "optimizer moments" in said
    assert "1 runs checked, 1 do not fit" in said


RUN = {
    "source": "made", "accelerator": "H100-SXM", "model": "Llama-3-8B", "num_accelerators": "1",
    "seq_len": "4096", "global_batch": "1", "micro_batch": "1", "grad_accum": "1", "dp": "1", "tp": "1",
    "pp": "1", "vp": "1", "cp": "1", "sequence_parallel": "no", "recompute": "none", "precision": "bf16",
    "peak_memory_gib": "10",
}  # fmt: skip
COLUMNS = (*RUN, "ep", "etp", "fsdp", "peak_memory_other", "notes", "missing", "optimizer", "framework",
           "train_type")  # fmt: skip
