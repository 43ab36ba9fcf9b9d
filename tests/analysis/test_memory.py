"""Memory over time, as the profiler records its changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import hespas
from hespas.graph import Profile
from tests.analysis.raw import FIXTURE
from tests.converters.pytorch.traces import Json, host, kernel, launch, write_kineto


def change(
    at: float, size: int, allocated: int, reserved: int = 4096, *, device: int = 0, kind: int = 1
) -> Json:
    return {
        "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 9, "tid": 1, "ts": at,
        "args": {
            "Total Reserved": reserved, "Total Allocated": allocated, "Bytes": size, "Addr": 140,
            "Device Id": device, "Device Type": kind, "Ev Idx": 3,
        },
    }  # fmt: skip


def test_peaks_and_what_is_left(tmp_path: Path) -> None:
    events = [
        host("aten::empty", 0, 9),
        launch(1, 4),
        kernel("k", 20, 5, 4),
        change(2, 1024, 1024),
        change(4, 2048, 3072, 8192),
        change(6, -1024, 2048, 8192),
        change(5, 64, 64, 0, device=-1, kind=0),
    ]
    path = write_kineto(tmp_path / "t.json", events)
    found = hespas.analyze(path).tables
    host_row, row = found.memory.rows()
    assert (row.device, row.changes, row.taken_bytes) == (0, 3, 3072)
    assert (row.peak_allocated_bytes, row.peak_time_ns, row.peak_reserved_bytes) == (3072, 4000, 8192)
    assert row.last_allocated_bytes == 2048
    assert (host_row.device, host_row.peak_allocated_bytes) == (-1, 64)
    points = found.memory_points.take(found.memory_points["device"] == 0)
    assert points["time_ns"].tolist() == [2000, 4000, 6000]
    assert points["allocated_bytes"].tolist() == [1024, 3072, 2048]


def test_many_changes_are_shown_by_the_largest_of_each_stretch(tmp_path: Path) -> None:
    used = np.random.default_rng(7).integers(0, 1 << 30, 3000).tolist()
    events = [kernel("k", 20, 5, 4), *(change(at, 1, size) for at, size in enumerate(used))]
    found = hespas.analyze(write_kineto(tmp_path / "t.json", events)).tables
    assert len(found.memory_points) == 500
    assert (
        found.memory_points["allocated_bytes"].max() == max(used) == found.memory["peak_allocated_bytes"][0]
    )


def test_a_shifted_profile_moves_its_memory_and_ranges(tmp_path: Path) -> None:
    events = [host("aten::empty", 0, 9), kernel("k", 20, 5, 4), change(2, 1024, 1024)]
    profile = hespas.read(write_kineto(tmp_path / "t.json", events))
    assert isinstance(profile, Profile)
    assert profile.shifted(7.0).memory.time_ns.tolist() == [2007.0]


def test_nothing_recorded() -> None:
    found = hespas.analyze(FIXTURE).tables
    assert len(found.memory) == len(found.memory_points) == 0
