"""Sends and receives: described on each side, and matched between ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from hespas.graph import NodeKind, OpGraph, Permutation
from hespas.graph.columns import BoolArray
from hespas.validators.job import Job, Report
from hespas.validators.programs import TAG_MODULUS, Label, Message, messages_of
from hespas.validators.quotient import Pair
from hespas.validators.rules.structure import is_kind

__all__ = ["messages_described", "messages_matched", "tags_distinct"]

_ONE_WAY = (NodeKind.SEND, NodeKind.RECV)


def _rows_at(graph: OpGraph, rows: BoolArray) -> BoolArray:
    mask = np.zeros(len(graph), np.bool_)
    mask[graph.p2p.node[rows]] = True
    return mask


def messages_described(job: Job, report: Report) -> None:
    """ET014: a send or receive states peer, tag and size, and its peer is another rank of the job."""
    for index, graph in enumerate(job.classes):
        table = graph.p2p
        described = _rows_at(graph, np.ones(len(table), np.bool_))
        talks = is_kind(graph, *_ONE_WAY, NodeKind.PERMUTE)
        report.nodes(index, talks & ~described, "a message states neither peer nor size")
        one_way = np.isin(graph.kind[table.node], [int(kind) for kind in _ONE_WAY]) & ~table.host
        unstated = one_way & (table.permutation < 0)
        report.nodes(index, _rows_at(graph, unstated), "a message does not state its peer")
        report.nodes(index, _rows_at(graph, np.isnan(table.comm_bytes)), "a message does not state its size")
        if job.profile is not None:
            report.nodes(
                index, _rows_at(graph, one_way & (table.tag < 0)), "a message does not state its tag"
            )
        for row, permutation in enumerate(graph.permutations):
            _peers(job, report, index, row, permutation)


def _peers(job: Job, report: Report, index: int, row: int, permutation: Permutation) -> None:
    """Faults of the peers that one permutation gives the ranks of one class."""
    graph = job.classes[index]
    uses = graph.p2p.permutation == row
    ranks: set[int] = set(job.ranks_of(index).tolist())
    total = job.num_ranks
    pairs = list(permutation) if len(ranks) > 1 or permutation.pairs is not None else _own(permutation, ranks)
    for side, kind in enumerate(_ONE_WAY):
        nodes = _rows_at(graph, uses) & is_kind(graph, kind)
        if not nodes.any():
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
    """ET030: tags stay below ASTRA-sim's modulus, where no two of them meet."""
    for index, graph in enumerate(job.classes):
        large = graph.p2p.tag >= TAG_MODULUS
        report.nodes(index, _rows_at(graph, large), f"its tag is taken modulo {TAG_MODULUS:,}")


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
    quotient = job.quotient
    sides: dict[Pair, tuple[_Side, _Side]] = {}
    ends: dict[Pair, tuple[int, int]] = {}
    for kind, rank in enumerate(quotient.representatives):
        graph = job.workload.graph_of(rank)
        for message in messages_of(graph, quotient, kind):
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
