"""Conversion of a graph to the trace of one rank: the inverse of :mod:`.to_graph`.

The graph has no permutes and no loops (see :mod:`.lowering`). Values that depend on the rank come from
:class:`RankVariables`, and each attribute with such a value carries the number of its variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import nan
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.assembly import Assembled, Assembly, Strings
from hespas.converters.chakra.contract import (
    ATTRIBUTES,
    COLLECTIVE_TO_COMM,
    KIND_TO_TYPE,
    Tag,
    default_classes,
)
from hespas.converters.chakra.op_classes import classes_unless_stated
from hespas.converters.chakra.preserve import PreservedRows
from hespas.converters.chakra.readiness import (
    LARGEST_COUNT,
    LIST_NAMES,
    TensorLists,
    distinct,
    is_as_stated,
    raised_counts,
    tensor_lists,
    written_bytes,
)
from hespas.converters.chakra.spelling import contraction_texts
from hespas.converters.chakra.times import WrittenTimes
from hespas.converters.chakra.wire import Bools, ByteRows, EtColumns, Longs
from hespas.files.wire import BYTES, fields
from hespas.graph import (
    DTYPES,
    CollectiveKind,
    CollectiveTable,
    ContractionTable,
    ExtraTable,
    NodeKind,
    OpClass,
    OpGraph,
    P2pTable,
    RaggedArray,
    Resource,
)
from hespas.graph.columns import FloatArray
from hespas.graph.opgraph import NODE_COLUMNS
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["NODES_AT_ONCE", "LoweredNodes", "RankVariables", "TraceLowering"]

NODES_AT_ONCE = 1 << 15
"""Nodes of a part: each takes a few hundred bytes during conversion."""

_LARGEST_CANONICAL_TAG = (1 << 31) - 1
_NAME_OF_NOTHING = b"node_0"


class RankVariables(NamedTuple):
    """Values in a trace that differ between the ranks of a class. ``groups`` are the process group ids of the
    rank as text, one per group set (empty for the group of all ranks). ``own`` is the rank itself.
    ``targets`` and ``sources`` are the ranks that it sends to and receives from, one per permutation.

    The variables are numbered in this order, except that the target and the source of each permutation are
    consecutive.
    """

    groups: tuple[bytes, ...]
    own: int
    targets: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def own_slot(self) -> int:
        """Number of the variable whose value is the rank itself."""
        return len(self.groups)

    def values(self) -> tuple[bytes | int, ...]:
        """Return all variables in the order of their numbers."""
        pairs = zip(self.targets, self.sources, strict=True)
        return (*self.groups, self.own, *(value for pair in pairs for value in pair))


class LoweredNodes(NamedTuple):
    """Nodes of a trace. ``slot`` has one entry per attribute row: the number of the rank-dependent variable
    that the row holds (-1: none). ``inexact`` counts, by diagnostic code, the nodes whose values the trace
    holds only approximately.
    """

    columns: EtColumns
    slot: Longs
    inexact: dict[str, int]


class TraceLowering:
    """Conversion of a graph to the trace of one rank. It converts a few thousand nodes at a time, because the
    columns of a whole trace take several times the memory of the graph. O(nodes + attributes).
    """

    def __init__(self, graph: OpGraph) -> None:
        """Prepare to convert a graph: compute values that depend on several nodes (times along streams, sizes
        of tensors).
        """
        self.graph = graph
        self._times = WrittenTimes.of(graph.duration_ns, graph.kind, (graph.resource, graph.stream))
        costs = (graph.bytes_read, graph.bytes_written)
        as_stated = is_as_stated(graph)
        self._sizes = None if as_stated else written_bytes(graph.kind, costs, graph.collectives, graph.p2p)
        self._strings = Strings.of(graph.strings)
        self._metadata = PreservedRows(_nodes_of(graph, slice(0, 0))).metadata()
        self._types = np.zeros(len(NodeKind), np.int32)
        for kind, number in KIND_TO_TYPE.items():
            self._types[kind] = number

    def parts(self, variables: RankVariables) -> Iterator[LoweredNodes]:
        """Yield the nodes in the form of trace columns, a few thousand at a time. A graph without nodes
        yields one empty part.
        """
        for nodes in self.ranges():
            yield self.part(nodes, variables)

    def ranges(self) -> Iterator[slice]:
        """Yield the range of node numbers of each part."""
        count = len(self.graph)
        for start in range(0, max(1, count), NODES_AT_ONCE):
            yield slice(start, min(start + NODES_AT_ONCE, count))

    def part(self, nodes: slice, variables: RankVariables) -> LoweredNodes:
        """Convert the given nodes to columns of the trace."""
        graph, whole = _nodes_of(self.graph, nodes), self.graph
        extra = PreservedRows(graph)
        times = extra.times(WrittenTimes(self._times.nanos[nodes], self._times.micros[nodes]))
        control, data = _rows_of(whole.control_deps, nodes), _rows_of(whole.data_deps, nodes)
        lists = None if self._sizes is None else tensor_lists(whole.id, data, self._sizes, nodes)
        assembled = _attributes(graph, variables, (extra, self._strings), times, lists)
        columns = EtColumns(
            version=extra.version,
            metadata=self._metadata,
            id=graph.id,
            name=self._strings.take(graph.name_id),
            type=self._types[graph.kind],
            ctrl_offsets=control.offsets,
            ctrl_deps=whole.id[control.values],
            data_offsets=data.offsets,
            data_deps=whole.id[data.values],
            start_micros=extra.start_micros(),
            duration_micros=times.micros,
            inputs=extra.io(Tag.INPUTS, graph.operands),
            outputs=extra.io(Tag.OUTPUTS, graph.results),
            attrs=assembled.attrs,
            position=np.zeros(len(graph), np.int64),
        )
        rounded_off = (graph.kind == NodeKind.COMPUTE) & (times.nanos > 0) & (times.micros == 0)
        columns, named = _without_empty_frames(columns)
        in_group = np.array([bool(text) for text in variables.groups] or [False])
        # JSON cannot hold a NaN that has a payload or a sign.
        attrs = assembled.attrs
        doubles = attrs.bits[attrs.field == AttributeField.DOUBLE].view(np.float64)
        floats = attrs.bits[attrs.field == AttributeField.FLOAT].astype(np.uint32).view(np.float32)
        odd = int(_is_odd_nan(doubles).sum()) + int(_is_odd_nan(floats).sum())
        for field, dtype in (
            (AttributeField.DOUBLE_LIST, np.float64),
            (AttributeField.FLOAT_LIST, np.float32),
        ):
            for row in attrs.bits[attrs.field == field].tolist():
                message = attrs.payload.part(row, row + 1).data.tobytes()
                for _, wire, start, end in fields(message, 0, len(message)):
                    if wire == BYTES:
                        odd += bool(_is_odd_nan(np.frombuffer(message[start:end], dtype)).any())
        inexact = {
            "chakra-json.control-deps": int(np.count_nonzero(control.lengths)),
            "chakra-json.process-group": int(
                (in_group[graph.collectives.group_set] & (graph.collectives.group_set >= 0)).sum()
            ),
            "chakra-json.nan-payload": odd,
            "chakra.sub-microsecond": int(rounded_off.sum()),
            "chakra.named": named,
            "chakra.longest-time": times.shortened(graph.duration_ns),
        }
        return LoweredNodes(columns, assembled.slot, inexact)


def _nodes_of(graph: OpGraph, nodes: slice) -> OpGraph:
    """Return the given nodes as a graph without dependencies. Preserved attributes of the file are
    included.
    """
    columns: dict[str, Any] = {name: getattr(graph, name)[nodes] for name in NODE_COLUMNS}
    none = RaggedArray.empty(len(columns["kind"]))
    return replace(
        graph,
        **columns,
        data_deps=none,
        control_deps=none,
        operands=_rows_of(graph.operands, nodes),
        results=_rows_of(graph.results, nodes),
        collectives=_side_rows(graph.collectives, nodes),
        p2p=_side_rows(graph.p2p, nodes),
        contractions=_side_rows(graph.contractions, nodes),
        extra=_extra_rows(graph.extra, nodes),
    )


def _rows_of(array: RaggedArray, rows: slice) -> RaggedArray:
    offsets = array.offsets[rows.start : rows.stop + 1]
    return RaggedArray(offsets - offsets[0], array.values[offsets[0] : offsets[-1]])


_Table = TypeVar("_Table", CollectiveTable, P2pTable, ContractionTable)


def _side_rows(table: _Table, nodes: slice) -> _Table:
    node = table.node
    bounds: list[int] = np.searchsorted(node, [nodes.start, nodes.stop]).tolist()
    first, last = bounds
    return table.take(np.arange(first, last), node[first:last] - np.int32(nodes.start))


def _extra_rows(table: ExtraTable, nodes: slice) -> ExtraTable:
    """Return the preserved attributes of the file and of the given nodes."""
    if not len(table):
        return table
    of_file, first, last = np.searchsorted(table.node, [0, nodes.start, nodes.stop]).tolist()
    bounds = table.offsets[[0, of_file, first, last]].tolist()
    ends = (table.offsets[: of_file + 1], table.offsets[first + 1 : last + 1] - bounds[2] + bounds[1])
    rows = (slice(0, of_file), slice(first, last))
    return ExtraTable(
        node=np.concatenate([table.node[rows[0]], table.node[rows[1]] - np.int32(nodes.start)]),
        key=np.concatenate([table.key[some] for some in rows]),
        tag=np.concatenate([table.tag[some] for some in rows]),
        offsets=np.concatenate(ends),
        values=bytes(table.values[: bounds[1]]) + bytes(table.values[bounds[2] : bounds[3]]),
    )


def _is_odd_nan(numbers: NDArray[np.floating[Any]]) -> Bools:
    bits = numbers.view(f"u{numbers.itemsize}")
    quiet = np.array([nan], numbers.dtype).view(bits.dtype)[0]
    odd: Bools = np.isnan(numbers) & (bits != quiet)
    return odd


def _without_empty_frames(columns: EtColumns) -> tuple[EtColumns, int]:
    """Give a name to every node without any non-empty field. Return the nodes, and the number of named nodes.
    The encoded message of such a node would have length 0, which other readers take as the end of the file.
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


def _attributes(
    graph: OpGraph,
    variables: RankVariables,
    texts: tuple[PreservedRows, Strings],
    times: WrittenTimes,
    lists: TensorLists | None,
) -> Assembled:
    extra, strings = texts
    assembly = Assembly(len(graph))
    writer = _AttributeWriter(graph, assembly, strings)
    flagged = np.flatnonzero(graph.kind != NodeKind.METADATA)
    on_host = (graph.resource[flagged] == Resource.HOST).astype(np.int64)
    writer.integers("is_cpu_op", flagged, on_host, implied=on_host == 0)
    writer.strings_of("op_type", graph.op_id.astype(np.int64))
    writer.collectives(variables)
    writer.messages(variables)
    no_flops, no_bytes = raised_counts(graph)
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
    writer.strings_of("framework_op", graph.framework_id.astype(np.int64))
    writer.contractions()
    writer.facts_of_collectives()
    for name, counts_none in (("counted_ops", no_flops), ("counted_bytes", no_bytes)):
        nodes = np.flatnonzero(counts_none)
        writer.integers(name, nodes, np.zeros(len(nodes), np.int64))
    if lists is not None:
        writer.tensor_lists(lists)
    docs = extra.add_to(assembly, of_file=False)
    return assembly.finish(extra.layouts(), docs)


class _AttributeWriter:
    """Writer of the node attributes whose values are in columns or tables of the graph. It has one method per
    attribute or group of attributes.
    """

    def __init__(self, graph: OpGraph, assembly: Assembly, strings: Strings) -> None:
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
        """Add a cost column, rounded to whole numbers. Nodes with an unknown value get no attribute."""
        self.sizes(np.arange(len(column)), column, name)

    def transcendentals(self) -> None:
        """Add transcendentals; omit 0 if ``num_ops`` is known, and write -1 for an unknown count in that
        case.
        """
        graph = self.graph
        has_flops = graph.flops >= 0
        unknown = np.isnan(graph.transcendentals)
        nodes = np.flatnonzero(np.where(has_flops, graph.transcendentals != 0, ~unknown))
        value = np.where(unknown, -1.0, np.minimum(graph.transcendentals, LARGEST_COUNT))[nodes]
        self.integers("transcendentals", nodes, np.rint(value).astype(np.int64))

    def strings_of(self, name: str, row: Longs) -> None:
        """Add a string attribute from each node's row in the string table. Nodes with an empty string get no
        attribute.
        """
        nodes = np.flatnonzero(self.strings.lengths(row))
        used, which = distinct(row[nodes])
        self._spelled(name, nodes, self.strings.take(used), which)

    def _spelled(
        self, name: str, nodes: Longs, rows: ByteRows, which: Longs, slot: Longs | None = None
    ) -> None:
        """Add a string attribute with few distinct texts: node ``nodes[i]`` gets the text
        ``rows[which[i]]``.
        """
        start = rows.offsets[which] + self.assembly.buffer(rows.data.data)
        self.assembly.texts(name, ATTRIBUTES[name], nodes, start, rows.lengths[which], slot=slot)

    def collectives(self, variables: RankVariables) -> None:
        table = self.graph.collectives
        node = table.node.astype(np.int64)
        numbers = np.full(max(CollectiveKind) + 1, -1, np.int64)
        for kind, number in COLLECTIVE_TO_COMM.items():
            numbers[kind] = number
        comm_type = numbers[table.kind]
        has_type = comm_type >= 0
        self.integers("comm_type", node[has_type], comm_type[has_type])
        self.sizes(node, table.comm_bytes)
        named = np.array([bool(text) for text in variables.groups] or [False])
        grouped = np.flatnonzero((table.group_set >= 0) & named[np.maximum(table.group_set, 0)])
        which = table.group_set[grouped].astype(np.int64)
        if len(grouped):
            texts = ByteRows.from_rows(variables.groups)
            self._spelled("pg_name", node[grouped], texts, which, which)

    def sizes(self, node: Longs, size: FloatArray, name: str = "comm_size") -> None:
        valid = np.flatnonzero((size >= 0) & (size < LARGEST_COUNT))
        self.integers(name, node[valid], np.rint(size[valid]).astype(np.int64))

    def facts_of_collectives(self) -> None:
        """Add attributes of collectives that simulators ignore: operand and result sizes, channel, and
        reduction.
        """
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
        self._spelled("contractions", nodes, ByteRows.from_rows(texts), which)

    def tensor_lists(self, lists: TensorLists) -> None:
        """Add the lists of tensors that each node reads and writes, for the memory tracking of simulators."""
        nodes = np.flatnonzero(self.graph.kind != NodeKind.METADATA)
        for name, rows in zip(LIST_NAMES, lists, strict=True):
            self._spelled(name, nodes, rows, nodes)

    def messages(self, variables: RankVariables) -> None:
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
        self._spelled(
            "op_class", nodes, ByteRows.from_rows(names), self.graph.op_class[nodes].astype(np.int64)
        )

    def dtypes(self) -> None:
        nodes = np.flatnonzero(self.graph.rate_dtype >= 0)
        names = [entry.name.encode() for entry in DTYPES]
        self._spelled(
            "dtype", nodes, ByteRows.from_rows(names), self.graph.rate_dtype[nodes].astype(np.int64)
        )
