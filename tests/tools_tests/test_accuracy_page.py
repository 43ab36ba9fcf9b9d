"""Accuracy page: it shows the figures with their scope, and figures equal those of reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tools.accuracy as page
from tests.validators.small_tables import products, write_table
from tools.figures import FIGURES, Errors, Figures, Row, Section, read_figures
from tools.goals import goals_section, growth_section, left_out_section, shipped_cards


def _errors(mape: float, n: int = 10) -> Errors:
    return Errors(n=n, mape=mape, median_ape=mape / 2, p90_ape=2 * mape, bias=-mape, interval_coverage=None)


def _figures() -> Figures:
    rows = [
        Row(
            "H100-SXM",
            "matmul bf16",
            10,
            0.02,
            {"roofline": _errors(0.5), "overhead+two-efficiencies": _errors(0.2)},
        ),
        Row("L4", "matmul bf16", 20, None, {"roofline": _errors(0.3), "calibrated": _errors(0.1, 5)}),
    ]
    return Figures(
        schema="hespas.accuracy-figures/1",
        hespas_version="1.2.3",
        date="2026-01-31",
        split="devval",
        tables=[Section("gemm.parquet", "measured by someone at abc", rows)],
        profiles=[],
    )


def test_the_page_is_made_of_its_figures() -> None:
    if not FIGURES.is_file():
        pytest.skip("no figures have been made: python -m tools.accuracy --tables DIR --profiles DIR")
    again = page.accuracy_pages(read_figures(FIGURES))
    there = [page.DOCS / "index.md", *page.DOCS.glob("tables/*")]
    assert {str(path.relative_to(page.DOCS)) for path in there} == again.keys()
    for name, text in again.items():
        assert (page.DOCS / name).read_text() == text, "run 'python -m tools.accuracy'"


def test_the_page_says_which_data_and_when() -> None:
    pages = page.accuracy_pages(_figures())
    for words in ("version 1.2.3, made on 2026-01-31", "split `devval`"):
        assert words in pages["index.md"]
    assert "Data: measured by someone at abc." in pages["tables/gemm.md"]


def test_devices_left_out_are_those_of_the_cards() -> None:
    cards = {card.name: card for card in shipped_cards()}
    text = left_out_section([cards["gemm-bf16"]])
    rows = cards["gemm-bf16"].left_out
    assert rows
    assert text.count("| gemm-bf16 |") == len(rows)
    pair = next(row for row in rows if len(row.hardware) > 1 and not row.siblings)
    assert f"| {', '.join(pair.hardware)} | no | {pair.n:,} | {pair.mape:.1%} |" in text
    assert left_out_section([]) == ""
    assert left_out_section(cards.values()) in page.accuracy_pages(_figures())["tables/devices-left-out.md"]


def test_means_are_over_devices_and_rows_have_all_figures() -> None:
    pages = page.accuracy_pages(_figures())
    assert (
        "| [`gemm.parquet`](tables/gemm.md) | matmul bf16 | 2 | 30 | 40.0% | 10.0% | 20.0% |"
        in pages["index.md"]
    )
    text = pages["tables/gemm.md"]
    first = (
        "| H100-SXM | matmul bf16 | 10 | 2.0% | 20.0% | roofline | all | 50.0% | 25.0% | 100.0% | -50.0% |"
    )
    assert first in text
    assert "|  |  |  |  |  | calibrated | 25% | 10.0% | 5.0% | 20.0% | -10.0% | - |" in text


def test_figures_are_made_from_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = products("H100-SXM", lambda flops, moved: 5 + flops / 5e8, split="calib")
    rows += products("H100-SXM", lambda flops, moved: 5 + flops / 5e8, (384, 768), split="devval")
    (tmp_path / "tables").mkdir()
    write_table(tmp_path / "tables" / "mine.csv", rows)
    (tmp_path / "tables" / "other.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(page, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(page, "DOCS", tmp_path)
    asked = ["--tables", str(tmp_path / "tables"), "--estimator", "roofline", "--date", "2026-01-31"]
    monkeypatch.setattr(sys, "argv", ["accuracy", *asked])
    page.main()
    figures = read_figures(tmp_path / "figures.json")
    [section] = figures.tables
    [row] = section.rows
    assert (section.name, row.hardware, row.op_class, row.of) == ("mine.csv", "H100-SXM", "matmul bf16", 8)
    assert set(row.errors) == {"roofline", "database", "overhead+two-efficiencies"}
    assert figures.date == "2026-01-31"
    for name, text in page.accuracy_pages(figures).items():
        assert (tmp_path / name).read_text() == text


def test_goals_say_what_is_missed_and_by_how_much() -> None:
    def section(mape: float) -> Section:
        errors = Errors(n=40, mape=mape, median_ape=mape / 2, p90_ape=1, bias=0, interval_coverage=0.97)
        rows = [Row(name, "matmul bf16", 40, None, {"learned": errors}) for name in ("H100-SXM", "L4")]
        return Section("aiconfigurator_gemm.parquet", "someone", rows)

    assert "| matmuls in bf16, learned | 5.0% | 4.0% |  |" in goals_section([section(0.04)], [], [])
    text = goals_section([section(0.06)], [], [])
    assert "| matmuls in bf16, learned | 5.0% | 6.0% | missed |" in text
    assert "| rows in 90 % intervals, learned | 85% to 95% | 97.0% | missed; 0 of 2 classes" in text
    assert "calibrated" not in text, "nothing is said of what was not compared"
    assert goals_section([], [], []) == ""


def test_goals_of_profiles_are_those_of_their_devices() -> None:
    def section(hardware: str) -> Section:
        errors = Errors(n=9, mape=0.25, median_ape=0.1, p90_ape=1, bias=0, interval_coverage=None)
        rows = [Row(hardware, "all", 9, None, {"calibrated on the other profiles": errors})]
        return Section("x.json.gz", "recorded", rows)

    assert "| 20.0% | 25.0% | missed: median 10.0%, see below |" in goals_section(
        [], [section("H100-SXM")], []
    )
    assert "| 28.0% | 25.0% |  |" in goals_section([], [section("MI300X")], [])


def test_growth_tells_of_programs_end_to_end() -> None:
    def section(sum_error: float, mape: float) -> Section:
        errors = Errors(
            n=9, mape=mape, median_ape=0.1, p90_ape=1, bias=0, interval_coverage=None, sum_error=sum_error
        )
        return Section(
            "x.gz",
            "recorded",
            [Row("H100-SXM", "all", 9, None, {"calibrated on the other profiles": errors})],
        )

    cards = {card.name: card for card in shipped_cards()}
    text = growth_section([section(-0.2, 0.1), section(0.1, 0.3)], [cards["gemm-bf16"]])
    assert "| H100-SXM | 2 | 20.0% | 30.0% | 15.0% |" in text


def test_growth_has_a_line_for_each_model_that_was_tested_beyond_its_fit() -> None:
    cards = {card.name: card for card in shipped_cards()}
    card = cards["gemm-bf16"]
    assert card.region is not None
    text = growth_section([], [card])
    [line] = [each for each in text.splitlines() if each.startswith("| gemm-bf16")]
    assert f"| {card.region.mape:.1%} |" in line
    assert "And of programs" not in text
    assert growth_section([], []) == ""
    alone = growth_section([], [cards["gemm-tpu"]])
    assert alone.rstrip().endswith("| - | - |"), "one device has no sibling and no family"
