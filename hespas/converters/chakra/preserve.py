"""What the graph does not model, kept verbatim in its ``extra`` table; :mod:`.assembly` takes it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.assembly import Layout, Layouts, encode_layout
from hespas.converters.chakra.contract import (
    ATTRIBUTES,
    LAYOUT_KEY,
    Tag,
    is_canonical,
)
from hespas.converters.chakra.wire import (
    AttributeColumns,
    Bools,
    ByteRows,
    EtColumns,
    IoColumns,
    Longs,
    Window,
    Words,
    copy_spans,
    offsets_of,
)
from hespas.converters.chakra.wire.encode import delimited, join, render, rows
from hespas.graph import ExtraTable, StringTableBuilder
from hespas.graph.columns import FloatArray
from hespas.schemas.chakra.tables import AttributeField

__all__ = [
    "ExtraRows",
    "attribute_rows",
    "collect",
    "file_rows",
    "find_layouts",
    "io_rows",
    "layout_rows",
    "start_rows",
    "time_rows",
]


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
        for number, text in zip((0x0A, 0x12, 0x1A), io.texts, strict=True)
        for part in delimited(number, [rows(text)], keep_empty=False)
    ]
    message = join(parts)
    return [_constant(io.node, 0, tag, ByteRows(render(message), offsets_of(message.row_bytes())))]


def layout_rows(layouts: Layouts, strings: StringTableBuilder) -> list[ExtraRows]:
    """Distinct layouts as rows of the file, and each node's choice."""
    if not layouts.layouts:
        return []
    key = strings.add(LAYOUT_KEY)
    whole = ByteRows.from_rows([encode_layout(layout) for layout in layouts.layouts])
    data = np.frombuffer(layouts.choice.astype("<u4").tobytes(), np.uint8)
    chosen = ByteRows(data, offsets_of(np.full(len(layouts.node), 4)))
    return [
        _constant(np.full(len(whole), -1, np.int64), key, Tag.LAYOUT, whole),
        _constant(layouts.node, key, Tag.LAYOUT, chosen),
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


# Finding the nodes of a trace that a writer would write otherwise, and the distinct layouts they have.

_RANK = {name: rank for rank, name in enumerate(ATTRIBUTES)}
_EXTRA_RANK = len(_RANK)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _unusual(attrs: AttributeColumns, owner: Longs, modelled: Bools, always: Bools) -> Bools:
    """Nodes whose attributes a writer would not write just so."""
    rank_of_key = np.array([_RANK.get(name, _EXTRA_RANK) for name in attrs.keys] or [0])
    rank = np.where(modelled, rank_of_key[attrs.key], _EXTRA_RANK)
    unusual = always.copy()
    flag = rank_of_key[attrs.key] == _RANK["is_cpu_op"]
    unusual[owner[flag & modelled]] = False
    unusual[owner[modelled & ~is_canonical(attrs)]] = True
    falls = (owner[1:] == owner[:-1]) & (rank[1:] < rank[:-1])
    unusual[owner[1:][falls]] = True
    return unusual


def find_layouts(attrs: AttributeColumns, modelled: Bools, *, flagged: Bools, forced: Bools) -> Layouts:
    """The layouts worth keeping. ``modelled`` marks rows whose value went into a column of the graph;
    ``flagged`` the nodes for which a writer states ``is_cpu_op``; ``forced`` are kept in any case.
    """
    owner = attrs.owner
    nodes = np.flatnonzero(_unusual(attrs, owner, modelled, flagged) | forced)
    if not len(nodes):
        return Layouts((), nodes, nodes)
    representative, index = _distinct(attrs, nodes)
    names = attrs.keys
    layouts: list[Layout] = []
    for node in representative.tolist():
        rows = slice(int(attrs.offsets[node]), int(attrs.offsets[node + 1]))
        keys: list[int] = attrs.key[rows].tolist()
        fields: list[int] = attrs.field[rows].tolist()
        layouts.append(tuple((names[key], field) for key, field in zip(keys, fields, strict=True)))
    return Layouts(tuple(layouts), nodes, index)


def _distinct(attrs: AttributeColumns, nodes: Longs) -> tuple[Longs, Longs]:
    """One node of each distinct sequence of (name, type), and which of them each of ``nodes`` follows."""
    code = attrs.key.astype(np.uint64) * np.uint64(64) + attrs.field
    start, length = attrs.offsets[nodes], attrs.offsets[nodes + 1] - attrs.offsets[nodes]
    own = _hashes(code, start, length)
    _, first, inverse = np.unique(own, return_index=True, return_inverse=True)
    first, inverse = _by_appearance(first, inverse)
    # Equal hashes must be equal sequences; what is not (an attack on the hash) gets a layout of its own.
    model = first[inverse]
    same = length == length[model]
    flat = np.repeat(start - (np.cumsum(length) - length), length) + np.arange(int(length.sum()))
    shift = np.repeat(start[model] - start, length)
    agree = code[np.minimum(flat + shift, len(code) - 1)] == code[flat] if len(code) else flat > 0
    wrong = np.repeat(np.arange(len(nodes)), length)[~agree]
    same[wrong] = False
    strangers = np.flatnonzero(~same)
    index = inverse.astype(np.int64)
    index[strangers] = len(first) + np.arange(len(strangers))
    return np.concatenate([nodes[first], nodes[strangers]]), index


def _by_appearance(first: Longs, inverse: Longs) -> tuple[Longs, Longs]:
    """Number the distinct rows as they come, not by their hashes, which depend on how names are numbered."""
    order = np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[inverse]


def _hashes(code: Words, start: Longs, length: Longs) -> Words:
    """A hash of each slice of ``code``: a polynomial in an odd number, modulo 2**64."""
    total = np.zeros(len(start), np.uint64)
    for place in range(int(length.max()) if len(length) else 0):
        rows = np.flatnonzero(length > place)
        if len(rows) < _FEW:
            return _rest(code, start, length, total, place)
        total[rows] = total[rows] * _ODD + code[start[rows] + place] + np.uint64(1)
    return total


_FEW = 16
"""Below so many long rows, the rest of each is hashed by itself."""


def _rest(code: Words, start: Longs, length: Longs, total: Words, place: int) -> Words:
    from hashlib import blake2b

    for row in np.flatnonzero(length > place).tolist():
        tail = code[start[row] + place : start[row] + length[row]].tobytes()
        total[row] ^= np.frombuffer(blake2b(tail, digest_size=8).digest(), np.uint64)[0]
    return total
