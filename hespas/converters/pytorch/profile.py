"""A trace of PyTorch's profiler as a :class:`Profile`: device events, each with the operation behind it."""

from __future__ import annotations

from math import nan
from typing import TypeGuard

import msgspec
import numpy as np

from hespas.converters.chrome_events import report_repairs
from hespas.converters.launch_shapes import blocks_of_threads
from hespas.converters.linking import Nesting
from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace
from hespas.converters.pytorch.kernels import (
    KernelTalks,
    LinkedBy,
    Links,
    batches_of,
    measured_comms,
    owner_with_shapes,
    stated_words,
    step_ranges,
    steps_of,
)
from hespas.converters.pytorch.records import Header, Number
from hespas.graph import (
    Diagnostics,
    Findings,
    HostOps,
    HostRanges,
    MeasuredMemory,
    Profile,
    StatedCosts,
    StringTable,
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
"""Devices that a driver leaves without a name, by compute capability and processors."""


def first_ns(trace: KinetoTrace) -> int:
    """The first moment of a trace, from which times are counted."""
    starts = [int(part.start_ns.min()) for part in (trace.device, trace.launch, trace.host) if len(part)]
    return min(starts, default=0)


def profile_of(name: str, trace: KinetoTrace, nesting: Nesting, links: Links, talks: KernelTalks) -> Profile:
    """The profile of a linked trace; events and host operations in the order of the trace."""
    base_ns, device, host = first_ns(trace), trace.device, trace.host
    owner = owner_with_shapes(host, nesting, links.host)
    cause = np.where(owner >= 0, owner, links.host)
    count = len(device)
    strings = StringTableBuilder(trace.strings)
    comms = measured_comms(talks.of_event, strings, stated_words(trace, talks.of_event))
    grid_row = _grid_rows(trace, links, strings)
    calls = trace.launch
    devices, device_index = _devices(trace)
    rank = rank_of(trace.header)
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
        rank=np.full(count, rank) if is_of_job(trace.header) else device.place,
        stream=device.own_streams() if is_of_job(trace.header) else device.stream,
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
        host=host_ops(host, nesting, base_ns),
        stated=_stated_costs(trace),
        ranges=_ranges(trace, base_ns),
        waits=_waits(trace, base_ns),
        steps=step_ranges(trace, base_ns),
        memory=_memory(trace, base_ns),
        metadata=trace_metadata(trace),
    )


_COSTS = msgspec.json.Decoder(tuple[float | None, float | None])


def _stated_costs(trace: KinetoTrace) -> StatedCosts:
    """Return the costs that Inductor states of its kernels (PyTorch 2.8 and later)."""
    stated_row = trace.host.stated_row
    known: dict[int, tuple[float, float]] = {}
    for row in np.unique(stated_row[stated_row > 0]).tolist():
        try:
            flops, gigabytes = _COSTS.decode(trace.strings[row])
        except (msgspec.DecodeError, RecursionError):
            continue
        known[row] = (nan if flops is None else flops, nan if gigabytes is None else gigabytes * 1e9)
    op = np.flatnonzero(np.isin(stated_row, list(known)))
    costs = np.array([known[row] for row in stated_row[op].tolist()], np.float64).reshape(-1, 2)
    costs[~(costs > 0)] = nan
    return StatedCosts.of(op=op, flops=costs[:, 0], bytes_moved=costs[:, 1])


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


def host_ops(host: HostEvents, nesting: Nesting, base_ns: int) -> HostOps:
    """Operations of the host, with times since ``base_ns``."""
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


def is_of_job(header: Header) -> bool:
    """Whether the trace is of one of several processes, each of them a rank; else each device is one."""
    stated = header.distributed
    return stated is not None and (
        rank_of(header) > 0 or (is_count(stated.world_size) and stated.world_size > 1)
    )


def rank_of(header: Header) -> int:
    """The rank that a header states, 0 where it states none."""
    rank = header.distributed.rank if header.distributed else None
    return rank if is_count(rank) else 0


def is_count(number: Number) -> TypeGuard[int]:
    """Return True for a whole number that counts ranks."""
    return isinstance(number, int) and 0 <= number < 1 << 31


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
        "first_event_ns": first_ns(trace),
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
