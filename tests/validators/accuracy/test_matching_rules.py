"""Nodes matched to an event, the rule of the match, and unmatched events."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.graph import Diagnostics, OpClass, OpGraph, Profile
from hespas.validators.accuracy.coverage import RULES, EventKey, Matching, coverage_of
from hespas.validators.accuracy.matching import match_program
from tests.validators.accuracy.small_profiles import Program, Recording

ELEMENTWISE, COLLECTIVE = OpClass.ELEMENTWISE, OpClass.COLLECTIVE


def _matched(graph: OpGraph, profile: Profile) -> tuple[Matching, Diagnostics]:
    diagnostics = Diagnostics()
    return match_program(graph, profile, diagnostics), diagnostics


def _told(matching: Matching) -> list[tuple[str, tuple[int, ...]]]:
    """Rule and nodes of each event; the empty text for none."""
    numbers: list[int] = matching.event_key.tolist()
    keys = [matching.keys[number] if number >= 0 else EventKey(module="", op="") for number in numbers]
    return [(RULES[key.rule] if key.rule >= 0 else "", key.nodes) for key in keys]


def _module(lines: str) -> bytes:
    text = f"HloModule jit_f\nENTRY e {{\n  x = f32[8]{{0}} parameter(0)\n{lines}\n}}\n"
    return text.encode()


def test_by_the_name_of_the_instruction() -> None:
    program = Program()
    dot, add = program.add("dot.1", "dot"), program.add("add.2", "add", ELEMENTWISE)
    recording = Recording()
    for op in ("add.2", "dot.1", "dot.1"):
        recording.event(op, module="m")
    found, _ = _matched(program.build(), recording.build())
    assert _told(found) == [("instruction", (add,)), ("instruction", (dot,)), ("instruction", (dot,))]
    assert found.event_group.tolist() == [found.node_group[add], *[found.node_group[dot]] * 2]


def test_one_equal_name_is_chance() -> None:
    """StableHLO has an ``add.2`` as well, which is another operation."""
    program = Program()
    multiply = program.add("mul.9", "mul", ELEMENTWISE, framework="jit(f)/mul")
    program.add("add.2", "add", ELEMENTWISE, framework="jit(f)/other")
    recording = Recording()
    for op in ("add.2", "fusion.1", "copy.4"):
        recording.event(op, module="jit_f")
    told = 'metadata={op_name="jit(f)/mul"}'
    module = _module(
        f"  fusion.1 = f32[8]{{0}} negate(x), {told}\n  add.2 = f32[8]{{0}} negate(x), {told}\n"
        f"  ROOT copy.4 = f32[8]{{0}} negate(x), {told}"
    )
    found, _ = _matched(program.build(), recording.build({"hlo/jit_f": module}))
    assert _told(found) == [("op-name", (multiply,))] * 3


def test_a_name_that_different_nodes_have_is_no_instruction() -> None:
    program = Program()
    small = program.add("aten::mm", "aten::mm", takes=[(2, 2), (2, 2)])
    large = program.add("aten::mm", "aten::mm", takes=[(8, 8), (8, 8)])
    recording = Recording()
    recording.event("aten::mm", shapes="[[8, 8], [8, 8]]")
    recording.event("aten::mm", shapes="[[2, 2], [2, 2]]")
    found, _ = _matched(program.build(), recording.build())
    assert _told(found) == [("signature", (large,)), ("signature", (small,))]
    assert found.event_group[0] != found.event_group[1]


def test_a_loop_written_out_has_alike_nodes_of_one_name() -> None:
    program = Program()
    nodes = [program.add("dot.1", "dot", takes=[(4, 4)]) for _ in range(3)]
    recording = Recording()
    for _ in range(3):
        recording.event("dot.1", module="m", run=0)
    found, _ = _matched(program.build(), recording.build())
    assert _told(found) == [("instruction", tuple(nodes))] * 3
    assert len(found) == 1


def test_a_fusion_is_one_event_for_many_nodes() -> None:
    program = Program()
    dot = program.add("v1", "dot", framework="jit(f)/dot")
    add = program.add("v2", "add", ELEMENTWISE, dot, framework="jit(f)/add")
    module = """HloModule jit_f
    fused {
      p = f32[8]{0} parameter(0)
      ROOT s = f32[8]{0} add(p, p), metadata={op_name="jit(f)/add"}
    }
    ENTRY e {
      x = f32[8]{0} parameter(0)
      ROOT fusion.1 = f32[8]{0} fusion(x), kind=kLoop, calls=fused, metadata={op_name="jit(f)/dot"}
    }"""
    recording = Recording()
    recording.event("fusion.1", module="jit_f")
    graph, profile = program.build(), recording.build({"hlo/jit_f": module.encode()})
    found, _ = _matched(graph, profile)
    assert _told(found) == [("op-name", (dot, add))]
    assert found.node_group.tolist() == [0, 0]
    coverage = coverage_of(graph, profile, found)
    assert (coverage.matched_nodes, coverage.nodes, coverage.time_share) == (2, 2, 1.0)


def test_a_node_that_was_split_is_several_events() -> None:
    program = Program()
    dot = program.add("v1", "dot", framework="jit(f)/dot")
    told = 'metadata={op_name="jit(f)/dot"}'
    module = _module(f"  a = f32[8]{{0}} negate(x), {told}\n  ROOT b = f32[8]{{0}} negate(a), {told}")
    recording = Recording()
    recording.event("a", module="jit_f")
    recording.event("b", module="jit_f")
    found, _ = _matched(program.build(), recording.build({"hlo/jit_f": module}))
    assert _told(found) == [("op-name", (dot,))] * 2
    assert found.event_group.tolist() == [0, 0]


def test_a_copy_of_the_compiler_serves_the_node_that_uses_it() -> None:
    program = Program()
    dot = program.add("v1", "dot", framework="jit(f)/dot")
    module = _module(
        "  copy.1 = f32[8]{0} copy(x)\n"
        '  ROOT dot.2 = f32[8]{0} negate(copy.1), metadata={op_name="jit(f)/dot"}'
    )
    recording = Recording()
    recording.event("copy.1", 30.0, module="jit_f")
    recording.event("dot.2", 70.0, module="jit_f")
    graph, profile = program.build(), recording.build({"hlo/jit_f": module})
    found, _ = _matched(graph, profile)
    assert _told(found) == [("op-name", (dot,))] * 2
    assert [key.inferred for key in found.keys] == [True, False]
    assert coverage_of(graph, profile, found).inferred_time_ns == 30.0


def test_combined_all_reduces_carry_out_all_they_are_made_of() -> None:
    program = Program()
    one = program.add("v1", "all_reduce", COLLECTIVE, framework="jit(f)/a/psum")
    two = program.add("v2", "all_reduce", COLLECTIVE, framework="jit(f)/b/psum")
    module = _module('  ROOT all-reduce.1 = f32[8]{0} negate(x), metadata={op_name="jit(f)/(a/psum:b/psum)"}')
    recording = Recording()
    recording.event("all-reduce.1", module="jit_f")
    found, _ = _matched(program.build(), recording.build({"hlo/jit_f": module}))
    assert _told(found) == [("op-name", (one, two))]
    assert found.node_group.tolist() == [0, 0]


def test_a_collective_of_the_partitioner_is_no_part_of_a_product() -> None:
    program = Program()
    program.add("v1", "dot", framework="jit(f)/dot")
    told = 'metadata={op_name="jit(f)/dot"}'
    module = _module(
        f"  dot.1 = f32[8]{{0}} negate(x), {told}\n  ROOT all-gather.2 = f32[8]{{0}} negate(dot.1), {told}"
    )
    recording = Recording()
    recording.event("dot.1", 40.0, module="jit_f")
    recording.event("all-gather.2", 60.0, module="jit_f")
    graph, profile = program.build(), recording.build({"hlo/jit_f": module})
    found, _ = _matched(graph, profile)
    assert found.event_group.tolist() == [0, -1]
    coverage = coverage_of(graph, profile, found)
    assert (coverage.matched_time_ns, coverage.compared_time_ns) == (100.0, 40.0)


def test_a_fusion_takes_no_collective_along() -> None:
    program = Program()
    add = program.add("v1", "add", ELEMENTWISE, framework="jit(f)/add")
    psum = program.add("v2", "all_reduce", COLLECTIVE, add, framework="jit(f)/psum")
    module = _module(
        '  fusion.1 = f32[8]{0} negate(x), metadata={op_name="jit(f)/(add:psum)"}\n'
        '  ROOT all-reduce.2 = f32[8]{0} negate(fusion.1), metadata={op_name="jit(f)/psum"}'
    )
    recording = Recording()
    recording.event("fusion.1", module="jit_f")
    recording.event("all-reduce.2", module="jit_f")
    found, _ = _matched(program.build(), recording.build({"hlo/jit_f": module}))
    assert found.event_group.tolist() == [found.node_group[add], found.node_group[psum]]
    assert found.node_group[add] != found.node_group[psum]


def test_what_compilers_copy_freely_joins_no_products() -> None:
    """One broadcast is fused into two products: these stay two groups."""
    program = Program()
    shared = program.add("v0", "broadcast", OpClass.BROADCAST, framework="jit(f)/b")
    one = program.add("v1", "dot", OpClass.CONTRACTION, shared, framework="jit(f)/one")
    two = program.add("v2", "dot", OpClass.CONTRACTION, shared, framework="jit(f)/two")
    module = _module(
        '  f1 = f32[8]{0} negate(x), metadata={op_name="jit(f)/(b:one)"}\n'
        '  ROOT f2 = f32[8]{0} negate(f1), metadata={op_name="jit(f)/(b:two)"}'
    )
    recording = Recording()
    recording.event("f1", module="jit_f")
    recording.event("f2", module="jit_f")
    found, _ = _matched(program.build(), recording.build({"hlo/jit_f": module}))
    assert len(found) == 2
    assert found.node_group[one] != found.node_group[two]
    assert found.node_group[shared] in (found.node_group[one], found.node_group[two])


def test_a_product_may_bear_the_name_of_the_transpose_folded_into_it() -> None:
    program = Program()
    dot = program.add("v1", "dot", framework="jit(f)/dot")
    turn = program.add("v2", "transpose", OpClass.MOVE, dot, framework="jit(f)/transpose")
    told = 'metadata={op_name="jit(f)/transpose"}'
    module = _module(
        "  dot.1 = f32[8,8]{1,0} dot(x, x), lhs_contracting_dims={}, rhs_contracting_dims={}, "
        f"{told}\n  ROOT copy.2 = f32[8,8]{{0,1}} copy(dot.1), {told}"
    )
    recording = Recording()
    recording.event("dot.1", module="jit_f")
    recording.event("copy.2", module="jit_f")
    found, _ = _matched(program.build(), recording.build({"hlo/jit_f": module}))
    assert _told(found) == [("op-name", (turn, dot)), ("op-name", (turn,))]


def test_by_source_line_where_no_name_is_known() -> None:
    program = Program()
    node = program.add("v1", "dot", source="f.py:3:7")
    program.add("v2", "add", source="f.py:4:1")
    module = _module(
        '  ROOT a = f32[8]{0} negate(x), metadata={op_name="other" source_file="f.py" source_line=3}'
    )
    recording = Recording()
    recording.event("a", module="jit_f")
    found, _ = _matched(program.build(), recording.build({"hlo/jit_f": module}))
    assert _told(found) == [("source-line", (node,))]


def test_modules_that_disagree_say_nothing_of_an_event_without_a_module() -> None:
    program = Program()
    node = program.add("v1", "dot", framework="jit(f)/one")
    one = _module('  ROOT a = f32[8]{0} negate(x), metadata={op_name="jit(f)/one"}')
    two = _module('  ROOT a = f32[8]{0} negate(x), metadata={op_name="jit(f)/two"}')
    recording = Recording()
    recording.event("a")
    graph = program.build()
    assert _told(_matched(graph, recording.build({"hlo/m": one, "hlo/n": one}))[0]) == [("op-name", (node,))]
    assert _told(_matched(graph, recording.build({"hlo/m": one, "hlo/n": two}))[0]) == [("", ())]


def test_a_module_that_cannot_be_read_is_told_and_left_out() -> None:
    program = Program()
    program.add("v1", "dot", framework="jit(f)/one")
    recording = Recording()
    recording.event("a", module="m")
    profile = recording.build({"hlo/m": b"\x00\x01", "notes": b"no module"})
    found, diagnostics = _matched(program.build(), profile)
    assert not found.matched.any()
    assert dict(diagnostics.counts()) == {"match.unreadable-module": 1}


def test_in_order_by_operation_and_shapes_then_by_operation() -> None:
    program = Program()
    first = program.add("n1", "aten::mm", takes=[(2, 2), (2, 2)])
    second = program.add("n2", "aten::mm", takes=[(2, 2), (2, 2)])
    other = program.add("n3", "aten::relu", ELEMENTWISE)
    recording = Recording()
    for run in (0, 1):
        recording.event("aten::mm", shapes="[[2,2], [2,2]]", run=run)
        recording.event("aten::relu", shapes="[[7]]", run=run)
        recording.event("mm", shapes="[[2,2],[2,2]]", run=run)
    found, _ = _matched(program.build(), recording.build())
    step = [("signature", (first,)), ("order", (other,)), ("signature", (second,))]
    assert _told(found) == [*step, *step]


@pytest.mark.parametrize(("op", "is_found"), [("aten::mul.Tensor", False), ("aten::add.Tensor", True)])
def test_the_name_of_an_overload_is_no_operation(op: str, is_found: bool) -> None:
    program = Program()
    program.add("n", "aten::add.Tensor", ELEMENTWISE)
    recording = Recording()
    recording.event(op)
    assert _matched(program.build(), recording.build())[0].matched.tolist() == [is_found]


def test_order_says_nothing_where_the_numbers_differ() -> None:
    program = Program()
    program.add("n1", "aten::mm")
    program.add("n2", "aten::mm", makes=[(3,)])
    recording = Recording()
    for _ in range(3):
        recording.event("aten::mm", run=0)
    assert not _matched(program.build(), recording.build())[0].matched.any()


def test_a_loop_comes_round_as_often_as_it_turns() -> None:
    program = Program()
    loop = program.loop(3.0)
    one = program.add("n1", "mm", region=loop)
    two = program.add("n2", "mm", region=loop, makes=[(3,)])
    dead = program.loop(0.0)
    program.add("n3", "mm", region=dead)
    recording = Recording()
    for _ in range(6):
        recording.event("aten::mm", run=0)
    found, _ = _matched(program.build(), recording.build())
    assert _told(found) == [("order", (one,)), ("order", (two,))] * 3


def test_many_events_without_a_run_are_told() -> None:
    program = Program()
    program.add("dot.1", "dot")
    recording = Recording()
    recording.event("dot.1")
    recording.event("dot.1")
    _, diagnostics = _matched(program.build(), recording.build())
    assert dict(diagnostics.counts()) == {"match.runs-unknown": 1}


def test_nothing_matches_nothing() -> None:
    graph, profile = Program().build(), Recording().build()
    found, diagnostics = _matched(graph, profile)
    coverage = coverage_of(graph, profile, found)
    assert (len(found), len(found.event_key), len(found.node_group)) == (0, 0, 0)
    assert (coverage.time_share, coverage.count_share, coverage.nodes) == (1.0, 1.0, 0)
    assert not list(diagnostics)


def test_events_without_names_and_a_program_without_names() -> None:
    program = Program()
    program.add("", "", framework="")
    recording = Recording()
    recording.event("", 5.0, kernel="sgemm")
    recording.event("", -1.0)
    graph, profile = program.build(), recording.build()
    found, _ = _matched(graph, profile)
    coverage = coverage_of(graph, profile, found)
    assert not found.matched.any()
    assert (coverage.time_ns, coverage.matched_time_ns) == (5.0, 0.0)
    assert [(row.name, row.count, row.total_ns) for row in coverage.unmatched_events] == [
        ("sgemm", 1, 5.0),
        ("(unnamed)", 1, 0.0),
    ]
    assert [(row.name, row.count) for row in coverage.unmatched_nodes] == [("(unnamed)", 1)]


def test_both_sides_list_what_is_not_matched() -> None:
    program = Program()
    program.add("dot.1", "dot")
    program.add("sort.2", "sort", OpClass.SORT)
    program.add("free", "bitcast", OpClass.FREE, flops=0.0, moved=0.0)
    recording = Recording()
    recording.event("dot.1", 30.0)
    recording.event("other", 50.0)
    recording.event("other", 20.0)
    graph, profile = program.build(), recording.build()
    coverage = coverage_of(graph, profile, _matched(graph, profile)[0])
    assert (coverage.events, coverage.matched_events) == (3, 1)
    assert (coverage.time_share, coverage.by_rule) == (0.3, {"instruction": 30.0})
    assert [(row.name, row.count, row.total_ns) for row in coverage.unmatched_events] == [("other", 2, 70.0)]
    assert [row.name for row in coverage.unmatched_nodes] == ["sort"]
    assert (coverage.nodes, coverage.matched_nodes) == (2, 1)


def test_ranks_and_runs_are_matched_each_by_itself() -> None:
    program = Program()
    nodes = [program.add(f"n{number}", "mm") for number in range(2)]
    recording = Recording()
    for rank in (1, 0):
        for run in (1, 0):
            for _ in range(2):
                recording.event("aten::mm", run=run, rank=rank)
    found, _ = _matched(program.build(), recording.build())
    assert np.array(_told(found), object)[:, 1].tolist() == [(nodes[0],), (nodes[1],)] * 4


def test_a_program_printed_without_names_is_told_how_to_keep_them() -> None:
    """Where something is left that structure does not tell either."""
    module = _module('  ROOT a = f32[8]{0} negate(x), metadata={op_name="jit(f)/one"}')
    recording = Recording()
    recording.event("a", module="jit_f")
    recording.event("unheard-of", module="jit_f")
    profile = recording.build({"hlo/jit_f": module})
    for framework, told in (("", 1), ("jit(f)/other", 0)):
        program = Program()
        program.add("v1", "negate", OpClass.ELEMENTWISE, framework=framework, makes=[(8,)])
        matching, found = _matched(program.build(), profile)
        assert [RULES[key.rule] for key in matching.keys if key.nodes] == ["structure"]
        assert found.counts().get("match.no-names", 0) == told
        assert any("debug_info=True" in each.message for each in found) == bool(told)
