"""Kernels, operations and classes: sums over the file, computed event by event."""

from __future__ import annotations

import statistics
from collections import defaultdict
from math import isnan
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.analysis.operations import OperationRow
from hespas.graph import Profile
from hespas.hardware import load_device
from tests.analysis.raw import FIXTURE, load, traces
from tests.converters.pytorch.traces import kernel, write_kineto


@pytest.mark.parametrize("path", traces())
def test_kernels_by_name(path: Path) -> None:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in load(path).events:
        times[event.name, event.kind].append(event.ns)
    table = hespas.analyze(path).tables.kernels
    assert len(table) == len(times)
    total = sum(map(sum, times.values()))
    for row in table.rows():
        wanted = times[row.kernel, row.kind]
        assert row.count == len(wanted)
        assert row.total_ns == sum(wanted)
        assert row.min_ns == min(wanted)
        assert row.max_ns == max(wanted)
        assert row.mean_ns == pytest.approx(statistics.fmean(wanted))
        assert row.share == pytest.approx(sum(wanted) / total)
        if len(wanted) > 1:
            assert row.std_ns == pytest.approx(statistics.stdev(wanted), rel=1e-6, abs=1e-6)
        else:
            assert isnan(row.std_ns)
    assert bool((np.diff(table["total_ns"]) <= 0).all())


@pytest.mark.parametrize("path", traces())
def test_operations_classes_and_kernels_hold_the_same_time(path: Path) -> None:
    found = hespas.analyze(path).tables
    device_ns = sum(event.ns for event in load(path).events)
    for name in ("operations", "classes", "kernels"):
        assert found.by_name()[name]["total_ns"].sum() == device_ns
        assert found.by_name()[name]["share"].sum() == pytest.approx(1.0)
    assert found.operations["count"].sum() == found.classes["count"].sum()


def _operation(name: str, shapes: str) -> OperationRow:
    rows = hespas.analyze(FIXTURE).tables.operations.rows()
    (row,) = [each for each in rows if (each.operation, each.shapes) == (name, shapes)]
    return row


def test_a_matmul_has_the_rates_of_its_shapes() -> None:
    """2 m n k FLOPs, and each tensor of bfloat16 once."""
    shapes = "[[4096,1024],[1024,4096]]"
    row = _operation("aten::mm", shapes)
    raw = load(FIXTURE).raw
    starts = [
        (each["ts"], each["ts"] + each["dur"], each["tid"])
        for each in raw
        if each["name"] == "aten::mm" and str(each["args"]["Input Dims"]).replace(" ", "") == shapes
    ]
    launches = {
        each["args"]["correlation"]
        for each in raw
        if each["cat"] in {"cuda_runtime", "cuda_driver"}
        and any(first <= each["ts"] < last and each["tid"] == thread for first, last, thread in starts)
    }
    ran = [
        each["dur"] * 1000
        for each in raw
        if each["cat"] == "kernel" and each["args"]["correlation"] in launches
    ]
    assert row.count == len(starts)
    assert row.total_ns == sum(map(round, ran))
    flops = 2 * 4096 * 1024 * 4096 * row.count
    moved = 2 * (4096 * 1024 + 1024 * 4096 + 4096 * 4096) * row.count
    assert row.flops == flops
    assert row.bytes_moved == moved
    assert row.tflops_per_s == pytest.approx(flops / row.total_ns / 1e3)
    assert row.gbytes_per_s == pytest.approx(moved / row.total_ns)
    peak = max(
        each.flops_per_s
        for each in load_device("H100-SXM").peaks
        if each.dtype == "bf16" and each.unit == "matrix" and each.density == "dense"
    )
    assert row.roof_ns == pytest.approx(flops / peak * 1e9)
    assert row.roof_share == pytest.approx(row.roof_ns / row.total_ns)
    assert row.bound == "compute"


def test_a_copy_from_the_host_is_bound_by_its_link() -> None:
    rows = hespas.analyze(FIXTURE).tables.operations.rows()
    (row,) = [each for each in rows if each.op_class == "host" and each.bytes_moved > 8e6][:1]
    link = load_device("H100-SXM").link("pcie")
    assert link is not None
    assert row.bound == "host link"
    assert row.roof_ns == pytest.approx(row.bytes_moved / link.bandwidth_bytes_per_s * 1e9)


@pytest.mark.parametrize("path", traces())
def test_what_there_is_to_win_is_what_lies_beyond_the_roof(path: Path) -> None:
    found = hespas.analyze(path).tables
    known = [row for row in found.operations.rows() if not isnan(row.roof_ns)]
    wanted = sorted((max(row.total_ns - row.roof_ns, 0.0) for row in known), reverse=True)
    assert found.wins["win_ns"].tolist() == pytest.approx(wanted)
    shares = np.cumsum(wanted) / found.operations["total_ns"].sum()
    assert found.wins["cumulative_share"] == pytest.approx(shares)


def test_two_files_of_one_rank_are_added_up() -> None:
    one = hespas.analyze(FIXTURE)
    profile = hespas.read(FIXTURE)
    assert isinstance(profile, Profile)
    two = hespas.analyze([profile, profile])
    assert "analysis.same-rank" in two.diagnostics.counts()
    assert two.tables.breakdown["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    first = {(row.kernel, row.kind): row for row in one.tables.kernels.rows()}
    for row in two.tables.kernels.rows():
        before = first[row.kernel, row.kind]
        assert row.count == 2 * before.count
        assert row.total_ns == 2 * before.total_ns
        assert (row.min_ns, row.max_ns) == (before.min_ns, before.max_ns)
        assert row.share == pytest.approx(before.share)


def test_late_starts_round_no_duration(tmp_path: Path) -> None:
    """Where one clock begins long before the other, a float of a start is good to 256 ns."""
    late_us = 1_750_000_000_000_000.0
    events = [
        kernel("first", 0, 7.001, 1),
        kernel("late", late_us, 7.001, 2),
        kernel("late", late_us + 20, 5, 3),
    ]
    write_kineto(tmp_path / "k.json", events)
    found = hespas.analyze(tmp_path / "k.json").tables
    assert {row.kernel: row.total_ns for row in found.kernels.rows()} == {"first": 7_001, "late": 12_001}
    assert found.operations["total_ns"].sum() == found.classes["total_ns"].sum() == 19_002


def test_what_another_device_could_not_have_run_is_beyond_its_roof() -> None:
    """Measured on an H100, whose products are faster than the peak of an A100 allows."""
    found = hespas.analyze(FIXTURE, hardware="A100").tables
    products = [row for row in found.operations.rows() if row.operation == "aten::mm"]
    assert products
    for row in products:
        assert row.roof_share == pytest.approx(row.tflops_per_s / 312)
        assert row.roof_share > 1
    assert {row.win_ns for row in found.wins.rows() if row.operation == "aten::mm"} == {0}
