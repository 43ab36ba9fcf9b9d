"""Fits of lines: parameters are recovered, test rows are never used, shipped files equal a fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.systolic.cycles import Array
from hespas.estimators.systolic.lines import LINES_FOLDER, own_cycles
from hespas.fitting.systolic import fit_lines
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device
from hespas.hardware.device_fits import fits_to_toml, read_fits
from hespas.measurements import Measurements, read_measurements
from hespas.operations import Labels, build

TABLES = Path(__file__).parents[2].parent / "shared" / "data" / "groundtruth"
V4 = load_device("TPU-v4")


def made(duration: FloatArray, m: FloatArray, n: FloatArray, k: FloatArray, split: Labels) -> Measurements:
    ops = build.matmuls(
        Labels.constant("f16", len(m)),
        batch=np.ones(len(m)),
        m=m,
        n=n,
        k=k,
        variant=Labels.constant("here", len(m)),
    )
    return Measurements(
        name="made",
        provenance="made up",
        ops=ops,
        duration_ns=duration,
        spread_ns=np.full(len(m), np.nan),
        hardware=Labels.constant("TPU-v4", len(m)),
        split=split,
    )


def some(seed: int = 0, count: int = 400) -> Measurements:
    rng = np.random.default_rng(seed)
    m, n, k = (128 * rng.integers(1, 8, count).astype(np.float64) for _ in range(3))
    split = Labels.choice(("calib", "devval"), (rng.random(count) < 0.2).astype(np.int64))
    sizes = made(np.ones(count), m, n, k, split)
    cycles = own_cycles(sizes.ops, Array(128, 128, "ws"))
    exact = 900 + 0.2 * cycles + 0.001 * (2 * m * k) + 0.003 * (2 * m * n)
    return replace(sizes, duration_ns=exact * np.exp(rng.normal(0, 0.02, count)))


def test_parameters_come_back_with_their_errors() -> None:
    (fit,) = fit_lines([some()], V4, fitted="2026-01-01")
    assert (fit.kind, fit.scheme, fit.variant, fit.form) == ("matmul", "f16", "here", "cycles")
    expected = {"t0_ns": 900, "cycle_ns": 0.2, "lhs_ns_per_byte": 0.001, "result_ns_per_byte": 0.003}
    for name, value in expected.items():
        (found,) = (each for each in fit.parameters if each.name == name)
        assert found.value == pytest.approx(value, rel=0.05), name
        assert 0 < found.std_error < 0.05 * value, name
    assert fit.value("rhs_ns_per_byte") < 1e-4
    assert fit.error.mape == pytest.approx(0.016, abs=0.004)  # of a normal error of 2 %
    assert fit.error.n == fit.samples == int((some().split.row == 0).sum())
    for band in fit.bands:
        assert 0.94 < band.low < 1 < band.high < 1.06


def test_rows_for_testing_never_enter() -> None:
    honest = some()
    poisoned = replace(
        honest, duration_ns=np.where(honest.split.row == 1, 1e9 * honest.duration_ns, honest.duration_ns)
    )
    first, second = (fit_lines([each], V4, fitted="2026-01-01") for each in (honest, poisoned))
    assert fits_to_toml("x", first) == fits_to_toml("x", second)


def test_nor_do_rows_faster_than_the_device_can_be() -> None:
    honest = some().part("calib")
    half = np.arange(len(honest)) % 2 == 0
    poisoned = replace(honest, duration_ns=np.where(half, 1e-3, honest.duration_ns))
    first, second = fit_lines([honest.take(np.flatnonzero(~half))], V4), fit_lines([poisoned], V4)
    assert fits_to_toml("x", first) == fits_to_toml("x", second)


def test_a_fit_is_repeatable_and_needs_rows() -> None:
    one, other = (fit_lines([some()], V4, seed=3, fitted="2026-01-01") for _ in range(2))
    assert fits_to_toml("x", one) == fits_to_toml("x", other)
    assert fit_lines([some().take(np.arange(5))], V4) == ()
    assert fit_lines([some()], load_device("H100-SXM")) == ()


def test_the_shipped_lines_are_what_a_fit_gives() -> None:
    paths = [TABLES / name for name in ("tpuv4_matmul.csv.gz", "tpuv4_nongemm.csv.gz")]
    if not all(path.exists() for path in paths):
        pytest.skip("the tables of measurements are not beside the checkout")
    shipped = read_fits(LINES_FOLDER / "TPU-v4.toml")
    again = fit_lines([read_measurements(path) for path in paths], V4, fitted=shipped[0].fitted)
    assert [fit.key for fit in again] == [fit.key for fit in shipped]
    for one, other in zip(again, shipped, strict=True):
        assert one.samples == other.samples
        assert one.error.mape == pytest.approx(other.error.mape, rel=1e-3)
        for found, kept in zip(one.parameters, other.parameters, strict=True):
            assert found.value == pytest.approx(kept.value, rel=1e-3, abs=1e-9), (one.key, found.name)
