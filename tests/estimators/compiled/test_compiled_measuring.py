"""Measurement of units in another process: results, failures, and saved results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from threading import Thread

import msgspec
import numpy as np
import pytest

from hespas.api import estimate, graph_estimator
from hespas.estimators import load_estimator
from hespas.estimators.compiled import Iree, Xla
from hespas.estimators.compiled import model as compiled_model
from hespas.estimators.compiled.measuring import (
    MeasuringMachine,
    Timing,
    TimingJob,
    UnitMeasurement,
    WorkerSession,
)
from hespas.estimators.compiled.units import Unit
from hespas.estimators.compiled.worker import LoopTimes, NumpyArray, serve, time_loop, timing_of
from hespas.graph import Diagnostics, OpClass, OpGraph, Workload
from hespas.graph.builder import GraphBuilder
from hespas.graph.columns import dtype
from hespas.graph.errors import MissingExtraError, UnsupportedError, UsageError
from hespas.hardware import load_device
from hespas.operations import Labels, Operations
from hespas.operations.build import matmuls
from hespas.programs.text import Tensor, Value
from tests.limits import SAFETY_S

# Answers each job with its count; programs of some sizes crash, hang, or fail to compile.
STUB = """
import json, os, sys, time
log = open({log!r}, "a")
print(json.dumps(dict(compiler="stub 1", platform="cpu", device="stub", flags="")), flush=True)
for line in sys.stdin:
    program = json.loads(line)["program"]
    print("job", file=log, flush=True)
    if "tensor<13xf32>" in program:
        print("illegal instruction", file=sys.stderr, flush=True)
        os._exit(132)
    if "tensor<17xf32>" in program:
        time.sleep(60)
    if "tensor<19xf32>" in program:
        print(json.dumps(dict(fault="error: no such intrinsic")), flush=True)
        continue
    print(json.dumps(dict(duration_ns=1000.0, low_ns=900.0, high_ns=1200.0, turns=8, samples=3)), flush=True)
"""


ANSWERING = """
import json, os, signal, sys
{dying}
print(json.dumps(dict(compiler="stub 1", platform="cpu", device="stub", flags="")), flush=True)
for line in sys.stdin:
    print(json.dumps(dict(duration_ns=float(os.getpid()))), flush=True)
    {after}
"""
JOB = TimingJob(program="", baseline="", arguments=(), baseline_arguments=(), repeats=1)
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")


def answering(dying: str = "", after: str = "pass") -> tuple[str, ...]:
    return sys.executable, "-c", ANSWERING.format(dying=dying, after=after)


def test_a_process_that_has_ended_between_two_jobs_is_started_anew() -> None:
    with WorkerSession("stub", 60.0, answering(after="break")) as session:
        first = session.time(JOB)
        os.waitid(os.P_PID, int(first.duration_ns), os.WEXITED | os.WNOWAIT)  # it is gone by then
        second = session.time(JOB)
    assert (first.fault, second.fault) == ("", "")
    assert first.duration_ns != second.duration_ns


@linux
def test_a_process_that_ends_with_the_thread_that_started_it_is_started_anew() -> None:
    tied = f"from hespas.files.processes import die_with_parent; die_with_parent({os.getpid()})"
    found: list[Timing] = []
    with WorkerSession("stub", 60.0, answering(dying=tied)) as session:
        thread = Thread(target=lambda: found.append(session.time(JOB)))
        thread.start()
        thread.join()
        os.waitid(os.P_PID, int(found[0].duration_ns), os.WEXITED | os.WNOWAIT)  # it is gone by then
        found.append(session.time(JOB))
    assert [timing.fault for timing in found] == ["", ""]
    assert found[0].duration_ns != found[1].duration_ns


def answer(value: object) -> Callable[..., object]:
    """A function that says the same of everything."""

    def always(*_: object) -> object:
        return value

    return always


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stub in place of the compiler; the file has a line per job that reached it."""
    log, script = tmp_path / "log", tmp_path / "stub.py"
    log.touch()
    script.write_text(STUB.format(log=str(log)))
    command = (sys.executable, str(script))
    monkeypatch.setattr("hespas.estimators.compiled.measuring.worker_command", answer(command))
    monkeypatch.setattr(compiled_model, "find_spec", answer(True))
    return log


def jobs(log: Path) -> int:
    return len(log.read_text().splitlines())


def negation(size: int) -> Unit:
    tensor = Tensor(dtype("f32"), (size,))
    line = f'%v0 = "stablehlo.negate"(%p0) : ({tensor}) -> ({tensor})'
    return Unit((line,), (tensor,), (Value("%v0", tensor),))


def measuring(folder: Path, timeout_s: float = SAFETY_S) -> UnitMeasurement:
    return UnitMeasurement(toolchain="xla", repeats=3, timeout_s=timeout_s, folder=folder)


def graph(*sizes: int, times: int = 1) -> OpGraph:
    b = GraphBuilder("negations")
    for size in sizes * times:
        row = b.types.add(dtype("f32"), (size,))
        b.add_node(
            name_id=0, op_id=b.strings.add("stablehlo.negate"), op_class=OpClass.ELEMENTWISE,
            operands=[row], results=[row], flops=float(size), transcendentals=0.0, bytes_read=4.0 * size,
            bytes_written=4.0 * size,
        )  # fmt: skip
    return b.build()


def test_what_is_kept_is_not_measured_again(tmp_path: Path, log: Path) -> None:
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    first = measuring(tmp_path / "cache").run([negation(4), negation(5)], tell)
    assert (jobs(log), told) == (2, [(0, 2), (1, 2), (2, 2)])
    again = measuring(tmp_path / "cache").run([negation(5), negation(4), negation(6)])
    assert jobs(log) == 3
    assert [each.duration_ns for each in (*first.timings, *again.timings)] == [1000.0] * 5


def test_a_damaged_entry_is_measured_again(tmp_path: Path, log: Path) -> None:
    measuring(tmp_path / "cache").run([negation(4)])
    (entry,) = (tmp_path / "cache").rglob("*.json")
    entry.write_text("{")
    assert measuring(tmp_path / "cache").run([negation(4)]).timings[0].is_known
    assert jobs(log) == 2


def test_a_crash_takes_only_its_own_unit_with_it(tmp_path: Path, log: Path) -> None:
    timings = measuring(tmp_path / "cache").run([negation(13), negation(4)]).timings
    assert "exit status 132" in timings[0].fault
    assert "illegal instruction" in timings[0].fault
    assert timings[1].is_known
    measuring(tmp_path / "cache").run([negation(13), negation(4)])
    assert jobs(log) == 3, "failures are not kept"


def test_a_hang_ends_with_its_time(tmp_path: Path, log: Path) -> None:
    timings = measuring(tmp_path / "cache", timeout_s=3.0).run([negation(17), negation(4)]).timings
    assert timings[0].fault == "no answer within 3 s"
    assert timings[1].is_known
    assert jobs(log) == 2


def test_an_interrupted_run_is_resumed(tmp_path: Path, log: Path) -> None:
    def stop(done: int, _: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    units = [negation(size) for size in (4, 5, 6)]
    with pytest.raises(KeyboardInterrupt):
        measuring(tmp_path / "cache").run(units, stop)
    assert all(each.is_known for each in measuring(tmp_path / "cache").run(units).timings)
    assert jobs(log) == 3


def test_equal_nodes_share_one_measurement(tmp_path: Path, log: Path) -> None:
    model = Xla(cache=str(tmp_path / "cache"))
    said = model.estimate(graph(4, 5, times=50), load_device("H100-SXM"))
    assert jobs(log) == 2
    assert said.duration_ns.tolist() == [1000.0] * 100
    assert (said.low_ns[0], said.high_ns[0], set(said.estimator.tolist())) == (900.0, 1200.0, {0})


def test_a_failed_region_is_an_error_with_the_compilers_words(tmp_path: Path, log: Path) -> None:
    model = Xla(cache=str(tmp_path / "cache"))
    with pytest.raises(UnsupportedError, match=r"stablehlo\.negate: xla failed: error: no such intrinsic"):
        model.estimate(graph(4, 19), load_device("H100-SXM"))
    found = Diagnostics()
    said = replace(model, failed="unknown").estimate(graph(4, 19), load_device("H100-SXM"), found)
    assert said.duration_ns[0] == 1000.0
    assert np.isnan(said.duration_ns[1])
    assert said.estimator.tolist() == [0, -1]
    assert found.counts()["xla.failed"] == 1
    assert any("no such intrinsic" in each.message for each in found)
    assert jobs(log) == 3


def test_a_policy_that_keeps_unknowns_keeps_failed_ones(tmp_path: Path, log: Path) -> None:
    spelling = f"xla:cache={tmp_path / 'cache'}"
    found = Diagnostics()
    made = graph_estimator("H100-SXM", spelling, 1, "warn")(graph(4, 19), found)
    assert made.duration_ns[0] == 1000.0
    assert np.isnan(made.duration_ns[1])
    assert found.counts()["xla.failed"] == found.counts()["estimate.missing"] == 1
    with pytest.raises(UnsupportedError, match="no such intrinsic"):
        graph_estimator("H100-SXM", spelling, 1, "error")(graph(4, 19), found)
    assert jobs(log) == 3


def test_progress_counts_regions(tmp_path: Path, log: Path) -> None:
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    estimate(
        Workload.spmd(graph(4, 5, times=3), 1), "H100-SXM", estimator=f"xla:cache={tmp_path / 'cache'}",
        progress=tell,
    )  # fmt: skip
    assert told == [(0, 1), (0, 2), (1, 2), (2, 2)]
    assert jobs(log) == 2


def test_times_of_another_device_are_told(tmp_path: Path, log: Path) -> None:
    found = Diagnostics()
    Xla(cache=str(tmp_path / "cache")).estimate(graph(4), load_device("H100-SXM"), found)
    assert found.counts() == {"xla.measured": 1, "xla.other-device": 1}
    assert any("not of H100-SXM" in each.message for each in found)
    assert jobs(log) == 1


def table(*sizes: int) -> Operations:
    columns = [np.array(sizes, np.float64)] * 3
    ones = np.ones(len(sizes))
    return matmuls(Labels.constant("f32", len(sizes)), batch=ones, m=columns[0], n=columns[1], k=columns[2])


def test_rows_of_a_table_are_programs_too(tmp_path: Path, log: Path) -> None:
    model = Xla(cache=str(tmp_path / "cache"))
    found = Diagnostics()
    said = model.predict(table(8, 16, 8), load_device("H100-SXM"), found)
    assert said.duration_ns.tolist() == [1000.0] * 3
    assert jobs(log) == 2
    unknown = replace(table(8), kind=Labels.constant("normalization", 1))
    assert np.isnan(model.predict(unknown, load_device("H100-SXM"), found).duration_ns).all()
    assert found.counts()["xla.no-program"] == 1


def test_an_absent_compiler_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_model, "find_spec", answer(None))
    with pytest.raises(MissingExtraError) as caught:
        Iree().estimate(graph(4), load_device("H100-SXM"))
    assert caught.value.hint == "pip install 'hespas[iree]'"
    assert Iree().available() == (
        False, "not installed: iree.compiler, iree.runtime", "pip install 'hespas[iree]'",
    )  # fmt: skip


def test_a_compiler_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import json; print(json.dumps(dict(compiler='', platform='', device='', flags='', fault='no TPU')))"
    )
    command = (sys.executable, "-c", script)
    monkeypatch.setattr("hespas.estimators.compiled.measuring.worker_command", answer(command))
    with pytest.raises(UnsupportedError, match="xla does not start: no TPU"):
        measuring(tmp_path).run([negation(4)])


def test_a_process_that_the_system_refuses_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (str(tmp_path / "nowhere"),)
    monkeypatch.setattr("hespas.estimators.compiled.measuring.worker_command", answer(command))
    with pytest.raises(UnsupportedError, match=r"xla does not start: .*No such file"):
        measuring(tmp_path).run([negation(4)])


@pytest.mark.parametrize(
    "spelling", ["xla:region=all", "xla:failed=zero", "xla:repeats=0", "iree:progress=x"]
)
def test_wrong_options_are_refused(spelling: str) -> None:
    with pytest.raises(UsageError):
        load_estimator(spelling)


class Fake:
    """A toolchain whose programs return the number of turns instead of running."""

    def machine(self) -> MeasuringMachine:
        return MeasuringMachine(compiler="fake", platform="cpu", device="fake", flags="")

    def compile(
        self, program: str, arguments: Sequence[NumpyArray], *, counted: bool
    ) -> Callable[[int], object]:
        if "bad" in program:
            raise RuntimeError("bad program")
        assert [each.dtype for each in arguments] == [np.dtype("float32")]
        return lambda turns: turns


def test_the_worker_answers_each_job() -> None:
    sizes = (("f32", (2, 3)),)
    good = TimingJob(program="good", baseline="empty", arguments=sizes, baseline_arguments=sizes, repeats=3)
    asked = BytesIO(
        b"".join(msgspec.json.encode(replace_program(good, each)) + b"\n" for each in ("bad", "good"))
    )
    answers = BytesIO()
    serve(Fake(), asked, answers)
    lines = answers.getvalue().splitlines()
    assert msgspec.json.decode(lines[0], type=MeasuringMachine).compiler == "fake"
    assert msgspec.json.decode(lines[1], type=Timing).fault == "bad program"
    timing = msgspec.json.decode(lines[2], type=Timing)
    assert timing.is_known
    assert timing.samples == 3


def replace_program(job: TimingJob, program: str) -> TimingJob:
    return msgspec.structs.replace(job, program=program)


def test_a_time_is_the_work_without_its_loop() -> None:
    timing = timing_of(LoopTimes([50.0, 52.0, 60.0], 100), LoopTimes([10.0, 11.0, 30.0], 100))
    assert timing.duration_ns == 41.0
    assert 0 <= timing.low_ns <= 41.0 <= timing.high_ns
    assert timing_of(LoopTimes([5.0, 5.0], 9), LoopTimes([10.0, 10.0], 9)).duration_ns == 1.0, "never 0"


def test_a_slope_warms_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    ran: list[int] = []

    def run(turns: int) -> None:
        ran.append(turns)
        now[0] += 1_000_000 + 500 * turns

    monkeypatch.setattr("hespas.estimators.compiled.worker.perf_counter_ns", lambda: now[0])
    slope = time_loop(run, 5)
    assert ran[0] == 1
    assert slope.samples_ns == [500.0] * 5
    assert slope.turns >= 8000
