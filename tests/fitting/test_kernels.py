"""Common kernel parameters of several devices, and shrinkage of few rows to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.estimators.interface import Prediction
from hespas.estimators.kernels import KERNELS, PRODUCTS, as_programs_run
from hespas.fitting.kernels import (
    DEFAULT_PRODUCTS,
    benchmark_ns,
    common_kernels,
    common_products,
    fit_products,
    is_kernel,
    kernels_of_device,
    moved_from_expected,
    time_of_kernels,
)
from hespas.graph.columns import FloatArray
from hespas.hardware import ANY, load_device
from hespas.hardware.kernel_shares import common_fits
from hespas.measurements import Measurements, joined
from hespas.operations import EXPANDED, STRIDED, Labels, build

H100, A100 = load_device("H100-SXM"), load_device("A100-SXM-40GB")
SIZES = np.array([1.0, 30.0, 300.0, 3000.0, 10000.0, 50000.0])
TRUE = {each.name: each.start for each in KERNELS.parameters} | {"t0_ns": 5000.0, "memory": 0.5}


def recorded(op: str, rows: FloatArray, hardware: str, *, walked: float = 0.0) -> Measurements:
    """Operations of bf16 rows of 4096 without times."""
    count = len(rows)
    made = build.elementwise(
        "vector",
        Labels.constant("bf16", count),
        op=Labels.constant(op, count),
        rows=rows,
        columns=np.full(count, 4096.0),
        passes=np.full(count, 3.0),
        flops_per_element=np.ones(count),
    )
    return Measurements(
        name=f"{op} on {hardware}",
        provenance="made up",
        ops=replace(made, dims={**made.dims, STRIDED: np.full(count, walked)}),
        duration_ns=np.ones(count),
        spread_ns=np.full(count, np.nan),
        hardware=Labels.constant(hardware, count),
        split=Labels.constant("", count),
        recorded=True,
    )


def timed(table: Measurements, values: dict[str, float]) -> Measurements:
    device = load_device(table.hardware[0])
    return replace(table, duration_ns=time_of_kernels(table, device, {("vector", ANY): values}))


def test_what_devices_share_is_found_and_carries_over_to_one_with_other_operations() -> None:
    tables = [
        (timed(recorded(op, SIZES, device.name), TRUE), device)
        for op in ("add", "mul")
        for device in (H100, A100)
    ]
    common = common_kernels(tables, "NVIDIA")
    assert ("vector", "add") in common
    assert ("normalization", ANY) in common, "kinds that nobody recorded start as all kernels do"
    unseen = timed(recorded("gelu", SIZES, "H200-SXM"), TRUE)
    said = time_of_kernels(unseen, load_device("H200-SXM"), common)
    assert np.abs(said / unseen.duration_ns - 1).mean() < 0.15
    assert not common_kernels([], "NVIDIA")


def test_one_odd_shape_does_not_outvote_what_is_common() -> None:
    table = timed(recorded("add", SIZES, "H100-SXM"), TRUE)
    common = common_kernels([(table, H100)], "NVIDIA")
    odd = replace(timed(recorded("copy", SIZES[:1], "H100-SXM"), TRUE), duration_ns=np.array([700.0]))
    classes = kernels_of_device(joined([table, odd], "both"), H100, common)
    usual = common["vector", "add"]["t0_ns"]
    assert 0.3 * usual < classes["vector", "copy"]["t0_ns"] < usual


def test_operations_that_extents_do_not_tell_are_left_out() -> None:
    table = recorded("add", SIZES, "H100-SXM")
    assert len(is_kernel(table)) == len(SIZES)
    lists = replace(table, ops=replace(table.ops, bytes_moved=table.ops.bytes_moved * 1000))
    assert len(is_kernel(lists)) == 0


@pytest.mark.parametrize(("rows", "far"), [(1, 0.45), (50, 0.65)])
def test_more_rows_move_parameters_further(rows: int, far: float) -> None:
    target = np.log(2.0)
    moved = moved_from_expected(lambda x: np.full(rows, x[0] - target), np.array([0.2]), np.ones(rows))
    assert (moved[0] > far) == (rows > 1)
    assert 0 < moved[0] < target


def test_starts_and_odd_sizes_of_products_are_found_beside_a_benchmark() -> None:
    true = {"start_ns": 2500.0, "scale": 1.0, "ragged": 1.5}
    n = np.tile([4096.0, 3137.0, 512.0, 30522.0], 4)
    m = np.repeat([16.0, 256.0, 2048.0, 8192.0], 4)
    count = len(n)
    ops = build.matmuls(
        Labels.constant("bf16", count), batch=np.ones(count), m=m, n=n, k=np.full(count, 1024.0)
    )
    benchmark = 2000.0 + ops.flops / 500e3
    ragged = 0.5 * (n % 8 > 0) + 0.5 * (n % 4 > 0)
    table = replace(
        recorded("add", m, "H100-SXM"),
        ops=ops,
        duration_ns=true["start_ns"] + benchmark + 1.5 * ragged * np.maximum(benchmark - 4000, 0),
    )
    found = fit_products(table, H100, benchmark, DEFAULT_PRODUCTS)
    for name, value in true.items():
        assert found[name] == pytest.approx(value, rel=0.15)
    assert (
        fit_products(table.take(np.empty(0, np.int64)), H100, np.empty(0), DEFAULT_PRODUCTS)
        == DEFAULT_PRODUCTS
    )


def test_products_of_a_vendors_devices_are_those_recorded_and_of_none_those_of_all() -> None:
    count = 12
    ops = build.matmuls(
        Labels.constant("bf16", count),
        batch=np.ones(count),
        m=np.geomspace(16, 4096, count).round(),
        n=np.full(count, 4096.0),
        k=np.full(count, 1024.0),
    )
    table = replace(recorded("add", np.ones(count), "H100-SXM"), ops=ops)
    table = replace(table, duration_ns=benchmark_ns(table, H100) + 3200.0)
    found = common_products([(table, H100)], "NVIDIA")
    there = fit_products(table, H100, benchmark_ns(table, H100), DEFAULT_PRODUCTS)
    assert there["start_ns"] > DEFAULT_PRODUCTS["start_ns"]
    assert found["start_ns"] == pytest.approx(there["start_ns"] * 2000 / 1600), "of a shortest kernel of 2 us"
    assert common_products([(table, H100)], "AMD") == found
    assert common_products([], "AMD") == DEFAULT_PRODUCTS
    tf32 = replace(table, ops=replace(ops, scheme=Labels.constant("f32", count)))
    assert common_products([(tf32, H100)], "NVIDIA") == DEFAULT_PRODUCTS


def test_the_expansion_of_weights_is_counted_once_in_fitted_products() -> None:
    count = 12
    m = np.geomspace(128, 8192, count).round()
    plain = build.matmuls(
        Labels.constant("bf16", count),
        batch=np.ones(count),
        m=m,
        n=np.full(count, 4096.0),
        k=np.full(count, 4096.0),
    )
    expanded = np.ceil(m / 128) * 4096 * 4096 * np.tile([0.0, 1.0], count // 2)
    table = replace(
        recorded("add", m, "H100-SXM"), ops=replace(plain, dims={**plain.dims, EXPANDED: expanded})
    )
    usual = next(fit for fit in common_fits(H100) if fit.form == PRODUCTS)
    benchmark = Prediction.of("x", benchmark_ns(replace(table, ops=plain), H100))
    with_expansion, without = (
        as_programs_run(benchmark, ops, H100).duration_ns for ops in (table.ops, plain)
    )
    assert (with_expansion[1::2] > 1.1 * without[1::2]).all()
    table = replace(table, duration_ns=with_expansion)
    found = fit_products(table, H100, benchmark_ns(table, H100), DEFAULT_PRODUCTS)
    assert found["scale"] == pytest.approx(usual.value("scale"), rel=0.02)
