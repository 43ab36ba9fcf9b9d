"""Each finding about the data, with a recording that has it, and none with a valid recording."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.graph import HostOps, Profile
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.lint import LintFinding, lint_cases, lint_profile
from tests.validators.accuracy.small_profiles import Recording


def _found(recording: Recording) -> dict[str, LintFinding]:
    return {finding.code: finding for finding in lint_profile(recording.build())}


def _host() -> HostOps:
    rows, times = np.zeros(1, np.int32), np.zeros(1)
    return HostOps(
        name_id=rows, thread_id=rows, parent=rows - 1, start_ns=times, duration_ns=times,
        sequence=rows.astype(np.int64), shapes_id=rows, dtype_id=rows, strides_id=rows, values_id=rows,
    )  # fmt: skip


def test_a_clean_recording_has_no_findings() -> None:
    recording = Recording()
    for run in range(3):
        for stream in (0, 1):
            recording.event("dot", 10.5, run=run, stream=stream)
    assert _found(recording) == {}
    assert _found(Recording()) == {}


def test_negative_and_zero_durations() -> None:
    recording = Recording()
    recording.event("a", -5.5, at=0.0)
    recording.event("b", 0.0, at=10.0)
    recording.event("c", 8.5, at=20.0)
    found = _found(recording)
    assert set(found) == {"negative-duration", "zero-duration"}
    assert {each.count for each in found.values()} == {1}
    assert found["zero-duration"].share == 0.0
    assert np.isnan(found["negative-duration"].share)  # what the event took is not known
    assert all(each.source == "recording" for each in found.values())


def test_events_that_overlap_on_one_stream() -> None:
    recording = Recording()
    recording.event("outer", 100.5, at=0.0)
    for at in (10.0, 30.0, 60.0):
        recording.event("inner", 10.0, at=at)
    recording.event("after", 39.0, at=200.0)
    found = _found(recording)
    assert found["overlap"].count == 3, "all that begin inside the first, not only the next"
    assert found["overlap"].share == pytest.approx(30 / 169.5)


@pytest.mark.parametrize(("stream", "rank"), [(1, 0), (0, 1)])
def test_streams_and_ranks_may_overlap(stream: int, rank: int) -> None:
    recording = Recording()
    recording.event("a", 100.5, at=0.0)
    recording.event("b", 100.5, at=50.0, stream=stream, rank=rank)
    assert _found(recording) == {}


def test_devices_may_overlap() -> None:
    recording = Recording()
    recording.event("a", 100.5, at=0.0)
    recording.event("b", 100.5, at=50.0)
    profile = recording.build()
    assert [each.code for each in lint_profile(profile)] == ["overlap"]
    assert lint_profile(replace(profile, device_index=np.array([0, 1], np.int32))) == []


def test_events_without_a_host_operation() -> None:
    recording = Recording(host=_host())
    recording.event("a", 30.5, host=0)
    recording.event("b", 10.5)
    found = _found(recording)
    assert set(found) == {"unlinked"}
    assert found["unlinked"].share == pytest.approx(10.5 / 41)


def test_a_clock_of_whole_microseconds() -> None:
    recording = Recording()
    recording.event("a", 3000.0)
    recording.event("b", 1000.0)
    assert set(_found(recording)) == {"clock-resolution"}
    recording.event("c", 1000.5)
    assert _found(recording) == {}


@pytest.mark.parametrize(("counts", "cut"), [((1, 3, 3), 1), ((3, 3, 2), 2), ((2, 3), 2), ((3, 3, 3), 0)])
def test_a_run_that_the_recording_cut(counts: tuple[int, ...], cut: int) -> None:
    recording = Recording()
    for run, count in enumerate(counts):
        for _ in range(count):
            recording.event("a", 10.5, run=run)
    found = _found(recording)
    assert (found["truncated"].count if cut else len(found)) == cut


def test_modules_may_run_differently_often() -> None:
    recording = Recording()
    for run in range(3):
        recording.event("a", 10.5, module="step", run=run)
    recording.event("b", 10.5, module="init", run=0)
    assert _found(recording) == {}


def test_a_run_in_the_middle_may_differ() -> None:
    recording = Recording()
    for run, count in enumerate((3, 1, 3, 3)):
        for _ in range(count):
            recording.event("a", 10.5, run=run)
    assert _found(recording) == {}


def _collectives(drift_ns_per_s: float, jitter_ns: float, count: int = 50) -> Profile:
    rng = np.random.default_rng(4)
    recording = Recording()
    for number in range(count):
        at = 1e7 * number
        recording.event("psum", 1000.5, at=at, rank=0, collective=number)
        late = drift_ns_per_s * at * 1e-9 + float(rng.normal(0, jitter_ns)) + 5000
        recording.event("psum", 1000.5, at=at + late, rank=1, collective=number)
    return recording.build()


def test_clocks_that_part() -> None:
    [found] = lint_profile(_collectives(20_000.0, 50.0))
    assert (found.code, found.count) == ("clock-drift", 50)
    assert np.isnan(found.share)
    assert "the clock of rank 1 gains 20,0" in found.message or "gains 19,9" in found.message


@pytest.mark.parametrize(("drift", "jitter", "count"), [(0.0, 20_000.0, 50), (100.0, 1.0, 50), (1e6, 0.0, 2)])
def test_chance_is_no_drift(drift: float, jitter: float, count: int) -> None:
    assert lint_profile(_collectives(drift, jitter, count)) == []


def _cases(measured: FloatArray, moved: FloatArray) -> Cases:
    rows = len(measured)
    return Cases(
        source="s", workload="w", hardware="h", labels=("",) * rows, shapes=("a",) * rows,
        shape=np.arange(rows), op_class=np.zeros(rows, np.int8), measured_ns=measured,
        spread_ns=measured * 0, repeats=np.ones(rows, np.int64), flops=moved, bytes_moved=moved,
    )  # fmt: skip


def test_faster_than_the_device_can_be() -> None:
    """Beyond the 50 MB of the cache nothing explains it; within, the data were there already."""
    device = load_device("H100-SXM")
    cases = _cases(np.array([100.0, 50.0, 50.0, 200.0, 0.0]), np.array([1e9, 1e9, 1e6, 1e9, 1e9]))
    found = lint_cases(cases, np.full(5, 100.0), np.ones(5), device)
    assert [(each.code, each.count, each.share) for each in found] == [
        ("physically-impossible", 1, 50 / 400),
        ("cached", 1, 50 / 400),
    ]


def test_a_loop_may_find_its_data_in_the_cache_in_each_trip() -> None:
    device = load_device("H100-SXM")
    cases = _cases(np.array([1600.0, 700.0]), np.array([16e7, 16e7]))
    found = lint_cases(cases, np.array([100.0, 100.0]), np.array([16.0, 16.0]), device)
    assert [(each.code, each.count) for each in found] == [("cached", 1)]


def test_unknown_rooflines_accuse_nobody() -> None:
    cases = _cases(np.array([1.0]), np.array([np.nan]))
    assert lint_cases(cases, np.array([np.nan]), np.ones(1), load_device("H100-SXM")) == []


def test_what_no_clock_tells_is_no_time() -> None:
    recording = Recording()
    recording.event("a", 1e-320, at=0.0)
    recording.event("b", 8.5, at=20.0)
    assert _found(recording)["zero-duration"].count == 1


def test_a_recording_without_any_launch_says_nothing_of_host_operations() -> None:
    recording = Recording(host=_host())
    recording.event("a", 30.5)
    recording.event("b", 10.5)
    assert _found(recording) == {}
