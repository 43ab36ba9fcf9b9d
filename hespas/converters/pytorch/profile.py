"""Kineto traces as a :class:`Profile`: device events, each with the operation that caused it."""

from __future__ import annotations

from math import nan
from typing import TypeGuard

import msgspec
import numpy as np

from hespas.converters.chrome_events import report_repairs
from hespas.converters.launch_shapes import blocks_of_threads
from hespas.converters.linking import EventNesting
from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace
from hespas.converters.pytorch.kernel_communications import (
    KernelCommunications,
    collective_names,
    comm_columns,
)
from hespas.converters.pytorch.links import (
    DeviceLinks,
    LinkedBy,
    batches_of,
    owner_with_shapes,
    step_ranges,
    steps_of,
)
from hespas.converters.pytorch.records import JsonNumber, KinetoHeader
from hespas.graph import (
    CompilerCosts,
    Diagnostics,
    HostOps,
    HostRanges,
    MeasuredMemory,
    Profile,
    StringTableBuilder,
)
from hespas.graph.columns import IntArray, SmallIntArray, at_rows, mapped

__all__ = [
    "first_ns",
    "host_ops",
    "is_count",
    "is_of_job",
    "profile_of",
    "rank_of",
    "report_links",
    "trace_metadata",
]

_UNNAMED_DEVICES = {(9, 4, 304): "AMD Instinct MI300X", (9, 4, 228): "AMD Instinct MI300A"}
"""Devices whose driver reports no name, by compute capability and number of processors."""


def first_ns(trace: KinetoTrace) -> int:
    """Return the start of the first event of a trace, from which times are counted."""
    starts = [int(part.start_ns.min()) for part in (trace.device, trace.launch, trace.host) if len(part)]
    return min(starts, default=0)


def profile_of(
    name: str, trace: KinetoTrace, nesting: EventNesting, links: DeviceLinks, comms: KernelCommunications
) -> Profile:
    """Return the profile of a linked trace; events and host operations keep the order of the trace."""
    base_ns, device, host = first_ns(trace), trace.device, trace.host
    owner = owner_with_shapes(host, nesting, links.host)
    cause = np.where(owner >= 0, owner, links.host)
    strings = StringTableBuilder(trace.strings)
    measured_comms = comm_columns(comms.of_event, strings, collective_names(trace, comms.of_event))
    calls, memory = trace.launch, trace.allocation
    call_names = at_rows(calls.name_id, links.launch, 0)
    in_threads = mapped(call_names, lambda row: strings[row] in _GRID_IN_THREADS, np.bool_)
    grid_id = device.grid_id.copy()
    grid_id[in_threads] = blocks_of_threads(strings, grid_id[in_threads])
    waits = np.flatnonzero(
        mapped(calls.name_id, lambda row: trace.strings[row].endswith("Synchronize"), np.bool_)
    )
    ranges: tuple[Events, ...] = (trace.annotation, trace.function)
    devices, device_index = _devices(trace)
    is_one_rank = is_of_job(trace.header)
    # Inductor states costs for its kernels since PyTorch 2.8.
    stated_id = trace.host.stated_id
    costs_of: dict[int, tuple[float, float]] = {}
    for row in np.unique(stated_id[stated_id > 0]).tolist():
        try:
            flops, gigabytes = _STATED_COSTS.decode(trace.strings[row])
        except (msgspec.DecodeError, RecursionError):
            continue
        costs_of[row] = (nan if flops is None else flops, nan if gigabytes is None else gigabytes * 1e9)
    op = np.flatnonzero(np.isin(stated_id, list(costs_of)))
    costs = np.array([costs_of[row] for row in stated_id[op].tolist()], np.float64).reshape(-1, 2)
    costs[~(costs > 0)] = nan
    return Profile.of(
        name,
        devices,
        strings.build(),
        op_id=at_rows(host.name_id, cause, 0),
        kernel_id=device.name_id,
        category_id=device.category_id,
        shapes_id=at_rows(host.dims_id, cause, 0),
        dtype_id=at_rows(host.types_id, cause, 0),
        device_index=device_index,
        rank=np.full(len(device), rank_of(trace.header)) if is_one_rank else device.place,
        stream=device.own_streams() if is_one_rank else device.stream,
        start_ns=device.start_ns - base_ns,
        duration_ns=device.duration_ns,
        run=steps_of(trace, links),
        bytes_moved=np.where(device.bytes >= 0, device.bytes, np.nan),
        host_event=cause,
        launch_start_ns=at_rows((calls.start_ns - base_ns).astype(np.float64), links.launch, np.nan),
        launch_end_ns=at_rows((calls.end_ns - base_ns).astype(np.float64), links.launch, np.nan),
        launch_thread_id=at_rows(calls.thread, links.launch, 0),
        grid_id=grid_id,
        batch_id=batches_of(trace, links),
        comms=measured_comms,
        host=host_ops(host, nesting, base_ns),
        stated=CompilerCosts.of(op=op, flops=costs[:, 0], bytes_moved=costs[:, 1]),
        ranges=HostRanges.joined([_host_ranges(part, np.arange(len(part)), base_ns) for part in ranges]),
        waits=_host_ranges(calls, waits, base_ns),
        steps=step_ranges(trace, base_ns),
        memory=MeasuredMemory.of(
            time_ns=memory.start_ns - base_ns,
            device=np.where(memory.device_type > 0, np.maximum(memory.device, 0), -1),
            change_bytes=memory.bytes,
            allocated_bytes=np.where(memory.allocated >= 0, memory.allocated, np.nan),
            reserved_bytes=np.where(memory.reserved >= 0, memory.reserved, np.nan),
        ),
        metadata=trace_metadata(trace),
    )


def _host_ranges(events: Events, rows: IntArray, base_ns: int) -> HostRanges:
    return HostRanges.of(
        name_id=events.name_id[rows],
        thread_id=events.thread[rows],
        start_ns=events.start_ns[rows] - base_ns,
        duration_ns=events.duration_ns[rows],
    )


_STATED_COSTS = msgspec.json.Decoder(tuple[float | None, float | None])


_GRID_IN_THREADS = frozenset({"hipExtModuleLaunchKernel", "hipHccModuleLaunchKernel"})
"""HIP calls whose grid counts threads. Kineto records it unchanged."""


def host_ops(host: HostEvents, nesting: EventNesting, base_ns: int) -> HostOps:
    """Return the host operations of a trace, with times since ``base_ns``."""
    return HostOps.of(
        name_id=host.name_id,
        thread_id=host.thread,
        parent=nesting.parent,
        start_ns=host.start_ns - base_ns,
        duration_ns=host.duration_ns,
        sequence=host.sequence,
        shapes_id=host.dims_id,
        dtype_id=host.types_id,
        strides_id=host.strides_id,
        values_id=host.concrete_id,
    )


def is_of_job(header: KinetoHeader) -> bool:
    """Return True if the trace belongs to a job of several processes; it is then one rank of the job.

    Otherwise each device in the trace is a rank.
    """
    distributed = header.distributed
    return distributed is not None and (
        rank_of(header) > 0 or (is_count(distributed.world_size) and distributed.world_size > 1)
    )


def rank_of(header: KinetoHeader) -> int:
    """Return the rank that a header states, 0 if it states none."""
    rank = header.distributed.rank if header.distributed else None
    return rank if is_count(rank) else 0


def is_count(number: JsonNumber) -> TypeGuard[int]:
    """Return True for a whole number that is possible as a number of ranks."""
    return isinstance(number, int) and 0 <= number < 1 << 31


def _devices(trace: KinetoTrace) -> tuple[tuple[str, ...], SmallIntArray]:
    """Return the distinct device names, and for each event the index of its device name; the only device is a
    CPU if nothing ran on a device.
    """
    properties = trace.header.devices
    if not properties and not len(trace.device):
        return ("CPU",), np.empty(0, np.int32)
    numbers: list[int] = trace.device.devices.tolist() or [0]
    names: list[str] = []
    for number in numbers:
        name = ""
        if properties:  # the device of that number, else the first one
            device = next((entry for entry in properties if entry.id == number), properties[0])
            key = (device.major, device.minor, device.processors)
            unnamed = next((text for known_key, text in _UNNAMED_DEVICES.items() if known_key == key), "")
            name = device.name or unnamed
        names.append(name)
    distinct = list(dict.fromkeys(names))
    index = [distinct.index(name) for name in names]
    return tuple(distinct), np.array(index, np.int32)[trace.device.place]


def trace_metadata(trace: KinetoTrace) -> dict[str, str]:
    """Return facts about the run, without names of machines or persons and without paths."""
    header = trace.header
    facts = {
        "format": "kineto",
        "schema_version": header.schema_version,
        "base_time_ns": header.base_time_ns,
        "first_event_ns": first_ns(trace),
        **{name: getattr(header, name) for name in header.__struct_fields__ if name.endswith("_version")},
        "world_size": header.distributed.world_size if header.distributed else None,
        "backend": header.distributed.backend if header.distributed else None,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def report_links(trace: KinetoTrace, links: DeviceLinks, diagnostics: Diagnostics, path: str) -> None:
    """Report events that are not linked, skipped or repaired."""
    device, findings = trace.device, diagnostics.about(path, "kineto")
    listed = ", ".join(f"{category} {count:,}" for category, count in sorted(trace.repeated.items()))
    message = f"events appear again in the file, with the same ids and times, and count once: {listed}"
    findings.warning("repeated", message, sum(trace.repeated.values()))
    ran_ns = np.maximum(device.duration_ns, 0).astype(np.float64)
    total_ns = float(ran_ns.sum())
    for missing, code, message in (
        (links.launch < 0, "no-launch", "device events have no launch record in the window"),
        (links.linked_by == LinkedBy.NOTHING, "unlinked", "device events have no host operation"),
    ):
        share = float(ran_ns[missing].sum()) / total_ns if total_ns else 0.0
        text = f"{message}: {share:.1%} of the device time, identified by kernel and stream only"
        findings.warning(code, text, int(missing.sum()))
    by_id = int((links.linked_by == LinkedBy.EXTERNAL_ID).sum())
    findings.info("linked-by-external-id", "device events linked by External id alone", by_id)
    listed = ", ".join(f"{category} {count:,}" for category, count in sorted(trace.skipped.items()))
    message = f"events that are not work are skipped: {listed}"
    findings.info("other-events", message, sum(trace.skipped.values()))
    report_repairs(trace.repairs, findings)
    negative = np.flatnonzero(device.duration_ns < 0)
    if len(negative):
        name = trace.strings[int(device.name_id[negative[0]])]
        message = f"device events end before they start, the first is {name[:80]!r}"
        findings.warning("negative-duration", message, len(negative))
    zero = int((device.duration_ns == 0).sum())
    findings.warning("zero-duration", "device events of 0 ns: the clock is coarse", zero)
    is_coarse = len(device) > 0 and not bool((device.duration_ns % 1000).any())
    findings.info("clock-resolution", "times are whole microseconds", int(is_coarse))
