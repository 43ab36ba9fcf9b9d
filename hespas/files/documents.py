"""What scripts and spreadsheets read: JSON documents by one encoder, and the cells of CSV files.

A document is a ``msgspec.Struct``; its schema in ``hespas/schemas`` is generated from it.
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
    "BracketScan",
    "Brackets",
    "Count",
    "Figure",
    "array_cut",
    "check_column_names",
    "document_bytes",
    "encoded",
    "inert",
    "inert_cell",
    "json_for_script",
    "original",
    "read_toml",
]


Figure = Annotated[float, Meta(extra_json_schema={"nullable": True})]
"""A number; NaN and the infinities, which JSON cannot spell, are null: schemas (tools/schemas.py) say so."""

Count = Annotated[int, Meta(ge=0)]
"""How many of something there are."""


def check_column_names(names: Iterable[str], path: PurePath | str) -> None:
    """Raise ``FormatError`` where several columns of a table have one name: readers take the last."""
    repeated = [name for name, count in Counter(names).items() if name and count > 1]
    if repeated:
        raise FormatError(
            f"several columns are called {clipped(repeated[0])!r}",
            path=str(path),
            position="header",
            hint="give each a name of its own; case and blanks around it do not count",
        )


def document_bytes(document: object) -> bytes:
    """Return a document as indented UTF-8 JSON that ends in a newline: what every ``--json`` writes.

    NaN and the infinities are null, values of NumPy those of Python, and paths texts. What UTF-8 cannot hold,
    such as a byte 0xff in the name of a file, is spelled out as text.
    """
    return msgspec.json.format(encoded(document), indent=2) + b"\n"


def encoded(document: object) -> bytes:
    """Return the same as compact JSON without a newline."""
    try:
        return _ENCODER.encode(document)
    except UnicodeEncodeError:
        return _ENCODER.encode(_writable(msgspec.to_builtins(document, enc_hook=_builtin)))


def _builtin(value: object) -> object:
    """Return what stands for a value that JSON has no type for."""
    if isinstance(value, np.generic | np.ndarray):
        plain: object = cast("NDArray[np.generic] | np.generic", value).tolist()
        return plain
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"no JSON for a {type(value).__name__}")


_ENCODER = msgspec.json.Encoder(enc_hook=_builtin)


def _writable(value: object) -> object:
    """Spell out unpaired surrogates, which no UTF-8 holds: ``\\udcff``."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        case list() | tuple():
            return [_writable(each) for each in cast("Sequence[object]", value)]
        case dict():
            return {_writable(key): _writable(each) for key, each in cast("dict[str, object]", value).items()}
        case _:
            return value


_FORMULA = re.compile(r"'*[=+\-@\t\r]")

_INERT = re.compile(r"'+[=+\-@\t\r]")


def inert(text: str) -> str:
    """A text that no spreadsheet calculates: an apostrophe stands before what would begin a formula, and
    before one that stands there already, so that :func:`original` gives every text back. Numbers stay.
    """
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def inert_cell(cell: object) -> object:
    """The same of any cell: what is no text is a number or empty."""
    return inert(cell) if isinstance(cell, str) else cell


def original(cell: str) -> str:
    """What :func:`inert` was given."""
    return cell[1:] if _INERT.match(cell) and not _is_number(cell[1:]) else cell


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
    """JSON for a ``script`` element that means the same: without ``<``, ``>``, ``&``, U+2028 and U+2029."""
    text = document.decode("utf-8")
    for letter, escape in _SCRIPT_ESCAPES.items():
        text = text.replace(letter, escape)
    return text


_MOST_PARTS = 64

_KEY_PART = re.compile(r"""(?:"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|[\w-]+)[ \t]*(\.?)[ \t]*""")

_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")

_DIGITS = re.compile(r"[\d_]+")

_MOST_DIGITS = 4000

_BRACKET = re.compile(r"[][{}]")


def read_toml(path: Path, what: str, *, where: str, example: str) -> dict[str, object]:
    """The root table of a file that is ``what``. Raises ``FormatError`` if it is missing, no regular file,
    over 1 MiB, or not TOML; remedies name ``where`` such files are and an ``example`` of one.
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
    deep = _many_parts(text)
    try:
        if not deep:
            return tomllib.loads(text)
    except RecursionError:
        deep = _deepest(text)
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise FormatError(
            f"not TOML: {_PLACE.sub('', str(error))}",
            path=shown,
            position=_place(str(error), text),
            hint='a line is key = value, with texts in quotes: name = "my device"',
        ) from error
    raise FormatError(
        "tables nested too deeply",
        path=shown,
        position=deep,
        hint=f"no key has more than three parts; {example}",
    )


def _place(told: str, text: str) -> str:
    """Where the library says that it stopped; for a number, that it does not place, the first long one."""
    place = _PLACE.search(told)
    if place and place.group(1):
        return f"line {place.group(1)}, column {place.group(2)}"
    at = (
        len(text)
        if place
        else next((m.start() for m in _DIGITS.finditer(text) if len(m[0]) > _MOST_DIGITS), 0)
    )
    return f"line {text.count(chr(10), 0, at) + 1}"


def _deepest(text: str) -> str:
    """The first line at which more brackets are open than any file has."""
    depth = 0
    for number, line in enumerate(text.split("\n"), start=1):
        for bracket in _BRACKET.findall(line):
            depth += 1 if bracket in "[{" else -1
            if depth > _MOST_PARTS:
                return f"line {number}"
    return "line 1"


def _many_parts(text: str) -> str:
    """The line of the first key of many parts, for which the library takes hours; empty where none is.
    O(length): no part is looked at twice.
    """
    parts, end = 0, -1
    for part in _KEY_PART.finditer(text):
        parts = parts + 1 if part.start() == end else 1
        if parts > _MOST_PARTS:
            return f"line {text.count(chr(10), 0, end) + 1}"
        end = part.end() if part.group(1) else -1
    return ""


_QUOTE, _BACKSLASH = ord('"'), ord("\\")

_STEP = np.array([(byte in b"{[") - (byte in b"}]") for byte in range(256)], np.int8)


class Brackets(NamedTuple):
    """Per character: whether it stands between quotes, what it opens (1) or closes (-1) outside of them, and
    how many brackets are open behind it.
    """

    inside: NDArray[np.bool_]
    step: NDArray[np.int8]
    depth: NDArray[np.int32]


@dataclass(slots=True)
class BracketScan:
    """Where a scan of a text in blocks stands: inside a string or not, behind a lone backslash or not, and
    how many brackets are open.
    """

    inside: bool = False
    escaped: bool = False
    depth: int = 0

    def scan(self, text: bytes | bytearray | memoryview[int] | NDArray[np.uint8]) -> Brackets:
        """The next block. O(len(text)), vectorised."""
        data = np.frombuffer(text, np.uint8)
        inside = ((np.cumsum(self._quotes(data), dtype=np.int32) + self.inside) % 2).astype(np.bool_)
        step = _STEP[data]
        step[inside] = 0
        depth = np.cumsum(step, dtype=np.int32)
        if self.depth:
            depth += np.int32(self.depth)
        if len(data):
            self.inside, self.depth = bool(inside[-1]), int(depth[-1])
        return Brackets(inside, step, depth)

    def _quotes(self, data: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which characters are quotes; behind an odd number of backslashes there is none."""
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
        return quotes


class _ArrayCut(NamedTuple):
    """``behind`` is the position behind the last whole object (0: there is none); ``closed`` the position of
    the bracket that ends the array, -1 where it is not in the text.
    """

    behind: int
    closed: int


def array_cut(text: bytes | bytearray) -> _ArrayCut:
    """Where an array of objects may be cut; ``text`` starts inside of it. O(len(text)), vectorised."""
    _, step, depth = BracketScan().scan(text)
    closed = np.flatnonzero(depth < 0)
    end = int(closed[0]) if len(closed) else -1
    within = slice(0, end if end >= 0 else len(depth))
    whole = np.flatnonzero((depth[within] == 0) & (step[within] < 0))
    return _ArrayCut(int(whole[-1]) + 1 if len(whole) else 0, end)
