"""Calibration of a device: rows of fits and tests, and continuation of interrupted runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import hespas.validators.calibration
from hespas.estimators.calibrated import Calibrated
from hespas.estimators.composite import Composite
from hespas.fitting import approaches as calibration_approaches
from hespas.fitting.approaches import CalibratedFits, CalibrationRun, FitMemory, FitResult, OtherDevices
from hespas.fitting.device_forms import fit_device
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.hardware import Device, Fit, device_to_toml, load_device
from hespas.measurements import Measurements, read_measurements
from hespas.operations import Labels, build
from hespas.validators.calibration import Calibration, calibrate
from hespas.validators.calibration.held_out import device_left_out, operations_left_out, sizes_left_out
from tests.validators.small_tables import products, vectors, write_table

H100 = replace(load_device("H100-SXM"), fits_of="")


Fitter = Callable[[Sequence[Measurements], Device, str], tuple[Fit, ...]]


RUN = CalibrationRun(seed=0, date="2026-01-31")


@dataclass(frozen=True, slots=True)
class Told(CalibratedFits):
    """The calibrated approach with a fit that the test provides."""

    fitter: Fitter

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> FitResult:
        return FitResult(self.fitter(tables, device, purpose))


def slow(flops: float, moved: float) -> float:
    """60 % of an H100's peaks, 4 us to start [us]."""
    return 4 + max(flops / 593.6e6, moved / 2.01e6)


@pytest.fixture
def table(tmp_path: Path) -> Measurements:
    rows = products("H100-SXM", slow, (512, 1024, 4096), split="calib")
    rows += products("H100-SXM", slow, (2048,), split="devval")
    rows += vectors("H100-SXM", ("add", "tanh"), slow, split="calib")
    rows += vectors("H100-SXM", ("neg",), slow, split="devval")
    rows += vectors("A100-SXM-80GB", ("add",), lambda f, b: 4 + max(f / 1e7, b / 1.22e6), split="calib")
    return read_measurements(write_table(tmp_path / "table.csv", rows))


@pytest.fixture
def short(tmp_path: Path) -> Measurements:
    """Rows of one operation that are fitted in half a second: just enough, and some kept for testing."""
    rows = vectors("H100-SXM", ("tanh",), slow, split="calib", sizes=16)
    rows += vectors("H100-SXM", ("tanh",), slow, split="devval", sizes=4)
    return read_measurements(write_table(tmp_path / "short.csv", rows))


def done(table: Measurements, *tests: str, **options: object) -> Calibration:
    return calibrate([table], H100, tests=tests, fitted="2026-01-31", **options)  # type: ignore[arg-type]


def poisoned(table: Measurements, split: str) -> Measurements:
    wanted = table.split.row == table.split.names.index(split)
    return replace(table, duration_ns=np.where(wanted, 1e9, table.duration_ns))


@pytest.mark.parametrize(("rows", "fitted"), [("short", (20, 16)), ("table", (88, 67))])
def test_the_formula_is_found(rows: str, fitted: tuple[int, int], request: pytest.FixtureRequest) -> None:
    table: Measurements = request.getfixturevalue(rows)
    found = done(table, "shape")
    [test] = found.held_out
    assert (test.by, test.count + test.fitted) == ("shape", fitted[1])
    errors = {
        (row.estimator, row.op_class): row.errors.mape
        for row in test.accuracy.summary
        if row.level == "shape" and row.size == "all"
    }
    assert errors["calibrated", "all"] < 0.1 < errors["roofline", "all"]
    said = Calibrated().predict(table.ops, found.device, Diagnostics()).duration_ns
    mine = table.hardware.where("H100-SXM")
    assert np.median(np.abs(said[mine] / table.duration_ns[mine] - 1)) < 0.05
    [use] = found.tables
    assert (use.rows, use.fitted) == fitted


def test_rows_kept_for_testing_never_enter(short: Measurements) -> None:
    first, second = (device_to_toml(done(each).device) for each in (short, poisoned(short, "devval")))
    assert first == second
    assert device_to_toml(done(poisoned(short, "calib")).device) != first


def test_one_seed_gives_one_file(short: Measurements) -> None:
    one, same = (device_to_toml(done(short, seed=3).device) for _ in range(2))
    assert one == same


def test_sizes_left_out_are_on_one_side_and_do_not_move_their_prediction(table: Measurements) -> None:
    mine = replace(table, split=replace(table.split, names=("",) * len(table.split.names))).on("H100-SXM")
    seen: list[Measurements] = []

    def fit(rows: Sequence[Measurements], device: Device, purpose: str) -> tuple[Fit, ...]:
        seen.extend(rows)
        return ()

    tested, entered = sizes_left_out([mine], H100, 0, [Told(RUN, fit)])
    unseen = tested[0].rows
    assert (len(unseen) + entered, entered) == (len(mine), sum(map(len, seen)))
    sizes = [{tuple(row) for row in _sizes(each)} for each in (unseen, seen[0])]
    assert not sizes[0] & sizes[1]
    again, _ = sizes_left_out([mine.take(np.arange(len(mine))[::-1])], H100, 0, [Told(RUN, fit)])
    assert {tuple(row) for row in _sizes(again[0].rows)} == sizes[0], "whatever the order of rows"


def _sizes(rows: Measurements) -> list[list[float]]:
    columns = [np.nan_to_num(rows.ops.dim(name), nan=-1) for name in ("m", "n", "k", "rows")]
    found: list[list[float]] = np.stack(columns, axis=1).tolist()
    return found


def test_an_operation_is_predicted_by_the_others(table: Measurements) -> None:
    seen: list[tuple[int, str]] = []

    def fit(rows: Sequence[Measurements], device: Device, purpose: str) -> tuple[Fit, ...]:
        seen.append((sum(map(len, rows)), purpose))
        return fit_device(list(rows), device, fitted="2026-01-31")

    tested, entered = operations_left_out([table.on("H100-SXM").part("calib")], H100, [Told(RUN, fit)])
    assert seen == [(20, "without add"), (20, "without tanh")]
    assert entered == 40
    assert [each.rows.ops.op.used() for each in tested] == [("add",), ("tanh",)]
    for each in tested:
        assert np.abs(each.predictions[0].duration_ns / each.rows.duration_ns - 1).mean() < 0.1


def test_a_device_is_predicted_by_the_others(table: Measurements) -> None:
    mine = table.on("H100-SXM").part("calib")
    mine = mine.take(mine.ops.kind.where("vector"))
    others = OtherDevices(
        {"A100-SXM-80GB": [table.on("A100-SXM-80GB").part("calib")]},
        {"A100-SXM-80GB": load_device("A100-SXM-80GB")},
    )
    purposes: list[str] = []
    run = CalibrationRun(seed=0, date="2026-01-31", progress=lambda done, total, name: purposes.append(name))
    [tested], entered = device_left_out([mine], others, H100, [CalibratedFits(run)])
    assert {each.partition(":")[0] for each in purposes} == {"on A100-SXM-80GB"}
    assert entered == 20
    assert np.abs(tested.predictions[0].duration_ns / mine.duration_ns - 1).mean() < 0.15, (
        "60 % there, 60 % here"
    )


def test_an_interrupted_run_goes_on(
    short: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = FitMemory.beside(tmp_path / "out.toml")
    calls: list[int] = []

    def counted(tables: Sequence[Measurements], device: Device, **options: object) -> tuple[Fit, ...]:
        calls.append(sum(map(len, tables)))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit_device(tables, device, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(calibration_approaches, "fit_device", counted)
    with pytest.raises(KeyboardInterrupt):
        done(short, "shape", memory=memory)
    assert len(list(memory.folder.glob("*.toml"))) == 1
    resumed = done(short, "shape", memory=memory)
    assert len(calls) == 3, "what was fitted before the interruption is not fitted again"
    assert calls[2] == calls[1] < calls[0]
    monkeypatch.undo()
    assert device_to_toml(resumed.device) == device_to_toml(done(short, "shape").device)
    memory.forget()
    assert not memory.folder.exists()


def test_saved_fits_are_found_by_their_content(short: Measurements, tmp_path: Path) -> None:
    memory = FitMemory.beside(tmp_path / "out.toml")
    first = done(short, memory=memory)
    [kept] = memory.folder.glob("*.toml")
    kept.write_text("no fits")
    again = done(short, memory=memory)
    assert device_to_toml(again.device) == device_to_toml(first.device), "what cannot be read is made again"
    done(poisoned(short, "calib"), memory=memory)
    done(short, memory=memory, seed=1)
    assert len(list(memory.folder.glob("*.toml"))) == 3


def test_earlier_fits_of_other_classes_stay(table: Measurements) -> None:
    vectors_only = table.take(table.ops.kind.where("vector"))
    first = done(table)
    second = calibrate([vectors_only], first.device, tests=(), fitted="2026-02-28")
    dates = {fit.kind: fit.fitted for fit in second.device.own_fits}
    assert (dates["matmul"], dates["vector"]) == ("2026-01-31", "2026-02-28")
    assert second.device.fits_of == ""


def test_new_fits_are_what_runs_by_default(short: Measurements) -> None:
    first = done(short)
    renamed = replace(short.ops.variant, names=tuple(name and "lib 2" for name in short.ops.variant.names))
    other = replace(short, ops=replace(short.ops, variant=renamed))
    second = calibrate([other], first.device, tests=(), fitted="2026-02-28")
    of_kind = [fit for fit in second.device.fits if fit.kind == "vector"]
    assert {(fit.variant, fit.default) for fit in of_kind} == {("lib 1", False), ("lib 2", True)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "devval"}, "reserved for testing"),
        ({"split": "train"}, "has split 'train'"),
        ({"tests": ("size",)}, "unknown .test_by=size."),
        ({"fitted": "yesterday"}, "invalid date"),
    ],
)
def test_what_cannot_be_fitted(table: Measurements, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate([table], H100, **options)  # type: ignore[arg-type]


def test_a_split_of_ones_own_is_fitted_on(short: Measurements) -> None:
    names = tuple({"calib": "mine", "devval": "other"}.get(name, name) for name in short.split.names)
    own = replace(short, split=replace(short.split, names=names))
    with pytest.raises(UsageError, match="has no row of H100-SXM that may be fitted"):
        calibrate([own], H100)
    found = calibrate([own], H100, split="mine", tests=(), fitted="2026-01-31")
    assert device_to_toml(found.device) == device_to_toml(done(short).device)


def test_too_little_to_test_or_to_fit(tmp_path: Path) -> None:
    few = read_measurements(write_table(tmp_path / "few.csv", products("H100-SXM", slow, (512,)) * 14))
    found = calibrate([few], H100)
    assert found.held_out == ()
    assert found.diagnostics.counts() == {"calibrate.untested": 1}
    with pytest.raises(UsageError, match="too few sizes"):
        calibrate([few], H100, tests=("shape",))
    with pytest.raises(UsageError, match="enough rows"):
        calibrate([few.take(np.arange(3))], H100)
    with pytest.raises(UsageError, match="is of L4"):
        calibrate([few], load_device("L4"))


def test_a_fit_of_few_rows_that_is_no_better_changes_nothing() -> None:
    """Twenty times near the data sheet's, with noise: a fit of them was used whatever it was worth."""
    device, draw = replace(H100, name="new-chip"), np.random.default_rng(0)
    size = 2.0 ** draw.integers(18, 28, 20)
    ops = build.elementwise(
        "vector",
        Labels.constant("bf16", 20),
        op=Labels.constant("add", 20),
        rows=size / 1024,
        columns=np.full(20, 1024.0),
        passes=np.full(20, 3.0),
        flops_per_element=np.ones(20),
    )
    sheet = Composite().predict(ops, device).duration_ns
    table = Measurements(
        name="few rows",
        provenance="this test",
        ops=ops,
        duration_ns=sheet * np.exp(draw.normal(0, 0.1, 20)),
        spread_ns=np.full(20, np.nan),
        hardware=Labels.constant("new-chip", 20),
        split=Labels.constant("", 20),
    )
    found = Diagnostics()
    done = calibrate([table], device, tests=(), fitted="2026-01-31", diagnostics=found)
    assert found.counts()["calibrate.no-better"] == 1
    assert Composite().predict(ops, done.device).duration_ns.tolist() == sheet.tolist()
    twice = replace(table, duration_ns=2 * table.duration_ns)
    better = calibrate([twice], device, tests=(), fitted="2026-01-31").device
    said = Composite().predict(ops, better).duration_ns
    assert np.abs(said / twice.duration_ns - 1).mean() < 0.25


@pytest.mark.parametrize("name", ["FitMemory", "fit_device"])
def test_names_that_moved_to_the_fits_warn(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"use hespas.fitting.*{name}"):
        assert getattr(hespas.validators.calibration, name).__module__.startswith("hespas.fitting")
