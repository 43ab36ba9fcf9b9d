"""Products of matrices as programs run them, from what benchmarks of libraries say of the same sizes.

Benchmarks choose the best of a library's kernels for sizes they care about, launch them from a graph and
sweep sizes that vectors of 16 bytes divide. A framework's call differs by three things: what a call starts
beside the product (a workspace to clear, an epilogue), how its choice of kernels compares, and sizes of
``n`` or ``k`` that no vector divides, for which libraries fall back to kernels that load single elements.

    time = start_ns + scale x (benchmark + ragged x what of it is more than a start)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hespas.estimators.forms import machine_of
from hespas.estimators.registry import Prediction, with_bands
from hespas.graph.columns import BoolArray, FloatArray
from hespas.hardware import Device, Fit
from hespas.hardware.kernel_fits import common_fits, fits_of_user
from hespas.operations import Operations

__all__ = ["PRODUCTS", "PRODUCT_KIND", "as_programs_run", "is_ragged", "product_time_ns"]

PRODUCTS = "products"
"""The form's name in a fit."""
PRODUCT_KIND = "matmul"
_START_NS = 4000.0
"""What the smallest product takes, whose loads do not count."""


def is_ragged(ops: Operations, device: Device) -> BoolArray:
    """Products whose rows of n or k elements no vector divides, shape ``(ops,)``."""
    vectors = [machine_of(device, PRODUCT_KIND, scheme).vector_elements for scheme in ops.scheme.names]
    vector = np.nan_to_num(np.array([*vectors, 1.0])[ops.scheme.row], nan=1.0)
    vector = np.maximum(vector, 1.0)
    with np.errstate(invalid="ignore"):
        return np.asarray((ops.dim("n") % vector > 0) | (ops.dim("k") % vector > 0), np.bool_)


def product_time_ns(values: Mapping[str, float], benchmark_ns: FloatArray, ragged: BoolArray) -> FloatArray:
    """The time of products in a program [ns]; ``values`` are the form's parameters by name: ``ragged`` is
    what products of single elements cost more, as a share, where no vector divides n or k.
    """
    loads = np.where(ragged, np.maximum(benchmark_ns - _START_NS, 0.0), 0.0)
    return values["start_ns"] + values["scale"] * (benchmark_ns + values["ragged"] * loads)


def as_programs_run(said: Prediction, ops: Operations, device: Device) -> Prediction:
    """What is said of products that name no library, as programs on the device run them, where its own
    recordings or those of its vendor's devices tell; all else as it is.
    """
    rows = ops.kind.where(PRODUCT_KIND)
    rows = rows[np.isin(rows, ops.variant.where("")) & ~np.isnan(said.duration_ns[rows])]
    fit = _fit(device) if len(rows) else None
    if fit is None:
        return said
    part = ops.take(rows)
    values = {each.name: each.value for each in fit.parameters}
    before_ns = said.duration_ns[rows]
    time = product_time_ns(values, before_ns, is_ragged(part, device))
    columns = np.stack((said.duration_ns, said.low_ns, said.high_ns))
    bands = with_bands(fit, time)
    scaled = time / before_ns * columns[1:, rows]
    columns[0, rows] = time
    columns[1:, rows] = np.where(np.isnan(bands[1:]), scaled, bands[1:])
    return replace(said, duration_ns=columns[0], low_ns=columns[1], high_ns=columns[2])


def _fit(device: Device) -> Fit | None:
    for fits in (fits_of_user(device), common_fits(device)):
        for fit in fits:
            if fit.form == PRODUCTS:
                return fit
    return None
