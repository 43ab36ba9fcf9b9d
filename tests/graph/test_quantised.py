"""Quantised types as text and values, and accumulators of integer products."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph import ACCUMULATOR_BITS, GraphBuilder, OpClass, OpGraph, dtype
from hespas.graph.opgraph import ContractionTable
from hespas.graph.quantised import QuantisedType, accumulator_sums, parse_quantised
from tests.quantised_types import quantised_types


@given(quantised_types())
def test_a_type_equals_the_type_of_its_text(kind: QuantisedType) -> None:
    assert parse_quantised(str(kind)) == kind
    assert parse_quantised(f"{kind} #layout<1, 0>") == kind, "another encoding may follow"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "!quant.uniform<i8<-127:127>:f32:1, {1.000000e-01:3,2.000000e-01}>",
            QuantisedType("uniform", "i8", "f32", -127, 127, (1,), (1,), (2,), (0.1, 0.2), (3, 0)),
        ),
        (
            "!quant.uniform<u4:bf16:{0:2, 2:8}, {{{1.0, 2.0}}, {{3.0:8, 4.0}}}>",
            QuantisedType(
                "uniform", "u4", "bf16", 0, 15, (0, 2), (2, 8), (2, 1, 2), (1.0, 2.0, 3.0, 4.0), (0, 0, 8, 0)
            ),
        ),
        (
            "!quant.uniform<i2<-1:1>:f32, 5.000000e-01>",
            QuantisedType("uniform", "i2", "f32", -1, 1, scales=(0.5,), zero_points=(0,)),
        ),
        ("!quant.any<i8<-16:7>>", QuantisedType("any", "i8", "", -16, 7)),
        (
            "!quant.calibrated<f32<-0.998:1.232100e+00>>",
            QuantisedType("calibrated", "", "f32", -0.998, 1.2321),
        ),
    ],
)
def test_texts_of_mlir(text: str, expected: QuantisedType) -> None:
    assert parse_quantised(text) == expected


@pytest.mark.parametrize(
    "text", ["", "f32", "1,0", "!quant.uniform<", "!quant.uniform<i8:f32, >", "!quant.x<i8>"]
)
def test_other_texts_are_not_quantised_types(text: str) -> None:
    assert parse_quantised(text) is None


def test_shapes_that_fit_the_scales() -> None:
    per_axis = parse_quantised("!quant.uniform<i8:f32:1, {0.5,0.25}>")
    blocks = parse_quantised("!quant.uniform<i8:f32:{0:4, 1:1}, {{0.5, 0.25}, {1.0, 2.0}}>")
    assert per_axis is not None
    assert blocks is not None
    assert [per_axis.fits(shape) for shape in ((9, 2), (9, -1), (2, 9), (2,))] == [True, True, False, False]
    assert [blocks.fits(shape) for shape in ((8, 2), (2, 2), (8, 4))] == [True, False, False]
    assert not per_axis.is_blockwise
    assert blocks.is_blockwise


def matmul(
    lhs: str,
    rhs: str,
    depth: int,
    *,
    accumulator: str = "i32",
    bits: str = "",
    types: tuple[str, str] = ("", ""),
) -> OpGraph:
    """One product of a row of ``depth`` and a column, with the encodings ``types``."""
    builder = GraphBuilder("product")
    shapes = ((1, depth), (depth, 1))
    rows = [
        builder.types.add(dtype(name), shape, encoding=builder.strings.add(text))
        for name, shape, text in zip((lhs, rhs), shapes, types, strict=True)
    ]
    node = builder.add_node(
        name_id=builder.strings.add("product"),
        op_id=builder.strings.add("stablehlo.dot_general"),
        op_class=OpClass.CONTRACTION,
        operands=rows,
    )
    if bits:
        builder.add_extra(node, ACCUMULATOR_BITS, 0, bits.encode())
    codes = [dtype(name).code for name in (lhs, rhs, accumulator)]
    table = ContractionTable.from_rows([(node, 1, 1, 1, depth, 2.0 * depth, 2.0 * depth, *codes, 1, 1)])
    return replace(builder.build(), contractions=table)


TERNARY = "!quant.uniform<i2<-1:1>:f32, 5.0e-01>"


@pytest.mark.parametrize(
    ("depth", "bits", "fits", "needed", "safe"),
    [
        (127, "8", True, 8, 127),
        (128, "8", False, 9, 127),
        (4608, "16", True, 14, 4608),
        (32768, "16", False, 17, 32767),
        (32768, "", True, 17, 32768),
    ],
)
def test_ternary_sums_need_one_bit_more_than_their_depth(
    depth: int, bits: str, fits: bool, needed: int, safe: int
) -> None:
    (found,) = accumulator_sums(matmul("i2", "i2", depth, bits=bits, types=(TERNARY, TERNARY)))
    assert (found.low, found.high) == (-depth, depth)
    assert (found.fits, found.bits_needed, found.safe_depth) == (fits, needed, safe)


def test_zero_points_widen_the_range_of_a_factor() -> None:
    shifted = "!quant.uniform<i8:f32:1, {0.5:-128,0.25:4}>"
    (found,) = accumulator_sums(
        matmul("i8", "i8", 4, types=(shifted, "!quant.uniform<i8<-127:127>:f32, 0.5>"))
    )
    assert (found.lhs, found.rhs) == ((-132, 255), (-127, 127))
    assert (found.low, found.high, found.bits) == (-4 * 255 * 127, 4 * 255 * 127, 32)


def test_wide_and_float_products_are_left_out() -> None:
    assert accumulator_sums(matmul("i32", "i32", 1000)) == []
    assert accumulator_sums(matmul("f32", "i8", 1000, accumulator="f32")) == []
    assert accumulator_sums(matmul("i8", "i8", 1000, accumulator="f32")) == []
    (plain,) = accumulator_sums(matmul("i8", "ui8", 1000, accumulator="i16"))
    assert not plain.fits
    (same,) = accumulator_sums(matmul("ui4", "ui4", 4, accumulator="ui8"))
    assert not same.is_signed
    assert not same.fits
    assert (same.bits_needed, same.safe_depth) == (10, 1)


@given(
    st.tuples(st.integers(-8, 7), st.integers(-8, 7)).map(sorted),
    st.tuples(st.integers(-4, 3), st.integers(-4, 3)).map(sorted),
    st.integers(-3, 3),
    st.integers(1, 3),
    st.integers(2, 10),
)
def test_bounds_are_the_extremes_of_all_sums(
    left: list[int], right: list[int], point: int, depth: int, bits: int
) -> None:
    """By trying all numbers: some sum reaches each bound, and none is beyond it."""
    if left[0] == left[1] or right[0] == right[1]:
        return
    texts = [
        f"!quant.uniform<i4<{left[0]}:{left[1]}>:f32, 1.0{f':{point}' if point else ''}>",
        f"!quant.uniform<i3<{right[0]}:{right[1]}>:f32, 1.0>",
    ]
    (found,) = accumulator_sums(matmul("i4", "i3", depth, bits=str(bits), types=(texts[0], texts[1])))
    products = [
        (a - point) * b for a, b in product(range(left[0], left[1] + 1), range(right[0], right[1] + 1))
    ]
    assert (found.low, found.high) == (depth * min(products), depth * max(products))
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert found.fits == (low <= found.low and found.high <= high)
    least, most = min(products), max(products)
    fitting = [k for k in range(depth + 1) if low <= k * least and k * most <= high]
    assert found.safe_depth == max(fitting)
    widths = [
        width for width in range(1, 40) if -(2 ** (width - 1)) <= found.low <= found.high < 2 ** (width - 1)
    ]
    assert found.bits_needed == widths[0]


def test_floats_have_no_range_unless_it_is_stated() -> None:
    kind = parse_quantised("!quant.uniform<f8E4M3FN:f32, 1.0>")
    assert kind is not None
    assert isnan(kind.low)


@pytest.mark.parametrize(
    "text",
    [
        "!quant.uniform<i8:f32:{0:a}, {{1.0}}>",
        "!quant.uniform<i8:f32, 0.1:" + "9" * 5000 + ">",
        "!quant.uniform<i8:f32:" + "9" * 5000 + ", {0.1}>",
        "!quant.uniform<i8<-127:1e400>:f32, 0.1>",
        "!quant.uniform<i8<a:b>:f32, 0.1>",
        "!quant.uniform<i8<5:-5>:f32, 0.1>",
        "!quant.uniform<i8<-129:5>:f32, 0.1>",
        "!quant.uniform<i8<-1.5:5>:f32, 0.1>",
        "!quant.uniform<i0:f32, 0.1>",
        "!quant.uniform<i99999:f32, 0.1>",
        "!quant.uniform<i4000000000:f32, 0.1>",
        "!quant.any<i4000000000>",
        "!quant.any<i8",
        "!quant.calibrated<f32<nan:1.0>>",
        "!quant.calibrated<f32<-inf:1.0>>",
        "!quant.calibrated<f32<2.0:1.0>>",
        *(f"!quant.uniform<i8:f32, {scale}>" for scale in ("nan", "inf", "-0.5", "0.0", "1_0.0", "0.5:x")),
        "!quant.uniform<i8:f32, 0.5",
        "!quant.uniform<i8:f32, 0.5,0.25>",
        "!quant.uniform<i8:f32:1, {0.5,}>",
        "!quant.uniform<i8:f32:1, {0.5:,0.25:1}>",
        "!quant.uniform<i8:f32:1, 0.5>",
        "!quant.uniform<i8:f32:{0:0, 1:2}, {{1.0}}>",
        "!quant.uniform<i8:f32:{0:1, 0:2}, {{1.0}}>",
        "!quant.uniform<i8:f32:{0:1, 1:2}, {{1.0,2.0},{3.0}}>",
        "!quant.uniform<i8:f32:{0:1, 1:2}, {{1.0,2.0},3.0,4.0}>",
        "!quant.uniform<i8:f32:{0:1, 1:2}, 1.0{{,2.0}}>",
        "!quant.uniform<i8:f32:{0:1, 1:2}, {{1.0e+300,2.0}}>",
        "!quant.uniform<i8:f32:0, " + "{" * 10_000 + ">",
    ],
)
@pytest.mark.filterwarnings("error")
def test_types_that_mlir_refuses_are_not_decoded(text: str) -> None:
    assert parse_quantised(text) is None


def test_blocks_of_some_dimensions_have_an_extent_for_each_dimension() -> None:
    kind = parse_quantised("!quant.uniform<i8:f32:{0:2, 2:8}, {{{1.0, 2.0}}, {{3.0, 4.0}}}>")
    assert kind is not None
    assert kind.grid == (2, 1, 2)
    assert [kind.fits(shape) for shape in ((4, 5, 16), (2, 5, 16), (4, 16))] == [True, False, False]


def test_many_scales_are_decoded() -> None:
    count = 20_000
    kind = parse_quantised(f"!quant.uniform<i8:f32:0, {{{','.join(['1.0e-01:3', '2.0'] * count)}}}>")
    assert kind is not None
    assert kind.grid == (2 * count,)
    assert kind.scales == (0.1, 2.0) * count
    assert kind.zero_points == (3, 0) * count
