"""Standard streams that are full or closed, and reports that would replace what a command reads or writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hespas.cli import convert, main, validate

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"
FULL = Path("/dev/full")
APPS = {"hespas-convert": convert.app, "hespas-validate": validate.app, "hespas": main.app}
MODULES = {"hespas-convert": "convert", "hespas-validate": "validate", "hespas": "main"}

needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


def call(command: str, *arguments: str | Path, redirected: str = "") -> subprocess.CompletedProcess[str]:
    """A command as a shell runs it, with its streams redirected."""
    code = f"from hespas.cli.{MODULES[command]} import main; main()"
    script = f'exec "$0" -c "$1" "${{@:2}}" {redirected}'
    words = ["bash", "-c", script, sys.executable, code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)


def typed(command: str, *arguments: str | Path) -> Result:
    return CliRunner().invoke(APPS[command], [str(each) for each in arguments])


COMMANDS = [
    ("hespas-convert", str(PROGRAM), "-", "--to", "chakra"),
    ("hespas-convert", "--list-formats"),
    ("hespas-convert", "--version"),
    ("hespas", "view", str(PROGRAM)),
    ("hespas-validate", "check", str(PROGRAM)),
]


@needs_full
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_standard_output_is_a_message(words: tuple[str, ...]) -> None:
    done = call(*words, redirected="> /dev/full")
    assert (done.returncode, "No space left" in done.stderr) == (2, True), done.stderr
    assert "internal error" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", [COMMANDS[0], COMMANDS[3]], ids=" ".join)
def test_a_closed_standard_output_is_a_message(words: tuple[str, ...]) -> None:
    done = call(*words, redirected=">&-")
    assert (done.returncode, "standard output is closed" in done.stderr) == (2, True), done.stderr


def test_a_closed_standard_input_is_a_message(tmp_path: Path) -> None:
    done = call("hespas-convert", "-", tmp_path / "x.et", redirected="<&-")
    assert (done.returncode, "standard input is closed" in done.stderr) == (2, True), done.stderr


@needs_full
@pytest.mark.parametrize("redirected", ["2>&-", "2> /dev/full"])
def test_nobody_has_to_listen_to_the_account(redirected: str, tmp_path: Path) -> None:
    done = call("hespas-convert", PROGRAM, tmp_path / "x.et", redirected=redirected)
    assert done.returncode == 0
    assert call("hespas-validate", "check", tmp_path / "x.et").returncode == 0


REPORTS = [
    ("hespas-convert", "{src}", "{dst}", "--log-json"),
    ("hespas", "view", "{src}", "--json"),
    ("hespas", "estimate", "{src}", "--hardware", "H100-SXM", "--json"),
    ("hespas", "estimate", "{src}", "--hardware", "H100-SXM", "--out"),
    ("hespas", "simulate", "{src}", "--hardware", "H100-SXM", "--json"),
    ("hespas-validate", "check", "{src}", "--json"),
    ("hespas-validate", "roundtrip", "{src}", "--formats", "chakra", "--json"),
    ("hespas-validate", "roundtrip", "{src}", "--formats", "chakra", "--html"),
]


def filled(words: tuple[str, ...], folder: Path) -> list[str]:
    shutil.copy(PROGRAM, folder / "job.mlir")
    return [word.format(src=folder / "job.mlir", dst=folder / "job.et") for word in words]


@pytest.mark.parametrize("words", REPORTS, ids=" ".join)
def test_a_report_never_replaces_the_source(words: tuple[str, ...], tmp_path: Path) -> None:
    command, *rest = filled(words, tmp_path)
    (tmp_path / "link").symlink_to("job.mlir")
    os.link(tmp_path / "job.mlir", tmp_path / "name")
    for name in ("job.mlir", "link", "name"):
        done = typed(command, *rest, tmp_path / name)
        assert done.exit_code == 2, done.output
        assert "names the same file as" in done.stderr
    assert (tmp_path / "job.mlir").read_bytes() == PROGRAM.read_bytes()
    assert not (tmp_path / "job.et").exists()


@pytest.mark.parametrize("words", REPORTS, ids=" ".join)
@pytest.mark.parametrize("name", ["absent/report.json", "folder", "-"])
def test_a_report_that_cannot_be_written_is_told_before_any_work(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    command, *rest = filled(words, tmp_path)
    (tmp_path / "folder").mkdir()
    done = typed(command, *rest, name if name == "-" else tmp_path / name)
    assert done.exit_code == 2, done.output
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "job.mlir"]


def test_a_report_is_neither_the_destination_nor_another_report(tmp_path: Path) -> None:
    done = typed("hespas-convert", PROGRAM, tmp_path / "x.json", "--log-json", tmp_path / "x.json")
    assert (done.exit_code, "DST" in done.stderr) == (2, True)
    options = ["--json", str(tmp_path / "x"), "--html", str(tmp_path / "x")]
    done = typed("hespas-validate", "roundtrip", PROGRAM, "--formats", "chakra", *options)
    assert (done.exit_code, "--json" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_report_replaces_earlier_reports_and_no_workload(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path / "other.mlir")
    done = typed("hespas", "view", PROGRAM, "--json", tmp_path / "other.mlir")
    assert (done.exit_code, "no earlier report" in done.stderr) == (2, True)
    assert (tmp_path / "other.mlir").read_bytes() == PROGRAM.read_bytes()
    for words in REPORTS[1:]:
        command, *rest = filled(words, tmp_path)
        for _ in range(2):
            done = typed(command, *rest, tmp_path / f"report{len(rest)}.{words[-1].strip('-')}")
            assert done.exit_code == 0, done.output
    log = tmp_path / "log.json"
    for name in ("a.et", "b.et"):
        assert typed("hespas-convert", PROGRAM, tmp_path / name, "--log-json", log).exit_code == 0
    assert json.loads(log.read_text())["output"].endswith("b.et")
