"""Mixtures of experts: two grouped products whose experts each see a few tokens."""

from __future__ import annotations

import numpy as np

from hespas.estimators.calibrated.form import Columns, Form, Machine, Parameter, Values, soft_max
from hespas.estimators.operations import Operations
from hespas.graph.columns import FloatArray

__all__ = ["EXPERTS"]

_TILES = np.array([(16, 128), (32, 128), (64, 128), (64, 256), (128, 128), (128, 256)], np.float64)


def _columns(ops: Operations, machine: Machine) -> Columns:
    tokens, hidden, topk, experts = (ops.dim(name) for name in ("tokens", "hidden", "topk", "experts"))
    width = ops.dim("inter") / ops.dim("tensor_parallel")
    local = experts / ops.dim("expert_parallel")
    gates = ops.dim("matrices") - 1
    pairs = tokens * topk / ops.dim("expert_parallel")
    unit_flops = machine.flops_per_ns / machine.units
    unit_bytes = machine.bytes_per_ns / machine.units
    tile_m, tile_n = _TILES[:, :1], _TILES[:, 1:]
    return {
        "pairs": pairs,
        "local": local,
        "chance": topk / experts,
        "tokens": tokens,
        "in_tiles": np.ceil(width * gates / tile_n),
        "out_tiles": np.ceil(hidden / tile_n),
        "in_steps": hidden,
        "out_steps": width,
        "unit_flops_ns": 2 * tile_m * tile_n / unit_flops,
        "unit_bytes_ns": (tile_m * machine.activation_bytes + tile_n * machine.weight_bytes) / unit_bytes,
        "units": np.array(machine.units),
        "expert_ns": ops.dim("matrices") * hidden * width * machine.weight_bytes / machine.bytes_per_ns,
        "token_ns": pairs * hidden * machine.output_bytes / machine.bytes_per_ns,
        "inner_ns": pairs * width * (gates + 1) * machine.output_bytes / machine.bytes_per_ns,
        "k": hidden + width,
    }


def _time_ns(values: Values, columns: Columns) -> FloatArray:
    # Experts that see any token: independent draws, fewer where the draws are skewed.
    drawn = columns["tokens"] ** values["spread"]
    hit = columns["local"] * -np.expm1(drawn * np.log1p(-np.minimum(columns["chance"], 0.999999)))
    hit = np.maximum(hit, np.minimum(columns["pairs"], 1.0))
    rows = np.maximum(columns["pairs"] / hit, 1.0)
    per_expert = np.ceil(rows * values["imbalance"] / _TILES[:, :1])
    edges = 1 + values["tile_edge"] * (1 / _TILES[:, :1] + 1 / _TILES[:, 1:])
    arithmetic = columns["unit_flops_ns"] * edges / values["compute"]
    loads = columns["unit_bytes_ns"] / values["unit_load"]
    step = (arithmetic**3 + loads**3) ** (1 / 3)
    units = float(columns["units"])
    total = np.zeros((len(_TILES), len(rows)))
    for tiles, steps in (("in_tiles", "in_steps"), ("out_tiles", "out_steps")):
        filled = hit * per_expert * columns[tiles] / units
        paid = np.maximum(filled + values["wave_tail"] * (np.ceil(filled) - filled), 1.0)
        total += paid * columns[steps] * step
    tiled = total.min(axis=0)
    weights = hit * columns["expert_ns"] / values["memory"]
    kernels = soft_max(values["overlap"], tiled, weights)
    moved = values["token_passes"] * columns["token_ns"] + values["inner_passes"] * columns["inner_ns"]
    start = values["t0_ns"] + values["step_ns"] * columns["k"] + values["expert_start_ns"] * columns["local"]
    return start + kernels + moved


EXPERTS = Form(
    name="experts",
    parameters=(
        Parameter(name="t0_ns", start=30000.0, low=50.0, high=1e7),
        Parameter(name="compute", start=0.6, low=0.02, high=6.0),
        Parameter(name="memory", start=0.7, low=0.02, high=4.0),
        Parameter(name="overlap", start=1.5, low=0.05, high=20.0),
        Parameter(name="unit_load", start=2.5, low=0.1, high=50.0),
        Parameter(name="tile_edge", start=10.0, low=0.01, high=1000.0),
        Parameter(name="wave_tail", start=0.5, low=0.01, high=1.0),
        Parameter(name="imbalance", start=1.0, low=0.5, high=20.0),
        Parameter(name="spread", start=0.95, low=0.3, high=1.0),
        Parameter(name="step_ns", start=0.1, low=1e-4, high=50.0),
        Parameter(name="expert_start_ns", start=10.0, low=1e-3, high=1e4),
        Parameter(name="token_passes", start=3.0, low=1e-2, high=100.0),
        Parameter(name="inner_passes", start=1.0, low=1e-3, high=100.0),
    ),
    dims=("tokens", "hidden", "inter", "topk", "experts", "tensor_parallel", "expert_parallel"),
    columns=_columns,
    time_ns=_time_ns,
)
"""Feed-forward layers of experts, routing and gathering included. ``imbalance``: tokens of the busiest
experts over the mean; ``spread``: the exponent by which skewed routing hits fewer experts.
"""
