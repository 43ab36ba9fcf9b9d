"""Jobs computed by hand: waits, durations, and reports of ranks that never communicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hespas import api
from hespas.graph import (
    ABSENT,
    CollectiveKind,
    Diagnostics,
    ExplicitGroups,
    GroupSet,
    NodeKind,
    OpGraph,
    Permutation,
    StridedGroups,
    Workload,
)
from hespas.graph.errors import CheckFailedError, UnsupportedError, UsageError
from hespas.simulator import JobScheduler, Simulation, simulate
from tests.simulator.job.small_jobs import Part, part, stages

PAIR = StridedGroups.all_ranks(2)
PAIRS = ExplicitGroups.from_rows([[0, 1], [2, 3]])
FORWARD = Permutation.from_pairs([(0, 1)], 2)


def run(workload: Workload, found: Diagnostics | None = None, **options: Any) -> Simulation:
    return simulate(workload, simulator=JobScheduler(**options), diagnostics=found)


def spans(done: Simulation, rank: int) -> list[tuple[int, float, float, float]]:
    """Node, start, end and wait of what a rank did."""
    timeline = done.timeline
    mine = timeline.rank == rank
    columns = (timeline.node, timeline.start_ns, timeline.end_ns, timeline.wait_ns)
    return list(zip(*(column[mine].tolist() for column in columns), strict=True))


def program(fill: Callable[[Part], object]) -> OpGraph:
    made = part()
    fill(made)
    return made.built()


def before_a_collective(*durations: float, takes: float = 5, then: float = 1) -> list[OpGraph]:
    """Programs that compute for so long, then meet, then compute."""
    return [compute_and_meet(PAIR, first, takes, then) for first in durations]


def compute_and_meet(groups: GroupSet, first: float, takes: float, then: float | None = None) -> OpGraph:
    made = part()
    met = made.collective(groups, takes, made.compute(first))
    if then is not None:
        made.compute(then, met)
    return made.built()


# --- collectives


def test_a_collective_ends_for_all_when_the_last_has_come() -> None:
    done = run(stages(before_a_collective(10, 4), [0, 1]))
    assert spans(done, 0) == [(0, 0, 10, 0), (1, 10, 15, 0), (2, 15, 16, 0)]
    assert spans(done, 1) == [(0, 0, 4, 0), (1, 4, 15, 6), (2, 15, 16, 0)]
    assert done.timeline.exposed_wait_ns.tolist() == [[0, 0], [6, 0]]
    assert done.timeline.exposed_comm_ns.tolist() == [5, 5]
    assert [found.wait_ns for found in done.classes] == [
        {"collectives": 0, "messages": 0},
        {"collectives": 6, "messages": 0},
    ]


def test_the_critical_path_goes_on_in_the_rank_that_was_awaited() -> None:
    done = run(stages(before_a_collective(4, 10), [0, 1]))
    timeline = done.timeline
    path = [(int(timeline.rank[span]), int(timeline.node[span])) for span in done.critical_path.tolist()]
    assert path == [(1, 0), (1, 1), (0, 2)]
    assert timeline.critical.tolist() == [False, False, True, True, True, False]
    assert timeline.awaited.tolist() == [-1, 4, -1, -1, -1, -1]
    assert sum(done.classes[0].critical_path.class_ns.values()) == done.step_ns == 16
    assert done.classes[0].critical_path.class_ns == {"elementwise": 11, "collective": 5}


def test_members_that_state_different_times_take_the_longest_or_what_was_recorded_last() -> None:
    graphs = [before_a_collective(10, takes=5)[0], before_a_collective(4, takes=11)[0]]
    found = Diagnostics()
    assert run(stages(graphs, [0, 1]), found, differing="longest").step_ns == 22
    assert found.counts()["simulate.differing-times"] == 1
    assert run(stages(graphs, [0, 1]), differing="shortest").step_ns == 16
    assert simulate(stages(graphs, [0, 1])).step_ns == 16  # times of the graphs


def test_groups_meet_each_for_itself() -> None:
    graphs = [compute_and_meet(PAIRS, first, 5) for first in (10, 4, 7)]
    done = run(stages(graphs, [0, 1, 1, 2]))
    assert done.timeline.finish_ns.tolist() == [15, 15, 12, 12]
    assert [row.ways for row in done.classes] == [1, 2, 1]


def test_collectives_of_one_group_meet_in_the_order_of_the_program() -> None:
    def two(p: Part, first: float, second: float) -> None:
        p.collective(PAIR, 2, p.compute(first))
        p.collective(PAIR, 3, p.compute(second, stream=1))

    graphs = [program(lambda p: two(p, 9, 1)), program(lambda p: two(p, 1, 9))]
    done = run(stages(graphs, [0, 1]))
    assert done.timeline.finish_ns.tolist() == [14, 14]


def test_what_takes_no_time_waits_too() -> None:
    done = run(stages(before_a_collective(10, 4, takes=0), [0, 1]))
    assert done.timeline.finish_ns.tolist() == [11, 11]
    assert spans(done, 1) == [(0, 0, 4, 0), (1, 4, 10, 6), (2, 10, 11, 0)]


def test_ranks_that_are_not_here_are_not_waited_for() -> None:
    found = Diagnostics()
    everyone = StridedGroups.all_ranks(4)
    graphs = [compute_and_meet(everyone, first, 5) for first in (3, 8)]
    done = run(stages(graphs, [0, ABSENT, 1, ABSENT]), found)
    assert done.timeline.finish_ns.tolist()[::2] == [13, 13]
    assert np.isnan(done.timeline.exposed_wait_ns[1]).all()
    assert found.counts()["simulate.absent-members"] == 1


def test_collectives_of_which_nobody_says_the_group_may_differ() -> None:
    graphs = [
        program(lambda p: p.collective(None, 5, p.compute(10))),
        program(lambda p: p.collective(None, 5, p.collective(None, 5))),
    ]
    found = Diagnostics()
    assert run(stages(graphs, [0, 1]), found).timeline.finish_ns.tolist() == [15, 10]
    assert found.counts()["simulate.ranks-not-synchronised"] == 3


# --- messages


def sending(first: float, second: float) -> Workload:
    """Rank 0 computes, then sends for 5 ns; rank 1 computes, then receives."""
    sender = program(lambda p: p.compute(1, p.message(NodeKind.SEND, FORWARD, 5, p.compute(first))))
    receiver = program(lambda p: p.compute(1, p.message(NodeKind.RECV, FORWARD, 5, p.compute(second))))
    return stages([sender, receiver], [0, 1])


@pytest.mark.parametrize(
    ("protocol", "first", "second", "ends"),
    [
        ("eager", 3, 1, [9, 9]),
        ("eager", 3, 20, [9, 21]),
        ("eager", 3, 6, [9, 9]),
        ("rendezvous", 3, 1, [9, 9]),
        ("rendezvous", 3, 20, [26, 26]),
    ],
)
def test_a_message_is_there_when_it_was_sent(
    protocol: str, first: float, second: float, ends: list[float]
) -> None:
    assert run(sending(first, second), protocol=protocol).timeline.finish_ns.tolist() == ends


def test_a_posted_receive_holds_no_stream_and_is_no_work() -> None:
    def late(p: Part) -> None:
        p.message(NodeKind.RECV, FORWARD, 5)
        p.collective(StridedGroups.from_mesh([2, 1], [1]), 2)

    sender = program(lambda p: p.message(NodeKind.SEND, FORWARD, 5, p.compute(10)))
    done = run(stages([sender, program(late)], [0, 1]))
    assert spans(done, 1) == [(0, 0, 15, 10), (1, 0, 2, 0)]
    assert done.timeline.resource_ns("communication").tolist() == [5, 7]
    assert done.timeline.exposed_wait_ns[1].tolist() == [0, 8]
    mine = done.timeline.rank == 1
    assert len(set(done.timeline.stream[mine].tolist())) == 2


def test_a_collective_does_not_overtake_what_is_to_be_sent_first() -> None:
    both = StridedGroups.all_ranks(2)

    def first(p: Part) -> None:
        p.message(NodeKind.SEND, FORWARD, 5, p.compute(10))
        p.collective(both, 2)  # is ready at once, but its partner waits for the message

    receiver = program(lambda p: p.collective(both, 2, p.message(NodeKind.RECV, FORWARD, 5)))
    done = run(stages([program(first), receiver], [0, 1]))
    assert done.timeline.finish_ns.tolist() == [17, 17]


def test_messages_meet_by_tag() -> None:
    def send(p: Part) -> None:
        first = p.message(NodeKind.SEND, FORWARD, 2, tag=1)
        p.message(NodeKind.SEND, FORWARD, 3, first, tag=2)

    def receive(p: Part) -> None:
        p.compute(10, p.message(NodeKind.RECV, FORWARD, 3, tag=2))
        p.compute(1, p.message(NodeKind.RECV, FORWARD, 2, tag=1), stream=1)

    done = run(stages([program(send), program(receive)], [0, 1]))
    assert [row[:3] for row in spans(done, 1)] == [(0, 0, 5), (2, 0, 2), (3, 2, 3), (1, 5, 15)]


def test_a_permutation_waits_for_its_source_and_in_rendezvous_for_its_target() -> None:
    chain = Permutation(4, (4, 1), 1, wraps=False)
    graph = program(lambda p: p.message(NodeKind.PERMUTE, chain, 5, p.compute(10)))
    workload = Workload.spmd(graph, 4)
    slow = ((1, 2.0),)
    assert run(workload).timeline.finish_ns.tolist() == [15, 15, 15, 15]
    assert run(workload, stragglers=slow).timeline.finish_ns.tolist() == [15, 25, 25, 15]
    done = run(workload, stragglers=slow, protocol="rendezvous")
    assert done.timeline.finish_ns.tolist() == [25, 25, 25, 15]


# --- ranks that differ though their programs do not


def test_one_straggler_is_waited_for_by_its_group_only() -> None:
    mesh = StridedGroups.from_mesh([4, 2], [1])
    graph = program(lambda p: p.collective(mesh, 5, p.compute(10)))
    done = run(Workload.spmd(graph, 8), stragglers=((3, 1.5),))
    assert done.timeline.finish_ns.tolist() == [15, 15, 20, 20, 15, 15, 15, 15]
    assert (done.classes[0].ways, done.classes[0].num_ranks) == (3, 8)
    assert done.timeline.exposed_wait_ns[:4, 0].tolist() == [0, 0, 5, 0]


def test_equal_programs_communicate_in_the_order_in_which_it_becomes_ready() -> None:
    """The second collective of the program is ready first, and runs first also on slower ranks."""

    def fill(made: Part) -> None:
        late = made.compute(100)
        made.collective(PAIR, 50, late)
        made.compute(200, made.collective(PAIR, 50))

    workload = Workload.spmd(program(fill), 2)
    assert run(workload).step_ns == 300
    twice = Workload(
        name="job", classes=(program(fill), program(fill)), rank_class=np.array([0, 1], np.int32)
    )
    assert run(twice).step_ns == 300
    slower = [run(workload, stragglers=((1, factor),)).step_ns for factor in (1.0001, 1.01, 2.0)]
    assert slower == pytest.approx([300.03, 303, 600])
    assert [span[0] for span in spans(run(workload, stragglers=((1, 2.0),)), 0)] == [0, 2, 1, 3]


def test_jitter_is_that_of_its_seed_and_keeps_the_mean() -> None:
    graph = program(lambda p: [p.compute(1000) for _ in range(200)])
    one, again, other = (
        run(Workload.spmd(graph, 3), jitter=0.2, seed=seed).timeline.finish_ns for seed in (1, 1, 2)
    )
    assert one.tolist() == again.tolist() != other.tolist()
    assert len(set(one.tolist())) == 3
    assert one == pytest.approx(np.full(3, 200_000), rel=0.1)
    totals = [run(Workload.spmd(graph, 1), jitter=0.2, seed=seed).step_ns for seed in range(40)]
    assert np.mean(totals) == pytest.approx(200_000, rel=0.01)
    assert np.std(totals) == pytest.approx(1000 * 0.2 * 200**0.5, rel=0.5)


@pytest.mark.parametrize(
    "options",
    [{"jitter": -1.0}, {"jitter": 11.0}, {"stragglers": ((0, 0.0),)}, {"stragglers": ((9, 2.0),)},
     {"protocol": "late"}, {"max_executions": 0}, {"starts": "never"}, {"differing": "mean"}],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        run(stages(before_a_collective(1, 1), [0, 1]), **options)


# --- ranks that would wait for ever


def never(workload: Workload, code: str, text: str, **options: Any) -> None:
    with pytest.raises(CheckFailedError, match=text) as refused:
        run(workload, **options)
    assert refused.value.code == code


def test_a_member_that_never_comes() -> None:
    graphs = [program(lambda p: p.collective(PAIR, 5)), program(lambda p: p.compute(1))]
    never(stages(graphs, [0, 1]), "ET020", "rank 0: collective0.*waits for rank 1, which runs none in their")


def test_a_member_that_comes_too_seldom() -> None:
    graphs = [
        program(lambda p: p.collective(PAIR, 5, p.collective(PAIR, 5))),
        program(lambda p: p.collective(PAIR, 5)),
    ]
    never(stages(graphs, [0, 1]), "ET020", "collective1.*waits for rank 1, which runs only 1 collectives")


def test_members_that_run_different_collectives() -> None:
    kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER)
    parts = [part(), part()]
    for made, kind in zip(parts, kinds, strict=True):
        made.collective(PAIR, 5, kind=kind)
    graphs = [made.built() for made in parts]
    never(
        stages(graphs, [0, 1]),
        "ET020",
        r"rank 0: .*all-reduce.* does not match rank 1: .*all-gather.*number 1 of",
    )


def test_collectives_of_two_groups_in_crossed_order() -> None:
    other = ExplicitGroups(((0, 1),), communicator=1)
    graphs = [
        program(lambda p: (p.collective(PAIR, 5), p.collective(other, 5))),
        program(lambda p: (p.collective(other, 5), p.collective(PAIR, 5))),
    ]
    never(
        stages(graphs, [0, 1]), "ET021",
        "2 of 2 ranks never finish; rank 0: collective0 waits for rank 1, which waits in collective0 before"
        " collective1",
    )  # fmt: skip


def test_a_message_that_nobody_sends() -> None:
    graphs = [program(lambda p: p.compute(1)), program(lambda p: p.message(NodeKind.RECV, FORWARD, 5))]
    never(stages(graphs, [0, 1]), "ET015", "rank 1: recv0 waits for rank 0, which sends no such message")


def test_a_message_that_nobody_receives_waits_in_rendezvous_only() -> None:
    graphs = [program(lambda p: p.message(NodeKind.SEND, FORWARD, 5, tag=3)), program(lambda p: p.compute(1))]
    workload = stages(graphs, [0, 1])
    never(workload, "ET015", "send0 waits for rank 1, which receives no such.*tag 3", protocol="rendezvous")
    found = Diagnostics()
    assert run(workload, found).step_ns == 5
    assert found.counts()["simulate.unreceived"] == 1


def test_sends_that_wait_for_each_other() -> None:
    back = Permutation.from_pairs([(1, 0)], 2)

    def both(p: Part, out: Permutation, home: Permutation) -> None:
        p.message(NodeKind.RECV, home, 5, p.message(NodeKind.SEND, out, 5))

    graphs = [program(lambda p: both(p, FORWARD, back)), program(lambda p: both(p, back, FORWARD))]
    assert run(stages(graphs, [0, 1])).step_ns == 5
    never(
        stages(graphs, [0, 1]), "ET021", "send0 waits for rank 1, which waits in send0", protocol="rendezvous"
    )


def test_too_many_ranks_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hespas.simulator.job.scheduler._MOST_TASKS", 20)
    graph = program(lambda p: p.collective(StridedGroups.all_ranks(8), 5, p.compute(1), p.compute(2)))
    with pytest.raises(UnsupportedError, match="8 ranks behave differently"):
        run(Workload.spmd(graph, 8), symmetry=False)


# --- recordings


def recorded(waits: float, takes: float) -> OpGraph:
    """A host that waits, then a collective."""
    made = part()
    made.collective(PAIR, takes, made.host_wait(waits))
    return made.built()


def test_ranks_begin_when_their_recordings_did() -> None:
    """Rank 1 began 4 ns later, came first, and waited 4 ns for rank 0, which its recorded time has in it."""
    graphs = [recorded(10, 5), recorded(2, 9)]
    found = Diagnostics()
    done = simulate(stages(graphs, [0, 1]), diagnostics=found)
    assert spans(done, 0) == [(0, 0, 10, 0), (1, 10, 15, 0)]
    assert spans(done, 1) == [(0, 4, 6, 0), (1, 6, 15, 4)]
    assert found.counts()["simulate.recorded-starts"] == 1
    together = run(stages(graphs, [0, 1]), starts="together")
    assert [row[:3] for row in spans(together, 1)] == [(0, 0, 2), (1, 2, 15)]


def test_recorded_collectives_beside_estimates_take_the_shortest_too() -> None:
    graphs = [before_a_collective(10, takes=5)[0], before_a_collective(4, takes=11)[0]]
    unsized = [
        replace(graph, collectives=replace(graph.collectives, comm_bytes=np.array([np.nan])))
        for graph in graphs
    ]
    workload = stages(unsized, [0, 1])
    estimates = api.estimate(workload, "H100-SXM").estimates
    done = simulate(workload, [*estimates])
    assert (done.step_ns, done.mixes_recorded_and_estimated) == (16, True)
