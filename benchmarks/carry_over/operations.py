"""Errors of learned models beyond the sizes of their fit, with ranges of sizes left out in turn.

    python -m benchmarks.carry_over.operations --tables DIR [--part NAME ...] [--rows N] [--json FILE]
                                               [--against FILE]

DIR contains the tables that :data:`~hespas.fitting.learned_parts.PARTS` names. Models are fitted like the
shipped ones, on the remaining ``calib`` rows (at most ``--rows`` of each device, drawn at random). Figures
are of ``devval`` rows:

    inside    sizes within the range of the fit
    region    sizes in the two largest octaves of any swept dimension, which no row of the fit has
    m, n ...  the same for a single dimension

Rows *roofline* have the roofline predictions from data sheets for the same table rows. For devices that are
left out see :mod:`benchmarks.carry_over.new_devices`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.carry_over.figures import Case, print_parts
from hespas.estimators.interface import OperationModel
from hespas.estimators.learned.inference import LoadedModels
from hespas.estimators.roofline import Roofline
from hespas.fitting.learned import fit_rows
from hespas.fitting.learned_bases import beyond_region, swept
from hespas.fitting.learned_parts import (
    LearnedPart,
    rows_for,
    rows_of_part,
)
from hespas.fitting.rows import known_variants
from hespas.graph.columns import BoolArray, IntArray
from hespas.hardware import device_names, named_device
from hespas.measurements import Measurements

__all__ = ["cases", "main"]

_FEWEST = 200
"""Least number of rows in a fit and in a test. With fewer rows single shapes decide the figures."""


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Rows of one part on catalogued devices, and the largest number of rows of a device in a fit."""

    part: LearnedPart
    measured: Measurements
    rows: int

    def fitted(self, out: BoolArray, test: str) -> Iterator[Case]:
        """Yield the predictions for the rows ``out``, by a model that is fitted without them."""
        calib, devval = (self._split(name) for name in ("calib", "devval"))
        seen = np.flatnonzero(calib & ~out)
        if len(seen) < _FEWEST or (devval & out).sum() < _FEWEST:
            return
        measured = self.measured.take(self._drawn(seen))
        model = LoadedModels([fit_rows(self.part, rows_for(self.part, measured), seed=0)])
        yield from self._cases(test, devval & out, model)
        if test == "region":
            yield from self._cases("inside", devval & ~out, model)

    def _cases(self, test: str, scored: BoolArray, model: LoadedModels) -> Iterator[Case]:
        variants = {cell.variant for each in model.models for cell in each.card.cells}
        held = self.measured.take(np.flatnonzero(scored))
        for name in held.hardware.used():
            mine = held.on(name)
            models: tuple[OperationModel, ...] = (model, Roofline())
            for label, each in zip((test, f"{test}, roofline"), models, strict=True):
                # Rows of a library version that the model does not have are predicted as any version.
                predictions = each.predict(known_variants(mine.ops, variants), named_device(name))
                yield Case(
                    test=f"{self.part.name} {label}",
                    device=name,
                    table=self.part.table,
                    low_ns=predictions.low_ns,
                    duration_ns=predictions.duration_ns,
                    high_ns=predictions.high_ns,
                    measured_ns=mine.duration_ns,
                )

    def _split(self, name: str) -> BoolArray:
        found = np.zeros(len(self.measured), np.bool_)
        found[self.measured.split.where(name)] = True
        return found

    def _drawn(self, rows: IntArray) -> IntArray:
        generator = np.random.default_rng(0)
        kept = [
            generator.permutation(np.intersect1d(rows, self.measured.hardware.where(name)))[: self.rows]
            for name in self.measured.hardware.used()
        ]
        return np.sort(np.concatenate(kept))


def cases(part: LearnedPart, table: Measurements, rows: int) -> Iterator[Case]:
    """Yield the predictions of every test of a part."""
    measured = table.take(rows_of_part(part, table))
    known = [name for name in measured.hardware.used() if name in set(device_names())]
    measured = measured.take(np.sort(measured.hardware.where(*known)))
    mine = _Table(part, measured, rows)
    regions: list[tuple[str, ...]] = [(), *((name,) for name in swept(part))]
    for names in regions:
        beyond = np.zeros(len(measured), np.bool_)
        for name in known:
            at = measured.hardware.where(name)
            beyond[at] = beyond_region(part, measured.ops.take(at), names)
        yield from mine.fitted(beyond, names[0] if names else "region")


def main() -> None:
    """Print the figures of all parts."""
    print_parts(__doc__, cases, rows=4000, rows_help="rows of each device in a fit (default: 4000)")


if __name__ == "__main__":
    main()
