"""Numbers for process groups: those of the file a trace came from, and small new ones for all others."""

from __future__ import annotations

from typing import NamedTuple

from hespas.converters.chakra.comm_groups import FILE_NAME, parse_groups, render_groups
from hespas.graph import Diagnostics, ExplicitGroups, GroupSet, Workload
from hespas.graph.errors import UnsupportedError

__all__ = ["GroupIds", "check_listing"]

_MOST_MEMBERS = 1 << 24
"""Ranks that all lists of ``comm_group.json`` may have together: some 150 MB of text."""


class GroupIds(NamedTuple):
    """The id of each group of each group set. New ids follow the known ones, set by set, group by group.
    ``stated`` is the file that lists the known ones, empty where it is not sound.

    The id of a group is computed, not looked up, so that one rank of many costs no list of all groups.
    """

    known: dict[int, list[int]]
    stated: bytes
    base: dict[GroupSet, int]
    num_ranks: int
    by_members: dict[tuple[int, ...], list[int]]

    @classmethod
    def of(cls, workload: Workload) -> GroupIds:
        """Ids for all group sets of a workload. O(group sets)."""
        document = b""
        for graph in workload.classes:
            document = document or graph.attachments.get(FILE_NAME, b"")
        found = Diagnostics()
        known = _parsed(document, found) if document else {}
        stated = b"" if found else document
        number = max(known, default=0) + 1
        base: dict[GroupSet, int] = {}
        for groups in workload.group_sets:
            base[groups] = number
            unnamed = groups.is_world(workload.num_ranks) and not groups.communicator
            number += 0 if unnamed else groups.num_groups
        by_members: dict[tuple[int, ...], list[int]] = {}
        for group in sorted(known):
            by_members.setdefault(tuple(sorted(known[group])), []).append(group)
        return cls(known, stated, base, workload.num_ranks, by_members)

    def is_idle(self, groups: GroupSet, rank: int) -> bool:
        """Whether a collective over these groups has nothing to do on a rank: it has no group, or is alone in
        one that the trace did not name.
        """
        group = groups.group_of(rank)
        if group < 0:
            return True
        if groups.max_group_size > 1 and groups.group_size != -1:
            return False
        return len(groups.members(group)) < 2 and self._known(groups, group) < 0

    def _known(self, groups: GroupSet, group: int) -> int:
        """The id that the trace gave a group, -1 for none."""
        if not self.by_members:
            return -1
        members: list[int] = groups.members(group).tolist()
        place = groups.communicator - (len(members) == self.num_ranks)  # all ranks need no name: that is 0
        same = self.by_members.get(tuple(sorted(members)), [])
        found = same[place] if 0 <= place < len(same) else -1
        return found if found >= 0 and self.known[found] == members else -1

    def text(self, groups: GroupSet, rank: int) -> bytes:
        """``pg_name`` of the group a rank belongs to; empty for an idle collective, and for all ranks where
        no trace named that group.
        """
        group = groups.group_of(rank)
        if group < 0:
            return b""
        number = self._known(groups, group)
        if number < 0 and self._is_unnamed(groups):
            return b""
        return str(number if number >= 0 else self.base[groups] + group).encode()

    def _is_unnamed(self, groups: GroupSet) -> bool:
        return groups.is_world(self.num_ranks) and not groups.communicator

    def is_named_apart(self, groups: GroupSet) -> bool:
        """Whether one of these groups is named beside an earlier one of the same ranks in another order: a
        reader takes what was one communicator for two process groups.
        """
        if not isinstance(groups, ExplicitGroups) or self.by_members:
            return False
        earlier = [each for each in self.base if self.base[each] < self.base[groups]]
        alike = [each for each in earlier if each.communicator == groups.communicator]
        return any(
            sorted(each.members(place).tolist()) == sorted(row)
            for row in groups.rows
            for each in alike
            if row and (place := each.group_of(row[0])) >= 0 and not self._is_unnamed(each)
        )

    def of_rank(self, rank: int) -> dict[int, list[int]]:
        """The groups a rank belongs to."""
        found: dict[int, list[int]] = {}
        for groups in self.base:
            text = self.text(groups, rank)
            if text and not self.is_idle(groups, rank):
                members: list[int] = groups.members(groups.group_of(rank)).tolist()
                found[int(text)] = members
                # Which of the groups of the same ranks it is, the lower ids say.
                lower = self.by_members.get(tuple(sorted(members)), []) if groups.communicator else []
                found.update((number, self.known[number]) for number in lower if number < int(text))
        return found

    def document(self) -> bytes:
        """``comm_group.json`` with the known groups and all that got a new id, but for groups of one; as it
        was stated where none did.
        """
        listed = dict(self.known)
        for groups, base in self.base.items():
            if self._is_unnamed(groups):
                continue
            for place, members in enumerate(groups):
                if len(members) > 1 and self._known(groups, place) < 0:
                    listed[base + place] = members.tolist()
        if self.stated and len(listed) == len(self.known):
            return self.stated
        return render_groups(listed) if listed else b""


def check_listing(workload: Workload, *, alone: bool) -> None:
    """Raise ``UnsupportedError`` for groups of ranks the job does not have, and for groups that are too large
    to be listed; nothing is listed here. ``alone``: one rank is written, with its own groups.
    """
    count, listed = workload.num_ranks, 0
    for number, groups in enumerate(workload.group_sets):
        if groups.is_world(count):
            continue
        end = _end(groups)
        if count < end:
            raise UnsupportedError(
                f"group set {number} has rank {end - 1:,}, but the job only ranks 0..{count - 1:,}",
                position=f"group set {number}",
                hint="state the number of ranks with --num-devices, or correct the groups",
            )
        listed += groups.max_group_size if alone else groups.num_ranks
        if listed > _MOST_MEMBERS:
            raise UnsupportedError(
                f"group set {number}: with it the process groups list {listed:,} ranks, "
                f"and {FILE_NAME} may list {_MOST_MEMBERS:,}",
                position=f"group set {number}",
                hint="convert the program for fewer devices",
            )


def _end(groups: GroupSet) -> int:
    """One more than the highest rank."""
    if isinstance(groups, ExplicitGroups):
        return 1 + max((max(row) for row in groups.rows if row), default=-1)
    return groups.base + groups.num_ranks


def _parsed(document: bytes, found: Diagnostics) -> dict[int, list[int]]:
    """The groups of a file that a reader has checked already."""
    from hespas.converters.chakra.faults import Faults

    return parse_groups(document, Faults(FILE_NAME, None, found, lenient=True))
