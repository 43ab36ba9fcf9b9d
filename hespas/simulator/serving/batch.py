"""Decoding sequences of a server as columns, with their cache pages and the times of their latest tokens."""

from __future__ import annotations

from collections import Counter
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from hespas.graph.columns import FloatArray

__all__ = ["DecodingBatch", "DecodingSequence", "count_times"]

_HELD, _MADE, _OUTPUT, _LATEST = range(4)

_ROOM = 64


class DecodingSequence(NamedTuple):
    """Request in the decode phase: its tokens in the cache, the number of generated tokens, the number of
    tokens at which it finishes, and the time of its latest token [ns].
    """

    request: int
    held: float
    made: float
    output: float
    latest: float


class DecodingBatch:
    """Decoding sequences as columns, in order of their start, so that a step needs a few array operations.

    ``least_left`` is the smallest number of tokens that a sequence still has to generate. ``pages`` is the
    number of cache pages in use.
    """

    __slots__ = (
        "_columns",
        "_grown",
        "_grown_pages",
        "_latest",
        "_page_tokens",
        "_rounds",
        "least_left",
        "pages",
        "requests",
    )

    def __init__(self, page_tokens: int, gain: float) -> None:
        """Create an empty batch. A step generates ``gain`` tokens per sequence."""
        self.requests: list[int] = []
        self.least_left, self.pages = inf, 0.0
        self._columns = np.zeros((4, _ROOM))
        self._page_tokens = page_tokens
        self._rounds = gain != int(gain) and page_tokens & (page_tokens - 1) != 0
        """True if a division by the tokens of a page may round up to a whole number."""
        self._grown = self._grown_pages = 0.0
        """Cached argument and result of :meth:`grown` (argument 0: not cached)."""
        self._latest = -inf
        """Common time of the latest tokens; NaN if they differ."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def held(self) -> FloatArray:
        """Return the number of tokens that each sequence has in the cache."""
        return self._columns[_HELD, : len(self.requests)]

    def join(self, sequence: DecodingSequence) -> None:
        """Append a sequence to the batch."""
        count = len(self.requests)
        if count == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        if not count:
            self._latest = sequence.latest
        elif self._latest != sequence.latest:
            if self._latest == self._latest:
                self._columns[_LATEST, :count] = self._latest
            self._latest = np.nan
        self._grown = 0.0
        self._columns[:, count] = sequence[1:]
        self.requests.append(sequence.request)
        self.least_left = min(self.least_left, sequence.output - sequence.made)
        self.pages += -(-sequence.held // self._page_tokens)

    def leave_last(self) -> DecodingSequence:
        """Remove and return the sequence that started last."""
        self._grown = 0.0
        last = self._sequence(len(self.requests) - 1)
        self.requests.pop()
        self._count_left()
        self.pages -= -(-last.held // self._page_tokens)
        return last

    def _sequence(self, index: int) -> DecodingSequence:
        held, made, output, latest = self._columns[:, index].tolist()
        latest_ns = latest if self._latest != self._latest else self._latest
        return DecodingSequence(self.requests[index], held, made, output, latest_ns)

    def generate(self, tokens: float) -> tuple[float, list[DecodingSequence]]:
        """Add ``tokens`` tokens to each sequence, and remove finished sequences. Return the number of
        additional pages, and the finished sequences.
        """
        count = len(self.requests)
        self._grown = 0.0
        self._columns[: _MADE + 1, :count] += tokens
        before, self.pages = self.pages, self._pages(self.held)
        grown = self.pages - before
        if tokens == int(tokens):
            self.least_left -= tokens
        else:
            self._count_left()
        if self.least_left > 0:
            return grown, []
        keep = self._columns[_MADE, :count] < self._columns[_OUTPUT, :count]
        finished: list[int] = np.flatnonzero(~keep).tolist()
        done = [self._sequence(index) for index in finished]
        for index in reversed(finished):
            del self.requests[index]
        self._columns[:, : len(self.requests)] = self._columns[:, :count][:, keep]
        self._count_left()
        self.pages -= sum(-(-sequence.held // self._page_tokens) for sequence in done)
        return grown, done

    def _count_left(self) -> None:
        count = len(self.requests)
        left = self._columns[_OUTPUT, :count] - self._columns[_MADE, :count]
        self.least_left = float(np.minimum.reduce(left, initial=inf))

    def _pages(self, held: FloatArray) -> float:
        """Return the number of cache pages for sequences with ``held`` tokens."""
        if self._rounds:
            return float(np.add.reduce(-(-held // self._page_tokens)))
        return float(np.add.reduce(np.ceil(held / self._page_tokens)))

    def grown(self, by: float) -> float:
        """Return the number of additional cache pages if each sequence gets ``by`` more tokens."""
        if self._grown != by:
            self._grown, self._grown_pages = by, self._pages(self.held + by) - self.pages
        return self._grown_pages

    def most_grown(self, by: float) -> float:
        """Return an upper bound of :meth:`grown` in constant time."""
        return float(len(self.requests) * ceil(by / self._page_tokens))

    def latest(self, now: float, others: list[float]) -> list[tuple[float, int]]:
        """Return the times of the previous tokens, ascending, each with the number of sequences that
        generated a token at that time. Then set the previous token of all sequences in the batch to ``now``.

        ``others`` are previous token times of requests outside the batch, which are included in the result.
        """
        count, is_common = len(self.requests), self._latest == self._latest
        if is_common and not others:
            times = [(self._latest, count)]
        else:
            own: list[float] = [self._latest] * count
            if not is_common:
                own = self._columns[_LATEST, :count].tolist()
            times = count_times([*own, *others])
        self._latest = now
        return times

    def generated(self, now: float) -> None:
        """Set the time of the latest token of all sequences to ``now``."""
        self._latest = now


def count_times(times: list[float]) -> list[tuple[float, int]]:
    """Return the distinct times, ascending, each with its number of occurrences."""
    return sorted(Counter(times).items())
