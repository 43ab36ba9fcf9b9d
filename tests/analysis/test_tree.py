"""Call tree: every launch is below the calls that were running on its thread."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import hespas
from hespas.analysis.tree import TreeRow
from tests.analysis.raw import DATA, FIXTURE, absent, load
from tests.converters.pytorch.traces import Json, annotation, host, kernel, launch, write_kineto

_CALLERS = {"cpu_op", "user_annotation", "python_function"}
_CALLS = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver"}


def paths_of(rows: list[TreeRow]) -> dict[tuple[str, ...], TreeRow]:
    found: dict[int, tuple[str, ...]] = {-1: ()}
    for row in rows:
        found[row.node] = (*found[row.parent], row.name)
        assert row.depth == len(found[row.node]) - 1
    return {found[row.node]: row for row in rows}


def caller_paths(raw: list[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Of each correlation the names of what was running around its launch, the outermost first."""
    on: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in raw:
        if each["cat"] in _CALLERS:
            on[str(each["tid"])].append(each)
    found: dict[int, tuple[str, ...]] = {}
    for each in raw:
        if each["cat"] in _CALLS and each["args"].get("correlation", -1) not in found:
            around = [
                caller
                for caller in on[str(each["tid"])]
                if caller["ts"] <= each["ts"] <= caller["ts"] + caller["dur"]
            ]
            around.sort(key=lambda caller: (caller["ts"], -caller["dur"]))
            names = tuple(re.sub(r"(ProfilerStep)#\d+", r"\1", caller["name"]) for caller in around)
            found[each["args"].get("correlation", -1)] = names
    return found


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(FIXTURE, id="fixture"),
        pytest.param(DATA / "h100_bert-small_inf.json.gz", id="bert", marks=absent),
        pytest.param(DATA / "mi300x_timesformer_inf.json.gz", id="timesformer", marks=absent),
    ],
)
def test_time_and_counts_of_every_path(path: Path) -> None:
    trace = load(path)
    callers = caller_paths(trace.raw)
    device: dict[tuple[str, ...], float] = defaultdict(float)
    own: dict[tuple[str, ...], float] = defaultdict(float)
    count: dict[tuple[str, ...], int] = defaultdict(int)
    for event in trace.events:
        names = callers.get(event.args.get("correlation", -1), ()) if event.launch else ()
        names = names or ("(launched by nothing recorded)",)
        own[names] += event.ns
        for depth in range(len(names)):
            device[names[: depth + 1]] += event.ns
            count[names[: depth + 1]] += 1
    rows = hespas.analyze(path).tables.tree.rows()
    found = paths_of(rows)
    assert found.keys() == device.keys()
    for names, row in found.items():
        assert (row.device_ns, row.own_device_ns, row.events) == (device[names], own[names], count[names])
    assert sum(row.own_device_ns for row in rows) == sum(event.ns for event in trace.events)
    for before, after in pairwise(rows):
        if before.depth == after.depth:
            assert before.device_ns >= after.device_ns


def function(name: str, start: float, length: float, *, tid: int = 1) -> Json:
    return {**annotation(name, start, length, tid=tid), "cat": "python_function"}


def test_modules_ranges_and_operations_in_one_tree(tmp_path: Path) -> None:
    events = [
        annotation("ProfilerStep#3", 0, 100),
        annotation("ProfilerStep#4", 100, 100),
        *(function("nn.Module: Linear_0", start, 40) for start in (10, 110)),
        *(host("aten::linear", start, 30) for start in (12, 112)),
        *(host("aten::mm", start, 10) for start in (15, 115)),
        launch(16, 1), launch(30, 2), launch(116, 3), launch(160, 4), launch(900, 5),
        kernel("mm", 300, 7, 1), kernel("bias", 310, 2, 2), kernel("mm", 320, 8, 3), kernel("x", 330, 1, 4),
        kernel("late", 950, 3, 5), kernel("lost", 960, 4, 99),
    ]  # fmt: skip
    rows = paths_of(hespas.analyze(write_kineto(tmp_path / "t.json", events)).tables.tree.rows())
    step = ("ProfilerStep",)
    linear = (*step, "nn.Module: Linear_0", "aten::linear")
    assert {
        names: (row.calls, row.events, row.device_ns, row.own_device_ns) for names, row in rows.items()
    } == {
        step: (2, 4, 18_000, 1_000),
        linear[:2]: (2, 3, 17_000, 0),
        linear: (2, 3, 17_000, 2_000),
        (*linear, "aten::mm"): (2, 2, 15_000, 15_000),
        ("(launched by nothing recorded)",): (0, 2, 7_000, 7_000),
    }
    assert rows[linear].host_ns == 60_000
    assert rows[step].share == pytest.approx(18 / 25)


def test_profiles_without_a_host_have_one_row() -> None:
    path = FIXTURE.parent / "rocprofv3_two_processes.json"
    found = hespas.analyze(path).tables
    assert found.tree["device_ns"].sum() >= found.kernels["total_ns"].sum()
    assert sum(found.tree["own_device_ns"]) == found.kernels["total_ns"].sum()


def test_replayed_work_stands_in_the_operations_it_was_captured_in() -> None:
    folder = FIXTURE.parents[1] / "graph_replay" / "decode_mi300x"
    done = hespas.analyze(folder / "decode_mi300x.replay.json.gz", capture=folder)
    found = paths_of(done.tables.tree.rows())
    around = ("step[DECODE bs=16]", "nn.Module: Decoder_0", "aten::linear", "aten::mm")
    product = found[around]
    assert (product.calls, product.events) == (8, 8)
    assert product.own_device_ns == 4 * (11_250 + 12_500)
    assert found[around[:2]].device_ns == 2 * 63_500 - 0
