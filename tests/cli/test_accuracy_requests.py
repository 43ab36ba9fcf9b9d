"""Requests that ``accuracy``, ``compare``, ``estimate`` and ``simulate`` reject before any work, and files
that reports never replace.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from hespas import api
from hespas.cli import main, validate
from hespas.graph import OpClass, Workload
from hespas.hardware.library import DATA_FOLDER
from tests.validators.accuracy.small_profiles import Program, Recording

PROGRAM = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"
ROW = (
    "hardware,op,op_class,kernel,rank,stream,start_ns,duration_ns,dtype,shapes\n"
    '{},{},contraction,gemm,0,7,0,{},float32,"[[128,64],[64,32]]"\n'
)
REPORTS = ("report.html", "report.json", "report.csv", "report.md")


def run(app: typer.Typer, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def words(done: Result) -> str:
    """Return the printed text without its frame."""
    return re.sub(r"[\s│]+", " ", done.output)


def compared(trace: Path, *more: str | Path, hardware: str | Path = "H100-SXM") -> Result:
    return run(validate.app, "accuracy", "--measured", trace, "--hardware", hardware, *more)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "one.csv"
    path.write_text(ROW.format("H100-SXM", "aten::mm", 5000))
    return path


@pytest.fixture
def device(tmp_path: Path) -> Path:
    return Path(shutil.copy(DATA_FOLDER / "H100-SXM.toml", tmp_path / "mine.toml"))


def refused(done: Result, message: str) -> None:
    assert done.exit_code == 2, done.output
    assert message in words(done)


@pytest.mark.parametrize("name", REPORTS)
def test_no_report_replaces_an_input(name: str, trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    folder.mkdir()
    inside = folder / name
    inside.write_bytes(trace.read_bytes())
    refused(compared(inside, "--report", folder, "--overwrite"), "--report names the same file as an input")
    as_program = compared(trace, "--workload", inside, "--report", folder, "--overwrite")
    refused(as_program, "--report names the same file as an input")
    assert inside.read_bytes() == trace.read_bytes()
    inside.unlink()
    if name == "report.json":
        refused(compared(trace, "--report", folder, "--json", inside), "the same file as --report")
    assert list(folder.iterdir()) == []


def test_no_document_replaces_a_hardware_file(trace: Path, device: Path) -> None:
    before = device.read_bytes()
    message = "names the same file as --hardware"
    refused(compared(trace, "--json", device, hardware=device), f"--json {message}")
    given = (PROGRAM, "--hardware", device)
    refused(run(main.app, "simulate", *given, "--json", device), f"--json {message}")
    refused(run(main.app, "estimate", *given, "--json", device), f"--json {message}")
    refused(run(main.app, "estimate", *given, "--out", device), f"--out {message}")
    assert device.read_bytes() == before
    other = device.rename(device.with_name("mine.json"))
    done = run(main.app, "simulate", PROGRAM, "--hardware", other, "--timeline", other)
    refused(done, f"--timeline {message}")
    assert other.read_bytes() == before


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_a_report_does_not_follow_links_out_of_its_folder(
    overwrite: list[str], trace: Path, tmp_path: Path
) -> None:
    folder, victim = tmp_path / "reports", tmp_path / "victim.txt"
    folder.mkdir()
    victim.write_text("precious")
    (folder / "report.html").symlink_to(victim)
    refused(compared(trace, "--report", folder, *overwrite), "report.html: is a link")
    victim.unlink()
    refused(compared(trace, "--report", folder, *overwrite), "report.html: is a link")
    assert not victim.exists()


def test_a_folder_that_is_a_link_is_followed(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    done = compared(trace, "--report", tmp_path / "link" / "new")
    assert done.exit_code == 0, done.output
    assert sorted(each.name for each in (tmp_path / "real" / "new").iterdir()) == sorted(REPORTS)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("x" * 300, "File name too long"),
        ("dangling/x/y", "a link without a target"),
        ("dangling", "a link without a target"),
        ("circle/x", "Too many levels of symbolic links"),
        ("one.csv/x", "expected a folder"),
        ("taken", "exists and is a directory"),
    ],
)
def test_a_folder_that_cannot_be_is_refused_before_any_work(
    folder: str, message: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "taken" / "report.html").mkdir(parents=True)
    trace.write_text("this is read after the folder was looked at\n")
    done = compared(trace, "--report", folder, "--overwrite")
    refused(done, message)


@pytest.mark.parametrize("folder", ["", "-"])
def test_what_names_no_folder(
    folder: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(compared(trace, "--report", folder), "not a folder")
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.parametrize(
    "limit",
    [
        "--max-mape=nan", "--max-mape=-1", "--max-mape=inf", "--max-e2e=-0.1", "--max-e2e=nan",
        "--min-coverage=5", "--min-coverage=-0.1", "--min-coverage=nan",
    ],
)  # fmt: skip
def test_a_limit_that_makes_no_sense(limit: str, trace: Path) -> None:
    option, value = limit.split("=")
    refused(compared(trace, limit), f"{option} {value} is not a valid limit")


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_regression_that_makes_no_sense(value: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"schema": "hespas.accuracy/1", "summary": [], "end_to_end": []}))
    done = run(validate.app, "compare", path, path, f"--max-regression={value}")
    refused(done, f"--max-regression {value} is not a valid limit")


def test_limits_at_their_ends_are_limits(trace: Path) -> None:
    done = compared(trace, "--min-coverage=1", "--max-mape=0")
    assert done.exit_code == 1
    assert "MAPE of composite" in done.stdout
    assert "covers" not in done.stdout


def test_a_recording_is_given_once(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "link.csv").symlink_to(trace)
    for again in (trace, tmp_path / "x" / ".." / "one.csv", tmp_path / "link.csv"):
        (tmp_path / "x").mkdir(exist_ok=True)
        refused(compared(trace, "--measured", again), "is given twice")
    other = tmp_path / "other.csv"
    other.write_text(ROW.format("H100-SXM", "aten::mm", 5001))
    done = compared(trace, "--measured", other)
    assert done.exit_code == 0, done.output
    assert "noise floor of H100-SXM: 0.0%" in done.stdout


@pytest.mark.parametrize("limit", ["--max-e2e=0.1", "--min-coverage=0.5", "--max-mape=0.1"])
def test_what_is_not_estimated_passes_every_limit(limit: str, trace: Path) -> None:
    trace.write_text(ROW.format("H100-SXM", "unheard::of", 5000))
    done = compared(trace, limit)
    assert done.exit_code == 1, done.output
    assert "threshold exceeded: " in done.stdout


def test_times_that_are_not_there_are_said_to_be_lacking(trace: Path, tmp_path: Path) -> None:
    trace.write_text(ROW.format("H100-SXM", "aten::mm", 0))
    refused(compared(trace), "no operation of the profiles took any time")
    refused(compared(PROGRAM), "a program without measured times")
    made = Program()
    made.add("dot.1", "dot", OpClass.CONTRACTION)
    program = tmp_path / "program.json"
    api.write(Workload.spmd(made.build(), 1), program)
    recording = Recording()
    recording.event("sort")
    other = tmp_path / "other.csv"
    api.write(recording.build(), other)
    refused(compared(other, "--workload", program), "check that it is the program that ran")
