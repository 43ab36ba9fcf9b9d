"""Measured operations of profiles: what recordings say of single operations, in the form of a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.estimators.measurements import Measurements
from hespas.estimators.operations import Labels, Operations, operations_of
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import Device, load_device
from hespas.validators.accuracy.devices import by_device
from hespas.validators.accuracy.sources import Source, sources_of

__all__ = ["joined", "measurements_of"]

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
        left_out=(("no known cost, or the time of others", int(len(ops) - len(kept))),),
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


def joined(parts: Sequence[Measurements], name: str) -> Measurements:
    """Several recordings as one table: their operations run alike, so they are fitted together."""
    left_out: dict[str, int] = {}
    for reason, count in (each for part in parts for each in part.left_out):
        left_out[reason] = left_out.get(reason, 0) + count
    return Measurements(
        name=name,
        provenance="; ".join(dict.fromkeys(part.provenance for part in parts)),
        ops=_joined_operations([part.ops for part in parts]),
        duration_ns=np.concatenate([part.duration_ns for part in parts]),
        spread_ns=np.concatenate([part.spread_ns for part in parts]),
        hardware=_joined_labels([part.hardware for part in parts]),
        split=_joined_labels([part.split for part in parts]),
        left_out=tuple((reason, count) for reason, count in left_out.items() if count),
        recorded=all(part.recorded for part in parts),
    )


def _joined_operations(parts: Sequence[Operations]) -> Operations:
    names = dict.fromkeys(name for part in parts for name in part.dims)
    return Operations(
        kind=_joined_labels([part.kind for part in parts]),
        op=_joined_labels([part.op for part in parts]),
        scheme=_joined_labels([part.scheme for part in parts]),
        variant=_joined_labels([part.variant for part in parts]),
        dims={name: np.concatenate([part.dim(name) for part in parts]) for name in names},
        flops=np.concatenate([part.flops for part in parts]),
        transcendentals=np.concatenate([part.transcendentals for part in parts]),
        bytes_moved=np.concatenate([part.bytes_moved for part in parts]),
    )


def _joined_labels(parts: Sequence[Labels]) -> Labels:
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    place = {name: row for row, name in enumerate(names)}
    rows = [np.array([place[name] for name in part.names], np.int32)[part.row] for part in parts]
    return Labels(np.concatenate(rows), names)
