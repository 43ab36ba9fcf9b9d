"""Comparison of forms fitted to suggested shapes with forms fitted to random shapes.

    python -m benchmarks.carry_over.suggestions --tables DIR

DIR contains ``aiconfigurator_gemm``. Some ``calib`` rows of a device are chosen, by the rule of ``calibrate
--suggest`` (for a device that the models were not fitted to) or at random. The form of matmuls is fitted to
these rows alone and scored on all ``devval`` rows. Prints for each device and number of rows the MAPE of
both, as means over seeds. A seed draws the random rows, and the pool from which the rule chooses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hespas.estimators.forms import form_time_ns
from hespas.fitting.device_forms import ClassRows, fit_classes
from hespas.fitting.rows import is_possible
from hespas.graph.columns import IntArray
from hespas.hardware import Device, named_device
from hespas.measurements import Measurements, read_measurements
from hespas.validators.calibration.known_sizes import known_sizes
from hespas.validators.calibration.suggest import chosen

__all__ = ["Compared", "compared", "main"]

_TABLE = "aiconfigurator_gemm"
_DEVICES = ("H100-SXM", "B200-SXM", "L40S", "A100-SXM-80GB")
_POOL = 2000


class Compared:
    """Rows of a device in one number format: ``calib`` to choose from, ``devval`` to score on."""

    def __init__(self, table: Measurements, device: Device, dtype: str) -> None:
        mine = table.take(np.intersect1d(table.ops.scheme.where(dtype), table.hardware.where(device.name)))
        mine = mine.take(np.flatnonzero(is_possible(mine, device)))
        self.device, self.dtype = device, dtype
        self.calib, self.devval = mine.part("calib"), mine.part("devval")

    def suggested(self, count: int, seed: int) -> IntArray:
        """Return ``count`` indices of ``calib`` rows that the rule chooses from a random pool."""
        pool = self.random(_POOL, seed)
        (known,) = known_sizes(self.device, ("matmul",), (self.dtype,))
        return pool[chosen(self.device, known, self.calib.ops.take(pool), count)]

    def random(self, count: int, seed: int) -> IntArray:
        """Return ``count`` random indices of ``calib`` rows."""
        return np.random.default_rng(seed).permutation(len(self.calib))[:count]

    def mape(self, rows: IntArray) -> float:
        """Return the MAPE on ``devval`` of a form fitted to some ``calib`` rows; NaN if the fit fails."""
        some = self.calib.take(rows)
        key = ("matmul", "", self.dtype, some.ops.variant[0])
        of_class = ClassRows(key=key, measured=some, group=some.shape_group())
        machine = of_class.machine(self.device)
        fits = fit_classes([(of_class, machine)], {}, seed=0)
        if not fits:
            return float("nan")
        predicted_ns = form_time_ns(fits[0].form, fits[0].solution.values, self.devval.ops, machine)
        return float(np.abs(predicted_ns / self.devval.duration_ns - 1).mean())


def compared(case: Compared, count: int, seeds: int) -> tuple[float, float]:
    """Return the MAPE with random rows and with suggested rows, means over seeds."""
    drawn = [case.mape(case.random(count, seed)) for seed in range(seeds)]
    suggested = [case.mape(case.suggested(count, seed)) for seed in range(seeds)]
    return float(np.mean(drawn)), float(np.mean(suggested))


def _lines(arguments: argparse.Namespace) -> Iterator[str]:
    table = read_measurements(next(iter(sorted(arguments.tables.glob(f"{_TABLE}.*")))))
    yield f"{'device':16s} {'rows':>5s} {'random':>7s} {'suggested':>10s}\n"
    for count in arguments.count or (50, 200):
        found: list[tuple[float, float]] = []
        for name in arguments.hardware or _DEVICES:
            case = Compared(table, named_device(name), arguments.dtype)
            if not len(case.calib):
                raise SystemExit(
                    f"{_TABLE} has no rows of {name} in {arguments.dtype}; choose another --dtype"
                )
            found.append(compared(case, count, arguments.seeds))
            yield f"{name:16s} {count:5d} {found[-1][0]:7.1%} {found[-1][1]:10.1%}\n"
        drawn, suggested = np.mean(found, axis=0).tolist()
        yield f"{'mean':16s} {count:5d} {drawn:7.2%} {suggested:10.2%}\n"


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--hardware", action="append", help=f"devices (default: {', '.join(_DEVICES)})")
    parser.add_argument("--dtype", default="bf16", help="number format (default: bf16)")
    parser.add_argument("--count", action="append", type=int, help="rows to choose (default: 50 and 200)")
    parser.add_argument("--seeds", type=int, default=3, help="number of draws (default: 3)")
    for line in _lines(parser.parse_args()):
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
