"""Collectives on systems against measurements, beside the estimator of collectives.

    python -m benchmarks.carry_over.systems --tables DIR [--split devval] [--json FILE]

DIR holds aiconfigurator_collectives.parquet (inside one node) and vidur_network.parquet (two workers to
eight, in one node or across several). Each row is a group of ranks on the system of its device: as many to a
node as the table says. Errors are of all rows, each asked by the library that ran it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hespas.estimators.collectives import Collectives
from hespas.graph.columns import IntArray
from hespas.hardware import System, load_device, load_system
from hespas.measurements import Measurements, read_measurements
from hespas.simulator.network import Network
from hespas.simulator.network.placement import footprint_of

__all__ = ["Score", "main", "scores"]

TABLES = ("aiconfigurator_collectives.parquet", "vidur_network.parquet")
SYSTEMS: Mapping[str, str] = {
    "A100-SXM-80GB": "dgx-a100",
    "H100-SXM": "dgx-h100",
    "H200-SXM": "dgx-h200",
    "B200-SXM": "dgx-b200",
    "L40S": "pcie-l40s",
}


class Score(NamedTuple):
    """Errors of both on the rows of one device, operation and whether they leave a node, as fractions."""

    table: str
    device: str
    op: str
    nodes: str
    rows: int
    network_mape: float
    network_median: float
    estimator_mape: float
    estimator_median: float


def scores(tables: Sequence[Measurements], split: str) -> Iterator[Score]:
    """One row per table, device, operation, and one node or several."""
    for table in tables:
        held = table.part(split)
        for name in held.hardware.used():
            if name in SYSTEMS:
                yield from _of_device(held.on(name), name)


def _of_device(held: Measurements, name: str) -> Iterator[Score]:
    device, whole = load_device(name), load_system(SYSTEMS[name])
    said = Collectives().predict(held.ops, device).duration_ns
    ours = np.full(len(held), np.nan)
    several = np.zeros(len(held), np.bool_)
    for (_, op, scheme, variant), rows in held.ops.classes():
        for (ranks, per_node), mine in _layouts(held, rows):
            network = Network(_system(whole, ranks, per_node), device, variant)
            place = footprint_of(network.system, _members(network.system, ranks, per_node))
            size = held.ops.dim("message_bytes")[mine]
            if op == "permute":
                away = (1,) if per_node > 1 else (0, 1)
                ours[mine] = network.messages(scheme, away, size)[0]
            else:
                ours[mine] = network.collectives(op, scheme, place, size)[0]
            several[mine] = ranks > per_node
    measured = held.duration_ns
    for op in held.ops.op.used():
        for beyond in (False, True):
            mine = held.ops.op.where(op)
            mine = mine[(several[mine] == beyond) & ~np.isnan(ours[mine] + said[mine])]
            if len(mine):
                errors = [np.abs(each[mine] / measured[mine] - 1) for each in (ours, said)]
                figures = [figure for each in errors for figure in (each.mean(), np.median(each))]
                nodes = "several" if beyond else "one"
                yield Score(held.name, name, op, nodes, len(mine), *map(float, figures))


def _layouts(held: Measurements, rows: IntArray) -> Iterator[tuple[tuple[int, int], IntArray]]:
    ranks, per_node = held.ops.dim("ranks")[rows], held.ops.dim("ranks_per_node")[rows]
    pairs = np.stack((ranks, np.where(np.isnan(per_node), ranks, np.minimum(per_node, ranks))), axis=1)
    distinct, place = np.unique(pairs, axis=0, return_inverse=True)
    for number, pair in enumerate(distinct.astype(int).tolist()):
        yield (pair[0], pair[1]), rows[place.reshape(-1) == number]


def _system(whole: System, ranks: int, per_node: int) -> System:
    node = whole.dimensions[0].size
    nodes = -(-ranks // per_node)
    return whole.sized((node, nodes)) if len(whole.dimensions) > 1 else whole.sized(ranks)


def _members(system: System, ranks: int, per_node: int) -> IntArray:
    """The first devices of as many nodes as it takes."""
    place = np.arange(ranks, dtype=np.int64)
    return place // per_node * system.dimensions[0].size + place % per_node


def main() -> int:
    """Print the scores; 1 where the network is worse than the estimator on some row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="the folder with the tables")
    parser.add_argument("--split", default="devval", help="rows that are scored (default: devval)")
    parser.add_argument("--json", type=Path, help="write the scores there")
    asked = parser.parse_args()
    found = list(scores([read_measurements(asked.tables / name) for name in TABLES], asked.split))
    titles = f"{'table':28}{'device':15}{'operation':16}{'nodes':9}{'rows':>5}"
    sys.stdout.write(f"{titles}  {'the system: MAPE':20} the estimator\n")
    for each in found:
        told = f"{each.table:28}{each.device:15}{each.op:16}{each.nodes:9}{each.rows:5}"
        ours = f"{each.network_mape:7.1%} ({each.network_median:.1%})"
        theirs = f"{each.estimator_mape:7.1%} ({each.estimator_median:.1%})"
        sys.stdout.write(f"{told}  {ours:20} {theirs}\n")
    if asked.json:
        asked.json.write_text(json.dumps([each._asdict() for each in found], indent=1) + "\n", "utf-8")
    return int(any(each.network_mape > each.estimator_mape * 1.001 for each in found))


if __name__ == "__main__":
    sys.exit(main())
