"""Checks of op graphs in both formats: unique ids, acyclic dependencies, legal costs and valid references.

A strict reader raises at the first fault. A lenient one continues, and ``hespas-validate check`` finds the
faults in the graph. A dependency on a missing node cannot be represented in the graph, so the reader reports
it (``ET006``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, prod

import numpy as np
from numpy.typing import NDArray

from hespas.converters.op_graph.document import FIELD_NAMES, MAX_ELEMENTS
from hespas.converters.replica_groups import MAX_DEVICES, check_groups
from hespas.graph import ABSENT, Diagnostics, NodeKind, OpGraph, TensorTypes
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError
from hespas.graph.passes import find_cycle, leaves_loop

__all__ = [
    "FaultReporter",
    "check_cycle",
    "check_ids",
    "check_values",
    "decode_ranks",
    "encode_ranks",
    "oversized_type",
    "repeated_ids",
]

_Run = tuple[int, int]


def encode_ranks(rank_class: SmallIntArray) -> tuple[_Run, ...]:
    """Return the class of each rank as runs ``[class, number of ranks]``. O(ranks); O(1) if all ranks have
    one class.

    Ranks of the job that are not in the file have class -1.
    """
    if 0 in rank_class.strides or not len(rank_class):
        return ((int(rank_class[0]), len(rank_class)),) if len(rank_class) else ()
    starts = np.flatnonzero(np.diff(rank_class, prepend=rank_class[0] - 1))
    lengths = np.diff(starts, append=len(rank_class))
    return tuple(zip(rank_class[starts].tolist(), lengths.tolist(), strict=True))


def decode_ranks(runs: Sequence[_Run] | None, num_ranks: int | None, classes: int) -> SmallIntArray:
    """Return the class of each rank. Raises ``ValueError`` if runs, number of ranks and classes contradict
    each other.
    """
    if runs is None:
        if classes != 1:
            raise ValueError(f"rank_class must assign ranks to the {classes} classes")
        runs = ((0, 1 if num_ranks is None else num_ranks),)
    total = sum(count for _, count in runs)
    if num_ranks is not None and total != num_ranks:
        raise ValueError(f"rank_class covers {total} ranks, but num_ranks is {num_ranks}")
    if not 1 <= total <= MAX_DEVICES:
        raise ValueError(f"{total} ranks; the supported range is 1 to {MAX_DEVICES:,}")
    wrong = [index for index, _ in runs if not ABSENT <= index < classes]
    if wrong:
        raise ValueError(f"rank_class names class {wrong[0]}, but the last class is {classes - 1}")
    if all(index == ABSENT or not count for index, count in runs):
        raise ValueError("rank_class names no class: the file has no rank of the job")
    if len(runs) == 1:
        return np.broadcast_to(np.int32(runs[0][0]), (total,))
    return np.repeat(
        np.array([index for index, _ in runs], np.int32), np.array([count for _, count in runs], np.int64)
    )


_SHOWN = 8


@dataclass(frozen=True, slots=True)
class FaultReporter:
    """Receiver of the structural faults of one file. If ``lenient``, it records them as diagnostics, else it
    raises an error.
    """

    path: str
    lenient: bool
    diagnostics: Diagnostics

    def report(self, position: str, message: str, hint: str) -> None:
        """Raise ``FormatError`` unless lenient. A lenient reader ignores the fault, because the checker finds
        it in the graph.
        """
        if not self.lenient:
            raise FormatError(message, path=self.path, position=position, hint=hint)

    def report_lost(self, code: str, position: str, message: str, hint: str, count: int) -> None:
        """Raise ``FormatError`` or, if lenient, record ``count`` faults that cannot be found in the graph."""
        self.report(position, message, hint)
        self.diagnostics.error(code, position, message, path=self.path, count=count)


def repeated_ids(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the ids that occur more than once, ascending. O(nodes), or O(nodes log nodes) if ids are not
    sorted.
    """
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return np.empty(0, np.uint64)
    values, counts = np.unique(ids, return_counts=True)
    return values[counts > 1]


def check_ids(ids: NDArray[np.uint64], fault: FaultReporter) -> None:
    """Report a fault if two nodes have the same id."""
    repeated = repeated_ids(ids)
    if len(repeated):
        first = int(repeated[0])
        fault.report(
            f"node {first}",
            f"node id {first} occurs {int((ids == first).sum())} times",
            "give every node its own id, or leave ids out to number nodes by position",
        )


def check_cycle(graph: OpGraph, fault: FaultReporter) -> None:
    """Report a fault if dependencies form a cycle. O(nodes) if nodes are in a valid order."""
    cycle = find_cycle(graph)
    if not cycle:
        return
    ids = [int(graph.id[node]) for node in cycle]
    shown = " -> ".join(map(str, ids[:_SHOWN]))
    rest = f" -> ... ({len(ids) - _SHOWN} more)" if len(ids) > _SHOWN else ""
    fault.report(
        f"node {ids[0]}",
        f"dependency cycle: {shown}{rest} -> {ids[0]}",
        "remove one of these dependencies",
    )


_SURELY_FITTING_DIGITS = 62.5
"""Binary digits of a number of elements; sums of logarithms are not exact."""

_NODE_COSTS = (
    "flops",
    "useful_flops",
    "transcendentals",
    "bytes_read",
    "bytes_written",
    "duration_ns",
    "executions",
)
_MOST_COST = 1e60
"""Largest cost of a node, far above that of any workload: products and sums of costs stay finite."""
_COST_HINT = "use costs, sizes and trip counts from 0 to 1e60; null (NaN) means unknown"
_EXTENT_HINT = "use extents of 0 or more; -1 means unknown"
_WINDOW_HINT = "use the number of kernel positions, a divisor of k; 1 means unknown, or a matmul"
_SHAPE_HINT = "correct the shape: no machine can hold such a tensor"
_RANK_HINT = "state num_ranks, and each rank below num_ranks and at most once in a group set"


def check_values(graph: OpGraph, num_ranks: int, fault: FaultReporter, where: str) -> None:
    """Report all values of a graph on which passes, simulators and writers cannot rely. O(size).

    Costs must be between 0 and :data:`_MOST_COST`. Loops must carry values between their own nodes. Only
    communicating nodes may have collectives or messages, and groups and permutations must fit ``num_ranks``.
    ``where`` is the prefix for positions of tables: ``$.`` or ``field``.
    """
    for name in _NODE_COSTS:
        values: FloatArray = getattr(graph, name)
        illegal = _first_illegal(values)
        if illegal >= 0:
            fault.report(
                f"node {graph.id[illegal]}",
                f"{FIELD_NAMES.get(name, name)} is {values[illegal]:g}",
                _COST_HINT,
            )
    _check_table_costs(graph, fault)
    _check_rows(graph.regions.trips, "trips", f"{where}regions", fault)
    _check_rows(graph.types.bytes, "bytes", f"{where}types", fault)
    oversized = oversized_type(graph.types)
    if oversized >= 0:
        fault.report(f"{where}types[{oversized}]", "the tensor has more than 2**63 elements", _SHAPE_HINT)
    _check_types(graph, fault, where)
    _check_carried(graph, fault)
    _check_communication(graph, fault)
    for group_row, groups in enumerate(graph.group_sets):
        try:
            check_groups(groups, num_ranks)
        except ValueError as error:
            table = graph.collectives
            owner = _owner(graph, table.node, table.group_set, group_row)
            fault.report(owner or f"{where}group_sets[{group_row}]", f"groups: {error}", _RANK_HINT)
    for row, permutation in enumerate(graph.permutations):
        if permutation.num_ranks > num_ranks:
            fault.report(
                _owner(graph, graph.p2p.node, graph.p2p.permutation, row) or f"{where}permutations[{row}]",
                f"the permutation is over {permutation.num_ranks} ranks, the job has {num_ranks}",
                _RANK_HINT,
            )


def oversized_type(types: TensorTypes) -> int:
    """Return the first tensor type with more elements than the file formats can state; -1 for none.
    O(extents).
    """
    owners = np.repeat(np.arange(len(types)), np.diff(types.dim_offsets))
    digits = np.bincount(owners, weights=np.log2(np.maximum(types.dims, 1)), minlength=len(types))
    for row in np.flatnonzero(digits > _SURELY_FITTING_DIGITS).tolist():
        exceeds = digits[row] > _SURELY_FITTING_DIGITS + 1
        if exceeds or prod(max(extent, 1) for extent in types.shape(row)) > MAX_ELEMENTS:
            return int(row)
    return -1


def _check_types(graph: OpGraph, fault: FaultReporter, where: str) -> None:
    """Report tensor types that are equal but differ in size in bytes. Other formats repeat the type at each
    tensor, so that they cannot distinguish them.
    """
    types = graph.types
    sizes: dict[tuple[int, tuple[int, ...], bool, str], tuple[int, float]] = {}
    for type_row, (code, size) in enumerate(zip(types.dtype.tolist(), types.bytes.tolist(), strict=True)):
        encoding = graph.strings[int(types.encoding[type_row])]
        first, before = sizes.setdefault(
            (code, types.shape(type_row), bool(types.bounded[type_row]), encoding), (type_row, size)
        )
        if size != before and not (isnan(size) and isnan(before)):
            message = f"the type is already row {first} with {before:g} bytes, but has {size:g} bytes here"
            fault.report(
                f"{where}types[{type_row}]", message, "state each type once, with the size of a tensor"
            )
            return


def _check_carried(graph: OpGraph, fault: FaultReporter) -> None:
    """Check that each value carried by a loop is produced and used inside that loop."""
    outside = np.flatnonzero(leaves_loop(graph))
    if not len(outside):
        return
    table = graph.regions
    carried_row = int(outside[0])
    region = int(table.carried_region[carried_row])
    maker, user = (
        int(graph.id[ends[carried_row]]) for ends in (table.carried_producer, table.carried_consumer)
    )
    label = graph.strings[int(table.label[region])]
    fault.report(
        f"node {user}",
        f"loop {label or region} carries a value from node {maker} to node {user}, but does not contain both",
        "correct the regions of the nodes, or remove the entry: carried values join nodes of one loop",
    )


def _check_communication(graph: OpGraph, fault: FaultReporter) -> None:
    """Check that only communicating nodes have collectives or messages, and that their numbers are within
    range.
    """
    tables = (
        ("a collective", graph.collectives.node, (NodeKind.COLLECTIVE,)),
        ("a message", graph.p2p.node, (NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)),
    )
    for what, nodes, kinds in tables:
        other = np.flatnonzero(~np.isin(graph.kind[nodes], [int(kind) for kind in kinds]))
        if len(other):
            node = int(nodes[other[0]])
            kind = NodeKind(int(graph.kind[node])).name.lower()
            names = ", ".join(member.name.lower() for member in kinds)
            message = f"{what} is described for a node of kind {kind}"
            fault.report(
                f"node {graph.id[node]}", message, f"use one of the kinds {names}, or remove the description"
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
            fault.report(f"node {graph.id[owners[row]]}", message, "use a number of 0 or more; -1 means none")


def _first_illegal(values: FloatArray) -> int:
    """Return the first row with an impossible cost: below 0 or above :data:`_MOST_COST`. Return -1 for none;
    NaN is possible.
    """
    if not len(values):
        return -1
    seen = values[:1] if 0 in values.strides else values
    low, high = float(np.fmin.reduce(seen)), float(np.fmax.reduce(seen))
    if not (low < 0 or high > _MOST_COST):
        return -1
    return int(np.argmax((seen < 0) | (seen > _MOST_COST)))


def _check_table_costs(graph: OpGraph, fault: FaultReporter) -> None:
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
    uneven = np.flatnonzero(~contractions.has_even_window)
    if len(uneven):
        row = int(uneven[0])
        message = f"window is {contractions.window[row]}, and k is {contractions.k[row]}"
        fault.report(f"node {graph.id[contractions.node[row]]}", message, _WINDOW_HINT)


def _check_rows(values: FloatArray, name: str, table: str, fault: FaultReporter) -> None:
    row = _first_illegal(values)
    if row >= 0:
        fault.report(f"{table}[{row}]", f"{name} is {values[row]:g}", _COST_HINT)


def _owner(graph: OpGraph, nodes: SmallIntArray, rows: SmallIntArray, row: int) -> str:
    """Return the position, for an error, of the first node that uses a row of a table; empty if the row is
    unused.
    """
    users = np.flatnonzero(rows == row)
    return f"node {graph.id[nodes[users[0]]]}" if len(users) else ""
