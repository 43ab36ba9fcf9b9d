"""XLA for real: a small program compiled and timed on this machine's CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas import read
from hespas.estimators.compiled import Xla
from hespas.estimators.compiled.measuring import Session
from hespas.graph import Diagnostics, Workload
from hespas.hardware import load_device

PROGRAM = """
func.func @main(%a: tensor<32x64xf32>, %b: tensor<64x16xf32>) -> tensor<32x16xf32> {
  %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<32x64xf32>, tensor<64x16xf32>) -> tensor<32x16xf32>
  %d = stablehlo.tanh %c : tensor<32x16xf32>
  %e = stablehlo.multiply %d, %d : tensor<32x16xf32>
  %f = stablehlo.multiply %e, %c : tensor<32x16xf32>
  return %f : tensor<32x16xf32>
}
"""


def test_a_program_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = tmp_path / "p.mlir"
    path.write_text(PROGRAM)
    workload = read(path)
    assert isinstance(workload, Workload)
    graph = workload.classes[0]
    model, found = Xla(cache=str(tmp_path / "kept"), repeats=2), Diagnostics()
    first = model.estimate(graph, load_device("H100-SXM"), found)
    costs = graph.bytes_moved > 0
    assert (first.duration_ns[costs] > 0).all()
    assert (first.duration_ns[~costs] == 0).all()
    assert found.counts() == {"xla.measured": 1, "xla.other-device": 1}

    def refuse(self: Session, job: object) -> object:
        raise AssertionError("measured again")

    monkeypatch.setattr(Session, "time", refuse)
    again = model.estimate(graph, load_device("H100-SXM"))
    assert np.array_equal(again.duration_ns, first.duration_ns)
