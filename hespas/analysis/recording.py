"""Recordings: the device events of one rank of a profile, by kind of work, and sets of time intervals.

Kinds are as in Holistic Trace Analysis: computation, communication, and memory (copies and fills).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops.device_events import EventRole, event_roles
from hespas.graph import Diagnostics, Profile
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.timeline import Intervals

__all__ = ["DeviceEventKind", "Recording", "recordings_of"]


class DeviceEventKind(IntEnum):
    """Kind of work of a device event."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY = 2
    """A copy or a fill, also to or from the host."""

    @property
    def word(self) -> str:
        """Return the name of this kind in tables."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Device events of one rank. ``rows`` are the indices of the events in ``profile``, in the order of their
    starts. All columns have shape ``(events,)``. An event that ends before it starts has duration 0.
    """

    name: str
    profile: Profile
    rank: int
    rows: IntArray
    kind: NDArray[np.uint8]
    start_ns: FloatArray
    end_ns: FloatArray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def duration_ns(self) -> FloatArray:
        """Return the recorded durations [ns]. They are more precise than differences of start and end times,
        which are large numbers.
        """
        return np.maximum(self.profile.duration_ns[self.rows], 0.0)

    def streams(self) -> list[tuple[int, IntArray]]:
        """Return each known stream with its events, in order of start. O(events log events)."""
        stream = self.profile.stream[self.rows]
        order = np.argsort(stream, kind="stable")
        order = order[stream[order] >= 0]
        numbers, first = np.unique(stream[order], return_index=True)
        return list(zip(numbers.tolist(), np.split(order, first[1:]), strict=False))

    @property
    def span_ns(self) -> float:
        """Return the time from the first start to the last end of the device events [ns]; 0 without
        events.
        """
        return float(self.end_ns.max() - self.start_ns[0]) if len(self) else 0.0

    def busy(self, kind: DeviceEventKind) -> Intervals:
        """Return the time intervals in which device events of one kind ran."""
        mask = self.kind == kind
        return Intervals.union(self.start_ns[mask], self.end_ns[mask])


_KIND_OF_ROLE = {
    EventRole.WORK: DeviceEventKind.COMPUTE,
    EventRole.HOST_COPY: DeviceEventKind.MEMORY,
    EventRole.COMMUNICATION: DeviceEventKind.COMMUNICATION,
    EventRole.DEVICE_COPY: DeviceEventKind.MEMORY,
    EventRole.FILL: DeviceEventKind.MEMORY,
}


def recordings_of(profiles: Sequence[Profile], diagnostics: Diagnostics) -> list[Recording]:
    """Return the recordings of all ranks, in order. Files of several processes that do not state their
    ranks are numbered in the given order; events without a start are left out. Both are reported.
    """
    recordings: list[Recording] = []
    taken: set[int] = set()
    kinds = np.array([_KIND_OF_ROLE[role] for role in EventRole], np.uint8)
    for profile in profiles:
        kind = kinds[event_roles(profile)]
        has_time = ~np.isnan(profile.start_ns + profile.duration_ns)
        message = "device events have no time and are left out of the analyses"
        diagnostics.warning("analysis.no-time", profile.name, message, count=int((~has_time).sum()))
        ranks: list[int] = np.unique(profile.rank).tolist()
        shift = 0
        if taken & set(ranks):
            shift = max(taken) + 1 - min(ranks)
            message = f"another file is also of rank {min(taken & set(ranks))}: this one gets the next rank"
            diagnostics.warning("analysis.same-rank", profile.name, message)
        for rank in ranks:
            rows = np.flatnonzero((profile.rank == rank) & has_time)
            rows = rows[np.argsort(profile.start_ns[rows], kind="stable")]
            start = profile.start_ns[rows]
            end = start + np.maximum(profile.duration_ns[rows], 0.0)
            recordings.append(Recording(profile.name, profile, rank + shift, rows, kind[rows], start, end))
            taken.add(rank + shift)
    return sorted(recordings, key=lambda recording: recording.rank)
