"""All analyses of the profiles of a job, their summary line, and notes about missing data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isnan, nan
from typing import Any

import numpy as np

from hespas.analysis.charts import (
    bandwidth_chart,
    difference_charts,
    idle_chart,
    memory_point_charts,
    present,
    roofline_chart,
    tree_chart,
)
from hespas.analysis.collectives import (
    InstanceRow,
    MeasuredCollectiveRow,
    StragglerRow,
    collectives,
    collectives_of,
    instances,
    stragglers,
)
from hespas.analysis.critical_path import PathRow, SegmentRow, critical_paths
from hespas.analysis.device_use import (
    ALL_STEPS,
    WHOLE_DEVICE,
    BreakdownRow,
    GapRow,
    IdleLengthRow,
    IdleRow,
    LaunchRow,
    MemoryPointRow,
    MemoryRow,
    QueuePointRow,
    QueueRow,
    breakdown,
    gaps_before,
    idle,
    idle_lengths,
    launches,
    memory,
    memory_points,
    queue_points,
    queues,
)
from hespas.analysis.difference import RecordingDifference
from hespas.analysis.operations import (
    ClassRow,
    KernelRow,
    OperationRow,
    WinRow,
    classes,
    kernels,
    measured_of,
    operations,
    product_dtype,
    unclassified_share,
    wins,
)
from hespas.analysis.recording import Recording, recordings_of
from hespas.analysis.spans import RecordedSpans, timeline_of
from hespas.analysis.table import RowTable
from hespas.analysis.traffic import TrafficRow, matrix_of, recorded_traffic
from hespas.analysis.tree import TreeRow, tree
from hespas.converters.measured_ops.build import costed_ops
from hespas.converters.measured_ops.steps import recorded_steps, recording_text, steps_since
from hespas.graph import Diagnostics, Profile
from hespas.graph.deprecation import warn_renamed
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device, named_device
from hespas.report.charts import Chart

__all__ = [
    "AnalysisTables",
    "analysis_tables",
    "changed_text",
    "device_of",
    "step_ns_of",
    "summary_line",
    "world_size_of",
]

_NOTABLE_SHARE = 0.2
"""Share of the device time, or of the events, from which missing data is worth a note."""
_UNCLASSIFIED_LIMIT = 0.1
"""Share of the device time of kernels of unknown class from which communication is a lower bound."""
_UNITS = ("ns", "us", "ms", "s")
_PART_LABELS = {
    "compute_ns": "compute",
    "exposed_communication_ns": "exposed communication",
    "exposed_memory_ns": "copies",
    "idle_ns": "idle",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AnalysisTables:
    """Tables of all analyses.

    ``hardware`` is the device of the roofline (empty: unknown). ``notes`` describe missing data of the
    recording and the profiler options that record it. ``unclassified`` is the share of the device time in
    kernels of unknown class (0 to 1), some of which may communicate. ``product_dtype`` is the element type of
    the matmuls with most of the time (empty: unknown). ``period_ns`` is the median over ranks of the time
    from the start of a step to the start of the next one. For a single step it is the length of its range on
    the host (NaN: unknown, or a recording without steps). ``difference`` has the tables of the comparison
    with a baseline. ``device`` is the device of the roofline (None: unknown). ``spans`` are the device events
    of the timeline, which is drawn and not listed.
    """

    hardware: str
    device: Device | None
    spans: RecordedSpans
    notes: tuple[str, ...]
    unclassified: float
    product_dtype: str
    period_ns: float
    breakdown: RowTable[BreakdownRow]
    idle: RowTable[IdleRow]
    idle_lengths: RowTable[IdleLengthRow]
    gaps: RowTable[GapRow]
    launches: RowTable[LaunchRow]
    queues: RowTable[QueueRow]
    queue_points: RowTable[QueuePointRow]
    classes: RowTable[ClassRow]
    operations: RowTable[OperationRow]
    kernels: RowTable[KernelRow]
    wins: RowTable[WinRow]
    tree: RowTable[TreeRow]
    critical_path: RowTable[PathRow]
    critical_segments: RowTable[SegmentRow]
    collectives: RowTable[MeasuredCollectiveRow]
    collective_instances: RowTable[InstanceRow]
    stragglers: RowTable[StragglerRow]
    traffic: RowTable[TrafficRow]
    memory: RowTable[MemoryRow]
    memory_points: RowTable[MemoryPointRow]
    difference: RecordingDifference | None = None

    def by_name(self) -> Mapping[str, RowTable[Any]]:
        """Return all tables by name, including the comparison with a baseline."""
        values = {column.name: getattr(self, column.name) for column in fields(self)}
        tables: dict[str, RowTable[Any]] = {
            name: value for name, value in values.items() if isinstance(value, RowTable)
        }
        return {**tables, **(self.difference.tables() if self.difference else {})}

    def charts(self) -> tuple[Chart, ...]:
        """Return the charts of the analysis, as far as their data were recorded."""
        roofline = None
        if self.device is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                intensity = self.operations["flops"] / self.operations["bytes_moved"]
            roofline = roofline_chart(self.operations, self.device, intensity, self.product_dtype)
        return present(
            difference_charts(self.difference) if self.difference else None,
            timeline_of(self.spans.drawn()),
            idle_chart(self.idle_lengths),
            roofline,
            tree_chart(self.tree, "device_ns"),
            bandwidth_chart(self.collectives),
            matrix_of(self.traffic),
            memory_point_charts(self.memory_points),
        )

    def __call__(self) -> Mapping[str, RowTable[Any]]:
        """Return :meth:`by_name`. Deprecated: supports callers of ``Analysis.tables()``, which was a method
        before.
        """
        warn_renamed("Analysis.tables()", "Analysis.tables_by_name()")
        return self.by_name()


def device_of(profiles: Sequence[Profile], hardware: str, diagnostics: Diagnostics) -> Device | None:
    """Return the device of the roofline: ``hardware`` if given, otherwise the device that the profiles name.
    Return None if they name no known device. If they name several devices, warn and return None.

    Raises ``UsageError`` for an unknown ``hardware``.
    """
    names = list(dict.fromkeys(name for profile in profiles for name in profile.devices if name))
    source = profiles[0].name if profiles else ""
    measured: dict[str, Device] = {}
    for name in names:
        try:
            device = named_device(name)
        except UsageError:
            continue
        measured.setdefault(device.name, device)
    if hardware:
        requested = load_device(hardware)
        others = [name for name in measured if name != requested.name]
        message = f"measured on {', '.join(others)}; the roofline is that of {requested.name}, as requested"
        diagnostics.warning("analysis.other-device", source, message, count=int(bool(others)))
        return requested
    if len(measured) == 1:
        return next(iter(measured.values()))
    if measured:
        message = f"measured on several devices ({', '.join(measured)}): no common roofline"
    elif names:
        message = f"the catalogue does not have {', '.join(map(repr, names))}: no roofline (give `hardware`)"
    else:
        message = "the trace does not name its device: no roofline (give `hardware`)"
    diagnostics.warning("analysis.no-device", source, message)
    return None


def analysis_tables(
    profiles: Sequence[Profile], device: Device | None, diagnostics: Diagnostics
) -> AnalysisTables:
    """Analyse the profiles of the ranks of one job. O(events log events)."""
    recordings = recordings_of(profiles, diagnostics)
    measured = [measured_of(profile, costed_ops(profile, diagnostics), device) for profile in profiles]
    by_shape = operations(measured)
    paths = critical_paths(recordings, diagnostics)
    communication = collectives_of(recordings, measured, diagnostics)
    periods: list[float] = []
    for recording in recordings:
        profile, rows = recording.profile, recording.rows
        ranges = steps_since(profile, rows)
        steps = recorded_steps(recording.start_ns, profile.duration_ns[rows], profile.run[rows], ranges)
        if steps is not None and steps.is_annotated and steps.period_ns >= 0:
            periods.append(steps.period_ns)
    return AnalysisTables(
        hardware=device.name if device else "",
        device=device,
        spans=RecordedSpans(recordings, paths.events, communication.shift_ns),
        notes=tuple(_notes(profiles, recordings)) if any(map(len, recordings)) else (),
        unclassified=unclassified_share(recordings, measured),
        product_dtype=product_dtype(measured),
        period_ns=float(np.median(periods)) if periods else nan,
        breakdown=breakdown(recordings),
        idle=idle(recordings),
        idle_lengths=idle_lengths(recordings),
        gaps=gaps_before(recordings),
        launches=launches(recordings),
        queues=queues(recordings),
        queue_points=queue_points(recordings),
        classes=classes(measured),
        operations=by_shape,
        kernels=kernels(recordings, measured),
        wins=wins(by_shape),
        tree=tree(recordings),
        critical_path=paths.totals,
        critical_segments=paths.segments,
        collectives=collectives(communication),
        collective_instances=instances(communication),
        stragglers=stragglers(communication),
        traffic=recorded_traffic(communication),
        memory=memory(profiles),
        memory_points=memory_points(profiles),
    )


def _notes(profiles: Sequence[Profile], recordings: Sequence[Recording]) -> Iterator[str]:
    """Yield a sentence for each kind of data that is missing in the recording, with the profiler option that
    records it. The most important sentence is first.
    """
    if not any(len(profile.host) for profile in profiles):
        yield (
            "no host operations were recorded: kernels have no operation, shapes or calls around them "
            "(PyTorch: activities=[CPU, CUDA]; others: ranges of NVTX or roctx)"
        )
    elif not any(bool((profile.host.shapes_id > 0).any()) for profile in profiles):
        yield "no shapes were recorded: FLOPs, bytes and rooflines are unknown (PyTorch: record_shapes=True)"
    replayed_ns, device_ns, unknown_launches, events = 0.0, 0.0, 0, 0
    for recording in recordings:
        profile, rows, time_ns = recording.profile, recording.rows, recording.duration_ns
        launch = profile.launch_start_ns[rows]
        launched = np.flatnonzero(~np.isnan(launch))
        _, group, count = np.unique(launch[launched], return_inverse=True, return_counts=True)
        # kernels that share a launch are those of a graph; without shapes, its capture was not given
        alone = (count[group.reshape(-1)] < 3) | (profile.shapes_id[rows[launched]] > 0)
        replayed_ns += float(time_ns[launched][~alone].sum())
        device_ns += float(time_ns.sum())
        unknown_launches += len(rows) - len(launched)
        events += len(rows)
    if device_ns and replayed_ns >= _NOTABLE_SHARE * device_ns:
        yield (
            f"{replayed_ns / device_ns:.1%} of the device time was replayed from captured graphs: the trace "
            "of their capture names operations and shapes (`capture`)"
        )
    if unknown_launches >= _NOTABLE_SHARE * events:
        yield (
            f"the launches of {unknown_launches / events:.1%} of the device events are not recorded: the "
            "cause of idle time before them is unknown (record the runtime, from the first launch on)"
        )
    ranks = world_size_of(profiles)
    if len(recordings) <= 1 and ranks > 1:
        yield f"one of {ranks:,} ranks: the files of other ranks add stragglers and transfer times"
    if any(profile.metadata.get("format") == "kineto" for profile in profiles):
        has_modules = any(
            any(
                profile.strings[row].startswith("nn.Module: ")
                for row in np.unique(profile.ranges.name_id).tolist()
            )
            for profile in profiles
        )
        missing = [] if has_modules else ["modules and functions (with_stack=True)"]
        if not any(len(profile.memory) for profile in profiles):
            missing.append("memory (profile_memory=True)")
        if missing:
            yield f"not recorded: {' and '.join(missing)}"


def world_size_of(profiles: Iterable[Profile]) -> int:
    """Return the largest number of ranks that the profiles state for their job; 0 if none states one."""
    texts = [profile.metadata.get("world_size", "") for profile in profiles]
    return max((int(text) for text in texts if text.isdecimal() and len(text) < 10), default=0)


def _time_text(duration_ns: float) -> str:
    """Return a duration with three decimal places and a suitable unit."""
    if isnan(duration_ns):
        return "unknown"
    unit = 0
    while abs(duration_ns) >= 1000 and unit < len(_UNITS) - 1:
        duration_ns /= 1000
        unit += 1
    return f"{duration_ns:,.3f} {_UNITS[unit]}"


def _share_text(share: float) -> str:
    return "unknown" if isnan(share) else f"{share:.1%}"


def step_ns_of(tables: AnalysisTables) -> float:
    """Return the length of the median step; without recorded steps, the span of the longest rank."""
    table = tables.breakdown
    steps = table["step"] != ALL_STEPS
    spans = table["span_ns"]
    return float(np.median(spans[steps])) if steps.any() else float(spans.max(initial=-np.inf))


def summary_line(tables: AnalysisTables) -> str:
    """Return the summary line: step time, span, busy share and its parts.

    With several ranks, the time is the time of the slowest rank, and the shares are means over all ranks.
    """
    table = tables.breakdown
    whole = table.take(np.flatnonzero(table["step"] == ALL_STEPS))
    if not len(whole):
        return "no device events were recorded"
    steps = table.take(np.flatnonzero(table["step"] != ALL_STEPS))
    span = _time_text(float(whole["span_ns"].max()))
    summary = f"span {span} from the first device event to the last"
    if len(steps):
        count = len(np.unique(steps["step"]))
        period = "" if isnan(tables.period_ns) else _time_text(tables.period_ns)
        summary = f"{_time_text(step_ns_of(tables))} per step ({recording_text(count, period)}, span {span})"
    if len(whole) > 1:
        summary += f" on {len(whole)} ranks"
    total = float(whole["span_ns"].sum()) or np.nan
    labels, unclassified = _PART_LABELS, ""
    if tables.unclassified >= _UNCLASSIFIED_LIMIT:
        labels = {**_PART_LABELS, "exposed_communication_ns": "exposed communication at least"}
        unclassified = (
            f"; {_share_text(tables.unclassified)} of the device time is in kernels of unknown class"
        )
    parts = ", ".join(
        f"{label} {_share_text(float(whole[name].sum()) / total)}" for name, label in labels.items()
    )
    gaps = tables.idle.take(tables.idle["stream"] == WHOLE_DEVICE)
    idle_ns = float(gaps["total_ns"].sum())
    main_cause = ""
    for cause in dict.fromkeys(gaps["cause"].tolist()):
        share = float(gaps["total_ns"][gaps["cause"] == cause].sum()) / idle_ns if idle_ns else 0.0
        if share >= 0.5:
            main_cause = f", {_share_text(share)} of it {cause}"
            break
    busy = float(whole["busy_ns"].sum()) / total
    return f"{summary}: busy {_share_text(busy)} ({parts}{main_cause}{unclassified})"


def changed_text(changed: RecordingDifference) -> str:
    """Return text about the change from the baseline: the difference, and the part of the time that explains
    most of it.
    """
    rows = {row.part: row for row in changed.parts.rows()}
    whole = rows.pop("span")
    if not whole.delta_ns:
        return "as long as before"
    longer = whole.delta_ns > 0
    share = abs(whole.delta_ns) / whole.before_ns if whole.before_ns else np.nan
    most = max(rows.values(), key=lambda row: row.delta_ns if longer else -row.delta_ns)
    return (
        f"{_time_text(abs(whole.delta_ns))} ({_share_text(share)}) {'longer' if longer else 'shorter'} than "
        f"before, {most.part} {'+' if most.delta_ns > 0 else '-'}{_time_text(abs(most.delta_ns))}"
    )
