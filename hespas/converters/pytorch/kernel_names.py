"""Which kernel names of two recordings are the same function: one may be mangled where the other is not.

A mangled name is read as far as the function's own name goes:
https://itanium-cxx-abi.github.io/cxx-abi/abi.html (5.1, Mangling). Names of the runtime's own kernels that
copy and fill stand for what they do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["COPY", "FILL", "UNNAMED", "canonical_name", "function_name", "kernel_symbols", "runtime_symbol"]

UNNAMED = -1
"""The symbol of a launch that does not say what it launches: equal to nothing."""
COPY, FILL = 0, 1
"""The symbols of copies and fills, whatever carries them out."""

_FIRST_NAMED = 2
_RUNTIME = (("__amd_rocclr_copy", COPY), ("__amd_rocclr_fill", FILL))
_SUFFIX = re.compile(r"(?: \[clone [^\]]*\]|\.kd)+$")
_LENGTH = re.compile(r"\d{1,4}")
_ANONYMOUS = "(anonymous namespace)"
_MANGLED = "_Z"


def runtime_symbol(name: str) -> int:
    """``COPY`` or ``FILL`` for the kernels by which a runtime copies and fills, else ``UNNAMED``."""
    return next((symbol for prefix, symbol in _RUNTIME if name.startswith(prefix)), UNNAMED)


def canonical_name(name: str) -> str:
    """A name without what a loader puts behind it (``.kd``, ``[clone .kd]``)."""
    return _SUFFIX.sub("", name.strip())


def function_name(name: str) -> tuple[str, ...]:
    """The function's name with the namespaces and classes around it, without template arguments; of an
    instance of a class template the part before its arguments. Empty where the name makes no sense.
    """
    return _of_mangled(name) if name.startswith(_MANGLED) else _of_text(name)


def _of_text(name: str) -> tuple[str, ...]:
    """Of a demangled name, which begins with its result's type where it is an instance of a template."""
    text = name.replace(_ANONYMOUS, "")
    ends = [place for place in (text.find("<"), text.find("(")) if place >= 0]
    words = text[: min(ends, default=len(text))].split()
    return tuple(part for part in words[-1].split("::") if part) if words else ()


def _of_mangled(name: str) -> tuple[str, ...]:
    """Source names up to the first template argument, or the end of the nested name."""
    place = len(_MANGLED)
    parts: list[str] = []
    nested = name[place : place + 1] == "N"
    if nested:
        place += 1
        while name[place : place + 1] in {"r", "V", "K", "R", "O"}:
            place += 1
    while place < len(name):
        if name.startswith("St", place):  # std
            parts.append("std")
            place += 2
            continue
        place += name[place] == "L"  # of internal linkage
        length = _LENGTH.match(name, place)
        if length is None:
            break
        place = length.end() + int(length[0])
        part = name[length.end() : place]
        if part and not part.startswith("_GLOBAL__N"):
            parts.append(part)
        if not nested and part != "std":
            break
    return tuple(parts)


def kernel_symbols(replayed: Iterable[str], captured: Iterable[str]) -> tuple[dict[str, int], dict[str, int]]:
    """A number for each canonical name of either side, equal where they are the same kernel.

    Texts that both sides have are compared as they are. One that a single side has is compared by its
    function's name, and only with those that are mangled where it is not: two spellings of one kind that
    differ are two kernels. The empty name is ``UNNAMED``.
    """
    sides = [dict.fromkeys(replayed), dict.fromkeys(captured)]
    alone = [[name for name in sides[mine] if name not in sides[1 - mine]] for mine in (0, 1)]
    functions = [
        {function_name(name) for name in names if name.startswith(_MANGLED) is mangled}
        for names, mangled in ((alone[0], True), (alone[0], False), (alone[1], True), (alone[1], False))
    ]
    twofold = ((functions[0] & functions[3]) | (functions[1] & functions[2])) - {()}
    numbers: dict[str | tuple[str, ...], int] = {}
    found: list[dict[str, int]] = []
    for names, lonely in zip(sides, map(set, alone), strict=True):
        symbols: dict[str, int] = {}
        for name in names:
            function = function_name(name) if name in lonely else ()
            key = function if function in twofold else name
            runtime = runtime_symbol(name)
            number = runtime if runtime >= 0 else numbers.setdefault(key, len(numbers) + _FIRST_NAMED)
            symbols[name] = number if name else UNNAMED
        found.append(symbols)
    return found[0], found[1]
