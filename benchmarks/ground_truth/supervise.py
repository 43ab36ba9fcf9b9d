"""Supervisor of the capturing process: restarts it after a crash, and kills it if a case exceeds its time
limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from time import sleep, time

from benchmarks.ground_truth.store import MARK

__all__ = ["supervise"]

_POLL_INTERVAL_S = 0.1
_REGULAR_EXITS = (0, 1, 2, 75, 130)
"""Exit statuses of a sweep that ends by itself: done, done with faults, usage error, time limit,
interrupted.
"""


def supervise(
    command: Sequence[str],
    folder: Path,
    say: Callable[[str], None],
    *,
    case_limit_s: float,
    deadline: float = float("inf"),
) -> int:
    """Run ``command`` until it ends by itself, and return its exit status. If a case crashes it, or takes
    longer than ``case_limit_s``, the command is restarted with ``--again`` and skips the case, whose name is
    in the mark file. After ``deadline`` (seconds since the epoch) it is not restarted, and 75 is returned.
    """
    again: tuple[str, ...] = ()
    while True:
        status = _run([*command, *again], folder / MARK, case_limit_s)
        if status in _REGULAR_EXITS or not (folder / MARK).is_file():
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
            sleep(_POLL_INTERVAL_S)
            # A mark from before the start does not belong to a running case.
            if time() - max(_modified_s(mark), begun) > case_limit_s and mark.is_file():
                process.kill()
        return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _modified_s(mark: Path) -> float:
    try:
        return mark.stat().st_mtime
    except OSError:
        return 0.0


def _described(status: int) -> str:
    if status >= 0 or os.name != "posix":
        return f"exit status {status}"
    return signal.Signals(-status).name
