"""Joins a compiled module to its program by what both are made of, where no names tell.

Leaves of the module (operations that the compiler kept, fusions opened) and nodes of the program are put into
groups of equal kind and result type. Groups are split by what their members take and by what takes them, as
long as both sides have the same parts (colour refinement that asks both sides); what one side alone has stays
together. Compilers change programs, so the evidence of one leaf also counts for all others that bear the same
framework name and stand at the same place of the source: they come from the same operation. Nothing is split
by guess: a group may have many leaves and many nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, prod
from typing import NamedTuple

from hespas.converters.hlo.leaves import PASSES_ON, SHAPELESS, Leaves, kind_of, module_leaves
from hespas.graph import Diagnostics, OpGraph, Profile, RegionKind
from hespas.graph.errors import HespasError
from hespas.validators.accuracy.coverage import RULES, EventKey

__all__ = [
    "BY_STRUCTURE",
    "OTHER_PROGRAM",
    "Stated",
    "Structure",
    "by_structure",
    "join_by_structure",
    "regions_around",
]

BY_STRUCTURE = "match.by-structure"
OTHER_PROGRAM = "match.other-program"
_ATTACHED = "hlo/"
_STRUCTURE = RULES.index("structure")

_LEAST_SHARE = 0.65
_LEAST_SHARE_OF_SIZE = 0.5
"""A module is another program's where less of the operations of either is in the other. Where arguments and
results on one device have the same bytes, compilers may have changed more."""

_MOST_ROUNDS = 64
_ENTERS = frozenset({"while", "case", "call", "conditional"})
_FREE = PASSES_ON | SHAPELESS | _ENTERS


class Stated(NamedTuple):
    """What a program says of itself: bytes of its arguments and of its results, those of all devices where
    nobody partitioned it, and for how many devices it is.
    """

    argument_bytes: float
    result_bytes: float
    devices: int


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """``nodes`` of each instruction; ``inferred`` are the instructions whose nodes are those they serve.
    ``share`` is how much of what tells programs apart is in both, 0..1; ``is_other`` says that this is too
    little, or that arguments, results or devices are not as many: it is another program. ``fits``: whether
    they are (None: unknown).
    """

    nodes: Mapping[str, tuple[int, ...]]
    inferred: frozenset[str]
    share: float
    is_other: bool
    fits: bool | None


def join_by_structure(
    graph: OpGraph,
    profile: Profile,
    keys: Sequence[EventKey],
    known: tuple[Stated | None, set[str]],
    diagnostics: Diagnostics,
) -> tuple[list[EventKey], set[str]]:
    """``keys`` with the nodes of those that names leave without any, where the profile brings the module
    along and it is made of what ``graph`` is made of; and the modules that are another program. A diagnostic
    tells both. ``known`` are what the program says of itself, and modules known to be other ones. Raises
    nothing: a module that cannot be read counts as absent.
    """
    stated, others = known
    done = list(keys)
    strange: dict[str, Structure] = {}
    by_module: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        by_module.setdefault(key.module, []).append(number)
    for module, numbers in by_module.items():
        unmatched = [number for number in numbers if not keys[number].nodes]
        data = profile.attachments.get(_ATTACHED + module)
        if not unmatched or data is None or module in others or not len(graph):
            continue
        try:
            found = by_structure(graph, module_leaves(data, module), stated)
        except HespasError:
            continue  # whoever matches by names reports it
        if not found.is_other:
            joined = _filled(done, unmatched, found)
            diagnostics.info(BY_STRUCTURE, profile.name, f"module {module}: {_JOINED}", count=joined)
        elif len(unmatched) == len(numbers):
            strange[module] = found
    _tell_other(strange, profile, diagnostics, is_beside=any(key.nodes for key in done))
    return done, set(strange)


_JOINED = (
    "instructions find their operations by structure (kind, type, and what they take and give): no name tells"
)


def _filled(keys: list[EventKey], unmatched: Sequence[int], found: Structure) -> int:
    """Give keys the nodes of their instructions, and say to how many."""
    joined = 0
    for number in unmatched:
        op = keys[number].op
        nodes = found.nodes.get(op, ())
        if nodes:
            joined += 1
            inferred = op in found.inferred
            keys[number] = replace(keys[number], nodes=nodes, rule=_STRUCTURE, inferred=inferred)
    return joined


def _tell_other(
    strange: Mapping[str, Structure], profile: Profile, diagnostics: Diagnostics, *, is_beside: bool
) -> None:
    """Modules that are another program are no wonder beside the one that is it."""
    for module, found in strange.items():
        why = f"only {found.share:.0%} of what tells programs apart is in both"
        if found.fits is False:
            why = "it has other arguments, results or devices than the program"
        text = f"module {module or '(unnamed)'}: {why}; nothing of it is matched"
        if is_beside:
            diagnostics.info(OTHER_PROGRAM, profile.name, text)
        else:
            diagnostics.warning(OTHER_PROGRAM, profile.name, f"{text}: is it the program that ran?")


@dataclass(slots=True, eq=False)
class _Side:
    """One of the two programs: what its members are, and what they take and give past what passes on.
    ``color`` is the group of each member (0: of none).
    """

    kinds: list[str]
    types: list[_Types]
    operands: Sequence[tuple[int, ...]]
    depth: Sequence[int]
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

    def loops(self, member: int) -> tuple[int, ...]:
        """The loops around a member."""
        return (self.depth[member],)

    def taken(self, member: int) -> tuple[int, ...]:
        """The groups of what a member takes."""
        return tuple(sorted({self.color[each] for each in self.operands[member]} - {0}))

    def given(self, member: int) -> tuple[int, ...]:
        """The groups of what takes a member."""
        return tuple(sorted({self.color[each] for each in self.users[member]} - {0}))


def by_structure(graph: OpGraph, leaves: Leaves, stated: Stated | None = None) -> Structure:
    """The nodes of ``graph`` that each instruction of a module carries out. ``stated`` is what
    the program says of itself.

    O((nodes + leaves) x rounds), rounds at most as many as the program is deep, and bounded.
    """
    program, module = _nodes_side(graph), _leaves_side(leaves)
    whole = stated is not None and leaves.devices > 1 and leaves.argument_bytes < stated.argument_bytes
    _group(program, module, leaves.devices, is_global=whole and not _by_hand(graph))
    members: dict[int, list[int]] = {}
    for node, color in enumerate(program.color):
        if color:
            members.setdefault(color, []).append(node)
    found: list[tuple[int, ...]] = [tuple(members.get(color, ())) for color in module.color]
    share = min(_share_found(program), _share_found(module))
    _same_origin(leaves, program, found)
    _named(leaves, program, found)
    nodes = {
        name: tuple(dict.fromkeys(node for leaf in carried for node in found[leaf]))
        for name, carried in leaves.carried.items()
    }
    inferred = _served(leaves, nodes)
    fits = None if stated is None else _fits(stated, leaves)
    least = _LEAST_SHARE_OF_SIZE if fits and leaves.devices == 1 else _LEAST_SHARE
    return Structure(nodes, inferred, share, is_other=fits is False or share < least, fits=fits)


def _fits(stated: Stated, leaves: Leaves) -> bool | None:
    """Whether a module has arguments and results of these bytes: on each of several devices, all of them or a
    share. None where its own are unknown.
    """
    known = leaves.argument_bytes, leaves.result_bytes
    if any(isnan(each) for each in known):
        return None
    count = leaves.devices
    wholes = stated.argument_bytes, stated.result_bytes
    fit = all(whole / count <= part <= whole for whole, part in zip(wholes, known, strict=True))
    return fit and stated.devices == count


_Array = tuple[str, tuple[int, ...]]
_Types = tuple[_Array, ...]
_TRIVIAL = frozenset({"iota", "slice", "pad", "partition_id", "replica_id"})


def _by_hand(graph: OpGraph) -> bool:
    """Whether a program has regions that are written as one device sees them."""
    return bool((graph.regions.kind == RegionKind.MANUAL).any())


def _group(program: _Side, module: _Side, devices: int, *, is_global: bool) -> None:
    """Colour both sides: equal kinds and types first, then, of what is left, equal kinds that make as many
    elements or, in a module for several devices, a share of them; each time, parts of those that both sides
    have. ``is_global`` says that the program is as all devices together see it: equal types are chance, and
    partitioning changes too much of what is taken and given for that to tell anything.
    """
    last = 0
    for level in (_shares,) if is_global else (_exact, _elements_of, _shares):
        last = level(program, module, devices, last)
        for _ in range(_MOST_ROUNDS):
            before = last
            for way in (_Side.loops,) if is_global else (_Side.loops, _Side.taken, _Side.given):
                last = _split(program, module, way, last)
            if last == before:
                break


def _share_found(side: _Side) -> float:
    """The share of the telling members of a side that found some of the other; 1 where nothing tells."""
    found = [
        side.color[member] > 0
        for member, kind in enumerate(side.kinds)
        if kind not in _FREE and kind not in _TRIVIAL
    ]
    return sum(found) / len(found) if found else 1.0


def _exact(program: _Side, module: _Side, devices: int, last: int) -> int:
    """Colour equal kinds and types."""
    del devices
    return _equal(program, module, lambda side, member: (side.kinds[member], side.types[member]), last)


def _elements_of(program: _Side, module: _Side, devices: int, last: int) -> int:
    """Colour equal kinds that make as many elements: of another type, or in another order."""
    del devices
    return _equal(
        program, module, lambda side, member: (side.kinds[member], _elements(side.types[member])), last
    )


def _equal(program: _Side, module: _Side, key: Callable[[_Side, int], Hashable], last: int) -> int:
    """Colour what has no colour yet and an equal key on both sides."""
    found: list[dict[Hashable, list[int]]] = [{}, {}]
    for side, members in zip((program, module), found, strict=True):
        for member, name in enumerate(side.kinds):
            if not side.color[member] and name not in SHAPELESS:
                members.setdefault(key(side, member), []).append(member)
    for each, ours in found[0].items():
        theirs = found[1].get(each)
        if theirs:
            last += 1
            _color(program, ours, last)
            _color(module, theirs, last)
    return last


def _color(side: _Side, members: Sequence[int], color: int) -> None:
    for member in members:
        side.color[member] = color


def _shares(program: _Side, module: _Side, devices: int, last: int) -> int:
    """Colour what makes, on one of several devices, a share of what the program makes: types that divide each
    other are of one group.
    """
    if devices < 2:
        return last
    found: list[dict[str, dict[_Types, list[int]]]] = [{}, {}]
    for side, by_kind in zip((program, module), found, strict=True):
        for member, (name, made) in enumerate(zip(side.kinds, side.types, strict=True)):
            if not side.color[member] and name not in _FREE:
                by_kind.setdefault(name, {}).setdefault(made, []).append(member)
    for kind, by_share in found[1].items():
        by_whole = found[0].get(kind, {})
        for wholes, shares in _components(list(by_whole), list(by_share), devices):
            last += 1
            _color(program, [member for whole in wholes for member in by_whole[whole]], last)
            _color(module, [member for share in shares for member in by_share[share]], last)
    return last


def _components(
    wholes: Sequence[_Types], shares: Sequence[_Types], devices: int
) -> Iterator[tuple[list[_Types], list[_Types]]]:
    """Types that hang together because one can be a share of the other. O(wholes x shares)."""
    beside = {share: [whole for whole in wholes if _is_share(whole, share, devices)] for share in shares}
    left = {share: None for share in shares if beside[share]}
    while left:
        pending, ours, theirs = [next(iter(left))], dict[_Types, None](), dict[_Types, None]()
        while pending:
            share = pending.pop()
            if share not in left:
                continue
            del left[share]
            theirs[share] = None
            for whole in beside[share]:
                if whole not in ours:
                    ours[whole] = None
                    pending += [each for each in left if whole in beside[each]]
        yield list(ours), list(theirs)


def _is_share(whole: _Types, share: _Types, devices: int) -> bool:
    if len(whole) != len(share):
        return False
    for (dtype, dims), (element, part) in zip(whole, share, strict=True):
        times, rest = divmod(prod(dims), max(prod(part), 1))
        if dtype != element or rest or not times or devices % times:
            return False
        if len(dims) == len(part) and any(extent % least for extent, least in zip(dims, part, strict=True)):
            return False
    return True


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
            _color(program, ours[seen], last)
            _color(module, theirs[seen], last)
    return last


def _same_origin(leaves: Leaves, program: _Side, found: list[tuple[int, ...]]) -> None:
    """Leaves without nodes have those of the leaves that the same operation of the source became: of the same
    name and place, else of the same name.
    """
    for with_place in (True, False):
        known: dict[tuple[str, str], dict[int, None]] = {}
        keys = [(leaf.name, leaf.frame if with_place else "") for leaf in leaves.leaves]
        for key, nodes in zip(keys, found, strict=True):
            if nodes and key[0]:
                known.setdefault(key, {}).update(dict.fromkeys(nodes))
        for number, leaf in enumerate(leaves.leaves):
            if not found[number] and leaf.name:
                of_origin = tuple(known.get(keys[number], ()))
                same = tuple(node for node in of_origin if program.kinds[node] == leaf.kind)
                found[number] = same or of_origin


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
    """Extents in ascending order, without those of one: compilers add and drop these, and fold transposes
    into what makes or takes a value.
    """
    return tuple(sorted(extent for extent in dims if extent != 1))


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
    return _Side(kinds, made, operands, regions_around(graph, RegionKind.LOOP_BODY))


def regions_around(graph: OpGraph, kind: RegionKind) -> list[int]:
    """The number of regions of one kind around each node."""
    parents: list[int] = graph.regions.parent.tolist()
    kinds: list[int] = graph.regions.kind.tolist()
    inside: list[int] = []
    for parent, own in zip(parents, kinds, strict=True):  # a region stands behind its parent
        inside.append((inside[parent] if parent >= 0 else 0) + (own == kind))
    regions: list[int] = graph.region.tolist()
    return [inside[region] if region >= 0 else 0 for region in regions]


def _leaves_side(leaves: Leaves) -> _Side:
    made: list[_Types] = [tuple((name, _telling(dims)) for name, dims in leaf.made) for leaf in leaves.leaves]
    return _Side([leaf.kind for leaf in leaves.leaves], made, leaves.operands, leaves.depth)
