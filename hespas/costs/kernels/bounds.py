"""Bounds on the work of a kernel, from its name and its launch configuration.

A name states elements per block or thread, and the launch states the number of blocks and threads. The
product is an upper bound. If the launch covers a range exactly once, all blocks except the last one are full,
which gives a lower bound. The launch of a kernel that loops over its grid gives no bound.
"""

from __future__ import annotations

from math import isnan, nan, prod
from typing import NamedTuple

from hespas.costs.kernels.facts import Cover, KernelFacts
from hespas.graph import OpClass, find_dtype

__all__ = ["UNBOUNDED", "WorkBounds", "launch_of", "work_bounds"]

_LARGEST = 1 << 62


class WorkBounds(NamedTuple):
    """Lower and upper bounds on the work of a kernel; NaN if there is no bound.

    ``elements`` counts result elements, ``bytes`` reads plus writes.
    """

    flops_low: float = nan
    flops_high: float = nan
    bytes_low: float = nan
    bytes_high: float = nan
    elements_low: float = nan
    elements_high: float = nan

    @property
    def known(self) -> bool:
        """Return True if there is at least one bound."""
        return not all(map(isnan, self))


UNBOUNDED = WorkBounds()
_Extents = tuple[int, int, int]


def launch_of(text: str) -> tuple[_Extents, _Extents] | None:
    """Parse the grid and block size of a launch from ``[[x,y,z],[x,y,z]]``; None for other texts."""
    parts = text.translate(_NO_BRACKETS).split(",")
    if len(parts) != 6 or not all(part.isdecimal() and len(part) < 12 for part in parts):
        return None
    x, y, z, *block = map(int, parts)
    return (x, y, z), (block[0], block[1], block[2])


_NO_BRACKETS = str.maketrans("", "", "[] ")


def work_bounds(
    facts: KernelFacts, grid: _Extents | None = None, block: _Extents | None = None
) -> WorkBounds:
    """Return the bounds on the work of a kernel that is launched with ``grid`` blocks of ``block``
    threads.
    """
    low, high = _elements(facts, grid, block)
    if max(low, high) > _LARGEST:
        return UNBOUNDED
    width = _width(facts.result_dtype or facts.dtype)
    arrays = facts.arrays if facts.arrays > 0 else nan
    if isnan(arrays) and facts.op_class is not OpClass.CONTRACTION:
        width = 1.0  # of the result; an operand may have one element
    bounds = WorkBounds(
        elements_low=low, elements_high=high, bytes_low=low * width, bytes_high=high * arrays * facts.widest
    )
    sizes = dict(facts.sizes)
    if facts.op_class is OpClass.CONTRACTION and {"n", "k"} <= sizes.keys():
        # The kernel was generated for one N and K. M, the number of rows, is at least 1.
        m, n, k = float(sizes.get("m", 1)), float(sizes["n"]), float(sizes["k"])
        flops = 2.0 * m * n * k
        is_stated = "m" in sizes
        return WorkBounds(
            flops_low=flops,
            flops_high=flops * sizes.get("groups", 1) if is_stated else nan,
            bytes_low=(n * k + m * k) * _width(facts.dtype),
            elements_low=m * n,
            elements_high=m * n * sizes.get("groups", 1) if is_stated else nan,
        )
    if facts.op_class is OpClass.CONTRACTION:  # at least one product per element
        return bounds._replace(flops_low=2.0 * low)
    return bounds


def _width(dtype: str) -> float:
    """Return the bytes of an element type; NaN if unknown."""
    dtype_entry = find_dtype(dtype)
    return nan if dtype_entry is None else float(dtype_entry.storage_bytes(1))


def _elements(facts: KernelFacts, grid: _Extents | None, block: _Extents | None) -> tuple[float, float]:
    """Return the lower and upper bound on the number of result elements."""
    if grid is None or block is None or facts.cover is Cover.UNKNOWN:
        return nan, nan
    blocks, threads = float(prod(grid)), float(prod(block))
    if facts.cover is Cover.TILES:
        m, n = facts.tile[0], facts.tile[1]
        whole = (((grid[0] - 1) * m + 1) * ((grid[1] - 1) * n + 1)) * grid[2]
        return float(whole), blocks * m * n
    if facts.cover is Cover.AT_LEAST:  # the fewest elements: all tiles in one row or column
        return (blocks - 1) * min(facts.tile[:2]) + 1, nan
    least = facts.per_block_low + facts.per_thread_low * threads
    most = facts.per_block + facts.per_thread * threads
    high = blocks * most if most else nan
    match facts.cover:
        case Cover.ONCE:
            return (blocks - 1) * least + 1, high
        case Cover.ROWS:
            return blocks * least if least else nan, high
        case _:
            return nan, high
