"""Products in programs compared with products in benchmarks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.estimators import load_estimator
from hespas.estimators.forms import machine_of
from hespas.estimators.interface import OperationModel, Prediction
from hespas.estimators.kernels import (
    PRODUCTS,
    as_programs_run,
    least_batch_ns,
    product_time_ns,
    ragged_share,
)
from hespas.estimators.rates import roof_ns
from hespas.graph import MEASURED_BASIS, Diagnostics, reference_basis
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


def test_rows_of_odd_length_cost_less_where_loads_need_no_alignment() -> None:
    half = products([3137.0])
    whole = replace(half, scheme=Labels.constant("f32", 1))
    found = [
        ragged_share(ops, load_device(name))[0] for name in ("H100-SXM", "MI300X") for ops in (half, whole)
    ]
    assert found == [1.0, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(("name", "piece_ns"), [("H100-SXM", 200.0), ("MI300X", 2400.0)])
def test_batches_of_tiny_products_take_a_tile_each(name: str, piece_ns: float) -> None:
    device = load_device(name)
    ops = replace(
        products([8.0]), dims={"batch": np.full(1, 37632.0), **{size: np.full(1, 8.0) for size in "mnk"}}
    )
    least = 37632 / device.units * piece_ns
    assert least_batch_ns(ops, device).tolist() == [least]
    assert as_programs_run(Prediction.of("x", np.array([1e3])), ops, device).duration_ns[0] == least
    assert as_programs_run(Prediction.of("x", np.array([1e6])), ops, device).duration_ns[0] > least


@pytest.mark.parametrize(("name", "flops_of_lane"), [("H100-SXM", 2.0), ("MI300X", 4.0)])
def test_weights_of_4_bits_are_expanded_in_each_tile(name: str, flops_of_lane: float) -> None:
    device = load_device(name)
    plain, expanded = products([4096.0]), 32.0 * 4096 * 1024
    ops = replace(plain, dims={**plain.dims, "expanded": np.full(1, expanded)})
    times = [
        as_programs_run(Prediction.of("x", np.full(1, 1e6)), each, device).duration_ns[0]
        for each in (ops, plain)
    ]
    scale = next(fit for fit in common_fits(device) if fit.form == PRODUCTS).value("scale")
    instructions_per_ns = machine_of(device, "matmul", "bf16").lane_flops_per_ns / flops_of_lane
    assert times[0] - times[1] == pytest.approx(scale * 11 * expanded / instructions_per_ns, rel=0.1)


def test_attention_of_one_token_from_references_of_another_vendor_takes_longer() -> None:
    one = np.ones(1)
    ops = build.attention_generation(
        Labels.constant("bf16", 1),
        batch=32 * one, kv_len=1024 * one, heads=32 * one, kv_heads=8 * one, head_dim=128 * one,
        kv_bytes=2 * one,
    )  # fmt: skip
    kernel = replace(ops, dims={**ops.dims, "of_library": one})
    for name, basis, ratio in (
        ("MI300X", reference_basis(["H100-SXM"]), 1.8),
        ("MI300X", MEASURED_BASIS, 1.0),
        ("H200-SXM", reference_basis(["H100-SXM"]), 1.0),
    ):
        said = as_programs_run(
            Prediction.of("x", *np.full((3, 1), 1e6), basis=basis), kernel, load_device(name)
        )
        assert said.duration_ns[0] == pytest.approx(ratio * 1e6)


def test_attention_from_references_of_another_vendor_takes_longer() -> None:
    one = np.ones(1)
    ops = build.attention_context(
        Labels.constant("bf16", 1),
        batch=16 * one, length=559 * one, heads=16 * one, kv_heads=16 * one, head_dim=64 * one,
        window=0 * one, kv_bytes=2 * one,
    )  # fmt: skip
    device = load_device("MI300X")
    for basis, ratio in ((reference_basis(["H100-SXM"]), 1.8), (MEASURED_BASIS, 1.0)):
        said = as_programs_run(Prediction.of("x", *np.full((3, 1), 1e6), basis=basis), ops, device)
        assert [said.duration_ns[0], said.high_ns[0]] == pytest.approx([ratio * 1e6] * 2)
    basis = reference_basis(["H100-SXM"])
    for library, ratio in ((0.0, 1.8), (1.0, 1.0)):
        kernel = replace(ops, dims={**ops.dims, "of_library": np.full(1, library)})
        said = as_programs_run(Prediction.of("x", *np.full((3, 1), 1e6), basis=basis), kernel, device)
        assert said.duration_ns[0] == pytest.approx(ratio * 1e6)
