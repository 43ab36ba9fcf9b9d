"""Known custom calls cost what they do; others are unknown, never zero."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan

import pytest

from hespas.converters.costs import FREE, ConvFacts, Cost, CustomFacts, Tensor, WindowDim, is_known_target
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
    cost = price("custom_call", [x, x], [x, tensor("ui8", 4 << 20)], CustomFacts(target, GEMM), (1,))
    assert cost.op_class is OpClass.CONTRACTION
    assert cost.flops == 2 * 8192**3
    assert cost.rate_dtype == dtype("bf16").code
    assert cost.bytes_read == cost.bytes_written == 2 * 8192 * 8192


def test_library_product_without_dimension_numbers_is_unknown(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 8, 8)
    for config in ("", "{", "{}", '{"gemm_backend_config": 3}', "[1]"):
        assert isnan(price("custom_call", [x, x], [x], CustomFacts("__cublas$gemm", config)).flops)


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
    conv = ConvFacts(0, 3, (1, 2), 2, 3, (0, 1), 0, 3, (1, 2), (WindowDim(3), WindowDim(3)))
    first, second, result = (tensors[name] for name in shapes)
    facts = CustomFacts(target, "", conv)
    cost = price("custom_call", [first, second], [result, tensor("ui8", 999)], facts)
    assert cost.flops == 2 * 2 * 36 * 16 * 4 * 9
    assert cost.bytes_written == result.bytes


def test_fused_attention(tensor: MakeTensor, price: Price) -> None:
    q = tensor("bf16", 2, 128, 8, 64)
    config = (
        '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","8","128","128"]}}}'
    )
    forward = price("custom_call", [q, q, q], [q], CustomFacts("__cudnn$fmhaSoftmax", config))
    backward = price("custom_call", [q, q, q], [q, q, q], CustomFacts("__cudnn$fmhaSoftmaxBackward", config))
    assert forward.op_class is OpClass.ATTENTION
    assert forward.flops == 2 * 2 * (2 * 8 * 128 * 128 * 64)
    assert forward.transcendentals == 2 * 8 * 128 * 128
    assert backward.flops == 2.5 * forward.flops


def test_top_k(tensor: MakeTensor, price: Price) -> None:
    cost = price(
        "custom_call",
        [tensor("bf16", 2048, 8)],
        [tensor("bf16", 2048, 2), tensor("i32", 2048, 2)],
        CustomFacts("TopK"),
    )
    assert (cost.op_class, cost.flops) == (OpClass.SORT, 2048 * 8)
    assert cost.bytes_written == 2048 * 2 * (2 + 4)


def test_kernel_that_states_its_cost(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 8)
    stated = '{"custom_call_config":{"cost_estimate":{"flops":100,"transcendentals":7,"bytes_accessed":96}}}'
    cost = price("custom_call", [x], [x], CustomFacts("tpu_custom_call", stated))
    assert (cost.flops, cost.transcendentals, cost.bytes_read, cost.bytes_written) == (100, 7, 64, 32)
    assert isnan(price("custom_call", [x], [x], CustomFacts("tpu_custom_call", "{}")).flops)


@pytest.mark.parametrize("target", ["lapack_spotrf_ffi", "cusolver_potrf_ffi", "lapack_dpotrf"])
def test_dense_factorisation(tensor: MakeTensor, price: Price, target: str) -> None:
    a = tensor("f32", 3, 60, 60)
    cost = price("custom_call", [a], [a, tensor("i32", 3)], CustomFacts(target))
    assert is_known_target(target)
    assert (cost.op_class, cost.flops) == (OpClass.LINALG, 3 * 60**3 / 3)


def test_tall_and_wide_matrices_factorise_at_the_same_cost(tensor: MakeTensor, price: Price) -> None:
    facts = CustomFacts("lapack_sgesdd_ffi")
    tall, wide = tensor("f32", 90, 30), tensor("f32", 30, 90)
    one, other = (price("custom_call", [matrix], [matrix], facts) for matrix in (tall, wide))
    assert one.flops == other.flops > 0


def test_annotations_are_free_and_host_copies_are_not(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 16)
    assert price("custom_call", [x], [x], CustomFacts("Sharding")) is FREE
    assert price("custom_call", [x], [x], CustomFacts("SPMDFullToShardShape")) is FREE
    copy = price("custom_call", [x], [x], CustomFacts("MoveToHost"))
    assert (copy.op_class, copy.bytes_read) == (OpClass.HOST, 64)


def test_unknown_target_is_unknown_with_bytes_as_a_lower_bound(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 16)
    cost = price("custom_call", [x], [x], CustomFacts("acme_block"))
    assert not is_known_target("acme_block")
    assert isnan(cost.flops)
    assert (cost.bytes_read, cost.bytes_written) == (64, 64)
