"""Fit the shipped devices to measured tables, and write hespas/hardware/fits/*.toml.

    python -m tools.fits --tables DIR [--device NAME ...] [--seed 0] [--date 2026-01-31]

DIR holds tables that `hespas.measurements` reads; of tables with splits only ``calib`` is fitted.
Fits by other commands (collectives) are not changed. Equal seeds and dates give equal files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hespas.fitting.device_forms import fit_device
from hespas.graph.errors import FormatError
from hespas.hardware import Fit, device_names, load_device
from hespas.hardware.device_fits import FITS_FOLDER, fits_to_toml, read_fits
from hespas.measurements import Measurements, read_measurements

__all__ = ["arguments_of", "main", "tables_of", "write_fits"]

OTHERS = frozenset({"collective"})
"""Kinds that other commands fit."""


def tables_of(folder: Path) -> list[Measurements]:
    """Return every table of operations in a folder, by name; other files are skipped."""
    found: list[Measurements] = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in {".parquet", ".gz", ".csv"}:
            continue
        try:
            found.append(read_measurements(path))
        except FormatError:
            continue
    return found


def write_fits(name: str, fits: Sequence[Fit], folder: Path) -> Path:
    """Write the fits of a device, and keep the fits by other commands. An unchanged fit keeps its date."""
    path = folder / f"{name}.toml"
    before = read_fits(path) if path.exists() else ()
    kept = [fit for fit in before if fit.kind in OTHERS]
    old = {fit.key: fit for fit in before}
    dated = [_as_before(fit, old[fit.key]) if fit.key in old else fit for fit in fits]
    temporary = path.with_suffix(".tmp")
    temporary.write_text(fits_to_toml(name, [*kept, *dated]), encoding="utf-8")
    temporary.replace(path)
    return path


def _as_before(fit: Fit, before: Fit) -> Fit:
    """Return the earlier fit if only its date differs. Texts are compared, because NaN differs from NaN."""
    same = replace(fit, fitted=before.fitted)
    return before if repr(same) == repr(before) else fit


def arguments_of(description: str | None) -> argparse.Namespace:
    """Parse the options of commands that fit shipped devices."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--device", action="append", help="only these devices (default: all with rows)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--date", default="", help="date written into the fits (default: today)")
    parser.add_argument("--out", type=Path, default=FITS_FOLDER, help="folder to write to")
    return parser.parse_args()


def main() -> None:
    """Fit and write."""
    arguments = arguments_of(__doc__)
    tables = tables_of(arguments.tables)
    wanted = arguments.device or device_names()
    for name in wanted:
        mine = [table for table in tables if len(table.hardware.where(name))]
        if not mine:
            continue
        fits = fit_device(mine, load_device(name), seed=arguments.seed, fitted=arguments.date)
        if fits:
            path = write_fits(name, fits, arguments.out)
            sys.stdout.write(f"{path}: {len(fits)} fits\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
