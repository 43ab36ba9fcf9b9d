"""Text of the input as messages may show it: cut, and without characters that steer a terminal."""

from __future__ import annotations

import re

__all__ = ["excerpt", "place_of", "quoted", "shortened"]

_MAX_QUOTE = 120
_MAX_MESSAGE = 600
_BEFORE = 40
"""Characters of a long line that are shown in front of the fault."""

_IN_INPUT = re.compile(r'loc\("-":(\d+):(\d+)\)')
"""A place in a text that was parsed from memory."""

_LONG_WORD = re.compile(rf"\S{{{_MAX_QUOTE + 1},}}")


def quoted(text: str, limit: int = _MAX_QUOTE) -> str:
    """At most ``limit`` characters, control and other unprintable ones escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)


def shortened(message: str) -> str:
    """A parser's message, its overlong words (names from the input) cut."""
    return quoted(_LONG_WORD.sub(lambda word: quoted(word[0]), " ".join(message.split())), _MAX_MESSAGE)


def excerpt(line: str, column: int) -> str:
    """A line of the input, a long one from shortly before its ``column``, which counts from 1."""
    stripped = line.strip()
    if len(stripped) <= _MAX_QUOTE:
        return quoted(stripped)
    start = max(0, column - 1 - _BEFORE)
    return ("..." if start else "") + quoted(line[start:].strip(), _MAX_QUOTE - 3)


def place_of(location: str) -> str:
    """A printed MLIR location as a position: line and column of the input, or what it says, cut."""
    found = _IN_INPUT.fullmatch(location)
    return f"line {found[1]}:{found[2]}" if found else quoted(location)
