"""Native parsers in a child process: what crashes, never ends or takes all memory there is an answer here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OUT_OF_MEMORY", "Contained", "bounded_memory", "run_contained"]

_LIMIT_S = 30
_BYTES_PER_S = 100_000
"""Ten times slower than the slowest input seen; only a parser that hangs takes longer."""

OUT_OF_MEMORY = 3
"""What a child exits with where memory beyond :func:`bounded_memory` was asked for."""

_SPARE_BYTES, _BYTES_PER_BYTE = 150 << 20, 64
"""A program of 200,000 operations, each at a place of its own, takes 39 bytes for each of its bytecode."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Contained:
    """What the child wrote; ``fate`` says how it failed (empty: it ended by itself)."""

    output: bytes
    fate: str = ""


def run_contained(module: str, data: bytes, parser: str, *arguments: str) -> Contained | None:
    """``main()`` of ``module``, whose result is the exit status, with ``data`` on its standard input.
    ``parser`` is whose fault a failure is.

    None where this Python cannot start another (it is embedded).
    """
    if not sys.executable:
        return None
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main())", *arguments],
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_LIMIT_S + len(data) / _BYTES_PER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Contained(b"", f"keeps {parser} busy without end")
    if done.returncode == OUT_OF_MEMORY:
        return Contained(b"", f"makes {parser} ask for more than {_allowance(len(data)):,} bytes of memory")
    if done.returncode < 0:
        return Contained(b"", f"makes {parser} end with {signal.Signals(-done.returncode).name}")
    return Contained(done.stdout)


@contextmanager
def bounded_memory(size: int) -> Generator[None]:
    """Within, the process may grow by 150 MiB and 64 times an input of ``size`` bytes: parsers reserve
    gigabytes for a damaged count. What goes beyond raises ``MemoryError`` or ends the process.

    Without effect where the system does not say how much address space the process has (only Linux does).
    """
    if not _STATM.exists():
        yield
        return
    import resource

    taken = int(_STATM.read_text().split()[0]) * resource.getpagesize()
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    stated = [limit for limit in (before, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([taken + _allowance(size), *stated]), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _allowance(size: int) -> int:
    return _SPARE_BYTES + _BYTES_PER_BYTE * size
