"""What the representative of each kind of rank does, ready to be replayed or ordered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isnan
from typing import NamedTuple

import numpy as np

from hespas.graph import NodeKind, OpGraph, Permutation, Workload
from hespas.validators.checker.job import Job, Report
from hespas.validators.checker.rank_equivalence import Pair, RankEquivalence
from hespas.validators.checker.replay import Key, NodeProgram, Task
from hespas.validators.checker.rules.nodes import is_kind

__all__ = [
    "TAG_MODULUS",
    "Label",
    "Message",
    "Programs",
    "alone",
    "messages_described",
    "messages_matched",
    "messages_of",
    "programs_of",
    "tags_distinct",
]

TAG_MODULUS = 500_000_000
"""ASTRA-sim's tag space for messages; larger tags wrap."""


class Label(NamedTuple):
    """What tells messages between the same ranks apart; size is -1 where unknown."""

    permute: bool
    tag: int
    size: float


@dataclass(frozen=True, slots=True)
class Message:
    """One side of a message of a representative.

    ``peer`` is the other rank; ``pair`` and ``label`` are what the two sides are matched by; ``times`` counts
    executions per step.
    """

    node: int
    is_send: bool
    pair: Pair
    peer: int
    label: Label
    times: float

    @property
    def key(self) -> Key:
        """What a send and its receive have in common."""
        return self.pair, self.label


@dataclass(frozen=True, slots=True, eq=False)
class Programs:
    """Tasks per kind, and how many tasks each channel waits for."""

    tasks: tuple[Task, ...]
    needed: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """Node executions of one replay."""
        return sum(len(task.program) for task in self.tasks)


def messages_of(graph: OpGraph, equivalence: RankEquivalence, kind: int) -> Iterator[Message]:
    """Both sides of all messages that leave or reach the representative of a kind, in node order."""
    table = graph.p2p
    nodes: list[int] = table.node.tolist()
    permutations: list[int] = table.permutation.tolist()
    sizes: list[float] = table.comm_bytes.tolist()
    tags: list[int] = table.tag.tolist()
    node_kinds: list[int] = graph.kind[table.node].tolist()
    times: list[float] = graph.multiplicity[table.node].tolist()
    talks: list[bool] = ((table.permutation >= 0) & ~table.host).tolist()
    for row, node in enumerate(nodes):
        if not talks[row] or times[row] == 0:
            continue
        permutation, size, node_kind, count = permutations[row], sizes[row], node_kinds[row], times[row]
        label = Label(node_kind == NodeKind.PERMUTE, tags[row] % TAG_MODULUS, -1.0 if isnan(size) else size)
        repeated = 1.0 if isnan(count) else count
        sent = equivalence.send_pairs[kind][permutation]
        received = equivalence.receive_pairs[kind][permutation]
        if sent is not None and node_kind in (NodeKind.SEND, NodeKind.PERMUTE):
            yield Message(node, True, sent[0], sent[1], label, repeated)
        if received is not None and node_kind in (NodeKind.RECV, NodeKind.PERMUTE):
            yield Message(node, False, received[0], received[1], label, repeated)


def programs_of(workload: Workload, equivalence: RankEquivalence) -> Programs:
    """The tasks of all kinds of ranks of a complete job."""
    programs: dict[int, NodeProgram] = {}
    tasks: list[Task] = []
    for kind, rank in enumerate(equivalence.representatives):
        index = int(workload.rank_class[rank])
        graph = workload.classes[index]
        if index not in programs:
            programs[index] = NodeProgram.of(graph)
        tasks.append(_task(graph, programs[index], equivalence, kind))
    needed = tuple(len(channel.kinds) + bool(channel.absent) for channel in equivalence.channels)
    return Programs(tuple(tasks), needed)


def alone(task: Task) -> Task:
    """The same task where nobody makes it wait: every collective meets on channel 0, messages are there."""
    channel = dict.fromkeys(task.channel, 0)
    received = task.receives.keys() - task.sends.keys()
    return Task(task.program, channel, task.sends, {}, task.skipped | received)


def _task(graph: OpGraph, program: NodeProgram, equivalence: RankEquivalence, kind: int) -> Task:
    rows = equivalence.channel_rows[kind]
    never = graph.multiplicity == 0
    nodes: list[int] = graph.collectives.node.tolist()
    sets: list[int] = graph.collectives.group_set.tolist()
    collectives = zip(nodes, sets, strict=True)
    channel = {node: rows[row] for node, row in collectives if rows[row] >= 0 and not never[node]}
    messages = list(messages_of(graph, equivalence, kind))
    sends = {message.node: message.key for message in messages if message.is_send}
    receives = {message.node: message.key for message in messages if not message.is_send}
    talking = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)
    idle: list[int] = np.flatnonzero(never | np.isin(graph.kind, [int(entry) for entry in talking])).tolist()
    busy = channel.keys() | sends.keys() | receives.keys()
    return Task(program, channel, sends, receives, frozenset(idle) - busy)


_ONE_WAY = (NodeKind.SEND, NodeKind.RECV)


def messages_described(job: Job, report: Report) -> None:
    """ET014: a send or receive states peer, tag and size, and its peer is another rank of the job."""
    for index, graph in enumerate(job.classes):
        table = graph.p2p
        talks = np.flatnonzero(is_kind(graph, *_ONE_WAY, NodeKind.PERMUTE))
        report.nodes(index, np.setdiff1d(talks, table.node), "a message states neither peer nor size")
        one_way = np.isin(graph.kind[table.node], [int(kind) for kind in _ONE_WAY]) & ~table.host
        unstated = one_way & (table.permutation < 0)
        report.nodes(index, table.node[unstated], "a message does not state its peer")
        report.nodes(index, table.node[np.isnan(table.comm_bytes)], "a message does not state its size")
        if job.profile is not None:
            untagged = table.node[one_way & (table.tag < 0)]
            report.nodes(index, untagged, "a message does not state its tag")
        for row, permutation in enumerate(graph.permutations):
            _peers(job, report, index, row, permutation)


def _peers(job: Job, report: Report, index: int, row: int, permutation: Permutation) -> None:
    """Faults of the peers that one permutation gives the ranks of one class."""
    graph = job.classes[index]
    users = graph.p2p.node[graph.p2p.permutation == row]
    ranks: set[int] = set(job.ranks_of(index).tolist())
    total = job.num_ranks
    pairs = list(permutation) if len(ranks) > 1 or permutation.pairs is not None else _own(permutation, ranks)
    for side, kind in enumerate(_ONE_WAY):
        nodes = users[graph.kind[users] == int(kind)]
        if not len(nodes):
            continue
        mine = [pair for pair in pairs if pair[side] in ranks]
        if not mine:
            whom = "sends" if kind is NodeKind.SEND else "receives"
            report.nodes(index, nodes, f"none of its ranks is the one that {whom}, by its source and target")
        to_itself = [source for source, target in mine if source == target]
        if to_itself:
            report.nodes(index, nodes, "its peer is its own rank", rank=to_itself[0])
        outside = [pair for pair in mine if total > 0 and not 0 <= pair[1 - side] < total]
        if outside:
            report.nodes(
                index,
                nodes,
                f"its peer {outside[0][1 - side]} is not one of the {total:,} ranks",
                rank=outside[0][side],
            )


def _own(permutation: Permutation, ranks: set[int]) -> list[tuple[int, int]]:
    """The pairs of a symbolic permutation that concern a few ranks."""
    pairs = {(rank, permutation.target_of(rank)) for rank in ranks}
    pairs |= {(permutation.source_of(rank), rank) for rank in ranks}
    return sorted(pair for pair in pairs if min(pair) >= 0)


def tags_distinct(job: Job, report: Report) -> None:
    """ET036: tags stay below ASTRA-sim's modulus, where no two of them meet."""
    for index, graph in enumerate(job.classes):
        large = graph.p2p.node[graph.p2p.tag >= TAG_MODULUS]
        report.nodes(index, large, f"its tag is taken modulo {TAG_MODULUS:,}")


@dataclass(slots=True)
class _Side:
    """Messages of one direction between two ranks: how many of each label, and a node."""

    counts: Counter[Label] = field(default_factory=Counter[Label])
    node: dict[Label, int] = field(default_factory=dict[Label, int])

    def add(self, message: Message, node_id: int) -> None:
        self.counts[message.label] += round(message.times)
        self.node.setdefault(message.label, node_id)


def messages_matched(job: Job, report: Report) -> None:
    """ET015: every send has exactly one receive of the same source, target, tag and size, and the reverse."""
    equivalence = job.equivalence
    sides: dict[Pair, tuple[_Side, _Side]] = {}
    ends: dict[Pair, tuple[int, int]] = {}
    for kind, rank in enumerate(equivalence.representatives):
        graph = job.workload.graph_of(rank)
        for message in messages_of(graph, equivalence, kind):
            both = sides.setdefault(message.pair, (_Side(), _Side()))
            both[0 if message.is_send else 1].add(message, int(graph.id[message.node]))
            way = (rank, message.peer) if message.is_send else (message.peer, rank)
            ends.setdefault(message.pair, way)
    for pair, (sent, received) in sides.items():
        missing = sent.counts - received.counts
        spare = received.counts - sent.counts
        source, target = ends[pair]
        for label, count in missing.items():
            text = f"rank {source} sends {count:,} x {_text(label)} to rank {target}, which"
            report.add(f"{text} {_instead(label, spare)}", rank=source, node=sent.node[label])
        for label, count in spare.items():
            text = f"rank {target} expects {count:,} x {_text(label)} from rank {source}, which"
            report.add(f"{text} {_instead(label, missing)}", rank=target, node=received.node[label])


def _text(label: Label) -> str:
    what = "a permute" if label.permute else f"a message with tag {label.tag}"
    return f"{what} of unknown size" if label.size < 0 else f"{what} of {label.size:,.0f} bytes"


def _instead(label: Label, others: Counter[Label]) -> str:
    """What the other side has instead: the same tag with another size, or nothing."""
    for other in others:
        if other[:2] == label[:2]:
            return f"has {_text(other)} instead"
    return "has none to match"
