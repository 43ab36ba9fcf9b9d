"""Sequences that decode, as columns: what a step gives to all of them costs a few operations on arrays."""

from __future__ import annotations

from collections import Counter
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from hespas.graph.columns import FloatArray

__all__ = ["Decoding", "Sequence", "groups"]

_HELD, _MADE, _OUTPUT, _LATEST = range(4)
_ROOM = 64


class Sequence(NamedTuple):
    """A request: its tokens in the cache, those it has given and will give in all, and when it gave its
    latest [ns].
    """

    request: int
    held: float
    made: float
    output: float
    latest: float


class Decoding:
    """Sequences in order of their start. ``least_left``: the fewest tokens that one of them has yet to give;
    ``pages``: those they fill.
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
        """Start without sequences. A step gives ``gain`` tokens to each."""
        self.requests: list[int] = []
        self.least_left, self.pages = inf, 0.0
        self._columns = np.zeros((4, _ROOM))
        self._page_tokens = page_tokens
        self._rounds = gain != int(gain) and page_tokens & (page_tokens - 1) != 0
        """Whether a division by the tokens of a page may round up to a whole number."""
        self._grown = self._grown_pages = 0.0
        """What :meth:`grown` returned latest, and for how many tokens (0: they have changed since)."""
        self._latest = -inf
        """When all of them gave their latest token; NaN where not all did at once."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def held(self) -> FloatArray:
        """Tokens of each in the cache."""
        return self._columns[_HELD, : len(self.requests)]

    def join(self, sequence: Sequence) -> None:
        """Add a sequence behind the others."""
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

    def leave_last(self) -> Sequence:
        """Remove the sequence that started last."""
        self._grown = 0.0
        last = self._sequence(len(self.requests) - 1)
        self.requests.pop()
        self._count_left()
        self.pages -= -(-last.held // self._page_tokens)
        return last

    def _sequence(self, place: int) -> Sequence:
        held, made, output, latest = self._columns[:, place].tolist()
        known = latest if self._latest != self._latest else self._latest
        return Sequence(self.requests[place], held, made, output, known)

    def give(self, tokens: float) -> tuple[float, list[Sequence]]:
        """Give so many tokens to each. Return the pages more that they fill, and those that have all their
        tokens, which leave.
        """
        count = len(self.requests)
        self._grown = 0.0
        self._columns[: _MADE + 1, :count] += tokens
        before, self.pages = self.pages, self._pages(self.held)
        grown = self.pages - before
        self._count_left()
        if self.least_left > 0:
            return grown, []
        keep = self._columns[_MADE, :count] < self._columns[_OUTPUT, :count]
        done = [self._sequence(place) for place in np.flatnonzero(~keep).tolist()]
        for place in reversed(np.flatnonzero(~keep).tolist()):
            del self.requests[place]
        self._columns[:, : len(self.requests)] = self._columns[:, :count][:, keep]
        self._count_left()
        self.pages -= sum(-(-each.held // self._page_tokens) for each in done)
        return grown, done

    def _count_left(self) -> None:
        count = len(self.requests)
        left = self._columns[_OUTPUT, :count] - self._columns[_MADE, :count]
        self.least_left = float(np.minimum.reduce(left, initial=inf))

    def _pages(self, held: FloatArray) -> float:
        """Return the pages that so many tokens of each fill."""
        if self._rounds:
            return float(np.add.reduce(-(-held // self._page_tokens)))
        return float(np.add.reduce(np.ceil(held / self._page_tokens)))

    def grown(self, by: float) -> float:
        """Return the pages more that they need for so many tokens more each."""
        if self._grown != by:
            self._grown, self._grown_pages = by, self._pages(self.held + by) - self.pages
        return self._grown_pages

    def most_grown(self, by: float) -> float:
        """Return a bound of :meth:`grown`, which looks at none of them."""
        return float(len(self.requests) * ceil(by / self._page_tokens))

    def latest(self, now: float, others: list[float]) -> list[tuple[float, int]]:
        """Return when they gave their latest tokens, ascending, and how many did; all give one now, and so do
        ``others``, whose latest ones were then.
        """
        if self._latest == self._latest and not others:
            found = [(self._latest, len(self.requests))]
        else:
            found = groups([*self._all_latest(), *others])
        self._latest = now
        return found

    def _all_latest(self) -> list[float]:
        count = len(self.requests)
        if self._latest == self._latest:
            return [self._latest] * count
        times: list[float] = self._columns[_LATEST, :count].tolist()
        return times

    def gave(self, now: float) -> None:
        """Note that all gave their latest token now."""
        self._latest = now


def groups(times: list[float]) -> list[tuple[float, int]]:
    """Return the distinct times, ascending, and how many there are of each."""
    return sorted(Counter(times).items())
