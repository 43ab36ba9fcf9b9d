"""Binary programs are read in a child process first: jaxlib's parsers crash on some damaged bytes.

A crash, or a loop without end, there is a message here. Text does not need it: its parser survives.
"""

from __future__ import annotations

import sys

from hespas.converters.contained import run_contained
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, HespasError

__all__ = ["main", "survive"]


def survive(data: bytes, path: str) -> None:
    """Read a program in a child process. Raises ``FormatError`` where the child crashes or hangs.

    Anything else that is wrong with the program comes out when it is read here.
    """
    done = run_contained(__name__, data, "jaxlib's parser")
    if done is not None and done.fate:
        raise _damaged(path, len(data), done.fate)


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
