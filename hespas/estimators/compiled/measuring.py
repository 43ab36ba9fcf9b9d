"""Units measured once each: what is known is read, what is not is measured and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from hespas.estimators.compiled.messages import Job, Machine, Timing
from hespas.estimators.compiled.programs import Unit, baseline_of, loop_text
from hespas.estimators.compiled.session import Session
from hespas.estimators.compiled.values import Tensor
from hespas.estimators.result_cache import ResultCache, cache_folder, content_key

__all__ = ["Measured", "Measuring", "Progress"]

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
    """How units are measured: with which compiler, how often, how long at most, kept where."""

    toolchain: str
    repeats: int
    timeout_s: float
    folder: Path | None
    command: tuple[str, ...] = ()

    def run(self, units: Sequence[Unit], progress: Progress | None = None) -> Measured:
        """A timing of each unit. Failures of a program are in its timing; a timeout is not kept.

        Raises ``UnsupportedError`` where the compiler does not start, ``OutputError`` where the folder
        cannot be written.
        """
        with Session(self.toolchain, self.timeout_s, self.command) as session:
            machine = session.machine()
            folder = self.folder or cache_folder("compiled")
            cache = ResultCache(folder / self.toolchain, Timing)
            key = partial(_key, machine, self.repeats)
            jobs = [
                _job(unit, self.repeats, barrier=self.toolchain not in _WITHOUT_BARRIER) for unit in units
            ]
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
    told = msgspec.json.encode(machine).decode()
    return content_key((_METHOD, told, str(repeats), job.program, job.baseline))


def _job(unit: Unit, repeats: int, *, barrier: bool) -> Job:
    empty = baseline_of(unit)
    return Job(
        program=loop_text(unit, barrier=barrier),
        baseline=loop_text(empty, barrier=barrier),
        arguments=_types(unit.arguments),
        baseline_arguments=_types(empty.arguments),
        repeats=repeats,
    )


def _types(tensors: Sequence[Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((each.element.name, each.shape) for each in tensors)
