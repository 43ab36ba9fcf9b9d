"""Kernels that Inductor generates: the arguments that they write, and the work that their names state.

Signatures are those of generated code: tensors updated in place, tensors read, tensors written, sizes of
dynamic shapes, extents of the loops.
"""

from __future__ import annotations

import json
from math import isnan, prod

import pytest

from hespas.costs.aten import aten_cost
from hespas.costs.aten.call import AtenCost
from hespas.graph import OpClass

BF16, F32, I64, BOOL = "c10::BFloat16", "float", "long int", "bool"
WIDTH = {BF16: 2, F32: 4, I64: 8, BOOL: 1}
Tensor = tuple[str, *tuple[int, ...]]


def price(name: str, tensors: list[Tensor], loops: list[int], *, values: bool = True) -> AtenCost:
    """The cost of a kernel as Kineto records it: numbers are scalars with a concrete value."""
    shapes = [list(tensor[1:]) for tensor in tensors] + [[] for _ in loops]
    types = [tensor[0] for tensor in tensors] + ["Scalar" for _ in loops]
    texts = ["" for _ in tensors] + [str(loop) for loop in loops]
    concrete = json.dumps(texts) if values else ""
    return aten_cost(name, json.dumps(shapes), json.dumps(types), values=concrete)


def moved(found: AtenCost) -> float:
    return found.cost.bytes_read + found.cost.bytes_written


def size(tensor: Tensor) -> int:
    return WIDTH[tensor[0]] * prod(int(extent) for extent in tensor[1:])


X, W = 4096, 1024
FULL, HALF, ROW, BIAS, MASK = (BF16, X, W), (BF16, X, W // 2), (F32, X, 1), (BF16, W), (BOOL, X, W)
WIDE, FULL32 = (BF16, X, 2 * W), (F32, X, W)
N = X * W

SIGNATURES: list[tuple[str, list[Tensor], list[Tensor], list[Tensor], list[int]]] = [
    # name, tensors updated in place, read, written, numbers
    ("triton_poi_fused_gelu_0", [FULL], [BIAS], [], [N]),
    ("triton_poi_fused_gelu_0", [], [FULL], [FULL], [N]),
    ("triton_poi_fused_gelu_0", [], [FULL, BIAS], [FULL], [N]),
    ("triton_poi_fused_addmm_relu_3", [FULL], [BIAS], [], [N]),
    ("triton_poi_fused_relu_3", [FULL], [], [], [N]),
    ("triton_poi_fused_zeros_3", [], [], [FULL], [N]),
    ("triton_poi_fused_add_12", [FULL], [FULL], [], [N]),
    ("triton_poi_fused_add_12", [FULL], [FULL, BIAS], [], [N]),
    ("triton_poi_fused_mul_12", [], [FULL], [FULL], [N]),
    ("triton_poi_fused_gelu_gelu_backward_9", [FULL], [FULL], [], [N]),
    ("triton_poi_fused_gelu_gelu_backward_9", [], [FULL, FULL], [FULL], [N]),
    ("triton_poi_fused_threshold_backward_5", [FULL], [MASK], [], [N]),
    ("triton_poi_fused_relu_threshold_backward_5", [FULL], [BIAS], [MASK], [N]),
    ("triton_poi_fused_mul_silu_slice_2", [], [WIDE], [FULL], [N]),
    ("triton_poi_fused_mul_silu_slice_2", [FULL], [WIDE], [], [N]),
    ("triton_poi_fused__to_copy_1", [], [FULL], [FULL32], [N]),
    ("triton_poi_fused_convolution_0", [], [FULL], [FULL], [X, W]),
    ("triton_poi_fused_clone_0", [], [FULL], [FULL], [X, W]),
    ("triton_poi_fused_add_gelu_1", [FULL], [BIAS], [], [X, N]),
    ("triton_red_fused_mean_1", [], [FULL], [ROW], [X, W]),
    ("triton_red_fused_mean_1", [ROW], [FULL], [], [X, W]),
    ("triton_per_fused__softmax_1", [FULL], [], [], [X, W]),
    ("triton_per_fused__softmax_1", [], [FULL], [FULL], [X, W]),
    ("triton_red_fused__softmax_1", [], [FULL], [FULL32], [33, X, W]),
    ("triton_per_fused_native_layer_norm_1", [], [FULL, BIAS, BIAS], [FULL], [X, W]),
    ("triton_per_fused_native_layer_norm_1", [FULL], [BIAS, BIAS], [], [X, W]),
    ("triton_per_fused_native_layer_norm_1", [ROW], [FULL, BIAS, BIAS], [ROW, FULL], [X, W]),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", [FULL], [FULL, BIAS], [], [X, W]),
    ("triton_per_fused_native_layer_norm_1", [(BF16, 64, 64)], [(BF16, 64), (BF16, 64)], [], [64, 64]),
    ("triton_per_fused_native_layer_norm_1", [], [(BF16, 64, 64)], [(F32, 64, 1)], [64, 64]),
    ("triton_for_fused_0", [(F32, 8), (F32, 12)], [(F32, 1)], [], [8, 12]),
    ("triton_for_fused_0", [], [(F32, 8), (F32, 12)], [(F32, 8), (F32, 12)], [8, 12]),
    ("triton_for_fused_0", [], [(F32, 8), (F32, 12)], [(F32, 8), (F32, 12)], []),
    ("triton_tem_fused_mm_4", [], [(BF16, 64, 32), (BF16, 32, 16)], [(BF16, 64, 16)], []),
    ("triton_tem_fused_addmm_4", [(BF16, 64, 16)], [(BF16, 64, 32), (BF16, 32, 16), (BF16, 16)], [], []),
]


@pytest.mark.parametrize(
    ("name", "updated", "read", "written", "loops"),
    SIGNATURES,
    ids=[f"{row[0]}-{place}" for place, row in enumerate(SIGNATURES)],
)
def test_every_argument_moves_once_and_one_updated_in_place_twice(
    name: str, updated: list[Tensor], read: list[Tensor], written: list[Tensor], loops: list[int]
) -> None:
    found = price(name, [*updated, *read, *written], loops)
    # Accumulators of a reduction, one element per row, may be taken for outputs.
    assert moved(found) == pytest.approx(sum(map(size, [*updated, *updated, *read, *written])), rel=2e-3)


def test_the_output_is_the_tensor_that_the_loops_cover() -> None:
    found = price("triton_poi_fused_gelu_0", [(BF16, 8192, 8192), (BF16, 8192)], [67_108_864])
    assert moved(found) == 268_451_840
    assert (found.cost.bytes_read, found.cost.bytes_written) == (134_234_112, 134_217_728)
    assert [result.shape for result in found.results] == [(8192, 8192)]


def test_without_values_a_broadcast_last_tensor_is_an_input() -> None:
    found = price("triton_poi_fused_gelu_0", [FULL, BIAS], [N], values=False)
    assert moved(found) == 2 * size(FULL) + size(BIAS)
    found = price("triton_poi_fused_mul_silu_slice_0", [WIDE, FULL], [N], values=False)
    assert moved(found) == size(WIDE) + size(FULL)


def test_picked_and_placed_elements_count_once_per_iteration() -> None:
    table, places = (BF16, 128_000, W), (I64, X)
    found = price("triton_poi_fused_embedding_0", [places, table, FULL], [N])
    assert moved(found) == 8 * X + 2 * N + 2 * N
    found = price("triton_poi_fused_index_put_0", [places, FULL, table], [N])
    assert moved(found) == 8 * X + 2 * N + 2 * N


@pytest.mark.parametrize("name", ["triton_poi_fused_0", "triton_poi_fused_embedding_0"])
def test_a_row_of_a_table_is_read_per_index_if_the_loops_are_unknown(name: str) -> None:
    table, places = (BF16, 128_000, W), (I64, X)
    found = price(name, [places, table, FULL], [], values=False)
    assert moved(found) == 8 * X + 2 * N + 2 * N
    found = price(name, [(I64, 200_000), table, FULL], [], values=False)
    assert moved(found) == 8 * 200_000 + size(table) + 2 * N


def test_names_state_what_is_computed() -> None:
    found = price("triton_poi_fused_gelu_0", [FULL, BIAS], [N]).cost
    assert (found.flops, found.transcendentals) == (4.0 * N, N)
    found = price("triton_poi_fused_add_1_mul_2_silu_7", [FULL, FULL, FULL], [N]).cost
    assert (found.flops, found.transcendentals) == (3.0 * N, N)
    found = price("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", [FULL, BIAS, FULL], [X, W]).cost
    assert (found.flops, found.transcendentals) == (3.0 * N, 2.0 * N)
    product = price("triton_tem_fused_mm_4", [(BF16, 64, 32), (BF16, 32, 16), (BF16, 64, 16)], [4, 1, 1]).cost
    assert product.op_class is OpClass.CONTRACTION
    assert product.flops == 2 * 64 * 32 * 16
    assert [(row.m, row.n, row.k) for row in product.contractions] == [(64, 16, 32)]


@pytest.mark.parametrize(
    "name", ["triton_poi_fused_0", "triton_poi_fused_my_op_1", "triton_red_fused_clone_2"]
)
def test_a_name_that_does_not_state_it_leaves_the_work_unknown(name: str) -> None:
    assert isnan(price(name, [FULL, FULL], [X, W]).cost.flops)


def test_long_names_take_no_time() -> None:
    name = "triton_poi_fused_" + "add_mul_" * 40 + "x"
    assert isnan(price(name[:490], [FULL, FULL], [N]).cost.flops)
