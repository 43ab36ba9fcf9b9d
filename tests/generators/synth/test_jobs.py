"""Synthetic jobs from templates: sizes, dependencies of added layers, validity, times and copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import process_time

import numpy as np
import pytest

import hespas
from hespas.api import Synthesis
from hespas.generators.obfuscate import Key
from hespas.generators.obfuscate.layers import Run
from hespas.generators.synth.blocks import with_repeats
from hespas.generators.synth.job_card import sample_distance, variation
from hespas.generators.synth.job_costs import CostSamples, changed_extents
from hespas.generators.synth.jobs import JobSize, Template, TemplateJob, total_flops
from hespas.graph import Diagnostics, GraphBuilder, OpClass, OpGraph, Workload
from hespas.graph.errors import CheckFailedError, UnsupportedError, UsageError
from hespas.graph.passes import is_topological

_SYSTEMS = ["dgx-h100", "dgx-a100"]
_SIZE = JobSize()


@cache
def pipeline() -> Workload:
    """Return two pipeline stages of two tensor-parallel ranks, 8 layers each."""
    return hespas.llm_step("Llama-3.2-1B", tp=2, pp=2, seq=512, global_batch=4).workload()


@cache
def recommendation() -> Workload:
    return hespas.dlrm_step(ranks=4).workload()


@cache
def synthesized() -> Synthesis:
    return hespas.synthesize([pipeline(), recommendation()], count=6, seed=3, systems=_SYSTEMS)


def job_like(workload: Workload, size: JobSize = _SIZE, seed: int = 0) -> Workload:
    template = Template.of(workload, Diagnostics())
    return TemplateJob(
        template=template, samples=CostSamples.of(template.tables), seed=seed, size=size
    ).workload()


def layered(deps: Sequence[Sequence[int]]) -> OpGraph:
    builder = GraphBuilder("layers")
    row = builder.strings.add("aten::mm")
    for row_deps in deps:
        builder.add_node(name_id=row, op_id=row, op_class=OpClass.CONTRACTION, data_deps=row_deps)
    return builder.build()


def forward_and_backward(layers: int) -> list[list[int]]:
    """Return dependencies of a forward pass of blocks of two nodes, a backward pass in reverse order that
    reads each second node of the forward pass, and an update that waits for all of the backward pass.
    """
    forward = [[node - 1] if node else [] for node in range(2 * layers)]
    backward = list[list[int]]()
    for block in range(layers):
        start = 2 * layers + 2 * block
        backward += [[start - 1, 2 * (layers - 1 - block) + 1], [start]]
    last = 4 * layers
    return [*forward, *backward, [2 * layers + 2 * block + 1 for block in range(layers)], [last]]


@pytest.mark.parametrize("new", [2, 3, 5, 6, 7, 8, 13])
def test_other_numbers_of_layers_have_the_dependencies_of_a_model_of_that_size(new: int) -> None:
    graph = layered(forward_and_backward(6))
    changed, rows = with_repeats(graph, [Run(0, 2, 6), Run(12, 2, 6)], [new, new])
    assert [sorted(set(row)) for row in changed.data_deps.to_lists()] == [
        sorted(set(row)) for row in forward_and_backward(new)
    ]
    assert len(rows) == 4 * new + 2


def test_runs_of_different_change_stay_acyclic() -> None:
    graph = layered(forward_and_backward(6))
    changed, _ = with_repeats(graph, [Run(0, 2, 6), Run(12, 2, 6)], [9, 3])
    assert len(changed) == 26
    assert is_topological(changed)


def test_equal_extents_and_halves_stay_consistent() -> None:
    extents = np.array([8, 128, 4096, 2048, 14336, 28672, 4096, -1, 0])
    changed = changed_extents(extents, Key(b"a key of this test"))
    assert changed[[0, 1, 7, 8]].tolist() == [8, 128, -1, 0]
    assert changed[2] == changed[6] == 2 * changed[3]
    assert changed[5] == 2 * changed[4]
    assert (changed[2:6] % 128 == 0).all()


def test_jobs_are_valid_and_as_long_as_their_sources() -> None:
    made = synthesized()
    assert made.valid
    assert made.value("checker, share valid") == 1.0
    assert made.value("simulation, share finished") == 1.0
    assert made.value("ASTRA-sim model, share finished") == 1.0
    for system in _SYSTEMS:
        assert made.value(f"step ratio on {system}") == pytest.approx(1.0, abs=0.1)
        assert made.value(f"step W1 on {system}") < 0.1
    assert made.value("systems, least Kendall tau") >= 0.8
    assert made.value("FLOPs error") < 0.1
    assert made.value("all_reduce bytes error") < 0.1


def test_jobs_keep_statistics_and_copy_nothing() -> None:
    made = synthesized()
    assert made.value("type TV") < 0.05
    assert made.value("motif TV") < 0.05
    assert made.value("exact copies") == 0.0
    assert made.value("structure copies") == 0.5  # a recommendation model has no layers
    counts = {len(workload.classes[0]) for workload in made.workloads[::2]}
    assert len(counts) > 1
    assert len(pipeline().classes[0]) not in counts


def test_no_name_of_the_source_survives() -> None:
    source = {text for graph in pipeline().classes for text in graph.strings if len(text) > 3}
    public = {graph.op_name(node) for graph in pipeline().classes for node in range(len(graph))}
    job = job_like(pipeline())
    texts = {text for graph in job.classes for text in graph.strings}
    assert not texts & (source - {name.removeprefix("aten::") for name in public} - public - {"add"})


def test_ranks_of_a_group_have_equal_collectives() -> None:
    job = job_like(pipeline(), JobSize(scale=1.5))
    first, second = job.classes
    for groups in {*first.group_sets} & {*second.group_sets}:
        payloads = [
            graph.collectives.comm_bytes[graph.collectives.group_set == graph.group_sets.index(groups)]
            for graph in (first, second)
        ]
        if len(np.unique(groups.groups_of(np.array([0, 3])))) == 1:
            assert np.array_equal(payloads[0], payloads[1])
    assert hespas.check(job, profile="astra-sim").valid


@pytest.mark.parametrize("scale", [0.5, 2.0, 5.0])
def test_scale_changes_nodes_flops_and_payloads(scale: float) -> None:
    made = hespas.synthesize(pipeline(), count=4, scale=scale, simulates=False)
    assert made.value("FLOPs error") < 1e-6
    assert made.value("all_reduce bytes error") < 1e-3
    nodes = np.mean([job.nodes for job in made.jobs])
    assert nodes == pytest.approx(scale * Template.of(pipeline(), Diagnostics()).nodes, rel=0.35)
    assert total_flops(made.workloads[0]) == pytest.approx(scale * total_flops(pipeline()), rel=0.06)
    assert made.valid


def test_targets_are_met() -> None:
    made = hespas.synthesize(
        pipeline(), count=2, nodes=3000, flops=1e15, collective_bytes=1e9, simulates=False
    )
    for job in made.jobs:
        assert job.nodes == pytest.approx(3000, rel=0.03)
        assert job.flops == pytest.approx(1e15, rel=1e-6)
        assert job.collective_bytes == pytest.approx(1e9, rel=1e-3)
    timed = hespas.synthesize(pipeline(), count=2, step_ms=500.0, systems=["dgx-h100"])
    assert [job.step_ns["dgx-h100"] for job in timed.jobs] == pytest.approx([5e8, 5e8], rel=0.01)


def test_equal_seeds_make_equal_jobs() -> None:
    first, again, other = (job_like(pipeline(), seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.classes[0].flops, again.classes[0].flops)
    np.testing.assert_array_equal(first.classes[0].types.dims, again.classes[0].types.dims)
    assert not np.array_equal(first.classes[0].types.dims, other.classes[0].types.dims)


def test_a_million_nodes_take_less_than_a_minute() -> None:
    start = process_time()
    job = job_like(pipeline(), JobSize(nodes=500_000))
    assert sum(len(graph) for graph in job.classes) == pytest.approx(1_000_000, rel=0.01)
    assert process_time() - start < 60.0


def test_sources_that_cannot_be_templates_are_refused() -> None:
    broken = hespas.random_job(ranks=2, nodes=20, broken="cycle").workload()
    with pytest.raises(CheckFailedError, match="not valid"):
        hespas.synthesize(broken, count=1, simulates=False)
    one = Workload(name="one", classes=pipeline().classes, rank_class=np.array([0, 0, 1, -1], np.int32))
    with pytest.raises(UnsupportedError, match="3 of 4 ranks"):
        hespas.synthesize(one, count=1, simulates=False)
    with pytest.raises(UsageError, match="contradicts"):
        hespas.synthesize(pipeline(), step_ms=1.0, flops=1e12)
    with pytest.raises(UsageError, match="requires a simulation"):
        hespas.synthesize(pipeline(), step_ms=1.0, simulates=False)


def test_distances() -> None:
    assert sample_distance([1, 3], [2], [1.0, 1.0], [2.0]) == pytest.approx(0.5)
    assert variation({1: 1.0, 2: 1.0}, {1: 3.0, 3: 3.0}) == pytest.approx(0.5)
