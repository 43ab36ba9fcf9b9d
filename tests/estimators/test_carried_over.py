"""TPUs without measurements: shares of the measured TPU applied to their data sheets, with wide intervals."""

from __future__ import annotations

from math import e

import numpy as np
import pytest

from hespas.estimators.calibrated import Calibrated
from hespas.estimators.composite import Composite
from hespas.estimators.rates import roof_ns
from hespas.graph import Diagnostics
from hespas.hardware import load_device
from hespas.operations import Labels, Operations, build

OTHERS = ("TPU-v3", "TPU-v5e", "TPU-v5p", "TPU-v6e", "TPU-v7x")
SHAPES = ((4095.0, 513.0), (4096.0, 4096.0), (65536.0, 8.0), (1.0, 1000.0))


def streams(kind: str, op: str, scheme: str = "bf16") -> Operations:
    rows, columns = np.array(SHAPES).T
    count = len(rows)
    return build.elementwise(
        kind,
        Labels.constant(scheme, count),
        op=Labels.constant(op, count),
        rows=rows,
        columns=columns,
        passes=np.full(count, 2.0),
        flops_per_element=np.ones(count),
    )


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    ("kind", "op"),
    [("vector", "add"), ("normalization", "batch_norm"), ("pooling", "avg_pool"), ("reduction", "sum")],
)
def test_an_interval_of_another_device_holds_the_data_sheet_and_a_factor_of_e(
    name: str, kind: str, op: str
) -> None:
    device, ops, told = load_device(name), streams(kind, op), Diagnostics()
    said = Composite().predict(ops, device, told)
    assert set(np.array(said.models)[said.estimator]) == {"calibrated"}
    roof = roof_ns(ops, device)
    assert (said.duration_ns >= roof).all()
    assert (said.low_ns >= roof).all()
    assert (said.low_ns <= np.maximum(said.duration_ns / e, roof) * (1 + 1e-9)).all()
    assert (said.high_ns >= said.duration_ns * e * (1 - 1e-9)).all()
    assert told.counts()["calibrated.carried"] >= 1


@pytest.mark.parametrize("name", OTHERS)
def test_products_of_any_format_have_an_interval(name: str) -> None:
    device = load_device(name)
    for scheme in ("bf16", "f16", "f32"):
        size = np.array([300.0, 4095.0])
        ops = build.matmuls(Labels.constant(scheme, 2), batch=np.ones(2), m=size, n=size, k=size)
        said = Composite().predict(ops, device)
        assert (said.high_ns >= e * 0.99 * said.duration_ns).all(), scheme
        assert (said.low_ns <= said.duration_ns).all()


def test_the_measured_device_and_other_kinds_take_nothing_over() -> None:
    told = Diagnostics()
    Calibrated().predict(streams("vector", "add"), load_device("TPU-v4"), told)
    Calibrated().predict(streams("reduction", "sum"), load_device("A10"), told)
    assert "calibrated.carried" not in told.counts()


def test_without_whole_chips_a_class_that_was_not_measured_has_no_time() -> None:
    device, ops = load_device("TPU-v5e"), streams("reduction", "sum")
    assert np.isnan(Calibrated(chip_wide=False).predict(ops, device).duration_ns).all()
