"""Benchmark of transformers on one GPU, with synthetic tables."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from benchmarks import single_gpu
from benchmarks.single_gpu import (
    Point,
    Row,
    calibrated,
    factors_of,
    points_of,
    rows_of,
    step_of,
    with_step_factors,
)
from hespas.graph.errors import FormatError, UsageError

ROW = Row(
    hardware="Tesla_T4", model="bert_large", mode="inf", option="", seqlen=128, batch=1, split="calib",
    measured_ms=50.0, peer_ms=60.0,
)  # fmt: skip
HEAD = "hardware,model,mode,seqlen,batch,option,num_layer,measured_e2e_ms,neusight_e2e_ms,split"


def point(products: float, others: float, measured: float, split: str = "calib") -> Point:
    row = ROW._replace(measured_ms=measured, split=split)
    return Point(row=row, products_ms=products, others_ms=others)


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "e2e.csv"
    path.write_text("\n".join((HEAD, *lines)), encoding="utf-8")
    return path


def test_rows_say_what_ran(tmp_path: Path) -> None:
    rows = rows_of(
        table(
            tmp_path,
            "Tesla_T4,gpt2_large,inf,1024,4,fusion,36.0,2505.2,,devval",
            "MI100,opt_13,train,2048,2,,24.0,683.4,666.5,calib",
        )
    )
    compiled, trained = map(step_of, rows)
    assert (compiled.model.name, compiled.batch, compiled.length) == ("gpt2-large", 4, 1024)
    assert (compiled.compiled, compiled.training) == (True, False)
    assert (trained.compiled, trained.training) == (False, True)
    assert isnan(rows[0].peer_ms)
    assert rows[1].peer_ms == 666.5


@pytest.mark.parametrize(
    "line",
    ["Tesla_T4,gpt2_large,inf,many,4,,36.0,2505.2,,calib", "Tesla_T4,gpt2_large,inf,1,4,,36.0,?,,calib"],
)
def test_cells_that_are_no_numbers_are_refused_by_their_row(tmp_path: Path, line: str) -> None:
    with pytest.raises(FormatError, match="row 0"):
        rows_of(table(tmp_path, line))


def test_unknown_models_are_refused() -> None:
    with pytest.raises(UsageError, match="gpt5"):
        step_of(ROW._replace(model="gpt5"))


def test_factors_are_found_and_held_near_one() -> None:
    """Products 1.3 times, all else 0.8 times: of many rows; of one row only as far as it can tell."""
    sizes = [(10.0, 1.0), (8.0, 4.0), (3.0, 9.0), (20.0, 2.0), (1.0, 6.0), (5.0, 5.0)]
    made = [point(first, second, 1.3 * first + 0.8 * second) for first, second in sizes]
    first, second = factors_of(made)
    assert first == pytest.approx(1.3, rel=0.03)
    assert second == pytest.approx(0.8, rel=0.03)
    alone = factors_of([point(10.0, 10.0, 40.0)])
    assert 1.0 < alone[0] < 2.0
    assert factors_of([]) == (1.0, 1.0)


def test_no_row_is_calibrated_with_itself_or_with_devval() -> None:
    """A row far off, whose own time the factors must not know."""
    made = [point(10.0, 1.0, 11.0), point(20.0, 2.0, 22.0), point(10.0, 1.0, 33.0)]
    unseen = point(10.0, 1.0, 330.0, "devval")
    found = calibrated([*made, unseen])
    assert found[2].calibrated_ms == pytest.approx(11.0, rel=1e-3)
    moved = calibrated([*made, replace(unseen, row=unseen.row._replace(measured_ms=1.0))])
    assert [each.calibrated_ms for each in moved] == [each.calibrated_ms for each in found]
    other = replace(unseen, row=unseen.row._replace(hardware="Tesla_P4"))
    assert calibrated([*made, other])[3].calibrated_ms == pytest.approx(other.predicted_ms)


def test_step_factors_are_of_other_models_in_the_split_for_fits() -> None:
    models = ["bert_large", "gpt2_large", "opt_13", "gpt3_xl"]
    made = [point(10.0, 0.0, 12.0) for _ in models]
    made = [replace(each, row=each.row._replace(model=name)) for each, name in zip(made, models, strict=True)]
    unseen = replace(point(10.0, 0.0, 99.0, "devval"), row=made[0].row._replace(split="devval"))
    stepped = with_step_factors([*made, unseen])
    assert [each.others for each in stepped] == [3] * 5
    assert all(11.0 < each.stepped_ms < 12.0 for each in stepped)
    assert with_step_factors(made[:2])[0].stepped_ms == made[0].predicted_ms


def test_a_row_is_predicted_from_its_sizes_alone() -> None:
    """Twice the sequences take about twice as long; what was measured plays no part."""
    rows = [ROW._replace(batch=8), ROW._replace(batch=16), ROW._replace(batch=8, measured_ms=1.0)]
    one, two, same = points_of(rows)
    assert two.predicted_ms == pytest.approx(2 * one.predicted_ms, rel=0.2)
    assert same.predicted_ms == one.predicted_ms
    assert one.products_ms > one.others_ms > 0


def test_the_table_is_printed_and_a_bound_missed_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path, "Tesla_T4,bert_large,inf,128,1,,24.0,1.0,2.0,calib")
    monkeypatch.setattr(sys, "argv", ["single_gpu", "--data", str(path), "--rows"])
    assert single_gpu.main() == 1
    printed = capsys.readouterr().out
    assert "device Tesla_T4" in printed
    assert "+100.0%" in printed


def test_without_data_there_is_nothing_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["single_gpu", "--data", str(tmp_path / "absent.csv")])
    assert single_gpu.main() == 0
    assert "nothing to compare" in capsys.readouterr().out


def test_rows_of_unknown_models_and_devices_are_left_out_and_counted() -> None:
    rows = [ROW, ROW._replace(model="mystery"), ROW._replace(hardware="Mystery9"), ROW]
    left_out = Counter[str]()
    assert len(list(points_of(rows, left_out))) == 2
    assert sorted(left_out.values()) == [1, 1]
    assert "mystery" in " ".join(left_out)
