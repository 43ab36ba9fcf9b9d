"""Energy of a step by hand: a floor from the file's figures, a ceiling at the design power."""

from __future__ import annotations

import json
from math import isnan, nan
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli.main import app
from hespas.estimators.rates import node_energy_j, step_energy
from hespas.graph import GraphBuilder, OpClass, OpGraph, dtype
from hespas.hardware import load_device
from hespas.hardware.prices import PowerShares
from hespas.report.texts import energy_text

ROOT = Path(__file__).parents[2]
A100 = load_device("A100-SXM-40GB")
SIZE = 1024


def graph(element: str = "bf16") -> OpGraph:
    """A product with 1,024 float32 operations beside it, and a copy of 1 MB."""
    b = GraphBuilder("two")
    flops = 2.0 * SIZE**3
    node = b.add_node(
        name_id=0, op_id=b.strings.add("dot"), op_class=OpClass.CONTRACTION, flops=flops + 1024,
        transcendentals=0, bytes_read=4e6, bytes_written=2e6,
    )  # fmt: skip
    b.set(node, rate_dtype=dtype("f32").code)
    code = dtype(element).code
    b.add_contraction(
        node, batch=1, m=SIZE, n=SIZE, k=SIZE, flops=flops, useful_flops=flops, lhs=code, rhs=code,
        accumulator=dtype("f32").code, products=1,
    )  # fmt: skip
    b.add_node(
        name_id=0, op_id=b.strings.add("copy"), op_class=OpClass.MOVE, flops=0, transcendentals=0,
        bytes_read=5e5, bytes_written=5e5,
    )  # fmt: skip
    return b.build()


def test_nodes_by_hand() -> None:
    """0.295 pJ a bf16 operation, 0.845 pJ a float32 one, 43.75 pJ a byte of HBM2."""
    product = 2 * SIZE**3 * 0.295 + 1024 * 0.845 + 6e6 * 43.75
    assert node_energy_j(graph(), A100) == pytest.approx([product * 1e-12, 1e6 * 43.75 * 1e-12])


def test_what_the_file_does_not_say_is_left_out_of_the_floor() -> None:
    """TF32 has no figure: the traffic and the operations beside it remain."""
    assert node_energy_j(graph("f32"), A100)[0] == pytest.approx((1024 * 0.845 + 6e6 * 43.75) * 1e-12)


def test_no_figures_are_no_energy() -> None:
    h100 = load_device("H100-SXM")
    assert all(isnan(each) for each in node_energy_j(graph(), h100).tolist())
    found = step_energy(graph(), h100, 1e6)
    assert isnan(found.at_least_j)
    assert found.at_tdp_j == pytest.approx(0.7)
    assert found.tdp_w == 700


def test_floor_lies_below_the_ceiling() -> None:
    found = step_energy(graph(), A100, 2 * SIZE**3 / 312e12 * 1e9)
    assert 0 < found.at_least_j < found.at_tdp_j


@pytest.mark.parametrize("device", ["A100-SXM-40GB", "H100-SXM", "TPU-v5e"])
def test_command_prints_the_energy_of_the_device(tmp_path: Path, device: str) -> None:
    program = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"
    report = tmp_path / "e.json"
    done = CliRunner().invoke(app, ["estimate", str(program), "--hardware", device, "--json", str(report)])
    assert done.exit_code == 0, done.output
    document = json.loads(report.read_text("utf-8"))
    in_class = document["rank_classes"][0]["energy"]
    if device == "TPU-v5e":
        assert document["energy"] is in_class["tdp_w"] is None
        assert "energy:" not in done.output
        return
    energy = document["energy"]
    assert 0 < energy["low_j"] < energy["energy_j"] < energy["high_j"]
    assert energy["energy_j"] <= in_class["tdp_w"] * document["step_ns"] * 1e-9
    relative_time = document["step_high_ns"] / document["step_ns"]
    assert energy["high_j"] >= energy["energy_j"] * relative_time
    line = f"energy: {energy_text(energy['energy_j'])} per device"
    assert line in done.output
    assert energy["source"] in done.output
    assert ("energy of arithmetic and main memory" in done.output) == (device == "A100-SXM-40GB")


def test_errors_of_power_and_time_add_in_quadrature() -> None:
    shares = PowerShares(compute=(0.5, 1.0, 2.0), memory=(0.5, 1.0, 2.0), idle=(0.5, 1.0, 2.0))
    times_ns = (1e9, 2e9, 3e9)
    assert shares.energy_j(100.0, times_ns, (nan, nan)) == pytest.approx((300.0, 600.0, 1200.0))
    both = shares.energy_j(100.0, times_ns, (0.5, 2.0))
    assert both == pytest.approx((600 * 2 ** -(2**0.5), 600.0, 600 * 2 ** (2**0.5)))
    exact = PowerShares(compute=(1.0, 1.0, 1.0), memory=(1.0, 1.0, 1.0), idle=(1.0, 1.0, 1.0))
    assert exact.energy_j(100.0, times_ns, (0.8, 1.5)) == pytest.approx((480.0, 600.0, 900.0))
    assert shares.energy_j(100.0, (0.0, 0.0, 0.0), (0.5, 2.0)) == (0.0, 0.0, 0.0)


def test_a_recording_has_no_energy(tmp_path: Path) -> None:
    """Its waits are those of another device."""
    report = tmp_path / "e.json"
    trace = ROOT / "fixtures" / "profiles" / "h100_streams.xplane.pb"
    done = CliRunner().invoke(app, ["estimate", str(trace), "--hardware", "H100-SXM", "--json", str(report)])
    assert done.exit_code == 0, done.output
    assert json.loads(report.read_text("utf-8"))["energy"] is None
    assert "energy:" not in done.output
