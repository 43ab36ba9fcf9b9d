"""Matrix products, convolutions and attention of PyTorch, by hand; rows of real H100 and MI300X traces."""

from __future__ import annotations

import json
from math import isnan

import pytest

from hespas.costs.aten import aten_cost
from hespas.costs.aten.call import AtenCost
from hespas.graph import OpClass, dtype

BF16, F32 = "c10::BFloat16", "float"


def price(
    name: str, shapes: object, types: list[str], *, strides: object = None, values: list[str] | None = None
) -> AtenCost:
    return aten_cost(
        name,
        json.dumps(shapes),
        json.dumps(types),
        strides="" if strides is None else json.dumps(strides),
        values="" if values is None else json.dumps(values),
    )


def extents(found: AtenCost) -> list[tuple[int, int, int, int]]:
    return [(row.batch, row.m, row.n, row.k) for row in found.cost.contractions]


def test_mm_of_qwen_on_h100() -> None:
    # h100_qwen: [[8944,1024],[1024,2816]], the second transposed: strides [[1024,1],[1,1024]]
    found = price("aten::mm", [[8944, 1024], [1024, 2816]], [BF16, BF16], strides=[[1024, 1], [1, 1024]])
    assert found.cost.flops == 2 * 8944 * 2816 * 1024
    assert found.cost.bytes_read == 2 * (8944 * 1024 + 1024 * 2816)
    assert found.cost.bytes_written == 2 * 8944 * 2816
    assert extents(found) == [(1, 8944, 2816, 1024)]
    assert found.cost.contractions[0].lhs == found.cost.rate_dtype == dtype("bf16").code
    assert (found.results[0].shape, found.results[0].dtype) == ((8944, 2816), dtype("bf16"))


def test_addmm_of_timesformer_on_h100() -> None:
    # bias [2304] with beta 1, alpha 1: one addition for each result element
    found = price(
        "aten::addmm", [[2304], [25088, 768], [768, 2304], [], []], [BF16, BF16, BF16, "Scalar", "Scalar"],
        strides=[[1], [768, 1], [1, 768], [], []], values=["", "", "", "1", "1"],
    )  # fmt: skip
    assert found.cost.flops == 2 * 25088 * 2304 * 768 + 25088 * 2304
    assert found.cost.contractions[0].flops == 2 * 25088 * 2304 * 768
    assert found.cost.bytes_read == 2 * (2304 + 25088 * 768 + 768 * 2304)
    assert found.cost.bytes_written == 2 * 25088 * 2304


def test_a_bias_that_is_multiplied_by_zero_is_not_read() -> None:
    found = price(
        "aten::addmm", [[4], [8, 16], [16, 4], [], []], [F32, F32, F32, "Scalar", "Scalar"],
        values=["", "", "", "0", "2"],
    )  # fmt: skip
    assert found.cost.bytes_read == 4 * (8 * 16 + 16 * 4)
    assert found.cost.flops == 2 * 8 * 16 * 4 + 8 * 4  # alpha alone


def test_an_expanded_bias_is_read_once() -> None:
    found = price(
        "aten::addmm", [[8, 4], [8, 16], [16, 4], [], []], [F32, F32, F32, "Scalar", "Scalar"],
        strides=[[0, 1], [16, 1], [4, 1], [], []], values=["", "", "", "1", "1"],
    )  # fmt: skip
    assert found.cost.bytes_read == 4 * (4 + 8 * 16 + 16 * 4)


def test_bmm_of_timesformer_on_mi300x() -> None:
    # [[96,3137,64],[96,64,3137]], strides [[200768,64,1],[200768,3137,1]]
    found = price(
        "aten::bmm", [[96, 3137, 64], [96, 64, 3137]], [BF16, BF16],
        strides=[[200768, 64, 1], [200768, 3137, 1]],
    )  # fmt: skip
    assert found.cost.flops == 2 * 96 * 3137 * 3137 * 64
    assert found.cost.bytes_read == 2 * 2 * 96 * 3137 * 64
    assert found.cost.bytes_written == 2 * 96 * 3137 * 3137
    assert extents(found) == [(96, 3137, 3137, 64)]


def test_bmm_of_an_outer_product_in_single_precision() -> None:
    # qwen, rotary angles: [[1,32,1],[1,1,559]] float
    found = price("aten::bmm", [[1, 32, 1], [1, 1, 559]], [F32, F32], strides=[[32, 1, 1], [559, 559, 1]])
    assert (found.cost.flops, found.cost.bytes_read, found.cost.bytes_written) == (
        2 * 32 * 559,
        4 * (32 + 559),
        4 * 32 * 559,
    )


def test_linear_and_matmul_where_their_parts_are_not_recorded() -> None:
    linear = price("aten::linear", [[16, 559, 1024], [2816, 1024], [2816]], [BF16] * 3)
    assert linear.cost.flops == 2 * 16 * 559 * 2816 * 1024 + 16 * 559 * 2816
    assert linear.results[0].shape == (16, 559, 2816)
    matmul = price("aten::matmul", [[5, 1, 3, 4], [6, 4, 7]], [F32, F32])
    assert matmul.results[0].shape == (5, 6, 3, 7)
    assert extents(matmul) == [(30, 3, 7, 4)]
    assert price("aten::matmul", [[3, 4], [4]], [F32, F32]).results[0].shape == (3,)
    assert isnan(price("aten::mm", [[3, 4], [5, 6]], [F32, F32]).cost.flops)


PATCHES = [[128, 3, 224, 224], [768, 3, 16, 16]]


def test_convolution_of_timesformer_on_h100() -> None:
    # cudnn_convolution has padding before stride: values "[0,0]", "[16,16]", "[1,1]", "1"
    found = price(
        "aten::cudnn_convolution", [*PATCHES, [], [], [], [], [], [], []],
        [BF16, BF16, "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", "Scalar", "Scalar"],
        strides=[[150528, 50176, 224, 1], [768, 256, 16, 1], [], [], [], [], [], [], []],
        values=["", "", "[0,0]", "[16,16]", "[1,1]", "1", "False", "False", "True"],
    )  # fmt: skip
    assert found.results[0].shape == (128, 768, 14, 14)
    assert found.cost.flops == found.cost.useful_flops == 2 * 128 * 768 * 14 * 14 * 3 * 16 * 16
    assert found.cost.bytes_read == 2 * (128 * 3 * 224 * 224 + 768 * 3 * 16 * 16)
    assert found.cost.bytes_written == 2 * 128 * 768 * 14 * 14
    assert extents(found) == [(1, 128 * 14 * 14, 768, 3 * 16 * 16)]


def test_convolution_of_timesformer_on_mi300x_adds_its_bias() -> None:
    found = price(
        "aten::miopen_convolution", [*PATCHES, [768], [], [], [], [], [], []],
        [BF16, BF16, BF16, "ScalarList", "ScalarList", "ScalarList", "Scalar", "Scalar", "Scalar"],
        values=["", "", "", "[0,0]", "[16,16]", "[1,1]", "1", "False", "False"],
    )  # fmt: skip
    assert found.cost.flops == 2 * 128 * 768 * 14 * 14 * 3 * 16 * 16 + 128 * 768 * 14 * 14
    assert found.cost.bytes_read == 2 * (128 * 3 * 224 * 224 + 768 * 3 * 16 * 16 + 768)


CONVOLUTION = ["ScalarList", "ScalarList", "ScalarList", "Scalar", "ScalarList", "Scalar"]


def convolve(source: list[int], kernel: list[int], *values: str) -> AtenCost:
    return price(
        "aten::convolution", [source, kernel, [], [], [], [], [], [], []], [F32, F32, "", *CONVOLUTION],
        values=["", "", "", *values],
    )  # fmt: skip


def test_padding_stride_dilation_and_groups() -> None:
    found = convolve([2, 8, 5, 5], [16, 2, 3, 3], "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "4")
    assert found.results[0].shape == (2, 16, 3, 3)
    assert found.cost.flops == 2 * (2 * 16 * 3 * 3) * (2 * 3 * 3)
    # Along a side, windows at -1, 1 and 3 of 5 positions meet 2, 3 and 2 stored ones.
    assert found.cost.useful_flops == 2 * 2 * 16 * 2 * (2 + 3 + 2) ** 2
    assert extents(found) == [(4, 2 * 3 * 3, 4, 2 * 3 * 3)]
    dilated = convolve([1, 1, 9], [1, 1, 3], "[1]", "[0]", "[2]", "False", "[0]", "1")
    assert dilated.results[0].shape == (1, 1, 5)


def test_a_transposed_convolution_multiplies_as_often_as_its_mirror_image() -> None:
    # 4 -> (4 - 1) * 2 - 2 * 1 + 3 + 1 = 8 along a side
    found = convolve([1, 6, 4, 4], [6, 5, 3, 3], "[2, 2]", "[1, 1]", "[1, 1]", "True", "[1, 1]", "1")
    assert found.results[0].shape == (1, 5, 8, 8)
    mirror = convolve([1, 5, 8, 8], [6, 5, 3, 3], "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    assert mirror.results[0].shape == (1, 6, 4, 4)
    assert found.cost.useful_flops == mirror.cost.useful_flops


@pytest.mark.parametrize(("mask", "products"), [("[True, True, False]", 2), ("[False, True, False]", 1)])
def test_gradients_of_a_convolution_by_the_mask(mask: str, products: int) -> None:
    found = price(
        "aten::convolution_backward",
        [[2, 16, 5, 5], [2, 8, 5, 5], [16, 8, 3, 3], [], [], [], [], [], [], [], []],
        [F32, F32, F32, "ScalarList", *CONVOLUTION, ""],
        values=["", "", "", "[0]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", mask],
    )  # fmt: skip
    assert found.cost.flops == products * 2 * (2 * 16 * 5 * 5) * (8 * 3 * 3)
    assert len(found.results) == products


def test_values_that_are_not_recorded_leave_a_convolution_unknown() -> None:
    found = price("aten::convolution", [*PATCHES, [], [], [], [], [], [], []], [F32, F32, "", *CONVOLUTION])
    assert isnan(found.cost.flops)
    assert isnan(found.cost.bytes_read)
    assert found.cost.op_class is OpClass.CONVOLUTION


FLASH = [BF16, BF16, BF16, "", "", *["Scalar"] * 6, "", "", "", ""]


def test_flash_attention_of_qwen_counts_all_pairs_and_the_causal_ones() -> None:
    # h100_qwen _flash_attention_forward: three [16,559,16,64], causal, (batch, length, heads, head)
    qkv = [[16, 559, 16, 64]] * 3
    found = price(
        "aten::_flash_attention_forward", [*qkv, *[[]] * 12], FLASH,
        strides=[*[[572416, 64, 35776, 1]] * 3, *[[]] * 12],
        values=["", "", "", "", "", "559", "559", "0.", "True", "False", "0.125", "", "", "", ""],
    )  # fmt: skip
    pairs, seen, heads = 559 * 559, 559 * 560 // 2, 16 * 16
    assert found.cost.flops == heads * pairs * (4 * 64 + 4)
    assert found.cost.useful_flops == heads * seen * (4 * 64 + 4)
    assert found.cost.transcendentals == heads * seen
    assert found.cost.bytes_read == 3 * 2 * 16 * 559 * 16 * 64
    assert found.cost.bytes_written == 2 * 16 * 559 * 16 * 64 + 4 * 16 * 16 * 559
    assert extents(found) == [(256, 559, 559, 64), (256, 559, 64, 559)]


def test_efficient_attention_has_a_flag_before_the_causal_one() -> None:
    shapes = [[2, 4, 6, 8], [2, 4, 10, 8], [2, 4, 10, 8], [], [], [], [], []]
    types = [F32, F32, F32, "", "Scalar", "Scalar", "Scalar", ""]

    def at(*values: str) -> AtenCost:
        name = "aten::_scaled_dot_product_efficient_attention"
        return price(name, shapes, types, values=["", "", "", "", *values, ""])

    assert at("True", "0.", "False").cost.useful_flops == 8 * 6 * 10 * (4 * 8 + 4)
    # From the top left, row i sees i + 1 keys.
    assert at("True", "0.", "True").cost.useful_flops == 8 * (1 + 2 + 3 + 4 + 5 + 6) * (4 * 8 + 4)
    assert len(at("False", "0.", "True").results) == 1


def test_flash_attention_aligns_its_mask_with_the_end() -> None:
    found = price(
        "aten::_scaled_dot_product_flash_attention",
        [[1, 1, 2, 8], [1, 1, 5, 8], [1, 1, 5, 8], [], [], [], []],
        [F32, F32, F32, *["Scalar"] * 4], values=["", "", "", "0.", "True", "False", ""],
    )  # fmt: skip
    assert found.cost.useful_flops == (4 + 5) * (4 * 8 + 4)


def test_backward_of_attention_is_five_products() -> None:
    shapes = [[2, 4, 6, 8]] * 5 + [[2, 4, 6]] + [[]] * 9
    types = [F32] * 6 + ["", "", "Scalar", "Scalar", "Scalar", "Scalar", "", "", ""]
    values = ["", "", "", "", "", "", "", "", "6", "6", "0.", "False", "", "", ""]
    found = price("aten::_scaled_dot_product_flash_attention_backward", shapes, types, values=values)
    assert sum(row.flops for row in found.cost.contractions) == 5 * 2 * 8 * 6 * 6 * 8
    # gradient, q, k, v, out and the sums are read, three gradients written
    assert found.cost.bytes_read == 4 * (5 * 2 * 4 * 6 * 8 + 2 * 4 * 6)
    assert found.cost.bytes_written == 4 * 3 * 2 * 4 * 6 * 8


PREFILL = [
    [15360, 32, 128], [835874, 8, 128], [835874, 8, 128], [16], [16], [15616], *[[]] * 24,
]  # fmt: skip
PREFILL_TYPES = [BF16, BF16, BF16, "int", "int", "int", *["Scalar"] * 12, *[""] * 12]


def test_paged_prefill_of_sglang_on_mi300x_where_all_sequences_are_as_long() -> None:
    # 15 sequences of 1,024 queries are all 15,360 tokens; of the cache only their keys are read.
    values = [*[""] * 6, "1024", "1024", "0.", "0.088", "0.", "False", "True", "-1", "-1", *[""] * 15]
    found = price("aiter::mha_batch_prefill", PREFILL, PREFILL_TYPES, values=values)
    assert found.cost.useful_flops == 15 * 32 * (1024 * 1025 // 2) * (4 * 128 + 4)
    assert found.cost.bytes_read == 2 * 15360 * 32 * 128 + 2 * 2 * 15 * 1024 * 8 * 128
    assert found.cost.bytes_written == 2 * 15360 * 32 * 128
    values[6] = values[7] = "2048"  # some are longer, so nobody knows the others
    assert isnan(price("aiter::mha_batch_prefill", PREFILL, PREFILL_TYPES, values=values).cost.flops)
