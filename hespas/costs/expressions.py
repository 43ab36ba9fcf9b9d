"""Parser of arithmetic expressions in files of users. Expressions are parsed here, never run as code.

    sum     = product { ("+" | "-") product }
    product = factor { ("*" | "/" | "//" | "%") factor }
    factor  = { "-" } ( number | "(" sum ")" | name | function "(" sum { "," sum } ")" )

A subclass of :class:`ExpressionParser` defines the kind of number, the names and the functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

__all__ = ["Expression", "ExpressionParser", "ExpressionToken", "FormulaError"]

_Context = TypeVar("_Context")
_DEEPEST = 50
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,100}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,3})?)"
    r"|(?P<name>[A-Za-z_]\w{0,30})|(?P<mark>//|[-+*/%()\[\],]))"
)

Expression = Callable[[_Context], Any]
"""Function from the values of names to the value of an expression.

Raises ``ArithmeticError`` or ``ValueError`` where the value is undefined: ``1 / 0``, ``log2(0)``.
"""

_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: type(a)(a // b),
    "%": lambda a, b: a % b,
}


class FormulaError(ValueError):
    """Syntax error in a formula; ``position`` is the index of the wrong character, from 0."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class ExpressionToken(NamedTuple):
    """Token of a formula: a number, a name, an operator or bracket, or the end."""

    kind: str
    text: str
    position: int


class ExpressionParser(Generic[_Context]):
    """Recursive-descent parser of arithmetic expressions, with one token of lookahead.

    ``number`` converts the text of a number. ``functions`` maps the name of a function to its number of
    arguments and the function. If an argument is NaN, the function returns NaN.
    """

    number: ClassVar[Callable[[Any], Any]] = float
    functions: ClassVar[Mapping[str, tuple[int, Callable[..., Any]]]] = {}
    max_characters: ClassVar[int] = 1000

    def __init__(self, text: str) -> None:
        """Split the text into tokens. Raises ``FormulaError`` for a character that belongs to no token."""
        if len(text) > self.max_characters:
            raise FormulaError(
                f"the formula has more than {self.max_characters} characters", self.max_characters
            )
        tokens: list[ExpressionToken] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                at = position + len(text[position:]) - len(text[position:].lstrip())
                raise FormulaError(f"unexpected {text[at]!r}", at)
            kind = match.lastgroup
            tokens.append(ExpressionToken(kind, match[kind], match.start(kind)))
            position = match.end()
        self.tokens, self.at, self.depth = [*tokens, ExpressionToken("end", "", len(text))], 0, 0

    def parse(self) -> Expression[_Context]:
        """Parse the whole text and return its expression. Raises ``FormulaError``."""
        expression = self.sum()
        if self.next.kind != "end":
            raise FormulaError(f"unexpected {self.next.text!r}", self.next.position)
        return expression

    def name(self, token: ExpressionToken) -> Expression[_Context]:
        """Return the expression for a name that is not a function; subclasses define it. Raises
        ``FormulaError``.
        """
        raise NotImplementedError

    @property
    def next(self) -> ExpressionToken:
        """Return the next token and move past it."""
        return self.tokens[self.at]

    def take(self, *marks: str) -> ExpressionToken | None:
        """Return the next token and move past it if it is one of the given ``marks``; otherwise return
        None.
        """
        if self.next.kind != "mark" or self.next.text not in marks:
            return None
        self.at += 1
        return self.tokens[self.at - 1]

    def need(self, mark: str) -> None:
        """Move past the next token, which must be ``mark``. Raises ``FormulaError`` otherwise."""
        if self.take(mark) is None:
            raise self.unexpected(repr(mark))

    def unexpected(self, expected: str) -> FormulaError:
        """Return an error that names the next token as unexpected, and ``expected`` as the alternative."""
        is_end = self.next.kind == "end"
        problem = "the expression is incomplete" if is_end else f"unexpected {self.next.text!r}"
        return FormulaError(f"{problem}: {expected} is expected here", self.next.position)

    def sum(self) -> Expression[_Context]:
        """Parse a sum or difference of products."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise FormulaError(f"brackets nest deeper than {_DEEPEST}", self.next.position)
        expression = self._product()
        while (mark := self.take("+", "-")) is not None:
            expression = _joined(mark.text, expression, self._product())
        self.depth -= 1
        return expression

    def _product(self) -> Expression[_Context]:
        expression = self._factor()
        while (mark := self.take("*", "/", "//", "%")) is not None:
            expression = _joined(mark.text, expression, self._factor())
        return expression

    def _factor(self) -> Expression[_Context]:
        is_negative = False
        while self.take("-") is not None:
            is_negative = not is_negative
        expression = self._unsigned()
        return (lambda context: -expression(context)) if is_negative else expression

    def _unsigned(self) -> Expression[_Context]:
        if self.take("(") is not None:
            inner = self.sum()
            self.need(")")
            return inner
        token = self.next
        if token.kind not in {"number", "name"}:
            raise self.unexpected("a number, a name or a bracket")
        self.at += 1
        if token.kind == "number":
            number = type(self).number(token.text)
            return lambda context: number
        return self._function(token) if token.text in self.functions else self.name(token)

    def _function(self, token: ExpressionToken) -> Expression[_Context]:
        count, function = self.functions[token.text]
        self.need("(")
        terms = [self.sum()]
        while self.take(",") is not None:
            terms.append(self.sum())
        self.need(")")
        if len(terms) != count:
            raise FormulaError(f"{token.text} takes {count} values, not {len(terms)}", token.position)
        number = type(self).number

        def expression(context: _Context) -> Any:
            values = [term(context) for term in terms]
            unknown = next((value for value in values if value != value), None)  # noqa: PLR0124 # NaN
            return number(function(*values)) if unknown is None else unknown

        return expression


def _joined(mark: str, left: Expression[_Context], right: Expression[_Context]) -> Expression[_Context]:
    operator = _OPERATORS[mark]
    return lambda context: operator(left(context), right(context))
