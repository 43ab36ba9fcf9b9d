"""``hespas-validate calibrate``: written file, documents, exit codes and leftover files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from hespas import api
from hespas.cli.validate import app
from hespas.hardware import load_device
from tests.validators.accuracy.small_profiles import Recording
from tests.validators.small_tables import vectors, write_table

SCHEMAS = Path(__file__).parents[2] / "hespas" / "schemas"


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path, command: str = "calibrate") -> Result:
    return CliRunner().invoke(app, [command, *(str(each) for each in arguments)])


def slow(flops: float, moved: float) -> float:
    return 4 + moved / 2.01e6


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Twelve sizes of each operation, the fewest that are fitted."""
    rows = vectors("H100-SXM", ("add", "tanh"), slow, split="calib", sizes=12)
    rows += vectors("H100-SXM", ("add", "tanh"), lambda f, b: 1.01 * slow(f, b), split="devval", sizes=12)
    return write_table(tmp_path / "table.csv", rows)


def test_a_table_becomes_a_hardware_file(table: Path, tmp_path: Path) -> None:
    asked: list[str | Path] = [
        "--hardware", "H100-SXM", "--table", table, "--date", "2026-01-31", "--test-by", "shape",
        "--test-by", "op", "--json", tmp_path / "c.json", "--report", tmp_path / "report",
    ]  # fmt: skip
    done = run(*asked, "--out", tmp_path / "mine.toml")
    assert done.exit_code == 0, done.output
    assert "held out by shape: " in done.stdout
    assert "held out by op: 24 rows, fits on the other 24; each operation is predicted by" in done.stdout
    assert re.search(r"^H100-SXM +roofline +vector f32 +", done.stdout, re.MULTILINE)
    assert re.search(r"^vector add f32 lib 1 +\S+ +12 +12 +\d+\.\d%", done.stdout, re.MULTILINE)
    assert done.stdout.rstrip().endswith("fits of H100-SXM from 24 rows")
    document = json.loads((tmp_path / "c.json").read_text())
    rules = json.loads((SCHEMAS / "calibrate.schema.json").read_text())
    Draft202012Validator.check_schema(rules)
    cast("_Validator", Draft202012Validator(rules)).validate(document)
    assert document["tables"] == [
        {"name": "table.csv", "provenance": "the table itself", "rows": 48, "fitted": 24}
    ]
    assert [test["by"] for test in document["held_out"]] == ["shape", "op"]
    assert {fit["kind"] for fit in document["fits"]} == {"vector", "*"}
    device = load_device(tmp_path / "mine.toml")
    assert {fit.fitted for fit in device.own_fits if fit.table == "table.csv"} == {"2026-01-31"}
    for folder in ("by-shape", "by-op"):
        page = (tmp_path / "report" / folder / "report.html").read_text()
        assert "calibrated" in page
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"table.csv", "mine.toml", "c.json", "report"}, "nothing else is left"


def test_the_file_is_what_accuracy_is_asked_with(tmp_path: Path) -> None:
    rows = vectors("H100-SXM", ("tanh",), slow, split="calib", sizes=12)
    rows += vectors("H100-SXM", ("tanh",), lambda f, b: 1.01 * slow(f, b), split="devval", sizes=12)
    table, mine = write_table(tmp_path / "table.csv", rows), tmp_path / "mine.toml"
    assert (
        run("--hardware", "H100-SXM", "--table", table, "--out", mine, "--date", "2026-01-31").exit_code == 0
    )
    done = run(
        "--table", table, "--split", "devval", "--hardware", mine, "--estimator", "calibrated",
        "--max-mape", "0.1", command="accuracy",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert re.search(r"^H100-SXM +calibrated +vector f32 +12 ", done.stdout, re.MULTILINE)
    assert "in interval" in done.stdout
    again = run("--hardware", "H100-SXM", "--table", table, "--out", mine)
    assert (again.exit_code, "--overwrite" in again.stderr) == (2, True)
    before = mine.read_bytes()
    same = run(
        "--hardware", "H100-SXM", "--table", table, "--out", mine, "--overwrite", "--date", "2026-01-31"
    )
    assert same.exit_code == 0, same.output
    assert mine.read_bytes() == before, "the same rows and seed give the same file"


def test_a_recording_becomes_a_hardware_file(tmp_path: Path) -> None:
    made = Recording("trace")
    for rows in range(128, 128 * 21, 128):
        for wobble in (0.99, 1.0, 1.02):
            time_ns = 1e3 * wobble * slow(0, rows * 1024.0 * 8)
            made.event("aten::relu", time_ns, shapes=f"[[{rows}, 1024]]", dtypes="float")
    api.write(made.build(), tmp_path / "trace.csv")
    done = run(
        "--hardware", "H100-SXM", "--measured", tmp_path / "trace.csv", "--out", tmp_path / "mine.toml"
    )
    assert done.exit_code == 0, done.output
    own = [fit for fit in load_device(tmp_path / "mine.toml").own_fits if fit.table == "trace"]
    assert ("vector", "") in {(fit.kind, fit.variant) for fit in own}
    assert done.stdout.rstrip().endswith("fits of H100-SXM from 20 rows")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give --table TABLE or --measured PROFILE"),
        (["--table", "table.csv", "--split", "devval"], 2, "reserved for testing"),
        (["--table", "table.csv", "--split", "test"], 2, "choose from calib, devval"),
        (["--table", "table.csv", "--out", "mine.json"], 2, "expected a .toml file"),
        (["--table", "table.csv", "--out", "no/mine.toml"], 2, "does not exist"),
        (["--table", "table.csv", "--json", "mine.toml"], 2, "same file"),
        (["--table", "table.csv", "--hardware", "L4"], 2, "choose a device of the tables: H100-SXM"),
        (["--table", "table.csv", "--hardware", "H900"], 2, "H900"),
        (["--table", "table.csv", "--test-by", "hardware"], 2, "no other device"),
        (["--table", "table.csv", "--test-by", "weather"], 2, "weather"),
        (["--table", "table.csv", "--date", "soon"], 2, "invalid date"),
        (["--table", "table.csv", "--seed", "-1"], 2, "seed"),
        (["--table", "absent.csv"], 3, "absent.csv"),
        (["--table", "broken.csv"], 3, "do not match any known table"),
        (["--measured", "absent.csv"], 3, "no such file"),
    ],
)
@pytest.mark.usefixtures("table")
def test_a_wrong_request_says_what_is_wrong(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.csv").write_text("a,b\n1,2\n")
    before = sorted(tmp_path.iterdir())
    asked = list(arguments)
    if "--hardware" not in asked:
        asked += ["--hardware", "H100-SXM"]
    if "--out" not in asked:
        asked += ["--out", "mine.toml"]
    done = run(*asked)
    assert done.exit_code == code, done.output
    assert message in re.sub(r"[\s│]+", " ", done.stderr)
    assert "Traceback" not in done.output
    assert sorted(tmp_path.iterdir()) == before


def test_an_earlier_file_is_no_folder_of_ours(table: Path, tmp_path: Path) -> None:
    (tmp_path / ".mine.toml.calibrating").mkdir()
    (tmp_path / ".mine.toml.calibrating" / "notes.txt").write_text("mine")
    done = run("--hardware", "H100-SXM", "--table", table, "--out", tmp_path / "mine.toml")
    assert done.exit_code == 0, done.output
    assert "continuing an interrupted run" in done.stderr
    assert [path.name for path in (tmp_path / ".mine.toml.calibrating").iterdir()] == ["notes.txt"]


def test_requests_are_checked_as_those_of_accuracy(table: Path, tmp_path: Path) -> None:
    base: list[str | Path] = ["--hardware", "H100-SXM", "--out", tmp_path / "mine.toml"]
    twice = run(*base, "--table", table, "--table", table)
    assert twice.exit_code == 2
    assert "is given twice" in twice.output
    link = tmp_path / "again.csv"
    link.symlink_to(table)
    assert run(*base, "--table", table, "--table", link).exit_code == 2
    for folder in ("", "-"):
        assert run(*base, "--table", table, "--report", folder).exit_code == 2
    place = tmp_path / "report" / "by-shape"
    place.mkdir(parents=True)
    inside = place / "report.csv"
    inside.write_bytes(table.read_bytes())
    done = run(*base, "--table", inside, "--report", tmp_path / "report", "--overwrite")
    assert done.exit_code == 2
    assert "--report names the same file as an input" in done.output
    assert inside.read_bytes() == table.read_bytes()
    assert not (tmp_path / "mine.toml").exists()
