"""All analyses of some profiles of one job, and the answer in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any

import numpy as np

from hespas.analysis.breakdown import ALL_STEPS, BreakdownRow, breakdown
from hespas.analysis.collectives import (
    CollectiveRow,
    InstanceRow,
    StragglerRow,
    collectives,
    collectives_of,
    instances,
    stragglers,
)
from hespas.analysis.critical_path import PathRow, SegmentRow, critical_paths
from hespas.analysis.idle import GapRow, IdleRow, gaps_before, idle
from hespas.analysis.launches import (
    LaunchRow,
    QueuePointRow,
    QueueRow,
    launches,
    queue_points,
    queues,
)
from hespas.analysis.memory import MemoryPointRow, MemoryRow, memory, memory_points
from hespas.analysis.notes import notes_of
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
from hespas.analysis.table import Table
from hespas.analysis.tree import TreeRow, tree
from hespas.converters.measured_ops import costed_ops, recorded_steps, steps_since
from hespas.graph import Diagnostics, Profile
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device, named_device

__all__ = ["Analyses", "analyses_of", "device_of", "whole"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Analyses:
    """The tables of all analyses. ``hardware`` is the device whose roofs are meant, empty where none is
    known; ``notes`` say what the recording lacks for more, and how to record it. ``unclassified`` is the
    share of the device time of kernels whose name and operation state no class (0..1): some may communicate.
    ``product_dtype`` is the element type of most of the time of matmuls (empty: unknown). ``period_ns`` is
    the median over ranks of the time from the start of a step to that of the next, of a single step its
    length with its range on the host (NaN: unknown, or a recording without steps).
    """

    hardware: str
    notes: tuple[str, ...]
    unclassified: float
    product_dtype: str
    period_ns: float
    breakdown: Table[BreakdownRow]
    idle: Table[IdleRow]
    gaps: Table[GapRow]
    launches: Table[LaunchRow]
    queues: Table[QueueRow]
    queue_points: Table[QueuePointRow]
    classes: Table[ClassRow]
    operations: Table[OperationRow]
    kernels: Table[KernelRow]
    wins: Table[WinRow]
    tree: Table[TreeRow]
    critical_path: Table[PathRow]
    critical_segments: Table[SegmentRow]
    collectives: Table[CollectiveRow]
    collective_instances: Table[InstanceRow]
    stragglers: Table[StragglerRow]
    memory: Table[MemoryRow]
    memory_points: Table[MemoryPointRow]

    def tables(self) -> Mapping[str, Table[Any]]:
        """The tables under their names."""
        others = {"hardware", "notes", "unclassified", "product_dtype", "period_ns"}
        names = [each.name for each in fields(self) if each.name not in others]
        return {name: getattr(self, name) for name in names}


def device_of(profiles: Sequence[Profile], hardware: str, diagnostics: Diagnostics) -> Device | None:
    """The device whose figures are the roof: ``hardware`` where it is given, else the one that the profiles
    name. None where that is unknown, or they name several, which ``diagnostics`` say.

    Raises ``UsageError`` for a ``hardware`` that is unknown.
    """
    named = list(dict.fromkeys(name for profile in profiles for name in profile.devices if name))
    where = profiles[0].name if profiles else ""
    measured: dict[str, Device] = {}
    for name in named:
        try:
            found = named_device(name)
        except UsageError:
            continue
        measured.setdefault(found.name, found)
    if hardware:
        asked = load_device(hardware)
        others = [name for name in measured if name != asked.name]
        message = f"measured on {', '.join(others)}; the roofs are those of {asked.name}, as asked"
        diagnostics.warning("analysis.other-device", where, message, count=int(bool(others)))
        return asked
    if len(measured) == 1:
        return next(iter(measured.values()))
    if measured:
        message = f"measured on several devices ({', '.join(measured)}): no roof is that of all"
    elif named:
        message = f"no figures are known of {', '.join(map(repr, named))}: no roofs (give `hardware`)"
    else:
        message = "the trace does not name its device: no roofs (give `hardware`)"
    diagnostics.warning("analysis.no-device", where, message)
    return None


def analyses_of(profiles: Sequence[Profile], device: Device | None, diagnostics: Diagnostics) -> Analyses:
    """Analyse profiles of the ranks of one job. O(events log events)."""
    recordings = recordings_of(profiles, diagnostics)
    measured = [measured_of(each, costed_ops(each, diagnostics), device) for each in profiles]
    found = operations(measured)
    paths = critical_paths(recordings, diagnostics)
    talk = collectives_of(recordings, measured, diagnostics)
    return Analyses(
        hardware=device.name if device else "",
        notes=tuple(notes_of(profiles, recordings)),
        unclassified=unclassified_share(recordings, measured),
        product_dtype=product_dtype(measured),
        period_ns=_period_ns(recordings),
        breakdown=breakdown(recordings),
        idle=idle(recordings),
        gaps=gaps_before(recordings),
        launches=launches(recordings),
        queues=queues(recordings),
        queue_points=queue_points(recordings),
        classes=classes(measured),
        operations=found,
        kernels=kernels(recordings, measured),
        wins=wins(found),
        tree=tree(recordings),
        critical_path=paths.totals,
        critical_segments=paths.segments,
        collectives=collectives(talk),
        collective_instances=instances(talk),
        stragglers=stragglers(talk),
        memory=memory(profiles),
        memory_points=memory_points(profiles),
    )


def _period_ns(recordings: Sequence[Recording]) -> float:
    periods: list[float] = []
    for recording in recordings:
        profile, rows = recording.profile, recording.rows
        ranges = steps_since(profile, rows)
        steps = recorded_steps(recording.start_ns, profile.duration_ns[rows], profile.run[rows], ranges)
        if steps is not None and steps.is_annotated and steps.period_ns >= 0:
            periods.append(steps.period_ns)
    return float(np.median(periods)) if periods else nan


def whole(table: Table[BreakdownRow]) -> Table[BreakdownRow]:
    """The rows of whole ranks."""
    return table.take(np.flatnonzero(table["step"] == ALL_STEPS))
