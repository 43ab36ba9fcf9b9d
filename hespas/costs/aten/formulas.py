"""Formulas of an operation's arguments: ``2 * in0[0] * in0[1] * in1[0]``. Parsed here, never run as code.

    sum     = product { ("+" | "-") product }
    product = factor { ("*" | "/" | "//" | "%") factor }
    factor  = { "-" } ( number | "(" sum ")" | argument "[" sum "]" | value | call )
    call    = function "(" ( argument | sum { "," sum } ) ")"

``in0`` is the first argument: ``in0[0]`` its first extent, ``in0[-1]`` its last; ``elements(in0)``,
``bytes(in0)``, ``width(in0)`` (bytes of an element) and ``rank(in0)`` are of the tensor; ``val3`` is the
number that the fourth argument has as value. Numbers are those of floating point. A missing part
of an argument makes the whole formula unknown: NaN. Arithmetic errors are those of Python.
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
    """Syntax error of a formula; ``place`` is the index of the character from 0."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.place = position


Formula = Callable[[Call], float]
"""Function from an operation to the value of a formula, NaN where unknown.

Raises ``ArithmeticError`` or ``ValueError`` where the value is undefined: ``1 / 0``, ``log2(0)``.
"""


_OF_TENSORS: dict[str, Callable[[Strided], float]] = {
    "elements": lambda tensor: float(tensor.elements),
    "bytes": lambda tensor: tensor.bytes,
    "width": lambda tensor: tensor.width,
    "rank": lambda tensor: float(len(tensor.shape)),
}
_OF_NUMBERS: dict[str, tuple[int, Callable[..., float]]] = {
    "min": (2, min),
    "max": (2, max),
    "ceil": (1, math.ceil),
    "floor": (1, math.floor),
    "sqrt": (1, math.sqrt),
    "log2": (1, math.log2),
}
"""Name -> number of arguments, and the function."""
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


class _FormulaToken(NamedTuple):
    kind: str
    text: str
    position: int


def _tokens(text: str) -> list[_FormulaToken]:
    formula: list[_FormulaToken] = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            at = position + len(text[position:]) - len(text[position:].lstrip())
            raise FormulaError(f"{text[at]!r} is not allowed in a formula", at)
        kind = match.lastgroup
        formula.append(_FormulaToken(kind, match[kind], match.start(kind)))
        position = match.end()
    return [*formula, _FormulaToken("end", "", len(text))]


class _FormulaParser:
    """Recursive-descent parser with one token of lookahead."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise FormulaError(f"a formula has at most {_LONGEST} characters", _LONGEST)
        self.tokens, self.at, self.depth = _tokens(text), 0, 0

    @property
    def next(self) -> _FormulaToken:
        """Return the next token."""
        return self.tokens[self.at]

    def take(self, *marks: str) -> _FormulaToken | None:
        """Return and consume the next token if it is one of these marks, else None."""
        if self.next.kind != "mark" or self.next.text not in marks:
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def need(self, mark: str) -> None:
        """Consume this mark. Raises ``FormulaError`` for another token."""
        if self.take(mark) is None:
            raise FormulaError(f"{mark!r} is expected here", self.next.position)

    def sum(self) -> Formula:
        """Parse products that are added and subtracted."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise FormulaError(f"brackets nest deeper than {_DEEPEST}", self.next.position)
        formula = self.product()
        while (mark := self.take("+", "-")) is not None:
            formula = _joined(mark.text, formula, self.product())
        self.depth -= 1
        return formula

    def product(self) -> Formula:
        """Parse factors that are multiplied and divided."""
        formula = self.factor()
        while (mark := self.take("*", "/", "//", "%")) is not None:
            formula = _joined(mark.text, formula, self.factor())
        return formula

    def factor(self) -> Formula:
        """Parse a number, an argument, a call or a bracket."""
        sign = 1.0
        while self.take("-") is not None:
            sign = -sign
        formula = self.unsigned()
        return formula if sign > 0 else _joined("*", lambda call: -1.0, formula)

    def unsigned(self) -> Formula:
        """Parse a factor without its sign."""
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
        raise FormulaError("a number, an argument or a bracket is expected here", token.position)

    def named(self, token: _FormulaToken) -> Formula:
        """Parse an argument's extent, a value or a function."""
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
        valid = ", ".join(("in0[...]", "val0", *_OF_TENSORS, *_OF_NUMBERS))
        raise FormulaError(f"{token.text!r} is not known: there are {valid}", token.position)

    def of_tensor(self, function: Callable[[Strided], float]) -> Formula:
        """Parse a function of a tensor."""
        self.need("(")
        argument = _ARGUMENT.fullmatch(self.next.text)
        if argument is None:
            raise FormulaError("an argument such as in0 is expected here", self.next.position)
        self.at += 1
        self.need(")")
        position = int(argument[1])

        def formula(call: Call) -> float:
            tensor = call.tensor(position)
            return math.nan if tensor is None else function(tensor)

        return formula

    def of_numbers(self, token: _FormulaToken) -> Formula:
        """Parse a function of numbers."""
        count, function = _OF_NUMBERS[token.text]
        self.need("(")
        terms = [self.sum()]
        while self.take(",") is not None:
            terms.append(self.sum())
        self.need(")")
        if len(terms) != count:
            raise FormulaError(f"{token.text} takes {count}, not {len(terms)}", token.position)

        def formula(call: Call) -> float:
            values = [term(call) for term in terms]
            return math.nan if any(map(math.isnan, values)) else float(function(*values))

        return formula


def _joined(mark: str, left: Formula, right: Formula) -> Formula:
    operator = _OPERATORS[mark]
    return lambda call: operator(left(call), right(call))


def _extent(position: int, index: Formula) -> Formula:
    def formula(call: Call) -> float:
        tensor, at = call.tensor(position), index(call)
        if tensor is None or not at.is_integer() or not -len(tensor.shape) <= at < len(tensor.shape):
            return math.nan
        return float(tensor.shape[int(at)])

    return formula


def _value(position: int) -> Formula:
    def formula(call: Call) -> float:
        value = call.real(position)
        return math.nan if value is None else value

    return formula


def parse_formula(text: str) -> Formula:
    """Parse a formula. Raises ``FormulaError`` with the character of a syntax error."""
    parser = _FormulaParser(text)
    formula = parser.sum()
    if parser.next.kind != "end":
        raise FormulaError(f"{parser.next.text!r} is not expected here", parser.next.position)
    return formula
