"""Measurement of a case: lowering, compilation, warm-up, host timing, and a trace of each execution."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import numpy as np

import hespas
from benchmarks.ground_truth.cases import Work
from benchmarks.ground_truth.machine import Clocks, clocks_under
from benchmarks.ground_truth.times import busy_ns, without_host_names
from fixtures.make.untyped import jax, jnp
from hespas.graph import Profile
from hespas.graph.errors import FormatError

__all__ = ["Measured", "measure", "prepare"]

_WARM_UPS = 3
_SAMPLE_NS = 5_000_000
"""Minimum duration of a host timing."""
_MOST_TURNS = 256
_TURNED_BYTES = 256 << 20
"""Total size of the argument sets, larger than any cache, with at most five sets."""
_MOST_SETS = 5
_BLOCK = 65_521
_PATHS = r"^.*/(?=(?:fixtures/make|benchmarks)/)|^.*/site-packages/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of a case. ``device_ns`` has the times of single executions from the trace, ``wall_ns`` from the
    host clock, one per repeat. If the trace has no times, ``device_ns`` is empty and ``note`` has the reason.
    Executions cycled through ``sets`` argument sets.
    """

    stablehlo: bytes
    hlo: bytes
    xplane: bytes
    device_ns: list[float]
    wall_ns: list[float]
    clocks: Clocks
    sets: int
    note: str = ""


def prepare() -> None:
    """Configure JAX to remove paths of this machine from programs. Call this before any lowering."""
    jax.config.update("jax_hlo_source_file_canonicalization_regex", _PATHS)


def measure(name: str, work: Work, repeats: int, backend: str) -> Measured:
    """Run a case and return its measurements. Errors of JAX and the compiler are not caught."""
    lowered = jax.jit(_named(name, work.function)).trace(*work.arguments).lower()
    try:
        return _run(lowered, _argument_sets(work), repeats, backend)
    finally:
        gc.collect()  # the next case can need all memory


def _run(lowered: Any, sets: list[tuple[Any, ...]], repeats: int, backend: str) -> Measured:
    compiled = lowered.compile()
    for turn in range(_WARM_UPS):
        jax.block_until_ready(compiled(*sets[turn % len(sets)]))
    wall = _wall_ns(compiled, sets, repeats)
    clocks = clocks_under(backend, lambda: jax.block_until_ready(compiled(*sets[0])))
    xplane = without_host_names(_traced(compiled, sets, repeats))
    device, note = _device_ns(xplane, repeats)
    return Measured(
        stablehlo=str(lowered.as_text(debug_info=True)).encode(),
        hlo=str(compiled.as_text()).encode(),
        xplane=xplane,
        device_ns=device,
        wall_ns=wall,
        clocks=clocks,
        sets=len(sets),
        note=note,
    )


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the name of the case, which becomes the name of its module."""

    def program(*arguments: Any) -> Any:
        return function(*arguments)

    program.__name__ = "".join(letter if letter.isalnum() else "_" for letter in name)
    return program


def _argument_sets(work: Work) -> list[tuple[Any, ...]]:
    """Return sets of argument values whose total size exceeds any cache (at most five sets)."""
    leaves = jax.tree.leaves(work.arguments)
    size = sum(prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)
    count = min(_MOST_SETS, max(1, ceil(_TURNED_BYTES / max(size, 1))))
    rng = np.random.default_rng(7)
    fill = partial(_values, below=work.below, rng=rng)
    return [jax.tree.map(fill, work.arguments) for _ in range(count)]


def _values(leaf: Any, *, below: int, rng: np.random.Generator) -> Any:
    """Return an array of a repeated block of random values: normal, or integers below ``below``."""
    dtype, count = jnp.dtype(leaf.dtype), prod(leaf.shape)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    least = min(_BLOCK, max(count, 1))
    block = rng.integers(0, below, least) if is_integer else rng.standard_normal(least, np.float32)
    values = np.resize(block.astype(dtype), leaf.shape)
    return jax.device_put(values, leaf.sharding)


def _wall_ns(compiled: Any, sets: list[tuple[Any, ...]], repeats: int) -> list[float]:
    """Return host times per execution [ns], one per repeat. Executions run one by one, with launch and
    wait.
    """

    def sample(turns: int) -> float:
        start = perf_counter_ns()
        for turn in range(turns):
            jax.block_until_ready(compiled(*sets[turn % len(sets)]))
        return (perf_counter_ns() - start) / turns

    turns = min(_MOST_TURNS, max(1, ceil(_SAMPLE_NS / max(median(sample(1) for _ in range(3)), 1.0))))
    return [sample(turns) for _ in range(repeats)]


def _traced(compiled: Any, sets: list[tuple[Any, ...]], repeats: int) -> bytes:
    """Return the trace of one warm-up execution of the tracer and ``repeats`` executions. Python calls are
    not traced, because they would dominate the trace.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for turn in range(1 + repeats):
                jax.block_until_ready(compiled(*sets[turn % len(sets)]))
        finally:
            jax.profiler.stop_trace()
        (found,) = Path(folder).rglob("*.xplane.pb")
        return found.read_bytes()


def _device_ns(xplane: bytes, repeats: int) -> tuple[list[float], str]:
    """Return the device time of each execution [ns] in the trace, or an empty list and the reason."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "case.xplane.pb"
        path.write_bytes(xplane)
        try:
            profile = hespas.read(path)
        except FormatError as error:
            return [], f"no device times: {error.message}"
    found = busy_ns(profile) if isinstance(profile, Profile) else []
    if len(found) != 1 + repeats or min(found) <= 0:
        return [], f"no device times: the trace shows {len(found)} of {1 + repeats} executions"
    return found[1:], ""
