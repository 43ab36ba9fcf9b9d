"""Jobs that never end: ASTRA-sim hangs or is silent, Hespas names the node and the rule."""

from __future__ import annotations

import pytest

from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpClass, Workload
from hespas.graph.errors import CheckFailedError
from tests.simulator.astra.small_systems import network, run
from tests.validators.checker.small_jobs import Steps, job_of


def refused(job: Workload, match: str) -> Diagnostics:
    """Return the diagnostics of a job that ends in an error."""
    found = Diagnostics()
    wires = network(("Ring", job.num_ranks))
    with pytest.raises(CheckFailedError, match=match):
        run(job, wires, diagnostics=found)
    assert {each.code for each in found} == {"simulate.deadlock"}
    assert all(each.rank is not None and each.node is not None for each in found)
    return found


def test_a_receive_without_a_send() -> None:
    one, two = Steps(2), Steps(2)
    one.compute()
    two.recv(0, 1, tag=3)
    refused(job_of(one, two), "ET015: 1 of 2 ranks never finish .1.; rank 1: node 0.*sends no such message")


def test_a_receive_of_another_size() -> None:
    one, two = Steps(2), Steps(2)
    one.send(0, 1, size=64.0)
    two.recv(0, 1, size=128.0)
    refused(job_of(one, two), "ET015.*waits for 128 bytes with tag 0 from rank 0, which sends 64 bytes")


def test_one_receive_too_many() -> None:
    one, two = Steps(2), Steps(2)
    one.send(0, 1)
    two.recv(0, 1)
    two.recv(0, 1)
    refused(job_of(one, two), "ET015.*one more message")


def test_a_collective_that_one_rank_lacks() -> None:
    ranks = [Steps(4) for _ in range(4)]
    for rank, steps in enumerate(ranks):
        steps.compute()
        if rank != 2:
            steps.coll()
    refused(job_of(*ranks), "ET020.*all-reduce of all ranks.*waits for rank 2, which has only 0")


def test_collectives_of_two_kinds() -> None:
    one, two = Steps(2), Steps(2)
    one.coll(kind=CollectiveKind.ALL_GATHER)
    two.coll(kind=CollectiveKind.REDUCE_SCATTER)
    refused(job_of(one, two), "ET020.*waits for rank 1, which runs node 0 .coll. instead, reduce-scatter")


def test_two_groups_in_opposite_order() -> None:
    """Ranks 1 and 2 are in both groups and come to them in opposite order."""
    ranks = [Steps(4) for _ in range(4)]
    first, second = [[0, 1, 2]], [[1, 2, 3]]
    ranks[0].coll(groups=first)
    ranks[1].coll(ranks[1].coll(groups=first), groups=second)
    ranks[2].coll(ranks[2].coll(groups=second), groups=first)
    ranks[3].coll(groups=second)
    refused(job_of(*ranks), "ET021.*which waits in node")


def test_a_world_collective_after_different_numbers_of_group_collectives() -> None:
    """Chunks of groups count too, so that those of the world do not match: ET029."""
    ranks = [Steps(4) for _ in range(4)]
    for rank, steps in enumerate(ranks):
        before = [steps.coll(groups=[[0, 1]])] if rank < 2 else []
        steps.coll(*before)
    refused(job_of(*ranks), "ET029.*a different number of chunks before .0 and 4|ET029.*.4 and 0")


def test_a_node_that_ends_at_once_wakes_nobody() -> None:
    one, two = Steps(2), Steps(2)
    first = one.node(NodeKind.INVALID, (), OpClass.CONTROL, "nothing")
    one.compute(first)
    two.compute()
    found = refused(job_of(one, two), "no ending node triggers it")
    assert [each.rank for each in found] == [0]


def test_what_waits_for_a_slot_names_its_holder() -> None:
    one, two = Steps(2), Steps(2)
    one.coll()
    one.send(0, 1)
    two.compute()
    found = refused(job_of(one, two), "ET020")
    assert any("communication slot, which node 0 (coll) occupies" in each.message for each in found)
