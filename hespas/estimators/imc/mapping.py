"""Mapping of matrix products to in-memory-computing macros: tiles, copies and rounds with the fewest cycles.

A product multiplies ``vectors`` inputs of K values by a stored matrix of K x N weights, ``groups`` times with
other weights. A convolution is the product of im2col: its channels and kernel positions are the K rows, its
filters the N columns, its output positions the vectors (in ZigZag-IMC: loops C, FX and FY on rows, K on
columns, OX, OY and B in time or on copies).

The matrix is cut into tiles. A macro holds ``blocks`` tiles on the diagonal of its array, each with rows and
columns of its own, so that tiles of different groups or copies of one tile work at once. If the macros have
more places than there are tiles, tiles are duplicated and share the vectors (weight duplication of ISAAC,
Shafiee et al., ISCA 2016). If they have fewer, the tiles are processed in the fewest possible rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

__all__ = ["Layer", "Mapping", "map_layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Matrix product of one operation: ``groups`` matrices of ``inputs`` (K) x ``outputs`` (N) weights, each
    multiplied by ``vectors`` inputs.
    """

    groups: int
    vectors: int
    inputs: int
    outputs: int

    @property
    def macs(self) -> int:
        """Number of multiplications."""
        return self.groups * self.vectors * self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """Mapping of one layer. ``vector_cycles`` counts the input vectors that the busiest macro processes one
    after another.

    ``row_tiles`` x ``column_tiles`` tiles cut each matrix. ``copies`` is the number of copies of each tile in
    the last round. ``weight_sets`` is the number of macro loads over all ``rounds``, ``rows_per_set`` the
    number of rows of the fullest. ``written`` is the number of times that each weight is stored, averaged
    over the weights. ``utilization`` is the share of the multipliers of all macros that do useful work,
    averaged over the cycles.
    """

    blocks: int
    row_tiles: int
    column_tiles: int
    copies: int
    rounds: int
    vector_cycles: int
    weight_sets: int
    written: float
    rows_per_set: int
    utilization: float


@lru_cache(maxsize=65536)
def map_layer(
    layer: Layer, rows: int, columns: int, macros: int, *, most_loads: int = 0, most_copies: int = 0
) -> Mapping:
    """Return the mapping with the fewest cycles on ``macros`` arrays of ``rows`` x ``columns`` weights.

    All numbers of blocks are tried. All rounds but the last are full. They take one cycle per vector, as any
    round does in which more than half of the places have a tile of their own. Among equal cycles, the mapping
    with the fewest tiles (conversions), and then with the fewest blocks, is chosen.

    ``most_copies`` limits the copies of a tile, ``most_loads`` the loads of macros (0: no limit). Mappings
    that exceed the limit of loads least are chosen first, and among equal cycles and tiles the fewest loads.
    O(min(rows, columns)).

    Examples:
        A 3 x 3 convolution of 16 channels and 20 filters at 100 positions, on two arrays of 64 x 16 weights:

        >>> mapping = map_layer(Layer(groups=1, vectors=100, inputs=144, outputs=20), 64, 16, 2)
        >>> mapping.row_tiles, mapping.column_tiles, mapping.rounds, mapping.vector_cycles
        (3, 2, 3, 300)
        >>> round(mapping.utilization, 3)
        0.469
    """
    blocks = np.arange(1, min(rows, columns) + 1, dtype=np.int64)
    row_tiles = -(-layer.inputs // (rows // blocks))
    column_tiles = -(-layer.outputs // (columns // blocks))
    tiles = row_tiles * column_tiles * layer.groups
    places = macros * blocks
    full_rounds, rest = tiles // places, tiles % places
    # The tiles of the last round fill the places with copies, at most one per vector. With a limit they fill
    # the loads that are left, or those that they need without copies.
    usable = places
    if most_loads:
        needed = -(-rest // blocks)
        usable = np.minimum(np.maximum(most_loads - full_rounds * macros, needed), macros) * blocks
    most = min(layer.vectors, most_copies or layer.vectors)
    copies = np.where(rest > 0, np.minimum(usable // np.maximum(rest, 1), most), 1)
    cycles = full_rounds * layer.vectors + np.where(rest > 0, -(-layer.vectors // copies), 0)
    sets = full_rounds * macros + -(-rest * copies // blocks)
    excess = np.maximum(sets - most_loads, 0) if most_loads else np.zeros_like(sets)
    saved = sets if most_loads else excess
    best = int(np.lexsort((blocks, saved, row_tiles + column_tiles, cycles, excess))[0])
    chosen = (blocks, row_tiles, column_tiles, tiles, full_rounds, rest, copies, cycles, sets)
    values = [int(column[best]) for column in chosen]
    used, row_count, column_count, tile_count, full, left, copied, vector_cycles, set_count = values
    stored = full * macros * used + left * copied
    return Mapping(
        blocks=used,
        row_tiles=row_count,
        column_tiles=column_count,
        copies=copied,
        rounds=full + (left > 0),
        vector_cycles=vector_cycles,
        weight_sets=set_count,
        written=stored / tile_count,
        rows_per_set=min(layer.inputs, rows // used) * min(used, stored),
        utilization=layer.macs / (vector_cycles * macros * rows * columns),
    )
