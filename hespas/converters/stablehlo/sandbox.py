"""Child processes that parse and read a program before this process does.

jaxlib's parsers crash on some damaged bytes and reserve gigabytes for others, and a few hundred bytes may
represent types, locations or numbers that take forever to print. A crash, an endless loop or a lack of memory
in the child becomes an error message here. An accepted program returns as bytecode that the child's MLIR has
written, so no byte of the input reaches a parser of this process.
"""

from __future__ import annotations

import msgspec

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo import BYTECODE_MAGIC
from hespas.converters.stablehlo.dimensions import with_dims
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.program import ProgramForm, parse_program
from hespas.converters.stablehlo.program_graph import parsing, read_here
from hespas.files.limits import parser_hint
from hespas.files.sandbox import ParserFailedError, parser_memory, parser_time, run_sandboxed
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, HespasError, InvariantError, UnsupportedError, UsageError

__all__ = ["SandboxedProgram", "parse_in_child", "parse_in_sandbox"]


class SandboxedProgram(msgspec.Struct, frozen=True):
    """Program that a child process has read, or the reason for its refusal.

    ``form`` is a value of :class:`~hespas.converters.stablehlo.program.ProgramForm`.
    """

    form: str = ""
    producer: str = ""
    has_locations: bool = False
    bytecode: bytes = b""
    error: tuple[str, str, str | None, str | None] | None = None
    """Class, message, position and hint."""


_REFUSALS = {kind.__name__: kind for kind in (FormatError, UnsupportedError, UsageError)}


def parse_in_sandbox(data: bytes, path: str, options: ReadOptions) -> SandboxedProgram:
    """Read a program in a child process.

    Raises the parser's error, ``FormatError`` if the child crashes, hangs or needs too much memory,
    ``UnsupportedError`` if it does not start. Other errors appear when the program is read in this process.
    """
    settings = msgspec.json.encode(
        (options.num_devices, options.num_replicas, options.locations, dict(options.dims))
    ).decode()
    try:
        answer = run_sandboxed(f"{__name__}:parse_in_child", data, "jaxlib's parser", settings)
    except ParserFailedError as error:
        is_binary = BYTECODE_MAGIC in data
        hint = (
            "write or copy the file again"
            if is_binary
            else "check the program: no compiler writes such programs"
        )
        hint = parser_hint(hint)
        raise FormatError(
            f"a damaged program: it {error}", path=path, position=f"within {len(data):,} bytes", hint=hint
        ) from None
    program = msgspec.msgpack.decode(answer, type=SandboxedProgram)
    if program.error is not None:
        kind, message, position, remedy = program.error
        raise _REFUSALS[kind](message, path=path, position=position, hint=remedy)
    return program


def parse_in_child(data: bytes, parser_bytes: int, settings: str) -> bytes:
    """Return an encoded :class:`SandboxedProgram`; runs in the child.

    The parser gets ``parser_bytes`` of memory. Then the program is read as it will be outside, which bounds
    the resources of that step too.
    """
    num_devices, num_replicas, locations, dims = msgspec.json.decode(
        settings, type=tuple[int | None, int | None, bool, dict[str, int]]
    )
    bindings = load_bindings()
    try:
        with parsing(data, ""), parser_memory(parser_bytes), parser_time(len(data)):
            parsed = parse_program(data, bindings)
            if dims:
                parsed = parsed._replace(
                    module=with_dims(parsed.module, dims, bindings), form=ProgramForm.BYTECODE
                )
    except InvariantError:
        raise
    except HespasError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        return _refusal(error)
    options = ReadOptions(num_devices=num_devices, num_replicas=num_replicas, locations=locations)
    bytecode = bindings.bytecode(parsed.module)
    try:
        read_here(data, "-", options, Diagnostics(), parse=lambda bindings: parsed)
    except HespasError as error:  # reported, after earlier findings, when this process reads the program
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        # The child has a memory limit that this process does not have.
        if isinstance(error.__cause__, RuntimeError):
            return _refusal(error)
    return msgspec.msgpack.encode(
        SandboxedProgram(parsed.form.value, parsed.producer, parsed.has_locations, bytecode)
    )


def _refusal(error: HespasError) -> bytes:
    fields = (type(error).__name__, error.message, error.position, error.hint)
    return msgspec.msgpack.encode(SandboxedProgram(error=fields))
