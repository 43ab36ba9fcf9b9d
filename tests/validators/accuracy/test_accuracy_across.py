"""Figures across devices and sources by hand: speed-ups, trends, summaries and contributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan, log, nan

import numpy as np
import pytest

from hespas.estimators.interface import CasePrediction
from hespas.graph import OpClass
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.result import EndToEnd
from hespas.validators.accuracy.summaries import contributions, speed_ups, summaries, trends

DOT, ADD = int(OpClass.CONTRACTION), int(OpClass.ELEMENTWISE)


def _cases(
    hardware: str,
    rows: Sequence[tuple[str, float, float]],
    classes: Sequence[int] | None = None,
    estimator: str = "model",
) -> Cases:
    """Rows of shape, predicted and measured time."""
    count = len(rows)
    texts = tuple(dict.fromkeys(row[0] for row in rows))
    unknown = np.full(count, nan)
    predicted = np.array([row[1] for row in rows])
    return Cases(
        source=f"on {hardware}",
        workload="w",
        hardware=hardware,
        labels=tuple(f"label of {row[0]}" for row in rows),
        shapes=texts,
        shape=np.array([texts.index(row[0]) for row in rows], np.int64),
        op_class=np.array(classes if classes is not None else [DOT] * count, np.int8),
        measured_ns=np.array([row[2] for row in rows]),
        spread_ns=unknown,
        repeats=np.ones(count, np.int64),
        flops=unknown,
        bytes_moved=unknown,
        predictions=(
            CasePrediction(estimator=estimator, duration_ns=predicted, low_ns=unknown, high_ns=unknown),
        ),
    )


def test_speed_ups_by_hand() -> None:
    one = _cases("A", [("a", 10, 100), ("b", 10, 50_000), ("c", 10, 30_000), ("only here", 1, 1)])
    two = _cases("B", [("a", 20, 200), ("b", 5, 100_000), ("c", 40, 60_000), ("only there", 1, 1)])
    [found] = speed_ups([one, two])
    # Measured twice as long on B throughout; predicted 2, 0.5 and 4 times.
    assert (found.hardware, found.other, found.n, found.n_long) == ("A", "B", 3, 2)
    assert found.sign == pytest.approx(2 / 3)
    assert found.sign_long == pytest.approx(1 / 2)
    assert found.median_error == pytest.approx(0.75)  # of |2/2-1|, |0.5/2-1|, |4/2-1|
    assert isnan(found.rank), "all measured ratios are equal"
    assert found.constant_error == pytest.approx(0.0)
    assert found.constant_sign == 1.0


def test_the_rank_of_speed_ups() -> None:
    one = _cases("A", [(name, 1, 10) for name in "abcd"])
    two = _cases("B", [("a", 1, 20), ("b", 2, 30), ("c", 4, 40), ("d", 3, 50)])
    [found] = speed_ups([one, two])
    assert found.rank == pytest.approx(4 / 6)


def test_repeats_count_once_and_unknown_predictions_not_at_all() -> None:
    one = _cases("A", [("a", 10, 100), ("a", 10, 300), ("a", 10, 200), ("b", nan, 100), ("c", 10, 0)])
    two = _cases("B", [("a", 20, 400), ("b", 20, 400), ("c", 20, 400)])
    [found] = speed_ups([one, two])
    assert (found.n, found.sign) == (1, 1.0)
    assert found.median_error == pytest.approx(0.0)


def test_devices_without_a_shape_in_common_are_not_compared() -> None:
    one, two = _cases("A", [("a", 1, 1)]), _cases("B", [("b", 1, 1)])
    assert speed_ups([one, two]) == []
    assert speed_ups([one]) == []
    assert speed_ups([one, _cases("B", [("a", 1, 1)], estimator="other")]) == []


def _run(predicted_ns: float, measured_ns: float, basis: str = "sum of operations") -> EndToEnd:
    return EndToEnd(
        workload="w", source="s", hardware="A", estimator="model", basis=basis, predicted_ns=predicted_ns,
        measured_ns=measured_ns, is_lower_bound=False,
    )  # fmt: skip


def test_an_error_of_nothing_measured_is_unknown() -> None:
    assert _run(150, 100).relative_error == pytest.approx(0.5)
    assert isnan(_run(150, 0).relative_error)
    assert isnan(_run(150, nan).relative_error)


def test_a_trend_needs_three_sources() -> None:
    assert list(trends([_run(1, 2), _run(2, 4), _run(nan, 8)])) == []


def test_a_trend_by_hand() -> None:
    """Predictions grow as the square root of measurements: slope 1/2, in the same order."""
    [found] = trends([_run(1, 1), _run(2, 4), _run(4, 16)])
    assert found.n == 3
    assert found.rank == pytest.approx(1.0)
    assert found.slope == pytest.approx(0.5)


def test_a_trend_of_spans_comes_before_that_of_sums() -> None:
    spans = [_run(1, 1, "span"), _run(2, 2, "span"), _run(4, 4, "span")]
    sums = [_run(9, 1), _run(8, 2), _run(7, 4)]
    [found] = trends([*sums, *spans])
    assert found.slope == pytest.approx(1.0)


def test_summaries_at_both_levels() -> None:
    rows = [("a", 50, 100), ("a", 50, 100), ("a", 50, 100), ("b", 2000, 1000)]
    found = {
        (row.level, row.op_class, row.size): row.errors
        for row in summaries([_cases("A", rows, [DOT, DOT, DOT, ADD])])
    }
    assert set(found) == {
        (level, *part)
        for level in ("instance", "shape")
        for part in [
            ("all", "all"), ("contraction", "all"), ("elementwise", "all"), ("all", "< 1 us"),
            ("all", "1-10 us"),
        ]
    }  # fmt: skip
    assert found["instance", "all", "all"].mape == pytest.approx((3 * 0.5 + 1.0) / 4)
    assert found["shape", "all", "all"].mape == pytest.approx((0.5 + 1.0) / 2)
    assert found["instance", "contraction", "all"].n == 3
    assert found["shape", "contraction", "all"].n == 1
    assert found["shape", "all", "1-10 us"].bias == pytest.approx(1.0)


def test_summaries_join_sources_of_one_device() -> None:
    one = _cases("A", [("a", 50, 100)])
    two = replace(_cases("A", [("a", 150, 100), ("b", 100, 100)]), source="two")
    [whole] = [
        row.errors
        for row in summaries([one, two])
        if (row.level, row.op_class, row.size) == ("shape", "all", "all")
    ]
    # Both predict shape a; its median prediction is 100, which is right.
    assert (whole.n, whole.mape) == (2, 0.0)


def test_an_estimator_that_a_source_lacks_covers_less() -> None:
    one, two = _cases("A", [("a", 50, 100)]), _cases("A", [("b", 50, 300)], estimator="other")
    whole = {
        row.estimator: row.errors
        for row in summaries([one, two])
        if (row.level, row.op_class, row.size) == ("instance", "all", "all")
    }
    assert {name: each.coverage for name, each in whole.items()} == {"model": 0.25, "other": 0.75}


def test_contributions_add_up_to_the_error_of_the_whole() -> None:
    rows = [("a", 50, 100), ("b", 400, 300), ("a", 70, 100), ("c", 10, 10), ("d", nan, 90)]
    found = list(contributions(_cases("A", rows)))
    assert [(row.shape, row.count, row.predicted_ns, row.measured_ns) for row in found] == [
        ("b", 1, 400.0, 300.0),
        ("a", 2, 120.0, 200.0),
    ]
    assert [row.share for row in found] == [pytest.approx(100 / 600), pytest.approx(-80 / 600)]
    assert sum(row.share for row in found) == pytest.approx((530 - 510) / 600)
    assert found[1].label == "label of a"
    assert list(contributions(_cases("A", [("a", 1, 0)]))) == []


def test_a_log_ratio_is_the_same_both_ways() -> None:
    found = [
        next(summaries([_cases("A", [("a", first, second)])])).errors.log_ratio
        for first, second in ((50, 100), (100, 50))
    ]
    assert found == [pytest.approx(-log(2)), pytest.approx(log(2))]
