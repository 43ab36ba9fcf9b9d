"""A graph of the hub as a trace of one rank: the inverse of :mod:`.to_graph`.

The graph is flat (no permutes, no loops): see :mod:`.expansion`. What depends on the rank is filled in from
:class:`Variables`, and each such attribute carries the number of its variable.
"""

from __future__ import annotations

from math import nan
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.assembly import Assembled, Assembly
from hespas.converters.chakra.columns import AttributeColumns, ByteRows, EtColumns, IoColumns
from hespas.converters.chakra.contract import (
    ATTRIBUTES,
    COLLECTIVE_TO_COMM,
    DEFAULT_CLASS,
    KIND_TO_TYPE,
    Tag,
)
from hespas.converters.chakra.contraction_texts import contraction_texts
from hespas.converters.chakra.extras import foreign_texts, is_attribute
from hespas.converters.chakra.layouts import Layouts, decode_layout
from hespas.converters.chakra.shapes import type_texts
from hespas.converters.chakra.spans import Bools, Bytes, Longs, Window, Words, copy_spans
from hespas.converters.chakra.timing import carried_micros, whole_nanos
from hespas.graph import DTYPES, CollectiveKind, Csr, NodeKind, OpClass, OpGraph, Resource
from hespas.graph.columns import FloatArray
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["Lowered", "Variables", "from_graph"]

_LARGEST = float(1 << 62)
_DEFAULT_VERSION = "0.0.4"
_NO_ASCII = 128


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
    """The trace, and which attribute rows hold which variable (-1: none).

    ``rounded_off`` counts computations that take time and yet state 0 in ``duration_micros``.
    """

    columns: EtColumns
    slot: Longs
    rounded_off: int


def from_graph(graph: OpGraph, variables: Variables) -> Lowered:
    """The trace of one rank. O(nodes + attributes), vectorised but for texts of shapes."""
    extra = _Extra(graph)
    stream = graph.resource.astype(np.int64) * (1 << 32) + graph.stream
    nanos = whole_nanos(graph.duration_ns, stream)
    micros = carried_micros(nanos, stream)
    assembled = _attributes(graph, variables, extra, nanos, micros)
    kinds = np.zeros(len(NodeKind), np.int32)
    for kind, number in KIND_TO_TYPE.items():
        kinds[kind] = number
    columns = EtColumns(
        version=extra.version,
        metadata=extra.metadata(),
        id=graph.id,
        name=_names(graph),
        type=kinds[graph.kind],
        ctrl_offsets=graph.control_deps.offsets,
        ctrl_deps=graph.id[graph.control_deps.values],
        data_offsets=graph.data_deps.offsets,
        data_deps=graph.id[graph.data_deps.values],
        start_micros=extra.start_micros(),
        duration_micros=micros.view(np.uint64),
        inputs=extra.io(Tag.INPUTS, graph.operands),
        outputs=extra.io(Tag.OUTPUTS, graph.results),
        attrs=assembled.attrs,
        frame_byte=np.zeros(len(graph), np.int64),
    )
    rounded_off = (graph.kind == NodeKind.COMPUTE) & (nanos > 0) & (micros == 0)
    return Lowered(columns, assembled.slot, int(rounded_off.sum()))


def _names(graph: OpGraph) -> ByteRows:
    """Node names; a node without one is called after its operation or its id, since an empty first node would
    be an empty frame, which other readers take for the end of the file.
    """
    offsets = graph.strings.offsets
    row = np.where(np.diff(offsets)[graph.name_row] == 0, graph.op_row, graph.name_row)
    start, length = offsets[row], offsets[row + 1] - offsets[row]
    data = np.frombuffer(graph.strings.buffer, np.uint8)
    nameless = np.flatnonzero(length == 0)
    if len(nameless):
        ids: list[int] = graph.id[nameless].tolist()
        made = ByteRows.from_text(f"node_{number}" for number in ids)
        start, length = start.copy(), length.copy()
        start[nameless], length[nameless] = made.offsets[:-1] + len(data), made.lengths
        data = np.concatenate([data, made.data])
    return ByteRows(*copy_spans(Window.holding(data), start, length))


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


class _Extra:
    """The graph's verbatim rows, sorted out."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        table = graph.extra
        self.table = table
        self.of_file = table.node < 0
        self.data = np.frombuffer(table.values, np.uint8)
        version = np.flatnonzero(self.of_file & (table.tag == Tag.VERSION))
        self.version = table.value(int(version[0])).decode() if len(version) else _DEFAULT_VERSION

    def _rows(self, tag: int) -> Longs:
        return np.flatnonzero(~self.of_file & (self.table.tag == tag))

    def start_micros(self) -> Words:
        column = np.zeros(len(self.graph), np.uint64)
        rows = self._rows(Tag.START_MICROS)
        column[self.table.node[rows]] = self._eight_bytes(rows)
        return column

    def _eight_bytes(self, rows: Longs) -> Words:
        if not len(rows):
            return np.empty(0, np.uint64)
        return Window.holding(self.data).words[self.table.offsets[rows]]

    def io(self, tag: int, operands: Csr) -> IoColumns:
        """Texts kept verbatim, and those made from tensor types for all other nodes."""
        rows = self._rows(tag)
        made = type_texts(self.graph, operands)
        if not len(rows):
            return made
        from hespas.converters.chakra.decode import decode_io

        start = self.table.offsets[rows]
        kept = decode_io(Window.holding(self.data), start, self.table.offsets[rows + 1] - start)
        kept = IoColumns(self.table.node[rows].astype(np.int64), kept.values, kept.shapes, kept.types)
        made = made.take(np.flatnonzero(~np.isin(made.node, kept.node)))
        return kept.joined(made) if len(made) else kept

    def layouts(self) -> Layouts:
        """Distinct layouts and the choice of each node."""
        whole = np.flatnonzero(self.of_file & (self.table.tag == Tag.LAYOUT))
        chosen = self._rows(Tag.LAYOUT)
        nothing = np.empty(0, np.int64)
        if not len(whole) or not len(chosen):
            return Layouts((), nothing, nothing)
        known = tuple(decode_layout(self.table.value(row)) for row in whole.tolist())
        index = Window.holding(self.data).words[self.table.offsets[chosen]] & np.uint64(0xFFFFFFFF)
        good = index < len(known)
        return Layouts(known, self.table.node[chosen][good].astype(np.int64), index[good].view(np.int64))

    def add_to(
        self, assembly: Assembly, *, of_file: bool
    ) -> tuple[Longs, np.ndarray[tuple[int], np.dtype[np.int32]], ByteRows]:
        """Hand the kept attributes over; returns the doc strings as (node, key, text)."""
        table = self.table
        mine = self.of_file if of_file else ~self.of_file
        keys = self._keys(assembly)
        foreign, _ = foreign_texts(self.graph, of_file=of_file)
        is_kept = mine & is_attribute(table.tag)
        is_kept[foreign] = True
        rows = np.flatnonzero(is_kept)
        kind = self._fields(rows)
        held = (kind >= AttributeField.BOOL_LIST) | ((kind > AttributeField.DOUBLE) & (kind & 1 == 0))
        base = assembly.buffer(table.values)
        length = np.where(held, table.offsets[rows + 1] - table.offsets[rows], -1)
        bits = np.zeros(len(rows), np.uint64)
        bits[~held] = self._eight_bytes(rows[~held])
        node = np.maximum(table.node[rows].astype(np.int64), 0)
        assembly.verbatim(node, keys[table.key[rows]], kind, bits, (table.offsets[rows] + base, length))
        docs = np.flatnonzero(mine & (table.tag == Tag.DOC_STRING))
        texts = ByteRows(self.data, table.offsets).take(docs)
        return np.maximum(table.node[docs].astype(np.int64), 0), keys[table.key[docs]], texts

    def _fields(self, rows: Longs) -> Bytes:
        """The value field of each row that becomes an attribute."""
        kind = self.table.tag[rows].astype(np.uint8)
        kind[kind == Tag.NO_VALUE] = AttributeField.UNSET
        foreign = self.table.tag[rows] == Tag.TEXT
        kind[foreign] = AttributeField.STRING
        if int(self.data.max(initial=0)) >= _NO_ASCII:
            for place in np.flatnonzero(foreign).tolist():
                if not _is_utf8(self.table.value(int(rows[place]))):
                    kind[place] = AttributeField.BYTES
        return kind

    def _keys(self, assembly: Assembly) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The assembly's key for each string row in use."""
        keys = np.zeros(len(self.graph.strings), np.int32)
        for row in sorted(set(self.table.key[self.table.tag <= Tag.DOC_STRING].tolist())):
            keys[row] = assembly.key(self.graph.strings[row])
        return keys

    def metadata(self) -> AttributeColumns:
        """The file's own attributes."""
        assembly = Assembly(1)
        docs = self.add_to(assembly, of_file=True)
        nothing = np.empty(0, np.int64)
        return assembly.finish(Layouts((), nothing, nothing), docs).attrs


def _attributes(
    graph: OpGraph, variables: Variables, extra: _Extra, nanos: Longs, micros: Longs
) -> Assembled:
    assembly = Assembly(len(graph))
    strings = assembly.buffer(graph.strings.buffer)
    writer = _AttributeWriter(graph, assembly, strings)
    flagged = np.flatnonzero(graph.kind != NodeKind.METADATA)
    on_host = (graph.resource[flagged] == Resource.HOST).astype(np.int64)
    writer.integers("is_cpu_op", flagged, on_host, implied=on_host == 0)
    writer.strings_of("op_type", graph.op_row.astype(np.int64))
    writer.collectives(variables)
    writer.messages(variables)
    writer.floats("num_ops", graph.flops)
    writer.floats("tensor_size", graph.bytes_read + graph.bytes_written)
    streams = np.flatnonzero(graph.stream >= 0)
    writer.integers("stream", streams, graph.stream[streams].astype(np.int64))
    timed = np.flatnonzero(nanos >= 0)
    said = (nanos[timed] == micros[timed] * 1000) & (nanos[timed] > 0)
    writer.integers("duration_nanos", timed, nanos[timed], optional=said)
    writer.floats("bytes_written", np.where(graph.bytes_written > 0, graph.bytes_written, nan))
    writer.floats("useful_ops", np.where(graph.useful_flops == graph.flops, nan, graph.useful_flops))
    writer.transcendentals()
    writer.classes()
    writer.dtypes()
    writer.strings_of("framework_op", graph.framework_row.astype(np.int64))
    writer.contractions()
    writer.facts_of_collectives()
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
        nodes = np.flatnonzero((column >= 0) & (column < _LARGEST))
        self.integers(name, nodes, np.rint(column[nodes]).astype(np.int64))

    def transcendentals(self) -> None:
        """Left out where 0 beside a known ``num_ops``; -1 where unknown beside one."""
        graph = self.graph
        known = graph.flops >= 0
        unknown = np.isnan(graph.transcendentals)
        nodes = np.flatnonzero(np.where(known, graph.transcendentals != 0, ~unknown))
        value = np.where(unknown, -1.0, np.minimum(graph.transcendentals, _LARGEST))[nodes]
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
        base = self.assembly.buffer(b"".join(spelling))
        rows = ByteRows.from_rows(spelling)
        self.assembly.texts(
            name,
            ATTRIBUTES[name],
            nodes,
            rows.offsets[which] + base,
            rows.offsets[which + 1] - rows.offsets[which],
            slot=slot,
        )

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
        known = np.flatnonzero((size >= 0) & (size < _LARGEST))
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

    def messages(self, variables: Variables) -> None:
        table = self.graph.p2p
        node = table.node.astype(np.int64)
        self.sizes(node, table.comm_bytes)
        told = np.flatnonzero(table.permutation >= 0)
        sends = self.graph.kind[node[told]] == NodeKind.SEND
        chosen = table.permutation[told].astype(np.int64)
        own = variables.own_slot
        values = np.array([0 if isinstance(value, bytes) else value for value in variables.values()])
        source = np.where(sends, own, own + 2 + 2 * chosen)
        target = np.where(sends, own + 1 + 2 * chosen, own)
        self.integers("comm_src", node[told], values[source], slot=source, implied=sends)
        self.integers("comm_dst", node[told], values[target], slot=target, implied=~sends)
        tagged = np.flatnonzero(table.tag >= 0)
        self.integers("comm_tag", node[tagged], table.tag[tagged])

    def classes(self) -> None:
        default = np.zeros(len(NodeKind), np.uint8)
        for kind, op_class in DEFAULT_CLASS.items():
            default[kind] = op_class
        nodes = np.flatnonzero(self.graph.op_class != default[self.graph.kind])
        names = [member.name.lower().encode() for member in OpClass]
        self._spelled("op_class", nodes, names, self.graph.op_class[nodes].astype(np.int64))

    def dtypes(self) -> None:
        nodes = np.flatnonzero(self.graph.rate_dtype >= 0)
        names = [entry.name.encode() for entry in DTYPES]
        self._spelled("dtype", nodes, names, self.graph.rate_dtype[nodes].astype(np.int64))
