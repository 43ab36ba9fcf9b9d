"""Scanner of HLO text, detection of HLO files, and conversion of serialised modules to text.

The time of the scanner is linear in the text for any input. Every step is a loop with a counter, or a regular
expression whose alternatives begin with different characters, so that it never backtracks. (Possessive
quantifiers would do the same, but Python 3.11.2 has a bug in them.)

Text is detected by its first word, an ``HloModuleProto`` (``xla/service/hlo.proto`` of openxla/xla) by its
first fields. jaxlib prints a serialised module as text. ``jaxlib._hlo`` is private API; the calls exist in
the range that the ``stablehlo`` extra pins. XLA allocates a slot for every number up to the largest local id
of an instruction (the low 32 bits of ``HloInstructionProto.id``), so large ids are rejected first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from hespas.converters.format import Head
from hespas.files.limits import parser_hint
from hespas.files.sandbox import ParserFailedError, parser_memory, parser_time, run_sandboxed
from hespas.files.wire import BYTES, VARINT, WireError, decode_varint, fields
from hespas.graph.errors import FormatError, MissingExtraError

__all__ = [
    "STRING",
    "TESTED_JAXLIB",
    "TRUNCATED_HINT",
    "HloText",
    "begins_headerless",
    "is_text",
    "largest_local_id",
    "module_bytes",
    "print_text",
    "proto_to_text",
    "shown",
    "sniff",
    "strip_comments",
    "unquote",
]

_PRINTED_HINT = "use the text that XLA prints (--xla_dump_hlo_as_text, HloModule::ToString)"
TRUNCATED_HINT = "copy or dump the file again; the text ends early"

STRING = r""""[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*'"""
"""Pattern of a quoted string, which may contain line ends (``re.DOTALL``)."""

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
"""Blanks inside a value, before a list or a mesh that belongs to it."""

_QUOTED = re.compile(STRING, re.DOTALL)
_MAX_PIECES = 1000
"""Number of repetitions per match; the matcher keeps some bytes for each."""

_CLOSERS = {"{": "}", "(": ")", "[": "]"}
_RUNS = {
    opener: re.compile(
        rf"(?:[^{re.escape(opener + closer)}\"'/]+|{STRING}){{0,{_MAX_PIECES}}}",
        re.DOTALL,
    )
    for opener, closer in _CLOSERS.items()
}
"""Patterns that skip to the next bracket of one kind or to a slash; strings are skipped as a whole."""
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
    """Quote a name for a message; long names are cut."""
    return repr(name) if len(name) <= _SHOWN_NAME else f"{name[:_SHOWN_NAME]!r}..."


def _comment_end(text: str, start: int) -> int:
    """Return the offset after the comment that starts at ``start``, -1 if the comment does not end."""
    if text.startswith("//", start):
        end = text.find("\n", start)
        return len(text) if end < 0 else end
    end = text.find("*/", start + 2)
    return -1 if end < 0 else end + 2


def strip_comments(text: str) -> str:
    """Remove the comments from a text. O(text)."""
    if "/" not in text:
        return text
    if "//" not in text:  # every comment before the last end marker ends, so that the search is linear
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
    """Return True if a module without a header begins at ``position``. Such a module starts with its entry,
    or with a computation without a signature. Comments are ignored.
    """
    beginning = text[position : position + _BEGINNING_CHARACTERS]
    return _HEADERLESS.match(strip_comments(beginning)) is not None


def unquote(value: str) -> str:
    """Return the content of a quoted string with its C escapes resolved; other values unchanged."""
    if len(value) < 2 or value[0] not in "\"'" or value[-1] != value[0]:
        return value
    inner = value[1:-1]
    return _ESCAPE.sub(_unescape, inner) if "\\" in inner else inner


@dataclass(frozen=True, slots=True)
class HloText:
    """HLO text and the path of its file. Positions are character offsets into ``text``.

    ``origin`` is a prefix for positions in messages, for text that is not the content of the file (for
    example, text that was printed from a proto).
    """

    text: str
    path: str
    origin: str = ""

    def line(self, position: int) -> int:
        """Return the line of a position, from 1. O(position): for messages only."""
        return self.text.count("\n", 0, position) + 1

    def place(self, position: int) -> str:
        """Return line and column of a position, for messages."""
        column = position - self.text.rfind("\n", 0, position)
        return f"{self.origin}line {self.line(position)}, column {column}"

    def error(self, position: int, expected: str, hint: str | None = None) -> FormatError:
        """Return the error for text at ``position`` that is not ``expected``."""
        ended = position >= len(self.text)
        actual = "the end" if ended else repr(self.text[position : position + _SHOWN_CHARACTERS])
        on_last_line = self.text.find("\n", position) < 0
        return FormatError(
            f"expected {expected}, found {actual}",
            path=self.path,
            position=self.place(position),
            hint=TRUNCATED_HINT if on_last_line else hint or _PRINTED_HINT,
        )

    def skip_space(self, position: int) -> int:
        """Return the offset after blanks, line ends and comments."""
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
        """Return the offset after the closing bracket that matches the one at ``position``. Raises
        ``FormatError`` without one.
        """
        text = self.text
        opener = text[position]
        closer, run = _CLOSERS[opener], _RUNS[opener]
        depth, cursor = 1, position + 1
        while True:
            match = run.match(text, cursor)
            before, cursor = cursor, match.end() if match else cursor
            character = text[cursor : cursor + 1]
            if character == closer:
                depth -= 1
                if not depth:
                    return cursor + 1
            elif character == opener:
                depth += 1
            elif character == "/":
                # Skip a comment, or a slash that does not begin one.
                if not _COMMENT_START.match(self.text, cursor):
                    cursor = cursor + 1
                else:
                    end = _comment_end(self.text, cursor)
                    if end < 0:
                        raise self.error(cursor, "a string or comment that ends", TRUNCATED_HINT)
                    cursor = end
                continue
            elif not character:
                line = self.line(position)
                raise self.error(len(text), f"the {closer!r} for the {opener!r} of line {line}")
            elif cursor == before:  # no progress: a quote that is not closed
                raise self.error(cursor, "a string or comment that ends", TRUNCATED_HINT)
            else:
                continue
            cursor += 1

    def skip_value(self, position: int) -> int:
        """Return the offset after an attribute's value, which ends at a comma, comment, blank or closing
        bracket outside of it.
        """
        text = self.text
        cursor = position
        while True:
            match = _PLAIN.match(text, cursor)
            cursor = match.end() if match else cursor
            character = text[cursor : cursor + 1]
            if character and character in "{([":
                cursor = self.skip_group(cursor)
                continue
            if character == "/" and not _COMMENT_START.match(text, cursor):
                cursor += 1
                continue
            if not character or character not in "\"'":  # a comment ends the value too
                more = _CONTINUED.match(text, cursor) if character in {" ", "\t"} else None
                if more is None:
                    return cursor
                cursor = more.end()
                continue
            quoted = _QUOTED.match(text, cursor)
            if quoted is None:
                raise self.error(cursor, "a string that ends", TRUNCATED_HINT)
            cursor = quoted.end()


_CERTAIN, _LIKELY, _NO = 100, 80, 0
_NAME_TAG, _ENTRY_TAG, _COMPUTATION_TAG = 0x0A, 0x12, 0x1A
_MAX_NAME_BYTES = 4096


def is_text(data: bytes) -> bool:
    """Return True if the bytes begin like a module in text form; comments and blanks are ignored."""
    text, start = _beginning(data)
    return _has_header(text, start) or begins_headerless(text, start)


def _beginning(data: bytes) -> tuple[str, int]:
    text = data[: 1 << 16].decode("utf-8-sig", "replace")
    return text, HloText(text, "").skip_space(0)


def _has_header(text: str, start: int) -> bool:
    return text.startswith("HloModule", start) and not text[start + 9 : start + 10].isalnum()


def _field(data: bytes, position: int, tag: int) -> tuple[bytes, int] | None:
    """Return the content and the end of a short length-delimited field at ``position``; None if ``tag`` is
    not there.
    """
    if data[position : position + 1] != bytes([tag]):
        return None
    try:
        length, start = decode_varint(data, position + 1, len(data))
    except WireError:
        return None
    return data[start : start + min(length, _MAX_NAME_BYTES)], start + length


def _is_module(data: bytes) -> bool:
    """Return True if the bytes begin like an ``HloModuleProto``: module name (field 1), entry name (field 2),
    then a computation (field 3) whose first field is its own name.
    """
    module = _field(data, 0, _NAME_TAG)
    entry = _field(data, module[1], _ENTRY_TAG) if module else None
    computation = _field(data, entry[1], _COMPUTATION_TAG) if entry else None
    name = _field(computation[0], 0, _NAME_TAG) if computation else None
    if module is None or entry is None or name is None:
        return False
    return all(part[0].isascii() and part[0].decode("ascii").isprintable() for part in (module, entry))


def module_bytes(data: bytes) -> bytes | None:
    """Return the ``HloModuleProto`` in a binary file: the file itself, or the first field of an ``HloProto``
    (written by ``--xla_dump_hlo_as_proto``); None for other files.
    """
    if _is_module(data):
        return data
    start = _field(data, 0, _NAME_TAG)
    if start is None or not _is_module(start[0]):
        return None
    content, end = start
    return data[data.index(content) : end]


def sniff(head: Head) -> int:
    """Return the confidence that an input is HLO: 0 (no) .. 100 (certain)."""
    if head.is_directory:
        return _NO
    if is_text(head.data):
        return _CERTAIN if _has_header(*_beginning(head.data)) else _LIKELY
    return _NO if module_bytes(head.data) is None else _LIKELY


_STDERR = 2
_XLA_RAISES = (RuntimeError, ValueError, IndexError, OverflowError)
"""Exceptions of XLA: XlaRuntimeError is a RuntimeError; the others come from the C++ library."""
_REFUSED = b"\0"
_FEW_IDS = 1 << 20
"""Local ids that any module may have; a larger module may have as many as it has bytes."""
TESTED_JAXLIB = "jaxlib>=0.10.2,<0.11"


class _Module(Protocol):
    def to_string(self) -> str:
        """Print the module in XLA's text format."""
        ...


class _ModuleClass(Protocol):
    def from_serialized_hlo_module_proto(self, data: bytes) -> _Module:
        """Parse a serialised ``HloModuleProto``."""
        ...


def _module_class() -> _ModuleClass:
    try:
        return cast("_ModuleClass", import_module("jaxlib._hlo").HloModule)
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            "reading a serialised HloModuleProto", "stablehlo", detail=f"{error}; {TESTED_JAXLIB} is needed"
        ) from error


@contextmanager
def _silence() -> Generator[None]:
    """Suppress XLA's log messages about a damaged proto. XLA writes them to file descriptor 2 directly, not
    to ``sys.stderr``.
    """
    try:
        saved = os.dup(_STDERR)
    except OSError:  # stderr is closed
        yield
        return
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, _STDERR)
        os.close(null)
        yield
    finally:
        os.dup2(saved, _STDERR)
        os.close(saved)


def proto_to_text(data: bytes, path: str) -> str:
    """Return the text of a serialised module. Raises ``FormatError`` for other bytes, ``MissingExtraError``
    without a suitable jaxlib.

    XLA aborts the process on some damaged modules, so a child process converts them.
    """
    _module_class()
    # For large ids XLA would allocate far more memory than the module needs.
    try:
        largest = largest_local_id(data)
    except ValueError as error:
        raise _no_module(data, path, str(error)) from error
    if largest > _FEW_IDS + len(data):
        raise _no_module(data, path, f"an instruction has number {largest:,} in its computation")
    try:
        text = run_sandboxed(f"{__name__}:print_text", data, "XLA")
    except ParserFailedError as error:
        raise _no_module(data, path, f"it {error}", is_bounded=True) from None
    if text.startswith(_REFUSED):
        raise _no_module(data, path, text.removeprefix(_REFUSED).decode("utf-8", "replace"))
    return text.decode("utf-8", "surrogateescape")


def print_text(data: bytes, parser_bytes: int) -> bytes:
    """Print a serialised module as text; runs in the child process. A failure is returned as a NUL and the
    reason.
    """
    parse = _module_class().from_serialized_hlo_module_proto
    try:
        with _silence(), parser_memory(parser_bytes), parser_time(len(data)):
            text = parse(data).to_string()
    except _XLA_RAISES as error:
        reason = str(error).splitlines()[0][:200] if str(error) else "not a HloModuleProto"
        return _REFUSED + reason.encode("utf-8", "replace")
    return text.encode("utf-8", "surrogateescape")


def _no_module(data: bytes, path: str, reason: str, *, is_bounded: bool = False) -> FormatError:
    hint = "copy the file again, or dump the module as text (--xla_dump_hlo_as_text)"
    return FormatError(
        f"expected a serialised HloModuleProto: {reason}",
        path=path,
        position=f"within {len(data):,} bytes",
        hint=parser_hint(hint) if is_bounded else hint,
    )


_COMPUTATIONS = 3
_INSTRUCTIONS = 2
_ID = 35


def largest_local_id(data: bytes) -> int:
    """Return the largest local id of any instruction, -1 for none. Raises ``ValueError`` for malformed
    protobuf. O(fields of all instructions).
    """
    largest = -1
    for start, end in _messages(data, 0, len(data), _COMPUTATIONS):
        for first, last in _messages(data, start, end, _INSTRUCTIONS):
            ids = (
                value & 0xFFFFFFFF
                for number, wire, value, _ in fields(data, first, last)
                if number == _ID and wire == VARINT
            )
            local_id = max(ids, default=-1)
            largest = max(largest, local_id)
    return largest


def _messages(data: bytes, start: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of the messages in field number ``wanted``."""
    for number, wire, first, last in fields(data, start, end):
        if number == wanted and wire == BYTES:
            yield first, last
