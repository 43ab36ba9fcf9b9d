"""Symbolic dimensions: bound by name or position, and errors for unbound ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from hespas import api
from hespas.converters.format import ReadOptions
from hespas.graph import Diagnostics, OpClass, Workload
from hespas.graph.errors import UnsupportedError, UsageError

ReadText = Callable[..., tuple[Workload, Diagnostics]]
EXPORTED = Path(__file__).parents[3] / "fixtures" / "stablehlo" / "dynamic_mlp.mlir"

UNNAMED = """func.func @main(%x: tensor<?x8xf32>, %y: tensor<?x8xf32>, %n: tensor<i32>) -> tensor<?x8xf32> {
  %0 = stablehlo.add %x, %y : tensor<?x8xf32>
  return %0 : tensor<?x8xf32>
}"""
ASSERTED = """func.func @main(%x: tensor<?x?xf32>, %y: tensor<8xf32>) -> tensor<?x?xf32> {{
  %c = stablehlo.constant dense<true> : tensor<i1>
  stablehlo.custom_call @shape_assertion(%c) {{
    api_version = 2 : i32, has_side_effect = true, error_message = "Using the following polymorphic shapes \
specifications: args[0].shape = ({shape}). Obtained dimension variables: 'b' = {{0}}"}} : (tensor<i1>) -> ()
  %0 = stablehlo.tanh %x : tensor<?x?xf32>
  return %0 : tensor<?x?xf32>
}}"""


def _read(read_text: ReadText, text: str, dims: Mapping[str, int]) -> Workload:
    return read_text(text, ReadOptions(dims=dims))[0]


def test_an_exported_program_is_bound_by_its_names() -> None:
    found = Diagnostics()
    workload = api.read(EXPORTED, options=ReadOptions(dims={"b": 4, "s": 8}), diagnostics=found)
    assert isinstance(workload, Workload)
    graph = workload.classes[0]
    products = graph.op_class == OpClass.CONTRACTION
    assert graph.flops[products].tolist() == [2 * 4 * 8 * 64 * 256]
    assert not np.isnan(graph.bytes_moved).any()
    assert found.counts() == {}


def test_what_is_kept_of_it_is_the_bound_program(tmp_path: Path) -> None:
    api.convert(EXPORTED, tmp_path / "bound.mlir", dims={"b": 4, "s": 8})
    again = api.read(tmp_path / "bound.mlir")
    assert isinstance(again, Workload)
    assert not np.isnan(again.classes[0].flops).any()
    with pytest.raises(UsageError, match="no symbolic dimensions"):
        api.read(tmp_path / "bound.mlir", options=ReadOptions(dims={"b": 4}))


def test_dimensions_without_names_are_bound_by_place(read_text: ReadText) -> None:
    graph = _read(read_text, UNNAMED, {"arg0.0": 4, "arg1.0": 4}).classes[0]
    assert graph.bytes_moved.tolist() == [3 * 4 * 8 * 4, 0]


@pytest.mark.parametrize(
    ("shape", "dims", "elements"),
    [
        ("b, 2*b + 1", {"b": 5}, 5 * 11),
        ("b, b - s*2", {"b": 9, "s": 3}, 27),
        ("b, max(b, 4)", {"b": 3, "arg0.1": 4}, 12),
        ("b, s", {"b": 3, "arg0.1": 0}, 0),
    ],
)
def test_extents_that_are_expressions(
    read_text: ReadText, shape: str, dims: Mapping[str, int], elements: int
) -> None:
    graph = _read(read_text, ASSERTED.format(shape=shape), dims).classes[0]
    assert graph.transcendentals[-2] == elements


@pytest.mark.parametrize(
    ("text", "dims", "message", "hint"),
    [
        (
            UNNAMED,
            {"b": 4},
            "`dims=b`: the program has no such dimension",
            "bind one of its dimensions: arg0.0, arg1.0",
        ),
        (UNNAMED, {"arg0.0": 4}, "dimension arg1.0 is not bound", "`dims=arg1.0=N`"),
        (
            UNNAMED,
            {"arg0.1": 4},
            "`dims=arg0.1`: the program has no such dimension",
            "bind one of its dimensions: arg0.0",
        ),
        (UNNAMED.replace("?", "4"), {"b": 4}, "no symbolic dimensions", "leave `dims` out"),
        (ASSERTED.format(shape="b, s"), {"s": 4}, "dimension b is not bound", "`dims=b=N`"),
        (ASSERTED.format(shape="b, s*2"), {"b": 4}, "dimension s is not bound (arg0.1 is s*2)", "`dims=s=N`"),
        (ASSERTED.format(shape="b, b-9"), {"b": 4}, "arg0.1 is b-9 = -5", "choose other values in `dims`"),
        (ASSERTED.format(shape="b, mod(b, 2)"), {"b": 4}, "arg0.1 is mod(b, 2)", "bind it: `dims=arg0.1=N`"),
        (ASSERTED.format(shape="b, s, t"), {"s": 4}, "`dims=s`: the program has no such dimension", "arg0.1"),
    ],
)
def test_names_that_do_not_go(
    read_text: ReadText, text: str, dims: Mapping[str, int], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        _read(read_text, text, dims)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert caught.value.path == "test.mlir"


def test_extents_that_contradict_each_other(read_text: ReadText) -> None:
    with pytest.raises(UnsupportedError, match="cannot be inferred from these extents"):
        _read(read_text, UNNAMED, {"arg0.0": 4, "arg1.0": 5})


def test_other_formats_have_no_dimensions() -> None:
    path = EXPORTED.parents[1] / "hlo" / "mlp.hlo.txt"
    with pytest.raises(UsageError, match="has no symbolic dimensions"):
        api.read(path, options=ReadOptions(dims={"b": 4}))
