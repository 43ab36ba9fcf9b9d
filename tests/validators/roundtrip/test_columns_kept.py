"""Verdict on each column of a graph after a round trip: exact, changed, lost, or invented."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph import (
    CollectiveKind,
    ContractionTable,
    ExplicitGroups,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    RaggedArray,
    StridedGroups,
    Workload,
)
from hespas.graph.columns import constant
from hespas.graph.passes import bypass
from hespas.validators.roundtrip import ColumnResult, ColumnStatus, compare_columns
from hespas.validators.roundtrip.columns import summed


def graph(nodes: int = 4) -> OpGraph:
    """A chain of named products, the last an all-reduce over pairs of ranks."""
    b = GraphBuilder("chain")
    for number in range(nodes):
        last = number == nodes - 1
        node = b.add_node(
            name_id=b.strings.add(f"n{number}"),
            op_id=b.strings.add("op"),
            op_class=OpClass.COLLECTIVE if last else OpClass.CONTRACTION,
            kind=NodeKind.COLLECTIVE if last else NodeKind.COMPUTE,
            data_deps=[number - 1] if number else [],
            flops=100.0,
            transcendentals=0.0,
            bytes_read=8.0,
            bytes_written=8.0,
        )
        if last:
            pairs = b.group_set(ExplicitGroups.from_rows([[0, 1], [2, 3]]))
            b.add_collective(
                node,
                CollectiveKind.ALL_REDUCE,
                group_set=pairs,
                comm_bytes=8.0,
                reduction="add",
            )
    return b.build()


def results(before: Workload, after: Workload) -> dict[str, ColumnResult]:
    return {result.column: result for result in compare_columns(before, after)}


def not_kept(before: OpGraph, after: OpGraph) -> dict[str, tuple[ColumnStatus, int]]:
    found = results(Workload.spmd(before, 4), Workload.spmd(after, 4))
    good = {ColumnStatus.EXACT, ColumnStatus.ABSENT}
    return {name: (each.kept, each.changed) for name, each in found.items() if each.kept not in good}


def test_a_graph_is_kept_by_itself() -> None:
    found = results(Workload.spmd(graph(), 4), Workload.spmd(graph(), 4))
    assert {each.kept for each in found.values()} == {ColumnStatus.EXACT, ColumnStatus.ABSENT}
    assert found["flops"] == ColumnResult("flops", ColumnStatus.EXACT, 4, 0)
    assert found["source_id"].kept is ColumnStatus.ABSENT
    assert found["collectives.comm_bytes"].known == 1


def test_a_column_that_says_nothing_any_more_is_lost() -> None:
    before = graph()
    assert not_kept(before, replace(before, flops=constant(np.nan, 4))) == {"flops": (ColumnStatus.LOST, 4)}


def test_rows_that_say_something_else_are_counted() -> None:
    before = graph()
    flops = np.array([100.0, 101.0, 100.0, np.nan])
    assert not_kept(before, replace(before, flops=flops)) == {"flops": (ColumnStatus.CHANGED, 2)}


def test_a_figure_that_was_unknown_and_is_not_any_more_is_no_gain() -> None:
    before = replace(graph(), duration_ns=constant(np.nan, 4))
    after = replace(before, duration_ns=constant(0.0, 4))
    assert not_kept(before, after) == {"duration_ns": (ColumnStatus.CHANGED, 4)}


def test_a_table_that_is_gone_is_lost_in_each_of_its_columns() -> None:
    before = graph()
    empty = ContractionTable.empty()
    table = replace(
        empty,
        **{column.name: np.ones(1, getattr(empty, column.name).dtype) for column in fields(empty)},
    )
    with_rows = replace(before, contractions=table)
    found = not_kept(with_rows, before)
    assert found["contractions.m"] == (ColumnStatus.LOST, 1)
    assert all(name.startswith("contractions.") for name in found)


def test_a_missing_dependency_is_told() -> None:
    before = graph()
    assert not_kept(before, replace(before, data_deps=RaggedArray.empty(4))) == {
        "data_deps": (ColumnStatus.LOST, 3)
    }


def test_nodes_that_are_gone_are_told_and_the_others_compared() -> None:
    before = graph()
    gone = np.array([False, True, False, False])
    after = bypass(before, gone)
    assert not_kept(before, after) == {"nodes": (ColumnStatus.CHANGED, 1)}
    changed = replace(after, flops=after.flops * 2)
    assert not_kept(before, changed) == {
        "nodes": (ColumnStatus.CHANGED, 1),
        "flops": (ColumnStatus.CHANGED, 3),
    }


def test_the_same_groups_in_another_spelling_are_kept() -> None:
    before = graph()
    after = replace(before, group_sets=(StridedGroups.from_iota(2, 2, (4,)),))
    assert not_kept(before, after) == {}


def test_other_groups_are_told() -> None:
    before = graph()
    after = replace(before, group_sets=(ExplicitGroups.from_rows([[0, 2], [1, 3]]),))
    assert not_kept(before, after) == {"collectives.group_set": (ColumnStatus.CHANGED, 1)}


def test_a_group_of_all_ranks_is_what_no_group_says() -> None:
    before = replace(graph(), group_sets=(StridedGroups.all_ranks(4),))
    after = replace(
        before,
        group_sets=(),
        collectives=replace(before.collectives, group_set=np.array([-1], np.int32)),
    )
    assert not_kept(before, after) == {}


def test_ranks_that_fall_into_other_classes_are_told() -> None:
    before = Workload.spmd(graph(), 4)
    split = replace(before, classes=(graph(), graph()), rank_class=np.array([0, 0, 1, 1], np.int32))
    found = results(before, split)
    assert found["ranks"] == ColumnResult("ranks", ColumnStatus.CHANGED, 4, 2)
    assert {each.kept for name, each in found.items() if name != "ranks"} == {
        ColumnStatus.EXACT,
        ColumnStatus.ABSENT,
    }


def test_classes_in_another_order_are_the_same_classes() -> None:
    one, two = graph(3), graph(4)
    before = Workload(name="w", classes=(one, two), rank_class=np.array([0, 1, 1, 0], np.int32))
    after = Workload(name="w", classes=(two, one), rank_class=np.array([1, 0, 0, 1], np.int32))
    assert {each.kept for each in compare_columns(before, after)} == {ColumnStatus.EXACT, ColumnStatus.ABSENT}


def test_facts_about_the_file_itself_are_no_facts_about_the_job() -> None:
    before = Workload.spmd(graph(), 4, {"format": "hlo", "module": "m", "num_partitions": "4"})
    found = results(before, replace(before, metadata={"format": "chakra", "module": "m"}))
    assert found["metadata"] == ColumnResult("metadata", ColumnStatus.CHANGED, 2, 1)


_RESULTS = st.builds(
    ColumnResult,
    st.just("flops"),
    st.sampled_from([ColumnStatus.EXACT, ColumnStatus.CHANGED, ColumnStatus.LOST]),
    st.integers(1, 9),
    st.just(1),
)


@given(st.lists(_RESULTS, min_size=1, max_size=5))
def test_a_sum_is_as_bad_as_its_worst_part_but_lost_only_where_all_is(parts: list[ColumnResult]) -> None:
    total = summed(parts)
    kinds = {part.kept for part in parts}
    expected = next(iter(kinds)) if len(kinds) == 1 else ColumnStatus.CHANGED
    assert total == ColumnResult("flops", expected, sum(part.known for part in parts), len(parts))


def test_what_was_absent_everywhere_stays_absent() -> None:
    nothing = ColumnResult("flops", ColumnStatus.ABSENT, 0, 0)
    assert summed([nothing, nothing]) == nothing
    exact = ColumnResult("flops", ColumnStatus.EXACT, 2, 0)
    assert summed([nothing, exact]) == exact


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_different_number_of_ranks_is_told(ranks: int) -> None:
    found = results(Workload.spmd(graph(), 4), Workload.spmd(graph(), ranks))
    assert found["ranks"] == ColumnResult("ranks", ColumnStatus.CHANGED, 4, 4 - ranks)


def test_joins_that_resist_in_both_graphs_are_left_out_of_the_comparison() -> None:
    def joined(name: str) -> OpGraph:
        """A join of so many producers and consumers that it cannot be bypassed."""
        b = GraphBuilder("join")

        def add(label: str, deps: list[int]) -> int:
            return b.add_node(
                name_id=b.strings.add(label),
                op_id=b.strings.add("op"),
                op_class=OpClass.ELEMENTWISE,
                kind=NodeKind.COMPUTE,
                data_deps=deps,
                flops=1.0,
                transcendentals=0.0,
                bytes_read=1.0,
                bytes_written=1.0,
            )

        before = [add(f"in{number}", []) for number in range(20)]
        joint = add(name, before)
        if name == "other":
            add("more", [joint])
        for number in range(20):
            add(f"out{number}", [joint])
        return b.build()

    told = results(Workload.spmd(joined("one"), 1), Workload.spmd(joined("other"), 1))
    assert (told["nodes"].kept, told["nodes"].changed) == (ColumnStatus.CHANGED, 3)
    assert told["flops"].kept is ColumnStatus.EXACT
