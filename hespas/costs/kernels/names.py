"""A kernel's name cut into what patterns read: the qualified name and the template arguments.

Profilers give C++ kernels demangled or mangled (Itanium C++ ABI, https://itanium-cxx-abi.github.io/cxx-abi/).
Of a mangled name only the first name is read, its parts and its template arguments: enough for patterns, and
one pass over the text. Names are hostile: they are cut at a length, nothing recurses.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["KernelName", "demangled", "read_name"]

_LONGEST = 8192
"""Characters of a name that are read; real ones of templates reach 5,000."""

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


class _Frame:
    """One open bracket: ``<`` arguments, ``J`` a pack of them, ``N`` parts of a name, ``X`` an expression,
    ``L`` a constant of a named type, ``F`` the type of a function. ``filled``: something stands in it.
    """

    __slots__ = ("filled", "kind")

    def __init__(self, kind: str, filled: bool) -> None:
        self.kind, self.filled = kind, filled


def demangled(name: str) -> str:
    """``_ZN5aiter4normIDF16bLi64EEEvPT_`` as ``aiter::norm<bf16, 64>``; any other text as it is.

    Substitutions (``S1_``) and what stands behind the name, its parameters, are left out. O(length).
    """
    return _Demangler(name[2:_LONGEST]).run() if name.startswith("_Z") else name


class _Demangler:
    """One pass over the text behind ``_Z``."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0
        self.pieces: list[str] = []
        self.frames: list[_Frame] = []

    def run(self) -> str:
        """The name as far as it can be read."""
        while self.place < len(self.text):
            found = _TOKEN.match(self.text, self.place)
            if found is None:
                break
            self.place = found.end()
            if found["length"]:
                end = self.place + int(found["length"])
                self._add(self.text[self.place : end])
                self.place = end
            elif found["open"]:
                self._open(found["open"])
            elif found["close"]:
                self._close()
            elif self.frames and self.frames[-1].kind in "<J":
                self._add(_argument(found))
            if self.pieces and not self.frames and not self.text.startswith("I", self.place):
                break
        return "".join(self.pieces)

    def _add(self, text: str) -> None:
        """A part of a name, or an argument, with what stands between it and the one before."""
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
        self.frames.append(_Frame(kind, filled))

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
            if value is not None:  # the number of the constant, and the end of it
                self.pieces.append("=" + value.group()[:-1])
                self.place = value.end()
                self.frames.pop()
                if self.frames:
                    self.frames[-1].filled = True


def _argument(found: re.Match[str]) -> str:
    """What one token says as a template argument; empty where it is not one."""
    if found["number"]:
        if found["type"] == "b":
            return "false" if found["number"] == "0" else "true"
        return ("-" if found["sign"] else "") + found["number"]
    if found["bf16"]:
        return "bf16"
    if found["f16"]:
        return "f16"
    return _BUILTIN.get(found["builtin"] or "", "")


class KernelName(NamedTuple):
    """``text`` is the name, demangled, without the type of its result; ``qualified`` the function alone
    (``at::native::reduce_kernel``); ``arguments`` are its template arguments, those of the outermost level.
    """

    text: str
    qualified: str
    arguments: tuple[str, ...]

    @property
    def base(self) -> str:
        """The last part of the qualified name."""
        return self.qualified.rpartition("::")[2]

    def number(self, place: int) -> int:
        """A template argument that is a whole number; -1 where it is not."""
        text = self.arguments[place] if -len(self.arguments) <= place < len(self.arguments) else ""
        digits = _NUMBER.fullmatch(text)
        return int(digits[1]) if digits else -1


_NUMBER = re.compile(r"(?:\([\w: ]{1,80}\))?(\d{1,9})[uUlL]{0,3}")
_ANONYMOUS = re.compile(r"\(anonymous namespace\)(?:::)?|_GLOBAL__N_1(?:::)?|\{anonymous\}(?:::)?")
_DRIVER = ("Memcpy", "Memset")
"""Beginnings of names with spaces that are no functions."""
_CONDITION, _CONDITION_END = "std::enable_if<", ">::type "
_SUFFIX = re.compile(r"(?:\.kd|\.intern\.[0-9a-f]{1,40}| \[clone [^\]]{1,80}\])+\Z")
_STRUCTURE = re.compile(r"[<>() ,]")


def read_name(name: str) -> KernelName:
    """Cut one name. O(length)."""
    text = _SUFFIX.sub("", _ANONYMOUS.sub("", demangled(name[:_LONGEST].strip())))
    if text.startswith(_DRIVER):
        return KernelName(text, text, ())
    if text.startswith(
        _CONDITION
    ):  # the type of the result, which some demanglers write without its brackets
        text = text.partition(_CONDITION_END)[2] or text
    begins, ends = _head(text)
    qualified, _, _ = text[begins:ends].partition("<")
    inner = text[begins + len(qualified) + 1 : ends - 1] if ends > begins + len(qualified) else ""
    return KernelName(text[begins:], qualified, tuple(_split(inner)))


def _head(text: str) -> tuple[int, int]:
    """Where the function with its template arguments begins and ends: behind its type, before parameters."""
    depth, begins = 0, 0
    for found in _STRUCTURE.finditer(text):
        mark = found.group()
        if mark == "<":
            depth += 1
        elif mark == ">" and depth and text[found.start() - 1] != "-":
            depth -= 1
        elif depth == 0 and mark == "(":
            return begins, found.start()
        elif depth == 0 and mark == " " and text[:1] != " ":
            begins = found.end()
    return begins, len(text)


def _split(text: str) -> list[str]:
    """Template arguments, split at the commas of the outermost level."""
    if not text:
        return []
    depth, begins, found = 0, 0, list[str]()
    for each in _STRUCTURE.finditer(text):
        mark = each.group()
        if mark in "<(":
            depth += 1
        elif mark in ">)":
            depth -= text[each.start() - 1] != "-"
        elif mark == "," and depth == 0:
            found.append(text[begins : each.start()].strip())
            begins = each.end()
    found.append(text[begins:].strip())
    return found
