"""Builds a :class:`Template`: nodes, dependencies, regions, copies of called functions."""

from __future__ import annotations

from collections.abc import Sequence

from hespas.converters.stablehlo.template import (
    Flow,
    Link,
    RegionRow,
    Slot,
    Template,
    TupleFlow,
    Value,
    flatten,
)
from hespas.graph.errors import UnsupportedError

__all__ = ["MAX_NODES", "Scope", "check_size"]

MAX_NODES = 4_000_000
"""Calls that call twice each double a program per level: past this, the copy is refused before it is made."""


def check_size(function: str, nodes: int, path: str | None = None) -> None:
    """Raise ``UnsupportedError`` for a function of too many operations once calls are inlined."""
    if nodes > MAX_NODES:
        raise UnsupportedError(
            f"function @{function} has over {MAX_NODES:,} operations once calls are inlined",
            path=path,
            hint="check that functions do not call one another many times over",
        )


class Scope:
    """One function under construction."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self._slots: list[Slot] = []
        self._first_slot = -1 - template.num_arguments

    def add(self, signature: int, inputs: Sequence[Value], region: int, location: int = 0) -> int:
        """Append a node that needs ``inputs``; returns its number."""
        template = self.template
        node = len(template.signature)
        template.signature.append(signature)
        template.deps.append(self._deps(inputs, node))
        template.region.append(region)
        template.location.append(location)
        return node

    def widen(self, node: int, inputs: Sequence[Value]) -> None:
        """Make a node need ``inputs`` too."""
        deps = self.template.deps
        deps[node] = tuple(dict.fromkeys((*deps[node], *self._deps(inputs, node))))

    def _deps(self, inputs: Sequence[Value], node: int) -> Flow:
        """Nodes and arguments behind ``inputs``; slots give their start, and remember ``node`` as their
        user.
        """
        if len(inputs) == 1 and not self._slots:
            return flatten(inputs[0])
        flat: list[int] = []
        for value in inputs:
            flat.extend(value if isinstance(value, tuple) else flatten(value))
        if self._slots and flat and min(flat) <= self._first_slot:
            return self._through_slots(flat, node)
        return tuple(dict.fromkeys(flat))

    def _through_slots(self, flat: Sequence[int], node: int) -> Flow:
        merged: dict[int, None] = {}
        for producer in flat:
            if producer > self._first_slot:
                merged[producer] = None
            else:
                self._expand(producer, node, merged)
        return tuple(merged)

    def _expand(self, number: int, node: int, merged: dict[int, None]) -> None:
        """Follow a slot to what its loop, and the loops around it, start with. O(loop depth)."""
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

    def new_slots(self, initial: Sequence[Value], region: int) -> list[Flow]:
        """Flows of the values that a loop region starts with ``initial`` and carries."""
        first = self._first_slot - len(self._slots)
        self._slots.extend(Slot(value, region) for value in initial)
        return [(first - place,) for place in range(len(initial))]

    def handed_on(self, slots: Sequence[Flow], yielded: Sequence[Value], first_node: int) -> list[int]:
        """Places of the yielded values that a trip does not make itself: another slot, or something from
        outside the loop, which begins at ``first_node``. A slot that keeps its value is not among them.
        """
        return [
            place
            for place, (value, own) in enumerate(zip(yielded, slots, strict=False))
            if any(producer < first_node and producer != own[0] for producer in flatten(value))
        ]

    def close_loop(self, slots: Sequence[Flow], yielded: Sequence[Value], first_node: int) -> list[Value]:
        """Record carried edges of a loop whose body yields ``yielded``; returns the flows of its results.

        ``first_node`` is the first node of a trip; values that are :meth:`handed_on` have a node of their
        own by now. A slot that keeps its value has no edge, and its result is what the loop starts with.
        """
        for (number,), value in zip(slots, yielded, strict=True):
            slot = self._slots[self._first_slot - number]
            producers = [node for node in flatten(value) if node >= first_node]
            edges = [(slot.region, producer, user) for producer in producers for user in slot.users]
            self.template.carried.extend(edges)
        return [self._after_loop(value) for value in yielded]

    def _after_loop(self, value: Value) -> Value:
        """What a loop's result is made of: the last trip's producers, the start of a slot that keeps its
        value.
        """
        found: dict[int, None] = {}
        for producer in flatten(value):
            is_slot = producer <= self._first_slot
            start = flatten(self._slots[self._first_slot - producer].initial) if is_slot else (producer,)
            found.update(dict.fromkeys(start))
        return tuple(found)

    def open_region(self, region: RegionRow) -> int:
        """Open a region and return its row."""
        self.template.regions.append(region)
        return len(self.template.regions) - 1

    def set_trips(self, region: int, trips: float) -> None:
        """State how often a region runs."""
        self.template.regions[region] = self.template.regions[region]._replace(trips=trips)

    def guard(self, first: int, decision: Value) -> None:
        """Make the nodes from ``first`` on wait for ``decision``, each by itself or through another of them.

        Where a loop carries the decision, they wait for the one made in the trip before.
        """
        template = self.template
        for node in range(first, len(template)):
            if max(template.deps[node], default=-1) >= first:
                continue
            before = template.control.get(node, ())
            if max(before, default=-1) < first:
                template.control[node] = tuple(dict.fromkeys((*before, *self._deps([decision], node))))

    def copy(
        self, callee: Template, arguments: Sequence[Value], region: int, locations: Sequence[int]
    ) -> list[Value]:
        """Append the nodes of a called function, which run at ``locations``, and return the flows of its
        results.
        """
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
        template.links.extend(Link(base + link.node, link.exchange) for link in callee.links)
        for node, control in callee.control.items():
            inputs = [(base + dep,) if dep >= 0 else flows[-1 - dep] for dep in control]
            template.control[base + node] = self._deps(inputs, base + node)
        return [_moved(value, base, flows) for value in callee.results]


def _moved(value: Value, base: int, flows: Sequence[Flow]) -> Value:
    """A callee's result as the caller sees it. Tuples nest as deep as their type, which the reader bounds."""
    if isinstance(value, TupleFlow):
        return TupleFlow(tuple(_moved(element, base, flows) for element in value.elements))
    found: dict[int, None] = {}
    for producer in value:
        found.update(dict.fromkeys((base + producer,) if producer >= 0 else flows[-1 - producer]))
    return tuple(found)
