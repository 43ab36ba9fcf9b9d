"""Sizes by which an operation of a graph is estimated."""

from __future__ import annotations

from pathlib import Path

import pytest

import hespas
from hespas.estimators.interface import OperationModel, operations_on, predict_with
from hespas.estimators.registry import load_estimator
from hespas.generators.llm import Layout, ServingStep, load_model
from hespas.graph import Diagnostics, Workload
from hespas.hardware import load_device
from hespas.operations.from_graph import operations_of

UPDATED = """func.func @main(%x: tensor<1024x2x1024xf32> {tf.aliasing_output = 0 : i32},
    %u: tensor<1x2x1024xf32>, %i: tensor<i32>) -> tensor<1024x2x1024xf32> {
  %0 = stablehlo.dynamic_update_slice %x, %u, %i, %i, %i : (tensor<1024x2x1024xf32>, tensor<1x2x1024xf32>,
    tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1024x2x1024xf32>
  return %0 : tensor<1024x2x1024xf32>
}
"""


@pytest.mark.parametrize(("donated", "rows"), [(True, 2.0), (False, 2048.0)])
def test_an_update_in_place_has_the_sizes_of_what_is_written(
    tmp_path: Path, donated: bool, rows: float
) -> None:
    """A copy of the whole tensor comes with it where its buffer may not be written over."""
    text = UPDATED if donated else UPDATED.replace("{tf.aliasing_output = 0 : i32}", "")
    path = tmp_path / "update.mlir"
    path.write_text(text)
    workload = hespas.read(path)
    assert isinstance(workload, Workload)
    graph = workload.classes[0]
    dims = operations_of(graph).dims
    (node,) = (at for at in range(len(graph)) if "dynamic_update_slice" in graph.op_name(at))
    assert (dims["rows"][node], dims["columns"][node]) == (rows, 1024.0)


def test_decoding_over_latents_is_attention_that_runs_on_matrix_units() -> None:
    step = ServingStep(model=load_model("DeepSeek-V3"), layout=Layout(tp=8), batch=16, context=8192)
    graph = step.workload().classes[0]
    ops = operations_of(graph)
    (row, *_) = [place for place in range(len(graph)) if graph.op_name(place).startswith("flash_mla::")]
    assert ops.kind[row] == "attention.generation"
    device = load_device("B200-SXM")
    on_device = operations_on(graph, device, num_ranks=8)
    # latents of 16 x 8,192 tokens in 16 bits are read once; vector units would take ten times that
    read = 16 * 8192 * 576 * 2 / device.main_memory.bandwidth_bytes_per_s * 1e9
    # operands are not packed sequences, whose second dimension would be heads
    for name in ("roofline", "composite"):
        model = load_estimator(name)
        assert isinstance(model, OperationModel)
        time = predict_with(model, on_device, device, Diagnostics()).duration_ns[row]
        assert read < time < 1.5 * read, name
