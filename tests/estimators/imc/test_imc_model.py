"""In-memory-computing estimates of programs: by hand, from the command line, and beyond what fits."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from typer.testing import CliRunner

import hespas
from hespas.cli.main import app
from hespas.estimators import load_estimator
from hespas.estimators.imc import Imc
from hespas.estimators.imc.energy import step_energies
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import Device, device_to_toml, load_device
from hespas.hardware.devices import read_device
from hespas.hardware.library import IMC_FOLDER
from hespas.operations import Labels, Operations
from hespas.operations.build import matmuls

TERNARY = "imc:input_bits=7,weight_bits=2"
PROGRAM = """
module @ternary_net {
  func.func public @main(%x: tensor<1x16x16x32xi8>, %k: tensor<3x3x32x64xi8>, %w: tensor<64x10xi8>) -> tensor<256x10xi32> {
    %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<1x16x16x32xi8>, tensor<3x3x32x64xi8>) -> tensor<1x16x16x64xi32>
    %z = stablehlo.constant dense<0> : tensor<1x16x16x64xi32>
    %1 = stablehlo.maximum %0, %z : tensor<1x16x16x64xi32>
    %2 = stablehlo.convert %1 : (tensor<1x16x16x64xi32>) -> tensor<1x16x16x64xi8>
    %3 = stablehlo.reshape %2 : (tensor<1x16x16x64xi8>) -> tensor<256x64xi8>
    %4 = stablehlo.dot_general %3, %w, contracting_dims = [1] x [0] : (tensor<256x64xi8>, tensor<64x10xi8>) -> tensor<256x10xi32>
    return %4 : tensor<256x10xi32>
  }
}
"""  # noqa: E501
AIMC1, DIMC1 = load_device("AIMC1"), load_device("DIMC1")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "net.mlir"
    path.write_text(PROGRAM, "utf-8")
    return path


def with_macro(device: Device, **figures: float) -> Device:
    assert device.imc is not None
    return replace(device, imc=structs.replace(device.imc, **figures))


def test_command_prints_cycles_utilization_and_energy_by_part(program: Path, tmp_path: Path) -> None:
    """The convolution (288 x 64) fits three times on the diagonal, the product (64 x 10) 16 times."""
    report, rows = tmp_path / "e.json", tmp_path / "rows.csv"
    arguments = [
        "estimate",
        str(program),
        "--hardware",
        "AIMC1",
        "--estimator",
        f"{TERNARY},weights=resident",
    ]
    done = CliRunner().invoke(app, [*arguments, "--json", str(report), "--out", str(rows)])
    assert done.exit_code == 0, done.output
    assert "array: 102 cycles per step, 9.1% of the multipliers used" in done.output
    assert "90 % interval" in done.output
    energy = json.loads(report.read_text("utf-8"))["rank_classes"][0]["energy"]
    parts = {row["part"]: row["energy_j"] for row in energy["parts"]}
    assert sum(parts.values()) == pytest.approx(energy["at_least_j"])
    assert energy["array_cycles"] == 86 + 16
    macs = 256 * (288 * 64 + 64 * 10)
    assert energy["array_utilization"] == pytest.approx(macs / (102 * 1024 * 512))
    assert AIMC1.imc is not None
    step = step_energies(AIMC1.imc)
    assert parts["dac"] == pytest.approx(256 * (288 + 64) * step.dac_pj * 1e-12)
    assert parts["adc"] == pytest.approx(256 * (64 + 10) * step.adc_pj * 1e-12)
    assert parts["cell"] == pytest.approx(macs * step.weight_pj * 1e-12)
    assert parts["vector"] == pytest.approx(2 * 16 * 16 * 64 * 0.1e-12)
    assert (parts["weight_write"], parts["main_memory"]) == (0, 0)
    read_bytes, sum_bytes = 256 * (288 + 64) * 7 / 8, 256 * (64 + 10) * (7 + 2) / 8
    fusion_bytes = 16 * 16 * 64 * (4 + 1)
    assert parts["buffer"] == pytest.approx((read_bytes + sum_bytes + fusion_bytes) * 4.4e-12)
    with rows.open(encoding="utf-8", newline="") as file:
        table = {row["op_class"]: row for row in csv.DictReader(file)}
    assert float(table["convolution"]["array_cycles"]) == 86
    assert float(table["convolution"]["duration_ns"]) == pytest.approx(86 / 22.5e6 * 1e9)
    assert table["fusion"]["array_cycles"] == ""
    assert sum(float(row["energy_j"]) for row in table.values()) == pytest.approx(energy["at_least_j"])


def test_simulation_gives_the_same_step_with_interval(program: Path) -> None:
    estimated = hespas.estimate(program, "DIMC1", estimator=TERNARY)
    simulated = hespas.simulate(program, "DIMC1", estimator=TERNARY)
    total_ns = float(sum(estimated.estimates[0].duration_ns))
    assert simulated.step_ns == pytest.approx(total_ns)
    low_ns, high_ns = simulated.interval_ns
    assert 0 < low_ns <= simulated.step_ns <= high_ns < 3 * simulated.step_ns


def test_layers_that_do_not_fit_reload_their_weights(program: Path) -> None:
    diagnostics = Diagnostics()
    reloaded = hespas.estimate(program, "AIMC1", estimator=TERNARY, diagnostics=diagnostics)
    assert any(row.code == "imc.reload" for row in diagnostics)
    resident = hespas.estimate(program, "AIMC1", estimator=f"{TERNARY},weights=resident")
    assert (reloaded.estimates[0].duration_ns >= resident.estimates[0].duration_ns).all()
    # One copy takes 288 cycles of writing and 256 of computing; three copies take 864 and 86.
    first_ns = reloaded.estimates[0].duration_ns[0]
    assert first_ns == pytest.approx((288 + 256) / 22.5e6 * 1e9)
    more = Diagnostics()
    fitting = hespas.estimate(program, "AIMC1", estimator=f"{TERNARY},macros=2", diagnostics=more)
    assert not any(row.code == "imc.reload" for row in more)
    assert not fitting.costs[0].energy_j[fitting.costs[0].parts.index("weight_write")].any()


def product(m: int, n: int, k: int, scheme: str = "i8", batch: int = 1) -> Operations:
    batches, vectors, outputs, inputs = (np.array([float(size)]) for size in (batch, m, n, k))
    return matmuls(Labels.constant(scheme, 1), batch=batches, m=vectors, n=outputs, k=inputs)


def product_ns(m: int, n: int, k: int, scheme: str = "i8", batch: int = 1) -> float:
    """Time of one product with resident weights on one macro of DIMC1 (32 x 6 weights of 8 bits)."""
    ops = product(m, n, k, scheme, batch)
    return float(Imc(weights="resident").predict(ops, with_macro(DIMC1, macros=1)).duration_ns[0])


def test_operand_widths_take_steps_and_columns() -> None:
    cycle_ns = 1e9 / 195e6
    assert product_ns(100, 6, 32) == pytest.approx(100 * 4 * cycle_ns)
    assert product_ns(100, 6, 32, "i4") == pytest.approx(100 * 2 * cycle_ns)
    assert product_ns(100, 6, 32, "f32") == pytest.approx(100 * 4 * cycle_ns)  # quantised to 8 bits
    assert product_ns(100, 6, 32, "i16") == pytest.approx(2 * 100 * 8 * cycle_ns)  # 12 columns: two rounds
    assert product_ns(100, 7, 33) == pytest.approx(4 * 100 * 4 * cycle_ns)
    assert product_ns(100, 6, 32, batch=3) == pytest.approx(3 * 100 * 4 * cycle_ns)


@pytest.mark.parametrize("sizes", [(2**40, 2**40, 2**40), (nan, 8, 8), (2**70, 1, 1)])
def test_sizes_beyond_integers_have_no_time(sizes: tuple[float, float, float]) -> None:
    vectors, outputs, inputs = (np.array([float(size)]) for size in sizes)
    ops = matmuls(Labels.constant("i8", 1), batch=np.ones(1), m=vectors, n=outputs, k=inputs)
    diagnostics = Diagnostics()
    assert isnan(Imc().predict(ops, DIMC1, diagnostics).duration_ns[0])
    assert any(row.code == "imc.unknown-size" for row in diagnostics)


def test_shared_adcs_multiply_the_cycles() -> None:
    ops = product(64, 12, 16)
    model = Imc(weights="resident")
    alone, shared = load_device("AIMC2"), with_macro(load_device("AIMC2"), conversions_per_step=4)
    ratio = model.predict(ops, shared).duration_ns / model.predict(ops, alone).duration_ns
    assert ratio[0] == pytest.approx(4, rel=0.2)


def test_derived_clock_widens_the_interval() -> None:
    ops = product(640, 6, 32)
    done = Imc(weights="resident").predict(ops, with_macro(DIMC1, clock_hz=nan))
    assert done.low_ns[0] < 0.95 * done.duration_ns[0]
    assert done.high_ns[0] > 1.2 * done.duration_ns[0]


def test_other_devices_have_no_times(program: Path) -> None:
    diagnostics = Diagnostics()
    done = hespas.estimate(program, "H100-SXM", estimator="imc", diagnostics=diagnostics)
    assert all(isnan(time) for time in done.estimates[0].duration_ns[:1])
    assert any(row.code == "imc.no-macro" for row in diagnostics)


@pytest.mark.parametrize("option", ["weights=maybe", "input_bits=-1", "weight_bits=65", "macros=-2"])
def test_wrong_options_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="imc: invalid option"):
        load_estimator(f"imc:{option}")


@pytest.mark.parametrize("path", sorted(IMC_FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_chips_are_sourced_and_written_back_unchanged(path: Path, tmp_path: Path) -> None:
    device = load_device(path.stem)
    assert (device.name, device.kind) == (path.stem, "imc")
    assert load_device(device.aliases[0]) == device
    copy = tmp_path / path.name
    copy.write_text(device_to_toml(device), "utf-8")
    assert repr(read_device(copy)) == repr(device)
    assert device.imc is not None
    used = {device.imc.source, device.imc.circuit_source, device.imc.activity_source}
    used |= {row.source for row in device.peaks} | {row.source for row in device.memories}
    used |= {row.energy_source for row in device.peaks} | {row.energy_source for row in device.memories}
    used |= {device.launch_overhead_source}
    assert used == {source.key for source in device.sources}
    assert all(len(source.text) > 20 for source in device.sources)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ('kind = "imc"', 'kind = "gpu"', "expected a table"),
        ("rows = 32", "rows = 0", "imc.rows: expected a whole number from 1 to 65536"),
        ("weight_bits = 8", "weight_bits = 65", "expected a whole number from 1 to 64"),
        ("macros = 64", "macros = 9000000", "expected a whole number from 1 to 1048576"),
        ("columns = 48", "columns = 7", "do not hold one weight"),
        ("weight_activity = 0.5", "weight_activity = 1.5", "expected a number above 0, up to 1"),
        ('source = "paper"\ncircuit', 'source = "nowhere"\ncircuit', "not a key of the sources table"),
        ('domain = "digital"', 'domain = "quantum"', "expected one of analog, digital"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, before: str, after: str, expected: str) -> None:
    text = (IMC_FOLDER / f"{DIMC1.name}.toml").read_text("utf-8")
    assert before in text
    path = tmp_path / "chip.toml"
    path.write_text(text.replace(before, after, 1), "utf-8")
    with pytest.raises(FormatError, match=expected):
        load_device(path)
