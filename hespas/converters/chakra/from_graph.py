"""Conversion of a graph to the trace of one rank: the inverse of :mod:`.to_graph`.

The graph has no permutes and no loops (see :mod:`.lowering`). Values that depend on the rank come from
:data:`RankVariables`, and each attribute with such a value carries the number of its variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import nan
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.assembly import Assembly, Strings
from hespas.converters.chakra.contract import (
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
    NodeKind,
    OpClass,
    OpGraph,
    RaggedArray,
    Resource,
)
from hespas.graph.columns import FloatArray
from hespas.graph.passes import take_nodes
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["NODES_AT_ONCE", "LoweredNodes", "RankVariables", "TraceLowering"]

NODES_AT_ONCE = 8192
"""Nodes of a part: each takes about 2 KB while it is converted and encoded."""

_LARGEST_CANONICAL_TAG = (1 << 31) - 1
_NAME_OF_NOTHING = b"node_0"
_CLASS_NAMES = ByteRows.from_text(member.name.lower() for member in OpClass)
_DTYPE_NAMES = ByteRows.from_text(entry.name for entry in DTYPES)


RankVariables = tuple[bytes | int, ...]
"""Values in a trace that differ between the ranks of a class, in the order of their numbers: the process
group ids of the rank as text, one per group set (empty for the group of all ranks); the rank itself; for each
permutation, the ranks that it sends to and receives from.
"""


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
        of tensors), and the classes that its names imply.
        """
        self.graph = graph
        self._times = WrittenTimes.of(graph.duration_ns, graph.kind, (graph.resource, graph.stream))
        costs = (graph.bytes_read, graph.bytes_written)
        as_stated = is_as_stated(graph)
        self._sizes = None if as_stated else written_bytes(graph.kind, costs, graph.collectives, graph.p2p)
        self._unless_stated = classes_unless_stated(graph, default_classes(graph.kind))
        self._strings = Strings.of(graph.strings)
        none = RaggedArray.empty(0)
        self._metadata = PreservedRows(take_nodes(graph, np.arange(0), none, none)).metadata()
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
        whole, none = self.graph, RaggedArray.empty(nodes.stop - nodes.start)
        rows = np.arange(nodes.start, nodes.stop, dtype=np.int64)
        graph = take_nodes(whole, rows, none, none)
        extra = PreservedRows(graph)
        times = extra.times(WrittenTimes(self._times.nanos[nodes], self._times.micros[nodes]))
        control, data = _rows_of(whole.control_deps, nodes), _rows_of(whole.data_deps, nodes)
        lists = None if self._sizes is None else tensor_lists(whole.id, data, self._sizes, nodes)
        writer = _AttributeWriter(graph, variables, self._strings)
        writer.add(times, self._unless_stated[nodes], lists)
        assembled = writer.finish(extra.layouts(), extra.add_to(writer, of_file=False))
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
        in_group = np.array([bool(text) for text in writer.groups] or [False])
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
                message = attrs.payload[row]
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


def _rows_of(array: RaggedArray, rows: slice) -> RaggedArray:
    offsets = array.offsets[rows.start : rows.stop + 1]
    return RaggedArray(offsets - offsets[0], array.values[offsets[0] : offsets[-1]])


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


class _AttributeWriter(Assembly):
    """Assembly of the node attributes whose values are in columns or tables of the graph. It has one method
    per attribute or group of attributes.
    """

    def __init__(self, graph: OpGraph, variables: RankVariables, strings: Strings) -> None:
        super().__init__(len(graph))
        self.graph = graph
        self.variables = variables
        self.groups = [value for value in variables if isinstance(value, bytes)]
        self.strings = strings

    def add(self, times: WrittenTimes, unless_stated: NDArray[np.uint8], lists: TensorLists | None) -> None:
        """Add all attributes in the order in which they are written. ``unless_stated`` are the operation
        classes that need no attribute. ``lists`` are the tensors that each node reads and writes, for the
        memory tracking of simulators.
        """
        graph = self.graph
        flagged = np.flatnonzero(graph.kind != NodeKind.METADATA)
        on_host = (graph.resource[flagged] == Resource.HOST).astype(np.int64)
        self.integers("is_cpu_op", flagged, on_host, implied=on_host == 0)
        self.strings_of("op_type", graph.op_id.astype(np.int64))
        self.collectives()
        self.messages()
        no_flops, no_bytes = raised_counts(graph)
        self.floats("num_ops", np.where(no_flops, 1.0, graph.flops))
        self.floats("tensor_size", np.where(no_bytes, 1.0, graph.bytes_moved))
        streams = np.flatnonzero(graph.stream >= 0)
        self.integers("stream", streams, graph.stream[streams].astype(np.int64))
        timed = np.flatnonzero(times.nanos >= 0)
        exact = times.are_exact(graph.duration_ns)[timed]
        self.integers("duration_nanos", timed, times.nanos[timed], optional=exact)
        self.floats("bytes_written", np.where(graph.bytes_written > 0, graph.bytes_written, nan))
        self.floats("useful_ops", np.where(graph.useful_flops == graph.flops, nan, graph.useful_flops))
        self.transcendentals()
        classed = np.flatnonzero(graph.op_class != unless_stated)
        self.texts("op_class", classed, _CLASS_NAMES, graph.op_class[classed].astype(np.int64))
        typed = np.flatnonzero(graph.rate_dtype >= 0)
        self.texts("dtype", typed, _DTYPE_NAMES, graph.rate_dtype[typed].astype(np.int64))
        self.strings_of("framework_op", graph.framework_id.astype(np.int64))
        if len(graph.contractions):
            nodes, texts, which = contraction_texts(graph)
            self.texts("contractions", nodes, ByteRows.from_rows(texts), which)
        self.facts_of_collectives()
        for name, counts_none in (("counted_ops", no_flops), ("counted_bytes", no_bytes)):
            nodes = np.flatnonzero(counts_none)
            self.integers(name, nodes, np.zeros(len(nodes), np.int64))
        if lists is not None:
            for name, rows in zip(LIST_NAMES, lists, strict=True):
                self.texts(name, flagged, rows, flagged)

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
        self.texts(name, nodes, self.strings.take(used), which)

    def collectives(self) -> None:
        table = self.graph.collectives
        node = table.node.astype(np.int64)
        numbers = np.full(max(CollectiveKind) + 1, -1, np.int64)
        for kind, number in COLLECTIVE_TO_COMM.items():
            numbers[kind] = number
        comm_type = numbers[table.kind]
        has_type = comm_type >= 0
        self.integers("comm_type", node[has_type], comm_type[has_type])
        self.sizes(node, table.comm_bytes)
        named = np.array([bool(text) for text in self.groups] or [False])
        grouped = np.flatnonzero((table.group_set >= 0) & named[np.maximum(table.group_set, 0)])
        which = table.group_set[grouped].astype(np.int64)
        self.texts("pg_name", node[grouped], ByteRows.from_rows(self.groups), which, slot=which)

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

    def messages(self) -> None:
        table = self.graph.p2p
        node = table.node.astype(np.int64)
        self.sizes(node, table.comm_bytes)
        addressed = np.flatnonzero(table.permutation >= 0)
        sends = self.graph.kind[node[addressed]] == NodeKind.SEND
        chosen = table.permutation[addressed].astype(np.int64)
        own = len(self.groups)
        values = np.array([0 if isinstance(value, bytes) else value for value in self.variables])
        source = np.where(sends, own, own + 2 + 2 * chosen)
        target = np.where(sends, own + 1 + 2 * chosen, own)
        self.integers("comm_src", node[addressed], values[source], slot=source, implied=sends)
        self.integers("comm_dst", node[addressed], values[target], slot=target, implied=~sends)
        tagged = np.flatnonzero(table.tag >= 0)
        fits = table.tag[tagged] <= _LARGEST_CANONICAL_TAG
        for rows, kind in ((tagged[fits], None), (tagged[~fits], AttributeField.INT64)):
            if len(rows):
                self.integers("comm_tag", node[rows], table.tag[rows], kind=kind)
