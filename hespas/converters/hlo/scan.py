"""Where things end in HLO text: blanks, comments, strings, bracketed groups, attribute values.

Every step is a match whose parts begin with different characters, so that giving back never helps and is
never tried twice, or a loop with a counter: time is linear in the text and nesting depth costs nothing,
whatever the input holds. Possessive quantifiers would say the same, but Python 3.11.2 runs them wrongly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hespas.graph.errors import FormatError

__all__ = [
    "PRINTED_HINT",
    "STRING",
    "TRUNCATED_HINT",
    "Source",
    "begins_headerless",
    "shown",
    "strip_comments",
    "unquote",
]

PRINTED_HINT = "is this the text XLA prints (--xla_dump_hlo_as_text, HloModule::ToString)?"
TRUNCATED_HINT = "the text ends early: copy or dump the file again"

STRING = r""""[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'"""
"""A quoted string, as a pattern; line ends may stand in it (``re.DOTALL``)."""

_HEADERLESS = re.compile(
    r"ENTRY\s+%?[A-Za-z_][\w.\-]*\s*(?:\{|\([^(){}]*(?:\([^(){}]*\)[^(){}]*)*\)\s*->)"
    r"|%?[A-Za-z_][\w.\-]*\s*\{\s*(?:ROOT\s+)?%?[A-Za-z_][\w.\-]*\s*=\s*(?:[a-z]\w*\[|\(|[a-z][a-z\-]*\()"
)
_BEGINNING_CHARACTERS = 1 << 16

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT_START = re.compile(r"/[*/]")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_PLAIN = re.compile(r"""[^,\s{}()\[\]"'/]*""")
_CONTINUED = re.compile(r"[ \t]+(?=[{\[])")
"""A blank inside a value: its list or mesh goes on behind it."""

_QUOTED = re.compile(STRING, re.DOTALL)
_MAX_PIECES = 1000
"""Pieces matched at once: the matcher keeps some bytes for each."""


def _run(opener: str, closer: str) -> re.Pattern[str]:
    """Up to the next bracket of one kind or a slash, strings in one piece."""
    plain = f"[^{re.escape(opener + closer)}\"'/]+"
    return re.compile(rf"(?:{plain}|{STRING}){{0,{_MAX_PIECES}}}", re.DOTALL)


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


def _comment_end(text: str, start: int) -> int:
    """Where the comment at ``start`` ends, -1 where it does not."""
    if text.startswith("//", start):
        end = text.find("\n", start)
        return len(text) if end < 0 else end
    end = text.find("*/", start + 2)
    return -1 if end < 0 else end + 2


def strip_comments(text: str) -> str:
    """Text without its comments. O(text)."""
    if "/" not in text:
        return text
    if "//" not in text:  # each comment up to the last end has an end: no start is looked behind twice
        end = text.rfind("*/") + 2
        return _COMMENT.sub("", text[:end]) + text[end:] if end > 1 else text
    parts: list[str] = []
    position = 0
    while match := _COMMENT_START.search(text, position):
        end = _comment_end(text, match.start())
        if end < 0:
            break
        parts.append(text[position : match.start()])
        position = end
    return "".join(parts) + text[position:]


def begins_headerless(text: str, position: int) -> bool:
    """Whether a module begins there that leaves its header out: with its entry, or with a computation without
    a signature, comments aside.
    """
    beginning = text[position : position + _BEGINNING_CHARACTERS]
    return _HEADERLESS.match(strip_comments(beginning)) is not None


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

    def place(self, position: int) -> str:
        """Line and column of a position, for messages."""
        column = position - self.text.rfind("\n", 0, position)
        return f"{self.origin}line {self.line(position)}, column {column}"

    def error(self, position: int, expected: str, hint: str | None = None) -> FormatError:
        """What to raise where ``expected`` does not stand at ``position``."""
        ended = position >= len(self.text)
        found = "the end" if ended else repr(self.text[position : position + _SHOWN_CHARACTERS])
        on_last_line = self.text.find("\n", position) < 0
        return FormatError(
            f"expected {expected}, found {found}",
            path=self.path,
            position=self.place(position),
            hint=TRUNCATED_HINT if on_last_line else hint or PRINTED_HINT,
        )

    def skip_space(self, position: int) -> int:
        """Past blanks, line ends and comments."""
        text = self.text
        while True:
            match = _SPACE.match(text, position)
            position = match.end() if match else position
            if not text.startswith("/", position) or not _COMMENT_START.match(text, position):
                return position
            end = _comment_end(text, position)
            if end < 0:
                return position
            position = end

    def skip_group(self, position: int) -> int:
        """Past the bracket at ``position`` and its partner. Raises ``FormatError`` where there is none."""
        text = self.text
        opener = text[position]
        closer, run = _CLOSERS[opener], _RUNS[opener]
        depth, cursor = 1, position + 1
        while True:
            match = run.match(text, cursor)
            before, cursor = cursor, match.end() if match else cursor
            found = text[cursor : cursor + 1]
            if found == closer:
                depth -= 1
                if not depth:
                    return cursor + 1
            elif found == opener:
                depth += 1
            elif found == "/":
                cursor = self._past_slash(cursor)
                continue
            elif not found:
                line = self.line(position)
                raise self.error(len(text), f"the {closer!r} for the {opener!r} of line {line}")
            elif cursor == before:  # no progress: a quote that nothing closes
                raise self.error(cursor, "a string or comment that ends", TRUNCATED_HINT)
            else:
                continue
            cursor += 1

    def _past_slash(self, position: int) -> int:
        """Past a comment, or past a slash that begins none."""
        if not _COMMENT_START.match(self.text, position):
            return position + 1
        end = _comment_end(self.text, position)
        if end < 0:
            raise self.error(position, "a string or comment that ends", TRUNCATED_HINT)
        return end

    def skip_value(self, position: int) -> int:
        """Past an attribute's value: to the comma, comment, blank or closing bracket not part of it."""
        text = self.text
        cursor = position
        while True:
            match = _PLAIN.match(text, cursor)
            cursor = match.end() if match else cursor
            found = text[cursor : cursor + 1]
            if found and found in "{([":
                cursor = self.skip_group(cursor)
                continue
            if found == "/" and not _COMMENT_START.match(text, cursor):
                cursor += 1
                continue
            if not found or found not in "\"'":  # a comment ends the value too
                more = _CONTINUED.match(text, cursor) if found in {" ", "\t"} else None
                if more is None:
                    return cursor
                cursor = more.end()
                continue
            quoted = _QUOTED.match(text, cursor)
            if quoted is None:
                raise self.error(cursor, "a string that ends", TRUNCATED_HINT)
            cursor = quoted.end()
