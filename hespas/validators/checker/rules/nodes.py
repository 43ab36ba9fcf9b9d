"""Rules of a single graph: ids, cycles, kinds, consistent tables, costs and durations."""

from __future__ import annotations

import numpy as np

from hespas.converters.chakra.preserve import simulated_ns
from hespas.graph import DYNAMIC, NodeKind, OpClass, OpGraph, Resource, Severity
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import clipped
from hespas.graph.passes import all_deps, find_cycle, leaves_loop
from hespas.graph.quantised import QUANTISED, accumulator_sums, parse_quantised
from hespas.validators.checker.job import CheckedJob, RuleReport

__all__ = [
    "accumulators_fit",
    "acyclic",
    "communication_on_host",
    "compute_on_host",
    "duration_where_work",
    "is_kind",
    "known_kind",
    "known_trips",
    "legal_costs",
    "no_duplicate_dependency",
    "plausible_shape",
    "plausible_units",
    "positive_duration",
    "quantised_types",
    "tables_fit_nodes",
    "tensor_types",
    "unique_ids",
]

_MAX_LISTED = 20
_MAX_DEPENDENCIES = 4096
_MAX_ISOLATED_SHARE = 0.1
"""Real programs have few outputs without inputs or dependents."""
_COMMUNICATION = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)


def is_kind(graph: OpGraph, *kinds: NodeKind) -> BoolArray:
    """Return a mask of the nodes of the given kinds."""
    mask: BoolArray = np.isin(graph.kind, [int(kind) for kind in kinds])
    return mask


def unique_ids(job: CheckedJob, report: RuleReport) -> None:
    """ET005: every node id of a graph is unique."""
    for index, graph in enumerate(job.classes):
        _, first, counts = np.unique(graph.id, return_index=True, return_counts=True)
        if len(first) == len(graph):
            continue
        again = np.ones(len(graph), np.bool_)
        again[first] = False
        total = int(counts[counts > 1].sum())
        report.nodes(index, again, f"its id is that of an earlier node ({total:,} nodes share ids)")


def acyclic(job: CheckedJob, report: RuleReport) -> None:
    """ET007: no node depends on itself, directly or through others."""
    for index, graph in enumerate(job.classes):
        deps = all_deps(graph)
        itself = deps.values[deps.values == deps.row_ids]
        report.nodes(index, itself, "it depends on itself")
        cycle = () if len(itself) else find_cycle(graph)
        if cycle:
            ids = [str(int(graph.id[node])) for node in cycle]
            more = f" -> ... ({len(ids) - _MAX_LISTED:,} more)" if len(ids) > _MAX_LISTED else ""
            path = " -> ".join(ids[:_MAX_LISTED]) + more
            first = np.array(cycle[:1], np.int64)
            report.nodes(index, first, f"dependency cycle, each waits for the next: {path} -> {ids[0]}")


def no_duplicate_dependency(job: CheckedJob, report: RuleReport) -> None:
    """ET008: a node names each dependency once, and in one list only."""
    for index, graph in enumerate(job.classes):
        nodes = max(len(graph), 1)
        # (node, dependency) as one number each, ascending
        data, control = (
            np.sort(deps.row_ids * nodes + deps.values) for deps in (graph.data_deps, graph.control_deps)
        )
        for pairs, what in ((data, "data"), (control, "control")):
            again = pairs[1:][pairs[1:] == pairs[:-1]]
            report.nodes(index, again // nodes, f"a {what} dependency is listed more than once")
        shared: IntArray = np.intersect1d(data, control)
        report.nodes(index, shared // nodes, "a node is a data and a control dependency of it")


def known_kind(job: CheckedJob, report: RuleReport) -> None:
    """ET009: every node has a kind; ASTRA-sim also refuses metadata nodes."""
    for index, graph in enumerate(job.classes):
        report.nodes(index, is_kind(graph, NodeKind.INVALID), "its type is INVALID")
        if job.profile == "astra-sim":
            metadata = is_kind(graph, NodeKind.METADATA)
            report.nodes(index, metadata, "it is a METADATA node, on which ASTRA-sim's statistics abort")


def communication_on_host(job: CheckedJob, report: RuleReport) -> None:
    """ET016: communication is not marked as an operation of the CPU."""
    for index, graph in enumerate(job.classes):
        mask = is_kind(graph, *_COMMUNICATION) & (graph.resource == int(Resource.HOST))
        report.nodes(index, mask, "communication is marked is_cpu_op, on which ASTRA-sim aborts")


def compute_on_host(job: CheckedJob, report: RuleReport) -> None:
    """ET017: no compute node runs on the CPU."""
    for index, graph in enumerate(job.classes):
        mask = is_kind(graph, NodeKind.COMPUTE) & (graph.resource == int(Resource.HOST))
        report.nodes(index, mask, "it runs on the CPU: ASTRA-sim loses its statistics, and may abort")


def tables_fit_nodes(job: CheckedJob, report: RuleReport) -> None:
    """GR004: each row of the communication tables belongs to one communicating node, and carried values to
    nodes of their loop.
    """
    for index, graph in enumerate(job.classes):
        for rows, kinds, what in (
            (graph.collectives.node, (NodeKind.COLLECTIVE,), "collective"),
            (graph.p2p.node, (NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE), "message"),
        ):
            counts = np.bincount(rows, minlength=len(graph))
            wrong = (counts > 0) & ~is_kind(graph, *kinds)
            report.nodes(index, wrong, f"a {what} is described for a node of another kind")
            report.nodes(index, counts > 1, f"more than one {what} is described for it")
        outside = leaves_loop(graph)
        if outside.any():
            consumers = graph.regions.carried_consumer[outside]
            report.nodes(index, consumers, "a loop carries a value to it from or to outside of that loop")


def tensor_types(job: CheckedJob, report: RuleReport) -> None:
    """GR007: no extent of a tensor is negative."""
    for index, graph in enumerate(job.classes):
        types = graph.types
        owner = np.repeat(np.arange(len(types)), np.diff(types.dim_offsets))
        bad = np.zeros(len(types), np.bool_)
        bad[owner[types.dims < DYNAMIC]] = True
        owners = [lists.row_ids[bad[lists.values]] for lists in (graph.operands, graph.results)]
        report.nodes(index, np.concatenate(owners), "a tensor has a negative extent")


def quantised_types(job: CheckedJob, report: RuleReport) -> None:
    """GR009: the text of a quantised type is legal, and its storage type and scales fit the tensor."""
    for index, graph in enumerate(job.classes):
        types = graph.types
        for row, encoding in enumerate(types.encoding.tolist()):
            text = graph.strings[encoding]
            if not text.startswith(QUANTISED):
                continue
            kind, element = parse_quantised(text), types.dtype_of(row)
            if kind is None:
                fault = "is not legal: it needs known types, a rising range, finite scales above 0, and a >"
            elif kind.dtype != element:
                stored = kind.dtype.name if kind.dtype is not None else "another type"
                fault = f"stores {stored}, but the tensor has {element.name if element else 'no type'}"
            elif not kind.fits(types.shape(row)):
                fault = f"has {len(kind.scales):,} scales, which do not fit the shape {types.shape(row)}"
            else:
                continue
            owners = [lists.row_ids[lists.values == row] for lists in (graph.operands, graph.results)]
            report.nodes(index, np.concatenate(owners), f"the quantised type {clipped(text)} {fault}")


def accumulators_fit(job: CheckedJob, report: RuleReport) -> None:
    """GR008: sums of integer products cannot overflow their accumulator, by the ranges of the operands."""
    for index, graph in enumerate(job.classes):
        for bound in accumulator_sums(graph):
            if not bound.fits:
                report.nodes(index, bound.nodes, bound.overflow_text)


def plausible_shape(job: CheckedJob, report: RuleReport) -> None:
    """ET030: the graph shows no signs of a wrong construction."""
    for index, graph in enumerate(job.classes):
        deps = all_deps(graph)
        is_unlinked = deps.lengths == 0
        is_unlinked[deps.values] = False
        isolated = is_unlinked & ~is_kind(graph, NodeKind.METADATA) & (graph.op_class != int(OpClass.FREE))
        if len(graph) > 1 and isolated.all():
            report.add(f"none of the {len(graph):,} nodes depends on another", count=1)
        elif int(isolated.sum()) > _MAX_ISOLATED_SHARE * len(graph):
            count = int(isolated.sum())
            first = int(graph.id[int(np.flatnonzero(isolated)[0])])
            report.add(f"{count:,} nodes neither depend on a node nor have dependents, first {first}")
        many = deps.lengths > _MAX_DEPENDENCIES
        report.nodes(index, many, f"it has more than {_MAX_DEPENDENCIES:,} dependencies")
        useful = ~is_kind(graph, NodeKind.METADATA, NodeKind.INVALID)
        if len(graph) and not useful.any():
            report.add("no node computes or communicates", severity=Severity.WARNING)


_COSTS = (
    ("flops", "FLOPs"),
    ("useful_flops", "useful FLOPs"),
    ("transcendentals", "transcendentals"),
    ("bytes_read", "bytes read"),
    ("bytes_written", "bytes written"),
    ("duration_ns", "ns"),
    ("executions", "executions"),
)
_MAX_DURATION_NS = 1e12
_MICROSECOND_NS = 1000.0
_MAX_DIFFERENCE = 0.01
"""Relative difference that is allowed between the durations that simulators read and the exact ones."""


def legal_costs(job: CheckedJob, report: RuleReport) -> None:
    """GR001: costs, sizes and trip counts are not negative and not infinite, and windows divide K."""
    for index, graph in enumerate(job.classes):
        for name, unit in _COSTS:
            column: FloatArray = getattr(graph, name)
            report.nodes(index, column < 0, f"it states a negative number of {unit}")
            report.nodes(index, np.isinf(column), f"it states infinitely many {unit}")
        for table in (graph.collectives, graph.p2p):
            wrong = (table.comm_bytes < 0) | np.isinf(table.comm_bytes)
            report.nodes(index, table.node[wrong], "its message size is negative or infinite")
        products = graph.contractions
        uneven = products.node[~products.has_even_window]
        report.nodes(index, uneven, "the window of its convolution is not a divisor of K")
        trips = graph.regions.trips
        if (trips < 0).any():
            report.add(f"{int((trips < 0).sum()):,} loops run a negative number of times")


def plausible_units(job: CheckedJob, report: RuleReport) -> None:
    """GR003: durations look like nanoseconds and message sizes like whole bytes."""
    for index, graph in enumerate(job.classes):
        long = (graph.duration_ns > _MAX_DURATION_NS) & np.isfinite(graph.duration_ns)
        report.nodes(index, long, f"it takes more than {_MAX_DURATION_NS / 1e9:,.0f} s: is its unit ns?")
        for table in (graph.collectives, graph.p2p):
            fraction = np.isfinite(table.comm_bytes) & (table.comm_bytes != np.floor(table.comm_bytes))
            report.nodes(index, table.node[fraction], "its message size is not a whole number of bytes")


def duration_where_work(job: CheckedJob, report: RuleReport) -> None:
    """GR005: a node with costs has a duration above 0."""
    for index, graph in enumerate(job.classes):
        has_costs = (graph.flops > 0) | (graph.bytes_moved > 0) | (graph.transcendentals > 0)
        runs = is_kind(graph, NodeKind.COMPUTE) & (graph.executions != 0)
        report.nodes(index, has_costs & runs & (graph.duration_ns == 0), "it has costs but takes 0 ns")


def positive_duration(job: CheckedJob, report: RuleReport) -> None:
    """ET023: a compute node of a trace has a duration above 0 (ASTRA-sim takes 0 as 1 ns).

    A trace has no value for unknown durations, so they are 0. If it also states nanoseconds, they agree with
    the microseconds that simulators read. Durations are not used in roofline mode.
    """
    if job.system is not None and job.system.roofline:
        return
    for index, graph in enumerate(job.classes):
        on_device = is_kind(graph, NodeKind.COMPUTE) & (graph.resource == int(Resource.DEVICE))
        real = on_device & (graph.op_class != int(OpClass.FREE)) & (graph.executions != 0)
        read_ns = simulated_ns(graph)
        rank = job.first_ranks[index] if job.class_sizes[index] else None
        exact_ns = float(np.nansum(graph.duration_ns))
        total_ns = float(np.nansum(read_ns))
        lanes = len(
            np.unique(np.stack([graph.resource.astype(np.int64), graph.stream.astype(np.int64)]), axis=1).T
        )
        rounding_ns = 2 * _MICROSECOND_NS * lanes  # communication carries its remainders by itself
        if abs(total_ns - exact_ns) > max(_MAX_DIFFERENCE * exact_ns, rounding_ns):
            message = (
                f"duration_micros add up to {total_ns / 1e3:,.3f} us, which is what simulators read, "
                f"and duration_nanos to {exact_ns / 1e3:,.3f} us"
            )
            report.add(message, rank=rank)
        shares_a_microsecond = (graph.duration_ns > 0) & (graph.duration_ns < _MICROSECOND_NS)
        untimed = real & ~(read_ns > 0) & ~shares_a_microsecond
        if untimed.any() and np.array_equal(untimed, real):
            report.add(f"none of the {int(real.sum()):,} compute nodes has a duration", rank=rank)
        else:
            report.nodes(index, untimed, "its duration is missing or 0, which ASTRA-sim takes as 1 ns")


def known_trips(job: CheckedJob, report: RuleReport) -> None:
    """GR006: the trip count of every loop is known."""
    for graph in job.classes:
        rows = np.flatnonzero(np.isnan(graph.regions.trips))
        if len(rows):
            label = graph.strings[int(graph.regions.label[rows[0]])] or f"region {int(rows[0])}"
            report.add(f"{len(rows):,} loops run an unknown number of times, first {label}", count=len(rows))
