"""Deadlocks: a replay with one communication at a time per rank, and contradictions between orders."""

from __future__ import annotations

from hespas.graph import OpGraph, Severity
from hespas.validators.job import Job, Report
from hespas.validators.orders import Place, order_cycle
from hespas.validators.programs import Programs, alone, programs_of
from hespas.validators.replay import Outcome, Waiting, replay
from hespas.validators.rules.collectives import collective_name
from hespas.validators.rules.groups import ranks_text

__all__ = ["no_deadlock"]

_LISTED = 8
_SLOW_NETWORK_NS = 10**9


def no_deadlock(job: Job, report: Report) -> None:
    """ET021: with one communication at a time per rank, everything that is issued completes."""
    if report.has("ET007"):
        return
    talks = any(len(graph.p2p) for graph in job.classes)
    if job.is_uniform and not talks:
        return  # all ranks issue the same collectives in the same order
    programs = programs_of(job.workload, job.quotient)
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
        f"{job.quotient.representatives[other] if other >= 0 else 'outside of the job'}"
        for entry, other in chain
    ]
    end = "which waits for the first" if closed else "which never gets there"
    first = chain[0][0] if chain else None
    rank = None if first is None else job.quotient.representatives[first.task]
    node = None if first is None or rank is None else int(job.workload.graph_of(rank).id[first.node])
    unfinished = sum(size for size, left in zip(job.quotient.sizes, outcome.unfinished, strict=True) if left)
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
        missing = job.quotient.channels[entry.channel].kinds - entry.arrived
        return min(missing, default=-1)
    rank = job.quotient.representatives[entry.task]
    graph = job.workload.graph_of(rank)
    row = graph.p2p.node.tolist().index(entry.node)
    received = job.quotient.receive_pairs[entry.task][int(graph.p2p.permutation[row])]
    return -1 if received is None else received[0].source_kind


def _place(job: Job, programs: Programs, place: Place) -> str:
    """``rank 0 in node 5 (all-reduce over [0, 1])``."""
    rank = job.quotient.representatives[place.task]
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
