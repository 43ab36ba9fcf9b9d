"""The interval of whole steps: from residuals of groups, and the same wherever a step is predicted."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

from hespas import api
from hespas.estimators import step_intervals as module
from hespas.estimators.learned.extrapolation import expected_deviation, references_of
from hespas.estimators.learned.serialization import read_model, shipped_folder
from hespas.estimators.step_intervals import LEVELS, device_level, interval_factors, step_intervals
from hespas.generators.llm import Layout, LlmStep, Training, load_model
from hespas.hardware import load_device
from tools.step_intervals import Residual, chosen_form, new_group, quantiles, scored, step_interval_table


def drawn(groups: int, each: int, between: float, within: float) -> list[Residual]:
    """Return normal residuals of groups around 0.1."""
    draws = np.random.default_rng(0)
    middles = 0.1 + between * draws.standard_normal(groups)
    return [
        Residual(f"g{group}", float(middles[group] + within * draws.standard_normal()))
        for group in range(groups)
        for _ in range(each)
    ]


def test_the_chosen_form_holds_what_it_claims_of_new_groups() -> None:
    rows = drawn(60, 4, 0.15, 0.05)
    form, scores = chosen_form(rows)
    assert 0.85 <= scores.coverage <= 0.97
    low, high = form(rows)
    expected = 1.645 * np.hypot(0.15, 0.05)
    assert low == pytest.approx(0.1 - expected, abs=0.08)
    assert high == pytest.approx(0.1 + expected, abs=0.08)


def test_few_groups_are_uncertain_of_the_next() -> None:
    few = drawn(4, 5, 0.2, 0.02)
    assert np.ptp(quantiles(few)) < np.ptp(new_group(few))


def test_groups_count_alike_however_many_rows_they_have() -> None:
    rows = [Residual("many", 0.0)] * 500 + [Residual(f"g{place}", 0.5) for place in range(40)]
    assert quantiles(rows)[1] == pytest.approx(0.5)


def test_the_score_counts_width_and_distance() -> None:
    rows = [Residual("a", 0.0), Residual("b", 1.0)]
    done = scored(rows, lambda _: (0.0, 0.5))
    assert (done.coverage, done.width) == (0.5, 0.5)
    assert done.score == pytest.approx((0.5 + 0.5 + 20 * 0.5) / 2)


def test_intervals_that_ship_are_two_sided_and_scored() -> None:
    shipped = step_intervals()
    for (kind, level), each in shipped.items():
        assert each.low < 1 < each.high, (kind, level)
        assert level in LEVELS
        measured = shipped[kind, "measured"]
        assert each.low <= measured.low
        assert each.high >= measured.high
        assert each.kind in step_interval_table(shipped.values())
    training = shipped["training", "measured"]
    assert 0.85 <= training.coverage <= 0.95
    assert training.high / training.low < 1.6 / 0.75
    program = shipped["program", "measured"]
    assert log(program.high / program.low) > log(training.high / training.low)


def test_a_training_step_has_the_interval_of_training_steps() -> None:
    whole = load_model("Llama-3-8B")
    model = replace(whole, layers=whole.layers[:1])
    step = LlmStep(model=model, layout=Layout(), training=Training(seq=512, global_batch=1))
    done = api.simulate(step.workload(), "H100-SXM")
    low, high = interval_factors("training", load_device("H100-SXM"), "training")
    assert done.interval_ns == pytest.approx((done.step_ns * low, done.step_ns * high))
    new = api.simulate(step.workload(), "MI325X")
    assert new.interval_ns[1] / new.interval_ns[0] > done.interval_ns[1] / done.interval_ns[0]


def test_a_compiled_program_has_a_wide_interval_around_its_step() -> None:
    program = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"
    done = api.simulate(program, "H100-SXM")
    low_ns, high_ns = done.interval_ns
    assert low_ns < 0.6 * done.step_ns
    assert high_ns > 1.4 * done.step_ns


def test_estimators_that_were_not_compared_have_no_interval() -> None:
    device = load_device("H100-SXM")
    assert not np.isfinite(interval_factors("program", device, "roofline")[0])
    assert device_level("program", device) == "measured"
    assert device_level("training", load_device("TPU-v5p")) == "measured"
    assert device_level("program", load_device("TPU-v5p")) == "new device"


def test_a_step_on_a_device_without_near_references_has_a_wider_interval() -> None:
    widths: list[float] = []
    for name in ("H100-SXM", "H800-SXM", "L4", "V100-SXM2-32GB"):
        low, high = interval_factors("program", load_device(name), "composite")
        widths.append(high / low)
    assert widths[0] < widths[1] < widths[2] < widths[3]


def test_the_usual_deviation_is_that_of_left_out_architectures() -> None:
    card = read_model(shipped_folder() / "gemm-bf16.json").card
    cell = max(card.cells, key=lambda cell: sum(cell.rows.values()))
    deviations: list[float] = []
    for fitted in card.devices:
        without = [other.name for other in card.devices if other.arch == fitted.arch]
        references = references_of(card, cell, load_device(fitted.name), without)
        assert references is not None
        deviations.append(float(expected_deviation(references)))
    assert pytest.approx(np.median(deviations), abs=0.002) == module._USUAL_DEVIATION  # pyright: ignore[reportPrivateUsage]
