"""Products of matrices (and convolutions as the products they are): waves of tiles, and traffic.

A kernel cuts (m, n) into tiles and k into splits and gives each to one unit of the device, wave after wave.
A step of k costs a unit its arithmetic or its loads, whichever is longer; the shape of tile and the number of
splits are the fastest of a few. Beside it runs the traffic to the main memory, less what caches hold.
"""

from __future__ import annotations

from functools import cache
from itertools import product

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
from hespas.estimators.operations import Operations
from hespas.graph.columns import FloatArray

__all__ = ["PRODUCTS"]

_TILES = (
    (256, 128), (128, 256), (256, 256), (128, 128), (64, 256), (128, 64), (64, 128),
    (64, 64), (128, 32), (64, 32), (32, 32), (128, 8), (16, 128), (16, 64), (8, 64),
)  # fmt: skip
_SPLITS = (1, 2, 4, 8, 16)
_WIDE_TILES = (
    (128, 128), (128, 256), (256, 128), (256, 256), (256, 512), (512, 256), (512, 512),
    (512, 1024), (1024, 512), (1024, 1024),
)  # fmt: skip
_WIDE_SPLITS = (1, 2, 4)
_WIDE = 64
"""Elements taken at once from which matrix units are systolic arrays, with buffers for wide tiles."""
_STEP = 32.0
"""Elements of k that a kernel works on at once."""


@cache
def _candidates(wide: bool) -> tuple[FloatArray, FloatArray]:
    """Tiles, shape (candidates, 2), and numbers of splits, shape (candidates, 1)."""
    tiles, splits = (_WIDE_TILES, _WIDE_SPLITS) if wide else (_TILES, _SPLITS)
    pairs = list(product(tiles, splits))
    return np.array([tile for tile, _ in pairs], np.float64), np.array(
        [[split] for _, split in pairs], np.float64
    )


_PARAMETERS = (
    Parameter(name="t0_ns", start=3000.0, low=50.0, high=1e6),
    Parameter(name="compute", start=0.7, low=0.02, high=6.0),
    Parameter(name="memory", start=0.75, low=0.02, high=4.0),
    Parameter(name="overlap", start=1.5, low=0.05, high=20.0),
    Parameter(name="step_ns", start=0.1, low=1e-4, high=50.0),
    Parameter(name="unit_load", start=2.5, low=0.1, high=50.0),
    Parameter(name="tile_edge", start=10.0, low=0.01, high=1000.0),
    Parameter(name="fill", start=30.0, low=0.1, high=5000.0),
    Parameter(name="split_ns", start=500.0, low=1.0, high=1e5),
    Parameter(name="wave_tail", start=0.7, low=0.02, high=1.0),
    Parameter(name="activations_cached", start=0.4, low=1e-3, high=1.0),
    Parameter(name="cache_reach", start=0.5, low=0.02, high=2.0),
    Parameter(name="cache_edge", start=4.0, low=0.5, high=40.0),
    Parameter(name="ragged_k", start=0.1, low=1e-3, high=10.0),
    Parameter(name="ragged_n", start=0.1, low=1e-3, high=10.0),
    Parameter(name="weight_copies", start=5.0, low=1.0, high=5.0, varies=False),
)
"""``compute``, ``memory``: shares of the peaks. ``unit_load``: a unit's share of the bandwidth, in shares of
bandwidth / units. ``tile_edge``: elements by which a tile's edge costs more than its area. ``fill``: steps of
k that starting a tile and storing it take. ``wave_tail``: how much of the last, partly filled wave is paid.
``ragged_k``, ``ragged_n``: what rows that do not fill whole vectors cost more, as shares.
``weight_copies``: a benchmark turns through so many copies of the weights at most, until they exceed the
cache.
"""

_PIPELINE = 3.0
"""Arithmetic and loads of one step overlap: the norm of this order."""


def _columns(ops: Operations, machine: Machine) -> Columns:
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    tile, split = _candidates(machine.vector_elements >= _WIDE)
    tile_m, tile_n = tile[:, :1], tile[:, 1:]
    filled = batch * np.ceil(m / tile_m) * np.ceil(n / tile_n) * split / machine.units
    weights = batch * n * k * machine.weight_bytes
    copies = np.ceil(machine.cache_bytes / np.maximum(weights, 1.0))
    edge = tile_m * machine.activation_bytes + tile_n * machine.weight_bytes
    area = 2 * tile_m * tile_n
    return {
        "filled": filled,
        "waves": np.ceil(filled),
        "steps": np.ceil(k / split / _STEP) * _STEP,
        "edges": 1 / tile_m + 1 / tile_n,
        "doublings": np.log2(split),
        "unit_flops_ns": area / (machine.flops_per_ns / machine.units),
        "unit_bytes_ns": edge / (machine.bytes_per_ns / machine.units),
        "ragged_k": np.sign(k % machine.vector_elements),
        "ragged_n": np.sign(n % machine.vector_elements),
        "k": k,
        "bytes": ops.bytes_moved,
        "weights": weights,
        "copies": copies,
        "cache": np.array(machine.cache_bytes),
        "bandwidth": np.array(machine.bytes_per_ns),
    }


def _time_ns(values: Values, columns: Columns) -> FloatArray:
    edges = 1 + values["tile_edge"] * columns["edges"]
    arithmetic = columns["unit_flops_ns"] * edges / values["compute"]
    loads = columns["unit_bytes_ns"] / values["unit_load"]
    step = (arithmetic**_PIPELINE + loads**_PIPELINE) ** (1 / _PIPELINE)
    filled, waves = columns["filled"], columns["waves"]
    paid = np.maximum(filled + values["wave_tail"] * (waves - filled), 1.0)
    tiled = columns["steps"] + values["fill"]
    tiled *= paid
    tiled *= step
    tiled += columns["doublings"] * values["split_ns"]
    ragged = 1 + values["ragged_k"] * columns["ragged_k"] + values["ragged_n"] * columns["ragged_n"]
    return _with_traffic(tiled.min(axis=0) * ragged, values, columns)


def _with_traffic(tiled: FloatArray, values: Values, columns: Columns) -> FloatArray:
    cache, weights = float(columns["cache"]), columns["weights"]
    turned = np.minimum(columns["copies"], values["weight_copies"]) * weights
    held = weights * hit_share(turned, cache * values["cache_reach"], values["cache_edge"])
    held += np.minimum(columns["bytes"] - weights, 0.7 * cache) * values["activations_cached"]
    traffic = (columns["bytes"] - held) / (values["memory"] * float(columns["bandwidth"]))
    total = soft_max(values["overlap"], tiled, np.maximum(traffic, 0.0))
    return values["t0_ns"] + values["step_ns"] * columns["k"] + total


PRODUCTS = Form(
    name="tiles",
    parameters=_PARAMETERS,
    dims=("batch", "m", "n", "k"),
    columns=_columns,
    time_ns=_time_ns,
    choices=({"weight_copies": 5.0}, {"weight_copies": 1.0}),
)
"""The form of products and convolutions."""
