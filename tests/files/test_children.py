from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from hespas.files.processes import (
    ROOT,
    ChildEndedError,
    ChildNotStartedError,
    Ended,
    Session,
    clean_environment,
    decode_error,
    encode_error,
    pool,
    run,
)
from hespas.files.trust import allowing_programs, programs_allowed
from hespas.graph.errors import (
    FormatError,
    HespasError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
    exit_code,
)
from tests.limits import SAFETY_S

WRITING = "import sys\nwhile True: print('x' * 1000, file=sys.{stream}, flush=True)"


def python(script: str) -> Sequence[str]:
    return [sys.executable, "-c", script]


def test_a_command_reads_its_input_and_its_output_is_stored() -> None:
    script = (
        "import os, sys; print(os.getcwd(), sys.stdin.read()); print('why', file=sys.stderr); sys.exit(3)"
    )
    with TemporaryFile() as output:
        ended = run(python(script), time_s=SAFETY_S, environment=os.environ, data=b"given", output=output)
        output.seek(0)
        assert output.read().decode() == f"{ROOT} given\n"
    assert ended == Ended(3, "", b"why\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_command_that_prints_without_end_is_stopped(stream: str) -> None:
    with TemporaryFile() as output:
        ended = run(
            python(WRITING.format(stream=stream)),
            time_s=SAFETY_S,
            environment=os.environ,
            output=output,
            output_bytes=1 << 20,
        )
    assert (ended.status, ended.stopped, ended.describe()) == (-9, "output", "prints messages without end")


def test_a_command_is_stopped_after_its_time_or_when_its_result_is_there(tmp_path: Path) -> None:
    result = tmp_path / "result"
    script = f"import time; open({str(result)!r}, 'w').close(); time.sleep(600)"
    done = run(python(script), time_s=SAFETY_S, environment=os.environ, is_done=result.exists)
    late = run(python(script), time_s=0.5, environment=os.environ)
    assert [(ended.status, ended.stopped) for ended in (done, late)] == [(-9, "done"), (-9, "time")]


def test_a_command_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run([str(tmp_path / "absent")], time_s=1.0, environment=clean_environment())


ANSWERING = """
import json, os, sys, time
print(json.dumps({"version": 1}), flush=True)
for line in sys.stdin.buffer:
    request = json.loads(line)
    data = sys.stdin.buffer.read(request.get("size", 0))
    if request.get("sleep"):
        time.sleep(600)
    if request.get("crash"):
        print("broken", file=sys.stderr, flush=True)
        os._exit(7)
    if request.get("garbage"):
        print("not JSON", flush=True)
        continue
    print(json.dumps({"pid": os.getpid(), "size": len(data)}), flush=True)
    sys.stdout.buffer.write(data[::-1])
    sys.stdout.flush()
"""


def greet(line: bytes) -> str:
    return "" if json.loads(line) == {"version": 1} else "another version"


def pid_of(session: Session) -> int:
    line, data = session.request(b'{"size": 3}', b"abc", time_s=SAFETY_S)
    assert data == b"cba"
    return int(json.loads(line)["pid"])


def test_a_session_answers_with_one_process_until_a_fault() -> None:
    session = Session(lambda: python(ANSWERING), greet)
    try:
        first = pid_of(session)
        assert pid_of(session) == first
        with pytest.raises(ChildEndedError) as caught:
            session.request(b'{"crash": 1}', time_s=SAFETY_S)
        assert (caught.value.status, caught.value.errors) == (7, "broken")
        second = pid_of(session)
        with pytest.raises(TimeoutError):
            session.request(b'{"sleep": 1}', time_s=0.2)
        third = pid_of(session)
        with pytest.raises(ChildEndedError):
            session.request(b'{"garbage": 1}', time_s=SAFETY_S)
        assert len({first, second, third, pid_of(session)}) == 4
    finally:
        session.end()


def test_a_session_replaces_its_process_after_some_requests() -> None:
    session = Session(lambda: python(ANSWERING), greet, most_requests=2)
    try:
        pids = [pid_of(session) for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]
    finally:
        session.end()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("print('{}')", "another version"),
        ("print('no')", "JSONDecodeError"),
        ("raise SystemExit('no such thing')", "EOFError: no such thing"),
    ],
)
def test_a_session_whose_child_does_not_greet_is_not_started(script: str, why: str) -> None:
    session = Session(lambda: python(script), greet)
    with pytest.raises(ChildNotStartedError, match=why):
        session.request(b"{}", time_s=SAFETY_S)


def permission_of(number: int) -> tuple[int, bool, int]:
    return number, programs_allowed(), os.getpid()


def test_a_pool_maps_in_processes_with_the_permissions_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    reports: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        reports.append((done, total))

    with allowing_programs():
        results = dict(pool(permission_of, [5, 6, 7], 2, progress=report, finished=4))
    assert {index: result[:2] for index, result in results.items()} == {
        0: (5, True),
        1: (6, True),
        2: (7, True),
    }
    assert os.getpid() not in {pid for _, _, pid in results.values()}
    assert reports == [(5, 7), (6, 7), (7, 7)]


def fail_or_note(path: Path) -> None:
    if path.name == "fails":
        raise UsageError("no")
    path.touch()


def test_a_pool_that_fails_cancels_what_has_not_started(tmp_path: Path) -> None:
    tasks = [tmp_path / "fails", *(tmp_path / str(number) for number in range(1000))]
    with pytest.raises(UsageError, match="no"):
        list(pool(fail_or_note, tasks, 2))
    assert len(list(tmp_path.iterdir())) < 1000


def test_one_job_runs_in_this_process() -> None:
    assert dict(pool(permission_of, [1, 2], 1)) == {
        index: (index + 1, False, os.getpid()) for index in range(2)
    }


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (3, b"", "ends with status 3"),
        (0, b"one\n\ntwo \n", "ends with status 0: two"),
        (-11, b"", "crashes with SIGSEGV"),
        (
            -6,
            b"F0101 x.cc:7] Check failed: a == b\n    @ 0x7f\n    @ 0x8f",
            "SIGABRT: F0101 x.cc:7] Check failed: a == b",
        ),
        (-6, b"LLVM ERROR: out of luck\nAborted", "crashes with SIGABRT: LLVM ERROR: out of luck"),
        (1, b"Further on\nFeature missing", "ends with status 1: Feature missing"),
        (1, b"\xff\xfe", "ends with status 1: \ufffd\ufffd"),
        (1, b"x" * 100_000, "..."),
    ],
)
def test_how_a_process_ended(status: int, said: bytes, told: str) -> None:
    described = Ended(status, "", said).describe()
    assert told in described
    assert len(described) < 1000


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no", hint="yes"),
        FormatError("broken", position="line 3"),
        UnsupportedError("not this"),
        MissingExtraError("capturing", "jax"),
    ],
)
def test_an_error_comes_through_a_pipe(error: HespasError) -> None:
    came = decode_error(json.loads(json.dumps(encode_error(error))))
    assert (came.text, came.hint, came.position) == (error.text, error.hint, error.position)
    assert exit_code(came) == exit_code(error)


def test_an_error_of_another_version_is_understood_but_unsupported() -> None:
    assert isinstance(decode_error({"kind": "NewError", "message": "?", "hint": ""}), UnsupportedError)
