"""Intervals from held-out recordings: used rows and their weights."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import numpy as np
import pytest

from hespas.estimators.kernels import KERNELS
from hespas.fitting.kernels import kernel_fits
from hespas.fitting.recordings import ENOUGH, HeldOutRecording, with_intervals
from hespas.hardware import Fit, load_device
from hespas.operations import Labels

H100 = load_device("H100-SXM")
TYPICAL = {each.name: each.start for each in KERNELS.parameters}
[BARE] = kernel_fits({("vector", "add"): TYPICAL}, fitted="2026-01-31")


def left_out(device: str, ratio: list[float] | np.ndarray, kind: str = "vector") -> HeldOutRecording:
    """A recording whose rows took ``ratio`` times what was said."""
    measured = 1000.0 * np.asarray(ratio, np.float64)
    return HeldOutRecording(
        device, Labels.constant(kind, len(measured)), np.full(len(measured), 1000.0), measured
    )


def spread(count: int, most: float) -> np.ndarray:
    """Ratios from 1 / ``most`` to ``most``."""
    return np.geomspace(1 / most, most, count)


def bounds(fits: tuple[Fit, ...]) -> tuple[float, float]:
    [fit] = fits
    [band] = fit.bands
    return band.low, band.high


def test_one_more_value_of_a_sample_lies_inside_nine_times_in_ten() -> None:
    generator = np.random.default_rng(0)
    inside: list[bool] = []
    for _ in range(2000):
        drawn = generator.lognormal(0.0, 0.4, 60)
        low, high = bounds(with_intervals([BARE], [left_out("H100-SXM", drawn[:-1])]))
        inside.append(bool(low <= drawn[-1] <= high))
    # Of 2,000 draws the share is known to 0.7 %; ranks of 60 overshoot by one on each side at most.
    assert 0.88 < np.mean(inside) < 0.96


def test_the_devices_own_recordings_count_before_others() -> None:
    own, others = left_out("H100-SXM", spread(200, 1.2)), left_out("MI300X", spread(200, 4.0))
    alone = bounds(with_intervals([BARE], [own], H100))
    assert bounds(with_intervals([BARE], [own, others], H100)) == alone, "sixty rows speak for themselves"
    few = left_out("H100-SXM", spread(20, 1.2))
    low, high = bounds(with_intervals([BARE], [few, others], H100))
    assert low < alone[0] < alone[1] < high, "of fewer others' make up the rest"
    unrecorded = bounds(with_intervals([BARE], [few, others]))
    assert unrecorded[1] == pytest.approx(4.0, rel=0.25)


def test_a_long_recording_counts_for_no_more_than_sixty_rows() -> None:
    wide = [left_out("H100-SXM", spread(60, 3.0)), left_out("A100-SXM-40GB", spread(60, 3.0))]
    with_long = [*wide, left_out("MI300X", spread(100_000, 1.01))]
    with_short = [*wide, left_out("MI300X", spread(int(ENOUGH), 1.01))]
    assert bounds(with_intervals([BARE], with_long)) == pytest.approx(
        bounds(with_intervals([BARE], with_short)), rel=0.1
    )


def test_errors_are_of_the_kind_and_of_the_device_and_the_fit_says_what_was_left_out() -> None:
    parts = [
        left_out("H100-SXM", [2.0] * 30),
        left_out("H100-SXM", [1.0] * 40, "move"),
        left_out("MI300X", [9.0] * 50),
    ]
    [fit] = with_intervals([BARE], parts, H100)
    assert (fit.error.n, fit.error.mape) == (30, 0.5)
    assert fit.provenance.endswith("(interval: models left out in turn of H100-SXM)")
    [fit] = with_intervals([BARE], parts)
    assert fit.error.n == 80
    assert fit.provenance.endswith("(interval: devices and models left out in turn of H100-SXM, MI300X)")


def test_too_little_left_out_leaves_fits_as_they_are() -> None:
    assert with_intervals([BARE], []) == (BARE,)
    [fit] = with_intervals([BARE], [left_out("H100-SXM", [1.0] * 9)])
    assert fit.bands == ()
    assert isnan(fit.error.mape)
    others = [left_out("MI300X", [1.0] * 9)]
    banded = replace(BARE, bands=with_intervals([BARE], [left_out("H100-SXM", spread(60, 2.0))])[0].bands)
    assert with_intervals([banded], others, H100) == (banded,)
