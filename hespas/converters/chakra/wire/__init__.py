"""Arrays for reading and writing traces: byte windows, copies of byte spans, varints, and the columns of a
trace.

A :class:`ByteWindow` has padding after its content, so that eight or sixteen bytes can be loaded at any
position inside. Varints are decoded many at a time (https://protobuf.dev/programming-guides/encoding/);
malformed ones are returned as a mask and never raise. The columns hold the values of the file without
interpretation. One :class:`EtColumns` holds a whole file, or a chunk of one, in a few flat arrays (about 60
bytes per node plus its name, and 13 bytes per attribute).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.schemas.chakra.tables import AttributeField

__all__ = [
    "BLOCK",
    "SLACK",
    "AttributeColumns",
    "Bools",
    "ByteRows",
    "ByteWindow",
    "Bytes",
    "EtColumns",
    "FileUnit",
    "IoColumns",
    "Longs",
    "Words",
    "copy_spans",
    "equal_rows",
    "has_payload",
    "is_text",
    "node_numbers",
    "not_text",
    "offsets_of",
    "packed_varints",
    "read_varints",
]

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Longs = NDArray[np.int64]
FileUnit = Literal["byte", "line"]
"""Unit of positions in a file."""

SLACK = 64
"""Readable bytes that a window has after its content."""

BLOCK = 16
"""Bytes that :func:`copy_spans` moves at once."""

_BLOCK_TYPE = np.dtype((np.void, BLOCK))


def offsets_of(lengths: NDArray[np.integer]) -> Longs:
    """Return row offsets, shape ``(rows + 1,)``, from each row's length."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


class ByteWindow(NamedTuple):
    """Byte buffer with :data:`SLACK` bytes of padding, for vectorised reads at any position. ``u8`` has its
    bytes. ``words[i]`` has the 8 bytes from position ``i`` on (little-endian), and ``blocks[i]`` the 16
    bytes.
    """

    u8: Bytes
    words: Words
    blocks: NDArray[np.void]

    @classmethod
    def over(cls, padded: Bytes) -> ByteWindow:
        """Return a window over an array whose last :data:`SLACK` bytes are padding."""
        size = len(padded) - SLACK
        words: Words = np.ndarray((size + SLACK - 8,), "<u8", padded.data, strides=(1,))
        blocks: NDArray[np.void] = np.ndarray((size + SLACK - BLOCK,), _BLOCK_TYPE, padded.data, strides=(1,))
        return cls(padded, words, blocks)

    @classmethod
    def holding(cls, data: Bytes) -> ByteWindow:
        """Return a window over a padded copy of ``data``."""
        padded = np.empty(len(data) + SLACK, np.uint8)
        padded[: len(data)] = data
        padded[len(data) :] = 0
        return cls.over(padded)


def copy_spans(window: ByteWindow, start: Longs, length: Longs) -> tuple[Bytes, Longs]:
    """Return the bytes of all spans, concatenated, and the offsets of the spans in them, shape ``(spans +
    1,)``.

    The spans must lie within the window's content. Bytes are copied in blocks of 16.
    """
    offsets = offsets_of(length)
    out = np.empty(int(offsets[-1]) + BLOCK, np.uint8)
    target: NDArray[np.void] = np.ndarray((int(offsets[-1]) + 1,), _BLOCK_TYPE, out.data, strides=(1,))
    blocks = (length + (BLOCK - 1)) >> 4
    source, into = start, offsets[:-1]
    if len(blocks) and (int(blocks.max()) > 1 or int(blocks.min()) == 0):
        first = np.cumsum(blocks) - blocks
        steps = np.arange(int(blocks.sum()), dtype=np.int64) << 4
        source = np.repeat(start - (first << 4), blocks) + steps
        into = np.repeat(offsets[:-1] - (first << 4), blocks) + steps
    # Blocks are written in ascending order: each overwrites the excess of the one before.
    target[into] = window.blocks[source]
    return out[: int(offsets[-1])], offsets


_STOPS = np.uint64(0x8080808080808080)
_SEVENS = np.uint64(0x7F7F7F7F7F7F7F7F)
_WIDTH_OF_STOP = np.uint64(0x0102030405060708)
_ONE = np.uint64(1)


def read_varints(window: ByteWindow, at: Longs) -> tuple[Words, Longs, Bools | None]:
    """Return the varint at each position: values, the positions after them, and a mask of varints of more
    than ten bytes.

    The mask is ``None`` if no varint is that long. Positions must lie within the window's content or at most
    ``SLACK - 11`` after it.
    """
    first = window.u8.take(at)
    if not len(first) or int(first.max()) < 0x80:
        return first.astype(np.uint64), at + 1, None
    word = window.words[at]
    stops = ~word & _STOPS
    lowest = stops & (~stops + _ONE)
    mask = (lowest << _ONE) - _ONE
    groups = word & mask & _SEVENS
    pairs = (groups & np.uint64(0x007F007F007F007F)) | (
        (groups & np.uint64(0x7F007F007F007F00)) >> np.uint64(1)
    )
    quads = (pairs & np.uint64(0x00003FFF00003FFF)) | (
        (pairs & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    )
    value = (quads & np.uint64(0x000000000FFFFFFF)) | (
        (quads & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)
    )
    width = ((lowest >> np.uint64(7)) * _WIDTH_OF_STOP) >> np.uint64(56)
    behind = at + width.view(np.int64)
    long = np.flatnonzero(stops == 0)
    return (value, behind, None) if not len(long) else _with_long(window, at, value, behind, long)


def _with_long(
    window: ByteWindow, at: Longs, value: Words, behind: Longs, long: Longs
) -> tuple[Words, Longs, Bools | None]:
    """Complete the varints ``long`` (indices) of nine or more bytes, of which ``value`` has the first eight.
    Return the values, the positions after them, and a mask of varints of more than ten bytes.
    """
    ninth = window.u8[at[long] + 8].astype(np.uint64)
    tenth = window.u8[at[long] + 9].astype(np.uint64)
    goes_on = ninth >= 0x80
    high = (ninth & np.uint64(0x7F)) << np.uint64(56)
    high |= np.where(goes_on, (tenth & _ONE) << np.uint64(63), np.uint64(0))
    value[long] |= high
    behind[long] = at[long] + 9 + goes_on
    endless = goes_on & (tenth >= 0x80)
    if not endless.any():
        return value, behind, None
    bad = np.zeros(len(at), np.bool_)
    bad[long] = endless
    return value, behind, bad


def packed_varints(window: ByteWindow, start: Longs, length: Longs) -> tuple[Words, Longs, Bools | None]:
    """Decode packed lists of varints, one list per span. Return the values of all lists in order, the offsets
    at which each list begins in them, and a mask of malformed lists.
    """
    data, bounds = copy_spans(window, start, length)
    if not len(data):
        return np.empty(0, np.uint64), np.broadcast_to(np.int64(0), (len(bounds),)), None
    if int(data.max()) < 0x80:
        return data.astype(np.uint64), bounds, None
    stops = data < 0x80
    counted = np.zeros(len(data) + 1, np.int64)
    np.cumsum(stops, out=counted[1:])
    offsets = counted[bounds]
    cut = (length > 0) & ~stops[np.maximum(bounds[1:] - 1, 0)]
    last = np.flatnonzero(stops)
    first = np.empty_like(last)
    first[:1] = 0
    first[1:] = last[:-1] + 1
    values, _, endless = read_varints(ByteWindow.holding(data), first)
    if endless is not None:
        cut[np.searchsorted(offsets, np.flatnonzero(endless), side="right") - 1] = True
    return values, offsets, cut if cut.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class ByteRows:
    """Column of byte strings in one buffer; row ``i`` is ``data[offsets[i]:offsets[i + 1]]``."""

    data: Bytes
    offsets: Longs

    @classmethod
    def from_rows(cls, rows: Sequence[bytes]) -> ByteRows:
        """Return one row per byte string."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.frombuffer(b"".join(rows), np.uint8), offsets_of(lengths))

    @classmethod
    def from_text(cls, rows: Iterable[str]) -> ByteRows:
        """Return one row per string, as UTF-8."""
        return cls.from_rows([row.encode() for row in rows])

    @classmethod
    def blank(cls, rows: int) -> ByteRows:
        """Return ``rows`` empty rows."""
        return cls(np.empty(0, np.uint8), np.broadcast_to(np.int64(0), (rows + 1,)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        data = self.data.tobytes()
        bounds: list[int] = self.offsets.tolist()
        return (data[start:end] for start, end in pairwise(bounds))

    def text(self, row: int) -> str:
        """Return one row as text."""
        return self[row].decode()

    @property
    def lengths(self) -> Longs:
        """Length of each row in bytes."""
        return np.diff(self.offsets)

    def joined(self, other: ByteRows) -> ByteRows:
        """Return these rows followed by the rows of ``other``."""
        data = np.concatenate([self.data, other.data])
        return ByteRows(data, np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]))

    def distinct(self) -> tuple[list[bytes], Longs]:
        """Return the distinct rows in order of first appearance, and for each row the index of its value."""
        numbers: dict[bytes, int] = {}
        index = np.fromiter((numbers.setdefault(row, len(numbers)) for row in self), np.int64, len(self))
        return list(numbers), index

    def take(self, rows: NDArray[np.integer]) -> ByteRows:
        """Return the given rows, copied."""
        start = self.offsets[rows]
        return ByteRows(*copy_spans(ByteWindow.holding(self.data), start, self.offsets[rows + 1] - start))


def not_text(rows: ByteRows) -> Bools:
    """Return a mask of the rows that are not UTF-8."""
    bad = np.zeros(len(rows), np.bool_)
    if not len(rows.data) or int(rows.data.max()) < 0x80:
        return bad
    filled = np.flatnonzero(rows.lengths)
    inside = (rows.data[rows.offsets[filled]] & 0xC0) == 0x80
    if not inside.any() and is_text(rows.data.tobytes()):
        return bad
    for row in filled.tolist():
        bad[row] = not is_text(rows[row])
    return bad


def is_text(data: bytes) -> bool:
    """Return True if the bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def equal_rows(matrix: NDArray[Any]) -> Iterator[tuple[bytes, Longs]]:
    """Yield the bytes of each distinct row of a matrix with the numbers of the rows that are equal to it, in
    order of first appearance.
    """
    data = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1)
    bounds = np.arange(len(matrix) + 1, dtype=np.int64) * (matrix.shape[1] * matrix.itemsize)
    distinct, which = ByteRows(data, bounds).distinct()
    for number, row in enumerate(distinct):
        yield row, np.flatnonzero(which == number)


def has_payload(field: NDArray[np.integer]) -> Bools:
    """Return a mask of the attribute fields whose values have any length: strings, bytes and lists."""
    is_list: Bools = (field >= AttributeField.DOUBLE_LIST) & (field & 1 == 0)
    return is_list | (field >= AttributeField.BOOL_LIST)


@dataclass(frozen=True, slots=True, eq=False)
class AttributeColumns:
    """Attributes of many owners (nodes, or the file). Owner ``i`` has rows ``offsets[i]:offsets[i + 1]``.

    ``key`` is the index of the attribute's name in ``keys``, and ``field`` the protobuf field number of its
    value (0: no value). ``bits`` holds a number: an integer in two's complement, 0 or 1 for a bool, or the
    raw 32 or 64 bits of a float or double. For strings, bytes and lists it holds their row in ``payload``; a
    list is stored as an encoded message. ``doc_row`` lists the rows with a doc string, and ``doc`` these
    strings.
    """

    keys: tuple[str, ...]
    offsets: Longs
    key: NDArray[np.int32]
    field: Bytes
    bits: Words
    payload: ByteRows
    doc_row: Longs
    doc: ByteRows

    @classmethod
    def empty(cls, owners: int) -> AttributeColumns:
        """Return columns in which none of the ``owners`` has an attribute."""
        return cls(
            (),
            np.broadcast_to(np.int64(0), (owners + 1,)),
            np.empty(0, np.int32),
            np.empty(0, np.uint8),
            np.empty(0, np.uint64),
            ByteRows.blank(0),
            np.empty(0, np.int64),
            ByteRows.blank(0),
        )

    def __len__(self) -> int:
        return len(self.key)

    @property
    def owner(self) -> Longs:
        """Return the owner (node) of each attribute row."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int64), np.diff(self.offsets))

    @property
    def has_payload(self) -> NDArray[np.bool_]:
        """Return a mask of the attribute rows that are strings, bytes or lists."""
        return has_payload(self.field)


@dataclass(frozen=True, slots=True, eq=False)
class IoColumns:
    """Inputs (or outputs) of nodes, as the three texts of the message ``IOInfo``. ``node`` has the nodes that
    have such a message, ascending.
    """

    node: Longs
    values: ByteRows
    shapes: ByteRows
    types: ByteRows

    @classmethod
    def empty(cls) -> IoColumns:
        """Return columns without nodes."""
        return cls(np.empty(0, np.int64), ByteRows.blank(0), ByteRows.blank(0), ByteRows.blank(0))

    def __len__(self) -> int:
        return len(self.node)

    @property
    def texts(self) -> tuple[ByteRows, ByteRows, ByteRows]:
        """Return the columns of values, shapes and types, in the order of their protobuf fields."""
        return self.values, self.shapes, self.types

    def take(self, rows: Longs) -> IoColumns:
        """Return the given rows."""
        return IoColumns(self.node[rows], *(text.take(rows) for text in self.texts))

    def joined(self, other: IoColumns) -> IoColumns:
        """Return the rows of both, by node."""
        node = np.concatenate([self.node, other.node])
        both = (mine.joined(theirs) for mine, theirs in zip(self.texts, other.texts, strict=True))
        return IoColumns(node, *both).take(np.argsort(node, kind="stable"))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EtColumns:
    """Content of one trace file, in columns of shape ``(nodes,)``. Dependencies are node ids in file order.
    Node ``i`` has the control dependencies ``ctrl_deps[ctrl_offsets[i]:ctrl_offsets[i + 1]]``, and data
    dependencies accordingly.

    A writer ignores the following fields. ``position`` is the start of each node in the (decompressed) file,
    in ``unit``. ``schema`` is the schema version of the file if it differs from the label. ``is_cut`` is True
    if nodes are missing because the file is truncated. ``run_ns`` are times that an old schema states without
    a unit and the user declares to be ns; ``duration_micros`` is then 0.
    """

    version: str
    metadata: AttributeColumns
    id: Words
    name: ByteRows
    type: NDArray[np.int32]
    ctrl_offsets: Longs
    ctrl_deps: Words
    data_offsets: Longs
    data_deps: Words
    start_micros: Words
    duration_micros: Words
    inputs: IoColumns
    outputs: IoColumns
    attrs: AttributeColumns
    position: Longs
    unit: FileUnit = "byte"
    schema: str = ""
    is_cut: bool = False
    run_ns: Words | None = None

    @classmethod
    def empty(cls, attrs: AttributeColumns) -> EtColumns:
        """Return one node per owner of ``attrs`` with these attributes and no other content."""
        count = len(attrs.offsets) - 1
        nothing = np.zeros(count, np.uint64)
        offsets = np.zeros(count + 1, np.int64)
        return cls(
            version="",
            metadata=AttributeColumns.empty(1),
            id=nothing,
            name=ByteRows.blank(count),
            type=np.zeros(count, np.int32),
            ctrl_offsets=offsets,
            ctrl_deps=np.empty(0, np.uint64),
            data_offsets=offsets,
            data_deps=np.empty(0, np.uint64),
            start_micros=nothing,
            duration_micros=nothing,
            inputs=IoColumns.empty(),
            outputs=IoColumns.empty(),
            attrs=attrs,
            position=np.zeros(count, np.int64),
        )

    def __len__(self) -> int:
        return len(self.id)


def node_numbers(ids: Words, deps: Words) -> Longs:
    """Return the node number of each id in ``deps``, -1 for an unknown id. If nodes share an id, the last one
    counts.
    """
    count = np.uint64(len(ids))
    if np.array_equal(ids, np.arange(len(ids), dtype=np.uint64)):
        return np.where(deps < count, deps, np.uint64(0)).view(np.int64) - (deps >= count)
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    position = np.searchsorted(ordered, deps, side="right") - 1
    exists = (position >= 0) & (ordered[np.maximum(position, 0)] == deps)
    return np.where(exists, order[np.maximum(position, 0)], -1)
