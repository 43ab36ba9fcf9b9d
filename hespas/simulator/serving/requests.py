"""Requests to a server: recorded ones, an arrival process, or so many clients that wait for answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import InvariantError, UsageError

__all__ = ["Requests", "arrivals_of_bursts", "arrivals_of_poisson", "lengths", "share_of"]

_MOST = 10_000_000


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Requests:
    """Columns of shape ``(requests,)``: ``arrival_ns`` ascending, ``prompt`` and ``output`` tokens of at
    least 1. ``concurrency``: so many are under way at any time, and the next arrives when one is done (0: all
    arrive when they arrive); their own times of arrival do not count then.
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
        """How many there are."""
        return len(self.prompt)


def share_of(requests: Requests, place: int, replicas: int) -> Requests:
    """Return the requests of one replica of several that take turns."""
    if replicas == 1:
        return requests
    mine = slice(place, None, replicas)
    concurrency = requests.concurrency
    if concurrency:
        concurrency = (concurrency - place + replicas - 1) // replicas
    return replace(
        requests,
        arrival_ns=requests.arrival_ns[mine],
        prompt=requests.prompt[mine],
        output=requests.output[mine],
        concurrency=concurrency,
    )


def lengths(count: int, most: int, ratio: float, generator: np.random.Generator) -> IntArray:
    """``count`` lengths spread evenly over ``ratio`` x ``most`` .. ``most``. Raises ``UsageError``."""
    if not 0 < ratio <= 1 or most < 1 or not 1 <= count <= _MOST:
        raise UsageError(
            f"{count} lengths of {ratio:g} x {most} to {most} tokens",
            hint="`requests` of 1 or more, lengths of 1 or more, a ratio above 0 and of at most 1",
        )
    return generator.integers(max(1, round(ratio * most)), most, size=count, endpoint=True)


def arrivals_of_poisson(count: int, per_second: float, generator: np.random.Generator) -> FloatArray:
    """Arrivals at a mean rate, independent of each other, the first at 0 [ns]. Raises ``UsageError``."""
    _check_rate(per_second)
    return np.cumsum(generator.exponential(1e9 / per_second, size=count)) if count else np.zeros(0)


def arrivals_of_bursts(count: int, per_second: float, burst: int) -> FloatArray:
    """``burst`` requests at a time, so that so many come in a second [ns]. Raises ``UsageError``."""
    _check_rate(per_second)
    if burst < 1:
        raise UsageError(f"bursts of {burst} requests", hint="`burst=1` or more")
    return np.asarray(np.arange(count) // burst * (burst * 1e9 / per_second), np.float64)


def _check_rate(per_second: float) -> None:
    if not 0 < per_second < 1e9:
        raise UsageError(f"a rate of {per_second:g} requests a second", hint="`rate=1` or any above 0")
