"""Intervals of fits of recordings: conformal prediction from held-out recordings.

Shapes of one recording are similar, and recordings of one device are more similar than recordings of two. The
error of a fit on other shapes of the same program is therefore smaller than its error on the next program or
device. So whole recordings are held out, with everything that is unknown when the fit is used. For a recorded
device that is the program, on all devices; for a device without recordings it is program and device.

The interval lies between order statistics of measured / predicted that hold one more value of the same kind
with a probability of 90 % (split conformal prediction: Papadopoulos et al. 2002; weights of dissimilar
samples: Tibshirani et al., "Conformal prediction under covariate shift", NeurIPS 2019). The samples are
recordings, not rows: none counts for more than :data:`ENOUGH` rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from hespas.estimators.composite import Composite
from hespas.estimators.interface import predict_with
from hespas.estimators.kernels import KERNELS, PRODUCT_KIND, PRODUCTS
from hespas.fitting.approaches import merged
from hespas.fitting.device_forms import error_of, rounded
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, Fit, FitBand
from hespas.measurements import Measurements
from hespas.operations import Labels

__all__ = ["ENOUGH", "HeldOutRecording", "held_out_recording", "with_fits", "with_intervals"]

ENOUGH = 60.0
"""Rows that are enough for an interval. If a device has fewer, rows of other devices are added. A recording
has at most the weight of this number of rows. One width is used for all kinds, because each kind has too
few recordings.
"""
_FEWEST = 10.0
"""Least rows for an interval of 90 %."""
_SIDE = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutRecording:
    """Recording on ``device`` that the fits do not contain: predicted and measured times [ns]."""

    device: str
    kind: Labels
    predicted_ns: FloatArray
    measured_ns: FloatArray

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.measured_ns)

    @property
    def weight(self) -> FloatArray:
        """Weight of each row."""
        return np.full(len(self), min(1.0, ENOUGH / max(len(self), 1)))


def with_fits(device: Device, fits: Sequence[Fit]) -> Device:
    """Return the device with these fits, as in a calibrated file."""
    return replace(device, own_fits=merged(fits, device.fits), fits_of="")


def held_out_recording(table: Measurements, device: Device, fits: Sequence[Fit]) -> HeldOutRecording:
    """Predict a held-out recording with the composite estimator and ``fits``.

    Rows that other models predict (of attention, for example) are left out.
    """
    prediction = predict_with(Composite(), table.ops, with_fits(device, fits), Diagnostics())
    is_fitted = np.isin(prediction.estimator, [prediction.models.index("calibrated")])
    is_fitted[table.ops.kind.where(PRODUCT_KIND)] = True
    rows = np.flatnonzero(is_fitted & np.isfinite(prediction.duration_ns) & (prediction.duration_ns > 0))
    part = table.take(rows)
    return HeldOutRecording(device.name, part.ops.kind, prediction.duration_ns[rows], part.duration_ns)


def with_intervals(
    fits: Sequence[Fit], left_out: Sequence[HeldOutRecording], device: Device | None = None
) -> tuple[Fit, ...]:
    """Return fits with errors and intervals from recordings that were held out in turn.

    For a recorded ``device``, its own recordings come first; others are added if these have fewer than
    :data:`ENOUGH` rows. For a device without recordings (None), all devices have equal weights. With too few
    held-out rows, the fits are returned unchanged.
    """
    near = [part for part in left_out if device is None or part.device == device.name]
    far = [part for part in left_out if device is not None and part.device != device.name]
    near_rows, far_rows = (sum(min(ENOUGH, float(len(part))) for part in parts) for parts in (near, far))
    share = min(1.0, max(ENOUGH - near_rows, 0.0) / max(far_rows, 1.0))
    weight = _joined_columns((*(part.weight for part in near), *(share * part.weight for part in far)))
    if weight.sum() < _FEWEST:
        return tuple(fits)
    ratio = _joined_columns(part.measured_ns / part.predicted_ns for part in (*near, *far))
    low, high = 1 / _upper_bound(1 / ratio, weight), _upper_bound(ratio, weight)
    bands = (FitBand(up_to_ns=inf, low=rounded(low), high=rounded(high)),)
    names = ", ".join(dict.fromkeys(part.device for part in (near if near_rows >= ENOUGH else [*near, *far])))
    how = f"interval: {'models' if device else 'devices and models'} left out in turn of {names}"
    changed: list[Fit] = []
    for fit in fits:
        if fit.form in (KERNELS.name, PRODUCTS):
            of_kind = [(part, part.kind.where(fit.kind)) for part in near]
            predicted_ns = _joined_columns(part.predicted_ns[rows] for part, rows in of_kind)
            measured_ns = _joined_columns(part.measured_ns[rows] for part, rows in of_kind)
            provenance = f"{fit.provenance} ({how})"
            error = error_of(predicted_ns, measured_ns)
            changed.append(replace(fit, bands=bands, error=error, provenance=provenance))
        else:
            changed.append(replace(fit, bands=bands))
    return tuple(changed)


def _joined_columns(columns: Iterable[FloatArray]) -> FloatArray:
    return np.concatenate([np.empty(0), *columns])


def _upper_bound(ratio: FloatArray, weight: FloatArray) -> float:
    """Return a bound that one more value, of weight 1, stays below with a probability of 95 %.

    It is the largest value if the sample is too small for such a bound. Rows of weight 0 do not count.
    """
    ratio, weight = ratio[weight > 0], weight[weight > 0]
    order = np.argsort(ratio, kind="stable")
    below = np.cumsum(weight[order])
    is_enough = below >= _SIDE * (below[-1] + 1)
    return float(ratio[order][int(is_enough.argmax()) if is_enough.any() else -1])
