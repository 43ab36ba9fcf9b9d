"""``hespas-validate roundtrip``: what it prints, writes and exits with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli.validate import app
from hespas.validators.roundtrip import result

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"


def nothing(losses: Mapping[str, tuple[str, ...]], findings: Mapping[str, int]) -> Iterator[str]:
    """As if formats declared no losses."""
    del losses, findings
    return iter(())


def test_the_matrix_on_standard_output_and_both_documents(tmp_path: Path) -> None:
    command = ["roundtrip", str(PROGRAM), "--formats", "op-graph, chakra", "--jobs", "1"]
    documents = ["--json", str(tmp_path / "kept.json"), "--html", str(tmp_path / "kept.html")]
    done = CliRunner().invoke(app, [*command, *documents])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["from", "\\", "through", "op-graph", "chakra"]
    assert lines[1].split("  ")[0] == "stablehlo"
    assert "op-graph -> chakra cannot express: metadata" in done.stdout
    assert lines[-1] == "1 file: everything that is not kept is reported"
    assert json.loads((tmp_path / "kept.json").read_text())["valid"] is True
    assert "<table>" in (tmp_path / "kept.html").read_text()


def test_a_loss_without_a_report_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "_covered", nothing)
    done = CliRunner().invoke(app, ["roundtrip", str(PROGRAM), "--formats", "chakra", "--jobs", "1"])
    assert done.exit_code == 1
    assert "UNREPORTED" in done.stdout.splitlines()[1]
    assert done.stdout.splitlines()[-1] == "1 file: something is lost UNREPORTED"


def test_an_unknown_format_is_wrong_usage() -> None:
    done = CliRunner().invoke(app, ["roundtrip", str(PROGRAM), "--formats", "chakre"])
    assert done.exit_code == 2
    assert "chakre" in done.stderr


def test_a_missing_file_is_unreadable(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["roundtrip", str(tmp_path / "absent.mlir")])
    assert done.exit_code == 3
    assert "no such file" in done.stderr
