"""Checks of values that both spellings share: costs are legal, tables fit each other, groups stay in the job.

A strict read raises. A lenient one goes on: the values stand in the graph for the rules to find.
"""

from __future__ import annotations

from math import isnan, prod

import numpy as np

from hespas.converters.op_graph.spelling import MAX_ELEMENTS
from hespas.converters.op_graph.structure import Fault
from hespas.converters.replica_groups import check_groups
from hespas.graph import NodeKind, OpGraph, TensorTypes
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.passes import leaves_loop

__all__ = ["check_values", "oversized_type"]

_SURELY_FITTING_DIGITS = 62.5
"""Binary digits of a number of elements; sums of logarithms are not exact."""

_NODE_COSTS = (
    "flops",
    "useful_flops",
    "transcendentals",
    "bytes_read",
    "bytes_written",
    "duration_ns",
    "multiplicity",
)
_COST_HINT = "costs, sizes and trip counts are 0 or more and finite; null (NaN) says unknown"
_EXTENT_HINT = "extents are 0 or more; -1 says unknown"
_SHAPE_HINT = "no machine could hold it: correct the shape"
_RANK_HINT = "state num_ranks, with every rank once in a group set at most and below num_ranks"


def check_values(graph: OpGraph, num_ranks: int, fault: Fault, where: str) -> None:
    """Costs are neither negative nor infinite, loops carry values within themselves, what communicates
    is of a kind that does, groups and permutations fit ``num_ranks``. O(size).

    Passes, simulators and writers rely on it.

    ``where`` leads to a table of the graph in positions: ``$.`` or ``field``.
    """
    _check_node_costs(graph, fault)
    _check_table_costs(graph, fault)
    _check_rows(graph.regions.trips, "trips", f"{where}regions", fault)
    _check_rows(graph.types.bytes, "bytes", f"{where}types", fault)
    oversized = oversized_type(graph.types)
    if oversized >= 0:
        fault.report(f"{where}types[{oversized}]", "the tensor has more than 2**63 elements", _SHAPE_HINT)
    _check_types(graph, fault, where)
    _check_carried(graph, fault)
    _check_communication(graph, fault)
    _check_group_sets(graph, num_ranks, fault, where)
    for row, permutation in enumerate(graph.permutations):
        if permutation.num_ranks > num_ranks:
            fault.report(
                _owner(graph, graph.p2p.node, graph.p2p.permutation, row) or f"{where}permutations[{row}]",
                f"the permutation is over {permutation.num_ranks} ranks, the job has {num_ranks}",
                _RANK_HINT,
            )


def oversized_type(types: TensorTypes) -> int:
    """The first type of more elements than both spellings can state, -1 for none. O(extents)."""
    owners = np.repeat(np.arange(len(types)), np.diff(types.dim_offsets))
    digits = np.bincount(owners, weights=np.log2(np.maximum(types.dims, 1)), minlength=len(types))
    for row in np.flatnonzero(digits > _SURELY_FITTING_DIGITS).tolist():
        exceeds = digits[row] > _SURELY_FITTING_DIGITS + 1
        if exceeds or prod(max(extent, 1) for extent in types.shape(row)) > MAX_ELEMENTS:
            return int(row)
    return -1


def _check_types(graph: OpGraph, fault: Fault, where: str) -> None:
    """A type has one size: formats that spell it out at each tensor know no rows."""
    types = graph.types
    sizes: dict[tuple[int, tuple[int, ...], bool, str], tuple[int, float]] = {}
    for row, (code, size) in enumerate(zip(types.dtype.tolist(), types.bytes.tolist(), strict=True)):
        encoding = graph.strings[int(types.encoding[row])]
        first, before = sizes.setdefault(
            (code, types.shape(row), bool(types.bounded[row]), encoding), (row, size)
        )
        if size != before and not (isnan(size) and isnan(before)):
            message = f"the type stands in row {first} already, of {before:g} bytes there and {size:g} here"
            fault.report(f"{where}types[{row}]", message, "state each type once, with the size of a tensor")
            return


def _check_carried(graph: OpGraph, fault: Fault) -> None:
    outside = np.flatnonzero(leaves_loop(graph))
    if not len(outside):
        return
    table = graph.regions
    row = int(outside[0])
    region = int(table.carried_region[row])
    maker, user = (int(graph.id[ends[row]]) for ends in (table.carried_producer, table.carried_consumer))
    label = graph.strings[int(table.label[region])]
    fault.report(
        f"node {user}",
        f"loop {label or region} carries a value from node {maker} to node {user}, and not both are in it",
        "carried values join nodes of one loop: correct the regions of the nodes, or drop the entry",
    )


def _check_communication(graph: OpGraph, fault: Fault) -> None:
    """Who is described as communicating does; streams, channels and tags are numbers."""
    tables = (
        ("a collective", graph.collectives.node, (NodeKind.COLLECTIVE,)),
        ("a message", graph.p2p.node, (NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)),
    )
    for what, nodes, kinds in tables:
        other = np.flatnonzero(~np.isin(graph.kind[nodes], [int(kind) for kind in kinds]))
        if len(other):
            node = int(nodes[other[0]])
            kind = NodeKind(int(graph.kind[node])).name.lower()
            names = ", ".join(each.name.lower() for each in kinds)
            message = f"{what} is described for a node of kind {kind}"
            fault.report(
                f"node {graph.id[node]}", message, f"state one of the kinds {names}, or leave it out"
            )
    numbers: tuple[tuple[str, SmallIntArray, SmallIntArray | IntArray], ...] = (
        ("stream", np.arange(len(graph), dtype=np.int32), graph.stream),
        ("channel", graph.collectives.node, graph.collectives.channel),
        ("tag", graph.p2p.node, graph.p2p.tag),
    )
    for name, owners, values in numbers:
        below = np.flatnonzero(values < -1)
        if len(below):
            row = int(below[0])
            message = f"{name} is {int(values[row])}"
            fault.report(f"node {graph.id[owners[row]]}", message, "state a number from 0 on; -1 says none")


def _first_illegal(values: FloatArray) -> int:
    """The first row with a cost below 0 or infinite, -1 for none. NaN is legal."""
    if not len(values):
        return -1
    seen = values[:1] if 0 in values.strides else values
    low, high = float(np.fmin.reduce(seen)), float(np.fmax.reduce(seen))
    if not (low < 0 or high == np.inf):
        return -1
    return int(np.argmax((seen < 0) | (seen == np.inf)))


def _check_node_costs(graph: OpGraph, fault: Fault) -> None:
    for name in _NODE_COSTS:
        values: FloatArray = getattr(graph, name)
        row = _first_illegal(values)
        if row >= 0:
            fault.report(f"node {graph.id[row]}", f"{name} is {values[row]:g}", _COST_HINT)


def _check_table_costs(graph: OpGraph, fault: Fault) -> None:
    collectives, p2p, contractions = graph.collectives, graph.p2p, graph.contractions
    columns: tuple[tuple[str, SmallIntArray, FloatArray], ...] = (
        ("comm_bytes", collectives.node, collectives.comm_bytes),
        ("operand_bytes", collectives.node, collectives.operand_bytes),
        ("result_bytes", collectives.node, collectives.result_bytes),
        ("comm_bytes", p2p.node, p2p.comm_bytes),
        ("flops", contractions.node, contractions.flops),
        ("useful_flops", contractions.node, contractions.useful_flops),
    )
    for name, nodes, values in columns:
        row = _first_illegal(values)
        if row >= 0:
            fault.report(f"node {graph.id[nodes[row]]}", f"{name} is {values[row]:g}", _COST_HINT)
    for name in ("batch", "m", "n", "k"):
        extents: IntArray = getattr(contractions, name)
        if len(extents) and int(extents.min()) < -1:
            row = int(np.argmax(extents < -1))
            node = graph.id[contractions.node[row]]
            fault.report(f"node {node}", f"extent {name} is {extents[row]}", _EXTENT_HINT)


def _check_rows(values: FloatArray, name: str, table: str, fault: Fault) -> None:
    row = _first_illegal(values)
    if row >= 0:
        fault.report(f"{table}[{row}]", f"{name} is {values[row]:g}", _COST_HINT)


def _owner(graph: OpGraph, nodes: SmallIntArray, rows: SmallIntArray, row: int) -> str:
    """The first node that uses a row, as a position; empty where none does."""
    users = np.flatnonzero(rows == row)
    return f"node {graph.id[nodes[users[0]]]}" if len(users) else ""


def _check_group_sets(graph: OpGraph, num_ranks: int, fault: Fault, where: str) -> None:
    for row, groups in enumerate(graph.group_sets):
        try:
            check_groups(groups, num_ranks)
        except ValueError as error:
            table = graph.collectives
            owner = _owner(graph, table.node, table.group_set, row)
            fault.report(owner or f"{where}group_sets[{row}]", f"groups: {error}", _RANK_HINT)
