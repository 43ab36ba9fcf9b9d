"""Times of nodes: estimates, timelines of a step, and intervals of time as columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import (
    FloatArray,
    IntArray,
    SmallIntArray,
    check_lengths,
)
from hespas.graph.errors import short_repr

__all__ = [
    "BEYOND_RANGE",
    "DATA_SHEET",
    "MEASURED_BASIS",
    "WAITS",
    "Estimate",
    "Intervals",
    "Timeline",
    "layers_of",
    "reference_basis",
    "united",
]

MEASURED_BASIS = "measured"
"""Basis of a time: operations of this kind, with such sizes, were measured on the device."""
BEYOND_RANGE = "beyond range"
"""Basis of a time: operations of this kind were measured on the device, with other sizes."""
DATA_SHEET = "data sheet"
"""Basis of a time: only the peak rates of the device are known."""


def reference_basis(names: Iterable[str]) -> str:
    """Return the basis of a time that follows from measurements of other devices."""
    return f"reference devices {', '.join(names)}"


def _no_ints() -> SmallIntArray:
    return np.empty(0, np.int32)


def _no_floats() -> FloatArray:
    return np.empty(0, np.float64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimate:
    """Estimated time of each node of one graph; columns of shape ``(nodes,)``.

    ``duration_ns`` is the time of one execution (NaN if no estimator covers the node; 0 only for zero-cost
    nodes). ``low_ns`` and ``high_ns`` are its 90 % interval (NaN: none). ``estimator`` is the index in
    ``estimators`` of the estimator of the time (-1: none). ``bound`` is the index in ``bounds`` of the
    resource that limits the node. ``basis`` is the index in ``bases`` of the kind of evidence behind the
    time (-1: not stated, the default): :data:`MEASURED_BASIS`, :data:`BEYOND_RANGE`,
    :func:`reference_basis`, :data:`DATA_SHEET`, or another text.
    """

    hardware: str
    estimators: tuple[str, ...]
    bounds: tuple[str, ...]
    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    estimator: NDArray[np.int8]
    bound: NDArray[np.int8]
    bases: tuple[str, ...] = ()
    basis: NDArray[np.int16] = field(default_factory=lambda: np.empty(0, np.int16))

    def __post_init__(self) -> None:
        """Fill an omitted basis, and check that all columns have one row per node."""
        if not len(self.basis):
            object.__setattr__(self, "basis", np.broadcast_to(np.int16(-1), (len(self),)))
        names = ("low_ns", "high_ns", "estimator", "bound", "basis")
        check_lengths("Estimate", len(self), {name: getattr(self, name) for name in names})

    def __len__(self) -> int:
        return len(self.duration_ns)

    def __repr__(self) -> str:
        summary = f"{len(self):,} nodes, {self.coverage:.1%} with a time"
        return short_repr(self, f"by {', '.join(self.estimators)} on {self.hardware}", summary)

    @property
    def coverage(self) -> float:
        """Share of nodes with a duration, 0..1; 1 for a graph without nodes."""
        return float(np.mean(~np.isnan(self.duration_ns))) if len(self) else 1.0


WAITS = ("collectives", "messages")
"""Kinds of communication in which a rank waits for other ranks."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Timeline:
    """Schedule of each node of each rank; columns of shape ``(spans,)``. Nodes without duration have no span.

    ``resource`` is an index in ``resources`` (``compute``, ``communication``, ``copy``, ``host``).
    ``critical`` is True for spans on the critical path of their rank. ``stream`` distinguishes several
    streams of one resource (-1: the only one, or unnamed). ``cause`` is the span whose end allowed this one
    to start (-1: it starts with the step). ``by_resource`` is True if it waited for the resource of that
    span, and not for its output.

    A span with ``node`` -1 represents ``trips`` iterations of the loop ``region`` and ends with the last of
    them. ``region`` is a row of the graph's regions (-1 for the span of a node).

    Ranks with equal schedules are stored once: ``shown_by`` is, for each rank, the rank whose spans represent
    it. ``finish_ns``, ``exposed_comm_ns`` (communication without concurrent computation) and ``shown_by``
    have shape ``(ranks,)``, ``busy_ns`` has ``(ranks, resources)``. The columns after ``exposed_comm_ns`` are
    optional; their defaults mean unknown (-1, NaN, each rank represents itself). A rank of the job that was
    not simulated has NaN in all columns and ``shown_by`` -1.

    Communication that starts before the other ranks waits for them. ``wait_ns`` is the time of this wait
    within the span, and ``awaited`` the span of the last rank to start (-1: no rank started later).
    ``exposed_wait_ns``, of shape ``(ranks, len(WAITS))``, is the time in which each rank waited and did no
    work. Waiting is excluded from ``busy_ns`` and ``exposed_comm_ns``. ``interference_ns``, of shape
    ``(ranks,)``, is the slowdown of concurrent communication and kernels, summed over operations.
    """

    resources: tuple[str, ...]
    node: SmallIntArray
    rank: SmallIntArray
    resource: NDArray[np.int8]
    start_ns: FloatArray
    end_ns: FloatArray
    critical: NDArray[np.bool_]
    finish_ns: FloatArray
    exposed_comm_ns: FloatArray
    cause: SmallIntArray = field(default_factory=_no_ints)
    by_resource: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    stream: SmallIntArray = field(default_factory=_no_ints)
    region: SmallIntArray = field(default_factory=_no_ints)
    trips: FloatArray = field(default_factory=_no_floats)
    shown_by: SmallIntArray = field(default_factory=_no_ints)
    busy_ns: FloatArray = field(default_factory=_no_floats)
    wait_ns: FloatArray = field(default_factory=_no_floats)
    awaited: SmallIntArray = field(default_factory=_no_ints)
    exposed_wait_ns: FloatArray = field(default_factory=_no_floats)
    interference_ns: FloatArray = field(default_factory=_no_floats)

    def __post_init__(self) -> None:
        """Fill omitted columns, and check that all have one row per span, or per rank."""
        spans, ranks = len(self.start_ns), len(self.finish_ns)
        none = np.broadcast_to(np.int32(-1), (spans,))
        self._fill("cause", none)
        self._fill("by_resource", np.broadcast_to(np.False_, (spans,)))
        self._fill("stream", none)
        self._fill("region", none)
        self._fill("trips", np.broadcast_to(np.float64(1.0), (spans,)))
        if not len(self.shown_by):
            self._fill("shown_by", np.arange(ranks, dtype=np.int32))
        self._fill("busy_ns", np.broadcast_to(np.float64(np.nan), (ranks, len(self.resources))))
        self._fill("wait_ns", np.broadcast_to(np.float64(0.0), (spans,)))
        self._fill("awaited", none)
        self._fill("exposed_wait_ns", np.broadcast_to(np.float64(np.nan), (ranks, len(WAITS))))
        self._fill("interference_ns", np.broadcast_to(np.float64(np.nan), (ranks,)))
        span_columns = (
            "node",
            "rank",
            "resource",
            "end_ns",
            "critical",
            "cause",
            "by_resource",
            "stream",
            "region",
            "trips",
            "wait_ns",
            "awaited",
        )
        check_lengths("Timeline", spans, {name: getattr(self, name) for name in span_columns})
        rank_columns = ("exposed_comm_ns", "shown_by", "busy_ns", "exposed_wait_ns", "interference_ns")
        check_lengths("Timeline", ranks, {name: getattr(self, name) for name in rank_columns})

    def _fill(self, name: str, column: NDArray[np.generic]) -> None:
        if not len(getattr(self, name)):
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.start_ns)

    def __repr__(self) -> str:
        step_ms = f"a step of {self.step_ns / 1e6:,.3f} ms"
        return short_repr(self, "", f"{len(self):,} spans of {len(self.finish_ns):,} ranks, {step_ms}")

    @property
    def step_ns(self) -> float:
        """Time at which the last rank finishes; 0 without ranks."""
        return float(np.fmax.reduce(self.finish_ns)) if len(self.finish_ns) else 0.0

    def resource_ns(self, resource: str) -> FloatArray:
        """Return the busy time of a resource on each rank [ns], shape ``(ranks,)``; NaN if it is
        not listed.
        """
        if resource not in self.resources:
            return np.full(len(self.finish_ns), np.nan)
        return self.busy_ns[:, self.resources.index(resource)]


def united(start_ns: FloatArray, end_ns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the union of intervals as disjoint intervals, sorted. O(intervals log intervals)."""
    order = np.argsort(start_ns, kind="stable")
    start, reached = start_ns[order], np.maximum.accumulate(end_ns[order])
    opens = np.append(True, start[1:] > reached[:-1])[: len(start)]
    return start[opens], reached[np.append(opens[1:], True)[: len(start)]]


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Set of disjoint time intervals [ns], sorted: each ends before the next one starts."""

    start: FloatArray
    end: FloatArray

    @classmethod
    def union(cls, start: FloatArray, end: FloatArray) -> Intervals:
        """Return the union of spans; spans that end before they start are ignored. O(n log n)."""
        ran = end > start
        return cls(*united(start[ran], end[ran]))

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length_ns(self) -> float:
        """Return the total length of the intervals [ns]."""
        return float((self.end - self.start).sum())

    def joined(self, other: Intervals) -> Intervals:
        """Return the union with another set."""
        return Intervals.union(
            np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end))
        )

    def gaps(self) -> Intervals:
        """Return the gaps between the intervals."""
        return Intervals(self.end[:-1], self.start[1:])

    def within_ns(self, start: FloatArray, end: FloatArray) -> FloatArray:
        """Return the covered part of each span [start, end], shape ``(spans,)``. O((spans + n) log n)."""
        covered: FloatArray = np.maximum(self.elapsed_ns(end) - self.elapsed_ns(start), 0.0)
        return covered

    def elapsed_ns(self, at: FloatArray) -> FloatArray:
        """Return how much of the time before each moment is inside the intervals [ns]."""
        if not len(self):
            return np.zeros(len(at))
        before = np.append(0.0, np.cumsum(self.end - self.start))
        count: IntArray = np.searchsorted(self.start, at, side="right")
        current = np.maximum(count - 1, 0)
        inside = np.minimum(at, self.end[current]) - self.start[current]
        return np.where(count > 0, before[current] + inside, 0.0)


def layers_of(start_ns: FloatArray, end_ns: FloatArray) -> IntArray:
    """Return a layer for each interval, so that intervals of one layer do not overlap.

    Intervals are assigned in order of start, each to the first free layer. O(intervals log intervals).
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    used = 0
    layer = np.zeros(len(start_ns), np.int64)
    order = np.argsort(start_ns, kind="stable")
    for row, start, end in zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True):
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        if free:
            index = heappop(free)
        else:
            index, used = used, used + 1
        heappush(busy, (end, index))
        layer[row] = index
    return layer
