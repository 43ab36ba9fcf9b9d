"""A million products x three dataflows counted on a systolic array: ``python -m benchmarks.systolic_speed``.

Prints CPU seconds of all counts (cycles, three utilisations, three accesses) and of cycles alone, as medians
of five runs, beside one pass over the same sizes (their product) as the floor. Exits 1 where all counts take
more than half a second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from hespas.estimators.systolic import Array, fold_counts, fold_cycles
from hespas.estimators.systolic.cycles import Dataflow

__all__ = ["main"]

_PRODUCTS = 1_000_000
_FLOWS: tuple[Dataflow, ...] = ("os", "ws", "is")
_BOUND_S = 0.5
_RUNS = 5


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one run, the median of some after a warm-up."""
    work()
    taken: list[float] = []
    for _ in range(_RUNS):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> None:
    """Measure, print, and exit 1 past the bound."""
    rng = np.random.default_rng(1)
    m, n, k = (rng.integers(1, 16_384, _PRODUCTS).astype(np.float64) for _ in range(3))
    arrays = [Array(128, 128, flow) for flow in _FLOWS]
    counts = _seconds(lambda: [fold_counts(m, n, k, array) for array in arrays])
    cycles = _seconds(lambda: [fold_cycles(m, n, k, array) for array in arrays])
    floor = _seconds(lambda: [m * n * k for _ in arrays])
    print(f"{_PRODUCTS:,} products x {len(_FLOWS)} dataflows on 128x128")
    print(f"  all counts  {counts:6.3f} s CPU  {counts / floor:5.1f} x the floor")
    print(f"  cycles      {cycles:6.3f} s CPU  {cycles / floor:5.1f} x the floor")
    print(f"  floor       {floor:6.3f} s CPU")
    if counts > _BOUND_S:
        sys.exit(1)


if __name__ == "__main__":
    main()
