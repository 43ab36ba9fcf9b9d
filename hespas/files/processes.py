"""Child processes: how they are started, isolated and ended, and errors that they pass to their parent.

A child never runs code from its working folder: it is isolated (``python -I``: no current folder, no
``PYTHON*`` variables, no start-up files of the user), works in ``/``, imports modules from the same locations
as its parent, and ends with its parent. Programs that the user names keep their own libraries.
"""

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
    "decode_error",
    "describe_end",
    "die_with_parent",
    "encode_error",
    "isolated_python",
    "isolated_script",
    "killing_descendants",
    "safe_spawning",
    "start_worker",
    "tied_to_parent",
    "worker_state",
]


_PACKAGE = Path(__file__).parents[1]

ROOT = Path(os.sep).resolve()
"""Working folder of children: relative paths and libraries find no files of other users there."""

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
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]} does not start: {error.strerror}")
"""


def _import_path() -> list[str]:
    """Return the import path of this process without the current folder, unless ``PYTHONPATH`` has its
    absolute path.

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
    """Return the command that calls ``main()`` of a module of this package; its result is the exit status.

    Raises ``UnsupportedError`` if this Python cannot start a child process.
    """
    paths = json.dumps(_import_path())
    return [_executable(), "-I", "-c", _START, str(_PACKAGE), paths, str(os.getpid()), module, *arguments]


def isolated_script(script: str, *arguments: str, python: str = "") -> list[str]:
    """Return the command that runs a script in ``python``, or in this Python with its import path.

    Another Python keeps the packages that its user has installed (``-I`` would hide them) but not the
    variables of this one; the working folder is removed from its path.
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


def tied_to_parent(command: Sequence[str]) -> list[str]:
    """Return a command that the system kills together with this process (Linux). Status 127: the program does
    not exist.
    """
    return [_executable(), "-I", "-S", "-c", _TIED, str(os.getpid()), *command]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without variables of Python, plus ``extra``."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**variables, **(extra or {})}


@contextmanager
def safe_spawning() -> Generator[None]:
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


def worker_state() -> tuple[int, bool]:
    """Return the arguments of :func:`start_worker` for the worker processes of this process."""
    return os.getpid(), programs_allowed()


def start_worker(parent: int, allowed: bool) -> None:
    """Initialise a worker process of ``multiprocessing``: it ends with its parent and has its permissions."""
    die_with_parent(parent)
    permit_programs(allowed)


def die_with_parent(parent: int) -> None:
    """End this process when its parent process ``parent`` ends.

    Only Linux guarantees this; elsewhere a child ends at the end of its input or of its time limit.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)


_ERROR_CLASSES: Mapping[str, type[HespasError]] = {
    kind.__name__: kind for kind in (FormatError, InvariantError, UnsupportedError, UsageError)
}


def describe_end(status: int, stderr: bytes) -> str:
    """Return how a process ended, with its last message on standard error: ``ends with status 3: ...``.

    If a native library fails, its message is the failed check; stack addresses follow it.
    """
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    marks = ("Check failed", "LLVM ERROR", "ssertion")
    fatal = [
        line
        for line in lines
        if (line[:1] == "F" and line[1:5].isdigit()) or any(mark in line for mark in marks)
    ] or lines[-1:]
    how = f"ends with status {status}" if status >= 0 else f"crashes with {signal.Signals(-status).name}"
    return f"{how}: {clipped(fatal[-1])}" if fatal else how


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
    """Kill the processes started within the block, and their descendants, if it is interrupted.

    Only Linux lists them; on other systems they continue.
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
    """Return the ids of all descendants of this process."""
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
