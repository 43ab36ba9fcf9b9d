"""CPU time of counts of a million matmuls on a systolic array: ``python -m benchmarks.systolic_speed``.

Counts three dataflows. Prints CPU seconds of all counts (cycles, three utilisations, three accesses) and of
cycles alone, as medians of five runs. The floor computes m n k of the same sizes once per dataflow. Exits
with 1 if all counts take more than half a second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from hespas.estimators.systolic import Array, fold_counts, fold_cycles
from hespas.estimators.systolic.cycles import Dataflow

__all__ = ["main"]

_MATMULS = 1_000_000
_FLOWS: tuple[Dataflow, ...] = ("os", "ws", "is")
_BOUND_S = 0.5
_RUNS = 5


def _seconds(work: Callable[[], object]) -> float:
    """Return the median CPU seconds of five runs after a warm-up."""
    work()
    taken: list[float] = []
    for _ in range(_RUNS):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> int:
    """Measure and print. Return 1 if the bound is exceeded, else 0."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rng = np.random.default_rng(1)
    m, n, k = (rng.integers(1, 16_384, _MATMULS).astype(np.float64) for _ in range(3))
    arrays = [Array(128, 128, flow) for flow in _FLOWS]
    counts = _seconds(lambda: [fold_counts(m, n, k, array) for array in arrays])
    cycles = _seconds(lambda: [fold_cycles(m, n, k, array) for array in arrays])
    floor = _seconds(lambda: [m * n * k for _ in arrays])
    print(f"{_MATMULS:,} matmuls x {len(_FLOWS)} dataflows on 128x128")
    print(f"  all counts  {counts:6.3f} s CPU  {counts / floor:5.1f} x the floor")
    print(f"  cycles      {cycles:6.3f} s CPU  {cycles / floor:5.1f} x the floor")
    print(f"  floor       {floor:6.3f} s CPU")
    return 0 if counts <= _BOUND_S else 1


if __name__ == "__main__":
    sys.exit(main())
