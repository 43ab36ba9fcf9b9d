"""Columns to Chakra trace files, byte for byte what a protobuf serialiser writes for the same messages:
fields ascending, proto3 defaults left out, integer lists packed.

Works on a few thousand nodes at a time, so that memory does not grow with the trace.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hespas.converters.chakra.columns import AttributeColumns, ByteRows, EtColumns, IoColumns
from hespas.converters.chakra.spans import Bytes, Longs, Window, Words
from hespas.converters.chakra.tokens import Tokens, delimited, fixed, join, render, rows, spans, varints
from hespas.graph.errors import InvariantError
from hespas.schemas.chakra.tables import VALUE_FIELDS, AttributeField, NodeField, WireType, encode_varint, tag

__all__ = ["encode_chunks", "encode_metadata", "encode_nodes"]

_CHUNK_NODES = 4096


def _tag(number: int, wire: WireType) -> int:
    """A tag as the number whose little-endian bytes it is."""
    return int.from_bytes(tag(number, wire), "little")


def encode_chunks(columns: EtColumns, chunk_nodes: int = _CHUNK_NODES) -> Iterator[bytes | memoryview[int]]:
    """A whole file, piece by piece: the metadata frame, then the nodes in order."""
    yield encode_metadata(columns)
    for start in range(0, len(columns), chunk_nodes):
        yield encode_nodes(columns.part(start, min(start + chunk_nodes, len(columns)))).data


def encode_metadata(columns: EtColumns) -> bytes:
    """The first frame of the file."""
    version = rows(ByteRows.from_text([columns.version]))
    message = [
        *delimited(_tag(1, WireType.BYTES), [version], keep_empty=False),
        _attributes(columns.metadata, _tag(2, WireType.BYTES)),
    ]
    return render(join(delimited(None, message, keep_empty=True))).tobytes()


def encode_nodes(columns: EtColumns) -> Bytes:
    """The frames of all nodes, one behind the other. Memory: about 1 KB a node while it runs."""
    count = len(columns)
    message = [
        _scalars(NodeField.ID, columns.id),
        *delimited(_tag(NodeField.NAME, WireType.BYTES), [rows(columns.name)], keep_empty=False),
        _scalars(NodeField.TYPE, columns.type.astype(np.int64).view(np.uint64)),
        *_packed(NodeField.CTRL_DEPS, columns.ctrl_offsets, columns.ctrl_deps),
        *_packed(NodeField.DATA_DEPS, columns.data_offsets, columns.data_deps),
        _scalars(NodeField.START_TIME_MICROS, columns.start_micros),
        _scalars(NodeField.DURATION_MICROS, columns.duration_micros),
        _io(NodeField.INPUTS, columns.inputs, count),
        _io(NodeField.OUTPUTS, columns.outputs, count),
        _attributes(columns.attrs, _tag(NodeField.ATTR, WireType.BYTES)),
    ]
    return render(join(delimited(None, message, keep_empty=True)))


def _scalars(number: int, values: Words) -> Tokens:
    """A singular integer field; zeros are left out."""
    if not values.any():
        return Tokens.none(len(values))
    keep = values != 0
    return varints(values, _tag(number, WireType.VARINT), keep=None if keep.all() else keep)


def _packed(number: int, offsets: Longs, values: Words) -> list[Tokens]:
    """A repeated integer field; empty lists are left out."""
    counts = np.diff(offsets)
    if not len(values):
        return [Tokens.none(len(counts))]
    entries = varints(values)
    content = Tokens(entries.blocks, entries.widths, counts)
    return delimited(_tag(number, WireType.BYTES), [content], keep_empty=False)


def _io(number: int, columns: IoColumns, count: int) -> Tokens:
    """``IOInfo`` messages of the nodes that have one."""
    if not len(columns):
        return Tokens.none(count)
    texts: list[Tokens] = []
    for place, text in ((1, columns.values), (2, columns.shapes), (3, columns.types)):
        texts += delimited(_tag(place, WireType.BYTES), [rows(text)], keep_empty=False)
    return join(delimited(_tag(number, WireType.BYTES), texts, keep_empty=True)).only_in(columns.node, count)


def _attributes(columns: AttributeColumns, number_tag: int) -> Tokens:
    """All attributes, grouped by owner."""
    if not len(columns):
        return Tokens.none(len(columns.offsets) - 1)
    message = [_names(columns), *_docs(columns), *_values(columns)]
    return join(delimited(number_tag, message, keep_empty=True)).grouped(columns.offsets)


def _names(columns: AttributeColumns) -> Tokens:
    """The name field of each attribute, copied from one encoding per distinct name."""
    head = tag(AttributeField.NAME, WireType.BYTES)
    encoded = [name.encode() for name in columns.keys]
    prefixes = ByteRows.from_rows(
        [head + encode_varint(len(name)) + name if name else b"" for name in encoded]
    )
    window = Window.holding(prefixes.data)
    return spans(window, prefixes.offsets[columns.key], prefixes.lengths[columns.key])


def _docs(columns: AttributeColumns) -> list[Tokens]:
    if not len(columns.doc_row):
        return []
    docs = delimited(_tag(AttributeField.DOC_STRING, WireType.BYTES), [rows(columns.doc)], keep_empty=False)
    return [join(docs).only_in(columns.doc_row, len(columns))]


def _value_tags() -> tuple[Words, Bytes]:
    """By field number, the bytes of the value's tag and the wire type."""
    tags, wires = np.zeros(33, np.uint64), np.zeros(33, np.uint8)
    for number, kind in VALUE_FIELDS.items():
        for field, wire in ((number, kind.wire), (number + 1, WireType.BYTES)):
            tags[field], wires[field] = _tag(field, wire), wire
    return tags, wires


_VALUE_TAGS, _VALUE_WIRES = _value_tags()


def _values(columns: AttributeColumns) -> list[Tokens]:
    """The value of each attribute, whatever its type; a value is written even when it is zero."""
    if int(columns.field.max()) >= len(_VALUE_TAGS):
        raise InvariantError("an attribute has a value field that the schema does not know")
    tags = _VALUE_TAGS.take(columns.field)
    wires = _VALUE_WIRES.take(columns.field)
    has = columns.field > 0
    tokens = varints(_raw_varints(columns, wires == WireType.BYTES), tags, keep=None if has.all() else has)
    for wire, size in ((WireType.FIXED64, 8), (WireType.FIXED32, 4)):
        at = np.flatnonzero(wires == wire)
        if len(at):
            part = fixed(columns.bits[at], size, tags[at])
            tokens.blocks[at], tokens.widths[at] = part.blocks, part.widths
    if not len(columns.payload):
        return [tokens]
    content = rows(columns.payload).only_in(np.flatnonzero(wires == WireType.BYTES), len(columns))
    return [tokens, content]


def _raw_varints(columns: AttributeColumns, payload: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Words:
    """What stands in the varint of each value: the length of a payload, an integer, a zigzag integer."""
    raw = columns.bits
    if payload.any():
        raw = raw.copy()
        raw[payload] = columns.payload.lengths.view(np.uint64)
    zigzag = (columns.field == AttributeField.SINT32) | (columns.field == AttributeField.SINT64)
    if zigzag.any():
        signed = columns.bits[zigzag].view(np.int64)
        raw = raw.copy()
        raw[zigzag] = (signed << 1 ^ signed >> 63).view(np.uint64)
    return raw
