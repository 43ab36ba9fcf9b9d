"""Programs are read in a child process first: jaxlib's parsers crash on some damaged bytes, reserve gigabytes
for others, and a few hundred bytes may stand for types, locations or numbers that take forever to print.

A crash, a loop without end, or a want of memory there is a message here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.converters.stablehlo.sniffing import BYTECODE_MAGIC
from hespas.files.limits import VARIABLE
from hespas.files.sandbox import ParserFailedError, parser_memory, run_contained
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError

if TYPE_CHECKING:
    from hespas.converters.stablehlo.bindings import Bindings
    from hespas.converters.stablehlo.forms import Parsed

__all__ = ["attempt", "survive"]


def survive(data: bytes, path: str) -> None:
    """Read a program in a child process. Raises ``FormatError`` where the child crashes, hangs or wants
    memory out of all proportion, ``UnsupportedError`` where it does not start.

    Anything else that is wrong with the program comes out when it is read here.
    """
    try:
        run_contained(f"{__name__}:attempt", data, "jaxlib's parser")
    except ParserFailedError as error:
        is_binary = BYTECODE_MAGIC in data
        hint = "write or copy the file again" if is_binary else "no compiler writes such programs"
        hint = f"{hint}; if you trust it, {VARIABLE} (or --max-input-bytes) raises the limits"
        raise FormatError(
            f"a damaged program: it {error}", path=path, position=f"within {len(data):,} bytes", hint=hint
        ) from None


def attempt(data: bytes, parser_bytes: int) -> bytes:
    """In the child: read a program, with ``parser_bytes`` of memory for its parser; keep nothing, tell
    nothing but by surviving.
    """
    from hespas.converters.format import ReadOptions
    from hespas.converters.stablehlo.forms import parse_program
    from hespas.converters.stablehlo.reader import read_here

    def parse(data: bytes, path: str, bindings: Bindings) -> Parsed:
        with parser_memory(parser_bytes):
            return parse_program(data, path, bindings)

    read_here(data, "-", ReadOptions(), Diagnostics(), parse=parse)
    return b""
