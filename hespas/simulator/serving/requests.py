"""Requests to a server (recorded, from an arrival process, or from clients that wait for answers), and their
times in a run.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.deprecation import RenamedAttribute
from hespas.graph.errors import InvariantError, UsageError

__all__ = [
    "Requests",
    "ServingRun",
    "StepLog",
    "arrivals_of_bursts",
    "arrivals_of_poisson",
    "lengths",
    "share_of",
    "weighted_percentile",
]


_MOST = 10_000_000


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Requests:
    """Requests to a server, as columns of shape ``(requests,)``: ``arrival_ns`` (ascending), ``prompt`` and
    ``output`` tokens (at least 1).

    ``concurrency`` is the number of requests that run at any time: the next request arrives when one is done,
    and ``arrival_ns`` is ignored. 0: requests arrive at ``arrival_ns``.
    """

    arrival_ns: FloatArray
    prompt: IntArray
    output: IntArray
    concurrency: int = 0

    def __post_init__(self) -> None:
        """Raise ``InvariantError`` if the columns are inconsistent."""
        if not len(self.arrival_ns) == len(self.prompt) == len(self.output):
            raise InvariantError("Requests: columns differ in length")
        if len(self) and ((self.prompt < 1).any() or (self.output < 1).any()):
            raise InvariantError("Requests: a prompt or an answer without tokens")
        if (np.diff(self.arrival_ns) < 0).any():
            raise InvariantError("Requests: arrivals are not in order")

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.prompt)


def share_of(requests: Requests, replica: int, replicas: int) -> Requests:
    """Return the requests that one of several replicas serves (round-robin)."""
    if replicas == 1:
        return requests
    mine = slice(replica, None, replicas)
    concurrency = requests.concurrency
    if concurrency:
        concurrency = (concurrency - replica + replicas - 1) // replicas
    return replace(
        requests,
        arrival_ns=requests.arrival_ns[mine],
        prompt=requests.prompt[mine],
        output=requests.output[mine],
        concurrency=concurrency,
    )


def lengths(count: int, most: int, ratio: float, generator: np.random.Generator) -> IntArray:
    """Return ``count`` random lengths, uniform from ``ratio`` x ``most`` to ``most``. Raises
    ``UsageError``.
    """
    if not 0 < ratio <= 1 or most < 1 or not 1 <= count <= _MOST:
        raise UsageError(
            f"invalid arrival process: {count} requests, lengths of {most} tokens, ratio {ratio:g}",
            hint="use `requests` of 1 or more, lengths of 1 or more, a ratio above 0 and of at most 1",
        )
    return generator.integers(max(1, round(ratio * most)), most, size=count, endpoint=True)


def arrivals_of_poisson(count: int, per_second: float, generator: np.random.Generator) -> FloatArray:
    """Return arrival times [ns] of a Poisson process; the first arrival is at 0. Raises ``UsageError`` for a
    rate that is not between 0 and 1e9 per second.
    """
    _check_rate(per_second)
    return np.cumsum(generator.exponential(1e9 / per_second, size=count)) if count else np.zeros(0)


def arrivals_of_bursts(count: int, per_second: float, burst: int) -> FloatArray:
    """Return arrival times [ns] of bursts of ``burst`` requests each, at a mean rate of ``per_second``
    requests. Raises ``UsageError`` for an empty burst or a rate that is not between 0 and 1e9 per second.
    """
    _check_rate(per_second)
    if burst < 1:
        raise UsageError(f"invalid burst of {burst} requests", hint="use `burst=1` or more")
    return np.asarray(np.arange(count) // burst * (burst * 1e9 / per_second), np.float64)


def _check_rate(per_second: float) -> None:
    if not 0 < per_second < 1e9:
        raise UsageError(
            f"invalid rate of {per_second:g} requests per second", hint="use a rate above 0, such as `rate=1`"
        )


@dataclass(slots=True)
class StepLog:
    """Log of the steps of a server and of the times between tokens, with run-length encoding.

    Each step has a time [ns] and its sizes: decoding sequences and their mean cached tokens, prompts with
    their new tokens and the mean of the tokens before them, and sampled tokens. Each time between two tokens
    of a request [ns] has the number of tokens with this time. Consecutive equal entries are stored once, with
    a count.
    """

    _time_ns: array[float] = field(default_factory=lambda: array("d"))
    _runs: array[float] = field(default_factory=lambda: array("d"))
    """Seven numbers per run: the rows of :meth:`sizes`."""
    _gap_ns: array[float] = field(default_factory=lambda: array("d"))
    _gap_runs: array[int] = field(default_factory=lambda: array("q"))
    """Two numbers a run: times, tokens."""

    def add(
        self,
        time_ns: float,
        batch: int,
        prompt_tokens: int,
        *,
        context: float = 0.0,
        prompts: int = 0,
        before: float = 0.0,
        sampled: int = 0,
    ) -> None:
        """Record a step: its time, and its sizes as in :meth:`StepTimes.step_ns`."""
        self._time_ns.append(time_ns)
        self._runs.extend((1, batch, context, prompts, prompt_tokens, before, sampled))

    def add_decoding(self, time_ns: FloatArray, batch: int, context: float = 0.0) -> None:
        """Record several steps that decode the same sequences. ``context`` is the mean over the steps."""
        self._time_ns.frombytes(time_ns.tobytes())
        self._runs.extend((len(time_ns), batch, context, 0, 0, 0.0, batch))

    def add_gap(self, gap_ns: float, tokens: int) -> None:
        """Record ``tokens`` tokens, each generated ``gap_ns`` after the previous token of its request."""
        self._gap_ns.append(gap_ns)
        self._gap_runs.extend((1, tokens))

    def add_gaps(self, gap_ns: FloatArray, tokens: int) -> None:
        """Record ``tokens`` tokens for each of the times since the previous token in ``gap_ns``."""
        self._gap_ns.frombytes(gap_ns.tobytes())
        self._gap_runs.extend((len(gap_ns), tokens))

    @classmethod
    def joined(cls, logs: Iterable[StepLog]) -> StepLog:
        """Return the log of all steps of several servers, server by server."""
        joined = cls()
        for log in logs:
            joined._time_ns.extend(log._time_ns)
            joined._runs.extend(log._runs)
            joined._gap_ns.extend(log._gap_ns)
            joined._gap_runs.extend(log._gap_runs)
        return joined

    def gaps(self) -> tuple[FloatArray, IntArray]:
        """Return all times between tokens [ns], and the number of tokens with each."""
        count, tokens = np.array(self._gap_runs, np.int64).reshape(-1, 2).T
        return np.array(self._gap_ns, np.float64), np.repeat(tokens, count)

    def columns(self) -> tuple[FloatArray, IntArray, IntArray]:
        """Return time [ns], batch size and new prompt tokens of all steps."""
        count, batch, prompt_tokens = self.sizes()[[0, 1, 4]].astype(np.int64)
        return np.array(self._time_ns, np.float64), np.repeat(batch, count), np.repeat(prompt_tokens, count)

    def sizes(self) -> FloatArray:
        """Return the sizes of consecutive equal steps, shape ``(7, runs)``: number of steps, decoding
        sequences, cached tokens per sequence, prompts, new prompt tokens, cached tokens before a prompt,
        sampled tokens.
        """
        return np.array(self._runs, np.float64).reshape(-1, 7).T


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServingRun:
    """Times of requests, as columns of shape ``(requests,)`` on one clock [ns]: arrival at the server, start
    of the first step that processes the request, first token and last token.

    ``preemptions`` counts preemptions of requests because cache pages ran out. ``bound_by`` are the limits
    that delayed a request or split a prompt: ``max_num_seqs``, ``max_batched_tokens`` and ``kv_cache``. The
    run is the same with larger limits if they are not among them. ``peak_pages`` is an upper bound of the
    cache pages in use. ``prefill_steps`` are the steps of separate prefill servers.
    """

    requests: Requests
    arrival_ns: FloatArray
    scheduled_ns: FloatArray
    first_token_ns: FloatArray
    last_token_ns: FloatArray
    preemptions: IntArray
    steps: StepLog
    prefill_steps: StepLog = field(default_factory=StepLog)
    bound_by: frozenset[str] = frozenset()
    peak_pages: float = np.inf
    put_back = RenamedAttribute("preemptions")

    @property
    def ttft_ns(self) -> FloatArray:
        """Return the time to the first token."""
        return self.first_token_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> FloatArray:
        """Return the time per output token after the first; NaN for outputs of one token."""
        more = self.requests.output - 1
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(more > 0, (self.last_token_ns - self.first_token_ns) / more, np.nan)

    @property
    def latency_ns(self) -> FloatArray:
        """Return the time to the last token."""
        return self.last_token_ns - self.arrival_ns

    @property
    def makespan_ns(self) -> float:
        """Return the time from the first arrival to the last token."""
        if not len(self.requests):
            return 0.0
        return float(self.last_token_ns.max() - self.arrival_ns.min())

    @property
    def output_tokens_per_s(self) -> float:
        """Return the output tokens per second over the whole run; NaN without tokens."""
        span = self.makespan_ns
        return float(self.requests.output.sum()) / span * 1e9 if span > 0 else np.nan

    def gaps(self) -> tuple[FloatArray, IntArray]:
        """Return the times between successive tokens of the requests [ns], and the number of tokens with each
        time.

        Tokens that one step generates for a request count as one. First tokens are not included.
        """
        return self.steps.gaps()


def weighted_percentile(values: FloatArray, weights: IntArray, share: float) -> float:
    """Return the smallest value such that the values up to it have at least ``share`` of the weight; NaN
    without values.
    """
    if not len(values):
        return float("nan")
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    at = min(int(np.searchsorted(sums, share * float(sums[-1]))), len(order) - 1)
    return float(values[int(order[at])])
