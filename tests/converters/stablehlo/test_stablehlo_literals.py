"""Strings of programs that are not UTF-8, which raise errors in jaxlib's bindings or end the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo.mlir import unescaped
from hespas.converters.stablehlo.program import misnamed_op_place, undecodable_place
from hespas.converters.stablehlo.reader import read
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import FormatError
from tests.converters.stablehlo.replays import write_bytes

pytest.importorskip("jaxlib")

ReadText = Callable[..., tuple[Workload, Diagnostics]]

CALL = """module @"m\\FF" {
  func.func public @"main\\FE"(%a: tensor<4xf32> {jax.n = "\\FF"}) -> tensor<4xf32> {
    %0 = stablehlo.custom_call @"k\\FD"(%a) {backend_config = "\\FC\\0A"} : (tensor<4xf32>) -> tensor<4xf32>
    %1 = call @"g\\FB\\\\\\22"(%0) : (tensor<4xf32>) -> tensor<4xf32>
    return %1 : tensor<4xf32>
  }
  func.func private @"g\\FB\\\\\\22"(%a: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.negate %a : tensor<4xf32> loc("u\\FE"("f\\FD.py":1:2))
    return %0 : tensor<4xf32>
  }
}
"""


def test_strings_may_hold_any_bytes(read_text: ReadText, tmp_path: Path) -> None:
    workload, diagnostics = read_text(CALL)
    graph = workload.classes[0]
    assert workload.name == r"m\xff"
    assert [graph.op_name(node) for node in range(len(graph))] == [
        "stablehlo.custom_call",
        "stablehlo.negate",
        "func.return",
    ]
    assert [entry.message.split(";")[0] for entry in diagnostics] == [
        r"custom call @k\xfd has no cost rule",
    ]
    assert write_bytes(workload, tmp_path / "again.mlir")[0] == CALL.encode()


def test_an_update_in_a_function_of_any_name_may_be_in_place(read_text: ReadText) -> None:
    program = """
func.func @main(%x: tensor<8xf32>, %i: tensor<i32>) -> tensor<8xf32> {
  %0 = stablehlo.negate %x : tensor<8xf32>
  %1 = call @"g\\FF"(%0, %i) : (tensor<8xf32>, tensor<i32>) -> tensor<8xf32>
  return %1 : tensor<8xf32>
}
func.func private @"g\\FF"(%x: tensor<8xf32>, %i: tensor<i32>) -> tensor<8xf32> {
  %0 = stablehlo.constant dense<0.0> : tensor<2xf32>
  %1 = stablehlo.dynamic_update_slice %x, %0, %i
    : (tensor<8xf32>, tensor<2xf32>, tensor<i32>) -> tensor<8xf32>
  return %1 : tensor<8xf32>
}"""
    graph = read_text(program)[0].classes[0]
    update = [graph.op_name(node) for node in range(len(graph))].index("stablehlo.dynamic_update_slice")
    assert graph.bytes_written[update] == 8


@pytest.mark.parametrize(
    ("program", "position"),
    [
        (
            'module {\n  func.func @main() {\n "a.b"() : () -> ()\n  "foo.\\FF"() : () -> ()\n return } }',
            "4:3",
        ),
        ('module { func.func @main() { "foo.\\FF" // (\n () : () -> () return } }', "1:30"),
        ('module attributes {mhlo.num_replicas = "\\FF"} { func.func @main() { return } }', "1:40"),
    ],
)
def test_names_that_are_no_text_are_refused_with_their_place(
    program: str, position: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.mlir"
    path.write_text(program)
    with pytest.raises(FormatError, match="not UTF-8 text") as caught:
        read(path, ReadOptions(), Diagnostics())
    assert (caught.value.path, caught.value.position) == (str(path), f"line {position}")


@pytest.mark.parametrize(
    "text",
    [
        rb'%0 = stablehlo.custom_call @"f\FF"(%a)',
        rb'loc("u\FF"("f.py":1:2))',
        rb'loc(callsite("f" at "u\FF"("f.py":1:2)))',
        rb'loc(fused["u\FF"("f.py":1:2)])',
        rb'"foo.\C3\A9"() : () -> ()',
        rb'// "foo.\FF"()',
    ],
)
def test_other_names_are_no_operations(text: bytes) -> None:
    assert not misnamed_op_place(text)


def test_literals_are_unescaped_as_mlir_does() -> None:
    assert unescaped(rb"a\\FF\FF\"\n\t\22") == b'a\\FF\xff"\n\t"'
    assert not undecodable_place(rb'"\\FF" "\C3\A9"')
    assert undecodable_place(b'"a"\n "\\C3"') == "line 2:2"
