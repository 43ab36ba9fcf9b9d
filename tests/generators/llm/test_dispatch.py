"""Token dispatch by node first: numbers of tokens, groups, and savings."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

import hespas
from hespas.generators.llm.feedforward import reached_parts
from hespas.generators.llm.layout import Layout, RankGroups
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Experts
from hespas.generators.llm.settings import Overlap, Training, precision_of
from hespas.graph import CollectiveKind, Workload, step_facts
from hespas.graph.errors import UsageError
from tests.generators.llm.small_models import DENSE, MIXTURE, calls, product_flops, step

TWO_LEVELS = Layout(dp=8, ep=8, expert_node=4)


@pytest.mark.parametrize(
    ("experts", "chosen", "parts"), [(8, 2, 4), (8, 3, 2), (12, 4, 3), (6, 6, 3), (4, 1, 4)]
)
def test_parts_that_a_token_reaches(experts: int, chosen: int, parts: int) -> None:
    size = experts // parts
    choices = [len({each // size for each in choice}) for choice in combinations(range(experts), chosen)]
    assert reached_parts(experts, chosen, parts) == pytest.approx(sum(choices) / len(choices))


def test_a_token_crosses_to_each_node_once_and_goes_on_inside_of_it() -> None:
    graph, groups = step(MIXTURE, TWO_LEVELS).classes[0], RankGroups(TWO_LEVELS)
    tokens, row, mixtures = 256, 512 * 2, 5  # both ways, forward and backward
    crossing = calls(graph, CollectiveKind.ALL_TO_ALL, groups.expert_nodes)
    assert crossing == [round(tokens * 2 * (1 - (8 * 7) / (16 * 15))) * row] * (4 * mixtures)
    inside = calls(graph, CollectiveKind.ALL_TO_ALL, groups.expert_inside)
    assert inside == [round(tokens * 8 * (1 - (14 * 13) / (16 * 15))) * row] * (4 * mixtures)
    assert not calls(graph, CollectiveKind.ALL_TO_ALL, groups.experts)
    assert list(groups.expert_nodes.members(0)) == [0, 4]
    assert list(groups.expert_inside.members(0)) == [0, 1, 2, 3]


def test_less_crosses_nodes_than_without() -> None:
    wide = replace(
        MIXTURE,
        layers=tuple(
            tuple(replace(each, experts=64, topk=8) if isinstance(each, Experts) else each for each in layer)
            for layer in MIXTURE.layers
        ),
    )
    layouts = Layout(dp=16, ep=16, expert_node=8), Layout(dp=16, ep=16)
    steps = [step(wide, each, global_batch=16, seq=4096) for each in layouts]
    assert product_flops(steps[0]) == product_flops(steps[1])
    groups = RankGroups(layouts[0])
    crossing = calls(steps[0].classes[0], CollectiveKind.ALL_TO_ALL, groups.expert_nodes)
    straight = calls(steps[1].classes[0], CollectiveKind.ALL_TO_ALL, groups.experts)
    assert crossing[0] < straight[0] / 3.9  # two nodes for eight experts, half of which are on the other
    assert hespas.check(steps[0], profile="astra-sim").valid
    times = [hespas.simulate(each, "H100-SXM", system="dgx-h100").step_ns for each in steps]
    assert times[0] < times[1]


def test_in_one_node_tokens_go_once_to_each_rank() -> None:
    layout = Layout(dp=4, ep=4, expert_node=8)
    graph, groups = step(MIXTURE, layout).classes[0], RankGroups(layout)
    rows = round(256 * 4 * (1 - (12 * 11) / (16 * 15)))
    assert set(calls(graph, CollectiveKind.ALL_TO_ALL, groups.expert_inside)) == {rows * 512 * 2}


@pytest.mark.parametrize(
    ("layout", "capacity", "rule"),
    [
        (Layout(dp=8, ep=8, expert_node=3), 0.0, "expert-node"),
        (Layout(dp=8, ep=4, etp=2, expert_node=4), 0.0, "expert-node-dropless"),
        (TWO_LEVELS, 1.25, "expert-node-dropless"),
    ],
)
def test_what_two_levels_cannot_is_refused(layout: Layout, capacity: float, rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        step(MIXTURE, layout, capacity=capacity)
    assert caught.value.code == rule
    assert caught.value.hint


BESIDE = Overlap(microbatches=True)


@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (2, 2)])
def test_dispatch_beside_another_micro_batch_shortens_a_step(pp: int, vp: int) -> None:
    layout = Layout(dp=8, pp=pp, vp=vp, ep=8)
    apart = step(MIXTURE, layout, global_batch=64, seq=2048, launch="whole")
    beside = step(MIXTURE, layout, global_batch=64, seq=2048, launch="whole", overlap=BESIDE)
    for kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.REDUCE_SCATTER):
        groups = RankGroups(layout).experts if kind is CollectiveKind.ALL_TO_ALL else RankGroups(layout).data
        counts = [sum(calls(graph, kind, groups)) for graph in (apart.classes[0], beside.classes[0])]
        assert counts[0] == pytest.approx(counts[1])  # the same communication, at another time
    times = [hespas.simulate(job, "H100-SXM", system="dgx-h100").step_ns for job in (apart, beside)]
    assert times[1] < times[0]


@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (2, 2)])
def test_a_forward_pass_beside_a_backward_pass_adds_one_layer_to_the_peak(pp: int, vp: int) -> None:
    layout = Layout(dp=8, pp=pp, vp=vp, ep=8)
    training = Training(seq=2048, global_batch=64, micro_batch=1, launch="whole")
    overlapping = replace(training, overlap=replace(training.overlap, microbatches=True))
    apart, beside = (memory_of(MIXTURE, layout, each) for each in (training, overlapping))
    for before, after in zip(apart, beside, strict=True):
        added = after.peak_bytes - before.peak_bytes
        activations = sum(before.parts[name] for name in ("norms and residuals", "attention", "experts"))
        assert 0 < added < activations / 2


def test_dispatch_beside_another_micro_batch_needs_virtual_stages() -> None:
    with pytest.raises(UsageError, match="virtual stages"):
        step(MIXTURE, Layout(dp=8, pp=2, ep=8), overlap=BESIDE)


def test_the_host_launches_kernels_of_experts_one_expert_at_a_time() -> None:
    apart = step(MIXTURE, Layout(), seq=256, precision=precision_of("mxfp8"))
    facts = step_facts(apart.metadata)
    assert facts is not None
    assert facts.separate_experts == 16
    together = replace(apart, metadata=replace(facts, separate_experts=0).metadata())
    times = [hespas.simulate(job, "B200-SXM").step_ns for job in (apart, together)]
    # 5 mixtures: 6 products with 2 conversions of scales each, for 16 experts, of 20 us each at least
    assert times[0] - times[1] > 5 * 6 * 3 * 15 * 20_000.0 * 0.9


def kernels(workload: Workload, op: str) -> list[str]:
    graph = workload.classes[0]
    return [graph.node_name(node) for node in range(len(graph)) if graph.op_name(node) == op]


@pytest.mark.parametrize(
    ("layout", "settings", "sorts", "pads"),
    [
        (Layout(dp=8, ep=8), {}, 4, 0),
        (Layout(dp=8, ep=8), {"precision": precision_of("fp8-current")}, 4, 4),
        (Layout(dp=8, ep=8), {"precision": precision_of("fp8-current"), "capacity": 1.0}, 4, 0),
        (Layout(dp=8, ep=8), {"precision": precision_of("fp8-current"), "style": "torchtitan"}, 4, 0),
        (Layout(dp=16, ep=16), {"precision": precision_of("mxfp8"), "global_batch": 16}, 0, 4),
        (TWO_LEVELS, {"precision": precision_of("fp8-current")}, 0, 0),
        (Layout(dp=8), {}, 0, 0),
    ],
)
def test_rows_are_sorted_by_expert_and_padded_for_narrow_formats(
    layout: Layout, settings: dict[str, Any], sorts: int, pads: int
) -> None:
    made, mixtures = step(MIXTURE, layout, **settings), 5
    assert len(kernels(made, "moe_sort_chunks")) == sorts * mixtures
    assert sum(".pad" in name for name in kernels(made, "aten::copy_")) == pads * mixtures


def test_experts_are_one_kernel_in_a_graph_of_the_whole_step() -> None:
    layout = Layout(dp=4, ep=4)
    apart, whole = (step(MIXTURE, layout, launch=launch) for launch in ("kernels", "whole"))
    assert kernels(apart, "aten::bmm") == kernels(whole, "aten::_grouped_mm")
    assert not kernels(apart, "aten::_grouped_mm")
    assert kernels(step(MIXTURE, layout, style="torchtitan"), "aten::_grouped_mm")


@pytest.mark.parametrize(
    ("layout", "collective"),
    [
        (Layout(dp=8, ep=8), "all_to_all"),
        (Layout(dp=16, ep=16), "all_to_all"),  # an expert per rank: nothing is sorted
        (TWO_LEVELS, "inside.all_to_all"),
    ],
)
def test_results_return_after_the_gradients_of_weights(layout: Layout, collective: str) -> None:
    graph = step(MIXTURE, layout, global_batch=layout.dp).classes[0]
    names = [graph.node_name(node) for node in range(len(graph))]
    end = f".dispatch.backward.{collective}"
    found = [(node, name.removesuffix(end)) for node, name in enumerate(names) if name.endswith(end)]
    assert len(found) == 5
    for node, mixture in found:
        # Kernels run in the order of their nodes: the collective waits for that product or a later kernel.
        before = [*graph.control_deps.row(node).tolist(), *graph.data_deps.row(node).tolist()]
        assert max(before) >= names.index(f"{mixture}.fc1.wgrad")


def test_tensor_parallel_collectives_wait_if_they_do_not_overlap() -> None:
    layout = Layout(dp=1, tp=4)
    durations: dict[bool, float] = {}
    for overlaps in (True, False):
        overlap = replace(Overlap.none(), tensor_backward=overlaps)
        made = step(DENSE, layout, seq=4096, launch="whole", overlap=overlap)
        durations[overlaps] = hespas.simulate(made, "H100-SXM", system="dgx-h100").step_ns
    assert durations[True] < durations[False]
