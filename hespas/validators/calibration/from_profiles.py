"""Measured operations of profiles: what recordings say of single operations, in the form of a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import Device, load_device
from hespas.measurements import LeftOut, Measurements, joined
from hespas.operations import Labels, operations_of
from hespas.validators.accuracy.devices import by_device
from hespas.validators.accuracy.sources import Source, sources_of

__all__ = ["measurements_of"]

_UNFIT = ("other", "collective")
"""Kinds whose time the operation alone does not decide: messages wait for other ranks."""


def measurements_of(
    profile: Profile | Workload,
    hardware: str | Device,
    *,
    workload: Workload | None = None,
    diagnostics: Diagnostics | None = None,
) -> Measurements:
    """Each distinct operation of a recording once, with the median time of its executions and their mean
    distance from it.

    Operations are those of ``workload``, of the compiled programs that the profile brings along, or of its
    own costed operations: see :func:`~hespas.validators.accuracy.sources.sources_of`. They name no variant:
    they are what a program on ``hardware`` runs. Events of other devices are left out where the profile names
    several, as :func:`~hespas.validators.accuracy.devices.by_device` does. Raises ``UsageError`` for a
    profile without any operation.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    device = load_device(hardware) if isinstance(hardware, str) else hardware
    [(part, _)] = by_device(profile, {device.name: device}, found)
    sources = list(sources_of(part, workload, device.name, found))
    return joined([_of_source(source, device.name) for source in sources], profile.name)


def _of_source(source: Source, hardware: str) -> Measurements:
    """The cases of one program as operations; equal ones once."""
    ops = operations_of(source.graph).take(source.node)
    duration = source.cases.measured_ns / source.times
    usable = (duration > 0) & ~np.isin(ops.kind.row, _rows_of(ops.kind, _UNFIT))
    usable &= np.isfinite(ops.flops) & np.isfinite(ops.bytes_moved)
    usable &= ops.scheme.row != ops.scheme.names.index("") if "" in ops.scheme.names else True
    kept = np.flatnonzero(usable)
    distinct, place = ops.take(kept).distinct()
    median, away = _over_repeats(duration[kept], place, len(distinct))
    count = len(distinct)
    return Measurements(
        name=source.cases.source,
        provenance=f"the recording {source.cases.source} of {source.cases.workload}",
        ops=distinct,
        duration_ns=median,
        spread_ns=away,
        hardware=Labels.constant(hardware, count),
        split=Labels.constant("", count),
        left_out=(LeftOut("no known cost, or the time of others", int(len(ops) - len(kept))),),
        recorded=True,
    )


def _rows_of(labels: Labels, names: Sequence[str]) -> list[int]:
    return [number for number, name in enumerate(labels.names) if name in names]


def _over_repeats(duration: FloatArray, place: IntArray, count: int) -> tuple[FloatArray, FloatArray]:
    """Median and mean distance from it of the times at each place; NaN distance for a single one."""
    order = np.lexsort((duration, place))
    _, first, counts = np.unique(place[order], return_index=True, return_counts=True)
    ordered = duration[order]
    median = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2
    away = np.bincount(place, np.abs(duration - median[place]), count) / np.maximum(counts, 1)
    return median, np.where(counts > 1, away, np.nan)
