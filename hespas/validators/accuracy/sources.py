"""From a profile, and a program if there is one, to the graph that is estimated and the cases it gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

from hespas.converters import ReadOptions, load_format
from hespas.converters.measured_ops import RecordedSteps, costed_ops, recorded_steps_of
from hespas.graph import Diagnostics, EventColumns, GraphBuilder, HostOps, OpClass, OpGraph, Profile, Workload
from hespas.graph.columns import (
    BoolArray,
    FloatArray,
    IntArray,
    SmallIntArray,
    StringTable,
    StringTableBuilder,
)
from hespas.graph.errors import HespasError, UsageError
from hespas.graph.passes import with_durations
from hespas.validators.accuracy.cases import (
    LEAST_NS,
    Cases,
    Members,
    case_dtypes,
    case_labels,
    grouped_graph,
    leading_nodes,
    measured_groups,
)
from hespas.validators.accuracy.coverage import Coverage, Join, Matching, coverage_of, joins_of, node_text
from hespas.validators.accuracy.matching import check_program, match_program

__all__ = ["HOLDS_NO_PROGRAM", "Source", "events_of", "sources_of", "step_rows"]

HOLDS_NO_PROGRAM = (
    "this file holds no compiled program: give the .xplane.pb recorded beside it, or the optimised HLO that "
    "ran as --workload"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """One program in one profile. ``graph`` has one node per group; ``node`` is the node of each case and
    ``times`` how often a step runs it. ``program`` is what runs end to end (None: a trace of operations, or a
    further class of ranks of a program already given); ``profile`` what was recorded of it, on all ranks
    (None: a graph that carries measured times itself, and ``recorded`` what its steps took, where that is
    known). ``joins`` say what each instruction carries out; ``num_ranks`` is the size of the job (-1:
    unknown).
    """

    profile: Profile | None
    graph: OpGraph
    node: IntArray
    times: FloatArray
    cases: Cases
    coverage: Coverage | None
    program: Workload | None
    joins: tuple[Join, ...] = ()
    num_ranks: int = -1
    recorded: RecordedSteps | None = None


def sources_of(
    profile: Profile | Workload, workload: Workload | None, hardware: str, diagnostics: Diagnostics
) -> Iterator[Source]:
    """The cases of a profile: against ``workload``, else against the compiled programs it brings along, else
    operation by operation with the costs its recorded shapes give. Of a workload with times: its nodes.

    Events that belong to none of the programs are a source without cases: nobody matches them. Raises
    ``UsageError`` for a profile without anything of these.
    """
    if isinstance(profile, Workload):
        if workload is not None:
            raise UsageError(
                "a graph with times is its own program", path=profile.name, hint="leave --workload out"
            )
        yield from _timed(profile, hardware, diagnostics)
        return
    if workload is not None:
        yield from _against(profile, workload, hardware, diagnostics)
        return
    programs = list(_attached_programs(profile, diagnostics))
    in_some = np.zeros(len(profile), np.bool_)
    for module, program in programs:
        chosen = _of_module(profile, module)
        in_some |= chosen
        part = events_of(profile, np.flatnonzero(chosen), f"{profile.name}:{module}")
        yield from _against(part, program, hardware, diagnostics, is_own=True)
    if programs:
        yield from _left_over(profile, ~in_some, hardware, diagnostics)
        return
    if not len(profile.host) and bool((profile.op_row > 0).any()) and bool((profile.shapes_row > 0).any()):
        profile = _with_own_shapes(profile)
    if not len(profile.host):
        raise UsageError(
            "the profile names no operations with shapes, and there is no program to match it with",
            path=profile.name,
            hint=HOLDS_NO_PROGRAM
            if bool((profile.module_row > 0).any())
            else "give the program with --workload, or record shapes: profile(record_shapes=True)",
        )
    yield _operations(profile, hardware, diagnostics)


def _of_module(profile: Profile, module: str) -> BoolArray:
    """The events of one module, shape ``(events,)``."""
    rows = [row for row in np.unique(profile.module_row).tolist() if profile.strings[row] == module]
    return np.isin(profile.module_row, rows)


_COLUMNS = tuple(EventColumns.__annotations__)


def events_of(profile: Profile, rows: IntArray, name: str) -> Profile:
    """A profile of some events only; what they communicate is left behind."""
    columns = {column: getattr(profile, column)[rows] for column in (*_COLUMNS, "start_ns", "duration_ns")}
    return replace(profile, name=name, comms=type(profile.comms).empty(), **columns)


def _against(
    profile: Profile, workload: Workload, hardware: str, diagnostics: Diagnostics, *, is_own: bool = False
) -> Iterator[Source]:
    """Cases of each rank class; the first carries the program and what was recorded of it on all ranks.
    ``is_own`` says that the profile brought the program along.
    """
    if not len(profile):
        return
    several = len(workload.classes) > 1
    of_class = _class_of_events(profile, workload, diagnostics) if several else np.zeros(len(profile), int)
    matched = np.zeros(len(profile), np.bool_)
    found: list[Source] = []
    for number, graph in enumerate(workload.classes):
        rows = np.flatnonzero(of_class == number)
        if not len(rows):
            continue
        part = events_of(profile, rows, f"{profile.name}, class {number}") if several else profile
        matching = match_program(graph, part, diagnostics, is_own=is_own)
        matched[rows] = matching.matched
        coverage = coverage_of(graph, part, matching)
        _tell(coverage, part, diagnostics)
        found.append(_matched(part, workload, graph, (matching, coverage), hardware))
    step = step_rows(profile, matched)
    if len(step) and found:
        ran = events_of(profile, step, profile.name)
        if not is_own:
            check_program(workload, ran, diagnostics)
        found[0] = replace(found[0], profile=ran, program=workload)
    yield from found
    if several:
        yield from _left_over(profile, of_class < 0, hardware, diagnostics)


def _class_of_events(profile: Profile, workload: Workload, diagnostics: Diagnostics) -> IntArray:
    """The rank class of each event; -1 for a rank that the program has not."""
    known = (profile.rank >= 0) & (profile.rank < len(workload.rank_class))
    diagnostics.warning(
        "match.unknown-rank",
        profile.name,
        f"events are of ranks that the program has not: it has {len(workload.rank_class):,}",
        count=int((~known).sum()),
    )
    return np.where(known, workload.rank_class[np.where(known, profile.rank, 0)], -1).astype(np.int64)


def _left_over(
    profile: Profile, chosen: BoolArray, hardware: str, diagnostics: Diagnostics
) -> Iterator[Source]:
    """The events that are of no program, if there are any: a source without cases, so that their time counts
    as not covered.
    """
    if not chosen.any():
        return
    part = events_of(profile, np.flatnonzero(chosen), f"{profile.name}, no program")
    graph = GraphBuilder("no program").build()
    matching = match_program(graph, part, diagnostics, is_own=True)
    coverage = coverage_of(graph, part, matching)
    total = float(np.maximum(np.nan_to_num(profile.duration_ns), 0.0).sum())
    diagnostics.warning(
        "match.no-program",
        profile.name,
        f"events belong to no program: {coverage.time_ns / total if total else 0.0:.1%} of the device time",
        count=len(part),
    )
    yield _matched(part, Workload.spmd(graph, 1), graph, (matching, coverage), hardware)


def _matched(
    profile: Profile, workload: Workload, graph: OpGraph, told: tuple[Matching, Coverage], hardware: str
) -> Source:
    """The cases of one class of ranks, from what was matched."""
    matching, coverage = told
    grouped, times = _grouped(graph, matching)
    measured = measured_groups(profile, matching)
    labels, shapes, shape = case_labels(grouped, measured.group, times[measured.group])
    leading = leading_nodes(graph, matching.node_group, len(matching))
    joins = joins_of(graph, profile, matching)
    outside = profile.duration_ns[matching.event_group < 0]
    cases = Cases(
        source=profile.name,
        workload=workload.name,
        hardware=hardware,
        labels=labels,
        shapes=shapes,
        shape=shape,
        op_class=graph.op_class[leading[measured.group]].astype(np.int8),
        measured_ns=np.where(measured.measured_ns >= LEAST_NS, measured.measured_ns, 0.0),
        mean_ns=np.where(measured.measured_ns >= LEAST_NS, measured.mean_ns, 0.0),
        spread_ns=measured.spread_ns,
        repeats=measured.repeats,
        flops=grouped.flops[measured.group] * times[measured.group],
        bytes_moved=grouped.bytes_moved[measured.group] * times[measured.group],
        useful_flops=grouped.useful_flops[measured.group] * times[measured.group],
        dtypes=case_dtypes(grouped, measured.group),
        steps=1.0,
        inside_ns=coverage.compared_time_ns,
        outside_ns=float(np.maximum(np.nan_to_num(outside), 0.0).sum()),
        members=_members(graph, matching, joins, measured.group),
    )
    return Source(
        profile=profile,
        graph=grouped,
        node=measured.group,
        times=times[measured.group],
        cases=cases,
        coverage=coverage,
        program=None,
        joins=joins,
        num_ranks=workload.num_ranks,
    )


def _members(
    graph: OpGraph, matching: Matching, joins: Sequence[Join], groups: IntArray
) -> tuple[Members, ...]:
    """What each of some groups is made of."""
    ran: dict[int, list[Join]] = {}
    for join in joins:
        ran.setdefault(join.group, []).append(join)
    order = np.argsort(matching.node_group, kind="stable")
    bounds = np.searchsorted(matching.node_group[order], np.stack((groups, groups + 1)))
    nodes: list[int] = order.tolist()
    found: list[Members] = []
    numbers: list[int] = groups.tolist()
    for number, first, last in zip(numbers, bounds[0].tolist(), bounds[1].tolist(), strict=True):
        own = ran.get(number, [])
        found.append(
            Members(
                instructions=tuple(dict.fromkeys(join.instruction for join in own)),
                operations=tuple(dict.fromkeys(node_text(graph, node) for node in nodes[first:last])),
                events=sum(join.events for join in own),
            )
        )
    return tuple(found)


def _grouped(graph: OpGraph, matching: Matching) -> tuple[OpGraph, FloatArray]:
    """The graph with one node per group, and how often a step runs each.

    Members that run another number of times than the group's leading node count that much more or less: their
    costs are scaled before they are added.
    """
    groups = len(matching)
    inside = np.flatnonzero(matching.node_group >= 0)
    runs = graph.multiplicity[inside]
    most = np.zeros(groups)
    np.maximum.at(most, matching.node_group[inside], np.nan_to_num(runs, nan=1.0))
    lead = np.where(most > 0, most, 1.0)
    scale = np.ones(len(graph))
    scale[inside] = runs / lead[matching.node_group[inside]]
    if bool((scale != 1.0).any()):
        graph = _scaled(graph, scale)
    return grouped_graph(graph, matching.node_group, groups), lead


def _scaled(graph: OpGraph, scale: FloatArray) -> OpGraph:
    """The same graph with all that its nodes cost times ``scale``, shape ``(nodes,)``."""
    names = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written")
    products, collectives, p2p = graph.contractions, graph.collectives, graph.p2p
    return replace(
        graph,
        contractions=replace(
            products,
            flops=products.flops * scale[products.node],
            useful_flops=products.useful_flops * scale[products.node],
        ),
        collectives=replace(collectives, comm_bytes=collectives.comm_bytes * scale[collectives.node]),
        p2p=replace(p2p, comm_bytes=p2p.comm_bytes * scale[p2p.node]),
        **{name: getattr(graph, name) * scale for name in names},
    )


def _tell(coverage: Coverage, profile: Profile, diagnostics: Diagnostics) -> None:
    missed = coverage.events - coverage.matched_events
    if missed:
        share = 1 - coverage.time_share
        diagnostics.warning(
            "match.unmatched-events",
            profile.name,
            f"events match nothing of the program: {share:.1%} of the device time",
            count=missed,
        )
    diagnostics.warning(
        "match.negative-duration",
        profile.name,
        "events end before they start: they and their runs are left out of what is compared",
        count=int((profile.duration_ns < 0).sum()),
    )
    diagnostics.info(
        "match.unmatched-nodes",
        profile.name,
        "operations that cost something match no event: the compiler removed or merged them",
        count=coverage.nodes - coverage.matched_nodes,
    )


def _timed(workload: Workload, hardware: str, diagnostics: Diagnostics) -> Iterator[Source]:
    """The nodes of a graph that carry a time, once per rank class. What does no work (calls around others,
    bookkeeping) is no case; its time is nobody's. Where it is known how long its steps took, the graph
    without its times is the program that ran.
    """
    for graph in workload.classes:
        timed = (graph.duration_ns >= LEAST_NS) & (graph.multiplicity > 0)
        idle = timed & (graph.op_class == int(OpClass.FREE))
        node = np.flatnonzero(timed & ~idle)
        times = graph.multiplicity[node]
        if not len(node):
            continue
        recorded = recorded_steps_of(graph.attachments, graph.name)
        if recorded is not None and not recorded.describes(graph):
            diagnostics.warning(
                "accuracy.times-changed",
                graph.name,
                "its times are not those that were recorded: what is compared here may be one estimate with "
                "another; the steps of the recording are left out",
            )
            recorded = None
        untimed = with_durations(graph, np.full(len(graph), np.nan))
        yield Source(
            profile=None,
            graph=graph,
            node=node,
            times=times,
            cases=replace(
                _cases_of(graph, node, times, (graph.name, workload.name, hardware)),
                outside_ns=float((graph.duration_ns * graph.multiplicity)[idle].sum()),
                steps=nan if recorded is None else float(recorded.count),
            ),
            coverage=None,
            program=None if recorded is None else Workload.spmd(untimed, workload.num_ranks),
            num_ranks=workload.num_ranks,
            recorded=recorded,
        )


def _operations(profile: Profile, hardware: str, diagnostics: Diagnostics) -> Source:
    """Each operation of a trace as one case; equal shapes are repeats of one another, never averaged here."""
    found = costed_ops(profile, diagnostics)
    graph = found.graph
    node = np.flatnonzero(found.busy_ns >= LEAST_NS)
    times = np.ones(len(node))
    runs = len(np.unique(profile.run[profile.run >= 0]))
    cases = replace(
        _cases_of(graph, node, times, (profile.name, profile.name, hardware)),
        steps=float(runs) if runs else nan,
    )
    return Source(
        profile=profile,
        graph=graph,
        node=node,
        times=times,
        cases=cases,
        coverage=None,
        program=None,
    )


def _cases_of(graph: OpGraph, node: IntArray, times: FloatArray, names: tuple[str, str, str]) -> Cases:
    """Nodes that carry measured times, one case each for all their ``times`` in a step; ``names`` are source,
    workload and hardware.
    """
    labels, shapes, shape = case_labels(graph, node, times)
    return Cases(
        source=names[0],
        workload=names[1],
        hardware=names[2],
        labels=labels,
        shapes=shapes,
        shape=shape,
        op_class=graph.op_class[node].astype(np.int8),
        measured_ns=graph.duration_ns[node] * times,
        spread_ns=np.full(len(node), np.nan),
        repeats=np.ones(len(node), np.int64),
        flops=graph.flops[node] * times,
        bytes_moved=graph.bytes_moved[node] * times,
        useful_flops=graph.useful_flops[node] * times,
        dtypes=case_dtypes(graph, node),
    )


# Tables of operations, which state the shapes of each: as traces of a host have them.


def _with_own_shapes(profile: Profile) -> Profile:
    """A table of operations, which states name and shapes of each: as many host operations, one for each."""
    nothing = np.zeros(len(profile), np.int32)
    strings, dtype_row = _listed_dtypes(profile)
    host = HostOps(
        name_row=profile.op_row,
        thread_row=nothing,
        parent=nothing - 1,
        start_ns=profile.start_ns,
        duration_ns=profile.duration_ns,
        sequence=np.full(len(profile), -1, np.int64),
        shapes_row=profile.shapes_row,
        dtype_row=dtype_row,
        strides_row=nothing,
        values_row=nothing,
    )
    events = np.arange(len(profile), dtype=np.int32)
    return replace(profile, strings=strings, host=host, host_event=events)


def _listed_dtypes(profile: Profile) -> tuple[StringTable, SmallIntArray]:
    """One element type per operand, as traces list them: tables state one for all."""
    strings = StringTableBuilder(profile.strings)
    pairs = profile.dtype_row.astype(np.int64) << 32 | profile.shapes_row
    distinct, place = np.unique(pairs, return_inverse=True)
    rows: list[int] = []
    for pair in distinct.tolist():
        row, shapes = pair >> 32, profile.strings[pair & 0xFFFFFFFF]
        dtype = profile.strings[row]
        if dtype and not dtype.startswith("["):
            try:
                operands = msgspec.json.decode(shapes, type=list[msgspec.Raw])
            except (msgspec.DecodeError, RecursionError):
                operands = []  # no list of shapes: no cost either
            row = strings.add(msgspec.json.encode([dtype] * len(operands)).decode())
        rows.append(row)
    return strings.build(), np.array(rows, np.int32)[place]


# Which events of a profile are the step of a program: other programs run beside it.

_MATCHED_NS = 1e-9
"""What a matched event of no time weighs."""


def step_rows(profile: Profile, matched: BoolArray) -> IntArray:
    """Numbers of all events of the module that ran the program: on each rank, that with most matched time.
    ``matched`` has shape ``(events,)``. Runs are counted per module, so those of two are never one step; of
    a rank where nothing is matched, no event is in it. O(events log events).
    """
    time = np.where(matched, np.maximum(np.nan_to_num(profile.duration_ns), 0.0) + _MATCHED_NS, 0.0)
    keys, place = np.unique(
        profile.rank.astype(np.int64) << 32 | profile.module_row.astype(np.int64), return_inverse=True
    )
    total = np.bincount(place, time, len(keys))
    order = np.lexsort((total, keys >> 32))
    last = np.append(np.diff(keys[order] >> 32) != 0, np.ones(min(len(keys), 1), np.bool_))
    is_step = np.zeros(len(keys), np.bool_)
    is_step[order[last]] = True
    is_step &= total > 0
    return np.flatnonzero(is_step[place])


# The programs that a profile brings along.

_ATTACHED = "hlo/"


def _attached_programs(profile: Profile, diagnostics: Diagnostics) -> Iterator[tuple[str, Workload]]:
    """The compiled programs of a profile that ran in it."""
    ran = {profile.strings[row] for row in np.unique(profile.module_row).tolist()}
    read = load_format("hlo").read
    for name, data in profile.attachments.items():
        module = name.removeprefix(_ATTACHED)
        if not name.startswith(_ATTACHED) or module not in ran or read is None:
            continue
        with TemporaryDirectory(prefix="hespas-") as folder:
            path = Path(folder) / "module.pb"
            path.write_bytes(data)
            found = Diagnostics()
            try:
                value = read(path, ReadOptions(), found)
            except HespasError as error:
                diagnostics.warning(
                    "accuracy.unreadable-module",
                    profile.name,
                    f"module {module} is left out: {error.message}",
                )
                continue
        _tell_attached(found, module, diagnostics)
        if isinstance(value, Workload):
            yield module, replace(value, name=module)


def _tell_attached(found: Diagnostics, module: str, diagnostics: Diagnostics) -> None:
    """What is found in a module, under its name: nobody knows the file it was read from."""
    counts = found.counts()
    first = {each.code: each for each in reversed(list(found))}
    for code, each in first.items():
        diagnostics.add(code, each.severity, module, each.message, count=counts[code])
