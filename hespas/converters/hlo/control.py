"""Loops, conditionals, calls and asynchronous computations: bodies written out in regions, then one node
each.

The node of a ``while``, ``conditional`` or ``call`` costs nothing: it stands for the end of what it called,
under the name that profiles show.
"""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

from hespas.converters.costs import Cost
from hespas.converters.hlo.bodies import BodyCost, branch_names
from hespas.converters.hlo.frames import Frame, Gate, Value
from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.trips import Trips, loop_trips
from hespas.graph import OpClass, RegionKind, Resource, Severity

if TYPE_CHECKING:
    from hespas.converters.hlo.lower import Lowering

__all__ = ["Control"]

_CONTROL = Cost(OpClass.CONTROL)
_NO_BODY = BodyCost()
_HOST_THREAD = "host"


class Control:
    """The control flow part of a :class:`~hespas.converters.hlo.lower.Lowering`."""

    def __init__(self, lowering: Lowering) -> None:
        """Work for one lowering."""
        self.lowering = lowering
        self.program = lowering.program
        self.findings = lowering.findings
        self.builder = lowering.emitter.builder

    def _open(self, frame: Frame, kind: RegionKind, trips: float, label: str) -> int:
        return self.builder.add_region(kind, parent=frame.region, trips=trips, label=label)

    def _enclosed(self, frame: Frame, callee: Computation, region: int, operands: tuple[int, ...]) -> Frame:
        """Write ``callee`` out in a region; readers of the state of a loop further out go to ``frame``."""
        arguments = tuple([frame.value(operand) for operand in operands])
        reads_state = self.lowering.reads_state
        state = frozenset(place for place, operand in enumerate(operands) if reads_state(frame, operand))
        inner = self.lowering.write(Frame(callee, region, frame.depth + 1, arguments, state))
        frame.readers.extend(inner.readers)
        return inner

    def _part(self, frame: Frame, part: Computation, region: int, operand: int) -> Frame:
        """Write a loop's condition or body out, keeping which node reads which element of the state."""
        arguments = (frame.value(operand),)
        return self.lowering.write(Frame(part, region, frame.depth + 1, arguments, frozenset({0})))

    def _gate(self, frame: Frame, index: int, node: int, outer: Gate | None) -> Gate | None:
        """The gate that the decision made by instruction ``index`` puts before the nodes to come: none inside
        ``outer`` where it is a constant.
        """
        is_constant = frame.computation.opcodes[index] == "constant"
        return outer if is_constant else Gate(node, len(self.builder), outer)

    def call(self, frame: Frame, index: int) -> None:
        """``call``: the callee in place, then a node that ends it."""
        key = "to_apply" if "to_apply" in frame.computation.attributes[index] else "calls"
        callee = self.program.callee(frame.computation, index, key)
        region = self._open(frame, RegionKind.CALL, 1.0, callee.name)
        inner = self._enclosed(frame, callee, region, frame.computation.operands[index])
        result = inner.value(callee.root)
        deps = [result.node, *self.lowering.operand_nodes(frame, index)]
        self.lowering.add(frame, index, _CONTROL, deps=list(dict.fromkeys(deps)))
        self.lowering.bind(frame, index, result)

    def loop(self, frame: Frame, index: int) -> None:
        """``while``: one region with the condition and then the body, how often they run, and what a trip
        hands to the next. The evaluation of the condition that ends the loop is left out.
        """
        computation = frame.computation
        if len(computation.operands[index]) != 1:
            raise self.program.error(computation, index, "expected one operand, the loop state")
        condition = self.program.callee(computation, index, "condition")
        body = self.program.callee(computation, index, "body")
        trips = loop_trips(self.program.module, computation, index, condition, body)
        self._report_trips((computation, index), trips)
        operands = computation.operands[index]
        region = self._open(frame, RegionKind.LOOP_BODY, trips.count, body.name)
        first = len(self.builder)
        asked = self._part(frame, condition, region, operands[0])
        test = asked.value(condition.root)
        outer = self.lowering.gate
        self.lowering.gate = gate = self._gate(asked, condition.root, test.node, outer)
        inner = self._part(frame, body, region, operands[0])
        self.lowering.gate = outer
        readers = [*asked.readers, *inner.readers]
        if gate is not None and gate is not outer and self.lowering.reads_state(asked, condition.root):
            readers += [(-1, node) for node in gate.waiting]
        if self.lowering.reads_state(frame, operands[0]):
            frame.readers.extend(readers)
        result = inner.value(body.root)
        self._carry(region, first, readers, result)
        if trips.count == 0:
            result = frame.value(operands[0])
        deps = [result.node, test.node, *self.lowering.operand_nodes(frame, index)]
        self.lowering.add(frame, index, _CONTROL, deps=list(dict.fromkeys(deps)))
        self.lowering.bind(frame, index, result)

    def _carry(self, region: int, first: int, readers: list[tuple[int, int]], result: Value) -> None:
        """Edges from what a trip makes to what the next one reads; an element handed on unchanged has
        none.
        """
        handed_on = set(readers)
        edges: dict[tuple[int, int], None] = {}
        for element, reader in readers:
            maker = result.node if element < 0 else result.part(element).node
            if maker >= first and (element, maker) not in handed_on:
                edges[maker, reader] = None
        for maker, reader in edges:
            self.builder.add_carried(region, maker, reader)

    def _report_trips(self, place: tuple[Computation, int], trips: Trips) -> None:
        if isnan(trips.count):
            message = "trip count known at run time only"
            self.findings.add("hlo.unknown-trips", "", place, message)
        elif not trips.stated:
            message = "trip count inferred from condition and body"
            self.findings.add("hlo.inferred-trips", "", place, message, Severity.INFO)

    def conditional(self, frame: Frame, index: int) -> None:
        """``conditional``: all branches, of which the costliest runs once and the others never; only what it
        makes is waited for.
        """
        computation = frame.computation
        known = self.program.module.computations
        branches = [known[name] for name in branch_names(computation, index)]
        operands = computation.operands[index]
        if not branches or len(operands) != len(branches) + 1:
            raise self.program.error(
                computation, index, "expected a predicate and one operand for each branch"
            )
        bodies = [self.lowering.bodies.costs.get(branch.name, _NO_BODY) for branch in branches]
        kept = max(range(len(branches)), key=lambda place: bodies[place].about_ns)
        self._report_branches((computation, index), branches[kept], bodies)
        outer = self.lowering.gate
        deps = [frame.nodes[operands[0]]]
        for place, branch in enumerate(branches):
            region = self._open(frame, RegionKind.BRANCH, float(place == kept), branch.name)
            self.lowering.gate = self._gate(frame, operands[0], deps[0], outer)
            inner = self._enclosed(frame, branch, region, operands[place + 1 : place + 2])
            if place == kept:
                deps.append(inner.nodes[branch.root])
        self.lowering.gate = outer
        self.lowering.add(frame, index, _CONTROL, deps=list(dict.fromkeys(deps)))

    def _report_branches(
        self, place: tuple[Computation, int], kept: Computation, bodies: list[BodyCost]
    ) -> None:
        message = f"of {len(bodies)} branches the costliest, %{kept.name}, is taken to run"
        self.findings.add("hlo.assumed-branch", f"%{place[0].names[place[1]]}", place, message)
        spoken = {tuple(inner.opcodes[at] for inner, at in body.collectives) for body in bodies}
        if len(spoken) > 1:
            message = "branches differ in their collectives: ranks that branch differently would hang"
            self.findings.add("hlo.branch-collectives", "", place, message)

    def async_start(self, frame: Frame, index: int) -> None:
        """A start that names a computation of several operations: they are written out behind it."""
        computation = frame.computation
        attributes = computation.attributes[index]
        key = "calls" if "calls" in attributes else "to_apply"
        callee = self.program.callee(computation, index, key)
        node = self.lowering.add(frame, index, _CONTROL)
        region = self._open(frame, RegionKind.ASYNC, 1.0, callee.name)
        first = len(self.builder)
        arguments = tuple([Value(node)] * len(computation.operands[index]))
        inner = self.lowering.write(Frame(callee, region, frame.depth + 1, arguments))
        if callee.thread == _HOST_THREAD:
            for made in range(first, len(self.builder)):
                self.builder.set(made, resource=int(Resource.HOST))
        frame.async_results[index] = inner.nodes[callee.root]
