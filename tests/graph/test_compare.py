"""Comparison of graphs: every difference is found, and renumbering is not a difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TypeVar, cast

import numpy as np
import pytest

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
    StridedGroups,
    Workload,
    dtype,
)
from hespas.graph.equality import graphs_equal, workloads_equal

Owner = TypeVar("Owner")


def changed(owner: Owner, column: str, value: object) -> Owner:
    """A copy with one field changed, unchecked by the type checker."""
    return cast("Callable[..., Owner]", replace)(owner, **{column: value})


def graph(first_text: str = "") -> OpGraph:
    """The same program whatever is interned first."""
    builder = GraphBuilder("same")
    builder.strings.add(first_text)
    if first_text:
        builder.types.add(dtype("i8"), (1,))
        builder.group_set(StridedGroups.all_ranks(3))
    f32 = builder.types.add(dtype("f32"), (2, 2), encoding=builder.strings.add("{1,0}"))
    region = builder.add_region(RegionKind.CALL, label="f")
    for number in range(4):
        builder.add_node(
            name_id=builder.strings.add(f"n{number}"),
            op_id=builder.strings.add("op"),
            op_class=OpClass.COLLECTIVE,
            kind=NodeKind.COLLECTIVE,
            data_deps=range(number),
            operands=[f32],
            results=[f32],
            region=region,
            flops=float("nan") if number else 3.0,
        )
    groups = builder.group_set(StridedGroups.all_ranks(4))
    builder.add_collective(1, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=8.0, reduction="add")
    builder.add_p2p(2, permutation=builder.permutation(Permutation(4, (4, 1), 1)), comm_bytes=4.0)
    builder.add_contraction(
        0, batch=1, m=2, n=2, k=2, flops=16.0, useful_flops=16.0, lhs=1, rhs=1, accumulator=1
    )
    builder.add_extra(3, "k", 1, b"v")
    builder.add_carried(region, 0, 1)
    return builder.build()


def test_equal_graphs_have_no_difference() -> None:
    assert graphs_equal(graph(), graph()) == []
    assert graphs_equal(graph(), graph("interned first")) == [], "row numbers do not matter"


@pytest.mark.parametrize("column", NODE_COLUMNS)
def test_every_node_column_is_compared(column: str) -> None:
    one = graph()
    values = np.array(getattr(one, column))
    values[2] = -1 if column == "region" else 0 if values[2] != 0 else 1
    (difference,) = graphs_equal(one, changed(one, column, values))
    assert (difference.column, difference.count, difference.first_row) == (column, 1, 2)


@pytest.mark.parametrize("table", ["collectives", "p2p", "contractions", "regions", "extra"])
def test_every_table_column_is_compared(table: str) -> None:
    one = graph()
    entries = getattr(one, table)
    names = [entry.name for entry in fields(entries) if entry.name not in {"offsets", "values"}]
    assert len(names) >= 3
    for name in names:
        values = np.array(getattr(entries, name))
        values[0] = -1 if name in {"group_set", "permutation"} else 0 if values[0] != 0 else 1
        two = changed(one, table, changed(entries, name, values))
        assert [str(found).split(":")[0] for found in graphs_equal(one, two)] == [f"{table}.{name}"]


@pytest.mark.parametrize("column", ["data_deps", "control_deps", "operands", "results"])
def test_every_ragged_column_is_compared(column: str) -> None:
    one = graph()
    longer = changed(one, column, RaggedArray.from_lists([[0], [0], [0], [0, 0]]))
    assert [found.column for found in graphs_equal(one, longer)] == [column]


def test_order_of_dependencies_matters() -> None:
    one = graph()
    two = replace(one, data_deps=RaggedArray.from_lists([[], [0], [1, 0], [0, 1, 2]]))
    assert [(found.column, found.first_row) for found in graphs_equal(one, two)] == [("data_deps", 2)]


def test_types_are_compared_by_what_they_say() -> None:
    one = graph()
    two = replace(one, types=replace(one.types, bytes=one.types.bytes + 1))
    assert [found.column for found in graphs_equal(one, two)] == ["operands", "results"]


def test_rest_is_compared() -> None:
    one = graph()
    assert [found.column for found in graphs_equal(one, replace(one, name="other"))] == ["name"]
    with_file = replace(one, attachments={"a": b"1"})
    assert [found.column for found in graphs_equal(one, with_file)] == ["attachments"]
    values = replace(one, extra=replace(one.extra, values=b"w"))
    assert [found.column for found in graphs_equal(one, values)] == ["extra.value"]


def test_length_ends_the_comparison() -> None:
    (difference,) = graphs_equal(graph(), GraphBuilder("same").build())
    assert (difference.column, difference.count) == ("nodes", 4)
    assert str(difference) == "nodes: 4 rows more or fewer"


def test_workloads_are_compared() -> None:
    one = Workload.spmd(graph(), 4, {"a": "1"})
    assert workloads_equal(one, Workload.spmd(graph("x"), 4, {"a": "1"})) == []
    assert [found.column for found in workloads_equal(one, Workload.spmd(graph(), 4))] == ["metadata"]
    assert [found.column for found in workloads_equal(one, Workload.spmd(graph(), 5, {"a": "1"}))] == [
        "rank_class"
    ]
    two = Workload.spmd(replace(graph(), flops=np.ones(4)), 4, {"a": "1"})
    assert str(workloads_equal(one, two)[0]).startswith("classes[0].flops: 4 rows differ")
