"""Cost of linking a profile and an execution trace and writing a Chakra trace, by number of nodes.

``python -m benchmarks.pytorch_link`` generates the traces. Prints CPU seconds (user and system) and peak
memory of whole processes, and the time per node without start-up, which is measured with a trace of 64 nodes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.process import Usage, run
from benchmarks.pytorch_traces import write_host_pair

__all__ = ["main"]

_FEW = 64
_SIZES = (4_000, 16_000, 64_000, 128_000, 256_000)
_RUNS = 3


def _converted(scratch: Path, nodes: int) -> tuple[Usage, int]:
    """Return the cost of the conversion (median times, largest peak memory) and the bytes of both inputs."""
    source, target = scratch / f"job{nodes}", scratch / f"traces{nodes}"
    size = write_host_pair(source, nodes)
    convert = str(Path(sys.executable).with_name("hespas-convert"))
    command = [convert, str(source), str(target), "--to", "chakra", "--overwrite"]
    run(command)
    usages = [run(command) for _ in range(_RUNS)]
    usage = Usage(
        statistics.median(each.user_s for each in usages),
        statistics.median(each.system_s for each in usages),
        max(each.peak_mb for each in usages),
    )
    return usage, size


def main() -> None:
    """Measure and print a line per size."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        start, _ = _converted(scratch, _FEW)
        start_s = start.user_s + start.system_s
        print("PyTorch: a profile and an execution trace of one rank, linked and written as a Chakra trace")
        print(f"  start-up       {start_s:6.2f} CPU s  {start.peak_mb:6.0f} MB peak")
        for nodes in _SIZES:
            usage, size = _converted(scratch, nodes)
            cpu_s = usage.user_s + usage.system_s
            each_ns = (cpu_s - start_s) / nodes * 1e9
            print(
                f"  {nodes:7,} nodes  {cpu_s:6.2f} CPU s  {usage.peak_mb:6.0f} MB peak  "
                f"{each_ns:8,.0f} ns/node  ({size / 1e6:.0f} MB of input)"
            )


if __name__ == "__main__":
    main()
