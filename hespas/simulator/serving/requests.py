"""Requests to a server (recorded, from an arrival process, or from waiting clients), and the times of their
run.
"""

from __future__ import annotations

from array import array
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
    """Columns of shape ``(requests,)``: ``arrival_ns`` ascending, ``prompt`` and ``output`` tokens of at
    least 1. ``concurrency``: number of running requests at any time; the next one arrives when one is done
    (0: requests arrive at ``arrival_ns``). With a concurrency, ``arrival_ns`` is ignored.
    """

    arrival_ns: FloatArray
    prompt: IntArray
    output: IntArray
    concurrency: int = 0

    def __post_init__(self) -> None:
        """Check the columns. Raises ``InvariantError``."""
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
    """Return the requests of one of several replicas (round-robin)."""
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
    """Return ``count`` lengths, uniform over ``ratio`` x ``most`` .. ``most``. Raises ``UsageError``."""
    if not 0 < ratio <= 1 or most < 1 or not 1 <= count <= _MOST:
        raise UsageError(
            f"invalid lengths: {count} of {ratio:g} x {most} to {most} tokens",
            hint="use `requests` of 1 or more, lengths of 1 or more, a ratio above 0 and of at most 1",
        )
    return generator.integers(max(1, round(ratio * most)), most, size=count, endpoint=True)


def arrivals_of_poisson(count: int, per_second: float, generator: np.random.Generator) -> FloatArray:
    """Return arrival times [ns] of a Poisson process, the first 0. Raises ``UsageError`` for a rate that is
    not between 0 and 1e9 per second.
    """
    _check_rate(per_second)
    return np.cumsum(generator.exponential(1e9 / per_second, size=count)) if count else np.zeros(0)


def arrivals_of_bursts(count: int, per_second: float, burst: int) -> FloatArray:
    """Return arrival times [ns] of bursts of ``burst`` requests at a mean rate. Raises ``UsageError`` for an
    empty burst or a rate that is not between 0 and 1e9 per second.
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
    """Log of steps in order: time [ns], and runs of equal batch size and new prompt tokens; and times between
    tokens [ns], with runs of equal token counts.
    """

    _time_ns: array[float] = field(default_factory=lambda: array("d"))
    _runs: array[int] = field(default_factory=lambda: array("q"))
    """Three numbers a run: steps, sequences, new tokens."""
    _gap_ns: array[float] = field(default_factory=lambda: array("d"))
    _gap_runs: array[int] = field(default_factory=lambda: array("q"))
    """Two numbers a run: times, tokens."""

    def add(self, time_ns: float, batch: int, prompt_tokens: int) -> None:
        """Add a step."""
        self._time_ns.append(time_ns)
        self._runs.extend((1, batch, prompt_tokens))

    def add_decoding(self, time_ns: FloatArray, batch: int) -> None:
        """Add steps that decode the same sequences."""
        self._time_ns.frombytes(time_ns.tobytes())
        self._runs.extend((len(time_ns), batch, 0))

    def add_gap(self, gap_ns: float, tokens: int) -> None:
        """Add ``tokens`` tokens that followed the previous token of their request after ``gap_ns``."""
        self._gap_ns.append(gap_ns)
        self._gap_runs.extend((1, tokens))

    def add_gaps(self, gap_ns: FloatArray, tokens: int) -> None:
        """Add ``tokens`` tokens for each of the times ``gap_ns``."""
        self._gap_ns.frombytes(gap_ns.tobytes())
        self._gap_runs.extend((len(gap_ns), tokens))

    def gaps(self) -> tuple[FloatArray, IntArray]:
        """Return all times between tokens."""
        count, tokens = np.array(self._gap_runs, np.int64).reshape(-1, 2).T
        return np.array(self._gap_ns, np.float64), np.repeat(tokens, count)

    def columns(self) -> tuple[FloatArray, IntArray, IntArray]:
        """Return all steps."""
        count, batch, prompt_tokens = np.array(self._runs, np.int64).reshape(-1, 3).T
        return np.array(self._time_ns, np.float64), np.repeat(batch, count), np.repeat(prompt_tokens, count)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServingRun:
    """Columns of shape ``(requests,)`` on one clock [ns]: arrival at the server, start of the first step that
    processes a request, first and last token; ``preemptions`` counts preemptions for lack of pages.
    """

    requests: Requests
    arrival_ns: FloatArray
    scheduled_ns: FloatArray
    first_token_ns: FloatArray
    last_token_ns: FloatArray
    preemptions: IntArray
    steps: StepLog
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
        """Return the times from a token of a request to its next [ns], with the number of tokens after each
        time; tokens that a step generates at once count as one. First tokens have no such time.
        """
        return self.steps.gaps()


def weighted_percentile(values: FloatArray, weights: IntArray, share: float) -> float:
    """Return the smallest value that ``share`` of the weight does not exceed; NaN without values."""
    if not len(values):
        return float("nan")
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    at = min(int(np.searchsorted(sums, share * float(sums[-1]))), len(order) - 1)
    return float(values[int(order[at])])
