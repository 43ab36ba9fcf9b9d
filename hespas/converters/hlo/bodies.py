"""What one run of a computation costs: bodies of fusions, reducers, comparators and branches, callees first.

Arithmetic is the sum over the body, nested fusions included; a loop counts its trips, a conditional its
costliest branch. Which operand bytes a fusion moves is in :mod:`hespas.converters.hlo.traffic`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isnan

from hespas.converters.hlo.attributes import names
from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import Program, base_opcode
from hespas.converters.hlo.traffic import STRUCTURE, Alias, body_aliases, body_needs
from hespas.converters.hlo.trips import loop_trips
from hespas.costs import Body, Contraction, Cost, branch_ns, canonical_name
from hespas.graph import OpClass

__all__ = ["Bodies", "BodyCost", "branch_names"]

_CALLERS = frozenset({"fusion", "call", "async-start", "fusion-start", "call-start"})


@dataclass(frozen=True, slots=True)
class BodyCost:
    """One run of a computation.

    ``needs`` is the fraction of each parameter that is read; ``moved_bytes`` the traffic of its operations if
    each were a kernel, ``about_ns`` their time, to rank branches only; ``unknown`` and ``collectives`` list
    (computation, instruction) of operations whose arithmetic nobody knows, each once, and of those that
    communicate; ``rate_dtype`` is the type of most of the arithmetic.
    """

    flops: float = 0.0
    useful_flops: float = 0.0
    transcendentals: float = 0.0
    moved_bytes: float = 0.0
    about_ns: float = 0.0
    rate_dtype: int = -1
    contractions: tuple[Contraction, ...] = ()
    contraction_class: OpClass | None = None
    needs: tuple[float, ...] = ()
    aliases: tuple[Alias, ...] = ()
    unknown: tuple[tuple[Computation, int], ...] = ()
    collectives: tuple[tuple[Computation, int], ...] = ()


_EMPTY = BodyCost()


def branch_names(computation: Computation, index: int) -> tuple[str, ...]:
    """The branches of a ``conditional``; of the two-way form the true branch comes first."""
    attributes = computation.attributes[index]
    if "branch_computations" in attributes:
        return names(attributes["branch_computations"])
    return (*names(attributes.get("true_computation")), *names(attributes.get("false_computation")))


def _scaled(body: BodyCost, times: float) -> BodyCost:
    """A body run several times; its contractions become longer batches where the number is known."""
    if times == 1.0:
        return body
    contractions = () if isnan(times) else body.contractions
    return replace(
        body,
        flops=body.flops * times,
        useful_flops=body.useful_flops * times,
        transcendentals=body.transcendentals * times,
        moved_bytes=body.moved_bytes * times,
        about_ns=body.about_ns * (1.0 if isnan(times) else times),
        contractions=tuple(
            replace(
                part,
                batch=part.batch * int(times) if part.batch > 0 else part.batch,
                flops=part.flops * times,
                useful_flops=part.useful_flops * times,
            )
            for part in contractions
        ),
    )


@dataclass(slots=True)
class _Total:
    """Adds up a body."""

    flops: float = 0.0
    useful_flops: float = 0.0
    transcendentals: float = 0.0
    moved_bytes: float = 0.0
    about_ns: float = 0.0
    rates: dict[int, float] = field(default_factory=dict[int, float])
    contractions: list[Contraction] = field(default_factory=list[Contraction])
    contraction_class: OpClass | None = None
    unknown: dict[tuple[Computation, int], None] = field(default_factory=dict[tuple[Computation, int], None])
    collectives: list[tuple[Computation, int]] = field(default_factory=list[tuple[Computation, int]])

    def add(self, part: Cost | BodyCost) -> None:
        """Add the figures that an operation and a body share."""
        self.flops += part.flops
        self.useful_flops += part.useful_flops
        self.transcendentals += part.transcendentals
        self.contractions += part.contractions
        if part.rate_dtype >= 0:
            weight = part.flops + part.transcendentals
            self.rates[part.rate_dtype] = self.rates.get(part.rate_dtype, 0.0) + weight

    def add_body(self, body: BodyCost) -> None:
        """Add a called computation."""
        self.add(body)
        self.moved_bytes += body.moved_bytes
        self.about_ns += body.about_ns
        self.unknown.update(dict.fromkeys(body.unknown))
        self.collectives += body.collectives
        self.contraction_class = self.contraction_class or body.contraction_class

    def rate_dtype(self) -> int:
        """The type of the largest contraction, else of most of the arithmetic."""
        if self.contractions:
            return max(self.contractions, key=lambda part: part.flops).lhs
        return max(self.rates, key=lambda code: self.rates[code], default=-1)


class Bodies:
    """Costs of computations by name; fill with :meth:`add`, callees first."""

    def __init__(self, program: Program) -> None:
        """Start with none."""
        self.program = program
        self.costs: dict[str, BodyCost] = {}

    def add(self, computation: Computation) -> None:
        """Cost one computation. O(instructions)."""
        total = _Total()
        for index, opcode in enumerate(computation.opcodes):
            if opcode not in STRUCTURE:
                self._add_instruction(total, computation, index)
        needs = body_needs(self.program, computation, self._inner_needs)
        body = BodyCost(
            total.flops,
            total.useful_flops,
            total.transcendentals,
            total.moved_bytes,
            total.about_ns,
            total.rate_dtype(),
            tuple(total.contractions),
            total.contraction_class,
            needs,
            body_aliases(self.program, computation),
            tuple(total.unknown),
            tuple(total.collectives),
        )
        self.costs[computation.name] = body
        work = [opcode for opcode in computation.opcodes if opcode not in STRUCTURE]
        name = canonical_name(work[0]) if len(work) == 1 else "custom" if work else ""
        reads_first = not needs or needs[0] > 0
        self.program.bodies[computation.name] = Body(body.flops, body.transcendentals, name, reads_first)

    def callee(self, computation: Computation, index: int) -> BodyCost:
        """The cost of the computation a fusion or call names. Raises ``FormatError`` where it names none."""
        key = "to_apply" if "to_apply" in computation.attributes[index] else "calls"
        return self.costs.get(self.program.callee(computation, index, key).name, _EMPTY)

    def _inner_needs(self, computation: Computation, index: int) -> tuple[float, ...]:
        return self.callee(computation, index).needs

    def _add_instruction(self, total: _Total, computation: Computation, index: int) -> None:
        opcode = computation.opcodes[index]
        if base_opcode(opcode)[1] in {"-done", "-update"}:
            return
        if opcode in _CALLERS:
            total.add_body(self.callee(computation, index))
        elif opcode == "while":
            total.add_body(self._loop(computation, index))
        elif opcode == "conditional":
            branches = [self.costs.get(name, _EMPTY) for name in branch_names(computation, index)]
            total.add_body(max(branches, key=lambda body: body.about_ns, default=_EMPTY))
        else:
            self._add_operation(total, computation, index)

    def _add_operation(self, total: _Total, computation: Computation, index: int) -> None:
        cost = self.program.cost(computation, index, in_place=True)
        total.add(cost)
        total.moved_bytes += cost.bytes_read + cost.bytes_written
        total.about_ns += branch_ns(cost)
        if isnan(cost.flops):
            total.unknown[computation, index] = None
        if cost.op_class is OpClass.COLLECTIVE:
            total.collectives.append((computation, index))
        elif cost.contractions:
            total.contraction_class = total.contraction_class or cost.op_class

    def _loop(self, computation: Computation, index: int) -> BodyCost:
        condition = self.program.callee(computation, index, "condition")
        body = self.program.callee(computation, index, "body")
        trips = loop_trips(self.program.module, computation, index, condition, body).count
        return _scaled(self.costs.get(body.name, _EMPTY), trips)
