"""Share of device time that joins of JAX profiles match to operations, with names and without.

    python -m benchmarks.joins [PROGRAM ...]

Each fixture program that XLA compiles for a CPU, and a few more (remat, remat under scan, a sharded training
step), runs under jax.profiler in a separate process with eight fake devices. Its profile is joined to its
text with locations and to plain `as_text()`. `agree` is the share of the time for which the match by
structure contains an operation of the match by name. Each profile is also joined to the text of every other
program; the last column is the largest matched share. Exits with 1 if a share without names is below 98 %, or
the share of another program reaches 50 %.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

__all__ = ["LEAST_SHARE", "main", "record"]

LEAST_SHARE = 0.98
_MOST_OF_ANOTHER = 0.5
_STEPS, _WARM_UP, _FAKE_DEVICES = 3, 2, 8
_MODULES = ("dense", "control_flow", "distributed", "special", "precision")
_FLAGS = f"--xla_force_host_platform_device_count={_FAKE_DEVICES}"

_Call = tuple[Callable[..., Any], Sequence[Any], tuple[int, ...]]


def _programs() -> Iterator[tuple[str, _Call]]:
    """Yield name, function, abstract arguments and donated arguments of each program that runs on a CPU."""
    taken: dict[str, _Call] = {}

    def take(name: str, function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> list[Any]:
        if options.get("compiled", True) and options.get("platform", "cpu") == "cpu":
            taken[name] = function, arguments, options.get("donate", ())
        return [None, None]

    for name in _MODULES:
        module: Any = import_module(f"fixtures.make.{name}")
        module.jax_program = take
        for program in module.PROGRAMS:
            try:
                program.build()
            except ImportError:
                continue  # jax.export needs packages that are absent; its programs are not lowered for a CPU
    yield from taken.items()
    yield from _more()


def _more() -> Iterator[tuple[str, _Call]]:
    """Yield the programs that are not fixtures."""
    from fixtures.make import llama
    from fixtures.make.lower import fake_mesh, shape_of
    from fixtures.make.train import sgd
    from fixtures.make.untyped import jax, jnp, lax

    def rate(weights: Any, gradient: Any) -> Any:
        return sgd(weights, gradient, 0.1)

    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w[0]) @ w[1]

    def remat_unrolled(layers: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            y = x
            for w in weights:
                y = jax.checkpoint(layer)(y, w)
            return jnp.mean(y**2)

        return rate(layers, jax.grad(loss)(layers))

    def remat_scan(stack: Any, x: Any) -> Any:
        def body(y: Any, w: Any) -> tuple[Any, None]:
            return jax.checkpoint(layer)(y, w), None

        def loss(weights: Any) -> Any:
            return jnp.mean(lax.scan(body, x, weights)[0] ** 2)

        return rate(stack, jax.grad(loss)(stack))

    unrolled = [(shape_of(256, 512), shape_of(512, 256)) for _ in range(3)]
    yield "remat_unrolled", (remat_unrolled, (unrolled, shape_of(64, 256)), ())
    stack = shape_of(4, 256, 512), shape_of(4, 512, 256)
    yield "remat_scan", (remat_scan, (stack, shape_of(64, 256)), ())
    single = llama.LlamaShape(dtype="float32", batch=4)
    yield "llama_train_1dev", (llama.train_step(single, None), llama.arguments(single, None), ())
    sharded = llama.LlamaShape(fsdp=2, tp=4, dtype="float32", batch=8)
    mesh = fake_mesh({"data": 2, "model": 4})
    yield "llama_fsdp_tp", (llama.train_step(sharded, mesh), llama.arguments(sharded, mesh), ())


def record(folder: Path, wanted: Sequence[str]) -> None:
    """Run the programs in this process, and save `plain.mlir`, `named.mlir` and `step.xplane.pb` of each in a
    folder of its name. The process must not have created a JAX client yet.
    """
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=_FLAGS)
    from fixtures.make.untyped import jax

    for name, (function, arguments, donate) in _programs():
        if wanted and name not in wanted:
            continue
        lowered = jax.jit(function, donate_argnums=donate).trace(*arguments).lower()
        step = lowered.compile()
        made = [jax.tree.map(_filled, arguments) for _ in range(_WARM_UP + _STEPS)]
        jax.block_until_ready(made)
        target = folder / name
        target.mkdir(parents=True)
        with TemporaryDirectory() as traces:
            for number, values in enumerate(made):
                if number == _WARM_UP:
                    jax.profiler.start_trace(traces)
                jax.block_until_ready(step(*values))
            jax.profiler.stop_trace()
            (profile,) = Path(traces).rglob("*.xplane.pb")
            shutil.copyfile(profile, target / "step.xplane.pb")
        (target / "plain.mlir").write_text(str(lowered.as_text()))
        (target / "named.mlir").write_text(str(lowered.as_text(debug_info=True)))


def _filled(spec: Any) -> Any:
    """Return values for an abstract array: positive floats, so that a power iteration converges, and small
    integers, which are valid indices.
    """
    from fixtures.make.untyped import jax, jnp

    rng: Any = np.random.default_rng(7)
    shape: tuple[int, ...] = spec.shape
    is_whole = np.issubdtype(spec.dtype, np.integer)
    drawn: Any = rng.integers(0, 8, shape) if is_whole else abs(rng.standard_normal(shape)) * 0.02
    values: Any = jnp.asarray(drawn, spec.dtype)
    sharding = getattr(spec, "sharding", None)
    return values if sharding is None else jax.device_put(values, sharding)


def _row(folder: Path, others: Sequence[Path]) -> Mapping[str, Any]:
    """Return the row of one program in the table."""
    from hespas import api
    from hespas.graph import Profile

    profile = api.read(folder / "step.xplane.pb")
    assert isinstance(profile, Profile)
    named = api.join_profile(folder / "named.mlir", profile)
    plain = api.join_profile(folder / "plain.mlir", profile)
    by_name = {(join.module, join.instruction): set(join.operations) for join in named.joins}
    agreed = sum(
        join.time_ns
        for join in plain.joins
        if join.operations and set(join.operations) & by_name.get((join.module, join.instruction), set())
    )
    foreign = {other.name: api.join_profile(other / "plain.mlir", profile).share for other in others}
    worst = max(foreign, key=foreign.__getitem__, default="")
    return {
        "program": folder.name,
        "named": named.share,
        "plain": plain.share,
        "groups": (named.groups, plain.groups),
        "inferred": plain.inferred_ns / plain.time_ns,
        "agree": agreed / plain.time_ns,
        "rules": {rule: time / plain.time_ns for rule, time in plain.by_rule.items()},
        "worst": worst,
        "foreign": foreign.get(worst, 0.0),
    }


def main() -> int:
    """Record, join and print the table. Return 1 if a bound is missed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joins", description=__doc__)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="programs to run (default: all)")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.record, options.programs)
        return 0
    with TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "benchmarks.joins", "--record", scratch, *options.programs]
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE)
        if done.returncode:
            raise RuntimeError(done.stderr.decode(errors="replace"))
        folders = sorted(Path(scratch).iterdir())
        rows = [_row(folder, [other for other in folders if other != folder]) for folder in folders]
    print(f"{'program':24}{'names':>8}{'plain':>8}{'groups':>9}{'inferred':>9}{'agree':>8}  other program")
    for row in rows:
        groups = "{}/{}".format(*row["groups"])
        other = f"{row['foreign']:.1%} {row['worst']}" if row["foreign"] else "0.0%"
        print(
            f"{row['program']:24}{row['named']:8.1%}{row['plain']:8.1%}{groups:>9}{row['inferred']:9.1%}"
            f"{row['agree']:8.1%}  {other}"
        )
    missed = [row for row in rows if row["plain"] < LEAST_SHARE or row["foreign"] >= _MOST_OF_ANOTHER]
    print(f"{len(rows) - len(missed)} of {len(rows)} programs within the bounds")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
