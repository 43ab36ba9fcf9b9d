"""Separate prefill and decode servers, compared with one server, and step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph.errors import UnsupportedError
from hespas.simulator.serving import (
    Correction,
    Order,
    Policy,
    Requests,
    ServerPool,
    ServingRun,
    arrivals_of_poisson,
    engine,
    lengths,
    serve,
    serve_disaggregated,
)
from tests.simulator.serving.small_servers import SMALL, even_steps, requests_of


def _disaggregated(
    requests: Requests,
    *,
    prefill: int = 1,
    decode: int = 1,
    send_ns: float = 0.0,
    policy: Policy = SMALL,
    correction: Correction | None = None,
    cache_tokens: float = np.inf,
) -> ServingRun:
    steps = even_steps().corrected(correction or Correction())
    return serve_disaggregated(
        requests,
        ServerPool(steps, policy, prefill),
        ServerPool(steps, policy, decode, cache_tokens),
        np.full(len(requests), send_ns),
    )


def _drawn(count: int, seed: int, *, per_second: float = 2e6, concurrency: int = 0) -> Requests:
    generator = np.random.default_rng(seed)
    return Requests(
        arrival_ns=arrivals_of_poisson(count, per_second, generator),
        prompt=lengths(count, 60, 0.1, generator),
        output=lengths(count, 12, 0.05, generator),
        concurrency=concurrency,
    )


@pytest.mark.parametrize("order", ["mixed", "prefill-first"])
def test_one_client_sees_no_difference_without_transfer_time(order: engine.Order) -> None:
    policy = replace(SMALL, order=order)
    requests = requests_of((0.0, 40, 3), (0.0, 100, 1), (0.0, 7, 12), (0.0, 63, 5), concurrency=1)
    correction = Correction(request_ns=30.0, step_ns=5.0, prompt_ns=7.0)
    one = serve(requests, even_steps().corrected(correction), policy)
    two = _disaggregated(requests, policy=policy, correction=correction)
    for name in ("arrival_ns", "scheduled_ns", "first_token_ns", "last_token_ns"):
        assert getattr(two, name) == pytest.approx(getattr(one, name)), name
    assert two.gaps()[0].tolist() == pytest.approx(one.gaps()[0].tolist())
    _, batch, prompts = two.prefill_steps.columns()
    assert prompts.sum() == requests.prompt.sum()
    assert not batch.any()
    assert not two.steps.columns()[2].any()


def test_a_transfer_delays_the_first_token() -> None:
    request = requests_of((1000.0, 40, 3))
    run = _disaggregated(request, send_ns=25.0)
    assert run.ttft_ns.tolist() == [140.0 + 25.0]
    assert run.tpot_ns[0] == pytest.approx((101.40 + 101.41) / 2)
    # two prompts in one step are sent one after the other, and the second waits for the end of a step
    pair = _disaggregated(requests_of((0.0, 20, 9), (0.0, 20, 9)), send_ns=25.0)
    assert pair.ttft_ns.tolist() == pytest.approx([140.0 + 25.0, 140.0 + 25.0 + 101.20])
    # an answer of one token is complete when its prompt is
    assert _disaggregated(requests_of((0.0, 40, 1)), send_ns=25.0).latency_ns.tolist() == [140.0]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    servers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    concurrency=st.sampled_from((0, 1, 5, 9)),
    send_ns=st.sampled_from((0.0, 40.0, 900.0)),
    has_small_cache=st.booleans(),
    recv_interval=st.sampled_from((1, 4)),
    is_async=st.booleans(),
)
def test_steps_computed_at_once_change_nothing(
    *,
    seed: int,
    servers: tuple[int, int],
    concurrency: int,
    send_ns: float,
    has_small_cache: bool,
    recv_interval: int,
    is_async: bool,
) -> None:
    requests, cache_tokens = _drawn(24, seed, concurrency=concurrency), 160.0 if has_small_cache else np.inf
    order: Order = "prefill-first" if seed % 2 else "mixed"
    policy = replace(SMALL, order=order, recv_interval=recv_interval, async_scheduling=is_async)

    def run() -> ServingRun:
        return _disaggregated(
            requests, prefill=servers[0], decode=servers[1], send_ns=send_ns, policy=policy,
            cache_tokens=cache_tokens,
        )  # fmt: skip

    together = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_AT_ONCE", 1)
        alone = run()
    assert together.first_token_ns == pytest.approx(alone.first_token_ns)
    assert together.last_token_ns == pytest.approx(alone.last_token_ns)
    assert (together.first_token_ns >= together.scheduled_ns).all()
    assert (together.scheduled_ns >= together.arrival_ns).all()
    assert (together.last_token_ns >= together.first_token_ns).all()
    assert together.gaps()[1].sum() == (requests.output - 1).sum()
    if concurrency:
        running = [
            ((together.arrival_ns <= at) & (together.last_token_ns > at)).sum() for at in together.arrival_ns
        ]
        assert max(running) == concurrency


def test_more_servers_are_not_slower() -> None:
    requests = _drawn(200, 5, per_second=2e7)
    ttft = [float(_disaggregated(requests, prefill=count).ttft_ns.mean()) for count in (1, 2, 4)]
    assert ttft[0] > ttft[1] >= ttft[2]
    tpot = [float(np.nanmean(_disaggregated(requests, decode=count).tpot_ns)) for count in (1, 2, 4)]
    assert tpot[0] >= tpot[1] >= tpot[2]
    late = [float(_disaggregated(requests, send_ns=each).ttft_ns.mean()) for each in (0.0, 100.0, 1e4)]
    assert late[0] < late[1] < late[2]


def test_a_full_cache_of_answers_is_computed_again() -> None:
    requests = requests_of(*[(0.0, 20, 40)] * 4)
    run = _disaggregated(requests, cache_tokens=160)
    assert run.preemptions.sum() > 0
    assert run.steps.columns()[2].sum() > 0  # prompts that the server for answers computes again
    assert not np.isnan(run.last_token_ns).any()
    assert "kv_cache" in run.bound_by
    with pytest.raises(UnsupportedError, match="does not fit into a cache"):
        _disaggregated(requests, cache_tokens=40)


def test_reserved_pages_are_returned() -> None:
    policy = replace(SMALL, reserves=True)
    run = _disaggregated(_drawn(60, 3, concurrency=6), policy=policy, cache_tokens=160)
    assert not run.preemptions.any()
    assert run.peak_pages <= 160 / policy.page_tokens
    assert not np.isnan(run.last_token_ns).any()
