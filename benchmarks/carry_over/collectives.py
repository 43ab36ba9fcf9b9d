"""Errors of collectives beyond the fitted rows: rank counts, large messages and devices, left out in turn.

    python -m benchmarks.carry_over.collectives --tables DIR [--split devval] [--json FILE] [--against FILE]

DIR contains aiconfigurator_collectives.parquet and vidur_network.parquet. Fits use the remaining ``calib``
rows, and figures are of the rows of ``--split`` that are left out:

    inside            all rows of the split, with the shipped fits
    most ranks        the largest number of ranks of each library, operation and number of nodes
    middle ranks      numbers of ranks between the smallest and the largest
    largest messages  the two largest octaves of bytes of each layout
    sibling, family, link data
                      the device and all its fits; predictions come from the nearest devices of that relation
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.carry_over.figures import Case, parser_of, print_figures
from hespas.estimators.collective_links import RankLayout
from hespas.estimators.collectives import MEASURED, RELATIONS, Collectives, reference_devices_of
from hespas.fitting.collectives import fit_collectives
from hespas.graph.columns import BoolArray, FloatArray
from hespas.hardware import Device, load_device
from hespas.hardware.device_fits import shipped_fits
from hespas.measurements import Measurements, read_measurements

__all__ = ["cases", "main"]

TABLES = ("aiconfigurator_collectives.parquet", "vidur_network.parquet")
_OCTAVES = 2
_EIGHT = RankLayout(8, 1)


def cases(tables: Sequence[Measurements], split: str) -> Iterator[Case]:
    """Yield the predictions of every test on every device of the tables."""
    for name in sorted({name for table in tables for name in table.hardware.used()}):
        device = load_device(name)
        for table in (table.on(name) for table in tables if len(table.hardware.where(name))):
            held = table.part(split)
            yield _case("inside", held, device, Collectives())
            scored = np.zeros(len(table), np.bool_)
            scored[table.split.where(split)] = True
            for test, left_out in _LEFT_OUT.items():
                out = left_out(table)
                rows = np.flatnonzero(out & scored)
                if not len(rows):
                    continue
                fits = fit_collectives([table.take(np.flatnonzero(~out))], device)
                without = replace(device, own_fits=fits, fits_of="")
                yield _case(test, table.take(rows), without, Collectives())
            yield from _of_others(held, device)


def _of_others(held: Measurements, device: Device) -> Iterator[Case]:
    """Yield the predictions without fits of the device, for each relation from near to far reference
    devices.
    """
    unfitted = replace(device, own_fits=(), fits_of="")
    others = [name for name in MEASURED if name != device.name]
    related = dict(reference_devices_of(unfitted, _EIGHT, others))
    for place, tier in enumerate(RELATIONS):
        if tier in related.values():
            near = [fit for name, each in related.items() if each == tier for fit in shipped_fits(name)]
            known = held.take(held.ops.op.where(*{fit.op for fit in near if fit.kind == "collective"}))
            left = tuple(name for name, each in related.items() if RELATIONS.index(each) >= place)
            yield _case(tier, known, unfitted, Collectives(reference_devices=left))


def _case(test: str, held: Measurements, device: Device, model: Collectives) -> Case:
    predictions = model.predict(held.ops, device)
    return Case(
        test=test,
        device=device.name,
        table=held.name,
        low_ns=predictions.low_ns,
        duration_ns=predictions.duration_ns,
        high_ns=predictions.high_ns,
        measured_ns=held.duration_ns,
    )


def _sizes(table: Measurements) -> tuple[FloatArray, FloatArray, FloatArray]:
    ops = table.ops
    ranks = ops.dim("ranks")
    return ranks, np.ceil(ranks / np.maximum(ops.dim("ranks_per_node"), 1)), ops.dim("message_bytes")


def _most_ranks(table: Measurements) -> BoolArray:
    """Return a mask of the rows with the largest number of ranks of their class and number of nodes, where
    there are at least two numbers of ranks.
    """
    ranks, nodes, _ = _sizes(table)
    out = np.zeros(len(table), np.bool_)
    for _, rows in table.ops.classes():
        for count in np.unique(nodes[rows]).tolist():
            mine = rows[nodes[rows] == count]
            if len(np.unique(ranks[mine])) > 1:
                out[mine] = ranks[mine] == ranks[mine].max()
    return out


def _middle_ranks(table: Measurements) -> BoolArray:
    """Return a mask of the rows between the smallest and the largest number of ranks of their class and
    number of nodes.
    """
    ranks, nodes, _ = _sizes(table)
    out = np.zeros(len(table), np.bool_)
    for _, rows in table.ops.classes():
        for count in np.unique(nodes[rows]).tolist():
            mine = rows[nodes[rows] == count]
            out[mine] = (ranks[mine] > ranks[mine].min()) & (ranks[mine] < ranks[mine].max())
    return out


def _largest_messages(table: Measurements) -> BoolArray:
    """Return a mask of the rows in the two largest octaves of message bytes of their class and layout."""
    ranks, nodes, size = _sizes(table)
    out = np.zeros(len(table), np.bool_)
    for _, rows in table.ops.classes():
        for layout in np.unique(np.stack((ranks, nodes), axis=1)[rows], axis=0).tolist():
            mine = rows[(ranks[rows] == layout[0]) & (nodes[rows] == layout[1])]
            out[mine] = size[mine] > size[mine].max() / 2**_OCTAVES
    return out


_LEFT_OUT = {"most ranks": _most_ranks, "middle ranks": _middle_ranks, "largest messages": _largest_messages}


def main() -> None:
    """Print the figures of all tests."""
    parser = parser_of(__doc__)
    parser.add_argument("--split", default="devval", help="split of the scored rows (default: devval)")
    arguments = parser.parse_args()
    tables = [read_measurements(arguments.tables / name) for name in TABLES]
    print_figures(cases(tables, arguments.split), arguments)


if __name__ == "__main__":
    main()
