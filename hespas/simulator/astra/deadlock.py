"""Why ranks never finish: which node of which rank waits for whom, and the rule that is broken.

ASTRA-sim prints nothing of such ranks and ends with exit code 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hespas.graph import CollectiveKind, Diagnostics
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import CheckFailedError
from hespas.simulator.astra.plans import collective_name
from hespas.simulator.astra.ranks import Issued, Rank
from hespas.simulator.astra.runs import NEVER
from hespas.simulator.astra.traces import Action, Slot

__all__ = ["Stuck", "check_finished", "stuck_nodes"]

_CODE = "simulate.deadlock"
_CAUSES = ("ET007", "ET020", "ET029", "ET015", "ET019", "starved", "ET021")
"""Rules by how much a break of them explains: the last ones follow from others."""
_SLOT_NAMES = {Slot.CPU: "CPU", Slot.COMPUTE: "computation", Slot.COMMUNICATION: "communication"}
_HINT = "hespas-validate check DIR --profile astra-sim lists all rules that are broken"


@dataclass(frozen=True, slots=True)
class Stuck:
    """A node that never ends: the rule that is broken (or follows), and what it waits for."""

    rule: str
    rank: int
    place: int
    node: int
    label: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.label} {self.reason}"


def check_finished(ranks: Sequence[Rank], diagnostics: Diagnostics) -> None:
    """Raise ``CheckFailedError`` where a rank does not run all its nodes; findings say what it waits for."""
    unfinished = [rank for rank in ranks if rank.ended < len(rank.trace.trace)]
    if not unfinished:
        return
    found = sorted(stuck_nodes(ranks), key=lambda each: (_CAUSES.index(each.rule), each.rank, each.place))
    for each in found:
        rule = "" if each.rule == "starved" else f"{each.rule}: "
        diagnostics.add(
            _CODE, Severity.ERROR, f"rank {each.rank}: {each.label}", rule + each.reason,
            rank=each.rank, node=each.node,
        )  # fmt: skip
    numbers = [rank.trace.rank for rank in unfinished]
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    first = found[0]
    raise CheckFailedError(
        f"{len(numbers):,} of {len(ranks):,} ranks never finish ({shown}); {first}",
        code="" if first.rule == "starved" else first.rule,
        position=f"rank {first.rank}, node {first.node}",
        hint=_HINT,
    )


def stuck_nodes(ranks: Sequence[Rank]) -> list[Stuck]:
    """What waits for ever: nodes that were issued, those whose slot they hold, and ranks where none was."""
    by_rank = {rank.trace.rank: rank for rank in ranks}
    found: list[Stuck] = []
    for rank in ranks:
        if rank.ended < len(rank.trace.trace):
            found += _stuck_on(rank, by_rank)
    return found


def _stuck_on(rank: Rank, by_rank: dict[int, Rank]) -> Iterator[Stuck]:
    trace = rank.trace.trace
    flying = rank.flying()
    holders = {trace.slot[place]: place for place in flying}
    issued = {each.place: each for each in rank.issued}
    for place in flying:
        if place in issued:
            yield from _collective(rank, issued[place], by_rank)
        elif trace.action[place] == Action.RECEIVE:
            yield _receive(rank, place, by_rank)
    for place in rank.ready():
        holder = holders.get(trace.slot[place])
        if holder is None:
            reason = "is ready, and nothing that ends wakes it: what it waited for ended at once"
            yield _at(rank, place, "starved", reason)
        else:
            slot = _SLOT_NAMES[Slot(trace.slot[place])]
            reason = f"waits for the {slot} slot, which {trace.label(holder)} holds"
            yield _at(rank, place, "ET021", reason)
    if not flying and not rank.ready():
        place = next(at for at, end in enumerate(rank.end_ns) if end == NEVER)
        yield _at(rank, place, "ET007", "waits for itself through others: dependencies form a cycle")


def _at(rank: Rank, place: int, rule: str, reason: str) -> Stuck:
    trace = rank.trace.trace
    return Stuck(
        rule, rank.trace.rank, place, int(trace.graph.id[trace.node[place]]), trace.label(place), reason
    )


def _receive(rank: Rank, place: int, by_rank: dict[int, Rank]) -> Stuck:
    message, peer = rank.trace.trace.messages[place], rank.trace.peers[place]
    sender = by_rank.get(peer)
    what = f"{message.size:,} bytes with tag {message.tag} from rank {peer}"
    if sender is None:
        return _at(rank, place, "ET015", f"waits for {what}, which is not there")
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
        return _at(rank, place, "ET021", f"waits for {what}, whose {theirs.label(late[0])} is never issued")
    if exact:
        return _at(rank, place, "ET015", f"waits for one more message of {what}, which sends {len(exact)}")
    if meant:
        sizes = ", ".join(f"{theirs.messages[at].size:,}" for at in meant[:3])
        return _at(rank, place, "ET015", f"waits for {what}, which sends {sizes} bytes with that tag")
    return _at(rank, place, "ET015", f"waits for {what}, which sends none such")


def _collective(rank: Rank, issued: Issued, by_rank: dict[int, Rank]) -> Iterator[Stuck]:
    """One finding per reason: what a member does instead."""
    number = sum(1 for each in rank.issued if each.group == issued.group and each.place != issued.place)
    members = issued.plan.group or range(len(by_rank))
    for member in members:
        other = by_rank.get(member)
        if member == rank.trace.rank or other is None:
            continue
        verdict = _against(issued, number, other)
        if verdict is not None:
            rule, reason = verdict
            yield _at(rank, issued.place, rule, f"({_told(issued)}) waits for rank {member}, {reason}")
            return
    yield _at(rank, issued.place, "ET021", f"({_told(issued)}) waits for the messages of other ranks")


def _told(issued: Issued) -> str:
    where = f"group {issued.group}" if issued.group else "all ranks"
    return f"{collective_name(issued.plan.kind)} of {where}"


def _against(issued: Issued, number: int, other: Rank) -> tuple[str, str] | None:
    """The rule that is broken between a collective, the ``number``-th of its group, and a member; None where
    the member is in it too.
    """
    theirs = [each for each in other.issued if each.group == issued.group]
    trace = other.trace.trace
    if len(theirs) > number:
        same = theirs[number]
        if (same.plan.kind, same.plan.phases, same.plan.streams) != (
            issued.plan.kind, issued.plan.phases, issued.plan.streams,
        ):  # fmt: skip
            size = trace.collectives[same.place].size
            name = collective_name(same.plan.kind)
            return "ET020", f"which runs {trace.label(same.place)} there, {name} of {size:,} bytes"
        if same.first_stream != issued.first_stream:
            counts = f"{same.first_stream:,} and {issued.first_stream:,}"
            return "ET029", f"which created another number of chunks before ({counts}): they do not match"
        return None
    total = sum(
        1
        for each in trace.collectives.values()
        if each.kind is not CollectiveKind.BROADCAST
        and other.trace.groups.get(each.row, (0, ()))[0] == issued.group
    )
    if total <= number:
        return "ET020", f"which has only {total:,} collectives there"
    busy = next((each for each in other.issued if other.end_ns[each.place] == NEVER), None)
    if busy is not None:
        return "ET021", f"which waits in {trace.label(busy.place)} ({_told(busy)}) before it"
    return "ET021", "which never comes to it"
