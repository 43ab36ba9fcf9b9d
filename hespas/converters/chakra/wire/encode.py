"""Encoding of columns as Chakra trace files, byte for byte as a protobuf serialiser writes the same messages:
ascending fields, no proto3 defaults, packed integer lists.

All nodes of the given columns are encoded at once. Every field becomes one or more tokens. A token is a block
of 16 bytes of which only the first ``width`` are content. :func:`join` puts the tokens of several fields in
message order, and :func:`render` writes all blocks at ascending positions, so that each block overwrites the
unused end of the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.wire import (
    BLOCK,
    AttributeColumns,
    ByteRows,
    Bytes,
    ByteWindow,
    EtColumns,
    IoColumns,
    Longs,
    Words,
    offsets_of,
)
from hespas.files.wire import encode_varint, tag
from hespas.graph.errors import InvariantError
from hespas.schemas.chakra.tables import VALUE_FIELDS, AttributeField, NodeField, WireType

__all__ = [
    "delimited",
    "encode_metadata",
    "encode_nodes",
    "join",
    "render",
    "rows",
    "varint_widths",
]


def _tag(number: int, wire: WireType) -> int:
    """Return the encoded tag of a protobuf field as a little-endian integer."""
    return int.from_bytes(tag(number, wire), "little")


def encode_metadata(columns: EtColumns) -> Bytes:
    """Return the encoded metadata, which is the first message of the file."""
    version = rows(ByteRows.from_text([columns.version]))
    message = [
        *delimited(_tag(1, WireType.BYTES), [version], keep_empty=False),
        _attributes(columns.metadata, _tag(2, WireType.BYTES)),
    ]
    return render(join(delimited(None, message, keep_empty=True)))


def encode_nodes(columns: EtColumns) -> Bytes:
    """Return the frames (length and message) of all nodes, concatenated. Memory: about 1 KB per node while it
    runs.
    """
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


def _scalars(number: int, values: Words) -> _Tokens:
    """Return the tokens of a singular integer field; zeros are omitted."""
    if not values.any():
        return _Tokens.none(len(values))
    keep = values != 0
    return _varints(values, _tag(number, WireType.VARINT), keep=None if keep.all() else keep)


def _packed(number: int, offsets: Longs, values: Words) -> list[_Tokens]:
    """Return the tokens of a repeated integer field; empty lists are omitted."""
    counts = np.diff(offsets)
    if not len(values):
        return [_Tokens.none(len(counts))]
    entries = _varints(values)
    content = _Tokens(entries.blocks, entries.widths, counts)
    return delimited(_tag(number, WireType.BYTES), [content], keep_empty=False)


def _io(number: int, columns: IoColumns, count: int) -> _Tokens:
    """Return the tokens of the ``IOInfo`` messages of those nodes that have one."""
    if not len(columns):
        return _Tokens.none(count)
    texts: list[_Tokens] = []
    for number_of_text, text in enumerate(columns.texts, start=1):
        texts += delimited(_tag(number_of_text, WireType.BYTES), [rows(text)], keep_empty=False)
    return join(delimited(_tag(number, WireType.BYTES), texts, keep_empty=True)).only_in(columns.node, count)


def _attributes(columns: AttributeColumns, number_tag: int) -> _Tokens:
    """Return the tokens of all attributes, grouped by the node that has them."""
    if not len(columns):
        return _Tokens.none(len(columns.offsets) - 1)
    head = tag(AttributeField.NAME, WireType.BYTES)
    encoded = [name.encode() for name in columns.keys]
    prefixes = ByteRows.from_rows(
        [head + encode_varint(len(name)) + name if name else b"" for name in encoded]
    )
    window = ByteWindow.holding(prefixes.data)
    message = [_spans(window, prefixes.offsets[columns.key], prefixes.lengths[columns.key])]
    if len(columns.doc_row):
        doc_tag = _tag(AttributeField.DOC_STRING, WireType.BYTES)
        docs = delimited(doc_tag, [rows(columns.doc)], keep_empty=False)
        message.append(join(docs).only_in(columns.doc_row, len(columns)))
    message += _values(columns)
    return join(delimited(number_tag, message, keep_empty=True)).grouped(columns.offsets)


def _value_tags() -> tuple[Words, Bytes]:
    """Return two tables by field number of attribute values: the bytes of the tag, and the wire type."""
    tags, wires = np.zeros(33, np.uint64), np.zeros(33, np.uint8)
    for number, kind in VALUE_FIELDS.items():
        for field, wire in ((number, kind.wire), (number + 1, WireType.BYTES)):
            tags[field], wires[field] = _tag(field, wire), wire
    return tags, wires


_VALUE_TAGS, _VALUE_WIRES = _value_tags()


def _values(columns: AttributeColumns) -> list[_Tokens]:
    """Return the tokens of each attribute's value. Unlike other fields, a value of zero is written."""
    if int(columns.field.max()) >= len(_VALUE_TAGS):
        raise InvariantError("an attribute has a value field that the schema does not know")
    tags = _VALUE_TAGS.take(columns.field)
    wires = _VALUE_WIRES.take(columns.field)
    has = columns.field > 0
    payload = wires == WireType.BYTES
    raw = columns.bits
    if payload.any():
        raw = raw.copy()
        raw[payload] = columns.payload.lengths.view(np.uint64)
    zigzag = (columns.field == AttributeField.SINT32) | (columns.field == AttributeField.SINT64)
    if zigzag.any():
        signed = columns.bits[zigzag].view(np.int64)
        raw = raw.copy()
        raw[zigzag] = (signed << 1 ^ signed >> 63).view(np.uint64)
    tokens = _varints(raw, tags, keep=None if has.all() else has)
    for wire, size in ((WireType.FIXED64, 8), (WireType.FIXED32, 4)):
        at = np.flatnonzero(wires == wire)
        if len(at):
            bits = columns.bits[at]
            part = _tagged(
                bits, np.zeros(len(bits), np.uint64), np.full(len(bits), size, np.int64), tags[at], None
            )
            tokens.blocks[at], tokens.widths[at] = part.blocks, part.widths
    if not len(columns.payload):
        return [tokens]
    content = rows(columns.payload).only_in(np.flatnonzero(wires == WireType.BYTES), len(columns))
    return [tokens, content]


_BLOCK_TYPE = np.dtype((np.void, BLOCK))
_CONTINUE = np.uint64(0x8080808080808080)
_ONE, _EIGHT, _WORD = np.uint64(1), np.uint64(8), np.uint64(64)


class _Tokens(NamedTuple):
    """Encoded pieces of up to 16 bytes (tokens), in row order. A row is the encoding of one field of one node
    or attribute. ``blocks`` has the bytes, shape ``(tokens, 2)``, and ``widths`` the number of bytes of each
    token. ``counts`` is the number of tokens per row, None if each row has one.

    ``clean`` is True if the bytes of a block beyond its width are zero, so that another token can be appended
    within the block.
    """

    blocks: Words
    widths: Longs
    counts: Longs | None = None
    clean: bool = False

    @classmethod
    def none(cls, count: int) -> _Tokens:
        """Return ``count`` empty rows of tokens."""
        return cls(np.empty((0, 2), np.uint64), np.empty(0, np.int64), np.zeros(count, np.int64))

    def row_counts(self) -> Longs:
        """Return the number of tokens in each row."""
        return np.ones(len(self.widths), np.int64) if self.counts is None else self.counts

    def row_bytes(self) -> Longs:
        """Return the number of bytes in each row."""
        return self.widths if self.counts is None else _segment_sums(self.widths, self.counts)

    def grouped(self, offsets: Longs) -> _Tokens:
        """Return the same tokens with each range of rows ``offsets[i]:offsets[i + 1]`` merged into one
        row.
        """
        return _Tokens(self.blocks, self.widths, _segment_sums(self.row_counts(), np.diff(offsets)))

    def only_in(self, rows: Longs, count: int) -> _Tokens:
        """Return ``count`` rows: the existing rows at the positions ``rows``, all others empty."""
        counts = np.zeros(count, np.int64)
        counts[rows] = self.row_counts()
        return _Tokens(self.blocks, self.widths, counts)


def _segment_sums(values: Longs, counts: Longs) -> Longs:
    running = offsets_of(values)
    return np.diff(running[offsets_of(counts)])


def varint_widths(values: Words) -> Longs:
    """Return the number of bytes of each value as a varint."""
    widths = np.ones(values.shape, np.int64)
    largest = int(values.max()) if values.size else 0
    for bits in range(7, 64, 7):
        if largest >> bits == 0:
            break
        widths += values >= np.uint64(1 << bits)
    return widths


def _varints(
    values: Words, tag: Words | int | None = None, *, keep: NDArray[np.bool_] | None = None
) -> _Tokens:
    """Encode each value as one token: its tag, then the value as a varint. ``tag`` has the one or two bytes
    of the tag as a little-endian integer, for all rows or one per row. None writes no tag.

    Rows for which ``keep`` is False get an empty token.
    """
    widths = varint_widths(values)
    if not len(values) or int(values.max()) < 0x80:
        low, high = values, np.zeros(len(values), np.uint64)
    else:
        stop = (widths - 1).view(np.uint64) * _EIGHT
        quads = (values & np.uint64(0x000000000FFFFFFF)) | (
            (values & np.uint64(0x00FFFFFFF0000000)) << np.uint64(4)
        )
        pairs = (quads & np.uint64(0x00003FFF00003FFF)) | (
            (quads & np.uint64(0x0FFFC0000FFFC000)) << np.uint64(2)
        )
        low = (
            (pairs & np.uint64(0x007F007F007F007F))
            | ((pairs & np.uint64(0x3F803F803F803F80)) << np.uint64(1))
        ) | (_CONTINUE & ((_ONE << stop) - _ONE))
        high = np.zeros(len(values), np.uint64)
        long = np.flatnonzero(widths > 8)
        top = values[long] >> np.uint64(56)
        high[long] = (top & np.uint64(0x7F)) | np.where(widths[long] == 10, np.uint64(0x180), np.uint64(0))
    return _tagged(low, high, widths, tag, keep)


def _tagged(
    low: Words, high: Words, widths: Longs, tag: Words | int | None, keep: NDArray[np.bool_] | None
) -> _Tokens:
    """Return tokens of a tag followed by the ``widths`` bytes in ``low`` and ``high``."""
    blocks = np.empty((len(low), 2), np.uint64)
    if tag is None:
        blocks[:, 0], blocks[:, 1] = low, high
    else:
        tags = np.asarray(tag, np.uint64)
        size = 1 + (tags >= 0x100)
        shift = size.astype(np.uint64) * _EIGHT
        blocks[:, 0] = tags | (low << shift)
        blocks[:, 1] = (high << shift) | (low >> (_WORD - shift))
        widths = widths + size
    if keep is None:
        return _Tokens(blocks, widths, clean=True)
    return _Tokens(blocks * keep[:, None], widths * keep, clean=True)


def _spans(window: ByteWindow, start: Longs, length: Longs) -> _Tokens:
    """Return the tokens (pieces of up to 16 bytes) of the bytes at the given spans."""
    counts = (length + (BLOCK - 1)) >> 4
    if len(counts) and int(counts.max()) == 1 and int(counts.min()) == 1:
        return _Tokens(_blocks_at(window, start), length)
    first = np.cumsum(counts) - counts
    total = int(counts.sum())
    source = np.repeat(start - (first << 4), counts) + (np.arange(total, dtype=np.int64) << 4)
    widths = np.full(total, BLOCK, np.int64)
    filled = np.flatnonzero(counts)
    widths[first[filled] + counts[filled] - 1] = length[filled] - ((counts[filled] - 1) << 4)
    return _Tokens(_blocks_at(window, source), widths, counts)


def _blocks_at(window: ByteWindow, at: Longs) -> Words:
    return window.blocks[at].view(np.uint64).reshape(-1, 2)


def rows(content: ByteRows) -> _Tokens:
    """Return the tokens (pieces of up to 16 bytes) of the given byte rows."""
    return _spans(
        ByteWindow.holding(content.data), content.offsets[:-1] - content.offsets[0], content.lengths
    )


def delimited(tag: int | None, content: Sequence[_Tokens], *, keep_empty: bool) -> list[_Tokens]:
    """Encode a length-delimited field of each row. Return its tokens: the tag, the length of the row's
    ``content``, and the content. ``tag`` None writes no tag.

    Rows without content are omitted unless ``keep_empty``.
    """
    size = content[0].row_bytes()
    for part in content[1:]:
        size = size + part.row_bytes()
    head = _varints(size.view(np.uint64), tag, keep=None if keep_empty else size > 0)
    return [head, *content]


def join(parts: Sequence[_Tokens]) -> _Tokens:
    """Concatenate row by row: row ``i`` of the result consists of row ``i`` of each part, in order."""
    present = _fused([part for part in parts if len(part.widths)])
    if len(present) < 2:
        return present[0] if present else parts[0]
    if all(part.counts is None for part in present):
        single_blocks = np.stack([part.blocks for part in present], axis=1)
        single_widths = np.stack([part.widths for part in present], axis=1)
        counts = np.full(len(single_widths), len(present), np.int64)
        return _Tokens(single_blocks.reshape(-1, 2), single_widths.reshape(-1), counts)
    counts = np.zeros(len(present[0].row_counts()), np.int64)
    for part in present:
        counts += 1 if part.counts is None else part.counts
    ends = np.cumsum(counts)
    position, total = ends - counts, int(ends[-1])
    blocks = np.empty(total, _BLOCK_TYPE)
    widths = np.empty(total, np.int64)
    for part in present:
        into = position
        if part.counts is None:
            position = position + 1
        else:
            own = np.cumsum(part.counts) - part.counts
            into = np.repeat(position - own, part.counts) + np.arange(len(part.widths), dtype=np.int64)
            position = position + part.counts
        blocks[into] = part.blocks.view(_BLOCK_TYPE).reshape(-1)
        widths[into] = part.widths
    return _Tokens(blocks.view(np.uint64).reshape(-1, 2), widths, counts)


def _fused(parts: Sequence[_Tokens]) -> list[_Tokens]:
    """Merge neighbouring parts, whose rows are single tokens, if both tokens fit into one block."""
    fused: list[_Tokens] = []
    for part in parts:
        last = fused[-1] if fused else None
        single = last is not None and last.counts is None and part.counts is None and last.clean
        if last is not None and single and int(last.widths.max()) + int(part.widths.max()) <= BLOCK:
            # A shift by 64 or more, or by a negative number (a large unsigned one), gives 0 in NumPy.
            shift = last.widths.view(np.uint64) * _EIGHT
            low, high = part.blocks[:, 0], part.blocks[:, 1]
            blocks = np.empty_like(last.blocks)
            blocks[:, 0] = last.blocks[:, 0] | (low << shift)
            blocks[:, 1] = (
                last.blocks[:, 1] | (high << shift) | (low >> (_WORD - shift)) | (low << (shift - _WORD))
            )
            fused[-1] = _Tokens(blocks, last.widths + part.widths, clean=part.clean)
        else:
            fused.append(part)
    return fused


def render(tokens: _Tokens) -> Bytes:
    """Return the bytes of all token rows, concatenated."""
    ends = np.cumsum(tokens.widths)
    total = int(ends[-1]) if len(ends) else 0
    out = np.empty(total + BLOCK, np.uint8)
    target: NDArray[np.void] = np.ndarray((total + 1,), _BLOCK_TYPE, out.data, strides=(1,))
    # Blocks are written in ascending order: each overwrites the excess of the one before.
    target[ends - tokens.widths] = tokens.blocks.view(_BLOCK_TYPE).reshape(-1)
    return out[:total]
