"""``hespas analyze``: printed text, document and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.main import app
from hespas.graph.errors import UsageError
from tests.converters.pytorch.traces import host, kernel, launch, write_kineto

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
TRACE = FIXTURES / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    schema = json.loads((ROOT / "hespas" / "schemas" / "analyze.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    cast("_Validator", Draft202012Validator(schema)).validate(found)
    return found


def test_the_first_line_is_the_answer_and_lines_are_short(tmp_path: Path) -> None:
    done = run(TRACE, "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    found = document(tmp_path / "a.json")
    assert lines[0] == found["verdict"]
    assert "busy" in lines[0]
    assert max(map(len, lines[1:])) <= 100
    assert found["schema"] == "hespas.analyze/1"
    assert found["hardware"] == "H100-SXM"
    assert found["devices"] == ["NVIDIA H100 80GB HBM3"]


def test_another_device_is_told(tmp_path: Path) -> None:
    done = run(TRACE, "--hardware", "A100-SXM-40GB", "--json", tmp_path / "a.json")
    assert done.exit_code == 0
    assert "roofline is that of A100-SXM-40GB" in done.stderr
    assert document(tmp_path / "a.json")["hardware"] == "A100-SXM-40GB"


def test_an_unknown_device_has_no_roof(tmp_path: Path) -> None:
    events = [host("aten::add", 0, 9), launch(1, 4), kernel("k", 20, 5, 4)]
    path = write_kineto(tmp_path / "t.json", events, deviceProperties=[{"id": 0, "name": "Abacus 9"}])
    done = run(path, "--json", tmp_path / "a.json")
    assert done.exit_code == 0
    assert "the catalogue does not have 'Abacus 9': no roofline" in done.stderr
    assert "--hardware" in done.stderr
    found = document(tmp_path / "a.json")
    assert found["wins"] == []
    assert [row["roof_ns"] for row in found["operations"]] == [None]


PROFILES = (
    "rocprofv3_two_processes.json",
    "nsys_two_processes.sqlite.gz",
    "nsys_graph_trace.sqlite.gz",
    "rocpd_tracks.db.gz",
    "h100_streams.xplane.pb",
    "tpu_v4_megacore.trace.json.gz",
)


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_of_every_format(name: str, tmp_path: Path) -> None:
    done = run(FIXTURES / "profiles" / name, "--json", tmp_path / "a.json", "--quiet")
    assert done.exit_code == 0, done.output
    found = document(tmp_path / "a.json")
    assert sum(row["total_ns"] for row in found["kernels"]) > 0


def test_a_program_is_refused() -> None:
    done = run(FIXTURES / "stablehlo" / "mlp.mlir")
    assert done.exit_code == 2
    assert "expected a measured profile" in done.stderr


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": [')
    assert run(path).exit_code == 3


@pytest.mark.parametrize("given", [(TRACE, TRACE), (TRACE, "--baseline", TRACE, "--baseline", TRACE)])
def test_a_recording_is_given_once(given: tuple[str | Path, ...]) -> None:
    done = run(*given)
    assert done.exit_code == 2
    assert "is given twice" in done.stderr


def test_what_is_whole_of_a_cut_trace_is_analysed(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "t.json", [kernel("whole", 20, 5, 4), kernel("last", 30, 9, 5)])
    text = path.read_text()
    path.write_text(text[: text.index('"last"') + 8])
    assert run(path).exit_code == 3
    done = run(path, "--recover", "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    found = document(tmp_path / "a.json")
    assert [(row["kernel"], row["total_ns"]) for row in found["kernels"]] == [("whole", 5000)]
    assert "kineto.cut" in {each["code"] for each in found["diagnostics"]}


def test_nothing_recorded_on_a_device(tmp_path: Path) -> None:
    path = write_kineto(tmp_path / "t.json", [host("aten::add", 0, 9), launch(1, 4)])
    done = run(path)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("no device events were recorded")


def test_the_interface_gives_tables() -> None:
    done = hespas.analyze(TRACE)
    assert list(done.to_pandas("breakdown")["step"]) == [-1, 2, 3]
    assert done.to_pandas().equals(done.to_pandas("operations"))
    with pytest.raises(UsageError, match="no table 'nothing'"):
        done.to_pandas("nothing")
    assert done.to_dict()["verdict"] == done.headline()


def test_what_changed_against_another_recording(tmp_path: Path) -> None:
    old = [host("aten::add", 0, 9), launch(1, 4), kernel("k", 20, 5, 4)]
    new = [host("aten::add", 0, 9), launch(1, 4), kernel("k", 20, 8, 4), kernel("more", 30, 2, 9)]
    paths = [write_kineto(tmp_path / name, each) for name, each in (("old.json", old), ("new.json", new))]
    done = run(paths[1], "--baseline", paths[0], "--json", tmp_path / "a.json", "--quiet")
    assert done.exit_code == 0, done.output
    found = document(tmp_path / "a.json")["difference"]
    assert found["against"] == [str(paths[0])]
    assert [(row["name"], row["delta_ns"]) for row in found["by_kernel"]] == [("k", 3000), ("more", 2000)]
    assert "longer than before" in done.stdout.splitlines()[0]
    assert "difference by part of the step" in done.stdout


def test_a_report_does_not_replace_what_is_compared(tmp_path: Path) -> None:
    old = write_kineto(tmp_path / "old.json", [kernel("k", 20, 5, 4)])
    done = run(TRACE, "--baseline", old, "--json", old, "--overwrite")
    assert done.exit_code == 2
    assert "--baseline" in done.stderr


def test_a_table_without_times_is_told(tmp_path: Path) -> None:
    """Durations may be unknown; what has none is left out, with a word."""
    path = tmp_path / "t.csv"
    lines = ("rank,kernel,stream,start_ns,duration_ns", "0,a,1,0,40", "0,b,1,50,", "0,c,1,60,10")
    path.write_text("\n".join(lines) + "\n")
    done = run(path, "--from", "ops-table", "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    found = document(tmp_path / "a.json")
    assert "analysis.no-time" in {each["code"] for each in found["diagnostics"]}
    assert {row["kernel"]: row["total_ns"] for row in found["kernels"]} == {"a": 40, "c": 10}
    assert found["breakdown"][0]["idle_ns"] == 20
