"""Estimated times by the node ids of Model Explorer. The ids are those of its adapter
(``model_explorer_ids.json``, written by ``python -m tools.model_explorer``).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import hespas
from hespas.api import NodeEstimates, node_data, op_class_summary, total_duration_ns, write_node_data
from hespas.converters import ReadOptions
from hespas.converters.stablehlo.op_numbers import NumberedProgram, OpPosition, numbered_program
from hespas.graph import Workload
from hespas.graph.errors import OutputError, UnsupportedError, UsageError

PROGRAMS = Path(__file__).parents[2] / "fixtures" / "stablehlo"
IDS: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("model_explorer_ids.json").read_text(encoding="utf-8")
)["programs"]
GOLDEN = Path(__file__).with_name("branches_node_data.json")
LOOPS_AND_CALLS = {"stablehlo.while", "func.call"}

LOOP_IN_LOOP = """
module @nested {
  func.func public @main(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %0:2 = stablehlo.while(%i = %zero, %y = %x) : tensor<i32>, tensor<64x64xf32>
    cond {
      %three = stablehlo.constant dense<3> : tensor<i32>
      %p = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %p : tensor<i1>
    } do {
      %start = stablehlo.constant dense<0> : tensor<i32>
      %1:2 = stablehlo.while(%j = %start, %z = %y) : tensor<i32>, tensor<64x64xf32>
      cond {
        %five = stablehlo.constant dense<5> : tensor<i32>
        %q = stablehlo.compare LT, %j, %five : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %q : tensor<i1>
      } do {
        %one = stablehlo.constant dense<1> : tensor<i32>
        %2 = stablehlo.add %j, %one : tensor<i32>
        %3 = "stablehlo.cholesky"(%z) <{lower = true}> : (tensor<64x64xf32>) -> tensor<64x64xf32>
        stablehlo.return %2, %3 : tensor<i32>, tensor<64x64xf32>
      }
      %one = stablehlo.constant dense<1> : tensor<i32>
      %4 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %4, %1#1 : tensor<i32>, tensor<64x64xf32>
    }
    %5 = stablehlo.tanh %0#1 : tensor<64x64xf32>
    return %5 : tensor<64x64xf32>
  }
}
"""


def _estimate(name: str, estimator: str = "roofline") -> NodeEstimates:
    return hespas.estimate(PROGRAMS / name, "H100-SXM", estimator=estimator)


def _numbered(path: Path) -> NumberedProgram:
    workload = hespas.read(path)
    assert isinstance(workload, Workload)
    return numbered_program(workload)


@pytest.mark.parametrize("name", IDS)
def test_positions_are_the_node_ids_of_model_explorer(name: str) -> None:
    program = _numbered(PROGRAMS / name)
    labels = IDS[name]
    equal = 0
    rows: list[int] = program.path.tolist()
    for node, row in enumerate(rows):
        *calls, position = program.paths[row]
        label, op = (
            labels[position.function][position.number],
            program.graph.strings[int(program.graph.op_id[node])],
        )
        is_same = label == ("Outputs" if op.endswith(".return") else op)
        assert is_same or label in LOOPS_AND_CALLS, (position, label, op)
        equal += is_same
        assert {labels[call.function][call.number] for call in calls} <= LOOPS_AND_CALLS | {
            "stablehlo.composite"
        }
    # Operations of a loop in a shard_map, and nodes that the reader adds to a loop in a called function.
    assert len(program.path) - equal == {"pipeline_ring.mlir": 4, "random_mask.mlir": 5}.get(name, 0)


@pytest.mark.parametrize("name", IDS)
def test_all_ids_exist_and_the_entry_function_has_the_whole_time(name: str) -> None:
    done = _estimate(name)
    data = node_data(done)
    for function, values in data.values_us.items():
        assert max(values) < len(IDS[name][function])
    rows = op_class_summary(done.workload.classes[0], done.estimates[0])
    whole_us = total_duration_ns(rows) / 1e3
    if not sum(row.unknown for row in rows):
        assert sum(data.values_us["main"].values()) == pytest.approx(whole_us, rel=1e-4)
    assert data.operations == data.timed + data.fused + data.unknown + data.free


def test_a_file_equals_the_golden_file(tmp_path: Path) -> None:
    written = write_node_data(_estimate("branches.mlir"), tmp_path / "times.json")
    assert (tmp_path / "times.json").read_bytes() == GOLDEN.read_bytes() == written.to_json()
    with pytest.raises(OutputError):
        write_node_data(_estimate("branches.mlir"), str(tmp_path / "times.json"))


def test_a_fusion_has_its_time_on_its_matmul() -> None:
    data = node_data(_estimate("mlp.mlir"))
    labels = IDS["mlp.mlir"]["main"]
    assert [labels[node] for node in data.values_us["main"]].count("stablehlo.dot_general") == 2
    assert data.fused == 21


def test_a_loop_in_a_loop_has_the_time_of_its_body(tmp_path: Path) -> None:
    path = tmp_path / "nested.mlir"
    path.write_text(LOOP_IN_LOOP, encoding="utf-8")
    program = _numbered(path)
    names = [program.graph.node_name(node).partition(".")[0] for node in range(len(program.graph))]
    rows: list[int] = program.path.tolist()
    position = {name: program.paths[row] for name, row in zip(names, rows, strict=True)}
    assert position["cholesky"] == (OpPosition("main", 6),)  # the inner loop, as the adapter numbers it
    assert position["tanh"] == (OpPosition("main", 10),)
    done = hespas.estimate(path, "H100-SXM", estimator="roofline")
    values = node_data(done).values_us["main"]
    assert values[6] == max(values.values())


def test_calls_of_one_function_are_added() -> None:
    done = _estimate("hand_structure.mlir")
    data = node_data(done)
    labels = IDS["hand_structure.mlir"]
    calls = [value for node, value in data.values_us["main"].items() if labels["main"][node] == "func.call"]
    assert len(calls) > 1
    assert sum(calls) == pytest.approx(sum(data.values_us["outer"].values()), rel=1e-4)


def test_an_unknown_time_has_no_value() -> None:
    data = node_data(_estimate("while_unknown.mlir"))
    assert data.unknown > 0
    assert json.loads(data.to_json()).keys() == data.values_us.keys()


def test_positions_of_quoted_function_names(tmp_path: Path) -> None:
    path = tmp_path / "quoted.mlir"
    path.write_text(
        "func.func public @main(%a: tensor<8xf32>) -> tensor<8xf32> {\n"
        '  %0 = func.call @"jit(step)/a:b \\22q\\22"(%a) : (tensor<8xf32>) -> tensor<8xf32>\n'
        "  return %0 : tensor<8xf32>\n}\n"
        'func.func private @"jit(step)/a:b \\22q\\22"(%a: tensor<8xf32>) -> tensor<8xf32> {\n'
        "  %0 = stablehlo.tanh %a : tensor<8xf32>\n  return %0 : tensor<8xf32>\n}\n",
        encoding="utf-8",
    )
    program = _numbered(path)
    assert program.paths[program.path[0]] == (OpPosition("main", 0), OpPosition('jit(step)/a:b "q"', 0))


def test_a_program_with_bound_dimensions_has_the_ids_of_that_program() -> None:
    bound = ReadOptions(dims={"b": 8, "s": 16})
    done = hespas.estimate(PROGRAMS / "dynamic_mlp.mlir", "H100-SXM", options=bound)
    assert node_data(done).timed == 4


def test_other_workloads_are_refused() -> None:
    trace = hespas.estimate(PROGRAMS.parent / "hlo" / "mlp.hlo.txt", "H100-SXM", estimator="roofline")
    with pytest.raises(UnsupportedError, match="no StableHLO program"):
        node_data(trace)
    regions = hespas.estimate(PROGRAMS / "mlp.mlir", "H100-SXM", estimator="roofline", granularity="region")
    with pytest.raises(UsageError, match="region"):
        node_data(regions)
    fused, other = _estimate("mlp.mlir"), _estimate("branches.mlir")
    (graph,), (foreign,) = fused.workload.classes, other.workload.classes
    mixed = replace(fused.workload, classes=(replace(graph, attachments=foreign.attachments),))
    with pytest.raises(UnsupportedError, match="differ from its StableHLO program"):
        node_data(replace(fused, workload=mixed))
