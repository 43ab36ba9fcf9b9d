"""What scripts and spreadsheets read: JSON documents by one encoder, and the cells of CSV files.

A document is a ``msgspec.Struct``; its schema in ``hespas/schemas`` is generated from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Annotated, cast

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from hespas.graph.errors import FormatError, clipped

__all__ = [
    "Count",
    "Figure",
    "check_column_names",
    "document_bytes",
    "encoded",
    "inert",
    "inert_cell",
    "json_for_script",
    "original",
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


# --- Texts as cells of a CSV file: a spreadsheet takes some for formulas, and runs what a file's names say.

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
