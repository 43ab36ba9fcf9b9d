"""Times of a collective as a start and up to a few segments of bytes, one line for each layout of ranks.

    t = t0 + sum over segments of rate_i x (bytes of the message between knee_(i-1) and knee_i)      [ns]

One segment is alpha and beta; a knee is where a library turns to another protocol or algorithm. Rates are of
message bytes as Chakra counts them: the whole buffer, the shard for gathers.

Lines carry over to other numbers of ranks N. What the least message takes is a start, the rest moves bytes:

    between two measured numbers   the logarithm of the time is linear, of the start in that of the ranks, of
                                   the bytes in that of what a rank sends
    beyond                         start x (1 + q log2(N / 2)), moved x sent(N) / sent(N0) x bandwidth ratio;
                                   across nodes over as many interfaces as a node has ranks

``q`` is that of the measured numbers of ranks, or what is usual for the operation. All is at one size of the
whole buffer, since libraries turn from one protocol to another by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, inf, isnan, log, log2, nan
from typing import NamedTuple

import numpy as np

from hespas.estimators.collective_links import Layout, link_of, sent_share
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, Fit
from hespas.hardware.device_fits import segment_name

__all__ = [
    "BETWEEN",
    "NO_BAND",
    "OF_HOST",
    "OF_KIN",
    "OF_MODEL",
    "OF_RELEASE",
    "PER_DOUBLING",
    "PER_OCTAVE",
    "Line",
    "Lines",
    "Parts",
    "Spread",
    "basis",
    "lines_of",
    "named",
    "widened",
    "wiring_of",
]


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


class Parts(NamedTuple):
    """Times [ns] of messages of shape ``(messages,)`` in two parts, and by how many doublings of ranks or
    nodes their layout leaves what was measured.
    """

    start_ns: FloatArray
    moved_ns: FloatArray
    doublings: float

    @property
    def time_ns(self) -> FloatArray:
        """Both together."""
        return self.start_ns + self.moved_ns


_GROWTH: Mapping[str, float] = {
    "all_reduce": 0.75,
    "all_gather": 0.45,
    "reduce_scatter": 0.45,
    "all_to_all": 0.1,
}
"""By how much of itself the start on two ranks grows for each doubling of them: medians of the devices behind
NVLink of ``aiconfigurator_collectives`` (calib).
"""
_MOST_GROWTH = 3.0
_PAIR = 0.65
"""Two ranks behind a switch get less of their link than eight do: the time to move grows by this power of
what is sent (median of the same rows).
"""
_BY_INTERFACE = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
"""Operations of which each rank of a node sends a part over its own interface."""


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """The lines of one fit of an operation on ``device``, by layout. They speak from ``least`` to ``most``
    bytes and carry on beyond. ``usual_growth`` is that of the start where there is one number of ranks (NaN:
    that of the operation). Where it ``rises``, more ranks of a node never take less for the same buffer.
    """

    op: str
    device: Device
    by_layout: Mapping[Layout, Line]
    least: float
    most: float
    usual_growth: float = nan
    rises: bool = True

    def inside(self, layout: Layout, message_bytes: FloatArray) -> FloatArray | None:
        """The time on a layout that was measured, or between fewer and more ranks on as many nodes; None on
        any other.
        """
        if layout in self.by_layout:
            return self._time_ns(layout, message_bytes)
        alike = [each for each in self.by_layout if each.nodes == layout.nodes]
        fewer = [each for each in alike if each.ranks < layout.ranks]
        more = [each for each in alike if each.ranks > layout.ranks]
        if not fewer or not more:
            return None
        return self._between(max(fewer), min(more), layout, message_bytes)

    def distance(self, layout: Layout) -> float:
        """Doublings of ranks from a layout to the nearest that was measured on as many nodes."""
        alike = (each for each in self.by_layout if each.nodes == layout.nodes)
        return min((_doublings(each, layout) for each in alike), default=inf)

    def carried(self, layout: Layout, message_bytes: FloatArray, device: Device) -> Parts | None:
        """The time on a layout beyond, or of another ``device``, from the nearest that was measured: within
        one node, or across several.
        """
        alike = [each for each in self.by_layout if (each.nodes > 1) == (layout.nodes > 1)]
        if not alike:
            return None
        near = min(alike, key=lambda each: (_doublings(each, layout), each))
        whole = self._as_whole(near, layout, message_bytes)
        grown = self._growth(near.nodes)
        start = self._time_ns(near, np.minimum(whole, self.least))
        moved = self._time_ns(near, whole) - start
        growth = (1 + grown * _level(layout.ranks)) / (1 + grown * _level(near.ranks))
        more = self._more(near, layout, device) * self._slower(near, layout, device)
        return Parts(start * growth, moved * more, _doublings(near, layout))

    def parts(self, layout: Layout, message_bytes: FloatArray, device: Device) -> Parts | None:
        """The time on any layout of ``device``, measured or not, in its parts."""
        time = self.inside(layout, message_bytes)
        least = self.inside(layout, np.minimum(message_bytes, self.least))
        if time is None or least is None:
            return self.carried(layout, message_bytes, device)
        start = np.minimum(least, time)
        moved = (time - start) * self._slower(layout, layout, device)
        alike = [each for each in self.by_layout if each.nodes == layout.nodes == 1]
        fewer = [each for each in alike if each.ranks < layout.ranks]
        if self.rises and fewer:  # what holds on links as measured must on slower ones, too
            near = max(fewer)
            below = self.parts(near, self._as_whole(near, layout, message_bytes), device)
            moved = moved if below is None else np.maximum(moved, below.time_ns - start)
        return Parts(start, moved, 0.0)

    def _time_ns(self, layout: Layout, message_bytes: FloatArray) -> FloatArray:
        """The time on a measured layout."""
        found = self._of_line(layout, message_bytes)
        if layout.nodes == 1 and self.rises:
            for each in self.by_layout:
                if each.nodes == 1 and each.ranks < layout.ranks:
                    whole = self._as_whole(each, layout, message_bytes)
                    found = np.maximum(found, self._of_line(each, whole))
        return found

    def _of_line(self, layout: Layout, message_bytes: FloatArray) -> FloatArray:
        """Beyond ``most`` bytes none costs more than those before did on average."""
        line = self.by_layout[layout]
        inside = line.time_ns(np.minimum(message_bytes, self.most))
        if self.most == inf:
            return inside
        rate = min(line.ns_per_byte[-1], float(line.time_ns(np.array([self.most]))[0]) / self.most)
        return inside + np.maximum(message_bytes - self.most, 0.0) * rate

    def _as_whole(self, near: Layout, layout: Layout, message_bytes: FloatArray) -> FloatArray:
        """The message on ``near`` whose whole buffer is that of the message on ``layout``."""
        return message_bytes * layout.ranks / near.ranks if self.op == "all_gather" else message_bytes

    def _between(self, low: Layout, high: Layout, layout: Layout, message_bytes: FloatArray) -> FloatArray:
        sizes = [self._as_whole(each, layout, message_bytes) for each in (low, high)]
        times = [self._time_ns(each, size) for each, size in zip((low, high), sizes, strict=True)]
        starts = [
            self._time_ns(each, np.minimum(size, self.least))
            for each, size in zip((low, high), sizes, strict=True)
        ]
        by_ranks = log(layout.ranks / low.ranks) / log(high.ranks / low.ranks)
        sent = [_whole_share(self.op, each.ranks) for each in (low, layout, high)]
        by_bytes = log(sent[1] / sent[0]) / log(sent[2] / sent[0]) if sent[2] > sent[0] else by_ranks
        with np.errstate(divide="ignore", invalid="ignore"):
            begun = np.nan_to_num((starts[0] / times[0] + starts[1] / times[1]) / 2)
            share = by_ranks * begun + by_bytes * (1 - begun)
            between = np.exp((1 - share) * np.log(times[0]) + share * np.log(times[1]))
        return np.maximum(between, times[0]) if self.rises else between

    def _growth(self, nodes: float) -> float:
        """The relative growth of the start with each doubling of ranks on so many nodes."""
        alike = sorted(each for each in self.by_layout if each.nodes == nodes)
        few, many = alike[0], alike[-1]
        least = np.array([self.least])
        before, after = (float(self._time_ns(each, least)[0]) for each in (few, many))
        if many.ranks == few.ranks or not before > 0:
            return _GROWTH.get(self.op, 0.0) if isnan(self.usual_growth) else self.usual_growth
        ratio = after / before
        levels = _level(many.ranks) - ratio * _level(few.ranks)
        return min(max((ratio - 1) / levels, 0.0), _MOST_GROWTH) if levels > 0 else _MOST_GROWTH

    def _more(self, near: Layout, layout: Layout, device: Device) -> float:
        """By how much more bytes of one whole buffer are sent, or get on, on another layout."""
        ratio = _whole_share(self.op, layout.ranks) / _whole_share(self.op, near.ranks)
        if near.nodes > 1 and self.op in _BY_INTERFACE:
            ratio *= near.per_node / layout.per_node
        link = link_of(device, layout)
        is_switch = link is not None and link.kind == "scale_up" and link.topology == "switch"
        return ratio**_PAIR if is_switch and min(near.ranks, layout.ranks) == 2 else ratio

    def _slower(self, near: Layout, layout: Layout, device: Device) -> float:
        """Bandwidth behind what was measured over that of the link that is asked about."""
        one, other = link_of(self.device, near), link_of(device, layout)
        if one is None or other is None:
            return 1.0
        return one.bandwidth_bytes_per_s / other.bandwidth_bytes_per_s


def _level(ranks: float) -> float:
    return log2(max(ranks, 2.0) / 2)


def _doublings(one: Layout, other: Layout) -> float:
    if one.nodes == other.nodes:
        return abs(log2(other.ranks / one.ranks))
    return abs(log2(other.nodes / one.nodes)) + abs(log2(other.per_node / one.per_node))


def _whole_share(op: str, ranks: float) -> float:
    """Bytes sent for each byte of the whole buffer."""
    return sent_share(op, ranks) / (ranks if op == "all_gather" else 1.0)


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
    """The lines of a fit by layout, but for those of one rank or whose parameters are not all there."""
    found: dict[Layout, dict[str, float]] = {}
    for each in fit.parameters:
        if name := segment_name(each.name):
            found.setdefault(Layout(name.ranks, name.nodes), {})[name.part] = each.value
    lines: dict[Layout, Line] = {}
    for layout, values in sorted(found.items()):
        if layout.ranks < 2 or layout.nodes < 1:
            continue
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


# How far off answers are that were carried over: what intervals of collectives are widened by.
#
# Logarithms, so that 90 % of what was left out of a fit lie inside: ``python -m
# benchmarks.carry_over.collectives --split calib``. Causes that have nothing to do with each other add up as
# squares.


class Spread(NamedTuple):
    """Logarithms below and above a prediction."""

    below: float
    above: float

    def times(self, count: float) -> Spread:
        """So many of it."""
        return Spread(self.below * count, self.above * count)

    def beside(self, other: Spread) -> Spread:
        """Together with another cause."""
        return Spread(hypot(self.below, other.below), hypot(self.above, other.above))


def widened(times: FloatArray, spread: Spread, count: FloatArray | float = 1.0) -> FloatArray:
    """Times with wider intervals, shape ``(3, ops)``: by ``count`` (a number or one for each) of a spread."""
    with np.errstate(over="ignore"):  # far beyond what was sampled, an interval may have no end
        return np.stack(
            (times[0], times[1] * np.exp(-spread.below * count), times[2] * np.exp(spread.above * count))
        )


def wiring_of(device: Device, layout: Layout) -> str:
    """What joins the ranks of a layout: inside a node a ``switch``, other links of their own (``mesh``) or
    those of the ``host``; else ``nodes``.
    """
    if layout.nodes > 1:
        return "nodes"
    link = link_of(device, layout)
    if link is None or link.kind != "scale_up":
        return "host"
    return "switch" if link.topology == "switch" else "mesh"


PER_OCTAVE: Mapping[str, Spread] = {
    "switch": Spread(0.17, 0.17),
    "mesh": Spread(0.1, 0.1),
    "host": Spread(0.1, 0.1),
    "nodes": Spread(0.4, 0.4),
}
"""For each octave of bytes beyond the fitted ones."""

PER_DOUBLING: Mapping[str, Spread] = {
    "switch": Spread(0.2, 0.2),
    "mesh": Spread(0.5, 0.5),
    "host": Spread(0.5, 1.4),
    "nodes": Spread(0.9, 0.9),
}
"""For each doubling of ranks or nodes beyond the fitted ones."""

BETWEEN: Mapping[str, Spread] = {
    "switch": Spread(0.1, 0.1),
    "mesh": Spread(0.4, 0.4),
    "host": Spread(0.4, 0.4),
    "nodes": Spread(0.42, 0.42),
}
"""For each doubling of ranks to the nearest fitted number where there are fewer and more."""

OF_KIN: Mapping[str, Spread] = {
    "sibling": Spread(0.22, 0.22),
    "family": Spread(0.6, 0.6),
    "link data": Spread(1.0, 1.0),
}
"""For the device that fits are of, the nearest kinship first."""

OF_RELEASE = Spread(0.2, 0.2)
"""For another release or library than the one asked."""

OF_MODEL = Spread(0.5, 1.0)
"""For NCCL's model where no fit is near, and for data sheets."""

OF_HOST: Mapping[str, Spread] = {
    "switch": Spread(0.0, 0.0),
    "mesh": Spread(0.0, 0.0),
    "host": Spread(2.0, 2.4),
    "nodes": Spread(0.7, 1.8),
}
"""For what a device's file does not say: how a host joins more than two ranks without a switch, and what of
its interfaces a cluster's network lets through.
"""

NO_BAND = Spread(0.25, 0.25)
"""Of a fit that had too few rows to say how far off it is."""
