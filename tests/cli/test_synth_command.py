"""``hespas generate synth``: written jobs, their card, and errors."""

from __future__ import annotations

import json
from pathlib import Path

from jsonschema import validate  # pyright: ignore[reportUnknownVariableType]
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.main import app

SCHEMA = Path(__file__).parents[2] / "hespas" / "schemas" / "synthesis.schema.json"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["generate", "synth", *map(str, words)])


def test_jobs_and_their_card_are_written(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "jobs"
    hespas.generate(hespas.vit_step(dp=2, batch=8), source)
    options = ("--like", source, "--count", 2, "--scale", 2, "--system", "dgx-h100,dgx-a100")
    done = run(*options, "--out", folder, "--json", tmp_path / "card.json")
    assert done.exit_code == 0, done.output
    assert "2 synthetic jobs like 1 source, 2 valid" in done.stdout
    assert "step ratio on dgx-a100" in done.stdout
    assert hespas.check(folder / "job_001", profile="astra-sim").valid
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    own, written = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in (tmp_path / "card.json", folder / "card.json")
    )
    for document in (own, written):
        validate(document, schema)
    assert own["card"] == written["card"]
    assert own["inputs"] == [str(source)]
    assert str(source) not in (folder / "card.json").read_text(encoding="utf-8")
    again = run(*options, "--out", folder)
    assert again.exit_code == 2
    assert "exists already" in again.output
    assert run(*options, "--out", folder, "--overwrite").exit_code == 0


def test_a_source_is_required() -> None:
    done = run("--count", 1)
    assert done.exit_code == 2
    assert "--like" in done.output
