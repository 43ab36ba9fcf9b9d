"""Columns of settings of published runs: derived from notes by the tool that prepares a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from hespas.generators.llm.published import SETTINGS, PublishedRun, row_of, rows_of, run_of
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError
from tools.published_settings import prepared_table, table_with_settings, with_settings

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
        ("moe a2a overlap True", "expert_overlap", "microbatches"),
        ("moe a2a overlap False", "expert_overlap", ""),
        ("CP communication: all-to-all", "context_communication", "all-to-all"),
        ("dispatcher hybridep", "expert_dispatch", "hybridep"),
        ("all-to-all dispatcher", "expert_dispatch", "all-to-all"),
        ("expert capacity factor 1.25 with padding", "capacity_factor", "1.25"),
        ("tokens over capacity dropped", "capacity_factor", "dropped"),
        ("no token dropping", "capacity_factor", ""),
        ("no torch.compile", "compiled", "no"),
        ("counts attention without the causal half", "attention_flops", "full"),
    ],
)
def test_phrases_of_notes_fill_a_column_that_is_lacking(text: str, column: str, value: str) -> None:
    found = with_settings({"notes": text})
    assert found[column] == value
    assert with_settings({"notes": text, column: ""})[column] == ""


def test_a_variant_of_an_accelerator_states_its_power_and_memory() -> None:
    found = with_settings({"accelerator_variant": "96 GB HBM2e, 2.4 TB/s, 500 W power limit"})
    assert (found["power_limit_w"], found["memory_bandwidth_gb_per_s"]) == ("500", "2400")


@pytest.mark.parametrize(
    ("framework", "precision", "expected"),
    [
        ("Megatron-LM (2021-04)", "fp16 mixed", ("f16", False)),
        ("Megatron-LM (2021-04)", "bf16", ("f32", True)),
        ("Megatron-Core 0.8", "fp16 mixed", ("f32", True)),
    ],
)
def test_early_megatron_reduces_fp16_gradients_in_16_bits(
    framework: str, precision: str, expected: tuple[str, bool]
) -> None:
    row = {**ROW, "source": "Megatron-LM", "framework": framework, "precision": precision}
    found = run_of(with_settings(row), "here", Diagnostics()).training
    assert (found.precision.gradient, found.fused_gradients) == expected


@pytest.mark.parametrize("exchange", ["", "ring", "all-to-all"])
def test_a_column_states_how_context_ranks_exchange_keys(exchange: str) -> None:
    layout = run_of({**ROW, "cp": "8", "context_communication": exchange}, "here", Diagnostics()).layout
    assert layout.ring_attention == (exchange == "ring")
    assert layout.context_all_to_all == (exchange == "all-to-all")


@pytest.mark.parametrize("columns", [dict.fromkeys(SETTINGS, ""), {}])
def test_notes_change_nothing(tmp_path: Path, columns: dict[str, str]) -> None:
    text = "communication overlap off; capacity factor 2; no torch.compile; cuda graphs"
    runs: list[PublishedRun] = []
    for number, notes in enumerate(("", text)):
        table = written(tmp_path / f"{number}.csv", {**ROW, **columns, "notes": notes})
        runs.append(row_of(table, 0, Diagnostics()))
    assert runs[0].training == runs[1].training
    assert runs[0].layout == runs[1].layout


def test_notes_without_columns_of_settings_are_reported(tmp_path: Path) -> None:
    notes = {**ROW, "notes": "cuda graphs"}
    for number, (cells, codes) in enumerate(((notes, {"row.notes"}), ({**notes, "cuda_graphs": ""}, set()))):
        diagnostics = Diagnostics()
        row_of(written(tmp_path / f"{number}.csv", cells), 0, diagnostics)
        assert {event.code for event in diagnostics if event.code == "row.notes"} == codes


def test_a_table_is_written_with_its_settings(tmp_path: Path) -> None:
    old = written(tmp_path / "old.csv", {**ROW, "notes": "cuda graphs; moe a2a overlap true"})
    new = tmp_path / "new.csv"
    new.write_text(table_with_settings(old), "utf-8")
    assert set(SETTINGS) <= set(new.read_text("utf-8").splitlines()[0].split(","))
    assert list(rows_of(new)) == list(map(with_settings, rows_of(old)))
    assert row_of(new, 0, Diagnostics()).training != row_of(old, 0, Diagnostics()).training


def test_a_prepared_table_keeps_its_models(tmp_path: Path) -> None:
    table = written(tmp_path / "runs.csv", {**ROW, "notes": "no torch.compile"})
    (tmp_path / "models.csv").write_text("model\n", "utf-8")
    folder = tmp_path / "prepared"
    folder.mkdir()
    prepared = prepared_table(table, folder)
    assert [row["compiled"] for row in rows_of(prepared)] == ["no"]
    assert prepared.with_name("models.csv").read_text("utf-8") == "model\n"


@pytest.mark.parametrize("column", SETTINGS)
def test_a_value_that_a_column_does_not_have_is_refused(column: str) -> None:
    with pytest.raises(FormatError, match="is 'perhaps'") as caught:
        run_of({**ROW, column: "perhaps"}, "here", Diagnostics())
    assert caught.value.position == f"column {column}"


def test_a_recipe_that_is_a_program_keeps_settings_of_the_release_before(tmp_path: Path) -> None:
    names = ("release", "notes", "precision")
    rows = [
        ("26.04", "cuda graphs none", "bf16"),
        ("26.06", "cuda graphs full_iteration; moe a2a overlap True", "bf16"),
        ("26.06", "cuda graphs none", "mxfp8"),
        ("26.08", "dispatcher hybridep; recipe in src/megatron/bridge/perf_recipes/a.py", "bf16"),
        ("26.08", "recipe in scripts/a.py", "bf16"),
    ]
    table = tmp_path / "runs.csv"
    lines = (",".join([*ROW.values(), *row]) for row in rows)
    table.write_text("\n".join([",".join([*ROW, *names]), *lines]) + "\n", "utf-8")
    prepared = tmp_path / "prepared.csv"
    prepared.write_text(table_with_settings(table), "utf-8")
    *_, program, script = rows_of(prepared)
    assert (program["cuda_graphs"], program["expert_overlap"]) == ("all", "microbatches")
    assert program["expert_dispatch"] == "hybridep"
    assert script["cuda_graphs"] == ""
