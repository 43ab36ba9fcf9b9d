"""Products of programs beside those of benchmarks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.estimators import load_estimator
from hespas.estimators.interface import OperationModel, Prediction
from hespas.estimators.kernels import PRODUCTS, as_programs_run, product_time_ns, ragged_share
from hespas.estimators.rates import roof_ns
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device
from hespas.hardware.kernel_shares import common_fits
from hespas.operations import Labels, Operations, build

H100 = load_device("H100-SXM")


def products(n: list[float], *, variant: str = "") -> Operations:
    count = len(n)
    return build.matmuls(
        Labels.constant("bf16", count),
        batch=np.ones(count),
        m=np.full(count, 4096.0),
        n=np.array(n),
        k=np.full(count, 1024.0),
        variant=Labels.constant(variant, count),
    )


def test_sizes_that_half_a_vector_divides_are_ragged_by_half() -> None:
    assert ragged_share(products([4096.0, 30522.0, 3137.0, 3140.0]), H100).tolist() == [0.0, 1.0, 1.0, 0.5]


def test_a_start_a_share_and_what_loads_of_single_elements_cost() -> None:
    values = {"start_ns": 1000.0, "scale": 2.0, "ragged": 0.5}
    time = product_time_ns(values, np.array([10_000.0, 10_000.0, 2000.0]), np.array([0.0, 1.0, 0.5]))
    assert time.tolist() == [21_000.0, 27_000.0, 5000.0]


def test_only_products_that_name_no_library_are_moved() -> None:
    fit = next(fit for fit in common_fits(H100) if fit.form == PRODUCTS)
    for variant, start in (("", fit.value("start_ns")), ("vidur", 0.0)):
        ops = products([4096.0], variant=variant)
        said = as_programs_run(Prediction.of("x", np.array([1e6])), ops, H100)
        share = fit.value("scale") if not variant else 1.0
        assert said.duration_ns[0] == pytest.approx(start + share * 1e6)
    bare = replace(H100, vendor="Nobody", name="nobody's")
    assert as_programs_run(Prediction.of("x", np.array([1e6])), products([8.0]), bare).duration_ns[0] == 1e6


def test_the_composite_takes_products_as_programs_run_them_unless_an_order_is_stated() -> None:
    ops = products([3137.0, 3136.0])
    times: list[FloatArray] = []
    for spelling in ("composite", "composite:order=learned+calibrated+roofline"):
        model = load_estimator(spelling)
        assert isinstance(model, OperationModel)
        times.append(model.predict(ops, H100).duration_ns)
    ratio = times[0] / times[1]
    assert ratio[0] > 1.4 > ratio[1] > 0.9


def test_products_of_programs_stay_within_the_roof_too() -> None:
    ops = products([4096.0])
    roof = roof_ns(ops, H100)[0]
    fit = next(fit for fit in common_fits(H100) if fit.form == PRODUCTS)
    faster = replace(
        fit,
        parameters=tuple(
            replace(each, value={"start_ns": 1.0, "scale": 0.5}.get(each.name, each.value))
            for each in fit.parameters
        ),
    )
    device = replace(H100, own_fits=(faster,), fits_of="")
    said = as_programs_run(Prediction.of("x", *np.full((3, 1), roof)), ops, device)
    assert [said.low_ns[0], said.duration_ns[0]] == [roof, roof]


def test_products_of_an_unrecorded_device_say_so_and_have_its_interval() -> None:
    diagnostics = Diagnostics()
    said = as_programs_run(
        Prediction.of("x", np.array([1e6])), products([4096.0]), load_device("L40S"), diagnostics
    )
    assert diagnostics.counts() == {"composite.unseen-device": 1}
    [band] = next(fit for fit in common_fits(load_device("L40S")) if fit.form == PRODUCTS).bands
    assert said.high_ns[0] == pytest.approx(band.high * said.duration_ns[0])
    as_programs_run(Prediction.of("x", np.array([1e6])), products([4096.0]), H100, diagnostics)
    assert diagnostics.counts() == {"composite.unseen-device": 1}
