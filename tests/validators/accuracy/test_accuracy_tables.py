"""Tables as cases: baselines never see what they predict, intervals are counted, classes have families."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.by_operation import Prediction
from hespas.estimators.measurements import Measurements, read_measurements
from hespas.estimators.operations import Labels, Operations, build, operations_of
from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device
from hespas.validators.accuracy import accuracy_of_tables, tables
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.statistics import errors_of
from tests.validators.small_tables import products, vectors, write_table


def simple(flops: float, moved: float) -> float:
    return 5 + max(flops / 494.7e6, moved / 1.675e6)


def said(done: Accuracy, name: str) -> FloatArray:
    [cases] = done.cases
    return next(each.duration_ns for each in cases.predictions if each.estimator == name)


def read(tmp_path: Path, *, calib: bool) -> Measurements:
    rows = products("H100-SXM", simple, (256, 1024, 4096), split="calib") if calib else []
    rows += products("H100-SXM", simple, (512, 2048, 8192), split="devval")
    return read_measurements(write_table(tmp_path / "table.csv", rows))


@dataclass(frozen=True)
class _Twice:
    """Twice what the roofline says, between that and 2.1 times that."""

    name: str = "twice"

    @classmethod
    def called(cls, spelling: str) -> _Twice:
        return cls(spelling)

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        return Roofline().estimate(graph, device, diagnostics)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        time = Roofline().predict(ops, device, diagnostics).duration_ns
        return Prediction.of(self.name, 2 * time, time, 2.1 * time)


@dataclass(frozen=True)
class _OfPrograms:
    name: str = "of programs"

    @classmethod
    def called(cls, spelling: str) -> _OfPrograms:
        return cls(spelling)

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        return Roofline().estimate(graph, device, diagnostics)


def test_baselines_are_fitted_on_rows_that_are_not_compared(tmp_path: Path) -> None:
    table = read(tmp_path, calib=True)
    poisoned = replace(
        table,
        duration_ns=np.where(table.split.row == table.split.names.index("devval"), 1e9, table.duration_ns),
    )
    first, second = (accuracy_of_tables([each], split="devval") for each in (table, poisoned))
    for name in ("p1", "p2"):
        assert np.array_equal(said(first, name), said(second, name))
    assert np.abs(said(first, "p2") / first.cases[0].measured_ns - 1).max() < 0.05, "the formula is p1's own"


def test_without_other_rows_no_row_enters_its_own_fit(tmp_path: Path) -> None:
    table = read(tmp_path, calib=False)
    clean = accuracy_of_tables([table], split="devval")
    for row in (0, 5, 11):
        changed = table.duration_ns.copy()
        changed[row] *= 50
        other = accuracy_of_tables([replace(table, duration_ns=changed)], split="devval")
        assert said(clean, "p1")[row] == said(other, "p1")[row]
        assert not np.array_equal(said(clean, "p1"), said(other, "p1"))


def test_one_size_in_two_formats_is_on_one_side(tmp_path: Path) -> None:
    table = read(tmp_path, calib=False)
    half = replace(
        table.ops.scheme, names=tuple("f16" if name == "bf16" else name for name in table.ops.scheme.names)
    )
    other = replace(table, ops=replace(table.ops, scheme=half), name="half.csv")
    both = accuracy_of_tables([table, other], split="devval")
    assert [each.source for each in both.cases] == ["table.csv", "half.csv"]
    assert both.cases[0].classes == both.cases[1].classes == ("matmul bf16 lib 1", "matmul f16 lib 1")


def test_intervals_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "load_estimator", _Twice.called)
    table = read(tmp_path, calib=False)
    done = accuracy_of_tables([table], (), ["twice"], split="devval")
    [row] = [
        row
        for row in done.summary
        if (row.estimator, row.level, row.op_class, row.size) == ("twice", "instance", "all", "all")
    ]
    low = Roofline().predict(table.ops, load_device("H100-SXM")).duration_ns
    inside = (low <= table.duration_ns) & (table.duration_ns <= 2.1 * low)
    assert 0 < inside.mean() < 1
    assert (row.errors.interval_n, row.errors.interval_coverage) == (27, inside.mean())
    [naive] = [
        r for r in done.summary if (r.estimator, r.level, r.op_class, r.size) == ("p0", "shape", "all", "all")
    ]
    assert naive.errors.interval_n == 0
    assert np.isnan(naive.errors.interval_coverage)


def test_an_interval_counts_where_both_ends_are_known() -> None:
    measured = np.array([10.0, 20.0, 30.0, 40.0])
    low, high = np.array([9.0, 21.0, nan, 40.0]), np.array([11.0, 22.0, 40.0, 40.0])
    found = errors_of(measured, measured, np.arange(4), (low, high))
    assert found.interval_n == 3
    assert found.interval_coverage == pytest.approx(2 / 3)


def test_an_estimator_of_programs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "load_estimator", _OfPrograms.called)
    with pytest.raises(UsageError, match="speaks of programs"):
        accuracy_of_tables([read(tmp_path, calib=False)], (), ["of programs"])


def test_a_spread_is_the_noise_and_operations_without_cost_are_not_covered(tmp_path: Path) -> None:
    table = read_measurements(write_table(tmp_path / "t.csv", vectors("H100-SXM", ("add", "mul"), simple)))
    table = replace(
        table,
        spread_ns=table.duration_ns * 0.1,
        ops=replace(table.ops, bytes_moved=np.where(np.arange(40) < 20, nan, table.ops.bytes_moved)),
    )
    done = accuracy_of_tables([table])
    assert done.noise["H100-SXM"].mape == pytest.approx(0.1)
    [row] = [
        r
        for r in done.summary
        if (r.estimator, r.level, r.op_class, r.size) == ("roofline", "shape", "all", "all")
    ]
    assert (row.errors.n, row.errors.of) == (20, 40)
    assert done.diagnostics.counts()["roofline.unknown"] == 20


def test_the_roofline_of_a_table_is_that_of_a_graph(tmp_path: Path) -> None:
    from tests.validators.matching.small_profiles import Program

    made = Program()
    for extent in (64, 512, 4096):
        made.add(
            f"relu.{extent}",
            "maximum",
            makes=[(extent, extent)],
            takes=[(extent, extent)],
            moved=8.0 * extent**2,
        )
    graph = replace(made.build())
    device = load_device("H100-SXM")
    by_graph = Roofline().estimate(graph, device).duration_ns
    ops = operations_of(graph)
    by_table = Roofline().predict(ops, device).duration_ns
    assert np.allclose(by_table[1:], by_graph[1:], rtol=0.02)


def test_the_roofline_of_a_collective_is_that_of_its_links() -> None:
    scheme = Labels.constant("f16", 2)
    ops = build.collectives(
        scheme,
        op=Labels.of(["all_reduce", "no such"]),
        ranks=np.array([8.0, 8.0]),
        message_bytes=np.array([1e9, 1e9]),
        ranks_per_node=np.array([8.0, 8.0]),
    )
    device = load_device("H100-SXM")
    link = device.link("scale_up")
    assert link is not None
    time = Roofline().predict(ops, device).duration_ns
    sent_ns = 2 * 7 / 8 * 1e9 / link.bandwidth_bytes_per_s * 1e9
    assert sent_ns < time[0] < 1.05 * sent_ns
    assert np.isnan(time[1])
