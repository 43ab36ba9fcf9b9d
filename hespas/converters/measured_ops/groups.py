"""Device events sorted into nodes: one for each operation that answers, and what stands apart from it.

Apart stand copies between host and device (another link), and communication kernels; events that nothing
explains are nodes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops.owners import resolve_owners
from hespas.graph import CollectiveKind, Profile
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray

__all__ = ["EventGroups", "Role", "collective_kind", "event_roles", "group_events"]


class Role(IntEnum):
    """What a device event is to its operation."""

    WORK = 0
    HOST_COPY = 1
    COMMUNICATION = 2
    DEVICE_COPY = 3
    FILL = 4


_HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH", "CopyHostToDevice", "CopyDeviceToHost")
_COMMUNICATION = ("nccldevkernel", "ncclkernel", "rccl_generic", "rccldevkernel", "onerccl", "mscclkernel")
_KINDS: tuple[tuple[str, CollectiveKind], ...] = (
    ("allreduce", CollectiveKind.ALL_REDUCE),
    ("allgather", CollectiveKind.ALL_GATHER),
    ("reducescatter", CollectiveKind.REDUCE_SCATTER),
    ("alltoall", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("barrier", CollectiveKind.BARRIER),
    ("gather", CollectiveKind.GATHER),
    ("scatter", CollectiveKind.SCATTER),
    ("reduce", CollectiveKind.REDUCE),
)
"""Found in a name without separators, in this order."""


def collective_kind(names: Iterable[str]) -> CollectiveKind:
    """The kind that the first telling name states, such as ``c10d::alltoall_base_``."""
    for name in names:
        plain = name.lower().replace("_", "")
        for part, kind in _KINDS:
            if part in plain:
                return kind
    return CollectiveKind.UNKNOWN


@dataclass(frozen=True, slots=True, eq=False)
class EventGroups:
    """``node`` of each event, nodes numbered by their first start; per node its ``role``, its host operation
    (-1 none) and whether that answers for it, its longest event, its time.

    ``busy_ns`` is the sum over the node's events, ``duration_ns`` the time during which any of them ran; an
    event that ends before it starts counts as none.
    """

    node: SmallIntArray
    role: NDArray[np.uint8]
    host_op: IntArray
    answers: BoolArray
    longest: IntArray
    stream: IntArray
    busy_ns: FloatArray
    duration_ns: FloatArray

    def __len__(self) -> int:
        return len(self.role)


def event_roles(profile: Profile) -> NDArray[np.uint8]:
    """The role of each event, by kernel name and category; each distinct pair is looked at once."""
    key = (profile.kernel_row.astype(np.int64) << 32) | profile.category_row
    pairs, place = np.unique(key, return_inverse=True)
    roles = [
        _role(profile.strings[int(pair >> 32)], profile.strings[int(pair & 0xFFFFFFFF)])
        for pair in pairs.tolist()
    ]
    return np.array(roles, np.uint8)[place] if len(pairs) else np.empty(0, np.uint8)


def _role(kernel: str, category: str) -> Role:
    if kernel.startswith(_HOST_COPIES):
        return Role.HOST_COPY
    if kernel.lower().startswith(_COMMUNICATION):
        return Role.COMMUNICATION
    if "memset" in category or kernel.startswith("Memset"):
        return Role.FILL
    if "memcpy" in category or kernel.startswith("Memcpy"):
        return Role.DEVICE_COPY
    return Role.WORK


def group_events(profile: Profile) -> EventGroups:
    """Sort the events into nodes. O(events log events)."""
    count = len(profile)
    role = event_roles(profile)
    launched_by = profile.host_event.astype(np.int64)
    owners = resolve_owners(profile.host, profile.strings, launched_by)
    apart = role == Role.HOST_COPY
    # A copy to or from the host belongs to the operation that copies, not to all that happens around it.
    owner = np.where(apart, launched_by, owners.op)
    alone = (owner < 0) | (role == Role.COMMUNICATION)
    inside = (role == Role.DEVICE_COPY) | (role == Role.FILL)
    kept = np.where(inside & ~alone, Role.WORK, role).astype(np.uint8)
    # One number per node: of the operation and the role, or of the event itself.
    number = np.where(alone, -1 - np.arange(count, dtype=np.int64), owner * 8 + kept)
    _, first_seen, group = np.unique(number, return_index=True, return_inverse=True)
    groups = len(first_seen)
    starts = np.full(groups, np.inf)
    np.fmin.at(starts, group, profile.start_ns)  # an unknown start says nothing
    order = np.lexsort((first_seen, starts))
    rank = np.empty(groups, np.int64)
    rank[order] = np.arange(groups)
    node = rank[group]
    by_node = first_seen[order]
    return _times(profile, node, kept[by_node], owner[by_node], owners.answers[by_node])


def _times(
    profile: Profile, node: IntArray, role: NDArray[np.uint8], host_op: IntArray, answers: BoolArray
) -> EventGroups:
    count = len(role)
    ran_ns = np.maximum(profile.duration_ns, 0.0)
    busy = np.bincount(node, ran_ns, count).astype(np.float64)
    by_length = np.lexsort((profile.duration_ns, node))
    last = np.flatnonzero(np.append(np.diff(node[by_length]) > 0, True)) if count else np.empty(0, np.int64)
    longest = by_length[last]
    order = np.lexsort((profile.start_ns, node))
    sizes = np.bincount(node, minlength=count)
    duration = busy.copy()
    offsets = np.append(0, np.cumsum(sizes))
    for at in np.flatnonzero(sizes > 1).tolist():
        rows = order[offsets[at] : offsets[at + 1]]
        duration[at] = _running_ns(profile.start_ns[rows], ran_ns[rows], float(busy[at]))
    return EventGroups(
        node=node.astype(np.int32),
        role=role,
        host_op=host_op,
        answers=answers,
        longest=longest,
        stream=profile.stream[longest] if count else np.empty(0, np.int64),
        busy_ns=busy,
        duration_ns=duration,
    )


def _running_ns(start: FloatArray, duration: FloatArray, busy_ns: float) -> float:
    """Time during which any of some events, sorted by start, ran: their sum where none overlap, or where a
    start is not known.
    """
    if np.isnan(start).any():
        return busy_ns
    reached = np.maximum.accumulate(start + duration)
    before = np.append(-np.inf, reached[:-1])
    overlap = np.minimum(np.maximum(before - start, 0.0), duration)
    return busy_ns - float(overlap.sum())
