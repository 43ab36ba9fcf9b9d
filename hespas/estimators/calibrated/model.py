"""The calibrated roofline: fitted forms of a device, chosen class by class.

A prediction has an interval that held 90 % of the measurements of shapes outside the fit; it widens where an
operation is larger or smaller than what was fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.estimators.by_operation import Prediction, estimate_by_operation
from hespas.estimators.calibrated.applying import doublings_beyond, time_and_interval
from hespas.estimators.calibrated.choice import Choice, FitIndex
from hespas.estimators.calibrated.quantizing import without_quantizing
from hespas.estimators.operations import Operations
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, Fit

__all__ = ["Calibrated"]

_AS_FITTED = 0.5
"""Doublings beyond the fitted sizes that count as within."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The estimator. ``chip_wide``: let a device's overall fit speak for kinds that have none of their own.
    ``num_ranks``: size of collectives over all ranks where the graph does not say (-1: unknown).
    """

    chip_wide: bool = True
    num_ranks: int = -1

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return "calibrated"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node on ``device``; see :class:`Estimator`."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of one execution of each operation; NaN where no fit covers it. O(ops)."""
        found = Diagnostics() if diagnostics is None else diagnostics
        index = FitIndex.of(device)
        columns = np.full((3, len(ops)), np.nan)
        for labels, rows in ops.classes():
            kind, op, scheme, variant = labels
            choice = index.choose(kind, op, scheme, variant)
            where = f"{device.name} {' '.join(label for label in labels if label)}"
            if choice is None or (not self.chip_wide and choice.assumed[0] == "calibrated.chip-wide"):
                found.warning("calibrated.not-covered", where, f"{where}: no fit covers it", count=len(rows))
                continue
            code, text = choice.assumed
            if code:
                found.info(code, where, f"{where}: {text}", count=len(rows))
            columns[:, rows] = _said_by_choice(choice, ops.take(rows), index, (where, found))
        unknown = np.isnan(columns[0])
        return Prediction.of(self.name, columns[0], np.where(unknown, np.nan, columns[1]), columns[2])


def _said_by_choice(
    choice: Choice, ops: Operations, index: FitIndex, tell: tuple[str, Diagnostics]
) -> FloatArray:
    """Time and interval of each operation of one class, shape (3, ops)."""
    beyond = np.stack([doublings_beyond(fit, ops) for fit in choice.fits])
    # The first fit whose sizes cover an operation; the preferred one where none does.
    chosen = np.argmax(beyond <= _AS_FITTED, axis=0)
    said = np.full((3, len(ops)), np.nan)
    where, found = tell
    numbers: list[int] = np.unique(chosen).tolist()
    for number in numbers:
        rows = np.flatnonzero(chosen == number)
        part = ops.take(rows)
        if choice.quantizing:
            said[:, rows] = without_quantizing(choice.fits[number], part, index, tell)
        else:
            said[:, rows] = time_and_interval(choice.fits[number], part, index.device, choice.scheme)
        if index.is_timed_with_events(choice.fits[number]) and not part.variant[0]:
            _tell_of_events(choice.fits[number], said[0, rows], tell)
    outside = int((beyond.min(axis=0) > _AS_FITTED).sum())
    found.info("calibrated.outside-support", where, f"{where}: sizes beyond those fitted on", count=outside)
    unknown = f"{where}: a size or a rate is unknown, or the fit is of another version"
    found.warning("calibrated.unknown-size", where, unknown, count=int(np.isnan(said[0]).sum()))
    return said


def _tell_of_events(fit: Fit, time_ns: FloatArray, tell: tuple[str, Diagnostics]) -> None:
    """Say how many answers are mostly the launch that a host timed, where nobody asked for such times."""
    where, found = tell
    with np.errstate(invalid="ignore"):
        launches = int((time_ns < 2 * fit.value("t0_ns")).sum())
    text = f"{where}: fitted on times taken with events: more than half of it is the launch by the host"
    found.warning("calibrated.event-times", where, text, count=launches)
