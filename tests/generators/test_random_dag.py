"""Random jobs: valid, free of deadlocks, equal by seed, and broken exactly as requested."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hespas
from hespas.generators.random_dag import RULES, RandomJob
from hespas.graph import Severity, Workload
from hespas.graph.errors import UsageError


def errors(workload: Workload) -> list[str]:
    found = hespas.check(workload, profile="astra-sim").violations
    return [each.code for each in found if each.severity is Severity.ERROR]


@settings(max_examples=8)
@given(
    seed=st.integers(0, 1 << 30),
    classes=st.sampled_from([1, 2, 4]),
    nodes=st.integers(1, 60),
    width=st.integers(1, 12),
    shares=st.sampled_from([(0.2, 0.1), (0.5, 0.5), (0.0, 0.0), (1.0, 0.0)]),
)
def test_every_job_is_valid_and_runs(
    seed: int, classes: int, nodes: int, width: int, shares: tuple[float, float]
) -> None:
    job = RandomJob(
        ranks=8, nodes=nodes, seed=seed, classes=classes, width=width, collective_share=shares[0],
        p2p_share=shares[1],
    )  # fmt: skip
    workload = job.workload()
    assert errors(workload) == []
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns >= 0
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100", mode="astra").step_ns >= 0


def test_equal_seeds_write_equal_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        hespas.write(
            RandomJob(ranks=4, nodes=50, seed=seed, classes=2).workload(), tmp_path / name, format="chakra"
        )
    a, b, c = (
        [each.read_bytes() for each in sorted((tmp_path / name).glob("*.et"))] for name in ("a", "b", "c")
    )
    assert len(a) == 4
    assert a == b
    assert a != c


CODES = {
    "cycle": "ET007",
    "sizes": "ET020",
    "missing-receive": "ET015",
    "missing-collective": "ET020",
    "order": "ET020",
}


def test_every_rule_has_its_code() -> None:
    assert CODES.keys() == set(RULES)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_check_finds_the_one_violation(rule: str, seed: int) -> None:
    job = RandomJob(ranks=8, nodes=40, seed=seed, classes=2, broken=rule)
    assert set(errors(job.workload())) == {CODES[rule]}


@pytest.mark.parametrize(
    "job",
    [
        RandomJob(ranks=8, nodes=10, classes=3),
        RandomJob(ranks=1, nodes=10),
        RandomJob(ranks=8, nodes=10, collective_share=0.8, p2p_share=0.5),
        RandomJob(ranks=8, nodes=10, broken="everything"),
        RandomJob(ranks=8, nodes=10, broken="sizes"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(job: RandomJob) -> None:
    with pytest.raises(UsageError):
        job.workload()
