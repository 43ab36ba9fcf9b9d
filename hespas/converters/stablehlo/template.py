"""One function as flat lists, ready to be copied into its callers.

A node's dependencies are node numbers of the template, or ``-1 - i`` for its argument ``i``, which the copy
replaces by what the caller passes. Loop-carried values are *slots*: numbers below ``-1 - arguments`` while
a function is being read, replaced by their initial producers in every dependency and remembered as carried
edges. So a value is a tuple of integers (a :data:`Flow`), or a :class:`TupleFlow` of them where its type is
a tuple.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hespas.graph import RegionKind

__all__ = ["Flow", "Link", "RegionRow", "Slot", "Template", "TupleFlow", "Value", "flatten"]

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
