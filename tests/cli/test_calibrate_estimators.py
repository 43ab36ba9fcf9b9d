"""``hespas-validate calibrate --estimator systolic|learned``: files, printed text and errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from hespas.cli.validate import app
from hespas.fitting import own_models
from hespas.hardware import load_device
from tests.validators.small_tables import products, vectors, write_table

pytest.importorskip("sklearn")

SCHEMAS = Path(__file__).parents[2] / "hespas" / "schemas"


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path, command: str = "calibrate") -> Result:
    return CliRunner().invoke(app, [command, *(str(each) for each in arguments)])


def slow(flops: float, moved: float) -> float:
    return 2 + flops / 27.5e6 + moved / 0.12e6


@pytest.fixture
def table(tmp_path: Path) -> Path:
    ops = ("add", "tanh", "neg")
    rows = vectors("TPU-v4", ops, slow, split="calib")
    rows += products("TPU-v4", slow, (512, 1024), split="calib")
    rows += vectors("TPU-v4", ops, lambda f, b: 1.02 * slow(f, b), split="devval")
    return write_table(tmp_path / "table.csv", rows)


def asked(table: Path, out: Path, *names: str) -> list[str | Path]:
    options = [each for name in names for each in ("--estimator", name)]
    return ["--hardware", "TPU-v4", "--table", table, "--out", out, "--date", "2026-01-31", *options]


@pytest.mark.parametrize("trees", [15, 0], ids=["few trees", "all trees"])
def test_lines_and_models_are_written_shown_and_used(
    trees: int, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fits are equal in all but their number of trees, which is most of the time that they take."""
    for name in ("FEW", "ROBUST", "SMALL") if trees else ():
        monkeypatch.setattr(own_models, name, replace(getattr(own_models, name), trees=trees))
    mine = tmp_path / "mine.toml"
    wanted = asked(table, mine, "learned", "systolic", "calibrated")
    done = run(*wanted, "--json", tmp_path / "c.json", "--test-by", "shape")
    assert done.exit_code == 0, done.output
    for name in ("roofline", "calibrated", "systolic", "learned"):
        assert re.search(rf"^TPU-v4 +{name} +vector f32 +\d+ ", done.stdout, re.MULTILINE), name
    assert re.search(r"^learned vector f32 \(vector\) +\d+ trees +60 +60 +", done.stdout, re.MULTILINE)
    assert re.search(r"\d+ fits and 1 learned model in .*mine\.learned of TPU-v4 from 68 rows", done.stdout)
    assert "no learned model of matmul bf16: 8 rows" in " ".join(done.stderr.split())
    document = json.loads((tmp_path / "c.json").read_text())
    rules = json.loads((SCHEMAS / "calibrate.schema.json").read_text())
    Draft202012Validator.check_schema(rules)
    cast("_Validator", Draft202012Validator(rules)).validate(document)
    assert document["estimators"] == ["calibrated", "systolic", "learned"]
    assert [model["name"] for model in document["models"]] == ["vector"]
    assert {"streams", "elements"} <= {fit["form"] for fit in document["fits"]}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"table.csv", "mine.toml", "mine.learned", "c.json"}, "nothing else is left"
    accuracy = run(
        "--table", table, "--split", "devval", "--hardware", mine, "--estimator", "learned", "--estimator",
        "systolic", "--max-mape", "0.1", command="accuracy",
    )  # fmt: skip
    assert accuracy.exit_code == 0, accuracy.output


def test_the_same_rows_and_seed_give_the_same_files(table: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        done = run(*asked(table, folder / "mine.toml", "systolic", "learned"), "--seed", "5")
        assert done.exit_code == 0, done.output
    contents = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in folders
    ]
    assert contents[0] == contents[1]
    assert len(contents[0]) == 3


def test_what_exists_is_replaced_only_when_asked(table: Path, tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine.toml", tmp_path / "mine.learned"
    folder.mkdir()
    (folder / "old.json").write_text("{}")
    refused = run(*asked(table, mine, "learned"))
    assert (refused.exit_code, "mine.learned: exists already" in refused.stderr) == (2, True)
    assert not mine.exists()
    done = run(*asked(table, mine, "learned"), "--overwrite")
    assert done.exit_code == 0, done.output
    assert [Path(card).name for card in load_device(mine).learned_models] == ["vector.json"]
    assert (folder / "old.json").read_text() == "{}", "it is no file of ours, and asked by nobody"
    said = run("--table", table, "--hardware", mine, "--estimator", "learned", command="accuracy")
    assert said.exit_code == 0, said.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--estimator", "ridge"], "ridge"),
        (["--estimator", "learned", "--report", "mine.learned"], "the folder of learned models"),
        (["--estimator", "learned", "--json", "mine.learned"], "the folder of learned models"),
        (["--estimator", "learned", "--seed", "4294967296"], "not in the range 0<=x<=4294967295"),
        (["--estimator", "learned", "--hardware", "H100-SXM"], "choose a device of the tables: TPU-v4"),
        (["--estimator", "learned", "--split", "devval"], "reserved for testing"),
        (["--estimator", "learned", "--test-by", "hardware"], "no other device"),
        (["--estimator", "learned", "--table", "few.csv"], "8 rows with known sizes"),
        (["--estimator", "systolic", "--table", "gpu.csv", "--hardware", "H100-SXM"], "no systolic array"),
    ],
)
@pytest.mark.usefixtures("table")
def test_a_wrong_request_says_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "few.csv", products("TPU-v4", slow, (512, 1024)))
    write_table(tmp_path / "gpu.csv", products("H100-SXM", slow))
    before = sorted(tmp_path.iterdir())
    for name, value in (("--hardware", "TPU-v4"), ("--table", "table.csv"), ("--out", "mine.toml")):
        arguments = arguments if name in arguments else [*arguments, name, value]
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert message in re.sub(r"[\s│]+", " ", done.stderr)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_where_the_models_go_is_told(table: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.learned").write_text("taken")
    done = run(*asked(table, tmp_path / "mine.toml", "learned"), "--overwrite")
    assert done.exit_code == 2
    assert "exists and is not a folder" in done.stderr
    assert (tmp_path / "mine.learned").read_text() == "taken"
