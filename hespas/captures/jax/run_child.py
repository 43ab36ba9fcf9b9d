"""In a process of its own: a program of JAX run on devices of the host, as many as its mesh has, profiled."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from hespas.captures.jax.calls import call_of, described, jitted
from hespas.captures.target import load_function, users_code
from hespas.files.children import error_as_text
from hespas.graph.errors import HespasError

__all__ = ["FAILED", "Run", "main"]

FAILED = "failed.json"
"""The file that says why nothing was run."""

_WARM_UP = 2


class Run(NamedTuple):
    """What to run. ``axes`` are sizes of mesh axes by name; ``args`` describes arguments, "" for none."""

    target: str
    axes: dict[str, int]
    args: str
    explicit: list[str]
    steps: int
    folder: str


def main() -> int:
    """Run as :class:`Run` in JSON, the one argument, says: ``program.mlir``, ``compiled.hlo`` and
    ``profile.xplane.pb`` are written into the folder.
    """
    run = Run(**json.loads(sys.argv[1]))
    try:
        _profile(run)
    except HespasError as error:
        Path(run.folder, FAILED).write_text(json.dumps(error_as_text(error)), encoding="utf-8")
        return 1
    return 0


def _profile(run: Run) -> None:
    jax: Any = import_module("jax")
    sizes, names = tuple(run.axes.values()), tuple(run.axes)
    axis = jax.sharding.AxisType
    kinds = [axis.Explicit if name in run.explicit else axis.Auto for name in names]
    devices = np.array(jax.devices()).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, names, axis_types=tuple(kinds))
    folder = Path(run.folder)
    with jax.set_mesh(mesh), users_code(f"running {run.target}"):
        call = call_of(jax, load_function(run.target), described(run.args or None, run.target), {}, mesh)
        # What others jit does not take compiled arguments.
        step, positional, named = jitted(jax, call, kind="PjitFunction")
        made = [_filled(jax, (positional, named)) for _ in range(_WARM_UP + run.steps)]
        jax.block_until_ready(made)
        lowered = step.lower(*made[0][0], **made[0][1])
        compiled = lowered.compile()
        with TemporaryDirectory(dir=folder) as traces:  # goes with the folder where the process is ended
            for number, values in enumerate(made):
                if number == _WARM_UP:
                    jax.profiler.start_trace(traces)
                jax.block_until_ready(compiled(*values[0], **values[1]))
            jax.profiler.stop_trace()
            (profile,) = Path(traces).rglob("*.xplane.pb")
            shutil.copyfile(profile, folder / "profile.xplane.pb")
    (folder / "program.mlir").write_text(str(lowered.as_text(debug_info=True)), encoding="utf-8")
    (folder / "compiled.hlo").write_text(str(compiled.as_text()), encoding="utf-8")


def _filled(jax: Any, tree: Any) -> Any:
    """Values in the places of abstract arrays: whole numbers, 0 and 1, which index anything, and fractions
    from 0 to 0.02. Numbers are the same every time.
    """
    random = np.random.default_rng(7)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
        shape: tuple[int, ...] = leaf.shape
        is_whole = not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
        values: Any = random.integers(0, 2, shape) if is_whole else 0.02 * random.random(shape)
        array = jax.numpy.asarray(values, leaf.dtype)
        return array if leaf.sharding is None else jax.device_put(array, leaf.sharding)

    return jax.tree.map(one, tree)
