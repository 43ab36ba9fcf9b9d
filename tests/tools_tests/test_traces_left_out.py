"""Tables of traces whose model is left out of the fits."""

from __future__ import annotations

from math import inf, nan

from benchmarks.carry_over.traces import (
    BASELINE,
    BASELINE_OF_OTHERS,
    FITTED,
    ROOFLINE,
    UNRECORDED,
    Row,
    summary,
)
from tools.kernels import model_of


def row(op_class: str, predicted_ns: float, interval_ns: tuple[float, float]) -> Row:
    said = {
        ROOFLINE: 50.0,
        BASELINE: 200.0,
        BASELINE_OF_OTHERS: 90.0,
        UNRECORDED: 150.0,
        FITTED: predicted_ns,
    }
    return Row(
        trace="a.json",
        op_class=op_class,
        shape="add",
        measured_ns=100.0,
        predicted_ns=said,
        interval_ns={FITTED: interval_ns},
    )


def test_all_and_each_class_are_compared_where_the_composite_and_the_roofline_answer() -> None:
    rows = [
        row("move", 110.0, (90.0, 130.0)),
        row("move", 130.0, (110.0, 150.0)),
        row("host", nan, (0.0, inf)),
    ]
    lines = {(line[1], line[2]): line[3:] for line in summary(rows)}
    assert {op_class for op_class, _ in lines} == {"all", "move"}
    assert lines["all", FITTED] == ("2", "3", "20.0%", "20.0%", "28.0%", "+20.0%", "+20.0%", "50.0%")
    assert lines["all", ROOFLINE][2] == "50.0%"


def test_a_model_is_the_same_on_any_device() -> None:
    assert (
        model_of("h100_timesformer_inf.json.gz")
        == model_of("mi300x_timesformer_inf.json.gz")
        == "timesformer_inf"
    )
