"""Programs are parsed, and read once, in a child process first: jaxlib's parsers crash on some damaged bytes,
reserve gigabytes for others, and a few hundred bytes may stand for types, locations or numbers that take
forever to print.

A crash, a loop without end, or a want of memory there is a message here. What has survived comes back as
bytecode that the child's MLIR has written: no byte of the input itself reaches a parser of this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hespas.converters.stablehlo.sniffing import BYTECODE_MAGIC
from hespas.files.limits import VARIABLE
from hespas.files.sandbox import ParserFailedError, parser_memory, parser_time, run_contained
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, HespasError, InvariantError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from hespas.converters.format import ReadOptions
    from hespas.converters.stablehlo.bindings import Bindings
    from hespas.converters.stablehlo.forms import Parsed

__all__ = ["Survivor", "attempt", "survive"]


class Survivor(msgspec.Struct, frozen=True):
    """A program that has been read: its form, as in :class:`~hespas.converters.stablehlo.forms.Parsed`, and
    bytecode; or why it is none.
    """

    form: str = ""
    producer: str = ""
    has_locations: bool = False
    bytecode: bytes = b""
    error: tuple[str, str, str | None, str | None] | None = None
    """Class, message, position and remedy."""


_REFUSALS = {kind.__name__: kind for kind in (FormatError, UnsupportedError, UsageError)}


def survive(data: bytes, path: str, options: ReadOptions) -> Survivor:
    """Read a program in a child process. Raises what its parser says of it, ``FormatError`` where the child
    crashes, hangs or wants memory out of all proportion, ``UnsupportedError`` where it does not start.

    What else is wrong with the program comes out when it is read here.
    """
    asked = msgspec.json.encode(
        (options.num_devices, options.num_replicas, options.locations, dict(options.dims))
    ).decode()
    try:
        answer = run_contained(f"{__name__}:attempt", data, "jaxlib's parser", asked)
    except ParserFailedError as error:
        is_binary = BYTECODE_MAGIC in data
        hint = "write or copy the file again" if is_binary else "no compiler writes such programs"
        hint = f"{hint}; if you trust it, {VARIABLE} (or --max-input-bytes) raises the limits"
        raise FormatError(
            f"a damaged program: it {error}", path=path, position=f"within {len(data):,} bytes", hint=hint
        ) from None
    found = msgspec.msgpack.decode(answer, type=Survivor)
    if found.error is not None:
        kind, message, position, remedy = found.error
        raise _REFUSALS[kind](message, path=path, position=position, hint=remedy)
    return found


def attempt(data: bytes, parser_bytes: int, asked: str) -> bytes:
    """In the child: a :class:`Survivor`. The parser gets ``parser_bytes`` of memory; then the program is read
    as it will be outside, so that what that takes is bounded too.
    """
    from hespas.converters.format import ReadOptions
    from hespas.converters.stablehlo.bindings import load_bindings
    from hespas.converters.stablehlo.dimensions import bound
    from hespas.converters.stablehlo.forms import Form, parse_program
    from hespas.converters.stablehlo.reader import parsing, read_here

    num_devices, num_replicas, locations, dims = msgspec.json.decode(
        asked, type=tuple[int | None, int | None, bool, dict[str, int]]
    )
    bindings = load_bindings()
    try:
        with parsing(data, ""), parser_memory(parser_bytes), parser_time(len(data)):
            parsed = parse_program(data, "", bindings)
            if dims:
                parsed = parsed._replace(module=bound(parsed.module, dims, bindings), form=Form.BYTECODE)
    except InvariantError:
        raise
    except HespasError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return _refusal(error)

    def given(data: bytes, path: str, bindings: Bindings) -> Parsed:
        return parsed

    options = ReadOptions(num_devices=num_devices, num_replicas=num_replicas, locations=locations)
    bytecode = bindings.bytecode(parsed.module)
    try:
        read_here(data, "-", options, Diagnostics(), parse=given)
    except HespasError as error:  # is told, with all that comes before it, where it is read for good
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, RuntimeError):  # memory that ran out here, and would not there
            return _refusal(error)
    return msgspec.msgpack.encode(
        Survivor(parsed.form.value, parsed.producer, parsed.has_locations, bytecode)
    )


def _refusal(error: HespasError) -> bytes:
    told = (type(error).__name__, error.message, error.position, error.hint)
    return msgspec.msgpack.encode(Survivor(error=told))
