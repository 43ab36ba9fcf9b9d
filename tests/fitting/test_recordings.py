"""Fits of recorded programs: recovered parameters, shrinkage of few rows, tests on other rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.estimators.calibrated import Calibrated
from hespas.fitting.recordings import fit_recordings
from hespas.graph.errors import UsageError
from hespas.hardware import ANY, Device, load_device
from hespas.measurements import Measurements
from hespas.operations import EXPANDED, STRIDED, Labels, build
from hespas.validators.calibration import calibrate

BARE = replace(load_device("H100-SXM"), fits_of="", own_fits=(), vendor="Nobody")
"""Of a vendor whose kernels nobody recorded."""
BYTES_PER_NS = BARE.main_memory.bandwidth_bytes_per_s / 1e9
START_NS, SHARE, SLOWER = 1500.0, 0.8, 3.0


def recording(name: str, ops: list[str], rows: list[float], *, strided: float = 0.0) -> Measurements:
    """Adds and the like of bf16 rows of 4096, which take exactly what start, traffic and order cost."""
    count = len(ops)
    made = build.elementwise(
        "vector",
        Labels.constant("bf16", count),
        op=Labels.of(ops),
        rows=np.array(rows),
        columns=np.full(count, 4096.0),
        passes=np.full(count, 3.0),
        flops_per_element=np.ones(count),
    )
    made = replace(made, dims={**made.dims, STRIDED: np.full(count, strided)})
    slower = SLOWER if strided else 1.0
    return Measurements(
        name=name,
        provenance=f"the recording {name}",
        ops=made,
        duration_ns=START_NS + made.bytes_moved * slower / (SHARE * BYTES_PER_NS),
        spread_ns=np.full(count, np.nan),
        hardware=Labels.constant("H100-SXM", count),
        split=Labels.constant("", count),
        recorded=True,
    )


SIZES = [8.0, 64.0, 512.0, 2048.0, 8192.0, 20000.0, 40000.0, 80000.0]
DENSE = recording("dense", ["add"] * len(SIZES), SIZES)
STEPPED = recording("stepped", ["copy"] * len(SIZES), [1.5 * size for size in SIZES], strided=1.0)


def fitted_on(parts: list[Measurements], device: Device = BARE) -> Device:
    return replace(device, own_fits=fit_recordings(parts, device, fitted="2026-01-31"), fits_of="")


def test_start_traffic_and_the_cost_of_another_order_are_found_again() -> None:
    device = fitted_on([DENSE, STEPPED])
    for part in (DENSE, STEPPED):
        said = Calibrated().predict(part.ops, device).duration_ns
        assert said == pytest.approx(part.duration_ns, rel=0.08)
    stepped = next(fit for fit in device.fits if fit.key == ("vector", "copy", ANY, ""))
    assert stepped.value("strided") / stepped.value("memory") == pytest.approx(SLOWER / SHARE, rel=0.1)
    assert (stepped.samples, stepped.table, stepped.fitted) == (len(SIZES), "dense stepped", "2026-01-31")


def test_an_operation_seen_once_is_spoken_for_by_its_kind() -> None:
    device = fitted_on([DENSE, recording("once", ["tanh"], [4096.0])])
    assert ("vector", "tanh", ANY, "") not in {fit.key for fit in device.fits}
    other = recording("later", ["tanh", "never_seen"], [30000.0, 30000.0])
    assert Calibrated().predict(other.ops, device).duration_ns == pytest.approx(other.duration_ns, rel=0.1)


def test_nothing_usable_gives_no_fits() -> None:
    assert fit_recordings([recording("one", ["add"], [64.0])], BARE) == ()
    unknown = replace(DENSE, ops=replace(DENSE.ops, bytes_moved=np.full(len(SIZES), np.nan)))
    assert fit_recordings([unknown], BARE) == ()


def test_times_that_the_device_cannot_reach_enter_no_fit() -> None:
    impossible = replace(DENSE, duration_ns=np.full(len(SIZES), 1e-3), name="impossible")
    one, other = (
        fit_recordings(parts, BARE, fitted="2026-01-31") for parts in ([DENSE], [DENSE, impossible])
    )
    assert [each.parameters for each in one] == [each.parameters for each in other]


def test_each_recording_is_predicted_by_the_others() -> None:
    more = recording("more", ["add"] * 4, [100.0, 1000.0, 10000.0, 50000.0])
    done = calibrate([DENSE, more], BARE, tests=("recording",), fitted="2026-01-31")
    (test,) = done.held_out
    assert (test.by, test.count, test.fitted) == ("recording", len(SIZES) + 4, len(SIZES) + 4)
    (after,) = [
        row for row in test.accuracy.summary
        if (row.estimator, row.level, row.op_class, row.size) == ("calibrated", "instance", "all", "all")
    ]  # fmt: skip
    assert after.errors.mape < 0.1


def test_one_recording_cannot_be_left_out() -> None:
    with pytest.raises(UsageError, match="at most one recording"):
        calibrate([DENSE], BARE, tests=("recording",))


def test_fits_are_the_same_in_every_run() -> None:
    one, two = (fit_recordings([DENSE, STEPPED], BARE, seed=7, fitted="2026-01-31") for _ in range(2))
    assert repr(one) == repr(two)  # NaN is not equal to itself


def test_kernels_of_a_known_vendor_are_drawn_to_what_its_devices_have_in_common() -> None:
    device = replace(load_device("H100-SXM"), own_fits=(), fits_of="")
    once = fit_recordings([DENSE, recording("once", ["tanh"], [4096.0])], device, fitted="2026-01-31")
    by_class = {(fit.kind, fit.op): fit for fit in once if fit.form == "kernels"}
    assert by_class["vector", "add"].samples == len(SIZES)
    assert ("normalization", "softmax") in by_class, "what was not recorded here is scaled as the chip is"
    said = Calibrated().predict(DENSE.ops, replace(device, own_fits=once)).duration_ns
    assert np.abs(said / DENSE.duration_ns - 1).mean() < 0.25


def test_recordings_move_kernels_from_what_is_common() -> None:
    device = replace(load_device("H100-SXM"), own_fits=(), fits_of="")
    slow = replace(DENSE, duration_ns=3 * DENSE.duration_ns)
    start = {
        name: next(fit for fit in fit_recordings([part], device) if fit.key[:2] == ("vector", "add"))
        for name, part in (("usual", DENSE), ("slow", slow))
    }
    assert start["slow"].value("t0_ns") > 1.3 * start["usual"].value("t0_ns")
    assert start["slow"].value("memory") < 0.7 * start["usual"].value("memory")


def test_products_that_expand_their_weights_do_not_slow_the_fits_of_others() -> None:
    count = 16
    m = np.tile(np.geomspace(512, 8192, 8).round(), 2)
    made = build.matmuls(
        Labels.constant("bf16", count),
        batch=np.ones(count),
        m=m,
        n=np.full(count, 4096.0),
        k=np.full(count, 4096.0),
    )
    expands = np.arange(count) >= count // 2
    slow = np.where(expands, 5.0, 1.0)
    table = replace(
        recording("products", ["add"] * count, m.tolist()),
        ops=replace(made, dims={**made.dims, EXPANDED: np.where(expands, 4096.0 * 4096.0, 0.0)}),
        duration_ns=START_NS + slow * made.flops / 600e3,
    )
    plain = Calibrated().predict(made, fitted_on([table])).duration_ns[~expands]
    assert plain == pytest.approx(table.duration_ns[~expands], rel=0.1)
