"""Standard streams that are full or closed, and reports that would replace what a command reads or writes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import ExitStack
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hespas.api.documents import put
from hespas.cli import convert, main, validate
from hespas.files.limits import Limits
from hespas.graph.errors import FormatError
from tests.limits import SAFETY_S
from tests.processes import run_command
from tests.validators.small_tables import vectors, write_table

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "op_graph" / "mlp.json"
FULL = Path("/dev/full")
APPS = {"hespas-convert": convert.app, "hespas-validate": validate.app, "hespas": main.app}
MODULES = {"hespas-convert": "convert", "hespas-validate": "validate", "hespas": "main"}

needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


def call(command: str, *arguments: str | Path, redirected: str = "") -> subprocess.CompletedProcess[str]:
    """A command; as a shell starts it where its streams are redirected."""
    if not redirected:
        return run_command(command, *arguments)
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
    ("hespas-convert", "--help"),
    ("hespas", "hardware", "list", "--help"),
    ("hespas", "view", str(PROGRAM)),
    ("hespas-validate", "check", str(PROGRAM)),
]


@needs_full
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_standard_output_is_a_message(words: tuple[str, ...]) -> None:
    done = run_command(*words, stdout="/dev/full")
    assert (done.returncode, "No space left" in done.stderr) == (2, True), done.stderr
    assert "internal error" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr


ON_H100 = ("--hardware", "H100-SXM")
TABLE = ("--table", "{table}", *ON_H100)
RESULTS = [
    ("hespas", "view", "{src}", "--json"),
    ("hespas", "estimate", "{src}", *ON_H100, "--json", "{other}", "--out"),
    ("hespas", "estimate", *TABLE, "--json", "{other}", "--out"),
    ("hespas", "simulate", "{src}", *ON_H100, "--timeline", "{other}", "--json"),
    ("hespas-validate", "check", "{src}", "--json"),
    ("hespas-validate", "roundtrip", "{src}", "--formats", "chakra", "--html", "{other}", "--json"),
    ("hespas-validate", "accuracy", *TABLE, "--report", "{report}", "--json"),
    ("hespas-validate", "calibrate", *TABLE, "--json", "{other}", "--out"),
    ("hespas-validate", "compare", "{base}", "{base}", "--json"),
]
"""Every command that prints and writes files; the last option names a document."""


def _tabled(folder: Path) -> Path:
    rows = vectors("H100-SXM", ("add",), lambda _, moved: 4 + moved / 2.01e6, split="calib")
    return write_table(folder / "table.csv", rows)


@needs_full
@pytest.mark.parametrize("words", RESULTS, ids=" ".join)
def test_nothing_is_replaced_where_standard_output_is_full(words: tuple[str, ...], tmp_path: Path) -> None:
    result, other, report = tmp_path / "result.json", tmp_path / "other.json", tmp_path / "report"
    report.mkdir()
    written = [result, other, report / "report.csv"]
    if words[-1] == "--out" and "calibrate" in words:
        result = tmp_path / "result.toml"
        written[0] = result
    table, base = _tabled(tmp_path), tmp_path / "base.json"
    if "compare" in words:
        made = typed("hespas-validate", "accuracy", "--table", table, *ON_H100, "--json", base)
        assert made.exit_code == 0, made.output
    for path in written:
        path.write_text("old")
    names = {"src": PROGRAM, "table": table, "base": base, "other": other, "report": report}
    command, *rest = [word.format(**names) for word in words]
    done = run_command(command, *rest, result, "--overwrite", stdout="/dev/full")
    assert (done.returncode, "No space left" in done.stderr) == (2, True), done.stderr
    assert [path.read_text() for path in written] == ["old"] * 3
    assert not list(tmp_path.rglob("*.partial"))
    done = call(command, *rest, result, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert result.read_text() != "old"
    assert not list(tmp_path.rglob("*.partial"))


def test_results_are_written_where_the_reader_of_the_text_has_gone(tmp_path: Path) -> None:
    done = call("hespas", "view", PROGRAM, "--json", tmp_path / "j.json", redirected="> >(true)")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "j.json").read_text())


@pytest.mark.parametrize(
    "words",
    [
        COMMANDS[0],
        ("hespas", "view", str(PROGRAM)),
        ("hespas", "--help"),
        ("hespas", "hardware", "list", "--help"),
        ("hespas-convert", "--help"),
        ("hespas-validate", "--version"),
    ],
    ids=" ".join,
)
def test_a_closed_standard_output_is_a_message(words: tuple[str, ...]) -> None:
    done = call(*words, redirected=">&-")
    assert (done.returncode, "standard output" in done.stderr, "closed" in done.stderr) == (2, True, True)
    assert len(done.stderr.splitlines()) <= 2, done.stderr


def test_what_prints_nothing_needs_no_standard_output(tmp_path: Path) -> None:
    done = call("hespas-convert", PROGRAM, tmp_path / "x.et", redirected=">&-")
    assert done.returncode == 0, done.stderr


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
    assert (done.exit_code, "not an earlier report" in done.stderr) == (2, True)
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
    content, _ = reader.communicate(timeout=SAFETY_S)
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
    file = str(tmp_path / "list.json")
    told = [typed(*words, "--json", *where) for where in (list[str](), ["-"], [file])]
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

    def put_on_full_disk(path: Path, _: object, *, overwrite: bool) -> None:
        put(path, full, overwrite=overwrite)

    monkeypatch.setattr("hespas.api.documents.put", put_on_full_disk)
    paths = [str(tmp_path / "job.et"), "--log-json", str(tmp_path / "log.json")]
    done = typed("hespas-convert", PROGRAM, *paths, "--ranks", "0", "--overwrite")
    assert (done.exit_code, "No space left" in done.stderr) == (2, True), done.output
    assert (tmp_path / "job.et").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.et"]


def test_a_usage_error_that_nobody_hears_is_still_one() -> None:
    for redirected in ("2>&-", "2> /dev/full"):
        assert call("hespas-convert", "--bogus", redirected=redirected).returncode == 2


ODD = os.fsdecode(b"na\xffme")
"""A file name that is no UTF-8."""


@pytest.mark.parametrize("suffix", [".et", ".json", ".arrow", ".mlir", ".dot", ".graphml"])
def test_a_name_that_is_no_text_is_a_name(suffix: str, tmp_path: Path) -> None:
    source = tmp_path / f"{ODD}.mlir"
    shutil.copy(PROGRAM, source)
    target = tmp_path / f"{ODD} out{suffix}"
    log = tmp_path / f"{ODD}.log"
    done = typed("hespas-convert", source, target, "--ranks", "0", "--log-json", log)
    assert done.exit_code == 0, done.output
    assert target.stat().st_size > 100
    written: str = json.loads(log.read_bytes().decode("utf-8"))["output"]
    assert written == str(target).encode("utf-8", "backslashreplace").decode("utf-8")
    if suffix not in {".dot", ".graphml"}:
        done = typed("hespas-validate", "check", target, "--json", tmp_path / f"{ODD}.check")
        assert done.exit_code == 0, done.output


def test_reports_of_names_that_are_no_text(tmp_path: Path) -> None:
    profile = tmp_path / f"{ODD}.xplane.pb"
    shutil.copy(ROOT / "fixtures" / "profiles" / "tpu_v4_megacore.xplane.pb", profile)
    documents = [tmp_path / f"{ODD}.{number}" for number in range(2)]
    words = ["hespas-validate", "accuracy", "--measured", profile, "--hardware", "TPU-v4"]
    done = typed(*map(str, words), "--json", documents[0], "--report", tmp_path / f"{ODD}.report")
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / f"{ODD}.report").iterdir())) == 4
    done = typed("hespas-validate", "compare", documents[0], documents[0], "--json", documents[1])
    assert done.exit_code == 0, done.output
    assert json.loads(documents[1].read_text())["inputs"]


@pytest.mark.parametrize(
    "words",
    [
        ("hespas-convert", str(PROGRAM), "x.et", "--ranks", "0"),
        ("hespas", "view", str(PROGRAM), "--json", "x.json"),
        ("hespas", "simulate", str(PROGRAM), "--hardware", "L4", "--timeline", "x.csv"),
        ("hespas-validate", "calibrate", "--hardware", "L4", "--table", "x.csv", "--out", "x.toml"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_working_folder_that_is_gone_is_a_message(words: tuple[str, ...], tmp_path: Path) -> None:
    done = _in_a_folder_that_is_gone(words, tmp_path)
    assert done.returncode == 2, done.stderr
    assert ": the working folder does not exist" in done.stderr


def _in_a_folder_that_is_gone(words: tuple[str, ...], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"from hespas.cli.{MODULES[words[0]]} import main; main()"
    script = 'cd "$2" && rmdir "$2" && exec "$0" -P -c "$1" "${@:3}"'
    command = ["bash", "-c", script, sys.executable, code, str(gone), *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ("hespas-validate", "roundtrip", "{}", "--formats", "op-graph", "--jobs", "2"),
            0,
            "2 files: all losses are reported",
        ),
        (
            ("hespas", "estimate", "{}/a.hlo", "--hardware", "L4", "--estimator", "scalesim:command=bin/no"),
            2,
            "change to an existing folder",
        ),
    ],
)
def test_what_starts_processes_works_or_says_why_in_a_folder_that_is_gone(
    words: tuple[str, ...], code: int, said: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a.hlo", "b.hlo"):
        shutil.copy(ROOT / "fixtures" / "hlo" / "mlp.hlo.txt", source / name)
    words = tuple(word.replace("{}", str(source)) for word in words)
    done = _in_a_folder_that_is_gone(words, tmp_path)
    assert done.returncode == code, done.stderr
    assert said in (done.stderr if code else done.stdout)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no endless device")
def test_standard_input_without_end_is_refused_for_its_beginning(tmp_path: Path) -> None:
    run = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({64 << 20}, {64 << 20}))\n"
        "from hespas.cli.convert import main\nmain()"
    )
    with Path("/dev/zero").open("rb") as endless:
        command = [sys.executable, "-c", run, "-", str(tmp_path / "o.json")]
        done = subprocess.run(command, stdin=endless, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 3, done.stderr
    assert "error: -: no known format fits this input" in done.stderr


def test_standard_input_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from hespas.api import documents

    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"x" * 5000)))
    monkeypatch.setattr(documents, "limits", lambda: Limits(input_bytes=4000))
    with ExitStack() as stack, pytest.raises(FormatError, match="is longer than 4,000 bytes"):
        documents.spooled_input(stack, lambda _: None)


INPUTS = [
    ("hespas", "view", "{}"),
    ("hespas-convert", "{}", "o.et"),
    ("hespas-validate", "check", "{}"),
    ("hespas", "view", str(PROGRAM), "--comm-groups", "{}"),
    ("hespas-validate", "roundtrip", "{}"),
    ("hespas-validate", "compare", "{}", "{}"),
    ("hespas", "estimate", "--table", "{}", "--hardware", "L4"),
    ("hespas", "estimate", str(PROGRAM), "--hardware", "{}.toml"),
    ("hespas-validate", "check", str(PROGRAM), "--profile", "astra-sim", "--system-config", "{}"),
    ("hespas-validate", "accuracy", "--table", "{}", "--hardware", "L4"),
    ("hespas-validate", "accuracy", "--measured", "{}", "--hardware", "L4"),
    ("hespas-validate", "accuracy", "--measured", str(PROGRAM), "--workload", "{}", "--hardware", "L4"),
    ("hespas-validate", "calibrate", "--table", "{}", "--hardware", "L4", "--out", "o.toml"),
    ("hespas", "simulate", str(PROGRAM), "--hardware", "L4", "--overlay", "{}", "--timeline", "t.json"),
]


@pytest.mark.parametrize("words", INPUTS, ids=" ".join)
def test_an_input_that_cannot_be_read_is_exit_3(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("dangling.toml").symlink_to("nowhere")
    Path("loop.toml").symlink_to("loop.toml")
    before = sorted(entry.name for entry in tmp_path.iterdir())
    for name in ("./absent", "./dangling", "./loop", "./" + "n" * 300):
        done = typed(*(word.replace("{}", name) for word in words))
        assert done.exit_code == 3, f"{name[:20]}: {done.output}"
        assert name.removeprefix("./")[:20] in done.output
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", INPUTS, ids=" ".join)
def test_an_input_that_may_not_be_read_is_exit_3(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("closed", "closed.toml"):
        Path(name).write_text("{}")
        Path(name).chmod(0)
    if os.access("closed", os.R_OK):
        pytest.skip("the superuser may read everything")
    done = typed(*(word.replace("{}", "./closed") for word in words))
    assert (done.exit_code, "Permission denied" in done.output) == (3, True), done.output


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("job.mlir", 3),
        ("traces/job.0.et", 3),
        ("report.json", 2),
        ("own.toml", 70),
        ("job.mlir.d/x", 70),
    ],
)
def test_what_the_system_refuses_of_the_users_files_is_no_bug_of_ours(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / name))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    shutil.copy(PROGRAM, tmp_path / "job.mlir")
    monkeypatch.setattr("hespas.api.summary.summarise", refuse)
    monkeypatch.setattr("hespas.api.io.find_format", refuse)
    source = "traces" if name.startswith("traces") else "job.mlir"
    monkeypatch.setattr("hespas.api.summary.find_format", refuse)
    done = typed("hespas", "view", source, "--json", "report.json")
    assert done.exit_code == code, done.output
    assert (f"error: {tmp_path / name}: Permission denied\n  try: " in done.stderr) == (code != 70)
    assert ("internal error: PermissionError" in done.stderr) == (code == 70)
    assert (f" ({__file__}, line " in done.stderr) == (code == 70)  # the line that raised it


def test_a_file_that_an_option_names_in_its_parts_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "times.csv"))

    monkeypatch.setattr("hespas.api.estimate", refuse)
    spelled = f"database:table={tmp_path / 'times.csv'},interpolate=no"
    done = typed("hespas", "estimate", PROGRAM, "--hardware", "H100-SXM", "--estimator", spelled)
    assert done.exit_code == 3, done.output
