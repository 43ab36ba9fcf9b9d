"""A trace of XLA's profiler as a :class:`Profile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.xplane.collect import Collected, HostTable, collect
from hespas.converters.xplane.cores import Ranked, ranked
from hespas.converters.xplane.facts import attachments, device_name, metadata, op_facts, shown_line
from hespas.converters.xplane.findings import Found, report
from hespas.converters.xplane.labels import Labels, collective_kinds, labels_of
from hespas.converters.xplane.lines import ABSENT, Line
from hespas.converters.xplane.programs import Membership, membership, run_numbers
from hespas.converters.xplane.space import SpaceFacts, SpaceReader
from hespas.converters.xplane.texts import Texts
from hespas.converters.xplane.wire import WireFault
from hespas.files.source import read_bytes
from hespas.graph import Diagnostics, HostOps, MeasuredComms, Profile
from hespas.graph.columns import IntArray, SmallIntArray
from hespas.graph.errors import FormatError

__all__ = ["Recorded", "profile_of", "read_xplane"]


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """What a file holds, whatever its container; ``format_name`` is that of the format."""

    format_name: str
    collected: Collected
    facts: SpaceFacts
    strings: Texts


def read_xplane(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read an XSpace. Raises ``FormatError`` for what is none, naming the byte.

    The rule for what counts as device work stands in :mod:`hespas.converters.xplane.lines`.
    """
    data = read_bytes(path, options.max_bytes)
    strings = Texts()
    reader = SpaceReader(data, strings, options.recover)
    try:
        collected = collect(reader.lines())
    except WireFault as fault:
        raise FormatError(
            f"no XSpace: {fault}", path=str(path), position=f"byte {fault.byte}",
            hint="was the profiler interrupted? record again, or read whole planes with --recover",
        ) from fault  # fmt: skip
    return profile_of(Recorded("xplane", collected, reader.facts, strings), path, options, diagnostics)


def profile_of(recorded: Recorded, path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """The profile of a trace. Raises ``FormatError`` where nothing was recorded."""
    collected, facts, strings = recorded.collected, recorded.facts, recorded.strings
    if not len(collected.device) and not len(collected.host):
        raise FormatError(
            "the trace holds neither device events nor host operations", path=str(path),
            position="all planes and lines",
            hint="did the program run between start_trace and stop_trace?",
        )  # fmt: skip
    on = ranked(collected, facts.planes, options.num_devices)
    merged = Collected(collected.lines, on.device, collected.host, collected.modules, collected.overlapping)
    member = membership(merged, facts.programs, strings)
    labels = labels_of(on.device, collected.lines, strings)
    host_event = _launched(on, collected.host)
    protos = attachments(facts.programs, member.modules)
    found = Found(collected, on, labels, member.label_row, host_event, facts, protos)
    report(found, strings, diagnostics, str(path), recorded.format_name)
    name = path.name.removesuffix(".gz").removesuffix(".pb").removesuffix(".json")
    return _built(name, recorded, found, member)


def _built(name: str, recorded: Recorded, found: Found, member: Membership) -> Profile:
    collected, facts, strings = recorded.collected, recorded.facts, recorded.strings
    on, labels, device = found.on, found.labels, found.on.device
    first_ns = _first_ns(collected, on)
    run = run_numbers(member.label_row, labels.op_row, on.rank, member.run_id, device.start_ps)
    devices, device_index = _devices(collected.lines, device.line, facts.planes)
    used_lines: list[int] = np.unique(device.line).tolist()
    used = list(dict.fromkeys(collected.lines[line].plane for line in used_lines))
    about = {"format": recorded.format_name, "first_event_ns": str((facts.base_ns or 0) + first_ns)}
    documents = op_facts(device, member.label_row, labels.op_row, strings)
    comms, host = _comms(labels, strings), _host_ops(collected, first_ns * 1000, strings)
    return Profile.of(
        name,
        devices,
        strings.build(),
        start_ns=(device.start_ps - first_ns * 1000) / 1000.0,
        duration_ns=device.exclusive_ps / 1000.0,
        op_row=labels.op_row.astype(np.int32),
        module_row=member.label_row.astype(np.int32),
        kernel_row=labels.kernel_row.astype(np.int32),
        category_row=labels.category_row.astype(np.int32),
        device_index=device_index,
        rank=on.rank.astype(np.int32),
        stream=_streams(collected.lines)[device.line],
        run=run.astype(np.int32),
        bytes_moved=labels.bytes_moved,
        host_event=found.host_event.astype(np.int32),
        comms=comms,
        host=host,
        metadata=about | metadata(facts.planes, used),
        attachments={**found.programs, **documents},
    )


def _first_ns(collected: Collected, on: Ranked) -> int:
    """The first event, in whole ns since the base of the trace."""
    starts = [int(table.start_ps.min()) for table in (on.device, collected.host) if len(table)]
    return min(starts) // 1000


def _launched(on: Ranked, host: HostTable) -> IntArray:
    """The operation around each device event, else the one that launched it: with its correlation id."""
    ids = on.device.stats["correlation_id"]
    calls = np.flatnonzero(host.launch != ABSENT)
    if not len(calls):
        return on.device.host
    order = calls[np.argsort(host.launch[calls], kind="stable")]
    known = host.launch[order]
    place = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    by_id = np.where((known[place] == ids) & (ids != ABSENT), order[place], -1)
    return np.where(on.device.host >= 0, on.device.host, by_id)


def _devices(
    lines: tuple[Line, ...], line: IntArray, planes: Mapping[str, Mapping[str, str]]
) -> tuple[tuple[str, ...], SmallIntArray]:
    """The kinds of devices that worked, and which one each event was of."""
    names: dict[str, int] = {}
    number = np.zeros(len(lines), np.int32)
    used: list[int] = np.unique(line).tolist()
    for place in used:
        plane = lines[place].plane
        number[place] = names.setdefault(device_name(plane, planes.get(plane, {})), len(names))
    return tuple(names) or ("",), number[line] if len(lines) else np.empty(0, np.int32)


def _streams(lines: tuple[Line, ...]) -> IntArray:
    """The number of each line: the profiler's, where that is small, else its place on the plane."""
    seen: dict[str, int] = {}
    numbers: list[int] = []
    for line in lines:
        place = seen[line.plane] = seen.get(line.plane, -1) + 1
        numbers.append(line.number if 0 <= line.number < 1 << 31 else place)
    return np.array(numbers, np.int64)


def _host_ops(collected: Collected, base_ps: int, strings: Texts) -> HostOps:
    host = collected.host
    count = len(host)
    threads = np.array([strings.add(shown_line(line)) for line in collected.lines], np.int64)
    nothing = np.zeros(count, np.int32)
    return HostOps(
        name_row=host.name_row.astype(np.int32),
        thread_row=threads[host.line].astype(np.int32),
        parent=host.parent.astype(np.int32),
        start_ns=(host.start_ps - base_ps) / 1000.0,
        duration_ns=host.duration_ps / 1000.0,
        sequence=np.full(count, -1, np.int64),
        shapes_row=nothing,
        dtype_row=nothing,
        strides_row=nothing,
        values_row=nothing,
    )


def _comms(labels: Labels, strings: Texts) -> MeasuredComms:
    """Operations that communicate, by their names; sizes and groups stand in the HLO."""
    kind = collective_kinds(labels.op_row, strings)
    event = np.flatnonzero(kind > 0)
    count = len(event)
    nothing, unknown = np.zeros(count, np.int32), np.full(count, np.nan)
    return MeasuredComms(
        event=event.astype(np.int32),
        kind_row=kind[event].astype(np.int32),
        operand_bytes=unknown,
        result_bytes=unknown,
        group_row=nothing,
        ranks_row=nothing,
        group_size=np.full(count, -1, np.int32),
        sequence=np.full(count, -1, np.int64),
    )
