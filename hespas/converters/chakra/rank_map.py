"""``rank_map.json``: one trace per class of ranks stands for all of them.

The document says which rank's file stands for each rank, and keeps who talks to whom as the hub has it, digit
by digit: the traces state groups and peers of their own ranks only.
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

from hespas.converters.chakra.peers import Groups, PeerRows, Peers, RankPeers
from hespas.converters.chakra.wire import Bools, EtColumns, Longs
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
    "read_rank_map",
    "way_document",
]

FILE_NAME = "rank_map.json"
MAX_RANKS = 1 << 24
"""Ranks that a document may list: some 100 MB of text."""

_Digit = tuple[Count, Count]
_Digits = Annotated[
    list[_Digit], Meta(description="Places of a mixed-radix rank number: size and stride, slowest first.")
]


class StridedDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="strided"):
    """Groups by digits: a rank is the base plus its group digits plus its member digits."""

    group_digits: _Digits
    member_digits: _Digits
    base: Count
    communicator: Count


class ListedDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="listed"):
    """Groups rank by rank, in ring order."""

    groups: list[list[Count]]
    communicator: Count


class ShiftDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="shift"):
    """Every rank sends to the one whose digit is so much further; past the end to the start if it wraps."""

    num_ranks: Count
    digit: _Digit
    shift: int
    wraps: bool


class PairsDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pairs"):
    """Who sends to whom, by sender."""

    num_ranks: Count
    pairs: list[tuple[Count, Count]]


class ClassDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A class, by the rank whose file is here. Of its collectives and of its messages, in the order of the
    file: which of the group sets, of the permutations; -1 for none.
    """

    rank: Count
    collectives: list[int]
    messages: list[int]


class RankMapDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Which trace stands for each rank, and who talks to whom."""

    schema: Literal["hespas.rank-map/1"] = "hespas.rank-map/1"
    num_ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    representative: Annotated[
        list[int], Meta(description="For each rank the one whose file stands for it; -1 where none is here.")
    ]
    classes: list[ClassDocument]
    group_sets: list[StridedDocument | ListedDocument]
    permutations: list[ShiftDocument | PairsDocument]


def groups_document(groups: GroupSet) -> StridedDocument | ListedDocument:
    """A group set as the document has it."""
    if isinstance(groups, ExplicitGroups):
        return ListedDocument(groups=[list(row) for row in groups.rows], communicator=groups.communicator)
    return StridedDocument(
        group_digits=list(groups.group_digits),
        member_digits=list(groups.member_digits),
        base=groups.base,
        communicator=groups.communicator,
    )


def way_document(way: Permutation) -> ShiftDocument | PairsDocument:
    """A permutation as the document has it."""
    if way.pairs is not None:
        return PairsDocument(num_ranks=way.num_ranks, pairs=list(way.pairs))
    return ShiftDocument(num_ranks=way.num_ranks, digit=way.digit, shift=way.shift, wraps=way.wraps)


# --- Reading


@dataclass(frozen=True, slots=True, eq=False)
class RankMap:
    """A document that has been checked: ``rank_class`` is the number of the class of each rank."""

    path: Path
    document: RankMapDocument
    rank_class: Longs
    group_sets: tuple[GroupSet, ...]
    permutations: tuple[Permutation, ...]

    def peers(self, number: int, columns: EtColumns, own: RankPeers, rows: PeerRows, groups: Groups) -> Peers:
        """Who talks to whom in a class, whose file is read: that must state the same of its own rank.

        Raises :class:`FormatError` where it is not.
        """
        entry = self.document.classes[number]
        is_message = (columns.type == NodeType.COMM_SEND) | (columns.type == NodeType.COMM_RECV)
        sends = columns.type[is_message] == NodeType.COMM_SEND
        count = int((columns.type == NodeType.COMM_COLL).sum())
        sets = self._rows(entry.collectives, count, len(self.group_sets), f"collectives of rank {entry.rank}")
        ways = self._rows(
            entry.messages, len(sends), len(self.permutations), f"messages of rank {entry.rank}"
        )
        self._check_groups(entry.rank, sets, own.group_column(), groups)
        self._check_peers(entry.rank, (ways, sends), own.peer_column())
        sets, held_sets = _own(sets, self.group_sets)
        ways, held_ways = _own(ways, self.permutations)
        return Peers(sets, ways, held_sets, held_ways, rows.group, rows.peer)

    def _check_groups(self, rank: int, sets: Longs, named: Longs, groups: Groups) -> None:
        """The groups that a file names are those of its rank; all ranks need no name."""
        for row in _distinct(sets[sets >= 0]):
            held = self.group_sets[row]
            number = held.group_of(rank)
            members: list[int] = held.members(number).tolist() if number >= 0 else []
            for name in _distinct(named[sets == row]):
                if name > 0 and groups[name] != members:
                    self._refuse(f"group {name}, which the file of rank {rank} names, has other ranks")
                if name == 0 and not held.is_world(self.document.num_ranks):
                    self._refuse(f"the file of rank {rank} names no group where group set {row} is meant")

    def _check_peers(self, rank: int, messages: tuple[Longs, Bools], told: Longs) -> None:
        """The peers that a file names are those of its rank."""
        ways, sends = messages
        for row in _distinct(ways[ways >= 0]):
            way = self.permutations[row]
            for direction, peer in ((True, way.target_of(rank)), (False, way.source_of(rank))):
                if bool((told[(ways == row) & (sends == direction)] != peer).any()):
                    self._refuse(f"the file of rank {rank} names another peer than permutation {row}")

    def _rows(self, listed: Sequence[int], count: int, most: int, what: str) -> Longs:
        rows = np.array(listed, np.int64).reshape(-1)
        if len(rows) != count:
            self._refuse(f"it lists {len(rows):,} {what}, and its file has {count:,}")
        if len(rows) and (rows.min() < -1 or rows.max() >= most):
            self._refuse(f"{what}: a number is outside 0..{most - 1}")
        return rows

    def _refuse(self, message: str) -> NoReturn:
        raise _wrong(self.path, message)


def _distinct(column: Longs) -> list[int]:
    """Its values, each once."""
    found: list[int] = np.unique(column).tolist()
    return found


_Row = TypeVar("_Row")


def _own(rows: Longs, table: Sequence[_Row]) -> tuple[Longs, tuple[_Row, ...]]:
    """Rows of the job's table as those of a class, which has only what its nodes use, in that order."""
    used: list[int] = list(dict.fromkeys(rows[rows >= 0].tolist()))
    numbers = np.full(len(table) + 1, -1, np.int64)
    numbers[used] = np.arange(len(used))
    return numbers[rows], tuple(table[row] for row in used)


def read_rank_map(folder: Path, ranks: Sequence[int]) -> RankMap | None:
    """The document in a folder with the files of ``ranks``, None where there is none.

    Raises :class:`FormatError` for one that does not hold together. O(ranks).
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
        sets = tuple(_group_set(each) for each in document.group_sets)
        ways = tuple(_way(each) for each in document.permutations)
    except (InvariantError, ValueError) as error:
        raise _wrong(path, str(error)) from error
    _check_bounds(document, sets, ways, path)
    return RankMap(path, document, rank_class, sets, ways)


def _classes(document: RankMapDocument, ranks: Sequence[int], path: Path) -> Longs:
    """The class of each rank."""
    listed = [entry.rank for entry in document.classes]
    if missing := sorted(set(listed) - set(ranks)):
        raise _wrong(path, f"the file of rank {missing[0]} is missing, which stands for others")
    if others := sorted(set(ranks) - set(listed)):
        raise _wrong(path, f"the file of rank {others[0]} is here, and stands for nobody")
    if sorted(set(listed)) != listed or not listed:
        raise _wrong(path, "classes are not listed once each, by rank")
    if len(document.representative) != document.num_ranks:
        raise _wrong(path, f"it says of {len(document.representative):,} ranks who stands for them, "
                           f"and the job has {document.num_ranks:,}")  # fmt: skip
    try:
        stands = np.array(document.representative, np.int64)
    except OverflowError as error:
        raise _wrong(path, str(error)) from error
    known = np.array(listed, np.int64)
    place = np.minimum(np.searchsorted(known, stands), len(known) - 1)
    wrong = (known[place] != stands) & (stands != ABSENT)
    if wrong.any():
        rank = int(np.flatnonzero(wrong)[0])
        raise _wrong(path, f"rank {int(stands[rank])} stands for rank {rank} and is no class")
    if max(listed) >= len(stands) or (stands[known] != known).any():
        raise _wrong(path, "a rank whose file is here is not said to stand for itself")
    return np.where(stands == ABSENT, ABSENT, place)


def _group_set(document: StridedDocument | ListedDocument) -> GroupSet:
    if isinstance(document, ListedDocument):
        return ExplicitGroups(tuple(map(tuple, document.groups)), document.communicator)
    return StridedGroups(
        tuple(document.group_digits), tuple(document.member_digits), document.base, document.communicator
    )


def _way(document: ShiftDocument | PairsDocument) -> Permutation:
    if isinstance(document, PairsDocument):
        Permutation.from_pairs(document.pairs, document.num_ranks)  # or it is none
        return Permutation(document.num_ranks, pairs=tuple(sorted(document.pairs)))
    return Permutation(document.num_ranks, document.digit, document.shift, document.wraps)


def _check_bounds(
    document: RankMapDocument, sets: Sequence[GroupSet], ways: Sequence[Permutation], path: Path
) -> None:
    """Ranks are those of the job, and each is in one group of a set at most."""
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
                path, f"group set {number} has a rank twice, an empty group, or ranks beyond the job's"
            )
    for number, way in enumerate(ways):
        if not 0 < way.num_ranks <= count or abs(way.shift) > count:
            raise _wrong(
                path, f"permutation {number} is of {way.num_ranks:,} ranks, and the job has {count:,}"
            )


def _wrong(path: Path, message: str) -> FormatError:
    hint = "write the classes again with `only_classes`, or remove the file and read what is here"
    return FormatError(message, code="ET022", path=str(path), hint=hint)
