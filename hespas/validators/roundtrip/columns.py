"""Comparison of the columns of a workload before and after a conversion.

A column is exact, changed in some rows, or lost. A conversion can split a rank class (ranks at the end of a
pipeline have no receive) and write groups in another form. Therefore the comparison is by rank: it uses the
class of a rank before and after, with the groups and peers of that rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hespas.graph import ABSENT, PROGRAM_BYTES, ExplicitGroups, OpGraph, Permutation, Workload
from hespas.graph.columns import BoolArray, IntArray, RaggedArray
from hespas.graph.equality import COMPARED_COLUMNS, graphs_equal
from hespas.graph.groups import GroupSet
from hespas.graph.passes import bypass, take_nodes
from hespas.graph.quantised import QUANTISED

__all__ = ["JOB_COLUMNS", "QUANTISED_TYPES", "ColumnResult", "ColumnStatus", "compare_columns", "summed"]

QUANTISED_TYPES = "quantised"
"""Comparison of the quantised types of the operands and results of each node."""

JOB_COLUMNS = ("ranks", "metadata", "nodes", QUANTISED_TYPES)
"""Comparisons besides the columns of a graph: rank classes, metadata of the job, the set of nodes, and their
quantised types.
"""

_FILE_FACTS = frozenset({"format", "version", "form"})
"""Metadata about the file itself, which a conversion replaces."""
_COLUMNS = tuple(name for name in COMPARED_COLUMNS if not name.startswith("extra.") and name != "attachments")
_STRING_COLUMNS = frozenset(
    {"name_id", "op_id", "source_id", "framework_id", "collectives.reduction", "regions.label"}
)
_ALWAYS_KNOWN = frozenset({"id"})
_CODE_COLUMNS = frozenset({"op_class"})
"""Integer columns in which 0 is unknown; in the others -1 is."""
_MAX_RANKS = 512
"""Ranks of a class that are compared; groups of larger classes repeat in a pattern."""


class ColumnStatus(Enum):
    """Outcome of a round trip for a column of the graph, from good to bad."""

    ABSENT = "absent"
    """The column has no known values before, so there is nothing to keep."""
    EXACT = "exact"
    CHANGED = "changed"
    """Some rows have other values, or none."""
    LOST = "cannot express"
    """No row has a known value after."""


@dataclass(frozen=True, slots=True)
class ColumnResult:
    """Comparison of one column before and after a conversion: the number of rows that are ``known`` before
    it, and the number that ``changed``.

    ``changed_in_one`` is the number of changed rows in the rank class with most changes. If the conversion
    splits a class, ``changed`` counts the rows of the class once per new class.
    """

    column: str
    kept: ColumnStatus
    known: int
    changed: int
    changed_in_one: int = field(default=-1, compare=False)

    def __post_init__(self) -> None:
        """Set ``changed_in_one`` to ``changed`` if it was not given (a single class)."""
        if self.changed_in_one < 0:
            object.__setattr__(self, "changed_in_one", self.changed)


def compare_columns(before: Workload, after: Workload) -> list[ColumnResult]:
    """Compare every column of a job before and after a conversion. O(nodes).

    If nodes were added or removed, only nodes in both graphs are compared.
    """
    if before.num_ranks != after.num_ranks:
        changed_ranks = abs(before.num_ranks - after.num_ranks)
    else:
        is_equal = np.array_equal(before.rank_class, after.rank_class)
        changed_ranks = 0 if is_equal else int((_first_ranks(before) != _first_ranks(after)).sum())
    facts, others = _facts(before), _facts(after)
    lost = sum(others.get(key) != value for key, value in facts.items())
    per_class = [_compare_graphs(left, right) for left, right in _class_pairs(before, after)]
    return [
        _result("ranks", before.num_ranks, changed_ranks),
        _result("metadata", len(facts), lost, is_lost=lost == len(facts)),
        *map(summed, zip(*per_class, strict=True)),
    ]


def summed(results: Iterable[ColumnResult]) -> ColumnResult:
    """Add the results of one column over several graphs or files."""
    parts = list(results)
    column = parts[0].column
    present = [part.kept for part in parts if part.kept is not ColumnStatus.ABSENT]
    if not present:
        return ColumnResult(column, ColumnStatus.ABSENT, 0, 0)
    if all(status is ColumnStatus.LOST for status in present):
        status = ColumnStatus.LOST
    else:
        status = ColumnStatus.EXACT if set(present) == {ColumnStatus.EXACT} else ColumnStatus.CHANGED
    known = sum(part.known for part in parts)
    changed = sum(part.changed for part in parts)
    return ColumnResult(column, status, known, changed, max(part.changed_in_one for part in parts))


def _result(column: str, known: int, changed: int, *, is_lost: bool = False) -> ColumnResult:
    if not known and not changed:
        return ColumnResult(column, ColumnStatus.ABSENT, 0, 0)
    if not changed:
        return ColumnResult(column, ColumnStatus.EXACT, known, 0)
    return ColumnResult(column, ColumnStatus.LOST if is_lost else ColumnStatus.CHANGED, known, changed)


def _facts(workload: Workload) -> dict[str, object]:
    """Return the metadata of a job for the comparison, without entries about its file. The bytes of programs,
    which a workload lists per rank class, are returned per rank, because writers split classes.
    """
    facts: dict[str, object] = {
        key: value for key, value in workload.metadata.items() if key not in _FILE_FACTS
    }
    facts.pop(PROGRAM_BYTES, None)
    if any(workload.program_bytes):
        present, class_of_rank = np.unique(workload.rank_class, return_inverse=True)
        numbers: list[int] = present.tolist()
        class_texts = ["" if number == ABSENT else workload.program_bytes[number] for number in numbers]
        texts, text_of_class = np.unique(class_texts, return_inverse=True)
        facts[PROGRAM_BYTES] = (*texts.tolist(), text_of_class[class_of_rank].tobytes())
    return facts


def _first_ranks(workload: Workload) -> IntArray:
    """Return for each rank the first rank of its class, which identifies the class even if its number
    changes.
    """
    return workload.by_rank(np.array([*workload.first_ranks, workload.num_ranks]))


def _compare_graphs(before: OpGraph, after: OpGraph) -> list[ColumnResult]:
    """Compare all columns of two graphs, and their nodes, verbatim attributes and attachments."""
    nodes, left, right = _common_nodes(before, after)
    lost_attributes = sum((_attributes(left) - _attributes(right)).values())
    attachments = before.attachments
    lost_attachments = sum(after.attachments.get(name) != content for name, content in attachments.items())
    differing = {entry.column: entry.count for entry in graphs_equal(left, right)}
    results = [
        nodes,
        _result("extra", len(left.extra), lost_attributes, is_lost=lost_attributes == len(left.extra)),
        _result(
            "attachments", len(attachments), lost_attachments, is_lost=lost_attachments == len(attachments)
        ),
        _compare_quantised(before, after),
    ]
    for column in _COLUMNS:
        known = _num_known(left, column)
        changed = differing.get(column, 0)
        # A shorter table lacks rows in every column, of which only some had known values.
        changed = min(changed, known) if known and "." in column else changed
        is_lost = changed > 0 and known > 0 and _num_known(right, column) == 0
        results.append(_result(column, known, changed, is_lost=is_lost))
    return results


def _compare_quantised(before: OpGraph, after: OpGraph) -> ColumnResult:
    """Compare the quantised types of nodes. If nodes were added or removed, a node keeps its types if some
    node has the same ones afterwards.
    """
    left, right = _quantised(before), _quantised(after)
    if len(before) == len(after):
        changed = sum(right.get(node) != types for node, types in left.items())
    else:
        changed = (Counter(left.values()) - Counter(right.values())).total()
    return _result(QUANTISED_TYPES, len(left), changed, is_lost=not right)


def _quantised(graph: OpGraph) -> dict[int, tuple[str, ...]]:
    """Return the quantised types of operands and results, in order, by node that has some."""
    encodings = [graph.strings[row] for row in graph.types.encoding.tolist()]
    texts = [text if text.startswith(QUANTISED) else "" for text in encodings]
    if not any(texts):
        return {}
    lists = zip(graph.operands.to_lists(), graph.results.to_lists(), strict=True)
    types = ((node, (*taken, *made)) for node, (taken, made) in enumerate(lists))
    found = {node: tuple(filter(None, (texts[row] for row in rows))) for node, rows in types}
    return {node: names for node, names in found.items() if names}


def _attributes(graph: OpGraph) -> Counter[tuple[int, str, bytes]]:
    """Return the number of verbatim attributes with each node, key and value."""
    extra = graph.extra
    nodes, keys = extra.node.tolist(), extra.key.tolist()
    return Counter((nodes[row], graph.strings[keys[row]], extra.value(row)) for row in range(len(extra)))


def _common_nodes(before: OpGraph, after: OpGraph) -> tuple[ColumnResult, OpGraph, OpGraph]:
    """Return the comparison of the numbers of nodes, and both graphs. If the numbers differ, the graphs are
    reduced to their common nodes, in the same order.
    """
    if len(before) == len(after):
        return _result("nodes", len(before), 0), before, after
    left, right = _node_labels(before), _node_labels(after)
    is_removed, is_added = ~np.isin(left, right), ~np.isin(right, left)
    changed = max(int(is_removed.sum()) + int(is_added.sum()), 1)
    common_before, common_after = bypass(before, is_removed), bypass(after, is_added)
    if len(common_before) != int((~is_removed).sum()) or len(common_after) != int((~is_added).sum()):
        # A bypass keeps joins of very many edges: compare without the edges through removed nodes instead.
        common_before, common_after = _take(before, ~is_removed), _take(after, ~is_added)
    order = np.empty(len(common_after), np.int64)
    order[np.argsort(left[~is_removed])] = np.argsort(right[~is_added])
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    data, control = common_after.data_deps.take(order), common_after.control_deps.take(order)
    reordered = take_nodes(
        common_after,
        order,
        RaggedArray(data.offsets, number[data.values]),
        RaggedArray(control.offsets, number[control.values]),
    )
    return _result("nodes", len(before), changed), common_before, reordered


def _take(graph: OpGraph, keep: BoolArray) -> OpGraph:
    """Return the graph reduced to some nodes and the edges between them."""
    rows = np.flatnonzero(keep)
    number = np.full(len(graph), -1, np.int32)
    number[rows] = np.arange(len(rows), dtype=np.int32)
    deps: list[RaggedArray] = []
    for taken in (graph.data_deps.take(rows), graph.control_deps.take(rows)):
        inside = number[taken.values] >= 0
        deps.append(RaggedArray.from_pairs(taken.row_ids[inside], number[taken.values[inside]], len(rows)))
    return take_nodes(graph, rows, deps[0], deps[1])


def _node_labels(graph: OpGraph) -> NDArray[np.int64]:
    """Return a label for each node that does not depend on its number: a hash of its name and of its index
    among the nodes of that name.
    """
    names = np.array([hash(text) for text in graph.strings], np.int64)[graph.name_id]
    order = np.argsort(names, kind="stable")
    grouped = names[order]
    starts = np.flatnonzero(np.diff(grouped, prepend=grouped[:1] - 1))
    occurrence = np.arange(len(names)) - np.repeat(starts, np.diff(np.append(starts, len(names))))
    labels = np.empty(len(names), np.int64)
    labels[order] = grouped + occurrence * np.int64(0x9E3779B97F4A7C1 << 1 | 1)
    return labels


def _num_known(graph: OpGraph, column: str) -> int:
    """Return the number of known values in a column."""
    if column == "name":
        return int(bool(graph.name))
    table, _, part = column.partition(".")
    values = getattr(getattr(graph, table), part) if part else getattr(graph, column)
    if isinstance(values, RaggedArray):
        return int((values.lengths > 0).sum())
    array = np.asarray(values)
    if array.dtype.kind == "f":
        return int((~np.isnan(array.astype(np.float64))).sum())
    if array.dtype.kind not in "iu" or column in _ALWAYS_KNOWN:
        return len(array)
    numbers = array.astype(np.int64)
    if column in _STRING_COLUMNS:
        is_empty = np.array([text == "" for text in graph.strings] + [True])
        return int((~is_empty[numbers]).sum())
    return int(((numbers > 0) if column in _CODE_COLUMNS else (numbers >= 0)).sum())


def _class_pairs(before: Workload, after: Workload) -> Iterator[tuple[OpGraph, OpGraph]]:
    """Yield pairs of graphs to compare: each class before the conversion, with every class that its ranks
    have afterwards.
    """
    for index, graph in enumerate(before.classes):
        ranks = before.ranks_of(index)
        ranks = ranks[ranks < after.num_ranks]
        others: list[int] = np.unique(after.rank_class[ranks]).tolist()
        for other in others:
            if other == ABSENT:
                continue
            shared = ranks[after.rank_class[ranks] == other]
            other_graph = after.classes[other]
            yield _seen_by(graph, shared, before.num_ranks), _seen_by(other_graph, shared, after.num_ranks)


def _seen_by(graph: OpGraph, ranks: IntArray, num_ranks: int) -> OpGraph:
    """Return the graph reduced to the groups and peers of ``ranks``. An unnamed group of all ranks gets group
    set -1.
    """
    chosen: list[int] = ranks[:_MAX_RANKS].tolist()
    collectives = graph.collectives
    if len(graph.group_sets):
        is_world = [groups.is_world(num_ranks) and not groups.communicator for groups in graph.group_sets] + [
            True
        ]
        rows = np.where(np.array(is_world)[collectives.group_set], -1, collectives.group_set)
        collectives = replace(collectives, group_set=rows.astype(np.int32))
    return replace(
        graph,
        collectives=collectives,
        group_sets=tuple(_groups_of(groups, chosen, num_ranks) for groups in graph.group_sets),
        permutations=tuple(_peers_of(permutation, chosen, num_ranks) for permutation in graph.permutations),
    )


def _groups_of(groups: GroupSet, ranks: Sequence[int], num_ranks: int) -> GroupSet:
    """Return the groups that contain ``ranks``. An unnamed group of all ranks in another order gets
    communicator 1.
    """
    is_reordered = groups.num_groups == 1 and groups.max_group_size == num_ranks
    is_named = is_reordered and not groups.is_world(num_ranks)
    numbers = dict.fromkeys(groups.group_of(rank) for rank in ranks)
    rows = [sorted(groups.members(number).tolist()) for number in numbers if number >= 0]
    return replace(ExplicitGroups.from_rows(rows), communicator=groups.communicator or int(is_named))


def _peers_of(permutation: Permutation, ranks: Sequence[int], num_ranks: int) -> Permutation:
    """Return the pairs of a permutation that contain one of ``ranks``."""
    sends = [(rank, permutation.target_of(rank)) for rank in ranks]
    receives = [(permutation.source_of(rank), rank) for rank in ranks]
    pairs = {pair for pair in (*sends, *receives) if min(pair) >= 0}
    return Permutation.from_pairs(sorted(pairs), num_ranks)
