"""Operands of fusions whose buffers the result may overwrite, because the fusion uses them only element by
element.

The rule is that of XLA's buffer assignment (``HloDataflowAnalysis::CanShareOperandBufferWithUser``): a loop
fusion may overwrite an operand if all values derived from it in the body are computed elementwise.
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
    """Analysis of the operands that fusions of a program may overwrite with their results. Its results are
    cached by fusion body.
    """

    def __init__(self, program: HloProgram) -> None:
        """Start with an empty cache."""
        self.program = program
        self._parameters: dict[str, frozenset[int]] = {}

    def of(self, computation: Computation, index: int) -> tuple[int, ...]:
        """Return the positions of a fusion's operands that its result may overwrite. Operands passed more
        than once are left out.
        """
        operands = computation.operands[index]
        if computation.attributes[index].get("kind") not in _KINDS:
            return ()
        body = self.program.callee(computation, index, "calls")
        parameters = self._parameters.get(body.name)
        if parameters is None:
            # Find the parameters whose values are only used elementwise. O(instructions).
            elementwise = [True] * len(body)
            for user in reversed(range(len(body))):
                through = elementwise[user] and body.opcodes[user] in _ELEMENTWISE
                for operand in body.operands[user]:
                    elementwise[operand] &= through
            parameters = self._parameters[body.name] = frozenset(
                self.program.parameter_number(body, index)
                for index, opcode in enumerate(body.opcodes)
                if opcode == "parameter" and elementwise[index]
            )
        return tuple(
            number
            for number, operand in enumerate(operands)
            if number in parameters and operands.count(operand) == 1
        )
