"""Calibration by effects: what it finds, what it leaves alone, and that nothing speaks for itself."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.fitting.effects import COMPONENTS, FitRows, central_rows, factors_of, fit_effects
from hespas.graph.columns import FloatArray

PRODUCTS, ATTENTION = COMPONENTS.index("products"), COMPONENTS.index("attention")


def facts(shares: FloatArray, log_error: FloatArray, sources: list[str] | None = None) -> FitRows:
    """Rows of one accelerator, half products and half attention or as said."""
    count = len(log_error)
    constant = {
        "accelerator": "H100",
        "family": "Hopper",
        "precision": "16bit",
        "kind": "dense",
        "release": "",
    }
    keys = {name: [value] * count for name, value in constant.items()}
    keys["source"] = sources or ["here"] * count
    keys["model"] = [f"model {number % 5}" for number in range(count)]
    return FitRows(
        shares=shares, log_error=log_error, weight=np.ones(count), rounding=np.zeros(count), keys=keys
    )


def mixed(count: int, seed: int = 1) -> FloatArray:
    """Shares of steps that are more or less products, the rest attention."""
    part = np.random.default_rng(seed).uniform(0.1, 0.9, count)
    shares = np.zeros((count, len(COMPONENTS)))
    shares[:, PRODUCTS], shares[:, ATTENTION] = part, 1 - part
    return shares


def test_a_component_that_takes_longer_is_found_and_the_other_left() -> None:
    shares = mixed(40)
    found = {each.component: each for each in factors_of(facts(shares, 0.3 * shares[:, ATTENTION]))}
    assert set(found) == {"products", "attention"}
    assert found["attention"].factor == pytest.approx(np.exp(0.3), rel=0.08)
    assert found["products"].factor == pytest.approx(1.0, abs=0.06)
    assert all(0 < each.std_error < each.prior_std for each in found.values())


def test_no_row_leaves_everything_as_it_was() -> None:
    rows = facts(mixed(4), np.full(4, np.nan))
    said = fit_effects(rows.covariance(), rows, np.zeros(4, np.bool_)).posterior(np.ones(4, np.bool_))
    assert said.mean.tolist() == [0.0] * 4
    assert (said.deviation > 0.05).all()
    assert factors_of(rows) == []


def test_one_row_far_off_does_not_carry_the_others_with_it() -> None:
    errors = np.full(30, 0.1)
    errors[7] = 2.5
    rows = facts(mixed(30), errors)
    known = np.ones(30, np.bool_)
    known[0] = False
    said = fit_effects(rows.covariance(), rows, known).posterior(~known)
    assert said.mean[0] == pytest.approx(0.1, abs=0.03)


def test_another_stack_is_believed_less_than_ones_own() -> None:
    shares = mixed(12)
    sources = ["one"] * 5 + ["two"] * 5 + ["one", "two"]
    rows = facts(shares, np.array([0.2] * 5 + [np.nan] * 7), sources)
    known = np.arange(12) < 5
    said = fit_effects(rows.covariance(), rows, known).posterior(np.arange(12) >= 10)
    assert said.mean[0] > said.mean[1] > 0
    assert said.deviation[0] < said.deviation[1]


def test_what_is_left_without_a_group_is_what_a_fit_without_it_leaves() -> None:
    rows = facts(mixed(20), np.random.default_rng(3).normal(0.1, 0.05, 20))
    covariance, groups = rows.covariance(), np.array(rows.keys["model"])
    everything = np.ones(20, np.bool_)
    left, deviation = fit_effects(covariance, rows, everything, rounds=0).held_out(groups)
    asked = groups == "model 2"
    said = fit_effects(covariance, rows, ~asked, rounds=0).posterior(asked)
    assert left[asked] == pytest.approx(rows.log_error[asked] - said.mean)
    assert deviation[asked] == pytest.approx(said.deviation)


def test_the_row_that_is_calibrated_on_is_chosen_by_settings_alone() -> None:
    shares = mixed(9)
    one = facts(shares, np.zeros(9))
    other = facts(shares, np.linspace(-1, 1, 9))
    everyone = np.ones(9, np.bool_)
    chosen = central_rows(one.covariance(), one, [everyone])
    assert chosen == central_rows(other.covariance(), other, [everyone])
    assert len(chosen) == 1
