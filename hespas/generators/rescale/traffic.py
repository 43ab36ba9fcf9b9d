"""What moves along each axis of a mesh, and what an axis of such traffic is called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hespas.generators.rescale.mesh import Mesh, group_axes, permutation_axes
from hespas.graph import CollectiveKind, OpClass, OpGraph, Workload
from hespas.graph.columns import BoolArray, RaggedArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import all_deps, topological_order

__all__ = [
    "GROWS",
    "SUMS",
    "Rule",
    "Traffic",
    "axes_of_rows",
    "changed_axes",
    "named",
    "reached",
    "rule_of",
    "traffic_of",
]

Rule = Literal["data", "shard", "tensor", "pipeline"]

_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("dp", "data", "ddp", "replica", "batch"), "data"),
        **dict.fromkeys(("fsdp", "zero", "shard", "dp_shard", "sdp"), "shard"),
        **dict.fromkeys(("tp", "model", "tensor", "mp", "sp", "cp", "ep", "expert", "context"), "tensor"),
        **dict.fromkeys(("pp", "pipe", "pipeline", "stage"), "pipeline"),
    }
)
"""Name of an axis -> how the work of a rank changes with its size."""

SUMS = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.BROADCAST,
    CollectiveKind.REDUCE,
    CollectiveKind.BARRIER,
)
"""Collectives whose buffers do not depend on how many ranks take part."""
GROWS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE_SCATTER_BLOCK)
"""Collectives that join or split buffers by the number of ranks."""

_PRODUCTS = (OpClass.CONTRACTION, OpClass.CONVOLUTION, OpClass.ATTENTION)


@dataclass(slots=True)
class Traffic:
    """Collectives and messages along one axis, over all classes; ``feeds_products``: results of sums go into
    products of matrices; ``gathers_work``: what is gathered was computed by some.
    """

    kinds: set[CollectiveKind] = field(default_factory=set[CollectiveKind])
    messages: int = 0
    feeds_products: bool = False
    gathers_work: bool = False


def axes_of_rows(graph: OpGraph, mesh: Mesh) -> list[frozenset[str]]:
    """The axes of each row of the table of collectives; groups that nobody stated are all ranks."""
    of_set = [frozenset(group_axes(groups, mesh)) for groups in graph.group_sets]
    everybody = frozenset(name for name, size in mesh.axes if size > 1)
    return [of_set[row] if row >= 0 else everybody for row in graph.collectives.group_set.tolist()]


def traffic_of(workload: Workload, mesh: Mesh) -> dict[str, Traffic]:
    """The traffic along each axis. O(nodes + edges). Raises ``UnsupportedError`` for groups of no axes."""
    found = {name: Traffic() for name in mesh.names}
    for graph in workload.classes:
        rows = axes_of_rows(graph, mesh)
        for name, row in found.items():
            here = np.array([name in axes for axes in rows], np.bool_)
            if here.any():
                _add(row, graph, here)
        for permutation in graph.permutations:
            for name in permutation_axes(permutation, mesh):
                found[name].messages += 1
    return found


def _add(row: Traffic, graph: OpGraph, here: BoolArray) -> None:
    table = graph.collectives
    row.kinds |= {CollectiveKind(kind) for kind in np.unique(table.kind[here]).tolist()}
    products = np.isin(graph.op_class, _PRODUCTS)
    products[graph.contractions.node] = True
    deps = all_deps(graph)
    sums = table.node[here & (table.kind == CollectiveKind.ALL_REDUCE)]
    row.feeds_products |= bool((reached(graph, sums, deps, forward=True) & products).any())
    gathers = table.node[here & (table.kind == CollectiveKind.ALL_GATHER)]
    row.gathers_work |= bool((reached(graph, gathers, graph.data_deps, forward=False) & products).any())


def reached(graph: OpGraph, nodes: NDArray[np.integer], deps: RaggedArray, *, forward: bool) -> BoolArray:
    """The nodes that wait for some (or that those wait for), themselves left out. O(nodes + edges)."""
    found: list[bool] = [False] * len(graph)
    starts = {int(node) for node in nodes}
    before = deps.to_lists()
    order: list[int] = list(topological_order(graph)) if starts else []
    if forward:
        for node in order:
            found[node] = any(found[each] or each in starts for each in before[node])
    else:
        for node in reversed(order):
            if found[node] or node in starts:
                for each in before[node]:
                    found[each] = True
    return np.array(found, np.bool_)


def rule_of(name: str, traffic: Traffic) -> Rule | None:
    """The rule of an axis by its name, and by its traffic where a data axis shards what it sums; None for a
    name that says nothing.
    """
    rule = _RULES.get(name.lower().rstrip("0123456789"))
    return "shard" if rule == "data" and traffic.kinds & set(GROWS) else rule


def named(workload: Workload, mesh: Mesh, wanted: Mapping[str, int]) -> Mesh:
    """The mesh with its axes called by their traffic; one axis alone is called what is ``wanted`` of it.

    Raises ``UnsupportedError`` where the traffic does not tell the axes apart.
    """
    if len(mesh.axes) == 1 and len(wanted) == 1:
        return Mesh(((next(iter(wanted)), mesh.sizes[0]),))
    traffic = traffic_of(workload, mesh)
    is_program = workload.metadata.get("format", "") in {"stablehlo", "hlo"}
    names = [_name(traffic[name], is_program=is_program) for name in mesh.names]
    if "" in names or len(set(names)) < len(names):
        shape = "x".join(map(str, mesh.sizes))
        told = "; ".join(_told(row, size) for row, size in zip(traffic.values(), mesh.sizes, strict=True))
        raise UnsupportedError(
            f"the traffic does not say what the axes of the {shape} mesh are: {told}",
            position="process groups",
            hint="name them, outermost first: `mesh=dp=2,tp=4`",
        )
    return Mesh(tuple(zip(names, mesh.sizes, strict=True)))


def _name(traffic: Traffic, *, is_program: bool) -> str:
    """``tp`` for sums only where a program says so: a recording of several steps computes after each sum."""
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


def _told(traffic: Traffic, size: int) -> str:
    names = sorted(kind.name.lower() for kind in traffic.kinds) + ["messages"] * bool(traffic.messages)
    return f"an axis of {size} with {', '.join(names) or 'no traffic'}"


def changed_axes(mesh: Mesh, wanted: Mapping[str, int]) -> Iterator[str]:
    """The axes that get another size, outermost first."""
    return (name for name, size in mesh.axes if wanted.get(name, size) != size)
