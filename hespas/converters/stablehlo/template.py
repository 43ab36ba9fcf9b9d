"""One function as flat lists, ready to be copied into its callers.

A node's dependencies are node numbers of the template, or ``-1 - i`` for its argument ``i``, which the copy
replaces by what the caller passes. Loop-carried values are *slots*: numbers below ``-1 - arguments`` while
a function is being read, replaced by their initial producers in every dependency and remembered as carried
edges. So a value is a tuple of integers (a :data:`Flow`), or a :class:`TupleFlow` of them where its type is
a tuple.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hespas.converters.stablehlo.mlir import Location
from hespas.graph import RegionKind
from hespas.graph.columns import StringTableBuilder
from hespas.graph.errors import UnsupportedError

__all__ = [
    "MAX_NODES",
    "Flow",
    "Link",
    "Locations",
    "RegionRow",
    "Scope",
    "Slot",
    "Template",
    "TupleFlow",
    "Value",
    "check_size",
    "flatten",
]

Flow = tuple[int, ...]
"""Who makes a value: nodes (>= 0), arguments and slots (< 0). Empty: a constant of the program's start."""


class TupleFlow:
    """A value of tuple type: the flows of its elements. No tuple itself, so that it is told from a flow."""

    __slots__ = ("elements",)

    def __init__(self, elements: tuple[Value, ...]) -> None:
        self.elements = elements


Value = Flow | TupleFlow


def flatten(value: Value) -> Flow:
    """All producers of a value, whatever its nesting; each once, in order."""
    if isinstance(value, tuple):
        return value
    pending, found = list(reversed(value.elements)), dict[int, None]()
    while pending:
        element = pending.pop()
        if isinstance(element, tuple):
            found.update(dict.fromkeys(element))
        else:
            pending.extend(reversed(element.elements))
    return tuple(found)


class RegionRow(NamedTuple):
    """One region of a template; ``parent`` is a row of the same template, -1 for its top.

    ``header`` is the node of the operation that owns the region (-1: none): with it, ``while`` becomes the
    label ``while.17``, which a loop's condition and body share; ``branch`` counts the branches of a header
    (-1: none). ``manual`` are the mesh axes over which it has the shapes of one device (see
    :mod:`.sharded`), beside those of its parents.
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
        """The label with the header's number and the branch's."""
        return ".".join([self.label, *(str(number) for number in (self.header, self.branch) if number >= 0)])


class Slot:
    """A value a loop carries: what it starts with, and the nodes that use it with their region."""

    __slots__ = ("initial", "region", "users")

    def __init__(self, initial: Value, region: int) -> None:
        self.initial = initial
        self.region = region
        self.users: list[int] = []


class Link(NamedTuple):
    """A collective, permute, send or receive of a template: ``exchange`` is a row of the reader's exchange
    list.
    """

    node: int
    exchange: int


class Template:
    """The nodes of one function in program order; columns have one entry per node.

    ``signature`` rows say what a node is and costs. ``control`` lists control dependencies of the few nodes
    that have any. ``results`` are the values the function returns.
    """

    def __init__(self, name: str, num_arguments: int) -> None:
        self.name = name
        self.num_arguments = num_arguments
        self.signature: list[int] = []
        self.deps: list[Flow] = []
        self.region: list[int] = []
        self.location: list[int] = []
        self.control: dict[int, Flow] = {}
        self.regions: list[RegionRow] = []
        self.carried: list[tuple[int, int, int]] = []
        self.links: list[Link] = []
        self.results: Sequence[Value] = ()

    def __len__(self) -> int:
        return len(self.signature)


# Builds a :class:`Template`: nodes, dependencies, regions, copies of called functions.

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


# MLIR locations as two strings: where in the source, and what the framework calls the operation.
#
# JAX nests them: ``loc("jit(step)/mlp/dot_general"("model.py":12:8))``. The outermost name is the framework's
# name, the first file position the source. Equal locations are decoded once.

_NAME = r'loc\((?:callsite\()?(?:fused(?:<[^>]*>)?\[)?"((?:[^"\\]|\\.)*)"(?!:\d)'
_FILE = r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)'
_UNKNOWN_FILE = "-"


class Locations:
    """Interns locations. ``rows[i]`` is (source string row, framework string row); row 0 is nothing known.

    ``path`` stands for the input itself, whose own lines are locations where the program has no others;
    ``""`` where the input has no lines.
    """

    def __init__(self, strings: StringTableBuilder, path: str, *, enabled: bool) -> None:
        self.rows: list[tuple[int, int]] = [(0, 0)]
        self._strings = strings
        self._path = path
        self.enabled = enabled
        self._known: dict[Location, int] = {}
        self._names = [""]
        self._within: dict[tuple[int, int], int] = {}

    def row(self, location: Location) -> int:
        """The row of a location, 0 where it says nothing. Ask only where they are ``enabled``."""
        row = self._known.get(location)
        if row is None:
            source, name = self.describe(location)
            row = self._known[location] = self._add(self._strings.add(source), name)
        return row

    def _add(self, source_row: int, name: str) -> int:
        pair = (source_row, self._strings.add(name))
        if pair == (0, 0):
            return 0
        self.rows.append(pair)
        self._names.append(name)
        return len(self.rows) - 1

    def place(self, row: int) -> str:
        """What a location says, for an error; ``""`` where it says nothing."""
        strings = self._strings.build()
        source, name = (strings[part] for part in self.rows[row])
        line = source.removeprefix(f"{self._path}:")
        return " ".join(filter(None, (f"line {line}" if line != source else source, name)))

    def within(self, call: int, rows: list[int]) -> list[int]:
        """The rows of a function's operations as the call at row ``call`` runs them.

        Frameworks name the operations of a function from its own start (``select_n``); XLA puts the name of
        the call before it where it inlines one, so that profiles say ``jit(step)/jit(_where)/select_n``.
        """
        if not call or not self._names[call]:
            return rows
        known = self._within
        return [known.get((call, row)) or self._prefixed(call, row) for row in rows]

    def _prefixed(self, call: int, row: int) -> int:
        outer, inner = self._names[call], self._names[row]
        source = self.rows[row][0] or self.rows[call][0]
        if not inner:
            inner = outer
        elif inner.partition("/")[0] != outer.partition("/")[0]:
            inner = f"{outer}/{inner}"
        found = self._within[call, row] = self._add(source, inner)
        return found

    def describe(self, location: Location) -> tuple[str, str]:
        """Source position and framework name of a location, each ``""`` where absent."""
        text = str(location)
        name, file = re.match(_NAME, text), re.search(_FILE, text)
        source = ""
        name_of_file = file[1] if file is not None else ""
        if name_of_file == _UNKNOWN_FILE:
            name_of_file = self._path
        if file is not None and name_of_file:
            source = f"{name_of_file}:{file[2]}:{file[3]}"
        return source, name[1] if name else ""
