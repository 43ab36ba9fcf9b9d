"""Equivalent ranks have equal results, so that one check of each kind suffices."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings

from hespas.graph import ExplicitGroups, GroupSet, NodeKind, Permutation, Severity, Workload
from hespas.simulator.symmetry import RankKinds, Relations, behave_alike, indistinguishable, relations_of
from hespas.validators.checker import check_workload, rank_equivalence
from tests.simulator.job.small_jobs import jobs
from tests.validators.checker.small_jobs import Steps

MESSAGES = (NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)


def _refines(finer: list[int], coarser: list[int]) -> bool:
    """Return True if ranks that are equal in the first partition are equal in the second."""
    return len(set(zip(finer, coarser, strict=True))) == len(set(finer))


def careless_job(seed: int) -> Workload:
    """A job whose ranks often call different groups and send messages that nobody receives."""
    random = Random(seed)
    ranks, classes = random.choice((2, 3, 4, 6, 8)), random.randint(1, 3)
    groups: list[GroupSet] = []
    for _ in range(3):
        members = random.sample(range(ranks), ranks)
        cuts = sorted({0, ranks, *random.choices(range(ranks), k=random.randint(0, 2))})
        groups.append(ExplicitGroups.from_rows([members[start:end] for start, end in pairwise(cuts)]))
    permutations: list[Permutation] = []
    for _ in range(3):
        step, wraps = random.randint(1, ranks - 1), random.random() < 0.5
        pairs = [(rank, (rank + step) % ranks) for rank in range(ranks) if wraps or rank + step < ranks]
        permutations.append(
            Permutation(ranks, pairs=tuple(random.sample(pairs, random.randint(1, len(pairs)))))
        )
    programs: list[Steps] = []
    for _ in range(classes):
        steps = Steps(ranks)
        for _ in range(random.randint(1, 4)):
            if random.random() < 0.5:
                steps.coll(groups=random.choice([*groups, None]))
            else:
                steps.message(random.choice(MESSAGES), [], random.choice(permutations))
        programs.append(steps)
    rank_class = np.array([random.randrange(classes) for _ in range(ranks)], np.int32)
    return Workload(name="job", classes=tuple(steps.build() for steps in programs), rank_class=rank_class)


@settings(max_examples=60)
@given(jobs())
def test_indistinguishable_ranks_behave_alike(workload: Workload) -> None:
    relations = relations_of(workload)
    kinds = indistinguishable(relations).kind.tolist()
    for both_ways in (False, True):
        alike = behave_alike(relations, relations.rank_class, both_ways=both_ways)
        assert _refines(kinds, alike.behaviour.tolist())


def _every_rank(relations: Relations) -> RankKinds:
    words = np.arange(len(relations.members), dtype=np.uint64)
    return RankKinds(np.arange(relations.num_ranks, dtype=np.int64), words)


@pytest.mark.parametrize("seeds", [range(first, first + 40) for first in range(0, 200, 40)])
def test_checking_one_rank_of_each_kind_finds_what_checking_all_finds(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        workload = careless_job(seed)
        found: list[set[tuple[str, Severity]]] = []
        for kinds_of in (indistinguishable, _every_rank):
            monkeypatch.setattr(rank_equivalence, "indistinguishable", kinds_of)
            result = check_workload(workload)
            found.append({(violation.code, violation.severity) for violation in result.violations})
        assert found[0] == found[1], seed
