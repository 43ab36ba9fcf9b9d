"""Child processes"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hespas.files.trust import permit_programs, programs_allowed
from hespas.graph.errors import (
    FormatError,
    HespasError,
    InvariantError,
    UnsupportedError,
    UsageError,
    clipped,
)

__all__ = [
    "ROOT",
    "clean_environment",
    "die_with_parent",
    "end_of",
    "ending_what_it_starts",
    "error_as_text",
    "error_from_text",
    "isolated_python",
    "isolated_script",
    "safe_spawning",
    "start_worker",
    "tied_to_parent",
    "worker_state",
]


_PACKAGE = Path(__file__).parents[1]

ROOT = Path(os.sep).resolve()
"""Where children work: a relative name, or a library, finds nothing of anybody's there."""

_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl(2)."""

_START = """
import json, os, sys
package, paths, parent, module = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
sys.path[:] = paths
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location(
    "hespas", os.path.join(package, "__init__.py"), submodule_search_locations=[package])
sys.modules["hespas"] = found = module_from_spec(spec)
spec.loader.exec_module(found)
from importlib import import_module
import_module("hespas.files.processes").die_with_parent(parent)
sys.argv[:] = [module, *sys.argv[5:]]
sys.exit(import_module(module).main())
"""
"""The package is loaded from its own folder, which never is on the child's path as a whole: other modules
may lie beside it.
"""

_WITHOUT_HERE = "import sys\nsys.path[:] = [path for path in sys.path if path]\n"

_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]} does not start: {error.strerror}")
"""


def _import_path() -> list[str]:
    """Where this process imports from, without the current folder: its files are nobody's libraries, unless
    ``PYTHONPATH`` spells it out. A relative entry there is another folder wherever one stands.
    """
    try:
        here = os.path.realpath(os.getcwd())  # noqa: PTH109 - a string is compared
    except OSError:  # removed
        here = ""
    stated = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    trusted = [path for path in stated.split(os.pathsep) if Path(path).is_absolute()]
    is_trusted = here in map(os.path.realpath, trusted)
    return [
        path
        for path in sys.path
        if Path(path).is_absolute() and (is_trusted or os.path.realpath(path) != here)
    ]


def _executable() -> str:
    if not sys.executable:
        raise UnsupportedError(
            "this Python cannot start another one, which native parsers and compilers run in",
            hint="run Python itself, not embedded in another program",
        )
    return sys.executable


def isolated_python(module: str, *arguments: str) -> list[str]:
    """The command that calls ``main()`` of a module of this package; what it returns is the exit status.

    Raises ``UnsupportedError`` where this Python cannot start another.
    """
    paths = json.dumps(_import_path())
    return [_executable(), "-I", "-c", _START, str(_PACKAGE), paths, str(os.getpid()), module, *arguments]


def isolated_script(script: str, *arguments: str, python: str = "") -> list[str]:
    """The command that runs a text in ``python``, or in this one with all that it imports.

    Another Python keeps the packages that its user has installed (``-I`` would hide them) and none of the
    variables of this one; the folder it is started in is taken from its path.
    """
    if python:
        try:
            program = str(Path(python).absolute()) if Path(python).name != python else python
        except OSError as error:  # the folder that it starts from is gone
            raise UsageError(
                f"the current folder cannot be told: {error.strerror}",
                path=python,
                hint="change to a folder that is there",
            ) from error
        return [program, "-E", "-c", _WITHOUT_HERE + script, *arguments]
    prelude = f"import sys\nsys.path[:] = {_import_path()!r}\n"
    return [_executable(), "-I", "-c", prelude + script, *arguments]


def tied_to_parent(command: Sequence[str]) -> list[str]:
    """A command that the system ends with this process (Linux), whatever program it is. Status 127: there is
    no such program.
    """
    return [_executable(), "-I", "-S", "-c", _TIED, str(os.getpid()), *command]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without what steers Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, **(extra or {})}


@contextmanager
def safe_spawning() -> Generator[None]:
    """Within, the processes that ``multiprocessing`` starts do not import from the current folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def worker_state() -> tuple[int, bool]:
    """Return the arguments of :func:`start_worker` in the worker processes of this one."""
    return os.getpid(), programs_allowed()


def start_worker(parent: int, allowed: bool) -> None:
    """Begin a worker process of ``multiprocessing``: it ends with its parent, and has its permissions."""
    die_with_parent(parent)
    permit_programs(allowed)


def die_with_parent(parent: int) -> None:
    """End this process when process ``parent``, which started it, ends. Only Linux can promise it; elsewhere
    a child ends at the end of its input or of its time.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


_KINDS: Mapping[str, type[HespasError]] = {
    kind.__name__: kind for kind in (FormatError, InvariantError, UnsupportedError, UsageError)
}


def end_of(status: int, said: bytes) -> str:
    """How a process ended, with the last that it said on standard error: ``ends with status 3: ...``. Of what
    native libraries say that is the check that failed; addresses of their stack follow it.
    """
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    fatal = [line for line in lines if _is_fatal(line)] or lines[-1:]
    how = f"ends with status {status}" if status >= 0 else f"crashes with {signal.Signals(-status).name}"
    return f"{how}: {clipped(fatal[-1])}" if fatal else how


def _is_fatal(line: str) -> bool:
    """Whether XLA, LLVM or the C library ends with this line."""
    is_marked = line[:1] == "F" and line[1:5].isdigit()
    return is_marked or any(mark in line for mark in ("Check failed", "LLVM ERROR", "ssertion"))


def error_as_text(error: HespasError) -> dict[str, str]:
    """An error as the parent can read it: its class, text, hint and position, empty where there is none."""
    kind = next((each for each in _KINDS.values() if isinstance(error, each)), UnsupportedError)
    told = {"message": error.text, "hint": error.hint or "", "position": error.position or ""}
    return {"kind": kind.__name__, **told}


def error_from_text(told: Mapping[str, str]) -> HespasError:
    """The error that a child has told by :func:`error_as_text`."""
    kind = _KINDS.get(told["kind"], UnsupportedError)
    return kind(told["message"], hint=told["hint"] or None, position=told.get("position") or None)


@contextmanager
def ending_what_it_starts() -> Generator[None]:
    """End the processes that code of the user starts within, and theirs, where it is interrupted. Linux
    lists them; elsewhere they stay.
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
    """Return the processes below this one."""
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        tasks = Path(f"/proc/{waiting.pop()}/task")
        for task in _listed(tasks):
            with suppress(OSError):
                children = set(map(int, (task / "children").read_text().split()))
                waiting += children - found
                found |= children
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it has ended, or the system has no such list
        return []
