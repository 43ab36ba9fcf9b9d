"""Findings about captured JAX programs: expected ones are reported, and no false ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hespas
from hespas.cli.convert import app as convert_app
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import UnsupportedError

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")


def spec(shape: tuple[int, ...], mesh: Any, *axes: str | None) -> Any:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def accumulate(mesh: Any) -> Any:
    """Gradients of 16 microbatches, summed by a scan."""

    def step(w: Any, batches: Any) -> Any:
        def body(gradient: Any, batch: Any) -> Any:
            def loss(w: Any) -> Any:
                return jnp.mean((batch @ w) ** 2)

            return gradient + jax.grad(loss)(w), None

        total, _ = jax.lax.scan(body, jnp.zeros_like(w), batches)
        return w - 0.1 * total

    return step, (spec((128, 128), mesh), spec((16, 64, 128), mesh, None, "data", None))


def test_gradients_of_a_scan_are_reduced_once() -> None:
    found = Diagnostics()
    done = hespas.capture(accumulate, mesh="data=4", diagnostics=found)
    (row,) = done.collectives
    assert (row.kind, row.times, row.size_bytes) == ("all_reduce", 1.0, 128 * 128 * 4.0)
    assert found.counts()["capture.moved-reductions"] == 1
    assert "capture.accumulated-reductions" not in found.counts()


def constrained(mesh: Any) -> Any:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None))

    def product(x: Any, w: Any) -> Any:
        return x @ w

    step = jax.jit(product, in_shardings=(sharding, None))
    return step, (jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32))


@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_shardings_of_jit_are_shardings(partitioner: Any) -> None:
    found = Diagnostics()
    hespas.capture(constrained, mesh="data=4", partitioner=partitioner, diagnostics=found)
    told = [(each.severity.value, each.message) for each in found if each.code == "capture.unsharded"]
    assert told == [("info", "1 of 2 arguments have no sharding: the partitioner chooses")]


def test_a_rule_of_propagation_is_no_sharding(tmp_path: Path) -> None:
    """Calls of libraries say how shardings pass through them, on one device too."""

    def step(a: Any) -> Any:
        return jnp.linalg.cholesky(a) + jnp.linalg.inv(a) + jnp.linalg.qr(a)[0] + jnp.linalg.svd(a)[0]

    path = tmp_path / "linalg.mlir"
    path.write_text(jax.jit(step).lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)).as_text())
    assert "sharding" in path.read_text()
    found = Diagnostics()
    hespas.read(path, diagnostics=found)
    assert "stablehlo.global-program" not in found.counts()


KERNEL = """module @m {
  func.func public @main(%a: tensor<64x64xf32>) -> tensor<64x64xf32> {
    %0 = stablehlo.custom_call @tpu_custom_call(%a) {backend_config = "", kernel_name = "k"}
      : (tensor<64x64xf32>) -> tensor<64x64xf32>
    return %0 : tensor<64x64xf32>
  }
}
"""


def test_a_kernel_of_unknown_cost_has_no_zero_flops(tmp_path: Path) -> None:
    (tmp_path / "kernel.mlir").write_text(KERNEL)
    done = CliRunner().invoke(convert_app, [str(tmp_path / "kernel.mlir"), str(tmp_path / "kernel.json")])
    assert done.exit_code == 0
    (row,) = (line for line in done.stderr.splitlines() if line.startswith("FLOPs"))
    assert row.split()[1:] == ["unknown", "unknown"]


def test_a_captured_kernel_of_unknown_cost_has_no_zero_flops() -> None:
    pallas: Any = pytest.importorskip("jax.experimental.pallas")

    def build(mesh: Any) -> Any:
        del mesh

        def double(source: Any, target: Any) -> None:
            target[...] = source[...] * 2

        def step(x: Any) -> Any:
            return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

        return step, (jax.ShapeDtypeStruct((256, 256), jnp.float32),)

    document = hespas.capture(build, mesh="data=1").document()
    assert document.flops != document.flops


@pytest.mark.parametrize("suffix", ["json", "et"])
def test_guessed_values_are_refused_by_strict_commands(suffix: str, tmp_path: Path) -> None:
    """The program of the recorder of PyTorch, which marks what it guessed."""
    program = Path(__file__).parents[3] / "fixtures" / "stablehlo" / "mlp.mlir"
    value = hespas.read(program)
    assert isinstance(value, Workload)
    marked = replace(value, metadata={**value.metadata, "guessed_values": "2"})
    path = tmp_path / f"step.{suffix}"
    hespas.write(marked, path)
    for call in (
        lambda: hespas.simulate(path, "H100-SXM", on_unknown="error"),
        lambda: hespas.convert(path, tmp_path / "again.json", hardware="H100-SXM", on_unknown="error"),
    ):
        with pytest.raises(UnsupportedError, match="depend on guessed values"):
            call()
    assert hespas.simulate(path, "H100-SXM").step_ns > 0
