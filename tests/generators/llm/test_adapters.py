"""Adapters: one rule selects their layers, and graph, parameters, memory and FLOPs agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import hespas
from hespas.generators.llm.activations import saved_of_layer
from hespas.generators.llm.flops import hardware_flops, rank_flops
from hespas.generators.llm.layout import Layout, RankGroups
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Mamba, Model
from hespas.generators.llm.rank import ModelRank
from hespas.generators.llm.settings import recompute_of
from hespas.generators.llm.weights import RankWeights, weights_of_layer, weights_of_rest
from hespas.graph import CollectiveKind, OpGraph
from hespas.graph.errors import UsageError
from tests.generators.llm.small_models import (
    DENSE,
    HYBRID,
    MIXTURE,
    MODELS,
    calls,
    product_flops,
    step,
    training,
)


def adapters_of(graph: OpGraph) -> dict[str, int]:
    """Elements of the adapters that the graph multiplies by, by name."""
    table, found = graph.contractions, dict[str, int]()
    for row, node in enumerate(table.node.tolist()):
        name = graph.node_name(node)
        if name.endswith((".lora_a", ".lora_b")):
            found[name] = int(table.k[row]) * int(table.n[row])
    return found


def every(model: Model, layout: Layout, **settings: Any) -> RankWeights:
    chosen = training(**settings)
    layers = [weights_of_layer(model, layout, chosen, each) for each in model.all_layers]
    return sum(layers, weights_of_rest(model, layout, chosen, first=True, last=True))


@pytest.mark.parametrize("attention_only", [False, True])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, ep=2)], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.name)
def test_the_graph_has_the_adapters_that_weights_count(
    model: Model, layout: Layout, *, attention_only: bool
) -> None:
    if model is not MIXTURE:
        layout = Layout(tp=layout.tp)
    settings: dict[str, Any] = {"lora_rank": 8, "lora_attention_only": attention_only}
    found = adapters_of(step(model, layout, **settings).classes[0])
    weights = every(model, layout, **settings)
    assert sum(found.values()) == weights.dense > 0
    assert not weights.experts
    whole = every(model, layout)
    assert (weights.frozen, weights.frozen_experts) == (whole.dense, whole.experts)


def test_which_layers_have_adapters() -> None:
    def named(model: Model, **settings: Any) -> set[str]:
        found = adapters_of(step(model, Layout(), lora_rank=8, **settings).classes[0])
        return {name.split(".", 2)[2].rpartition(".")[0] for name in found}

    attention, dense = {"attention.qkv", "attention.proj"}, {"mlp.fc1", "mlp.fc2"}
    latent = {"attention.qkv_down", "attention.q_up", "attention.kv_up", "attention.proj"}
    assert named(DENSE) == attention | dense
    assert named(DENSE, lora_attention_only=True) == attention
    assert named(MIXTURE) == latent | {"moe.shared.fc1", "moe.shared.fc2"}
    assert named(MIXTURE, lora_attention_only=True) == latent
    assert named(HYBRID) == attention | dense


RECOMPUTES = (
    *((model, name) for model in MODELS for name in ("none", "full", "qkv", "full:1")),
    (DENSE, "mlp"),
    (MIXTURE, "moe"),
    (MIXTURE, "mla_up_proj"),
)


@pytest.mark.parametrize("attention_only", [False, True])
@pytest.mark.parametrize(("model", "recompute"), RECOMPUTES)
def test_flops_count_adapters_as_the_graph_does(
    model: Model, recompute: str, *, attention_only: bool
) -> None:
    layout = Layout(pp=2, dp=2)
    settings: dict[str, Any] = {
        "lora_rank": 8,
        "lora_attention_only": attention_only,
        "recompute": recompute_of(recompute),
    }
    made = product_flops(step(model, layout, **settings))
    assert made == pytest.approx(hardware_flops(model, training(**settings), layout), rel=1e-9)


def test_forward_flops_of_adapters_by_hand() -> None:
    each = 8 * (512 + 1024 + 512 + 512 + 512 + 3072 + 1536 + 512)
    with_them, without = (sum(rank_flops(DENSE, Layout(), training(lora_rank=rank))) for rank in (8, 0))
    assert with_them - without == 8 * 256 * 2 * 8 * each


def test_gradients_of_adapters_that_tensor_ranks_hold_whole_are_summed() -> None:
    layout = Layout(tp=2)
    graph = step(DENSE, layout, lora_rank=8).classes[0]
    first, last = 2 * 512, 2 * 512  # in front of products whose outputs part, behind those whose inputs do
    summed = 4 * 8 * 8 * (first + last)
    assert summed in calls(graph, CollectiveKind.ALL_REDUCE, RankGroups(layout).tensor)
    assert every(DENSE, layout, lora_rank=8).replicated == summed / 4
    down = 512 + 192 + 64 + 16
    latent = 192 + 64 + 512 + down
    mixture = every(MIXTURE, Layout(tp=2, ep=2), lora_rank=8)
    assert mixture.replicated == 5 * 8 * (latent + 2 * 512)


def test_inputs_of_adapters_are_gathered_again() -> None:
    layout, piece = Layout(tp=4), 256 * 512 * 2 / 4
    graph = step(DENSE, layout, lora_rank=8).classes[0]
    gathers = calls(graph, CollectiveKind.ALL_GATHER, RankGroups(layout).tensor).count(piece)
    assert gathers == 8 * (8 * (2 + 2 + 2) + 1)  # forward, backward, again; the head
    only = step(DENSE, layout, lora_rank=8, lora_attention_only=True).classes[0]
    gathers = calls(only, CollectiveKind.ALL_GATHER, RankGroups(layout).tensor).count(piece)
    assert gathers == 8 * (8 * (2 + 2 + 1) + 1)


def test_frozen_weights_are_gathered_beside_their_adapters() -> None:
    layout = Layout(dp=4, zero=3)
    weights = weights_of_layer(DENSE, layout, training(lora_rank=8), DENSE.layers[0])
    graph = step(DENSE, layout, lora_rank=8).classes[0]
    sizes = calls(graph, CollectiveKind.ALL_GATHER, RankGroups(layout).shards)
    assert sizes.count(2 * (weights.dense + weights.frozen) / 4) == 2 * 2 * 8
    (memory,) = memory_of(MIXTURE, Layout(dp=4, ep=2, zero=3), training(lora_rank=8))
    mixture = every(MIXTURE, Layout(dp=4, ep=2, zero=3), lora_rank=8)
    held = -(-2 * (mixture.dense + mixture.frozen) // 4) + mixture.frozen_experts
    assert memory.parts["weights"] == held


def test_frozen_experts_do_not_keep_inputs_of_products() -> None:
    rank = [ModelRank(MIXTURE, Layout(), training(lora_rank=each)) for each in (0, 8)]
    trained, frozen = (saved_of_layer(each, MIXTURE.layers[0], 0)["experts"] for each in rank)
    assert trained - frozen == 2 * 256 * 2 * (512 + 256)


@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.name)
def test_steps_with_adapters_are_valid(model: Model) -> None:
    layout = Layout(tp=2, dp=2, pp=2, ep=2 if model is MIXTURE else 1)
    assert hespas.check(step(model, layout, lora_rank=8), profile="astra-sim").valid


def names_of(graph: OpGraph, suffix: str) -> set[str]:
    """Framework names, which begin with the pass, of nodes whose names end so."""
    rows = (node for node in range(len(graph)) if graph.node_name(node).endswith(suffix))
    return {graph.strings[int(graph.framework_id[node])].partition("/")[0] for node in rows}


@pytest.mark.parametrize("attention_only", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_of_adapters_fill_a_zero_bubble(zero: int, attention_only: bool) -> None:
    workload = step(
        DENSE, Layout(pp=2, dp=2, zero=zero), schedule="zero-bubble", lora_rank=8,
        lora_attention_only=attention_only,
    )  # fmt: skip
    for graph in workload.classes:
        assert names_of(graph, ".lora_a.wgrad") == names_of(graph, ".lora_b.wgrad") == {"weights"}
        assert names_of(graph, ".lora_a.dgrad") == {"backward"}
    assert hespas.check(workload, profile="astra-sim").valid


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_stage_without_adapters_waits_for_the_norm_of_the_others(schedule: str) -> None:
    workload = step(DENSE, Layout(pp=2, dp=2, layers_first=0), schedule=schedule, lora_rank=8)
    everyone = RankGroups(Layout(pp=2, dp=2)).everyone
    assert [calls(graph, CollectiveKind.ALL_REDUCE, everyone) for graph in workload.classes] == [[4.0]] * 2
    assert hespas.check(workload, profile="astra-sim").valid
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns > 0


def test_a_model_beside_whose_layers_no_adapters_stand_is_refused() -> None:
    model = replace(HYBRID, layers=tuple((each[0],) for each in HYBRID.layers if isinstance(each[0], Mamba)))
    with pytest.raises(UsageError, match="no attention or feed-forward blocks") as caught:
        step(model, Layout(), lora_rank=8)
    assert caught.value.code == "lora-needs-linear-layers"
