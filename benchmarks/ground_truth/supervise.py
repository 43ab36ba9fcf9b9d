"""The capturing process from outside: started again where a case ends it, ended where a case does not end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep, time

from benchmarks.ground_truth.store import MARK

__all__ = ["supervise"]

_LOOK_S = 0.1
_WANTED = (0, 1, 2, 75, 130)
"""How a sweep ends by itself: done, done with faults, not begun, to be gone on with."""


def supervise(
    command: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
    *,
    case_limit_s: float,
    deadline: float = float("inf"),
) -> int:
    """Run ``command`` until it ends by itself, and its exit status. Where a case ends it, or takes longer
    than ``case_limit_s``, it is run again with ``--again``: the mark that the case left says which not to
    run. It is not run again past ``deadline`` (seconds since the epoch).
    """
    again: tuple[str, ...] = ()
    while True:
        status = _run([*command, *again], folder / MARK, case_limit_s)
        if status in _WANTED or not (folder / MARK).is_file():
            return status
        say(f"the process ended with {_described(status)}: going on without the case")
        if time() > deadline:
            return 75
        again = ("--again",)


def _run(command: Sequence[str], mark: Path, case_limit_s: float) -> int:
    begun = time()
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            sleep(_LOOK_S)
            # A mark that was there before is not of a case that runs now.
            if time() - max(_left_at(mark), begun) > case_limit_s and mark.is_file():
                process.kill()
        return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _left_at(mark: Path) -> float:
    try:
        return mark.stat().st_mtime
    except OSError:
        return 0.0


def _described(status: int) -> str:
    if status >= 0 or os.name != "posix":
        return f"exit status {status}"
    return signal.Signals(-status).name
