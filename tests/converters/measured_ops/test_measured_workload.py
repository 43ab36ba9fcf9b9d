"""Simulation of measured workloads reproduces every start, with any overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas import api
from hespas.converters.measured_ops.waits import lanes_of, with_delays_alone
from hespas.converters.measured_ops.workload import measured_workload
from hespas.graph import Diagnostics, Profile, Resource, StringTable, Workload
from hespas.graph.equality import workloads_equal
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import is_delay, is_recorded_wait, is_topological, without_waits

FIXTURES = Path(__file__).parents[3] / "fixtures" / "profiles"
ALONE = (
    "h100_streams.xplane.pb",
    "nsys_graph_trace.sqlite.gz",
    "nsys_sparse.sqlite.gz",
    "nsys_two_processes.sqlite.gz",
    "rocpd_tracks.db.gz",
    "rocpd_two_processes.db.gz",
    "rocprofv3_two_processes.json",
    "tpu_v4_megacore.trace.json.gz",
    "tpu_v4_megacore.xplane.pb",
)
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 3), st.integers(0, 1), st.integers(0, 1)
    ),
    min_size=1,
    max_size=60,
)
"""Start, duration, stream, device, rank."""


def profile_of(events: list[tuple[int, int, int, int, int]], at_ns: float = 0.0) -> Profile:
    start, duration, stream, device, rank = (np.array(column) for column in zip(*events, strict=True))
    return Profile.of(
        "p", ("one", "other"), StringTable.from_strings(["", "kernel"]),
        start_ns=start + at_ns, duration_ns=duration, stream=stream, device_index=device, rank=rank,
        kernel_id=np.ones(len(start), np.int32),
    )  # fmt: skip


def span_ns(profile: Profile) -> float:
    known = ~np.isnan(profile.start_ns)
    return float((profile.start_ns + profile.duration_ns)[known].max() - profile.start_ns[known].min())


@given(EVENTS, st.integers(0, 2**50))
def test_all_starts_come_back_at_the_nanosecond(
    events: list[tuple[int, int, int, int, int]], at: int
) -> None:
    events.append((1, 1, 4, 0, 0))  # the clock is one of nanoseconds
    profile = profile_of(events, float(at))
    workload = measured_workload(profile, Diagnostics())
    done = api.simulate(workload)
    assert done.step_ns == span_ns(profile)
    shown: list[tuple[float, float]] = []
    timeline = done.timeline
    for rank in workload.present.tolist():
        graph = workload.graph_of(rank)
        assert is_topological(graph)
        mine = np.flatnonzero(timeline.rank == timeline.shown_by[rank])
        mine = mine[~is_delay(graph)[timeline.node[mine]]]
        shown += zip(timeline.start_ns[mine].tolist(), timeline.end_ns[mine].tolist(), strict=True)
    first = min(event[0] for event in events)
    wanted = [(start - first, start - first + length) for start, length, *_ in events if length]
    assert sorted(shown) == sorted(wanted)
    assert sum(without_waits(workload.graph_of(rank)).duration_ns.sum() for rank in workload.present) == sum(
        event[1] for event in events
    )


@given(EVENTS)
def test_within_a_lane_nothing_overlaps(events: list[tuple[int, int, int, int, int]]) -> None:
    events = sorted(events)
    start, duration, queue = (np.array(column) for column in list(zip(*events, strict=True))[:3])
    start, end = start.astype(np.float64), (start + duration).astype(np.float64)
    lanes = lanes_of(queue, start, end, 0.0)
    for lane in np.unique(lanes).tolist():
        mine = np.flatnonzero(lanes == lane)
        assert len(set(queue[mine].tolist())) == 1
        assert (start[mine][1:] >= end[mine][:-1]).all()


def test_a_clock_of_whole_microseconds_does_not_split_a_stream() -> None:
    found = Diagnostics()
    events = [(0, 10_000, 7, 0, 0), (9_000, 11_000, 7, 0, 0), (25_000, 1_000, 7, 0, 0)]
    workload = measured_workload(profile_of(events), found)
    assert set(without_waits(workload.classes[0]).stream.tolist()) == {7}
    assert "measured-workload.overlap-on-stream" not in found.counts()
    assert api.simulate(workload).step_ns == 26_000


def test_events_that_overlap_get_streams_of_their_own_and_that_is_told() -> None:
    found = Diagnostics()
    workload = measured_workload(profile_of([(0, 100, 7, 0, 0), (50, 10, 7, 0, 0)]), found)
    assert workload.classes[0].stream.tolist() == [7, -1, 8]
    assert found.counts()["measured-workload.overlap-on-stream"] == 1


def test_without_starts_there_is_no_order() -> None:
    profile = profile_of([(0, 1, 0, 0, 0)])
    nowhere = Profile.of(
        "p", profile.devices, profile.strings, start_ns=np.array([np.nan]), duration_ns=np.ones(1)
    )
    with pytest.raises(UnsupportedError, match="starts and durations"):
        measured_workload(nowhere, Diagnostics())


@pytest.mark.parametrize("name", ALONE)
def test_a_profile_alone_is_simulated_and_converted(name: str, tmp_path: Path) -> None:
    found = Diagnostics()
    (profile,) = api.read_profiles(FIXTURES / name)
    done = api.simulate(FIXTURES / name, diagnostics=found)
    assert done.step_ns == pytest.approx(span_ns(profile), abs=1)
    assert found.counts()["measured-workload.profile-alone"] == 1
    for target in ("out.opgraph.json", "out"):
        api.convert(FIXTURES / name, tmp_path / target)
        again = api.read(tmp_path / target)
        assert isinstance(again, Workload)
        assert api.simulate(again).step_ns == pytest.approx(span_ns(profile), abs=len(profile))


LAUNCHED = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        st.integers(0, 10**5),
        st.integers(0, 3),
        st.none() | st.integers(-100, 10**5),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=60,
)
"""Start, duration, stream, how long before its start it was launched, thread."""


@given(LAUNCHED)
def test_starts_come_back_with_launches(events: list[tuple[int, int, int, int | None, int]]) -> None:
    events.append((1, 1, 4, None, 0))
    start, duration, stream, _, thread = (np.array(column) for column in zip(*events, strict=True))
    lead = np.array([np.nan if each[3] is None else each[3] for each in events], np.float64)
    profile = Profile.of(
        "p", ("one",), StringTable.from_strings(["", "kernel", "main", "autograd"]),
        start_ns=start, duration_ns=duration, stream=stream, launch_start_ns=start - lead,
        launch_thread_id=thread, kernel_id=np.ones(len(start), np.int32),
    )  # fmt: skip
    found = Diagnostics()
    (graph,) = measured_workload(profile, found).classes
    assert is_topological(graph)
    done = api.simulate(Workload.spmd(graph, 1))
    assert done.step_ns == span_ns(profile)
    timeline, first = done.timeline, int(start.min())
    work = without_waits(graph)
    assert float(work.duration_ns.sum()) == duration.sum()
    shown = ~is_recorded_wait(graph)[timeline.node]
    spans = zip(timeline.start_ns[shown].tolist(), timeline.end_ns[shown].tolist(), strict=True)
    wanted = [(each[0] - first, each[0] - first + each[1]) for each in events if each[1]]
    assert sorted(spans) == sorted(wanted)
    late = sum(each[3] is not None and each[3] < 0 for each in events)
    assert found.counts().get("measured-workload.launch-after-start", 0) == late
    alone = with_delays_alone(graph)
    assert not (alone.resource == int(Resource.HOST)).any()
    assert api.simulate(Workload.spmd(alone, 1)).step_ns == done.step_ns


def test_a_launch_is_a_node_of_its_thread_and_its_latency_a_delay() -> None:
    profile = Profile.of(
        "p", ("one",), StringTable.from_strings(["", "kernel", "main"]),
        start_ns=np.array([100, 131, 150]), duration_ns=np.array([20, 10, 5]), stream=np.array([7, 7, 7]),
        launch_start_ns=np.array([90, 115, 125]), launch_thread_id=np.array([2, 2, 2]),
        kernel_id=np.ones(3, np.int32),
    )  # fmt: skip
    (graph,) = measured_workload(profile, Diagnostics()).classes
    names = [graph.node_name(node) for node in range(len(graph))]
    assert names == ["kernel", "host", "host", "idle", "kernel", "idle", "kernel"]
    assert graph.duration_ns.tolist() == [20, 15, 10, 11, 10, 9, 5]
    assert graph.control_deps.to_lists() == [[], [], [1], [0], [0, 1, 3], [4], [2, 4, 5]]
    assert graph.resource.tolist() == [0, 1, 1, 0, 0, 0, 0]
    assert graph.stream.tolist() == [7, 0, 0, -1, 7, -1, 7]
    # A faster device is held up by the host, not by what it waited for here.
    faster = replace(graph, duration_ns=np.where(graph.stream == 7, 1.0, graph.duration_ns))
    assert api.simulate(Workload.spmd(faster, 1)).step_ns == 15 + 1 + 9 + 1


def test_collectives_of_unknown_size_are_work_in_a_trace(tmp_path: Path) -> None:
    found = Diagnostics()
    api.convert(FIXTURES / "nsys_two_processes.sqlite.gz", tmp_path / "out", diagnostics=found)
    assert found.counts()["chakra.collective-as-work"] == 8
    assert found.counts()["measured-workload.collective-without-size"] == 8
    assert api.check(tmp_path / "out", profile="astra-sim").valid


@pytest.mark.parametrize("name", [*ALONE, "ffn_train_rank0of2.pt.trace.json.gz"])
def test_a_trace_with_delays_is_written_as_it_is(name: str, tmp_path: Path) -> None:
    several = api.read(FIXTURES / name, workload=True)
    assert isinstance(several, Workload)
    one, other = (tmp_path / f"{each}{'' if several.num_available > 1 else '.et'}" for each in ("a", "b"))
    api.convert(several, one)
    api.convert(one, other)
    assert workloads_equal(*(_unnamed(api.read(path)) for path in (one, other))) == []


def _unnamed(value: object) -> Workload:
    assert isinstance(value, Workload)
    return replace(value, name="", classes=tuple(replace(graph, name="") for graph in value.classes))
