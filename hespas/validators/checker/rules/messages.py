"""Rules of messages, and the programs of ranks for deadlock replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isnan
from typing import NamedTuple

import numpy as np

from hespas.graph import NodeKind, OpGraph, Workload
from hespas.validators.checker.job import CheckedJob, RuleReport
from hespas.validators.checker.rank_equivalence import MessagePair, RankEquivalence
from hespas.validators.checker.replay import MessageKey, NodeProgram, ReplayTask
from hespas.validators.checker.rules.nodes import is_kind

__all__ = [
    "TAG_MODULUS",
    "MessageLabel",
    "MessageSide",
    "RankPrograms",
    "isolated",
    "messages_described",
    "messages_matched",
    "messages_of",
    "programs_of",
    "tags_distinct",
]

TAG_MODULUS = 500_000_000
"""ASTRA-sim's tag space for messages; larger tags wrap."""


class MessageLabel(NamedTuple):
    """Properties that distinguish messages between the same two ranks: permute or not, tag, and size (-1:
    unknown).
    """

    permute: bool
    tag: int
    size: float


@dataclass(frozen=True, slots=True)
class MessageSide:
    """One side (send or receive) of a message of the first rank of a kind.

    ``peer`` is the other rank. The send and the receive of a message have the same ``pair`` and ``label``.
    ``times`` is the number of executions per step.
    """

    node: int
    is_send: bool
    pair: MessagePair
    peer: int
    label: MessageLabel
    times: float

    @property
    def key(self) -> MessageKey:
        """Return the key that a send shares with its receive."""
        return self.pair, self.label


@dataclass(frozen=True, slots=True, eq=False)
class RankPrograms:
    """Replay task of each kind of rank. ``needed`` is the number of tasks that take part in each channel."""

    tasks: tuple[ReplayTask, ...]
    needed: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes of one replay."""
        return sum(len(task.program) for task in self.tasks)


def messages_of(graph: OpGraph, equivalence: RankEquivalence, kind: int) -> Iterator[MessageSide]:
    """Yield the sends and receives of a kind's representative, in node order."""
    table = graph.p2p
    nodes: list[int] = table.node.tolist()
    permutations: list[int] = table.permutation.tolist()
    sizes: list[float] = table.comm_bytes.tolist()
    tags: list[int] = table.tag.tolist()
    node_kinds: list[int] = graph.kind[table.node].tolist()
    times: list[float] = graph.executions[table.node].tolist()
    has_peer: list[bool] = ((table.permutation >= 0) & ~table.host).tolist()
    for row, node in enumerate(nodes):
        if not has_peer[row] or times[row] == 0:
            continue
        permutation, size, node_kind, count = permutations[row], sizes[row], node_kinds[row], times[row]
        label = MessageLabel(
            node_kind == NodeKind.PERMUTE, tags[row] % TAG_MODULUS, -1.0 if isnan(size) else size
        )
        repeated = 1.0 if isnan(count) else count
        sent = equivalence.send_pairs[kind][permutation]
        received = equivalence.receive_pairs[kind][permutation]
        if sent is not None and node_kind in (NodeKind.SEND, NodeKind.PERMUTE):
            yield MessageSide(node, True, sent[0], sent[1], label, repeated)
        if received is not None and node_kind in (NodeKind.RECV, NodeKind.PERMUTE):
            yield MessageSide(node, False, received[0], received[1], label, repeated)


def programs_of(workload: Workload, equivalence: RankEquivalence) -> RankPrograms:
    """Return the replay tasks of all kinds of ranks of a complete job."""
    programs: dict[int, NodeProgram] = {}
    positions: dict[int, dict[int, int]] = {}
    tasks: list[ReplayTask] = []
    for kind, rank in enumerate(equivalence.representatives):
        index = int(workload.rank_class[rank])
        graph = workload.classes[index]
        if index not in programs:
            programs[index] = NodeProgram.of(graph)
            positions[index] = programs[index].positions()
        # Nodes that never run complete at once.
        program = programs[index]
        rows = equivalence.channel_rows[kind]
        never = graph.executions == 0
        nodes: list[int] = graph.collectives.node.tolist()
        sets: list[int] = graph.collectives.group_set.tolist()
        collectives = zip(nodes, sets, strict=True)
        position = positions[index]
        channel = {
            position[node]: rows[row] for node, row in collectives if rows[row] >= 0 and not never[node]
        }
        messages = list(messages_of(graph, equivalence, kind))
        sends = {position[message.node]: message.key for message in messages if message.is_send}
        receives = {position[message.node]: message.key for message in messages if not message.is_send}
        communication = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)
        idle: list[int] = np.flatnonzero(
            never | np.isin(graph.kind, [int(entry) for entry in communication])
        ).tolist()
        busy = channel.keys() | sends.keys() | receives.keys()
        skipped = frozenset(position[node] for node in idle) - busy
        tasks.append(ReplayTask(program, channel, sends, receives, skipped))
    needed = tuple(len(channel.kinds) + bool(channel.absent) for channel in equivalence.channels)
    return RankPrograms(tuple(tasks), needed)


def isolated(task: ReplayTask) -> ReplayTask:
    """Return the task with its collectives and receives changed so that they never wait for other ranks."""
    channel = dict.fromkeys(task.channel, 0)
    received = task.receives.keys() - task.sends.keys()
    return ReplayTask(task.program, channel, task.sends, {}, task.skipped | received)


_ONE_WAY = (NodeKind.SEND, NodeKind.RECV)


def messages_described(job: CheckedJob, report: RuleReport) -> None:
    """ET014: a send or receive states peer, tag and size, and its peer is another rank of the job."""
    for index, graph in enumerate(job.classes):
        table = graph.p2p
        message_nodes = np.flatnonzero(is_kind(graph, *_ONE_WAY, NodeKind.PERMUTE))
        report.nodes(index, np.setdiff1d(message_nodes, table.node), "a message states neither peer nor size")
        one_way = np.isin(graph.kind[table.node], [int(kind) for kind in _ONE_WAY]) & ~table.host
        unstated = one_way & (table.permutation < 0)
        report.nodes(index, table.node[unstated], "a message does not state its peer")
        report.nodes(index, table.node[np.isnan(table.comm_bytes)], "a message does not state its size")
        if job.profile is not None:
            untagged = table.node[one_way & (table.tag < 0)]
            report.nodes(index, untagged, "a message does not state its tag")
        for row, permutation in enumerate(graph.permutations):
            users = table.node[table.permutation == row]
            ranks: set[int] = set(job.ranks_of(index).tolist())
            total = job.num_ranks
            if len(ranks) > 1 or permutation.pairs is not None:
                pairs = list(permutation)
            else:  # do not expand a symbolic permutation for one rank
                own = {(rank, permutation.target_of(rank)) for rank in ranks}
                own |= {(permutation.source_of(rank), rank) for rank in ranks}
                pairs = sorted(pair for pair in own if min(pair) >= 0)
            for side, kind in enumerate(_ONE_WAY):
                nodes = users[graph.kind[users] == int(kind)]
                if not len(nodes):
                    continue
                mine = [pair for pair in pairs if pair[side] in ranks]
                if not mine:
                    verb = "sends" if kind is NodeKind.SEND else "receives"
                    report.nodes(index, nodes, f"by its source and target, another rank {verb} it")
                to_itself = [source for source, target in mine if source == target]
                if to_itself:
                    report.nodes(index, nodes, "its peer is its own rank", rank=to_itself[0])
                outside = [pair for pair in mine if total > 0 and not 0 <= pair[1 - side] < total]
                if outside:
                    report.nodes(
                        index,
                        nodes,
                        f"its peer {outside[0][1 - side]} is not among the {total:,} ranks",
                        rank=outside[0][side],
                    )


def tags_distinct(job: CheckedJob, report: RuleReport) -> None:
    """ET036: tags stay below ASTRA-sim's modulus, so that they remain distinct."""
    for index, graph in enumerate(job.classes):
        large = graph.p2p.node[graph.p2p.tag >= TAG_MODULUS]
        report.nodes(index, large, f"its tag is taken modulo {TAG_MODULUS:,}")


@dataclass(slots=True)
class _MessageTally:
    """Count of the sends (or receives) between two ranks for each label, with the first node of each."""

    counts: Counter[MessageLabel] = field(default_factory=Counter[MessageLabel])
    node: dict[MessageLabel, int] = field(default_factory=dict[MessageLabel, int])

    def add(self, message: MessageSide, node_id: int) -> None:
        """Count a message."""
        self.counts[message.label] += round(message.times)
        self.node.setdefault(message.label, node_id)


def messages_matched(job: CheckedJob, report: RuleReport) -> None:
    """ET015: every send has exactly one receive of the same source, target, tag and size, and the reverse."""
    equivalence = job.equivalence
    sides: dict[MessagePair, tuple[_MessageTally, _MessageTally]] = {}
    ends: dict[MessagePair, tuple[int, int]] = {}
    for kind, rank in enumerate(equivalence.representatives):
        graph = job.workload.graph_of(rank)
        for message in messages_of(graph, equivalence, kind):
            both = sides.setdefault(message.pair, (_MessageTally(), _MessageTally()))
            both[0 if message.is_send else 1].add(message, int(graph.id[message.node]))
            ranks = (rank, message.peer) if message.is_send else (message.peer, rank)
            ends.setdefault(message.pair, ranks)
    for pair, (sent, received) in sides.items():
        missing = sent.counts - received.counts
        spare = received.counts - sent.counts
        source, target = ends[pair]
        for label, count in missing.items():
            text = f"rank {source} sends {count:,} x {_label_text(label)} to rank {target}, which"
            report.add(f"{text} {_match_text(label, spare)}", rank=source, node=sent.node[label])
        for label, count in spare.items():
            text = f"rank {target} expects {count:,} x {_label_text(label)} from rank {source}, which"
            report.add(f"{text} {_match_text(label, missing)}", rank=target, node=received.node[label])


def _label_text(label: MessageLabel) -> str:
    noun = "a permute" if label.permute else f"a message with tag {label.tag}"
    return f"{noun} of unknown size" if label.size < 0 else f"{noun} of {label.size:,.0f} bytes"


def _match_text(label: MessageLabel, others: Counter[MessageLabel]) -> str:
    """Return a text about the most similar message of the other side, such as one with the same tag and
    another size.
    """
    for other in others:
        if other[:2] == label[:2]:
            return f"has {_label_text(other)} instead"
    return "has none to match"
