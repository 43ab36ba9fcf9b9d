"""Collectives: sizes, bandwidths, exposure, and matching over ranks with unrelated clocks."""

from __future__ import annotations

import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hespas
from hespas.analysis.collectives import bus_factor
from tests.analysis.raw import DATA, FIXTURE, Event, absent, covered, load
from tests.converters.pytorch.traces import Json, kernel, write_kineto


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send/recv", 1.0),
        ("unknown", np.nan),
    ],
)
def test_factors_are_those_of_nccl_tests(kind: str, factor: float) -> None:
    found = bus_factor(kind, np.array([8.0, -1.0]))
    assert found[0] == pytest.approx(factor, nan_ok=True)
    if kind not in {"broadcast", "reduce", "send/recv"}:
        assert np.isnan(found[1])


def exposed(event: Event, compute: list[Event]) -> float:
    inside = [
        Event("", "", max(each.start, event.start), min(each.end, event.end), 0, None)
        for each in compute
        if each.start < event.end and each.end > event.start
    ]
    return event.ns - covered(inside)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(FIXTURE, id="fixture"),
        pytest.param(DATA / "a100-40_recsys_train_rank3of8.json.gz", id="a100", marks=absent),
    ],
)
def test_time_and_exposure_of_one_rank(path: Path) -> None:
    events = load(path).events
    talk = [each for each in events if each.kind == "communication"]
    compute = [each for each in events if each.kind == "compute"]
    table = hespas.analyze(path).tables.collectives
    assert table["count"].sum() == len(talk)
    assert table["total_ns"].sum() == sum(each.ns for each in talk)
    assert table["exposed_ns"].sum() == sum(exposed(each, compute) for each in talk)
    assert bool(np.isnan(table["transfer_mean_ns"]).all())


def test_bandwidths_of_the_fixture() -> None:
    (row,) = hespas.analyze(FIXTURE).tables.collectives.rows()
    talk = [each for each in load(FIXTURE).events if each.kind == "communication"]
    size = talk[0].args["In msg nelems"] * 2
    mean = sum(each.ns for each in talk) / len(talk)
    assert (row.kind, row.group_size, row.size_bytes) == ("all_reduce", 2, size)
    assert row.algorithm_gbytes_per_s == pytest.approx(size / mean)
    assert row.bus_gbytes_per_s == pytest.approx(size / mean)  # 2 (2 - 1) / 2


def rank_file(folder: Path, rank: int, events: list[Json], ranks: int = 3) -> Path:
    return write_kineto(
        folder / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": ranks}
    )


def collective(start: float, length: float, number: int, name: str = "allreduce", size: int = 1000) -> Json:
    facts: dict[str, Any] = {
        "Collective name": name,
        "In msg nelems": size,
        "Out msg nelems": size,
        "dtype": "Float",
        "Group size": 3,
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1, 2]",
        "Seq": number,
    }
    return kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start, length, -1, facts, stream=20)


def test_late_ranks_on_clocks_of_their_own(tmp_path: Path) -> None:
    """Three ranks, clocks 5,000 and 90,000 us apart. Rank 2 comes last to all but the second."""
    clocks, ends = (0.0, 5000.0, 90000.0), (100.0, 300.0, 500.0, 700.0)
    lengths = ((50, 30, 40, 20), (60, 10, 40, 30), (20, 30, 15, 10))
    paths = [
        rank_file(
            tmp_path,
            rank,
            [
                collective(clock + end - length, length, number)
                for number, (end, length) in enumerate(zip(ends, lengths[rank], strict=True))
            ],
        )
        for rank, clock in enumerate(clocks)
    ]
    found = hespas.analyze(paths).tables
    rows = found.collective_instances.rows()
    assert [row.ranks for row in rows] == [3] * 4
    assert [row.transfer_ns for row in rows] == [20_000, 10_000, 15_000, 10_000]
    assert [row.skew_ns for row in rows] == [40_000, 20_000, 25_000, 20_000]
    assert [row.last_rank for row in rows] == [2, 1, 2, 2]
    assert rows[0].bus_gbytes_per_s == pytest.approx(4000 / 20_000 * 4 / 3)
    late = {row.rank: row for row in found.stragglers.rows()}
    assert [late[rank].last for rank in range(3)] == [0, 1, 3]
    assert late[2].waited_ns == 20_000
    assert late[0].waited_ns == 30_000 + 20_000 + 25_000 + 10_000
    assert late[2].late_mean_ns == pytest.approx((40_000 + 0 + 25_000 + 20_000) / 4)
    assert found.stragglers["rank"].tolist()[0] == 2
    (row,) = found.collectives.rows()
    assert row.transfer_mean_ns == pytest.approx((20_000 + 10_000 + 15_000 + 10_000) / 4)
    assert row.algorithm_gbytes_per_s == pytest.approx(4000 / row.transfer_mean_ns)


def test_numbers_decide_and_not_the_order(tmp_path: Path) -> None:
    """One rank did not record the first: the others of the same numbers still belong together."""
    first = rank_file(tmp_path, 0, [collective(10 * each, 5, each) for each in range(4)], 2)
    other = rank_file(tmp_path, 1, [collective(10 * each, 5 + each, each) for each in range(1, 4)], 2)
    done = hespas.analyze([first, other])
    rows = done.tables.collective_instances.rows()
    assert [row.sequence for row in rows] == [1, 2, 3]
    assert [row.longest_ns for row in rows] == [6000, 7000, 8000]
    assert "analysis.matched-by-order" not in done.diagnostics.counts()


def test_the_whole_buffer_of_a_gather_is_what_it_makes(tmp_path: Path) -> None:
    events = [
        {**collective(0, 10, 0, "all_gather"), "name": "ncclDevKernel_AllGather_RING_LL"},
        {**collective(20, 10, 1, "reduce_scatter"), "name": "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"},
    ]
    for event, made in zip(events, (3000, 1000), strict=True):
        event["args"] = {**event["args"], "Out msg nelems": made}  # type: ignore[dict-item]
    events[1]["args"] = {**events[1]["args"], "In msg nelems": 3000}  # type: ignore[dict-item]
    rows = hespas.analyze(write_kineto(tmp_path / "t.json", events)).tables.collectives.rows()
    assert {row.kind: row.size_bytes for row in rows} == {"all_gather": 12_000, "reduce_scatter": 12_000}
    assert {row.bus_gbytes_per_s for row in rows} == {12_000 / 10_000 * 2 / 3}


@absent
def test_eight_ranks_are_matched_by_order_where_nothing_is_numbered(tmp_path: Path) -> None:
    with tarfile.open(DATA / "v100_dlrm_train_8rank_kineto.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    paths = sorted((tmp_path / "dlrm_kineto").iterdir())
    done = hespas.analyze(paths)
    assert "analysis.matched-by-order" in done.diagnostics.counts()
    ranks = {index: load(path).events for index, path in enumerate(paths)}
    order = [int(path.name.removeprefix("worker").partition("_")[0]) for path in paths]
    assert order == sorted(order)
    by_kind: dict[str, list[list[Event]]] = defaultdict(list)
    for events in ranks.values():
        for word in ("AllReduce", "SendRecv"):
            by_kind[word].append([each for each in events if word in each.name])
    wanted = [
        min(each.ns for each in together)
        for of_rank in by_kind.values()
        for together in zip(*of_rank, strict=True)
    ]
    rows = done.tables.collective_instances.rows()
    assert sorted(row.transfer_ns for row in rows) == sorted(wanted)
    assert {row.ranks for row in rows} == {8}
    # aligned ends: in the median of the collectives, ranks leave together
    assert done.tables.stragglers["instances"].tolist() == [8] * 8
