"""Sizes that are written as expressions over other sizes: ``4 * hidden``, ``round_up(8 * hidden / 3, 256)``.

Whole numbers, names, ``+ - * / // %``, parentheses, and the functions ``round_up(x, multiple)``, ``min`` and
``max``. They are evaluated exactly, in fractions, when all sizes are known; a size is a whole number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fractions import Fraction

__all__ = ["ExpressionError", "evaluated"]

_MOST_CHARACTERS, _MOST = 500, 2**62
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([A-Za-z_]\w*)|(//|[-+*/%(),]))")


class ExpressionError(ValueError):
    """What is wrong with an expression."""


def _round_up(value: Fraction, multiple: Fraction) -> Fraction:
    return -(-value // multiple) * multiple


_BINARY: Mapping[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, lambda a, b: a + b),
    "-": (1, lambda a, b: a - b),
    "*": (2, lambda a, b: a * b),
    "/": (2, lambda a, b: a / b),
    "//": (2, lambda a, b: Fraction(a // b)),
    "%": (2, lambda a, b: a % b),
}
_FUNCTIONS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {
    "round_up": _round_up,
    "min": min,
    "max": max,
}


def evaluated(sizes: Mapping[str, int | str]) -> dict[str, int]:
    """All sizes as whole numbers. Raises :class:`ExpressionError` that names the size: for what is no
    expression, names nobody has, sizes that need each other, and values that are not whole or not counts.
    """
    found = {name: _whole(name, Fraction(size)) for name, size in sizes.items() if isinstance(size, int)}
    waiting = {name: _tokens(name, text) for name, text in sizes.items() if not isinstance(text, int)}
    while waiting:
        ready = [name for name, tokens in waiting.items() if all(each in found for each in _names(tokens))]
        if not ready:
            raise _stuck(waiting, sizes)
        for name in ready:
            found[name] = _whole(name, _value(name, waiting.pop(name), found))
    return found


def _stuck(waiting: Mapping[str, list[str]], sizes: Mapping[str, int | str]) -> ExpressionError:
    for name, tokens in waiting.items():
        for each in _names(tokens):
            if each not in sizes:
                close = get_close_matches(each, sizes, n=1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                return ExpressionError(f"{name}: no size is called {each!r}{meant}")
    return ExpressionError(f"{_circle(waiting)} need each other")


def _circle(waiting: Mapping[str, list[str]]) -> str:
    """Names that need each other; others may only wait for them."""
    path: list[str] = []
    name = next(iter(waiting))
    while name not in path:
        path.append(name)
        name = next(each for each in _names(waiting[name]) if each in waiting)
    circle = path[path.index(name) :]
    return f"{circle[0]}: {' and '.join(sorted(circle))}"


def _tokens(name: str, text: str) -> list[str]:
    if len(text) > _MOST_CHARACTERS:
        raise ExpressionError(f"{name}: an expression of {len(text):,} characters")
    found: list[str] = []
    place = 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            raise ExpressionError(
                f"{name}: {text[place:].strip()[0]!r} in {text!r} is no part of an expression"
            )
        found.append(match[match.lastindex or 0])
        place = match.end()
    if not found:
        raise ExpressionError(f"{name}: an empty expression")
    return found


def _names(tokens: list[str]) -> list[str]:
    return [each for each in tokens if (each[0].isalpha() or each[0] == "_") and each not in _FUNCTIONS]


def _whole(name: str, value: Fraction) -> int:
    if value.denominator != 1 or not 0 <= value <= _MOST:
        shown = f"{float(value):g}" if abs(value) <= _MOST else "beyond 2**62"
        raise ExpressionError(f"{name}: {shown} is not a whole number from 0 to 2**62")
    return int(value)


def _value(name: str, tokens: list[str], known: Mapping[str, int]) -> Fraction:
    """Two stacks, of values and of what is still to be done (Dijkstra's shunting yard). What is open is
    ``(``, ``max(`` before the comma of a function and ``max,`` behind it.
    """
    values: list[Fraction] = []
    pending: list[str] = []
    wants_value, function = True, ""
    for token in tokens:
        _expect(name, token, fits=(token == "(") if function else wants_value == _starts_value(token))
        if token in _FUNCTIONS:
            function = token
            continue
        if token == "(":
            pending.append(f"{function}(")
            function = ""
        elif token in _BINARY:
            while pending and pending[-1] in _BINARY and _BINARY[pending[-1]][0] >= _BINARY[token][0]:
                _apply(name, pending.pop(), values)
            pending.append(token)
            wants_value = True
        elif token in {")", ","}:
            _close(name, token, values, pending)
            wants_value = token == ","
        else:
            values.append(Fraction(int(token) if token.isdigit() else known[token]))
            wants_value = False
    _expect(name, "the end", fits=not wants_value and not function)
    while pending:
        _apply(name, pending.pop(), values)
    return values[0]


def _starts_value(token: str) -> bool:
    return token not in _BINARY and token not in {")", ","}


def _expect(name: str, token: str, *, fits: bool) -> None:
    if not fits:
        raise ExpressionError(f"{name}: {token!r} does not fit where it stands")


def _close(name: str, token: str, values: list[Fraction], pending: list[str]) -> None:
    """Do what stands in parentheses, up to a comma or their end."""
    while pending and pending[-1] in _BINARY:
        _apply(name, pending.pop(), values)
    if not pending:
        raise ExpressionError(f"{name}: {token!r} without an opening parenthesis")
    opened = pending.pop()
    function, mark = opened[:-1], opened[-1]
    if function and (token == ",") != (mark == "("):
        raise ExpressionError(f"{name}: {function} takes two values")
    if token == ",":
        _expect(name, token, fits=bool(function))
        pending.append(f"{function},")
    elif function:
        _apply(name, function, values)


def _apply(name: str, what: str, values: list[Fraction]) -> None:
    how = _FUNCTIONS.get(what) or (_BINARY[what][1] if what in _BINARY else None)
    if how is None:
        raise ExpressionError(f"{name}: a parenthesis is not closed")
    right, left = values.pop(), values.pop()
    if right == 0 and what in {"/", "//", "%", "round_up"}:
        raise ExpressionError(f"{name}: division by 0")
    values.append(how(left, right))
