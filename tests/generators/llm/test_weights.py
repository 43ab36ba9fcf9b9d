"""Parameters of ranks compared with the model, and gradients that tensor ranks sum."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hespas.generators.llm.layout import Layout, RankGroups
from hespas.generators.llm.model import Attention, Experts, Mlp, Model, layer_parameters, model_parameters
from hespas.generators.llm.weights import RankWeights, weights_of_layer, weights_of_rest
from hespas.graph import CollectiveKind, OpGraph, Workload
from tests.generators.llm.small_models import DENSE, HYBRID, MIXTURE, MODELS, PLAIN, calls, step, training

BIASED = replace(
    DENSE,
    name="biased",
    layers=(
        (
            Attention(heads=8, kv_heads=4, head_dim=64, qk_norm=True, bias=True),
            Experts(experts=16, topk=2, ffn=256, latent=128, bias=True),
        ),
        (Attention(heads=8, kv_heads=4, head_dim=64), Mlp(ffn=1536, bias=True)),
    ),
    post_norms=True,
)


def summed(graph: OpGraph) -> float:
    """Bytes of gradients that tensor ranks sum."""
    table = graph.collectives
    names = [graph.node_name(node) for node in table.node.tolist()]
    return sum(float(table.comm_bytes[row]) for row, name in enumerate(names) if "replicated" in name)


def of_stage(
    model: Model, layout: Layout, *numbers: int, first: bool = True, last: bool = True
) -> RankWeights:
    layers = [weights_of_layer(model, layout, training(), model.all_layers[each]) for each in numbers]
    return sum(layers, weights_of_rest(model, layout, training(), first=first, last=last))


@pytest.mark.parametrize("model", [*MODELS, BIASED], ids=lambda each: each.name)
def test_one_rank_has_all_parameters(model: Model) -> None:
    for layer in model.all_layers:
        found = weights_of_layer(model, Layout(), training(), layer)
        assert found.dense + found.experts == layer_parameters(model, layer)
    found = of_stage(model, Layout(), *range(len(model.all_layers)))
    assert found.dense + found.experts == model_parameters(model)
    assert not found.replicated


@pytest.mark.parametrize("model", [*MODELS, BIASED], ids=lambda each: each.name)
def test_what_two_tensor_ranks_hold_twice(model: Model) -> None:
    """Of two ranks' weights those beyond the model's are the replicated ones and learned positions, whose
    gradients are of all tokens.
    """
    found = of_stage(model, Layout(tp=2, ep=2), *range(len(model.all_layers)))
    held = 2 * (found.dense + found.experts)
    experts = [block for block in model.blocks() if isinstance(block, Experts)]
    assert held - model_parameters(model) == found.replicated + model.max_positions * model.hidden
    assert bool(experts) == bool(found.experts)


def reduced(model: Model, layout: Layout) -> tuple[Workload, list[float]]:
    workload = step(model, layout)
    return workload, [summed(graph) for graph in workload.classes]


def test_gradients_of_norms_are_summed_under_sequence_parallelism() -> None:
    assert reduced(DENSE, Layout(tp=4))[1] == [4 * 512 * (8 * 2 + 1)]
    assert reduced(DENSE, Layout(tp=2, pp=2))[1] == [4 * 512 * 4 * 2, 4 * 512 * (4 * 2 + 1)]
    assert reduced(HYBRID, Layout(tp=2))[1] == [4 * 256 * (4 + 1)]  # a block a layer
    assert reduced(PLAIN, Layout(tp=2))[1] == [4 * 2 * 512 * (4 * 2 + 1)]  # two parameters a dimension
    assert reduced(DENSE, Layout(tp=4, sequence_parallel=False))[1] == [0]
    assert reduced(DENSE, Layout(dp=2))[1] == [0]


def test_gradients_of_routers_latents_and_further_predictions_are_summed() -> None:
    latents = 512 * (192 + 64 + 16) + 192 + 64
    each = 2 * 512 + latents + 512 * 16
    ends = 512 + 3 * 512 + 2 * 512 * 512
    layout = Layout(tp=2, ep=2)
    workload, bytes_summed = reduced(MIXTURE, layout)
    assert bytes_summed == [4 * (5 * each + ends)]
    assert bytes_summed[0] in calls(workload.classes[0], CollectiveKind.ALL_REDUCE, RankGroups(layout).tensor)


def test_gradients_of_biases_and_norms_of_heads_are_summed() -> None:
    norms, heads, router, latents = 2 * 2 * 2 * 512, 2 * 64, 16 * 513, 2 * 512 * 128
    assert reduced(BIASED, Layout(tp=2))[1] == [4 * (norms + 512 + heads + router + latents + 512 + 512)]
    dense = replace(BIASED, layers=((BIASED.layers[0][0], BIASED.layers[1][1]),))
    assert reduced(dense, Layout(tp=2, sequence_parallel=False))[1] == [4 * heads]


@pytest.mark.parametrize("model", [*MODELS, BIASED], ids=lambda each: each.name)
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, ep=2, dp=2), Layout(tp=4, zero=3, dp=2)], ids=str)
def test_what_is_summed_follows_the_weights(model: Model, layout: Layout) -> None:
    layout = layout if model in {MIXTURE, BIASED} else replace(layout, ep=1)
    half = len(model.layers) // layout.pp
    first = range(half) if layout.pp > 1 else range(len(model.all_layers))
    stages = [of_stage(model, layout, *first, last=layout.pp == 1)]
    if layout.pp > 1:
        stages.append(of_stage(model, layout, *range(half, len(model.all_layers)), first=False))
    assert reduced(model, layout)[1] == [4 * each.replicated for each in stages]
