"""Deadlocks in ASTRA-sim: the nodes that never end, the ranks they wait for, and the violated rule.

ASTRA-sim prints nothing about deadlocked ranks and exits with code 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hespas.graph import CollectiveKind, Diagnostics
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import CheckFailedError
from hespas.simulator.astra.events import NEVER, Slot
from hespas.simulator.astra.plans import collective_name
from hespas.simulator.astra.ranks import AstraRank, IssuedCollective
from hespas.simulator.astra.traces import Action

__all__ = ["DeadlockedNode", "check_finished", "deadlocked_nodes"]

_CODE = "simulate.deadlock"
_CAUSES = ("ET007", "ET020", "ET029", "ET015", "ET019", "starved", "ET021")
"""Rules in order of how much their violation explains: later ones can follow from earlier ones."""
_SLOT_NAMES = {Slot.CPU: "CPU", Slot.COMPUTE: "computation", Slot.COMMUNICATION: "communication"}
_HINT = "run hespas-validate check DIR --profile astra-sim to list all violated rules"


@dataclass(frozen=True, slots=True)
class DeadlockedNode:
    """Node that never ends, for the error message of a deadlock.

    ``rule`` is the rule of ASTRA-sim that the node violates. If the node only waits for a violation
    elsewhere, it is the rule violated there. ``reason`` describes what the node waits for. ``position`` is
    the index of the node in the trace of its rank, from 0.
    """

    rule: str
    rank: int
    position: int
    node: int
    label: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.label} {self.reason}"


def check_finished(ranks: Sequence[AstraRank], diagnostics: Diagnostics) -> None:
    """Raise ``CheckFailedError`` if a rank does not run all of its nodes; diagnostics list what it waits
    for.
    """
    unfinished = [rank for rank in ranks if rank.ended < len(rank.trace.trace)]
    if not unfinished:
        return
    nodes = sorted(
        deadlocked_nodes(ranks), key=lambda node: (_CAUSES.index(node.rule), node.rank, node.position)
    )
    for node in nodes:
        rule = "" if node.rule == "starved" else f"{node.rule}: "
        diagnostics.add(
            _CODE, Severity.ERROR, f"rank {node.rank}: {node.label}", rule + node.reason,
            rank=node.rank, node=node.node,
        )  # fmt: skip
    numbers = [rank.trace.rank for rank in unfinished]
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    first = nodes[0]
    raise CheckFailedError(
        f"{len(numbers):,} of {len(ranks):,} ranks never finish ({shown}); {first}",
        code="" if first.rule == "starved" else first.rule,
        position=f"rank {first.rank}, node {first.node}",
        hint=_HINT,
    )


def deadlocked_nodes(ranks: Sequence[AstraRank]) -> list[DeadlockedNode]:
    """Return the nodes that never end, for the error message. They are the nodes that were issued, and the
    nodes that wait for a slot that an issued node occupies. For a rank that has issued no node, they include
    one of its nodes.
    """
    by_rank = {rank.trace.rank: rank for rank in ranks}
    nodes: list[DeadlockedNode] = []
    for rank in ranks:
        if rank.ended < len(rank.trace.trace):
            nodes += _deadlocked_on(rank, by_rank)
    return nodes


def _deadlocked_on(rank: AstraRank, by_rank: dict[int, AstraRank]) -> Iterator[DeadlockedNode]:
    trace = rank.trace.trace
    flying = rank.flying()
    holders = {trace.slot[position]: position for position in flying}
    issued = {collective.position: collective for collective in rank.issued}
    for position in flying:
        if position in issued:
            yield from _collective(rank, issued[position], by_rank)
        elif trace.action[position] == Action.RECEIVE:
            yield _receive(rank, position, by_rank)
    for position in rank.ready():
        holder = holders.get(trace.slot[position])
        if holder is None:
            reason = "is ready, but no ending node triggers it: its dependencies ended at once"
            yield _at(rank, position, "starved", reason)
        else:
            slot = _SLOT_NAMES[Slot(trace.slot[position])]
            reason = f"waits for the {slot} slot, which {trace.label(holder)} occupies"
            yield _at(rank, position, "ET021", reason)
    if not flying and not rank.ready():
        position = next(at for at, end in enumerate(rank.end_ns) if end == NEVER)
        yield _at(rank, position, "ET007", "waits for itself: dependencies form a cycle")


def _at(rank: AstraRank, position: int, rule: str, reason: str) -> DeadlockedNode:
    trace = rank.trace.trace
    return DeadlockedNode(
        rule,
        rank.trace.rank,
        position,
        int(trace.graph.id[trace.node[position]]),
        trace.label(position),
        reason,
    )


def _receive(rank: AstraRank, position: int, by_rank: dict[int, AstraRank]) -> DeadlockedNode:
    message, peer = rank.trace.trace.messages[position], rank.trace.peers[position]
    sender = by_rank.get(peer)
    what = f"{message.size:,} bytes with tag {message.tag} from rank {peer}"
    if sender is None:
        return _at(rank, position, "ET015", f"waits for {what}, which is absent")
    theirs = sender.trace.trace
    sends = [
        at
        for at in theirs.messages
        if theirs.action[at] == Action.SEND and sender.trace.peers[at] == rank.trace.rank
    ]
    meant = [at for at in sends if theirs.messages[at].tag == message.tag]
    exact = [at for at in meant if theirs.messages[at].size == message.size]
    late = [at for at in exact if sender.start_ns[at] == NEVER]
    if late:
        return _at(
            rank, position, "ET021", f"waits for {what}, whose {theirs.label(late[0])} is never issued"
        )
    if exact:
        return _at(rank, position, "ET015", f"waits for one more message of {what}, which sends {len(exact)}")
    if meant:
        sizes = ", ".join(f"{theirs.messages[at].size:,}" for at in meant[:3])
        return _at(rank, position, "ET015", f"waits for {what}, which sends {sizes} bytes with that tag")
    return _at(rank, position, "ET015", f"waits for {what}, which sends no such message")


def _collective(
    rank: AstraRank, issued: IssuedCollective, by_rank: dict[int, AstraRank]
) -> Iterator[DeadlockedNode]:
    """Yield one finding for each reason why an issued collective never ends: a member of its group that does
    not take part.
    """
    number = sum(
        1 for earlier in rank.issued if earlier.group == issued.group and earlier.position != issued.position
    )
    members = issued.plan.group or range(len(by_rank))
    for member in members:
        other = by_rank.get(member)
        if member == rank.trace.rank or other is None:
            continue
        verdict = _compare_with_member(issued, number, other)
        if verdict is not None:
            rule, reason = verdict
            yield _at(
                rank,
                issued.position,
                rule,
                f"({_describe_collective(issued)}) waits for rank {member}, {reason}",
            )
            return
    yield _at(
        rank,
        issued.position,
        "ET021",
        f"({_describe_collective(issued)}) waits for the messages of other ranks",
    )


def _describe_collective(issued: IssuedCollective) -> str:
    where = f"group {issued.group}" if issued.group else "all ranks"
    return f"{collective_name(issued.plan.kind)} of {where}"


def _compare_with_member(issued: IssuedCollective, number: int, other: AstraRank) -> tuple[str, str] | None:
    """Compare a collective that one rank has issued with the collectives of another member of its group.

    ``issued`` is the collective, ``number`` its index among the collectives of the group, and ``other`` is
    the other member. Return the violated rule and a description, or None if ``other`` takes part in the
    collective.
    """
    theirs = [collective for collective in other.issued if collective.group == issued.group]
    trace = other.trace.trace
    if len(theirs) > number:
        same = theirs[number]
        if (same.plan.kind, same.plan.phases, same.plan.streams) != (
            issued.plan.kind, issued.plan.phases, issued.plan.streams,
        ):  # fmt: skip
            size = trace.collectives[same.position].size
            name = collective_name(same.plan.kind)
            return "ET020", f"which runs {trace.label(same.position)} instead, {name} of {size:,} bytes"
        if same.first_stream != issued.first_stream:
            counts = f"{same.first_stream:,} and {issued.first_stream:,}"
            return "ET029", f"which created a different number of chunks before ({counts})"
        return None
    total = sum(
        1
        for collective in trace.collectives.values()
        if collective.kind is not CollectiveKind.BROADCAST
        and other.trace.groups.get(collective.row, (0, ()))[0] == issued.group
    )
    if total <= number:
        return "ET020", f"which has only {total:,} collectives in that group"
    busy = next(
        (collective for collective in other.issued if other.end_ns[collective.position] == NEVER), None
    )
    if busy is not None:
        return "ET021", f"which waits in {trace.label(busy.position)} ({_describe_collective(busy)}) before"
    return "ET021", "which never reaches it"
