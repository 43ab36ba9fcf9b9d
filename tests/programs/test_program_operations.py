"""Operations written from types are valid StableHLO, and do what their types say."""

from __future__ import annotations

import pytest

from hespas.graph.columns import dtype
from hespas.programs.contractions import dot_axes, find_convolution, usual_convolution
from hespas.programs.operations import BINARY, UNARY, broadcast_axes, operator
from hespas.programs.text import Tensor, Value, dense


def tensor(*shape: int, element: str = "f32") -> Tensor:
    return Tensor(dtype(element), shape)


def written(op: str, operands: list[Tensor], *results: Tensor) -> str | None:
    """The operation on ``%p0``, ``%p1``, ..., None where types do not say enough."""
    write = operator(op, tuple(operands), results)
    return (
        None if write is None else write([Value(f"%p{place}", each) for place, each in enumerate(operands)])
    )


FLOAT, INT = tensor(3), tensor(3, element="i32")
BOOL, COMPLEX = tensor(3, element="i1"), tensor(3, element="c64")
INDEX = tensor(element="i32")
_BITS = {"and", "or", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical"}
_OF_OTHERS: dict[str, tuple[Tensor, Tensor]] = {
    "not": (BOOL, BOOL),
    "popcnt": (INT, INT),
    "count_leading_zeros": (INT, INT),
    "is_finite": (FLOAT, BOOL),
    "real": (COMPLEX, FLOAT),
    "imag": (COMPLEX, FLOAT),
    "convert": (FLOAT, INT),
    "bitcast_convert": (FLOAT, INT),
}
CASES: dict[str, tuple[str, list[Tensor], list[Tensor]]] = {
    **{op: (op, [taken], [made]) for op in UNARY for taken, made in [_OF_OTHERS.get(op, (FLOAT, FLOAT))]},
    **{op: (op, [FLOAT, FLOAT], [FLOAT]) for op in BINARY - _BITS},
    **{op: (op, [INT, INT], [INT]) for op in _BITS},
    "complex": ("complex", [FLOAT, FLOAT], [COMPLEX]),
    "abs of complex": ("abs", [COMPLEX], [FLOAT]),
    "reshape": ("reshape", [tensor(2, 3)], [tensor(6)]),
    "broadcast of HLO": ("broadcast", [FLOAT], [tensor(2, 3)]),
    "copy": ("copy", [FLOAT], [FLOAT]),
    "copy truth values": ("copy", [BOOL], [BOOL]),
    "compare": ("compare", [FLOAT, FLOAT], [BOOL]),
    "compare complex": ("compare", [COMPLEX, COMPLEX], [BOOL]),
    "select": ("select", [BOOL, FLOAT, FLOAT], [FLOAT]),
    "clamp": ("clamp", [tensor(), FLOAT, FLOAT], [FLOAT]),
    "constant": ("constant", [], [COMPLEX]),
    "iota": ("iota", [], [tensor(2, 3)]),
    "broadcast": ("broadcast_in_dim", [FLOAT], [tensor(2, 3)]),
    "broadcast a scalar": ("broadcast_in_dim", [tensor()], [tensor(2, 3)]),
    "transpose": ("transpose", [tensor(2, 3, 4)], [tensor(4, 2, 3)]),
    "concatenate": ("concatenate", [tensor(2, 3), tensor(2, 4)], [tensor(2, 7)]),
    "slice": ("slice", [tensor(4, 5)], [tensor(2, 5)]),
    "pad": ("pad", [FLOAT, tensor()], [tensor(5)]),
    "dynamic_slice": ("dynamic_slice", [tensor(4, 5), INDEX, INDEX], [tensor(2, 5)]),
    "dynamic_update_slice": ("dynamic_update_slice", [tensor(4), tensor(2), INDEX], [tensor(4)]),
    "reverse": ("reverse", [tensor(2, 3)], [tensor(2, 3)]),
    "reduce": ("reduce", [tensor(2, 3), tensor()], [tensor(2)]),
    "reduce several": ("reduce", [FLOAT, INT, tensor(), INDEX], [tensor(), INDEX]),
    "sort": ("sort", [FLOAT, INT], [FLOAT, INT]),
    "gather": ("gather", [tensor(10, 4), tensor(2, 3, 1, element="i32")], [tensor(2, 3, 4)]),
    "scatter": ("scatter", [tensor(10, 4), INT, tensor(3, 4)], [tensor(10, 4)]),
    "dot": ("dot_general", [tensor(2, 3, 5, 7), tensor(2, 3, 7, 11)], [tensor(2, 3, 5, 11)]),
    "outer dot": ("dot_general", [tensor(5), tensor(7)], [tensor(5, 7)]),
    "empty dot": ("dot_general", [tensor(0, 8), tensor(8, 4)], [tensor(0, 4)]),
    "convolution": ("convolution", [tensor(1, 8, 8, 4), tensor(3, 3, 2, 16)], [tensor(1, 4, 4, 16)]),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_what_is_written_is_valid(case: str) -> None:
    pytest.importorskip("jaxlib")
    from hespas.converters.stablehlo.mlir import load_bindings

    op, operands, results = CASES[case]
    text = written(op, operands, *results)
    assert text is not None
    names = ", ".join(f"%p{place}: {each}" for place, each in enumerate(operands))
    made = ", ".join(map(str, results))
    returned = ", ".join(f"%r#{place}" for place in range(len(results)))
    load_bindings().parse(
        f"func.func @main({names}) -> ({made}) {{\n%r:{len(results)} = {text}\nreturn {returned} : {made}\n}}"
    )


@pytest.mark.parametrize(
    ("op", "operands", "result"),
    [
        ("dot_general", [tensor(2, 3), tensor(5, 7)], tensor(2, 7)),
        ("reduce", [tensor(2, 3), tensor()], tensor(5)),
        ("gather", [tensor(2, 3, 4), tensor(5, element="i32")], tensor(5, 4)),
        ("transpose", [tensor(2, 3)], tensor(6)),
        ("slice", [tensor(2, 3)], tensor(4, 3)),
        ("reshape", [tensor(2, 3)], tensor(7)),
        ("add", [tensor(2)], tensor(2)),
        ("add", [tensor(2), tensor(2, element="i32")], tensor(2)),
        ("tanh", [tensor(2)], tensor(2, element="bf16")),
        ("is_finite", [INT], BOOL),
        ("select", [BOOL, tensor(), FLOAT], FLOAT),
        ("fft", [tensor(2)], tensor(2)),
        ("convolution", [tensor(1, 8, 8, 3), tensor(3, 3, 4, 16)], tensor(1, 8, 8, 16)),
    ],
)
def test_what_types_do_not_say_is_not_written(op: str, operands: list[Tensor], result: Tensor) -> None:
    assert written(op, operands, result) is None


def test_axes_of_a_product_follow_from_its_shapes() -> None:
    text = written("dot_general", [tensor(2, 3, 5, 7), tensor(2, 3, 7, 11)], tensor(2, 3, 5, 11))
    assert text is not None
    assert "batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [2]" in text


def test_a_product_whose_result_has_its_operands_axes_only_is_an_outer_one() -> None:
    text = written("dot_general", [tensor(5), tensor(7)], tensor(5, 7)) or ""
    assert "contracting_dims = [] x []" in text


def test_extents_decide_between_axes_of_equal_shapes() -> None:
    square = (4, 4)
    product = dot_axes(square, square, square, (1, 4, 4, 4))
    elementwise = dot_axes(square, square, square, (16, 1, 1, 1))
    assert product is not None
    assert elementwise is not None
    assert [len(axes.batching[0]) for axes in (product, elementwise)] == [0, 2]


def test_a_transposition_of_equal_extents_moves_them() -> None:
    assert "dims = [1, 0]" in (written("transpose", [tensor(4, 4)], tensor(4, 4)) or "")


def test_dimensions_are_broadcast_early_or_late() -> None:
    assert broadcast_axes((4,), (4, 4)) == [0]
    assert broadcast_axes((4,), (4, 4), late=True) == [1]
    assert broadcast_axes((1, 4), (2, 3, 4), late=True) == [1, 2]
    assert broadcast_axes((5,), (4, 4), late=True) is None


def test_flops_tell_a_padded_convolution_from_a_dilated_one() -> None:
    left, right, out = (1, 8, 8, 3), (3, 3, 3, 16), (1, 8, 8, 16)
    usual = usual_convolution(left, right, out)
    assert usual is not None
    assert [(each.stride, each.low, each.high) for each in usual.windows] == [(1, 1, 1)] * 2
    # 22 of 24 pairs of places and taps in each dimension fall on the input.
    useful = 2.0 * 3 * 16 * 22 * 22
    found = find_convolution(left, right, out, 2.0 * 64 * 9 * 3 * 16, useful)
    assert found is not None
    assert found.flops == useful


def test_literals_are_of_their_type() -> None:
    kinds = ("i1", "f32", "c64", "i8")
    assert [dense(tensor(element=kind), 1).split(" ")[0] for kind in kinds] == [
        "dense<true>",
        "dense<1.0>",
        "dense<(1.0,",
        "dense<1>",
    ]


def test_of_layouts_that_fit_frameworks_use_the_usual_ones() -> None:
    """The gradient of a kernel whose features are as many as the places of an input."""
    found = find_convolution((32, 16, 16, 16), (32, 8, 8, 32), (3, 3, 16, 32), 18874368.0, 17334272.0)
    assert found is not None
    assert (found.layout.lhs, found.layout.rhs, found.layout.out) == ((3, 0), (0, 3), (2, 3))
    assert [each.rhs_dilation for each in found.windows] == [2, 2]
