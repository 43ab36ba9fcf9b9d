"""Comparison of matrix products in replayed CUDA graphs with the table of a peer (TraceLens), row by row.

``python -m benchmarks.graph_replay_peer [FOLDER]`` links every ``NAME.replay.json.gz`` of the folder with its
``NAME.capture*.json.gz``; ``NAME.peer_summary.csv`` is the table of TraceLens. A row has the products of one
shape: number of calls, GFLOP per call with bias, and kernel time. Exits with 1 if a row differs, device time
is lost, or less than 95 % of it has costs. Products inside attention and mixtures of experts are not
compared, because the recordings do not state their sizes.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from hespas.api import read
from hespas.converters.measured_ops.build import CostedOps, costed_ops
from hespas.graph import Profile

__all__ = ["Product", "compared", "main", "pairs_in"]

_FOLDER = Path(__file__).parents[2] / "shared" / "data" / "profiles" / "graph_replay"
_REPLAY, _PEER = ".replay.json.gz", ".peer_summary.csv"
_LEAST_COSTED = 0.95
_MOST_OFF_US = 0.5
"""Largest accepted difference to the peer's sum of kernel times [us], which is rounded."""


class Product(NamedTuple):
    """Products of one shape: number of calls, GFLOP per call and kernel time [us], each from Hespas and the
    peer.
    """

    shape: tuple[int, int, int]
    calls: tuple[int, int]
    gflop: tuple[float, float]
    time_us: tuple[float, float]

    @property
    def agrees(self) -> bool:
        """True if calls and FLOPs are equal, and times agree to the precision of the peer's table."""
        flops = abs(self.gflop[0] - self.gflop[1]) <= 1e-9 * self.gflop[1]
        return (
            self.calls[0] == self.calls[1] and flops and abs(self.time_us[0] - self.time_us[1]) < _MOST_OFF_US
        )


class _Shape(msgspec.Struct):
    """Sizes of a product in the parameter column of the peer's table."""

    m: int = msgspec.field(name="M")
    n: int = msgspec.field(name="N")
    k: int = msgspec.field(name="K")


def pairs_in(folder: Path) -> Iterator[tuple[str, Path, list[Path], Path]]:
    """Yield name, replay, captures and the peer's table of each recording in a folder."""
    for replay in sorted(folder.glob(f"*{_REPLAY}")):
        name = replay.name.removesuffix(_REPLAY)
        yield name, replay, sorted(folder.glob(f"{name}.capture*.json.gz")), folder / f"{name}{_PEER}"


def compared(replay: Path, captures: Sequence[Path], peer: Path) -> tuple[list[Product], CostedOps, Profile]:
    """Return the products of a recording by shape, longest first, with the costed operations and the profile.

    Raises ``TypeError`` if ``replay`` is not a profile.
    """
    profile = read(replay, capture=captures)
    if not isinstance(profile, Profile):
        raise TypeError(f"{replay} is not a profile")
    costed = costed_ops(profile)
    ours, theirs = _ours(costed), _theirs(peer)
    nothing = (0, 0.0, 0.0)
    rows: list[Product] = []
    for shape in {**theirs, **ours}:
        one, other = ours.get(shape, nothing), theirs.get(shape, nothing)
        rows.append(Product(shape, (one[0], other[0]), (one[1], other[1]), (one[2], other[2])))
    return sorted(rows, key=lambda row: -max(row.time_us)), costed, profile


_Row = tuple[int, float, float]
"""Number of calls, GFLOP per call, and time of all calls [us]."""


def _ours(costed: CostedOps) -> dict[tuple[int, int, int], _Row]:
    """Return the products of nodes with exactly one, unbatched product. Attention and experts are excluded by
    this.
    """
    graph, table = costed.graph, costed.graph.contractions
    alone = np.bincount(table.node, minlength=len(graph))[table.node] == 1
    rows = np.flatnonzero(alone & (table.batch == 1))
    found: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for row in rows.tolist():
        found[int(table.m[row]), int(table.n[row]), int(table.k[row])].append(row)
    return {
        shape: (
            len(each),
            float(graph.flops[table.node[each]].mean()) / 1e9,
            float(costed.busy_ns[table.node[each]].sum()) / 1e3,
        )
        for shape, each in found.items()
    }


def _theirs(peer: Path) -> dict[tuple[int, int, int], _Row]:
    found: dict[tuple[int, int, int], _Row] = {}
    with peer.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["category"] != "GEMM":
                continue
            text = row["perf_params"].replace("'", '"').replace("(", "[").replace(")", "]")
            text = text.replace("True", "true").replace("False", "false").replace("None", "null")
            shape = msgspec.json.decode(text, type=_Shape)
            calls, gflop = int(row["operation_count"]), float(row["gflop_per_call"])
            before = found.get((shape.m, shape.n, shape.k), (0, 0.0, 0.0))
            time_us = before[2] + float(row["kernel_time_us_sum"])
            found[shape.m, shape.n, shape.k] = before[0] + calls, gflop, time_us
    return found


def _text(row: Product) -> str:
    shape = "x".join(map(str, row.shape))
    calls, gflop, times = (
        " ".join(f"{each:{form}}" for each in pair)
        for pair, form in ((row.calls, "4"), (row.gflop, "11.6f"), (row.time_us, "8.1f"))
    )
    return f"{shape:20} calls {calls}  GFLOP {gflop}  us {times}"


def main() -> int:
    """Print the rows. Return 1 if a row differs or a bound is missed, else 0."""
    parser = argparse.ArgumentParser("python -m benchmarks.graph_replay_peer", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=_FOLDER)
    folder: Path = parser.parse_args().folder
    missed, pairs = False, list(pairs_in(folder))
    if not pairs:
        print(f"no recordings in {folder}")
    for name, replay, captures, peer in pairs:
        rows, costed, profile = compared(replay, captures, peer)
        kept = float(costed.busy_ns.sum()) == float(profile.duration_ns.sum())
        linked = float(profile.duration_ns[profile.host_event >= 0].sum() / profile.duration_ns.sum())
        print(
            f"{name}: {linked:.2%} of the device time linked, {costed.coverage:.2%} costed, "
            f"device time preserved: {kept}"
        )
        missed |= not kept or costed.coverage < _LEAST_COSTED
        for row in rows:
            missed |= not row.agrees
            print(f"  {_text(row)}  {'equal' if row.agrees else 'DIFFERENT'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
