"""Binary programs are read in a child process first: jaxlib's parsers crash on some damaged bytes, and
reserve gigabytes for others.

A crash, a loop without end, or a want of memory there is a message here. Text does not need it: its parser
survives.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hespas.files.sandbox import OUT_OF_MEMORY, bounded_memory, run_contained
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, HespasError

if TYPE_CHECKING:
    from hespas.converters.stablehlo.bindings import Bindings
    from hespas.converters.stablehlo.forms import Parsed

__all__ = ["attempt", "main", "survive"]


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


def attempt(data: bytes) -> int:
    """Read a program, with little memory for its parser; what a process that has done so exits with.

    Only the parser is bounded: what it found may be large, where functions call each other many times.
    """
    from hespas.converters.format import ReadOptions
    from hespas.converters.stablehlo.reader import read_program

    try:
        read_program(data, "-", ReadOptions(), Diagnostics(), parse=_parse)
    except (HespasError, RuntimeError, MemoryError, ValueError) as error:
        return OUT_OF_MEMORY if isinstance(error.__cause__, MemoryError) else 0
    return 0


def _parse(data: bytes, path: str, bindings: Bindings) -> Parsed:
    from hespas.converters.stablehlo.forms import parse_program

    with bounded_memory(len(data)):
        return parse_program(data, path, bindings)


def main() -> int:
    """The child: read what stands on standard input, keep nothing, tell nothing but by surviving."""
    return attempt(sys.stdin.buffer.read())
