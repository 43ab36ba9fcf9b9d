"""Chrome traces: written files open and read back exactly; files of other tools are read completely."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.api import read as read_any
from hespas.converters import sniff
from hespas.converters.chrome_events import EventStream
from hespas.converters.chrome_trace import FORMAT
from hespas.converters.chrome_trace.writer import write_scene
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.measured_ops.build import costed_ops
from hespas.converters.tracks import Displayed, SimulatedRun, joined_tracks
from hespas.graph import Diagnostics, Profile, StringTable, Workload
from hespas.graph.errors import FormatError, HespasError, UsageError
from tests.converters.tracks.samples import HOSTILE, events, measured, profiles, simulated, spans

GOLDEN = Path(__file__).parent
DATA = Path(__file__).parents[3].parent / "shared" / "data"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")

Event = dict[str, object]


def write(profile: Profile | Workload, path: Path) -> Path:
    assert FORMAT.write is not None
    FORMAT.write(profile, path, WriteOptions(name=path.name), Diagnostics())
    return path


def read(path: Path, diagnostics: Diagnostics | None = None) -> Profile:
    assert FORMAT.read is not None
    profile = FORMAT.read(path, ReadOptions(), Diagnostics() if diagnostics is None else diagnostics)
    assert isinstance(profile, Profile)
    return profile


def trace(path: Path, *listed: Event, **header: object) -> Path:
    path.write_text(json.dumps({"traceEvents": listed, **header}))
    return path


def slice_of(name: str, ts: float | str, dur: float, **more: object) -> Event:
    return {"ph": "X", "name": name, "pid": 4, "tid": 8, "ts": ts, "dur": dur, **more}


def run_into_others(path: Path) -> list[tuple[int, int]]:
    """The slices that a viewer drops: rounded to ns as Perfetto's importer does, they cross others' ends."""
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            threads[event["tid"]].append((start, start + round(event["dur"] * 1000)))
    crossing: list[tuple[int, int]] = []
    for slices in threads.values():
        opened: list[int] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while opened and opened[-1] <= start:
                opened.pop()
            if opened and end > opened[-1]:
                crossing.append((start, end))
            opened.append(end)
    return crossing


@pytest.mark.parametrize("name", ["measured.json", "side_by_side.json"])
def test_golden_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    values: list[tuple[str, Displayed]] = [
        ("measured", measured()),
        ("simulated", SimulatedRun(*simulated())),
    ]
    if name == "measured.json":
        write(measured(), path)
    else:
        write_scene(joined_tracks(values, Diagnostics()), path, WriteOptions())
    assert path.read_text() == (GOLDEN / name).read_text()


def test_a_profile_reads_back_with_its_host_operations(tmp_path: Path) -> None:
    diagnostics = Diagnostics()
    path = write(measured(), tmp_path / "t.json.gz")
    back = read(path, diagnostics)
    assert events(back) == events(measured())
    assert (back.name, back.metadata) == (measured().name, measured().metadata)
    assert sniff(path) is FORMAT
    host, own = back.host, measured().host
    assert [back.strings[row] for row in host.name_id.tolist()] == ["aten::linear", "aten::mm"]
    assert [back.strings[row] for row in host.shapes_id.tolist()] == ["", "[[4, 8]]"]
    assert {back.strings[row] for row in host.thread_id.tolist()} == {"9:1"}
    assert (host.start_ns.tolist(), host.duration_ns.tolist()) == (
        own.start_ns.tolist(), own.duration_ns.tolist(),
    )  # fmt: skip
    assert host.parent.tolist() == [-1, 0]
    caused = dict(zip(back.start_ns.tolist(), back.host_event.tolist(), strict=True))
    assert caused == {2_000: 1, 2_500: 0, 9_000: -1}
    assert "chrome-trace.nested" not in diagnostics.counts()


def test_processes_and_threads_have_distinct_numbers_that_are_not_0(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_scene(joined_tracks([("a", measured()), ("a", measured())], Diagnostics()), path, WriteOptions())
    listed = json.loads(path.read_text())["traceEvents"]
    pids = {event["pid"] for event in listed}
    tids = {event["tid"]: event["pid"] for event in listed if event["tid"]}
    assert len(tids) == len({(event["pid"], event["tid"]) for event in listed if event["tid"]}) == 6
    assert not pids & (set(tids) | {0})


def test_arrows_start_and_end_inside_their_slices(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_scene(joined_tracks([("", SimulatedRun(*simulated()))], Diagnostics()), path, WriteOptions())
    listed = json.loads(path.read_text())["traceEvents"]
    slices = {(event["tid"], event["ts"]) for event in listed if event["ph"] == "X"}
    starts, ends = ([event for event in listed if event["ph"] == phase] for phase in "sf")
    assert len(starts) == len(ends) == 6
    assert {(event["tid"], event["ts"]) for event in (*starts, *ends)} <= slices
    assert [event["id"] for event in starts] == [event["id"] for event in ends] == list(range(6))
    assert {event["bp"] for event in ends} == {"e"}


@settings(max_examples=60)
@given(profile=profiles())
def test_any_times_and_names_read_back_exactly(profile: Profile, tmp_path: Path) -> None:
    path = write(profile, tmp_path / "t.json")
    raw = json.loads(path.read_text(), parse_float=Decimal)["traceEvents"]
    written = sorted(event["ts"] * 1000 for event in raw if event["ph"] == "X")
    assert written == sorted(math.floor(start) for start in profile.start_ns.tolist())
    assert not run_into_others(path)
    back = read(path)
    # a name without a kernel is the operation's or else the category's, which nothing in a file tells
    assert [event[:5] for event in events(back)] == [event[:5] for event in events(profile)]
    named = [row > 0 for row in profile.kernel_id.tolist()]
    if all(named):
        assert events(back) == events(profile)


@settings(max_examples=60)
@given(lengths=st.lists(st.floats(0.0, 1e6), min_size=1, max_size=30))
def test_what_follows_without_a_gap_stays_on_one_thread(lengths: list[float], tmp_path: Path) -> None:
    _, workload = simulated()
    end_ns = np.cumsum(lengths)
    start_ns = np.concatenate([[0.0], end_ns[:-1]])
    run = spans(node=[0] * len(lengths), rank=[0] * len(lengths), start_ns=start_ns.tolist())
    timeline = replace(run, end_ns=end_ns)
    path = tmp_path / "t.json"
    write_scene(joined_tracks([("", SimulatedRun(timeline, workload))], Diagnostics()), path, WriteOptions())
    listed = json.loads(path.read_text())["traceEvents"]
    assert len({event["tid"] for event in listed if event["ph"] == "X"}) == 1
    assert not run_into_others(path)
    back = read(path)
    assert sorted(back.start_ns.tolist()) == sorted(start_ns.tolist())
    assert sorted(back.duration_ns.tolist()) == sorted((end_ns - start_ns).tolist())


def test_overlapping_slices_stand_on_threads_of_one_name(tmp_path: Path) -> None:
    profile = Profile.of(
        "p", ("d",), StringTable.from_strings(["", "a", "b", "c"]), start_ns=np.array([0.0, 5.0, 6.0]),
        duration_ns=np.array([10.0, 10.0, 1.0]), kernel_id=np.array([1, 2, 3], np.int32),
        stream=np.array([4, 4, 4], np.int64),
    )  # fmt: skip
    path = write(profile, tmp_path / "t.json")
    listed = json.loads(path.read_text())["traceEvents"]
    named = [event["args"]["name"] for event in listed if event["name"] == "thread_name"]
    assert named == ["stream 4", "stream 4"]
    assert not run_into_others(path)
    diagnostics = Diagnostics()
    assert events(read(path, diagnostics)) == events(profile)


def test_the_shared_stream_of_events_reads_what_is_written(tmp_path: Path) -> None:
    stream = EventStream(write(measured(), tmp_path / "t.json"), 1 << 20)
    names = [event.name for block, _ in stream.blocks() for event in block if event.ph == "X"]
    assert names == ["gemm", "add", "copy", "aten::linear", "aten::mm"]


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    names = [*HOSTILE, "half \udc80 pair"]
    count = len(names)
    profile = Profile.of(
        "</script>\udfff", ('dev "x"',), StringTable.from_strings(["", *names]),
        start_ns=np.arange(count, dtype=np.float64), duration_ns=np.full(count, 5.0),
        kernel_id=np.arange(1, count + 1, dtype=np.int32), metadata={"k\udc80": "v\n"},
    )  # fmt: skip
    back = read(write(profile, tmp_path / "t.json"))
    read_names = [back.strings[row] for row in back.kernel_id.tolist()]
    assert read_names == [*HOSTILE, "half \ufffd\ufffd\ufffd pair"]
    assert back.devices == ('dev "x"',)


def test_a_trace_of_others(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "t.json",
        {"ph": "M", "name": "process_name", "pid": 4, "args": {"name": "engine"}},
        {"ph": "M", "name": "thread_name", "pid": 4, "tid": 8, "args": {"name": "Stream #13(Compute)"}},
        slice_of("outer", "1700000000000000.375", 10, cat="c", args={"shapes": 5}),
        slice_of("inner", 1_700_000_000_000_001, 2.5),
        {"ph": "B", "name": "pair", "pid": 4, "tid": "text", "ts": 1_700_000_000_000_000},
        {"ph": "E", "pid": 4, "tid": "text", "ts": 1_700_000_000_000_002},
        {"ph": "i", "name": "moment", "pid": 4, "tid": 8, "ts": 1},
        {"ph": "C", "name": "counter", "pid": 4, "ts": 1, "args": {"x": 1}},
    )
    diagnostics = Diagnostics()
    profile = read(path, diagnostics)
    assert sniff(path) is FORMAT
    assert [profile.strings[row] for row in profile.op_id.tolist()] == ["outer", "inner", "pair"]
    assert profile.start_ns.tolist() == [375.0, 1000.0, 0.0]
    assert profile.duration_ns.tolist() == [10_000.0, 2_500.0, 2_000.0]
    assert profile.devices == ("engine",)
    assert profile.stream.tolist() == [13, 13, 1]
    assert profile.metadata["first_event_ns"] == "1700000000000000000"
    assert diagnostics.counts() == {"chrome-trace.other-events": 4, "chrome-trace.nested": 1}
    assert ["2,500 ns" in entry.message for entry in diagnostics if "nested" in entry.code] == [True]


def test_what_does_not_end_lasts_to_the_end_and_an_end_alone_is_told(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "t.json",
        {"ph": "B", "name": "open", "pid": 1, "tid": 1, "ts": 2},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 3},
        slice_of("last", 5, 5),
    )
    diagnostics = Diagnostics()
    profile = read(path, diagnostics)
    assert sorted(profile.duration_ns.tolist()) == [5_000.0, 8_000.0]
    assert diagnostics.counts() == {"chrome-trace.unfinished": 1, "chrome-trace.end-without-begin": 1}


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "name": "no time"},
        {"ph": "X", "ts": "soon", "dur": 1},
        {"ph": "X", "ts": 1, "dur": "nan"},
        {"ph": "X", "ts": 1e300, "dur": 1},
    ],
)
def test_an_event_without_a_sensible_time_is_refused(event: Event, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="time"):
        read(trace(tmp_path / "t.json", event))


def test_a_trace_without_slices_and_a_workload_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no slices"):
        read(trace(tmp_path / "t.json", {"ph": "i", "name": "moment", "ts": 1}))
    with pytest.raises(UsageError, match="a workload has no times"):
        write(simulated()[1], tmp_path / "u.json")


def test_damaged_files_are_format_errors(tmp_path: Path) -> None:
    sound = write(measured(), tmp_path / "t.json").read_bytes()
    path, rng = tmp_path / "broken.json", Random(0)
    for cut in (*range(0, len(sound) - 1, 7), len(sound) - 2):
        path.write_bytes(sound[:cut])
        with pytest.raises(FormatError):
            read(path)
    for _ in range(300):
        data = bytearray(sound)
        for _ in range(rng.choice((1, 3))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(gzip.compress(data, 1) if rng.random() < 0.1 else data)
        with suppress(HespasError):
            read(path)


@absent
@pytest.mark.parametrize("name", ["h100_qwen1.5-0.5b_inf.json.gz", "mi300x_jax_conv3d.xplane.pb"])
def test_device_time_of_real_traces_is_conserved(name: str, tmp_path: Path) -> None:
    profile = read_any(DATA / "profiles" / name)
    assert isinstance(profile, Profile)
    back = read(write(profile, tmp_path / "t.json.gz"))
    assert len(back) == len(profile)
    assert back.duration_ns.sum() == pytest.approx(profile.duration_ns.sum(), rel=0, abs=0.5)
    assert sorted(back.start_ns.tolist()) == sorted(profile.start_ns.tolist())


def test_the_slice_with_a_bad_time_is_named(tmp_path: Path) -> None:
    sound = slice_of("a", 1, 2)
    for damage, field in (({"ts": None}, "ts"), ({"dur": "soon"}, "dur")):
        with pytest.raises(FormatError, match="'gemm'") as caught:
            read(trace(tmp_path / "t.json", {"ph": "M"}, sound, slice_of("gemm", 1, 2) | damage))
        assert caught.value.position == f"event 3, field '{field}'"


def test_events_of_one_operation_are_costed_once_when_read_back(tmp_path: Path) -> None:
    profile = measured()
    both = replace(profile, op_id=np.array([2, 2, 2], np.int32), host_event=np.array([1, 1, 1], np.int32))
    strings = [*both.strings]
    strings += ["[[4, 8], [8, 2]]", '["float", "float"]']
    row = np.array([0, len(strings) - 2], np.int32)
    host = replace(both.host, shapes_id=row, dtype_id=row + np.array([0, 1], np.int32))
    both = replace(both, strings=StringTable.from_strings(strings), host=host)
    back = read(write(both, tmp_path / "t.json"))
    assert np.nansum(costed_ops(back).graph.flops) == np.nansum(costed_ops(both).graph.flops) == 2 * 4 * 8 * 2
