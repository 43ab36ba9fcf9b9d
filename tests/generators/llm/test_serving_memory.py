"""Memory of serving ranks compared with closed forms of caches and weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Attention, LatentAttention, Mamba, Model, model_parameters
from hespas.generators.llm.server_memory import ServingLoad, ServingMemory, serving_memory
from hespas.generators.llm.settings import precision_of
from tests.generators.llm.small_models import DENSE, HYBRID, MIXTURE, MODELS


def only(model: Model, serving: ServingLoad, layout: Layout | None = None) -> ServingMemory:
    """The memory of a rank of the only stage."""
    (found,) = serving_memory(model, layout or Layout(), serving)
    return found


def cache(model: Model, serving: ServingLoad, layout: Layout | None = None) -> int:
    return only(model, serving, layout).parts["keys and values"]


def test_keys_and_values_of_each_key_head() -> None:
    """2 x layers x key heads x head x tokens x 2 bytes (arXiv 2305.13245)."""
    assert cache(DENSE, ServingLoad(batch=3, context=160)) == 2 * 8 * 4 * 64 * 3 * 160 * 2


def test_the_last_page_of_a_sequence_counts_whole() -> None:
    sizes = [cache(DENSE, ServingLoad(batch=3, context=tokens)) for tokens in (161, 176)]
    assert sizes[0] == sizes[1]
    single = cache(DENSE, ServingLoad(batch=3, context=161, page_tokens=1))
    assert sizes[0] / single == pytest.approx(176 / 161)


def test_key_heads_part_over_tensor_ranks_and_then_repeat() -> None:
    serving = ServingLoad(batch=2, context=64)
    whole = cache(DENSE, serving)
    assert [whole // cache(DENSE, serving, Layout(tp=tp)) for tp in (2, 4, 8)] == [2, 4, 4]


def test_latents_are_whole_on_each_tensor_rank() -> None:
    block = MIXTURE.layers[0][0]
    assert isinstance(block, LatentAttention)
    serving = ServingLoad(batch=2, context=64)
    expected = 4 * (block.kv_lora + block.rope_dim) * 2 * 64 * 2
    assert cache(MIXTURE, serving) == cache(MIXTURE, serving, Layout(tp=4)) == expected


@pytest.mark.parametrize(
    ("layout", "fused", "groups", "peers"),
    [
        (Layout(), True, 0, 0),
        (Layout(tp=4), True, 1, 0),
        (Layout(tp=4, ep=4), True, 1, 0),
        (Layout(dp=4, tp=2, ep=2, etp=4), True, 1, 0),  # and the pair of tensor-parallel ranks
        (Layout(dp=4, ep=4), True, 1, 3),  # each token is sent to two experts
        (Layout(dp=4, ep=4), False, 0, 3),
        (Layout(tp=4, etp=4), False, 2, 0),
    ],
)
def test_communicators_are_those_of_a_step(layout: Layout, fused: bool, groups: int, peers: int) -> None:
    found = only(MIXTURE, ServingLoad(batch=4, context=64, fused=fused), layout)
    pairs = layout.tp == 2
    buffers = groups * 688 * 2**20 + pairs * 544 * 2**20 + peers * 384 * 2**20
    assert found.outside == {"GPU context": 400 * 10**6, "communication library": buffers}
    assert found.device_bytes == found.peak_bytes + sum(found.outside.values())


def test_a_window_bounds_the_cache() -> None:
    block = Attention(heads=8, kv_heads=4, head_dim=64, window=128)
    windowed = replace(DENSE, layers=((block, DENSE.layers[0][1]),) * 8)
    long, short = (cache(windowed, ServingLoad(batch=1, context=tokens)) for tokens in (4096, 128))
    assert long == short == cache(DENSE, ServingLoad(batch=1, context=128))


def test_a_mamba_block_keeps_its_state_whatever_the_context() -> None:
    block = HYBRID.layers[0][0]
    assert isinstance(block, Mamba)
    bare = replace(HYBRID, layers=HYBRID.layers[:1])
    channels = block.inner + 2 * block.groups * block.state
    expected = 4 * block.inner * block.state + 2 * 3 * channels
    assert {cache(bare, ServingLoad(batch=1, context=tokens)) for tokens in (64, 4096)} == {expected}


def test_an_8_bit_cache_is_half_of_a_16_bit_one() -> None:
    usual = ServingLoad(batch=2, context=64)
    assert 2 * cache(DENSE, replace(usual, kv_format="f8E4M3FN")) == cache(DENSE, usual)


@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.name)
def test_weights_are_those_of_the_model_without_further_predictions(model: Model) -> None:
    served = replace(model, mtp_layers=0)
    parts = only(model, ServingLoad(batch=1, context=64)).parts
    assert parts["weights"] == 2 * model_parameters(served)


def test_narrow_weights_need_no_others() -> None:
    matrices = 8 * (512 * 64 * (2 * 8 + 2 * 4) + 3 * 512 * 1536)
    wide, eight, four = (
        only(DENSE, ServingLoad(batch=1, context=64, precision=precision_of(name))).parts["weights"]
        for name in ("bf16", "fp8-current", "nvfp4")
    )
    assert wide - eight == matrices
    assert wide - four == matrices * (2 - 0.5 - 1 / 16)


def test_stages_share_layers_and_the_last_has_logits() -> None:
    first, last = serving_memory(DENSE, Layout(pp=2), ServingLoad(batch=4, context=64))
    assert first.parts["keys and values"] == last.parts["keys and values"]
    assert (first.parts["logits"], last.parts["logits"]) == (0, 4 * 4 * 1024)


def test_a_longer_pass_needs_more_working_space() -> None:
    chunk, decode = (only(DENSE, ServingLoad(batch=4, context=64, pass_tokens=tokens)) for tokens in (512, 0))
    assert chunk.parts["working space"] == 128 * decode.parts["working space"]
    assert chunk.peak_bytes > decode.peak_bytes
