"""Host execution traces: operations as columns in order of execution, and the graph of a trace without a
profile.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.converters.format import ReadOptions
from hespas.converters.measured_ops.costs import host_costs
from hespas.converters.pytorch.communication import (
    GROUPS_NODE,
    JobGroups,
    ListedGroup,
    TraceCommunication,
    communication_of,
    listed_groups,
    merged,
)
from hespas.converters.pytorch.draft import GraphDraft, NodeEdges, TraceRank, assembled, chain, flow_of
from hespas.converters.pytorch.et_records import (
    EtNode,
    EtTensor,
    is_list,
    mutated_arguments,
    read_et,
    storages_of,
    tensors_of,
)
from hespas.converters.pytorch.recognition import job_name, rank_in_name
from hespas.converters.replica_groups import MAX_DEVICES, highest_id
from hespas.costs.aten import find_aten_rule
from hespas.graph import (
    ABSENT,
    Diagnostics,
    HostOps,
    OpGraph,
    RaggedArray,
    StringTableBuilder,
    TensorTypesBuilder,
    Workload,
    find_dtype,
)
from hespas.graph.columns import BoolArray, IntArray, SmallIntArray, at_rows, constant, mapped
from hespas.graph.errors import FormatError, UnsupportedError, UsageError

__all__ = [
    "HostTrace",
    "host_trace_graph",
    "ranks_here",
    "ranks_of_one",
    "read_execution_trace",
    "read_host_trace",
    "requested_devices",
]

_NONE_TEXT = "<None>"
_NUMBER_TYPES = (int, float, bool)
_PROCESS_SUFFIX, _THREAD_SUFFIX = "|process]", "|thread]"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostTrace:
    """Operations of an execution trace in order of their ids, which is the order of their start. Columns have
    shape ``(operations,)``.

    ``parent`` is the row of the enclosing call (-1: none). ``reads`` and ``writes`` are storages, numbered
    densely; ``operands`` and ``results`` are rows of ``types``. ``shapes_id``, ``types_id``, ``strides_id``
    and ``values_id`` are rows of ``strings`` (0: none), with the inputs of operations in the cost table as
    JSON texts. ``structural`` marks entries that are not operations: roots of processes and threads, lists of
    groups. ``communications`` are by row.
    """

    schema: str
    process: str
    strings: StringTableBuilder
    types: TensorTypesBuilder
    id: IntArray
    name_id: SmallIntArray
    parent: SmallIntArray
    thread: IntArray
    record_id: IntArray
    reads: RaggedArray
    writes: RaggedArray
    operands: RaggedArray
    results: RaggedArray
    shapes_id: SmallIntArray
    types_id: SmallIntArray
    strides_id: SmallIntArray
    values_id: SmallIntArray
    structural: BoolArray
    communications: dict[int, TraceCommunication]
    groups: tuple[ListedGroup, ...]
    lost_parents: int

    def __len__(self) -> int:
        return len(self.id)

    def host_ops(self) -> HostOps:
        """Return the operations in the form of a profile, with unknown times."""
        unknown = constant(nan, len(self))
        return HostOps.of(
            name_id=self.name_id,
            thread_id=np.zeros(len(self), np.int32),
            parent=self.parent,
            start_ns=unknown,
            duration_ns=unknown,
            shapes_id=self.shapes_id,
            dtype_id=self.types_id,
            strides_id=self.strides_id,
            values_id=self.values_id,
        )


@dataclass(slots=True)
class _RaggedRows:
    lengths: array[int] = field(default_factory=lambda: array("i"))
    values: array[int] = field(default_factory=lambda: array("i"))

    def add(self, row: Sequence[int]) -> None:
        self.lengths.append(len(row))
        self.values.extend(row)

    def build(self, order: IntArray) -> RaggedArray:
        return RaggedArray.from_lengths(
            np.array(self.lengths, np.int64), np.array(self.values, np.int32)
        ).take(order)


def read_host_trace(path: Path, max_bytes: int, strings: StringTableBuilder, version: str = "") -> HostTrace:
    """Read the execution trace of one rank; names are added to ``strings``. O(n log n).

    Raises ``FormatError`` for broken JSON, a duplicate id, or calls that enclose each other, and
    ``UnsupportedError`` for an unknown schema.
    """
    file = read_et(path, max_bytes, version)
    collector = _HostTraceBuilder(strings)
    for node in file.nodes:
        collector.add(node)
    return collector.build(file.schema, file.process, str(path))


class _HostTraceBuilder:
    """Columns of an execution trace, which grow node by node."""

    def __init__(self, strings: StringTableBuilder) -> None:
        self.strings = strings
        self.types = TensorTypesBuilder()
        self.numbers = {name: array("q") for name in ("id", "parent", "thread", "record_id")}
        self.name_id = array("i")
        self.inputs = {name: array("i") for name in ("shapes", "types", "strides", "values")}
        self.structural = bytearray()
        self.reads, self.writes, self.operands, self.results = (_RaggedRows() for _ in range(4))
        self.communications: dict[int, TraceCommunication] = {}
        self.groups: list[ListedGroup] = []
        self._storages: dict[int, int] = {}
        self._types: dict[tuple[str, tuple[int, ...]], int] = {}

    def add(self, node: EtNode) -> None:
        """Append a node to the columns."""
        name = node.name
        row = len(self.name_id)
        numbers = self.numbers
        numbers["id"].append(node.id)
        numbers["parent"].append(node.parent)
        numbers["thread"].append(node.thread)
        numbers["record_id"].append(node.rf_id)
        self.name_id.append(self.strings.add(name))
        is_root = name.endswith((_PROCESS_SUFFIX, _THREAD_SUFFIX)) and name.startswith("[pytorch|")
        self.structural.append(is_root or name == GROUPS_NODE)
        if name == GROUPS_NODE:
            listed = node.inputs.values[0] if node.inputs.values else ""
            self.groups.extend(listed_groups(listed) if isinstance(listed, str) else ())
        texts: tuple[bytes, ...] = (b"",) * len(self.inputs)
        if find_aten_rule(name) is not None:  # the cost of the operation depends on its inputs
            inputs = node.inputs
            plain = list(map(_value_text, inputs.values))
            shapes, types, values = map(msgspec.json.encode, (inputs.shapes, inputs.types, plain))
            texts = shapes, types, bytes(inputs.strides), values
        for rows, text in zip(self.inputs.values(), texts, strict=True):
            rows.append(self.strings.add(text.decode("utf-8", "replace")) if text else 0)
        outputs = tensors_of(node.outputs)
        reads, writes = storages_of(node.inputs, outputs, mutated_arguments(node.op_schema, name))
        self.operands.add(self._type_rows(tensors_of(node.inputs)))
        self.results.add(self._type_rows(outputs))
        comm = communication_of(node)
        if comm is not None:
            self.communications[row] = comm
            reads, writes = list(comm.reads), list(comm.writes)
        for ragged, storages in ((self.reads, reads), (self.writes, writes)):
            used = filter(None, storages)  # storage 0: no tensor
            ragged.add([self._storages.setdefault(storage, len(self._storages)) for storage in used])

    def _type_rows(self, tensors: list[EtTensor]) -> list[int]:
        rows: list[int] = []
        for tensor in tensors:
            if tensor.shape is None:
                continue
            key = (tensor.dtype, tensor.shape)
            if key not in self._types:
                self._types[key] = self.types.add(find_dtype(tensor.dtype), tensor.shape)
            rows.append(self._types[key])
        return rows

    def build(self, schema: str, process: str, path: str) -> HostTrace:
        """Return the columns, sorted by id."""
        ids = np.array(self.numbers["id"], np.int64)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        repeated = np.flatnonzero(ids[1:] == ids[:-1])
        if len(repeated):
            raise FormatError(
                "two operations have the same id",
                path=path,
                position=f"node {int(ids[repeated[0]])}",
                hint="export the trace again",
            )
        parent, lost = _parents(ids, np.array(self.numbers["parent"], np.int64)[order], path)
        new_row = np.empty(len(order), np.int64)
        new_row[order] = np.arange(len(order))
        comms = {int(new_row[row]): comm for row, comm in self.communications.items()}
        # A record inside a dispatcher operation is the same communication: it takes over the outer facts.
        parents: list[int] = parent.tolist()
        outer: set[int] = set()
        merged_comms = dict(comms)
        for row in sorted(comms, reverse=True):
            above = parents[row]
            while above >= 0 and above not in comms:
                above = parents[above]
            if above >= 0 and comms[above].kind == comms[row].kind:
                merged_comms[row] = merged(merged_comms[row], comms[above])
                outer.add(above)
        return HostTrace(
            schema=schema,
            process=process,
            strings=self.strings,
            types=self.types,
            id=ids,
            name_id=np.array(self.name_id, np.int32)[order],
            parent=parent,
            thread=np.array(self.numbers["thread"], np.int64)[order],
            record_id=np.array(self.numbers["record_id"], np.int64)[order],
            reads=self.reads.build(order),
            writes=self.writes.build(order),
            operands=self.operands.build(order),
            results=self.results.build(order),
            **{f"{name}_id": np.array(rows, np.int32)[order] for name, rows in self.inputs.items()},
            structural=np.frombuffer(bytes(self.structural), np.bool_)[order],
            communications={row: comm for row, comm in sorted(merged_comms.items()) if row not in outer},
            groups=tuple(self.groups),
            lost_parents=lost,
        )


def _value_text(value: object) -> str:
    """Return a number, a text or a flat list of numbers as the profiler writes it; empty for other values."""
    if is_list(value):
        return str(value) if all(type(item) in _NUMBER_TYPES for item in value) else ""
    return "" if value == _NONE_TEXT or type(value) not in {*_NUMBER_TYPES, str} else str(value)


def _parents(ids: IntArray, parent_ids: IntArray, path: str) -> tuple[SmallIntArray, int]:
    """Return the row of each node's parent (-1: none), and the number of parents that are missing in the
    trace.

    The node of the process is its own parent and gets -1. Raises ``FormatError`` for a cycle.
    """
    if not len(ids):
        return np.empty(0, np.int32), 0
    row = np.minimum(np.searchsorted(ids, parent_ids), len(ids) - 1)
    exists = (ids[row] == parent_ids) & (parent_ids != ids)
    lost = int(((ids[row] != parent_ids) & (parent_ids != 0)).sum())
    parent = np.where(exists, row, -1)
    above = parent
    for _ in range(len(ids).bit_length() + 1):
        above = at_rows(above, above, -1)
        if (above < 0).all():
            return parent.astype(np.int32), lost
    raise FormatError(
        "calls enclose each other in a cycle",
        path=path,
        position=f"node {int(ids[np.flatnonzero(above >= 0)[0]])}",
        hint="export the trace again",
    )


_WORK_RANGE = re.compile(r"(?:gloo|nccl|rccl|mpi|ucc|xccl):")


def read_execution_trace(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read the execution trace of one rank as a workload of one rank, or of the requested number of ranks.

    Raises the errors of :func:`read_host_trace` and :func:`ranks_of_one`.
    """
    requested = requested_devices(options, str(path))
    trace = read_host_trace(path, options.max_bytes, StringTableBuilder(), options.version)
    number = max(rank_in_name(path.name, alone=True), 0)
    groups = JobGroups.of(trace.groups, max(requested, number + 1))
    name = job_name(path.name)
    graph = host_trace_graph(trace, name, TraceRank(number, groups, str(path)), diagnostics)
    metadata = {
        "format": "pytorch-et",
        "schema": trace.schema,
        "rank": str(number),
        "world_size": str(groups.world),
    }
    recorded = groups.world if trace.groups else 1
    rank_class = ranks_of_one(graph, number, diagnostics, str(path), requested=requested, recorded=recorded)
    return Workload(name=name, classes=(graph,), rank_class=rank_class, metadata=metadata)


def host_trace_graph(trace: HostTrace, name: str, rank: TraceRank, diagnostics: Diagnostics) -> OpGraph:
    """Return the graph of one execution trace, without times. Raises ``FormatError`` if it has no operation.

    Each operation is a node, enclosing calls included. Operations of a thread follow each other, and
    ``framework_id`` names the enclosing call. A communication is the node of the call that starts it. The
    named range of the transfer (``gloo:all_reduce``, ``nccl:all_reduce``) is skipped, because it repeats the
    call. A communication delays later operations of its thread only if the call states that it blocks.
    """
    is_work = np.zeros(len(trace), np.bool_)
    if trace.communications:
        names = trace.name_id
        is_work = mapped(names, lambda row: _WORK_RANGE.match(trace.strings[row]) is not None, np.bool_)
    rows = np.flatnonzero(~trace.structural & ~is_work)
    if not len(rows):
        raise FormatError(
            "the execution trace has no operation",
            path=rank.path,
            position="list 'nodes'",
            hint="start the observer before the step that is to be recorded",
        )
    findings = diagnostics.about(rank.path, "pytorch")
    findings.warning("lost-parent", "operations whose enclosing call is not in the file", trace.lost_parents)
    roots = "roots of threads and lists of process groups are not operations and are skipped"
    findings.info("structural", roots, int(trace.structural.sum()))
    repeated = "named ranges that repeat a communication are skipped"
    findings.info("work-of-communication", repeated, int(is_work.sum()))
    node_of = np.full(len(trace), -1, np.int64)
    node_of[rows] = np.arange(len(rows))
    comms = {int(node_of[row]): comm for row, comm in trace.communications.items()}
    flow = flow_of(trace.reads.take(rows), trace.writes.take(rows))
    thread = np.unique(trace.thread[rows], return_inverse=True)[1].reshape(-1).astype(np.int64)
    across = thread[flow.order.consumer] != thread[flow.order.producer]
    queue = thread.copy()
    queue[list(comms)] = -1  # communications delay others only through their data
    parent = trace.parent[rows].astype(np.int64)
    outer = np.where((parent >= 0) & ~trace.structural[np.maximum(parent, 0)], parent, rows)
    communicates = is_work.copy()
    communicates[list(trace.communications)] = True
    costs = host_costs(
        trace.host_ops(),
        trace.strings.build(),
        diagnostics,
        rank.path,
        communicates=communicates,
        touches=(trace.operands.lengths + trace.results.lengths) > 0,
    ).placed(rows, np.arange(len(rows)), len(rows))
    return assembled(
        GraphDraft(
            name=name,
            strings=trace.strings.build(),
            id=trace.id[rows].astype(np.uint64),
            name_id=trace.name_id[rows],
            op_id=trace.name_id[rows],
            framework_id=trace.name_id[outer],
            costs=replace(
                costs,
                types=trace.types.build(),
                operands=trace.operands.take(rows),
                results=trace.results.take(rows),
            ),
            stream=thread,
            queue=queue,
            duration_ns=np.full(len(rows), np.nan),
            data=flow.data,
            control=NodeEdges.joined(_thread_order(thread, queue, comms), flow.order.where(across)),
            communications=comms,
        ),
        rank,
        diagnostics,
    )


def _thread_order(thread: IntArray, queue: IntArray, comms: dict[int, TraceCommunication]) -> NodeEdges:
    """Return dependencies that order the operations of each thread. The operation after a communication waits
    for the operation before the communication. It also waits for the communication if that blocks the thread.
    """
    pairs: list[tuple[int, int]] = []
    threads: list[int] = np.unique(thread[list(comms)]).tolist()
    for number in threads:
        nodes = np.flatnonzero(thread == number)
        operations = nodes[queue[nodes] >= 0]
        comm_nodes: list[int] = nodes[queue[nodes] < 0].tolist()
        for node in comm_nodes:
            before = int(np.searchsorted(operations, node)) - 1
            if before >= 0:
                pairs.append((node, int(operations[before])))
            after = int(np.searchsorted(nodes, node)) + 1
            if comms[node].waits and after < len(nodes):
                pairs.append((int(nodes[after]), node))
    return NodeEdges.joined(chain(queue), NodeEdges.of(pairs))


def requested_devices(options: ReadOptions, path: str) -> int:
    """Return the number of devices in the options, 1 by default. Raises ``UsageError`` outside the limits."""
    requested = 1 if options.num_devices is None else options.num_devices
    if not 1 <= requested <= MAX_DEVICES:
        raise UsageError(f"{requested:,} devices requested", path=path, hint=f"use 1 to {MAX_DEVICES:,}")
    return requested


def ranks_of_one(
    graph: OpGraph, number: int, diagnostics: Diagnostics, path: str, *, requested: int, recorded: int
) -> NDArray[np.int32]:
    """Return the class of each rank of a job of which only one rank was recorded.

    If ``requested`` is more than 1, all requested ranks run the same graph. Otherwise the other ranks are
    absent (class -1). Raises ``UnsupportedError`` if the recorded rank cannot represent the requested ones.
    """
    if requested > 1:
        if not _represents_all(graph, requested):
            raise UnsupportedError(
                f"the trace of rank {number} cannot represent {requested:,} ranks: it has messages, or "
                "groups of some of the ranks only",
                path=path,
                position="process groups and messages",
                hint="give the traces of all ranks, or omit `num_devices`",
            )
        message = (
            f"all {requested:,} ranks are assumed to do what rank {number} did, in its times: no other rank "
            "was recorded"
        )
        diagnostics.warning("pytorch.one-rank-for-all", path, message)
        return np.zeros(requested, np.int32)
    if recorded > 1:
        remedy = (
            f"`num_devices={recorded}` replicates this rank"
            if _represents_all(graph, recorded)
            else "give the traces of all ranks to simulate the job"
        )
        diagnostics.warning(
            "pytorch.one-rank",
            path,
            f"the trace is of rank {number} of {recorded:,}. Traces of the other ranks are missing, so a "
            f"simulator would wait forever for collectives and messages with them; {remedy}",
        )
    return ranks_here([number], [graph], recorded, path)


def ranks_here(
    numbers: Sequence[int], graphs: Sequence[OpGraph], recorded: int, path: str
) -> NDArray[np.int32]:
    """Return the class of each rank of a job of which the ranks ``numbers`` were recorded. Each of them has
    its own class.

    The job has ``recorded`` ranks, or more if groups and messages refer to higher ranks. Raises
    ``FormatError`` for an impossible number.
    """
    groups = [1 + highest_id(group_set) for graph in graphs for group_set in graph.group_sets]
    peers = [permutation.num_ranks for graph in graphs for permutation in graph.permutations]
    size = max([recorded, max(numbers) + 1, *groups, *peers])
    if size > MAX_DEVICES:
        raise FormatError(
            f"the trace is of a job of {size:,} ranks",
            path=path,
            position="the largest rank of a group or a message",
            hint=f"use a trace of at most {MAX_DEVICES:,} ranks",
        )
    ranks = np.full(size, ABSENT, np.int32)
    ranks[numbers] = np.arange(len(numbers), dtype=np.int32)
    return ranks


def _represents_all(graph: OpGraph, world: int) -> bool:
    """Return True if the graph of one rank can represent all ranks: it has no messages, and all groups have
    all ranks.
    """
    return not len(graph.p2p) and all(groups.is_world(world) for groups in graph.group_sets)
