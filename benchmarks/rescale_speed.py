"""CPU time of rescaling traces of two and four ranks to 65,536 ranks, against reading them alone.

``python -m benchmarks.rescale_speed`` uses recorded Gloo runs and a JAX program of `fixtures/rescale`. One
process reads the job, another reads and rescales it; they run in turn, and both include the start of Python.
Exits with 1 if a rescaling takes more than 10 CPU s.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.process import alternate

__all__ = ["main"]

_RUNS = Path(__file__).parents[1] / "fixtures" / "rescale"
_JOBS = (("gloo2", "dp=65536"), ("gloo4", "dp=65536"), ("dp2_tp2.mlir.gz", "dp=32768"))
_RANKS, _ROUNDS, _MOST_S = 65_536, 5, 10.0
_READ = """
import sys
import hespas
workload = hespas.read(sys.argv[1])
"""
_RESCALED = f"""{_READ}
from hespas.generators.rescale import Rescale, parse_sizes
from hespas.graph import Diagnostics
made = Rescale(sizes=parse_sizes(sys.argv[2]))(workload, Diagnostics())
if made.num_ranks != {_RANKS}:
    sys.exit(f"{{made.num_ranks}} ranks")
"""


def main() -> int:
    """Measure and print. Return 1 if the bound is exceeded, else 0."""
    print("trace            to         CPU s   read alone   ratio   peak MB")
    most = 0.0
    for name, sizes in _JOBS:
        first, second = (
            [sys.executable, "-c", code, str(_RUNS / name), sizes] for code in (_RESCALED, _READ)
        )
        made, floor, ratio = alternate(first, second, runs=_ROUNDS)
        spent = made.user_s + made.system_s
        most = max(most, spent)
        alone = floor.user_s + floor.system_s
        print(f"{name:16} {sizes:9}  {spent:6.2f}  {alone:11.2f}  {ratio:6.2f}  {made.peak_mb:8.0f}")
    return int(most > _MOST_S)


if __name__ == "__main__":
    sys.exit(main())
