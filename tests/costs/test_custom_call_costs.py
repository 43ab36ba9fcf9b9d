"""Known custom calls have their costs; others are unknown, never zero."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

import pytest

from hespas.costs.custom_calls import is_known_target
from hespas.costs.operation import FREE, ConvAttributes, Cost, CustomAttributes, Tensor, WindowDim
from hespas.graph import OpClass, dtype

MakeTensor = Callable[..., Tensor]
Price = Callable[..., Cost]
GEMM = (
    '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},'
    '"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]},"epilogue":"DEFAULT"}}'
)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_library_product_costs_a_dot_and_its_workspace_no_traffic(
    tensor: MakeTensor, price: Price, target: str
) -> None:
    x = tensor("bf16", 8192, 8192)
    cost = price("custom_call", [x, x], [x, tensor("ui8", 4 << 20)], CustomAttributes(target, GEMM), (1,))
    assert cost.op_class is OpClass.CONTRACTION
    assert cost.flops == 2 * 8192**3
    assert cost.rate_dtype == dtype("bf16").code
    assert cost.bytes_read == cost.bytes_written == 2 * 8192 * 8192


def test_library_product_without_dimension_numbers_is_unknown(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 8, 8)
    for config in ("", "{", "{}", '{"gemm_backend_config": 3}', "[1]"):
        assert isnan(price("custom_call", [x, x], [x], CustomAttributes("__cublas$gemm", config)).flops)


@pytest.mark.parametrize(
    ("target", "shapes"),
    [
        ("__cudnn$convForward", ("x", "k", "y")),
        ("__cudnn$convBackwardInput", ("y", "k", "x")),
        ("__cudnn$convBackwardFilter", ("x", "y", "k")),
    ],
)
def test_library_convolution_and_its_gradients_cost_the_forward_product(
    tensor: MakeTensor, price: Price, target: str, shapes: tuple[str, str, str]
) -> None:
    tensors = {
        "x": tensor("f32", 2, 8, 8, 4),
        "k": tensor("f32", 3, 3, 4, 16),
        "y": tensor("f32", 2, 6, 6, 16),
    }
    conv = ConvAttributes(0, 3, (1, 2), 2, 3, (0, 1), 0, 3, (1, 2), (WindowDim(3), WindowDim(3)))
    first, second, result = (tensors[name] for name in shapes)
    attributes = CustomAttributes(target, "", conv)
    cost = price("custom_call", [first, second], [result, tensor("ui8", 999)], attributes)
    assert cost.flops == 2 * 2 * 36 * 16 * 4 * 9
    assert cost.bytes_written == result.bytes


def test_fused_attention(tensor: MakeTensor, price: Price) -> None:
    q = tensor("bf16", 2, 128, 8, 64)
    config = (
        '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","8","128","128"]}}}'
    )
    forward = price("custom_call", [q, q, q], [q], CustomAttributes("__cudnn$fmhaSoftmax", config))
    backward = price(
        "custom_call", [q, q, q], [q, q, q], CustomAttributes("__cudnn$fmhaSoftmaxBackward", config)
    )
    assert forward.op_class is OpClass.ATTENTION
    assert forward.flops == 2 * 2 * (2 * 8 * 128 * 128 * 64)
    assert forward.transcendentals == 2 * 8 * 128 * 128
    assert backward.flops == 2.5 * forward.flops


def test_top_k(tensor: MakeTensor, price: Price) -> None:
    cost = price(
        "custom_call",
        [tensor("bf16", 2048, 8)],
        [tensor("bf16", 2048, 2), tensor("i32", 2048, 2)],
        CustomAttributes("TopK"),
    )
    assert (cost.op_class, cost.flops) == (OpClass.SORT, 2048 * 8)
    assert cost.bytes_written == 2048 * 2 * (2 + 4)


def test_kernel_that_states_its_cost(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 8)
    stated = '{"custom_call_config":{"cost_estimate":{"flops":100,"transcendentals":7,"bytes_accessed":96}}}'
    cost = price("custom_call", [x], [x], CustomAttributes("tpu_custom_call", stated))
    assert (cost.flops, cost.transcendentals, cost.bytes_read, cost.bytes_written) == (100, 7, 64, 32)
    assert isnan(price("custom_call", [x], [x], CustomAttributes("tpu_custom_call", "{}")).flops)


@pytest.mark.parametrize("target", ["lapack_spotrf_ffi", "cusolver_potrf_ffi", "lapack_dpotrf"])
def test_dense_factorisation(tensor: MakeTensor, price: Price, target: str) -> None:
    a = tensor("f32", 3, 60, 60)
    cost = price("custom_call", [a], [a, tensor("i32", 3)], CustomAttributes(target))
    assert is_known_target(target)
    assert (cost.op_class, cost.flops) == (OpClass.LINALG, 3 * 60**3 / 3)


def test_tall_and_wide_matrices_factorise_at_the_same_cost(tensor: MakeTensor, price: Price) -> None:
    attributes = CustomAttributes("lapack_sgesdd_ffi")
    tall, wide = tensor("f32", 90, 30), tensor("f32", 30, 90)
    one, other = (price("custom_call", [matrix], [matrix], attributes) for matrix in (tall, wide))
    assert one.flops == other.flops > 0


def test_annotations_are_free_and_host_copies_are_not(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 16)
    assert price("custom_call", [x], [x], CustomAttributes("Sharding")) is FREE
    assert price("custom_call", [x], [x], CustomAttributes("SPMDFullToShardShape")) is FREE
    copy = price("custom_call", [x], [x], CustomAttributes("MoveToHost"))
    assert (copy.op_class, copy.bytes_read) == (OpClass.HOST, 64)


def test_unknown_target_is_unknown_with_bytes_as_a_lower_bound(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 16)
    cost = price("custom_call", [x], [x], CustomAttributes("acme_block"))
    assert not is_known_target("acme_block")
    assert isnan(cost.flops)
    assert (cost.bytes_read, cost.bytes_written) == (64, 64)


def _attention(tensor: MakeTensor, layout: str) -> tuple[list[Tensor], list[Tensor]]:
    """Operands and results of a fused attention: batch 2, 512 queries of 8 heads of 64."""
    empty = tensor("bf16", 0)
    made = {
        "apart": [
            tensor("bf16", 2, 512, 8, 64),
            tensor("bf16", 2, 256, 4, 64),
            tensor("bf16", 2, 256, 4, 64),
        ],
        "kv": [tensor("bf16", 2, 512, 8, 64), tensor("bf16", 2, 256, 2, 4, 64), empty],
        "qkv": [tensor("bf16", 2, 512, 3, 8, 64), empty, empty],
    }[layout]
    results = [tensor("bf16", 2, 512, 8, 64), tensor("f32", 2, 8, 512, 1), tensor("ui8", 1 << 20)]
    return [*made, empty, tensor("ui32", 2)], results


@pytest.mark.parametrize(("layout", "keys"), [("apart", 256), ("kv", 256), ("qkv", 512)])
@pytest.mark.parametrize(
    "target", ["te_fused_attn_forward_ffi", "te_fused_attn_forward", "te_fused_attn_backward_ffi"]
)
def test_fused_attention_of_transformer_engine_costs_its_products(
    tensor: MakeTensor, price: Price, layout: str, keys: int, target: str
) -> None:
    products = 5 if "backward" in target else 2
    operands, results = _attention(tensor, layout)
    cost = price("custom_call", operands, results, CustomAttributes(target, "{mask_type = 0 : i64}"))
    assert cost.op_class is OpClass.ATTENTION
    assert cost.flops == cost.useful_flops == products * 2 * 2 * 8 * 512 * keys * 64
    assert cost.transcendentals == 2 * 8 * 512 * keys
    assert cost.rate_dtype == dtype("bf16").code
    assert cost.bytes_written == 2 * 512 * 8 * 64 * 2 + 2 * 8 * 512 * 4, "workspace is no traffic"
    causal = price("custom_call", operands, results, CustomAttributes(target, "{mask_type = 2 : i64}"))
    assert causal.useful_flops == cost.flops / 2


def test_fused_attention_of_unknown_extents_is_unknown(tensor: MakeTensor, price: Price) -> None:
    query = tensor("bf16", 2, -1, 8, 64)
    attributes = CustomAttributes("te_fused_attn_forward_ffi", "")
    assert isnan(price("custom_call", [query, query, query], [query], attributes).flops)
    assert isnan(price("custom_call", [query], [query], attributes).flops)


@pytest.mark.parametrize("target", ["ApproxTopK", "PartialReduce"])
def test_an_approximate_top_k_compares_each_element_once(
    tensor: MakeTensor, price: Price, target: str
) -> None:
    operands = [tensor("f32", 64, 1024), tensor("i32", 64, 1024), tensor("f32"), tensor("i32")]
    results = [tensor("f32", 64, 8), tensor("i32", 64, 8)]
    cost = price("custom_call", operands, results, CustomAttributes(target, ""))
    assert (cost.op_class, cost.flops) == (OpClass.SORT, 64 * 1024)
    assert cost.bytes_read == 64 * 1024 * 8 + 8
    assert is_known_target(target)
