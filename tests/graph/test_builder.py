"""Graph builder: it builds what it gets, and rejects inconsistent graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan, prod
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph import (
    NODE_COLUMNS,
    CollectiveKind,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    RaggedArray,
    RegionKind,
    Resource,
    StridedGroups,
    StringTable,
    TensorTypesBuilder,
    Workload,
    dtype,
)
from hespas.graph.builder import region_executions
from hespas.graph.equality import graphs_equal
from hespas.graph.errors import InvariantError


def small_graph() -> OpGraph:
    builder = GraphBuilder("small")
    f32 = builder.types.add(dtype("f32"), (4, 8))
    loop = builder.add_region(RegionKind.LOOP_BODY, label="while", trips=nan)
    dot = builder.add_node(
        name_id=builder.strings.add("dot.1"),
        op_id=builder.strings.add("stablehlo.dot_general"),
        op_class=OpClass.CONTRACTION,
        operands=[f32, f32],
        results=[f32],
        flops=1024.0,
        bytes_read=256.0,
        bytes_written=128.0,
        region=loop,
    )
    reduce = builder.add_node(
        name_id=builder.strings.add("ar"),
        op_id=builder.strings.add("stablehlo.all_reduce"),
        op_class=OpClass.COLLECTIVE,
        kind=NodeKind.COLLECTIVE,
        data_deps=[dot],
        control_deps=[dot],
    )
    send = builder.add_node(
        name_id=0, op_id=builder.strings.add("send"), op_class=OpClass.P2P, kind=NodeKind.SEND
    )
    builder.set_trips(loop, 12.0)
    builder.set(dot, useful_flops=512.0, rate_dtype=dtype("f32").code, stream=3)
    builder.set(reduce, resource=Resource.HOST, duration_ns=1e3)
    builder.set_id(send, 2**64 - 1)
    groups = builder.group_set(StridedGroups.all_ranks(8))
    builder.add_collective(
        reduce, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=128.0, reduction="add"
    )
    builder.add_p2p(send, permutation=builder.permutation(Permutation(8, (8, 1), 1)), comm_bytes=64.0, tag=7)
    builder.add_contraction(
        dot, batch=1, m=4, n=8, k=16, flops=1024.0, useful_flops=512.0, lhs=14, rhs=14, accumulator=14
    )
    builder.add_carried(loop, dot, dot)
    builder.add_extra(send, "key", 5, b"\x00\xff")
    builder.add_extra(-1, "file", 1, b"head")
    builder.attachments["module"] = b"bytecode"
    return builder.build()


def test_builder_makes_what_it_was_told() -> None:
    graph = small_graph()
    assert len(graph) == 3
    assert graph.node_name(0) == "dot.1"
    assert graph.op_name(1) == "stablehlo.all_reduce"
    assert graph.id.tolist() == [0, 1, 2**64 - 1]
    assert graph.kind.tolist() == [NodeKind.COMPUTE, NodeKind.COLLECTIVE, NodeKind.SEND]
    assert graph.data_deps.to_lists() == [[], [0], []]
    assert graph.control_deps.to_lists() == [[], [0], []]
    assert graph.operands.to_lists() == [[0, 0], [], []]
    np.testing.assert_array_equal(graph.flops, [1024, nan, nan])
    np.testing.assert_array_equal(graph.useful_flops, [512, nan, nan])
    np.testing.assert_array_equal(graph.bytes_moved, [384, nan, nan])
    np.testing.assert_array_equal(graph.duration_ns, [nan, 1e3, nan])
    assert graph.stream.tolist() == [3, -1, -1]
    assert graph.resource.tolist() == [Resource.DEVICE, Resource.HOST, Resource.DEVICE]
    assert graph.rate_dtype.tolist() == [dtype("f32").code, -1, -1]
    assert graph.executions.tolist() == [12.0, 1.0, 1.0]
    assert graph.collectives.node.tolist() == [1]
    assert graph.strings[int(graph.collectives.reduction[0])] == "add"
    assert graph.group_sets[int(graph.collectives.group_set[0])].group_size == 8
    assert graph.permutations[int(graph.p2p.permutation[0])].target_of(7) == 0
    assert graph.contractions.k.tolist() == [16]
    assert graph.regions.carried_consumer.tolist() == [0]
    assert [graph.extra.value(row) for row in graph.extra.rows_of(2)] == [b"\x00\xff"]
    assert [graph.extra.value(row) for row in graph.extra.rows_of(-1)] == [b"head"]
    assert list(graph.extra.rows_of(0)) == []
    assert graph.attachments == {"module": b"bytecode"}


def test_side_tables_are_sorted_by_node() -> None:
    builder = GraphBuilder("order")
    groups = builder.group_set(StridedGroups.all_ranks(2))
    for _ in range(3):
        builder.add_node(name_id=0, op_id=0, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE)
    for node in (2, 0, 1):
        builder.add_collective(node, CollectiveKind.ALL_GATHER, group_set=groups, comm_bytes=float(node))
        builder.add_extra(node, "b", 0, b"1")
        builder.add_extra(node, "a", 0, b"2")
    graph = builder.build()
    assert graph.collectives.node.tolist() == [0, 1, 2]
    assert graph.collectives.comm_bytes.tolist() == [0.0, 1.0, 2.0]
    assert [graph.strings[int(row)] for row in graph.extra.key] == ["b", "a"] * 3, "order within a node stays"


def test_columns_nobody_set_take_no_memory() -> None:
    builder = GraphBuilder("bare")
    for _ in range(1000):
        builder.add_node(name_id=0, op_id=0, op_class=OpClass.FREE)
    graph = builder.build()
    for column in (graph.stream, graph.resource, graph.duration_ns, graph.source_id, graph.executions):
        assert column.strides == (0,)
    assert graph.nbytes < 80 * 1000


def test_empty_graph() -> None:
    graph = GraphBuilder("empty").build()
    assert len(graph) == 0
    assert graph.executions.shape == (0,)
    assert graphs_equal(graph, GraphBuilder("empty").build()) == []


@given(st.lists(st.tuples(st.integers(-1, 5), st.sampled_from([0.0, 1.0, 3.0, nan])), max_size=6))
def test_multiplicity_is_the_product_of_trips(regions: list[tuple[int, float]]) -> None:
    builder = GraphBuilder("regions")
    parents = [min(parent, row - 1) for row, (parent, _) in enumerate(regions)]
    for parent, (_, trips) in zip(parents, regions, strict=True):
        builder.add_region(RegionKind.LOOP_BODY, parent=parent, trips=trips)

    def chain(row: int) -> list[float]:
        return [] if row < 0 else [regions[row][1], *chain(parents[row])]

    places = np.arange(-1, len(regions), dtype=np.int32)
    table = builder.build().regions
    expected = [prod(chain(int(row))) for row in places]
    np.testing.assert_array_equal(region_executions(table, places), expected)


def test_nbytes_counts_every_array_once() -> None:
    graph = small_graph()
    longer = replace(graph, flops=np.zeros(3), attachments={})
    assert longer.nbytes == graph.nbytes
    assert replace(graph, stream=np.broadcast_to(np.int32(0), (3,))).nbytes == graph.nbytes - 8


# --- invariants


def with_column(graph: OpGraph, column: str, value: object) -> OpGraph:
    """A copy of the graph with one column changed, unchecked by the type checker."""
    return cast("Callable[..., OpGraph]", replace)(graph, **{column: value})


def test_wrong_column_length_is_refused() -> None:
    graph = small_graph()
    with pytest.raises(InvariantError, match="stream"):
        replace(graph, stream=np.zeros(2, np.int32))
    with pytest.raises(InvariantError, match="results"):
        replace(graph, results=RaggedArray.empty(2))


@pytest.mark.parametrize("column", ["data_deps", "control_deps", "operands", "results"])
@pytest.mark.parametrize("value", [-1, 3])
def test_reference_out_of_range_is_refused(column: str, value: int) -> None:
    with pytest.raises(InvariantError, match=column):
        with_column(small_graph(), column, RaggedArray.from_lists([[value], [], []]))


@pytest.mark.parametrize(
    ("column", "value"), [("name_id", 99), ("name_id", -1), ("op_id", 99), ("region", 1), ("region", -2)]
)
def test_row_out_of_range_is_refused(column: str, value: int) -> None:
    graph = small_graph()
    wrong = np.array([value, 0, 0], np.int32)
    with pytest.raises(InvariantError, match=column):
        with_column(graph, column, wrong)


def test_side_table_out_of_range_is_refused() -> None:
    graph = small_graph()
    with pytest.raises(InvariantError, match="CollectiveTable"):
        replace(graph, collectives=replace(graph.collectives, node=np.array([3], np.int32)))
    with pytest.raises(InvariantError, match="group_set"):
        replace(graph, group_sets=())
    with pytest.raises(InvariantError, match="permutation"):
        replace(graph, permutations=())
    with pytest.raises(InvariantError, match="extra"):
        replace(graph, extra=replace(graph.extra, node=np.array([-2, 0], np.int32)))
    with pytest.raises(InvariantError):
        replace(graph, strings=StringTable.from_strings([""]))
    with pytest.raises(InvariantError):
        replace(graph, types=TensorTypesBuilder().build())


def test_graph_is_frozen() -> None:
    with pytest.raises(AttributeError):
        small_graph().name = "other"  # type: ignore[misc]


def test_node_columns_are_the_flat_columns() -> None:
    graph = small_graph()
    assert {name for name in NODE_COLUMNS if len(getattr(graph, name)) != 3} == set()


# --- workloads


def test_workload_of_one_class() -> None:
    workload = Workload.spmd(small_graph(), 65_536, {"format": "test"})
    assert workload.num_ranks == 65_536
    assert workload.rank_class.strides == (0,)
    assert workload.graph_of(65_535).name == "small"
    assert workload.nbytes == small_graph().nbytes
    assert workload.group_sets == (StridedGroups.all_ranks(8),)


def test_workload_of_two_classes() -> None:
    one, two = small_graph(), replace(small_graph(), name="second")
    workload = Workload(name="job", classes=(one, two), rank_class=np.array([1, 0, 1], np.int32))
    assert workload.ranks_of(1).tolist() == [0, 2]
    assert workload.graph_of(1).name == "small"
    assert len(workload.group_sets) == 1


@pytest.mark.parametrize("rank_class", [[], [2], [-1]])
def test_impossible_workload_is_refused(rank_class: list[int]) -> None:
    with pytest.raises(InvariantError):
        Workload(name="job", classes=(small_graph(),), rank_class=np.array(rank_class, np.int32))


def test_workload_without_class_is_refused() -> None:
    with pytest.raises(InvariantError, match="no rank class"):
        Workload(name="job", classes=(), rank_class=np.zeros(1, np.int32))
