"""Lowering of a JAX function to the StableHLO of the whole mesh by ``AbstractMesh``, without devices."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from logging import CRITICAL, getLogger
from types import ModuleType
from typing import Any, Literal

from hespas.captures.jax.calls import Arguments, StepCall, jit_step, name_of, step_call
from hespas.captures.target import user_code
from hespas.graph import Diagnostics
from hespas.graph.errors import MissingExtraError, UsageError
from hespas.graph.mesh import Mesh

__all__ = ["LoweredProgram", "Platform", "lower", "skip_device_search"]

Platform = Literal["cpu", "cuda", "rocm", "tpu"]
"""Platform for which JAX lowers a program; most programs are the same on all."""

_USES_SHARDY = "jax_use_shardy_partitioner"
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")
_REMEDIES = {
    "require devices to be present during lowering": "remove callbacks to the host "
    "(jax.pure_callback, jax.experimental.io_callback): they need real devices",
    "is different from the lowering platform": "callbacks to the host (jax.debug.print) are lowered for "
    "a CPU only: use `platform=cpu`, or remove them",
}
"""Texts in JAX's error messages, and the hint for each."""


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """Lowered JAX program. ``program`` is MLIR bytecode with source locations.

    ``inputs`` is the number of arguments. ``inputs_unsharded`` of them have no sharding, so that the
    partitioner chooses one.
    """

    name: str
    program: bytes
    mesh: Mesh
    inputs: int
    inputs_unsharded: int


def lower(
    function: Callable[..., object],
    arguments: Arguments,
    keywords: Mapping[str, object] | None,
    mesh: Mesh,
    *,
    platform: Platform = "tpu",
    explicit: Sequence[str] = (),
    shardy: bool = True,
    diagnostics: Diagnostics,
) -> LoweredProgram:
    """Trace ``function`` with ``arguments`` and lower it to StableHLO for the devices of ``mesh``.

    Axes in ``explicit`` are typed (``AxisType.Explicit``). Shardings are annotated for Shardy, or for GSPMD
    if ``shardy`` is false. ``arguments`` has the forms of :data:`~hespas.captures.jax.calls.Arguments`.

    Raises ``UsageError`` if the function cannot be traced, and ``MissingExtraError`` without JAX.
    """
    try:
        jax = import_module("jax")
    except ImportError as error:
        raise MissingExtraError("capturing a program of JAX", "jax") from error
    unknown = set(explicit) - set(mesh.names)
    if unknown:
        raise UsageError(
            f"`explicit`: the mesh {mesh} has no axis {', '.join(sorted(unknown))}",
            hint=f"name some of the axes {', '.join(mesh.names)}",
        )
    axis_type = jax.sharding.AxisType
    axis_types = tuple(axis_type.Explicit if name in explicit else axis_type.Auto for name in mesh.names)
    abstract = jax.sharding.AbstractMesh(mesh.sizes, mesh.names, axis_types=axis_types)
    name = name_of(function)
    with (
        _partitioner(jax, shardy=shardy),
        jax.sharding.use_abstract_mesh(abstract),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        with user_code(f"making the arguments of {name}"):
            call = step_call(jax, function, arguments, dict(keywords or {}), abstract)
            positional, named, (num_sharded, num_unsharded) = _without_data(
                jax, (call.positional, call.named), abstract
            )
        with user_code(f"tracing {name}", _REMEDIES):
            step, positional, named = jit_step(jax, StepCall(call.step, positional, named))
            lowered = step.trace(*positional, **named).lower(lowering_platforms=(platform,))
    inputs = num_sharded + num_unsharded
    num_sharded = min(max(num_sharded, _num_sharded_inputs(lowered)), inputs)
    num_unsharded = inputs - num_sharded
    if num_unsharded and not num_sharded and mesh.num_devices > 1:
        diagnostics.warning(
            "capture.unsharded",
            name,
            f"none of the {num_unsharded} arguments has a sharding over {mesh}: unless a constraint in the "
            "program shards the data, every device does the same work",
        )
    elif num_unsharded:
        diagnostics.info(
            "capture.unsharded",
            name,
            f"{num_unsharded} of {inputs} arguments have no sharding: the partitioner chooses",
        )
    sink = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(sink)
    return LoweredProgram(name, sink.getvalue(), mesh, inputs, num_unsharded)


def skip_device_search() -> None:
    """Keep JAX from searching for devices in this process, because lowering needs none. JAX and its plug-ins
    then print no warnings about missing devices.

    Do nothing if JAX is loaded already. Use this function in commands only: a process of the user may need
    its devices later.
    """
    if "jax" in sys.modules:
        return
    from hespas.captures.aot.child import environment  # only some captures need the compilers

    for name, value in environment().items():
        os.environ.setdefault(name, value)
    getLogger("jax._src.xla_bridge").setLevel(CRITICAL)


@contextmanager
def _partitioner(jax: ModuleType, *, shardy: bool) -> Generator[None]:
    """Within the block, make JAX annotate shardings for the chosen partitioner, Shardy or GSPMD."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update(_USES_SHARDY, shardy)
    try:
        yield
    finally:
        jax.config.update(_USES_SHARDY, before)


def _without_data(jax: ModuleType, tree: Any, mesh: object) -> tuple[Any, Any, tuple[int, int]]:
    """Replace the device arrays in ``tree`` (positional and keyword arguments) by their types. Return both
    kinds of arguments, and the numbers of arrays with and without a sharding.
    """
    counts = [0, 0]
    arrays = jax.Array

    def abstract(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        named_sharding: Any = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
        counts[1 if named_sharding is None else 0] += 1
        if isinstance(leaf, arrays) and not isinstance(leaf, jax.core.Tracer):
            spec = None if named_sharding is None else jax.sharding.NamedSharding(mesh, named_sharding.spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec)
        return leaf

    positional, named = jax.tree.map(abstract, tree)
    return positional, named, (counts[0], counts[1])


def _num_sharded_inputs(lowered: Any) -> int:
    """Return the number of sharded inputs of a lowered program, including ``jit(in_shardings=...)``."""
    for function in lowered.compiler_ir("stablehlo").body.operations:
        attributes: Any = function.operation.attributes
        if function.operation.name == "func.func" and attributes["sym_name"].value == "main":
            arguments: Any = attributes["arg_attrs"] if "arg_attrs" in attributes else ()  # noqa: SIM401 # no dict
            return sum(any(kind in argument for kind in _SHARDINGS) for argument in arguments)
    return 0
