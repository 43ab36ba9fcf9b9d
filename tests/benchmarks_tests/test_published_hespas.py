"""Published steps: rows, calibration rows, and the rows that count for the bound."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest

from benchmarks import published_hespas
from benchmarks.published_hespas import Point, Row, calibrated, main, rows_of


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "groundtruth").mkdir()
    (tmp_path / "published").mkdir()
    (tmp_path / "groundtruth" / "hespas_e2e.csv").write_text(
        "system,workload,runtime_s,split\n"
        "A100_40GB_4GPU,resnet18,0.04,devval\n"
        "A100_40GB_4GPU,resnet101,0.16,calib\n"
        "A100_40GB_4GPU,llama3-1b,0.75,calib\n"
        "A100_40GB_4GPU,llama3-100m,0.09,calib\n"
        "A100_40GB_4GPU,llama3-500m,0.39,calib\n"
        "8xTPUv3,llama3-100m,0.2,calib\n"
    )
    (tmp_path / "published" / "resnet_train_bench.csv").write_text(
        "workload,mean_ms,spread_ms\nresnet101_train,160,2\nresnet18_train,40,1.5\n"
    )
    return tmp_path


def test_rows_are_intervals_the_fastest_first(data: Path) -> None:
    llama, resnet = rows_of("llama3", data), rows_of("resnet", data)
    assert [row.workload for row in llama] == ["llama3-100m", "llama3-500m", "llama3-1b"]
    assert [(row.fits, row.judged) for row in llama] == [(False, False), (True, True), (True, True)]
    assert (llama[0].least_s, llama[0].most_s) == pytest.approx((0.085, 0.095))
    assert [(row.workload, row.fits, row.judged) for row in resnet] == [
        ("resnet18", False, False),
        ("resnet101", True, False),
    ]
    assert (resnet[0].least_s, resnet[0].most_s) == pytest.approx((0.0385, 0.0415))


def test_one_size_calibrates_all_others() -> None:
    def point(measured_s: float, predicted_s: float, *, fits: bool) -> Point:
        return Point(Row("x", "y", measured_s, 0.0, 0.0, fits), predicted_s)

    small, middle, large = calibrated(
        [point(1.0, 1.0, fits=False), point(2.0, 1.0, fits=True), point(3.0, 2.0, fits=True)]
    )
    assert isnan(middle.calibrated_s)
    assert (small.calibrated_s, large.calibrated_s) == (2.0, 4.0)
    assert isnan(calibrated([point(1.0, 1.0, fits=False)])[0].calibrated_s)


@pytest.mark.parametrize(("off", "code"), [(1.0, 0), (1.3, 1)])
def test_only_judged_rows_decide(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], off: float, code: int
) -> None:
    def predicted_s(family: str, row: Row) -> float:
        wrong = off if row.workload == "llama3-1b" else 3.0 if row.workload == "resnet18" else 1.0
        return row.measured_s * wrong

    monkeypatch.setattr(published_hespas, "_predicted_s", predicted_s)
    assert main(["--data", str(data)]) == code
    said = capsys.readouterr().out
    assert f"mean of 1 judged, with one size calibrated: {off - 1:.1%}" in said
    assert main(["resnet", "--data", str(data)]) == 0
    with pytest.raises(SystemExit):
        main(["bert"])


def test_says_so_where_there_are_no_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path)]) == 0
    assert "llama3: no table in" in capsys.readouterr().out
