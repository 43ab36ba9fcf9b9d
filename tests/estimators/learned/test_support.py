"""Distance of an operation to the fitted rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.learned.extrapolation import distances
from hespas.estimators.learned.inference import Learned
from hespas.estimators.rates import peak_times
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device
from hespas.operations import Labels, build


def test_the_nearest_seen_size_counts() -> None:
    random = np.random.default_rng(7)
    seen = random.integers(-1, 121, (50_000, 3)).astype(np.int8)
    asked = random.integers(-1, 121, (40, 3))
    expected = [np.abs(seen - each).max(axis=1).min() for each in asked]
    assert distances(seen, np.repeat(asked, 2, axis=0)).tolist() == np.repeat(expected, 2).tolist()


def test_where_nothing_was_seen_all_is_far() -> None:
    assert distances(np.zeros((0, 2), np.int8), np.zeros((3, 2), np.int64)).tolist() == [np.inf] * 3


@pytest.mark.parametrize(("name", "least", "most"), [("TPU-v4", 0.7, 0.9), ("H100-SXM", -0.1, 0.1)])
def test_sizes_of_unmeasured_alignment_widen_intervals_on_tpus(name: str, least: float, most: float) -> None:
    m, n, k = np.array([[512.0, 500.0], [512.0, 512.0], [512.0, 512.0]])
    ops = build.matmuls(Labels.constant("f16", 2), batch=np.ones(2), m=m, n=n, k=k)
    said = Learned().predict(ops, load_device(name))
    aligned, unaligned = np.log(said.high_ns / said.low_ns)
    assert least < unaligned - aligned < most


@pytest.mark.parametrize("name", ["MI300X", "MI355X"])
def test_experts_of_4_bits_take_the_time_of_8_bits_less_what_the_data_sheet_saves(name: str) -> None:
    device, tokens = load_device(name), np.array([1.0, 8.0, 64.0, 512.0, 4096.0])
    one = np.ones(len(tokens))
    times: list[FloatArray] = []
    for scheme in ("a4w4_mxfp4", "a8w8_fp8"):
        ops = build.mixtures_of_experts(
            Labels.constant(scheme, len(tokens)),
            op=Labels.constant("balanced", len(tokens)),
            tokens=tokens, hidden=7168 * one, inter=2048 * one, topk=8 * one, experts=256 * one,
            tensor_parallel=8 * one, expert_parallel=one, matrices=3 * one,
        )  # fmt: skip
        said = Learned().predict(ops, device)
        peaks = peak_times(ops, device)
        times.append(said.duration_ns - np.fmax(peaks.arithmetic_ns, peaks.memory_ns))
        assert np.isfinite([said.low_ns, said.duration_ns, said.high_ns]).all()
    np.testing.assert_allclose(times[0], times[1], rtol=0.02)


_PROTOTYPE = """name = "New-1"
vendor = "NVIDIA"
family = "prototype"
kind = "gpu"
description = "a prototype"
units = 132
unit_name = "core"
launch_overhead_ns = 1000.0
launch_overhead_source = "plan"
subbyte_storage = "packed"
arch = "sm_80"
boost_clock_hz = 1.9e9
boost_clock_source = "plan"
tdp_w = 700.0
tdp_source = "plan"
peaks = [
  { unit = "matrix", dtype = "bf16", flops_per_s = 1e15, density = "dense", source = "plan" },
  { unit = "vector", dtype = "bf16", flops_per_s = 60e12, density = "dense", source = "plan" },
  { unit = "vector", dtype = "f32", flops_per_s = 60e12, density = "dense", source = "plan" },
]
memories = [
  { level = "main", name = "HBM", capacity_bytes = -1, bandwidth_bytes_per_s = 0.6e12, source = "plan" },
  { level = "cache", name = "L2", capacity_bytes = 50000000, bandwidth_bytes_per_s = nan, source = "plan" },
]
links = []
sources = { plan = "a plan" }
"""


def test_a_stand_in_format_needs_a_rate_of_its_own(tmp_path: Path) -> None:
    """A device without a peak in f16 takes no model of f16 for matmuls in bf16."""
    path = tmp_path / "new.toml"
    path.write_text(_PROTOTYPE, encoding="utf-8")
    size = np.full(1, 8192.0)
    ops = build.matmuls(Labels.constant("bf16", 1), batch=np.ones(1), m=size, n=size, k=size)
    roof_ns = 2 * 8192.0**3 / 1e6
    assert roof_ns < Learned().predict(ops, load_device(path)).duration_ns[0] < 5 * roof_ns
