"""Collectives, matched: the k-th that a rank issues in a group meets the k-th of each other member."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from hespas.graph import ABSENT, CollectiveKind, Diagnostics
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import CheckFailedError
from hespas.simulator.job.actors import Cast
from hespas.simulator.job.relations import NOBODY, Relations
from hespas.simulator.job.symmetry import Colours
from hespas.simulator.job.talk import Talk, occurrences
from hespas.simulator.schedule import node_label

__all__ = ["Calls", "matched_calls"]

_HINT = (
    "members of a group have to run the same collectives of it in the same order; with `alone` no rank waits"
)


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Collectives of all actors; columns of shape ``(calls,)``.

    ``actor`` and ``task`` say whose and which, ``row`` that of the graph's collectives, ``group`` the group
    and ``meets`` groups like it, ``label`` the set it is called through, ``number`` which of its group it is,
    ``stated`` whether the program names its group; ``comm_bytes`` is NaN where unknown.
    """

    actor: IntArray
    task: IntArray
    row: IntArray
    group: IntArray
    meets: IntArray
    label: IntArray
    number: IntArray
    kind: IntArray
    stated: BoolArray
    comm_bytes: FloatArray

    def __len__(self) -> int:
        return len(self.task)

    def where(self, kept: BoolArray | IntArray) -> Calls:
        """Some of them."""
        return Calls(*(getattr(self, column.name)[kept] for column in fields(self)))


def matched_calls(
    cast: Cast, talks: Sequence[Talk], relations: Relations, colours: Colours, diagnostics: Diagnostics
) -> tuple[Calls, IntArray]:
    """The collectives in which several actors, or one several times, meet, and the meeting of each.

    Raises ``CheckFailedError`` where members of a group run other collectives in it than each other; where no
    program says whose group it is, they do not meet, and ``diagnostics`` are told.
    """
    calls = _calls(cast, talks, relations, colours)
    broken = np.zeros(int(colours.meets.max(initial=-1)) + 1, np.bool_)
    stated = broken.copy()
    stated[calls.meets[calls.stated]] = True
    for each in _broken(cast, calls, relations, colours):
        if stated[each.meets]:
            raise each.error()
        broken[each.meets] = True
    diagnostics.warning(
        "simulate.ranks-not-synchronised",
        cast.actors[0].graph.name,
        "collectives state no group, and ranks do not run the same of them: they do not wait for each other",
        count=int(broken[calls.meets].sum()),
    )
    calls = calls.where(~broken[calls.meets])
    most = int(calls.number.max(initial=0)) + 1
    meeting, members = np.unique(calls.meets * most + calls.number, return_inverse=True, return_counts=True)[
        1:
    ]
    together = members[meeting.reshape(-1)] > 1
    meeting = np.unique(meeting.reshape(-1)[together], return_inverse=True)[1]
    return calls.where(together), meeting.reshape(-1)


def _calls(cast: Cast, talks: Sequence[Talk], relations: Relations, colours: Colours) -> Calls:
    parts: list[tuple[IntArray | BoolArray | FloatArray, ...]] = []
    for place, (actor, talk) in enumerate(zip(cast.actors, talks, strict=True)):
        group = relations.group[talk.call_set, actor.rank]
        mine = group != NOBODY
        group, row = group[mine], talk.call_row[mine]
        label = relations.label[talk.call_set[mine], actor.rank]
        parts.append(
            (
                np.full(len(group), place),
                talk.calls[mine] + cast.first[place],
                row,
                group,
                colours.meets[group],
                label,
                occurrences(label),
                actor.graph.collectives.kind[row].astype(np.int64),
                talk.stated[mine],
                actor.graph.collectives.comm_bytes[row],
            )
        )
    return Calls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class _Broken:
    """A group whose members do not run the same."""

    meets: int
    rank: int
    node: int
    text: str

    def error(self) -> CheckFailedError:
        return CheckFailedError(
            self.text, code="ET020", position=f"rank {self.rank}, node {self.node}", hint=_HINT
        )


def _told(cast: Cast, calls: Calls, row: int) -> tuple[int, int, str]:
    """Rank, node id, and what to call one of the calls."""
    actor, task = cast.actors[int(calls.actor[row])], int(calls.task[row])
    node = int(actor.program.node[cast.local(task)])
    name = node_label(actor.graph, node)
    what = CollectiveKind(int(calls.kind[row])).name.lower().replace("_", "-")
    return actor.rank, int(actor.graph.id[node]), f"rank {actor.rank}: {name} ({what})"


def _broken(cast: Cast, calls: Calls, relations: Relations, colours: Colours) -> Iterator[_Broken]:
    yield from _other_kinds(cast, calls)
    yield from _other_counts(cast, calls)
    yield from _other_sizes(cast, calls)
    for meets, group in zip(*np.unique(calls.meets, return_index=True), strict=True):
        first = int(group)
        silent = _silent(int(calls.group[first]), relations)
        if silent is not None:
            rank, node, told = _told(cast, calls, first)
            yield _Broken(
                int(meets),
                rank,
                node,
                f"{told} waits for rank {silent}, which runs none in their group",
            )


def _silent(group: int, relations: Relations) -> int | None:
    """A member of a group that is here and never calls it, if there is one."""
    inside = relations.group == group
    called = (inside & (relations.label != NOBODY)).any(axis=0)
    silent = np.flatnonzero(inside.any(axis=0) & ~called & (relations.rank_class != ABSENT))
    return int(silent[0]) if len(silent) else None


def _other_kinds(cast: Cast, calls: Calls) -> Iterator[_Broken]:
    known = calls.where(calls.kind != int(CollectiveKind.UNKNOWN))
    for one, two in _unlike(known, known.kind):
        rank, node, told = _told(cast, known, one)
        other = _told(cast, known, two)[2]
        text = f"{told} meets {other}: number {int(known.number[one]) + 1:,} of their group"
        yield _Broken(int(known.meets[one]), rank, node, text)


def _other_sizes(cast: Cast, calls: Calls) -> Iterator[_Broken]:
    """Collectives of stated groups whose members state different sizes."""
    known = calls.where(calls.stated & ~np.isnan(calls.comm_bytes))
    for one, two in _unlike(known, known.comm_bytes):
        rank, node, label = _told(cast, known, one)
        other = _told(cast, known, two)[2]
        sizes = [f"{known.comm_bytes[row]:,.0f} bytes" for row in (one, two)]
        text = f"{label} of {sizes[0]} meets {other} of {sizes[1]}"
        yield _Broken(int(known.meets[one]), rank, node, text)


def _unlike(calls: Calls, column: IntArray | FloatArray) -> Iterator[tuple[int, int]]:
    """Yield pairs of calls of one collective that differ in a column."""
    order = np.lexsort((calls.number, calls.meets))
    one, two = order[:-1], order[1:]
    together = (calls.meets[one] == calls.meets[two]) & (calls.number[one] == calls.number[two])
    differ = np.flatnonzero(together & (column[one] != column[two]))
    yield from zip(one[differ].tolist(), two[differ].tolist(), strict=True)


def _other_counts(cast: Cast, calls: Calls) -> Iterator[_Broken]:
    """Groups in which one member runs more collectives than another."""
    order = np.lexsort((calls.number, calls.label, calls.actor, calls.meets))
    meets, actor, label = calls.meets[order], calls.actor[order], calls.label[order]
    same = (meets[1:] == meets[:-1]) & (actor[1:] == actor[:-1]) & (label[1:] == label[:-1])
    last = order[np.append(~same, True)[: len(order)]]  # the last of each member
    if not len(last):
        return
    fewest = np.full(int(calls.meets.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(fewest, calls.meets[last], calls.number[last])
    more = last[calls.number[last] > fewest[calls.meets[last]]]
    for row in more.tolist():
        found = int(calls.meets[row])
        few = int(fewest[found])
        rank, node, told = _told(cast, calls, _nth(calls, row, few + 1))
        with_few = last[(calls.meets[last] == found) & (calls.number[last] == few)]
        other = cast.actors[int(calls.actor[with_few[0]])].rank
        yield _Broken(
            found, rank, node,
            f"{told} waits for rank {other}, which runs only {few + 1:,} collectives in their group",
        )  # fmt: skip


def _nth(calls: Calls, row: int, number: int) -> int:
    """The call with a number, of the same actor and group as another."""
    same = (calls.actor == calls.actor[row]) & (calls.label == calls.label[row]) & (calls.number == number)
    return int(np.flatnonzero(same)[0])
