"""File forms of a StableHLO program: detection, parsing and conversion.

The forms are text (pretty or generic), MLIR bytecode, VHLO portable artifact, and the file that
``jax.export`` writes: a flatbuffer with a portable artifact as a byte vector (its u32 length directly
precedes the magic).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.stablehlo import BYTECODE_MAGIC, looks_like_text
from hespas.converters.stablehlo.mlir import (
    MAX_QUOTE,
    Bindings,
    MlirModule,
    ParseFailure,
    quoted,
    unescaped,
)
from hespas.graph.errors import FormatError, UnsupportedError, UsageError

__all__ = [
    "ParsedProgram",
    "ProgramForm",
    "excerpt",
    "form_of_name",
    "in_form",
    "misnamed_op_place",
    "nesting_depth",
    "parse_program",
    "shortened",
    "undecodable_place",
]

_ARTIFACT = b"StableHLO_v"
_PRODUCER_BYTES = 48
_VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9}){1,3}")
_LENGTH_BYTES = 4
_MAX_NESTING = 500
"""Limit of nested brackets, since MLIR's parser recurses and exhausts the C stack near 3,000 regions."""

_QUANTISED = "!quant."
_QUANTISED_BYTECODE = b"quant\0"
"""Name of the dialect in bytecode, where names are strings that end in a zero byte."""

_SKEW = re.compile(r"unregistered|unknown|not registered|to be one of")
"""Words in MLIR's message about an unknown name."""

_INVALID = "correct the program that wrote it: the program is invalid at this position"
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


class ProgramForm(Enum):
    """File form of a program."""

    TEXT = "text"
    BYTECODE = "bytecode"
    ARTIFACT = "vhlo"
    EXPORT = "jax-export"


class ParsedProgram(NamedTuple):
    """Parsed program, its file form, its producer, and True if it has source locations."""

    module: MlirModule
    form: ProgramForm
    producer: str
    has_locations: bool


def nesting_depth(text: bytes) -> int:
    """Return the deepest nesting of brackets, not counting strings and comments.

    O(length), vectorised in blocks.
    """
    return _depths(text)[0]


def _depths(text: bytes) -> tuple[int, int]:
    """Return the largest number of open brackets, and the number of brackets open at the end (-1 for a text
    without brackets).
    """
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


def _deep_position(text: bytes, limit: int) -> str:
    """Return the position of the first bracket that nests deeper than ``limit``.

    This repeats the scan of :func:`nesting_depth` with positions, up to that bracket.
    """
    length = min(_BLOCK, len(text))
    while length < len(text) and nesting_depth(text[:length]) <= limit:
        length *= 2
    text = text[:length]
    blanked = _ESCAPE.sub(b"__", text).replace(b"->", b"__")
    codes = np.frombuffer(blanked, np.uint8)
    positions = np.flatnonzero(np.isin(codes, np.frombuffer(_STRUCTURE, np.uint8)))
    residue = _QUIET.sub(lambda quiet: b"_" * len(quiet[0]), codes[positions].tobytes())
    position = int(positions[int(np.argmax(_running(residue) > limit))])
    return f"line {text.count(_NEWLINE, 0, position) + 1}:{position - text.rfind(_NEWLINE, 0, position)}"


def parse_program(data: bytes, bindings: Bindings) -> ParsedProgram:
    """Parse a program in any form. Raises ``FormatError`` with the position of the fault."""
    start = data.find(BYTECODE_MAGIC)
    if start < 0:
        return _parse_text(data, bindings)
    blob = data[start:] if start == 0 else _embedded(data, start)
    head = blob[len(BYTECODE_MAGIC) + 1 : _PRODUCER_BYTES]
    name = head.split(b"\0", 1)[0].decode("ascii", "replace")
    producer = name if name.isascii() and name.isprintable() else ""
    is_artifact, is_quantised = producer.startswith(_ARTIFACT.decode()), _QUANTISED_BYTECODE in blob
    try:
        if is_artifact:
            module = bindings.parse_artifact(blob, quantised=is_quantised)
        else:
            module = bindings.parse(blob, quantised=is_quantised)
    except ParseFailure as failure:
        newest, version = bindings.newest_version(), _VERSION.search(producer) if is_artifact else None
        if version is not None and _numbers(version[0]) > _numbers(newest):
            raise UnsupportedError(
                f"a portable artifact of StableHLO {version[0]}; the installed jaxlib reads up to {newest}",
                position=f"byte {start}",
                hint=f"install a newer jaxlib, or write the artifact for version {newest} "
                "(stablehlo.serialize_portable_artifact takes it)",
            ) from None
        where = f"byte {start}"
        if failure.is_verdict:
            detail = f" (line {failure.line}:{failure.column} of its text)" if failure.line else ""
            detail = detail or (f" ({failure.place})" if failure.place else "")
            raise FormatError(shortened(failure.message) + detail, position=where, hint=_INVALID) from None
        raise FormatError(
            f"broken bytecode: {shortened(failure.message)}",
            position=where,
            hint=f"copy the file again, or print it as text; {producer or 'an unknown producer'} wrote it",
        ) from None
    form = ProgramForm.EXPORT if start else ProgramForm.ARTIFACT if is_artifact else ProgramForm.BYTECODE
    return ParsedProgram(module, form, producer, has_locations=True)


def _embedded(data: bytes, start: int) -> bytes:
    """Return the program inside a ``jax.export`` file, which is the content of its byte vector."""
    length = int.from_bytes(data[start - _LENGTH_BYTES : start], "little") if start >= _LENGTH_BYTES else 0
    if not 0 < length <= len(data) - start:
        raise FormatError(
            f"the header announces a program of {length} bytes, but {len(data) - start} follow",
            position=f"byte {start}",
            hint="copy the file again: it is truncated or not a jax.export file",
        )
    if _is_cut(data):
        raise FormatError(
            "the jax.export file ends early", position=f"byte {len(data)}", hint="copy the file again"
        )
    return data[start : start + length]


def _is_cut(data: bytes) -> bool:
    """Return True if a ``jax.export`` file is cut off: the name of the function, at the very end of the file,
    is incomplete.

    The second field of the flatbuffer's root table is that string (jax/_src/export/serialization.fbs).
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


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _parse_text(data: bytes, bindings: Bindings) -> ParsedProgram:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            "neither MLIR text (UTF-8) nor bytecode",
            position=f"byte {error.start}",
            hint="name a StableHLO module as text, bytecode or jax.export file",
        ) from None
    depth = nesting_depth(data)
    if depth > _MAX_NESTING:
        raise FormatError(
            f"brackets nest {depth} deep; at most {_MAX_NESTING} are read",
            position=_deep_position(data, _MAX_NESTING),
            hint="print generated programs without inlined nesting",
        )
    misnamed = misnamed_op_place(data)
    if misnamed:
        raise FormatError(
            "an operation's name is not UTF-8 text",  # the bindings would end the process
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
        lines = data.split(_NEWLINE)
        excerpt_text = ""
        if 0 < failure.line <= len(lines):
            excerpt_text = excerpt(lines[failure.line - 1].decode("utf-8", "replace"), failure.column)
        position = f"line {failure.line}:{failure.column}" if failure.line else failure.place
        raise FormatError(
            shortened(failure.message) + (f", in: {excerpt_text}" if excerpt_text else ""),
            position=position or f"within {len(data):,} bytes",
            hint=_text_hint(failure, data),
        ) from None
    return ParsedProgram(module, ProgramForm.TEXT, "", has_locations=b"loc(" in data)


def _text_hint(failure: ParseFailure, data: bytes) -> str:
    if not looks_like_text(data):
        return "check that it is MLIR text, or name the format with `source_format`"
    # A truncated file fails on its last line with open brackets, or lacks an alias, which is defined last.
    is_last_line = failure.line >= len(data.rstrip().splitlines())
    if _depths(data)[1] != 0 if is_last_line else "never defined" in failure.message:
        return "the file ends early: copy it again"
    if "not found for custom op" in failure.message:
        return _GENERIC
    return _TOO_NEW if _SKEW.search(failure.message) else _INVALID


_HIGH = re.compile(rb"\\[89A-Fa-f][0-9A-Fa-f]")
_LITERAL = re.compile(rb'"([^"\\\n]*(?:\\.[^"\\\n]*)*)"|//[^\n]*')
_OPERANDS = re.compile(rb"(?:\s|//[^\n]*\n)*\(")
_BEFORE_OTHERS = re.compile(rb"(?:[(\[<,]|(?<![\w!#%@$.-])at)\s*\Z|@\Z")
"""Text before names of locations, types and symbols, which parentheses may follow as well."""

_LOOK_BACK = 64


def undecodable_place(text: bytes) -> str:
    """Return line and column of the first literal that is not UTF-8, ``""`` if all are."""
    first = next(_undecodable(text), None)
    return "" if first is None else _position(text, first.start())


def misnamed_op_place(text: bytes) -> str:
    """Return line and column of the first operation whose name is not UTF-8, ``""`` if all are."""
    for literal in _undecodable(text):
        before = text[max(0, literal.start() - _LOOK_BACK) : literal.start()]
        if _OPERANDS.match(text, literal.end()) and not _BEFORE_OTHERS.search(before):
            return _position(text, literal.start())
    return ""


def _undecodable(text: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the string literals that are not UTF-8. Literals do not span lines, so only lines with such bytes
    are searched.
    """
    high = _HIGH.search(text)
    while high is not None:
        start = text.rfind(_NEWLINE, 0, high.start()) + 1
        end = text.find(_NEWLINE, high.end())
        end = len(text) if end < 0 else end
        for literal in _LITERAL.finditer(text, start, end):
            if literal[1] is not None and _HIGH.search(literal[1]):
                try:
                    unescaped(literal[1]).decode()
                except UnicodeDecodeError:
                    yield literal
        high = _HIGH.search(text, end)


def _position(text: bytes, start: int) -> str:
    line = text.count(_NEWLINE, 0, start) + 1
    return f"line {line}:{start - text.rfind(_NEWLINE, 0, start)}"


_MAX_MESSAGE = 600
_BEFORE = 40
"""Number of characters of a long line shown before the error."""
_LONG_WORD = re.compile(rf"\S{{{MAX_QUOTE + 1},}}")


def shortened(message: str) -> str:
    """Return the message of a parser, with overlong words (names from the input) and the whole text
    shortened.
    """
    return quoted(_LONG_WORD.sub(lambda word: quoted(word[0]), " ".join(message.split())), _MAX_MESSAGE)


def excerpt(line: str, column: int) -> str:
    """Return a line of the input for a message. A long line is shortened so that the excerpt starts shortly
    before ``column``, which counts from 1.
    """
    stripped = line.strip()
    if len(stripped) <= MAX_QUOTE:
        return quoted(stripped)
    start = max(0, column - 1 - _BEFORE)
    return ("..." if start else "") + quoted(line[start:].strip(), MAX_QUOTE - 3)


_BINARY = {".mlirbc", ".bc"}

_EXPORT = {".jaxexport", ".jax_export"}

_KNOWN_PLACE = re.compile(r'loc\((?!unknown\)|#loc|"-":\d)')
"""Location other than the lines of an anonymous text."""


def form_of_name(name: str, version: str) -> ProgramForm:
    """Return the form (text, bytecode, portable artifact, ...) that a file name implies. A name without a
    known suffix implies text.

    Only portable artifacts have a version, so bytecode with a ``version`` becomes an artifact. Raises
    ``UsageError`` for text with a version.
    """
    suffixes = [suffix for suffix in PurePath(name).suffixes if suffix != ".gz"]
    last = suffixes[-1] if suffixes else ""
    if last in _EXPORT:
        return ProgramForm.EXPORT
    if last == ".vhlo" or (last in _BINARY and (version or ".vhlo" in suffixes)):
        return ProgramForm.ARTIFACT
    if last in _BINARY:
        return ProgramForm.BYTECODE
    if version:
        raise UsageError(
            f"`target_version={version}`: text has no version",
            path=name,
            hint="name a portable artifact, FILE.vhlo, or leave the version out",
        )
    return ProgramForm.TEXT


def in_form(data: bytes, own: ProgramForm, form: ProgramForm, version: str, bindings: Bindings) -> bytes:
    """Convert a valid program from the form ``own`` to ``form``. If both are equal, return it unchanged.

    Raises ``UnsupportedError`` if the program cannot have that form.
    """
    if form is own and not version:
        return data
    module = parse_program(data, bindings).module
    match form:
        case ProgramForm.TEXT:
            return _text(module, bindings).encode()
        case ProgramForm.BYTECODE:
            return bindings.bytecode(module)
        case ProgramForm.ARTIFACT:
            try:
                return bindings.artifact(module, version)
            except ValueError as error:
                writer = f"StableHLO {version}" if version else "this jaxlib"
                raise UnsupportedError(
                    f"no portable artifact of {writer} can hold the program ({error})",
                    hint="name a newer `target_version`, or write bytecode: FILE.mlirbc",
                ) from None
        case ProgramForm.EXPORT:
            raise UnsupportedError(
                "a jax.export file also holds calling conventions, which no other form of a program has",
                hint="name a portable artifact, FILE.vhlo",
            )


def _text(module: MlirModule, bindings: Bindings) -> str:
    """Return text that parses to the same program: pretty if possible, else generic."""
    located = bindings.text(module, locations=True)
    has_places = _KNOWN_PLACE.search(located) is not None
    text = located if has_places else bindings.text(module, locations=False)
    try:
        again = bindings.parse(text, quantised="!quant." in text)
    except ParseFailure:
        pass
    else:
        one, two = (bindings.text(parsed, locations=False, generic=True) for parsed in (module, again))
        if one == two:
            return text
    return bindings.text(module, locations=has_places, generic=True)
