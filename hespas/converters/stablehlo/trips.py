"""How often a ``while`` runs, read off its counter.

The condition compares a carried counter with a limit; the body adds a constant to it. Start, step and limit
may be constants of any enclosing scope, carried unchanged, or pass through calls. Anything else is unknown
(NaN), never 1.
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import NamedTuple, Protocol, cast

from hespas.converters.stablehlo.attributes import enum_name, splat_int, symbol_of
from hespas.converters.stablehlo.bindings import Bindings
from hespas.converters.stablehlo.mlir import Block, Operation, Value, argument_block, defining_op, terminator
from hespas.converters.stablehlo.names import short_name

__all__ = ["TripCounter", "count_trips"]

_MAX_STEPS = 64
_VIEWS = frozenset({"convert", "reshape", "broadcast_in_dim", "bitcast_convert", "optimization_barrier"})
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}


def count_trips(direction: str, start: int, limit: int, step: int) -> float:
    """Trips of ``for (i = start; i <direction> limit; i += step)``; NaN where it does not end by counting."""
    gap = limit - start
    if direction == "EQ":
        return 0.0 if gap else (1.0 if step else nan)
    if direction == "NE":
        return (
            gap // step * 1.0 if step and gap % step == 0 and gap // step >= 0 else (0.0 if not gap else nan)
        )
    if direction in {"GT", "GE"}:
        gap, step = -gap, -step
    if direction not in {"LT", "LE", "GT", "GE"}:
        return nan
    inclusive = direction in {"LE", "GE"}
    if gap < 0 or (gap == 0 and not inclusive):
        return 0.0
    if step <= 0:
        return nan
    return float(gap // step + 1) if inclusive else float(-(-gap // step))


class _Affine(NamedTuple):
    """``slot + offset``, or the constant ``offset`` where ``slot`` is None."""

    slot: int | None
    offset: int


class _Numbered(Protocol):
    @property
    def arg_number(self) -> int: ...

    @property
    def result_number(self) -> int: ...


class TripCounter:
    """Infers trips in one module; ``function_body`` finds the entry block of a private function."""

    def __init__(self, bindings: Bindings, function_body: Callable[[str], Block | None]) -> None:
        self._bindings = bindings
        self._function_body = function_body

    def trips(self, loop: Operation) -> float:
        """Trips of a ``while``, NaN where they cannot be told."""
        condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
        compare = self._comparison(condition)
        if compare is None:
            return nan
        direction, left, right = compare
        limit = self._constant(loop, body, right)
        if limit is None:
            direction, left, right = _FLIPPED.get(direction, ""), right, left
            limit = self._constant(loop, body, right)
        if left.slot is None or limit is None:
            return nan
        start = self._scope(loop.operands[left.slot])
        step = self._step(body, left.slot)
        if start is None or start.slot is not None or step is None:
            return nan
        return count_trips(direction, start.offset + left.offset, limit, step)

    def _comparison(self, condition: Block) -> tuple[str, _Affine, _Affine] | None:
        """Direction and sides of the comparison a condition returns."""
        returned = terminator(condition)
        op = defining_op(returned.operands[0]) if returned is not None and len(returned.operands) else None
        if op is None or short_name(op.name) != "compare":
            return None
        left, right = (self._affine(value, condition) for value in op.operands)
        if left is None or right is None:
            return None
        dialects = (self._bindings.stablehlo, self._bindings.mhlo)
        direction = enum_name(op.attributes.get("comparison_direction"), "ComparisonDirectionAttr", *dialects)
        return direction, left, right

    def _constant(self, loop: Operation, body: Block, side: _Affine) -> int | None:
        """A side that does not change: a constant, or a slot the body hands on and the loop starts with
        one.
        """
        if side.slot is None:
            return side.offset
        if self._step(body, side.slot) != 0:
            return None
        start = self._scope(loop.operands[side.slot])
        return None if start is None or start.slot is not None else start.offset + side.offset

    def _step(self, body: Block, slot: int) -> int | None:
        """What the body adds to a slot, None where it does anything else."""
        returned = terminator(body)
        if returned is None or slot >= len(returned.operands):
            return None
        after = self._affine(returned.operands[slot], body)
        return after.offset if after is not None and after.slot == slot else None

    def _scope(self, value: Value) -> _Affine | None:
        return self._affine(value, None)

    def _affine(self, value: Value, block: Block | None) -> _Affine | None:
        """A value as slot of ``block`` plus offset; follows constants, additions, views and calls."""
        offset = 0
        calls: list[Operation] = []
        for _ in range(_MAX_STEPS):
            op = defining_op(value)
            if op is None:
                number = cast("_Numbered", value).arg_number
                owner = argument_block(value)
                if not calls:
                    return _Affine(number, offset) if block is not None and owner == block else None
                if owner != self._function_body(symbol_of(calls[-1], "callee")):
                    return None
                value = calls.pop().operands[number]
                continue
            short = short_name(op.name)
            if short == "constant":
                constant = splat_int(op.attributes.get("value"))
                return None if constant is None else _Affine(None, offset + constant)
            if op.name == "func.call":
                returned = self._returned(op)
                if returned is None:
                    return None
                calls.append(op)
                value = returned.operands[cast("_Numbered", value).result_number]
                continue
            onward = self._onward(op, short)
            if onward is None:
                return None
            value, added = onward
            offset += added
        return None

    def _onward(self, op: Operation, short: str) -> tuple[Value, int] | None:
        """The operand that a sum or view builds on, and what it adds to it."""
        if short in _VIEWS and len(op.operands) == 1:
            return op.operands[0], 0
        if short not in {"add", "subtract"}:
            return None
        left, right = op.operands[0], op.operands[1]
        added = self._literal(right)
        if added is not None:
            return left, added if short == "add" else -added
        added = self._literal(left) if short == "add" else None
        return None if added is None else (right, added)

    def _returned(self, call: Operation) -> Operation | None:
        body = self._function_body(symbol_of(call, "callee"))
        return None if body is None else terminator(body)

    def _literal(self, value: Value) -> int | None:
        """The constant a value is, seen through views."""
        for _ in range(_MAX_STEPS):
            op = defining_op(value)
            if op is None:
                return None
            short = short_name(op.name)
            if short == "constant":
                return splat_int(op.attributes.get("value"))
            if short not in _VIEWS or len(op.operands) != 1:
                return None
            value = op.operands[0]
        return None
