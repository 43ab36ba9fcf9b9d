"""A small program compiled and timed by XLA on the CPU of this machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas import read
from hespas.estimators.compiled import Xla
from hespas.estimators.compiled.measuring import Timing, TimingJob, WorkerSession
from hespas.graph import Diagnostics, NodeKind, OpGraph, Workload
from hespas.graph.errors import UsageError
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


def graph_of(text: str, folder: Path) -> OpGraph:
    path = folder / "p.mlir"
    path.write_text(text)
    workload = read(path)
    assert isinstance(workload, Workload)
    return workload.classes[0]


def test_a_program_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    graph = graph_of(PROGRAM, tmp_path)
    model, found = Xla(cache=str(tmp_path / "kept"), repeats=2), Diagnostics()
    first = model.estimate(graph, load_device("H100-SXM"), found)
    costs = graph.bytes_moved > 0
    assert (first.duration_ns[costs] > 0).all()
    assert (first.duration_ns[~costs] == 0).all()
    assert found.counts() == {"xla.measured": 1, "xla.other-device": 1}

    def refuse(self: WorkerSession, job: object) -> object:
        raise AssertionError("measured again")

    monkeypatch.setattr(WorkerSession, "time", refuse)
    again = model.estimate(graph, load_device("H100-SXM"))
    assert np.array_equal(again.duration_ns, first.duration_ns)


TALKING = """
func.func @main(%a: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %b = "stablehlo.all_reduce"(%a) ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %s = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<64x64xf32>) -> tensor<64x64xf32>
  %c = stablehlo.tanh %b : tensor<64x64xf32>
  return %c : tensor<64x64xf32>
}
"""


def test_devices_of_this_machine_run_a_region_at_once_and_talk_to_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jax")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    graph = graph_of(TALKING, tmp_path)
    known = {
        devices: Xla(cache=str(tmp_path / "kept"), repeats=2, devices=devices)
        .estimate(graph, load_device("H100-SXM"))
        .duration_ns[graph.kind == int(NodeKind.COLLECTIVE)]
        for devices in (1, 2)
    }
    assert np.isnan(known[1]).all()
    assert (known[2] > 0).all()


CONVOLVING = """
func.func @main(%a: tensor<8x32x32x3xf32>, %b: tensor<8x16x16x16xf32>) -> tensor<7x7x3x16xf32> {
  %c = stablehlo.convolution(%a, %b) dim_numbers = [f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f],
      window = {pad = [[2, 3], [2, 3]], rhs_dilate = [2, 2]}
      {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
      : (tensor<8x32x32x3xf32>, tensor<8x16x16x16xf32>) -> tensor<7x7x3x16xf32>
  return %c : tensor<7x7x3x16xf32>
}
"""


def test_a_convolution_is_timed_outside_of_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    graph = graph_of(CONVOLVING, tmp_path)
    given: list[TimingJob] = []
    time = WorkerSession.time

    def seen(self: WorkerSession, job: TimingJob) -> Timing:
        given.append(job)
        return time(self, job)

    monkeypatch.setattr(WorkerSession, "time", seen)
    said = Xla(cache=str(tmp_path / "kept"), repeats=2).estimate(graph, load_device("H100-SXM"))
    assert [job.looped for job in given] == [False]
    assert "stablehlo.while" not in given[0].program
    assert np.nanmax(said.duration_ns) > 0


@pytest.mark.parametrize("devices", [0, 65])
def test_a_machine_has_some_devices(devices: int) -> None:
    with pytest.raises(UsageError, match="1 to 64"):
        Xla(devices=devices)
