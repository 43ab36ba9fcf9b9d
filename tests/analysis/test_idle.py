"""Idle causes, launches and queues, compared with the same rules applied event by event."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.analysis.device_use import WHOLE_DEVICE
from tests.analysis.raw import Event, load, traces
from tests.converters.pytorch.traces import Json, host, kernel, launch, write_kineto


def gaps_of(events: list[Event], every: list[Event]) -> dict[str, list[float]]:
    """Length of the gaps by cause."""
    found: dict[str, list[float]] = defaultdict(list)
    reached = events[0].end
    for event in events[1:]:
        length = event.start - reached
        if length > 0:
            found[cause_of(event, reached, length, every)].append(length)
        reached = max(reached, event.end)
    return found


def cause_of(event: Event, began: float, length: float, every: list[Event]) -> str:
    if event.launch is None:
        return "launch unknown"
    if event.launch[0] > began:
        behind_the_call = event.start - event.launch[0]
        return "launch delay" if behind_the_call > length / 2 else "host-bound"
    if length < 30_000:
        return "kernel delay"
    ended = [each for each in every if began < each.end <= event.start]
    last = max(ended, key=lambda each: each.end, default=None)
    if last is None or event.start - last.end >= 30_000:
        return "other"
    return "communication" if last.kind == "communication" else "other stream"


@pytest.mark.parametrize("path", traces())
def test_gaps_by_cause(path: Path) -> None:
    events = load(path).events
    table = hespas.analyze(path).tables.idle
    streams = {WHOLE_DEVICE: events} | {
        number: [each for each in events if each.stream == number]
        for number in sorted({each.stream for each in events})
    }
    rows = {(row.stream, row.cause): row for row in table.rows()}
    wanted = {
        (stream, cause): lengths
        for stream, chosen in streams.items()
        for cause, lengths in gaps_of(chosen, events).items()
    }
    assert rows.keys() == wanted.keys()
    for key, lengths in wanted.items():
        row = rows[key]
        assert (row.count, row.total_ns, row.max_ns) == (len(lengths), sum(lengths), max(lengths))
        assert row.mean_ns == pytest.approx(statistics.fmean(lengths))
        of_stream = sum(sum(each) for (stream, _), each in wanted.items() if stream == key[0])
        assert row.share == pytest.approx(sum(lengths) / of_stream)


@pytest.mark.parametrize("path", traces())
def test_the_gaps_of_the_device_are_its_idle_time(path: Path) -> None:
    found = hespas.analyze(path).tables
    whole = found.idle["total_ns"][found.idle["stream"] == WHOLE_DEVICE].sum()
    assert whole == found.breakdown["idle_ns"][0]
    assert found.gaps["total_ns"].sum() == whole
    assert bool((found.idle["before_launch_ns"] <= found.idle["total_ns"]).all())


@pytest.mark.parametrize("path", traces())
def test_queues_and_launches(path: Path) -> None:
    launched = [each for each in load(path).events if each.launch is not None]
    found = hespas.analyze(path).tables
    by_stream: dict[int, list[Event]] = defaultdict(list)
    for event in launched:
        by_stream[event.stream].append(event)
    assert set(found.queues["stream"].tolist()) == set(by_stream)
    for row in found.queues.rows():
        events = by_stream[row.stream]
        calls = [each.launch[0] for each in events if each.launch]
        changes = sorted([(at, -1) for at in calls] + [(each.start, 1) for each in events])
        length, longest, weighted, empty, before = 0, 0, 0.0, 0.0, changes[0][0]
        for at, step in changes:
            weighted += length * (at - before)
            empty += (at - before) * (length <= 0)
            length, before = length - step, at
            longest = max(longest, length)
        whole = changes[-1][0] - changes[0][0]
        assert row.count == len(events)
        assert row.max_length == longest
        assert row.mean_length == pytest.approx(weighted / whole)
        assert row.empty_share == pytest.approx(empty / whole, abs=1e-12)
    points = found.queue_points
    for stream in by_stream:
        of_stream = points["length"][points["stream"] == stream]
        assert of_stream.max() == found.queues["max_length"][found.queues["stream"] == stream].max()
    assert found.launches["count"].sum() == len(launched)
    short = sum(each.ns < each.launch[1] - each.launch[0] for each in launched if each.launch)
    assert found.launches["short"].sum() == short
    calls_ns = sum(each.launch[1] - each.launch[0] for each in launched if each.launch)
    assert found.launches["call_total_ns"].sum() == calls_ns


def test_every_cause_there_is(tmp_path: Path) -> None:
    """In microseconds: 100 of computing, and each gap of stream 7 with one reason."""
    talk: Json = {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float"}
    events = [
        host("aten::add", 0, 4000),
        *(launch(at, number) for at, number in ((1, 1), (250, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7))),
        kernel("a", 100, 100, 1),
        kernel("late", 300, 100, 2),  # 50 before its launch was called, 50 after
        kernel("soon", 420, 80, 3),
        kernel("ncclDevKernel_AllReduce_Sum", 410, 190, 4, talk, stream=20),
        kernel("behind it", 601, 99, 5),
        kernel("elsewhere", 650, 150, 6, stream=9),
        kernel("behind that", 805, 95, 7),
        kernel("nobody knows", 1000, 100, 99),
        launch(1110, 8),
        kernel("long on its way", 1150, 50, 8),
    ]
    found = hespas.analyze(write_kineto(tmp_path / "t.json", events)).tables
    rows = {row.cause: row for row in found.idle.rows() if row.stream == 7}
    assert {cause: row.total_ns for cause, row in rows.items()} == {
        "host-bound": 100_000,
        "launch delay": 50_000,
        "kernel delay": 20_000,
        "communication": 101_000,
        "other stream": 105_000,
        "launch unknown": 100_000,
    }
    assert rows["host-bound"].before_launch_ns == 50_000
    assert rows["launch delay"].before_launch_ns == 10_000
    whole = {row.cause: row.total_ns for row in found.idle.rows() if row.stream == WHOLE_DEVICE}
    assert whole == {
        "host-bound": 100_000,
        "launch delay": 50_000,
        "kernel delay": 10_000 + 1_000 + 5_000,
        "launch unknown": 100_000,
    }


def test_no_launches_no_queue(tmp_path: Path) -> None:
    events = [kernel("a", 0, 5), kernel("b", 9, 5)]
    found = hespas.analyze(write_kineto(tmp_path / "t.json", events)).tables
    assert len(found.queues) == len(found.launches) == len(found.queue_points) == 0
    assert found.idle["cause"].tolist() == ["launch unknown"] * 2
    assert np.isfinite(found.idle["mean_ns"]).all()


def test_events_of_no_known_stream_count_for_the_device_alone(tmp_path: Path) -> None:
    nothing: Json = {"args": {}}
    events = [kernel("a", start, 10) | nothing for start in (0, 30)] + [kernel("a", 90, 10)]
    write_kineto(tmp_path / "k.json", events)
    found = hespas.analyze(tmp_path / "k.json").tables
    assert {row.stream for row in found.idle.rows()} == {WHOLE_DEVICE}
    assert sum(row.share for row in found.idle.rows()) == pytest.approx(1)
    assert sum(row.total_ns for row in found.idle.rows()) == 70_000
