"""A recording in ASTRA-sim's mode takes its time within 1%, or a warning gives the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hespas
from hespas.api.simulation_result import SimulationResult
from hespas.cli.terminal import step_text
from hespas.converters import ReadOptions
from hespas.graph import Diagnostics
from tests.analysis.raw import FIXTURE
from tests.converters.pytorch.traces import Json, host, kernel, launch, write_kineto

JOB: Json = {"distributedInfo": {"rank": 0, "world_size": 2, "backend": "nccl"}}


def simulated(path: Path, folder: Path) -> tuple[SimulationResult, SimulationResult]:
    """A recording in both modes, on two ranks."""
    network, system = folder / "network.yml", folder / "system.json"
    network.write_text("topology: [ Switch ]\nnpus_count: [ 2 ]\nbandwidth: [ 450.0 ]\nlatency: [ 500.0 ]\n")
    rings = {f"{kind}-implementation": ["ring"] for kind in ("all-reduce", "all-gather", "reduce-scatter")}
    facts: Json = {"scheduling-policy": "LIFO", "endpoint-delay": 10, "preferred-dataset-splits": 4}
    facts |= {"active-chunks-per-dimension": 1, "collective-optimization": "localBWAware"}
    system.write_text(json.dumps({**facts, **rings, "all-to-all-implementation": ["ring"]}))
    options = ReadOptions(num_devices=2)
    ours = hespas.simulate(path, options=options)
    astra = hespas.simulate(path, options=options, mode="astra", system_config=system, network_config=network)
    return ours, astra


def test_two_streams_that_overlap_are_told_apart(tmp_path: Path) -> None:
    ours, astra = simulated(FIXTURE, tmp_path)
    assert ours.step_ns == 3_660_570
    assert ours.step_ns < astra.step_ns < 1.1 * ours.step_ns
    assert "chakra.serialized" in astra.diagnostics.counts()
    assert "computation as recorded" in step_text(astra, "", mode="astra")
    assert "computation" not in step_text(ours, "")


@pytest.mark.parametrize("gap_us", [1.0, 2000.0])
def test_one_stream_takes_its_time_without_a_warning(gap_us: float, tmp_path: Path) -> None:
    events: list[Json] = []
    for place in range(8):
        at_us = place * (50.0 + gap_us)
        events += [host("my::op", at_us, 9, place + 1), launch(at_us + 2, place, tid=1)]
        events.append(kernel("k", at_us + 10, 50 + gap_us / 2, place))
    path = write_kineto(tmp_path / "rank0.pt.trace.json", events, **JOB)
    ours, astra = simulated(path, tmp_path)
    assert astra.step_ns == pytest.approx(ours.step_ns, rel=0.01)
    assert "chakra.serialized" not in astra.diagnostics.counts()


def test_a_conversion_reports_it(tmp_path: Path) -> None:
    diagnostics = Diagnostics()
    hespas.convert(FIXTURE, tmp_path / "et", num_devices=2, diagnostics=diagnostics)
    assert diagnostics.counts()["chakra.serialized"] == 1
