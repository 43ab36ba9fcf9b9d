"""Recorded programs as measured operations, which fits read."""

from __future__ import annotations

import numpy as np

from hespas.fitting.statistics import medians_of
from hespas.graph import Diagnostics, Profile, Workload
from hespas.hardware import Device, load_device
from hespas.measurements import LeftOut, Measurements, joined
from hespas.operations import Labels, operations_of
from hespas.validators.accuracy.sources import by_device, sources_of

__all__ = ["measurements_of"]

_EXCLUDED_KINDS = ("other", "collective")
"""Kinds whose time depends on more than the operation: messages wait for other ranks."""


def measurements_of(
    profile: Profile | Workload,
    hardware: str | Device,
    *,
    workload: Workload | None = None,
    diagnostics: Diagnostics | None = None,
) -> Measurements:
    """Return each distinct operation of a recording once, with the median and spread of its times.

    The spread is the mean distance from the median. Operations are the operations of ``workload``, of the
    compiled programs in the profile, or the profile's own costed operations: see
    :func:`~hespas.validators.accuracy.sources.sources_of`. They have no variant: they represent a program on
    ``hardware``. Events of other devices are skipped if the profile has several, as
    :func:`~hespas.validators.accuracy.sources.by_device` does. Raises ``UsageError`` for a profile without
    operations.
    """
    diagnostics = diagnostics if diagnostics is not None else Diagnostics()
    device = load_device(hardware) if isinstance(hardware, str) else hardware
    [(part, _)] = by_device(profile, {device.name: device}, diagnostics)
    tables: list[Measurements] = []
    for source in sources_of(part, workload, device.name, diagnostics):
        ops = operations_of(source.graph).take(source.node)
        duration = source.cases.measured_ns / source.times
        is_usable = (duration > 0) & np.isfinite(ops.flops) & np.isfinite(ops.bytes_moved)
        is_usable[ops.kind.where(*_EXCLUDED_KINDS)] = False
        is_usable[ops.scheme.where("")] = False
        usable = np.flatnonzero(is_usable)
        distinct, index = ops.take(usable).distinct()
        median, spread = medians_of(duration[usable], index)
        count = len(distinct)
        tables.append(
            Measurements(
                name=source.cases.source,
                provenance=f"the recording {source.cases.source} of {source.cases.workload}",
                ops=distinct,
                duration_ns=median,
                spread_ns=spread,
                hardware=Labels.constant(device.name, count),
                split=Labels.constant("", count),
                left_out=(
                    LeftOut("no known cost, or a time that depends on others", int(len(ops) - len(usable))),
                ),
                recorded=True,
            )
        )
    return joined(tables, profile.name)
