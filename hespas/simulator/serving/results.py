"""What a run of a server gives: times of each request, and of each step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hespas.graph.columns import FloatArray, IntArray
from hespas.simulator.serving.requests import Requests

__all__ = ["ServingRun", "Steps", "weighted_percentile"]


@dataclass(slots=True)
class Steps:
    """Steps in order, in pieces: time [ns], sequences that decode, new tokens of prompts; and times between
    tokens [ns], each with how many tokens came after it.
    """

    time_ns: list[FloatArray] = field(default_factory=list[FloatArray])
    batch: list[IntArray] = field(default_factory=list[IntArray])
    prompt_tokens: list[IntArray] = field(default_factory=list[IntArray])
    gap_ns: list[FloatArray] = field(default_factory=list[FloatArray])
    gap_tokens: list[IntArray] = field(default_factory=list[IntArray])

    def add(self, time_ns: FloatArray, batch: int, prompt_tokens: int) -> None:
        """Steps with the same sequences and as many new tokens."""
        self.time_ns.append(time_ns)
        self.batch.append(np.full(len(time_ns), batch, np.int64))
        self.prompt_tokens.append(np.full(len(time_ns), prompt_tokens, np.int64))

    def add_gaps(self, gap_ns: FloatArray, tokens: IntArray) -> None:
        """So many tokens came such a time after the one before them of the same request."""
        self.gap_ns.append(gap_ns)
        self.gap_tokens.append(tokens)

    def gaps(self) -> tuple[FloatArray, IntArray]:
        """All times between tokens."""
        if not self.gap_ns:
            return np.zeros(0), np.zeros(0, np.int64)
        return np.concatenate(self.gap_ns), np.concatenate(self.gap_tokens)

    def columns(self) -> tuple[FloatArray, IntArray, IntArray]:
        """All steps."""
        if not self.time_ns:
            return np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate(self.time_ns), np.concatenate(self.batch), np.concatenate(self.prompt_tokens)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServingRun:
    """Columns of shape ``(requests,)`` on one clock [ns]: arrival at the server's door, start of the first
    step that works on a request, first and last token; ``put_back``: how often it was put back for want of
    pages.
    """

    requests: Requests
    arrival_ns: FloatArray
    scheduled_ns: FloatArray
    first_token_ns: FloatArray
    last_token_ns: FloatArray
    put_back: IntArray
    steps: Steps

    @property
    def ttft_ns(self) -> FloatArray:
        """Time to the first token."""
        return self.first_token_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> FloatArray:
        """Time per output token after the first; NaN for answers of one."""
        more = self.requests.output - 1
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(more > 0, (self.last_token_ns - self.first_token_ns) / more, np.nan)

    @property
    def latency_ns(self) -> FloatArray:
        """Time to the last token."""
        return self.last_token_ns - self.arrival_ns

    @property
    def makespan_ns(self) -> float:
        """From the first arrival to the last token."""
        if not len(self.requests):
            return 0.0
        return float(self.last_token_ns.max() - self.arrival_ns.min())

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens given in a second, over the whole run; NaN where there was none."""
        span = self.makespan_ns
        return float(self.requests.output.sum()) / span * 1e9 if span > 0 else np.nan

    def gaps(self) -> tuple[FloatArray, IntArray]:
        """Times from a token of a request to its next [ns], and how many tokens came after such a time: what
        a step gives to a request at once counts as one. A first token ends none.
        """
        return self.steps.gaps()


def weighted_percentile(values: FloatArray, weights: IntArray, share: float) -> float:
    """The smallest value that ``share`` of the weight does not exceed; NaN where there is none."""
    if not len(values):
        return float("nan")
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    at = min(int(np.searchsorted(sums, share * float(sums[-1]))), len(order) - 1)
    return float(values[int(order[at])])
