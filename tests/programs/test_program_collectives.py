"""Collectives and windows written from types are valid StableHLO of these types."""

from __future__ import annotations

from math import nan

import pytest

from hespas.converters.stablehlo.mlir import load_bindings
from hespas.graph.columns import dtype
from hespas.programs.collectives import collective, permute
from hespas.programs.operations import reduce_window, select_and_scatter
from hespas.programs.text import Operator, Tensor, Value


def tensor(*shape: int, element: str = "f32") -> Tensor:
    return Tensor(dtype(element), shape)


def text_of(write: Operator | None, operands: list[Tensor], results: list[Tensor]) -> str:
    """The operation, after MLIR has parsed a function of it."""
    assert write is not None
    text = write([Value(f"%p{place}", each) for place, each in enumerate(operands)])
    names = ", ".join(f"%p{place}: {each}" for place, each in enumerate(operands))
    made = ", ".join(map(str, results))
    bound = ("%r", "%r") if len(results) == 1 else (f"%r:{len(results)}", "%r#0, %r#1")
    load_bindings().parse(
        f"func.func @main({names}) -> ({made}) {{\n{bound[0]} = {text}\nreturn {bound[1]} : {made}\n}}"
    )
    return text


PAIRS = [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("op", "operands", "results", "said"),
    [
        ("all_reduce", [tensor(4, 6)], [tensor(4, 6)], "stablehlo.add"),
        ("all_reduce", [tensor(4, element="i1")], [tensor(4, element="i1")], "stablehlo.or"),
        ("all_reduce", [tensor(4), tensor(2, 3)], [tensor(4), tensor(2, 3)], "[2, 3]"),
        ("all_gather", [tensor(4, 6)], [tensor(4, 12)], "all_gather_dim = 1"),
        ("reduce_scatter", [tensor(4, 6)], [tensor(2, 6)], "scatter_dimension = 0"),
        ("all_to_all", [tensor(4, 6)], [tensor(2, 12)], "split_dimension = 0 : i64, concat_dimension = 1"),
        ("all_to_all", [tensor(3, 4)], [tensor(3, 4)], "split_dimension = 1 : i64, concat_dimension = 1"),
        ("collective_broadcast", [tensor(4)], [tensor(4)], "dense<[[0, 1], [2, 3]]>"),
    ],
)
def test_a_collective_follows_from_its_types(
    op: str, operands: list[Tensor], results: list[Tensor], said: str
) -> None:
    write = collective(op, tuple(operands), tuple(results), PAIRS)
    assert said in text_of(write, operands, results)


def test_a_permutation_names_sources_and_targets() -> None:
    write = permute((tensor(4),), (tensor(4),), [(0, 1), (1, 0)])
    assert "dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>" in text_of(write, [tensor(4)], [tensor(4)])


@pytest.mark.parametrize(
    ("op", "operands", "results", "groups"),
    [
        ("all_gather", [tensor(4, 6)], [tensor(8, 12)], PAIRS),
        ("all_gather", [tensor(4)], [tensor(8)], [[0, 1, 2], [3]]),
        ("reduce_scatter", [tensor(4)], [tensor(3)], PAIRS),
        ("all_to_all", [tensor(3)], [tensor(3)], PAIRS),
        ("all_reduce", [tensor(4)], [tensor(5)], PAIRS),
        ("all_reduce", [tensor(4), tensor(4, element="i32")], [tensor(4), tensor(4, element="i32")], PAIRS),
        ("ragged_all_to_all", [tensor(4)], [tensor(4)], PAIRS),
        ("all_reduce", [], [], PAIRS),
    ],
)
def test_what_types_and_groups_do_not_say_is_not_written(
    op: str, operands: list[Tensor], results: list[Tensor], groups: list[list[int]]
) -> None:
    assert collective(op, tuple(operands), tuple(results), groups) is None


def test_a_pool_has_the_window_that_its_places_say() -> None:
    whole, part, start = tensor(8, 33, 33, 16), tensor(8, 16, 16, 16), tensor()
    text = text_of(reduce_window((whole, start), (part,), 9.0), [whole, start], [part])
    assert "window_dimensions = array<i64: 1, 3, 3, 1>, window_strides = array<i64: 1, 2, 2, 1>" in text
    back = select_and_scatter((whole, part, start), (whole,), 9.0)
    assert "window_dimensions = array<i64: 1, 3, 3, 1>" in text_of(back, [whole, part, start], [whole])


def test_a_pool_of_unknown_places_has_those_that_it_moves_by() -> None:
    whole, part, start = tensor(8, 32), tensor(8, 16), tensor()
    text = text_of(reduce_window((whole, start), (part,), nan), [whole, start], [part])
    assert "window_dimensions = array<i64: 1, 2>" in text
    assert reduce_window((whole, start), (tensor(8),), nan) is None
    assert select_and_scatter((whole, part), (whole,), nan) is None
