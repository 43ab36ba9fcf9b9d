"""Programs drawn from learned windows of a job: valid on all ranks, new, equal by seed, free of names."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import hespas
from hespas.generators.llm import Layout, Training
from hespas.generators.synth.programs import LearnedPrograms, Learner
from hespas.graph import Workload
from hespas.graph.errors import UnsupportedError
from hespas.validators.privacy.library import training_step


@cache
def source() -> Workload:
    """Return a step on 8 ranks with times on an H100: 823 operations."""
    return training_step("Llama-3.2-1B", Layout(dp=4, tp=2), Training(seq=512, global_batch=8))


@pytest.mark.parametrize("learner", ["n-gram", "transformer"])
def test_jobs_are_valid_new_and_have_no_names(learner: Learner) -> None:
    made = LearnedPrograms(source(), learner).workload(seed=3)
    assert hespas.check(made, profile="astra-sim").counts == {}
    assert hespas.simulate(made).step_ns > 0
    (before,), (after,) = source().classes, made.classes
    assert abs(len(after) / len(before) - 1) < 0.2
    assert not after.data_deps.equals(before.data_deps)
    assert not set(after.strings) & set(before.strings) - {""}
    assert set(after.collectives.kind.tolist()) <= set(before.collectives.kind.tolist())


def test_equal_seeds_make_equal_jobs() -> None:
    programs = LearnedPrograms(source(), "n-gram")
    one, same, other = (programs.workload(seed=seed).classes[0] for seed in (1, 1, 2))
    assert one.data_deps.equals(same.data_deps)
    np.testing.assert_array_equal(one.flops, same.flops)
    assert not (len(one) == len(other) and one.data_deps.equals(other.data_deps))


def test_wanted_sizes_are_met() -> None:
    made = LearnedPrograms(source(), "n-gram").workload(nodes=6000, seed=1)
    assert abs(len(made.classes[0]) / 6000 - 1) < 0.1
    assert hespas.check(made, profile="astra-sim").valid


def test_jobs_that_cannot_be_learned() -> None:
    pipeline = training_step("Llama-3.2-1B", Layout(pp=2), Training(seq=512, global_batch=2))
    with pytest.raises(UnsupportedError, match="different programs"):
        LearnedPrograms(pipeline, "n-gram")
    short = hespas.dlrm_step(ranks=8).workload()
    with pytest.raises(UnsupportedError, match="46 operations, too few"):
        LearnedPrograms(short, "n-gram")
