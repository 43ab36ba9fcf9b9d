"""Fit the learned models to measured tables: ``python -m tools.learned --tables DIR``.

Only rows of split ``calib`` are fitted; the cards have the errors on ``devval``. Equal tables, seeds and
versions of scikit-learn give equal files. ``--only NAME`` fits one model, ``--out`` sets the folder, and
``--scores`` only evaluates the existing models again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from hespas.estimators.learned.inference import LoadedModels
from hespas.estimators.learned.serialization import load_model, save_model, shipped_folder
from hespas.fitting.learned import fit_learned, with_errors
from hespas.fitting.learned_parts import PARTS, LearnedPart
from hespas.measurements import Measurements, read_measurements

__all__ = ["main"]


def _table(folder: Path, part: LearnedPart) -> Measurements | None:
    found = sorted(folder.glob(f"{part.table}.*"))
    return read_measurements(found[0]) if found else None


def main() -> int:
    """Fit, evaluate and save the models; return 1 if a table is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=shipped_folder())
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scores", action="store_true", help="evaluate the models in the folder again, without fits"
    )
    options = parser.parse_args()
    missing = 0
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        table = _table(options.tables, part)
        if table is None:
            sys.stderr.write(f"{part.name}: no table {part.table} in {options.tables}\n")
            missing += 1
            continue
        started = time.monotonic()
        if options.scores:
            model = load_model(options.out / f"{part.name}.json")
        else:
            model = fit_learned(part, table, seed=options.seed)
        save_model(with_errors(part, model, LoadedModels([model]), table), options.out)
        sys.stdout.write(
            f"{part.name}: {model.card.training.rows} rows, {time.monotonic() - started:.0f} s\n"
        )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
