"""Op graph of one rank from its recorded calls. Groups and peers become rules on the mesh. PyTorch is not
needed.

A call that only makes a view, or memory without values, is not a node. A reader of memory depends on its last
writer (data); a writer depends on earlier readers and writers (control). Waits are not nodes: readers of the
result of a collective depend on the collective.

The nodes of a GPU stream run in recorded order. There is one compute stream; each process group has a stream,
and so has each peer and direction of messages. FSDP2 gathers parameters ahead of their use: copies into a
gather have their own stream, which is at most two gathers ahead of the copies out of them
(``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np

from hespas.captures.torch.calls import (
    CallCommunication,
    RankRecording,
    RecordedCall,
    TensorRecord,
    call_cost,
    makes_nothing,
)
from hespas.converters.pytorch.communication import TraceCommunication, kind_of_word, payload_bytes
from hespas.converters.pytorch.draft import NodeEdges, chain, flow_of
from hespas.graph import (
    CollectiveKind,
    ExplicitGroups,
    Findings,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    RaggedArray,
    StridedGroups,
    find_dtype,
)
from hespas.graph.errors import InvariantError
from hespas.graph.groups import Digit, digits_of
from hespas.graph.mesh import Mesh

__all__ = ["MeshRule", "graph_of"]

_COMPUTE_STREAM = 0
_GATHER_IN, _GATHER_OUT = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"
_GATHERS_AHEAD = 2
_REDUCTIONS = {"sum": "add", "avg": "avg", "max": "max", "min": "min", "product": "mul"}
"""PyTorch's names of reductions -> Hespas's names."""

_IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]


class MeshRule:
    """Rule by which the process groups and peers of all ranks of a mesh are inferred from those of one
    recorded rank.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.strides = [prod(mesh.sizes[axis + 1 :]) for axis in range(len(mesh.sizes))]

    def coordinates(self, rank: int) -> list[int]:
        """Return the coordinate of a rank on each axis."""
        pairs = zip(self.strides, self.mesh.sizes, strict=True)
        return [rank // stride % size for stride, size in pairs]

    def group_set(self, ranks: Sequence[int], rank: int) -> tuple[GroupSet, str]:
        """Return the groups of all ranks, inferred from the group ``ranks`` of one ``rank``. Also return the
        name of the rule by which they were inferred.

        The rule is ``mesh`` if groups vary over mesh axes, ``strides`` if they tile the ranks in another way,
        and ``alone`` for a group without a rule, which is then the only one.
        """
        group = tuple(ranks)
        for count in range(1, len(self.mesh.sizes) + 1):
            for axes in combinations(range(len(self.mesh.sizes)), count):
                if prod(self.mesh.sizes[axis] for axis in axes) != len(group):
                    continue
                groups = StridedGroups.from_mesh(self.mesh.sizes, axes)
                if tuple(groups.members(groups.group_of(rank)).tolist()) == group:
                    return groups, "mesh"
        tiled = self._tiled(np.array(group, np.int64), rank)
        if tiled is not None:
            return tiled, "strides"
        return ExplicitGroups((group,)), "alone"

    def _tiled(self, ranks: _IntArray, rank: int) -> GroupSet | None:
        members = digits_of(ranks - ranks[0])
        if members is None:
            return None
        other_digits: list[Digit] = []
        reached = 1
        for size, stride in sorted(members, key=lambda digit: digit[1]):
            if stride % reached:
                return None
            other_digits.insert(0, (stride // reached, reached))
            reached = size * stride
        if self.mesh.num_devices % reached:
            return None
        other_digits.insert(0, (self.mesh.num_devices // reached, reached))
        try:
            groups = StridedGroups(tuple(other_digits), members)
        except InvariantError:
            return None
        contains = np.array_equal(groups.members(groups.group_of(rank)), ranks)
        return groups if contains else None

    def message(self, source: int, target: int) -> Permutation:
        """Return the permutation for all ranks, inferred from one message. Every rank sends by the same shift
        along the mesh axis on which source and target differ.

        If source and target differ on several axes, the permutation has only this pair.
        """
        ends = zip(self.coordinates(source), self.coordinates(target), strict=True)
        differing = [axis for axis, (from_, to) in enumerate(ends) if from_ != to]
        if len(differing) != 1:
            return Permutation.from_pairs([(source, target)], self.mesh.num_devices)
        axis = differing[0]
        stride = self.strides[axis]
        return Permutation(
            self.mesh.num_devices, (self.mesh.sizes[axis], stride), (target - source) // stride, wraps=False
        )


def graph_of(recording: RankRecording, rule: MeshRule, name: str, findings: Findings) -> OpGraph:
    """Return the graph of a recorded step. Groups of other ranks are inferred with ``rule``. ``findings``
    receives unknown costs and groups, and the notes of the recorder. O(calls + dependencies).
    """
    for code, (message, count) in recording.notes.items():
        findings.warning(code, message, count)
    nodes = [call for call in recording.calls if not makes_nothing(call)]
    num_omitted = len(recording.calls) - len(nodes)
    findings.info("views", "calls that only make views or uninitialised memory are not nodes", num_omitted)
    stream_ids: dict[tuple[str, str, int], int] = {}
    streams = np.zeros(len(nodes), np.int64)
    for number, call in enumerate(nodes):
        communication = call.communication
        if communication is not None:
            direction = communication.library_name if communication.peer >= 0 else ""
            key = (communication.group, direction, communication.peer)
        elif call.op == _GATHER_IN:
            key = (_GATHER_IN, "", -1)
        else:
            streams[number] = _COMPUTE_STREAM
            continue
        streams[number] = stream_ids.setdefault(key, len(stream_ids) + 1)
    flow = flow_of(_ragged([call.reads for call in nodes]), _ragged([call.writes for call in nodes]))
    count = len(nodes)
    data_pairs = flow.data.distinct(count)
    # FSDP2 copies into a gather after it has copied out of the last but one.
    copies_in = [number for number, call in enumerate(nodes) if call.op == _GATHER_IN]
    copies_out = [number for number, call in enumerate(nodes) if call.op == _GATHER_OUT]
    pairs = zip(copies_in[_GATHERS_AHEAD:], copies_out, strict=False)
    gathers = NodeEdges.of([(later, earlier) for later, earlier in pairs if earlier < later])
    control_pairs = NodeEdges.joined(flow.order, gathers, chain(streams))
    control_pairs = control_pairs.distinct(count).latest(streams).without(data_pairs, count)
    data, control = data_pairs.csr(count).to_lists(), control_pairs.csr(count).to_lists()
    assembly = _GraphAssembly(recording, rule, name, findings)
    for number, call in enumerate(nodes):
        assembly.add(call, data[number], control[number], int(streams[number]))
    return assembly.finish()


def _ragged(rows: Sequence[tuple[int, ...]]) -> RaggedArray:
    values = [storage for row in rows for storage in row]
    return RaggedArray.from_lengths(
        np.array([len(row) for row in rows], np.int64), np.array(values, np.int32)
    )


class _GraphAssembly:
    """Builder of the graph of one recorded rank. It adds a node for each recorded call."""

    def __init__(self, recording: RankRecording, rule: MeshRule, name: str, findings: Findings) -> None:
        self.rank = recording.rank
        self.rule = rule
        self.findings = findings
        self.builder = GraphBuilder(name)
        self._ranks = recording.groups
        self._sets: dict[str, GroupSet] = {}
        self._unknown: dict[str, int] = {}
        # Number the process groups of the same ranks in order of creation.
        num_equal: dict[GroupSet, int] = {}
        num_by_rule: dict[str, int] = {}
        for group_name, ranks in self._ranks.items():
            groups, rule_name = self.rule.group_set(ranks, self.rank)
            communicator = num_equal.get(groups, 0)
            num_equal[groups] = communicator + 1
            self._sets[group_name] = replace(groups, communicator=communicator) if communicator else groups
            num_by_rule[rule_name] = num_by_rule.get(rule_name, 0) + 1
        self.findings.info(
            "groups-tiled",
            "process groups that are not mesh axes: equal groups are assumed to tile the ranks",
            num_by_rule.get("strides", 0),
        )
        self.findings.warning(
            "groups-alone",
            "process groups without a rule on the mesh: only the group of the recorded rank is known",
            num_by_rule.get("alone", 0),
        )

    def add(self, call: RecordedCall, data: list[int], control: list[int], stream: int) -> None:
        """Add the node of one call, with its data and control dependencies and its stream."""
        builder, cost = self.builder, call_cost(call)
        meaning = None if call.communication is None else kind_of_word(call.communication.library_name)
        kind = NodeKind.COMPUTE if meaning is None else meaning.node
        op_class = cost.op_class if kind in {NodeKind.COMPUTE, NodeKind.COLLECTIVE} else OpClass.P2P
        short_name = call.op.partition("::")[2]
        node = builder.add_node(
            name_id=builder.strings.add(f"{short_name}_{len(builder)}"),
            op_id=builder.strings.add(call.op),
            op_class=op_class,
            kind=kind,
            data_deps=data,
            control_deps=control,
            operands=[self._type(tensor) for tensor in call.argument_tensors],
            # Results in memory that the call allocated: a tensor that is written in place is an operand.
            results=[self._type(tensor) for tensor in call.results if tensor.storage in call.fresh],
            flops=cost.flops,
            transcendentals=cost.transcendentals,
            bytes_read=cost.bytes_read,
            bytes_written=cost.bytes_written,
        )
        path = "/".join(part for part in (call.phase, call.module, short_name) if part)
        builder.set(node, stream=stream, framework_id=builder.strings.add(path))
        if call.source:
            builder.set(node, source_id=builder.strings.add(call.source))
        if call.overload != "default":
            builder.add_extra(node, "overload", 0, call.overload.encode())
        if cost.rate_dtype >= 0:
            self.builder.set(node, rate_dtype=cost.rate_dtype)
        if cost.useful_flops != cost.flops:
            self.builder.set(node, useful_flops=cost.useful_flops)
        for product in cost.contractions:
            self.builder.add_contraction(
                node,
                batch=product.batch,
                m=product.m,
                n=product.n,
                k=product.k,
                flops=product.flops,
                useful_flops=product.useful_flops,
                lhs=product.lhs,
                rhs=product.rhs,
                accumulator=product.accumulator,
                products=product.products,
                window=product.window,
            )
        if cost.op_class is OpClass.UNKNOWN:
            self._unknown[call.op] = self._unknown.get(call.op, 0) + 1
        if call.communication is not None and meaning is not None:
            self._add_communication(node, call.communication)

    def _add_communication(self, node: int, communication: CallCommunication) -> None:
        meaning = kind_of_word(communication.library_name)
        assert meaning is not None
        ranks = self._ranks[communication.group]
        facts = TraceCommunication(
            kind=meaning,
            operand_bytes=communication.operand_bytes,
            result_bytes=communication.result_bytes,
            ranks=ranks,
        )
        payload = 0.0 if meaning.collective is CollectiveKind.BARRIER else payload_bytes(facts, len(ranks))
        if meaning.node is NodeKind.COLLECTIVE:
            kind = meaning.collective
            if communication.ragged and kind is CollectiveKind.ALL_TO_ALL:
                kind = CollectiveKind.RAGGED_ALL_TO_ALL
            self.builder.add_collective(
                node,
                kind,
                group_set=self.builder.group_set(self._sets[communication.group]),
                comm_bytes=payload,
                operand_bytes=communication.operand_bytes,
                result_bytes=communication.result_bytes,
                reduction=_REDUCTIONS.get(communication.reduction, communication.reduction),
            )
            return
        peer = communication.peer
        source, target = (self.rank, peer) if meaning.node is NodeKind.SEND else (peer, self.rank)
        permutation = self.builder.permutation(self.rule.message(source, target)) if peer >= 0 else -1
        self.findings.warning(
            "peer-unknown", "messages received from any source: the sending rank is unknown", permutation < 0
        )
        self.builder.add_p2p(node, permutation=permutation, comm_bytes=payload, tag=max(communication.tag, 0))

    def _type(self, tensor: TensorRecord) -> int:
        return self.builder.types.add(find_dtype(tensor.dtype), tensor.shape)

    def finish(self) -> OpGraph:
        """Return the finished graph."""
        names = ", ".join(sorted(self._unknown)[:6])
        self.findings.warning(
            "unknown-op",
            f"calls without a cost rule have unknown costs ({names})",
            sum(self._unknown.values()),
        )
        return self.builder.build()
