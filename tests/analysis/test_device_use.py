"""Breakdown, gaps, launches and queues of small recordings with hand-computed results."""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import numpy as np
import pytest

from hespas.analysis.device_use import (
    WHOLE_DEVICE,
    breakdown,
    gaps_before,
    idle,
    launches,
    queue_points,
    queues,
)
from hespas.analysis.recording import Recording, recordings_of
from hespas.graph import Diagnostics, Profile, StringTableBuilder


class Work(NamedTuple):
    """Device event, and the call that launched it."""

    kernel: str
    start: float
    length: float
    call: tuple[float, float] = (nan, nan)
    stream: int = 7
    step: int = -1
    operation: str = ""


def recorded(*events: Work, rank: int = 0) -> list[Recording]:
    strings = StringTableBuilder()
    names = [(strings.add(event.kernel), strings.add(event.operation)) for event in events]
    profile = Profile.of(
        "p",
        (),
        strings.build(),
        kernel_id=np.array([kernel for kernel, _ in names]),
        op_id=np.array([operation for _, operation in names]),
        run=np.array([event.step for event in events]),
        rank=np.full(len(events), rank),
        stream=np.array([event.stream for event in events]),
        start_ns=np.array([event.start for event in events]),
        duration_ns=np.array([event.length for event in events]),
        launch_start_ns=np.array([event.call[0] for event in events]),
        launch_end_ns=np.array([event.call[1] for event in events]),
    )
    return recordings_of([profile], Diagnostics())


def test_breakdown_of_steps() -> None:
    """Step 0: 100 ns of computing, 80 of communication of which 30 are hidden, 20 of copies, 10 idle. Step 1
    begins 300 ns later.
    """
    table = breakdown(
        recorded(
            Work("gemm", 1000, 100, step=0),
            Work("ncclDevKernel_AllReduce", 1070, 80, stream=8, step=0),
            Work("Memcpy DtoD", 1160, 20, stream=9, step=0),
            Work("gemm", 1300, 50, step=1),
            Work("gemm", 1400, 10),
            rank=3,
        )
    )
    whole, first, second = table.rows()
    assert [row.step for row in (whole, first, second)] == [-1, 0, 1]
    assert {row.rank for row in (whole, first, second)} == {3}
    assert (first.start_ns, first.span_ns, first.busy_ns, first.idle_ns) == (1000, 180, 170, 10)
    assert (first.compute_ns, first.communication_ns, first.memory_ns) == (100, 80, 20)
    assert (first.exposed_communication_ns, first.exposed_memory_ns) == (50, 20)
    assert first.overlap == pytest.approx(30 / 80)
    assert first.period_ns == 300
    assert np.isnan(second.period_ns)
    assert np.isnan(second.overlap)
    assert (second.start_ns, second.span_ns, second.compute_ns, second.idle_ns) == (1300, 50, 50, 0)
    assert (whole.start_ns, whole.span_ns, whole.compute_ns) == (1000, 410, 160)


def test_nothing_recorded() -> None:
    none = recorded()
    for function in (breakdown, idle, gaps_before, launches, queues, queue_points):
        assert len(function(none)) == 0


def test_gaps_by_operation() -> None:
    """The host launches one operation 600 ns after the device had nothing to do, of a gap of 1,000; another
    gap is short, and of the last one the launch is unknown. Kernels stand for unknown operations.
    """
    events = recorded(
        Work("a", 0, 1000, (-50, -10), operation="aten::mm"),
        Work("b", 2000, 100, (1600, 1700), operation="aten::add"),
        Work("c", 2120, 100, (1800, 1850), operation="aten::add"),
        Work("b", 3220, 100, (2900, 3000), operation="aten::add"),
        Work("d", 3340, 100),
    )
    rows = {(row.cause, row.operation): row for row in gaps_before(events).rows()}
    assert {key: (row.count, row.total_ns, row.max_ns) for key, row in rows.items()} == {
        ("host-bound", "aten::add"): (2, 2000, 1000),
        ("kernel delay", "aten::add"): (1, 20, 20),
        ("launch unknown", "d"): (1, 20, 20),
    }
    assert rows["host-bound", "aten::add"].share == pytest.approx(2000 / 2040)
    assert gaps_before(events).rows()[0].total_ns == 2000
    causes = {row.cause: row for row in idle(events).rows() if row.stream == WHOLE_DEVICE}
    assert causes["host-bound"].before_launch_ns == 600 + 680
    assert causes["host-bound"].mean_ns == 1000
    assert causes["kernel delay"].before_launch_ns == 0


@pytest.mark.parametrize(
    ("launched", "length", "cause"),
    [
        (499.0, 1000.0, "launch delay"),
        (500.0, 1000.0, "host-bound"),
        (0.0, 29_999.0, "kernel delay"),
        (0.0, 30_000.0, "other"),
    ],
)
def test_borders_of_causes(launched: float, length: float, cause: str) -> None:
    """A launch in the middle of the gap is the host's; 30 us are no delay of the device."""
    events = recorded(Work("a", 0, 1000), Work("b", 1000 + length, 10, (1000 + launched, 1000 + launched)))
    assert [row.cause for row in idle(events).rows() if row.stream == 7] == [cause]


@pytest.mark.parametrize(
    ("ended", "cause"),
    [(100_000.0, "communication"), (70_001.0, "communication"), (70_000.0, "other"), (100_001.0, "other")],
)
def test_gaps_that_wait_for_another_stream(ended: float, cause: str) -> None:
    """The last event of another stream ended less than 30 us before."""
    events = recorded(
        Work("a", 0, 10_000, (-2, -1)),
        Work("ncclDevKernel_AllReduce", 5_000, ended - 5_000, (-2, -1), stream=9),
        Work("b", 100_000, 10, (0, 1)),
    )
    assert [row.cause for row in idle(events).rows() if row.stream == 7] == [cause]


def test_calls_that_launch_work() -> None:
    """The second kernel started before its call returned, and took less time than it."""
    events = recorded(
        Work("a", 100, 50, (0, 40), operation="aten::mm"),
        Work("a", 190, 10, (160, 200), operation="aten::mm"),
        Work("b", 400, 30, (300, 330)),
        Work("c", 500, 30),
    )
    first, second = launches(events).rows()
    assert (first.operation, first.count, first.call_total_ns, first.call_max_ns) == ("aten::mm", 2, 80, 40)
    assert (first.call_mean_ns, first.delay_mean_ns, first.delay_max_ns) == (40, (60 - 10) / 2, 60)
    assert (first.work_mean_ns, first.short) == (30, 1)
    assert (second.operation, second.delay_mean_ns, second.short) == ("b", 70, 0)


def test_depth_of_a_queue() -> None:
    """Depths 1, 2, 1, 0 and 1 for 10, 20, 30, 60 and 5 ns."""
    events = recorded(
        Work("a", 30, 20, (0, 1)), Work("b", 60, 20, (10, 11)), Work("c", 125, 20, (120, 121)), rank=2
    )
    (row,) = queues(events).rows()
    assert (row.rank, row.stream, row.count, row.max_length) == (2, 7, 3, 2)
    assert row.mean_length == pytest.approx((1 * 45 + 2 * 20) / 125)
    assert row.median_length == 1  # 60 ns of depth 0, then 45 of depth 1
    assert row.empty_share == pytest.approx(60 / 125)
    assert row.blocked_ns == 0
    points = queue_points(events)
    assert points["time_ns"].tolist() == [0, 10, 30, 60, 120, 125]
    assert points["length"].tolist() == [1, 2, 1, 0, 1, 0]
    deep = recorded(Work("a", 60, 1, (0, 1)), Work("b", 90, 1, (10, 11)))
    assert queues(deep).rows()[0].median_length == 2  # depth 2 for 50 of 90 ns


def test_streams_without_launches_have_no_queue() -> None:
    events = recorded(Work("a", 30, 20), Work("b", 60, 20, (10, 11), stream=8), Work("c", 90, 1))
    assert [row.stream for row in queues(events).rows()] == [8]
    assert set(queue_points(events)["stream"].tolist()) == {8}


@pytest.mark.parametrize(("count", "blocked"), [(1023, 0.0), (1024, 77.0), (1025, 77.0 + 9.0 + 1.0)])
def test_a_full_queue(count: int, blocked: float) -> None:
    """1,024 launches at 0, 1, 2, ... wait for 77 ns; one more is called 1 ns later and starts 9 ns later."""
    last = float(count - 1)
    events = [Work("k", last + 77 + 9 * number, 5, (float(number), number + 0.5)) for number in range(count)]
    (row,) = queues(recorded(*events)).rows()
    assert row.max_length == count
    assert row.blocked_ns == pytest.approx(blocked)
    points = queue_points(recorded(*events))
    assert len(points) == 200
    assert points["length"].max() == count
