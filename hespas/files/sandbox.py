"""Isolated child process for native parsers: a crash, an endless loop or a memory bomb becomes an error
message.

The child runs one job after another. See :mod:`hespas.files.processes` for its isolation.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from hespas.files.limits import limits
from hespas.files.processes import ChildEndedError, ChildNotStartedError, Session, isolated_python
from hespas.files.trust import untrusted_limits
from hespas.graph.errors import HespasError, InvariantError, UnsupportedError, clipped

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


_READY = {"status": "ready"}
"""First line that a child writes, when it is ready for jobs."""

_JOBS_OF_A_CHILD = 500

_MOST_WRITTEN_BYTES = 1 << 26

_ALL = 1 << 62

_YEAR_S = 31_536_000

_STATM = Path("/proc/self/statm")


class Allowance(NamedTuple):
    """Resource limits of a child process for one input. ``parser_bytes`` is the memory that the parser may
    allocate, and ``parser_cpu_s`` its CPU time. ``total_bytes``, ``cpu_s`` and ``wall_s`` limit the whole
    child process.
    """

    parser_bytes: int
    total_bytes: int
    cpu_s: int
    wall_s: float
    parser_cpu_s: float


def allowance(size: int) -> Allowance:
    """Return the limits of a child process for an input of ``size`` bytes.

    A parser gets 150 MiB and 64 bytes per byte (200,000 operations with distinct locations take 39 bytes per
    byte of bytecode). The total is 1 GB and 20 bytes per byte (calls can expand a small program to a large
    graph). CPU time: 1.5 s for a parser, 6 s in total, plus a second per 200 kB (the slowest known program
    takes a second for 3 MB; parsers loop forever on some damaged bytes). Inputs smaller than
    ``trusted_bytes`` get the limits of that size. An untrusted input gets a part of the limits of the
    command.
    """
    bounds, untrusted = limits(), untrusted_limits()
    if untrusted is not None:
        seconds, size_bytes = untrusted.cpu_s / 4, untrusted.memory_bytes
        return Allowance(size_bytes // 2, size_bytes, ceil(seconds), 60.0 + 20.0 * seconds, seconds)
    size = max(size, bounds.trusted_bytes)
    parser = bounds.parser_bytes + 64 * size
    cpu_s = bounds.program_cpu_s + size // 200_000 + 1
    return Allowance(
        parser_bytes=min(parser, _ALL),
        total_bytes=min(max(bounds.program_bytes + 20 * size, parser), _ALL),
        cpu_s=min(cpu_s, _YEAR_S),
        # Only for a child that waits forever: CPU time limits the rest, independent of the machine's load.
        wall_s=120.0 + 20.0 * min(cpu_s, _YEAR_S),
        parser_cpu_s=min(bounds.parser_cpu_s + size / 200_000, _YEAR_S),
    )


class ParserFailedError(Exception):
    """Error of a native parser that failed on an input. The message describes the end of the parser's
    process: ``makes XLA end with SIGSEGV``.
    """


class ParserMemoryError(Exception):
    """Error in a child process whose parser exceeded :func:`parser_memory`."""


@contextmanager
def bounded_memory(size_bytes: int) -> Generator[None]:
    """Limit the growth of the memory of the process to ``size_bytes`` inside the block, for native parsers of
    untrusted bytes.

    A parser can reserve gigabytes for a damaged count. Exceeding the limit raises ``MemoryError`` or ends the
    process. Nothing is limited on systems other than Linux, which do not report the address space of a
    process.
    """
    if not _STATM.exists():
        yield
        return
    import resource

    taken = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    with _resource_limit(resource.RLIMIT_AS, taken + size_bytes):
        yield


@contextmanager
def _resource_limit(kind: int, most: int) -> Generator[None]:
    """Within the block, set a resource limit of the operating system to ``most``, unless it is already
    lower.
    """
    import resource

    before, hard = resource.getrlimit(kind)
    limits = [limit for limit in (before, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([most, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


@contextmanager
def parser_memory(size_bytes: int) -> Generator[None]:
    """Apply :func:`bounded_memory` to a native parser. Raises :class:`ParserMemoryError` beyond it."""
    try:
        with bounded_memory(size_bytes):
            yield
    except MemoryError as error:
        raise ParserMemoryError from error


@contextmanager
def parser_time(size: int) -> Generator[None]:
    """Limit the CPU time of a native parser in a child process, for an input of ``size`` bytes.

    The system ends the process when it exceeds the limit.
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
    """Limit the further CPU time of the process within the block. The system ends the process beyond it."""
    if sys.platform == "win32":
        yield
        return
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    used = int(usage.ru_utime + usage.ru_stime) + 1
    with _resource_limit(resource.RLIMIT_CPU, used + cpu_s):
        yield


def main() -> int:
    """Run the child process: read jobs from standard input and write each answer to the original standard
    output.

    Output of libraries is discarded.
    """
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if sys.platform != "win32":  # no core dumps, and no endless messages
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        is_unlimited = most == resource.RLIM_INFINITY
        size = _MOST_WRITTEN_BYTES if is_unlimited else min(_MOST_WRITTEN_BYTES, most)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    jobs = sys.stdin.buffer
    _send(answers, _READY)
    while head := jobs.readline():
        job = json.loads(head)
        data = jobs.read(job["size"])
        if len(data) < job["size"]:
            return 0  # the parent has ended
        status, answer = _run_job(job, data)
        _send(answers, {"status": status, "size": len(answer)}, answer)
    return 0


def _run_job(job: Mapping[str, Any], data: bytes) -> tuple[str, bytes]:
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
        # Other faults of the input are reported by its reader.
        return ("memory" if isinstance(error.__cause__, MemoryError) else "done"), b""
    except Exception as error:  # the parent reports it as a bug of this package
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return "bug", text.encode("utf-8", "backslashreplace")


def _send(stream: BinaryIO, head: Mapping[str, object], data: bytes = b"") -> None:
    stream.write(json.dumps(head).encode() + b"\n" + data)
    stream.flush()


def run_sandboxed(task: str, data: bytes, parser: str, *arguments: str) -> bytes:
    """Call a function on untrusted input in a child process, and return its answer.

    ``task`` is ``package.module:function``. The function is called with the input ``data``, the bytes that
    its parser may allocate, and ``arguments``. Raises :class:`ParserFailedError` if it crashes, hangs or
    exceeds :func:`allowance`; the message names ``parser`` as the cause. Raises ``UnsupportedError`` if the
    child does not start, because input is never parsed outside of it.

    The child is reused for the next input, because starting it takes longer than reading most programs.
    """
    granted = allowance(len(data))
    job = {
        "task": task,
        "size": len(data),
        "arguments": arguments,
        "cpu_s": granted.cpu_s,
        "parser_bytes": granted.parser_bytes,
        "total_bytes": granted.total_bytes,
    }
    try:
        line, answer = _CHILD.request(json.dumps(job).encode(), data, time_s=granted.wall_s)
    except ChildNotStartedError as error:
        raise UnsupportedError(
            f"the child process for {parser} does not start: {error}",
            hint="check the installation (python -m pip check), and the limits of the shell (ulimit -a)",
        ) from error
    except TimeoutError:
        raise ParserFailedError(f"keeps {parser} busy without end") from None
    except ChildEndedError as error:
        raise ParserFailedError(_failure(error.status, parser, granted)) from None
    status = json.loads(line)["status"]
    if status == "done":
        return answer
    if status == "bug":
        raise InvariantError(f"in the process that parses programs: {answer.decode('utf-8')}")
    most = granted.parser_bytes if status == "parser-memory" else granted.total_bytes
    consumer = parser if status == "parser-memory" else "its reader"
    raise ParserFailedError(f"makes {consumer} ask for more than {most:,} bytes of memory")


def _failure(status: int, parser: str, granted: Allowance) -> str:
    if status >= 0:
        return f"makes {parser} end its process with status {status}"
    number = signal.Signals(-status)
    if sys.platform != "win32" and number is signal.SIGPROF:
        return f"keeps {parser} busy for more than {granted.parser_cpu_s:.3g} s"
    if sys.platform != "win32" and number is signal.SIGXCPU:
        return f"keeps {parser} and its reader busy for more than {granted.cpu_s} s"
    return f"makes {parser} end with {number.name}"


def _unexpected(greeting: bytes) -> str:
    return "" if json.loads(greeting) == _READY else f"unexpected answer {clipped(repr(greeting))}"


_CHILD = Session(
    lambda: isolated_python("hespas.files.sandbox"),
    _unexpected,
    # One thread: pools reserve address space per thread, and parsers do not use them.
    environment={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    most_requests=_JOBS_OF_A_CHILD,
)


@atexit.register
def end_child() -> None:
    """End the running child process, if any. The next input starts a new one."""
    _CHILD.end()
