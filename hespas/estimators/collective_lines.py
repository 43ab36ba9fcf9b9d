"""Times of a collective as a start and up to a few segments of bytes, one line for each layout of ranks.

    t = t0 + sum over segments of rate_i x (bytes of the message between knee_(i-1) and knee_i)      [ns]

One segment is the alpha-beta model; a knee is where a library switches to another protocol or algorithm.
Rates are per message byte as Chakra counts them: the whole buffer, the shard for gathers.

Lines are extrapolated to other numbers of ranks N. The time of the least message is a start, the
rest moves bytes:

    between two measured numbers   the logarithm of the time is linear: the start in the logarithm of the
                                   ranks, the bytes in the logarithm of the bytes that a rank sends
    beyond                         start x (1 + q log2(N / 2)), moved x sent(N) / sent(N0) x bandwidth ratio;
                                   across nodes over as many interfaces as a node has ranks

``q`` follows from the measured numbers of ranks, or is usual for the operation. All times are compared at one
size of the whole buffer, because libraries switch protocols by that size.

Extrapolated times have wider intervals. Spreads are logarithms such that 90 % of the rows left out of a fit
are inside: ``python -m benchmarks.carry_over.collectives --split calib``. Independent causes add up as
squares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, inf, isnan, log, log2, nan
from typing import NamedTuple

import numpy as np

from hespas.estimators.collective_links import RankLayout, link_of, sent_share
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, Fit
from hespas.hardware.device_fits import segment_name

__all__ = [
    "BETWEEN",
    "NO_BAND",
    "OF_HOST",
    "OF_MODEL",
    "OF_REFERENCE",
    "OF_RELEASE",
    "PER_DOUBLING",
    "PER_OCTAVE",
    "CollectiveLine",
    "CollectiveLines",
    "Spread",
    "StartAndMoved",
    "basis",
    "lines_of",
    "named",
    "widened",
    "wiring_of",
]


@dataclass(frozen=True, slots=True)
class CollectiveLine:
    """Time of a collective as a piecewise linear function of the message size: a start ``t0_ns``, and one
    rate per segment. ``knees_bytes`` are the ascending message sizes between the segments.
    """

    t0_ns: float
    knees_bytes: tuple[float, ...]
    ns_per_byte: tuple[float, ...]

    def time_ns(self, message_bytes: FloatArray) -> FloatArray:
        """Return the time of messages on this line, shape ``(messages,)``."""
        values: FloatArray = np.array((self.t0_ns, *self.ns_per_byte), np.float64)
        return np.asarray(basis(message_bytes, self.knees_bytes) @ values, np.float64)


class StartAndMoved(NamedTuple):
    """Times [ns] of messages, split into the start of the collective and the movement of bytes, each of shape
    ``(messages,)``.

    ``doublings`` is the distance from the nearest measured layout: log2 of the ratio of the numbers of ranks
    (or nodes).
    """

    start_ns: FloatArray
    moved_ns: FloatArray
    doublings: float

    @property
    def time_ns(self) -> FloatArray:
        """Return the sum of the start and the time to move the bytes [ns]."""
        return self.start_ns + self.moved_ns


_GROWTH: Mapping[str, float] = {
    "all_reduce": 0.75,
    "all_gather": 0.45,
    "reduce_scatter": 0.45,
    "all_to_all": 0.1,
}
"""Relative growth of the start on two ranks with each doubling of ranks: medians of the devices with NVLink
in ``aiconfigurator_collectives`` (calib).
"""
_MOST_GROWTH = 3.0
_PAIR = 0.65
"""Exponent of the sent bytes for two ranks behind a switch, which reach less of their link's bandwidth than
eight ranks (median of the same rows).
"""
_BY_INTERFACE = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
"""Operations for which each rank of a node sends a part over its own interface."""


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveLines:
    """Fitted lines of one collective operation on ``device``, one for each measured layout of ranks.

    The fit covers messages of ``least`` to ``most`` bytes. ``usual_growth`` is the relative growth of the
    start per doubling of ranks. It is used if only one number of ranks was measured (NaN: the default of the
    operation). ``rises`` is True if a collective in a node never takes less time over more ranks than over
    fewer ranks, for the same buffer.
    """

    op: str
    device: Device
    by_layout: Mapping[RankLayout, CollectiveLine]
    least: float
    most: float
    usual_growth: float = nan
    rises: bool = True

    def inside(self, layout: RankLayout, message_bytes: FloatArray) -> FloatArray | None:
        """Return the time of messages on a layout of ranks that was measured, or that lies between a measured
        layout with fewer and one with more ranks on the same number of nodes (interpolated). Return None for
        any other layout.
        """
        if layout in self.by_layout:
            return self._time_ns(layout, message_bytes)
        same_nodes = [other for other in self.by_layout if other.nodes == layout.nodes]
        fewer = [other for other in same_nodes if other.ranks < layout.ranks]
        more = [other for other in same_nodes if other.ranks > layout.ranks]
        if not fewer or not more:
            return None
        # Interpolate between the nearest layouts with fewer and with more ranks on as many nodes.
        low, high = max(fewer), min(more)
        sizes = [self._as_whole(end, layout, message_bytes) for end in (low, high)]
        times = [self._time_ns(end, size) for end, size in zip((low, high), sizes, strict=True)]
        starts = [
            self._time_ns(end, np.minimum(size, self.least))
            for end, size in zip((low, high), sizes, strict=True)
        ]
        by_ranks = log(layout.ranks / low.ranks) / log(high.ranks / low.ranks)
        sent = [_whole_share(self.op, entry.ranks) for entry in (low, layout, high)]
        by_bytes = log(sent[1] / sent[0]) / log(sent[2] / sent[0]) if sent[2] > sent[0] else by_ranks
        with np.errstate(divide="ignore", invalid="ignore"):
            begun = np.nan_to_num((starts[0] / times[0] + starts[1] / times[1]) / 2)
            share = by_ranks * begun + by_bytes * (1 - begun)
            between = np.exp((1 - share) * np.log(times[0]) + share * np.log(times[1]))
        return np.maximum(between, times[0]) if self.rises else between

    def distance(self, layout: RankLayout) -> float:
        """Return the distance from a layout to the nearest measured layout on the same number of nodes, in
        doublings of the number of ranks.
        """
        same_nodes = (other for other in self.by_layout if other.nodes == layout.nodes)
        return min((_doublings(other, layout) for other in same_nodes), default=inf)

    def carried(self, layout: RankLayout, message_bytes: FloatArray, device: Device) -> StartAndMoved | None:
        """Return the time of messages on ``layout`` of ``device``, extrapolated from the nearest measured
        layout. Layouts within one node are extrapolated only from layouts within one node, and layouts across
        nodes only from layouts across nodes.
        """
        similar = [other for other in self.by_layout if (other.nodes > 1) == (layout.nodes > 1)]
        if not similar:
            return None
        near = min(similar, key=lambda other: (_doublings(other, layout), other))
        whole = self._as_whole(near, layout, message_bytes)
        grown = self._growth(near.nodes)
        start = self._time_ns(near, np.minimum(whole, self.least))
        moved = self._time_ns(near, whole) - start
        growth = (1 + grown * _level(layout.ranks)) / (1 + grown * _level(near.ranks))
        # Bytes of one whole buffer that are sent on this layout, relative to the measured one.
        more = _whole_share(self.op, layout.ranks) / _whole_share(self.op, near.ranks)
        if near.nodes > 1 and self.op in _BY_INTERFACE:
            more *= near.per_node / layout.per_node
        link = link_of(device, layout)
        is_switch = link is not None and link.kind == "scale_up" and link.topology == "switch"
        if is_switch and min(near.ranks, layout.ranks) == 2:
            more **= _PAIR
        slower = more * self._slower(near, layout, device)
        return StartAndMoved(start * growth, moved * slower, _doublings(near, layout))

    def parts(self, layout: RankLayout, message_bytes: FloatArray, device: Device) -> StartAndMoved | None:
        """Return the start and the time to move the bytes on any layout of ``device``. A layout that was not
        measured is interpolated or extrapolated.
        """
        time = self.inside(layout, message_bytes)
        least = self.inside(layout, np.minimum(message_bytes, self.least))
        if time is None or least is None:
            return self.carried(layout, message_bytes, device)
        start = np.minimum(least, time)
        moved = (time - start) * self._slower(layout, layout, device)
        one_node = [other for other in self.by_layout if other.nodes == layout.nodes == 1]
        fewer = [other for other in one_node if other.ranks < layout.ranks]
        if self.rises and fewer:  # must hold on slower links, too
            near = max(fewer)
            below = self.parts(near, self._as_whole(near, layout, message_bytes), device)
            moved = moved if below is None else np.maximum(moved, below.time_ns - start)
        return StartAndMoved(start, moved, 0.0)

    def _time_ns(self, layout: RankLayout, message_bytes: FloatArray) -> FloatArray:
        """Return the time of messages on a measured layout of ranks. If ``rises`` is set, it is at least the
        time on fewer ranks of a node.
        """
        time = self._of_line(layout, message_bytes)
        if layout.nodes == 1 and self.rises:
            for other in self.by_layout:
                if other.nodes == 1 and other.ranks < layout.ranks:
                    whole = self._as_whole(other, layout, message_bytes)
                    time = np.maximum(time, self._of_line(other, whole))
        return time

    def _of_line(self, layout: RankLayout, message_bytes: FloatArray) -> FloatArray:
        """Return the time of messages by the line of one measured layout. For a message of more than ``most``
        bytes, each further byte takes at most the average time per byte of a message of ``most`` bytes.
        """
        line = self.by_layout[layout]
        inside = line.time_ns(np.minimum(message_bytes, self.most))
        if self.most == inf:
            return inside
        rate = min(line.ns_per_byte[-1], float(line.time_ns(np.array([self.most]))[0]) / self.most)
        return inside + np.maximum(message_bytes - self.most, 0.0) * rate

    def _as_whole(self, near: RankLayout, layout: RankLayout, message_bytes: FloatArray) -> FloatArray:
        """Return the size that a message on the layout ``near`` must have, so that the whole buffer of the
        collective is as large as on ``layout``. The message of an all-gather is the shard of one rank, so its
        size depends on the number of ranks.
        """
        return message_bytes * layout.ranks / near.ranks if self.op == "all_gather" else message_bytes

    def _growth(self, nodes: float) -> float:
        """Return the relative growth of the start with each doubling of ranks on this number of nodes."""
        same_nodes = sorted(layout for layout in self.by_layout if layout.nodes == nodes)
        few, many = same_nodes[0], same_nodes[-1]
        least = np.array([self.least])
        before, after = (float(self._time_ns(layout, least)[0]) for layout in (few, many))
        if many.ranks == few.ranks or not before > 0:
            return _GROWTH.get(self.op, 0.0) if isnan(self.usual_growth) else self.usual_growth
        ratio = after / before
        levels = _level(many.ranks) - ratio * _level(few.ranks)
        return min(max((ratio - 1) / levels, 0.0), _MOST_GROWTH) if levels > 0 else _MOST_GROWTH

    def _slower(self, near: RankLayout, layout: RankLayout, device: Device) -> float:
        """Return the factor by which bytes take longer on ``layout`` of ``device`` than on the measured
        layout ``near``: the ratio of the bandwidths of the two links. 1 if a link is unknown.
        """
        measured, link = link_of(self.device, near), link_of(device, layout)
        if measured is None or link is None:
            return 1.0
        return measured.bandwidth_bytes_per_s / link.bandwidth_bytes_per_s


def _level(ranks: float) -> float:
    return log2(max(ranks, 2.0) / 2)


def _doublings(one: RankLayout, other: RankLayout) -> float:
    if one.nodes == other.nodes:
        return abs(log2(other.ranks / one.ranks))
    return abs(log2(other.nodes / one.nodes)) + abs(log2(other.per_node / one.per_node))


def _whole_share(op: str, ranks: float) -> float:
    """Return the bytes that a rank sends for each byte of the whole buffer of a collective."""
    return sent_share(op, ranks) / (ranks if op == "all_gather" else 1.0)


def basis(message_bytes: FloatArray, knees_bytes: Iterable[float]) -> FloatArray:
    """Return the matrix that is multiplied by the parameters of a line to obtain times. The first column is 1
    (for the start), the others are the bytes of each message in each segment. Shape ``(messages, segments +
    1)``.
    """
    edges = (0.0, *knees_bytes, inf)
    parts = [np.clip(message_bytes, low, high) - low for low, high in pairwise(edges)]
    return np.stack((np.ones(len(message_bytes)), *parts), axis=1)


def named(layout: RankLayout, line: CollectiveLine) -> Iterable[tuple[str, float]]:
    """Yield the parameters of one line as (name, value), as a fit stores them. Names include ranks and nodes
    of the layout.
    """
    stem = f"r{layout.ranks}_n{layout.nodes}_"
    yield f"{stem}t0_ns", line.t0_ns
    yield from ((f"{stem}knee{number}_bytes", size) for number, size in enumerate(line.knees_bytes, 1))
    yield from ((f"{stem}ns_per_byte{number}", rate) for number, rate in enumerate(line.ns_per_byte, 1))


def lines_of(fit: Fit) -> dict[RankLayout, CollectiveLine]:
    """Return the lines of a fit by layout of ranks. Layouts of one rank and lines with missing parameters are
    left out.
    """
    by_layout: dict[RankLayout, dict[str, float]] = {}
    for parameter in fit.parameters:
        if name := segment_name(parameter.name):
            by_layout.setdefault(RankLayout(name.ranks, name.nodes), {})[name.part] = parameter.value
    lines: dict[RankLayout, CollectiveLine] = {}
    for layout, values in sorted(by_layout.items()):
        if layout.ranks < 2 or layout.nodes < 1:
            continue
        knees = tuple(_numbered(values, "knee{}_bytes"))
        rates = tuple(_numbered(values, "ns_per_byte{}"))
        if len(rates) == len(knees) + 1 and not isnan(values.get("t0_ns", np.nan)):
            lines[layout] = CollectiveLine(values["t0_ns"], knees, rates)
    return lines


def _numbered(values: dict[str, float], name: str) -> Iterable[float]:
    """Yield the values of the fit parameters ``name1``, ``name2``, ... until one is missing."""
    number = 1
    while (value := values.get(name.format(number))) is not None:
        yield value
        number += 1


class Spread(NamedTuple):
    """Uncertainty of a prediction: distances from it to the lower and the upper end of its interval, in the
    logarithm of time.
    """

    below: float
    above: float

    def times(self, count: float) -> Spread:
        """Return the spread multiplied by ``count``."""
        return Spread(self.below * count, self.above * count)

    def combined(self, other: Spread) -> Spread:
        """Return the spread of two independent causes: the root of the sum of their squares."""
        return Spread(hypot(self.below, other.below), hypot(self.above, other.above))


def widened(times: FloatArray, spread: Spread, count: FloatArray | float = 1.0) -> FloatArray:
    """Return times with intervals that are widened by ``count`` times ``spread``, shape ``(3, ops)``.
    ``count`` is one number, or one per operation.
    """
    with np.errstate(over="ignore"):  # far beyond the fitted sizes an end may be infinite
        return np.stack(
            (times[0], times[1] * np.exp(-spread.below * count), times[2] * np.exp(spread.above * count))
        )


def wiring_of(device: Device, layout: RankLayout) -> str:
    """Return the kind of connection between the ranks of a layout. Inside a node it is ``switch``, ``mesh``
    (other links between devices) or ``host``; across nodes it is ``nodes``.
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
"""Spread per octave of bytes beyond the fitted ones."""

PER_DOUBLING: Mapping[str, Spread] = {
    "switch": Spread(0.2, 0.2),
    "mesh": Spread(0.5, 0.5),
    "host": Spread(0.5, 1.4),
    "nodes": Spread(0.9, 0.9),
}
"""Spread per doubling of ranks or nodes beyond the fitted ones."""

BETWEEN: Mapping[str, Spread] = {
    "switch": Spread(0.1, 0.1),
    "mesh": Spread(0.4, 0.4),
    "host": Spread(0.4, 0.4),
    "nodes": Spread(0.42, 0.42),
}
"""Spread per doubling of ranks to the nearest fitted number, between two fitted numbers."""

OF_REFERENCE: Mapping[str, Spread] = {
    "sibling": Spread(0.22, 0.22),
    "family": Spread(0.6, 0.6),
    "link data": Spread(1.0, 1.0),
}
"""Spread of fits of a reference device, by its relation to the device, the nearest first."""

OF_RELEASE = Spread(0.2, 0.2)
"""Spread of another release or library than the operation names."""

OF_MODEL = Spread(0.5, 1.0)
"""Spread of NCCL's model without a near fit, and of data sheets."""

OF_HOST: Mapping[str, Spread] = {
    "switch": Spread(0.0, 0.0),
    "mesh": Spread(0.0, 0.0),
    "host": Spread(2.0, 2.4),
    "nodes": Spread(0.7, 1.8),
}
"""Spread by details that a device's file does not state: the connection of more than two ranks through a host
without a switch, and the share of a node's interfaces that a cluster's network carries.
"""

NO_BAND = Spread(0.25, 0.25)
"""Spread of a fit with too few rows to measure its errors."""
