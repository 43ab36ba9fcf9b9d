"""Units measured once each: what is known is read, what is not is measured and kept."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryFile
from threading import Thread, current_thread
from types import TracebackType
from typing import IO, NamedTuple

import msgspec

from hespas.estimators.compiled.units import Unit, baseline_of, call_text, loop_text
from hespas.estimators.result_cache import ResultCache, cache_folder, content_key
from hespas.files.processes import ROOT, clean_environment, isolated_python
from hespas.graph.errors import UnsupportedError
from hespas.programs.text import Tensor

__all__ = ["Job", "Machine", "Measured", "Measuring", "Progress", "Session", "Timing", "worker_command"]

Progress = Callable[[int, int], None]
"""Told how many of how many units are measured."""

_METHOD = "loop difference 2"
"""What decides a figure besides program and machine; another number makes all kept figures void."""
_WITHOUT_BARRIER = frozenset({"iree"})
_WAIT_S = 3600.0
_SPARE_S = 180.0
"""What a job may take beside its time limit: to start the process anew."""


class Measured(NamedTuple):
    """A timing of each unit, and who measured."""

    machine: Machine
    timings: tuple[Timing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How units are measured: with which compiler, how often, how long at most, kept where, and on how many
    devices at once.
    """

    toolchain: str
    repeats: int
    timeout_s: float
    folder: Path | None
    devices: int = 1
    command: tuple[str, ...] = ()

    def run(self, units: Sequence[Unit], progress: Progress | None = None) -> Measured:
        """A timing of each unit. Failures of a program are in its timing; a timeout is not kept.

        Raises ``UnsupportedError`` where the compiler does not start, ``OutputError`` where the folder
        cannot be written.
        """
        command = self.command or worker_command(self.toolchain, self.devices)
        with Session(self.toolchain, self.timeout_s, command) as session:
            machine = session.machine()
            folder = self.folder or cache_folder("compiled")
            cache = ResultCache(folder / self.toolchain, Timing)
            key = partial(_key, machine, self.repeats)
            jobs = [_job(unit, self.repeats, self.toolchain) for unit in units]
            keys = [key(job) for job in jobs]
            timings = [cache.get(each) for each in keys]
            missing = [place for place, timing in enumerate(timings) if timing is None]
            done = len(units) - len(missing)
            if progress and units:
                progress(done, len(units))
            if missing:
                with cache.alone(_WAIT_S, self.timeout_s + _SPARE_S) as lock:
                    for place in missing:
                        # Who held the lock before may have measured the same.
                        timing = cache.get(keys[place]) or session.time(jobs[place])
                        lock.touch()
                        timings[place] = timing
                        if timing.is_known or timing.samples:
                            cache.put(keys[place], timing)
                        done += 1
                        if progress:
                            progress(done, len(units))
        return Measured(machine, tuple(each or Timing(fault="not measured") for each in timings))


def _key(machine: Machine, repeats: int, job: Job) -> str:
    identity = msgspec.json.encode(machine).decode()
    return content_key((_METHOD, identity, str(repeats), job.program, job.baseline))


_CALLED = {"xla": "stablehlo.convolution"}
"""What a compiler makes something else of inside a loop: XLA for CPUs brings convolutions into the layout of
its library at the top level of a program only (``ConvCanonicalization``).
"""


def _job(unit: Unit, repeats: int, toolchain: str) -> Job:
    empty = baseline_of(unit)
    called = toolchain in _CALLED and any(_CALLED[toolchain] in line for line in unit.lines)
    write = call_text if called else partial(loop_text, barrier=toolchain not in _WITHOUT_BARRIER)
    return Job(
        program=write(unit),
        baseline=write(empty),
        looped=not called,
        arguments=_types(unit.arguments),
        baseline_arguments=_types(empty.arguments),
        repeats=repeats,
    )


def _types(tensors: Sequence[Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((each.element.name, each.shape) for each in tensors)


# The measuring process from outside: started when needed, given up on after a while, started anew.

_START_S = 300.0
_END_S = 60.0
_LISTED = 2000


def worker_command(toolchain: str, devices: int = 1) -> tuple[str, ...]:
    """What starts the measuring process: this Python, with the package as it is here, isolated."""
    return tuple(isolated_python("hespas.estimators.compiled.worker", toolchain, str(devices)))


class Session:
    """A context that answers jobs. ``command`` starts the process (default: this Python's own worker)."""

    def __init__(self, toolchain: str, timeout_s: float, command: tuple[str, ...] = ()) -> None:
        self.toolchain = toolchain
        self.timeout_s = timeout_s
        self.command = command or worker_command(toolchain)
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: Queue[bytes] = Queue()
        self._errors: IO[bytes] | None = None
        self._starter = current_thread()

    def __enter__(self) -> Session:
        """Nothing is started yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._end()

    def machine(self) -> Machine:
        """Who measures. Raises ``UnsupportedError`` where the compiler does not start."""
        return self._start()

    def time(self, job: Job) -> Timing:
        """The answer to a job; a crash or a timeout is its fault, and the next gets a new process; so does a
        job that finds the process ended.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        if process is None or process.stdin is None:
            return Timing(fault="the measuring process is gone")
        try:
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
            line = self._answers.get(timeout=self.timeout_s)
            if line:
                return msgspec.json.decode(line, type=Timing)
            if self._is_orphaned(process):
                return self.time(job)
            fault = f"the compiler ended the process (exit status {process.wait()}){self._last_words()}"
        except Empty:
            fault = f"no answer within {self.timeout_s:g} s"
        except (OSError, msgspec.DecodeError) as error:
            if self._is_orphaned(process):
                return self.time(job)
            fault = f"the measuring process is gone ({error}){self._last_words()}"
        self._end()
        return Timing(fault=fault)

    def _start(self) -> Machine:
        """Start the process and hear who it is."""
        self._end()
        self._answers = Queue()
        try:
            self._errors = TemporaryFile()  # noqa: SIM115 - lives as long as the process
            process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                cwd=ROOT, env=clean_environment(),
            )  # fmt: skip
        except OSError as error:
            raise self._not_started(str(error)) from error
        self._process = process
        self._starter = current_thread()
        Thread(target=_listen, args=(process, self._answers), daemon=True).start()
        try:
            machine = msgspec.json.decode(self._answers.get(timeout=_START_S), type=Machine)
        except (Empty, msgspec.DecodeError):
            machine = Machine(
                compiler="", platform="", device="", flags="", fault=f"no answer{self._last_words()}"
            )
        if machine.fault:
            self._end()
            raise self._not_started(machine.fault)
        return machine

    def _not_started(self, why: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.toolchain} does not start: {why}",
            hint="run it alone to see why; another estimator needs no compiler",
        )

    def _is_orphaned(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether the process has ended because the thread that started it did: Linux ends both together."""
        if self._starter.is_alive():
            return False
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_END_S) == -signal.SIGKILL
        return False

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", "replace").strip()[-_LISTED:]
        return f": {text}" if text else ""

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _listen(process: subprocess.Popen[bytes], answers: Queue[bytes]) -> None:
    """Pass lines on; an empty one says that no more come, whatever the reason."""
    try:
        if process.stdout is not None:
            with process.stdout as lines:
                for line in lines:
                    answers.put(line)
    finally:
        answers.put(b"")


# --- What the measuring process receives and answers: one JSON document a line.


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Programs to time: the loop with the work and the one without, and the types of their arguments. Not
    ``looped``: they are called so many times instead.
    """

    program: str
    baseline: str
    looped: bool = True
    arguments: tuple[tuple[str, tuple[int, ...]], ...]
    baseline_arguments: tuple[tuple[str, tuple[int, ...]], ...]
    repeats: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Who measures: a compiler with its version, on a device with its processor and flags, or on several of
    them at once.
    """

    compiler: str
    platform: str
    device: str
    flags: str
    devices: int = 1
    fault: str = ""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one turn [ns], or why nothing was (``fault``: the compiler's message).

    ``clock_mhz`` is the processor's frequency meanwhile (0: not known), ``turns`` how many a sample had,
    ``samples`` their number.
    """

    duration_ns: float = -1.0
    low_ns: float = -1.0
    high_ns: float = -1.0
    turns: int = 0
    samples: int = 0
    clock_mhz: float = 0.0
    fault: str = ""
    when: str = ""

    @property
    def is_known(self) -> bool:
        """Whether there is a time: positive and finite."""
        return not self.fault and 0 < self.duration_ns < float("inf")
