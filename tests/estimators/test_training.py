"""Rates of the kernels of a training step, by family of devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from hespas.estimators import load_estimator
from hespas.estimators.interface import Estimator
from hespas.estimators.training import Training as TrainingKernels
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model_file import load_model
from hespas.generators.llm.settings import Training, precision_of
from hespas.generators.llm.step import stage_passes
from hespas.graph import Diagnostics, OpClass, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.graph.workload import Launch
from hespas.hardware import Device, load_device
from hespas.hardware.kernel_shares import training_shares
from hespas.hardware.peaks import peak_for


def graph(precision: str = "bf16", seq: int = 4096) -> OpGraph:
    whole = load_model("Llama-3-8B")
    training = Training(seq=seq, global_batch=8, precision=precision_of(precision))
    return stage_passes(replace(whole, layers=whole.layers[:1]), Layout(dp=8), training, 0).graph


def times(model: Estimator, found: OpGraph, device: Device) -> FloatArray:
    return model.estimate(found, device, Diagnostics()).duration_ns


def rates(precision: str, device: Device) -> FloatArray:
    """Of the products in the format of the precision, the share of their peak."""
    found = graph(precision)
    table = found.contractions
    name = precision_of(precision).matmul
    peak = peak_for(device, "matrix", name).flops_per_s
    mine = [
        found.types.dtype_of(int(found.operands.values[found.operands.offsets[node]])) for node in table.node
    ]
    rows = np.array([kind is not None and kind.name == name for kind in mine])
    taken = times(TrainingKernels(), found, device)[table.node[rows]]
    share: FloatArray = table.flops[rows] / taken * 1e9 / peak
    return share


@pytest.mark.parametrize("device", ["H100-SXM", "B200-SXM", "GB200", "L40S", "TPU-v5p"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-current", "mxfp8"])
def test_large_products_reach_a_good_part_of_their_peak_and_not_all(device: str, precision: str) -> None:
    hardware = load_device(device)
    if precision != "bf16" and hardware.family not in {"Blackwell", "Hopper", "Ada"}:
        pytest.skip("not a format of the device")
    if precision == "mxfp8" and hardware.family != "Blackwell":
        pytest.skip("a format of Blackwell devices")
    found = rates(precision, hardware)
    assert 0.3 < float(np.median(found)) < 0.93
    assert found.max() < 0.95


@pytest.mark.parametrize("device", ["H100-SXM", "B200-SXM", "V100-SXM2-16GB"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-current"])
@pytest.mark.parametrize("seq", [16, 128, 512])
def test_no_kernel_beats_the_memory_or_its_start(device: str, precision: str, seq: int) -> None:
    found, hardware = graph(precision, seq), load_device(device)
    taken = times(TrainingKernels(), found, hardware)
    moved_ns = found.bytes_moved / hardware.main_memory.bandwidth_bytes_per_s * 1e9
    heavy = np.isin(found.op_class, (int(OpClass.CONTRACTION), int(OpClass.ATTENTION)))
    assert (taken[heavy] >= moved_ns[heavy] * 0.999).all()
    assert (taken[heavy] >= hardware.launch_overhead_ns).all()


def test_devices_that_were_measured_in_a_format_keep_their_times() -> None:
    found, device = graph("fp8-current"), load_device("MI300X")
    assert (
        times(TrainingKernels(), found, device).tolist()
        == times(load_estimator("composite"), found, device).tolist()
    )


def test_attention_is_faster_in_a_newer_library() -> None:
    found, device = graph(), load_device("H100-SXM")
    nodes = np.flatnonzero(found.op_class == int(OpClass.ATTENTION))
    taken = {
        library: times(TrainingKernels(attention=library), found, device)[nodes]
        for library in ("", "flash1", "flash2", "cudnn", "measured")
    }
    assert (taken["flash1"] > taken["flash2"]).all()
    assert (taken["flash2"] > taken["cudnn"]).all()
    assert taken[""].tolist() == taken["cudnn"].tolist()
    assert taken["measured"].tolist() == times(load_estimator("composite"), found, device)[nodes].tolist()


def test_scales_of_blocks_cost_something() -> None:
    device = load_device("B200-SXM")
    one, many = (float(np.median(rates(precision, device))) for precision in ("fp8-current", "mxfp8"))
    share = training_shares(device).products_of(8)
    assert share is not None
    assert many == pytest.approx(share.of_blocks * one, rel=0.01)
    assert many < one


def test_a_power_limit_and_another_memory_slow_what_they_limit() -> None:
    found, device = graph(), load_device("H100-SXM")
    plain = times(TrainingKernels(), found, device)
    slower = times(TrainingKernels(power_w=device.tdp_w / 4, bandwidth=0.5), found, device)
    heavy = np.isin(found.op_class, (int(OpClass.CONTRACTION), int(OpClass.ATTENTION)))
    talks = np.isin(found.op_class, (int(OpClass.COLLECTIVE), int(OpClass.P2P)))
    ratio = slower[plain > 0] / plain[plain > 0]
    assert ratio == pytest.approx(np.where(talks, 1.0, 2.0)[plain > 0])
    apart = times(TrainingKernels(fused=False), found, device)
    assert (apart[heavy | talks] == plain[heavy | talks]).all()
    assert (apart[~heavy & ~talks] == 2.0 * plain[~heavy & ~talks]).all()


def test_an_estimate_says_who_said_what_and_keeps_its_intervals_around_it() -> None:
    found, device = graph(), load_device("H100-SXM")
    told = Diagnostics()
    said = TrainingKernels().estimate(found, device, told)
    assert said.estimators[-1] == "training"
    changed = said.estimator == len(said.estimators) - 1
    assert 0 < changed.sum() < len(found)
    bounded = ~np.isnan(said.low_ns)
    assert (said.low_ns[bounded] <= said.duration_ns[bounded]).all()
    assert (said.high_ns[bounded] >= said.duration_ns[bounded]).all()
    assert (said.high_ns[changed] >= 1.3 * said.duration_ns[changed] * 0.999).all()
    assert (said.low_ns[changed] <= said.duration_ns[changed] / 1.3 * 1.001).all()
    assert {"training.attention", "training.shares"} <= {each.code for each in told}


def test_options_that_cannot_be() -> None:
    for spelling in (
        *("training:attention=flash9", "training:base=training"),
        *(f"training:power_w={each}" for each in ("-1", "1e-3", "nan")),
        *(f"training:bandwidth={each}" for each in ("0", "1e-300", "900", "nan")),
    ):
        with pytest.raises(UsageError, match="training"):
            load_estimator(spelling)


def test_chunked_scans_take_their_traffic_or_their_arithmetic_at_least() -> None:
    whole = load_model("Mamba2-2.7B")
    training = Training(seq=4096, global_batch=1)
    found = stage_passes(replace(whole, layers=whole.layers[:1]), Layout(), training, 0).graph
    device, scans = load_device("H100-SXM"), found.op_id == found.strings.find("mamba_chunk_scan")
    assert scans.any()
    traffic_ns = found.bytes_moved[scans] / (0.2 * device.main_memory.bandwidth_bytes_per_s) * 1e9
    assert times(TrainingKernels(), found, device)[scans] == pytest.approx(traffic_ns)
    main = device.main_memory
    memory = structs.replace(main, bandwidth_bytes_per_s=1e3 * main.bandwidth_bytes_per_s)
    fast = replace(device, memories=(memory,))
    arithmetic_ns = times(load_estimator("roofline"), found, fast)[scans]
    assert (arithmetic_ns > traffic_ns / 1e3).all()
    assert (times(TrainingKernels(base="roofline"), found, fast)[scans] >= arithmetic_ns).all()


def experts(launch: Launch, layout: Layout, *, sorts: bool = False) -> tuple[OpGraph, FloatArray]:
    """Return a graph of Qwen3-30B-A3B, and the times of its matmuls of experts, or of sorting."""
    whole = load_model("Qwen3-30B-A3B")
    training = Training(seq=4096, global_batch=layout.dp, launch=launch)
    found = stage_passes(replace(whole, layers=whole.layers[:1]), layout, training, 0).graph
    duration = times(TrainingKernels(), found, load_device("H100-SXM"))
    names = {"moe_sort_chunks"} if sorts else {"aten::bmm", "aten::_grouped_mm"}
    nodes = [node for node in range(len(found)) if found.op_name(node) in names]
    return found, duration[nodes]


def test_separate_matmuls_of_experts_take_longer_than_one_grouped_kernel() -> None:
    layout = Layout(dp=8, ep=8)
    apart, whole = (experts(launch, layout)[1] for launch in ("kernels", "whole"))
    assert len(apart) == len(whole) == 6
    assert (apart > whole).all()


def test_small_matmuls_of_experts_lose_arithmetic_and_no_traffic() -> None:
    # 256 rows for each of 128 experts: the gradients of weights are limited by their traffic.
    layout, device = Layout(dp=1), load_device("H100-SXM")
    found, apart = experts("kernels", layout)
    whole = experts("whole", layout)[1]
    table = found.contractions
    rows = table.batch == 128
    least = np.minimum(np.minimum(table.m, table.n), table.k)[rows]
    share = training_shares(device).products_of(16)
    assert share is not None
    arithmetic_ns = (
        table.flops[rows] / (share.sustained * peak_for(device, "matrix", "bf16").flops_per_s) * 1e9
    )
    assert apart - whole == pytest.approx(arithmetic_ns * 1000 / least, rel=1e-6)
    assert (whole > 1.2 * arithmetic_ns).any()


def test_sorting_by_expert_takes_longer_than_its_traffic() -> None:
    found, taken = experts("kernels", Layout(dp=8, ep=8), sorts=True)
    moved = found.bytes_moved[[found.op_name(node) == "moe_sort_chunks" for node in range(len(found))]]
    least_ns = moved / load_device("H100-SXM").main_memory.bandwidth_bytes_per_s * 1e9
    assert len(taken) == 4
    assert taken == pytest.approx(least_ns / 0.4)
