"""Stages of an input: reading, and after a successful read everything that a user can do with the value."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path
from time import process_time
from types import FrameType
from typing import Literal, NoReturn, TypeVar

import numpy as np
import typer

from hespas import api
from hespas.api import Conversion
from hespas.converters import ReadOptions, load_format
from hespas.graph import Profile, Workload
from hespas.graph.errors import FormatError, HespasError, InvariantError, UnsupportedError
from hespas.validators.checker import CheckOptions
from hespas.validators.roundtrip import FormatPair, PairStatus, compare_columns
from hespas.validators.roundtrip.matrix import unreported
from tests.fuzzing.readings import kept_readings

__all__ = ["DEVICES", "ESTIMATORS", "Judged", "on_value"]

LEAST_SECONDS, BYTES_PER_SECOND = 2.0, 50_000
"""Each stage may take 2 s of the processor for each 100 kB of input, at least 2 s, times :func:`pace`."""

START_SECONDS = 2.0
"""A process that starts within a stage imports its parser first."""

_LOOPS, _LOOP_S = 300_000, 55e-9
"""A loop whose step takes so long where the bounds hold as they stand."""


@cache
def pace() -> float:
    """By how much the bounds are wider on this machine, at least 1: shared ones differ threefold from one
    hour to the next, while what the bounds are for takes minutes.
    """
    begun = process_time()
    sum(each * each for each in range(_LOOPS))
    return max(1.0, (process_time() - begun) / (_LOOPS * _LOOP_S))


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

WORKLOADS = {
    "op-graph": "back.json",
    "op-graph-arrow": "back.arrow",
    "chakra": "back.et",
    "chakra-json": "back.json",
    "stablehlo": "back.mlir",
    "dot": "back.dot",
    "graphml": "back.graphml",
}
PROFILES = (
    ("ops-table", "back.csv"),
    ("ops-table", "back.parquet"),
    ("chrome-trace", "back.chrome.json"),
    ("perfetto", "back.pftrace"),
)
"""What is written of a workload and of a profile, by format."""

_QUICK = tuple(name for name in WORKLOADS if name != "stablehlo")
_TARGETS = (*_QUICK * 3, "stablehlo")
"""Targets of workloads, in turn: StableHLO is parsed several times, which takes as long as ten others do."""

ESTIMATORS = ("roofline", "calibrated", "systolic", "collectives", "composite", "learned")
DEVICES = ("H100-SXM", "TPU-v4", "MI300X", "A100-SXM-80GB")

_RULES: tuple[Literal["chakra", "astra-sim"] | None, ...] = (None, "chakra", "astra-sim")

_MOST_RANKS = 16
"""Of larger jobs one rank is written."""

_T = TypeVar("_T")


class _TooSlowError(BaseException):
    """Raised by the alarm, past everything that catches errors."""


def _slow(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise _TooSlowError


@dataclass(frozen=True, slots=True)
class _Children:
    """The living children of this process, and the time of the processor that all it ever had have taken."""

    living: frozenset[int]
    cpu_s: float

    @classmethod
    def now(cls) -> _Children:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        living = {pid: taken for pid in _children() if (taken := _taken_s(pid)) is not None}
        return cls(frozenset(living), ended.ru_utime + ended.ru_stime + sum(living.values()))

    def taken_until(self, later: _Children) -> float:
        """Return the CPU seconds until ``later``, without the starts of new or already ended processes."""
        fresh = len(later.living - self.living) or (0 if later.living else 1)
        return later.cpu_s - self.cpu_s - fresh * START_SECONDS * pace()


def _children() -> list[int]:
    """Return the ids of child processes; empty except on Linux."""
    place = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in place.read_text().split()] if place.exists() else []


def _taken_s(pid: int) -> float | None:
    """None for a process that has ended meanwhile."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(told[11]) + int(told[12])) / _TICKS_PER_S  # user and system time


@dataclass(slots=True)
class Judged:
    """Result of one input: the answer of its first stage, and faults that no user should see.

    ``out`` is the folder to write to.
    """

    size: int
    out: Path
    answer: str = ""
    failures: list[str] = field(default_factory=list[str])

    def attempt(
        self,
        stage: str,
        work: Callable[[], _T],
        allowed: tuple[type[HespasError], ...] = (HespasError,),
        path: str = "",
    ) -> _T | None:
        """Do ``work``; None where it ends in an error. One that is not ``allowed``, or that does not name
        ``path`` or says nothing, is a failure; so is all that is slow.
        """
        try:
            done = self._in_time(work)
        except allowed as error:
            told = type(error).__name__
            if isinstance(error, InvariantError) or not error.message:
                self._fail(stage, error)
            elif path and not str(error.path).startswith(path):
                self.failures.append(f"{stage}: {told} names {error.path!r}: {error.message[:200]}")
            self.answer = self.answer or told
            return None
        except _TooSlowError as error:
            self.failures.append(f"{stage}: slow for {self.size:,} bytes at {_place(error)} {error}".strip())
        except BaseException as error:  # whatever it is, it is a finding
            self._fail(stage, error)
        else:
            self.answer = self.answer or "read"
            return done
        self.answer = self.answer or "failure"
        return None

    def _in_time(self, work: Callable[[], _T]) -> _T:
        """Do ``work``. No alarm is left behind, however it ends. What processes take that contain parsers is
        added up behind it: no alarm hears of that.
        """
        allowed = max(LEAST_SECONDS, self.size / BYTES_PER_SECOND) * pace()
        before, own = _Children.now(), process_time()
        signal.signal(signal.SIGPROF, _slow)
        try:
            signal.setitimer(signal.ITIMER_PROF, allowed)
            return work()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            theirs = before.taken_until(_Children.now())
            if theirs > 0 and process_time() - own + theirs > allowed:
                raise _TooSlowError(f"{theirs:.1f} s of them in another process")

    def place(self) -> Path:
        """An empty folder to write to."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        return self.out

    def _fail(self, stage: str, error: BaseException) -> None:
        self.failures.append(f"{stage}: {type(error).__name__} at {_place(error)}: {str(error)[:200]}")

    def command(self, stage: str, app: typer.Typer, *arguments: str | Path) -> None:
        """A command in this process; exit codes below 5 are answers, whatever it raises is looked at."""

        def work() -> int:
            code = _exit_code(app, [*map(str, arguments), "--debug"])
            if not 0 <= code <= 4:
                raise InvariantError(f"exit {code}")
            return code

        self.attempt(stage, work)


@cache
def _command(app: typer.Typer) -> Callable[..., object]:
    """Return the function of a command, cached because its construction takes longer than most inputs."""
    return typer.main.get_command(app).main


def _exit_code(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Return the exit code of a command without its output."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        try:
            _command(app)(args=[*arguments], prog_name="hespas")
        except SystemExit as left:
            return left.code if isinstance(left.code, int) else 0
    return 0


def _place(error: BaseException) -> str:
    """The innermost lines of our own that an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f"{'/'.join(Path(each.filename).parts[-2:])}:{each.lineno}"
        for each in frames
        if "/hespas/" in each.filename
    ]
    return " < ".join(reversed(own[-2:])) or (frames[-1].name if frames else "?")


def on_value(judged: Judged, path: Path, form: str, number: int) -> None:
    """Read ``path``; by turns to recover, or leniently to check it too, which is mostly asked of what was
    refused. What is accepted is written and read back, or given to a command.
    """
    with kept_readings(form, path):
        _on_value(judged, path, form, number)


def _on_value(judged: Judged, path: Path, form: str, number: int) -> None:
    where, strict = str(path), (FormatError, UnsupportedError)
    value = judged.attempt("read", lambda: api.read(path, format=form), strict, where)
    rare = 1 if value is None else 2
    if number % (3 * rare) == 0:
        profile = _RULES[number // (3 * rare) % len(_RULES)]
        judged.attempt(
            f"check {profile}", lambda: api.check(path, profile=profile, options=CheckOptions(format=form))
        )
    elif number % (3 * rare**2) == 1:
        judged.attempt("recover", lambda: _recovered(path, form), strict, where)
    match value:
        case Workload() if number % 2:
            _written(judged, path, form, number // 2, value.num_ranks)
        case Workload():
            _commanded(judged, path, form, number // 2)
        case Profile() if number % 2:
            _events_written(judged, path, form, number // 2)
        case Profile():
            _events_commanded(judged, path, form, number // 2)
        case None:
            return


def _recovered(path: Path, form: str) -> None:
    found = api.read(path, format=form, options=ReadOptions(recover=True))
    api.summarise(found, form)


def _written(judged: Judged, path: Path, form: str, turn: int, num_ranks: int) -> None:
    target = _TARGETS[turn % len(_TARGETS)]
    back = judged.place() / WORKLOADS[target]
    ranks = range(1) if num_ranks > _MOST_RANKS else None
    done = judged.attempt(
        f"write {target}",
        lambda: api.convert(path, back, source_format=form, target_format=target, ranks=ranks),
    )
    if done is None or load_format(target).read is None:
        return
    again = judged.attempt(f"written, not read: {target}", lambda: _again(back, target))
    if again is not None and ranks is None:
        judged.attempt(f"not equal: {target}", lambda: _compare(done, again))


def _commanded(judged: Judged, path: Path, form: str, turn: int) -> None:
    from hespas.cli.main import app

    place = judged.place()
    estimator, device = ESTIMATORS[turn % len(ESTIMATORS)], DEVICES[turn // 3 % len(DEVICES)]
    options: list[str | Path] = ["--from", form, "--no-progress", "--json", place / "figures.json"]
    on_device: list[str | Path] = ["--hardware", device, "--estimator", estimator]
    match turn % 4:
        case 0:
            judged.command("view", app, "view", path, *options)
        case 1:
            out = place / "x.csv"
            judged.command(f"estimate {estimator}", app, "estimate", path, *options, *on_device, "--out", out)
        case 2:
            judged.command("simulate", app, "simulate", path, *options, "--timeline", place / "t.json")
        case _:
            judged.command(f"simulate {estimator}", app, "simulate", path, *options, *on_device)


def _again(path: Path, form: str) -> Workload:
    """Read back a written file. Every error is a failure."""
    try:
        value = api.read(path, format=form)
    except HespasError as error:
        raise InvariantError(f"{type(error).__name__}: {error}") from error
    if not isinstance(value, Workload):
        raise InvariantError("a workload comes back as something else")
    return value


def _compare(done: Conversion, again: Workload) -> None:
    """Raise where a column came back otherwise that no finding accounts for."""
    if not isinstance(done.value, Workload):
        raise InvariantError("a workload became something else on its way")
    columns = tuple(compare_columns(done.value, again))
    pair = FormatPair(
        source=done.target_format,
        via=done.target_format,
        status=PairStatus.KEPT,
        columns=columns,
        findings=done.diagnostics.counts(),
    )
    silent = unreported(pair)
    if silent:
        raise InvariantError(f"otherwise, and nothing says so: {', '.join(silent)}")


def _events_written(judged: Judged, path: Path, form: str, turn: int) -> None:
    target, name = PROFILES[turn % len(PROFILES)]
    back = judged.place() / name
    done = judged.attempt(
        f"write {target}", lambda: api.convert(path, back, source_format=form, target_format=target)
    )
    if done is not None:
        judged.attempt(f"not equal: {target}", lambda: _compare_events(done))


def _events_commanded(judged: Judged, path: Path, form: str, turn: int) -> None:
    from hespas.cli.main import app
    from hespas.cli.validate import app as validate

    options: list[str | Path] = ["--no-progress", "--json", judged.place() / "figures.json"]
    if turn % 8 == 1:
        report = judged.place() / "report"
        judged.command("analyze", app, "analyze", path, *options, "--from", form, "--report", report)
    elif turn % 8:
        judged.command("view", app, "view", path, *options, "--from", form)
    else:
        device: list[str | Path] = ["--hardware", DEVICES[turn // 8 % len(DEVICES)]]
        judged.command("accuracy", validate, "accuracy", "--measured", path, *options, *device)


def _compare_events(done: Conversion) -> None:
    """Raise where events or their time are lost, and nothing says so."""
    account = done.events
    if account is None:
        raise InvariantError("what is written of a profile is none")
    before, after = account.before, account.after
    if account.dropped:
        return
    same_time = np.isclose(before.device_time_ns, after.device_time_ns, rtol=1e-6, atol=1, equal_nan=True)
    if before.events != after.events or not same_time:
        raise InvariantError(f"{before.device_time_ns} ns became {after.device_time_ns}: {before}, {after}")
