"""Which sizes an operation of a graph is estimated by."""

from __future__ import annotations

from pathlib import Path

import pytest

import hespas
from hespas.graph import Workload
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
