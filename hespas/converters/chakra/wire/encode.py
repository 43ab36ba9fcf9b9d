"""Columns to Chakra trace files, byte for byte what a protobuf serialiser writes for the same messages:
fields ascending, proto3 defaults left out, integer lists packed.

Works on a few thousand nodes at a time, so that memory does not grow with the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.wire import (
    BLOCK,
    AttributeColumns,
    ByteRows,
    Bytes,
    EtColumns,
    IoColumns,
    Longs,
    Window,
    Words,
    offsets_of,
)
from hespas.files.wire import encode_varint, tag
from hespas.graph.errors import InvariantError
from hespas.schemas.chakra.tables import VALUE_FIELDS, AttributeField, NodeField, WireType

__all__ = [
    "delimited",
    "encode_chunks",
    "encode_metadata",
    "encode_node_chunks",
    "join",
    "render",
    "rows",
    "varint_widths",
]

_CHUNK_NODES = 4096


def _tag(number: int, wire: WireType) -> int:
    """A tag as the number whose little-endian bytes it is."""
    return int.from_bytes(tag(number, wire), "little")


def encode_chunks(columns: EtColumns, chunk_nodes: int = _CHUNK_NODES) -> Iterator[bytes | memoryview[int]]:
    """A whole file, piece by piece: the metadata frame, then the nodes in order."""
    yield encode_metadata(columns)
    yield from encode_node_chunks(columns, chunk_nodes)


def encode_node_chunks(columns: EtColumns, chunk_nodes: int = _CHUNK_NODES) -> Iterator[memoryview[int]]:
    """Yield the frames of the nodes, in order."""
    for start in range(0, len(columns), chunk_nodes):
        yield _encode_nodes(columns.part(start, min(start + chunk_nodes, len(columns)))).data


def encode_metadata(columns: EtColumns) -> bytes:
    """The first frame of the file."""
    version = rows(ByteRows.from_text([columns.version]))
    message = [
        *delimited(_tag(1, WireType.BYTES), [version], keep_empty=False),
        _attributes(columns.metadata, _tag(2, WireType.BYTES)),
    ]
    return render(join(delimited(None, message, keep_empty=True))).tobytes()


def _encode_nodes(columns: EtColumns) -> Bytes:
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


def _scalars(number: int, values: Words) -> _Tokens:
    """A singular integer field; zeros are left out."""
    if not values.any():
        return _Tokens.none(len(values))
    keep = values != 0
    return _varints(values, _tag(number, WireType.VARINT), keep=None if keep.all() else keep)


def _packed(number: int, offsets: Longs, values: Words) -> list[_Tokens]:
    """A repeated integer field; empty lists are left out."""
    counts = np.diff(offsets)
    if not len(values):
        return [_Tokens.none(len(counts))]
    entries = _varints(values)
    content = _Tokens(entries.blocks, entries.widths, counts)
    return delimited(_tag(number, WireType.BYTES), [content], keep_empty=False)


def _io(number: int, columns: IoColumns, count: int) -> _Tokens:
    """``IOInfo`` messages of the nodes that have one."""
    if not len(columns):
        return _Tokens.none(count)
    texts: list[_Tokens] = []
    for place, text in enumerate(columns.texts, start=1):
        texts += delimited(_tag(place, WireType.BYTES), [rows(text)], keep_empty=False)
    return join(delimited(_tag(number, WireType.BYTES), texts, keep_empty=True)).only_in(columns.node, count)


def _attributes(columns: AttributeColumns, number_tag: int) -> _Tokens:
    """All attributes, grouped by owner."""
    if not len(columns):
        return _Tokens.none(len(columns.offsets) - 1)
    message = [_names(columns), *_docs(columns), *_values(columns)]
    return join(delimited(number_tag, message, keep_empty=True)).grouped(columns.offsets)


def _names(columns: AttributeColumns) -> _Tokens:
    """The name field of each attribute, copied from one encoding per distinct name."""
    head = tag(AttributeField.NAME, WireType.BYTES)
    encoded = [name.encode() for name in columns.keys]
    prefixes = ByteRows.from_rows(
        [head + encode_varint(len(name)) + name if name else b"" for name in encoded]
    )
    window = Window.holding(prefixes.data)
    return _spans(window, prefixes.offsets[columns.key], prefixes.lengths[columns.key])


def _docs(columns: AttributeColumns) -> list[_Tokens]:
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


def _values(columns: AttributeColumns) -> list[_Tokens]:
    """The value of each attribute, whatever its type; a value is written even when it is zero."""
    if int(columns.field.max()) >= len(_VALUE_TAGS):
        raise InvariantError("an attribute has a value field that the schema does not know")
    tags = _VALUE_TAGS.take(columns.field)
    wires = _VALUE_WIRES.take(columns.field)
    has = columns.field > 0
    tokens = _varints(_raw_varints(columns, wires == WireType.BYTES), tags, keep=None if has.all() else has)
    for wire, size in ((WireType.FIXED64, 8), (WireType.FIXED32, 4)):
        at = np.flatnonzero(wires == wire)
        if len(at):
            part = _fixed(columns.bits[at], size, tags[at])
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


# Writing many messages at once: fields become tokens of at most 16 bytes, which are then set side by side.
#
# A token is a block of 16 bytes of which the first ``width`` count. Every field of every message is one or
# more tokens; joining fields interleaves their tokens, and rendering writes all blocks in ascending order,
# each overwriting what the one before wrote beyond its width.

_BLOCK_TYPE = np.dtype((np.void, BLOCK))
_CONTINUE = np.uint64(0x8080808080808080)
_ONE, _EIGHT, _WORD = np.uint64(1), np.uint64(8), np.uint64(64)


class _Tokens(NamedTuple):
    """Tokens in row order: ``blocks`` has shape ``(tokens, 2)``; ``counts`` per row, None when one each.

    ``clean`` blocks are zero beyond their width, so that another token can be fused onto them.
    """

    blocks: Words
    widths: Longs
    counts: Longs | None = None
    clean: bool = False

    @classmethod
    def none(cls, count: int) -> _Tokens:
        """``count`` empty rows."""
        return cls(np.empty((0, 2), np.uint64), np.empty(0, np.int64), np.zeros(count, np.int64))

    def row_counts(self) -> Longs:
        """Tokens in each row."""
        return np.ones(len(self.widths), np.int64) if self.counts is None else self.counts

    def row_bytes(self) -> Longs:
        """Bytes in each row."""
        return self.widths if self.counts is None else _segment_sums(self.widths, self.counts)

    def grouped(self, offsets: Longs) -> _Tokens:
        """The same tokens with rows ``offsets[i]:offsets[i + 1]`` made one."""
        return _Tokens(self.blocks, self.widths, _segment_sums(self.row_counts(), np.diff(offsets)))

    def only_in(self, rows: Longs, count: int) -> _Tokens:
        """The same tokens as rows ``rows`` of ``count``; all other rows are empty."""
        counts = np.zeros(count, np.int64)
        counts[rows] = self.row_counts()
        return _Tokens(self.blocks, self.widths, counts)


def _segment_sums(values: Longs, counts: Longs) -> Longs:
    running = offsets_of(values)
    return np.diff(running[offsets_of(counts)])


def varint_widths(values: Words) -> Longs:
    """Bytes of each varint."""
    widths = np.ones(len(values), np.int64)
    largest = int(values.max()) if len(values) else 0
    for bits in range(7, 64, 7):
        if largest >> bits == 0:
            break
        widths += values >= np.uint64(1 << bits)
    return widths


def _spread_sevens(value: Words) -> Words:
    """The low 56 bits as eight groups of seven, one in each byte."""
    quads = (value & np.uint64(0x000000000FFFFFFF)) | (
        (value & np.uint64(0x00FFFFFFF0000000)) << np.uint64(4)
    )
    pairs = (quads & np.uint64(0x00003FFF00003FFF)) | (
        (quads & np.uint64(0x0FFFC0000FFFC000)) << np.uint64(2)
    )
    return (pairs & np.uint64(0x007F007F007F007F)) | ((pairs & np.uint64(0x3F803F803F803F80)) << np.uint64(1))


def _varints(
    values: Words, tag: Words | int | None = None, *, keep: NDArray[np.bool_] | None = None
) -> _Tokens:
    """One token per value: the tag (a number whose bytes it is, or one per row), then the value as a varint.

    Where ``keep`` is false the token is empty.
    """
    widths = varint_widths(values)
    if not len(values) or int(values.max()) < 0x80:
        low, high = values, np.zeros(len(values), np.uint64)
    else:
        stop = (widths - 1).view(np.uint64) * _EIGHT
        low = _spread_sevens(values) | (_CONTINUE & ((_ONE << stop) - _ONE))
        high = np.zeros(len(values), np.uint64)
        long = np.flatnonzero(widths > 8)
        top = values[long] >> np.uint64(56)
        high[long] = (top & np.uint64(0x7F)) | np.where(widths[long] == 10, np.uint64(0x180), np.uint64(0))
    return _tagged(low, high, widths, tag, keep)


def _fixed(bits: Words, size: int, tag: Words) -> _Tokens:
    """One token per value: the tag, then ``size`` bytes of ``bits``."""
    return _tagged(bits, np.zeros(len(bits), np.uint64), np.full(len(bits), size, np.int64), tag, None)


def _tagged(
    low: Words, high: Words, widths: Longs, tag: Words | int | None, keep: NDArray[np.bool_] | None
) -> _Tokens:
    """Put the bytes of the tag in front."""
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


def _spans(window: Window, start: Longs, length: Longs) -> _Tokens:
    """The bytes at the given spans, one token per started 16 bytes."""
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


def _blocks_at(window: Window, at: Longs) -> Words:
    return window.blocks[at].view(np.uint64).reshape(-1, 2)


def rows(content: ByteRows) -> _Tokens:
    """The bytes of each row."""
    return _spans(Window.holding(content.data), content.offsets[:-1] - content.offsets[0], content.lengths)


def delimited(tag: int | None, content: Sequence[_Tokens], *, keep_empty: bool) -> list[_Tokens]:
    """Length-delimited fields: the tag, the length of the row's content, the content.

    Rows without content are left out altogether unless ``keep_empty``.
    """
    size = content[0].row_bytes()
    for part in content[1:]:
        size = size + part.row_bytes()
    head = _varints(size.view(np.uint64), tag, keep=None if keep_empty else size > 0)
    return [head, *content]


def join(parts: Sequence[_Tokens]) -> _Tokens:
    """Rows side by side: row ``i`` is row ``i`` of each part, in order."""
    present = _fused([part for part in parts if len(part.widths)])
    if len(present) < 2:
        return present[0] if present else parts[0]
    if all(part.counts is None for part in present):
        return _interleaved(present)
    counts = np.zeros(len(present[0].row_counts()), np.int64)
    for part in present:
        counts += 1 if part.counts is None else part.counts
    ends = np.cumsum(counts)
    place, total = ends - counts, int(ends[-1])
    blocks = np.empty(total, _BLOCK_TYPE)
    widths = np.empty(total, np.int64)
    for part in present:
        into = place
        if part.counts is None:
            place = place + 1
        else:
            own = np.cumsum(part.counts) - part.counts
            into = np.repeat(place - own, part.counts) + np.arange(len(part.widths), dtype=np.int64)
            place = place + part.counts
        blocks[into] = part.blocks.view(_BLOCK_TYPE).reshape(-1)
        widths[into] = part.widths
    return _Tokens(blocks.view(np.uint64).reshape(-1, 2), widths, counts)


def _interleaved(parts: Sequence[_Tokens]) -> _Tokens:
    """Parts of one token a row each."""
    rows = len(parts[0].widths)
    blocks = np.empty((rows, len(parts), 2), np.uint64)
    widths = np.empty((rows, len(parts)), np.int64)
    for place, part in enumerate(parts):
        blocks[:, place] = part.blocks
        widths[:, place] = part.widths
    counts = np.full(rows, len(parts), np.int64)
    return _Tokens(blocks.reshape(-1, 2), widths.reshape(-1), counts)


def _fused(parts: Sequence[_Tokens]) -> list[_Tokens]:
    """Make one of neighbours that have a token a row each and fit into one block."""
    fused: list[_Tokens] = []
    for part in parts:
        last = fused[-1] if fused else None
        if last is not None and _fit(last, part):
            fused[-1] = _fuse(last, part)
        else:
            fused.append(part)
    return fused


def _fit(first: _Tokens, second: _Tokens) -> bool:
    """Whether each row's two tokens can share a block."""
    if first.counts is not None or second.counts is not None or not first.clean:
        return False
    return int(first.widths.max()) + int(second.widths.max()) <= BLOCK


def _fuse(first: _Tokens, second: _Tokens) -> _Tokens:
    """The bytes of ``second`` behind those of ``first``, which is clean."""
    # A shift by 64 or more (and by a negative number, which is a large unsigned one) gives 0 in NumPy.
    shift = first.widths.view(np.uint64) * _EIGHT
    low, high = second.blocks[:, 0], second.blocks[:, 1]
    blocks = np.empty_like(first.blocks)
    blocks[:, 0] = first.blocks[:, 0] | (low << shift)
    blocks[:, 1] = first.blocks[:, 1] | (high << shift) | (low >> (_WORD - shift)) | (low << (shift - _WORD))
    return _Tokens(blocks, first.widths + second.widths, clean=second.clean)


def render(tokens: _Tokens) -> Bytes:
    """All rows one behind the other."""
    ends = np.cumsum(tokens.widths)
    total = int(ends[-1]) if len(ends) else 0
    out = np.empty(total + BLOCK, np.uint8)
    target: NDArray[np.void] = np.ndarray((total + 1,), _BLOCK_TYPE, out.data, strides=(1,))
    # Ascending order: what a block writes beyond its width the next one overwrites.
    target[ends - tokens.widths] = tokens.blocks.view(_BLOCK_TYPE).reshape(-1)
    return out[:total]
