"""Loops and their written form, iteration by iteration: steps take equal time."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas import api
from hespas.graph import OpGraph, Workload
from hespas.simulator import Simulation, simulate
from hespas.simulator.loop_extrapolation import with_trips
from tests.simulator.small_programs import Sketch
from tests.simulator.test_simulated_loops import Body, bodies, looped, nested

FIXTURES = Path(__file__).parents[2] / "fixtures"
WITH_LOOPS = (
    "hlo/fori_static.hlo.txt",
    "hlo/hand_control.hlo.txt",
    "hlo/pipeline_ring.hlo.txt",
    "hlo/random_mask.hlo.txt",
    "hlo/scan_layers_train.hlo.txt",
    "hlo/scan_nested.hlo.txt",
    "stablehlo/hand_loops.mlir",
    "stablehlo/pipeline_ring.mlir",
    "stablehlo/scan_layers_train.mlir",
    "stablehlo/scan_nested.mlir",
)


@pytest.mark.parametrize("name", WITH_LOOPS)
def test_a_program_takes_as_long_as_the_traces_written_of_it(name: str, tmp_path: Path) -> None:
    program, hardware, estimator = FIXTURES / name, "h100", "roofline"
    traces = tmp_path / "job"
    api.convert(program, traces, target_format="chakra", hardware=hardware, estimator=estimator)
    asked = api.simulate(program, hardware, estimator=estimator)
    written = api.simulate(traces)
    assert (asked.workload.classes[0].regions.trips > 1).any()
    assert not written.workload.classes[0].regions.trips.size
    # traces hold whole nanoseconds: each operation is off by half of one at most
    off_ns = 0.5 * len(written.timeline)
    assert written.step_ns == pytest.approx(asked.step_ns, rel=0, abs=off_ns)
    assert written.step_ns == pytest.approx(asked.step_ns, rel=1e-4)
    for one, other in zip(written.classes, asked.classes, strict=True):
        assert one.exposed_comm_ns == pytest.approx(other.exposed_comm_ns, abs=off_ns)


def through_traces(graph: OpGraph) -> Simulation:
    with TemporaryDirectory() as folder:
        api.convert(Workload.spmd(graph, 4), Path(folder) / "job", target_format="chakra")
        return api.simulate(Path(folder) / "job")


def figures(done: Simulation) -> tuple[object, ...]:
    [found] = done.classes
    return found.finish_ns, found.exposed_comm_ns, found.busy_ns


@settings(max_examples=25)
@given(bodies(), st.integers(1, 4))
def test_a_loop_takes_as_long_in_traces(body: Body, trips: int) -> None:
    graph = looped(body, trips)
    assert figures(through_traces(graph)) == figures(simulate(Workload.spmd(graph, 4)))


@settings(max_examples=25)
@given(bodies(), bodies(), st.integers(1, 3), st.integers(1, 3))
def test_nested_loops_take_as_long_in_traces(
    inner: Body, outer: Body, inner_trips: int, outer_trips: int
) -> None:
    graph = nested(inner, outer, inner_trips, outer_trips)
    assert figures(through_traces(graph)) == figures(simulate(Workload.spmd(graph, 4)))


def test_a_wide_loop_takes_as_long_in_traces() -> None:
    """So many nodes begin and end its trips that one more stands between them."""
    s = Sketch()
    region = s.loop(3)
    for place in range(40):
        s.add("comm" if place % 3 else "compute", 1 + place % 7, region=region)
    graph = s.build()
    alone, written = simulate(Workload.spmd(graph, 4)), through_traces(graph)
    assert figures(written) == figures(alone)
    once = with_trips(graph, np.ones(1))
    first = simulate(Workload.spmd(once, 4))
    assert alone.step_ns == 3 * first.step_ns
