"""Continuous batching: which requests each step works on, and when each is done.

Steps follow one another. Each decodes a token of the requests whose prompts are done, and works on prompts
as the policy lets it; then come new requests, as long as a step has tokens left, the server sequences and
the cache pages (arXiv 2309.06180; chunked prompts: 2308.16369). Steps between two events that change who is
in the batch (a request is done, one arrives, pages run out) differ by the growing cache only and are computed
together; so time is proportional to events, not to tokens. Requests under way are columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.graph.errors import UnsupportedError
from hespas.simulator.serving.decoding import Decoding, Sequence, groups
from hespas.simulator.serving.policy import Policy
from hespas.simulator.serving.requests import Requests
from hespas.simulator.serving.results import ServingRun, Steps
from hespas.simulator.serving.steps import StepTimes

__all__ = ["serve"]

_AT_ONCE = 1 << 16
"""Steps that are computed together at most."""
_SHOWN_EVERY = 100
"""Finished requests between two reports of progress."""


def serve(
    requests: Requests,
    steps: StepTimes,
    policy: Policy,
    *,
    cache_tokens: float = inf,
    progress: Callable[[int, int], None] | None = None,
) -> ServingRun:
    """Return the run of requests on a server whose cache holds ``cache_tokens``; ``progress`` is called with
    the finished requests and all. O(events x sequences under way).

    Raises ``UnsupportedError`` where a request alone does not fit into the cache, or into a step of a policy
    that does not cut prompts.
    """
    pages = inf if cache_tokens == inf else float(int(cache_tokens) // policy.page_tokens)
    longest = int((requests.prompt + requests.output).max()) if len(requests) else 0
    if -(-longest // policy.page_tokens) > pages:
        raise UnsupportedError(
            f"a request of {longest:,} tokens does not fit into a cache of {cache_tokens:,.0f}",
            hint="more ranks, a smaller `kv_cache_dtype`, or shorter requests",
        )
    if not policy.chunked and len(requests) and int(requests.prompt.max()) > policy.tokens:
        raise UnsupportedError(
            f"a prompt of {int(requests.prompt.max()):,} tokens does not fit into a step of "
            f"{policy.tokens:,}",
            hint="a larger `max_batched_tokens`, or chunked prompts",
        )
    return _Server(requests, steps, policy, pages).run(progress)


@dataclass
class _Chunk:
    """Prompts of a step: how many, their new tokens, tokens before them in all, and whose are done."""

    prompts: int = 0
    new_tokens: int = 0
    before: int = 0
    sampled: list[int] = field(default_factory=list[int])


class _Server:
    """The state of a run. Rows of requests are those of :class:`Requests`."""

    def __init__(self, requests: Requests, steps: StepTimes, policy: Policy, pages: float) -> None:
        count = len(requests)
        self.requests, self.steps, self.policy, self.pages = requests, steps, policy, pages
        self.now = 0.0
        self.arrival: FloatArray = requests.arrival_ns.astype(np.float64)
        if requests.concurrency:
            self.arrival = np.full(count, inf)
            self.arrival[: requests.concurrency] = 0.0
        self.coming = 0
        """The next request that is yet to arrive."""
        self.waiting: deque[int] = deque()
        self.prompting: list[int] = []
        """Requests whose prompts are under way, the oldest first."""
        self.decoding = Decoding(policy.page_tokens, steps.gain)
        self.held = np.zeros(count)
        """Tokens of each in the cache, unless it decodes."""
        self.target = requests.prompt.astype(np.int64).copy()
        """Tokens that have to be in the cache before it decodes: the prompt, and what was put back."""
        self.made = np.zeros(count)
        """Tokens each has given, unless it decodes."""
        self.output = requests.output.astype(np.int64)
        self.scheduled, self.first, self.last = (np.full(count, np.nan) for _ in range(3))
        self.latest = np.full(count, np.nan)
        """When each gave its latest token, unless it decodes."""
        self.put_back = np.zeros(count, np.int64)
        self.used = 0.0
        """Pages in use, those that a reserving policy has promised included."""
        self.finished = 0
        self.looked = 0.0
        """When the scheduler formed the next step."""
        self.due = 0
        """Steps until the scheduler looks who has come."""
        self.held_back = 0
        """Steps since somebody waits who could be started."""
        self.log = Steps()
        self.outside, self.gain = steps.correction.request_ns, steps.gain

    def run(self, progress: Callable[[int, int], None] | None = None) -> ServingRun:
        """Simulate all steps until no request is left."""
        shown = 0
        while self.coming < len(self.requests) or self.waiting or self.prompting or len(self.decoding):
            if progress and self.finished >= shown:
                progress(self.finished, len(self.requests))
                shown = self.finished + _SHOWN_EVERY
            self._arrive()
            if not (self.waiting or self.prompting or len(self.decoding)):
                self.now = max(self.now, float(self.arrival[self.coming]) + self.outside)
                continue
            if (self.waiting or self.prompting) and not self._holds():
                chunk = self._prompts()
                if chunk.prompts:
                    self._step(chunk)
                    continue
            self._decode()
        return ServingRun(
            requests=self.requests,
            arrival_ns=self.arrival,
            scheduled_ns=self.scheduled,
            first_token_ns=self.first,
            last_token_ns=self.last,
            put_back=self.put_back,
            steps=self.log,
        )

    def _arrive(self) -> None:
        """Whoever has come by now waits, if the scheduler looks."""
        if self.due and len(self.decoding):
            return
        self.due = self.policy.polls
        seen = self.looked if self.policy.ahead and len(self.decoding) else self.now
        while self.coming < len(self.arrival) and self.arrival[self.coming] + self.outside <= seen:
            self.waiting.append(self.coming)
            self.coming += 1

    def _holds(self) -> bool:
        """Whether those who wait are held back for others."""
        policy = self.policy
        if self.held_back >= policy.holds or self.prompting or not len(self.decoding):
            return False
        tokens = len(self.decoding) + sum(int(self.target[request]) for request in self.waiting)
        return tokens < policy.holds_tokens

    # --- pages

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.policy.page_tokens)

    def _has_room(self, pages: float = 0.0, *, free: float = 0.0) -> bool:
        """Whether so many pages are left beside those that sequences that decode need for their next token;
        ``free`` of all stay free.
        """
        pages, most = self.used + pages, self.pages * (1 - free)
        if self.policy.reserves:
            return pages <= most
        if pages + self.decoding.most_grown(self.gain) <= most:
            return True
        return pages + self.decoding.grown(self.gain) <= most

    def _make_room(self) -> None:
        """Put the youngest requests back until each that decodes has a page for its next token."""
        while not (self.policy.reserves or self._has_room()):
            self._put_back()

    def _put_back(self) -> None:
        """The youngest request leaves the cache; its tokens are worked on again."""
        youngest = self._youngest()
        self._free(youngest)
        self.put_back[youngest] += 1
        self.target[youngest] = self.requests.prompt[youngest] + self.made[youngest]
        self.held[youngest] = 0
        self.waiting.appendleft(youngest)

    def _youngest(self) -> int:
        """The one that started last leaves."""
        if self.prompting:
            return self.prompting.pop()
        return self._left(self.decoding.leave_last())

    def _left(self, sequence: Sequence) -> int:
        """Note the state of a request that decodes no more."""
        request = sequence.request
        self.held[request], self.made[request] = sequence.held, sequence.made
        self.latest[request] = sequence.latest
        return request

    def _free(self, request: int) -> None:
        tokens = ceil(self.held[request])
        if self.policy.reserves:
            tokens = int(self.requests.prompt[request] + self.output[request])
        self.used -= self._pages(tokens)

    # --- prompts

    def _prompts(self) -> _Chunk:
        """What a step works on beside those that decode, and the pages for it."""
        policy, chunk = self.policy, _Chunk()
        if policy.order == "mixed":
            self._make_room()
        decoded = len(self.decoding) * self.steps.queries
        left = policy.tokens - (decoded if policy.order == "mixed" else 0)
        for request in list(self.prompting):
            left = self._extend(chunk, request, left)
        while self.waiting and left > 0 and self._starts(self.waiting[0], left):
            request = self.waiting.popleft()
            if np.isnan(self.scheduled[request]):
                self.scheduled[request] = self.now
            if policy.reserves:
                self.used += self._pages(int(self.requests.prompt[request] + self.output[request]))
            self.prompting.append(request)
            left = self._extend(chunk, request, left)
        if not chunk.prompts and self.prompting and not len(self.decoding):
            self._put_back()
            return self._prompts()
        return chunk

    def _starts(self, request: int, left: int) -> bool:
        """Whether a request that waits can be started with so many tokens of the step left."""
        policy = self.policy
        if len(self.decoding) + len(self.prompting) >= policy.sequences:
            return False
        target = int(self.target[request])
        if not policy.chunked and target > left:
            return False
        held = int(self.requests.prompt[request] + self.output[request]) if policy.reserves else target
        alone = not len(self.decoding) and not self.prompting
        return alone or self._has_room(self._pages(held), free=policy.watermark)

    def _extend(self, chunk: _Chunk, request: int, left: int) -> int:
        """Work on as much of a prompt as a step has tokens left and the cache pages; what is left then."""
        held = int(self.held[request])
        count = min(int(self.target[request]) - held, left)
        if count <= 0:
            return left
        if not self.policy.reserves:
            more = self._pages(held + count) - self._pages(held)
            if not self._has_room(more):
                return left
            self.used += more
        self.held[request] = held + count
        chunk.prompts += 1
        chunk.new_tokens += count
        chunk.before += held
        if held + count == self.target[request]:
            chunk.sampled.append(request)
        return left - count

    # --- steps

    def _step(self, chunk: _Chunk) -> None:
        """A step that works on prompts."""
        batch = len(self.decoding) if self.policy.order == "mixed" else 0
        context = float(np.add.reduce(self.decoding.held)) / batch if batch else 0.0
        time = self.steps.step_ns(
            batch=batch, context=context, prompts=chunk.prompts, new_tokens=chunk.new_tokens,
            before=chunk.before / chunk.prompts, sampled=batch + len(chunk.sampled),
        )  # fmt: skip
        self.looked = self.now
        self.now += time
        self.held_back = 0
        self.due = (self.due - 1) % self.policy.polls if batch else 0
        self.log.add(time, batch, chunk.new_tokens)
        self._log_gaps(batch, [float(self.latest[each]) for each in chunk.sampled if self.made[each]])
        if batch:
            self._give(1)
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
                self.decoding.join(Sequence(request, held, made, output, self.now))

    def _decode(self) -> None:
        """Steps that only decode, until something changes who is in them."""
        self._make_room()
        batch, gain = len(self.decoding), self.gain
        count = ceil(self.decoding.least_left / gain)
        count = min(count, _AT_ONCE, self._steps_with_room(count))
        context = float(np.add.reduce(self.decoding.held)) / batch
        times = self.steps.decode_ns(batch, context + gain * np.arange(count, dtype=np.float64))
        ends = self.now + times.cumsum()
        if self.coming < len(self.arrival) and batch < self.policy.sequences:
            arrives = float(self.arrival[self.coming]) + self.outside
            after = int(ends.searchsorted(arrives)) + 1
            if self.policy.ahead and arrives > self.now:
                after += 1
            count = min(count, self._seen(after))
        if self.waiting and self.held_back < self.policy.holds:
            count = min(count, self.policy.holds - self.held_back)
            self.held_back += count
        self.due = (self.due - count) % self.policy.polls
        self.log.add_decoding(times[:count], batch)
        self.looked = float(ends[count - 1] - times[count - 1])
        self.now = float(ends[0])
        self._log_gaps(batch, [])
        if count > 1:
            self.log.add_gaps(times[1:count], batch)
            self.now = float(ends[count - 1])
            self.decoding.gave(self.now)
        self._give(count)

    def _log_gaps(self, batch: int, again: list[float]) -> None:
        """Log that those that decode, if any do in this step, give a token now, and so do others that gave
        their latest at the times ``again``. Those that gave their latest in one step are logged together.
        """
        for before, tokens in self.decoding.latest(self.now, again) if batch else groups(again):
            self.log.add_gap(self.now - before, tokens)

    def _seen(self, after: int) -> int:
        """Steps until the scheduler looks, at least so many."""
        polls = self.policy.polls
        first = self.due or polls
        return first + -(-max(after - first, 0) // polls) * polls

    def _steps_with_room(self, most: int) -> int:
        """Steps after which the cache is full, at least one and at most ``most``."""
        gain, decoding = self.gain, self.decoding
        if self.policy.reserves or self.used + decoding.most_grown(most * gain) <= self.pages:
            return most
        if self.used + decoding.grown(most * gain) <= self.pages:
            return most
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.used + decoding.grown(middle * gain) <= self.pages
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _give(self, count: int) -> None:
        """Each that decodes gives tokens of so many steps."""
        grown, done = self.decoding.give(count * self.gain)
        if not self.policy.reserves:
            self.used += grown
        for sequence in done:
            self._done(self._left(sequence))

    def _done(self, request: int) -> None:
        self.last[request] = self.now
        self._free(request)
        if self.requests.concurrency:
            following = self.requests.concurrency + self.finished
            if following < len(self.arrival):
                self.arrival[following] = self.now
        self.finished += 1
