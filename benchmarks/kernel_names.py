"""Coverage of operation classes and work bounds from kernel names: ``python -m benchmarks.kernel_names
[FOLDER]``.

For each trace, the benchmark prints the share of device time whose class follows from the kernel name, the
share with bounds on the work (of all device time, and of launched kernels and copies without collectives),
and the longest kernels of unknown class. Host operations serve only as a check: where they give the work of a
kernel, its bounds must contain it. Exits with 1 if bounds do not hold.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hespas
from hespas.converters.measured_ops.build import costed_ops
from hespas.converters.measured_ops.device_events import kernel_bounds
from hespas.graph import OpClass, Profile
from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.errors import HespasError

__all__ = ["Coverage", "coverage_of", "main"]

_MOST_NAMED = 3
_OWN = Path(__file__).parents[1] / "fixtures" / "profiles"


class Coverage(NamedTuple):
    """Shares of device time (0..1; 1 without device time), the numbers of events whose bounds hold and fail,
    and the names of the longest kernels of unknown class.
    """

    classified: float
    bounded: float
    bounded_launches: float
    holds: int
    fails: int
    unknown: tuple[str, ...]


def coverage_of(profile: Profile) -> Coverage:
    """Return the coverage of one profile."""
    found = kernel_bounds(profile)
    time_ns = np.maximum(profile.duration_ns, 0.0)
    classified = found.op_class != OpClass.UNKNOWN
    # Copies are recognised by their bytes, because only kernels have a launch grid.
    launched = (profile.grid_id > 0) | ~np.isnan(profile.bytes_moved)
    works = launched & (found.op_class != OpClass.COLLECTIVE)
    holds, fails = _held(profile)
    times = Counter[int]()
    for row, each in zip(profile.kernel_id[~classified].tolist(), time_ns[~classified].tolist(), strict=True):
        times[row] += each
    names = tuple(profile.strings[row][:60] for row, _ in times.most_common(_MOST_NAMED))
    return Coverage(
        _share(time_ns, classified, np.ones(len(profile), np.bool_)),
        _share(time_ns, found.known, np.ones(len(profile), np.bool_)),
        _share(time_ns, found.known, works),
        holds,
        fails,
        names,
    )


def _share(time_ns: FloatArray, part: BoolArray, whole: BoolArray) -> float:
    total = float(time_ns[whole].sum())
    return float(time_ns[part & whole].sum()) / total if total else 1.0


def _held(profile: Profile) -> tuple[int, int]:
    """Return for how many kernels the bounds hold and fail. Only kernels that are the only one of a costed
    operation with a result count. Scatters are excluded, because they write only part of their result.
    """
    if not len(profile.host):
        return 0, 0
    bounds, ops = kernel_bounds(profile), costed_ops(profile)
    graph = ops.graph
    alone = np.bincount(ops.node, minlength=len(graph)) == 1
    moved = graph.bytes_read + graph.bytes_written
    holds = fails = 0
    for event in np.flatnonzero(bounds.known & (bounds.op_class != OpClass.SCATTER)).tolist():
        node = int(ops.node[event])
        results = graph.results.row(node)
        if not alone[node] or not ops.costed[node] or not len(results) or ops.host_op[node] < 0:
            continue
        elements = graph.types.elements(int(results[0]))
        outside = (
            (bounds.elements_low[event] > elements)
            | (bounds.elements_high[event] < elements)
            | (bounds.bytes_low[event] > moved[node])
            | (bounds.bytes_high[event] < moved[node])
            | (bounds.flops_low[event] > graph.flops[node])
        )
        holds, fails = holds + (not outside), fails + bool(outside)
    return holds, fails


def _profiles(folder: Path) -> Iterator[tuple[str, Profile]]:
    """Yield name and profile of each recording below a folder, also from archives."""
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        if path.name.endswith((".tar.gz", ".tgz")):
            with tempfile.TemporaryDirectory() as place, tarfile.open(path) as archive:
                archive.extractall(place, filter="data")
                yield from ((f"{path.name}/{name}", each) for name, each in _profiles(Path(place)))
            continue
        try:
            profile = hespas.read(path)
        except HespasError:
            continue
        if isinstance(profile, Profile) and len(profile):
            yield path.name, profile


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Return 1 if a bound does not hold, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_names", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=_OWN, help="folder of profiles (default: fixtures)"
    )
    folder: Path = parser.parse_args(arguments).folder
    columns = ("classified", "bounded", "of launches", "holds", "fails")
    print(f"{'trace':58}" + "".join(f"{column:>13}" for column in columns) + "  longest unknown kernels")
    failed = 0
    for name, profile in _profiles(folder):
        row = coverage_of(profile)
        failed += row.fails
        shares = "".join(f"{share:13.1%}" for share in row[:3])
        print(f"{name[-57:]:58}{shares}{row.holds:13,}{row.fails:13,}  {', '.join(row.unknown)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
