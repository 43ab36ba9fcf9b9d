"""Values of a computation while it is written out: which node makes them, per element of a tuple."""

from __future__ import annotations

from dataclasses import dataclass, field

from hespas.converters.hlo.module import Computation

__all__ = ["Frame", "Gate", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """``node`` makes the value as a whole; ``parts`` are the elements of a tuple where they are known
    apart.
    """

    node: int
    parts: tuple[Value, ...] | None = None

    def part(self, index: int) -> Value:
        """One element: its own maker, else the maker of the whole."""
        if self.parts is None or not 0 <= index < len(self.parts):
            return Value(self.node)
        return self.parts[index]


@dataclass(frozen=True, slots=True)
class Gate:
    """What nodes wait for that start something in a loop body or branch: ``node`` decides whether it runs.

    Those are the nodes without a dependency on ``first`` or a later node; they are noted in ``waiting``.
    ``outer`` is the gate around this one.
    """

    node: int
    first: int
    outer: Gate | None
    waiting: list[int] = field(default_factory=list[int])

    def control(self, node: int, deps: list[int], control: list[int]) -> list[int]:
        """The control dependencies of a new node that has these already. O(gates)."""
        last = max([*deps, *control], default=-1)
        gate: Gate | None = self
        while gate is not None and last < gate.first:
            gate.waiting.append(node)
            if gate.node not in deps and gate.node not in control:
                control = [*control, gate.node]
            last = max(last, gate.node)
            gate = gate.outer
        return control


@dataclass(slots=True, eq=False)
class Frame:
    """One run-through of a computation.

    ``arguments`` are the values of its parameters (empty for the entry, whose parameters are nodes);
    ``nodes`` has the maker of each instruction reached so far, ``parts`` the elements of the few that are
    tuples. ``state`` are the numbers of parameters that hold the state of an enclosing loop, and ``readers``
    lists (element, node) of the nodes that read it (-1: all of it). ``async_results`` leads from an
    asynchronous start to the last node of what it called, ``issues`` to the nodes that it waits for itself.
    """

    computation: Computation
    region: int
    depth: int
    arguments: tuple[Value, ...] = ()
    state: frozenset[int] = frozenset()
    nodes: list[int] = field(default_factory=list[int])
    parts: dict[int, tuple[Value, ...]] = field(default_factory=dict[int, tuple[Value, ...]])
    readers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    async_results: dict[int, int] = field(default_factory=dict[int, int])
    issues: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    numbers: dict[str, int] | None = None

    def value(self, index: int) -> Value:
        """The value of an instruction that stands above."""
        return Value(self.nodes[index], self.parts.get(index))

    def number_of(self, name: str) -> int:
        """The instruction of a name, -1 for none. The index is built on first use."""
        if self.numbers is None:
            self.numbers = {text: place for place, text in enumerate(self.computation.names)}
        return self.numbers.get(name, -1)
