"""Collectives of several ranks are paired if kind, group, size and number are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

import hespas
from hespas.generators.random_dag import RandomJob
from hespas.graph import Severity
from hespas.graph.errors import CheckFailedError
from hespas.validators.checker import check_workload
from tests.converters.pytorch.traces import Json, host, kernel, launch, write_kineto

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SMALL, LARGE = 768, 85_000_000


def rank(folder: Path, number: int, elements: list[int], *, numbered: bool, kind: str = "allreduce") -> None:
    """A rank's all-reduces of f32, one after the other."""
    events: list[Json] = []
    for place, count in enumerate(elements):
        at_us = 100.0 * place
        facts: Json = {
            "Collective name": kind, "In msg nelems": count, "Out msg nelems": count, "dtype": "Float",
            "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
        }  # fmt: skip
        facts |= {"Seq": place} if numbered else {}
        events += [host("c10d::allreduce_", at_us, 9, place + 1), launch(at_us + 2, place)]
        events.append(kernel(NCCL, at_us + 20 + 5 * number, 50 - 5 * number, place, facts))
    job: Json = {"rank": number, "world_size": 2, "backend": "nccl"}
    write_kineto(folder / f"rank{number}.pt.trace.json", events, distributedInfo=job)


@pytest.mark.parametrize("numbered", [True, False])
def test_other_sizes_are_not_paired(numbered: bool, tmp_path: Path) -> None:
    rank(tmp_path, 0, [SMALL, LARGE, LARGE], numbered=numbered)
    rank(tmp_path, 1, [LARGE, SMALL, LARGE], numbered=numbered)
    done = hespas.analyze(tmp_path)
    assert done.diagnostics.counts()["analysis.unlike-collectives"] == 2
    paired = done.tables.collective_instances.rows()
    assert [row.size_bytes for row in paired] == ([4.0 * LARGE] if numbered else [])
    assert sum(row.instances for row in done.tables.stragglers.rows()) == (2 if numbered else 0)


def test_other_kinds_are_not_paired(tmp_path: Path) -> None:
    rank(tmp_path, 0, [SMALL], numbered=True)
    rank(tmp_path, 1, [SMALL], numbered=True, kind="_allgather_base")
    done = hespas.analyze(tmp_path)
    assert done.diagnostics.counts()["analysis.unlike-collectives"] == 1
    assert not len(done.tables.stragglers)


@pytest.mark.parametrize("numbered", [True, False])
def test_the_same_ones_are_paired(numbered: bool, tmp_path: Path) -> None:
    for number in range(2):
        rank(tmp_path, number, [SMALL, LARGE, SMALL], numbered=numbered)
    done = hespas.analyze(tmp_path)
    assert "analysis.unlike-collectives" not in done.diagnostics.counts()
    assert len(done.tables.collective_instances) == 3


def test_parts_of_an_exchange_may_differ(tmp_path: Path) -> None:
    rank(tmp_path, 0, [SMALL], numbered=True, kind="all_to_allv")
    rank(tmp_path, 1, [2 * SMALL], numbered=True, kind="all_to_allv")
    assert len(hespas.analyze(tmp_path).tables.collective_instances) == 1


@pytest.mark.parametrize("rule", ["sizes", "missing-collective", "order"])
@pytest.mark.parametrize("seed", [3, 4])
def test_what_the_checker_refuses_is_not_simulated(rule: str, seed: int) -> None:
    job = RandomJob(ranks=4, nodes=80, classes=2, collective_share=0.5, seed=seed, broken=rule)
    workload = hespas.generate(job).workload
    codes = {each.code for each in check_workload(workload).violations if each.severity is Severity.ERROR}
    with pytest.raises(CheckFailedError) as caught:
        hespas.simulate(workload, "H100-SXM")
    assert caught.value.code in codes
