"""Operations that stream their data: arithmetic, traffic and a cost per row overlap, after a fixed start."""

from __future__ import annotations

import numpy as np

from hespas.estimators.calibrated.form import (
    Columns,
    Form,
    Machine,
    Parameter,
    Values,
    hit_share,
    soft_max,
)
from hespas.estimators.operations import STRIDED, Operations
from hespas.graph.columns import FloatArray

__all__ = ["ROOFLINE", "STREAMS"]

_T0 = Parameter(name="t0_ns", start=3000.0, low=50.0, high=1e6)
_COMPUTE = Parameter(name="compute", start=0.5, low=1e-3, high=10.0)
_MEMORY = Parameter(name="memory", start=0.7, low=1e-2, high=6.0)
_OVERLAP = Parameter(name="overlap", start=2.0, low=0.05, high=20.0)
_STRIDED = Parameter(name="strided", start=1.8, low=1.0, high=20.0, since=True)
"""How much longer traffic takes whose operands are not walked in the order of the result."""


def _rates(ops: Operations, machine: Machine) -> Columns:
    flops = ops.flops + 8.0 * np.nan_to_num(ops.transcendentals)
    with np.errstate(invalid="ignore"):
        arithmetic = np.where(flops == 0, 0.0, flops / machine.flops_per_ns)
    return {
        "arithmetic_ns": arithmetic,
        "memory_ns": ops.bytes_moved / machine.bytes_per_ns,
        "strided": np.nan_to_num(ops.dim(STRIDED)),
        "bytes": ops.bytes_moved,
        "rows": ops.dim("rows"),
        "columns": ops.dim("columns"),
        "cache": np.array(machine.cache_bytes),
    }


def _traffic_ns(values: Values, columns: Columns) -> FloatArray:
    slower = 1 + (values["strided"] - 1) * columns["strided"]
    return columns["memory_ns"] * slower / values["memory"]


def _roofline_ns(values: Values, columns: Columns) -> FloatArray:
    arithmetic = columns["arithmetic_ns"] / values["compute"]
    return values["t0_ns"] + soft_max(values["overlap"], arithmetic, _traffic_ns(values, columns))


def _streams_ns(values: Values, columns: Columns) -> FloatArray:
    share = hit_share(columns["bytes"], float(columns["cache"]) * values["cache_reach"], values["cache_edge"])
    speed_up = 1 + share * values["cache_gain"]
    memory = _traffic_ns(values, columns) / speed_up
    arithmetic = columns["arithmetic_ns"] / values["compute"]
    rows = columns["rows"] * (values["row_ns"] + values["row_step_ns"] * columns["columns"])
    return values["t0_ns"] + soft_max(values["overlap"], arithmetic, memory, rows)


ROOFLINE = Form(
    name="roofline",
    parameters=(_T0, _COMPUTE, _MEMORY, _OVERLAP, _STRIDED),
    dims=(),
    columns=_rates,
    time_ns=_roofline_ns,
)
"""Start, arithmetic and traffic, each at a share of its peak: what a whole chip is described by."""

STREAMS = Form(
    name="streams",
    parameters=(
        _T0,
        _COMPUTE,
        _MEMORY,
        _OVERLAP,
        _STRIDED,
        Parameter(name="row_ns", start=0.01, low=1e-6, high=1e3),
        Parameter(name="row_step_ns", start=1e-5, low=1e-9, high=1.0),
        Parameter(name="cache_gain", start=0.3, low=1e-3, high=20.0),
        Parameter(name="cache_reach", start=0.5, low=0.02, high=3.0),
        Parameter(name="cache_edge", start=2.0, low=0.5, high=20.0),
    ),
    dims=("rows", "columns"),
    columns=_rates,
    time_ns=_streams_ns,
)
"""Vector, normalisation, pooling, gather and quantising operations. ``cache_gain``: how much faster traffic
is that stays within ``cache_reach`` of the cache.
"""
