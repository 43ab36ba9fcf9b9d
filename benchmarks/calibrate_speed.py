"""CPU time of `hespas-validate calibrate` on 100,000 measured rows: ``python -m benchmarks.calibrate_speed``.

The benchmark generates the table: matmuls and vector operations with times of a synthetic device and 3 %
noise. The figure is of the whole process, with the fits and the test on held-out sizes. The floor reads the
table with pandas. Exits with 1 above 240 s of CPU (two minutes on two cores).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from benchmarks.process import run

__all__ = ["main", "write_table"]

_BOUND_S = 240.0
_RATE_FLOPS_PER_US, _BYTES_PER_US, _START_US = 6e8, 2.5e6, 4.0
_HEAD = "hardware,kind,op,dtype,m,n,k,rows,columns,latency_us\n"


def write_table(path: Path, rows: int, seed: int = 0) -> None:
    """Write a measured table: two thirds matmuls in two number formats, one third vector operations."""
    draw = np.random.default_rng(seed)

    def sizes(low: int, high: int) -> NDArray[np.float64]:
        return np.round(2 ** draw.uniform(low, high, rows))

    m, n, k, first, second = sizes(3, 14), sizes(6, 14), sizes(6, 14), sizes(4, 14), sizes(6, 13)
    noise = np.exp(draw.normal(0, 0.03, rows))
    product = np.maximum(2 * m * n * k / _RATE_FLOPS_PER_US, 2 * (m * n + n * k + m * k) / _BYTES_PER_US)
    stream = 4 * first * second / _BYTES_PER_US
    with path.open("w", encoding="utf-8") as file:
        file.write(_HEAD)
        for row in range(rows):
            if row % 3 == 2:
                time = (_START_US + stream[row]) * noise[row]
                op = ("add", "exp", "relu")[row // 3 % 3]
                file.write(f"H100-SXM,vector,{op},bf16,,,,{first[row]:.0f},{second[row]:.0f},{time:.4f}\n")
            else:
                time = (_START_US + product[row]) * noise[row]
                dtype = ("bf16", "f16")[row % 3]
                file.write(f"H100-SXM,matmul,,{dtype},{m[row]:.0f},{n[row]:.0f},{k[row]:.0f},,,{time:.4f}\n")


def main() -> int:
    """Measure and print. Return 1 if the bound is exceeded, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the table (default: %(default)s)")
    rows = int(parser.parse_args().rows)
    with TemporaryDirectory() as folder:
        table = Path(folder) / "made.csv"
        write_table(table, rows)
        command = Path(sys.executable).with_name("hespas-validate")
        arguments = ["--hardware", "H100-SXM", "--table", str(table), "--out", str(Path(folder) / "fit.toml")]
        used = run([str(command), "calibrate", *arguments])
        floor = run([sys.executable, "-c", f"import pandas; pandas.read_csv({str(table)!r})"])
    taken, least = (each.user_s + each.system_s for each in (used, floor))
    print(f"{rows:,} rows")
    print(f"  calibrate  {taken:6.1f} s CPU  {used.peak_mb:5.0f} MB  {taken / least:5.1f} x the floor")
    print(f"  floor      {least:6.1f} s CPU")
    return 0 if taken <= _BOUND_S else 1


if __name__ == "__main__":
    sys.exit(main())
