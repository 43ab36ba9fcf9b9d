"""``hespas-validate accuracy --table``: text, documents and exit codes on tables with known errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from hespas.cli.validate import app
from tests.validators.small_tables import matmul_row, products, vectors, write_table

SCHEMAS = Path(__file__).parents[2] / "hespas" / "schemas"


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path) -> Result:
    model = [] if "--estimator" in arguments else ["--estimator", "roofline"]
    return CliRunner().invoke(app, ["accuracy", *(str(each) for each in arguments), *model])


def document_of(path: Path) -> dict[str, list[dict[str, object]]]:
    document = json.loads(path.read_text())
    rules = json.loads((SCHEMAS / "accuracy.schema.json").read_text())
    cast("_Validator", Draft202012Validator(rules)).validate(document)
    return cast("dict[str, list[dict[str, object]]]", document)


def simple(flops: float, moved: float) -> float:
    """Half the peak of an H100, 5 us to start [us]."""
    return 5 + max(flops / 494.7e6, moved / 1.675e6)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = products("H100-SXM", simple, (256, 1024, 4096), split="calib")
    rows += products("H100-SXM", simple, (512, 2048), split="devval")
    rows += vectors("H100-SXM", ("add", "tanh"), simple, split="devval")
    rows += products("a100_sxm", simple, (512, 2048), split="devval")
    return write_table(tmp_path / "table.csv", rows)


def test_a_split_of_one_device(table: Path, tmp_path: Path) -> None:
    done = run(
        "--table", table, "--split", "devval", "--hardware", "H100-SXM", "--json", tmp_path / "a.json",
        "--estimator", "roofline",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = document_of(tmp_path / "a.json")
    assert cast("list[str]", document["inputs"]) == [str(table)]
    assert document["end_to_end"] == document["trends"] == []
    [source] = document["sources"]
    assert (source["source"], source["hardware"], source["cases"]) == ("table.csv", "H100-SXM", 48)
    classes = {row["op_class"] for row in document["summary"]}
    assert classes == {
        "all", "matmul bf16", "matmul bf16 lib 1", "vector f32", "vector add f32 lib 1",
        "vector tanh f32 lib 1",
    }  # fmt: skip
    assert {row["estimator"] for row in document["summary"]} == {
        "roofline",
        "datasheet-roofline",
        "one-efficiency",
        "overhead+two-efficiencies",
    }
    for words in (
        "roofline +all +48 ",
        "roofline +matmul bf16 +8 ",
        "roofline +vector f32 +40 ",
        r"overhead\+two-efficiencies +all ",
    ):
        assert re.search(rf"^H100-SXM +{words}", done.stdout, re.MULTILINE), words
    assert "lib 1" not in done.stdout, "families stand for their classes"
    assert done.stderr == ""
    told = [row["message"] for row in document["diagnostics"] if row["code"] == "accuracy.table"]
    assert told == ["56 of 83 rows compared; data: the table itself"]


def test_figures_are_those_of_the_formula(tmp_path: Path) -> None:
    rows = products("H100-SXM", lambda flops, moved: 2e-3 * max(flops / 989.4e3, moved / 3.35e3))
    rows = [row for row in rows if "2048,2048,2048" in row]
    done = run("--table", write_table(tmp_path / "t.csv", rows), "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    [naive] = [
        row
        for row in document_of(tmp_path / "a.json")["summary"]
        if (row["estimator"], row["level"], row["op_class"], row["size"])
        == ("datasheet-roofline", "instance", "all", "all")
    ]
    assert naive["mape"] == pytest.approx(0.5, rel=0.01)
    assert naive["bias"] == pytest.approx(-0.5, rel=0.01)


def test_all_devices_of_a_table(table: Path, tmp_path: Path) -> None:
    with table.open("a") as more:
        more.write(matmul_row("Abacus 9000", (16, 16, 16), 1.0, "devval") + "\n")
    done = run("--table", table, "--split", "devval", "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    document = document_of(tmp_path / "a.json")
    assert [row["hardware"] for row in document["sources"]] == ["A100-SXM-80GB", "H100-SXM"]
    assert "Abacus 9000" in done.stderr
    assert "[accuracy.no-hardware-file]" in done.stderr
    [pair] = [row for row in document["speed_ups"] if row["estimator"] == "roofline"]
    assert pair["n"] == 8, "shapes that both devices have"


def test_rows_for_fitting_are_named_when_they_are_compared(table: Path) -> None:
    done = run("--table", table, "--hardware", "H100-SXM")
    assert done.exit_code == 0, done.output
    assert "warning: table.csv: rows of split 'calib' are compared" in done.stderr
    assert "(27 times)" in done.stderr


def test_a_hardware_file_of_ones_own_is_found_by_its_alias(table: Path, tmp_path: Path) -> None:
    from hespas.cli.main import app as hespas_app

    text = CliRunner().invoke(hespas_app, ["hardware", "show", "H100-SXM"]).stdout
    mine = tmp_path / "mine.toml"
    mine.write_text(
        text.replace('name = "H100-SXM"', 'name = "my GPU"').replace("aliases = [", 'aliases = ["H100-SXM", ')
    )
    done = run("--table", table, "--split", "devval", "--hardware", mine)
    assert done.exit_code == 0, done.output
    assert re.search(r"^my GPU +roofline +all +48 ", done.stdout, re.MULTILINE)


def test_a_report_of_a_table(table: Path, tmp_path: Path) -> None:
    done = run("--table", table, "--split", "devval", "--report", tmp_path / "out")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert "vector tanh f32 lib 1" in page
    csv = (tmp_path / "out" / "report.csv").read_text()
    assert '"matmul bf16 lib 1, batch 1, m 512, n 512, k 512"' in csv
    again = run("--table", table, "--split", "devval", "--report", tmp_path / "out")
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_thresholds_hold_for_tables(table: Path) -> None:
    asked = ["--table", str(table), "--split", "devval", "--hardware", "H100-SXM"]
    done = run(*asked, "--max-mape", "0.01")
    assert done.exit_code == 1
    assert "threshold exceeded: MAPE of roofline on H100-SXM is" in done.stdout
    assert run(*asked, "--max-mape", "9", "--min-coverage", "0.9").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give --measured PROFILE or --table TABLE"),
        (["--table", "table.csv", "--measured", "table.csv"], 2, "given twice"),
        (["--table", "table.csv", "--workload", "w.json"], 2, "--table cannot be combined with"),
        (["--table", "table.csv", "--max-e2e", "0.1"], 2, "errors of steps, and a table has none"),
        (["--table", "table.csv", "--table", "table.csv"], 2, "given twice"),
        (["--measured", "table.csv", "--split", "devval"], 2, "--split selects rows of a table"),
        (["--table", "table.csv", "--split", "test"], 2, "choose from calib, devval"),
        (["--table", "table.csv", "--hardware", "L4"], 2, "choose one of A100-SXM-80GB, H100-SXM"),
        (["--table", "table.csv", "--hardware", "H900"], 2, "H900"),
        (["--table", "table.csv", "--estimator", "guess"], 2, "guess"),
        (["--table", "unknown.csv"], 2, "no hardware file for Abacus"),
        (["--table", "absent.csv"], 3, "absent.csv"),
        (["--table", "broken.csv"], 3, "do not match any known table"),
        (["--table", "table.csv", "--json", "no/a.json"], 2, "does not exist"),
        (["--table", "table.csv", "--json", "table.csv"], 2, "same file as an input"),
    ],
)
@pytest.mark.usefixtures("table")
def test_a_wrong_request_says_what_is_wrong(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.csv").write_text("a,b\n1,2\n")
    write_table(tmp_path / "unknown.csv", [matmul_row("Abacus", (16, 16, 16), 1.0)])
    before = sorted(tmp_path.iterdir())
    done = run(*arguments)
    assert done.exit_code == code, done.output
    assert message in re.sub(r"[\s│]+", " ", done.stderr)
    assert "Traceback" not in done.output
    assert sorted(tmp_path.iterdir()) == before
