"""The functions of a module as templates: each read once, when it is first called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan

from hespas.converters.stablehlo.bindings import Bindings
from hespas.converters.stablehlo.exchange import Collective, Message
from hespas.converters.stablehlo.lifetimes import CONSTANTS
from hespas.converters.stablehlo.mlir import Block, Operation, defining_op, symbol_of, terminator
from hespas.converters.stablehlo.module import Frame
from hespas.converters.stablehlo.template import Flow, RegionRow, Template, Value, check_size, flatten
from hespas.converters.stablehlo.walker import Handler, Shared, Walker
from hespas.costs import FREE, branch_ns
from hespas.graph import RegionKind
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["FunctionLibrary", "call_sites"]

_MAX_ACTIVE = 20
"""Functions read inside one another before the rest of a chain is read callees first, without nesting."""

_FEW_NODES = 1 << 16
"""A function of more, calls written out, has calls counted before they are written out any further."""

_CALLERS = {
    "func.call": "callee",
    "stablehlo.composite": "decomposition",
    "mhlo.composite": "decomposition",
    "stablehlo.async_start": "called_computation",
    "mhlo.async_start": "called_computation",
}


class FunctionLibrary:
    """Templates of one module. ``shared`` is set once the reader has built it around the library."""

    def __init__(self, frame: Frame, bindings: Bindings, path: str) -> None:
        self.shared: Shared | None = None
        self._frame = frame
        self._bindings = bindings
        self._path = path
        self._templates: dict[str, Template] = {}
        self._active: dict[str, None] = {}
        self._is_counted = False

    def template(self, name: str) -> Template:
        """The template of a function. Raises ``FormatError`` where it has no body or calls itself,
        ``UnsupportedError`` where it has several blocks.
        """
        known = self._templates.get(name)
        if known is not None:
            return known
        if name in self._active:
            raise _cycle(list(self._active), name, self._path)
        if len(self._active) < _MAX_ACTIVE:
            return self._read(name)
        for each in self._callees_first(name):
            if each not in self._templates:
                self._read(each)
        return self._templates[name]

    def _read(self, name: str) -> Template:
        block = self._frame.body(name)
        if block is None or self.shared is None:
            raise FormatError(
                f"@{name} is called and has no body here",
                path=self._path,
                position=f"function @{name}",
                hint="export the module with all its functions",
            )
        if len(self._frame.functions[name].regions[0].blocks) > 1:
            raise UnsupportedError(
                f"@{name} jumps between blocks",
                path=self._path,
                position=f"function @{name}",
                hint="StableHLO has while, if and case; lift other control flow to them first",
            )
        self._active[name] = None
        # Nobody makes the arguments of the entry: they depend on nothing.
        is_entry = name == self._frame.entry
        template = Template(name, 0 if is_entry else len(block.arguments))
        Walker(self.shared, template, _CONTROL).read(block, is_entry=is_entry)
        del self._active[name]
        self._templates[name] = template
        if len(template) > _FEW_NODES and not self._is_counted:
            self._is_counted = True
            self._check_inlined()
        return template

    def _check_inlined(self) -> None:
        """Refuse, before more is copied, what calls would make too large: functions that are known, as often
        as others call them. Raises ``UnsupportedError``.
        """
        sizes: dict[str, int] = {}
        for name in self._callees_first(self._frame.entry):
            known = self._templates.get(name)
            calls = [] if known is not None else _calls(self._frame.functions.get(name), self._bindings)
            copied = sum(sizes.get(callee, 0) for callee, op in calls if op.name == "func.call")
            sizes[name] = copied if known is None else len(known)
        check_size(self._frame.entry, sizes[self._frame.entry], self._path)

    def _callees_first(self, start: str) -> list[str]:
        """Functions that ``start`` reaches, callees before callers. Raises ``FormatError`` for recursion."""
        finished: dict[str, None] = {}
        active: dict[str, None] = {}
        pending: list[tuple[str, bool]] = [(start, False)]
        while pending:
            name, is_done = pending.pop()
            if is_done:
                del active[name]
                finished[name] = None
                continue
            if name in finished or name in active:
                continue
            active[name] = None
            pending.append((name, True))
            for callee in _callees(self._frame.functions.get(name), self._bindings):
                if callee in active:
                    raise _cycle(list(active), callee, self._path)
                if callee not in finished:
                    pending.append((callee, False))
        return list(finished)


def _cycle(active: Sequence[str], callee: str, path: str) -> FormatError:
    cycle = [*active[active.index(callee) :], callee]
    return FormatError(
        f"functions call one another in a cycle: {' -> '.join(f'@{name}' for name in cycle[:20])}",
        path=path,
        position=f"function @{callee}",
        hint="StableHLO has no recursion; write the repetition as a while loop",
    )


def _calls(function: Operation | None, bindings: Bindings) -> list[tuple[str, Operation]]:
    """Calls in a function: callee and call operation."""
    found: list[tuple[str, Operation]] = []
    if function is None:
        return found
    advance: object = bindings.ir.WalkResult.ADVANCE

    def visit(op: Operation) -> object:
        attribute = _CALLERS.get(op.name)
        if attribute is not None:
            found.append((symbol_of(op, attribute), op))
        return advance

    function.walk(visit)
    return found


def _callees(function: Operation | None, bindings: Bindings) -> list[str]:
    return list(dict.fromkeys(callee for callee, _ in _calls(function, bindings) if callee))


def call_sites(frame: Frame, bindings: Bindings) -> Mapping[str, Sequence[Operation]]:
    """The call operations of each function."""
    sites: dict[str, list[Operation]] = {}
    for function in frame.functions.values():
        for callee, op in _calls(function, bindings):
            sites.setdefault(callee, []).append(op)
    return sites


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


_CONTROL: dict[str, Handler] = {
    "stablehlo.while": _while,
    "mhlo.while": _while,
    "stablehlo.case": _branches,
    "mhlo.case": _branches,
    "stablehlo.if": _branches,
    "mhlo.if": _branches,
}
"""Handlers of control flow, passed to each :class:`Walker`."""
