"""Invariants of passes on random graphs: work, communication and dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import hespas
from hespas.estimators import apply_estimate, load_estimator
from hespas.generators.random_dag import RandomJob
from hespas.graph import (
    NODE_COLUMNS,
    CollectiveKind,
    Diagnostics,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    RaggedArray,
    RegionKind,
    StridedGroups,
    dtype,
)
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import (
    FoldFree,
    FuseElementwise,
    GroupRegions,
    UnrollLoops,
    all_deps,
    bypass,
    dead_code,
    find_cycle,
    is_topological,
    materialise,
    regions_between_communications,
    topological_order,
    totals,
)
from hespas.hardware import load_device

CLASSES = {
    "reshape": OpClass.FREE,
    "add": OpClass.ELEMENTWISE,
    "convert": OpClass.ELEMENTWISE,
    "transpose": OpClass.MOVE,
    "dynamic_slice": OpClass.SLICE,
    "dot": OpClass.CONTRACTION,
    "all_reduce": OpClass.COLLECTIVE,
}


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    """An acyclic graph of up to 24 nodes with every kind of class a pass tells apart."""
    builder = GraphBuilder("drawn")
    kind = builder.types.add(dtype("f32"), (64,))
    groups = builder.group_set(StridedGroups.all_ranks(4))
    for node in range(draw(st.integers(1, 24))):
        deps = sorted(draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else []
        waits: list[int] = sorted(draw(st.sets(st.integers(0, node - 1), max_size=2))) if node else []
        name = draw(st.sampled_from(sorted(CLASSES)))
        op_class = CLASSES[name]
        free, collective = op_class is OpClass.FREE, op_class is OpClass.COLLECTIVE
        builder.add_node(
            name_id=builder.strings.add(f"n{node}"),
            op_id=builder.strings.add(name),
            op_class=op_class,
            kind=NodeKind.COLLECTIVE if collective else NodeKind.COMPUTE,
            data_deps=deps,
            control_deps=[dep for dep in waits if dep not in deps],
            operands=[kind] * len(deps),
            results=[kind],
            flops=0 if free or collective else 64,
            transcendentals=0,
            bytes_read=0 if free or collective else 256.0 * len(deps),
            bytes_written=0 if free or collective else 256,
        )
        if collective:
            builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=256)
    return builder.build()


def _reach(graph: OpGraph) -> dict[str, frozenset[str]]:
    """Names of everything each node waits for, directly or not."""
    reach = _reached(graph)
    return {graph.node_name(n): frozenset(graph.node_name(d) for d in reach[n]) for n in range(len(graph))}


def _reached(graph: OpGraph) -> list[set[int]]:
    """The same as numbers."""
    reach: list[set[int]] = [set() for _ in range(len(graph))]
    rows = all_deps(graph).to_lists()
    order: list[int] = topological_order(graph).tolist()
    for node in order:
        for dep in rows[node]:
            reach[node] |= reach[dep] | {dep}
    return reach


@given(graphs())
def test_folding_keeps_work_and_order(graph: OpGraph) -> None:
    folded = FoldFree()(graph, Diagnostics())
    before, after = totals(graph), totals(folded)
    assert (after.flops, after.bytes_moved, after.collectives) == (
        before.flops,
        before.bytes_moved,
        before.collectives,
    )
    kept = {folded.node_name(node) for node in range(len(folded))}
    expected = {name: deps & kept for name, deps in _reach(graph).items() if name in kept}
    assert _reach(folded) == expected


@given(graphs())
def test_fusing_keeps_flops_collectives_and_acyclicity(graph: OpGraph) -> None:
    fused = FuseElementwise()(graph, Diagnostics())
    before, after = totals(graph), totals(fused)
    assert after.flops == before.flops
    assert (after.collectives, after.collective_bytes) == (before.collectives, before.collective_bytes)
    assert after.bytes_moved <= before.bytes_moved
    assert is_topological(fused)


@given(graphs())
def test_grouping_keeps_flops_collectives_and_acyclicity(graph: OpGraph) -> None:
    grouped = GroupRegions()(graph, Diagnostics())
    before, after = totals(graph), totals(grouped)
    assert after.flops == before.flops
    assert (after.collectives, after.collective_bytes) == (before.collectives, before.collective_bytes)
    assert not find_cycle(grouped)
    names = {grouped.node_name(n) for n in grouped.collectives.node.tolist()}
    reached, original = _reach(grouped), _reach(graph)
    for name in names:  # a collective still waits for every collective it waited for
        assert original[name] & names <= reached[name]


@given(graphs())
def test_members_of_a_region_follow_it_or_wait_for_the_same_work(graph: OpGraph) -> None:
    leader = regions_between_communications(graph)
    deps = all_deps(graph).to_lists()
    computes = graph.kind == int(NodeKind.COMPUTE)
    for node in np.flatnonzero(leader != np.arange(len(graph))).tolist():
        waits, waits_of_first = (
            {dep for dep in deps[each] if not computes[dep]} for each in (node, int(leader[node]))
        )
        assert waits <= waits_of_first
        assert waits == waits_of_first or any(leader[dep] == leader[node] for dep in deps[node])


@pytest.mark.parametrize("seed", range(8))
def test_random_jobs_finish_with_regions(seed: int) -> None:
    job = RandomJob(ranks=4, nodes=40, seed=seed, classes=2).workload()
    device, estimator, sink = load_device("H100-SXM"), load_estimator("roofline"), Diagnostics()
    estimated = replace(
        job,
        classes=tuple(
            apply_estimate(graph, estimator.estimate(graph, device, sink), "warn", sink)
            for graph in job.classes
        ),
    )
    grouped = replace(job, classes=tuple(GroupRegions()(graph, sink) for graph in estimated.classes))
    assert sum(map(len, grouped.classes)) < sum(map(len, job.classes))
    change = hespas.simulate(grouped).step_ns / hespas.simulate(estimated).step_ns
    assert change == pytest.approx(1.0, abs=0.1)


@given(graphs())
def test_passes_leave_their_input_alone(graph: OpGraph) -> None:
    columns: dict[str, NDArray[np.generic]] = {name: getattr(graph, name) for name in NODE_COLUMNS}
    snapshot = {name: column.copy() for name, column in columns.items()}
    for rewrite in (FoldFree(), FuseElementwise(), GroupRegions(), UnrollLoops()):
        rewrite(graph, Diagnostics())
    for name, before in snapshot.items():
        np.testing.assert_array_equal(columns[name], before)


@given(graphs(), st.randoms(use_true_random=False))
def test_bypass_of_any_nodes_keeps_reachability(graph: OpGraph, random: object) -> None:
    drop = np.array([hash((node, str(random))) % 3 == 0 for node in range(len(graph))])
    rest = bypass(graph, drop)
    kept = {rest.node_name(node) for node in range(len(rest))}
    assert _reach(rest) == {name: deps & kept for name, deps in _reach(graph).items() if name in kept}


def _node(
    builder: GraphBuilder,
    name: str,
    deps: list[int],
    region: int = -1,
    flops: float = 1,
    *,
    waits: Sequence[int] = (),
    operands: Sequence[int] = (),
) -> int:
    """A node of one FLOP; one of none is free."""
    return builder.add_node(
        name_id=builder.strings.add(name),
        op_id=builder.strings.add("add"),
        op_class=OpClass.ELEMENTWISE if flops else OpClass.FREE,
        data_deps=deps,
        control_deps=waits,
        operands=operands,
        flops=flops,
        transcendentals=0,
        bytes_read=4 if flops else 0,
        bytes_written=4 if flops else 0,
        region=region,
    )


def _nested_loop(outer_trips: float = 2, inner_trips: float = 3) -> OpGraph:
    """init -> outer{ a -> inner{ b } -> c } -> end, b carried in the inner loop, c -> a in the outer one."""
    builder = GraphBuilder("nested")
    init = _node(builder, "init", [])
    outer = builder.add_region(RegionKind.LOOP_BODY, trips=outer_trips, label="outer")
    inner = builder.add_region(RegionKind.LOOP_BODY, parent=outer, trips=inner_trips, label="inner")
    a = _node(builder, "a", [init], outer)
    b = _node(builder, "b", [a], inner)
    builder.add_carried(inner, b, b)
    c = _node(builder, "c", [b], outer)
    builder.add_carried(outer, c, a)
    _node(builder, "end", [c])
    return builder.build()


def test_unrolled_nested_loops_run_in_sequence() -> None:
    graph = _nested_loop()
    flat = UnrollLoops()(graph, Diagnostics())
    trip = ["a", "b", "b", "b", "c"]
    assert [flat.node_name(n) for n in range(len(flat))] == ["init", *trip, *trip, "end"]
    assert totals(flat).flops == totals(graph).flops == 12
    assert is_topological(flat)
    rows = flat.data_deps.to_lists()
    assert rows[6] == [0, 5]  # second a: captured init, carried c
    assert [sorted(rows[n]) for n in (7, 8, 9)] == [[6], [6, 7], [6, 8]]
    assert rows[11] == [10]  # behind the loop: its last trip


def test_unrolling_a_carried_value_used_inside_an_inner_loop_orders_every_inner_trip() -> None:
    builder = GraphBuilder("captured")
    outer = builder.add_region(RegionKind.LOOP_BODY, trips=2, label="outer")
    inner = builder.add_region(RegionKind.LOOP_BODY, parent=outer, trips=2, label="inner")
    b = _node(builder, "b", [], inner)
    c = _node(builder, "c", [b], outer)
    builder.add_carried(outer, c, b)
    flat = UnrollLoops()(builder.build(), Diagnostics())
    rows = flat.data_deps.to_lists()
    assert rows == [[], [], [1], [2], [2], [4]]


def test_a_trip_waits_for_all_of_the_one_before() -> None:
    builder = GraphBuilder("two streams")
    row = builder.add_region(RegionKind.LOOP_BODY, trips=3, label="loop")
    a = _node(builder, "a", [], row)
    b = _node(builder, "b", [a], row)
    _node(builder, "c", [], row)
    builder.add_carried(row, b, a)
    graph = builder.build()
    flat = UnrollLoops()(graph, Diagnostics())
    assert flat.data_deps.to_lists() == [[], [0], [], [1], [3], [], [4], [6], []]
    assert [sorted(row) for row in flat.control_deps.to_lists()] == [
        [], [], [], [2], [], [1, 2], [5], [], [4, 5]
    ]  # fmt: skip
    loose = UnrollLoops(overlap_trips=True)(graph, Diagnostics())
    assert not len(loose.control_deps.values)
    assert loose.data_deps.to_lists() == flat.data_deps.to_lists()


def test_many_waits_between_trips_meet_in_a_node_that_costs_nothing() -> None:
    wide, trips = 20, 3
    builder = GraphBuilder("wide")
    kind = builder.types.add(dtype("f32"), (64,))
    outer = builder.add_region(RegionKind.LOOP_BODY, trips=2, label="outer")
    row = builder.add_region(RegionKind.LOOP_BODY, parent=outer, trips=trips, label="loop")
    for place in range(wide):
        _node(builder, f"n{place}", [], row, operands=[kind])
    _node(builder, "end", [wide - 1], outer)
    graph = builder.build()
    flat = UnrollLoops()(graph, Diagnostics())
    ends = [node for node in range(len(flat)) if flat.op_name(node) == "hespas.trip_end"]
    assert len(ends) == 2 * trips  # the outer loop's trips end with few: the last of these and its own node
    assert flat.op_class[ends].tolist() == [OpClass.FREE] * len(ends)
    assert flat.operands.lengths[ends].tolist() == [0] * len(ends)
    assert repr(replace(totals(flat), ops=0)) == repr(replace(totals(graph), ops=0))  # NaN are equal so
    assert totals(flat).ops == totals(graph).ops + len(ends)
    assert is_topological(flat)
    reach = _reached(flat)
    nodes = [node for node in range(len(flat)) if flat.node_name(node).startswith("n")]
    for place, node in enumerate(nodes):
        assert set(nodes[: place // wide * wide]) <= reach[node]


def _counting_loop(operands: int) -> OpGraph:
    """start -> loop{ test, step } -> end: the step takes ``operands`` tensors, waits for the test, and is
    carried to both.
    """
    builder = GraphBuilder("counting")
    kind = builder.types.add(dtype("f32"), (64,))
    start = _node(builder, "start", [])
    row = builder.add_region(RegionKind.LOOP_BODY, trips=3, label="loop")
    test = _node(builder, "test", [start], row, operands=[kind, kind])
    step = _node(builder, "step", [start], row, waits=[test], operands=[kind] * operands)
    builder.add_carried(row, step, test)
    builder.add_carried(row, step, step)
    _node(builder, "end", [step])
    return builder.build()


@pytest.mark.parametrize("operands", [1, 2])
def test_what_a_loop_starts_with_is_left_only_where_it_may_be_another_operand(operands: int) -> None:
    flat = UnrollLoops()(_counting_loop(operands), Diagnostics())
    assert [flat.node_name(node) for node in range(len(flat))] == ["start", *["test", "step"] * 3, "end"]
    rows = [sorted(row) for row in flat.data_deps.to_lists()]
    assert (rows[1], rows[2]) == ([0], [0])
    assert (rows[3], rows[5]) == ([0, 2], [0, 4]), "the test has two operands: either may be the carried one"
    assert (rows[4], rows[6]) == (([2], [4]) if operands == 1 else ([0, 2], [0, 4]))
    assert flat.control_deps.to_lists() == [[], [], [1], [], [3], [], [5], []]
    assert rows[7] == [6]


def test_what_reads_a_carried_value_behind_its_loop_waits_for_the_trip_that_made_it() -> None:
    builder = GraphBuilder("left")
    row = builder.add_region(RegionKind.LOOP_BODY, trips=3, label="loop")
    old = _node(builder, "old", [], row, 0)
    new = _node(builder, "new", [], row)
    builder.add_carried(row, new, old)
    _node(builder, "end", [old])
    flat = UnrollLoops()(FoldFree()(builder.build(), Diagnostics()), Diagnostics())
    assert [flat.node_name(node) for node in range(len(flat))] == [*["old", "new"] * 3, "end"]
    assert flat.data_deps.to_lists() == [[], [], [1], [], [3], [], [4]], (
        "the last trip's old is the new before"
    )


def test_folding_hands_on_control_dependencies() -> None:
    builder = GraphBuilder("gate")
    gate = _node(builder, "gate", [])
    shape = _node(builder, "shape", [gate], flops=0)
    view = _node(builder, "view", [], flops=0, waits=[shape])
    _node(builder, "user", [view])
    folded = FoldFree()(builder.build(), Diagnostics())
    assert [folded.node_name(node) for node in range(len(folded))] == ["gate", "user"]
    assert (folded.data_deps.to_lists(), folded.control_deps.to_lists()) == ([[], []], [[], [0]])


def test_unknown_trips_are_an_error_unless_the_caller_says_what_they_count() -> None:
    graph = _nested_loop(outer_trips=float("nan"))
    with pytest.raises(UnsupportedError, match="outer"):
        UnrollLoops()(graph, Diagnostics())
    diagnostics = Diagnostics()
    flat = UnrollLoops(unknown_trips=1)(graph, diagnostics)
    assert len(flat) == 7
    assert diagnostics.counts() == {"pass.assumed-trips": 1}


def test_a_loop_that_never_runs_is_led_around() -> None:
    flat = UnrollLoops()(_nested_loop(outer_trips=0), Diagnostics())
    assert [flat.node_name(n) for n in range(len(flat))] == ["init", "end"]
    assert flat.data_deps.to_lists() == [[], [0]]


def test_unrolling_past_the_limit_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="limit 5"):
        UnrollLoops(max_nodes=5)(_nested_loop(), Diagnostics())


def test_a_chain_fuses_into_one_node_that_moves_its_ends_once() -> None:
    builder = GraphBuilder("chain")
    kind = builder.types.add(dtype("f32"), (1024,))
    for node in range(3):
        builder.add_node(
            name_id=builder.strings.add(f"n{node}"),
            op_id=builder.strings.add("add"),
            op_class=OpClass.ELEMENTWISE,
            data_deps=[node - 1] if node else [],
            operands=[kind],
            results=[kind],
            flops=1024,
            transcendentals=0,
            bytes_read=4096,
            bytes_written=4096,
        )
    fused = FuseElementwise()(builder.build(), Diagnostics())
    assert len(fused) == 1
    assert fused.op_name(0) == "fusion"
    assert (fused.flops[0], fused.bytes_read[0], fused.bytes_written[0]) == (3072, 4096, 4096)
    assert fused.operands.to_lists() == [[kind]]


def _program(*rows: tuple[str, Sequence[int]]) -> OpGraph:
    """Operations on tensors of 4 KiB that each read their operands and write their result."""
    builder = GraphBuilder("program")
    kind = builder.types.add(dtype("f32"), (1024,))
    for place, (name, deps) in enumerate(rows):
        builder.add_node(
            name_id=builder.strings.add(f"n{place}"),
            op_id=builder.strings.add(name),
            op_class=CLASSES[name],
            data_deps=list(deps),
            operands=[kind] * max(len(deps), 1),
            results=[kind],
            flops=1024,
            transcendentals=0,
            bytes_read=4096.0 * max(len(deps), 1),
            bytes_written=4096,
        )
    return builder.build()


Small = tuple[str, OpClass, Sequence[int], float, float]


def _small(*rows: Small) -> OpGraph:
    """Operations on tensors of 4 KiB, each with a class, what it reads from and the bytes it moves."""
    builder = GraphBuilder("small")
    kind, scalar = builder.types.add(dtype("f32"), (1024,)), builder.types.add(dtype("f32"), ())
    for place, (name, op_class, deps, read, written) in enumerate(rows):
        builder.add_node(
            name_id=builder.strings.add(f"n{place}"),
            op_id=builder.strings.add(name),
            op_class=op_class,
            data_deps=list(deps),
            operands=[scalar] if op_class == OpClass.BROADCAST else [kind] * len(deps),
            results=[kind],
            flops=0,
            transcendentals=0,
            bytes_read=read,
            bytes_written=written,
        )
    return builder.build()


_BROADCAST: Small = ("broadcast", OpClass.BROADCAST, [], 0.0, 0.0)
_IOTA: Small = ("iota", OpClass.GENERATE, [], 0.0, 0.0)


WRITTEN: Sequence[tuple[Sequence[Small], Sequence[tuple[float, float]]]] = [
    # A result of the program, alone, behind a view, in its tuple.
    ([_BROADCAST], [(4, 4096)]),
    ([_IOTA], [(0, 4096)]),
    ([_BROADCAST, ("reshape", OpClass.FREE, [0], 0, 0)], [(4, 4096), (0, 0)]),
    ([_IOTA, _BROADCAST, ("tuple", OpClass.FREE, [0, 1], 0, 0)], [(0, 4096), (4, 4096), (0, 0)]),
    # What computes it for itself, behind a view too.
    ([_BROADCAST, ("add", OpClass.ELEMENTWISE, [0], 8192, 4096)], [(0, 0), (8192, 4096)]),
    (
        [
            _IOTA,
            ("reshape", OpClass.FREE, [0], 0, 0),
            ("add", OpClass.ELEMENTWISE, [1], 8192, 4096),
        ],
        [(0, 0), (0, 0), (8192, 4096)],
    ),
    # A product takes strides of zero, and no iota; a sort and a collective take memory.
    ([_BROADCAST, ("dot", OpClass.CONTRACTION, [0], 8192, 4096)], [(0, 0), (8192, 4096)]),
    ([_IOTA, ("dot", OpClass.CONTRACTION, [0], 8192, 4096)], [(0, 4096), (8192, 4096)]),
    ([_IOTA, ("sort", OpClass.SORT, [0], 4096, 4096)], [(0, 4096), (4096, 4096)]),
    ([_BROADCAST, ("all_reduce", OpClass.COLLECTIVE, [0], 4096, 4096)], [(4, 4096), (4096, 4096)]),
    # A buffer that is updated in place is there before; one that is copied is made with the copy.
    ([_BROADCAST, ("update", OpClass.UPDATE, [0], 64, 64)], [(4, 4096), (64, 64)]),
    ([_BROADCAST, ("update", OpClass.UPDATE, [0], 4160, 4160)], [(0, 0), (4160, 4160)]),
    # A constant lies in memory with the program.
    ([("constant", OpClass.GENERATE, [], 0, 0)], [(0, 0)]),
]


@pytest.mark.parametrize(("rows", "moved"), WRITTEN)
def test_what_nobody_computes_for_itself_is_written(
    rows: Sequence[Small], moved: Sequence[tuple[float, float]]
) -> None:
    graph = materialise(_small(*rows))
    assert list(zip(graph.bytes_read.tolist(), graph.bytes_written.tolist(), strict=True)) == [*moved]


def test_views_inside_a_fusion_hide_no_traffic() -> None:
    graph = _small(
        ("dot", OpClass.CONTRACTION, [], 8192, 4096),
        ("reshape", OpClass.FREE, [0], 0, 0),
        ("reshape", OpClass.FREE, [], 0, 0),
        ("add", OpClass.ELEMENTWISE, [1, 2], 8192, 4096),
        ("reshape", OpClass.FREE, [3], 0, 0),
        ("add", OpClass.ELEMENTWISE, [4, 1], 8192, 4096),
    )
    fused = FuseElementwise()(graph, Diagnostics())
    # The product's result and the argument, each once; the sum behind a view is never in memory.
    assert (fused.bytes_read.tolist(), fused.bytes_written.tolist()) == ([8192, 8192], [4096, 4096])


def test_a_buffer_is_written_before_it_is_updated_in_place() -> None:
    graph = _small(("add", OpClass.ELEMENTWISE, [], 4096, 4096), ("update", OpClass.UPDATE, [0], 64, 64))
    fused = FuseElementwise()(graph, Diagnostics())
    assert (fused.bytes_read.tolist(), fused.bytes_written.tolist()) == ([4096, 64], [4096, 64])


def test_what_is_made_of_constants_is_computed_by_each_of_its_users() -> None:
    graph = _small(
        ("constant", OpClass.GENERATE, [], 0, 0),
        ("broadcast", OpClass.BROADCAST, [0], 0, 0),
        ("add", OpClass.ELEMENTWISE, [1], 8192, 4096),
        ("dot", OpClass.CONTRACTION, [], 8192, 4096),
        ("add", OpClass.ELEMENTWISE, [3, 1], 8192, 4096),
    )
    fused = FoldFree()(FuseElementwise()(materialise(graph), Diagnostics()), Diagnostics())
    assert fused.data_deps.to_lists() == [[], [], [1]]
    assert fused.bytes_read.tolist() == [4096, 8192, 4096]


def test_a_broadcast_inside_a_fusion_reads_its_operand() -> None:
    fused = FuseElementwise()(
        _small(_BROADCAST, ("add", OpClass.ELEMENTWISE, [0], 8192, 4096)), Diagnostics()
    )
    assert (fused.bytes_read.tolist(), fused.bytes_written.tolist()) == ([4100], [4096])


Rows = Sequence[tuple[str, Sequence[int]]]
FUSIONS: Sequence[tuple[Rows, Sequence[tuple[str, float, float]]]] = [
    # x * sigmoid(x): both uses of the first are in one group.
    ([("add", []), ("add", [0]), ("add", [0, 1])], [("fusion", 4096, 4096)]),
    # Two consumers that are apart: the first takes it in and writes it for the other.
    (
        [("add", []), ("add", [0]), ("dot", [1]), ("add", [0, 2])],
        [("fusion", 4096, 8192), ("dot", 4096, 4096), ("add", 8192, 4096)],
    ),
    # Operands of a product have strides and offsets, its result a type.
    ([("transpose", []), ("dot", [0])], [("dot", 4096, 4096)]),
    ([("dynamic_slice", []), ("transpose", [0]), ("dot", [1])], [("dot", 4096, 4096)]),
    ([("dot", []), ("convert", [0]), ("add", [1])], [("dot", 4096, 4096), ("add", 4096, 4096)]),
    (
        [("dot", []), ("transpose", [0]), ("all_reduce", [1])],
        [("dot", 4096, 4096), ("all_reduce", 4096, 4096)],
    ),
    # Arithmetic is no part of a product, and two products are no fusion.
    ([("add", []), ("dot", [0])], [("add", 4096, 4096), ("dot", 4096, 4096)]),
    ([("dot", []), ("dot", [0])], [("dot", 4096, 4096), ("dot", 4096, 4096)]),
    # What two operations of a fusion read from outside is read once.
    (
        [("dot", []), ("add", [0]), ("add", [0]), ("add", [1, 2])],
        [("dot", 4096, 4096), ("fusion", 4096, 4096)],
    ),
]


@pytest.mark.parametrize(("rows", "fused"), FUSIONS)
def test_what_a_compiler_fuses(rows: Rows, fused: Sequence[tuple[str, float, float]]) -> None:
    graph = FuseElementwise()(_program(*rows), Diagnostics())
    moved = zip(graph.bytes_read.tolist(), graph.bytes_written.tolist(), strict=True)
    assert [(graph.op_name(node), *each) for node, each in enumerate(moved)] == [*fused]


def test_a_product_with_its_transpose_is_a_product() -> None:
    graph = FuseElementwise()(_program(("transpose", []), ("dot", [0])), Diagnostics())
    assert graph.op_class.tolist() == [OpClass.CONTRACTION]


def test_a_cycle_is_found_and_named_in_order() -> None:
    builder = GraphBuilder("cycle")
    for node, deps in enumerate([[], [0, 3], [1], [2], [3]]):
        _node(builder, f"n{node}", deps)
    assert set(find_cycle(builder.build())) == {1, 2, 3}


def test_a_very_deep_chain_needs_no_recursion() -> None:
    nodes = 200_000
    chain = RaggedArray.from_lengths(np.array([0] + [1] * (nodes - 1)), np.arange(nodes - 1))
    builder = GraphBuilder("deep")
    for _ in range(nodes):
        builder.add_node(name_id=0, op_id=0, op_class=OpClass.FREE, flops=0, transcendentals=0)
    graph = replace(builder.build(), data_deps=chain)
    backwards = RaggedArray.from_lengths(np.array([1] * (nodes - 1) + [0]), np.arange(1, nodes))
    assert topological_order(replace(graph, data_deps=backwards)).tolist() == list(range(nodes - 1, -1, -1))
    ring = RaggedArray.from_lengths(np.ones(nodes, np.int64), np.roll(np.arange(nodes), 1))
    assert len(find_cycle(replace(graph, data_deps=ring))) == nodes


def test_dead_code_goes_and_communication_stays() -> None:
    builder = GraphBuilder("dead")
    used, unused = _node(builder, "used", []), _node(builder, "unused", [])
    sent = builder.add_node(
        name_id=builder.strings.add("sent"),
        op_id=0,
        op_class=OpClass.COLLECTIVE,
        kind=NodeKind.COLLECTIVE,
        data_deps=[used],
    )
    builder.add_collective(
        sent,
        CollectiveKind.ALL_REDUCE,
        group_set=builder.group_set(StridedGroups.all_ranks(2)),
        comm_bytes=4,
    )
    rest = dead_code(builder.build(), np.empty(0, np.int64))
    assert [rest.node_name(node) for node in range(len(rest))] == ["used", "sent"]
    assert unused == 1


def test_sums_past_what_a_float_holds_are_infinite_without_a_warning() -> None:
    b = GraphBuilder("huge")
    for number in range(2):
        b.add_node(
            name_id=b.strings.add(f"n{number}"),
            op_id=b.strings.add("op"),
            op_class=OpClass.ELEMENTWISE,
            kind=NodeKind.COMPUTE,
            flops=1.7e308,
            transcendentals=0.0,
            bytes_read=1.7e308,
            bytes_written=1.7e308,
        )
    found = totals(b.build())
    assert (found.flops, found.bytes_moved, found.ops) == (float("inf"), float("inf"), 2.0)
