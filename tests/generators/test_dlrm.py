"""Recommendation models: closed forms, payloads of each sharding, checks and simulators."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

import hespas
from hespas.generators.dlrm import DlrmStep, Sharding
from hespas.graph import CollectiveKind
from hespas.graph.errors import UsageError

STEP = DlrmStep(ranks=4, batch=64, tables=8, rows=1000, width=16, lookups=4, bottom=(13, 32), top=(64,))
SAMPLES = 64 * 4
POOLED = 64 * 8 * 16 * 4
INDICES = 64 * 8 * 4 * 8
DENSE = 4 * (14 * 32 + 33 * 16 + (36 + 16 + 1) * 64 + 65)


@pytest.mark.parametrize("sharding", get_args(Sharding))
def test_products_are_those_of_the_closed_form(sharding: Sharding) -> None:
    graph = replace(STEP, sharding=sharding).workload().classes[0]
    layers = 13 * 32 + 32 * 16 + 52 * 64 + 64
    expected = SAMPLES * (6 * layers - 2 * 13 * 32 + 6 * 9 * 9 * 16)
    assert graph.contractions.flops.sum() * 4 == expected
    assert STEP.account().model_flops_per_step == expected
    assert STEP.account().parameters == 8 * 1000 * 16 + DENSE / 4


@pytest.mark.parametrize(
    ("sharding", "kinds", "payloads"),
    [
        ("table", "ALL_TO_ALL ALL_TO_ALL ALL_TO_ALL", [INDICES, POOLED, POOLED]),
        ("row", "ALL_TO_ALL REDUCE_SCATTER ALL_GATHER", [INDICES, 4 * POOLED, POOLED]),
        ("column", "ALL_GATHER ALL_TO_ALL ALL_TO_ALL", [INDICES, POOLED, POOLED]),
    ],
)
def test_payloads_are_those_of_the_sharding(sharding: Sharding, kinds: str, payloads: list[int]) -> None:
    table = replace(STEP, sharding=sharding).workload().classes[0].collectives
    found = [CollectiveKind(each).name for each in table.kind.tolist()]
    assert found == [*kinds.split(), "ALL_REDUCE"]
    assert table.comm_bytes.tolist() == [*payloads, DENSE]


@pytest.mark.parametrize("sharding", get_args(Sharding))
def test_steps_are_valid_and_run(sharding: Sharding) -> None:
    workload = replace(STEP, sharding=sharding).workload()
    assert hespas.check(workload, profile="astra-sim").valid
    assert np.isfinite(hespas.estimate(workload, "H100-SXM").to_pandas()["duration_ns"]).all()
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns > 0
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100", mode="astra").step_ns > 0


def test_tables_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be divided"):
        replace(STEP, tables=6).workload()
