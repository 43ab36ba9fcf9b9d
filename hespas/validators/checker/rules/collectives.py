"""Collectives and groups of ranks: kinds and sizes, legal lists, members that take part, distinct ids."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from hespas.graph import CollectiveKind, ExplicitGroups, GroupSet, NodeKind, OpGraph, Severity, StridedGroups
from hespas.graph.columns import SmallIntArray
from hespas.graph.membership import membership_of
from hespas.validators.checker.job import Job, Report
from hespas.validators.checker.rules.nodes import is_kind

__all__ = [
    "SIMULATED",
    "collective_described",
    "collective_name",
    "group_ids_distinct",
    "group_names_known",
    "groups_legal",
    "positive_size",
    "ranks_text",
    "sizes_fit_kind",
]

SIMULATED: tuple[CollectiveKind, ...] = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
)
"""What ASTRA-sim has algorithms for; a broadcast is replayed with its recorded duration."""

_KIND_ATTRIBUTE, _INTEGER_BYTES, _SHOWN = "comm_type", 8, 40

_SIZELESS = (int(CollectiveKind.BARRIER), int(CollectiveKind.BROADCAST))


def collective_name(kind: int) -> str:
    """``all-reduce`` for a code of :class:`~hespas.graph.opgraph.CollectiveKind`."""
    return CollectiveKind(kind).name.lower().replace("_", "-")


def collective_described(job: Job, report: Report) -> None:
    """ET011: a collective states its kind and size, and a kind that the target can run."""
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        nodes = table.node
        bare = np.setdiff1d(np.flatnonzero(is_kind(graph, NodeKind.COLLECTIVE)), nodes)
        report.nodes(index, bare, "a collective states neither kind nor size")
        unknown = table.kind == int(CollectiveKind.UNKNOWN)
        strange, value = _strange_kinds(graph, nodes[unknown])
        mute = np.setdiff1d(nodes[unknown], strange)
        report.nodes(index, mute, "a collective does not state its kind")
        report.nodes(index, strange, f"a collective states a kind that there is not: {value}")
        unsized = np.isnan(table.comm_bytes) & ~unknown & ~np.isin(table.kind, _SIZELESS)
        report.nodes(index, nodes[unsized], "a collective does not state its size")
        if job.profile == "astra-sim":
            _simulated(index, graph, report)


def _strange_kinds(graph: OpGraph, nodes: SmallIntArray) -> tuple[SmallIntArray, str]:
    """Which of the nodes state a kind that no reader knows, and the first such."""
    table = graph.extra
    named = [row for row, text in enumerate(graph.strings) if text == _KIND_ATTRIBUTE] if len(nodes) else []
    rows = np.flatnonzero(np.isin(table.key, named) & np.isin(table.node, nodes))
    if not len(rows):
        return nodes[:0], ""
    value = table.value(int(rows[0]))
    is_text = table.tag[rows[0]] == 0 or len(value) != _INTEGER_BYTES
    shown = repr(value)[:_SHOWN] if is_text else str(int.from_bytes(value, "little", signed=True))
    return table.node[rows], f"{_KIND_ATTRIBUTE} {shown}"


def _simulated(index: int, graph: OpGraph, report: Report) -> None:
    table = graph.collectives
    known = (*SIMULATED, CollectiveKind.UNKNOWN, CollectiveKind.BROADCAST)
    for kind in np.unique(table.kind).tolist():
        nodes = table.node[table.kind == kind]
        if kind == CollectiveKind.BROADCAST:
            message = "ASTRA-sim only replays the recorded duration of a broadcast"
            report.nodes(index, nodes, message, Severity.WARNING)
        elif kind not in known:
            report.nodes(index, nodes, f"ASTRA-sim has no {collective_name(kind)}")


def positive_size(job: Job, report: Report) -> None:
    """ET012: what is communicated has at least one byte."""
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        empty = (table.comm_bytes < 1) & ~np.isin(table.kind, _SIZELESS)
        report.nodes(index, table.node[empty], "a collective of 0 bytes")
        p2p = graph.p2p
        report.nodes(index, p2p.node[p2p.comm_bytes < 1], "a message of 0 bytes")


def sizes_fit_kind(job: Job, report: Report) -> None:
    """GR002: payload, operand and result bytes of a collective agree with its kind and group size."""
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        sizes = [groups.group_size for groups in graph.group_sets] + [job.num_ranks]
        members = np.array(sizes, np.float64)[table.group_set]
        known = members > 0
        scale = np.ones(len(table))
        gathers = table.kind == int(CollectiveKind.ALL_GATHER)
        scatters = np.isin(
            table.kind, (int(CollectiveKind.REDUCE_SCATTER), int(CollectiveKind.REDUCE_SCATTER_BLOCK))
        )
        same = np.isin(table.kind, (int(CollectiveKind.ALL_REDUCE), int(CollectiveKind.ALL_TO_ALL)))
        scale[gathers] = members[gathers]
        scale[scatters] = 1 / members[scatters]
        expected = table.operand_bytes * scale
        judged = known & (gathers | scatters | same)
        wrong = judged & (np.abs(table.result_bytes - expected) > 0.5)
        report.nodes(
            index,
            table.node[wrong],
            "result and operand bytes do not fit its kind and group size",
        )
        wrong = judged & (np.abs(table.comm_bytes - table.operand_bytes) > 0.5)
        report.nodes(
            index,
            table.node[wrong],
            "its size is not that of its operand (the shard of a gather, the whole buffer otherwise)",
        )


_LISTED = 8
_LARGEST_ID = 2_147
_ID_MODULUS = 500
_GROUP_NAME, _GROUP_FILE = "pg_name", "comm_group.json"


def ranks_text(ranks: Sequence[int]) -> str:
    """``[0, 1, 2]``, shortened where there are many."""
    more = f", ... {len(ranks)} in all" if len(ranks) > _LISTED else ""
    return f"[{', '.join(map(str, ranks[:_LISTED]))}{more}]"


def _users(graph: OpGraph, row: int) -> SmallIntArray:
    """Nodes that communicate over one group set."""
    users: SmallIntArray = graph.collectives.node[graph.collectives.group_set == row]
    return users


def groups_legal(job: Job, report: Report) -> None:
    """ET019: ranks of groups exist, none is listed twice, and who issues a collective is a member."""
    for index, graph in enumerate(job.classes):
        for row, groups in enumerate(graph.group_sets):
            users = _users(graph, row)
            if not len(users):
                continue
            fault = _fault(groups, job.num_ranks)
            if fault:
                report.nodes(index, users, fault)
            single = _has_single(groups) and job.num_ranks != 1
            if single and job.profile == "astra-sim":
                report.nodes(index, users, "a group has one rank: its collectives never end in ASTRA-sim")
            elif single and job.profile == "chakra":
                report.nodes(index, users, "a group has one rank", Severity.WARNING)
            _members(job, report, index, row)


def _fault(groups: GroupSet, num_ranks: int) -> str:
    """What is wrong with the lists themselves, empty for nothing."""
    if isinstance(groups, StridedGroups):
        outside = num_ranks > 0 and (groups.base < 0 or groups.base + groups.num_ranks > num_ranks)
        largest = groups.base + groups.num_ranks - 1
        return f"a group names rank {largest}, there are {num_ranks:,}" if outside else ""
    return _explicit_fault(groups, num_ranks)


def _explicit_fault(groups: ExplicitGroups, num_ranks: int) -> str:
    ranks = [rank for row in groups.rows for rank in row]
    if not ranks or not all(groups.rows):
        return "a group is empty"
    if min(ranks) < 0 or 0 < num_ranks <= max(ranks):
        wrong = min(ranks) if min(ranks) < 0 else max(ranks)
        return f"a group names rank {wrong}, there are {num_ranks:,}"
    counts = np.unique(np.array(ranks, np.int64), return_counts=True)
    twice = counts[0][counts[1] > 1]
    return f"rank {int(twice[0])} is listed twice" if len(twice) else ""


def _has_single(groups: GroupSet) -> bool:
    if isinstance(groups, StridedGroups):
        return groups.group_size == 1
    return any(len(row) == 1 for row in groups.rows)


def _members(job: Job, report: Report, index: int, row: int) -> None:
    """Ranks of a class that issue a collective over a set in which they are in no group."""
    graph = job.classes[index]
    groups = graph.group_sets[row]
    if job.complete and groups.holds_all(job.workload.num_ranks):
        return
    ranks = job.ranks_of(index)
    if job.complete:
        inside = membership_of(groups, job.workload.num_ranks, {}, []).group[ranks] >= 0
    else:
        inside = np.array([groups.group_of(rank) >= 0 for rank in ranks.tolist()], np.bool_)
    if not inside.all():
        who: list[int] = ranks[~inside][:8].tolist()
        text = f"{int((~inside).sum()):,} ranks that issue it are in no group of it, such as {who}"
        severity = Severity.WARNING if job.profile is None else None
        report.nodes(index, _users(graph, row), text, severity, rank=who[0])


def _group_names(graph: OpGraph) -> dict[str, int]:
    """Process group names kept as attributes, with the first node of each."""
    key = graph.strings.find(_GROUP_NAME)
    names: dict[str, int] = {}
    if key < 0:
        return names
    for row in np.flatnonzero(graph.extra.key == key).tolist():
        name = graph.extra.value(row).decode("utf-8", "replace")
        names.setdefault(name, int(graph.extra.node[row]))
    return names


def _listed_groups(graph: OpGraph) -> tuple[str, ...]:
    """The ids in the group file that came with a trace; a broken file is the reader's to report."""
    try:
        return tuple(
            msgspec.json.decode(graph.attachments.get(_GROUP_FILE, b"{}"), type=dict[str, msgspec.Raw])
        )
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested without end
        return ()


def group_names_known(job: Job, report: Report) -> None:
    """ET018: a process group is named by a positive integer; empty and 0 mean all ranks."""
    for index, graph in enumerate(job.classes):
        for name, node in _group_names(graph).items():
            if node >= 0 and name and not (name.isascii() and name.isdigit()):
                report.nodes(index, np.array([node]), f"its pg_name {name!r} is no integer")


def group_ids_distinct(job: Job, report: Report) -> None:
    """ET028: group ids stay within ASTRA-sim's stream ids and tags."""
    names = {name for graph in job.classes for name in (*_group_names(graph), *_listed_groups(graph))}
    ids = {int(name) for name in names if name.isascii() and name.isdigit() and len(name) < 20}
    large = sorted(number for number in ids if number > _LARGEST_ID)
    if large:
        report.add(f"group ids above {_LARGEST_ID:,} overflow ASTRA-sim's 32-bit stream id: {large[:8]}")
    first: dict[int, int] = {}
    for number in sorted(ids):
        other = first.setdefault(number % _ID_MODULUS, number)
        if other != number:
            report.add(f"group ids {other} and {number} are equal modulo {_ID_MODULUS} and share tags")
