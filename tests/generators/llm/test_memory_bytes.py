"""Every byte of the memory of small models, counted by hand.

The model has 2 layers of width 64: 4 query heads and 2 key heads of 16, and gated feed-forward of 96. Its
parameters: 128 of norms, 64 x (64 + 2 x 32) and 64 x 64 of attention, 3 x 64 x 96 of the feed-forward, and
tables of 500 x 64. Bytes of an activation follow arXiv 2205.05198, section 4.1, with fused attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.memory import StageMemory, memory_of
from hespas.generators.llm.model import Attention, Experts, Mlp, Model
from hespas.generators.llm.settings import Overlap, precision_of, recompute_of
from tests.generators.llm.small_models import training

HIDDEN, WIDE, VOCAB = 64, 96, 500
ATTENTION = 64 * (64 + 2 * 32) + 64 * 64
LAYER = 2 * 64 + ATTENTION + 3 * 64 * WIDE
TABLE = VOCAB * HIDDEN
REST = 2 * TABLE + 64
COUNT = 2 * LAYER + REST
BLOCKS = Attention(heads=4, kv_heads=2, head_dim=16), Mlp(ffn=WIDE)
TINY = Model(name="tiny", hidden=HIDDEN, vocab=VOCAB, layers=(BLOCKS,) * 2)
LAYERED = replace(TINY, vocab=16, layers=(BLOCKS,) * 3)
"""Three layers, whose passes need more than the loss of a small vocabulary."""
LIBRARY = 32 * 2**20
"""Workspace of a matrix library."""


def saved(tokens: int, layers: int = 1) -> dict[str, int]:
    """Bytes that layers save: inputs and results of two norms, queries, keys, values, results of attention,
    a 32-bit number per query and head, three tensors of the feed-forward.
    """
    each = {
        "norms and residuals": 2 * 4 * HIDDEN,
        "attention": 2 * (64 + 2 * 32 + 64) + 4 * 4,
        "mlp": 2 * 3 * WIDE,
    }
    return {name: layers * tokens * size for name, size in each.items()}


def stream(tokens: int) -> int:
    """Bytes of the residual stream."""
    return 2 * HIDDEN * tokens


def added(*parts: dict[str, int]) -> dict[str, int]:
    return {name: sum(part.get(name, 0) for part in parts) for part in parts for name in part}


def peak(model: Model, layout: Layout, stage: int = 0, *, seq: int = 32, **chosen: Any) -> StageMemory:
    """The memory of a stage, with one micro-batch of a sequence of 32 tokens as the default."""
    return memory_of(model, layout, training(seq, **{"global_batch": layout.dp, **chosen}))[stage]


def state(count: int, *, shards: int = 1) -> dict[str, int]:
    """Weights and optimizer of mixed precision in Megatron-Core: 2, 4 and 8 bytes, and 32-bit gradients."""
    return {
        "weights": 2 * count,
        "master weights": 4 * count // shards,
        "optimizer moments": 8 * count // shards,
        "gradients": 4 * count,
        "workspaces": 3 * LIBRARY,
        "gradient placeholders": 2 * (64 * 128 + 64 * 64 + 64 * 2 * WIDE + WIDE * 64),
    }


# --- Megatron-Core


@pytest.mark.parametrize("dp", [1, 2])
def test_backward_pass_of_the_head(dp: int) -> None:
    """The logits are there, their product writes the gradient of the stream; ZeRO-1 shards 12 bytes."""
    memory = peak(TINY, Layout(dp=dp))
    assert memory.moment == "backward pass of the head"
    assert memory.parts == added(
        state(COUNT, shards=dp),
        saved(32, 2),
        {"norms and residuals": 2 * stream(32), "logits and loss": 2 * 32 * VOCAB},
        {"working space": stream(32), "token numbers and masks": 32 * 32},
        {"gradient placeholders": 2 * TABLE},
    )


def test_loss_in_32_bits() -> None:
    """16-bit logits, a 32-bit copy and a copy of it: 10 bytes each."""
    memory = peak(TINY, Layout(), fused_loss=False)
    assert memory.moment == "gradient of the loss"
    assert memory.parts["logits and loss"] == 10 * 32 * VOCAB
    assert memory.parts["norms and residuals"] == 2 * 32 * (2 * 4 + 2) * HIDDEN
    assert "working space" not in memory.parts


@pytest.mark.parametrize(("schedule", "waiting"), [("1f1b", 1), ("zero-bubble", 1), ("gpipe", 3)])
def test_first_stage_of_two(schedule: str, waiting: int) -> None:
    """Beside the running backward pass, other micro-batches wait. Its working space is the gradient of the
    stream and the gradients of both halves of the gated input; the gradient of the result replaces it.
    """
    memory = peak(TINY, Layout(pp=2), global_batch=4, seq=64, schedule=schedule)
    assert memory.moment == "backward pass of a layer"
    assert memory.parts == added(
        state(LAYER + TABLE),
        saved(64, waiting + 1),
        {"working space": stream(64) + 2 * 64 * 2 * WIDE, "token numbers and masks": 32 * 64},
        {"communication buffers": stream(64)},
    )


@pytest.mark.parametrize(("schedule", "waiting"), [("1f1b", 0), ("zero-bubble", 1), ("gpipe", 3)])
def test_last_stage_of_two(schedule: str, waiting: int) -> None:
    """Each waiting micro-batch holds its logits too, and the input and result of the last norm. With zero
    bubble (arXiv 2401.10241) the first one waits for its gradient of weights.
    """
    memory = peak(TINY, Layout(pp=2), stage=1, global_batch=4, schedule=schedule)
    assert memory.moment == "backward pass of the head"
    loss = {"norms and residuals": 2 * stream(32), "logits and loss": 2 * 32 * VOCAB}
    assert memory.parts == added(
        state(LAYER + TABLE + 64),
        saved(32, waiting + 1),
        *[loss] * (waiting + 1),
        {"working space": stream(32), "token numbers and masks": 32 * 32},
        {"communication buffers": stream(32), "gradient placeholders": 2 * TABLE},
    )


def test_waiting_micro_batches_hold_32_bit_losses() -> None:
    """A micro-batch between its passes holds 4 bytes of each logit without fusion: GPipe, 3 of them wait."""
    memory = peak(TINY, Layout(pp=2), stage=1, global_batch=4, schedule="gpipe", fused_loss=False)
    assert memory.parts["logits and loss"] == (3 * 4 + 10) * 32 * VOCAB


def test_inner_stage_has_no_tokens() -> None:
    model = replace(TINY, layers=(BLOCKS,) * 3)
    first, inner, last = (peak(model, Layout(pp=3), stage, global_batch=3) for stage in range(3))
    assert "token numbers and masks" not in inner.parts
    assert first.parts["token numbers and masks"] == last.parts["token numbers and masks"] == 32 * 32
    assert inner.parts["weights"] == 2 * LAYER
    assert inner.parts["gradient placeholders"] == 2 * (LAYER - 2 * 64)


def test_sequence_parallel_ranks() -> None:
    """Half of the matrices and of the activations. The gradient of the stream exists whole, then in part; a
    buffer holds the gathered stream.
    """
    memory = peak(TINY, Layout(tp=2))
    assert memory.moment == "backward pass of the head"
    assert memory.parts["weights"] == 2 * (2 * (128 + (LAYER - 128) // 2) + TABLE + 64)
    assert memory.parts["norms and residuals"] == (2 * 4 + 2) * stream(16)
    assert memory.parts["logits and loss"] == 2 * 32 * VOCAB // 2
    assert memory.parts["working space"] == stream(32) + stream(16)
    assert memory.parts["communication buffers"] == stream(32)
    matrices = 64 * 64 + 32 * 64 + 64 * WIDE + WIDE // 2 * 64 + VOCAB // 2 * 64
    assert memory.parts["gradient placeholders"] == 2 * matrices


def test_tensor_parallel_ranks_without_sequence_parallelism() -> None:
    memory = peak(TINY, Layout(tp=2, sequence_parallel=False))
    assert memory.parts["norms and residuals"] == (2 * 4 + 2) * stream(32)
    assert memory.parts["working space"] == stream(32)
    assert "communication buffers" not in memory.parts


def test_a_vocabulary_that_ranks_do_not_divide_is_padded() -> None:
    """501 words on 2 ranks are 251 rows each."""
    model, layout = replace(TINY, vocab=501), Layout(tp=2)
    memory = peak(model, layout)
    assert memory.parts["logits and loss"] == 2 * 32 * 251
    even = peak(TINY, layout).parts["gradient placeholders"]
    assert memory.parts["gradient placeholders"] == even + 2 * HIDDEN
    torch = fsdp(model, layout, style="maxtext")
    assert torch.moment == "backward pass of the head"
    assert torch.parts["gradients before they are reduced"] == 2 * 251 * HIDDEN
    embedding = peak(replace(TINY, vocab=4097), layout, seq=8)
    assert embedding.moment == "gradient of the embedding"
    assert embedding.parts["gradients before they are reduced"] == 2 * 2049 * HIDDEN


def test_gradient_of_a_large_embedding() -> None:
    """With fewer tokens than the width, the gradient of the table is larger than the logits. No layer's
    activations are left.
    """
    memory = peak(replace(TINY, vocab=4096), Layout(), seq=8)
    assert memory.moment == "gradient of the embedding"
    assert memory.parts["gradients before they are reduced"] == 2 * 4096 * HIDDEN
    assert not set(saved(8)) & set(memory.parts)


def test_gradient_of_the_embedding_of_multi_token_prediction() -> None:
    """The further layer embeds tokens again, while the first two layers still hold their activations. Its
    projection of 2 x 64 to 64 and its three norms belong to the weights outside of layers.
    """
    memory = peak(replace(TINY, vocab=4096, mtp_layers=1), Layout(), seq=8)
    table = 4096 * HIDDEN
    assert memory.moment == "gradient of the embedding"
    count = 3 * LAYER + 2 * table + (1 + 3) * 64 + 2 * 64 * 64
    assert memory.parts == added(
        state(count),
        saved(8, 2),
        {"gradients before they are reduced": 2 * table, "token numbers and masks": 32 * 8},
        {"gradient placeholders": 2 * (table + 64 * 128)},
    )


def test_logits_of_multi_token_prediction() -> None:
    """Two heads, and four norms after the layers: the last one, and three of the further prediction."""
    memory = peak(replace(TINY, mtp_layers=1), Layout(), seq=256)
    assert memory.moment == "backward pass of the head"
    assert memory.parts["logits and loss"] == 2 * 2 * 256 * VOCAB
    assert memory.parts["norms and residuals"] == (3 * 4 + 2 * 4) * stream(256)


def test_recomputed_layers() -> None:
    """Of three layers, two hold their input, and the running one all activations again."""
    memory = peak(LAYERED, Layout(), seq=256, recompute=recompute_of("full"))
    assert memory.moment == "backward pass of a layer"
    assert memory.parts["layer inputs"] == 2 * stream(256)
    assert {name: memory.parts[name] for name in saved(256)} == saved(256)


def test_forward_pass_of_experts() -> None:
    """Tokens as sent, as received and by expert, the results before the return, and two sums: with a narrow
    feed-forward this is more than the gradients of the backward pass.
    """
    block = Experts(experts=8, topk=2, ffn=16)
    model = Model(name="experts", hidden=HIDDEN, vocab=16, layers=((BLOCKS[0], block),) * 4)
    memory = peak(model, Layout(dp=2, ep=2, pp=2), global_batch=8)
    assert memory.moment == "forward pass of a layer"
    assert memory.parts["working space"] == (1 + 2 + 1) * 2 * stream(32) + 2 * stream(32)
    layers = 2 + 2  # two of the running micro-batch, and two of the waiting one
    assert memory.parts["norms and residuals"] == layers * 4 * stream(32)
    received = 2 * 64 * 2 + 2 * 4
    assert memory.parts["experts"] == layers * 32 * (13 * 8 + received + 2 * 2 * 3 * 16)
    assert memory.parts["workspaces"] == 7 * LIBRARY


# --- weights in narrow formats


def _eight_bit(layout: Layout, **chosen: Any) -> int:
    model = replace(TINY, layers=((BLOCKS[0], Experts(experts=4, topk=2, ffn=16)),))
    return peak(model, layout, precision=precision_of("fp8-current"), **chosen).parts["weights"]


def test_eight_bit_weights_of_experts() -> None:
    """Matrices exist twice in 8 bits, the rest in 16. Each expert-parallel rank has half of the experts."""
    dense, expert = 2 * ATTENTION, 2 * 3 * 64 * 16
    rest = 2 * (2 * 64 + 64 * 4 + REST)
    assert _eight_bit(Layout()) == rest + dense + 4 * expert
    assert _eight_bit(Layout(dp=2, ep=2)) == rest + dense + 2 * expert
    assert _eight_bit(Layout(), transposed_weights=False) == rest + (dense + 4 * expert) // 2
    once = rest + (dense + 2 * expert) // 2
    assert _eight_bit(Layout(dp=2, ep=2), transposed_weights=False) == once
    assert _eight_bit(Layout(), narrow_weights=False) == rest + 2 * (dense + 4 * expert)


def test_eight_bit_weights_that_are_sharded() -> None:
    """ZeRO-3 over 4 ranks shards dense weights in 4; two ranks have the same experts."""
    dense = 2 * ATTENTION + 2 * (2 * 64 + 64 * 4 + REST)
    assert _eight_bit(Layout(dp=4, ep=2, zero=3)) == dense // 4 + 2 * 2 * 3 * 64 * 16 // 2


def test_placeholders_of_sharded_and_frozen_weights() -> None:
    """Transformer Engine needs them for weights that are whole and trained."""
    assert "gradient placeholders" not in peak(TINY, Layout(dp=2, zero=3)).parts
    assert "gradient placeholders" not in peak(TINY, Layout(), lora_rank=4).parts


# --- PyTorch


def fsdp(model: Model, layout: Layout, *, seq: int = 256, **chosen: Any) -> StageMemory:
    """The memory of the only stage in PyTorch."""
    return peak(model, layout, 0, seq=seq, **{"style": "torchtitan", **chosen})


def test_optimizer_step() -> None:
    """With few tokens the gradients need more than all activations: 4 + 4 + 8 bytes of each parameter."""
    memory = fsdp(TINY, Layout(), seq=32)
    assert memory.moment == "optimizer step"
    assert memory.parts == {
        "weights": 4 * COUNT, "gradients": 4 * COUNT, "optimizer moments": 8 * COUNT,
        "workspaces": LIBRARY, "token numbers and masks": 32 * 32,
    }  # fmt: skip


def test_gradients_accumulate_over_micro_batches() -> None:
    """With one micro-batch, the gradients are not complete before the activations are gone."""
    one, two = (fsdp(TINY, Layout(), global_batch=count) for count in (1, 2))
    assert "gradients" not in one.parts
    assert two.parts == {**one.parts, "gradients": 4 * COUNT}


@pytest.mark.parametrize(("fused", "logit"), [(True, 4), (False, 12)])
def test_sharded_weights_at_the_loss(fused: bool, logit: int) -> None:
    """ZeRO-3 over 4 ranks: the head and the last layer are gathered."""
    memory = fsdp(TINY, Layout(dp=4, zero=3), fused_loss=fused)
    assert memory.moment == "gradient of the loss"
    assert memory.parts == added(
        saved(256, 2),
        {"weights": COUNT, "optimizer moments": 2 * COUNT, "workspaces": LIBRARY},
        {"norms and residuals": 2 * stream(256), "logits and loss": logit * 256 * VOCAB},
        {"gathered weights": 2 * (REST + LAYER), "token numbers and masks": 32 * 256},
    )
    assert memory.pooled == {
        "pool of gathers": 2 * REST,
        "pool of reductions": 4 * REST + COUNT,
        "room of 16-bit logits": 0 if fused else 2 * 256 * VOCAB,
    }


def test_pool_of_reductions_has_no_shards_while_gradients_accumulate() -> None:
    memory = fsdp(TINY, Layout(dp=4, zero=3), global_batch=8)
    assert memory.pooled is not None
    assert memory.pooled["pool of reductions"] == 4 * REST
    assert memory.parts["gradients"] == COUNT
    assert memory.reserved_bytes == memory.peak_bytes + 2 * REST + 4 * REST


@pytest.mark.parametrize("ahead", [True, False])
def test_sharded_weights_in_the_backward_pass(ahead: bool) -> None:
    """At the last of three layers: weights outside of layers, the layer, and the one before if it is gathered
    ahead; gradients of the layer and of the head.
    """
    memory = fsdp(LAYERED, Layout(dp=4, zero=3), overlap=Overlap() if ahead else Overlap.none())
    table = 16 * HIDDEN
    assert memory.moment == "backward pass of a layer"
    assert memory.parts == added(
        saved(256, 3),
        {"weights": 3 * LAYER + 2 * table + 64, "optimizer moments": 2 * (3 * LAYER + 2 * table + 64)},
        {"workspaces": LIBRARY, "token numbers and masks": 32 * 256},
        {"gathered weights": 2 * (2 * table + 64 + (2 if ahead else 1) * LAYER)},
        {"gradients before they are reduced": 2 * (LAYER + table)},
        {"working space": stream(256) + 2 * 256 * 2 * WIDE},
    )


def test_the_layer_that_is_gathered_ahead() -> None:
    """Behind the last layer of four runs the third; the second has attention alone."""
    model = replace(LAYERED, layers=(BLOCKS, BLOCKS[:1], BLOCKS, BLOCKS))
    memory = fsdp(model, Layout(dp=4, zero=3))
    assert memory.moment == "backward pass of a layer"
    assert memory.parts["gathered weights"] == 2 * (2 * 16 * HIDDEN + 64 + 2 * LAYER)
    assert memory.parts["mlp"] == saved(256, 3)["mlp"]
    ends = replace(LAYERED, layers=(BLOCKS, BLOCKS, BLOCKS[:1], BLOCKS))
    gathered = fsdp(ends, Layout(dp=4, zero=3)).parts["gathered weights"]
    assert gathered == 2 * (2 * 16 * HIDDEN + 64 + LAYER + 64 + ATTENTION)


@pytest.mark.parametrize(("layers", "gathered"), [(1, 1), (2, 2)])
def test_nothing_is_gathered_ahead_of_the_first_layer(layers: int, gathered: int) -> None:
    memory = fsdp(replace(LAYERED, layers=(BLOCKS,) * layers), Layout(dp=4, zero=3))
    assert memory.moment == "backward pass of a layer"
    assert memory.parts["gathered weights"] == 2 * (2 * 16 * HIDDEN + 64 + gathered * LAYER)


def test_whole_weights_with_sharded_gradients() -> None:
    """ZeRO-2: 32-bit weights are whole, and all of them are there in 16 bits."""
    memory = fsdp(TINY, Layout(dp=4, zero=2), global_batch=8)
    assert memory.parts["weights"] == 4 * COUNT
    assert memory.parts["gathered weights"] == 2 * COUNT
    assert memory.parts["gradients"] == COUNT
    assert memory.parts["optimizer moments"] == 2 * COUNT
    assert memory.pooled is None


def test_gradient_of_a_sharded_embedding() -> None:
    """The weights outside of layers are gathered; their gradient exists in 16 bits and in 32."""
    memory = fsdp(replace(TINY, vocab=4096), Layout(dp=4, zero=3), seq=8)
    rest = 2 * 4096 * HIDDEN + 64
    assert memory.moment == "gradient of the embedding"
    assert memory.parts["gradients before they are reduced"] == 6 * rest
    assert memory.parts["gathered weights"] == 2 * rest


def test_backward_pass_of_an_unsharded_head() -> None:
    """PyTorch makes the gradient of the head before it is accumulated."""
    memory = fsdp(TINY, Layout(), style="maxtext")
    assert memory.moment == "backward pass of the head"
    assert memory.parts == added(
        saved(256, 2),
        {"weights": 4 * COUNT, "optimizer moments": 8 * COUNT, "workspaces": LIBRARY},
        {"norms and residuals": 2 * stream(256), "logits and loss": 2 * 256 * VOCAB},
        {"working space": stream(256), "gradients before they are reduced": 2 * TABLE},
        {"token numbers and masks": 32 * 256},
    )


def test_adapters_on_sharded_weights() -> None:
    """Frozen 16-bit weights are sharded too. Adapters of rank 4 have inputs and outputs of 4 matrices."""
    memory = fsdp(TINY, Layout(dp=4, zero=3), lora_rank=4)
    adapters = 2 * 4 * (64 + 128 + 64 + 64 + 64 + 2 * WIDE + WIDE + 64)
    assert memory.parts["weights"] == 2 * COUNT // 4 + 4 * adapters // 4
    assert memory.parts["optimizer moments"] == 8 * adapters // 4
    whole = fsdp(TINY, Layout(dp=4, zero=1), lora_rank=4)
    assert whole.parts["weights"] == 2 * COUNT + 4 * adapters


def test_adapters_beside_experts() -> None:
    """Experts are frozen and have no adapters; Megatron-Core holds all weights in 16 bits."""
    model = replace(TINY, layers=((BLOCKS[0], Experts(experts=4, topk=2, ffn=16)),))
    dense, experts = 2 * 64 + ATTENTION + 64 * 4 + REST, 4 * 3 * 64 * 16
    adapters = 4 * (64 + 128 + 64 + 64)
    memory = peak(model, Layout(), lora_rank=4)
    assert memory.parts["weights"] == 2 * (dense + experts + adapters)
    assert memory.parts["optimizer moments"] == 8 * adapters
    sharded = fsdp(model, Layout(dp=4, ep=2, zero=3), lora_rank=4)
    assert sharded.parts["weights"] == (2 * dense + 4 * adapters) // 4 + 2 * experts // 2 // 2
    layer = dense - REST + experts // 2 + adapters
    assert sharded.parts["gathered weights"] == 2 * (REST + layer)
    assert sharded.pooled is not None
    assert sharded.pooled["pool of reductions"] == 4 * adapters + 4 * adapters // 4


def test_offloaded_optimizer() -> None:
    """The moments are on the host, and the 32-bit weights if the model holds 16-bit ones."""
    torch = fsdp(TINY, Layout(), optimizer_offload=True)
    assert torch.parts["weights"] == 4 * COUNT
    megatron = peak(TINY, Layout(), optimizer_offload=True)
    assert megatron.parts["weights"] == 2 * COUNT
    for memory in (torch, megatron):
        assert not {"master weights", "optimizer moments"} & set(memory.parts)


def test_sixteen_bits_alone() -> None:
    """Weights, two moments and gradients of 2 bytes."""
    memory = fsdp(TINY, Layout(), seq=8, pure_16bit=True)
    assert memory.moment == "optimizer step"
    names = ("weights", "optimizer moments", "gradients")
    assert [memory.parts[name] for name in names] == [2 * COUNT, 4 * COUNT, 2 * COUNT]


# --- XLA


def test_layers_of_a_compiled_loop() -> None:
    """The loop gathers the weights of its layer only, and holds the gradients of that layer. None is gathered
    during the loss.
    """
    loss = fsdp(TINY, Layout(dp=4, zero=3), style="maxtext")
    assert loss.moment == "backward pass of the head"
    assert "gathered weights" not in loss.parts
    memory = fsdp(LAYERED, Layout(dp=4, zero=3), style="maxtext")
    assert memory.moment == "backward pass of a layer"
    assert memory.parts["gathered weights"] == 2 * LAYER
    assert memory.parts["gradients before they are reduced"] == 2 * LAYER
    assert memory.pooled is None


# --- virtual stages


def test_virtual_stages() -> None:
    """Four layers on two ranks of two chunks. The first rank holds 2 (2 - 1) + (2 - 1) 2 + 1 chunks at its
    fullest moment (arXiv 2104.04473), of which one is in its backward pass.
    """
    model = replace(TINY, layers=(BLOCKS,) * 4)
    chosen: dict[str, Any] = {"seq": 64, "global_batch": 8, "schedule": "interleaved"}
    first, last = (peak(model, Layout(pp=2, vp=2), stage, **chosen) for stage in range(2))
    assert {name: first.parts[name] for name in saved(64)} == saved(64, 5)
    assert first.moment == "backward pass of a layer"
    assert "logits and loss" not in first.parts
    assert last.parts["logits and loss"] == 2 * 64 * VOCAB
