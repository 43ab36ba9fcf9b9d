"""What is kept of a row is the same in every process: rows are predicted in several, and some another day."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hespas.studies.league.predict import predicted_rows

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
