"""A function of JAX -> the StableHLO of the whole mesh, by ``AbstractMesh``: no device is needed."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from logging import CRITICAL, getLogger
from types import ModuleType
from typing import Any, Literal

from hespas.captures.jax.calls import Call, Described, call_of, jitted, name_of
from hespas.captures.mesh import Mesh
from hespas.captures.target import users_code
from hespas.graph import Diagnostics
from hespas.graph.errors import MissingExtraError, UsageError

__all__ = ["Lowered", "Platform", "lower", "without_devices"]

Platform = Literal["cpu", "cuda", "rocm", "tpu"]
"""Whose variant of a program JAX lowers; most programs are the same on all."""


_REMEDIES = {
    "require devices to be present during lowering": "leave out what calls back to the host "
    "(jax.pure_callback, jax.experimental.io_callback): it belongs to devices that are there",
    "is different from the lowering platform": "what calls back to the host (jax.debug.print) is lowered for "
    "a CPU only: `platform=cpu`, or leave it out",
}
"""What to do about errors of JAX, by words of theirs."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """``program`` is MLIR bytecode with locations. ``inputs_unsharded`` arguments of ``inputs`` have no
    sharding, so that the partitioner chooses one.
    """

    name: str
    program: bytes
    mesh: Mesh
    inputs: int
    inputs_unsharded: int


def lower(
    function: Callable[..., object],
    arguments: Described,
    keywords: Mapping[str, object] | None,
    mesh: Mesh,
    *,
    platform: Platform = "tpu",
    explicit: Sequence[str] = (),
    shardy: bool = True,
    diagnostics: Diagnostics,
) -> Lowered:
    """Trace and lower ``function`` on ``mesh``, whose axes in ``explicit`` are typed (``AxisType.Explicit``).
    Shardings are annotated for Shardy, or for GSPMD.

    ``arguments`` are said as :data:`~hespas.captures.jax.calls.Described` has it. Raises ``UsageError`` where
    it does not trace and ``MissingExtraError`` without JAX.
    """
    jax = _jax()
    unknown = set(explicit) - set(mesh.names)
    if unknown:
        raise UsageError(f"`explicit`: the mesh {mesh} has no axis {', '.join(sorted(unknown))}")
    kinds = [_kind(jax, explicit=name in explicit) for name in mesh.names]
    abstract = jax.sharding.AbstractMesh(mesh.sizes, mesh.names, axis_types=tuple(kinds))
    name = name_of(function)
    with _annotated(jax, shardy=shardy), jax.sharding.use_abstract_mesh(abstract), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        with users_code(f"making the arguments of {name}"):
            call = call_of(jax, function, arguments, dict(keywords or {}), abstract)
            positional, named, placed = _abstract(jax, (call.positional, call.named), abstract)
        with users_code(f"tracing {name}", _REMEDIES):
            step, positional, named = jitted(jax, Call(call.step, positional, named))
            lowered = step.trace(*positional, **named).lower(lowering_platforms=(platform,))
    inputs = sum(placed)
    sharded = min(max(placed[0], _sharded_inputs(lowered)), inputs)
    _tell(name, (sharded, inputs - sharded), mesh, diagnostics)
    return Lowered(name, _bytecode(lowered), mesh, inputs, inputs - sharded)


def without_devices() -> None:
    """Let a JAX that nobody has loaded yet look for no devices in this process: lowering needs none. One that
    is there is left to those who use it, and compilers that are installed without one do not say what they
    miss. For commands: a process of the user's may want its devices later.
    """
    if "jax" in sys.modules:
        return
    from hespas.captures.aot.child import environment  # of compilers that only some captures need

    for name, value in environment().items():
        os.environ.setdefault(name, value)
    getLogger("jax._src.xla_bridge").setLevel(CRITICAL)


@cache
def _jax() -> ModuleType:
    try:
        return import_module("jax")
    except ImportError as error:
        raise MissingExtraError("capturing a program of JAX", "jax") from error


def _kind(jax: ModuleType, *, explicit: bool) -> object:
    kinds = jax.sharding.AxisType
    return kinds.Explicit if explicit else kinds.Auto


@contextmanager
def _annotated(jax: ModuleType, *, shardy: bool) -> Generator[None]:
    """Within, JAX annotates for the one or the other partitioner."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update(_WHOSE, shardy)
    try:
        yield
    finally:
        jax.config.update(_WHOSE, before)


_WHOSE = "jax_use_shardy_partitioner"
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")


def _abstract(jax: ModuleType, tree: Any, mesh: object) -> tuple[Any, Any, tuple[int, int]]:
    """Positional and named arguments with arrays of devices as their types, and how many arrays have a
    sharding and have none.
    """
    counts = [0, 0]
    arrays = jax.Array

    def one(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        placed: Any = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
        counts[1 if placed is None else 0] += 1
        if isinstance(leaf, arrays) and not isinstance(leaf, jax.core.Tracer):
            spec = None if placed is None else jax.sharding.NamedSharding(mesh, placed.spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec)
        return leaf

    positional, named = jax.tree.map(one, tree)
    return positional, named, (counts[0], counts[1])


def _bytecode(lowered: Any) -> bytes:
    sink = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(sink)
    return sink.getvalue()


def _sharded_inputs(lowered: Any) -> int:
    """Return how many inputs of a lowered program are sharded, also by ``jit(in_shardings=...)``."""
    for function in lowered.compiler_ir("stablehlo").body.operations:
        attributes: Any = function.operation.attributes
        if function.operation.name == "func.func" and attributes["sym_name"].value == "main":
            stated: Any = attributes["arg_attrs"] if "arg_attrs" in attributes else ()  # noqa: SIM401 # no dict
            return sum(any(kind in each for kind in _SHARDINGS) for each in stated)
    return 0


def _tell(name: str, sharded: tuple[int, int], mesh: Mesh, diagnostics: Diagnostics) -> None:
    placed, free = sharded
    if free and not placed and mesh.num_devices > 1:
        diagnostics.warning(
            "capture.unsharded",
            name,
            f"none of the {free} arguments says how it is sharded over {mesh}: where no constraint within "
            "the program does, every device does the same work",
        )
    elif free:
        diagnostics.info(
            "capture.unsharded",
            name,
            f"{free} of {placed + free} arguments have no sharding: the partitioner chooses",
        )
