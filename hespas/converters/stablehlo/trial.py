"""Programs are parsed, and read once, in a child process first: jaxlib's parsers crash on some damaged bytes,
reserve gigabytes for others, and a few hundred bytes may stand for types, locations or numbers that take
forever to print.

A crash, a loop without end, or a want of memory there is a message here. What has survived comes back as
bytecode that the child's MLIR has written: no byte of the input itself reaches a parser of this process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hespas.converters.stablehlo.bindings import Bindings, ParseFailure
from hespas.converters.stablehlo.mlir import Block, Module, quoted, shortened, text_of
from hespas.converters.stablehlo.module import read_frame
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
                parsed = parsed._replace(module=_bound(parsed.module, dims, bindings), form=Form.BYTECODE)
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


# Symbolic dimensions: extents of ``?`` in a program's arguments become numbers, and all others follow.
#
# ``jax.export`` names them in the messages of its shape assertions: ``args[0].shape = (b, s, 64)``. Others
# are told by place: dimension 1 of argument 0 is ``arg0.1``.

_TENSOR = re.compile(r"tensor<((?:(?:\?|\d+)x)+)(\w[^,<>]*)>")
"""A ranked type without bounds or another encoding: those are no symbols."""
_SPECIFICATION = re.compile(r"\.shape = \(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_TERM = re.compile(r"\s*([+-]?)\s*((?:[A-Za-z_]\w*|\d{1,18})(?:\s*\*\s*(?:[A-Za-z_]\w*|\d{1,18}))*)\s*")
_NAME = re.compile(r"[A-Za-z_]\w*(?!\w*\()")
"""Of a dimension, not of a function such as ``max(b, 4)``."""
_BETWEEN = re.compile(r",(?![^()]*\))")
_MOST_EXTENT = 1 << 62
_MOST_LISTED = 12


class _Dimension(NamedTuple):
    """One ``?``: where it stands, and the expression of names that the program has for it (maybe none)."""

    argument: int
    dim: int
    expression: str

    @property
    def place(self) -> str:
        return f"arg{self.argument}.{self.dim}"


def _bound(module: Module, dims: Mapping[str, int], bindings: Bindings) -> Module:
    """The module with all symbolic dimensions of its arguments bound. Raises ``UsageError`` where ``dims``
    names none of them or leaves one out, ``UnsupportedError`` where the shapes do not follow from these.
    """
    frame = read_frame(module, bindings, "", "")
    block = frame.body(frame.entry)
    types = [] if block is None else [str(argument.type) for argument in block.arguments]
    found = _dimensions(types, [] if block is None else _specifications(block))
    _check_names(found, dims)
    extents = {(each.argument, each.dim): _extent(each, dims) for each in found}
    stated = [_with_extents(text, number, extents) for number, text in enumerate(types)]
    try:
        return bindings.refined(module, stated)
    except ParseFailure as error:
        raise UnsupportedError(
            f"the program's shapes do not follow from these extents: {shortened(error.message)}",
            position=error.place or None,
            hint="are they such as the program allows? else export it again with fixed shapes",
        ) from error


def _specifications(block: Block) -> list[list[str]]:
    """The shapes of polymorphic arguments as ``jax.export`` spells them, each a list of expressions."""
    for view in block.operations:
        op = view.operation
        if op.name == "stablehlo.custom_call" and "error_message" in op.attributes:
            _, _, told = text_of(op, "error_message").partition("shapes specifications: ")
            found = _SPECIFICATION.findall(told.partition("Obtained dimension variables")[0])
            if found:
                return [[part.strip() for part in _BETWEEN.split(each) if part.strip()] for each in found]
    return []


def _dimensions(types: Sequence[str], specifications: Sequence[list[str]]) -> list[_Dimension]:
    """The ``?`` of the arguments, with their names where specifications fit the arguments."""
    shapes = {number: _extents_of(text) for number, text in enumerate(types)}
    dynamic = {number: shape for number, shape in shapes.items() if "?" in shape}
    named = dict(zip(dynamic, specifications, strict=False))
    fits = len(specifications) == len(dynamic) and all(
        len(named[number]) == len(shape)
        and all((extent == "?") != part.isdigit() for extent, part in zip(shape, named[number], strict=True))
        for number, shape in dynamic.items()
    )
    return [
        _Dimension(number, dim, named[number][dim] if fits else "")
        for number, shape in dynamic.items()
        for dim, extent in enumerate(shape)
        if extent == "?"
    ]


def _extents_of(text: str) -> list[str]:
    match = _TENSOR.fullmatch(text)
    return match[1].split("x")[:-1] if match else []


def _with_extents(text: str, argument: int, extents: Mapping[tuple[int, int], int]) -> str:
    match = _TENSOR.fullmatch(text)
    if match is None:
        return text
    shape = [str(extents.get((argument, dim), each)) for dim, each in enumerate(_extents_of(text))]
    return f"tensor<{'x'.join(shape)}x{match[2]}>"


def _check_names(found: Sequence[_Dimension], dims: Mapping[str, int]) -> None:
    """Raises ``UsageError`` for a name that the program does not have."""
    names = list(dict.fromkeys(name for each in found for name in _NAME.findall(each.expression)))
    places = [each.place for each in found]
    if not found:
        raise UsageError("the program's arguments have no symbolic dimensions", hint="leave --dim out")
    for name in dims:
        if name not in names and name not in places:
            known = [*names, *places][:_MOST_LISTED]
            raise UsageError(
                f"--dim {quoted(name, 60)}: the program has no such dimension",
                hint=f"it has {', '.join(known)}",
            )


def _extent(dimension: _Dimension, dims: Mapping[str, int]) -> int:
    """The number of a dimension. Raises ``UsageError`` where it is not told or out of range."""
    place, expression = dimension.place, dimension.expression
    if place in dims:
        return dims[place]
    lacking = [name for name in _NAME.findall(expression) if name not in dims]
    if lacking or not expression:
        name = lacking[0] if lacking else place
        also = f" ({place} is {quoted(expression, 60)})" if expression and expression != name else ""
        raise UsageError(
            f"dimension {quoted(name, 60)} is not bound{also}", hint=f"bind all of them: add --dim {name}=N"
        )
    extent = _evaluated(expression, dims)
    if extent is None:
        raise UsageError(f"{place} is {quoted(expression, 60)}", hint=f"state it: --dim {place}=N")
    if not 0 <= extent < _MOST_EXTENT:
        raise UsageError(f"{place} is {quoted(expression, 60)} = {extent:,}", hint="choose other extents")
    return extent


def _evaluated(expression: str, dims: Mapping[str, int]) -> int | None:
    """A sum of products of names and numbers; None for anything else."""
    if "(" in expression:
        return None
    total, position = 0, 0
    while position < len(expression):
        term = _TERM.match(expression, position)
        if term is None or (position and not term[1]):
            return None
        factors = (part.strip() for part in term[2].split("*"))
        value = prod(int(part) if part.isdigit() else dims[part] for part in factors)
        total += -value if term[1] == "-" else value
        position = term.end()
    return total
