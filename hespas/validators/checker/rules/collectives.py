"""Rules of collectives and process groups: kinds, sizes, members and ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np

from hespas.graph import CollectiveKind, GroupSet, NodeKind, OpGraph, Severity, StridedGroups
from hespas.graph.columns import SmallIntArray
from hespas.graph.groups import membership_of
from hespas.validators.checker.job import CheckedJob, RuleReport
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
"""Collectives that ASTRA-sim has algorithms for; it replays a broadcast with its recorded duration."""

_KIND_ATTRIBUTE, _INTEGER_BYTES, _MAX_VALUE = "comm_type", 8, 40

_SIZELESS = (int(CollectiveKind.BARRIER), int(CollectiveKind.BROADCAST))


def collective_name(kind: int) -> str:
    """Return the name of a code of :class:`~hespas.graph.opgraph.CollectiveKind`, such as ``all-reduce``."""
    return CollectiveKind(kind).name.lower().replace("_", "-")


def collective_described(job: CheckedJob, report: RuleReport) -> None:
    """ET011: a collective states its size and a kind that the target can run."""
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        nodes = table.node
        bare = np.setdiff1d(np.flatnonzero(is_kind(graph, NodeKind.COLLECTIVE)), nodes)
        report.nodes(index, bare, "a collective states neither kind nor size")
        unknown = table.kind == int(CollectiveKind.UNKNOWN)
        strange, value = _strange_kinds(graph, nodes[unknown])
        mute = np.setdiff1d(nodes[unknown], strange)
        report.nodes(index, mute, "a collective does not state its kind")
        report.nodes(index, strange, f"a collective states an unknown kind: {value}")
        unsized = np.isnan(table.comm_bytes) & ~unknown & ~np.isin(table.kind, _SIZELESS)
        report.nodes(index, nodes[unsized], "a collective does not state its size")
        if job.profile != "astra-sim":
            continue
        known = (*SIMULATED, CollectiveKind.UNKNOWN, CollectiveKind.BROADCAST)
        for kind in np.unique(table.kind).tolist():
            members = nodes[table.kind == kind]
            if kind == CollectiveKind.BROADCAST:
                message = "ASTRA-sim only replays the recorded duration of a broadcast"
                report.nodes(index, members, message, Severity.WARNING)
            elif kind not in known:
                report.nodes(index, members, f"ASTRA-sim has no {collective_name(kind)}")


def _strange_kinds(graph: OpGraph, nodes: SmallIntArray) -> tuple[SmallIntArray, str]:
    """Return the collectives that state an unknown kind, and the first such kind."""
    table = graph.extra
    named = [row for row, text in enumerate(graph.strings) if text == _KIND_ATTRIBUTE] if len(nodes) else []
    rows = np.flatnonzero(np.isin(table.key, named) & np.isin(table.node, nodes))
    if not len(rows):
        return nodes[:0], ""
    value = table.value(int(rows[0]))
    is_text = table.tag[rows[0]] == 0 or len(value) != _INTEGER_BYTES
    shown = repr(value)[:_MAX_VALUE] if is_text else str(int.from_bytes(value, "little", signed=True))
    return table.node[rows], f"{_KIND_ATTRIBUTE} {shown}"


def positive_size(job: CheckedJob, report: RuleReport) -> None:
    """ET012: collectives and messages have at least one byte."""
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        empty = (table.comm_bytes < 1) & ~np.isin(table.kind, _SIZELESS)
        report.nodes(index, table.node[empty], "a collective of 0 bytes")
        p2p = graph.p2p
        report.nodes(index, p2p.node[p2p.comm_bytes < 1], "a message of 0 bytes")


def sizes_fit_kind(job: CheckedJob, report: RuleReport) -> None:
    """GR002: payload, operand and result bytes of a collective agree with its kind and group size."""
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        sizes = [groups.group_size for groups in graph.group_sets] + [job.num_ranks]
        members = np.array(sizes, np.float64)[table.group_set]
        known = members > 0
        shards = np.ones(len(table))
        gathers = table.kind == int(CollectiveKind.ALL_GATHER)
        scatters = np.isin(
            table.kind, (int(CollectiveKind.REDUCE_SCATTER), int(CollectiveKind.REDUCE_SCATTER_BLOCK))
        )
        same = np.isin(table.kind, (int(CollectiveKind.ALL_REDUCE), int(CollectiveKind.ALL_TO_ALL)))
        divided = known & (gathers | scatters)
        shards[divided] = members[divided]
        whole = np.where(gathers, table.result_bytes, table.operand_bytes)
        part = np.where(gathers, table.operand_bytes, table.result_bytes)
        is_checked = known & (gathers | scatters | same)
        # a trace states whole bytes: a part may differ by its rounding
        wrong = is_checked & (np.abs(part - whole / shards) > 0.5)
        report.nodes(
            index,
            table.node[wrong],
            "result and operand bytes do not fit its kind and group size",
        )
        wrong = is_checked & (np.abs(table.comm_bytes - table.operand_bytes) > 0.5)
        report.nodes(
            index,
            table.node[wrong],
            "its size differs from its operand (the shard of a gather, else the whole buffer)",
        )


_MAX_LISTED = 8
_MAX_ID = 2_147
_ID_MODULUS = 500
_GROUP_NAME, _GROUP_FILE = "pg_name", "comm_group.json"


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as ``[0, 1, 2]``, shortened after a few."""
    more = f", ... {len(ranks)} in all" if len(ranks) > _MAX_LISTED else ""
    return f"[{', '.join(map(str, ranks[:_MAX_LISTED]))}{more}]"


def groups_legal(job: CheckedJob, report: RuleReport) -> None:
    """ET019: ranks of groups exist and are unique, and the ranks that issue a collective are members."""
    for index, graph in enumerate(job.classes):
        for row, groups in enumerate(graph.group_sets):
            users: SmallIntArray = graph.collectives.node[graph.collectives.group_set == row]
            if not len(users):
                continue
            fault = _group_fault(groups, job.num_ranks)
            if fault:
                report.nodes(index, users, fault)
            if isinstance(groups, StridedGroups):
                single = groups.group_size == 1
            else:
                single = any(len(members) == 1 for members in groups.rows)
            single = single and job.num_ranks != 1
            if single and job.profile == "astra-sim":
                report.nodes(index, users, "a group has one rank: its collectives never finish in ASTRA-sim")
            elif single and job.profile == "chakra":
                report.nodes(index, users, "a group has one rank", Severity.WARNING)
            if not (job.complete and groups.holds_all(job.workload.num_ranks)):
                ranks = job.ranks_of(index)
                if job.complete:
                    inside = membership_of(groups, job.workload.num_ranks, {}, []).group[ranks] >= 0
                else:
                    inside = np.array([groups.group_of(rank) >= 0 for rank in ranks.tolist()], np.bool_)
                if not inside.all():
                    outsiders: list[int] = ranks[~inside][:8].tolist()
                    text = (
                        f"{int((~inside).sum()):,} ranks that issue it are not members of its groups, "
                        f"such as {outsiders}"
                    )
                    severity = Severity.WARNING if job.profile is None else None
                    report.nodes(index, users, text, severity, rank=outsiders[0])


def _group_fault(groups: GroupSet, num_ranks: int) -> str:
    """Return the fault of a group set; empty if it has none."""
    if isinstance(groups, StridedGroups):
        outside = num_ranks > 0 and (groups.base < 0 or groups.base + groups.num_ranks > num_ranks)
        last = groups.base + groups.num_ranks - 1
        return f"a group names rank {last}, the job has {num_ranks:,}" if outside else ""
    ranks = [rank for row in groups.rows for rank in row]
    if not ranks or not all(groups.rows):
        return "a group is empty"
    if min(ranks) < 0 or 0 < num_ranks <= max(ranks):
        wrong = min(ranks) if min(ranks) < 0 else max(ranks)
        return f"a group names rank {wrong}, the job has {num_ranks:,}"
    counts = np.unique(np.array(ranks, np.int64), return_counts=True)
    twice = counts[0][counts[1] > 1]
    return f"rank {int(twice[0])} is listed twice" if len(twice) else ""


def _group_names(graph: OpGraph) -> dict[str, int]:
    """Return the names of process groups in the attributes of nodes, each with the first node that has it."""
    key = graph.strings.find(_GROUP_NAME)
    names: dict[str, int] = {}
    if key < 0:
        return names
    for row in np.flatnonzero(graph.extra.key == key).tolist():
        name = graph.extra.value(row).decode("utf-8", "replace")
        names.setdefault(name, int(graph.extra.node[row]))
    return names


def group_names_known(job: CheckedJob, report: RuleReport) -> None:
    """ET018: a process group is named by a positive integer; empty and 0 mean all ranks."""
    for index, graph in enumerate(job.classes):
        for name, node in _group_names(graph).items():
            if node >= 0 and name and not (name.isascii() and name.isdigit()):
                report.nodes(index, np.array([node]), f"its pg_name {name!r} is not an integer")


def group_ids_distinct(job: CheckedJob, report: RuleReport) -> None:
    """ET028: group ids stay within ASTRA-sim's stream ids and tags."""
    names = {name for graph in job.classes for name in _group_names(graph)}
    for graph in job.classes:
        document = graph.attachments.get(_GROUP_FILE, b"{}")
        with suppress(ValueError, RecursionError):  # the reader reports a malformed file
            names.update(msgspec.json.decode(document, type=dict[str, msgspec.Raw]))
    ids = {int(name) for name in names if name.isascii() and name.isdigit() and len(name) < 20}
    large = sorted(number for number in ids if number > _MAX_ID)
    if large:
        report.add(f"group ids above {_MAX_ID:,} overflow ASTRA-sim's 32-bit stream id: {large[:8]}")
    first: dict[int, int] = {}
    for number in sorted(ids):
        other = first.setdefault(number % _ID_MODULUS, number)
        if other != number:
            report.add(f"group ids {other} and {number} are equal modulo {_ID_MODULUS} and share tags")
