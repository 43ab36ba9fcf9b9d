"""Sequences across ranks: the same collectives on a group, the same streams before world collectives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, zip_longest

from hespas.graph import CollectiveKind, OpGraph, Severity
from hespas.validators.checker.job import Job, Report
from hespas.validators.checker.replay import Outcome, Place, Waiting, order_cycle, replay
from hespas.validators.checker.rules.collectives import collective_name, ranks_text
from hespas.validators.checker.rules.messages import Programs, alone, programs_of

__all__ = ["no_deadlock", "same_sequence", "same_streams"]

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
        return int(self.job.workload.rank_class[self.job.equivalence.representatives[kind]])

    def on(self, kind: int, channel: int, order: Sequence[int]) -> list[int]:
        """Nodes of ``order`` that run on a channel at the representative of a kind."""
        graph = self.job.classes[self.class_of(kind)]
        rows = self.job.equivalence.channel_rows[kind]
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
    used = set[int]().union(*_used_rows(job))
    for number, channel in enumerate(job.equivalence.channels):
        kinds = sorted(channel.kinds)
        for kind in kinds[1:] if number in used else ():
            _compare(report, sequences, number, (kinds[0], kind))


def _used_rows(job: Job) -> list[set[int]]:
    """Channels that each kind of rank really issues collectives on."""
    used: list[set[int]] = []
    for kind, rank in enumerate(job.equivalence.representatives):
        sets: set[int] = set(job.workload.graph_of(rank).collectives.group_set.tolist())
        used.append({job.equivalence.channel_rows[kind][row] for row in sets})
    return used


def _compare(report: Report, sequences: _Sequences, number: int, kinds: tuple[int, int]) -> None:
    """Compare what two kinds of rank issue on one channel, in both orders."""
    job = sequences.job
    differences: list[str] = []
    node = -1
    ranks = (job.equivalence.representatives[kinds[0]], job.equivalence.representatives[kinds[1]])
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
    text = f"group {ranks_text(job.equivalence.channels[number].members)}: {differences[0]}{note}"
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
        for kind, rank in enumerate(job.equivalence.representatives):
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
                ranks = (job.equivalence.representatives[base], job.equivalence.representatives[kind])
                text = f"before world collective {turn}, rank {ranks[0]} has created {one} collective streams"
                return [f"{text} and rank {ranks[1]} {other}: their ids differ and ASTRA-sim hangs"]
    return []


_LISTED = 8
_SLOW_NETWORK_NS = 10**9


def no_deadlock(job: Job, report: Report) -> None:
    """ET021: with one communication at a time per rank, everything that is issued completes."""
    if report.has("ET007"):
        return
    talks = any(len(graph.p2p) for graph in job.classes)
    if job.is_uniform and not talks:
        return  # all ranks issue the same collectives in the same order
    programs = programs_of(job.workload, job.equivalence)
    if programs.num_nodes > job.replay_limit:
        report.note(
            f"not replayed: {programs.num_nodes:,} node executions exceed the limit of {job.replay_limit:,}"
        )
        return
    tasks, needed = programs.tasks, programs.needed
    fast = replay(tasks, needed, comm_ns=1)
    slow = replay(tasks, needed, comm_ns=_SLOW_NETWORK_NS, use_durations=False)
    stuck = [outcome for outcome in (fast, slow) if any(outcome.unfinished)]
    if stuck:
        _tell_stuck(job, report, programs, stuck[0], None if len(stuck) == 2 else Severity.WARNING)
        return
    orders = [replay([alone(task)], [1], comm_ns=1).issued[0] for task in tasks]
    cycle = order_cycle(tasks, orders)
    if cycle:
        places = "; ".join(_place(job, programs, place) for place in cycle[:_LISTED])
        text = (
            f"the orders in which ranks communicate contradict each other, which timing alone hides: {places}"
        )
        report.add(text, severity=Severity.WARNING)


def _tell_stuck(
    job: Job, report: Report, programs: Programs, outcome: Outcome, severity: Severity | None
) -> None:
    """The ranks that wait for each other; a rank that waits for nothing that will come is another rule's."""
    waiting: dict[int, Waiting] = {}
    for entry in outcome.waiting:  # a collective blocks the slot, a receive only what depends on it
        if entry.channel >= 0 or entry.task not in waiting:
            waiting[entry.task] = entry
    chain, closed = _wait_chain(job, waiting)
    if not closed and report.has("ET014", "ET015", "ET019", "ET020"):
        return
    hedge = "" if severity is None else " (if timing lets these orders happen)"
    steps = [
        f"{_place(job, programs, Place(entry.task, entry.node))} waits for rank "
        f"{job.equivalence.representatives[other] if other >= 0 else 'outside of the job'}"
        for entry, other in chain
    ]
    end = "which waits for the first" if closed else "which never gets there"
    first = chain[0][0] if chain else None
    rank = None if first is None else job.equivalence.representatives[first.task]
    node = None if first is None or rank is None else int(job.workload.graph_of(rank).id[first.node])
    unfinished = sum(
        size for size, left in zip(job.equivalence.sizes, outcome.unfinished, strict=True) if left
    )
    text = f"{unfinished:,} ranks never finish{hedge}: {', '.join(steps[:_LISTED])}, {end}"
    report.add(text, rank=rank, node=node, severity=severity)


def _wait_chain(job: Job, waiting: dict[int, Waiting]) -> tuple[list[tuple[Waiting, int]], bool]:
    """Who waits for whom, followed until it closes (then only the cycle) or ends."""
    if not waiting:
        return [], False
    task = min(waiting)
    chain: list[tuple[Waiting, int]] = []
    place: dict[int, int] = {}
    while task in waiting and task not in place:
        place[task] = len(chain)
        entry = waiting[task]
        task = _awaited(job, entry)
        chain.append((entry, task))
    return (chain[place[task] :], True) if task in place else (chain, False)


def _awaited(job: Job, entry: Waiting) -> int:
    """The kind of rank a waiting node needs, -1 for one outside of the job."""
    if entry.channel >= 0:
        missing = job.equivalence.channels[entry.channel].kinds - entry.arrived
        return min(missing, default=-1)
    rank = job.equivalence.representatives[entry.task]
    graph = job.workload.graph_of(rank)
    row = graph.p2p.node.tolist().index(entry.node)
    received = job.equivalence.receive_pairs[entry.task][int(graph.p2p.permutation[row])]
    return -1 if received is None else received[0].source_kind


def _place(job: Job, programs: Programs, place: Place) -> str:
    """``rank 0 in node 5 (all-reduce over [0, 1])``."""
    rank = job.equivalence.representatives[place.task]
    graph = job.workload.graph_of(rank)
    node = int(graph.id[place.node])
    channel = programs.tasks[place.task].channel.get(place.node)
    if channel is None:
        what = graph.node_name(place.node) or "message"
        return f"rank {rank} in node {node} ({what})"
    row = graph.collectives.node.tolist().index(place.node)
    kind = collective_name(int(graph.collectives.kind[row]))
    # The group of this very rank, which may be another of the same kind than the channel shows.
    groups = _members(job, graph, rank, int(graph.collectives.group_set[row]))
    return f"rank {rank} in node {node} ({kind} over {ranks_text(groups)})"


def _members(job: Job, graph: OpGraph, rank: int, row: int) -> list[int]:
    if row < 0:
        return list(range(job.workload.num_ranks))
    groups = graph.group_sets[row]
    members: list[int] = groups.members(groups.group_of(rank)).tolist()
    return members
