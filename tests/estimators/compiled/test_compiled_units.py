"""Units of graphs and the programs they become."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

import hespas
from hespas.estimators.compiled.copies import origins_of
from hespas.estimators.compiled.units import (
    Unit,
    baseline_of,
    loop_text,
    renewed_argument,
    units_of,
    write_operation,
)
from hespas.graph import OpClass, OpGraph, Workload
from hespas.graph.builder import GraphBuilder
from hespas.graph.columns import dtype
from hespas.programs.text import Tensor, Value

F32 = dtype("f32")


def tensor(*shape: int, element: str = "f32") -> Tensor:
    return Tensor(dtype(element), shape)


def unit(op: str, operands: list[Tensor], *results: Tensor) -> Unit:
    values = tuple(Value(f"%p{place}", each) for place, each in enumerate(operands))
    made = write_operation(op, values, results, count())
    assert made is not None
    return Unit(tuple(made[0]), tuple(operands), made[1])


UNITS = {
    "dot": unit("dot_general", [tensor(4, 5), tensor(5, 6)], tensor(4, 6)),
    "scalar": unit("add", [tensor(), tensor()], tensor()),
    "iota": unit("iota", [], tensor(3, 4, element="i32")),
    "not": unit("not", [tensor(3, element="i1")], tensor(3, element="i1")),
    "several": unit(
        "reduce", [tensor(3, 4), tensor(3, 4, element="i32")], tensor(3), tensor(3, element="i32")
    ),
    "sort": unit("sort", [tensor(8)], tensor(8)),
    "gather": unit("gather", [tensor(10, 4), tensor(2, 3, 1, element="i32")], tensor(2, 3, 4)),
    "scatter": unit(
        "scatter", [tensor(10, 4), tensor(2, 3, 1, element="i32"), tensor(2, 3, 4)], tensor(10, 4)
    ),
    "conv": unit("convolution", [tensor(1, 8, 8, 3), tensor(3, 3, 3, 16)], tensor(1, 4, 4, 16)),
    "pad": unit("pad", [tensor(3), tensor()], tensor(5)),
    "concatenate": unit("concatenate", [tensor(2, 3), tensor(2, 4)], tensor(2, 7)),
    "broadcast": unit("broadcast_in_dim", [tensor(4)], tensor(3, 4)),
    "complex": unit("multiply", [tensor(3, element="c64")] * 2, tensor(3, element="c64")),
    "int4": unit("add", [tensor(8, element="i4")] * 2, tensor(8, element="i4")),
    "fp8": unit("convert", [tensor(8, element="f8E4M3FN")], tensor(8)),
}


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("barrier", [True, False])
def test_programs_are_valid(name: str, barrier: bool) -> None:
    pytest.importorskip("jaxlib")
    from hespas.converters.stablehlo.mlir import load_bindings

    bindings = load_bindings()
    for each in (UNITS[name], baseline_of(UNITS[name])):
        bindings.parse(loop_text(each, barrier=barrier))


def test_something_is_new_in_each_turn() -> None:
    assert renewed_argument(UNITS["gather"]) == 0
    assert renewed_argument(UNITS["not"]) == -1
    assert renewed_argument(unit("select", [tensor(element="i1"), tensor(3), tensor(3)], tensor(3))) == 1
    assert "dynamic_update_slice" in loop_text(UNITS["dot"])
    assert "%counted" in loop_text(UNITS["iota"])
    assert "optimization_barrier" not in loop_text(UNITS["dot"], barrier=False)


def adding(b: GraphBuilder) -> Callable[[str, OpClass, list[int], int, list[int]], int]:
    """Return a function that adds an operation with one result: name, class, types, dependencies."""

    def add(op: str, op_class: OpClass, operands: list[int], result: int, deps: list[int]) -> int:
        return b.add_node(
            name_id=0, op_id=b.strings.add(f"stablehlo.{op}"), op_class=op_class, data_deps=deps,
            operands=operands, results=[result], flops=64.0, transcendentals=0.0, bytes_read=64.0,
            bytes_written=64.0,
        )  # fmt: skip

    return add


def chain(repeated: bool = False) -> OpGraph:
    """``sum(tanh(x + 1))`` of a product, and the same product once more."""
    b = GraphBuilder("chain")
    x, w, y = (b.types.add(F32, shape) for shape in ((8, 16), (16, 4), (8, 4)))
    one, total = b.types.add(F32, ()), b.types.add(F32, (8,))

    add = adding(b)

    first = add("dot_general", OpClass.CONTRACTION, [x, w], y, [])
    second = add("dot_general", OpClass.CONTRACTION, [x, w], y, [])
    ones = add("broadcast_in_dim", OpClass.BROADCAST, [one], y, [])
    more = add("add", OpClass.ELEMENTWISE, [y, y], y, [first, ones])
    if repeated:
        add("add", OpClass.ELEMENTWISE, [y, y], y, [second, ones])
    bent = add("tanh", OpClass.TRANSCENDENTAL, [y], y, [more])
    add("reduce", OpClass.REDUCTION, [y, one], total, [bent])
    add("fft", OpClass.FFT, [y], y, [second])
    return b.build()


def test_equal_operations_are_one_unit() -> None:
    found = units_of(chain(), fused=False)
    assert len(found.units) == 5
    assert [nodes for number, nodes in found.members if number == 0] == [(0,), (1,)]
    assert found.uncovered == {"stablehlo.fft": 1}


def test_a_chain_is_one_unit_with_its_consumer() -> None:
    found = units_of(chain(), fused=True)
    assert sorted(nodes for _, nodes in found.members) == [(0,), (1,), (2, 3, 4, 5)]
    (fused,) = (found.units[number] for number, nodes in found.members if len(nodes) > 1)
    made = [re.search(r"= stablehlo\.(\w+)", line) for line in fused.lines]
    assert [each[1] for each in made if each] == ["broadcast_in_dim", "add", "tanh", "constant", "reduce"]
    assert [str(each) for each in fused.arguments] == ["tensor<f32>", "tensor<8x4xf32>", "tensor<f32>"]


def test_what_several_use_is_made_anew_in_each() -> None:
    found = units_of(chain(repeated=True), fused=True)
    lone = next(found.units[number] for number, nodes in found.members if nodes == (4,))
    assert any("broadcast_in_dim" in line for line in lone.lines)


def gradient(*, of: str = "multiply", turned: bool = True, other: str = "dot_general") -> OpGraph:
    """A product over both first dimensions of ``of(exp(x), y) + z``, or over the last; ``other`` uses what
    is multiplied, too.
    """
    b = GraphBuilder("gradient")
    x, y = b.types.add(F32, (4, 8, 16)), b.types.add(F32, (4, 8, 6))
    w, grown = b.types.add(F32, (16, 6)), b.types.add(F32, (16, 6) if turned else (4, 8, 6))

    add = adding(b)

    raised = add("exponential", OpClass.TRANSCENDENTAL, [x], x, [])
    made = add(of, OpClass.ELEMENTWISE, [x, x], x, [raised])
    more = add("add", OpClass.ELEMENTWISE, [x, x], x, [made])
    add("dot_general", OpClass.CONTRACTION, [x, y if turned else w], grown, [more])
    if other == "dot_general":
        add(other, OpClass.CONTRACTION, [x, w], y, [more])
    elif other == "turned":
        add("dot_general", OpClass.CONTRACTION, [x, y], grown, [more])
    elif other:
        add(other, OpClass.FFT, [x], x, [more])
    return b.build()


def operations(found: Unit) -> list[str]:
    made = [re.search(r"= stablehlo\.(\w+)", line) for line in found.lines]
    return [each[1] for each in made if each]


def product_of(graph: OpGraph) -> tuple[list[str], tuple[int, ...]]:
    """Return the operations in the unit of the product, and the nodes that share its time."""
    found = units_of(graph, fused=True)
    number, nodes = next((number, nodes) for number, nodes in found.members if 3 in nodes)
    return operations(found.units[number]), nodes


def test_cheap_work_is_done_in_the_copy_of_a_turned_operand() -> None:
    assert product_of(gradient()) == (["multiply", "add", "dot_general"], (3,))
    assert product_of(gradient(other="")) == (["multiply", "add", "dot_general"], (1, 2, 3))


def test_what_others_than_products_use_is_kept_and_copied() -> None:
    assert product_of(gradient(other="fft")) == (["dot_general"], (3,))


def test_what_lies_as_the_product_wants_it_is_read_in_place() -> None:
    for other in ("", "dot_general"):
        assert product_of(gradient(turned=False, other=other)) == (["dot_general"], (3,))


def doubled(times: int) -> OpGraph:
    """``x + x`` so many times over, then a product over both first dimensions, and one over the last."""
    b = GraphBuilder("doubled")
    x, y = b.types.add(F32, (4, 8, 16)), b.types.add(F32, (4, 8, 6))
    w, grown = b.types.add(F32, (16, 6)), b.types.add(F32, (16, 6))

    add = adding(b)

    last = add("exponential", OpClass.TRANSCENDENTAL, [x], x, [])
    for _ in range(times):
        last = add("add", OpClass.ELEMENTWISE, [x, x], x, [last, last])
    add("dot_general", OpClass.CONTRACTION, [x, y], grown, [last])
    add("dot_general", OpClass.CONTRACTION, [x, w], y, [last])
    return b.build()


def test_what_is_used_again_and_again_is_followed_once() -> None:
    found = units_of(doubled(40), fused=True)
    assert max(len(each.lines) for each in found.units) == 41


def test_work_for_turned_products_alone_is_done_once() -> None:
    b = gradient(other="")
    assert [nodes for _, nodes in units_of(b, fused=True).members] == [(0,), (1, 2, 3)]
    found = units_of(gradient(other="turned"), fused=True)
    works = [operations(found.units[number]) for number, _ in found.members]
    assert sum("multiply" in each for each in works) == 1


def test_work_that_takes_long_is_not_done_twice() -> None:
    assert product_of(gradient(of="divide")) == (["add", "dot_general"], (3,))


_CALLS = """HloModule calls

pick (b: f32[4,128,256], c: f32[4,128,256]) -> f32[4,128,256] {
  b = f32[4,128,256] parameter(0)
  c = f32[4,128,256] parameter(1)
  ROOT made = f32[4,128,256] negate(c)
}

f (b1: f32[4,128,256], c1: f32[4,128,256]) -> f32[4,128,256] {
  b1 = f32[4,128,256] parameter(0)
  c1 = f32[4,128,256] parameter(1)
  ROOT inner = f32[4,128,256] call(b1, c1), to_apply=pick
}

h (a2: f32[4,128,256], b2: f32[4,128,256]) -> f32[4,128,256] {
  a2 = f32[4,128,256] parameter(0)
  b2 = f32[4,128,256] parameter(1)
  m = f32[4,128,256] add(a2, a2)
  ROOT outer = f32[4,128,256] call(m, b2), to_apply=f
}

ENTRY main (x: f32[4,128,256], y: f32[4,128,256]) -> f32[4,128,256] {
  x = f32[4,128,256] parameter(0)
  y = f32[4,128,256] parameter(1)
  raised = f32[4,128,256] exponential(y)
  ROOT all = f32[4,128,256] call(x, raised), to_apply=h
}
"""


def test_a_call_is_what_its_body_makes_and_no_operand(tmp_path: Path) -> None:
    path = tmp_path / "calls.hlo.txt"
    path.write_text(_CALLS, encoding="utf-8")
    workload = hespas.read(path)
    assert isinstance(workload, Workload)
    graph = workload.classes[0]
    found = origins_of(graph)
    assert len(found) == 3
    assert {graph.op_name(made) for made in found.values()} == {"negate"}
