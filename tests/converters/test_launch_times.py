"""Start and end of the call that enqueued each device event, equal to the file."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

import hespas
from fixtures.make import rocprof
from fixtures.make.nsys_export import FULL
from hespas.graph import Profile

KINETO = Path(__file__).parents[2] / "fixtures" / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"


def profile_of(path: Path) -> Profile:
    profile = hespas.read(path)
    assert isinstance(profile, Profile)
    return profile


def launches(profile: Profile) -> list[tuple[float, float]]:
    """Launch and return of each event that has them, on the clock of the file, sorted."""
    base = float(profile.metadata["first_event_ns"])
    known = ~np.isnan(profile.launch_start_ns)
    found = zip(
        (profile.launch_start_ns[known] + base).tolist(),
        (profile.launch_end_ns[known] + base).tolist(),
        strict=True,
    )
    return sorted(found)


def test_kineto_by_correlation() -> None:
    events = json.loads(gzip.decompress(KINETO.read_bytes()))["traceEvents"]
    calls = {
        each["args"]["correlation"]: (each["ts"] * 1000, (each["ts"] + each["dur"]) * 1000, str(each["tid"]))
        for each in events
        if each["ph"] == "X" and each["cat"] in {"cuda_runtime", "cuda_driver"}
    }
    unknown = (None, None, "")  # a launch before the recording began
    wanted = [
        calls.get(each["args"]["correlation"], unknown)
        for each in events
        if each["ph"] == "X" and each["cat"] in {"kernel", "gpu_memcpy", "gpu_memset"}
    ]
    profile = profile_of(KINETO)
    assert launches(profile) == sorted(each[:2] for each in wanted if each != unknown)
    threads = [profile.strings[row] for row in profile.launch_thread_id.tolist()]
    assert threads == [each[2] for each in wanted]
    hosts = {profile.strings[row] for row in profile.host.thread_id.tolist()}
    assert {each for each in threads if each} <= hosts
    assert unknown in wanted


def test_nsys_by_correlation_of_the_same_process(tmp_path: Path) -> None:
    path = tmp_path / "export.sqlite"
    path.write_bytes(gzip.decompress(FULL.read_bytes()))
    profile = profile_of(path)
    with closing(sqlite3.connect(path)) as connection:
        calls: set[tuple[int, int]] = set(
            connection.execute('SELECT "start", "end" FROM CUPTI_ACTIVITY_KIND_RUNTIME').fetchall()
        )
    found = launches(profile)
    assert found
    assert set(found) <= {(float(start), float(end)) for start, end in calls}
    assert int(np.isnan(profile.launch_start_ns).sum()) == 4  # those without a launch record


def test_rocpd_calls_are_launches_and_ranges_are_not(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    path.write_bytes(gzip.decompress(rocprof.DATABASE.read_bytes()))
    profile = profile_of(path)
    known = ~np.isnan(profile.launch_start_ns)
    assert known.any()
    assert bool((profile.launch_end_ns[known] >= profile.launch_start_ns[known]).all())
    assert bool((profile.launch_start_ns[known] <= profile.start_ns[known]).all())
    assert bool((profile.launch_thread_id[known] > 0).all())


def test_a_shifted_profile_keeps_its_distances() -> None:
    profile = profile_of(KINETO)
    later = profile.shifted(500.0)
    for name in ("start_ns", "launch_start_ns", "launch_end_ns"):
        np.testing.assert_array_equal(getattr(later, name), getattr(profile, name) + 500.0)
    assert bool((later.host.start_ns - profile.host.start_ns == 500.0).all())
    assert later.duration_ns is profile.duration_ns
