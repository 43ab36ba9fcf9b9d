"""Quantised and narrow operands by hand: bytes with their scales, FLOPs of rescaling, accumulators."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

import pytest

from hespas.costs.contraction import with_macs
from hespas.costs.operation import Cost, CustomAttributes, DotAttributes, Precision, Tensor
from hespas.graph import OpClass, dtype

Price = Callable[..., Cost]
M, K, N = 8, 64, 32
PRODUCT = 2.0 * M * K * N


def quantised(element: str, *shape: int, scales: int = 1, expressed: str = "f32") -> Tensor:
    """A tensor with ``scales`` 4-byte scales and as many zero points of its storage type."""
    stored = dtype(element)
    return Tensor(stored, shape, 4 * scales + stored.storage_bytes(scales), dtype(expressed))


def plain(element: str, *shape: int) -> Tensor:
    return Tensor(dtype(element), shape)


def matrix(precision: Precision = Precision()) -> DotAttributes:  # noqa: B008 (a value, not an object)
    return DotAttributes((), (), (1,), (0,), precision)


def test_both_quantised_multiply_what_is_stored_and_add_in_32_bits(price: Price) -> None:
    """i8 x i8 per axis -> i32: no rescaling; the scales of 32 columns are read."""
    cost = price(
        "dot_general",
        [quantised("i8", M, K), quantised("i8", K, N, scales=N)],
        [quantised("i32", M, N)],
        matrix(),
    )
    assert cost.flops == PRODUCT
    assert cost.bytes_read == (M * K + 5) + (K * N + N * 5)
    assert cost.bytes_written == M * N * 4 + 8
    (row,) = cost.contractions
    assert (row.lhs, row.rhs, row.accumulator) == tuple(dtype(name).code for name in ("i8", "i8", "i32"))


@pytest.mark.parametrize(("stored", "accumulator"), [("i4", "i32"), ("i8", "i32"), ("f8E4M3FN", "f32")])
def test_narrow_result_is_rescaled_from_a_wide_accumulator(
    price: Price, stored: str, accumulator: str
) -> None:
    tensors = [quantised(stored, M, K), quantised(stored, K, N)]
    cost = price("dot_general", tensors, [quantised(stored, M, N)], matrix())
    assert cost.flops == cost.useful_flops == PRODUCT + 2 * M * N
    (row,) = cost.contractions
    assert row.flops == PRODUCT
    assert row.accumulator == dtype(accumulator).code


@pytest.mark.parametrize(("stored", "weight_bytes"), [("i8", K * N), ("i4", K * N // 2), ("i2", K * N // 4)])
def test_hybrid_reads_narrow_weights_and_turns_them_into_floats(
    price: Price, stored: str, weight_bytes: int
) -> None:
    weights = quantised(stored, K, N)
    cost = price("dot_general", [plain("f32", M, K), weights], [plain("f32", M, N)], matrix())
    assert cost.flops == PRODUCT + 2 * K * N
    assert cost.bytes_read == M * K * 4 + weight_bytes + 4 + 1
    assert cost.rate_dtype == dtype("f32").code
    (row,) = cost.contractions
    assert (row.lhs, row.rhs) == (dtype("f32").code, dtype(stored).code)


def test_plain_integers_need_no_rescaling(price: Price) -> None:
    cost = price("dot_general", [plain("i8", M, K), plain("i2", K, N)], [plain("i32", M, N)], matrix())
    assert cost.flops == PRODUCT
    assert cost.bytes_read == M * K + K * N // 4


@pytest.mark.parametrize(
    ("bits", "accumulator"), [(8, "i8"), (12, "i16"), (24, "i32"), (48, "i64"), (99, "i64")]
)
def test_stated_accumulator_bits_are_kept_and_take_the_next_type(
    price: Price, bits: int, accumulator: str
) -> None:
    attributes = matrix(Precision(accumulator_bits=bits, mac_noise_sigma=0.5))
    tensors = [quantised("i4", M, K), quantised("i4", K, N)]
    (row,) = price("dot_general", tensors, [quantised("i4", M, N)], attributes).contractions
    assert row.accumulator == dtype(accumulator).code
    assert row.attributes == {"accumulator_bits": str(bits), "mac_noise_sigma": "0.5"}


def test_noise_costs_no_time(price: Price) -> None:
    tensors = [quantised("i4", M, K), quantised("i4", K, N)]
    silent, noisy = (
        price("dot_general", tensors, [quantised("i4", M, N)], matrix(Precision(mac_noise_sigma=sigma)))
        for sigma in (None, 2.0)
    )
    assert (silent.flops, silent.bytes_read) == (noisy.flops, noisy.bytes_read)


@pytest.mark.parametrize(
    ("operand", "result"),
    [
        (plain("f32", 64), quantised("i8", 64)),
        (quantised("i8", 64), plain("f32", 64)),
        (quantised("i32", 64), quantised("i8", 64)),
        (plain("f32", 64), quantised("i4", 64)),
    ],
)
def test_rescaling_runs_in_the_type_that_is_meant(price: Price, operand: Tensor, result: Tensor) -> None:
    name = "uniform_dequantize" if result.expressed is None else "uniform_quantize"
    cost = price(name, [operand], [result])
    assert (cost.op_class, cost.flops) == (OpClass.QUANTIZE, 128)
    assert cost.rate_dtype == dtype("f32").code
    assert (cost.bytes_read, cost.bytes_written) == (operand.bytes, result.bytes)


def test_block_scaled_product_reads_its_scales(price: Price) -> None:
    """MXFP4: 4 products of 16 x 256 by 256 x 32, one 8-bit scale per 32 elements of either operand."""
    operands = [
        plain("f4E2M1FN", 4, 16, 256),
        plain("f4E2M1FN", 4, 32, 256),
        plain("f8E8M0FNU", 4, 16, 8),
        plain("f8E8M0FNU", 4, 32, 8),
    ]
    cost = price(
        "custom_call", operands, [plain("f32", 4, 16, 32)], CustomAttributes("__op$block_scaled_dot")
    )
    assert cost.flops == 2 * 4 * 16 * 256 * 32
    assert cost.bytes_read == 4 * 16 * 256 / 2 * (4.25 / 4) + 4 * 32 * 256 / 2 * (4.25 / 4)
    (row,) = cost.contractions
    assert (row.batch, row.m, row.n, row.k) == (4, 16, 32, 256)
    assert row.lhs == row.rhs == dtype("f4E2M1FN").code


def test_block_scaled_product_without_scales_is_unknown(price: Price) -> None:
    x = plain("f4E2M1FN", 4, 4)
    assert isnan(price("custom_call", [x, x], [x], CustomAttributes("__op$block_scaled_dot")).flops)


@pytest.mark.parametrize(
    "stated",
    [
        {"accumulator_bits": "wide", "mac_noise_sigma": "some"},
        {"accumulator_bits": "12.5", "mac_noise_sigma": "-1"},
        {"accumulator_bits": "0", "mac_noise_sigma": "nan"},
        {"accumulator_bits": "1e99", "mac_noise_sigma": "inf"},
        {},
    ],
)
def test_attributes_that_are_no_sensible_number_say_nothing(stated: dict[str, str]) -> None:
    assert with_macs(Precision(), stated) == Precision()


def test_attributes_are_read() -> None:
    found = with_macs(Precision(), {"accumulator_bits": "12", "mac_noise_sigma": "0.25"})
    assert (found.accumulator_bits, found.mac_noise_sigma) == (12, 0.25)
