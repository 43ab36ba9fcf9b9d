"""Measurement of units (small programs, see :mod:`.units`) in a child process, with saved results.

Jobs and timings are messages between this process and the measuring process (:mod:`.worker`), one JSON
document a line. The measuring process is started when it is needed, and started again after a crash or a
timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from hespas.estimators.compiled.units import Unit, baseline_of, call_text, loop_text
from hespas.estimators.result_cache import ResultCache, content_key
from hespas.files.processes import ChildEndedError, ChildNotStartedError, Session, isolated_python
from hespas.files.user_folders import cache_folder
from hespas.graph.errors import UnsupportedError
from hespas.graph.progress import Progress
from hespas.programs.text import Tensor

__all__ = [
    "MeasuringMachine",
    "Timing",
    "TimingJob",
    "UnitMeasurement",
    "UnitTimings",
    "WorkerSession",
    "worker_command",
]

_METHOD = "loop difference 2"
"""Method of the measurement, a part of the cache key: another number makes all saved results void."""
_WITHOUT_BARRIER = frozenset({"iree"})
_WAIT_S = 3600.0
_SPARE_S = 180.0
"""Time beyond a job's limit in which the process may be started anew."""


class UnitTimings(NamedTuple):
    """Timings of the units (programs that are timed separately), and the machine that measured them."""

    machine: MeasuringMachine
    timings: tuple[Timing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMeasurement:
    """Settings for timing units (small programs, see :mod:`hespas.estimators.compiled.units`).

    ``toolchain`` is the compiler. ``repeats`` is the number of samples per unit, ``timeout_s`` the time limit
    per unit. ``folder`` is the folder of saved results. ``devices`` is the number of devices that run a unit
    at once. ``command`` starts the measuring process.
    """

    toolchain: str
    repeats: int
    timeout_s: float
    folder: Path | None
    devices: int = 1
    command: tuple[str, ...] = ()

    def run(self, units: Sequence[Unit], progress: Progress | None = None) -> UnitTimings:
        """Return the timing of each unit. If a program fails or exceeds the time limit, the timing has the
        reason. Timings of programs that exceed the limit are not saved.

        Raises ``UnsupportedError`` if the compiler does not start, ``OutputError`` if the folder cannot be
        written.
        """
        command = self.command or worker_command(self.toolchain, self.devices)
        with WorkerSession(self.toolchain, self.timeout_s, command) as session:
            machine = session.machine()
            folder = self.folder or cache_folder("compiled")
            cache = ResultCache(folder / self.toolchain, Timing)
            jobs = [_timing_job(unit, self.repeats, self.toolchain) for unit in units]
            identity = msgspec.json.encode(machine).decode()
            keys = [
                content_key((_METHOD, identity, str(self.repeats), job.program, job.baseline)) for job in jobs
            ]
            timings = [cache.get(key) for key in keys]
            missing = [index for index, timing in enumerate(timings) if timing is None]
            done = len(units) - len(missing)
            if progress and units:
                progress(done, len(units))
            if missing:
                with cache.alone(_WAIT_S, self.timeout_s + _SPARE_S) as lock:
                    for index in missing:
                        # The previous holder of the lock may have measured the same unit.
                        timing = cache.get(keys[index]) or session.time(jobs[index])
                        lock.touch()
                        timings[index] = timing
                        if timing.is_known or timing.samples:
                            cache.put(keys[index], timing)
                        done += 1
                        if progress:
                            progress(done, len(units))
        return UnitTimings(machine, tuple(timing or Timing(fault="not measured") for timing in timings))


_CALLED = {"xla": "stablehlo.convolution"}
"""Operations that a compiler handles differently inside a loop: XLA for CPUs canonicalizes convolutions for
its library only at the top level of a program (``ConvCanonicalization``).
"""


def _timing_job(unit: Unit, repeats: int, toolchain: str) -> TimingJob:
    empty = baseline_of(unit)
    called = toolchain in _CALLED and any(_CALLED[toolchain] in line for line in unit.lines)
    write = call_text if called else partial(loop_text, barrier=toolchain not in _WITHOUT_BARRIER)
    return TimingJob(
        program=write(unit),
        baseline=write(empty),
        looped=not called,
        arguments=_types(unit.arguments),
        baseline_arguments=_types(empty.arguments),
        repeats=repeats,
    )


def _types(tensors: Sequence[Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((tensor.element.name, tensor.shape) for tensor in tensors)


def worker_command(toolchain: str, devices: int = 1) -> tuple[str, ...]:
    """Return the command that starts the measuring process: this Python interpreter in isolated mode, with
    this package.
    """
    return tuple(isolated_python("hespas.estimators.compiled.worker", toolchain, str(devices)))


class WorkerSession:
    """Context manager that runs jobs in a measuring process. ``command`` starts the process (default: the
    worker of this package).
    """

    def __init__(self, toolchain: str, timeout_s: float, command: tuple[str, ...] = ()) -> None:
        self.toolchain = toolchain
        self.timeout_s = timeout_s
        self._machine = MeasuringMachine(compiler="", platform="", device="", flags="", fault="no answer")
        self._session = Session(lambda: command or worker_command(toolchain), self._greet)

    def __enter__(self) -> WorkerSession:
        """Return the session; the process starts with the first job."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._session.end()

    def machine(self) -> MeasuringMachine:
        """Return a description of the machine that measures. Raises ``UnsupportedError`` if the compiler does
        not start.
        """
        try:
            self._session.start()
        except ChildNotStartedError as error:
            raise self._not_started(error) from error
        return self._machine

    def time(self, job: TimingJob) -> Timing:
        """Return the timing of a job. After a crash or a timeout the timing has the reason in ``fault``, and
        the next job starts a new process.
        """
        try:
            line, _ = self._session.request(msgspec.json.encode(job), time_s=self.timeout_s)
            return msgspec.json.decode(line, type=Timing)
        except ChildNotStartedError as error:
            raise self._not_started(error) from error
        except TimeoutError:
            fault = f"no answer within {self.timeout_s:g} s"
        except ChildEndedError as error:
            errors = f": {error.errors}" if error.errors else ""
            fault = f"the compiler ended the process (exit status {error.status}){errors}"
        except msgspec.DecodeError as error:
            self._session.end()
            fault = f"the measuring process gives no timing ({error})"
        return Timing(fault=fault)

    def _greet(self, line: bytes) -> str:
        """Store the description of the machine from the first line of the process, and return its fault
        (empty: no fault).
        """
        try:
            self._machine = msgspec.json.decode(line, type=MeasuringMachine)
        except msgspec.DecodeError as error:
            return f"no answer ({error})"
        return self._machine.fault

    def _not_started(self, error: ChildNotStartedError) -> UnsupportedError:
        return UnsupportedError(
            f"{self.toolchain} does not start: {error}",
            hint="run it alone to see why, or use another estimator",
        )


class TimingJob(msgspec.Struct, frozen=True, kw_only=True):
    """Two programs to time, with the types of their arguments: ``program`` repeats the work in a loop,
    ``baseline`` is the same loop without the work. If ``looped`` is false, the programs have no loop and are
    called repeatedly.
    """

    program: str
    baseline: str
    looped: bool = True
    arguments: tuple[tuple[str, tuple[int, ...]], ...]
    baseline_arguments: tuple[tuple[str, tuple[int, ...]], ...]
    repeats: int


class MeasuringMachine(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the machine that measures: compiler and version, device, processor, flags, and the
    number of devices in use.
    """

    compiler: str
    platform: str
    device: str
    flags: str
    devices: int = 1
    fault: str = ""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one iteration [ns], or the reason of a failure (``fault``: the compiler's message).

    ``clock_mhz`` is the processor's frequency during the measurement (0: unknown). A measurement has
    ``samples`` samples of ``turns`` iterations each.
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
        """Return True if the time was measured: positive and finite."""
        return not self.fault and 0 < self.duration_ns < float("inf")
