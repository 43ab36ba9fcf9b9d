"""Comparison of simulated spans of profiles and of their Chakra traces with the measured span.

``python -m benchmarks.replayed_spans [FOLDER ...]`` reads every profile of device work in the folders
(default: ``fixtures/profiles``), and every archive of one file per rank as one job. Exits with 1 if a
simulated span deviates by more than 2 %, device time is lost, or ``hespas-validate check --profile
astra-sim`` reports an error. Absent ranks (ET022) are not an error if the recording lacks ranks of its job.
The span is the time from the first start to the last end of device work; with one clock per rank it is the
longest span of a rank.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

import hespas
from hespas.api.io import read_profiles
from hespas.converters import is_recognised
from hespas.graph import Diagnostics, Profile, Severity, Timeline, Workload
from hespas.graph.errors import HespasError
from hespas.graph.passes import totals

__all__ = ["Replayed", "main", "replayed"]

_FIXTURES = Path(__file__).parents[1] / "fixtures" / "profiles"
_MOST_OFF = 0.02
_ABSENT_RANKS = "ET022"
_COLUMNS = ("measured ms", "graph", "trace", "device ms in", "graph - in", "trace - in", "nodes", "check")


class Replayed(NamedTuple):
    """One profile: span and device time [ns], each measured, of its graph, and of the Chakra trace of the
    graph.
    """

    name: str
    span_ns: tuple[float, float, float]
    device_ns: tuple[float, float, float]
    nodes: int
    errors: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        """True if spans and device time are preserved and the trace is valid. The trace has whole
        nanoseconds.
        """
        measured, *others = self.span_ns
        close = all(abs(each - measured) <= _MOST_OFF * measured for each in others)
        before, graph, trace = self.device_ns
        return close and abs(graph - before) < 1 and abs(trace - before) <= self.nodes and not self.errors


def _span_ns(profile: Profile) -> float:
    known = ~np.isnan(profile.start_ns)
    ends = profile.start_ns + np.maximum(profile.duration_ns, 0.0)
    return float(ends[known].max() - profile.start_ns[known].min())


def _longest_ns(timeline: Timeline) -> float:
    """Return the longest span of a rank [ns], from its own start: recordings of ranks start at different
    times.
    """
    first = np.full(len(timeline.finish_ns), np.inf)
    np.minimum.at(first, timeline.rank, timeline.start_ns)
    return float(np.nanmax(timeline.finish_ns - first))


def _device_ns(workload: Workload) -> float:
    sizes = zip(workload.classes, workload.class_sizes, strict=True)
    return sum(totals(graph).device_time_ns * count for graph, count in sizes)


def replayed(path: Path, scratch: Path) -> Replayed | None:
    """Return the figures of a profile, or of a folder with one profile per rank; None without device work."""
    try:
        profiles = [each for each in read_profiles(path) if len(each)]
    except HespasError:
        return None
    if not profiles:
        return None
    workload = hespas.read(path, workload=True)
    assert isinstance(workload, Workload)
    several = workload.num_available > 1
    scratch.mkdir()
    trace = scratch / (path.name.partition(".")[0] + ("" if several else ".et"))
    hespas.convert(path, trace, overwrite=True)
    again = hespas.read(trace)
    assert isinstance(again, Workload)
    found = hespas.check(trace, profile="astra-sim")
    errors = {each.code for each in found.violations if each.severity is Severity.ERROR}
    if workload.num_available < workload.num_ranks:
        errors.discard(_ABSENT_RANKS)  # absent from the recording already
    return Replayed(
        name=path.name,
        span_ns=(
            max(map(_span_ns, profiles)),
            _longest_ns(hespas.simulate(workload, diagnostics=Diagnostics()).timeline),
            _longest_ns(hespas.simulate(again, diagnostics=Diagnostics()).timeline),
        ),
        device_ns=(
            sum(float(np.maximum(each.duration_ns, 0.0).sum()) for each in profiles),
            _device_ns(workload),
            _device_ns(again),
        ),
        nodes=sum(map(len, workload.classes)),
        errors=tuple(sorted(errors)),
    )


def _profiles(folder: Path, scratch: Path) -> Iterator[Path]:
    """Yield the files below a folder that may be profiles, and the unpacked folder of each archive."""
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        if path.name.endswith((".tar.gz", ".tgz", ".tar")):
            unpacked = scratch / path.name.partition(".")[0]
            with tarfile.open(path) as archive:
                archive.extractall(unpacked, filter="data")
            yield unpacked
        elif is_recognised(path):
            yield path


def _row(found: Replayed) -> list[str]:
    measured, *spans = found.span_ns
    before, *device = found.device_ns
    off = [f"{each / measured - 1:+.4%}" for each in spans]
    lost = [f"{each - before:+.0f} ns" for each in device]
    check = ", ".join(found.errors) or "valid"
    return [
        found.name,
        f"{measured / 1e6:,.3f}",
        *off,
        f"{before / 1e6:,.3f}",
        *lost,
        f"{found.nodes:,}",
        check,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row per profile. Return 1 if a profile is not preserved, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[_FIXTURES], metavar="FOLDER")
    rows: list[list[str]] = [["profile", *_COLUMNS]]
    kept = True
    with TemporaryDirectory() as scratch:
        folders: list[Path] = parser.parse_args(arguments).folders
        paths = (path for folder in folders for path in _profiles(folder, Path(scratch)))
        for number, path in enumerate(paths):
            found = replayed(path, Path(scratch) / str(number))
            if found is None:
                continue
            rows.append(_row(found))
            kept &= found.is_kept
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        padded = (text.rjust(width) for text, width in zip(figures, widths[1:], strict=True))
        print("  ".join((name.ljust(widths[0]), *padded)))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
