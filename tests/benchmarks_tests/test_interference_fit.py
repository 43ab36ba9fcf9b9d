"""Interference factors: their mean over devices, and the shipped factors against the traces."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import pytest

from benchmarks.interference import Fitted, fitted, form_of, pooled
from hespas.hardware import load_device
from hespas.hardware.kernel_shares import INTERFERENCE_FACTORS

TRACES = Path(__file__).parents[3] / "shared" / "data" / "profiles"


def fit(value: float, error: float) -> Fitted:
    return Fitted(value, error, 10, 2, 1.0, 1.0)


def test_devices_that_agree_count_by_their_errors() -> None:
    value, error = pooled([fit(1.0, 0.1), fit(1.0, 0.2)])
    assert value == pytest.approx(1.0)
    assert error == pytest.approx(sqrt(1 / (100 + 25)))


def test_devices_that_differ_count_alike_with_a_wide_error() -> None:
    value, error = pooled([fit(0.5, 0.01), fit(1.5, 0.02)])
    assert value == pytest.approx(1.0, abs=0.01)
    assert error > 0.7


def test_the_form_is_the_share_that_is_left_over() -> None:
    device = load_device("A100-SXM-40GB")
    assert form_of(device, "compute") == pytest.approx(24 / (108 - 24))
    assert form_of(device, "memory") == pytest.approx(600 / (1555 - 600))


@pytest.mark.skipif(not TRACES.exists(), reason="../shared/data/profiles is not here")
def test_what_ships_is_what_the_traces_give() -> None:
    found = fitted(TRACES)
    for factor in INTERFERENCE_FACTORS:
        fits = [each[factor.bound] for each in found.values()]
        if factor.device == "*":
            value, error = pooled(fits)
        else:
            mine = found[factor.device][factor.bound]
            value, error = max(mine.value, 0.0), mine.std_error
            assert (mine.n, mine.keys) == (factor.n, factor.keys)
        assert (factor.value, factor.std_error) == pytest.approx((value, error), abs=0.006)
