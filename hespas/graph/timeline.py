"""Times of nodes: estimates, timelines of a step, and intervals of time as columns."""

from __future__ import annotations

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

__all__ = ["WAITS", "Estimate", "Timeline", "layers_of", "united"]


def _no_ints() -> SmallIntArray:
    return np.empty(0, np.int32)


def _no_flags() -> NDArray[np.bool_]:
    return np.empty(0, np.bool_)


def _no_floats() -> FloatArray:
    return np.empty(0, np.float64)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Estimate:
    """What a model says of each node of one graph; columns of shape ``(nodes,)``.

    ``duration_ns`` is the time of one execution (NaN where no estimator covers the node; 0 only for nodes
    that cost nothing); ``low_ns`` and ``high_ns`` bound it (NaN: no interval). ``estimator`` indexes
    ``estimators`` (-1: nobody). ``bound`` indexes ``bounds``: what limits the node.
    """

    hardware: str
    estimators: tuple[str, ...]
    bounds: tuple[str, ...]
    duration_ns: FloatArray
    low_ns: FloatArray
    high_ns: FloatArray
    estimator: NDArray[np.int8]
    bound: NDArray[np.int8]

    def __post_init__(self) -> None:
        """Check that all columns have one row per node."""
        names = ("low_ns", "high_ns", "estimator", "bound")
        check_lengths("Estimate", len(self), {name: getattr(self, name) for name in names})

    def __len__(self) -> int:
        return len(self.duration_ns)

    def __repr__(self) -> str:
        told = f"{len(self):,} nodes, {self.coverage:.1%} with a time"
        return short_repr(self, f"by {', '.join(self.estimators)} on {self.hardware}", told)

    @property
    def coverage(self) -> float:
        """Share of nodes with a duration, 0..1; 1 for a graph without nodes."""
        return float(np.mean(~np.isnan(self.duration_ns))) if len(self) else 1.0


WAITS = ("collectives", "messages")
"""In what a rank waits for others."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Timeline:
    """When each node of each rank ran; columns of shape ``(spans,)``. What takes no time has no span.

    ``resource`` indexes ``resources`` (``compute``, ``communication``, ``copy``, ``host``). ``critical``
    marks the spans on the critical path of their rank. ``stream`` tells several streams of one resource apart
    (-1: the only one, or none that is named). ``cause`` is the span whose end let this one start
    (-1: it starts with the step), ``by_resource`` whether it had to wait for the resource that span held,
    and not for what it made.

    A span with ``node`` -1 stands for ``trips`` trips of loop ``region`` (a row of the graph's regions, -1
    for a node's own span): its end is where the last of them ends.

    Ranks that do the same at the same time are shown once: ``shown_by`` names, for each rank, the one whose
    spans are also its own. ``finish_ns``, ``exposed_comm_ns`` (communication while nothing computes) and
    ``shown_by`` have shape ``(ranks,)``, ``busy_ns`` has ``(ranks, resources)``. Where the columns behind
    ``exposed_comm_ns`` are left out, they say that nothing is known (-1, NaN, each rank shown by itself). A
    rank of the job that was not there has NaN throughout and is shown by -1.

    Communication that starts before other ranks are there waits for them: ``wait_ns`` is how long, within the
    span, and ``awaited`` the span of the last that came (-1: nobody was later). ``exposed_wait_ns``, of shape
    ``(ranks, len(WAITS))``, is the time of each rank in which it so waited and nothing of it was at work.
    Waiting is not part of ``busy_ns`` and ``exposed_comm_ns``. ``interference_ns``, of shape ``(ranks,)``, is
    by how much communication and kernels beside each other made operations longer, summed over them.
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
    by_resource: NDArray[np.bool_] = field(default_factory=_no_flags)
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
        """Fill the columns left out; check that all have one row per span, or per rank."""
        spans, ranks = len(self.start_ns), len(self.finish_ns)
        nowhere = np.broadcast_to(np.int32(-1), (spans,))
        self._fill("cause", nowhere)
        self._fill("by_resource", np.broadcast_to(np.False_, (spans,)))
        self._fill("stream", nowhere)
        self._fill("region", nowhere)
        self._fill("trips", np.broadcast_to(np.float64(1.0), (spans,)))
        if not len(self.shown_by):
            self._fill("shown_by", np.arange(ranks, dtype=np.int32))
        self._fill("busy_ns", np.broadcast_to(np.float64(np.nan), (ranks, len(self.resources))))
        self._fill("wait_ns", np.broadcast_to(np.float64(0.0), (spans,)))
        self._fill("awaited", nowhere)
        self._fill("exposed_wait_ns", np.broadcast_to(np.float64(np.nan), (ranks, len(WAITS))))
        self._fill("interference_ns", np.broadcast_to(np.float64(np.nan), (ranks,)))
        of_spans = (
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
        check_lengths("Timeline", spans, {name: getattr(self, name) for name in of_spans})
        of_ranks = ("exposed_comm_ns", "shown_by", "busy_ns", "exposed_wait_ns", "interference_ns")
        check_lengths("Timeline", ranks, {name: getattr(self, name) for name in of_ranks})

    def _fill(self, name: str, column: NDArray[np.generic]) -> None:
        if not len(getattr(self, name)):
            object.__setattr__(self, name, column)

    def __len__(self) -> int:
        return len(self.start_ns)

    def __repr__(self) -> str:
        told = f"{len(self):,} spans of {len(self.finish_ns):,} ranks, a step of {self.step_ns / 1e6:,.3f} ms"
        return short_repr(self, "", told)

    @property
    def step_ns(self) -> float:
        """When the last rank is done; 0 without ranks."""
        return float(np.fmax.reduce(self.finish_ns)) if len(self.finish_ns) else 0.0

    def resource_ns(self, resource: str) -> FloatArray:
        """Time each rank keeps a resource busy [ns], shape ``(ranks,)``; NaN for one that is not listed."""
        if resource not in self.resources:
            return np.full(len(self.finish_ns), np.nan)
        return self.busy_ns[:, self.resources.index(resource)]


def united(start_ns: FloatArray, end_ns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The same time as disjoint intervals, sorted. O(intervals log intervals)."""
    order = np.argsort(start_ns, kind="stable")
    start, reached = start_ns[order], np.maximum.accumulate(end_ns[order])
    opens = np.append(True, start[1:] > reached[:-1])[: len(start)]
    return start[opens], reached[np.append(opens[1:], True)[: len(start)]]


def layers_of(start_ns: FloatArray, end_ns: FloatArray) -> IntArray:
    """For each interval the first layer that is free when it starts, in order of starts: intervals of a layer
    do not overlap. O(intervals log intervals).
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
            place = heappop(free)
        else:
            place, used = used, used + 1
        heappush(busy, (end, place))
        layer[row] = place
    return layer
