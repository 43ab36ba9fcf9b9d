"""What the representative of each kind of rank does, ready to be replayed or ordered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from typing import NamedTuple

import numpy as np

from hespas.graph import NodeKind, OpGraph, Workload
from hespas.validators.program import NodeProgram
from hespas.validators.quotient import Pair, Quotient
from hespas.validators.replay import Key, Task

__all__ = ["TAG_MODULUS", "Label", "Message", "Programs", "alone", "messages_of", "programs_of"]

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


def messages_of(graph: OpGraph, quotient: Quotient, kind: int) -> Iterator[Message]:
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
        permutation, size, tag, node_kind, count = (
            permutations[row], sizes[row], tags[row], node_kinds[row], times[row],
        )  # fmt: skip
        if not talks[row] or count == 0:
            continue
        label = Label(node_kind == NodeKind.PERMUTE, tag % TAG_MODULUS, -1.0 if isnan(size) else size)
        repeated = 1.0 if isnan(count) else count
        sent = quotient.send_pairs[kind][permutation]
        received = quotient.receive_pairs[kind][permutation]
        if sent is not None and node_kind in (NodeKind.SEND, NodeKind.PERMUTE):
            yield Message(node, True, sent[0], sent[1], label, repeated)
        if received is not None and node_kind in (NodeKind.RECV, NodeKind.PERMUTE):
            yield Message(node, False, received[0], received[1], label, repeated)


def programs_of(workload: Workload, quotient: Quotient) -> Programs:
    """The tasks of all kinds of ranks of a complete job."""
    programs: dict[int, NodeProgram] = {}
    tasks: list[Task] = []
    for kind, rank in enumerate(quotient.representatives):
        index = int(workload.rank_class[rank])
        graph = workload.classes[index]
        if index not in programs:
            programs[index] = NodeProgram.of(graph)
        tasks.append(_task(graph, programs[index], quotient, kind))
    needed = tuple(len(channel.kinds) + bool(channel.absent) for channel in quotient.channels)
    return Programs(tuple(tasks), needed)


def alone(task: Task) -> Task:
    """The same task where nobody makes it wait: every collective meets on channel 0, messages are there."""
    channel = dict.fromkeys(task.channel, 0)
    received = task.receives.keys() - task.sends.keys()
    return Task(task.program, channel, task.sends, {}, task.skipped | received)


def _task(graph: OpGraph, program: NodeProgram, quotient: Quotient, kind: int) -> Task:
    rows = quotient.channel_rows[kind]
    never = graph.multiplicity == 0
    nodes: list[int] = graph.collectives.node.tolist()
    sets: list[int] = graph.collectives.group_set.tolist()
    collectives = zip(nodes, sets, strict=True)
    channel = {node: rows[row] for node, row in collectives if rows[row] >= 0 and not never[node]}
    messages = list(messages_of(graph, quotient, kind))
    sends = {message.node: message.key for message in messages if message.is_send}
    receives = {message.node: message.key for message in messages if not message.is_send}
    talking = (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE)
    idle: list[int] = np.flatnonzero(never | np.isin(graph.kind, [int(entry) for entry in talking])).tolist()
    busy = channel.keys() | sends.keys() | receives.keys()
    return Task(program, channel, sends, receives, frozenset(idle) - busy)
