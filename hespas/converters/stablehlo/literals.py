"""String literals of MLIR text: any bytes, where jaxlib's bindings only read UTF-8."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["misnamed_op_place", "undecodable_place", "unescaped"]

_ESCAPED = re.compile(rb'\\(?:([0-9A-Fa-f]{2})|([nt"\\]))')
_PLAIN = {b"n": b"\n", b"t": b"\t"}
_HIGH = re.compile(rb"\\[89A-Fa-f][0-9A-Fa-f]")
_LITERAL = re.compile(rb'"([^"\\\n]*(?:\\.[^"\\\n]*)*)"|//[^\n]*')
_OPERANDS = re.compile(rb"(?:\s|//[^\n]*\n)*\(")
_BEFORE_OTHERS = re.compile(rb"(?:[(\[<,]|(?<![\w!#%@$.-])at)\s*\Z|@\Z")
"""What stands before names of locations, types and symbols, which parentheses may follow as well."""

_LOOK_BACK = 64
_NEWLINE = b"\n"


def unescaped(content: bytes) -> bytes:
    """The bytes that stand between the quotes of a literal."""
    return _ESCAPED.sub(
        lambda found: bytes.fromhex(found[1].decode()) if found[1] else _PLAIN.get(found[2], found[2]),
        content,
    )


def undecodable_place(text: bytes) -> str:
    """Line and column of the first literal that is no UTF-8, ``""`` where all are."""
    first = next(_undecodable(text), None)
    return "" if first is None else _place(text, first.start())


def misnamed_op_place(text: bytes) -> str:
    """Line and column of the first operation whose name is no UTF-8, ``""`` where there is none."""
    for found in _undecodable(text):
        before = text[max(0, found.start() - _LOOK_BACK) : found.start()]
        if _OPERANDS.match(text, found.end()) and not _BEFORE_OTHERS.search(before):
            return _place(text, found.start())
    return ""


def _undecodable(text: bytes) -> Iterator[re.Match[bytes]]:
    """The literals at fault. No literal spans lines, and few lines have such bytes at all."""
    high = _HIGH.search(text)
    while high is not None:
        start = text.rfind(_NEWLINE, 0, high.start()) + 1
        end = text.find(_NEWLINE, high.end())
        end = len(text) if end < 0 else end
        for found in _LITERAL.finditer(text, start, end):
            if found[1] is not None and _HIGH.search(found[1]) and not _is_text(unescaped(found[1])):
                yield found
        high = _HIGH.search(text, end)


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _place(text: bytes, start: int) -> str:
    line = text.count(_NEWLINE, 0, start) + 1
    return f"line {line}:{start - text.rfind(_NEWLINE, 0, start)}"
