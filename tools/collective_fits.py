"""Fit the collectives of the shipped devices, and write the fits to hespas/hardware/fits/*.toml.

    python -m tools.collective_fits --tables DIR [--device NAME ...] [--seed 0] [--date 2026-01-31]

DIR holds tables that `hespas.measurements` reads; of tables with splits only ``calib`` is fitted.
Fits by `tools.fits` are not changed. Equal seeds and dates give equal files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hespas.fitting.collectives import fit_collectives
from hespas.hardware import Fit, device_names, load_device
from hespas.hardware.device_fits import fits_to_toml, read_fits
from tools.fits import OTHERS, arguments_of, tables_of

__all__ = ["main", "write_collectives"]


def write_collectives(name: str, fits: Sequence[Fit], folder: Path) -> Path:
    """Write the fits of the collectives of a device, and keep the fits of its other operations."""
    path = folder / f"{name}.toml"
    before = read_fits(path) if path.exists() else ()
    kept = [fit for fit in before if fit.kind not in OTHERS]
    temporary = path.with_suffix(".collectives.tmp")
    temporary.write_text(fits_to_toml(name, [*kept, *fits]), encoding="utf-8")
    temporary.replace(path)
    return path


def main() -> None:
    """Fit and write."""
    arguments = arguments_of(__doc__)
    tables = [table for table in tables_of(arguments.tables) if "collective" in table.ops.kind.used()]
    for name in arguments.device or device_names():
        fits = fit_collectives(tables, load_device(name), seed=arguments.seed, fitted=arguments.date)
        if fits:
            path = write_collectives(name, fits, arguments.out)
            sys.stdout.write(f"{path}: {len(fits)} fits of collectives\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
