"""The checker replays the issue rule of the ASTRA-sim simulation."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from hespas.graph import NodeKind
from hespas.simulator.astra.events import Slot
from hespas.validators.checker.replay import NodeProgram, issue_order
from tests.simulator.astra.small_systems import network, run
from tests.validators.checker.small_jobs import Steps, job_of

PAIR = network(("FullyConnected", 2))


def drawn(seed: int) -> Steps:
    """Computations of milliseconds on both units of a rank, and collectives, which take next to no time."""
    random, steps = Random(seed), Steps(2)
    for node in range(14):
        deps = [dep for dep in range(node) if random.random() < 0.25]
        if random.random() < 0.5:
            steps.coll(*deps, size=64.0)
        else:
            steps.compute(*deps, ns=1e6 * random.randrange(1, 10**5), host=random.random() < 0.4)
    return steps


@pytest.mark.parametrize("seed", range(30))
def test_collectives_are_issued_in_the_order_of_the_simulation(seed: int) -> None:
    job = job_of(drawn(seed), drawn(seed))
    graph = job.classes[0]
    done = run(job, PAIR)
    starts = dict(zip(done.timeline.node.tolist(), done.timeline.start_ns.tolist(), strict=False))
    issued = issue_order(graph).by_time
    assert sorted(issued) == [
        node for node, kind in enumerate(graph.kind.tolist()) if kind == NodeKind.COLLECTIVE
    ]
    assert [starts[node] for node in issued] == sorted(starts[node] for node in issued)
    assert issued == tuple(sorted(issued, key=starts.__getitem__))


@pytest.mark.parametrize(("host", "slot"), [(True, Slot.CPU), (False, Slot.COMMUNICATION)])
def test_memory_nodes_on_the_host_use_the_cpu_slot(host: bool, slot: Slot) -> None:
    steps = Steps(1)
    steps.compute(ns=1e3, host=host)
    graph = job_of(steps).classes[0]
    graph = replace(graph, kind=np.full_like(graph.kind, NodeKind.MEM_LOAD))
    assert NodeProgram.of(graph).slot == [slot]
