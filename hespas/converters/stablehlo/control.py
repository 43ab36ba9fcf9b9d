"""Loops and branches: regions with trips, carried edges, and the branch that counts.

A ``while`` is one region: a trip is its condition, then its body, whose nodes wait for the predicate; the
evaluation of the condition that ends the loop is left out. Unknown trips are NaN with a diagnostic. Of a
``case`` or ``if`` the costliest branch counts once and the others not at all, by about how long it takes on
an accelerator (:func:`~hespas.converters.costs.branch_ns`); unknown costs count as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from hespas.converters.costs import FREE, branch_ns
from hespas.converters.stablehlo.exchange import Collective, Message
from hespas.converters.stablehlo.lifetimes import CONSTANTS
from hespas.converters.stablehlo.mlir import Block, Operation, defining_op, terminator
from hespas.converters.stablehlo.template import Flow, RegionRow, Template, Value, flatten
from hespas.converters.stablehlo.walker import Handler, Walker
from hespas.graph import RegionKind

__all__ = ["CONTROL"]

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
        exchanged.append(tuple(_kind(shared.exchanges.rows[link.exchange]) for link in links))
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


def _kind(exchange: Collective | Message) -> object:
    if isinstance(exchange, Collective):
        return (exchange.kind, exchange.groups, exchange.operand_bytes)
    return (exchange.kind, exchange.pairs, exchange.comm_bytes)


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


CONTROL: dict[str, Handler] = {
    "stablehlo.while": _while,
    "mhlo.while": _while,
    "stablehlo.case": _branches,
    "mhlo.case": _branches,
    "stablehlo.if": _branches,
    "mhlo.if": _branches,
}
"""Handlers of control flow, passed to each :class:`Walker`."""
