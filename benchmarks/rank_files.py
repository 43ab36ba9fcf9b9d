"""Cost of writing rank files of a Llama-3-70B step, against a plain copy of the same bytes.

``python -m benchmarks.rank_files`` uses the job of ``hespas generate llm llama-3-70b --tp 8 --pp 16`` with
data parallelism over the other ranks and 16 microbatches. First it writes and checks one file per rank class
of 32,768 ranks. Then it writes and copies the rank files of ``--ranks`` ranks in turn, both synced to disk;
with few ranks the first file of each class dominates. Then it writes ``--most`` ranks once and measures peak
memory. Exits with 1 above twice the time of the copy, 1 GB of memory, or 5 s for the classes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import hespas
from benchmarks.process import run
from hespas.converters import WriteOptions
from hespas.generators.llm import Layout, LlmStep, Training, load_model
from hespas.graph import Workload

__all__ = ["job", "main"]

_MODEL, _STAGES, _TENSOR, _SEQUENCE, _MICROBATCHES = "llama-3-70b", 16, 8, 8192, 16
_ALL_RANKS = 32_768
_ROUNDS = 5
_FLUSHES_AT_ONCE = 8
_MOST_TIMES, _MOST_MB, _MOST_S = 2.0, 1_000.0, 5.0


def job(ranks: int) -> Workload:
    """Return the job; ``ranks`` must be a multiple of 128."""
    data = ranks // (_STAGES * _TENSOR)
    return LlmStep(
        model=load_model(_MODEL),
        layout=Layout(dp=data, tp=_TENSOR, pp=_STAGES),
        training=Training(seq=_SEQUENCE, global_batch=_MICROBATCHES * data),
    ).workload()


@dataclass(frozen=True, slots=True)
class _Took:
    """Wall seconds, and CPU seconds in user mode and in the kernel."""

    wall_s: float
    cpu_s: float

    @classmethod
    def by(cls, action: Callable[[], object]) -> _Took:
        """Run an action and return its times."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        action()
        return cls(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _write(workload: Workload, target: Path, jobs: int, *, only_classes: bool = False) -> None:
    options = WriteOptions(jobs=jobs, name="llama", only_classes=only_classes)
    hespas.write(workload, target, format="chakra", options=options)


def _copy(source: Path, target: Path) -> None:
    """Copy each file, then sync all copies to disk, several at once, as the writer does."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, target / file.name)
    with ThreadPoolExecutor(_FLUSHES_AT_ONCE) as pool:
        list(pool.map(_flush, sorted(target.iterdir())))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _against_a_copy(folder: Path, ranks: int) -> bool:
    """Measure writing against copying. Return True if the median ratio is within the bound."""
    workload, reference = job(ranks), folder / "reference"
    _write(workload, reference, 1)
    size = sum(file.stat().st_size for file in reference.iterdir())
    read = _Took.by(lambda: hespas.read(reference))
    print(f"{ranks:,} ranks: read in {read.cpu_s / ranks * 1e3:.2f} CPU ms per file")
    rounds: dict[int, list[tuple[_Took, _Took]]] = {1: [], 2: []}
    for _ in range(_ROUNDS):
        copied = _Took.by(lambda: _copy(reference, folder / "copy"))
        shutil.rmtree(folder / "copy")
        for jobs, found in rounds.items():
            found.append((_Took.by(partial(_write, workload, folder / "written", jobs)), copied))
            shutil.rmtree(folder / "written")
    shutil.rmtree(reference)
    kept = True
    for jobs, found in rounds.items():
        wall = [written.wall_s / copied.wall_s for written, copied in found]
        cpu = statistics.median(written.cpu_s / copied.cpu_s for written, copied in found)
        kept &= statistics.median(wall) <= _MOST_TIMES
        print(
            f"{ranks:,} ranks, {size / 1e6:,.0f} MB, {jobs} thread{'s' * (jobs > 1)}: "
            f"{statistics.median(wall):.2f} times the wall time of a plain copy (min {min(wall):.2f}, "
            f"max {max(wall):.2f}; both synced to disk), {cpu:.2f} times its CPU"
        )
    return kept


def _in_bounded_memory(folder: Path, ranks: int) -> bool:
    """Measure a process that writes all files. Return True if its peak memory is within the bound."""
    target = folder / "all"
    begin = time.perf_counter()
    usage = run(
        [sys.executable, "-m", "benchmarks.rank_files", "--write", str(target), "--ranks", str(ranks)]
    )
    wall_s = time.perf_counter() - begin
    with os.scandir(target) as entries:
        sizes = [entry.stat().st_size for entry in entries]
    print(
        f"{ranks:,} ranks, {len(sizes):,} files, {sum(sizes) / 1e9:.1f} GB: {usage.peak_mb:.0f} MB peak, "
        f"{usage.user_s:.1f} s user, {usage.system_s:.1f} s system, {wall_s:.0f} s wall"
    )
    shutil.rmtree(target)
    return usage.peak_mb <= _MOST_MB


def _as_classes(folder: Path) -> bool:
    """Measure generation and writing of one file per class, and a check of the files. Return True if the
    files are valid and the time is within the bound.
    """
    target = folder / "classes"
    written = _Took.by(lambda: _write(job(_ALL_RANKS), target, 2, only_classes=True))
    size = sum(file.stat().st_size for file in target.iterdir())
    begin = time.process_time()
    report = hespas.check(target, profile="astra-sim")
    checked_s = time.process_time() - begin
    verdict = "valid" if report.valid else "not valid"
    print(
        f"{_ALL_RANKS:,} ranks as {_STAGES} classes, {size / 1e6:.1f} MB: generated and written in "
        f"{written.cpu_s:.2f} CPU s ({written.wall_s:.2f} s wall); check --profile astra-sim: {verdict}, "
        f"{checked_s:.2f} CPU s"
    )
    return report.valid and written.wall_s <= _MOST_S


def main() -> int:
    """Measure and print. Return 1 if a bound is exceeded, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2048, help="ranks to copy (default: %(default)s)")
    parser.add_argument(
        "--most", type=int, default=4096, help="ranks of the memory test, 0: none (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parents[1], help="parent of the scratch folder"
    )
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        _write(job(given.ranks), given.write, 2)
        return 0
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        kept = [_as_classes(Path(folder)), _against_a_copy(Path(folder), given.ranks)]
        if given.most:
            kept.append(_in_bounded_memory(Path(folder), given.most))
    return int(not all(kept))


if __name__ == "__main__":
    raise SystemExit(main())
