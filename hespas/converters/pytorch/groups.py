"""Process groups: from the node that lists them, or from what the profiler says of the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from hespas.graph import ExplicitGroups, GroupSet, StridedGroups, compress_groups

__all__ = ["GROUPS_NODE", "Groups", "Members", "ProcessGroup", "listed_groups"]

GROUPS_NODE = "## process_group:init ##"
_MOST_RANKS = 1 << 20


Members = tuple[int, ...] | range
"""Global ranks in ring order; what a step says is not written out, as a few bytes may stand for a million."""


class ProcessGroup(msgspec.Struct, frozen=True, gc=False):
    """One group as listed; an empty ``ranks`` means all ranks."""

    name: str = msgspec.field(default="", name="pg_name")
    ranks: msgspec.Raw = msgspec.Raw(b"")
    group_size: int = -1
    pg_size: int = -1

    @property
    def size(self) -> int:
        """Number of members, -1 where not stated."""
        return max(self.group_size, self.pg_size)

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks in ring order; none where the list is not there or cut."""
        try:
            found = msgspec.json.decode(self.ranks, type=list[int])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return ()
        good = len(found) <= _MOST_RANKS and all(0 <= rank < 1 << 31 for rank in found)
        return tuple(found) if good else ()


_LIST = msgspec.json.Decoder(list[ProcessGroup])


def listed_groups(document: bytes | str) -> tuple[ProcessGroup, ...]:
    """The groups of a JSON list; none where it is no such list."""
    try:
        return tuple(_LIST.decode(document))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


def _is_everybody(members: Members, world: int) -> bool:
    """Whether these are all ranks in order; a job may be said to be larger than memory."""
    return len(members) == world and all(rank == place for place, rank in enumerate(members))


class Groups(NamedTuple):
    """The groups of a job by name. ``world`` is the number of ranks."""

    members: dict[str, tuple[int, ...]]
    world: int

    @classmethod
    def of(cls, groups: Iterable[ProcessGroup], world: int) -> Groups:
        """Groups of one rank; the size of the job where nobody states it is that of the largest group."""
        found = {group.name: group.members for group in groups}
        stated = [group.size for group in groups if group.size <= _MOST_RANKS]
        largest = max((max(ranks) + 1 for ranks in found.values() if ranks), default=1)
        return cls(found, max(world, largest, *stated, 1))

    def find(self, name: str, ranks: Members, size: int) -> Members | None:
        """The members of a group; None where nobody says. An empty list is all ranks.

        A name that no list holds is all ranks where its size says so; a communication without a name belongs
        to the only group there is.
        """
        if ranks:
            return ranks
        if name in self.members:
            return self.members[name]
        if size == self.world:
            return ()
        if not name and len(self.members) == 1:
            return next(iter(self.members.values()))
        return None

    def group_set(self, members: Members) -> GroupSet:
        """The group set that has this group only."""
        if not members or _is_everybody(members, self.world):
            return StridedGroups.all_ranks(self.world)
        if isinstance(members, range) and members.step == 1:
            return StridedGroups((), ((len(members), 1),), members.start)
        members = tuple(members)
        rows = np.array([members], np.int64)
        return compress_groups(rows) if len(set(members)) == len(members) else ExplicitGroups((members,))
