"""What one fit says of operations: its form's time, and the interval from its errors on unseen shapes."""

from __future__ import annotations

import numpy as np

from hespas.estimators.calibrated.attention import PREFILL
from hespas.estimators.calibrated.form import machine_of
from hespas.estimators.calibrated.forms import FORMS, form_time_ns
from hespas.estimators.operations import Operations
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, Fit

__all__ = ["doublings_beyond", "time_and_interval"]

_PER_DOUBLING = 0.25
"""Share by which an interval's half width grows with each doubling of a size beyond what was fitted on."""


def doublings_beyond(fit: Fit, ops: Operations) -> FloatArray:
    """Doublings by which sizes leave the range that was fitted on, all dimensions added up."""
    total = np.zeros(len(ops))
    for each in fit.support:
        size = ops.dim(each.name)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            over = np.log2(size / max(each.high, 1e-9))
            under = np.log2(max(each.low, 1e-9) / size)
        total += np.nan_to_num(np.maximum(np.maximum(over, under), 0.0), nan=0.0, posinf=64.0)
    if fit.form == PREFILL.name:  # whole prompts: as many keys as queries
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            apart = np.abs(np.log2(ops.dim("kv_len") / ops.dim("q_len")))
        total += np.nan_to_num(apart, nan=0.0, posinf=64.0)
    return total


def time_and_interval(fit: Fit, ops: Operations, device: Device, scheme: str) -> FloatArray:
    """What one fit says of operations of one scheme, shape (3, ops): time, 5 % and 95 % [ns]."""
    form = FORMS.get(fit.form)
    values = {each.name: each.value for each in fit.parameters}
    later = () if form is None else (each for each in form.parameters if each.since)
    values = {each.name: each.start for each in later} | values
    if form is None or any(each.name not in values for each in form.parameters):
        return np.full((3, len(ops)), np.nan)
    time = form_time_ns(form, values, ops, machine_of(device, ops.kind[0], scheme))
    if not fit.bands:
        return np.stack((time, np.full(len(ops), np.nan), np.full(len(ops), np.nan)))
    tops = np.array([band.up_to_ns for band in fit.bands])
    band = np.minimum(np.searchsorted(tops, time), len(tops) - 1)
    widening = 1 + _PER_DOUBLING * doublings_beyond(fit, ops)
    with np.errstate(over="ignore"):  # far beyond what was sampled, an interval may have no end
        low = np.array([each.low for each in fit.bands])[band] ** widening
        high = np.array([each.high for each in fit.bands])[band] ** widening
        return np.stack((time, time * np.minimum(low, 1.0), time * np.maximum(high, 1.0)))
