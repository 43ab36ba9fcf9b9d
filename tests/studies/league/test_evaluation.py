"""Predictions compared with published results: calibration, intervals, summaries, baselines, orders."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

import pytest
from msgspec import structs

from hespas.estimators.step_intervals import step_intervals
from hespas.fitting.effects import factors_of, level_effects
from hespas.studies.league.evaluation import CALIBRATIONS, Calibration, evaluate_rows, fit_rows_of
from hespas.studies.league.rows import LeagueRow, Refusal, RowAssumption, StepPrediction
from hespas.studies.league.summaries import (
    group_errors,
    naive_baselines,
    rank_layouts,
    scaling_points,
    speedups,
)

BASE = {
    "source": "here", "model": "one", "accelerator": "H100-SXM", "num_accelerators": "8", "seq_len": "4096",
    "global_batch": "8", "precision_class": "16bit", "mfu_pct": "40", "rows_with_same_config": "1",
}  # fmt: skip


def made(number: int, measured_ms: float, predicted_ms: float = 100.0, **cells: str) -> LeagueRow:
    """A row of one component."""
    parts = {"products": predicted_ms * 1e6}
    predicted = StepPrediction(
        time_ns=predicted_ms * 1e6, parts=parts, path=parts, peak_memory_bytes=2.0**30, family="Hopper",
        kind="dense", layout=cells.get("tp", ""),
    )  # fmt: skip
    return LeagueRow(number, BASE | {"step_time_ms": f"{measured_ms}"} | cells, predicted)


def league(count: int = 30) -> list[LeagueRow]:
    """Five models, each measured a fifth slower than predicted."""
    return [made(number, 120.0 + number % 3, model=f"model {number % 5}") for number in range(count)]


def test_nothing_is_changed_without_calibration() -> None:
    found = evaluate_rows(league(), "none")
    assert {row.predicted_ms for row in found} == {100.0}
    assert found[0].relative_error == pytest.approx(100 / 120 - 1)


@pytest.mark.parametrize("calibrate", ["one-per-accelerator", "leave-group-out"])
def test_calibration_finds_what_all_rows_share(calibrate: Calibration) -> None:
    found = [row for row in evaluate_rows(league(), calibrate) if row.counts]
    assert max(abs(row.relative_error) for row in found) < 0.06


def test_one_row_of_an_accelerator_is_calibrated_on_and_not_counted() -> None:
    found = evaluate_rows(league(), "one-per-accelerator")
    assert [row.status for row in found].count("calibrating") == 1
    assert next(iter(group_errors(found, "one-per-accelerator"))).n == 29


@pytest.mark.parametrize("column", ["step_time_ms", "step_time_lo_ms", "step_time_hi_ms"])
def test_what_a_group_measured_does_not_reach_its_own_predictions(column: str) -> None:
    rows = league()
    before = evaluate_rows(rows, "leave-group-out")
    other = [
        LeagueRow(row.number, {**row.cells, column: "400"}, row.predicted)
        if row.cells["model"] == "model 2"
        else row
        for row in rows
    ]
    after = evaluate_rows(other, "leave-group-out")
    for one, two in zip(before, after, strict=True):
        if one.row.cells["model"] == "model 2":
            assert one.predicted_ms == two.predicted_ms
            assert (one.low_ms, one.high_ms) == (two.low_ms, two.high_ms)


def test_intervals_have_their_predictions_in_them() -> None:
    for mode in CALIBRATIONS:
        assert all(row.low_ms <= row.predicted_ms <= row.high_ms for row in evaluate_rows(league(), mode))


def test_rows_without_prediction_or_measurement_do_not_count() -> None:
    unmeasured = made(30, 1.0)
    unmeasured.cells["step_time_ms"]  # the column is there
    rows = [
        *league(),
        LeagueRow(30, {**unmeasured.cells, "step_time_ms": ""}, unmeasured.predicted),
        LeagueRow(
            31,
            BASE | {"step_time_ms": "5"},
            StepPrediction(refusal=Refusal(message="the model is not known")),
        ),
    ]
    for mode in CALIBRATIONS:
        found = evaluate_rows(rows, mode)
        assert [row.row.number for row in found] == list(range(32))
        assert found[31].status == "refused"
        assert isnan(found[31].predicted_ms)
        assert found[30].predicted_ms > 0
        assert not found[30].counts


@pytest.mark.parametrize("calibrate", CALIBRATIONS)
def test_a_time_that_cannot_be_reaches_no_other_row(calibrate: Calibration) -> None:
    rows = league()
    found = evaluate_rows([*rows, made(30, 0.0, model="broken"), made(31, -1.0, model="broken")], calibrate)
    assert not any(isnan(row.predicted_ms) for row in found)


def test_an_assumption_is_marked() -> None:
    row = made(0, 100.0)
    predicted = StepPrediction(
        time_ns=1e8,
        parts={"products": 1e8},
        path={"products": 1e8},
        assumed=[RowAssumption(code="row.recompute", message="none")],
    )
    assert evaluate_rows([LeagueRow(0, row.cells, predicted)], "none")[0].status == "assumed"


def test_intervals_hold_nine_rows_of_ten_and_follow_the_spread() -> None:
    spread = [made(n, 100.0 * 1.004 ** ((n * 37) % 61 - 30), model=f"model {n % 10}") for n in range(120)]
    found = evaluate_rows(spread, "leave-group-out")
    assert 0.85 <= sum(row.inside for row in found) / len(found) <= 0.95
    assert all(row.low_ms < row.predicted_ms < row.high_ms for row in found)


def test_without_calibration_a_row_has_the_interval_of_every_training_step() -> None:
    shipped = step_intervals()["training", "measured"]
    for row in evaluate_rows(league(), "none"):
        assert row.low_ms == pytest.approx(row.predicted_ms * shipped.low)
        assert row.high_ms == pytest.approx(row.predicted_ms * shipped.high)


def test_an_interval_of_rounding_counts_as_measured() -> None:
    rows = league()
    wide = made(0, 300.0, step_time_lo_ms="110", step_time_hi_ms="310", model="wide")
    alone = evaluate_rows([*rows, made(0, 300.0, model="wide")], "leave-group-out")[-1]
    found = evaluate_rows([*rows, wide], "leave-group-out")[-1]
    assert (alone.inside, found.inside) == (False, True)


def test_the_baseline_takes_the_median_of_its_peers() -> None:
    rates = ("40", "50", "60")
    rows = evaluate_rows([made(n, 100.0, mfu_pct=rate) for n, rate in enumerate(rates)], "none")
    row, group = naive_baselines(rows)
    assert row.n == 3
    assert row.mean_ape == pytest.approx((15 / 55 + 0 + 15 / 45) / 3)
    assert (group.n, isnan(group.mean_ape)) == (0, True)


def _sets(predicted: list[float]) -> list[Any]:
    measured = (100.0, 110.0, 120.0)
    pairs = enumerate(zip(measured, predicted, strict=True))
    rows = [made(n, real, guess, tp=str(n + 1)) for n, (real, guess) in pairs]
    return list(rank_layouts(evaluate_rows(rows, "none"), "none"))


def test_the_order_of_layouts() -> None:
    (right,), (wrong,) = _sets([90.0, 95.0, 99.0]), _sets([99.0, 95.0, 90.0])
    assert (right.layouts, right.best_in_top_two, right.tau) == (3, True, 1.0)
    assert (wrong.best_in_top_two, wrong.tau) == (False, -1.0)
    assert (right.chosen_excess, wrong.chosen_excess) == (0.0, pytest.approx(0.2))


def test_layouts_of_another_batch_compare_by_sequence() -> None:
    rows = [
        made(0, 100.0, 100.0, tp="1", global_batch="8"),
        made(1, 180.0, 180.0, tp="2", global_batch="16"),
        made(2, 99.0, 99.0, tp="4", global_batch="8"),
    ]
    (found,) = rank_layouts(evaluate_rows(rows, "none"), "none")
    assert (found.best_in_top_two, found.tau) == (True, 1.0)


def test_scaling_is_told_after_a_fit_on_the_fewest() -> None:
    rows = [
        made(0, 100.0, 80.0),
        made(1, 120.0, 80.0, num_accelerators="16", global_batch="16"),
    ]
    (found,) = scaling_points(evaluate_rows(rows, "none"), "none")
    assert (found.base, found.num_accelerators) == (8, 16)
    assert found.published_efficiency == pytest.approx(100 / 120)
    assert found.relative_error == pytest.approx(100 / 120 - 1)


def test_rows_of_other_software_are_one_layout() -> None:
    rows = [
        made(0, 100.0, 100.0, tp="1"),
        made(1, 80.0, 100.0, tp="1", release="newer"),
        made(2, 95.0, 90.0, tp="2"),
    ]
    (found,) = rank_layouts(evaluate_rows(rows, "none"), "none")
    assert (found.layouts, found.best_in_top_two) == (2, True)


def _two_devices(predicted_ms: float, count: str = "8") -> list[LeagueRow]:
    return [
        made(0, 100.0, 100.0),
        made(1, 50.0, predicted_ms, accelerator="B200-SXM", num_accelerators=count, global_batch=count),
        made(2, 70.0, 200.0, accelerator="B200-SXM", num_accelerators=count, global_batch=count),
    ]


@pytest.mark.parametrize(("predicted_ms", "right"), [(40.0, True), (110.0, False)])
def test_an_accelerator_is_faster_than_another_by_its_best_runs(predicted_ms: float, right: bool) -> None:
    rows = evaluate_rows(_two_devices(predicted_ms), "none")
    (found,) = speedups(rows, "none")
    assert (found.base, found.accelerator) == ("B200-SXM", "H100-SXM")
    assert found.published == 0.5
    assert found.predicted == pytest.approx(predicted_ms / 100)
    assert found.right_side is right
    assert found.relative_error == pytest.approx(predicted_ms / 100 / 0.5 - 1)


def test_accelerators_of_far_counts_are_not_compared() -> None:
    assert not list(speedups(evaluate_rows(_two_devices(40.0, "64"), "none"), "none"))


def of_accelerators(**measured_ms: float) -> list[LeagueRow]:
    """Four rows of each of some accelerators, the first of which took so long; all others as predicted."""
    return [
        made(
            number,
            measured_ms.get(name, 100.0) if not number % 4 else 100.0,
            accelerator=name,
            model=f"{number}",
        )
        for number, name in enumerate(name for name in ("A", "B", "C", "D", "E") for _ in range(4))
    ]


@pytest.mark.parametrize("calibrate", ["one-per-accelerator", "leave-group-out"])
def test_a_row_that_is_unlike_others_makes_no_prediction_worse(calibrate: Calibration) -> None:
    """A single row moved all others of its accelerator: from 10.6 to 27.5 % off."""
    rows = of_accelerators(A=130.0)
    plain = {row.row.number: abs(row.relative_error) for row in evaluate_rows(rows, "none")}
    for row in evaluate_rows(rows, calibrate):
        assert abs(row.relative_error) <= plain[row.row.number] + 1e-9


def test_a_correction_that_shows_on_held_out_rows_is_applied() -> None:
    rows = [made(number, 130.0, model=f"model {number}") for number in range(30)]
    assert max(abs(row.relative_error) for row in evaluate_rows(rows, "leave-group-out")) < 0.05


def test_one_row_corrects_an_accelerator_where_that_helps_others() -> None:
    """All other accelerators are predicted 30 % too short by all of their rows, or by one row each."""
    for share, helps in ((4, True), (1, False)):
        rows = [
            made(number, 130.0 if number % 4 < share else 100.0, accelerator=f"A{number // 4}", model="one")
            for number in range(24)
        ]
        found = [row for row in evaluate_rows(rows, "one-per-accelerator") if row.counts]
        assert max(abs(row.relative_error) for row in found) < (0.1 if helps else 1e-9)


def test_a_row_that_contradicts_other_accelerators_corrects_nothing() -> None:
    """All accelerators are predicted a tenth too short; one of them has a row that errs a little the other
    way.
    """
    rows = [made(number, 110.0, accelerator=f"A{number // 4}", model="one") for number in range(24)]
    rows[:4] = [made(number, 96.0, accelerator="A0", model="one") for number in range(4)]
    found = [row for row in evaluate_rows(rows, "one-per-accelerator") if row.counts]
    for row in found:
        if row.row.cells["accelerator"] == "A0":
            assert row.predicted_ms == 100.0
        else:
            assert abs(row.relative_error) < 0.05


def test_groups_have_the_error_of_the_same_rows_without_calibration() -> None:
    found = evaluate_rows(league(), "one-per-accelerator")
    [counted] = [row.row.number for row in found if row.status == "calibrating"]
    whole = next(iter(group_errors(found, "one-per-accelerator")))
    plain = [abs(row.relative_error) for row in evaluate_rows(league(), "none") if row.row.number != counted]
    assert whole.uncalibrated_mean_ape == pytest.approx(sum(plain) / len(plain))
    assert whole.mean_ape < whole.uncalibrated_mean_ape


def test_an_accelerator_without_rows_keeps_its_predictions() -> None:
    """Corrections by other accelerators made a new generation worse: from 18.9 to 23.1 %."""
    rows = [
        made(number, 100.0 if number < 4 else 130.0, accelerator=f"A{number // 4}", model=f"{number // 4}")
        for number in range(24)
    ]
    assert all(row.predicted_ms == 100.0 for row in evaluate_rows(rows, "leave-group-out"))


def test_a_setting_that_many_rows_share_is_calibrated_on() -> None:
    """The one row of another setting was, and moved the others from 10.6 to 27.5 %."""
    rows = [made(number, 90.0, rows_with_same_config="8", model="one") for number in range(8)]
    rows.append(made(8, 120.0, model="one", precision_class="other"))
    [chosen] = [row for row in evaluate_rows(rows, "one-per-accelerator") if row.status == "calibrating"]
    assert chosen.published_ms == 90.0


def test_factors_without_evidence_are_none() -> None:
    found = factors_of(fit_rows_of(of_accelerators(A=130.0)))
    assert {factor.factor for factor in found} == {1.0}


def test_an_error_is_put_down_to_what_rows_that_err_have_in_common() -> None:
    """Steps are predicted too short by all of their second half where collectives are that."""
    rows: list[LeagueRow] = []
    for number in range(24):
        second = ("data", "attention", "vector")[number % 3]
        parts = {"products": 50e6, second: 50e6}
        predicted = StepPrediction(time_ns=100e6, parts=parts, path=parts, family="Hopper", kind="dense")
        measured = 200.0 if second == "data" else 100.0
        cells = BASE | {"step_time_ms": f"{measured}", "model": f"model {number}"}
        rows.append(LeagueRow(number, cells, predicted))
    found = evaluate_rows(rows, "none")
    assert {row.dominant for row in found[::3]} == {"data"}
    assert all(row.error_parts["data"] < -0.2 for row in found[::3])
    assert {round(sum(row.error_parts.values()), 1) for row in found} == {-0.7, 0.0}  # -ln 2, and none


def test_intervals_are_those_of_the_own_source_where_it_has_many_rows() -> None:
    """A stack that errs by much has wide intervals, and does not widen those of one that does not."""
    calm = [made(number, 100.0 + number % 2, model=f"m{number % 10}") for number in range(100)]
    wild = [
        made(100 + number, 100.0 if number % 5 else 180.0, model=f"m{number % 11}", source="there")
        for number in range(100)
    ]
    found = evaluate_rows([*calm, *wild], "leave-group-out")
    width = {row.row.cells["source"]: row.high_ms / row.low_ms for row in found}
    assert width["there"] > 1.7
    assert width["here"] < 1.4 < width["there"]
    few = evaluate_rows([*calm[:4], *wild], "leave-group-out")
    assert few[0].high_ms / few[0].low_ms > 1.5, "four rows say little"


@pytest.mark.parametrize(("kind", "predicted_gib"), [("", 1.0), ("allocated", 1.0), ("reserved", 2.0)])
def test_memory_is_compared_with_the_kind_that_a_row_publishes(kind: str, predicted_gib: float) -> None:
    row = made(0, 100.0, peak_memory_gib="1", peak_memory_kind=kind)
    reserving = replace(row, predicted=structs.replace(row.predicted, reserved_memory_bytes=2.0**31))
    assert reserving.compared_memory_bytes == predicted_gib * 2**30


def test_effects_of_releases_are_those_of_the_rows_and_shrink() -> None:
    rows = [
        made(
            number, 100.0 * (1.1 if number % 2 else 0.9), model=f"model {number % 5}", release=str(number % 2)
        )
        for number in range(40)
    ]
    old, new = level_effects(fit_rows_of(rows), "release")
    assert old.keys == ("here", "0")
    assert (old.n, new.n) == (20, 20)
    assert 0.85 < old.factor < 0.98
    assert 1.02 < new.factor < 1.15
    few = level_effects(fit_rows_of(rows[:2]), "release")
    assert abs(few[0].factor - 1) < abs(old.factor - 1)
