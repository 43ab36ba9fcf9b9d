"""Matching of a compiled module with its program by structure, for operations without matching names.

The two sides are the leaves of the module (its operations, including those inside fusions) and the nodes of
the program. Their members are put into groups of equal kind and result type. Groups are then split by the
groups of their members' operands and users, if both sides have the same parts (partition refinement on both
sides); members without a counterpart stay together. Because compilers change programs, leaves with the same
framework name and source position share their nodes: they come from the same operation. Groups are never
split by chance: a group may have many leaves and many nodes.
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
    "ProgramSizes",
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
"""Least share of operations with a counterpart; below it, a module belongs to another program. The second
value applies if arguments and results on one device have the same bytes: compilers may have changed more."""

_MOST_ROUNDS = 64
_ENTERS = frozenset({"while", "case", "call", "conditional"})
_ZERO_COST = PASSES_ON | SHAPELESS | _ENTERS
_TRIVIAL = frozenset({"iota", "slice", "pad", "partition_id", "replica_id"})
_Array = tuple[str, tuple[int, ...]]
_Types = tuple[_Array, ...]


class ProgramSizes(NamedTuple):
    """Argument bytes, result bytes and device count that a program declares.

    The bytes of a program that is not partitioned are the bytes on all devices.
    """

    argument_bytes: float
    result_bytes: float
    devices: int


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Program nodes that each instruction of a module carries out, found by structure: types, operands and
    users.

    The instructions in ``inferred`` were created by the compiler and have the ``nodes`` of the instructions
    that use or produce their data. ``share`` is the share of distinctive operations with a counterpart, 0 to
    1. ``fits`` is True if arguments, results and devices of module and program agree (None: unknown).
    ``is_other`` is True if the module is another program, because they do not agree or ``share`` is too
    small.
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
    known: tuple[ProgramSizes | None, set[str]],
    diagnostics: Diagnostics,
) -> tuple[list[EventKey], set[str]]:
    """Match the unmatched ``keys`` of modules that the profile contains, by structure (types, operands and
    users).

    ``known`` is a pair: the sizes that the program declares, and modules that are other programs. Return all
    keys, and the modules that are found to be other programs; both are reported to ``diagnostics``. A module
    that cannot be read is treated as absent and raises no error.
    """
    sizes, others = known
    joined_keys = list(keys)
    different: dict[str, Structure] = {}
    by_module: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        by_module.setdefault(key.module, []).append(number)
    for module, numbers in by_module.items():
        unmatched = [number for number in numbers if not keys[number].nodes]
        data = profile.attachments.get(_ATTACHED + module)
        if not unmatched or data is None or module in others or not len(graph):
            continue
        try:
            structure = by_structure(graph, module_leaves(data, module), sizes)
        except HespasError:
            continue  # matching by name reports it
        if structure.is_other:
            if len(unmatched) == len(numbers):
                different[module] = structure
            continue
        joined = {
            number: replace(key, nodes=nodes, rule=_STRUCTURE, inferred=key.op in structure.inferred)
            for number, key in ((number, keys[number]) for number in unmatched)
            if (nodes := structure.nodes.get(key.op))
        }
        joined_keys = [joined.get(number, key) for number, key in enumerate(joined_keys)]
        diagnostics.info(
            BY_STRUCTURE,
            profile.name,
            f"module {module}: instructions matched by structure (kind, type, operands and users), because "
            "no names match",
            count=len(joined),
        )
    has_match = any(key.nodes for key in joined_keys)
    for module, structure in different.items():
        why = f"only {structure.share:.0%} of the distinctive operations are in both"
        if structure.fits is False:
            why = "its arguments, results or devices differ from the program"
        text = f"module {module or '(unnamed)'}: {why}; it is not matched"
        if has_match:  # a recording usually contains other modules too
            diagnostics.info(OTHER_PROGRAM, profile.name, text)
        else:
            diagnostics.warning(OTHER_PROGRAM, profile.name, f"{text}: is it the program that ran?")
    return joined_keys, set(different)


@dataclass(slots=True, eq=False)
class _StructureSide:
    """One side of the matching, the nodes of the program or the instructions of the module (members), with
    the kinds, result types, operands and users of its members.

    Operations that only forward values are skipped: operands and users are the operations behind them.
    ``group`` is the number of the group of each member, from 1 (0: none).
    """

    kinds: list[str]
    types: list[_Types]
    operands: Sequence[tuple[int, ...]]
    depth: Sequence[int]
    users: list[list[int]] = field(init=False)
    group: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Compute the users of each member from the operands."""
        self.users = [[] for _ in self.kinds]
        self.group = [0] * len(self.kinds)
        for member, operands in enumerate(self.operands):
            for operand in operands:
                self.users[operand].append(member)

    def __len__(self) -> int:
        return len(self.kinds)

    def loops(self, member: int) -> tuple[int, ...]:
        """Return the number of loops around a member (an operation to match), as a tuple like the
        other keys.
        """
        return (self.depth[member],)

    def operand_groups(self, member: int) -> tuple[int, ...]:
        """Return the groups of the operands of a member."""
        return tuple(sorted({self.group[operand] for operand in self.operands[member]} - {0}))

    def user_groups(self, member: int) -> tuple[int, ...]:
        """Return the groups of the users of a member."""
        return tuple(sorted({self.group[user] for user in self.users[member]} - {0}))

    def put_into(self, group: int, members: Sequence[int]) -> None:
        """Move some members to the group ``group``."""
        for member in members:
            self.group[member] = group

    def matched_share(self) -> float:
        """Return the share of distinctive members that are in a group; 1 without such members."""
        in_group = [
            self.group[member] > 0
            for member, kind in enumerate(self.kinds)
            if kind not in _ZERO_COST and kind not in _TRIVIAL
        ]
        return sum(in_group) / len(in_group) if in_group else 1.0


def by_structure(graph: OpGraph, leaves: Leaves, sizes: ProgramSizes | None = None) -> Structure:
    """Return the nodes of ``graph`` that each instruction of a module carries out.

    ``sizes`` are the bytes and devices that the program declares.

    O((nodes + leaves) x rounds); rounds are at most the depth of the program, and bounded.
    """
    types: list[_Types] = [
        tuple((name, _sorted_extents(dims)) for name, dims in leaf.made) for leaf in leaves.leaves
    ]
    program, module = (
        _program_side(graph),
        _StructureSide([leaf.kind for leaf in leaves.leaves], types, leaves.operands, leaves.depth),
    )
    is_whole = sizes is not None and leaves.devices > 1 and leaves.argument_bytes < sizes.argument_bytes
    is_partitioned_by_hand = bool((graph.regions.kind == RegionKind.MANUAL).any())
    _group_both(program, module, leaves.devices, is_global=is_whole and not is_partitioned_by_hand)
    members: dict[int, list[int]] = {}
    for node, group in enumerate(program.group):
        if group:
            members.setdefault(group, []).append(node)
    leaf_nodes: list[tuple[int, ...]] = [tuple(members.get(group, ())) for group in module.group]
    share = min(program.matched_share(), module.matched_share())
    # Nodes of one source operation have the same name and source position, or else the same name.
    for with_frame in (True, False):
        by_origin: dict[tuple[str, str], dict[int, None]] = {}
        keys = [(leaf.name, leaf.frame if with_frame else "") for leaf in leaves.leaves]
        for key, nodes in zip(keys, leaf_nodes, strict=True):
            if nodes and key[0]:
                by_origin.setdefault(key, {}).update(dict.fromkeys(nodes))
        for number, leaf in enumerate(leaves.leaves):
            if not leaf_nodes[number] and leaf.name:
                of_origin = tuple(by_origin.get(keys[number], ()))
                same = tuple(node for node in of_origin if program.kinds[node] == leaf.kind)
                leaf_nodes[number] = same or of_origin
    # XLA expands some operations into others. A leaf without nodes gets the unmatched nodes of the kind that
    # its framework name ends in.
    used = {node for nodes in leaf_nodes for node in nodes}
    unused: dict[str, list[int]] = {}
    for node, kind in enumerate(program.kinds):
        if node not in used and kind not in SHAPELESS:
            unused.setdefault(kind, []).append(node)
    for number, leaf in enumerate(leaves.leaves):
        if not leaf_nodes[number] and leaf.name:
            primitive = leaf.name.rpartition("/")[2].replace("-", "_")
            if primitive.startswith(("reduce_", "scatter_")):
                kind = primitive.partition("_")[0]
            else:
                kind = _PRIMITIVES.get(primitive, primitive)
            leaf_nodes[number] = tuple(unused.get(kind, ()))
    nodes_of_name = {
        name: tuple(dict.fromkeys(node for leaf in carried for node in leaf_nodes[leaf]))
        for name, carried in leaves.carried.items()
    }
    inferred = _join_helpers(leaves, nodes_of_name)
    fits: bool | None = None
    if sizes is not None and not isnan(leaves.argument_bytes) and not isnan(leaves.result_bytes):
        # On each of several devices, a module has all of the bytes or a share of them.
        fits = (
            sizes.argument_bytes / leaves.devices <= leaves.argument_bytes <= sizes.argument_bytes
            and sizes.result_bytes / leaves.devices <= leaves.result_bytes <= sizes.result_bytes
            and sizes.devices == leaves.devices
        )
    least = _LEAST_SHARE_OF_SIZE if fits and leaves.devices == 1 else _LEAST_SHARE
    return Structure(nodes_of_name, inferred, share, is_other=fits is False or share < least, fits=fits)


def _group_both(program: _StructureSide, module: _StructureSide, devices: int, *, is_global: bool) -> None:
    """Put members of both sides into common groups by the similarity of their result types, in several
    levels.

    First, members with equal types are grouped, then members with equal numbers of elements (another type or
    order). In a module for several devices, members with a share of the elements follow. After each level,
    groups are split as long as both sides have the same subsets. If the program is not partitioned
    (``is_global``), only the last level is used, because types are then equal only by chance, and
    partitioning changes operands and users too much for a comparison.
    """

    last = 0
    for level in ("shares",) if is_global else ("types", "elements", "shares"):
        if level == "shares":
            last = _group_shares(program, module, devices, last)
        else:
            by_elements = level == "elements"
            by_key: list[dict[Hashable, list[int]]] = [{}, {}]
            for side, of_side in zip((program, module), by_key, strict=True):
                for member, (kind, types) in enumerate(zip(side.kinds, side.types, strict=True)):
                    if not side.group[member] and kind not in SHAPELESS:
                        key = (kind, sum(prod(dims) for _, dims in types) if by_elements else types)
                        of_side.setdefault(key, []).append(member)
            for shared in (key for key in by_key[0] if key in by_key[1]):
                last += 1
                program.put_into(last, by_key[0][shared])
                module.put_into(last, by_key[1][shared])
        criteria = (
            (_StructureSide.loops,)
            if is_global
            else (_StructureSide.loops, _StructureSide.operand_groups, _StructureSide.user_groups)
        )
        for _ in range(_MOST_ROUNDS):
            before = last
            for criterion in criteria:
                last = _split(program, module, criterion, last)
            if last == before:
                break


def _group_shares(program: _StructureSide, module: _StructureSide, devices: int, last: int) -> int:
    """Put members into common groups if the result of a module member may be a shard (on one of several
    devices) of the result of a program member.

    Types that can be shards of the same type are in one group. Returns the highest group number.
    """
    if devices < 2:
        return last
    by_kind: list[dict[str, dict[_Types, list[int]]]] = [{}, {}]
    for side, members in zip((program, module), by_kind, strict=True):
        for member, (kind, types) in enumerate(zip(side.kinds, side.types, strict=True)):
            if not side.group[member] and kind not in _ZERO_COST:
                members.setdefault(kind, {}).setdefault(types, []).append(member)
    for kind, by_share in by_kind[1].items():
        by_whole = by_kind[0].get(kind, {})
        for wholes, shares in _share_components(list(by_whole), list(by_share), devices):
            last += 1
            program.put_into(last, [member for whole in wholes for member in by_whole[whole]])
            module.put_into(last, [member for share in shares for member in by_share[share]])
    return last


def _share_components(
    wholes: Sequence[_Types], shares: Sequence[_Types], devices: int
) -> Iterator[tuple[list[_Types], list[_Types]]]:
    """Yield connected components of tensor types of the whole program and of one device. Two types are linked
    if one can be a shard of the other. O(wholes x shares).
    """
    wholes_of = {share: [whole for whole in wholes if _is_share(whole, share, devices)] for share in shares}
    left = {share: None for share in shares if wholes_of[share]}
    while left:
        pending, ours, theirs = [next(iter(left))], dict[_Types, None](), dict[_Types, None]()
        while pending:
            share = pending.pop()
            if share not in left:
                continue
            del left[share]
            theirs[share] = None
            for whole in wholes_of[share]:
                if whole not in ours:
                    ours[whole] = None
                    pending += [other for other in left if whole in wholes_of[other]]
        yield list(ours), list(theirs)


def _is_share(whole: _Types, share: _Types, devices: int) -> bool:
    """Return True if the type ``share`` can be one device's shard of the type ``whole``."""
    if len(whole) != len(share):
        return False
    for (dtype, dims), (element, part) in zip(whole, share, strict=True):
        times, rest = divmod(prod(dims), max(prod(part), 1))
        if dtype != element or rest or not times or devices % times:
            return False
        if len(dims) == len(part) and any(extent % least for extent, least in zip(dims, part, strict=True)):
            return False
    return True


def _split(
    program: _StructureSide,
    module: _StructureSide,
    criterion: Callable[[_StructureSide, int], tuple[int, ...]],
    last: int,
) -> int:
    """Split groups by the value of ``criterion`` for their members. Each value that members of both sides
    have gets a separate group.

    Members with other values stay in their group. A group is not split if only one side has other values.
    Returns the highest group number.
    """
    parts: list[dict[int, dict[tuple[int, ...], list[int]]]] = []
    for side in (program, module):
        by_group: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for member, group in enumerate(side.group):
            if group:
                by_group.setdefault(group, {}).setdefault(criterion(side, member), []).append(member)
        parts.append(by_group)
    for group, ours in parts[0].items():
        theirs = parts[1].get(group, {})
        shared = ours.keys() & theirs.keys()
        rest = ours.keys() - shared, theirs.keys() - shared
        if not shared or len(shared) + bool(rest[0] or rest[1]) < 2 or bool(rest[0]) != bool(rest[1]):
            continue
        for value in list(ours):
            if value not in shared:
                continue
            last += 1
            program.put_into(last, ours[value])
            module.put_into(last, theirs[value])
    return last


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


def _join_helpers(leaves: Leaves, nodes: dict[str, tuple[int, ...]]) -> frozenset[str]:
    """Match instructions without nodes to the nodes of the instructions that use their results, or else of
    the instructions that produce their operands. Return the names of these instructions.
    """
    users: dict[str, list[str]] = {}
    for name, operands in leaves.uses.items():
        for operand in operands:
            users.setdefault(operand, []).append(name)
    inferred: set[str] = set()
    order = list(leaves.uses)
    for names, neighbours in ((reversed(order), users), (iter(order), leaves.uses)):
        for name in names:
            if not nodes.get(name):
                near = next((nodes[other] for other in neighbours.get(name, ()) if nodes.get(other)), ())
                if near:
                    nodes[name] = near
                    inferred.add(name)
    return frozenset(inferred)


def _sorted_extents(dims: Sequence[int]) -> tuple[int, ...]:
    """Return extents in ascending order, without extents of 1.

    This makes types comparable: compilers add and remove extents of 1, and fold transposes into the producer
    or the user of a value.
    """
    return tuple(sorted(extent for extent in dims if extent != 1))


def _program_side(graph: OpGraph) -> _StructureSide:
    strings, types = graph.strings, graph.types
    rows: list[int] = graph.op_id.tolist()
    names = {row: kind_of(strings[row]) for row in set(rows)}
    kinds = [names[row] for row in rows]
    cache: dict[int, _Array] = {}
    result_types: list[_Types] = []
    sources: list[tuple[int, ...]] = []
    """The members whose values a node passes on: itself, unless it only forwards its operands."""
    operands: list[tuple[int, ...]] = []
    for node, kind in enumerate(kinds):
        results: list[int] = graph.results.row(node).tolist()
        for row in results:
            if row not in cache:
                dtype = types.dtype_of(row)
                cache[row] = ("" if dtype is None else dtype.name, _sorted_extents(types.shape(row)))
        result_types.append(tuple(cache[row] for row in results))
        deps: list[int] = graph.data_deps.row(node).tolist()
        taken = tuple(dict.fromkeys(source for dep in deps if dep < node for source in sources[dep]))
        operands.append(taken)
        forwards = kind in PASSES_ON or kind in _ENTERS
        sources.append(taken if forwards else () if kind in SHAPELESS else (node,))
    return _StructureSide(kinds, result_types, operands, regions_around(graph, RegionKind.LOOP_BODY))


def regions_around(graph: OpGraph, kind: RegionKind) -> list[int]:
    """Return the number of regions of one kind around each node."""
    parents: list[int] = graph.regions.parent.tolist()
    kinds: list[int] = graph.regions.kind.tolist()
    inside: list[int] = []
    for parent, own in zip(parents, kinds, strict=True):  # a region follows its parent
        inside.append((inside[parent] if parent >= 0 else 0) + (own == kind))
    regions: list[int] = graph.region.tolist()
    return [inside[region] if region >= 0 else 0 for region in regions]
