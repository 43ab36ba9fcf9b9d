"""``hespas-validate roundtrip``: printed text, files and exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas import api
from hespas.cli.convert import app as convert
from hespas.cli.validate import app
from hespas.graph.errors import FormatError
from hespas.validators.roundtrip import ColumnResult
from hespas.validators.roundtrip import matrix as result

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"


def nothing(column: ColumnResult, declared: object, findings: Mapping[str, int]) -> bool:
    """As if formats declared no losses."""
    del column, declared, findings
    return False


def test_the_matrix_on_standard_output_and_both_documents(tmp_path: Path) -> None:
    command = ["roundtrip", str(PROGRAM), "--formats", "op-graph, chakra", "--jobs", "1"]
    documents = ["--json", str(tmp_path / "kept.json"), "--html", str(tmp_path / "kept.html")]
    done = CliRunner().invoke(app, [*command, *documents])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["from", "\\", "through", "op-graph", "chakra"]
    assert lines[1].split("  ")[0] == "stablehlo"
    assert "op-graph -> chakra cannot express: attachments (1/1)" in done.stdout
    assert "op-graph -> chakra changes: metadata (2/3)" in lines  # its replicas and partitions
    assert lines[-1] == "1 file: all losses are reported"
    assert json.loads((tmp_path / "kept.json").read_text())["valid"] is True
    assert "<table>" in (tmp_path / "kept.html").read_text()


def test_a_loss_without_a_report_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "_is_reported", nothing)
    done = CliRunner().invoke(app, ["roundtrip", str(PROGRAM), "--formats", "chakra", "--jobs", "1"])
    assert done.exit_code == 1
    assert "UNREPORTED" in done.stdout.splitlines()[1]
    assert done.stdout.splitlines()[-1] == "1 file: some losses are UNREPORTED"


def test_an_unknown_format_is_wrong_usage() -> None:
    done = CliRunner().invoke(app, ["roundtrip", str(PROGRAM), "--formats", "chakre"])
    assert done.exit_code == 2
    assert "chakre" in done.stderr


def test_a_missing_file_is_unreadable(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["roundtrip", str(tmp_path / "absent.mlir")])
    assert done.exit_code == 3
    assert "no such file" in done.stderr


def test_profiles_in_a_folder_are_skipped_and_told(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path / "a.mlir")
    profile = tmp_path / "b.json"
    shutil.copy(ROOT / "fixtures" / "profiles" / "rocprofv3_two_processes.json", profile)
    done = CliRunner().invoke(app, ["roundtrip", str(tmp_path), "--formats", "op-graph", "--jobs", "2"])
    assert done.exit_code == 0, done.output
    assert "b.json (rocprofv3): skipped, it is a measured profile" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 file, 1 profile skipped: ")
    alone = CliRunner().invoke(app, ["roundtrip", str(profile)])
    assert (alone.exit_code, "this is a profile" in alone.stderr) == (4, True)
    (tmp_path / "a.mlir").unlink()
    none = CliRunner().invoke(app, ["roundtrip", str(tmp_path)])
    assert (none.exit_code, "all inputs are profiles" in none.stderr) == (2, True)


def test_formats_without_a_pair_are_wrong_usage() -> None:
    done = CliRunner().invoke(app, ["roundtrip", str(PROGRAM), "--formats", "kineto,astra-text"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "none of these formats can be written" in done.stderr


def test_what_a_reader_reports_is_told(tmp_path: Path) -> None:
    program = ROOT / "fixtures" / "stablehlo" / "while_unknown.mlir"
    options = ["--formats", "op-graph", "--json", str(tmp_path / "r.json")]
    done = CliRunner().invoke(app, ["roundtrip", str(program), *options])
    assert "its reader reports stablehlo.unknown-trips" in done.stderr
    [entry] = json.loads((tmp_path / "r.json").read_text())["inputs"]
    assert {"code": "stablehlo.unknown-trips", "count": 1} in entry["diagnostics"]


def test_files_beside_a_set_of_traces_are_told(tmp_path: Path) -> None:
    set_of_one = tmp_path / "set"
    assert CliRunner().invoke(convert, [str(PROGRAM), f"{set_of_one}/"]).exit_code == 0
    (set_of_one / "notes.txt").write_text("mine")
    told = [["check", str(set_of_one)], ["roundtrip", str(set_of_one), "--formats", "op-graph"]]
    assert not any("input.left-out" in CliRunner().invoke(app, words).output for words in told)
    shutil.copy(PROGRAM, set_of_one / "a.mlir")
    for words in told:
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, "input.left-out" in done.stderr) == (0, True), done.output
    done = CliRunner().invoke(convert, [str(set_of_one), str(tmp_path / "g.json")])
    assert "read as chakra, without a.mlir (stablehlo) [input.left-out]" in done.stderr


def test_one_rank_of_a_job_comes_back_from_every_format(tmp_path: Path) -> None:
    alone = tmp_path / "rank3.et"
    program = ROOT / "fixtures" / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"
    api.convert(program, alone, ranks=range(3, 4), granularity="region")
    done = CliRunner().invoke(app, ["roundtrip", str(alone), "--formats", "op-graph,op-graph-arrow,chakra"])
    assert done.exit_code == 0, done.output
    assert "refused" not in done.stdout
    assert "UNREADABLE" not in done.stdout


def test_a_writer_whose_output_its_reader_refuses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise FormatError("not what was written", path="job.arrow")

    monkeypatch.setattr("hespas.converters.op_graph.arrow.read_arrow", refuse)
    command = ["roundtrip", str(PROGRAM), "--formats", "op-graph,op-graph-arrow", "--jobs", "1"]
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "kept.json")])
    assert done.exit_code == 1
    assert "wrote 1 file that cannot be read (UNREADABLE): not what was written" in done.stdout
    assert "1 file: some written files cannot be read back" in done.stdout
    document = json.loads((tmp_path / "kept.json").read_text())
    assert document["valid"] is False
    assert {"not what was written": 1} in [cell["unreadable"] for cell in document["cells"]]
