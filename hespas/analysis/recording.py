"""What the analyses look at: the device events of one rank of a profile, each with what kind of work it is.

Kinds are those of Holistic Trace Analysis: computation, communication, and memory (copies and fills).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.analysis.intervals import Intervals
from hespas.converters.measured_ops.device_events import EventRole, event_roles
from hespas.graph import Diagnostics, Profile
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["Kind", "Recording", "recordings_of"]


class Kind(IntEnum):
    """What a device event is."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY = 2
    """A copy or a fill, wherever to."""

    @property
    def word(self) -> str:
        """As tables write it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The events of one rank. ``rows`` are those of ``profile`` in the order of their starts, shape
    ``(events,)``; the other columns are of the same shape. An event that ends before it starts takes no time.
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
        """How long each event ran: as recorded, which late starts would round in the difference of times."""
        return np.maximum(self.profile.duration_ns[self.rows], 0.0)

    def streams(self) -> list[tuple[int, IntArray]]:
        """Each stream that is known with its events, in order of start. O(events log events)."""
        stream = self.profile.stream[self.rows]
        order = np.argsort(stream, kind="stable")
        order = order[stream[order] >= 0]
        numbers, first = np.unique(stream[order], return_index=True)
        return list(zip(numbers.tolist(), np.split(order, first[1:]), strict=False))

    @property
    def span_ns(self) -> float:
        """From the first start to the last end; 0 without events."""
        return float(self.end_ns.max() - self.start_ns[0]) if len(self) else 0.0

    def busy(self, kind: Kind) -> Intervals:
        """When events of a kind ran."""
        mask = self.kind == kind
        return Intervals.union(self.start_ns[mask], self.end_ns[mask])


def recordings_of(profiles: Sequence[Profile], diagnostics: Diagnostics) -> list[Recording]:
    """The ranks of all profiles in order. Files of several processes that do not tell their ranks are
    numbered as they are given; events without a start are left out, which is told.
    """
    found: list[Recording] = []
    taken: set[int] = set()
    for profile in profiles:
        kind = _kinds(profile)
        known = ~np.isnan(profile.start_ns + profile.duration_ns)
        message = "device events have no time and are left out of the analyses"
        diagnostics.warning("analysis.no-time", profile.name, message, count=int((~known).sum()))
        ranks: list[int] = np.unique(profile.rank).tolist()
        shift = 0
        if taken & set(ranks):
            shift = max(taken) + 1 - min(ranks)
            message = f"another file is of rank {min(taken & set(ranks))} too: this one is numbered on"
            diagnostics.warning("analysis.same-rank", profile.name, message)
        for rank in ranks:
            rows = np.flatnonzero((profile.rank == rank) & known)
            rows = rows[np.argsort(profile.start_ns[rows], kind="stable")]
            start = profile.start_ns[rows]
            end = start + np.maximum(profile.duration_ns[rows], 0.0)
            found.append(Recording(profile.name, profile, rank + shift, rows, kind[rows], start, end))
            taken.add(rank + shift)
    return sorted(found, key=lambda each: each.rank)


_KIND_OF_ROLE = {
    EventRole.WORK: Kind.COMPUTE,
    EventRole.HOST_COPY: Kind.MEMORY,
    EventRole.COMMUNICATION: Kind.COMMUNICATION,
    EventRole.DEVICE_COPY: Kind.MEMORY,
    EventRole.FILL: Kind.MEMORY,
}


def _kinds(profile: Profile) -> NDArray[np.uint8]:
    of_role = np.array([_KIND_OF_ROLE[role] for role in EventRole], np.uint8)
    return of_role[event_roles(profile)]
