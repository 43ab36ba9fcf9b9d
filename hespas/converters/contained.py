"""Native parsers in a child process: a crash, or a loop without end, there is an answer here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

__all__ = ["Contained", "run_contained"]

_LIMIT_S = 30
_BYTES_PER_S = 100_000
"""Ten times slower than the slowest input seen; only a parser that hangs takes longer."""


@dataclass(frozen=True, slots=True)
class Contained:
    """What the child wrote; ``fate`` says how it failed (empty: it ended by itself)."""

    output: bytes
    fate: str = ""


def run_contained(module: str, data: bytes, parser: str, *arguments: str) -> Contained | None:
    """``main()`` of ``module`` with ``data`` on its standard input. ``parser`` is whose fault a failure is.

    None where this Python cannot start another (it is embedded).
    """
    if not sys.executable:
        return None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {module} import main; main()", *arguments],
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_LIMIT_S + len(data) / _BYTES_PER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Contained(b"", f"keeps {parser} busy without end")
    if done.returncode < 0:
        return Contained(b"", f"makes {parser} end with {signal.Signals(-done.returncode).name}")
    return Contained(done.stdout)
