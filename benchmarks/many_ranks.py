"""Cost of one trace of a 65,536-rank job, and of 1,024 traces against a plain copy of the same bytes.

``python -m benchmarks.many_ranks`` first lowers and partitions the 65,536-rank program, which needs JAX
(``make fixtures`` installs it). Without JAX this part is skipped. Writes and copies run in turn, and their
wall times are compared as ratios.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import hespas
from benchmarks.process import run
from hespas.converters import WriteOptions
from hespas.graph import Workload

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_PROGRAM_1024 = _ROOT / "fixtures" / "binary" / "llama_fsdp_tp_local_N1024.mlirbc"
_SHAPE = "--fsdp 8192 --tp 8 --hidden 16384 --mlp 65536 --batch 8192"
_PAIRS = 5


def _one_of_many(scratch: Path) -> None:
    """Measure the process that converts a 65,536-rank program to the trace of one rank."""
    if find_spec("jax") is None:
        print("65,536 ranks: skipped, JAX is not installed (make fixtures installs it)")
        return
    program = scratch / "llama_N65536.mlirbc"
    make = [sys.executable, "-m", "fixtures.make.llama", *_SHAPE.split(), "--form", "bytecode"]
    subprocess.run([*make, "--out", str(program)], cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)
    convert = str(Path(sys.executable).with_name("hespas-convert"))
    trace = scratch / "rank.40000.et"
    command = [convert, str(program), str(trace), "--ranks", "40000", "--hardware", "H100-SXM"]
    usages = [run([*command, "--overwrite"]) for _ in range(3)]
    user_s = statistics.median(usage.user_s + usage.system_s for usage in usages)
    peak_mb = max(usage.peak_mb for usage in usages)
    print(
        f"65,536 ranks, one trace of {trace.stat().st_size:,} bytes: "
        f"{user_s:.2f} CPU s, {peak_mb:.0f} MB peak"
    )


def _write_all(workload: Workload, target: Path) -> float:
    start = time.perf_counter()
    hespas.write(workload, target, format="chakra", options=WriteOptions(jobs=2))
    return time.perf_counter() - start


def _copy_all(source: Path, target: Path) -> float:
    """Copy each file and sync it to disk, as the writer does. Return wall seconds."""
    start = time.perf_counter()
    target.mkdir()
    for file in sorted(source.iterdir()):
        shutil.copyfile(file, target / file.name)
        handle = os.open(target / file.name, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - start


def _all_of_1024(scratch: Path) -> None:
    reference = scratch / "reference"
    done = hespas.convert(_PROGRAM_1024, reference, hardware="H100-SXM")
    assert isinstance(done.value, Workload)
    ratios: list[float] = []
    for pair in range(_PAIRS):
        copied = _copy_all(reference, scratch / f"copy{pair}")
        written = _write_all(done.value, scratch / f"write{pair}")
        ratios.append(copied / written)
        shutil.rmtree(scratch / f"copy{pair}")
        shutil.rmtree(scratch / f"write{pair}")
    print(
        f"1,024 ranks, {done.bytes_written / 1e6:,.0f} MB: "
        f"written at {statistics.median(ratios):.2f} times the speed of a plain copy "
        f"(min {min(ratios):.2f}, max {max(ratios):.2f}; both synced to disk)"
    )


def main() -> None:
    """Measure and print both parts."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(dir=_ROOT) as folder:
        _one_of_many(Path(folder))
        _all_of_1024(Path(folder))


if __name__ == "__main__":
    main()
