"""Rules of order across ranks: equal sequences of collectives and streams, and no deadlock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, zip_longest

import numpy as np

from hespas.graph import CollectiveKind, OpGraph, Severity
from hespas.validators.checker.job import CheckedJob, RuleReport
from hespas.validators.checker.replay import BlockedNode, CommNode, order_cycle, replay
from hespas.validators.checker.rules.collectives import collective_name, ranks_text
from hespas.validators.checker.rules.messages import RankPrograms, isolated, programs_of

__all__ = ["no_deadlock", "same_sequence", "same_streams"]

_Collective = tuple[int, float, float]
"""Kind, bytes and executions of a collective; -1 is unknown."""
_Run = tuple[_Collective, int]
"""Equal neighbours as one collective, and the first node."""
_MAX_LISTED = 8
_SLOW_NETWORK_NS = 10**9


class _CollectiveSequences:
    """Collectives of each rank class by node, and the order in which each kind of rank issues them on each
    channel (process group).
    """

    def __init__(self, job: CheckedJob) -> None:
        self.job = job
        self.collectives: list[dict[int, _Collective]] = []
        for graph in job.classes:
            table = graph.collectives
            nodes: list[int] = table.node.tolist()
            kinds: list[int] = table.kind.tolist()
            runs = graph.executions[table.node]
            sizes: list[float] = np.where(np.isnan(table.comm_bytes), -1.0, table.comm_bytes).tolist()
            times: list[float] = np.where(np.isnan(runs), -1.0, runs).tolist()
            rows = zip(kinds, sizes, times, strict=True)
            self.collectives.append(dict(zip(nodes, rows, strict=True)))

    def runs(self, kind: int, channel: int, order_name: str) -> list[_Run]:
        """Return the collectives that ranks of a kind issue on a channel (process group), in order.

        ``order_name`` is a field of :class:`IssueOrder`. Equal collectives in succession are merged to one
        entry, and their numbers of executions are added.
        """
        index = int(self.job.workload.rank_class[self.job.equivalence.representatives[kind]])
        collectives = self.collectives[index]
        rows = self.job.equivalence.channel_rows[kind]
        table = self.job.classes[index].collectives
        nodes: list[int] = table.node.tolist()
        sets: list[int] = table.group_set.tolist()
        on_channel = {node for node, row in zip(nodes, sets, strict=True) if rows[row] == channel}
        order: tuple[int, ...] = getattr(self.job.orders[index], order_name)
        merged: list[_Run] = []
        issued = (node for node in order if node in on_channel)
        for (comm_kind, size), group in groupby(issued, key=lambda node: collectives[node][:2]):
            members = list(group)
            times = sum(max(collectives[node][2], 0.0) for node in members)
            merged.append(((comm_kind, size, times), members[0]))
        return merged


def same_sequence(job: CheckedJob, report: RuleReport) -> None:
    """ET020: all members of a group issue the same collectives on it: equal kinds, sizes and order."""
    if job.is_uniform or report.has("ET007"):
        return
    sequences = _CollectiveSequences(job)
    used: set[int] = set()
    for kind, rank in enumerate(job.equivalence.representatives):
        sets: set[int] = set(job.workload.graph_of(rank).collectives.group_set.tolist())
        used |= {job.equivalence.channel_rows[kind][row] for row in sets}
    for number, channel in enumerate(job.equivalence.channels):
        kinds = sorted(channel.kinds)
        for kind in kinds[1:] if number in used else ():
            _compare_sequences(report, sequences, number, (kinds[0], kind))


def _compare_sequences(
    report: RuleReport, sequences: _CollectiveSequences, channel: int, kinds: tuple[int, int]
) -> None:
    """Compare the collectives that two kinds of ranks issue on one channel, by both orders of
    :class:`IssueOrder`.
    """
    job = sequences.job
    differences: list[tuple[str, int]] = []
    ranks = (job.equivalence.representatives[kinds[0]], job.equivalence.representatives[kinds[1]])
    for order_name in ("by_time", "by_id"):
        left, right = (sequences.runs(kind, channel, order_name) for kind in kinds)
        for position, (one, other) in enumerate(zip_longest(left, right)):
            if one is None or other is None or one[0] != other[0]:
                texts = [
                    _run_text(job.workload.graph_of(rank), run)
                    for rank, run in zip(ranks, (one, other), strict=True)
                ]
                text = (
                    f"collective {position} is {texts[0]} on rank {ranks[0]} "
                    f"but {texts[1]} on rank {ranks[1]}"
                )
                node = -1 if other is None else int(job.workload.graph_of(ranks[1]).id[other[1]])
                differences.append((text, node))
                break
    if not differences:
        return
    is_certain = len(differences) == 2
    note = "" if is_certain else " (in one of the orders that timing allows)"
    text = f"group {ranks_text(job.equivalence.channels[channel].members)}: {differences[0][0]}{note}"
    known_node = next((node for _, node in differences if node >= 0), None)
    report.add(text, rank=ranks[1], node=known_node, severity=None if is_certain else Severity.WARNING)


def _run_text(graph: OpGraph, run: _Run | None) -> str:
    if run is None:
        return "missing"
    (kind, size, times), node = run
    bytes_text = "unknown size" if size < 0 else f"{size:,.0f} bytes"
    repeated = "" if times == 1 else f", {times:,.0f} times"
    return f"{collective_name(kind)} of {bytes_text}{repeated} (node {int(graph.id[node])})"


def same_streams(job: CheckedJob, report: RuleReport) -> None:
    """ET029: before each world collective, all ranks have created the same number of streams."""
    if job.is_uniform or report.has("ET007"):
        return
    different: list[str] = []
    representatives = job.equivalence.representatives
    for order_name in ("by_time", "by_id"):
        counts: list[list[int]] = []
        for rank in representatives:
            index = int(job.workload.rank_class[rank])
            order: tuple[int, ...] = getattr(job.orders[index], order_name)
            # A collective creates one stream per split (network model, section 3), or one if the number of
            # splits is unknown.
            graph = job.classes[index]
            table = graph.collectives
            nodes: list[int] = table.node.tolist()
            row_of = {node: row for row, node in enumerate(nodes)}
            num_ranks = job.workload.num_ranks
            # A group of all ranks that has a name counts its streams like any other group.
            worlds = [
                groups.is_world(num_ranks) and not groups.communicator for groups in graph.group_sets
            ] + [True]
            splits = None if job.system is None else job.system.dataset_splits
            created, before_world = 0, list[int]()
            for node in order:
                row = row_of[node]
                if worlds[int(table.group_set[row])]:
                    before_world.append(created)
                size = float(table.comm_bytes[row])
                if splits is None or not size >= 1:
                    created += 1
                    continue
                total = int(size)
                chunk = total // splits
                if int(table.kind[row]) != CollectiveKind.ALL_GATHER and chunk < num_ranks:
                    chunk, total = num_ranks, splits * num_ranks
                created += -(-total // chunk) if chunk else 1
            counts.append(before_world)
        difference = next(
            (
                f"before world collective {number}, rank {representatives[0]} has created {one} collective "
                f"streams and rank {rank} {other}: their ids differ and ASTRA-sim hangs"
                for rank, created in zip(representatives, counts, strict=True)
                for number, (one, other) in enumerate(zip(counts[0], created, strict=False))
                if one != other
            ),
            "",
        )
        different += [difference] if difference else []
    if different:
        report.add(different[0], severity=None if len(different) == 2 else Severity.WARNING)


def no_deadlock(job: CheckedJob, report: RuleReport) -> None:
    """ET021: with one communication at a time per rank, everything that is issued completes."""
    if report.has("ET007"):
        return
    has_messages = any(len(graph.p2p) for graph in job.classes)
    if job.is_uniform and not has_messages:
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
    deadlocks = [outcome for outcome in (fast, slow) if any(outcome.unfinished)]
    if deadlocks:
        severity = None if len(deadlocks) == 2 else Severity.WARNING
        outcome = deadlocks[0]
        blocked: dict[int, BlockedNode] = {}
        for entry in outcome.blocked:  # a collective blocks the slot, a receive only its dependents
            if entry.channel >= 0 or entry.task not in blocked:
                blocked[entry.task] = entry
        chain: list[tuple[BlockedNode, int]] = []
        position: dict[int, int] = {}
        task = min(blocked, default=-1)
        while task in blocked and task not in position:
            position[task] = len(chain)
            entry = blocked[task]
            if entry.channel >= 0:
                missing = job.equivalence.channels[entry.channel].kinds - entry.arrived
                task = min(missing, default=-1)
            else:
                awaited_rank = job.equivalence.representatives[entry.task]
                graph = job.workload.graph_of(awaited_rank)
                received_node = programs.tasks[entry.task].program.node[entry.position]
                row = graph.p2p.node.tolist().index(received_node)
                received = job.equivalence.receive_pairs[entry.task][int(graph.p2p.permutation[row])]
                task = -1 if received is None else received[0].source_kind
            chain.append((entry, task))
        is_cycle = task in position
        chain = chain[position[task] :] if is_cycle else chain
        if is_cycle or not report.has("ET014", "ET015", "ET019", "ET020"):
            hedge = "" if severity is None else " (if timing leads to these orders)"
            steps = [
                f"{_node_text(job, programs, CommNode(entry.task, entry.position))} waits for rank "
                f"{job.equivalence.representatives[other] if other >= 0 else 'outside of the job'}"
                for entry, other in chain
            ]
            end = "which waits for the first" if is_cycle else "which never arrives"
            first = chain[0][0] if chain else None
            rank = node = None
            if first is not None:
                rank = job.equivalence.representatives[first.task]
                at = programs.tasks[first.task].program.node[first.position]
                node = int(job.workload.graph_of(rank).id[at])
            unfinished = sum(
                size for size, left in zip(job.equivalence.sizes, outcome.unfinished, strict=True) if left
            )
            deadlock = f"{unfinished:,} ranks never finish{hedge}: {', '.join(steps[:_MAX_LISTED])}, {end}"
            report.add(deadlock, rank=rank, node=node, severity=severity)
        return
    orders = [replay([isolated(task)], [1], comm_ns=1).issued[0] for task in tasks]
    cycle = order_cycle(tasks, orders)
    if cycle:
        nodes = "; ".join(_node_text(job, programs, node) for node in cycle[:_MAX_LISTED])
        text = f"the communication orders of ranks contradict each other, which only timing hides: {nodes}"
        report.add(text, severity=Severity.WARNING)


def _node_text(job: CheckedJob, programs: RankPrograms, comm: CommNode) -> str:
    """Return a text such as ``rank 0 in node 5 (all-reduce over [0, 1])``."""
    rank = job.equivalence.representatives[comm.task]
    graph = job.workload.graph_of(rank)
    task = programs.tasks[comm.task]
    at = task.program.node[comm.position]
    node = int(graph.id[at])
    if comm.position not in task.channel:
        return f"rank {rank} in node {node} ({graph.node_name(at) or 'message'})"
    row = graph.collectives.node.tolist().index(at)
    kind = collective_name(int(graph.collectives.kind[row]))
    # List the group of this rank, because the channel may list an equivalent group.
    members: Sequence[int] = range(job.workload.num_ranks)
    group_set = int(graph.collectives.group_set[row])
    if group_set >= 0:
        groups = graph.group_sets[group_set]
        members = groups.members(groups.group_of(rank)).tolist()
    return f"rank {rank} in node {node} ({kind} over {ranks_text(members)})"
