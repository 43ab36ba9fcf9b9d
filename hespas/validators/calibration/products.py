"""Fits of what programs' products take beside what benchmarks of libraries say: three parameters, few
shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

import numpy as np

from hespas.estimators.composite import Composite
from hespas.estimators.kernels import PRODUCT_KIND, PRODUCTS, product_time_ns, ragged_share
from hespas.estimators.learned.tf32 import runs_on_tf32
from hespas.estimators.registry import predict_with
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Device, Fit, FitParameter
from hespas.hardware.kernel_shares import starts_of
from hespas.measurements import Measurements, joined
from hespas.validators.calibration.fit_device import error_of, rounded
from hespas.validators.calibration.shrinkage import moved_from_expected

__all__ = ["UNKNOWN_PRODUCTS", "benchmark_ns", "common_products", "fit_products", "products_fit"]

UNKNOWN_PRODUCTS: Mapping[str, float] = MappingProxyType({"start_ns": 1500.0, "scale": 1.0, "ragged": 1.0})
"""What holds where no program was recorded: the clearing of a workspace, and vectors of half the length."""
_WIDTH: Mapping[str, float] = MappingProxyType({"start_ns": 0.5, "scale": 0.1, "ragged": 0.4})
"""How far they lie from that: ln units of one standard deviation."""


def common_products(tables: Sequence[tuple[Measurements, Device]], vendor: str) -> Mapping[str, float]:
    """What holds of a vendor's devices of which nothing was recorded: the mean (of logarithms) of those that
    were; of all vendors' where none of its own was. Starts are of a device whose shortest kernel takes
    :data:`~hespas.hardware.kernel_shares.COMMON_FLOOR_NS`.

    Products that another number format's stand in for say as much of the stand-in as of programs: they do
    not count.
    """
    found: dict[str, list[Mapping[str, float]]] = {}
    for name in dict.fromkeys(device.name for _, device in tables):
        mine = [(table, device) for table, device in tables if device.name == name]
        device = mine[0][1]
        table = joined([each for each, _ in mine], name)
        rows = np.setdiff1d(table.ops.kind.where(PRODUCT_KIND), runs_on_tf32(table.ops, device))
        if len(rows):
            part = table.take(rows)
            values = fit_products(part, device, benchmark_ns(part, device), UNKNOWN_PRODUCTS)
            values = {**values, "start_ns": values["start_ns"] / starts_of(device)}
            found.setdefault(device.vendor, []).append(values)
    told = found.get(vendor) or [values for each in found.values() for values in each] or [UNKNOWN_PRODUCTS]
    return {
        name: float(np.exp(np.mean([np.log(values[name]) for values in told]))) for name in UNKNOWN_PRODUCTS
    }


def products_fit(values: Mapping[str, float], *, fitted: str = "") -> Fit:
    """Parameters in common as a row of a file: without errors of their own, what bounds a benchmark's answer
    is scaled with it.
    """
    return Fit(
        kind=PRODUCT_KIND,
        op=ANY,
        scheme=ANY,
        variant="",
        form=PRODUCTS,
        parameters=tuple(FitParameter(name=name, value=rounded(value)) for name, value in values.items()),
        support=(),
        samples=1,
        error=error_of(np.empty(0), np.empty(0)),
        bands=(),
        table="recordings",
        provenance="recordings",
        fitted=fitted or datetime.now(UTC).date().isoformat(),
        seed=0,
        default=True,
    )


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
