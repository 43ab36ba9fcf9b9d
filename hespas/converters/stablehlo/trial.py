"""Binary programs are read in a child process first: jaxlib's parsers crash on some damaged bytes.

A crash, or a loop without end, there is a message here. Text does not need it: its parser survives.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, HespasError

__all__ = ["main", "survive"]

_LIMIT_S = 30
_BYTES_PER_S = 100_000
"""Ten times slower than the slowest program seen; only a parser that hangs takes longer."""


def survive(data: bytes, path: str) -> None:
    """Read a program in a child process. Raises ``FormatError`` where the child crashes or hangs.

    Anything else that is wrong with the program comes out when it is read here.
    """
    if not sys.executable:
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            input=data,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_LIMIT_S + len(data) / _BYTES_PER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _damaged(path, len(data), "keeps jaxlib's parser busy without end") from None
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise _damaged(path, len(data), f"makes jaxlib's parser end with {name}")


def _damaged(path: str, size: int, what: str) -> FormatError:
    return FormatError(
        f"a damaged program: it {what}",
        path=path,
        position=f"within {size:,} bytes",
        hint="write or copy the file again",
    )


def main() -> None:
    """The child: read what stands on standard input, keep nothing, tell nothing but by surviving."""
    from hespas.converters.format import ReadOptions
    from hespas.converters.stablehlo.reader import read_program

    try:
        read_program(sys.stdin.buffer.read(), "-", ReadOptions(), Diagnostics())
    except (HespasError, RuntimeError, MemoryError, ValueError):
        return
