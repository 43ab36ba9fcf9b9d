"""Nodes of passes in their order: streams, waits, the host, and where the time of the last comes from."""

from __future__ import annotations

import pytest

from hespas.generators.llm.assemble import Need, Part
from hespas.validators.league.walk import walked
from tests.validators.league.small_stages import DATA, HOST, OVERLAP, PRODUCTS, Node, scale, stage


def test_communication_beside_kernels_counts_where_it_is_waited_for() -> None:
    nodes: list[Node] = [(100.0, DATA, 1, ()), (60.0, PRODUCTS, 0, ()), (30.0, PRODUCTS, 0, (0,))]
    done = walked(stage(nodes, [Part("forward", 0, 0, 3)], {}), [0], scale()).computed
    assert done.time_ns == 130.0
    assert (done.parts[DATA], done.parts[PRODUCTS]) == (100.0, 30.0)


def test_the_parts_of_a_time_add_up_to_it_under_any_factor() -> None:
    nodes: list[Node] = [
        (50.0, DATA, 1, ()),
        (60.0, PRODUCTS, 0, ()),
        (30.0, PRODUCTS, 0, (0,)),
        (20.0, DATA, 1, (2,)),
    ]
    factors = scale(host_ns=3.0, overlap=0.5, products=1.7)
    done = walked(stage(nodes, [Part("forward", 0, 0, 4)], {}), [0], factors).everything
    assert sum(done.parts * factors) == pytest.approx(done.time_ns)
    assert done.parts[OVERLAP] > 0


def test_kernels_are_slower_while_the_network_is_busy_and_no_longer() -> None:
    nodes: list[Node] = [(40.0, DATA, 1, ()), (100.0, PRODUCTS, 0, ())]
    done = walked(stage(nodes, [Part("forward", 0, 0, 2)], {}), [0], scale(overlap=0.25)).computed
    assert done.time_ns == 40.0 + (100.0 - 40.0 / 1.25)


def test_a_host_that_is_slower_than_kernels_sets_the_pace() -> None:
    nodes: list[Node] = [(5.0, PRODUCTS, 0, ())] * 4
    done = walked(stage(nodes, [Part("forward", 0, 0, 4)], {}), [0], scale(host_ns=20.0)).computed
    assert done.time_ns == 4 * 20.0 + 5.0
    assert (done.parts[HOST], done.parts[PRODUCTS]) == (4, 5.0)


def test_a_host_that_reads_a_result_issues_the_next_kernel_after_it() -> None:
    nodes: list[Node] = [(100.0, PRODUCTS, 0, ()), (100.0, PRODUCTS, 0, ())]
    part = [Part("forward", 0, 0, 2)]
    ahead = walked(stage(nodes, part, {}), [0], scale(host_ns=20.0)).computed
    after = walked(stage(nodes, part, {}, waited=[0]), [0], scale(host_ns=20.0)).computed
    assert (ahead.time_ns, after.time_ns) == (220.0, 240.0)
    assert after.parts[HOST] == 2


def test_what_ends_a_step_waits_for_reductions_of_the_pass_before() -> None:
    nodes: list[Node] = [(10.0, PRODUCTS, 0, ()), (70.0, DATA, 1, (0,)), (5.0, PRODUCTS, 0, ())]
    last = Part("backward", 0, 0, 2, ports={"reduced": 1})
    end = Part("end", 0, 2, 3, needs=[Need(2, "backward", 0, "reduced")])
    done = walked(stage(nodes, [last, end], {}), [0, 1], scale()).computed
    assert done.time_ns == 85.0
