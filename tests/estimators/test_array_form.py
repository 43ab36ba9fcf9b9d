"""Products on systolic arrays: padding to tiles and arrays, and monotone times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hespas.estimators.forms import ARRAYS, FORMS, MachineRates, form_time_ns, forms_for, machine_of
from hespas.estimators.rates import roof_ns
from hespas.hardware import load_device
from hespas.operations import Labels, Operations, build
from hespas.operations.tiles import padded

TPUS = ("TPU-v3", "TPU-v4", "TPU-v5e", "TPU-v5p", "TPU-v6e", "TPU-v7x")
SIZE = st.integers(1, 20_000)


def products(*sizes: tuple[float, float, float], scheme: str = "bf16") -> Operations:
    m, n, k = np.array(sizes, np.float64).T
    return build.matmuls(Labels.constant(scheme, len(m)), batch=np.ones(len(m)), m=m, n=n, k=k)


def starts() -> dict[str, float]:
    return {each.name: each.start for each in ARRAYS.parameters}


def machine(name: str = "TPU-v4", scheme: str = "bf16") -> MachineRates:
    return machine_of(load_device(name), "matmul", scheme)


def times(ops: Operations, on: MachineRates, **values: float) -> list[float]:
    found: list[float] = form_time_ns(ARRAYS, starts() | values, ops, on).tolist()
    return found


def test_the_time_of_a_product_by_hand() -> None:
    # 64 blocks of 128 x 128 weights, by each of which 1,024 rows stream after 382 steps of filling.
    on = machine()
    free = {"t0_ns": 50.0, "compute": 0.5, "memory": 1e12, "store": 1e12, "pipeline_ns": 1e12}
    found = times(products((1024, 1024, 1024)), on, **free)
    assert found == pytest.approx([50 + 64 * (1024 + 382) * 2 * 128 * 128 / 275e3 / 0.5])
    # Without passes to speak of: operands of 2 bytes in whole tiles, 8 x 128, come and the result goes.
    free |= {"compute": 1e12, "memory": 0.5, "store": 0.25}
    found = times(products((17, 129, 100)), on, **free)
    loads, stores = 2 * (24 * 128 + 136 * 128) / 1228, 2 * 24 * 256 / 1228
    assert found == pytest.approx([50 + loads / 0.5 + stores / 0.25])


def test_long_products_load_beside_the_passes() -> None:
    on = machine()
    both = times(products((8192, 8192, 8192)), on, pipeline_ns=1e12)
    beside = times(products((8192, 8192, 8192)), on, pipeline_ns=1e4)
    assert beside[0] < both[0]
    short = products((256, 256, 256))
    assert times(short, on, pipeline_ns=1e4) == times(short, on, pipeline_ns=1e12)


@settings(max_examples=80)
@given(st.tuples(SIZE, SIZE, SIZE), st.integers(0, 2), st.integers(1, 300), st.sampled_from(TPUS))
def test_nothing_larger_takes_less(sizes: tuple[int, int, int], which: int, more: int, name: str) -> None:
    m, n, k = (float(size + more * (place == which)) for place, size in enumerate(sizes))
    small, large = times(products(sizes, (m, n, k)), machine(name))
    assert large >= small * (1 - 1e-12)


@settings(max_examples=80)
@given(SIZE, SIZE, SIZE, st.sampled_from(TPUS))
def test_within_one_tile_of_both_time_stands_still(m: int, n: int, k: int, name: str) -> None:
    on = machine(name)
    assert on.array is not None
    side = float(max(on.array.rows, on.array.columns))
    rows, columns, depth = padded(np.array([m, n, k], np.float64), side).tolist()
    aligned, ragged, asked = times(
        products((rows, columns, depth), (rows - 1, columns, depth), (m, n, k)), on
    )
    assert asked <= ragged == aligned


@settings(max_examples=80)
@given(SIZE, SIZE, SIZE, st.sampled_from(TPUS), st.sampled_from(("bf16", "i8", "f32")))
def test_no_time_is_below_that_of_the_passes(m: int, n: int, k: int, name: str, scheme: str) -> None:
    device, ops = load_device(name), products((m, n, k), scheme=scheme)
    found = times(ops, machine(name, scheme), compute=1.0)
    arithmetic = 2.0 * m * n * k / machine(name, scheme).flops_per_ns
    assert np.isnan(found[0]) or found[0] >= arithmetic
    assert np.isfinite(roof_ns(ops, device)).all()


def test_an_output_stationary_array_streams_the_depth() -> None:
    on = machine()
    assert on.array is not None
    keeps = replace(on, array=structs.replace(on.array, dataflow="os"))
    free = {"t0_ns": 50.0, "compute": 1.0, "memory": 1e12, "store": 1e12, "pipeline_ns": 1e12}
    found = times(products((256, 128, 4096)), keeps, **free)
    assert found == pytest.approx([50 + 2 * (4096 + 254) * 2 * 128 * 128 / 275e3])


def test_only_products_of_devices_with_arrays_take_the_form() -> None:
    gpu = machine_of(load_device("H100-SXM"), "matmul", "bf16")
    assert [form.name for form in forms_for("matmul", gpu)] == ["tiles"]
    assert [form.name for form in forms_for("matmul", machine())] == ["arrays"]
    assert [form.name for form in forms_for("vector", machine())] == ["streams"]
    assert FORMS["arrays"] is ARRAYS
    assert np.isnan(times(products((64, 64, 64)), gpu)).all()
