"""Kineto traces as files: read as a profile, joined with the captures of replayed graphs, and
copied clean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.chrome_events import EventStream, event_times
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.pytorch.events import KinetoTrace, read_events
from hespas.converters.pytorch.host_graph import host_run
from hespas.converters.pytorch.joined import join_captures
from hespas.converters.pytorch.kernel_communications import comm_columns
from hespas.converters.pytorch.linked import HostColumns, LinkedTrace
from hespas.converters.pytorch.links import host_steps_of, owner_with_shapes, step_ranges
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
from hespas.files.streams import open_output
from hespas.graph import Diagnostics, Profile, StringTableBuilder
from hespas.graph.columns import at_rows
from hespas.graph.errors import FormatError

__all__ = ["copy_kineto", "read_kineto"]

_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_TIME = msgspec.Raw(b"0")


def read_kineto(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read the Kineto trace of one rank. Raises ``FormatError`` with the byte position if the file is not
    such a trace.

    Replays of captured graphs are joined with the captures in ``options``. If the trace has no device events
    and no launch calls, the CPU is the device. The events are then its operations and the transfers of its
    communications, each with its exclusive time. No device time is dropped: an event whose cause is not in
    the trace has only its kernel name and stream, and diagnostics report the share of such time.
    """
    trace = read_events(path, options.max_bytes, recover=options.recover)
    if not len(trace.device) and not len(trace.host):
        raise FormatError(
            "the trace has neither device events nor host operations",
            path=str(path),
            position="list 'traceEvents'",
            hint="record again with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )
    joined = join_captures(trace, options, diagnostics, str(path))
    trace = joined.trace
    linked = LinkedTrace(
        kineto=trace,
        nesting=joined.nesting,
        links=joined.links,
        events=HostColumns.of(trace.host, trace.annotation),
        trace=None,
        join=None,
        strings=StringTableBuilder(trace.strings),
    )
    report_links(trace, joined.links, diagnostics, str(path))
    _report_ranks(trace, diagnostics, str(path))
    name = path.name.removesuffix(".gz").removesuffix(".json")
    if len(trace.device) or len(trace.launch) or trace.header.devices:
        profile = profile_of(name, trace, joined.nesting, joined.links, linked.kernel_communications())
        return replace(profile, metadata={**profile.metadata, **joined.facts})
    run = host_run(linked)
    run.report(diagnostics.about(str(path), "kineto"))
    # An operation that encloses operations with shapes only calls them: it keeps its time but has no shapes.
    trace, nesting, events = linked.kineto, linked.nesting, linked.events
    host, base_ns = trace.host, first_ns(trace)
    run_events = run.order[run.own_ns[run.order] > 0]
    call_of = np.arange(len(events.name_id))
    for call, work in run.calls.work.items():
        call_of[work] = call
    op = np.where(call_of[run_events] < len(host), call_of[run_events], -1)
    cause = owner_with_shapes(host, nesting, op)
    cause = np.where(cause >= 0, cause, op)
    encloses = np.zeros(len(host), np.bool_)
    outer = nesting.parent[host.dims_id > 0]
    while len(outer := np.unique(outer[outer >= 0])):
        encloses[outer] = True
        outer = nesting.parent[outer]
    has_shapes = (cause >= 0) & ~at_rows(encloses, cause, False)
    strings = StringTableBuilder(trace.strings)
    stream = np.unique(run.queue[run_events], return_inverse=True)[1].reshape(-1)
    own_ns = run.own_ns[run_events].astype(np.float64)
    comms = {run.calls.work[call]: comm for call, comm in run.calls.communications.items()}
    of_event = {row: comms[event] for row, event in enumerate(run_events.tolist()) if event in comms}
    category = np.concatenate([host.category_id, trace.annotation.category_id])
    return Profile.of(
        name,
        ("CPU",),
        op_id=np.where(cause >= 0, at_rows(host.name_id, cause, 0), events.name_id[run_events]),
        kernel_id=events.name_id[run_events],
        category_id=category[run_events],
        shapes_id=np.where(has_shapes, at_rows(host.dims_id, cause, 0), 0),
        dtype_id=np.where(has_shapes, at_rows(host.types_id, cause, 0), 0),
        rank=np.full(len(run_events), rank_of(trace.header)),
        stream=stream,
        start_ns=run.start_ns[run_events] - base_ns,
        duration_ns=own_ns,
        run=host_steps_of(trace, run.start_ns[run_events]),
        host_event=cause,
        comms=comm_columns(of_event, strings),
        host=host_ops(host, nesting, base_ns),
        steps=step_ranges(trace, base_ns),
        metadata=trace_metadata(trace),
        strings=strings.build(),
    )


def _report_ranks(trace: KinetoTrace, diagnostics: Diagnostics, path: str) -> None:
    """Report the interpretation of several devices as ranks, and a missing or impossible rank or number of
    ranks.
    """
    num_devices = len(trace.device.devices)
    reading = "streams of different devices get different numbers"
    if not is_of_job(trace.header):
        reading = "each device is read as one rank, in order of device numbers"
    message = f"one process worked on {num_devices} devices: {reading}"
    diagnostics.info("kineto.several-devices", path, message, count=num_devices if num_devices > 1 else 0)
    distributed = trace.header.distributed
    if distributed is None:
        return
    rank, size = distributed.rank, distributed.world_size
    message = "the trace is of a job of several ranks but does not state its rank: rank 0 is assumed"
    missing = rank is None and is_count(size) and size > 1
    diagnostics.warning("kineto.missing-rank", path, message, count=int(missing))
    message = f"the trace states rank {str(rank)[:40]!r} of {str(size)[:40]!r} ranks"
    if rank is not None and not is_count(rank):
        diagnostics.warning("kineto.impossible-rank", path, f"{message}: rank 0 is assumed")
    elif size is not None and not (is_count(size) and size > (rank if is_count(rank) else 0)):
        diagnostics.warning("kineto.impossible-rank", path, f"{message}, which is impossible")


def copy_kineto(
    source: Path, destination: Path, reading: ReadOptions, writing: WriteOptions, diagnostics: Diagnostics
) -> None:
    """Write a clean copy of a trace: every intact event once, and the other fields of the document.

    Events of all kinds are copied, also events that a profile does not hold. Defects are repaired as the
    reader repairs them; an unknown duration becomes 0. Raises the errors of the reader, and ``OutputError``
    if the output cannot be written.
    """
    stream = EventStream(source, reading.max_bytes, recover=reading.recover)
    copier = _EventCopier(stream, str(source))
    packed = (writing.name or destination.name).endswith(".gz")
    with open_output(destination, packed=packed) as output:
        output.write(b'{"traceEvents": [\n')
        separator = b""
        for block in copier.blocks():
            output.write(separator + block)
            separator = b",\n"
        fields = {key: raw for key, raw in _FIELDS.decode(stream.header).items() if key != "traceEvents"}
        text = msgspec.json.encode(fields)
        output.write(b"\n]" + (b",\n" + text[1:] if fields else b"}") + b"\n")
    findings = diagnostics.about(str(source), "kineto")
    findings.info("copied", "events were copied as they were written", copier.written)
    findings.info("copied-once", "events that appear twice in the file were copied once", copier.repeated)
    findings.info("no-events", "empty entries of the list were not copied", copier.empty)


class _EventCopier:
    """Copier of the JSON texts of events, block by block. It counts the events that it skips.

    An event with a duration is skipped if an earlier event has the same text.
    """

    def __init__(self, stream: EventStream, path: str) -> None:
        self.written = self.repeated = self.empty = 0
        self._stream = stream
        self._path = path
        self._seen: set[bytes] = set()

    def blocks(self) -> Iterator[bytes]:
        """Yield the texts of the events of each block, joined; nothing for a block without events."""
        before = 0
        for events, array in self._stream.blocks():
            texts = list(map(bytes, _RAWS.decode(array)))
            timed = [row for row, event in enumerate(events) if event.ph == "X" and event.ts is not None]
            times = event_times(events, array, timed, path=self._path, before=before)
            overflowed: list[int] = times.overflowed.tolist()
            for row in overflowed:
                fields = _FIELDS.decode(texts[timed[row]]) | {"dur": _NO_TIME}
                texts[timed[row]] = msgspec.json.encode(fields)
            before += len(events)
            selected: list[bytes] = []
            for event, text in zip(events, texts, strict=True):
                takes_time = event.ph == "X" and event.dur and event.args not in (b"{}", b"null")
                if text == b"{}":
                    self.empty += 1
                elif takes_time and text in self._seen:
                    self.repeated += 1
                else:
                    selected.append(text)
                    if takes_time:
                        self._seen.add(text)
            self.written += len(selected)
            if selected:
                yield b",\n".join(selected)
