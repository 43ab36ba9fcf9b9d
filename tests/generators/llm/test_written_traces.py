"""Traces of a generated job have as many operations as the run, and the same time as its graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.api import GenerationResult
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Model
from hespas.graph import CollectiveKind, Diagnostics, Workload
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import UnrollLoops, totals
from tests.generators.llm.small_models import DENSE, MIXTURE, step

SHORT = replace(DENSE, layers=DENSE.layers[:2])
EXPERTS = replace(MIXTURE, layers=MIXTURE.layers[:2])
JOBS: dict[str, tuple[Model, Layout, int]] = {
    "one device": (SHORT, Layout(), 7),
    "tensor": (SHORT, Layout(tp=4), 8),
    "fsdp": (SHORT, Layout(dp=4, zero=3), 24),
    "tensor of 3 beyond a node": (SHORT, Layout(dp=4, tp=4, zero=2), 40),
    "pipeline beyond a node": (SHORT, Layout(dp=2, tp=4, pp=2), 8),
    "virtual stages": (DENSE, Layout(pp=2, vp=2), 8),
    "context": (SHORT, Layout(cp=2, dp=2), 12),
    "ring": (SHORT, Layout(cp=4, ring_attention=True), 6),
    "experts": (EXPERTS, Layout(dp=4, ep=4), 24),
}


def written(workload: Workload, path: Path) -> Workload:
    hespas.write(workload, path)
    again = hespas.read(path)
    assert isinstance(again, Workload)
    return again


def sums(workload: Workload) -> dict[str, float]:
    found: dict[str, float] = {
        "flops": 0.0, "bytes_moved": 0.0, "collectives": 0.0, "collective_bytes": 0.0,
    }  # fmt: skip
    for graph, count in zip(workload.classes, workload.class_sizes, strict=True):
        of_one = totals(graph)
        for name in found:
            found[name] += count * float(getattr(of_one, name))
    return found


@pytest.mark.parametrize("name", JOBS)
def test_traces_are_the_graph(name: str, tmp_path: Path) -> None:
    model, layout, batch = JOBS[name]
    job = step(model, layout, global_batch=batch)
    traced = written(job, tmp_path / "job")
    assert sums(traced) == pytest.approx(sums(job), rel=1e-6)
    expected, found = (
        hespas.simulate(each, "h100-sxm", estimator="roofline").step_ns for each in (job, traced)
    )
    assert found == pytest.approx(expected, rel=1e-3)


def test_collectives_of_tensor_parallelism_are_those_of_the_layers(tmp_path: Path) -> None:
    """Sequence-parallel layers gather twice forward and four times backward, once per micro-batch."""
    batch, tp = 8, 4
    traced = written(step(SHORT, Layout(tp=tp), global_batch=batch), tmp_path / "job")
    (graph,) = traced.classes
    table = graph.collectives
    stream = 256 * SHORT.hidden * 2
    gathers = (table.kind == CollectiveKind.ALL_GATHER) & (table.comm_bytes * tp == stream)
    gathers |= (table.kind == CollectiveKind.ALL_GATHER) & (table.comm_bytes == stream)
    per_micro_batch = int(gathers.sum()) / batch
    assert per_micro_batch == int(per_micro_batch) >= 4 * len(SHORT.layers)


def test_operations_of_a_trace_are_those_of_its_shapes(tmp_path: Path) -> None:
    traced = written(step(SHORT, Layout(tp=2), global_batch=8), tmp_path / "job")
    graph = traced.classes[0]
    matmuls = graph.contractions
    by_shape = np.zeros(len(graph))
    np.add.at(
        by_shape, matmuls.node, 2.0 * matmuls.batch * matmuls.m * matmuls.n * matmuls.k.astype(np.float64)
    )
    rows = np.flatnonzero(by_shape)
    assert len(rows) > 8 * 2 * 7
    np.testing.assert_allclose(graph.flops[rows], by_shape[rows], rtol=1e-9)


def test_no_loop_is_left_in_the_account_of_written_bytes(tmp_path: Path) -> None:
    from hespas.converters.chakra.sizes import trace_bytes

    job = step(SHORT, Layout(tp=2), global_batch=8)
    hespas.write(job, tmp_path / "job")
    assert trace_bytes(job) == sum(file.stat().st_size for file in (tmp_path / "job").glob("*.et"))


# --- loops of other programs

LOOP = """{{"num_ranks": 2, "regions": [{{"kind": "loop_body", "trips": {trips}, "label": "steps"}}],
"group_sets": [[[0, 1]]],
"nodes": [{{"op": "all-reduce", "deps": [], "region": {region}, "duration_ns": 1000 {more},
"collective": {{"kind": "all_reduce", "group_set": 0, "comm_bytes": 1024}}}}]}}"""


def looping(path: Path, trips: str, *, region: int = 0, more: str = "") -> Workload:
    path.write_text(LOOP.format(trips=trips, region=region, more=more))
    program = hespas.read(path)
    assert isinstance(program, Workload)
    return program


@pytest.mark.parametrize("form", ["chakra", "chakra-json"])
def test_a_collective_in_a_loop_is_written_as_often_as_it_runs(form: str, tmp_path: Path) -> None:
    program = looping(tmp_path / "in.json", "7")
    hespas.write(program, tmp_path / "out", format=form)
    traced = hespas.read(tmp_path / "out", format=form)
    assert isinstance(traced, Workload)
    assert sums(traced)["collective_bytes"] == 2 * 7 * 1024
    assert hespas.simulate(traced).step_ns == hespas.simulate(program).step_ns == 7000


@pytest.mark.parametrize(
    ("trips", "more", "message"),
    [
        ("null", "", "trip count that is only known at run time: steps"),
        ("4", ', "multiplicity": 3', "runs 3 times, its loops 4 times"),
        ("9e6", "", "unrolling all loops makes 9,000,000 operations"),
    ],
)
def test_what_cannot_be_unrolled_is_refused(trips: str, more: str, message: str, tmp_path: Path) -> None:
    program = looping(tmp_path / "in.json", trips, more=more)
    with pytest.raises(UnsupportedError, match=message):
        hespas.write(program, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_executions_beyond_the_loops_are_refused_by_simulations_too(tmp_path: Path) -> None:
    program = looping(tmp_path / "in.json", "4", region=-1, more=', "multiplicity": 3')
    with pytest.raises(UnsupportedError, match="runs 3 times, its loops 1 times"):
        hespas.simulate(program)


def test_fractional_trips_are_rounded_as_a_simulation_rounds_them(tmp_path: Path) -> None:
    program, found = looping(tmp_path / "in.json", "2.6"), Diagnostics()
    (flat,) = (UnrollLoops()(graph, found) for graph in program.classes)
    assert len(flat) == 3
    assert found.counts()["pass.fractional-trips"] == 1
    assert hespas.simulate(program).step_ns == 3000


def test_a_job_whose_traces_are_too_large_is_accounted_without_their_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hespas.api import generate
    from hespas.generators.llm.step import LlmStep
    from tests.generators.llm.small_models import training

    monkeypatch.setattr(UnrollLoops.__init__, "__defaults__", (100, None, False))
    job = LlmStep(model=SHORT, layout=Layout(tp=2), training=training(global_batch=8))
    result: GenerationResult = generate(job, measure=True)
    assert np.isnan(result.et_bytes)
    assert result.diagnostics.counts()["generate.no-traces"] == 1
