"""The cost table has a row for every operation, equal to the specification."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from math import isnan

import pytest

from hespas.costs.contraction import config_precision, named_algorithm
from hespas.costs.operation import (
    FREE,
    Body,
    BodyAttributes,
    BroadcastAttributes,
    Cost,
    DotAttributes,
    EinsumAttributes,
    FftAttributes,
    Precision,
    RaggedDotAttributes,
    ScatterAttributes,
    SelectScatterAttributes,
    SolveAttributes,
    Tensor,
    TopKAttributes,
    UpdateAttributes,
    WindowAttributes,
    WindowDim,
)
from hespas.costs.table import HLO_ALIASES, TABLE, canonical_name, find_rule
from hespas.graph import OpClass, dtype

MakeTensor = Callable[..., Tensor]
Price = Callable[..., Cost]
ADD = Body(1.0, 0.0, "add")


def op_names(dialect: str) -> list[str]:
    """Every operation class of a dialect that jaxlib ships."""
    pytest.importorskip("jaxlib.mlir.ir")
    module = import_module(f"jaxlib.mlir.dialects._{dialect}_ops_gen")
    classes = [entry for _, entry in inspect.getmembers(module, inspect.isclass)]
    names = [getattr(entry, "OPERATION_NAME", None) for entry in classes]
    return sorted({name for name in names if isinstance(name, str)})


@pytest.mark.parametrize("dialect", ["stablehlo", "chlo", "mhlo"])
def test_every_operation_of_the_dialect_has_a_rule(dialect: str) -> None:
    names = op_names(dialect)
    assert len(names) >= 50
    assert [name for name in names if find_rule(name) is None] == []


def test_the_stablehlo_specification_has_117_operations_and_all_are_in_the_table() -> None:
    names = op_names("stablehlo")
    assert len(names) == 117
    assert {canonical_name(name) for name in names} <= TABLE.keys()


_OF_HLO = frozenset(
    {"copy_done", "copy_start", "parameter", "ragged_all_to_all", "recv_done", "send_done"}
    | {"collective_reduce"}  # of a later StableHLO than jaxlib's
)
"""Rows of operations that jaxlib's dialects do not have."""


def test_the_table_has_no_row_of_an_operation_that_does_not_exist() -> None:
    dialects = ("stablehlo", "chlo", "mhlo", "sdy", "func")
    known = {canonical_name(name) for dialect in dialects for name in op_names(dialect)}
    assert TABLE.keys() - known == _OF_HLO


def test_hlo_opcodes_share_the_rules() -> None:
    assert set(HLO_ALIASES.values()) <= TABLE.keys()
    for opcode, name in {
        "exponential-minus-one": "exponential_minus_one",
        "all-reduce-start": "all_reduce",
        "dynamic-update-slice": "dynamic_update_slice",
        "round-nearest-afz": "round_nearest_afz",
        "convolution": "convolution",
        "count-leading-zeros": "count_leading_zeros",
        "cosine": "cosine",
        "dot": "dot",
    }.items():
        assert canonical_name(opcode) == name
        assert find_rule(opcode) is TABLE[name]


def test_an_operation_nobody_knows_is_unknown_and_keeps_its_bytes(tensor: MakeTensor, price: Price) -> None:
    cost = price("acme.frobnicate", [tensor("f32", 8)], [tensor("f32", 16)])
    assert cost.op_class is OpClass.UNKNOWN
    assert isnan(cost.flops)
    assert isnan(cost.transcendentals)
    assert (cost.bytes_read, cost.bytes_written) == (32.0, 64.0)
    assert not cost.is_known


def test_elementwise_reads_a_repeated_operand_once(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 8, 16)
    assert price("add", [x, x], [x]) == Cost(OpClass.ELEMENTWISE, 128, 128, 0, 1024, 512, dtype("f32").code)
    assert price("multiply", [x, x], [x], repeated=(1,)).bytes_read == 512


def test_a_tensor_concatenated_many_times_is_read_once(tensor: MakeTensor, price: Price) -> None:
    count = 100_000  # a search of the list of repeats for each operand would take minutes
    x, y = tensor("f32", 128), tensor("f32", 128 * count)
    cost = price("concatenate", [x] * count, [y], repeated=tuple(range(1, count)))
    assert (cost.bytes_read, cost.bytes_written) == (512, 512 * count)


def test_complex_arithmetic(tensor: MakeTensor, price: Price) -> None:
    z = tensor("c64", 10)
    assert price("add", [z, z], [z]).flops == 20
    assert price("multiply", [z, z], [z]).flops == 60


def test_clamp_reads_scalar_bounds(tensor: MakeTensor, price: Price) -> None:
    x, scalar = tensor("f32", 100), tensor("f32")
    cost = price("clamp", [scalar, x, scalar], [x])
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (200, 408, 400)


def test_select_counts_its_predicate_at_one_byte_an_element(tensor: MakeTensor, price: Price) -> None:
    cost = price("select", [tensor("i1", 64), tensor("f32", 64), tensor("f32", 64)], [tensor("f32", 64)])
    assert cost.bytes_read == 64 + 256 + 256
    assert cost.rate_dtype == dtype("f32").code


def test_transcendentals_are_counted_apart_and_power_reads_both_operands(
    tensor: MakeTensor, price: Price
) -> None:
    x = tensor("f32", 32)
    tanh, power = price("tanh", [x], [x]), price("power", [x, x], [x])
    assert (tanh.flops, tanh.transcendentals) == (0, 32)
    assert (power.transcendentals, power.bytes_read) == (32, 256)


def test_boolean_operands_take_a_byte_each(tensor: MakeTensor, price: Price) -> None:
    mask = tensor("i1", 8192, 8192)
    cost = price("and", [mask, mask], [mask])
    assert cost.bytes_read + cost.bytes_written == 3 * 8192 * 8192


@pytest.mark.parametrize(("element", "expected"), [("i4", 13), ("f4E2M1FN", 13), ("f8E4M3FN", 25), ("i2", 7)])
def test_sub_byte_storage_is_packed(tensor: MakeTensor, price: Price, element: str, expected: int) -> None:
    x = tensor(element, 25)
    assert price("negate", [x], [x]).bytes_read == expected


def test_unknown_extents_make_figures_unknown(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", -1, 1024)
    cost = price("add", [x, x], [x])
    assert isnan(cost.flops)
    assert isnan(cost.bytes_read)
    assert isnan(cost.bytes_written)


def test_views_are_free_and_moves_are_not(tensor: MakeTensor, price: Price) -> None:
    x, y = tensor("f32", 16, 16), tensor("f32", 256)
    assert price("reshape", [x], [y]) is FREE
    assert price("bitcast_convert", [x], [tensor("i32", 16, 16)]) is FREE
    assert price("bitcast_convert", [x], [tensor("i8", 16, 16, 4)]).bytes_read == 1024
    transpose = price("transpose", [x], [x])
    assert (transpose.bytes_read, transpose.bytes_written, transpose.flops) == (1024, 1024, 0)
    assert price("reshape", [tensor("f32", -1)], [tensor("f32", -1)]).is_known


def test_broadcast_is_fused_unless_said_otherwise(tensor: MakeTensor, price: Price) -> None:
    x, y = tensor("f32", 16), tensor("f32", 16, 64)
    assert price("broadcast_in_dim", [x], [y]).bytes_written == 0
    real = price("broadcast_in_dim", [x], [y], BroadcastAttributes(materialised=True))
    assert (real.bytes_read, real.bytes_written) == (64, 4096)


def test_dot_extents_and_rate_key(tensor: MakeTensor, price: Price) -> None:
    lhs, rhs, out = tensor("bf16", 4, 32, 64), tensor("bf16", 4, 64, 16), tensor("f32", 4, 32, 16)
    cost = price("dot_general", [lhs, rhs], [out], DotAttributes((0,), (0,), (2,), (1,)))
    (product,) = cost.contractions
    assert cost.flops == 2 * 4 * 32 * 64 * 16
    assert (product.batch, product.m, product.n, product.k) == (4, 32, 16, 64)
    assert cost.rate_dtype == product.lhs == product.rhs == dtype("bf16").code
    assert product.accumulator == dtype("f32").code


def test_weight_only_quantised_dot_runs_at_the_wider_operand(tensor: MakeTensor, price: Price) -> None:
    cost = price("dot", [tensor("bf16", 8, 32), tensor("i4", 32, 8)], [tensor("bf16", 8, 8)])
    assert cost.rate_dtype == dtype("bf16").code
    assert cost.bytes_read == 8 * 32 * 2 + 32 * 8 // 2


def test_complex_dot_is_four_real_ones(tensor: MakeTensor, price: Price) -> None:
    cost = price("dot", [tensor("c64", 2, 3), tensor("c64", 3, 5)], [tensor("c64", 2, 5)])
    assert cost.flops == 4 * 2 * 2 * 3 * 5


def test_algorithm_outranks_precision_and_types(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 8, 8)

    def product(precision: Precision) -> tuple[int, int, int]:
        (only,) = price("dot", [x, x], [x], DotAttributes((), (), (1,), (0,), precision)).contractions
        return only.lhs, only.accumulator, only.products

    f32, bf16 = dtype("f32").code, dtype("bf16").code
    assert product(config_precision(("DEFAULT", "DEFAULT"))) == (f32, f32, 1)
    assert product(config_precision(("DEFAULT", "HIGH"))) == (f32, f32, 3)
    assert product(config_precision(("highest", "default"))) == (f32, f32, 6)
    assert product(named_algorithm("dot_bf16_bf16_f32_x3")) == (bf16, f32, 3)
    assert product(named_algorithm("dot_tf32_tf32_f32")) == (dtype("tf32").code, f32, 1)
    assert product(named_algorithm("dot_any_f8_any_f8_f32")) == (f32, f32, 1)


def test_highest_precision_multiplies_f32_products_only(tensor: MakeTensor, price: Price) -> None:
    x = tensor("bf16", 8, 8)
    attributes = DotAttributes((), (), (1,), (0,), config_precision(("HIGHEST",)))
    assert price("dot", [x, x], [x], attributes).contractions[0].products == 1


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("ij,jk->ik", ((4, 8), (8, 16), (4, 16)), 2 * 4 * 8 * 16),
        ("bij,bjk->bik", ((3, 4, 8), (3, 8, 16), (3, 4, 16)), 2 * 3 * 4 * 8 * 16),
        ("i,j->ij", ((4,), (8,), (4, 8)), 2 * 4 * 8),
    ],
)
def test_einsum(
    tensor: MakeTensor, price: Price, equation: str, shapes: tuple[tuple[int, ...], ...], flops: int
) -> None:
    lhs, rhs, out = (tensor("f32", *shape) for shape in shapes)
    assert price("einsum", [lhs, rhs], [out], EinsumAttributes(equation)).flops == flops


def test_unary_einsum_is_a_sum(tensor: MakeTensor, price: Price) -> None:
    cost = price("unary_einsum", [tensor("f32", 4, 8)], [tensor("f32", 4)], EinsumAttributes("ij->i"))
    assert (cost.op_class, cost.flops) == (OpClass.REDUCTION, 28)


def test_ragged_dot_multiplies_each_row_once(tensor: MakeTensor, price: Price) -> None:
    lhs, rhs, sizes = tensor("f32", 48, 16), tensor("f32", 3, 16, 24), tensor("i64", 3)
    attributes = RaggedDotAttributes(DotAttributes((), (), (1,), (1,)), 0)
    cost = price("ragged_dot", [lhs, rhs, sizes], [tensor("f32", 48, 24)], attributes)
    assert cost.flops == 2 * 48 * 16 * 24
    assert cost.bytes_read == 4 * (48 * 16 + 3 * 16 * 24) + 24


def test_variadic_reduce_reads_every_input(tensor: MakeTensor, price: Price) -> None:
    x, index, init, zero = tensor("f32", 128, 64), tensor("i32", 128, 64), tensor("f32"), tensor("i32")
    results = [tensor("f32", 128), tensor("i32", 128)]
    cost = price("reduce", [x, index, init, zero], results, BodyAttributes(Body(3.0)))
    assert cost.flops == 3 * (128 * 64 - 128)
    assert cost.bytes_read == 2 * 128 * 64 * 4 + 8
    assert cost.bytes_written == 2 * 128 * 4


def test_reduce_window_counts_taps(tensor: MakeTensor, price: Price) -> None:
    window = (WindowDim(1), WindowDim(3, stride=2, pad_low=0, pad_high=1))
    x, out = tensor("f32", 2, 16), tensor("f32", 2, 8)
    cost = price("reduce_window", [x, tensor("f32")], [out], WindowAttributes(ADD, window))
    assert cost.flops == 2 * 8 * 2
    assert cost.useful_flops == cost.flops - 2  # one tap of each row is padding


def test_select_and_scatter(tensor: MakeTensor, price: Price) -> None:
    operand, source = tensor("f32", 16, 16), tensor("f32", 8, 8)
    attributes = SelectScatterAttributes(Body(1.0, 0.0, "compare"), ADD, 9)
    cost = price("select_and_scatter", [operand, source, tensor("f32")], [operand], attributes)
    assert cost.flops == 64 * 8 + 64


def test_sort_map_and_top_k(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 4, 1000)
    sort = price("sort", [x], [x], BodyAttributes(Body(1.0, 0.0, "compare"), 1000))
    assert (sort.op_class, sort.flops) == (OpClass.SORT, 4000 * 10)
    assert price("map", [x], [x], BodyAttributes(Body(2.0, 1.0))).flops == 8000
    top = price("top_k", [x], [tensor("f32", 4, 8), tensor("i32", 4, 8)], TopKAttributes(8))
    assert (top.flops, top.bytes_read) == (4000 * 3, 16000)


def test_batch_norm(tensor: MakeTensor, price: Price) -> None:
    x, scale = tensor("f32", 2, 8, 8, 4), tensor("f32", 4)
    cost = price("batch_norm_training", [x, scale, scale], [x, scale, scale])
    assert (cost.flops, cost.transcendentals) == (8 * 512, 4)
    assert price("batch_norm_grad", [x, scale, scale, scale, x], [x, scale, scale]).flops == 12 * 512


def test_linear_algebra(tensor: MakeTensor, price: Price) -> None:
    a, b = tensor("f32", 2, 30, 30), tensor("f32", 2, 30, 5)
    assert price("cholesky", [a], [a]).flops == pytest.approx(2 * 30**3 / 3)
    assert price("triangular_solve", [a, b], [b], SolveAttributes()).flops == 2 * 900 * 5
    right = tensor("f32", 2, 5, 30)
    assert (
        price("triangular_solve", [a, right], [right], SolveAttributes(left_side=False)).flops == 2 * 900 * 5
    )


def test_fft(tensor: MakeTensor, price: Price) -> None:
    z, x, half = tensor("c64", 16, 64), tensor("f32", 16, 64), tensor("c64", 16, 33)
    assert price("fft", [z], [z], FftAttributes("FFT", (64,))).flops == 16 * 5 * 64 * 6
    assert price("fft", [x], [half], FftAttributes("RFFT", (64,))).flops == 16 * 2.5 * 64 * 6
    assert price("fft", [half], [x], FftAttributes("IRFFT", (64,))).flops == 16 * 2.5 * 64 * 6


def test_gather_reads_rows_not_the_table(tensor: MakeTensor, price: Price) -> None:
    table, index, row = tensor("bf16", 128256, 4096), tensor("i32", 1, 1), tensor("bf16", 1, 4096)
    cost = price("gather", [table, index], [row])
    assert cost.bytes_read == 4 + 8192
    assert cost.bytes_written == 8192


def test_gather_reads_at_most_the_operand(tensor: MakeTensor, price: Price) -> None:
    cost = price("gather", [tensor("f32", 4), tensor("i32", 100)], [tensor("f32", 100)])
    assert cost.bytes_read == 16 + 400


def test_scatter_counts_indices_updates_and_touched_results(tensor: MakeTensor, price: Price) -> None:
    table, index, updates = tensor("f32", 1000, 8), tensor("i32", 10, 1), tensor("f32", 10, 8)
    adding = ScatterAttributes(ADD, 1, in_place=True)
    cost = price("scatter", [table, index, updates], [table], adding)
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (80, 40 + 320 + 320, 320)
    replacing = ScatterAttributes(Body(0.0, 0.0, "", reads_first=False), 1, in_place=True)
    assert price("scatter", [table, index, updates], [table], replacing).bytes_read == 40 + 320
    copying = price("scatter", [table, index, updates], [table], ScatterAttributes(ADD))
    assert copying.bytes_read + copying.bytes_written == 40 + 320 * 3 + 2 * 32000


def test_update_slice_in_place_and_not(tensor: MakeTensor, price: Price) -> None:
    x, update, at = tensor("f32", 128, 64), tensor("f32", 1, 64), tensor("i32")
    inside = price("dynamic_update_slice", [x, update, at, at], [x], UpdateAttributes(in_place=True))
    assert inside.bytes_read + inside.bytes_written == 2 * 256 + 8
    copied = price("dynamic_update_slice", [x, update, at, at], [x], UpdateAttributes(in_place=False))
    assert copied.bytes_read + copied.bytes_written == 2 * 256 + 8 + 2 * 128 * 64 * 4


def test_slices_cost_what_they_keep(tensor: MakeTensor, price: Price) -> None:
    cost = price("dynamic_slice", [tensor("f32", 1000), tensor("i32")], [tensor("f32", 10)])
    assert (cost.bytes_read, cost.bytes_written) == (44, 40)


def test_quantise_counts_storage_width(tensor: MakeTensor, price: Price) -> None:
    cost = price("uniform_quantize", [tensor("f32", 64)], [tensor("i8", 64)])
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (128, 256, 64)


def test_random_bits_write_their_result(tensor: MakeTensor, price: Price) -> None:
    state, bits = tensor("ui64", 2), tensor("ui32", 100)
    cost = price("rng_bit_generator", [state], [state, bits])
    assert (cost.op_class, cost.flops, cost.bytes_written) == (OpClass.GENERATE, 0, 416)
    assert price("iota", [], [bits]).bytes_written == 0
