"""How often a ``while`` runs, read off its counter.

The condition compares a carried counter with a limit; the body adds a constant to it. Start, step and limit
may be constants of any enclosing scope, carried unchanged, or pass through calls. Sums wrap as integers of
their type do. Anything else is unknown (NaN), never 1, and so is a loop that does not end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from typing import TYPE_CHECKING, NamedTuple, cast

from hespas.converters.stablehlo.mlir import (
    Bindings,
    Block,
    Operation,
    Value,
    argument_block,
    defining_op,
    enum_name,
    short_name,
    splat_int,
    terminator,
    text_of,
)
from hespas.graph import DTypeKind, find_dtype

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._mlir import ir

__all__ = ["CONSTANTS", "Lifetimes", "TripCounter", "count_trips"]

_MAX_STEPS = 64
_VIEWS = frozenset({"convert", "reshape", "broadcast_in_dim", "bitcast_convert", "optimization_barrier"})
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}

_FOLDED: dict[str, Callable[[int, int], int]] = {
    "multiply": lambda left, right: left * right,
    "divide": lambda left, right: left // right,
    "maximum": max,
    "minimum": min,
}
"""Operations on constants that make one; sums are followed by themselves."""
_MAX_FOLDS = 12

_ENDINGS: dict[str, Callable[[int, range], range]] = {
    "LT": lambda limit, values: range(limit, values.stop),
    "LE": lambda limit, values: range(limit + 1, values.stop),
    "GT": lambda limit, values: range(values.start, limit + 1),
    "GE": lambda limit, values: range(values.start, limit),
    "EQ": lambda limit, values: range(limit + 1, limit + values.stop - values.start),
    "NE": lambda limit, _: range(limit, limit + 1),
}
"""The values of a type that end a loop; past the last value they go on with the first."""


def count_trips(direction: str, start: int, limit: int, step: int, values: range) -> float:
    """Trips of ``for (i = start; i <direction> limit; i += step)``; NaN where it does not end.

    ``values`` are those of the counter's type, as many as a power of two; past the last comes the first.
    """
    endings = _ENDINGS.get(direction)
    ends = endings(limit, values) if endings else None
    if not ends:
        return nan
    size = values.stop - values.start
    first, last = (ends[0] - start) % size, (ends[-1] - start) % size
    # A stretch that runs past the largest remainder holds 0, the start itself.
    trips = 0 if first > last else _first_multiple(step % size, size, first, last)
    return nan if trips is None else float(trips)


def _first_multiple(step: int, size: int, first: int, last: int) -> int | None:
    """The least ``n >= 0`` with ``first <= n * step % size <= last``, None where there is none.

    As Euclid's algorithm: either a multiple lies there before the first turn, or the number of turns is the
    answer to the same question about remainders. ``size`` falls fast: 64 bits are 92 calls at most.
    """
    if first == 0:
        return 0
    if step == 0:
        return None
    least = -(-first // step)
    if least * step <= last:
        return least
    turns = _first_multiple(size % step, step, -last % step, -first % step)
    return None if turns is None else -(-(first + turns * size) // step)


class _Integer(NamedTuple):
    """An integer type."""

    bits: int
    is_signed: bool

    @property
    def values(self) -> range:
        """What it holds."""
        low = -(1 << self.bits - 1) if self.is_signed else 0
        return range(low, low + (1 << self.bits))

    def wrapped(self, value: int) -> int:
        """The value that stands for a number past the ends."""
        low = self.values.start
        return low + (value - low) % (1 << self.bits)


_WIDEST = _Integer(128, is_signed=True)
"""Wider than any counter: in it nothing wraps."""


class _Affine(NamedTuple):
    """``slot + offset``, or the constant ``offset`` where ``slot`` is None. ``types`` are those it has on its
    way, the last first.
    """

    slot: int | None
    offset: int
    types: tuple[_Integer, ...]

    def settled(self) -> int | None:
        """A constant as its type holds it; None where it does not fit a type on its way."""
        if self.slot is not None:
            return None
        if _is_one_width(self.types):
            return self.types[0].wrapped(self.offset)
        return self.offset if all(self.offset in kind.values for kind in self.types) else None


class _Sum(NamedTuple):
    """``value + added``."""

    value: Value
    added: int


class _Trail(NamedTuple):
    """The way from a value back to its origin: calls that it is inside, types that it had, the last first."""

    calls: list[Operation]
    types: list[_Integer]


class TripCounter:
    """Infers trips in one module; ``function_body`` finds the entry block of a private function."""

    def __init__(
        self,
        bindings: Bindings,
        function_body: Callable[[str], Block | None],
        call_sites: Callable[[], Mapping[str, Sequence[Operation]]],
    ) -> None:
        self._bindings = bindings
        self._function_body = function_body
        self._call_sites = call_sites
        self._only_calls: dict[Block, Operation] | None = None

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
        initial = self._affine(loop.operands[left.slot])
        start = None if initial is None else initial.settled()
        step = self._step(body, left.slot)
        if start is None or step is None:
            return nan
        return _counted(direction, start, limit, left, step)

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
            return side.settled()
        step = self._step(body, side.slot)
        start = self._affine(loop.operands[side.slot])
        if step is None or step.offset != 0 or start is None:
            return None
        types = (*side.types, *step.types, *start.types)
        return _Affine(start.slot, start.offset + side.offset, types).settled()

    def _step(self, body: Block, slot: int) -> _Affine | None:
        """What the body adds to a slot, None where it does anything else."""
        returned = terminator(body)
        if returned is None or slot >= len(returned.operands):
            return None
        after = self._affine(returned.operands[slot], body)
        return after if after is not None and after.slot == slot else None

    def _affine(self, value: Value, block: Block | None = None) -> _Affine | None:
        """A value as slot of ``block`` plus offset; follows constants, additions, views and calls."""
        trail = _Trail([], [])
        offset = 0
        for _ in range(_MAX_STEPS):
            kind = _integer(value)
            if kind is None:
                return None
            trail.types.append(kind)
            op = defining_op(value)
            onward = (
                self._from_argument(value, trail, block) if op is None else self._onward(op, value, trail)
            )
            if isinstance(onward, _Affine):
                return _Affine(onward.slot, onward.offset + offset, onward.types)
            if onward is None:
                return None
            value, added = onward
            offset += added
        return None

    def _from_argument(self, value: Value, trail: _Trail, block: Block | None) -> _Affine | _Sum | None:
        """A slot of ``block``, or what a function is called with."""
        number = cast("ir.BlockArgument[ir.Type]", value).arg_number
        owner = argument_block(value)
        if not trail.calls:
            if block is not None and owner == block:
                return _Affine(number, 0, tuple(trail.types))
            call = self._only_call(owner)
            return None if call is None else _Sum(call.operands[number], 0)
        if owner != self._function_body(text_of(trail.calls[-1], "callee")):
            return None
        return _Sum(trail.calls.pop().operands[number], 0)

    def _only_call(self, body: Block) -> Operation | None:
        """The call of a function that is called once: what it is given there is what it works with."""
        if self._only_calls is None:
            self._only_calls = {}
            for name, sites in self._call_sites().items():
                block = self._function_body(name)
                if block is not None and len(sites) == 1 and sites[0].name == "func.call":
                    self._only_calls[block] = sites[0]
        return self._only_calls.get(body)

    def _onward(self, op: Operation, value: Value, trail: _Trail) -> _Affine | _Sum | None:
        """A constant, or what a call, a view or a sum builds on."""
        short = short_name(op.name)
        if short == "constant" or short in _FOLDED:
            constant = self._literal(value)
            return None if constant is None else _Affine(None, constant, tuple(trail.types))
        if op.name == "func.call":
            body = self._function_body(text_of(op, "callee"))
            returned = None if body is None else terminator(body)
            if returned is None:
                return None
            trail.calls.append(op)
            return _Sum(returned.operands[cast("ir.OpResult[ir.Type]", value).result_number], 0)
        if short in _VIEWS and len(op.operands) == 1:
            return _Sum(op.operands[0], 0)
        found = self._sum(op, short)
        if found is None or any(kind.bits > trail.types[-1].bits for kind in trail.types):
            return None  # it may wrap before it is widened
        return found

    def _sum(self, op: Operation, short: str) -> _Sum | None:
        """The operand to which a sum adds a constant."""
        if short not in {"add", "subtract"}:
            return None
        left, right = op.operands[0], op.operands[1]
        added = self._literal(right)
        if added is not None:
            return _Sum(left, added if short == "add" else -added)
        added = self._literal(left) if short == "add" else None
        return None if added is None else _Sum(right, added)

    def _literal(self, value: Value, depth: int = 0) -> int | None:
        """The constant a value is, seen through views and products of constants."""
        types: list[_Integer] = []
        for _ in range(_MAX_STEPS):
            op, kind = defining_op(value), _integer(value)
            if op is None or kind is None:
                return None
            types.append(kind)
            short = short_name(op.name)
            constant = None
            if short == "constant":
                constant = splat_int(op.attributes.get("value"))
            elif short in _FOLDED:
                constant = self._folded(op, short, depth)
            elif short in _VIEWS and len(op.operands) == 1:
                value = op.operands[0]
                continue
            return None if constant is None else _Affine(None, constant, tuple(types)).settled()
        return None

    def _folded(self, op: Operation, short: str, depth: int) -> int | None:
        """What an operation on constants makes, as grids are multiplied out (before its type wraps it)."""
        if depth >= _MAX_FOLDS or len(op.operands) != 2:
            return None
        left, right = (self._literal(each, depth + 1) for each in op.operands)
        if left is None or right is None or (short == "divide" and (left < 0 or right <= 0)):
            return None
        return _FOLDED[short](left, right)


def _counted(direction: str, start: int, limit: int, left: _Affine, step: _Affine) -> float:
    """Trips of a counter. Where it changes its width on the way no value may wrap, or they are unknown."""
    types = (*left.types, *step.types)
    first = start + left.offset
    if _is_one_width(types):
        compared = left.types[0]
        return count_trips(direction, compared.wrapped(first), limit, step.offset, compared.values)
    trips = count_trips(direction, first, limit, step.offset, _WIDEST.values)
    reached = () if isnan(trips) else (start, start + int(trips) * step.offset)
    shifted = [value + added for value in reached for added in (0, left.offset)]
    return trips if reached and all(value in kind.values for value in shifted for kind in types) else nan


def _is_one_width(types: Sequence[_Integer]) -> bool:
    return len({kind.bits for kind in types}) == 1


def _integer(value: Value) -> _Integer | None:
    """The element type of a value where sums in it wrap as those of integers do."""
    if not hasattr(value.type, "element_type"):
        return None
    element = find_dtype(str(cast("ir.ShapedType", value.type).element_type))
    if element is None or element.kind not in {DTypeKind.SIGNED, DTypeKind.UNSIGNED}:
        return None
    return _Integer(element.bits, element.kind is DTypeKind.SIGNED)


# --- Whether an update can happen in place: does the operand's buffer die at the operation?
#
# It does where the value is produced in the program (or carried by a loop, or a donated argument) and nothing
# reads it later. An argument of a private function dies where it dies at every call of the function.


_MAX_CALL_DEPTH = 32
CONSTANTS = frozenset({"stablehlo.constant", "mhlo.constant", "stablehlo.iota", "mhlo.iota"})
"""Operations whose results stand in the program itself."""

_FUNCTION = "func.func"


class Lifetimes:
    """Answers for one module; ``call_sites`` lists the call operations of each function."""

    def __init__(
        self, donated: frozenset[int], call_sites: Callable[[], Mapping[str, Sequence[Operation]]], entry: str
    ) -> None:
        self._donated = donated
        self._call_sites = call_sites
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
        parent = block.owner.operation
        if parent.name != _FUNCTION:
            return True
        number = cast("ir.BlockArgument[ir.Type]", value).arg_number
        name = text_of(parent, "sym_name")
        if name == self._entry:
            return number in self._donated
        key = (name, number)
        if key not in self._arguments:
            self._arguments[key] = False
            self._arguments[key] = depth < _MAX_CALL_DEPTH and all(
                self._dies(call, call.operands[number], depth + 1)
                for call in self._call_sites().get(name, ())
            )
        return self._arguments[key]


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
