"""Settings of servers with published launch commands, and of other servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hespas.generators.llm import Layout
from hespas.studies.serving.launches import ServerStart, launch_of

_DEEPSEEK = ServerStart(
    model="DeepSeek-V3", hardware="B200-SXM", engine="trtllm", release="1.2.0rc6.post2", precision="fp4",
    layout=Layout(tp=8, ep=8), prompt=1024, output=1024, clients=64, date="2026-02-03", is_published=True,
)  # fmt: skip


def test_a_server_of_unknown_settings_has_the_defaults_of_its_engine() -> None:
    launch = launch_of(replace(_DEEPSEEK, engine="sglang", is_published=False))
    assert (launch.policy.tokens, launch.policy.recv_interval, launch.cache, launch.drafts) == (
        16384,
        1,
        "",
        0,
    )
    assert launch_of(replace(_DEEPSEEK, is_published=False)).of_free


@pytest.mark.parametrize(("clients", "polls"), [(8, 10), (16, 30)])
def test_sglang_looks_at_the_door_less_often_for_many_clients(clients: int, polls: int) -> None:
    policy = launch_of(replace(_DEEPSEEK, engine="sglang", clients=clients)).policy
    assert (policy.tokens, policy.sequences, policy.recv_interval) == (16384, 256, polls)


def test_sglang_in_8_bits_guesses_with_more_clients_than_it_ran_without() -> None:
    at = replace(_DEEPSEEK, engine="sglang", precision="fp8")
    assert launch_of(at).drafts == 0
    assert launch_of(replace(at, clients=256)).drafts == 2
    assert launch_of(replace(at, layout=Layout(tp=4), clients=32)).policy.tokens == 8192


def test_tensorrt_llm_works_on_whole_prompts_of_its_day() -> None:
    launch = launch_of(_DEEPSEEK)
    assert (launch.policy.tokens, launch.policy.chunked, launch.policy.captured) == (8192, False, 8192)
    before = launch_of(replace(_DEEPSEEK, date="2025-11-02"))
    assert (before.policy.tokens, before.policy.captured) == (1152, 0)
    held = launch_of(replace(_DEEPSEEK, precision="fp8"))
    assert (held.policy.batch_wait_iters, held.policy.batch_wait_tokens) == (40, round(0.8 * 8192))


def test_releases_that_guess_have_a_graph_of_their_clients() -> None:
    guessing = launch_of(replace(_DEEPSEEK, release="1.2.0rc6.post3"))
    assert (guessing.drafts, guessing.policy.sequences, guessing.policy.tokens) == (3, 64, 1344)
    spread = launch_of(replace(_DEEPSEEK, release="1.2.0rc6.post3", layout=Layout(dp=8, ep=8)))
    assert (spread.drafts, spread.policy.sequences) == (1, 8)


def test_data_parallel_ranks_wait_for_each_other() -> None:
    at = replace(_DEEPSEEK, layout=Layout(dp=4, ep=4))
    # a new one every 16 steps; the last of four ranks has one after 16 * (1 + 1/2 + 1/3 + 1/4)
    assert launch_of(replace(at, clients=256)).policy.recv_interval == 33
    assert launch_of(replace(at, clients=16)).policy.recv_interval == 60
    assert launch_of(_DEEPSEEK).policy.recv_interval == 1


def test_vllm_of_each_model() -> None:
    at = replace(_DEEPSEEK, engine="vllm", layout=Layout(tp=4))
    kimi = launch_of(replace(at, model="Kimi-K2", precision="int4"))
    assert (kimi.policy.sequences, kimi.memory_share, kimi.cache) == (64, 0.95, "bf16")
    minimax = launch_of(replace(at, model="MiniMax-M2", precision="fp8", release="0.19.0", prompt=8192))
    assert (minimax.policy.tokens, minimax.policy.page_tokens, minimax.cache) == (16384, 32, "f8E4M3FN")
    hopper = launch_of(replace(at, model="MiniMax-M2", hardware="H100-SXM", precision="fp8"))
    assert (hopper.policy.sequences, hopper.cache) == (256, "bf16")
    oss = replace(at, model="GPT-OSS-120B")
    assert launch_of(oss).cache == "f8E4M3FN"
    assert launch_of(replace(oss, date="2025-11-02")).cache == "bf16"
    assert launch_of(replace(oss, hardware="H100-SXM")).policy.sequences == 64
    llama = replace(at, model="Llama-3.1-70B")
    assert launch_of(llama).policy.sequences == 512
    assert launch_of(replace(llama, hardware="H100-SXM")).policy.sequences == 64


def test_tensorrt_llm_of_other_models() -> None:
    oss = launch_of(replace(_DEEPSEEK, model="GPT-OSS-120B"))
    assert (oss.policy.tokens, oss.policy.sequences, oss.memory_share) == (20000, 512, 0.85)
    llama = launch_of(replace(_DEEPSEEK, model="Llama-3.1-70B", layout=Layout(tp=4)))
    assert (llama.policy.batch_wait_iters, llama.policy.batch_wait_tokens) == (20, 14746)
