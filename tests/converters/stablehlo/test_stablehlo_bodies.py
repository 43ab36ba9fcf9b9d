"""Costs of computations within operations: called functions, loops and branches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

import pytest

from hespas.graph import Diagnostics, OpClass, Workload
from hespas.graph.errors import FormatError

pytest.importorskip("jaxlib")

ReadText = Callable[..., tuple[Workload, Diagnostics]]

_REDUCE = """func.func @main(%x: tensor<64x32xf32>) -> tensor<64xf32> {
  %z = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = "stablehlo.reduce"(%x, %z) <{dimensions = array<i64: 1>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    BODY
    stablehlo.return %s : tensor<f32>
  }) : (tensor<64x32xf32>, tensor<f32>) -> tensor<64xf32>
  return %0 : tensor<64xf32>
}
func.func private @comb(%a: tensor<f32>, %b: tensor<f32>) -> tensor<f32> {
  %s = stablehlo.add %a, %b : tensor<f32>
  return %s : tensor<f32>
}
func.func private @deeper(%a: tensor<f32>, %b: tensor<f32>) -> tensor<f32> {
  %t = func.call @comb(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32>
  %s = stablehlo.exponential %t : tensor<f32>
  return %s : tensor<f32>
}
func.func private @endless(%a: tensor<f32>, %b: tensor<f32>) -> tensor<f32> {
  %s = func.call @endless(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32>
  return %s : tensor<f32>
}"""
_CALL = "%s = func.call @NAME(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32>"
_LOOP = """%i0 = stablehlo.constant dense<0> : tensor<i32>
    %n = stablehlo.constant dense<LIMIT> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %i, %s = stablehlo.while(%k = %i0, %v = %a) : tensor<i32>, tensor<f32>
    cond {
      %p = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    } do {
      %w = stablehlo.add %v, %b : tensor<f32>
      %m = stablehlo.add %k, %one : tensor<i32>
      stablehlo.return %m, %w : tensor<i32>, tensor<f32>
    }"""
_CHOICE = """%p = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %s = "stablehlo.if"(%p) ({
      stablehlo.return %a : tensor<f32>
    }, {
      %q = stablehlo.multiply %a, %b : tensor<f32>
      %r = stablehlo.add %q, %b : tensor<f32>
      stablehlo.return %r : tensor<f32>
    }) : (tensor<i1>) -> tensor<f32>"""


@pytest.mark.parametrize(
    ("body", "flops", "transcendentals"),
    [
        pytest.param(_CALL.replace("NAME", "comb"), 1, 0, id="a call"),
        pytest.param(_CALL.replace("NAME", "deeper"), 1, 1, id="a call in a call"),
        pytest.param(_LOOP.replace("LIMIT", "5"), 5 * 3, 0, id="a loop"),
        pytest.param(_CHOICE, 1 + 2, 0, id="the costliest branch"),
    ],
)
def test_a_reducer_costs_what_it_runs(
    read_text: ReadText, body: str, flops: int, transcendentals: int
) -> None:
    workload, _ = read_text(_REDUCE.replace("BODY", body))
    graph = workload.classes[0]
    (node,) = (graph.op_class == OpClass.REDUCTION).nonzero()[0].tolist()
    applications = 64 * 32 - 64
    assert (graph.flops[node], graph.transcendentals[node]) == (
        applications * flops,
        applications * transcendentals,
    )


def test_a_reducer_that_calls_itself_is_refused(read_text: ReadText) -> None:
    with pytest.raises(FormatError, match="100 deep"):
        read_text(_REDUCE.replace("BODY", _CALL.replace("NAME", "endless")))


def test_a_collective_is_named_by_what_its_reducer_calls(read_text: ReadText) -> None:
    workload, _ = read_text(
        """module attributes {mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = "stablehlo.all_reduce"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %s = func.call @comb(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}
func.func private @comb(%a: tensor<f32>, %b: tensor<f32>) -> tensor<f32> {
  %s = stablehlo.maximum %a, %b : tensor<f32>
  return %s : tensor<f32>
}}"""
    )
    graph = workload.classes[0]
    assert graph.strings[int(graph.collectives.reduction[0])] == "maximum"


_COMPARING = """func.func @main(%x: tensor<64xf32>) -> tensor<64xf32> {
  %0 = "stablehlo.sort"(%x) <{dimension = 0 : i64}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %l = stablehlo.exponential %a : tensor<f32>
    %p = stablehlo.compare LT, %l, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  }) : (tensor<64xf32>) -> tensor<64xf32>
  return %0 : tensor<64xf32>
}"""


def test_a_comparator_keeps_its_transcendentals(read_text: ReadText) -> None:
    graph = read_text(_COMPARING)[0].classes[0]
    assert (graph.flops[0], graph.transcendentals[0]) == (64 * 6, 64 * 6)


_FUSION = """func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = "mhlo.fusion"(%x) <{fusion_kind = #mhlo<fusion_kind kLoop>}> ({
  ^bb0(%a: tensor<8x8xf32>):
    %1 = func.call @twice(%a) : (tensor<8x8xf32>) -> tensor<8x8xf32>
    mhlo.return %1 : tensor<8x8xf32>
  }) : (tensor<8x8xf32>) -> tensor<8x8xf32>
  return %0 : tensor<8x8xf32>
}
func.func private @twice(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {
  %0 = mhlo.add %a, %a : tensor<8x8xf32>
  %1 = "mhlo.dot"(%0, %a) : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  return %1 : tensor<8x8xf32>
}"""


def test_a_fusion_costs_what_its_body_calls(read_text: ReadText) -> None:
    graph = read_text(_FUSION)[0].classes[0]
    assert graph.flops[0] == 64 + 2 * 8**3
    assert graph.bytes_moved[0] == 2 * 64 * 4, "its operands and results, not those within"
    assert graph.contractions.node.tolist() == [0]


_BRANCHES = """func.func @main(%p: tensor<i1>, %y: tensor<NxNxf32>) -> tensor<NxNxf32> {
  %0 = "stablehlo.if"(%p) ({
    %1 = stablehlo.dot_general %y, %y, contracting_dims = [1] x [0]
      : (tensor<NxNxf32>, tensor<NxNxf32>) -> tensor<NxNxf32>
    stablehlo.return %1 : tensor<NxNxf32>
  }, {
    %c = stablehlo.constant dense<1.0> : tensor<NxNxf32>
    %2 = stablehlo.add %y, %c : tensor<NxNxf32>
    stablehlo.return %2 : tensor<NxNxf32>
  }) : (tensor<i1>) -> tensor<NxNxf32>
  return %0 : tensor<NxNxf32>
}"""


@pytest.mark.parametrize("extent", [8, 64, 128, 512, 4096])
def test_a_product_is_the_costlier_branch_beside_a_sum(read_text: ReadText, extent: int) -> None:
    workload, _ = read_text(_BRANCHES.replace("N", str(extent)))
    graph = workload.classes[0]
    (product,) = (graph.op_class == OpClass.CONTRACTION).nonzero()[0].tolist()
    assert graph.executions[product] == 1


_GRID = """func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %a = stablehlo.constant dense<2> : tensor<i32>
  %b = stablehlo.constant dense<4> : tensor<i32>
  %n = stablehlo.multiply %a, %b : tensor<i32>
  CALL
  return %r : tensor<8xf32>
}
func.func private @run(%n: tensor<i32>, %x: tensor<8xf32>) -> tensor<8xf32> {
  %i0 = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %l:3 = stablehlo.while(%lim = %n, %k = %i0, %v = %x) : tensor<i32>, tensor<i32>, tensor<8xf32>
  cond {
    %p = stablehlo.compare LT, %k, %lim : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %w = stablehlo.tanh %v : tensor<8xf32>
    %m = stablehlo.add %k, %one : tensor<i32>
    stablehlo.return %lim, %m, %w : tensor<i32>, tensor<i32>, tensor<8xf32>
  }
  return %l#2 : tensor<8xf32>
}"""
_ONCE = "%r = call @run(%n, %x) : (tensor<i32>, tensor<8xf32>) -> tensor<8xf32>"
_TWICE = """%q = call @run(%a, %x) : (tensor<i32>, tensor<8xf32>) -> tensor<8xf32>
  %r = call @run(%n, %q) : (tensor<i32>, tensor<8xf32>) -> tensor<8xf32>"""


def test_a_grid_multiplied_out_and_handed_to_a_function_is_counted(read_text: ReadText) -> None:
    workload, findings = read_text(_GRID.replace("CALL", _ONCE))
    assert findings.counts() == {}
    assert workload.classes[0].regions.trips.tolist() == [8]


def test_a_function_called_with_two_limits_is_not_guessed(read_text: ReadText) -> None:
    _, findings = read_text(_GRID.replace("CALL", _TWICE))
    assert "stablehlo.unknown-trips" in findings.counts()


def test_a_scan_runs_its_body_on_each_slice(read_text: ReadText) -> None:
    workload, findings = read_text(
        """func.func @main(%x: tensor<128x32xf32>, %z: tensor<32xf32>) -> tensor<128x32xf32> {
  %0:2 = chlo.scan(%x) inits(%z) dimension=0 {
  ^bb0(%a: tensor<32xf32>, %b: tensor<32xf32>):
    %s = stablehlo.add %a, %b : tensor<32xf32>
    stablehlo.return %s, %s : tensor<32xf32>, tensor<32xf32>
  } : (tensor<128x32xf32>, tensor<32xf32>) -> (tensor<128x32xf32>, tensor<32xf32>)
  return %0#0 : tensor<128x32xf32>
}"""
    )
    assert findings.counts() == {}
    graph = workload.classes[0]
    assert (graph.flops[0], graph.bytes_moved[0]) == (128 * 32, 4 * (2 * 128 * 32 + 2 * 32))


_SPECIAL = ["bessel_i1e", "digamma", "erf_inv", "lgamma", "polygamma", "zeta"]


@pytest.mark.parametrize("name", _SPECIAL)
def test_special_functions_cost_what_their_expansion_costs(read_text: ReadText, name: str) -> None:
    count = 2 if name in {"polygamma", "zeta"} else 1
    given = ", ".join(["%a", "%b"][:count])
    types = (
        "tensor<8xf32>, tensor<8xf32> -> tensor<8xf32>" if count == 2 else "tensor<8xf32> -> tensor<8xf32>"
    )
    program = f"""func.func @main(%a: tensor<8xf32>, %b: tensor<8xf32>) -> tensor<8xf32> {{
  %0 = chlo.{name} {given} : {types}
  return %0 : tensor<8xf32>
}}"""
    expanded = _legalised(program)
    ours, full = (read_text(text)[0].classes[0] for text in (program, expanded))
    assert full.flops.sum() > 8 * 30
    assert (ours.flops[0], ours.transcendentals[0]) == (full.flops.sum(), full.transcendentals.sum())


def _legalised(program: str) -> str:
    """The program after jaxlib has written chlo operations as StableHLO."""
    from hespas.converters.stablehlo.mlir import load_bindings

    bindings = load_bindings()
    bindings.stablehlo.register_stablehlo_passes()
    with cast("AbstractContextManager[object]", bindings.context()):
        module = bindings.ir.Module.parse(program)
        pipeline = "builtin.module(func.func(chlo-legalize-to-stablehlo))"
        bindings.passmanager.PassManager.parse(pipeline).run(module.operation)
        return str(module)
