"""Compiler cycles as times: counted parts, excluded parts, and the bound of the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas import read
from hespas.estimators import load_estimator
from hespas.graph import Diagnostics, Estimate, OpGraph, Workload
from hespas.hardware import load_device

FIXTURE = Path(__file__).parents[2] / "fixtures" / "hlo" / "hand_tpu_collectives.hlo.txt"
V5E = load_device("TPU-v5e")


def _read(path: Path) -> OpGraph:
    workload = read(path)
    assert isinstance(workload, Workload)
    return workload.classes[0]


def _time(graph: OpGraph, said: Estimate, name: str) -> float:
    node = next(node for node in range(len(graph)) if graph.node_name(node) == name)
    return float(said.duration_ns[node])


def test_cycles_are_time_at_the_clock_of_the_device() -> None:
    graph, found = _read(FIXTURE), Diagnostics()
    said = load_estimator("compiler").estimate(graph, V5E, found)
    assert V5E.systolic is not None
    clock_hz = V5E.systolic.clock_hz
    assert _time(graph, said, "beside") == pytest.approx(3500 / clock_hz * 1e9)
    assert _time(graph, said, "z") == pytest.approx(2800 / clock_hz * 1e9)
    assert _time(graph, said, "x") == 0.0  # a parameter takes no time
    heuristic = next(each for each in found if each.code == "compiler.heuristic")
    assert "not a measurement" in heuristic.message
    assert np.isnan(said.low_ns).all()


def test_collectives_and_sentinels_have_no_time() -> None:
    graph, found = _read(FIXTURE), Diagnostics()
    said = load_estimator("compiler").estimate(graph, V5E, found)
    # What is stated at a fusion around a collective is of its body.
    assert np.isnan(_time(graph, said, "async-collective-start"))
    assert np.isnan(_time(graph, said, "part"))
    assert np.isnan(_time(graph, said, "scores"))
    assert found.counts()["compiler.sentinel"] == 1


@pytest.mark.parametrize("cycles", ["0", "-7", "9223372036854775807"])
def test_figures_that_stand_for_none_are_left_out(cycles: str, tmp_path: Path) -> None:
    path = tmp_path / "other.hlo.txt"
    path.write_text(FIXTURE.read_text().replace('"2800"', f'"{cycles}"'))
    graph = _read(path)
    assert np.isnan(_time(graph, load_estimator("compiler").estimate(graph, V5E), "z"))


def test_no_time_beats_the_device(tmp_path: Path) -> None:
    path = tmp_path / "other.hlo.txt"
    path.write_text(FIXTURE.read_text().replace('"2800"', '"1"'))
    graph, found = _read(path), Diagnostics()
    said = load_estimator("compiler").estimate(graph, V5E, found)
    peak = max(each.flops_per_s for each in V5E.peaks if each.dtype == "bf16" and each.unit == "matrix")
    assert _time(graph, said, "z") >= 2 * 64 * 256 * 128 / peak * 1e9
    assert found.counts()["compiler.beats-roof"] == 1


def test_a_clock_may_be_stated_and_must_be_known() -> None:
    graph, found = _read(FIXTURE), Diagnostics()
    said = load_estimator("compiler:clock_ghz=2").estimate(graph, load_device("TPU-v7x"), found)
    assert _time(graph, said, "z") == pytest.approx(1400.0)
    unknown = load_estimator("compiler").estimate(graph, load_device("H100-SXM"), found)
    assert np.isnan(_time(graph, unknown, "z"))
    assert "compiler.no-clock" in found.counts()


def test_a_program_without_cycles_is_told_so() -> None:
    found = Diagnostics()
    graph = _read(FIXTURE.parent / "hand_gpu_async.hlo.txt")
    load_estimator("compiler").estimate(graph, V5E, found)
    assert [each.code for each in found] == ["compiler.none"]


def test_in_a_composite_others_speak_where_the_compiler_is_silent() -> None:
    graph = _read(FIXTURE)
    said = load_estimator("composite:order=compiler+collectives+roofline").estimate(graph, V5E)
    assert not np.isnan(said.duration_ns).any()
    assert V5E.systolic is not None
    assert _time(graph, said, "z") == pytest.approx(2800 / V5E.systolic.clock_hz * 1e9)
