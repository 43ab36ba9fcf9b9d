"""Convolutions of few channels, or of channels that are apart: implicit products compute whole blocks of
contiguous channels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.costs.aten import aten_cost
from hespas.costs.operation import add_costed
from hespas.estimators.learned import Learned
from hespas.estimators.learned.equivalents import as_products, reordering_ns
from hespas.graph import GraphBuilder, OpClass, OpGraph, Workload
from hespas.hardware import load_device
from hespas.operations import Labels, Operations, build, operations_of


def patches(channels: list[float], scheme: str = "bf16") -> Operations:
    one = np.ones(len(channels))
    return build.convolutions(
        Labels.constant(scheme, len(channels)),
        images=128 * one,
        in_channels=np.array(channels),
        out_channels=768 * one,
        kernel=16 * one,
        in_size=224 * one,
        out_size=14 * one,
    )


@pytest.mark.parametrize(
    ("device", "scheme", "block"),
    [
        ("H100-SXM", "bf16", 32),
        ("A100-SXM-80GB", "f32", 16),
        ("H100-SXM", "f8E4M3FN", 64),
        ("MI300X", "bf16", 8),
        ("TPU-v4", "bf16", 1),
    ],
)
def test_the_last_block_of_channels_is_computed_in_full(device: str, scheme: str, block: int) -> None:
    channels = [1.0, 3.0, float(block), block + 1.0, 3.0 * block]
    depth = as_products(patches(channels, scheme), load_device(device)).dim("k")
    blocks = np.ceil(np.array(channels) / block)
    # Kernels for partly filled blocks have the instructions of the architecture before Hopper.
    rate = np.where(blocks * block > channels, 0.629 if "H100" in device else 1.0, 1.0)
    np.testing.assert_allclose(depth, 256 * block * blocks / rate)


def test_unknown_channels_leave_the_depth_as_it_is() -> None:
    ops = patches([3.0])
    known = {name: column for name, column in ops.dims.items() if name != "channels"}
    plain = replace(ops, dims=known)
    assert as_products(plain, load_device("H100-SXM")).dim("k").tolist() == [768.0]


def test_a_program_states_the_channels_of_its_convolutions() -> None:
    program = Path(__file__).parents[3] / "fixtures" / "stablehlo" / "cnn_train.mlir"
    workload = hespas.read(program)
    assert isinstance(workload, Workload)
    graph = workload.classes[0]
    channels = operations_of(graph).dim("channels")
    stem = int(np.flatnonzero(graph.op_class == OpClass.CONVOLUTION)[0])
    assert channels[stem] == 3.0
    assert np.isnan(channels[graph.op_class != OpClass.CONVOLUTION]).all()


CONTIGUOUS, CHANNELS_LAST = [12544, 196, 14, 1], [12544, 1, 896, 64]


def layer(strides: list[int], kind: str = "c10::BFloat16", groups: int = 1, channels: int = 64) -> OpGraph:
    """Return a recorded convolution of 256 images of 64 channels (or another number) by 64 x 3 x 3."""
    found = aten_cost(
        "aten::cudnn_convolution",
        json.dumps([[256, channels, 14, 14], [64, channels // groups, 3, 3], *[[]] * 7]),
        json.dumps([kind, kind, *["ScalarList"] * 3, *["Scalar"] * 4]),
        strides=json.dumps([strides, [9 * channels // groups, 9, 3, 1], *[[]] * 7]),
        values=json.dumps(["", "", "[1, 1]", "[1, 1]", "[1, 1]", str(groups), "False", "False", "True"]),
    )
    made = GraphBuilder("one")
    name = "aten::cudnn_convolution"
    add_costed(made, name, found.cost, operands=found.operands, results=found.results)
    return made.build()


@pytest.mark.parametrize("device", ["H100-SXM", "MI300X"])
def test_images_without_contiguous_channels_are_copied_there_and_back(device: str) -> None:
    target = load_device(device)
    moved = 2 * (2 * 256 * 64 * 196 + 64 * 576)
    first, last = (operations_of(layer(strides)) for strides in (CONTIGUOUS, CHANNELS_LAST))
    assert (first.dim("reordered").tolist(), last.dim("reordered").tolist()) == ([moved], [0.0])
    times = [float(Learned().predict(ops, target).duration_ns[0]) for ops in (first, last)]
    bytes_per_ns = target.main_memory.bandwidth_bytes_per_s / 1e9
    assert times[0] - times[1] == pytest.approx(2 * moved / (0.5 * bytes_per_ns))


def test_images_of_one_channel_are_contiguous_in_any_order() -> None:
    assert operations_of(layer([196, 196, 14, 1], channels=1)).dim("reordered").tolist() == [0.0]
    assert operations_of(layer([588, 196, 14, 1], channels=3)).dim("reordered").tolist() != [0.0]


def test_single_precision_and_groups_are_not_copied() -> None:
    of_groups = operations_of(layer(CONTIGUOUS, groups=64))
    assert np.nan_to_num(of_groups.dim("reordered")).tolist() == [0.0]
    single = operations_of(layer(CONTIGUOUS, "float"))
    assert reordering_ns(single, load_device("H100-SXM")).tolist() == [0.0]
    wide = operations_of(layer(CONTIGUOUS))
    assert reordering_ns(wide, load_device("TPU-v4")).tolist() == [0.0]


@pytest.mark.parametrize(("layout", "copied"), [("{3,2,1,0}", True), ("{1,3,2,0}", False)])
def test_a_library_call_states_the_order_of_its_images(tmp_path: Path, layout: str, copied: bool) -> None:
    program = tmp_path / "convolution.hlo.txt"
    program.write_text(
        f"""HloModule m, is_scheduled=true

ENTRY e {{
  x = bf16[256,64,14,14]{layout} parameter(0)
  w = bf16[128,64,3,3]{layout} parameter(1)
  c = (bf16[256,128,14,14]{layout}, u8[0]{{0}}) custom-call(x, w), window={{size=3x3 pad=1_1x1_1}}, \
dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$convForward"
  ROOT r = bf16[256,128,14,14]{layout} get-tuple-element(c), index=0
}}
"""
    )
    workload = hespas.read(program)
    assert isinstance(workload, Workload)
    reordered = np.nan_to_num(operations_of(workload.classes[0]).dim("reordered")).sum()
    assert reordered == (2 * (256 * 192 * 196 + 128 * 576) if copied else 0)
