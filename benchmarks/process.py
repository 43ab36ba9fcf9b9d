"""CPU time and peak memory of whole processes, as the operating system reports them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Usage", "alternate", "run"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Cost of a finished process: CPU seconds in user mode and in the kernel, and peak memory [10^6
    bytes].
    """

    user_s: float
    system_s: float
    peak_mb: float


_MEASURE = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[2:], stdout=sys.stderr)
_, status, usage = os.wait4(process.pid, 0)
with open(int(sys.argv[1]), "w") as out:
    json.dump([os.waitstatus_to_exitcode(status), usage.ru_utime, usage.ru_stime, usage.ru_maxrss], out)
"""
"""Program that starts the command from a small process, because the peak of a child includes its parent's
memory until the child executes the command.
"""


def run(command: Sequence[str]) -> Usage:
    """Run a command to its end and return its cost. Raises ``RuntimeError`` with its output if it fails."""
    # Without compiled modules the figure would include the Python compiler. Allow the command to write them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    reads, writes = os.pipe()
    measured = [sys.executable, "-I", "-S", "-c", _MEASURE, str(writes), *command]
    try:
        process = subprocess.run(
            measured, stderr=subprocess.PIPE, env=environment, pass_fds=(writes,), check=False
        )
    finally:
        os.close(writes)
    with os.fdopen(reads) as report:
        figures = report.read()
    code, user_s, system_s, peak = json.loads(figures) if figures else (process.returncode or 1, 0, 0, 0)
    if code:
        raise RuntimeError(f"{' '.join(command)}\n{process.stderr.decode(errors='replace')}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Usage(user_s, system_s, peak * unit / 1e6)


def alternate(first: Sequence[str], second: Sequence[str], runs: int = 9) -> tuple[Usage, Usage, float]:
    """Run two commands in turn, after one warm-up each. Return the cost of each (median times, largest peak
    memory) and the median over pairs of the ratio of their user CPU seconds, which cancels drift of the
    machine.
    """
    run(first)
    run(second)
    pairs = [(run(first), run(second)) for _ in range(runs)]
    ratio = statistics.median(one.user_s / other.user_s for one, other in pairs)
    return _median([one for one, _ in pairs]), _median([other for _, other in pairs]), ratio


def _median(usages: Sequence[Usage]) -> Usage:
    return Usage(
        statistics.median(usage.user_s for usage in usages),
        statistics.median(usage.system_s for usage in usages),
        max(usage.peak_mb for usage in usages),
    )
