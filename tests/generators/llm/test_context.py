"""Context parallelism: attention overlaps the ring exchange of keys, or tokens are exchanged for heads."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import hespas
from hespas.generators.llm.activations import work_of_layer
from hespas.generators.llm.layout import Layout, RankGroups
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Attention, Mlp, Model
from hespas.generators.llm.rank import ModelRank
from hespas.generators.llm.settings import Overlap, Style, recompute_of
from hespas.graph import CollectiveKind, OpClass, OpGraph, Workload
from hespas.graph.errors import UsageError
from hespas.graph.passes import totals
from tests.generators.llm.small_models import DENSE, MIXTURE, calls, product_flops, step, training

RING = Layout(cp=4, ring_attention=True)
EXCHANGE = Layout(cp=4, context_all_to_all=True)


def names_behind(graph: OpGraph, name: str) -> set[str]:
    """Return the names of the dependencies of the first node with a name."""
    node = next(each for each in range(len(graph)) if graph.node_name(each) == name)
    behind = [*graph.data_deps.row(node), *graph.control_deps.row(node)]
    return {graph.node_name(int(each)).rpartition("attention.")[2] for each in behind}


def test_a_piece_of_attention_waits_for_the_keys_before_alone() -> None:
    graph = step(DENSE, RING, global_batch=1).classes[0]
    assert names_behind(graph, "layers.1.attention.core.0") == {"rope"}
    assert names_behind(graph, "layers.1.attention.core.2") == {"rope", "kv.ring.2", "core.1"}
    assert names_behind(graph, "layers.1.attention.kv.ring.2") == {"kv.ring.1"}
    back = names_behind(graph, "layers.1.attention.core.backward.2")
    assert back == {"proj.dgrad", "rope", "core.3", "kv.ring.backward.2", "core.backward.1"}
    assert names_behind(graph, "layers.1.attention.kv.ring.backward.1") == {"kv.ring.3"}
    # gradients of the last keys arrive behind the last piece, and go on to what made the keys
    assert names_behind(graph, "layers.1.attention.kv.grad.ring.2") == {"kv.grad.add.1"}
    assert names_behind(graph, "layers.1.attention.rope.backward") == {"kv.grad.add.3"}


@pytest.mark.parametrize("compiled", [True, False])
def test_torch_sums_pieces_of_attention_in_32_bits(compiled: bool) -> None:
    """PyTorch gathers keys once per pass, and sends their gradients around the ring in 32 bits."""
    layout = Layout(cp=4, zero=3)
    graph = step(DENSE, layout, global_batch=1, style="torchtitan", compiled=compiled).classes[0]
    layers, tokens, groups = len(DENSE.layers), 64, RankGroups(layout).context
    all_keys = 4 * tokens * 2 * 8 * 64 * 2  # each key head is repeated for its query heads
    sent = calls(graph, CollectiveKind.ALL_GATHER, groups)
    assert sent.count(all_keys / 4) == 2 * layers
    assert graph.p2p.comm_bytes.tolist() == [2 * all_keys / 4] * 4 * layers
    first, second = ("kv.all_gather" in names_behind(graph, f"layers.1.attention.core.{n}") for n in (0, 1))
    assert (first, second) == (compiled, True)
    assert names_behind(graph, "layers.1.attention.core.add.2") == {"core.add.1", "core.2"}
    is_exposed = "kv.grad.ring.1" in names_behind(graph, "layers.1.attention.core.backward.1")
    assert is_exposed == compiled
    sums = [
        number for number in range(len(graph)) if graph.node_name(number) == "layers.1.attention.core.add.1"
    ]
    assert graph.bytes_read[sums[0]] == tokens * 8 * 64 * (2 + 4)
    whole = step(DENSE, Layout(cp=4, zero=3), global_batch=1)
    assert product_flops(Workload.spmd(graph, 4, {})) == product_flops(whole)


@pytest.mark.parametrize(
    ("layout", "style", "forward", "backward"),
    [
        # In tensors of the keys and values of a rank: 64 tokens, 4 key heads, 64 columns of each in bf16.
        # torchtitan repeats them for 8 query heads, and has results and gradients in 32 bits.
        (Layout(cp=4), "megatron", 4, 8),
        (RING, "megatron", 2, 3),
        (replace(RING, cp=2), "megatron", 1, 2),
        (Layout(cp=4), "torchtitan", 2 + 8 + 2 * 2, 2 + 8 + 2 + 2 + 3 * 4),
        (RING, "torchtitan", 2 + 4 + 2 * 2, 2 + 4 + 2 + 2 + 3 * 4),
        (EXCHANGE, "megatron", 2, 2),
        (EXCHANGE, "torchtitan", 2, 2),
        (Layout(dp=4), "torchtitan", 0, 0),
    ],
)
def test_keys_of_other_ranks_need_memory(layout: Layout, style: Style, forward: int, backward: int) -> None:
    settings = training(style=style, seq=64 * layout.cp)
    attention = DENSE.layers[0][:1]
    work = work_of_layer(ModelRank(DENSE, layout, settings), attention)
    alone = work_of_layer(ModelRank(DENSE, Layout(), training(style=style, seq=64)), attention)
    keys = 64 * 4 * 2 * 64 * 2
    assert work.forward - alone.forward == forward * keys
    assert work.backward - alone.backward == backward * keys


@pytest.mark.parametrize("style", ["megatron", "torchtitan"])
def test_memory_has_the_gathered_keys_of_a_step(style: Style) -> None:
    """The feed-forward block is small, so that the peak of a long sequence is in attention."""
    small = replace(DENSE, vocab=64, layers=((DENSE.layers[0][0], Mlp(ffn=64)),) * 2)
    layout, settings = Layout(cp=16), training(style=style, seq=65_536, recompute=recompute_of("full"))
    graph = step(small, layout, style=style, seq=65_536).classes[0]
    gathered = max(calls(graph, CollectiveKind.ALL_GATHER, RankGroups(layout).context)) * layout.cp
    (found,) = memory_of(small, layout, settings)
    assert found.moment == "backward pass of a layer"
    assert found.parts["working space"] > gathered


def long_step(layout: Layout, **settings: Any) -> Workload:
    """A step in which attention takes as long as its keys on their way."""
    model = replace(DENSE, layers=DENSE.layers[:2])
    return step(model, layout, seq=16_384, global_batch=1, **settings)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_messages_of_the_ring_hide_behind_attention(recompute: str) -> None:
    hidden, shown = (
        long_step(RING, overlap=Overlap(context=each), recompute=recompute_of(recompute))
        for each in (True, False)
    )
    runs = [hespas.simulate(each, "H100-SXM", system="dgx-h100") for each in (hidden, shown)]
    exposed = [each.classes[0].exposed_comm_ns for each in runs]
    assert exposed[0] < 0.5 * exposed[1]
    assert runs[0].step_ns < runs[1].step_ns
    mine, others = (totals(each.classes[0]) for each in (hidden, shown))
    assert mine.useful_flops == others.useful_flops
    assert hidden.classes[0].p2p.comm_bytes.sum() == shown.classes[0].p2p.comm_bytes.sum()
    whole = long_step(Layout(cp=4), recompute=recompute_of(recompute))
    assert product_flops(hidden) == pytest.approx(product_flops(whole))
    assert hespas.check(hidden, profile="astra-sim").valid


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=lambda each: each.name)
def test_each_key_is_read_by_one_piece(model: Model) -> None:
    alone, ring = (step(model, each, global_batch=1).classes[0] for each in (Layout(cp=4), RING))
    for graph, pieces in ((alone, 1), (ring, 4)):
        cores = np.flatnonzero(graph.op_class == OpClass.ATTENTION)
        assert len(cores) == len(model.all_layers) * 2 * pieces
    flops = [float(each.flops[each.op_class == OpClass.ATTENTION].sum()) for each in (alone, ring)]
    assert flops[0] == flops[1]


def test_tokens_are_exchanged_for_heads() -> None:
    graph, groups = step(DENSE, EXCHANGE, global_batch=1).classes[0], RankGroups(EXCHANGE).context
    tokens, head = 64, 64 * 2
    sent = calls(graph, CollectiveKind.ALL_TO_ALL, groups)
    qkv, results = tokens * (8 + 4 + 4) * head, tokens * 8 * head
    assert sorted(set(sent)) == [results, qkv]
    assert [sent.count(each) for each in (results, qkv)] == [8 * 2, 8 * 2]  # forward and backward
    core = graph.op_class == OpClass.ATTENTION
    assert (
        float(graph.bytes_read[core][0]) == 256 * (2 + 1 + 1) * head
    )  # all tokens of a quarter of the heads
    assert names_behind(graph, "layers.0.attention.proj") == {"core.all_to_all"}
    assert names_behind(graph, "layers.0.attention.rope.backward") == {"qkv.grad.all_to_all"}
    whole = step(DENSE, Layout(), global_batch=1)
    assert product_flops(step(DENSE, EXCHANGE, global_batch=1)) == product_flops(whole)


def test_heads_of_keys_go_to_several_ranks_where_they_are_fewer() -> None:
    layout = Layout(cp=8, context_all_to_all=True)
    graph, groups = step(DENSE, layout, global_batch=1).classes[0], RankGroups(layout).context
    sent = calls(graph, CollectiveKind.ALL_TO_ALL, groups)
    assert max(sent) == 32 * (8 + 8 + 8) * 128  # each of 4 key heads twice
    assert names_behind(graph, "layers.0.attention.rope.backward") == {"kv.grad.add"}
    alone, spread = (step(DENSE, each, global_batch=1) for each in (Layout(), layout))
    assert product_flops(spread) == product_flops(alone)


@pytest.mark.parametrize(
    ("model", "layout", "recompute"),
    list(
        product(
            (DENSE, MIXTURE),
            (EXCHANGE, RING, Layout(cp=2, tp=2, pp=2, dp=2, ring_attention=True)),
            ("none", "selective", "qkv", "full"),
        )
    ),
)
@pytest.mark.parametrize("style", ["megatron", "torchtitan"])
def test_steps_with_context_ranks_run(model: Model, layout: Layout, recompute: str, style: str) -> None:
    workload = step(model, layout, recompute=recompute_of(recompute), style=style)
    assert hespas.check(workload, profile="astra-sim").valid
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns > 0
    alone = step(model, Layout(tp=layout.tp), recompute=recompute_of(recompute))
    assert product_flops(workload) == pytest.approx(product_flops(alone), rel=0.002)


@pytest.mark.parametrize(
    ("model", "layout", "rule"),
    [
        (DENSE, Layout(cp=16, context_all_to_all=True), "cp-divides-heads"),
        (DENSE, Layout(cp=4, tp=4, context_all_to_all=True), "cp-divides-heads"),
        (DENSE, replace(EXCHANGE, ring_attention=True), "cp-one-way"),
        (
            replace(DENSE, layers=((Attention(heads=12, kv_heads=3, head_dim=64), Mlp(ffn=512)),)),
            Layout(cp=2, context_all_to_all=True),
            "cp-kv-heads",
        ),
    ],
)
def test_heads_that_do_not_part_are_refused(model: Model, layout: Layout, rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        step(model, layout)
    assert caught.value.code == rule
    assert caught.value.hint
