"""Profiled run of a JAX program on host devices, as many as its mesh has, in a child process.

The parent calls :func:`run_profiled`; the child executes this module (:func:`main`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from hespas.captures.jax.calls import jit_step, resolve_arguments, step_call
from hespas.captures.target import load_function, user_code
from hespas.files.processes import decode_error, encode_error, isolated_python, run
from hespas.graph.errors import HespasError, UnsupportedError
from hespas.graph.mesh import Mesh

__all__ = ["MAX_HOST_DEVICES", "ProfiledFiles", "ProfiledRunOptions", "main", "run_profiled"]

MAX_HOST_DEVICES = 64
"""Limit on host devices of a run: each is a thread that waits for the others."""

_FAILED = "failed.json"
"""File with the reason why the run failed."""
_WARM_UP_STEPS = 2


class ProfiledRunOptions(NamedTuple):
    """Options of the child process that runs and profiles a program. ``axes`` are the sizes of the mesh axes
    by name; ``args`` describes the arguments.
    """

    target: str
    axes: dict[str, int]
    args: str
    explicit: list[str]
    steps: int
    folder: str


@dataclass(frozen=True, slots=True)
class ProfiledFiles:
    """Files that a profiled run writes: the StableHLO program with source names, the compiled HLO, and XLA's
    profile.
    """

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
) -> ProfiledFiles:
    """Run ``steps`` steps of the program ``target`` (``module:function``) on host devices, after two warm-up
    steps, and profile them.

    Abstract arguments are replaced by arrays with values. The files are written into ``folder``.

    Raises ``UsageError`` for exceptions of the user's code, and ``UnsupportedError`` for a mesh that is too
    large for a host or a run that fails otherwise.
    """
    if mesh.num_devices > MAX_HOST_DEVICES:
        raise UnsupportedError(
            f"mesh {mesh}: {mesh.num_devices:,} devices do not run on a host (at most {MAX_HOST_DEVICES})",
            hint="profile a small mesh, and capture the large one",
        )
    options = ProfiledRunOptions(target, mesh.axes, args, list(explicit), steps, str(folder))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={mesh.num_devices}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = isolated_python("hespas.captures.jax.run", json.dumps(options._asdict()))
    ended = run(command, time_s=timeout_s, environment=environment, folder=None)
    if ended.stopped == "time":
        raise UnsupportedError(
            f"{target} does not finish within {timeout_s:g} s",
            hint="increase `timeout`, or profile a smaller program",
        )
    failure = folder / _FAILED
    if failure.exists():
        raise decode_error(json.loads(failure.read_text(encoding="utf-8")))
    if ended.status:
        raise UnsupportedError(f"running {target} {ended.describe()}")
    return ProfiledFiles(folder / "program.mlir", folder / "compiled.hlo", folder / "profile.xplane.pb")


def main() -> int:
    """Run and profile a program in the child process. The only argument is a :class:`ProfiledRunOptions` as
    JSON.

    Write ``program.mlir``, ``compiled.hlo`` and ``profile.xplane.pb`` into the folder of the options.
    """
    options = ProfiledRunOptions(**json.loads(sys.argv[1]))
    try:
        jax: Any = import_module("jax")
        sizes, names = tuple(options.axes.values()), tuple(options.axes)
        axis_type = jax.sharding.AxisType
        axis_types = tuple(
            axis_type.Explicit if name in options.explicit else axis_type.Auto for name in names
        )
        mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(sizes), names, axis_types=axis_types)
        folder = Path(options.folder)
        with jax.set_mesh(mesh), user_code(f"running {options.target}"):
            function = load_function(options.target)
            call = step_call(jax, function, resolve_arguments(options.args or None, options.target), {}, mesh)
            # Only functions that jax.jit made itself accept compiled arguments.
            step, positional, named = jit_step(jax, call, type_name="PjitFunction")
            inputs = [_fill(jax, (positional, named)) for _ in range(_WARM_UP_STEPS + options.steps)]
            jax.block_until_ready(inputs)
            lowered = step.lower(*inputs[0][0], **inputs[0][1])
            compiled = lowered.compile()
            # Inside the folder, so that the parent removes it if this process is killed.
            with TemporaryDirectory(dir=folder) as traces:
                for number, values in enumerate(inputs):
                    if number == _WARM_UP_STEPS:
                        jax.profiler.start_trace(traces)
                    jax.block_until_ready(compiled(*values[0], **values[1]))
                jax.profiler.stop_trace()
                (profile,) = Path(traces).rglob("*.xplane.pb")
                shutil.copyfile(profile, folder / "profile.xplane.pb")
        (folder / "program.mlir").write_text(str(lowered.as_text(debug_info=True)), encoding="utf-8")
        (folder / "compiled.hlo").write_text(str(compiled.as_text()), encoding="utf-8")
    except HespasError as error:
        Path(options.folder, _FAILED).write_text(json.dumps(encode_error(error)), encoding="utf-8")
        return 1
    return 0


def _fill(jax: Any, tree: Any) -> Any:
    """Replace abstract arrays (types without data) by arrays with values. Integers are 0 or 1, which are
    valid indices; floats are from 0 to 0.02.

    The values are the same in every call.
    """
    random = np.random.default_rng(7)

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
        shape: tuple[int, ...] = leaf.shape
        is_integer = not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
        values: Any = random.integers(0, 2, shape) if is_integer else 0.02 * random.random(shape)
        array = jax.numpy.asarray(values, leaf.dtype)
        return array if leaf.sharding is None else jax.device_put(array, leaf.sharding)

    return jax.tree.map(fill, tree)
