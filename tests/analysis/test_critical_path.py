"""Critical path: it covers the step without gaps, and equals a backwards search from step to step."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

import hespas
from hespas.analysis.critical_path import SegmentRow
from tests.analysis.raw import DATA, FIXTURE, Event, absent, load, traces
from tests.converters.pytorch.traces import Json, call, host, kernel, launch, write_kineto

_CALLS = {"cuda_runtime", "hip_runtime", "cuda_driver"}
Stretch = tuple[str, float, float]


def expected(path: Path, step: int) -> list[Stretch]:
    """Kind, start and end of each stretch, the last first, by looking at everything for each one."""
    trace = load(path)
    events = trace.events
    window = [each for each in events if step in {-1, each.step}]
    begin = min(each.start for each in window)
    waits: list[tuple[float, float, Event]] = []
    for each in trace.raw:
        if each["cat"] in {"cuda_runtime", "hip_runtime", "cuda_driver"} and each["name"].endswith(
            "Synchronize"
        ):
            start = round((each["ts"] - trace.base_us) * 1000)
            end = start + round(each["dur"] * 1000)
            done = [event for event in events if event.end <= end]
            last = max(done, key=lambda event: event.end, default=None)
            if last is not None and last.end >= start:
                waits.append((start, end, last))
    waits += [(*each.launch, each) for each in events if each.launch and each.launch[1] >= each.end]
    found: list[Stretch] = []
    event: Event | None = max(window, key=lambda each: each.end)
    assert event is not None
    until = event.end
    while event is not None and until > begin:
        start = max(event.start, begin)
        found.append((event.kind, start, until))
        if start <= begin:
            break
        event, until = earlier(events, waits, event, begin, found)
    return [each for each in found if each[2] > each[1]]


def earlier(
    events: list[Event],
    waits: list[tuple[float, float, Event]],
    event: Event,
    begin: float,
    found: list[Stretch],
) -> tuple[Event | None, float]:
    place, start = events.index(event), event.start
    on_stream = [each for each in events[:place] if each.stream == event.stream]
    before = max(on_stream, key=lambda each: each.end, default=None)
    ended = [each for each in events if each.end <= start and each.start < start]
    other = max(ended, key=lambda each: each.end, default=None)
    other_end = other.end if other and start - other.end < 30_000 else float("-inf")
    before_end = min(before.end, start) if before else float("-inf")
    launched = min(event.launch[0], start) if event.launch else float("-inf")
    if launched > max(before_end, other_end):
        found.append(("launch", max(launched, begin), start))
        held = [each for each in waits if each[1] <= launched and each[2].start < start and each[1] > begin]
        if not held:
            found.append(("host", begin, launched))
            return None, begin
        _, released, cause = max(held, key=lambda each: each[1])
        found += [
            ("host", released, launched),
            ("synchronisation", max(min(cause.end, released), begin), released),
        ]
        return cause, min(cause.end, released)
    if before is not None and before_end >= other_end:
        found.append(("kernel delay", max(before_end, begin), start))
        return before, before_end
    if other is not None and other_end > float("-inf"):
        found.append(("stream wait", max(other_end, begin), start))
        return other, other_end
    found.append(("unknown", begin, start))
    return None, begin


def by_kind(stretches: list[Stretch]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for kind, start, end in stretches:
        sums[kind] += end - start
    return dict(sums)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(FIXTURE, id="fixture"),
        pytest.param(DATA / "h100_bert-small_inf.json.gz", id="bert", marks=absent),
        pytest.param(DATA / "mi300x_sglang_qwen3-8b_prefill.json.gz", id="sglang", marks=absent),
        pytest.param(DATA / "h100_timesformer_inf.json.gz", id="timesformer", marks=absent),
    ],
)
def test_time_by_kind_is_what_a_search_finds(path: Path) -> None:
    found = hespas.analyze(path).tables
    step = int(found.critical_path["step"][0])
    wanted = by_kind(expected(path, step))
    sums: dict[str, float] = defaultdict(float)
    for row in found.critical_path.rows():
        sums[row.kind] += row.total_ns
    assert {kind: sum_ns for kind, sum_ns in sums.items() if sum_ns} == pytest.approx(wanted)


def covers(rows: list[SegmentRow], start: float, span: float) -> None:
    assert rows[0].start_ns == start
    for before, after in pairwise(rows):
        assert before.start_ns + before.duration_ns == after.start_ns
    assert rows[-1].start_ns + rows[-1].duration_ns == start + span


@pytest.mark.parametrize("path", traces())
def test_the_path_covers_a_step_without_a_gap(path: Path) -> None:
    found = hespas.analyze(path).tables
    step = int(found.critical_path["step"][0])
    (whole,) = [row for row in found.breakdown.rows() if row.step == step]
    covers(found.critical_segments.rows(), whole.start_ns, whole.span_ns)
    assert found.critical_path["total_ns"].sum() == pytest.approx(whole.span_ns)
    assert found.critical_path["share"].sum() == pytest.approx(1.0)
    spans = sorted(row.span_ns for row in found.breakdown.rows() if row.step >= 0)
    if spans:
        assert whole.span_ns == spans[(len(spans) - 1) // 2]


def test_every_kind_there_is(tmp_path: Path) -> None:
    """In microseconds. The host waits for ``first``, works, and launches the rest."""
    talk: Json = {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float"}
    events = [
        launch(0, 1),
        host("aten::item", 2, 118),
        call("cudaStreamSynchronize", 5, 100),
        host("aten::work", 125, 60),
        host("aten::inner", 130, 20),
        launch(170, 2), launch(172, 3), launch(174, 4), launch(176, 5),
        kernel("first", 10, 90, 1),
        kernel("second", 180, 100, 2),
        kernel("third", 283, 17, 3),
        kernel("ncclDevKernel_AllReduce_Sum", 305, 95, 4, talk, stream=20),
        kernel("last", 402, 98, 5),
    ]  # fmt: skip
    found = hespas.analyze(write_kineto(tmp_path / "t.json", events)).tables
    rows = found.critical_segments.rows()
    covers(rows, 10_000, 490_000)
    assert [(row.kind, row.duration_ns / 1000) for row in rows] == [
        ("compute", 90),
        ("synchronisation", 5),
        ("host", 65),
        ("launch", 10),
        ("compute", 100),
        ("kernel delay", 3),
        ("compute", 17),
        ("stream wait", 5),
        ("communication", 95),
        ("stream wait", 2),
        ("compute", 98),
    ]
    on_host = {row.name: row.total_ns / 1000 for row in found.critical_path.rows() if row.kind == "host"}
    # from 105 to 170: item until 120, nothing until 125, then work around inner
    assert on_host == {"aten::item": 15, "": 5, "aten::work": 25, "aten::inner": 20}


def test_what_nothing_explains(tmp_path: Path) -> None:
    events = [kernel("a", 0, 10, stream=1), kernel("b", 100, 10, stream=2)]
    rows = hespas.analyze(write_kineto(tmp_path / "t.json", events)).tables.critical_segments.rows()
    assert [(row.kind, row.duration_ns) for row in rows] == [("unknown", 100_000), ("compute", 10_000)]


def test_events_of_no_time_end_the_walk(tmp_path: Path) -> None:
    events = [kernel(name, 10, 0, stream=stream) for name, stream in (("a", 1), ("b", 2), ("c", 1))]
    found = hespas.analyze(write_kineto(tmp_path / "t.json", events)).tables
    assert found.critical_path["total_ns"].sum() == 0
