"""Holds a captured program against a trace of its run: what ``hespas-validate capture`` does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hespas.converters.hlo.leaves import kind_of, module_leaves
from hespas.converters.measured_ops import measured_workload
from hespas.graph import Diagnostics, OpClass, OpGraph, Profile, RegionKind, Workload
from hespas.graph.columns import IntArray
from hespas.graph.errors import UsageError
from hespas.graph.passes import is_free, without_waits
from hespas.validators.accuracy.cases import events_of
from hespas.validators.accuracy.coverage import RULES, Matching, coverage_of
from hespas.validators.accuracy.matching import compiled_module, match_program
from hespas.validators.accuracy.programs import program_sizes, step_rows
from hespas.validators.accuracy.structure import regions_around
from hespas.validators.capture.listed import base_name, listed_profile
from hespas.validators.capture.messages import Message, differences_of, messages_of, node_messages
from hespas.validators.capture.order import check_order
from hespas.validators.capture.result import (
    CaptureCheck,
    CollectiveDifference,
    OperationDifference,
    OrderCheck,
)

__all__ = ["check_capture"]

_ATTACHED = "hlo/"
_KEPT = frozenset(
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
"""What compilers leave as many as there are; the rest they merge, copy and remove as they like."""

_MERGED = "the compiler merged, copied or rewrote them: instructions that ran carry all of them out"
_BRANCH = "they are in arms of branches, which were not all taken"
_CONDITION = "the runtime knows how often the loop runs, and does not ask its condition"
_PIECES = "the runtime runs it in pieces"
_REMOVED = "the compiler merged them into others or removed them"
_SCOPE = "a scope that the framework marks, and no operation: profiles do not list it among them"
_AROUND = "calls around others, which the capture lists themselves"


@dataclass(slots=True, eq=False)
class _Found:
    """What the ranks seen so far gave."""

    ranks: list[int] = field(default_factory=list[int])
    runs: int = 0
    time_ns: float = 0.0
    joined_ns: float = 0.0
    captured: float = 0.0
    measured: float = 0.0
    operations: list[OperationDifference] = field(default_factory=list[OperationDifference])
    orders: list[OrderCheck] = field(default_factory=list[OrderCheck])
    collectives: list[CollectiveDifference] = field(default_factory=list[CollectiveDifference])
    captured_messages: list[Message] = field(default_factory=list[Message])
    measured_messages: list[Message] = field(default_factory=list[Message])
    reordered: int = 0
    combined: int = 0
    notes: dict[str, None] = field(default_factory=dict[str, None])


def check_capture(
    workload: Workload,
    trace: Profile | Workload,
    diagnostics: Diagnostics,
    *,
    ran: Workload | None = None,
) -> CaptureCheck:
    """Compare a captured program with a trace of it: a profile that names instructions of a compiled module
    which it brings along (XLA), a profile of operations or a graph of those that ran (PyTorch, Chakra).
    ``ran`` is a profile of operations read as a graph, whose collectives say what they did.

    Counts are exact; what nobody says (a group, bytes, the trips of a loop) is compared with nothing, and a
    note tells. Raises ``UsageError`` where the trace has no rank of the program, or no events.
    """
    captured = Workload(
        classes=tuple(map(without_waits, workload.classes)),
        rank_class=workload.rank_class,
        name=workload.name,
        metadata=workload.metadata,
    )
    profile = trace if isinstance(trace, Profile) else listed_profile(trace)
    by_instruction = _names_instructions(profile)
    if isinstance(trace, Workload):
        ran = trace
    elif ran is None and not by_instruction:
        ran = measured_workload(trace, diagnostics)
    if not by_instruction:
        profile = _one_of_each(profile)
    found = _Found()
    for graph, number, part in _parts(captured, profile):
        sizes = program_sizes(captured, number)
        matching = match_program(graph, part, diagnostics, sizes=sizes)
        if by_instruction:
            _instructions(graph, part, matching, captured, found)
        else:
            _operations(graph, part, matching, found)
            _host_messages(graph, ran, part, captured, found)
    if not found.ranks:
        raise UsageError(
            "the trace has no event of a rank of the program",
            path=profile.name,
            hint="give the trace of a run of this program, on as many ranks",
        )
    return _result(captured, profile, found, by="instruction" if by_instruction else "operation")


def _names_instructions(profile: Profile) -> bool:
    modules = {profile.strings[row] for row in np.unique(profile.module_row).tolist()}
    return any(name.removeprefix(_ATTACHED) in modules for name in profile.attachments)


def _one_of_each(profile: Profile) -> Profile:
    """Return the profile with the first event of each operation of the host: an operation may be several
    kernels, or a call and the work of its communication.
    """
    order = np.argsort(profile.start_ns, kind="stable")
    caused = order[profile.host_event[order] >= 0]
    _, first = np.unique(profile.host_event[caused], return_index=True)
    kept = profile.host_event < 0
    kept[caused[first]] = True
    return profile if kept.all() else events_of(profile, np.flatnonzero(kept), profile.name)


def _parts(workload: Workload, profile: Profile) -> Iterator[tuple[OpGraph, int, Profile]]:
    """The events of the ranks of each class, with its graph. A trace that names no rank is of the first."""
    rank = np.where(profile.rank < 0, 0, profile.rank)
    inside = rank < workload.num_ranks
    of_class = np.where(inside, workload.rank_class[np.where(inside, rank, 0)], -1)
    for number, graph in enumerate(workload.classes):
        rows = np.flatnonzero(of_class == number)
        if len(rows):
            yield graph, number, events_of(profile, rows, profile.name)


def _ranks_of(profile: Profile) -> list[int]:
    """The ranks as the profile calls them (-1: it names none)."""
    return [int(rank) for rank in np.unique(profile.rank)]


def _runs_of(profile: Profile, rank: int) -> int:
    return max(len(np.unique(profile.run[(profile.rank == rank) & (profile.run >= 0)])), 1)


# Operations of a trace that has them by name.


def _operations(graph: OpGraph, profile: Profile, matching: Matching, found: _Found) -> None:
    """Numbers of operations of each name; the order in which they ran."""
    wanted = Counter[str]()
    works = set[str]()
    rows: list[int] = graph.op_row.tolist()
    costs: list[bool] = (~is_free(graph)).tolist()
    for row, times, is_work in zip(rows, graph.multiplicity.tolist(), costs, strict=True):
        name = base_name(graph.strings[row])
        wanted[name] += times
        if is_work or "::" in name:
            works.add(name)
    around = _around(profile)
    for rank in _ranks_of(profile):
        runs = _runs_of(profile, rank)
        events: list[int] = profile.op_row[profile.rank == rank].tolist()
        did = Counter(base_name(profile.strings[row]) for row in events)
        found.ranks.append(max(rank, 0))
        found.runs = max(found.runs, runs)
        for name in sorted(wanted.keys() | did.keys()):
            count = did[name] / runs
            explained = _AROUND if not wanted[name] and name in around else ""
            explained = _SCOPE if not did[name] and name not in works else explained
            _count(found, (max(rank, 0), name), wanted[name], count, explained)
    found.time_ns += 1.0  # every event is counted by name: nothing is to be joined
    found.joined_ns += 1.0
    found.orders.append(check_order(graph, profile, matching))


def _around(profile: Profile) -> set[str]:
    """The names of operations that call others."""
    host = profile.host
    parents: list[int] = np.unique(host.parent[host.parent >= 0]).tolist()
    return {base_name(profile.strings[int(host.name_row[parent])]) for parent in parents}


def _host_messages(
    graph: OpGraph, ran: Workload | None, profile: Profile, workload: Workload, found: _Found
) -> None:
    """The collectives of each rank, against those that what ran states of itself."""
    for rank in _ranks_of(profile):
        own = max(rank, 0)
        measured: list[Message] | None = []
        if ran is not None and own < ran.num_ranks and int(ran.rank_class[own]) >= 0:
            rows = messages_of(ran.classes[int(ran.rank_class[own])], own, ran.num_ranks)
            measured = None if rows is None else [each for _, each in rows]
        runs = _runs_of(profile, rank)
        if measured and runs > 1 and len(measured) % runs == 0:
            measured = measured[: len(measured) // runs]
        _compare_messages(graph, own, workload.num_ranks, measured, found)


def _compare_messages(
    graph: OpGraph,
    rank: int,
    num_ranks: int,
    measured: Sequence[Message] | None,
    found: _Found,
    *,
    counts: bool = True,
) -> None:
    """Compare the messages of one step of a rank; those that ``counts`` says are added up."""
    rows = messages_of(graph, rank, num_ranks)
    if rows is None or measured is None:
        found.notes["a loop runs an unknown number of times: its collectives are not compared"] = None
        return
    captured = [each for _, each in rows]
    compared = differences_of(rank, captured, measured)
    found.collectives += compared.unlike
    found.reordered += compared.reordered
    found.combined += compared.combined if counts else 0
    if counts:
        found.captured_messages += captured
        found.measured_messages += measured
    if any(each.ranks is None for each in measured):
        found.notes["the trace does not say over which ranks some collectives are"] = None
    if any(np.isnan(each.payload_bytes) for each in (*captured, *measured)):
        found.notes["the bytes of some collectives are unknown"] = None


# Instructions of a compiled module that the trace brings along.


def _instructions(
    graph: OpGraph, profile: Profile, matching: Matching, workload: Workload, found: _Found
) -> None:
    """What the compiled module did: only events of the module that ran the program count."""
    step = step_rows(profile, matching.matched)
    beside = len(np.unique(profile.module_row)) - len(np.unique(profile.module_row[step]))
    if beside > 0 and len(step):
        found.notes["modules of other programs ran beside it: their events are left out"] = None
    rows = step if len(step) else np.arange(len(profile))
    part = events_of(profile, rows, profile.name)
    keyed = Matching(
        keys=matching.keys,
        event_key=matching.event_key[rows],
        event_group=matching.event_group[rows],
        node_group=matching.node_group,
        num_groups=matching.num_groups,
    )
    covered = coverage_of(graph, part, keyed)
    found.time_ns += covered.time_ns
    found.joined_ns += covered.matched_time_ns
    found.orders.append(check_order(graph, part, keyed))
    modules = [part.strings[row] for row in np.unique(part.module_row).tolist()]
    rules = {RULES[key.rule] for key in keyed.keys if key.nodes}
    is_compiled = rules == {"instruction"}
    carried = {} if is_compiled else _carried(part, modules)
    compiled = [each for name in modules if (each := compiled_module(part, name)) is not None]
    for rank in _ranks_of(part):
        runs = _runs_of(part, rank)
        found.ranks.append(max(rank, 0))
        found.runs = max(found.runs, runs)
        mine = np.flatnonzero(part.rank == rank)
        if is_compiled:
            _named_instructions(graph, keyed, (part, mine, runs), found)
        else:
            _kinds(graph, keyed, (part, mine, runs), carried, found)
        if compiled:
            _compiled_messages(graph, compiled[0], (part, mine), workload, found)


def _carried(profile: Profile, modules: Sequence[str]) -> dict[str, Counter[str]]:
    """The kinds of operations that each instruction carries out."""
    found: dict[str, Counter[str]] = {}
    for module in modules:
        data = profile.attachments.get(_ATTACHED + module)
        if data is None:
            continue
        leaves = module_leaves(data, module)
        for name, own in leaves.carried.items():
            found[name] = Counter(leaves.leaves[leaf].kind for leaf in own)
    return found


def _kinds(
    graph: OpGraph,
    matching: Matching,
    ran: tuple[Profile, IntArray, int],
    carried: dict[str, Counter[str]],
    found: _Found,
) -> None:
    """Numbers of operations of each kind on one rank."""
    profile, mine, runs = ran
    names = [kind_of(graph.strings[row]) for row in graph.op_row.tolist()]
    joined = {node for key in matching.keys for node in key.nodes}
    costs = ~is_free(graph) & (graph.multiplicity != 0)
    times: list[float] = graph.multiplicity.tolist()
    in_branch = regions_around(graph, RegionKind.BRANCH)
    wanted, maybe = defaultdict[str, float](float), defaultdict[str, float](float)
    lost, did = Counter[str](), Counter[str]()
    for node in np.flatnonzero(costs).tolist():
        wanted[names[node]] += times[node]
        maybe[names[node]] += times[node] * (in_branch[node] > 0)
        lost[names[node]] += node not in joined
    for row in profile.op_row[mine].tolist():
        did.update(carried.get(profile.strings[row], ()))
    for kind in sorted(wanted.keys() | (did.keys() & _KEPT)):
        if _communicates(kind):
            continue
        explained = _MERGED if not lost[kind] else _REMOVED if kind not in _KEPT else ""
        count, rank = did[kind] / runs, max(int(profile.rank[mine[0]]), 0)
        if wanted[kind] - maybe[kind] <= count < wanted[kind]:
            explained = explained or _BRANCH
        _count(found, (rank, kind), wanted[kind], count, explained if wanted[kind] else "")


def _named_instructions(
    graph: OpGraph, matching: Matching, ran: tuple[Profile, IntArray, int], found: _Found
) -> None:
    """Numbers of runs of each instruction of a captured program that is the compiled one."""
    profile, mine, runs = ran
    rank = max(int(profile.rank[mine[0]]), 0)
    events = np.bincount(
        matching.event_key[mine][matching.event_key[mine] >= 0], minlength=len(matching.keys)
    )
    did = {node: int(events[number]) for number, key in enumerate(matching.keys) for node in key.nodes}
    untimed = is_free(graph) | np.isin(graph.op_class, [int(OpClass.CONTROL), int(OpClass.FREE)])
    in_branch = regions_around(graph, RegionKind.BRANCH)
    for node, times in enumerate(graph.multiplicity.tolist()):
        if not times or (node not in did and untimed[node]):
            continue
        count = did.get(node, 0) / runs
        explained = _BRANCH if in_branch[node] and count < times else ""
        if not count and _is_condition(graph, node):
            explained = _CONDITION
        if count > times and not count % times:
            explained = _PIECES
        _count(found, (rank, graph.node_name(node)), times, count, explained)


def _is_condition(graph: OpGraph, node: int) -> bool:
    """Whether a node decides whether a loop of known trips goes on: it makes one truth value in the body."""
    region = int(graph.region[node])
    inside = region >= 0 and graph.regions.kind[region] == RegionKind.LOOP_BODY
    results: list[int] = graph.results.row(node).tolist()
    if not inside or len(results) != 1:
        return False
    element = graph.types.dtype_of(results[0])
    return element is not None and element.bits <= 1 and not len(graph.types.shape(results[0]))


def _count(found: _Found, named: tuple[int, str], wanted: float, did: float, explained: str) -> None:
    """Add up what was captured and what ran of one thing on a rank, and keep a difference."""
    if np.isnan(wanted):
        found.notes["how often a loop runs is unknown: what is inside is not counted"] = None
        return
    found.captured += wanted
    found.measured += did
    if wanted != did:
        rank, name = named
        found.operations.append(
            OperationDifference(rank=rank, operation=name, captured=wanted, measured=did, explained=explained)
        )


def _communicates(kind: str) -> bool:
    return kind.startswith(("all_", "reduce_scatter", "collective_", "send", "recv", "ragged_all"))


def _compiled_messages(
    graph: OpGraph,
    compiled: Workload,
    ran: tuple[Profile, IntArray],
    workload: Workload,
    found: _Found,
) -> None:
    """The collectives of a rank in the order of each run's events, by what the compiled module says of them;
    one run stands for all that are like it.
    """
    profile, mine = ran
    own = max(int(profile.rank[mine[0]]), 0)
    real = compiled.classes[0]
    told = node_messages(real, own, compiled.num_ranks)
    by_name = {real.node_name(node): each for node, each in told.items()}
    seen: dict[tuple[Message, ...], None] = {}
    for run in np.unique(profile.run[mine]).tolist():
        rows = mine[profile.run[mine] == run]
        rows = rows[np.argsort(profile.start_ns[rows], kind="stable")]
        names = (profile.strings[row] for row in profile.op_row[rows].tolist())
        seen[tuple(by_name[name] for name in names if name in by_name)] = None
    for number, messages in enumerate(seen):
        _compare_messages(graph, own, workload.num_ranks, messages, found, counts=not number)
    if len(seen) > 1:
        found.notes["runs differ in the order of their collectives: each order is compared"] = None
    is_global = workload.num_ranks > 1 and not bool((graph.regions.kind == RegionKind.MANUAL).any())
    if is_global and told and not len(graph.collectives) and not len(graph.p2p):
        found.notes[
            "the captured program is not partitioned: the collectives are those of the partitioner. Capture "
            "one device's share of it"
        ] = None


def _result(
    workload: Workload, profile: Profile, found: _Found, by: Literal["operation", "instruction"]
) -> CaptureCheck:
    orders = found.orders
    violations = sorted(
        (each for order in orders for each in order.violations), key=lambda each: -each.early_ns
    )
    return CaptureCheck(
        program=workload.name,
        trace=profile.name,
        by=by,
        ranks=tuple(sorted(set(found.ranks))),
        runs=found.runs,
        joined=found.joined_ns / found.time_ns if found.time_ns else 0.0,
        captured_operations=found.captured,
        measured_operations=found.measured,
        operations=tuple(found.operations),
        order=OrderCheck(
            checked=sum(each.checked for each in orders),
            exact=sum(each.exact for each in orders),
            inside=sum(each.inside for each in orders),
            unknown=sum(each.unknown for each in orders),
            violated=sum(each.violated for each in orders),
            violations=tuple(violations),
        ),
        captured_collectives=len(found.captured_messages),
        measured_collectives=len(found.measured_messages),
        collectives=tuple(found.collectives),
        reordered=found.reordered,
        combined=found.combined,
        captured_bytes=float(sum(each.payload_bytes for each in found.captured_messages)),
        measured_bytes=float(sum(each.payload_bytes for each in found.measured_messages)),
        notes=tuple(found.notes),
    )
