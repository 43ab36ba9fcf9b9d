"""A host execution trace as columns: operations in order of execution, their tensors, their communication."""

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
from hespas.converters.measured_ops import EventCosts, host_costs
from hespas.converters.pytorch.communication import (
    GROUPS_NODE,
    Communication,
    Groups,
    ProcessGroup,
    communication_of,
    listed_groups,
    merged,
)
from hespas.converters.pytorch.draft import Draft, Edges, Rank, assembled, chain, flow_of
from hespas.converters.pytorch.et_records import (
    EtNode,
    Tensor,
    is_list,
    mutated_arguments,
    read_et,
    storages_of,
    tensors_of,
)
from hespas.converters.pytorch.records import job_name, rank_in_name
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

_NONE = "<None>"
_NUMBERS = (int, float, bool)
_PROCESS, _THREAD = "|process]", "|thread]"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostTrace:
    """Operations in order of their ids, which is that of their start; columns of shape ``(operations,)``.

    ``parent`` is the row of the call around each (-1: none). ``reads`` and ``writes`` hold storages, numbered
    densely; ``operands`` and ``results`` rows of ``types``. ``shapes_row``, ``types_row``, ``strides_row``
    and ``values_row`` are the inputs of operations of the cost table as JSON texts (row 0: none).
    ``structural`` marks what is no operation: roots of process and threads, lists of groups.
    ``communications`` are by row.
    """

    schema: str
    process: str
    strings: StringTableBuilder
    types: TensorTypesBuilder
    id: IntArray
    name_row: SmallIntArray
    parent: SmallIntArray
    thread: IntArray
    record_id: IntArray
    reads: RaggedArray
    writes: RaggedArray
    operands: RaggedArray
    results: RaggedArray
    shapes_row: SmallIntArray
    types_row: SmallIntArray
    strides_row: SmallIntArray
    values_row: SmallIntArray
    structural: BoolArray
    communications: dict[int, Communication]
    groups: tuple[ProcessGroup, ...]
    lost_parents: int

    def __len__(self) -> int:
        return len(self.id)

    def host_ops(self) -> HostOps:
        """The operations as those of a profile, whose times nobody knows."""
        unknown = constant(nan, len(self))
        return HostOps.of(
            name_row=self.name_row,
            thread_row=np.zeros(len(self), np.int32),
            parent=self.parent,
            start_ns=unknown,
            duration_ns=unknown,
            shapes_row=self.shapes_row,
            dtype_row=self.types_row,
            strides_row=self.strides_row,
            values_row=self.values_row,
        )


@dataclass(slots=True)
class _Ragged:
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
    """Read one rank's trace; names go to ``strings``. O(n log n).

    Raises ``FormatError`` for what is no such trace: broken JSON, an id that stands twice, calls that
    enclose each other. Raises ``UnsupportedError`` for an unknown schema.
    """
    file = read_et(path, max_bytes, version)
    collector = _Collector(strings)
    for node in file.nodes:
        collector.add(node)
    return collector.build(file.schema, file.process, str(path))


class _Collector:
    """Turns nodes into columns as they come."""

    def __init__(self, strings: StringTableBuilder) -> None:
        self.strings = strings
        self.types = TensorTypesBuilder()
        self.numbers = {name: array("q") for name in ("id", "parent", "thread", "record_id")}
        self.name_row = array("i")
        self.inputs = {name: array("i") for name in ("shapes", "types", "strides", "values")}
        self.structural = bytearray()
        self.reads, self.writes, self.operands, self.results = (_Ragged() for _ in range(4))
        self.communications: dict[int, Communication] = {}
        self.groups: list[ProcessGroup] = []
        self._storages: dict[int, int] = {}
        self._types: dict[tuple[str, tuple[int, ...]], int] = {}

    def add(self, node: EtNode) -> None:
        """Take one node."""
        name = node.name
        row = len(self.name_row)
        numbers = self.numbers
        numbers["id"].append(node.id)
        numbers["parent"].append(node.parent)
        numbers["thread"].append(node.thread)
        numbers["record_id"].append(node.rf_id)
        self.name_row.append(self.strings.add(name))
        is_root = name.endswith((_PROCESS, _THREAD)) and name.startswith("[pytorch|")
        self.structural.append(is_root or name == GROUPS_NODE)
        if name == GROUPS_NODE:
            listed = node.inputs.values[0] if node.inputs.values else ""
            self.groups.extend(listed_groups(listed) if isinstance(listed, str) else ())
        self._describe(node)
        outputs = tensors_of(node.outputs)
        reads, writes = storages_of(node.inputs, outputs, mutated_arguments(node.op_schema, name))
        self.operands.add(self._type_rows(tensors_of(node.inputs)))
        self.results.add(self._type_rows(outputs))
        talk = communication_of(node)
        if talk is not None:
            self.communications[row] = talk
            reads, writes = list(talk.reads), list(talk.writes)
        self.reads.add(self._storage_rows(reads))
        self.writes.add(self._storage_rows(writes))

    def _describe(self, node: EtNode) -> None:
        """Keep the inputs of an operation whose cost depends on them."""
        texts: tuple[bytes, ...] = (b"",) * len(self.inputs)
        if find_aten_rule(node.name) is not None:
            inputs = node.inputs
            plain = list(map(_plain, inputs.values))
            shapes, types, values = map(msgspec.json.encode, (inputs.shapes, inputs.types, plain))
            texts = shapes, types, bytes(inputs.strides), values
        for rows, text in zip(self.inputs.values(), texts, strict=True):
            rows.append(self.strings.add(text.decode("utf-8", "replace")) if text else 0)

    def _storage_rows(self, storages: list[int]) -> list[int]:
        """Dense numbers; storage 0 is that of no tensor."""
        known = self._storages
        return [known.setdefault(storage, len(known)) for storage in storages if storage]

    def _type_rows(self, tensors: list[Tensor]) -> list[int]:
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
        """The columns, sorted by id."""
        ids = np.array(self.numbers["id"], np.int64)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        again = np.flatnonzero(ids[1:] == ids[:-1])
        if len(again):
            raise FormatError(
                "two operations have the same id",
                path=path,
                position=f"node {int(ids[again[0]])}",
                hint="export the trace again",
            )
        parent, lost = _parents(ids, np.array(self.numbers["parent"], np.int64)[order], path)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return HostTrace(
            schema=schema,
            process=process,
            strings=self.strings,
            types=self.types,
            id=ids,
            name_row=np.array(self.name_row, np.int32)[order],
            parent=parent,
            thread=np.array(self.numbers["thread"], np.int64)[order],
            record_id=np.array(self.numbers["record_id"], np.int64)[order],
            reads=self.reads.build(order),
            writes=self.writes.build(order),
            operands=self.operands.build(order),
            results=self.results.build(order),
            **{f"{name}_row": np.array(rows, np.int32)[order] for name, rows in self.inputs.items()},
            structural=np.frombuffer(bytes(self.structural), np.bool_)[order],
            communications=_innermost(
                {int(place[row]): talk for row, talk in self.communications.items()}, parent
            ),
            groups=tuple(self.groups),
            lost_parents=lost,
        )


def _plain(value: object) -> str:
    """A value as the profiler writes it: numbers, texts and flat lists of numbers; nothing of tensors."""
    if is_list(value):
        return str(value) if all(type(each) in _NUMBERS for each in value) else ""
    return "" if value == _NONE or type(value) not in {*_NUMBERS, str} else str(value)


def _parents(ids: IntArray, parent_ids: IntArray, path: str) -> tuple[SmallIntArray, int]:
    """Rows of parents, and how many are not in the file. The process is its own parent: it has none."""
    if not len(ids):
        return np.empty(0, np.int32), 0
    found = np.minimum(np.searchsorted(ids, parent_ids), len(ids) - 1)
    known = (ids[found] == parent_ids) & (parent_ids != ids)
    lost = int(((ids[found] != parent_ids) & (parent_ids != 0)).sum())
    parent = np.where(known, found, -1)
    above = parent
    for _ in range(len(ids).bit_length() + 1):
        above = at_rows(above, above, -1)
        if (above < 0).all():
            return parent.astype(np.int32), lost
    stuck = int(ids[np.flatnonzero(above >= 0)[0]])
    raise FormatError(
        "calls enclose each other in a circle",
        path=path,
        position=f"node {stuck}",
        hint="export the trace again",
    )


def _innermost(talks: dict[int, Communication], parent: SmallIntArray) -> dict[int, Communication]:
    """One entry per communication: a record inside a dispatcher operation takes over what that one says."""
    above: list[int] = parent.tolist()
    outer: set[int] = set()
    found = dict(talks)
    for row in sorted(talks, reverse=True):
        at = above[row]
        while at >= 0 and at not in talks:
            at = above[at]
        if at >= 0 and talks[at].meaning == talks[row].meaning:
            found[row] = merged(found[row], talks[at])
            outer.add(at)
    return {row: talk for row, talk in sorted(found.items()) if row not in outer}


# --- A host execution trace alone as a graph: its operations in order, without times.
#
# Each operation is a node, calls around others included; operations of a thread follow each other, and
# ``framework_row`` names the call around each. A communication is the node of the call that states it; the
# named range of its work (``gloo:all_reduce``, ``nccl:all_reduce``) is left out, being the same thing. Only a
# call that blocks, as it says itself, holds back what follows on its thread.

_WORK = re.compile(r"(?:gloo|nccl|rccl|mpi|ucc|xccl):")


def read_execution_trace(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Read one rank's trace as a workload of one rank, or of as many as the user states.

    Raises ``FormatError`` or ``UnsupportedError`` as :func:`.host_trace.read_host_trace` and
    :func:`.alone.ranks_of_one` do.
    """
    requested = requested_devices(options, str(path))
    trace = read_host_trace(path, options.max_bytes, StringTableBuilder(), options.version)
    number = max(rank_in_name(path.name, alone=True), 0)
    groups = Groups.of(trace.groups, max(requested, number + 1))
    name = job_name(path.name)
    graph = host_trace_graph(trace, name, Rank(number, groups, str(path)), diagnostics)
    metadata = {
        "format": "pytorch-et",
        "schema": trace.schema,
        "rank": str(number),
        "world_size": str(groups.world),
    }
    recorded = groups.world if trace.groups else 1
    rank_class = ranks_of_one(graph, number, diagnostics, str(path), requested=requested, recorded=recorded)
    return Workload(name=name, classes=(graph,), rank_class=rank_class, metadata=metadata)


def host_trace_graph(trace: HostTrace, name: str, rank: Rank, diagnostics: Diagnostics) -> OpGraph:
    """The graph of one trace. Raises ``FormatError`` where it holds no operation."""
    works = _works(trace)
    kept = np.flatnonzero(~trace.structural & ~works)
    if not len(kept):
        raise FormatError(
            "the execution trace holds no operation",
            path=rank.path,
            position="list 'nodes'",
            hint="start the observer before the step that is to be recorded",
        )
    findings = diagnostics.about(rank.path, "pytorch")
    findings.warning("lost-parent", "operations whose call is not in the file", trace.lost_parents)
    roots = "roots of threads and lists of process groups are no operations"
    findings.info("structural", roots, int(trace.structural.sum()))
    repeated = "named ranges that repeat a communication are left out"
    findings.info("work-of-communication", repeated, int(works.sum()))
    node_of = np.full(len(trace), -1, np.int64)
    node_of[kept] = np.arange(len(kept))
    talks = {int(node_of[row]): talk for row, talk in trace.communications.items()}
    flow = flow_of(trace.reads.take(kept), trace.writes.take(kept))
    thread = np.unique(trace.thread[kept], return_inverse=True)[1].reshape(-1).astype(np.int64)
    across = thread[flow.order.consumer] != thread[flow.order.producer]
    parent = trace.parent[kept].astype(np.int64)
    outer = np.where((parent >= 0) & ~trace.structural[np.maximum(parent, 0)], parent, kept)
    return assembled(
        Draft(
            name=name,
            strings=trace.strings.build(),
            id=trace.id[kept].astype(np.uint64),
            name_row=trace.name_row[kept],
            op_row=trace.name_row[kept],
            framework_row=trace.name_row[outer],
            costs=_costs(trace, kept, rank, diagnostics),
            stream=thread,
            queue=_queue(thread, talks),
            duration_ns=np.full(len(kept), np.nan),
            data=flow.data,
            control=Edges.joined(_thread_order(thread, talks), flow.order.where(across)),
            talks=talks,
        ),
        rank,
        diagnostics,
    )


def _works(trace: HostTrace) -> BoolArray:
    """Named ranges that repeat a communication."""
    if not trace.communications:
        return np.zeros(len(trace), np.bool_)
    return mapped(trace.name_row, lambda row: _WORK.match(trace.strings[row]) is not None, np.bool_)


def _costs(trace: HostTrace, kept: IntArray, rank: Rank, diagnostics: Diagnostics) -> EventCosts:
    """What operations cost. What touches no tensor is free: named ranges, hooks, bookkeeping."""
    talks = _works(trace)
    talks[list(trace.communications)] = True
    touches = (trace.operands.lengths + trace.results.lengths) > 0
    costs = host_costs(
        trace.host_ops(), trace.strings.build(), diagnostics, rank.path, communicates=talks, touches=touches
    )
    return replace(
        costs.placed(kept, np.arange(len(kept)), len(kept)),
        types=trace.types.build(),
        operands=trace.operands.take(kept),
        results=trace.results.take(kept),
    )


def _thread_order(thread: IntArray, talks: dict[int, Communication]) -> Edges:
    """Operations of a thread in order. What follows a communication waits for the operation before it, and
    for the communication where that blocks.
    """
    queue = _queue(thread, talks)
    pairs: list[tuple[int, int]] = []
    threads: list[int] = np.unique(thread[list(talks)]).tolist()
    for number in threads:
        nodes = np.flatnonzero(thread == number)
        plain = nodes[queue[nodes] >= 0]
        mine: list[int] = nodes[queue[nodes] < 0].tolist()
        for node in mine:
            before = int(np.searchsorted(plain, node)) - 1
            if before >= 0:
                pairs.append((node, int(plain[before])))
            after = int(np.searchsorted(nodes, node)) + 1
            if talks[node].waits and after < len(nodes):
                pairs.append((int(nodes[after]), node))
    return Edges.joined(chain(queue), Edges.of(pairs))


def _queue(thread: IntArray, talks: dict[int, Communication]) -> IntArray:
    """The thread of each operation, -1 for communications: they hold nobody back but by their data."""
    queue = thread.copy()
    queue[list(talks)] = -1
    return queue


# The trace of one rank of a job of several: what it is, and what it can stand for.


def requested_devices(options: ReadOptions, path: str) -> int:
    """How many devices the user states, or 1. Raises ``UsageError`` for more than any job has."""
    requested = 1 if options.num_devices is None else options.num_devices
    if not 1 <= requested <= MAX_DEVICES:
        raise UsageError(f"{requested:,} devices asked for", path=path, hint=f"1 to {MAX_DEVICES:,}")
    return requested


def ranks_of_one(
    graph: OpGraph, number: int, diagnostics: Diagnostics, path: str, *, requested: int, recorded: int
) -> NDArray[np.int32]:
    """The class of each rank of the job, where one rank of ``recorded`` is here: the others are absent, or do
    the same where as many are ``requested`` for. Raises ``UnsupportedError`` where it cannot stand for those.
    """
    if requested > 1:
        return _for_all(graph, number, requested, diagnostics, path)
    if recorded > 1:
        remedy = (
            f"`num_devices={recorded}` takes it that all ranks do what this one did"
            if _stands_for(graph, recorded)
            else "give the traces of all ranks for one"
        )
        diagnostics.warning(
            "pytorch.one-rank",
            path,
            f"the trace is of rank {number} of {recorded:,}; the others are not here, and collectives and "
            f"messages with them end nowhere. It is no job that a simulator can run; {remedy}",
        )
    return ranks_here([number], [graph], recorded, path)


def ranks_here(
    numbers: Sequence[int], graphs: Sequence[OpGraph], recorded: int, path: str
) -> NDArray[np.int32]:
    """The class of each rank of the job, where some are here, each a class of its own. The job has as many as
    were ``recorded``, or as groups and messages name. Raises ``FormatError`` for more than any job has.
    """
    groups = [1 + highest_id(each) for graph in graphs for each in graph.group_sets]
    peers = [permutation.num_ranks for graph in graphs for permutation in graph.permutations]
    size = max([recorded, max(numbers) + 1, *groups, *peers])
    if size > MAX_DEVICES:
        raise FormatError(
            f"the trace is of a job of {size:,} ranks",
            path=path,
            position="the largest rank of a group or a message",
            hint=f"from 1 to {MAX_DEVICES:,} are possible",
        )
    ranks = np.full(size, ABSENT, np.int32)
    ranks[numbers] = np.arange(len(numbers), dtype=np.int32)
    return ranks


def _stands_for(graph: OpGraph, world: int) -> bool:
    """Whether all ranks can do the same: messages, and groups of others than all, are those of one alone."""
    return not len(graph.p2p) and all(groups.is_world(world) for groups in graph.group_sets)


def _for_all(
    graph: OpGraph, number: int, world: int, diagnostics: Diagnostics, path: str
) -> NDArray[np.int32]:
    """The class of ``world`` ranks that all do what one recorded rank did."""
    if not _stands_for(graph, world):
        raise UnsupportedError(
            f"the trace of rank {number} cannot stand for {world:,} ranks: it does not always talk with all "
            "of them, and with no others",
            path=path,
            position="process groups and messages",
            hint="give the traces of all ranks, or leave `num_devices` out",
        )
    message = (
        f"all {world:,} ranks are taken to do what rank {number} did, in its times: no other was recorded"
    )
    diagnostics.warning("pytorch.one-rank-for-all", path, message)
    return np.zeros(world, np.int32)
