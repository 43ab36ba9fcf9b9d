"""After any fault in writing, the destination is absent, old or complete, and no other files remain."""

from __future__ import annotations

import ctypes
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli.convert import app as convert_app
from hespas.converters import format_for_output, format_names, load_format
from hespas.files.output import place_together, write_atomically
from hespas.files.partial import remove_stale_temporaries, temporary_beside
from hespas.graph.errors import FormatError, OutputError
from tests.faults.kills import kill_writers
from tests.limits import SAFETY_S
from tests.processes import run_command

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "op_graph" / "llama_fsdp_tp_local_N8.json.gz"
COMMAND = (sys.executable, "-c", "from hespas.cli.convert import main; main()")
TARGETS = ("traces", "graph.json", "graph.arrow", "drawing.dot", "drawing.graphml", "one.et")


def convert(*arguments: str, limit_bytes: int = 0) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which may write no file larger than ``limit_bytes``."""
    limits = {resource.RLIMIT_FSIZE: limit_bytes} if limit_bytes else {}
    return run_command("hespas-convert", *arguments, limits=limits)


@pytest.mark.parametrize("target", TARGETS)
def test_a_full_disk_leaves_nothing(target: str, tmp_path: Path) -> None:
    ranks = ["--ranks", "0"] if target == "one.et" else []
    done = convert(str(PROGRAM), str(tmp_path / target), *ranks, limit_bytes=4096)
    assert done.returncode == 2, done.stderr
    assert f"error: {tmp_path / target}: " in done.stderr
    assert "File too large" in done.stderr
    assert ".partial" not in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


EVENTS = """{"schemaVersion":1,"deviceProperties":[{"id":0,"name":"A100"}],"traceEvents":[
 {"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":1.0,"dur":9.0,
  "args":{"External id":1,"Input Dims":[[2,2],[2,2]],"Input type":["float","float"]}}%s]}"""
KERNEL = """,{"ph":"X","cat":"kernel","name":"gemm","pid":0,"tid":7,"ts":4.0,"dur":5.0,
  "args":{"External id":1,"device":0,"stream":7,"correlation":3}}"""
PROFILES = (
    "p.csv",
    "p.csv.gz",
    "p.parquet",
    "p.chrome.json",
    "p.chrome.json.gz",
    "p.pftrace",
    "p.pftrace.gz",
)
WORKLOADS = (
    *("w.json", "w.json.gz", "w.arrow", "w.dot", "w.graphml", "w.et", "w.et.gz", "w.et.json"),
    *("w.mlir", "w.mlir.gz"),
)
NAMED = {"w.et.json": "chakra-json"}


def every_conversion(folder: Path, target: str) -> list[str]:
    """Arguments that write ``target`` over an old file of that name."""
    (folder / target).write_text("old")
    source = folder / "events.json"
    if target in PROFILES:
        source.write_text(EVENTS % KERNEL)
    else:
        source = ROOT / "fixtures" / "op_graph" / "mlp.json"
    one_rank = ["--ranks", "0"] if target.startswith("w.et") else []
    named = ["--to", NAMED[target]] if target in NAMED else []
    return [str(source), str(folder / target), "--overwrite", *one_rank, *named]


def test_every_format_that_is_written_is_tried_here() -> None:
    writable = {name for name in format_names() if load_format(name).write}
    reached = {
        NAMED.get(name) or format_for_output(Path(name), None, profile=False).name for name in WORKLOADS
    }
    reached |= {format_for_output(Path(name), None, profile=True).name for name in PROFILES}
    assert reached == writable


@pytest.mark.parametrize("target", [*PROFILES, *WORKLOADS])
def test_what_fails_behind_a_writer_leaves_the_old_file(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = every_conversion(tmp_path, target)
    before = sorted(entry.name for entry in tmp_path.iterdir())

    def refuse(account: object, written: Path) -> None:
        assert written.stat().st_size > 3  # the writer is done
        raise FormatError("cannot be read again", path=str(written))

    monkeypatch.setattr("hespas.api.conversion_account.AccountedWrite.verify", refuse)
    done = CliRunner().invoke(convert_app, words)
    assert (done.exit_code, "cannot be read again" in done.stderr) == (3, True), done.output
    assert (tmp_path / target).read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    monkeypatch.undo()
    done = CliRunner().invoke(convert_app, words)  # and nothing else was in the way
    assert done.exit_code == 0, done.output
    assert (tmp_path / target).read_bytes() != b"old"


@pytest.mark.parametrize("target", [*PROFILES, *WORKLOADS])
def test_a_full_disk_leaves_the_old_file(target: str, tmp_path: Path) -> None:
    words = every_conversion(tmp_path, target)
    before = sorted(entry.name for entry in tmp_path.iterdir())
    done = convert(*words, limit_bytes=64)
    assert done.returncode == 2, done.stderr
    assert f"error: {tmp_path / target}: " in done.stderr
    assert (tmp_path / target).read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


@pytest.mark.parametrize("target", PROFILES)
def test_a_recording_without_a_device_replaces_nothing(target: str, tmp_path: Path) -> None:
    words = every_conversion(tmp_path, target)
    Path(words[0]).write_text(EVENTS % "")
    done = CliRunner().invoke(convert_app, words)
    assert done.exit_code == 4, done.output
    assert f"error: {words[0]}: the recording has no device events" in done.stderr
    assert (tmp_path / target).read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["events.json", target])


def test_what_cannot_be_read_again_is_told_of_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object, **__: object) -> None:
        raise FormatError("the table has no rows", path="a temporary")

    monkeypatch.setattr("hespas.api.conversion_account.event_account", damaged)
    words = every_conversion(tmp_path, "p.csv")
    done = CliRunner().invoke(convert_app, words)
    assert (done.exit_code, f"error: {words[0]}: " in done.stderr) == (4, True), done.output
    assert "file could not be read again: the table has no rows" in done.stderr
    assert (tmp_path / "p.csv").read_text() == "old"


def test_results_are_placed_together_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def fill(path: Path) -> None:
        path.write_text("new")

    def fail(path: Path) -> None:
        assert (tmp_path / "a").read_text() == "old"
        raise RuntimeError("later")

    def both() -> None:
        with place_together():
            write_atomically(tmp_path / "a", fill, overwrite=True, directory=False)
            write_atomically(tmp_path / "b", fail, overwrite=False, directory=False)

    with pytest.raises(RuntimeError, match="later"):
        both()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"
    with place_together():
        write_atomically(tmp_path / "a", fill, overwrite=True, directory=False)
        with place_together():
            write_atomically(tmp_path / "b", fill, overwrite=False, directory=False)
        assert not (tmp_path / "b").exists()  # a part of the larger whole
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {"a": "new", "b": "new"}


def test_killed_writers_leave_whole_sets_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    outcome = kill_writers(tmp_path, kills=8, num_bytes=2e6)
    assert outcome.broken == []
    assert outcome.absent + outcome.old + outcome.whole == 8


def writer(folder: Path, *more: str, until: str = "*") -> subprocess.Popen[bytes]:
    """A command that writes 1024 files, once something of that name is in the folder or it has ended."""
    source = ROOT / "fixtures" / "binary" / "llama_fsdp_tp_local_N1024.mlirbc"
    # Whoever runs the tests in the background may have made it ignore interrupts.
    heeding = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); s.signal(s.SIGHUP, s.SIG_DFL); "
    start = [sys.executable, "-c", heeding + "from hespas.cli.convert import main; main()"]
    command = [*start, str(source), str(folder / "traces"), "--jobs", "1", *more]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
    for _ in range(int(SAFETY_S / 0.005)):
        if any(folder.glob(until)) or child.poll() is not None:
            return child
        time.sleep(0.005)
    child.kill()
    _, error = child.communicate()
    pytest.fail(f"never reached {until}: {error.decode()}")


_AGAIN_S = 5.0


def interrupted(child: subprocess.Popen[bytes], folder: Path, number: signal.Signals) -> tuple[int, bytes]:
    """Exit code and messages of a writer that gets a signal."""
    child.send_signal(number)
    waited_s = 0.0
    try:
        while waited_s < SAFETY_S:
            before = number_of_files(folder)
            try:
                _, error = child.communicate(timeout=_AGAIN_S)
            except subprocess.TimeoutExpired:
                # A signal that arrives between Python's last look for one and a system call that waits is
                # seen only behind that call: a user would send another. Who is cleaning up is left alone.
                waited_s += _AGAIN_S
                if 0 < before <= number_of_files(folder):
                    child.send_signal(number)
            else:
                return child.returncode, error
    finally:
        child.kill()
    pytest.fail("never ended")


def number_of_files(folder: Path) -> int:
    return sum(len(files) for *_, files in os.walk(folder))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """In the midst of writing. A busy machine may look only when the writer is done: then the whole set is
    there, and another is tried.
    """
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        code, error = interrupted(writer(folder), folder, number)
        assert b"Traceback" not in error
        if code != 0:
            assert code in {130, -number}, error
            assert list(folder.iterdir()) == []
            return
        assert list(folder.iterdir()) == [folder / "traces"]
        assert number_of_files(folder) == 1024 + 1  # with the list of groups
        shutil.rmtree(folder)
    pytest.fail("no writer has heeded the signal")


@pytest.mark.parametrize("makes_of_it", ["return done", "raise TypeError('of a library')"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_that_a_library_drops_is_heard_all_the_same(
    number: signal.Signals, makes_of_it: str, tmp_path: Path
) -> None:
    dropping = (
        "import functools, os, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from hespas import api\n"
        "from hespas.cli.convert import main\n"
        "convert = api.convert\n"
        "@functools.wraps(convert)\n"
        "def dropped(*given, **named):\n"
        "    done = convert(*given, **named)\n"
        "    try:\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "        while True: pass\n"
        "    except KeyboardInterrupt:\n"
        f"        {makes_of_it}\n"
        "api.convert = dropped\n"
        "main()\n"
    )
    command = [sys.executable, "-c", dropping, str(PROGRAM), str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=SAFETY_S)
    assert (done.returncode, "interrupted" in done.stderr) == (130, True), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_before_results_are_placed_leaves_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The writer waits for a reader of its log, its results written and not yet in place."""
    folder = tmp_path / "results"
    folder.mkdir()
    log = tmp_path / "log"
    os.mkfifo(log)
    child = writer(folder, "--log-json", str(log), until="*/*.1023.et")
    code, error = interrupted(child, folder, number)
    assert code in {130, -number}
    assert b"Traceback" not in error
    assert list(folder.iterdir()) == []


@pytest.fixture
def closed_folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o500)
    yield folder
    folder.chmod(0o700)


_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1


def obey_permissions() -> None:
    """Before a command starts: give up the superuser's right to write everywhere (Linux)."""
    if os.geteuid() == 0:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)


def obeying(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=obey_permissions, cwd=ROOT
    )


def test_a_folder_that_may_not_be_written(closed_folder: Path) -> None:
    if obeying("touch", str(closed_folder / "file")).returncode == 0:
        pytest.skip("the superuser may write everywhere, and cannot give that up here")
    done = obeying(*COMMAND, str(PROGRAM), str(closed_folder / "x.json"))
    assert done.returncode == 2
    assert "not writable" in done.stderr
    done = obeying(*COMMAND, str(PROGRAM), str(closed_folder))
    assert done.returncode == 2
    assert "not writable" in done.stderr
    assert list(closed_folder.iterdir()) == []


@pytest.mark.parametrize("name", ["two words", "наборы 痕跡", "new\nline", "-dash", "a'b\"c", "x" * 200])
def test_any_file_name_will_do(name: str, tmp_path: Path) -> None:
    done = convert(str(PROGRAM), str(tmp_path / f"{name}.json"))
    assert done.returncode == 0, done.stderr
    again = convert(str(tmp_path / f"{name}.json"), str(tmp_path / name), "--to", "chakra")
    assert again.returncode == 0, again.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([f"{name}.json", name])


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert convert(str(PROGRAM), str(tmp_path / "link.json")).returncode == 2
    assert (tmp_path / "real.json").read_text() == "old"
    assert convert(str(PROGRAM), str(tmp_path / "link.json"), "--overwrite").returncode == 0
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").stat().st_size > 1000
    assert convert(str(PROGRAM), str(tmp_path / "link")).returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert len(list((tmp_path / "folder").glob("*.et"))) == 8


def test_an_input_may_be_its_own_output_only_when_told(tmp_path: Path) -> None:
    first = tmp_path / "g.json"
    assert convert(str(PROGRAM), str(first)).returncode == 0
    before = first.read_bytes()
    assert convert(str(first), str(first)).returncode == 2
    assert convert(str(first), str(first), "--overwrite").returncode == 0
    assert first.read_bytes() == before


def test_a_reader_that_goes_away_is_no_bug() -> None:
    command = f"{shlex.join(COMMAND)} {PROGRAM} - --to op-graph | head -c 10"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, check=False, cwd=ROOT
    )
    assert b"Traceback" not in done.stderr
    assert b"our bug" not in done.stderr


def test_other_files_of_a_folder_stay_where_a_set_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    assert convert(str(PROGRAM), str(folder)).returncode == 0
    (folder / "notes.txt").write_text("mine")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert convert(str(PROGRAM), str(folder), "--overwrite", "--hardware", "H100-SXM").returncode == 0
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert after.keys() == before.keys()
    assert after["notes.txt"] == b"mine"
    assert after["traces.0.et"] != before["traces.0.et"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["traces"]


def race(target: Path, contents: list[bytes], *, overwrite: bool, directory: bool) -> list[str]:
    """Write all contents at once; the messages of those who lost."""
    barrier, lost = threading.Barrier(len(contents)), list[str]()

    def fill(path: Path, content: bytes) -> None:
        if not directory:
            path.write_bytes(content)
        else:
            path.mkdir()
            for number in range(20):
                (path / f"t.{number}.et").write_bytes(content)
        barrier.wait(timeout=SAFETY_S)

    def run(content: bytes) -> None:
        try:
            write_atomically(
                target, lambda path: fill(path, content), overwrite=overwrite, directory=directory
            )
        except OutputError as error:
            lost.append(error.message)

    threads = [threading.Thread(target=run, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return lost


@pytest.mark.parametrize("directory", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_writers_to_one_path_one_wins_whole(directory: bool, overwrite: bool, tmp_path: Path) -> None:
    for attempt in range(10):
        target = tmp_path / f"{attempt}"
        lost = race(target, [b"a" * 999, b"b" * 999], overwrite=overwrite, directory=directory)
        files = sorted(target.iterdir()) if directory else [target]
        assert {file.read_bytes() for file in files} in ({b"a" * 999}, {b"b" * 999})
        assert len(files) == (20 if directory else 1)
        assert len(lost) == (0 if overwrite else 1)
        target_and_nothing_else = [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]
        assert target_and_nothing_else == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_appears_at_the_last_moment_is_met_like_any_other(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "set", Path.rename

    def late(self: Path, to: Path) -> Path:
        target.mkdir()
        (target / "x.0.et").write_bytes(b"theirs")
        monkeypatch.setattr(Path, "rename", rename)
        return rename(self, to)

    def write(path: Path) -> None:
        path.mkdir()
        (path / "x.0.et").write_bytes(b"mine")

    monkeypatch.setattr(Path, "rename", late)
    if overwrite:
        write_atomically(target, write, overwrite=True, directory=True)
    else:
        with pytest.raises(OutputError, match="another program has just written it"):
            write_atomically(target, write, overwrite=False, directory=True)
    assert (target / "x.0.et").read_bytes() == (b"mine" if overwrite else b"theirs")
    assert [entry.name for entry in tmp_path.iterdir()] == ["set"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    mine = temporary_beside(target)
    mine.write_text("in use")
    script = """
import sys
from pathlib import Path
from hespas.files.partial import temporary_beside
path = temporary_beside(Path(sys.argv[1]))
path.mkdir()
(path / "f").write_text("half")
"""
    child = subprocess.run([sys.executable, "-c", script, str(target)], check=True, cwd=ROOT)
    assert child.returncode == 0
    (tmp_path / ".other.json.partial").write_text("somebody else's")
    assert len(list(tmp_path.iterdir())) == 3
    remove_stale_temporaries(target)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([mine.name, ".other.json.partial"])
