"""What survived a trip, column by column: exact, changed (how many rows), or not expressible.

Columns are those of :mod:`hespas.graph`, so a line of the matrix says what a reader of the graph will miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hespas.graph import ABSENT, ExplicitGroups, OpGraph, Permutation, Workload
from hespas.graph.columns import BoolArray, Csr, IntArray
from hespas.graph.groups import GroupSet
from hespas.graph.passes import bypass, take_nodes
from hespas.graph.workload import COMPARED_COLUMNS, graphs_equal

__all__ = ["JOB_COLUMNS", "ColumnResult", "Kept", "columns_kept", "summed"]

JOB_COLUMNS = ("ranks", "metadata", "nodes")
"""What is compared beside the columns of a graph: rank classes, facts about the job, the set of nodes."""

_PROVENANCE = frozenset({"format", "version", "form"})
"""Facts about a file itself, which are another file's after a conversion."""

_COLUMNS = tuple(name for name in COMPARED_COLUMNS if not name.startswith("extra.") and name != "attachments")
_TEXT_ROWS = frozenset(
    {"name_row", "op_row", "source_row", "framework_row", "collectives.reduction", "regions.label"}
)
_ALWAYS_KNOWN = frozenset({"id"})
_CODES = frozenset({"op_class"})
"""Integer columns in which 0 says unknown; in all others -1 does, or nothing."""


class Kept(Enum):
    """What became of a column. The order is from good to bad."""

    ABSENT = "absent"
    """The column says nothing on the way in, so there is nothing to keep."""
    EXACT = "exact"
    CHANGED = "changed"
    """Some rows say something else, or nothing."""
    LOST = "cannot express"
    """No row says anything any more."""


@dataclass(frozen=True, slots=True)
class ColumnResult:
    """``changed`` of the ``known`` rows of ``column`` that said something differ after the trip.

    ``changed_in_one`` are those of the rank class with the most: a class that a trip splits counts once for
    each part, in ``changed``.
    """

    column: str
    kept: Kept
    known: int
    changed: int
    changed_in_one: int = field(default=-1, compare=False)

    def __post_init__(self) -> None:
        """One class, unless told otherwise."""
        if self.changed_in_one < 0:
            object.__setattr__(self, "changed_in_one", self.changed)


def columns_kept(before: Workload, after: Workload) -> list[ColumnResult]:
    """Every column of a job before and after a trip. O(nodes).

    Where nodes were added or lost, the columns of those that both graphs name are compared.
    """
    results = [_ranks(before, after), _metadata(before, after)]
    pairs = list(_class_pairs(before, after))
    per_class = [_graph_columns(left, right) for left, right in pairs]
    return [*results, *map(summed, zip(*per_class, strict=True))]


def summed(results: Iterable[ColumnResult]) -> ColumnResult:
    """The results of one column over several graphs or files as one."""
    parts = list(results)
    known = sum(part.known for part in parts)
    changed = sum(part.changed for part in parts)
    told = [part.kept for part in parts if part.kept is not Kept.ABSENT]
    if not told:
        return ColumnResult(parts[0].column, Kept.ABSENT, 0, 0)
    if all(kept is Kept.LOST for kept in told):
        kept = Kept.LOST
    else:
        kept = Kept.EXACT if set(told) == {Kept.EXACT} else Kept.CHANGED
    return ColumnResult(parts[0].column, kept, known, changed, max(part.changed_in_one for part in parts))


def _result(column: str, known: int, changed: int, *, gone: bool = False) -> ColumnResult:
    if not known and not changed:
        return ColumnResult(column, Kept.ABSENT, 0, 0)
    if not changed:
        return ColumnResult(column, Kept.EXACT, known, 0)
    return ColumnResult(column, Kept.LOST if gone else Kept.CHANGED, known, changed)


def _ranks(before: Workload, after: Workload) -> ColumnResult:
    """Ranks whose class stands for other ranks than before."""
    if before.num_ranks != after.num_ranks:
        return _result("ranks", before.num_ranks, abs(before.num_ranks - after.num_ranks))
    left, right = _first_ranks(before), _first_ranks(after)
    return _result("ranks", before.num_ranks, int((left != right).sum()))


def _first_ranks(workload: Workload) -> IntArray:
    """For each rank the first rank of its class: the same for the same classes, however numbered."""
    first = np.full(len(workload.classes) + 1, workload.num_ranks, np.int64)  # the last: ABSENT leads there
    np.minimum.at(first, workload.rank_class, np.arange(workload.num_ranks))
    return first[workload.rank_class]


def _metadata(before: Workload, after: Workload) -> ColumnResult:
    facts = [item for item in before.metadata.items() if item[0] not in _PROVENANCE]
    lost = [key for key, value in facts if after.metadata.get(key) != value]
    return _result("metadata", len(facts), len(lost), gone=len(lost) == len(facts))


def _graph_columns(before: OpGraph, after: OpGraph) -> list[ColumnResult]:
    nodes, left, right = _common_nodes(before, after)
    differing = {entry.column: entry.count for entry in graphs_equal(left, right)}
    results = [nodes, _extra(left, right), _attachments(before, after)]
    for column in _COLUMNS:
        known = _known_rows(left, column)
        changed = differing.get(column, 0)
        # A shorter table has fewer rows in every column, of which only some said something.
        changed = min(changed, known) if known and "." in column else changed
        gone = changed > 0 and known > 0 and _known_rows(right, column) == 0
        results.append(_result(column, known, changed, gone=gone))
    return results


def _extra(before: OpGraph, after: OpGraph) -> ColumnResult:
    """Attributes verbatim: those that are no longer there. New ones are what the other format wants said."""
    lost = sum((_attributes(before) - _attributes(after)).values())
    return _result("extra", len(before.extra), lost, gone=lost == len(before.extra))


def _attributes(graph: OpGraph) -> Counter[tuple[int, str, bytes]]:
    extra = graph.extra
    nodes, keys = extra.node.tolist(), extra.key.tolist()
    return Counter((nodes[row], graph.strings[keys[row]], extra.value(row)) for row in range(len(extra)))


def _attachments(before: OpGraph, after: OpGraph) -> ColumnResult:
    lost = [name for name, content in before.attachments.items() if after.attachments.get(name) != content]
    known = len(before.attachments)
    return _result("attachments", known, len(lost), gone=len(lost) == known)


def _common_nodes(before: OpGraph, after: OpGraph) -> tuple[ColumnResult, OpGraph, OpGraph]:
    """The graphs as they are where they have as many nodes, else the nodes that both of them have."""
    if len(before) == len(after):
        return _result("nodes", len(before), 0), before, after
    left, right = _labels(before), _labels(after)
    gone, new = ~np.isin(left, right), ~np.isin(right, left)
    changed = max(int(gone.sum()) + int(new.sum()), 1)
    kept, found = bypass(before, gone), bypass(after, new)
    if len(kept) != int((~gone).sum()) or len(found) != int((~new).sum()):
        # Joins of very many edges stay, be it as many in both: compare without edges through the others.
        kept, found = _only(before, ~gone), _only(after, ~new)
    order = np.empty(len(found), np.int64)
    order[np.argsort(left[~gone])] = np.argsort(right[~new])
    return _result("nodes", len(before), changed), kept, _reordered(found, order)


def _only(graph: OpGraph, keep: BoolArray) -> OpGraph:
    """Some nodes, with the edges among them."""
    rows = np.flatnonzero(keep)
    place = np.full(len(graph), -1, np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    deps: list[Csr] = []
    for taken in (graph.data_deps.take(rows), graph.control_deps.take(rows)):
        inside = place[taken.values] >= 0
        deps.append(Csr.from_pairs(taken.row_ids[inside], place[taken.values[inside]], len(rows)))
    return take_nodes(graph, rows, deps[0], deps[1])


def _reordered(graph: OpGraph, rows: IntArray) -> OpGraph:
    """The graph with old node ``rows[i]`` as node ``i``."""
    place = np.empty(len(rows), np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    data, control = graph.data_deps.take(rows), graph.control_deps.take(rows)
    return take_nodes(
        graph, rows, Csr(data.offsets, place[data.values]), Csr(control.offsets, place[control.values])
    )


def _labels(graph: OpGraph) -> NDArray[np.int64]:
    """What tells a node from others whatever its number: its name, and how often that came before."""
    names = np.array([hash(text) for text in graph.strings], np.int64)[graph.name_row]
    order = np.argsort(names, kind="stable")
    grouped = names[order]
    starts = np.flatnonzero(np.diff(grouped, prepend=grouped[:1] - 1))
    place = np.arange(len(names)) - np.repeat(starts, np.diff(np.append(starts, len(names))))
    labels = np.empty(len(names), np.int64)
    labels[order] = grouped + place * np.int64(0x9E3779B97F4A7C1 << 1 | 1)
    return labels


def _known_rows(graph: OpGraph, column: str) -> int:
    """How many rows of a column say something."""
    if column == "name":
        return int(bool(graph.name))
    table, _, part = column.partition(".")
    values = getattr(getattr(graph, table), part) if part else getattr(graph, column)
    if isinstance(values, Csr):
        return int((values.lengths > 0).sum())
    return int(_known(graph, column, np.asarray(values)).sum())


def _known(graph: OpGraph, column: str, values: NDArray[np.generic]) -> BoolArray:
    if values.dtype.kind == "f":
        return ~np.isnan(values.astype(np.float64))
    if values.dtype.kind not in "iu" or column in _ALWAYS_KNOWN:
        return np.ones(len(values), np.bool_)
    numbers = values.astype(np.int64)
    if column in _TEXT_ROWS:
        empty = np.array([text == "" for text in graph.strings] + [True])
        return np.asarray(~empty[numbers], np.bool_)
    return np.greater(numbers, 0) if column in _CODES else np.greater_equal(numbers, 0)


# Rank classes before and after a trip, laid side by side.
#
# A trip may split a class (ranks at the end of a pipeline have no receive) and spell groups otherwise. What a
# rank sees is compared: its group, and whom its messages go to and come from.

_MOST_RANKS = 512
"""Of larger classes only the first ranks are looked at: groups repeat in a pattern."""


def _class_pairs(before: Workload, after: Workload) -> Iterator[tuple[OpGraph, OpGraph]]:
    """Each class of ``before`` with every class that its ranks have afterwards."""
    for index, graph in enumerate(before.classes):
        ranks = before.ranks_of(index)
        ranks = ranks[ranks < after.num_ranks]
        others: list[int] = np.unique(after.rank_class[ranks]).tolist()
        for other in others:
            if other == ABSENT:
                continue
            shared = ranks[after.rank_class[ranks] == other]
            then = after.classes[other]
            yield _seen_by(graph, shared, before.num_ranks), _seen_by(then, shared, after.num_ranks)


def _seen_by(graph: OpGraph, ranks: IntArray, num_ranks: int) -> OpGraph:
    """The graph with groups and peers as ``ranks`` see them; the group of all ranks is said by nothing."""
    chosen: list[int] = ranks[:_MOST_RANKS].tolist()
    collectives = graph.collectives
    if len(graph.group_sets):
        world = np.array([_is_unnamed(groups, num_ranks) for groups in graph.group_sets] + [True])
        rows = np.where(world[collectives.group_set], -1, collectives.group_set).astype(np.int32)
        collectives = replace(collectives, group_set=rows)
    return replace(
        graph,
        collectives=collectives,
        group_sets=tuple(_groups_of(groups, chosen, num_ranks) for groups in graph.group_sets),
        permutations=tuple(_peers_of(each, chosen, num_ranks) for each in graph.permutations),
    )


def _is_unnamed(groups: GroupSet, num_ranks: int) -> bool:
    return groups.is_world(num_ranks) and not groups.communicator


def _groups_of(groups: GroupSet, ranks: Sequence[int], num_ranks: int) -> GroupSet:
    """The groups of ``ranks``. One of all ranks in another order than theirs always has a name: the first."""
    is_ordered_anew = groups.num_groups == 1 and groups.max_group_size == num_ranks
    is_named = is_ordered_anew and not groups.is_world(num_ranks)
    numbers = dict.fromkeys(groups.group_of(rank) for rank in ranks)
    rows = [sorted(groups.members(number).tolist()) for number in numbers if number >= 0]
    return replace(ExplicitGroups.from_rows(rows), communicator=groups.communicator or int(is_named))


def _peers_of(permutation: Permutation, ranks: Sequence[int], num_ranks: int) -> Permutation:
    out = [(rank, permutation.target_of(rank)) for rank in ranks]
    back = [(permutation.source_of(rank), rank) for rank in ranks]
    pairs = {pair for pair in (*out, *back) if min(pair) >= 0}
    return Permutation.from_pairs(sorted(pairs), num_ranks)
