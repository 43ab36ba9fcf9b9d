"""Child process for native parsers: it survives their crashes, hangs and memory use, runs no foreign code,
and ends with its parent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

import pytest

from hespas.files import processes, sandbox
from hespas.files.sandbox import Allowance, ParserFailedError, run_sandboxed
from hespas.graph.errors import InvariantError, UnsupportedError
from tests.limits import SAFETY_S

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how much address space there is")
TASK = """import os, sys, time
def task(data, parser_bytes):
    from hespas.files.sandbox import parser_memory, parser_time
"""


@pytest.fixture(autouse=True)
def own_child(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Each test starts the child anew, with limits of its own."""
    _allow(monkeypatch, Allowance(50 << 20, 200 << 20, cpu_s=2, wall_s=60.0, parser_cpu_s=1.5))
    sandbox.end_child()
    yield
    sandbox.end_child()


def _allow(monkeypatch: pytest.MonkeyPatch, limits: Allowance) -> None:
    def allowance(size: int) -> Allowance:
        return limits

    monkeypatch.setattr(sandbox, "allowance", allowance)


def _task(folder: Path, monkeypatch: pytest.MonkeyPatch, *bodies: str) -> list[str]:
    """Names of tasks, in modules that the parent can import."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    for number, body in enumerate(bodies):
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (folder / f"parser_of_tests_{number}.py").write_text(TASK + lines)
    return [f"parser_of_tests_{number}:task" for number in range(len(bodies))]


@pytest.mark.parametrize(
    ("body", "fate"),
    [
        ("os.kill(os.getpid(), 11)", "makes X end with SIGSEGV"),
        ("os._exit(7)", "makes X end its process with status 7"),
        ("while True: pass", "keeps X and its reader busy for more than 2 s"),
        ("with parser_time(3):\n while True: pass", "keeps X busy for more than 1.5 s"),
        (
            "with parser_memory(parser_bytes): bytearray(1 << 30)",
            "makes X ask for more than 52,428,800 bytes",
        ),
        ("bytearray(1 << 30)", "makes its reader ask for more than 209,715,200 bytes of memory"),
    ],
)
@linux
def test_how_a_child_ends_is_a_message_and_the_next_input_has_another(
    body: str, fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = _task(tmp_path, monkeypatch, body, "return data[::-1]")
    with pytest.raises(ParserFailedError, match=fate):
        run_sandboxed(bad, b"abc", "X")
    assert run_sandboxed(good, b"abc", "X") == b"cba"


def test_a_child_that_sleeps_for_ever_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bad,) = _task(tmp_path, monkeypatch, "time.sleep(600)")
    _allow(monkeypatch, Allowance(1 << 30, 1 << 30, cpu_s=2, wall_s=1.0, parser_cpu_s=1.5))
    with pytest.raises(ParserFailedError, match="keeps X busy without end"):
        run_sandboxed(bad, b"", "X")


def test_one_child_does_many_jobs_and_what_it_prints_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud, number = _task(
        tmp_path,
        monkeypatch,
        "print(data)\nos.system('echo x')\nreturn data * 3",
        "return str(os.getpid()).encode()",
    )
    first = run_sandboxed(number, b"", "X")
    assert run_sandboxed(loud, b"\n\0" * 100_000, "X") == b"\n\0" * 300_000
    assert run_sandboxed(number, b"", "X") == first


def test_a_child_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setattr(processes, "_START", "raise ImportError('no module named numpy')")
    with pytest.raises(UnsupportedError, match=r"does not start: .*no module named numpy"):
        run_sandboxed("any:task", b"", "X")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(UnsupportedError, match=r"does not start: .*No such file"):
        run_sandboxed("any:task", b"", "X")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(UnsupportedError, match="cannot start a child process"):
        run_sandboxed("any:task", b"", "X")


def test_a_bug_of_ours_is_no_fault_of_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, good = _task(tmp_path, monkeypatch, "return {}['absent']", "return data")
    with pytest.raises(InvariantError, match=r"KeyError: 'absent' \(parser_of_tests_0.py:\d+\)"):
        run_sandboxed(wrong, b"", "X")
    assert run_sandboxed(good, b"1", "X") == b"1"


def test_a_child_imports_what_its_parent_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two installations, not that of the Python itself."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "colorsys.py").write_text("NAME = 'ours'")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), *sys.path])
    (task,) = _task(tmp_path, monkeypatch, "import colorsys\nreturn colorsys.NAME.encode()")
    assert run_sandboxed(task, b"", "X") == b"ours"


def test_a_child_outlives_the_thread_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (good,) = _task(tmp_path, monkeypatch, "return data")
    answers: list[bytes] = []
    thread = Thread(target=lambda: answers.append(run_sandboxed(good, b"1", "X")))
    thread.start()
    thread.join()
    answers.append(run_sandboxed(good, b"2", "X"))
    assert answers == [b"1", b"2"]


def test_a_process_that_forks_has_a_child_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (number,) = _task(tmp_path, monkeypatch, "return str(os.getppid()).encode()")
    assert int(run_sandboxed(number, b"", "X")) == os.getpid()
    reader, writer = os.pipe()
    forked = os.fork()
    if forked == 0:
        os.write(writer, run_sandboxed(number, b"", "X"))
        sandbox.end_child()
        os._exit(0)
    os.waitpid(forked, 0)
    assert int(os.read(reader, 100)) == forked
    os.close(reader)
    os.close(writer)
    assert int(run_sandboxed(number, b"", "X")) == os.getpid()


def test_a_trusted_input_gets_what_one_of_its_size_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    few, many = sandbox.allowance(100), sandbox.allowance(10**9)
    assert few == (157_292_800, 1_000_002_000, 7, 260.0, 1.5005)
    monkeypatch.setenv("HESPAS_MAX_INPUT_BYTES", str(10**9))
    assert sandbox.allowance(100)[:3] == (10**9 + 64 * 10**9, 10**9 + 64 * 10**9, many.cpu_s)
    monkeypatch.setenv("HESPAS_MAX_INPUT_BYTES", str(10**18 - 1))
    assert sandbox.allowance(100).parser_bytes == 1 << 62


_PARENT = """
import sys
sys.path.append(sys.argv[1])
from hespas.files.sandbox import run_sandboxed
run_sandboxed("parser_of_tests_0:task", b"", "X")
"""


@linux
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    _task(tmp_path, monkeypatch, f"open({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path)])
    end_s = monotonic() + SAFETY_S
    while not (note.exists() and note.read_text()) and monotonic() < end_s:
        sleep(0.05)
    child = int(note.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while _is_alive(child) and monotonic() < end_s:
        sleep(0.05)
    assert not _is_alive(child)


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_other_programs_end_with_their_parent_too() -> None:
    command = processes.tied_to_parent([sys.executable, "-c", "import sys; print(sys.argv[1])", "said"])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "said\n"


def test_other_programs_have_a_memory_limit_and_a_status_if_they_do_not_start(tmp_path: Path) -> None:
    allocate = [sys.executable, "-c", "bytearray(1 << 30)"]
    for memory_bytes, status in ((0, 0), (1 << 29, 1)):
        done = subprocess.run(
            processes.tied_to_parent(allocate, memory_bytes), capture_output=True, text=True, check=False
        )
        assert done.returncode == status
        assert ("MemoryError" in done.stderr) == bool(status)
    command = processes.tied_to_parent([str(tmp_path / "missing")])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert done.stderr.endswith("missing does not start: No such file or directory\n")


_IMPORTS = "from hespas.files import processes; print(*processes._import_path(), sep=chr(10))"


@pytest.mark.parametrize(
    ("spelled", "is_trusted"),
    [("{here}", True), ("{link}", True), (".", False), ("", False), ("sub/..", False)],
    ids=["absolute", "a link", "a dot", "empty", "relative"],
)
def test_the_current_folder_is_imported_from_where_it_is_spelled_out(
    spelled: str, is_trusted: bool, tmp_path: Path
) -> None:
    here, link = tmp_path / "here", tmp_path / "link"
    here.mkdir()
    (here / "sub").mkdir()
    link.symlink_to("here")
    stated = os.pathsep.join([str(ROOT), spelled.format(here=here, link=link)])
    environment = {**os.environ, "PYTHONPATH": stated}
    command = [sys.executable, "-c", _IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=here, env=environment)
    folders = [os.path.realpath(path) for path in done.stdout.splitlines()]
    assert str(ROOT) in folders
    assert (str(here) in folders) == is_trusted


def test_another_python_sees_the_packages_of_its_user_and_nothing_from_where_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Path(sys.executable).resolve()  # outside an environment, which has no packages of users
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    where = [str(program), "-c", "import site; print(site.getusersitepackages())"]
    packages = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    packages.mkdir(parents=True)
    (packages / "simulator_of_tests.py").write_text("said = 'installed for the user'")
    for name in ("simulator_of_tests", "json", "planted"):
        (here / f"{name}.py").write_text("said = 'planted'")
    monkeypatch.setenv("PYTHONPATH", str(here))
    script = "import json, sys, simulator_of_tests as it; print(it.said, sys.argv[1]); import planted"
    command = processes.isolated_script(script, "argument", python=str(program))
    environment = processes.clean_environment()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here, env=environment)
    assert done.stdout == "installed for the user argument\n", done.stderr
    assert "No module named 'planted'" in done.stderr


def test_another_python_is_named_from_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert processes.isolated_script("", python="bin/python")[0] == str(tmp_path / "bin" / "python")
    assert processes.isolated_script("", python="python3")[0] == "python3"


_GREEDY = """from hespas.files.sandbox import bounded_memory
with bounded_memory(200 << 20):
    few = bytearray(100 << 20)
    try:
        bytearray(1 << 30)
    except MemoryError:
        print("bounded")
print(len(bytearray(1 << 30)))"""


@linux
def test_memory_is_bounded_within_and_free_again_after() -> None:
    done = subprocess.run([sys.executable, "-c", _GREEDY], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bounded", str(1 << 30)]
