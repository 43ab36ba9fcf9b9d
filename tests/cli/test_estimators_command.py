"""``hespas estimators``, and messages of estimators that need more options."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from hespas.cli.main import app
from hespas.estimators import estimator_names

SCHEMA = Path(__file__).parents[2] / "hespas" / "schemas" / "estimators.schema.json"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's simulators are found, and nobody's cache is used."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_estimator_is_listed() -> None:
    done = run("estimators")
    assert done.exit_code == 0
    first = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert set(estimator_names()) <= set(first)
    assert "cocossim: build COCOSSim and name its program" in done.stdout


def test_the_list_as_json_follows_its_schema() -> None:
    done = run("estimators", "--json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    rows = {row["name"]: row for row in document["estimators"]}
    assert list(rows) == list(estimator_names())
    assert rows["roofline"]["available"] is True
    assert rows["onnxim"]["available"] is False
    assert "config" in rows["onnxim"]["options"]
    assert "progress" not in rows["xla"]["options"]
    assert all(row["what"] and "\n" not in row["detail"] for row in rows.values())
    assert rows["database"]["available"] is True
    assert "path=FILE" in rows["database"]["detail"]


def test_a_simulator_that_is_not_there_is_unsupported(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("m,n,k,dtype\n8,8,8,i8\n")
    done = run("estimate", "--table", str(table), "--hardware", "TPU-v4", "--estimator", "cocossim")
    assert done.exit_code == 4
    assert "no program 'perf_model'" in done.stderr
    assert "--estimator cocossim:command=PATH/perf_model" in done.stderr
