"""Calibration by effects: recovered effects, robustness to few or outlying rows, and step factors."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.fitting.effects import (
    COMPONENTS,
    FitRows,
    central_rows,
    correct_by_pairs,
    factors_of,
    fit_effects,
    fit_step_factor,
    share_from_other_cells,
    single_row_share,
)
from hespas.graph.columns import FloatArray

PRODUCTS, ATTENTION = COMPONENTS.index("products"), COMPONENTS.index("attention")


def facts(
    shares: FloatArray,
    log_error: FloatArray,
    sources: list[str] | None = None,
    accelerators: list[str] | None = None,
) -> FitRows:
    """Return rows with these shares and errors, of one stack and accelerator unless stated."""
    count = len(log_error)
    constant = {
        "family": "Hopper",
        "precision": "16bit",
        "kind": "dense",
        "release": "",
    }
    keys = {name: [value] * count for name, value in constant.items()}
    keys["source"] = sources or ["here"] * count
    keys["accelerator"] = accelerators or ["H100"] * count
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


def test_a_row_without_variance_is_not_the_central_one() -> None:
    rows = facts(mixed(9), np.zeros(9))
    covariance, everyone = rows.covariance(), np.ones(9, np.bool_)
    covariance[0, :] = covariance[:, 0] = 0.0
    [chosen] = central_rows(covariance, rows, [everyone])
    assert chosen != 0
    assert [chosen] == central_rows(covariance, rows, [np.arange(9) > 0])


@pytest.mark.parametrize(
    ("log_error", "expected", "low", "high"),
    [
        (0.02, 0.01, 1.0, 1.0),  # small errors of equal signs confirm each other
        (-0.30, -0.01, 1.0, 1.0),
        (0.05, 0.0, 1.0, 1.0),  # no other row has a common effect
        (0.05, -1e-17, 1.0, 1.0),  # a rounding error
        (0.08, -0.02, 0.0, 0.0),  # of the row only
        (-0.50, 0.02, 0.9, 1.0),  # too large for that
    ],
)
def test_a_row_that_contradicts_other_cells_needs_a_large_error(
    log_error: float, expected: float, low: float, high: float
) -> None:
    assert low <= single_row_share(log_error, expected) <= high


def test_corrections_by_pairs_equal_fits_to_single_rows() -> None:
    accelerators = ["A", "A", "A", "A", "B", "B"]
    rows = facts(mixed(6), np.array([0.3, -0.1, 0.2, np.nan, 0.1, 0.0]), accelerators=accelerators)
    covariance = rows.covariance()
    pairs = correct_by_pairs(covariance, rows)
    assert pairs.row.tolist() == [1, 2, 0, 2, 0, 1, 5, 4]
    fit = fit_effects(covariance, rows, np.arange(6) == 2, rounds=0)
    expected = fit.posterior(np.arange(6) < 2).mean
    assert pairs.correction[4:6] == pytest.approx(expected)


def test_the_share_of_a_cell_comes_from_how_alike_rows_of_other_cells_are() -> None:
    """Rows of all cells have the same mean error. In one table they are alike, in the other they are not."""
    scatter = np.random.default_rng(5).permutation(np.linspace(-0.2, 0.3, 60))
    names = [f"A{number % 6}" for number in range(60)]
    shares: list[float] = []
    for errors in (np.full(60, 0.2), scatter):
        rows = facts(mixed(60), errors, accelerators=names)
        pairs = correct_by_pairs(rows.covariance(), rows)
        shares.append(share_from_other_cells(rows, pairs, "here", "A0"))
        own_errors = np.where(np.array(names) == "A0", 9.0, errors)
        other = facts(mixed(60), own_errors, accelerators=names)
        other_pairs = correct_by_pairs(other.covariance(), other)
        assert share_from_other_cells(other, other_pairs, "here", "A0") == shares[-1]
    assert shares == [1.0, 0.0]


def test_a_single_cell_is_corrected_in_full() -> None:
    rows = facts(mixed(6), np.full(6, 0.2))
    pairs = correct_by_pairs(rows.covariance(), rows)
    assert share_from_other_cells(rows, pairs, "here", "H100") == 1.0


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_step_factor_approaches_the_ratio_of_all_workloads(count: int) -> None:
    names = [f"model {number}" for number in range(count)]
    fit = fit_step_factor(names, np.full(count, np.log(1.2)))
    assert 1.1 < np.exp(fit.mean) < 1.2
    assert fit.share == 1.0
    assert 0 < fit.std_error < 0.05
    assert np.exp(fit.log_ratio) == pytest.approx(1.2)
    assert fit.before == pytest.approx(np.full(count, 1 / 1.2 - 1))
    if count > 3:  # without one of three workloads no factor is applied
        assert (np.abs(fit.after) < 0.03).all()
    else:
        assert fit.after == pytest.approx(fit.before)


@pytest.mark.parametrize("names", [["a"], ["a"] * 50, ["a", "b"], ["a", "b"] * 20])
def test_one_or_two_workloads_give_no_step_factor(names: list[str]) -> None:
    fit = fit_step_factor(names, np.full(len(names), np.log(1.2)))
    assert (fit.mean, fit.share) == (0.0, 0.0)
    assert fit.workloads == tuple(sorted(set(names)))
    assert fit.after == pytest.approx(fit.before)


def test_rows_of_one_workload_count_once() -> None:
    few = fit_step_factor(["a", "b", "c", "d"], np.array([0.1, 0.2, 0.3, 0.2]))
    many = fit_step_factor(["a"] * 99 + ["b", "c", "d"], np.array([0.1] * 99 + [0.2, 0.3, 0.2]))
    assert many.mean == pytest.approx(few.mean)
    assert many.std_error == pytest.approx(few.std_error)


def test_step_factors_do_not_make_predictions_worse() -> None:
    """Random errors without a common part: the mean error of left-out workloads stays the same."""
    draw = np.random.default_rng(7)
    before, after = np.zeros((2, 100))
    for trial in range(100):
        fit = fit_step_factor(list("abcdef"), draw.normal(0.0, 0.08, 6))
        before[trial], after[trial] = np.abs(fit.before).mean(), np.abs(fit.after).mean()
    assert after.mean() < before.mean() + 0.003
    common = fit_step_factor(list("abcdef"), 0.2 + draw.normal(0.0, 0.03, 6))
    assert np.abs(common.after).mean() < 0.4 * np.abs(common.before).mean()
