"""One rank's files as a graph: of its device work, of its host operations, or of its execution trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.measured_ops import RECORDED_STEPS, recorded_steps
from hespas.converters.pytorch.device_graph import device_draft
from hespas.converters.pytorch.draft import Rank, assembled
from hespas.converters.pytorch.et_graph import host_trace_graph
from hespas.converters.pytorch.events import KinetoTrace, read_events
from hespas.converters.pytorch.groups import Groups, listed_groups
from hespas.converters.pytorch.host_graph import host_draft, works_of
from hespas.converters.pytorch.host_trace import HostTrace, read_host_trace
from hespas.converters.pytorch.join import HostColumns, Join, join
from hespas.converters.pytorch.linked import LinkedTrace
from hespas.converters.pytorch.linking import Nesting, link
from hespas.converters.pytorch.naming import job_name
from hespas.converters.pytorch.profile import report_links, trace_metadata
from hespas.converters.pytorch.steps import host_steps_of, steps_of
from hespas.graph import Diagnostics, OpGraph, StringTableBuilder
from hespas.graph.errors import FormatError, InvariantError

__all__ = ["RankFiles", "RankGraph", "read_rank"]


class RankFiles(NamedTuple):
    """The files of one rank; at least one of them."""

    profile: Path | None
    trace: Path | None


class RankGraph(NamedTuple):
    """A rank's graph, and what its files say of the run."""

    graph: OpGraph
    metadata: Mapping[str, str]


def read_rank(
    files: RankFiles, number: int, world: int, options: ReadOptions, diagnostics: Diagnostics
) -> RankGraph:
    """Read and link the files of one rank of ``world``. Raises what their readers raise."""
    if files.profile is None:
        return _unmeasured(files, number, world, options, diagnostics)
    kineto = read_events(files.profile, options.max_bytes)
    path = str(files.profile)
    if not len(kineto.device) and not len(kineto.host):
        raise FormatError(
            "the trace holds neither device events nor host operations", path=path,
            position="list 'traceEvents'",
            hint="did the profiler record anything? torch.profiler.profile(activities=[...])",
        )  # fmt: skip
    strings = StringTableBuilder(kineto.strings)
    trace = read_host_trace(files.trace, options.max_bytes, strings, options.version) if files.trace else None
    linked = _linked(kineto, trace, strings)
    report_links(kineto, linked.links, diagnostics, path)
    if linked.join:
        _report(linked.join, diagnostics, path)
    distributed = kineto.header.distributed
    listed = trace.groups if trace and trace.groups else ()
    if not listed and distributed:
        listed = listed_groups(bytes(distributed.groups))
    stated = distributed.world_size if distributed else None
    world = max(world, number + 1, stated if isinstance(stated, int) and stated < 1 << 20 else 1)
    rank = Rank(number, Groups.of(listed, world), path)
    name = job_name(files.profile.name)
    make = device_draft if len(kineto.device) else host_draft
    graph = _with_steps(assembled(make(linked, name, diagnostics, path), rank, diagnostics), linked)
    metadata = trace_metadata(kineto)
    devices = linked.profile(name).devices
    if len(devices) == 1 and devices[0]:
        metadata["device"] = devices[0]
    if trace:
        metadata["schema"] = trace.schema
    return RankGraph(graph, metadata)


def _with_steps(graph: OpGraph, linked: LinkedTrace) -> OpGraph:
    """The graph with how long its steps took: those of the device, of the host where there is no device."""
    kineto, device = linked.kineto, linked.kineto.device
    if len(device):
        steps = recorded_steps(device.start_ns, device.duration_ns, steps_of(kineto, linked.links))
    else:
        rows = np.concatenate([np.arange(len(kineto.host)), works_of(linked)])
        start_ns = linked.events.start_ns[rows]
        steps = recorded_steps(start_ns, linked.events.duration_ns[rows], host_steps_of(kineto, start_ns))
    return (
        graph if steps is None else replace(graph, attachments={RECORDED_STEPS: steps.of(graph).document()})
    )


def _unmeasured(
    files: RankFiles, number: int, world: int, options: ReadOptions, diagnostics: Diagnostics
) -> RankGraph:
    if files.trace is None:
        raise InvariantError(f"rank {number} has no file")
    trace = read_host_trace(files.trace, options.max_bytes, StringTableBuilder(), options.version)
    rank = Rank(number, Groups.of(trace.groups, max(world, number + 1)), str(files.trace))
    graph = host_trace_graph(trace, job_name(files.trace.name), rank, diagnostics)
    stated = {"world_size": str(rank.groups.world)} if trace.groups else {}
    return RankGraph(graph, {"schema": trace.schema, **stated})


def _linked(kineto: KinetoTrace, trace: HostTrace | None, strings: StringTableBuilder) -> LinkedTrace:
    nesting = Nesting.of(kineto.host)
    events = HostColumns.of(kineto.host, kineto.annotation)
    return LinkedTrace(
        kineto=kineto,
        nesting=nesting,
        links=link(kineto, nesting),
        events=events,
        trace=trace,
        join=join(events, trace) if trace else None,
        strings=strings,
    )


def _report(found: Join, diagnostics: Diagnostics, path: str) -> None:
    """How operations of the two records were matched."""
    for code, count, message in (
        (
            "pytorch.linked-by-record-id",
            found.by_record_id,
            "operations matched by record function id and name",
        ),
        ("pytorch.linked-by-external-id", found.by_external_id, "operations matched by External id and name"),
        (
            "pytorch.linked-by-order",
            found.by_order,
            "operations matched by the order of names on their thread",
        ),
    ):
        diagnostics.info(code, path, message, count=count)
    message = "operations of the execution trace are not in the profile"
    diagnostics.warning("pytorch.not-in-profile", path, message, count=found.unmatched)
