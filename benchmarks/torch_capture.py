"""Cost of the capture of a GPT with FSDP2 and tensor parallelism for 16,384 ranks, against 8 ranks.

``python -m benchmarks.torch_capture`` prints CPU seconds and peak memory of one process per mesh, with the
start-up of PyTorch, and their ratios. All meshes split the width of the model evenly. With ``--uneven`` the
largest mesh does not; ranks then differ, and the capture records more of them. Exits with 1 above 60 s or 2
GB at 16,384 ranks.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.util import find_spec

from benchmarks.process import run
from hespas.graph.mesh import Mesh

__all__ = ["capture", "main"]

_MESHES = ("data=2,model=4", "data=128,model=4", "data=2048,model=8")
_LIMIT_S, _LIMIT_MB = 60.0, 2000.0
_EVEN, _UNEVEN = 16_384, 256
"""Hidden size of the model that the largest mesh splits evenly and unevenly."""


def capture(mesh: str, hidden: int) -> None:
    """Capture once and print the workload on stderr."""
    from fixtures.make.torch_programs import gpt
    from hespas.captures.torch import capture_torch

    workload = capture_torch(
        partial(gpt, hidden=hidden, vocabulary=hidden, heads=8), Mesh.of(mesh), name="gpt"
    )
    print(repr(workload), file=sys.stderr)


def main() -> int:
    """Measure and print. Return 1 if a bound is exceeded, else 0."""
    parser = argparse.ArgumentParser("python -m benchmarks.torch_capture", description=__doc__)
    parser.add_argument(
        "--uneven", action="store_true", help="use a model that the largest mesh does not split evenly"
    )
    hidden = _UNEVEN if parser.parse_args().uneven else _EVEN
    if find_spec("torch") is None:
        print("skipped: install the extra 'torch'")
        return 0
    print("ranks    CPU s   ratio   peak MB   ratio")
    figures: list[tuple[float, float]] = []
    for mesh in _MESHES:
        code = f"from benchmarks.torch_capture import capture; capture({mesh!r}, {hidden})"
        usage = run([sys.executable, "-c", code])
        cpu_s, peak_mb = usage.user_s + usage.system_s, usage.peak_mb
        figures.append((cpu_s, peak_mb))
        ratios = cpu_s / figures[0][0], peak_mb / figures[0][1]
        print(f"{Mesh.of(mesh).num_devices:6,} {cpu_s:8.1f} {ratios[0]:7.2f} {peak_mb:9.0f} {ratios[1]:7.2f}")
    cpu_s, peak_mb = figures[-1]
    return int(cpu_s > _LIMIT_S or peak_mb > _LIMIT_MB)


if __name__ == "__main__":
    sys.exit(main())
