"""A trace of PyTorch's profiler read as a profile, joined with the captures of what it replays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.pytorch.events import KinetoTrace, read_events
from hespas.converters.pytorch.host_run import HostRun, host_run
from hespas.converters.pytorch.joined import joined
from hespas.converters.pytorch.kernels import host_steps_of, measured_comms, owner_with_shapes, step_ranges
from hespas.converters.pytorch.linked import HostColumns, LinkedTrace
from hespas.converters.pytorch.profile import (
    first_ns,
    host_ops,
    is_count,
    is_of_job,
    profile_of,
    rank_of,
    report_links,
    trace_metadata,
)
from hespas.graph import Diagnostics, Profile, StringTableBuilder
from hespas.graph.columns import at_rows
from hespas.graph.errors import FormatError

__all__ = ["read_kineto"]


def read_kineto(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read one rank's trace. Raises ``FormatError`` for what is no such trace, naming the byte.

    What it replays of captured graphs is joined with the captures of ``options``. Where neither a device nor
    a call of one is recorded the CPU is the device: its operations, and the works of its communications, are
    the events, each with the time that none inside it takes.
    Nothing that took device time is left out: an event whose cause is not in the trace keeps its kernel name
    and stream. ``diagnostics`` tell how much of the time that is.
    """
    trace = read_events(path, options.max_bytes, recover=options.recover)
    if not len(trace.device) and not len(trace.host):
        raise FormatError(
            "the trace holds neither device events nor host operations",
            path=str(path),
            position="list 'traceEvents'",
            hint="did the profiler record anything? torch.profiler.profile(activities=[...])",
        )
    found = joined(trace, options, diagnostics, str(path))
    trace = found.trace
    linked = LinkedTrace(
        kineto=trace,
        nesting=found.nesting,
        links=found.links,
        events=HostColumns.of(trace.host, trace.annotation),
        trace=None,
        join=None,
        strings=StringTableBuilder(trace.strings),
    )
    report_links(trace, found.links, diagnostics, str(path))
    _report_ranks(trace, diagnostics, str(path))
    name = path.name.removesuffix(".gz").removesuffix(".json")
    if len(trace.device) or len(trace.launch) or trace.header.devices:
        profile = profile_of(name, trace, found.nesting, found.links, linked.kernel_talks())
        return replace(profile, metadata={**profile.metadata, **found.facts})
    run = host_run(linked)
    run.report(diagnostics.about(str(path), "kineto"))
    return _profile_of_host(name, linked, run)


def _profile_of_host(name: str, linked: LinkedTrace, run: HostRun) -> Profile:
    """The profile of a run on the CPU, in order of start. An operation around others with shapes does nothing
    of its own but to call them: it keeps its time, and no shapes.
    """
    trace, nesting, events = linked.kineto, linked.nesting, linked.events
    host, base_ns = trace.host, first_ns(trace)
    ran = run.order[run.own_ns[run.order] > 0]
    call_of = np.arange(len(events.name_row))
    for call, work in run.calls.work.items():
        call_of[work] = call
    op = np.where(call_of[ran] < len(host), call_of[ran], -1)
    cause = owner_with_shapes(host, nesting, op)
    cause = np.where(cause >= 0, cause, op)
    calls = np.zeros(len(host), np.bool_)
    outer = nesting.parent[host.dims_row > 0]
    while len(outer := np.unique(outer[outer >= 0])):
        calls[outer] = True
        outer = nesting.parent[outer]
    bears = (cause >= 0) & ~at_rows(calls, cause, False)
    strings = StringTableBuilder(trace.strings)
    stream = np.unique(run.queue[ran], return_inverse=True)[1].reshape(-1)
    own_ns = run.own_ns[ran].astype(np.float64)
    talks = {run.calls.work[call]: talk for call, talk in run.calls.talks.items()}
    of_event = {row: talks[event] for row, event in enumerate(ran.tolist()) if event in talks}
    category = np.concatenate([host.category_row, trace.annotation.category_row])
    return Profile.of(
        name,
        ("CPU",),
        op_row=np.where(cause >= 0, at_rows(host.name_row, cause, 0), events.name_row[ran]),
        kernel_row=events.name_row[ran],
        category_row=category[ran],
        shapes_row=np.where(bears, at_rows(host.dims_row, cause, 0), 0),
        dtype_row=np.where(bears, at_rows(host.types_row, cause, 0), 0),
        rank=np.full(len(ran), rank_of(trace.header)),
        stream=stream,
        start_ns=run.start_ns[ran] - base_ns,
        duration_ns=own_ns,
        run=host_steps_of(trace, run.start_ns[ran]),
        host_event=cause,
        comms=measured_comms(of_event, strings),
        host=host_ops(host, nesting, base_ns),
        steps=step_ranges(trace, base_ns),
        metadata=trace_metadata(trace),
        strings=strings.build(),
    )


def _report_ranks(trace: KinetoTrace, diagnostics: Diagnostics, path: str) -> None:
    """Say what is a rank, and which rank or number of ranks cannot be: nothing else tells traces apart."""
    several = len(trace.device.devices)
    each = "its streams are told apart" if is_of_job(trace.header) else "each is a rank, in their order"
    message = f"one process worked on {several} devices: {each}"
    diagnostics.info("kineto.several-devices", path, message, count=several if several > 1 else 0)
    stated = trace.header.distributed
    if stated is None:
        return
    rank, size = stated.rank, stated.world_size
    unsaid = (
        "the trace is of a job of several ranks and does not say which it is: it is read as that of rank 0"
    )
    missing = rank is None and is_count(size) and size > 1
    diagnostics.warning("kineto.missing-rank", path, unsaid, count=int(missing))
    text = f"the trace is of rank {str(rank)[:40]!r} of {str(size)[:40]!r} ranks"
    if rank is not None and not is_count(rank):
        diagnostics.warning("kineto.impossible-rank", path, f"{text}: it is read as that of rank 0")
    elif size is not None and not (is_count(size) and size > (rank if is_count(rank) else 0)):
        diagnostics.warning("kineto.impossible-rank", path, f"{text}, which contradicts itself")
