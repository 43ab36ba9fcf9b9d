"""Noise in programs: its size, repetition, units, and refused inputs."""

from __future__ import annotations

import json
from itertools import pairwise
from math import isinf, log10
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hespas
from hespas.api.noise_curves import NoiseReport
from hespas.cli.validate import app
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, UsageError
from hespas.validators.noise.child import grid_step

pytest.importorskip("jax")

ROOT = Path(__file__).parents[3]
STABLEHLO = ROOT / "fixtures" / "stablehlo"
NOISE = ROOT / "fixtures" / "noise"
ROWS, INPUTS, OUTPUTS = 256, 64, 32

LINEAR = f"""
func.func @main(%x: tensor<{ROWS}x{INPUTS}xf32>, %w: tensor<{INPUTS}x{OUTPUTS}xf32>) -> tensor<{ROWS}x{OUTPUTS}xf32> {{
  %y = call @product(%x, %w) : (tensor<{ROWS}x{INPUTS}xf32>, tensor<{INPUTS}x{OUTPUTS}xf32>) -> tensor<{ROWS}x{OUTPUTS}xf32>
  return %y : tensor<{ROWS}x{OUTPUTS}xf32>
}}
func.func private @product(%x: tensor<{ROWS}x{INPUTS}xf32>, %w: tensor<{INPUTS}x{OUTPUTS}xf32>) -> tensor<{ROWS}x{OUTPUTS}xf32> {{
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] :
    (tensor<{ROWS}x{INPUTS}xf32>, tensor<{INPUTS}x{OUTPUTS}xf32>) -> tensor<{ROWS}x{OUTPUTS}xf32>
  return %y : tensor<{ROWS}x{OUTPUTS}xf32>
}}
"""  # noqa: E501

TWICE = """
func.func @main(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %y = call @layer(%x) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %z = call @layer(%y) : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %z : tensor<4x8xf32>
}
func.func private @layer(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %w = stablehlo.constant dense<0.5> : tensor<8x8xf32>
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] :
    (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  return %y : tensor<4x8xf32>
}
"""


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a product of a matrix of inputs and a matrix of weights, and data for it."""
    folder = tmp_path_factory.mktemp("linear")
    program, data = folder / "linear.mlir", folder / "data.npz"
    program.write_text(LINEAR, encoding="utf-8")
    rng = np.random.default_rng(1)
    # Two batches, the second one not full.
    inputs = rng.standard_normal((ROWS + 100, INPUTS)).astype(np.float32)
    np.savez(data, inputs=inputs, arg1=rng.standard_normal((INPUTS, OUTPUTS)).astype(np.float32))
    return program, data


def test_noise_of_a_linear_program_has_the_power_of_theory(linear: tuple[Path, Path]) -> None:
    program, path = linear
    with np.load(path) as data:
        inputs, weights = data["inputs"].astype(np.float64), data["arg1"].astype(np.float64)
    outputs = inputs @ weights
    first = slice(0, ROWS)  # units come from the first batch
    power = {
        "mac": (0.25 * outputs[first].std()) ** 2 * outputs.size,
        "weight": (0.25 * weights.std()) ** 2 * np.square(inputs).sum() * OUTPUTS,
        "activation": (0.25 * inputs[first].std()) ** 2 * len(inputs) * np.square(weights).sum(),
    }
    report = hespas.noise(
        program,
        data=path,
        sigma_mac=[0, 0.25],
        sigma_weight=[0, 0.25],
        sigma_activation=[0, 0.25],
        unit="std",
        seeds=6,
    )
    assert report.curves.evaluated == len(inputs)
    for kind in report.kinds:
        none, noisy = report.curve(kind)
        expected = 10 * log10(np.square(outputs).sum() / power[kind])
        assert isinf(none.snr_db)
        assert noisy.snr_db == pytest.approx(expected, abs=0.15), kind
        assert noisy.snr_db_low < noisy.snr_db < noisy.snr_db_high


def test_runs_repeat_and_other_seeds_differ(linear: tuple[Path, Path]) -> None:
    def ratios(seed: int) -> list[float]:
        report = hespas.noise(
            linear[0], data=linear[1], sigma_mac=[0.1, 0.2, 0.4], unit="std", seeds=2, seed=seed
        )
        return [row.snr_db for row in report.curves.rows]

    first = ratios(0)
    assert first == ratios(0)
    assert first != ratios(5)
    # Twice the noise is 6 dB less.
    assert np.diff(first) == pytest.approx([-6.02, -6.02], abs=0.1)


def test_each_call_of_a_function_gets_its_own_noise(tmp_path: Path) -> None:
    program = tmp_path / "twice.mlir"
    program.write_text(TWICE, encoding="utf-8")
    report = hespas.noise(program, sigma_mac=0.5, sigma_weight=[0, 1], unit="std", seeds=2)
    names = {row.site.partition(" ")[0] for row in report.curves.sites}
    assert names == {"1", "2"}
    # A single sigma is added to the curve of the other kind.
    assert {row.sigma_mac for row in report.curve("weight")} == {0.5}
    assert report.kinds == ("weight",)
    assert "noise.random-inputs" in report.diagnostics.counts()


def test_quantised_programs_compute_on_the_grids_of_their_types() -> None:
    report = hespas.noise(
        STABLEHLO / "hand_quantized.mlir", sigma_mac=[0, 1], sigma_activation=[0, 1], seeds=2
    )
    units = {(row.site[:1], str(row.kind)): (row.unit, row.origin) for row in report.curves.sites}
    assert {key: origin for key, (_, origin) in units.items() if key[1] == "mac"} == {
        ("1", "mac"): "rounding",
        ("2", "mac"): "rounding",
    }
    expected = {("1", "mac"): 0.25, ("2", "mac"): 0.05, ("1", "activation"): 0.5}
    assert {key: units[key][0] for key in expected} == pytest.approx(expected)
    assert all(row.snr_db > 0 for row in report.curves.rows)


@pytest.mark.parametrize("name", ["dot_int", "dot_fp8", "hand_convolutions"])
def test_programs_of_other_types_run(name: str) -> None:
    report = hespas.noise(STABLEHLO / f"{name}.mlir", sigma_mac=[0, 2], sigma_weight=[0, 1], seeds=1)
    assert len(report.curves.sites) >= 2
    assert "unknown" not in report.headline()


def test_accuracy_of_the_digits_falls_with_each_kind_of_noise() -> None:
    curves = {
        name: hespas.noise(
            NOISE / f"digits-{name}.mlir.gz",
            data=NOISE / "digits-test.npz",
            sigma_mac=[0, 1, 3],
            sigma_weight=[0, 0.2, 0.4],
            sigma_activation=[0, 0.8, 2],
            seeds=4,
        )
        for name in ("plain", "noise-aware")
    }
    trained = json.loads((NOISE / "accuracy.json").read_text(encoding="utf-8"))
    for name, report in curves.items():
        assert report.accuracy == pytest.approx(trained[name], abs=0.005)
        assert report.accuracy > trained["fp32"] - 0.01
        for kind in report.kinds:
            rows = report.curve(kind)
            for before, after in pairwise(rows):
                assert after.accuracy_low < before.accuracy
        # In LSB, weights are the most sensitive and results the least.
        sigmas = [report.tolerated(kind) for kind in ("weight", "activation", "mac")]
        assert sigmas == sorted(sigmas)
    for kind in curves["plain"].kinds:
        assert curves["noise-aware"].curve(kind)[-1].accuracy > curves["plain"].curve(kind)[-1].accuracy
    assert curves["plain"].curves.sites[0].accuracy < 0.97


def test_symbolic_dimensions_are_stated_and_programs_for_several_devices_refused() -> None:
    program = ROOT / "fixtures" / "binary" / "dynamic_mlp.jax_export"
    with pytest.raises(UnsupportedError, match="has the type tensor<"):
        hespas.noise(program, sigma_mac=0.1)
    report = hespas.noise(program, sigma_mac=0.1, dims={"b": 4, "s": 8}, seeds=1)
    assert [row.site for row in report.curves.sites] == ["1 dot_general (32x256)"]
    with pytest.raises(UnsupportedError, match="XLA does not run the program"):
        hespas.noise(STABLEHLO / "llama_fsdp_tp_local_N8.mlir.gz", sigma_mac=0.1, seeds=1)


def test_iterations_of_a_loop_have_the_noise_of_an_unrolled_program(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")

    def looped(x: Any, weights: Any) -> Any:
        def layer(carried: Any, weight: Any) -> Any:
            return jax.numpy.tanh(carried @ weight), None

        return jax.lax.scan(layer, x, weights)[0]

    def unrolled(x: Any, weights: Any) -> Any:
        for number in range(3):
            x = jax.numpy.tanh(x @ weights[number])
        return x

    rng = np.random.default_rng(3)
    data = tmp_path / "data.npz"
    weights = rng.standard_normal((3, 16, 16)).astype(np.float32) / 4
    inputs = rng.standard_normal((64, 16)).astype(np.float32)
    np.savez(data, inputs=inputs, arg1=weights, labels=rng.integers(0, 16, 64))
    reports: list[NoiseReport] = []
    for number, function in enumerate((looped, unrolled)):
        program = tmp_path / f"{number}.mlir"
        program.write_text(str(jax.jit(function).lower(inputs, weights).compiler_ir("stablehlo")))
        sink = Diagnostics()
        reports.append(
            hespas.noise(program, data=data, sigma_mac=0.3, sigma_weight=0.2, seeds=2, diagnostics=sink)
        )
        assert "noise.nested" not in sink.counts()
    first, second = reports
    assert len(first.curves.sites) == len(second.curves.sites) == 3
    for one, other in zip(first.curves.rows, second.curves.rows, strict=True):
        assert one.snr_db == pytest.approx(other.snr_db, abs=0.01)
        assert one.accuracy == pytest.approx(other.accuracy)


def test_calls_in_nested_loops_are_inlined() -> None:
    report = hespas.noise(STABLEHLO / "scan_nested.mlir", sigma_mac=0.1, seeds=1)
    assert len(report.curves.sites) == 3 * 5  # iterations of the outer and the inner loop
    assert report.curves.nested == 0


@pytest.mark.parametrize(("trips", "added"), [("1000000", 0), ("%unknown", 0), ("400", 30)])
def test_loops_that_are_not_unrolled_are_counted(tmp_path: Path, trips: str, added: int) -> None:
    """A loop of known length is too long with its own operations, or with those of a function."""
    limit = f"stablehlo.constant dense<{trips}> : tensor<i32>" if trips.isdecimal() else ""
    additions = "\n".join(
        f"  %v{row + 1} = stablehlo.add %v{row}, %v{row} : tensor<4x8xf32>" for row in range(added)
    )
    program = tmp_path / "loop.mlir"
    program.write_text(
        f"""
func.func @main(%x: tensor<4x8xf32>, %unknown: tensor<i32>) -> tensor<4x8xf32> {{
  %w = stablehlo.constant dense<0.5> : tensor<8x8xf32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %first = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] :
    (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  %y:2 = stablehlo.while(%i = %zero, %value = %first) : tensor<i32>, tensor<4x8xf32>
  cond {{
    {"%limit = " + limit if limit else ""}
    %go = stablehlo.compare LT, %i, {"%limit" if limit else trips} : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %go : tensor<i1>
  }} do {{
    %one = stablehlo.constant dense<1> : tensor<i32>
    %next = stablehlo.add %i, %one : tensor<i32>
    %product = stablehlo.dot_general %value, %w, contracting_dims = [1] x [0] :
      (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
    %sum = func.call @sum(%product) : (tensor<4x8xf32>) -> tensor<4x8xf32>
    stablehlo.return %next, %sum : tensor<i32>, tensor<4x8xf32>
  }}
  return %first : tensor<4x8xf32>
}}
func.func private @sum(%v0: tensor<4x8xf32>) -> tensor<4x8xf32> {{
  {additions}
  return %v{added} : tensor<4x8xf32>
}}
""",
        encoding="utf-8",
    )
    sink = Diagnostics()
    report = hespas.noise(program, sigma_mac=0.1, seeds=1, diagnostics=sink)
    assert (len(report.curves.sites), report.curves.nested) == (1, 1)
    assert sink.counts()["noise.nested"] == 1


def test_programs_without_contractions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no contraction"):
        hespas.noise(STABLEHLO / "random_mask.mlir", sigma_mac=0.1)


def arrays(**changes: Any) -> dict[str, Any]:
    """Return valid arrays for the linear program, with changes; None removes an array."""
    valid = {
        "inputs": np.zeros((8, INPUTS), np.float32),
        "arg1": np.zeros((INPUTS, OUTPUTS), np.float32),
        "labels": np.zeros(8, np.int64),
    }
    return {name: array for name, array in (valid | changes).items() if array is not None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (arrays(inputs=np.zeros((8, 3))), "argument 0 has shape"),
        (arrays(labels=np.zeros(9, np.int64)), "numbers of rows differ"),
        (arrays(labels=np.zeros((8, 2), np.int64)), "labels has shape"),
        (arrays(arg1=None), "inputs does not identify an argument"),
        (arrays(inputs=None), "no array for argument 0"),
        (arrays(other=np.zeros(3)), "unknown array other"),
        (arrays(inputs=None, arg0=np.zeros((8, INPUTS)), arg2=np.zeros(2)), "no argument 2"),
        (arrays(inputs=np.array([{}], object)), "not an .npz file"),
    ],
)
def test_data_of_other_shapes_are_refused(
    given: dict[str, Any], message: str, linear: tuple[Path, Path], tmp_path: Path
) -> None:
    data = tmp_path / "data.npz"
    np.savez(data, **given)
    with pytest.raises(HespasError, match=message) as caught:
        hespas.noise(linear[0], data=data, sigma_mac=0.1)
    assert isinstance(caught.value, UsageError | FormatError)
    assert caught.value.path == str(data)


def test_settings_without_noise_and_untrusted_inputs_are_refused(
    linear: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no noise"):
        hespas.noise(linear[0])
    with pytest.raises(UsageError, match="`sigma_mac` has the value -1"):
        hespas.noise(linear[0], sigma_mac=-1.0)
    monkeypatch.setenv("HESPAS_UNTRUSTED", "1")
    with pytest.raises(UnsupportedError, match="not allowed for untrusted"):
        hespas.noise(linear[0], sigma_mac=1.0)


def test_grids_are_found_only_on_repeated_levels() -> None:
    rng = np.random.default_rng(0)
    levels = rng.integers(-1, 2, 1000)
    assert grid_step(0.3 * levels) == pytest.approx(0.3)
    assert grid_step(0.3 * levels + 1e-9 * levels**2) == pytest.approx(0.3)
    assert grid_step(rng.standard_normal(1000)) < 0
    assert grid_step(np.maximum(rng.standard_normal(8), 0)) < 0
    assert grid_step(np.array([0.0, 1.0])) < 0
    assert grid_step(np.zeros(10)) < 0


@pytest.mark.parametrize("text", ["0:0.2:0.1", "0,0.1,0.2"])
def test_the_command_writes_a_page_and_a_document(
    text: str, linear: tuple[Path, Path], tmp_path: Path
) -> None:
    document, page = tmp_path / "noise.json", tmp_path / "noise.html"
    arguments = ["noise", str(linear[0]), "--sigma-mac", text, "--seeds", "2"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(document), "--html", str(page)])
    assert done.exit_code == 0, done.output
    content = json.loads(document.read_bytes())
    assert content["schema"] == "hespas.noise/1"
    assert [row["sigma_mac"] for row in content["rows"]] == [0, 0.1, 0.2]
    assert content["rows"][0]["snr_db"] is None
    assert "SNR of the output over noise" in page.read_text(encoding="utf-8")
    assert "SNR of the output" in done.output


@pytest.mark.parametrize("text", ["x", "0:1:2:3", "0:0", "1:2:-1", "nan"])
def test_wrong_sigmas_are_refused(text: str, linear: tuple[Path, Path]) -> None:
    done = CliRunner().invoke(app, ["noise", str(linear[0]), "--sigma-mac", text])
    assert done.exit_code == 2, done.output


def test_diagnostics_are_those_of_the_caller(linear: tuple[Path, Path]) -> None:
    sink = Diagnostics()
    report = hespas.noise(linear[0], data=linear[1], sigma_mac=0.1, seeds=1, diagnostics=sink)
    assert report.diagnostics is sink
    assert not sink.counts()
    assert np.isnan(report.curves.rows[-1].snr_db_low)
