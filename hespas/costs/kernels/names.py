"""Parser of kernel names, which returns the qualified name and the template arguments.

Profilers write C++ kernels demangled or mangled (Itanium C++ ABI,
https://itanium-cxx-abi.github.io/cxx-abi/). Of a mangled name, only the first qualified name and its template
arguments are read, in one pass. Names are untrusted: their length is limited, and the parser does not
recurse.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["KernelName", "demangled", "read_name"]

_LONGEST = 8192
"""Maximum number of characters of a name; template names have up to 5,000."""

_BUILTIN = {
    "v": "void",
    "w": "wchar_t",
    "b": "bool",
    "c": "char",
    "a": "signed char",
    "h": "unsigned char",
    "s": "short",
    "t": "unsigned short",
    "i": "int",
    "j": "unsigned int",
    "l": "long",
    "m": "unsigned long",
    "x": "long",
    "y": "unsigned long",
    "f": "float",
    "d": "double",
    "z": "...",
}
_TOKEN = re.compile(
    r"L(?P<type>[a-z])(?P<sign>n?)(?P<number>\d{1,18})E"
    r"|(?P<length>[1-9]\d{0,3})"
    r"|(?P<bf16>DF16b)|(?P<f16>DF16_|Dh)"
    r"|S(?:t|[a-z]|[0-9A-Z]*_)|T[0-9]*_|Tn|D[pnaT]"
    r"|(?P<open>I|J|F|X|N[rVK]*|L_Z|L)"
    r"|(?P<close>E)"
    r"|(?P<builtin>[a-z])"
    r"|."
)
_ENUMERATOR = re.compile(r"n?\d{1,18}E")


class _MangledBracket:
    """Open bracket of a mangled name: ``<`` template arguments, ``J`` an argument pack, ``N`` a nested name,
    ``X`` an expression, ``L`` a constant of a named type, ``F`` a function type. ``filled`` is True if the
    bracket is not empty.
    """

    __slots__ = ("filled", "kind")

    def __init__(self, kind: str, filled: bool) -> None:
        self.kind, self.filled = kind, filled


def demangled(name: str) -> str:
    """Return the readable form of a mangled name: ``aiter::norm<bf16, 64>`` for
    ``_ZN5aiter4normIDF16bLi64EEEvPT_``. Other texts do not change.

    Substitutions (``S1_``) and parameters are skipped. O(length).
    """
    return _Demangler(name[2:_LONGEST]).run() if name.startswith("_Z") else name


class _Demangler:
    """Parser of one mangled C++ kernel name: its state during one pass over the text after ``_Z``."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0
        self.pieces: list[str] = []
        self.frames: list[_MangledBracket] = []

    def run(self) -> str:
        """Return the readable form of the name, as far as the parser understands it."""
        while self.place < len(self.text):
            match = _TOKEN.match(self.text, self.place)
            if match is None:
                break
            self.place = match.end()
            if match["length"]:
                end = self.place + int(match["length"])
                self._add(self.text[self.place : end])
                self.place = end
            elif match["open"]:
                self._open(match["open"])
            elif match["close"]:
                self._close()
            elif self.frames and self.frames[-1].kind in "<J":
                self._add(_argument(match))
            if self.pieces and not self.frames and not self.text.startswith("I", self.place):
                break
        return "".join(self.pieces)

    def _add(self, text: str) -> None:
        """Append a part of the name, or an argument, to the readable form, with its separator."""
        top = self.frames[-1] if self.frames else None
        if not text or (top is not None and top.kind == "F"):
            return
        if top is not None and top.filled:
            self.pieces.append("::" if top.kind == "N" else ", ")
        if top is not None:
            top.filled = True
        self.pieces.append(text)

    def _open(self, mark: str) -> None:
        top = self.frames[-1] if self.frames else None
        kind = {"I": "<", "N": "N", "J": "J", "F": "F", "X": "X"}.get(mark[0], "L")
        if top is not None and top.kind == "F":
            kind = "F"
        filled = False
        if kind == "<":
            self.pieces.append("<")
        elif kind == "J" and top is not None:
            filled = top.filled
        elif kind in "NXL" and top is not None and top.kind in "<J":
            if top.filled:
                self.pieces.append(", ")
            top.filled = True
        self.frames.append(_MangledBracket(kind, filled))

    def _close(self) -> None:
        if not self.frames:
            return
        closed = self.frames.pop()
        top = self.frames[-1] if self.frames else None
        if closed.kind == "<":
            self.pieces.append(">")
        if top is None:
            return
        top.filled |= closed.filled
        if top.kind == "L" and closed.kind == "N":
            value = _ENUMERATOR.match(self.text, self.place)
            if value is not None:  # the number of the constant, and its end
                self.pieces.append("=" + value.group()[:-1])
                self.place = value.end()
                self.frames.pop()
                if self.frames:
                    self.frames[-1].filled = True


def _argument(match: re.Match[str]) -> str:
    """Return the template argument that a mangled token encodes; empty for other tokens."""
    if match["number"]:
        if match["type"] == "b":
            return "false" if match["number"] == "0" else "true"
        return ("-" if match["sign"] else "") + match["number"]
    if match["bf16"]:
        return "bf16"
    if match["f16"]:
        return "f16"
    return _BUILTIN.get(match["builtin"] or "", "")


class KernelName(NamedTuple):
    """Parts of a kernel name. ``text`` is the demangled name without the result type; ``qualified`` is the
    function (``at::native::reduce_kernel``); ``arguments`` are the outermost template arguments.
    """

    text: str
    qualified: str
    arguments: tuple[str, ...]

    @property
    def base(self) -> str:
        """Return the last part of the qualified name."""
        return self.qualified.rpartition("::")[2]

    def number(self, position: int) -> int:
        """Return the template argument at a position as a whole number; -1 if it is not one."""
        text = self.arguments[position] if -len(self.arguments) <= position < len(self.arguments) else ""
        digits = _NUMBER.fullmatch(text)
        return int(digits[1]) if digits else -1


_NUMBER = re.compile(r"(?:\([\w: ]{1,80}\))?(\d{1,9})[uUlL]{0,3}")
_ANONYMOUS = re.compile(r"\(anonymous namespace\)(?:::)?|_GLOBAL__N_1(?:::)?|\{anonymous\}(?:::)?")
_DRIVER = ("Memcpy", "Memset")
"""Prefixes of driver operations, whose names have spaces."""
_CONDITION, _CONDITION_END = "std::enable_if<", ">::type "
_SUFFIX = re.compile(r"(?:\.kd|\.intern\.[0-9a-f]{1,40}| \[clone [^\]]{1,80}\])+\Z")
_STRUCTURE = re.compile(r"[<>() ,]")


def read_name(name: str) -> KernelName:
    """Parse a kernel name into its parts. O(length)."""
    text = _SUFFIX.sub("", _ANONYMOUS.sub("", demangled(name[:_LONGEST].strip())))
    if text.startswith(_DRIVER):
        return KernelName(text, text, ())
    if text.startswith(_CONDITION):  # the result type, which some demanglers write without brackets
        text = text.partition(_CONDITION_END)[2] or text
    begins, ends = _head(text)
    qualified, _, _ = text[begins:ends].partition("<")
    inner = text[begins + len(qualified) + 1 : ends - 1] if ends > begins + len(qualified) else ""
    return KernelName(text[begins:], qualified, tuple(_split(inner)))


def _head(text: str) -> tuple[int, int]:
    """Return the start and end of the function name with its template arguments in ``text``. The result type
    before it and the parameters after it are excluded.
    """
    depth, begins = 0, 0
    for match in _STRUCTURE.finditer(text):
        mark = match.group()
        if mark == "<":
            depth += 1
        elif mark == ">" and depth and text[match.start() - 1] != "-":
            depth -= 1
        elif depth == 0 and mark == "(":
            return begins, match.start()
        elif depth == 0 and mark == " " and text[:1] != " ":
            begins = match.end()
    return begins, len(text)


def _split(text: str) -> list[str]:
    """Split a text at its outermost commas into template arguments."""
    if not text:
        return []
    depth, begins, parts = 0, 0, list[str]()
    for match in _STRUCTURE.finditer(text):
        mark = match.group()
        if mark in "<(":
            depth += 1
        elif mark in ">)":
            depth -= text[match.start() - 1] != "-"
        elif mark == "," and depth == 0:
            parts.append(text[begins : match.start()].strip())
            begins = match.end()
    parts.append(text[begins:].strip())
    return parts
