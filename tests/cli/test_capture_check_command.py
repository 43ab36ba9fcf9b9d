"""``hespas-validate capture``: printed text, files and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli.validate import app

JOBS = Path(__file__).parents[2] / "fixtures" / "rescale"
GRAPH, TRACE = JOBS / "gloo4" / "et.0.json.gz", JOBS / "gloo4" / "kineto.0.json.gz"


def test_what_ran_is_exit_code_0(tmp_path: Path) -> None:
    document = tmp_path / "check.json"
    done = CliRunner().invoke(app, ["capture", str(GRAPH), str(TRACE), "--json", str(document)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["captured", "measured", "different"]
    assert lines[1].split() == ["operations", "179", "176", "0"]
    assert lines[2].split() == ["collectives", "2", "2", "0"]
    assert lines[3].split() == ["their", "bytes", "99.332", "kB", "99.332", "kB"]
    assert lines[4].split() == ["dependencies", "248", "245", "0"]
    assert lines[-1] == "0 matches the trace (1 rank, 1 run)"
    assert "a framework scope" in lines[-2]
    written = json.loads(document.read_text())
    assert (written["schema"], written["equal"]) == ("hespas.capture-check/1", True)
    assert written["inputs"] == [str(GRAPH), str(TRACE)]


def test_what_did_not_run_is_exit_code_1_and_itemised(tmp_path: Path) -> None:
    document = tmp_path / "check.json"
    other = JOBS / "gloo2" / "kineto.0.json.gz"
    done = CliRunner().invoke(app, ["capture", str(GRAPH), str(other), "--json", str(document)])
    assert done.exit_code == 1
    assert (
        "rank 0, collective 1: all_reduce over {0, 1, 2, 3}, 4 bytes captured, "
        "all_reduce over {0, 1}, 4 bytes measured"
    ) in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "0 does not match the trace: 2 differences (1 rank, 1 run)"
    assert json.loads(document.read_text())["differences"] == 2


def test_quiet_tells_the_verdict_alone() -> None:
    done = CliRunner().invoke(app, ["capture", str(GRAPH), str(TRACE), "--quiet"])
    assert done.stdout == "0 matches the trace (1 rank, 1 run)\n"


@pytest.mark.parametrize(("inputs", "code"), [((TRACE, TRACE), 2), ((GRAPH, Path("absent.xplane.pb")), 3)])
def test_wrong_inputs(inputs: tuple[Path, Path], code: int) -> None:
    done = CliRunner().invoke(app, ["capture", *map(str, inputs)])
    assert done.exit_code == code, done.output


def test_the_document_never_replaces_an_input() -> None:
    done = CliRunner().invoke(app, ["capture", str(GRAPH), str(TRACE), "--json", str(TRACE), "--overwrite"])
    assert done.exit_code != 0
    assert TRACE.stat().st_size > 1000
