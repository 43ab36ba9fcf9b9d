"""Formulas of an operation's arguments: ``2 * in0[0] * in0[1] * in1[0]``. Read by hand, never run as code.

    sum     = product { ("+" | "-") product }
    product = factor { ("*" | "/" | "//" | "%") factor }
    factor  = { "-" } ( number | "(" sum ")" | argument "[" sum "]" | value | call )
    call    = function "(" ( argument | sum { "," sum } ) ")"

``in0`` is the first argument: ``in0[0]`` its first extent, ``in0[-1]`` its last; ``elements(in0)``,
``bytes(in0)``, ``width(in0)`` (bytes of an element) and ``rank(in0)`` are of the tensor; ``val3`` is the
number that the fourth argument has as value. Numbers are those of floating point. What an argument does not
have makes the whole formula unknown: NaN. A division by nothing and the like raise what Python raises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from hespas.costs.aten.call import Call, Strided

__all__ = ["Formula", "FormulaError", "parse_formula"]

_LONGEST = 1000
_DEEPEST = 50
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,3})?)"
    r"|(?P<name>[A-Za-z_]\w{0,30})|(?P<mark>//|[-+*/%()\[\],]))"
)
_ARGUMENT = re.compile(r"in(\d{1,3})")
_VALUE = re.compile(r"val(\d{1,3})")


class FormulaError(ValueError):
    """A text is no formula; ``place`` counts its characters from 0."""

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


Formula = Callable[[Call], float]
"""The value of a formula for one operation, NaN unknown. Raises ``ArithmeticError`` or ``ValueError`` where
numbers allow no answer: ``1 / 0``, ``log2(0)``.
"""


def _elements(tensor: Strided) -> float:
    return float(tensor.elements)


def _bytes(tensor: Strided) -> float:
    return tensor.bytes


def _width(tensor: Strided) -> float:
    return tensor.width


def _rank(tensor: Strided) -> float:
    return float(len(tensor.shape))


_OF_TENSORS: dict[str, Callable[[Strided], float]] = {
    "elements": _elements,
    "bytes": _bytes,
    "width": _width,
    "rank": _rank,
}
_OF_NUMBERS: dict[str, tuple[int, Callable[..., float]]] = {
    "min": (2, min),
    "max": (2, max),
    "ceil": (1, math.ceil),
    "floor": (1, math.floor),
    "sqrt": (1, math.sqrt),
    "log2": (1, math.log2),
}
"""Function -> how many numbers it takes, and what it makes of them."""
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    place = 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            at = place + len(text[place:]) - len(text[place:].lstrip())
            raise FormulaError(f"{text[at]!r} is nothing that a formula is made of", at)
        kind = match.lastgroup
        found.append(_Token(kind, match[kind], match.start(kind)))
        place = match.end()
    return [*found, _Token("end", "", len(text))]


class _Parser:
    """One token ahead; brackets nest to a depth."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise FormulaError(f"a formula has at most {_LONGEST} characters", _LONGEST)
        self.tokens, self.at, self.depth = _tokens(text), 0, 0

    @property
    def next(self) -> _Token:
        """The token ahead."""
        return self.tokens[self.at]

    def take(self, *marks: str) -> _Token | None:
        """The token ahead where it is one of these marks."""
        if self.next.kind != "mark" or self.next.text not in marks:
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def need(self, mark: str) -> None:
        """Take this mark. Raises ``FormulaError`` where something else stands there."""
        if self.take(mark) is None:
            raise FormulaError(f"{mark!r} is expected here", self.next.place)

    def sum(self) -> Formula:
        """Products added and subtracted."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise FormulaError(f"brackets nest deeper than {_DEEPEST}", self.next.place)
        found = self.product()
        while (mark := self.take("+", "-")) is not None:
            found = _joined(mark.text, found, self.product())
        self.depth -= 1
        return found

    def product(self) -> Formula:
        """Factors multiplied and divided."""
        found = self.factor()
        while (mark := self.take("*", "/", "//", "%")) is not None:
            found = _joined(mark.text, found, self.factor())
        return found

    def factor(self) -> Formula:
        """A number, an argument, a call, or what stands in brackets."""
        sign = 1.0
        while self.take("-") is not None:
            sign = -sign
        found = self.unsigned()
        return found if sign > 0 else _joined("*", lambda call: -1.0, found)

    def unsigned(self) -> Formula:
        """A factor without its sign."""
        if self.take("(") is not None:
            inner = self.sum()
            self.need(")")
            return inner
        token = self.next
        if token.kind == "number":
            self.at += 1
            number = float(token.text)
            return lambda call: number
        if token.kind == "name":
            self.at += 1
            return self.named(token)
        raise FormulaError("a number, an argument or a bracket is expected here", token.place)

    def named(self, token: _Token) -> Formula:
        """An argument's extent, a value, or a function."""
        argument, value = _ARGUMENT.fullmatch(token.text), _VALUE.fullmatch(token.text)
        if argument is not None:
            self.need("[")
            index = self.sum()
            self.need("]")
            return _extent(int(argument[1]), index)
        if value is not None:
            return _value(int(value[1]))
        if token.text in _OF_TENSORS:
            return self.of_tensor(_OF_TENSORS[token.text])
        if token.text in _OF_NUMBERS:
            return self.of_numbers(token)
        known = ", ".join(("in0[...]", "val0", *_OF_TENSORS, *_OF_NUMBERS))
        raise FormulaError(f"{token.text!r} is not known: there are {known}", token.place)

    def of_tensor(self, function: Callable[[Strided], float]) -> Formula:
        """A function of one argument, which is a tensor."""
        self.need("(")
        argument = _ARGUMENT.fullmatch(self.next.text)
        if argument is None:
            raise FormulaError("an argument such as in0 is expected here", self.next.place)
        self.at += 1
        self.need(")")
        place = int(argument[1])

        def found(call: Call) -> float:
            tensor = call.tensor(place)
            return math.nan if tensor is None else function(tensor)

        return found

    def of_numbers(self, token: _Token) -> Formula:
        """A function of numbers."""
        count, function = _OF_NUMBERS[token.text]
        self.need("(")
        terms = [self.sum()]
        while self.take(",") is not None:
            terms.append(self.sum())
        self.need(")")
        if len(terms) != count:
            raise FormulaError(f"{token.text} takes {count}, not {len(terms)}", token.place)

        def found(call: Call) -> float:
            values = [term(call) for term in terms]
            return math.nan if any(map(math.isnan, values)) else float(function(*values))

        return found


def _joined(mark: str, left: Formula, right: Formula) -> Formula:
    operator = _OPERATORS[mark]
    return lambda call: operator(left(call), right(call))


def _extent(place: int, index: Formula) -> Formula:
    def found(call: Call) -> float:
        tensor, at = call.tensor(place), index(call)
        if tensor is None or not at.is_integer() or not -len(tensor.shape) <= at < len(tensor.shape):
            return math.nan
        return float(tensor.shape[int(at)])

    return found


def _value(place: int) -> Formula:
    def found(call: Call) -> float:
        value = call.real(place)
        return math.nan if value is None else value

    return found


def parse_formula(text: str) -> Formula:
    """Parse once, to be asked of many operations. Raises ``FormulaError`` with the character where a text
    makes no sense.
    """
    parser = _Parser(text)
    found = parser.sum()
    if parser.next.kind != "end":
        raise FormulaError(f"{parser.next.text!r} is not expected here", parser.next.place)
    return found
