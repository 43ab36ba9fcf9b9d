"""Programs that only resemble the one that ran, and the operations of each instruction."""

from __future__ import annotations

from pathlib import Path

import pytest

from hespas import api
from hespas.graph import Diagnostics, OpClass, OpGraph, Profile, Workload
from hespas.validators.accuracy.coverage import coverage_of, joins_of
from hespas.validators.accuracy.matching import check_program, match_program
from tests.validators.accuracy.small_profiles import Program, Recording

HLO = """HloModule jit_f, num_partitions=PARTS

ENTRY e {
  x = f32[ROWS,ROWS]{1,0} parameter(0)
  dot.1 = f32[ROWS,ROWS]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0},
  metadata={op_name="n"} ROOT add.2 = f32[ROWS,ROWS]{1,0} add(dot.1, x), metadata={op_name="m"}
}
"""


def _hlo(rows: int, parts: int = 1) -> dict[str, bytes]:
    return {"hlo/jit_f": HLO.replace("ROWS", str(rows)).replace("PARTS", str(parts)).encode()}


def _graph(rows: int) -> OpGraph:
    """The same program; its framework names are those of the module."""
    program, shape = Program(), (rows, rows)
    dot = program.add("dot.1", "dot", framework="n", takes=[shape, shape], makes=[shape])
    program.add("add.2", "add", OpClass.ELEMENTWISE, dot, framework="m", takes=[shape, shape], makes=[shape])
    return program.build()


def _recording(attachments: dict[str, bytes] | None = None, *extra: str) -> Profile:
    recording = Recording()
    for op in ("dot.1", "add.2", *extra):
        recording.event(op, 10.0, module="jit_f", run=0)
    return recording.build(attachments)


def test_the_program_that_ran_is_matched_silently() -> None:
    diagnostics = Diagnostics()
    graph, profile = _graph(64), _recording(_hlo(64))
    found = match_program(graph, profile, diagnostics)
    assert found.matched.all()
    check_program(Workload.spmd(graph, 1), profile, diagnostics)
    assert not list(diagnostics)


def test_equal_names_of_other_shapes_are_another_program() -> None:
    diagnostics = Diagnostics()
    graph, profile = _graph(32), _recording(_hlo(64))
    found = match_program(graph, profile, diagnostics)
    assert not found.matched.any(), "neither by instruction, nor by framework name, nor in order"
    assert coverage_of(graph, profile, found).matched_nodes == 0
    [told] = list(diagnostics)
    assert told.code == "match.other-program"
    assert "only 0 of 2 instructions of equal name have results of equal shape" in told.message
    assert match_program(graph, profile, Diagnostics(), is_own=True).matched.all()


def test_without_hlo_missing_names_are_told() -> None:
    diagnostics = Diagnostics()
    found = match_program(_graph(64), _recording(None, "mul.3"), diagnostics)
    assert int(found.matched.sum()) == 2
    assert [each.code for each in diagnostics] == ["match.other-program"]
    diagnostics = Diagnostics()
    match_program(_graph(64), _recording(), diagnostics)
    assert not list(diagnostics)


def test_a_module_that_cannot_be_read_says_nothing() -> None:
    graph, profile = _graph(32), _recording({"hlo/jit_f": b"\x00"})
    assert match_program(graph, profile, Diagnostics()).matched.all()
    check_program(Workload.spmd(graph, 1), profile, Diagnostics())


def test_another_number_of_devices_is_told() -> None:
    diagnostics = Diagnostics()
    check_program(Workload.spmd(_graph(64), 1), _recording(_hlo(64, parts=4)), diagnostics)
    [told] = list(diagnostics)
    assert told.code == "match.other-program"
    assert "is for 4 ranks, but the program is for 1" in told.message


def test_products_of_other_work_are_told(tmp_path: Path) -> None:
    path = tmp_path / "other.hlo.txt"
    for rows, told in ((64, 0), (32, 1), (128, 1)):
        path.write_bytes(_hlo(rows)["hlo/jit_f"])
        program = api.read(path)
        assert isinstance(program, Workload)
        diagnostics = Diagnostics()
        check_program(program, _recording(_hlo(64)), diagnostics)
        assert [each.code for each in diagnostics] == ["match.other-program"] * told


def test_joins_name_the_operations_of_each_instruction() -> None:
    program = Program()
    program.add("v1", "dot", framework="n")
    program.add("v2", "add", OpClass.ELEMENTWISE, framework="m")
    program.add("v3", "add", OpClass.ELEMENTWISE, framework="n")
    graph, profile = program.build(), _recording(_hlo(64), "dot.1", "copy.9")
    joins = joins_of(graph, profile, match_program(graph, profile, Diagnostics()))
    told = [(each.instruction, each.rule, each.operations, each.events, each.time_ns) for each in joins]
    assert told == [
        ("dot.1", "op-name", ("v1", "v3"), 2, 20.0),
        ("add.2", "op-name", ("v2",), 1, 10.0),
        ("copy.9", "", (), 1, 10.0),
    ]
    assert [each.group for each in joins][2] == -1
    assert len({each.group for each in joins}) == 3


@pytest.mark.parametrize(("kinds", "more"), [(50, 0), (53, 3)])
def test_kinds_that_are_not_listed_are_counted(kinds: int, more: int) -> None:
    program, recording = Program(), Recording()
    for number in range(kinds):
        recording.event(f"event{number}", 10.0 + number)
        program.add(f"node{number}", f"kind{number}")
    graph, profile = program.build(), recording.build()
    found = coverage_of(graph, profile, match_program(graph, profile, Diagnostics()))
    assert (len(found.unmatched_events), found.unlisted_events) == (50, more)
    assert (len(found.unmatched_nodes), found.unlisted_nodes) == (50, more)
    assert found.unmatched_events[0].name == f"event{kinds - 1}", "longest first"


def test_modules_that_nobody_holds_are_told() -> None:
    """Against a program whose operations have other names; by the names of its own, nothing is missing."""
    program = Program()
    program.add("0", "dot", framework="n")
    diagnostics = Diagnostics()
    match_program(program.build(), _recording(), diagnostics)
    assert diagnostics.counts() == {"match.no-module": 2}
    [told] = list(diagnostics)
    assert "(jit_f) that this file does not contain" in told.message
    for profile, graph in ((_recording(_hlo(64)), program.build()), (_recording(), _graph(64))):
        diagnostics = Diagnostics()
        match_program(graph, profile, diagnostics)
        assert "match.no-module" not in diagnostics.counts()
