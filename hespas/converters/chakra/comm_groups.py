"""``comm_group.json``: an object, decimal group id >= 1 -> list of global ranks in ring order.

Tools call the file otherwise, and name groups by texts; both are read. What is written has ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import numpy as np

from hespas.converters.chakra.contract import WHOLE_WORLD
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph import Diagnostics, ExplicitGroups, GroupSet, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from hespas.converters.chakra.contract import Faults

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
"""What tools call the file; STAGE names it after its traces."""
_TRACES, _BESIDE_TRACES = "et", "comm_groups.json"
"""MLSynth writes it beside a folder ``et`` of its traces."""
_PROCESS_GROUPS = b'"pg_name"'
_MOST_DIGITS = 10


class _ProcessGroup(TypedDict):
    """One entry of PyTorch's list of process groups."""

    pg_name: str
    ranks: list[int]


class NamedGroups(dict[int, list[int]]):
    """Group id -> ranks in ring order. ``names`` are the spellings that are no id of a simulator, with the id
    that stands for each; 0 is all ranks.
    """

    def __init__(self) -> None:
        """Start without groups."""
        super().__init__()
        self.names: dict[str, int] = {}
        self._stated: set[int] = set()

    def add(self, name: str, ranks: list[int], number: int) -> None:
        """List a group under its id, or one under a name under the id ``number``."""
        if _is_id(name):
            self[int(name)] = ranks
            self._stated.add(int(name))
        else:
            self.names[name] = number if ranks else 0
            if ranks:
                self[number] = ranks

    def find(self, text: str) -> int:
        """The id that a text names, 0 for all ranks, -1 for none."""
        if text in self.names:
            return self.names[text]
        if text in WHOLE_WORLD:
            return 0
        return int(text) if _is_id(text) and int(text) in self._stated else -1


def _is_id(name: str) -> bool:
    """Whether it is a number from 1 on, as simulators spell it."""
    return name.isascii() and name.isdecimal() and len(name) < _MOST_DIGITS and name[0] != "0"


def read_groups(
    folder: Path, name: str, faults: Faults, stated: Path | None = None
) -> tuple[NamedGroups, bytes]:
    """The groups of a folder of traces called ``name`` and the file's bytes, both empty where there is no
    such file; ``stated`` is the file that the user names.
    """
    path = stated or _found(folder, name)
    if path is None:
        return NamedGroups(), b""
    if path != folder / FILE_NAME:
        message = f"the process groups are those of {path}"
        faults.diagnostics.info("chakra.groups-file", faults.path, message)
    try:
        data = read_document(path, limits().groups_bytes, "a list of process groups")
    except FormatError as error:
        faults.error(
            "ET019", f"{path.name} cannot be read: {error.message}", hint=error.hint or "check the file"
        )
        return NamedGroups(), b""
    return parse_groups(data, faults), data


def _found(folder: Path, name: str) -> Path | None:
    """The file beside the traces, by what tools call it; another one only where it holds lists of ranks."""
    usual = folder / FILE_NAME
    if os.path.lexists(usual):
        return usual
    others = [*(folder / each for each in USUAL_NAMES[1:]), folder / f"{name}.json"]
    if folder.resolve().name == _TRACES:
        others.append(folder.resolve().parent / _BESIDE_TRACES)
    return next((path for path in others if path.is_file() and _lists_ranks(path)), None)


def _lists_ranks(path: Path) -> bool:
    import msgspec

    try:
        data = read_document(path, limits().groups_bytes, "a list of process groups")
        return bool(msgspec.json.decode(data, type=dict[str, list[int]]))
    except (FormatError, ValueError, RecursionError):
        return False


def parse_groups(data: bytes, faults: Faults) -> NamedGroups:
    """Group id -> ranks. Groups under a name, or under id 0, get ids behind those that are stated."""
    import msgspec

    try:
        listed = msgspec.json.decode(data, type=dict[str, list[int]])
    except (ValueError, RecursionError) as error:  # not JSON or of other types; not UTF-8; nested without end
        faults.error(
            "ET019",
            f"{FILE_NAME} is no object of rank lists: {error}",
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
            faults.error("ET019", f"{FILE_NAME}: group {name} names a rank past {MAX_DEVICES:,}, the limit")
        else:
            groups.add(name, ranks, number)
    if groups.names:
        some = ", ".join(repr(name) for name in list(groups.names)[:4])
        message = f"groups have no integer from 1 on for a name, as ASTRA-sim wants: {some}; they get one"
        faults.lint("ET018", message, len(groups.names))
    return groups


def groups_of_metadata(texts: Iterable[bytes]) -> tuple[bytes, set[str]]:
    """The process groups that METADATA nodes of a PyTorch trace list, as the content of a file, and those
    that are of all ranks. ``texts`` are the values of their inputs.
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
    """The file's content, by ascending id."""
    rows = ", ".join(f'"{number}": {list(groups[number])}' for number in sorted(groups))
    return b"{" + rows.encode() + b"}"


# Numbers for process groups: those of the file a trace came from, and small new ones for all others.

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

    def are_idle(self, groups: GroupSet, ranks: IntArray) -> BoolArray:
        """Whether a collective over these groups has nothing to do on each rank: it has no group, or is alone
        in one that the trace did not name.
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
        """The id that the trace gave a group, -1 for none."""
        if not self.by_members:
            return -1
        members: list[int] = groups.members(group).tolist()
        place = groups.communicator - (len(members) == self.num_ranks)  # all ranks need no name: that is 0
        same = self.by_members.get(tuple(sorted(members)), [])
        found = same[place] if 0 <= place < len(same) else -1
        return found if found >= 0 and self.known[found] == members else -1

    def numbers(self, groups: GroupSet, ranks: IntArray) -> IntArray:
        """The id of the group that each rank belongs to; -1 for an idle collective, and for all ranks where
        no trace named that group.
        """
        group = groups.groups_of(ranks)
        fresh = -1 if self._is_unnamed(groups) else self.base[groups] + group
        known = np.full(len(ranks), -1, np.int64)
        if self.by_members:
            distinct, which = np.unique(group, return_inverse=True)
            named = [self._known(groups, number) if number >= 0 else -1 for number in distinct.tolist()]
            known = np.array(named, np.int64)[which.reshape(-1)]
        return np.where(group < 0, -1, np.where(known < 0, fresh, known))

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
            if text and not self.are_idle(groups, np.array([rank]))[0]:
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
        listed: dict[int, Sequence[int]] = dict(self.known)
        for groups, base in self.base.items():
            if self._is_unnamed(groups):
                continue
            for place, members in enumerate(groups.rows_of_ranks()):
                if len(members) > 1 and self._known(groups, place) < 0:
                    listed[base + place] = members
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
                hint="state the number of ranks with `num_devices`, or correct the groups",
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
    from hespas.converters.chakra.contract import Faults

    return parse_groups(document, Faults(FILE_NAME, None, found, lenient=True))


MAX_RANK_DIGITS = 9
"""Of the number in the name of a rank's file."""
