"""The roofline of operations apart from any graph: the same model as of nodes, on what tables state.

    t = overhead + max(arithmetic / efficiency, memory / efficiency)          [ns]

Collectives take the time of the links, as in a graph; a group larger than its node leaves the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

import numpy as np

from hespas.estimators.by_operation import Prediction
from hespas.estimators.network import Algorithm, collective_time_ns
from hespas.estimators.operations import Operations, find_scheme, peak_times
from hespas.graph import CollectiveKind, Diagnostics
from hespas.graph.columns import FloatArray
from hespas.hardware import Device

__all__ = ["roofline_of_operations"]

_CLASS_OF: Mapping[str, str] = {
    "matmul": "contraction",
    "moe": "contraction",
    "convolution": "convolution",
    "attention.context": "attention",
    "attention.generation": "attention",
    "attention.encoder": "attention",
    "vector": "elementwise",
    "reduction": "reduction",
    "normalization": "normalization",
    "quantize": "quantize",
    "pooling": "window",
    "gather": "gather",
    "move": "move",
}
"""The class by whose efficiencies in the hardware file a kind runs."""

_COLLECTIVES: Mapping[str, CollectiveKind] = {each.name.lower(): each for each in CollectiveKind}


def roofline_of_operations(
    ops: Operations,
    device: Device,
    *,
    transcendental_weight: float,
    efficiencies: tuple[float, float],
    algorithm: Algorithm,
    diagnostics: Diagnostics | None = None,
) -> Prediction:
    """Time of one execution of each operation; NaN where a cost or a peak is unknown. O(ops).

    ``efficiencies`` are shares of the peaks of arithmetic and memory where the hardware file has no fit.
    """
    times = peak_times(ops, device, transcendental_weight=transcendental_weight)
    compute, memory, overhead_ns = _efficiencies(ops, device, efficiencies)
    with np.errstate(invalid="ignore"):
        duration = overhead_ns + np.maximum(times.arithmetic_ns / compute, times.memory_ns / memory)
    rows = ops.kind.where("collective")
    if len(rows):
        duration[rows] = overhead_ns[rows] + _network_ns(ops.take(rows), device, algorithm)
    unknown = np.isnan(duration)
    if diagnostics is not None:
        diagnostics.warning(
            "roofline.unknown",
            device.name,
            "operations have no known cost, or the device no rate for them",
            count=int(unknown.sum()),
        )
    return Prediction.of("roofline", duration)


def _efficiencies(
    ops: Operations, device: Device, default: tuple[float, float]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Shares of the peaks and launch [ns] of each operation: looked up once per kind and scheme."""
    table = np.empty((3, len(ops.kind.names), len(ops.scheme.names)))
    table[:] = np.array([*default, device.launch_overhead_ns])[:, None, None]
    for row, kind in enumerate(ops.kind.names):
        for column, name in enumerate(ops.scheme.names):
            scheme = find_scheme(name)
            fit = device.efficiency(_CLASS_OF.get(kind, kind), scheme.rate_dtype if scheme else "")
            if fit is None:
                continue
            for place, value in enumerate((fit.compute, fit.memory, fit.t0_ns)):
                if not isnan(value):
                    table[place, row, column] = value
    compute, memory, overhead_ns = table[:, ops.kind.row, ops.scheme.row]
    return compute, memory, overhead_ns


def _network_ns(ops: Operations, device: Device, algorithm: Algorithm) -> FloatArray:
    """Time of collectives without launch [ns]; NaN for kinds nobody knows."""
    kinds = np.array([int(_COLLECTIVES.get(name, -1)) for name in ops.op.names], np.int64)[ops.op.row]
    ranks = ops.dim("ranks")
    found = collective_time_ns(
        np.maximum(kinds, 0),
        ranks,
        ops.dim("message_bytes"),
        device,
        beyond_node=ranks > np.nan_to_num(ops.dim("ranks_per_node"), nan=np.inf),
        algorithm=algorithm,
    )
    return np.where(kinds < 0, np.nan, found)
