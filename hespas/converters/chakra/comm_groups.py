"""Process groups of a job: the file ``comm_group.json`` and the ids of groups.

The file is an object that maps a decimal group id >= 1 to a list of global ranks in ring order. Other tools
use other file names and name groups by texts; both are read. Hespas writes ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.contract import WHOLE_WORLD
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph import Diagnostics, ExplicitGroups, GroupSet, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = [
    "FILE_NAME",
    "MAX_RANK_DIGITS",
    "USUAL_NAMES",
    "GroupIds",
    "NamedGroups",
    "check_listing",
    "groups_of_metadata",
    "parse_groups",
    "read_groups",
    "render_groups",
]

FILE_NAME = "comm_group.json"
USUAL_NAMES = (FILE_NAME, "comm_groups.json")
"""File names that tools use; STAGE names the file after its traces."""
_TRACES, _BESIDE_TRACES = "et", "comm_groups.json"
"""MLSynth writes the groups next to the folder ``et`` of its traces."""
_PROCESS_GROUPS = b'"pg_name"'
_MOST_DIGITS = 10


class _ProcessGroup(TypedDict):
    """One process group in the list that PyTorch writes into a trace."""

    pg_name: str
    ranks: list[int]


class NamedGroups(dict[int, list[int]]):
    """Process groups of a job: group id -> ranks in ring order. ``names`` maps names of groups that are not
    decimal ids to ids. Id 0 is the group of all ranks.
    """

    def __init__(self) -> None:
        """Start without groups."""
        super().__init__()
        self.names: dict[str, int] = {}
        self._stated: set[int] = set()

    def add(self, name: str, ranks: list[int], number: int) -> None:
        """Add a group under its name if that is a decimal id, else under the id ``number``."""
        if _is_id(name):
            self[int(name)] = ranks
            self._stated.add(int(name))
        else:
            self.names[name] = number if ranks else 0
            if ranks:
                self[number] = ranks

    def find(self, text: str) -> int:
        """Return the id for a group name or a decimal id: 0 for all ranks, -1 if the group is unknown."""
        if text in self.names:
            return self.names[text]
        if text in WHOLE_WORLD:
            return 0
        return int(text) if _is_id(text) and int(text) in self._stated else -1


def _is_id(name: str) -> bool:
    """Return True if the name is a decimal number >= 1, as simulators spell ids."""
    return name.isascii() and name.isdecimal() and len(name) < _MOST_DIGITS and name[0] != "0"


def read_groups(
    folder: Path, name: str, faults: Faults, chosen: Path | None = None, *, trace: Path | None = None
) -> tuple[NamedGroups, bytes]:
    """Return the process groups for the traces called ``name`` in ``folder``, and the content of the file
    that lists them. Both are empty if there is no such file. ``chosen`` is the file that the user named
    (None: search the folder), and ``trace`` the trace that is read.
    """
    usual = folder / FILE_NAME
    path = chosen
    if path is None and os.path.lexists(usual):
        path = usual
    elif path is None:  # another file counts only if it holds lists of ranks
        others = [*(folder / other for other in USUAL_NAMES[1:]), folder / f"{name}.json"]
        if folder.resolve().name == _TRACES:
            others.append(folder.resolve().parent / _BESIDE_TRACES)
        path = next(
            (other for other in others if other != trace and other.is_file() and _lists_ranks(other)), None
        )
    if path is None:
        return NamedGroups(), b""
    if path != usual:
        message = f"process groups are read from {path}"
        faults.diagnostics.info("chakra.groups-file", faults.path, message)
    try:
        data = read_document(path, limits().groups_bytes, "a list of process groups")
    except FormatError as error:
        faults.error(
            "ET019", f"{path.name} cannot be read: {error.message}", hint=error.hint or "check the file"
        )
        return NamedGroups(), b""
    return parse_groups(data, faults), data


def _lists_ranks(path: Path) -> bool:
    import msgspec

    try:
        data = read_document(path, limits().groups_bytes, "a list of process groups")
        return bool(msgspec.json.decode(data, type=dict[str, list[int]]))
    except (FormatError, ValueError, RecursionError):
        return False


def parse_groups(data: bytes, faults: Faults) -> NamedGroups:
    """Parse the content of ``comm_group.json``. A group that has a name instead of an id, or the id 0, gets a
    new id above the other ids.
    """
    import msgspec

    try:
        listed = msgspec.json.decode(data, type=dict[str, list[int]])
    except (ValueError, RecursionError) as error:  # not JSON, of other types, not UTF-8, or nested too deeply
        is_cut = "truncated" in str(error)  # other messages name a byte or a path, or concern the whole file
        faults.error(
            "ET019",
            f"{FILE_NAME} is not an object of rank lists: {error}",
            position=f"byte {len(data) if is_cut else 0} of {FILE_NAME}",
            hint='write {"1": [0, 1], "2": [2, 3]}',
        )
        return NamedGroups()
    groups = NamedGroups()
    number = max((int(name) for name in listed if _is_id(name)), default=0)
    for name, ranks in listed.items():
        number += not _is_id(name)
        if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
            faults.error("ET019", f"{FILE_NAME}: group {name} is empty, or lists a rank twice or below 0")
        elif max(ranks) >= MAX_DEVICES:
            faults.error(
                "ET019", f"{FILE_NAME}: group {name} names a rank above the limit of {MAX_DEVICES:,}"
            )
        else:
            groups.add(name, ranks, number)
    if groups.names:
        some = ", ".join(repr(name) for name in list(groups.names)[:4])
        message = f"groups are not named by integers >= 1, which ASTRA-sim requires: {some}; they get new ids"
        faults.lint("ET018", message, len(groups.names))
    return groups


def groups_of_metadata(texts: Iterable[bytes]) -> tuple[bytes, set[str]]:
    """Return the process groups that METADATA nodes of a PyTorch trace list, in the JSON format of
    ``comm_group.json``. Also return the names of the groups that contain all ranks. ``texts`` are the input
    values of these nodes.
    """
    import msgspec

    listed: dict[str, list[int]] = {}
    whole: set[str] = set()
    for text in texts:
        if _PROCESS_GROUPS not in text:
            continue
        try:
            # A Python list of one text, as PyTorch's observer spells it.
            groups = msgspec.json.decode(text[2:-2], type=list[_ProcessGroup])
        except (ValueError, RecursionError):
            continue
        for group in groups:
            if group["ranks"]:
                listed.setdefault(group["pg_name"], group["ranks"])
            else:
                whole.add(group["pg_name"])
    return (msgspec.json.encode(listed) if listed else b""), whole


def render_groups(groups: Mapping[int, Sequence[int]]) -> bytes:
    """Return the content of a ``comm_group.json`` with these groups, by ascending id."""
    rows = ", ".join(f'"{number}": {list(groups[number])}' for number in sorted(groups))
    return b"{" + rows.encode() + b"}"


_MOST_MEMBERS = 1 << 24
"""Limit on the total length of the lists in ``comm_group.json``: about 150 MB of text."""


class GroupIds(NamedTuple):
    """Process group ids of a workload. Groups from a ``comm_group.json`` that was read (``listed``) have the
    ids of that file. All other groups get new consecutive ids: group ``i`` of a group set has the id
    ``base[group_set] + i``. ``listing`` is the content of that file, empty if it is absent or faulty.

    Ids of new groups are computed, so that writing the trace of one rank needs no list of all groups.
    """

    listed: dict[int, list[int]]
    listing: bytes
    base: dict[GroupSet, int]
    num_ranks: int
    by_members: dict[tuple[int, ...], list[int]]

    @classmethod
    def of(cls, workload: Workload) -> GroupIds:
        """Assign ids to the groups of all group sets of a workload. O(group sets)."""
        document = b""
        for graph in workload.classes:
            document = document or graph.attachments.get(FILE_NAME, b"")
        diagnostics = Diagnostics()
        faults = Faults(FILE_NAME, None, diagnostics, lenient=True)
        listed: dict[int, list[int]] = parse_groups(document, faults) if document else {}
        listing = b"" if diagnostics else document
        number = max(listed, default=0) + 1
        base: dict[GroupSet, int] = {}
        for groups in workload.group_sets:
            base[groups] = number
            unnamed = groups.is_world(workload.num_ranks) and not groups.communicator
            number += 0 if unnamed else groups.num_groups
        by_members: dict[tuple[int, ...], list[int]] = {}
        for group in sorted(listed):
            by_members.setdefault(tuple(sorted(listed[group])), []).append(group)
        return cls(listed, listing, base, workload.num_ranks, by_members)

    def are_idle(self, groups: GroupSet, ranks: IntArray) -> BoolArray:
        """Return a mask of the ``ranks`` on which a collective over the group set ``groups`` does nothing.
        Such a rank belongs to no group, or is alone in a group that the trace did not name.
        """
        group = groups.groups_of(ranks)
        if groups.max_group_size > 1 and groups.group_size != -1:
            return group < 0
        distinct, which = np.unique(group, return_inverse=True)
        idle = [
            number < 0 or (len(groups.members(number)) < 2 and self._known(groups, number) < 0)
            for number in distinct.tolist()
        ]
        return np.array(idle, np.bool_)[which.reshape(-1)]

    def _known(self, groups: GroupSet, group: int) -> int:
        """Return the id of a group in the ``comm_group.json`` that was read. It is -1 if the file does not
        list a group with the same ranks in the same order.
        """
        if not self.by_members:
            return -1
        members: list[int] = groups.members(group).tolist()
        index = groups.communicator - (len(members) == self.num_ranks)  # the group of all ranks has no name
        same = self.by_members.get(tuple(sorted(members)), [])
        number = same[index] if 0 <= index < len(same) else -1
        return number if number >= 0 and self.listed[number] == members else -1

    def numbers(self, groups: GroupSet, ranks: IntArray) -> IntArray:
        """Return the id of the group of each rank in the group set ``groups``. It is -1 for a rank without a
        group. It is -1 for all ranks if the group is the default group of all ranks, which needs no id.
        """
        group = groups.groups_of(ranks)
        fresh = -1 if self._is_unnamed(groups) else self.base[groups] + group
        stated_ids = np.full(len(ranks), -1, np.int64)
        if self.by_members:
            distinct, which = np.unique(group, return_inverse=True)
            named = [self._known(groups, number) if number >= 0 else -1 for number in distinct.tolist()]
            stated_ids = np.array(named, np.int64)[which.reshape(-1)]
        return np.where(group < 0, -1, np.where(stated_ids < 0, fresh, stated_ids))

    def text(self, groups: GroupSet, rank: int) -> bytes:
        """Return the value of ``pg_name`` for a rank: the decimal id of its group. It is empty if the rank
        has no group or its group is the default group of all ranks.
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
        """Return True if an earlier group set has a group with the same ranks in another order. A reader of
        the trace then finds two process groups instead of one communicator.
        """
        if not isinstance(groups, ExplicitGroups) or self.by_members:
            return False
        earlier = [group_set for group_set in self.base if self.base[group_set] < self.base[groups]]
        alike = [group_set for group_set in earlier if group_set.communicator == groups.communicator]
        return any(
            sorted(group_set.members(group).tolist()) == sorted(row)
            for row in groups.rows
            for group_set in alike
            if row and (group := group_set.group_of(row[0])) >= 0 and not self._is_unnamed(group_set)
        )

    def of_rank(self, rank: int) -> dict[int, list[int]]:
        """Return the groups in which a rank communicates: group id -> ranks."""
        of_rank: dict[int, list[int]] = {}
        for groups in self.base:
            text = self.text(groups, rank)
            if text and not self.are_idle(groups, np.array([rank]))[0]:
                members: list[int] = groups.members(groups.group_of(rank)).tolist()
                of_rank[int(text)] = members
                # The lower ids determine its index among the groups of the same ranks.
                lower = self.by_members.get(tuple(sorted(members)), []) if groups.communicator else []
                of_rank.update((number, self.listed[number]) for number in lower if number < int(text))
        return of_rank

    def document(self) -> bytes:
        """Return the content of ``comm_group.json``: the groups read from a trace, and all groups with a new
        id that have more than one rank. If no group has a new id, return the file that was read unchanged.
        """
        listed: dict[int, Sequence[int]] = dict(self.listed)
        for groups, base in self.base.items():
            if self._is_unnamed(groups):
                continue
            for group, members in enumerate(groups.rows_of_ranks()):
                if len(members) > 1 and self._known(groups, group) < 0:
                    listed[base + group] = members
        if self.listing and len(listed) == len(self.listed):
            return self.listing
        return render_groups(listed) if listed else b""


def check_listing(workload: Workload, *, alone: bool) -> None:
    """Raise ``UnsupportedError`` if a group has ranks outside the job, or if the groups are too large for
    ``comm_group.json``. ``alone`` states that one rank is written, so that only groups of that rank count.
    """
    count, listed = workload.num_ranks, 0
    for number, groups in enumerate(workload.group_sets):
        if groups.is_world(count):
            continue
        if isinstance(groups, ExplicitGroups):
            end = 1 + max((max(row) for row in groups.rows if row), default=-1)
        else:
            end = groups.base + groups.num_ranks
        if count < end:
            raise UnsupportedError(
                f"group set {number} has rank {end - 1:,}, but the job has ranks 0..{count - 1:,}",
                position=f"group set {number}",
                hint="state the number of ranks with `num_devices`, or correct the groups",
            )
        listed += groups.max_group_size if alone else groups.num_ranks
        if listed > _MOST_MEMBERS:
            raise UnsupportedError(
                f"group set {number}: the process groups up to this one list {listed:,} ranks, "
                f"but the limit of {FILE_NAME} is {_MOST_MEMBERS:,}",
                position=f"group set {number}",
                hint="convert the program for fewer devices",
            )


MAX_RANK_DIGITS = 9
"""Maximum number of digits of the rank in a file name."""
