"""Runner of the stages of inputs in a child process, which may crash, hang or use much memory."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import resource
import signal
import struct
import time
import warnings
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from tests.fuzzing.mutate import Input, Kind, mutated
from tests.fuzzing.stages import Judged
from tests.fuzzing.subjects import Subject, warm_up

if TYPE_CHECKING:
    from _typeshed import HasFileno

__all__ = ["Failure", "Job", "Outcome", "fuzz", "judge"]

GROWTH_FACTOR, GROWTH_BYTES = 20, 1 << 30
"""An input may take 20 times its size and 1 GB of address space."""

HARD_LIMIT_S = 120.0
"""For what no alarm interrupts: native code, and waiting for the process that contains it."""

_IN_MEMORY = Path("/dev/shm")
"""Files there cost no wait for a disk; only Linux has it."""

_NOW = struct.Struct("<qd")
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that failed, and the symptom."""

    number: int
    what: str


@dataclass(slots=True)
class Outcome:
    """Results of all inputs: counts by kind of answer, and failures."""

    answers: Counter[str] = field(default_factory=Counter[str])
    failures: list[Failure] = field(default_factory=list[Failure])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Inputs to try: those of ``numbers`` that are made from ``seeds`` with ``seed``."""

    subject: Subject
    seeds: Sequence[Input]
    numbers: range
    seed: int = 0
    kind: Kind = "fields"

    def input(self, number: int) -> Input:
        """One input."""
        return mutated(self.seeds, number, self.seed, self.kind)


def judge(files: Input, subject: Subject, scratch: Path, number: int) -> Judged:
    """Take one input through its stages, in bounded memory and time of the processor."""
    judged, folder = _placed(files, scratch)
    with _bounded(judged.size):
        subject.stages(judged, folder, number)
    return judged


def _placed(files: Input, scratch: Path) -> tuple[Judged, Path]:
    """An input as files in a folder of its own."""
    folder = scratch / "in"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return Judged(sum(map(len, files.values())), scratch / "out"), folder


@contextmanager
def _bounded(size: int) -> Generator[None]:
    """A limit of the address space beyond what the process has."""
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(_STATM.read_text().split()[0]) * resource.getpagesize() if _STATM.exists() else 0
    if taken:
        resource.setrlimit(resource.RLIMIT_AS, (taken + GROWTH_BYTES + GROWTH_FACTOR * size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def fuzz(job: Job) -> Outcome:
    """Try inputs one after the other; a crash or hang of the child costs that input and a new child."""
    warm_up(job.subject)
    outcome = Outcome()
    place = mmap.mmap(-1, _NOW.size)
    watch = _Watch(job, outcome, place)
    with TemporaryDirectory(prefix="hespas-fuzz-", dir=_IN_MEMORY if _IN_MEMORY.exists() else None) as folder:
        at = job.numbers.start
        while at < job.numbers.stop:
            receive, send = os.pipe()
            place[: _NOW.size] = _NOW.pack(at, time.monotonic())
            pid = os.fork()
            if pid == 0:
                os.close(receive)
                _child(job, at, (place, send, Path(folder)))
            os.close(send)
            at = watch.until_the_end(pid, receive)
    return outcome


def _child(job: Job, start: int, channel: tuple[mmap.mmap, int, Path]) -> NoReturn:
    """Try inputs and report each in a line; the place in memory says which one is being tried."""
    place, send, folder = channel
    gc.freeze()  # what the parent left behind may own threads, which are not in this process
    os.fsync = _kept  # what outlives a power cut is not asked here, and is most of the time
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    faulthandler.disable()  # a crash is an answer
    warnings.simplefilter("error")
    try:
        # The process that contains native parsers starts here, so that it is not bounded as an input is.
        judged, place_of_seed = _placed(job.seeds[0], folder)
        job.subject.stages(judged, place_of_seed, 0)
        for number in range(start, job.numbers.stop):
            place[: _NOW.size] = _NOW.pack(number, time.monotonic())
            judged = judge(job.input(number), job.subject, folder, number)
            told = [f"{number}\t{judged.answer!r}\t{what[:400]!r}\n" for what in judged.failures[:4]]
            lines = "".join(told) or f"{number}\t{judged.answer!r}\t\n"
            os.write(send, lines.encode("utf-8", "replace"))
    except BaseException as error:  # of the harness itself
        os.write(send, f"-1\t''\t{f'the harness: {error!r}'[:400]!r}\n".encode("utf-8", "replace"))
    finally:
        os._exit(0)


def _kept(fd: int | HasFileno) -> None:
    del fd


@dataclass(frozen=True, slots=True)
class _Watch:
    """Collector of the answers of children."""

    job: Job
    outcome: Outcome
    place: mmap.mmap

    def until_the_end(self, pid: int, receive: int) -> int:
        """Listen until a child ends, or hangs and is killed; the next number to try."""
        os.set_blocking(receive, False)
        rest, last, hung = b"", -1, False
        while True:
            try:
                chunk = os.read(receive, 1 << 16)
            except BlockingIOError:
                _, since = _NOW.unpack(self.place[: _NOW.size])
                if time.monotonic() - since > HARD_LIMIT_S:
                    os.kill(pid, signal.SIGKILL)
                    hung = True
                time.sleep(0.002)
                continue
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                last = self._collect(line, last)
        os.close(receive)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            return self._crashed(status, hung=hung)
        return last + 1 if last >= self.job.numbers.start else self.job.numbers.stop

    def _crashed(self, status: int, *, hung: bool) -> int:
        """The input that ended a child is a failure."""
        number, _ = _NOW.unpack(self.place[: _NOW.size])
        ended = signal.Signals(os.WTERMSIG(status))
        what = f"the process {'hangs' if hung else f'ends with {ended.name}'}"
        self.outcome.failures.append(Failure(int(number), what))
        self.outcome.answers["failure"] += 1
        return int(number) + 1

    def _collect(self, line: bytes, last: int) -> int:
        """Count a line of a child; the number of the input it speaks of."""
        digits, answer, what = line.decode().split("\t", 2)
        number = int(digits)
        if what:
            self.outcome.failures.append(Failure(number, what.strip("'\"")))
        if number != last:
            self.outcome.answers["failure" if what else answer.strip("'\"")] += 1
        return number if number >= 0 else self.job.numbers.stop
