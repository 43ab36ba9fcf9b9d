"""Rules over one graph: each with an input that breaks it and a near miss that does not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest

from hespas.graph import (
    CollectiveKind,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    RaggedArray,
    RegionKind,
    Severity,
    StridedGroups,
    Workload,
    dtype,
)
from hespas.graph.errors import InvariantError
from hespas.validators.checker import RULES, Profile, check_workload, rules
from hespas.validators.checker.job import Scope
from tests.validators.checker.small_jobs import Steps, job_of


def codes(job: Workload, profile: Profile | None = None) -> set[tuple[str, str]]:
    result = check_workload(job, profile)
    return {(violation.code, violation.severity.value) for violation in result.violations}


def spmd(graph: OpGraph, ranks: int = 2) -> Workload:
    return Workload.spmd(graph, ranks)


def chain(length: int = 3) -> Steps:
    steps = Steps()
    for place in range(length):
        steps.compute(*([place - 1] if place else []))
    return steps


def test_sound_graph_breaks_nothing() -> None:
    steps = chain()
    steps.coll(2)
    for profile in (None, "chakra", "astra-sim"):
        result = check_workload(spmd(steps.build()), profile)
        assert result.valid
        assert result.exit_code == 0
        assert result.violations == ()


def test_et005_duplicate_ids() -> None:
    steps = chain()
    steps.builder.set_id(2, 1)
    result = check_workload(spmd(steps.build()))
    assert [(v.code, v.rank, v.node) for v in result.violations] == [("ET005", 0, 1)]
    assert result.exit_code == 1
    other = chain()
    other.builder.set_id(2, 2**64 - 1)
    assert codes(spmd(other.build())) == set()


def cyclic(deps: list[list[int]]) -> OpGraph:
    return replace(chain(len(deps)).build(), data_deps=RaggedArray.from_lists(deps))


def test_et007_cycle_is_printed_by_id() -> None:
    graph = cyclic([[], [3], [1], [2], [3]])
    graph = replace(graph, id=np.array([10, 11, 12, 13, 14], np.uint64))
    violation = check_workload(spmd(graph)).violations[0]
    assert violation.code == "ET007"
    ids = violation.message.split(": ")[2].split(" (")[0].split(" -> ")
    assert set(ids) == {"11", "12", "13"}
    assert len(ids) == 4
    assert ids[0] == ids[-1]
    deps = {"11": "13", "12": "11", "13": "12"}
    assert all(deps[one] == other for one, other in pairwise(ids))


def test_et007_self_dependency_and_cycles_over_control_dependencies() -> None:
    assert ("ET007", "error") in codes(spmd(cyclic([[], [1]])))
    graph = replace(cyclic([[], [0], [1]]), control_deps=RaggedArray.from_lists([[2], [], []]))
    assert ("ET007", "error") in codes(spmd(graph))
    assert codes(spmd(replace(graph, control_deps=RaggedArray.from_lists([[], [], [0]])))) == set()


def test_et007_backward_order_is_no_cycle() -> None:
    assert codes(spmd(cyclic([[1], [2], []]))) == set()


def test_et007_deep_chain_is_no_problem() -> None:
    length = 20_000
    graph = cyclic([[place + 1] for place in range(length - 1)] + [[]])
    assert codes(spmd(graph)) == set()
    assert ("ET007", "error") in codes(spmd(cyclic([[(place + 1) % length] for place in range(length)])))


@pytest.mark.parametrize(
    ("of_one", "control_of_one", "control_of_two", "broken"),
    [((0, 0), (), (), True), ((), (0, 0), (), True), ((0,), (0,), (), True), ((0,), (), (0,), False)],
)
def test_et008_duplicate_dependencies(
    of_one: tuple[int, ...], control_of_one: tuple[int, ...], control_of_two: tuple[int, ...], broken: bool
) -> None:
    control = RaggedArray.from_lists([(), control_of_one, control_of_two])
    graph = replace(
        chain().build(), data_deps=RaggedArray.from_lists([(), of_one, (1,)]), control_deps=control
    )
    assert codes(spmd(graph)) == ({("ET008", "warning")} if broken else set())


def of_kind(kind: NodeKind) -> OpGraph:
    steps = chain()
    steps.node(kind, [2], OpClass.UNKNOWN, "odd")
    return steps.build()


def test_et009_kinds() -> None:
    assert ("ET009", "error") in codes(spmd(of_kind(NodeKind.INVALID)))
    assert codes(spmd(of_kind(NodeKind.METADATA)), "chakra") == set()
    assert ("ET009", "error") in codes(spmd(of_kind(NodeKind.METADATA)), "astra-sim")


def collective(kind: CollectiveKind = CollectiveKind.ALL_REDUCE, size: float = 1024.0) -> Workload:
    steps = chain()
    steps.coll(2, kind=kind, size=size)
    return spmd(steps.build())


def test_et011_undescribed_collectives() -> None:
    bare = spmd(of_kind(NodeKind.COLLECTIVE))
    for job in (bare, collective(CollectiveKind.UNKNOWN), collective(size=nan)):
        assert codes(job) == {("ET011", "warning")}
        assert ("ET011", "error") in codes(job, "chakra")
    assert codes(collective(CollectiveKind.BARRIER, nan), "chakra") == set()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (CollectiveKind.ALL_REDUCE, set[tuple[str, str]]()),
        (CollectiveKind.ALL_TO_ALL, set[tuple[str, str]]()),
        (CollectiveKind.BROADCAST, {("ET011", "warning")}),
        (CollectiveKind.BARRIER, {("ET011", "error")}),
        (CollectiveKind.REDUCE, {("ET011", "error")}),
        (CollectiveKind.REDUCE_SCATTER_BLOCK, {("ET011", "error")}),
    ],
)
def test_et011_what_astra_sim_can_run(kind: CollectiveKind, expected: set[tuple[str, str]]) -> None:
    assert codes(collective(kind), "astra-sim") == expected
    assert codes(collective(kind), "chakra") == set()


def test_et012_empty_communication() -> None:
    assert codes(collective(size=0)) == {("ET012", "warning")}
    assert codes(collective(size=0), "astra-sim") == {("ET012", "error")}
    assert codes(collective(size=1), "astra-sim") == set()
    assert codes(messages(size=0), "chakra") == {("ET012", "error")}


def messages(**options: float) -> Workload:
    left, right = Steps(), Steps()
    left.compute()
    right.compute()
    left.send(0, 1, 0, size=options.get("size", 64.0), tag=int(options.get("tag", 0)))
    right.recv(0, 1, 0, size=options.get("size", 64.0), tag=int(options.get("tag", 0)))
    return job_of(left, right)


def test_et014_messages_state_everything() -> None:
    assert codes(messages(), "astra-sim") == set()
    assert codes(messages(tag=-1), "chakra") == {("ET014", "error")}
    assert codes(messages(tag=-1)) == set()
    assert codes(messages(size=nan), "chakra") == {("ET014", "error")}
    bare = Steps()
    bare.compute()
    bare.message(NodeKind.SEND, [0], None)
    assert codes(spmd(bare.build()), "chakra") == {("ET014", "error")}
    assert codes(spmd(bare.build())) == {("ET014", "warning")}
    assert ("ET014", "error") in codes(spmd(of_kind(NodeKind.RECV)), "chakra")


@pytest.mark.parametrize(
    ("source", "target", "word"),
    [(0, 0, "its own rank"), (0, 2, "not among the 2 ranks"), (1, 0, "another rank sends it")],
)
def test_et014_peers_are_other_ranks_of_the_job(source: int, target: int, word: str) -> None:
    left, right = Steps(num_ranks=3), Steps()
    left.compute()
    right.compute()
    left.send(source, target, 0)
    found = [v for v in check_workload(job_of(left, right), "chakra").violations if v.code == "ET014"]
    assert [(v.rank, v.node) for v in found] == [(0, 1)]
    assert word in found[0].message


def test_et014_symbolic_peers() -> None:
    def ring(peers: Permutation) -> Workload:
        steps = Steps()
        steps.compute()
        steps.message(NodeKind.SEND, [0], peers)
        steps.message(NodeKind.RECV, [0], peers)
        return spmd(steps.build(), 4)

    assert codes(ring(Permutation(4, (4, 1), 1)), "chakra") == set()
    assert ("ET014", "error") in codes(ring(Permutation(8, (8, 1), 1)), "chakra")


@pytest.mark.parametrize("profile", ["chakra", "astra-sim"])
def test_et016_communication_on_the_cpu(profile: Profile) -> None:
    steps = chain()
    steps.coll(2, host=True)
    assert codes(spmd(steps.build()), profile) == {("ET016", "error")}
    assert codes(spmd(steps.build())) == set()


def test_et017_compute_on_the_cpu() -> None:
    steps = chain()
    steps.compute(2, host=True)
    assert codes(spmd(steps.build()), "astra-sim") == {("ET017", "error")}
    assert codes(spmd(steps.build()), "chakra") == set()


def test_et023_and_gr005_zero_durations() -> None:
    steps = chain()
    steps.compute(2, ns=0)
    assert codes(spmd(steps.build()), "chakra") == {("ET023", "warning")}
    assert codes(spmd(steps.build())) == {("GR005", "warning")}
    free = chain()
    free.builder.set(free.node(NodeKind.COMPUTE, [2], OpClass.FREE, "view"), duration_ns=0)
    assert codes(spmd(free.build()), "chakra") == set()
    unknown = chain()
    unknown.compute(2, ns=nan)
    assert codes(spmd(unknown.build())) == set()
    assert codes(spmd(unknown.build()), "chakra") == {("ET023", "warning")}


def test_et023_untimed_trace_is_told_once() -> None:
    steps = Steps()
    for place in range(3):
        steps.compute(*([place - 1] if place else []), ns=nan)
    result = check_workload(spmd(steps.build()), "chakra")
    assert result.counts == {"ET023": 1}


def test_et030_shape() -> None:
    steps = chain()
    steps.compute()
    assert codes(spmd(steps.build()), "chakra") == {("ET030", "warning")}
    assert codes(spmd(steps.build())) == set()
    almost = chain(11)
    almost.compute()
    assert codes(spmd(almost.build()), "chakra") == set()
    many = Steps()
    for _ in range(3):
        many.compute()
    result = check_workload(spmd(many.build()), "chakra")
    assert "none of the 3 nodes" in result.violations[0].message
    only = Steps()
    only.node(NodeKind.METADATA, [], OpClass.FREE, "meta")
    assert codes(spmd(only.build()), "chakra") == {("ET030", "warning")}


def test_et030_large_tags() -> None:
    assert codes(messages(tag=500_000_000), "chakra") == {("ET036", "warning")}
    assert codes(messages(tag=499_999_999), "chakra") == set()


def with_cost(column: str, value: float) -> OpGraph:
    graph = chain().build()
    changed = np.array([1.0, value, 1.0])
    match column:
        case "flops":
            return replace(graph, flops=changed)
        case "bytes_read":
            return replace(graph, bytes_read=changed)
        case "duration_ns":
            return replace(graph, duration_ns=changed)
        case _:
            return replace(graph, transcendentals=changed)


@pytest.mark.parametrize("column", ["flops", "bytes_read", "duration_ns", "transcendentals"])
@pytest.mark.parametrize("value", [-1.0, inf, -inf])
def test_gr001_costs(column: str, value: float) -> None:
    assert ("GR001", "error") in codes(spmd(with_cost(column, value)))
    assert codes(spmd(with_cost(column, nan))) == set()


def test_gr001_message_sizes() -> None:
    assert ("GR001", "error") in codes(collective(size=-8))
    assert ("GR001", "error") in codes(collective(size=inf))


@pytest.mark.parametrize(
    ("kind", "comm", "operand", "result", "broken"),
    [
        (CollectiveKind.ALL_GATHER, 100, 100, 400, False),
        (CollectiveKind.ALL_GATHER, 100, 100, 402, False),
        (CollectiveKind.ALL_GATHER, 100, 100, 403, True),
        (CollectiveKind.ALL_GATHER, 400, 100, 400, True),
        (CollectiveKind.ALL_GATHER, 100, 100, 100, True),
        (CollectiveKind.REDUCE_SCATTER, 400, 400, 100, False),
        (CollectiveKind.REDUCE_SCATTER, 100, 400, 100, True),
        (CollectiveKind.REDUCE_SCATTER, 400, 400, 400, True),
        (CollectiveKind.ALL_REDUCE, 400, 400, 400, False),
        (CollectiveKind.ALL_REDUCE, 100, 400, 400, True),
        (CollectiveKind.ALL_TO_ALL, 400, 400, 100, True),
        (CollectiveKind.ALL_REDUCE, 400, nan, nan, False),
        (CollectiveKind.BROADCAST, 400, 400, 100, False),
    ],
)
def test_gr002_sizes_fit_the_kind(
    kind: CollectiveKind, comm: float, operand: float, result: float, broken: bool
) -> None:
    steps = chain()
    node = steps.node(NodeKind.COLLECTIVE, [2], OpClass.COLLECTIVE, "c")
    row = steps.builder.group_set(StridedGroups.from_mesh((2, 4), (1,)))
    steps.builder.add_collective(
        node, kind, group_set=row, comm_bytes=comm, operand_bytes=operand, result_bytes=result
    )
    assert codes(spmd(steps.build(), 8)) == ({("GR002", "warning")} if broken else set())


def test_gr003_units() -> None:
    steps = chain()
    steps.compute(2, ns=2e12)
    assert codes(spmd(steps.build())) == {("GR003", "warning")}
    assert codes(collective(size=10.5)) == {("GR003", "warning")}
    near = chain()
    near.compute(2, ns=1e12)
    assert codes(spmd(near.build())) == set()


def test_gr004_tables() -> None:
    graph = collective().classes[0]
    wrong = replace(graph.collectives, node=np.array([0], np.int32))
    assert ("GR004", "error") in codes(spmd(replace(graph, collectives=wrong)))
    steps = chain()
    node = steps.coll(2)
    steps.builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=-1, comm_bytes=1024)
    assert ("GR004", "error") in codes(spmd(steps.build()))


def test_gr006_unknown_trips() -> None:
    def loop(trips: float) -> Workload:
        steps = chain()
        steps.builder.add_region(RegionKind.LOOP_BODY, parent=-1, trips=trips, label="while")
        return spmd(steps.build())

    assert codes(loop(nan)) == {("GR006", "warning")}
    assert codes(loop(-1)) == {("GR001", "error")}
    assert codes(loop(3)) == set()


def test_gr007_tensor_extents() -> None:
    def typed(extent: int) -> Workload:
        steps = chain()
        b = steps.builder
        row = b.types.add(dtype("f32"), (2, extent))
        b.add_node(name_id=0, op_id=0, op_class=OpClass.ELEMENTWISE, data_deps=[2], results=[row])
        return spmd(steps.build())

    assert ("GR007", "error") in codes(typed(-2))
    assert "GR007" not in {code for code, _ in codes(typed(-1))}


@pytest.mark.parametrize(
    ("stored", "encoding", "fault"),
    [
        ("i8", "!quant.uniform<i8:f32:1, {0.5,0.25}>", ""),
        ("i8", "!quant.any<i8:f32>", ""),
        ("f32", "!quant.calibrated<f32<-1.0:1.0>>", ""),
        ("i8", "1,0", ""),
        ("i8", "!quant.uniform<i8:f32, nan>", "is not legal"),
        ("i8", "!quant.uniform<i8:f32, -0.5>", "is not legal"),
        ("i8", "!quant.uniform<i8<5:-5>:f32, 0.5>", "is not legal"),
        ("i8", "!quant.uniform<i8:f32, 0.5", "is not legal"),
        ("i8", "!quant.uniform<i8:f32:9, {0.5,0.25}>", "has 2 scales, which do not fit the shape (8, 2)"),
        ("i8", "!quant.uniform<i8:f32:0, {0.5,0.25}>", "has 2 scales, which do not fit the shape (8, 2)"),
        ("i8", "!quant.uniform<i4:f32, 0.5>", "stores i4, but the tensor has i8"),
    ],
)
def test_gr009_quantised_types(stored: str, encoding: str, fault: str) -> None:
    steps = chain()
    b = steps.builder
    row = b.types.add(dtype(stored), (8, 2), encoding=b.strings.add(encoding))
    node = b.add_node(name_id=0, op_id=0, op_class=OpClass.ELEMENTWISE, data_deps=[2], results=[row])
    result = check_workload(spmd(steps.build()))
    found = [(violation.code, violation.node, violation.severity) for violation in result.violations]
    assert found == ([("GR009", node, Severity.ERROR)] if fault else [])
    assert all(fault in violation.message for violation in result.violations)


@pytest.mark.parametrize("levels", ["XWX", "WW", "WWWW"])
def test_a_severity_that_is_none_names_the_rule(levels: str) -> None:
    with pytest.raises(InvariantError, match=rf"GR099 \(a title\).*'{levels}'"):
        rules.rule("GR099", "a title", Scope.RANK, levels)


def test_counts_are_exact_and_lists_bounded() -> None:
    steps = Steps()
    for place in range(101):
        steps.compute(*([place - 1] if place else []), ns=float(place == 0))
    result = check_workload(spmd(steps.build()), "chakra")
    assert result.counts == {"ET023": 100}
    assert len(result.violations) == 20
    assert result.valid


def test_other_ranks_of_a_class_are_named_once() -> None:
    steps = chain()
    steps.builder.set_id(2, 1)
    result = check_workload(spmd(steps.build(), 65_536))
    assert len(result.violations) == 1
    assert "65,535 other ranks" in result.violations[0].message


def test_inputs_are_not_changed() -> None:
    job = collective()
    before = {name: getattr(job.classes[0], name).copy() for name in ("id", "kind", "duration_ns", "flops")}
    check_workload(job, "astra-sim")
    for name, column in before.items():
        np.testing.assert_array_equal(getattr(job.classes[0], name), column)


def test_severities_are_those_of_the_table() -> None:
    assert {rule.code for rule in RULES} >= {f"ET{number:03}" for number in range(1, 33)}
    for rule in RULES:
        assert Severity.INFO not in (rule.plain, rule.chakra, rule.astra_sim)
        assert rule.astra_sim is not None or rule.plain is not None
