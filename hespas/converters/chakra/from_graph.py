"""A graph of the hub as a trace of one rank: the inverse of :mod:`.to_graph`.

The graph is flat (no permutes, no loops): see :mod:`.lowering`. What depends on the rank is filled in from
:class:`Variables`, and each such attribute carries the number of its variable.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.assembly import Assembled, Assembly, Kept
from hespas.converters.chakra.contract import (
    ATTRIBUTES,
    COLLECTIVE_TO_COMM,
    KIND_TO_TYPE,
    Tag,
    default_classes,
)
from hespas.converters.chakra.readiness import (
    LARGEST_COUNT,
    LIST_NAMES,
    classes_unless_stated,
    is_as_stated,
    stand_ins,
    tensor_lists,
    written_bytes,
)
from hespas.converters.chakra.spelling import Times, contraction_texts
from hespas.converters.chakra.wire import Bools, ByteRows, EtColumns, Longs
from hespas.graph import DTYPES, CollectiveKind, NodeKind, OpClass, OpGraph, Resource
from hespas.graph.columns import FloatArray
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["Lowered", "Variables", "from_graph"]

_LARGEST_CANONICAL_TAG = (1 << 31) - 1
_NAME_OF_NOTHING = b"node_0"


class Variables(NamedTuple):
    """What differs between ranks: a text per group set (empty: all ranks), the own rank, and per permutation
    the rank sent to and received from.

    Variables are numbered: group sets, own rank, then target and source of each permutation.
    """

    groups: tuple[bytes, ...]
    own: int
    targets: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def own_slot(self) -> int:
        """The number of the own rank."""
        return len(self.groups)

    def values(self) -> tuple[bytes | int, ...]:
        """All variables by number."""
        pairs = zip(self.targets, self.sources, strict=True)
        return (*self.groups, self.own, *(value for pair in pairs for value in pair))


class Lowered(NamedTuple):
    """The trace, which attribute rows hold which variable (-1: none), and how many nodes it does not say
    exactly, by code.
    """

    columns: EtColumns
    slot: Longs
    inexact: dict[str, int]


def from_graph(graph: OpGraph, variables: Variables) -> Lowered:
    """The trace of one rank. O(nodes + attributes), vectorised but for texts of shapes."""
    extra, strings = Kept(graph), graph.strings
    times = extra.times(Times.of(graph.duration_ns, graph.kind, (graph.resource, graph.stream)))
    assembled = _attributes(graph, variables, extra, times)
    kinds = np.zeros(len(NodeKind), np.int32)
    for kind, number in KIND_TO_TYPE.items():
        kinds[kind] = number
    columns = EtColumns(
        version=extra.version,
        metadata=extra.metadata(),
        id=graph.id,
        name=ByteRows(np.frombuffer(strings.buffer, np.uint8), strings.offsets).take(graph.name_row),
        type=kinds[graph.kind],
        ctrl_offsets=graph.control_deps.offsets,
        ctrl_deps=graph.id[graph.control_deps.values],
        data_offsets=graph.data_deps.offsets,
        data_deps=graph.id[graph.data_deps.values],
        start_micros=extra.start_micros(),
        duration_micros=times.micros,
        inputs=extra.io(Tag.INPUTS, graph.operands),
        outputs=extra.io(Tag.OUTPUTS, graph.results),
        attrs=assembled.attrs,
        frame_byte=np.zeros(len(graph), np.int64),
    )
    rounded_off = (graph.kind == NodeKind.COMPUTE) & (times.nanos > 0) & (times.micros == 0)
    columns, named = _without_empty_frames(columns)
    found = {
        "chakra.sub-microsecond": int(rounded_off.sum()),
        "chakra.named": named,
        "chakra.longest-time": times.shortened(graph.duration_ns),
    }
    return Lowered(columns, assembled.slot, found)


def _without_empty_frames(columns: EtColumns) -> tuple[EtColumns, int]:
    """The trace with a name for each node that has nothing at all, and how many those are: its frame would be
    empty, which other readers take for the end of the file.
    """
    bare = (columns.id == 0) & (columns.type == 0) & (columns.name.lengths == 0)
    if not bare.any():
        return columns, 0
    for offsets in (columns.ctrl_offsets, columns.data_offsets, columns.attrs.offsets):
        bare &= np.diff(offsets) == 0
    bare &= (columns.start_micros == 0) & (columns.duration_micros == 0)
    for io in (columns.inputs, columns.outputs):
        bare[io.node] = False
    if not bare.any():
        return columns, 0
    pairs = zip(columns.name, bare.tolist(), strict=True)
    names = [_NAME_OF_NOTHING if empty else name for name, empty in pairs]
    return replace(columns, name=ByteRows.from_rows(names)), int(bare.sum())


def _attributes(graph: OpGraph, variables: Variables, extra: Kept, times: Times) -> Assembled:
    assembly = Assembly(len(graph))
    strings = assembly.buffer(graph.strings.buffer)
    writer = _AttributeWriter(graph, assembly, strings)
    flagged = np.flatnonzero(graph.kind != NodeKind.METADATA)
    on_host = (graph.resource[flagged] == Resource.HOST).astype(np.int64)
    writer.integers("is_cpu_op", flagged, on_host, implied=on_host == 0)
    writer.strings_of("op_type", graph.op_row.astype(np.int64))
    writer.collectives(variables)
    writer.messages(variables)
    no_flops, no_bytes = stand_ins(graph)
    writer.floats("num_ops", np.where(no_flops, 1.0, graph.flops))
    writer.floats("tensor_size", np.where(no_bytes, 1.0, graph.bytes_moved))
    streams = np.flatnonzero(graph.stream >= 0)
    writer.integers("stream", streams, graph.stream[streams].astype(np.int64))
    timed = np.flatnonzero(times.nanos >= 0)
    exact = times.are_exact(graph.duration_ns)[timed]
    writer.integers("duration_nanos", timed, times.nanos[timed], optional=exact)
    writer.floats("bytes_written", np.where(graph.bytes_written > 0, graph.bytes_written, nan))
    writer.floats("useful_ops", np.where(graph.useful_flops == graph.flops, nan, graph.useful_flops))
    writer.transcendentals()
    writer.classes()
    writer.dtypes()
    writer.strings_of("framework_op", graph.framework_row.astype(np.int64))
    writer.contractions()
    writer.facts_of_collectives()
    for name, counts_none in (("counted_ops", no_flops), ("counted_bytes", no_bytes)):
        nodes = np.flatnonzero(counts_none)
        writer.integers(name, nodes, np.zeros(len(nodes), np.int64))
    writer.tensor_lists()
    docs = extra.add_to(assembly, of_file=False)
    return assembly.finish(extra.layouts(), docs)


class _AttributeWriter:
    """Adds the attributes that a graph models, by name."""

    def __init__(self, graph: OpGraph, assembly: Assembly, strings: int) -> None:
        self.graph = graph
        self.assembly = assembly
        self.strings = strings

    def integers(
        self,
        name: str,
        node: Longs,
        value: Longs,
        *,
        slot: Longs | None = None,
        optional: Bools | None = None,
        implied: Bools | None = None,
    ) -> None:
        kind = ATTRIBUTES[name]
        self.assembly.integers(name, kind, node, value, slot=slot, optional=optional, implied=implied)

    def floats(self, name: str, column: FloatArray) -> None:
        """Known values of a column, as whole numbers."""
        self.sizes(np.arange(len(column)), column, name)

    def transcendentals(self) -> None:
        """Left out where 0 beside a known ``num_ops``; -1 where unknown beside one."""
        graph = self.graph
        known = graph.flops >= 0
        unknown = np.isnan(graph.transcendentals)
        nodes = np.flatnonzero(np.where(known, graph.transcendentals != 0, ~unknown))
        value = np.where(unknown, -1.0, np.minimum(graph.transcendentals, LARGEST_COUNT))[nodes]
        self.integers("transcendentals", nodes, np.rint(value).astype(np.int64))

    def strings_of(self, name: str, row: Longs) -> None:
        """Texts by string row; empty ones are left out."""
        offsets = self.graph.strings.offsets
        length = offsets[row + 1] - offsets[row]
        nodes = np.flatnonzero(length)
        start = offsets[row[nodes]] + self.strings
        self.assembly.texts(name, ATTRIBUTES[name], nodes, start, length[nodes])

    def _spelled(
        self, name: str, nodes: Longs, spelling: list[bytes], which: Longs, slot: Longs | None = None
    ) -> None:
        """Texts from a short list."""
        rows = ByteRows.from_rows(spelling)
        start = rows.offsets[which] + self.assembly.buffer(rows.data.data)
        self.assembly.texts(name, ATTRIBUTES[name], nodes, start, rows.lengths[which], slot=slot)

    def collectives(self, variables: Variables) -> None:
        table = self.graph.collectives
        node = table.node.astype(np.int64)
        numbers = np.full(max(CollectiveKind) + 1, -1, np.int64)
        for kind, number in COLLECTIVE_TO_COMM.items():
            numbers[kind] = number
        comm_type = numbers[table.kind]
        known = comm_type >= 0
        self.integers("comm_type", node[known], comm_type[known])
        self.sizes(node, table.comm_bytes)
        named = np.array([bool(text) for text in variables.groups] or [False])
        grouped = np.flatnonzero((table.group_set >= 0) & named[np.maximum(table.group_set, 0)])
        which = table.group_set[grouped].astype(np.int64)
        if len(grouped):
            self._spelled("pg_name", node[grouped], list(variables.groups), which, which)

    def sizes(self, node: Longs, size: FloatArray, name: str = "comm_size") -> None:
        known = np.flatnonzero((size >= 0) & (size < LARGEST_COUNT))
        self.integers(name, node[known], np.rint(size[known]).astype(np.int64))

    def facts_of_collectives(self) -> None:
        """What a program says of its collectives beyond what simulators read."""
        table = self.graph.collectives
        node = table.node.astype(np.int64)
        self.sizes(node, table.operand_bytes, "comm_operand_bytes")
        self.sizes(node, table.result_bytes, "comm_result_bytes")
        numbered = np.flatnonzero(table.channel >= 0)
        self.integers("channel", node[numbered], table.channel[numbered])
        row = np.zeros(len(self.graph), np.int64)
        row[node] = table.reduction
        self.strings_of("reduction", row)

    def contractions(self) -> None:
        if not len(self.graph.contractions):
            return
        nodes, texts, which = contraction_texts(self.graph)
        self._spelled("contractions", nodes, texts, which)

    def tensor_lists(self) -> None:
        """What every node reads and writes, as a memory tracker wants it."""
        graph = self.graph
        if is_as_stated(graph):
            return
        size = written_bytes(
            graph.kind, (graph.bytes_read, graph.bytes_written), graph.collectives, graph.p2p
        )
        nodes = np.flatnonzero(graph.kind != NodeKind.METADATA)
        for name, lists in zip(LIST_NAMES, tensor_lists(graph.id, graph.data_deps, size), strict=True):
            start = lists.offsets[:-1] + self.assembly.buffer(lists.data.data)
            self.assembly.texts(name, ATTRIBUTES[name], nodes, start[nodes], lists.lengths[nodes])

    def messages(self, variables: Variables) -> None:
        table = self.graph.p2p
        node = table.node.astype(np.int64)
        self.sizes(node, table.comm_bytes)
        addressed = np.flatnonzero(table.permutation >= 0)
        sends = self.graph.kind[node[addressed]] == NodeKind.SEND
        chosen = table.permutation[addressed].astype(np.int64)
        own = variables.own_slot
        values = np.array([0 if isinstance(value, bytes) else value for value in variables.values()])
        source = np.where(sends, own, own + 2 + 2 * chosen)
        target = np.where(sends, own + 1 + 2 * chosen, own)
        self.integers("comm_src", node[addressed], values[source], slot=source, implied=sends)
        self.integers("comm_dst", node[addressed], values[target], slot=target, implied=~sends)
        tagged = np.flatnonzero(table.tag >= 0)
        fits = table.tag[tagged] <= _LARGEST_CANONICAL_TAG
        for rows, kind in ((tagged[fits], ATTRIBUTES["comm_tag"]), (tagged[~fits], AttributeField.INT64)):
            if len(rows):
                self.assembly.integers("comm_tag", kind, node[rows], table.tag[rows])

    def classes(self) -> None:
        unless_stated = classes_unless_stated(self.graph, default_classes(self.graph.kind))
        nodes = np.flatnonzero(self.graph.op_class != unless_stated)
        names = [member.name.lower().encode() for member in OpClass]
        self._spelled("op_class", nodes, names, self.graph.op_class[nodes].astype(np.int64))

    def dtypes(self) -> None:
        nodes = np.flatnonzero(self.graph.rate_dtype >= 0)
        names = [entry.name.encode() for entry in DTYPES]
        self._spelled("dtype", nodes, names, self.graph.rate_dtype[nodes].astype(np.int64))
