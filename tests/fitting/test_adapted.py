"""Models of related devices adapted to few rows of a new device, and their priority afterwards."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from hespas.estimators import load_estimator
from hespas.estimators.interface import OperationModel, Prediction
from hespas.estimators.learned import Learned
from hespas.estimators.learned.bases import REFERENCE_DEVICES, ReferenceDevices
from hespas.estimators.learned.extrapolation import references_of
from hespas.estimators.learned.inference import LoadedModels
from hespas.estimators.learned.selection import OperationLabels, select_model
from hespas.estimators.learned.serialization import (
    Card,
    Cell,
    LearnedModel,
    cards_in,
    read_model,
    save_model,
    shipped_folder,
)
from hespas.estimators.rates import roof_ns
from hespas.fitting.learned_parts import PARTS, rows_for
from hespas.fitting.own_models import adaptable, adapted
from hespas.graph import reference_basis
from hespas.graph.columns import FloatArray
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import Device, load_device
from hespas.measurements import Measurements, joined
from hespas.operations import Labels, Operations, build
from hespas.validators.calibration import calibrate, write_calibration
from hespas.validators.calibration.known_sizes import known_sizes
from hespas.validators.calibration.suggest import chosen

pytest.importorskip("sklearn")

PART = next(part for part in PARTS if part.name == "gemm-bf16")
NEW = replace(load_device("H100-SXM"), name="H150", aliases=(), fits_of="")
"""A device of a known family that nobody has measured."""


def products(count: int, seed: int, *, variant: str = "") -> Operations:
    m, n, k = np.exp2(np.random.default_rng(seed).integers(5, 13, (3, count)).astype(np.float64))
    return build.matmuls(
        Labels.constant("bf16", count),
        batch=np.ones(count),
        m=m,
        n=n,
        k=k,
        variant=Labels.constant(variant, count),
    )


def slower(count: int, seed: int, *, variant: str = "mine 1.0", device: Device = NEW) -> Measurements:
    """Times by the reference devices, a third slower, and 3 % of noise."""
    ops = products(count, seed, variant=variant)
    before = Learned().predict(replace(ops, variant=Labels.constant("", count)), device).duration_ns
    noise = np.exp(np.random.default_rng(seed + 1).normal(0, 0.03, count))
    return Measurements(
        name="few.csv",
        provenance="made here",
        ops=ops,
        duration_ns=1.33 * before * noise,
        spread_ns=np.full(count, np.nan),
        hardware=Labels.constant(device.name, count),
        split=Labels.constant("", count),
    )


def model_of(table: Measurements, device: Device = NEW, seed: int = 0) -> LearnedModel | None:
    rows = rows_for(PART, table, {device.name: device})
    found = adaptable(PART, rows, device, cards_in(shipped_folder()), seed=seed)
    return None if found is None else adapted(found, device, seed=seed)


def error_of(model: OperationModel, table: Measurements, device: Device = NEW) -> float:
    return float(np.abs(model.predict(table.ops, device).duration_ns / table.duration_ns - 1).mean())


def who(answer: Prediction) -> set[str]:
    """Return the names of the models that answer, and check that all operations have an answer."""
    assert np.isfinite(answer.duration_ns).all()
    return {answer.models[number] for number in set(map(int, answer.estimator))}


@pytest.mark.parametrize("count", [20, 120])
def test_a_few_rows_move_what_relatives_say(count: int) -> None:
    model = model_of(slower(count, 1))
    assert model is not None
    unseen = slower(300, 7)
    nameless = replace(unseen, ops=replace(unseen.ops, variant=Labels.constant("", 300)))
    assert error_of(Learned(), nameless) > 0.2
    assert error_of(LoadedModels([model]), unseen) < 0.07
    [row] = model.card.errors
    assert row.mape is not None
    assert row.mape < 0.1
    said = LoadedModels([model]).predict(unseen.ops, NEW)
    within = (said.low_ns <= unseen.duration_ns) & (unseen.duration_ns <= said.high_ns)
    assert within.mean() >= 0.8
    assert (model.card.adapts, model.card.devices[0].name) == ("gemm-bf16", "H150")


@pytest.mark.parametrize("device", [NEW, load_device("RTX-4090")], ids=lambda device: device.name)
def test_estimates_suggestions_and_own_fits_use_the_same_reference_devices(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = select_model(cards_in(shipped_folder()), OperationLabels("matmul", "", "bf16", ""), device)
    assert not isinstance(selection, str)
    references = selection.references
    assert references is not None
    assert Learned().predict(products(5, 1), device).basis.used() == (reference_basis(references.names),)

    model = model_of(slower(20, 1, device=device), device)
    assert model is not None
    [cell] = model.card.cells
    of_own_fit = references_of(model.card, cell, device)
    assert of_own_fit is not None
    assert of_own_fit.names == references.names
    assert of_own_fit.weights == pytest.approx(references.weights)
    assert of_own_fit.variants == references.variants
    assert {other.name for other in model.card.references} == set(references.names)

    found: dict[str, ReferenceDevices | None] = {}

    def recorded(card: Card, cell: Cell, device: Device, without: set[str]) -> ReferenceDevices | None:
        found[card.name] = references_of(card, cell, device, without)
        return found[card.name]

    module = sys.modules["hespas.validators.calibration.suggest"]
    monkeypatch.setattr(module, "references_of", recorded)
    [known] = known_sizes(device, ["matmul"], ["bf16"])
    assert len(chosen(device, known, products(5, 1), 1)) == 1
    assert found[selection.card.name] == references


def test_noisy_rows_without_difference_change_little() -> None:
    """Noise of 30 % on the prediction from the reference devices."""
    table = slower(20, 4)
    noise = np.exp(np.random.default_rng(2).normal(0, 0.3, 20))
    table = replace(table, duration_ns=table.duration_ns / 1.33 * noise)
    model = model_of(table)
    assert model is not None
    unseen = slower(200, 11)
    nameless = replace(unseen.ops, variant=Labels.constant("", 200))
    before = Learned().predict(nameless, NEW).duration_ns
    said = LoadedModels([model]).predict(unseen.ops, NEW).duration_ns
    assert np.abs(said / before - 1).mean() < 0.08


def test_the_base_time_is_a_mean_of_references_and_own_form() -> None:
    model = model_of(slower(50, 6))
    assert model is not None
    shares = {base.hardware: base.share for base in model.card.bases}
    assert 0 < shares[REFERENCE_DEVICES] <= shares[NEW.name] < 1
    ops = products(100, 12, variant="mine 1.0")

    def log_times(own: float, of_expected: float) -> FloatArray:
        assert model is not None
        changed = {NEW.name: own, REFERENCE_DEVICES: of_expected}
        bases = tuple(
            with_fields(base, share=changed.get(base.hardware, base.share)) for base in model.card.bases
        )
        mixed = replace(model, card=with_fields(model.card, bases=bases))
        return np.log(LoadedModels([mixed]).predict(ops, NEW).duration_ns)

    mean = 0.3 * log_times(0, 0) + 0.5 * log_times(1, 1) + 0.2 * log_times(1, 0)
    assert log_times(0.7, 0.5) == pytest.approx(mean, abs=0.02)


def test_cards_without_shares_have_the_whole_form(tmp_path: Path) -> None:
    """Cards of 0.2.0 have no shares."""
    model = model_of(slower(40, 2))
    assert model is not None
    save_model(model, tmp_path)
    path = tmp_path / "gemm-bf16.json"
    card = json.loads(path.read_text())
    for base in card["bases"]:
        base.pop("share", None)
    path.write_text(json.dumps(card))
    assert {base.share for base in read_model(path).card.bases} == {1.0}
    card["bases"][0]["share"] = 1.5
    path.write_text(json.dumps(card))
    with pytest.raises(FormatError, match="<= 1"):
        read_model(path)


@pytest.mark.parametrize(("few", "most_error"), [(2, 0.2), (6, 0.1)])
def test_small_classes_are_fitted_less(few: int, most_error: float) -> None:
    table = slower(40, 3)
    variant = Labels.of(["mine 1.0"] * (40 - few) + ["mine 2.0"] * few)
    model = model_of(replace(table, ops=replace(table.ops, variant=variant)))
    assert model is not None
    parameters = {(base.hardware, base.variant): base.parameters for base in model.card.bases}

    def change(name: str) -> float:
        own, expected = parameters[NEW.name, name], parameters[REFERENCE_DEVICES, name]
        return float(np.abs(np.log(np.array(own) / expected)).max())

    assert 0 < change("mine 2.0") < 3 * 0.5 * (few / 8) ** 2
    assert change("mine 2.0") < change("mine 1.0")
    for name, most in (("mine 1.0", 0.1), ("mine 2.0", most_error)):
        assert error_of(LoadedModels([model]), slower(200, 15, variant=name)) < most
    [row] = model.card.errors
    assert row.mape is not None
    assert row.mape < 0.12


def test_the_card_is_read_again_and_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = (model_of(slower(60, 3), seed=5) for _ in range(2))
    assert one is not None
    assert two is not None
    for model, name in ((one, "one"), (two, "two")):
        save_model(model, tmp_path / name)
    for end in ("json", "npz"):
        assert (tmp_path / f"one/gemm-bf16.{end}").read_bytes() == (
            tmp_path / f"two/gemm-bf16.{end}"
        ).read_bytes()
    again = read_model(tmp_path / "one/gemm-bf16.json")
    ops = products(50, 9, variant="mine 1.0")
    said = [LoadedModels([each]).predict(ops, NEW).duration_ns for each in (one, again)]
    assert said[0].tolist() == said[1].tolist()


def test_rows_that_no_relative_was_measured_at_are_told() -> None:
    vectors = build.elementwise(
        "vector",
        Labels.constant("f32", 30),
        op=Labels.of(["add"] * 25 + ["frobnicate"] * 5),
        rows=np.exp2(np.arange(30.0) % 10 + 6),
        columns=np.exp2(np.arange(30.0) % 7 + 6),
        passes=np.full(30, 3.0),
        flops_per_element=np.ones(30),
        variant=Labels.constant("mine 1.0", 30),
    )
    table = replace(slower(30, 1), ops=vectors, duration_ns=5000.0 + 3 * roof_ns(vectors, NEW))
    done = calibrate([table], NEW, estimators=("learned",), tests=(), fitted="2026-01-31")
    counts = done.diagnostics.counts()
    assert (done.models[0].card.training.rows, counts["calibrate.unrelated-rows"]) == (25, 5)
    both = joined(
        [slower(40, 2), replace(table, ops=replace(vectors, scheme=Labels.constant("foo", 30)))], "both"
    )
    done = calibrate([both], NEW, estimators=("learned",), tests=(), fitted="2026-01-31")
    assert done.diagnostics.counts()["calibrate.not-learned"] == 30


def test_times_that_nothing_can_reach_are_refused() -> None:
    impossible = replace(slower(40, 2), duration_ns=np.full(40, 1e-3))
    with pytest.raises(UsageError, match="all rows are faster than the data sheet of H150"):
        calibrate([impossible], NEW, tests=(), fitted="2026-01-31")


def test_a_sweep_of_few_layers_is_adapted_too() -> None:
    table = slower(48, 2)
    m, side = np.arange(1.0, 49.0) * 64, np.full(48, 4096.0)
    ops = build.matmuls(table.ops.scheme, batch=np.ones(48), m=m, n=side, k=side, variant=table.ops.variant)
    model = model_of(replace(table, ops=ops, duration_ns=5000 + 1.5 * roof_ns(ops, NEW)))
    assert model is not None
    assert model.card.training.shape_groups == 48


def test_nothing_is_adapted_to_too_few_rows_or_to_what_nothing_is_like() -> None:
    assert model_of(slower(11, 1)) is None
    same = slower(40, 1)
    one_size = replace(same, ops=same.ops.take(np.zeros(40, np.int64)))
    assert model_of(one_size) is None
    known = load_device("H100-SXM")
    assert model_of(slower(40, 1, device=known), known) is None, "it was in the fit itself"
    cpu = replace(NEW, kind="cpu")
    rows = rows_for(PART, slower(40, 1, device=cpu), {cpu.name: cpu})
    assert adaptable(PART, rows, cpu, cards_in(shipped_folder()), seed=0) is None


def test_a_calibration_on_few_rows_is_what_answers_then(tmp_path: Path) -> None:
    done = calibrate(
        [slower(40, 2)], NEW, estimators=("calibrated", "learned"), tests=(), fitted="2026-01-31"
    )
    [model] = done.models
    [row] = model.card.errors
    assert row.mape is not None
    assert row.mape < 0.1
    assert row.before_mape == pytest.approx(0.25, abs=0.02)
    fit = next(fit for fit in done.fits if fit.kind == "matmul")
    assert fit.error.before_mape == pytest.approx(row.before_mape)
    device = load_device(write_calibration(done, tmp_path / "h150.toml"))
    unseen = slower(200, 8, variant="")
    composite = load_estimator("composite:order=learned+calibrated+roofline")
    assert isinstance(composite, OperationModel)
    said = load_estimator("composite")
    assert isinstance(said, OperationModel)
    answer = said.predict(unseen.ops, device)
    assert who(answer) == {"learned:shipped=false"}
    assert error_of(composite, unseen, device) < 0.1
    part = tuple(replace(fit, samples=5, error=with_fields(fit.error, mape=1e-4)) for fit in device.own_fits)
    assert who(said.predict(unseen.ops, replace(device, own_fits=part))) == {"learned:shipped=false"}
    again = calibrate(
        [slower(40, 2)], device, estimators=("calibrated", "learned"), tests=(), fitted="2026-02-01"
    )
    assert again.models[0].card.errors[0].before_mape == row.before_mape, (
        "the package's models stay the measure"
    )


def test_who_fits_forms_alone_hears_of_the_relatives() -> None:
    done = calibrate([slower(40, 2)], NEW, tests=(), fitted="2026-01-31")
    assert done.diagnostics.counts()["calibrate.relatives"] == 1
    both = calibrate(
        [slower(40, 2)], NEW, estimators=("calibrated", "learned"), tests=(), fitted="2026-01-31"
    )
    assert "calibrate.relatives" not in both.diagnostics.counts()


def test_who_errs_least_on_rows_left_out_answers_first() -> None:
    done = calibrate([slower(40, 2)], NEW, tests=(), fitted="2026-01-31")
    ops = products(5, 4)
    model = load_estimator("composite")
    assert isinstance(model, OperationModel)

    def answers(before: float, **error: float) -> set[str]:
        fits = tuple(
            replace(fit, error=with_fields(fit.error, before_mape=before, **error))
            for fit in done.device.own_fits
        )
        return who(model.predict(ops, replace(done.device, own_fits=fits)))

    assert answers(0.9) == {"calibrated"}
    assert answers(1e-4) == {"learned:own=false"}
    assert answers(np.nan) == {"calibrated"}
    assert answers(0.1, mape=0.08) == {"calibrated"}
    assert answers(0.1, mape=0.09) == {"learned:own=false"}, "40 rows do not tell so little apart"
    assert answers(0.98, mape=1.2) == {"calibrated"}, "far too short is never more than 100 % off"
    other = replace(ops, scheme=Labels.constant("fp8_block", 5))
    answer = model.predict(other, done.device)
    assert who(answer) == {"learned"}, "a fit of one number format speaks of no other"
