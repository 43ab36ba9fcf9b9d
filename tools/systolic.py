"""Fit the lines of the systolic estimator, and write hespas/estimators/systolic/data/*.toml.

    python -m tools.systolic --tables DIR [--seed 0] [--date 2026-01-31] [--out DIR]

DIR holds tables of TPU operations; rows of a split other than ``calib`` are never fitted. The command prints
the errors on the rows of split ``devval``. Equal seeds and dates give equal files. Files of devices with
published lines (TPU-v6e) are not changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hespas.estimators.systolic import Systolic
from hespas.estimators.systolic.lines import LINES_FOLDER
from hespas.fitting.systolic import fit_lines
from hespas.hardware import Device, device_names, load_device
from hespas.hardware.device_fits import fits_to_toml
from hespas.measurements import Measurements
from tools.fits import tables_of

__all__ = ["errors", "main"]

_TESTED = "devval"


def errors(tables: Sequence[Measurements], device: Device) -> Iterator[str]:
    """Yield a line per kind and variant with the errors of the shipped lines on held-out rows."""
    model = Systolic()
    for table in tables:
        tested = table.on(device.name)
        tested = tested.take(tested.split.where(_TESTED))
        predicted = model.predict(tested.ops, device)
        error = predicted.duration_ns / tested.duration_ns - 1
        inside = (predicted.low_ns <= tested.duration_ns) & (tested.duration_ns <= predicted.high_ns)
        for kind in tested.ops.kind.used():
            for variant in tested.ops.variant.used():
                rows = np.intersect1d(tested.ops.kind.where(kind), tested.ops.variant.where(variant))
                rows = rows[~np.isnan(error[rows])]
                if not len(rows):
                    continue
                size = np.abs(error[rows])
                yield (
                    f"{device.name} {kind} {variant}: n {len(rows)}, MAPE {size.mean():.1%}, "
                    f"median {np.median(size):.1%}, P90 {np.quantile(size, 0.9):.1%}, "
                    f"bias {error[rows].mean():+.1%}, in the 90 % interval {inside[rows].mean():.0%}"
                )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--date", default="", help="date written into the fits (default: today)")
    parser.add_argument("--out", type=Path, default=LINES_FOLDER, help="folder to write to")
    return parser.parse_args()


def main() -> None:
    """Fit, write and print."""
    arguments = _arguments()
    tables = tables_of(arguments.tables)
    for name in device_names():
        device = load_device(name)
        mine = [table for table in tables if len(table.hardware.where(name))]
        if device.systolic is None or not mine:
            continue
        fits = fit_lines(mine, device, seed=arguments.seed, fitted=arguments.date)
        path = arguments.out / f"{name}.toml"
        path.write_text(fits_to_toml(name, fits).replace("tools.fits", "tools.systolic"), encoding="utf-8")
        sys.stdout.write(f"{path}: {len(fits)} lines\n")
        for line in errors(mine, device) if arguments.out == LINES_FOLDER else ():
            sys.stdout.write(f"  {line}\n")


if __name__ == "__main__":
    main()
