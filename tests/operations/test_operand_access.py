"""Operations that read their operands in another order than they write results."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.costs.aten import aten_cost
from hespas.graph import GraphBuilder, OpClass, OpGraph, dtype
from hespas.operations import SCATTERED, STRIDED, operations_of

F32 = dtype("f32")

_Type = tuple[tuple[int, ...], str]


def one_node(op_class: OpClass, operands: list[_Type], result: _Type, op: str = "x") -> OpGraph:
    made = GraphBuilder("one")
    rows = [
        made.types.add(F32, shape, encoding=made.strings.add(layout)) for shape, layout in (*operands, result)
    ]
    name = made.strings.add(op)
    made.add_node(
        name_id=name, op_id=name, op_class=op_class, operands=rows[:-1], results=rows[-1:]
    )  # fmt: skip
    return made.build()


@pytest.mark.parametrize(
    ("op_class", "operands", "result", "expected"),
    [
        (OpClass.ELEMENTWISE, [((4, 8), ""), ((4, 8), "1,0")], ((4, 8), ""), 0.0),
        (OpClass.ELEMENTWISE, [((4, 8), ""), ((4, 8), "0,1")], ((4, 8), ""), 1.0),
        (OpClass.ELEMENTWISE, [((4, 8), "0,1")], ((4, 8), "0,1:T(8,128)"), 0.0),
        (OpClass.ELEMENTWISE, [((4, 8), "strides 16,2")], ((4, 8), ""), 1.0),
        (OpClass.ELEMENTWISE, [((4, 8), ""), ((8,), "")], ((4, 8), ""), 1.0),
        (OpClass.ELEMENTWISE, [((4, 8), ""), ((), "")], ((4, 8), ""), 0.0),
        (OpClass.ELEMENTWISE, [((4, 8), "")], ((1, 4, 8), ""), 0.0),
        (OpClass.ELEMENTWISE, [((2, 2), "0,1")], ((2, 2), ""), 1.0),
        (OpClass.ELEMENTWISE, [((1, 1), "0,1")], ((4, 8), ""), 0.0),
        (OpClass.MOVE, [((4, 8), "0,1")], ((4, 8), ""), 1.0),
        (OpClass.MOVE, [((2, 8), ""), ((2, 8), "")], ((4, 8), ""), 0.0),
        (OpClass.REDUCTION, [((4, 8), "")], ((4,), ""), 0.0),
        (OpClass.REDUCTION, [((4, 8), "0,1")], ((4,), ""), 1.0),
        (OpClass.ELEMENTWISE, [((4, -1), "")], ((4, 8), ""), 0.0),
        (OpClass.GATHER, [((4, 8), "0,1")], ((4, 8), ""), np.nan),
        (OpClass.FUSION, [((4, 8), ""), ((8,), "")], ((4, 8), ""), 0.0),
        (OpClass.FUSION, [((6, 4, 8), "")], ((24, 8), ""), 0.0),
        (OpClass.FUSION, [((24, 8), "")], ((6, 4, 8), ""), 0.0),
        (OpClass.FUSION, [((6, 4, 8), "")], ((6, 8), ""), 0.0),
        (OpClass.FUSION, [((6, 4, 8), "")], ((8, 24), ""), 1.0),
        (OpClass.FUSION, [((8,), ""), ((6, 1, 32), "")], ((32, 6), ""), 1.0),
        (OpClass.FUSION, [((4, 8), "0,1")], ((4, 8), ""), 1.0),
        (OpClass.FUSION, [((-1, 8), "")], ((4, 8), ""), 0.0),
    ],
)
def test_operands_in_another_order_are_seen(
    op_class: OpClass, operands: list[_Type], result: _Type, expected: float
) -> None:
    found = operations_of(one_node(op_class, operands, result)).dim(STRIDED)
    assert found.tolist() == pytest.approx([expected], nan_ok=True)


@pytest.mark.parametrize(("layout", "name"), [("strides 1,0", "row_gather"), ("", "gather")])
def test_gathers_of_whole_rows_have_a_name_of_their_own(layout: str, name: str) -> None:
    types: list[_Type] = [((64, 8), ""), ((4, 8), layout)]
    graph = one_node(OpClass.GATHER, types, ((4, 8), ""), "aten::gather")
    assert operations_of(graph).op[0] == name


def test_elementwise_operations_of_one_size_are_one_however_they_are_shaped() -> None:
    shapes = ((3136, 12, 8, 8), (2408448,), (8, 301056))
    sizes = [operations_of(one_node(OpClass.ELEMENTWISE, [(s, "")], (s, ""))) for s in shapes]
    assert {(float(ops.dim("rows")[0]), float(ops.dim("columns")[0])) for ops in sizes} == {(588.0, 4096.0)}
    small = operations_of(one_node(OpClass.ELEMENTWISE, [((3, 5), "")], ((3, 5), "")))
    assert (small.dim("rows")[0], small.dim("columns")[0]) == (1.0, 15.0)


def test_a_fusion_is_as_large_as_its_largest_tensor_wherever_that_stands() -> None:
    types: list[_Type] = [((8,), ""), ((4, 1024), ""), ((4, 8), "")]
    for op_class, elements in ((OpClass.FUSION, 4096.0), (OpClass.ELEMENTWISE, 32.0)):
        ops = operations_of(one_node(op_class, types, ((4, 8), "")))
        assert ops.dim("rows")[0] * ops.dim("columns")[0] == elements
        ops = operations_of(one_node(op_class, types[:1], ((4, 1024), "")))
        assert ops.dim("rows")[0] * ops.dim("columns")[0] == 4096.0


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ("[[8, 1]]", ""),
        ("[[1, 4]]", "0,1"),
        ("[[16, 2]]", "strides 16,2"),
        ("[[0, 1]]", "strides 0,1"),
        ("", ""),
        ("[[1]]", ""),
        ("[[-8, 1]]", "strides -8,1"),
    ],
)
def test_strides_of_a_trace_become_the_order_of_dimensions(strides: str, expected: str) -> None:
    cost = aten_cost("aten::relu", "[[4, 8]]", '["float"]', strides=strides)
    assert cost.operands[0].layout == expected


def test_dimensions_of_one_element_have_no_order() -> None:
    cost = aten_cost("aten::relu", "[[4, 1, 8]]", '["float"]', strides="[[8, 1, 1]]")
    assert cost.operands[0].layout == ""


@pytest.mark.parametrize(
    ("op_class", "operands", "result", "expected"),
    [
        (OpClass.MOVE, [((64, 3137), "strides 1,2304")], ((64, 3137), ""), 64 * 3137.0),
        (OpClass.MOVE, [((64, 3137), "0,1")], ((64, 3137), ""), 64 * 3137.0),
        # Neighbours within a line, rows that return to a line soon, rows that stay in order.
        (OpClass.MOVE, [((64, 3137), "strides 6274,2")], ((64, 3137), ""), 0.0),
        (OpClass.MOVE, [((3136, 8), "strides 1,3136")], ((3136, 8), ""), 0.0),
        (OpClass.MOVE, [((64, 3137), "strides 9999,1")], ((64, 3137), ""), 0.0),
        # Concatenations read each operand, elementwise operations each for all of the result.
        (OpClass.MOVE, [((1, 768), ""), ((196, 768), "0,1")], ((197, 768), ""), 196 * 768.0),
        (OpClass.ELEMENTWISE, [((64, 768), ""), ((64, 768), "0,1")], ((64, 768), ""), 64 * 768.0),
        (OpClass.ELEMENTWISE, [((64, 768), "0,1")], ((64, 768), "0,1"), 0.0),
        (OpClass.FUSION, [((64, 768), "0,1")], ((64, 768), ""), 0.0),
        (OpClass.REDUCTION, [((64, 768), "0,1")], ((64,), ""), 0.0),
        (OpClass.MOVE, [((64, -1), "0,1")], ((64, 768), ""), 0.0),
    ],
)
def test_elements_that_are_read_across_rows_are_counted(
    op_class: OpClass, operands: list[_Type], result: _Type, expected: float
) -> None:
    assert operations_of(one_node(op_class, operands, result)).dim(SCATTERED).tolist() == [expected]


def test_rows_of_a_batch_norm_are_its_channels() -> None:
    found = aten_cost(
        "aten::native_batch_norm",
        "[[32, 64, 56, 56], [64], [64], [64], [64], [], [], []]",
        '["float", "float", "float", "float", "float", "Scalar", "Scalar", "Scalar"]',
        values='["", "", "", "", "", "True", "0.1", "1e-05"]',
    )
    made = GraphBuilder("one")
    row = made.types.add(F32, (32, 64, 56, 56))
    name = made.strings.add("aten::native_batch_norm")
    made.add_node(
        name_id=name, op_id=name, op_class=found.cost.op_class, operands=[row], results=[row],
        flops=found.cost.flops,
    )  # fmt: skip
    ops = operations_of(made.build())
    assert (ops.dim("rows")[0], ops.dim("columns")[0]) == (64.0, 32.0 * 56 * 56)


@pytest.mark.parametrize(
    ("name", "rows"), [("aten::avg_pool2d", 32.0 * 64 * 28), ("stablehlo.reduce_window", 32.0 * 64 * 56)]
)
def test_poolings_of_pytorch_have_the_rows_of_their_result(name: str, rows: float) -> None:
    """A thread computes one result; tables of other compilers state the operand."""
    made = GraphBuilder("one")
    source, result = made.types.add(F32, (32, 64, 56, 56)), made.types.add(F32, (32, 64, 28, 28))
    number = made.strings.add(name)
    made.add_node(
        name_id=number, op_id=number, op_class=OpClass.WINDOW, operands=[source], results=[result]
    )  # fmt: skip
    assert operations_of(made.build()).dim("rows").tolist() == [rows]
