"""Elementwise operations, copies, reductions, normalisations and picks of PyTorch, by hand."""

from __future__ import annotations

import json
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.costs.aten import ATEN, COMPOSITE, VIEWS, aten_cost, find_aten_rule
from hespas.costs.aten.call import AtenCost
from hespas.graph import DType, OpClass, dtype

BF16, F32, I64 = "c10::BFloat16", "float", "long int"


def price(
    name: str,
    shapes: object,
    types: object,
    *,
    strides: object = None,
    values: list[str] | None = None,
    hint: DType | None = None,
) -> AtenCost:
    return aten_cost(
        name,
        json.dumps(shapes),
        json.dumps(types),
        strides="" if strides is None else json.dumps(strides),
        values="" if values is None else json.dumps(values),
        hint=hint,
    )


def figures(found: AtenCost) -> tuple[float, float, float]:
    return found.cost.flops, found.cost.bytes_read, found.cost.bytes_written


def name_of(found: AtenCost) -> str:
    element = found.results[0].dtype
    return "" if element is None else element.name


def test_add_of_timesformer_broadcasts_its_positions() -> None:
    # h100_timesformer: [[128,197,768],[1,197,768],[]] bf16
    found = price(
        "aten::add", [[128, 197, 768], [1, 197, 768], []], [BF16, BF16, "Scalar"],
        strides=[[151296, 768, 1], [151296, 768, 1], []], values=["", "", "1"],
    )  # fmt: skip
    elements = 128 * 197 * 768
    assert figures(found) == (elements, 2 * (elements + 197 * 768), 2 * elements)


def test_mul_by_a_number_reads_one_tensor() -> None:
    # [[8,12,3137,3137],[]] bf16 by a double without dimensions: a number, which changes no type
    found = price(
        "aten::mul", [[8, 12, 3137, 3137], []], [BF16, "double"], strides=[[118089228, 9840769, 3137, 1], []]
    )
    elements = 8 * 12 * 3137 * 3137
    assert figures(found) == (elements, 2 * elements, 2 * elements)
    assert name_of(found) == "bf16"


def test_mul_of_qwen_with_a_row_and_a_transposed_tensor() -> None:
    # [[16,16,559,64],[1,1,559,64]], the first transposed: strides [[572416,64,1024,1],[35776,35776,64,1]]
    found = price(
        "aten::mul", [[16, 16, 559, 64], [1, 1, 559, 64]], [BF16, BF16],
        strides=[[572416, 64, 1024, 1], [35776, 35776, 64, 1]],
    )  # fmt: skip
    elements = 16 * 16 * 559 * 64
    assert figures(found) == (elements, 2 * (elements + 559 * 64), 2 * elements)


def test_an_expanded_input_is_read_once_and_written_in_full() -> None:
    found = price("aten::add", [[64, 32], [64, 32], []], [F32, F32, "Scalar"], strides=[[32, 1], [0, 1], []])
    assert figures(found) == (64 * 32, 4 * (64 * 32 + 32), 4 * 64 * 32)


def test_overlapping_windows_are_read_once() -> None:
    # 5 windows of 3 over 7 elements
    found = price("aten::neg", [[5, 3]], [F32], strides=[[1, 1]])
    assert figures(found) == (15, 4 * 7, 4 * 15)


def test_in_place_writes_the_type_of_its_target() -> None:
    found = price("aten::add_", [[128, 768, 14, 14], [1, 768, 1, 1], []], [BF16, F32, "Scalar"])
    elements = 128 * 768 * 14 * 14
    assert figures(found) == (elements, 2 * elements + 4 * 768, 2 * elements)
    assert name_of(found) == "bf16"


def test_an_output_argument_is_not_read() -> None:
    # a100: mul [[512],[],[512]] float, double, float: mul.out
    found = price("aten::mul", [[512], [], [512]], [F32, "double", F32])
    assert figures(found) == (512, 4 * 512, 4 * 512)
    found = price("aten::mul", [[512], [], [512]], [F32, "double", BF16])
    assert figures(found) == (512, 4 * 512, 2 * 512)


@pytest.mark.parametrize(
    ("name", "types", "expected"),
    [
        ("add", [BF16, "c10::Half"], "f32"),
        ("add", ["int", "float"], "f32"),
        ("add", [I64, "int"], "i64"),
        ("add", ["unsigned char", "signed char"], "ui8"),
        ("div", [I64, I64], "f32"),
        ("eq", [F32, F32], "i1"),
        ("mul", ["c10::complex<float>", F32], "complex<f32>"),
    ],
)
def test_types_are_promoted_as_pytorch_does(name: str, types: list[str], expected: str) -> None:
    assert name_of(price(f"aten::{name}", [[4], [4]], types)) == expected


def test_a_number_of_a_higher_category_brings_the_default_type() -> None:
    assert name_of(price("aten::mul", [[4], []], ["int", "double"])) == "f32"
    assert name_of(price("aten::mul", [[4], []], ["bool", "long"])) == "i64"
    complex_number = "c10::complex<double>"
    assert name_of(price("aten::mul", [[4], []], [F32, complex_number])) == "complex<f32>"
    assert name_of(price("aten::mul", [[4], []], ["int", complex_number])) == "complex<f32>"
    assert name_of(price("aten::mul", [[4], []], ["double", complex_number])) == "complex<f64>"


def test_powers_are_multiplied_out() -> None:
    square = price("aten::pow", [[16, 559, 1024], []], [F32, "Scalar"], values=["", "2"])
    assert (square.cost.flops, square.cost.transcendentals) == (16 * 559 * 1024, 0)
    root = price("aten::pow", [[10], []], [F32, "Scalar"], values=["", "0.5"])
    assert (root.cost.flops, root.cost.transcendentals) == (0, 10)
    assert isnan(price("aten::pow", [[10], []], [F32, "Scalar"]).cost.transcendentals)


def test_a_number_may_stand_first() -> None:
    # rotary angles: pow(10000, exponents)
    found = price("aten::pow", [[], [32]], ["Scalar", F32], values=["10000", ""])
    assert (found.cost.transcendentals, *figures(found)) == (32, 0, 4 * 32, 4 * 32)


def test_a_rounded_division_keeps_whole_numbers() -> None:
    assert name_of(price("aten::div", [[8], [], []], [I64, I64, ""])) == "i64"
    assert name_of(price("aten::div", [[8], []], [I64, I64])) == "f32"


def test_copies_of_qwen() -> None:
    shapes = [[16, 559, 1024], [16, 559, 1024], []]
    elements = 16 * 559 * 1024
    widened = price("aten::copy_", shapes, [F32, BF16, "Scalar"])
    assert figures(widened) == (elements, 2 * elements, 4 * elements)
    assert widened.cost.op_class is OpClass.ELEMENTWISE
    # [[16,16,559,64]] from strides [572416,64,1024,1]: a transposition moves every element once
    moved = price(
        "aten::copy_", [[16, 16, 559, 64], [16, 16, 559, 64], []], [BF16, BF16, "Scalar"],
        strides=[[572416, 35776, 64, 1], [572416, 64, 1024, 1], []],
    )  # fmt: skip
    elements = 16 * 16 * 559 * 64
    assert figures(moved) == (0, 2 * elements, 2 * elements)
    assert moved.cost.op_class is OpClass.MOVE


def test_the_type_of_a_conversion_is_a_number() -> None:
    # h100_qwen: _to_copy of [1,1,559] long int, values ["","6",...]: float32
    found = price(
        "aten::_to_copy", [[1, 1, 559], [], [], [], [], [], []], [I64, "Scalar", "", "", "", "Scalar", ""],
        values=["", "6", "", "", "", "False", ""],
    )  # fmt: skip
    assert figures(found) == (559, 8 * 559, 4 * 559)


def test_cat_of_qwen_needs_an_element_type_from_elsewhere() -> None:
    # [[[16,16,559,32],[16,16,559,32]],[]] along -1; the first is a result, the second half of a tensor
    shapes = [[[16, 16, 559, 32], [16, 16, 559, 32]], []]
    types, values = ["TensorList", "Scalar"], ["", "-1"]
    strides = [[[286208, 32, 512, 1], [572416, 64, 1024, 1]], []]
    assert isnan(price("aten::cat", shapes, types, strides=strides, values=values).cost.bytes_read)
    found = price("aten::cat", shapes, types, strides=strides, values=values, hint=dtype("bf16"))
    elements = 2 * 16 * 16 * 559 * 32
    assert figures(found) == (0, 2 * elements, 2 * elements)
    assert found.results[0].shape == (16, 16, 559, 64)


def test_cat_of_an_expanded_row_reads_it_once() -> None:
    found = price(
        "aten::cat", [[[8, 1, 768], [8, 3136, 768]], []], ["TensorList", "Scalar"],
        strides=[[[0, 768, 1], [768, 6144, 1]], []], values=["", "1"], hint=dtype("bf16"),
    )  # fmt: skip
    assert figures(found) == (0, 2 * (768 + 8 * 3136 * 768), 2 * 8 * 3137 * 768)


def test_a_list_that_an_old_trace_does_not_spell_out_is_unknown() -> None:
    assert isnan(
        aten_cost("aten::cat", "[[],[]]", '["TensorList","Scalar"]', hint=dtype("f32")).cost.bytes_read
    )


def test_layer_norm_of_timesformer_on_mi300x() -> None:
    found = price(
        "aten::native_layer_norm", [[8, 3137, 768], [], [768], [768], []],
        [BF16, "ScalarList", BF16, BF16, "Scalar"], strides=[[2409216, 768, 1], [], [1], [1], []],
        values=["", "[768]", "", "", "9.9999999999999995e-07"],
    )  # fmt: skip
    elements, rows = 8 * 3137 * 768, 8 * 3137
    assert figures(found) == (8 * elements, 2 * (elements + 2 * 768), 2 * elements + 2 * 4 * rows)
    assert found.cost.transcendentals == rows
    assert [result.shape for result in found.results] == [(8, 3137, 768), (8, 3137, 1), (8, 3137, 1)]


def test_rms_norm_of_sglang_on_mi300x_gets_its_result_as_an_argument() -> None:
    found = price(
        "aiter::rmsnorm", [[491520, 128], [491520, 128], [128], []], [BF16, BF16, BF16, "Scalar"],
        values=["", "", "", "1e-06"],
    )  # fmt: skip
    elements = 491520 * 128
    assert figures(found) == (4 * elements, 2 * (elements + 128), 2 * elements)
    added = price("aiter::add_rmsnorm", [[15360, 4096]] * 4 + [[4096], []], [BF16] * 5 + ["Scalar"])
    elements = 15360 * 4096
    assert figures(added) == (5 * elements, 2 * (2 * elements + 4096), 2 * 2 * elements)


def test_the_gate_of_sglang_reads_both_halves() -> None:
    found = price("sgl_kernel::silu_and_mul", [[15360, 12288], [15360, 24576]], [BF16, BF16])
    assert figures(found)[1:] == (2 * 15360 * 24576, 2 * 15360 * 12288)


def test_softmax_of_timesformer() -> None:
    found = price(
        "aten::_softmax",
        [[8, 12, 3137, 3137], [], []],
        [BF16, "Scalar", "Scalar"],
        values=["", "-1", "False"],
    )
    elements, rows = 8 * 12 * 3137 * 3137, 8 * 12 * 3137
    assert figures(found) == (4 * elements - 2 * rows, 2 * elements, 2 * elements)
    assert found.cost.transcendentals == elements


def test_mean_and_sum_by_their_dimensions() -> None:
    # h100_qwen: mean [[16,559,1024],...] float, dim [-1], keepdim
    types = [F32, "ScalarList", "Scalar", ""]
    mean = price("aten::mean", [[16, 559, 1024], [], [], []], types, values=["", "[-1]", "True", ""])
    rows = 16 * 559
    assert mean.results[0].shape == (16, 559, 1)
    assert figures(mean) == (rows * 1023 + rows, 4 * rows * 1024, 4 * rows)
    everything = price("aten::sum", [[3, 128], []], ["int", ""])
    assert (everything.results[0].shape, name_of(everything)) == ((), "i64")
    assert isnan(price("aten::sum", [[1024, 512], [], [], []], types).cost.bytes_written)  # a100: no values


def test_maximum_of_one_of_two_and_along_a_dimension() -> None:
    assert price("aten::max", [[15]], [I64]).results[0].shape == ()
    assert price("aten::max", [[15], [15]], [I64, I64]).results[0].shape == (15,)
    along = price("aten::max", [[15, 4], [], []], [F32, "Scalar", "Scalar"], values=["", "1", "False"])
    assert [(result.shape, result.dtype) for result in along.results] == [
        ((15,), dtype("f32")),
        ((15,), dtype("i64")),
    ]


def test_picking_rows_reads_what_is_picked() -> None:
    # h100_qwen: index_select [[151936,1024],[],[8944]] bf16, long int
    found = price(
        "aten::index_select", [[151936, 1024], [], [8944]], [BF16, "Scalar", I64], values=["", "0", ""]
    )
    assert figures(found) == (0, 8 * 8944 + 2 * 8944 * 1024, 2 * 8944 * 1024)
    # sglang: gather into an output by an expanded index: strides [1,0]
    found = price(
        "aten::gather", [[151936, 4096], [], [15360, 4096], [], [15360, 4096]],
        [BF16, "Scalar", I64, "Scalar", BF16], strides=[[4096, 1], [], [1, 0], [], [4096, 1]],
        values=["", "0", "", "False", ""],
    )  # fmt: skip
    assert figures(found) == (0, 8 * 15360 + 2 * 15360 * 4096, 2 * 15360 * 4096)


def test_the_dense_gradient_of_an_embedding_sorts_indices_and_clears_its_table() -> None:
    # Two passes sort the indices and their positions; parts of equal indices are added up, then read again.
    for number, scaled in ((3073, "False"), (32, "True")):
        found = price(
            "aten::embedding_dense_backward", [[number, 64], [number], [], [], []],
            [F32, I64, *["Scalar"] * 3], values=["", "", "1000", "-1", scaled],
        )  # fmt: skip
        ordered, parts = 2 * 2 * 8 * number, 4 * min(number, 1000) * 64
        assert figures(found) == (
            number * 64,
            4 * number * 64 + 8 * number + ordered + parts,
            4 * 1000 * 64 + ordered + 2 * parts,
        )


@pytest.mark.parametrize("number", [32, 3072])
def test_the_gradient_of_few_indices_changes_rows_without_sorting(number: int) -> None:
    found = price(
        "aten::embedding_dense_backward", [[number, 64], [number], [], [], []], [F32, I64, *["Scalar"] * 3],
        values=["", "", "1000", "-1", "False"],
    )  # fmt: skip
    changed = 4 * min(number, 1000) * 64
    assert figures(found) == (
        number * 64, 4 * number * 64 + 8 * number + changed, 4 * 1000 * 64 + changed
    )  # fmt: skip


def test_arange_resizes_its_output() -> None:
    # h100_qwen: [[],[],[],[0]], values ["0","559","1",""]
    found = price(
        "aten::arange", [[], [], [], [0]], ["Scalar", "Scalar", "Scalar", I64], values=["0", "559", "1", ""]
    )
    assert (found.results[0].shape, found.cost.bytes_written) == ((559,), 8 * 559)


def test_fills_write_and_read_nothing() -> None:
    assert figures(price("aten::fill_", [[16, 27, 27], []], [F32, "Scalar"])) == (0, 0, 4 * 16 * 27 * 27)


def test_foreach_sums_over_its_lists() -> None:
    shapes = [[[3, 4], [5]], [[3, 4], [5]], []]
    found = price("aten::_foreach_add_", shapes, ["TensorList", "TensorList", "Scalar"], hint=dtype("f32"))
    assert figures(found) == (17, 4 * 2 * 17, 4 * 17)


def test_fused_adam_reads_four_lists_and_writes_three() -> None:
    shapes = [[[3, 4], [5]]] * 4 + [[], []]
    found = price(
        "aten::_fused_adamw_", shapes, ["TensorList"] * 4 + ["TensorList", "TensorList"], hint=dtype("f32")
    )
    assert figures(found)[1:] == (4 * 4 * 17, 4 * 3 * 17)


def test_a_generated_kernel_moves_its_arguments() -> None:
    found = price("triton_poi_fused_add_0", [[64, 32], [64, 32], []], [BF16, F32, "Scalar"])
    assert found.cost.flops == 64 * 32
    assert found.cost.bytes_read + found.cost.bytes_written == (2 + 4) * 64 * 32


def test_execution_traces_name_their_types_otherwise() -> None:
    found = price("aten::add", [[4], [4], []], ["Tensor(c10::BFloat16)", "Tensor(float)", "Int"])
    assert figures(found) == (4, 4 * 2 + 4 * 4, 4 * 4)
    listed = ["GenericList[Tensor(float),Tensor(float)]", "Int"]
    assert price("aten::cat", [[[2], [3]], []], listed, values=["", "0"]).cost.bytes_read == 20


def test_unknown_operations_have_no_figures() -> None:
    found = price("my::op", [[4]], [F32])
    assert all(map(isnan, (*figures(found), found.cost.transcendentals)))
    assert find_aten_rule("my::op") is None


def test_views_are_free_and_answer_for_no_work() -> None:
    assert figures(price("aten::view", [[4]], [F32])) == (0, 0, 0)
    assert not VIEWS & {*ATEN, *COMPOSITE}


def test_fp8_products_read_their_scales_and_write_the_stated_type() -> None:
    # _scaled_mm(self, mat2, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    types = ["c10::Float8_e4m3fn", "c10::Float8_e4m3fn", F32, F32, "", "", "Scalar", "Scalar"]
    values = ["", "", "", "", "", "", "15", "False"]
    found = price("aten::_scaled_mm", [[64, 32], [32, 16], [], [], [], [], [], []], types, values=values)
    assert figures(found) == (2 * 64 * 32 * 16, 64 * 32 + 32 * 16, 2 * 64 * 16)
    assert found.cost.contractions[0].lhs == dtype("f8E4M3FN").code


def test_grouped_products_multiply_each_row_with_one_matrix() -> None:
    found = price("aten::_grouped_mm", [[100, 32], [4, 32, 16], [4], [], []], [BF16, BF16, "int", "", ""])
    assert figures(found) == (2 * 100 * 32 * 16, 2 * (100 * 32 + 4 * 32 * 16) + 4 * 4, 2 * 100 * 16)


def test_random_fills_write_only() -> None:
    assert figures(price("aten::normal_", [[8, 4], [], [], []], [F32, "Scalar", "Scalar", ""])) == (0, 0, 128)


NAMES = sorted({*ATEN, *COMPOSITE})
TEXTS = st.sampled_from(
    ["", "[]", "[[]]", "null", "{", "[[1,[2]]]", "[[-1]]", "[[99999999999999999999]]", '["float"]',
     "[[[[[]]]]]",
     "[[281474976710656,8192]]", '["float","float","long int"]', "[[3,4],[4,5],[5]]", '["", "[0]", "1e400"]',
     '["","[281474976710655,281474976710655]","[1]","nan"]', "[[0],[0],[0]]", '["TensorList","TensorList"]',
     "[[[4],[4]],[[4],[4]]]", "[[2,3,4,5],[2,3,4,5],[2,3,4,5]]", '["","-9","True","2","1","1"]'],
)  # fmt: skip


@given(st.sampled_from(NAMES), TEXTS, TEXTS, TEXTS, TEXTS)
def test_texts_that_make_no_sense_leave_figures_unknown_and_never_negative(
    name: str, shapes: str, types: str, strides: str, values: str
) -> None:
    found = aten_cost(name, shapes, types, strides=strides, values=values)
    for value in (*figures(found), found.cost.transcendentals, found.cost.useful_flops):
        assert isnan(value) or value >= 0
    assert all(0 <= extent < 1 << 63 for result in found.results for extent in result.shape)


def test_lists_longer_than_any_shape_are_no_shapes() -> None:
    many = ",".join(["281474976710655"] * 200_000)
    found = aten_cost("aten::repeat", "[[2],[]]", '["float","ScalarList"]', values=f'["","[{many}]"]')
    assert isnan(found.cost.bytes_written)
    found = aten_cost("aten::neg", f"[[{many}]]", '["float"]')
    assert isnan(found.cost.bytes_written)
    found = aten_cost("aten::cat", f"[[[{many}]],[]]", '["TensorList","Scalar"]', hint=dtype("f32"))
    assert isnan(found.cost.bytes_written)


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_without_inputs_is_never_free(name: str) -> None:
    found = aten_cost(name, "", "")
    assert isnan(found.cost.bytes_read)
    assert isnan(found.cost.bytes_written)


def test_what_is_not_in_place_copies_its_target_besides() -> None:
    # 6 rows of 4 floats are added into one of 10 rows: 96 B of values, 48 B of indices, 160 B of target.
    added: object = [[10, 4], [], [6], [6, 4], []]
    types: object = [F32, "Scalar", I64, F32, "Scalar"]
    values = ["", "0", "", "", "1"]
    in_place, copied = (
        figures(price(name, added, types, values=values)) for name in ("aten::index_add_", "aten::index_add")
    )
    assert in_place == (24.0, 48.0 + 96.0 + 96.0, 96.0)
    assert copied == (24.0, in_place[1] + 160.0, in_place[2] + 160.0)
    put: object = [[10, 4], [[6]], [6, 4], []]
    types = [F32, [I64], F32, "Scalar"]
    values = ["", "", "", "True"]
    in_place, copied = (
        figures(price(name, put, types, values=values)) for name in ("aten::index_put_", "aten::index_put")
    )
    assert in_place == (24.0, 48.0 + 96.0 + 96.0, 96.0)
    assert copied == (24.0, in_place[1] + 160.0, in_place[2] + 160.0)


def test_the_gradient_of_a_maximum_is_added_where_the_maximum_was() -> None:
    shapes = [[1, 2, 3, 3], [1, 2, 6, 6], [], [], [], [], [], [1, 2, 3, 3]]
    types = [F32, F32, *["ScalarList"] * 4, "Scalar", I64]
    found = price("aten::max_pool2d_with_indices_backward", shapes, types)
    assert figures(found) == (18.0, 18 * 4.0 + 18 * 8.0, 72 * 4.0)
    without = price("aten::avg_pool2d_backward", shapes[:2], types[:2])
    assert isnan(without.cost.flops)
    windows = price("aten::avg_pool2d_backward", shapes[:3], types[:3], values=["", "", "[2]"])
    assert figures(windows) == (18 * 4.0, 18 * 4.0, 72 * 4.0)
    whole = price("aten::_adaptive_avg_pool2d_backward", [[1, 2, 1, 1], [1, 2, 6, 6]], [F32, F32])
    assert figures(whole) == (72.0, 2 * 4.0, 72 * 4.0)


@pytest.mark.parametrize(
    ("name", "shapes", "types", "values"),
    [
        (
            "avg_pool2d",
            [[1, 2, 6, 6], [], [], []],
            [F32, *["ScalarList"] * 3],
            ["", "[-3, 2]", "[1, 1]", "[0, 0]"],
        ),
        (
            "avg_pool2d",
            [[1, 2, 6, 6], [], [], []],
            [F32, *["ScalarList"] * 3],
            ["", "[-3, -2]", "[1]", "[0]"],
        ),
        ("_adaptive_avg_pool2d", [[1, 2, 6, 6], []], [F32, "ScalarList"], ["", "[-1, 2]"]),
        ("_adaptive_avg_pool2d", [[1, 2, 6, 6], []], [F32, "ScalarList"], ["", "[-1, -2]"]),
        (
            "max_pool3d_with_indices_backward",
            [[1, 2, 3, 3, 3], [1, 2, 6, 6, 6], []],
            [F32, F32, "ScalarList"],
            ["", "", "[-2, 2, 2]"],
        ),
        (
            "avg_pool2d_backward",
            [[1, 2, 3, 3], [1, 2, 6, 6], []],
            [F32, F32, "ScalarList"],
            ["", "", "[-2, -2]"],
        ),
    ],
)
def test_windows_without_positive_extents_are_unknown(
    name: str, shapes: list[list[int]], types: list[str], values: list[str]
) -> None:
    found = price(f"aten::{name}", shapes, types, values=values)
    assert isnan(found.cost.flops)
    assert not found.cost.bytes_written < 0
