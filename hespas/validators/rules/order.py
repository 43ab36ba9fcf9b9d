"""Sequences across ranks: the same collectives on a group, the same streams before world collectives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, zip_longest

from hespas.graph import CollectiveKind, OpGraph, Severity
from hespas.validators.job import Job, Report
from hespas.validators.rules.collectives import collective_name
from hespas.validators.rules.groups import ranks_text

__all__ = ["same_sequence", "same_streams"]

_Item = tuple[int, float, float]
"""Kind, bytes (-1 unknown) and executions of a collective."""


class _Sequences:
    """Collectives of each kind of rank, and what each is."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.items: list[dict[int, _Item]] = []
        for graph in job.classes:
            table = graph.collectives
            nodes: list[int] = table.node.tolist()
            kinds: list[int] = table.kind.tolist()
            sizes: list[float] = table.comm_bytes.tolist()
            times: list[float] = graph.multiplicity[table.node].tolist()
            rows = zip(kinds, sizes, times, strict=True)
            items = ((kind, _known(size), _known(count)) for kind, size, count in rows)
            self.items.append(dict(zip(nodes, items, strict=True)))

    def class_of(self, kind: int) -> int:
        return int(self.job.workload.rank_class[self.job.quotient.representatives[kind]])

    def on(self, kind: int, channel: int, order: Sequence[int]) -> list[int]:
        """Nodes of ``order`` that run on a channel at the representative of a kind."""
        graph = self.job.classes[self.class_of(kind)]
        rows = self.job.quotient.channel_rows[kind]
        table = graph.collectives
        nodes: list[int] = table.node.tolist()
        sets: list[int] = table.group_set.tolist()
        mine = {node for node, row in zip(nodes, sets, strict=True) if rows[row] == channel}
        return [node for node in order if node in mine]

    def runs(self, kind: int, nodes: Sequence[int]) -> list[tuple[_Item, int]]:
        """What the nodes are, equal neighbours as one with their executions added; and a node of each."""
        items = self.items[self.class_of(kind)]
        merged: list[tuple[_Item, int]] = []
        for (what, size), group in groupby(nodes, key=lambda node: items[node][:2]):
            members = list(group)
            times = sum(max(items[node][2], 0.0) for node in members)
            merged.append(((what, size, times), members[0]))
        return merged


def _known(value: float) -> float:
    return value if value == value else -1.0  # noqa: PLR0124


def same_sequence(job: Job, report: Report) -> None:
    """ET020: all members of a group issue the same collectives, in kind, size and order, on it."""
    if job.is_uniform or report.has("ET007"):
        return
    sequences = _Sequences(job)
    for number, channel in enumerate(job.quotient.channels):
        used = any(number in rows for rows in _used_rows(job))
        kinds = sorted(channel.kinds)
        for kind in kinds[1:] if used else ():
            _compare(report, sequences, number, (kinds[0], kind))


def _used_rows(job: Job) -> list[set[int]]:
    """Channels that each kind of rank really issues collectives on."""
    used: list[set[int]] = []
    for kind, rank in enumerate(job.quotient.representatives):
        sets: set[int] = set(job.workload.graph_of(rank).collectives.group_set.tolist())
        used.append({job.quotient.channel_rows[kind][row] for row in sets})
    return used


def _compare(report: Report, sequences: _Sequences, number: int, kinds: tuple[int, int]) -> None:
    """Compare what two kinds of rank issue on one channel, in both orders."""
    job = sequences.job
    differences: list[str] = []
    node = -1
    ranks = (job.quotient.representatives[kinds[0]], job.quotient.representatives[kinds[1]])
    for order_name in ("by_time", "by_id"):
        runs: list[list[tuple[_Item, int]]] = []
        for which in kinds:
            order: tuple[int, ...] = getattr(job.orders[sequences.class_of(which)], order_name)
            runs.append(sequences.runs(which, sequences.on(which, number, order)))
        difference, place = _difference(job, ranks, runs[0], runs[1])
        if difference:
            differences.append(difference)
            node = place if node < 0 else node
    if not differences:
        return
    certain = len(differences) == 2
    note = "" if certain else " (in one of the orders that timing allows)"
    text = f"group {ranks_text(job.quotient.channels[number].members)}: {differences[0]}{note}"
    severity = None if certain else Severity.WARNING
    report.add(text, rank=ranks[1], node=None if node < 0 else node, severity=severity)


def _difference(
    job: Job, ranks: tuple[int, int], left: list[tuple[_Item, int]], right: list[tuple[_Item, int]]
) -> tuple[str, int]:
    """The first place where two sequences part, in words, and the node id of the second rank there."""
    graphs = [job.workload.graph_of(rank) for rank in ranks]
    for place, (one, other) in enumerate(zip_longest(left, right)):
        if one is not None and other is not None and one[0] == other[0]:
            continue
        texts = [_item(graph, entry) for graph, entry in zip(graphs, (one, other), strict=True)]
        node = -1 if other is None else int(graphs[1].id[other[1]])
        text = f"collective {place} is {texts[0]} on rank {ranks[0]} but {texts[1]} on rank {ranks[1]}"
        return text, node
    return "", -1


def _item(graph: OpGraph, entry: tuple[_Item, int] | None) -> str:
    if entry is None:
        return "missing"
    (kind, size, times), node = entry
    bytes_text = "unknown size" if size < 0 else f"{size:,.0f} bytes"
    repeated = "" if times == 1 else f", {times:,.0f} times"
    return f"{collective_name(kind)} of {bytes_text}{repeated} (node {int(graph.id[node])})"


def same_streams(job: Job, report: Report) -> None:
    """ET029: before each world collective, all ranks have created the same number of streams."""
    if job.is_uniform or report.has("ET007"):
        return
    different: list[str] = []
    for order_name in ("by_time", "by_id"):
        counts: dict[int, list[int]] = {}
        for kind, rank in enumerate(job.quotient.representatives):
            index = int(job.workload.rank_class[rank])
            order: tuple[int, ...] = getattr(job.orders[index], order_name)
            counts[kind] = _streams_before_world(job, job.classes[index], order)
        different += _stream_difference(job, counts)
    if different:
        severity = None if len(different) == 2 else Severity.WARNING
        report.add(different[0], severity=severity)


def _streams_before_world(job: Job, graph: OpGraph, order: Sequence[int]) -> list[int]:
    """Streams created before each world collective of one rank."""
    table = graph.collectives
    nodes: list[int] = table.node.tolist()
    place = {node: row for row, node in enumerate(nodes)}
    # A group of all ranks that has a name counts its streams like any other group.
    total = job.workload.num_ranks
    worlds = [groups.is_world(total) and not groups.communicator for groups in graph.group_sets] + [True]
    created, found = 0, list[int]()
    for node in order:
        row = place[node]
        if worlds[int(table.group_set[row])]:
            found.append(created)
        created += _streams(job, int(table.kind[row]), float(table.comm_bytes[row]))
    return found


def _streams(job: Job, kind: int, size: float) -> int:
    """Streams of one collective (network model, section 3); 1 where the number of splits is not known."""
    splits = None if job.system is None else job.system.dataset_splits
    if splits is None or not size >= 1:
        return 1
    total, ranks = int(size), job.workload.num_ranks
    chunk = total // splits
    if kind != CollectiveKind.ALL_GATHER and chunk < ranks:
        chunk, total = ranks, splits * ranks
    return -(-total // chunk) if chunk else 1


def _stream_difference(job: Job, counts: dict[int, list[int]]) -> list[str]:
    base, first = next(iter(counts.items()))
    for kind, found in counts.items():
        for turn, (one, other) in enumerate(zip(first, found, strict=False)):
            if one != other:
                ranks = (job.quotient.representatives[base], job.quotient.representatives[kind])
                text = f"before world collective {turn}, rank {ranks[0]} has created {one} collective streams"
                return [f"{text} and rank {ranks[1]} {other}: their ids differ and ASTRA-sim hangs"]
    return []
