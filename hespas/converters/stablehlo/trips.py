"""Trip counts of ``while`` loops, derived from their counters.

The condition compares a carried counter with a limit, and the body adds a constant to the counter. Start,
step and limit may be constants of any enclosing scope, loop-carried values that do not change, or arguments
of calls. Sums wrap like integers of their type. The trip count of any other loop, and of a loop that does not
end, is unknown (NaN).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from typing import TYPE_CHECKING, NamedTuple, cast

from hespas.converters.stablehlo.mlir import (
    Bindings,
    MlirBlock,
    MlirOperation,
    MlirValue,
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

__all__ = ["TripCounter", "count_trips"]

_MAX_STEPS = 64
_VIEWS = frozenset({"convert", "reshape", "broadcast_in_dim", "bitcast_convert", "optimization_barrier"})
_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}

_FOLDED: dict[str, Callable[[int, int], int]] = {
    "multiply": lambda left, right: left * right,
    "divide": lambda left, right: left // right,
    "maximum": max,
    "minimum": min,
}
"""Operations on constants that are evaluated; sums are followed separately."""
_MAX_FOLDS = 12

_ENDINGS: dict[str, Callable[[int, range], range]] = {
    "LT": lambda limit, values: range(limit, values.stop),
    "LE": lambda limit, values: range(limit + 1, values.stop),
    "GT": lambda limit, values: range(values.start, limit + 1),
    "GE": lambda limit, values: range(values.start, limit),
    "EQ": lambda limit, values: range(limit + 1, limit + values.stop - values.start),
    "NE": lambda limit, _: range(limit, limit + 1),
}
"""Values of a type that end a loop. After its last value a type continues with its first."""


def count_trips(direction: str, start: int, limit: int, step: int, values: range) -> float:
    """Return the number of iterations of ``for (i = start; i <direction> limit; i += step)``; NaN for an
    endless loop.

    ``values`` is the range of the counter's type, whose size is a power of two. After the last value the
    counter wraps to the first.
    """
    endings = _ENDINGS.get(direction)
    ends = endings(limit, values) if endings else None
    if not ends:
        return nan
    size = values.stop - values.start
    first, last = (ends[0] - start) % size, (ends[-1] - start) % size
    # An interval that wraps contains 0, the start itself.
    trips = 0 if first > last else _first_multiple(step % size, size, first, last)
    return nan if trips is None else float(trips)


def _first_multiple(step: int, size: int, first: int, last: int) -> int | None:
    """Return the least ``n >= 0`` with ``first <= n * step % size <= last``, or None without such an ``n``.

    As in Euclid's algorithm, either a multiple lies in the interval before the first wrap, or the number of
    wraps is the solution of the same problem for remainders. ``size`` falls fast: 64 bits take at most 92
    calls.
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


class _IntegerType(NamedTuple):
    """Integer type of a StableHLO value, for exact arithmetic on constants."""

    bits: int
    is_signed: bool

    @property
    def values(self) -> range:
        """Return the range of the values of the type."""
        low = -(1 << self.bits - 1) if self.is_signed else 0
        return range(low, low + (1 << self.bits))

    def wrapped(self, value: int) -> int:
        """Return the value to which the type wraps a number outside of its range."""
        low = self.values.start
        return low + (value - low) % (1 << self.bits)


_WIDEST = _IntegerType(128, is_signed=True)
"""Type wider than any counter, in which nothing wraps."""


class _AffineValue(NamedTuple):
    """Integer of the form ``slot + offset``, where ``slot`` is the position of a loop-carried value. ``slot``
    None means the constant ``offset``.

    ``types`` are the integer types of the intermediate values, the last one first.
    """

    slot: int | None
    offset: int
    types: tuple[_IntegerType, ...]

    def settled(self) -> int | None:
        """Return the value if it is a constant, wrapped to its type. Return None if it depends on a slot
        (loop-carried value), or if an intermediate type of another width cannot hold it.
        """
        if self.slot is not None:
            return None
        if _is_one_width(self.types):
            return self.types[0].wrapped(self.offset)
        return self.offset if all(self.offset in kind.values for kind in self.types) else None


class _ShiftedValue(NamedTuple):
    """SSA value ``value`` plus the constant ``added``. It is the result of one step of the search for the
    origin of another value.
    """

    value: MlirValue
    added: int


class _ValuePath(NamedTuple):
    """Path from a value back to its origin. ``calls`` are the calls through which the value was passed.
    ``types`` are the integer types along the path, the last one first.
    """

    calls: list[MlirOperation]
    types: list[_IntegerType]


class TripCounter:
    """Analysis of the trip counts of the loops of one module. ``function_body`` returns the entry block of a
    private function.
    """

    def __init__(
        self,
        bindings: Bindings,
        function_body: Callable[[str], MlirBlock | None],
        call_sites: Callable[[], Mapping[str, Sequence[MlirOperation]]],
    ) -> None:
        self._bindings = bindings
        self._function_body = function_body
        self._call_sites = call_sites
        self._only_calls: dict[MlirBlock, MlirOperation] | None = None

    def trips(self, loop: MlirOperation) -> float:
        """Return the trip count of a ``while``, NaN if unknown."""
        condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
        returned = terminator(condition)
        op = defining_op(returned.operands[0]) if returned is not None and len(returned.operands) else None
        if op is None or short_name(op.name) != "compare":
            return nan
        left, right = (self._affine(value, condition) for value in op.operands)
        if left is None or right is None:
            return nan
        dialects = (self._bindings.stablehlo, self._bindings.mhlo)
        direction = enum_name(op.attributes.get("comparison_direction"), "ComparisonDirectionAttr", *dialects)
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
        types = (*left.types, *step.types)
        first = start + left.offset
        if _is_one_width(types):
            compared = left.types[0]
            return count_trips(direction, compared.wrapped(first), limit, step.offset, compared.values)
        trips = count_trips(direction, first, limit, step.offset, _WIDEST.values)
        reached = () if isnan(trips) else (start, start + int(trips) * step.offset)
        shifted = [value + added for value in reached for added in (0, left.offset)]
        return trips if reached and all(value in kind.values for value in shifted for kind in types) else nan

    def _constant(self, loop: MlirOperation, body: MlirBlock, side: _AffineValue) -> int | None:
        """Return the value of one side of a comparison if it is a constant, or a loop-carried value (slot)
        that is initially a constant and does not change; else None.
        """
        if side.slot is None:
            return side.settled()
        step = self._step(body, side.slot)
        start = self._affine(loop.operands[side.slot])
        if step is None or step.offset != 0 or start is None:
            return None
        types = (*side.types, *step.types, *start.types)
        return _AffineValue(start.slot, start.offset + side.offset, types).settled()

    def _step(self, body: MlirBlock, slot: int) -> _AffineValue | None:
        """Return the constant that the body adds to a slot; None if the body computes the slot in another
        way.
        """
        returned = terminator(body)
        if returned is None or slot >= len(returned.operands):
            return None
        after = self._affine(returned.operands[slot], body)
        return after if after is not None and after.slot == slot else None

    def _affine(self, value: MlirValue, block: MlirBlock | None = None) -> _AffineValue | None:
        """Express a value as an argument of ``block`` (a loop-carried value) plus a constant. Return None if
        that is impossible. Constants, additions, views and calls are followed.
        """
        trail = _ValuePath([], [])
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
            if isinstance(onward, _AffineValue):
                return _AffineValue(onward.slot, onward.offset + offset, onward.types)
            if onward is None:
                return None
            value, added = onward
            offset += added
        return None

    def _from_argument(
        self, value: MlirValue, trail: _ValuePath, block: MlirBlock | None
    ) -> _AffineValue | _ShiftedValue | None:
        """Follow a block argument: return a slot of ``block``, or the operand that the call passes for the
        argument.
        """
        number = cast("ir.BlockArgument[ir.Type]", value).arg_number
        owner = argument_block(value)
        if not trail.calls:
            if block is not None and owner == block:
                return _AffineValue(number, 0, tuple(trail.types))
            if self._only_calls is None:
                self._only_calls = {}
                for name, sites in self._call_sites().items():
                    callee_body = self._function_body(name)
                    if callee_body is not None and len(sites) == 1 and sites[0].name == "func.call":
                        self._only_calls[callee_body] = sites[0]
            call = self._only_calls.get(owner)
            return None if call is None else _ShiftedValue(call.operands[number], 0)
        if owner != self._function_body(text_of(trail.calls[-1], "callee")):
            return None
        return _ShiftedValue(trail.calls.pop().operands[number], 0)

    def _onward(
        self, op: MlirOperation, value: MlirValue, trail: _ValuePath
    ) -> _AffineValue | _ShiftedValue | None:
        """Follow the result of an operation one step towards its origin. Return the constant that it is, or
        the value from which it differs by a constant: the operand of a view or sum, or the value that a
        called function returns. Return None for any other operation.
        """
        short = short_name(op.name)
        if short == "constant" or short in _FOLDED:
            constant = self._literal(value)
            return None if constant is None else _AffineValue(None, constant, tuple(trail.types))
        if op.name == "func.call":
            body = self._function_body(text_of(op, "callee"))
            returned = None if body is None else terminator(body)
            if returned is None:
                return None
            trail.calls.append(op)
            return _ShiftedValue(returned.operands[cast("ir.OpResult[ir.Type]", value).result_number], 0)
        if short in _VIEWS and len(op.operands) == 1:
            return _ShiftedValue(op.operands[0], 0)
        if short not in {"add", "subtract"} or any(kind.bits > trail.types[-1].bits for kind in trail.types):
            return None  # sums of a narrower type may wrap before they are widened
        augend, added = op.operands[0], self._literal(op.operands[1])
        if added is None and short == "add":
            augend, added = op.operands[1], self._literal(op.operands[0])
        return None if added is None else _ShiftedValue(augend, added if short == "add" else -added)

    def _literal(self, value: MlirValue, depth: int = 0) -> int | None:
        """Return the constant that a value has, through views and arithmetic on constants; None if it is not
        constant.
        """
        types: list[_IntegerType] = []
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
                if depth >= _MAX_FOLDS or len(op.operands) != 2:
                    constant = None
                else:
                    left, right = (self._literal(operand, depth + 1) for operand in op.operands)
                    if left is None or right is None or (short == "divide" and (left < 0 or right <= 0)):
                        constant = None
                    else:
                        constant = _FOLDED[short](left, right)
            elif short in _VIEWS and len(op.operands) == 1:
                value = op.operands[0]
                continue
            return None if constant is None else _AffineValue(None, constant, tuple(types)).settled()
        return None


def _is_one_width(types: Sequence[_IntegerType]) -> bool:
    return len({kind.bits for kind in types}) == 1


def _integer(value: MlirValue) -> _IntegerType | None:
    """Return the element type of a value if it is an integer type, whose sums wrap; else None."""
    if not hasattr(value.type, "element_type"):
        return None
    element = find_dtype(str(cast("ir.ShapedType", value.type).element_type))
    if element is None or element.kind not in {DTypeKind.SIGNED, DTypeKind.UNSIGNED}:
        return None
    return _IntegerType(element.bits, element.kind is DTypeKind.SIGNED)
