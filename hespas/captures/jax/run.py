"""A program of JAX run here, on as many devices of the host as its mesh has, under JAX's profiler."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hespas.captures.jax.run_child import FAILED, Run
from hespas.captures.mesh import Mesh
from hespas.files.children import end_of, error_from_text
from hespas.files.sandbox import isolated_python
from hespas.graph.errors import UnsupportedError

__all__ = ["MOST_HOST_DEVICES", "Profiled", "run_profiled"]

MOST_HOST_DEVICES = 64
"""Devices of a host that are made for a run: each is a thread that waits for the others."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """Files of a run: StableHLO with the names of the program, HLO as compiled, and XLA's profile."""

    program: Path
    compiled: Path
    profile: Path


def run_profiled(
    target: str,
    mesh: Mesh,
    folder: Path,
    *,
    args: str = "",
    explicit: Sequence[str] = (),
    steps: int = 3,
    timeout_s: float,
) -> Profiled:
    """Run ``module:function`` for so many steps, after two to warm up, on devices of the host; abstract
    arguments get numbers. Writes into ``folder``.

    Raises ``UsageError`` for what the user's code raises, and ``UnsupportedError`` for a mesh that no host
    has and a run that ends otherwise.
    """
    if mesh.num_devices > MOST_HOST_DEVICES:
        raise UnsupportedError(
            f"mesh {mesh}: {mesh.num_devices:,} devices do not run on a host (at most {MOST_HOST_DEVICES})",
            hint="profile a small mesh, and capture the large one",
        )
    run = Run(target, mesh.axes, args, list(explicit), steps, str(folder))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={mesh.num_devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = isolated_python("hespas.captures.jax.run_child", json.dumps(run._asdict()))
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(
            f"{target} does not finish within {timeout_s:g} s",
            hint="a larger `timeout`, or a smaller program",
        ) from error
    failed = folder / FAILED
    if failed.exists():
        raise error_from_text(json.loads(failed.read_text(encoding="utf-8")))
    if done.returncode:
        raise UnsupportedError(f"running {target} {end_of(done.returncode, done.stderr)}")
    return Profiled(folder / "program.mlir", folder / "compiled.hlo", folder / "profile.xplane.pb")
