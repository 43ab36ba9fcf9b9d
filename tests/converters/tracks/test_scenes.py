"""Content of each track, and drawn arrows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hespas import api
from hespas.converters.linking import enclosing, overlapping, pair
from hespas.converters.tracks import SimulatedRun, TrackSet, join_track_sets, tracks_of
from hespas.converters.tracks.slices import SliceLabel
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    ExplicitGroups,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Profile,
    RegionKind,
    StringTable,
    Workload,
)
from hespas.graph.errors import UsageError
from tests.converters.tracks.samples import measured, simulated, spans

Arrow = tuple[str, str, str]


def arrows(scene: TrackSet) -> list[Arrow]:
    names = [label(scene, row) for row in range(len(scene))]
    flows = scene.flows
    rows = zip(flows.kind.tolist(), flows.source.tolist(), flows.target.tolist(), strict=True)
    return [(flows.kinds[kind], names[source], names[target]) for kind, source, target in rows]


def label(scene: TrackSet, row: int) -> str:
    for part in scene.parts:
        if row < len(part):
            track = int(part.track[row])
            name = part.name.texts[int(part.name.rows[row])]
            return f"{part.processes[part.track_process[track]]}/{name}"
        row -= len(part)
    raise AssertionError


def test_a_profile_has_a_track_per_stream_and_an_arrow_per_cause() -> None:
    scene = tracks_of(measured(), Diagnostics())
    device, host = scene.parts
    assert device.processes == ("rank 3: H100",)
    assert device.track_name == ("stream 7", "stream 20")
    assert device.track.tolist() == [0, 0, 1]
    assert host.processes == ("rank 3 host",)
    assert host.track_name == ("thread 9:1",)
    assert arrows(scene) == [
        ("launch", "rank 3 host/aten::mm", "rank 3: H100/gemm"),
        ("launch", "rank 3 host/aten::linear", "rank 3: H100/copy"),
    ]
    assert arrows(tracks_of(measured(), Diagnostics(), arrows=False)) == []


def test_a_run_has_a_process_per_rank_and_arrows_along_what_was_waited_for() -> None:
    scene = tracks_of(SimulatedRun(*simulated()), Diagnostics())
    assert scene.parts[0].processes == ("rank 0", "rank 1")
    assert scene.parts[0].track_name == ("compute", "communication") * 2
    assert arrows(scene) == [
        ("data", "rank 0/dot.1", "rank 0/all-reduce.2"),
        ("data", "rank 1/dot.1", "rank 1/all-reduce.2"),
        ("control", "rank 0/all-reduce.2", "rank 0/permute.3"),
        ("control", "rank 1/all-reduce.2", "rank 1/permute.3"),
        ("collective", "rank 0/all-reduce.2", "rank 1/all-reduce.2"),
        ("message", "rank 0/permute.3", "rank 1/permute.3"),
    ]


def test_repeated_runs_of_a_node_wait_for_the_run_before_them() -> None:
    _, workload = simulated()
    twice = spans(node=[0, 0, 1], rank=[0, 0, 0], start_ns=[0.0, 5.0, 10.0])
    scene = tracks_of(SimulatedRun(twice, workload), Diagnostics())
    assert [(flow[0], flow[2]) for flow in arrows(scene)] == [("data", "rank 0/all-reduce.2")]
    assert scene.parts[0].start_ns[scene.flows.source].tolist() == [5.0]


def test_collectives_of_different_classes_meet_by_their_members() -> None:
    graphs: list[OpGraph] = []
    for filler in (0, 2):
        builder = GraphBuilder(f"class {filler}")
        for _ in range(filler):
            row = builder.strings.add("filler")
            builder.add_node(name_id=row, op_id=row, op_class=OpClass.FREE)
        name = builder.strings.add("meet")
        node = builder.add_node(
            name_id=name, op_id=name, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE
        )
        groups = builder.group_set(ExplicitGroups.from_rows([[1, 0]] if filler else [[0, 1], [2]]))
        builder.add_collective(node, kind=CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=1.0)
        graphs.append(builder.build())
    workload = Workload(name="two", classes=tuple(graphs), rank_class=np.array([0, 1, 0], np.int32))
    timeline = spans(node=[0, 2, 0], rank=[0, 1, 2], start_ns=[1.0, 2.0, 3.0])
    scene = tracks_of(SimulatedRun(timeline, workload), Diagnostics())
    assert arrows(scene) == [("collective", "rank 0/meet", "rank 1/meet")]


def test_dependencies_on_what_took_no_time_are_told() -> None:
    _, workload = simulated()
    diagnostics = Diagnostics()
    tracks_of(SimulatedRun(spans(node=[1, 1], rank=[0, 1], start_ns=[0.0, 0.0]), workload), diagnostics)
    assert diagnostics.counts() == {"tracks.dependency-not-drawn": 2}


def test_a_block_of_trips_is_named_by_its_loop_and_a_rank_says_for_whom_it_stands() -> None:
    builder = GraphBuilder("loop")
    loop = builder.add_region(RegionKind.LOOP_BODY, trips=10.0, label="while.3")
    row = builder.strings.add("dot")
    builder.add_node(name_id=row, op_id=row, op_class=OpClass.CONTRACTION, region=loop)
    timeline = replace(
        spans(node=[0, -1], rank=[0, 0], start_ns=[0.0, 5.0]),
        region=np.array([-1, 0], np.int32),
        trips=np.array([1.0, 9.0]),
        finish_ns=np.zeros(4),
        exposed_comm_ns=np.zeros(4),
        shown_by=np.zeros(4, np.int32),
        busy_ns=np.zeros((4, 1)),
        exposed_wait_ns=np.zeros((4, 2)),
        interference_ns=np.zeros(4),
    )
    scene = tracks_of(SimulatedRun(timeline, Workload.spmd(builder.build(), 4)), Diagnostics())
    assert [label(scene, row) for row in range(2)] == [
        "rank 0: and 3 alike/dot", "rank 0: and 3 alike/while.3: 9 iterations"
    ]  # fmt: skip


@pytest.mark.parametrize(("node", "rank"), [(0, 2), (0, -1), (3, 0), (-1, 0), (-2, 0)])
def test_a_timeline_of_another_workload_is_refused(node: int, rank: int) -> None:
    _, workload = simulated()
    timeline = spans(node=[0, node], rank=[0, rank], start_ns=[0.0, 0.0])
    with pytest.raises(UsageError, match="the timeline has"):
        tracks_of(SimulatedRun(timeline, workload), Diagnostics())


def test_several_values_stand_side_by_side_under_their_labels() -> None:
    one, other = tracks_of(measured(), Diagnostics()), tracks_of(SimulatedRun(*simulated()), Diagnostics())
    both = join_track_sets([("measured", one), ("simulated", other)])
    assert len(both) == len(one) + len(other)
    assert both.parts[2].processes == ("simulated rank 0", "simulated rank 1")
    told = arrows(both)
    assert ("launch", "measured rank 3 host/aten::mm", "measured rank 3: H100/gemm") in told
    assert ("message", "simulated rank 0/permute.3", "simulated rank 1/permute.3") in told
    assert both.metadata["measured.first_event_ns"] == "1700000000000000000"


def test_what_cannot_be_drawn_is_told() -> None:
    profile = Profile.of(
        "p", (), StringTable.from_strings(["", "a\udc80"]), start_ns=np.array([np.nan, 0.0]),
        duration_ns=np.array([7.0, -1.0]), kernel_id=np.array([1, 1], np.int32),
    )  # fmt: skip
    diagnostics = Diagnostics()
    scene = tracks_of(profile, diagnostics)
    assert len(scene) == 1
    assert diagnostics.counts() == {
        "tracks.no-start": 1,
        "tracks.negative-duration": 1,
        "tracks.invalid-text": 1,
    }
    chunk = next(scene.chunks(10))
    assert chunk.labels[0].name == "a\ufffd\ufffd\ufffd"


def test_labels_are_told_once_per_combination_in_every_chunk() -> None:
    profile = measured()
    scene = tracks_of(profile, Diagnostics())
    for rows in (1, 2, 100):
        told: list[SliceLabel] = []
        for chunk in scene.chunks(rows):
            places: list[int] = chunk.label.tolist()
            told.extend(chunk.labels[place] for place in places)
        assert [label.name for label in told] == ["gemm", "add", "copy", "aten::linear", "aten::mm"]
        assert dict(told[0].arguments) == {
            "op": "aten::mm", "shapes": "[[4, 8]]", "dtype": "float", "run": 0.0, "op_class": "contraction",
        }  # fmt: skip
        assert dict(told[2].arguments) == {"bytes": 4096.0, "op_class": "memory"}


def test_pairs_and_nesting_are_of_one_track() -> None:
    track = np.array([0, 0, 1, 0, 1, 0])
    begins = np.array([True, True, True, False, False, True])
    found = pair(track, np.array([0, 1, 0, 2, 5, 9]), begins)
    assert sorted(zip(found.begin.tolist(), found.end.tolist(), strict=True)) == [
        (0, -1), (1, 3), (2, 4), (5, -1)
    ]  # fmt: skip
    assert pair(np.array([0, 0]), np.array([1, 2]), np.array([False, True])).orphans == 1
    track, start = np.array([0, 0, 0, 1]), np.array([0, 2, 20, 2])
    duration = np.array([10, 3, 5, 1])
    assert overlapping(track, start, duration).tolist() == [False, True, False, False]
    assert enclosing(track, start, duration)[0].tolist() == [-1, 0, -1, -1]


@pytest.mark.parametrize("form", ["perfetto", "chrome-trace"])
@pytest.mark.parametrize("start_ns", [1e18, -1e18])
def test_lengths_stay_exact_however_late_events_start(form: str, start_ns: float, tmp_path: Path) -> None:
    """A float of such a time has steps of 128 ns."""
    made = api.read(Path(__file__).parents[3] / "fixtures/profiles/tpu_v4_megacore.xplane.pb")
    assert isinstance(made, Profile)
    late = replace(made, start_ns=np.full(len(made), start_ns))
    api.write(late, tmp_path / "x", format=form)
    back = api.read(tmp_path / "x", format=form)
    assert isinstance(back, Profile)
    assert sorted(back.duration_ns.tolist()) == sorted(made.duration_ns.tolist())
