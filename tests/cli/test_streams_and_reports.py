"""Standard streams that are full or closed, and reports that would replace what a command reads or writes."""

from __future__ import annotations

import json
import os
import shutil
import stat
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
@pytest.mark.parametrize("name", ["absent/report.json", "folder"])
def test_a_report_that_cannot_be_written_is_told_before_any_work(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    command, *rest = filled(words, tmp_path)
    (tmp_path / "folder").mkdir()
    done = typed(command, *rest, tmp_path / name)
    assert done.exit_code == 2, done.output
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "job.mlir"]


def test_a_report_is_neither_the_destination_nor_another_report(tmp_path: Path) -> None:
    done = typed("hespas-convert", PROGRAM, tmp_path / "x.json", "--log-json", tmp_path / "x.json")
    assert (done.exit_code, "DST" in done.stderr) == (2, True)
    options = ["--json", str(tmp_path / "x"), "--html", str(tmp_path / "x")]
    done = typed("hespas-validate", "roundtrip", PROGRAM, "--formats", "chakra", *options)
    assert (done.exit_code, "--json" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", REPORTS, ids=" ".join)
def test_a_report_replaces_an_earlier_one_only_when_told(words: tuple[str, ...], tmp_path: Path) -> None:
    command, *rest = filled(words, tmp_path)
    report = tmp_path / "report.out"
    report.write_text("mine")
    done = typed(command, *rest, report)
    assert (done.exit_code, f"{report}: exists already" in done.stderr) == (2, True), done.output
    assert "add --overwrite" in done.stderr
    assert report.read_text() == "mine"
    assert not (tmp_path / "job.et").exists()  # nothing was begun
    done = typed(command, *rest, report, "--overwrite")
    assert done.exit_code == 0, done.output
    assert report.read_text() != "mine"


def test_a_report_never_replaces_a_workload(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path / "other.mlir")
    done = typed("hespas", "view", PROGRAM, "--json", tmp_path / "other.mlir", "--overwrite")
    assert (done.exit_code, "no earlier report" in done.stderr) == (2, True)
    assert (tmp_path / "other.mlir").read_bytes() == PROGRAM.read_bytes()


@pytest.mark.parametrize(
    ("name", "words"),
    [*(("-", words) for words in REPORTS), ("/dev/stdout", REPORTS[1])],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_a_report_goes_to_standard_output_alone(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    if name != "-" and not Path(name).exists():
        pytest.skip("no such device here")
    command, *rest = filled(words, tmp_path)
    done = call(command, *rest, name)
    assert done.returncode == 0, done.stderr
    if words[-1] in {"--json", "--log-json"}:
        assert json.loads(done.stdout)["schema"].startswith("hespas.")
    else:
        assert done.stdout.lower().startswith(("<!doctype html>", "rank_class,node,"))
    assert done.stderr  # what people read stands there
    assert not (ROOT / "-").exists()


@pytest.mark.parametrize("words", [REPORTS[1], REPORTS[3], REPORTS[-1]], ids=" ".join)
def test_a_report_goes_into_a_device_or_a_pipe(words: tuple[str, ...], tmp_path: Path) -> None:
    command, *rest = filled(words, tmp_path)
    done = call(command, *rest, "/dev/null")
    assert done.returncode == 0, done.stderr
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    (tmp_path / "job.et").unlink(missing_ok=True)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    done = call(command, *rest, pipe)
    content, _ = reader.communicate(timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(content) > 100
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@needs_full
def test_a_report_into_a_full_device_is_a_message() -> None:
    done = call("hespas", "view", PROGRAM, "--json", "/dev/full")
    assert (done.returncode, "/dev/full: cannot be written" in done.stderr) == (2, True), done.stderr


def test_two_results_never_share_standard_output() -> None:
    done = typed("hespas-convert", PROGRAM, "-", "--to", "chakra", "--log-json", "-")
    assert (done.exit_code, "both go to standard output" in done.stderr) == (2, True)
    done = typed("hespas-validate", "roundtrip", PROGRAM, "--json", "-", "--html", "-")
    assert (done.exit_code, "both go to standard output" in done.stderr) == (2, True)


LISTS = [("hespas", "hardware", "list"), ("hespas", "estimators"), ("hespas-convert", "--list-formats")]


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_lists_are_json_on_standard_output_or_in_a_file(words: tuple[str, ...], tmp_path: Path) -> None:
    told = [typed(*words, "--json", *where) for where in ((), ("-",), (tmp_path / "list.json",))]
    assert [done.exit_code for done in told] == [0, 0, 0], told[-1].output
    assert json.loads(told[0].stdout)
    assert told[0].stdout == told[1].stdout == (tmp_path / "list.json").read_text()
    assert told[2].stdout == ""
    done = typed(*words, "--json", tmp_path / "list.json")
    assert (done.exit_code, "add --overwrite" in done.stderr) == (2, True)
    assert typed(*words, "--json", tmp_path / "list.json", "--overwrite").exit_code == 0
    assert typed(*words, tmp_path / "list.json").exit_code == 2  # a file of what?


def test_a_log_that_fails_leaves_the_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.et").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hespas.api.documents._write_text", full)
    paths = [tmp_path / "job.et", "--log-json", tmp_path / "log.json"]
    done = typed("hespas-convert", PROGRAM, *paths, "--ranks", "0", "--overwrite")
    assert (done.exit_code, "No space left" in done.stderr) == (2, True), done.output
    assert (tmp_path / "job.et").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.et"]
