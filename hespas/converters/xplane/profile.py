"""A trace of XLA's profiler as a :class:`Profile`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from hespas.converters.format import ReadOptions
from hespas.converters.linking import match_rows
from hespas.converters.xplane.collect import (
    Collected,
    DeviceTable,
    HostTable,
    Labels,
    ModuleRuns,
    Ranked,
    collect,
    collective_kinds,
    labels_of,
    ranked,
)
from hespas.converters.xplane.lines import (
    ABSENT,
    Line,
    LineKind,
    Program,
    has_devices,
    split_module_name,
)
from hespas.converters.xplane.space import SpaceFacts, SpaceReader
from hespas.files.streams import read_bytes
from hespas.files.wire import WireError
from hespas.graph import Diagnostics, Findings, HostOps, MeasuredComms, Profile, StringTableBuilder
from hespas.graph.columns import BoolArray, IntArray, SmallIntArray, distinct_rows
from hespas.graph.errors import FormatError
from hespas.schemas.xplane import CPU_PLANE, ENVIRONMENT_PLANE, GPU_PREFIX, METADATA_PLANE, TPU_PREFIX

__all__ = ["Modules", "Recorded", "profile_of", "read_xplane", "run_numbers"]

# --- To which program and which run of it a device event belongs.
#
# The program is the one the event names, else, for operations, the one whose run encloses it on the plane's
# ``XLA Modules``; what else runs on a stream at that time may be somebody else's. The run is told by, in this
# order: the event's ``run_id``; the enclosing run of its program; its ``group_id``; else by counting: a new
# run begins with each repetition of the first operation among those the program repeats least often.


_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Modules:
    """How programs are called: by name, and with their id where several share the name."""

    ids: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, int]]) -> Modules:
        """Of all programs that events or HLO speak of, as name and id (-1: not known)."""
        ids: dict[str, set[int]] = {}
        for name, number in pairs:
            known = ids.setdefault(name, set())
            if number != -1:
                known.add(number)
        return cls({name: frozenset(known) for name, known in ids.items()})

    def label(self, name: str, number: int) -> str:
        """``jit_step``, or ``jit_step(42)`` where that is not enough."""
        if number == -1 or len(self.ids.get(name, ())) < 2:
            return name
        return f"{name}({number & _MASK64})"


@dataclass(frozen=True, slots=True, eq=False)
class _Membership:
    """Per device event: string rows of its program's name and of its label (0: unknown), and ids of its
    run (:data:`ABSENT`: not told).
    """

    modules: Modules
    label_row: IntArray
    run_id: IntArray


def _membership(collected: Collected, programs: list[Program], strings: StringTableBuilder) -> _Membership:
    """Find the program of every device event."""
    stated = _stated(collected, strings)
    rows_by_plane = collected.rows_by_plane() if collected.modules else {}
    of_program = np.array([line.kind is LineKind.OPS for line in collected.lines], np.bool_)
    for plane, runs in collected.modules.items():
        rows = rows_by_plane.get(plane, np.empty(0, np.int64))
        rows = rows[(stated.name_row[rows] > 0) | of_program[collected.device.line[rows]]]
        _by_window(runs, collected.device.start_ps[rows], rows, stated, strings)
    group_id = collected.device.stats["group_id"]
    stated.run_id = np.where(stated.run_id == ABSENT, group_id, stated.run_id)
    return _labelled(stated, programs, strings)


@dataclass(slots=True, eq=False)
class _Stated:
    """What is known of each event while it is found: the name of its program, its id (-1: none), its run."""

    name_row: IntArray
    program_id: IntArray
    run_id: IntArray


def _stated(collected: Collected, strings: StringTableBuilder) -> _Stated:
    """What events say themselves; the id of a program may be part of its name."""
    stats = collected.device.stats
    rows, inverse = np.unique(stats["hlo_module"], return_inverse=True)
    names = [split_module_name(strings[row]) for row in rows.tolist()]
    name_row = np.array([strings.add(name) for name, _ in names], np.int64)[inverse]
    in_name = np.array([number for _, number in names], np.int64)[inverse]
    program_id = np.where(stats["program_id"] == ABSENT, in_name, stats["program_id"])
    return _Stated(name_row, program_id, stats["run_id"].copy())


def _by_window(
    runs: ModuleRuns, start_ps: IntArray, rows: IntArray, stated: _Stated, strings: StringTableBuilder
) -> None:
    """Fill in, for the events ``rows`` of a plane, what the runs of programs around them tell."""
    at = runs.at(start_ps)
    names = [split_module_name(strings[row]) for row in runs.name_row.tolist()]
    run_name = np.array([strings.add(name) for name, _ in names], np.int64)
    in_name = np.array([number for _, number in names], np.int64)
    run_program = np.where(runs.program_id == ABSENT, in_name, runs.program_id)
    identity = np.where(runs.run_id == ABSENT, np.arange(len(runs.run_id)), runs.run_id)
    found = at >= 0
    rows, at = rows[found], at[found]
    fits = (stated.name_row[rows] == 0) | (stated.name_row[rows] == run_name[at])
    rows, at = rows[fits], at[fits]
    stated.name_row[rows] = run_name[at]
    stated.program_id[rows] = np.where(
        stated.program_id[rows] == -1, run_program[at], stated.program_id[rows]
    )
    stated.run_id[rows] = np.where(stated.run_id[rows] == ABSENT, identity[at], stated.run_id[rows])


def _labelled(stated: _Stated, programs: list[Program], strings: StringTableBuilder) -> _Membership:
    keys, place = distinct_rows(stated.name_row, stated.program_id)
    pairs = [(strings[row], number) for row, number in keys]
    modules = Modules.of([*pairs, *((each.name, each.number) for each in programs)])
    labels = np.array([strings.add(modules.label(*pair)) for pair in pairs], np.int64)
    return _Membership(modules, labels[place], stated.run_id)


def run_numbers(
    label_row: IntArray, op_row: IntArray, rank: IntArray, run_id: IntArray, start_ps: IntArray
) -> IntArray:
    """Count the runs of each program from 0; -1 for events of none. A run that several ranks name by one id
    has one number on all of them.
    """
    numbers = np.full(len(label_row), -1, np.int64)
    stated = np.flatnonzero((label_row > 0) & (run_id != ABSENT))
    if len(stated):
        shared = _is_shared(run_id[stated], rank[stated])
        group = label_row[stated] if shared else distinct_rows(label_row[stated], rank[stated])[1]
        numbers[stated] = _ordinals(group, run_id[stated], start_ps[stated])
    rest = np.flatnonzero((label_row > 0) & (run_id == ABSENT))
    group = distinct_rows(label_row[rest], rank[rest])[1]
    order = np.argsort(group, kind="stable")
    for rows in np.split(rest[order], np.flatnonzero(np.diff(group[order])) + 1):
        if len(rows):
            numbers[rows] = _counted(op_row[rows], start_ps[rows])
    return numbers


def _is_shared(run_id: IntArray, rank: IntArray) -> bool:
    """Whether several ranks name a run by the same id."""
    return len(distinct_rows(run_id, rank)[0]) > len(np.unique(run_id))


def _ordinals(group: IntArray, member: IntArray, start_ps: IntArray) -> IntArray:
    """For each event, the place of its member among those of its group, by their first starts."""
    _, pair = distinct_rows(group, member)
    count = int(pair.max()) + 1
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, pair, start_ps)
    group_of = np.zeros(count, np.int64)
    group_of[pair] = group
    order = np.lexsort((first, group_of))
    ordered = group_of[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    lengths = np.diff(np.append(begins, count))
    ordinal = np.zeros(count, np.int64)
    ordinal[order] = np.arange(count) - np.repeat(begins, lengths)
    return ordinal[pair]


def _counted(op_row: IntArray, start_ps: IntArray) -> IntArray:
    """Runs by the repetitions of one operation; what stands before the first is of a run of its own."""
    _, code, counts = np.unique(op_row, return_inverse=True, return_counts=True)
    rare = np.flatnonzero(counts[code] == counts.min())
    anchor = code[rare[int(start_ps[rare].argmin())]]
    begins = np.sort(start_ps[code == anchor])
    place = np.searchsorted(begins, start_ps, side="right") - 1
    return place - int(place.min())


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """What a file holds, whatever its container; ``format_name`` is that of the format."""

    format_name: str
    collected: Collected
    facts: SpaceFacts
    strings: StringTableBuilder


def read_xplane(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read an XSpace. Raises ``FormatError`` for what is none, naming the byte.

    The rule for what counts as device work stands in :mod:`hespas.converters.xplane.lines`.
    """
    data = read_bytes(path, options.max_bytes)
    strings = StringTableBuilder()
    reader = SpaceReader(data, strings, options.recover)
    try:
        collected = collect(reader.lines())
    except WireError as fault:
        raise FormatError(
            f"no XSpace: {fault}",
            path=str(path),
            position=f"byte {fault.position}",
            hint="was the profiler interrupted? record again, or read whole planes with `recover`",
        ) from fault
    return profile_of(Recorded("xplane", collected, reader.facts, strings), path, options, diagnostics)


def profile_of(recorded: Recorded, path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """The profile of a trace. Raises ``FormatError`` where nothing was recorded."""
    collected, facts, strings = recorded.collected, recorded.facts, recorded.strings
    if not len(collected.device) and not len(collected.host):
        raise FormatError(
            "the trace holds neither device events nor host operations",
            path=str(path),
            position="all planes and lines",
            hint="did the program run between start_trace and stop_trace?",
        )
    on = ranked(collected, facts.planes, options.num_devices)
    member = _membership(replace(collected, device=on.device), facts.programs, strings)
    labels = labels_of(on.device, collected.lines, strings)
    host_event = _launched(on, collected.host)
    protos = {f"hlo/{member.modules.label(each.name, each.number)}": each.hlo for each in facts.programs}
    found = _Found(collected, on, labels, member.label_row, host_event, facts, protos)
    _report(found, strings, diagnostics.about(str(path), recorded.format_name))
    name = path.name.removesuffix(".gz").removesuffix(".pb").removesuffix(".json")
    return _built(name, recorded, found, member)


def _built(name: str, recorded: Recorded, found: _Found, member: _Membership) -> Profile:
    collected, facts, strings = recorded.collected, recorded.facts, recorded.strings
    on, labels, device = found.on, found.labels, found.on.device
    first_ns = _first_ns(collected, on)
    run = run_numbers(member.label_row, labels.op_row, on.rank, member.run_id, device.start_ps)
    devices, device_index = _devices(collected.lines, device.line, facts.planes)
    used_lines: list[int] = np.unique(device.line).tolist()
    used = list(dict.fromkeys(collected.lines[line].plane for line in used_lines))
    about = {"format": recorded.format_name, "first_event_ns": str((facts.base_ns or 0) + first_ns)}
    comms, host = _comms(labels, strings), _host_ops(collected, first_ns * 1000, strings)
    return Profile.of(
        name,
        devices,
        strings.build(),
        start_ns=(device.start_ps - first_ns * 1000) / 1000.0,
        duration_ns=device.exclusive_ps / 1000.0,
        op_row=labels.op_row,
        module_row=member.label_row,
        kernel_row=labels.kernel_row,
        category_row=labels.category_row,
        device_index=device_index,
        rank=on.rank,
        stream=_streams(collected.lines)[device.line],
        run=run,
        bytes_moved=labels.bytes_moved,
        grid_row=labels.grid_row,
        host_event=found.host_event,
        comms=comms,
        host=host,
        metadata=about | _metadata(facts.planes, used),
        attachments={**found.programs, **_op_facts(device, member.label_row, labels.op_row, strings)},
    )


def _first_ns(collected: Collected, on: Ranked) -> int:
    """The first event, in whole ns since the base of the trace."""
    starts = [int(table.start_ps.min()) for table in (on.device, collected.host) if len(table)]
    return min(starts) // 1000


def _launched(on: Ranked, host: HostTable) -> IntArray:
    """The operation around each device event, else the one that launched it: with its correlation id."""
    by_id = match_rows((host.launch,), (on.device.stats["correlation_id"],))
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
        number[place] = names.setdefault(_device_name(plane, planes.get(plane, {})), len(names))
    return tuple(names) or ("",), number[line] if len(lines) else np.empty(0, np.int32)


def _streams(lines: tuple[Line, ...]) -> IntArray:
    """The number of each line: the profiler's, where that is small, else its place on the plane."""
    seen: dict[str, int] = {}
    numbers: list[int] = []
    for line in lines:
        place = seen[line.plane] = seen.get(line.plane, -1) + 1
        numbers.append(line.number if 0 <= line.number < 1 << 31 else place)
    return np.array(numbers, np.int64)


def _host_ops(collected: Collected, base_ps: int, strings: StringTableBuilder) -> HostOps:
    host = collected.host
    threads = np.array([strings.add(_shown_line(line)) for line in collected.lines], np.int64)
    return HostOps.of(
        name_row=host.name_row,
        thread_row=threads[host.line],
        parent=host.parent,
        start_ns=(host.start_ps - base_ps) / 1000.0,
        duration_ns=host.duration_ps / 1000.0,
    )


def _comms(labels: Labels, strings: StringTableBuilder) -> MeasuredComms:
    """Operations that communicate, by their names; sizes and groups stand in the HLO."""
    kind = collective_kinds(labels.op_row, strings)
    event = np.flatnonzero(kind > 0)
    return MeasuredComms.of(event=event, kind_row=kind[event])


# What is known beside the columns of a profile: devices, versions, the HLO, and facts about operations.

_OP_FACTS = "op-facts.json"
"""The attachment that tells what a trace says of each operation: ``{"modules": {MODULE: {OP: {...}}}}``."""

_UNNAMED_DEVICES = {("9.4", "304"): "AMD Instinct MI300X", ("9.4", "228"): "AMD Instinct MI300A"}
"""GPUs that the driver leaves without a name, by compute capability and processors."""
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


def _device_name(plane: str, stats: Mapping[str, str]) -> str:
    """The device behind a plane, as exactly as its stats tell."""
    if plane == CPU_PLANE:
        return "CPU"
    stated = stats.get("device_type_string") or stats.get("gpu_device_name") or stats.get("device_type")
    if stated:
        return stated
    capability = f"{stats.get('compute_cap_major')}.{stats.get('compute_cap_minor')}"
    key = (capability, stats.get("core_count", ""))
    if stats.get("device_vendor") == "AMD" and key in _UNNAMED_DEVICES:
        return _UNNAMED_DEVICES[key]
    kind = "GPU" if plane.startswith(GPU_PREFIX) else "TPU" if plane.startswith(TPU_PREFIX) else ""
    return f"{stats.get('device_vendor', '')} {kind}".strip()


def _metadata(planes: Mapping[str, Mapping[str, str]], used: list[str]) -> dict[str, str]:
    """Versions, and what the first ``used`` plane says of its device; nothing that names a machine."""
    versions = planes.get(METADATA_PLANE, {})
    found = {name: versions[name] for name in _VERSIONS if versions.get(name)}
    start = planes.get(ENVIRONMENT_PLANE, {}).get("profile_start_time")
    if start:
        found["profile_start_time_ns"] = start
    nothing: Mapping[str, str] = {}
    device = next((planes[plane] for plane in used if planes.get(plane)), nothing)
    return found | {f"device_{name}": device[name] for name in _DEVICE_FACTS if name in device}


def _op_facts(
    device: DeviceTable, label_row: IntArray, op_row: IntArray, strings: StringTableBuilder
) -> dict[str, bytes]:
    """The facts about operations as an attachment; none where the trace tells none."""
    stats = device.stats
    stated = np.zeros(len(device), np.bool_)
    for name in _TEXT_FACTS:
        stated |= stats[name] > 0
    for name in _NUMBER_FACTS:
        stated |= stats[name] != ABSENT
    rows = np.flatnonzero(stated & (op_row > 0))
    if not len(rows):
        return {}
    _, first = np.unique(np.stack([label_row[rows], op_row[rows]]), axis=1, return_index=True)
    modules: dict[str, dict[str, dict[str, str | int]]] = {}
    for row in rows[np.sort(first)].tolist():
        facts: dict[str, str | int] = {
            name: strings[int(stats[name][row])] for name in _TEXT_FACTS if stats[name][row] > 0
        }
        facts |= {name: int(stats[name][row]) for name in _NUMBER_FACTS if stats[name][row] != ABSENT}
        modules.setdefault(strings[int(label_row[row])], {})[strings[int(op_row[row])]] = facts
    document = {"schema": "hespas-op-facts/1", "modules": modules}
    return {_OP_FACTS: msgspec.json.encode(document)}


def _shown_line(line: Line) -> str:
    """A thread or stream as people know it."""
    return f"{line.plane}/{line.name}" if line.name else f"{line.plane}/{line.number}"


# What reading a trace has to tell: what time went where, and what was left out or repaired.


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """All that is reported on; columns are of the device events that are left in ``on``."""

    collected: Collected
    on: Ranked
    labels: Labels
    label_row: IntArray
    host_event: IntArray
    facts: SpaceFacts
    programs: Mapping[str, bytes]


def _report(found: _Found, strings: StringTableBuilder, findings: Findings) -> None:
    """Add all findings."""
    _report_work(found, findings)
    _report_cores(found.on, findings)
    _report_programs(found, strings, findings)
    _report_times(found, strings, findings)
    _report_file(found.facts, findings)


def _report_work(found: _Found, findings: Findings) -> None:
    device = found.on.device
    taken, total_ps = device.exclusive_ps, int(device.exclusive_ps.sum())

    def share(rows: BoolArray) -> str:
        return f"{int(taken[rows].sum()) / total_ps if total_ps else 0.0:.1%} of the device time"

    spans_ps = int(found.collected.device.duration_ps.sum())
    counted = f"{_ns(total_ps)} of device time counted; the events span {_ns(spans_ps)}"
    findings.info("device-time", counted, len(device))
    wrapping = f"operations enclose others and keep what is left: {share(device.is_wrapper)}"
    findings.info("wrapper", wrapping, int(device.is_wrapper.sum()))
    unnamed = (found.labels.op_row == 0) | (found.label_row == 0)
    no_op = f"device events name no operation or program: {share(unnamed)}, kept by kernel and stream"
    findings.warning("no-op", no_op, int(unnamed.sum()))
    kinds = np.array([line.kind for line in found.collected.lines], np.int64)[device.line]
    unlaunched = (kinds == LineKind.STREAM) & (found.host_event < 0)
    no_launch = f"device events have no launch record: {share(unlaunched)}"
    findings.warning("no-launch", no_launch, int(unlaunched.sum()))
    overlap = "operations reach beyond the end of one that they begin in; both count in full"
    findings.warning("overlapping", overlap, found.collected.overlapping)


def _ns(picoseconds: int) -> str:
    return f"{picoseconds // 1000:,}.{picoseconds % 1000:03d} ns"


def _report_cores(on: Ranked, findings: Findings) -> None:
    merged = f"events of second cores were merged into those of first ones: {_ns(on.merged_ps)} of core time"
    findings.info("merged-cores", merged, on.merged)
    alone = "events of one core of a megacore have none on the other, and count in full"
    findings.warning("lone-core", alone, on.alone)
    undecided = (
        "pairs of cores ran the same programs, and the file does not say whether each pair is one device (a "
        "megacore): they count as two devices, each with its own half of every operation; the .xplane.pb "
        "recorded beside it says which, or `num_devices` with half as many devices as there are cores"
    )
    findings.warning("megacore-not-stated", undecided, on.undecided)


def _report_programs(found: _Found, strings: StringTableBuilder, findings: Findings) -> None:
    """Programs that ran and whose HLO is not in the file; one that has no HLO at all is not reproached."""
    if not found.programs:
        return
    ran = [strings[row] for row in np.unique(found.label_row).tolist() if row]
    missing = [name for name in ran if f"hlo/{name}" not in found.programs]
    listed = ", ".join(name[:60] for name in missing[:5])
    findings.warning("no-hlo", f"the HLO of programs is not in the file: {listed}", len(missing))


def _report_times(found: _Found, strings: StringTableBuilder, findings: Findings) -> None:
    negative = np.flatnonzero(found.on.device.duration_ps < 0)
    if len(negative):
        name = strings[int(found.labels.kernel_row[negative[0]])]
        message = f"device events end before they start, the first is {name[:80]!r}"
        findings.warning("negative-duration", message, len(negative))
    silent = [plane for plane in found.facts.planes if has_devices([plane])]
    listed = ", ".join(plane[:60] for plane in silent[:4])
    nothing = f"nothing was recorded on devices: {listed}; what the host names of them are launches"
    findings.warning("no-device-events", nothing, 0 if len(found.on.device) else len(silent))
    zero = int((found.on.device.duration_ps == 0).sum())
    findings.warning("zero-duration", "device events of 0 ps", zero)


def _report_file(facts: SpaceFacts, findings: Findings) -> None:
    listed = ", ".join(f"{name[:60]} {count:,}" for name, count in sorted(facts.other_lines.items())[:12])
    other_lines = (
        f"events of lines that say the same again or run beside the operations are left out: {listed}"
    )
    findings.info("other-lines", other_lines, sum(facts.other_lines.values()))
    findings.warning("unknown-kind", "events are of a kind that the file does not describe", facts.unnamed)
    findings.warning("aggregated", "events stand for many; each keeps the time of all", facts.aggregated)
    findings.warning("profiler-message", "errors and warnings of the profiler are in the file", facts.errors)
    findings.warning("cut", "the file ends inside a plane, which is left out", facts.cut_planes)
