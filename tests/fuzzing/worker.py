"""Damaged inputs through a reader in a child process, which may crash, hang or grow without harm."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import NoReturn

from hespas import api
from hespas.converters import ReadOptions
from hespas.converters.stablehlo import trial
from hespas.files.sandbox import OUT_OF_MEMORY, bounded_memory
from hespas.graph.errors import FormatError, HespasError, UnsupportedError
from tests.fuzzing.mutate import mutated
from tests.fuzzing.seeds import Reader

__all__ = ["Failure", "Outcome", "fuzz", "judge"]

SECONDS_PER_BYTE = 1 / 100_000
"""A reader may take 1 s per 100 kB, and at least 1 s."""

GROWTH_FACTOR, GROWTH_BYTES = 20, 200 << 20
"""A reader may take 20 times its input and 200 MB."""

HARD_LIMIT_S = 10.0
"""For native code, which no alarm interrupts."""
_NOW = struct.Struct("<qd")
_ALARMED = _NOW.size
"""Where a child notes that the alarm rang in Python, which native code would have kept from ringing."""

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_PLACES: list[mmap.mmap] = []
"""The memory that a child shares with its parent."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that a reader did not bear, and how that showed."""

    number: int
    what: str
    data: bytes


@dataclass(slots=True)
class Outcome:
    """What came of all inputs: counts by kind of answer, and failures."""

    answers: Counter[str] = field(default_factory=Counter[str])
    failures: list[Failure] = field(default_factory=list[Failure])


class _TooSlowError(BaseException):
    """Raised by the alarm, past everything that catches errors."""


def _alarm(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    for place in _PLACES:
        place[_ALARMED] = 1
    raise _TooSlowError


def judge(data: bytes, reader: Reader, folder: Path, *, is_trial: bool = False) -> str:
    """Read one input and look at what it holds; the kind of answer, ``FAILURE: ...`` where it is none that a
    user should get. ``is_trial``: this process stands for the child that contains a native parser.

    Time is that of the processor, so that it does not matter what else the machine does.
    """
    path = folder / f"input{reader.suffix}"
    path.write_bytes(data)
    before = _peak_bytes()
    signal.signal(signal.SIGPROF, _alarm)
    signal.setitimer(signal.ITIMER_PROF, max(1.0, len(data) * SECONDS_PER_BYTE))
    try:
        with bounded_memory(len(data)) if is_trial and reader.format == "hlo" else nullcontext():
            value = api.read(path, format=reader.format, options=ReadOptions(max_bytes=1 << 28))
            api.summarise(value, reader.format)
        answer = "read"
    except (FormatError, UnsupportedError) as error:
        answer = type(error).__name__
        if not error.message or str(error.path) != str(path):
            answer = f"FAILURE: an error without message or path: {error!r}"
    except HespasError as error:
        answer = f"FAILURE: {type(error).__name__}: {error.message}"
    except _TooSlowError:
        answer = f"FAILURE: more than 1 s per 100 kB for {len(data):,} bytes"
    except BaseException as error:  # whatever it is, it is a finding
        answer = f"FAILURE: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _peak_bytes() - before
    if grown > GROWTH_FACTOR * len(data) + GROWTH_BYTES:
        answer = f"FAILURE: {grown:,} bytes of memory for {len(data):,} of input"
    return answer


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(reader: Reader, seeds: Sequence[bytes], numbers: range, seed: int) -> Outcome:
    """Try inputs one after the other; a crash or hang of the child costs that input and a new child."""
    outcome = Outcome()
    place = mmap.mmap(-1, _NOW.size + 1)
    watch = _Watch(reader, seeds, seed, outcome, place)
    with TemporaryDirectory(prefix="hespas-fuzz-") as folder:
        at = numbers.start
        while at < numbers.stop:
            receive, send = os.pipe()
            place[: _NOW.size] = _NOW.pack(at, time.monotonic())
            pid = os.fork()
            if pid == 0:
                os.close(receive)
                _child(reader, seeds, range(at, numbers.stop), seed, (place, send, Path(folder)))
            os.close(send)
            at = watch.until_the_end(pid, receive)
    return outcome


def _child(
    reader: Reader,
    seeds: Sequence[bytes],
    numbers: range,
    seed: int,
    channel: tuple[mmap.mmap, int, Path],
) -> NoReturn:
    """Read inputs and report each in a line; the place in memory says which one is being read."""
    place, send, folder = channel
    _PLACES.append(place)
    gc.freeze()  # what the parent left behind may own threads, which are not in this process
    # Binary programs are tried in a child process, which is this one: no other is started for them.
    sys.executable = ""
    trial.survive = _tried
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    faulthandler.disable()  # a crash is an answer
    try:
        for number in numbers:
            place[: _NOW.size] = _NOW.pack(number, time.monotonic())
            place[_ALARMED] = 0
            data = mutated(seeds, number, seed)
            answer = judge(data, reader, folder, is_trial=reader.is_contained)
            os.write(send, f"{number}\t{answer[:300]!r}\n".encode("utf-8", "replace"))
    finally:
        os._exit(0)


def _tried(data: bytes, path: str) -> None:
    """What :func:`trial.survive` does, in this process."""
    if trial.attempt(data) == OUT_OF_MEMORY:
        raise FormatError("asks for too much memory", path=path)


@dataclass(frozen=True, slots=True)
class _Watch:
    """Collects the answers of children."""

    reader: Reader
    seeds: Sequence[bytes]
    seed: int
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
                last = self._collect(line)
        os.close(receive)
        _, status = os.waitpid(pid, 0)
        return self._crashed(status, hung=hung) if os.WIFSIGNALED(status) else last + 1

    def _crashed(self, status: int, *, hung: bool) -> int:
        """The input that ended a child is a failure, unless the trial process of binary programs contains it:
        a crash, or a hang of native code. A hang of Python is ours.
        """
        number, _ = _NOW.unpack(self.place[: _NOW.size])
        ended = signal.Signals(os.WTERMSIG(status))
        native = not self.place[_ALARMED] if hung else ended in _CRASHES
        if native and self.reader.is_contained:
            self.outcome.answers["crash or hang that the trial process contains"] += 1
        else:
            self._fail(int(number), f"the process {'hangs' if hung else f'ends with {ended.name}'}")
        return int(number) + 1

    def _collect(self, line: bytes) -> int:
        number, _, answer = line.decode().partition("\t")
        if "FAILURE" in answer[:10]:
            self._fail(int(number), answer)
            self.outcome.answers["failure"] += 1
        else:
            self.outcome.answers[answer.strip("'\"")] += 1
        return int(number)

    def _fail(self, number: int, what: str) -> None:
        self.outcome.failures.append(Failure(number, what, mutated(self.seeds, number, self.seed)))
