"""Template of a function: its nodes as flat lists, which are copied into every caller.

A value is represented by the nodes that produce it, as a tuple of integers (a :data:`Flow`), or as a
:class:`TupleFlow` if its type is a tuple. The integer ``-1 - i`` represents argument ``i``; a copy replaces
it by the value that the caller passes. Integers below ``-1 - arguments`` represent values that a loop carries
(*slots*) while a function is read. A dependency on a slot becomes a dependency on the producers of its
initial value, and a carried edge from the previous iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hespas.graph import RegionKind
from hespas.graph.errors import UnsupportedError

__all__ = [
    "MAX_NODES",
    "Flow",
    "FlowValue",
    "FunctionTemplate",
    "LoopSlot",
    "TemplateBuilder",
    "TemplateRegion",
    "TupleFlow",
    "check_size",
    "flatten",
]

Flow = tuple[int, ...]
"""Producers of a value: nodes (>= 0), arguments and slots (< 0). Empty: a constant."""


@dataclass(slots=True, eq=False)
class TupleFlow:
    """Producers of a value of tuple type, given by the producers (flows) of its elements. It is not a Python
    tuple, because that is the type of a flow.
    """

    elements: tuple[FlowValue, ...]


FlowValue = Flow | TupleFlow


def flatten(value: FlowValue) -> Flow:
    """Return all nodes that produce a value, without duplicates, in order. For a tuple these are the
    producers of all its elements.
    """
    if isinstance(value, tuple):
        return value
    pending, producers = list(reversed(value.elements)), dict[int, None]()
    while pending:
        element = pending.pop()
        if isinstance(element, tuple):
            producers.update(dict.fromkeys(element))
        else:
            pending.extend(reversed(element.elements))
    return tuple(producers)


class TemplateRegion(NamedTuple):
    """Region (loop, branch or call) of a function template. ``parent`` is the row of the enclosing region in
    the same template, -1 for the top level.

    ``header`` is the node of the operation that owns the region (-1: none). Its number is part of the label:
    condition and body of a loop have the label ``while.17``. ``branch`` is the number of a branch (-1: none).
    ``manual`` lists mesh axes along which shapes in the region are per device (see :mod:`.sharding`), in
    addition to the axes of the enclosing regions.
    """

    kind: RegionKind
    parent: int
    trips: float
    label: str
    header: int = -1
    branch: int = -1
    manual: frozenset[str] = frozenset()

    @property
    def full_label(self) -> str:
        """Return the label with the numbers of the header node and the branch, such as ``while.17``."""
        return ".".join([self.label, *(str(number) for number in (self.header, self.branch) if number >= 0)])


class LoopSlot(NamedTuple):
    """Value that a loop carries from one iteration to the next (a slot). ``initial`` are the producers of the
    initial value, ``region`` is the loop, and ``users`` are the nodes that read the value.
    """

    initial: FlowValue
    region: int
    users: list[int]


class FunctionTemplate:
    """Nodes of one function in program order. The columns have one entry per node.

    ``signature`` is a row of the signature table. ``control`` has the control dependencies, by node.
    ``links`` are pairs (node, row in :attr:`CommunicationReader.rows`) of communicating nodes. ``results``
    are the producers of the values that the function returns.
    """

    def __init__(self, name: str, num_arguments: int) -> None:
        self.name = name
        self.num_arguments = num_arguments
        self.signature: list[int] = []
        self.deps: list[Flow] = []
        self.region: list[int] = []
        self.location: list[int] = []
        self.control: dict[int, Flow] = {}
        self.regions: list[TemplateRegion] = []
        self.carried: list[tuple[int, int, int]] = []
        self.links: list[tuple[int, int]] = []
        self.results: Sequence[FlowValue] = ()

    def __len__(self) -> int:
        return len(self.signature)


MAX_NODES = 4_000_000
"""Limit of inlined operations. A program doubles per level if each function calls the next one twice, so a
copy is refused before it is made.
"""


def check_size(function: str, nodes: int) -> None:
    """Raise ``UnsupportedError`` if a function has too many nodes after inlining."""
    if nodes > MAX_NODES:
        raise UnsupportedError(
            f"function @{function} has over {MAX_NODES:,} operations once calls are inlined",
            hint="check that functions do not call one another many times over",
        )


class TemplateBuilder:
    """Builder of the template of one function. It adds nodes, dependencies, regions and copies of called
    functions.
    """

    def __init__(self, template: FunctionTemplate) -> None:
        self.template = template
        self._slots: list[LoopSlot] = []
        self._first_slot = -1 - template.num_arguments

    def add(self, signature: int, inputs: Sequence[FlowValue], region: int, location: int = 0) -> int:
        """Append a node that depends on ``inputs`` and return its number."""
        template = self.template
        node = len(template.signature)
        template.signature.append(signature)
        template.deps.append(self._deps(inputs, node))
        template.region.append(region)
        template.location.append(location)
        return node

    def widen(self, node: int, inputs: Sequence[FlowValue]) -> None:
        """Add ``inputs`` to the dependencies of a node."""
        deps = self.template.deps
        deps[node] = tuple(dict.fromkeys((*deps[node], *self._deps(inputs, node))))

    def _deps(self, inputs: Sequence[FlowValue], node: int) -> Flow:
        """Return the nodes and arguments that produce ``inputs``. If a loop carries one of them, record
        ``node`` as its user.
        """
        if len(inputs) == 1 and not self._slots:
            return flatten(inputs[0])
        flat: list[int] = []
        for value in inputs:
            flat.extend(value if isinstance(value, tuple) else flatten(value))
        if self._slots and flat and min(flat) <= self._first_slot:
            merged: dict[int, None] = {}
            for producer in flat:
                if producer > self._first_slot:
                    merged[producer] = None
                else:
                    self._expand(producer, node, merged)
            return tuple(merged)
        return tuple(dict.fromkeys(flat))

    def _expand(self, number: int, node: int, merged: dict[int, None]) -> None:
        """Add to ``merged`` the nodes that produce the initial value of the loop-carried value (slot)
        ``number``. If that is a slot of an enclosing loop, follow it outwards. ``node`` is recorded as a user
        of each slot. O(loop depth).
        """
        pending = [number]
        seen: set[int] = set()
        while pending:
            producer = pending.pop()
            if producer > self._first_slot:
                merged[producer] = None
            elif producer not in seen:
                seen.add(producer)
                slot = self._slots[self._first_slot - producer]
                slot.users.append(node)
                pending.extend(flatten(slot.initial))

    def new_slots(self, initial: Sequence[FlowValue], region: int) -> list[Flow]:
        """Create the slots of a loop with the values ``initial``; return the flows that represent them."""
        first = self._first_slot - len(self._slots)
        self._slots.extend(LoopSlot(value, region, []) for value in initial)
        return [(first - position,) for position in range(len(initial))]

    def handed_on(self, slots: Sequence[Flow], yielded: Sequence[FlowValue], first_node: int) -> list[int]:
        """Return the positions of yielded values that the loop body passes on without computing them.

        Such a value is another slot (loop-carried value) or comes from outside of the loop, whose first node
        is ``first_node``. A slot that retains its value is not included.
        """
        return [
            position
            for position, (value, own) in enumerate(zip(yielded, slots, strict=False))
            if any(producer < first_node and producer != own[0] for producer in flatten(value))
        ]

    def close_loop(
        self, slots: Sequence[Flow], yielded: Sequence[FlowValue], first_node: int
    ) -> list[FlowValue]:
        """Record the carried edges of a loop whose body yields the values ``yielded``. Return the producers
        of the loop's results.

        ``first_node`` is the first node of the loop. Nodes must have been added for the values that
        :meth:`handed_on` returns. A slot (loop-carried value) that retains its value has no edge, and its
        result is the initial value.
        """
        for (number,), value in zip(slots, yielded, strict=True):
            slot = self._slots[self._first_slot - number]
            producers = [node for node in flatten(value) if node >= first_node]
            edges = [(slot.region, producer, user) for producer in producers for user in slot.users]
            self.template.carried.extend(edges)
        results: list[FlowValue] = []
        for value in yielded:
            merged: dict[int, None] = {}
            for source in flatten(value):
                is_slot = source <= self._first_slot
                start = flatten(self._slots[self._first_slot - source].initial) if is_slot else (source,)
                merged.update(dict.fromkeys(start))
            results.append(tuple(merged))
        return results

    def open_region(self, region: TemplateRegion) -> int:
        """Open a region and return its row."""
        self.template.regions.append(region)
        return len(self.template.regions) - 1

    def set_trips(self, region: int, trips: float) -> None:
        """Set the number of iterations of a region."""
        self.template.regions[region] = self.template.regions[region]._replace(trips=trips)

    def guard(self, first: int, decision: FlowValue) -> None:
        """Make all nodes from number ``first`` on wait for ``decision``, such as the condition of a loop. A
        node that depends on another of these nodes waits through that node and needs no edge.

        If a loop carries the decision, nodes wait for the decision of the previous iteration.
        """
        template = self.template
        for node in range(first, len(template)):
            if max(template.deps[node], default=-1) >= first:
                continue
            before = template.control.get(node, ())
            if max(before, default=-1) < first:
                template.control[node] = tuple(dict.fromkeys((*before, *self._deps([decision], node))))

    def copy(
        self, callee: FunctionTemplate, arguments: Sequence[FlowValue], region: int, locations: Sequence[int]
    ) -> list[FlowValue]:
        """Append the nodes of a called function at ``locations`` and return the flows of its results."""
        template = self.template
        base, first_region = len(template), len(template.regions)
        check_size(template.name, base + len(callee))
        flows = [flatten(value) for value in arguments]
        for offset, deps in enumerate(callee.deps):
            if not deps or min(deps) >= 0:
                template.deps.append(tuple([base + dep for dep in deps]))
            else:
                inputs = [(base + dep,) if dep >= 0 else flows[-1 - dep] for dep in deps]
                template.deps.append(self._deps(inputs, base + offset))
        template.signature.extend(callee.signature)
        template.location.extend(locations)
        template.region.extend([first_region + row if row >= 0 else region for row in callee.region])
        for row in callee.regions:
            parent = first_region + row.parent if row.parent >= 0 else region
            header = base + row.header if row.header >= 0 else -1
            template.regions.append(row._replace(parent=parent, header=header))
        template.carried.extend(
            (first_region + row, base + producer, base + consumer)
            for row, producer, consumer in callee.carried
        )
        template.links.extend((base + node, row) for node, row in callee.links)
        for node, control in callee.control.items():
            inputs = [(base + dep,) if dep >= 0 else flows[-1 - dep] for dep in control]
            template.control[base + node] = self._deps(inputs, base + node)
        return [_moved(value, base, flows) for value in callee.results]


def _moved(value: FlowValue, base: int, flows: Sequence[Flow]) -> FlowValue:
    """Convert a result of a called function to the flows of its caller. Recursion is bounded by the nesting
    of the type.
    """
    if isinstance(value, TupleFlow):
        return TupleFlow(tuple(_moved(element, base, flows) for element in value.elements))
    producers: dict[int, None] = {}
    for producer in value:
        producers.update(dict.fromkeys((base + producer,) if producer >= 0 else flows[-1 - producer]))
    return tuple(producers)
