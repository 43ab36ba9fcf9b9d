"""Whether an update can happen in place: does the operand's buffer die at the operation?

It does where the value is produced in the program (or carried by a loop, or a donated argument) and nothing
reads it later. An argument of a private function dies where it dies at every call of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from hespas.converters.stablehlo.mlir import (
    Block,
    Operation,
    Value,
    View,
    argument_block,
    defining_op,
    text_of,
)

__all__ = ["CONSTANTS", "Lifetimes"]

_MAX_CALL_DEPTH = 32
CONSTANTS = frozenset({"stablehlo.constant", "mhlo.constant", "stablehlo.iota", "mhlo.iota"})
"""Operations whose results stand in the program itself."""

_FUNCTION = "func.func"


class _Argument(Protocol):
    @property
    def arg_number(self) -> int: ...


class Lifetimes:
    """Answers for one module. ``find_calls`` lists the call operations of each function; asked at most
    once.
    """

    def __init__(
        self,
        donated: frozenset[int],
        find_calls: Callable[[], Mapping[str, Sequence[Operation]]],
        entry: str,
    ) -> None:
        self._donated = donated
        self._find_calls = find_calls
        self._calls: Mapping[str, Sequence[Operation]] | None = None
        self._entry = entry
        self._arguments: dict[tuple[str, int], bool] = {}

    def dies_here(self, op: Operation, places: Sequence[int]) -> bool:
        """Whether the buffers of the operands at ``places`` die at ``op``."""
        return all(self._dies(op, op.operands[place], 0) for place in places)

    def _dies(self, op: Operation, value: Value, depth: int) -> bool:
        if _is_read_later(op, value):
            return False
        maker = defining_op(value)
        if maker is not None:
            return maker.name not in CONSTANTS
        return self._argument_dies(argument_block(value), value, depth)

    def _argument_dies(self, block: Block, value: Value, depth: int) -> bool:
        """A block argument: of a loop (a carry: yes), of the entry (if donated), of a private function."""
        parent = cast("_Owned", block).owner.operation
        if parent.name != _FUNCTION:
            return True
        number = cast("_Argument", value).arg_number
        name = text_of(parent, "sym_name")
        if name == self._entry:
            return number in self._donated
        key = (name, number)
        if self._calls is None:
            self._calls = self._find_calls()
        if key not in self._arguments:
            self._arguments[key] = False
            self._arguments[key] = depth < _MAX_CALL_DEPTH and all(
                self._dies(call, call.operands[number], depth + 1) for call in self._calls.get(name, ())
            )
        return self._arguments[key]


class _Owned(Protocol):
    @property
    def owner(self) -> View: ...


def _is_read_later(op: Operation, value: Value) -> bool:
    """Whether another operation may read a value after ``op``; a use in another block counts as later."""
    uses_here = 0
    for use in value.uses:
        user = use.owner.operation
        if user == op:
            uses_here += 1
            continue
        if user.block != op.block or not user.is_before_in_block(op):
            return True
    return uses_here > 1
