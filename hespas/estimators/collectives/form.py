"""Times of a collective as a start and up to a few segments of bytes, one line for each number of ranks.

    t = t0 + sum over segments of rate_i x (bytes of the message between knee_(i-1) and knee_i)      [ns]

One segment is alpha and beta; a knee is where a library turns to another protocol or algorithm. Rates are of
message bytes as Chakra counts them: the whole buffer, the shard for gathers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isnan

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.hardware import Fit
from hespas.hardware.forms import SEGMENTS, segment_name

__all__ = ["SEGMENTS", "Layout", "Line", "basis", "lines_of", "named"]


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How many ranks take part, spread over how many nodes."""

    ranks: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Line:
    """``knees_bytes`` rise; there is one rate more than knees."""

    t0_ns: float
    knees_bytes: tuple[float, ...]
    ns_per_byte: tuple[float, ...]

    def time_ns(self, message_bytes: FloatArray) -> FloatArray:
        """The time of messages, shape ``(messages,)``."""
        values: FloatArray = np.array((self.t0_ns, *self.ns_per_byte), np.float64)
        return np.asarray(basis(message_bytes, self.knees_bytes) @ values, np.float64)


def basis(message_bytes: FloatArray, knees_bytes: Iterable[float]) -> FloatArray:
    """One, and the bytes of each message in each segment; shape ``(messages, segments + 1)``."""
    edges = (0.0, *knees_bytes, inf)
    parts = [np.clip(message_bytes, low, high) - low for low, high in pairwise(edges)]
    return np.stack((np.ones(len(message_bytes)), *parts), axis=1)


def named(layout: Layout, line: Line) -> Iterable[tuple[str, float]]:
    """The parameters of one line by name."""
    stem = f"r{layout.ranks}_n{layout.nodes}_"
    yield f"{stem}t0_ns", line.t0_ns
    yield from ((f"{stem}knee{place}_bytes", size) for place, size in enumerate(line.knees_bytes, 1))
    yield from ((f"{stem}ns_per_byte{place}", rate) for place, rate in enumerate(line.ns_per_byte, 1))


def lines_of(fit: Fit) -> dict[Layout, Line]:
    """The lines of a fit by layout; those whose parameters are not all there are left out."""
    found: dict[Layout, dict[str, float]] = {}
    for each in fit.parameters:
        if name := segment_name(each.name):
            found.setdefault(Layout(name.ranks, name.nodes), {})[name.part] = each.value
    lines: dict[Layout, Line] = {}
    for layout, values in sorted(found.items()):
        knees = tuple(_numbered(values, "knee{}_bytes"))
        rates = tuple(_numbered(values, "ns_per_byte{}"))
        if len(rates) == len(knees) + 1 and not isnan(values.get("t0_ns", np.nan)):
            lines[layout] = Line(values["t0_ns"], knees, rates)
    return lines


def _numbered(values: dict[str, float], name: str) -> Iterable[float]:
    place = 1
    while (value := values.get(name.format(place))) is not None:
        yield value
        place += 1
