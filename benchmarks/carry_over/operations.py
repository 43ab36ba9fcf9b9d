"""Learned models beyond the measured sizes, left out in turn.

    python -m benchmarks.carry_over.operations --tables DIR [--part NAME ...] [--rows N] [--json FILE]
                                               [--against FILE]

DIR holds the tables that :data:`~hespas.fitting.learned_parts.PARTS` names. Models are fitted
as those that ship, on ``calib`` rows without what is left out (``--rows`` of each device at most, drawn at
random); figures are of ``devval`` rows:

    inside    sizes within those that were fitted on
    region    sizes in the two largest octaves of any swept dimension, which no row of the fit had
    m, n ...  the same of one dimension by itself

and beside them, as *roofline*, what the data sheets alone say of the same rows. Devices left out:
:mod:`benchmarks.carry_over.new_devices`.
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
"""With fewer rows on either side, a test tells of single shapes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The rows of one part on known devices, and how many of each device enter a fit."""

    part: LearnedPart
    measured: Measurements
    rows: int

    def fitted(self, out: BoolArray, test: str) -> Iterator[Case]:
        """What a model that has not seen some rows says of them."""
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
                # Another library's version is no reason to say nothing of a device.
                said = each.predict(known_variants(mine.ops, variants), named_device(name))
                yield Case(
                    test=f"{self.part.name} {label}",
                    device=name,
                    table=self.part.table,
                    low_ns=said.low_ns,
                    duration_ns=said.duration_ns,
                    high_ns=said.high_ns,
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
    """Every test of one part."""
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
    """Print the figures."""
    print_parts(__doc__, cases, rows=4000, rows_help="rows of each device in a fit (default: 4000)")


if __name__ == "__main__":
    main()
