"""Recorded calls of one rank -> op graph. Nothing here needs PyTorch.

A call that gives a view, or memory without values, is no node. A reader of memory waits for the last writer
of it (data); a writer waits for earlier readers and writers (control). Waits are no nodes: what reads the
result of a collective depends on it.

Streams are those of a GPU, on each of which nodes follow each other as recorded: one computes, one is for
each process group, and one for each peer and direction of messages. FSDP2 gathers parameters ahead of their
use: what it copies into a gather has a stream of its own, which stays at most two gathers ahead of what it
copies out (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.captures.torch.calls import Call, Recording, Talk, TensorRecord
from hespas.captures.torch.costs import call_cost, makes_nothing
from hespas.captures.torch.groups import MeshRule, apart
from hespas.converters.pytorch.communication import Communication, named, payload_bytes
from hespas.converters.pytorch.draft import Edges, chain, flow_of
from hespas.costs.operation import Cost
from hespas.graph import (
    CollectiveKind,
    Findings,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    RaggedArray,
    find_dtype,
)

__all__ = ["graph_of"]

_COMPUTE_STREAM = 0
_GATHER_IN, _GATHER_OUT = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"
_GATHERS_AHEAD = 2
_REDUCTIONS = {"sum": "add", "avg": "avg", "max": "max", "min": "min", "product": "mul"}
"""Words of PyTorch -> words of this package."""


def graph_of(recording: Recording, rule: MeshRule, name: str, findings: Findings) -> OpGraph:
    """The graph of the recorded step. Findings: costs and groups that are not known, and the recorder's own.

    O(calls + dependencies).
    """
    for code, (message, count) in recording.notes.items():
        findings.warning(code, message, count)
    nodes = [call for call in recording.calls if not makes_nothing(call)]
    left_out = len(recording.calls) - len(nodes)
    findings.info("views", "calls that give views or memory without values: no nodes", left_out)
    streams = _Streams()
    stream = np.array([streams.of(call) for call in nodes], np.int64)
    data, control = _dependencies(nodes, stream)
    assembly = _Assembly(recording, rule, name, findings)
    for number, call in enumerate(nodes):
        assembly.add(call, data[number], control[number], int(stream[number]))
    return assembly.finished()


class _Streams:
    """Numbers the streams of one rank: 0 computes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int], int] = {}

    def of(self, call: Call) -> int:
        """The stream of a call."""
        talk = call.talk
        if talk is None and call.op != _GATHER_IN:
            return _COMPUTE_STREAM
        key = (_GATHER_IN, "", -1)
        if talk is not None:
            key = (talk.group, talk.word if talk.peer >= 0 else "", talk.peer)
        return self._known.setdefault(key, len(self._known) + 1)


def _dependencies(
    nodes: Sequence[Call], stream: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> tuple[list[list[int]], list[list[int]]]:
    flow = flow_of(_rows([call.reads for call in nodes]), _rows([call.writes for call in nodes]))
    count = len(nodes)
    data = flow.data.distinct(count)
    control = Edges.joined(flow.order, _gathers(nodes), chain(stream))
    control = control.distinct(count).latest(stream).without(data, count)
    return data.csr(count).to_lists(), control.csr(count).to_lists()


def _gathers(nodes: Sequence[Call]) -> Edges:
    """What FSDP2 copies into a gather waits for what it copied out of the last but one."""
    copied_in = [number for number, call in enumerate(nodes) if call.op == _GATHER_IN]
    copied_out = [number for number, call in enumerate(nodes) if call.op == _GATHER_OUT]
    pairs = zip(copied_in[_GATHERS_AHEAD:], copied_out, strict=False)
    return Edges.of([(later, earlier) for later, earlier in pairs if earlier < later])


def _rows(rows: Sequence[tuple[int, ...]]) -> RaggedArray:
    values = [storage for row in rows for storage in row]
    return RaggedArray.from_lengths(
        np.array([len(row) for row in rows], np.int64), np.array(values, np.int32)
    )


class _Assembly:
    """Puts the nodes of one rank together."""

    def __init__(self, recording: Recording, rule: MeshRule, name: str, findings: Findings) -> None:
        self.rank = recording.rank
        self.rule = rule
        self.findings = findings
        self.builder = GraphBuilder(name)
        self._ranks = recording.groups
        self._sets: dict[str, GroupSet] = {}
        self._unknown: dict[str, int] = {}
        self._name_groups()

    def _name_groups(self) -> None:
        """Process groups of the same ranks are told apart in the order in which they were made."""
        found: dict[GroupSet, int] = {}
        known: dict[str, int] = {}
        for name, ranks in self._ranks.items():
            groups, how = self.rule.group_set(ranks, self.rank)
            before = found.get(groups, 0)
            found[groups] = before + 1
            self._sets[name] = apart(groups, before)
            known[how] = known.get(how, 0) + 1
        self.findings.info(
            "groups-tiled",
            "process groups that are no axes of the mesh: the others like them are taken to tile the ranks",
            known.get("strides", 0),
        )
        self.findings.warning(
            "groups-alone",
            "process groups without a rule on the mesh: only the group of the recorded rank is known",
            known.get("alone", 0),
        )

    def add(self, call: Call, data: list[int], control: list[int], stream: int) -> None:
        """Append one node."""
        builder, cost = self.builder, call_cost(call)
        meaning = None if call.talk is None else named(call.talk.word)
        kind = NodeKind.COMPUTE if meaning is None else meaning.node
        op_class = cost.op_class if kind in {NodeKind.COMPUTE, NodeKind.COLLECTIVE} else OpClass.P2P
        short = call.op.partition("::")[2]
        node = builder.add_node(
            name_row=builder.strings.add(f"{short}_{len(builder)}"),
            op_row=builder.strings.add(call.op),
            op_class=op_class,
            kind=kind,
            data_deps=data,
            control_deps=control,
            operands=[self._type(each) for each in _operands(call)],
            results=[self._type(each) for each in _made(call)],
            flops=cost.flops,
            transcendentals=cost.transcendentals,
            bytes_read=cost.bytes_read,
            bytes_written=cost.bytes_written,
        )
        path = "/".join(part for part in (call.phase, call.module, short) if part)
        builder.set(node, stream=stream, framework_row=builder.strings.add(path))
        if call.source:
            builder.set(node, source_row=builder.strings.add(call.source))
        if call.overload != "default":
            builder.add_extra(node, "overload", 0, call.overload.encode())
        self._add_cost(node, cost)
        if cost.op_class is OpClass.UNKNOWN:
            self._unknown[call.op] = self._unknown.get(call.op, 0) + 1
        if call.talk is not None and meaning is not None:
            self._communicate(node, call.talk)

    def _add_cost(self, node: int, cost: Cost) -> None:
        if cost.rate_dtype >= 0:
            self.builder.set(node, rate_dtype=cost.rate_dtype)
        if cost.useful_flops != cost.flops:
            self.builder.set(node, useful_flops=cost.useful_flops)
        for each in cost.contractions:
            self.builder.add_contraction(
                node,
                batch=each.batch,
                m=each.m,
                n=each.n,
                k=each.k,
                flops=each.flops,
                useful_flops=each.useful_flops,
                lhs=each.lhs,
                rhs=each.rhs,
                accumulator=each.accumulator,
                products=each.products,
            )

    def _communicate(self, node: int, talk: Talk) -> None:
        meaning = named(talk.word)
        assert meaning is not None
        ranks = self._ranks[talk.group]
        facts = Communication(
            meaning=meaning, operand_bytes=talk.operand_bytes, result_bytes=talk.result_bytes, ranks=ranks
        )
        payload = 0.0 if meaning.collective is CollectiveKind.BARRIER else payload_bytes(facts, len(ranks))
        if meaning.node is NodeKind.COLLECTIVE:
            kind = meaning.collective
            if talk.ragged and kind is CollectiveKind.ALL_TO_ALL:
                kind = CollectiveKind.RAGGED_ALL_TO_ALL
            self.builder.add_collective(
                node,
                kind,
                group_set=self.builder.group_set(self._sets[talk.group]),
                comm_bytes=payload,
                operand_bytes=talk.operand_bytes,
                result_bytes=talk.result_bytes,
                reduction=_REDUCTIONS.get(talk.reduction, talk.reduction),
            )
            return
        ends = (self.rank, talk.peer) if meaning.node is NodeKind.SEND else (talk.peer, self.rank)
        way = self.builder.permutation(self.rule.message(*ends)) if talk.peer >= 0 else -1
        self.findings.warning("peer-unknown", "messages from any source", way < 0)
        self.builder.add_p2p(node, permutation=way, comm_bytes=payload, tag=max(talk.tag, 0))

    def _type(self, tensor: TensorRecord) -> int:
        return self.builder.types.add(find_dtype(tensor.dtype), tensor.shape)

    def finished(self) -> OpGraph:
        """The graph."""
        names = ", ".join(sorted(self._unknown)[:6])
        self.findings.warning(
            "unknown-op", f"calls of which no rule says the cost ({names})", sum(self._unknown.values())
        )
        return self.builder.build()


def _operands(call: Call) -> list[TensorRecord]:
    found: list[TensorRecord] = []
    for each in call.arguments:
        if isinstance(each, TensorRecord):
            found.append(each)
        elif not isinstance(each, str):
            found.extend(each)
    return found


def _made(call: Call) -> list[TensorRecord]:
    """Results in memory of their own: what is written in place is an operand."""
    return [each for each in call.results if each.storage in call.fresh]
