"""Sources of times, missing times, and results that many ranks share."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from hespas import api
from hespas.estimators import MissingPolicy
from hespas.graph import Diagnostics, GraphBuilder, OpClass, Profile, RegionKind, StringTable, Workload
from hespas.graph.errors import InvariantError, UnsupportedError
from hespas.graph.frames import to_pandas
from hespas.graph.passes import UnrollLoops, totals
from hespas.simulator import ListScheduler, Simulator, simulate
from tests.simulator.small_programs import Sketch

FIXTURES = Path(__file__).parents[2] / "fixtures"


def chain(*durations: float) -> Workload:
    s = Sketch()
    for node, duration in enumerate(durations):
        s.add("compute", duration, *([node - 1] if node else []))
    return Workload.spmd(s.build(), 2)


# --- gaps


def test_what_is_not_known_counts_as_none_and_makes_a_lower_bound() -> None:
    found = Diagnostics()
    done = simulate(chain(3, nan, 4), diagnostics=found)
    assert (done.step_ns, done.is_lower_bound, done.classes[0].unknown) == (7, True, 1)
    assert found.counts()["estimate.missing"] == 1


def test_zero_means_it_and_error_refuses() -> None:
    done = simulate(chain(3, nan, 4), missing="zero")
    assert (done.step_ns, done.is_lower_bound) == (7, False)
    with pytest.raises(UnsupportedError, match="no duration for 1 of 3 nodes"):
        simulate(chain(3, nan, 4), missing="error")


def test_communication_without_a_time_is_missing_too() -> None:
    s = Sketch()
    s.add("comm")
    workload = Workload.spmd(s.build(), 4)
    assert simulate(workload).classes[0].unknown == 1
    assert not simulate(workload, [*api.estimate(workload, "H100-SXM").estimates]).is_lower_bound


def test_recorded_times_beside_estimates_of_a_device_are_counted() -> None:
    found = Diagnostics()
    workload = chain(3, 5)
    graph = workload.classes[0]
    graph = replace(graph, flops=np.full(2, nan), bytes_read=np.full(2, nan), bytes_written=np.full(2, nan))
    workload = replace(workload, classes=(graph,))
    assert not simulate(workload).mixes_recorded_and_estimated
    done = simulate(workload, [*api.estimate(workload, "H100-SXM").estimates], diagnostics=found)
    assert (done.step_ns, done.mixes_recorded_and_estimated, done.classes[0].kept, done.is_lower_bound) == (
        8,
        True,
        2,
        False,
    )
    assert found.counts()["estimate.kept-duration"] == 2
    assert ["100.0%" in each.message for each in found if each.code == "estimate.kept-duration"] == [True]


def test_nobody_misses_what_never_runs() -> None:
    s = Sketch()
    s.add("compute", nan, region=s.loop(0))
    s.add("compute", 2)
    done = simulate(Workload.spmd(s.build(), 1), missing="error")
    assert (done.step_ns, done.is_lower_bound) == (2, False)


@pytest.mark.parametrize(("missing", "step_ns", "unknown"), [("warn", 5, 1), ("zero", 2, 0)])
def test_unknown_trips(missing: MissingPolicy, step_ns: float, unknown: int) -> None:
    s = Sketch()
    s.add("compute", 3, region=s.loop(nan))
    s.add("compute", 2)
    found = Diagnostics()
    done = simulate(Workload.spmd(s.build(), 1), missing=missing, diagnostics=found)
    assert (done.step_ns, done.classes[0].unknown) == (step_ns, unknown)
    assert found.counts()["simulate.assumed-trips"] == 1


def test_unknown_trips_may_be_refused() -> None:
    s = Sketch()
    s.add("compute", 3, region=s.loop(nan))
    with pytest.raises(UnsupportedError, match="trip count known at run time only: loop"):
        simulate(Workload.spmd(s.build(), 1), missing="error")


def test_fractional_trips_are_rounded_and_told() -> None:
    s = Sketch()
    s.add("compute", 3, region=s.loop(2.6))
    found = Diagnostics()
    assert simulate(Workload.spmd(s.build(), 1), diagnostics=found).step_ns == 9
    assert found.counts()["simulate.fractional-trips"] == 1


@pytest.mark.parametrize("duration", [-1.0, inf])
def test_times_that_cannot_be_are_refused(duration: float) -> None:
    with pytest.raises(UnsupportedError, match="compute1 takes"):
        simulate(chain(3, duration))


@pytest.mark.parametrize("trips", [-1.0, inf])
def test_trips_that_cannot_be_are_refused(trips: float) -> None:
    s = Sketch()
    s.add("compute", 3, region=s.loop(trips))
    with pytest.raises(UnsupportedError, match=r"has a trip count of .*, expected 0 to 2\*\*53"):
        simulate(Workload.spmd(s.build(), 1))


def test_a_profile_without_device_work_cannot_be_simulated() -> None:
    strings = StringTable.from_strings([""])
    nothing = np.empty(0)
    profile = Profile.of("p", (), strings, start_ns=nothing, duration_ns=nothing)
    for function in (api.simulate, api.estimate):
        with pytest.raises(UnsupportedError, match="lacks device events") as refused:
            function(profile, "L4")
        assert (refused.value.path, "record what the device does" in (refused.value.hint or "")) == (
            "p",
            True,
        )


# --- ranks and classes


def test_ranks_of_a_class_share_its_spans() -> None:
    done = simulate(chain(3, 4))
    timeline = done.timeline
    assert timeline.finish_ns.tolist() == [7, 7]
    assert timeline.shown_by.tolist() == [0, 0]
    assert timeline.rank.tolist() == [0, 0]
    assert timeline.resource_ns("compute").tolist() == [7, 7]
    assert np.isnan(timeline.resource_ns("disk")).all()
    assert [row.num_ranks for row in done.classes] == [2]


def test_classes_that_share_no_group_are_scheduled_each_for_itself() -> None:
    s = Sketch()
    s.add("copy", 10)
    s.add("compute", 1, 0)
    slow, fast, unused = s.build(), chain(3, 1).classes[0], chain(-1).classes[0]
    workload = Workload(name="two", classes=(unused, slow, fast), rank_class=np.array([2, 1, 1, 2], np.int32))
    done = simulate(workload)
    timeline = done.timeline
    assert timeline.finish_ns.tolist() == [4, 11, 11, 4]
    assert timeline.resource_ns("copy").tolist() == [0, 10, 10, 0]
    assert timeline.shown_by.tolist() == [0, 1, 1, 0]
    assert [(row.rank_class, row.rank, row.num_ranks) for row in done.classes] == [(1, 1, 2), (2, 0, 2)]
    assert timeline.rank.tolist() == [0, 0, 1, 1]
    assert timeline.cause.tolist() == [-1, 0, -1, 2]
    assert done.step_ns == 11
    assert len(to_pandas(timeline)) == 4


def test_estimates_must_be_those_of_the_classes() -> None:
    with pytest.raises(InvariantError):
        simulate(chain(1), [])


def test_streams_of_the_program_run_side_by_side() -> None:
    s = Sketch()
    s.add("compute", 3, stream=7)
    s.add("compute", 4, stream=9)
    s.add("comm", 5, stream=7)
    done = simulate(Workload.spmd(s.build(), 1))
    assert done.step_ns == 5
    assert done.classes[0].busy_ns["compute"] == 4
    assert done.classes[0].exposed_comm_ns == 1
    assert done.timeline.stream.tolist() == [7, 9, -1]


def test_a_delay_holds_no_stream() -> None:
    s = Sketch()
    first = s.add("compute", 3)
    for _ in range(2):
        s.add("free", 10, first)
    s.add("compute", 4, first)
    done = simulate(Workload.spmd(s.build(), 1))
    assert done.step_ns == 13
    assert done.classes[0].busy_ns == {"compute": 7, "communication": 0, "copy": 0, "host": 10}
    assert done.timeline.stream.tolist() == [-1, 0, 1, -1]


def test_recorded_waits_keep_their_time_on_any_device() -> None:
    s = Sketch()
    first = s.add("free", 1e9)
    s.add("compute", 3, first)
    found, workload = Diagnostics(), Workload.spmd(s.build(), 1)
    estimated = api.estimate(workload, "H100-SXM", diagnostics=found).estimates[0]
    assert estimated.duration_ns.tolist() == [1e9, pytest.approx(nan, nan_ok=True)]
    assert estimated.estimator[0] == -1
    assert found.counts()["estimate.recorded-waits"] == 1


def test_streams_of_a_device_are_merged_for_estimates_and_that_is_told() -> None:
    s = Sketch()
    s.add("compute", 3, stream=7)
    s.add("compute", 3, stream=9)
    found, workload = Diagnostics(), Workload.spmd(s.build(), 1)
    estimate = api.estimate(workload, "H100-SXM").estimates[0]
    assert simulate(workload, [estimate], diagnostics=found).step_ns == 6
    assert found.counts()["simulate.streams-merged"] == 1


def test_the_scheduler_is_a_simulator() -> None:
    scheduler = ListScheduler()
    assert isinstance(scheduler, Simulator)
    assert simulate(chain(1), simulator=scheduler).simulator == scheduler.name


# --- whole programs


PROGRAMS = (
    "stablehlo/llama_fsdp_tp_local_N8.mlir.gz",
    "stablehlo/scan_nested.mlir",
    "stablehlo/scan_layers_train.mlir",
    "hlo/pipeline_ring.hlo.txt",
    "hlo/moe_all_to_all.hlo.txt",
)


@pytest.mark.parametrize("granularity", ["op", "fused", "region"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_step_lies_between_its_bounds_and_is_that_of_the_flat_program(
    program: str, granularity: api.Granularity
) -> None:
    workload = api.read(FIXTURES / program)
    assert isinstance(workload, Workload)
    given = [graph.duration_ns.copy() for graph in workload.classes]
    done = api.simulate(workload, "H100-SXM", granularity=granularity)
    for graph, before in zip(workload.classes, given, strict=True):
        np.testing.assert_array_equal(graph.duration_ns, before)
    estimated = api.estimate(workload, "H100-SXM", granularity=granularity)
    estimates = estimated.estimates
    for found in done.classes:
        graph = estimated.workload.classes[found.rank_class]
        work = np.nansum(estimates[found.rank_class].duration_ns * graph.executions)
        work += found.interference_ns
        assert sum(found.busy_ns.values()) == pytest.approx(work)
        assert max(found.busy_ns.values()) <= found.finish_ns * (1 + 1e-12) <= work * (1 + 1e-9)
        assert sum(found.critical_path.class_ns.values()) == pytest.approx(found.finish_ns)
        assert 0 <= found.exposed_comm_ns <= found.busy_ns["communication"] * (1 + 1e-12)


def test_a_flat_program_read_with_its_times_runs_as_the_looped_one() -> None:
    workload = api.read(FIXTURES / "stablehlo" / "scan_nested.mlir")
    assert isinstance(workload, Workload)
    estimated = api.graph_estimator("H100-SXM", "roofline", 1, "error")(workload.classes[0], Diagnostics())
    flat = UnrollLoops()(estimated, Diagnostics())
    one, other = (simulate(Workload.spmd(graph, 1)) for graph in (estimated, flat))
    assert one.step_ns == other.step_ns > 0
    assert len(one.timeline) == len(other.timeline) <= totals(flat).ops


def test_more_trips_than_can_be_counted_are_refused() -> None:
    graph = GraphBuilder("g")
    region = graph.add_region(RegionKind.LOOP_BODY, trips=1e300)
    row = graph.strings.add("add")
    node = graph.add_node(name_id=row, op_id=row, op_class=OpClass.ELEMENTWISE, region=region)
    graph.set(node, duration_ns=1.0)
    with pytest.raises(UnsupportedError, match=r"has a trip count of .*, expected 0 to 2\*\*53"):
        simulate(Workload.spmd(graph.build(), 1))


def test_dependencies_that_leave_a_loop_and_come_back_are_refused() -> None:
    graph = GraphBuilder("g")
    region = graph.add_region(RegionKind.LOOP_BODY, trips=3)
    row = graph.strings.add("add")
    first = graph.add_node(name_id=row, op_id=row, op_class=OpClass.ELEMENTWISE, region=region)
    outside = graph.add_node(name_id=row, op_id=row, op_class=OpClass.ELEMENTWISE, data_deps=[first])
    graph.add_node(name_id=row, op_id=row, op_class=OpClass.ELEMENTWISE, region=region, data_deps=[outside])
    graph.add_carried(region, 2, 0)
    with pytest.raises(UnsupportedError, match="leave a loop and come back"):
        UnrollLoops()(graph.build(), Diagnostics())


def test_delays_stay_beside_merged_streams() -> None:
    s = Sketch()
    for stream in (7, 9):
        wait = s.add("free", 1e6)
        s.add("product", nan, wait, stream=stream)
    done = api.estimate(Workload.spmd(s.build(), 1), "H100-SXM")
    step = api.simulated_step(done)
    assert step is not None
    assert step.step_ns < 1.1e6
