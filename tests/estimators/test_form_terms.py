"""Terms of the forms of time, each by hand: the other parameters make the other terms vanish.

The machine has 100 units of 1e4 FLOP/ns and 10 bytes/ns each. Operands have 2 bytes, weights 1 and results 4
bytes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.estimators.forms import DECODE, FORMS, PREFILL, Form, MachineRates, form_time_ns
from hespas.operations import STRIDED, Labels, Operations, build

MACHINE = MachineRates(
    flops_per_ns=1e6,
    bytes_per_ns=1e3,
    units=100.0,
    cache_bytes=5e7,
    cache_rate=3.0,
    activation_bytes=2.0,
    weight_bytes=1.0,
    output_bytes=4.0,
    vector_elements=8.0,
    quantizes=False,
)
LONGEST = 1e3
"""Overlap of which the longest time is left."""
NEVER = 1e12
"""Rate or price that decides nothing as a divisor, or everything as a factor."""

_BF16 = Labels.constant("bf16", 1)


def one(value: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([value])


def time_of(form: Form, ops: Operations, values: dict[str, float], machine: MachineRates = MACHINE) -> float:
    assert set(values) == {parameter.name for parameter in form.parameters}
    return float(form_time_ns(form, values, ops, machine)[0])


# --- prompts

PROMPT_FREE = {
    "t0_ns": 0.0, "compute": 1.0, "overlap": LONGEST, "score": 0.0, "block_start_ns": 0.0, "wave_tail": 0.0,
    "chain": 0.0, "query_passes": 0.0, "key_passes": 0.0, "fused": 1.0, "token_ns": 0.0, "cache_gain": 0.0,
    "cache_reach": 1.0,
}  # fmt: skip
BLOCK = 4 * 64 * (300 * 301 / 2 + 300 * 128 / 2) / 3 / 1e4
"""Time of a unit for one of three blocks of 128 queries: pairs of a causal mask of 300 tokens, and half a
block more per token for the full blocks on the diagonal. Two products of 64 elements, 2 FLOPs each.
"""


def prompts(batch: float = 3, kv_heads: float = 5, more_keys: float = 0) -> Operations:
    """Prompts of 300 tokens and 10 heads of 64, of which ``more_keys`` earlier ones are cached."""
    ops = build.attention_context(
        _BF16, batch=one(batch), length=one(300), heads=one(10), kv_heads=one(kv_heads), head_dim=one(64),
        window=one(0), kv_bytes=one(2),
    )  # fmt: skip
    keys = {"kv_len": ops.dims["kv_len"] + more_keys, "pairs": ops.dims["pairs"] + 300 * more_keys}
    return replace(ops, dims={**ops.dims, **keys})


def prompt_ns(ops: Operations, machine: MachineRates = MACHINE, /, **values: float) -> float:
    return time_of(PREFILL, ops, PROMPT_FREE | values, machine)


@pytest.mark.parametrize(
    ("batch", "tail", "waves"), [(3, 0.0, 1.0), (20, 0.0, 6.0), (15, 0.0, 4.5), (15, 0.4, 4.7)]
)
def test_waves_of_query_blocks(batch: float, tail: float, waves: float) -> None:
    """3 blocks of each of 10 heads on 100 units. At least one wave is paid, and a part of the last one."""
    ops = prompts(batch)
    assert prompt_ns(ops, compute=0.5, wave_tail=tail) == pytest.approx(waves * BLOCK / 0.5)
    scores = 128 * (300 * 301 / 2 + 300 * 128 / 2) / 3 / 1e4
    slow = prompt_ns(ops, t0_ns=1000.0, score=2.0, block_start_ns=7.0, wave_tail=tail)
    assert slow == pytest.approx(1000 + waves * (BLOCK + 2 * scores + 7))


def test_the_longest_block_of_a_prompt() -> None:
    """With a causal mask the last block has twice the mean of keys; without, all keys."""
    causal = prompt_ns(prompts(), chain=10.0, compute=0.5)
    assert causal == pytest.approx(4 * 128 * 64 * (300 * 301 / 2 / 3 * 2 / 128) / 1e4 * 10 / 0.5)
    whole = build.attention_encoder(_BF16, batch=one(3), length=one(300), heads=one(10), head_dim=one(64))
    assert prompt_ns(whole, chain=10.0) == pytest.approx(4 * 128 * 64 * 300 / 1e4 * 10)
    # All pairs, and no diagonal; keys of the encoder have as many heads as queries.
    assert prompt_ns(whole) == pytest.approx(4 * 64 * 300 * 300 / 3 / 1e4)
    keys = prompt_ns(whole, compute=NEVER, key_passes=5.0)
    assert keys == pytest.approx(5 * 3 * 300 * 10 * 64 * 2 / 1e3)


def test_traffic_of_a_prompt() -> None:
    queries, keys = 3 * 300 * 10 * 64 * 2 / 1e3, 3 * 300 * 5 * 64 * 2 / 1e3
    traffic = 2 * queries + 7 * keys
    passes = {"query_passes": 2.0, "key_passes": 7.0}
    assert prompt_ns(prompts(), compute=NEVER, **passes) == pytest.approx(traffic)
    assert prompt_ns(prompts(), fused=0.0, **passes) == pytest.approx(BLOCK + traffic)
    slow = prompt_ns(prompts(), compute=1e-3, fused=0.25, **passes)
    assert slow == pytest.approx(BLOCK * 1e3 + 0.75 * traffic)
    assert prompt_ns(prompts(), compute=NEVER, token_ns=0.5) == pytest.approx(0.5 * 900)


@pytest.mark.parametrize(("passes", "of_earlier"), [(1.0, 2.0), (5.0, 5.0), (9.0, 6.0)])
def test_traffic_of_earlier_keys(passes: float, of_earlier: float) -> None:
    """Each of 3 blocks reads 700 earlier keys and values, but no more often than fitted, or twice."""
    found = prompt_ns(prompts(more_keys=700), compute=NEVER, key_passes=passes)
    key = 3 * 5 * 64 * 2 / 1e3
    assert found == pytest.approx(passes * 300 * key + of_earlier * 700 * key)


@pytest.mark.parametrize(("reach", "share"), [(1.0, 1 / 2), (2.0, 32 / 33)])
def test_traffic_of_a_prompt_in_the_cache(reach: float, share: float) -> None:
    """Data as large as the cache: half of it is there, of a cache twice as large all but 1/33."""
    ops = prompts()
    machine = replace(MACHINE, cache_bytes=float(ops.bytes_moved[0]))
    values = {"compute": NEVER, "query_passes": 1.0, "cache_gain": 3.0, "cache_reach": reach}
    queries = 3 * 300 * 10 * 64 * 2 / 1e3
    assert prompt_ns(ops, machine, **values) == pytest.approx(queries / (1 + 3 * share))


# --- decoding

DECODE_FREE = {
    "t0_ns": 0.0, "group_t0_ns": 0.0, "memory": NEVER, "overlap": LONGEST, "piece_start_ns": 0.0,
    "key_ns": 0.0, "group_start_ns": 0.0, "group_key_ns": 0.0, "group_power": 0.0, "group_limit": 32.0,
    "limit_key_ns": 0.0, "size_share": 0.0, "split_ns": NEVER, "wave_tail": 0.0, "io_passes": 0.0,
    "cache_gain": 0.0, "cache_reach": 1.0,
}  # fmt: skip


def tokens(batch: float, keys: float, heads: float, kv_heads: float, size: float = 64) -> Operations:
    return build.attention_generation(
        _BF16, batch=one(batch), kv_len=one(keys), heads=one(heads), kv_heads=one(kv_heads),
        head_dim=one(size), kv_bytes=one(1),
    )  # fmt: skip


def token_ns(ops: Operations, machine: MachineRates = MACHINE, /, **values: float) -> float:
    return time_of(DECODE, ops, DECODE_FREE | values, machine)


@pytest.mark.parametrize(
    ("batch", "tail", "waves"), [(4, 0.5, 1.0), (40, 0.0, 3.2), (40, 0.5, 3.6), (100, 0.5, 8.0)]
)
def test_waves_of_heads(batch: float, tail: float, waves: float) -> None:
    """Heads of half of 128 elements: half of the price of a key, and half of the share of a start."""
    values = {"t0_ns": 500.0, "piece_start_ns": 10.0, "size_share": 0.4, "key_ns": 3.0, "wave_tail": tail}
    found = token_ns(tokens(batch, 640, 8, 8), **values)
    assert found == pytest.approx(500 + waves * (10 * (1 + 0.4 / 2) + 3 * 640 / 2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "slower"), [(8, 2, 1.0), (16, 2, 1.0), (32, 2, 2**0.5), (64, 2, 2.0)]
)
def test_heads_that_share_keys(heads: float, kv_heads: float, slower: float) -> None:
    """Key heads are the pieces; more than 8 heads of one are slower."""
    values = {"group_t0_ns": 700.0, "group_start_ns": 10.0, "group_key_ns": 3.0, "group_power": 0.5}
    found = token_ns(tokens(100, 640, heads, kv_heads), wave_tail=1.0, **values)
    assert found == pytest.approx(700 + 2 * slower * (10 + 3 * 640 / 2))


def test_more_heads_than_the_limit_have_keys_of_their_own() -> None:
    values = {"t0_ns": 500.0, "key_ns": 3.0, "group_t0_ns": 7.0, "group_key_ns": 1.0, "group_power": 0.0}
    found = token_ns(tokens(100, 640, 66, 2), **values)
    assert found == pytest.approx(500 + 66 * 3 * 640 / 2)
    assert token_ns(tokens(100, 640, 64, 2), **values) == pytest.approx(7 + 2 * 640 / 2)
    values["limit_key_ns"] = 9.0
    assert token_ns(tokens(100, 640, 66, 2), **values) == pytest.approx(500 + 66 * 9 * 640 / 2)
    assert token_ns(tokens(100, 640, 64, 2), **values) == pytest.approx(7 + 2 * 640 / 2)


def test_splits_of_the_keys() -> None:
    """800 keys in 2^s splits on 8 of 100 units: 800 / 2^s and s times the price, for each wave."""
    values = {"key_ns": 1.0, "wave_tail": 1.0, "split_ns": 20.0}
    assert token_ns(tokens(1, 800, 8, 8, size=128), **values) == pytest.approx(800 / 8 + 3 * 20)
    dear = values | {"split_ns": 1000.0}
    assert token_ns(tokens(1, 800, 8, 8, size=128), **dear) == pytest.approx(800)
    free = values | {"split_ns": 0.0}
    assert token_ns(tokens(1, 800, 8, 8, size=128), **free) == pytest.approx(800 * 11 / 128)


def test_traffic_of_cached_keys() -> None:
    """Keys and values of one byte; queries and results of two."""
    ops = tokens(4, 640, 8, 2)
    keys, rest = 2 * 4 * 2 * 640 * 64 / 1e3, 2 * 4 * 8 * 64 * 2 / 1e3
    assert token_ns(ops, memory=0.5, io_passes=3.0) == pytest.approx(keys / 0.5 + 3 * rest)
    machine = replace(MACHINE, cache_bytes=keys * 1e3)
    assert token_ns(ops, machine, memory=0.5, cache_gain=3.0) == pytest.approx(keys / 0.5 / (1 + 3 / 2))


# --- experts

EXPERTS_FREE = {
    "t0_ns": 0.0, "compute": NEVER, "memory": NEVER, "overlap": LONGEST, "unit_load": NEVER, "tile_edge": 0.0,
    "wave_tail": 0.5, "imbalance": 1.0, "spread": 1.0, "step_ns": 0.0, "expert_start_ns": 0.0,
    "token_passes": 0.0, "inner_passes": 0.0, "cache_reach": 0.0, "cache_share": 1.0,
}  # fmt: skip
TEN_UNITS = replace(MACHINE, units=10.0)


def experts(tokens: float = 16, topk: float = 8, experts: float = 8, parallel: float = 2) -> Operations:
    """Gated experts of 384 x 256 on a rank."""
    return build.mixtures_of_experts(
        _BF16, op=Labels.constant("balanced", 1), tokens=one(tokens), hidden=one(384), inter=one(512),
        topk=one(topk), experts=one(experts), tensor_parallel=one(2), expert_parallel=one(parallel),
        matrices=one(3),
    )  # fmt: skip


def experts_ns(ops: Operations, machine: MachineRates = TEN_UNITS, /, **values: float) -> float:
    return time_of(FORMS["experts"], ops, EXPERTS_FREE | values, machine)


def test_tiles_of_experts() -> None:
    """All tokens to all experts, of which a rank has 4: tiles of 16 x 128 on 10 units. Of the first product
    there are 4 x 4, 1.6 waves, of the second 4 x 3; half of the rest of a wave is paid.
    """
    step = 2 * 16 * 128 / 1e5
    assert experts_ns(experts(), compute=0.5) == pytest.approx((1.8 * 384 + 1.6 * 256) * step / 0.5)
    # 24 tokens of the busiest expert are two tiles.
    busy = experts_ns(experts(), compute=0.5, imbalance=1.5)
    assert busy == pytest.approx((3.6 * 384 + 2.7 * 256) * step / 0.5)
    edges = experts_ns(experts(), compute=0.5, tile_edge=4.0)
    assert edges == pytest.approx((1.8 * 384 + 1.6 * 256) * step / 0.5 * (1 + 4 / 16 + 4 / 128))
    loads = experts_ns(experts(), unit_load=2.0)
    assert loads == pytest.approx((1.8 * 384 + 1.6 * 256) * (16 * 2 + 128) / 100 / 2)


def test_traffic_of_experts() -> None:
    """Weights of experts with tokens, tokens in and out, inner results of three matrices."""
    weights = 3 * 384 * 256 / 1e3
    assert experts_ns(experts(), memory=0.5) == pytest.approx(4 * weights / 0.5, rel=1e-4)
    moved = experts_ns(experts(), token_passes=3.0, inner_passes=5.0)
    assert moved == pytest.approx(64 * (3 * 384 + 5 * 256 * 3) * 4 / 1e3)
    start = experts_ns(experts(), t0_ns=100.0, step_ns=0.5, expert_start_ns=7.0)
    assert start == pytest.approx(100 + 0.5 * (384 + 256) + 4 * 7)


def test_weights_of_experts_in_the_cache() -> None:
    """Weights as large as the reach: half comes from the cache, at half of three times the bandwidth."""
    weights = 4 * 3 * 384 * 256 / 1e3
    machine = replace(TEN_UNITS, cache_bytes=weights * 1e3 / 2)
    found = experts_ns(experts(), machine, memory=0.5, cache_reach=2.0, cache_share=0.5)
    assert found == pytest.approx(0.5 * weights / 0.5 + 0.5 * weights / (3 * 0.5), rel=1e-4)


@pytest.mark.parametrize(("spread", "draws"), [(1.0, 16), (0.5, 4)])
def test_experts_that_no_token_hits_are_not_read(spread: float, draws: int) -> None:
    """Each of 16 tokens, or of 4 with skewed routing, hits 2 of 64 experts independently."""
    hit = 64 * (1 - (1 - 2 / 64) ** draws)
    found = experts_ns(experts(topk=2, experts=64, parallel=1), memory=1.0, spread=spread)
    assert found == pytest.approx(hit * 3 * 384 * 256 / 1e3)


# --- streams and whole chips

STREAM_FREE = {
    "t0_ns": 0.0, "compute": NEVER, "memory": NEVER, "overlap": LONGEST, "strided": 1.0, "row_ns": 0.0,
    "row_step_ns": 0.0, "cache_share": NEVER, "cache_reach": 1e-6, "cache_edge": 20.0,
}  # fmt: skip


def stream(strided: float = 0, transcendentals: float = 0) -> Operations:
    """Three passes over 100 x 1000 elements of 2 bytes with one FLOP each."""
    ops = build.elementwise(
        "vector", _BF16, op=Labels.constant("add", 1), rows=one(100), columns=one(1000), passes=one(3),
        flops_per_element=one(1),
    )  # fmt: skip
    return replace(ops, transcendentals=one(transcendentals), dims={**ops.dims, STRIDED: one(strided)})


def stream_ns(ops: Operations, machine: MachineRates = MACHINE, /, **values: float) -> float:
    return time_of(FORMS["streams"], ops, STREAM_FREE | values, machine)


def test_terms_of_streams() -> None:
    ops = stream()
    assert stream_ns(ops, t0_ns=50.0, compute=1e-3) == pytest.approx(50 + 1e5 / 1e6 / 1e-3)
    assert stream_ns(ops, memory=0.5) == pytest.approx(6e5 / 1e3 / 0.5)
    assert stream_ns(ops, row_ns=3.0, row_step_ns=0.5) == pytest.approx(100 * (3 + 0.5 * 1000))
    assert stream_ns(stream(transcendentals=1000), compute=1e-3) == pytest.approx(108_000 / 1e3)
    # Half of the traffic is strided, three times slower.
    assert stream_ns(stream(strided=0.5), memory=0.5, strided=3.0) == pytest.approx(2 * 600 / 0.5)


def test_an_operation_without_arithmetic_needs_no_rate() -> None:
    ops = replace(stream(), flops=one(0))
    unknown = replace(MACHINE, flops_per_ns=np.nan)
    assert stream_ns(ops, unknown, memory=0.5) == pytest.approx(1200)
    assert np.isnan(stream_ns(replace(ops, flops=one(1)), unknown, memory=0.5))


def test_streams_in_the_cache() -> None:
    """Data as large as the reach: half comes from the cache, at half of three times the bandwidth."""
    machine = replace(MACHINE, cache_bytes=3e5)
    values = {"memory": 0.5, "cache_reach": 2.0, "cache_share": 0.5}
    assert stream_ns(stream(), machine, **values) == pytest.approx(0.5 * 1200 + 0.5 * 600 / (3 * 0.5))


def test_streams_in_whole_tiles() -> None:
    """A TPU stores 100 x 1000 elements as 104 x 1024."""
    more = 104 * 1024 / (100 * 1000)
    machine = replace(MACHINE, tiles=True)
    assert stream_ns(stream(), machine, memory=0.5) == pytest.approx(1200 * more)
    assert stream_ns(stream(), machine, compute=1e-3) == pytest.approx(100 * more)


def test_roofline_of_a_chip() -> None:
    """Start, and the norm of order 2 of 300 ns of arithmetic and 400 ns of traffic."""
    ops = replace(stream(), flops=one(3e8), bytes_moved=one(4e5))
    free = {"t0_ns": 50.0, "compute": 1.0, "memory": 1.0, "overlap": 1.0, "strided": 1.0}
    assert time_of(FORMS["roofline"], ops, free) == pytest.approx(50 + 500)
    halves = free | {"compute": 0.5, "memory": 0.5}
    assert time_of(FORMS["roofline"], ops, halves) == pytest.approx(50 + 1000)


# --- products

PRODUCT_FREE = {
    "t0_ns": 0.0, "compute": NEVER, "memory": NEVER, "overlap": LONGEST, "step_ns": 0.0, "unit_load": NEVER,
    "tile_edge": 0.0, "fill": 0.0, "split_ns": NEVER, "wave_tail": 1.0, "activations_cached": 0.0,
    "cache_reach": 1e-6, "cache_edge": 20.0, "ragged_k": 0.0, "ragged_n": 0.0, "weight_copies": 1.0,
    "cache_share": NEVER, "quantizing_passes": 0.0,
}  # fmt: skip


def products(batch: float, m: float, n: float, k: float) -> Operations:
    return build.matmuls(_BF16, batch=one(batch), m=one(m), n=one(n), k=one(k))


def product_ns(ops: Operations, machine: MachineRates = MACHINE, /, **values: float) -> float:
    return time_of(FORMS["tiles"], ops, PRODUCT_FREE | values, machine)


def test_steps_of_a_tile() -> None:
    """128 x 128 results are 32 tiles of 8 x 64 on as many units; a step of k loads 8 x 2 and 64 x 1 bytes."""
    ops, area = products(1, 128, 128, 4096), 2 * 8 * 64 / 1e4
    assert product_ns(ops, unit_load=2.0) == pytest.approx(4096 * (8 * 2 + 64) / 10 / 2)
    assert product_ns(ops, compute=0.5, fill=100.0) == pytest.approx((4096 + 100) * area / 0.5)
    edges = 1 + 8 * (1 / 8 + 1 / 64)
    assert product_ns(ops, compute=1.0, tile_edge=8.0) == pytest.approx(4096 * area * edges)
    assert product_ns(ops, compute=1.0, t0_ns=9.0, step_ns=0.5) == pytest.approx(9 + (area + 0.5) * 4096)
    # Arithmetic and loads of a step overlap by the norm of order 3.
    both = product_ns(ops, compute=area / 3, unit_load=8 / 4)
    assert both == pytest.approx(4096 * (3**3 + 4**3) ** (1 / 3))


def test_splits_of_a_product() -> None:
    """Two halves of k are 64 tiles; four parts would be more tiles than units, two waves."""
    ops, area = products(1, 128, 128, 4096), 2 * 8 * 64 / 1e4
    assert product_ns(ops, compute=1.0, split_ns=100.0) == pytest.approx(2048 * area + 100)


def test_waves_of_a_product() -> None:
    """4 results of 128 x 128 are 128 tiles of 8 x 64: 1.28 waves, of whose rest a quarter is paid."""
    ops, area = products(4, 128, 128, 4096), 2 * 8 * 64 / 1e4
    found = product_ns(ops, compute=1.0, wave_tail=0.25)
    assert found == pytest.approx((1.28 + 0.25 * 0.72) * 4096 * area)


@pytest.mark.parametrize(("cache_bytes", "others"), [(5e7, 49152), (1e4, 0.7 * 1e4)])
def test_cached_activations(cache_bytes: float, others: float) -> None:
    """Half of the activations, or of 70 % of the cache, are read at 2 x 3 of the bandwidth, which also takes
    the rest of 114,688 bytes at half of the peak. Weights have 1 byte in the machine, 2 in the operation.
    """
    machine = replace(MACHINE, cache_bytes=cache_bytes, weight_bytes=2.0)
    held = 0.5 * others
    found = product_ns(
        products(1, 64, 128, 256), machine, memory=0.5, activations_cached=0.5, cache_share=2.0
    )
    assert found == pytest.approx(((114_688 - held) / 0.5 + held / 6) / 1e3)


@pytest.mark.parametrize(("copies", "share"), [(1.0, 16 / 17), (2.0, 1 / 2), (4.0, 1 / 17)])
def test_weights_in_the_cache(copies: float, share: float) -> None:
    """A benchmark cycles through copies of the weights; a cache of half the data holds 1 / (1 + 2^4)."""
    machine = replace(MACHINE, cache_bytes=4 * 65536.0, weight_bytes=2.0)
    values = {"weight_copies": copies, "cache_reach": 0.5, "cache_edge": 4.0, "memory": 0.5}
    found = product_ns(products(1, 64, 128, 256), machine, **values)
    assert found == pytest.approx((114_688 - share * 65536) / 0.5 / 1e3)
