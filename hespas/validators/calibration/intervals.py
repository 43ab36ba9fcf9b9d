"""Intervals of fits of recordings, conformal prediction by recordings that were left out.

Shapes of one recording are like one another, and recordings of one device more than those of two. What a fit
errs by on shapes of a program that it has seen says little of the next program, and less of another device.
So whole recordings are left out, and what is left out is what will be missing when the fit is used: the
program, on every device, where the device was recorded; program and device where it was not.

The interval lies between order statistics of measured / predicted such that one more value of the same kind
stays between them nine times in ten (split conformal prediction: Papadopoulos et al. 2002; weights of unlike
samples: Tibshirani et al., "Conformal prediction under covariate shift", NeurIPS 2019). Recordings, not rows,
are what is drawn anew: none counts for more than :data:`ENOUGH` rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from hespas.estimators.composite import Composite
from hespas.estimators.kernels import KERNELS, PRODUCT_KIND, PRODUCTS
from hespas.estimators.registry import predict_with
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, Fit, FitBand
from hespas.measurements import Measurements
from hespas.operations import Labels
from hespas.validators.calibration.approaches import merged
from hespas.validators.calibration.fit_device import error_of, rounded

__all__ = ["ENOUGH", "Unseen", "unseen", "with_fits", "with_intervals"]

ENOUGH = 60.0
"""Rows that speak for themselves: of fewer those of other devices make up the rest; of one recording no more
count in full. One width is for all kinds: what counts are recordings, of which a kind has too few.
"""
_FEWEST = 10.0
"""Rows of which fewer say nothing of a tenth."""
_SIDE = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class Unseen:
    """What fits say of a recording on ``device`` that they have not seen, and what it took [ns]."""

    device: str
    kind: Labels
    predicted_ns: FloatArray
    measured_ns: FloatArray

    def __len__(self) -> int:
        """Rows."""
        return len(self.measured_ns)

    @property
    def weight(self) -> FloatArray:
        """What each row counts."""
        return np.full(len(self), min(1.0, ENOUGH / max(len(self), 1)))


def with_fits(device: Device, fits: Sequence[Fit]) -> Device:
    """The device as a file of its own would have it that was calibrated to these fits."""
    return replace(device, own_fits=merged(fits, device.fits), fits_of="")


def unseen(table: Measurements, device: Device, fits: Sequence[Fit]) -> Unseen:
    """What the composite says by ``fits`` of a recording that they have not seen: rows that others answer
    (models of attention, say) are left out.
    """
    said = predict_with(Composite(), table.ops, with_fits(device, fits), Diagnostics())
    fitted = np.isin(said.estimator, [said.models.index("calibrated")])
    fitted[table.ops.kind.where(PRODUCT_KIND)] = True
    rows = np.flatnonzero(fitted & np.isfinite(said.duration_ns) & (said.duration_ns > 0))
    part = table.take(rows)
    return Unseen(device.name, part.ops.kind, said.duration_ns[rows], part.duration_ns)


def with_intervals(
    fits: Sequence[Fit], left_out: Sequence[Unseen], device: Device | None = None
) -> tuple[Fit, ...]:
    """Fits with errors and intervals by recordings that were left out in turn.

    Of a recorded ``device`` its own count first, and others' as far as they are fewer than :data:`ENOUGH`
    rows; of one that was not (None), those of all devices alike. As they are where too little was left out.
    """
    near = [each for each in left_out if device is None or each.device == device.name]
    far = [each for each in left_out if device is not None and each.device != device.name]
    bands = _bands(near, far)
    if not bands:
        return tuple(fits)
    named = near if _weight(near) >= ENOUGH else [*near, *far]
    names = ", ".join(dict.fromkeys(each.device for each in named))
    how = f"interval: {'models' if device else 'devices and models'} left out in turn of {names}"
    found: list[Fit] = []
    for fit in fits:
        changed = replace(fit, bands=bands)
        if fit.form in (KERNELS.name, PRODUCTS):
            where = f"{fit.provenance} ({how})"
            changed = replace(changed, error=error_of(*_of_kind(near, fit.kind)), provenance=where)
        found.append(changed)
    return tuple(found)


def _of_kind(parts: Sequence[Unseen], kind: str) -> tuple[FloatArray, FloatArray]:
    """Predictions and measurements [ns] of the rows of a kind."""
    rows = [(each, each.kind.where(kind)) for each in parts]
    predicted_ns = _joined(each.predicted_ns[mine] for each, mine in rows)
    return predicted_ns, _joined(each.measured_ns[mine] for each, mine in rows)


def _weight(parts: Sequence[Unseen]) -> float:
    return sum(min(ENOUGH, float(len(each))) for each in parts)


def _joined(columns: Iterable[FloatArray]) -> FloatArray:
    return np.concatenate([np.empty(0), *columns])


def _bands(near: Sequence[Unseen], far: Sequence[Unseen]) -> tuple[FitBand, ...]:
    """Between what shares of a prediction nine tenths of the measurements lie; nothing of too few rows."""
    share = min(1.0, max(ENOUGH - _weight(near), 0.0) / max(_weight(far), 1.0))
    weight = _joined((*(each.weight for each in near), *(share * each.weight for each in far)))
    if weight.sum() < _FEWEST:
        return ()
    ratio = _joined(each.measured_ns / each.predicted_ns for each in (*near, *far))
    low, high = 1 / _bound(1 / ratio, weight), _bound(ratio, weight)
    return (FitBand(up_to_ns=inf, low=rounded(low), high=rounded(high)),)


def _bound(ratio: FloatArray, weight: FloatArray) -> float:
    """What one more value, of weight 1, stays below nineteen times in twenty; the largest where that is more
    than the sample can say. Rows of weight 0 say nothing.
    """
    ratio, weight = ratio[weight > 0], weight[weight > 0]
    order = np.argsort(ratio, kind="stable")
    below = np.cumsum(weight[order])
    enough = below >= _SIDE * (below[-1] + 1)
    return float(ratio[order][int(enough.argmax()) if enough.any() else -1])
