"""Naive models: their predictions, which are never fitted to the predicted shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph import OpClass
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device
from hespas.validators.accuracy.baselines import BASELINES, fitted_baselines, naive_ns
from hespas.validators.accuracy.cases import Cases
from tests.validators.accuracy.small_profiles import Program

DOT, ADD = int(OpClass.CONTRACTION), int(OpClass.ELEMENTWISE)


def _cases(measured: Sequence[float], shapes: Sequence[str], classes: Sequence[int] | None = None) -> Cases:
    rows = len(measured)
    texts = tuple(dict.fromkeys(shapes))
    unknown = np.full(rows, np.nan)
    return Cases(
        source="s",
        workload="w",
        hardware="h",
        labels=tuple(shapes),
        shapes=texts,
        shape=np.array([texts.index(text) for text in shapes], np.int64),
        op_class=np.array(classes if classes is not None else [DOT] * rows, np.int8),
        measured_ns=np.array(measured, np.float64),
        spread_ns=unknown,
        repeats=np.ones(rows, np.int64),
        flops=unknown,
        bytes_moved=unknown,
    )


def _said(
    cases: Sequence[Cases], naive: Sequence[FloatArray], times: Sequence[FloatArray] | None = None
) -> list[dict[str, FloatArray]]:
    rows = fitted_baselines(cases, naive, times or [np.ones(len(each)) for each in cases])
    assert all([said.estimator for said in row] == list(BASELINES) for row in rows)
    return [{said.estimator: said.duration_ns for said in row} for row in rows]


def _names(count: int, start: int = 0) -> list[str]:
    return [f"dot({number})" for number in range(start, start + count)]


def test_a_device_that_is_a_line_is_found_again() -> None:
    """t = 2 us + p0 / 0.5, for shapes that the fit has not seen."""
    p0 = np.geomspace(100, 1e7, 40)
    [said] = _said([_cases((2000 + 2 * p0).tolist(), _names(40))], [p0])
    assert said["datasheet-roofline"].tolist() == p0.tolist()
    np.testing.assert_allclose(said["one-efficiency"], 2000 + 2 * p0, rtol=1e-3)
    np.testing.assert_allclose(said["overhead+two-efficiencies"], 2000 + 2 * p0, rtol=1e-3)


def test_classes_have_lines_of_their_own_where_they_have_shapes_enough() -> None:
    p0 = np.geomspace(1000, 1e6, 40)
    classes = [DOT, ADD] * 20
    measured = np.where(np.array(classes) == DOT, 1000 + 2 * p0, 5000 + 8 * p0)
    [said] = _said([_cases(measured.tolist(), _names(40), classes)], [p0])
    np.testing.assert_allclose(said["overhead+two-efficiencies"], measured, rtol=1e-3)
    assert float(np.abs(said["one-efficiency"] / measured - 1).max()) > 0.3
    few = [ADD if number < 5 else DOT for number in range(40)]
    [said] = _said([_cases(measured.tolist(), _names(40), few)], [p0])
    assert said["overhead+two-efficiencies"][:5].tolist() == said["one-efficiency"][:5].tolist()


def test_shapes_of_one_size_have_one_fit_whatever_the_last_bit() -> None:
    """Nothing says what part of their time is launch; processors differ in the last bit of a logarithm."""
    rng = np.random.default_rng(0)
    first = [*[100.0] * 9, 0.0]  # the last is another size, and predicted by the fit of the others
    said: list[FloatArray] = []
    for _ in range(8):
        moved = np.array([700.0, 1200.25, 300.0, 2000.0, 900.0, 650.0, 310.0, 1500.0, 800.0, 300.0])
        moved *= 1 + rng.integers(-2, 3, 10) * 2.0**-52
        [predicted] = _said([_cases(moved.tolist(), _names(10))], [np.array(first)])
        said.append(predicted["one-efficiency"])
    np.testing.assert_allclose(said, [said[0]] * 8, rtol=1e-5)


def test_p0_is_the_roofline_of_the_published_peaks() -> None:
    program = Program()
    program.add("add", "add", OpClass.ELEMENTWISE, takes=[(2,)], flops=1.0, moved=3.35e12 / 1e6)
    [predicted] = naive_ns(program.build(), load_device("H100-SXM")).tolist()
    assert predicted == pytest.approx(1000.0, rel=0.01), "1 us of bandwidth, no launch"


def _changed(cases: Cases, shape: str, factor: float) -> Cases:
    chosen = cases.shape == list(cases.shapes).index(shape)
    return _cases(
        np.where(chosen, cases.measured_ns * factor, cases.measured_ns).tolist(),
        list(cases.labels),
    )


@settings(max_examples=25)
@given(st.integers(0, 19), st.sampled_from([1e-3, 50.0, 1e4]))
def test_an_unseen_shape_never_enters_its_own_fit(row: int, factor: float) -> None:
    """One source: whatever the shape takes, its own prediction stays, and others' do not."""
    rng = np.random.default_rng(1)
    p0 = np.tile(np.geomspace(100, 1e6, 20), 2)
    names = _names(20) * 2
    cases = _cases((1000 + p0 * rng.uniform(1, 4, 40)).tolist(), names)
    [before] = _said([cases], [p0])
    [after] = _said([_changed(cases, names[row], factor)], [p0])
    for name in ("one-efficiency", "overhead+two-efficiencies"):
        assert after[name][[row, row + 20]].tolist() == before[name][[row, row + 20]].tolist()
        assert after[name].tolist() != before[name].tolist()


def test_with_several_sources_each_is_predicted_by_the_others() -> None:
    rng = np.random.default_rng(2)
    p0 = [np.geomspace(100, 1e6, 20)] * 3
    cases = [
        _cases((1000 + each * rng.uniform(1, 4, 20)).tolist(), _names(20, 20 * number))
        for number, each in enumerate(p0)
    ]
    before = _said(cases, p0)
    slower = _cases((cases[0].measured_ns * 10).tolist(), list(cases[0].labels))
    after = _said([slower, *cases[1:]], p0)
    assert after[0]["one-efficiency"].tolist() == before[0]["one-efficiency"].tolist()
    assert after[1]["one-efficiency"].tolist() != before[1]["one-efficiency"].tolist()


def test_a_shape_that_another_source_shares_stays_out_of_the_fit() -> None:
    p0 = np.geomspace(100, 1e6, 20)
    one = _cases((1000 + 2 * p0).tolist(), _names(20))
    names = [*_names(10), *_names(10, 100)]  # the first ten are those of the other source
    two = _cases((1000 + 2 * p0).tolist(), names)
    before = _said([one, two], [p0, p0])
    odd = _cases(np.where(np.arange(20) < 10, 1e9, 1000 + 2 * p0).tolist(), names)
    after = _said([one, odd], [p0, p0])
    assert after[0]["one-efficiency"].tolist() == before[0]["one-efficiency"].tolist()


def test_sources_of_the_same_shapes_fall_back_on_fifths_of_them() -> None:
    p0 = np.geomspace(100, 1e6, 30)
    cases = _cases((1000 + 2 * p0).tolist(), _names(30))
    for said in _said([cases, cases], [p0, p0]):
        np.testing.assert_allclose(said["one-efficiency"], 1000 + 2 * p0, rtol=1e-2)


def test_a_launch_counts_for_each_execution() -> None:
    """A loop of 16 trips launches 16 times; the fit is of one execution."""
    p0 = np.geomspace(100, 1e6, 40)
    times = np.where(np.arange(40) % 2 == 0, 16.0, 1.0)
    cases = _cases(((1000 + 2 * p0) * times).tolist(), _names(40))
    [said] = _said([cases], [p0], [times])
    np.testing.assert_allclose(said["one-efficiency"], (1000 + 2 * p0) * times, rtol=1e-3)
    assert said["datasheet-roofline"].tolist() == (p0 * times).tolist()


def test_a_shape_that_recurs_counts_once() -> None:
    p0 = np.geomspace(100, 1e6, 20)
    measured = 1000 + 2 * p0
    once = _said([_cases(measured.tolist(), _names(20))], [p0])[0]
    often = [*range(20), *[3] * 500]
    names = _names(20)
    many = _said([_cases(measured[often].tolist(), [names[row] for row in often])], [p0[often]])[0]
    np.testing.assert_allclose(many["one-efficiency"][:20], once["one-efficiency"], rtol=1e-9)


@pytest.mark.parametrize(
    ("p0", "measured"),
    [((), ()), ((1.0,), (2.0,)), ((np.nan, np.nan), (1.0, 2.0)), ((1.0, 2.0), (0.0, -1.0))],
)
def test_what_cannot_be_fitted_is_unknown(p0: tuple[float, ...], measured: tuple[float, ...]) -> None:
    [said] = _said([_cases(measured, _names(len(p0)))], [np.array(p0, np.float64)])
    np.testing.assert_array_equal(said["datasheet-roofline"], np.array(p0, np.float64))
    assert np.isnan(said["one-efficiency"]).all()
    assert np.isnan(said["overhead+two-efficiencies"]).all()


def test_an_unknown_or_endless_p0_spoils_no_fit() -> None:
    p0 = np.geomspace(100, 1e6, 30)
    broken = p0.copy()
    broken[[4, 9]] = np.nan, np.inf
    [said] = _said([_cases((1000 + 2 * p0).tolist(), _names(30))], [broken])
    good = np.isfinite(broken)
    np.testing.assert_allclose(said["one-efficiency"][good], (1000 + 2 * p0)[good], rtol=1e-2)
    assert np.isnan(said["one-efficiency"][4])


def test_work_that_costs_nothing_takes_the_launch() -> None:
    p0 = np.append(np.zeros(10), np.geomspace(100, 1e6, 30))
    [said] = _said([_cases((1000 + 2 * p0).tolist(), _names(40))], [p0])
    np.testing.assert_allclose(said["one-efficiency"], 1000 + 2 * p0, rtol=1e-2)
