"""Peak rate of an operation: the rate key and its documented fallbacks."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest

from hespas.graph.columns import DTYPES, DTypeKind
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Peak, load_device, peak_for
from hespas.hardware.devices import Unit
from hespas.hardware.peaks import MATRIX_FALLBACKS, TPU_MATRIX_FALLBACKS, VECTOR_FALLBACKS


@pytest.mark.parametrize(
    ("device", "unit", "dtype", "used", "tflops"),
    [
        # listed
        ("A100-SXM-40GB", "matrix", "bf16", "bf16", 312),
        ("A100-SXM-40GB", "matrix", "f64", "f64", 19.5),
        ("A100-SXM-40GB", "vector", "f64", "f64", 9.7),
        ("A100-SXM-40GB", "matrix", "i4", "i4", 1248),
        ("H100-SXM", "matrix", "f8E5M2", "f8E5M2", 1978.9),
        ("MI355X", "matrix", "f6E3M2FN", "f6E3M2FN", 10066.3),
        # any spelling
        ("H100-SXM", "matrix", "float16", "f16", 989.4),
        ("H100-SXM", "matrix", "F8e4m3fn", "f8E4M3FN", 1978.9),
        ("H100-SXM", "matrix", "u8", "i8", 1978.9),
        # default precision rounds float32 to TF32 where there is a unit for it, to bf16 on a TPU
        ("A100-SXM-40GB", "matrix", "f32", "tf32", 156),
        ("MI300X", "matrix", "f32", "f32", 163.4),
        ("V100-SXM2-32GB", "matrix", "f32", "f32", 15.7),
        ("TPU-v4", "matrix", "f32", "bf16", 275),
        ("TPU-v4", "matrix", "f16", "bf16", 275),
        ("TPU-v3", "matrix", "i8", "bf16", 123),
        ("TPU-v7x", "matrix", "f32", "bf16", 2307),
        # other accelerators multiply float32 as it is
        ("Trainium-2", "matrix", "f32", "f32", 181),
        ("Gaudi-3", "matrix", "f32", "f32", 229.38),
        ("Gaudi-3", "matrix", "f16", "f16", 458.75),
        # float8 variants share one rate
        ("MI300X", "matrix", "f8E4M3FN", "f8E4M3FNUZ", 2614.9),
        ("H100-SXM", "matrix", "f8E4M3B11FNUZ", "f8E4M3FN", 1978.9),
        # next wider
        ("A100-SXM-40GB", "matrix", "f8E4M3FN", "f16", 312),
        ("H100-SXM", "matrix", "f4E2M1FN", "f8E4M3FN", 1978.9),
        ("H100-SXM", "matrix", "nvfp4", "f8E4M3FN", 1978.9),
        ("TPU-v6e", "matrix", "f8E5M2", "bf16", 918),
        ("H100-SXM", "matrix", "i2", "i8", 1978.9),
        ("V100-SXM2-32GB", "matrix", "bf16", "f32", 15.7),
        ("H100-SXM", "matrix", "c64", "tf32", 494.7),
        ("H100-SXM", "matrix", "complex128", "f64", 66.9),
        # no such matrix unit at all
        ("H100-SXM", "matrix", "i32", "i32", 33.5),
        # vector unit
        ("H100-SXM", "vector", "i1", "i32", 33.5),
        ("H100-SXM", "vector", "f8E4M3FN", "f16", 133.8),
        ("H100-SXM", "vector", "i64", "i32", 33.5 / 2),
        ("MI300X", "vector", "i32", "f32", 163.4),
        ("TPU-v4", "vector", "bf16", "f32", 4.3),
    ],
)
def test_rate_and_the_key_it_came_from(device: str, unit: Unit, dtype: str, used: str, tflops: float) -> None:
    choice = peak_for(load_device(device), unit, dtype)
    assert choice.peak.dtype == used
    assert isclose(choice.flops_per_s, tflops * 1e12)


def test_operand_type_decides_not_the_accumulator() -> None:
    """An 8192^3 bf16 product with a float32 result takes 3,524 us of A100, not 7,048."""
    device = load_device("A100-SXM-40GB")
    rates = {peak_for(device, "matrix", "bf16", accumulator=acc).flops_per_s for acc in ("", "f32", "bf16")}
    assert rates == {312e12}
    assert isclose(2 * 8192**3 / 312e12 * 1e6, 3524, rel_tol=1e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "wide", "narrow"),
    [
        ("RTX-3090", "f16", 71.0, 142.0),
        ("RTX-4090", "f16", 165.2, 330.3),
        ("RTX-4090", "f8E4M3FN", 330.3, 660.6),
        ("RTX-5090", "f8E5M2", 419.0, 838.0),
    ],
)
def test_geforce_is_asked_for_accumulators_of_float32(
    device: str, dtype: str, wide: float, narrow: float
) -> None:
    """Frameworks accumulate in float32; the doubled rate is for who asks for less."""
    found = load_device(device)
    assert peak_for(found, "matrix", dtype).flops_per_s == wide * 1e12
    assert peak_for(found, "matrix", dtype, accumulator="f32").flops_per_s == wide * 1e12
    assert peak_for(found, "matrix", dtype, accumulator="f16").flops_per_s == narrow * 1e12


def test_accumulator_separates_rows_that_differ_in_nothing_else() -> None:
    device = load_device("L4")
    slow = Peak(
        unit="matrix", dtype="f16", accumulator="f16", flops_per_s=1e12, density="dense", source="datasheet"
    )
    device = replace(device, peaks=(*device.peaks, slow))
    assert peak_for(device, "matrix", "f16", accumulator="f16").peak is slow
    assert peak_for(device, "matrix", "f16", accumulator="f32").flops_per_s == 121e12
    assert peak_for(device, "matrix", "f16").flops_per_s == 121e12


def test_emulated_float32_products() -> None:
    """Six bf16 passes on a TPU; real float32 where the device has it."""
    tpu = peak_for(load_device("TPU-v4"), "matrix", "f32", products=6)
    assert (tpu.peak.dtype, tpu.products) == ("bf16", 6)
    assert isclose(tpu.flops_per_s, 275e12 / 6)
    gpu = peak_for(load_device("A100-SXM-40GB"), "matrix", "f32", products=6)
    assert (gpu.peak.unit, gpu.peak.dtype, gpu.flops_per_s, gpu.products) == ("vector", "f32", 19.5e12, 1)
    amd = peak_for(load_device("MI300X"), "matrix", "f32", products=3)
    assert (amd.peak.unit, amd.flops_per_s) == ("matrix", 163.4e12)
    named = peak_for(load_device("H100-SXM"), "matrix", "bf16", products=3)
    assert isclose(named.flops_per_s, 989.4e12 / 3)


def test_choice_says_what_stood_in() -> None:
    device = load_device("A100-SXM-40GB")
    exact = peak_for(device, "matrix", "bf16")
    assert (exact.exact, exact.rule) == (True, "bf16 on matrix")
    widened = peak_for(device, "matrix", "i32")
    assert (widened.exact, widened.rule) == (False, "i32 on matrix: rate of i32 on vector")
    assert not peak_for(device, "matrix", "f8E4M3FN").exact


def test_sparse_peaks_are_never_used() -> None:
    device = load_device("H100-SXM")
    sparse = Peak(unit="matrix", dtype="bf16", flops_per_s=1978.9e12, density="sparse", source="datasheet")
    assert peak_for(replace(device, peaks=(sparse, *device.peaks)), "matrix", "bf16").flops_per_s == 989.4e12
    with pytest.raises(UnsupportedError):
        peak_for(replace(device, peaks=(sparse,)), "matrix", "bf16")


@pytest.mark.parametrize("unit", ["matrix", "vector"])
def test_missing_rate_names_the_ones_there_are(unit: Unit) -> None:
    with pytest.raises(UnsupportedError, match="TPU-v4 has no rate for f64") as caught:
        peak_for(load_device("TPU-v4"), unit, "f64")
    assert "matrix bf16, matrix i8, vector f32" in str(caught.value.hint)


@pytest.mark.parametrize("dtype", ["f12", "", "token", "opaque"])
def test_unknown_type_names_the_known_ones(dtype: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        peak_for(load_device("TPU-v4"), "matrix", dtype)
    assert "f8E4M3FN" in str(caught.value.hint)


@pytest.mark.parametrize("unit", ["matrix", "vector"])
def test_every_element_type_has_a_rate_on_a_gpu(unit: Unit) -> None:
    """A new type in the hub's table must get a row here."""
    device = load_device("H100-SXM")
    for entry in DTYPES:
        if entry.kind not in (DTypeKind.TOKEN, DTypeKind.OPAQUE):
            assert peak_for(device, unit, entry.name).flops_per_s > 0


def test_tables_start_with_the_type_itself_and_end_in_known_classes() -> None:
    known = set(VECTOR_FALLBACKS)
    for table in (MATRIX_FALLBACKS, TPU_MATRIX_FALLBACKS, VECTOR_FALLBACKS):
        for wanted, classes in table.items():
            assert classes[0] == wanted or wanted in ("i1", "tf32")
            assert set(classes) <= known
