"""Rates of products of two types: the pair itself, or the next wider types that contain both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device, Peak, load_device, peak_for, product_peak, type_multiplied, write_device
from hespas.hardware.devices import DeviceKind, Unit


@pytest.mark.parametrize(
    ("device", "lhs", "rhs", "used", "tflops"),
    [
        # weight-only: the float decides, whatever the integer rate (GB300's is 15 times lower)
        ("H100-SXM", "bf16", "i8", "bf16", 989.4),
        ("GB300", "bf16", "i8", "bf16", 2500),
        ("H100-SXM", "f16", "i4", "f16", 989.4),
        ("A100-SXM-40GB", "f32", "i8", "tf32", 156),
        ("H100-SXM", "f8E4M3FN", "i4", "f8E4M3FN", 1978.9),
        ("A100-SXM-40GB", "f8E4M3FN", "i4", "f16", 312),
        # f8 does not hold every i8
        ("H100-SXM", "f8E4M3FN", "i8", "f16", 989.4),
        # integers: the wider
        ("A100-SXM-40GB", "i8", "i4", "i8", 624),
        ("A100-SXM-40GB", "i4", "i2", "i4", 1248),
        ("H100-SXM", "i2", "i8", "i8", 1978.9),
        ("H100-SXM", "i32", "i8", "i32", 33.5),
        # floats: one that holds both
        ("H100-SXM", "f8E4M3FN", "f8E5M2", "f8", 1978.9),
        ("H100-SXM", "f8E5M2", "bf16", "bf16", 989.4),
        ("B200-SXM", "mxfp4", "mxfp8", "f8", 4500),
        ("H100-SXM", "bf16", "f16", "tf32", 494.7),
        ("V100-SXM2-16GB", "bf16", "f16", "f32", 15.7),
        ("TPU-v4", "f32", "bf16", "bf16", 275),
        ("P100-PCIe-16GB", "bf16", "i8", "f32", 9.3),
        # like types are as ever
        ("B200-SXM", "nvfp4", "nvfp4", "f4E2M1FN", 9000),
        ("A100-SXM-40GB", "i8", "ui8", "i8", 624),
    ],
)
def test_rate_of_a_pair_in_either_order(device: str, lhs: str, rhs: str, used: str, tflops: float) -> None:
    for pair in ((lhs, rhs), (rhs, lhs)):
        choice = product_peak(load_device(device), *pair)
        assert choice.peak.dtype.startswith(used)
        assert choice.flops_per_s == pytest.approx(tflops * 1e12)


def test_what_stands_in_is_said() -> None:
    choice = product_peak(load_device("H100-SXM"), "bf16", "i4")
    assert not choice.exact
    assert choice.rule == "bf16 x i4 on matrix: rate of bf16"


def test_emulated_products_run_as_float32_does() -> None:
    """Full float32 on a TPU takes six passes in bf16, and on an H100 the float32 lanes."""
    assert product_peak(load_device("TPU-v4"), "f32", "f32", products=6).flops_per_s == 275e12 / 6
    assert product_peak(load_device("H100-SXM"), "f32", "f32", products=6).peak.unit == "vector"
    assert product_peak(load_device("TPU-v4"), "bf16", "f32", products=6).flops_per_s == 275e12 / 6


def test_types_without_a_rate_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="f64"):
        product_peak(load_device("TPU-v4"), "f64", "f64")


def _row(dtype: str, rhs: str, tflops: float, accumulator: str = "i32", unit: Unit = "matrix") -> Peak:
    return Peak(
        unit=unit, dtype=dtype, rhs_dtype=rhs, flops_per_s=tflops * 1e12, density="dense",
        source="datasheet", accumulator=accumulator,
    )  # fmt: skip


@pytest.fixture
def mixed() -> Device:
    """An L4 that also multiplies 8-bit by 2-bit and by 4-bit integers."""
    device = load_device("L4")
    return replace(device, peaks=(*device.peaks, _row("i8", "i2", 900), _row("i4", "i8", 500)))


def test_a_mixed_pair_is_its_own_key(mixed: Device) -> None:
    for pair in (("i8", "i2"), ("i2", "i8"), ("ui8", "i2")):
        choice = product_peak(mixed, *pair)
        assert (choice.flops_per_s, choice.exact) == (900e12, True)
    assert product_peak(mixed, "i8", "i4").flops_per_s == 500e12
    assert product_peak(mixed, "i8", "i8").flops_per_s == 242.5e12


def test_a_mixed_pair_falls_back_to_the_next_wider_one(mixed: Device) -> None:
    without = replace(mixed, peaks=tuple(p for p in mixed.peaks if p.rhs_dtype != "i2"))
    choice = product_peak(without, "i8", "i2")
    assert choice.flops_per_s == 500e12
    assert choice.rule == "i8 x i2 on matrix: rate of i4 x i8"
    assert not choice.exact


def test_mixed_rows_are_no_rate_of_one_type(mixed: Device) -> None:
    assert peak_for(mixed, "matrix", "i4").peak.dtype == "i8"


def test_mixed_rows_survive_their_file(mixed: Device, tmp_path: Path) -> None:
    again = load_device(write_device(mixed, tmp_path / "mixed.toml"))
    assert repr(again.peaks) == repr(mixed.peaks)  # NaN is not equal to itself


@pytest.mark.parametrize(
    ("asked", "used"), [("f16", "f16"), ("f32", "f32"), ("bf16", "f16"), ("", "f16"), ("f64", "f32")]
)
def test_next_wider_accumulator(asked: str, used: str) -> None:
    """Rows that differ in the accumulator alone: equal, else the narrowest that is no narrower, else any."""
    device = load_device("L4")
    rows = (_row("f16", "", 200, "f16"), _row("f16", "", 100, "f32"))
    device = replace(device, peaks=(*rows, *(p for p in device.peaks if p.dtype != "f16")))
    assert product_peak(device, "f16", "f16", accumulator=asked).peak.accumulator == used


@pytest.mark.parametrize(("asked", "used"), [("f16", "f32"), ("f64", "f64"), ("bf16", "f32")])
def test_nearest_of_two_wider_accumulators(asked: str, used: str) -> None:
    rows = (_row("f16", "", 50, "f64"), _row("f16", "", 100, "f32"))
    device = replace(load_device("L4"), peaks=rows)
    assert product_peak(device, "f16", "f16", accumulator=asked).peak.accumulator == used


def test_nearest_of_two_narrower_accumulators() -> None:
    rows = (_row("f16", "", 200, "f16"), _row("f16", "", 100, "f32"))
    device = replace(load_device("L4"), peaks=rows)
    assert product_peak(device, "f16", "f16", accumulator="f64").peak.accumulator == "f32"


def test_only_gpus_convert_bf16_to_f32() -> None:
    """Without a rate for bf16, a GPU multiplies it as f32. An MXU multiplies bf16."""
    rows = (_row("f32", "", 10), _row("i8", "", 100))
    kinds: dict[DeviceKind, str] = {"gpu": "f32", "tpu": "bf16", "accelerator": "bf16"}
    for kind, used in kinds.items():
        device = replace(load_device("L4"), kind=kind, peaks=rows)
        assert type_multiplied(device, "bf16") == used
        assert type_multiplied(replace(device, peaks=(*rows, _row("bf16", "", 50))), "bf16") == "bf16"


def test_blocks_need_units_that_scale_them() -> None:
    """Block formats of 8 bits need units for 4-bit floats, whose units scale blocks; nvfp4 needs NVIDIA's."""
    eight, four = _row("f8E4M3FN", "", 100), _row("f4E2M1FN", "", 200)
    device = replace(load_device("L4"), peaks=(_row("f16", "", 50), eight))
    assert type_multiplied(device, "f8E5M2") == "f8E5M2"
    assert type_multiplied(device, "mxfp8") == "f16"
    assert type_multiplied(device, "mxfp4") == "f16"
    scales = replace(device, peaks=(*device.peaks, four))
    for name in ("mxfp8", "mxfp4", "nvfp4"):
        assert type_multiplied(scales, name) == name
    other = replace(scales, vendor="AMD")
    assert [type_multiplied(other, name) for name in ("mxfp4", "nvfp4")] == ["mxfp4", "f16"]
    assert type_multiplied(replace(device, peaks=(_row("f32", "", 5),)), "mxfp8") == "f32"
    assert type_multiplied(replace(device, peaks=()), "mxfp8") == "mxfp8"
