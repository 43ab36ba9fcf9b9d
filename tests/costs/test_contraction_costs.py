"""Matrix products by hand: names of algorithms, dimension numbers, unknown extents, narrow accumulators."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, nan

import pytest

from hespas.costs.contraction import config_precision, named_algorithm, valid_positions, with_macs
from hespas.costs.operation import (
    ConvAttributes,
    Cost,
    DotAttributes,
    EinsumAttributes,
    Precision,
    RaggedDotAttributes,
    Tensor,
    WindowDim,
)
from hespas.graph import OpClass, dtype

Price = Callable[..., Cost]
BF16, F32 = dtype("bf16"), dtype("f32")


def tensor(*shape: int, element: str = "f32") -> Tensor:
    return Tensor(dtype(element), shape)


def quantised(element: str, *shape: int) -> Tensor:
    return Tensor(dtype(element), shape, 0, F32)


def extents(cost: Cost) -> tuple[int, int, int, int]:
    (product,) = cost.contractions
    return product.batch, product.m, product.n, product.k


# --- precision


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("dot_bf16_bf16_f32", Precision(BF16, BF16, F32, 1, "ALGORITHM")),
        ("dot_bf16_bf16_f32_x12", Precision(BF16, BF16, F32, 12, "ALGORITHM")),
        ("dot_bf16_f32_f32_x3", Precision(BF16, F32, F32, 3, "ALGORITHM")),
        ("dot_bf16_bf16_f32_y3", Precision(products=1, level="ALGORITHM")),
        ("dot_bf16_bf16_f32_xa", Precision(products=1, level="ALGORITHM")),
        ("dot_bf16_bf16_x3", Precision(products=3, level="ALGORITHM")),
        ("dot_bf16_bf16_unknown", Precision(products=1, level="ALGORITHM")),
        ("x6", Precision(products=6, level="ALGORITHM")),
        ("", Precision(products=1, level="ALGORITHM")),
    ],
)
def test_names_of_algorithms(name: str, precision: Precision) -> None:
    assert named_algorithm(name) == precision


def test_the_most_exact_level_counts() -> None:
    assert config_precision(()) == Precision(level="DEFAULT")
    assert config_precision(("HIGHEST", "high")) == config_precision(("default", "highest"))
    assert config_precision(("default", "other")).level == "DEFAULT"


@pytest.mark.parametrize(
    ("lhs", "rhs", "level", "products"),
    [
        ("f32", "f32", "HIGH", 3),
        ("f32", "f32", "HIGHEST", 6),
        ("f32", "f32", "DEFAULT", 1),
        ("bf16", "f32", "HIGHEST", 1),
        ("f32", "bf16", "HIGHEST", 1),
    ],
)
def test_only_f32_is_emulated(price: Price, lhs: str, rhs: str, level: str, products: int) -> None:
    attributes = DotAttributes((), (), (1,), (0,), config_precision((level,)))
    cost = price("dot", [tensor(4, 8, element=lhs), tensor(8, 2, element=rhs)], [tensor(4, 2)], attributes)
    assert cost.contractions[0].products == products


@pytest.mark.parametrize(("bits", "kept"), [("1", 1), ("65536", 65536), ("65537", -1), ("0", -1), ("-8", -1)])
def test_bits_of_accumulators(bits: str, kept: int) -> None:
    assert with_macs(Precision(), {"accumulator_bits": bits}).accumulator_bits == kept


@pytest.mark.parametrize(
    ("lhs", "rhs", "rate"),
    [
        ("f8E4M3FN", "bf16", "bf16"),
        ("bf16", "f8E4M3FN", "bf16"),
        ("bf16", "f16", "bf16"),
        ("f16", "bf16", "f16"),
    ],
)
def test_the_wider_operand_sets_the_rate(price: Price, lhs: str, rhs: str, rate: str) -> None:
    cost = price("dot", [tensor(4, 8, element=lhs), tensor(8, 2, element=rhs)], [tensor(4, 2)])
    assert cost.rate_dtype == dtype(rate).code


def test_unknown_types(price: Price) -> None:
    cost = price("dot", [Tensor(None, (4, 8)), tensor(8, 2)], [Tensor(None, (4, 2))])
    (product,) = cost.contractions
    assert (product.lhs, product.rhs, product.accumulator) == (-1, F32.code, -1)
    assert cost.rate_dtype == -1


def test_a_sigma_of_zero_is_a_sigma() -> None:
    assert with_macs(Precision(), {"mac_noise_sigma": "0"}).mac_noise_sigma == 0


@pytest.mark.parametrize(
    ("element", "bits", "accumulator"),
    [
        ("f8E4M3FN", 8, "f16"),
        ("f8E4M3FN", 16, "f16"),
        ("f8E4M3FN", 17, "f32"),
        ("f8E4M3FN", 99, "f64"),
        ("i8", 8, "i8"),
    ],
)
def test_the_smallest_accumulator_with_the_bits(
    price: Price, element: str, bits: int, accumulator: str
) -> None:
    attributes = DotAttributes((), (), (1,), (0,), Precision(accumulator_bits=bits))
    operands = [tensor(4, 8, element=element), tensor(8, 2, element=element)]
    (product,) = price("dot", operands, [tensor(4, 2)], attributes).contractions
    assert product.accumulator == dtype(accumulator).code


@pytest.mark.parametrize(
    ("types", "accumulator", "rescaling"),
    [
        ((quantised("i8", 4, 8), quantised("i8", 8, 2), quantised("i8", 4, 2)), "i32", 2 * 8),
        ((quantised("i8", 4, 8), quantised("i8", 8, 2), quantised("i32", 4, 2)), "i32", 0),
        ((quantised("i8", 4, 8), quantised("i8", 8, 2), quantised("i64", 4, 2)), "i64", 0),
        ((quantised("i8", 4, 8), quantised("i8", 8, 2), tensor(4, 2, element="bf16")), "i32", 0),
        ((tensor(4, 8), quantised("i8", 8, 2), tensor(4, 2, element="bf16")), "bf16", 2 * 16),
        ((quantised("i8", 4, 8), tensor(8, 2), quantised("i8", 4, 2)), "i8", 0),
        ((quantised("i8", 4, 8), quantised("f8E4M3FN", 8, 2), quantised("i8", 4, 2)), "f32", 2 * 8),
    ],
)
def test_rescaling_of_quantised_operands(
    price: Price, types: tuple[Tensor, Tensor, Tensor], accumulator: str, rescaling: int
) -> None:
    """Both quantised: 32 bits, and two FLOPs per element of a narrower result. Weights alone: two each."""
    lhs, rhs, result = types
    cost = price("dot", [lhs, rhs], [result])
    assert cost.flops == cost.useful_flops == 2 * 4 * 2 * 8 + rescaling
    assert cost.contractions[0].accumulator == dtype(accumulator).code


# --- dimension numbers


def test_extents_of_each_part(price: Price) -> None:
    """b=3 and c=2 are shared, m=5 x 7, n=11, k=13 x 17."""
    lhs, rhs = tensor(3, 5, 13, 2, 7, 17), tensor(17, 11, 2, 3, 13)
    attributes = DotAttributes((0, 3), (3, 2), (2, 5), (4, 0))
    cost = price("dot_general", [lhs, rhs], [tensor(3, 2, 5, 7, 11)], attributes)
    assert extents(cost) == (6, 35, 11, 221)
    assert cost.flops == cost.useful_flops == 2 * 6 * 35 * 11 * 221


def test_an_extent_that_one_operand_knows(price: Price) -> None:
    attributes = DotAttributes((0,), (0,), (2,), (1,))
    for lhs, rhs in ((tensor(-1, 5, 7), tensor(3, -1, 11)), (tensor(3, 5, -1), tensor(-1, 7, 11))):
        cost = price("dot_general", [lhs, rhs], [tensor(3, 5, 11)], attributes)
        assert extents(cost) == (3, 5, 11, 7)
    unknown = price("dot_general", [tensor(3, -1, 7), tensor(3, 7, 11)], [tensor(3, -1, 11)], attributes)
    assert extents(unknown) == (3, -1, 11, 7)
    assert isnan(unknown.flops)
    empty = price("dot_general", [tensor(3, 0, 7), tensor(3, 7, 11)], [tensor(3, 0, 11)], attributes)
    assert empty.flops == 0


@pytest.mark.parametrize(
    "attributes",
    [
        DotAttributes((), (), (2,), (0,)),
        DotAttributes((), (), (1,), (2,)),
        DotAttributes((), (), (-1,), (0,)),
        DotAttributes((0,), (0,), (0,), (1,)),
        DotAttributes((0,), (), (1,), (0,)),
        DotAttributes((), (), (0, 1), (0,)),
    ],
)
def test_dimension_numbers_that_do_not_fit(price: Price, attributes: DotAttributes) -> None:
    cost = price("dot_general", [tensor(4, 8), tensor(8, 2)], [tensor(4, 2)], attributes)
    assert isnan(cost.flops)
    assert cost.op_class is OpClass.CONTRACTION


def test_products_without_dimension_numbers(price: Price) -> None:
    """The last dimension of the first operand and the first of the second are contracted."""
    assert extents(price("dot", [tensor(4, 8), tensor(8, 2)], [tensor(4, 2)])) == (1, 4, 2, 8)
    assert extents(price("dot", [tensor(8), tensor(8)], [tensor()])) == (1, 1, 1, 8)
    assert isnan(price("dot", [tensor(), tensor()], [tensor()]).flops)


# --- grouped products and einsums


@pytest.mark.parametrize(
    ("shapes", "dot", "ragged", "expected"),
    [
        (((48, 16), (3, 16, 24), (3,)), DotAttributes((), (), (1,), (1,)), 0, (1, 48, 24, 16)),
        (((48, 16), (48, 24), (3,)), DotAttributes((), (), (0,), (0,)), 0, (1, 16, 24, 48)),
        (((5, 48, 16), (5, 48, 24), (5, 3)), DotAttributes((0,), (0,), (1,), (1,)), 1, (5, 16, 24, 48)),
        (((48, 16), (3, 16, -1), (3,)), DotAttributes((), (), (1,), (1,)), 0, (1, 48, -1, 16)),
        (((48, 16), (-1, 16, 24), (-1,)), DotAttributes((), (), (1,), (1,)), 0, (1, 48, -1, 16)),
        (((48, 16), (3, 16, 24), (0,)), DotAttributes((), (), (1,), (1,)), 0, (1, 48, -1, 16)),
    ],
)
def test_grouped_products(
    price: Price,
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    dot: DotAttributes,
    ragged: int,
    expected: tuple[int, ...],
) -> None:
    lhs, rhs, groups = shapes
    operands = [tensor(*lhs), tensor(*rhs), tensor(*groups, element="i64")]
    cost = price("ragged_dot", operands, [tensor(1)], RaggedDotAttributes(dot, ragged))
    assert extents(cost) == expected


def test_grouped_products_without_sizes(price: Price) -> None:
    attributes = RaggedDotAttributes(DotAttributes((), (), (1,), (1,)), 0)
    assert isnan(price("ragged_dot", [tensor(48, 16), tensor(3, 16, 24)], [tensor(48, 24)], attributes).flops)
    assert isnan(price("ragged_dot", [tensor(48, 16), tensor(3, 16, 24)], [tensor(48, 24)]).flops)


@pytest.mark.parametrize(
    ("equation", "lhs", "rhs", "expected"),
    [
        ("bmk, bkn -> bmn", (3, 5, 7), (3, 7, 11), (3, 5, 11, 7)),
        ("mk,nk->mn", (5, 7), (11, 7), (1, 5, 11, 7)),
        ("abk,kcd->abcd", (2, 3, 7), (7, 5, 11), (1, 6, 55, 7)),
    ],
)
def test_labels_of_an_einsum(
    price: Price, equation: str, lhs: tuple[int, ...], rhs: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    cost = price("einsum", [tensor(*lhs), tensor(*rhs)], [tensor(1)], EinsumAttributes(equation))
    assert extents(cost) == expected


@pytest.mark.parametrize("equation", ["mk,kn", "...k,kn->...n", "mk->m", "mk,kn,nj->mj"])
def test_equations_that_are_not_supported(price: Price, equation: str) -> None:
    cost = price("einsum", [tensor(5, 7), tensor(7, 11)], [tensor(5, 11)], EinsumAttributes(equation))
    assert isnan(cost.flops)


def test_a_sum_has_one_step_less_than_elements(price: Price) -> None:
    cost = price("unary_einsum", [tensor(4, 8)], [tensor(4, 8)], EinsumAttributes("ij->ij"))
    assert cost.flops == 0
    assert cost.rate_dtype == F32.code


# --- convolutions


@pytest.mark.parametrize(
    ("extent", "output", "size", "expected"),
    [
        (0, 4, 3, 0.0),
        (4, 0, 3, 0.0),
        (4, 4, 0, 0.0),
        (-1, 4, 3, nan),
        (4, -1, 3, nan),
        (4, 4, -1, nan),
        (1 << 23, 1 << 22, 1 << 22, float((1 << 22) ** 2)),
        (1 << 24, (1 << 22) + 1, (1 << 22) + 1, nan),
    ],
)
def test_positions_at_the_borders(extent: int, output: int, size: int, expected: float) -> None:
    """Counting is bounded by the shorter of output and window."""
    assert valid_positions(extent, output, WindowDim(size)) == pytest.approx(expected, nan_ok=True)


def conv(
    source: tuple[int, ...], kernel: tuple[int, ...], output: tuple[int, ...], price: Price, groups: int = 1
) -> Cost:
    """Convolution of one spatial dimension, channels last, without padding."""
    window = (WindowDim(kernel[0]),)
    attributes = ConvAttributes(0, 2, (1,), 1, 2, (0,), 0, 2, (1,), window, groups, 1)
    return price("convolution", [tensor(*source), tensor(*kernel)], [tensor(*output)], attributes)


def test_extents_of_a_convolution(price: Price) -> None:
    """5 images of 6 positions; 4 filters in 2 groups; 3 taps of 7 channels."""
    cost = conv((5, 8, 14), (3, 7, 4), (5, 6, 4), price, groups=2)
    assert extents(cost) == (2, 30, 2, 21)
    assert cost.flops == cost.useful_flops == 2 * 30 * 4 * 21


def test_unknown_extents_of_a_convolution(price: Price) -> None:
    for source, kernel, output in (
        ((-1, 8, 7), (3, 7, 4), (-1, 6, 4)),
        ((5, 8, -1), (3, -1, 4), (5, 6, 4)),
        ((5, 8, 7), (3, 7, -1), (5, 6, -1)),
    ):
        cost = conv(source, kernel, output, price)
        assert isnan(cost.flops)
        assert isnan(cost.useful_flops)
    assert extents(conv((5, 8, 7), (3, 7, -1), (5, 6, -1), price)) == (1, 30, -1, 21)
    window = (WindowDim(3),)
    attributes = ConvAttributes(0, 2, (1,), 1, 2, (0,), 0, 2, (1,), window, 1, 1)
    assert isnan(price("convolution", [tensor(5, 8, 7)], [tensor(5, 6, 4)], attributes).flops)


def test_a_convolution_that_is_a_batch_of_products(price: Price) -> None:
    """TPU compilers write 8 products (5, 7) x (7, 4) as a window of 8 with stride 7 over an input dilated by
    8: output o meets the input at o through kernel position o alone.
    """
    window = (WindowDim(8, stride=7, lhs_dilation=8),)
    attributes = ConvAttributes(0, 2, (1,), 1, 2, (0,), 0, 2, (1,), window, 1, 1)
    cost = price("convolution", [tensor(5, 8, 7), tensor(8, 7, 4)], [tensor(5, 8, 4)], attributes)
    assert extents(cost) == (8, 5, 4, 7)
    assert cost.useful_flops == 2 * 8 * 5 * 4 * 7
    assert cost.flops == 8 * cost.useful_flops
