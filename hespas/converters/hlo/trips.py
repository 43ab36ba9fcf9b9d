"""How often a loop runs: what the compiler states, else what condition and body say, else unknown.

Recognised is a loop that counts: the condition compares (``LT LE GT GE NE``) an element of the state with a
constant or with an element the loop does not change, the element starts at a constant, and the body adds a
constant. Views, copies, conversions and fusions on the way are looked through.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan

from hespas.converters.hlo.attributes import backend_config, integer, names
from hespas.converters.hlo.module import Computation, HloModule
from hespas.converters.hlo.shapes import Shape
from hespas.graph.tensors import DTypeKind

__all__ = ["Trips", "loop_trips"]

_VIEWS = frozenset({"bitcast", "copy", "convert", "reshape", "opt-barrier"})
_MAX_STEPS = 64
"""Instructions looked through before giving up; real loops need fewer than ten."""

_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, slots=True)
class Trips:
    """``count`` is NaN where unknown; ``stated`` says that the compiler wrote it down."""

    count: float
    stated: bool = False


@dataclass(frozen=True, slots=True)
class _Term:
    """An integer: element ``element`` of the loop state plus ``offset``, or a constant (``element`` None)."""

    element: int | None
    offset: int


_Frame = tuple[Computation, "_Frame | None", tuple[int, ...]]
"""A computation and, for the body of a fusion, the caller and the operands it got there."""


class _Reader:
    """Reads integer terms out of one computation of a loop."""

    __slots__ = ("module", "steps")

    def __init__(self, module: HloModule) -> None:
        self.module = module
        self.steps = 0

    def settle(self, frame: _Frame, index: int) -> tuple[_Frame, int] | None:
        """Follow views and fusion boundaries to the instruction that makes a value."""
        while self.steps < _MAX_STEPS:
            self.steps += 1
            computation, caller, arguments = frame
            opcode = computation.opcodes[index]
            if opcode in _VIEWS and computation.operands[index]:
                index = computation.operands[index][0]
            elif opcode == "parameter" and caller is not None:
                number = integer(computation.payloads[index])
                if not 0 <= number < len(arguments):
                    return None
                frame, index = caller, arguments[number]
            elif opcode in {"fusion", "call"}:
                callee = self._callee(computation, index)
                if callee is None:
                    return None
                frame, index = (callee, frame, computation.operands[index]), callee.root
            else:
                return frame, index
        return None

    def _callee(self, computation: Computation, index: int) -> Computation | None:
        attributes = computation.attributes[index]
        named = names(attributes.get("calls") or attributes.get("to_apply"))
        return self.module.computations.get(named[0]) if named else None

    def term(self, frame: _Frame, index: int) -> _Term | None:
        """The integer an instruction makes, None where it is neither constant nor state plus constant."""
        settled = self.settle(frame, index)
        if settled is None:
            return None
        frame, index = settled
        computation = frame[0]
        opcode, operands = computation.opcodes[index], computation.operands[index]
        if opcode == "constant":
            return _constant(computation.payloads[index])
        if opcode == "parameter":
            return _Term(-1, 0)
        if opcode == "get-tuple-element" and operands:
            source = self.settle(frame, operands[0])
            is_state = source is not None and source[0][0].opcodes[source[1]] == "parameter"
            return _Term(integer(computation.attributes[index].get("index", "")), 0) if is_state else None
        if opcode not in {"add", "subtract"} or len(operands) != 2 or self.steps >= _MAX_STEPS:
            return None
        return _combined(opcode, self.term(frame, operands[0]), self.term(frame, operands[1]))


def _constant(text: str) -> _Term | None:
    try:
        return _Term(None, integer(text))
    except ValueError:
        return None


def _combined(opcode: str, left: _Term | None, right: _Term | None) -> _Term | None:
    if left is None or right is None:
        return None
    if opcode == "subtract":
        return _Term(left.element, left.offset - right.offset) if right.element is None else None
    if left.element is not None and right.element is not None:
        return None
    element = right.element if left.element is None else left.element
    return _Term(element, left.offset + right.offset)


def _counted(direction: str, start: int, limit: int, step: int) -> float:
    """Trips of ``for (i = start; i <direction> limit; i += step)``, NaN where it does not end."""
    distance = limit - start
    if direction in {"GT", "GE"}:
        direction, distance, step = _MIRRORED[direction], -distance, -step
    if direction == "NE":
        ends = step != 0 and distance % step == 0 and distance // step >= 0
        return float(distance // step) if ends else nan
    if direction == "LE":
        distance += 1
    if distance <= 0:
        return 0.0
    return float(-(-distance // step)) if step > 0 else nan


def loop_trips(
    module: HloModule, computation: Computation, index: int, condition: Computation, body: Computation
) -> Trips:
    """The trip count of the ``while`` at ``index`` of ``computation``."""
    stated = backend_config(computation.attributes[index]).trips
    if stated >= 0:
        return Trips(float(stated), stated=True)
    try:
        return Trips(_inferred(module, (computation, index), condition, body))
    except (ValueError, IndexError):
        return Trips(nan)


def _inferred(
    module: HloModule, loop: tuple[Computation, int], condition: Computation, body: Computation
) -> float:
    reader = _Reader(module)
    settled = reader.settle((condition, None, ()), condition.root)
    if settled is None or settled[0][0].opcodes[settled[1]] != "compare":
        return nan
    frame, index = settled
    direction = frame[0].attributes[index].get("direction", "")
    left, right = (reader.term(frame, operand) for operand in frame[0].operands[index][:2])
    if left is None or right is None or direction not in _MIRRORED:
        return nan
    if left.element is None:
        left, right, direction = right, left, _MIRRORED[direction]
    if left.element is None:
        return nan
    start = _initial(module, loop, left.element)
    limit = _limit(module, loop, body, right)
    step = _step(module, body, left.element)
    if start is None or limit is None or step is None:
        return nan
    trips = _counted(direction, start + left.offset, limit, step)
    values = _values(module.shape_of(*loop), left.element)
    held = not isnan(trips) and all(value in values for value in (start, start + int(trips) * step))
    return trips if held else nan


def _values(state: Shape, element: int) -> range:
    """What the counter's type holds: past its last value a count starts over, and trips are not inferred."""
    array = (state if element < 0 else state.element(element)).array
    dtype = None if array is None else array.dtype
    if dtype is None or dtype.kind not in {DTypeKind.SIGNED, DTypeKind.UNSIGNED}:
        return range(0)
    low = -(1 << dtype.bits - 1) if dtype.kind is DTypeKind.SIGNED else 0
    return range(low, low + (1 << dtype.bits))


def _initial(module: HloModule, loop: tuple[Computation, int], element: int) -> int | None:
    """What an element of the state starts from, where that is a constant."""
    computation, index = loop
    term = _element(_Reader(module), (computation, None, ()), computation.operands[index][0], element)
    return term.offset if term is not None and term.element is None else None


def _step(module: HloModule, body: Computation, element: int) -> int | None:
    """What the body adds to an element of the state, where that is a constant."""
    term = _element(_Reader(module), (body, None, ()), body.root, element)
    return term.offset if term is not None and term.element == element else None


def _limit(module: HloModule, loop: tuple[Computation, int], body: Computation, right: _Term) -> int | None:
    if right.element is None:
        return right.offset
    if _step(module, body, right.element) != 0:
        return None
    start = _initial(module, loop, right.element)
    return None if start is None else start + right.offset


def _element(reader: _Reader, frame: _Frame, index: int, element: int) -> _Term | None:
    """One element of a tuple value (-1: the value itself)."""
    if element < 0:
        return reader.term(frame, index)
    settled = reader.settle(frame, index)
    if settled is None:
        return None
    frame, index = settled
    computation = frame[0]
    if computation.opcodes[index] == "parameter":
        return _Term(element, 0)
    if computation.opcodes[index] != "tuple" or element >= len(computation.operands[index]):
        return None
    return reader.term(frame, computation.operands[index][element])
