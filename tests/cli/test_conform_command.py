"""``hespas-validate conform``: the table of failed cases, documents, the archive and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from hespas import api
from hespas.cli.validate import app
from hespas.graph.errors import UsageError

SCHEMA = Path(__file__).parents[2] / "hespas" / "schemas" / "conform.schema.json"


def test_own_cases_are_counted_by_kind(tmp_path: Path) -> None:
    document, page, archive = tmp_path / "c.json", tmp_path / "c.html", tmp_path / "kit.zip"
    outputs = ["--json", str(document), "--html", str(page), "--out", str(archive)]
    done = CliRunner().invoke(app, ["conform", "--cases", "files/*", "--cases", "memory/pool", *outputs])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "hespas: 6 of 6 cases passed"
    content = json.loads(document.read_text())
    jsonschema.validate(content, json.loads(SCHEMA.read_text()))
    assert (content["passed"], content["failed"], content["skipped"]) == (6, 0, 0)
    assert "memory/pool" in page.read_text()
    again = CliRunner().invoke(app, ["conform", "--kit", str(archive), "--cases", "memory/pool", "--quiet"])
    assert again.stdout == "hespas: 1 of 1 case passed\n"


def test_a_failed_case_is_named_and_the_exit_code_is_1() -> None:
    done = CliRunner().invoke(app, ["conform", "--tool", "true", "--cases", "frames/t*", "--quiet"])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [
        "case", "frames/truncated-body", "frames/truncated-half", "frames/truncated-length",
        "frames/truncated-varint-field", "frames/trailing-bytes", "frames/text",
    ]  # fmt: skip
    assert lines[-1] == "true: 0 of 6 cases passed"


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`adapter=counts` requires `tool`"):
        api.conform(adapter="counts")
    with pytest.raises(UsageError, match="`seed` cannot be combined with `kit`"):
        api.conform(kit=tmp_path / "kit.zip", seed=3)
