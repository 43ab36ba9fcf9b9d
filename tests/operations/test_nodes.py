"""Kinds, names, number formats and sizes of operations of single nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan

import numpy as np
import pytest

from hespas.graph import CollectiveKind, GraphBuilder, NodeKind, OpClass, OpGraph, Permutation, StridedGroups
from hespas.graph import dtype as dtype_of
from hespas.operations import Operations, operations_of
from hespas.operations.from_graph import arithmetic_dtype
from hespas.operations.tiles import TILED

Shape = tuple[int, ...]


def node_of(
    made: GraphBuilder,
    op: str,
    op_class: OpClass,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    *,
    element: str = "f32",
    kind: NodeKind = NodeKind.COMPUTE,
    flops: float = 0.0,
    moved: float = nan,
) -> int:
    """Add a node whose tensors have one element type."""
    rows = [made.types.add(dtype_of(element), shape) for shape in (*operands, *results)]
    return made.add_node(
        name_id=made.strings.add(op),
        op_id=made.strings.add(op),
        op_class=op_class,
        kind=kind,
        operands=rows[: len(operands)],
        results=rows[len(operands) :],
        flops=flops,
        bytes_read=moved,
        bytes_written=0.0,
    )


def single(
    op: str,
    op_class: OpClass,
    operands: Sequence[Shape],
    results: Sequence[Shape],
    *,
    flops: float = 0.0,
    moved: float = nan,
) -> OpGraph:
    made = GraphBuilder("one")
    node_of(made, op, op_class, operands, results, flops=flops, moved=moved)
    return made.build()


def sizes(ops: Operations, *names: str, node: int = 0) -> list[float]:
    return [float(ops.dim(name)[node]) for name in names]


# --- products


def product(
    lhs: str, rhs: str, *, products: int = 1, count: int = 1, op_class: OpClass = OpClass.CONTRACTION
) -> Operations:
    made = GraphBuilder("product")
    node = node_of(made, "dot_general", op_class, [(3, 5, 7), (3, 7, 11)], [(3, 5, 11)])
    for _ in range(count):
        made.add_contraction(
            node, batch=3, m=5, n=11, k=7, flops=2.0 * 3 * 5 * 11 * 7, useful_flops=2.0 * 3 * 5 * 11 * 7,
            lhs=dtype_of(lhs).code, rhs=dtype_of(rhs).code, accumulator=dtype_of("f32").code,
            products=products,
        )  # fmt: skip
    return operations_of(made.build())


@pytest.mark.parametrize(
    ("lhs", "rhs", "products", "scheme"),
    [
        ("bf16", "bf16", 1, "bf16"),
        ("f32", "f32", 1, "f32"),
        ("f32", "f32", 3, "f32"),
        ("f32", "f32", 6, "f32_full"),
        ("bf16", "f32", 6, "f32"),
        ("f32", "bf16", 6, "f32"),
        ("f64", "f64", 6, "f64"),
        ("f8E4M3FN", "bf16", 1, "bf16"),
        ("bf16", "f8E4M3FN", 1, "bf16"),
        ("bf16", "i8", 1, "int8_wo"),
        ("i8", "bf16", 1, "int8_wo"),
        ("i4", "f16", 1, "int4_wo"),
        ("i1", "i1", 1, "i1"),
    ],
)
def test_number_format_of_a_product(lhs: str, rhs: str, products: int, scheme: str) -> None:
    """Weights of integers, emulated f32, or the wider operand."""
    ops = product(lhs, rhs, products=products)
    assert ops.scheme[0] == scheme
    assert ops.kind[0] == "matmul"
    assert ops.op[0] == ""
    assert sizes(ops, "batch", "m", "n", "k") == [3, 5, 11, 7]
    assert np.isnan(sizes(ops, "rows", "columns")).all()


@pytest.mark.parametrize(
    ("lhs", "rhs", "tiles"), [("bf16", "mxfp4", 1.0), ("mxfp4", "mxfp4", 0.0), ("bf16", "i4", 0.0)]
)
def test_tiles_of_a_product_expand_weights_of_4_bits(lhs: str, rhs: str, tiles: float) -> None:
    """Weights of whole numbers have tables of their own."""
    assert product(lhs, rhs).dim("expanded").tolist() == [tiles * 3 * 7 * 11]


@pytest.mark.parametrize(
    ("lhs", "rhs", "scheme"), [(-1, 0, ""), (0, -1, ""), (dtype_of("f16").code, dtype_of("f16").code, "f16")]
)
def test_unknown_types_and_extents_of_a_product(lhs: int, rhs: int, scheme: str) -> None:
    """An extent of 0 is known."""
    made = GraphBuilder("product")
    node = node_of(made, "dot", OpClass.CONTRACTION, [], [])
    made.add_contraction(
        node, batch=1, m=0, n=-1, k=7, flops=nan, useful_flops=nan, lhs=lhs, rhs=rhs, accumulator=-1
    )
    ops = operations_of(made.build())
    assert ops.scheme[0] == scheme
    assert sizes(ops, "batch", "m", "n", "k") == pytest.approx([1, 0, nan, 7], nan_ok=True)


def test_nodes_with_several_products_stay_what_they_are() -> None:
    ops = product("bf16", "bf16", count=2, op_class=OpClass.FUSION)
    assert ops.kind[0] == operations_of(single("fusion", OpClass.FUSION, [(4,)], [(4,)])).kind[0]
    assert np.isnan(sizes(ops, "batch", "m", "n", "k")).all()


def test_a_convolution_is_the_product_it_is_equal_to() -> None:
    assert product("bf16", "bf16", op_class=OpClass.CONVOLUTION).kind[0] == "convolution"


# --- attention and experts


@pytest.mark.parametrize(
    ("op", "query", "key"),
    [
        ("aten::_scaled_dot_product_flash_attention", (2, 8, 300, 64), (2, 4, 700, 64)),
        ("flash_attn::_flash_attn_forward", (2, 300, 8, 64), (2, 700, 4, 64)),
    ],
)
def test_sizes_of_attention(op: str, query: Shape, key: Shape) -> None:
    """PyTorch puts heads before the length, libraries after it. A causal mask leaves a part of the pairs."""
    pairs = 300 * 301 / 2 + 300 * 400
    ops = operations_of(
        single(op, OpClass.ATTENTION, [query, key, key], [query], flops=4 * 2 * 8 * 64 * pairs)
    )
    assert ops.kind[0] == "attention.context"
    assert sizes(ops, "batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "pairs") == [
        2, 300, 700, 8, 4, 64, pairs,
    ]  # fmt: skip


def test_one_query_is_generation() -> None:
    """The batch and the length of keys do not decide."""
    graph = single("flash", OpClass.ATTENTION, [(1, 1, 8, 64), (1, 700, 4, 64)], [(1, 1, 8, 64)], flops=1.0)
    ops = operations_of(graph)
    assert ops.kind[0] == "attention.generation"
    assert sizes(ops, "batch", "kv_len", "heads", "kv_heads", "head_dim") == [1, 700, 8, 4, 64]
    assert np.isnan(sizes(ops, "q_len", "pairs")).all()
    one_key = single("flash", OpClass.ATTENTION, [(1, 9, 8, 64), (1, 1, 4, 64)], [(1, 9, 8, 64)], flops=1.0)
    assert operations_of(one_key).kind[0] == "attention.context"


@pytest.mark.parametrize(
    ("keys", "kind", "expected"),
    [
        # 15 prompts of 1024 tokens, each of which sees the ones before it.
        (512.0, "attention.context", [15, 1024, 1024, 32, 8, 128]),
        # More keys than such prompts have: one new token of each sequence.
        (8000.0, "attention.generation", [15360, nan, 8000, 32, 8, 128]),
    ],
)
def test_sizes_of_packed_attention_follow_from_its_flops(
    keys: float, kind: str, expected: list[float]
) -> None:
    query = (15360, 32, 128)
    flops = 4 * 15360 * 32 * 128 * keys
    for cache in ((835874, 8, 128), (52242, 16, 8, 128)):  # tokens, or pages of tokens
        graph = single("mha", OpClass.ATTENTION, [query, cache, cache], [query], flops=flops)
        ops = operations_of(graph)
        assert ops.kind[0] == kind
        names = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")
        assert sizes(ops, *names) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "expected"), [("aten::_flash_attention_forward", 0.0), ("aiter::mha", 1.0), ("flash", nan)]
)
def test_names_state_if_a_library_has_the_kernel_of_attention(name: str, expected: float) -> None:
    query = (2, 300, 8, 64)
    ops = operations_of(single(name, OpClass.ATTENTION, [query, query], [query], flops=1e9))
    assert ops.dim("of_library").tolist() == pytest.approx([expected], nan_ok=True)


def test_a_causal_mask_leaves_half_of_the_pairs() -> None:
    query = (2, 8, 300, 64)
    whole = 4 * 2 * 8 * 64 * 300.0 * 300
    name = "aten::_scaled_dot_product_flash_attention"
    graph = single(name, OpClass.ATTENTION, [query, query], [query], flops=whole)
    causal = replace(graph, useful_flops=np.array([whole / 2]))
    assert sizes(operations_of(graph), "pairs") == [300 * 300]
    assert sizes(operations_of(causal), "pairs") == [300 * 300 / 2]


@pytest.mark.parametrize("shape", [(2, 8, 300), (2, -1, 8, 64), (2, 0, 8, 64)])
def test_attention_of_unknown_sizes(shape: Shape) -> None:
    graph = single("flash", OpClass.ATTENTION, [shape, (2, 700, 4, 64)], [shape], flops=1.0)
    assert np.isnan(sizes(operations_of(graph), "kv_len", "heads")).all()


def test_attention_of_unknown_sizes_beside_a_known_one() -> None:
    made = GraphBuilder("two")
    for batch in (-1, 2):
        shape = (batch, 8, 300, 64)
        node_of(made, "aten::scaled_dot_product", OpClass.ATTENTION, [shape, shape], [shape], flops=1.0)
    ops = operations_of(made.build())
    assert ops.dim("kv_len").tolist() == pytest.approx([nan, 300], nan_ok=True)
    assert np.isnan(ops.dim("rows")).all()


EXPERTS: list[Shape] = [(100, 512), (8, 2 * 256, 512), (8, 512, 256), (100, 32), (100, 4)]


def test_sizes_of_fused_experts() -> None:
    """8 of 32 experts are on one of 4 ranks; a gate doubles the first matrix."""
    ops = operations_of(single("fused_moe", OpClass.CONTRACTION, EXPERTS, [(100, 512)]))
    assert ops.kind[0] == "moe"
    names = ("tokens", "hidden", "inter", "topk", "experts", "tensor_parallel", "expert_parallel", "matrices")
    assert sizes(ops, *names) == [100, 512, 256, 4, 32, 1, 4, 3]
    plain = [*EXPERTS[:1], (8, 256, 512), *EXPERTS[2:]]
    assert sizes(
        operations_of(single("fused_moe", OpClass.CONTRACTION, plain, [(100, 512)])), "matrices"
    ) == [2]


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        ("fused_moe", EXPERTS[:4]),
        ("fused_moe", [*EXPERTS, (1,)]),
        ("fused_moe", [*EXPERTS[:4], (100, 4, 1)]),
        ("fused_moe", [(-1, 512), *EXPERTS[1:]]),
        ("other_moe", EXPERTS),
    ],
)
def test_other_operands_are_not_experts(op: str, operands: list[Shape]) -> None:
    assert operations_of(single(op, OpClass.CONTRACTION, operands, [(100, 512)])).kind[0] != "moe"


# --- communication


def test_collectives_and_messages() -> None:
    """Collectives have the ranks of their groups, or all; messages have two. Messages to the host, and to the
    rank itself, are not between ranks.
    """
    made = GraphBuilder("communication")
    groups = (made.group_set(StridedGroups(((2, 4),), ((4, 1),))), -1)
    for group_set, kind in zip(groups, (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE), strict=True):
        node = node_of(made, "comm", OpClass.COLLECTIVE, [], [], kind=NodeKind.COLLECTIVE)
        made.add_collective(node, kind, group_set=group_set, comm_bytes=5e6)
    shifts = (
        Permutation(8, (8, 1), 1, True),
        Permutation(8, (8, 1), 8, True),
        Permutation(8, (8, 1), 1, True),
    )
    for shift, host in zip(shifts, (False, False, True), strict=True):
        node = node_of(made, "send", OpClass.P2P, [], [], kind=NodeKind.SEND)
        made.add_p2p(node, permutation=made.permutation(shift), comm_bytes=3e6, host=host)
    node_of(made, "add", OpClass.ELEMENTWISE, [(2, 3)], [(2, 3)])
    graph = made.build()
    ops = operations_of(graph, num_ranks=16)
    assert list(ops.kind)[:3] == ["collective"] * 3
    assert list(ops.op)[:3] == ["all_gather", "all_reduce", "permute"]
    assert list(ops.kind)[3:] == ["other", "other", "vector"]
    assert ops.op[5] == "add"
    assert ops.dim("ranks").tolist() == pytest.approx([4, 16, 2, nan, nan, nan], nan_ok=True)
    assert ops.dim("message_bytes").tolist() == pytest.approx([5e6, 5e6, 3e6, nan, nan, nan], nan_ok=True)
    for unknown in (0, -1):
        assert np.isnan(operations_of(graph, num_ranks=unknown).dim("ranks")[1])
    assert operations_of(graph, num_ranks=1).dim("ranks")[1] == 1


# --- streams


@pytest.mark.parametrize(
    ("op_class", "operand", "result", "expected"),
    [
        (OpClass.REDUCTION, (6, 4, 8), (6, 4), [24, 8]),
        (OpClass.NORMALIZATION, (6, 4, 8), (6, 4, 8), [24, 8]),
        (OpClass.GATHER, (600, 8), (6, 8), [6, 8]),
        (OpClass.MOVE, (8,), (4, 8), [4, 8]),
        (OpClass.MOVE, (), (), [1, 1]),
        (OpClass.MOVE, (-1, 8), (4, 8), [4, 8]),
        (OpClass.MOVE, (4, 8), (-1, 8), [4, 8]),
    ],
)
def test_extents_of_the_larger_tensor(
    op_class: OpClass, operand: Shape, result: Shape, expected: list[float]
) -> None:
    """Of a gather it is the result: only a part of the operand is read."""
    ops = operations_of(single("op", op_class, [operand], [result]))
    assert sizes(ops, "rows", "columns") == expected


@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        (nan, [100, 8]),
        (1e6, [100, 8]),
        (3200.0, [100, 8]),
        (3199.0, [10, 8]),
        (100.0, [1, 8]),
        (10.0, [100, 8]),
    ],
)
def test_extents_of_the_largest_tensor_that_was_moved(moved: float, expected: list[float]) -> None:
    """An update in place moves less than its operand has; nothing fits 10 bytes."""
    operands = [(100, 8), (10, 8), (1, 8)]
    ops = operations_of(single("op", OpClass.MOVE, operands, [(100, 8)], moved=moved))
    assert sizes(ops, "rows", "columns") == expected


def test_padding_of_the_tensor_that_decides() -> None:
    """100 x 8 elements are 104 x 128 in whole tiles of a TPU; rows and columns may change places: 8 x 128."""
    made = GraphBuilder("tiles")
    node_of(made, "op", OpClass.REDUCTION, [(100, 8)], [(100,)])
    node_of(made, "op", OpClass.REDUCTION, [(-1, 8)], [(-1,)])
    node_of(made, "token", OpClass.CONTROL, [], [])
    graph = made.build()
    assert TILED not in operations_of(graph).dims
    padding = operations_of(graph, tiled=True).dim(TILED)
    assert padding.tolist() == pytest.approx([8 * 128 / 800, nan, nan], nan_ok=True)


def test_element_type_of_a_node() -> None:
    """The stated type, else the type of the first operand, else of the first result."""
    made = GraphBuilder("types")
    node_of(made, "a", OpClass.ELEMENTWISE, [(2,)], [(2,)], element="bf16")
    made.set(0, rate_dtype=dtype_of("f16").code)
    node_of(made, "b", OpClass.ELEMENTWISE, [(2,)], [(2,)], element="f64")
    node_of(made, "c", OpClass.ELEMENTWISE, [], [(2,)], element="i8")
    node_of(made, "d", OpClass.CONTROL, [], [])
    graph = made.build()
    assert list(operations_of(graph).scheme) == ["f16", "f64", "i8", ""]
    codes = [dtype_of(name).code for name in ("f16", "f64", "i8", "f32")]
    assert arithmetic_dtype(graph, dtype_of("f32").code).tolist() == codes
