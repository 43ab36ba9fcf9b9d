"""Durations in whole microseconds and nanoseconds, with remainders carried along each stream.

Truncating every duration loses several per cent of a real trace and makes a third of its kernels 0 us long.
Here the running time of a stream is rounded up at each node, so that any sum along it is right within 1 us.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.wire import Bools, Longs, Words
from hespas.graph import NodeKind
from hespas.graph.columns import FloatArray

__all__ = [
    "LARGEST_MICROS",
    "LONGEST_NS",
    "UNKNOWN",
    "WrittenTimes",
    "carried_micros",
    "micros_as_ns",
    "whole_nanos",
]

_COMMUNICATION = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)

UNKNOWN = -1

LONGEST_NS = 1 << 62
"""Limit of times in ns (146 years); longer ones are stated in microseconds only."""

LARGEST_MICROS = np.uint64((1 << 63) - 1)
"""Largest stated time: readers of signed numbers would read a larger one as negative."""

_LARGEST_CAST = float((1 << 63) - 1024)
"""Largest number below 2**63 that a float holds."""


class WrittenTimes(NamedTuple):
    """Times of nodes as a trace states them. ``nanos`` are whole ns, :data:`UNKNOWN` if unknown or at least
    :data:`LONGEST_NS`. ``micros`` are values of ``duration_micros``, 0 if unknown.
    """

    nanos: Longs
    micros: Words

    @classmethod
    def of(
        cls, duration_ns: FloatArray, kind: NDArray[np.integer], place: tuple[NDArray[np.integer], ...]
    ) -> WrittenTimes:
        """Return the times to write for durations [ns], NaN if unknown. ``place`` is the resource and the
        stream of each node. Rounding remainders are added to later nodes of the same resource and stream.
        Computations and communication are rounded separately, because a simulator replays only the times of
        computations.
        """
        resource, stream = place
        lane = (resource.astype(np.int64) * 2 + np.isin(kind, _COMMUNICATION)) * (1 << 32) + stream
        nanos = whole_nanos(duration_ns, lane)
        micros = carried_micros(nanos, lane).view(np.uint64)
        long = np.flatnonzero(duration_ns >= LONGEST_NS)
        if len(long):
            whole = np.floor(duration_ns[long] / 1e3)
            cast = np.minimum(whole, _LARGEST_CAST).astype(np.uint64)
            micros[long] = np.where(whole > _LARGEST_CAST, LARGEST_MICROS, cast)
        return cls(nanos, micros)

    def shortened(self, duration_ns: FloatArray) -> int:
        """Return the number of times of at least :data:`LONGEST_NS` that the written microseconds do not
        state exactly.
        """
        long = duration_ns >= LONGEST_NS
        return int((micros_as_ns(self.micros[long]) != duration_ns[long]).sum())

    def are_exact(self, duration_ns: FloatArray) -> Bools:
        """Return a mask of the times that ``micros`` state exactly and that are not 0."""
        whole = (self.nanos % 1000 == 0) & ((self.nanos // 1000).view(np.uint64) == self.micros)
        exact: Bools = (self.nanos > 0) & (whole | (micros_as_ns(self.micros) == duration_ns))
        return exact


def micros_as_ns(micros: Words) -> FloatArray:
    """Convert the microseconds in a trace to ns, as readers of traces do."""
    return micros.astype(np.float64) * 1e3


def whole_nanos(duration_ns: FloatArray, stream: NDArray[np.integer]) -> Longs:
    """Return durations in whole ns: :data:`UNKNOWN` if unknown or too long, at least 1 ns if positive.

    Rounding remainders are added to later nodes of the same stream, so that each sum along a stream is right
    within 1 ns.
    """
    is_known = (duration_ns >= 0) & (duration_ns < LONGEST_NS)
    time = np.where(is_known, duration_ns, 0.0)
    time[(time > 0) & (time < 1)] = 1.0
    whole = np.floor(time)
    order, begins, ends = _along(time - whole, stream)
    nanos = whole.astype(np.int64)
    nanos[order] += _half_up(ends) - _half_up(begins)
    return np.where(is_known, nanos, UNKNOWN)


def carried_micros(nanos: Longs, stream: NDArray[np.integer]) -> Longs:
    """Return the duration of each node in whole microseconds, 0 if unknown. Rounding remainders are added to
    later nodes of the stream, so that sums are right.
    """
    known_nanos = np.maximum(nanos, 0)
    micros = known_nanos // 1000
    order, begins, ends = _along((known_nanos - micros * 1000).astype(np.float64), stream)
    micros[order] += (ends.astype(np.int64) + 999) // 1000 - (begins.astype(np.int64) + 999) // 1000
    return micros


def _along(rest: FloatArray, stream: NDArray[np.integer]) -> tuple[Longs, FloatArray, FloatArray]:
    """Return the nodes ordered by stream, and the sum of ``rest`` over the stream before and after each node.
    ``rest`` is the remainder of each duration below a whole microsecond. Sums of remainders stay exact in
    long traces.
    """
    order = np.argsort(stream, kind="stable")
    ordered = stream[order]
    ends = np.cumsum(rest[order])
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(order) else order
    first = ends[starts] - rest[order][starts]
    ends -= np.repeat(first, np.diff(np.append(starts, len(order))))
    begins = np.zeros_like(ends)
    begins[1:] = ends[:-1]
    begins[starts] = 0
    return order, begins, ends


def _half_up(time: FloatArray) -> Longs:
    """Round times half up. Times that differ by 1 stay different, unlike with ``np.rint``, which rounds half
    to even.
    """
    whole = np.floor(time)
    return whole.astype(np.int64) + (time - whole >= 0.5)
