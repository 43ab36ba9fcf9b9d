"""Time breakdown of ranks and steps, compared with figures computed from the file moment by moment."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hespas
from hespas.analysis.device_use import breakdown
from hespas.analysis.recording import DeviceEventKind, recordings_of
from hespas.graph import Diagnostics, Profile, StringTableBuilder
from hespas.graph.timeline import Intervals
from tests.analysis.raw import DATA, Event, absent, covered, load, traces


def _profile(path: Path) -> Profile:
    found = hespas.read(path)
    assert isinstance(found, Profile)
    return found


@pytest.mark.parametrize("path", traces())
def test_every_figure_of_ranks_and_steps(path: Path) -> None:
    events = load(path).events
    table = breakdown(recordings_of([_profile(path)], Diagnostics()))
    steps = sorted({event.step for event in events if event.step >= 0})
    assert table["step"].tolist() == [-1, *steps]
    for row in table.rows():
        of_step = [event for event in events if row.step in {-1, event.step}]
        by_kind = {
            kind: [each for each in of_step if each.kind == kind]
            for kind in ("compute", "communication", "memory")
        }
        compute, talk = by_kind["compute"], by_kind["communication"]
        both = covered([*compute, *talk])
        assert row.start_ns == min(each.start for each in of_step)
        assert row.span_ns == max(each.end for each in of_step) - row.start_ns
        assert row.busy_ns == covered(of_step)
        assert row.compute_ns == covered(compute)
        assert row.communication_ns == covered(talk)
        assert row.memory_ns == covered(by_kind["memory"])
        assert row.exposed_communication_ns == both - covered(compute)
        assert row.exposed_memory_ns == covered(of_step) - both
        assert row.idle_ns == row.span_ns - covered(of_step)


@pytest.mark.parametrize("path", traces())
def test_the_parts_add_up_to_the_span_exactly(path: Path) -> None:
    table = breakdown(recordings_of([_profile(path)], Diagnostics()))
    parts = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns")
    np.testing.assert_array_equal(sum(table[name] for name in parts), table["span_ns"])
    np.testing.assert_array_equal(table["busy_ns"] + table["idle_ns"], table["span_ns"])


_SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(-2, 20), st.sampled_from(DeviceEventKind), st.integers(-1, 2)),
    min_size=1,
)


@given(_SPANS)
def test_any_events_add_up(spans: list[tuple[int, int, DeviceEventKind, int]]) -> None:
    strings = StringTableBuilder()
    names = {
        DeviceEventKind.COMPUTE: "gemm",
        DeviceEventKind.COMMUNICATION: "ncclDevKernel_AllReduce",
        DeviceEventKind.MEMORY: "Memcpy DtoD",
    }
    for kind in DeviceEventKind:
        strings.add(names[kind])
    profile = Profile.of(
        "p",
        (),
        strings.build(),
        kernel_id=np.array([int(kind) + 1 for _, _, kind, _ in spans]),
        run=np.array([step for *_, step in spans]),
        start_ns=np.array([start for start, *_ in spans]),
        duration_ns=np.array([length for _, length, *_ in spans]),
    )
    table = breakdown(recordings_of([profile], Diagnostics()))
    for row in table.rows():
        chosen = [
            Event("", kind.word, start, start + max(length, 0), 0, None)
            for start, length, kind, step in spans
            if row.step in {-1, step}
        ]
        assert row.busy_ns == covered(chosen)
        assert row.communication_ns == covered([each for each in chosen if each.kind == "communication"])
        parts = (row.compute_ns, row.exposed_communication_ns, row.exposed_memory_ns, row.idle_ns)
        assert sum(parts) == row.span_ns
        assert min(parts) >= 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10))), st.integers(0, 60), st.integers(0, 20))
def test_how_much_of_a_span_is_covered(spans: list[tuple[int, int]], start: int, length: int) -> None:
    begin = np.array([span[0] for span in spans], np.float64)
    end = begin + np.array([span[1] for span in spans], np.float64)
    union = Intervals.union(begin, end)
    moments = {at for first, last in zip(begin, end, strict=True) for at in range(int(first), int(last))}
    assert union.length_ns == len(moments)
    found = union.within_ns(np.array([start], np.float64), np.array([start + length], np.float64))
    assert found.tolist() == [len(moments & set(range(start, start + length)))]
    assert bool((union.start[1:] > union.end[:-1]).all())


@absent
def test_holistic_trace_analysis_says_the_same() -> None:
    """Figures of HTA 0.5.0 on this trace with all of its steps: ``get_temporal_breakdown`` and
    ``get_comm_comp_overlap`` in us, ``get_idle_time_breakdown`` by stream.
    """
    found = hespas.analyze(DATA / "a100-40_recsys_train_rank3of8.json.gz").tables
    row = found.breakdown.rows()[0]
    assert (row.span_ns, row.idle_ns, row.compute_ns) == (464_594_000, 76_007_000, 281_336_000)
    assert row.exposed_communication_ns + row.exposed_memory_ns == 107_251_000
    assert round(row.overlap * 100, 2) == 46.24
    host_wait: dict[int, float] = defaultdict(float)
    for gaps in found.idle.rows():
        host_wait[gaps.stream] += gaps.total_ns if gaps.cause in {"host-bound", "launch delay"} else 0.0
    kernel_wait = {row.stream: row.total_ns for row in found.idle.rows() if row.cause == "kernel delay"}
    assert {7: 133_311_000, 20: 424_456_000, 21: 285_806_000, 22: 340_772_000}.items() <= host_wait.items()
    assert {7: 17_152_000, 20: 739_000, 21: 78_000, 22: 1_515_000}.items() <= kernel_wait.items()
    waited = [
        row for row in found.idle.rows() if row.cause not in {"host-bound", "launch delay", "kernel delay"}
    ]
    assert {number: sum(row.total_ns for row in waited if row.stream == number) for number in (7, 20)} == {
        7: 32_751_000,
        20: 9_684_000,
    }
    assert {row.stream: row.max_length for row in found.queues.rows()} == {7: 288, 20: 10, 21: 2, 22: 22}
