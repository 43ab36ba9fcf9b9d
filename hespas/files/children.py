"""Ends of child processes: how one ended, the error that it hands to its parent, and what others started."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hespas.graph.errors import (
    FormatError,
    HespasError,
    InvariantError,
    UnsupportedError,
    UsageError,
    clipped,
)

__all__ = ["end_of", "ending_what_it_starts", "error_as_text", "error_from_text"]

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
