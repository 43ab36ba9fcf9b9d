"""Order, dependencies, loops, branches, calls and provenance of a program read from HLO."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import isnan

import pytest

from hespas.graph import Diagnostics, OpClass, OpGraph, RegionKind, Workload
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.graph.passes import FoldFree, UnrollLoops, all_deps, is_topological, totals

ReadText = Callable[[str], tuple[Workload, Diagnostics]]


def _node(graph: OpGraph, name: str) -> int:
    return [graph.node_name(node) for node in range(len(graph))].index(name)


def _waits(graph: OpGraph) -> dict[str, list[str]]:
    """Control predecessors by name, of the nodes that have any."""
    rows = graph.control_deps.to_lists()
    return {
        graph.node_name(node): [graph.node_name(dep) for dep in row] for node, row in enumerate(rows) if row
    }


def _deps(graph: OpGraph, name: str) -> list[str]:
    return [graph.node_name(dep) for dep in graph.data_deps.row(_node(graph, name)).tolist()]


TUPLES = """HloModule m, is_scheduled=true
ENTRY e {
  x = f32[8]{0} parameter(0), metadata={op_name="x"}
  a = f32[8]{0:T(256)} negate(x), metadata={op_name="jit(f)/neg" source_file="f.py" source_line=3}
  b = f32[8]{0} abs(x), control-predecessors={a}, sharding={replicated}
  inner = (f32[8]{0}, f32[8]{0}) tuple(a, b)
  outer = ((f32[8]{0}, f32[8]{0}), f32[8]{0}) tuple(inner, x)
  first = (f32[8]{0}, f32[8]{0}) get-tuple-element(outer), index=0
  second = f32[8]{0} get-tuple-element(first), index=1
  two = (f32[8]{0}, s32[8]{0}) custom-call(x), custom_call_target="TopK"
  one = s32[8]{0} get-tuple-element(two), index=1
  ROOT y = f32[8]{0} add(second, second)
}
"""


def test_tuples_are_followed_element_by_element(read_text: ReadText) -> None:
    graph = read_text(TUPLES)[0].classes[0]
    assert [graph.node_name(node) for node in range(len(graph))] == [
        "x", "a", "b", "inner", "outer", "first", "second", "two", "one", "y",
    ]  # fmt: skip
    assert _deps(graph, "inner") == ["a", "b"]
    assert _deps(graph, "first") == ["inner"]
    assert _deps(graph, "second") == ["b"]
    assert _deps(graph, "one") == ["two"]
    assert _deps(graph, "y") == ["second"]
    assert is_topological(graph)
    assert graph.bytes_read[_node(graph, "y")] == 32


def test_provenance_types_and_attributes_are_kept(read_text: ReadText) -> None:
    workload, diagnostics = read_text(TUPLES)
    graph = workload.classes[0]
    a, b = _node(graph, "a"), _node(graph, "b")
    assert graph.op_name(a) == "negate"
    assert graph.strings[int(graph.framework_id[a])] == "jit(f)/neg"
    assert graph.strings[int(graph.source_id[a])] == "f.py:3"
    assert graph.control_deps.row(b).tolist() == [a]
    kept = {
        graph.strings[int(graph.extra.key[row])]: graph.extra.value(row) for row in graph.extra.rows_of(b)
    }
    assert kept == {"control-predecessors": b"{a}", "sharding": b"{replicated}"}
    layout = graph.types.encoding[graph.results.row(a)[0]]
    assert graph.strings[int(layout)] == "0:T(256)"
    assert workload.metadata["is_scheduled"] == "true"
    assert workload.metadata["num_instructions"] == "10"
    assert len(diagnostics) == 0


def _loop(condition: str, start: str = "c0", step: str = "add(i, one)", config: str = "") -> str:
    return f"""HloModule m
body {{
  s = (s32[], f32[8]{{0}}, f32[8]{{0}}, s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  v = f32[8]{{0}} get-tuple-element(s), index=1
  w = f32[8]{{0}} get-tuple-element(s), index=2
  l = s32[] get-tuple-element(s), index=3
  one = s32[] constant(1)
  two = s32[] constant(2)
  next = s32[] {step}
  grown = f32[8]{{0}} add(v, w)
  ROOT t = (s32[], f32[8]{{0}}, f32[8]{{0}}, s32[]) tuple(next, grown, w, l)
}}
less {{
  p = s32[] parameter(0)
  q = s32[] parameter(1)
  ROOT c = pred[] compare(p, q), direction=LT
}}
cond {{
  s = (s32[], f32[8]{{0}}, f32[8]{{0}}, s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  l = s32[] get-tuple-element(s), index=3
  ten = s32[] constant(10)
  {condition}
}}
ENTRY e {{
  x = f32[8]{{0}} parameter(0)
  n = s32[] parameter(1)
  c0 = s32[] constant(0)
  c20 = s32[] constant(20)
  y = f32[8]{{0}} negate(x)
  init = (s32[], f32[8]{{0}}, f32[8]{{0}}, s32[]) tuple({start}, x, y, c20)
  loop = (s32[], f32[8]{{0}}, f32[8]{{0}}, s32[]) while(init), condition=cond, body=body{config}
  out = f32[8]{{0}} get-tuple-element(loop), index=1
  ROOT z = f32[8]{{0}} exponential(out)
}}
"""


COMPARE = "ROOT c = pred[] compare(i, ten), direction="


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        (_loop(COMPARE + "LT"), 10),
        (_loop(COMPARE + "LE"), 11),
        (_loop(COMPARE + "NE"), 10),
        (_loop("ROOT c = pred[] compare(ten, i), direction=GT"), 10),
        (_loop("ROOT c = pred[] compare(i, l), direction=LT"), 20),
        (_loop("ROOT c = pred[] fusion(i, ten), kind=kLoop, calls=less"), 10),
        (
            _loop(
                "k = s64[] convert(i)\n  m = s64[] convert(ten)\n"
                "  ROOT c = pred[] compare(k, m), direction=LT"
            ),
            10,
        ),
        (_loop(COMPARE + "LT", step="add(two, i)"), 5),
        (_loop(COMPARE + "LT", start="c20"), 0),
        (_loop(COMPARE + "GT", start="c20", step="subtract(i, two)"), 5),
        (_loop(COMPARE + "GE", start="c20", step="subtract(i, two)"), 6),
        (_loop(COMPARE + "LT", config=', backend_config={"known_trip_count":{"n":"7"}}'), 7),
        (_loop(COMPARE + "LT", config=', backend_config="{\\"known_trip_count\\":{\\"n\\":\\"7\\"}}"'), 7),
    ],
)
def test_trip_counts(read_text: ReadText, text: str, trips: int) -> None:
    workload, diagnostics = read_text(text)
    graph = workload.classes[0]
    body, condition = _node(graph, "grown"), _node(graph, "ten")
    assert graph.executions[body] == trips
    assert graph.executions[condition] == trips, "the evaluation that ends the loop is left out"
    assert graph.executions[_node(graph, "z")] == 1
    stated = "known_trip_count" in text
    assert diagnostics.counts() == ({} if stated else {"hlo.inferred-trips": 1})


@pytest.mark.parametrize(
    "text",
    [
        _loop(COMPARE + "EQ"),
        _loop(COMPARE + "LT", start="n"),
        _loop(COMPARE + "LT", step="multiply(i, two)"),
        _loop(COMPARE + "LT", step="subtract(i, one)"),
        _loop(COMPARE + "NE", start="c20"),
        _loop("ROOT c = pred[] constant(true)"),
        # A counter of 8 bits never gets past 127, and a step of 100 leaps over it.
        _loop(COMPARE + "LT", step="add(i, two)")
        .replace("s32", "s8")
        .replace("constant(10)", "constant(127)"),
        _loop("x = s32[] multiply(i, i)\n  ROOT c = pred[] compare(x, ten), direction=LT"),
    ],
)
def test_trip_counts_that_are_not_known_are_nan(read_text: ReadText, text: str) -> None:
    workload, diagnostics = read_text(text)
    graph = workload.classes[0]
    assert isnan(graph.executions[_node(graph, "grown")])
    assert diagnostics.counts() == {"hlo.unknown-trips": 1}


def test_a_loop_hands_values_on(read_text: ReadText) -> None:
    graph = read_text(_loop(COMPARE + "LT"))[0].classes[0]
    regions = graph.regions
    assert [RegionKind(kind) for kind in regions.kind.tolist()] == [RegionKind.LOOP_BODY]
    assert [graph.strings[row] for row in regions.label.tolist()] == ["body"]
    edges = zip(regions.carried_producer.tolist(), regions.carried_consumer.tolist(), strict=True)
    named = [(graph.node_name(maker), graph.node_name(reader)) for maker, reader in edges]
    assert sorted(named) == [("grown", "v"), ("next", "i"), ("next", "i")], "condition and body read i"
    assert set(regions.carried_region.tolist()) == {0}
    assert _waits(graph) == {name: ["c"] for name in ("i", "v", "w", "l", "one", "two")}
    assert _deps(graph, "w") == ["y"]
    assert _deps(graph, "out") == ["grown"]
    assert graph.op_class[_node(graph, "loop")] == OpClass.CONTROL
    assert is_topological(graph)


def test_unrolled_trips_form_a_chain(read_text: ReadText) -> None:
    graph = read_text(_loop(COMPARE + "LT"))[0].classes[0]
    flat = FoldFree()(UnrollLoops()(graph, Diagnostics()), Diagnostics())
    grown = [node for node in range(len(flat)) if flat.node_name(node) == "grown"]
    assert len(grown) == 10
    for before, after in pairwise(grown):
        assert before in flat.data_deps.row(after).tolist()
    assert grown[-1] in flat.data_deps.row(_node(flat, "z")).tolist()
    assert totals(flat).flops == totals(graph).flops
    tests = [node for node in range(len(flat)) if flat.node_name(node) == "c"]
    counters = [node for node in range(len(flat)) if flat.node_name(node) == "next"]
    assert len(tests) == len(counters) == 10
    for test, at, counter in zip(tests, grown, counters, strict=True):
        assert test in flat.control_deps.row(at).tolist(), "a trip waits for its predicate"
        assert test in flat.control_deps.row(counter).tolist()
    for counter, test in zip(counters[:-1], tests[1:], strict=True):
        assert counter in flat.data_deps.row(test).tolist(), "a predicate waits for the counter"


@pytest.mark.parametrize(
    "passes",
    [(FoldFree(), UnrollLoops(overlap_trips=True)), (UnrollLoops(overlap_trips=True), FoldFree())],
)
def test_folding_before_or_after_unrolling_keeps_the_order(
    read_text: ReadText, passes: tuple[FoldFree | UnrollLoops, ...]
) -> None:
    flat = read_text(_loop(COMPARE + "LT"))[0].classes[0]
    for each in passes:
        flat = each(flat, Diagnostics())
    assert is_topological(flat)
    names = [flat.node_name(node) for node in range(len(flat))]
    assert names == ["y", *["c", "next", "grown"] * 10, "z"]
    rows = all_deps(flat).to_lists()
    assert set(rows[4]) == {2}, "what the loop starts its counter with matters in the first trip only"
    assert [set(row) for row in rows[5:7]] == [{2, 4}, {0, 3, 4}]


def test_a_predicate_that_is_constant_gates_nothing(read_text: ReadText) -> None:
    graph = read_text(_loop("ROOT c = pred[] constant(true)"))[0].classes[0]
    assert _waits(graph) == {}


CARRIED_PREDICATE = """HloModule m
body {
  p = pred[] parameter(0)
  x = f32[8]{0} iota(), iota_dimension=0
  y = pred[8]{0} is-finite(x)
  s = pred[1]{0} slice(y), slice={[0:1]}
  ROOT q = pred[] reshape(s)
}
cond {
  ROOT p = pred[] parameter(0)
}
ENTRY e {
  a = pred[] parameter(0)
  b = pred[] not(a)
  ROOT loop = pred[] while(b), condition=cond, body=body
}
"""


def test_a_carried_predicate_is_waited_for_one_trip_later(read_text: ReadText) -> None:
    graph = read_text(CARRIED_PREDICATE)[0].classes[0]
    assert _waits(graph) == {"x": ["b"]}
    table = graph.regions
    (maker,), (reader,) = table.carried_producer.tolist(), table.carried_consumer.tolist()
    assert (graph.node_name(maker), graph.node_name(reader)) == ("q", "x")


STATE_PASSED_ON = """HloModule m
step {
  s = (s32[], f32[8]{0}) parameter(0)
  v = f32[8]{0} get-tuple-element(s), index=1
  ROOT w = f32[8]{0} negate(v)
}
body {
  s = (s32[], f32[8]{0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  made = f32[8]{0} call(s), to_apply=step
  ROOT t = (s32[], f32[8]{0}) tuple(next, made)
}
cond {
  s = (s32[], f32[8]{0}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  ten = s32[] constant(10)
  ROOT c = pred[] compare(i, ten), direction=LT
}
ENTRY e {
  x = f32[8]{0} parameter(0)
  zero = s32[] constant(0)
  init = (s32[], f32[8]{0}) tuple(zero, x)
  ROOT loop = (s32[], f32[8]{0}) while(init), condition=cond, body=body
}
"""


def test_loop_state_read_inside_a_call(read_text: ReadText) -> None:
    graph = read_text(STATE_PASSED_ON)[0].classes[0]
    regions = graph.regions
    edges = zip(regions.carried_producer.tolist(), regions.carried_consumer.tolist(), strict=True)
    named = {(graph.node_name(maker), graph.node_name(reader)) for maker, reader in edges}
    assert ("made", "v") in named
    kinds = [RegionKind(kind) for kind in regions.kind.tolist()]
    assert kinds == [RegionKind.LOOP_BODY, RegionKind.CALL]
    assert regions.parent.tolist() == [-1, 0]
    assert graph.executions[_node(graph, "w")] == 10


def _conditional(operands: str, attributes: str, predicate: str = "s32[]") -> str:
    return f"""HloModule m
light {{
  v = f32[8,8]{{1,0}} parameter(0)
  ROOT n = f32[8,8]{{1,0}} negate(v)
}}
heavy {{
  v = f32[8,8]{{1,0}} parameter(0)
  ROOT d = f32[8,8]{{1,0}} dot(v, v), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
ENTRY e {{
  which = {predicate} parameter(0)
  x = f32[8,8]{{1,0}} parameter(1)
  y = f32[8,8]{{1,0}} abs(x)
  ROOT out = f32[8,8]{{1,0}} conditional({operands}), {attributes}
}}
"""


@pytest.mark.parametrize(
    "text",
    [
        _conditional("which, x, y", "branch_computations={light, heavy}"),
        _conditional("which, x, y", "branch_computations={%light, /*index=1*/%heavy}"),
        _conditional("which, x, y", "true_computation=light, false_computation=heavy", "pred[]"),
    ],
)
def test_the_costliest_branch_runs(read_text: ReadText, text: str) -> None:
    workload, diagnostics = read_text(text)
    graph = workload.classes[0]
    assert (graph.executions[_node(graph, "n")], graph.executions[_node(graph, "d")]) == (0, 1)
    assert (_deps(graph, "n"), _deps(graph, "d")) == (["x"], ["y"])
    assert _deps(graph, "out") == ["which", "d"]
    assert _waits(graph) == {"n": ["which"], "d": ["which"]}
    assert diagnostics.counts() == {"hlo.assumed-branch": 1}
    assert totals(graph).flops == 2 * 8**3 + 64


def test_branches_with_different_collectives_are_told(read_text: ReadText) -> None:
    line = "ROOT n = f32[8,8]{1,0} collective-permute(v), source_target_pairs={{0,0}}"
    text = _conditional("which, x, y", "branch_computations={light, heavy}")
    _, diagnostics = read_text(text.replace("ROOT n = f32[8,8]{1,0} negate(v)", line))
    assert diagnostics.counts() == {"hlo.assumed-branch": 1, "hlo.branch-collectives": 1}


CALLS = """HloModule m
twice {
  a = f32[8]{0} parameter(0)
  b = f32[8]{0} parameter(1)
  c = f32[8]{0} add(a, b)
  ROOT t = (f32[8]{0}, f32[8]{0}) tuple(c, a)
}
ENTRY e {
  x = f32[8]{0} parameter(0)
  y = f32[8]{0} negate(x)
  p = (f32[8]{0}, f32[8]{0}) call(x, y), to_apply=twice
  q = f32[8]{0} get-tuple-element(p), index=0
  r = (f32[8]{0}, f32[8]{0}) call(y, q), to_apply=twice
  s = f32[8]{0} get-tuple-element(r), index=1
  ROOT z = f32[8]{0} abs(s)
}
"""


def test_calls_are_written_out_per_call(read_text: ReadText) -> None:
    graph = read_text(CALLS)[0].classes[0]
    names = [graph.node_name(node) for node in range(len(graph))]
    assert names == ["x", "y", "c", "t", "p", "q", "c", "t", "r", "s", "z"]
    assert graph.data_deps.row(2).tolist() == [0, 1]
    assert graph.data_deps.row(6).tolist() == [1, 5]
    assert _deps(graph, "q") == ["c"]
    assert _deps(graph, "s") == ["y"]
    assert totals(graph).flops == 8 * 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = f32[2] call(x)", "attribute calls"),
        ("y = f32[2] call(x), to_apply=nobody", "'nobody' is not one"),
        ("y = f32[2] call(x), to_apply=e", "calls itself"),
        ("y = f32[2] fusion(x), kind=kLoop", "attribute calls"),
        ("y = f32[2] while(x), condition=one, body=missing", "'missing' is not one"),
        ("y = f32[2] while(x), condition=one", "attribute body"),
        ("y = f32[2] while(x, x), condition=one, body=one", "1 operand of while"),
        ("y = f32[2] call(x), to_apply=two", "to take 1 parameters, found 2"),
        ("y = f32[2] conditional(x, x), branch_computations={one, one}", "a scalar to branch on"),
        ("y = f32[2] get-tuple-element(x), index=0", "an index below 0"),
        ("y = f32[2] get-tuple-element(x)", "attribute index"),
        ("y = f32[2] add()", "2 operands of add, which has 0"),
        ("y = f32[2] parameter(0)", "a unique parameter number"),
        ("ROOT y = f32[2] abs(x)\n  ROOT z = f32[2] abs(x)", "one ROOT"),
        (f"y = f32[{'1,' * 99_999}1] abs(x)", "at most 4,096 extents"),
        ("y = f32[2] dot(x, x), lhs_contracting_dims={4}, rhs_contracting_dims={0}", "lhs_contracting_dims"),
        ("y = f32[2] reduce(x, x), dimensions={0}", "attribute to_apply"),
        ("y = f32[2] convolution(x, x), dim_labels=bf", "dimension labels"),
        ("y = f32[2] reduce-window(x, x), window={size=2y}, to_apply=one", "an integer"),
        ("y = f32[2] parameter(one)", "the number of a parameter"),
    ],
)
def test_faults_name_the_instruction(read_text: ReadText, body: str, message: str) -> None:
    text = f"""HloModule m
one {{
  a = f32[2] parameter(0)
}}
two {{
  a = f32[2] parameter(0)
  b = f32[2] parameter(1)
}}
ENTRY e {{
  x = f32[2] parameter(0)
  {body}
}}
"""
    with pytest.raises(FormatError) as caught:
        read_text(text)
    assert message in caught.value.message
    assert caught.value.position is not None
    assert "line" in caught.value.position


def test_nesting_has_a_limit_and_says_so(read_text: ReadText) -> None:
    bodies = "".join(
        f"c{i + 1} {{\n  p = f32[] parameter(0)\n  q = f32[] call(p), to_apply=c{i}\n}}\n" for i in range(500)
    )
    text = f"HloModule m\nc0 {{\n  p = f32[] parameter(0)\n}}\n{bodies}ENTRY e {{\n  p = f32[] parameter(0)\n"
    with pytest.raises(UnsupportedError, match="nested more than 100 deep"):
        read_text(text + "  q = f32[] call(p), to_apply=c500\n}\n")


def test_fusions_that_double_are_refused_and_take_no_memory(read_text: ReadText) -> None:
    dot = "dot(p, p), lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    text = (
        f"HloModule m\nc0 {{\n  p = f32[2] parameter(0)\n  q = f32[] {dot}\n  ROOT r = f32[2] negate(p)\n}}\n"
    )
    for level in range(1, 60):
        call = f"kind=kLoop, calls=c{level - 1}"
        text += f"c{level} {{\n  p = f32[2] parameter(0)\n  a = f32[2] fusion(p), {call}\n"
        text += f"  ROOT b = f32[2] fusion(a), {call}\n}}\n"
    text += "ENTRY e {\n  p = f32[2] parameter(0)\n  ROOT a = f32[2] fusion(p), kind=kLoop, calls=c59\n}\n"
    with pytest.raises(FormatError, match="operations after inlining its fusions"):
        read_text(text)


ISSUED = """HloModule m, is_scheduled=true, num_partitions=4
add {
  l = f32[] parameter(0)
  r = f32[] parameter(1)
  ROOT s = f32[] add(l, r)
}
ENTRY e {
  x = f32[64]{0} parameter(0)
  w = f32[64]{0} parameter(1)
  a = f32[64]{0} negate(x)
  start = f32[64]{0} all-reduce-start(a), channel_id=1, replica_groups={{0,1,2,3}},
      use_global_device_ids=true, to_apply=add, control-predecessors={w}
  behind = f32[64]{0} negate(w), control-predecessors={start}
  second = f32[64]{0} all-reduce-start(behind), channel_id=2, replica_groups={{0,1,2,3}},
      use_global_device_ids=true, to_apply=add, control-predecessors={start}
  done = f32[64]{0} all-reduce-done(start)
  after = f32[64]{0} abs(w), control-predecessors={done}
  last = f32[64]{0} all-reduce-done(second)
  ROOT out = (f32[64]{0}, f32[64]{0}) tuple(after, last)
}
"""


def test_behind_an_asynchronous_start_is_behind_its_issue(read_text: ReadText) -> None:
    graph = read_text(ISSUED)[0].classes[0]
    waits = _waits(graph)
    assert waits == {"start": ["w"], "behind": ["a", "w"], "second": ["a", "w"], "after": ["done"]}
    assert _deps(graph, "done") == ["start"]
