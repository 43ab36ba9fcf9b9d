"""Errors of collectives by the network model of systems and by the collectives estimator, against measured
times.

    python -m benchmarks.carry_over.systems --tables DIR [--split devval] [--json FILE]

DIR contains aiconfigurator_collectives.parquet (inside one node) and vidur_network.parquet (two to eight
workers, in one node or across several). Each row is a group of ranks on the system of its device, with the
number of ranks per node of the table. Each row is predicted for the library that ran it. Exits with 1 if the
network model has a larger error than the estimator on a line.
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
    """Errors of network model and estimator, as fractions, on the rows of one table, device, operation, and
    one or several nodes.
    """

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
    """Yield a score per table, device, operation, and one or several nodes."""
    for table in tables:
        held = table.part(split)
        for name in held.hardware.used():
            if name in SYSTEMS:
                yield from _of_device(held.on(name), name)


def _of_device(held: Measurements, name: str) -> Iterator[Score]:
    device, whole = load_device(name), load_system(SYSTEMS[name])
    estimated = Collectives().predict(held.ops, device).duration_ns
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
            mine = mine[(several[mine] == beyond) & ~np.isnan(ours[mine] + estimated[mine])]
            if len(mine):
                errors = [np.abs(each[mine] / measured[mine] - 1) for each in (ours, estimated)]
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
    """Return the device indices of a group: the first ``per_node`` devices of each node that it needs."""
    place = np.arange(ranks, dtype=np.int64)
    return place // per_node * system.dimensions[0].size + place % per_node


def main() -> int:
    """Print the scores. Return 1 if the network model is worse than the estimator on a line, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of measured tables")
    parser.add_argument("--split", default="devval", help="split of the scored rows (default: devval)")
    parser.add_argument("--json", type=Path, help="write the scores to this file")
    options = parser.parse_args()
    found = list(scores([read_measurements(options.tables / name) for name in TABLES], options.split))
    titles = f"{'table':28}{'device':15}{'operation':16}{'nodes':9}{'rows':>5}"
    sys.stdout.write(f"{titles}  {'network: MAPE':20} estimator: MAPE\n")
    for each in found:
        labels = f"{each.table:28}{each.device:15}{each.op:16}{each.nodes:9}{each.rows:5}"
        ours = f"{each.network_mape:7.1%} ({each.network_median:.1%})"
        theirs = f"{each.estimator_mape:7.1%} ({each.estimator_median:.1%})"
        sys.stdout.write(f"{labels}  {ours:20} {theirs}\n")
    if options.json:
        options.json.write_text(json.dumps([each._asdict() for each in found], indent=1) + "\n", "utf-8")
    return int(any(each.network_mape > each.estimator_mape * 1.001 for each in found))


if __name__ == "__main__":
    sys.exit(main())
