"""Conversion of one function to a template, with one visit of each operation in program order.

Most operations take one path: decode types and attributes, find the signature, add a node. Operations with
regions or special data flow have handlers of their own.

A ``while`` is one region. An iteration is its condition, then its body, whose nodes wait for the predicate;
the final evaluation of the condition is omitted. An unknown trip count is NaN with a diagnostic. The most
expensive branch of a ``case`` or ``if`` counts once and the others not at all. Branches are compared by their
approximate time on an accelerator (:func:`~hespas.costs.operation.branch_ns`), where unknown costs count as
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from typing import NamedTuple, cast

from hespas.converters.stablehlo import OPERAND_TYPES, RESULT_TYPES, UNKNOWN_WORK
from hespas.converters.stablehlo.attributes import CONSTANTS, CostAttributeReader
from hespas.converters.stablehlo.communication import CommunicationReader, ProgramCollective, ProgramMessage
from hespas.converters.stablehlo.mlir import (
    MlirBlock,
    MlirOperation,
    MlirValue,
    defining_op,
    int_of,
    members_of,
    place_of,
    string_in,
    terminator,
    text_of,
)
from hespas.converters.stablehlo.node_rows import LocationTable, SignatureTable
from hespas.converters.stablehlo.sharding import entered_axes, manual_axes
from hespas.converters.stablehlo.template import (
    FlowValue,
    FunctionTemplate,
    TemplateBuilder,
    TemplateRegion,
    TupleFlow,
    flatten,
)
from hespas.converters.stablehlo.trips import TripCounter
from hespas.converters.stablehlo.types import TypeInfo, TypeTable
from hespas.costs.operation import FREE, branch_ns
from hespas.graph import Diagnostics, RegionKind
from hespas.graph.columns import StringTableBuilder
from hespas.graph.errors import FormatError, HespasError

__all__ = ["MAX_REGION_DEPTH", "Handler", "ModuleContext", "Walker"]

MAX_REGION_DEPTH = 100
_RETURNS = frozenset({"stablehlo.return", "func.return", "mhlo.return", "sdy.return", "mpmd.return"})
_CUSTOM_CALLS = frozenset({"stablehlo.custom_call", "mhlo.custom_call"})
_REDUCING = frozenset({"all_reduce", "reduce_scatter", "collective_reduce"})


class ModuleContext(NamedTuple):
    """Objects that the readers of all functions of a module have in common: tables, diagnostics and
    options.
    """

    path: str
    strings: StringTableBuilder
    types: TypeTable
    signatures: SignatureTable
    attributes: CostAttributeReader
    communications: CommunicationReader
    trips: TripCounter
    locations: LocationTable
    diagnostics: Diagnostics
    function_template: Callable[[str], FunctionTemplate]
    is_replay: bool

    def where(self, op: MlirOperation) -> str:
        """Return the position of an operation for messages."""
        source, name = self.locations.describe(op.location)
        return " ".join(part for part in (source, name and f"({name})") if part) or op.name


Handler = Callable[["Walker", MlirOperation, int, int], None]
"""Function ``(walker, operation, region row, depth)`` that adds the nodes of a special operation."""


class Walker:
    """Reader of one function that builds its template. ``environment`` maps each SSA value to its producers
    (a flow, see :mod:`.template`) and its type.
    """

    def __init__(self, context: ModuleContext, template: FunctionTemplate) -> None:
        self.context = context
        self.scope = TemplateBuilder(template)
        self.environment: dict[MlirValue, tuple[FlowValue, TypeInfo]] = {}
        # Bound once, since they are looked up for every operation.
        self._types = context.types.known
        self._plans, self._attributes = context.attributes.plans, context.attributes.read
        self._signatures = context.signatures.known
        self._rows = context.signatures.rows
        self._is_replay = context.is_replay
        self._keeps_locations = context.locations.enabled

    def read(self, block: MlirBlock, *, is_entry: bool = False) -> None:
        """Read the function from its entry block. Arguments beyond the template's number of arguments have no
        producer.

        The return of the program's entry function becomes a node that depends on the results of the program.
        """
        count = self.scope.template.num_arguments
        self.bind(block.arguments, [(-1 - number,) for number in range(count)])
        results = self.scope.template.results = self.block(block, -1, 0)
        returned = terminator(block) if is_entry and results else None
        if returned is not None and returned.name in _RETURNS:
            infos = tuple([self.environment[value][1] for value in returned.operands])
            row = self.context.signatures.priced(returned.name, infos, (), FREE)
            location = self.context.locations.row(returned.location) if self._keeps_locations else 0
            self.scope.add(row, results, -1, location)

    def bind(self, values: Sequence[MlirValue], flows: Sequence[FlowValue]) -> None:
        """Assign flows to values. Values without a flow count as constants."""
        for position, value in enumerate(values):
            flow = flows[position] if position < len(flows) else ()
            self.environment[value] = (flow, self.context.types.get(value.type))

    def block(self, block: MlirBlock, region: int, depth: int) -> list[FlowValue]:
        """Read a block, and return the flows of the values in its terminator."""
        if depth > MAX_REGION_DEPTH:
            raise FormatError(
                f"regions nest more than {MAX_REGION_DEPTH} deep",
                hint="check that the file is intact: no compiler writes such programs",
            )
        handlers, environment = _HANDLERS, self.environment
        for view in block.operations:
            op = view.operation
            name = op.name
            if name in _RETURNS:
                return [environment[value][0] for value in op.operands]
            handler = handlers.get(name)
            try:
                if handler is None:
                    self.plain(op, name, region)
                else:
                    handler(self, op, region, depth)
            except HespasError as error:
                error.position = error.position or place_of(str(op.location))
                raise
        # No return: an operation of an unknown dialect ends the block, and its operands are the results.
        count = len(block.operations)
        return self.flows(block.operations[count - 1].operation) if count else []

    def flow(self, value: MlirValue) -> FlowValue:
        """Return the producers of a value."""
        return self.environment[value][0]

    def flows(self, op: MlirOperation) -> list[FlowValue]:
        """Return the producers of each operand."""
        return [self.environment[value][0] for value in op.operands]

    def called(self, op: MlirOperation, callee: FunctionTemplate, region: int) -> list[FlowValue]:
        """Append the nodes of a function that ``op`` calls, and return the flows of its results."""
        locations = callee.location
        if self._keeps_locations:
            locations = self.context.locations.within(self.context.locations.row(op.location), locations)
        return self.scope.copy(callee, self.flows(op), region, locations)

    def plain(self, op: MlirOperation, name: str, region: int) -> int:
        """Add a node for an operation without regions. The node produces all results of the operation."""
        environment, types = self.environment, self._types
        entries = [environment[value] for value in op.operands]
        results = list(op.results)
        infos = tuple([types[value.type] for value in results])
        canonical, is_described, communicates = self._plans[name]
        attributes = self._attributes(canonical, op) if is_described else None
        flows: tuple[FlowValue, ...] = ()
        operand_infos: tuple[TypeInfo, ...] = ()
        if entries:
            flows, operand_infos = cast(
                "tuple[tuple[FlowValue, ...], tuple[TypeInfo, ...]]", tuple(zip(*entries, strict=True))
            )
        if self._is_replay:
            operand_infos = self._with_stated_types(op, OPERAND_TYPES, operand_infos)
            infos = self._with_stated_types(op, RESULT_TYPES, infos)
        repeated = _repeated(entries) if len(entries) > 1 else ()
        if self._is_replay and UNKNOWN_WORK in op.attributes:
            row = self.context.signatures.unknown(text_of(op, UNKNOWN_WORK), operand_infos, infos)
        else:
            row = self._signatures[name, operand_infos, infos, repeated, attributes]
        node = self.add(row, flows, region, op)
        made = (node,)
        for value, info in zip(results, infos, strict=True):
            environment[value] = (made, info)
        if communicates:
            context = self.context
            reduction = "add" if canonical == "cross-replica-sum" else ""
            if canonical in _REDUCING and len(op.regions):
                reduction = context.attributes.body(op.regions[0]).name
            communication = context.communications.row(canonical, op, operand_infos, infos, reduction)
            self.scope.template.links.append((node, communication))
        return node

    def _with_stated_types(
        self, op: MlirOperation, attribute: str, infos: tuple[TypeInfo, ...]
    ) -> tuple[TypeInfo, ...]:
        """Return the types of operands or results of a replayed operation, with the quantised types that one
        of its attributes states.
        """
        stated = [string_in(text) for text in members_of(op, attribute)]
        if len(stated) != len(infos):
            return infos
        return tuple(map(self.context.types.quantised, infos, stated))

    def add(self, row: int, inputs: Sequence[FlowValue], region: int, op: MlirOperation) -> int:
        """Append a node; report it if its cost is unknown."""
        location = self.context.locations.row(op.location) if self._keeps_locations else 0
        node = self.scope.add(row, inputs, region, location)
        if self._rows[row].needs_report:
            self._report(op, row)
            if len(op.regions) and not self._rows[row].has_rule:
                outer: dict[MlirValue, FlowValue] = {}
                advance: object = self.context.attributes.advance

                def visit(inner: MlirOperation) -> object:
                    captured = [value for value in inner.operands if value in self.environment]
                    outer.update((value, self.environment[value][0]) for value in captured)
                    return advance

                op.walk(visit)
                self.scope.widen(node, list(outer.values()))
        return node

    def _report(self, op: MlirOperation, row: int) -> None:
        """Report why the costs of an operation are unknown or upper bounds."""
        from hespas.costs.custom_calls import is_known_target

        context, signature = self.context, self.context.signatures.rows[row]
        where = context.where(op)
        if signature.is_bounded:
            message = f"{op.name}: shapes are bounds; its cost is an upper bound"
            context.diagnostics.warning("stablehlo.bounded-shape", where, message, path=context.path)
        if signature.cost.is_known:
            return
        if self._is_replay and UNKNOWN_WORK in op.attributes:
            name = signature.label or "an operation"
            message = f"{name}: the FLOPs are unknown in the graph that this replay was written from"
            context.diagnostics.warning("stablehlo.unknown-cost", where, message, path=context.path)
            return
        target = text_of(op, "call_target_name") if op.name in _CUSTOM_CALLS else ""
        if not signature.has_rule:
            code, message = "stablehlo.unknown-op", f"{op.name} is not in the cost table"
        elif signature.is_dynamic:
            code, message = (
                "stablehlo.dynamic-shape",
                f"{op.name} has extents known at run time only (bind them with `dims`)",
            )
        elif target and not is_known_target(target):
            code, message = "stablehlo.unknown-custom-call", f"custom call @{target} has no cost rule"
        else:
            code, message = (
                "stablehlo.unknown-cost",
                f"{target or op.name}: its attributes do not determine its cost",
            )
        message += "; its FLOPs are unknown, the bytes of operands and results are a lower bound"
        context.diagnostics.warning(code, where, message, path=context.path)

    def visit_barrier(self, op: MlirOperation, region: int, depth: int) -> None:
        """Bind each result of an optimization barrier to the producers of its operand. A dependency of all
        results on all operands would join independent chains.
        """
        del depth
        entries = [self.environment[value] for value in op.operands]
        self.plain(op, op.name, region)
        for value, entry in zip(op.results, entries, strict=False):
            self.environment[value] = entry

    def visit_tuple(self, op: MlirOperation, region: int, depth: int) -> None:
        """Represent a tuple by the flows of its operands."""
        del depth
        flows = self.flows(op)
        self.plain(op, op.name, region)
        info = self.environment[op.results[0]][1]
        self.environment[op.results[0]] = (TupleFlow(tuple(flows)), info)

    def visit_get_tuple_element(self, op: MlirOperation, region: int, depth: int) -> None:
        """Pass on the flow of one element of a tuple."""
        del depth
        packed, info = self.environment[op.operands[0]]
        index = int_of(op, "index")
        result_info = self.context.types.get(op.results[0].type)
        element: FlowValue = packed
        if isinstance(packed, TupleFlow) and index < len(packed.elements):
            element = packed.elements[index]
        row = self.context.signatures.plain(op.name, (info,), (result_info,))
        node = self.add(row, [element], region, op)
        flow: FlowValue = element if isinstance(element, TupleFlow) else (node,)
        self.environment[op.results[0]] = (flow, result_info)

    def visit_call(self, op: MlirOperation, region: int, depth: int) -> None:
        """Inline the nodes of a called function, in a region with manual axes if it is called on shards."""
        del depth
        callee = self.context.function_template(text_of(op, "callee"))
        manual = entered_axes(op)
        if manual:
            row = TemplateRegion(RegionKind.MANUAL, region, 1.0, "manual_computation", manual=manual)
            region = self.scope.open_region(row)
        self.bind(op.results, self.called(op, callee, region))

    def visit_composite(self, op: MlirOperation, region: int, depth: int) -> None:
        """Inline the decomposition of a composite, in a region with the composite's name."""
        del depth
        row = self.scope.open_region(TemplateRegion(RegionKind.COMPOSITE, region, 1.0, text_of(op, "name")))
        callee = self.context.function_template(text_of(op, "decomposition"))
        self.bind(op.results, self.called(op, callee, row))

    def visit_region(self, op: MlirOperation, region: int, depth: int, kind: RegionKind, label: str) -> None:
        """Inline the only region of an operation, such as a manual computation, a named scope or an
        asynchronous computation.
        """
        manual = manual_axes(op) if kind is RegionKind.MANUAL else frozenset[str]()
        named = TemplateRegion(kind, region, 1.0, text_of(op, "name") or label, manual=manual)
        row = self.scope.open_region(named)
        callee = text_of(op, "called_computation")
        if callee:
            yielded = self.called(op, self.context.function_template(callee), row)
        else:
            block = op.regions[0].blocks[0]
            self.bind(block.arguments, self.flows(op))
            yielded = self.block(block, row, depth + 1)
        if len(op.results) == 1 and len(yielded) > 1:
            yielded = [TupleFlow(tuple(yielded))]
        self.bind(op.results, yielded)

    def visit_fusion(self, op: MlirOperation, region: int, depth: int) -> None:
        """Add one node for a fusion. It has the FLOPs of the body, and the bytes of the fusion's operands and
        results. A matmul in the body determines the arithmetic rate.
        """
        total = self.context.attributes.executed(op, depth)
        entries = [self.environment[value] for value in op.operands]
        distinct = {value: self.environment[value][1] for value in op.operands}.values()
        infos = tuple(self.context.types.get(value.type) for value in op.results)
        read = sum(tensor.bytes for info in distinct for tensor in info.tensors)
        written = sum(tensor.bytes for info in infos for tensor in info.tensors)
        total = replace(total, bytes_read=read, bytes_written=written)
        row = self.context.signatures.priced(op.name, tuple(entry[1] for entry in entries), infos, total)
        node = self.add(row, [entry[0] for entry in entries], region, op)
        self.bind(op.results, [(node,)] * len(infos))

    def visit_while(self, op: MlirOperation, region: int, depth: int) -> None:
        """Add a loop as one region with condition, body and loop-carried values.

        A carried edge spans one iteration. The body may pass on a value without computing it, from another
        loop-carried value or from outside of the loop. Such a value gets a zero-cost node, so that its edge
        also spans one iteration.
        """
        context, scope = self.context, self.scope
        initial = self.flows(op)
        header = self.plain(op, op.name, region)
        trips = context.trips.trips(op)
        if isnan(trips):
            context.diagnostics.warning(
                "stablehlo.unknown-trips",
                context.where(op),
                "the trip count depends on data; the loop's total cost is unknown",
                path=context.path,
            )
        row = scope.open_region(TemplateRegion(RegionKind.LOOP_BODY, region, trips, "while", header))
        condition, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
        slots = scope.new_slots(initial, row)
        first = len(scope.template)
        self.bind(condition.arguments, slots)
        predicate = self.block(condition, row, depth + 1)
        first_of_body = len(scope.template)
        self.bind(body.arguments, slots)
        yielded = self.block(body, row, depth + 1)
        handed_on = scope.handed_on(slots, yielded, first)
        carried = list(yielded)
        body_return = terminator(body)
        for position in handed_on:
            carried_types = (
                (context.types.get(body_return.operands[position].type),) if body_return is not None else ()
            )
            signature = context.signatures.priced(
                "stablehlo.while", carried_types, carried_types, FREE, label="carried"
            )
            carried[position] = (scope.add(signature, [yielded[position]], row),)
        returned = terminator(condition)
        maker = defining_op(returned.operands[0]) if returned is not None else None
        if maker is None or maker.name not in CONSTANTS:  # a constant predicate never delays the body
            scope.guard(first_of_body, predicate[0])
        results = scope.close_loop(slots, carried, first)
        self.bind(op.results, initial if trips == 0 else results)

    def visit_branches(self, op: MlirOperation, region: int, depth: int) -> None:
        """Add the branches as regions. The most expensive one runs once, the others never."""
        context, scope = self.context, self.scope
        header = self.plain(op, op.name, region)
        rows: list[int] = []
        yields: list[list[FlowValue]] = []
        times: list[float] = []
        exchanged: list[tuple[object, ...]] = []
        for number, branch in enumerate(op.regions):
            first, first_link = len(scope.template), len(scope.template.links)
            row = scope.open_region(TemplateRegion(RegionKind.BRANCH, region, 1.0, "case", header, number))
            yields.append(self.block(branch.blocks[0], row, depth + 1))
            scope.guard(first, (header,))
            rows.append(row)
            template, signatures = scope.template, context.signatures.rows
            factors = {row: 1.0}  # executions of each inner region per execution; unknown trips count once
            for inner in range(row + 1, len(template.regions)):
                entry = template.regions[inner]
                factors[inner] = factors.get(entry.parent, 1.0) * (1.0 if isnan(entry.trips) else entry.trips)
            times.append(
                sum(
                    factors[template.region[node]] * branch_ns(signatures[template.signature[node]].cost)
                    for node in range(first, len(template))
                )
            )
            links = scope.template.links[first_link:]
            exchanged.append(tuple(_communication_key(context.communications.rows[row]) for _, row in links))
        chosen = times.index(max(times))
        for number, row in enumerate(rows):
            scope.set_trips(row, 1.0 if number == chosen else 0.0)
        if len(rows) > 1:
            _report_branches(context, op, chosen, exchanged)
        flows: list[FlowValue] = []
        for value in yields[chosen][: len(op.results)]:
            flow = flatten(value)
            if max(flow, default=-1) <= header:  # the branch does not compute the value itself
                flow = (*flow, header)
            if len(flow) > _MAX_PRODUCERS:
                join = context.signatures.priced("stablehlo.case", (), (), FREE, label="join")
                flow = (scope.add(join, [flow], region),)
            flows.append(flow)
        self.bind(op.results, flows)


def _repeated(entries: Sequence[tuple[FlowValue, TypeInfo]]) -> tuple[int, ...]:
    """Return the positions of operands that repeat an earlier operand (the identical entry object)."""
    if len(entries) == 2:
        return (1,) if entries[0] is entries[1] else ()
    identities = list(map(id, entries))
    if len(set(identities)) == len(identities):
        return ()
    return tuple(
        position for position, identity in enumerate(identities) if identities.index(identity) < position
    )


_MAX_PRODUCERS = 32


def _report_branches(
    context: ModuleContext, op: MlirOperation, chosen: int, exchanged: Sequence[tuple[object, ...]]
) -> None:
    """Report the branch that counts, and branches that communicate differently, which would make devices
    hang.
    """
    position = context.where(op)
    message = f"{op.name}: counts only the most expensive of {len(exchanged)} branches, number {chosen}"
    context.diagnostics.warning("stablehlo.branch-chosen", position, message, path=context.path)
    if len(set(exchanged)) > 1:
        message = (
            f"{op.name}: branches communicate differently; devices that take different branches would hang"
        )
        context.diagnostics.warning("stablehlo.branch-collectives", position, message, path=context.path)


def _communication_key(communication: ProgramCollective | ProgramMessage) -> object:
    if isinstance(communication, ProgramCollective):
        return (communication.kind, communication.groups, communication.operand_bytes)
    return (communication.kind, communication.pairs, communication.comm_bytes)


_DIALECT_HANDLERS: dict[str, Handler] = {
    "optimization_barrier": Walker.visit_barrier,
    "tuple": Walker.visit_tuple,
    "get_tuple_element": Walker.visit_get_tuple_element,
    "composite": Walker.visit_composite,
    "async_start": partial(Walker.visit_region, kind=RegionKind.ASYNC, label="async"),
    "while": Walker.visit_while,
    "case": Walker.visit_branches,
    "if": Walker.visit_branches,
}
_HANDLERS: dict[str, Handler] = {
    "func.call": Walker.visit_call,
    "mhlo.fusion": Walker.visit_fusion,
    "sdy.manual_computation": partial(
        Walker.visit_region, kind=RegionKind.MANUAL, label="manual_computation"
    ),
    "sdy.named_computation": partial(
        Walker.visit_region, kind=RegionKind.COMPOSITE, label="named_computation"
    ),
    **{
        f"{dialect}.{name}": handler
        for dialect in ("stablehlo", "mhlo")
        for name, handler in _DIALECT_HANDLERS.items()
    },
}
"""Operations with a handler."""
