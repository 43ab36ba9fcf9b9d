"""Predicted sizes of traces equal the written sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.converters.chakra.from_graph import TraceLowering
from hespas.converters.chakra.sizes import trace_bytes
from hespas.generators.collectives import CollectiveBenchmark
from hespas.generators.dlrm import DlrmStep
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.serving import ServingStep
from hespas.generators.llm.settings import Overlap, precision_of
from hespas.generators.random_dag import RandomJob
from hespas.generators.spec import Generator
from hespas.graph import OpGraph, Workload
from tests.generators.llm.small_models import DENSE, HYBRID, MIXTURE, step

TRAINED = {
    "one": step(DENSE, Layout()),
    "loops": step(DENSE, Layout(dp=2, zero=3), global_batch=64),
    "pipeline": step(DENSE, Layout(dp=2, tp=2, pp=4), global_batch=32),
    "interleaved": step(DENSE, Layout(pp=2, vp=2, dp=2), global_batch=64, schedule="interleaved"),
    "experts": step(MIXTURE, Layout(dp=4, ep=4, tp=2, zero=3), precision=precision_of("fp8")),
    "hybrid": step(HYBRID, Layout(dp=2, pp=2), schedule="zero-bubble"),
    "rings": step(DENSE, Layout(tp=4, cp=2, ring_attention=True), overlap=Overlap(tensor=True)),
    "many": step(DENSE, Layout(dp=160), global_batch=160),
    "tags": step(DENSE, Layout(tp=8, pp=2), global_batch=64, overlap=Overlap(tensor=True)),
}
OTHERS: dict[str, Generator] = {
    "serving": ServingStep(model=MIXTURE, layout=Layout(tp=2, ep=2, dp=2), phase="disaggregated"),
    "collectives": CollectiveBenchmark(
        kinds=("all_reduce", "ping_pong", "permute"), sizes=(8, 9000), ranks=5
    ),
    "dlrm": DlrmStep(ranks=4),
    "random": RandomJob(ranks=12, nodes=400, classes=3, seed=5),
}
JOBS = TRAINED | {name: each.workload() for name, each in OTHERS.items()}


def written(workload: Workload, folder: Path) -> int:
    """Bytes of the files of all ranks."""
    hespas.write(workload, folder, format="chakra")
    return sum(each.stat().st_size for each in ([folder] if folder.is_file() else folder.glob("*.et")))


@pytest.mark.parametrize("name", JOBS)
def test_counted_is_written(name: str, tmp_path: Path) -> None:
    assert trace_bytes(JOBS[name]) == written(JOBS[name], tmp_path / "traces")


def test_repetitions_are_not_encoded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Thousands of nodes are of a few hundred kinds, and none of them is encoded but one of each."""
    lowered: list[int] = []

    def counted(graph: OpGraph) -> TraceLowering:
        lowered.append(len(graph))
        return TraceLowering(graph)

    monkeypatch.setattr("hespas.converters.chakra.sizes.TraceLowering", counted)
    job = step(DENSE, Layout(dp=2, pp=2), global_batch=256)
    assert trace_bytes(job) == written(job, tmp_path / "traces")
    assert min(len(graph) for graph in job.classes) > 10_000
    assert max(lowered) < 500


def test_times_and_kept_attributes_are_counted_too(tmp_path: Path) -> None:
    """Of such traces every frame depends on those before it, or on what a file said."""
    (graph,) = TRAINED["one"].classes
    timed = replace(graph, duration_ns=np.linspace(0.0, 3e5, len(graph)))
    job = Workload.spmd(timed, 3)
    assert trace_bytes(job) == written(job, tmp_path / "timed")
    again = hespas.read(tmp_path / "timed")
    assert isinstance(again, Workload)
    assert trace_bytes(again) == written(again, tmp_path / "again")
