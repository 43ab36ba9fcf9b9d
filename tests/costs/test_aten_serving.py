"""Operations of vLLM, SGLang, AITER and others, by hand; arguments as captures of graphs record them."""

from __future__ import annotations

import json
from math import isnan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.costs.aten import CallTexts, aten_cost, find_aten_rule, is_composite
from hespas.costs.aten.call import AtenCost, Call, needs, read_call, simple
from hespas.costs.aten.paged import batch_lengths
from hespas.graph import OpClass, dtype

BF16, U8, F32, FP8 = "c10::BFloat16", "unsigned char", "float", "c10::Float8_e4m3fn"
PREFILL = (
    "execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)"
)
DECODE = "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk32785sqsq32sqsk32785)"


def texts(name: str, shapes: object, types: list[str], values: list[str] | None = None) -> CallTexts:
    return CallTexts(name, json.dumps(shapes), json.dumps(types), "", json.dumps(values) if values else "")


def price(
    name: str,
    shapes: object,
    types: list[str],
    values: list[str] | None = None,
    *,
    step: str = "",
    parts: tuple[CallTexts, ...] = (),
) -> AtenCost:
    call = texts(name, shapes, types, values)
    return aten_cost(call.name, call.shapes, call.types, values=call.values, step=step, parts=parts)


def extents(found: AtenCost) -> list[tuple[int, int, int, int]]:
    return [(row.batch, row.m, row.n, row.k) for row in found.cost.contractions]


def test_decode_attention_over_as_many_keys_as_the_step_states() -> None:
    cache = [835874, 1, 8, 128]
    found = price(
        "sglang_profiler::attention_paged_attention_ragged_100",
        [[32, 32, 128], [10905190400], [32, 32, 128], cache, cache, [33]],
        [BF16, U8, BF16, BF16, BF16, "int"],
        step=DECODE,
    )
    pairs = 32785  # each of 32 queries sees all keys of its sequence
    assert found.cost.op_class is OpClass.ATTENTION
    assert found.cost.flops == found.cost.useful_flops == 32 * pairs * (2 * 128 + 2 * 128 + 4)
    assert found.cost.bytes_read == 2 * (32 * 32 * 128 + pairs * 8 * (128 + 128))
    assert found.cost.bytes_written == 2 * 32 * 32 * 128
    assert sum(row.flops for row in found.cost.contractions) == 32 * pairs * 4 * 128


def test_prefill_and_decode_in_one_batch() -> None:
    heads = [[8192, 64, 64], [8192, 8, 64], [8192, 8, 64], [8192, 64, 64]]
    found = price("vllm::unified_attention_with_output", heads, [BF16] * 4, step=PREFILL)
    pairs, causal = 7671310 + 34489, (7671310 - (7475785 - 8155) / 2) + 34489
    assert found.cost.flops == 64 * pairs * (4 * 64 + 4)
    assert found.cost.useful_flops == 64 * causal * (4 * 64 + 4)
    assert found.cost.bytes_read == 2 * (8192 * 64 * 64 + (8430 + 34489) * 8 * 128)
    assert isnan(price("vllm::unified_attention_with_output", heads, [BF16] * 4).cost.flops)


@pytest.mark.parametrize(
    "step",
    [
        "",
        "step[DECODE bs=32]",
        "execute_32",
        "execute_1_context_1(sq9sk1sqsq81sqsk9)_generation_0(sq0sk0sqsq0sqsk0)",
        f"execute_1_context_0(sq1sk{'9' * 15}sqsq1sqsk{'9' * 16})_generation_0(sq0sk0sqsq0sqsk0)",
    ],
)
def test_steps_that_state_no_batch(step: str) -> None:
    assert batch_lengths(step) is None


def moe(*parts: CallTexts) -> AtenCost:
    shapes = [[8192, 3072], [8192, 32], [], []]
    return price("vllm::moe_forward", shapes, [BF16, BF16, "", ""], parts=parts)


TOP_4 = texts("TopK", [[8192, 32], []], [BF16, "Scalar"], ["", "4"])
UP = texts("aten::view", [[32, 1536, 5888], []], [U8, "ScalarList"])
DOWN = texts("aten::view", [[32, 1472, 3072], []], [U8, "ScalarList"])
OTHER = texts("aten::view", [[1, 32768, 2944], []], [BF16, "ScalarList"])


def test_experts_whose_weights_are_seen_inside() -> None:
    # 48 of the grid of 13,202 blocks are 46 x 287: 46 tiles of 128 make 5,888, not 2 x 3,072
    found = moe(TOP_4, OTHER, UP, DOWN)
    assert extents(found) == [(1, 32768, 5888, 3072), (1, 32768, 3072, 2944)]
    products = 2 * 32768 * (5888 * 3072 + 3072 * 2944)
    assert found.cost.flops == products + 2 * 32768 * 2944 + 2 * 32768 * 3072
    weights = 32 * (5888 * 3072 + 3072 * 2944) * (4 + 8 / 32) / 8
    between = 2 * 32768 * 2944
    assert found.cost.bytes_read == 2 * 8192 * 3072 + weights + between + 2 * 8192 * 32
    assert found.cost.bytes_written == 2 * 8192 * 3072 + between
    assert found.cost.contractions[0].rhs == dtype("mxfp4").code


def test_experts_without_what_the_cost_depends_on() -> None:
    for parts in ((), (TOP_4,), (TOP_4, UP), (UP, DOWN), (TOP_4, OTHER, OTHER)):
        assert isnan(moe(*parts).cost.flops)


def test_fused_experts() -> None:
    shapes = [[10, 64], [8, 96, 64], [8, 64, 48], [10, 2], [10, 2]]
    found = price("sglang::inplace_fused_experts", shapes, [BF16, BF16, BF16, F32, "int"])
    assert extents(found) == [(1, 20, 96, 64), (1, 20, 64, 48)]
    assert found.cost.bytes_read == 2 * (640 + 8 * (96 * 64 + 64 * 48) + 20 * 48) + 20 * 4 + 20 * 4
    few = price(
        "vllm::outplace_fused_experts", [[1, 64], *shapes[1:3], [1, 2], [1, 2]], [BF16] * 3 + [F32, "int"]
    )
    assert few.cost.bytes_read < found.cost.bytes_read, "two rows reach two experts"


def test_products_with_scales() -> None:
    # fp8_scaled_mm(a, b, scales of a, scales of b, type of the result, bias)
    found = price(
        "sgl_kernel::fp8_scaled_mm", [[16, 64], [64, 32], [16, 1], [32, 1], [], []],
        [FP8, FP8, F32, F32, "Scalar", ""], ["", "", "", "", "15", ""],
    )  # fmt: skip
    assert extents(found) == [(1, 16, 32, 64)]
    assert found.cost.bytes_read == 16 * 64 + 64 * 32 + 4 * (16 + 32)
    assert found.cost.bytes_written == 2 * 16 * 32
    four = price("aiter::gemm_a4w4", [[16, 64], [32, 64], [16, 4], [32, 4]], [U8] * 4)
    assert extents(four) == [(1, 16, 32, 128)], "two values to a byte"
    assert extents(price("_rocm_C::wvSplitK", [[32, 64], [4, 64], []], [BF16, BF16, "Scalar"])) == [
        (1, 4, 32, 64)
    ]
    assert extents(price("_Linear", [[32, 64], [5, 4, 64], [32]], [BF16] * 3)) == [(1, 20, 32, 64)]


def test_attention_of_libraries() -> None:
    shapes = [[2, 128, 8, 64]] * 3
    pairs = 128 * 129 // 2
    for name, at in (("FlashAttnFunc", 5), ("xformers_flash::flash_fwd", 10)):
        values = ["True" if place == at else "" for place in range(at + 1)]
        types = [BF16] * 3 + [""] * (at - 2)
        found = price(name, shapes + [[]] * (at - 2), types, values)
        assert found.cost.useful_flops == 16 * pairs * (4 * 64 + 4)
    cache = [[8192, 64, 64], [1000, 16, 8, 64], [1000, 16, 8, 64]]
    paged = price("_vllm_fa3_C::fwd", cache, [BF16] * 3, step=PREFILL)
    assert paged.cost.bytes_read == 2 * (8192 * 64 * 64 + (8430 + 34489) * 8 * 128)
    ragged = [[1, 256, 8, 64]] * 3 + [[], [3], [3]]
    types = [BF16] * 3 + ["", "int", "int"]
    assert isnan(price("xformers::efficient_attention_forward_cutlass", ragged, types).cost.flops)


def test_packed_sequences_whose_keys_have_other_dimensions_are_unknown() -> None:
    name = "flash_attn::_flash_attn_varlen_forward"
    types = [BF16] * 3 + ["int", "int", "Scalar", "Scalar"]
    values = ["", "", "", "", "", "256", "256"]
    for keys, is_known in (
        ([512, 8, 64], True),
        ([512, 64], False),
        ([512], False),
        ([1, 512, 8, 64], False),
    ):
        found = price(name, [[512, 8, 64], keys, keys, [3], [3], [], []], types, values)
        assert isnan(found.cost.flops) is not is_known


@pytest.mark.parametrize(
    ("name", "logits_at"),
    [("aiter::topk_softmax", 3), ("_moe_C::topk_softmax", 3), ("sgl_kernel::topk_softmax", 2)],
)
def test_routing_to_an_unknown_number_of_experts_is_unknown(name: str, logits_at: int) -> None:
    shapes = [[4, 2], [], [4, 2], [4, 2]]
    shapes[logits_at] = [4, 16]
    assert isnan(price(name, shapes, [F32, "int", F32, F32]).cost.flops)


@pytest.mark.parametrize("count", ["-3", "0", "17"])
def test_routing_selects_a_positive_number_of_experts(count: str) -> None:
    assert isnan(price("TopK", [[4, 16], []], [F32, "Scalar"], ["", count]).cost.flops)


def test_heads_of_negative_size_are_unknown() -> None:
    shapes = [[4], [4, 512], [4, 128], [], [1024, 64]]
    types = ["long", BF16, BF16, "Scalar", BF16]
    for head, is_known in (("64", True), ("-1", False), ("0", False)):
        found = price("_C::rotary_embedding", shapes, types, ["", "", "", head, ""])
        assert isnan(found.cost.flops) is not is_known
        assert not found.cost.bytes_read < 0


@pytest.mark.parametrize(
    "negative",
    [
        simple([], [], flops=-1.0),
        simple([], [], read=-1.0),
        simple([], [], written=-1.0),
        simple([], [], transcendentals=-1.0),
    ],
)
def test_negative_figures_of_a_rule_make_the_cost_unknown(negative: AtenCost) -> None:
    @needs(OpClass.SORT)
    def rule(_: Call) -> AtenCost:
        return negative

    cost = rule(read_call("any", "[]", "[]")).cost
    assert cost.op_class is OpClass.SORT
    assert all(isnan(figure) for figure in (cost.flops, cost.bytes_read, cost.bytes_written))


def test_quantization_and_routing() -> None:
    found = price("_C::dynamic_per_token_scaled_fp8_quant", [[4, 64], [4, 64], [4, 1]], [FP8, BF16, F32])
    assert (found.cost.op_class, found.cost.bytes_read) == (OpClass.QUANTIZE, 2 * 256)
    assert found.cost.bytes_written == 256 + 4 * 4
    routed = price("TopK", [[8192, 32], []], [BF16, "Scalar"], ["", "4"])
    assert routed.cost.bytes_written == 8192 * 4 * (4 + 4)
    assert routed.cost.flops == 8192 * 32 * 8


def test_norms_into_memory_of_the_caller() -> None:
    rows = [[8192, 2880]] * 4
    found = price("aiter::rmsnorm2d_fwd_with_add_ck", [*rows, [2880], [], []], [BF16] * 5 + ["Scalar"] * 2)
    assert found.cost.bytes_read == 2 * (2 * 8192 * 2880 + 2880)
    assert found.cost.bytes_written == 2 * 2 * 8192 * 2880


def test_generated_kernels_that_only_move_compute_nothing() -> None:
    moves = price("triton_poi_fused_constant_pad_nd_moe_forward_0", [[8, 6], [8, 8]], [BF16, BF16])
    assert moves.cost.flops == 0.0
    assert price("triton_poi_fused__to_copy_1", [[8], [8]], [F32, BF16]).cost.flops == 0.0
    for name in ("triton_poi_fused_0", "triton_poi_fused_mine_1", "triton_red_fused__to_copy_1"):
        assert isnan(price(name, [[8], [8]], [F32, BF16]).cost.flops)


def test_products_by_their_parts_or_else_by_themselves() -> None:
    assert is_composite("vllm::rocm_unquantized_gemm")
    found = price("vllm::rocm_unquantized_gemm", [[8192, 2880], [5120, 2880], [5120]], [BF16] * 3)
    assert extents(found) == [(1, 8192, 5120, 2880)]


@given(
    st.lists(st.lists(st.integers(0, 70), max_size=4), min_size=6, max_size=7),
    st.sampled_from([BF16, U8, FP8]),
)
def test_any_arguments(shapes: list[list[int]], kind: str) -> None:
    names = (
        "vllm::moe_forward",
        "vllm::inplace_fused_experts",
        "aiter::gemm_a4w4",
        "_LayerNormLinear",
        "TopK",
    )
    for name in (*names, "_C::cutlass_scaled_mm", "sgl_kernel::silu_and_mul", "vllm::unified_attention"):
        assert find_aten_rule(name) is not None
        found = price(name, shapes, [kind] * len(shapes), ["4"] * len(shapes), step=DECODE, parts=(UP, TOP_4))
        assert isnan(found.cost.flops) or found.cost.flops >= 0


LOOKUP = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
UPDATE = "torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>"


def lookup_in_tables(lookups: int) -> CallTexts:
    """Return a lookup in 4 tables of 1,000 rows of 64 elements, for 256 samples."""
    shapes = [[0], [256000], [0], [0, 0], [4], [4], [5], [], [], [5], [], [lookups], [1025]]
    types = ["float"] * 4 + ["int", "long", "int", "Scalar", "Scalar", "long", "Scalar", "long", "long"]
    return texts(LOOKUP, shapes, types)


def test_the_gradient_of_tables_sorts_and_sums_all_lookups() -> None:
    alone = price(UPDATE, [[256, 256]], ["float"])
    assert isnan(alone.cost.flops)
    assert isnan(alone.cost.bytes_read)
    few, many = (price(UPDATE, [[256, 256]], ["float"], parts=(lookup_in_tables(n),)) for n in (2000, 20000))
    assert few.cost.op_class == OpClass.SCATTER
    assert (few.cost.flops, many.cost.flops) == (2000 * 64, 20000 * 64)
    # Each row number of 8 bytes is made, sorted in two passes with a position of 4 bytes, and counted.
    per_lookup = 8 + 2 * 12 + 2 * 8 + 2 * 4
    assert many.cost.bytes_read == 20000 * per_lookup + 4 * 256 * 256 + 4 * 4000 * 64


def test_a_bounds_check_reads_each_index_bag_by_bag() -> None:
    check = price("fbgemm::bounds_check_indices", [[4], [20000], [1025]], ["long"] * 3)
    assert check.cost.flops == 2 * 20000
    assert (check.cost.bytes_read, check.cost.bytes_written) == (8 * (4 + 20000 + 1025), 0)
    assert check.operands[0].shape == (1024, 20)


def test_a_permutation_of_bags_copies_the_tables_that_it_names() -> None:
    name = "fbgemm::permute_sparse_features"
    types = ["int", "int", "int", "float"]
    plain = price(name, [[8], [8, 128], [20000], []], types)
    half = price(name, [[4], [8, 128], [20000], []], types)
    weighted = price(name, [[8], [8, 128], [20000], [20000]], types)
    assert plain.cost.bytes_read == 4 * (8 + 20000 + 4 * 8 * 128)
    assert plain.cost.bytes_written == 4 * (20000 + 5 * 8 * 128)
    assert half.cost.bytes_written == 4 * (10000 + 3.5 * 8 * 128)
    assert weighted.cost.bytes_read == plain.cost.bytes_read + 4 * 20000
    assert plain.results[0].shape == (8 * 128, 20)


def test_a_lookup_in_several_tables_reads_the_rows_of_all_indices() -> None:
    shapes = [
        [0],
        [7487072],
        [0],
        [0, 0],
        [122],
        [122],
        [123],
        [],
        [],
        [123],
        [],
        [15807216],
        [999425],
        *[[]] * 7,
    ]
    types = ["float"] * 4 + ["int", "long", "int", "Scalar", "Scalar", "long", "Scalar", "long", "long"]
    name = "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function"
    found = price(name, [*shapes, [90837]], [*types, *["Scalar"] * 7, "float"])
    length = 7487072 / 90837
    assert found.cost.op_class == OpClass.GATHER
    assert found.cost.flops == pytest.approx((15807216 - 999424) * length)
    # The tables are smaller than the rows that are read, so that most come from a cache.
    assert found.cost.bytes_read == 4 * 7487072 + 8 * (15807216 + 999425)
    assert isnan(price(name, shapes, [*types, *["Scalar"] * 7]).cost.flops)
