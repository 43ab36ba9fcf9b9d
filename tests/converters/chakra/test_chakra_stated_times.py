"""Traces with contradictory or overflowing times: none is replaced silently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hespas.converters import ReadOptions, WriteOptions, load_format
from hespas.converters.chakra.preserve import simulated_ns
from hespas.converters.chakra.times import WrittenTimes
from hespas.graph import Diagnostics, Workload
from hespas.validators.checker import check

_FLAG = {"name": "is_cpu_op", "bool_val": False}
_CONFLICT = "chakra.duration-conflict"


def _timed(reference: Any, *times: tuple[int, int | None]) -> bytes:
    """A chain of nodes with these microseconds and, in an attribute, ns."""
    nodes = [
        reference.node(
            id=place,
            name=f"n{place}",
            type=4,
            data_deps=[place - 1] if place else [],
            duration_micros=micros,
            attr=[_FLAG] + ([] if nanos is None else [{"name": "duration_nanos", "uint64_val": nanos}]),
        )
        for place, (micros, nanos) in enumerate(times)
    ]
    return bytes(reference.file(*nodes))


def _read(path: Path, name: str = "chakra") -> tuple[Workload, Diagnostics]:
    read = load_format(name).read
    assert read is not None
    found = Diagnostics()
    value = read(path, ReadOptions(), found)
    assert isinstance(value, Workload)
    return value, found


def _write(value: Workload, path: Path, name: str = "chakra") -> Path:
    write = load_format(name).write
    assert write is not None
    write(value, path, WriteOptions(name=path.name), Diagnostics())
    return path


@pytest.mark.parametrize(
    ("times", "conflicts"),
    [
        ([(3000, 1000), (7, None)], 1),
        ([(5, 0)], 1),
        ([(0, 5000), (4, 4000)], 1),
        ([(1, 1999), (2, 1001)], 0),
        ([(1, 300), (0, 300)], 0),
        ([(12, None)], 0),
    ],
)
def test_microseconds_that_contradict_ns_are_told_and_kept(
    reference: Any, tmp_path: Path, times: list[tuple[int, int | None]], conflicts: int
) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(_timed(reference, *times))
    workload, found = _read(path)
    assert found.counts().get(_CONFLICT, 0) == conflicts
    exact = [micros * 1000 if nanos is None else nanos for micros, nanos in times]
    assert workload.classes[0].duration_ns.tolist() == exact
    through, _ = _read(_write(workload, tmp_path / "g.json", "op-graph"), "op-graph")
    for value in (workload, through):
        assert _write(value, tmp_path / "out.0.et").read_bytes() == path.read_bytes()
        (tmp_path / "out.0.et").unlink()


def test_a_new_duration_is_not_overruled_by_the_kept_microseconds(reference: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(_timed(reference, (3000, 1000), (3000, 1000)))
    graph = _read(path)[0].classes[0]
    assert simulated_ns(graph).tolist() == [3e6, 3e6]
    estimated = replace(graph, duration_ns=np.array([1000.0, 64_000.0]))
    assert simulated_ns(estimated).tolist() == [3e6, 64e3]
    again, found = _read(_write(Workload.spmd(estimated, 1), tmp_path / "out.0.et"))
    assert again.classes[0].duration_ns.tolist() == [1000, 64_000]
    assert found.counts()[_CONFLICT] == 1


def test_a_trace_without_microseconds_gets_them(reference: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(_timed(reference, (0, 5000), (0, 7500)))
    workload, found = _read(path)
    assert found.counts()[_CONFLICT] == 2
    assert _read(_write(workload, tmp_path / "out.0.et"))[1].counts().get(_CONFLICT) is None


@pytest.mark.parametrize(
    "micros", [(1 << 53) // 1000 + 1, (1 << 53) + 1, (1 << 62) // 1000 + 7, (1 << 63) - 1]
)
def test_long_times_come_back_exactly(reference: Any, tmp_path: Path, micros: int) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(_timed(reference, (5, None), (micros, None), (7, None)))
    workload, found = _read(path)
    assert workload.classes[0].duration_ns.tolist() == [5e3, float(micros) * 1e3, 7e3]
    assert found.counts() == {}
    assert _write(workload, tmp_path / "out.0.et").read_bytes() == path.read_bytes()


def test_times_longer_than_any_trace_are_the_longest() -> None:
    time = np.array([5e18, 2.5e22, 1.0])
    nothing = np.zeros(3, np.int64)
    times = WrittenTimes.of(time, nothing, (nothing, nothing))
    assert times.nanos.tolist() == [-1, -1, 1]
    assert times.micros.tolist() == [5 * 10**15, (1 << 63) - 1, 1]
    assert times.shortened(time) == 1


def test_a_time_that_no_trace_states_is_told(reference: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(_timed(reference, (5, None), (7, None)))
    graph = replace(_read(path)[0].classes[0], duration_ns=np.array([2.5e22, 7e3]))
    found = Diagnostics()
    write = load_format("chakra").write
    assert write is not None
    write(Workload.spmd(graph, 1), tmp_path / "out.et", WriteOptions(name="out.et"), found)
    assert found.counts()["chakra.longest-time"] == 1


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ([(3000, 1000), (7, None)], "3,007.000 us"),
        ([(5, 0)], "5.000 us"),
        ([(1000, 991_000)], ""),
        ([(1000, 989_000)], "1,000.000 us"),
    ],
)
def test_sums_that_differ_by_more_than_a_percent_are_a_finding(
    reference: Any, tmp_path: Path, times: list[tuple[int, int | None]], told: str
) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(_timed(reference, *times))
    messages = [entry.message for entry in check([path], "chakra").violations if entry.code == "ET023"]
    assert len(messages) == bool(told)
    assert all(f"duration_micros add up to {told}" in message for message in messages)


def test_a_node_that_simulators_give_no_time_is_a_finding(reference: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(_timed(reference, (0, 2000), (1000, 1_000_000)))
    messages = [entry.message for entry in check([path], "chakra").violations if entry.code == "ET023"]
    assert any("its duration is missing or 0" in message for message in messages)
