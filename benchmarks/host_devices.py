"""Error of predicted training steps on the devices of this machine's CPU, against measured steps.

``python -m benchmarks.host_devices [--rounds N]`` uses the steps of `fixtures/make/host_steps.py` on 1 and on
4 devices. A step is captured for its mesh. Its predicted time is the sum of its operations, each region timed
alone while all devices run the same region (``xla:devices=N``), plus the time of first touches of the working
memory that the compiler reports, if the C library allocates that memory anew in every step. The whole step
runs after its prediction. A round does both, because the speed of shared machines changes from minute to
minute. The error of a step is the median of its rounds. Exits with 1 if the error of a step is above 15 %.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from mmap import mmap
from pathlib import Path
from statistics import median
from subprocess import run
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

import hespas
from hespas.graph import Diagnostics

__all__ = ["main", "predicted_s", "ran_s"]

_MODULE = "fixtures.make.host_steps"
_STEPS = ("llama", "llama_deep", "cnn", "cnn_wide")
_MESHES = ((1, 1), (2, 2))
_MOST_ERROR = 0.15
_LEAST_RUNS, _LEAST_S = 10, 4.0


def main() -> int:
    """Predict, run and print. Return 1 if an error is above the bound, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_devices", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per step (default: %(default)s)")
    for mode in ("--compile", "--run"):
        parser.add_argument(mode, nargs=3, metavar=("STEP", "DATA", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile or options.run:
        name, data, model = options.compile or options.run
        print(_figure(name, (int(data), int(model)), runs=bool(options.run)))
        return 0
    print("step        devices  predicted ms measured ms   error   error per round")
    errors: list[float] = []
    for name in _STEPS:
        for mesh in _MESHES:
            pairs = [(predicted_s(name, mesh), ran_s(name, mesh)) for _ in range(options.rounds)]
            rounds = [predicted / measured - 1 for predicted, measured in pairs]
            errors.append(abs(median(rounds)))
            predicted, measured = (median(column) * 1e3 for column in zip(*pairs, strict=True))
            every = " ".join(f"{each:+.1%}" for each in rounds)
            print(
                f"{name:11} {mesh[0] * mesh[1]:7} {predicted:13.1f} {measured:10.1f} "
                f"{median(rounds):+8.1%}   {every}",
                flush=True,
            )
    print(f"median error {median(errors):.1%}, largest {max(errors):.1%}, {len(errors)} steps")
    return int(max(errors) > _MOST_ERROR)


def predicted_s(name: str, mesh: tuple[int, int]) -> float:
    """Return the predicted time of a step [s]: its operations and the first touches of its memory."""
    text = f"data={mesh[0]},model={mesh[1]}"
    done = hespas.capture(f"{_MODULE}:{name}", mesh=text, diagnostics=Diagnostics())
    with TemporaryDirectory() as folder:  # a new cache: times of earlier rounds are not reused
        model = f"xla:devices={mesh[0] * mesh[1]},cache={folder}"
        cpu = Path(__file__).parents[1] / "fixtures" / "recorded" / "recorded-cpu.toml"
        estimates = hespas.estimate(
            done.workload, str(cpu), estimator=model, granularity="op", diagnostics=Diagnostics()
        )
    operations_s = float(estimates.to_pandas()["duration_ns"].astype(float).sum()) / 1e9
    works_in = int(_in_child("--compile", name, mesh))
    return operations_s + (_touched_s(works_in, mesh[0] * mesh[1]) if works_in > _KEPT_BYTES else 0.0)


_KEPT_BYTES = 32 << 20
"""Size above which glibc returns freed memory to the system at once (``DEFAULT_MMAP_THRESHOLD_MAX``)."""
_TOUCHES = 3


def _touched_s(size: int, devices: int) -> float:
    """Return the time of first touches [s]: all cores write to ``size`` new bytes per device, less the time
    of a second write.
    """
    threads = max(devices, len(os.sched_getaffinity(0)))
    part = size * devices // threads

    def write(block: ctypes.Array[ctypes.c_char]) -> None:
        ctypes.memset(block, 1, part)

    def spent_s(blocks: Sequence[ctypes.Array[ctypes.c_char]]) -> float:
        began = perf_counter()
        list(pool.map(write, blocks))
        return perf_counter() - began

    found: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_TOUCHES):
            blocks = [(ctypes.c_char * part).from_buffer(mmap(-1, part)) for _ in range(threads)]
            found.append(spent_s(blocks) - spent_s(blocks))
    return median(found)


def ran_s(name: str, mesh: tuple[int, int]) -> float:
    """Return the measured time of a step [s], a median."""
    return _in_child("--run", name, mesh)


def _in_child(mode: str, name: str, mesh: tuple[int, int]) -> float:
    """Return the figure that a new process prints, which has as many devices as the mesh."""
    flags = f"--xla_force_host_platform_device_count={mesh[0] * mesh[1]}"
    command = [sys.executable, "-m", "benchmarks.host_devices", mode, name, *map(str, mesh)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return float(run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def _figure(name: str, shape: Sequence[int], *, runs: bool) -> float:
    """Return the median time of a step [s] if ``runs``, else its working memory on one device [bytes]."""
    jax: Any = import_module("jax")
    devices = np.array(jax.devices()).reshape(shape)
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=automatic)
    random: Any = np.random.default_rng(7)

    def filled(spec: Any) -> Any:
        is_whole = np.issubdtype(spec.dtype, np.integer)
        values = random.integers(0, 2, spec.shape) if is_whole else random.normal(0, 0.02, spec.shape)
        return jax.device_put(values.astype(spec.dtype), spec.sharding)

    with jax.set_mesh(mesh):
        step, arguments = getattr(import_module(_MODULE), name)(mesh)
        compiled = jax.jit(step).lower(*arguments).compile()
        if not runs:
            return float(compiled.memory_analysis().temp_size_in_bytes)
        values = jax.tree.map(filled, arguments)
        for _ in range(2):
            jax.block_until_ready(compiled(*values))
        times: list[float] = []
        while len(times) < _LEAST_RUNS or sum(times) < _LEAST_S:
            began = perf_counter()
            jax.block_until_ready(compiled(*values))
            times.append(perf_counter() - began)
    return median(times)


if __name__ == "__main__":
    sys.exit(main())
