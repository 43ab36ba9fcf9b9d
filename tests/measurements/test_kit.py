"""Measurement kit: the list of shapes, the table of results, and runs in JAX and PyTorch on the CPU."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as with_fields
from typer.testing import CliRunner, Result

from hespas.cli.main import app
from hespas.cli.validate import app as validate_app
from hespas.graph import Diagnostics
from hespas.graph.errors import MissingExtraError, OutputError, UnsupportedError, UsageError
from hespas.hardware import Device, device_names, load_device, named_device
from hespas.hardware.measure import TimedLoops
from hespas.measurements import kit, kit_frameworks, read_measurements
from hespas.measurements.kit import KitShape, kit_operations, kit_shapes, measure_kit, write_kit
from hespas.operations import element_bytes

CPU = Path(__file__).parents[2] / "fixtures" / "recorded" / "recorded-cpu.toml"
_SMALL = (
    KitShape(kind="matmul", dtype="f32_full", sizes=(("batch", 1), ("m", 48), ("n", 64), ("k", 32))),
    KitShape(
        kind="attention.context",
        dtype="f32_full",
        sizes=(("batch", 1), ("q_len", 16), ("heads", 4), ("kv_heads", 2), ("head_dim", 8)),
    ),
    KitShape(
        kind="attention.generation",
        dtype="f32_full",
        sizes=(("batch", 2), ("kv_len", 16), ("heads", 4), ("kv_heads", 4), ("head_dim", 8)),
    ),
    *(
        KitShape(kind=kind, op=op, dtype="f32_full", sizes=(("rows", 7), ("columns", 65)))
        for kind, op in (
            ("vector", "add"),
            ("move", "copy"),
            ("reduction", "sum"),
            ("normalization", "softmax"),
        )
    ),
)


class _RooflineFramework:
    """Framework whose calls last as long as their FLOPs and bytes on a fictitious device."""

    name, version, device, variant = "roofline", "1.0", "fictitious", ""

    def __init__(self, kind: str = "gpu", *, lacks: str = "") -> None:
        self.kind, self.lacks = kind, lacks

    def loops(self, shape: KitShape) -> TimedLoops:
        if shape.kind == self.lacks:
            raise UnsupportedError(f"no {shape.kind}\nsecond line")
        ops = kit_operations([shape], named_device("L40S"))
        time_ns = 4e3 + float(ops.flops[0]) / 2e5 + float(ops.bytes_moved[0]) / 600
        return lambda count: count * time_ns


@pytest.mark.parametrize("name", [*device_names(), str(CPU)])
def test_shapes_identify_every_device_in_a_short_time(name: str) -> None:
    device = load_device(name)
    shapes = kit_shapes(device)
    assert shapes == kit_shapes(device)
    assert len(set(shapes)) == len(shapes)
    assert 110 <= len(shapes) <= 150
    ops = kit_operations(shapes, device)
    assert np.isfinite(ops.flops).all()
    assert np.isfinite(element_bytes(ops.scheme, "activation")).all()
    bandwidth, capacity = device.main_memory.bandwidth_bytes_per_s, device.main_memory.capacity_bytes
    assert (ops.bytes_moved / bandwidth <= 20e-3).all()
    assert capacity < 0 or (ops.bytes_moved <= capacity / 4).all()
    counts = Counter((shape.kind, shape.dtype) for shape in shapes)
    [usual] = {dtype for kind, dtype in counts if kind == "vector"}
    # A class of fewer rows than 12 is not fitted.
    assert min(counts[kind, usual] for kind in kit_kinds()) > 12
    has_fp8 = any(peak.unit == "matrix" and peak.dtype.startswith("f8E4M3") for peak in device.peaks)
    assert (("matmul", "fp8") in counts) == has_fp8
    products = [shape for shape in shapes if shape.kind == "matmul"]
    assert any(shape.size("m") == 1 for shape in products)
    assert any(all(size % 2 for name, size in shape.sizes if name in "mnk") for shape in products)
    assert any(all(size % 128 == 0 for name, size in shape.sizes if name in "mnk") for shape in products)


def test_shapes_of_a_device_too_slow_for_any() -> None:
    fast = named_device("L4")
    slow = replace(fast, peaks=tuple(with_fields(peak, flops_per_s=1.0) for peak in fast.peaks))
    products = {shape.sizes for shape in kit_shapes(slow) if shape.kind == "matmul"}
    assert products == {(("batch", 1), ("m", 1), ("n", 1), ("k", 1))}


def kit_kinds() -> tuple[str, ...]:
    return ("matmul", "attention.context", "attention.generation", "vector")


def test_formats_are_the_ones_of_the_device() -> None:
    usual = {"H100-SXM": "bf16", "T4": "f16", "P100-PCIe-16GB": "f16", "TPU-v4": "bf16", str(CPU): "f32_full"}
    for name, dtype in usual.items():
        assert {shape.dtype for shape in kit_shapes(load_device(name))} - {"fp8"} == {dtype}


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_written_rows_are_read_back_as_the_same_operations(suffix: str, tmp_path: Path) -> None:
    device = named_device("L40S")
    done = measure_kit(device, _RooflineFramework())
    path = write_kit(done, tmp_path / f"kit{suffix}")
    table, asked = read_measurements(path), kit_operations(kit_shapes(device), device)
    assert (len(table), done.skipped, table.left_out) == (len(asked), 0, ())
    for column in ("kind", "op", "scheme"):
        assert list(getattr(table.ops, column)) == list(getattr(asked, column))
    assert set(table.hardware) == {"L40S"}
    for name, sizes in asked.dims.items():
        np.testing.assert_array_equal(table.ops.dim(name), sizes)
    np.testing.assert_array_equal(table.ops.flops, asked.flops)
    np.testing.assert_array_equal(table.ops.bytes_moved, asked.bytes_moved)
    expected_ns = 4e3 + asked.flops / 2e5 + asked.bytes_moved / 600
    np.testing.assert_allclose(table.duration_ns, expected_ns, rtol=1e-9)
    np.testing.assert_allclose(table.spread_ns, 0, atol=1e-6)
    with pytest.raises(OutputError):
        write_kit(done, path)


def test_shapes_that_cannot_run_are_skipped_and_counted() -> None:
    found = Diagnostics()
    done = measure_kit(named_device("L40S"), _RooflineFramework(lacks="attention.context"), diagnostics=found)
    assert done.skipped == found.counts()["kit.skipped"] > 12
    assert len(done.frame) + done.skipped == len(kit_shapes(done.device))
    assert {note.message for note in found} == {"attention.context bf16: shape skipped: no attention.context"}
    with pytest.raises(UnsupportedError, match="could not run any of 1 shapes"):
        measure_kit(done.device, _RooflineFramework(lacks="matmul"), shapes=_SMALL[:1])


def test_unsteady_times_are_reported() -> None:
    class Noisy(_RooflineFramework):
        def loops(self, shape: KitShape) -> TimedLoops:
            factors = cycle((1.0, 1.0, 1.5))
            return lambda count: count * 1e9 * next(factors)

    found = Diagnostics()
    done = measure_kit(named_device("L40S"), Noisy(), shapes=_SMALL, repeats=3, diagnostics=found)
    assert found.counts() == {"hardware.unsteady": 1}
    np.testing.assert_allclose(done.frame["duration_ns"], 1e9)
    np.testing.assert_allclose(done.frame["duration_ns_std"], np.std([1e9, 1e9, 1.5e9]))


def test_another_device_is_refused_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name in (("cpu", "L40S"), ("gpu", "TPU-v4"), ("tpu", "L40S"), ("gpu", str(CPU))):
        with pytest.raises(UsageError, match=f"roofline runs on a {kind}"):
            measure_kit(load_device(name), _RooflineFramework(kind), shapes=_SMALL[:1])
    found = Diagnostics()
    monkeypatch.setattr(_RooflineFramework, "device", "NVIDIA L4")
    measure_kit(named_device("L40S"), _RooflineFramework(), shapes=_SMALL[:1], diagnostics=found)
    assert [note.message for note in found] == ["roofline runs on L4: its times are written as times of L40S"]


@pytest.mark.parametrize("name", ["jax", "torch"])
def test_operations_run_on_the_cpu(name: str) -> None:
    pytest.importorskip(name)
    framework = kit_frameworks.open_framework(name)  # type: ignore[arg-type]
    if framework.kind != "cpu":
        pytest.skip("the framework runs on an accelerator")
    found = Diagnostics()
    done = measure_kit(load_device(CPU), framework, shapes=_SMALL, repeats=3, sample_ns=1, diagnostics=found)
    skipped = {"jax": 1, "torch": 0}[name]  # XLA removes copies
    assert (done.skipped, len(done.frame)) == (skipped, len(_SMALL) - skipped)
    assert (done.frame["duration_ns"] > 0).all()
    assert np.isfinite(done.frame["duration_ns_std"]).all()


def test_jax_repeats_every_call() -> None:
    """XLA moves a call with constant inputs out of a loop: then 1,000 calls would take as long as 20."""
    pytest.importorskip("jax")
    framework = kit_frameworks.open_framework("jax")
    stream = (("rows", 128), ("columns", 1024))
    product = (("batch", 1), ("m", 128), ("n", 128), ("k", 128))
    for kind, op, sizes in (
        ("matmul", "", product),
        ("vector", "add", stream),
        ("reduction", "sum", stream),
        ("normalization", "softmax", stream),
    ):
        timed = framework.loops(KitShape(kind=kind, op=op, dtype="f32_full", sizes=sizes))
        few, many = (min(timed(count) for _ in range(3)) for count in (20, 1000))
        assert many > 5 * few


def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> None:
        return None

    monkeypatch.setattr(kit_frameworks, "find_spec", absent)
    for name, extra in (("auto", "jax"), ("jax", "jax"), ("torch", "torch")):
        with pytest.raises(MissingExtraError) as error:
            kit_frameworks.open_framework(name)  # type: ignore[arg-type]
        assert error.value.hint == f"pip install 'hespas[{extra}]'"


def _measure(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["hardware", "measure", *map(str, arguments)])


def _use(monkeypatch: pytest.MonkeyPatch, framework: _RooflineFramework) -> None:
    def opened(_: str) -> _RooflineFramework:
        return framework

    monkeypatch.setattr(kit_frameworks, "open_framework", opened)


def test_the_table_of_the_command_is_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _RooflineFramework(lacks="move"))
    few = [shape for shape in kit_shapes(named_device("L40S")) if shape.kind in {"vector", "move"}]

    def without_products(_: Device) -> list[KitShape]:
        return few

    monkeypatch.setattr(kit, "kit_shapes", without_products)  # fits of fewer classes are faster
    table, fitted = tmp_path / "kit.parquet", tmp_path / "fitted.toml"
    done = _measure("--kit", "--device", "L40S", "--out", table)
    assert done.exit_code == 0, done.output
    assert re.search(
        r"kit\.parquet: \d+ shapes of L40S measured, 2 skipped; next: hespas-validate", done.stdout
    )
    assert "no move [kit.skipped] (2 times)" in done.stderr
    assert _measure("--kit", "--device", "L40S", "--out", table).exit_code == 2
    arguments = ["calibrate", "--hardware", "L40S", "--table", str(table), "--out", str(fitted), "--quiet"]
    done = CliRunner().invoke(validate_app, arguments)
    assert done.exit_code == 0, done.output
    fits = {(fit.kind, fit.scheme) for fit in load_device(fitted).own_fits if fit.table == "kit.parquet"}
    assert ("vector", "bf16") in fits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kit", "--out", "kit.parquet"], "--kit requires --device"),
        (["--kit", "--device", "L40S", "--out", "kit.toml"], "expected a .parquet or .csv file"),
        (["--kit", "--device", "L40S", "--name", "mine", "--out", "kit.csv"], "--kit excludes --name"),
        (["--device", "L40S", "--out", "cpu.toml"], "--device requires --kit"),
        (["--framework", "jax", "--out", "cpu.toml"], "--framework requires --kit"),
        (["--kit", "--device", "L40S", "--framework", "numpy", "--out", "kit.csv"], "numpy"),
        (["--kit", "--device", "weather", "--out", "kit.csv"], "weather"),
    ],
)
def test_refusals_leave_no_file(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = _measure(*arguments)
    assert done.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_measurement_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _RooflineFramework("cpu"))
    done = _measure("--kit", "--device", "L40S", "--out", tmp_path / "kit.parquet")
    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
