"""Continuous batching: scheduler policies, the requests in each step, and their completion times.

Steps follow one another. Each step decodes a token of the requests with finished prompts, and processes
prompts as the policy allows; then new requests start, within the limits on tokens per step, sequences and
cache pages (arXiv 2309.06180; chunked prompts: 2308.16369). Steps between two events that change the batch (a
request is done, one arrives, pages run out) differ only by the growing cache and are computed together, so
time is proportional to events, not to tokens. Running requests are columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from typing import Literal, NamedTuple

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.graph.deprecation import renamed_fields, warn_renamed
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.progress import Progress
from hespas.simulator.serving.batch import DecodingBatch, DecodingSequence, count_times
from hespas.simulator.serving.requests import Requests, ServingRun, StepLog, share_of
from hespas.simulator.serving.steps import StepTimes

__all__ = [
    "POLICIES",
    "SHOWN_EVERY",
    "Order",
    "Policy",
    "RequestState",
    "ServerPool",
    "ServerRun",
    "policy_of",
    "serve",
    "serve_replicas",
]


Order = Literal["mixed", "prefill-first"]
"""Handling of prompts: in the steps that decode (mixed), or in steps of their own before others
(prefill-first).
"""

_RENAMED = {
    "polls": "recv_interval",
    "ahead": "async_scheduling",
    "holds": "batch_wait_iters",
    "holds_tokens": "batch_wait_tokens",
}
"""Deprecated names of fields of :class:`Policy`, with their new names."""


@renamed_fields(**_RENAMED)
@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Scheduler settings of a serving engine.

    ``tokens`` and ``sequences`` are the maximum tokens per step and the maximum running sequences.
    ``chunked``: the rest of a prompt that does not fit is processed in the next step; otherwise prompts are
    processed whole. ``page_tokens``: tokens per cache page. ``order``: see :data:`Order`. ``reserves``: a
    request starts only if the cache has pages for its whole length, so no request is preempted. Otherwise, a
    request that needs a page when none is free preempts the youngest request, whose tokens are then
    recomputed. ``prefix_caching``: the pages of a preempted request stay valid until others need them, the
    last ones first, so that only the others' tokens are recomputed (vLLM: enable-prefix-caching).
    ``watermark``: share of the pages that must stay free when a request starts.

    ``recv_interval``: the scheduler receives requests every ``recv_interval`` decoding steps, and after steps
    that only process prompts (SGLang: scheduler-recv-interval). ``async_scheduling``: the scheduler forms the
    next step while the current one runs. ``batch_wait_iters``: maximum number of steps for which waiting
    requests are delayed, while sequences decode and a step has fewer than ``batch_wait_tokens`` tokens.
    ``captured``: a step with prompts of at most so many tokens is launched as CUDA graphs (vLLM:
    max_cudagraph_capture_size).
    """

    name: str = "vllm"
    tokens: int = 8192
    sequences: int = 256
    chunked: bool = True
    page_tokens: int = 16
    order: Order = "mixed"
    reserves: bool = False
    prefix_caching: bool = False
    watermark: float = 0.0
    recv_interval: int = 1
    async_scheduling: bool = False
    batch_wait_iters: int = 0
    batch_wait_tokens: int = 0
    captured: int = 0

    def __post_init__(self) -> None:
        """Check the settings. Raises ``UsageError``."""
        for name in ("tokens", "sequences", "page_tokens", "recv_interval"):
            if getattr(self, name) < 1:
                raise UsageError(f"invalid `{name}={getattr(self, name)}`", hint=f"use `{name}=1` or more")
        if not 0 <= self.watermark < 1:
            raise UsageError(
                f"invalid watermark {self.watermark:g}",
                hint="use a share from 0 to below 1: `watermark=0.01`",
            )


POLICIES: Mapping[str, Policy] = {
    "vllm": Policy(name="vllm", tokens=8192, sequences=1024, prefix_caching=True, captured=512),
    "sglang": Policy(name="sglang", tokens=16384, sequences=1024, order="prefill-first", page_tokens=1),
    "trtllm": Policy(name="trtllm", tokens=8192, sequences=2048, page_tokens=32, reserves=True),
}
"""Defaults of serving engines. vLLM's engine of 2025 (V1) decodes first and fills the step with prompts;
SGLang processes new prompts first, in steps of their own, with chunks of ``tokens``; TensorRT-LLM adds
prompts to the sequences in flight, and starts none that it might have to preempt (its capacity policy
GUARANTEED_NO_EVICT).
"""


def policy_of(name: str, **changes: int | float | bool | str | None) -> Policy:
    """Return the policy of an engine, with some settings replaced (None: not replaced). Raises ``UsageError``
    for an unknown name.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise UsageError(f"unknown serving engine: {name!r}", hint=f"use one of {', '.join(POLICIES)}")
    stated_changes: dict[str, int | float | bool | str] = {}
    for key, value in changes.items():
        if value is not None:
            if key in _RENAMED:
                warn_renamed(f"policy_of({key}=)", f"policy_of({_RENAMED[key]}=)")
            stated_changes[_RENAMED.get(key, key)] = value
    return replace(policy, **stated_changes)  # type: ignore[arg-type] # names and types are those of the fields


class ServerPool(NamedTuple):
    """Pool of identical replicas of attention, each with a KV cache of ``cache_tokens`` tokens."""

    steps: StepTimes
    policy: Policy
    replicas: int = 1
    cache_tokens: float = inf


_AT_ONCE = 1 << 16
"""Maximum number of steps that are computed together."""

SHOWN_EVERY = 100
"""Finished requests between two progress reports."""


def serve_replicas(
    requests: Requests,
    steps: StepTimes,
    policy: Policy,
    replicas: int,
    *,
    cache_tokens: float = inf,
    progress: Progress | None = None,
) -> tuple[ServingRun, ...]:
    """Return the runs of equal replicas, over which requests are distributed round-robin. Arguments and
    errors are as in :func:`serve`. Replicas beyond the number of concurrent requests stay idle and have no
    run.
    """
    busy = min(replicas, len(requests), requests.concurrency or len(requests))
    runs: list[ServingRun] = []
    for replica in range(busy):
        counted = None
        if progress is not None:
            finished = sum(len(run.requests) for run in runs)
            counted = partial(_report_progress, progress, finished, len(requests))
        share = share_of(requests, replica, busy)
        runs.append(serve(share, steps, policy, cache_tokens=cache_tokens, progress=counted))
    return tuple(runs)


def _report_progress(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    """Report progress over all replicas. ``done`` is the number of finished requests of the current replica,
    ``before`` the number of requests of earlier replicas, and ``total`` the number of all requests.
    """
    progress(before + done, total)


def serve(
    requests: Requests,
    steps: StepTimes,
    policy: Policy,
    *,
    cache_tokens: float = inf,
    progress: Progress | None = None,
) -> ServingRun:
    """Simulate a server with a KV cache of ``cache_tokens`` tokens, and return the times of its requests.

    ``progress`` is called with the number of finished requests and of all requests. O(events x running
    sequences). Raises ``UnsupportedError`` if a single request does not fit into the cache, or into a step of
    a policy without chunked prompts.
    """
    return ServerRun(requests, ServerPool(steps, policy, 1, cache_tokens)).run(progress)


@dataclass
class _PrefillChunk:
    """Prompt tokens that a step processes. ``prompts`` is the number of prompts, ``new_tokens`` their tokens
    in this step, and ``before`` the cached tokens of these prompts. ``sampled`` lists the requests whose
    prompts are finished after this step.
    """

    prompts: int = 0
    new_tokens: int = 0
    before: int = 0
    sampled: list[int] = field(default_factory=list[int])


class RequestState:
    """Columns of requests that are not in :class:`DecodingBatch`, shape ``(requests,)``. Servers that pass
    requests on share them.
    """

    def __init__(self, requests: Requests) -> None:
        count = len(requests)
        self.held = np.zeros(count)
        """Tokens of each request in the cache, unless it decodes."""
        self.target = requests.prompt.astype(np.int64).copy()
        """Tokens in the cache before decoding: the prompt, and tokens of preempted requests."""
        self.made = np.zeros(count)
        """Generated tokens of each request, unless it decodes."""
        self.scheduled, self.first, self.last = (np.full(count, np.nan) for _ in range(3))
        self.latest = np.full(count, np.nan)
        """Time of the latest token of each request, unless it decodes."""
        self.preemptions = np.zeros(count, np.int64)


class ServerRun:
    """State of a simulated LLM server while it runs. Requests are numbered as in :class:`Requests`.

    Without ``state``, all requests arrive at this server. With it, requests arrive by :meth:`accept`. A
    request whose prompt another server has processed starts to decode at once.
    """

    def __init__(
        self,
        requests: Requests,
        pool: ServerPool,
        state: RequestState | None = None,
        arrival_ns: FloatArray | None = None,
    ) -> None:
        steps, policy, _, cache_tokens = pool
        pages = inf if cache_tokens == inf else float(int(cache_tokens) // policy.page_tokens)
        longest = int((requests.prompt + requests.output).max()) if len(requests) else 0
        if -(-longest // policy.page_tokens) > pages:
            raise UnsupportedError(
                f"a request of {longest:,} tokens does not fit into a cache of {cache_tokens:,.0f} tokens",
                hint="use more ranks, a smaller `kv_cache_dtype`, or shorter requests",
            )
        if not policy.chunked and len(requests) and int(requests.prompt.max()) > policy.tokens:
            raise UnsupportedError(
                f"a prompt of {int(requests.prompt.max()):,} tokens does not fit into a step of "
                f"{policy.tokens:,} tokens",
                hint="use a larger `max_batched_tokens`, or chunked prompts",
            )
        self.requests, self.steps, self.policy, self.pages = requests, steps, policy, pages
        self.now = 0.0
        own = RequestState(requests) if state is None else state
        self.held, self.target, self.made, self.latest = own.held, own.target, own.made, own.latest
        self.scheduled, self.first, self.last = own.scheduled, own.first, own.last
        self.preemptions = own.preemptions
        self.arrival: FloatArray = np.full(len(requests), inf) if arrival_ns is None else arrival_ns
        """Time at which each request arrives at the server."""
        self.upcoming: deque[int] = deque()
        """Requests that will arrive, in order of arrival."""
        if state is None:
            first = requests.concurrency or len(requests)
            self.arrival[:first] = 0.0 if requests.concurrency else requests.arrival_ns
            self.upcoming.extend(range(min(first, len(requests))))
        self.waiting: deque[int] = deque()
        self.prompting: list[int] = []
        """Requests with unfinished prompts, the oldest first."""
        self.decoding = DecodingBatch(policy.page_tokens, steps.gain)
        self.output = requests.output.astype(np.int64)
        self.used = self.taken = 0.0
        """Pages in use, including those that the policy has reserved, and all pages that were ever taken."""
        self.left_behind: dict[int, tuple[int, float]] = {}
        """Preempted requests: their full pages, and the number of pages taken at which the first is lost."""
        self.done: list[int] = []
        """Finished requests, the first to finish first."""
        self.quiet_until = 0.0
        """Time before which no request finishes, unless one starts."""
        self.scheduled_at = 0.0
        """Time at which the scheduler formed the next step."""
        self.due = 0
        """Steps until the scheduler receives requests."""
        self.held_back = 0
        """Steps during which a waiting request was held back."""
        self.bound_by: set[str] = set()
        """Limits that delayed a request or split a prompt."""
        self.peak_pages = 0.0
        """Upper bound of the pages in use."""
        self.log = StepLog()
        self.overhead_ns, self.gain = steps.correction.request_ns, steps.gain

    @property
    def load(self) -> int:
        """Return the number of unfinished requests."""
        return len(self.upcoming) + len(self.waiting) + len(self.prompting) + len(self.decoding)

    @property
    def clock(self) -> float:
        """Return the time at which the next step starts; infinite without requests."""
        if self.waiting or self.prompting or len(self.decoding):
            return self.now
        if not self.upcoming:
            return inf
        return max(self.now, float(self.arrival[self.upcoming[0]]) + self.overhead_ns)

    @property
    def next_finish(self) -> float:
        """Return a time before which no request finishes."""
        is_full = len(self.decoding) >= self.policy.sequences
        starts = self.upcoming or (self.waiting and not is_full)
        return self.clock if starts else max(self.clock, self.quiet_until)

    def accept(self, request: int, arrival_ns: float) -> None:
        """Add a request that arrives at ``arrival_ns``, to be seen when the scheduler receives requests."""
        self.arrival[request] = arrival_ns
        position = len(self.upcoming)
        while position and self.arrival[self.upcoming[position - 1]] > arrival_ns:
            position -= 1
        self.upcoming.insert(position, request)

    def run(self, progress: Progress | None = None) -> ServingRun:
        """Simulate all steps until all requests are done."""
        shown = 0
        while self.clock < inf:
            if progress and len(self.done) >= shown:
                progress(len(self.done), len(self.requests))
                shown = len(self.done) + SHOWN_EVERY
            self.advance()
        return ServingRun(
            requests=self.requests,
            arrival_ns=self.arrival,
            scheduled_ns=self.scheduled,
            first_token_ns=self.first,
            last_token_ns=self.last,
            preemptions=self.preemptions,
            steps=self.log,
            bound_by=frozenset(self.bound_by),
            peak_pages=self.peak_pages,
        )

    def advance(self, horizon_ns: float = inf) -> None:
        """Simulate one step with prompts, or the steps until a request arrives or finishes, or the cache is
        full. Requests that arrive up to ``horizon_ns`` are known; steps that start later are left out.
        """
        self.now = max(self.now, self.clock)
        if not self.due or not len(self.decoding):  # the scheduler receives requests in this step
            self.due = self.policy.recv_interval
            self._receive(
                self.scheduled_at if self.policy.async_scheduling and len(self.decoding) else self.now
            )
        if (self.waiting or self.prompting) and not self._holds():
            chunk = self._prompts()
            if chunk.prompts:
                self._step(chunk)
                return
        self._decode(horizon_ns)

    def _receive(self, seen_ns: float) -> None:
        """Move the requests that arrived up to ``seen_ns`` to the waiting requests."""
        while self.upcoming and self.arrival[self.upcoming[0]] + self.overhead_ns <= seen_ns:
            self.waiting.append(self.upcoming.popleft())

    def _holds(self) -> bool:
        """Return True if the scheduler delays waiting requests, so that more of them start in one step
        (TensorRT-LLM's batch waiting).
        """
        policy = self.policy
        if self.held_back >= policy.batch_wait_iters or self.prompting or not len(self.decoding):
            return False
        tokens = len(self.decoding) + sum(int(self.target[request]) for request in self.waiting)
        return tokens < policy.batch_wait_tokens

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.policy.page_tokens)

    def _has_room(self, pages: float = 0.0, *, free: float = 0.0) -> bool:
        """Return True if the cache has ``pages`` free pages, in addition to one new page for each decoding
        sequence that needs it. The share ``free`` of all pages must stay free.
        """
        pages, most = self.used + pages, self.pages * (1 - free)
        if not self.policy.reserves:
            bound = pages + self.decoding.most_grown(self.gain)
            pages = bound if bound <= most else pages + self.decoding.grown(self.gain)
        if pages > most:
            self.bound_by.add("kv_cache")
            return False
        self.peak_pages = max(self.peak_pages, pages / (1 - free))
        return True

    def _make_room(self) -> None:
        """Preempt the youngest requests until the cache has a page for the next token of each decoding
        sequence.
        """
        while not (self.policy.reserves or self._has_room()):
            self._preempt()

    def _preempt(self) -> None:
        """Preempt the request that started last. Its tokens will be recomputed."""
        youngest = self.prompting.pop() if self.prompting else self._left(self.decoding.leave_last())
        if self.policy.prefix_caching:
            full = int(self.held[youngest]) // self.policy.page_tokens
            self.left_behind[youngest] = full, self.taken + self.pages - self.used
        self._free(youngest)
        self.preemptions[youngest] += 1
        self.target[youngest] = self.requests.prompt[youngest] + self.made[youngest]
        self.held[youngest] = 0
        self.waiting.appendleft(youngest)

    def _left(self, sequence: DecodingSequence) -> int:
        """Save the state of a sequence that stops decoding, and return the number of its request."""
        request = sequence.request
        self.held[request], self.made[request] = sequence.held, sequence.made
        self.latest[request] = sequence.latest
        return request

    def _free(self, request: int) -> None:
        tokens = ceil(self.held[request])
        if self.policy.reserves:
            tokens = int(self.requests.prompt[request] + self.output[request])
        self.used -= self._pages(tokens)

    def _prompts(self) -> _PrefillChunk:
        """Return the prompts that this step processes, and reserve cache pages for them."""
        policy, chunk = self.policy, _PrefillChunk()
        if policy.order == "mixed":
            self._make_room()
        decoded = len(self.decoding) * self.steps.queries
        left = policy.tokens - (decoded if policy.order == "mixed" else 0)
        for request in list(self.prompting):
            left = self._extend(chunk, request, left)
        while self.waiting and left > 0 and self._starts(self.waiting[0], left):
            request = self.waiting.popleft()
            if self.held[request] == self.target[request]:  # another server has processed the prompt
                left -= self._resume(request)
                continue
            if np.isnan(self.scheduled[request]):
                self.scheduled[request] = self.now
            if request in self.left_behind:
                full, lost_from = self.left_behind.pop(request)
                valid = max(full - max(self.taken - lost_from, 0.0), 0.0)
                valid = min(valid, (int(self.target[request]) - 1) // policy.page_tokens)
                self.held[request], self.used = valid * policy.page_tokens, self.used + valid
            if policy.reserves:
                self.used += self._pages(int(self.requests.prompt[request] + self.output[request]))
            self.prompting.append(request)
            left = self._extend(chunk, request, left)
        if self.waiting and left <= 0:
            self.bound_by.add("max_batched_tokens")
        if not chunk.prompts and self.prompting and not len(self.decoding):
            self._preempt()
            return self._prompts()
        return chunk

    def _resume(self, request: int) -> int:
        """Start to decode a request whose cache another server has sent. Return the tokens that it takes in
        the step.
        """
        held, output = float(self.held[request]), float(self.output[request])
        pages = self._pages(int(held + output if self.policy.reserves else held))
        self.used, self.taken = self.used + pages, self.taken + pages
        self.first[request] = self.latest[request] = self.quiet_until = self.now
        self.decoding.join(DecodingSequence(request, held, float(self.made[request]), output, self.now))
        return self.steps.queries

    def _starts(self, request: int, left: int) -> bool:
        """Return True if a waiting request can start in a step that has ``left`` tokens left."""
        policy = self.policy
        running = len(self.decoding) + len(self.prompting)
        if running >= policy.sequences:
            self.bound_by.add("max_num_seqs")
            return False
        if policy.order == "mixed" and running and (running + 1) * self.steps.queries > policy.tokens:
            self.bound_by.add("max_batched_tokens")
            return False
        target = int(self.target[request])
        if not policy.chunked and target > left:
            self.bound_by.add("max_batched_tokens")
            return False
        held = int(self.requests.prompt[request] + self.output[request]) if policy.reserves else target
        alone = not len(self.decoding) and not self.prompting
        return alone or self._has_room(self._pages(held), free=policy.watermark)

    def _extend(self, chunk: _PrefillChunk, request: int, left: int) -> int:
        """Add as much of a request's prompt to ``chunk`` as the step's tokens and the cache allow. Return the
        tokens that are left in the step.
        """
        held = int(self.held[request])
        count = int(self.target[request]) - held
        if count > left:
            self.bound_by.add("max_batched_tokens")
            count = left
        if count <= 0:
            return left
        if not self.policy.reserves:
            more = self._pages(held + count) - self._pages(held)
            if not self._has_room(more):
                return left
            self.used += more
            self.taken += more
        self.held[request] = held + count
        chunk.prompts += 1
        chunk.new_tokens += count
        chunk.before += held
        if held + count == self.target[request]:
            chunk.sampled.append(request)
        return left - count

    def _step(self, chunk: _PrefillChunk) -> None:
        """Run one step that processes the prompts in ``chunk`` and decodes."""
        batch = len(self.decoding) if self.policy.order == "mixed" else 0
        context = float(np.add.reduce(self.decoding.held)) / batch if batch else 0.0
        time = self.steps.step_ns(
            batch=batch, context=context, prompts=chunk.prompts, new_tokens=chunk.new_tokens,
            before=chunk.before / chunk.prompts, sampled=batch + len(chunk.sampled),
        )  # fmt: skip
        self.scheduled_at = self.now
        self.now += time
        self.quiet_until, self.held_back = self.now, 0
        self.due = (self.due - 1) % self.policy.recv_interval if batch else 0
        self.log.add(
            time, batch, chunk.new_tokens, context=context, prompts=chunk.prompts,
            before=chunk.before / chunk.prompts, sampled=batch + len(chunk.sampled),
        )  # fmt: skip
        self._log_gaps(
            batch, [float(self.latest[request]) for request in chunk.sampled if self.made[request]]
        )
        if batch:
            self._generate(1)
        for request in chunk.sampled:
            self.prompting.remove(request)
            if np.isnan(self.first[request]):
                self.first[request] = self.now
            self.latest[request] = self.now
            self.made[request] += 1
            made, output = float(self.made[request]), float(self.output[request])
            if made >= output:
                self._done(request)
            else:
                held = float(self.held[request])
                self.decoding.join(DecodingSequence(request, held, made, output, self.now))

    def _decode(self, horizon_ns: float) -> None:
        """Run steps that only decode, until a request finishes, arrives, or lacks a cache page. Steps that
        would start after ``horizon_ns`` are left out.
        """
        self._make_room()
        batch, gain = len(self.decoding), self.gain
        count = ceil(self.decoding.least_left / gain)
        count = min(count, _AT_ONCE, self._steps_with_room(count))
        context = float(np.add.reduce(self.decoding.held)) / batch
        times = self.steps.decode_ns(batch, context + gain * np.arange(count, dtype=np.float64))
        ends = self.now + times.cumsum()
        self.quiet_until = float(ends[-1])
        arrives = float(self.arrival[self.upcoming[0]]) + self.overhead_ns if self.upcoming else inf
        if batch < self.policy.sequences:
            after = int(ends.searchsorted(arrives)) + 1
            if self.policy.async_scheduling and arrives > self.now:
                after += 1
            recv_interval = self.policy.recv_interval
            first = self.due or recv_interval
            count = min(count, first + -(-max(after - first, 0) // recv_interval) * recv_interval)
        elif arrives <= ends[-1]:
            self.bound_by.add("max_num_seqs")
        if horizon_ns < ends[count - 1]:
            count = min(count, int(ends.searchsorted(horizon_ns)) + 1)
        if self.waiting and self.held_back < self.policy.batch_wait_iters:
            count = min(count, self.policy.batch_wait_iters - self.held_back)
            self.held_back += count
        # In a full batch nothing starts, but the scheduler receives requests every few steps.
        ahead = 1 if self.policy.async_scheduling else 0
        for step in range(self.due, count, self.policy.recv_interval) if arrives <= ends[count - 1] else ():
            was_waiting = bool(self.waiting)
            self._receive(float(ends[step - ahead - 1]) if step > ahead else self.now)
            if self.waiting and not was_waiting and self.held_back < self.policy.batch_wait_iters:
                self.held_back = min(self.held_back + count - step, self.policy.batch_wait_iters)
        self.due = (self.due - count) % self.policy.recv_interval
        self.log.add_decoding(times[:count], batch, context + gain * (count - 1) / 2)
        self.scheduled_at = float(ends[count - 1] - times[count - 1])
        self.now = float(ends[0])
        self._log_gaps(batch, [])
        if count > 1:
            self.log.add_gaps(times[1:count], batch)
            self.now = float(ends[count - 1])
            self.decoding.generated(self.now)
        self._generate(count)

    def _log_gaps(self, batch: int, again: list[float]) -> None:
        """Log the time since the previous token of each request that generates a token now: of the decoding
        sequences (if ``batch`` is not 0), and of other requests, whose previous tokens were at the times
        ``again``.
        """
        for before, tokens in self.decoding.latest(self.now, again) if batch else count_times(again):
            self.log.add_gap(self.now - before, tokens)

    def _steps_with_room(self, most: int) -> int:
        """Return the number of decoding steps until the cache is full: at least one, at most ``most``."""
        gain, decoding = self.gain, self.decoding
        if self.policy.reserves:
            return most
        for grown in (decoding.most_grown, decoding.grown):
            if (pages := self.used + grown(most * gain)) <= self.pages:
                self.peak_pages = max(self.peak_pages, pages)
                return most
        self.bound_by.add("kv_cache")
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.used + decoding.grown(middle * gain) <= self.pages
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _generate(self, count: int) -> None:
        """Add the tokens of ``count`` decoding steps to each sequence."""
        grown, done = self.decoding.generate(count * self.gain)
        if not self.policy.reserves:
            self.used += grown
            self.taken += grown
        for sequence in done:
            self._done(self._left(sequence))

    def _done(self, request: int) -> None:
        self.last[request] = self.now
        self._free(request)
        if self.requests.concurrency:
            following = self.requests.concurrency + len(self.done)
            if following < len(self.arrival):
                self.accept(following, self.now)
        self.done.append(request)
