"""Cost of the capture of a Llama training step for 8 to 65,536 devices, against the capture for 8.

``python -m benchmarks.capture_scale`` captures the two layers of `fixtures/make/llama.py` with FSDP and
tensor parallelism; all sizes divide by the mesh. Prints CPU seconds of all processes, their ratio to the
capture for eight devices, and peak memory of the largest process. Exits with 1 if 65,536 devices take more
than 10 s or 1 GB.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.process import Usage, run

__all__ = ["main"]

_ROUNDS = 3
_MOST_S, _MOST_MB = 10.0, 1_000.0
_MESHES = ((2, 4), (64, 8), (512, 8), (8192, 8))
_ROOT = Path(__file__).parents[1]
_MODULE = f"""
import sys
sys.path.insert(0, {str(_ROOT)!r})
from fixtures.make.llama import LlamaShape, arguments, train_step


def build(mesh):
    data, model = mesh.axis_sizes
    sizes = dict(hidden=16384, mlp=65536) if data > 64 else {{}}
    shape = LlamaShape(fsdp=data, tp=model, batch=data, **sizes)
    return train_step(shape, mesh), arguments(shape, mesh)
"""


def main() -> int:
    """Measure and print. Return 1 if a bound is exceeded, else 0."""
    with tempfile.TemporaryDirectory() as scratch:
        module = Path(scratch, "llama_step.py")
        module.write_text(_MODULE, encoding="utf-8")
        hespas = str(Path(sys.executable).with_name("hespas"))
        taken = {mesh: _capture(hespas, module, mesh) for mesh in _MESHES}
    floor = taken[_MESHES[0]]
    print("devices  CPU s  ratio  peak MB")
    for (data, model), usage in taken.items():
        spent = usage.user_s + usage.system_s
        ratio = spent / (floor.user_s + floor.system_s)
        print(f"{data * model:7,}  {spent:5.2f}  {ratio:5.2f}  {usage.peak_mb:7.0f}")
    top = taken[_MESHES[-1]]
    return int(top.user_s + top.system_s > _MOST_S or top.peak_mb > _MOST_MB)


def _capture(hespas: str, module: Path, mesh: tuple[int, int]) -> Usage:
    """Return the median CPU seconds and the largest peak memory of the rounds."""
    command = [hespas, "capture", f"{module}:build", "--mesh", f"data={mesh[0]},model={mesh[1]}", "--quiet"]
    usages = [run(command) for _ in range(_ROUNDS)]
    return Usage(
        statistics.median(usage.user_s for usage in usages),
        statistics.median(usage.system_s for usage in usages),
        max(usage.peak_mb for usage in usages),
    )


if __name__ == "__main__":
    sys.exit(main())
