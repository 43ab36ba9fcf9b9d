"""Binary programs are read in a child process first: jaxlib's parsers crash on some damaged bytes, and
reserve gigabytes for others.

A crash, a loop without end, or a want of memory there is a message here. Text does not need it: its parser
survives.
"""

from __future__ import annotations

import sys

from hespas.converters.contained import OUT_OF_MEMORY, bounded_memory, run_contained
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, HespasError

__all__ = ["main", "survive"]


def survive(data: bytes, path: str) -> None:
    """Read a program in a child process. Raises ``FormatError`` where the child crashes, hangs or wants
    memory out of all proportion.

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
    from hespas.converters.stablehlo.bindings import load_bindings
    from hespas.converters.stablehlo.reader import read_program

    data = sys.stdin.buffer.read()
    try:
        load_bindings()
        with bounded_memory(len(data)):
            read_program(data, "-", ReadOptions(), Diagnostics())
    except (HespasError, RuntimeError, MemoryError, ValueError) as error:
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            sys.exit(OUT_OF_MEMORY)
