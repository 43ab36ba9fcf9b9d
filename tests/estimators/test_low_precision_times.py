"""Times of narrow products by hand: bytes over bandwidth, FLOPs over the rate of the operand pair."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hespas.estimators.rates import stored_bytes
from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics, GraphBuilder, OpClass, OpGraph, Severity, dtype
from hespas.hardware import Device, Peak, load_device

H100 = load_device("H100-SXM")


def product(size: tuple[int, int, int], lhs: str, rhs: str, result: str) -> OpGraph:
    """One M x N x K product without scales."""
    m, n, k = size
    b = GraphBuilder("product")
    types = [b.types.add(dtype(name), shape) for name, shape in ((lhs, (m, k)), (rhs, (k, n)))]
    out = b.types.add(dtype(result), (m, n))
    flops = 2.0 * m * n * k
    node = b.add_node(
        name_id=0, op_id=b.strings.add("dot_general"), op_class=OpClass.CONTRACTION, operands=types,
        results=[out], flops=flops, transcendentals=0, bytes_read=sum(map(b.types.bytes_of, types)),
        bytes_written=b.types.bytes_of(out),
    )  # fmt: skip
    b.set(node, rate_dtype=dtype(lhs).code)
    b.add_contraction(
        node, batch=1, m=m, n=n, k=k, flops=flops, useful_flops=flops, lhs=dtype(lhs).code,
        rhs=dtype(rhs).code, accumulator=dtype(result).code, products=1,
    )  # fmt: skip
    return b.build()


def time_ns(graph: OpGraph, device: Device = H100, found: Diagnostics | None = None) -> float:
    return float(Roofline().estimate(graph, device, found).duration_ns[0]) - device.launch_overhead_ns


@pytest.mark.parametrize(
    ("lhs", "rhs", "result", "tflops"),
    [
        ("i8", "i8", "i32", 1978.9),
        ("f8E4M3FN", "f8E5M2", "bf16", 1978.9),
        ("nvfp4", "nvfp4", "bf16", 1978.9),
        ("i8", "i2", "i32", 1978.9),
        ("bf16", "i4", "bf16", 989.4),
        ("f32", "i8", "f32", 494.7),
    ],
)
def test_large_products_run_at_the_rate_of_the_pair(lhs: str, rhs: str, result: str, tflops: float) -> None:
    size = 16384
    expected = 2 * size**3 / (tflops * 1e12) * 1e9
    assert time_ns(product((size, size, size), lhs, rhs, result)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "bits"), [("bf16", 16), ("i8", 8), ("i4", 4), ("i2", 2), ("mxfp4", 4.25), ("nvfp4", 4.5)]
)
def test_one_row_times_its_weights_takes_the_time_of_their_bytes(weights: str, bits: float) -> None:
    n, k = 8192, 8192
    moved = 2 * k + n * k * bits / 8 + 2 * n
    assert time_ns(product((1, n, k), "bf16", weights, "bf16")) == pytest.approx(moved / 3350e9 * 1e9)


def test_what_stands_in_for_a_rate_is_told_once() -> None:
    found = Diagnostics()
    time_ns(product((64, 64, 64), "bf16", "i4", "bf16"), found=found)
    (one,) = [each for each in found if each.code == "roofline.rate-fallback"]
    assert one.severity is Severity.WARNING
    assert one.message == "bf16 x i4 on matrix: rate of bf16"


@pytest.mark.parametrize("element", ["i8", "bf16", "f32", "f8E5M2"])
def test_listed_and_default_rates_are_not_told(element: str) -> None:
    found = Diagnostics()
    time_ns(product((64, 64, 64), element, element, "f32"), found=found)
    assert found.counts() == {}


def test_a_mixed_rate_of_the_device_file_is_used() -> None:
    row = Peak(
        unit="matrix", dtype="i8", rhs_dtype="i2", accumulator="i32", flops_per_s=4e15, density="dense",
        source="whitepaper",
    )  # fmt: skip
    device = replace(H100, peaks=(*H100.peaks, row))
    size = 16384
    assert time_ns(product((size, size, size), "i8", "i2", "i32"), device) == pytest.approx(
        2 * size**3 / 4e15 * 1e9
    )


def test_a_device_that_stores_a_byte_an_element_moves_more() -> None:
    """4-bit weights take twice their packed bytes, 16-bit ones what they took."""
    device = replace(H100, subbyte_storage="byte")
    narrow, wide = (product((1, 64, 64), "bf16", kind, "bf16") for kind in ("i4", "bf16"))
    assert stored_bytes(narrow, H100)[0] == 128 + 64 * 64 / 2 + 128
    assert stored_bytes(narrow, device)[0] == 128 + 64 * 64 + 128
    assert stored_bytes(wide, device)[0] == wide.bytes_moved[0]
