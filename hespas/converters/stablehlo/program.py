"""The forms a StableHLO program is stored in, and how each is recognised and parsed.

Text (pretty or generic), MLIR bytecode, VHLO portable artifact, and the file ``jax.export`` writes: a
flatbuffer that holds a portable artifact as a byte vector (its u32 length stands just before the magic).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.stablehlo import BYTECODE_MAGIC, looks_like_text
from hespas.converters.stablehlo.mlir import (
    MAX_QUOTE,
    Bindings,
    Block,
    Module,
    ParseFailure,
    quoted,
    text_of,
    unescaped,
)
from hespas.converters.stablehlo.module import read_frame
from hespas.graph.errors import FormatError, UnsupportedError, UsageError

__all__ = [
    "Form",
    "Parsed",
    "excerpt",
    "misnamed_op_place",
    "nesting_depth",
    "parse_program",
    "shortened",
    "undecodable_place",
    "with_dims",
]

_ARTIFACT = b"StableHLO_v"
_PRODUCER_BYTES = 48
_VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9}){1,3}")
_LENGTH_BYTES = 4
_MAX_NESTING = 500
"""MLIR's parser recurses on brackets and exhausts the C stack near 3,000 nested regions."""

_QUANTISED = "!quant."
_QUANTISED_BYTECODE = b"quant\0"
"""The names of dialects stand in bytecode as strings that end in a zero byte."""

_SKEW = re.compile(r"unregistered|unknown|not registered|to be one of")
"""What MLIR says of a name that it does not know."""

_INVALID = "the program is invalid at this place: correct what produced it"
_TOO_NEW = (
    "this jaxlib does not know the name: check that the producer's StableHLO version is not newer than "
    "jaxlib's, or export the program as a portable artifact (stablehlo.serialize_portable_artifact), which "
    "is read across versions"
)
_GENERIC = (
    'an operation of an unknown dialect is read in its generic form only: "dialect.name"(%operand) : ...'
)
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_QUIET = re.compile(rb'"[^"\n]*"|//[^\n]*')
_NEWLINE = b"\n"
_BRACKETS = b"{}()[]<>"
_STRUCTURE = _BRACKETS + b'"/\n'
_BLOCK = 1 << 20
_OTHERS = bytes(sorted(set(range(256)) - set(_STRUCTURE)))


class Form(Enum):
    """How the program is stored."""

    TEXT = "text"
    BYTECODE = "bytecode"
    ARTIFACT = "vhlo"
    EXPORT = "jax-export"


class Parsed(NamedTuple):
    """A parsed program, the form it came in, and its bytecode where the input is bytecode already."""

    module: Module
    form: Form
    producer: str
    has_locations: bool


def nesting_depth(text: bytes) -> int:
    """The deepest nesting of brackets outside strings and comments; O(length), vectorised in blocks."""
    return _depths(text)[0]


def _depths(text: bytes) -> tuple[int, int]:
    """How many brackets are open at the deepest place, and at the end (-1 where there is none at all)."""
    if b"\\" in text:
        text = _ESCAPE.sub(b"", text)
    residue = _QUIET.sub(b"", text.replace(b"->", b"").translate(None, _OTHERS))
    depth = deepest = 0
    for start in range(0, len(residue), _BLOCK):
        running = _running(residue[start : start + _BLOCK])
        deepest = max(deepest, depth + int(running.max()))
        depth += int(running[-1])
    return deepest, depth if residue else -1


def _running(residue: bytes) -> NDArray[np.int64]:
    steps = np.zeros(256, np.int32)
    steps[list(_BRACKETS[::2])] = 1
    steps[list(_BRACKETS[1::2])] = -1
    return np.cumsum(steps[np.frombuffer(residue, np.uint8)], dtype=np.int64)


def _deep_place(text: bytes, limit: int) -> str:
    """Where brackets first nest deeper than ``limit``: the scan of :func:`nesting_depth` with places kept,
    over as much of the start as it takes.
    """
    length = min(_BLOCK, len(text))
    while length < len(text) and nesting_depth(text[:length]) <= limit:
        length *= 2
    text = text[:length]
    blanked = _ESCAPE.sub(b"__", text).replace(b"->", b"__")
    codes = np.frombuffer(blanked, np.uint8)
    places = np.flatnonzero(np.isin(codes, np.frombuffer(_STRUCTURE, np.uint8)))
    residue = _QUIET.sub(lambda found: b"_" * len(found[0]), codes[places].tobytes())
    place = int(places[int(np.argmax(_running(residue) > limit))])
    return f"line {text.count(_NEWLINE, 0, place) + 1}:{place - text.rfind(_NEWLINE, 0, place)}"


def parse_program(data: bytes, bindings: Bindings) -> Parsed:
    """Parse a program in any form. Raises ``FormatError`` with the position."""
    start = data.find(BYTECODE_MAGIC)
    if start < 0:
        return _parse_text(data, bindings)
    blob = data[start:] if start == 0 else _embedded(data, start)
    producer = _producer(blob)
    is_artifact = producer.startswith(_ARTIFACT.decode())
    try:
        if is_artifact:
            module = bindings.parse_artifact(blob)
        else:
            module = bindings.parse(blob, quantised=_QUANTISED_BYTECODE in blob)
    except ParseFailure as failure:
        too_new = _too_new(producer, bindings.newest_version(), start) if is_artifact else None
        raise too_new or _refused(failure, start, producer) from None
    form = Form.EXPORT if start else Form.ARTIFACT if is_artifact else Form.BYTECODE
    return Parsed(module, form, producer, has_locations=True)


def _embedded(data: bytes, start: int) -> bytes:
    """The byte vector of an export file that holds the program."""
    length = int.from_bytes(data[start - _LENGTH_BYTES : start], "little") if start >= _LENGTH_BYTES else 0
    if not 0 < length <= len(data) - start:
        raise FormatError(
            f"an embedded program of {length} bytes is announced and {len(data) - start} follow",
            position=f"byte {start}",
            hint="the file is truncated, or no jax.export file",
        )
    if _is_cut(data):
        raise FormatError(
            "the jax.export file ends early", position=f"byte {len(data)}", hint="copy the file again"
        )
    return data[start : start + length]


def _is_cut(data: bytes) -> bool:
    """Whether the function's name, which a flatbuffer of ``jax.export`` keeps at its very end, is not whole.

    The root table's second field is that string (jax/_src/export/serialization.fbs).
    """

    def number(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little") if 0 <= at <= len(data) - size else -1

    root = number(0, 4)
    table = root - number(root, 4)
    field = number(table + 6, 2) if root > 0 and number(table, 2) >= 8 else 0
    if field <= 0:
        return False
    text = root + field + number(root + field, 4)
    length = number(text, 4)
    return length < 0 or text + 4 + length > len(data)


def _producer(blob: bytes) -> str:
    """Who wrote the bytecode, ``""`` where what stands there is no name."""
    head = blob[len(BYTECODE_MAGIC) + 1 : _PRODUCER_BYTES]
    name = head.split(b"\0", 1)[0].decode("ascii", "replace")
    return name if name.isascii() and name.isprintable() else ""


def _refused(failure: ParseFailure, start: int, producer: str) -> FormatError:
    position = f"byte {start}"
    if failure.is_verdict:
        place = f" (line {failure.line}:{failure.column} of its text)" if failure.line else ""
        place = place or (f" ({failure.place})" if failure.place else "")
        return FormatError(shortened(failure.message) + place, position=position, hint=_INVALID)
    return FormatError(
        f"broken bytecode: {shortened(failure.message)}",
        position=position,
        hint=f"it was written by {producer or 'an unknown producer'}; "
        "copy the file again, or print it as text",
    )


def _too_new(producer: str, newest: str, start: int) -> UnsupportedError | None:
    """What to say of an artifact of a later version of StableHLO than the bindings know."""
    stated = _VERSION.search(producer)
    if stated is None or _numbers(stated[0]) <= _numbers(newest):
        return None
    return UnsupportedError(
        f"a portable artifact of StableHLO {stated[0]}; the jaxlib installed here reads up to {newest}",
        position=f"byte {start}",
        hint=f"install a newer jaxlib, or write the artifact for version {newest} "
        "(stablehlo.serialize_portable_artifact takes it)",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _parse_text(data: bytes, bindings: Bindings) -> Parsed:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            "neither MLIR text (UTF-8) nor bytecode",
            position=f"byte {error.start}",
            hint="expected a StableHLO module as text, bytecode or jax.export file",
        ) from None
    depth = nesting_depth(data)
    if depth > _MAX_NESTING:
        raise FormatError(
            f"brackets nest {depth} deep; at most {_MAX_NESTING} are read",
            position=_deep_place(data, _MAX_NESTING),
            hint="print generated programs without inlined nesting",
        )
    misnamed = misnamed_op_place(data)
    if misnamed:
        raise FormatError(
            "an operation's name is no text (UTF-8)",  # the bindings would end the process
            position=misnamed,
            hint=_INVALID,
        )
    try:
        is_vhlo = "vhlo." in text and "vhlo.func" in text
        if is_vhlo:
            module = bindings.parse_vhlo_text(text)
        else:
            module = bindings.parse(text, quantised=_QUANTISED in text)
    except ParseFailure as failure:
        raise _refused_text(failure, data) from None
    return Parsed(module, Form.TEXT, "", has_locations=b"loc(" in data)


def _refused_text(failure: ParseFailure, data: bytes) -> FormatError:
    """The parser's finding with the line it points at and what to do about it."""
    lines = data.split(_NEWLINE)
    shown = ""
    if 0 < failure.line <= len(lines):
        shown = excerpt(lines[failure.line - 1].decode("utf-8", "replace"), failure.column)
    return FormatError(
        shortened(failure.message) + (f", in: {shown}" if shown else ""),
        position=f"line {failure.line}:{failure.column}"
        if failure.line
        else failure.place or f"within {len(data):,} bytes",
        hint=_text_hint(failure, data),
    )


def _text_hint(failure: ParseFailure, data: bytes) -> str:
    if not looks_like_text(data):
        return "is it MLIR text at all? name the format with `source_format`"
    if _ends_early(failure, data):
        return "the file ends early: copy it again"
    if "not found for custom op" in failure.message:
        return _GENERIC
    return _TOO_NEW if _SKEW.search(failure.message) else _INVALID


def _ends_early(failure: ParseFailure, data: bytes) -> bool:
    """Whether the parser stumbled over the end: the fault is on the last line, and brackets are open there.
    Or an alias is missing, which programs define last.
    """
    if failure.line < len(data.rstrip().splitlines()):
        return "never defined" in failure.message
    return _depths(data)[1] != 0


# --- String literals of MLIR text: any bytes, where jaxlib's bindings only read UTF-8.


_HIGH = re.compile(rb"\\[89A-Fa-f][0-9A-Fa-f]")
_LITERAL = re.compile(rb'"([^"\\\n]*(?:\\.[^"\\\n]*)*)"|//[^\n]*')
_OPERANDS = re.compile(rb"(?:\s|//[^\n]*\n)*\(")
_BEFORE_OTHERS = re.compile(rb"(?:[(\[<,]|(?<![\w!#%@$.-])at)\s*\Z|@\Z")
"""What stands before names of locations, types and symbols, which parentheses may follow as well."""

_LOOK_BACK = 64


def undecodable_place(text: bytes) -> str:
    """Line and column of the first literal that is no UTF-8, ``""`` where all are."""
    first = next(_undecodable(text), None)
    return "" if first is None else _place(text, first.start())


def misnamed_op_place(text: bytes) -> str:
    """Line and column of the first operation whose name is no UTF-8, ``""`` where there is none."""
    for found in _undecodable(text):
        before = text[max(0, found.start() - _LOOK_BACK) : found.start()]
        if _OPERANDS.match(text, found.end()) and not _BEFORE_OTHERS.search(before):
            return _place(text, found.start())
    return ""


def _undecodable(text: bytes) -> Iterator[re.Match[bytes]]:
    """The literals at fault. No literal spans lines, and few lines have such bytes at all."""
    high = _HIGH.search(text)
    while high is not None:
        start = text.rfind(_NEWLINE, 0, high.start()) + 1
        end = text.find(_NEWLINE, high.end())
        end = len(text) if end < 0 else end
        for found in _LITERAL.finditer(text, start, end):
            if found[1] is not None and _HIGH.search(found[1]) and not _is_text(unescaped(found[1])):
                yield found
        high = _HIGH.search(text, end)


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _place(text: bytes, start: int) -> str:
    line = text.count(_NEWLINE, 0, start) + 1
    return f"line {line}:{start - text.rfind(_NEWLINE, 0, start)}"


# Symbolic dimensions: extents of ``?`` in a program's arguments become numbers, and all others follow.
#
# ``jax.export`` names them in the messages of its shape assertions: ``args[0].shape = (b, s, 64)``. Others
# are named by place: dimension 1 of argument 0 is ``arg0.1``.

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


def with_dims(module: Module, dims: Mapping[str, int], bindings: Bindings) -> Module:
    """The module with all symbolic dimensions of its arguments bound. Raises ``UsageError`` where ``dims``
    names none of them or leaves one out, ``UnsupportedError`` where the shapes do not follow from these.
    """
    frame = read_frame(module, bindings, "")
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
            _, _, stated = text_of(op, "error_message").partition("shapes specifications: ")
            found = _SPECIFICATION.findall(stated.partition("Obtained dimension variables")[0])
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
        raise UsageError("the program's arguments have no symbolic dimensions", hint="leave `dims` out")
    for name in dims:
        if name not in names and name not in places:
            known = [*names, *places][:_MOST_LISTED]
            raise UsageError(
                f"`dims={quoted(name, 60)}`: the program has no such dimension",
                hint=f"it has {', '.join(known)}",
            )


def _extent(dimension: _Dimension, dims: Mapping[str, int]) -> int:
    """The number of a dimension. Raises ``UsageError`` where it is not stated or out of range."""
    place, expression = dimension.place, dimension.expression
    if place in dims:
        return dims[place]
    lacking = [name for name in _NAME.findall(expression) if name not in dims]
    if lacking or not expression:
        name = lacking[0] if lacking else place
        also = f" ({place} is {quoted(expression, 60)})" if expression and expression != name else ""
        raise UsageError(
            f"dimension {quoted(name, 60)} is not bound{also}", hint=f"bind all of them: add `dims={name}=N`"
        )
    extent = _evaluated(expression, dims)
    if extent is None:
        raise UsageError(f"{place} is {quoted(expression, 60)}", hint=f"state it: `dims={place}=N`")
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


# --- text of the input as messages may show it

_MAX_MESSAGE = 600
_BEFORE = 40
"""Characters of a long line that are shown in front of the fault."""
_LONG_WORD = re.compile(rf"\S{{{MAX_QUOTE + 1},}}")


def shortened(message: str) -> str:
    """A parser's message, its overlong words (names from the input) cut."""
    return quoted(_LONG_WORD.sub(lambda word: quoted(word[0]), " ".join(message.split())), _MAX_MESSAGE)


def excerpt(line: str, column: int) -> str:
    """A line of the input, a long one from shortly before its ``column``, which counts from 1."""
    stripped = line.strip()
    if len(stripped) <= MAX_QUOTE:
        return quoted(stripped)
    start = max(0, column - 1 - _BEFORE)
    return ("..." if start else "") + quoted(line[start:].strip(), MAX_QUOTE - 3)
