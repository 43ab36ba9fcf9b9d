"""Cases of tables: baselines exclude the predicted rows, intervals are counted, classes have families."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators import interface
from hespas.estimators.interface import Prediction
from hespas.estimators.roofline import Roofline
from hespas.fitting.statistics import errors_of
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device
from hespas.measurements import Measurements, read_measurements
from hespas.operations import Labels, Operations, build, operations_of
from hespas.validators.accuracy import accuracy_of_tables, baselines, tables
from hespas.validators.accuracy import tables as table_cases
from hespas.validators.accuracy.cases import shared_shapes
from hespas.validators.accuracy.result import Accuracy
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
    """Estimator of twice the roofline time, with an interval from 2.0 to 2.1 times."""

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
    for name in ("one-efficiency", "overhead+two-efficiencies"):
        assert np.array_equal(said(first, name), said(second, name))
    assert np.abs(said(first, "overhead+two-efficiencies") / first.cases[0].measured_ns - 1).max() < 0.05, (
        "the formula is p1's own"
    )


def test_without_other_rows_no_row_enters_its_own_fit(tmp_path: Path) -> None:
    table = read(tmp_path, calib=False)
    clean = accuracy_of_tables([table], split="devval")
    for row in (0, 5, 11):
        changed = table.duration_ns.copy()
        changed[row] *= 50
        other = accuracy_of_tables([replace(table, duration_ns=changed)], split="devval")
        assert said(clean, "one-efficiency")[row] == said(other, "one-efficiency")[row]
        assert not np.array_equal(said(clean, "one-efficiency"), said(other, "one-efficiency"))


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
        r
        for r in done.summary
        if (r.estimator, r.level, r.op_class, r.size) == ("datasheet-roofline", "shape", "all", "all")
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
    with pytest.raises(UsageError, match="covers programs"):
        accuracy_of_tables([read(tmp_path, calib=False)], (), ["of programs"])


def test_a_spread_is_the_noise_and_operations_without_cost_are_not_covered(tmp_path: Path) -> None:
    table = read_measurements(write_table(tmp_path / "t.csv", vectors("H100-SXM", ("add", "mul"), simple)))
    table = replace(
        table,
        spread_ns=table.duration_ns * 0.1,
        ops=replace(table.ops, bytes_moved=np.where(np.arange(40) < 20, nan, table.ops.bytes_moved)),
    )
    done = accuracy_of_tables([table], (), ["roofline"])
    assert done.noise["H100-SXM"].mape == pytest.approx(0.1)
    [row] = [
        r
        for r in done.summary
        if (r.estimator, r.level, r.op_class, r.size) == ("roofline", "shape", "all", "all")
    ]
    assert (row.errors.n, row.errors.of) == (20, 40)
    assert done.diagnostics.counts()["roofline.unknown"] == 20


def test_the_roofline_of_a_table_is_that_of_a_graph(tmp_path: Path) -> None:
    from tests.validators.accuracy.small_profiles import Program

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


def test_shapes_are_named_when_asked_for_and_numbered_in_order_of_appearance(tmp_path: Path) -> None:
    """What a name does not tell, such as the seventeenth digit of a size, tells no two shapes apart."""
    rows = products("H100-SXM", simple, (256, 512))
    sizes = [10**16, 10**16 + 2, 4096]
    near = [f"H100-SXM,collective,all_reduce,bf16,lib 1,,,,,,,,{50 + place}" for place in range(3)]
    header = "hardware,kind,op,dtype,variant,batch,m,n,k,rows,columns,split,duration_us"
    lines = [f"{header},ranks,message_bytes,ranks_per_node", *(f"{row},,," for row in rows)]
    lines += [f"{row},8,{size},8" for row, size in zip(near, sizes, strict=True)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join([*lines, lines[1]]) + "\n")
    [cases] = accuracy_of_tables([read_measurements(path)], (), ["roofline"]).cases
    names = list(cases.shapes)
    assert [cases.shapes[row] for row in range(len(names))] == names
    assert len(set(names)) == len(names) == 8 + 2
    assert cases.shape[0] == cases.shape[-1]
    assert len(set(cases.shape[8:10].tolist())) == 1, "they differ in the seventeenth digit"
    rows_of: list[int] = cases.shape.tolist()
    told = [names[row] for row in rows_of]
    assert told[0] == "matmul bf16 lib 1, batch 1, m 256, n 256, k 256"
    assert told[10] == "collective all_reduce bf16 lib 1, ranks 8, message_bytes 4096, ranks_per_node 8"
    assert list(cases.labels) == ["matmul"] * 8 + ["all_reduce"] * 3 + ["matmul"]


def test_shapes_of_several_tables_have_one_number_for_one_name(tmp_path: Path) -> None:
    one = write_table(tmp_path / "a.csv", products("H100-SXM", simple, (256, 512)))
    two = write_table(tmp_path / "b.csv", products("H100-SXM", simple, (512, 1024))[::-1])
    done = accuracy_of_tables([read_measurements(one), read_measurements(two)], (), ["roofline"])
    names = [cases.shapes[row] for cases in done.cases for row in cases.shape.tolist()]
    numbers = shared_shapes(done.cases).tolist()
    rows: dict[str, int] = {}
    expected = dict(zip(names, numbers, strict=True))
    assert len(expected) == len(set(numbers)) == 15
    assert [rows.setdefault(text, len(rows)) for text in names[:8]] == list(range(8))
    assert [expected[name] for name in names] == numbers


def test_fits_of_very_many_shapes_are_of_a_sample_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "t.csv", products("H100-SXM", simple, tuple(range(128, 1408, 128))))
    whole, told = Diagnostics(), Diagnostics()
    before = accuracy_of_tables([read_measurements(path)], (), ["roofline"], diagnostics=whole)
    assert "accuracy.sampled-baselines" not in whole.counts()
    monkeypatch.setattr(baselines, "MOST_FITTED", 200)
    monkeypatch.setattr(tables, "MOST_FITTED", 200)
    after = [
        accuracy_of_tables([read_measurements(path)], (), ["roofline"], diagnostics=told) for _ in range(2)
    ]
    assert told.counts()["accuracy.sampled-baselines"] == 2
    assert any("at most 200 shapes" in each.message for each in told)
    assert (
        said(after[0], "one-efficiency").tolist()
        == said(after[1], "one-efficiency").tolist()
        != said(before, "one-efficiency").tolist()
    )
    np.testing.assert_allclose(said(after[0], "one-efficiency"), said(before, "one-efficiency"), rtol=0.05)
    assert said(after[0], "roofline").tolist() == said(before, "roofline").tolist()


def test_a_table_is_asked_about_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*products("H100-SXM", simple), *vectors("H100-SXM", ["add", "exp"], simple)]
    path = write_table(tmp_path / "t.csv", [*rows, *rows[:30]])
    before = accuracy_of_tables([read_measurements(path)], (), ["roofline"])
    monkeypatch.setattr(interface, "_OPERATIONS_PER_BLOCK", 7)
    monkeypatch.setattr(table_cases, "_TEXTS_PER_BLOCK", 5)
    after = accuracy_of_tables([read_measurements(path)], (), ["roofline"])
    assert repr(after.summary) == repr(before.summary)  # NaN is not equal to itself
    assert list(after.cases[0].shapes) == list(before.cases[0].shapes)
