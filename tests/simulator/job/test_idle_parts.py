"""Communication of a rank class in which some of its ranks take no part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hespas.graph import ExplicitGroups, NodeKind, OpGraph, Permutation
from hespas.simulator import JobScheduler, Simulation, simulate
from tests.simulator.job.small_jobs import Part, part, stages

COMPUTE_NS, COMM_NS = 100.0, 7.0


def _finish_ns(fill: Callable[[Part, int], object], ranks: int, *, symmetry: bool) -> list[float]:
    made = part()
    fill(made, made.compute(COMPUTE_NS))
    graph: OpGraph = made.built()
    done: Simulation = simulate(
        stages([graph], [0] * ranks), simulator=JobScheduler(symmetry=symmetry, interference=False)
    )
    finish_ns: list[float] = done.timeline.finish_ns.tolist()
    return finish_ns


@pytest.mark.parametrize("symmetry", [True, False])
def test_a_rank_without_a_group_skips_the_collective(*, symmetry: bool) -> None:
    some = ExplicitGroups.from_rows([[0, 1]])
    finish_ns = _finish_ns(
        lambda made, first: made.collective(some, COMM_NS, first), ranks=3, symmetry=symmetry
    )
    assert finish_ns == [COMPUTE_NS + COMM_NS, COMPUTE_NS + COMM_NS, COMPUTE_NS]


@pytest.mark.parametrize("symmetry", [True, False])
@pytest.mark.parametrize("kind", [NodeKind.SEND, NodeKind.RECV])
def test_a_rank_without_a_peer_skips_the_message(kind: NodeKind, *, symmetry: bool) -> None:
    way = Permutation.from_pairs([(0, 1)], 2)

    def both(made: Part, first: int) -> None:
        made.message(NodeKind.SEND, way, COMM_NS if kind == NodeKind.SEND else 0.0, first)
        made.message(NodeKind.RECV, way, COMM_NS if kind == NodeKind.RECV else 0.0, first)

    sender, receiver = _finish_ns(both, ranks=2, symmetry=symmetry)
    assert sender == (COMPUTE_NS + COMM_NS if kind == NodeKind.SEND else COMPUTE_NS)
    assert receiver == COMPUTE_NS + COMM_NS


@pytest.mark.parametrize("symmetry", [True, False])
def test_a_permute_of_other_ranks_takes_no_time(*, symmetry: bool) -> None:
    way = Permutation.from_pairs([(0, 1), (1, 0), (2, 2)], 4)
    finish_ns = _finish_ns(
        lambda made, first: made.message(NodeKind.PERMUTE, way, COMM_NS, first), ranks=4, symmetry=symmetry
    )
    assert finish_ns == [COMPUTE_NS + COMM_NS, COMPUTE_NS + COMM_NS, COMPUTE_NS, COMPUTE_NS]
