"""What the graph does not model, kept verbatim in its ``extra`` table, and taken from there again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.columns import ByteRows, EtColumns, IoColumns
from hespas.converters.chakra.contract import (
    ATTRIBUTES,
    GROUPS_ATTRIBUTE,
    JOB_ATTRIBUTE,
    LAYOUT_KEY,
    LINTED,
    RANK_ATTRIBUTE,
    Tag,
)
from hespas.converters.chakra.layouts import Layouts, encode_layout
from hespas.converters.chakra.spans import Bools, Longs, Window, Words, copy_spans, offsets_of
from hespas.converters.chakra.tokens import delimited, join, render, rows
from hespas.graph import WHOLE_JOB, ExtraTable, OpGraph, StringTableBuilder
from hespas.graph.columns import FloatArray
from hespas.schemas.chakra.tables import AttributeField

__all__ = [
    "ExtraRows",
    "attribute_rows",
    "collect",
    "file_rows",
    "foreign_texts",
    "io_rows",
    "is_attribute",
    "layout_rows",
    "start_rows",
    "time_rows",
]


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
"""What a trace has beside attributes."""

_RESERVED = frozenset({"", *ATTRIBUTES, *LINTED})
_RESERVED_OF_FILE = frozenset({"", RANK_ATTRIBUTE, GROUPS_ATTRIBUTE, JOB_ATTRIBUTE, WHOLE_JOB})
"""Names of attributes that readers of traces understand."""


@dataclass(frozen=True, slots=True, eq=False)
class ExtraRows:
    """Rows for the table: columns of equal length. ``order`` sorts the rows of one node among each other."""

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


def attribute_rows(columns: EtColumns, kept: Bools, strings: StringTableBuilder) -> list[ExtraRows]:
    """The attributes marked in ``kept``, and the doc strings of all attributes."""
    attrs = columns.attrs
    key_rows = np.array([strings.add(name) for name in attrs.keys] or [0], np.int32)
    at = np.flatnonzero(kept)
    owner = attrs.owner
    field = attrs.field[at].astype(np.int16)
    tag = np.where(field == AttributeField.UNSET, np.int16(Tag.NO_VALUE), field)
    part = ExtraRows(owner[at], key_rows[attrs.key[at]], tag, _raw_values(columns, at), at)
    docs = attrs.doc_row
    described = ExtraRows(
        owner[docs],
        key_rows[attrs.key[docs]],
        np.full(len(docs), Tag.DOC_STRING, np.int16),
        attrs.doc,
        docs,
    )
    return [part, described]


def _raw_values(columns: EtColumns, at: Longs) -> ByteRows:
    """Payload bytes, or the eight bytes of ``bits``, of the given attribute rows."""
    attrs = columns.attrs
    bits = attrs.bits[at]
    held = attrs.has_payload[at]
    payload = attrs.payload
    data = np.concatenate([payload.data, np.frombuffer(bits.tobytes(), np.uint8)])
    start = len(payload.data) + 8 * np.arange(len(at), dtype=np.int64)
    length = np.full(len(at), 8, np.int64)
    row = bits[held].view(np.int64)
    start[held] = payload.offsets[row]
    length[held] = payload.offsets[row + 1] - payload.offsets[row]
    return ByteRows(*copy_spans(Window.holding(data), start, length))


def foreign_texts(graph: OpGraph, *, of_file: bool) -> tuple[Longs, int]:
    """Rows of another format's texts that become string attributes, and how many rows cannot be written:
    those without a key or with one that means something else in a trace, a second one of a key on a node, and
    those whose tag no trace knows.
    """
    table = graph.extra
    mine = (table.node < 0) == of_file
    own = is_attribute(table.tag)
    foreign = mine & (table.tag == Tag.TEXT)
    unknown = int((mine & ~own & ~foreign & ~np.isin(table.tag, _OTHER_TAGS)).sum())
    if not foreign.any():
        return np.empty(0, np.int64), unknown
    reserved = _RESERVED_OF_FILE if of_file else _RESERVED
    bad = [key for key in np.unique(table.key[foreign]).tolist() if graph.strings[key] in reserved]
    rows = np.flatnonzero(foreign & ~np.isin(table.key, bad))
    # Attributes that were kept from a trace stay: they take precedence.
    attributes = np.flatnonzero(mine & own)
    order = np.concatenate([attributes, rows])
    code = (table.node[order].astype(np.int64) + 1) * len(graph.strings) + table.key[order]
    first = np.unique(code, return_index=True)[1]
    kept = np.sort(order[first[first >= len(attributes)]])
    return kept, unknown + int(foreign.sum()) - len(kept)


def is_attribute(tag: NDArray[np.int16]) -> Bools:
    """Which tags mark attributes of a trace."""
    of_value = (tag >= AttributeField.DOUBLE) & (tag <= AttributeField.BYTES_LIST)
    found: Bools = of_value | (tag == Tag.NO_VALUE)
    return found


def start_rows(columns: EtColumns) -> list[ExtraRows]:
    """Start times, which a graph does not have."""
    at = np.flatnonzero(columns.start_micros)
    if not len(at):
        return []
    data = np.frombuffer(columns.start_micros[at].astype("<u8").tobytes(), np.uint8)
    return [_constant(at, 0, Tag.START_MICROS, ByteRows(data, offsets_of(np.full(len(at), 8))))]


def time_rows(columns: EtColumns, duration_ns: FloatArray, written: Words) -> list[ExtraRows]:
    """Microseconds that are not those which a writer makes of the durations, each with its duration."""
    at = np.flatnonzero(columns.duration_micros != written)
    if not len(at):
        return []
    pairs = np.stack([columns.duration_micros[at], duration_ns[at].view(np.uint64)], axis=1).astype("<u8")
    data = np.frombuffer(pairs.tobytes(), np.uint8)
    return [_constant(at, 0, Tag.DURATION_MICROS, ByteRows(data, offsets_of(np.full(len(at), 16))))]


def io_rows(io: IoColumns, tag: int) -> list[ExtraRows]:
    """``IOInfo`` texts as their encoded messages."""
    if not len(io):
        return []
    parts = [
        part
        for number, text in ((0x0A, io.values), (0x12, io.shapes), (0x1A, io.types))
        for part in delimited(number, [rows(text)], keep_empty=False)
    ]
    message = join(parts)
    return [_constant(io.node, 0, tag, ByteRows(render(message), offsets_of(message.row_bytes())))]


def layout_rows(found: Layouts, strings: StringTableBuilder) -> list[ExtraRows]:
    """Distinct layouts as rows of the file, and each node's choice."""
    if not found.layouts:
        return []
    key = strings.add(LAYOUT_KEY)
    whole = ByteRows.from_rows([encode_layout(layout) for layout in found.layouts])
    data = np.frombuffer(found.choice.astype("<u4").tobytes(), np.uint8)
    chosen = ByteRows(data, offsets_of(np.full(len(found.node), 4)))
    return [
        _constant(np.full(len(whole), -1, np.int64), key, Tag.LAYOUT, whole),
        _constant(found.node, key, Tag.LAYOUT, chosen),
    ]


def file_rows(columns: EtColumns, strings: StringTableBuilder, *, as_stated: bool) -> list[ExtraRows]:
    """The file's version label and metadata attributes, as rows of node -1."""
    version = ByteRows.from_text([columns.version])
    nobody = np.full(1, -1, np.int64)
    found = [_constant(nobody, 0, Tag.VERSION, version)]
    if as_stated:
        found.append(_constant(nobody, 0, Tag.AS_STATED, ByteRows.blank(1)))
    attrs = columns.metadata
    if len(attrs):
        holder = EtColumns.empty(attrs)
        parts = attribute_rows(holder, np.ones(len(attrs), np.bool_), strings)
        found += [
            ExtraRows(np.full(len(part.node), -1, np.int64), part.key, part.tag, part.value, part.order)
            for part in parts
        ]
    return found


def collect(parts: Sequence[ExtraRows]) -> ExtraTable:
    """One table of all rows, sorted by node and then by order; the order of parts breaks ties."""
    parts = [part for part in parts if len(part.node)]
    if not parts:
        return ExtraTable.empty()
    node = np.concatenate([part.node for part in parts])
    order = np.lexsort((np.concatenate([part.order for part in parts]), node))
    data = np.concatenate([part.value.data for part in parts])
    base = offsets_of(np.array([len(part.value.data) for part in parts]))
    starts = np.concatenate([part.value.offsets[:-1] + base[place] for place, part in enumerate(parts)])
    lengths = np.concatenate([part.value.lengths for part in parts])
    values, offsets = copy_spans(Window.holding(data), starts[order], lengths[order])
    return ExtraTable(
        node=node[order].astype(np.int32),
        key=np.concatenate([part.key for part in parts])[order],
        tag=np.concatenate([part.tag for part in parts])[order],
        offsets=offsets,
        values=values.tobytes(),
    )
