"""``hespas sample``: lists, written files and errors, and the files in the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hespas
from hespas.api.samples import FILES, catalogue
from hespas.cli.main import app
from tools.samples import fixture_of


def _sample(*words: str) -> Result:
    return CliRunner().invoke(app, ["sample", *words])


def test_samples_are_listed_without_names() -> None:
    done = _sample()
    assert done.exit_code == 0
    for entry in catalogue():
        assert entry.name in done.stdout
    assert "hespas sample all" in done.stdout


def test_all_samples_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = _sample("all", "--json", "samples.json")
    assert done.exit_code == 0, done.output
    document = json.loads(Path("samples.json").read_text())
    listed = {file for row in document["samples"] for file in row["files"]}
    written = {
        path.relative_to("samples").as_posix() for path in Path("samples").rglob("*") if path.is_file()
    }
    assert written == listed
    assert sum(row["size_bytes"] for row in document["samples"]) < 2e6


def test_samples_are_added_to_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert _sample("chakra", "--out", str(folder)).exit_code == 0
    done = _sample("pytorch", "--out", str(folder))
    assert done.exit_code == 0
    assert f"try: hespas analyze {folder}/ffn_train" in done.stdout
    assert (folder / "pipeline_2x2" / "pipeline.3.et").is_file()
    trace = folder / "pipeline_2x2" / "pipeline.0.et"
    trace.write_bytes(b"mine")
    refused = _sample("chakra", "--out", str(folder))
    assert (refused.exit_code, trace.read_bytes()) == (2, b"mine")
    assert "--overwrite" in refused.stderr
    assert _sample("chakra", "--out", str(folder), "--overwrite").exit_code == 0
    assert trace.read_bytes() == (FILES / "pipeline_2x2" / "pipeline.0.et").read_bytes()


def test_an_unknown_sample_is_refused_with_a_near_name(tmp_path: Path) -> None:
    done = _sample("pytorhc", "--out", str(tmp_path / "x"))
    assert done.exit_code == 2
    assert "did you mean pytorch?" in done.stderr
    assert not (tmp_path / "x").exists()


def test_files_of_the_package_are_the_fixtures() -> None:
    stated = sorted(file for entry in catalogue() for file in entry.files)
    assert stated == sorted(path.relative_to(FILES).as_posix() for path in FILES.rglob("*") if path.is_file())
    for file in stated:
        assert (FILES / file).read_bytes() == fixture_of(file).read_bytes(), "run 'python -m tools.samples'"


def test_python_writes_samples(tmp_path: Path) -> None:
    done = hespas.sample(["chakra"], folder=tmp_path / "s")
    assert done.headline() == f"1 sample, 5 files -> {tmp_path / 's'}"
    assert hespas.check(tmp_path / "s" / "pipeline_2x2").valid
    assert len(hespas.sample().table()) == len(catalogue())
