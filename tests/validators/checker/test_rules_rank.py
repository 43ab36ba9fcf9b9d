"""Rules across ranks: groups, sequences, messages, deadlocks; broken inputs and near misses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph import (
    CollectiveKind,
    ExplicitGroups,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    Permutation,
    RaggedArray,
    RegionKind,
    StridedGroups,
    Workload,
)
from hespas.validators.checker import CheckOptions, Profile, check_workload
from tests.validators.checker.small_jobs import Steps, job_of

PAIR = [[0, 1]]


def found(job: Workload, profile: Profile | None = None) -> dict[str, str]:
    """Code -> severity and message of its first finding."""
    result = check_workload(job, profile)
    first: dict[str, str] = {}
    for violation in result.violations:
        first.setdefault(violation.code, f"{violation.severity.value}: {violation.message}")
    return first


def pair_of(*sizes: tuple[float, ...]) -> Workload:
    """Ranks that issue chained all-reduces of these sizes over one group of everybody."""
    ranks = [Steps(len(sizes)) for _ in sizes]
    for steps, wanted in zip(ranks, sizes, strict=True):
        last = steps.compute()
        for size in wanted:
            last = steps.coll(last, size=size, groups=[list(range(len(sizes)))])
    return job_of(*ranks)


# ET020: one sequence per group


def test_et020_equal_sequences_pass() -> None:
    assert found(pair_of((8, 16), (8, 16)), "astra-sim") == {}


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        ((8, 16), (16, 8), "collective 0 is all-reduce of 8 bytes (node 1) on rank 0 but all-reduce of 16"),
        ((8, 16), (8,), "collective 1 is all-reduce of 16 bytes (node 2) on rank 0 but missing on rank 1"),
        ((8,), (8, 16), "collective 1 is missing on rank 0 but all-reduce of 16 bytes (node 2) on rank 1"),
        ((8,), (12,), "all-reduce of 8 bytes (node 1) on rank 0 but all-reduce of 12 bytes"),
        ((8,), (), "but missing on rank 1"),
        ((8,), (float("inf"),), "but all-reduce of inf bytes (node 1) on rank 1"),
    ],
)
def test_et020_different_sequences(left: tuple[float, ...], right: tuple[float, ...], text: str) -> None:
    assert text in found(pair_of(left, right))["ET020"]
    assert "group [0, 1]" in found(pair_of(left, right))["ET020"]


def test_et020_different_kinds() -> None:
    left, right = Steps(), Steps()
    left.coll(left.compute(), groups=PAIR)
    right.coll(right.compute(), groups=PAIR, kind=CollectiveKind.REDUCE_SCATTER)
    assert "all-reduce of 1,024" in found(job_of(left, right))["ET020"]


def test_et020_groups_compare_their_own_members_only() -> None:
    """Two groups may do different things, and two group sets may share one group."""
    ranks = [Steps(4) for _ in range(4)]
    for number, steps in enumerate(ranks):
        groups = [[0, 1], [2, 3]] if number % 2 else [[0, 1], [3, 2]]
        steps.coll(steps.compute(), groups=groups, size=8 if number < 2 else 16)
    assert found(job_of(*ranks), "astra-sim") == {}


def test_et020_loop_equals_its_unrolled_form() -> None:
    left, right = Steps(), Steps()
    row = left.builder.add_region(RegionKind.LOOP_BODY, parent=-1, trips=3.0, label="while")
    last = left.compute()
    b = left.builder
    node = b.add_node(name_id=0, op_id=0, op_class=23, kind=NodeKind.COLLECTIVE, data_deps=[last], region=row)
    b.add_collective(
        node, CollectiveKind.ALL_REDUCE, group_set=b.group_set(ExplicitGroups.from_rows(PAIR)), comm_bytes=8
    )
    last = right.compute()
    for _ in range(3):
        last = right.coll(last, groups=PAIR, size=8)
    assert "ET020" not in found(job_of(left, right))
    right.coll(last, groups=PAIR, size=8)
    assert "ET020" in found(job_of(left, right))


def racing(groups: list[list[int]]) -> Steps:
    """Two independent collectives; the one with the later id is ready first by the durations stated."""
    steps = Steps(3)
    slow = steps.compute(ns=500, host=True)
    fast = steps.compute(steps.compute(ns=5), ns=5)
    steps.coll(slow, groups=PAIR, size=8)
    steps.coll(fast, groups=groups, size=16)
    return steps


def test_et020_order_that_hangs_on_timing_is_a_warning() -> None:
    """By id both ranks issue the same; by the durations stated rank 1 has the other one ready first."""
    left = Steps()
    left.coll(left.coll(left.compute(), groups=PAIR, size=8), groups=PAIR, size=16)
    right = racing(PAIR)
    problems = found(job_of(left, right))
    assert problems["ET020"].startswith("warning")
    assert "in one of the orders that timing allows" in problems["ET020"]


# ET019: legal groups


@pytest.mark.parametrize(
    ("groups", "word"),
    [
        ([[0, 5]], "names rank 5"),
        ([[0, -1]], "names rank -1"),
        ([[0, 0, 1]], "listed twice"),
        ([[0, 1], [1]], "listed twice"),
        ([[0, 1], []], "empty"),
        (StridedGroups.all_ranks(4), "names rank 3"),
    ],
)
def test_et019_illegal_lists(groups: GroupSet | list[list[int]], word: str) -> None:
    steps = Steps()
    steps.coll(steps.compute(), groups=groups)
    assert word in found(Workload.spmd(steps.build(), 2))["ET019"]


def test_et019_issuer_is_a_member() -> None:
    steps = Steps()
    steps.coll(steps.compute(), groups=[[0, 1], [2, 3]])
    assert "ET019" not in found(Workload.spmd(steps.build(), 4), "chakra")
    problems = found(Workload.spmd(steps.build(), 6), "chakra")
    assert problems["ET019"].startswith("error")
    assert "2 ranks that issue it are not members of its groups, such as [4, 5]" in problems["ET019"]
    assert found(Workload.spmd(steps.build(), 6))["ET019"].startswith("warning")


def test_et019_groups_of_one() -> None:
    steps = Steps()
    steps.coll(steps.compute(), groups=[[0], [1]])
    job = Workload.spmd(steps.build(), 2)
    assert "ET019" not in found(job)
    assert found(job, "chakra")["ET019"].startswith("warning")
    assert found(job, "astra-sim")["ET019"].startswith("error")


# ET015: matched messages


def pipeline(**broken: float) -> Workload:
    """A chain of ranks; ``size`` or ``tag`` change what the last one expects."""
    ranks = 3
    all_steps = [Steps(ranks) for _ in range(ranks)]
    for rank, steps in enumerate(all_steps):
        last = rank == ranks - 1
        size = broken.get("size", 64.0) if last else 64.0
        tag = int(broken.get("tag", 7)) if last else 7
        deps = [steps.recv(rank - 1, rank, size=size, tag=tag)] if rank else []
        node = steps.compute(*deps)
        if rank + 1 < ranks:
            steps.send(rank, rank + 1, node, tag=7)
    return job_of(*all_steps)


def test_et015_matched_pipeline() -> None:
    assert found(pipeline(), "astra-sim") == {}


@pytest.mark.parametrize(
    ("broken", "text"),
    [({"size": 128.0}, "has a message with tag 7 of 128 bytes instead"), ({"tag": 8}, "has none to match")],
)
def test_et015_mismatch(broken: dict[str, float], text: str) -> None:
    result = check_workload(pipeline(**broken), "chakra")
    errors = [v for v in result.violations if v.code == "ET015"]
    assert [(v.rank, v.node) for v in errors] == [(1, 2), (2, 0)]
    assert text in errors[0].message
    assert "ET021" not in result.counts, "who waits for nothing is told by ET015"


def test_et015_tags_wrap_like_astra_sims() -> None:
    assert "ET015" not in found(pipeline(tag=500_000_007), "astra-sim")


def test_et015_counts() -> None:
    def double(receives: int) -> Workload:
        left, right = Steps(), Steps()
        for _ in range(2):
            left.send(0, 1, *([len(left.builder) - 1] if len(left.builder) else []))
        for _ in range(receives):
            right.recv(0, 1)
        right.compute(0)
        return job_of(left, right)

    assert "ET015" not in found(double(2))
    assert "rank 0 sends 1 x" in found(double(1))["ET015"]
    assert "rank 1 expects 1 x" in found(double(3))["ET015"]


def test_et015_symbolic_ring_of_many_ranks() -> None:
    def ring(ranks: int, tag: int) -> Workload:
        steps = Steps(ranks)
        peers = Permutation(ranks, (ranks, 1), 1)
        node = steps.compute()
        steps.message(NodeKind.SEND, [node], peers, tag=1)
        steps.message(NodeKind.RECV, [node], peers, tag=tag)
        return Workload.spmd(steps.build(), ranks)

    assert found(ring(65_536, 1), "astra-sim") == {}
    assert "ET015" in found(ring(65_536, 2))


def test_et015_permute_is_both_sides_at_once() -> None:
    steps = Steps(4)
    steps.message(NodeKind.PERMUTE, [steps.compute()], Permutation(4, (4, 1), 1, wraps=False))
    assert found(Workload.spmd(steps.build(), 4)) == {}


def test_et015_permute_that_only_some_ranks_run() -> None:
    peers = Permutation(2, (2, 1), 1)
    left, right = Steps(), Steps()
    left.message(NodeKind.PERMUTE, [left.compute()], peers)
    right.compute()
    assert "a permute" in found(job_of(left, right))["ET015"]


# ET021: deadlocks


def crossed() -> Workload:
    """Two groups of the same ranks in opposite orders."""
    left, right = Steps(), Steps()
    one, other = [[0, 1]], [[1, 0, 2]]
    for steps, (first, second) in ((left, (one, other)), (right, (other, one))):
        steps.coll(steps.coll(steps.compute(), groups=first), groups=second)
    third = Steps()
    third.coll(third.compute(), groups=other)
    return job_of(left, right, third)


def test_et021_order_inversion_between_groups() -> None:
    text = found(crossed())["ET021"]
    assert text.startswith("error")
    assert "rank 0 in node 1 (all-reduce over [0, 1]) waits for rank 1" in text
    assert "rank 1 in node 1 (all-reduce over [1, 0, 2]) waits for rank 0" in text
    assert "3 ranks never finish" in text


def test_et021_same_order_is_fine() -> None:
    left, right = Steps(), Steps()
    for steps in (left, right):
        steps.coll(steps.coll(steps.compute(), groups=[[0, 1]]), groups=[[0, 1, 2]])
    third = Steps()
    third.coll(third.compute(), groups=[[0, 1, 2]])
    assert found(job_of(left, right, third), "chakra") == {}


def test_et021_receive_before_send_in_a_ring() -> None:
    def ring(*, first_sends: bool) -> Workload:
        ranks = [Steps(3) for _ in range(3)]
        for rank, steps in enumerate(ranks):
            before, after = (rank - 1) % 3, (rank + 1) % 3
            if first_sends and rank == 0:
                steps.recv(before, rank, steps.send(rank, after))
            else:
                steps.send(rank, after, steps.recv(before, rank))
        return job_of(*ranks)

    assert "waits for the first" in found(ring(first_sends=False))["ET021"]
    assert found(ring(first_sends=True)) == {}


def test_et021_symbolic_ring_at_scale() -> None:
    def ring(*, wraps: bool) -> Workload:
        ranks = 64
        steps = Steps(ranks)
        peers = Permutation(ranks, (ranks, 1), 1, wraps)
        received = steps.message(NodeKind.RECV, [], peers)
        steps.message(NodeKind.SEND, [steps.compute(received)], peers)
        return Workload.spmd(steps.build(), ranks)

    assert "ET021" in found(ring(wraps=True))
    assert found(ring(wraps=False)) == {}


def test_et021_collective_behind_a_message_that_comes_too_late() -> None:
    """Rank 0 sends only after a collective that rank 1 joins only after receiving."""
    left, right = Steps(), Steps()
    left.send(0, 1, left.coll(left.compute(), groups=PAIR))
    right.coll(right.recv(0, 1), groups=PAIR)
    text = found(job_of(left, right))["ET021"]
    assert "(all-reduce over [0, 1]) waits for rank 1" in text
    assert "(recv) waits for rank 0" in text


def test_et021_deadlock_in_one_timing_only_is_a_warning() -> None:
    """Rank 1 takes its collectives in the other order only when its computations take what they state."""
    all_three = [[0, 1, 2]]
    left, right, third = Steps(3), racing(all_three), Steps(3)
    left.coll(left.coll(left.compute(), groups=PAIR, size=8), groups=all_three, size=16)
    third.coll(third.compute(), groups=all_three, size=16)
    problem = found(job_of(left, right, third))["ET021"]
    assert problem.startswith("warning")
    assert "if timing leads" in problem


def test_et021_contradiction_that_waiting_hides_is_a_warning() -> None:
    """Rank 1 would take its collectives in the other order if it did not wait for rank 2 first."""
    all_three = [[0, 1, 2]]
    left, right, third = Steps(3), Steps(3), Steps(3)
    left.coll(left.coll(left.compute(), groups=PAIR), groups=all_three)
    right.coll(groups=[[1, 2]])
    soon, late = right.compute(ns=10), right.compute(ns=500)
    right.coll(late, groups=PAIR)
    right.coll(soon, groups=all_three)
    third.coll(third.coll(third.compute(ns=5000), groups=[[1, 2]]), groups=all_three)
    problem = found(job_of(left, right, third))["ET021"]
    assert problem.startswith("warning")
    assert "contradict each other" in problem


def test_et021_missing_rank_is_left_to_et019_and_et020() -> None:
    problems = found(pair_of((8,), ()))
    assert "ET020" in problems
    assert "ET021" not in problems


def test_et021_cycle_in_a_graph_is_left_to_et007() -> None:
    job = pair_of((8,), (8,))
    broken = replace(job.classes[0], data_deps=RaggedArray.from_lists([[1], [0]]))
    problems = found(replace(job, classes=(broken, job.classes[1])))
    assert "ET007" in problems
    assert "ET021" not in problems


def test_et021_says_when_it_was_not_tried() -> None:
    result = check_workload(crossed(), options=CheckOptions(replay_limit=3))
    assert "ET021" not in result.counts
    assert [d.code for d in result.diagnostics] == ["ET021"]


def test_branch_that_is_not_taken_takes_part_in_nothing() -> None:
    job = pair_of((8, 16), (8,))
    skipped = replace(job.classes[0], executions=np.array([1.0, 1.0, 0.0]))
    assert found(replace(job, classes=(skipped, job.classes[1]))) == {}


# ET029: streams before world collectives


def test_et029_streams_before_world_collectives() -> None:
    def uneven(*, everybody: bool) -> Workload:
        ranks = [Steps(4) for _ in range(4)]
        for number, steps in enumerate(ranks):
            last = steps.compute()
            if number < 2 or everybody:
                last = steps.coll(last, groups=[[0, 1], [2, 3]] if everybody else PAIR)
            steps.coll(last)
        return job_of(*ranks)

    problems = found(uneven(everybody=False), "astra-sim")
    assert problems.keys() == {"ET029"}
    assert problems["ET029"].startswith("error: before world collective 0, rank 0 has created 1")
    assert found(uneven(everybody=False), "chakra") == {}
    assert found(uneven(everybody=True), "astra-sim") == {}


# ET018 and ET028: group names


def named(name: str) -> Workload:
    steps = Steps()
    node = steps.coll(steps.compute(), groups=PAIR)
    steps.builder.add_extra(node, "pg_name", 29, name.encode())
    return Workload.spmd(steps.build(), 2)


def test_et018_and_et028_group_names() -> None:
    for name in ("", "0", "1", "499"):
        assert found(named(name), "astra-sim") == {}
    assert found(named("default_pg"), "astra-sim")["ET018"].startswith("error")
    assert found(named("default_pg"), "chakra")["ET018"].startswith("warning")
    assert found(named("2147"), "astra-sim") == {}
    assert "ET028" in found(named("2148"), "astra-sim")


def test_et028_ids_that_share_tags() -> None:
    def two(second: str) -> Workload:
        steps = Steps()
        for name in ("3", second):
            node = steps.coll(steps.compute(), groups=PAIR)
            steps.builder.add_extra(node, "pg_name", 29, name.encode())
        return Workload.spmd(steps.build(), 2)

    assert "3 and 503 are equal modulo 500" in found(two("503"), "astra-sim")["ET028"]
    assert "ET028" not in found(two("504"), "astra-sim")


# Scale


def test_large_spmd_job_costs_what_one_rank_costs() -> None:
    steps = Steps(65_536)
    last = steps.compute()
    for axis in range(3):
        last = steps.coll(last, groups=StridedGroups.from_mesh((64, 32, 32), (axis,)))
    assert found(Workload.spmd(steps.build(), 65_536), "astra-sim") == {}


def stages(ranks: int, width: int, *, swap: bool = False) -> Workload:
    """A pipeline of ``ranks / width`` stages: one class each, data-parallel groups inside a stage."""
    depth = ranks // width
    forward = Permutation(ranks, (depth, width), 1, wraps=False)
    groups = StridedGroups.from_mesh((depth, width), (1,))
    classes = list[Steps]()
    for stage in range(depth):
        steps = Steps(ranks)
        last = steps.message(NodeKind.RECV, [], forward) if stage else steps.compute()
        if stage + 1 < depth:
            steps.message(NodeKind.SEND, [last], forward)
        sizes = (16, 8) if swap and stage == 1 else (8, 16)
        for size in sizes:
            last = steps.coll(last, groups=groups, size=size)
        classes.append(steps)
    return Workload(
        name="stages",
        classes=tuple(steps.build() for steps in classes),
        rank_class=np.arange(ranks, dtype=np.int32) // width,
    )


def test_pipeline_of_many_ranks_is_checked_by_its_stages() -> None:
    assert found(stages(16_384, 2048), "astra-sim") == {}
    assert found(stages(16_384, 2048, swap=True), "astra-sim") == {}, "a stage may have its own order"


@st.composite
def jobs(draw: st.DrawFn) -> Workload:
    """Small jobs of few classes with groups and shifts, right and wrong."""
    ranks = draw(st.sampled_from([2, 4, 6]))
    group_sets: list[GroupSet] = [
        StridedGroups.all_ranks(ranks),
        StridedGroups.from_mesh((2, ranks // 2), (0,)),
        StridedGroups.from_mesh((2, ranks // 2), (1,)),
        ExplicitGroups.from_rows([list(range(ranks - 1)), [ranks - 1]]),
    ]
    peers = [Permutation(ranks, (ranks, 1), 1), Permutation(ranks, (ranks, 1), 1, False)]
    peers += [Permutation(ranks, (ranks, 1), -1), Permutation(ranks, pairs=((0, ranks - 1),))]
    classes: list[Steps] = []
    for _ in range(draw(st.integers(1, 2))):
        steps = Steps(ranks)
        for place in range(draw(st.integers(1, 5))):
            deps = draw(st.lists(st.integers(0, place - 1), max_size=2, unique=True)) if place else []
            what = draw(st.sampled_from(["compute", "coll", "send", "recv", "permute"]))
            if what == "compute":
                steps.compute(*deps, ns=draw(st.sampled_from([1.0, 50.0])))
            elif what == "coll":
                steps.coll(
                    *deps, groups=draw(st.sampled_from(group_sets)), size=draw(st.sampled_from([8, 9]))
                )
            else:
                steps.message(NodeKind[what.upper()], deps, draw(st.sampled_from(peers)))
        classes.append(steps)
    members = draw(st.lists(st.integers(0, len(classes) - 1), min_size=ranks, max_size=ranks))
    return Workload(
        name="any", classes=tuple(steps.build() for steps in classes), rank_class=np.array(members, np.int32)
    )


def told_apart(job: Workload) -> Workload:
    """The same job with a class per rank, so that no two ranks are merged."""
    classes = tuple(job.graph_of(rank) for rank in range(job.num_ranks))
    return replace(job, classes=classes, rank_class=np.arange(job.num_ranks, dtype=np.int32))


@settings(max_examples=25)
@given(jobs())
def test_merged_ranks_give_the_verdict_of_ranks_one_by_one(job: Workload) -> None:
    rules = ("ET015", "ET020", "ET021", "ET029")
    merged, apart = (check_workload(entry, "astra-sim") for entry in (job, told_apart(job)))
    for rule in rules:
        levels = [
            {violation.severity for violation in result.violations if violation.code == rule}
            for result in (merged, apart)
        ]
        assert levels[0] == levels[1], rule


def test_a_set_without_groups_is_told_and_no_fault_of_ours() -> None:
    builder = GraphBuilder("g")
    empty = builder.group_set(ExplicitGroups(()))
    row = builder.strings.add("reduce")
    node = builder.add_node(name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE)
    builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=empty, comm_bytes=8)
    found = check_workload(Workload.spmd(builder.build(), 2))
    assert "ET019" in {each.code for each in found.violations}


def test_a_finding_names_the_rank_that_is_at_fault() -> None:
    steps = Steps(4)
    steps.coll(steps.compute(), groups=[[0, 1], [2]])
    found = check_workload(Workload.spmd(steps.build(), 4)).violations
    told = [entry for entry in found if "not members of its groups" in entry.message]
    assert [entry.rank for entry in told] == [3]
    assert "other ranks of its class" not in told[0].message
