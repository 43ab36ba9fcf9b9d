"""Reads the operations of one function into a template: one visit each, in program order.

Operations without regions or special data flow take one path: types, attributes, signature, node. The others
have handlers: structure, then control flow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan
from typing import TYPE_CHECKING, NamedTuple, cast

from hespas.converters.stablehlo import UNKNOWN_WORK
from hespas.converters.stablehlo.attributes import AttributeReader
from hespas.converters.stablehlo.communication import (
    Collective,
    CommunicationReader,
    Message,
    entered_axes,
    manual_axes,
)
from hespas.converters.stablehlo.dataflow import CONSTANTS, TripCounter
from hespas.converters.stablehlo.mlir import (
    Block,
    Operation,
    defining_op,
    int_of,
    place_of,
    terminator,
    text_of,
)
from hespas.converters.stablehlo.mlir import Value as SsaValue
from hespas.converters.stablehlo.template import Flow, RegionRow, Scope, Template, TupleFlow, Value, flatten
from hespas.converters.stablehlo.types import Locations, Signatures, TypeInfo, TypeTable
from hespas.costs.operation import FREE, branch_ns
from hespas.graph import Diagnostics, RegionKind
from hespas.graph.columns import StringTableBuilder
from hespas.graph.errors import FormatError, HespasError

if TYPE_CHECKING:
    from hespas.converters.stablehlo.module import FunctionLibrary

__all__ = ["MAX_REGION_DEPTH", "Handler", "Shared", "Walker"]

MAX_REGION_DEPTH = 100
_RETURNS = frozenset({"stablehlo.return", "func.return", "mhlo.return", "sdy.return", "mpmd.return"})
_CUSTOM_CALLS = frozenset({"stablehlo.custom_call", "mhlo.custom_call"})
_REDUCING = frozenset({"all_reduce", "reduce_scatter", "collective_reduce"})


class Shared(NamedTuple):
    """What the functions of one module share while they are read."""

    path: str
    strings: StringTableBuilder
    types: TypeTable
    signatures: Signatures
    attributes: AttributeReader
    communications: CommunicationReader
    trips: TripCounter
    locations: Locations
    diagnostics: Diagnostics
    library: FunctionLibrary
    is_replay: bool

    def where(self, op: Operation) -> str:
        """An operation's position for people."""
        source, name = self.locations.describe(op.location)
        return " ".join(part for part in (source, name and f"({name})") if part) or op.name


Handler = Callable[["Walker", Operation, int, int], None]
"""``(walker, operation, region row, depth)``: adds the nodes of an operation that has a way of its own."""


class Walker:
    """Reads one function. ``environment`` maps each SSA value to its flow and type."""

    def __init__(self, shared: Shared, template: Template) -> None:
        self.shared = shared
        self.scope = Scope(template)
        self.environment: dict[SsaValue, tuple[Value, TypeInfo]] = {}
        # Bound once: these are looked up for every operation.
        self._types = shared.types.known
        self._plans, self._attributes = shared.attributes.plans, shared.attributes.read
        self._signatures = shared.signatures.known
        self._rows = shared.signatures.rows
        self._is_replay = shared.is_replay
        self._keeps_locations = shared.locations.enabled

    def read(self, block: Block, *, is_entry: bool = False) -> None:
        """Read the entry block of the function. Arguments the template does not count depend on nothing.

        The return of the program's entry is a node: a use of what leaves the program.
        """
        count = self.scope.template.num_arguments
        self.bind(block.arguments, [(-1 - place,) for place in range(count)])
        results = self.scope.template.results = self.block(block, -1, 0)
        returned = terminator(block) if is_entry and results else None
        if returned is not None and returned.name in _RETURNS:
            infos = tuple([self.environment[value][1] for value in returned.operands])
            row = self.shared.signatures.priced(returned.name, infos, (), FREE)
            location = self.shared.locations.row(returned.location) if self._keeps_locations else 0
            self.scope.add(row, results, -1, location)

    def bind(self, values: Sequence[SsaValue], flows: Sequence[Value]) -> None:
        """Give values their flows; missing ones are constants."""
        for place, value in enumerate(values):
            flow = flows[place] if place < len(flows) else ()
            self.environment[value] = (flow, self.shared.types.get(value.type))

    def block(self, block: Block, region: int, depth: int) -> list[Value]:
        """Read a block; returns the flows of what its terminator returns."""
        if depth > MAX_REGION_DEPTH:
            raise FormatError(
                f"regions nest more than {MAX_REGION_DEPTH} deep",
                hint="no compiler writes such programs; is the file damaged?",
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
        # No return: an operation of an unknown dialect ends the block, and hands on what it is given.
        count = len(block.operations)
        return self.flows(block.operations[count - 1].operation) if count else []

    def flow(self, value: SsaValue) -> Value:
        """The flow of a value."""
        return self.environment[value][0]

    def flows(self, op: Operation) -> list[Value]:
        """The flows of an operation's operands."""
        return [self.environment[value][0] for value in op.operands]

    def called(self, op: Operation, callee: Template, region: int) -> list[Value]:
        """Append what a function does, called by ``op``, and return the flows of its results."""
        locations = callee.location
        if self._keeps_locations:
            locations = self.shared.locations.within(self.shared.locations.row(op.location), locations)
        return self.scope.copy(callee, self.flows(op), region, locations)

    def plain(self, op: Operation, name: str, region: int) -> int:
        """Add the node of an operation whose results all come from it."""
        environment, types = self.environment, self._types
        entries = [environment[value] for value in op.operands]
        results = list(op.results)
        infos = tuple([types[value.type] for value in results])
        canonical, is_described, communicates = self._plans[name]
        attributes = self._attributes(canonical, op) if is_described else None
        flows, operand_infos = _unzipped(entries)
        repeated = _repeated(entries) if len(entries) > 1 else ()
        if self._is_replay and UNKNOWN_WORK in op.attributes:
            row = self.shared.signatures.unknown(text_of(op, UNKNOWN_WORK), operand_infos, infos)
        else:
            row = self._signatures[name, operand_infos, infos, repeated, attributes]
        node = self.add(row, flows, region, op)
        made = (node,)
        for value, info in zip(results, infos, strict=True):
            environment[value] = (made, info)
        if communicates:
            self._link(node, canonical, op, operand_infos, infos)
        return node

    def add(self, row: int, inputs: Sequence[Value], region: int, op: Operation) -> int:
        """Append a node and report where its cost is not known."""
        location = self.shared.locations.row(op.location) if self._keeps_locations else 0
        node = self.scope.add(row, inputs, region, location)
        if self._rows[row].needs_report:
            self._report(op, row)
            if len(op.regions) and not self._rows[row].has_rule:
                self.scope.widen(node, self._captured(op))
        return node

    def _captured(self, op: Operation) -> list[Value]:
        """Flows of what stands outside an operation and is used in its regions, which nobody else reads."""
        found: dict[SsaValue, Value] = {}
        advance: object = self.shared.attributes.advance

        def visit(inner: Operation) -> object:
            known = [value for value in inner.operands if value in self.environment]
            found.update((value, self.environment[value][0]) for value in known)
            return advance

        op.walk(visit)
        return list(found.values())

    def _link(
        self,
        node: int,
        canonical: str,
        op: Operation,
        operands: tuple[TypeInfo, ...],
        results: tuple[TypeInfo, ...],
    ) -> None:
        """Note that a node talks to other devices."""
        shared = self.shared
        reduction = "add" if canonical == "cross-replica-sum" else ""
        if canonical in _REDUCING and len(op.regions):
            reduction = shared.attributes.body(op.regions[0]).name
        row = shared.communications.row(canonical, op, operands, results, reduction)
        self.scope.template.links.append((node, row))

    def _report(self, op: Operation, row: int) -> None:
        """Say why figures of a signature are unknown or bounds."""
        from hespas.costs.custom_calls import is_known_target

        shared, signature = self.shared, self.shared.signatures.rows[row]
        where = shared.where(op)
        if signature.is_bounded:
            message = f"{op.name}: shapes are bounds; its cost is an upper bound"
            shared.diagnostics.warning("stablehlo.bounded-shape", where, message, path=shared.path)
        if signature.cost.is_known:
            return
        if self._is_replay and UNKNOWN_WORK in op.attributes:
            name = signature.label or "an operation"
            message = f"{name}: the FLOPs are unknown in the graph that this replay was written from"
            shared.diagnostics.warning("stablehlo.unknown-cost", where, message, path=shared.path)
            return
        target = text_of(op, "call_target_name") if op.name in _CUSTOM_CALLS else ""
        if not signature.has_rule:
            code, message = "stablehlo.unknown-op", f"{op.name} is not in the cost table"
        elif signature.is_dynamic:
            code, message = (
                "stablehlo.dynamic-shape",
                f"{op.name} has extents known at run time only (`dims` states them)",
            )
        elif target and not is_known_target(target):
            code, message = "stablehlo.unknown-custom-call", f"custom call @{target} has no cost rule"
        else:
            code, message = (
                "stablehlo.unknown-cost",
                f"{target or op.name}: attributes do not say what it costs",
            )
        message += "; its FLOPs are unknown, bytes of operands and results stand as a lower bound"
        shared.diagnostics.warning(code, where, message, path=shared.path)


def _unzipped(entries: Sequence[tuple[Value, TypeInfo]]) -> tuple[tuple[Value, ...], tuple[TypeInfo, ...]]:
    if not entries:
        return (), ()
    return cast("tuple[tuple[Value, ...], tuple[TypeInfo, ...]]", tuple(zip(*entries, strict=True)))


def _repeated(entries: Sequence[tuple[Value, TypeInfo]]) -> tuple[int, ...]:
    """Places of operands that repeat an earlier one: a value has one entry, so they are the same object."""
    if len(entries) == 2:
        return (1,) if entries[0] is entries[1] else ()
    identities = list(map(id, entries))
    if len(set(identities)) == len(identities):
        return ()
    return tuple(place for place, each in enumerate(identities) if identities.index(each) < place)


def _barrier(walker: Walker, op: Operation, region: int, depth: int) -> None:
    """Results are the operands one by one: waiting for all of them would join independent chains."""
    del depth
    entries = [walker.environment[value] for value in op.operands]
    walker.plain(op, op.name, region)
    for value, entry in zip(op.results, entries, strict=False):
        walker.environment[value] = entry


def _tuple(walker: Walker, op: Operation, region: int, depth: int) -> None:
    del depth
    flows = walker.flows(op)
    walker.plain(op, op.name, region)
    info = walker.environment[op.results[0]][1]
    walker.environment[op.results[0]] = (TupleFlow(tuple(flows)), info)


def _get_tuple_element(walker: Walker, op: Operation, region: int, depth: int) -> None:
    del depth
    packed, info = walker.environment[op.operands[0]]
    index = int_of(op, "index")
    result_info = walker.shared.types.get(op.results[0].type)
    element: Value = packed
    if isinstance(packed, TupleFlow) and index < len(packed.elements):
        element = packed.elements[index]
    row = walker.shared.signatures.plain(op.name, (info,), (result_info,))
    node = walker.add(row, [element], region, op)
    flow: Value = element if isinstance(element, TupleFlow) else (node,)
    walker.environment[op.results[0]] = (flow, result_info)


def _call(walker: Walker, op: Operation, region: int, depth: int) -> None:
    """What a function does, in its place; called on shards, in a region that is manual."""
    del depth
    callee = walker.shared.library.template(text_of(op, "callee"))
    manual = entered_axes(op)
    if manual:
        row = RegionRow(RegionKind.MANUAL, region, 1.0, "manual_computation", manual=manual)
        region = walker.scope.open_region(row)
    walker.bind(op.results, walker.called(op, callee, region))


def _composite(walker: Walker, op: Operation, region: int, depth: int) -> None:
    """The decomposition, in a region that bears the composite's name."""
    del depth
    row = walker.scope.open_region(RegionRow(RegionKind.COMPOSITE, region, 1.0, text_of(op, "name")))
    callee = walker.shared.library.template(text_of(op, "decomposition"))
    walker.bind(op.results, walker.called(op, callee, row))


def _inline_region(kind: RegionKind, label: str) -> Handler:
    """An operation whose only region runs in its place: per-device, named and asynchronous parts."""

    def handler(walker: Walker, op: Operation, region: int, depth: int) -> None:
        manual = manual_axes(op) if kind is RegionKind.MANUAL else frozenset[str]()
        named = RegionRow(kind, region, 1.0, text_of(op, "name") or label, manual=manual)
        row = walker.scope.open_region(named)
        callee = text_of(op, "called_computation")
        if callee:
            yielded = walker.called(op, walker.shared.library.template(callee), row)
        else:
            block = op.regions[0].blocks[0]
            walker.bind(block.arguments, walker.flows(op))
            yielded = walker.block(block, row, depth + 1)
        if len(op.results) == 1 and len(yielded) > 1:
            yielded = [TupleFlow(tuple(yielded))]
        walker.bind(op.results, yielded)

    return handler


def _fusion(walker: Walker, op: Operation, region: int, depth: int) -> None:
    """One node: the FLOPs of the body, bytes of operands and results, the rate of a contraction inside."""
    total = walker.shared.attributes.executed(op, depth)
    entries = [walker.environment[value] for value in op.operands]
    distinct = {value: walker.environment[value][1] for value in op.operands}.values()
    infos = tuple(walker.shared.types.get(value.type) for value in op.results)
    read = sum(tensor.bytes for info in distinct for tensor in info.tensors)
    written = sum(tensor.bytes for info in infos for tensor in info.tensors)
    total = replace(total, bytes_read=read, bytes_written=written)
    row = walker.shared.signatures.priced(op.name, tuple(entry[1] for entry in entries), infos, total)
    node = walker.add(row, [entry[0] for entry in entries], region, op)
    walker.bind(op.results, [(node,)] * len(infos))


# Loops and branches: regions with trips, carried edges, and the branch that counts.
#
# A ``while`` is one region: a trip is its condition, then its body, whose nodes wait for the predicate; the
# evaluation of the condition that ends the loop is left out. Unknown trips are NaN with a diagnostic. Of a
# ``case`` or ``if`` the costliest branch counts once and the others not at all, by about how long it takes on
# an accelerator (:func:`~hespas.costs.branch_ns`); unknown costs count as nothing.

_MAX_PRODUCERS = 32


def _while(walker: Walker, op: Operation, region: int, depth: int) -> None:
    shared, scope = walker.shared, walker.scope
    initial = walker.flows(op)
    header = walker.plain(op, op.name, region)
    trips = shared.trips.trips(op)
    if isnan(trips):
        shared.diagnostics.warning(
            "stablehlo.unknown-trips",
            shared.where(op),
            "the number of trips depends on data; the loop's total cost is unknown",
            path=shared.path,
        )
    row = scope.open_region(RegionRow(RegionKind.LOOP_BODY, region, trips, "while", header))
    condition, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
    slots = scope.new_slots(initial, row)
    first = len(scope.template)
    walker.bind(condition.arguments, slots)
    predicate = walker.block(condition, row, depth + 1)
    first_of_body = len(scope.template)
    walker.bind(body.arguments, slots)
    yielded = walker.block(body, row, depth + 1)
    handed_on = scope.handed_on(slots, yielded, first)
    yielded = _with_carriers(walker, body, yielded, handed_on, row)
    if not _is_endless(condition):
        scope.guard(first_of_body, predicate[0])
    results = scope.close_loop(slots, yielded, first)
    walker.bind(op.results, initial if trips == 0 else results)


def _with_carriers(
    walker: Walker, body: Block, yielded: Sequence[Value], places: Sequence[int], row: int
) -> list[Value]:
    """What a body yields, with a free node for each value that a trip hands on and does not make.

    A carried edge spans one trip. A value that moves from slot to slot is older by one trip at each move, and
    one from outside the loop arrives in the second: the node stands for that trip.
    """
    found = list(yielded)
    returned = terminator(body)
    for place in places:
        types = (walker.shared.types.get(returned.operands[place].type),) if returned is not None else ()
        signature = walker.shared.signatures.priced("stablehlo.while", types, types, FREE, "carried")
        found[place] = (walker.scope.add(signature, [yielded[place]], row),)
    return found


def _is_endless(condition: Block) -> bool:
    """Whether a condition returns a constant: there is nothing to wait for."""
    returned = terminator(condition)
    maker = defining_op(returned.operands[0]) if returned is not None else None
    return maker is not None and maker.name in CONSTANTS


def _branches(walker: Walker, op: Operation, region: int, depth: int) -> None:
    shared, scope = walker.shared, walker.scope
    header = walker.plain(op, op.name, region)
    rows: list[int] = []
    yields: list[list[Value]] = []
    times: list[float] = []
    exchanged: list[tuple[object, ...]] = []
    for place, branch in enumerate(op.regions):
        first, first_link = len(scope.template), len(scope.template.links)
        row = scope.open_region(RegionRow(RegionKind.BRANCH, region, 1.0, "case", header, place))
        yields.append(walker.block(branch.blocks[0], row, depth + 1))
        scope.guard(first, (header,))
        rows.append(row)
        times.append(_duration_ns(walker, first, row))
        links = scope.template.links[first_link:]
        exchanged.append(tuple(_kind(shared.communications.rows[each]) for _, each in links))
    kept = max(range(len(rows)), key=lambda place: times[place])
    for place, row in enumerate(rows):
        scope.set_trips(row, 1.0 if place == kept else 0.0)
    if len(rows) > 1:
        _tell(walker, op, kept, exchanged)
    made = [_chosen(yields[kept][place], header) for place in range(len(op.results))]
    walker.bind(op.results, [_joined(walker, flow, region) for flow in made])


def _joined(walker: Walker, flow: Flow, region: int) -> Flow:
    """A flow as it is, or behind one free node where branches that hand values on made it long."""
    if len(flow) <= _MAX_PRODUCERS:
        return flow
    row = walker.shared.signatures.priced("stablehlo.case", (), (), FREE, "join")
    return (walker.scope.add(row, [flow], region),)


def _chosen(value: Value, header: int) -> Flow:
    """A value as the branch that counts makes it; where it makes none, it waits for the predicate."""
    flow = flatten(value)
    return flow if max(flow, default=-1) > header else (*flow, header)


def _tell(walker: Walker, op: Operation, kept: int, exchanged: Sequence[tuple[object, ...]]) -> None:
    """Report the choice, and branches that would make devices disagree."""
    shared = walker.shared
    where = shared.where(op)
    message = (
        f"{op.name}: of {len(exchanged)} branches the costliest, number {kept}, counts; the others do not"
    )
    shared.diagnostics.warning("stablehlo.branch-chosen", where, message, path=shared.path)
    if len(set(exchanged)) > 1:
        message = f"{op.name}: branches talk to other devices differently; devices that disagree would hang"
        shared.diagnostics.warning("stablehlo.branch-collectives", where, message, path=shared.path)


def _kind(communication: Collective | Message) -> object:
    if isinstance(communication, Collective):
        return (communication.kind, communication.groups, communication.operand_bytes)
    return (communication.kind, communication.pairs, communication.comm_bytes)


def _duration_ns(walker: Walker, first: int, row: int) -> float:
    """About how long the nodes from ``first`` on take, inner loops multiplied: to compare branches only."""
    template, signatures = walker.scope.template, walker.shared.signatures.rows
    factors = _factors(template, row)
    return sum(
        factors[template.region[node]] * branch_ns(signatures[template.signature[node]].cost)
        for node in range(first, len(template))
    )


def _factors(template: Template, row: int) -> dict[int, float]:
    """Executions of each region inside ``row`` per execution of it; unknown trips count once."""
    factors = {row: 1.0}
    for inner in range(row + 1, len(template.regions)):
        entry = template.regions[inner]
        factors[inner] = factors.get(entry.parent, 1.0) * (1.0 if isnan(entry.trips) else entry.trips)
    return factors


_HANDLERS: dict[str, Handler] = {
    "func.call": _call,
    "mhlo.fusion": _fusion,
    "sdy.manual_computation": _inline_region(RegionKind.MANUAL, "manual_computation"),
    "sdy.named_computation": _inline_region(RegionKind.COMPOSITE, "named_computation"),
    **{
        f"{dialect}.{name}": handler
        for dialect in ("stablehlo", "mhlo")
        for name, handler in {
            "optimization_barrier": _barrier,
            "tuple": _tuple,
            "get_tuple_element": _get_tuple_element,
            "composite": _composite,
            "async_start": _inline_region(RegionKind.ASYNC, "async"),
            "while": _while,
            "case": _branches,
            "if": _branches,
        }.items()
    },
}
"""Operations that have a way of their own."""
