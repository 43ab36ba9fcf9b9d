"""Text documents: encoding of JSON, cells of CSV files, TOML input, and splitting of JSON input.

A JSON document is a ``msgspec.Struct``; its schema in ``hespas/schemas`` is generated from it. Large JSON
inputs are split between elements. Splitting at the separator of one writer is not safe, because strings may
contain it. A split is therefore either verified by a parser that accepts all text before it as whole
elements, or found here with strings skipped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, NamedTuple, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph.errors import FormatError, clipped

__all__ = [
    "ArrayCut",
    "BracketScan",
    "Brackets",
    "Count",
    "Figure",
    "array_cut",
    "check_column_names",
    "document_bytes",
    "encode_json",
    "escape_cell",
    "escape_formula",
    "json_for_script",
    "read_toml",
    "unescape_formula",
]


Figure = Annotated[float, Meta(extra_json_schema={"nullable": True})]
"""A number. NaN and infinities, which JSON cannot express, are null: the schemas (tools/schemas.py)
allow it.
"""

Count = Annotated[int, Meta(ge=0)]
"""A number of elements."""


def check_column_names(names: Iterable[str], path: PurePath | str) -> None:
    """Raise ``FormatError`` if several columns of a table have the same name: readers use the last one."""
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    if repeated:
        raise FormatError(
            f"several columns are called {clipped(repeated[0])!r}",
            path=str(path),
            position="header",
            hint="give each column a unique name; case and surrounding blanks are ignored",
        )


def document_bytes(document: object) -> bytes:
    """Return a document as indented UTF-8 JSON with a final newline, the format of every ``--json`` output.

    NaN and infinities become null, NumPy values Python values, and paths texts. Characters that UTF-8 cannot
    encode, such as a byte 0xff in a file name, are escaped.
    """
    return msgspec.json.format(encode_json(document), indent=2) + b"\n"


def encode_json(document: object) -> bytes:
    """Return a document as compact JSON without a newline, with the conversions of :func:`document_bytes`."""
    try:
        return _ENCODER.encode(document)
    except UnicodeEncodeError:
        return _ENCODER.encode(_writable(msgspec.to_builtins(document, enc_hook=_builtin)))


def _builtin(value: object) -> object:
    """Return a JSON-compatible value for a NumPy value or a path."""
    if isinstance(value, np.generic | np.ndarray):
        plain: object = cast("NDArray[np.generic] | np.generic", value).tolist()
        return plain
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"values of type {type(value).__name__} have no JSON form")


_ENCODER = msgspec.json.Encoder(enc_hook=_builtin)


def _writable(value: object) -> object:
    r"""Replace unpaired surrogates, which UTF-8 cannot encode, by escapes such as ``\\udcff``."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        case list() | tuple():
            return [_writable(item) for item in cast("Sequence[object]", value)]
        case dict():
            return {_writable(key): _writable(item) for key, item in cast("dict[str, object]", value).items()}
        case _:
            return value


_FORMULA = re.compile(r"'*[=+\-@\t\r]")
"""Pattern of the beginning of a text that spreadsheets evaluate as a formula."""

_ESCAPED_FORMULA = re.compile(r"'+[=+\-@\t\r]")
"""Pattern of the beginning of a text that :func:`escape_formula` has escaped."""


def escape_formula(text: str) -> str:
    """Return a text for a table cell that spreadsheets do not evaluate: an apostrophe is added before a
    formula.

    A formula that is already preceded by apostrophes gets another one, so that :func:`unescape_formula`
    restores every text. Numbers are unchanged.
    """
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def escape_cell(cell: object) -> object:
    """Return the value for a cell of a table: texts are escaped by :func:`escape_formula`."""
    return escape_formula(cell) if isinstance(cell, str) else cell


def unescape_formula(cell: str) -> str:
    """Return the text that :func:`escape_formula` has escaped."""
    return cell[1:] if _ESCAPED_FORMULA.match(cell) and not _is_number(cell[1:]) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text[0] in "+-"


_SCRIPT_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\N{LINE SEPARATOR}": "\\u2028",
    "\N{PARAGRAPH SEPARATOR}": "\\u2029",
}


def json_for_script(document: bytes) -> str:
    """Return equivalent JSON for a ``script`` element: without ``<``, ``>``, ``&``, U+2028 and U+2029."""
    text = document.decode("utf-8")
    for letter, escape in _SCRIPT_ESCAPES.items():
        text = text.replace(letter, escape)
    return text


_MAX_DEPTH = 64
"""Limit of the parts of a dotted key, and of nested brackets, in a TOML file."""

_KEY_PART = re.compile(r"""(?:"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|[\w-]+)[ \t]*(\.?)[ \t]*""")

_POSITION = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
"""Pattern of the position at the end of an error message of tomllib."""

_DIGITS = re.compile(r"[\d_]+")

_MOST_DIGITS = 4000

_BRACKET = re.compile(r"[][{}]")


def read_toml(path: Path, what: str, *, where: str, example: str) -> dict[str, object]:
    """Return the root table of a TOML file.

    ``what`` is the kind of file for messages, ``where`` a hint for a missing file, ``example`` a hint for a
    wrong one. Raises ``FormatError`` if the file is missing, not a regular file, larger than 1 MiB, or not
    TOML.
    """
    import tomllib

    shown = str(path)
    try:
        content = read_document(path, limits().device_bytes, what)
    except FormatError as error:
        hint = example if error.position else where
        message = error.message if error.position else f"cannot be read: {error.message}"
        raise FormatError(message, path=shown, position=error.position, hint=hint) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FormatError(
            "not UTF-8",
            path=shown,
            position=f"line {line}, byte {error.start}",
            hint="save the file as UTF-8",
        ) from error
    deep = _long_key_line(text)
    try:
        if not deep:
            return tomllib.loads(text)
    except RecursionError:
        deep = _too_deep_line(text)
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise FormatError(
            f"not TOML: {_POSITION.sub('', str(error))}",
            path=shown,
            position=_error_position(str(error), text),
            hint='write a line as key = value, with texts in quotes: name = "my device"',
        ) from error
    raise FormatError(
        "tables nested too deeply",
        path=shown,
        position=deep,
        hint=f"use keys of at most three parts; {example}",
    )


def _error_position(message: str, text: str) -> str:
    """Return the line and column that an error message of tomllib states.

    For an oversized integer the message states no position; the result is then the line of that integer in
    ``text``.
    """
    position = _POSITION.search(message)
    if position and position.group(1):
        return f"line {position.group(1)}, column {position.group(2)}"
    at = (
        len(text)
        if position
        else next((m.start() for m in _DIGITS.finditer(text) if len(m[0]) > _MOST_DIGITS), 0)
    )
    return f"line {text.count(chr(10), 0, at) + 1}"


def _too_deep_line(text: str) -> str:
    """Return the first line of a TOML text with more than :data:`_MAX_DEPTH` open brackets."""
    depth = 0
    for number, line in enumerate(text.split("\n"), start=1):
        for bracket in _BRACKET.findall(line):
            depth += 1 if bracket in "[{" else -1
            if depth > _MAX_DEPTH:
                return f"line {number}"
    return "line 1"


def _long_key_line(text: str) -> str:
    """Return the line of the first TOML key with too many dotted parts, empty if there is none.

    tomllib takes hours to parse such a key. Each part is scanned once, so the time is O(length).
    """
    parts, end = 0, -1
    for part in _KEY_PART.finditer(text):
        parts = parts + 1 if part.start() == end else 1
        if parts > _MAX_DEPTH:
            return f"line {text.count(chr(10), 0, end) + 1}"
        end = part.end() if part.group(1) else -1
    return ""


_QUOTE, _BACKSLASH = ord('"'), ord("\\")

_STEP = np.array([(byte in b"{[") - (byte in b"}]") for byte in range(256)], np.int8)


class Brackets(NamedTuple):
    """Result of a scan of JSON text, with one entry per character.

    ``inside`` is True for characters in strings. ``step`` is +1 for an opening and -1 for a closing bracket
    outside of strings, else 0. ``depth`` is the number of brackets that are open after the character.
    """

    inside: NDArray[np.bool_]
    step: NDArray[np.int8]
    depth: NDArray[np.int32]


@dataclass(slots=True)
class BracketScan:
    """Scanner of JSON text that arrives in blocks.

    Between two blocks it saves whether the text is inside a string, whether it ends with an unpaired
    backslash, and the number of open brackets.
    """

    inside: bool = False
    escaped: bool = False
    depth: int = 0

    def scan(self, text: bytes | bytearray | memoryview[int] | NDArray[np.uint8]) -> Brackets:
        """Find the brackets outside of strings in the next block of a JSON text. O(len(text)), vectorised."""
        data = np.frombuffer(text, np.uint8)
        # A quote begins or ends a string if no backslash escapes it.
        quotes: NDArray[np.bool_] = data == _QUOTE
        slashes = np.flatnonzero(data == _BACKSLASH)
        if self.escaped:
            slashes = np.concatenate(([-1], slashes))
        if len(slashes) and len(data):
            starts = np.flatnonzero(np.diff(slashes, prepend=slashes[0] - 2) != 1)
            lengths = np.diff(np.append(starts, len(slashes)))
            escaped = (slashes[starts] + lengths)[lengths % 2 == 1]
            self.escaped = bool(len(escaped)) and int(escaped[-1]) == len(data)
            quotes[escaped[: len(escaped) - self.escaped]] = False
        inside = ((np.cumsum(quotes, dtype=np.int32) + self.inside) % 2).astype(np.bool_)
        step = _STEP[data]
        step[inside] = 0
        depth = np.cumsum(step, dtype=np.int32)
        if self.depth:
            depth += np.int32(self.depth)
        if len(data):
            self.inside, self.depth = bool(inside[-1]), int(depth[-1])
        return Brackets(inside, step, depth)


class ArrayCut(NamedTuple):
    """Position at which the text of a JSON array can be split.

    ``behind`` is the position after the last complete object (0: no object is complete). ``closed`` is the
    position of the bracket that ends the array (-1: the text does not contain it).
    """

    behind: int
    closed: int


def array_cut(text: bytes | bytearray) -> ArrayCut:
    """Return the last position at which an array of objects can be split. O(len(text)).

    ``text`` starts after the opening bracket of the array.
    """
    _, step, depth = BracketScan().scan(text)
    closed = np.flatnonzero(depth < 0)
    end = int(closed[0]) if len(closed) else -1
    within = slice(0, end if end >= 0 else len(depth))
    whole = np.flatnonzero((depth[within] == 0) & (step[within] < 0))
    return ArrayCut(int(whole[-1]) + 1 if len(whole) else 0, end)
