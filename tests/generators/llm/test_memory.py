"""Memory of ranks compared with closed forms, and invariants over layouts and settings."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.generators.llm.activations import saved_of_layer, whole_of_layer
from hespas.generators.llm.layout import Layout, broken_rules
from hespas.generators.llm.memory import StageMemory, memory_of
from hespas.generators.llm.model import Attention, Experts, LatentAttention, Mlp, Model, model_parameters
from hespas.generators.llm.rank import ModelRank
from hespas.generators.llm.settings import (
    SCHEDULES,
    Recompute,
    ScheduleName,
    Training,
    precision_of,
    recompute_of,
)
from hespas.generators.llm.step import LlmStep
from hespas.graph.errors import UsageError
from tests.generators.llm.small_models import DENSE, HYBRID, MIXTURE, MODELS, PLAIN, training

STATE = ("weights", "master weights", "optimizer moments", "gradients")
KEPT = ("norms and residuals", "attention", "mlp", "experts", "mamba", "layer inputs")
"""What layers keep."""


def only(model: Model, layout: Layout | None = None, **chosen: Any) -> StageMemory:
    """The memory of a rank of the only stage."""
    (found,) = memory_of(model, layout or Layout(), training(**chosen))
    return found


def state(memory: StageMemory) -> int:
    return sum(memory.parts.get(name, 0) for name in STATE)


def kept(model: Model, layout: Layout, place: int = 0, **chosen: Any) -> int:
    """Bytes that the first layer keeps."""
    rank = ModelRank(model, layout, training(**chosen))
    return sum(saved_of_layer(rank, model.layers[0], place).values())


# --- closed forms


@pytest.mark.parametrize(
    ("zero", "of_each"),
    [(0, 18.0), (1, 6 + 12 / 4), (2, 2 + 16 / 4), (3, 18 / 4)],
    ids=str,
)
def test_state_of_each_parameter(zero: int, of_each: float) -> None:
    """arXiv 1910.02054 with 32-bit gradients: 2 + 4 + 12 bytes, of which each level parts more."""
    memory = only(DENSE, Layout(dp=4, zero=zero))
    assert state(memory) == pytest.approx(of_each * model_parameters(DENSE), rel=1e-6)


def test_state_without_mixed_precision_and_in_16_bits_alone() -> None:
    count = model_parameters(DENSE)
    assert state(only(DENSE, Layout(zero=0), precision=precision_of("f32"))) == 16 * count
    assert state(only(DENSE, Layout(zero=0), pure_16bit=True)) == 8 * count


def test_offloaded_optimizer_leaves_weights_and_gradients() -> None:
    assert state(only(DENSE, Layout(zero=0), optimizer_offload=True)) == 6 * model_parameters(DENSE)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_layer_keeps_what_the_paper_counts(tp: int) -> None:
    """arXiv 2205.05198: s b h (34 + 5 a s / h) / t, less two dropout masks, a byte each, and scores, which
    fused attention does not keep; it keeps 4 bytes a query and head.
    """
    layout = Layout(tp=tp)
    tokens, hidden, heads = 2 * 256, PLAIN.hidden, 8
    expected = tokens * (32 * hidden + 4 * heads) // tp
    assert kept(PLAIN, layout, micro_batch=2) == expected


def test_without_sequence_parallelism_norms_are_kept_whole() -> None:
    """10 - 2 = 8 of the 32 bytes are outside of tensor-parallel regions."""
    tokens, hidden, heads = 256, PLAIN.hidden, 8
    expected = tokens * (8 * hidden + 24 * hidden // 4 + 4 * heads // 4)
    assert kept(PLAIN, Layout(tp=4, sequence_parallel=False)) == expected


def test_keys_repeat_where_there_are_fewer_than_ranks() -> None:
    few = replace(DENSE, layers=((Attention(heads=8, kv_heads=2, head_dim=64), Mlp(ffn=1536)),) * 8)
    tokens = 256
    whole, parted = kept(few, Layout()), kept(few, Layout(tp=8))
    assert 8 * parted - whole == tokens * 2 * 2 * 64 * (8 - 2)


def test_experts_keep_the_tokens_they_are_sent() -> None:
    """Each token ``topk`` times: its hidden values, the doubled width and the width of an expert, a
    probability.
    """
    block = MIXTURE.layers[0][1]
    assert isinstance(block, Experts)
    bare = replace(MIXTURE, layers=((MIXTURE.layers[0][0], replace(block, topk=block.topk + 1)),) * 4)
    each = 2 * (MIXTURE.hidden + 3 * block.ffn) + 4
    assert kept(bare, Layout(dp=4, ep=4)) - kept(MIXTURE, Layout(dp=4, ep=4)) == 256 * each


def test_capacity_bounds_what_experts_are_sent() -> None:
    usual, double = (kept(MIXTURE, Layout(dp=2, ep=2), capacity=factor) for factor in (1.0, 2.0))
    block = MIXTURE.layers[0][1]
    assert isinstance(block, Experts)
    assert double - usual == 256 * block.topk * (2 * (MIXTURE.hidden + 3 * block.ffn) + 4)


def test_eight_bit_products_keep_half_of_their_inputs() -> None:
    """Of the 32 bytes, 2 are the input of each of both column-parallel products, 8 that of the last."""
    wide, narrow = (kept(PLAIN, Layout(), precision=precision_of(name)) for name in ("bf16", "fp8-current"))
    assert wide - narrow == 256 * PLAIN.hidden * (1 + 1 + 4)


def test_context_ranks_that_exchange_heads_keep_results_twice() -> None:
    layout = Layout(cp=2)
    twice = kept(PLAIN, replace(layout, context_all_to_all=True)) - kept(PLAIN, layout)
    assert twice == 128 * PLAIN.hidden * 2


def test_layers_that_are_computed_again_keep_their_input() -> None:
    assert kept(DENSE, Layout(), recompute=recompute_of("full")) == 256 * DENSE.hidden * 2


@pytest.mark.parametrize("names", ["core_attn", "layernorm", "mlp_act", "mlp", "qkv", "layernorm,mlp_act"])
def test_modules_that_are_computed_again_are_not_kept(names: str) -> None:
    assert kept(DENSE, Layout(), recompute=recompute_of(names)) < kept(DENSE, Layout())


@pytest.mark.parametrize("names", ["moe", "moe_act", "mla_up_proj"])
def test_modules_of_mixtures_that_are_computed_again(names: str) -> None:
    assert kept(MIXTURE, Layout(), recompute=recompute_of(names)) < kept(MIXTURE, Layout())


def test_only_the_first_layers_are_computed_again() -> None:
    again = recompute_of("full:2")
    assert kept(DENSE, Layout(), 1, recompute=again) < kept(DENSE, Layout(), 2, recompute=again)


def test_what_is_offloaded_is_not_kept() -> None:
    away = Recompute(offloaded=frozenset({"mlp"}))
    assert kept(DENSE, Layout(), recompute=away) == kept(DENSE, Layout()) - 256 * 3 * 1536 * 2
    everything = Recompute(offloaded=frozenset({"block"}), layers=2)
    assert [kept(DENSE, Layout(), place, recompute=everything) for place in (1, 2)] == [
        0, kept(DENSE, Layout())
    ]  # fmt: skip
    inputs = Recompute(modules=frozenset({"block"}), offloaded=frozenset({"decoder_layer_input"}))
    assert kept(DENSE, Layout(), recompute=inputs) == 0


def test_every_other_product_is_kept_by_operation() -> None:
    """Its input, queries, values, results of attention, the first of three feed-forward products."""
    again = Recompute(per_operation=True)
    head, wide = 8 * 64, 4 * 64
    expected = 256 * (2 * (DENSE.hidden + head + wide + head + 1536) + 4 * 8)
    assert kept(DENSE, Layout(), recompute=again, style="torchtitan") == expected
    uncompiled = kept(DENSE, Layout(), recompute=again, style="torchtitan", compiled=False)
    assert uncompiled == expected + 256 * 2 * DENSE.hidden
    summed = 2 * 64 * DENSE.hidden
    parted = kept(DENSE, Layout(tp=4), recompute=again, style="torchtitan")
    assert parted == expected // 4 + summed


# --- schedules


def in_flight(schedule: ScheduleName, stage: int, micro_batches: int, pp: int = 4) -> float:
    """Passes whose values a stage holds at its fullest moment, in passes of one micro-batch."""
    layout = Layout(pp=pp)
    chosen = training(global_batch=micro_batches, schedule=schedule)
    memory = memory_of(DENSE, layout, chosen)[stage]
    layers = 8 // pp
    one = layers * sum(whole_of_layer(ModelRank(DENSE, layout, chosen), DENSE.layers[0]).values())
    return sum(memory.parts.get(name, 0) for name in KEPT) / one


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_micro_batches_in_flight(stage: int) -> None:
    assert in_flight("gpipe", stage, 8) == 8
    assert in_flight("1f1b", stage, 8) == 4 - stage
    assert in_flight("1f1b", stage, 1) == 1


def test_zero_bubble_holds_no_more_than_the_stages() -> None:
    assert max(in_flight("zero-bubble", stage, 12) for stage in range(3)) <= 4


def test_interleaved_stages_hold_more_chunks() -> None:
    """The first of p stages of v chunks: 2 (p - 1) + (v - 1) p + 1 passes of a chunk (arXiv 2104.04473)."""
    layout, chosen = Layout(pp=2, vp=2), training(global_batch=8, schedule="interleaved")
    memory = memory_of(DENSE, layout, chosen)[0]
    chunk = 2 * sum(whole_of_layer(ModelRank(DENSE, layout, chosen), DENSE.layers[0]).values())
    assert sum(memory.parts.get(name, 0) for name in KEPT) == 5 * chunk


def test_the_last_stage_alone_holds_logits() -> None:
    first, last = memory_of(replace(DENSE, vocab=2**17), Layout(pp=2), training())
    assert "logits and loss" not in first.parts
    assert last.parts["logits and loss"] == 256 * 2**17 * 2


# --- the end of the model


@pytest.mark.parametrize(
    ("style", "fused", "of_each"),
    [("megatron", True, 2), ("megatron", False, 10), ("torchtitan", False, 12), ("torchtitan", True, 4)],
)
def test_bytes_of_a_logit(style: str, fused: bool, of_each: int) -> None:
    wide = replace(DENSE, vocab=2**17)
    memory = only(wide, micro_batch=4, style=style, fused_loss=fused)
    assert memory.parts["logits and loss"] == of_each * 1024 * 2**17


def test_further_predictions_have_logits_of_their_own() -> None:
    wide = replace(MIXTURE, vocab=2**17)
    with_one, without = (only(replace(wide, mtp_layers=count), micro_batch=4) for count in (1, 0))
    assert with_one.parts["logits and loss"] == 2 * without.parts["logits and loss"]


def test_a_tied_head_is_there_once_on_one_stage_and_twice_on_two() -> None:
    table = PLAIN.vocab * PLAIN.hidden
    untied = replace(PLAIN, tied=False)
    assert only(untied).parts["weights"] - only(PLAIN).parts["weights"] == 2 * table
    pipeline = [memory_of(each, Layout(pp=2), training()) for each in (PLAIN, untied)]
    assert [each.parts["weights"] for each in pipeline[0]] == [each.parts["weights"] for each in pipeline[1]]


# --- sharded weights, frozen weights, narrow weights


def test_sharded_weights_are_gathered_with_the_next_ones() -> None:
    memory = only(DENSE, Layout(dp=8, zero=3), style="torchtitan", recompute=recompute_of("full"))
    assert memory.parts["gathered weights"] > 0
    assert memory.reserved_bytes > memory.peak_bytes
    for unknown in (Layout(dp=8, zero=3), Layout(dp=8, zero=2)):
        assert math.isnan(only(DENSE, unknown).reserved_bytes)


def test_the_allocator_has_unused_parts_that_the_device_does_not_need() -> None:
    memory = only(DENSE)
    assert memory.reserved_bytes == pytest.approx(1.05 * memory.peak_bytes, rel=1e-9)
    assert memory.device_bytes == memory.peak_bytes + 400 * 10**6  # one rank has no communicator
    reserved = {part.what for part in memory.filling if part.counted_as == "reserved"}
    assert reserved == {"unused parts of blocks"}


MIB = 2**20


@pytest.mark.parametrize(
    ("layout", "mib"),
    [
        (Layout(dp=2), 544),
        (Layout(dp=8), 688),
        (Layout(tp=2, dp=4), 544 + 688 + 688),  # tensor ranks, data ranks, all ranks
        (Layout(cp=4), 688 + 688),  # ranks that gather keys, and the same ranks for gradients
        (Layout(cp=4, context_all_to_all=True), 688 + 3 * 384),
        (Layout(cp=4, ring_attention=True), 688 + 2 * 384),
    ],
)
def test_each_process_group_has_buffers(layout: Layout, mib: int) -> None:
    assert only(DENSE, layout).outside["communication library"] == mib * MIB
    assert not only(DENSE, layout, style="maxtext").outside


def test_messages_to_experts_have_buffers_per_rank_of_the_node() -> None:
    buffers = [
        only(MIXTURE, Layout(dp=16, ep=ep), global_batch=16).outside["communication library"]
        for ep in (4, 8, 16)
    ]
    # ranks of one expert replica reduce gradients of experts together
    assert buffers == [(688 + 688 + 3 * 384) * MIB, (688 + 544 + 7 * 384) * MIB, (688 + 7 * 384) * MIB]


def test_hybrid_shards_hold_more_than_full_ones() -> None:
    full, hybrid = (only(DENSE, Layout(dp=8, zero=3, shard=shard), style="torchtitan") for shard in (0, 2))
    assert hybrid.parts["weights"] == 4 * full.parts["weights"]


def test_adapters_alone_have_a_state() -> None:
    memory = only(DENSE, Layout(zero=0), lora_rank=8)
    count = model_parameters(DENSE)
    adapters = 8 * 8 * (512 + 1024 + 512 + 512 + 512 + 3072 + 1536 + 512)
    assert memory.parts["weights"] == 2 * (count + adapters)
    assert memory.parts["optimizer moments"] == 8 * adapters
    assert "gradient placeholders" not in memory.parts


def test_layers_without_adapters_do_not_keep_inputs_of_products() -> None:
    every, some = (kept(DENSE, Layout(), lora_rank=8, lora_attention_only=only) for only in (False, True))
    assert every - some == 256 * 2 * (DENSE.hidden + 1536)


def test_narrow_weights() -> None:
    """fp8: a byte, twice where transposed ones are kept; block formats of rows always; fp4 beside 16 bits."""
    matrices = 8 * (512 * 64 * (2 * 8 + 2 * 4) + 3 * 512 * 1536)
    wide = only(DENSE).parts["weights"]

    def grown(name: str, **chosen: Any) -> float:
        return (only(DENSE, precision=precision_of(name), **chosen).parts["weights"] - wide) / matrices

    assert grown("fp8-current") == 0
    assert grown("fp8-current", transposed_weights=False) == -1
    assert grown("fp8-current", narrow_weights=False) == 2
    assert grown("mxfp8", transposed_weights=False) == pytest.approx(2 / 32)
    assert grown("nvfp4") == pytest.approx(2 * (0.5 + 1 / 16))


# --- properties


LAYOUTS = st.builds(
    Layout,
    dp=st.sampled_from((1, 2, 4)),
    tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 2, 4)),
    cp=st.sampled_from((1, 2)),
    ep=st.sampled_from((1, 2)),
    zero=st.sampled_from((0, 1, 2, 3)),
)


def valid(model: Model, layout: Layout, chosen: Training) -> bool:
    return not list(broken_rules(model, layout, chosen))


@settings(max_examples=60)
@given(st.sampled_from(MODELS), LAYOUTS, st.sampled_from(SCHEDULES))
def test_any_layout_has_a_memory(model: Model, layout: Layout, schedule: ScheduleName) -> None:
    chosen = training(global_batch=16, schedule=schedule)
    if not valid(model, layout, chosen):
        return
    found = memory_of(model, layout, chosen)
    assert [each.stage for each in found] == list(range(layout.pp))
    for each in found:
        assert all(size > 0 for size in each.parts.values())
        sizes: Counter[str] = Counter()
        for part in each.filling:
            sizes[part.counted_as] += round(part.size_bytes)
        assert each.peak_bytes == sizes["allocated"]
        assert not each.reserved_bytes < each.peak_bytes
        assert sizes["device"] >= 400 * 10**6
        assert each.peak_bytes + sizes["device"] <= each.device_bytes <= sizes.total()
        assert each == memory_of(model, layout, chosen)[each.stage]


@settings(max_examples=40)
@given(st.sampled_from(MODELS), LAYOUTS)
def test_what_saves_memory_never_costs_state(model: Model, layout: Layout) -> None:
    """More levels of ZeRO never grow the state of a rank; full recomputation never grows what is kept."""
    chosen = training(global_batch=16)
    if not valid(model, layout, chosen):
        return
    states = [
        max(state(each) for each in memory_of(model, replace(layout, zero=zero), chosen)) for zero in range(4)
    ]
    assert states == sorted(states, reverse=True)
    again = replace(chosen, recompute=recompute_of("full"))
    for less, more in zip(memory_of(model, layout, again), memory_of(model, layout, chosen), strict=True):
        assert less.peak_bytes <= more.peak_bytes


@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.name)
def test_more_micro_batches_do_not_grow_1f1b(model: Model) -> None:
    few, many = (memory_of(model, Layout(pp=2), training(global_batch=count)) for count in (4, 64))
    assert [each.peak_bytes for each in few] == [each.peak_bytes for each in many]


def test_kinds_of_layers_are_named() -> None:
    assert {"mamba", "attention", "mlp"} <= set(only(HYBRID).parts)
    assert "experts" in only(MIXTURE).parts


def test_latent_attention_keeps_latents_and_what_it_projects_up() -> None:
    block = MIXTURE.layers[0][0]
    assert isinstance(block, LatentAttention)
    rank = ModelRank(MIXTURE, Layout(), training())
    latents = 2 * block.q_lora + 2 * block.kv_lora + block.rope_dim
    up = 8 * (2 * block.head_dim + 2 * block.v_dim)
    assert saved_of_layer(rank, MIXTURE.layers[0], 0)["attention"] == 256 * (2 * (latents + up) + 4 * 8)


def test_a_stage_whose_first_chunk_is_the_embedding_alone() -> None:
    """Four layers, the embedding and the head are six places of three stages of two chunks."""
    four = replace(DENSE, layers=DENSE.layers[:4])
    layout = Layout(pp=3, vp=2, embedding_counts=True, head_counts=True)
    chosen = training(global_batch=6, schedule="interleaved")
    assert valid(four, layout, chosen)
    first, inner, last = (each.parts["weights"] for each in memory_of(four, layout, chosen))
    assert first + inner + last == 2 * model_parameters(four)
    assert first < inner


def test_an_account_says_what_fills_the_memory() -> None:
    step = LlmStep(model=DENSE, layout=Layout(dp=2, pp=2), training=training())
    account = step.account()
    fullest = max(memory_of(DENSE, step.layout, step.training), key=lambda each: each.peak_bytes)
    assert account.peak_memory_bytes == fullest.peak_bytes
    assert account.memory == fullest.filling
    assert account.device_memory_bytes == fullest.device_bytes > account.peak_memory_bytes
    with pytest.raises(UsageError, match="tensor ranks"):
        replace(step, layout=Layout(tp=3)).account()


def test_fsdp_in_a_pipeline_keeps_weights_and_gradients_whole() -> None:
    settings = training(style="torchtitan", global_batch=64)
    one, *_ = memory_of(DENSE, Layout(dp=8, pp=2, zero=3), settings)
    weights = one.parts["gathered weights"]  # in bf16
    assert one.parts["gradients"] == 2 * weights  # in f32
    whole = model_parameters(DENSE) / 2
    assert weights == pytest.approx(2 * whole, rel=0.1)


@settings(max_examples=40)
@given(
    st.sampled_from(MODELS),
    LAYOUTS,
    st.sampled_from(("torchtitan", "maxtext", "megatron")),
    st.sampled_from(("f32", "bf16")),
    st.sampled_from(("none", "full")),
)
def test_more_micro_batches_never_need_less_device_memory(
    model: Model, layout: Layout, style: Any, gradient: str, recompute: str
) -> None:
    """The account counts gradients once: in the passes, in the optimizer step or in the pool of FSDP."""
    sizes: list[int] = []
    for count in (1, 2, 3):
        chosen = training(
            style=style,
            global_batch=count * layout.dp,
            seq=16,
            recompute=recompute_of(recompute),
            precision=replace(training().precision, gradient=gradient),
        )
        if not valid(model, layout, chosen):
            return
        sizes.append(max(each.device_bytes for each in memory_of(model, layout, chosen)))
    assert sizes == sorted(sizes)


def test_one_micro_batch_of_fsdp_in_a_pipeline_counts_whole_gradients_once() -> None:
    """Gradients are reduced after the only backward pass: until then a rank has the gathered weights and the
    whole gradients. The shards of the gradients are in no pool.
    """
    one = training(style="torchtitan", global_batch=8, micro_batch=1, seq=8, recompute=recompute_of("full"))
    found = memory_of(DENSE, Layout(dp=8, pp=2, zero=3), one)[0]
    assert found.moment == "reduction of gradients"
    assert found.parts["gradients"] == 2 * found.parts["gathered weights"]  # in f32, and in bf16
    assert found.pooled is not None
    assert found.pooled["pool of reductions"] < found.parts["gradients"] / 2


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("seq", [8, 512])
def test_one_micro_batch_of_fsdp_in_a_pipeline_has_gradients_of_finished_layers(
    recompute: str, seq: int
) -> None:
    """The last stage runs one micro-batch at a time. The peaks of one and of two micro-batches differ at most
    by the gradients of the layers whose backward pass follows the peak.
    """
    one, two = (
        memory_of(
            DENSE,
            Layout(dp=8, pp=2, zero=3),
            training(
                style="torchtitan", global_batch=8 * count, micro_batch=1, seq=seq,
                recompute=recompute_of(recompute),
            ),
        )[1]
        for count in (1, 2)
    )  # fmt: skip
    whole = two.parts["gradients"]
    assert 0 < two.peak_bytes - one.peak_bytes <= whole
    kept_bytes = sum(one.parts[name] for name in ("weights", "optimizer moments", "gathered weights"))
    assert one.peak_bytes > kept_bytes + whole
    assert one.parts["gathered weights"] == two.parts["gathered weights"] == whole / 2
