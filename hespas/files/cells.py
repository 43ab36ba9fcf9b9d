"""Texts as cells of a CSV file: a spreadsheet takes some for formulas, and runs what a file's names say."""

from __future__ import annotations

import re

__all__ = ["inert", "inert_cell", "original"]

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
