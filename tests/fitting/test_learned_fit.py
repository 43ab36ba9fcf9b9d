"""Fitting learned models on made measurements: no leak, the same bytes, honest intervals, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.learned import Learned
from hespas.estimators.learned.ensemble import features_of
from hespas.estimators.learned.serialization import Interval, load_model, save_model
from hespas.fitting.learned import fit_learned, scored
from hespas.fitting.learned_parts import BoostingForm, LearnedPart, constant, grow, weighted_sum
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.graph.errors import FormatError
from hespas.hardware import load_device
from hespas.measurements import Measurements
from hespas.operations import Labels, Operations, build

pytest.importorskip("sklearn")

_DEVICES = ("A100-SXM-80GB", "H100-SXM", "H200-SXM")
_PART = LearnedPart(
    name="made",
    table="made",
    kinds=("matmul",),
    schemes=("bf16",),
    overhead_ns=3e3,
    forms=(
        BoostingForm(trees=30, leaves=7, learning_rate=0.2),
        BoostingForm(trees=60, leaves=15, learning_rate=0.2, loss="absolute_error", columns=0.5),
    ),
)


def _products(m: FloatArray, *, n: float = 4096, k: float = 1024, variant: str = "lib 1.0") -> Operations:
    count = len(m)
    return build.matmuls(
        Labels.constant("bf16", count),
        batch=np.ones(count),
        m=m,
        n=np.full(count, n),
        k=np.full(count, k),
        variant=Labels.constant(variant, count),
    )


def _measured(poison: float = 1.0) -> Measurements:
    """Products that take 4 us and 1.4 times their base; times of ``devval`` are multiplied by ``poison``."""
    rng = np.random.default_rng(5)
    shapes = 2.0 ** rng.integers(4, 13, (300, 3))
    count = len(shapes) * len(_DEVICES)
    m, n, k = np.tile(shapes, (len(_DEVICES), 1)).T
    ops = build.matmuls(
        Labels.constant("bf16", count),
        batch=np.ones(count),
        m=m,
        n=n,
        k=k,
        variant=Labels.constant("lib 1.0", count),
    )
    hardware = np.repeat(np.arange(len(_DEVICES)), len(shapes))
    split = np.where(np.tile(m[: len(shapes)] * n[: len(shapes)], len(_DEVICES)) % 3 == 1, 1, 0)
    base = np.empty(count)
    for number, name in enumerate(_DEVICES):
        mine = np.flatnonzero(hardware == number)
        base[mine] = features_of("product", ops.take(mine), load_device(name), overhead_ns=3e3).base_ns
    noise = np.exp(rng.normal(0, 0.05, count))
    return Measurements(
        name="made.csv",
        provenance="made here",
        ops=ops,
        duration_ns=base * 1.4 * noise * np.where(split == 1, poison, 1.0),
        spread_ns=np.full(count, np.nan),
        hardware=Labels.choice(_DEVICES, hardware),
        split=Labels.choice(("calib", "devval"), split),
    )


def _fit_into(folder: Path, measured: Measurements) -> None:
    save_model(fit_learned(_PART, measured), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One fitted model, for the tests that only ask it."""
    path = tmp_path_factory.mktemp("learned")
    _fit_into(path, _measured())
    return path


def test_poisoned_devval_durations_change_no_byte(folder: Path, tmp_path: Path) -> None:
    _fit_into(tmp_path / "poisoned", _measured(poison=1000.0))
    for name in ("made.npz", "made.json"):
        assert (folder / name).read_bytes() == (tmp_path / "poisoned" / name).read_bytes()
    moved = _measured()
    _fit_into(tmp_path / "moved", replace(moved, duration_ns=moved.duration_ns * 1.01))
    assert (folder / "made.npz").read_bytes() != (tmp_path / "moved" / "made.npz").read_bytes()


def test_held_out_shapes_are_close_and_intervals_hold(folder: Path) -> None:
    learned = Learned(models=str(folder))
    rows = scored(learned, _measured().part("devval"))
    assert {row.hardware for row in rows} == set(_DEVICES)
    assert all(row.mape is not None and row.mape < 0.1 for row in rows)
    covered = [row.interval_coverage or 0.0 for row in rows]
    assert 0.8 < float(np.mean(covered)) <= 1.0


def test_the_library_and_the_stored_trees_agree() -> None:
    sklearn_ensemble = pytest.importorskip("sklearn.ensemble")
    rng = np.random.default_rng(1)
    table = rng.normal(size=(900, 5)).astype(np.float32)
    target = table[:, 0] * 2 + np.sin(table[:, 1] * 3) + rng.normal(0, 0.1, 900)
    form = BoostingForm(trees=40, leaves=31, learning_rate=0.2, least_rows=5)
    grown = sklearn_ensemble.HistGradientBoostingRegressor(
        max_iter=40,
        max_leaf_nodes=31,
        learning_rate=0.2,
        min_samples_leaf=5,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=3,
    ).fit(table, target)
    fresh = rng.normal(size=(500, 5)).astype(np.float32)
    said = grow(table, target, form, seed=3).predict(fresh)
    assert np.abs(said - grown.predict(fresh)).max() < 1e-3


def test_the_weighted_sum_of_forests_predicts_the_weighted_sum() -> None:
    generator = np.random.default_rng(5)
    table = generator.normal(0, 1, (400, 4)).astype(np.float32)
    target = (table[:, 0] * 0.3 + np.sin(table[:, 1])).astype(np.float64)
    forms = [BoostingForm(trees=trees, leaves=8, learning_rate=0.1) for trees in (20, 60)]
    forests = [*(grow(table, target, form, seed=1) for form in forms), constant(4, 0.7)]
    weights = [0.5, 0.3, 0.2]
    fresh = generator.normal(0, 1, (300, 4)).astype(np.float32)
    expected = sum(weight * forest.predict(fresh) for forest, weight in zip(forests, weights, strict=True))
    summed = weighted_sum(forests, weights)
    assert summed.trees == 80
    assert summed.predict(fresh) == pytest.approx(expected, abs=1e-3)
    assert weighted_sum([constant(4, 0.7)], [0.5]).predict(fresh) == pytest.approx(0.35)


def test_a_column_said_to_rise_never_lowers_the_sum() -> None:
    rng = np.random.default_rng(2)
    table = rng.uniform(size=(500, 2)).astype(np.float32)
    target = table[:, 0] + 0.3 * np.sin(table[:, 0] * 20)
    forest = grow(table, target, BoostingForm(trees=50, leaves=15, learning_rate=0.2), seed=0, rising=(0,))
    steps = np.stack((np.linspace(0, 1, 200), np.full(200, 0.5)), axis=1).astype(np.float32)
    assert (np.diff(forest.predict(steps)) >= -1e-6).all()


def test_unknown_variants_and_schemes_are_refused_and_far_sizes_have_wide_intervals(folder: Path) -> None:
    learned, device = Learned(models=str(folder)), load_device("H100-SXM")
    diagnostics = Diagnostics()
    other = learned.predict(_products(np.array([64.0]), variant="other"), device, diagnostics)
    assert np.isnan(other.duration_ns).all()
    assert "learned.refused" in {each.code for each in diagnostics}
    far = learned.predict(_products(np.array([64.0, 2.0**20])), device)
    near, wide = np.log(far.high_ns / far.low_ns)
    assert wide > 3 * near
    eight = replace(_products(np.array([64.0])), scheme=Labels.constant("f8E4M3FN", 1))
    assert np.isnan(learned.predict(eight, device).duration_ns).all()


def test_intervals_widen_outside_the_sizes_seen(folder: Path) -> None:
    learned, device = Learned(models=str(folder)), load_device("H100-SXM")
    said = learned.predict(_products(np.array([4096.0, 2.0**14, 2.0**15])), device)
    width = np.log(said.high_ns / said.low_ns)
    assert width[2] > width[1] > width[0]


def test_few_layers_never_narrow_what_holds_for_the_kind() -> None:
    few, many = (
        fit_learned(replace(_PART, layer=layer), _measured()).card.intervals for layer in (("n",), ())
    )

    def narrower(intervals: tuple[Interval, ...]) -> list[str]:
        whole = next(each for each in intervals if (each.hardware, each.kind) == ("*", "matmul"))
        cells = [each for each in intervals if each.hardware != "*"]
        assert len(cells) == len(_DEVICES)
        return [each.hardware for each in cells if each.low < whole.low or each.high < whole.high]

    assert narrower(few) == []
    assert narrower(many), "where there are many layers each device has its own"


def test_no_variant_means_the_usual_one(folder: Path) -> None:
    learned, device = Learned(models=str(folder)), load_device("H100-SXM")
    m = np.array([64.0, 1024.0])
    named = learned.predict(_products(m), device).duration_ns
    assert np.array_equal(named, learned.predict(_products(m, variant=""), device).duration_ns)


def test_devices_outside_the_fit_are_wider_and_said(folder: Path) -> None:
    learned, diagnostics = Learned(models=str(folder)), Diagnostics()
    ops = _products(np.array([512.0]))
    seen = learned.predict(ops, load_device("H100-SXM"))
    unseen = learned.predict(ops, load_device("L40S"), diagnostics)
    assert np.isfinite(unseen.duration_ns).all()
    assert "learned.unseen-device" in {each.code for each in diagnostics}
    assert unseen.high_ns[0] / unseen.low_ns[0] != seen.high_ns[0] / seen.low_ns[0]
    assert np.isnan(learned.predict(ops, load_device("TPU-v4")).duration_ns).all()


def test_the_card_says_what_was_tried_and_left_out(folder: Path) -> None:
    card = load_model(folder / "made.json").card
    assert [each.chosen for each in card.selection].count(True) == 1
    assert {each.siblings for each in card.left_out} == {True, False}
    assert card.training.split == "calib"
    assert card.training.rows == sum(card.cells[0].rows.values())


def test_damaged_and_newer_files_are_errors(folder: Path, tmp_path: Path) -> None:
    card, trees = folder / "made.json", folder / "made.npz"
    whole = json.loads(card.read_text())
    (tmp_path / "newer.json").write_text(json.dumps({**whole, "schema": "hespas.learned/99"}))
    with pytest.raises(FormatError, match=r"hespas\.learned/99"):
        load_model(tmp_path / "newer.json")
    (tmp_path / "alone.json").write_text(json.dumps(whole))
    with pytest.raises(FormatError, match="no such learned model"):
        load_model(tmp_path / "alone.json")
    data = trees.read_bytes()
    for cut in (0, 10, len(data) // 2, len(data) - 5):
        (tmp_path / f"cut{cut}.json").write_text(json.dumps(whole))
        (tmp_path / f"cut{cut}.npz").write_bytes(data[:cut])
        with pytest.raises(FormatError, match="damaged"):
            load_model(tmp_path / f"cut{cut}.json")
