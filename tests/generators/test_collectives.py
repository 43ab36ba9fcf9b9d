"""Micro-benchmarks of collectives: payloads, groups, and results of checks and simulators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hespas
from hespas.generators.collectives import KINDS, CollectiveBenchmark, parse_groups, parse_sizes
from hespas.graph import CollectiveKind, NodeKind
from hespas.graph.errors import UsageError

ASTRA_KINDS = tuple(each for each in KINDS if each != "reduce")


BENCH = CollectiveBenchmark(kinds=ASTRA_KINDS, sizes=(1 << 10, 1 << 20), ranks=8)


def test_sizes_are_powers_between_or_a_list() -> None:
    assert parse_sizes("1KiB-4KiB,3") == (1024, 2048, 4096, 3)


@pytest.mark.parametrize("text", ["", "x", "1TB", "0", "4KiB-1KiB", "9999999999999999999"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_sizes(text)


def test_groups_lie_along_axes_of_the_mesh() -> None:
    assert [row.tolist() for row in parse_groups("2x4:inner", 8)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [row.tolist() for row in parse_groups("2x4:outer", 8)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert next(row.tolist() for row in parse_groups("2x2x2:0,2", 8)) == [0, 1, 4, 5]


@pytest.mark.parametrize("text", ["2x2:inner", "2x4:3", "2x4:0,0", "2x4", "axb:inner"])
def test_groups_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_groups(text, 8)


def test_payloads_are_those_of_chakra() -> None:
    """The whole buffer, for an all-gather the shard: the operand."""
    graph = (
        replace(BENCH, kinds=("all_reduce", "all_gather", "reduce_scatter"), sizes=(1 << 20,))
        .workload()
        .classes[0]
    )
    table = graph.collectives
    assert table.comm_bytes.tolist() == [1 << 20, 1 << 17, 1 << 20]
    assert table.result_bytes.tolist() == [1 << 20, 1 << 20, 1 << 17]
    assert table.kind[1] == CollectiveKind.ALL_GATHER


def test_neighbours_send_and_receive_in_turn() -> None:
    workload = replace(BENCH, kinds=("ping_pong",), sizes=(64,), ranks=5).workload()
    kinds = [graph.kind.tolist() for graph in workload.classes]
    assert kinds == [[NodeKind.SEND, NodeKind.RECV], [NodeKind.RECV, NodeKind.SEND], []]
    assert workload.rank_class.tolist() == [0, 1, 0, 1, 2]


def test_separate_collectives_wait_for_nobody() -> None:
    graph = replace(BENCH, kinds=("all_reduce",), separate=True).workload().classes[0]
    assert not len(graph.control_deps.values)
    chained = replace(BENCH, kinds=("all_reduce",)).workload().classes[0]
    assert chained.control_deps.to_lists() == [[], [0]]


@pytest.mark.parametrize("groups", ["", "2x4:inner", "2x4:outer"])
@pytest.mark.parametrize("separate", [False, True])
def test_benchmarks_are_valid_and_run(groups: str, separate: bool) -> None:
    workload = replace(BENCH, groups=groups, separate=separate).workload()
    assert hespas.check(workload, profile="astra-sim").valid
    assert np.isfinite(hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns)
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100", mode="astra").step_ns > 0


def test_kinds_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown collective 'gossip'"):
        replace(BENCH, kinds=("all_reduce", "gossip")).workload()
