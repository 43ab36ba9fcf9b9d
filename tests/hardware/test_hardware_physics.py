"""Physical limits of devices: contradictory figures in a file are an error in the file.

Only rows that a file states are compared, never what stands in for a type it lacks.
"""

from __future__ import annotations

from itertools import pairwise
from math import isnan

import pytest

from hespas.hardware import Device, device_names, load_device
from hespas.hardware.devices import Unit

_ROUNDING = 1.02
"""Data sheets round each figure by itself."""


@pytest.fixture(params=device_names())
def device(request: pytest.FixtureRequest) -> Device:
    return load_device(str(request.param))


def _rates(device: Device, unit: Unit) -> dict[str, float]:
    """The highest rate of each operand type that the file states on a unit [FLOP/s]."""
    rates: dict[str, float] = {}
    for peak in device.peaks:
        if peak.unit == unit and not peak.rhs_dtype:
            rates[peak.dtype] = max(peak.flops_per_s, rates.get(peak.dtype, 0.0))
    return rates


def test_matrix_unit_is_no_slower_than_the_vector_unit_on_the_same_type(device: Device) -> None:
    matrix, vector = _rates(device, "matrix"), _rates(device, "vector")
    slower = [name for name in matrix.keys() & vector.keys() if matrix[name] < vector[name]]
    assert slower == []


_SLOW_INTEGERS = {"B300-SXM", "GB300"}  # whose space went to FP4
_NO_INTEGER_UNITS = {
    name for name in device_names() if name.startswith("V100")
}  # a dot product of CUDA cores


def test_narrower_operands_are_no_slower_and_a_sparse_rate_would_show(device: Device) -> None:
    """Half the width is at most twice the rate: more is the rate with 2:4 sparsity. FP4 may be thrice FP8."""
    same, fastest = _by_width(device, {"", "f32", "i32"}), _by_width(device, {"", "f16", "f32", "i32"})
    for rates, wide, narrow, most in (
        (same, "16", "f8", 2.0),
        (same, "f8", "f6", 2.0),
        (fastest, "f8", "f4", 3.2),  # GeForce holds back FP8, not FP4, with FP32 accumulators
        (same, "i8", "i4", 2.0),
    ):
        if wide in rates and narrow in rates:
            ratio = rates[narrow] / rates[wide]
            assert 1 / _ROUNDING <= ratio <= most * _ROUNDING, f"{narrow} is {ratio:.2f} times {wide}"


_WIDTHS = {"bf16": "16", "f16": "16", "f8E": "f8", "f6E": "f6", "f4E": "f4", "i8": "i8", "i4": "i4"}


def _by_width(device: Device, accumulators: set[str]) -> dict[str, float]:
    """The highest rate of the matrix unit for operands of each width, with some accumulators [FLOP/s]."""
    rates: dict[str, float] = {}
    for peak in device.peaks:
        width = _WIDTHS.get(peak.dtype) or _WIDTHS.get(peak.dtype[:3])
        if peak.unit == "matrix" and not peak.rhs_dtype and width and peak.accumulator in accumulators:
            rates[width] = max(peak.flops_per_s, rates.get(width, 0.0))
    return rates


def test_bytes_multiply_at_the_rate_of_half_precision_to_twice_that(device: Device) -> None:
    """By the fastest of half precision: on GeForce that is with half-precision accumulators."""
    rates = _rates(device, "matrix")
    half = max(rates.get("bf16", 0.0), rates.get("f16", 0.0))
    if "i8" not in rates or not half:
        return
    assert rates["i8"] <= 2.0 * half * _ROUNDING
    if device.name not in _SLOW_INTEGERS | _NO_INTEGER_UNITS:
        assert rates["i8"] * _ROUNDING >= half


def test_a_wider_accumulator_is_never_faster(device: Device) -> None:
    narrow = {p.dtype: p.flops_per_s for p in device.peaks if (p.unit, p.accumulator) == ("matrix", "f16")}
    wide = {p.dtype: p.flops_per_s for p in device.peaks if (p.unit, p.accumulator) == ("matrix", "f32")}
    assert narrow.keys() <= wide.keys()
    assert all(wide[name] <= narrow[name] for name in narrow)


def test_double_precision_costs_at_least_what_single_does(device: Device) -> None:
    vector = _rates(device, "vector")
    assert vector.get("f64", 0.0) <= vector["f32"]


def test_a_cache_is_smaller_and_no_slower_than_what_it_caches(device: Device) -> None:
    levels = [memory for memory in device.memories if memory.level == "cache" and memory.capacity_bytes > 0]
    levels.sort(key=lambda memory: memory.capacity_bytes, reverse=True)
    levels.insert(0, device.main_memory)
    assert all(small.capacity_bytes < large.capacity_bytes for large, small in pairwise(levels))
    stated = [each.bandwidth_bytes_per_s for each in levels if not isnan(each.bandwidth_bytes_per_s)]
    assert stated == sorted(stated)
    for memory in device.memories:
        if memory.level == "scratchpad" and not isnan(memory.bandwidth_bytes_per_s):
            assert memory.bandwidth_bytes_per_s >= device.main_memory.bandwidth_bytes_per_s


def test_a_cache_bandwidth_says_where_it_is_from(device: Device) -> None:
    """Few makers publish one: a figure that is derived or measured says so, and from what."""
    for memory in device.memories:
        if memory.level == "cache" and not isnan(memory.bandwidth_bytes_per_s):
            told = memory.note + device.source_text(memory.source)
            assert any(word in told for word in ("derived", "measured", "assum", "TB/s")), memory.name


def test_no_link_outruns_the_memory_it_reads(device: Device) -> None:
    memory = device.main_memory.bandwidth_bytes_per_s
    assert all(link.bandwidth_bytes_per_s < memory for link in device.links)


# FP32 lanes of a streaming multiprocessor, by family; NVIDIA's white papers.
_LANES = {"Pascal": 64, "Volta": 64, "Turing": 64}
_LANES_OF = {"P4": 128, **{name: 64 for name in device_names() if name.startswith("A100")}}
_MOST_LANES = 128


def test_the_vector_rate_is_lanes_times_a_clock_that_silicon_has(device: Device) -> None:
    """A wrong count of multiprocessors or a rate with sparsity gives a clock that no such chip runs at."""
    if device.vendor != "NVIDIA":
        return
    lanes = _LANES_OF.get(device.name, _LANES.get(device.family, _MOST_LANES))
    clock_hz = _rates(device, "vector")["f32"] / (2.0 * lanes * device.units)
    assert 1.0e9 <= clock_hz <= 2.6e9


_NARROWING = (("f32", "f16"), ("f16", "bf16"), ("bf16", "i8"))


def test_arithmetic_energy_falls_with_the_width_and_fits_the_power_of_the_board(device: Device) -> None:
    energy: dict[str, float] = {}
    for peak in device.peaks:
        if not isnan(peak.energy_pj_per_flop):
            energy[peak.dtype] = peak.energy_pj_per_flop
            power_w = peak.energy_pj_per_flop * 1e-12 * peak.flops_per_s
            assert isnan(device.tdp_w) or power_w <= device.tdp_w, peak.dtype
    for wide, narrow in _NARROWING:
        if wide in energy and narrow in energy:
            assert energy[narrow] <= energy[wide]
    main = device.main_memory
    if not isnan(main.energy_pj_per_byte):
        assert all(cost < main.energy_pj_per_byte for cost in energy.values())
        assert (
            isnan(device.tdp_w)
            or main.energy_pj_per_byte * 1e-12 * main.bandwidth_bytes_per_s <= device.tdp_w
        )
