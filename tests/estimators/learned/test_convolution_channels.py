"""Convolutions of few input channels: kernels of implicit products compute whole blocks of channels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.estimators.learned.equivalents import as_products
from hespas.graph import OpClass, Workload
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
    np.testing.assert_array_equal(depth, 256 * block * blocks)


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
