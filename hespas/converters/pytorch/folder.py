"""Folders with the traces of a job: a profile, an execution trace, or both of each rank, as one workload.

Files are recognised by content and paired by the rank in their names, else by process id. Profiles in which
graphs were captured are joined with the profile that replays them. Each rank is a class of its own, because
measured times differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hespas.converters.format import HEAD_BYTES, ReadOptions
from hespas.converters.measured_ops.steps import recorded_steps
from hespas.converters.pytorch.captured import is_capture
from hespas.converters.pytorch.communication import JobGroups, listed_groups
from hespas.converters.pytorch.device_graph import device_draft
from hespas.converters.pytorch.draft import TraceRank, assembled
from hespas.converters.pytorch.events import read_events
from hespas.converters.pytorch.host_graph import host_draft, works_of
from hespas.converters.pytorch.host_trace import (
    host_trace_graph,
    ranks_here,
    ranks_of_one,
    read_host_trace,
    requested_devices,
)
from hespas.converters.pytorch.joined import join_captures
from hespas.converters.pytorch.linked import HostColumns, LinkedTrace, TraceJoin, match_operations
from hespas.converters.pytorch.links import host_steps_of, step_ranges, steps_of
from hespas.converters.pytorch.profile import report_links, trace_metadata
from hespas.converters.pytorch.recognition import is_execution_trace, is_profile, job_name, rank_in_name
from hespas.files.streams import first_bytes
from hespas.graph import RECORDED_STEPS, CollectiveKind, Diagnostics, OpGraph, StringTableBuilder, Workload
from hespas.graph.errors import FormatError, InvariantError
from hespas.measurements.consistency import RecordingFacts, check_job, check_recording, facts_of

__all__ = ["profiles_in", "read_folder"]

_MAX_FILES = 1 << 17
_MAX_DIGITS = 10
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}]{0,200}?"rank"\s*:\s*(\d{1,9})')
_PID = re.compile(rb'"pid"\s*:\s*"?(\d{1,18})')
_NOT_IN_PROFILE = "operations of the execution trace are not in the profile"
_NO_EXECUTION_TRACE = (
    "order comes from streams, launches and waits; an execution trace (ExecutionTraceObserver) would add "
    "data dependencies between operations"
)


class _RankFiles(NamedTuple):
    """Files of one rank: a profile, an execution trace, or both, and captures of its CUDA graphs."""

    profile: Path | None
    trace: Path | None
    captures: tuple[Path, ...] = ()


class _RankGraph(NamedTuple):
    """Graph of a rank, with metadata of the run. ``facts`` are properties of the recording that must agree on
    all ranks of a job.
    """

    graph: OpGraph
    metadata: Mapping[str, str]
    facts: RecordingFacts


@dataclass(frozen=True, slots=True)
class _TraceFile:
    """One file of a folder, with the rank and the process that it states (-1: none)."""

    path: Path
    is_profile: bool
    rank: int
    process: int


def read_folder(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read the traces of all ranks in a folder as a workload. Raises ``FormatError`` if the files are not
    from one job, or if a file is malformed.
    """
    files, captures = _runs_and_captures(path, options)
    ranks = _paired(path, files, diagnostics)
    requested = requested_devices(options, str(path))
    world = max(requested, max(ranks) + 1) if len(ranks) > 1 else max(requested, 1)
    graphs: list[OpGraph] = []
    facts: list[RecordingFacts] = []
    metadata: dict[str, str] = {}
    for done, number in enumerate(sorted(ranks)):
        rank_files = ranks[number]._replace(captures=_captures_of_rank(captures, number))
        read = _read_measured if rank_files.profile else _read_unmeasured
        result = read(rank_files, number, world, options, diagnostics)
        graphs.append(result.graph)
        facts.append(result.facts)
        metadata = metadata or dict(result.metadata)
        if options.progress:
            options.progress(done + 1, len(ranks))
    metadata["format"] = "pytorch"
    world_size = metadata.get("world_size", "")
    recorded = int(world_size) if world_size.isdecimal() and len(world_size) < _MAX_DIGITS else 1
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


def profiles_in(path: Path, options: ReadOptions) -> dict[Path, tuple[Path, ...]]:
    """Return the profiles of runs in a folder, each with the traces of graph captures that belong to it.

    Raises the errors of :func:`read_folder` for malformed or too many files.
    """
    files, captures = _runs_and_captures(path, options)
    return {file.path: _captures_of_rank(captures, file.rank) for file in files if file.is_profile}


def _runs_and_captures(path: Path, options: ReadOptions) -> tuple[list[_TraceFile], list[_TraceFile]]:
    """Return the traces of runs, and the traces of graph captures, in a folder and in its sub-folders.

    Captures are recognised by content. To save time, a file is only read for that if its name mentions a
    capture, or if its rank has several profiles.
    """
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    nested = [inner for entry in entries if entry.is_dir() for inner in sorted(entry.iterdir())]
    candidates = [entry for entry in (*entries, *nested) if entry.is_file() and ".json" in entry.suffixes]
    if len(candidates) > _MAX_FILES:
        raise FormatError(
            f"{len(candidates):,} files, more than {_MAX_FILES:,}",
            path=str(path),
            position=f"file {candidates[_MAX_FILES].name}",
            hint="put each job into a folder of its own",
        )
    files: list[_TraceFile] = []
    for entry in candidates:
        head = first_bytes(entry, HEAD_BYTES)
        profile = is_profile(head)
        if profile or is_execution_trace(head):
            in_header = _RANK.search(head) if profile else None
            rank = int(in_header[1]) if in_header else rank_in_name(entry.name)
            process = _PID.search(head)
            files.append(_TraceFile(entry, profile, rank, int(process[1]) if process else -1))
    num_profiles = Counter(file.rank for file in files if file.is_profile)
    captures = [
        file
        for file in files
        if file.is_profile
        and (num_profiles[file.rank] > 1 or "capture" in str(file.path.relative_to(path)).lower())
        and len(files) > 1
        and is_capture(read_events(file.path, options.max_bytes))
    ]
    runs = [file for file in files if file not in captures]
    return (runs, captures) if any(file.is_profile for file in runs) else (files, [])


def _captures_of_rank(captures: list[_TraceFile], rank: int) -> tuple[Path, ...]:
    """Return the captures of a rank; all captures if it has none, because ranks capture the same."""
    own = tuple(file.path for file in captures if file.rank == rank)
    return own or tuple(file.path for file in captures)


def _paired(path: Path, files: list[_TraceFile], diagnostics: Diagnostics) -> dict[int, _RankFiles]:
    """Return the files of each rank. Raises ``FormatError`` for two files of the same kind and rank.

    If there is a single profile, a single execution trace, or one of each, they are of one rank, even if
    their names state different ranks. It is the rank that the profile states, if any.
    """
    if not files:
        raise FormatError(
            "the folder has no PyTorch profile and no execution trace",
            path=str(path),
            position="the names and first bytes of its files",
            hint="add a file of torch.profiler or ExecutionTraceObserver per rank (.json or .json.gz)",
        )
    kinds = [[file for file in files if file.is_profile is kind] for kind in (True, False)]
    if all(len(kind) <= 1 for kind in kinds):
        profile, trace = (kind[0].path if kind else None for kind in kinds)
        # The name of a single file may contain any number; a number between dots is a rank.
        numbers = [
            rank_in_name(file.path.name, alone=True)
            if file.rank == rank_in_name(file.path.name)
            else file.rank
            for file in (*kinds[0], *kinds[1])
        ]
        rank = next((number for number in numbers if number >= 0), 0)
        return {rank: _RankFiles(profile, trace)}
    by_kind: list[dict[int, Path]] = []
    for kind in kinds:
        ranks: dict[int, Path] = {}
        for file in kind:
            if file.rank >= 0 or file.is_profile:
                number = file.rank
            else:
                same_process = [
                    other for other in files if other.process == file.process and file.process >= 0
                ]
                named_ranks = [other.rank for other in same_process if other.is_profile]
                num_traces = sum(not other.is_profile for other in same_process)
                number = named_ranks[0] if len(named_ranks) == 1 and num_traces == 1 else -1
            if number < 0 or number in ranks:
                other = f" and {ranks[number].name}" if number in ranks else ""
                raise FormatError(
                    f"the rank of {file.path.name}{other} is unclear",
                    path=str(path),
                    position=f"file {file.path.name}",
                    hint="put each job into a folder of its own, and name files like job.rank0.kineto.json",
                )
            ranks[number] = file.path
        by_kind.append(ranks)
    profiles, traces = by_kind
    single = len(profiles.keys() ^ traces.keys()) if profiles and traces else 0
    message = "ranks have only one of profile and execution trace"
    diagnostics.warning("pytorch.unpaired", str(path), message, count=single)
    return {
        rank: _RankFiles(profiles.get(rank), traces.get(rank))
        for rank in sorted(profiles.keys() | traces.keys())
    }


def _read_measured(
    files: _RankFiles, number: int, world: int, options: ReadOptions, diagnostics: Diagnostics
) -> _RankGraph:
    """Read and link the profile of one rank of ``world`` and its execution trace, if there is one."""
    if files.profile is None:
        raise InvariantError(f"rank {number} has no profile")
    path, kineto = str(files.profile), read_events(files.profile, options.max_bytes, recover=options.recover)
    if not len(kineto.device) and not len(kineto.host):
        raise FormatError(
            "the trace has neither device events nor host operations",
            path=path,
            position="list 'traceEvents'",
            hint="record again with torch.profiler.profile(activities=[...])",
        )
    options = replace(options, capture=(*options.capture, *files.captures))
    joined = join_captures(kineto, options, diagnostics, path)
    strings = StringTableBuilder(joined.trace.strings)
    trace = read_host_trace(files.trace, options.max_bytes, strings, options.version) if files.trace else None
    kineto, own = joined.trace, joined.own_host
    events = HostColumns.of(kineto.host, kineto.annotation)
    link: TraceJoin | None = None
    if trace is not None:
        num_captured = len(kineto.host) - own
        ran = np.delete(np.arange(len(events.name_id)), np.arange(own, own + num_captured))
        link = match_operations(HostColumns(*(column[ran] for column in events)), trace)
        row = np.full(len(events.name_id), -1, np.int64)
        row[ran] = link.row
        link = link._replace(row=row)
    linked = LinkedTrace(
        kineto=kineto,
        nesting=joined.nesting,
        links=joined.links,
        events=events,
        trace=trace,
        join=link,
        strings=strings,
    )
    kineto = linked.kineto
    report_links(kineto, linked.links, diagnostics, path)
    findings = diagnostics.about(path, "pytorch")
    if linked.join:
        join, by = linked.join, "operations matched by"
        findings.info("linked-by-record-id", f"{by} record function id and name", join.by_record_id)
        findings.info("linked-by-external-id", f"{by} External id and name", join.by_external_id)
        findings.info("linked-by-order", f"{by} the order of names on their thread", join.by_order)
        findings.warning("not-in-profile", _NOT_IN_PROFILE, join.unmatched)
    else:
        findings.info("profile-alone", _NO_EXECUTION_TRACE)
    distributed = kineto.header.distributed
    groups = trace.groups if trace and trace.groups else ()
    if not groups and distributed:
        groups = listed_groups(bytes(distributed.groups))
    size = distributed.world_size if distributed else None
    world = max(world, number + 1, size if isinstance(size, int) and size < 1 << 20 else 1)
    rank = TraceRank(number, JobGroups.of(groups, world), path)
    name = job_name(files.profile.name)
    make_draft = device_draft if len(kineto.device) else host_draft
    graph = assembled(make_draft(linked, name, diagnostics, path), rank, diagnostics)
    if len(kineto.device):
        start_ns, duration_ns = kineto.device.start_ns, kineto.device.duration_ns
        step = steps_of(kineto, linked.links)
    else:
        rows = np.concatenate([np.arange(len(kineto.host)), works_of(linked)])
        start_ns, duration_ns = linked.events.start_ns[rows], linked.events.duration_ns[rows]
        step = host_steps_of(kineto, start_ns)
    ranges = step_ranges(kineto, int(start_ns.min()) if len(start_ns) else 0)
    steps = recorded_steps(start_ns, duration_ns, step, ranges)
    if steps is not None:
        graph = replace(graph, attachments={RECORDED_STEPS: steps.of(graph).document()})
    metadata = {**trace_metadata(kineto), **joined.facts}
    profile = linked.profile(name)
    check_recording(profile, diagnostics, path)
    if len(profile.devices) == 1 and profile.devices[0]:
        metadata["device"] = profile.devices[0]
    if trace:
        metadata["schema"] = trace.schema
    return _RankGraph(graph, metadata, replace(facts_of(profile, path), ranks=(number,)))


def _read_unmeasured(
    files: _RankFiles, number: int, world: int, options: ReadOptions, diagnostics: Diagnostics
) -> _RankGraph:
    """Read the execution trace of a rank without a profile."""
    if files.trace is None:
        raise InvariantError(f"rank {number} has no file")
    trace = read_host_trace(files.trace, options.max_bytes, StringTableBuilder(), options.version)
    rank = TraceRank(number, JobGroups.of(trace.groups, max(world, number + 1)), str(files.trace))
    graph = host_trace_graph(trace, job_name(files.trace.name), rank, diagnostics)
    world_size = {"world_size": str(rank.groups.world)} if trace.groups else {}
    facts = RecordingFacts(
        path=rank.path,
        ranks=(number,),
        world_size=JobGroups.of(trace.groups, 1).world if trace.groups else None,
    )
    return _RankGraph(graph, {"schema": trace.schema, **world_size}, facts)


def _with_equal_payloads(graphs: list[OpGraph], diagnostics: Diagnostics, path: str) -> list[OpGraph]:
    """Return the graphs of all ranks, in which each ragged all-to-all has the largest payload of any rank.

    The largest payload determines the time of all ranks. The n-th all-to-all over a group set is the same
    exchange on every rank. ``operand_bytes`` still has the bytes that a rank really sends.
    """
    ragged = CollectiveKind.RAGGED_ALL_TO_ALL
    largest: dict[tuple[object, int], float] = {}
    exchanges: list[list[tuple[int, tuple[object, int]]]] = []
    for graph in graphs:
        table = graph.collectives
        counts: dict[object, int] = {}
        rows: list[tuple[int, tuple[object, int]]] = []
        kinds: list[int] = table.kind.tolist()
        sets: list[int] = table.group_set.tolist()
        for row, (kind, group_set) in enumerate(zip(kinds, sets, strict=True)):
            if kind not in (ragged, CollectiveKind.ALL_TO_ALL):
                continue
            groups: object = graph.group_sets[group_set] if group_set >= 0 else None
            number = counts[groups] = counts.get(groups, -1) + 1
            rows.append((row, (groups, number)))
            if kind == ragged:
                size = float(table.comm_bytes[row])
                largest[groups, number] = max(largest.get((groups, number), 0.0), size)
        exchanges.append(rows)
    if not largest or len(graphs) < 2:
        return graphs
    message = "all-to-alls with parts of different sizes; their payload is the largest of all ranks"
    diagnostics.info("pytorch.ragged-exchange", path, message, count=len(largest))
    equal: list[OpGraph] = []
    for graph, rows in zip(graphs, exchanges, strict=True):
        payload, kinds_of_rank = graph.collectives.comm_bytes.copy(), graph.collectives.kind.copy()
        for row, key in rows:
            if key in largest:
                payload[row] = max(largest[key], payload[row])
                kinds_of_rank[row] = ragged
        collectives = replace(graph.collectives, comm_bytes=payload, kind=kinds_of_rank)
        equal.append(replace(graph, collectives=collectives))
    return equal
