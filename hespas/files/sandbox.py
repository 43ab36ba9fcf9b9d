"""Isolated child processes: what crashes, never ends or takes all memory there is a message here.

A child never runs code from where it is started: it is isolated (``python -I``: no current folder, no
``PYTHON*`` variables, no start-up files of the user), works in ``/``, takes what the parent imports from
where the parent does, and ends with its parent, however that ends. Programs that the user names have their
own libraries, and work in a folder that nobody else can write to.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock, current_thread
from time import monotonic
from typing import IO, Any, BinaryIO, NamedTuple, cast

from hespas.files.limits import limits
from hespas.files.processes import ROOT, clean_environment, isolated_python
from hespas.files.trust import untrusted_limits
from hespas.graph.errors import HespasError, InvariantError, UnsupportedError

__all__ = [
    "Allowance",
    "ParserFailedError",
    "ParserMemoryError",
    "allowance",
    "bounded_memory",
    "end_child",
    "main",
    "parser_memory",
    "parser_time",
    "run_sandboxed",
]


_START_S = 300.0

_JOBS_OF_A_CHILD = 500

_LAST_WORDS = 500

_MOST_WRITTEN_BYTES = 1 << 26

_ALL = 1 << 62

_YEAR_S = 31_536_000

_STATM = Path("/proc/self/statm")


class Allowance(NamedTuple):
    """What a child may use for one input: bytes its parser may ask for, bytes in all, CPU and wall time in
    all, CPU time of its parser.
    """

    parser_bytes: int
    total_bytes: int
    cpu_s: int
    wall_s: float
    parser_cpu_s: float


def allowance(size: int) -> Allowance:
    """For an input of ``size`` bytes: a parser gets 150 MiB and 64 bytes a byte (200,000 operations, each at
    a place of its own, take 39 for each byte of their bytecode), all of it 1 GB and 20 bytes a byte (calls
    may make a small program a large graph). CPU time: 1.5 s for a parser, 6 s in all, and a second more for
    every 200 kB (the slowest program seen takes a second for 3 MB; parsers loop without end on some damaged
    bytes). An input of any size gets what one of ``trusted_bytes`` would; an untrusted one a share of the
    limits of a command.
    """
    bounds, stranger = limits(), untrusted_limits()
    if stranger is not None:
        seconds, size_bytes = stranger.cpu_s / 4, stranger.memory_bytes
        return Allowance(size_bytes // 2, size_bytes, ceil(seconds), 60.0 + 20.0 * seconds, seconds)
    size = max(size, bounds.trusted_bytes)
    parser = bounds.parser_bytes + 64 * size
    cpu_s = bounds.program_cpu_s + size // 200_000 + 1
    return Allowance(
        parser_bytes=min(parser, _ALL),
        total_bytes=min(max(bounds.program_bytes + 20 * size, parser), _ALL),
        cpu_s=min(cpu_s, _YEAR_S),
        # This only ends a child that waits forever: CPU time bounds the rest, however busy the machine is.
        wall_s=120.0 + 20.0 * min(cpu_s, _YEAR_S),
        parser_cpu_s=min(bounds.parser_cpu_s + size / 200_000, _YEAR_S),
    )


class ParserFailedError(Exception):
    """A child did not survive an input; the message says how it ended: ``makes XLA end with SIGSEGV``."""


class ParserMemoryError(Exception):
    """In a child: its parser asked for more than :func:`parser_memory` allows."""


@contextmanager
def bounded_memory(size_bytes: int) -> Generator[None]:
    """Within, the process may grow by so many bytes: parsers reserve gigabytes for a damaged count. What goes
    beyond raises ``MemoryError`` or ends the process.

    Without effect where the system does not say how much address space the process has (only Linux does).
    """
    if not _STATM.exists():
        yield
        return
    import resource

    taken = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    with _bounded(resource.RLIMIT_AS, taken + size_bytes):
        yield


@contextmanager
def _bounded(kind: int, most: int) -> Generator[None]:
    """Within, a limit of the system is ``most``, or what it was where that is less."""
    import resource

    before, hard = resource.getrlimit(kind)
    stated = [limit for limit in (before, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([most, *stated]), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


@contextmanager
def parser_memory(size_bytes: int) -> Generator[None]:
    """:func:`bounded_memory` around a native parser. Raises :class:`ParserMemoryError` beyond it."""
    try:
        with bounded_memory(size_bytes):
            yield
    except MemoryError as error:
        raise ParserMemoryError from error


@contextmanager
def parser_time(size: int) -> Generator[None]:
    """Around a native parser, in a child: what an input of ``size`` bytes may take of the processor; then the
    system ends the process.
    """
    if sys.platform == "win32":
        yield
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, allowance(size).parser_cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def _bounded_time(cpu_s: int) -> Generator[None]:
    """Within, the process may use so much more CPU time; then the system ends it."""
    if sys.platform == "win32":
        yield
        return
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    with _bounded(resource.RLIMIT_CPU, used + cpu_s):
        yield


def main() -> int:
    """The child: jobs on standard input, an answer for each on what was standard output; what libraries print
    goes nowhere.
    """
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    _no_files_left()
    jobs = sys.stdin.buffer
    _say(answers, {"status": "ready"})
    while head := jobs.readline():
        job = json.loads(head)
        data = jobs.read(job["size"])
        if len(data) < job["size"]:
            return 0  # the parent is gone
        status, answer = _done(job, data)
        _say(answers, {"status": status, "size": len(answer)}, answer)
    return 0


def _done(job: Mapping[str, Any], data: bytes) -> tuple[str, bytes]:
    module, _, name = str(job["task"]).partition(":")
    task = cast("Callable[..., bytes]", getattr(import_module(module), name))
    try:
        with _bounded_time(job["cpu_s"]), bounded_memory(job["total_bytes"]):
            return "done", task(data, job["parser_bytes"], *job["arguments"])
    except ParserMemoryError:
        return "parser-memory", b""
    except MemoryError:
        return "memory", b""
    except HespasError as error:
        # What else is wrong with the input is told by whoever reads it.
        return ("memory" if isinstance(error.__cause__, MemoryError) else "done"), b""
    except Exception as error:  # a bug of ours is the parent's to tell, not a fault of the input
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return "bug", text.encode("utf-8", "backslashreplace")


def _no_files_left() -> None:
    """No core dumps, and no endless messages."""
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    at_most = _MOST_WRITTEN_BYTES if most == resource.RLIM_INFINITY else min(_MOST_WRITTEN_BYTES, most)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_most, most))


def _say(stream: BinaryIO, head: Mapping[str, object], data: bytes = b"") -> None:
    stream.write(json.dumps(head).encode() + b"\n" + data)
    stream.flush()


def run_sandboxed(task: str, data: bytes, parser: str, *arguments: str) -> bytes:
    """What ``task`` (``package.module:function``, called with the input, the bytes its parser may ask for and
    ``arguments``) answers to ``data`` in a child.

    Raises :class:`ParserFailedError` where it crashes, hangs or takes more than :func:`allowance` says;
    ``parser`` is whose fault that is. Raises ``UnsupportedError`` where the child does not
    start: nothing is then parsed without.

    The child is kept for the next input: starting it takes longer than most programs take to read.
    """
    granted = allowance(len(data))
    head = {
        "task": task,
        "size": len(data),
        "arguments": arguments,
        "cpu_s": granted.cpu_s,
        "parser_bytes": granted.parser_bytes,
        "total_bytes": granted.total_bytes,
    }
    with _LOCK:
        status, answer = _answer(head, data, parser, granted)
    if status == "done":
        return answer
    if status == "bug":
        raise InvariantError(f"in the process that reads programs: {answer.decode('utf-8')}")
    most = granted.parser_bytes if status == "parser-memory" else granted.total_bytes
    who = parser if status == "parser-memory" else "its reader"
    raise ParserFailedError(f"makes {who} ask for more than {most:,} bytes of memory")


def _answer(head: Mapping[str, object], data: bytes, parser: str, granted: Allowance) -> tuple[str, bytes]:
    child = _Child.ready(parser)
    try:
        return child.ask(head, data, granted.wall_s)
    except TimeoutError:
        child.end()
        raise ParserFailedError(f"keeps {parser} busy without end") from None
    except (EOFError, OSError):
        status = child.end()
        if status == -signal.SIGKILL and not child.starter.is_alive():
            # Linux ends a child with the thread that started it.
            return _answer(head, data, parser, granted)
        raise ParserFailedError(_fate(status, parser, granted)) from None
    except BaseException:
        child.end()  # interrupted: what it answers now is no answer to the next job
        raise


def _fate(status: int, parser: str, granted: Allowance) -> str:
    if status >= 0:
        return f"makes {parser} end its process with status {status}"
    number = signal.Signals(-status)
    if sys.platform != "win32" and number is signal.SIGPROF:
        return f"keeps {parser} busy for more than {granted.parser_cpu_s:.3g} s"
    if sys.platform != "win32" and number is signal.SIGXCPU:
        return f"keeps {parser} and its reader busy for more than {granted.cpu_s} s"
    return f"makes {parser} end with {number.name}"


def _not_started(parser: str, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"the process that {parser} runs in does not start: {problem}",
        hint="check the installation (python -m pip check), and the limits of the shell (ulimit -a)",
    )


_LOCK = Lock()


class _Child:
    """The process that does the jobs of this one; started when needed."""

    present: _Child | None = None

    def __init__(self, parser: str) -> None:
        command = isolated_python("hespas.files.sandbox")
        self.owner = os.getpid()
        self.starter = current_thread()
        self._jobs = 0
        self._unread = b""
        # One thread: a pool reserves address space for each, and is no use to a parser.
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115 - lives as long as the process
        except OSError as error:
            raise _not_started(parser, str(error)) from error
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                cwd=ROOT,
                env=clean_environment(one_thread),
            )
        except OSError as error:
            self._errors.close()
            raise _not_started(parser, str(error)) from error
        try:
            head, _ = self._answer(monotonic() + _START_S)
            problem = "" if head == "ready" else f"it says {head!r}"
        except (EOFError, OSError, ValueError) as error:
            problem = f"{type(error).__name__}{self._last_words()}"
        if problem:
            self.end()
            raise _not_started(parser, problem)

    @classmethod
    def ready(cls, parser: str) -> _Child:
        """The one there is, or a new one. That of a process that forked is not this one's."""
        child = cls.present
        if child is not None:
            is_running = child._process.poll() is None  # in a process that forked, never
            if is_running and child.owner == os.getpid() and child._jobs < _JOBS_OF_A_CHILD:
                return child
            child.end()
        cls.present = _Child(parser)
        return cls.present

    def ask(self, head: Mapping[str, object], data: bytes, wall_s: float) -> tuple[str, bytes]:
        """The answer to a job. Raises ``EOFError`` or ``OSError`` where the process ends instead,
        ``TimeoutError`` after ``wall_s``.
        """
        self._jobs += 1
        if self._process.stdin is None:
            raise EOFError
        _say(cast("BinaryIO", self._process.stdin), head, data)
        return self._answer(monotonic() + wall_s)

    def _answer(self, end_s: float) -> tuple[str, bytes]:
        while b"\n" not in self._unread:
            self._unread += self._more(end_s)
        line, _, rest = self._unread.partition(b"\n")
        head = json.loads(line)
        parts = [rest]
        missing = head.get("size", 0) - len(rest)
        while missing > 0:
            parts.append(self._more(end_s))
            missing -= len(parts[-1])
        self._unread = b""
        return head["status"], b"".join(parts)

    def _more(self, end_s: float) -> bytes:
        if self._process.stdout is None:
            raise EOFError
        handle = self._process.stdout.fileno()
        if sys.platform != "win32":  # there only sockets can be waited for
            waiting = select.poll()
            waiting.register(handle, select.POLLIN)
            if not waiting.poll(max(1000 * (end_s - monotonic()), 0.0)):
                raise TimeoutError
        part = os.read(handle, 1 << 20)
        if not part:
            raise EOFError
        return part

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1][-_LAST_WORDS:]}" if lines else ""

    def end(self) -> int:
        """End the process, if it is this one's; returns its exit status, of its own end where it had one."""
        if type(self).present is self:
            type(self).present = None
        process = self._process
        with suppress(subprocess.TimeoutExpired):
            if self._is_ending():
                process.wait(_START_S)
        process.kill()
        status = process.wait()
        for stream in (process.stdin, process.stdout, self._errors):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        return status

    def _is_ending(self) -> bool:
        """Whether the process has closed its answers."""
        try:
            while True:
                self._more(monotonic())
        except TimeoutError:
            return False
        except (EOFError, OSError):
            return True


@atexit.register
def end_child() -> None:
    """End the child that is kept, if there is one: the next input starts another."""
    child = _Child.present
    if child is not None and child.owner == os.getpid():
        child.end()
