"""Perfetto traces: what is written agrees with the protobuf library and reads back exactly."""

from __future__ import annotations

import gzip
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from hespas.api import read as read_any
from hespas.converters import sniff
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.perfetto import FORMAT
from hespas.converters.perfetto.packets import likelihood
from hespas.converters.perfetto.writer import write_scene
from hespas.converters.tracks import Displayed, SimulatedRun, joined_tracks
from hespas.graph import Diagnostics, Profile, StringTable, Workload
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, UsageError
from tests.converters.perfetto.reference import Trace, trace
from tests.converters.tracks.samples import HOSTILE, events, measured, profiles, simulated, spans

GOLDEN = Path(__file__).parent
DATA = Path(__file__).parents[3].parent / "shared" / "data"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")

Packet = dict[str, Any]
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


def write(profile: Profile | Workload, path: Path) -> Path:
    assert FORMAT.write is not None
    FORMAT.write(profile, path, WriteOptions(name=path.name), Diagnostics())
    return path


def read(path: Path, diagnostics: Diagnostics | None = None) -> Profile:
    assert FORMAT.read is not None
    profile = FORMAT.read(path, ReadOptions(), Diagnostics() if diagnostics is None else diagnostics)
    assert isinstance(profile, Profile)
    return profile


def read_packets(path: Path, *packets: Packet, diagnostics: Diagnostics | None = None) -> Profile:
    path.write_bytes(trace(*packets))
    return read(path, diagnostics)


def event(kind: int, at: int, name: str = "", track: int = 1, **more: Any) -> Packet:
    told: Packet = {"type": kind, "track_uuid": track, **({"name": name} if name else {})}
    return {"timestamp": at, "trusted_packet_sequence_id": 1, "track_event": told, **more}


def slices(name: str, start: int, end: int, track: int = 1) -> list[Packet]:
    return [event(BEGIN, start, name, track), event(END, end, track=track)]


def kernels(profile: Profile) -> list[str]:
    return [profile.strings[row] for row in profile.kernel_id.tolist()]


STREAM: Packet = {"track_descriptor": {"uuid": 1, "name": "stream 7", "parent_uuid": 9}}
PROCESS: Packet = {"track_descriptor": {"uuid": 9, "process": {"pid": 5, "process_name": "rank 2: MI300X"}}}


@pytest.mark.parametrize("name", ["measured.pftrace", "side_by_side.pftrace"])
def test_golden_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    values: list[tuple[str, Displayed]] = [
        ("measured", measured()),
        ("simulated", SimulatedRun(*simulated())),
    ]
    if name == "measured.pftrace":
        write(measured(), path)
    else:
        write_scene(joined_tracks(values, Diagnostics()), path, WriteOptions())
    assert path.read_bytes() == (GOLDEN / name).read_bytes()


def test_what_is_written_is_what_the_protobuf_library_reads() -> None:
    listed = Trace.FromString((GOLDEN / "side_by_side.pftrace").read_bytes()).packet
    assert all(packet.trusted_packet_sequence_id == 1 for packet in listed)
    assert listed[0].sequence_flags == 1
    described = {
        packet.track_descriptor.uuid: packet.track_descriptor
        for packet in listed
        if packet.HasField("track_descriptor")
    }
    names = {entry.iid: entry.name for packet in listed for entry in packet.interned_data.event_names}
    opened: dict[int, list[tuple[str, int]]] = {}
    found: list[tuple[str, str, str, int, int]] = []
    for packet in listed:
        told = packet.track_event
        if told.type == BEGIN:
            opened.setdefault(told.track_uuid, []).append((names[told.name_iid], packet.timestamp))
        elif told.type == END:
            name, start = opened[told.track_uuid].pop()
            track = described[told.track_uuid]
            owner = described[track.parent_uuid].process.process_name
            found.append((owner, track.name, name, start, packet.timestamp - start))
    assert not any(opened.values())
    assert sorted(found) == [
        ("measured rank 3 host", "thread 9:1", "aten::linear", 0, 5000),
        ("measured rank 3 host", "thread 9:1", "aten::mm", 100, 1000),
        ("measured rank 3: H100", "stream 20", "copy", 2500, 10000),
        ("measured rank 3: H100", "stream 7", "add", 9000, 1),
        ("measured rank 3: H100", "stream 7", "gemm", 2000, 3125),
        ("simulated rank 0", "communication", "all-reduce.2", 10, 10),
        ("simulated rank 0", "communication", "permute.3", 20, 5),
        ("simulated rank 0", "compute", "dot.1", 0, 10),
        ("simulated rank 1", "communication", "all-reduce.2", 12, 10),
        ("simulated rank 1", "communication", "permute.3", 22, 5),
        ("simulated rank 1", "compute", "dot.1", 0, 12),
    ]
    leaving = [flow for packet in listed for flow in packet.track_event.flow_ids]
    arriving = [flow for packet in listed for flow in packet.track_event.terminating_flow_ids]
    assert sorted(leaving) == sorted(arriving) == list(range(1, 9))


def test_a_profile_reads_back_with_the_operations_behind_its_events(tmp_path: Path) -> None:
    diagnostics = Diagnostics()
    path = write(measured(), tmp_path / "t.pftrace.gz")
    back = read(path, diagnostics)
    assert events(back) == events(measured())
    assert (back.name, back.metadata) == (measured().name, measured().metadata)
    host = [back.strings[row] for row in back.host.name_id.tolist()]
    causes = dict(zip(kernels(back), back.host_event.tolist(), strict=True))
    assert {kernel: host[cause] if cause >= 0 else "" for kernel, cause in causes.items()} == {
        "gemm": "aten::mm", "add": "", "copy": "aten::linear"
    }  # fmt: skip
    inner = host.index("aten::mm")
    assert host[int(back.host.parent[inner])] == "aten::linear"
    assert back.strings[int(back.host.shapes_id[inner])] == "[[4, 8]]"
    assert diagnostics.counts() == {}
    assert sniff(path) is FORMAT


@settings(max_examples=60)
@given(profile=profiles())
def test_any_times_and_names_read_back_exactly(profile: Profile, tmp_path: Path) -> None:
    back = read(write(profile, tmp_path / "t.pftrace"))
    assert [told[:5] for told in events(back)] == [told[:5] for told in events(profile)]
    if all(row > 0 for row in profile.kernel_id.tolist()):
        assert events(back) == events(profile)


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    names = [*HOSTILE, "half \udc80 pair"]
    count = len(names)
    profile = Profile.of(
        "</script>\udfff", ('dev "x"',), StringTable.from_strings(["", *names]),
        start_ns=np.arange(count, dtype=np.float64), duration_ns=np.ones(count),
        kernel_id=np.arange(1, count + 1, dtype=np.int32), metadata={"k\udc80": "v\n"},
    )  # fmt: skip
    back = read(write(profile, tmp_path / "t.pftrace"))
    assert kernels(back) == [*HOSTILE, "half \ufffd\ufffd\ufffd pair"]
    assert back.devices == ('dev "x"',)


def test_overlapping_slices_stand_on_lanes_of_one_name(tmp_path: Path) -> None:
    profile = Profile.of(
        "p", ("d",), StringTable.from_strings(["", "a", "b", "c"]), start_ns=np.array([0.0, 5.0, 20.0]),
        duration_ns=np.array([10.0, 10.0, 1.0]), kernel_id=np.array([1, 2, 3], np.int32),
        stream=np.array([4, 4, 4], np.int64),
    )  # fmt: skip
    path = write(profile, tmp_path / "t.pftrace")
    listed = Trace.FromString(path.read_bytes()).packet
    tracks = [packet.track_descriptor for packet in listed if packet.track_descriptor.parent_uuid]
    assert [track.name for track in tracks] == ["stream 4", "stream 4"]
    assert events(read(path)) == events(profile)


def test_what_follows_without_a_gap_stays_on_one_lane(tmp_path: Path) -> None:
    ends = np.cumsum(np.random.default_rng(0).uniform(0.0, 9.0, 500))
    starts = np.concatenate([[0.0], ends[:-1]])
    timeline = replace(spans([0] * 500, [0] * 500, starts.tolist()), end_ns=ends)
    path = tmp_path / "t.pftrace"
    write_scene(
        joined_tracks([("", SimulatedRun(timeline, simulated()[1]))], Diagnostics()), path, WriteOptions()
    )
    listed = Trace.FromString(path.read_bytes()).packet
    assert sum(packet.track_descriptor.parent_uuid > 0 for packet in listed) == 1
    back = read(path)
    assert sorted(back.start_ns.tolist()) == starts.tolist()
    assert sorted(back.duration_ns.tolist()) == sorted((ends - starts).tolist())


def test_interned_texts_are_of_a_sequence_and_until_it_starts_anew(tmp_path: Path) -> None:
    def named(iid: int, at: int, sequence: int, flags: int) -> list[Packet]:
        begin = event(BEGIN, at, trusted_packet_sequence_id=sequence, sequence_flags=flags)
        begin["track_event"]["name_iid"] = iid
        return [begin, event(END, at + 1, trusted_packet_sequence_id=sequence)]

    def interned(sequence: int, flags: int, name: str) -> Packet:
        data = {"event_names": [{"iid": 1, "name": name}]}
        return {"trusted_packet_sequence_id": sequence, "sequence_flags": flags, "interned_data": data}

    diagnostics = Diagnostics()
    profile = read_packets(
        tmp_path / "t.pftrace",
        STREAM,
        *named(1, 0, 3, 2),
        interned(3, 1, "of 3"), interned(4, 1, "of 4"),
        *named(1, 10, 3, 2), *named(1, 20, 4, 2),
        {"trusted_packet_sequence_id": 3, "previous_packet_dropped": 1},
        *named(1, 30, 3, 2),
        interned(3, 1, "anew"), *named(1, 40, 3, 2), *named(2, 50, 3, 2),
        diagnostics=diagnostics,
    )  # fmt: skip
    assert kernels(profile) == ["of 3", "of 4", "anew", ""]
    assert diagnostics.counts() == {
        "perfetto.lost-packets": 2, "perfetto.unresolved-name": 1, "perfetto.end-without-begin": 2,
    }  # fmt: skip


def test_clocks_are_brought_to_the_clock_of_the_trace(tmp_path: Path) -> None:
    clocks = [
        {"clock_id": 6, "timestamp": 1_000_000},
        {"clock_id": 3, "timestamp": 400},
        {"clock_id": 64, "timestamp": 50, "is_incremental": True, "unit_multiplier_ns": 1000},
    ]
    incremental = {"timestamp_clock_id": 64, "track_event_defaults": {"track_uuid": 1}}

    def step(kind: int, by: int) -> Packet:
        told: Packet = {"type": kind, "name": "inc"}
        return {"timestamp": by, "trusted_packet_sequence_id": 1, "track_event": told}

    diagnostics = Diagnostics()
    profile = read_packets(
        tmp_path / "t.pftrace",
        STREAM,
        {"trusted_packet_sequence_id": 1, "clock_snapshot": {"clocks": clocks}},
        event(BEGIN, 1_000_100, "boot", timestamp_clock_id=6), event(END, 1_000_200, timestamp_clock_id=6),
        event(BEGIN, 700, "mono", timestamp_clock_id=3), event(END, 710, timestamp_clock_id=3),
        {"trusted_packet_sequence_id": 1, "trace_packet_defaults": incremental},
        step(BEGIN, 2), step(END, 3),
        event(BEGIN, 1_009_000, "lost", timestamp_clock_id=5), event(END, 1_009_001, timestamp_clock_id=5),
        diagnostics=diagnostics,
    )  # fmt: skip
    assert kernels(profile) == ["boot", "mono", "inc", "lost"]
    assert profile.start_ns.tolist() == [0.0, 200.0, 1_900.0, 8_900.0]
    assert profile.duration_ns.tolist() == [100.0, 10.0, 3_000.0, 1.0]
    assert profile.metadata["first_event_ns"] == "1000100"
    assert diagnostics.counts() == {"perfetto.unknown-clock": 2}


def test_stages_of_gpus_are_events_of_their_queues(tmp_path: Path) -> None:
    interned = {
        "gpu_specifications": [{"iid": 1, "name": "Stream 12"}, {"iid": 2, "name": "Kernel"}],
        "compute_kernels": [{"iid": 3, "name": "_Z1av", "demangled_name": "a()"}],
        "event_names": [{"iid": 4, "name": "named"}],
    }

    def stage(at: int, **told: Any) -> Packet:
        return {"timestamp": at, "trusted_packet_sequence_id": 1, "gpu_render_stage_event": told}

    old = {"hw_queue": [{"name": "q0"}, {"name": "stream 3"}], "stage": [{"name": "binning"}]}
    diagnostics = Diagnostics()
    profile = read_packets(
        tmp_path / "t.pftrace",
        {"gpu_info": {"gpus": [{"name": "L40S"}]}},
        {"trusted_packet_sequence_id": 1, "sequence_flags": 1, "interned_data": interned},
        stage(100, event_id=0, duration=50, hw_queue_iid=1, stage_iid=2, kernel_iid=3),
        stage(200, event_id=1, duration=5, hw_queue_iid=1, stage_iid=2, name_iid=4, gpu_id=1),
        stage(0, specifications=old),
        stage(
            300, event_id=2, duration=7, hw_queue_id=1, stage_id=0,
            extra_data=[{"name": "dtype", "value": "bf16"}],
        ),
        diagnostics=diagnostics,
    )  # fmt: skip
    assert kernels(profile) == ["a()", "named", "binning"]
    assert [profile.devices[index] for index in profile.device_index.tolist()] == ["L40S", "GPU 1", "L40S"]
    assert profile.stream.tolist() == [12, 12, 3]
    assert profile.start_ns.tolist() == [0.0, 100.0, 200.0]
    assert profile.duration_ns.tolist() == [50.0, 5.0, 7.0]
    assert profile.strings[int(profile.dtype_id[2])] == "bf16"
    assert diagnostics.counts() == {}


def test_tracks_that_are_no_device_are_the_host_and_flows_join_them(tmp_path: Path) -> None:
    launch, work = event(BEGIN, 10, "launch", 20), event(BEGIN, 50, "kernel", 1)
    launch["track_event"]["flow_ids"] = [77]
    work["track_event"]["terminating_flow_ids"] = [77]
    profile = read_packets(
        tmp_path / "t.pftrace",
        PROCESS, STREAM,
        {"track_descriptor": {"uuid": 20, "thread": {"pid": 6, "tid": 7, "thread_name": "main"}}},
        event(BEGIN, 5, "outer", 20), launch, event(END, 20, track=20), event(END, 90, track=20),
        event(INSTANT, 95, "moment", 20), event(COUNTER, 96, track=20),
        work, event(END, 80), event(INSTANT, 81, "mark"),
    )  # fmt: skip
    assert kernels(profile) == ["kernel", "mark"]
    assert profile.duration_ns.tolist() == [30.0, 0.0]
    assert (profile.devices, profile.rank.tolist(), profile.stream.tolist()) == (("MI300X",), [2, 2], [7, 7])
    assert [profile.strings[row] for row in profile.host.name_id.tolist()] == ["launch", "outer"]
    assert profile.host.parent.tolist() == [1, -1]
    assert profile.host_event.tolist() == [0, -1]


def test_without_a_device_all_slices_are_events(tmp_path: Path) -> None:
    diagnostics = Diagnostics()
    profile = read_packets(
        tmp_path / "t.pftrace", *slices("a", 0, 10), *slices("b", 2, 3), diagnostics=diagnostics
    )
    assert sorted(kernels(profile)) == ["a", "b"]
    assert diagnostics.counts() == {"perfetto.no-device-track": 2, "perfetto.nested": 1}


def test_events_of_older_chrome_traces(tmp_path: Path) -> None:
    def legacy(**told: Any) -> Packet:
        return {"trusted_packet_sequence_id": 1, "track_event": told}

    profile = read_packets(
        tmp_path / "t.pftrace",
        {"trusted_packet_sequence_id": 1, "thread_descriptor": {"reference_timestamp_us": 100}},
        legacy(timestamp_delta_us=5, name="b", legacy_event={"phase": ord("B")}),
        legacy(timestamp_delta_us=2, legacy_event={"phase": ord("E")}),
        legacy(timestamp_absolute_us=300, name="x", legacy_event={"phase": ord("X"), "duration_us": 9}),
    )
    assert sorted(zip(kernels(profile), profile.duration_ns.tolist(), strict=True)) == [
        ("b", 2000.0), ("x", 9000.0)
    ]  # fmt: skip
    assert sorted(profile.start_ns.tolist()) == [0.0, 195_000.0]


def test_compressed_packets_are_read_and_bombs_refused(tmp_path: Path) -> None:
    inner = zlib.compress(trace(STREAM, *slices("a", 0, 10)))
    path = tmp_path / "t.pftrace"
    assert kernels(read_packets(path, {"compressed_packets": inner})) == ["a"]
    bomb = zlib.compress(bytes(100 << 20))
    with pytest.raises(FormatError, match="take more than"):
        read_packets(path, {"compressed_packets": bomb})
    with pytest.raises(FormatError, match="cut off"):
        read_packets(path, {"compressed_packets": inner[:-3]})
    with pytest.raises(UnsupportedError, match="zstd"):
        read_packets(path, {"zstd_compressed_packets": b"x"})


def test_what_has_no_slices_and_a_workload_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="neither slices nor stages"):
        read_packets(tmp_path / "t.pftrace", STREAM, event(COUNTER, 1))
    with pytest.raises(UsageError, match="a workload has no times"):
        write(simulated()[1], tmp_path / "u.pftrace")


@pytest.mark.parametrize("at", [1 << 63, (1 << 64) - 1])
def test_a_time_too_large_is_refused(at: int, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="too large"):
        read_packets(tmp_path / "t.pftrace", STREAM, event(BEGIN, at, "a"))


def test_tracks_in_a_circle_end(tmp_path: Path) -> None:
    circle = [
        {"track_descriptor": {"uuid": 1, "name": "a", "parent_uuid": 2}},
        {"track_descriptor": {"uuid": 2, "name": "b", "parent_uuid": 1}},
    ]
    assert len(read_packets(tmp_path / "t.pftrace", *circle, *slices("x", 0, 1))) == 1


def test_damaged_files_are_format_errors(tmp_path: Path) -> None:
    sound = (GOLDEN / "measured.pftrace").read_bytes()
    path, rng = tmp_path / "broken.pftrace", Random(0)
    for cut in range(0, len(sound), 3):
        path.write_bytes(sound[:cut])
        with suppress(HespasError):  # a trace cut between two packets is a trace
            read(path)
    for _ in range(400):
        data = bytearray(sound)
        for _ in range(rng.choice((1, 3))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(gzip.compress(data, 1) if rng.random() < 0.1 else data)
        with suppress(HespasError):
            read(path)


def test_foreign_traces_are_told_and_other_protobuf_is_not() -> None:
    assert likelihood(trace(STREAM, PROCESS, *slices("a", 0, 10))) >= 90
    assert likelihood(trace({"compressed_packets": zlib.compress(b"")})) >= 50
    assert likelihood(b"\x0a\x05hello") == 0
    assert likelihood(b"\x0a\x07\x0a\x05chakr" + b"\x0a\x00") == 0
    assert likelihood(b"\x0a") == 0


@absent
@pytest.mark.parametrize("path", sorted((DATA / "workloads").glob("*.pb")), ids=lambda path: path.name)
def test_other_protobuf_files_are_not_taken(path: Path) -> None:
    assert likelihood(path.read_bytes()[:65_536]) == 0


@absent
@pytest.mark.parametrize("name", ["h100_qwen1.5-0.5b_inf.json.gz", "mi300x_jax_conv3d.xplane.pb"])
def test_device_time_of_real_traces_is_conserved(name: str, tmp_path: Path) -> None:
    profile = read_any(DATA / "profiles" / name)
    assert isinstance(profile, Profile)
    back = read(write(profile, tmp_path / "t.pftrace"))
    assert len(back) == len(profile)
    assert sorted(back.duration_ns.tolist()) == sorted(profile.duration_ns.tolist())
    assert sorted(back.start_ns.tolist()) == sorted(profile.start_ns.tolist())
    if len(profile.host) and len(back.host):
        assert len(back.host) == len(profile.host)
        assert int((back.host_event >= 0).sum()) == int((profile.host_event >= 0).sum())


@pytest.mark.parametrize(("start", "duration"), [(1e18, 2.0**63), (2.0**63, 1.0), (-4e18, 2.0**62)])
def test_what_ends_too_late_for_the_format_is_not_written(
    start: float, duration: float, tmp_path: Path
) -> None:
    profile = measured()
    starts, durations = profile.start_ns.copy(), profile.duration_ns.copy()
    starts[0], durations[0] = start, duration
    if start < 0:
        starts[1] = 2.0**62 + 2.0**61
    with pytest.raises(UnsupportedError, match="63 bits"):
        write(replace(profile, start_ns=starts, duration_ns=durations), tmp_path / "t.pftrace")
