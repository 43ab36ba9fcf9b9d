"""Trace content without a place in the graph: stored verbatim in the graph's ``extra`` table and written
again.

This includes attribute layouts (see :class:`.assembly.Layouts`) and microseconds that a writer would choose
differently. ``duration_nanos`` is exact and takes precedence over ``duration_micros``. The microseconds,
which simulators read, are stored as well, so that a rewritten trace is unchanged and a checker can compare
both times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.assembly import Assembly, Layout, Layouts
from hespas.converters.chakra.contract import (
    ATTRIBUTES,
    GROUPS_ATTRIBUTE,
    JOB_ATTRIBUTE,
    LAYOUT_KEY,
    LINTED,
    RANK_ATTRIBUTE,
    STEPS_ATTRIBUTE,
    TEXTS_OF_JOB,
    Tag,
    is_canonical,
)
from hespas.converters.chakra.spelling import type_texts
from hespas.converters.chakra.times import WrittenTimes, micros_as_ns
from hespas.converters.chakra.wire import (
    AttributeColumns,
    Bools,
    ByteRows,
    ByteWindow,
    EtColumns,
    IoColumns,
    Longs,
    Words,
    copy_spans,
    has_payload,
    not_text,
    offsets_of,
)
from hespas.converters.chakra.wire.encode import delimited, join, render, rows
from hespas.graph import PROGRAM_BYTES, ExtraTable, OpGraph, RaggedArray, StringTableBuilder
from hespas.graph.columns import FloatArray
from hespas.schemas.chakra.tables import AttributeField

__all__ = [
    "ExtraRows",
    "PreservedRows",
    "attribute_rows",
    "collect",
    "file_rows",
    "find_layouts",
    "foreign_texts",
    "io_rows",
    "layout_rows",
    "simulated_ns",
    "start_rows",
    "time_rows",
]


@dataclass(frozen=True, slots=True, eq=False)
class ExtraRows:
    """Rows to be added to a graph's ``extra`` table, as columns of equal length. Rows of one node are sorted
    by ``order``.
    """

    node: Longs
    key: NDArray[np.int32]
    tag: NDArray[np.int16]
    value: ByteRows
    order: Longs


def _constant(node: Longs, key: int, tag: int, value: ByteRows) -> ExtraRows:
    count = len(node)
    return ExtraRows(
        node,
        np.full(count, key, np.int32),
        np.full(count, tag, np.int16),
        value,
        np.full(count, -1, np.int64),
    )


def attribute_rows(columns: EtColumns, preserved: Bools, strings: StringTableBuilder) -> list[ExtraRows]:
    """Return rows that preserve the attributes marked in ``preserved``, and the doc strings of all
    attributes.
    """
    attrs = columns.attrs
    key_rows = np.array([strings.add(name) for name in attrs.keys] or [0], np.int32)
    at = np.flatnonzero(preserved)
    owner = attrs.owner
    field = attrs.field[at].astype(np.int16)
    tag = np.where(field == AttributeField.UNSET, np.int16(Tag.NO_VALUE), field)
    # Payload bytes, or the eight bytes of ``bits``.
    bits = attrs.bits[at]
    held = attrs.has_payload[at]
    payload = attrs.payload
    data = np.concatenate([payload.data, np.frombuffer(bits.tobytes(), np.uint8)])
    start = len(payload.data) + 8 * np.arange(len(at), dtype=np.int64)
    length = np.full(len(at), 8, np.int64)
    row = bits[held].view(np.int64)
    start[held] = payload.offsets[row]
    length[held] = payload.offsets[row + 1] - payload.offsets[row]
    part = ExtraRows(
        owner[at],
        key_rows[attrs.key[at]],
        tag,
        ByteRows(*copy_spans(ByteWindow.holding(data), start, length)),
        at,
    )
    docs = attrs.doc_row
    described = ExtraRows(
        owner[docs],
        key_rows[attrs.key[docs]],
        np.full(len(docs), Tag.DOC_STRING, np.int16),
        attrs.doc,
        docs,
    )
    return [part, described]


def start_rows(columns: EtColumns) -> list[ExtraRows]:
    """Return rows that preserve start times, for which a graph has no column."""
    at = np.flatnonzero(columns.start_micros)
    if not len(at):
        return []
    data = np.frombuffer(columns.start_micros[at].astype("<u8").tobytes(), np.uint8)
    return [_constant(at, 0, Tag.START_MICROS, ByteRows(data, offsets_of(np.full(len(at), 8))))]


def time_rows(columns: EtColumns, duration_ns: FloatArray, written: Words) -> list[ExtraRows]:
    """Return rows that preserve the stated microseconds of the nodes for which a writer would compute another
    value (``written``). Each row also has the duration in ns, so that a later change of the duration can be
    detected.
    """
    at = np.flatnonzero(columns.duration_micros != written)
    if not len(at):
        return []
    pairs = np.stack([columns.duration_micros[at], duration_ns[at].view(np.uint64)], axis=1).astype("<u8")
    data = np.frombuffer(pairs.tobytes(), np.uint8)
    return [_constant(at, 0, Tag.DURATION_MICROS, ByteRows(data, offsets_of(np.full(len(at), 16))))]


def io_rows(io: IoColumns, tag: int) -> list[ExtraRows]:
    """Return rows that preserve ``IOInfo`` messages; ``tag`` is :attr:`Tag.INPUTS` or :attr:`Tag.OUTPUTS`."""
    if not len(io):
        return []
    parts = [
        part
        for number, text in zip((0x0A, 0x12, 0x1A), io.texts, strict=True)
        for part in delimited(number, [rows(text)], keep_empty=False)
    ]
    message = join(parts)
    return [_constant(io.node, 0, tag, ByteRows(render(message), offsets_of(message.row_bytes())))]


def layout_rows(layouts: Layouts, strings: StringTableBuilder) -> list[ExtraRows]:
    """Return rows that preserve the order and types of attributes (layouts). There is one row for each
    distinct layout, and one for each node with the number of its layout.
    """
    if not layouts.layouts:
        return []
    key = strings.add(LAYOUT_KEY)
    # A layout is encoded as field number, length of the name in four bytes, name; repeated.
    texts = [
        [bytes([field]) + len(name.encode()).to_bytes(4, "little") + name.encode() for name, field in layout]
        for layout in layouts.layouts
    ]
    whole = ByteRows.from_rows([b"".join(parts) for parts in texts])
    data = np.frombuffer(layouts.choice.astype("<u4").tobytes(), np.uint8)
    chosen = ByteRows(data, offsets_of(np.full(len(layouts.node), 4)))
    return [
        _constant(np.full(len(whole), -1, np.int64), key, Tag.LAYOUT, whole),
        _constant(layouts.node, key, Tag.LAYOUT, chosen),
    ]


def file_rows(columns: EtColumns, strings: StringTableBuilder, *, as_stated: bool) -> list[ExtraRows]:
    """Return rows that preserve the version label and the metadata attributes of a file. They belong to no
    node (node -1). ``as_stated`` adds a marker row (:attr:`Tag.AS_STATED`), so that the file is written
    without the attributes that Hespas adds.
    """
    version = ByteRows.from_text([columns.version])
    nobody = np.full(1, -1, np.int64)
    parts_of_file = [_constant(nobody, 0, Tag.VERSION, version)]
    if as_stated:
        parts_of_file.append(_constant(nobody, 0, Tag.AS_STATED, ByteRows.blank(1)))
    attrs = columns.metadata
    if len(attrs):
        holder = EtColumns.empty(attrs)
        parts = attribute_rows(holder, np.ones(len(attrs), np.bool_), strings)
        parts_of_file += [
            ExtraRows(np.full(len(part.node), -1, np.int64), part.key, part.tag, part.value, part.order)
            for part in parts
        ]
    return parts_of_file


def collect(parts: Sequence[ExtraRows]) -> ExtraTable:
    """Return all rows as one table, sorted by node and then by ``order``; rows with equal keys keep the order
    of ``parts``.
    """
    parts = [part for part in parts if len(part.node)]
    if not parts:
        return ExtraTable.empty()
    node = np.concatenate([part.node for part in parts])
    order = np.lexsort((np.concatenate([part.order for part in parts]), node))
    data = np.concatenate([part.value.data for part in parts])
    base = offsets_of(np.array([len(part.value.data) for part in parts]))
    starts = np.concatenate([part.value.offsets[:-1] + base[index] for index, part in enumerate(parts)])
    lengths = np.concatenate([part.value.lengths for part in parts])
    values, offsets = copy_spans(ByteWindow.holding(data), starts[order], lengths[order])
    return ExtraTable(
        node=node[order].astype(np.int32),
        key=np.concatenate([part.key for part in parts])[order],
        tag=np.concatenate([part.tag for part in parts])[order],
        offsets=offsets,
        values=values.tobytes(),
    )


_RANK = {name: rank for rank, name in enumerate(ATTRIBUTES)}
_EXTRA_RANK = len(_RANK)


def find_layouts(attrs: AttributeColumns, modelled: Bools, *, flagged: Bools, forced: Bools) -> Layouts:
    """Return the attribute order and types (layout) of each node that a writer would write differently.
    ``modelled`` marks attribute rows whose value is in a column of the graph. ``flagged`` marks nodes for
    which a writer adds ``is_cpu_op``. Nodes in ``forced`` always get a layout.
    """
    owner = attrs.owner
    rank_of_key = np.array([_RANK.get(name, _EXTRA_RANK) for name in attrs.keys] or [0])
    rank = np.where(modelled, rank_of_key[attrs.key], _EXTRA_RANK)
    unusual = flagged.copy()
    flag = rank_of_key[attrs.key] == _RANK["is_cpu_op"]
    unusual[owner[flag & modelled]] = False
    unusual[owner[modelled & ~is_canonical(attrs)]] = True
    falls = (owner[1:] == owner[:-1]) & (rank[1:] < rank[:-1])
    unusual[owner[1:][falls]] = True
    nodes = np.flatnonzero(unusual | forced)
    if not len(nodes):
        return Layouts((), nodes, nodes)
    code = attrs.key.astype(np.uint32) * np.uint32(_FIELDS) + attrs.field
    rows, index = ByteRows(code.view(np.uint8), attrs.offsets * code.itemsize).take(nodes).distinct()
    codes: list[list[int]] = [np.frombuffer(row, np.uint32).tolist() for row in rows]
    layouts = (tuple((attrs.keys[number // _FIELDS], number % _FIELDS) for number in row) for row in codes)
    return Layouts(tuple(layouts), nodes, index)


_FIELDS = 64
"""Limit of the field numbers of attribute values."""
_ROW_BYTES = 16


def _preserved_micros(graph: OpGraph) -> tuple[Longs, Words]:
    """Return the nodes with preserved microseconds whose duration is still the one that was read, and these
    microseconds.
    """
    table = graph.extra
    rows = np.flatnonzero((table.tag == Tag.DURATION_MICROS) & (table.node >= 0))
    rows = rows[np.diff(table.offsets)[rows] == _ROW_BYTES]
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    words = ByteWindow.holding(np.frombuffer(table.values, np.uint8)).words
    start = table.offsets[rows]
    nodes = table.node[rows].astype(np.int64)
    same = words[start + 8] == np.ascontiguousarray(graph.duration_ns[nodes]).view(np.uint64)
    return nodes[same], words[start][same]


def simulated_ns(graph: OpGraph) -> FloatArray:
    """Return the durations that simulators use [ns]. Simulators read ``duration_micros``, which is in whole
    microseconds: the value that the trace stated, or the duration rounded as a writer does. Some computations
    below 1 us thus get 0.
    """
    nodes, stated_micros = _preserved_micros(graph)
    micros = WrittenTimes.of(graph.duration_ns, graph.kind, (graph.resource, graph.stream)).micros.copy()
    micros[nodes] = stated_micros
    return micros_as_ns(micros)


_OTHER_TAGS = (
    Tag.DOC_STRING,
    Tag.START_MICROS,
    Tag.DURATION_MICROS,
    Tag.INPUTS,
    Tag.OUTPUTS,
    Tag.LAYOUT,
    Tag.VERSION,
    Tag.AS_STATED,
)
"""Tags of trace content other than attributes."""

_RESERVED = frozenset({"", *ATTRIBUTES, *LINTED})

_RESERVED_OF_FILE = frozenset(
    {"", RANK_ATTRIBUTE, GROUPS_ATTRIBUTE, JOB_ATTRIBUTE, PROGRAM_BYTES, STEPS_ATTRIBUTE, *TEXTS_OF_JOB}
)
"""Names of attributes with a meaning for readers of traces."""

_DEFAULT_VERSION = "0.0.4"


class PreservedRows:
    """Preserved trace content of a graph. It reads the rows that :func:`collect` has added to the ``extra``
    table.
    """

    def __init__(self, graph: OpGraph) -> None:
        """Read the version label of the trace from the table."""
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
        """Return start times in us, 0 if none is preserved."""
        column = np.zeros(len(self.graph), np.uint64)
        rows = self._rows(Tag.START_MICROS)
        column[self.table.node[rows]] = self._eight_bytes(rows)
        return column

    def _eight_bytes(self, rows: Longs) -> Words:
        if not len(rows):
            return np.empty(0, np.uint64)
        return ByteWindow.holding(self.data).words[self.table.offsets[rows]]

    def times(self, times: WrittenTimes) -> WrittenTimes:
        """Return ``times`` with the microseconds that the trace stated, for nodes whose duration is
        unchanged.
        """
        nodes, stated_micros = _preserved_micros(self.graph)
        if not len(nodes):
            return times
        micros = times.micros.copy()
        micros[nodes] = stated_micros
        return times._replace(micros=micros)

    def io(self, tag: int, operands: RaggedArray) -> IoColumns:
        """Return the ``IOInfo`` of all nodes: preserved texts if there are any, else texts made from tensor
        types.
        """
        rows = self._rows(tag)
        made = type_texts(self.graph, operands)
        if not len(rows):
            return made
        from hespas.converters.chakra.wire.decode import decode_io

        start = self.table.offsets[rows]
        preserved = decode_io(ByteWindow.holding(self.data), start, self.table.offsets[rows + 1] - start)
        preserved = IoColumns(
            self.table.node[rows].astype(np.int64), preserved.values, preserved.shapes, preserved.types
        )
        made = made.take(np.flatnonzero(~np.isin(made.node, preserved.node)))
        return preserved.joined(made) if len(made) else preserved

    def layouts(self) -> Layouts:
        """Return the preserved attribute layouts and the layout of each node."""
        whole = np.flatnonzero(self.of_file & (self.table.tag == Tag.LAYOUT))
        chosen = self._rows(Tag.LAYOUT)
        nothing = np.empty(0, np.int64)
        if not len(whole) or not len(chosen):
            return Layouts((), nothing, nothing)
        index = ByteWindow.holding(self.data).words[self.table.offsets[chosen]] & np.uint64(0xFFFFFFFF)
        good = index < len(whole)
        used, choice = np.unique(index[good], return_inverse=True)
        layouts: list[Layout] = []
        for row in whole[used.view(np.int64)].tolist():
            data, at = self.table.value(row), 0
            layout: list[tuple[str, int]] = []
            while at + 5 <= len(data):
                end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
                layout.append((data[at + 5 : end].decode(), data[at]))
                at = end
            layouts.append(tuple(layout))
        nodes = self.table.node[chosen][good].astype(np.int64)
        return Layouts(tuple(layouts), nodes, choice.astype(np.int64))

    def add_to(self, assembly: Assembly, *, of_file: bool) -> tuple[Longs, NDArray[np.int32], ByteRows]:
        """Add the preserved attributes of the file (``of_file``) or of all nodes to an assembly. Return their
        doc strings as (node, name number, text).
        """
        table = self.table
        mine = self.of_file if of_file else ~self.of_file
        keys = np.zeros(len(self.graph.strings), np.int32)
        for row in sorted(set(self.table.key[self.table.tag <= Tag.DOC_STRING].tolist())):
            keys[row] = assembly.key(self.graph.strings[row])
        foreign, _ = foreign_texts(self.graph, of_file=of_file)
        is_kept = mine & _is_attribute(table)
        is_kept[foreign] = True
        rows = np.flatnonzero(is_kept)
        kind = self.table.tag[rows].astype(np.uint8)
        kind[kind == Tag.NO_VALUE] = AttributeField.UNSET
        text_rows = np.flatnonzero(self.table.tag[rows] == Tag.TEXT)
        broken = not_text(ByteRows(self.data, self.table.offsets).take(rows[text_rows]))
        kind[text_rows] = np.where(broken, AttributeField.BYTES, AttributeField.STRING)
        held = has_payload(kind)
        base = assembly.buffer(table.values)
        length = np.where(held, table.offsets[rows + 1] - table.offsets[rows], -1)
        bits = np.zeros(len(rows), np.uint64)
        bits[~held] = self._eight_bytes(rows[~held])
        node = np.maximum(table.node[rows].astype(np.int64), 0)
        assembly.verbatim(node, keys[table.key[rows]], kind, bits, (table.offsets[rows] + base, length))
        docs = np.flatnonzero(mine & (table.tag == Tag.DOC_STRING))
        texts = ByteRows(self.data, table.offsets).take(docs)
        return np.maximum(table.node[docs].astype(np.int64), 0), keys[table.key[docs]], texts

    def metadata(self) -> AttributeColumns:
        """Return the preserved metadata attributes of the file."""
        assembly = Assembly(1)
        docs = self.add_to(assembly, of_file=True)
        nothing = np.empty(0, np.int64)
        return assembly.finish(Layouts((), nothing, nothing), docs).attrs


def foreign_texts(graph: OpGraph, *, of_file: bool) -> tuple[Longs, int]:
    """Return the rows with texts of another format that can be written as string attributes. Also return the
    number of rows that cannot be written. These have no key, a key with another meaning in a trace, a key
    that the node already has, an unknown tag, or a number that does not have eight bytes.
    """
    table = graph.extra
    mine = (table.node < 0) == of_file
    own = _is_attribute(table)
    foreign = mine & (table.tag == Tag.TEXT)
    unknown = int((mine & ~own & ~foreign & ~np.isin(table.tag, _OTHER_TAGS)).sum())
    if not foreign.any():
        return np.empty(0, np.int64), unknown
    reserved = _RESERVED_OF_FILE if of_file else _RESERVED
    bad = [key for key in np.unique(table.key[foreign]).tolist() if graph.strings[key] in reserved]
    rows = np.flatnonzero(foreign & ~np.isin(table.key, bad))
    # Attributes that were preserved from a trace take precedence.
    attributes = np.flatnonzero(mine & own)
    order = np.concatenate([attributes, rows])
    code = (table.node[order].astype(np.int64) + 1) * len(graph.strings) + table.key[order]
    first = np.unique(code, return_index=True)[1]
    writable = np.sort(order[first[first >= len(attributes)]])
    return writable, unknown + int(foreign.sum()) - len(writable)


def _is_attribute(table: ExtraTable) -> Bools:
    """Return a mask of the table rows that preserve attributes of a trace. A number or an absent value must
    have eight bytes.
    """
    tag = table.tag
    of_value = (tag >= AttributeField.DOUBLE) & (tag <= AttributeField.BYTES_LIST)
    eight_bytes = np.diff(table.offsets) == 8
    is_attribute: Bools = (of_value & (eight_bytes | has_payload(tag))) | (
        (tag == Tag.NO_VALUE) & eight_bytes
    )
    return is_attribute
