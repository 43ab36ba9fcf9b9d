"""What training kernels are taken to reach, and the systems that rows stand in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.estimators import load_estimator
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model_file import load_model
from hespas.generators.llm.published import PublishedRun
from hespas.generators.llm.settings import Training, precision_of
from hespas.generators.llm.stage import stage_passes
from hespas.graph import Diagnostics, OpClass, OpGraph
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, load_device
from hespas.hardware.peaks import peak_for
from hespas.validators.league.kernels import (
    attention_library,
    in_16_bits,
    trained_times,
    variant_of,
)
from hespas.validators.league.places import system_of
from hespas.validators.league.runs import issue_ns


def run(layout: Layout | None = None, **cells: str) -> PublishedRun:
    """A run with these cells."""
    training = Training(seq=4096, global_batch=8)
    row = {"accelerator": "H100-SXM", **cells}
    return PublishedRun(
        model=load_model("Llama-3-8B"),
        layout=layout or Layout(dp=8),
        training=training,
        row=row,
        place="here",
    )


def graph(precision: str) -> OpGraph:
    whole = load_model("Llama-3-8B")
    training = Training(seq=4096, global_batch=8, precision=precision_of(precision))
    return stage_passes(replace(whole, layers=whole.layers[:1]), Layout(dp=8), training, 0).graph


def rates(precision: str, device: Device) -> FloatArray:
    """Of the products in the format of the precision, the share of their peak."""
    found = graph(precision)
    said = load_estimator("composite").estimate(in_16_bits(found, device), device, Diagnostics())
    times = trained_times(found, device, "cudnn", said.duration_ns, variant_of(run(), device))
    table = found.contractions
    name = precision_of(precision).matmul
    peak = peak_for(device, "matrix", name).flops_per_s
    mine = [
        found.types.dtype_of(int(found.operands.values[found.operands.offsets[node]])) for node in table.node
    ]
    rows = np.array([kind is not None and kind.name == name for kind in mine])
    share: FloatArray = table.flops[rows] / times[table.node[rows]] * 1e9 / peak
    return share


@pytest.mark.parametrize("device", ["H100-SXM", "B200-SXM", "GB200"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-current", "mxfp8"])
def test_large_products_reach_half_of_their_peak_and_not_all(device: str, precision: str) -> None:
    hardware = load_device(device)
    if precision == "mxfp8" and hardware.family == "Hopper":
        pytest.skip("a Hopper device has no mxfp8")
    found = rates(precision, hardware)
    assert 0.3 < float(np.median(found)) < 0.72
    assert found.max() < 0.75


def test_products_of_devices_that_were_measured_in_a_format_stay() -> None:
    found, device = graph("fp8-current"), load_device("MI300X")
    assert in_16_bits(found, device) is found


def test_attention_is_faster_with_more_keys_and_in_a_newer_library() -> None:
    found, device = graph("bf16"), load_device("H100-SXM")
    nodes = np.flatnonzero(found.op_class == int(OpClass.ATTENTION))
    blank = np.ones(len(found))
    times = {
        library: trained_times(found, device, library, blank, variant_of(run(), device))[nodes]
        for library in ("flash1", "flash2", "cudnn")
    }
    assert (times["flash1"] > times["flash2"]).all()
    assert (times["flash2"] > times["cudnn"]).all()
    assert trained_times(found, device, "measured", blank, variant_of(run(), device))[nodes].tolist() == [
        1.0
    ] * len(nodes)


def test_a_power_limit_and_another_memory_slow_what_they_limit() -> None:
    device = load_device("H100-SXM")
    row = run(accelerator_variant="H100 variant: 96 GB HBM2e, 2.4 TB/s, 500 W power limit")
    found = variant_of(row, device)
    assert found.rate == pytest.approx((500 / 700) ** 0.5)
    assert found.bandwidth == pytest.approx(2.4 / 3.35)
    assert variant_of(run(), device) == variant_of(run(accelerator_variant="as it is"), device)


@pytest.mark.parametrize(
    ("accelerator", "framework", "library"),
    [
        ("H100-SXM", "Megatron-Bridge (NeMo 25.09)", "cudnn"),
        ("A100-SXM-80GB", "Megatron-LM (2021-04)", "measured"),
        ("H100-SXM", "llm-foundry/Composer (PyTorch FSDP)", "flash1"),
        ("MI300X", "PyTorch", "measured"),
        ("TPU-v5e", "MaxText (JAX)", "splash"),
    ],
)
def test_whose_attention_runs(accelerator: str, framework: str, library: str) -> None:
    found = run(accelerator=accelerator, framework=framework)
    assert attention_library(found, load_device(accelerator)) == library


def test_graphs_and_programs_take_no_time_of_the_host() -> None:
    device = load_device("H100-SXM")
    times = [issue_ns(run(notes=notes), device) for notes in ("", "cuda graphs none", "cuda graphs")]
    assert times[0] == times[1] > times[2] == 0.0
    partly = issue_ns(run(notes="cuda graphs transformer_engine; graph scope attn"), device)
    assert 0.0 < partly < times[0]
    assert issue_ns(run(), load_device("TPU-v5e")) == 0.0


@pytest.mark.parametrize(
    ("accelerator", "ranks", "shape"),
    [
        ("H100-SXM", 64, (8, 8)),
        ("GB200", 256, (64, 4)),
        ("GB200", 64, (64, 1)),
        ("GB200", 144, (72, 2)),
        ("TPU-v5e", 1024, (16, 16, 4)),
        ("MI355X", 64, (8, 8)),
        ("L40S", 16, (8, 2)),
    ],
)
def test_ranks_fill_systems_evenly(accelerator: str, ranks: int, shape: tuple[int, ...]) -> None:
    found = system_of(run(Layout(dp=ranks), accelerator=accelerator), None, load_device(accelerator))
    assert found.shape == shape
    assert found.devices == ranks


def test_nodes_of_fewer_devices_than_the_system_has() -> None:
    row = run(Layout(dp=16), gpus_per_node="4")
    assert system_of(row, None, load_device("H100-SXM")).shape == (4, 4)
