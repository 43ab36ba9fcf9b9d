"""``hespas simulate --timeline``: the file opens, has exact times, and is written atomically."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hespas import api
from hespas.cli.main import app
from hespas.graph import Diagnostics, Profile, Timeline, Workload
from hespas.graph.errors import OutputError, UsageError
from tests.converters.pytorch.traces import Json, annotation, kernel, launch, write_kineto
from tests.converters.tracks.samples import measured, simulated
from tests.simulator.small_programs import Sketch

ROOT = Path(__file__).parents[2]
STEP = ROOT / "fixtures" / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"
LOOP = ROOT / "fixtures" / "stablehlo" / "fori_static.mlir"
VIEWED = ("t.json", "t.json.gz", "t.pftrace", "t.perfetto-trace")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["simulate", *(str(each) for each in arguments)])


def simulated_step(source: Path = STEP) -> tuple[Timeline, Workload]:
    workload = api.read(source)
    assert isinstance(workload, Workload)
    done = api.simulate(workload, "H100-SXM")
    return done.timeline, done.workload


def times_of(path: Path) -> list[tuple[float, float]]:
    """Start and duration of all that a trace or table reads back as."""
    found = api.read(path)
    assert isinstance(found, Profile)
    return sorted(zip(found.start_ns.tolist(), found.duration_ns.tolist(), strict=True))


def from_zero(times: list[tuple[float, float]]) -> set[tuple[float, float]]:
    """The times when work begins at 0, as that of a simulated step does."""
    return {(start - times[0][0], duration) for start, duration in times}


def trace_events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    listed: list[dict[str, Any]] = json.loads(text, parse_float=Decimal)["traceEvents"]
    return listed


def processes(path: Path) -> list[str]:
    return [event["args"]["name"] for event in trace_events(path) if event["name"] == "process_name"]


@pytest.mark.parametrize("name", [*VIEWED, "t.csv", "t.csv.gz"])
def test_the_file_holds_the_times_of_the_run_exactly(name: str, tmp_path: Path) -> None:
    done = run(STEP, "--hardware", "H100-SXM", "--timeline", tmp_path / name)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert done.stdout == run(STEP, "--hardware", "H100-SXM").stdout
    assert [path.name for path in tmp_path.iterdir()] == [name]
    timeline, _ = simulated_step()
    durations = (timeline.end_ns - timeline.start_ns).tolist()
    assert times_of(tmp_path / name) == sorted(zip(timeline.start_ns.tolist(), durations, strict=True))


def test_a_viewer_is_told_the_resources_of_the_ranks_and_what_waits_for_what(tmp_path: Path) -> None:
    assert run(STEP, "--hardware", "H100-SXM", "--timeline", tmp_path / "t.json").exit_code == 0
    listed = trace_events(tmp_path / "t.json")
    assert processes(tmp_path / "t.json") == ["rank 0: and 7 alike"]
    threads = {event["args"]["name"] for event in listed if event["name"] == "thread_name"}
    assert threads == {"compute", "communication"}
    slices = [event for event in listed if event["ph"] == "X"]
    timeline, workload = simulated_step()
    [graph] = workload.classes
    names = [graph.strings[row] for row in graph.name_id[timeline.node].tolist()]
    assert sorted(event["name"] for event in slices) == sorted(names)
    assert sum(event["args"].get("critical") == "yes" for event in slices) == int(timeline.critical.sum())
    assert {event["name"] for event in listed if event["ph"] == "s"} == {"data"}


def test_a_loop_and_times_of_the_file_itself(tmp_path: Path) -> None:
    assert run(LOOP, "--hardware", "L4", "--timeline", tmp_path / "t.json").exit_code == 0
    s = Sketch()
    first = s.add("compute", 2000)
    s.add("compute", 500, s.add("comm", 1000, first))
    api.write(Workload.spmd(s.build(), 4), tmp_path / "g.json")
    assert run(tmp_path / "g.json", "--timeline", tmp_path / "own.json").exit_code == 0
    slices = [event for event in trace_events(tmp_path / "own.json") if event["ph"] == "X"]
    assert sorted((event["ts"], event["dur"]) for event in slices) == [(0, 2), (2, 1), (3, Decimal("0.5"))]
    assert not any("start_ns" in event.get("args", {}) for event in slices)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_measured_profile_stands_beside_the_run(name: str, tmp_path: Path) -> None:
    profile, target = tmp_path / "measured.csv", tmp_path / name
    api.write(measured(), profile)
    done = run(STEP, "--hardware", "H100-SXM", "--timeline", target, "--overlay", profile)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    sides = ["measured rank 3: H100", "measured rank 3 host", "simulated rank 0: and 7 alike"]
    assert processes(target) == sides
    assert len(times_of(target)) == len(measured()) + len(simulated_step()[0])
    assert from_zero(times_of(profile)) <= set(times_of(target))


def test_a_folder_of_ranks_stands_beside_the_run_on_one_clock(tmp_path: Path) -> None:
    """Device work of the first step begins at 0; the second rank's clock is 5 ms ahead, and its first
    collective ends with the first rank's.
    """
    folder, target = tmp_path / "job", tmp_path / "t.json"
    folder.mkdir()
    for rank, (clock_us, late_us) in enumerate(((100.0, 0.0), (5_100.0, 3.0))):
        talk: Json = {"Collective name": "allreduce", "Process Group Name": "0", "Seq": 7, "Group size": 2}
        events = [
            annotation("ProfilerStep#1", clock_us + 50, 200),
            launch(clock_us, 1),
            kernel("warm-up", clock_us + 10, 20, 1),
            launch(clock_us + 60, 2),
            kernel("gemm", clock_us + 70 + late_us, 20, 2),
            launch(clock_us + 61, 3),
            kernel("ncclDevKernel", clock_us + 90 + late_us, 30 - late_us, 3, talk, stream=9),
        ]
        about = {"rank": rank, "world_size": 2}
        write_kineto(folder / f"rank{rank}.json", events, distributedInfo=about)
    done = run(STEP, "--hardware", "H100-SXM", "--timeline", target, "--overlay", folder)
    assert done.exit_code == 0, done.output
    assert [name for name in processes(target) if "measured" in name] == [
        "measured rank 0",
        "measured rank 1",
    ]
    slices = [event for event in trace_events(target) if event["ph"] == "X"]
    starts = {name: [each["ts"] for each in slices if each["name"] == name] for name in ("warm-up", "gemm")}
    assert starts == {"warm-up": [-60, -60], "gemm": [0, 3]}
    ends = [each["ts"] + each["dur"] for each in slices if each["name"] == "ncclDevKernel"]
    assert ends == [50, 50]
    talks = {(each["pid"], each["tid"]) for each in slices if each["name"] == "ncclDevKernel"}
    arrows = [event for event in trace_events(target) if event["ph"] in "sf" and event["cat"] == "collective"]
    assert {(each["pid"], each["tid"]) for each in arrows if (each["pid"], each["tid"]) in talks} == talks


def test_what_is_found_in_the_profile_is_told_under_its_name(tmp_path: Path) -> None:
    profile, target = tmp_path / "measured.csv", tmp_path / "t.json"
    profile.write_text("op,duration_ns,start_ns,mood\na,5,,good\nb,7,1,good\n")
    done = run(STEP, "--hardware", "H100-SXM", "--timeline", target, "--overlay", profile)
    assert done.exit_code == 0, done.output
    told = done.stderr.splitlines()
    assert [line.startswith(f"warning: {profile}: ") for line in told] == [True, False]
    assert "[ops-table.unknown-column]" in told[0]
    assert "5 ns of device time [tracks.no-start]" in told[1]


def test_a_perfetto_trace_with_both_sides(tmp_path: Path) -> None:
    profile, target = tmp_path / "measured.csv", tmp_path / "t.pftrace"
    api.write(measured(), profile)
    assert run(STEP, "--hardware", "H100-SXM", "--timeline", target, "--overlay", profile).exit_code == 0
    found = api.read(target)
    assert isinstance(found, Profile)
    assert from_zero(times_of(profile)) <= set(times_of(target))
    assert set(found.rank.tolist()) == {0, 3}


def test_a_table_says_that_nothing_was_measured(tmp_path: Path) -> None:
    assert run(STEP, "--hardware", "H100-SXM", "--timeline", tmp_path / "t.csv").exit_code == 0
    rows = list(csv.DictReader(StringIO((tmp_path / "t.csv").read_text())))
    timeline, workload = simulated_step()
    assert len(rows) == len(timeline)
    assert {row["hardware"] for row in rows} == {"simulated H100-SXM"}
    assert {int(row["stream"]) for row in rows} == set(timeline.resource.tolist())
    [graph] = workload.classes
    assert [row["op"] for row in rows] == [
        graph.strings[place] for place in graph.name_id[timeline.node].tolist()
    ]
    contraction = next(row for row in rows if row["op_class"] == "contraction")
    shapes, dtypes = json.loads(contraction["shapes"]), json.loads(contraction["dtype"])
    assert len(shapes) == len(dtypes) == 2
    assert all(isinstance(extent, int) for shape in shapes for extent in shape)


@pytest.mark.parametrize("name", [*VIEWED, "t.csv"])
def test_an_earlier_timeline_is_replaced_and_a_profile_is_not(name: str, tmp_path: Path) -> None:
    target = tmp_path / name
    api.write_timeline(*simulated(), target)
    before = target.read_bytes()
    done = run(STEP, "--hardware", "L4", "--timeline", target)
    assert (done.exit_code, "add --overwrite" in done.stderr) == (2, True)
    assert target.read_bytes() == before
    assert run(STEP, "--hardware", "L4", "--timeline", target, "--overwrite").exit_code == 0
    assert target.read_bytes() != before
    other = tmp_path / f"measured.{name.partition('.')[2]}"
    api.write(measured(), other, format="chrome-trace" if ".json" in name else None)
    before = other.read_bytes()
    done = run(STEP, "--hardware", "L4", "--timeline", other, "--overwrite")
    assert done.exit_code == 2
    assert "holds a workload or a measured profile" in done.stderr
    assert other.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timeline", "t.txt"], "the suffix '.txt' does not name a timeline format"),
        (["--timeline", "trace"], "a name without a suffix does not name a timeline format"),
        (["--timeline", "t.parquet.gz"], "the suffix '.parquet' does not name a timeline format"),
        (["--timeline", "-"], "a name without a suffix"),
        (["--timeline", "absent/t.json"], "the folder does not exist"),
        (["--timeline", "folder.json"], "exists and is a directory"),
        (["--timeline", "t.json", "--json", "t.json"], "--json names the same file as --timeline"),
        (["--timeline", "t.csv", "--overlay", "m.csv"], "cannot hold an overlay"),
        (["--overlay", "m.csv"], "--overlay requires --timeline"),
        (["--timeline", "t.json", "--overlay", str(STEP)], "--overlay: expected a measured profile"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(
    arguments: Sequence[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    api.write(measured(), tmp_path / "m.csv")
    done = run(STEP, "--hardware", "L4", *arguments)
    assert done.exit_code == 2, done.output
    assert message in re.sub(r"\s+", " ", done.stderr)
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.json", "m.csv"]


def test_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    s = Sketch()
    s.add("compute", 5)
    source = tmp_path / "g.json"
    api.write(Workload.spmd(s.build(), 1), source)
    before = source.read_bytes()
    assert run(source, "--timeline", source).exit_code == 2
    assert source.read_bytes() == before
    assert (
        run(source, "--timeline", tmp_path / "t.json", "--overlay", tmp_path / "absent.json").exit_code == 3
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.json"]


def test_a_timeline_of_another_workload_leaves_no_file(tmp_path: Path) -> None:
    timeline, _ = simulated_step()
    for name in ("t.json", "t.csv"):
        with pytest.raises(UsageError, match="the timeline has"):
            api.write_timeline(timeline, simulated()[1], tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "t.json"
    api.write_timeline(*simulated(), target)
    before = target.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hespas.converters.chrome_trace.writer._spelled_slices", full)
    with pytest.raises(OutputError, match="No space left"):
        api.write_timeline(*simulated(), target, overwrite=True)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_what_took_no_time_makes_an_empty_timeline(tmp_path: Path) -> None:
    empty = np.empty(0)
    nothing = Timeline(
        resources=("compute",), node=empty.astype(np.int32), rank=empty.astype(np.int32),
        resource=empty.astype(np.int8), start_ns=empty, end_ns=empty, critical=empty.astype(np.bool_),
        finish_ns=np.zeros(2), exposed_comm_ns=np.zeros(2),
    )  # fmt: skip
    for name in (*VIEWED, "t.csv"):
        api.write_timeline(nothing, simulated()[1], tmp_path / name, diagnostics=Diagnostics())
    assert trace_events(tmp_path / "t.json") == []
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 1
