"""Formulas of an operation's arguments, such as ``2 * in0[0] * in0[1] * in1[0]``.

    name = argument "[" sum "]" | value | tensor-function "(" argument ")"

The rest of the grammar is in :mod:`hespas.costs.expressions`. ``in0`` is the first argument: ``in0[0]`` its
first extent, ``in0[-1]`` its last. ``elements(in0)``, ``bytes(in0)``, ``width(in0)`` (bytes of an element)
and ``rank(in0)`` are functions of the tensor. ``val3`` is the value of the fourth argument, if it is a
number. Numbers are floating-point. If a part of an argument is missing, the whole formula is unknown (NaN).
Arithmetic errors follow the rules of Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from hespas.costs.aten.call import Call, Strided
from hespas.costs.expressions import Expression, ExpressionParser, ExpressionToken, FormulaError

__all__ = ["Formula", "FormulaError", "parse_formula"]

_ARGUMENT = re.compile(r"in(\d{1,3})")
_VALUE = re.compile(r"val(\d{1,3})")

Formula = Expression[Call]
"""Function from an operation to the value of a formula, NaN where unknown."""

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


class _FormulaParser(ExpressionParser[Call]):
    """Parser of cost formulas. Names in a formula refer to parts of the arguments of an operation."""

    functions = _OF_NUMBERS

    def name(self, token: ExpressionToken) -> Formula:
        """Parse an argument's extent, a value or a function of a tensor."""
        argument, value = _ARGUMENT.fullmatch(token.text), _VALUE.fullmatch(token.text)
        if argument is not None:
            self.need("[")
            index = self.sum()
            self.need("]")
            return _extent(int(argument[1]), index)
        if value is not None:
            return _value(int(value[1]))
        if token.text in _OF_TENSORS:
            return self._of_tensor(_OF_TENSORS[token.text])
        valid = ", ".join(("in0[...]", "val0", *_OF_TENSORS, *_OF_NUMBERS))
        raise FormulaError(f"{token.text!r} is not known: there are {valid}", token.position)

    def _of_tensor(self, function: Callable[[Strided], float]) -> Formula:
        self.need("(")
        argument = _ARGUMENT.fullmatch(self.next.text)
        if argument is None:
            raise self.unexpected("an argument such as in0")
        self.at += 1
        self.need(")")
        position = int(argument[1])

        def formula(call: Call) -> float:
            tensor = call.tensor(position)
            return math.nan if tensor is None else function(tensor)

        return formula


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
    return _FormulaParser(text).parse()
