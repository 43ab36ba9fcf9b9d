"""``rank_map.json``: description of a folder with one trace per rank class instead of one per rank.

The document names the file that represents each rank. It also stores all process groups and permutations
exactly, because a trace states only the groups and peers of one rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from hespas.converters.chakra.peers import ClassPeers, Groups, PeerRows, RankPeers
from hespas.converters.chakra.wire import EtColumns, Longs
from hespas.files.documents import Count
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph import ABSENT, ExplicitGroups, GroupSet, Permutation, StridedGroups
from hespas.graph.errors import FormatError, InvariantError
from hespas.schemas.chakra.tables import NodeType

__all__ = [
    "FILE_NAME",
    "MAX_RANKS",
    "ClassDocument",
    "ListedDocument",
    "PairsDocument",
    "RankMap",
    "RankMapDocument",
    "ShiftDocument",
    "StridedDocument",
    "groups_document",
    "permutation_document",
    "read_rank_map",
    "used_entries",
]

FILE_NAME = "rank_map.json"
MAX_RANKS = 1 << 24
"""Maximum number of ranks in a document: about 100 MB of text."""

_Digit = tuple[Count, Count]
_Digits = Annotated[
    list[_Digit], Meta(description="Digits of a mixed-radix rank number: size and stride, slowest first.")
]


class StridedDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="strided"):
    """JSON form of process groups with regular strides. A digit is ``[size, stride]``: it adds a multiple of
    its stride, below size times the stride, to the rank. A rank is ``base`` plus the digits that number its
    group plus the digits that number it within the group.
    """

    group_digits: _Digits
    member_digits: _Digits
    base: Count
    communicator: Count


class ListedDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="listed"):
    """JSON form of process groups without regular strides: lists of ranks, in ring order."""

    groups: list[list[Count]]
    communicator: Count


class ShiftDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="shift"):
    """JSON form of a permutation in which every rank sends to the rank whose ``digit`` is higher by
    ``shift``. If ``wraps``, ranks with the last values of the digit send to ranks with the first ones.
    Otherwise they do not send.
    """

    num_ranks: Count
    digit: _Digit
    shift: int
    wraps: bool


class PairsDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pairs"):
    """JSON form of a permutation: (sender, receiver) pairs, sorted by sender."""

    num_ranks: Count
    pairs: list[tuple[Count, Count]]


class ClassDocument(msgspec.Struct, frozen=True, kw_only=True):
    """JSON form of a rank class. ``rank`` is the rank whose file represents the class. ``collectives`` and
    ``messages`` are in the order of that file: the index of the group set of each collective, and the index
    of the permutation of each message (-1: none).
    """

    rank: Count
    collectives: list[int]
    messages: list[int]


class RankMapDocument(msgspec.Struct, frozen=True, kw_only=True):
    """JSON form of a rank map: the representative rank of each rank, and all process groups and permutations
    of the job.
    """

    schema: Literal["hespas.rank-map/1"] = "hespas.rank-map/1"
    num_ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    representative: Annotated[
        list[int],
        Meta(description="For each rank the representative rank, which has a file; -1 if it has none."),
    ]
    classes: list[ClassDocument]
    group_sets: list[StridedDocument | ListedDocument]
    permutations: list[ShiftDocument | PairsDocument]


def groups_document(groups: GroupSet) -> StridedDocument | ListedDocument:
    """Convert a group set to its form in ``rank_map.json``."""
    if isinstance(groups, ExplicitGroups):
        return ListedDocument(groups=[list(row) for row in groups.rows], communicator=groups.communicator)
    return StridedDocument(
        group_digits=list(groups.group_digits),
        member_digits=list(groups.member_digits),
        base=groups.base,
        communicator=groups.communicator,
    )


def permutation_document(way: Permutation) -> ShiftDocument | PairsDocument:
    """Convert a permutation to its form in ``rank_map.json``."""
    if way.pairs is not None:
        return PairsDocument(num_ranks=way.num_ranks, pairs=list(way.pairs))
    return ShiftDocument(num_ranks=way.num_ranks, digit=way.digit, shift=way.shift, wraps=way.wraps)


@dataclass(frozen=True, slots=True, eq=False)
class RankMap:
    """Validated rank map, with which one file can represent a class of ranks. ``rank_class`` has the class
    number of each rank. ``group_sets`` and ``permutations`` are decoded from the document.
    """

    path: Path
    document: RankMapDocument
    rank_class: Longs
    group_sets: tuple[GroupSet, ...]
    permutations: tuple[Permutation, ...]

    def peers(
        self, number: int, columns: EtColumns, own: RankPeers, rows: PeerRows, groups: Groups
    ) -> ClassPeers:
        """Return the group sets and permutations of class ``number``, whose file was read. ``own`` are the
        groups and peers that the file states for its rank, and ``rows`` the attribute rows that state them.

        Raises :class:`FormatError` if the file and the map disagree.
        """
        entry = self.document.classes[number]
        is_message = (columns.type == NodeType.COMM_SEND) | (columns.type == NodeType.COMM_RECV)
        sends = columns.type[is_message] == NodeType.COMM_SEND
        count = int((columns.type == NodeType.COMM_COLL).sum())
        sets = self._rows(entry.collectives, count, len(self.group_sets), f"collectives of rank {entry.rank}")
        ways = self._rows(
            entry.messages, len(sends), len(self.permutations), f"messages of rank {entry.rank}"
        )
        named = own.groups.column()
        for row in _distinct(sets[sets >= 0]):
            held = self.group_sets[row]
            group = held.group_of(entry.rank)
            members: list[int] = held.members(group).tolist() if group >= 0 else []
            for name in _distinct(named[sets == row]):
                if name > 0 and groups[name] != members:
                    self._refuse(f"group {name}, which the file of rank {entry.rank} names, has other ranks")
                if name == 0 and not held.is_world(self.document.num_ranks):
                    self._refuse(
                        f"the file of rank {entry.rank} names no group, but group set {row} is expected"
                    )
        peers = own.peers.column()
        for row in _distinct(ways[ways >= 0]):
            way = self.permutations[row]
            for direction, peer in ((True, way.target_of(entry.rank)), (False, way.source_of(entry.rank))):
                if bool((peers[(ways == row) & (sends == direction)] != peer).any()):
                    self._refuse(
                        f"the file of rank {entry.rank} names a peer that differs from permutation {row}"
                    )
        sets, held_sets = used_entries(sets, self.group_sets)
        ways, held_ways = used_entries(ways, self.permutations)
        return ClassPeers(sets, ways, held_sets, held_ways, rows.group, rows.peer)

    def _rows(self, listed: Sequence[int], count: int, most: int, what: str) -> Longs:
        rows = np.array(listed, np.int64).reshape(-1)
        if len(rows) != count:
            self._refuse(f"it lists {len(rows):,} {what}, but its file has {count:,}")
        if len(rows) and (rows.min() < -1 or rows.max() >= most):
            self._refuse(f"{what}: a number is outside 0..{most - 1}")
        return rows

    def _refuse(self, message: str) -> NoReturn:
        raise _wrong(self.path, message)


def _distinct(column: Longs) -> list[int]:
    """Return the distinct values of a column, ascending."""
    values: list[int] = np.unique(column).tolist()
    return values


_Entry = TypeVar("_Entry")


def used_entries(rows: Longs, table: Sequence[_Entry]) -> tuple[Longs, tuple[_Entry, ...]]:
    """Return the entries of a table that ``rows`` refer to, in order of use, and ``rows`` as rows of that
    smaller table.
    """
    used: list[int] = list(dict.fromkeys(rows[rows >= 0].tolist()))
    numbers = np.full(len(table) + 1, -1, np.int64)
    numbers[used] = np.arange(len(used))
    return numbers[rows], tuple(table[row] for row in used)


def read_rank_map(folder: Path, ranks: Sequence[int]) -> RankMap | None:
    """Return the rank map of a folder with the files of ``ranks``, or None if the folder has none.

    Raises :class:`FormatError` for an inconsistent document. O(ranks).
    """
    path = folder / FILE_NAME
    if not os.path.lexists(path):
        return None
    data = read_document(path, limits().groups_bytes, "a map of ranks")
    try:
        document = msgspec.json.decode(data, type=RankMapDocument)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, str(error)) from error
    rank_class = _classes(document, ranks, path)
    try:
        sets = tuple(_group_set(entry) for entry in document.group_sets)
        ways = tuple(_way(entry) for entry in document.permutations)
    except (InvariantError, ValueError) as error:
        raise _wrong(path, str(error)) from error
    count = document.num_ranks
    for number, groups in enumerate(sets):
        if isinstance(groups, StridedGroups):
            fits = groups.base + groups.num_ranks <= count
        else:
            ranks = [rank for row in groups.rows for rank in row]
            fits = len(set(ranks)) == len(ranks) and all(0 <= rank < count for rank in ranks)
            fits = fits and all(groups.rows)
        if not fits:
            raise _wrong(
                path,
                f"group set {number} is invalid: it has a repeated rank, an empty group, or a rank outside "
                f"0..{count - 1}",
            )
    for number, way in enumerate(ways):
        if not 0 < way.num_ranks <= count:
            raise _wrong(path, f"permutation {number} has {way.num_ranks:,} ranks, but the job has {count:,}")
        if abs(way.shift) > count:
            raise _wrong(
                path, f"permutation {number} shifts by {way.shift:,}, but the job has {count:,} ranks"
            )
    return RankMap(path, document, rank_class, sets, ways)


def _classes(document: RankMapDocument, ranks: Sequence[int], path: Path) -> Longs:
    """Return the class of each rank. Raise :class:`FormatError` if the representatives contradict the files
    of ``ranks``.
    """
    listed = [entry.rank for entry in document.classes]
    if missing := sorted(set(listed) - set(ranks)):
        raise _wrong(path, f"the file of rank {missing[0]} is missing, but represents other ranks")
    if others := sorted(set(ranks) - set(listed)):
        raise _wrong(path, f"the file of rank {others[0]} exists, but does not represent any rank")
    if sorted(set(listed)) != listed or not listed:
        raise _wrong(path, f"the list of classes is not in ascending order of ranks: {listed[:8]}")
    if len(document.representative) != document.num_ranks:
        raise _wrong(path, f"the map lists representatives of {len(document.representative):,} ranks, "
                           f"but the job has {document.num_ranks:,}")  # fmt: skip
    try:
        stands = np.array(document.representative, np.int64)
    except OverflowError as error:
        raise _wrong(path, str(error)) from error
    class_ranks = np.array(listed, np.int64)
    class_index = np.minimum(np.searchsorted(class_ranks, stands), len(class_ranks) - 1)
    wrong = (class_ranks[class_index] != stands) & (stands != ABSENT)
    if wrong.any():
        rank = int(np.flatnonzero(wrong)[0])
        raise _wrong(path, f"rank {int(stands[rank])} represents rank {rank} but is not a class")
    other = next((rank for rank in listed if rank >= len(stands) or stands[rank] != rank), None)
    if other is not None:
        raise _wrong(path, f"rank {other} has a file, but does not represent itself")
    return np.where(stands == ABSENT, ABSENT, class_index)


def _group_set(document: StridedDocument | ListedDocument) -> GroupSet:
    if isinstance(document, ListedDocument):
        return ExplicitGroups(tuple(map(tuple, document.groups)), document.communicator)
    return StridedGroups(
        tuple(document.group_digits), tuple(document.member_digits), document.base, document.communicator
    )


def _way(document: ShiftDocument | PairsDocument) -> Permutation:
    if isinstance(document, PairsDocument):
        Permutation.from_pairs(document.pairs, document.num_ranks)  # raises if the pairs are invalid
        return Permutation(document.num_ranks, pairs=tuple(sorted(document.pairs)))
    return Permutation(document.num_ranks, document.digit, document.shift, document.wraps)


def _wrong(path: Path, message: str) -> FormatError:
    hint = "write the classes again with `only_classes`, or remove the file to read the available ranks"
    return FormatError(message, code="ET022", path=str(path), hint=hint)
