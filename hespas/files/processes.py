"""Child processes: a command that runs to its end, a session that answers requests, and a pool of workers.

:func:`run` limits the time and the output of a command. :class:`Session` keeps a child for several requests.
:func:`pool` maps a function over tasks. A child limits its own memory
(:func:`hespas.files.sandbox.bounded_memory`) and inherits the limits of untrusted inputs.

A child never runs code from its working folder: it is isolated (``python -I``: no current folder, no
``PYTHON*`` variables, no start-up files of the user), works in ``/``, imports modules from the same locations
as its parent, and ends with its parent. Programs that the user names keep their own libraries.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import RLock, current_thread
from time import monotonic, sleep
from typing import IO, Literal, NamedTuple, TypeVar

from hespas.files.trust import permit_programs, programs_allowed
from hespas.graph.errors import (
    FormatError,
    HespasError,
    InvariantError,
    UnsupportedError,
    UsageError,
    clipped,
)
from hespas.graph.progress import Progress

__all__ = [
    "ROOT",
    "ChildEndedError",
    "ChildNotStartedError",
    "Ended",
    "Session",
    "clean_environment",
    "decode_error",
    "die_with_parent",
    "encode_error",
    "isolated_python",
    "isolated_script",
    "killing_descendants",
    "pool",
    "run",
    "tied_to_parent",
]

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_PACKAGE = Path(__file__).parents[1]

ROOT = Path(os.sep).resolve()
"""Working folder of child processes, where other users cannot put files that a child would find by a
relative path.
"""

_MOST_OUTPUT_BYTES = 1 << 30
_KEPT_BYTES = 16 << 20
_LISTED_CHARACTERS = 2000
_POLL_S = 0.01
_MOST_POLL_MS = (1 << 31) - 1
_START_S = 300.0

_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl(2)."""

_START = """
import json, os, sys
package, paths, parent, module = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
sys.path[:] = paths
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location(
    "hespas", os.path.join(package, "__init__.py"), submodule_search_locations=[package])
sys.modules["hespas"] = loaded = module_from_spec(spec)
spec.loader.exec_module(loaded)
from importlib import import_module
import_module("hespas.files.processes").die_with_parent(parent)
sys.argv[:] = [module, *sys.argv[5:]]
sys.exit(import_module(module).main())
"""
"""Code that starts a child. It loads the package from its own folder, which is not on the child's path,
because other modules may be next to the package.
"""

_WITHOUT_CURRENT_FOLDER = "import sys\nsys.path[:] = [path for path in sys.path if path]\n"

_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
if memory_bytes := int(sys.argv[2]):
    import resource
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or memory_bytes < hard:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[3]} does not start: {error.strerror}\\n")
    sys.exit(127)
"""


def _import_path() -> list[str]:
    """Return the import path of this process for a child. The current folder is left out, unless
    ``PYTHONPATH`` has its absolute path.

    Relative entries of ``PYTHONPATH`` are ignored, because they depend on the working folder.
    """
    try:
        current = os.path.realpath(os.getcwd())  # noqa: PTH109 - a string is compared
    except OSError:  # removed
        current = ""
    variable = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    trusted = [path for path in variable.split(os.pathsep) if Path(path).is_absolute()]
    is_trusted = current in map(os.path.realpath, trusted)
    return [
        path
        for path in sys.path
        if Path(path).is_absolute() and (is_trusted or os.path.realpath(path) != current)
    ]


def _executable() -> str:
    if not sys.executable:
        raise UnsupportedError(
            "this Python cannot start a child process, which native parsers and compilers need",
            hint="run Python itself, not embedded in another program",
        )
    return sys.executable


def isolated_python(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main()`` of ``module`` (of this package) in a new Python process. The
    result of ``main()`` is the exit status.

    Raises ``UnsupportedError`` if this Python cannot start a child process.
    """
    paths = json.dumps(_import_path())
    return [_executable(), "-I", "-c", _START, str(_PACKAGE), paths, str(os.getpid()), module, *arguments]


def isolated_script(script: str, *arguments: str, python: str = "") -> list[str]:
    """Return the command that runs a script in the interpreter ``python`` or, if that is empty, in this
    Python with its import path.

    Another interpreter uses the packages that its user has installed (``-I`` would hide them) but not the
    environment variables of this one. The working folder is removed from its import path.
    """
    if python:
        try:
            program = str(Path(python).absolute()) if Path(python).name != python else python
        except OSError as error:  # the working folder was removed
            raise UsageError(
                f"the current folder cannot be determined: {error.strerror}",
                path=python,
                hint="change to an existing folder",
            ) from error
        return [program, "-E", "-c", _WITHOUT_CURRENT_FOLDER + script, *arguments]
    prelude = f"import sys\nsys.path[:] = {_import_path()!r}\n"
    return [_executable(), "-I", "-c", prelude + script, *arguments]


def tied_to_parent(command: Sequence[str], memory_bytes: int = 0) -> list[str]:
    """Return a command that runs ``command``, and that the system kills when this process ends (Linux).

    With ``memory_bytes``, the system limits the address space to that, and writes no core file. The command
    ends with status 127 if its program does not exist.
    """
    return [_executable(), "-I", "-S", "-c", _TIED, str(os.getpid()), str(memory_bytes), *command]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without variables of Python, plus ``extra``."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**variables, **(extra or {})}


class Ended(NamedTuple):
    """Result of a command that has ended.

    ``status`` is the exit status (negative: the signal that ended the command). ``stopped`` is the limit that
    stopped it (empty: it ended without being stopped; ``done``: the caller had its result). ``errors`` are
    the last 16 MiB of its standard error.
    """

    status: int
    stopped: Literal["", "time", "output", "done"]
    errors: bytes

    def describe(self) -> str:
        """Return a description of the end of the command with its last error message, such as ``ends with
        status 3: ...``.

        If a native library failed a check, the message is that check and not the stack trace after it.
        """
        if self.stopped == "output":
            return "prints messages without end"
        lines = [line.strip() for line in self.errors.decode("utf-8", "replace").splitlines()]
        lines = [line for line in lines if line]
        marks = ("Check failed", "LLVM ERROR", "ssertion")
        fatal = [
            line
            for line in lines
            if (line[:1] == "F" and line[1:5].isdigit()) or any(mark in line for mark in marks)
        ] or lines[-1:]
        how = f"ends with status {self.status}"
        if self.status < 0:
            how = f"crashes with {signal.Signals(-self.status).name}"
        return f"{how}: {clipped(fatal[-1])}" if fatal else how


def run(
    command: Sequence[str],
    *,
    time_s: float,
    environment: Mapping[str, str],
    folder: Path | None = ROOT,
    data: bytes = b"",
    output: IO[bytes] | None = None,
    with_errors: bool = False,
    output_bytes: int = _MOST_OUTPUT_BYTES,
    is_done: Callable[[], bool] | None = None,
) -> Ended:
    """Run a command in ``folder`` (None: the current one) until it ends, for at most ``time_s`` seconds.

    ``data`` is its standard input. Its standard output is written to ``output`` (None: discarded). With
    ``with_errors`` its standard error is written to ``output`` too. The command is stopped when the two
    streams together exceed ``output_bytes``, and as soon as ``is_done()`` returns True. Processes that it
    started are killed with it.

    Raises ``OSError`` if the command cannot be started.
    """
    with TemporaryFile() as given, TemporaryFile() as errors:
        if data:
            given.write(data)
            given.seek(0)
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=given if data else subprocess.DEVNULL,
            stdout=output or subprocess.DEVNULL,
            stderr=subprocess.STDOUT if with_errors else errors,
            start_new_session=True,
        )
        written = [stream.fileno() for stream in (output, errors) if stream is not None]
        end_s = monotonic() + time_s
        stopped: Literal["", "time", "output", "done"] = ""
        try:
            while process.poll() is None and not stopped:
                if is_done is not None and is_done():
                    stopped = "done"
                elif monotonic() >= end_s:
                    stopped = "time"
                elif sum(os.fstat(handle).st_size for handle in written) > output_bytes:
                    stopped = "output"  # it must not fill the disk
                else:
                    sleep(_POLL_S)
        finally:  # also on an interrupt; processes that it has started end as well
            if sys.platform == "win32":
                process.kill()
            else:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        size = errors.seek(0, os.SEEK_END)
        errors.seek(max(size - _KEPT_BYTES, 0))
        return Ended(process.returncode, stopped, errors.read())


class ChildNotStartedError(Exception):
    """Error of a child process that did not start; the message has the reason."""


class ChildEndedError(Exception):
    """Error of a child process that ended or gave no valid answer. ``status`` is its exit status (negative: a
    signal), ``errors`` the text of its standard error.
    """

    def __init__(self, status: int, errors: str) -> None:
        super().__init__(status, errors)
        self.status, self.errors = status, errors


class Session:
    """Child process that answers one request after another.

    The child starts with the first request. A new child is started after a failure, after ``most_requests``,
    and in a forked process. A request is a line of text, followed by bytes if the child expects them. An
    answer is a line with a JSON object, followed by as many bytes as its ``size`` states (0 if absent).
    Before the first request the child writes one line. ``greet(line)`` returns an empty text if that line is
    as expected, else a description of the problem.
    """

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        greet: Callable[[bytes], str],
        *,
        environment: Mapping[str, str] | None = None,
        most_requests: int = sys.maxsize,
    ) -> None:
        self._command, self._greet = command, greet
        self._environment, self._most_requests = environment, most_requests
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._lock = RLock()
        self._starter = current_thread()
        self._owner = self._requests = 0
        self._unread = b""

    def start(self) -> None:
        """Start the child, unless it is running. Raises :class:`ChildNotStartedError`."""
        with self._lock:
            if self._process is not None:
                is_running = self._process.poll() is None  # always False in a forked process
                if is_running and self._owner == os.getpid() and self._requests < self._most_requests:
                    return
                self.end()
            self._owner, self._starter, self._requests = os.getpid(), current_thread(), 0
            try:
                self._errors = TemporaryFile()  # noqa: SIM115 - lives as long as the process
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    cwd=ROOT,
                    env=clean_environment(self._environment),
                )
            except OSError as error:
                self.end()
                raise ChildNotStartedError(str(error)) from error
            try:
                problem = self._greet(self._answer(monotonic() + _START_S)[0])
            except (EOFError, OSError, ValueError) as error:
                lines = self._error_text().splitlines()
                problem = ": ".join([type(error).__name__, *lines[-1:]])
            except BaseException:
                self.end()
                raise
            if problem:
                self.end()
                raise ChildNotStartedError(problem)

    def request(self, line: bytes, data: bytes = b"", *, time_s: float) -> tuple[bytes, bytes]:
        """Return the line and the bytes of the answer to a request.

        Raises :class:`ChildNotStartedError`, :class:`ChildEndedError`, and ``TimeoutError`` after ``time_s``.
        """
        with self._lock:
            self.start()
            self._requests += 1
            process, starter = self._process, self._starter
            try:
                if process is None or process.stdin is None:
                    raise EOFError
                process.stdin.write(line + b"\n" + data)
                process.stdin.flush()
                return self._answer(monotonic() + time_s)
            except TimeoutError:
                self.end()
                raise
            except (EOFError, OSError, ValueError):
                status, errors = self.end()
                if status == -signal.SIGKILL and not starter.is_alive():
                    # Linux kills a child together with the thread that started it.
                    return self.request(line, data, time_s=time_s)
                raise ChildEndedError(status, errors) from None
            except BaseException:
                self.end()  # interrupted: its late answer must not reach the next request
                raise

    def _answer(self, end_s: float) -> tuple[bytes, bytes]:
        while b"\n" not in self._unread:
            self._unread += self._more(end_s)
        line, _, rest = self._unread.partition(b"\n")
        parts = [rest]
        missing = json.loads(line).get("size", 0) - len(rest)
        while missing > 0:
            parts.append(self._more(end_s))
            missing -= len(parts[-1])
        self._unread = b""
        return line, b"".join(parts)

    def _more(self, end_s: float) -> bytes:
        if self._process is None or self._process.stdout is None:
            raise EOFError
        handle = self._process.stdout.fileno()
        if sys.platform != "win32":  # Windows can poll sockets only
            waiting = select.poll()
            waiting.register(handle, select.POLLIN)
            if not waiting.poll(min(max(1000 * (end_s - monotonic()), 0.0), _MOST_POLL_MS)):
                raise TimeoutError
        part = os.read(handle, 1 << 20)
        if not part:
            raise EOFError
        return part

    def _error_text(self) -> str:
        """Return the end of the child's standard error."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", "replace").strip()[-_LISTED_CHARACTERS:]

    def end(self) -> tuple[int, str]:
        """Kill the child unless it has ended; return its exit status and the end of its standard error."""
        with self._lock:
            process, status, text = self._process, 0, ""
            if process is not None:
                if self._owner == os.getpid():
                    try:
                        while True:
                            self._more(monotonic())
                    except TimeoutError:
                        pass  # it is still running
                    except (EOFError, OSError):  # it has closed its standard output
                        with suppress(subprocess.TimeoutExpired):
                            process.wait(_START_S)
                process.kill()
                status = process.wait()
                text = self._error_text()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        with suppress(OSError):
                            stream.close()
            if self._errors is not None:
                self._errors.close()
            self._process = self._errors = None
            self._unread = b""
            return status, text


def pool(
    work: Callable[[_Task], _Result],
    tasks: Sequence[_Task],
    jobs: int,
    *,
    progress: Progress | None = None,
    finished: int = 0,
) -> Iterator[tuple[int, _Result]]:
    """Run ``work`` on each task in ``jobs`` processes (1: this one). Yield the index and the result of each
    task as it finishes.

    ``progress`` receives the numbers of finished and of all tasks, including ``finished`` earlier ones, after
    the caller has used a result. Closing the iterator cancels the tasks that have not started. Workers have
    the permissions of this process and end with it. They are spawned, because forking a process with threads
    is unsafe.
    """
    total = finished + len(tasks)
    with _results(work, tasks, jobs) as results:
        for done, result in enumerate(results, finished + 1):
            yield result
            if progress:
                progress(done, total)


@contextmanager
def _results(
    work: Callable[[_Task], _Result], tasks: Sequence[_Task], jobs: int
) -> Generator[Iterator[tuple[int, _Result]]]:
    jobs = min(jobs, len(tasks), os.cpu_count() or 1)
    try:
        Path.cwd()  # a spawned process starts in the current folder, which must exist
    except OSError:
        jobs = 1
    if jobs < 2:
        yield enumerate(map(work, tasks))
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    state = (os.getpid(), programs_allowed())
    with (
        _safe_spawning(),
        ProcessPoolExecutor(jobs, get_context("spawn"), _start_worker, state) as executor,
    ):
        index_of = {executor.submit(work, task): index for index, task in enumerate(tasks)}
        try:
            yield ((index_of[future], future.result()) for future in as_completed(index_of))
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _safe_spawning() -> Generator[None]:
    """Prevent processes that ``multiprocessing`` starts within the block from importing from the current
    folder.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _start_worker(parent: int, allowed: bool) -> None:
    """Initialise a worker process: it ends with its parent, and may run programs if ``allowed``."""
    die_with_parent(parent)
    permit_programs(allowed)


def die_with_parent(parent: int) -> None:
    """Let the system end this process when its parent process ``parent`` ends.

    Only Linux guarantees this. On other systems a child ends at the end of its input or of its time limit.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


_ERROR_CLASSES: Mapping[str, type[HespasError]] = {
    kind.__name__: kind for kind in (FormatError, InvariantError, UnsupportedError, UsageError)
}


def encode_error(error: HespasError) -> dict[str, str]:
    """Return an error as texts for the parent process: class, message, hint and position (empty if
    unknown).
    """
    kind = next((entry for entry in _ERROR_CLASSES.values() if isinstance(error, entry)), UnsupportedError)
    return {
        "kind": kind.__name__,
        "message": error.text,
        "hint": error.hint or "",
        "position": error.position or "",
    }


def decode_error(texts: Mapping[str, str]) -> HespasError:
    """Return the error that a child process encoded with :func:`encode_error`."""
    kind = _ERROR_CLASSES.get(texts["kind"], UnsupportedError)
    return kind(texts["message"], hint=texts["hint"] or None, position=texts.get("position") or None)


@contextmanager
def killing_descendants() -> Generator[None]:
    """Kill the processes that were started inside the block, and their descendants, if the block is
    interrupted.

    Only Linux lists descendants; on other systems they continue.
    """
    before = _descendants()
    try:
        yield
    except KeyboardInterrupt:
        for pid in _descendants() - before:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        raise


def _descendants() -> set[int]:
    """Return the process ids of all descendants of this process."""
    descendants: set[int] = set()
    pending = [os.getpid()]
    while pending:
        folder, tasks = Path(f"/proc/{pending.pop()}/task"), list[Path]()
        with suppress(OSError):  # the process has ended, or the system has no /proc
            tasks = list(folder.iterdir())
        for task in tasks:
            with suppress(OSError):
                children = set(map(int, (task / "children").read_text().split()))
                pending += children - descendants
                descendants |= children
    return descendants
