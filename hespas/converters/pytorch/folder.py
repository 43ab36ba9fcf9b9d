"""The traces of a job: per rank a profile, an execution trace, or both, as one workload.

Profiles in which graphs were captured that another one replays are joined with that.

Files are told by content and paired by the rank in their names; where names do not do, by the process they
are of. Each rank is a class: measured times differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hespas.converters.format import HEAD_BYTES, ReadOptions
from hespas.converters.measured_ops import RECORDED_STEPS, EventCosts, host_costs, recorded_steps
from hespas.converters.pytorch.captured import is_capture
from hespas.converters.pytorch.communication import Groups, listed_groups
from hespas.converters.pytorch.device_graph import device_draft
from hespas.converters.pytorch.draft import Draft, Edges, Rank, assembled, chain, flow_of
from hespas.converters.pytorch.events import read_events
from hespas.converters.pytorch.host_run import Calls, HostRun, host_run, works_of
from hespas.converters.pytorch.host_trace import (
    HostTrace,
    host_trace_graph,
    ranks_here,
    ranks_of_one,
    read_host_trace,
    requested_devices,
)
from hespas.converters.pytorch.joined import JoinedTrace, joined
from hespas.converters.pytorch.kernels import host_steps_of, step_ranges, steps_of
from hespas.converters.pytorch.linked import HostColumns, Join, LinkedTrace, join
from hespas.converters.pytorch.profile import report_links, trace_metadata
from hespas.converters.pytorch.records import is_execution_trace, is_profile, job_name, rank_in_name
from hespas.files.streams import first_bytes
from hespas.graph import CollectiveKind, Diagnostics, Findings, OpClass, OpGraph, StringTableBuilder, Workload
from hespas.graph.columns import IntArray, at_rows
from hespas.graph.errors import FormatError, InvariantError
from hespas.measurements.consistency import RecordingFacts, check_job, check_recording, facts_of

__all__ = ["profiles_in", "read_folder"]

# --- One rank's files as a graph: of its device work, of its host operations, or of its execution trace.


class _RankFiles(NamedTuple):
    """The files of one rank; at least one of profile and execution trace."""

    profile: Path | None
    trace: Path | None
    captures: tuple[Path, ...] = ()


class _RankGraph(NamedTuple):
    """A rank's graph, metadata of the run, and what other ranks have to share."""

    graph: OpGraph
    metadata: Mapping[str, str]
    facts: RecordingFacts


def _read_rank(
    files: _RankFiles, number: int, world: int, options: ReadOptions, diagnostics: Diagnostics
) -> _RankGraph:
    """Read and link the files of one rank of ``world``. Raises what their readers raise."""
    if files.profile is None:
        return _unmeasured(files, number, world, options, diagnostics)
    kineto = read_events(files.profile, options.max_bytes, recover=options.recover)
    path = str(files.profile)
    if not len(kineto.device) and not len(kineto.host):
        raise FormatError(
            "the trace holds neither device events nor host operations",
            path=path,
            position="list 'traceEvents'",
            hint="did the profiler record anything? torch.profiler.profile(activities=[...])",
        )
    captures = (*options.capture, *files.captures)
    found = joined(kineto, replace(options, capture=captures), diagnostics, path)
    strings = StringTableBuilder(found.trace.strings)
    trace = read_host_trace(files.trace, options.max_bytes, strings, options.version) if files.trace else None
    linked = _linked(found, trace, strings)
    kineto = linked.kineto
    report_links(kineto, linked.links, diagnostics, path)
    if linked.join:
        _report(linked.join, diagnostics.about(path, "pytorch"))
    else:
        diagnostics.info("pytorch.profile-alone", path, _WITHOUT_TRACE)
    distributed = kineto.header.distributed
    listed = trace.groups if trace and trace.groups else ()
    if not listed and distributed:
        listed = listed_groups(bytes(distributed.groups))
    stated = distributed.world_size if distributed else None
    world = max(world, number + 1, stated if isinstance(stated, int) and stated < 1 << 20 else 1)
    rank = Rank(number, Groups.of(listed, world), path)
    name = job_name(files.profile.name)
    make = device_draft if len(kineto.device) else _host_draft
    graph = _with_steps(assembled(make(linked, name, diagnostics, path), rank, diagnostics), linked)
    metadata = {**trace_metadata(kineto), **found.facts}
    profile = linked.profile(name)
    check_recording(profile, diagnostics, path)
    if len(profile.devices) == 1 and profile.devices[0]:
        metadata["device"] = profile.devices[0]
    if trace:
        metadata["schema"] = trace.schema
    return _RankGraph(graph, metadata, replace(facts_of(profile, path), ranks=(number,)))


_WITHOUT_TRACE = (
    "order is that of streams, launches and waits; an execution trace beside it (ExecutionTraceObserver) "
    "would say which operation needs what another made"
)


def _with_steps(graph: OpGraph, linked: LinkedTrace) -> OpGraph:
    """The graph with how long its steps took: those of the device, of the host where there is no device."""
    kineto, device = linked.kineto, linked.kineto.device
    if len(device):
        start_ns, duration_ns, step = device.start_ns, device.duration_ns, steps_of(kineto, linked.links)
    else:
        rows = np.concatenate([np.arange(len(kineto.host)), works_of(linked)])
        start_ns, duration_ns = linked.events.start_ns[rows], linked.events.duration_ns[rows]
        step = host_steps_of(kineto, start_ns)
    ranges = step_ranges(kineto, int(start_ns.min()) if len(start_ns) else 0)
    steps = recorded_steps(start_ns, duration_ns, step, ranges)
    return (
        graph if steps is None else replace(graph, attachments={RECORDED_STEPS: steps.of(graph).document()})
    )


def _unmeasured(
    files: _RankFiles, number: int, world: int, options: ReadOptions, diagnostics: Diagnostics
) -> _RankGraph:
    if files.trace is None:
        raise InvariantError(f"rank {number} has no file")
    trace = read_host_trace(files.trace, options.max_bytes, StringTableBuilder(), options.version)
    rank = Rank(number, Groups.of(trace.groups, max(world, number + 1)), str(files.trace))
    graph = host_trace_graph(trace, job_name(files.trace.name), rank, diagnostics)
    stated = {"world_size": str(rank.groups.world)} if trace.groups else {}
    facts = RecordingFacts(
        path=rank.path,
        ranks=(number,),
        world_size=Groups.of(trace.groups, 1).world if trace.groups else None,
    )
    return _RankGraph(graph, {"schema": trace.schema, **stated}, facts)


def _linked(found: JoinedTrace, trace: HostTrace | None, strings: StringTableBuilder) -> LinkedTrace:
    """The trace with its links and, where there is one, the execution trace: captured operations are none of
    those that ran.
    """
    kineto, own = found.trace, found.own_host
    events = HostColumns.of(kineto.host, kineto.annotation)
    matched: Join | None = None
    if trace is not None:
        captured = len(kineto.host) - own
        ran = np.delete(np.arange(len(events.name_row)), np.arange(own, own + captured))
        matched = join(HostColumns(*(column[ran] for column in events)), trace)
        row = np.full(len(events.name_row), -1, np.int64)
        row[ran] = matched.row
        matched = matched._replace(row=row)
    return LinkedTrace(
        kineto=kineto,
        nesting=found.nesting,
        links=found.links,
        events=events,
        trace=trace,
        join=matched,
        strings=strings,
    )


def _report(found: Join, findings: Findings) -> None:
    """How operations of the two records were matched."""
    by_order = "operations matched by the order of names on their thread"
    findings.info(
        "linked-by-record-id", "operations matched by record function id and name", found.by_record_id
    )
    findings.info("linked-by-external-id", "operations matched by External id and name", found.by_external_id)
    findings.info("linked-by-order", by_order, found.by_order)
    missing = "operations of the execution trace are not in the profile"
    findings.warning("not-in-profile", missing, found.unmatched)


# The graph of a run without a device: the operations of the host, each with the time that is its own
# (:mod:`hespas.converters.pytorch.host_run`).


def _host_draft(linked: LinkedTrace, name: str, diagnostics: Diagnostics, path: str) -> Draft:
    """The nodes and dependencies of all operations. Time is that of the union of each thread's, to the ns."""
    run = host_run(linked)
    run.report(diagnostics.about(path, "pytorch"))
    costs = _costs(linked, run.calls, diagnostics, path)
    return _draft(linked, run, costs, name)


def _draft(linked: LinkedTrace, frame: HostRun, costs: EventCosts, name: str) -> Draft:
    order, events, calls = frame.order, linked.events, frame.calls
    count = len(order)
    nodes = {int(frame.node_of[calls.work[call]]): talk for call, talk in calls.talks.items()}
    queue = np.unique(frame.queue[order], return_inverse=True)[1].reshape(-1).astype(np.int64)
    own = frame.own_ns[order].astype(np.float64)
    is_talk = np.zeros(count, np.bool_)
    is_talk[list(nodes)] = True
    rows = linked.rows[order]
    rows_of_host = np.flatnonzero(order < len(linked.kineto.host))
    costs = costs.placed(order[rows_of_host], rows_of_host, count)
    costs, data, later = _dataflow(linked, frame, calls, rows, costs)
    control = Edges.joined(chain(queue), _waits(frame), later)
    apart = np.zeros(count, np.bool_)
    apart[[frame.node_of[call] for call in calls.talks]] = True
    idle = ~is_talk & (costs.op_class == OpClass.UNKNOWN) & (apart | (own == 0))
    return Draft(
        name=name,
        strings=linked.strings.build(),
        id=np.arange(count, dtype=np.uint64),
        name_row=events.name_row[order],
        op_row=_call_names(frame, calls, events.name_row),
        framework_row=_outer_names(linked, order),
        costs=costs.without(idle),
        stream=queue,
        queue=queue,
        duration_ns=own,
        data=data,
        control=control,
        talks=nodes,
        start_ns=(frame.start_ns[order] - frame.start_ns[order].min()).astype(np.float64),
    )


def _costs(linked: LinkedTrace, calls: Calls, diagnostics: Diagnostics, path: str) -> EventCosts:
    """What operations of the host cost; calls of communications are communications here."""
    profile = linked.profile(path)
    talks = np.zeros(len(profile.host), np.bool_)
    talks[[call for call in calls.talks if call < len(talks)]] = True
    return host_costs(profile.host, profile.strings, diagnostics, path, communicates=talks)


def _call_names(frame: HostRun, calls: Calls, name_row: IntArray) -> IntArray:
    """The operation of each node: the call's, for the work of one."""
    rows = name_row[frame.order].copy()
    for call, work in calls.work.items():
        rows[frame.node_of[work]] = name_row[call]
    return rows


def _outer_names(linked: LinkedTrace, order: IntArray) -> IntArray:
    """The name of the operation around each, its own where there is none."""
    host = order < len(linked.kineto.host)
    parent = at_rows(linked.nesting.parent, np.where(host, order, -1), -1)
    return linked.events.name_row[np.where(parent >= 0, parent, order)]


def _waits(frame: HostRun) -> Edges:
    """Return dependencies of communications: work waits for the last operation of the calling thread that has
    ended before, its call in most cases; the caller of a blocking one goes on when the work has ended.
    """
    calls = frame.calls
    pairs: list[tuple[int, int]] = []
    by_thread: dict[int, tuple[IntArray, IntArray, IntArray]] = {}
    is_work = np.zeros(len(frame.thread), np.bool_)
    is_work[frame.works] = True
    thread, plain = frame.thread[frame.order], ~is_work[frame.order]
    for call, work in calls.work.items():
        own, node = int(frame.thread[call]), int(frame.node_of[work])
        if work == call or frame.node_of[call] == node:
            continue
        if own not in by_thread:
            nodes = np.flatnonzero((thread == own) & plain)
            events = frame.order[nodes]
            by_thread[own] = nodes, frame.start_ns[events], frame.end_ns[events]
        nodes, starts, ends = by_thread[own]
        ended = int(np.searchsorted(ends, int(frame.start_ns[work]), side="right")) - 1
        called = int(np.searchsorted(nodes, int(frame.node_of[call])))
        if min(ended, called) >= 0:
            pairs.append((node, int(nodes[min(ended, called)])))
        if calls.talks[call].waits:
            following = int(np.searchsorted(starts, int(frame.end_ns[work])))
            if following < len(nodes):
                pairs.append((int(nodes[following]), node))
    return Edges.of(pairs)


def _dataflow(
    linked: LinkedTrace, frame: HostRun, calls: Calls, rows: IntArray, costs: EventCosts
) -> tuple[EventCosts, Edges, Edges]:
    """The costs with the tensor types of the execution trace, and dependencies through storages, in order of
    start; between threads only where times allow them.
    """
    count, trace = len(rows), linked.trace
    if trace is None:
        return costs, Edges.empty(), Edges.empty()
    used, silent = rows.copy(), np.zeros(count, np.bool_)
    for call, work in calls.work.items():
        used[frame.node_of[work]] = linked.rows[call]
        if frame.node_of[call] != frame.node_of[work]:
            silent[frame.node_of[call]] = True
    known = np.flatnonzero((used >= 0) & ~silent)
    flow = flow_of(trace.reads.take(used[known]), trace.writes.take(used[known]))
    operands, results = (
        side.take(used[known]).moved(known, count) for side in (trace.operands, trace.results)
    )
    stream = frame.queue[frame.order]
    start, end = frame.start_ns[frame.order], frame.end_ns[frame.order]
    found = [Edges(known[part.consumer], known[part.producer]) for part in flow]
    data, order = (each.where(each.possible(stream, start, end)) for each in found)
    across = stream[order.consumer] != stream[order.producer]
    costs = replace(costs, types=trace.types.build(), operands=operands, results=results)
    return costs, data, order.where(across)


_MOST_FILES = 1 << 17
_MOST_DIGITS = 10
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]{0,200}?"rank"\s*:\s*(\d{1,9})')
_PID = re.compile(rb'"pid"\s*:\s*"?(\d{1,18})')


@dataclass(frozen=True, slots=True)
class _Found:
    """One file: what it is, and what it says of its rank and process (-1: nothing)."""

    path: Path
    is_profile: bool
    rank: int
    process: int


def read_folder(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read all ranks. Raises ``FormatError`` where files do not make one job, or one of them is broken."""
    found, captures = _captures_apart(path, list(_files(path)), options)
    ranks = _paired(path, found, diagnostics)
    ranks = {number: files._replace(captures=_of_rank(captures, number)) for number, files in ranks.items()}
    requested = requested_devices(options, str(path))
    world = max(requested, max(ranks) + 1) if len(ranks) > 1 else max(requested, 1)
    graphs: list[OpGraph] = []
    facts: list[RecordingFacts] = []
    metadata: dict[str, str] = {}
    for done, (number, files) in enumerate(sorted(ranks.items())):
        result = _read_rank(files, number, world, options, diagnostics)
        graphs.append(result.graph)
        facts.append(result.facts)
        metadata = metadata or dict(result.metadata)
        if options.progress:
            options.progress(done + 1, len(ranks))
    metadata["format"] = "pytorch"
    stated = metadata.get("world_size", "")
    recorded = int(stated) if stated.isdecimal() and len(stated) < _MOST_DIGITS else 1
    if len(ranks) > 1:
        rank_class = ranks_here(sorted(ranks), graphs, max(recorded, requested), str(path))
        check_job(facts, diagnostics, str(path), world=len(rank_class))
    else:
        number = next(iter(ranks))
        metadata["rank"] = str(number)
        rank_class = ranks_of_one(
            graphs[0], number, diagnostics, str(path), requested=requested, recorded=recorded
        )
    graphs = _with_equal_payloads(graphs, diagnostics, str(path))
    return Workload(
        name=path.resolve().name if path.is_dir() else graphs[0].name,
        classes=tuple(graphs),
        rank_class=rank_class,
        metadata=metadata,
    )


def _files(path: Path) -> Iterator[_Found]:
    """Traces in the folder and in folders right below it; a single file is that file."""
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    nested = [inner for entry in entries if entry.is_dir() for inner in sorted(entry.iterdir())]
    candidates = [entry for entry in (*entries, *nested) if entry.is_file() and ".json" in entry.suffixes]
    if len(candidates) > _MOST_FILES:
        raise FormatError(
            f"{len(candidates):,} files, more than {_MOST_FILES:,}",
            path=str(path),
            position=f"file {candidates[_MOST_FILES].name}",
            hint="keep one job per folder",
        )
    for entry in candidates:
        head = first_bytes(entry, HEAD_BYTES)
        profile = is_profile(head)
        if profile or is_execution_trace(head):
            stated = _RANK.search(head) if profile else None
            rank = int(stated[1]) if stated else rank_in_name(entry.name)
            process = _PID.search(head)
            yield _Found(entry, profile, rank, int(process[1]) if process else -1)


def _captures_apart(
    path: Path, found: list[_Found], options: ReadOptions
) -> tuple[list[_Found], list[_Found]]:
    """The files that were recorded of runs, and those of captures of graphs: told by content, and looked at
    where a name says so or several profiles are of one rank.
    """
    times = Counter(each.rank for each in found if each.is_profile)
    captures = [
        each
        for each in found
        if each.is_profile
        and (times[each.rank] > 1 or "capture" in str(each.path.relative_to(path)).lower())
        and len(found) > 1
        and is_capture(read_events(each.path, options.max_bytes))
    ]
    runs = [each for each in found if each not in captures]
    return (runs, captures) if any(each.is_profile for each in runs) else (found, [])


def _of_rank(captures: list[_Found], rank: int) -> tuple[Path, ...]:
    """The captures of a rank; those of all where none is its own, for ranks capture alike."""
    own = tuple(each.path for each in captures if each.rank == rank)
    return own or tuple(each.path for each in captures)


def profiles_in(path: Path, options: ReadOptions) -> dict[Path, tuple[Path, ...]]:
    """The profiles in a folder that are of runs, each with those of captures that belong to it.

    Raises what :func:`read_folder` does for files that are broken, or too many.
    """
    found, captures = _captures_apart(path, list(_files(path)), options)
    return {each.path: _of_rank(captures, each.rank) for each in found if each.is_profile}


def _rank_alone(each: _Found) -> int:
    """The rank of a file that is the only one of its kind: a number in its name may be any."""
    by_name = rank_in_name(each.path.name)
    return rank_in_name(each.path.name, alone=True) if each.rank == by_name else each.rank


def _paired(path: Path, found: list[_Found], diagnostics: Diagnostics) -> dict[int, _RankFiles]:
    """The files of each rank. Raises ``FormatError`` for two files of one kind and rank.

    A single pair is one rank whatever its names say, that of the profile where it states one.
    """
    if not found:
        raise FormatError(
            "no profile and no execution trace of PyTorch here",
            path=str(path),
            position="the names and first bytes of its files",
            hint="one file of torch.profiler and one of ExecutionTraceObserver per rank, .json or .json.gz",
        )
    kinds = [[each for each in found if each.is_profile is kind] for kind in (True, False)]
    if all(len(kind) <= 1 for kind in kinds):
        profile, trace = (kind[0].path if kind else None for kind in kinds)
        ranks_stated = (_rank_alone(each) for each in (*kinds[0], *kinds[1]))
        stated = next((rank for rank in ranks_stated if rank >= 0), 0)
        return {stated: _RankFiles(profile, trace)}
    by_kind: list[dict[int, Path]] = []
    for kind in kinds:
        ranks: dict[int, Path] = {}
        for each in kind:
            number = _rank_of(each, kinds[0], found)
            if number < 0 or number in ranks:
                other = f" and {ranks[number].name}" if number in ranks else ""
                raise FormatError(
                    f"which rank is {each.path.name}{other} of?",
                    path=str(path),
                    position=f"file {each.path.name}",
                    hint="keep one job per folder, and name files like job.rank0.kineto.json",
                )
            ranks[number] = each.path
        by_kind.append(ranks)
    return _complete(path, by_kind[0], by_kind[1], diagnostics)


def _rank_of(each: _Found, profiles: list[_Found], found: list[_Found]) -> int:
    """The rank of a file; of an execution trace without one, that of the profile of the same process."""
    if each.rank >= 0 or each.is_profile:
        return each.rank
    same = [profile.rank for profile in profiles if profile.process == each.process and each.process >= 0]
    alone = sum(other.process == each.process for other in found if not other.is_profile) == 1
    return same[0] if len(same) == 1 and alone else -1


def _complete(
    path: Path, profiles: dict[int, Path], traces: dict[int, Path], diagnostics: Diagnostics
) -> dict[int, _RankFiles]:
    ranks = sorted(profiles.keys() | traces.keys())
    single = len(profiles.keys() ^ traces.keys()) if profiles and traces else 0
    diagnostics.warning(
        "pytorch.unpaired", str(path), "ranks have only one of profile and execution trace", count=single
    )
    return {rank: _RankFiles(profiles.get(rank), traces.get(rank)) for rank in ranks}


def _with_equal_payloads(graphs: list[OpGraph], diagnostics: Diagnostics, path: str) -> list[OpGraph]:
    """Ragged exchanges with the largest payload of all ranks: what one of them sends bounds them all.

    The n-th ragged exchange over a group set is the same one on every rank; what a rank really sends stays
    in its ``operand_bytes``.
    """
    ragged = CollectiveKind.RAGGED_ALL_TO_ALL
    largest: dict[tuple[object, int], float] = {}
    places: list[list[tuple[int, tuple[object, int]]]] = []
    for graph in graphs:
        table = graph.collectives
        seen: dict[object, int] = {}
        mine: list[tuple[int, tuple[object, int]]] = []
        kinds: list[int] = table.kind.tolist()
        sets: list[int] = table.group_set.tolist()
        for row, (kind, group) in enumerate(zip(kinds, sets, strict=True)):
            if kind not in (ragged, CollectiveKind.ALL_TO_ALL):
                continue
            groups: object = graph.group_sets[group] if group >= 0 else None
            number = seen[groups] = seen.get(groups, -1) + 1
            mine.append((row, (groups, number)))
            if kind == ragged:
                size = float(table.comm_bytes[row])
                largest[groups, number] = max(largest.get((groups, number), 0.0), size)
        places.append(mine)
    if not largest or len(graphs) < 2:
        return graphs
    equal = [_bounded(graph, mine, largest) for graph, mine in zip(graphs, places, strict=True)]
    message = "all-to-alls with parts of several sizes; their payload is the largest of all ranks"
    diagnostics.info("pytorch.ragged-exchange", path, message, count=len(largest))
    return equal


def _bounded(
    graph: OpGraph, mine: list[tuple[int, tuple[object, int]]], largest: dict[tuple[object, int], float]
) -> OpGraph:
    table = graph.collectives
    size, kind = table.comm_bytes.copy(), table.kind.copy()
    for row, key in mine:
        if key in largest:
            size[row] = max(largest[key], size[row])
            kind[row] = CollectiveKind.RAGGED_ALL_TO_ALL
    return replace(graph, collectives=replace(table, comm_bytes=size, kind=kind))
