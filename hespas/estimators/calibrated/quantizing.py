"""Products whose operands are quantised already, from fits of kernels that quantise them first.

Serving libraries take 16-bit activations, find a scale, convert and multiply; the tables hold the sum. What
finding the scale and converting take is fitted by itself and taken off again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hespas.estimators.calibrated.applying import time_and_interval
from hespas.estimators.calibrated.choice import FitIndex
from hespas.estimators.operations import Labels, Operations, build
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Fit, FitParameter

__all__ = ["without_quantizing"]

_STEPS = ("compute_scale", "scale_matrix")
"""The quantising kernels of a scale per tensor: what scheme ``fp8`` runs before the product."""
_STEP_SCHEME = "bf16"
_WIDEST = 4.0


def without_quantizing(
    fit: Fit, ops: Operations, index: FitIndex, tell: tuple[str, Diagnostics]
) -> FloatArray:
    """Time, 5 % and 95 % [ns] of products of ``ops`` sizes without the quantising that ``fit`` holds."""
    where, found = tell
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    whole = build.matmuls(Labels.constant(fit.scheme, len(ops)), batch=batch, m=m, n=n, k=k)
    said = time_and_interval(fit, whole, index.device, fit.scheme)
    taken = _quantizing_ns(fit, ops, index)
    if taken is None:
        message = f"{where}: the fit of {fit.scheme} holds the kernels that quantise the activations"
        found.warning("calibrated.includes-quantizing", where, message, count=len(ops))
        return said
    message = f"{where}: the fit of {fit.scheme}, less the fitted kernels that quantise the activations"
    found.info("calibrated.less-quantizing", where, message, count=len(ops))
    floor = time_and_interval(_with_plain_start(fit, index), whole, index.device, fit.scheme)[0]
    time = np.minimum(np.maximum(said[0] - taken, floor), said[0])
    # The same absolute uncertainty of less time is more of it.
    widening = np.minimum(said[0] / time, _WIDEST)
    return np.stack((time, time * (said[1] / said[0]) ** widening, time * (said[2] / said[0]) ** widening))


def _quantizing_ns(fit: Fit, ops: Operations, index: FitIndex) -> FloatArray | None:
    """The time of the quantising kernels; None where they are not fitted for this scheme on this device."""
    if fit.scheme != "fp8":
        return None
    scheme = Labels.constant(_STEP_SCHEME, len(ops))
    total = np.zeros(len(ops))
    for step, passes in zip(_STEPS, (1.0, 1.5), strict=True):
        fits = index.by_class.get(("quantize", step, _STEP_SCHEME), ())
        if not fits:
            return None
        rows = ops.dim("batch") * ops.dim("m")
        quantize = build.elementwise(
            "quantize",
            scheme,
            op=Labels.constant(step, len(ops)),
            rows=rows,
            columns=ops.dim("k"),
            passes=np.full(len(ops), passes),
            flops_per_element=np.ones(len(ops)),
        )
        total += time_and_interval(fits[0], quantize, index.device, _STEP_SCHEME)[0]
    return total


def _with_plain_start(fit: Fit, index: FitIndex) -> Fit:
    """The fit with the start of a single kernel, that of the device's 16-bit products."""
    plain = index.by_class.get(("matmul", "", _STEP_SCHEME)) or index.by_class.get((ANY, ANY, ANY), ())
    start = min((each.value("t0_ns") for each in plain), default=np.inf)
    parameters = tuple(
        FitParameter(name=each.name, value=min(each.value, start)) if each.name == "t0_ns" else each
        for each in fit.parameters
    )
    return replace(fit, parameters=parameters)
