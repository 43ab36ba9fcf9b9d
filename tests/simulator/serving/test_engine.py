"""Continuous batching, compared with results by hand, and with single steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph.errors import UnsupportedError, UsageError
from hespas.simulator.serving import (
    POLICIES,
    SHARES,
    Correction,
    Drafts,
    Policy,
    Requests,
    ServingRun,
    arrivals_of_bursts,
    arrivals_of_poisson,
    engine,
    lengths,
    policy_of,
    serve,
    weighted_percentile,
)
from tests.simulator.serving.small_servers import SMALL, SmallGrids, even_steps, requests_of


def test_drafts_by_hand() -> None:
    draft = even_steps()
    steps = replace(even_steps(), drafts=Drafts(tokens=2, times=draft, acceptance=(0.5, 0.25)))
    assert steps.queries == 3
    assert steps.gain == 1.75
    # a step of 2 x 3 tokens, and twice a step of 2 tokens of the draft model; each reads 2 x 50 cached tokens
    assert steps.decode_ns(2, np.array([50.0]))[0] == pytest.approx(106 + 1 + 2 * (102 + 1))
    # the draft model processes the prompt too
    time_ns = steps.step_ns(batch=2, context=50.0, prompts=1, new_tokens=20, before=0, sampled=3)
    assert time_ns == pytest.approx((126 + 1) + 2 * (102 + 1) + 120)
    free = replace(even_steps(), drafts=Drafts(tokens=2))
    assert free.decode_ns(2, np.array([50.0]))[0] == pytest.approx(106 + 1)


def test_steps_hold_their_speculative_tokens() -> None:
    steps = replace(even_steps(), drafts=Drafts(tokens=15)).corrected(Correction(accepts=0.5))
    rows = [(0.0, 4, 50)] * 8
    run = serve(requests_of(*rows), steps, replace(SMALL, sequences=8))
    _, batch, *_ = run.steps.columns()
    assert batch.max() * steps.queries <= SMALL.tokens
    assert "max_batched_tokens" in run.bound_by


@pytest.mark.parametrize("kind", ["model", "free"])
def test_bases_of_drafts_have_the_time_of_the_steps(kind: str) -> None:
    times = even_steps()
    tables = times.of_tokens, times.of_rows, times.of_decode, times.of_prompts
    based = replace(times, bases=("measured",), by_basis=tuple(table[None] for table in tables))
    drafts = {
        "model": Drafts(tokens=2, times=based),
        "free": Drafts(tokens=2),
    }[kind]
    run = serve(requests_of((0.0, 40, 7), (50.0, 30, 9)), replace(based, drafts=drafts), SMALL)
    time_ns = float(run.steps.columns()[0].sum())
    assert replace(based, drafts=drafts).basis_times_ns([run.steps]) == pytest.approx({"measured": time_ns})


def test_one_request_by_hand() -> None:
    run = serve(requests_of((1000.0, 40, 3)), even_steps(), SMALL)
    # a prompt of 40 tokens, then two steps of one token behind 40 and 41 tokens
    assert run.ttft_ns.tolist() == [140.0]
    assert run.last_token_ns[0] == pytest.approx(1140 + (101 + 0.40) + (101 + 0.41))
    assert run.tpot_ns[0] == pytest.approx((101.40 + 101.41) / 2)
    assert run.makespan_ns == pytest.approx(run.latency_ns[0])
    gaps, tokens = run.gaps()
    assert gaps.tolist() == pytest.approx([101.40, 101.41])
    assert tokens.tolist() == [1, 1]


def test_a_prompt_is_cut_and_shares_steps_with_decoding() -> None:
    run = serve(requests_of((0.0, 10, 50), (150.0, 100, 2)), even_steps(), SMALL)
    _, batch, prompt = run.steps.columns()
    assert prompt[prompt > 0].tolist() == [10, 63, 37]
    assert batch[prompt > 0].tolist() == [0, 1, 1]


def test_prompts_first_in_steps_of_their_own() -> None:
    policy = replace(SMALL, order="prefill-first")
    run = serve(requests_of((0.0, 10, 50), (150.0, 100, 2)), even_steps(), policy)
    _, batch, prompt = run.steps.columns()
    assert prompt[prompt > 0].tolist() == [10, 64, 36]
    assert not (batch[prompt > 0] > 0).any()
    gaps, tokens = run.gaps()
    # the first waits for both steps of the second prompt and one that decodes, the second for that one
    assert np.sort(gaps)[-2:].tolist() == pytest.approx([103, 164 + 136 + 103], rel=0.01)
    assert tokens.sum() == 49 + 1


def test_whole_prompts_wait_for_room_in_a_step() -> None:
    policy = replace(SMALL, chunked=False)
    run = serve(requests_of((0.0, 40, 1), (0.0, 40, 1)), even_steps(), policy)
    assert run.steps.columns()[2].tolist() == [40, 40]
    with pytest.raises(UnsupportedError, match="does not fit into a step"):
        serve(requests_of((0.0, 65, 1)), even_steps(), policy)


def test_want_of_pages_puts_the_youngest_back() -> None:
    requests = requests_of((0.0, 8, 20), (0.0, 8, 20))
    run = serve(requests, even_steps(), SMALL, cache_tokens=40)
    assert run.preemptions.tolist() == [0, 1]
    # both together need 14 pages of the 10; the second starts over once the first is done
    assert run.last_token_ns[1] > run.last_token_ns[0]
    reserved = serve(requests, even_steps(), replace(SMALL, reserves=True), cache_tokens=40)
    assert reserved.preemptions.tolist() == [0, 0]
    assert reserved.scheduled_ns[1] == reserved.last_token_ns[0]


@pytest.mark.parametrize(("prefix_caching", "computed"), [(False, 21), (True, 9)])
def test_pages_of_a_preempted_request_stay_until_others_need_them(
    prefix_caching: bool, computed: int
) -> None:
    # the second is preempted with 20 tokens in five pages, of which the first takes two until it is done
    policy = replace(SMALL, prefix_caching=prefix_caching)
    run = serve(requests_of((0.0, 8, 20), (0.0, 8, 20)), even_steps(), policy, cache_tokens=40)
    tokens = run.steps.columns()[2]
    assert run.preemptions.tolist() == [0, 1]
    assert tokens[tokens > 0].tolist() == [16, computed]


def test_a_request_that_never_fits() -> None:
    with pytest.raises(UnsupportedError, match="a request of 44 tokens"):
        serve(requests_of((0.0, 40, 4)), even_steps(), SMALL, cache_tokens=40)


def test_concurrency_holds_requests_back() -> None:
    run = serve(requests_of(*[(0.0, 8, 5)] * 6, concurrency=2), even_steps(), SMALL)
    ends = np.sort(run.last_token_ns)
    assert run.arrival_ns[:2].tolist() == [0.0, 0.0]
    assert run.arrival_ns[2:].tolist() == ends[:4].tolist()


def test_time_outside_of_steps_delays_the_first_token() -> None:
    steps = even_steps().corrected(Correction(request_ns=500.0, step_ns=10.0, sequence_ns=2.0, prompt_ns=7.0))
    run = serve(requests_of((0.0, 40, 2)), steps, SMALL)
    assert run.ttft_ns.tolist() == [500 + 140 + 10 + 7]
    assert run.tpot_ns[0] == pytest.approx(101.4 + 10 + 2)


_MANY = st.lists(
    st.tuples(st.floats(0, 3000), st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=25
).map(lambda rows: requests_of(*sorted(rows)))
_POLICIES = st.builds(
    Policy,
    tokens=st.integers(8, 128),
    sequences=st.integers(1, 8),
    page_tokens=st.sampled_from((1, 4, 16)),
    order=st.sampled_from(("mixed", "prefill-first")),
    reserves=st.booleans(),
    prefix_caching=st.booleans(),
    recv_interval=st.sampled_from((1, 1, 3, 7)),
    async_scheduling=st.booleans(),
    batch_wait_iters=st.sampled_from((0, 0, 5)),
    batch_wait_tokens=st.sampled_from((6, 64)),
)


def _same(one: ServingRun, two: ServingRun) -> bool:
    pairs = ((one.first_token_ns, two.first_token_ns), (one.last_token_ns, two.last_token_ns))
    return all(np.allclose(left, right) for left, right in pairs)


@settings(max_examples=150)
@given(_MANY, _POLICIES, st.integers(130, 400))
def test_runs_keep_their_promises(requests: Requests, policy: Policy, cache: int) -> None:
    run = serve(requests, even_steps(), policy, cache_tokens=cache + policy.page_tokens)
    time, batch, prompt = run.steps.columns()
    given_tokens = int(batch.sum()) + len(requests)
    # a prompt that is done after it was put back gives a token, too
    assert given_tokens + int(run.preemptions.sum()) >= int(requests.output.sum()) >= given_tokens
    assert prompt.sum() >= requests.prompt.sum()
    assert (batch <= policy.sequences).all()
    assert (prompt <= policy.tokens).all()
    assert (run.scheduled_ns >= run.arrival_ns).all()
    assert (run.last_token_ns >= run.first_token_ns).all()
    assert time.sum() <= run.makespan_ns * (1 + 1e-9)
    if policy.reserves:
        assert not run.preemptions.any()
    gaps, tokens = run.gaps()
    assert tokens.sum() == (requests.output - 1).sum()
    assert float((gaps * tokens).sum()) == pytest.approx((run.last_token_ns - run.first_token_ns).sum())


@settings(max_examples=80)
@given(_MANY, _POLICIES, st.integers(130, 400))
def test_steps_together_are_steps_one_by_one(requests: Requests, policy: Policy, cache: int) -> None:
    cache += policy.page_tokens
    together = serve(requests, even_steps(), policy, cache_tokens=cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_AT_ONCE", 1)
        alone = serve(requests, even_steps(), policy, cache_tokens=cache)
    assert _same(together, alone)
    assert together.preemptions.tolist() == alone.preemptions.tolist()


def test_arrivals() -> None:
    generator = np.random.default_rng(0)
    times = arrivals_of_poisson(20_000, 50.0, generator)
    assert len(times) / times[-1] * 1e9 == pytest.approx(50, rel=0.03)
    assert arrivals_of_bursts(5, 4.0, 2).tolist() == [0.0, 0.0, 5e8, 5e8, 1e9]
    drawn = lengths(1000, 100, 0.8, generator)
    assert (drawn.min(), drawn.max()) == (80, 100)
    for wrong in (lambda: arrivals_of_poisson(1, 0.0, generator), lambda: lengths(1, 10, 1.5, generator)):
        with pytest.raises(UsageError):
            wrong()


def test_policies_by_name() -> None:
    assert policy_of("sglang").order == "prefill-first"
    assert policy_of("vllm", tokens=512, sequences=None).tokens == 512
    assert set(POLICIES) == {"vllm", "sglang", "trtllm"}
    for name, changes in (("nothing", {}), ("vllm", {"tokens": 0}), ("vllm", {"watermark": 1.0})):
        with pytest.raises(UsageError):
            policy_of(name, **changes)


def test_percentiles_by_weight() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1, 8, 1])
    assert weighted_percentile(values, weights, 0.5) == 1.0
    assert weighted_percentile(values, weights, 0.95) == 3.0
    assert np.isnan(weighted_percentile(values[:0], weights[:0], 0.5))


def test_a_scheduler_that_looks_seldom_keeps_who_comes_waiting() -> None:
    requests = requests_of((0.0, 10, 50), (150.0, 10, 2))
    often, seldom = (serve(requests, even_steps(), replace(SMALL, recv_interval=polls)) for polls in (1, 10))
    # one step for the first prompt, then one that decodes while the second comes
    assert int(np.sum(often.steps.columns()[0].cumsum() < often.scheduled_ns[1])) + 1 == 2
    _, _, prompts = seldom.steps.columns()
    assert np.flatnonzero(prompts).tolist() == [0, 11]
    assert seldom.scheduled_ns[1] > often.scheduled_ns[1]
    alone = serve(requests_of((0.0, 10, 3), (5000.0, 10, 2)), even_steps(), replace(SMALL, recv_interval=10))
    assert alone.scheduled_ns[1] == 5000.0


def test_a_step_formed_ahead_is_without_who_came_meanwhile() -> None:
    requests = requests_of((0.0, 10, 50), (150.0, 10, 2))
    late = serve(requests, even_steps(), replace(SMALL, async_scheduling=True))
    _, _, prompts = late.steps.columns()
    assert np.flatnonzero(prompts).tolist() == [0, 3]


def test_prompts_are_held_back_for_others() -> None:
    requests = requests_of((0.0, 10, 50), (150.0, 10, 2), (600.0, 10, 2))
    held = serve(requests, even_steps(), replace(SMALL, batch_wait_iters=20, batch_wait_tokens=21))
    assert held.scheduled_ns[1] == held.scheduled_ns[2] >= 600.0
    timed = serve(requests, even_steps(), replace(SMALL, batch_wait_iters=20, batch_wait_tokens=64))
    _, _, prompts = timed.steps.columns()
    assert np.flatnonzero(prompts).tolist() == [0, 22]


def test_steps_with_prompts_are_no_shorter_than_their_launches() -> None:
    steps = replace(even_steps(), kernels=50.0).corrected(Correction(launch_ns=10.0))
    run = serve(requests_of((0.0, 40, 3)), steps, SMALL)
    assert run.ttft_ns[0] == pytest.approx(500, rel=0.01)
    assert run.tpot_ns[0] == pytest.approx((101.40 + 101.41) / 2)


def test_guesses_that_are_right_save_steps() -> None:
    steps = replace(even_steps(), drafts=Drafts(tokens=1)).corrected(Correction(accepts=1.0))
    assert steps.gain == 2.0
    run = serve(requests_of((0.0, 40, 5)), steps, SMALL)
    # two tokens of each step, which works on two tokens and guesses one: no layers of its own here
    assert len(run.steps.columns()[0]) == 3
    assert run.tpot_ns[0] == pytest.approx((102.40 + 102.42) / 4)
    never = steps.corrected(Correction(accepts=0.0))
    assert len(serve(requests_of((0.0, 40, 5)), never, SMALL).steps.columns()[0]) == 5


def test_experts_have_a_factor_of_their_own_where_they_work_on_prompts() -> None:
    tokens = np.zeros((len(SHARES), 2))
    tokens[SHARES.index("products")] = tokens[SHARES.index("experts")] = [1000.0, 8000.0]
    steps = replace(even_steps(), grids=replace(SmallGrids(), tokens=(256, 2048)), of_tokens=tokens)

    def time(new_tokens: int, correction: Correction) -> float:
        return steps.corrected(correction).step_ns(
            batch=0, context=0.0, prompts=1, new_tokens=new_tokens, before=0.0, sampled=1
        )

    assert time(2048, Correction(experts=3.0)) == pytest.approx(8000 + 3 * 8000)
    assert time(256, Correction(experts=3.0)) == pytest.approx(time(256, Correction()))
    assert time(2048, Correction(experts=3.0, products=2.0, prefill=1.5)) == pytest.approx(
        1.5 * 2 * (8000 + 3 * 8000)
    )


def test_progress_counts_finished_requests() -> None:
    seen: list[tuple[int, int]] = []
    count = 250
    requests = Requests(
        arrival_ns=np.zeros(count), prompt=np.full(count, 8), output=np.full(count, 2), concurrency=4
    )
    serve(requests, even_steps(), SMALL, progress=lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [count] * len(seen)
    done = [each for each, _ in seen]
    assert done == sorted(done)
    assert 2 <= len(done) <= 4
