"""FLOPs in closed form, compared with generated graphs and with counts of small masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.generators.llm.activations import saved_of_layer
from hespas.generators.llm.flops import (
    Convention,
    attention_flops,
    forward_flops,
    forward_parts,
    hardware_flops,
    model_flops,
    rank_flops,
)
from hespas.generators.llm.layout import Layout, RankGroups
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Attention, Experts, LatentAttention, Mamba, Mlp, Model
from hespas.generators.llm.model_file import load_model
from hespas.generators.llm.rank import ModelRank
from hespas.generators.llm.settings import Recompute, Training, recompute_of
from hespas.graph import CollectiveKind
from hespas.graph.equality import workloads_equal
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

HEAD = Attention(heads=2, kv_heads=1, head_dim=8)


def seen(seq: int, window: int, chunk: int) -> int:
    """Pairs that a causal mask leaves, counted one by one."""
    query, key = np.mgrid[:seq, :seq]
    mask = key <= query
    if window:
        mask &= query - key < window
    if chunk:
        mask &= query // chunk == key // chunk
    return int(mask.sum())


@given(st.integers(1, 40), st.sampled_from([(0, 0), (1, 0), (7, 0), (64, 0), (0, 1), (0, 6), (0, 64)]))
def test_exact_attention_counts_the_pairs_of_the_mask(seq: int, limits: tuple[int, int]) -> None:
    block = replace(HEAD, window=limits[0], chunk=limits[1])
    flops = attention_flops(block, seq, Convention.EXACT)
    assert flops == 4 * 2 * 8 * seen(seq, *limits)


def test_conventions_count_half_and_all_of_the_square() -> None:
    assert attention_flops(HEAD, 100, Convention.HALF) == 4 * 2 * 8 * 100 * 100 / 2
    assert attention_flops(HEAD, 100, Convention.FULL) == 4 * 2 * 8 * 100 * 100
    window = replace(HEAD, window=10)
    assert attention_flops(window, 100, Convention.FULL) == 4 * 2 * 8 * 100 * 10
    assert attention_flops(window, 100, Convention.HALF) == 4 * 2 * 8 * (100 * 10 - 10 * 10 / 2)


def test_latent_attention_counts_both_of_its_head_sizes() -> None:
    block = LatentAttention(heads=2, q_lora=0, kv_lora=8, nope_dim=6, rope_dim=2, v_dim=4)
    assert attention_flops(block, 10, Convention.EXACT) == 2 * 2 * (8 + 4) * 55


def test_a_scan_counts_its_four_products() -> None:
    block = Mamba(heads=4, head_dim=8, state=16, groups=2, chunk=32)
    each = 2 * (2 * 32 * 16) + 2 * (4 * 8 * 32) + 2 * (4 * 8 * 16) + 2 * (4 * 8 * 16)
    assert attention_flops(block, 64) == 64 * each
    short = 2 * (2 * 8 * 16) + 2 * (4 * 8 * 8) + 4 * (4 * 8 * 16)
    assert attention_flops(block, 8) == 8 * short


def test_a_small_model_by_hand() -> None:
    """arXiv 2104.04473: 24 b s h^2 + 4 b s^2 h a layer forward, with half of the square."""
    attention = Attention(heads=4, kv_heads=4, head_dim=16)
    mlp = Mlp(ffn=256, gated=False, activation="gelu")
    small = Model(name="small", hidden=64, vocab=100, layers=((attention, mlp),) * 3)
    forward = 3 * (24 * 128 * 64**2 + 4 * 128**2 * 64 / 2) + 2 * 128 * 64 * 100
    assert forward_flops(small, 128) == forward
    assert model_flops(small, Training(seq=128, global_batch=5)) == 5 * 3 * forward
    adapters = Training(seq=128, global_batch=5, lora_rank=8)
    core = 3 * 4 * 128**2 * 64 / 2
    assert model_flops(small, adapters) == 5 * (2 * (forward - core) + 3 * core)


@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.name)
def test_parts_add_up(model: Model) -> None:
    parts = forward_parts(model, 256)
    assert 256 * sum(parts.values()) == pytest.approx(forward_flops(model, 256))
    assert min(parts.values()) > 0


def test_parts_are_named_and_independent_of_each_other() -> None:
    parts = forward_parts(MIXTURE, 256)
    layers, hidden = 4 + 1, 512
    assert parts["router"] == layers * 2 * hidden * 16
    assert parts["experts"] == layers * 2 * 2 * 3 * hidden * 256
    assert parts["shared experts"] == layers * 2 * 3 * hidden * 256
    assert parts["head"] == 2 * 2 * hidden * 1024
    assert parts["further predictions"] == 2 * 2 * hidden * hidden
    assert "feed-forward" not in parts
    latent = replace(MIXTURE, layers=((Experts(experts=4, topk=1, ffn=32, latent=64),),), mtp_layers=0)
    assert forward_parts(latent, 16)["latent projections"] == 2 * 2 * 512 * 64
    assert forward_parts(latent, 16)["experts"] == 2 * 3 * 64 * 32


# --- against graphs

OF_ALL = ("none", "selective", "full", "full:1", "qkv", "layernorm")
OF_MLP = ("mlp", "core_attn,mlp", "layernorm,mlp_act")
OF_EXPERTS = ("moe", "core_attn,moe", "layernorm,moe_act")
RECOMPUTES = [
    pytest.param(model, each, id=f"{model.name}-{each}")
    for model in MODELS
    for each in (*OF_ALL, *(OF_EXPERTS if model is MIXTURE else OF_MLP))
]


@pytest.mark.parametrize(("model", "recompute"), RECOMPUTES)
def test_hardware_flops_are_those_of_the_graph(model: Model, recompute: str) -> None:
    layout = Layout(pp=2, dp=2)
    settings = training(recompute=recompute_of(recompute))
    made = product_flops(step(model, layout, recompute=settings.recompute))
    assert made == pytest.approx(hardware_flops(model, settings, layout), rel=1e-9)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_second_matmul_is_computed_again_by_operation(tp: int) -> None:
    """The keys, the output projection (unless its sum over ranks is saved), and the second of two gates."""
    modules = frozenset({"layernorm", "mlp_act", "qkv"})
    again = Recompute(modules=modules, per_operation=True)
    settings, layout = training(recompute=again), Layout(tp=tp)
    made = product_flops(step(DENSE, layout, recompute=again))
    assert made == pytest.approx(hardware_flops(DENSE, settings, layout), rel=1e-9)
    attention, mlp = DENSE.layers[0]
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    heads = attention.kv_heads + (attention.heads if tp == 1 else 0)
    matrices = DENSE.hidden * (heads * attention.head_dim + mlp.ffn)
    extra = hardware_flops(DENSE, settings, layout) - hardware_flops(DENSE, training(), layout)
    tokens = settings.global_batch * settings.seq
    assert extra == pytest.approx(2.0 * tokens * matrices * len(DENSE.layers))


def test_layers_that_are_computed_again_are_the_first_of_each_stage() -> None:
    settings = training(recompute=Recompute(modules=frozenset({"block"}), layers=1))
    base = hardware_flops(DENSE, training())
    extra = hardware_flops(DENSE, settings) - base
    assert hardware_flops(DENSE, settings, Layout(pp=4)) - base == pytest.approx(4 * extra)
    every = training(recompute=Recompute(modules=frozenset({"block"}), every=2))
    assert hardware_flops(DENSE, every) - base == pytest.approx(4 * extra)


@pytest.mark.parametrize("recompute", ["mla_up_proj", "qkv"])
def test_projections_of_latent_attention_are_computed_again(recompute: str) -> None:
    settings = training(recompute=recompute_of(recompute))
    up = 8 * (192 * 48 + 64 * (32 + 32))
    down = 512 * (192 + 64 + 16) if recompute == "qkv" else 0
    extra = hardware_flops(MIXTURE, settings) - hardware_flops(MIXTURE, training())
    assert extra == pytest.approx(8 * 256 * 5 * 2 * (up + down))


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (DENSE, Layout(tp=2, dp=2)),
        (DENSE, Layout(tp=8)),
        (DENSE, Layout(tp=2, cp=2, pp=2, sequence_parallel=False)),
        (MIXTURE, Layout(tp=2, dp=2, ep=4, pp=2)),
        (HYBRID, Layout(tp=2, pp=2, dp=2)),
    ],
    ids=["tp2", "tp8", "tp2-cp2-pp2", "experts", "hybrid"],
)
def test_flops_of_ranks_are_those_of_the_graph(model: Model, layout: Layout) -> None:
    """Of a graph: forward products once, backward twice, of fused attention the scores once more."""
    forward = sum(rank_flops(model, layout, training())) * layout.ranks / layout.pp
    again = hardware_flops(model, training()) - model_flops(model, training(), Convention.EXACT)
    assert product_flops(step(model, layout)) == pytest.approx(3 * forward + again, rel=0.002)


@pytest.mark.parametrize(
    ("model", "layout", "settings"),
    [
        (DENSE, Layout(tp=8), {}),
        (replace(DENSE, vocab=1001), Layout(tp=4, dp=2), {}),
        (MIXTURE, Layout(ep=2, dp=4), {"capacity": 1.5}),
        (MIXTURE, Layout(tp=2, ep=4, dp=2), {"capacity": 1.25}),
    ],
    ids=["key-heads", "vocabulary", "capacity", "capacity-tp"],
)
def test_hardware_flops_count_padding_and_what_ranks_do_alike(
    model: Model, layout: Layout, settings: dict[str, Any]
) -> None:
    made = product_flops(step(model, layout, **settings))
    counted = hardware_flops(model, training(**settings), layout)
    assert made == pytest.approx(counted, rel=1e-6)
    assert counted > 1.00001 * hardware_flops(model, training())


def test_ranks_together_do_the_model_and_what_they_do_alike() -> None:
    whole = 8 * forward_flops(DENSE, 256, Convention.EXACT)
    one = sum(rank_flops(DENSE, Layout(tp=4, dp=2), training())) * 8
    assert one == pytest.approx(whole)
    alike = sum(rank_flops(DENSE, Layout(tp=8), training())) * 8 - whole
    assert alike == pytest.approx(
        8 * 256 * 8 * 2 * 512 * 64 * 2 * 4
    )  # four more key heads, of keys and values
    padded = replace(DENSE, vocab=1022)
    more = sum(rank_flops(padded, Layout(tp=4), training())) * 4 - 8 * forward_flops(
        padded, 256, Convention.EXACT
    )
    assert more == pytest.approx(8 * 256 * 2 * 512 * 2)


def test_capacity_pads_experts() -> None:
    base, padded = (sum(rank_flops(MIXTURE, Layout(), training(capacity=each))) for each in (0.0, 1.5))
    assert padded - base == pytest.approx(8 * 256 * 5 * 2 * 0.5 * 2 * 3 * 512 * 256)


def test_published_rates_of_large_models() -> None:
    """models.csv of the published runs: FLOPs of a million tokens at a length of 4,096."""
    for name, tflop in (("Llama-3-70B", 433116.4), ("DeepSeek-V3", 260641.7), ("Gemma-3-12B", 73157.1)):
        flops = model_flops(load_model(name), Training(seq=4096, global_batch=1))
        assert flops / 4096 * 1e6 / 1e12 == pytest.approx(tflop, rel=1e-4)


@pytest.mark.parametrize("recompute", ["none", "full", "moe"])
@pytest.mark.parametrize(
    "loads", [{"capacity": 1.5}, {"imbalance": 1.25}, {"capacity": 1.5, "imbalance": 2.0}], ids=str
)
def test_loads_of_experts_are_those_of_the_graph(loads: dict[str, Any], recompute: str) -> None:
    layout = Layout(dp=4, ep=4)
    chosen = training(recompute=recompute_of(recompute), **loads)
    made = product_flops(step(MIXTURE, layout, recompute=chosen.recompute, **loads))
    assert made == pytest.approx(hardware_flops(MIXTURE, chosen, layout), rel=1e-9)


def test_a_capacity_leaves_no_rank_busier() -> None:
    """Each expert works on all its capacity: in the graph, in what layers keep, in what ranks compute."""
    one, other = (training(capacity=1.5, imbalance=each) for each in (1.0, 3.0))
    layout = Layout(dp=4, ep=2, etp=2)
    first, second = (step(MIXTURE, layout, capacity=1.5, imbalance=each) for each in (1.0, 3.0))
    assert not workloads_equal(first, second)
    assert rank_flops(MIXTURE, layout, one) == rank_flops(MIXTURE, layout, other)
    assert memory_of(MIXTURE, layout, one) == memory_of(MIXTURE, layout, other)


def test_the_busiest_rank_computes_keeps_and_gathers_more() -> None:
    layout = Layout(dp=4, ep=2, etp=2)
    balanced, busy = (training(imbalance=each) for each in (1.0, 1.5))
    routed = 256 * 2 * 5
    assert sum(rank_flops(MIXTURE, layout, busy)) - sum(rank_flops(MIXTURE, layout, balanced)) == (
        2 * 0.5 * routed * 2 * 3 * 512 * 256
    )
    kept = [
        saved_of_layer(ModelRank(MIXTURE, layout, each), MIXTURE.layers[0], 0) for each in (balanced, busy)
    ]
    assert kept[1]["experts"] - kept[0]["experts"] == 0.5 * 2 * 256 * 2 * (2 * 512 + 2 * 3 * 128 + 4)
    graph = step(MIXTURE, layout, imbalance=1.5).classes[0]
    gathered = calls(graph, CollectiveKind.ALL_GATHER, RankGroups(layout).expert_tensor)
    assert set(gathered) == {1.5 * 256 * 2 * 512 * 2}


@pytest.mark.parametrize("lora_rank", [0, 8])
@pytest.mark.parametrize(
    ("model", "layout"),
    [(DENSE, Layout(tp=8)), (replace(DENSE, vocab=1022), Layout(tp=4)), (MIXTURE, Layout(tp=2, ep=2))],
    ids=["key-heads", "padded-head", "experts"],
)
def test_hardware_does_what_tensor_ranks_do_alike(model: Model, layout: Layout, lora_rank: int) -> None:
    made = product_flops(step(model, layout, lora_rank=lora_rank))
    assert made == pytest.approx(hardware_flops(model, training(lora_rank=lora_rank), layout), rel=1e-9)
