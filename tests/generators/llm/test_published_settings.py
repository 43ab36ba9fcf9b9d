"""Columns of settings of published runs: read from notes where a table lacks them, and from nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from hespas.generators.llm.published import CHOICES, NUMBERS, SETTINGS, from_notes, row_of, rows_of, run_of
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError
from tools.published_settings import table_with_settings

ROW = {"model": "Llama-3-8B", "num_accelerators": "8", "seq_len": "4096", "global_batch": "8"}


def written(path: Path, row: dict[str, str]) -> Path:
    """Write a table of one row."""
    cells = (f'"{cell}"' for cell in row.values())
    path.write_text(f"{','.join(row)}\n{','.join(cells)}\n", "utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "column", "value"),
    [
        ("cuda graphs full_iteration", "cuda_graphs", "all"),
        ("cuda graphs transformer_engine; graph scope attn", "cuda_graphs", "parts"),
        ("cuda graphs none", "cuda_graphs", "none"),
        ("Communication overlap off (TP, p2p)", "communication_overlap", "off"),
        ("communication overlap for DP, TP", "tensor_overlap", "yes"),
        ("moe a2a overlap True", "expert_overlap", "yes"),
        ("moe a2a overlap False", "expert_overlap", ""),
        ("CP communication: all-to-all", "context_communication", "all-to-all"),
        ("expert capacity factor 1.25 with padding", "capacity_factor", "1.25"),
        ("tokens over capacity dropped", "capacity_factor", "dropped"),
        ("no token dropping", "capacity_factor", ""),
        ("no torch.compile", "compiled", "no"),
        ("counts attention without the causal half", "attention_flops", "full"),
    ],
)
def test_phrases_of_notes_fill_a_column_that_is_lacking(text: str, column: str, value: str) -> None:
    found = from_notes({"notes": text})
    assert found[column] == value
    assert from_notes({"notes": text, column: ""})[column] == ""


def test_a_variant_of_an_accelerator_states_its_power_and_memory() -> None:
    found = from_notes({"accelerator_variant": "96 GB HBM2e, 2.4 TB/s, 500 W power limit"})
    assert (found["power_limit_w"], found["memory_bandwidth_gb_per_s"]) == ("500", "2400")


def test_notes_change_nothing_in_a_table_with_all_columns(tmp_path: Path) -> None:
    text = "communication overlap off; capacity factor 2; no torch.compile; cuda graphs"
    plain = {**ROW, **dict.fromkeys(SETTINGS, ""), "notes": ""}
    runs = [
        row_of(written(tmp_path / f"{place}.csv", {**plain, "notes": notes}), 0, Diagnostics())
        for place, notes in enumerate(("", text))
    ]
    assert runs[0].training == runs[1].training
    assert runs[0].layout == runs[1].layout
    lacking = row_of(written(tmp_path / "old.csv", {**ROW, "notes": text}), 0, Diagnostics())
    assert lacking.training != runs[0].training


def test_a_run_reads_no_notes_itself() -> None:
    found = [run_of({**ROW, "notes": notes}, "here", Diagnostics()) for notes in ("", "no torch.compile")]
    assert found[0].training == found[1].training


def test_a_table_is_written_with_its_settings(tmp_path: Path) -> None:
    old = written(tmp_path / "old.csv", {**ROW, "notes": "cuda graphs; moe a2a overlap true"})
    new = tmp_path / "new.csv"
    new.write_text(table_with_settings(old), "utf-8")
    assert set(SETTINGS) <= set(new.read_text("utf-8").splitlines()[0].split(","))
    assert list(rows_of(new)) == list(rows_of(old))
    assert row_of(new, 0, Diagnostics()).training == row_of(old, 0, Diagnostics()).training


@pytest.mark.parametrize("column", [*CHOICES, *NUMBERS])
def test_a_value_that_a_column_does_not_have_is_refused(column: str) -> None:
    with pytest.raises(FormatError, match="is not a") as caught:
        run_of({**ROW, column: "perhaps"}, "here", Diagnostics())
    assert caught.value.position == f"column {column}"
