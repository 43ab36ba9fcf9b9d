"""Training steps on devices of this machine's CPU: predicted first, then run.

``python -m benchmarks.host_devices [--rounds N]``: the steps of `fixtures/make/host_steps.py` on 1 and on 4
devices. Each is captured for its mesh and predicted as the sum of its operations, each region of them compiled
alone and timed while all devices do the same (``xla:devices=N``); only then the whole step is compiled and
run. A round does both, one after the other, as machines that others share change from minute to minute; the
error of a step is the median of its rounds. Exits 1 where that of any step is above 15 %.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
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
    """Predict, run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_devices", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs=3, metavar=("STEP", "DATA", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        name, data, model = options.run
        print(_timed_s(name, (int(data), int(model))))
        return 0
    print("step        devices  predicted ms     ran ms    error   every round")
    errors: list[float] = []
    for name in _STEPS:
        for mesh in _MESHES:
            pairs = [(predicted_s(name, mesh), ran_s(name, mesh)) for _ in range(options.rounds)]
            rounds = [said / took - 1 for said, took in pairs]
            errors.append(abs(median(rounds)))
            said, took = (median(column) * 1e3 for column in zip(*pairs, strict=True))
            every = " ".join(f"{each:+.1%}" for each in rounds)
            print(
                f"{name:11} {mesh[0] * mesh[1]:7} {said:13.1f} {took:10.1f} {median(rounds):+8.1%}   {every}",
                flush=True,
            )
    print(f"median error {median(errors):.1%}, largest {max(errors):.1%}, {len(errors)} steps")
    return int(max(errors) > _MOST_ERROR)


def predicted_s(name: str, mesh: tuple[int, int]) -> float:
    """The sum of the operations of a step that was not run [s]."""
    text = f"data={mesh[0]},model={mesh[1]}"
    done = hespas.capture(f"{_MODULE}:{name}", mesh=text, diagnostics=Diagnostics())
    with TemporaryDirectory() as folder:  # what was measured in another minute does not count
        model = f"xla:devices={mesh[0] * mesh[1]},cache={folder}"
        cpu = Path(__file__).parents[1] / "fixtures" / "recorded" / "recorded-cpu.toml"
        said = hespas.estimate(
            done.workload, str(cpu), estimator=model, granularity="op", diagnostics=Diagnostics()
        )
    return float(said.to_pandas()["duration_ns"].astype(float).sum()) / 1e9


def ran_s(name: str, mesh: tuple[int, int]) -> float:
    """The median time of a step [s], in a process that has so many devices."""
    flags = f"--xla_force_host_platform_device_count={mesh[0] * mesh[1]}"
    command = [sys.executable, "-m", "benchmarks.host_devices", "--run", name, *map(str, mesh)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return float(run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def _timed_s(name: str, shape: Sequence[int]) -> float:
    jax: Any = import_module("jax")
    devices = np.array(jax.devices()).reshape(shape)
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=automatic)
    random = np.random.default_rng(7)

    def filled(spec: Any) -> Any:
        is_whole = np.issubdtype(spec.dtype, np.integer)
        values: Any = random.integers(0, 2, spec.shape) if is_whole else random.normal(0, 0.02, spec.shape)
        return jax.device_put(np.asarray(values, spec.dtype), spec.sharding)

    with jax.set_mesh(mesh):
        step, arguments = getattr(import_module(_MODULE), name)(mesh)
        compiled = jax.jit(step).lower(*arguments).compile()
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
