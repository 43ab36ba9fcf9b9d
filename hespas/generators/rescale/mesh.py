"""Mesh of a traced job, derived from its process groups: the size, traffic and name of each axis.

Axes are listed outermost first. Rank = sum of coordinate x stride, where the last axis has stride 1. The
ranks of a group must differ in some of the axes and agree in the others. Any other group shows that the job
has no mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hespas.graph import CollectiveKind, GroupSet, OpClass, OpGraph, Permutation, StridedGroups, Workload
from hespas.graph.columns import BoolArray, RaggedArray
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.groups import Digit, digits_of, groups_text, member_rows
from hespas.graph.mesh import Mesh
from hespas.graph.passes import all_deps, topological_order

__all__ = [
    "GROWS",
    "SUMS",
    "Rule",
    "Traffic",
    "axes_of_rows",
    "changed_axes",
    "find_mesh",
    "group_axes",
    "named_by_traffic",
    "parse_mesh",
    "permutation_axes",
    "reachable",
    "rule_of",
    "traffic_of",
]

_NAME_THEM = "name the axes, outermost first: `mesh=dp=2,tp=4`"


def parse_mesh(text: str, num_ranks: int) -> Mesh:
    """Parse a mesh such as ``dp=2,tp=4``. Raises ``UsageError`` if it does not have ``num_ranks`` ranks."""
    mesh = Mesh.of(text)
    if mesh.num_devices != num_ranks:
        raise UsageError(
            f"`mesh={text}` has {mesh.num_devices:,} ranks, the job {num_ranks:,}",
            hint="give the mesh of the trace, not the mesh of the rescaled job",
        )
    return mesh


def find_mesh(workload: Workload) -> Mesh:
    """Return the mesh that all groups and permutations of a job follow; axes are named ``axis0``, ... from
    the outermost. Raises ``UnsupportedError`` if no mesh fits.
    """
    strides = {1, workload.num_ranks}
    for groups in workload.group_sets:
        for size, stride in _member_digits(groups, workload.num_ranks):
            strides |= {stride, stride * size}
    for graph in workload.classes:
        for permutation in graph.permutations:
            if permutation.pairs is None:
                size, stride = permutation.digit
                strides |= {stride, stride * size}
    ordered = sorted(strides)
    wrong = next((pair for pair in pairwise(ordered) if pair[1] % pair[0]), None)
    if wrong is not None:
        shown = "; ".join(groups_text(groups, workload.num_ranks) for groups in workload.group_sets[:6])
        raise UnsupportedError(
            f"no mesh explains the groups: one splits the ranks every {wrong[0]}, another every {wrong[1]}. "
            f"Groups: {shown}{'; ...' if len(workload.group_sets) > 6 else ''}",
            position="process groups",
            hint="rescale a job whose groups are the axes of one mesh",
        )
    sizes = [high // low for low, high in reversed(list(pairwise(ordered)))]
    return Mesh(tuple(f"axis{index}" for index in range(len(sizes))), tuple(sizes))


def _member_digits(groups: GroupSet, num_ranks: int) -> tuple[Digit, ...]:
    """Return the digits (size and stride) of the ranks in a group, slowest first. Rank = start of the group +
    sum of index x stride. Raises ``UnsupportedError`` if the groups do not have this form.
    """
    rows = groups if isinstance(groups, StridedGroups) else member_rows(groups)
    digits: tuple[Digit, ...] | None
    if isinstance(rows, StridedGroups):
        digits = rows.member_digits
        starts = np.full(1, rows.base, np.int64)
        for size, stride in rows.group_digits:
            starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    else:
        first = np.array(rows[0] if len(rows) else (), np.int64)
        digits = digits_of(first - first[0]) if len(first) else ()
        starts = np.array([row[0] for row in rows if len(row)], np.int64)
        if not all(
            len(row) == len(first) and np.array_equal(np.array(row) - row[0], first - first[0])
            for row in rows
        ):
            digits = None
    if digits is None or any((starts // stride % size).any() for size, stride in digits):
        raise UnsupportedError(
            f"the ranks of a process group are not axes of a mesh: {groups_text(groups, num_ranks)}",
            position="process groups",
            hint="rescale a job whose groups are the axes of one mesh",
        )
    return digits


def group_axes(groups: GroupSet, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which the ranks of a group differ, in the order of the ring. Raises
    ``UnsupportedError`` for groups that follow no axes.
    """
    names: list[str] = []
    for digit in _member_digits(groups, mesh.num_devices):
        covered = mesh.covered(digit)
        if covered is None:
            raise UnsupportedError(
                f"a group set does not follow the axes {mesh}: {groups_text(groups, mesh.num_devices)}",
                position="process groups",
                hint=_NAME_THEM,
            )
        names += covered
    return tuple(names)


def permutation_axes(permutation: Permutation, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which messages are sent. Raises ``UnsupportedError`` for pairs that do not
    follow an axis.
    """
    covered = None if permutation.pairs is not None else mesh.covered(permutation.digit)
    if covered is None:
        raise UnsupportedError(
            f"messages between ranks do not follow an axis of the mesh {mesh}",
            position="point-to-point messages",
            hint=_NAME_THEM,
        )
    return covered


Rule = Literal["data", "shard", "tensor", "pipeline"]

_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("dp", "data", "ddp", "replica", "batch"), "data"),
        **dict.fromkeys(("fsdp", "zero", "shard", "dp_shard", "sdp"), "shard"),
        **dict.fromkeys(("tp", "model", "tensor", "mp", "sp", "cp", "ep", "expert", "context"), "tensor"),
        **dict.fromkeys(("pp", "pipe", "pipeline", "stage"), "pipeline"),
    }
)
"""Rules by axis name: the change of the work of a rank with the size of the axis."""

SUMS = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.BROADCAST,
    CollectiveKind.REDUCE,
    CollectiveKind.BARRIER,
)
"""Collectives whose buffers do not depend on the number of ranks."""
GROWS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE_SCATTER_BLOCK)
"""Collectives that join or split buffers by the number of ranks."""

_PRODUCTS = (OpClass.CONTRACTION, OpClass.CONVOLUTION, OpClass.ATTENTION)


@dataclass(slots=True)
class Traffic:
    """Collectives and messages along one mesh axis, over all rank classes. They identify the kind of
    parallelism of the axis.

    ``feeds_products``: results of reductions are operands of matmuls. ``gathers_work``: gathered values were
    computed by matmuls.
    """

    kinds: set[CollectiveKind] = field(default_factory=set[CollectiveKind])
    messages: int = 0
    feeds_products: bool = False
    gathers_work: bool = False


def axes_of_rows(graph: OpGraph, mesh: Mesh) -> list[frozenset[str]]:
    """Return the mesh axes of each row of the table of collectives. A row without groups has all axes."""
    set_axes = [frozenset(group_axes(groups, mesh)) for groups in graph.group_sets]
    all_axes = frozenset(name for name, size in mesh.axes.items() if size > 1)
    return [set_axes[row] if row >= 0 else all_axes for row in graph.collectives.group_set.tolist()]


def traffic_of(workload: Workload, mesh: Mesh) -> dict[str, Traffic]:
    """Return the traffic along each axis. O(nodes + edges). Raises ``UnsupportedError`` for groups without
    axes.
    """
    traffic = {name: Traffic() for name in mesh.names}
    for graph in workload.classes:
        rows = axes_of_rows(graph, mesh)
        table = graph.collectives
        products = np.isin(graph.op_class, _PRODUCTS)
        products[graph.contractions.node] = True
        for name, row in traffic.items():
            is_along = np.array([name in axes for axes in rows], np.bool_)
            if not is_along.any():
                continue
            row.kinds |= {CollectiveKind(kind) for kind in np.unique(table.kind[is_along]).tolist()}
            sums = table.node[is_along & (table.kind == CollectiveKind.ALL_REDUCE)]
            users = reachable(graph, sums, all_deps(graph), forward=True)
            row.feeds_products |= bool((users & products).any())
            gathers = table.node[is_along & (table.kind == CollectiveKind.ALL_GATHER)]
            producers = reachable(graph, gathers, graph.data_deps, forward=False)
            row.gathers_work |= bool((producers & products).any())
        for permutation in graph.permutations:
            for name in permutation_axes(permutation, mesh):
                traffic[name].messages += 1
    return traffic


def reachable(graph: OpGraph, nodes: NDArray[np.integer], deps: RaggedArray, *, forward: bool) -> BoolArray:
    """Return a mask of the nodes that depend on ``nodes`` (if ``forward``), or on which ``nodes`` depend. The
    given ``nodes`` are not included.

    O(nodes + edges).
    """
    is_reached: list[bool] = [False] * len(graph)
    starts = {int(node) for node in nodes}
    before = deps.to_lists()
    order: list[int] = list(topological_order(graph)) if starts else []
    if forward:
        for node in order:
            is_reached[node] = any(is_reached[dep] or dep in starts for dep in before[node])
    else:
        for node in reversed(order):
            if is_reached[node] or node in starts:
                for dep in before[node]:
                    is_reached[dep] = True
    return np.array(is_reached, np.bool_)


def rule_of(name: str, traffic: Traffic) -> Rule | None:
    """Return the rescaling rule of an axis by the name of the axis; None for an unknown name. If the traffic
    of a data-parallel axis has reduce-scatters, the rule is ``shard``.
    """
    rule = _RULES.get(name.lower().rstrip("0123456789"))
    return "shard" if rule == "data" and traffic.kinds & set(GROWS) else rule


def named_by_traffic(workload: Workload, mesh: Mesh, wanted: Mapping[str, int]) -> Mesh:
    """Return the mesh with axes named by their traffic (such as ``dp`` or ``tp``). If the mesh has a single
    axis, it gets the only name in ``wanted``.

    Raises ``UnsupportedError`` if the traffic does not identify the axes.
    """
    if len(mesh.axes) == 1 and len(wanted) == 1:
        return Mesh((next(iter(wanted)),), mesh.sizes)
    traffic = traffic_of(workload, mesh)
    is_program = workload.metadata.get("format", "") in {"stablehlo", "hlo"}
    names = [_name(traffic[name], is_program=is_program) for name in mesh.names]
    if "" in names or len(set(names)) < len(names):
        shape = "x".join(map(str, mesh.sizes))
        axes: list[str] = []
        for row, size in zip(traffic.values(), mesh.sizes, strict=True):
            kinds = sorted(kind.name.lower() for kind in row.kinds) + ["messages"] * bool(row.messages)
            axes.append(f"an axis of {size} with {', '.join(kinds) or 'no traffic'}")
        raise UnsupportedError(
            f"the traffic does not identify the axes of the {shape} mesh: {'; '.join(axes)}",
            position="process groups",
            hint="name them, outermost first: `mesh=dp=2,tp=4`",
        )
    return Mesh(tuple(names), mesh.sizes)


def _name(traffic: Traffic, *, is_program: bool) -> str:
    """Return the name of an axis that its traffic suggests, such as ``tp``; empty if unknown.

    Reductions identify the axis ``tp`` only in a compiled program (``is_program``). In a recording of several
    steps, some computation follows every reduction, so reductions identify no axis.
    """
    if traffic.messages:
        return "" if traffic.kinds - set(SUMS) else "pp"
    if traffic.kinds & set(GROWS):
        return "" if not is_program else "tp" if traffic.gathers_work else "fsdp"
    if traffic.kinds == {CollectiveKind.ALL_TO_ALL}:
        return "ep"
    if not traffic.kinds or traffic.kinds - set(SUMS):
        return ""
    if not traffic.feeds_products:
        return "dp"
    return "tp" if is_program else ""


def changed_axes(mesh: Mesh, wanted: Mapping[str, int]) -> Iterator[str]:
    """Return the axes that change their size, outermost first."""
    return (name for name, size in mesh.axes.items() if wanted.get(name, size) != size)
