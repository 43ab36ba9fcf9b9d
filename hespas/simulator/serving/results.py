"""What a run of a server gives: times of each request, and of each step."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from hespas.graph.columns import FloatArray, IntArray
from hespas.simulator.serving.requests import Requests

__all__ = ["ServingRun", "Steps", "weighted_percentile"]


@dataclass(slots=True)
class Steps:
    """Steps in order: time [ns], and runs of them with how many sequences decode and how many new tokens of
    prompts; and times between tokens [ns], and runs of them with how many tokens came after each.
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
        """Add steps in which the same sequences decode."""
        self._time_ns.frombytes(time_ns.tobytes())
        self._runs.extend((len(time_ns), batch, 0))

    def add_gap(self, gap_ns: float, tokens: int) -> None:
        """So many tokens came such a time after the one before them of the same request."""
        self._gap_ns.append(gap_ns)
        self._gap_runs.extend((1, tokens))

    def add_gaps(self, gap_ns: FloatArray, tokens: int) -> None:
        """So many tokens came after each of these times."""
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
