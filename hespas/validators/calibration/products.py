"""Fits of what programs' products take beside what benchmarks of libraries say: three parameters, few
shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from hespas.estimators.composite import Composite
from hespas.estimators.kernels import PRODUCT_KIND, product_time_ns, ragged_share
from hespas.estimators.registry import predict_with
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.validators.calibration.shrinkage import moved_from_expected

__all__ = ["UNKNOWN_PRODUCTS", "benchmark_ns", "fit_products"]

UNKNOWN_PRODUCTS: Mapping[str, float] = MappingProxyType({"start_ns": 1500.0, "scale": 1.0, "ragged": 1.0})
"""What holds where no program was recorded: the clearing of a workspace, and vectors of half the length."""
_WIDTH: Mapping[str, float] = MappingProxyType({"start_ns": 0.5, "scale": 0.1, "ragged": 0.4})
"""How far they lie from that: ln units of one standard deviation."""


def benchmark_ns(table: Measurements, device: Device) -> FloatArray:
    """What the device's fits and models of benchmarks say of each row [ns], shape ``(rows,)``."""
    model = Composite(order="learned+calibrated+roofline")
    return predict_with(model, table.ops, device, Diagnostics()).duration_ns


def fit_products(
    table: Measurements, device: Device, before_ns: FloatArray, expected: Mapping[str, float]
) -> Mapping[str, float]:
    """The parameters that recorded products on ``device`` say, drawn towards those ``expected``;
    ``before_ns`` as :func:`benchmark_ns` says. Rows of other kinds, or of which nothing was said, do not
    count.
    """
    rows = table.ops.kind.where(PRODUCT_KIND)
    rows = rows[np.isfinite(before_ns[rows])]
    names = tuple(expected)
    centre = np.log([expected[name] for name in names])
    if not len(rows):
        return expected
    ragged, before = ragged_share(table.ops.take(rows), device), before_ns[rows]
    log_ns = np.log(table.duration_ns[rows])
    width = np.array([_WIDTH[name] for name in names])

    def values_of(logs: FloatArray) -> dict[str, float]:
        values: list[float] = np.exp(logs).tolist()
        return dict(zip(names, values, strict=True))

    def log_ratio(moved: FloatArray) -> FloatArray:
        ratio: FloatArray = np.log(product_time_ns(values_of(centre + moved), before, ragged)) - log_ns
        return ratio

    return values_of(centre + moved_from_expected(log_ratio, width, np.ones(len(rows))))
