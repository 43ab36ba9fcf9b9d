"""Lines of systolic arrays and learned models of user rows: used, rejected and preserved data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.calibrated import Calibrated
from hespas.estimators.learned import Learned
from hespas.estimators.learned.serialization import LearnedModel, model_bytes
from hespas.estimators.systolic import Systolic
from hespas.fitting import approaches as fitted_models
from hespas.fitting.approaches import FitMemory
from hespas.fitting.learned import FEWEST_MARGINS, fit_rows
from hespas.fitting.own_models import FEWEST_ROWS, own_parts, unused_name
from hespas.graph import Diagnostics
from hespas.graph.errors import MissingExtraError, UsageError
from hespas.hardware import Device, device_to_toml, load_device
from hespas.measurements import Measurements, joined, read_measurements
from hespas.operations import Labels
from hespas.validators.calibration import Calibration, calibrate, models_folder, write_calibration
from tests.validators.small_tables import Time, products, vectors, write_table

V4 = replace(load_device("TPU-v4"), fits_of="")
OPS = ("add", "tanh", "neg", "mul")


def slow(flops: float, moved: float) -> float:
    """2 us to start, a tenth of the data sheet's rates [us]."""
    return 2 + flops / 27.5e6 + moved / 0.12e6


def late(flops: float, moved: float) -> float:
    return 1.02 * slow(flops, moved)


def by_bandwidth(device: str) -> Time:
    """4 us to start, 60 % of the memory's bandwidth [us]."""
    rate = load_device(device).main_memory.bandwidth_bytes_per_s / 1e6 * 0.6
    return lambda flops, moved: 4 + moved / rate


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Measurements:
    """64 products and 80 vector operations to fit on, 40 vector operations kept for testing."""
    rows = products("TPU-v4", slow, split="calib") + vectors("TPU-v4", OPS, slow, split="calib")
    rows += vectors("TPU-v4", OPS[:2], late, split="devval")
    path = tmp_path_factory.mktemp("tables") / "mine.csv"
    return read_measurements(write_table(path, rows))


@pytest.fixture(scope="module")
def short(table: Measurements) -> Measurements:
    return table.take(table.ops.kind.where("vector"))


def done(table: Measurements, *names: str, device: Device = V4, **options: object) -> Calibration:
    asked: dict[str, object] = {"tests": (), "fitted": "2026-01-31", **options}
    return calibrate([table], device, estimators=names, **asked)  # type: ignore[arg-type]


def content(found: Calibration) -> list[bytes]:
    """All that is written of a calibration."""
    return [device_to_toml(found.device).encode(), *(each for m in found.models for each in model_bytes(m))]


def poisoned(table: Measurements, split: str) -> Measurements:
    wanted = table.split.row == table.split.names.index(split)
    return replace(table, duration_ns=np.where(wanted, table.duration_ns * 50, table.duration_ns))


@pytest.mark.parametrize("name", ["calibrated", "systolic", "learned"])
def test_rows_kept_for_testing_never_enter_and_one_seed_gives_the_same_bytes(
    name: str, short: Measurements
) -> None:
    if name == "learned":
        pytest.importorskip("sklearn")
    first, second = (content(done(each, name, seed=3)) for each in (short, poisoned(short, "devval")))
    assert first == second
    assert content(done(poisoned(short, "calib"), name, seed=3)) != first


def test_lines_and_roofline_forms_of_one_class_stand_side_by_side(
    table: Measurements, tmp_path: Path
) -> None:
    both = done(table, "systolic", "calibrated", tests=("shape",))
    keys = {fit.key for fit in both.device.own_fits} & {line.key for line in both.device.own_lines}
    assert ("matmul", "", "bf16", "lib 1") in keys
    again = load_device(write_calibration(both, tmp_path / "mine.toml"))
    assert (tmp_path / "mine.toml").read_text() == device_to_toml(again)
    assert {fit.form for fit in again.own_lines} == {"cycles", "elements"}
    alone = done(table, "calibrated")
    ops = table.ops.take(table.split.where("calib"))
    said, without = (
        Calibrated().predict(ops, each, Diagnostics()).duration_ns for each in (again, alone.device)
    )
    assert np.array_equal(said, without, equal_nan=True), "lines are none of the calibrated estimator's"
    [test] = both.held_out
    mape = {
        row.estimator: row.errors.mape
        for row in test.accuracy.summary
        if (row.level, row.size, row.op_class) == ("shape", "all", "all")
    }
    assert set(mape) == {"roofline", "calibrated", "systolic"}
    assert mape["systolic"] < 0.1 < mape["roofline"]


def test_own_lines_come_before_shipped_ones(table: Measurements) -> None:
    ops = table.ops.take(table.split.where("calib"))
    measured = table.duration_ns[table.split.where("calib")]
    device = done(table, "systolic").device
    own, shipped = (Systolic().predict(ops, each).duration_ns for each in (device, V4))
    assert np.abs(own / measured - 1).mean() < 0.1 < np.abs(shipped / measured - 1).mean()
    rows = ops.kind.where("vector")
    other = replace(ops.take(rows), op=replace(ops.op.take(rows), names=("relu",) * len(ops.op.names)))
    half = replace(other, scheme=replace(other.scheme, names=("f16",) * len(other.scheme.names)))
    stated = Systolic().predict(half, device).duration_ns
    assert np.array_equal(stated, Systolic().predict(half, V4).duration_ns), "relu in f16 has a shipped line"
    assert np.isnan(Systolic(shipped=False).predict(half, V4).duration_ns).all()


def test_an_operation_left_out_has_the_lines_of_the_others(short: Measurements) -> None:
    found = done(short, "systolic", tests=("op",))
    [test] = found.held_out
    assert test.count == 80
    assert {row.estimator for row in test.accuracy.summary} == {"roofline", "systolic"}


@pytest.mark.parametrize(
    ("names", "device", "options", "message"),
    [
        (("systolic",), "H100-SXM", {}, "H100-SXM has no systolic array"),
        (("systolic", "learned"), "TPU-v4", {"tests": ("hardware",)}, "no other device"),
        (("ridge",), "TPU-v4", {}, "'ridge' has no parameters that can be fitted"),
    ],
)
def test_what_makes_no_sense_is_refused(
    names: tuple[str, ...], device: str, options: dict[str, object], message: str, table: Measurements
) -> None:
    names_there = tuple(device if name == "TPU-v4" else name for name in table.hardware.names)
    renamed = replace(table, hardware=replace(table.hardware, names=names_there))
    with pytest.raises(UsageError, match=message):
        done(renamed, *names, device=load_device(device), **options)


def test_lines_carry_over_to_no_other_device(table: Measurements) -> None:
    names = tuple("TPU-v3" if name == "TPU-v4" else name for name in table.hardware.names)
    both = [table, replace(table, hardware=replace(table.hardware, names=names))]
    for name, message in (("systolic", "do not transfer to another"), ("learned", "two architectures")):
        with pytest.raises(UsageError, match=message):
            calibrate(both, V4, estimators=(name,), tests=("hardware",))


def test_too_few_rows_are_told_with_the_number_needed(table: Measurements) -> None:
    pytest.importorskip("sklearn")
    some = table.take(table.split.where("calib"))
    few = some.take(np.sort(np.concatenate((np.arange(30), some.ops.kind.where("vector")))))
    found = done(few, "learned")
    assert [model.card.name for model in found.models] == ["vector"]
    [told] = [each for each in found.diagnostics if each.code == "calibrate.too-few-rows"]
    assert (
        f"matmul bf16: 30 rows with known sizes and a published peak, {FEWEST_ROWS} are needed"
        in told.message
    )
    with pytest.raises(UsageError, match=f"{FEWEST_ROWS} are needed"):
        done(few.take(np.arange(30)), "learned")
    size = replace(
        few, ops=replace(few.ops, dims={name: column * 0 + 8 for name, column in few.ops.dims.items()})
    )
    with pytest.raises(UsageError, match="1 sizes, 10 with about as many rows each are needed"):
        done(size.take(size.ops.kind.where("vector")), "learned")


def test_without_the_library_the_extra_is_named(short: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise MissingExtraError("growing trees", "learned")

    monkeypatch.setattr(fitted_models, "library_version", absent)
    with pytest.raises(MissingExtraError, match="growing trees"):
        done(short, "learned")


def test_an_interrupted_run_keeps_the_models_it_finished(
    table: Measurements, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    memory = FitMemory.beside(tmp_path / "out.toml")
    grown: list[str] = []

    def stopped(part: object, *rest: object, **options: object) -> LearnedModel:
        grown.append(getattr(part, "name", ""))
        if len(grown) == 2:
            raise KeyboardInterrupt
        return fit_rows(part, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fitted_models, "fit_rows", stopped)
    with pytest.raises(KeyboardInterrupt):
        done(table, "systolic", "learned", memory=memory)
    assert {path.suffix for path in memory.folder.iterdir()} == {".toml", ".json", ".npz"}
    resumed = done(table, "systolic", "learned", memory=memory)
    assert grown == ["matmul-bf16", "vector", "vector"], "the first is not grown again"
    [damaged] = [path for path in memory.folder.glob("*.npz") if path.stat().st_size][:1]
    damaged.write_bytes(b"")
    again = done(table, "systolic", "learned", memory=memory)
    assert len(grown) == 4, "what cannot be read is made again"
    monkeypatch.undo()
    assert content(resumed) == content(again) == content(done(table, "systolic", "learned"))
    memory.forget()
    assert not memory.folder.exists()


def test_intervals_of_few_rows_hold(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    draw = np.random.default_rng(7)
    shapes = np.unique(2 ** draw.uniform(6, 12, (400, 3)) // 8 * 8, axis=0)
    draw.shuffle(shapes)
    sizes: Sequence[tuple[int, int, int]] = [tuple(map(int, shape)) for shape in shapes]  # type: ignore[misc]
    lines = [
        f"TPU-v4,matmul,,bf16,lib 1,1,{m},{n},{k},,,{'calib' if number < 64 else 'devval'},"
        f"{slow(2.0 * m * n * k, 2.0 * (m * k + n * k + m * n)) * np.exp(draw.normal(0, 0.1))}"
        for number, (m, n, k) in enumerate(sizes)
    ]
    table = read_measurements(write_table(tmp_path / "few.csv", lines))
    found = done(table, "learned")
    [model] = found.models
    assert model.card.training.rows == 64
    assert min(each.n for each in model.card.intervals) >= FEWEST_MARGINS
    device = load_device(write_calibration(found, tmp_path / "few.toml"))
    unseen = table.part("devval")
    said = Learned().predict(unseen.ops, device)
    inside = (said.low_ns <= unseen.duration_ns) & (unseen.duration_ns <= said.high_ns)
    assert inside[~np.isnan(said.duration_ns)].mean() >= 0.85
    [row] = model.card.errors
    error = np.abs(said.duration_ns / unseen.duration_ns - 1)
    assert row.n == 64
    assert row.mape is not None
    assert row.mape == pytest.approx(float(np.nanmean(error)), rel=0.6), "the card says what is met"


def test_a_device_of_ones_own_is_modelled_under_its_name(short: Measurements, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    mine = replace(V4, name="bench-7", aliases=("TPU-v4",))
    found = done(short, "learned", device=mine)
    device = load_device(write_calibration(found, tmp_path / "bench.toml"))
    assert [each.name for each in found.models[0].card.devices] == ["bench-7"]
    assert device.learned_models == (str((tmp_path / "bench.learned" / "vector.json").resolve()),)
    own = Learned(shipped=False).predict(short.ops, device).duration_ns
    assert np.abs(own / short.duration_ns - 1).mean() < 0.2


def test_models_of_an_earlier_calibration_stay_beside_the_new_ones(
    table: Measurements, short: Measurements, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    first = load_device(write_calibration(done(short, "learned"), tmp_path / "first.toml"))
    matmuls = table.take(table.ops.kind.where("matmul"))
    found = done(matmuls, "calibrated", device=first)
    assert [model.card.name for model in found.kept_models] == ["vector"]
    second = load_device(write_calibration(found, tmp_path / "second.toml"))
    assert [Path(card).parent for card in second.learned_models] == [models_folder(tmp_path / "second.toml")]
    before, after = (Learned().predict(short.ops, each).duration_ns for each in (first, second))
    assert np.array_equal(before, after)
    assert done(short, "learned", device=second).kept_models == (), "a new one of a name takes its place"


def test_a_part_that_ships_for_a_table_is_taken_as_it_is(table: Measurements) -> None:
    named = replace(table, name="tpuv4_matmul.csv.gz")
    found = {each.part.name: each for each in own_parts([named, table], {"TPU-v4": V4}, seed=0)}
    assert list(found) == ["gemm-tpu", "matmul-bf16", "vector"]
    assert len(found["vector"].rows.ratio) == 160, "rows of both tables"
    assert found["gemm-tpu"].part.table == "tpuv4_matmul"


def test_a_device_is_predicted_by_trees_of_two_other_families(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    lines: list[str] = []
    for name in ("H100-SXM", "A100-SXM-80GB", "L40S"):
        lines += vectors(name, OPS, by_bandwidth(name))
    table = read_measurements(write_table(tmp_path / "three.csv", lines))
    found = done(table, "learned", device=load_device("H100-SXM"), tests=("hardware",))
    [test] = found.held_out
    assert (test.by, test.count, test.fitted) == ("hardware", 80, 160)
    mape = {
        row.estimator: row.errors.mape
        for row in test.accuracy.summary
        if (row.level, row.size, row.op_class) == ("shape", "all", "all")
    }
    assert mape["learned"] < 0.25 < mape["roofline"]
    assert [each.name for each in found.models[0].card.devices] == ["H100-SXM"], "others enter no model"


def test_what_an_earlier_model_alone_knows_is_kept(short: Measurements, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    first = load_device(write_calibration(done(short, "learned"), tmp_path / "first.toml"))
    twice = replace(short, duration_ns=short.duration_ns * 2)
    few = twice.take(np.sort(short.ops.op.where(*OPS[2:])))
    few = replace(few, split=Labels.constant("", len(few)))
    again = replace(few, ops=replace(few.ops, dims={**few.ops.dims, "rows": few.ops.dims["rows"] + 1}))
    found = done(joined([few, again], "few"), "learned", device=first)
    assert [model.card.name for model in (*found.models, *found.kept_models)] == ["vector", "vector-2"]
    second = load_device(write_calibration(found, tmp_path / "second.toml"))
    before, after = (Learned(shipped=False).predict(short.ops, each).duration_ns for each in (first, second))
    kept, new = short.ops.op.where(*OPS[:2]), short.ops.op.where(*OPS[2:])
    assert np.array_equal(before[kept], after[kept])
    assert np.median(after[new] / before[new]) == pytest.approx(2, rel=0.2)


def test_models_of_one_run_have_names_of_their_own(table: Measurements) -> None:
    vectors_of = table.take(table.ops.kind.where("vector"))
    quantize = replace(vectors_of.ops, kind=Labels.constant("quantize", len(vectors_of)))
    rows = replace(vectors_of, ops=quantize)
    tables = [replace(rows, name=name) for name in ("aiconfigurator_quantize.parquet", "mine.csv")]
    names = [each.part.name for each in own_parts(tables, {"TPU-v4": V4}, seed=0)]
    assert names == ["quantize", "quantize-2"]
    assert unused_name("a-2", {"a-2", "a-3"}) == "a-4"


def test_lines_leave_out_rows_without_sizes_or_a_known_format(table: Measurements) -> None:
    products_of = table.take(table.ops.kind.where("matmul"))
    formats = np.arange(len(products_of)) % 4 == 0
    strange = replace(products_of.ops, scheme=Labels.choice(("bf16", "foo7"), formats.astype(np.int64)))
    told = Diagnostics()
    found = done(replace(products_of, ops=strange), "systolic", diagnostics=told)
    [fit] = found.fits
    assert (fit.scheme, fit.samples) == ("bf16", len(products_of) - formats.sum())
    assert told.counts()["calibrate.unknown-sizes"] == formats.sum()
    every = replace(products_of.ops, scheme=Labels.constant("foo7", len(products_of)))
    with pytest.raises(UsageError, match="with sizes above 0 and a known number format"):
        done(replace(products_of, ops=every), "systolic")


def test_rows_that_are_all_kept_for_testing_are_none_to_fit_on(short: Measurements) -> None:
    with pytest.raises(UsageError, match="that may be fitted") as told:
        done(short.part("devval"), "calibrated")
    assert told.value.hint == "give rows of another split: all are of devval, which is reserved for testing"
