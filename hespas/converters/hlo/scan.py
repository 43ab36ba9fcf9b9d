"""HLO as it comes: sniffed, printed as text by jaxlib where it is a proto, and where things end in that text:
blanks, comments, strings, bracketed groups, attribute values.

Every step is a match whose parts begin with different characters, so that giving back never helps and is
never tried twice, or a loop with a counter: time is linear in the text and nesting depth costs nothing,
whatever the input holds. Possessive quantifiers would say the same, but Python 3.11.2 runs them wrongly.
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

_PRINTED_HINT = "is this the text XLA prints (--xla_dump_hlo_as_text, HloModule::ToString)?"
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
class HloText:
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
            hint=TRUNCATED_HINT if on_last_line else hint or _PRINTED_HINT,
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
                # Past a comment, or past a slash that begins none.
                if not _COMMENT_START.match(self.text, cursor):
                    cursor = cursor + 1
                else:
                    end = _comment_end(self.text, cursor)
                    if end < 0:
                        raise self.error(cursor, "a string or comment that ends", TRUNCATED_HINT)
                    cursor = end
                continue
            elif not found:
                line = self.line(position)
                raise self.error(len(text), f"the {closer!r} for the {opener!r} of line {line}")
            elif cursor == before:  # no progress: a quote that nothing closes
                raise self.error(cursor, "a string or comment that ends", TRUNCATED_HINT)
            else:
                continue
            cursor += 1

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


# --- Telling HLO from its first bytes: text by its first word, ``HloModuleProto`` by its first fields.
#
# Messages: ``xla/service/hlo.proto`` of openxla/xla.

_CERTAIN, _LIKELY, _NO = 100, 80, 0
_NAME_TAG, _ENTRY_TAG, _COMPUTATION_TAG = 0x0A, 0x12, 0x1A
_MAX_NAME_BYTES = 4096


def is_text(data: bytes) -> bool:
    """Whether the bytes begin as a module does, comments and blanks aside."""
    text, start = _beginning(data)
    return _has_header(text, start) or begins_headerless(text, start)


def _beginning(data: bytes) -> tuple[str, int]:
    text = data[: 1 << 16].decode("utf-8-sig", "replace")
    return text, HloText(text, "").skip_space(0)


def _has_header(text: str, start: int) -> bool:
    return text.startswith("HloModule", start) and not text[start + 9 : start + 10].isalnum()


def _field(data: bytes, position: int, tag: int) -> tuple[bytes, int] | None:
    """A short length-delimited field at ``position``: its content and where it ends."""
    if data[position : position + 1] != bytes([tag]):
        return None
    try:
        length, start = decode_varint(data, position + 1, len(data))
    except WireError:
        return None
    return data[start : start + min(length, _MAX_NAME_BYTES)], start + length


def _is_module(data: bytes) -> bool:
    """Whether the bytes begin as ``HloModuleProto`` does: module name, entry name, then a computation whose
    first field is its own name (fields 1, 2, 3).
    """
    module = _field(data, 0, _NAME_TAG)
    entry = _field(data, module[1], _ENTRY_TAG) if module else None
    computation = _field(data, entry[1], _COMPUTATION_TAG) if entry else None
    name = _field(computation[0], 0, _NAME_TAG) if computation else None
    if module is None or entry is None or name is None:
        return False
    return all(part[0].isascii() and part[0].decode("ascii").isprintable() for part in (module, entry))


def module_bytes(data: bytes) -> bytes | None:
    """The ``HloModuleProto`` in a binary file: the file itself, or the first field of an ``HloProto`` (what
    ``--xla_dump_hlo_as_proto`` writes); None for anything else.
    """
    if _is_module(data):
        return data
    start = _field(data, 0, _NAME_TAG)
    if start is None or not _is_module(start[0]):
        return None
    content, end = start
    return data[data.index(content) : end]


def sniff(head: Head) -> int:
    """How surely an input is HLO."""
    if head.is_directory:
        return _NO
    if is_text(head.data):
        return _CERTAIN if _has_header(*_beginning(head.data)) else _LIKELY
    return _NO if module_bytes(head.data) is None else _LIKELY


# --- The one place that touches jaxlib's HLO bindings, to print a serialised ``HloModuleProto`` as text.
#
# ``jaxlib._hlo`` is private API; the calls below exist in the range that the ``stablehlo`` extra pins. HLO
# text is read without jaxlib.

_STDERR = 2
_XLA_RAISES = (RuntimeError, ValueError, IndexError, OverflowError)
"""What its exceptions become: XlaRuntimeError is a RuntimeError, the others are those of the C++ library."""
_REFUSED = b"\0"
_FEW_IDS = 1 << 20
"""Local ids that any module may have; beyond them, no more than it has bytes."""
TESTED_JAXLIB = "jaxlib>=0.10.2,<0.11"


class _Module(Protocol):
    def to_string(self) -> str:
        """The module in XLA's text format."""
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
            "reading a serialised HloModuleProto", "stablehlo", detail=f"tested with {TESTED_JAXLIB}: {error}"
        ) from error


@contextmanager
def _silence() -> Generator[None]:
    """Keep what XLA logs of a damaged proto off the terminal: it writes to file descriptor 2 itself."""
    try:
        kept = os.dup(_STDERR)
    except OSError:  # closed: nothing is written anywhere
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDERR)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)


def proto_to_text(data: bytes, path: str) -> str:
    """The text of a serialised module. Raises ``FormatError`` where the bytes are none, ``MissingExtraError``
    without a fitting jaxlib.

    XLA ends the process on some damaged modules, so a child process does it: its end is a message here.
    """
    _module_class()
    _check_ids(data, path)
    try:
        text = run_sandboxed(f"{__name__}:print_text", data, "XLA")
    except ParserFailedError as error:
        raise _no_module(data, path, f"it {error}", is_bounded=True) from None
    if text.startswith(_REFUSED):
        raise _no_module(data, path, text.removeprefix(_REFUSED).decode("utf-8", "replace"))
    return text.decode("utf-8", "surrogateescape")


def print_text(data: bytes, parser_bytes: int) -> bytes:
    """In the child: the text of a serialised module; why there is none, behind a NUL, which no text begins
    with.
    """
    parse = _module_class().from_serialized_hlo_module_proto
    try:
        with _silence(), parser_memory(parser_bytes), parser_time(len(data)):
            text = parse(data).to_string()
    except _XLA_RAISES as error:
        reason = str(error).splitlines()[0][:200] if str(error) else "not a HloModuleProto"
        return _REFUSED + reason.encode("utf-8", "replace")
    return text.encode("utf-8", "surrogateescape")


def _check_ids(data: bytes, path: str) -> None:
    """Refuse ids that XLA would reserve far more memory for than the module can need."""
    try:
        largest = largest_local_id(data)
    except ValueError as error:
        raise _no_module(data, path, str(error)) from error
    if largest > _FEW_IDS + len(data):
        raise _no_module(data, path, f"an instruction has number {largest:,} in its computation")


def _no_module(data: bytes, path: str, reason: str, *, is_bounded: bool = False) -> FormatError:
    hint = "copy the file again, or dump the module as text (--xla_dump_hlo_as_text)"
    return FormatError(
        f"expected a serialised HloModuleProto: {reason}",
        path=path,
        position=f"within {len(data):,} bytes",
        hint=parser_hint(hint) if is_bounded else hint,
    )


# A look at a serialised ``HloModuleProto`` before XLA gets it.
#
# XLA allocates a slot for every number up to the largest local id of an instruction (the low 32 bits of
# ``HloInstructionProto.id``), so one damaged byte can ask for gigabytes. Field numbers are those of xla's
# ``service/hlo.proto``: ``HloModuleProto.computations`` 3, ``HloComputationProto.instructions`` 2,
# ``HloInstructionProto.id`` 35.

_COMPUTATIONS = 3
_INSTRUCTIONS = 2
_ID = 35


def largest_local_id(data: bytes) -> int:
    """The largest local id of any instruction; -1 where there is none. Raises ``ValueError`` for bytes that
    are no protobuf message. O(fields of all instructions).
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
    """Where the messages of one field begin and end."""
    for number, wire, first, last in fields(data, start, end):
        if number == wanted and wire == BYTES:
            yield first, last
