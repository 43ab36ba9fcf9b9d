"""Conversion of a trace of XLA's profiler to a :class:`Profile`.

The program of a device event is the one that the event names. An operation that names none belongs to the
program whose run encloses it on the plane's ``XLA Modules`` line. Other events on a stream stay without a
program, because they may belong to another one. The run of a program is found from, in this order: the
event's ``run_id``; the enclosing run of its program; its ``group_id``; repetitions. With repetitions, a new
run begins each time the first of the program's rarest operations occurs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.linking import match_rows
from hespas.converters.xplane.collect import (
    CollectedTrace,
    DeviceTable,
    EventLabels,
    Ranked,
    collect,
    collective_kinds,
    labels_of,
    ranked,
)
from hespas.converters.xplane.lines import (
    ABSENT,
    LineKind,
    ProfiledHlo,
    TraceLine,
    has_devices,
    split_module_name,
)
from hespas.converters.xplane.space import SpaceFacts, SpaceReader
from hespas.files.streams import read_bytes
from hespas.files.wire import WireError
from hespas.graph import Diagnostics, Findings, HostOps, MeasuredComms, Profile, StringTableBuilder
from hespas.graph.columns import BoolArray, IntArray, distinct_rows
from hespas.graph.errors import FormatError
from hespas.schemas.xplane import CPU_PLANE, ENVIRONMENT_PLANE, GPU_PREFIX, METADATA_PLANE, TPU_PREFIX

__all__ = ["Modules", "RecordedTrace", "profile_of", "read_xplane", "run_numbers"]

_MASK64 = (1 << 64) - 1
_OP_FACTS = "op-facts.json"
"""Attachment with the facts of a trace about its operations: ``{"modules": {MODULE: {OP: {...}}}}``."""

_UNNAMED_DEVICES = {("9.4", "304"): "AMD Instinct MI300X", ("9.4", "228"): "AMD Instinct MI300A"}
"""GPUs for which the driver records no name, by compute capability and number of processors."""
_DEVICE_FACTS = (
    "clock_rate",
    "core_count",
    "memory_bandwidth",
    "memory_size",
    "compute_cap_major",
    "compute_cap_minor",
    "peak_teraflops_per_second",
    "peak_hbm_bw_gigabytes_per_second",
    "peak_cmem_rd_bw_gigabytes_per_second",
    "peak_cmem_wr_bw_gigabytes_per_second",
    "peak_vmem_rd_bw_gigabytes_per_second",
    "peak_vmem_wr_bw_gigabytes_per_second",
    "has_megacore",
)
_VERSIONS = (
    "jax_version",
    "jaxlib_version",
    "cpu_version",
    "libtpu_version",
    "cuda_version",
    "cuda_runtime_version",
    "cuda_driver_version",
    "rocm_version",
)
_TEXT_FACTS = ("tf_op", "source", "hlo_category", "shape_with_layout", "long_name")
_NUMBER_FACTS = ("model_flops", "flops", "bytes_accessed")


@dataclass(frozen=True, slots=True)
class Modules:
    """Labels of the programs in a trace. A label is the name of the program, followed by its id if several
    programs have the same name.
    """

    ids: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, int]]) -> Modules:
        """Build the labels from the name and id (-1: unknown) of every program in events or HLO."""
        ids: dict[str, set[int]] = {}
        for name, number in pairs:
            numbers = ids.setdefault(name, set())
            if number != -1:
                numbers.add(number)
        return cls({name: frozenset(numbers) for name, numbers in ids.items()})

    def label(self, name: str, number: int) -> str:
        """Return ``jit_step``, or ``jit_step(42)`` where the name is not unique."""
        if number == -1 or len(self.ids.get(name, ())) < 2:
            return name
        return f"{name}({number & _MASK64})"


@dataclass(frozen=True, slots=True, eq=False)
class _ProgramMembership:
    """Program to which each device event belongs.

    ``label_id`` is the string row of the program's label (0: unknown), ``run_id`` the id of the run
    (:data:`ABSENT`: unknown).
    """

    modules: Modules
    label_id: IntArray
    run_id: IntArray


def _membership(
    collected: CollectedTrace, known_programs: list[ProfiledHlo], strings: StringTableBuilder
) -> _ProgramMembership:
    """Find the compiled program to which every device event belongs."""
    # The id of a program may be part of its name.
    stats = collected.device.stats
    rows, inverse = np.unique(stats["hlo_module"], return_inverse=True)
    names = [split_module_name(strings[row]) for row in rows.tolist()]
    name_id = np.array([strings.add(name) for name, _ in names], np.int64)[inverse]
    in_name = np.array([number for _, number in names], np.int64)[inverse]
    program_id = np.where(stats["program_id"] == ABSENT, in_name, stats["program_id"])
    programs_of = _NamedPrograms(name_id, program_id, stats["run_id"].copy())
    rows_by_plane = collected.rows_by_plane() if collected.modules else {}
    of_program = np.array([line.kind is LineKind.OPS for line in collected.lines], np.bool_)
    for plane, runs in collected.modules.items():
        rows = rows_by_plane.get(plane, np.empty(0, np.int64))
        rows = rows[(programs_of.name_id[rows] > 0) | of_program[collected.device.line[rows]]]
        # Fill in the program and run of the events ``rows`` from the program runs that enclose them.
        run_index = runs.at(collected.device.start_ps[rows])
        names = [split_module_name(strings[row]) for row in runs.name_id.tolist()]
        run_name = np.array([strings.add(name) for name, _ in names], np.int64)
        in_name = np.array([number for _, number in names], np.int64)
        run_program = np.where(runs.program_id == ABSENT, in_name, runs.program_id)
        identity = np.where(runs.run_id == ABSENT, np.arange(len(runs.run_id)), runs.run_id)
        has_run = run_index >= 0
        rows, run_index = rows[has_run], run_index[has_run]
        fits = (programs_of.name_id[rows] == 0) | (programs_of.name_id[rows] == run_name[run_index])
        rows, run_index = rows[fits], run_index[fits]
        programs_of.name_id[rows] = run_name[run_index]
        programs_of.program_id[rows] = np.where(
            programs_of.program_id[rows] == -1, run_program[run_index], programs_of.program_id[rows]
        )
        programs_of.run_id[rows] = np.where(
            programs_of.run_id[rows] == ABSENT, identity[run_index], programs_of.run_id[rows]
        )
    group_id = collected.device.stats["group_id"]
    programs_of.run_id = np.where(programs_of.run_id == ABSENT, group_id, programs_of.run_id)
    keys, pair_index = distinct_rows(programs_of.name_id, programs_of.program_id)
    pairs = [(strings[row], number) for row, number in keys]
    modules = Modules.of([*pairs, *((program.name, program.number) for program in known_programs)])
    labels = np.array([strings.add(modules.label(*pair)) for pair in pairs], np.int64)
    return _ProgramMembership(modules, labels[pair_index], programs_of.run_id)


@dataclass(slots=True, eq=False)
class _NamedPrograms:
    """Program of each event while it is determined in several steps: name and id of the program (-1: none),
    and id of its run.
    """

    name_id: IntArray
    program_id: IntArray
    run_id: IntArray


def run_numbers(
    label_id: IntArray, op_id: IntArray, rank: IntArray, run_id: IntArray, start_ps: IntArray
) -> IntArray:
    """Number the runs of each program from 0; -1 for events without a program.

    If several ranks share run ids, a run has the same number on all of them.
    """
    numbers = np.full(len(label_id), -1, np.int64)
    with_id = np.flatnonzero((label_id > 0) & (run_id != ABSENT))
    if len(with_id):
        is_shared = len(distinct_rows(run_id[with_id], rank[with_id])[0]) > len(np.unique(run_id[with_id]))
        group = label_id[with_id] if is_shared else distinct_rows(label_id[with_id], rank[with_id])[1]
        # Number the runs within each group in the order of their first events.
        _, pair = distinct_rows(group, run_id[with_id])
        count = int(pair.max()) + 1
        first = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(first, pair, start_ps[with_id])
        group_of = np.zeros(count, np.int64)
        group_of[pair] = group
        order = np.lexsort((first, group_of))
        ordered = group_of[order]
        begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        lengths = np.diff(np.append(begins, count))
        ordinal = np.zeros(count, np.int64)
        ordinal[order] = np.arange(count) - np.repeat(begins, lengths)
        numbers[with_id] = ordinal[pair]
    rest = np.flatnonzero((label_id > 0) & (run_id == ABSENT))
    group = distinct_rows(label_id[rest], rank[rest])[1]
    order = np.argsort(group, kind="stable")
    for rows in np.split(rest[order], np.flatnonzero(np.diff(group[order])) + 1):
        if len(rows):
            # Each repetition of one of the rarest operations begins a run; earlier events are a run too.
            begin_ps = start_ps[rows]
            _, code, counts = np.unique(op_id[rows], return_inverse=True, return_counts=True)
            rare = np.flatnonzero(counts[code] == counts.min())
            anchor = code[rare[int(begin_ps[rare].argmin())]]
            starts_ps = np.sort(begin_ps[code == anchor])
            run_index = np.searchsorted(starts_ps, begin_ps, side="right") - 1
            numbers[rows] = run_index - int(run_index.min())
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTrace:
    """Contents of an XLA profile, from either file format; ``format_name`` is the name of the format."""

    format_name: str
    collected: CollectedTrace
    facts: SpaceFacts
    strings: StringTableBuilder


def read_xplane(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read an XSpace. Raises ``FormatError`` with the byte position if the file is not an XSpace.

    :mod:`hespas.converters.xplane.lines` defines the events that count as device work.
    """
    data = read_bytes(path, options.max_bytes)
    strings = StringTableBuilder()
    reader = SpaceReader(data, strings, options.recover)
    try:
        collected = collect(reader.lines())
    except WireError as fault:
        raise FormatError(
            f"not an XSpace: {fault}",
            path=str(path),
            position=f"byte {fault.position}",
            hint="record again, or read whole planes with `recover`",
        ) from fault
    return profile_of(RecordedTrace("xplane", collected, reader.facts, strings), path, options, diagnostics)


def profile_of(
    recorded: RecordedTrace, path: Path, options: ReadOptions, diagnostics: Diagnostics
) -> Profile:
    """Convert an XLA profile to the common form of profiles. Raises ``FormatError`` if nothing was
    recorded.
    """
    collected, facts, strings = recorded.collected, recorded.facts, recorded.strings
    if not len(collected.device) and not len(collected.host):
        raise FormatError(
            "the trace holds neither device events nor host operations",
            path=str(path),
            position="all planes and lines",
            hint="run the program between start_trace and stop_trace",
        )
    on = ranked(collected, facts.planes, options.num_devices)
    member = _membership(replace(collected, device=on.device), facts.programs, strings)
    labels = labels_of(on.device, collected.lines, strings)
    by_id = match_rows((collected.host.launch,), (on.device.stats["correlation_id"],))
    host_event = np.where(on.device.host >= 0, on.device.host, by_id)
    protos = {
        f"hlo/{member.modules.label(program.name, program.number)}": program.hlo for program in facts.programs
    }
    trace = _ReportInputs(collected, on, labels, member.label_id, host_event, facts, protos)
    findings = diagnostics.about(str(path), recorded.format_name)
    device = trace.on.device
    taken, total_ps = device.exclusive_ps, int(device.exclusive_ps.sum())

    def share(rows: BoolArray) -> str:
        return f"{int(taken[rows].sum()) / total_ps if total_ps else 0.0:.1%} of the device time"

    spans_ps = int(trace.collected.device.duration_ps.sum())
    counted = f"{_ns(total_ps)} of device time counted; the events span {_ns(spans_ps)}"
    findings.info("device-time", counted, len(device))
    wrapping = f"operations enclose others; each counts its exclusive time: {share(device.is_wrapper)}"
    findings.info("wrapper", wrapping, int(device.is_wrapper.sum()))
    unnamed = (trace.labels.op_id == 0) | (trace.label_id == 0)
    no_op = f"device events without an operation or program: {share(unnamed)}"
    findings.warning("no-op", f"{no_op}, identified by kernel and stream only", int(unnamed.sum()))
    kinds = np.array([line.kind for line in trace.collected.lines], np.int64)[device.line]
    unlaunched = (kinds == LineKind.STREAM) & (trace.host_event < 0)
    no_launch = f"device events have no launch record: {share(unlaunched)}"
    findings.warning("no-launch", no_launch, int(unlaunched.sum()))
    overlap = "operations end after the operation in which they begin; both count in full"
    findings.warning("overlapping", overlap, trace.collected.overlapping)
    merged = f"events of second cores were merged into first cores: {_ns(trace.on.merged_ps)} of core time"
    findings.info("merged-cores", merged, trace.on.merged)
    alone = "events on one core of a megacore without a counterpart on the other core; they count in full"
    findings.warning("lone-core", alone, trace.on.alone)
    undecided = (
        "pairs of cores ran the same programs; the file does not state if each pair is one device (a "
        "megacore), so they count as two devices, each with half of every operation; read the .xplane.pb of "
        "the same recording, or set `num_devices` to half the number of cores"
    )
    findings.warning("megacore-not-stated", undecided, trace.on.undecided)
    # Report programs without HLO, unless the file has no HLO at all.
    if trace.programs:
        ran = [strings[row] for row in np.unique(trace.label_id).tolist() if row]
        missing = [name for name in ran if f"hlo/{name}" not in trace.programs]
        listed = ", ".join(name[:60] for name in missing[:5])
        findings.warning("no-hlo", f"the HLO of programs is not in the file: {listed}", len(missing))
    _report_events(trace, strings, findings)
    name = path.name.removesuffix(".gz").removesuffix(".pb").removesuffix(".json")
    return _built(name, recorded, trace, member)


def _built(name: str, recorded: RecordedTrace, trace: _ReportInputs, member: _ProgramMembership) -> Profile:
    collected, facts, strings = recorded.collected, recorded.facts, recorded.strings
    on, labels, device = trace.on, trace.labels, trace.on.device
    starts = [int(table.start_ps.min()) for table in (on.device, collected.host) if len(table)]
    first_ns = min(starts) // 1000
    run = run_numbers(member.label_id, labels.op_id, on.rank, member.run_id, device.start_ps)
    # Find the device kinds in use, and the device kind of each event.
    names: dict[str, int] = {}
    number = np.zeros(len(collected.lines), np.int32)
    used_lines: list[int] = np.unique(device.line).tolist()
    for index in used_lines:
        plane = collected.lines[index].plane
        # Name the device of the plane as exactly as its stats allow.
        stats = facts.planes.get(plane, {})
        if plane == CPU_PLANE:
            device_name = "CPU"
        else:
            device_name = (
                stats.get("device_type_string")
                or stats.get("gpu_device_name")
                or stats.get("device_type")
                or ""
            )
            if not device_name:
                capability = f"{stats.get('compute_cap_major')}.{stats.get('compute_cap_minor')}"
                key = (capability, stats.get("core_count", ""))
                if stats.get("device_vendor") == "AMD" and key in _UNNAMED_DEVICES:
                    device_name = _UNNAMED_DEVICES[key]
                else:
                    kind = (
                        "GPU"
                        if plane.startswith(GPU_PREFIX)
                        else "TPU"
                        if plane.startswith(TPU_PREFIX)
                        else ""
                    )
                    device_name = f"{stats.get('device_vendor', '')} {kind}".strip()
        number[index] = names.setdefault(device_name, len(names))
    devices = tuple(names) or ("",)
    device_index = number[device.line] if len(collected.lines) else np.empty(0, np.int32)
    used_planes = list(dict.fromkeys(collected.lines[index].plane for index in used_lines))
    about = {"format": recorded.format_name, "first_event_ns": str((facts.base_ns or 0) + first_ns)}
    host = collected.host
    thread_names = [f"{line.plane}/{line.name or line.number}" for line in collected.lines]
    threads = np.array([strings.add(thread) for thread in thread_names], np.int64)
    host_ops = HostOps.of(
        name_id=host.name_id,
        thread_id=threads[host.line],
        parent=host.parent,
        start_ns=(host.start_ps - (first_ns * 1000)) / 1000.0,
        duration_ns=host.duration_ps / 1000.0,
    )
    comm_kind = collective_kinds(labels.op_id, strings)  # sizes and groups are in the HLO
    comm_event = np.flatnonzero(comm_kind > 0)
    return Profile.of(
        name,
        devices,
        strings.build(),
        start_ns=(device.start_ps - first_ns * 1000) / 1000.0,
        duration_ns=device.exclusive_ps / 1000.0,
        op_id=labels.op_id,
        module_id=member.label_id,
        kernel_id=labels.kernel_id,
        category_id=labels.category_id,
        device_index=device_index,
        rank=on.rank,
        stream=_streams(collected.lines)[device.line],
        run=run,
        bytes_moved=labels.bytes_moved,
        grid_id=labels.grid_id,
        host_event=trace.host_event,
        comms=MeasuredComms.of(event=comm_event, kind_id=comm_kind[comm_event]),
        host=host_ops,
        metadata=about | _metadata(facts.planes, used_planes),
        attachments={**trace.programs, **_op_facts(device, member.label_id, labels.op_id, strings)},
    )


def _streams(lines: tuple[TraceLine, ...]) -> IntArray:
    """Return the stream number of each line.

    It is the number that the profiler states if that is below 2**31, else the index of the line on its plane.
    """
    seen: dict[str, int] = {}
    numbers: list[int] = []
    for line in lines:
        index = seen[line.plane] = seen.get(line.plane, -1) + 1
        numbers.append(line.number if 0 <= line.number < 1 << 31 else index)
    return np.array(numbers, np.int64)


def _metadata(planes: Mapping[str, Mapping[str, str]], used: list[str]) -> dict[str, str]:
    """Return versions and the device facts of the first plane in ``used``; never the name of a machine."""
    versions = planes.get(METADATA_PLANE, {})
    facts = {name: versions[name] for name in _VERSIONS if versions.get(name)}
    start = planes.get(ENVIRONMENT_PLANE, {}).get("profile_start_time")
    if start:
        facts["profile_start_time_ns"] = start
    nothing: Mapping[str, str] = {}
    device_facts = next((planes[plane] for plane in used if planes.get(plane)), nothing)
    return facts | {f"device_{name}": device_facts[name] for name in _DEVICE_FACTS if name in device_facts}


def _op_facts(
    device: DeviceTable, label_id: IntArray, op_id: IntArray, strings: StringTableBuilder
) -> dict[str, bytes]:
    """Return the facts about operations as an attachment; empty where the trace has none."""
    stats = device.stats
    has_facts = np.zeros(len(device), np.bool_)
    for name in _TEXT_FACTS:
        has_facts |= stats[name] > 0
    for name in _NUMBER_FACTS:
        has_facts |= stats[name] != ABSENT
    rows = np.flatnonzero(has_facts & (op_id > 0))
    if not len(rows):
        return {}
    _, first = np.unique(np.stack([label_id[rows], op_id[rows]]), axis=1, return_index=True)
    modules: dict[str, dict[str, dict[str, str | int]]] = {}
    for row in rows[np.sort(first)].tolist():
        facts: dict[str, str | int] = {
            name: strings[int(stats[name][row])] for name in _TEXT_FACTS if stats[name][row] > 0
        }
        facts |= {name: int(stats[name][row]) for name in _NUMBER_FACTS if stats[name][row] != ABSENT}
        modules.setdefault(strings[int(label_id[row])], {})[strings[int(op_id[row])]] = facts
    document = {"schema": "hespas-op-facts/1", "modules": modules}
    return {_OP_FACTS: msgspec.json.encode(document)}


@dataclass(frozen=True, slots=True, eq=False)
class _ReportInputs:
    """Values that the diagnostics about a profile need. Columns have one value per device event."""

    collected: CollectedTrace
    on: Ranked
    labels: EventLabels
    label_id: IntArray
    host_event: IntArray
    facts: SpaceFacts
    programs: Mapping[str, bytes]


def _ns(picoseconds: int) -> str:
    return f"{picoseconds // 1000:,}.{picoseconds % 1000:03d} ns"


def _report_events(trace: _ReportInputs, strings: StringTableBuilder, findings: Findings) -> None:
    negative = np.flatnonzero(trace.on.device.duration_ps < 0)
    if len(negative):
        name = strings[int(trace.labels.kernel_id[negative[0]])]
        message = f"device events end before they start, the first is {name[:80]!r}"
        findings.warning("negative-duration", message, len(negative))
    silent = [plane for plane in trace.facts.planes if has_devices([plane])]
    listed = ", ".join(plane[:60] for plane in silent[:4])
    nothing = f"nothing was recorded on devices: {listed}; the host events that name them are launches"
    findings.warning("no-device-events", nothing, 0 if len(trace.on.device) else len(silent))
    zero = int((trace.on.device.duration_ps == 0).sum())
    findings.warning("zero-duration", "device events of 0 ps", zero)
    facts = trace.facts
    listed = ", ".join(f"{name[:60]} {count:,}" for name, count in sorted(facts.other_lines.items())[:12])
    other_lines = f"events of lines that repeat or overlap the operations are left out: {listed}"
    findings.info("other-lines", other_lines, sum(facts.other_lines.values()))
    findings.warning("unknown-kind", "events without a description in the file", facts.unnamed)
    findings.warning(
        "aggregated", "events aggregate several executions; each has the time of all", facts.aggregated
    )
    findings.warning("profiler-message", "errors and warnings of the profiler are in the file", facts.errors)
    findings.warning("cut", "the file ends inside a plane; that plane is left out", facts.cut_planes)
