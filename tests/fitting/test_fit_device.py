"""Fits: known parameters are recovered, test rows are never used, intervals have their coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.calibrated import Calibrated
from hespas.estimators.forms import FORMS, form_time_ns, machine_of
from hespas.estimators.rates import peak_times
from hespas.fitting.device_forms import classes_of, fit_device
from hespas.fitting.fits import bands_of
from hespas.fitting.rows import is_possible, may_be_fitted
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, Fit, load_device
from hespas.measurements import Measurements, read_measurements
from hespas.operations import Labels, Operations, build

DEVICE = replace(load_device("H100-SXM"), fits_of="", own_fits=())
TABLES = Path(__file__).parents[2].parent / "shared" / "data" / "groundtruth"
TRUE = {"t0_ns": 4000.0, "compute": 0.3, "memory": 0.8, "overlap": 3.0, "strided": 1.8} | {
    "row_ns": 1e-6,
    "row_step_ns": 1e-9,
    "cache_share": 0.5,
    "cache_reach": 0.02,
    "cache_edge": 2.0,
}


def vectors(rows: FloatArray, columns: FloatArray, op: Labels, *, variant: str = "lib") -> Operations:
    count = len(rows)
    return build.elementwise(
        "vector",
        Labels.constant("f32", count),
        op=op,
        rows=rows,
        columns=columns,
        passes=np.full(count, 3.0),
        flops_per_element=np.ones(count),
        variant=Labels.constant(variant, count),
    )


def a_table(
    ops: Operations, duration_ns: FloatArray, split: Sequence[str] = (), name: str = "made.csv"
) -> Measurements:
    count = len(ops)
    return Measurements(
        name=name,
        provenance="made by this test",
        ops=ops,
        duration_ns=duration_ns,
        spread_ns=np.full(count, np.nan),
        hardware=Labels.constant(DEVICE.name, count),
        split=Labels.of(split) if split else Labels.constant("", count),
    )


def made(count: int, *, noise: float = 0.05, seed: int = 3, true: dict[str, float] = TRUE) -> Measurements:
    """Rows whose times follow the form of streams, with noise; every fifth shape is for testing."""
    generator = np.random.default_rng(seed)
    sizes = np.exp(generator.uniform(0, 11, (2, count))).round()
    ops = vectors(sizes[0], sizes[1], Labels.choice(("add", "mul"), np.arange(count) % 2))
    time = form_time_ns(FORMS["streams"], true, ops, machine_of(DEVICE, "vector", "f32"))
    time = time * np.exp(generator.normal(0, noise, count))
    return a_table(ops, time, ["devval" if row % 5 == 0 else "calib" for row in range(count)])


def of(fits: Sequence[Fit], kind: str, op: str) -> Fit:
    return next(fit for fit in fits if (fit.kind, fit.op) == (kind, op))


def test_parameters_are_found_again_within_their_errors() -> None:
    fit = of(fit_device(made(3000), DEVICE), "vector", "add")
    assert fit.form == "streams"
    assert fit.value("t0_ns") == pytest.approx(4000, rel=0.05)
    assert fit.value("memory") == pytest.approx(0.8, rel=0.05)
    start = next(each for each in fit.parameters if each.name == "t0_ns")
    assert 0 < start.std_error < 200
    assert abs(start.value - 4000) < 4 * start.std_error + 50
    assert fit.error.mape == pytest.approx(0.05 * np.sqrt(2 / np.pi), rel=0.25)
    assert fit.samples == 1200
    assert (fit.table, fit.provenance, fit.seed) == ("made.csv", "made by this test", 0)


def test_a_few_wild_rows_move_nothing() -> None:
    table = made(1500)
    wild = table.duration_ns.copy()
    wild[1::50] *= 20
    fit = of(fit_device(replace(table, duration_ns=wild), DEVICE), "vector", "add")
    assert fit.value("t0_ns") == pytest.approx(4000, rel=0.1)


def test_rows_kept_for_testing_never_enter_a_fit() -> None:
    table = made(600)
    poisoned = table.duration_ns.copy()
    poisoned[table.split.where("devval")] *= 1e6
    clean = fit_device(table, DEVICE, fitted="2026-01-31")
    assert len(clean) == 4
    assert repr(fit_device(replace(table, duration_ns=poisoned), DEVICE, fitted="2026-01-31")) == repr(clean)
    # Nor do their sizes.
    larger = replace(table.ops, dims={**table.ops.dims, "rows": table.ops.dim("rows").copy()})
    larger.dims["rows"][table.split.where("devval")] = 1e9
    moved = replace(table, ops=larger)
    assert repr(fit_device(moved, DEVICE, fitted="2026-01-31")) == repr(clean)
    # The same on rows that are fitted does show: the test can fail.
    poisoned = table.duration_ns.copy()
    poisoned[table.split.where("calib")] *= 2
    assert repr(fit_device(replace(table, duration_ns=poisoned), DEVICE, fitted="2026-01-31")) != repr(clean)


def test_only_splits_that_may_be_fitted_pass_the_gate() -> None:
    table = made(40)
    assert set(may_be_fitted(table).split.used()) == {"calib"}
    unstated = replace(table, split=Labels.constant("", 40))
    assert len(may_be_fitted(unstated)) == 40
    assert len(may_be_fitted(replace(table, split=Labels.constant("test", 40)))) == 0


@pytest.mark.skipif(not TABLES.is_dir(), reason="the measured tables are not here")
def test_rows_kept_for_testing_never_enter_a_fit_of_a_real_table() -> None:
    table = read_measurements(TABLES / "tpuv4_nongemm.csv.gz")
    table = table.take(table.ops.op.where("rms_norm"))
    device = load_device("TPU-v4")
    poisoned = table.duration_ns.copy()
    poisoned[table.split.where("devval")] = 1.0
    clean = fit_device(table, device, fitted="2026-01-31")
    assert clean
    spoilt = fit_device(replace(table, duration_ns=poisoned), device, fitted="2026-01-31")
    assert repr(spoilt) == repr(clean)


def test_the_same_seed_gives_the_same_fits_in_any_order_of_tables() -> None:
    one, two = made(200), made(200, seed=4)
    other = replace(two, name="other.csv", ops=replace(two.ops, variant=Labels.constant("two", 200)))
    forth = fit_device([one, other], DEVICE, fitted="2026-01-31")
    back = fit_device([other, one], DEVICE, fitted="2026-01-31")
    assert repr(forth) == repr(back)
    assert repr(fit_device([one, other], DEVICE, fitted="2026-01-31", seed=1)) != repr(forth)


def test_variants_are_never_mixed() -> None:
    slow, fast = made(400), made(400, true=TRUE | {"t0_ns": 40.0 * 1000})
    other = replace(fast, ops=replace(fast.ops, variant=Labels.constant("slow", 400)))
    fits = fit_device([slow, other], DEVICE)
    starts = {fit.variant: fit.value("t0_ns") for fit in fits if fit.op == "add"}
    assert starts["lib"] == pytest.approx(4000, rel=0.2)
    assert starts["slow"] == pytest.approx(40_000, rel=0.2)


def test_few_rows_are_drawn_towards_the_whole_chip() -> None:
    rows = made(2000)
    few = made(16, seed=9, noise=0.5)
    tiny = np.full(16, 64.0)
    # Sizes at which the memory does not show: only the chip can say how fast it is.
    ops = vectors(tiny, tiny, Labels.constant("tiny", 16), variant="few")
    small = a_table(ops, np.full(16, 4000.0) * few.duration_ns / few.duration_ns)
    fits = fit_device([rows, small], DEVICE)
    chip, drawn = of(fits, ANY, ANY), of(fits, "vector", "tiny")
    assert chip.value("memory") == pytest.approx(0.8, rel=0.15)
    assert drawn.value("memory") == pytest.approx(chip.value("memory"), rel=0.25)
    assert drawn.value("t0_ns") == pytest.approx(4000, rel=0.15)


def test_too_few_rows_and_unknown_formats_are_not_fitted() -> None:
    table = made(20)
    assert list(classes_of(may_be_fitted(table).take(np.arange(8)))) == []
    unknown = replace(table.ops, scheme=Labels.constant("", 20))
    assert fit_device(replace(table, ops=unknown), DEVICE) == ()
    assert fit_device(table, replace(DEVICE, name="another")) == ()


def test_nine_measurements_in_ten_lie_within_the_interval() -> None:
    table = made(3000, noise=0.2)
    device = replace(DEVICE, own_fits=fit_device(table, DEVICE))
    tested = table.part("devval")
    said = Calibrated().predict(tested.ops, device)
    within = (tested.duration_ns >= said.low_ns) & (tested.duration_ns <= said.high_ns)
    assert 0.85 <= within.mean() <= 0.95


def test_bands_cover_their_own_sizes() -> None:
    generator = np.random.default_rng(0)
    predicted = np.exp(generator.uniform(0, 10, 4000))
    spread = np.where(predicted > np.exp(5), 0.01, 0.3)
    bands = bands_of(predicted, predicted * np.exp(generator.normal(0, spread)))
    assert len(bands) == 6
    assert bands[-1].up_to_ns == inf
    assert bands[0].high == pytest.approx(np.exp(1.645 * 0.3), rel=0.1)
    assert bands[-1].high == pytest.approx(np.exp(1.645 * 0.01), rel=0.01)
    assert bands_of(predicted[:5], predicted[:5]) == ()


def test_layers_are_left_out_as_a_whole() -> None:
    one = np.ones(40)
    ops = build.matmuls(
        Labels.constant("bf16", 40),
        batch=one,
        m=np.arange(1, 41, dtype=np.float64),
        n=np.repeat([64.0, 128.0, 256.0, 512.0], 10),
        k=one * 64,
    )
    (rows,) = classes_of(a_table(ops, one * 1000))
    assert len(np.unique(rows.group)) == 4


def test_progress_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    fit_device(made(60), DEVICE, progress=lambda done, total, name: told.append((done, total, name)))
    assert [done for done, _, _ in told] == list(range(len(told)))
    assert all(total == 6 for _, total, _ in told)
    assert told[0][2] == "vector * f32 lib"


@pytest.mark.skipif(not TABLES.is_dir(), reason="the measured tables are not here")
@pytest.mark.parametrize(
    ("table", "kind", "scheme", "most"),
    [
        ("aiconfigurator_gemm.parquet", "matmul", "bf16", 0.13),
        ("aiconfigurator_gemm.parquet", "matmul", "fp8", 0.14),
        ("neusight_perop.parquet", "vector", "f32_full", 0.09),
        ("tpuv4_matmul.csv.gz", "matmul", "f16", 0.09),
    ],
)
def test_shipped_fits_hold_on_shapes_they_did_not_see(
    table: str, kind: str, scheme: str, most: float
) -> None:
    measured = read_measurements(TABLES / table, split="devval")
    errors: list[float] = []
    covered: list[float] = []
    for name in measured.hardware.used():
        rows = measured.on(name)
        rows = rows.take(np.intersect1d(rows.ops.kind.where(kind), rows.ops.scheme.where(scheme)))
        if not len(rows):
            continue
        device = load_device(name)
        said = Calibrated().predict(rows.ops, device)
        assert not np.isnan(said.duration_ns).any()
        errors.append(float(np.abs(said.duration_ns / rows.duration_ns - 1).mean()))
        within = (rows.duration_ns >= said.low_ns) & (rows.duration_ns <= said.high_ns)
        covered.append(float(within.mean()))
        roofline = peak_times(rows.ops, device).roofline_ns
        assert errors[-1] < np.abs(roofline / rows.duration_ns - 1).mean()
    assert np.mean(errors) <= most
    assert 0.85 <= np.mean(covered) <= 0.96


def test_rows_faster_than_the_device_can_be_enter_no_fit() -> None:
    rows = made(400)
    faster = replace(rows, duration_ns=np.where(np.arange(400) % 4 == 0, 1e-3, rows.duration_ns))
    assert is_possible(rows, DEVICE).all()
    assert is_possible(faster, DEVICE).tolist() == [bool(row % 4) for row in range(400)]
    without = rows.take(np.flatnonzero(is_possible(faster, DEVICE)))
    found, expected = (of(fit_device(each, DEVICE), "vector", "add") for each in (faster, without))
    assert found.parameters == expected.parameters
    assert found.samples == expected.samples


def layers_of_experts(count: int, form: str) -> Measurements:
    """Rows of layers of experts in two variants, one of few rows, whose times follow a form, with noise."""
    generator = np.random.default_rng(5)
    one = np.ones(count)
    ops = build.mixtures_of_experts(
        Labels.constant("bf16", count),
        op=Labels.constant("balanced", count),
        variant=Labels.choice(("many", "few"), (np.arange(count) % 10 == 0).astype(np.int64)),
        tokens=np.exp2(generator.integers(0, 8, count)).astype(np.float64),
        hidden=1024 * generator.integers(1, 4, count).astype(np.float64),
        inter=256 * generator.integers(1, 5, count).astype(np.float64),
        topk=2 * one,
        experts=8 * one,
        tensor_parallel=one,
        expert_parallel=one,
        matrices=3 * one,
    )
    values = {entry.name: entry.start for entry in FORMS[form].parameters} | {"t0_ns": 3000.0, "overlap": 9.0}
    time = form_time_ns(FORMS[form], values, ops, machine_of(DEVICE, "moe", "bf16"))
    return a_table(ops, time * np.exp(generator.normal(0, 0.1, count)))


@pytest.mark.parametrize("form", ["experts", "uncached_experts"])
def test_all_classes_of_a_kind_have_the_form_with_the_smallest_held_out_error(form: str) -> None:
    """Weights of 2 to 75 MB on a device with a cache of 50 MB: with 30 rows, a class alone shows little."""
    fits = [fit for fit in fit_device(layers_of_experts(300, form), DEVICE) if fit.kind == "moe"]
    assert {fit.variant for fit in fits} == {"many", "few"}
    assert {fit.form for fit in fits} == {form}
