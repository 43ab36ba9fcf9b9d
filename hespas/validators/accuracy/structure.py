"""Joins a compiled module to its program by what both are made of, where no names tell.

Leaves of the module (operations that the compiler kept, fusions opened) and nodes of the program are put into
groups of equal kind and result type. Groups are split by what their members take and by what takes them, as
long as both sides have the same parts (colour refinement that asks both sides); what one side alone has stays
together. Compilers change programs, so the evidence of one leaf also counts for all others that bear the same
framework name and stand at the same place of the source: they come from the same operation. Nothing is split
by guess: a group may have many leaves and many nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from hespas.converters.hlo.leaves import PASSES_ON, SHAPELESS, Leaves, kind_of
from hespas.graph import OpGraph

__all__ = ["LEAST_SHARE", "Structure", "by_structure"]

LEAST_SHARE = 0.5
"""A module of whose operations the program lacks more than the rest is another program's."""

_MOST_ROUNDS = 64
_ENTERS = frozenset({"while", "case", "call", "conditional"})
_FREE = PASSES_ON | SHAPELESS | _ENTERS


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """``nodes`` of each instruction; ``inferred`` are the instructions whose nodes are those they serve.
    ``share`` of the telling leaves that found nodes of their own kind and type (0..1).
    """

    nodes: Mapping[str, tuple[int, ...]]
    inferred: frozenset[str]
    share: float


@dataclass(slots=True, eq=False)
class _Side:
    """One of the two programs: what its members are, and what they take and give past what passes on.
    ``color`` is the group of each member (0: of none).
    """

    kinds: list[str]
    types: list[_Types]
    operands: Sequence[tuple[int, ...]]
    users: list[list[int]] = field(init=False)
    color: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Turn the operands round."""
        self.users = [[] for _ in self.kinds]
        self.color = [0] * len(self.kinds)
        for member, taken in enumerate(self.operands):
            for each in taken:
                self.users[each].append(member)

    def __len__(self) -> int:
        return len(self.kinds)

    def taken(self, member: int) -> tuple[int, ...]:
        """The groups of what a member takes."""
        return tuple(sorted({self.color[each] for each in self.operands[member]} - {0}))

    def given(self, member: int) -> tuple[int, ...]:
        """The groups of what takes a member."""
        return tuple(sorted({self.color[each] for each in self.users[member]} - {0}))


def by_structure(graph: OpGraph, leaves: Leaves) -> Structure:
    """The nodes of ``graph`` that each instruction of a module carries out.

    O((nodes + leaves) x rounds), rounds at most as many as the program is deep, and bounded.
    """
    program, module = _nodes_side(graph), _leaves_side(leaves)
    _group(program, module)
    members: dict[int, list[int]] = {}
    for node, color in enumerate(program.color):
        if color:
            members.setdefault(color, []).append(node)
    found: list[tuple[int, ...]] = [tuple(members.get(color, ())) for color in module.color]
    telling = [leaf for leaf, kind in enumerate(module.kinds) if kind not in _FREE and kind not in _TRIVIAL]
    share = sum(bool(found[leaf]) for leaf in telling) / len(telling) if telling else 0.0
    _same_origin(leaves, program, found)
    _alike(program, module, found)
    _same_origin(leaves, program, found)
    _named(leaves, program, found)
    nodes = {
        name: tuple(dict.fromkeys(node for leaf in carried for node in found[leaf]))
        for name, carried in leaves.carried.items()
    }
    inferred = _served(leaves, nodes)
    return Structure(nodes, inferred, share)


_Array = tuple[str, tuple[int, ...]]
_Types = tuple[_Array, ...]
_TRIVIAL = frozenset({"iota", "slice", "pad", "partition_id", "replica_id"})


def _group(program: _Side, module: _Side) -> None:
    """Colour both sides: equal kinds and types first, then parts of those that both sides have."""
    keys: dict[tuple[str, _Types], int] = {}
    ours = {(kind, made) for kind, made in zip(program.kinds, program.types, strict=True)}
    for side, known in ((module, ours), (program, None)):
        for member, key in enumerate(zip(side.kinds, side.types, strict=True)):
            if key[0] not in SHAPELESS and (key in ours if known is not None else key in keys):
                side.color[member] = keys.setdefault(key, len(keys) + 1)
    last = len(keys)
    for _ in range(_MOST_ROUNDS):
        before = last
        for way in (_Side.taken, _Side.given):
            last = _split(program, module, way, last)
        if last == before:
            break


def _split(program: _Side, module: _Side, way: Callable[[_Side, int], tuple[int, ...]], last: int) -> int:
    """Split the groups whose members see different groups that way, where both sides have each of the parts;
    what is in none of them stays. Gives the highest colour.
    """
    parts: list[dict[int, dict[tuple[int, ...], list[int]]]] = []
    for side in (program, module):
        found: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for member, color in enumerate(side.color):
            if color:
                found.setdefault(color, {}).setdefault(way(side, member), []).append(member)
        parts.append(found)
    for color, ours in parts[0].items():
        theirs = parts[1].get(color, {})
        shared = ours.keys() & theirs.keys()
        rest = ours.keys() - shared, theirs.keys() - shared
        if not shared or len(shared) + bool(rest[0] or rest[1]) < 2 or bool(rest[0]) != bool(rest[1]):
            continue
        for seen in list(ours):
            if seen not in shared:
                continue
            last += 1
            for side, members in ((program, ours[seen]), (module, theirs[seen])):
                for member in members:
                    side.color[member] = last
    return last


def _same_origin(leaves: Leaves, program: _Side, found: list[tuple[int, ...]]) -> None:
    """Leaves without nodes have those of the leaves that the same operation of the source became."""
    known: dict[tuple[str, str], dict[int, None]] = {}
    for leaf, nodes in zip(leaves.leaves, found, strict=True):
        if nodes and leaf.name:
            known.setdefault((leaf.name, leaf.frame), {}).update(dict.fromkeys(nodes))
    for number, leaf in enumerate(leaves.leaves):
        if not found[number] and leaf.name:
            of_origin = known.get((leaf.name, leaf.frame), {})
            same = tuple(node for node in of_origin if program.kinds[node] == leaf.kind)
            found[number] = same or tuple(of_origin)


def _alike(program: _Side, module: _Side, found: list[tuple[int, ...]]) -> None:
    """Leaves without nodes have those of their kind that make as many elements: other element types, extents
    in another order. Those that have leaves already are asked last.
    """
    used = {node for nodes in found for node in nodes}
    free: dict[tuple[str, int], list[int]] = {}
    other: dict[tuple[str, int], list[int]] = {}
    for node, (kind, made) in enumerate(zip(program.kinds, program.types, strict=True)):
        if kind not in _FREE:
            (other if node in used else free).setdefault((kind, _elements(made)), []).append(node)
    for leaf, (kind, made) in enumerate(zip(module.kinds, module.types, strict=True)):
        if not found[leaf] and kind not in _FREE:
            key = kind, _elements(made)
            found[leaf] = tuple(free.get(key) or other.get(key, ()))


def _elements(made: _Types) -> int:
    return sum(prod(dims) for _, dims in made)


_PRIMITIVES = {
    "add_any": "add",
    "argmax": "reduce",
    "argmin": "reduce",
    "conv_general_dilated": "convolution",
    "convert_element_type": "convert",
    "cumsum": "reduce_window",
    "div": "divide",
    "exp": "exponential",
    "integer_pow": "multiply",
    "max": "maximum",
    "min": "minimum",
    "mul": "multiply",
    "neg": "negate",
    "rem": "remainder",
    "rev": "reverse",
    "select_n": "select",
    "sub": "subtract",
}


def _primitive(name: str) -> str:
    """The kind that the framework's name of an operation ends in."""
    last = name.rpartition("/")[2].replace("-", "_")
    if last.startswith(("reduce_", "scatter_")):
        return last.partition("_")[0]
    return _PRIMITIVES.get(last, last)


def _named(leaves: Leaves, program: _Side, found: list[tuple[int, ...]]) -> None:
    """Leaves without nodes that bear the name of an operation whose kind alone is left: XLA wrote it out."""
    used = {node for nodes in found for node in nodes}
    free: dict[str, list[int]] = {}
    for node, kind in enumerate(program.kinds):
        if node not in used and kind not in SHAPELESS:
            free.setdefault(kind, []).append(node)
    for number, leaf in enumerate(leaves.leaves):
        if not found[number] and leaf.name:
            found[number] = tuple(free.get(_primitive(leaf.name), ()))


def _served(leaves: Leaves, nodes: dict[str, tuple[int, ...]]) -> frozenset[str]:
    """Give instructions without nodes those of the instructions that use them, else of those they use."""
    users: dict[str, list[str]] = {}
    for name, taken in leaves.uses.items():
        for each in taken:
            users.setdefault(each, []).append(name)
    inferred: set[str] = set()
    order = list(leaves.uses)
    for names, beside in ((reversed(order), users), (iter(order), leaves.uses)):
        for name in names:
            if not nodes.get(name):
                near = next((nodes[each] for each in beside.get(name, ()) if nodes.get(each)), ())
                if near:
                    nodes[name] = near
                    inferred.add(name)
    return frozenset(inferred)


def _telling(dims: Sequence[int]) -> tuple[int, ...]:
    """Extents without those of one, which compilers add and drop."""
    return tuple(extent for extent in dims if extent != 1)


def _nodes_side(graph: OpGraph) -> _Side:
    strings, types = graph.strings, graph.types
    rows: list[int] = graph.op_row.tolist()
    names = {row: kind_of(strings[row]) for row in set(rows)}
    kinds = [names[row] for row in rows]
    cache: dict[int, _Array] = {}
    made: list[_Types] = []
    past: list[tuple[int, ...]] = []
    operands: list[tuple[int, ...]] = []
    for node, kind in enumerate(kinds):
        results: list[int] = graph.results.row(node).tolist()
        for each in results:
            if each not in cache:
                dtype = types.dtype_of(each)
                cache[each] = ("" if dtype is None else dtype.name, _telling(types.shape(each)))
        made.append(tuple(cache[each] for each in results))
        deps: list[int] = graph.data_deps.row(node).tolist()
        taken = tuple(dict.fromkeys(each for dep in deps if dep < node for each in past[dep]))
        operands.append(taken)
        passes = kind in PASSES_ON or kind in _ENTERS
        past.append(taken if passes else () if kind in SHAPELESS else (node,))
    return _Side(kinds, made, operands)


def _leaves_side(leaves: Leaves) -> _Side:
    made: list[_Types] = [tuple((name, _telling(dims)) for name, dims in leaf.made) for leaf in leaves.leaves]
    return _Side([leaf.kind for leaf in leaves.leaves], made, leaves.operands)
