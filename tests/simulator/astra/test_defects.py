"""What ASTRA-sim crashes on, never ends, or ends with exit code 0 and a wrong answer, is told or cannot be.

Waiting for ever is in ``test_deadlock.py``, algorithms in ``test_collectives.py``, slots and messages in
``test_issue_rules.py``; this is the rest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.graph import CollectiveKind, Diagnostics
from hespas.graph.errors import CheckFailedError, UnsupportedError
from tests.simulator.astra.small_systems import collective, finishes, network, run, system
from tests.validators.checker.small_jobs import Steps, job_of

MIB = 1 << 20
JOB = collective(CollectiveKind.ALL_REDUCE, MIB, 2)
PAIR = network(("Ring", 2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dataset_splits": None}, "preferred-dataset-splits is missing, without which ASTRA-sim crashes"),
        ({"implementations": {}}, "no implementation of it is stated"),
        ({"custom": frozenset({CollectiveKind.ALL_REDUCE})}, "a custom all-reduce is not modelled"),
        ({"models_shared_bus": True}, "model-shared-bus is not modelled"),
        ({"roofline": True, "local_memory_gb_per_s": None, "peak_tflops": 312.0}, "needs local-mem-bw"),
        ({"roofline": True, "peak_tflops": 0.0}, "needs local-mem-bw and peak-perf"),
        ({"implementations": {CollectiveKind.ALL_REDUCE: ("ring", "ring")}}, "2 names, and the network 1"),
        ({"implementations": {CollectiveKind.ALL_REDUCE: ("oneRing", "ring")}}, "a flat algorithm beside"),
    ],
)
def test_what_the_files_lack(changes: dict[str, object], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        run(JOB, PAIR, system("ring", **changes))


def test_a_group_of_one_rank_would_never_end() -> None:
    ranks = [Steps(2) for _ in range(2)]
    ranks[0].coll(groups=[[0], [1]])
    ranks[1].coll(groups=[[0], [1]])
    with pytest.raises(UnsupportedError, match=r"ET019.*of one rank: ASTRA-sim never ends it"):
        run(job_of(*ranks), PAIR)


def test_a_tree_in_a_group_would_crash() -> None:
    ranks = [Steps(4) for _ in range(4)]
    for steps in ranks:
        steps.coll(groups=[[0, 1], [2, 3]])
    with pytest.raises(UnsupportedError, match=r"ET025.*of a group by doubleBinaryTree: ASTRA-sim crashes"):
        run(job_of(*ranks), network(("Ring", 4)), system("doubleBinaryTree"))


def test_a_cycle_is_no_success() -> None:
    """Node 0 ends and nothing else can: ASTRA-sim reports the rank as finished then."""
    one, two = Steps(2), Steps(2)
    one.compute()
    one.compute(2)
    one.compute(1)
    two.compute()
    with pytest.raises(CheckFailedError, match=r"ET007.*dependencies form a cycle"):
        run(job_of(one, two), PAIR)


@pytest.mark.parametrize(("flops", "moved"), [(0.0, 8.0), (8.0, 0.0), (0.0, 0.0)])
def test_nodes_without_work_end_and_wake_what_waits(flops: float, moved: float) -> None:
    """Operations of 0 are not-a-number there, bytes of 0 end at once and wake nobody."""
    steps = [Steps(2) for _ in range(2)]
    for each in steps:
        each.compute(each.compute())
    job = job_of(*steps)
    classes = tuple(
        replace(
            graph, flops=np.array([flops, 1e9]), bytes_read=np.array([moved, 8.0]), bytes_written=np.zeros(2)
        )
        for graph in job.classes
    )
    machine = system("ring", roofline=True, peak_tflops=1.0, local_memory_gb_per_s=1e9)
    done = run(replace(job, classes=classes), PAIR, machine)
    assert finishes(done) == [1_000_000] * 2  # 10^9 operations at 10^12 a second


def test_overlap_beside_the_host_is_not_defined() -> None:
    """ASTRA-sim ends with an error where a rank runs more than computation and communication."""
    steps = [Steps(2) for _ in range(2)]
    for each in steps:
        each.coll(each.compute(host=True), size=float(MIB))
        each.compute()
    done = run(job_of(*steps), PAIR)
    assert done.statistics.overlap_ns.tolist() == [-1, -1]
    assert done.statistics.cpu_ns.tolist() == [1000, 1000]


def test_a_message_that_nobody_receives_is_told() -> None:
    sender, other = Steps(2), Steps(2)
    sender.send(0, 1, size=77.0, tag=3)
    other.compute()
    found = Diagnostics()
    run(job_of(sender, other), PAIR, diagnostics=found)
    [told] = [each for each in found if each.code == "simulate.unreceived"]
    assert told.message == "a message of 77 bytes with tag 3 from rank 0 is never received"


def test_keys_that_change_nothing_are_named() -> None:
    found = Diagnostics()
    machine = replace(system("ring"), unread=("boost-mode", "scheduling-policy"))
    run(JOB, PAIR, machine, diagnostics=found)
    [told] = [each for each in found if each.code == "simulate.unread-keys"]
    assert told.message == "change no time: boost-mode, scheduling-policy"
