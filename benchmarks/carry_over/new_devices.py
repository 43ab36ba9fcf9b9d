"""Errors of the shipped learned models on devices and architectures that are left out of them.

    python -m benchmarks.carry_over.new_devices --tables DIR [--part NAME ...] [--rows N] [--json FILE]
                                                [--against FILE]

DIR contains the tables that :data:`~hespas.fitting.learned_parts.PARTS` names. Devices that are left out are
removed from the references of the shipped model, and the interval of new devices comes from the other
architectures alone. Figures are of ``devval`` rows (``--rows`` of each device, drawn at random):

    sibling       a device without rows in the fit, whose architecture has other devices in it
    renamed       the same, with another name of its architecture, as B300 and B200 have
    architecture  all devices of an architecture without rows in the fit

Rows *roofline* have the roofline predictions from data sheets for the same table rows. Columns *cover* and
*width* describe the 90 % interval: the share of rows in it, and the square root of the ratio of its ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from msgspec.structs import replace as with_fields

from benchmarks.carry_over.figures import Case, print_parts
from hespas.estimators.interface import OperationModel
from hespas.estimators.learned.inference import LoadedModels
from hespas.estimators.learned.serialization import LearnedModel, load_model, shipped_folder
from hespas.estimators.roofline import Roofline
from hespas.fitting.learned import with_new_devices
from hespas.fitting.learned_parts import LearnedPart, TrainingRows, rows_for, rows_of_part
from hespas.fitting.rows import known_variants
from hespas.hardware import named_device
from hespas.measurements import Measurements

__all__ = ["cases", "main", "without_devices"]


def without_devices(model: LearnedModel, rows: TrainingRows, held_out: Sequence[str]) -> LearnedModel:
    """Return the model without references and rows of the ``held_out`` devices; ``rows`` are the rows of the
    fit.
    """
    card = model.card
    cells = [
        with_fields(cell, rows={name: count for name, count in cell.rows.items() if name not in held_out})
        for cell in card.cells
    ]
    card = with_fields(
        card,
        cells=tuple(cell for cell in cells if cell.rows),
        devices=tuple(device for device in card.devices if device.name not in held_out),
        bases=tuple(base for base in card.bases if base.hardware not in held_out),
    )
    others = rows.take(np.flatnonzero(~rows.of_devices(tuple(held_out))))
    others = replace(others, devices={device.name: rows.devices[device.name] for device in card.devices})
    return with_new_devices(LearnedModel(card, model.forests, model.octaves), others, seed=0)


def cases(part: LearnedPart, table: Measurements, rows: int) -> Iterator[Case]:
    """Yield the predictions for every device and architecture of a part, left out in turn."""
    table = table.take(rows_of_part(part, table))
    model = load_model(shipped_folder() / f"{part.name}.json")
    fitted = rows_for(part, table.part("calib"))
    members: dict[str, list[str]] = {}
    for device in model.card.devices:
        members.setdefault(device.arch, []).append(device.name)
    tests = [("sibling", [name]) for names in members.values() if len(names) > 1 for name in names]
    tests += [("renamed", held_out) for _, held_out in tests]
    tests += [("architecture", names) for names in members.values() if len(members) > 1]
    draw = np.random.default_rng(0)
    for test, held_out in tests:
        left = without_devices(model, fitted, held_out)
        variants = {cell.variant for cell in left.card.cells}
        models: tuple[OperationModel, ...] = (LoadedModels([left]), Roofline())
        for name in held_out:
            scored = table.part("devval").on(name)
            scored = scored.take(np.sort(draw.permutation(len(scored))[:rows]))
            new = named_device(name)
            if test == "renamed":
                new = replace(new, name="renamed", arch="renamed", aliases=(), fits_of="", own_fits=())
            for label, each in zip((test, f"{test}, roofline"), models, strict=True):
                predictions = each.predict(known_variants(scored.ops, variants), new)
                yield Case(
                    test=f"{part.name} {label}",
                    device=name,
                    table=part.table,
                    low_ns=predictions.low_ns,
                    duration_ns=predictions.duration_ns,
                    high_ns=predictions.high_ns,
                    measured_ns=scored.duration_ns,
                )


def main() -> None:
    """Print the figures of all parts."""
    print_parts(__doc__, cases, rows=2000, rows_help="rows of each device (default: 2000)")


if __name__ == "__main__":
    main()
