"""Structure of programs: calls, loops, branches, composites, tuples, barriers, custom calls."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import numpy as np
import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.program import parse_program
from hespas.converters.stablehlo.program_graph import read_parsed
from hespas.converters.stablehlo.template import FunctionTemplate, TemplateBuilder
from hespas.graph import Diagnostics, NodeKind, OpClass, OpGraph, RegionKind, Workload
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.graph.passes import FoldFree, Pass, UnrollLoops, is_topological

ReadText = Callable[..., tuple[Workload, Diagnostics]]
ReadGraph = Callable[..., OpGraph]

MATRIX = "tensor<64x64xf32>"
DOT = 2.0 * 64**3


def deps(graph: OpGraph) -> dict[str, list[str]]:
    """Predecessors by node name."""
    return {
        graph.node_name(node): [graph.node_name(dep) for dep in graph.data_deps.row(node).tolist()]
        for node in range(len(graph))
    }


def names(graph: OpGraph) -> list[str]:
    return [graph.node_name(node) for node in range(len(graph))]


def waits(graph: OpGraph) -> dict[str, list[str]]:
    """Control predecessors by node name, of the nodes that have any."""
    rows = {
        graph.node_name(node): [graph.node_name(dep) for dep in graph.control_deps.row(node).tolist()]
        for node in range(len(graph))
    }
    return {name: row for name, row in rows.items() if row}


def regions(graph: OpGraph) -> list[tuple[RegionKind, float, str]]:
    table = graph.regions
    return [
        (RegionKind(int(table.kind[row])), float(table.trips[row]), graph.strings[int(table.label[row])])
        for row in range(len(table))
    ]


def carried_edges(graph: OpGraph) -> list[tuple[int, str, str]]:
    """(region, producer, consumer) of the values that loops carry."""
    table = graph.regions
    rows: list[int] = table.carried_region.tolist()
    producers: list[int] = table.carried_producer.tolist()
    consumers: list[int] = table.carried_consumer.tolist()
    edges = zip(rows, producers, consumers, strict=True)
    return [(row, graph.node_name(producer), graph.node_name(consumer)) for row, producer, consumer in edges]


def total(graph: OpGraph) -> float:
    return float(np.nansum(graph.flops * graph.executions))


def test_edges_point_from_producer_to_consumer_in_program_order(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<8xf32>",
        """  %a = stablehlo.add %x, %x : tensor<8xf32>
  %b = stablehlo.multiply %a, %x : tensor<8xf32>
  %c = stablehlo.subtract %b, %a : tensor<8xf32>
  return %c : tensor<8xf32>""",
        "tensor<8xf32>",
    )
    assert deps(graph) == {
        "add.0": [],
        "multiply.1": ["add.0"],
        "subtract.2": ["multiply.1", "add.0"],
        "return.3": ["subtract.2"],
    }


def test_every_operation_is_a_node_free_ones_too(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<8xf32>",
        """  %c = stablehlo.constant dense<1.0> : tensor<f32>
  %b = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<8xf32>
  %r = stablehlo.reshape %x : (tensor<8xf32>) -> tensor<2x4xf32>
  return %b, %r : tensor<8xf32>, tensor<2x4xf32>""",
        "(tensor<8xf32>, tensor<2x4xf32>)",
    )
    assert [OpClass(int(code)) for code in graph.op_class] == [
        OpClass.GENERATE,
        OpClass.BROADCAST,
        OpClass.FREE,
        OpClass.FREE,
    ]
    assert deps(graph)["return.3"] == ["broadcast_in_dim.1", "reshape.2"]
    assert graph.bytes_moved.tolist() == [0, 36, 0, 0], "a result of the program is written"


def test_a_program_of_constants_only(read_body: ReadGraph) -> None:
    graph = read_body(
        "", "  %c = stablehlo.constant dense<1.0> : tensor<f32>\n  return %c : tensor<f32>", "tensor<f32>"
    )
    assert len(graph) == 2


CALLS = """
module @calls {
  func.func @main(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
    %0 = call @outer(%x) : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %1 = call @outer(%0) : (tensor<64x64xf32>) -> tensor<64x64xf32>
    return %1 : tensor<64x64xf32>
  }
  func.func private @outer(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
    %0 = call @inner(%x) : (tensor<64x64xf32>) -> tensor<64x64xf32>
    %1 = call @inner(%0) : (tensor<64x64xf32>) -> tensor<64x64xf32>
    return %1 : tensor<64x64xf32>
  }
  func.func private @inner(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
    %0 = stablehlo.dot %x, %x : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    return %0 : tensor<64x64xf32>
  }
  func.func private @nobody(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
    %0 = stablehlo.custom_call @unknown(%x) : (tensor<64x64xf32>) -> tensor<64x64xf32>
    return %0 : tensor<64x64xf32>
  }
}"""


def test_calls_are_inlined_at_each_site(read_text: ReadText) -> None:
    workload, diagnostics = read_text(CALLS)
    graph = workload.classes[0]
    assert deps(graph) == {
        "dot.0": [],
        "dot.1": ["dot.0"],
        "dot.2": ["dot.1"],
        "dot.3": ["dot.2"],
        "return.4": ["dot.3"],
    }
    assert total(graph) == 4 * DOT
    assert len(graph.regions) == 0
    assert diagnostics.counts() == {}, "functions nobody calls are not read"


def test_an_argument_handed_through_keeps_its_producer(read_text: ReadText) -> None:
    graph = read_text(
        """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %x : tensor<4xf32>
  %1:2 = call @swap(%0, %x) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %2 = stablehlo.abs %1#0 : tensor<4xf32>
  %3 = stablehlo.sign %1#1 : tensor<4xf32>
  return %3 : tensor<4xf32>
}
func.func private @swap(%a: tensor<4xf32>, %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  return %b, %a : tensor<4xf32>, tensor<4xf32>
}"""
    )[0].classes[0]
    assert deps(graph) == {
        "negate.0": [],
        "abs.1": [],
        "sign.2": ["negate.0"],
        "return.3": ["sign.2"],
    }


def test_recursion_is_refused_with_its_cycle(read_text: ReadText) -> None:
    with pytest.raises(FormatError, match="@a -> @b -> @a"):
        read_text(
            """
func.func @main(%x: tensor<f32>) -> tensor<f32> {
  %0 = call @a(%x) : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}
func.func private @a(%x: tensor<f32>) -> tensor<f32> {
  %0 = call @b(%x) : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}
func.func private @b(%x: tensor<f32>) -> tensor<f32> {
  %0 = call @a(%x) : (tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}"""
        )


def chain(length: int, last: str) -> str:
    signature = "(tensor<f32>) -> tensor<f32>"
    text = [
        f"func.func {'private @f' + str(place) if place else '@main'}(%x: tensor<f32>) -> tensor<f32> {{\n"
        f"  %0 = call @f{place + 1}(%x) : {signature}\n  return %0 : tensor<f32>\n}}"
        for place in range(length)
    ]
    head = f"func.func private @f{length}(%x: tensor<f32>) -> tensor<f32> {{"
    return "\n".join([*text, head, last, "  return %0 : tensor<f32>\n}"])


def test_a_long_chain_of_calls_is_read_without_recursion(read_text: ReadText) -> None:
    graph = read_text(chain(3000, "  %0 = stablehlo.negate %x : tensor<f32>"))[0].classes[0]
    assert len(graph) == 2


def test_a_long_cycle_of_calls_is_refused(read_text: ReadText) -> None:
    with pytest.raises(FormatError, match="cycle"):
        read_text(chain(300, "  %0 = call @f1(%x) : (tensor<f32>) -> tensor<f32>"))


def read_in_process(program: str) -> Workload:
    """Read a program without a child, which would not see what a test patches."""
    data, bindings = program.encode(), load_bindings()
    parsed = parse_program(data, bindings)
    options, diagnostics = ReadOptions(), Diagnostics()
    return read_parsed(data, parsed, bindings, path="test.mlir", options=options, diagnostics=diagnostics)


def _doubling(levels: int) -> str:
    """Functions that each call the next one twice, so that 2**levels operations run."""
    kind = "(tensor<f32>) -> tensor<f32>"
    functions = [
        f"func.func {f'private @f{level}' if level else '@main'}(%x: tensor<f32>) -> tensor<f32> {{\n"
        f"  %0 = call @f{level + 1}(%x) : {kind}\n  %1 = call @f{level + 1}(%0) : {kind}\n"
        "  return %1 : tensor<f32>\n}"
        for level in range(levels)
    ]
    head = f"func.func private @f{levels}(%x: tensor<f32>) -> tensor<f32> {{"
    body = "  %0 = stablehlo.negate %x : tensor<f32>\n  return %0 : tensor<f32>\n}"
    return "\n".join([*functions, head, body])


def test_calls_that_double_are_counted_before_they_are_written_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    few = 1000

    def copy(scope: TemplateBuilder, callee: FunctionTemplate, *rest: Any) -> Any:
        copied.append(len(callee))
        return written_out(scope, callee, *rest)

    written_out = TemplateBuilder.copy
    monkeypatch.setattr(TemplateBuilder, "copy", copy)
    monkeypatch.setattr("hespas.converters.stablehlo.functions._FEW_NODES", few)
    with pytest.raises(UnsupportedError, match="operations once calls are inlined"):
        read_in_process(_doubling(40))
    # Calls are counted once a function is larger than that. It is at most twice as large, for the two that it
    # calls are not, and those below it together are about as much again.
    assert few < sum(copied) < 4 * few


def test_calls_that_double_at_each_level_are_refused_before_they_fill_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hespas.converters.stablehlo.template.MAX_NODES", 1000)
    with pytest.raises(UnsupportedError, match="operations once calls are inlined"):
        read_in_process(_doubling(10))


WHILE = """
func.func @main(%x: tensor<64x64xf32>, %w: tensor<64x64xf32>, %n: tensor<i32>) -> tensor<64x64xf32> {{
  %zero = stablehlo.constant dense<{start}> : tensor<i32>
  %step = stablehlo.constant dense<{step}> : tensor<i32>
  %stop = stablehlo.constant dense<{limit}> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<64x64xf32>
  cond {{
    %p = stablehlo.compare {direction}, {sides} : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  }} do {{
    %y = stablehlo.dot %v, %w : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    %j = stablehlo.{change} %i, %step : tensor<i32>
    stablehlo.return %j, %y : tensor<i32>, tensor<64x64xf32>
  }}
  %1 = stablehlo.tanh %0#1 : tensor<64x64xf32>
  return %1 : tensor<64x64xf32>
}}"""


def loop(start: int, limit: int, step: int, direction: str, **more: str) -> str:
    return WHILE.format(
        start=start,
        limit=limit,
        step=step,
        direction=direction,
        sides=more.get("sides", "%i, %stop"),
        change=more.get("change", "add"),
    )


@pytest.mark.parametrize(
    ("program", "trips"),
    [
        (loop(0, 10, 1, "LT"), 10),
        (loop(0, 10, 3, "LT"), 4),
        (loop(2, 10, 4, "LE"), 3),
        (loop(20, 5, 5, "GT", change="subtract"), 3),
        (loop(20, 5, -5, "GE"), 4),
        (loop(0, 6, 2, "NE"), 3),
        (loop(0, 10, 1, "GT", sides="%stop, %i"), 10),
        (loop(10, 10, 1, "LT"), 0),
    ],
)
def test_trips_are_read_off_the_counter(read_text: ReadText, program: str, trips: int) -> None:
    workload, diagnostics = read_text(program)
    graph = workload.classes[0]
    assert regions(graph) == [(RegionKind.LOOP_BODY, trips, "while.3")]
    assert float(graph.flops[graph.op_class == OpClass.CONTRACTION].sum()) == DOT
    counted = graph.op_class == OpClass.CONTRACTION
    assert graph.executions[counted].tolist() == [trips]
    assert graph.executions[names(graph).index("compare.4")] == trips, "the evaluation that ends it has none"
    assert diagnostics.counts() == {}


@pytest.mark.parametrize(
    "program",
    [
        loop(0, 10, 1, "LT", sides="%i, %n"),
        loop(0, 10, 0, "LT"),
        loop(0, 7, 2, "NE"),
        loop(0, 10, 2, "LT", change="multiply"),
    ],
)
def test_trips_that_cannot_be_told_are_unknown_never_one(read_text: ReadText, program: str) -> None:
    workload, diagnostics = read_text(program)
    graph = workload.classes[0]
    assert isnan(graph.regions.trips[0])
    assert np.isnan(graph.executions[graph.op_class == OpClass.CONTRACTION]).all()
    assert diagnostics.counts() == {"stablehlo.unknown-trips": 1}
    assert waits(graph)["dot.5"] == ["compare.4"], "a body of unknown length waits for its condition"


def test_a_loop_carries_its_values(read_text: ReadText) -> None:
    graph = read_text(loop(0, 10, 1, "LT"))[0].classes[0]
    carried = set(carried_edges(graph))
    assert carried == {(0, "add.6", "compare.4"), (0, "dot.5", "dot.5"), (0, "add.6", "add.6")}
    assert deps(graph)["tanh.7"] == ["dot.5"]
    assert waits(graph) == {"dot.5": ["compare.4"], "add.6": ["compare.4"]}


def everything_before(graph: OpGraph, node: int) -> set[int]:
    """Nodes that a node waits for, directly or not."""
    before: set[int] = set()
    pending = [node]
    while pending:
        at = pending.pop()
        fresh = {*graph.data_deps.row(at).tolist(), *graph.control_deps.row(at).tolist()} - before
        before |= fresh
        pending.extend(fresh)
    return before


@pytest.mark.parametrize("fold_first", [True, False])
def test_unrolled_trips_wait_for_their_predicate_and_that_for_the_counter(
    read_text: ReadText, fold_first: bool
) -> None:
    graph = read_text(loop(0, 4, 1, "LT"))[0].classes[0]
    passes: list[Pass] = [FoldFree(), UnrollLoops()] if fold_first else [UnrollLoops(), FoldFree()]
    for each in passes:
        graph = each(graph, Diagnostics())
    assert is_topological(graph)
    found = names(graph)
    compares, dots, adds = (
        [at for at, name in enumerate(found) if name.startswith(op)] for op in ("compare", "dot", "add")
    )
    assert len(compares) == len(dots) == len(adds) == 4
    for trip in range(4):
        assert compares[trip] in everything_before(graph, dots[trip])
        assert compares[trip] in everything_before(graph, adds[trip])
    for trip in range(1, 4):
        assert adds[trip - 1] in graph.data_deps.row(compares[trip])
        assert dots[trip - 1] in graph.data_deps.row(dots[trip])
    alone = [node for node in range(1, len(graph)) if not everything_before(graph, node)]
    assert alone == [], "only the first comparison waits for nothing"


def test_a_condition_that_is_constant_gates_nothing(read_text: ReadText) -> None:
    program = loop(0, 10, 1, "LT").replace("stablehlo.return %p", "stablehlo.return %always")
    program = program.replace("%p =", "%always = stablehlo.constant dense<true> : tensor<i1>\n    %p =")
    assert waits(read_text(program)[0].classes[0]) == {}


CARRIED_PREDICATE = """
func.func @main(%x: tensor<4xf32>, %go: tensor<i1>) -> tensor<4xf32> {
  %g = stablehlo.not %go : tensor<i1>
  %0:2 = stablehlo.while(%p = %g, %v = %x) : tensor<i1>, tensor<4xf32>
  cond {
    stablehlo.return %p : tensor<i1>
  } do {
    %y = stablehlo.negate %v : tensor<4xf32>
    %q = stablehlo.is_finite %y : (tensor<4xf32>) -> tensor<4xi1>
    %r = stablehlo.slice %q [0:1] : (tensor<4xi1>) -> tensor<1xi1>
    %s = stablehlo.reshape %r : (tensor<1xi1>) -> tensor<i1>
    stablehlo.return %s, %y : tensor<i1>, tensor<4xf32>
  }
  return %0#1 : tensor<4xf32>
}"""


def test_a_carried_predicate_is_waited_for_one_trip_later(read_text: ReadText) -> None:
    graph = read_text(CARRIED_PREDICATE)[0].classes[0]
    assert waits(graph) == {"negate.2": ["not.0"]}
    assert set(carried_edges(graph)) == {(0, "negate.2", "negate.2"), (0, "reshape.5", "negate.2")}


def test_a_loop_without_values_of_the_loop_around_it_waits_for_that_ones_predicate(
    read_text: ReadText,
) -> None:
    program = NESTED.replace("%w = %v)", "%w = %x)")
    graph = read_text(program)[0].classes[0]
    found, control = names(graph), waits(graph)
    outer, inner = [name for name in found if name.startswith("compare")]
    assert control[inner] == [outer], "the inner condition is part of the outer trip"
    assert [control[name] for name in found if name.startswith("negate")] == [[inner]]


def test_a_limit_carried_unchanged_and_a_step_inside_a_call(read_text: ReadText) -> None:
    graph = read_text(
        """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %limit = stablehlo.constant dense<7> : tensor<i32>
  %0:3 = stablehlo.while(%n = %limit, %i = %zero, %v = %x) : tensor<i32>, tensor<i32>, tensor<4xf32>
  cond {
    %p = stablehlo.compare GT, %n, %i : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %j:2 = func.call @body(%i, %v) : (tensor<i32>, tensor<4xf32>) -> (tensor<i32>, tensor<4xf32>)
    stablehlo.return %n, %j#0, %j#1 : tensor<i32>, tensor<i32>, tensor<4xf32>
  }
  return %0#2 : tensor<4xf32>
}
func.func private @body(%i: tensor<i32>, %v: tensor<4xf32>) -> (tensor<i32>, tensor<4xf32>) {
  %one = stablehlo.constant dense<1> : tensor<i32>
  %j = stablehlo.add %one, %i : tensor<i32>
  %w = stablehlo.negate %v : tensor<4xf32>
  return %j, %w : tensor<i32>, tensor<4xf32>
}"""
    )[0].classes[0]
    assert graph.regions.trips.tolist() == [7]
    consumers = {consumer for _, _, consumer in carried_edges(graph)}
    assert consumers == {"compare.3", "add.5", "negate.6"}, "carried edges reach into the called function"


NESTED = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %c3 = stablehlo.constant dense<3> : tensor<i32>
  %c5 = stablehlo.constant dense<5> : tensor<i32>
  %0:2 = stablehlo.while(%i = %c0, %v = %x) : tensor<i32>, tensor<4xf32>
  cond {
    %p = stablehlo.compare LT, %i, %c3 : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %in:2 = stablehlo.while(%j = %c0, %w = %v) : tensor<i32>, tensor<4xf32>
    cond {
      %p = stablehlo.compare LT, %j, %c5 : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    } do {
      %y = stablehlo.negate %w : tensor<4xf32>
      %k = stablehlo.add %j, %c1 : tensor<i32>
      stablehlo.return %k, %y : tensor<i32>, tensor<4xf32>
    }
    %k = stablehlo.add %i, %c1 : tensor<i32>
    stablehlo.return %k, %in#1 : tensor<i32>, tensor<4xf32>
  }
  return %0#1 : tensor<4xf32>
}"""


def test_nested_loops_multiply_and_carry_across_both(read_text: ReadText) -> None:
    graph = read_text(NESTED)[0].classes[0]
    assert graph.executions[names(graph).index("negate.8")] == 15
    rows = [row for row, _, consumer in carried_edges(graph) if consumer == "negate.8"]
    assert len(set(rows)) == 2, "the inner loop carries it from trip to trip, the outer one from run to run"


CASE = """
func.func @main(%x: tensor<64x64xf32>, %which: tensor<i32>) -> tensor<64x64xf32> {
  %s = stablehlo.negate %which : tensor<i32>
  %0 = "stablehlo.case"(%s) ({
    %a = stablehlo.tanh %x : tensor<64x64xf32>
    stablehlo.return %a : tensor<64x64xf32>
  }, {
    %b = stablehlo.dot %x, %x : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    stablehlo.return %b : tensor<64x64xf32>
  }, {
    stablehlo.return %x : tensor<64x64xf32>
  }) : (tensor<i32>) -> tensor<64x64xf32>
  %1 = stablehlo.abs %0 : tensor<64x64xf32>
  return %1 : tensor<64x64xf32>
}"""


def test_the_costliest_branch_counts_with_a_diagnostic(read_text: ReadText) -> None:
    workload, diagnostics = read_text(CASE)
    graph = workload.classes[0]
    assert [trips for _, trips, _ in regions(graph)] == [0, 1, 0]
    assert total(graph) == DOT + 64 * 64 + 1
    assert diagnostics.counts() == {"stablehlo.branch-chosen": 1}
    assert deps(graph)["abs.4"] == ["dot.3"], "what the other branch would make is not waited for"
    assert waits(graph) == {"dot.3": ["case.1"], "tanh.2": ["case.1"]}
    assert deps(graph)["case.1"] == ["negate.0"]


def test_what_a_branch_calls_waits_for_the_predicate_too(read_text: ReadText) -> None:
    call = "func.call @product(%x) : (tensor<64x64xf32>) -> tensor<64x64xf32>"
    dot = "stablehlo.dot %x, %x : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>"
    composite = """func.func private @product(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %0 = stablehlo.composite "acme.dot" %x {decomposition = @inner} : (tensor<64x64xf32>) -> tensor<64x64xf32>
  return %0 : tensor<64x64xf32>
}
func.func private @inner(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %0 = stablehlo.constant dense<0.0> : tensor<64x64xf32>
  %1 = stablehlo.add %x, %0 : tensor<64x64xf32>
  return %1 : tensor<64x64xf32>
}"""
    graph = read_text(f"{CASE.replace(dot, call)}\n{composite}")[0].classes[0]
    assert waits(graph)["constant.3"] == ["case.1"]
    flat = FoldFree()(graph, Diagnostics())
    assert [waits(flat)[name] for name in names(flat) if name.startswith("add")] == [["negate.0"]]


def test_a_branch_that_hands_a_value_on_makes_it_wait_for_the_predicate(read_text: ReadText) -> None:
    graph = read_text(
        """
func.func @main(%x: tensor<4xf32>, %p: tensor<i1>) -> tensor<4xf32> {
  %n = stablehlo.negate %x : tensor<4xf32>
  %q = stablehlo.not %p : tensor<i1>
  %0 = "stablehlo.if"(%q) ({
    stablehlo.return %n : tensor<4xf32>
  }, {
    stablehlo.return %x : tensor<4xf32>
  }) : (tensor<i1>) -> tensor<4xf32>
  %1 = stablehlo.abs %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}"""
    )[0].classes[0]
    assert set(deps(graph)["abs.3"]) == {"negate.0", "if.2"}


def test_branches_with_different_collectives_are_a_hazard(read_text: ReadText) -> None:
    reduce = """%r = "stablehlo.all_reduce"(%x) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %r : tensor<4xf32>"""
    _, diagnostics = read_text(
        f"""module attributes {{mhlo.num_replicas = 2 : i32}} {{
func.func @main(%x: tensor<4xf32>, %p: tensor<i1>) -> tensor<4xf32> {{
  %0 = "stablehlo.if"(%p) ({{
    {reduce}
  }}, {{
    stablehlo.return %x : tensor<4xf32>
  }}) : (tensor<i1>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}}}}"""
    )
    assert diagnostics.counts()["stablehlo.branch-collectives"] == 1


def test_branches_chained_on_branches_do_not_pile_up_producers(read_text: ReadText) -> None:
    branches = [
        f'%x{place + 1} = "stablehlo.if"(%p) ({{ %y = stablehlo.negate %x{place} : tensor<4xf32> '
        f"stablehlo.return %y : tensor<4xf32> }}, {{ stablehlo.return %x{place} : tensor<4xf32> }}) "
        ": (tensor<i1>) -> tensor<4xf32>"
        for place in range(200)
    ]
    head = "func.func @main(%x0: tensor<4xf32>, %p: tensor<i1>) -> tensor<4xf32> {"
    graph = read_text("\n".join([head, *branches, "return %x200 : tensor<4xf32> }"]))[0].classes[0]
    assert int(graph.data_deps.lengths.max()) <= 33


def test_values_of_an_enclosing_scope_are_captured(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<4xf32>, %p: tensor<i1>",
        """  %n = stablehlo.negate %x : tensor<4xf32>
  %c = stablehlo.constant dense<0> : tensor<i32>
  %d = stablehlo.constant dense<3> : tensor<i32>
  %e = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %c, %v = %x) : tensor<i32>, tensor<4xf32>
  cond {
    %q = stablehlo.compare LT, %i, %d : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %q : tensor<i1>
  } do {
    %y = stablehlo.add %v, %n : tensor<4xf32>
    %j = stablehlo.add %i, %e : tensor<i32>
    stablehlo.return %j, %y : tensor<i32>, tensor<4xf32>
  }
  return %0#1 : tensor<4xf32>""",
        "tensor<4xf32>",
    )
    assert "negate.0" in deps(graph)["add.6"]


def test_barrier_and_tuple_do_not_merge_independent_chains(read_body: ReadGraph) -> None:
    graph = read_body(
        "%x: tensor<4xf32>",
        """  %a = stablehlo.negate %x : tensor<4xf32>
  %b = stablehlo.abs %x : tensor<4xf32>
  %0:2 = stablehlo.optimization_barrier %a, %b : tensor<4xf32>, tensor<4xf32>
  %t = stablehlo.tuple %0#0, %0#1 : tuple<tensor<4xf32>, tensor<4xf32>>
  %1 = stablehlo.get_tuple_element %t[1] : (tuple<tensor<4xf32>, tensor<4xf32>>) -> tensor<4xf32>
  %2 = stablehlo.sign %0#0 : tensor<4xf32>
  return %1, %2 : tensor<4xf32>, tensor<4xf32>""",
        "(tensor<4xf32>, tensor<4xf32>)",
    )
    found = deps(graph)
    assert found["optimization_barrier.2"] == ["negate.0", "abs.1"]
    assert found["tuple.3"] == ["negate.0", "abs.1"]
    assert found["get_tuple_element.4"] == ["abs.1"]
    assert found["sign.5"] == ["negate.0"]
    assert graph.flops[2:5].tolist() == [0, 0, 0]


def test_a_composite_is_a_region_of_its_name(read_text: ReadText) -> None:
    graph = read_text(
        """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.composite "acme.gelu" %x {decomposition = @impl} : (tensor<4xf32>) -> tensor<4xf32>
  %1 = stablehlo.negate %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}
func.func private @impl(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}"""
    )[0].classes[0]
    assert regions(graph) == [(RegionKind.COMPOSITE, 1, "acme.gelu")]
    assert graph.region.tolist() == [0, -1, -1]
    assert deps(graph)["negate.1"] == ["tanh.0"]


def test_async_start_carries_the_cost_and_done_the_completion(read_text: ReadText) -> None:
    graph = read_text(
        """module attributes {mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<4xf32>) -> tensor<8xf32> {
  %0 = "stablehlo.async_start"(%x) ({
  ^bb0(%a: tensor<4xf32>):
    %g = "stablehlo.all_gather"(%a)
      <{all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}>
      : (tensor<4xf32>) -> tensor<8xf32>
    stablehlo.return %g : tensor<8xf32>
  }) : (tensor<4xf32>) -> !stablehlo.future<tensor<8xf32>>
  %1 = stablehlo.negate %x : tensor<4xf32>
  %2 = "stablehlo.async_done"(%0) : (!stablehlo.future<tensor<8xf32>>) -> tensor<8xf32>
  %3 = stablehlo.abs %2 : tensor<8xf32>
  return %3 : tensor<8xf32>
}}"""
    )[0].classes[0]
    assert graph.collectives.node.tolist() == [0]
    assert graph.collectives.comm_bytes.tolist() == [16]
    assert regions(graph) == [(RegionKind.ASYNC, 1, "async")]
    assert deps(graph) == {
        "all_gather.0": [],
        "negate.1": [],
        "async_done.2": ["all_gather.0"],
        "abs.3": ["async_done.2"],
        "return.4": ["abs.3"],
    }
    assert graph.bytes_moved[2] == 0


def test_manual_computation_costs_its_local_shapes(read_text: ReadText) -> None:
    workload, diagnostics = read_text(
        """module attributes {mhlo.num_partitions = 2 : i32} {
sdy.mesh @mesh = <["x"=2]>
func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}) -> tensor<8x4xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x"}, {}]>] out_shardings=[<@mesh, [{"x"}, {}]>]
    manual_axes={"x"} (%a: tensor<4x4xf32>) {
    %1 = stablehlo.negate %a : tensor<4x4xf32>
    sdy.return %1 : tensor<4x4xf32>
  } : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}}"""
    )
    graph = workload.classes[0]
    assert (workload.num_ranks, graph.flops.tolist()) == (2, [16, 0])
    assert regions(graph) == [(RegionKind.MANUAL, 1, "manual_computation")]
    assert diagnostics.counts() == {}


def test_a_fusion_is_one_node_that_runs_at_its_contractions_rate(read_text: ReadText) -> None:
    graph = read_text(
        """
func.func @main(%x: tensor<64x64xbf16>) -> tensor<64x64xf32> {
  %0 = "mhlo.fusion"(%x) <{fusion_kind = #mhlo<fusion_kind kOutput>}> ({
  ^bb0(%a: tensor<64x64xbf16>):
    %2 = "mhlo.dot"(%a, %a) : (tensor<64x64xbf16>, tensor<64x64xbf16>) -> tensor<64x64xf32>
    %3 = mhlo.tanh %2 : tensor<64x64xf32>
    mhlo.return %3 : tensor<64x64xf32>
  }) : (tensor<64x64xbf16>) -> tensor<64x64xf32>
  return %0 : tensor<64x64xf32>
}"""
    )[0].classes[0]
    assert len(graph) == 2
    assert graph.op_class.tolist() == [OpClass.FUSION, OpClass.FREE]
    assert (graph.flops[0], graph.transcendentals[0]) == (DOT, 64 * 64)
    assert (graph.bytes_read[0], graph.bytes_written[0]) == (64 * 64 * 2, 64 * 64 * 4)
    contraction = graph.types.dtype_of(int(graph.operands.row(0)[0]))
    assert contraction is not None
    assert graph.rate_dtype.tolist() == [contraction.code, -1]
    assert graph.contractions.lhs.tolist() == [contraction.code]


def test_host_transfers_and_messages(read_text: ReadText) -> None:
    graph = read_text(
        """module attributes {mhlo.num_replicas = 2 : i32} {
func.func @main(%x: tensor<32xf32>, %t: !stablehlo.token) -> tensor<32xf32> {
  %0 = "stablehlo.send"(%x, %t) <{channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>,
    is_host_transfer = false, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}>
    : (tensor<32xf32>, !stablehlo.token) -> !stablehlo.token
  %1:2 = "stablehlo.recv"(%0) <{channel_handle = #stablehlo.channel_handle<handle = 5, type = 1>,
    is_host_transfer = false, source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}>
    : (!stablehlo.token) -> (tensor<32xf32>, !stablehlo.token)
  %2 = "stablehlo.send"(%x, %1#1) <{channel_handle = #stablehlo.channel_handle<handle = 6, type = 2>,
    is_host_transfer = true}> : (tensor<32xf32>, !stablehlo.token) -> !stablehlo.token
  return %1#0 : tensor<32xf32>
}}"""
    )[0].classes[0]
    kinds = [NodeKind(int(kind)) for kind in graph.kind]
    assert kinds == [NodeKind.SEND, NodeKind.RECV, NodeKind.SEND, NodeKind.COMPUTE]
    assert graph.p2p.comm_bytes.tolist() == [128, 128, 128]
    assert graph.p2p.tag.tolist() == [5, 5, 6]
    assert graph.p2p.host.tolist() == [False, False, True]
    assert graph.p2p.permutation.tolist() == [0, 0, -1]
    assert graph.permutations[0].target_of(0) == 1


def test_unknown_operations_are_listed_all_at_once_with_their_place(read_text: ReadText) -> None:
    workload, diagnostics = read_text(
        """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.custom_call @first(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %1 = stablehlo.custom_call @second(%0) : (tensor<4xf32>) -> tensor<4xf32>
  %2 = "stablehlo.custom_call"(%1) <{call_target_name = "__cublas$gemm"}> : (tensor<4xf32>) -> tensor<4xf32>
  return %2 : tensor<4xf32>
}"""
    )
    graph = workload.classes[0]
    assert np.isnan(graph.flops[:3]).all()
    assert graph.bytes_moved.tolist() == [32, 32, 32, 0]
    assert [graph.node_name(node) for node in range(3)] == ["first.0", "second.1", "__cublas$gemm.2"]
    assert diagnostics.counts() == {"stablehlo.unknown-custom-call": 2, "stablehlo.unknown-cost": 1}
    assert [finding.location for finding in diagnostics] == [
        "test.mlir:3:8",
        "test.mlir:4:8",
        "test.mlir:5:8",
    ]
    assert "@first" in next(iter(diagnostics)).message


FOREIGN = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %n = stablehlo.negate %x : tensor<4xf32>
  %0 = "acme.one"(%n) {kind = #acme.kind<"z">} : (tensor<4xf32>) -> tensor<8xf32>
  %1 = "acme.two"(%0) ({
    %inner = stablehlo.abs %n : tensor<4xf32>
    "acme.yield"(%inner) : (tensor<4xf32>) -> ()
  }) : (tensor<8xf32>) -> !acme.box
  %2 = "add"(%1) : (!acme.box) -> tensor<4xf32>
  return %2 : tensor<4xf32>
}"""


@pytest.mark.parametrize("binary", [False, True])
def test_operations_of_other_dialects_are_unknown_nodes(read_text: ReadText, binary: bool) -> None:
    bindings = load_bindings()
    data = bindings.bytecode(bindings.parse(FOREIGN)) if binary else FOREIGN
    workload, diagnostics = read_text(data)
    graph = workload.classes[0]
    assert names(graph) == ["negate.0", "one.1", "two.2", "add.3", "return.4"]
    assert [graph.op_name(node) for node in range(1, 4)] == ["acme.one", "acme.two", "add"]
    assert graph.op_class[1:4].tolist() == [OpClass.UNKNOWN] * 3
    assert np.isnan(graph.flops[1:4]).all()
    assert (graph.bytes_read[1], graph.bytes_written[1]) == (16, 32)
    assert deps(graph)["two.2"] == ["one.1", "negate.0"], "what its region uses counts"
    assert deps(graph)["add.3"] == ["two.2"], "a name of the table without a dialect is not StableHLO's"
    assert diagnostics.counts() == {"stablehlo.unknown-op": 3}
    if not binary:
        assert [finding.location for finding in diagnostics] == [
            f"test.mlir:{line}" for line in ("4:8", "5:8", "9:8")
        ]


def test_an_unknown_operation_in_a_reducer_makes_its_cost_unknown(read_text: ReadText) -> None:
    workload, diagnostics = read_text(
        """
func.func @main(%x: tensor<4xf32>, %c: tensor<f32>) -> tensor<f32> {
  %0 = "stablehlo.reduce"(%x, %c) <{dimensions = array<i64: 0>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %s = "dot"(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
  return %0 : tensor<f32>
}"""
    )
    assert np.isnan(workload.classes[0].flops[0])
    assert diagnostics.counts() == {"stablehlo.unknown-cost": 1}


def test_jumps_between_blocks_are_not_supported(read_text: ReadText) -> None:
    with pytest.raises(UnsupportedError, match="function @main: @main has several blocks"):
        read_text("func.func @main() {\n cf.br ^next\n^next:\n return\n}")


def test_locations_are_kept_where_the_program_has_them(read_text: ReadText) -> None:
    program = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %x : tensor<4xf32> loc("jit(step)/mlp/neg"("model.py":12:8))
  return %0 : tensor<4xf32>
}"""
    from hespas.converters.format import ReadOptions

    graph = read_text(program)[0].classes[0]
    assert graph.strings[int(graph.source_id[0])] == "model.py:12:8"
    assert graph.strings[int(graph.framework_id[0])] == "jit(step)/mlp/neg"
    bare = read_text(program, ReadOptions(locations=False))[0].classes[0]
    assert (bare.source_id[0], bare.framework_id[0]) == (0, 0)


def test_operations_of_a_called_function_bear_the_name_of_the_call_first(read_text: ReadText) -> None:
    """As XLA names them where it inlines the call, so that profiles of the program can be matched."""
    program = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @f(%x) : (tensor<4xf32>) -> tensor<4xf32> loc("jit(step)/jit(f)"("model.py":12:8))
  return %0 : tensor<4xf32>
}
func.func private @f(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %x : tensor<4xf32> loc("neg"("model.py":3:1))
  %1 = stablehlo.abs %0 : tensor<4xf32> loc("jit(step)/jit(f)/abs")
  %2 = stablehlo.sine %1 : tensor<4xf32> loc(unknown)
  return %2 : tensor<4xf32>
}"""
    graph = read_text(program)[0].classes[0]
    named = [
        (graph.strings[framework], graph.strings[source])
        for framework, source in zip(graph.framework_id[:3], graph.source_id[:3], strict=True)
    ]
    assert named == [
        ("jit(step)/jit(f)/neg", "model.py:3:1"),
        ("jit(step)/jit(f)/abs", "model.py:12:8"),
        ("jit(step)/jit(f)", "model.py:12:8"),
    ]


def test_a_value_handed_through_a_branch_not_taken_is_not_waited_for(read_text: ReadText) -> None:
    graph = read_text(
        """
func.func @main(%w: tensor<64x64xf32>, %x: tensor<64x64xf32>, %i: tensor<i32>) -> tensor<64x64xf32> {
  %e = stablehlo.exponential %x : tensor<64x64xf32>
  %r:2 = "stablehlo.case"(%i) ({
    stablehlo.return %e, %e : tensor<64x64xf32>, tensor<64x64xf32>
  }, {
    %d = stablehlo.dot %w, %x : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    stablehlo.return %d, %e : tensor<64x64xf32>, tensor<64x64xf32>
  }) : (tensor<i32>) -> (tensor<64x64xf32>, tensor<64x64xf32>)
  %z = stablehlo.negate %r#0 : tensor<64x64xf32>
  %q = stablehlo.abs %r#1 : tensor<64x64xf32>
  %t = stablehlo.add %z, %q : tensor<64x64xf32>
  return %t : tensor<64x64xf32>
}"""
    )[0].classes[0]
    assert deps(graph)["negate.3"] == ["dot.2"]
    assert deps(graph)["abs.4"] == ["exponential.0", "case.1"]


def test_the_return_of_the_program_uses_what_leaves_it(read_text: ReadText) -> None:
    workload, diagnostics = read_text(
        """func.func @main(%x: tensor<?xf32>) -> (tensor<?xf32>, tensor<?xf32>) {
  %0 = func.call @f(%x) : (tensor<?xf32>) -> tensor<?xf32>
  %1 = stablehlo.negate %0 : tensor<?xf32>
  return %0, %1 : tensor<?xf32>, tensor<?xf32>
}
func.func private @f(%x: tensor<?xf32>) -> tensor<?xf32> {
  %0 = stablehlo.abs %x : tensor<?xf32>
  return %0 : tensor<?xf32>
}"""
    )
    graph = workload.classes[0]
    assert deps(graph) == {"abs.0": [], "negate.1": ["abs.0"], "return.2": ["abs.0", "negate.1"]}
    assert graph.op_name(2) == "func.return"
    assert (graph.op_class[2], graph.bytes_moved[2], graph.executions[2]) == (OpClass.FREE, 0, 1)
    assert not any(entry.message.startswith("func.return") for entry in diagnostics)
