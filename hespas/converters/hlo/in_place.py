"""Which operands a fusion may write its result over: those it only reads element by element.

The rule is that of XLA's buffer assignment (``HloDataflowAnalysis::CanShareOperandBufferWithUser``): a loop
fusion may, where all that is made of the parameter in its body is made elementwise.
"""

from __future__ import annotations

from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import HloProgram

__all__ = ["OverwrittenOperands"]

_ELEMENTWISE = frozenset(
    {
        "abs",
        "add",
        "and",
        "atan2",
        "bitcast-convert",
        "cbrt",
        "ceil",
        "clamp",
        "clz",
        "compare",
        "complex",
        "convert",
        "copy",
        "cosine",
        "count-leading-zeros",
        "divide",
        "erf",
        "exponential",
        "exponential-minus-one",
        "floor",
        "imag",
        "is-finite",
        "log",
        "log-plus-one",
        "logistic",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "popcnt",
        "power",
        "real",
        "reduce-precision",
        "remainder",
        "round-nearest-afz",
        "round-nearest-even",
        "rsqrt",
        "select",
        "shift-left",
        "shift-right-arithmetic",
        "shift-right-logical",
        "sign",
        "sine",
        "sqrt",
        "stochastic-convert",
        "subtract",
        "tan",
        "tanh",
        "tuple",
        "xor",
    }
)
_KINDS = frozenset({"kLoop", "kInput"})


class OverwrittenOperands:
    """Answers for the fusions of one program; each body is looked at once."""

    def __init__(self, program: HloProgram) -> None:
        """Start with no answers."""
        self.program = program
        self._known: dict[str, frozenset[int]] = {}

    def of(self, computation: Computation, index: int) -> tuple[int, ...]:
        """The places of those operands of a fusion, ascending; without those it is given twice."""
        operands = computation.operands[index]
        if computation.attributes[index].get("kind") not in _KINDS:
            return ()
        body = self.program.callee(computation, index, "calls")
        found = self._known.get(body.name)
        if found is None:
            # Numbers of the parameters of which only elementwise work is made. O(instructions).
            elementwise = [True] * len(body)
            for user in reversed(range(len(body))):
                through = elementwise[user] and body.opcodes[user] in _ELEMENTWISE
                for operand in body.operands[user]:
                    elementwise[operand] &= through
            found = self._known[body.name] = frozenset(
                self.program.parameter_number(body, index)
                for index, opcode in enumerate(body.opcodes)
                if opcode == "parameter" and elementwise[index]
            )
        return tuple(
            place for place, operand in enumerate(operands) if place in found and operands.count(operand) == 1
        )
