"""``hespas-validate calibrate --suggest``: the table to fill in, its description, and reading it back."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.validate import app
from hespas.hardware import load_device

SCHEMAS = Path(__file__).parents[2] / "hespas" / "schemas"
CPU = Path(__file__).parents[2] / "fixtures" / "recorded" / "recorded-cpu.toml"


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path, hardware: str | Path = "H100-SXM") -> Result:
    asked = ["calibrate", "--hardware", str(hardware), *(str(each) for each in arguments)]
    return CliRunner().invoke(app, asked)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def fill(path: Path, there: Path, *, count: int) -> None:
    """Times of a simple device in the first rows."""
    rows = rows_of(path)
    for row in rows[:count]:
        m, n, k = (float(row[name]) for name in "mnk")
        row["latency_us"] = repr(4 + 2 * m * n * k / 6e8 + 2 * (m * k + n * k + m * n) / 2.4e6)
    with there.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_a_table_to_fill_in_and_to_give_back(tmp_path: Path) -> None:
    shapes, filled = tmp_path / "shapes.csv", tmp_path / "filled.csv"
    done = run("--suggest", "20", "--out", shapes, "--json", tmp_path / "s.json")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    assert re.search(r"^matmul +bf16 +20 +\d,\d{3} +0 +\d\.\d\dx +\S.*gemm-bf16", done.stdout, re.MULTILINE)
    assert "shapes are sorted by how many uncovered sizes they represent" in done.stdout
    assert "20 shapes to measure on H100-SXM, most valuable first; fill in latency_us, then:" in done.stdout
    rows = rows_of(shapes)
    assert list(rows[0]) == ["hardware", "kind", "op", "dtype", "batch", "m", "n", "k", "latency_us"]
    assert {(row["hardware"], row["kind"], row["dtype"], row["latency_us"]) for row in rows} == {
        ("H100-SXM", "matmul", "bf16", "")
    }
    document = json.loads((tmp_path / "s.json").read_text())
    rules = json.loads((SCHEMAS / "suggest.schema.json").read_text())
    Draft202012Validator.check_schema(rules)
    cast("_Validator", Draft202012Validator(rules)).validate(document)
    assert [{name: str(size) for name, size in each["sizes"].items()} for each in document["shapes"]] == [
        {name: row[name] for name in ("batch", "m", "n", "k")} for row in rows
    ]
    empty = run("--table", shapes, "--out", tmp_path / "mine.toml")
    assert empty.exit_code == 3
    assert "no row is a measured operation (no duration, or NaN (as in row 1): 20)" in empty.stderr
    fill(shapes, filled, count=15)
    fitted = run("--table", filled, "--out", tmp_path / "mine.toml")
    assert fitted.exit_code == 0, fitted.output
    assert "rows skipped: 5: no duration, or NaN (as in row 16)" in fitted.stderr
    assert "of H100-SXM from 15 rows" in fitted.stdout
    own = [fit for fit in load_device(tmp_path / "mine.toml").own_fits if fit.table == "filled.csv"]
    assert {fit.kind for fit in own} == {"matmul", "*"}
    more = run("--suggest", "5", "--table", filled, "--out", tmp_path / "more.csv")
    assert more.exit_code == 0, more.output
    assert "rows treated as not measured: 5: no duration, or NaN (as in row 16)" in more.stderr
    assert re.search(r"^matmul +bf16 +5 +\d,\d{3} +15 ", more.stdout, re.MULTILINE)
    measured = {tuple(row[name] for name in "mnk") for row in rows[:15]}
    assert not measured & {tuple(row[name] for name in "mnk") for row in rows_of(tmp_path / "more.csv")}


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    contents: list[bytes] = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        done = run(
            "--suggest", "9", "--kind", "attention.context", "--kind", "moe", "--seed", seed, "--quiet",
            "--out", tmp_path / f"{name}.csv",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        contents.append((tmp_path / f"{name}.csv").read_bytes())
    assert contents[0] == contents[1] != contents[2]
    again = run("--suggest", "9", "--out", tmp_path / "a.csv")
    assert (again.exit_code, "--overwrite" in again.stderr) == (2, True)
    assert (tmp_path / "a.csv").read_bytes() == contents[0]
    assert run("--suggest", "9", "--out", tmp_path / "a.csv", "--overwrite").exit_code == 0


def test_the_function_does_what_the_command_does(tmp_path: Path) -> None:
    assert run("--suggest", "12", "--dtype", "fp8", "--out", tmp_path / "a.csv").exit_code == 0
    report = hespas.suggest_shapes("H100-SXM", 12, dtype="fp8")
    assert repr(report) == "<SuggestionReport: H100-SXM, 12 of matmul in fp8>"
    report.write(tmp_path / "b.csv")
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert len(report.to_pandas()) == 12


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--suggest", "0"], 2, "not in the range x>=1"),
        (["--suggest", "many"], 2, "--suggest"),
        (["--suggest", "9", "--kind", "weather"], 2, "try: choose one of attention.context,"),
        (["--suggest", "9", "--dtype", "weather"], 2, "no number format 'weather'"),
        (["--suggest", "9", "--hardware", str(CPU)], 2, "no learned model of matmul covers a cpu"),
        (["--suggest", "9", "--out", "mine.toml"], 2, "mine.toml: --out: expected a .csv file"),
        (["--suggest", "9", "--estimator", "learned"], 2, "--suggest excludes --estimator"),
        (
            ["--suggest", "9", "--test-by", "op", "--split", "a"],
            2,
            "--suggest excludes --split and --test-by",
        ),
        (["--suggest", "9", "--table", "absent.csv"], 3, "absent.csv"),
        (
            ["--suggest", "9", "--table", "s.csv", "--out", "s.csv"],
            2,
            "--out names the same file as an input",
        ),
        (["--suggest", "9", "--json", "shapes.csv"], 2, "same file"),
        (["--suggest", "9999999"], 2, "suggest fewer shapes"),
        (["--kind", "matmul"], 2, "add --suggest N"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.csv").write_text("hardware,kind,dtype,m,n,k,latency_us\nH100-SXM,matmul,bf16,64,64,64,5\n")
    before = sorted(tmp_path.iterdir())
    asked = arguments if "--out" in arguments else [*arguments, "--out", "shapes.csv"]
    done = run(*asked)
    assert done.exit_code == code, done.output
    assert message in re.sub(r"[\s│]+", " ", done.stderr)
    assert "Traceback" not in done.output
    assert sorted(tmp_path.iterdir()) == before
