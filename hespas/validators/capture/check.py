"""Comparison of a captured program with a trace of its run, as in ``hespas-validate capture``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from hespas.converters.hlo.leaves import kind_of, module_leaves
from hespas.converters.measured_ops.workload import measured_workload
from hespas.graph import Diagnostics, OpClass, OpGraph, Profile, RegionKind, Workload
from hespas.graph.columns import IntArray, StringTableBuilder
from hespas.graph.errors import UsageError
from hespas.graph.passes import is_free, without_waits
from hespas.validators.accuracy.cases import events_of
from hespas.validators.accuracy.coverage import RULES, Matching, coverage_of
from hespas.validators.accuracy.matching import compiled_module, match_program
from hespas.validators.accuracy.programs import program_sizes, step_rows
from hespas.validators.accuracy.structure import regions_around
from hespas.validators.capture.messages import (
    RankMessage,
    node_messages,
    program_order_messages,
    sequence_difference,
)
from hespas.validators.capture.order import check_order
from hespas.validators.capture.result import (
    CaptureCheck,
    CollectiveDifference,
    OperationDifference,
    OrderCheck,
)

__all__ = ["check_capture"]

_MODULE_PREFIX = "hlo/"
"""Prefix of attachments that hold compiled modules."""
_PRESERVED_KINDS = frozenset(
    [
        "dot_general",
        "convolution",
        "ragged_dot",
        "fft",
        "sort",
        "top_k",
        "cholesky",
        "triangular_solve",
        "custom_call",
    ]
)
"""Operations whose number compilers preserve; they merge, copy and remove others."""
_COMMUNICATION_PREFIXES = ("all_", "reduce_scatter", "collective_", "send", "recv", "ragged_all")

_MERGED = "merged, copied or rewritten by the compiler; instructions that ran implement all of them"
_BRANCH = "in branches, not all of which were taken"
_CONDITION = "a loop condition that the runtime does not evaluate, because it knows the trip count"
_PIECES = "split into pieces by the runtime"
_REMOVED = "merged into others or removed by the compiler"
_SCOPE = "a framework scope, not an operation: profiles do not list it"
_CALLER = "a call around others, which the capture lists themselves"


@dataclass(slots=True, eq=False)
class _CaptureTotals:
    """Counts, differences and notes of a comparison of a capture with a trace, summed over the ranks compared
    so far.
    """

    ranks: list[int] = field(default_factory=list[int])
    runs: int = 0
    time_ns: float = 0.0
    joined_ns: float = 0.0
    captured: float = 0.0
    measured: float = 0.0
    operations: list[OperationDifference] = field(default_factory=list[OperationDifference])
    orders: list[OrderCheck] = field(default_factory=list[OrderCheck])
    collectives: list[CollectiveDifference] = field(default_factory=list[CollectiveDifference])
    captured_messages: list[RankMessage] = field(default_factory=list[RankMessage])
    measured_messages: list[RankMessage] = field(default_factory=list[RankMessage])
    reordered: int = 0
    combined: int = 0
    notes: dict[str, None] = field(default_factory=dict[str, None])

    def count(self, rank: int, operation: str, captured: float, measured: float, explained: str) -> None:
        """Add the number of runs of one operation on a rank to the totals, and record a difference between
        capture and trace.
        """
        if np.isnan(captured):
            self.notes["operations in loops of unknown trip count are not counted"] = None
            return
        self.captured += captured
        self.measured += measured
        if captured != measured:
            self.operations.append(
                OperationDifference(
                    rank=rank, operation=operation, captured=captured, measured=measured, explained=explained
                )
            )

    def compare_messages(
        self,
        graph: OpGraph,
        rank: int,
        num_ranks: int,
        measured: Sequence[RankMessage] | None,
        *,
        in_totals: bool = True,
    ) -> None:
        """Compare the collectives and messages of one step of a rank with the trace; add them to the totals
        if ``in_totals``.
        """
        captured = program_order_messages(graph, rank, num_ranks)
        if captured is None or measured is None:
            self.notes["collectives in loops of unknown trip count are not compared"] = None
            return
        compared = sequence_difference(rank, captured, measured)
        self.collectives += compared.differences
        self.reordered += compared.reordered
        if in_totals:
            self.combined += compared.combined
            self.captured_messages += captured
            self.measured_messages += measured
        if any(message.ranks is None for message in measured):
            self.notes["the trace does not state the ranks of some collectives"] = None
        if any(np.isnan(message.payload_bytes) for message in (*captured, *measured)):
            self.notes["the bytes of some collectives are unknown"] = None


def check_capture(
    workload: Workload,
    trace: Profile | Workload,
    diagnostics: Diagnostics,
    *,
    ran: Workload | None = None,
) -> CaptureCheck:
    """Compare a captured program with a trace of its run.

    The trace is a profile that contains the compiled module whose instructions ran (XLA), or a profile or
    graph of the operations that ran (PyTorch, Chakra). ``ran`` is a profile of operations as a graph, whose
    collectives state their groups and bytes.

    Counts are exact. Facts that are unknown (a group, bytes, a trip count) are not compared, with a note.
    Raises ``UsageError`` if the trace has no rank of the program, or no events.
    """
    captured = Workload(
        classes=tuple(map(without_waits, workload.classes)),
        rank_class=workload.rank_class,
        name=workload.name,
        metadata=workload.metadata,
    )
    profile = trace if isinstance(trace, Profile) else _listed_profile(trace)
    modules = {profile.strings[row] for row in np.unique(profile.module_id).tolist()}
    by_instruction = any(name.removeprefix(_MODULE_PREFIX) in modules for name in profile.attachments)
    if isinstance(trace, Workload):
        ran = trace
    elif ran is None and not by_instruction:
        ran = measured_workload(trace, diagnostics)
    if not by_instruction:
        # Several events can belong to one host operation: kernels, or a call and the work of its
        # communication. The first counts.
        order = np.argsort(profile.start_ns, kind="stable")
        linked = order[profile.host_event[order] >= 0]
        _, first = np.unique(profile.host_event[linked], return_index=True)
        is_first = profile.host_event < 0
        is_first[linked[first]] = True
        profile = profile if is_first.all() else events_of(profile, np.flatnonzero(is_first), profile.name)
    totals = _CaptureTotals()
    # A trace that does not state its rank is of rank 0.
    rank = np.where(profile.rank < 0, 0, profile.rank)
    is_in_job = rank < captured.num_ranks
    event_class = np.where(is_in_job, captured.rank_class[np.where(is_in_job, rank, 0)], -1)
    for number, graph in enumerate(captured.classes):
        rows = np.flatnonzero(event_class == number)
        if not len(rows):
            continue
        part = events_of(profile, rows, profile.name)
        matching = match_program(graph, part, diagnostics, sizes=program_sizes(captured, number))
        if by_instruction:
            _compare_instructions(graph, part, matching, captured, totals)
        else:
            _compare_operations(graph, part, matching, totals)
            for events in _events_by_rank(part):
                measured: list[RankMessage] | None = []
                if ran is not None and events.rank < ran.num_ranks and int(ran.rank_class[events.rank]) >= 0:
                    measured = program_order_messages(
                        ran.classes[int(ran.rank_class[events.rank])], events.rank, ran.num_ranks
                    )
                if measured and events.runs > 1 and len(measured) % events.runs == 0:
                    measured = measured[: len(measured) // events.runs]
                totals.compare_messages(graph, events.rank, captured.num_ranks, measured)
    if not totals.ranks:
        raise UsageError(
            "the trace has no event of a rank of the program",
            path=profile.name,
            hint="give the trace of a run of this program, on as many ranks",
        )
    return _result(captured, profile, totals, by="instruction" if by_instruction else "operation")


def _listed_profile(workload: Workload) -> Profile:
    """Convert a graph of operations that ran to a profile with one event per node of every rank, in order.

    Traces list operations in the order in which they began.
    """
    strings = StringTableBuilder()
    names: list[int] = []
    ranks: list[int] = []
    starts: list[int] = []
    classes: list[int] = workload.rank_class.tolist()
    for rank, number in enumerate(classes):
        if number < 0:
            continue
        graph = workload.classes[number]
        op_rows: list[int] = graph.op_id.tolist()
        rows = {row: strings.add(graph.strings[row]) for row in set(op_rows)}
        names += [rows[row] for row in op_rows]
        ranks += [rank] * len(op_rows)
        starts += range(len(op_rows))
    start_ns = np.array(starts, np.float64) * 1e6
    return Profile.of(
        workload.name,
        (),
        strings.build(),
        start_ns=start_ns,
        duration_ns=np.full(len(start_ns), 5e5),
        op_id=np.array(names, np.int32),
        rank=np.array(ranks, np.int32),
    )


class _RankEvents(NamedTuple):
    """Events of one rank of a profile. The rank is 0 if the profile does not state it."""

    rank: int
    rows: IntArray
    runs: int


def _events_by_rank(profile: Profile) -> list[_RankEvents]:
    ranks: list[int] = np.unique(profile.rank).tolist()
    events: list[_RankEvents] = []
    for rank in ranks:
        rows = np.flatnonzero(profile.rank == rank)
        runs = profile.run[rows]
        events.append(_RankEvents(max(rank, 0), rows, max(len(np.unique(runs[runs >= 0])), 1)))
    return events


def _base_name(name: str) -> str:
    """Return ``aten::mm`` for ``aten::mm``, ``aten::mm.out`` and ``aten.mm.default``, which are overloads of
    one operation.
    """
    space, colons, rest = name.partition("::")
    if colons:
        return f"{space}::{rest.partition('.')[0]}" if space.islower() else name
    parts = name.split(".")
    return f"{parts[0]}::{parts[1]}" if parts[0] in {"aten", "prims", "c10d"} and len(parts) > 1 else name


def _compare_operations(graph: OpGraph, profile: Profile, matching: Matching, totals: _CaptureTotals) -> None:
    """Compare the captured program with a trace of operations: the number of operations of each name, and
    their order.
    """
    captured = Counter[str]()
    operations: set[str] = set()
    rows: list[int] = graph.op_id.tolist()
    has_costs: list[bool] = (~is_free(graph)).tolist()
    for row, times, has_cost in zip(rows, graph.executions.tolist(), has_costs, strict=True):
        name = _base_name(graph.strings[row])
        captured[name] += times
        if has_cost or "::" in name:
            operations.add(name)
    host = profile.host
    parents: list[int] = np.unique(host.parent[host.parent >= 0]).tolist()
    callers = {_base_name(profile.strings[int(host.name_id[parent])]) for parent in parents}
    for events in _events_by_rank(profile):
        ran = Counter(_base_name(profile.strings[row]) for row in profile.op_id[events.rows].tolist())
        totals.ranks.append(events.rank)
        totals.runs = max(totals.runs, events.runs)
        for name in sorted(captured.keys() | ran.keys()):
            explained = _CALLER if not captured[name] and name in callers else ""
            explained = _SCOPE if not ran[name] and name not in operations else explained
            totals.count(events.rank, name, captured[name], ran[name] / events.runs, explained)
    totals.time_ns += 1.0  # events are counted by name: all of them are joined
    totals.joined_ns += 1.0
    totals.orders.append(check_order(graph, profile, matching))


def _compare_instructions(
    graph: OpGraph, profile: Profile, matching: Matching, workload: Workload, totals: _CaptureTotals
) -> None:
    """Compare the captured program with the events of the compiled module that ran it."""
    step = step_rows(profile, matching.matched)
    other_modules = len(np.unique(profile.module_id)) - len(np.unique(profile.module_id[step]))
    if other_modules > 0 and len(step):
        totals.notes["events of modules of other programs are ignored"] = None
    rows = step if len(step) else np.arange(len(profile))
    part = events_of(profile, rows, profile.name)
    step_matching = Matching(
        keys=matching.keys,
        event_key=matching.event_key[rows],
        event_group=matching.event_group[rows],
        node_group=matching.node_group,
        num_groups=matching.num_groups,
    )
    coverage = coverage_of(graph, part, step_matching)
    totals.time_ns += coverage.time_ns
    totals.joined_ns += coverage.matched_time_ns
    totals.orders.append(check_order(graph, part, step_matching))
    modules = [part.strings[row] for row in np.unique(part.module_id).tolist()]
    is_compiled = {RULES[key.rule] for key in step_matching.keys if key.nodes} == {"instruction"}
    implemented: dict[str, Counter[str]] = {}  # instruction -> kinds of the operations that it implements
    for module in () if is_compiled else modules:
        data = part.attachments.get(_MODULE_PREFIX + module)
        if data is not None:
            leaves = module_leaves(data, module)
            for name, own in leaves.carried.items():
                implemented[name] = Counter(leaves.leaves[leaf].kind for leaf in own)
    compiled = [program for name in modules if (program := compiled_module(part, name)) is not None]
    for events in _events_by_rank(part):
        totals.ranks.append(events.rank)
        totals.runs = max(totals.runs, events.runs)
        if is_compiled:
            _compare_named_instructions(graph, step_matching, events, totals)
        else:
            ran = Counter[str]()
            for row in part.op_id[events.rows].tolist():
                ran.update(implemented.get(part.strings[row], ()))
            _compare_kinds(graph, step_matching, ran, events, totals)
        if compiled:
            _compare_compiled_messages(graph, compiled[0], part, events, workload=workload, totals=totals)


def _compare_kinds(
    graph: OpGraph, matching: Matching, ran: Counter[str], events: _RankEvents, totals: _CaptureTotals
) -> None:
    """Compare the number of operations of each kind on one rank. ``ran`` has the counts over all of its
    runs.
    """
    kinds = [kind_of(graph.strings[row]) for row in graph.op_id.tolist()]
    matched = {node for key in matching.keys for node in key.nodes}
    times: list[float] = graph.executions.tolist()
    in_branch = regions_around(graph, RegionKind.BRANCH)
    captured, conditional = defaultdict[str, float](float), defaultdict[str, float](float)
    unmatched = Counter[str]()
    for node in np.flatnonzero(~is_free(graph) & (graph.executions != 0)).tolist():
        captured[kinds[node]] += times[node]
        conditional[kinds[node]] += times[node] * (in_branch[node] > 0)
        unmatched[kinds[node]] += node not in matched
    for kind in sorted(captured.keys() | (ran.keys() & _PRESERVED_KINDS)):
        if kind.startswith(_COMMUNICATION_PREFIXES):
            continue
        explained = _MERGED if not unmatched[kind] else _REMOVED if kind not in _PRESERVED_KINDS else ""
        count = ran[kind] / events.runs
        if captured[kind] - conditional[kind] <= count < captured[kind]:
            explained = explained or _BRANCH
        totals.count(events.rank, kind, captured[kind], count, explained if captured[kind] else "")


def _compare_named_instructions(
    graph: OpGraph, matching: Matching, events: _RankEvents, totals: _CaptureTotals
) -> None:
    """Compare the number of runs of each instruction by name. Used if the captured program is the compiled
    program.
    """
    keys = matching.event_key[events.rows]
    num_events = np.bincount(keys[keys >= 0], minlength=len(matching.keys))
    ran = {node: int(num_events[number]) for number, key in enumerate(matching.keys) for node in key.nodes}
    is_untimed = is_free(graph) | np.isin(graph.op_class, [int(OpClass.CONTROL), int(OpClass.FREE)])
    in_branch = regions_around(graph, RegionKind.BRANCH)
    for node, times in enumerate(graph.executions.tolist()):
        if not times or (node not in ran and is_untimed[node]):
            continue
        count = ran.get(node, 0) / events.runs
        explained = _BRANCH if in_branch[node] and count < times else ""
        if not count and _is_loop_condition(graph, node):
            explained = _CONDITION
        if count > times and not count % times:
            explained = _PIECES
        totals.count(events.rank, graph.node_name(node), times, count, explained)


def _is_loop_condition(graph: OpGraph, node: int) -> bool:
    """Return True if the node computes the truth value by which a loop decides whether to run another
    iteration.
    """
    region = int(graph.region[node])
    in_body = region >= 0 and graph.regions.kind[region] == RegionKind.LOOP_BODY
    results: list[int] = graph.results.row(node).tolist()
    if not in_body or len(results) != 1:
        return False
    element = graph.types.dtype_of(results[0])
    return element is not None and element.bits <= 1 and not len(graph.types.shape(results[0]))


def _compare_compiled_messages(
    graph: OpGraph,
    compiled: Workload,
    profile: Profile,
    events: _RankEvents,
    *,
    workload: Workload,
    totals: _CaptureTotals,
) -> None:
    """Compare the collectives of a rank with the captured ones, in the order of each run's events. Groups and
    bytes are from the compiled module. Runs with the same order are compared once.
    """
    module = compiled.classes[0]
    messages = node_messages(module, events.rank, compiled.num_ranks)
    by_name = {module.node_name(node): message for node, message in messages.items()}
    orders: dict[tuple[RankMessage, ...], None] = {}
    for run in np.unique(profile.run[events.rows]).tolist():
        rows = events.rows[profile.run[events.rows] == run]
        rows = rows[np.argsort(profile.start_ns[rows], kind="stable")]
        names = (profile.strings[row] for row in profile.op_id[rows].tolist())
        orders[tuple(by_name[name] for name in names if name in by_name)] = None
    for number, order in enumerate(orders):
        totals.compare_messages(graph, events.rank, workload.num_ranks, order, in_totals=not number)
    if len(orders) > 1:
        totals.notes["runs differ in the order of their collectives: each order is compared"] = None
    is_global = workload.num_ranks > 1 and not bool((graph.regions.kind == RegionKind.MANUAL).any())
    if is_global and messages and not len(graph.collectives) and not len(graph.p2p):
        totals.notes[
            "the captured program is not partitioned, so that all collectives are from the partitioner: "
            "capture the program of one device"
        ] = None


def _result(
    workload: Workload, profile: Profile, totals: _CaptureTotals, by: Literal["operation", "instruction"]
) -> CaptureCheck:
    orders = totals.orders
    violations = sorted(
        (violation for order in orders for violation in order.violations),
        key=lambda violation: -violation.early_ns,
    )
    return CaptureCheck(
        program=workload.name,
        trace=profile.name,
        by=by,
        ranks=tuple(sorted(set(totals.ranks))),
        runs=totals.runs,
        joined=totals.joined_ns / totals.time_ns if totals.time_ns else 0.0,
        captured_operations=totals.captured,
        measured_operations=totals.measured,
        operations=tuple(totals.operations),
        order=OrderCheck(
            checked=sum(order.checked for order in orders),
            exact=sum(order.exact for order in orders),
            inside=sum(order.inside for order in orders),
            unknown=sum(order.unknown for order in orders),
            violated=sum(order.violated for order in orders),
            violations=tuple(violations),
        ),
        captured_collectives=len(totals.captured_messages),
        measured_collectives=len(totals.measured_messages),
        collectives=tuple(totals.collectives),
        reordered=totals.reordered,
        combined=totals.combined,
        captured_bytes=float(sum(message.payload_bytes for message in totals.captured_messages)),
        measured_bytes=float(sum(message.payload_bytes for message in totals.measured_messages)),
        notes=tuple(totals.notes),
    )
