"""A trace of PyTorch's profiler as a :class:`Profile`: device events, each with the operation behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

import numpy as np

from hespas.converters.chrome_events import report_repairs
from hespas.converters.format import ReadOptions
from hespas.converters.launch_shapes import blocks_of_threads
from hespas.converters.linking import Nesting, exclusive
from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace, read_events
from hespas.converters.pytorch.joined import joined
from hespas.converters.pytorch.kernels import (
    LinkedBy,
    Links,
    batches_of,
    host_steps_of,
    measured_comms,
    owner_with_shapes,
    steps_of,
    thread_key,
)
from hespas.converters.pytorch.records import Header, Number
from hespas.graph import (
    Diagnostics,
    Findings,
    HostOps,
    HostRanges,
    MeasuredMemory,
    Profile,
    StringTable,
    StringTableBuilder,
)
from hespas.graph.columns import IntArray, SmallIntArray, at_rows, mapped
from hespas.graph.errors import FormatError

__all__ = ["profile_of", "read_kineto", "report_links", "trace_metadata"]

_UNNAMED_DEVICES = {(9, 4, 304): "AMD Instinct MI300X", (9, 4, 228): "AMD Instinct MI300A"}
"""Devices that a driver leaves without a name, by compute capability and processors."""


def read_kineto(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read one rank's trace. Raises ``FormatError`` for what is no such trace, naming the byte.

    What it replays of captured graphs is joined with the captures of ``options``. Where neither a device nor
    a call of one is recorded the CPU is the device: its operations are the events, each with the time that
    none inside it takes.
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
    trace, nesting = found.trace, found.nesting
    report_links(trace, found.links, diagnostics, str(path))
    _report_ranks(trace, diagnostics, str(path))
    name = path.name.removesuffix(".gz").removesuffix(".json")
    if len(trace.device) or len(trace.launch) or trace.header.devices:
        profile = profile_of(name, trace, nesting, found.links)
        return replace(profile, metadata={**profile.metadata, **found.facts})
    return _profile_of_host(name, trace, nesting)


def _first_ns(trace: KinetoTrace) -> int:
    """The first moment of a trace, from which times are counted."""
    starts = [int(part.start_ns.min()) for part in (trace.device, trace.launch, trace.host) if len(part)]
    return min(starts, default=0)


def profile_of(name: str, trace: KinetoTrace, nesting: Nesting, links: Links) -> Profile:
    """The profile of a linked trace; events and host operations in the order of the trace."""
    base_ns, device, host = _first_ns(trace), trace.device, trace.host
    owner = owner_with_shapes(host, nesting, links.host)
    cause = np.where(owner >= 0, owner, links.host)
    count = len(device)
    strings = StringTableBuilder(trace.strings)
    comms = measured_comms(trace, nesting, links, strings)
    grid_row = _grid_rows(trace, links, strings)
    calls = trace.launch
    devices, device_index = _devices(trace)
    rank = _rank(trace.header)
    return Profile.of(
        name,
        devices,
        strings.build(),
        op_row=at_rows(host.name_row, cause, 0),
        kernel_row=device.name_row,
        category_row=device.category_row,
        shapes_row=at_rows(host.dims_row, cause, 0),
        dtype_row=at_rows(host.types_row, cause, 0),
        device_index=device_index,
        rank=np.full(count, rank) if _is_of_job(trace.header) else device.place,
        stream=device.own_streams() if _is_of_job(trace.header) else device.stream,
        start_ns=device.start_ns - base_ns,
        duration_ns=device.duration_ns,
        run=steps_of(trace, links),
        bytes_moved=np.where(device.bytes >= 0, device.bytes, np.nan),
        host_event=cause,
        launch_start_ns=at_rows((calls.start_ns - base_ns).astype(np.float64), links.launch, np.nan),
        launch_end_ns=at_rows((calls.end_ns - base_ns).astype(np.float64), links.launch, np.nan),
        launch_thread_row=at_rows(calls.thread, links.launch, 0),
        grid_row=grid_row,
        batch_row=batches_of(trace, links),
        comms=comms,
        host=_host_ops(host, nesting, base_ns),
        ranges=_ranges(trace, base_ns),
        waits=_waits(trace, base_ns),
        memory=_memory(trace, base_ns),
        metadata=trace_metadata(trace),
    )


def _ranges(trace: KinetoTrace, base_ns: int) -> HostRanges:
    """Named ranges, then functions of Python."""
    parts: tuple[Events, ...] = (trace.annotation, trace.function)
    return HostRanges.joined(
        [
            HostRanges.of(
                name_row=part.name_row,
                thread_row=part.thread,
                start_ns=part.start_ns - base_ns,
                duration_ns=part.duration_ns,
            )
            for part in parts
        ]
    )


def _waits(trace: KinetoTrace, base_ns: int) -> HostRanges:
    """Calls in which the host waits for a device."""
    calls = trace.launch
    rows = np.flatnonzero(
        mapped(calls.name_row, lambda row: trace.strings[row].endswith("Synchronize"), np.bool_)
    )
    return HostRanges.of(
        name_row=calls.name_row[rows],
        thread_row=calls.thread[rows],
        start_ns=calls.start_ns[rows] - base_ns,
        duration_ns=calls.duration_ns[rows],
    )


def _memory(trace: KinetoTrace, base_ns: int) -> MeasuredMemory:
    """Memory in use; totals below 0 are unknown."""
    found = trace.allocation
    totals = {
        f"{name}_bytes": np.where(column >= 0, column, np.nan)
        for name, column in (("allocated", found.allocated), ("reserved", found.reserved))
    }
    return MeasuredMemory.of(
        time_ns=found.start_ns - base_ns,
        device=np.where(found.device_type > 0, np.maximum(found.device, 0), -1),
        change_bytes=found.bytes,
        **totals,
    )


_COUNTS_THREADS = frozenset({"hipExtModuleLaunchKernel", "hipHccModuleLaunchKernel"})
"""Calls of HIP that are given a grid in threads, which Kineto writes as it is."""


def _grid_rows(trace: KinetoTrace, links: Links, strings: StringTableBuilder) -> SmallIntArray:
    """How each event was launched, in blocks."""
    names = at_rows(trace.launch.name_row, links.launch, 0)
    in_threads = mapped(names, lambda row: strings[row] in _COUNTS_THREADS, np.bool_)
    rows = trace.device.grid_row.copy()
    rows[in_threads] = blocks_of_threads(strings, rows[in_threads])
    return rows


def _profile_of_host(name: str, trace: KinetoTrace, nesting: Nesting) -> Profile:
    """The profile of a run on the CPU, in the order of the trace. An operation around others with shapes does
    nothing of its own but to call them: it keeps its time, and no shapes.
    """
    host, base_ns = trace.host, _first_ns(trace)
    key = thread_key(host)
    own_ns = exclusive(key, host.start_ns, host.end_ns)
    ran = np.flatnonzero(own_ns > 0)
    cause = owner_with_shapes(host, nesting, np.arange(len(host)))
    cause = np.where(cause >= 0, cause, np.arange(len(host)))[ran]
    calls = np.zeros(len(host), np.bool_)
    outer = nesting.parent[host.dims_row > 0]
    while len(outer := np.unique(outer[outer >= 0])):
        calls[outer] = True
        outer = nesting.parent[outer]
    bears = ~calls[cause]
    strings = StringTableBuilder(trace.strings)
    return Profile.of(
        name,
        ("CPU",),
        strings.build(),
        op_row=host.name_row[cause],
        kernel_row=host.name_row[ran],
        category_row=host.category_row[ran],
        shapes_row=np.where(bears, host.dims_row[cause], 0),
        dtype_row=np.where(bears, host.types_row[cause], 0),
        rank=np.full(len(ran), _rank(trace.header)),
        stream=np.unique(key, return_inverse=True)[1].reshape(-1)[ran],
        start_ns=host.start_ns[ran] - base_ns,
        duration_ns=own_ns[ran],
        run=host_steps_of(trace, host.start_ns[ran]),
        host_event=cause,
        host=_host_ops(host, nesting, base_ns),
        metadata=trace_metadata(trace),
    )


def _host_ops(host: HostEvents, nesting: Nesting, base_ns: int) -> HostOps:
    return HostOps.of(
        name_row=host.name_row,
        thread_row=host.thread,
        parent=nesting.parent,
        start_ns=host.start_ns - base_ns,
        duration_ns=host.duration_ns,
        sequence=host.sequence,
        shapes_row=host.dims_row,
        dtype_row=host.types_row,
        strides_row=host.strides_row,
        values_row=host.concrete_row,
    )


def _is_of_job(header: Header) -> bool:
    """Whether the trace is of one of several processes, each of them a rank; else each device is one."""
    stated = header.distributed
    return stated is not None and (
        _rank(header) > 0 or (_is_count(stated.world_size) and stated.world_size > 1)
    )


def _rank(header: Header) -> int:
    rank = header.distributed.rank if header.distributed else None
    return rank if _is_count(rank) else 0


def _is_count(number: Number) -> TypeGuard[int]:
    return isinstance(number, int) and 0 <= number < 1 << 31


def _report_ranks(trace: KinetoTrace, diagnostics: Diagnostics, path: str) -> None:
    """Say what is a rank, and which rank or number of ranks cannot be: nothing else tells traces apart."""
    several = len(trace.device.devices)
    each = "its streams are told apart" if _is_of_job(trace.header) else "each is a rank, in their order"
    message = f"one process worked on {several} devices: {each}"
    diagnostics.info("kineto.several-devices", path, message, count=several if several > 1 else 0)
    stated = trace.header.distributed
    if stated is None:
        return
    rank, size = stated.rank, stated.world_size
    unsaid = (
        "the trace is of a job of several ranks and does not say which it is: it is read as that of rank 0"
    )
    missing = rank is None and _is_count(size) and size > 1
    diagnostics.warning("kineto.missing-rank", path, unsaid, count=int(missing))
    text = f"the trace is of rank {str(rank)[:40]!r} of {str(size)[:40]!r} ranks"
    if rank is not None and not _is_count(rank):
        diagnostics.warning("kineto.impossible-rank", path, f"{text}: it is read as that of rank 0")
    elif size is not None and not (_is_count(size) and size > (rank if _is_count(rank) else 0)):
        diagnostics.warning("kineto.impossible-rank", path, f"{text}, which contradicts itself")


def _devices(trace: KinetoTrace) -> tuple[tuple[str, ...], SmallIntArray]:
    """The kinds of devices that worked, and which one each event was of; a CPU where there is none."""
    if not trace.header.devices and not len(trace.device):
        return ("CPU",), np.empty(0, np.int32)
    numbers: list[int] = trace.device.devices.tolist() or [0]
    kinds: dict[str, int] = {}
    kind = [kinds.setdefault(_device_name(trace.header, number), len(kinds)) for number in numbers]
    return tuple(kinds), np.array(kind, np.int32)[trace.device.place]


def _device_name(header: Header, number: int) -> str:
    """The device of that number, else the first of the list."""
    if not header.devices:
        return ""
    chosen = next((each for each in header.devices if each.id == number), header.devices[0])
    if chosen.name:
        return chosen.name
    key = (chosen.major, chosen.minor, chosen.processors)
    return next((name for known, name in _UNNAMED_DEVICES.items() if known == key), "")


def trace_metadata(trace: KinetoTrace) -> dict[str, str]:
    """Facts about the run; nothing that names a machine, a person or a path."""
    header = trace.header
    facts = {
        "format": "kineto",
        "schema_version": header.schema_version,
        "base_time_ns": header.base_time_ns,
        "first_event_ns": _first_ns(trace),
        **{name: getattr(header, name) for name in header.__struct_fields__ if name.endswith("_version")},
        "world_size": header.distributed.world_size if header.distributed else None,
        "backend": header.distributed.backend if header.distributed else None,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def report_links(trace: KinetoTrace, links: Links, diagnostics: Diagnostics, path: str) -> None:
    """Say what is not linked, what was left out, and what had to be repaired."""
    device, findings = trace.device, diagnostics.about(path, "kineto")
    twice = ", ".join(f"{category} {count:,}" for category, count in sorted(trace.repeated.items()))
    message = f"events stand in the file again, with the same ids and times, and count once: {twice}"
    findings.warning("repeated", message, sum(trace.repeated.values()))
    ran_ns = np.maximum(device.duration_ns, 0).astype(np.float64)
    total_ns = float(ran_ns.sum())
    for missing, code, message in (
        (links.launch < 0, "no-launch", "device events have no launch record in the window"),
        (links.linked_by == LinkedBy.NOTHING, "unlinked", "device events have no host operation"),
    ):
        share = float(ran_ns[missing].sum()) / total_ns if total_ns else 0.0
        text = f"{message}: {share:.1%} of the device time, kept by kernel and stream"
        findings.warning(code, text, int(missing.sum()))
    by_id = int((links.linked_by == LinkedBy.EXTERNAL_ID).sum())
    findings.info("linked-by-external-id", "linked by External id alone", by_id)
    listed = ", ".join(f"{category} {count:,}" for category, count in sorted(trace.skipped.items()))
    findings.info(
        "other-events", f"events that carry no work are left out: {listed}", sum(trace.skipped.values())
    )
    report_repairs(trace.repairs, findings)
    _report_times(trace.strings, device.duration_ns, device.name_row, findings)


def _report_times(
    strings: StringTable, duration_ns: IntArray, name_row: SmallIntArray, findings: Findings
) -> None:
    negative = np.flatnonzero(duration_ns < 0)
    if len(negative):
        name = strings[int(name_row[negative[0]])]
        message = f"device events end before they start, the first is {name[:80]!r}"
        findings.warning("negative-duration", message, len(negative))
    zero = int((duration_ns == 0).sum())
    findings.warning("zero-duration", "device events of 0 ns: the clock is coarse", zero)
    whole = len(duration_ns) > 0 and not bool((duration_ns % 1000).any())
    findings.info("clock-resolution", "times are whole microseconds", int(whole))
