"""Where things end in HLO text: blanks, comments, strings, bracketed groups, attribute values.

Every step is a possessive (never backtracking) match or a loop with a counter, so time is linear in the text
and nesting depth costs nothing, whatever the input holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hespas.graph.errors import FormatError

__all__ = ["COMMENT", "PRINTED_HINT", "TRUNCATED_HINT", "Source", "shown", "unquote"]

PRINTED_HINT = "is this the text XLA prints (--xla_dump_hlo_as_text, HloModule::ToString)?"
TRUNCATED_HINT = "the text ends early: copy or dump the file again"

COMMENT = re.compile(r"/\*(?:[^*]|\*(?!/))*+\*/|//[^\n]*+")
_STRING = r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+'"""
_SPACE = re.compile(rf"(?:[ \t\r\n]++|{COMMENT.pattern})*+")
_PLAIN = re.compile(r"""(?:[^,\n{}()\[\]"'/]++|/(?![*/]))*+""")
_QUOTED = re.compile(_STRING, re.DOTALL)


def _run(opener: str, closer: str) -> re.Pattern[str]:
    """Everything up to the next bracket of one kind, strings and comments in one piece."""
    plain = f"[^{re.escape(opener + closer)}\"'/]++"
    return re.compile(rf"(?:{plain}|{_STRING}|{COMMENT.pattern}|/(?![*/]))*+", re.DOTALL)


_CLOSERS = {"{": "}", "(": ")", "[": "]"}
_RUNS = {opener: _run(opener, closer) for opener, closer in _CLOSERS.items()}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_OCTAL = frozenset("01234567")
_SHOWN_CHARACTERS = 40
_SHOWN_NAME = 120


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] == "x" and len(code) > 1:
        return chr(int(code[1:], 16))
    if code[0] in _OCTAL:
        return chr(int(code, 8) & 0xFF)
    return _ESCAPES.get(code, code)


def shown(name: str) -> str:
    """A name in quotes for a message, its start where it is long."""
    return repr(name) if len(name) <= _SHOWN_NAME else f"{name[:_SHOWN_NAME]!r}..."


def unquote(value: str) -> str:
    """The content of a quoted string with its C escapes resolved; any other value unchanged."""
    if len(value) < 2 or value[0] not in "\"'" or value[-1] != value[0]:
        return value
    inner = value[1:-1]
    return _ESCAPE.sub(_unescape, inner) if "\\" in inner else inner


@dataclass(frozen=True, slots=True)
class Source:
    """HLO text and the file it is from. Positions are character offsets into ``text``.

    ``origin`` says what the lines of ``text`` are where it is not the file itself (a decoded proto).
    """

    text: str
    path: str
    origin: str = ""

    def line(self, position: int) -> int:
        """The line of a position, from 1. O(position): for messages."""
        return self.text.count("\n", 0, position) + 1

    def error(self, position: int, expected: str, hint: str | None = None) -> FormatError:
        """What to raise where ``expected`` does not stand at ``position``."""
        ended = position >= len(self.text)
        found = "the end" if ended else repr(self.text[position : position + _SHOWN_CHARACTERS])
        on_last_line = self.text.find("\n", position) < 0
        column = position - self.text.rfind("\n", 0, position)
        return FormatError(
            f"expected {expected}, found {found}",
            path=self.path,
            position=f"{self.origin}line {self.line(position)}, column {column}",
            hint=TRUNCATED_HINT if on_last_line else hint or PRINTED_HINT,
        )

    def skip_space(self, position: int) -> int:
        """Past blanks, line ends and comments."""
        match = _SPACE.match(self.text, position)
        return match.end() if match else position

    def skip_group(self, position: int) -> int:
        """Past the bracket at ``position`` and its partner. Raises ``FormatError`` where there is none."""
        text = self.text
        opener = text[position]
        closer, run = _CLOSERS[opener], _RUNS[opener]
        depth, cursor = 0, position
        while True:
            match = run.match(text, cursor)
            cursor = match.end() if match else cursor
            found = text[cursor : cursor + 1]
            if found == opener:
                depth += 1
            elif found == closer:
                depth -= 1
                if not depth:
                    return cursor + 1
            elif found:
                raise self.error(cursor, "a string or comment that ends", TRUNCATED_HINT)
            else:
                line = self.line(position)
                raise self.error(len(text), f"the {closer!r} for the {opener!r} of line {line}")
            cursor += 1

    def skip_value(self, position: int) -> int:
        """Past an attribute's value: to the comma, comment, line end or closing bracket not part of it."""
        text = self.text
        cursor = position
        while True:
            match = _PLAIN.match(text, cursor)
            cursor = match.end() if match else cursor
            found = text[cursor : cursor + 1]
            if found and found in "{([":
                cursor = self.skip_group(cursor)
                continue
            if not found or found not in "\"'":  # a comment ends the value too
                return cursor
            quoted = _QUOTED.match(text, cursor)
            if quoted is None:
                raise self.error(cursor, "a string that ends", TRUNCATED_HINT)
            cursor = quoted.end()
