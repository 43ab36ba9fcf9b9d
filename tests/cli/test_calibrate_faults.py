"""``hespas-validate calibrate`` with other files at the cache path, or with nothing that can be fitted."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hespas.cli.terminal import percent, signed
from hespas.cli.validate import app
from hespas.hardware import load_device
from tests.converters.pytorch.traces import host, kernel, launch, write_kineto
from tests.validators.small_tables import vectors, write_table


def calibrate(table: Path, out: Path, *more: str) -> Result:
    asked = ["calibrate", "--hardware", "H100-SXM", "--table", str(table), "--out", str(out), *more]
    return CliRunner().invoke(app, asked)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = vectors("H100-SXM", ("add",), lambda _, moved: 4 + moved / 2.01e6, split="calib")
    return write_table(tmp_path / "table.csv", rows)


def test_files_of_others_where_the_memory_goes_stay(table: Path, tmp_path: Path) -> None:
    mine, linked = tmp_path / ".a.toml.calibrating", tmp_path / "linked"
    for folder in (mine, linked):
        folder.mkdir()
        (folder / "device.toml").write_text("precious")
    (tmp_path / ".b.toml.calibrating").symlink_to(linked)
    for name in ("a", "b"):
        done = calibrate(table, tmp_path / f"{name}.toml")
        assert done.exit_code == 0, done.output
    assert (mine / "device.toml").read_text() == (linked / "device.toml").read_text() == "precious"
    assert [path.name for path in mine.iterdir()] == ["device.toml"]


def test_a_file_where_the_memory_goes_is_told(table: Path, tmp_path: Path) -> None:
    (tmp_path / ".a.toml.calibrating").write_text("taken")
    done = calibrate(table, tmp_path / "a.toml")
    assert done.exit_code == 2
    assert "cannot be saved" in done.stderr
    assert not (tmp_path / "a.toml").exists()


def test_nothing_is_left_where_nothing_can_be_fitted(table: Path, tmp_path: Path) -> None:
    lines = table.read_text().splitlines()
    table.write_text("\n".join(lines[:3]) + "\n")
    done = calibrate(table, tmp_path / "a.toml")
    assert done.exit_code == 2
    assert "enough rows" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_the_largest_seed_can_be_read_back(table: Path, tmp_path: Path) -> None:
    assert calibrate(table, tmp_path / "a.toml", "--seed", str(2**32)).exit_code == 2
    done = calibrate(table, tmp_path / "a.toml", "--seed", str(2**32 - 1))
    assert done.exit_code == 0, done.output
    assert {fit.seed for fit in load_device(tmp_path / "a.toml").own_fits} == {
        0,
        2**32 - 1,
    }  # 0: kept from the shipped ones


def test_vast_errors_are_short() -> None:
    assert (percent(0.1234), signed(-0.5)) == ("12.3%", "-50.0%")
    assert (percent(1e200), signed(-1e200)) == ("1.00e+202%", "-1.00e+202%")


def test_a_recording_without_known_costs_is_refused(tmp_path: Path) -> None:
    trace = write_kineto(
        tmp_path / "trace.json",
        [
            host("my::op", 0, 10, 1, {"Input Dims": [[4, 4]], "Input type": ["float"]}),
            launch(1, 7),
            kernel("some_kernel", 5, 10, 7),
        ],
    )
    words = [
        "calibrate",
        "--hardware",
        "H100-SXM",
        "--measured",
        str(trace),
        "--out",
        str(tmp_path / "a.toml"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "no operation of trace has a known cost and a time" in done.stderr
    assert "--workload" in done.stderr
